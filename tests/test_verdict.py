"""
Verdicts on groups of results: error rates in simulations, Student's t compared with mpmath, and the
sentences.
"""
import math

import mpmath
import numpy as np
import pytest

from bench.verdicts import CASES, rates
from engine import verdict
from engine.verdict import judge, sentence

# Published quantiles of Student's t at 97.5 %, by degrees of freedom.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980}
DF = [1, 1.01, 1.5, 2, 2.37, 3, 4.7, 7.9, 30, 317.3, 1999.9, 2001, 12345.6, 1e6, 1e10]


def test_the_quantiles_of_student_are_those_of_tables_and_of_mpmath():
    assert verdict.t_quantile(0.975, list(TABLE)).tolist() == pytest.approx(
        list(TABLE.values()), abs=5e-4)
    probabilities = np.array([0.005, 0.2, 0.5, 0.8, 0.95, 0.975, 0.995])
    found = verdict.t_quantile(probabilities, np.array(DF)[:, None])
    mpmath.mp.dps = 40
    for df, row in zip(map(mpmath.mpf, DF), found.tolist()):
        for probability, t in zip(probabilities.tolist(), map(mpmath.mpf, row)):
            tail = mpmath.betainc(df / 2, 0.5, 0, df / (df + t * t), regularized=True) / 2
            density = (mpmath.gamma((df + 1) / 2) / mpmath.gamma(df / 2)
                       / mpmath.sqrt(df * mpmath.pi) * (1 + t * t / df) ** (-(df + 1) / 2))
            error = (min(probability, 1 - probability) - tail) / density  # of t, by one Newton step
            assert abs(error) < 1e-10 * (1 + abs(t)), (df, probability, t, error)


def test_the_probability_is_that_of_mpmath():
    """
    Student: t = 2 with 4 degrees of freedom. Welch: 3 values with mean 1 and variance 1, 5 values
    with mean 3 and variance 7.
    """
    mpmath.mp.dps = 30
    tail = lambda t, df: float(mpmath.betainc(df / 2, 0.5, 0, df / (df + t * t), regularized=True))
    error = (1 / 3 + 7 / 5) ** 0.5
    df = error ** 4 / ((1 / 3) ** 2 / 2 + (7 / 5) ** 2 / 4)
    assert verdict.p_value(2.0, np.array([5.0]), np.array([5])) == pytest.approx(
        tail(2, 4), abs=1e-12)
    assert verdict.p_value(2.0, np.array([1.0, 7.0]), np.array([3, 5])) == pytest.approx(
        tail(2 / error, df), abs=1e-12)
    assert verdict.p_value(1e9, np.array([5.0]), np.array([50])) == pytest.approx(0, abs=1e-12)


def test_errors_are_as_often_as_said():
    """
    Equal groups (A/A) are called different in 5 % of the simulations, and the interval contains the
    true difference (A/B) in 95 %, both within 2 percentage points. The last two cases are left out:
    their smaller group is the noisier one (doc/lab/verdicts.md).
    """
    rng = np.random.default_rng(0)
    for case in CASES[:-2]:
        wrong, covered, _ = rates(rng, 5000, case, 2.0)
        assert abs(wrong - 0.05) < 0.02 and abs(covered - 0.95) < 0.02, (case, wrong, covered)


@pytest.mark.parametrize("worth, deviations, is_paired", [
    (3.0, (1, 1), True), (1.5, (1, 1), True), (0.8, (1, 2), True),
    (3.0, (1, 1), False), (1.5, (1, 1), False), (0.8, (1, 2), False)])
def test_so_many_more_seeds_show_the_difference_in_four_of_five_cases(worth, deviations, is_paired):
    variances = np.array(deviations, float) ** 2
    variances = variances.sum(keepdims=True) if is_paired else variances
    more = verdict.missing_seeds(worth, variances, np.full(len(variances), 2))
    rng = np.random.default_rng(1)
    power = [rates(rng, 2500, ((2 + n, 2 + n), deviations, is_paired), worth)[2]
             for n in (more - 1, more)]
    assert power[0] < 0.82 and power[1] > 0.77, (more, power)


A, B = {1: 1.301, 2: 1.298, 3: 1.306}, {3: 1.291, 1: 1.290, 2: 1.288}


