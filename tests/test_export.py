"""
Model files: llama2.c's formats byte for byte, GGUF as the gguf package reads it, Hugging Face
folders, and damaged files.
"""
import hashlib
import os
import random
import resource
import struct
import subprocess
import sys
import tracemalloc
from dataclasses import asdict
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece as spm
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import export
from engine.formats import gguf_file, layout, llama2c, quant
from engine.training import checkpoint, load
from engine.training.costs import num_params
from model import ModelArgs, Transformer
from tests import odd_strings
from tokenizer import Bytes, Characters, Tokenizer, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
TEXT = ("Once upon a time, there was a little girl. "
        "She loved to play outside in the park, on 12 days of 7.\n")
SHAPES = {
    "mha": dict(dim=64, n_layers=2, n_heads=4, max_seq_len=32),
    "gqa, untied": dict(dim=96, n_layers=3, n_heads=6, n_kv_heads=2, max_seq_len=16, tied=False),
    "odd hidden": dict(dim=48, n_layers=1, n_heads=2, hidden_dim=100, max_seq_len=8),
}
DTYPES = list(layout.FILE_TYPES)
# Tensor types of each mixture. For rows of a multiple of 256 numbers: the normal type and the type
# with more bits; then the same two for rows of a multiple of 32 only.
MIXED = {
    "q4_k_m": ("Q4_K", "Q6_K", "Q5_0", "Q8_0"), "q5_k_m": ("Q5_K", "Q6_K", "Q5_1", "Q8_0"),
    "q6_k": ("Q6_K", "Q6_K", "Q8_0", "Q8_0")
}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    words = [word[i:] for word in TEXT.split() for i in range(len(word))]
    lines = [" ".join(random.Random(n).choices(words, k=9)) for n in range(200)]
    return train_tokenizer(lines, 330, tmp_path_factory.mktemp("vocabulary") / "tokenizer.model")


