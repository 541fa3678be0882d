"""
Saved sequences: bit-identical continuation, keys and values compared with those of transformers,
and refusal of each kind of damaged file.
"""
import hashlib
import os
import random
import re
import stat
import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch

import llamac
from tests.conftest import ROOT, SANITIZE, compile_c
from tests.test_run import ISAS, TEXT, Model, ids_of, run

BITS = {32: "f32", 16: "f16", 8: "q8"}
# magic, version, bits, layers, KV heads, width of a head, tokens, SHA-256 of the model
HEADER = struct.Struct("<8s6I32s")
SHAPES = {"GQA": dict(heads=8, kv=2, tied=False, seq=256),
          "heads of 6": dict(dim=36, hidden=77, heads=6, kv=6, seq=256)}
TOKENS = [1] + [3 + i * 37 % 250 for i in range(255)]

pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Return {name: path of a model file}; "other" differs from "GQA" only in its weights."""
    folder, found = tmp_path_factory.mktemp("models"), {}
    for name, shape in (*SHAPES.items(), ("other", SHAPES["GQA"] | dict(seed=1))):
        found[name] = folder / f"{name}.gguf"
        Model(**shape).write_gguf(found[name])
    return found


def started(path, bits=32, **options):
    return llamac.Engine(llamac.Model(path), kv_bits=bits, threads=1, **options)


def evaluated(engine, tokens):
    sequence = llamac.Sequence(engine)
    if len(tokens):
        sequence.forward(tokens, 0)
    return sequence


def continued(sequence, n):
    """Return the logits of token 7 and of n - 1 more tokens, each the most likely next one."""
    rows, token = [], 7
    for _ in range(n):
        sequence.forward([token], len(sequence))
        rows.append(sequence.logits)
        token = int(rows[-1].argmax())
    return np.stack(rows)


def sealed(data):
    """Return a file's bytes with the last 32 replaced by the SHA-256 of all bytes before them."""
    return data[:-32] + hashlib.sha256(data[:-32]).digest()


@pytest.fixture
def saved(paths, tmp_path):
    """Return (engine, path, bytes) of a saved sequence: 70 tokens in float32, two blocks."""
    engine = started(paths["GQA"])
    evaluated(engine, TOKENS[:70]).save(tmp_path / "state")
    return engine, tmp_path / "state", (tmp_path / "state").read_bytes()


def refusal(engine, path, data):
    """Check that a file with these bytes is refused; return the error message without the path."""
    path.write_bytes(data)
    with pytest.raises(llamac.Error) as e:
        engine.load(path)
    line = str(e.value)
    assert line.startswith(f"{path}: "), line
    assert re.fullmatch("[ -~]{20,}", line), line
    assert re.search("delete|name another file", line), line
    return line.removeprefix(f"{path}: ")


# ---- the checksum

def test_sha256_is_hashlibs(tmp_path):
    """Hash 0 to 700 bytes in two parts, with and without the machine's SHA instructions."""
    program, data = (
        compile_c(tmp_path / "sha256", *SANITIZE, "tests/sha256.c", "runtime/sha256.c"),
        random.Random(1).randbytes(700))
    lines = subprocess.run(
        [program, "700"], input=data, capture_output=True, check=True
    ).stdout.decode().splitlines()
    assert lines == [" ".join([hashlib.sha256(data[:n]).hexdigest()] * 2) for n in range(701)]


# ---- the same continuation

@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_loaded_sequence_continues_to_the_bit(paths, tmp_path, shape, bits, isa):
    """
    Load into another engine. The lengths are less than a page of the cache, exactly one and
    several; the last continuation ends at the last position of the context.
    """
    one, other = (started(paths[shape], bits, isa=isa) for _ in range(2))
    for n in (1, 15, 63, 64, 65, 128, 200, 250):
        sequence = evaluated(one, TOKENS[:n])
        sequence.save(tmp_path / "state")
        loaded = other.load(tmp_path / "state")
        assert loaded.tokens.tolist() == TOKENS[:n]
        with pytest.raises(llamac.Error, match="no logits"):
            loaded.logits  # noqa: B018
        assert (continued(loaded, 6) == continued(sequence, 6)).all(), n
        loaded.truncate(n - 1)  # evaluate the last token again for its logits
        loaded.forward(TOKENS[n - 1:n], n - 1)
        assert (loaded.logits == evaluated(one, TOKENS[:n]).logits).all(), n


