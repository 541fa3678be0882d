"""
Mutate every file format that Python reads.

A reader either reads the mutant or ends with a one-line error and exit code 2. A child process
reads the mutants one after the other; if it crashes or hangs, the parent records the mutant and
starts another child with the next one.

    FORMATS  {name: (function that writes valid files to a folder and returns their paths,
              function that reads them)}
    mutate   reads mutants of a format; returns failures, number of refusals and peak memory
"""
import contextlib
import gzip
import hashlib
import json
import lzma
import os
import random
import re
import select
import shutil
import signal
import struct
import sys
import traceback
import zipfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import compare
import configurator
import evaluate
import export
from configurator import Config, source_knobs
from data import Dataset
from engine import sweep_file
from engine.formats.chat_template import CHATML, Chat
from engine.text import prepare, readers
from engine.text.conversations import Intake
from engine.text.corpus import Conversations, Corpus, scan
from engine.training import checkpoint, load, lora, progress, resume, run_folder
from model import ModelArgs, Transformer
from tokenizer import Bytes, Tokenizer, train_byte_level, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
TEXT = ("once upon a time there was a little girl who played outside, in the park: "
        "Girl outside, 12 girls of 7.")
SECONDS = 30   # max seconds without a report from a reader
MEMORY = 2048  # max peak memory of a process in MB
ODD = [
    None, True, [], {}, "", "x", "../../x", "/dev/zero", -1, 0, 1, 2.5, 1e308, -1e30, 1 << 31,
    1 << 63, 10 ** 40, 10 ** 4000, [[]] * 9, {"a": []}, "\ud800", "\x1b[2J", "NaN", [1] * 1000
]


# ---- valid files, and readers that read all of each file

def small_model(vocabulary):
    torch.manual_seed(1)
    return Transformer(
        ModelArgs(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, vocab_size=vocabulary.vocab_size,
                  hidden_dim=32, max_seq_len=16))


def sentencepiece(folder):
    if not (folder.parent / "kept.model").exists():
        words = TEXT.split()
        lines = [" ".join(random.Random(n).choices(words, k=9)) for n in range(100)]
        train_tokenizer(lines, 290, folder.parent / "kept.model", exact=False)
    shutil.copy(folder.parent / "kept.model", folder / "tokenizer.model")
    return Tokenizer.load(folder / "tokenizer.model")


def use(vocabulary):
    """Encode, decode and convert to the other vocabulary formats."""
    if vocabulary:
        ids = vocabulary.encode(TEXT + " \u2581<s>é日\n\0", bos=True, eos=True)
        vocabulary.decode([i for i in ids if i < vocabulary.vocab_size])
        vocabulary.pieces(), vocabulary.hugging_face()
        if vocabulary.kind != "bpe":
            vocabulary.tokenizer_bin()


def read_model(path, tokenizer=""):
    state, args, vocabulary, _ = load.read_model(path, tokenizer)
    for name in state:
        state[name].sum()
    use(vocabulary)


def exported(format, dtype="f32", vocabulary=sentencepiece):
    def make(folder):
        found = vocabulary(folder)
        model = small_model(found)
        name = "m" if format == "hf" else "m.gguf" if format == "gguf" else "m.bin"
        export.export_model(model.state_dict(), model.args, found, folder / name, format, dtype, 16)
        (folder / "tokenizer.model").unlink(missing_ok=True)
        return sorted(path for path in folder.rglob("*") if path.is_file())

    return make


def byte_level(folder):
    if not (folder.parent / "kept.json").exists():
        train_byte_level([TEXT] * 9, 290, folder.parent / "kept.json", exact=False)
    return Tokenizer.load(folder.parent / "kept.json")


def only_tokenizer(folder):
    sentencepiece(folder)
    return [folder / "tokenizer.model"]


