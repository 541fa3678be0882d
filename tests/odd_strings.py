"""
Encode odd strings with tokenizer.py (and so with sentencepiece), run and transformers, and compare.

llama.cpp is compared, too, if LLAMA_CPP names a folder with its programs:

    LLAMA_CPP=llama.cpp/build/bin python -m tests.odd_strings ./run
"""
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer

import export
from model import ModelArgs, Transformer
from tests.test_encode import LIKE_OURS, WORDS, tokenize, train
from tokenizer import PRE_TOKENIZERS, Bytes, Characters, SentencePiece, train_byte_level

CORES = [
    "Once upon a time", "été", "日本語 你好", "مرحبا", "नमस्ते", "😀", "👩‍👩‍👧", "e\u0301", "𝔘",
    "\u2581", "\u2581\u2581x", "\t", "\n", "\r\n", "\0", "\x01\x1b[0m\x7f", "\ufeff", "\u200b",
    "\u00a0", "\u2028", "\ufffd", "<s>", "</s>", "<unk>", "<0x41>", "<0x0A>", "<|im_start|>",
    "[INST]", "1234567890", "it's \"so\"\\n"
]
AROUND = ["{}", " {}", "  {}", "{} ", "{}  ", "a{}b", "{0}{0}", "x {} y"]
LONG = [
    "", " ", "  ", "   ", " " * 300, "x" * 5000, "ab" * 3000, "日" * 2000, "once upon " * 500,
    "\u2581" * 99, "😀" * 500, "".join(map(chr, range(256))),
    "".join(map(chr, range(0x3040, 0x3200))), "<s>" * 200, "aaab" * 400, "a  " * 300
]
STRINGS = [around.format(core) for core in CORES for around in AROUND] + LONG


@functools.cache
def vocabularies():
    """
    Return {kind: Tokenizer}.

    The kinds are sentencepiece as train.py makes it, bytes, characters, few of which occur in most
    strings, and byte-level BPE.
    """
    return {
        "sentencepiece": SentencePiece(train(**LIKE_OURS).SerializeToString(), "tokenizer.model"),
        "byte": Bytes(), "char": Characters("Once upon a time, été\n日本 語 it's")
    } | {f"bpe {pre}": byte_level_of(pre) for pre in PRE_TOKENIZERS}


def byte_level_of(pre):
    with tempfile.TemporaryDirectory() as folder:
        return train_byte_level([" ".join(WORDS) + " once upon  a time\n\tx == 12;\r\n"] * 9, 600,
                                Path(folder, "t.json"), pre, exact=False)


def export_both(vocabulary, folder):
    """Write a small model with this vocabulary to folder/m.gguf and folder/hf."""
    torch.manual_seed(0)
    model = Transformer(
        ModelArgs(vocab_size=vocabulary.vocab_size, dim=32, n_layers=1, n_heads=2, max_seq_len=64))
    for name, format in (("m.gguf", "gguf"), ("hf", "hf")):
        export.export_model(model.state_dict(), model.args, vocabulary, folder / name, format)


def by_run(run_bin, folder, strings=STRINGS):
    lines = [s for s in strings if "\n" not in s]
    found = dict(zip(lines, tokenize(run_bin, [folder / "m.gguf"], [s.encode() for s in lines])))
    for s in set(strings) - set(lines):
        (folder / "prompt").write_bytes(s.encode())
        found[s], = tokenize(run_bin, [folder / "m.gguf", "-f", folder / "prompt"], [])
    return [found[s] for s in strings]


def by_transformers(folder, strings=STRINGS):
    return AutoTokenizer.from_pretrained(folder / "hf")(strings, add_special_tokens=False,
                                                        verbose=False)["input_ids"]


def by_llama_cpp(programs, folder, strings=STRINGS):
    """Return the ids of each string, None where the program failed."""
    def encode(s):
        (folder / "prompt").write_bytes(s.encode())
        done = subprocess.run([
            Path(programs, "llama-tokenize"), "-m", folder / "m.gguf", "-f", folder / "prompt",
            "--ids", "--no-bos", "--no-parse-special", "--no-escape", "--log-disable"
        ], capture_output=True)
        return json.loads(done.stdout) if done.returncode == 0 else None
    return [encode(s) for s in strings]


def main(run_bin, programs):
    failed = 0
    for kind, vocabulary in vocabularies().items():
        with tempfile.TemporaryDirectory() as folder:
            folder, expected = Path(folder), [vocabulary.encode(s) for s in STRINGS]
            export_both(vocabulary, folder)
            found = {"run": by_run(run_bin, folder), "transformers": by_transformers(folder)}
            if programs:
                found["llama.cpp"] = by_llama_cpp(programs, folder)
            for reader, all_ids in found.items():
                different = [s for s, ids, ours in zip(STRINGS, expected, all_ids, strict=True)
                             if ids != ours]
                failed += len(different)
                print(f"{kind}: {len(STRINGS) - len(different)} of {len(STRINGS)} odd strings "
                      f"equal in {reader}",
                      *(f"not {s[:40]!r}" for s in different[:5]), sep=", ", flush=True)
    if not programs:
        print("llama.cpp: not compared, LLAMA_CPP names no folder of its programs")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], os.environ.get("LLAMA_CPP")))
