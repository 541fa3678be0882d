"""
Begin the embedding and the classifier of a new model from counts of pairs of tokens, so that it
knows before the first step which tokens follow each token. doc/lab/own_text.md has what it gains.

Before the first step the blocks add little to the embedding. So the logits of the next token are
about C n, where n is the row of the embedding of the current token, normalized, and C is the
classifier. start_tables chooses the rows n such that tokens with similar neighbours are close
together, and then C such that C n is the logarithm of the next token's probability, as nearly as
the width allows. The rows are the principal coordinates of a correspondence analysis
(https://en.wikipedia.org/wiki/Correspondence_analysis) of logarithms of probabilities.

Shapes: V vocabulary, D model width.
"""
import time

import numpy as np
import torch

from engine.training import distributed

MAX_TOKENS = 1 << 22  # tokens that are counted at most
STRETCHES = 16        # a longer text is counted in so many stretches, evenly spaced
DISCOUNT = 0.75       # subtracted from each count, for the pairs that were not seen
ITERATIONS = 4        # of the subspace that holds the coordinates
MARGIN = 16           # more vectors than coordinates, for faster convergence
MAX_COORDINATES = 255  # more would take minutes for large models; their further dimensions are 0
LONG = 0.9            # fraction of the rows that keep their length; longer ones are shortened
RIDGE = 1e-3          # of the regression that finds the classifier, relative to the variance


class LogRatios:
    """
    log(p(b | a) / p(b)) for all pairs of tokens (a, b), where b stands beside a: a matrix (V, V)
    that is kept as a sparse matrix plus the same number for each element of a row.

    p(b | a) is estimated by absolute discounting: a seen pair gives DISCOUNT of its count to all
    tokens, in proportion to their frequency. https://doi.org/10.1006/csla.1994.1001

    a, b: (n,) int64, the two tokens of each place of the text; frequency: (V,) float32, p(b).
    """

    def __init__(self, a, b, frequency):
        V = len(frequency)
        pairs, counts = np.unique(a * V + b, return_counts=True)
        a, b = (torch.from_numpy(tokens) for tokens in np.divmod(pairs, V))
        counts = torch.from_numpy(counts).float()
        total = torch.zeros(V).index_add_(0, a, counts) + 1
        kinds = torch.bincount(a, minlength=V)
        unseen = (DISCOUNT * kinds + 1) / total  # (V,), p(b | a) / p(b) of a pair that was not seen
        ratio = (counts - DISCOUNT) / total[a] / frequency[b] + unseen[a]
        self.of_rows = unseen.log()
        self.sparse = torch.sparse_coo_tensor(torch.stack((a, b)), ratio.log() - self.of_rows[a],
                                              (V, V), is_coalesced=True,
                                              check_invariants=True)

    def times(self, x):
        """Return the product with x (V, n)."""
        return self.sparse @ x + torch.outer(self.of_rows, x.sum(0))

    def transposed_times(self, x):
        """Return the product of the transposed matrix with x (V, n)."""
        return self.sparse.T @ x + self.of_rows @ x


def start_tables(model, tokens):
    """
    Set the embedding and the classifier of a Transformer, which are two tables, from the tokens
    (n,) of its training text. The embedding's rows get an RMS of 1. Random numbers are PyTorch's.
    """
    started = time.monotonic()
    V, D = model.tok_embeddings.weight.shape
    embedding, classifier = distributed.on_master(tables, tokens, V, D)
    with torch.no_grad():
        model.tok_embeddings.weight.copy_(embedding)
        model.output.weight.copy_(classifier)
    distributed.say(f"start: the tables begin with the counts of neighbouring tokens, made in "
                    f"{time.monotonic() - started:.1f} s")


def tables(tokens, V, D):
    """Return the embedding and the classifier, both (V, D) float32, for start_tables."""
    tokens = np.asarray(sampled(tokens), np.int64)
    frequency = torch.bincount(torch.from_numpy(tokens), minlength=V) + 0.5
    frequency = frequency / frequency.sum()
    following = LogRatios(tokens[:-1], tokens[1:], frequency)
    preceding = LogRatios(tokens[1:], tokens[:-1], frequency)
    next_but_one = LogRatios(tokens[:-2], tokens[2:], frequency)

    n = coordinates((following, preceding, next_but_one), frequency[:, None], D)  # (V, D)
    # Regression of log p(b | a) on the rows n, weighted by how frequent a is.
    weighted = frequency[:, None] * n
    covariance = n.T @ weighted
    covariance += RIDGE * covariance.diagonal().mean() * torch.eye(D)
    target = following.transposed_times(weighted) + torch.outer(frequency.log(), weighted.sum(0))
    return n, torch.linalg.solve(covariance, target.T).T


def sampled(tokens):
    """Return the tokens (n,), or STRETCHES of them, evenly spaced, of MAX_TOKENS in all."""
    if len(tokens) <= MAX_TOKENS:
        return tokens
    length = MAX_TOKENS // STRETCHES
    starts = np.linspace(0, len(tokens) - length, STRETCHES).astype(int)
    return np.concatenate([tokens[start:start + length] for start in starts])


def coordinates(ratios, frequency, D):
    """
    Return rows (V, D) of length sqrt(D), in which tokens with similar LogRatios are near.
    ratios: the LogRatios of different neighbours; frequency: (V, 1).

    They are the largest principal coordinates of all ratios side by side, (V, 3 V), with rows and
    columns weighted by frequency, and one more that fills each row up to the same length. A random
    rotation then spreads them over all columns, because AdamW treats columns apart.
    """
    weight = frequency.sqrt()

    def squared_times(x):
        """Return A A^T x, where A is the weighted matrix (V, 3 V)."""
        x = weight * x
        return weight * sum(r.times(frequency * r.transposed_times(x)) for r in ratios)

    # Subspace iteration: https://arxiv.org/abs/0909.4061
    V, n = len(frequency), min(D - 1, MAX_COORDINATES)
    basis = torch.randn(V, min(V, n + MARGIN))
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(squared_times(basis))[0]
    values, vectors = torch.linalg.eigh(basis.T @ squared_times(basis))  # in ascending order
    vectors, values = vectors.flip(1)[:, :n], values.flip(0)[:n]
    found = basis @ vectors * values.clamp(min=0).sqrt() / weight  # (V, n), or (V, V) if V < n

    longest = torch.quantile(found.norm(dim=1), LONG).clamp(min=1e-9)
    found = found / longest
    found = found / found.norm(dim=1, keepdim=True).clamp(min=1)
    rows = torch.zeros(V, D)
    rows[:, 1:1 + found.shape[1]] = 0.95 * found
    rows[:, 0] = (1 - rows.square().sum(1)).sqrt()
    rotation = torch.linalg.qr(torch.randn(D, D))[0]
    return D ** 0.5 * rows @ rotation