def test_an_empty_sequence(paths, tmp_path):
    engine = started(paths["GQA"])
    llamac.Sequence(engine).save(tmp_path / "state")
    assert len((tmp_path / "state").read_bytes()) == 96
    assert (continued(engine.load(tmp_path / "state"), 3)
            == continued(llamac.Sequence(engine), 3)).all()


@pytest.mark.parametrize("bits", BITS)
def test_the_bytes_depend_on_the_tokens_alone(paths, tmp_path, bits):
    """
    The bytes are the same if other sequences used or share the pages of the sequence's memory, and
    for every division of its tokens into calls.
    """
    engine = started(paths["heads of 6"], bits)
    evaluated(engine, TOKENS[:70]).save(tmp_path / "state")
    expected = (tmp_path / "state").read_bytes()
    evaluated(engine, TOKENS[::-1][:200]).free()
    longer = evaluated(engine, TOKENS[:100])
    copy, cut = longer.copy(70), longer.copy(90)
    cut.truncate(70)
    parts = evaluated(engine, TOKENS[:30])
    for i in range(30, 70):
        parts.forward(TOKENS[i:i + 1], i)
    for sequence in (copy, cut, parts, engine.load(tmp_path / "state")):
        sequence.save(tmp_path / "state")  # replaces the earlier file
        assert (tmp_path / "state").read_bytes() == expected
    assert os.listdir(tmp_path) == ["state"]
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o600


