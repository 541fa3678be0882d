"""
Write seeds for the fuzz targets, made by the project's own export from tiny models.

    python tests/fuzz/seeds.py FOLDER        FOLDER/<target>/<seed>
"""
import struct
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import gguf
import numpy as np
import torch

from engine.formats.gguf_tokenizer import tokenizer_of_pieces
from export import export_model
from model import ModelArgs, Transformer
from tokenizer import PRE_TOKENIZERS, BosEos, byte_level

SPACE = "▁"
TARGETS = ["v0", "v1", "v2", "gguf", "gguf_tokenizer", "tokenizer_bin", "encode", "bpe",
           "grammar", "state", "batch"]


def vocabulary(byte_fallback, prefix=True, remove=False):
    """Return a small vocabulary with pieces of every type."""
    pieces = [("<unk>", 0, 2), ("<s>", 0, 3), ("</s>", 0, 3)]
    pieces += [(f"<0x{b:02X}>", 0, 6) for b in (range(256) if byte_fallback else ())]
    pieces += [("<|user|>", 0, 4), ("a  ", 0, 4), (SPACE + "o", -1, 1), ("nc", -2, 5),
               (SPACE + "on", -3, 1), ("once", -4, 1), (SPACE, -5, 1), ("o", -6, 1), ("n", -7, 1),
               ("c", -8, 1), ("e", -9, 1), ("é", -10, 1)]
    return tokenizer_of_pieces([(p.encode(), float(s), t) for p, s, t in pieces], (0, 1, 2),
                               prefix, remove, "seed")


def byte_level_vocabulary(pre):
    """Return a small vocabulary of byte-level BPE, with tokens of every type."""
    pieces = [(b"<s>", 3), (b"</s>", 3), *((bytes([b]), 1) for b in b"onceab\n '\xc3\xa9"),
              (b"on", 1), (b"ce", 1), (b"once", 1), (b" once", 1), (b"<|user|>", 4), (b"a  ", 4),
              (b"[PAD]", 5)]
    return byte_level([(piece, 0.0, kind) for piece, kind in pieces],
                      ["o n", "c e", "on ce", "Ġ once"], pre, BosEos(0, 1, True), "seed")


def model(vocab_size, tied, dim=8, **sizes):
    torch.manual_seed(0)
    args = ModelArgs(dim=dim, n_layers=sizes.pop("n_layers", 1), n_heads=2,
                     n_kv_heads=sizes.pop("n_kv_heads", 1), vocab_size=vocab_size,
                     hidden_dim=sizes.pop("hidden_dim", dim), max_seq_len=4, tied=tied, **sizes)
    return Transformer(args).state_dict(), args


