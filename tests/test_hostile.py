"""Hostile input to the C program: files, prompts, flags and failing system calls.

Each one ends with one line on stderr and exit code 1, or as doc/safety.md describes. The programs
run under the address and undefined-behaviour sanitizers.
"""
import hashlib
import os
import random
import shutil
import struct
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.formats import gguf_file, llama2c
from tests.conftest import FUZZ, LIBRARY, SANITIZE, compile_c
from tests.fuzz.seeds import TARGETS, write_seeds
from tests.test_encode import write_gguf
from tests.test_run import LAYER, MAGIC, TEXT, Model, reciter, run


# ---- flags, files, streams

WRONG_FLAGS = [  # the error message must name the first item of each
    *(["-n", v] for v in ("abc", "", "1.5", "-1", "99999999999", "5 ", " 5", "+5", "0x10", "1e3",
                          "nan", "٣", "1\n2", "\x1b[2J")),
    *(["-t", v] for v in ("nan", "inf", "", "-1", "1x", "0x1", " 1", "1e9", "1e999", "e", ".", "-",
                          "--", "1,5", "1 2")),
    *(["-p", v] for v in ("2", "-0.1", "x", "", "nan", "1.0001", "inf", "1/2", "0x0")),
    *(["-s", v] for v in ("-1", "1e3", "99999999999999999999", "", "x", "1.0", "9007199254740993")),
    *(["-c", v] for v in ("0", "-2", "65", "two", "", "1.5")),
    *(["-j", v] for v in ("0", "-2", "100000", "two", "", "1.5", "nan")),
    *(["-m", v] for v in ("dream", "", "Chat", "generate ", "chat\0"[:4] + "s")),
    *([flag] for flag in ("-n", "-t", "-p", "-s", "-j", "-m", "-i", "-f", "-z", "-y", "-c",
                          "--template", "--perplexity")),  # the value is missing
    *(["-n", "3", flag] for flag in ("-n", "-t", "-i", "-z")),
    ["-q", "1"],
    ["--unknown"],
    ["-nn", "3"],
    ["hello"],
    ["-"],
    [""],
    ["--"],
    ["--raw=1"],
    ["--tokenise"],
    ["--n", "3"],
    ["-N", "3"],
    ["-i=a"],
    ["-n3"],
    ["\x1b[2J"],
    ["é"],
    ["-f", "b", "-i", "a"],
    ["%s%n"],
    ["-" * 5000],
    ["-n", "9" * 5000],
]
TWO_MODES = [["--tokenize", "--logits"], ["--verify", "--tokenize"],
             ["--logits", "--perplexity", "x"], ["--verify", "--logits"], ["--bench", "--verify"]]


def test_mistakes_in_flags_are_one_line(run_debug_bin, tmp_path):
    path = reciter(tmp_path, [(b"a", 1)])
    for flags in WRONG_FLAGS:
        message = run(run_debug_bin, path, *flags, status=1)
        assert ("run: " + (flags[0] if flags[0].isprintable() else "?") in message
                or flags[:2] == ["-n", "3"]), flags
        assert message[:-1].isprintable() and len(message) < 6000
    assert "-m: unknown mode '~ }{!??'" in run(run_debug_bin, path, "-m", "~ }{!\x7f\n", status=1)
    for flags in TWO_MODES:
        assert "only one of" in run(run_debug_bin, path, *flags, status=1)
    for args in ([], ["-n", 3], ["-i", "a", path]):
        assert ("run: no model given: expected ./run model.gguf"
                in run(run_debug_bin, *args, status=1))
    for args in ([], ["-n", 3], [path], [path, "-n", 3]):
        for flag in ("-h", "--help"):
            assert b"Usage: run MODEL" in run(run_debug_bin, *args, flag)


def test_unusual_flags_that_are_fine(run_debug_bin, tmp_path):
    letters = [(b"%c" % c, 1) for c in range(97, 123)]
    path = reciter(tmp_path, letters)
    for flags in (["-t", "0", "-n", "007"], ["-n", "3", "-n", "7", "-t", "0"],
                  ["-t", "0.", "-n", "7"], ["-t", "-0", "-n", "7"], ["-t", "0e9", "-n", "7"],
                  ["-t", "1e-30", "-n", "7"], ["-p", "1e-9", "-t", "1", "-n", "7"],
                  ["-n", "7", "-t", "0", "-j", "1024"],
                  ["-n", "7", "-t", "0", "-s", "9007199254740991"]):
        assert run(run_debug_bin, path, *flags) == b"abcdefg\n", flags
    assert run(run_debug_bin, path, "-n", 0, "-t", 1e6, "-p", 0, "-s", 5)  # any text is fine
    # a value may look like a flag
    assert run(run_debug_bin, path, "-t", 0, "-n", 9, "-i", "-n") == b"<unk>nopqrstu\n"


def test_missing_and_odd_files_are_one_line(run_debug_bin, tmp_path):
    path = reciter(tmp_path, [(b"a", 1)])
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text(
        "Not a model at all, but a text that is longer than any header would be." * 9)
    # a folder is read as that of a training run, which holds model.gguf
    assert run(run_debug_bin, tmp_path, status=1).startswith(f"run: {tmp_path}/model.gguf: ")
    for file in ("missing", "empty", "text"):
        assert run(run_debug_bin, tmp_path / file, status=1).startswith(f"run: {tmp_path / file}: ")
    assert (run(run_debug_bin, tmp_path / "missing", status=1)
            == f"run: {tmp_path / 'missing'}: no such file\n")
    for file in ("missing", "empty", "text", "."):
        assert str(tmp_path / file) in run(run_debug_bin, path, "-z", tmp_path / file, status=1)
    for file in ("missing", "."):
        for flag in ("-f", "--perplexity"):
            assert str(tmp_path / file) in run(run_debug_bin, path, flag, tmp_path / file, status=1)
    assert run(run_debug_bin, tmp_path / "a\nb", status=1).startswith("run: ")
    Model().write_llama2c(tmp_path / "m.bin")
    p = subprocess.run([run_debug_bin, tmp_path / "m.bin"], cwd=tmp_path, capture_output=True,
                       text=True)
    assert (p.returncode, p.stderr) == (1, "run: tokenizer.bin: no such file\n")