def tokenizer_json(folder):
    exported("hf", vocabulary=byte_level)(folder)
    (folder / "m/model.safetensors").unlink()
    return [folder / "m/tokenizer.json"] * 3 + [folder / "m/tokenizer_config.json"]


def our_json(folder):
    Bytes().save(folder / "a.json")
    shutil.copy(folder.parent / "kept.json" if byte_level(folder) else "", folder / "b.json")
    return [folder / "a.json", folder / "b.json"]


def in_shards(folder):
    """Write a Hugging Face folder with two weight files and their index."""
    from safetensors.torch import load_file, save_file
    exported("hf")(folder)
    whole, where = load_file(folder / "m/model.safetensors"), {}
    for number, names in enumerate((list(whole)[::2], list(whole)[1::2])):
        save_file({name: whole[name] for name in names}, folder / f"m/model-{number}.safetensors")
        where |= dict.fromkeys(names, f"model-{number}.safetensors")
    (folder / "m/model.safetensors").unlink()
    (folder / "m/model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return sorted((folder / "m").glob("model*"))


def of_meta(folder):
    vocabulary = sentencepiece(folder)
    model = small_model(vocabulary)
    torch.save(dict(model.named_parameters()) | {"rope.freqs": torch.ones(4)},
               folder / "consolidated.00.pth")
    args = {"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "norm_eps": 1e-5,
            "vocab_size": vocabulary.vocab_size}
    (folder / "params.json").write_text(json.dumps(args))
    return [folder / "consolidated.00.pth", folder / "consolidated.00.pth", folder / "params.json"]


def knobs(folder):
    found = {name: knob[0] for name, knob in source_knobs(ROOT / "train.py").items()}
    return Config(found | {"out_dir": str(folder), "init_from": "auto"}, found, {})


def run_files(folder):
    vocabulary = sentencepiece(folder)
    model, s = small_model(vocabulary), knobs(folder)
    opt = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long))[1].backward()
    opt.step()
    meta = {"fingerprint": "x", "tokenizer_sha256": "y"}
    signature = resume.resume_signature(s, model.args, SimpleNamespace(meta=meta))
    state = progress.new_state(s, progress.NO_LIMIT, signature) | {"step": 1}
    saved = {"args": asdict(model.args), "model": dict(model.named_parameters())}
    train = {"optimizer": opt.state_dict(), "state": state}
    checkpoint.save(folder, checkpoint.Contents(1, saved, train, s.as_dict(),
                                                folder / "tokenizer.model", 1.0))
    (folder / "trainer.json").write_text(
        json.dumps({"made_by": "llamac", "pid": 1, "host": "h", "since": "now"}))
    step = folder / "checkpoints/step_00000001"
    return [*sorted(step.iterdir()), folder / "best", folder / "latest", folder / "trainer.json"]


def read_run(folder):
    """Read what sample.py, export.py and a resumed training read from a run."""
    read_model(folder)
    step = checkpoint.locate(folder)
    s = knobs(folder)
    resume.resume_settings(s, step, set())
    model = small_model(Tokenizer.load(checkpoint.tokenizer_path(step)))
    opt = torch.optim.AdamW(model.parameters())
    meta = {"fingerprint": "x", "tokenizer_sha256": "y"}
    signature = resume.resume_signature(s, model.args, SimpleNamespace(meta=meta))
    resume.restore(s, step, signature, opt, False)
    progress.load_checkpoint(step, model, opt)
    run_folder.recover(folder)


def lora_files(folder):
    """Write a LoRA run whose base has one token less and some matrices in Q8_0."""
    vocabulary = sentencepiece(folder)
    spec = lora.LoRA(2, ("wq", "w2"), 16.0, torch.float32, frozenset({"layers.1.feed_forward.w2"}),
                     vocabulary.vocab_size - 1)
    model = lora.build(small_model(vocabulary).args, spec, "cpu")
    for p in model.parameters():
        p.data.fill_(1)
    trained, frozen = lora.split(model)
    saved = {"args": asdict(model.args), "model": trained, "chat": {}} | lora.stored(spec)
    checkpoint.save(folder, checkpoint.Contents(1, saved, {}, {"init_from": "m"},
                                                folder / "tokenizer.model", 1.0, frozen))
    step = folder / "checkpoints/step_00000001"
    return [step / "model.pt", step / "model.pt", step / "frozen.pt", step / "checkpoint.json"]


