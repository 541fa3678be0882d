"""
What Parser reads in the console output of other programs: an example of each line of the table in
doc/tracking.md, and numbers that are not metrics.
"""
import io
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tqdm import tqdm

import compare
import track
from engine.tracking.console import Parser, number

ROOT = Path(__file__).resolve().parents[1]


def rows_of(text, patterns=(), interval=0):
    parser = Parser(patterns, interval)
    rows = parser.feed(text, end=True)
    assert parser.error is None
    for a, b in zip(rows, rows[1:]):
        # A row with the iter of the last one has other metrics: W&B adds them to that row.
        assert a["iter"] < b["iter"] or a["iter"] == b["iter"] and not (
            {*a} - {"iter", "epoch"} & {*b} - {"iter", "epoch"}), (a, b)
    return rows


FORMATS = {  # name: (what is printed, its rows)
    "llm.c": ("""\
val loss 11.033154
step    1/1000 | loss 11.032358 (+nanz)| norm 22.1414 (+nanz)| lr 8.57e-07 | 2517.44 ms \
| -100.0% bf16 MFU | 208262 tok/s
step  100/1000 | loss 10.958507 (-0.12z)| norm nan (+nanz)| lr 1.71e-06 | 2507.23 ms \
| 40.1% bf16 MFU | 209110 tok/s
val loss 10.609911
""", [{"iter": 0, "loss/val": 11.033154},
      {"iter": 1, "loss/train": 11.032358, "grad/norm": 22.1414, "lr": 8.57e-07,
       "perf/iter_ms": 2517.44, "perf/tokens_per_sec": 208262},
      {"iter": 100, "loss/train": 10.958507, "grad/norm": "nan", "lr": 1.71e-06,
       "perf/iter_ms": 2507.23, "mfu": 40.1, "perf/tokens_per_sec": 209110},
      {"iter": 101, "loss/val": 10.609911}]),
    "llm.c in PyTorch": ("""\
val loss 10.993201
step    1/20 | train loss 5.270007 | norm 30.1234 | lr 1.00e-04 | (1234.56 ms | 829 tok/s)
step    2/20 | train loss 4.059707 | norm 16.8512 | lr 1.00e-04 | (1190.01 ms | 860 tok/s)
HellaSwag: 2567/10042 = 0.255626
""", [{"iter": 0, "loss/val": 10.993201},
      {"iter": 1, "loss/train": 5.270007, "grad/norm": 30.1234, "lr": 1e-4, "perf/iter_ms": 1234.56,
       "perf/tokens_per_sec": 829},
      {"iter": 2, "loss/train": 4.059707, "grad/norm": 16.8512, "lr": 1e-4, "perf/iter_ms": 1190.01,
       "perf/tokens_per_sec": 860}]),
    "llm.c on a CPU": ("""\
max_seq_len: 1024
val loss 5.325529
step 0: train loss 5.356189 (took 4127.2 ms)
step 1: train loss 4.301069 (took 4076.6 ms)
""", [{"iter": 0, "max_seq_len": 1024},
      {"iter": 0, "loss/val": 5.325529},
      {"iter": 0, "loss/train": 5.356189, "took": 4127.2},
      {"iter": 1, "loss/train": 4.301069, "took": 4076.6}]),
    "nanoGPT": ("""\
number of parameters: 10.65M
step 0: train loss 4.2874, val loss 4.2823
iter 0: loss 4.2664, time 31233.14ms, mfu -100.00%
iter 10: loss 3.2, time 12.3ms, mfu 12.34%
""", [{"iter": 0, "number_of_parameters": 10650000},
      {"iter": 0, "loss/train_eval": 4.2874, "loss/val": 4.2823},
      {"iter": 0, "loss/train": 4.2664, "program/time": 31233.14},
      {"iter": 10, "loss/train": 3.2, "program/time": 12.3, "mfu": 12.34}]),
    "modded-nanogpt": ("""\
step:0/1390 val_loss:10.8258 train_time:0ms step_avg:nanms
step:12/1390 train_time:1234ms step_avg:103.2ms
step:125/1750 val_loss:4.6362 train_time:12345ms step_avg:98.76ms
step:126/1750 train_time:12440ms step_avg:98.73ms
peak memory allocated: 30513 MiB reserved: 31658 MiB
""", [{"iter": 0, "loss/val": 10.8258, "time/train": 0, "step_avg": "nan"},
      {"iter": 12, "time/train": 1234, "step_avg": 103.2},
      {"iter": 125, "loss/val": 4.6362, "time/train": 12345, "step_avg": 98.76},
      {"iter": 126, "time/train": 12440, "step_avg": 98.73},
      {"iter": 127, "peak_memory_allocated": 30513, "reserved": 31658}]),
    "nanochat": ("""\
step 00012/21400 (0.06%) | loss: 8.123456 | lrm: 1.00 | dt: 1234.56ms | tok/sec: 425,123 \
| mfu: 45.12 | epoch: 1 | total time: 0.12m | eta: 9m
Step 00250 | Validation bpb: 1.1234
""", [{"iter": 12, "epoch": 1, "loss/train": 8.123456, "lrm": 1, "dt": 1234.56,
       "perf/tokens_per_sec": 425123, "mfu": 45.12, "total_time": 0.12},
      {"iter": 250, "epoch": 1, "bpb/val": 1.1234}]),
    "Trainer, before version 5": ("""\
{'loss': 2.3841, 'grad_norm': 1.25, 'learning_rate': 4.5e-05, 'epoch': 0.1}
{'eval_loss': 2.1, 'eval_runtime': 3.2, 'epoch': 1.0}
{'train_runtime': 12.3, 'train_loss': 2.1, 'epoch': 1.0}
""", [{"iter": 1, "epoch": 0.1, "loss/train": 2.3841, "grad/norm": 1.25, "lr": 4.5e-05},
      {"iter": 2, "epoch": 1, "loss/val": 2.1, "eval_runtime": 3.2},
      {"iter": 3, "epoch": 1, "runtime/train": 12.3, "loss/train_mean": 2.1}]),
    "Trainer, with its bars": (
        "  0%|          | 0/500 [00:00<?, ?it/s]\r  2%|2         | 10/500 [00:01<01:00, 8.0it/s]\r"
        "          \r"
        "{'loss': '2.3', 'grad_norm': 'nan', 'epoch': '0.1'}\n"
        "  2%|2         | 10/500 [00:01<01:00, 8.0it/s]\r"
        "  0%|          | 0/32 [00:00<?, ?it/s]\r100%|##########| 32/32 [00:00<?, ?it/s]\r"
        "          \r"
        "{'eval_loss': '2.2', 'epoch': '0.1'}\n  4%|4         | 20/500 [00:01<01:00, 8.0it/s]\r"
        "          \r"
        "{'loss': np.float64(2.1), 'x': tensor(1.5, device='cuda:0'), 'epoch': 0.2}\n"
        "{'train_runtime': 9, 'train_loss': 2.2, 'epoch': 1}\n",
        [{"iter": 10, "epoch": 0.1, "loss/train": 2.3, "grad/norm": "nan"},
         {"iter": 10, "epoch": 0.1, "loss/val": 2.2},
         {"iter": 20, "epoch": 0.2, "loss/train": 2.1, "x": 1.5},
         {"iter": 20, "epoch": 1, "runtime/train": 9, "loss/train_mean": 2.2}]),
    "Trainer, in a terminal without room for a bar": (
        "  0% 0/204 [00:00<?, ?it/s]\r 17% 34/204 [01:03<05:30,  1.94s/it]\r"
        "  0% 0/9 [00:00<?, ?it/s]\r 22% 2/9 [00:00<00:01,  4.08it/s]\r"
        "100% 9/9 [00:03<00:00,  2.54it/s]\r{'eval_loss': '9.86', 'eval_runtime': '4.061', "
        "'eval_samples_per_second': '8.372', 'epoch': '1'}\n"
        " 20% 40/204 [01:09<05:00,  1.94s/it]\r{'loss': '19.79', 'grad_norm': '0.09695', "
        "'learning_rate': '0.0001803', 'epoch': '1.176'}\n",
        [{"iter": 34, "epoch": 1, "loss/val": 9.86, "eval_runtime": 4.061,
          "eval_samples_per_second": 8.372},
         {"iter": 40, "epoch": 1.176, "loss/train": 19.79, "grad/norm": 0.09695, "lr": 0.0001803}]),
    "LLaMA-Factory, ms-swift": ("""\
[INFO|callbacks.py:310] 2024-10-10 10:10:10,123 >> {'loss': 0.9, 'learning_rate': 4.0e-05, \
'epoch': 0.7}
{'loss': 2.3, 'memory(GiB)': 12.3, 'epoch': 0.8, 'global_step/max_steps': '10/500', \
'percentage': '2.00%', 'elapsed_time': '10s'}
""", [{"iter": 1, "epoch": 0.7, "loss/train": 0.9, "lr": 4e-05},
      {"iter": 10, "epoch": 0.8, "loss/train": 2.3, "memory(GiB)": 12.3, "percentage": 2,
       "elapsed_time": 10}]),
    "JSON lines": ("""\
{"step": 30, "loss": 0.25, "note": "x", "ok": true, "eval": {"acc": NaN}}
2024-01-01 10:00:00 | INFO | train_inner | {"epoch": 1, "update": 0.1, "loss": "5.1", "ppl": "34.2"}
""", [{"iter": 30, "loss/train": 0.25, "eval/acc": "nan"},
      {"iter": 31, "epoch": 1, "loss/train": 5.1, "ppl": 34.2}]),
    "Lightning": (
        "Epoch 0:  45%|████▌     | 45/100 [00:10<00:12,  4.50it/s, v_num=5, train_loss=2.30]\r"
        "Epoch 0: 100%|██████████| 100/100 [00:10<00:00,  4.50it/s, v_num=5, train_loss=2.20]\n"
        "Validation DataLoader 0:  50%|█████     | 5/10 [00:00<00:00, 4.0it/s, loss=9]\r"
        "Epoch 0: 100%|██████████| 100/100 [00:10<00:00,  4.50it/s, v_num=5, train_loss=2.20, "
        "val_loss=2.5]\n"
        "Epoch 0, global step 100: 'val_loss' reached 0.5 (best 0.5), saving model to "
        "'/x/epoch=0-step=5-val_loss=0.50.ckpt' as top 1\n"
        "Epoch 1:  45%|████▌     | 45/100 [00:10<00:12,  4.50it/s, v_num=5, train_loss=2.10]\n"
        "Epoch 2/9  ━━━━━━━━━━╸━━━━ 45/100 0:00:10 • 0:00:12 4.50it/s v_num: 0.000 "
        "train_loss: 2.000\n",
        [{"iter": 45, "epoch": 0, "loss/train": 2.3},
         {"iter": 100, "epoch": 0, "loss/train": 2.2},
         {"iter": 100, "epoch": 0, "loss/val": 2.5},
         {"iter": 145, "epoch": 1, "loss/train": 2.1},
         {"iter": 245, "epoch": 2, "loss/train": 2}]),
    "Lightning, both of step and epoch": (
        "Sanity Checking DataLoader 0:  50%|█████     | 1/2 [00:00<00:00,  4.0it/s]\r          \r"
        "Epoch 0:  50%|█████     | 5/10 [00:01<00:00, 10.0it/s, v_num=1, train_loss_step=0.589]\r"
        "Epoch 0: 100%|██████████| 10/10 [00:01<00:00, 10.0it/s, v_num=1, train_loss_step=0.500, "
        "val_loss_epoch=0.6, train_loss_epoch=0.540]\n"
        "Epoch 1: 100%|██████████| 10/10 [00:01<00:00, 11.19it/s, loss=2.58e-04, "
        "val/loss=3.03e-04]\n"
        "`Trainer.fit` stopped: `max_epochs=2` reached.\n",
        [{"iter": 5, "epoch": 0, "loss/train": 0.589},
         {"iter": 10, "epoch": 0, "loss/train": 0.5, "loss/val": 0.6, "loss_epoch/train": 0.54},
         {"iter": 20, "epoch": 1, "loss/train": 2.58e-4, "loss/val": 3.03e-4}]),
    "Keras 3": (
        "Epoch 1/2\n\x1b[1m 120/1875\x1b[0m \x1b[32m━\x1b[0m\x1b[37m━━━━━━━━━━━━━━━━━━━\x1b[0m "
        "\x1b[1m7s\x1b[0m 4ms/step - accuracy: 0.5 - loss: 1.5"
        + "\b" * 80 +
        "\x1b[1m1875/1875\x1b[0m \x1b[32m━━━━━━━━━━━━━━━━━━━━\x1b[0m\x1b[37m\x1b[0m "
        "\x1b[1m9s\x1b[0m 4ms/step - accuracy: 0.9 - loss: 0.3 "
        "- val_accuracy: 0.95 - val_loss: 0.1\nEpoch 2/2\n"
        "1875/1875 - 9s - 5ms/step - accuracy: 0.91 - loss: 0.2 - learning_rate: 1.0000e-04\n"
        "313/313 ━━━━━━━━━━━━━━━━━━━━ 1s 2ms/step - accuracy: 0.8875 - loss: 0.3373\n",
        [{"iter": 120, "epoch": 1, "accuracy": 0.5, "loss/train": 1.5},
         {"iter": 1875, "epoch": 1, "accuracy": 0.9, "loss/train": 0.3, "accuracy/val": 0.95,
          "loss/val": 0.1},
         {"iter": 3750, "epoch": 2, "accuracy": 0.91, "loss/train": 0.2, "lr": 1e-4},
         {"iter": 3750, "epoch": 2, "accuracy/eval": 0.8875, "loss/eval": 0.3373}]),
    "Keras 2": ("""\
Epoch 1/2
 1/199 [..............................] - ETA: 0s - loss: 0.7\x08\x08\x08\x08\
199/199 [==============================] - 9s 12ms/step - loss: 0.1 - accuracy: 0.9
Epoch 00001: val_loss improved from inf to 0.30000, saving model to m.h5
Epoch 2/2
199/199 - 9s - loss: 0.05 - accuracy: 0.95 - 9s/epoch - 47ms/step
Restoring model weights from the end of the best epoch: 1.
Epoch 00002: early stopping
170/170 [==============================] - 2s 929us/step - loss: 0.1909 - acc: 0.9277
170/170 [==============================] - 1s 7ms/step
""", [{"iter": 1, "epoch": 1, "loss/train": 0.7},
      {"iter": 199, "epoch": 1, "loss/train": 0.1, "accuracy": 0.9},
      {"iter": 398, "epoch": 2, "loss/train": 0.05, "accuracy": 0.95},
      {"iter": 398, "epoch": 2, "loss/eval": 0.1909, "acc/eval": 0.9277}]),
    "fastai": ("""\
epoch     train_loss  valid_loss  accuracy  time
0         4.403168    4.469939    0.403841  1:30:29
1         4.312332    4.432437    0.404200  1:30:30
""", [{"iter": 1, "epoch": 0, "loss/train": 4.403168, "loss/val": 4.469939, "accuracy": 0.403841},
      {"iter": 2, "epoch": 1, "loss/train": 4.312332, "loss/val": 4.432437, "accuracy": 0.4042}]),
    "ultralytics": ("""\
      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size
       1/20      10.1G      1.777      2.573      1.302         79        640: 100%|██████████| \
298/298 [08:35<00:00,  1.73s/it]
                 Class     Images  Instances      Box(P          R      mAP50  mAP50-95): \
100%|██████████| 38/38 [00:44<00:00,  1.17s/it]
                   all       1189       4779       0.34     0.0303     0.0157    0.00773

      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size
       2/20      10.4G      1.734       2.13      1.308         60        640: 100%|██████████| \
298/298 [08:33<00:00,  1.72s/it]
""", [{"iter": 298, "epoch": 1, "GPU_mem": 10.1e9, "box_loss": 1.777, "cls_loss": 2.573,
       "dfl_loss": 1.302, "Instances": 79, "Size": 640},
      {"iter": 299, "epoch": 1, "Images": 1189, "Instances": 4779, "P": 0.34, "R": 0.0303,
       "mAP50": 0.0157, "mAP50-95": 0.00773},
      {"iter": 596, "epoch": 2, "GPU_mem": 10.4e9, "box_loss": 1.734, "cls_loss": 2.13,
       "dfl_loss": 1.308, "Instances": 60, "Size": 640}]),
    "torchtune": (
        "1|10|Loss: 2.31:  10%|█         | 10/100 [00:10<01:30, 1.0it/s]\r"
        "Step 10 | loss:2.31 lr:2e-05 tokens_per_second_per_gpu:1234.5\n",
        [{"iter": 10, "loss/train": 2.31},
         {"iter": 10, "lr": 2e-05, "tokens_per_second_per_gpu": 1234.5}]),
    "torchtitan": (
        "[titan] 2024-10-01 12:00:00,123 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  8.1234  "
        "\x1b[38;2;180;60;0mgrad_norm: 1.2  "
        "\x1b[33mmemory: 30.12GiB(31.65%)  \x1b[34mtps: 3,456  \x1b[35mmfu: 12.34%\x1b[39m\n",
        [{"iter": 10, "loss/train": 8.1234, "grad/norm": 1.2, "memory": 30.12, "tps": 3456,
          "mfu": 12.34}]),
    "tqdm": (
        "  2%|2         | 10/500 [00:01<01:00, 8.0it/s, loss=2.3, lr=1e-5]\r"
        "  4%|4         | 20/500 [00:01<01:00, 8.0it/s, loss=2.2]\n"
        "Evaluating:  50%|#####     | 5/10 [00:01<00:01, 4.0it/s, loss=9.8]\r"
        "Evaluating: 100%|##########| 10/10 [00:01<00:01, loss=9.9]\n"
        "  6%|6         | 30/500 [00:01<01:00, 8.0it/s, loss=2.1]\n",
        [{"iter": 10, "loss/train": 2.3, "lr": 1e-5},
         {"iter": 20, "loss/train": 2.2},
         {"iter": 20, "loss/eval": 9.9},
         {"iter": 30, "loss/train": 2.1}]),
    "a tqdm bar for each epoch": (
        "".join(f"100%|##########| 5/5 [00:01<00:01, 4.0it/s, loss={e}]\n"
                f"100%|##########| 2/2 [00:01<00:01, loss=9{e}]\n" for e in (1, 2)),
        [{"iter": 5, "loss/train": 1},
         {"iter": 5, "loss/eval": 91},
         {"iter": 10, "loss/train": 2},
         {"iter": 10, "loss/eval": 92}]),
    "steps of an epoch": ("""\
Epoch [1/5], Step [100/600], Loss: 0.3512
Epoch [1/5], Step [600/600], Loss: 0.3
Epoch [2/5], Step [100/600], Loss: 0.2
""", [{"iter": 100, "epoch": 1, "loss/train": 0.3512},
      {"iter": 600, "epoch": 1, "loss/train": 0.3},
      {"iter": 700, "epoch": 2, "loss/train": 0.2}]),
    "steps of an epoch, without a total, from 0": (
        "".join(f"epoch {e} step {s} loss {e}.{s}\n" for e in range(2) for s in range(3)),
        [{"iter": 3 * e + s, "epoch": e, "loss/train": float(f"{e}.{s}")}
         for e in range(2) for s in range(3)]),
    "PyTorch's examples": ("""\
Train Epoch: 1 [0/60000 (0%)]\tLoss: 2.300000
Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.2

Test set: Average loss: 0.0504, Accuracy: 9840/10000 (98%)

Train Epoch: 2 [640/60000 (1%)]\tLoss: 0.3
Epoch: [2][  10/5005]\tTime  0.512 ( 1.2)\tLoss 6.9e+00 (7.0e+00)\tAcc@1   0.39 (  0.10)
""", [{"iter": 0, "epoch": 1, "loss/train": 2.3},
      {"iter": 640, "epoch": 1, "loss/train": 2.2},
      {"iter": 641, "epoch": 1, "average_loss/test": 0.0504},
      {"iter": 60640, "epoch": 2, "loss/train": 0.3},
      {"iter": 120010, "epoch": 2, "Time": 0.512, "loss/train": 6.9, "Acc@1": 0.39}]),
    "PyTorch's word_language_model": ("""\
| epoch   1 |   200/ 2323 batches | lr 20.00 | ms/batch 12.33 | loss  7.63 | ppl  2062.59
-----------------------------------------------------------------------------------------
| end of epoch   1 | time: 30.11s | valid loss  5.51 | valid ppl   250.11
-----------------------------------------------------------------------------------------
| epoch   2 |   200/ 2323 batches | lr 20.00 | ms/batch 12.33 | loss  5.63 | ppl   278.66
""", [{"iter": 200, "epoch": 1, "lr": 20, "ms/batch": 12.33, "loss/train": 7.63, "ppl": 2062.59},
      {"iter": 201, "epoch": 1, "program/time": 30.11, "loss/val": 5.51, "ppl/val": 250.11},
      {"iter": 2523, "epoch": 2, "lr": 20, "ms/batch": 12.33, "loss/train": 5.63, "ppl": 278.66}]),
    "torchvision, mmengine, detectron2": ("""\
Epoch: [0]  [  10/5005]  eta: 1:23:45  lr: 0.1  loss: 6.9078 (7.0123)  acc1: 0.5 (0.1)  \
max mem: 1234
Test:  [ 0/196]  eta: 0:01:00  loss: 1.0 (1.0)
01/01 10:00:00 - mmengine - INFO - Epoch(train)  [1][  50/5005]  lr: 1.9e-03  \
eta: 1 day, 13:22:12  data_time: 0.05  loss: 1.2
01/01 10:00:00 - mmengine - INFO - Epoch(val) [1][5000/5000]    coco/bbox_mAP: 0.3700  loss: 2
""", [{"iter": 10, "epoch": 0, "lr": 0.1, "loss/train": 6.9078, "acc1": 0.5, "max_mem": 1234},
      {"iter": 50, "epoch": 1, "lr": 0.0019, "data_time": 0.05, "loss/train": 1.2},
      {"iter": 50, "epoch": 1, "coco/bbox_mAP": 0.37, "loss/val": 2}]),
    "Megatron, DeepSpeed": ("""\
 [2024-01-01 10:00:00] iteration       10/  500000 | consumed samples:   10240 \
| elapsed time per iteration (ms): 1234.5 | lm loss: 1.077E+01 |
[2024-01-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=20, skipped=0, lr=[1e-05], \
mom=[[0.9, 0.95]]
""", [{"iter": 10, "consumed_samples": 10240, "elapsed_time_per_iteration": 1234.5,
       "loss/train": 10.77},
      {"iter": 20, "skipped": 0, "lr": 1e-5}]),
    "XGBoost, LightGBM, CatBoost": ("""\
[0]\ttrain-rmse:0.512\teval-rmse:0.6
[1]\tvalid_0's l2: 0.2
2:\tlearn: 0.6931\ttest: 0.693\ttotal: 58ms
""", [{"iter": 0, "train-rmse": 0.512, "eval-rmse": 0.6},
      {"iter": 1, "valid_0's_l2": 0.2},
      {"iter": 2, "learn": 0.6931, "test": 0.693, "total": 58}]),
    "a table": ("""\
epoch,train_loss,val_loss
1,0.5,0.6
2,0.4,0.5
  epoch    train_loss    valid_acc     dur
-------  ------------  -----------  ------
      3        \x1b[36m0.6905\x1b[0m       \x1b[32m0.6150\x1b[0m  0.0542
""", [{"iter": 1, "epoch": 1, "loss/train": 0.5, "loss/val": 0.6},
      {"iter": 2, "epoch": 2, "loss/train": 0.4, "loss/val": 0.5},
      {"iter": 3, "epoch": 3, "loss/train": 0.6905, "acc/val": 0.615, "dur": 0.0542}]),
    "a step above its metrics": ("""\
[step=10/1000,epoch=0]
    train/CrossEntropyLoss=10.5
    throughput/device/tokens_per_second=1,234
[step=11/1000,epoch=0]
    train/CrossEntropyLoss=10.4
""", [{"iter": 10, "loss/train": 10.5}, {"iter": 10, "throughput/device/tokens_per_second": 1234},
      {"iter": 11, "loss/train": 10.4}]),
    "llama2.c": ("""\
0 | loss 10.3741 | lr 0.000000e+00 | 15521.39ms | mfu -100.00%
step 0: train loss 10.3, val loss 10.4
10 | loss 9.37 | lr 5.000000e-06 | 520.39ms | mfu 12.00%
""", [{"iter": 0, "loss/train": 10.3741, "lr": 0, "perf/iter_ms": 15521.39},
      {"iter": 0, "loss/train_eval": 10.3, "loss/val": 10.4},
      {"iter": 10, "loss/train": 9.37, "lr": 5e-6, "mfu": 12, "perf/iter_ms": 520.39}]),
    "indented JSON": (
        '{\n  "step": 10,\n  "loss": 2.5,\n  "acc": 0.5\n}\n{\n  "step": 20,\n  "loss": 2.4\n}\n',
        [{"iter": 10, "loss/train": 2.5},
         {"iter": 10, "acc": 0.5},
         {"iter": 20, "loss/train": 2.4}]),
    "stable-baselines3": ("""\
| rollout/           |          |
|    ep_len_mean     | 22.1     |
|    total_timesteps | 2048     |
-----------------------------------
|    ep_len_mean     | 30.5     |
""", [{"iter": 0, "ep_len_mean": 22.1},
      {"iter": 0, "total_timesteps": 2048},
      {"iter": 1, "ep_len_mean": 30.5}]),
    "bars of splits": (
        "".join(f"Epoch {e}/3 [Train]: 100%|##| 10/10 [00:01<00:00, loss=2.{e}]\n"
                f"Epoch {e}/3 [Val]: 100%|##| 5/5 [00:01<00:00, loss=3.{e}]\n" for e in (1, 2)),
        [{"iter": 10, "epoch": 1, "loss/train": 2.1},
         {"iter": 10, "epoch": 1, "loss/val": 3.1},
         {"iter": 20, "epoch": 2, "loss/train": 2.2},
         {"iter": 20, "epoch": 2, "loss/val": 3.2}]),
    "splits": ("""\
Epoch 3 - Train Loss: 0.3, Val Loss: 0.4
Train: loss 0.3, acc 0.5 | Val: loss 0.4 | lr 1e-3
Eval | step 100 | loss 2.5
Validation step 3/10, loss: 0.5
Step 200，train loss = 0.3, val loss：0.2, It/sec 0.5
""", [{"iter": 1, "epoch": 3, "loss/train": 0.3, "loss/val": 0.4},
      {"iter": 2, "epoch": 3, "loss/train": 0.3, "acc/train": 0.5, "loss/val": 0.4, "lr": 1e-3},
      {"iter": 100, "epoch": 3, "loss/eval": 2.5},
      {"iter": 200, "epoch": 3, "loss/train": 0.3, "loss/val": 0.2, "It/sec": 0.5}]),
    "thousands and suffixes": ("""\
step 1,000: train loss 2.5 | tok/sec: 1,048,576
step 2_000: loss 2.5, tokens: 1.23M, tok/s: 31.5k, params=1.1B, seen=1_048_576, mem=12.5GB, dt=12ms
step 3k loss=-1.5e-3, ppl=1.2E+03, a=+inf, b=NaN, c=-Infinity, acc: 95.2 %, d=.5, e=5.
""", [{"iter": 1000, "loss/train": 2.5, "perf/tokens_per_sec": 1048576},
      {"iter": 2000, "loss/train": 2.5, "tokens": 1230000, "perf/tokens_per_sec": 31500,
       "params": 1.1e9, "seen": 1048576, "mem": 12.5, "dt": 12},
      {"iter": 3000, "loss/train": -0.0015, "ppl": 1200, "a": "inf", "b": "nan", "c": "-inf",
       "acc": 95.2, "d": 0.5, "e": 5}]),
    "loggers": ("""\
INFO:root:step 10 loss 2.5
2024-01-01 10:30:15 | INFO     | __main__:train:45 - step 12 | loss: 2.4
I1101 12:00:00.123 123 train.py:45] step 13 loss 2
[epoch:1, iter:14] Loss: 0.5 | Acc: 80.125%
2024-01-01 10:30:15 INFO Loss=2.5
step 16: loss=tensor(2.25, device='cuda:0', grad_fn=<NllLossBackward0>)
""", [{"iter": 10, "loss/train": 2.5},
      {"iter": 12, "loss/train": 2.4},
      {"iter": 13, "loss/train": 2},
      {"iter": 14, "epoch": 1, "loss/train": 0.5, "Acc": 80.125},
      {"iter": 15, "epoch": 1, "loss/train": 2.5},
      {"iter": 16, "epoch": 1, "loss/train": 2.25}]),
    "links, colours, carriage returns": (
        "\x1b]8;;http://host:80/x=1\x1b\\step 1\x1b]8;;\x1b\\ "
        "\x1b[1;31mloss\x1b[0m=\x1b[38:5:1m2.5\x1b[m\r\nstep 2 loss=2\r\r\n",
        [{"iter": 1, "loss/train": 2.5}, {"iter": 2, "loss/train": 2}]),
    "a program that goes back to a checkpoint": (
        "".join(f"step {s} loss {s}\n" for s in (10, 20, 30, 20, 30, 40)),
        [{"iter": i, "loss/train": s}
         for i, s in zip((10, 20, 30, 31, 32, 40), (10, 20, 30, 20, 30, 40))]),
    "a program that begins anew": (
        "".join(f"step {s} loss {s}\n" for s in (10, 20, 30, 10, 20)),
        [{"iter": i, "loss/train": s}
         for i, s in zip((10, 20, 30, 40, 50), (10, 20, 30, 10, 20))]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_read(name):
    text, expected = FORMATS[name]
    found = [{k: str(v) if isinstance(v, float) and not math.isfinite(v) else v
              for k, v in row.items()} for row in rows_of(text)]
    assert found == expected
    whole = [row for piece in [Parser(interval=0)] for letter in text + "\n"
             for row in piece.feed(letter)]
    assert [{k: str(v) if isinstance(v, float) and not math.isfinite(v) else v
             for k, v in row.items()} for row in whole] == expected


@pytest.mark.parametrize("line", [
    "Loading 5 files", "no loss 3 times", "loss 3 of 5 files", "accuracy 5 workers",
    "Python 3.11 on port 8080", "listening on localhost:8080", "train.py:123 INFO hello",
    "version: 1.2.3", "date: 2024-01-01", "at: 10:30:15", "GPU 0", "took 12s", "rank 3", "98% done",
    "loss: 0,123", "loss: 1,2", "sha=12ab34", "path=/a/b1", "ETA: 57s",
    "loss improved from 0.5 to 0.4", "name: nano, info: x", "Step 3: load the data",
    "Epoch 1: val_loss improved from 0.5 to 0.4, saving model to m-loss=0.45.keras",
    "Restoring model weights from the end of the best epoch: 2.",
    "100%|##########| 5/5 [00:01<00:01, 4.0it/s]",
    "model.safetensors:  45%|####5     | 450M/1.00G [00:10<00:12, 45.0MB/s]",
    "Accuracy: 9840/10000 (98%)", "see http://host:80/x", "C:\\runs\\12", "[INFO] 5 warnings",
    "loss", "=", ":", "{'a'", "| 1 | 2 | 3 |"
])
def test_a_word_beside_a_number_is_no_metric_where_the_line_does_not_say_so(line):
    assert rows_of(line + "\n") == []


@pytest.mark.parametrize("line, epoch", [
    ("Restoring model weights from the end of the best epoch: 2.", 7), ("Best epoch: 2", 7),
    ("best epoch 2, loss 0.5", 7), ("num epochs: 2", 7), ("Number of epochs: 2", 7),
    ("Training for 20 epochs", 7), ("loaded a checkpoint of epoch 2", 7), ("Epoch 2/10", 2),
    ("Starting epoch 2", 2), ("[INFO] Epoch 2:", 2), ("===> Epoch: 2", 2), ("epoch = 2.0", 2)])
def test_an_epoch_is_what_a_line_calls_so(line, epoch):
    assert rows_of(f"epoch 7 loss 3\n{line}\nloss: 1\n")[-1]["epoch"] == epoch


@pytest.mark.parametrize("text, value", [
    ("1,048,576", 1048576), ("1,048,576.5", 1048576.5), ("0,123", None), ("1,04", None),
    ("12_000", 12000), ("31.5k", 31500), ("2M", 2e6), ("1.5B", 1.5e9), ("12ms", 12), ("12 ms", 12),
    ("5m", 5), ("12.3%", 12.3), ("1e-4", 1e-4), ("1E+03", 1000), ("-.5", -0.5), ("1.2.3", None),
    ("12ab", None), ("", None), ("1.000", 1), ("0x10", None), ("30.12GiB", 30.12), ("five", None)])
def test_a_number_is_read_with_its_suffix_and_without_its_unit(text, value):
    assert number(text) == value


def test_bars_as_tqdm_draws_them():
    """
    Each epoch has a bar, with the bar of an evaluation after it. Bars are of ASCII characters or of
    blocks, and are redrawn every 0 s.
    """
    for ascii in (True, False):
        out = io.StringIO()
        for epoch in range(1, 4):
            bar = tqdm(range(8), f"Epoch {epoch}", file=out, ascii=ascii, mininterval=0, miniters=1)
            for i in bar:
                bar.set_postfix(loss=f"{10 * epoch + i:.3f}", lr=1e-4)
            evaluation = tqdm(range(3), "Evaluating", file=out, ascii=ascii, mininterval=0,
                              miniters=1)
            for i in evaluation:
                evaluation.set_postfix(loss=100 + epoch)
        rows = rows_of(out.getvalue())
        assert [row["iter"] for row in rows
                if row.get("loss/eval") == 100 + row["epoch"]] == [8, 16, 24]
        training = [row for row in rows if "loss/eval" not in row]
        assert all(row["iter"] - 8 * (row["epoch"] - 1) in range(1, 9) for row in training)
        assert len(training) >= 24
        assert {round(row["loss/train"]) - 10 * row["epoch"]
                for row in training if "loss/train" in row} == set(range(8))


def test_dicts_as_transformers_prints_them(capsys):
    """The callbacks of the installed version print dicts beside a bar on stderr, and alone."""
    callbacks = pytest.importorskip("transformers.trainer_callback")
    logs = {"loss": 2.3841, "grad_norm": 1.25, "learning_rate": 4.5e-05, "epoch": 0.1}
    state = SimpleNamespace(is_world_process_zero=True, is_local_process_zero=True, max_steps=500,
                            global_step=0)
    for callback in callbacks.ProgressCallback(), callbacks.PrinterCallback():
        callback.on_train_begin(None, state, None)
        for state.global_step in (10, 20):
            if hasattr(callback, "on_step_end"):
                callback.on_step_end(None, state, None)
            callback.on_log(None, state, None, logs=dict(logs))
        state.global_step = 0
        text = "".join(capsys.readouterr())
        assert [row["loss/train"] for row in rows_of(text)] == pytest.approx(
            [2.3841] * 2, rel=1e-3), text
        assert rows_of(text)[0].keys() == {"iter", "epoch", "loss/train", "grad/norm", "lr"}


def test_no_line_takes_long():
    """Lines are 10,000 characters of parts on which a regular expression could backtrack."""
    for part in (" ", "1", "1 ", "a ", "a:", "a: ", "a=", "loss ", "loss 1 ", "|", "[", "=[", "1,",
                 "111,", "{'", "'a':", "\x1b[", "\x1b]", "1%", "tensor(", "step ", "step 1/",
                 "1_000", "\t", "epoch\t", "- ", "(a", "-1", "+", "1it ", "a.", '{"a":1,', "1/",
                 "━", "nan", "\r", "\x08"):
        begin = time.process_time()
        Parser().feed(part * (10_000 // len(part)) + " x\n")
        assert time.process_time() - begin < 1, part


def test_wandb_has_every_metric_of_the_log(tmp_path):
    """
    The text has steps of epochs, and two lines of one step. Rows of the log with the same iter are
    one row in W&B.
    """
    text = "".join(FORMATS[name][0] for name in (
        "nanoGPT", "a program that begins anew", "steps of an epoch")) + "Evaluating\n"
    text += "".join(f"epoch {e} step {s} loss {e}.{s}\n" for e in (1, 2, 3) for s in (1, 2, 3, 4))
    (tmp_path / "console").write_text(text)
    clean = ({k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
             | {"HOME": str(tmp_path), "WANDB_MODE": "offline"})
    done = subprocess.run(
        [sys.executable, ROOT / "track.py", "--out_dir=p", "--", "cat", "console"], cwd=tmp_path,
        env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done
    assert text == done.stdout[done.stdout.index("number"):][:len(text)], done
    rows = track.read_rows(tmp_path / "p/log.jsonl")
    assert len(rows) == 4 + 5 + 3 + 12
    recorded = track.read_wandb(next((tmp_path / "wandb").glob("offline-run-*/*.wandb")))
    history = [r["history"]["item"] for r in recorded if r["type"] == "history"]
    merged = track.rising_rows(tmp_path / "p")
    assert ([item["iter"] for item in history] == [row["iter"] for row in merged]
            == sorted({row["iter"] for row in rows}))
    for row, item in zip(merged, history):
        assert {k: item[k] for k in row if k != "time"} == {
            k: v for k, v in row.items() if k != "time"}
    assert json.loads((tmp_path / "p/config.json").read_text())["command"] == ["cat", "console"]


def test_a_program_stands_behind_our_runs_in_a_comparison_and_lacks_no_setting(tmp_path):
    """
    Its metrics have the names of ours, so its losses are in the same columns. It comes last, though
    its losses are the best of all.
    """
    (tmp_path / "hf").mkdir()
    rows = rows_of(FORMATS["Trainer, before version 5"][0])
    (tmp_path / "hf/log.jsonl").write_text("".join(
        json.dumps(row | {"time": n}) + "\n" for n, row in enumerate(rows)))
    (tmp_path / "hf/config.json").write_text(json.dumps({"command": ["python", "trainer.py"]}))
    for name, loss in ("a", 3.0), ("b", 2.5):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text(
            json.dumps({"iter": 5, "loss/train": loss, "loss/val": loss, "time": 0}) + "\n")
        (tmp_path / name / "config.json").write_text(
            json.dumps({"vocab_source": "byte", "dim": 32, "learning_rate": 6e-3}))
    found = compare.read_runs([tmp_path / name for name in ("hf", "a", "b")])
    assert compare.differences(found) == []
    head, *table = compare.table_of(found)
    assert [Path(row[0]).name for row in table] == ["b", "a", "hf"]
    assert [row[head.index(f"last {name}")] for row in table
            for name in ("loss/train", "loss/val")] == [2.5, 2.5, 3, 3, 2.3841, 2.1]