def build(vocab_size=330, **sizes):
    torch.manual_seed(3)
    model = Transformer(ModelArgs(vocab_size=vocab_size, **sizes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1, 0.3) if p.dim() == 1 else p.normal_(0, 0.1)
        model.layers[0].attention.wq.weight[0] = 0  # blocks of zeros, which have no scale
    return model


def save_run(folder, model, vocabulary):
    """Write a run's folder with one checkpoint and return it."""
    folder.mkdir()
    vocabulary.save(folder / "vocabulary.model")
    saved = {"args": asdict(model.args), "model": model.state_dict()}
    (folder / "tokenizer.model").write_bytes((folder / "vocabulary.model").read_bytes())
    checkpoint.save(folder, checkpoint.Contents(7, saved, {}, {}, folder / "tokenizer.model", 1.0))
    return folder


def command(monkeypatch, out_dir, **knobs):
    """Run `python export.py out_dir --knob=value ...` inside this process."""
    defaults = dict(format="gguf", dtype="f32", group_size=64, tokenizer="", path="")
    for key, value in (defaults | dict(out_dir=out_dir) | knobs).items():
        monkeypatch.setattr(export, key, str(value) if isinstance(value, Path) else value)
    export.main()


def refused(capsys, function, *args, **kwargs):
    """Call function, which must exit with code 2, and return its one-line error message."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        function(*args, **kwargs)
    said = capsys.readouterr().err
    assert e.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    return said


# ---- llama2.c

def int8_groups(w, group):
    """Quantize by groups: scale = largest magnitude / 127; round ties to even, as Python does."""
    q, scales = bytearray(), []
    for values in w.reshape(-1, group):
        scale = np.float32(max(abs(v) for v in values)) / np.float32(127)
        q += struct.pack(f"{group}b", *(round(float(v / scale)) if scale else 0 for v in values))
        scales.append(scale)
    return bytes(q) + struct.pack(f"<{len(scales)}f", *scales)


def llama2c_bytes(model, version, group=0):
    """Build the whole file from the description of the format alone."""
    a, w = model.args, {name: p.detach().numpy() for name, p in model.named_parameters()}
    layers = [f"layers.{n}." for n in range(a.n_layers)]

    def floats(*names):
        return b"".join(struct.pack(f"<{w[n].size}f", *w[n].reshape(-1)) for n in names)

    def matrices(*names):
        return b"".join(int8_groups(w[n], group) for n in names) if version == 2 else floats(*names)

    ints = [a.dim, a.hidden_dim, a.n_layers, a.n_heads, a.n_kv_heads, a.vocab_size, a.max_seq_len]
    attention = [f"{layer}attention.{m}.weight"
                 for m in ("wq", "wk", "wv", "wo") for layer in layers]
    feed_forward = [f"{layer}feed_forward.{m}.weight"
                    for m in ("w1", "w2", "w3") for layer in layers]
    attention_norms = [f"{layer}attention_norm.weight" for layer in layers]
    ffn_norms = [f"{layer}ffn_norm.weight" for layer in layers]
    output = [] if a.tied else ["output.weight"]
    if version == 0:
        ints[5] = a.vocab_size if a.tied else -a.vocab_size
        frequency = torch.tensor([1 / 10000 ** (2 * i / a.head_dim)
                                  for i in range(a.head_dim // 2)])
        angle = torch.arange(a.max_seq_len)[:, None] * frequency[None]
        before, after = (floats("tok_embeddings.weight", *attention_norms, *attention, *ffn_norms,
                                *feed_forward, "norm.weight"), floats(*output))
        return struct.pack("<7i", *ints) + before, [angle.cos(), angle.sin()], after
    header = b"24ka" + struct.pack("<i7iB", version, *ints, a.tied)
    header += struct.pack("<i", group) if version == 2 else b""
    return (header.ljust(256, b"\0") + floats(*attention_norms, *ffn_norms, "norm.weight")
            + matrices("tok_embeddings.weight", *attention, *feed_forward, *output))


@pytest.mark.parametrize("shape", SHAPES)
def test_v0_bytes(shape, tmp_path, vocabulary):
    model = build(**SHAPES[shape])
    export.export_model(model.state_dict(), model.args, vocabulary, tmp_path / "m.bin", "v0")
    before, tables, after = llama2c_bytes(model, 0)
    data = (tmp_path / "m.bin").read_bytes()
    size = 4 * model.args.max_seq_len * model.args.head_dim
    assert data[:len(before)] == before and data[len(before) + size:] == after
    written = np.frombuffer(data[len(before):len(before) + size], "<f4").reshape(
        2, model.args.max_seq_len, -1)
    # Libraries differ in the last bits of a cosine.
    assert np.abs(written - np.stack(tables)).max() < 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_v1_bytes(shape, tmp_path, vocabulary):
    model = build(**SHAPES[shape])
    export.export_model(model.state_dict(), model.args, vocabulary, tmp_path / "m.bin", "v1")
    assert (tmp_path / "m.bin").read_bytes() == llama2c_bytes(model, 1)


@pytest.mark.parametrize("shape, asked, fits", [
    ("mha", 64, 64), ("mha", 16, 16), ("gqa, untied", 64, 32), ("odd hidden", 64, 16),
    ("odd hidden", 48, 48)])
def test_v2_bytes(shape, asked, fits, tmp_path, vocabulary, capsys):
    model = build(**SHAPES[shape])
    export.export_model(model.state_dict(), model.args, vocabulary, tmp_path / "m.bin", "v2",
                        group_size=asked)
    assert (tmp_path / "m.bin").read_bytes() == llama2c_bytes(model, 2, fits)
    said = capsys.readouterr().out
    assert ("does not divide" in said) == (asked != fits)
    assert ("runq does not" in said) == (shape == "odd hidden")


def test_tokenizer_bin_beside_it(tmp_path, vocabulary, capsys):
    model = build(**SHAPES["mha"])
    export.export_model(model.state_dict(), model.args, vocabulary, tmp_path / "m.bin", "v1")
    sp = spm.SentencePieceProcessor(model_proto=vocabulary.data)
    pieces = [sp.id_to_piece(i).replace("\u2581", " ").encode() for i in range(330)]
    pieces[1], pieces[2] = b"\n<s>\n", b"\n</s>\n"
    expected = struct.pack("<I", max(map(len, pieces)))
    for i, piece in enumerate(pieces):
        expected += struct.pack("<fi", sp.get_score(i), len(piece)) + piece
    assert (tmp_path / "tokenizer.bin").read_bytes() == expected and not capsys.readouterr().out
    model = build(259, **SHAPES["mha"])
    export.export_model(model.state_dict(), model.args, Bytes(), tmp_path / "m.bin", "v1")
    assert "implies a space" in capsys.readouterr().out


@pytest.mark.parametrize("beyond", [dict(rope_theta=5e5), dict(norm_eps=1e-6),
                                    dict(rope_scaling=2.0)])
def test_llama2c_refuses_what_it_cannot_say(beyond, tmp_path, vocabulary, capsys):
    model = build(**SHAPES["mha"], **beyond)
    said = refused(capsys, export.export_model, model.state_dict(), model.args, vocabulary,
                   tmp_path / "m.bin", "v1")
    assert next(iter(beyond)) in said and not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("version", [0, 1, 2])
def test_llama2c_read_back(shape, version, tmp_path):
    model = build(**SHAPES[shape])
    export.export_model(model.state_dict(), model.args, None, tmp_path / "m.bin", f"v{version}")
    state, args = llama2c.read_llama2c(tmp_path / "m.bin")
    assert args == model.args and set(state) == {name for name, _ in model.named_parameters()}
    for name, w in state.items():
        original = model.state_dict()[name]
        if version == 2 and w.dim() == 2:  # within half a step of the group with the largest scale
            assert (w - original).abs().max() <= original.abs().max() / 127 / 2 * 1.001
        else:
            assert torch.equal(w, original)


@pytest.mark.parametrize("format", export.FORMATS)
def test_what_no_format_has_a_name_for_is_refused(format, tmp_path, vocabulary, capsys):
    """
    Export refuses an added or missing tensor, a buffer, a wrong shape, and an untied classifier
    that the settings call tied.
    """
    def another(model, name):
        setattr(model.layers[0].attention, name, torch.nn.Linear(64, 64, bias=False))

    def untie(model):
        model.output.weight = torch.nn.Parameter(model.output.weight + 1)

    for change, said in (
        (lambda m: another(m, "gate"), "model's layers.0.attention.gate.weight would be lost"),
        (lambda m: m.layers[1].register_buffer("scale", torch.ones(3)),
         "model's layers.1.scale would be lost"),
        (lambda m: setattr(m.layers[0].attention.wo, "bias", torch.nn.Parameter(torch.zeros(64))),
         "layers.0.attention.wo.bias would"),
        (lambda m: [another(m, "a"), another(m, "b")],
         "layers.0.attention.a.weight and 1 more would be lost"),
        (lambda m: delattr(m.layers[1], "ffn_norm"),
         "tensor layers.1.ffn_norm.weight (64,) is missing"),
        (lambda m: another(m, "wk") or setattr(m.layers[0].attention.wk, "weight",
                                               torch.nn.Parameter(torch.ones(9, 64))),
         "layers.0.attention.wk.weight has shape (9, 64), expected (64, 64)"),
        (untie, "output.weight differs from tok_embeddings.weight")):
        model = build(**SHAPES["mha"])
        change(model)
        assert said in refused(capsys, export.export_model, model.state_dict(), model.args,
                               vocabulary, tmp_path / "m", format)
    assert not list(tmp_path.iterdir())


def test_a_run_with_a_parameter_of_its_own(tmp_path, vocabulary, capsys, monkeypatch):
    """The run's model.py has a parameter that the reading program's model.py lacks."""
    model = build(**SHAPES["mha"])
    model.layers[0].attention.gate = torch.nn.Linear(64, 64, bias=False)
    run = save_run(tmp_path / "run", model, vocabulary)
    assert "layers.0.attention.gate.weight would be lost" in refused(
        capsys, command, monkeypatch, run)
    assert "holds a parameter layers.0.attention.gate.weight, unlike" in refused(
        capsys, load.load_model, run, "", "cpu")
    assert not list(run.glob("model*"))


# ---- GGUF

def scalars(reader):
    return {key: field.contents() for key, field in reader.fields.items()
            if not key.startswith("GGUF.")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gguf_tensors_through_the_gguf_package(shape, dtype, tmp_path, vocabulary):
    model, path = build(**SHAPES[shape]), tmp_path / "m.gguf"
    export.export_model(model.state_dict(), model.args, vocabulary, path, dtype=dtype)
    reader = gguf.GGUFReader(path)
    found = {t.name: t for t in reader.tensors}
    state, args, _ = gguf_file.read_gguf(path)
    assert len(found) == len(list(model.named_parameters())) and args == model.args
    for name, original in model.named_parameters():
        theirs = found[next(other for ours, other, _, _ in layout.tensors(model.args)
                            if ours == name)]
        original = original.detach().numpy()
        whole = original.ndim == 2 and original.shape[1] % 32 == 0
        wide = name in ("tok_embeddings.weight", "output.weight")
        if original.ndim == 1 or (not whole and dtype[0] == "q"):
            kind = "F32"
        elif dtype in MIXED:  # with up to 3 layers, only the last layer has more bits
            last = (name.startswith(f"layers.{model.args.n_layers - 1}.")
                    and name.split(".")[-2] in ("wv", "w2"))
            kind = MIXED[dtype][(last or wide) + 2 * (original.shape[1] % 256 > 0)]
        else:
            kind = "Q8_0" if dtype == "q4_0" and wide else dtype.upper()
        assert theirs.tensor_type.name == kind and tuple(theirs.shape) == original.shape[::-1], name
        if "_K" not in kind:  # the gguf package reads K types but does not write them
            expected = gguf.quants.quantize(original, theirs.tensor_type)
            assert np.asarray(theirs.data).tobytes() == np.asarray(expected).tobytes(), name
        read = gguf.quants.dequantize(theirs.data, theirs.tensor_type).reshape(original.shape)
        assert np.array_equal(read, state[name].numpy()), name
        if dtype == "f32":
            assert np.array_equal(read, original)
    assert reader.data_offset % 32 == 0 and all(t.data_offset % 32 == 0 for t in reader.tensors)
    file_type = {"f32": "ALL_F32"}.get(dtype, "MOSTLY_" + dtype.upper())
    assert scalars(reader)["general.file_type"] == gguf.LlamaFileType[file_type]
    data = path.read_bytes()
    assert (scalars(reader)["llamac.tensor_data.sha256"]
            == hashlib.sha256(data[reader.data_offset:]).hexdigest())


def test_rounding_of_every_kind_of_value(tmp_path, vocabulary):
    """
    Ties, zeros, both signs, and the smallest and largest values that fit are rounded bit for bit
    as in the gguf package.
    """
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(64, 64)).astype(np.float32)
         * np.logspace(-36, 3, 64, dtype=np.float32)[:, None])
    x[0], x[1], x[2, ::2], x[3] = 0, -0.0, 127, np.arange(64) - 32
    x[4], x[5, :32], x[5, 32:] = (np.arange(64) / 2, np.linspace(-127, 0, 32),
                                  np.repeat(np.arange(16) - 8, 2))
    x[6], x[7] = (np.arange(64) + 0.5,
                  (0x3F800000 + (np.arange(64, dtype=np.uint32) << 15)).view(np.float32))
    for dtype, kind in layout.TYPES.items():
        if kind.block == 256:  # the gguf package reads these types but does not write them
            continue
        theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType(kind.number))
        ours = np.frombuffer(b"".join(export.encoded("x", torch.from_numpy(x), dtype)), np.uint8)
        assert np.array_equal(ours, np.asarray(theirs).reshape(-1).view(np.uint8)), dtype
        assert kind.block * len(ours) == kind.size * x.size
        tiny = torch.tensor([1e-45, -1e-40] * 16)[None]
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            written = np.frombuffer(next(export.encoded("x", tiny, dtype)), np.uint8)
            assert np.abs(kind.decode(written)).max() <= 1e-40


def test_the_scale_and_minimum_of_a_block_are_the_best_that_are_not_negative():
    """
    The squared error is at most 1.1 times that of numpy's least squares on the same quantized
    values, plus 1e-6.
    """
    x = np.random.default_rng(0).standard_normal((32, 40)).astype(np.float32)
    x[:, 20:] = 5 + x[:, 20:] / 10  # far above zero: the best minimum that is not negative is 0
    scale, minimum = quant.best_scale_and_min(x, 15)
    assert (scale > 0).all()
    assert (minimum >= 0).all()
    assert (minimum[20:] < 0.1).all()
    assert (minimum[:20] > 1).all()
    q = np.clip(np.rint((x + minimum) / scale), 0, 15)
    error = ((scale * q - minimum - x) ** 2).sum(axis=0)
    for column in range(40):
        a = np.stack([q[:, column], -np.ones(32)], 1)[:, :1 + (column < 20)]
        best = ((a @ np.linalg.lstsq(a, x[:, column])[0] - x[:, column]) ** 2).sum()
        assert error[column] <= 1.1 * best + 1e-6, column


# RMS error / standard deviation of normal weights as below, after llama-quantize --pure
GGML_ERROR = {"q4_k": 0.07155, "q5_k": 0.03622, "q6_k": 0.01778}


@pytest.mark.parametrize("dtype", GGML_ERROR)
def test_blocks_of_256(dtype):
    """
    The gguf package decodes the blocks to our values, the error is not larger than ggml's, and no
    part of a block is spoilt by its neighbours.
    """
    rng, kind = np.random.default_rng(0), layout.TYPES[dtype]
    normal = rng.standard_normal((256, 1024)).astype(np.float32)
    odd = np.zeros((12, 1024), np.float32)
    odd[1], odd[2], odd[3, 5], odd[4, 700], odd[5, :300] = 2, -2, 1, -1, rng.standard_normal(300)
    odd[6], odd[7] = 5 + normal[0] / 100, normal[1] - 5
    odd[8:] = normal[:4] * np.float32([[1e-3], [1e-6], [1e-9], [1e-40]])
    for x in normal, odd:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            raw = np.frombuffer(b"".join(export.encoded("x", torch.from_numpy(x), dtype)), np.uint8)
            read = kind.decode(raw).reshape(x.shape)
        assert 256 * len(raw) == kind.size * x.size
        assert np.array_equal(read, gguf.quants.dequantize(
            raw.reshape(len(x), -1), gguf.GGMLQuantizationType(kind.number)))
        if x is normal:
            assert np.sqrt(np.mean((read - x) ** 2)) <= GGML_ERROR[dtype]
        else:
            # 9 / 15 or 9 / 31 is about one quantization step.
            assert np.abs(read - x)[:8].max() <= (
                0.75 * 9 / {"q4_k": 15, "q5_k": 31, "q6_k": 31}[dtype])
            assert not read[0].any()
            assert (np.abs(read[8:]) <= 1.2 * np.abs(x[8:]).max(axis=1, keepdims=True)).all()


def test_mixtures_are_those_of_llama_quantize():
    """Of 17 layers, llama-quantize stores wv and w2 of these nine in the type with more bits."""
    for dtype, (less, more, *_) in MIXED.items():
        for layer in range(17):
            wide = layer in (0, 1, 4, 7, 10, 13, 14, 15, 16)
            for name in ("attention.wq attention.wk attention.wv attention.wo "
                         "feed_forward.w1 feed_forward.w2 feed_forward.w3").split():
                kind = export.gguf_type(f"layers.{layer}.{name}.weight", (512, 512), dtype, 17)
                assert kind.upper() == (
                    more if wide and name[-2:] in ("wv", "w2") else less), (layer, name)
        for name in "tok_embeddings.weight", "output.weight":
            assert export.gguf_type(name, (512, 512), dtype, 17) == "q6_k"


def test_gguf_metadata(tmp_path, vocabulary):
    model, path = (build(**SHAPES["gqa, untied"], rope_theta=5e5, rope_scaling=2.5, norm_eps=1e-6),
                   tmp_path / "m.gguf")
    chat = {"tokenizer.chat_template": "{{x}}"}
    export.export_model(model.state_dict(), model.args, vocabulary, path, name="tiny", extra=chat)
    found = scalars(gguf.GGUFReader(path))
    sp = spm.SentencePieceProcessor(model_proto=vocabulary.data)
    types = [2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1
             for i in range(330)]
    assert found.pop("tokenizer.ggml.tokens") == [sp.id_to_piece(i) for i in range(330)]
    assert found.pop("tokenizer.ggml.scores") == [sp.get_score(i) for i in range(330)]
    assert found.pop("tokenizer.ggml.token_type") == types
    assert found.pop("llama.attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    assert (len(found.pop("llamac.tensor_data.sha256"))
            == len(found.pop("llamac.tensor_list.sha256")) == 64)
    assert found == {
        "general.architecture": "llama", "general.name": "tiny", "general.alignment": 32,
        "general.file_type": 0, "llama.context_length": 16, "llama.embedding_length": 96,
        "llama.block_count": 3, "llama.vocab_size": 330, "llama.feed_forward_length": 256,
        "llama.attention.head_count": 6, "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 16, "llama.rope.freq_base": 5e5,
        "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5,
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": True, "tokenizer.ggml.remove_extra_whitespaces": False,
        "tokenizer.chat_template": "{{x}}"
    }
    assert gguf_file.read_gguf(path)[1] == model.args


@pytest.mark.parametrize("kind", ["sentencepiece", "byte", "char"])
def test_vocabulary_comes_back_from_a_gguf_file(kind, tmp_path, vocabulary):
    original = {"sentencepiece": vocabulary, "byte": Bytes(), "char": Characters(TEXT)}[kind]
    model = build(original.vocab_size, **SHAPES["mha"])
    export.export_model(model.state_dict(), model.args, original, tmp_path / "m.gguf")
    again = load.read_model(tmp_path / "m.gguf")[2]
    assert again.pieces() == original.pieces()
    strange = "naïve 日本 \u2581 😀" if kind != "char" else "girl girl"
    for text in ("", " ", TEXT, "  two  spaces ", "a\n\nb\tc", strange):
        assert again.encode(text, bos=True, eos=True) == original.encode(text, bos=True, eos=True)
        assert again.decode(again.encode(text)) == original.decode(original.encode(text))


@pytest.mark.parametrize(
    "options, model, said",
    [(dict(byte_fallback=True, remove_extra_whitespaces=False), "llama", ""),
     (dict(byte_fallback=True), "llama", "llama.cpp keeps them"),
     (dict(remove_extra_whitespaces=False), "llama-without-bytes", "it will refuse this file"),
     (dict(byte_fallback=True, remove_extra_whitespaces=False, user_defined_symbols=["<user>"]),
      "llama", "a space after"),
     ("byte", "llama", ""), ("char", "t5", "")])
def test_what_llama_cpp_will_do_with_a_vocabulary(options, model, said, tmp_path, run_bin, capsys):
    """
    llama.cpp chooses its encoder by tokenizer.ggml.model. Where no encoder matches the vocabulary,
    export prints one line about it.
    """
    if isinstance(options, str):
        original = {"byte": Bytes(), "char": Characters(TEXT)}[options]
    else:
        with open(tmp_path / "m.model", "wb") as f:
            spm.SentencePieceTrainer.train(sentence_iterator=iter([TEXT] * 9), model_writer=f,
                                           vocab_size=300, model_type="bpe", minloglevel=5,
                                           normalization_rule_name="identity",
                                           hard_vocab_limit=False, **options)
        original = Tokenizer.load(tmp_path / "m.model")
    built = build(original.vocab_size, **SHAPES["mha"])
    export.export_model(built.state_dict(), built.args, original, tmp_path / "m.gguf")
    lines = capsys.readouterr().out
    assert said in lines and lines.count("\n") == bool(said)
    assert scalars(gguf.GGUFReader(tmp_path / "m.gguf"))["tokenizer.ggml.model"] == model
    again = load.read_model(tmp_path / "m.gguf")[2]
    strings = ["Once upon", "ünknown ZZ  Ö", "girl  and "]
    assert [again.encode(s) for s in strings] == [original.encode(s) for s in strings]
    assert odd_strings.by_run(run_bin, tmp_path, strings) == [original.encode(s) for s in strings]
    # A vocabulary that was read back exports to the same bytes.
    export.export_model(built.state_dict(), built.args, again, tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()


# ---- Hugging Face


@pytest.mark.parametrize(
    "sizes, dtype",
    [(SHAPES["mha"], "f32"),
     (SHAPES["gqa, untied"] | dict(rope_theta=5e5, rope_scaling=2.5, norm_eps=1e-3), "f32"),
     (SHAPES["odd hidden"], "bf16")])
def test_hugging_face_folder(sizes, dtype, tmp_path, vocabulary):
    model = build(**sizes)
    export.export_model(model.state_dict(), model.args, vocabulary, tmp_path / "hf", "hf", dtype)
    if dtype == "bf16":
        model.load_state_dict(
            {name: w.bfloat16().float() for name, w in model.state_dict().items()})
    llama = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    x = torch.randint(330, (2, model.args.max_seq_len))
    with torch.no_grad():
        ours, theirs = model(x, every=True)[0], llama(x).logits
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in (TEXT, "naïve 日本 😀", "a\n\nb  c"):
        assert tokenizer.encode(text) == vocabulary.encode(text, bos=True)


@pytest.mark.parametrize("kind", ["sentencepiece", "byte", "char"])
def test_odd_strings_in_what_is_exported(kind, run_bin, tmp_path, capsys):
    """
    All readers return the same ids for leading spaces, special tokens as text, control characters,
    and code points beyond the basic multilingual plane.
    """
    vocabulary = odd_strings.vocabularies()[kind]
    odd_strings.export_both(vocabulary, tmp_path)
    assert not capsys.readouterr().out
    expected, strings = [vocabulary.encode(s) for s in odd_strings.STRINGS], odd_strings.STRINGS
    assert len(set(strings)) >= 216
    for found in odd_strings.by_run(run_bin, tmp_path), odd_strings.by_transformers(tmp_path):
        assert [s for s, ids, theirs in zip(strings, expected, found, strict=True)
                if ids != theirs] == []
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for s, ids in zip(strings, expected):
        if vocabulary.unk_id not in ids:
            assert tokenizer.encode(s) == [1, *ids], s
            assert tokenizer.decode([1, *ids, 2], skip_special_tokens=True) == \
                vocabulary.decode(ids), s


@pytest.fixture
def one_thread():
    """Run on one thread: models this small are slower on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["sentencepiece", "byte", "char"])