def read_lora(folder):
    """Read what a resumed training and export.py read from a LoRA run and not from other runs."""
    step = checkpoint.locate(folder)
    spec = load.plan_lora(None, torch.float32, step, True)
    if spec:
        lora.build(small_model(Tokenizer.load(checkpoint.tokenizer_path(step))).args, spec, "cpu")
        load.read_adapters(step)
    read_model(folder)


def adapters_of_peft(folder):
    """Write a Hugging Face folder and a PEFT folder with adapters for it."""
    from safetensors.torch import save_file
    exported("hf")(folder)
    (folder / "a").mkdir()
    config = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none",
        "base_model_name_or_path": str(folder / "m"), "target_modules": ["q_proj"],
        "trainable_token_indices": [3, 4]
    }
    (folder / "a/adapter_config.json").write_text(json.dumps(config))
    names = [f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_{letter}.weight"
             for n in range(2) for letter in "AB"]
    rows = {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta":
            torch.ones(2, 16)}
    save_file({name: torch.ones((2, 16) if "_A" in name else (16, 2)) for name in names} | rows,
              folder / "a/adapter_model.safetensors")
    return [folder / "a/adapter_config.json", folder / "a/adapter_model.safetensors"]


def fitting_manifest(folder):
    """Update a checkpoint's manifest to the mutated files, so that readers get past its hashes."""
    for path in folder.glob("checkpoints/*/checkpoint.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, RecursionError,
                                 KeyError):
            found = json.loads(path.read_bytes())
            found["files"] = {name: checkpoint.size_and_sha256(path.parent / name)
                              for name in found["files"] if (path.parent / name).is_file()}
            path.write_text(json.dumps(found))


def prepared(folder):
    vocabulary = Bytes()
    vocabulary.save(folder / "tokenizer.json")
    ids = vocabulary.encode(TEXT * 20, bos=True, eos=True)
    for name in "train", "val":
        np.array(ids, "<u2").tofile(folder / f"{name}.bin")
    counts = {
        f"{split}_{what}": {"tokens": len(ids), "documents": 1, "bytes": len(ids) - 2}[what]
        for split in ("train", "val") for what in ("tokens", "documents", "bytes")
    }
    meta = {
        "version": 1, "vocab_size": 259, "vocab_source": "byte", "tokenizer": "tokenizer.json",
        "source": "x", "tokenizer_sha256": vocabulary.sha256(), "dtype": "uint16",
        "fingerprint": prepare.fingerprint(folder)
    } | counts
    (folder / "meta.json").write_text(json.dumps(meta))
    return [folder / "meta.json"] * 3 + [folder / "train.bin", folder / "val.bin",
                                         folder / "tokenizer.json"]


def read_prepared(folder):
    dataset = Dataset(prepare.load(folder), 16, 2, 2, 1)
    (dataset.make_batch(0), dataset.make_batch(3), dataset.probe_batches(2),
     dataset.bits_per_byte(1.0))
    for _ in dataset.eval_batches("val", 64, 64):
        pass


def fitting_meta(folder):
    """Update the hashes in the metadata of prepared data to the mutated files."""
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, RecursionError):
        found = json.loads((folder / "meta.json").read_bytes())
        found |= {
            "fingerprint": prepare.fingerprint(folder),
            "tokenizer_sha256": hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
        }
        (folder / "meta.json").write_text(json.dumps(found))


ROWS = [{"text": TEXT * (1 + n % 3), "n": n} for n in range(40)]


