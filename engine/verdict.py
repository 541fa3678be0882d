"""
Decide whether two groups of results differ by more than the noise of their seeds.

    a = {1: 1.301, 2: 1.298, 3: 1.306}  # {seed: result of the run with this seed}
    b = {1: 1.290, 2: 1.288, 3: 1.291}
    verdict = judge(a, b)
    print(sentence(verdict, "A", "B", unit="bits per byte"))

    B is better by 0.012 bits per byte (95 % interval 0.005 to 0.019, n = 3)

If both groups have the same seeds, the results are paired by seed, and Student's t test is applied
to the differences of the pairs. Otherwise the groups are compared by Welch's t test, which allows
different variances. Both assume that results of different seeds are independent and approximately
normally distributed. Accuracy of these tests in simulations: doc/lab/verdicts.md.

Welch's degrees of freedom: https://doi.org/10.1093/biomet/34.1-2.28
"""
import bisect
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

LEVEL = 0.95      # confidence of the interval; a difference is significant if p < 1 - LEVEL
POWER = 0.8       # probability with which `more` seeds detect a difference
WORTH = 0.01      # smallest difference worth detecting, relative to the mean
MAX_MORE = 10_000  # max number of additional seeds
NODES, WEIGHTS = np.polynomial.legendre.leggauss(64)  # quadrature from -1 to 1


class Verdict(NamedTuple):
    """
    The comparison of two groups of results, A and B.

    difference: mean of B minus mean of A. low, high: ends of its 95 % interval. p: probability of a
    difference at least as large if A and B have the same mean. low, high and p are NaN if a group
    has a single result, from which no noise can be estimated.
    n_a, n_b: numbers of results. paired: whether they were paired by seed.
    distinguishable: whether p < 0.05.
    worth: smallest difference worth detecting. more: number of seeds to add to each group to detect
    such a difference with probability 0.8; 0 if there are enough, MAX_MORE if even that many are
    too few, None if a group has a single result. It is only as accurate as the variances that it
    is estimated from.
    """
    difference: float
    low: float
    high: float
    p: float
    n_a: int
    n_b: int
    paired: bool
    distinguishable: bool
    worth: float
    more: int | None


def judge(a, b, worth=None):
    """
    Return the Verdict on two groups of results.

    a, b: {seed: result} if the seeds are known, otherwise lists of results. worth: smallest
    difference worth detecting; None: the difference of the means, but at least 1 % of the mean,
    rounded to one digit. Raises ValueError if a group is empty or a result is not finite.
    """
    is_paired = isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys()
    if is_paired:
        b = {seed: b[seed] for seed in a}  # in the order of a
    x, y = (np.array(list(group.values() if isinstance(group, Mapping) else group), float)
            for group in (a, b))
    if not len(x) or not len(y):
        raise ValueError("a group has no results; expected at least one in each")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("a result is not a finite number; leave such runs out and report it")
    difference, samples = y.mean() - x.mean(), [y - x] if is_paired else [x, y]
    if worth is None:
        worth = rounded(max(abs(difference), WORTH * abs(np.concatenate((x, y)).mean())))
    counts = np.array([len(sample) for sample in samples])
    low, high, p, more = math.nan, math.nan, math.nan, None
    if counts.min() > 1:
        variances = np.array([sample.var(ddof=1) for sample in samples])
        low, high = map(float, interval(difference, variances, counts))
        p = float(p_value(difference, variances, counts))
        more = missing_seeds(worth, variances, counts)
    return Verdict(float(difference), low, high, p, len(x), len(y), is_paired, p < 1 - LEVEL,
                   float(worth), more)


# ---- tests ---------------------------------------------------------------------------------------

def standard_error(variances, counts):
    """
    Return (standard error, degrees of freedom) of the sum or difference of means, (...,) each.
    variances: of the k samples, (..., k); counts: their sizes, (k,). The degrees of freedom are
    Student's for one sample and Welch's for two.
    """
    parts = variances / counts
    total = parts.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        df = total ** 2 / (parts ** 2 / (counts - 1)).sum(-1)
    return np.sqrt(total), np.where(total > 0, df, (counts - 1).sum())


def interval(difference, variances, counts):
    """
    Return (low, high), (...,) each: the 95 % interval of a difference of means, (...,). variances,
    counts: see standard_error.
    """
    error, df = standard_error(variances, counts)
    half = error * t_quantile((1 + LEVEL) / 2, df)
    return difference - half, difference + half


def p_value(difference, variances, counts):
    """
    Return the probability of a difference of means at least as large, (...,), if the true one is 0.
    variances, counts: see standard_error.
    """
    error, df = standard_error(variances, counts)
    with np.errstate(invalid="ignore", divide="ignore"):
        t = np.abs(difference) / error
    # Without noise, p is 1 for equal means and 0 for others.
    p = np.where(error > 0, 1 - central(np.arctan(t / np.sqrt(df)), df), difference == 0)
    return np.clip(p, 0.0, 1.0)