def test_transformers_generates_what_sample_does(kind, tmp_path, vocabulary, one_thread):
    """
    With its default arguments, `generate` continues to the end of the text that the model has
    memorized, and stops there.
    """
    vocabulary = {"sentencepiece": vocabulary, "byte": Bytes(), "char": Characters(TEXT)}[kind]
    torch.manual_seed(0)
    model = Transformer(
        ModelArgs(vocab_size=vocabulary.vocab_size, dim=32, n_layers=1, n_heads=2, max_seq_len=128))
    ids = torch.tensor([vocabulary.encode(TEXT, bos=True, eos=True)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        model(ids[:, :-1], ids[:, 1:])[1].backward()
        optimizer.step()
    export.export_model(model.state_dict(), model.args, vocabulary, tmp_path / "hf", "hf")
    llama, tokenizer = (auto.from_pretrained(tmp_path / "hf")
                        for auto in (AutoModelForCausalLM, AutoTokenizer))
    start = tokenizer("Once upon", return_tensors="pt")
    sample = model.eval().generate(start["input_ids"], 128, 0, 1.0,
                                   (vocabulary.bos_id, vocabulary.eos_id))[0]
    written = llama.generate(start["input_ids"], attention_mask=start["attention_mask"])[0].tolist()
    assert tokenizer.decode(written, skip_special_tokens=True) == vocabulary.decode(sample) == TEXT
    assert written == ids[0].tolist()
    state, args, back, _ = load.read_model(tmp_path / "hf")
    assert (args, back.kind, back.sha256()) == (model.args, kind, vocabulary.sha256())
    assert torch.equal(state["output.weight"], model.state_dict()["output.weight"])


# ---- the command

def test_every_route_between_files(tmp_path, vocabulary, monkeypatch, capsys):
    model = build(**SHAPES["gqa, untied"])
    run = save_run(tmp_path / "run", model, vocabulary)

    def same(path, w=model.state_dict(), tokenizer=""):
        state, args, found, _ = load.read_model(path, tokenizer)
        assert args == model.args and found.encode(TEXT) == vocabulary.encode(TEXT)
        assert all(torch.equal(state[name], w[name]) for name in w)

    command(monkeypatch, run)
    assert capsys.readouterr().out == f"wrote {run / 'model.gguf'}\n"
    same(run / "model.gguf")
    command(monkeypatch, checkpoint.locate(run), path=tmp_path / "step.gguf")
    assert ((tmp_path / "step.gguf").read_bytes()[-1000:]
            == (run / "model.gguf").read_bytes()[-1000:])
    for version in ("v0", "v1"):
        command(monkeypatch, run / "model.gguf", format=version)
        same(run / "model.bin", tokenizer=str(run / "tokenizer.bin"))
        command(monkeypatch, run / "model.bin", tokenizer=run / "tokenizer.bin",
                path=tmp_path / "back.gguf")
        same(tmp_path / "back.gguf")
    command(monkeypatch, run / "model.gguf", dtype="q8_0", path=tmp_path / "q8.gguf")
    command(monkeypatch, run, dtype="q8_0", path=tmp_path / "q8 at once.gguf")
    assert gguf_file.read_gguf(tmp_path / "q8.gguf")[2]["general.name"] == "run"
    same(tmp_path / "q8.gguf", gguf_file.read_gguf(tmp_path / "q8 at once.gguf")[0])
    command(monkeypatch, run / "model.gguf", format="hf")
    assert (run / "hf" / "tokenizer.model").exists() and (run / "hf" / "model.safetensors").exists()
    command(monkeypatch, (run / "hf").rename(tmp_path / "Tiny2.5-0.5B"),
            path=tmp_path / "named.gguf")
    assert gguf_file.read_gguf(tmp_path / "named.gguf")[2]["general.name"] == "Tiny2.5-0.5B"


@pytest.mark.parametrize("ours", [True, False])
def test_another_kind_of_vocabulary_in_an_earlier_folder(ours, tmp_path, vocabulary):
    """
    Export removes the tokenizer.model of its own earlier export, which would be read instead of
    the new tokenizer.json. It keeps a file of another origin.
    """
    model, folder = build(**SHAPES["mha"]), tmp_path / "hf"
    if ours:
        export.export_model(model.state_dict(), model.args, vocabulary, folder, "hf")
        assert (folder / "tokenizer.model").exists()
    else:
        folder.mkdir()
        vocabulary.save(folder / "tokenizer.model")
    model = build(259, **SHAPES["mha"])
    export.export_model(model.state_dict(), model.args, Bytes(), folder, "hf")
    assert (folder / "tokenizer.model").exists() != ours
    if ours:  # export keeps a file that someone has put there since
        vocabulary.save(folder / "tokenizer.model")
        export.export_model(model.state_dict(), model.args, Bytes(), folder, "hf")
        assert (folder / "tokenizer.model").exists()
        with pytest.raises(SystemExit):
            export.refuse_foreign(folder, "hf", model.args, Bytes())
        (folder / "tokenizer.model").unlink()
        assert load.read_model(folder)[2].kind == "byte"
        assert AutoTokenizer.from_pretrained(folder).encode("a") == [1, 3 + ord("a")]


def test_mistakes_are_one_line(tmp_path, vocabulary, monkeypatch, capsys):
    run = save_run(tmp_path / "run", build(**SHAPES["mha"]), vocabulary)
    command(monkeypatch, run)
    command(monkeypatch, run, format="v1")
    (tmp_path / "empty").touch()
    before = sorted(tmp_path.rglob("*"))
    for out_dir, knobs, said in [
        (tmp_path / "none", {}, "holds no complete checkpoint"),
        (tmp_path / "empty", {}, "cannot be read"),
        (run, dict(format="onnx"), "expected gguf or hf or v0"),
        (run, dict(dtype="q2_k"), "expected f32 or f16"),
        (run, dict(format="hf", dtype="q8_0"), "expected f32 or f16 or bf16"),
        (run, dict(format="v2", dtype="f16"), "expected f32"),
        (run, dict(format="v2", group_size=0), "at least 1"),
        (run / "model.bin", {}, "needs the vocabulary"),
        (run / "model.gguf", {}, "would overwrite the model to export"),
        (run / "model.bin", dict(format="v2"), "would overwrite the model to export"),
        (run, dict(path=tmp_path / "no" / "m"), "No such file"),
        (run, dict(path=tmp_path), "s a directory"),
        (run, dict(tokenizer=tmp_path / "no.model"), "No such file"),
        (run, dict(tokenizer=ROOT / "model.py"), "expected a sentencepiece model"),
        (run, dict(tokenizer=tmp_path / "no.bin"), "No such file"),
        (ROOT / "model.py", {}, "neither GGUF nor"),
    ]:
        assert said in refused(capsys, command, monkeypatch, out_dir, **knobs)
    (tmp_path / "tokenizer.json").write_bytes(Bytes().data)
    said = refused(capsys, command, monkeypatch, run, tokenizer=tmp_path / "tokenizer.json")
    assert "259 pieces and the model 330" in said
    (tmp_path / "tokenizer.json").unlink()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("bad, dtype", [
    (float("nan"), "f32"), (float("inf"), "q8_0"), (1e5, "f16"), (1e7, "q4_0")])
@pytest.mark.parametrize("format", ["gguf", "hf"])
def test_weights_that_do_not_fit(bad, dtype, format, tmp_path, vocabulary, capsys):
    if format == "hf" and dtype.startswith("q"):
        dtype, bad = "bf16", -float("inf")
    model = build(**SHAPES["mha"])
    with torch.no_grad():
        model.layers[1].feed_forward.w2.weight[3, 5] = bad
    (tmp_path / "m").mkdir() if format == "hf" else (tmp_path / "m").write_text("the old one")
    arguments = model.state_dict(), model.args, vocabulary, tmp_path / "m", format, dtype
    said = refused(capsys, export.export_model, *arguments)
    assert {"gguf": "layers.1.feed_forward.w2.weight",
            "hf": "model.layers.1.mlp.down_proj.weight"}[format] in said
    assert [p.name for p in tmp_path.rglob("*")] == ["m"]  # nothing half-written
    if format == "gguf":
        assert (tmp_path / "m").read_text() == "the old one"


@pytest.mark.parametrize("format, files", [("gguf", ["model.gguf"]),
                                           ("v2", ["model.bin", "tokenizer.bin"])])
def test_full_disk(format, files, tmp_path, vocabulary, monkeypatch):
    """Files may grow to 60 kB here, which is too little for the export."""
    run = save_run(tmp_path / "run", build(**SHAPES["gqa, untied"]), vocabulary)
    before = sorted(run.iterdir())

    failed = subprocess.run(
        [sys.executable, ROOT / "export.py", run, f"--format={format}"],
        capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)))
    assert failed.returncode == 2 and failed.stdout.count("wrote") == 0
    assert failed.stderr.count("\n") == 1 and "cannot be written (File too large)" in failed.stderr
    assert sorted(run.iterdir()) == before
    command(monkeypatch, run, format=format)
    assert sorted(run.iterdir()) == sorted(before + [run / name for name in files])