def test_groups_of_the_same_seeds_are_paired_by_seed_and_others_are_not():
    paired = judge(A, B)
    assert paired.paired
    assert paired.n_a == paired.n_b == 3
    assert paired.difference == pytest.approx(-0.012)
    half = 4.302652729749464 * np.std([-0.011, -0.010, -0.015], ddof=1) / 3 ** 0.5
    assert (paired.low, paired.high) == pytest.approx((-0.012 - half, -0.012 + half))
    assert paired.distinguishable
    assert paired.p < 0.05
    for others in (list(A.values()), list(B.values())), ({**A, 4: 1.3}, B), (list(A.values()), B):
        assert not judge(*others).paired
    # The interval of pairs is narrower, because the runs of a pair share their noise.
    assert judge(list(A.values()), list(B.values())).high - paired.high > 0.001
    assert judge([1, 2, 3], [1.5, 2.5], worth=0.25).worth == 0.25
    assert judge([1.04, 1.05], [1.04, 1.06]).worth == 0.01
    assert judge([1.04, 1.05], [1.06, 1.10]).worth == 0.04  # the observed difference


def test_sentences():
    assert sentence(judge(A, B), unit="bits per byte") == (
        "B is better by 0.012 bits per byte (95 % interval 0.005 to 0.019, n = 3)")
    assert sentence(judge(B, A)) == "A is better by 0.012 (95 % interval 0.005 to 0.019, n = 3)"
    assert sentence(judge(A, B), lower_is_better=False).startswith("A is better by 0.012")
    assert sentence(judge(A, B), "out/a", "out/b", lower_is_better=None).startswith(
        "out/a is higher by 0.012")
    x, y = [1.301, 1.310, 1.280], [1.305, 1.297, 1.290, 1.300]
    found = judge(x, y, 0.01)
    assert sentence(found, unit="bits per byte") == (
        f"not distinguishable; {found.more} more seeds each would show a difference of 0.01 "
        "(B minus A: 0.001 bits per byte, 95 % interval -0.033 to 0.035, n = 3 and 4)")
    assert "distinguishable; the seeds are enough to show a difference of 1 (" in sentence(
        judge(x, y, 1))
    assert (f"even {verdict.MAX_MORE:,} more seeds each would not show a difference of 1e-05"
            in sentence(judge(x, y, 1e-5)))
    assert sentence(
        judge([71_850.4, 71_230.0, 70_980.2], [64_120.0, 64_533.0, 63_900.0]), unit="tokens/s",
        lower_is_better=False).startswith("A is better by 7,169 tokens/s (95 % interval 6,")
    assert "by 0.034 (95 % interval 0.004 to 0.064" in sentence(
        judge(A, B)._replace(difference=-0.034, low=-0.064, high=-0.004))


def test_groups_without_noise():
    """Runs with equal seeds on a CPU have bit-identical results."""
    same = judge(A, dict(A))
    assert (same.difference, same.low, same.high, same.p, same.distinguishable, same.more) == (
        0, 0, 0, 1, False, 0)
    assert sentence(same) == "no difference: A and B have the same results (n = 3)"
    other = judge([2.0, 2.0], [2.5, 2.5])
    assert other.p == 0
    assert other.distinguishable
    assert sentence(other).startswith("A is better by 0.5 (95 % interval 0.5 to 0.5")
    assert judge([2.0, 2.0], [2.5, 2.75]).low < 0.3  # without noise on one side only


def test_a_single_seed_shows_no_noise():
    for one in judge({1: 2.0}, {1: 1.9}), judge([2.0], [1.9, 1.95, 1.93]):
        assert math.isnan(one.p)
        assert math.isnan(one.low)
        assert one.more is None
        assert not one.distinguishable
    assert sentence(judge({1: 2.0}, {1: 1.9}), unit="nats") == (
        "not distinguishable: a single seed shows no noise; train at least 2 each, as with "
        "--seeds=2 (B minus A: -0.10 nats, n = 1)")


@pytest.mark.parametrize("a, b, message", [
    ([], [1.0], "no results"), ([1.0], {}, "no results"),
    ([1.0, math.nan], [1.0], "not a finite"), ({1: math.inf}, {1: 1.0}, "not a finite")])
def test_groups_that_cannot_be_judged_are_refused(a, b, message):
    with pytest.raises(ValueError, match=message):
        judge(a, b)
