"""N-grams that teach: their probabilities are those of NLTK's Kneser-Ney, also where a place is left out of the counts."""
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nltk.lm import KneserNeyInterpolated
from nltk.util import ngrams as nltk_ngrams

from engine.training import distill, ngrams
from tests.test_distill import models

V = 12


def draw(n, seed):
    """Some of these tokens are rare, and some do not occur."""
    return (np.random.default_rng(seed).integers(0, 7, n) ** 2 // 5).astype(np.uint16)


@pytest.fixture
def made(monkeypatch):
    """A text, tokens beside it, and n-grams of up to 3 tokens before each; with a discount that NLTK has, too, and no uniform part."""
    monkeypatch.setattr(ngrams, "ORDER", 3)
    text, beside = draw(200, 0), draw(60, 1)
    found = ngrams.Ngrams(np.concatenate((text, beside)), len(text), V)
    for order in found.orders:
        order.discount = 0.4 if order is not found.orders[0] else 0.0
        if order.table is not None:
            order.make_table(V)
    return found, text


def of_nltk(tokens, counted, left_out=None):
    """NLTK's model of the first tokens of a ring, without the n-grams that end at the place left_out."""
    ring, model = [*map(str, tokens[-3:]), *map(str, tokens[:counted])], KneserNeyInterpolated(4, discount=0.4)
    grams = [gram for n in range(1, 5) for place, gram in enumerate(nltk_ngrams(ring[4 - n:], n)) if place != left_out]
    model.fit([grams], vocabulary_text=map(str, range(V)))
    return model


def scores(model, before):
    return [model.score(str(token), [*map(str, before)]) for token in range(V)]


def test_they_predict_other_text_as_nltk_does(made):
    found, text = made
    model, places = of_nltk(found.tokens, len(text)), np.arange(len(text) + 3, len(found.tokens))
    expected = np.array([scores(model, found.tokens[place - 3:place]) for place in places])
    assert abs(found.probabilities(places) - expected).max() < 1e-6
    assert sum(row.max() > 0.5 for row in expected) > 5  # the contexts say something


@pytest.mark.parametrize("place", [0, 1, 30, 77, 131, 199])
def test_a_place_of_the_text_is_left_out_of_the_counts(made, place):
    found, text = made
    expected = scores(of_nltk(found.tokens, len(text), place), found.tokens[np.arange(place - 3, place)])
    assert abs(found.probabilities(np.array([place]))[0] - expected).max() < 1e-6


def test_every_token_has_a_probability_and_the_discount_is_that_of_the_paper():
    text = draw(3000, 2)
    found = ngrams.Ngrams(np.concatenate((text, draw(500, 3))), len(text), V)
    rows = found.probabilities(np.arange(3500))
    assert rows.min() > 0 and abs(rows.sum(1) - 1).max() < 1e-5
    longest = found.orders[-1]
    pairs, counts = np.unique(np.stack([np.roll(text, n) for n in range(ngrams.ORDER + 1)], 1), axis=0, return_counts=True)
    assert longest.discount == pytest.approx((counts == 1).sum() / ((counts == 1).sum() + 2 * (counts == 2).sum()))
    # Without the place itself: a text in which nothing follows from anything is not known by heart.
    noise = np.random.default_rng(4).integers(0, V, 2000)
    rows = ngrams.Ngrams(noise, len(noise), V).probabilities(np.arange(2000))
    assert -np.log(rows[np.arange(2000), noise]).mean() > math.log(V)


def test_what_they_write_has_the_frequencies_that_they_predict():
    text = draw(3000, 5)
    both = ngrams.Ngrams(np.concatenate((text, draw(40, 6))), len(text), V)
    alone, dice = ngrams.Ngrams(text, len(text), V), np.random.default_rng(7)
    for place in (3010, 3020, 3039):
        recent = np.tile(both.tokens[place - ngrams.ORDER:place], (20_000, 1))
        found = np.bincount(alone.draw(recent, dice), minlength=V) / len(recent)
        expected = both.probabilities(np.array([place]))[0]
        assert abs(found - expected).max() < 4 * math.sqrt(0.25 / len(recent)) + expected[found == 0].sum()
    written = alone.write(1000)
    assert 1000 <= len(written) < 1000 + ngrams.TEXTS and set(written.tolist()) <= set(text.tolist())
    assert (written == ngrams.Ngrams(text, len(text), V).write(1000)).all()


@pytest.mark.parametrize("teachers", [0, 2])
def test_the_loss_is_that_with_their_share_of_the_targets(teachers):
    """Of the text they have a share beside the other teachers, or beside the token. Written text they alone predict if there is no other."""
    student, *others = models(1 + teachers)
    text = np.random.default_rng(8).integers(0, 50, 400)
    counted = 300
    taught = distill.Teachers(others, ngrams.Ngrams(text, counted, 50))
    places = np.stack([np.arange(20, 36), np.arange(320, 336)])
    x, y = (torch.from_numpy(text[p]) for p in (places - 1, places))
    loss = distill.loss(student, taught, x, y, places)
    logits = student(x, every=1)[0].double()
    rest = F.one_hot(y, 50).double()
    if teachers:
        with torch.no_grad():
            rest = torch.stack([F.softmax(other(x, every=1)[0].double(), -1) for other in others]).mean(0)
    said = torch.from_numpy(taught.ngrams.probabilities(places.ravel())).view(2, 16, 50).double()
    share = torch.tensor([0.35, 0.35 if teachers else 1.0])[:, None, None]
    target = (1 - share) * rest + share * said
    assert loss.item() == pytest.approx(-(target * logits.log_softmax(-1)).sum(-1).mean().item(), rel=1e-5)
