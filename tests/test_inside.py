"""
Check the instruments that read a network's activations against plain formulas, and the notes on
unusual values.
"""
import contextlib
import json
import math
from types import SimpleNamespace

import pytest
import torch

import track
from engine.debug import activations, instruments
from engine.ops import rotate, within_documents
from model import ModelArgs, Transformer

CPU, OFF = torch.device("cpu"), contextlib.nullcontext()


def small(**more):
    torch.manual_seed(1)
    return Transformer(ModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=259,
                                 max_seq_len=24, **more)).eval()


def look(model, tokens):
    stats = activations.ActivationStats(model, tokens)
    with torch.no_grad(), activations.watch(stats.callbacks()):
        model(tokens, every=1)
    return stats.read()


def test_inside_is_the_plain_formula():
    model = small()
    for p in model.parameters():
        p.data *= 8  # so that attention is uneven
    model.bos_id = 1
    tokens = torch.randint(3, 259, (2, 24))
    tokens[:, 0] = tokens[:, 10] = 1
    row = look(model, tokens)
    x, rope = model.tok_embeddings(tokens), model.rope[:24]
    mask = within_documents(tokens, 1)
    for i, layer in enumerate(model.layers):
        h, a = layer.attention_norm(x), layer.attention
        shares = []
        for b in range(2):
            for head in range(4):
                q = rotate(a.wq(h).view(2, 24, 4, 8), rope)[b, :, head]
                k = rotate(a.wk(h).view(2, 24, 2, 8), rope)[b, :, head // 2]
                for t in range(24):
                    seen = [s for s in range(t + 1) if (s >= 10) == (t >= 10)]
                    if len(seen) > 1:
                        p = torch.softmax(torch.stack([q[t] @ k[s] / 8 ** 0.5 for s in seen]), 0)
                        shares.append(-(p * p.log()).nansum().item() / math.log(len(seen)))
        assert row[f"attention/entropy/layers.{i}"] == pytest.approx(
            sum(shares) / len(shares), abs=1e-4)
        x = layer(x, rope, None, mask)
        assert row[f"norm/activation/layers.{i}"] == pytest.approx(
            x.square().mean().sqrt().item(), rel=1e-5)
        assert row[f"dead/layers.{i}"] == 0
    assert set(row) == {f"{name}/layers.{i}" for name in (
        "norm/activation", "dead", "attention/entropy") for i in (0, 1)}
    assert not any(m._forward_hooks for m in model.modules())


def plant_dead(model):
    model.layers[1].feed_forward.w1.weight.data[:70] = 0


def plant_sharp(model):
    model.layers[0].attention.wq.weight.data *= 1e5


def plant_huge(model):
    model.layers[1].feed_forward.w2.weight.data *= 1e9


@pytest.mark.parametrize("plant, names", [
    (plant_dead, ["dead/layers.1"]), (plant_sharp, ["attention/entropy/layers.0"]),
    (plant_huge, ["norm/activation/layers.1"]), (lambda model: None, [])])
def test_a_note_once_for_what_is_out_of_the_ordinary(plant, names, capsys):
    model, noted = small(), []
    plant(model)
    row = {"iter": 1, "tokens": 5} | look(model, torch.randint(3, 259, (2, 24)))
    rows, alerts = [], []
    heard = SimpleNamespace(log=rows.append, alert=lambda title, text: alerts.append(title))
    tracker = track.Tracker([heard], noted)
    for _ in range(2):
        tracker.log(row)
    assert [name for name, *_ in rows[0].get("notes", [])] == names
    assert "notes" not in rows[1]
    assert [title.split(" is ")[0] for title in alerts] == names
    assert noted == [name.rpartition("/layers")[0] for name in names]
    said = capsys.readouterr().err
    assert said.count("\n") == len(names)
    assert all(f"warning: {name} is " in said for name in names)
    json.dumps(rows)


def test_of_gradients_and_updates_too():
    """Gradients and updates are checked too."""
    detector = track.AnomalyDetector([])
    usual = {"norm/grad/layers.0": 0.1, "norm/update/layers.0": 1e-3, "norm/weight/layers.0": 1e9,
             "loss/train": 5.0}
    assert detector.out_of_range(usual) == []
    odd = {"norm/grad/layers.0": 0.0, "norm/grad/layers.1": 0.0, "norm/update/norm": math.nan}
    assert [name for name, *_ in detector.out_of_range(odd)] == [
        "norm/grad/layers.0", "norm/update/norm"]


def test_the_gradient_noise_scale():
    """
    The gradients of a linear model are drawn around a mean. The noise scale is the variance of a
    sequence's gradient divided by the square of the mean.
    """
    class Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(50))

        def forward(self, x, y):
            return None, (x.float() @ self.w).mean()  # the gradient is the mean of the rows

    torch.manual_seed(0)
    rows = 3 + 2 * torch.randn(4000, 50)
    dataset = SimpleNamespace(
        make_batch=lambda step: (rows[1000 * step:1000 * step + 1000], rows[:1000]))
    found = instruments.gradient_noise(
        Linear(), dataset, CPU, OFF, small_batches=2000)["grad/noise_scale"]
    assert found == pytest.approx(50 * 4 / (50 * 9) * 50, rel=0.05)  # a sequence has 50 tokens
    found = instruments.gradient_noise(
        Linear(), dataset, CPU, OFF, small_batches=2)["grad/noise_scale"]
    # The means of two halves give unbiased estimates of: a half's variance, the squared mean.
    a, b = rows.view(2, 2000, 50).mean(1)
    assert found == pytest.approx(
        ((a - b).square().sum() / 2 / (a @ b)).item() * 2000 * 50, rel=0.05)
