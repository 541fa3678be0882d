"""
Compare n-gram probabilities with NLTK's Kneser-Ney, also with the predicted position left out of
the counts.
"""
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
    """Return n random tokens below V; some of the V tokens are rare, and some do not occur."""
    return (np.random.default_rng(seed).integers(0, 7, n) ** 2 // 5).astype(np.uint16)


@pytest.fixture
def made(monkeypatch):
    """
    Return (Ngrams with 3 tokens of context, for a text followed by tokens that are not counted; the
    text). Like NLTK's, they have the same discount in all orders, and none in order 0.
    """
    monkeypatch.setattr(ngrams, "ORDER", 3)
    text, beside = draw(200, 0), draw(60, 1)
    found = ngrams.Ngrams(np.concatenate((text, beside)), len(text), V)
    for order in found.orders:
        order.discount = 0.4 if order is not found.orders[0] else 0.0
        if order.table is not None:
            order.make_table(V)
    return found, text


def of_nltk(tokens, counted, left_out=None):
    """
    Return NLTK's model of the first `counted` tokens of a ring, without n-grams that end at the
    position left_out.
    """
    ring = [str(token) for token in [*tokens[-3:], *tokens[:counted]]]
    grams = []
    for n in range(1, 5):
        of_places = list(nltk_ngrams(ring[4 - n:], n))  # the n-gram that ends at each position
        if left_out is not None:
            del of_places[left_out]
        grams += of_places
    model = KneserNeyInterpolated(4, discount=0.4)
    model.fit([grams], vocabulary_text=map(str, range(V)))
    return model


def scores(model, before):
    return [model.score(str(token), [*map(str, before)]) for token in range(V)]


def test_predictions_are_kept_if_there_is_room(made, monkeypatch):
    found, text = made
    places = np.array([3, 250, 3, 7])
    expected = found.predict(places)
    calls, predict = [], found.predict
    monkeypatch.setattr(found, "predict", lambda at: calls.append([*at]) or predict(at))
    for order in (places, places[::-1], np.array([7, 8])):
        probabilities = found.probabilities(order)
        assert np.array_equal(probabilities, predict(order))
    assert np.array_equal(found.probabilities(places), expected)
    assert calls == [[3, 250, 3, 7], [8]]
    monkeypatch.setattr(ngrams, "MAX_KEPT", 4 * V * len(found.tokens) - 1)
    assert ngrams.kept_bytes(len(found.tokens), V) == 0
    large = ngrams.Ngrams(found.tokens, len(text), V)
    assert large.kept is None and large.probabilities(places).shape == (4, V)


def test_they_predict_other_text_as_nltk_does(made):
    found, text = made
    model = of_nltk(found.tokens, len(text))
    places = np.arange(len(text) + 3, len(found.tokens))
    expected = np.array([scores(model, found.tokens[place - 3:place]) for place in places])
    assert abs(found.probabilities(places) - expected).max() < 1e-6
    assert sum(row.max() > 0.5 for row in expected) > 5  # some contexts are informative


@pytest.mark.parametrize("place", [0, 1, 30, 77, 131, 199])
def test_a_place_of_the_text_is_left_out_of_the_counts(made, place):
    found, text = made
    before = found.tokens[np.arange(place - 3, place)]
    expected = scores(of_nltk(found.tokens, len(text), place), before)
    assert abs(found.probabilities(np.array([place]))[0] - expected).max() < 1e-6


def test_every_token_has_a_probability_and_the_discount_is_that_of_the_paper():
    text = draw(3000, 2)
    found = ngrams.Ngrams(np.concatenate((text, draw(500, 3))), len(text), V)
    rows = found.probabilities(np.arange(3500))
    assert rows.min() > 0 and abs(rows.sum(1) - 1).max() < 1e-5
    pairs = np.stack([np.roll(text, n) for n in range(ngrams.ORDER + 1)], 1)
    counts = np.unique(pairs, axis=0, return_counts=True)[1]
    once, twice = (counts == 1).sum(), (counts == 2).sum()
    assert found.orders[-1].discount == pytest.approx(once / (once + 2 * twice))
    # No token helps to predict itself: random ones are predicted no better than by chance.
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
        assert abs(found - expected).max() < 4 * math.sqrt(0.25 / len(recent))
    written = alone.write(1000)
    assert 1000 <= len(written) < 1000 + ngrams.TEXTS
    assert set(written.tolist()) <= set(text.tolist())
    assert (written == ngrams.Ngrams(text, len(text), V).write(1000)).all()


@pytest.mark.parametrize("teachers", [0, 2])
def test_the_loss_is_that_with_their_share_of_the_targets(teachers):
    """
    N-grams provide 0.35 of a target; the models provide the rest, or the token itself if there are
    no models. For generated text without models, n-grams provide the whole target.
    """
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
            rest = sum(F.softmax(other(x, every=1)[0].double(), -1) for other in others) / 2
    said = torch.from_numpy(taught.ngrams.probabilities(places.ravel())).view(2, 16, 50).double()
    share = torch.tensor([0.35, 0.35 if teachers else 1.0])[:, None, None]
    target = (1 - share) * rest + share * said
    expected = -(target * logits.log_softmax(-1)).sum(-1).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
