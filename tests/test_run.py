"""The C program: logits, sampled text, chat and printing.

Logits of every file format are compared with those of transformers' Llama, and sampled texts with
those of llama2.c. The tests write their own models, byte by byte.
"""
import json
import math
import os
import platform
import random
import re
import shlex
import struct
import subprocess
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from tests.conftest import KERNELS, LIBRARY, compile_c

MAGIC = 0x616b3432
LAYER = ["attention_norm", "wq", "wk", "wv", "wo", "ffn_norm", "w1", "w2", "w3"]
GGUF = {
    "tok": "token_embd", "norm": "output_norm", "output": "output",
    "attention_norm": "blk.N.attn_norm", "wq": "blk.N.attn_q", "wk": "blk.N.attn_k",
    "wv": "blk.N.attn_v", "wo": "blk.N.attn_output", "ffn_norm": "blk.N.ffn_norm",
    "w1": "blk.N.ffn_gate", "w2": "blk.N.ffn_down", "w3": "blk.N.ffn_up"
}
TYPES = {"f16": gguf.GGMLQuantizationType.F16, "bf16": gguf.GGMLQuantizationType.BF16,
         **{name.lower(): gguf.GGMLQuantizationType[name]
            for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")}}
# Rows whose length is no multiple of 256 get the type that llama-quantize falls back to
SHORTER = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
# Byte offsets of the half-precision numbers in a block
K_HALVES = {"q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}


def round_to_8_bits(x):
    """Round each 32 numbers to multiples of their largest magnitude / 127."""
    blocks = x.reshape(-1, 32)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    return ((blocks / scale).round() * scale).reshape(x.shape)


def random_k(x, dtype, rng):
    """Return random blocks of a K type for (rows, cols) numbers of about x's magnitude.

    All bits are random, except for the half-precision scales of the values and of the minima.
    """
    kind = TYPES[dtype]
    width, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (x.size // width, size), dtype=np.uint8)
    unit = np.float32(x.std() / {"q4_k": 160, "q5_k": 320, "q6_k": 1400}[dtype])
    for at in K_HALVES[dtype]:
        blocks[:, at:at + 2] = (unit * rng.uniform(0.5, 1, (len(blocks), 1))
                                * (8 if at else 1)).astype("<f2").view(np.uint8)
    return blocks.reshape(len(x), -1)


def is_quantised(form):
    """Return whether a format's matrices are multiplied in 8 bits.

    This includes llama2.c's version 2 with groups that are multiples of 32.
    """
    return form[:1] == "q" or form[:3] == "v2:" and int(form[3:]) % 32 == 0


class Model:
    """Random weights and a vocabulary.

    w[name] or w[name, layer]: weights (rows, cols). pieces: special tokens, the 256 bytes, a few
    pairs of letters.
    """
    def __init__(self, dim=64, hidden=176, layers=2, heads=4, kv=4, vocab=300, seq=128, tied=True,
                 seed=0, theta=10000.0, scaling=1.0):
        self.dim, self.hidden, self.layers, self.heads, self.kv = dim, hidden, layers, heads, kv
        self.vocab, self.seq, self.tied, self.theta, self.scaling = vocab, seq, tied, theta, scaling
        rng = np.random.default_rng(seed)
        kv_dim = dim // heads * kv
        shape = {"wq": (dim, dim), "wk": (kv_dim, dim), "wv": (kv_dim, dim), "wo": (dim, dim),
                 "w1": (hidden, dim), "w2": (dim, hidden), "w3": (hidden, dim),
                 "attention_norm": (dim,), "ffn_norm": (dim,)}

        def weight(*shape):
            return (rng.standard_normal(shape) / math.sqrt(shape[-1]) if len(shape) > 1 else
                    1 + 0.2 * rng.standard_normal(shape)).astype(np.float32)
        self.w = {"tok": 3 * weight(vocab, dim), "norm": weight(dim)}
        self.w |= {(name, i): weight(*shape[name]) for i in range(layers) for name in LAYER}
        if not tied:
            self.w["output"] = 3 * weight(vocab, dim)
        self.pieces = ([(b"<unk>", 2), (b"<s>", 3), (b"</s>", 3)]
                       + [(b"<0x%02X>" % b, 6) for b in range(256)])
        self.pieces[3 + 32] = ("▁".encode(), 1)
        self.pieces = self.pieces[:vocab] + [(b"%c%c" % (65 + i // 26, 97 + i % 26), 1)
                                             for i in range(vocab - 259)]

    def names(self, order):
        """Yield the keys of w in this order of names; a layer's weight appears for every layer."""
        for name in order:
            yield from ([(name, i) for i in range(self.layers)] if name in LAYER
                        else [name] if name in self.w else [])

    def oracle(self, weights=None):
        """Return transformers' Llama with these weights.

        The rows of each head in wq and wk are permuted to Hugging Face's order.
        """
        rope = {"rope_theta": self.theta, "rope_type": "default"}
        if self.scaling != 1:
            rope = {"rope_theta": self.theta, "rope_type": "linear", "factor": self.scaling}
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=self.vocab, hidden_size=self.dim, intermediate_size=self.hidden,
            num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.kv, max_position_embeddings=self.seq, rms_norm_eps=1e-5,
            rope_parameters=rope, tie_word_embeddings=self.tied, attn_implementation="eager"))
        w = {k: torch.tensor(v) for k, v in (weights or self.w).items()}
        state = {"model.embed_tokens.weight": w["tok"], "model.norm.weight": w["norm"],
                 "lm_head.weight": w.get("output", w["tok"])}
        theirs = dict(zip(LAYER, [
            "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
            "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj",
            "mlp.up_proj"]))
        for name, i in ((n, i) for n in LAYER for i in range(self.layers)):
            x = w[name, i]
            if name in ("wq", "wk"):
                half = self.dim // self.heads // 2
                x = x.view(-1, half, 2, self.dim).transpose(1, 2).reshape(x.shape)
            state[f"model.layers.{i}.{theirs[name]}.weight"] = x
        model.load_state_dict(state)
        return model.eval()

    def logits(self, ids, weights=None, form="", isa=""):
        """Return the oracle's logits (tokens, vocabulary), with the rounding of the C program.

        With a quantized form, the inputs of its matrices are rounded to 8 bits and keys and values
        to 16 bits. An instruction set that multiplies in BF16 rounds the inputs of BF16 matrices.
        """
        oracle, attention = self.oracle(weights), modeling_llama.eager_attention_forward
        quantised = is_quantised(form)

        def half_attention(module, q, k, v, *args, **kwargs):
            return attention(module, q, k.half().float(), v.half().float(), *args, **kwargs)
        for module in oracle.modules():
            if quantised and isinstance(module, torch.nn.Linear) and module.in_features % 32 == 0:
                module.register_forward_pre_hook(lambda _, inputs: round_to_8_bits(inputs[0]))
            if form == "bf16" and isa == "avx512bf16" and isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16().float(),))
        half = quantised and self.dim % 32 == 0
        with torch.no_grad(), mock.patch.object(modeling_llama, "eager_attention_forward",
                                                half_attention if half else attention):
            return oracle(torch.tensor([ids])).logits[0].numpy()

    # ---- files; each write returns the weights as the file holds them

    def write_llama2c(self, path, version=1, group=0):
        sizes = [self.dim, self.hidden, self.layers, self.heads, self.kv, self.vocab, self.seq]
        order = ["attention_norm", "ffn_norm", "norm", "tok", "wq", "wk", "wv", "wo", "w1", "w2",
                 "w3", "output"]
        if version == 0:
            order = ["tok", *LAYER, "norm", "tables", "output"]
            sizes[5] *= 1 if self.tied else -1
            out = struct.pack("<7i", *sizes)
        else:
            out = struct.pack("<Ii7iB", MAGIC, version, *sizes, self.tied)
            out = (out + (struct.pack("<i", group) if version == 2 else b"")).ljust(256, b"\0")
        held = {}
        for part in order:
            if part == "tables":
                out += bytes(4 * self.seq * (self.dim // self.heads))
            for key in self.names([part]):
                held[key] = x = self.w[key]
                if version < 2 or x.ndim == 1:
                    out += x.tobytes()
                    continue
                flat = np.pad(x.reshape(-1), (0, -x.size % group)).reshape(-1, group)
                scale = np.abs(flat).max(axis=1, keepdims=True) / np.float32(127)
                q = np.round(flat / np.where(scale, scale, 1)).astype(np.int8)
                held[key] = (q * scale).reshape(-1)[:x.size].reshape(x.shape)
                out += q.reshape(-1)[:x.size].tobytes() + scale.astype(np.float32).tobytes()
        path.write_bytes(out)
        return held

    def write_tokenizer(self, path):
        pieces = [p.replace("▁".encode(), b" ") for p, _ in self.pieces]
        pieces[1:3] = [b"\n<s>\n", b"\n</s>\n"]
        path.write_bytes(struct.pack("<I", max(map(len, pieces)))
                         + b"".join(struct.pack("<fI", 0, len(p)) + p for p in pieces))

    def type_of(self, key, x, dtype):
        """Return the type of a weight in a file of type `dtype`.

        "q4_k_m" stores some matrices in Q6_K, and an untied embedding in Q5_0.
        """
        if x.ndim < 2 or (dtype[0] == "q" and x.shape[1] % 32):
            return "f32"
        if dtype == "q4_k_m":
            dtype = ("q5_0" if key == "tok" and not self.tied
                     else "q6_k" if key[0] in ("wv", "w2") or key in ("tok", "output")
                     else "q4_k")
        return SHORTER[dtype] if dtype in SHORTER and x.shape[1] % 256 else dtype

    def write_gguf(self, path, dtype="f32", template=None, tokenizer="llama", **metadata):
        w = gguf.GGUFWriter(path, "llama")
        w.add_context_length(self.seq)
        w.add_embedding_length(self.dim)
        w.add_block_count(self.layers)
        w.add_feed_forward_length(self.hidden)
        w.add_head_count(self.heads)
        w.add_head_count_kv(self.kv)
        w.add_layer_norm_rms_eps(1e-5)
        w.add_rope_dimension_count(self.dim // self.heads)
        w.add_rope_freq_base(self.theta)
        if self.scaling != 1:
            w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            w.add_rope_scaling_factor(self.scaling)
        w.add_tokenizer_model(tokenizer)
        w.add_token_list([p for p, _ in self.pieces])
        w.add_token_scores([0.0] * self.vocab)
        w.add_token_types([t for _, t in self.pieces])
        w.add_add_space_prefix(False)
        if template:
            w.add_chat_template(template)
        for key, value in metadata.items():
            w.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
        held, rng = {}, np.random.default_rng(self.dim)
        for key in self.names(["tok", *LAYER, "norm", "output"]):
            name, layer = key if isinstance(key, tuple) else (key, 0)
            held[key] = x = self.w[key]
            name = GGUF[name].replace("N", str(layer)) + ".weight"
            kind = self.type_of(key, x, dtype)
            if kind != "f32":
                data = (random_k(x, kind, rng) if kind in K_HALVES
                        else gguf.quants.quantize(x, TYPES[kind]))
                held[key] = gguf.quants.dequantize(
                    data, TYPES[kind]).astype(np.float32).reshape(x.shape)
                w.add_tensor(name, data, raw_dtype=TYPES[kind])
            else:
                w.add_tensor(name, x)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        return held

    def write(self, folder, form):
        """Write the model as v0:, v1:, v2:<group size> or a GGUF type.

        Return (arguments for run, weights as stored in the file).
        """
        if form[0] == "v":
            held = self.write_llama2c(folder / "m.bin", int(form[1]), int(form[3:] or 0))
            self.write_tokenizer(folder / "t.bin")
            return [folder / "m.bin", "-z", folder / "t.bin"], held
        return [folder / "m.gguf"], self.write_gguf(folder / "m.gguf", form)


def two_models(folder):
    """Write two models that differ in weights, heads and format; return their paths."""
    Model(heads=8, kv=2, tied=False).write_gguf(folder / "one.gguf")
    Model(seed=5).write_gguf(folder / "other.gguf", "q8_0")
    return folder / "one.gguf", folder / "other.gguf"


def instruction_sets():
    """Return the names of the instruction sets that this machine supports."""
    flags = Path("/proc/cpuinfo").read_text().split()
    avx2, avx512bw = {"avx2", "fma"}, {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    avx512 = avx512bw | {"avx512_vnni"}
    known = {
        "avx2": avx2, "avxvnni": avx2 | {"avx_vnni"}, "avx512bw": avx512bw, "avx512": avx512,
        "avx512bf16": avx512 | {"avx512_bf16"}, "neon": {"asimd"}, "neondot": {"asimd", "asimddp"},
        "neoni8mm": {"asimd", "asimddp", "i8mm"}
    }
    return ["scalar"] + [isa for isa, needed in known.items() if needed <= set(flags)]


ISAS = instruction_sets()


def run(binary, *args, stdin=b"", status=0, isa=os.environ.get("LLAMAC_ISA", "")):
    """Run the program and return its output, or its error message if `status` is not 0.

    It must exit on its own, and print one line if it fails.
    """
    # leaks count only if it succeeds: an error exit leaves its memory to the system
    p = subprocess.run(
        [binary, *(a if isinstance(a, bytes) else str(a) for a in args)], input=stdin,
        capture_output=True, timeout=60,
        env=dict(os.environ, LLAMAC_ISA=isa, ASAN_OPTIONS=f"detect_leaks={status == 0:d}"))
    assert p.returncode == status, (args, p.returncode, p.stderr.decode(errors="replace"))
    if status:
        message = p.stderr.decode()
        assert message.startswith("run: ") and message.count("\n") == 1, message
        assert message.endswith("\n"), message
        return message
    return p.stdout


def logits(binary, args, text, vocab, isa=""):
    out = run(binary, *args, "--logits", "-i", text, isa=isa)
    return np.frombuffer(out, np.float32).reshape(-1, vocab)


def ids_of(text, dummy_prefix=False):
    """Return the token ids of a text in Model's vocabulary: BOS, then one token per byte.

    dummy_prefix: put a space in front, as llama2.c's formats do.
    """
    return [1] + [3 + b for b in (" " * dummy_prefix + text).encode()]


def assert_close(ours, expected, form):
    """Compare logits (tokens, vocabulary) of a model file of this form with transformers'."""
    assert ours.shape == expected.shape
    error = np.abs(ours - expected).max(axis=1) / np.abs(expected).max()
    # rounded activations: a difference in the last bit can flip a rounding, which then changes
    # every later activation
    if is_quantised(form) or form == "bf16":
        assert error.min() <= 1e-5 and error.max() <= 4e-2
    else:
        assert error.max() <= 1e-4


# ---- the transformer

SHAPES = {
    "MHA": dict(),
    "GQA, untied": dict(heads=8, kv=2, tied=False, theta=50000.0, scaling=4.0),
    "one KV head, hidden 1376": dict(dim=128, hidden=1376, heads=4, kv=1, layers=1),
    "hidden 100": dict(dim=32, hidden=100, heads=2, kv=2, layers=3, tied=False),
    "odd hidden, width 36": dict(dim=36, hidden=77, heads=6, kv=3),
}
WIDE = {"blocks of 256": dict(dim=256, hidden=512, heads=4, kv=2, layers=1, tied=False),
        "blocks of 256 and 32": dict(dim=256, hidden=160, heads=4, kv=1, layers=1)}
K_FORMS = ["q4_k", "q5_k", "q6_k", "q4_k_m"]
FORMS = ["v0:", "v1:", "v2:64", "v2:32", "v2:24", "v2:7", "f32", "f16", "bf16", "q8_0", "q4_0"]
NO_TEXT = ("no text was generated: the prompt has {} tokens, and -n {} includes them; "
           "use a larger -n\n")
TEXT = ("The quick brown fox — jumps über den Zaun, 100 times, "
        "and then it does so again and again.")  # over 64 tokens


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(run_bin, tmp_path, shape, form):
    options = dict(SHAPES[shape])
    if form[0] == "v":  # llama2.c's formats store neither of the two
        options |= dict(theta=10000.0, scaling=1.0)
    model = Model(**options)
    args, held = model.write(tmp_path, form)
    for isa in ISAS:
        expected = model.logits(ids_of(TEXT, form[0] == "v"), held, form, isa)
        assert_close(logits(run_bin, args, TEXT, model.vocab, isa), expected, form)


@pytest.mark.parametrize("form", ["q4_1", "q5_0", "q5_1", *K_FORMS])
@pytest.mark.parametrize("shape", WIDE)
def test_logits_of_all_types_of_blocks_equal_transformers(run_bin, tmp_path, shape, form):
    model = Model(**WIDE[shape])
    args, held = model.write(tmp_path, form)
    expected = model.logits(ids_of(TEXT), held, form)
    for isa in ISAS:
        assert_close(logits(run_bin, args, TEXT, model.vocab, isa), expected, form)
        assert len({run(run_bin, *args, "-t", 0, "-n", 40, *flags, isa=isa)
                    for flags in ([], ["--no-copy"], ["-j", 1])}) == 1


def test_an_instruction_set_that_is_not_there(run_bin, tmp_path):
    Model().write_gguf(tmp_path / "m.gguf")
    for isa in ("neon" if platform.machine() == "x86_64" else "avx2", "fast"):
        assert "LLAMAC_ISA" in run(run_bin, tmp_path / "m.gguf", status=1, isa=isa)


def test_greedy_text_equals_transformers(run_bin, tmp_path):
    """A prompt in one batch and one cached token at a time match transformers without a cache."""
    model = Model(heads=8, kv=2, tied=False, seed=3)
    model.write_gguf(tmp_path / "m.gguf")
    oracle, ids = model.oracle(), ids_of("Hello there")
    with torch.no_grad():
        while len(ids) < 100:
            ids.append(int(oracle(torch.tensor([ids])).logits[0, -1, 3:].argmax()) + 3)
    shown = b"".join(bytes([i - 3]) if i < 259 else model.pieces[i][0] for i in ids[1:])
    model.w["output"][:3] = 0  # <unk>, BOS and EOS are never sampled, as in the loop above
    model.write_gguf(tmp_path / "m.gguf")
    assert run(run_bin, tmp_path / "m.gguf", "-t", 0, "-n", 99, "-i", "Hello there",
               "--raw") == shown + b"\n"


def test_no_more_threads_than_processors(run_bin, tmp_path):
    Model().write_gguf(tmp_path / "m.gguf")
    first = f"{min(os.sched_getaffinity(0))}"
    shown = subprocess.run(["taskset", "-c", first, run_bin, tmp_path / "m.gguf",
                            "--bench", "--json", "-n", "1"], capture_output=True, check=True).stdout
    assert json.loads(shown)["threads"] == 1


def test_a_thread_for_each_core_that_may_be_used(tmp_path):
    """The default is one thread for each physical core that the process may use.

    Processors that share a core count once, however they are numbered. A container's CPU quota
    and 64 threads are upper limits.
    """
    others = [source for source in LIBRARY if source != "runtime/os.c"]
    # reuses run's object files
    program = compile_c(tmp_path / "threads", "-O3", "tests/threads.c", *others)
    far, near = " ".join(["0,4", "1,5", "2,6", "3,7"] * 2), "0-1 0-1 2-3 2-3 4-5 4-5 6-7 6-7"
    wide = " ".join(f"{n},{n + 96}" for n in range(96))
    for cores, allowed, active, quota, expected in (
            (far, range(8), 1, "", 4), (far, range(4), 1, "", 4), (far, (0, 4), 1, "", 1),
            (far, (1, 2, 5), 1, "", 2), (far, (7,), 1, "", 1), (near, range(8), 1, "", 4),
            (near, (0, 2, 4, 6), 1, "", 4), (near, (2, 3), 1, "", 1), (near, (3, 4), 1, "", 2),
            ("0-3,8 0-3,8 0-3,8 0-3,8 4", (1, 3, 4), 1, "", 2), (near, range(8), 0, "", 8),
            (near, range(8), "", "", 8), ("", range(3), 1, "", 3),
            (far, range(8), 1, "250000 100000", 2), (far, range(8), 1, "50000 100000", 1),
            (far, range(8), 1, "max 100000", 4), (wide, range(96), 1, "", 64)):
        told = subprocess.run([program, cores, " ".join(map(str, allowed)), f"{active}", quota],
                              capture_output=True, check=True).stdout
        assert int(told) == expected, (cores, allowed, active, quota)


def test_results_do_not_depend_on_threads(run_bin, tmp_path):
    model = Model(dim=128, hidden=1376, heads=4, kv=2)
    for form in ("f32", "bf16", "q8_0"):
        args, _ = model.write(tmp_path, form)
        for isa in ISAS:
            for what in (["--logits"], ["-t", 0, "-n", 0]):
                one = run(run_bin, *args, *what, "-i", TEXT, "-j", 1, isa=isa)
                assert all(run(run_bin, *args, *what, "-i", TEXT, "-j", j, isa=isa) == one
                           for j in (2, 3, 8))


@pytest.mark.parametrize("form", ["v1:", "f32"])
def test_perplexity(run_bin, tmp_path, form):
    """Text is split into windows of the context length, 40 tokens.

    TEXT has about 100 tokens: two whole windows and a partial one.
    """
    model = Model(seq=40, tied=False)
    args, _ = model.write(tmp_path, form)
    for text in (TEXT, "x", TEXT[:39], TEXT[:40]):
        (tmp_path / "text").write_bytes(text.encode())
        ids, nll = ids_of(text, form[0] == "v"), 0
        for at in range(0, len(ids) - 1, 40):
            x, y = ids[at:at + 40], ids[at + 1:at + 41]
            p = torch.tensor(model.logits(x[:len(y)])).double().log_softmax(-1)
            nll -= sum(float(p[t, i]) for t, i in enumerate(y))
        out = run(run_bin, *args, "--perplexity", tmp_path / "text").decode()
        assert out.startswith("perplexity ") and out.count("\n") == 1
        assert float(out.split()[1]) == pytest.approx(math.exp(nll / (len(ids) - 1)), rel=2e-5)
        assert f"{nll / math.log(2) / len(text.encode()):.4f}"[:-1] in out
    (tmp_path / "text").write_bytes(b"")
    if form == "f32":
        assert "no tokens" in run(run_bin, *args, "--perplexity", tmp_path / "text", status=1)


@pytest.mark.parametrize("form", ["f32", "q8_0", "v0:", "v2:64"])
def test_bench(run_bin, tmp_path, form):
    """The JSON fields are consistent, also with -n, -c and -b, and the table has every line.

    bytes_per_token counts every matrix, but only one row of the embedding.
    """
    model = Model(hidden=192, tied=False)
    args, held = model.write(tmp_path, form)
    found = json.loads(run(run_bin, args[0], "--bench", "--json", "-j", 2))
    numbers = {key: w.size for key, w in held.items() if key != "tok"}
    norms = sum(n for key, n in numbers.items() if "norm" in str(key))
    per_number = {"f32": 4, "q8_0": 34 / 32, "v0:": 4, "v2:64": 1 + 4 / 64}[form]
    assert found["bytes_per_token"] == 4 * norms + per_number * (sum(numbers.values()) - norms)
    assert found["threads"] == 2
    assert found["texts"] == 1
    assert found["prompt_tokens"] == found["decode_tokens"] == 128
    assert found["decode_gb_per_s"] == pytest.approx(
        found["decode_tokens_per_s"] * found["bytes_per_token"] / 1e9, abs=0.01)
    assert all(value > 0 for value in found.values())
    assert json.loads(run(run_bin, args[0], "--bench", "--json", "-j", 1, "-n", 1))["threads"] == 1
    small = json.loads(run(run_bin, args[0], "--bench", "--json", "-j", 1, "-c", 8))
    assert small["prompt_tokens"] == small["decode_tokens"] == 8
    table = run(run_bin, args[0], "--bench").decode().splitlines()
    assert len(table) == 10 and re.fullmatch(r"prompt of  128 tokens +[0-9.]+ tokens/s", table[3])
    many = json.loads(run(run_bin, args[0], "--bench", "--json", "-j", 1, "-n", 20, "-b", 5))
    assert many["texts"] == 5 and many["prompt_tokens"] == 128 and many["decode_tokens"] == 20
    # the speed sums over all texts: each call reads the weights once for five tokens
    assert many["decode_gb_per_s"] == pytest.approx(
        many["decode_tokens_per_s"] / 5 * many["bytes_per_token"] / 1e9, abs=0.01)
    assert "--bench" in run(run_bin, args[0], "--json", status=1)


# ---- a model that recites a given sequence

def reciter(folder, sequence, **options):
    """Write a model that generates a sequence of pieces (bytes, type); return its path.

    The layers add nothing. Each embedding is a unit vector, and the classifier maps it to the next
    piece. If the sequence contains byte tokens, the other bytes follow it, because a vocabulary
    has either all byte tokens or none.
    """
    end = 3 + len(sequence)
    pieces = [(b"<unk>", 2), (b"<s>", 3), (b"</s>", 3)] + sequence
    pieces += [byte(b) for b in range(256 * any(kind == 6 for _, kind in sequence))
               if byte(b) not in sequence]
    n = len(pieces) + len(pieces) % 2
    model = Model(dim=n, hidden=2, layers=1, heads=1, kv=1, vocab=len(pieces),
                  seq=options.pop("seq", 64), tied=False)
    for key in model.w:  # a file may have zeros only in matrices that write to the residual stream
        name = key[0] if isinstance(key, tuple) else key
        model.w[key] = np.full_like(model.w[key],
                                    0.0 if name in ("tok", "output", "wo", "w2") else 1.0)
    for i in range(len(pieces)):
        model.w["tok"][i, i] = 1
        follower = 3 if i == 1 else i + 1 if 2 < i < end - 1 else 2
        model.w["output"][follower, i] = 9
    model.pieces = pieces
    model.write_gguf(folder / "m.gguf", **options)
    return folder / "m.gguf"


def spoken(binary, folder, *pieces, flags=(), **options):
    path = reciter(folder, [p if isinstance(p, tuple) else (p, 1) for p in pieces], **options)
    return run(binary, path, "-t", 0, "-n", 0, *flags)


def byte(b):
    return (b"<0x%02X>" % b, 6)


def test_characters_made_of_byte_tokens(run_bin, tmp_path):
    letters = [byte(b) for b in "é日😀".encode()]
    assert spoken(run_bin, tmp_path, b"a", *letters, b"b") == "aé日😀b\n".encode()


def test_bytes_that_are_no_utf8_become_replacement_characters(run_bin, tmp_path):
    for bad, good in (([0xff], "�"), ([0xc3], "�"), ([0xe6, 0x97], "��"), ([0x80, 0xbf], "��"),
                      ([0xed, 0xa0, 0x80], "���"), ([0xc0, 0x80], "��"),
                      ([0xf0, 0x9f, 0x98], "���"), ([0xf4, 0x90, 0x80, 0x81], "����")):
        assert spoken(run_bin, tmp_path, b"a", *map(byte, bad), b"b") == f"a{good}b\n".encode()
        assert spoken(run_bin, tmp_path, b"a", *map(byte, bad)) == f"a{good}\n".encode()


def test_control_characters_are_not_printed_unless_raw(run_bin, tmp_path):
    pieces = [b"a\x1b[2Jb", b"\x07", b"\r\n\tc", byte(0x1b), byte(0), byte(0x7f),
              "\u009b\u0085é".encode(), byte(10)]
    assert spoken(run_bin, tmp_path, *pieces) == "a[2Jb\n\tcé\n\n".encode()
    raw = spoken(run_bin, tmp_path, *pieces, flags=["--raw"])
    assert raw == b"a\x1b[2Jb\x07\r\n\tc\x1b\x00\x7f" + "\u009b\u0085é\n\n".encode()


def test_spaces(run_bin, tmp_path):
    pieces = ["▁▁Once▁upon".encode(), "▁a▁".encode(), "▁".encode()]
    assert spoken(run_bin, tmp_path, *pieces) == b"  Once upon a  \n"
    assert spoken(run_bin, tmp_path, *pieces,
                  **{"tokenizer.ggml.remove_extra_whitespaces": True}) == b" Once upon a  \n"


def test_the_largest_random_number_takes_the_last_token(run_bin, tmp_path):
    """A draw above the float32 sum of the probabilities selects the last token.

    300 equally likely tokens sum to less than 1 in float32, and this seed draws a number above it.
    """
    model = Model(tied=False)
    model.w["output"][:] = 0
    model.write_gguf(tmp_path / "m.gguf")
    assert (run(run_bin, tmp_path / "m.gguf", "-p", 1, "-s", 1574392, "-n", 1)
            == model.pieces[-1][0] + b"\n")


def test_text_ends_at_eos_bos_or_the_asked_length(run_bin, tmp_path):
    letters = [b"%c" % c for c in range(97, 123)]
    assert spoken(run_bin, tmp_path, *letters) == b"abcdefghijklmnopqrstuvwxyz\n"
    for n, text in ((1, b"a"), (5, b"abcde"), (26, b"".join(letters)), (10**9, b"".join(letters))):
        assert run(run_bin, tmp_path / "m.gguf", "-t", 0, "-n", n) == text + b"\n"
    assert run(run_bin, tmp_path / "m.gguf", "-t", 0, "-n", 6, "-i", "xy") == b"xyz\n"
    assert run(run_bin, tmp_path / "m.gguf", "-t", 0, "-n", 4, "-i", "cd") == b"cdef\n"
    # the same result as llama2.c's
    assert run(run_bin, tmp_path / "m.gguf", "-t", 0, "-n", 3, "-i", "abcdef") == b"abc\n"
    assert (run(run_bin, tmp_path / "m.gguf", "-t", 0, "-n", 0, "-i", "")
            == b"".join(letters) + b"\n")
    assert spoken(run_bin, tmp_path, *letters, **{"tokenizer.ggml.eot_token_id": 7}) == b"abcd\n"
    reciter(tmp_path, [(c, 1) for c in letters], seq=5)  # -n 0 means the context length
    assert run(run_bin, tmp_path / "m.gguf", "-t", 0, "-n", 0) == b"abcde\n"


def test_the_asked_length_of_models_whose_texts_begin_with_nothing(run_bin, tmp_path):
    """-n does not count BOS, and counts nothing in its place in a model without BOS."""
    path = reciter(tmp_path, [(b"%c" % c, 1) for c in range(97, 123)],
                   **{"tokenizer.ggml.add_bos_token": False})
    for n, prompt, text in ((4, "cd", b"cdef"), (5, "", b"abcde"), (3, "cd", b"cde"),
                            (2, "cd", b"cd"), (1, "cd", b"c"), (1, "c", b"c"),
                            (0, "cd", b"cdefghijklmnopqrstuvwxyz"), (2**31 - 1, "y", b"yz"),
                            (3, "abcdef", b"abc")):
        assert run(run_bin, path, "-t", 0, "-n", n, "-i", prompt) == text + b"\n", (n, prompt)
    p = subprocess.run([run_bin, path, "-n", "2", "-i", "cd"], capture_output=True, text=True)
    assert p.stderr == NO_TEXT.format(2, 2)
    path = reciter(tmp_path, [(b"%c" % c, 1) for c in range(97, 123)], seq=5,
                   **{"tokenizer.ggml.add_bos_token": False})
    assert run(run_bin, path, "-t", 0, "-n", 0, "-i", "cd") == b"cdefg\n"


@pytest.mark.parametrize("seq", [1, 2, 3, 4, 5, 24])
def test_the_window_slides_over_what_is_longer_than_the_context(run_bin, tmp_path, seq):
    """Greedy text from short and overlong prompts equals transformers', run on the sliding window.

    For each token, transformers sees the tokens that the window must contain.
    """
    model = Model(seq=seq, heads=8, kv=2, tied=False, seed=3)
    model.w["output"][:3] = 0  # <unk>, BOS and EOS are never sampled
    model.write_gguf(tmp_path / "m.gguf")
    oracle, half = model.oracle(), seq // 2 if seq > 3 else 1
    for prompt in ("ab", "Hello there, this is longer"):
        text = ids_of(prompt)
        seen = text
        while len(text) < 61:
            if len(seen) > seq:
                seen = text[:half > 1] + text[-max(1, half - 1):]
            with torch.no_grad():
                new = int(oracle(torch.tensor([seen])).logits[0, -1].argmax())
            text, seen = text + [new], seen + [new]
        shown = b"".join(bytes([i - 3]) if i < 259 else model.pieces[i][0] for i in text[1:])
        p = subprocess.run(
            [run_bin, tmp_path / "m.gguf", "-t", "0", "-n", "60", "-i", prompt, "--raw"],
            capture_output=True)
        assert (p.returncode, p.stdout) == (0, shown + b"\n")
        notice = f"the context of {seq} tokens is full: the oldest tokens are dropped\n"
        assert p.stderr.decode().count(notice) == 1
        terminal = subprocess.run(p.args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
        # the notice follows the text instead of interrupting it
        assert terminal.startswith(shown + b"\n" + notice.encode())
        evaluated = len(ids_of(prompt)) if len(ids_of(prompt)) <= seq else half
        assert f"\nprompt: {evaluated} tokens evaluated, tok/s: " in p.stderr.decode()


def test_a_smaller_context(run_bin, tmp_path):
    """-c N has the same results as the model with a context of N."""
    for seq in (20, 64):
        Model(seq=seq, seed=3).write_gguf(tmp_path / f"{seq}.gguf")
    (tmp_path / "text").write_bytes(TEXT.encode())
    for flags in (["-n", 15, "-i", "Hi"], ["-n", 60, "-i", "Hi"],
                  ["--perplexity", tmp_path / "text"]):
        expected = run(run_bin, tmp_path / "20.gguf", "-t", 0, *flags)
        assert run(run_bin, tmp_path / "64.gguf", "-t", 0, *flags, "-c", 20) == expected
    assert "context is 64" in run(run_bin, tmp_path / "64.gguf", "-c", 65, status=1)


def test_a_prompt_longer_than_the_asked_length_says_so(run_bin, tmp_path):
    Model().write_gguf(tmp_path / "m.gguf")
    p = subprocess.run([run_bin, tmp_path / "m.gguf", "-n", "3", "-i", "abcdef"],
                       capture_output=True, text=True)
    assert p.stdout == "abc\n"
    assert p.stderr == NO_TEXT.format(6, 3)
    # neither count includes BOS
    p = subprocess.run([run_bin, tmp_path / "m.gguf", "-n", "6", "-i", "abcdef"],
                       capture_output=True, text=True)
    assert p.stdout == "abcdef\n"
    assert p.stderr == NO_TEXT.format(6, 6)


def test_not_finite_logits_are_an_error(run_bin, tmp_path):
    for value, form in ((np.nan, "f32"), (np.inf, "f32"), (np.nan, "q8_0"), (np.inf, "q8_0")):
        model = Model(layers=1, hidden=192)  # a multiple of 32, so that w2 is quantized too
        model.w["w1", 0][5, 5] = value
        with np.errstate(all="ignore"):
            model.write_gguf(tmp_path / "m.gguf", form)
        for isa in ISAS:
            assert "not finite" in run(run_bin, tmp_path / "m.gguf", "-i", "a", status=1, isa=isa)


# ---- the sampler

# What llama2.c's run (commit 350e04f, gcc 12 -O3) prints for `small_model` with these flags.
LLAMA2C_TEXTS = {
    "-s 1 -t 1.0 -p 0.9 -n 64": "fwbdvwnaspak<unk>nakwwdmvhqvot<unk> tx\n</s>\nat\n",
    "-s 2 -t 0.5 -p 0.95 -n 64 -i hello":
        "hellopxpowunvhicvhkst<unk>twdpzulv ooahhwkjmicvhsvhkshwpayqkgyplvxwkjmhortqypkgyprykjwu\n"
        "</s>\nwupohokqvlvmwapa\n",
    "-s 3 -t 1.5 -p 1.0 -n 64":
        "ic<unk>kg tvhwaolhoqlvyimhcawuzwuibxryepzd\n</s>\n"
        "lqksyipwuhw tylqicaswdicmksvpzyvhrwkglqbatmhcatxpzf\n",
    "-s 4 -t 0.8 -p 0.3 -n 40 -i 'once upon'": "once uponlq\n</s>\notzotzifaspoyplyp\n",
    "-s 99 -t 1.0 -p 0.0 -n 64":
        "ipzlqlzuot hoasegry<unk>cslzwdnahcskskwpahlziaifhcahlzfwdwqycpzbaskg "
        "tpwuzhwpapzoornayiwuvathonhwpatvhw\n</s>\nhwu\n",
    "-s 12345678 -t 2.0 -p 0.5 -n 0": "<unk>j<unk>lvatry yplvu\n",
    "-s 7 -t 0.0 -p 0.9 -n 30 -i x": "xvhwpahwpahwpahwpahwpahwpahwpahwpahwpahwpahwpahwpahwpahw\n",
    "-s 8 -t 1.0 -p 0.9 -n 3 -i abcdef": "ab\n",
}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A model in llama2.c's v0 format, identical on every machine, over letters and their pairs."""
    folder = tmp_path_factory.mktemp("small")
    model, rng = Model(dim=16, hidden=24, layers=1, heads=2, kv=1, vocab=64,
                       seq=64), random.Random(5)
    for key, x in model.w.items():
        # random() is the one sequence that Python keeps the same in all versions
        values = [rng.random() - 0.5 for _ in range(x.size)]
        model.w[key] = (np.array(values, np.float32) * (2 if key == "tok" else 1)).reshape(x.shape)
    letters = [b" "] + [b"%c" % c for c in range(97, 123)]
    pairs = [letters[rng.randrange(27)] + letters[rng.randrange(1, 27)] for _ in range(34)]
    model.pieces = [(b"<unk>", 2), (b"<s>", 3), (b"</s>", 3)] + [(p, 1) for p in letters + pairs]
    return model.write(folder, "v0:")[0]


@pytest.mark.parametrize("flags", LLAMA2C_TEXTS)
def test_same_text_as_llama2c(run_bin, small_model, flags):
    text, *_ = LLAMA2C_TEXTS[flags].split("\n</s>\n")  # run stops at EOS, llama2.c continues
    assert (run(run_bin, *small_model, *shlex.split(flags)).decode().rstrip("\n")
            == text.rstrip("\n"))


# ---- threads

@pytest.mark.parametrize("threads", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 8))])
def test_the_thread_pool_does_every_item_once(tmp_path, threads):
    """Steps are so short that workers still read the last one while the next is prepared."""
    program = compile_c(tmp_path / "thread_pool", "-O3", "tests/thread_pool.c", *KERNELS)
    done = subprocess.run([program, str(threads), "200000"], capture_output=True, text=True,
                          timeout=120)
    assert (done.returncode, done.stdout) == (0, "every item once\n")
