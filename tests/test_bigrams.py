"""Embedding and classifier tables that begin with bigram counts.

Compared with counts and singular vectors by NumPy, used in training, and refused where impossible.
"""
import numpy as np
import pytest
import torch
from numpy.linalg import svd

from engine.training import bigrams, checkpoint
from tests.test_train import losses, ranks, run, weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with a text whose letters predict the next ones."""
    folder = tmp_path_factory.mktemp("work")
    letters = b"abcdefghijklmnop .\n"
    (folder / "my.txt").write_bytes(
        bytes(letters[token] for token in markov_chain(len(letters), 30_000)))
    return folder


def markov_chain(V, length, sharpness=2.0):
    """Return the tokens (length,) of a Markov chain with random transition probabilities."""
    rng = np.random.default_rng(1)
    steps = np.exp(sharpness * rng.standard_normal((V, V)))
    sums = (steps / steps.sum(1, keepdims=True)).cumsum(1)
    tokens = [0]
    for draw in rng.random(length - 1):
        tokens.append(min(V - 1, int(np.searchsorted(sums[tokens[-1]], draw))))
    return np.array(tokens, np.uint16)


def discounted(tokens, V, apart=1, backwards=False):
    """Return the discounted p(b | a) (V, V) and p(b) (V,), counted token by token.

    b follows a by `apart` tokens; with `backwards`, it precedes a.
    """
    frequency = np.full(V, 0.5)
    for token in tokens:
        frequency[token] += 1
    frequency /= frequency.sum()
    counts = np.zeros((V, V))
    for a, b in zip(tokens[:-apart], tokens[apart:]):
        counts[(b, a) if backwards else (a, b)] += 1
    kinds = (counts > 0).sum(1, keepdims=True)
    taken = np.maximum(counts - 0.75, 0) + (0.75 * kinds + 1) * frequency
    return taken / (counts.sum(1, keepdims=True) + 1), frequency


def test_a_width_of_the_vocabulary_holds_all_probabilities():
    """The tables give each token's bigram probabilities, except for two that never occur."""
    V, D = 24, 32
    tokens = markov_chain(V - 2, 20_000)
    torch.manual_seed(1)
    rows, classifier = bigrams.tables(tokens, V, D)
    expected, _ = discounted(tokens, V)
    found = torch.softmax(rows @ classifier.T, 1).numpy()
    assert np.allclose(expected.sum(1), 1)
    assert abs(found - expected)[:V - 2].max() < 0.02
    assert torch.allclose(rows.square().mean(1), torch.ones(V), atol=1e-5)


def test_rows_are_principal_coordinates():
    """The coordinates come from following, preceding and second next tokens, side by side.

    Only angles count, because the axes are rotated at random.
    """
    V, D = 60, 9
    tokens = markov_chain(V, 30_000)
    blocks = []
    for apart, backwards in ((1, False), (1, True), (2, False)):
        p, frequency = discounted(tokens, V, apart, backwards)
        blocks.append(np.log(p / frequency))
    weight = np.sqrt(frequency)
    u, s, _ = svd(np.hstack([weight[:, None] * block * weight for block in blocks]))
    expected = u[:, :D - 1] * s[:D - 1] / weight[:, None]
    expected /= np.quantile(np.linalg.norm(expected, axis=1), 0.9)
    expected *= 0.95 / np.maximum(1, np.linalg.norm(expected, axis=1, keepdims=True))
    expected = np.hstack((expected, np.sqrt(1 - (expected ** 2).sum(1, keepdims=True))))
    torch.manual_seed(1)
    rows = bigrams.tables(tokens, V, D)[0].numpy()
    assert abs(rows @ rows.T / D - expected @ expected.T).max() < 0.01


def test_tokens_that_do_not_occur_take_nothing_from_those_that_do():
    """A vocabulary of 3,000 tokens, made for another text, of which this text uses 30."""
    tokens, D = markov_chain(30, 20_000), 12

    def loss(V):
        torch.manual_seed(1)
        rows, classifier = bigrams.tables(tokens, V, D)
        predicted = torch.log_softmax(rows @ classifier.T, 1)
        return -predicted[tokens[:-1].astype(int), tokens[1:].astype(int)].mean().item()

    p = np.bincount(tokens) / len(tokens)
    assert loss(30) < -(p * np.log(p)).sum() - 0.3 and abs(loss(3000) - loss(30)) < 0.1