def arrays_of(data):
    """
    Return (header, tokens, keys, values) of a file in the format that runtime/state.c describes.
    keys and values are numbers, (layers, KV heads, tokens, width).
    """
    magic, version, bits, layers, heads, width, n, model = HEADER.unpack_from(data)
    assert (magic, version) == (b"llamacKV", 1) and data == sealed(data)
    at, blocks = HEADER.size + 4 * n, []
    kind = {32: "<f4", 16: "<f2", 8: "i1"}[bits]
    for begin in range(0, n, 64):
        rows = layers * heads * min(64, n - begin)
        numbers = np.frombuffer(data, kind, 2 * rows * width, at).astype(np.float32)
        at += 2 * rows * width * bits // 8
        block = numbers.reshape(2, layers, heads, -1, width)
        if bits == 8:
            block = block * np.frombuffer(data, "<f4", 2 * rows, at).reshape(*block.shape[:-1], 1)
            at += 8 * rows
        blocks.append(block)
    assert at == len(data) - 32
    keys, values = np.concatenate(blocks, axis=3)
    return ((layers, heads, width, n, model), np.frombuffer(data, "<i4", n, HEADER.size),
            keys, values)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_keys_and_values_are_transformers(paths, tmp_path, shape, bits):
    """
    The numbers are equal up to rounding and up to their order within a head: transformers stores
    the two numbers of a RoPE pair half a head apart.
    """
    model = Model(**SHAPES[shape])
    with torch.no_grad():
        cache = model.oracle()(torch.tensor([TOKENS[:70]]), use_cache=True).past_key_values
    evaluated(started(paths[shape], bits), TOKENS[:70]).save(tmp_path / "state")
    (layers, heads, width, n, _), tokens, keys, values = arrays_of(
        (tmp_path / "state").read_bytes())
    assert (layers, heads, width, n) == (model.layers, model.kv, model.dim // model.heads, 70)
    assert tokens.tolist() == TOKENS[:70]
    pairs = np.arange(width).reshape(2, -1).T.ravel()  # indices of their numbers in our order
    for i, layer in enumerate(cache.layers):
        for ours, theirs in ((keys[i], layer.keys[0].numpy()[..., pairs]),
                             (values[i], layer.values[0].numpy())):
            assert np.abs(ours - theirs).max() <= (
                {32: 1e-4, 16: 1e-3, 8: 2e-2}[bits] * np.abs(theirs).max())


# ---- what is refused

def test_every_bit_of_the_header_and_many_others(saved):
    engine, path, data = saved
    bits = [*range(8 * HEADER.size),
            *random.Random(1).sample(range(8 * HEADER.size, 8 * len(data)), 200)]
    for bit in bits:
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        line = refusal(engine, path, bytes(changed))
        assert ("not a file of --prompt-cache" if bit < 64 else "expected 1: delete" if bit < 96
                else "damaged; delete it") in line
    path.write_bytes(data)
    assert len(engine.load(path)) == 70


def test_files_of_other_lengths(saved):
    """Files are truncated within and between all of their parts, or are longer."""
    engine, path, data = saved
    # Bytes of the first block: keys and values, layers, KV heads, positions, numbers, bytes each.
    block = 2 * 2 * 2 * 64 * 8 * 4
    parts = [8, 12, 28, 32, 64, 64 + 4 * 70, 64 + 4 * 70 + block // 2, 64 + 4 * 70 + block,
             len(data) - 32, len(data)]
    for n in sorted({min(max(part + by, 1), len(data) - 1)
                     for part in parts for by in (-5, -4, -1, 0, 1, 3)}):
        line = refusal(engine, path, data[:n])
        assert ("not a file of --prompt-cache" if n < 8 else "cut off") in line, n
        if n >= 96:
            assert "bytes, expected" in refusal(engine, path, sealed(data[:n]))
    for more in b"\0", data:
        refusal(engine, path, data + more)
        assert "bytes, expected" in refusal(engine, path, sealed(data + more))
    path.write_bytes(b"")
    with pytest.raises(llamac.Error, match="is empty"):
        engine.load(path)
    os.truncate(path, 2**42)  # a file of another program is refused without reading all of it
    with pytest.raises(llamac.Error, match="not a file of --prompt-cache"):
        engine.load(path)


def test_crafted_files_with_the_right_checksum(saved):
    """
    Nothing is read out of bounds, whatever the header and the tokens contain; tests/fuzz has more
    such files.
    """
    engine, path, data = saved
    for at, said in ((12, "bits, expected 32"), (16, "another model"), (20, "another model"),
                     (24, "another model")):
        for value in (0, 1, 3, 16, 2**20, 2**31, 2**32 - 1):
            assert said in refusal(engine, path,
                                   sealed(data[:at] + struct.pack("<I", value) + data[at + 4:]))
    for value, said in ((0, "expected 96"), (69, "bytes, expected"), (71, "bytes, expected"),
                        (257, "room for 256"), (2 ** 31, "room"),
                        (2 ** 32 - 1, "4294967295 tokens, but the context has room for 256")):
        assert said in refusal(engine, path,
                               sealed(data[:28] + struct.pack("<I", value) + data[32:]))
    for token in (-1, 300, 2**31 - 1, -2**31):
        for i in (0, 69):
            at = 64 + 4 * i
            line = refusal(engine, path,
                           sealed(data[:at] + struct.pack("<i", token) + data[at + 4:]))
            assert f"token {token} is outside the vocabulary of 300 tokens" in line
    broken = np.frombuffer(data, np.uint8).copy()
    broken[64 + 4 * 70:-32] = 255  # NaN: the file is valid, but the logits are not finite
    path.write_bytes(sealed(broken.tobytes()))
    sequence = engine.load(path)
    sequence.forward([7], 70)
    with pytest.raises(llamac.Error, match="not finite"):
        sequence.sample(llamac.Sampler(temperature=1, state=1))


def test_files_of_other_models_and_options(saved, paths, tmp_path):
    _, path, data = saved
    line = refusal(started(paths["other"]), path, data)
    assert re.match(r"it was saved with another model \([0-9a-f]{8}..., "
                    r"expected [0-9a-f]{8}...\): open that model", line)
    assert "another model" in refusal(started(paths["heads of 6"]), path, data)
    for kind in "f16", "q8_0":
        Model(**SHAPES["GQA"]).write_gguf(tmp_path / "m.gguf", kind)
        assert "another model" in refusal(started(tmp_path / "m.gguf"), path, data)
    for changed in dict(theta=20000.0), dict(scaling=2.0), dict(seq=200):
        Model(**SHAPES["GQA"] | changed).write_gguf(tmp_path / "m.gguf")
        assert "another model" in refusal(started(tmp_path / "m.gguf"), path, data)
    for bits in 16, 8:
        line = refusal(started(paths["GQA"], bits), path, data)
        assert line.startswith(
            f"its KV cache has 32 bits, expected {bits} as in this engine: use the --kv that")
    assert refusal(started(paths["GQA"], positions=69), path, data).startswith(
        "it has 70 tokens, but the context has room for 69: use")
    path.write_bytes(data)
    for engine in (started(paths["GQA"], positions=70), started(paths["GQA"], no_copy=True),
                   started(paths["GQA"].read_bytes())):
        assert len(engine.load(path)) == 70


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_models_that_differ_at_one_end_of_a_tensor(paths, tmp_path, kind):
    """A saved sequence is refused with a model whose first or last byte of a tensor differs."""
    Model(**SHAPES["GQA"]).write_gguf(tmp_path / "m.gguf", kind)
    evaluated(started(tmp_path / "m.gguf"), TOKENS[:3]).save(tmp_path / "state")
    data, path = (tmp_path / "state").read_bytes(), tmp_path / "other"
    model = (tmp_path / "m.gguf").read_bytes()
    for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors:
        for at in tensor.data_offset, tensor.data_offset + tensor.n_bytes - 1:
            changed = bytearray(model)
            changed[at] ^= 1
            line = refusal(started(bytes(changed)), path, data)
            assert "another model" in line, (tensor.name, at)


def test_other_files_are_never_replaced(saved, tmp_path):
    engine, path, data = saved
    sequence = engine.load(path)
    text, link, pipe, folder, empty = (
        tmp_path / name for name in ("text", "link", "pipe", "folder", "empty"))
    nowhere, link_in_circle = tmp_path / "nowhere", tmp_path / "circle"
    text.write_text("mine"), link.symlink_to(text), os.mkfifo(pipe), folder.mkdir(), empty.touch()
    nowhere.symlink_to(tmp_path / "missing"), link_in_circle.symlink_to(link_in_circle)
    for other in (text, link, nowhere, link_in_circle, pipe, folder, empty,
                  tmp_path / "missing" / "state", text / "state"):
        with pytest.raises(llamac.Error) as e:
            sequence.save(other)
        assert str(e.value).startswith(f"{other}: ")
        if other.exists():
            assert "name another file" in str(e.value)
    assert text.read_text() == "mine"
    assert link.is_symlink()
    assert not empty.stat().st_size
    assert path.read_bytes() == data
    path.write_bytes(data[:100])  # a saved sequence, but damaged
    sequence.save(path)
    assert path.read_bytes() == data
    assert sorted(os.listdir(tmp_path)) == [
        "circle", "empty", "folder", "link", "nowhere", "pipe", "state", "text"]


def test_a_link_stays_and_its_file_is_replaced(saved, tmp_path):
    engine, path, data = saved
    (tmp_path / "disk").mkdir()
    target, link, second = tmp_path / "disk" / "target", tmp_path / "link", tmp_path / "second"
    target.write_bytes(data[:100])  # a saved sequence, but damaged
    link.symlink_to("disk/target"), second.symlink_to(link)
    for name in link, second:
        engine.load(path).save(name)
        assert target.read_bytes() == data
        assert os.readlink(link) == "disk/target" and os.readlink(second) == str(link)
        assert len(engine.load(name)) == 70
        target.write_bytes(data[:100])
    assert sorted(os.listdir(tmp_path)) == ["disk", "link", "second", "state"]
    assert os.listdir(tmp_path / "disk") == ["target"]


def test_a_file_that_is_cut_off_while_it_is_read(paths, tmp_path):
    """The file is loaded whole or refused with an error; the process never dies of a signal."""
    code = ("import llamac, os, pathlib, random, sys, threading, time\n"
            "llamac.PATHS[:] = [pathlib.Path(sys.argv[1])]\n"
            "engine = llamac.Engine(llamac.Model(sys.argv[2]), threads=1)\n"
            "path, answered = pathlib.Path(sys.argv[3]), 0\n"
            "sequence = llamac.Sequence(engine)\n"
            "sequence.forward([1 + i % 90 for i in range(8000)], 0)\n"
            "sequence.save(path)\n"
            "data, took = path.read_bytes(), time.monotonic()\n"
            "engine.load(path)\n"
            "took, rng = time.monotonic() - took, random.Random(1)\n"
            "for i in range(60):\n"
            "    path.write_bytes(data)\n"
            "    size = rng.randrange(1, len(data))\n"
            "    cut = threading.Timer(rng.random() * took, lambda: os.truncate(path, size))\n"
            "    cut.start()\n"
            "    try: answered += len(engine.load(path)) == 8000\n"
            "    except llamac.Error as e: answered += 'cut off' in str(e)\n"
            "    cut.join()\n"
            "print(answered)\n")
    Model(dim=16, hidden=16, layers=2, heads=2, kv=2, seq=8192).write_gguf(tmp_path / "m.gguf")
    files = llamac.PATHS[0], tmp_path / "m.gguf", tmp_path / "state"
    done = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True,
                          cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "60\n"), done.stderr