def test_a_stream_that_cannot_be_written_is_one_line(run_debug_bin, tmp_path):
    path = reciter(tmp_path, [(b"%c" % c, 1) for c in range(97, 123)])
    for flags in ([], ["--tokenize", "-i", "abc"], ["--logits", "-i", "a"], ["--help"]):
        with open("/dev/full", "wb") as full:
            p = subprocess.run([run_debug_bin, path, *flags], stdout=full, stderr=subprocess.PIPE,
                               text=True)
        assert p.returncode == 1
        assert p.stderr.startswith("run: stdout: ")
        assert p.stderr.count("\n") == 1
    p = subprocess.Popen([run_debug_bin, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE)
    p.stdout.close()
    assert p.wait(60) in (0, 1)  # an exit code, not a signal


@pytest.mark.slow
def test_inputs_without_a_byte(tmp_path):
    """The program adds no offset to a null pointer, the address of an empty array.

    Only clang's sanitizer detects this.
    """
    if not shutil.which("clang"):
        pytest.skip("no clang here")
    compile_c(tmp_path / "run.o", *SANITIZE, "-c", "run.c", compiler="clang")
    program = compile_c(tmp_path / "run", *SANITIZE, tmp_path / "run.o", *LIBRARY, compiler="clang")
    path = reciter(tmp_path, [(b"a", 1)])
    (tmp_path / "empty").write_bytes(b"")
    for requests in b"", b"\n":
        assert run(program, path, "--jsonl", stdin=requests) == b""
    requests = b'{"prompt": "", "stop": [""]}\n{"prompt": "", "stop": []}'
    assert b"a stop string is empty" in run(program, path, "--jsonl", stdin=requests)
    for flags in (["-f", tmp_path / "empty"], ["--tokenize", "-i", ""], ["--logits", "-i", ""],
                  ["-b", 2], ["--prompt-cache", tmp_path / "state"]):
        run(program, path, "-n", 3, *flags)


def test_prompt_from_a_file(run_debug_bin, tmp_path):
    path = reciter(tmp_path, [(b"%c" % c, 1) for c in range(97, 123)])
    (tmp_path / "prompt").write_bytes(b"cd")
    assert run(run_debug_bin, path, "-t", 0, "-n", 5, "-f", tmp_path / "prompt") == b"cdefg\n"
    # a zero byte is an ordinary character and broken UTF-8 becomes U+FFFD; here they make one <unk>
    (tmp_path / "prompt").write_bytes(b"c\0\xffd")
    assert run(run_debug_bin, path, "-t", 0, "-n", 5, "-f", tmp_path / "prompt") == b"c<unk>def\n"


# ---- hostile files: one line and exit code 1 under the sanitizers

def with_int(data, at, value, form="<i"):
    return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form):]


