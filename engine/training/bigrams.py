"""
Initialize the embedding and the classifier of a new model from counts of token pairs, so that it
knows before the first step which tokens follow each token. doc/lab/own_text.md measures the gain.

At first the blocks add little to the rows of this embedding. So the logits of the next token are
about C e, where e is the row of the current token, normalized, and C is the classifier. `tables`
chooses rows such that tokens with similar neighbours are close together, and then C such that C e
is the logarithm of the next token's probability, as closely as the width allows. The rows are
principal coordinates as in a correspondence analysis, but of logarithms, which are not centred.
https://en.wikipedia.org/wiki/Correspondence_analysis

Shapes: N tokens of the text, V vocabulary, D model width.
"""
import time

import numpy as np
import torch

from engine.training import distributed

MAX_TOKENS = 1 << 22  # max tokens to count
STRETCHES = 16        # a longer text is counted in this many evenly spaced stretches; the pairs
                      # across their borders are too few to matter
DISCOUNT = 0.75       # occurrences taken from each seen pair and redistributed over all b
ITERATIONS = 4        # subspace iterations that compute the coordinates
MARGIN = 16           # extra vectors of the subspace, for faster convergence
MAX_COORDINATES = 255  # with 32,000 tokens these take 25 s on two cores that also do other work
UNCLIPPED = 0.9       # fraction of the occurring tokens whose coordinates are not shortened
RIDGE = 1e-3          # ridge of the classifier's regression, relative to a column's mean square


class LogRatios:
    """
    log(p(b | a) / p(b)) for all pairs of tokens (a, b), where b occurs at a fixed distance from a:
    a matrix (V, V). It is stored as one number per row, the value of all unseen pairs, plus a
    sparse matrix of the seen pairs' differences from it.

    p(b | a) is estimated by absolute discounting: DISCOUNT occurrences of each seen pair, and one
    more of each a, are redistributed over all b in proportion to their frequency.
    https://doi.org/10.1006/csla.1994.1001

    firsts, seconds: (n,) int64, a and b at each position of the text; frequency: (V,) float32,
    p(b).
    """

    def __init__(self, firsts, seconds, frequency):
        V = len(frequency)
        pairs, counts = np.unique(firsts * V + seconds, return_counts=True)
        a, b = (torch.from_numpy(tokens) for tokens in np.divmod(pairs, V))
        counts = torch.from_numpy(counts).float()
        total = torch.zeros(V).index_add_(0, a, counts) + 1
        kinds = torch.bincount(a, minlength=V)   # (V,), number of different b seen with each a
        unseen = (DISCOUNT * kinds + 1) / total  # (V,), the ratio of an unseen pair
        seen = (counts - DISCOUNT) / total[a] / frequency[b] + unseen[a]
        self.of_rows = unseen.log()
        self.sparse = torch.sparse_coo_tensor(torch.stack((a, b)), seen.log() - self.of_rows[a],
                                              (V, V), is_coalesced=True, check_invariants=True)

    def times(self, x):
        """Return the product with x (V, n)."""
        return self.sparse @ x + torch.outer(self.of_rows, x.sum(0))

    def transposed_times(self, x):
        """Return the product of the transposed matrix with x (V, n)."""
        return self.sparse.T @ x + self.of_rows @ x


def start_tables(model, tokens):
    """
    Set the embedding and the classifier of an untied Transformer from the tokens (N,) of its
    training text. The master computes them, with PyTorch's default generator; all processes get
    copies.
    """
    started = time.monotonic()
    V, D = model.tok_embeddings.weight.shape
    embedding, classifier = distributed.on_master(tables, tokens, V, D)
    with torch.no_grad():
        model.tok_embeddings.weight.copy_(embedding)
        model.output.weight.copy_(classifier)
    distributed.say(f"start: embedding and classifier initialized from bigram counts in "
                    f"{time.monotonic() - started:.1f} s")


def tables(tokens, V, D):
    """
    Return the embedding and the classifier, both (V, D) float32, from tokens (N,). The rows of the
    embedding have an RMS of 1.
    """
    tokens = np.asarray(sampled(tokens), np.int64)
    counts = torch.bincount(torch.from_numpy(tokens), minlength=V)
    frequency = (counts + 0.5) / (counts + 0.5).sum()  # above 0 also for tokens that do not occur
    following = LogRatios(tokens[:-1], tokens[1:], frequency)
    preceding = LogRatios(tokens[1:], tokens[:-1], frequency)
    next_but_one = LogRatios(tokens[:-2], tokens[2:], frequency)
    ratios = following, preceding, next_but_one

    weight = frequency[:, None]  # (V, 1)
    embedding = rows_of(coordinates(ratios, weight, min(D - 1, MAX_COORDINATES)), counts > 0, D)
    # Regression of log p(b | a) on the rows of a, weighted by the frequency of a.
    weighted = weight * embedding
    covariance = embedding.T @ weighted  # (D, D)
    covariance += RIDGE * covariance.diagonal().mean() * torch.eye(D)
    target = following.transposed_times(weighted) + torch.outer(frequency.log(), weighted.sum(0))
    return embedding, torch.linalg.solve(covariance, target.T).T


def sampled(tokens):
    """Return the tokens (N,), or MAX_TOKENS of them in evenly spaced STRETCHES."""
    if len(tokens) <= MAX_TOKENS:
        return tokens
    length = MAX_TOKENS // STRETCHES
    starts = np.linspace(0, len(tokens) - length, STRETCHES).astype(int)
    return np.concatenate([tokens[start:start + length] for start in starts])


def coordinates(ratios, weight, count):
    """
    Return the `count` principal coordinates of largest variance, (V, count), or (V, V) if
    V < count, of all LogRatios, concatenated along their columns. Rows and columns are weighted by
    frequency. ratios: a tuple of LogRatios; weight: (V, 1), the frequencies.
    """
    root = weight.sqrt()

    def squared_times(x):
        """Return A A^T x, where A (V, V times len(ratios)) is the weighted matrix."""
        x = root * x
        return root * sum(r.times(weight * r.transposed_times(x)) for r in ratios)

    # Subspace iteration: https://arxiv.org/abs/0909.4061
    V = len(weight)
    basis = torch.randn(V, min(V, count + MARGIN))
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(squared_times(basis))[0]
    values, vectors = torch.linalg.eigh(basis.T @ squared_times(basis))  # in ascending order
    vectors, values = vectors.flip(1)[:, :count], values.flip(0)[:count]
    return basis @ vectors * values.clamp(min=0).sqrt() / root


def rows_of(points, occurs, D):
    """
    Return rows (V, D) of length sqrt(D) from the coordinates of points (V, n), n < D. All
    coordinates share one scale, but those of the longest rows are shortened, and those of tokens
    that do not occur are 0, so that these tokens share one row. occurs: (V,) bool.

    A first column fills each row up to the same length, so that the model's norms do not change
    the row. The column is at least 0.3 of the length, and serves the classifier as the constant of
    its regression. A random rotation then spreads the coordinates over all columns, because AdamW
    scales each column separately.
    """
    lengths = points.norm(dim=1, keepdim=True)
    limit = torch.quantile(lengths[occurs], UNCLIPPED).clamp(min=1e-9)
    kept = points / torch.maximum(lengths, limit) * occurs[:, None]  # at most 1 long
    rows = torch.zeros(len(kept), D)
    rows[:, 1:1 + kept.shape[1]] = 0.95 * kept
    rows[:, 0] = (1 - rows.square().sum(1)).sqrt()
    rotation = torch.linalg.qr(torch.randn(D, D))[0]
    return D ** 0.5 * rows @ rotation