@pytest.mark.parametrize("format", ["gguf", "v2", "html"])
def test_a_device_or_pipe_is_not_replaced(format, tmp_path, vocabulary, monkeypatch, capsys):
    """Root could replace even /dev/null."""
    model = build(dim=32, n_layers=1, n_heads=1, hidden_dim=32, max_seq_len=8)
    run = save_run(tmp_path / "run", model, vocabulary)
    os.mkfifo(tmp_path / "pipe.html")
    with pytest.raises(SystemExit):
        command(monkeypatch, run, format=format, path=tmp_path / "pipe.html")
    assert "pipe.html: exists and is not known to be an export" in capsys.readouterr().err
    assert (tmp_path / "pipe.html").is_fifo()


@pytest.mark.parametrize("format, first", [
    pytest.param("v0", "model.bin", marks=pytest.mark.slow), ("v2", "model.bin"),
    ("hf", "hf/model.safetensors")
])
def test_full_disk_leaves_every_file_of_an_earlier_export(format, first, tmp_path, vocabulary,
                                                          monkeypatch):
    """
    The first file of the new export fits on the disk and a later one does not: here no file may
    grow larger than the first.
    """
    model = build(dim=2, n_layers=1, n_heads=1, hidden_dim=2, max_seq_len=8)
    run = save_run(tmp_path / "run", model, vocabulary)
    command(monkeypatch, run, format=format)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    model.tok_embeddings.weight.data *= 2
    other = save_run(tmp_path / "other", model, vocabulary)

    target, size = run / Path(first).parts[0], len(before[run / first])
    failed = subprocess.run(
        [sys.executable, ROOT / "export.py", other, f"--format={format}", f"--path={target}"],
        capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
    assert failed.returncode == 2 and "(File too large); no file was replaced" in failed.stderr
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    command(monkeypatch, other, format=format, path=target)
    assert (run / first).read_bytes() != before[run / first]


@pytest.mark.parametrize("format, dtype", [
    ("gguf", "f32"), ("gguf", "q8_0"), ("v1", "f32"), ("v2", "f32"), ("hf", "bf16")])
def test_writes_tensor_by_tensor(format, dtype, tmp_path, vocabulary):
    """
    A model of over 100 times the size of its largest tensor is written with less than 10 times
    the memory of that tensor. tracemalloc counts numpy's arrays.
    """
    model = build(dim=256, n_layers=24, n_heads=4, hidden_dim=512, max_seq_len=8)
    state = model.state_dict()
    export.export_model(state, model.args, vocabulary, tmp_path / "first", format, dtype)
    tracemalloc.start()
    export.export_model(state, model.args, vocabulary, tmp_path / "m", format, dtype)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    largest = 4 * 256 * 512
    assert 4 * num_params(model.args) > 100 * largest and peak < 10 * largest


# ---- damage

@pytest.fixture(scope="module")
def files(tmp_path_factory, vocabulary):
    """Return a file of each format: {format: path}."""
    folder, model = (tmp_path_factory.mktemp("files"),
                     build(dim=32, n_layers=2, n_heads=2, hidden_dim=32, max_seq_len=8))
    for format in ("gguf", "v0", "v1", "v2"):
        export.export_model(model.state_dict(), model.args, vocabulary, folder / format, format)
    return {p.name: p for p in folder.iterdir()}


def read(path):
    return load.read_model(path) if path.read_bytes()[:4] == b"GGUF" else llama2c.read_llama2c(path)


@pytest.mark.parametrize("format", ["gguf", "v0", "v1", "v2"])
def test_truncated_or_longer(format, files, tmp_path, capsys):
    data, path = files[format].read_bytes(), tmp_path / "m"
    read(files[format])
    for size in sorted({1, 3, 4, 8, 24, 27, 28, 40, 255, 256, len(data) // 2, len(data) - 33,
                        len(data) - 1} | set(range(5, len(data), len(data) // 60))):
        path.write_bytes(data[:size])
        refused(capsys, read, path)
    path.write_bytes(data + bytes(32))
    refused(capsys, read, path)


@pytest.mark.parametrize("format", ["gguf", "v0", "v1", "v2"])
def test_random_damage_is_one_line_or_harmless(format, files, tmp_path, capsys):
    data, path, rng = files[format].read_bytes(), tmp_path / "m", random.Random(5)
    header = data.find(b"output_norm.weight") + 100 if format == "gguf" else 256
    outcomes = set()
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 4))):
            damaged[rng.randrange(header)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        path.write_bytes(damaged)
        try:
            read(path)
            outcomes.add("read")
        except SystemExit as e:
            assert e.code == 2 and capsys.readouterr().err.count("\n") == 1
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def test_damaged_tensor_is_noticed(files, tmp_path, capsys):
    data, path = bytearray(files["gguf"].read_bytes()), tmp_path / "m"
    data[-77] ^= 1
    path.write_bytes(data)
    assert "checksum" in refused(capsys, read, path)


def with_metadata(path, changed, tensors=None):
    """
    Write a GGUF file of a small Llama with the gguf package and return its path. `changed` replaces
    metadata, and None leaves a key out; `tensors` likewise replaces shapes.
    """
    values = {
        "llama.context_length": 8, "llama.embedding_length": 8, "llama.block_count": 1,
        "llama.feed_forward_length": 8, "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a"], "tokenizer.ggml.scores": [0.0] * 4,
        "tokenizer.ggml.token_type": [2, 3, 3, 1]
    } | changed
    w = gguf.GGUFWriter(path, values.pop("general.architecture", "llama"))
    kinds = {
        int: w.add_uint32, float: w.add_float32, str: w.add_string, bool: w.add_bool,
        list: w.add_array, tuple: lambda key, typed: w.add_key_value(key, *typed)
    }
    for key, value in values.items():
        if value is not None:
            kinds[type(value)](key, value)
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {"token_embd.weight": (4, 8), "output_norm.weight": (8,)}
    shapes |= {f"blk.0.{name}.weight": (8,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.{name}.weight": (8, 8) for name in matrices}
    for name, shape in (shapes | (tensors or {})).items():
        if shape:
            w.add_tensor(name, np.ones(shape, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.mark.parametrize("changed, said", [
    ({"general.architecture": "gpt2"}, "architecture 'gpt2'"),
    ({"llama.block_count": None}, "block_count is None"),
    ({"llama.block_count": 2}, "tensor blk.1.attn_norm.weight (8,) is missing"),
    ({"llama.block_count": 4294967295}, "tensor blk.1.attn_norm.weight (8,) is missing"),
    ({"llama.embedding_length": "8"}, "embedding_length is '8'"),
    ({"llama.embedding_length": 0}, "positive int"),
    ({"llama.attention.head_count": 3}, "not an even head width"),
    ({"llama.feed_forward_length": 16}, "has shape"),
    ({"llama.attention.head_count_kv": 4}, "not a multiple"),
    ({"llama.context_length": 4294967295}, "a context of"),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "positive float"),
    ({"llama.rope.freq_base": -1.0}, "positive float"),
    ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
    # A file that names no scaling type means linear.
    ({"llama.rope.scaling.factor": 0.0}, "scaling.factor is 0.0"),
    ({"llama.rope.dimension_count": 2}, "dimension_count' is 2, expected 4"),
    ({"llama.attention.value_length": 2}, "value_length' is 2, expected 4"),
    ({"llama.rope.scale_linear": 2.0, "llama.rope.scaling.factor": 4.0},
     "scale_linear' is 2.0, expected 4.0"),
    ({"llama.rope.scaling.attn_factor": 1.5}, "attn_factor' is 1.5, expected 1"),
    ({"llama.expert_count": 8}, "expert_count' is 8"),
    ({"llama.attention.causal": False}, "causal' is False, expected 1"),
    ({"llama.logit_scale": 2.0}, "'llama.logit_scale' is 2.0, expected no such key"),
    ({"llama.attention.sliding_window": 4}, "sliding_window is 4"),
    ({"general.quantization_version": 1}, "version' is 1, expected 2"),
    ({"tokenizer.ggml.tokens": None}, "tokens is None"),
    ({"tokenizer.ggml.model": "gpt2"}, "pre-tokenizer is None"),
    ({"tokenizer.ggml.scores": [0.0]}, "shorter than argument"),
    ({"tokenizer.ggml.token_type": ["a"] * 4}, "TypeError"),
    ({"tokenizer.ggml.bos_token_id": 4}, "KeyError: 4"),
    ({"tokenizer.ggml.bos_token_id": True}, "TypeError"),
    ({"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "ab"],
      "tokenizer.ggml.add_space_prefix": False}, "single characters"),
    ({"tokenizer.ggml.tokens": ["a"] * 4}, "sentencepiece"),
    ({"tokenizer.ggml.token_type": [2, 1, 1, 1]}, "no <s>"),
])
def test_metadata_that_cannot_be(changed, said, tmp_path, capsys):
    read(with_metadata(tmp_path / "good", {}))
    assert said in refused(capsys, read, with_metadata(tmp_path / "m", changed))


@pytest.mark.parametrize(
    "changed, scaling",
    [({"llama.rope.scaling.factor": 2.5}, 2.5), ({"llama.rope.scale_linear": 2.5}, 2.5),
     ({"llama.rope.scaling.type": "linear"}, 1.0),
     ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.5}, 1.0)])
def test_a_scaling_factor_without_a_type_is_linear(changed, scaling, tmp_path):
    """llama.cpp and run read it the same way."""
    args = read(with_metadata(tmp_path / "m", changed))[1]
    assert args.rope_scaling == scaling
    assert args.rope_theta == 10_000  # GGUF's default when the file has no value


def test_settings_that_a_llama_has_not_may_be_named_as_what_they_are_without(tmp_path):
    """Keys that hold llama.cpp's defaults, as converters write them, are accepted."""
    read(with_metadata(tmp_path / "m", {
        "llama.attention.causal": True, "llama.attention.clamp_kqv": 0.0,
        "llama.attention.max_alibi_bias": 0.0, "llama.expert_count": 0,
        "llama.expert_used_count": 0, "llama.rope.scaling.attn_factor": 1.0,
        "llama.rope.scaling.yarn_beta_fast": 32.0, "llama.rope.scaling.yarn_beta_slow": 1.0,
        "llama.use_parallel_residual": False
    }))


def test_numbers_of_every_type_in_metadata_are_read(tmp_path):
    """Other programs write such keys beside the ones that we write."""
    values = {
        "UINT8": 255, "INT8": -128, "UINT16": 65535, "INT16": -32768, "UINT32": 2 ** 32 - 1,
        "INT32": -2 ** 31, "UINT64": 2 ** 64 - 1, "INT64": -2 ** 63, "FLOAT32": 0.1, "FLOAT64": 0.1,
        "BOOL": True
    }
    path = with_metadata(
        tmp_path / "m",
        {f"other.{kind}": (value, gguf.GGUFValueType[kind]) for kind, value in values.items()})
    found = gguf_file.read_gguf(path)[2]
    assert {kind: found[f"other.{kind}"] for kind in values} == values


@pytest.mark.parametrize(
    "tensors, said",
    [({"blk.0.attn_q.weight": None}, "tensor blk.0.attn_q.weight (8, 8) is missing"),
     ({"rope_freqs.weight": (4,)}, "rope_freqs.weight has shape (4,)"),
     ({"blk.0.attn_q.scale": (4,)}, "tensor 'blk.0.attn_q.scale' is not part of"),
     ({"blk.0.attn_q.weight": (8, 16)}, "has shape (8, 16)"),
     ({"blk.0.attn_q.weight": (2, 8, 8)}, "has shape (2, 8, 8)")])
def test_tensors_that_cannot_be(tensors, said, tmp_path, capsys):
    assert said in refused(capsys, read, with_metadata(tmp_path / "m", {}, tensors))


def test_impossible_llama2c_headers(files, tmp_path, capsys):
    data, path = files["v2"].read_bytes(), tmp_path / "m"
    most = 2 ** 31 - 1
    for at, value, said in [
        (4, 3, "version 3"), (8, 0, "dim is 0"), (8, -64, "dim is -64"), (12, most, "damaged"),
        (16, most, "damaged"), (20, 5, "not an even head width"), (28, most, "damaged"),
        (32, most, "a context of"), (37, 0, "groups of 0 do not fill"), (37, -1, "groups of -1"),
        (37, 7, "groups of 7 do not fill")]:
        path.write_bytes(data[:at] + struct.pack("<i", value) + data[at + 4:])
        assert said in refused(capsys, read, path)


def test_what_is_not_known_to_be_an_export_is_never_replaced(tmp_path, vocabulary, monkeypatch,
                                                             capsys):
    """
    In an existing folder, export keeps files of another origin that have our names, and replaces
    its own earlier exports.
    """
    run, mine = save_run(tmp_path / "run", build(), vocabulary), tmp_path / "mine"
    mine.mkdir()
    for name in "model.gguf", "config.json", "tokenizer.bin", "m.bin":
        (mine / name).write_text(f"my {name}")
    gguf_file = mine / "ours.gguf"
    command(monkeypatch, run, path=gguf_file)
    # A file of another program with our checksums
    changed = gguf_file.read_bytes().replace(b"blk.0.attn_norm", b"blk.0.attn_morn")
    (mine / "other.gguf").write_bytes(changed)
    before = {path.name: path.read_bytes() for path in mine.iterdir()}
    for knobs in (dict(path=mine / "model.gguf"), dict(path=mine / "other.gguf"),
                  dict(path=mine, format="hf"), dict(path=mine / "m.bin", format="v1"),
                  dict(path=mine / "new.bin", format="v2")):
        assert "not known to be an export; move it" in refused(
            capsys, command, monkeypatch, run, **knobs)
    assert {path.name: path.read_bytes() for path in mine.iterdir()} == before
    command(monkeypatch, run, path=tmp_path / "hf", format="hf")
    for knobs in (dict(path=gguf_file, dtype="q8_0"), dict(path=tmp_path / "hf", format="hf"),
                  *[{}, dict(format="v2"), dict(format="hf")] * 2):
        command(monkeypatch, run, **knobs)
    (tmp_path / "hf/model.gguf").write_text("mine")
    assert "hf/model.gguf: exists" in refused(capsys, command, monkeypatch, tmp_path / "hf")


def test_a_runs_folder_too_may_hold_files_of_others(tmp_path, vocabulary, monkeypatch, capsys):
    run = save_run(tmp_path / "run", build(), vocabulary)
    (run / "hf").mkdir()
    for name in "model.gguf", "model.bin", "tokenizer.bin", "hf/config.json":
        (run / name).write_text(f"my {name}")
        for format in {".gguf": ("gguf",), ".bin": ("v0", "v1", "v2"),
                       ".json": ("hf",)}[(run / name).suffix]:
            assert f"{name}: exists" in refused(capsys, command, monkeypatch, run, format=format)
        assert (run / name).read_text() == f"my {name}"
        (run / name).unlink()
    for _ in range(2):
        for version in "v0", "v1", "v2":
            command(monkeypatch, run, format=version)
    # beside the same tokenizer.bin
    command(monkeypatch, run, format="v2", path=tmp_path / "run/b.bin")
    larger = save_run(tmp_path / "larger", build(dim=120), vocabulary)
    assert "model.bin: exists" in refused(
        capsys, command, monkeypatch, larger, format="v1", path=run / "model.bin")