def missing_seeds(worth, variances, counts):
    """
    Return the number of seeds to add to each group to detect a difference of `worth` with
    probability POWER, at most MAX_MORE. variances, counts: see standard_error.
    """
    def shows(more):
        error, df = standard_error(variances, counts + more)
        return worth >= error * (t_quantile((1 + LEVEL) / 2, df) + t_quantile(POWER, df))

    return bisect.bisect_left(range(MAX_MORE), True, key=shows)


# ---- Student's t distribution --------------------------------------------------------------------
# With t = sqrt(df) tan(angle), the density of |t| is a constant times cos(angle)^(df - 1): smooth
# and falling between 0 and pi/2, for any df of at least 1.

def density(angle, df):
    """Return the density of |t| by its angle, from 0 to pi/2; df: degrees of freedom, >= 1."""
    # log(gamma(x + 1/2) / gamma(x)); for a large x the difference of lgamma loses too many digits.
    x = np.asarray(df, float) / 2
    small = np.minimum(x, 1e3)
    ratio = np.vectorize(math.lgamma, otypes=[float])
    log_ratio = np.where(x < 1e3, ratio(small + 0.5) - ratio(small), np.log(x) / 2 - 1 / (8 * x))
    # log1p, because cos(angle) is close to 1 where df is large
    return 2 / math.sqrt(math.pi) * np.exp(log_ratio + (x - 0.5) * np.log1p(-np.sin(angle) ** 2))


def central(angle, df):
    """Return the probability that the angle of |t| is below `angle`; shapes are broadcast."""
    angle, df = np.broadcast_arrays(np.asarray(angle, float), df)
    at = angle[..., None] * (NODES + 1) / 2
    return angle / 2 * (density(at, df[..., None]) @ WEIGHTS)


def t_quantile(probability, df):
    """
    Return the t below which Student's distribution has this probability, (...,). probability:
    between 0 and 1; df: degrees of freedom, at least 1, not necessarily whole. Shapes are
    broadcast. The relative error is below 1e-10 for probabilities from 0.005 to 0.995.
    """
    probability, df = np.broadcast_arrays(np.asarray(probability, float), df)
    target = np.abs(2 * probability - 1)
    angle = np.zeros(target.shape)
    # Newton's method. `central` is concave, so each step ends below the solution, or on it.
    for _ in range(60):
        step = (target - central(angle, df)) / density(angle, df)
        angle = np.clip(angle + step, 0.0, math.pi / 2)
        if np.max(np.abs(step) / np.maximum(angle, 1e-300), initial=0.0) < 1e-14:
            break
    return np.sign(probability - 0.5) * np.sqrt(df) * np.tan(angle)


# ---- words ---------------------------------------------------------------------------------------

def rounded(value, digits=1):
    """Return a value rounded to this number of significant digits."""
    return float(f"{value:.{digits - 1}e}")


def decimals_for(*values):
    """Return the number of decimals that shows the first digit of the smallest of these values."""
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    if not sizes:
        return 3
    smallest = max(min(sizes), max(sizes) / 1000)  # more than 4 digits are noise
    return max(0, -math.floor(math.log10(rounded(smallest))))


def sentence(verdict, a="A", b="B", unit="", lower_is_better=True):
    """
    Return a Verdict in words. a, b: names of the groups; unit: of the results, such as "bits per
    byte"; lower_is_better: False if a larger result is better, None if neither is.
    """
    difference, low, high = verdict.difference, verdict.low, verdict.high
    unit, n = unit and f" {unit}", f"n = {verdict.n_a}"
    if not verdict.paired:
        n += f" and {verdict.n_b}"
    if verdict.more is None:
        places = decimals_for(difference / 10)
        return (f"not distinguishable: a single seed shows no noise; train at least 2 each, as "
                f"with --seeds=2 ({b} minus {a}: {difference:,.{places}f}{unit}, {n})")
    half = (high - low) / 2
    if low == high == 0:
        return f"no difference: {a} and {b} have the same results ({n})"
    if verdict.distinguishable:
        b_wins = difference > 0 if lower_is_better is None else (difference < 0) == lower_is_better
        word = "higher" if lower_is_better is None else "better"
        ends, places = sorted((abs(low), abs(high))), decimals_for(low, high, half)
        return (f"{b if b_wins else a} is {word} by {abs(difference):,.{places}f}{unit} (95 % "
                f"interval {ends[0]:,.{places}f} to {ends[1]:,.{places}f}, {n})")
    places = decimals_for(half / 10)
    return (f"not distinguishable; {needed(verdict)} ({b} minus {a}: {difference:,.{places}f}{unit}"
            f", 95 % interval {low:,.{places}f} to {high:,.{places}f}, {n})")


def needed(verdict):
    """Return in words the difference that the seeds can show, or how many more are needed."""
    shown, more = f"a difference of {verdict.worth:g}", verdict.more
    if not more:
        return f"the seeds are enough to show {shown}"
    if more == MAX_MORE:
        return f"even {MAX_MORE:,} more seeds each would not show {shown}"
    return f"{more:,} more seed{'s' * (more > 1)} each would show {shown}"