def table(name):
    def make(folder):
        path = folder / name
        end = path.name.removesuffix(".gz").removesuffix(".xz").rpartition(".")[2]
        if end == "parquet":
            import pyarrow
            from pyarrow import parquet
            parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=15)
            return [path]
        mark = {"csv": ",", "tsv": "\t"}.get(end)
        lines = ["\n".join(json.dumps(row) for row in ROWS)]
        if mark:
            lines = [f"n{mark}text", *(f'{row["n"]}{mark}"{row["text"]}"' for row in ROWS)]
        text = (json.dumps(ROWS) if end == "json" else TEXT * 40 if end == "txt"
                else "\n".join(lines))
        packed = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
        path.write_bytes(packed(text.encode()))
        return [path]

    return make


def read_table(folder):
    path = next(p for p in folder.iterdir() if p.name.startswith("a."))
    copies = folder / "copies"
    copies.mkdir(exist_ok=True)
    prepare.text_bytes(path)
    try:
        here, (found, _), _ = readers.readable(path, copies / "0", "text",
                                               lambda here: scan(here, "text"))
        rows = np.insert(found, 0, 0, axis=1)
        for _ in Corpus(rows, [str(here)]).texts(rows):
            pass
    except readers.Unfit as e:
        configurator.fail(e)
    except OSError as e:
        configurator.fail(f"{e.filename}: {e.strerror or e}")


TALK = [{
    "messages": ([{"role": "system", "content": "Be brief."}] * (n % 2)
                 + [{"role": "user", "content": TEXT[n:]},
                    {"role": "assistant", "content": f"Yes {n}."}] * (1 + n % 3))
} for n in range(40)]


def talk(name):
    def make(folder):
        if name.endswith("parquet"):
            import pyarrow
            from pyarrow import parquet
            parquet.write_table(pyarrow.Table.from_pylist(TALK), folder / name, row_group_size=15)
        else:
            (folder / name).write_text(
                "\n".join(map(json.dumps, TALK)) if name.endswith("l") else json.dumps(TALK))
        return [folder / name]

    return make


def read_talk(folder):
    """Read and encode conversations; a mutant may hold plain texts instead."""
    path, intake = next(p for p in folder.iterdir() if p.name.startswith("a.")), Intake()
    (folder / "copies").mkdir(exist_ok=True)
    chat = Chat(CHATML, Bytes())

    def look(here):
        intake.begin(path)
        return scan(here, "text", intake=intake)

    try:
        here, (found, _), _ = readers.readable(path, folder / "copies/0", "text", look)
        rows = np.insert(found, 0, 0, axis=1)
        intake.accept(), intake.report("x")
        for turns, _ in Conversations(rows, [str(here)]).turns(rows) if intake.kind else ():
            chat.encode(turns)
    except readers.Unfit as e:
        configurator.fail(e)


def prepared_talk(folder):
    chat, ids, marks = Chat(CHATML, Bytes()), [], []
    for record in TALK:
        found = chat.encode([(turn["role"], turn["content"]) for turn in record["messages"]])
        ids, marks = ids + found[0], marks + found[1]
    paths = prepared(folder)
    chat.tokenizer.save(folder / "tokenizer.json")
    meta = (json.loads((folder / "meta.json").read_text())
            | {"vocab_size": 261, "chat_template": CHATML})
    for split in "train", "val":
        np.array(ids, "<u2").tofile(folder / f"{split}.bin")
        np.array(marks, "u1").tofile(folder / f"{split}_mask.bin")
        meta |= {f"{split}_tokens": len(ids), f"{split}_documents": 40,
                 f"{split}_answer_tokens": 900, f"{split}_answer_bytes": 800}
    (folder / "meta.json").write_text(json.dumps(meta))
    fitting_meta(folder)
    return [*paths, folder / "train_mask.bin", folder / "val_mask.bin"]


