"""
LoRA: the adapted model against autograd through the merged model, PEFT and ./run; training and
resuming; memory and FLOPs.
"""
import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import export
import train as trainer
from engine.training import checkpoint, costs, distributed, load, lora
from model import ModelArgs, Transformer
from tests import forked
from tests.test_conversations import messages_of, some_conversations, train, write_lines
from tests.test_export import build, command, refused
from tests.test_run import run
from tests.trainer_config import trainer_config
from tokenizer import Bytes

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {
    "tied": dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=64),
    "untied, biases": dict(dim=64, n_layers=2, n_heads=2, max_seq_len=64, tied=False, qkv_bias=True)
}
V = Bytes().vocab_size
MARKERS = "<|im_start|>", "<|im_end|>"
TRAIN = [
    "--data=chats.jsonl", "--lora_rank=4", "--batch_size=4", "--gradient_accumulation_steps=2",
    "--dropout=0.1", "--device=cpu", "--max_seq_len=64", "--eval_iters=1", "--eval_interval=4",
    "--log_interval=4", "--schedule=constant", "--peak_tflops=0.1",
    "--sample_prompt=What does Ruby have?"
]


@pytest.fixture(autouse=True)
def one_thread():
    """Run on one thread: models this small are slower on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def adapted(path, new=0, rank=4, targets="all", dtype=torch.float32):
    """Return a LoRA of the model in a file, with `new` added tokens and nonzero adapters."""
    state, args, _, _ = load.read_model(path)
    quantized = frozenset(name.removesuffix(".weight") for name in state.q8_0)
    spec = lora.LoRA(rank, lora.parse_targets(targets), 16.0, dtype, quantized, args.vocab_size)
    model = lora.build(replace(args, vocab_size=args.vocab_size + new), spec, "cpu")
    distributed.load_weights(model, lora.base_weights(state, model))
    for name, p in model.named_parameters():
        if name.endswith(("lora_B", "new_rows")):
            torch.nn.init.normal_(p, std=0.05)
    return model


def merged(model):
    plain = Transformer(model.args)
    distributed.load_weights(plain, lora.merged(model.state_dict(), model.lora))
    return plain


def far(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


# ---- the adapted model ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_loss_and_gradients_are_those_of_the_merged_model(shape, dtype, tmp_path,
                                                                 monkeypatch):
    base = build(V, **SHAPES[shape])
    export.export_model(base.state_dict(), base.args, Bytes(), tmp_path / "base.gguf", dtype=dtype)
    model = adapted(tmp_path / "base.gguf", new=2)
    assert (len(model.lora.quantized) > 0) == (dtype == "q8_0")
    plain, scale = merged(model), 16.0 / 4
    monkeypatch.setattr(trainer.ops.CrossEntropy, "PIECE", 1 << 12)  # several pieces
    x, y = torch.randint(V + 2, (2, 2, 64), generator=torch.Generator().manual_seed(1))
    x[0, :2] = torch.tensor([V, V + 1])
    y[0, :5] = -1
    assert far(model(x, every=1)[0], plain(x, every=1)[0]) < 1e-5
    losses = [each(x, y)[1] for each in (model, plain)]
    assert far(*losses) < 1e-5
    for loss in losses:
        loss.backward()
    whole, found = dict(plain.named_parameters()), dict(model.named_parameters())
    trained = {name for name, p in found.items() if p.grad is not None}
    assert trained == {name for name in found if name.endswith(("lora_A", "lora_B", "new_rows"))}
    for name in trained:
        module, _, kind = name.rpartition(".")
        grad = whole[f"{module}.weight"].grad
        a, b = (found.get(f"{module}.lora_{letter}") for letter in "AB")
        expected = {
            "lora_A": lambda: scale * b.T @ grad, "lora_B": lambda: scale * grad @ a.T,
            "new_rows": lambda: grad[V:]
        }[kind]()
        assert far(found[name].grad, expected) < 1e-4, name


def test_the_matrices_of_a_q8_0_file_stay_its_integers_and_scales(tmp_path):
    base = build(V, **SHAPES["untied, biases"])  # GGUF stores its heads in another order
    export.export_model(base.state_dict(), base.args, Bytes(), tmp_path / "base.gguf", dtype="q8_0")
    state = load.read_model(tmp_path / "base.gguf")[0]
    model = adapted(tmp_path / "base.gguf", targets="wq")
    assert model.layers[0].attention.wq.q.dtype == torch.int8
    assert model.layers[0].attention.wq.weight is None
    for name, module in model.named_modules():
        if isinstance(module, lora.Frozen):
            assert torch.equal(module.matrix(torch.float32), state[f"{name}.weight"]), name
    held = sum(p.nbytes for name, p in model.named_parameters() if name.endswith((".q", ".d")))
    assert held == sum(34 / 32 * state[name].numel() for name in state.q8_0)


def test_a_base_in_bfloat16_takes_half_the_memory_and_trains_in_autocast(tmp_path):
    base = build(V, **SHAPES["tied"])
    export.export_model(base.state_dict(), base.args, Bytes(), tmp_path / "base.gguf")
    model, exact = (adapted(tmp_path / "base.gguf", new=2, dtype=dtype)
                    for dtype in (torch.bfloat16, torch.float32))
    model.load_state_dict(exact.state_dict())
    frozen, trained = (sum(p.nbytes for p in model.parameters()
                           if p.requires_grad == wanted and p.dim() == 2)
                       for wanted in (False, True))
    assert frozen == 2 * (V * 64 + 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 192))
    assert trained == 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    x = torch.randint(V + 2, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, x)[1]
    loss.backward()
    assert abs(loss - exact(x, x)[1]) < 0.05
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    assert len(model.generate([x[0, :5]], 4)[0]) == 9  # samples are drawn outside autocast


@pytest.mark.parametrize("words, found", [
    ("all", "wq wk wv wo w1 w2 w3"), ("wv,wq", "wq wv"), ("q_proj, down_proj", "wq w2"),
    ("wq,q_proj", "wq")])
def test_targets_are_named_as_here_or_as_by_hugging_face(words, found):
    assert lora.parse_targets(words) == tuple(found.split())


# ---- PEFT ----------------------------------------------------------------------------------------

def save_lora(folder, model, vocabulary, base):
    """Write a run's folder with one checkpoint of a LoRA."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(vocabulary.data)
    trained, frozen = lora.split(model)
    saved = {"args": asdict(model.args), "model": trained, "chat": {}} | lora.stored(model.lora)
    checkpoint.save(folder, checkpoint.Contents(
        7, saved, {}, {"init_from": str(base)}, folder / "tokenizer.json", 1.0, frozen))