def test_a_text_of_one_token_and_an_empty_row():
    for tokens in (np.zeros(3, np.uint16), np.array([1, 2], np.uint16)):
        rows, classifier = bigrams.tables(tokens, 4, 8)
        assert rows.isfinite().all() and classifier.isfinite().all()


def test_of_a_long_text_stretches_from_all_over_it_are_counted():
    tokens = np.arange(3 * bigrams.MAX_TOKENS)
    sample = bigrams.sampled(tokens)
    assert len(sample) == bigrams.MAX_TOKENS and sample[0] == 0 and sample[-1] == tokens[-1]
    assert (np.diff(sample) > 0).all() and np.diff(sample).max() < len(tokens) / 8
    assert (bigrams.sampled(tokens[:100]) == tokens[:100]).all()


def test_a_training_that_knows_pairs_before_its_first_step(folder):
    """The first loss is below that of token frequencies; a resumed run keeps its trained tables."""
    args = ["--data=my.txt", "--tie_embeddings=False", "--max_iters=6", "--eval_interval=3",
            "--log_interval=1"]
    told = run(folder, *args, "--bigram_start=True", "--out_dir=pairs", "--checks=all")
    assert told.returncode == 0, told.stderr
    assert "embedding and classifier initialized from bigram counts" in told.stdout
    assert run(folder, *args, "--out_dir=random").returncode == 0
    tokens = np.fromfile(next((folder / "cache").glob("my-*/train.bin")), np.uint16)
    p = np.bincount(tokens) / len(tokens)
    frequencies = -(p[p > 0] * np.log(p[p > 0])).sum()
    assert losses(folder, "pairs")[0][1] < frequencies < losses(folder, "random")[0][1]

    assert run(folder, *args, "--bigram_start=True", "--out_dir=cut", "--max_iters=3",
               "--schedule=constant").returncode == 0
    told = run(folder, *args, "--out_dir=cut", "--max_iters=6", "--schedule=constant")
    assert "resuming cut at iteration 3" in told.stdout
    assert "initialized from bigram counts" not in told.stdout
    assert run(folder, *args, "--bigram_start=True", "--out_dir=uncut",
               "--schedule=constant").returncode == 0
    for name, weight in weights(folder, "uncut").items():
        assert torch.equal(weight, weights(folder, "cut")[name]), name


def test_two_processes_begin_with_the_tables_of_one(folder):
    """The model is sharded, so each process holds a part of the tables that the master computed."""
    args = ["--data=my.txt", "--tie_embeddings=False", "--bigram_start=True", "--max_iters=2",
            "--eval_interval=2", "--eval_iters=0", "--dtype=float32"]
    assert run(folder, *args, "--out_dir=one").returncode == 0
    for done in ranks(folder, 2, *args, "--fsdp=True", "--out_dir=two"):
        assert done.returncode == 0, done.stderr
    for step, row in losses(folder, "one").items():
        assert row[1] == pytest.approx(losses(folder, "two")[step][1], rel=1e-5)


def test_what_has_no_tables_to_begin_is_one_line(folder):
    """Refuse a shared table and a model to fine-tune.

    A model that is only evaluated keeps its tables, whatever the setting.
    """
    two = ["--data=my.txt", "--tie_embeddings=False", "--bigram_start=True"]
    assert run(folder, *two, "--max_iters=1", "--eval_interval=1", "--out_dir=base").returncode == 0
    of_base = [*two, f"--init_from={checkpoint.newest(folder / 'base')}", "--out_dir=tuned"]
    for words, expected in (
            ([*two, "--tie_embeddings=True"], "bigram_start is True with tied embeddings"),
            (of_base, "bigram_start is True with a model to fine-tune")):
        done = run(folder, *words)
        assert done.returncode == 2
        assert expected in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    done = run(folder, *of_base, "--eval_only=True", "--eval_iters=1")
    assert done.returncode == 0, done.stderr
    assert f"validation loss {losses(folder, 'base')[1][1]:.4f}" in done.stdout, done.stderr
    assert "initialized from bigram counts" not in done.stdout