def read_prepared_talk(folder):
    for length in 256, 1024:
        dataset = Dataset.of(prepare.load(folder), length, 2, 2, 1)
        (dataset.make_batch(0), dataset.make_batch(3), dataset.probe_batches(2),
         dataset.bits_per_byte(1.0))
        for _ in dataset.eval_batches("val", 64, 64):
            pass


def settings(name, text):
    def make(folder):
        (folder / name).write_text(text)
        return [folder / name]

    return make


SWEEP = """program: train.py
method: random
metric: {name: loss/val, goal: minimize}
parameters:
  learning_rate: {distribution: log_uniform_values, min: 0.0001, max: 0.01}
  batch_size: {values: &a [8, 16]}
  dim: {values: *a}
run_cap: 3
"""


def read_settings(folder):
    path = str(next(folder.iterdir()))
    g = ({name: knob[0] for name, knob in source_knobs(ROOT / "train.py").items()}
         | {"__file__": str(ROOT / "train.py")})
    configurator.configure(g, argv=[path])


def read_sweep(folder):
    found = configurator.read_file(str(next(folder.iterdir())))
    try:
        sweep_file.check(found)
    except ValueError as e:
        configurator.fail(e)
    for spec in found["parameters"].values() if found["method"] == "random" else ():
        sweep_file.draw(spec, random.Random(1))


def logged(folder):
    rows = [{"iter": n, "tokens": 100 * n, "time": float(n), "loss/train": 3.0 - n / 9}
            | ({"loss/val": 2.0} if n % 3 else {}) for n in range(12)]
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "config.json").write_text(json.dumps({"dim": 4, "learning_rate": 0.1, "data": "x"}))
    return [folder / "log.jsonl", folder / "log.jsonl", folder / "config.json"]


def read_logged(folder):
    found = compare.read_runs([folder])
    try:
        compare.lines_of(compare.table_of(found)), compare.chart(found)
    except ValueError as e:
        configurator.fail(e)


LABELLED = [{"prompt": "a", "expected": "b", "classes": ["b", "c"]},
            {"context": "a", "choices": ["b", "c"], "answer": 1},
            {"good": "a b", "bad": "b a", "kind": "order"}]


def labelled(folder):
    for n, row in enumerate(LABELLED):
        (folder / f"{n}.jsonl").write_text("\n".join([json.dumps(row)] * 3))
    return [folder / f"{n}.jsonl" for n in range(len(LABELLED))]


def read_labelled(folder):
    evaluate.read_labelled(folder / "0.jsonl")
    evaluate.read_task(folder / "1.jsonl")
    evaluate.read_pairs(folder / "2.jsonl", Bytes())


FORMATS = {
    "gguf": (exported("gguf"), lambda f: read_model(f / "m.gguf")),
    "gguf q4_0": (exported("gguf", "q4_0"), lambda f: read_model(f / "m.gguf")),
    "gguf with bpe": (exported("gguf", vocabulary=byte_level), lambda f: read_model(f / "m.gguf")),
    **{f"llama2.c {v}": (exported(v), lambda f: read_model(f / "m.bin", str(f / "tokenizer.bin")))
       for v in ("v0", "v1", "v2")},
    "tokenizer.model": (only_tokenizer, lambda f: use(Tokenizer.load(f / "tokenizer.model"))),
    "tokenizer.json": (tokenizer_json, lambda f: use(Tokenizer.load(f / "m/tokenizer.json"))),
    "our tokenizer.json": (
        our_json, lambda f: [use(Tokenizer.load(f / name)) for name in ("a.json", "b.json")]),
    "hugging face": (exported("hf"), lambda f: read_model(f / "m")),
    "hugging face in shards": (in_shards, lambda f: read_model(f / "m")),
    "meta .pth": (of_meta, read_model),
    "checkpoint": (run_files, read_run),
    "checkpoint of a lora": (lora_files, read_lora),
    "peft": (adapters_of_peft, lambda f: read_model(f / "a")),
    "prepared data": (prepared, read_prepared),
    "prepared conversations": (prepared_talk, read_prepared_talk),
    **{f"conversations {name}": (talk(f"a.{name}"), read_talk)
       for name in ("jsonl", "json", "parquet")},
    **{name: (table(f"a.{name}"), read_table)
       for name in ("txt", "jsonl", "json", "csv", "tsv", "parquet", "txt.gz", "jsonl.xz")},
    "yaml config": (
        settings("a.yaml", "dim: 64\nlearning_rate: 1e-3\ndata: &x a.txt\nvocab_source: byte\n"),
        read_settings),
    "json config": (settings("a.json", '{"dim": 64, "learning_rate": 0.001, "data": "a.txt"}'),
                    read_settings),
    "sweep": (settings("a.yaml", SWEEP), read_sweep),
    "log.jsonl": (logged, read_logged),
    "labelled .jsonl": (labelled, read_labelled),
}
FITTING = {
    "checkpoint": fitting_manifest, "checkpoint of a lora": fitting_manifest,
    "prepared data": fitting_meta, "prepared conversations": fitting_meta
}