def test_a_full_disk_leaves_the_earlier_file(saved, paths, tmp_path):
    """A limit on the size of files stands in for a full disk."""
    _, path, data = saved
    code = ("import llamac, pathlib, resource, signal, sys\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
            "llamac.PATHS[:] = [pathlib.Path(sys.argv[1])]\n"
            "try: llamac.Engine(llamac.Model(sys.argv[2])).load(sys.argv[3]).save(sys.argv[3])\n"
            "except llamac.Error as e: print(e)\n")
    done = subprocess.run([sys.executable, "-c", code, llamac.PATHS[0], paths["GQA"], path],
                          capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == f"{path}: it cannot be written: File too large\n", done.stderr
    assert path.read_bytes() == data and os.listdir(tmp_path) == ["state"]


# ---- run --prompt-cache

def said(binary, *args, isa=""):
    """Run the C program; return (its output, its lines on stderr)."""
    done = subprocess.run([binary, *map(str, args)], capture_output=True,
                          env=dict(os.environ, LLAMAC_ISA=isa), timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.decode()


@pytest.mark.parametrize("isa", sorted({ISAS[0], ISAS[-1]}))
@pytest.mark.parametrize("kv", BITS.values())
def test_prompt_cache(run_bin, paths, tmp_path, kv, isa):
    file, prompt = tmp_path / "state", TEXT * 2
    n = len(ids_of(prompt))

    def write(prompt, *flags):
        args = (paths["GQA"], "-i", prompt, "-t", 0.9, "-s", 3, "-n", 230, "--raw", f"--kv={kv}",
                *flags)
        expected = run(run_bin, *args, isa=isa)
        text, lines = said(run_bin, *args, "--prompt-cache", file, isa=isa)
        assert text == expected
        found = re.search(r"prompt: (\d+) of (\d+) tokens read from the file of --prompt-cache\n",
                          lines)
        evaluated = int(re.search(r"prompt: (\d+) tokens evaluated", lines)[1])
        total = len(ids_of(prompt))
        assert evaluated + (int(found[1]) if found else 0) == total
        assert not found or int(found[2]) == total
        return int(found[1]) if found else None

    assert write(prompt) is None  # no file yet
    whole = file.read_bytes()
    assert write(prompt) == n - 1 and write(prompt[:16]) == 16 and write(prompt[:16], "-k", 5) == 16
    assert file.read_bytes() == whole  # unchanged: it already holds these prompts
    assert write(prompt + " More") == n and len(file.read_bytes()) > len(whole)
    assert write("Other words") == 1  # BOS
    assert write(prompt) == 1 and file.read_bytes() == whole


def test_prompt_cache_beyond_the_context(run_bin, paths, tmp_path):
    """The window slides over a long prompt; the file has the tokens that the window ends with."""
    args = paths["GQA"], "-i", TEXT * 3, "-t", 0, "-n", 400, "-c", 128, "--raw"
    expected = run(run_bin, *args)
    for lines in "", "prompt: 63 of 64 tokens read":
        text, told = said(run_bin, *args, "--prompt-cache", tmp_path / "state")
        assert text == expected and lines in told


def test_prompt_cache_that_is_refused(run_debug_bin, paths, tmp_path):
    model, file = paths["GQA"], tmp_path / "state"
    said(run_debug_bin, model, "-i", "Hello", "-n", 20, "-s", 1, "--prompt-cache", file)
    data = file.read_bytes()
    for changed, flags, message in (
            (data[:-1], (), "damaged; delete it"),
            (b"GGUF" + data, (), "not a file of --prompt-cache"),
            (data, ("--kv=q8",), "its KV cache has 32 bits, expected 8 as in this engine"),
            (data, ("-c", 5), "it has 6 tokens, but the context has room for 5")):
        file.write_bytes(changed)
        line = run(run_debug_bin, model, "-i", "Hey", "-n", 20, *flags, "--prompt-cache", file,
                   status=1)
        assert line.startswith(f"run: {file}: ")
        assert message in line
        assert file.read_bytes() == changed
    file.write_bytes(data)
    assert "another model" in run(
        run_debug_bin, paths["other"], "-i", "Hey", "--prompt-cache", file, status=1)
    assert "not a regular file" in run(run_debug_bin, model, "--prompt-cache", tmp_path, status=1)
    for flags in (["--prompts", model], ["--jsonl"], ["-b", 2], ["-m", "chat"], ["--tokenize"],
                  ["--bench"], ["--verify"], ["--logits"], ["--perplexity", model]):
        assert "run: --prompt-cache: works only when generating one text" in run(
            run_debug_bin, model, *flags, "--prompt-cache", file, status=1)