def hostile_llama2c(data, version):
    """Yield damaged copies of a file in a llama2.c format, each of which run must refuse."""
    start, header = (28, 0) if version == 0 else (256, 8)
    for n in (0, 1, 3, 4, 7, 8, 27, 28, 29, 40, 255, 256, 257, len(data) // 2, len(data) - 1):
        yield data[:n]
    yield data + b"\0"
    yield data + data
    for field in range(7):
        for value in (0, -1, 1, 3, 7, 2**20, 2**24 + 1, 2**31 - 1, -2**31):
            changed = with_int(data, header + 4 * field, value)
            # files of versions 1 and 2 may have any context length
            if changed != data and not (version and field == 6 and value in (1, 3, 7, 2**20)):
                yield changed
    yield with_int(with_int(data, header + 12, 3), header + 16, 3)
    if version:
        for value in (0, 3, -1):
            yield with_int(data, 4, value)
        for value in (2, 255):
            yield with_int(data, 36, value, "<B")
        yield with_int(data, 0, MAGIC + 1, "<I")
    if version == 2:
        for value in (0, -1, -2**31, 1, 33, 2**31 - 1):
            yield with_int(data, 37, value)
    assert len(data) > start


@pytest.mark.parametrize("version", [0, 1, 2])
def test_hostile_llama2c_files(run_debug_bin, tmp_path, version):
    args, _ = Model(vocab=260, layers=1, seq=16).write(tmp_path, f"v{version}:32")
    assert run(run_debug_bin, *args, "-n", 3)
    for data in list(hostile_llama2c(args[0].read_bytes(), version)):
        args[0].write_bytes(data)
        run(run_debug_bin, *args, "-n", 3, status=1)


def test_hostile_tokenizers(run_debug_bin, tmp_path):
    args, _ = Model(vocab=260, layers=1, seq=16).write(tmp_path, "v1:")
    data = args[2].read_bytes()
    for bad in (b"", data[:3], data[:4], data[:9], data[:-1], data + b"\0", data + data[4:],
                with_int(data, 0, 0), with_int(data, 0, 5), with_int(data, 8, 0),
                with_int(data, 8, -1), with_int(data, 8, 2**31 - 1), with_int(data, 8, 6),
                with_int(data, 4, 0x7fc00000)):
        args[2].write_bytes(bad)
        run(run_debug_bin, *args, "-n", 3, "-i", "a", status=1)


def hostile_gguf(data):
    """Yield damaged copies of a GGUF file, each of which run must refuse."""
    for n in [4, 7, 8, 23, 24, 30, len(data) - 32, len(data) - 1,
              *range(40, len(data), len(data) // 40)]:
        yield data[:n]
    yield data + bytes(32)
    for version in (0, 1, 4, 3 << 24):
        yield with_int(data, 4, version)
    for at in (8, 16):  # tensor count, metadata count
        for value in (0, 1, 2**32, 2**63, 2**64 - 1):
            yield with_int(data, at, value, "<Q")

    def after(text, skip=0):
        return data.index(text.encode()) + len(text) + skip

    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length",
                "attention.head_count", "attention.head_count_kv", "rope.dimension_count"):
        at = after("llama." + key)
        yield with_int(data, at, 8)   # the type is string instead of a number
        yield with_int(data, at, 13)  # this type does not exist
        # overwrite the end of the key and its type: the required key is missing
        yield with_int(data, at - 3, 0x41414141)
        for value in (0, 2**24 + 1, 2**31, 2**32 - 1) + ((5,) if key != "context_length" else ()):
            yield with_int(data, at + 4, value, "<I")
    template = (struct.pack("<Q", 23) + b"tokenizer.chat_template"
                + struct.pack("<IQ", 8, 21) + b"x" * 21)
    yield with_int(data[:24] + 2 * template + data[24:], 16,
                   struct.unpack_from("<Q", data, 16)[0] + 2, "<Q")
    yield with_int(data, after("general.architecture", 4 + 8), 0x41414141)
    for value in (float("nan"), float("inf"), -1.0, 1.0):
        yield with_int(data, after("llama.attention.layer_norm_rms_epsilon", 4), value, "<f")
    for value in (float("nan"), float("inf"), -1.0, 0.0):
        yield with_int(data, after("llama.rope.freq_base", 4), value, "<f")
    for key in ("tokens", "scores", "token_type"):
        at = after("tokenizer.ggml." + key)
        for value in (0, 259, 261, 2**32, 2**61, 2**64 - 1):
            yield with_int(data, at + 8, value, "<Q")
        for value in (4, 9, 12, 13, 2**32 - 1):
            yield with_int(data, at + 4, value, "<I")
    # length of the first piece
    yield with_int(data, after("tokenizer.ggml.tokens", 16), 2**40, "<Q")
    yield with_int(data, after("tokenizer.ggml.scores", 16), float("nan"), "<f")
    for value in (0, 7, -1):
        yield with_int(data, after("tokenizer.ggml.token_type", 16 + 40), value)
    yield data.replace(b"<0x41>", b"<0xG1>")
    for name in ("token_embd.weight", "blk.0.ffn_down.weight", "output_norm.weight"):
        at = after(name)
        for value in (0, 1 if "norm" not in name else 5, 3, 4, 5, 2**32 - 1):  # rank
            yield with_int(data, at, value, "<I")
        for value in (0, 63, 2**32, 2**63):                                    # first dimension
            yield with_int(data, at + 4, value, "<Q")
        dims = 8 if "norm" in name else 16
        for value in (2 if "norm" in name else 3, 7, 14, 24, 31, 2**32 - 1):   # type
            yield with_int(data, at + 4 + dims, value, "<I")
        for value in (1, 32 if "embd" in name else 0, 2**40, 2**64 - 32):      # offset
            yield with_int(data, at + 8 + dims, value, "<Q")
    for old, new in ((b"blk.0.attn_q", b"blk.1.attn_q"), (b"blk.0.attn_q", b"blk.0.attn_k"),
                     (b"attn_q", b"attn_z"), (b"output_norm", b"output_nork"),
                     (b"blk.0.ffn_up", b"blk.x.ffn_up"), (b"blk.0.ffn_up", b"blk_0_ffn_up"),
                     (b"token_embd", b"\x1b[2J\n\n\n\n\n\n"), (b"blk.0.ffn_up", b"blk.-.ffn_up")):
        yield data.replace(old, new)


def test_hostile_gguf_files(run_debug_bin, tmp_path):
    model = Model(vocab=260, layers=1, seq=16)
    model.write_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    assert run(run_debug_bin, tmp_path / "m.gguf", "-n", 3)
    for i, bad in enumerate(hostile_gguf(data)):
        assert bad != data, i
        (tmp_path / "bad.gguf").write_bytes(bad)
        try:
            run(run_debug_bin, tmp_path / "bad.gguf", "-n", 3, status=1)
        except AssertionError as e:
            raise AssertionError(f"file {i}") from e
    (tmp_path / "bad.gguf").write_bytes(data + bytes(32))
    assert ("32 bytes follow the last tensor"
            in run(run_debug_bin, tmp_path / "bad.gguf", "-n", 3, status=1))


def test_gguf_without_one_of_its_tensors(run_debug_bin, tmp_path):
    for name in ("norm", "tok", ("wq", 0), ("attention_norm", 1)):
        model = Model(tied=False)
        del model.w[name]
        model.names = lambda order: [
            k for n in order for k in ([(n, 0), (n, 1)] if n in LAYER else [n]) if k in model.w
        ]
        model.write_gguf(tmp_path / "m.gguf")
        assert "missing" in run(run_debug_bin, tmp_path / "m.gguf", "-n", 3, status=1)


def test_random_damage_never_breaks_the_program(run_debug_bin, tmp_path):
    """Change random bytes of headers, metadata and tokenizers.

    The program exits with code 0, or with code 1 and one line.
    """
    rng, model = random.Random(0), Model(vocab=260, layers=1, seq=16)
    for form, count in (("v0:", 15), ("v1:", 15), ("v2:32", 15), ("f32", 90)):
        args, _ = model.write(tmp_path, form)
        files = {path: path.read_bytes() for path in args[::2]}
        for _ in range(count):
            for path, data in files.items():
                data = bytearray(data)
                for _ in range(rng.choice((1, 2, 8))):
                    data[rng.randrange(min(len(data), 9000 if form == "f32" else 300))] = (
                        rng.choice((0, 1, 127, 128, 255, rng.randrange(256))))
                path.write_bytes(data)
            p = subprocess.run([run_debug_bin, *args, "-n", "3", "-i", "ab"], capture_output=True,
                               timeout=60)
            assert p.returncode == 0 or (
                p.returncode == 1 and p.stderr.startswith(b"run: ")
                and p.stderr.count(b"\n") == 1), p.stderr.decode(errors="replace")


def test_all_modes_under_sanitizers(run_debug_bin, tmp_path):
    model = Model(heads=8, kv=2, seq=100)
    (tmp_path / "text").write_bytes(TEXT.encode() + b"\xff\0")
    wide = Model(dim=256, hidden=256, heads=4, kv=2, layers=1, seq=100, vocab=260, tied=False)
    for form in ("v0:", "v2:24", "f16", "bf16", "q8_0", "q4_0", "q4_k_m", "q5_k"):
        args, _ = (wide if "_k" in form else model).write(tmp_path, form)
        run(run_debug_bin, *args, "-i", TEXT[:90], "-n", 100, "-s", 1, "-j", 3)
        run(run_debug_bin, *args, "--perplexity", tmp_path / "text", "-j", 2)
        run(run_debug_bin, *args, "--logits", "-f", tmp_path / "text")
        run(run_debug_bin, *args, "--tokenize", stdin=b"abc\n\n\xff\0 \xe2\x96\x81\nend")
        for template in ("chatml", "zephyr", "llama2"):
            run(run_debug_bin, *args, "-m", "chat", "--template", template, "-n", 20, "-s", 1,
                "-c", 40, stdin=b"s\nHi\n\nHi\n")


def test_files_that_are_no_files(run_debug_bin, tmp_path):
    """Refuse special files: no wait for a pipe given as a model, a size limit for endless input."""
    path = reciter(tmp_path, [(b"a", 1)])
    os.mkfifo(tmp_path / "pipe")
    for args in ([tmp_path / "pipe"], [path, "-z", tmp_path / "pipe"], ["/dev/zero"], ["/dev/null"],
                 [path, "-z", "/dev/zero"]):
        assert "not a regular file" in run(run_debug_bin, *args, status=1)
    assert "more than 134217728 bytes" in run(run_debug_bin, path, "-f", "/dev/zero", status=1)


def test_a_model_cut_off_while_in_use(run_debug_bin, tmp_path):
    Model(vocab=260).write_gguf(tmp_path / "m.gguf")
    p = subprocess.Popen(
        [run_debug_bin, tmp_path / "m.gguf", "-m", "chat", "--template=llama2", "-y", ""],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert p.stdout.read(6) == b"User: "  # it has read the file's header and waits
    os.truncate(tmp_path / "m.gguf", 100)
    _, message = p.communicate(b"Hi\n", timeout=60)
    assert (p.returncode, message) == (1, b"run: model: its file was cut off while in use\n")


# ---- metadata and tensor lists of every kind, in files assembled here byte by byte

def string(text):
    return struct.pack("<Q", len(text)) + text.encode()


KINDS = {
    "u8": (0, "<B"), "i8": (1, "<b"), "u16": (2, "<H"), "i16": (3, "<h"), "u32": (4, "<I"),
    "i32": (5, "<i"), "float": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q"), "i64": (11, "<q"),
    "double": (12, "<d")
}


def value(kind, x):
    """Encode a metadata value: a number, a string, or a list of one of them."""
    if kind == "string":
        return struct.pack("<I", 8) + string(x)
    if kind.endswith("[]"):
        parts = ([value(kind[:-2], v) for v in x]
                 or [value(kind[:-2], {"string": ""}.get(kind[:-2], 0))])
        return (struct.pack("<I", 9) + parts[0][:4] + struct.pack("<Q", len(x))
                + b"".join(p[4:] for p in parts[:len(x)]))
    return struct.pack("<I", KINDS[kind][0]) + struct.pack(KINDS[kind][1], x)


VALUES = {
    "general.architecture": ("string", "llama"),
    "llama.context_length": ("u32", 8),
    "llama.embedding_length": ("u32", 2),
    "llama.block_count": ("u32", 1),
    "llama.feed_forward_length": ("u32", 1),
    "llama.attention.head_count": ("u32", 1),
    "llama.attention.layer_norm_rms_epsilon": ("float", 1e-5),
    "tokenizer.ggml.model": ("string", "llama"),
    "tokenizer.ggml.tokens": ("string[]", ["<unk>", "<s>", "</s>", "a"]),
    "tokenizer.ggml.scores": ("float[]", [0.0] * 4),
    "tokenizer.ggml.token_type": ("i32[]", [2, 3, 3, 1]),
}
SHAPES = {
    "token_embd": [2, 4], "output_norm": [2], "blk.0.attn_norm": [2], "blk.0.ffn_norm": [2],
    "blk.0.ffn_gate": [2, 1], "blk.0.ffn_up": [2, 1], "blk.0.ffn_down": [1, 2],
    "blk.0.attn_q": [2, 2],
    "blk.0.attn_k": [2, 2], "blk.0.attn_v": [2, 2], "blk.0.attn_output": [2, 2]
}


BIASES = {"blk.0.attn_q.bias": [2], "blk.0.attn_k.bias": [2], "blk.0.attn_v.bias": [2]}
HEAD_NORMS = {"blk.0.attn_q_norm.weight": [2], "blk.0.attn_k_norm.weight": [2]}


def gguf_header(changes={}, shapes=SHAPES):
    """Return the header of the smallest model with changed metadata (None removes a key)."""
    name = (changes.get("general.architecture") or VALUES["general.architecture"])[1]
    prefix = name if name in ("qwen2", "qwen3") else "llama"
    values = {k.replace("llama.", f"{prefix}."): v for k, v in VALUES.items()}
    values = {k: v for k, v in (values | changes).items() if v}
    out = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(values))
    out += b"".join(string(key) + value(*v) for key, v in values.items())
    for i, (name, shape) in enumerate(shapes.items()):
        out += (string(name + ".weight" * (name in SHAPES)) + struct.pack("<I", len(shape))
                + struct.pack(f"<{len(shape)}Q", *shape))
        out += struct.pack("<IQ", 0, 32 * i)
    return out


def gguf_bytes(changes={}, shapes=SHAPES):
    header = gguf_header(changes, shapes)
    # ones, because norms of zeros are refused
    return header + bytes(-len(header) % 32) + np.ones(8 * len(shapes), "<f4").tobytes()


FINE_VALUES = [
    *({"llama.context_length": (kind, 8)} for kind in KINDS if kind != "bool"),
    {"llama.attention.head_count_kv": ("i64", 1)},
    {"llama.rope.scaling.type": ("string", "none"), "llama.rope.scaling.factor": ("float", 9)},
    {"llama.rope.scaling.type": ("string", "linear"), "llama.rope.scaling.factor": ("double", 2)},
    {"llama.rope.scaling.type": ("string", "yarn"), "llama.rope.scaling.factor": ("float", 4),
     "llama.rope.scaling.original_context_length": ("u32", 2),
     "llama.rope.scaling.yarn_beta_fast": ("float", 32)},
    *({"llama.rope.scaling.type": ("string", "yarn"), "llama.rope.freq_base": ("float", theta)}
      for theta in (1, 0.5, 3e38, 1e-38)),
    *({key: ("bool", fine)}
      for key, fine in (("llama.attention.causal", True), ("llama.rope.scaling.finetuned", False))),
    {"llama.attention.key_length": ("u32", 2), "llama.attention.value_length": ("i64", 2),
     "llama.expert_count": ("u32", 0)},
    {"llama.rope.scaling.attn_factor": ("float", 1),
     "llama.rope.scaling.original_context_length": ("u32", 4)},
    {"llama.rope.scale_linear": ("float", 4)},
    {"llama.rope.scale_linear": ("float", 4), "llama.rope.scaling.factor": ("float", 4)},
    *({"llama.attention.sliding_window": ("u32", x)} for x in (0, 1, 7, 8, 2**31 - 1)),
    {"llama.tensor_data_layout": ("string", "Meta AI original pth")},
    {"general.quantization_version": ("u32", 2)},
    {"tokenizer.ggml.eot_token_id": ("u32", 3)},
    {"llama.rope.freq_base": ("u32", 500000)},
    {"something.else": ("u8[]", [1, 2])},
    {"general.alignment": ("u64", 32)},
    {"llama.vocab_size": ("u16", 4)},
    {"tokenizer.ggml.add_bos_token": ("u8", 1)},
    {"general.name": ("string", "\x1b[2J")},
    {"tokenizer.chat_template": ("u32", 7)},
    {"tokenizer.ggml.eos_token_id": ("i8", 3)},
    {"a" * 5000: ("string", "b" * 5000)},
]
OTHER_KEYS = [  # they ask for a computation that run does not do: the message names the key
    *({key: wrong} for key, wrong in (
        ("llama.attention.causal", ("bool", False)), ("llama.attention.causal", ("string", "yes")),
        ("llama.expert_count", ("u32", 8)), ("llama.rope.scaling.attn_factor", ("float", 1.5)),
        ("llama.rope.scaling.attn_factor", ("float", float("nan"))),
        ("llama.attention.key_length", ("u32", 4)), ("llama.attention.value_length", ("u32", 1)),
        ("llama.attention.sliding_window", ("i32", -1)),
        ("llama.attention.sliding_window", ("u64", 2**31)),
        ("llama.rope.scaling.yarn_ext_factor", ("float", 1)),
        ("llama.rope.scaling.yarn_beta_fast", ("float", 31)),
        ("llama.rope.scaling.yarn_log_multiplier", ("float", 0.1)),
        ("llama.rope.dimension_count", ("u32", 4)),
        *(("llama.attention.key_length", ("u64", x)) for x in (0, 2**31, 2**63)),
        ("llama.logit_scale", ("float", 1)), ("llama.", ("u32", 1)),
        ("llama.final_logit_softcapping", ("float", 30)),
        ("general.quantization_version", ("u32", 1)))),
    {"llama.rope.scale_linear": ("float", 2), "llama.rope.scaling.factor": ("float", 4)},
]
WRONG_VALUES = OTHER_KEYS + [
    *({key: wrong}
      for key in ("llama.context_length", "llama.embedding_length", "llama.block_count",
                  "llama.vocab_size", "llama.feed_forward_length", "llama.attention.head_count",
                  "llama.attention.head_count_kv")
      for wrong in (("float", 1.5), ("float", float("nan")), ("double", 1e300), ("i32", -1),
                    ("i64", -2**63), ("u64", 2**63), ("u64", 2**31), ("string", "1"),
                    ("u32[]", [1]), ("u32", 0))),
    *({key: None} for key in VALUES if key != "tokenizer.ggml.model"),
    *({"general.architecture": v}
      for v in (("string", "gpt2"), ("string", ""), ("string", "x" * 100), ("u32", 1),
                ("string[]", ["llama"]), ("string", "llama\0"))),
    *({"llama.rope.scaling.type": ("string", v)} for v in ("longrope", "y" * 100, "linear ")),
    *({"llama.rope.scaling.type": ("string", "yarn"),
       "llama.rope.scaling.original_context_length": v}
      for v in (("u32", 0), ("i32", -1), ("u64", 2**31), ("string", "4"))),
    *({"llama.attention.key_length": ("u32", x), "llama.attention.value_length": ("u32", x)}
      for x in (1, 3, 4, 2**13 + 2, 2**31 - 2)),
    *({"llama.rope.scaling.factor": v}
      for v in (("float", 0), ("float", -1), ("float", float("nan")), ("double", 1e39),
                ("string", "2"), ("double", float("inf")))),
    *({key: wrong} for key, wrong in (
        ("llama.rope.scale_linear", ("float", 0)), ("llama.\x1b[2J", ("u8[]", [1])),
        ("tokenizer.ggml.eot_token_id", ("u32", 4)), ("tokenizer.ggml.eot_token_id", ("i32", -1)))),
    {"llama.rope.freq_base": ("string", "1e4")},
    {"llama.rope.freq_base": ("double", 1e300)},
    {"llama.rope.dimension_count": ("i8", 1)},
    {"llama.attention.layer_norm_rms_epsilon": ("string", "1e-5")},
    {"llama.attention.layer_norm_rms_epsilon": ("double", 1)},
    *({"general.alignment": v} for v in (("u32", 0), ("u32", 1), ("u32", 24), ("u32", 2**17),
                                         ("string", "32"), ("i32", -32))),
    *({f"tokenizer.ggml.{key}": v}
      for key in ("bos_token_id", "eos_token_id", "unknown_token_id")
      for v in (("u32", 4), ("i32", -1), ("string", "1"), ("u64", 2**32 + 1))),
    *({f"tokenizer.ggml.{key}": v}
      for key in ("add_bos_token", "add_space_prefix", "remove_extra_whitespaces")
      for v in (("string", "true"), ("i8", -1), ("bool[]", [True]))),
    *({"tokenizer.ggml.tokens": v}
      for v in (("u32[]", [1] * 4), ("string", "abcd"), ("string[]", ["a"] * 5), ("string[]", []),
                ("string[]", ["<unk>", "<s>", "</s>", ""]))),
    *({"tokenizer.ggml.scores": v}
      for v in (("i32[]", [0] * 4), ("float[]", [0] * 3), ("float", 0),
                ("float[]", [0, 0, 0, float("nan")]))),
    *({"tokenizer.ggml.token_type": v}
      for v in (("u32[]", [1] * 4), ("i32[]", [1] * 5), ("i32[]", [2, 3, 3, 0]),
                ("i32[]", [2, 3, 3, 7]), ("i32[]", [2, 3, 3, 2**31 - 1]),
                ("i32[]", [2, 3, 3, 17]), ("i32[]", [2, 3, 3, 6]))),
    {"tokenizer.ggml.model": ("string", "gpt2")},
    {"tokenizer.ggml.model": ("u32", 1)},
    {"llamac.tensor_data.sha256": ("string", "0" * 65)},
    {"llama.vocab_size": ("u32", 5), "tokenizer.ggml.scores": ("float[]", [0.0] * 5)},
]
WRONG_SHAPES = [
    SHAPES | {"token_embd": s}
    for s in ([2, 4, 2], [2, 4, 1, 2], [4, 2], [2], [8], [2, 4, 0], [2, 2**62])
] + [
    {(new if name == old else name): shape for name, shape in SHAPES.items()}
    for old, new in (
        ("blk.0.ffn_up", "blk."), ("blk.0.ffn_up", "blk.0"), ("blk.0.ffn_up", "blk.0."),
        ("blk.0.ffn_up", "blk.00"), ("blk.0.ffn_up", "blk.1.ffn_up.weight"),
        ("blk.0.ffn_up", "blk.99999999999999999999.ffn_up.weight"),
        ("blk.0.ffn_up", "blk.:.ffn_up.weight"), ("blk.0.ffn_up", "blk..ffn_up.weight"),
        ("blk.0.ffn_up", "blk./.ffn_up.weight"), ("blk.0.ffn_up", "blk.0.output_norm.weight"),
        ("output_norm", "blk.0.output_norm.weight"), ("output_norm", ""),
        ("output_norm", "attn_norm.weight"), ("output_norm", "x" * 100),
        ("output_norm", "output_norm.weight\0"))
] + [
    SHAPES | more
    for more in (
        HEAD_NORMS, {"blk.0.attn_output.bias": [2]}, {"blk.0.attn_qkv.bias": [6]},
        {"blk.1.attn_q.bias": [2]}, {"attn_q.bias": [2]}, {"blk.0.attn_q.bias": [1]},
        {"blk.0.attn_q.bias": [2, 2]}, {"blk.0.attn_k.bias": [2**63]},
        {"blk.0.attn_v.bias": [0]}, {"rope_freqs.weight": [2]}, {"rope_freqs.weight": [0]},
        {"blk.0.rope_freqs.weight": [1]})
]


def test_metadata_and_tensors_of_every_kind(run_debug_bin, tmp_path):
    path = tmp_path / "m.gguf"
    for changes in ({}, *FINE_VALUES):
        path.write_bytes(gguf_bytes(changes))
        assert run(run_debug_bin, path, "--tokenize", "-i", "a") == b"0 3\n", changes
    for changes, shapes in [(c, SHAPES) for c in WRONG_VALUES] + [({}, s) for s in WRONG_SHAPES]:
        path.write_bytes(gguf_bytes(changes, shapes))
        message = run(run_debug_bin, path, "-n", 3, status=1)
        assert changes not in OTHER_KEYS or list(changes)[0] in message, message
    for path_version in (2, 3):
        path.write_bytes(with_int(gguf_bytes(), 4, path_version))
        assert run(run_debug_bin, path, "--tokenize", "-i", "a") == b"0 3\n"
    header = gguf_header()
    for length in (len(header), len(header) - 1, len(header) - 4, len(header) - 30):
        path.write_bytes(header[:length])
        run(run_debug_bin, path, "-n", 3, status=1)
    # a piece of 2^27 bytes, mostly a hole in a sparse file
    before, after = header.split(string("<unk>"))
    with open(path, "wb") as file:
        file.write(before + struct.pack("<Q", 2**27))
        file.seek(2**27, 1)
        file.write(after + bytes(-(len(header) - 5) % 32 + 32 * len(SHAPES)))
    assert "token 0 is too long" in run(run_debug_bin, path, "-n", 3, status=1)


def test_architectures(run_debug_bin, tmp_path):
    """Accept llama, qwen2 and qwen3 with their own metadata prefix, biases and head norms.

    Any other architecture is refused with a message that names it and the supported ones.
    """
    path = tmp_path / "m.gguf"

    def said(changes, shapes, status=1, **architecture):
        path.write_bytes(gguf_bytes(
            {"general.architecture": ("string", architecture.get("of", "llama"))} | changes,
            shapes))
        return run(run_debug_bin, path, "-n", 3, status=status)
    for name in ("gemma3", "phi3", "qwen2moe", "qwen3moe", "llama4", "qwen", "Llama"):
        assert f"the architecture is '{name}', expected llama, qwen2 or qwen3" in said(
            {f"{name}.x": ("u32", 1)}, SHAPES, of=name)
    for name, shapes in (("llama", SHAPES | BIASES), ("qwen2", SHAPES), ("qwen2", SHAPES | BIASES),
                         ("qwen3", SHAPES | HEAD_NORMS), ("qwen3", SHAPES | HEAD_NORMS | BIASES)):
        said({}, shapes, status=0, of=name)  # accepted: exit code 0
        assert (f"'{name}.logit_scale' is unknown"
                in said({f"{name}.logit_scale": ("float", 1)}, shapes, of=name))
        assert (f"{name}.block_count is missing"
                in said({f"{name}.block_count": None}, shapes, of=name))
        assert (f"{name}.block_count is 0.5"
                in said({f"{name}.block_count": ("float", 0.5)}, shapes, of=name))
    assert "blk.0.attn_q_norm.weight (1 x 2) is missing" in said({}, SHAPES, of="qwen3")
    assert ("'blk.0.attn_q_norm.weight' (F32) is not part of the model"
            in said({}, SHAPES | HEAD_NORMS, of="qwen2"))
    assert ("is 1 x 1, expected 1 x 2"
            in said({}, SHAPES | HEAD_NORMS | {"blk.0.attn_k_norm.weight": [1]}, of="qwen3"))
    assert ("qwen2.attention.sliding_window is 7"
            in said({"qwen2.attention.sliding_window": ("u32", 7)}, SHAPES, of="qwen2"))
    for value, status in ((1, 0), (8, 0), (1e-45, 0), (0, 1), (-1, 1), (float("nan"), 1),
                          (float("inf"), 1), (-0.0, 1)):
        data = gguf_bytes({}, SHAPES | {"rope_freqs.weight": [1]})
        path.write_bytes(with_int(data, len(data) - 32, value, "<f"))
        message = run(run_debug_bin, path, "-n", 3, status=status)
        assert not status or "factor 0 of RoPE's frequencies" in message


# ---- prompts

PROMPTS = [
    b"", b" ", b"   ", b"\n", b"\t\r\n", b"\0", b"a\0b", b"\0" * 50, b"\xff", b"\xff" * 50, b"\xc3",
    b"a\xe6\x97", b"\x80", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80",
    b"\xf8\x88\x80\x80\x80", "é日😀".encode(), "\u2581".encode(), "a\u2581 \u2581b".encode(),
    "\ufeffx".encode(), "e\u0301".encode(), "\u202eabc".encode(), "👩‍👩‍👧".encode(), b"<s>",
    b"</s>", b"<unk>", b"<0x41>", b"<0x", b"%s%n%d", b"\x1b[2J", b"\x9b", "\u009b".encode(),
    b"\x7f", b"--help", b"[INST] x [/INST]", b"<<SYS>>", b"<|im_start|>", b"'; rm -rf /", b"\\",
    b"\"", b"$(x)", b"a" * 60, b"\r" * 60
]


def test_prompts(run_debug_bin, tmp_path):
    """Any bytes work as a prompt from a file, an argument or a chat turn.

    The output starts with the printable part of the prompt.
    """
    Model(vocab=260, layers=1, seq=256, dim=8, hidden=8, heads=2, kv=1).write_gguf(
        tmp_path / "m.gguf")
    for prompt in PROMPTS:
        (tmp_path / "prompt").write_bytes(prompt)
        # run strips a byte order mark from a file, but keeps it in an argument
        text = prompt.removeprefix("\ufeff".encode())
        shown = "".join(c for c in text.decode(errors="replace")
                        if c in "\n\t" or c.isprintable() or ord(c) > 0xff)
        shown = shown.replace("\u2581", " ").encode()
        # sentencepiece counts broken bytes as run does; Python merges the bytes of a truncated
        # character
        same_view = prompt.decode(errors="ignore").encode() == prompt
        file = run(run_debug_bin, tmp_path / "m.gguf", "-n", 100, "-s", 1, "-t", 9, "-f",
                   tmp_path / "prompt")
        assert not same_view or file.startswith(shown), prompt
        assert not any(c < 32 and c not in b"\n\t" or c == 127 for c in file) and file.decode()
        if b"\0" not in prompt:
            assert run(run_debug_bin, tmp_path / "m.gguf", "-n", 100, "-s", 1, "-t", 9,
                       "-i", text) == file
        run(run_debug_bin, tmp_path / "m.gguf", "-m", "chat", "--template=llama2", "-n", 20,
            "-s", 1, "-t", 9, stdin=b"\n" + prompt)
        run(run_debug_bin, tmp_path / "m.gguf", "--tokenize", stdin=prompt)


def test_long_prompts(run_debug_bin, tmp_path):
    """Encode up to 10 MB; a longer text slides through the context, --perplexity accepts it."""
    Model(vocab=260, layers=1, seq=16, dim=8, hidden=8, heads=2, kv=1).write_gguf(
        tmp_path / "m.gguf")
    (tmp_path / "prompt").write_bytes(b"once upon " * 10**6)
    assert (run(run_debug_bin, tmp_path / "m.gguf", "-f", tmp_path / "prompt", "-n", 12)
            == b"once upon on\n")
    (tmp_path / "prompt").write_bytes(b"once upon " * 10**4)
    assert run(run_debug_bin, tmp_path / "m.gguf", "-f", tmp_path / "prompt",
               "-n", 10**5 + 9).startswith(b"once upon " * 10**4)
    assert run(run_debug_bin, tmp_path / "m.gguf",
               "--perplexity", tmp_path / "prompt").startswith(b"perplexity")
    assert run(run_debug_bin, tmp_path / "m.gguf", "-n", 16, "-i", "x" * 15).startswith(b"x" * 15)
    assert ("17 tokens, but the context is 16"
            in run(run_debug_bin, tmp_path / "m.gguf", "--logits", "-i", "x" * 16, status=1))


# ---- checksums

def seal(path):
    """Replace the placeholder checksums in a GGUF file's metadata by the real ones.

    They cover the tensor data (placeholder "0" * 64) and the tensor list ("1" * 64). Return
    {key: checksum}.
    """
    data, reader = path.read_bytes(), gguf.GGUFReader(path)
    start, first, last = int(reader.data_offset), reader.tensors[0], reader.tensors[-1]
    listed = data[first.field.offset:
                  last.field.offset + sum(part.nbytes for part in last.field.parts)]
    sums = hashlib.sha256(data[start:]).hexdigest(), hashlib.sha256(listed).hexdigest()
    path.write_bytes(data.replace(b"0" * 64, sums[0].encode()).replace(b"1" * 64, sums[1].encode()))
    return dict(zip(("llamac.tensor_data.sha256", "llamac.tensor_list.sha256"), sums))


def sealed(path, **options):
    """Write a small model with valid checksums; return the byte offset of its tensor data."""
    model = Model(vocab=260, layers=1, **options)
    model.write_gguf(
        path, **{"llamac.tensor_data.sha256": "0" * 64, "llamac.tensor_list.sha256": "1" * 64})
    seal(path)
    return int(gguf.GGUFReader(path).data_offset)


def test_verify_agrees_with_hashlib(run_debug_bin, tmp_path):
    """The tensor data has every length modulo SHA-256's block size that float32 weights allow."""
    path, lengths = tmp_path / "m.gguf", set()
    for hidden in range(1, 33):
        model = Model(dim=2, heads=1, kv=1, layers=1, hidden=hidden, tied=False)
        model.w["norm"] = model.w.pop("norm")
        model.names = lambda order: (["norm", "tok", "output"]
                                     + [(n, 0) for n in LAYER if n != "w2"] + [("w2", 0)])
        model.write_gguf(path, **{"llamac.tensor_data.sha256": "0" * 64})
        data, start = path.read_bytes(), int(gguf.GGUFReader(path).data_offset)
        end = len(data) - -(8 * hidden) % 32  # the last tensor's padding may be missing
        path.write_bytes(data[:end])
        lengths.add((end - start) % 64)
        assert "damaged" in run(run_debug_bin, path, "--verify", status=1)
        seal(path)
        assert run(run_debug_bin, path, "--verify") == b"the weights are intact\n"
    assert len(lengths) == 8


def test_verify_needs_a_checksum(run_debug_bin, tmp_path):
    path = tmp_path / "m.gguf"
    Model().write_gguf(path)
    assert "has no checksum" in run(run_debug_bin, path, "--verify", status=1)
    Model().write_gguf(path, **{"llamac.tensor_data.sha256": "0" * 63})
    assert "63 digits" in run(run_debug_bin, path, "--verify", status=1)
    Model().write_llama2c(path)
    assert "has no checksum" in run(run_debug_bin, path, "--verify", status=1)


def test_the_checksum_of_another_file(run_debug_bin, tmp_path):
    """Detect checksums that were computed for other tensors.

    A program such as llama-quantize rewrites the tensors and keeps all metadata: the file is good,
    but its checksum belongs to another file. Damage to an exported file is reported differently,
    and so is a file without the checksum of its tensor list, as exported earlier.
    """
    model, path = Model(vocab=260, layers=1), tmp_path / "m.gguf"
    for form, changed, said in (("f32", "f32", None), ("f32", "q8_0", "belongs to another file"),
                                ("bf16", "f16", "belongs to another file")):
        model.write_gguf(path, form, **{"llamac.tensor_data.sha256": "0" * 64,
                                        "llamac.tensor_list.sha256": "1" * 64})
        sums = seal(path)
        model.write_gguf(path, changed, **sums)
        if said:
            assert said in run(run_debug_bin, path, "--verify", status=1)
        else:
            assert run(run_debug_bin, path, "--verify") == b"the weights are intact\n"
        assert (gguf_file.read_gguf(path)[2]["llamac.tensor_data.sha256"]
                == sums["llamac.tensor_data.sha256"])
        damaged = bytearray(path.read_bytes())
        damaged[-77] ^= 1
        path.write_bytes(damaged)
        assert (said or "are damaged: ") in run(run_debug_bin, path, "--verify", status=1)
    model.write_gguf(path, "q8_0",
                     **{"llamac.tensor_data.sha256": sums["llamac.tensor_data.sha256"]})
    assert ("damaged, or another program wrote them"
            in run(run_debug_bin, path, "--verify", status=1))


@pytest.mark.parametrize("times", ["1000", pytest.param("10000", marks=pytest.mark.slow)])
def test_every_flip_of_a_bit_is_found(tmp_path, run_debug_bin, times):
    """Flip single bits anywhere in the tensors, and find each flip.

    The function behind --verify checks `times` flips, the program itself another 20.
    """
    path, rng = tmp_path / "m.gguf", random.Random(0)
    start = sealed(path, dim=8, hidden=8, heads=2, kv=1)
    flips = compile_c(tmp_path / "flips", "-O3", FUZZ / "flips.c", *LIBRARY)  # reuses run's objects
    assert (subprocess.run([flips, path, times], capture_output=True, check=True, text=True).stdout
            == f"{times} of {times} flips found\n")
    data = path.read_bytes()
    for _ in range(20):
        damaged = bytearray(data)
        damaged[rng.randrange(start, len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        assert "damaged" in run(run_debug_bin, path, "--verify", status=1)


ZEROED = ("contains only zeros", "damaged: SHA-256",
          "their checksum differs")


def test_zeros_in_place_of_weights(run_debug_bin, tmp_path, capsys):
    """Refuse a file of the right size in which an interrupted download left zeros.

    The zeros reach from the middle to the end, or fill a hole of 128 KiB. A checksum detects them;
    without one, the reader refuses tensors that are never all zeros in a valid model. A model that
    was exported with rows of zeros is accepted.
    """
    def refused_by_both(path):
        theirs = run(run_debug_bin, path, "--bench", status=1)
        with pytest.raises(SystemExit):
            state = (gguf_file.read_gguf(path)[0] if path.suffix == ".gguf"
                     else llama2c.read_llama2c(path)[0])
            [state[name] for name in state]
        ours = capsys.readouterr().err
        assert all(any(words in said for words in ZEROED)
                   for said in (ours, theirs)), (ours, theirs)

    model, path = Model(layers=4, vocab=600, tied=False), tmp_path / "m.gguf"
    sums = {"llamac.tensor_data.sha256": "0" * 64, "llamac.tensor_list.sha256": "1" * 64}
    for form, keys in (("f32", sums), ("q8_0", sums), ("f32", {}), ("q8_0", {}), ("v0:", None),
                       ("v1:", None), ("v2:32", None)):
        if keys is None:
            path = tmp_path / f"{form[:2]}.bin"
            model.write_llama2c(path, int(form[1]), int(form[3:] or 0))
        else:
            model.write_gguf(path, form, **keys)
            seal(path)
        whole = path.read_bytes()
        run(run_debug_bin, path, "--bench", "-n", 1)
        path.write_bytes(whole[:len(whole) // 2].ljust(len(whole), b"\0"))
        refused_by_both(path)
        if keys and len(whole) > 1 << 19:
            path.write_bytes(whole[:len(whole) // 2] + bytes(1 << 17)
                             + whole[len(whole) // 2 + (1 << 17):])
            refused_by_both(path)
    path = tmp_path / "m.gguf"
    for name in "tok", "output":
        model.w[name][99:] = 0  # 501 rows of 64 float32: about 128 kB
    model.w["wo", 1][:] = model.w["w2", 2][:] = 0  # these matrices may be initialized with zeros
    for keys in sums, {}:
        model.write_gguf(path, "f32", **keys)
        seal(path)
        assert run(run_debug_bin, path, "-n", 1)
        assert gguf_file.read_gguf(path)[0]["output.weight"].shape == (600, 64)


def test_parts_of_a_split_model_are_named(run_debug_bin, tmp_path, capsys):
    """The gguf package writes the parts; only the first one contains the architecture."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    writer.add_context_length(8)
    for name in "token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight":
        writer.add_tensor(name, np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for part in 1, 2:
        path = tmp_path / f"m-0000{part}-of-00002.gguf"
        said = run(run_debug_bin, path, status=1)
        assert (f"part {part} of 2 of a split model; join them: llama-gguf-split --merge "
                "NAME-00001-of-00002.gguf NAME.gguf") in said
        with pytest.raises(SystemExit):
            gguf_file.read_gguf(path)
        assert (f"part {part} of 2 of a split model; join them: llama-gguf-split --merge "
                "m-00001-of-00002.gguf") in capsys.readouterr().err


# ---- failing system calls, and fuzzing

def faults(faults_bin, *args, stdin=None):
    """Fail each system call of a run in turn; return the numbers of (failed, refused, endured).

    A run refuses a failure with one line and exit code 1, or endures it with exit code 0.
    """
    p = subprocess.run([faults_bin, *map(str, args)],
                       env=dict(os.environ, **({"INPUT": str(stdin)} if stdin else {})),
                       capture_output=True, text=True, timeout=300)
    assert p.returncode == 0, p.stderr
    return [int(word) for word in p.stdout.split() if word.isdigit()]


def memory_files():
    """Return the max number of files that runtime/os.c reads to find the free memory.

    These are two, and five for each control group around this process.
    """
    paths = [line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    return 2 + 5 * sum(1 + path.count("/") for path in paths)


def core_files():
    """Return the number of files that runtime/os.c reads to find processors that share a core.

    It reads one for each processor that this process may use, if SMT is active.
    """
    active = Path("/sys/devices/system/cpu/smt/active")
    return (len(os.sched_getaffinity(0))
            if active.exists() and active.read_text().strip() == "1" else 0)


def test_every_call_to_the_system_may_fail(faults_bin, tmp_path):
    """Fail every allocation, open, map, read, write and thread start, in each mode.

    A run completes only without these: threads, the files that limit their number or report the
    free memory, and the buffer for tiles.
    """
    model = Model(vocab=260, layers=1, seq=64, dim=8, hidden=8, heads=2, kv=1)
    model.write_llama2c(tmp_path / "m.bin")
    model.write_tokenizer(tmp_path / "t.bin")
    sealed(tmp_path / "m.gguf", seq=64, dim=8, hidden=8, heads=2, kv=1)
    (tmp_path / "text").write_bytes(b"Hi\nthere")
    m, text = tmp_path / "m.gguf", tmp_path / "text"
    for args, stdin in (
            ([m, "-i", "Hi", "-n", 5], None), ([m, "-i", "Hi", "-n", 5, "-s", 1, "-j", 3], None),
            ([tmp_path / "m.bin", "-z", tmp_path / "t.bin", "-f", text, "-n", 12], None),
            ([m, "-m", "chat", "--template=zephyr", "-n", 9, "-s", 1], text),
            ([m, "--tokenize"], text), ([m, "--perplexity", text], None),
            ([m, "--logits", "-f", text], None), ([m, "--verify"], None),
            ([m, "--bench", "-b", 2], None),
            ([m, "--json-object", "--lookup", "-n", 12, "-s", 1], None),
            ([m, "-i", "Hi", "-n", 5, "-s", 1, "--prompt-cache", tmp_path / "state"], None)):
        failed, refused, endured = faults(faults_bin, *args, stdin=stdin)
        assert failed == refused + endured, (args, failed, refused, endured)
        assert failed >= 5, (args, failed, refused, endured)
        assert endured <= 6 + memory_files() + core_files(), (args, failed, refused, endured)


@pytest.fixture(scope="session")
def seeds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeds")
    write_seeds(folder)
    return folder


@pytest.mark.parametrize("runs", ["500", pytest.param("30000", marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", TARGETS)
def test_fuzzing(request, seeds, tmp_path_factory, target, runs):
    """Run the fuzz target on `runs` inputs with libFuzzer, or with mutate.c where clang is missing.

    No input causes a crash, a hang, a leak or an allocation over 64 KiB larger than the file (see
    fuzz.c).
    """
    env = dict(os.environ, TARGET=target)
    if shutil.which("clang") and not os.environ.get("COVERAGE"):
        command = [request.getfixturevalue("libfuzzer_bin"), f"-runs={runs}", "-seed=1",
                   "-max_len=24576", "-timeout=20", "-rss_limit_mb=2048",
                   tmp_path_factory.mktemp("found"), FUZZ / "corpus", seeds / target]
    else:
        command = [request.getfixturevalue("mutate_bin"), runs, *sorted((seeds / target).iterdir())]
    p = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace",
                       timeout=600)
    assert p.returncode == 0, p.stderr[-3000:]
    assert runs in p.stderr


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_what_once_failed(mutate_bin, seeds, target):
    """Run the corpus of difficult small inputs and the seeds, unchanged and mutated by mutate.c."""
    files = sorted((FUZZ / "corpus").glob(f"{target}-*")) + sorted((seeds / target).iterdir())
    subprocess.run([mutate_bin, "1000", *files], env=dict(os.environ, TARGET=target), check=True,
                   timeout=300)


def colliding(text, table_size, n):
    """Return n numbers as text that have the same home slot as `text` in a hash table.

    table_size is the number of slots; the hash is FNV-1a.
    """
    def hashes(columns):  # FNV-1a of many texts at once; each column holds one byte of every text
        h = np.full(columns.shape[1], 2166136261, np.uint32)
        for column in columns:
            h = (h ^ column) * np.uint32(16777619)
        return h % np.uint32(table_size)
    numbers = np.arange(10**6, 10**6 + 3 * n * table_size)
    digits = np.stack([numbers // 10**i % 10 + 48 for i in range(6, -1, -1)]).astype(np.uint32)
    home = hashes(np.array([list(text)], np.uint32).T)
    return [b"%d" % i for i in numbers[hashes(digits) == home][:n]]


def test_vocabularies_built_to_collide(run_debug_bin, tmp_path):
    """Accept 1000 pieces in one home slot of the hash table; refuse more, to bound the search."""
    special = [(b"<unk>", 0.0, 2), (b"<s>", 0.0, 3), (b"</s>", 0.0, 3)]
    pieces = special + [(text, 0.0, 1) for text in colliding(b"ab", 2048, 1001)]
    write_gguf(tmp_path / "m.gguf", pieces[:-1])
    assert run(run_debug_bin, tmp_path / "m.gguf", "--tokenize", "-i", "ab") == b"0\n"
    write_gguf(tmp_path / "m.gguf", pieces)
    assert "same hash" in run(run_debug_bin, tmp_path / "m.gguf", status=1)


def test_how_many_hostile_inputs_there_are(tmp_path):
    model = Model(vocab=260, layers=1, seq=16)
    model.write_gguf(tmp_path / "m.gguf")
    files = sum(1 for _ in hostile_gguf((tmp_path / "m.gguf").read_bytes()))
    for version in range(3):
        args, _ = model.write(tmp_path, f"v{version}:32")
        files += sum(1 for _ in hostile_llama2c(args[0].read_bytes(), version))
    files += len(WRONG_VALUES) + len(WRONG_SHAPES)
    assert files + len(WRONG_FLAGS) + len(TWO_MODES) + 4 * len(PROMPTS) >= 900