# ---- mutants

def mutant(data, rng, name):
    """
    Return `data` with random changes.

    A file of JSON or a pickle often gets another value; other changes are to any byte, more often
    near the beginning.
    """
    if name.endswith((".pth", ".pt")) and rng.random() < 0.6:
        return with_pickle(data, rng)
    if name.endswith((".json", ".jsonl")) and rng.random() < 0.6:
        return with_value(data, rng)
    if name.endswith(".safetensors") and rng.random() < 0.5:
        size, = struct.unpack("<Q", data[:8])
        header = with_value(data[8:8 + size], rng)
        return struct.pack("<Q", len(header)) + header + data[8 + size:]
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if not data:
            break
        at = rng.randrange(min(len(data), rng.choice((64, 512, 8192, 1 << 30))))
        size = rng.choice((1, 2, 4, 8, 64))
        kind = rng.randrange(7)
        if kind < 3:
            data[at] = rng.choice((0, 1, 127, 128, 255, 10, 34, 44, 91, 123, rng.randrange(256)))
        elif kind == 3:
            data[at:at + 4] = struct.pack(
                "<I", rng.choice((0, 1, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)))
        elif kind == 4:
            del data[at:at + size]
        elif kind == 5:
            data[at:at] = data[at:at + size] * rng.choice((1, 2, 100))
        elif rng.random() < 0.3:
            del data[at:]
    return bytes(data)


def with_value(data, rng):
    """Change, rename or delete a value in JSON or in a line of JSONL, or lengthen some numbers."""
    lines = data.split(b"\n")
    n = rng.randrange(len(lines))
    try:
        whole = json.loads(data)
        lines, n = [data], 0
    except ValueError:
        whole = json.loads(lines[n]) if lines[n].strip().startswith(b"{") else {}
    parent, key, here = None, None, whole
    while isinstance(here, (dict, list)) and here and (parent is None or rng.random() < 0.7):
        parent, key = here, rng.choice([*here] if isinstance(here, dict) else range(len(here)))
        here = here[key]
    if parent is not None:
        action = rng.randrange(6)
        if action == 0:
            del parent[key]
        elif action == 1 and isinstance(parent, dict):
            parent[rng.choice(("x", "../x", "\x1b[2J", *parent))] = parent.pop(key)
        else:
            parent[key] = rng.choice(ODD)
    text = json.dumps(whole)
    if rng.random() < 0.1:
        text = re.sub(r"\d+", "9" * rng.choice((20, 400, 5000)), text, count=rng.choice((1, 3)))
    lines[n] = text.encode()
    return b"\n".join(lines)