def write_architecture(path, architecture, extra):
    """
    Write the smallest GGUF model of an architecture: heads of width 4 where dim / n_heads is 2,
    YaRN, and all tensors filled with ones. extra: {name: shape} of additional tensors.
    """
    w = gguf.GGUFWriter(path, architecture)
    for name, value in (("context_length", 4), ("embedding_length", 4), ("block_count", 1),
                        ("feed_forward_length", 4), ("attention.head_count", 2),
                        ("attention.head_count_kv", 1), ("attention.key_length", 4),
                        ("attention.value_length", 4),
                        ("rope.scaling.original_context_length", 2), ("vocab_size", 3)):
        w.add_uint32(f"{architecture}.{name}", value)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    w.add_rope_scaling_factor(2.0)
    shapes = {"token_embd.weight": (3, 4), "output_norm.weight": 4, "blk.0.attn_norm.weight": 4,
              "blk.0.attn_q.weight": (8, 4), "blk.0.attn_k.weight": (4, 4),
              "blk.0.attn_v.weight": (4, 4), "blk.0.attn_output.weight": (4, 8),
              "blk.0.ffn_norm.weight": 4, "blk.0.ffn_gate.weight": (4, 4),
              "blk.0.ffn_up.weight": (4, 4), "blk.0.ffn_down.weight": (4, 4)}
    for name, shape in (shapes | extra).items():
        w.add_tensor(name, np.ones(shape, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def write_seeds(folder):
    """Write the seeds of each target into its own folder."""
    for target in TARGETS:
        (folder / target).mkdir(parents=True, exist_ok=True)
    small, large = vocabulary(False), vocabulary(True, prefix=False, remove=True)
    for tied in (True, False):
        state, args = model(small.vocab_size, tied, n_layers=1 + tied)
        for version in ("v0", "v1", "v2"):
            export_model(state, args, small, folder / version / f"tied{tied:d}", version, "f32", 4,
                         "seed")
            size_byte = struct.pack("<B", args.vocab_size)
            (folder / "tokenizer_bin" / version).write_bytes(
                size_byte + (folder / version / "tokenizer.bin").read_bytes())
            (folder / version / "tokenizer.bin").unlink()
    for target, vocab in (("gguf", small), ("gguf_tokenizer", small), ("gguf_tokenizer", large)):
        for dtype, dim in (("f32", 8), ("f16", 8), ("bf16", 8), ("q8_0", 32), ("q4_0", 32),
                           ("q4_k_m", 32)):
            if vocab is large and dtype != "f16":
                continue
            wide = {"hidden_dim": 256} if dtype == "q4_k_m" else {}  # w2 needs blocks of 256
            state, args = model(vocab.vocab_size, dtype != "f16", dim, **wide,
                                rope_scaling=2.0 if dtype == "bf16" else 1.0)
            export_model(state, args, vocab, folder / target / f"{dtype}-{vocab.vocab_size}",
                         "gguf", dtype, 32, "seed", {"tokenizer.chat_template": "<|user|>"})
    biases = {"blk.0.attn_q.bias": 8, "blk.0.attn_k.bias": 4, "blk.0.attn_v.bias": 4}
    norms = {"blk.0.attn_q_norm.weight": 4, "blk.0.attn_k_norm.weight": 4}
    for architecture, extra in (("llama", {"rope_freqs.weight": 2}), ("qwen2", biases),
                                ("qwen3", norms)):
        write_architecture(folder / "gguf" / architecture, architecture, extra)
    for pre in PRE_TOKENIZERS:
        vocab = byte_level_vocabulary(pre)
        state, args = model(vocab.vocab_size, True)
        export_model(state, args, vocab, folder / "gguf_tokenizer" / f"bpe-{pre}", "gguf", "f16",
                     32, "seed")
    text = "  once upon a  time <s>▁▁café\n😀 <|user|>a  ".encode() + b"\xff\xc3"
    pieces = [(0x10, 5, " on"), (0x01, 3, "on"), (0x02, 2, "ce"), (0x02, 9, "é"), (0x23, 0, "a  "),
              (0x33, 4, "onc"), (0x28, 0, "<|user|>")]
    packed = b"".join(bytes([(kind & 0xf0) | len(p.encode()), score]) + p.encode()
                      for kind, score, p in pieces)
    for flags in range(16):
        (folder / "encode" / f"{flags:02d}").write_bytes(
            bytes([flags, len(pieces)]) + packed + text)

    merges = bytes([ord("o"), ord("n"), ord("c"), ord("e"), 0, 1, ord(" "), ord(" "), 0xC3, 0xA9,
                    ord("1"), ord("2"), ord("'"), ord("s")])
    for pre in range(4):
        (folder / "bpe" / f"{pre}").write_bytes(
            bytes([pre, len(merges) // 2]) + merges + text + "it's 123\r\n\n 中文。'ſ\t".encode())
    odd = ['"}', '"}}', "]]", "},", '},{"', '":', '":"', '"]', "[]", "{}", "[[[[", '[{"', '"\\u',
           "\\", "\\ud83d", "00", "-1", ".5", "e+", "tru", "true", "ue", "null", "l,", "\n", "  ",
           "\n}", "1,", "é", "😀", "a\"}", ',"":1}']
    halves = [b"\xc3", b"\xa9\"", b"\xf0\x9f", b"\x98\x80", b"\xed\xa0", b"\xe6\x97"]
    packed = b"".join(bytes([len(p)]) + p for p in [text.encode() for text in odd] + halves)
    # The first byte is a kind of vocabulary; from 248 on, pieces of its own follow.
    for kind in range(8):
        (folder / "grammar" / f"{kind}").write_bytes(bytes([kind, kind]) + text * (1 + kind % 4))
        own = bytes([248 + kind, len(odd) + len(halves)]) + packed + text * (1 + kind % 4)
        (folder / "grammar" / f"{kind}-own").write_bytes(own)
    write_states(folder / "state")
    write_calls(folder / "batch")


def write_states(folder):
    """
    Write saved sequences of the target's model, which has 2 layers, 1 KV head of 2 numbers, 8
    tokens and room for 80. The target itself inserts the model and the SHA-256.
    """
    rng = np.random.default_rng(0)
    for kind, bits in enumerate((32, 16, 8)):
        for n in (0, 1, 5, 64, 65, 80):
            data = b"llamacKV" + struct.pack("<6I", 1, bits, 2, 1, 2, n) + bytes(32)
            data += rng.integers(0, 8, n, dtype="<i4").tobytes()
            for count in [64] * (n // 64) + [n % 64] * (n % 64 > 0):
                numbers = rng.standard_normal(2 * 2 * count * 2)
                if bits == 8:
                    data += ((numbers * 40).astype("i1").tobytes()
                             + rng.uniform(0, 0.1, 2 * 2 * count).astype("<f4").tobytes())
                else:
                    data += numbers.astype(f"<f{bits // 8}").tobytes()
            (folder / f"{bits}-{n}").write_bytes(bytes([kind]) + data + bytes(32))


def write_calls(folder):
    """Write random calls, after two that begin sequences, for each type of the KV cache."""
    rng = np.random.default_rng(1)
    for kind in range(3):
        for length in (40, 200, 600):
            new = bytes([0, 0, 1, 0, 1, 2])  # call, slot, other slot; two times
            calls = rng.integers(0, 256, length, dtype=np.uint8).tobytes()
            (folder / f"{kind}-{length}").write_bytes(bytes([kind]) + new + calls)


if __name__ == "__main__":
    write_seeds(Path(sys.argv[1]))
