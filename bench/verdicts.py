"""
Measure the error rates of verdicts (engine/verdict.py) on simulated groups of runs, whose noise and
difference are known.

    python bench/verdicts.py                 40,000 pairs of groups for each row of the table
    python bench/verdicts.py --pairs=1000

The last columns are shares of pairs. wrong: groups with equal means that are called different,
which should be 5 %. covered: groups with different means whose 95 % interval contains the true
difference. found: groups with different means that are called different.
"""
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from configurator import configure
from engine.verdict import LEVEL, interval, p_value

pairs = 40_000   # simulated pairs of groups for each row of the table
effect = 2.0     # true difference of A/B, in standard deviations of A
seed = 0         # seed of the simulation

# ((runs of A, of B), (standard deviation of A, of B), whether runs are paired by seed)
SAME_SIZE = [((n, n), deviations, is_paired) for n in range(3, 9)
             for deviations in ((1, 1), (1, 3)) for is_paired in (True, False)]
OTHER_SIZES = [((3, 8), deviations, False) for deviations in ((1, 1), (1, 3), (2, 1), (3, 1))]
CASES = SAME_SIZE + OTHER_SIZES


def simulate(rng, pairs, case, effect):
    """
    Return (differences of means, variances, counts) of simulated pairs of groups, in the format of
    engine.verdict. In a paired case, runs of the same seed share noise whose standard deviation is
    three times the larger one of the case.
    """
    counts, deviations, is_paired = case
    a, b = (rng.normal(0, deviation, (pairs, n)) for n, deviation in zip(counts, deviations))
    b += effect
    if is_paired:
        shared = rng.normal(0, 3 * max(deviations), a.shape)
        differences = (b + shared) - (a + shared)
        return differences.mean(1), differences.var(1, ddof=1, keepdims=True), np.array(counts[:1])
    variances = np.stack((a.var(1, ddof=1), b.var(1, ddof=1)), -1)
    return b.mean(1) - a.mean(1), variances, np.array(counts)


def rates(rng, pairs, case, effect):
    """Return the shares of pairs that are wrong, covered and found."""
    wrong = p_value(*simulate(rng, pairs, case, 0)) < 1 - LEVEL
    samples = simulate(rng, pairs, case, effect)
    low, high = interval(*samples)
    found = p_value(*samples) < 1 - LEVEL
    return wrong.mean(), ((low < effect) & (effect < high)).mean(), found.mean()


def main():
    rng = np.random.default_rng(seed)
    print("| runs | deviations | test | wrong | covered | found |\n"
          "| --- | --- | --- | ---: | ---: | ---: |")
    for case in CASES:
        counts, deviations, is_paired = case
        test = "paired" if is_paired else "Welch"
        shown = " | ".join(f"{100 * rate:.1f} %" for rate in rates(rng, pairs, case, effect))
        print(f"| {counts[0]}, {counts[1]} | {deviations[0]}, {deviations[1]} | {test} | {shown} |",
              flush=True)


if __name__ == "__main__":
    configure(globals())
    main()