@pytest.mark.parametrize("new", [0, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_peft_loads_our_adapters_and_we_load_them_again(shape, new, tmp_path, monkeypatch):
    base = build(V, **SHAPES[shape])
    export.export_model(base.state_dict(), base.args, Bytes(), tmp_path / "base", "hf")
    model = adapted_hf(tmp_path / "base", new, targets="all" if new else "wk,w2,wo")
    save_lora(tmp_path / "run", model, Bytes(MARKERS[:new]), tmp_path / "base")
    command(monkeypatch, tmp_path / "run", format="peft")
    command(monkeypatch, tmp_path / "run", format="peft")  # replaces the first export
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run/peft").eval()
    x = torch.arange(V + new)[-48:][None]
    with torch.no_grad():
        expected = merged(model)(x, every=1)[0]
        assert far(theirs(x).logits, expected) < 1e-5
        assert far(theirs.merge_and_unload()(x).logits, expected) < 1e-5
        again, vocabulary = load.load_model(tmp_path / "run/peft", "", "cpu")
        assert far(again(x, every=1)[0], expected) < 1e-6 and vocabulary.vocab_size == V + new


def adapted_hf(folder, new, **options):
    """Return `adapted` of a Hugging Face folder, through a GGUF file."""
    state, args, vocabulary, _ = load.read_model(folder)
    export.export_model(state, args, vocabulary, folder.parent / "base.gguf")
    return adapted(folder.parent / "base.gguf", new, **options)


THEIRS = {  # name: (options of peft.LoraConfig, shape of the base)
    "plain": (dict(target_modules=["q_proj", "v_proj"], lora_alpha=3), "tied"),
    "all linear, rank-stabilized": (dict(target_modules="all-linear", use_rslora=True),
                                    "untied, biases"),
    "classifier, ranks": (dict(target_modules=["k_proj", "lm_head", "up_proj"],
                               rank_pattern={"k_proj": 3}), "untied, biases"),
    "some layers": (dict(target_modules=["k_proj", "gate_proj"], layers_to_transform=[1]), "tied"),
    "tokens": (dict(target_modules=["o_proj"], trainable_token_indices=[5, 9]), "tied"),
    "tokens of both": (dict(target_modules=["o_proj"],
                            trainable_token_indices={"embed_tokens": [5], "lm_head": [7, 6]}),
                       "untied, biases"),
    "whole tables": (dict(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
                     "untied, biases"),
}


def write_theirs(folder, shape, **options):
    """Write a folder of nonzero adapters with PEFT and return PEFT's model."""
    base = build(V, **SHAPES[shape])
    export.export_model(base.state_dict(), base.args, Bytes(), folder / "base", "hf")
    config = peft.LoraConfig(**dict(r=4, task_type="CAUSAL_LM") | options)
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder / "base"), config).eval()
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.1)
    model.save_pretrained(folder / "adapter")
    return model