def with_pickle(data, rng):
    """Mutate the pickle, or rarely another entry, of a torch.save file; its checksum is valid."""
    import io
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        entries = old.infolist()
        pickled = next(entry for entry in entries if entry.filename.endswith("data.pkl"))
        chosen = pickled if rng.random() < 0.9 else rng.choice(entries)
        for entry in entries:
            content = old.read(entry)
            if entry is chosen:
                content = mutant(content, rng, "")
            new.writestr(entry.filename, content, rng.choice((0, 0, 0, 0, 0, 0, 0, 8)))
    return out.getvalue()


# ---- reading them

def outcome(read, folder, said):
    """
    Read a folder and return what went wrong, "" if nothing did.

    A one-line error with exit code 2 is fine. `said` is the open file that replaces stderr.
    """
    said.seek(0)
    said.truncate()
    try:
        read(folder)
        return ""
    except SystemExit as e:
        sys.stderr.flush()
        said.seek(0)
        lines = said.read()
        good = e.code == 2 and lines.count(b"\n") == 1 and lines.startswith(b"error: ")
        return "" if good else f"exit {e.code}: {lines[-300:]!r}"
    except BaseException:
        return traceback.format_exc(-3)[-900:]


def peak():
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) >> 10


def serve(name, folder, numbers, pipe):
    """
    Read the mutants of these numbers, in the child.

    For each, write two lines to the pipe: its number before, the outcome after reading it.
    """
    make, read = FORMATS[name]
    torch.set_num_threads(1)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files = make(folder)
    whole = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with open(f"{folder}.err", "w+b", buffering=0) as said, open(os.devnull, "wb") as nowhere:
        os.dup2(said.fileno(), 2)
        os.dup2(nowhere.fileno(), 1)
        sys.stdout, sys.stderr = (open(fd, "w", encoding="utf-8", errors="replace", buffering=1)
                                  for fd in (1, 2))
        said = open(2, "r+b", buffering=0, closefd=False)
        for number in numbers:
            shutil.rmtree(folder, ignore_errors=True)
            for path, data in whole.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            rng = random.Random(f"{name} {number}")
            if number >= 0:  # -1 reads the unchanged files
                for path in {rng.choice(files) for _ in range(rng.choice((1, 1, 1, 2)))}:
                    path.write_bytes(mutant(path.read_bytes(), rng, path.name))
                if name in FITTING and rng.random() < 0.8:
                    FITTING[name](folder)
            os.write(pipe, b"%d\n" % number)
            problem = outcome(read, folder, said)
            refused = b"error: " in Path(f"{folder}.err").read_bytes()
            if number < 0 and not problem and refused:
                problem = "good files were refused: " + Path(f"{folder}.err").read_text()
            os.write(pipe, json.dumps([number, problem, refused, peak()]).encode() + b"\n")


def mutate(name, folder, numbers):
    """Read mutants of a format; return (failures, number of refusals, peak memory in MB)."""
    wrong, refused, most, numbers = [], 0, 0, [-1, *numbers]
    while numbers:
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            try:
                serve(name, Path(folder), numbers, theirs)
            finally:
                os._exit(0)
        os.close(theirs)
        current, text, hung = numbers[0], b"", False
        while True:
            if not select.select([ours], [], [], SECONDS)[0]:
                hung = True
                os.kill(child, signal.SIGKILL)
            more = os.read(ours, 1 << 16)
            if not more:
                break
            *lines, text = (text + more).split(b"\n")
            for line in map(json.loads, lines):
                if isinstance(line, int):
                    current = line
                else:
                    numbers = numbers[1:]
                    wrong += [f"{name} {line[0]}: {line[1]}"] if line[1] else []
                    refused, most = refused + line[2], max(most, line[3])
        os.close(ours)
        _, status = os.waitpid(child, 0)
        if numbers:
            wrong.append(
                f"{name} {current}: {'hangs' if hung else f'ends the process, status {status}'}")
            numbers = [n for n in numbers if n > current]
    return wrong, refused, most
