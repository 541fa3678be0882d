"""
Train litgpt on a text, for own_text.py. The training is that of
`litgpt pretrain pythia-14m --data TextFiles`, with AdamW at a learning rate of 5e-3, as litgpt's
tutorial recommends. PYTHON is a Python that has litgpt.

    PYTHON bench/litgpt_text.py my.txt STEPS

Pythia's tokenizer would have to be downloaded, so a byte-level BPE with VOCAB_SIZE tokens is
trained on the text. Only a few of litgpt's default steps, 512 sequences x 512 tokens, fit ten
minutes on two cores, so a step has BATCH sequences x CONTEXT tokens here. The last tenth of the
text is the validation split. The result is the smallest validation loss, in bits per byte.
"""
import csv
import json
import math
import sys
import tempfile
from pathlib import Path

VOCAB_SIZE = 1024
BATCH = 8         # sequences per step
CONTEXT = 256     # tokens per sequence
EVALUATIONS = 12  # approximate number of evaluations per training


def prepare(text, folder):
    """
    Write the folders train, val and tokenizer into `folder`. Return the tokens per byte of the
    validation text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    cut = int(0.9 * len(text))
    for name, part in {"train": text[:cut], "val": text[cut:].strip()}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "text.txt").write_text(part, encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=["<|endoftext|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train([str(folder / "train/text.txt")], trainer)
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    config = {"tokenizer_class": "GPTNeoXTokenizer", "bos_token": "<|endoftext|>",
              "eos_token": "<|endoftext|>"}
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(config))
    held_out = (folder / "val/text.txt").read_text(encoding="utf-8")
    return len(tokenizer.encode(held_out).ids) / len(held_out.encode())


def main(path, folder, steps):
    """Train for this many steps, with all files in `folder`, and print the bits per byte."""
    tokens_per_byte = prepare(Path(path).read_text(encoding="utf-8"), folder)
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.config import Config
    from litgpt.data import TextFiles
    from litgpt.pretrain import setup
    config = Config.from_name("pythia-14m", padded_vocab_size=VOCAB_SIZE, vocab_size=VOCAB_SIZE,
                              block_size=CONTEXT)
    train_args = TrainArgs(save_interval=10 ** 9, log_interval=10, global_batch_size=BATCH,
                           micro_batch_size=BATCH, max_tokens=steps * BATCH * CONTEXT, max_norm=1.0,
                           min_lr=4e-5, lr_warmup_steps=steps // 20)
    eval_args = EvalArgs(interval=max(10, steps // EVALUATIONS), max_iters=20,
                         initial_validation=False, final_validation=True)
    optimizer = {"class_path": "torch.optim.AdamW",
                 "init_args": {"lr": 5e-3, "weight_decay": 0.1, "betas": [0.9, 0.95]}}
    setup("pythia-14m", config, out_dir=folder / "out", precision="32-true", devices=1,
          logger_name="csv", tokenizer_dir=folder / "tokenizer",
          data=TextFiles(folder / "train", folder / "val", num_workers=0),
          train=train_args, eval=eval_args, optimizer=optimizer)
    log = next(folder.rglob("metrics.csv")).read_text().splitlines()
    loss = min(float(row["val_loss"]) for row in csv.DictReader(log) if row.get("val_loss"))
    print(f"bits per byte {loss / math.log(2) * tokens_per_byte:.4f}")


# litgpt starts processes that import this file, and it records the command line.
if __name__ == "__main__":
    words, sys.argv = sys.argv[1:], [sys.argv[0], "pretrain", "pythia-14m"]
    with tempfile.TemporaryDirectory() as folder:
        main(words[0], Path(folder), int(words[1]))