@pytest.mark.parametrize("case", THEIRS)
def test_adapters_of_peft_are_read_merged(case, tmp_path):
    options, shape = THEIRS[case]
    theirs = write_theirs(tmp_path, shape, **options)
    ours, _ = load.load_model(tmp_path / "adapter", "", "cpu")
    x = torch.arange(64)[None]
    with torch.no_grad():
        assert far(ours(x, every=1)[0], theirs(x).logits) < 1e-5


def test_a_vocabulary_that_grew_is_that_of_the_adapter(tmp_path):
    """
    A trainer that adds tokens writes whole embedding tables, and its tokenizer beside the adapter.
    """
    write_theirs(tmp_path, "tied", target_modules=["q_proj"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(V + 2)
    theirs = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")).eval()
    theirs.save_pretrained(tmp_path / "grown", save_embedding_layers=True)
    (tmp_path / "grown/tokenizer.json").write_text(json.dumps(Bytes(MARKERS).hugging_face()))
    ours, vocabulary = load.load_model(tmp_path / "grown", "", "cpu")
    x = torch.arange(V + 2)[-50:][None]
    with torch.no_grad():
        assert far(ours(x, every=1)[0], theirs(x).logits) < 1e-5
    assert vocabulary.vocab_size == V + 2
    assert [piece for piece, *_ in vocabulary.pieces()[-2:]] == [m.encode() for m in MARKERS]


@pytest.mark.parametrize(
    "options, said",
    [(dict(use_dora=True), "use_dora=True is not supported"),
     (dict(bias="lora_only"), "bias=lora_only is not supported, expected none"),
     (dict(alpha_pattern={"q_proj": 3}), "alpha_pattern={'q_proj': 3} is not supported"),
     (dict(init_lora_weights="pissa"), "init_lora_weights=pissa is not supported"),
     (dict(target_modules=["embed_tokens", "q_proj"]),
      "embed_tokens.lora_embedding_A' is not an adapter of a matrix")])
def test_what_an_adapter_has_that_is_not_read_is_refused_by_name(options, said, tmp_path, capsys):
    write_theirs(tmp_path, "untied, biases", **dict(target_modules=["q_proj"]) | options)
    assert said in refused(capsys, load.read_model, tmp_path / "adapter")


def test_an_embedding_that_the_adapter_unties_is_refused(tmp_path, capsys):
    """In PEFT, the classifier keeps the matrix of the base."""
    write_theirs(tmp_path, "tied", target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    assert "no longer tied to the embedding" in refused(
        capsys, load.read_model, tmp_path / "adapter")


def test_a_folder_of_adapters_that_is_damaged_is_refused_in_a_line(tmp_path, capsys):
    write_theirs(tmp_path, "untied, biases", target_modules=["q_proj"])
    folder = tmp_path / "adapter"
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    good, tensors = json.loads(config.read_text()), load_file(weights)

    def said(values=(), **changed):
        config.write_text(json.dumps(good | dict(values)))
        save_file(tensors | changed, weights)
        return refused(capsys, load.read_model, folder)

    first, name = min(tensors), "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert said(**{first: tensors[first][:1]}).count("expected (r, 64) and (64, r)") == 1
    assert "has only A" in said(**{name.replace("q_proj", "v_proj"): tensors[name].clone()})
    assert "holds values that are not finite" in said(**{name: tensors[name] * torch.nan})
    assert "is not a path here" in said({"base_model_name_or_path": "meta-llama/Llama-3.2-1B"})
    assert "hf download meta-llama/Llama-3.2-1B" in said(
        {"base_model_name_or_path": "meta-llama/Llama-3.2-1B"})
    assert "is an adapter too" in said({"base_model_name_or_path": str(folder)})
    assert "lora_alpha is 0" in said({"lora_alpha": 0})
    assert "trainable_token_indices is None" in said(
        **{"base_model.model.lm_head.token_adapter.trainable_tokens_delta": torch.ones(2, 64)})
    assert "some_new_kind=3 is not supported" in said({"some_new_kind": 3})
    config.write_text(json.dumps(good))
    os.remove(weights)
    assert "expected adapter_model.safetensors" in refused(capsys, load.read_model, folder)


# ---- training ------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """
    Write conversations, a base model without markers as a Hugging Face folder and in 8 bits, and a
    LoRA of it that was trained.
    """
    folder = tmp_path_factory.mktemp("lora")
    write_lines(folder / "chats.jsonl", [messages_of(turns) for turns in some_conversations(60)])
    base = build(V, **SHAPES["tied"])
    export.export_model(base.state_dict(), base.args, Bytes(), folder / "base", "hf")
    export.export_model(base.state_dict(), base.args, Bytes(), folder / "q8.gguf", dtype="q8_0")
    done = train(folder, *TRAIN, "--init_from=base", "--out_dir=tuned", "--max_iters=12",
                 "--always_save_checkpoint=True", "--log_extras=gradients,parameters,noise_scale")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "said").write_text(done.stdout)
    return folder


def rows(folder, out):
    return [json.loads(line) for line in (folder / out / "log.jsonl").read_text().splitlines()]


def test_only_adapters_are_trained_and_the_base_is_stored_once(folder):
    said = (folder / "said").read_text()
    trained = 2 * 4 * (64 + 64 + 2 * (64 + 32) + 64 + 64 + 3 * (64 + 192)) + 2 * 64
    assert ("lora:  adapters of rank 4 and alpha 16 for all matrices of the blocks: "
            f"{trained:,} trained parameters") in said
    assert re.search(r"learning_rate=0.006; optimizer=adamw\n", said)
    assert re.search(r"checks: \d+ passed", said) and "warning: check" not in said
    steps = checkpoint.steps(folder / "tuned")
    assert len(steps) == 3 and len({(step / "frozen.pt").stat().st_ino for step in steps}) == 1
    state, args, _, _ = load.read_model(folder / "base")
    saved = [checkpoint.load(step)["model"] for step in steps]
    for name in saved[0]:
        kind = name.rpartition(".")[2]
        if kind in ("lora_A", "lora_B", "new_rows"):
            assert not torch.equal(saved[0][name], saved[1][name]), name
        else:
            assert torch.equal(saved[2][name], state[name]), name
    small = torch.load(steps[-1] / "model.pt")["model"]
    assert sum(tensor.numel() for tensor in small.values()) == trained
    optimizer = checkpoint.load(steps[-1], "train")["optimizer"]
    assert {name.rpartition(".")[0] for name in optimizer} == small.keys()
    log = rows(folder, "tuned")
    assert log[-1]["loss/val"] < log[0]["loss/val"] - 0.5
    assert log[-1]["grad/norm"] > 0
    assert log[-1]["grad/noise_scale"] > 0
    assert "gradients/layers.1.attention.wq.lora_B" in log[-1] and "norm/update/layers.0" in log[-1]
    assert json.loads((folder / "tuned/config.json").read_text())["n_trained"] == trained


def test_a_run_that_stops_and_is_resumed_is_the_uninterrupted_one(folder):
    for steps in (6, 12):
        done = train(folder, *TRAIN, "--init_from=base", "--out_dir=resumed",
                     f"--max_iters={steps}")
        assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming resumed at iteration 6 of 12" in done.stdout
    for part in "model", "train":
        found, expected = (checkpoint.load(checkpoint.newest(folder / out), part)
                           for out in ("resumed", "tuned"))
        for name, tensor in expected["model" if part == "model" else "optimizer"].items():
            assert torch.equal(
                tensor, found["model" if part == "model" else "optimizer"][name]), name


def test_two_processes_train_as_one_does(folder):
    """
    The base is in 8 bits and each step has several passes. There is no dropout, because each
    process draws its own.
    """
    args = [*TRAIN, "--init_from=q8.gguf", "--max_iters=4", "--dropout=0"]
    alone = train(folder, *args, "--out_dir=alone")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1], "WORLD_SIZE": 2}
    with ThreadPoolExecutor(2) as pool:
        both = [*pool.map(lambda rank: train(folder, *args, "--out_dir=both", **where, RANK=rank,
                                             LOCAL_RANK=rank), range(2))]
    assert all(done.returncode == 0 for done in both), "".join(
        done.stdout + done.stderr for done in both)
    assert " passed in " in both[0].stdout and "warning: check" not in both[0].stdout
    one, two = (rows(folder, out)[-1] for out in ("alone", "both"))
    assert one["loss/train"] == pytest.approx(two["loss/train"], rel=1e-5)
    assert one["grad/norm"] == pytest.approx(two["grad/norm"], rel=1e-3)


def test_the_exported_file_is_merged_and_run_continues_as_sample_does(folder, run_bin):
    out = folder / "tuned"
    prompt = "What does Ruby have?"
    ours = forked.run([ROOT / "sample.py", "tuned", f"--prompt={prompt}", "--temperature=0",
                       "--max_new_tokens=30"], folder, os.environ)
    assert ours.returncode == 0, ours.stderr
    state, args, vocabulary, _ = load.read_model(out)
    exported = load.read_model(out / "model.gguf")[0]
    for name in exported:
        assert far(exported[name], state[name].float()) < 1e-6
    length = len(vocabulary.encode_prompt(prompt)) + 30
    theirs = run(run_bin, out / "model.gguf", "-t", "0", "-n", length,
                 "-i", prompt).decode(errors="replace")
    assert theirs.strip().split("\n")[0] == ours.stdout.strip().split("\n")[0]
    assert len(ours.stdout) > len(prompt)


def test_a_base_in_8_bits_keeps_its_integers(folder):
    done = train(folder, *TRAIN, "--init_from=q8.gguf", "--out_dir=eight", "--max_iters=4",
                 "--lora_targets=q_proj,w2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "for wq,w2: " in done.stdout, done.stdout + done.stderr
    assert "frozen in Q8_0" in done.stdout, done.stdout + done.stderr
    saved = checkpoint.load(checkpoint.newest(folder / "eight"))["model"]
    file = load.read_model(folder / "q8.gguf")[0]
    assert {name for name in saved if name.endswith(".q")} == {
        name.replace(".weight", ".q") for name in file.q8_0}
    for name, blocks in file.q8_0.items():
        q, d = blocks()
        assert torch.equal(saved[name.replace(".weight", ".q")], q)
        assert torch.equal(saved[name.replace(".weight", ".d")], d)
    assert {name.split(".")[-2] for name in saved if name.endswith("lora_B")} == {"wq", "w2"}


@pytest.mark.parametrize("mode, said", [
    ("--dry_run", "dry run passed"), ("--overfit=2", "LoRA can't learn tokens")])
def test_modes_try_a_lora(folder, mode, said):
    done = train(folder, *TRAIN, "--init_from=q8.gguf", "--out_dir=tried", "--learning_rate=1e-4",
                 "--max_iters=3", mode)
    assert done.returncode == (0 if "dry" in mode else 1), done.stdout + done.stderr
    assert said in done.stdout, done.stdout + done.stderr
    assert not (folder / "tried").exists()


@pytest.mark.slow
@pytest.mark.parametrize("more", [
    ["--compile=True"], ["--dtype=bfloat16"], ["--activation_checkpointing=True"]])
def test_it_trains_the_same_otherwise_computed(folder, more):
    done = train(folder, *TRAIN, "--init_from=base", "--out_dir=other" + more[0][2:6],
                 "--max_iters=12", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    found, expected = (rows(folder, out)[-1] for out in ("other" + more[0][2:6], "tuned"))
    # The compiler draws other dropout masks.
    assert found["loss/val"] == pytest.approx(expected["loss/val"], abs=0.05)


def test_a_lora_is_tuned_again_and_evaluated_as_any_model(folder):
    done = train(folder, *TRAIN, "--init_from=tuned", "--out_dir=again", "--max_iters=2",
                 "--lora_targets=wv")
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = (load.read_model(folder / out)[0] for out in ("tuned", "again"))
    changed = {name for name in before if far(after[name].float(), before[name].float()) > 1e-6}
    assert changed == {f"layers.{n}.attention.wv.weight" for n in range(2)}
    done = train(folder, "--data=chats.jsonl", "--out_dir=tuned", "--eval_only=True")
    losses = [row["loss/val"] for row in rows(folder, "tuned") if "loss/val" in row]
    assert f"validation loss {losses[-1]:.4f}" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "args, said",
    [(["--init_from=base", "--lora_targets=wq,wx"],
      "there is no matrix 'wx' in a block; expected all alone, or some of wq,wk,wv,wo,w1,w2,w3"),
     (["--init_from=base", "--lora_targets="], "names no matrix; expected all alone, or some of"),
     (["--init_from=base", "--lora_rank=-1"], "lora_rank is -1"),
     (["--init_from=scratch"],
      "--lora_rank=4: LoRA adapts a trained model; give its path as --init_from"),
     (["--init_from=base", "--out_dir=tuned", "--lora_rank=8"],
      "holds a run with lora_rank=4, now it is 8"),
     (["--init_from=base", "--out_dir=tuned", "--lora_targets=wq"],
      "holds a run with lora_targets=all, now it is wq"),
     (["--init_from=base", "--out_dir=tuned", "--lora_rank=0"],
      "holds a run with lora_rank=4, now it is 0")])
def test_what_can_not_be_is_refused_in_a_line(folder, args, said):
    done = train(folder, *TRAIN, "--out_dir=refused", "--max_iters=20", *args)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("error: ") == 1, done.stdout + done.stderr
    assert said in done.stderr, done.stdout + done.stderr


def test_adapters_of_a_run_without_are_refused(tmp_path, folder, capsys, monkeypatch):
    assert "holds no adapters" in refused(
        capsys, load.read_adapters, checkpoint_of_a_plain_run(tmp_path))
    steps = checkpoint.steps(folder / "tuned")
    saved = torch.load(steps[0] / "model.pt")
    for values in ({"rank": 0}, {"alpha": float("inf")}, {"targets": ["x"]}, {"rank": 5},
                   {"frozen_rows": 1}, {"frozen_rows": 1 << 20}, {"quantized": ["tok_embeddings"]}):
        with pytest.raises((SystemExit, ValueError)):
            spec = lora.of_checkpoint(saved | {"lora": saved["lora"] | values})
            shapes = {name: tuple(w.shape)
                      for name, w in checkpoint.load(steps[0])["model"].items()}
            load.check_tensors(shapes, lora.expected_tensors(ModelArgs(**saved["args"]), spec), "x",
                               ignored=shapes)
    capsys.readouterr()


def checkpoint_of_a_plain_run(folder):
    from tests.test_export import save_run
    model = build(V, **SHAPES["tied"])
    (folder / "v").mkdir()
    return save_run(folder / "plain", model, BytesFile())


class BytesFile:
    """A vocabulary that test_export.save_run can save."""

    def save(self, path):
        path.write_bytes(Bytes().data)


# ---- costs ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("quantized", [False, True])
def test_memory_and_flops_are_those_of_the_adapted_model(quantized, tmp_path):
    base = build(V, **SHAPES["untied, biases"])
    export.export_model(base.state_dict(), base.args, Bytes(), tmp_path / "base.gguf",
                        dtype="q8_0" if quantized else "f32")
    model = adapted(tmp_path / "base.gguf", new=2)
    kinds = costs.persistent_memory(model.args, "adamw", 1, model.lora)
    trained, frozen = lora.split(model)
    numbers = sum(p.numel() for p in trained.values())
    assert kinds == {
        "frozen weights": sum(p.nbytes for p in frozen.values()), "weights": 4 * numbers,
        "optimizer": 8 * numbers
    }
    config = trainer_config(optimizer="adamw", batch_size=2, max_seq_len=64, lora_rank=4)
    expected = costs.expected_memory(config, model.args, torch.device("cpu"), torch.float32,
                                     adapters=model.lora)
    assert expected["gradients"] == 4 * numbers
    assert expected["frozen weights"] == kinds["frozen weights"]
    if quantized:
        return
    x = torch.randint(V, (2, 64))
    with FlopCounterMode(display=False) as counter, trainer.ops.plain_formulas():
        model(x, x)[1].backward()
    # The two counts differ in the gradient of the first block's inputs, which is not needed, and in
    # biases and norms, which are not matrix products.
    assert counter.get_total_flops() == pytest.approx(
        x.numel() * costs.flops_per_token(model.args, adapters=model.lora), rel=0.15)


def test_the_table_of_a_preset_has_a_row_for_what_is_trained(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "model.py", "--lora_rank=8", "--max_iters=10", "--batch_size=2"],
        cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"trained +[\d,]+ +\d+%", done.stdout), done.stdout
    assert "frozen weights" in done.stdout, done.stdout
