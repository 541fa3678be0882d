"""
Each vectorised operation is compared with a twin in plain loops over single numbers: its values,
and its gradients where there are any.
"""
import math

import numpy as np
import pytest
import torch

import data
import export
import optim
from engine import ops
from engine.formats import layout
from model import ModelArgs, rope_table

WRITTEN_OUT = [pytest.param(True, id="written out"), pytest.param(False, id="plain")]


def leaf(*shape, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed + sum(shape))).requires_grad_()


def stacked(nested):
    """Return a tensor made of nested lists of scalar tensors, which keeps their gradients."""
    return torch.stack([stacked(n) for n in nested]) if isinstance(nested, list) else nested


def same(op, twin, *inputs, near=2e-5):
    """Compare the values of op and twin, and the gradients of a random sum of the values."""
    values, expected = op(*inputs), stacked(twin(*inputs))
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9))
    found = torch.autograd.grad((values * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    torch.testing.assert_close(values, expected, rtol=near, atol=near)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=near, atol=near)


@pytest.mark.parametrize("written", WRITTEN_OUT)
def test_rms_norm(written):
    def twin(x, w):
        rows = []
        for row in x:
            square = sum(value * value for value in row) / len(row)
            rows.append([value / torch.sqrt(square + 1e-5) * w[i] for i, value in enumerate(row)])
        return rows

    op = ops.rms_norm if written else ops.rms_norm_plain
    same(lambda x, w: op(x, w, 1e-5), twin, leaf(3, 5), leaf(5))


@pytest.mark.parametrize("written", WRITTEN_OUT)
def test_swiglu(written):
    def twin(a, b):
        return [[x / (1 + torch.exp(-x)) * y for x, y in zip(*rows)] for rows in zip(a, b)]

    same(ops.swiglu if written else ops.swiglu_plain, twin, leaf(3, 4), leaf(3, 4, seed=1))


@pytest.mark.parametrize("written", WRITTEN_OUT)
def test_rotary_positions(written):
    args = ModelArgs(dim=12, n_heads=2, vocab_size=9, max_seq_len=4, rope_theta=100.0,
                     rope_scaling=2.0)

    def twin(x):
        out = [[[[None] * 6 for _ in range(2)] for _ in range(4)] for _ in range(2)]
        for b in range(2):
            for t in range(4):
                for head in range(2):
                    for i in range(3):
                        angle = t / 2.0 * 100.0 ** (-2 * i / 6)
                        first, second = x[b, t, head, 2 * i], x[b, t, head, 2 * i + 1]
                        out[b][t][head][2 * i] = first * math.cos(angle) - second * math.sin(angle)
                        out[b][t][head][2 * i + 1] = (
                            first * math.sin(angle) + second * math.cos(angle))
        return out

    op = ops.rotate if written else ops.rotate_plain
    same(lambda x: op(x, rope_table(args)), twin, leaf(2, 4, 2, 6))


def attention_twin(q, k, v, sees):
    """Head h reads keys and values of head h K / H; sees(b, t, s): whether query t sees key s."""
    B, T, H, Q = q.shape
    out = []
    for b in range(B):
        rows = []
        for t in range(T):
            row = []
            for h in range(H):
                g = h * k.shape[2] // H
                keys = [s for s in range(T) if sees(b, t, s)]
                powers = [torch.exp(sum(q[b, t, h, i] * k[b, s, g, i] for i in range(Q))
                                    / math.sqrt(Q)) for s in keys]
                row += [sum(p * v[b, s, g, i] for p, s in zip(powers, keys)) / sum(powers)
                        for i in range(Q)]
            rows.append(row)
        out.append(rows)
    return out


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_and_its_heads(kv_heads):
    q, k, v = leaf(2, 3, 4, 2), leaf(2, 3, kv_heads, 2, seed=1), leaf(2, 3, kv_heads, 2, seed=2)
    same(ops.attention, lambda q, k, v: attention_twin(q, k, v, lambda b, t, s: s <= t), q, k, v)


def test_attention_within_documents():
    bos, tokens = 1, torch.tensor([[1, 5, 1, 7, 8], [4, 5, 6, 1, 1]])

    def sees(b, t, s):
        return s <= t and not any(tokens[b, u] == bos for u in range(s + 1, t + 1))

    mask = ops.within_documents(tokens, bos)
    assert mask.tolist() == [[[[sees(b, t, s) for s in range(5)] for t in range(5)]]
                             for b in range(2)]
    q, k, v = leaf(2, 5, 2, 2), leaf(2, 5, 2, 2, seed=1), leaf(2, 5, 2, 2, seed=2)
    same(lambda q, k, v: ops.attention(q, k, v, mask),
         lambda q, k, v: attention_twin(q, k, v, sees), q, k, v)


@pytest.mark.parametrize("written", WRITTEN_OUT)
def test_cross_entropy_and_its_mask(written, monkeypatch):
    monkeypatch.setattr(ops.CrossEntropy, "PIECE", 8)  # several pieces
    targets = torch.tensor([2, -1, 0, 3, -1])

    def op(x, w):
        if written:
            return ops.CrossEntropy.apply(x, w, None, targets, torch.float32, True)
        return ops.cross_entropy_plain(x @ w.T, torch.nn.Identity(), targets)

    def twin(x, w):
        losses = []
        for row, target in zip(x, targets.tolist()):
            if target >= 0:
                logits = [sum(a * b for a, b in zip(row, column)) for column in w]
                losses.append(torch.log(sum(torch.exp(z) for z in logits)) - logits[target])
        return sum(losses) / len(losses)

    same(op, twin, leaf(5, 3), leaf(4, 3, seed=1))


@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
def test_orthogonalised(shape):
    """The twin computes the quintic Newton-Schulz iteration entry by entry."""
    def product(a, b):
        return [[sum(x * y for x, y in zip(row, column)) for column in zip(*b)] for row in a]

    g = leaf(1, *shape).detach().double()
    x = g[0].tolist() if shape[0] < shape[1] else [list(column) for column in zip(*g[0].tolist())]
    length = math.sqrt(sum(value ** 2 for row in x for value in row)) + 1e-7
    x = [[value / length for value in row] for row in x]
    for _ in range(5):
        a = product(x, [list(column) for column in zip(*x)])
        aa = product(a, a)
        b = [[-4.7750 * p + 2.0315 * q for p, q in zip(*rows)] for rows in zip(a, aa)]
        x = [[3.4445 * p + q for p, q in zip(*rows)] for rows in zip(x, product(b, x))]
    expected = torch.tensor(x) if shape[0] < shape[1] else torch.tensor(x).T
    torch.testing.assert_close(
        optim.orthogonalize(g, torch.float64)[0], expected.double(), rtol=1e-6, atol=1e-6)


def away_from_zero(value):
    return math.copysign(math.floor(abs(value) + 0.5), value)


def test_blocks_of_8_and_4_bits():
    x = np.concatenate([leaf(64).detach().numpy(), np.zeros(32, "f4"), np.full(32, -3.0, "f4")])
    whole, nibbles = (layout.TYPES[name].encode(x) for name in ("q8_0", "q4_0"))
    for n, block in enumerate(x.reshape(-1, 32)):
        d = np.float32(max(abs(block)) / np.float32(127))
        assert whole["d"][n] == np.float16(d)
        assert whole["q"][n].tolist() == [
            int(away_from_zero(v * np.float32(1 / d))) if d else 0 for v in block]
        extreme = max(block, key=abs)
        d = np.float32(extreme / np.float32(-8))
        q = [min(15, int(v * np.float32(1 / d) + np.float32(8.5))) if d else 8 for v in block]
        assert nibbles["d"][n] == np.float16(d)
        assert nibbles["q"][n].tolist() == [low | high << 4 for low, high in zip(q[:16], q[16:])]
    back8, back4 = (layout.TYPES[name].decode(stored.view(np.uint8)).flatten()
                    for name, stored in (("q8_0", whole), ("q4_0", nibbles)))
    for n, value in enumerate(x):
        b, i = divmod(n, 32)
        nibble = nibbles["q"][b][i % 16] >> (4 if i >= 16 else 0) & 15
        assert back8[n] == np.float32(whole["d"][b]) * whole["q"][b][i]
        assert back4[n] == np.float32(nibbles["d"][b]) * (int(nibble) - 8)


def test_groups_of_llama2c():
    x = np.concatenate([leaf(48).detach().numpy(), np.zeros(16, "f4")])
    q, scale = export.to_groups(x, 16)
    for n, group in enumerate(x.reshape(-1, 16)):
        d = np.float32(max(abs(group)) / np.float32(127))
        assert scale[n] == d
        # round() rounds ties to even.
        assert q[n].tolist() == [round(float(v / (d or np.float32(1)))) for v in group]


@pytest.mark.parametrize("world", [1, 3])
def test_the_place_of_a_batch(world):
    """
    Sequence n of a run is window n of the concatenated orders of the epochs. The target of each
    token is the token after it.
    """
    tokens, T, rows = np.arange(100, 143, dtype=np.uint16), 5, 4
    windows = len(tokens) // T
    for step in range(6):
        found = [data.batch_slice(tokens, 7, step, rows, T, (rank, world)) for rank in range(world)]
        x, y = (torch.cat([both[i] for both in found]).tolist() for i in (0, 1))
        for row in range(len(x)):
            epoch, place = divmod(step * rows + min(row, rows - 1), windows)
            start = data.epoch_windows(7, epoch, len(tokens), T)[place]
            for t in range(T):
                assert x[row][t] == tokens[(start + t) % len(tokens)]
                assert y[row][t] == (tokens[(start + t + 1) % len(tokens)] if row < rows else -1)
