"""
Write models for benchmarks: random weights in published shapes, the same weights in every format.

    python bench/models.py                                   all shapes and formats: 18 GB
    python bench/models.py --shapes=15M --formats=f32,q8_0

Each tensor is generated when the exporter reads it and freed after the exporter has written it, so
the peak memory is a few times the largest tensor. The program skips files that exist.
"""
import itertools
import math
import string
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import export
from configurator import configure, fail
from engine.formats.layout import FILE_TYPES, tensors
from engine.formats.gguf_tokenizer import tokenizer_of_pieces
from model import ModelArgs
from tokenizer import BYTE, NORMAL, SPACE, SPECIALS

shapes = "15M,42M,110M,1.1B"          # names in SHAPES, separated by commas
formats = "f32,bf16,q8_0,q4_0,v0,v2"  # GGUF types, and llama2.c's v0 (float32) and v2 (int8 in
                                      # groups), separated by commas
context = 1024                        # context in tokens; use another folder for another context
models = "cache/bench"                # folder for the models

SHAPES = {
    "260K": ModelArgs(dim=64, n_layers=5, n_heads=8, n_kv_heads=4, hidden_dim=172, vocab_size=512),
    "15M": ModelArgs(dim=288, n_layers=6, n_heads=6, hidden_dim=768),
    "42M": ModelArgs(dim=512, n_layers=8, n_heads=8, hidden_dim=1376),
    "110M": ModelArgs(dim=768, n_layers=12, n_heads=12, hidden_dim=2048),
    "1.1B": ModelArgs(dim=2048, n_layers=22, n_heads=32, n_kv_heads=4, hidden_dim=5632, tied=False),
}


class RandomWeights:
    """A state_dict whose tensors are generated at each access, seeded by their names."""

    def __init__(self, args):
        self.shapes = {name: shape for name, _, _, shape in tensors(args)}

    def keys(self):
        return self.shapes.keys()

    def __getitem__(self, name):
        shape = self.shapes[name]
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if len(shape) == 1:
            return torch.rand(shape, generator=generator) + 0.5
        w = torch.randn(shape, generator=generator)
        if name not in ("tok_embeddings.weight", "output.weight"):
            return w / shape[1] ** 0.5
        w[1:3] *= 0.01  # makes <s> and </s> unlikely, so that texts rarely end early
        return w


def vocabulary(size):
    """
    Return a Tokenizer of `size` pieces: special tokens, bytes, then words of one to three letters,
    with and without a leading space.
    """
    pieces = [*SPECIALS]
    pieces += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    pieces.append((SPACE, NORMAL))
    for n in (1, 2, 3):
        words = list(map("".join, itertools.product(string.ascii_lowercase, repeat=n)))
        pieces += [(SPACE + word, NORMAL) for word in words]
        pieces += [(word, NORMAL) for word in words]
    # Earlier pieces have higher scores.
    scored = [(piece.encode(), -float(i), kind) for i, (piece, kind) in enumerate(pieces[:size])]
    return tokenizer_of_pieces(scored, (0, 1, 2), True, False, "the synthetic vocabulary")


def path_of(shape, form):
    """Return the path of the model of this shape and format."""
    return Path(models, shape, form + (".bin" if form.startswith("v") else ".gguf"))


def main():
    """Write each model whose file is missing."""
    unknown = set(shapes.split(",")) - set(SHAPES)
    unknown = unknown or set(formats.split(",")) - {*FILE_TYPES, "v0", "v1", "v2"}
    if unknown:
        fail(f"{', '.join(unknown)}: unknown shape or format; expected shapes of "
             f"{', '.join(SHAPES)} and formats of {', '.join(FILE_TYPES)}, v0, v1, v2")
    for shape, form in itertools.product(shapes.split(","), formats.split(",")):
        path = path_of(shape, form)
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        args = replace(SHAPES[shape], max_seq_len=context)
        kind = {"format": form} if form.startswith("v") else {"format": "gguf", "dtype": form}
        # The groups of v2 must fill the rows of every matrix.
        group_size = math.gcd(64, args.dim, args.hidden_dim)
        export.export_model(RandomWeights(args), args, vocabulary(args.vocab_size), path,
                            name=shape, group_size=group_size, **kind)
        print(f"wrote {path}", flush=True)


if __name__ == "__main__":
    configure(globals())
    main()
