"""
Anomalies in the rows of a log: metrics outside of their usual range, and sudden changes.

This only reports them. optim.SpikeDetector decides before each step whether to take it, by a
running mean of all steps that is saved in checkpoints.
"""
import math
import statistics
from collections import defaultdict, deque
from typing import NamedTuple

from engine.streams import console_notes

# {prefix of metrics: (min, max, what a value outside means)}; the limits are exclusive.
RANGES = {
    "norm/activation": (
        1e-4, 1e4, "the layer's output has vanished or exploded; check the norms and the "
                   "learning_rate"),
    "dead": (
        -1, 0.5, "more than half of the layer's hidden units stay near zero for every token; check "
                 "the learning_rate"),
    "attention/entropy": (
        0.01, 2, "each head of the layer attends to a single token whatever the text: the "
                 "attention scores have exploded"),
    "norm/grad": (
        1e-10, 1e4, "the layer's gradient has vanished or exploded: the layer does not learn, or "
                    "diverges"),
    "norm/update": (
        0.0, 1.0, "a step leaves the layer unchanged, or changes it by more than its own norm; "
                  "check the learning_rate"),
}

# (title, text) of the alerts, with placeholders such as {name} for the values, so that the page can
# translate them.
NOT_FINITE = "{name} is {value}", "at iter {iter}"
SLOW = "the speed has collapsed", "{value} tokens/s at iter {iter}, usual {usual}"
JUMP = "{name} jumps", "{value} at iter {iter}, {deviations} deviations above the usual {usual}"


class Alert(NamedTuple):
    """A warning: one of the pairs above, and its values as text, {name: text}."""
    title: str
    text: str
    values: dict

    def words(self):
        """Return (title, text) with their values."""
        return self.title.format(**self.values), self.text.format(**self.values)


class AnomalyDetector:
    """Finds the metrics of a row that deserve a warning."""

    WATCHED = ("loss/train", "loss/val", "grad/norm", "perf/tokens_per_sec")  # for sudden changes
    MEMORY = 50         # rows of a metric that a new value is compared with
    MIN_ROWS = 10       # rows before the first comparison
    MAX_DEVIATIONS = 6  # above the mean, each a standard deviation plus 2 % of the mean

    def __init__(self, noted=None):
        """
        noted: list of the prefixes of RANGES that were reported already; it is extended in place,
        and a checkpoint keeps it. None: ranges are not checked, because the metrics are those of
        another program.
        """
        self.noted = noted
        self.past = defaultdict(lambda: deque(maxlen=self.MEMORY))

    def out_of_range(self, row):
        """
        Return rows of the table `notes`: the first metric outside of RANGES for each prefix, and
        each of stdout and stderr that could not be written since the last call.
        """
        if self.noted is None:
            return []
        notes = console_notes()
        for name, value in row.items():
            prefix = next((prefix for prefix in RANGES if name.startswith(f"{prefix}/")), None)
            if prefix is None or prefix in self.noted:
                continue
            low, high, meaning = RANGES[prefix]
            if not low < value < high:
                self.noted.append(prefix)
                notes.append([name, value, meaning])
        return notes

    def sudden_changes(self, row):
        """Return [(title, text)] of the alerts for a row."""
        return [alert.words() for alert in self.alerts(row)]

    def alerts(self, row):
        """
        Return [Alert] for a loss or gradient norm that is not finite or far above the recent ones,
        and for a speed below a third of the median.
        """
        alerts = []
        for name in self.WATCHED:
            value, past = row.get(name), self.past[name]
            if value is None:
                continue
            if not math.isfinite(value):
                iteration = f"{row['iter']:.0f}"
                values = {"name": name, "value": str(value), "iter": iteration}
                alerts.append(Alert(*NOT_FINITE, values))
                continue
            if len(past) >= self.MIN_ROWS:
                alerts += self.compare(name, value, past, row["iter"])
            past.append(value)
        return alerts

    def compare(self, name, value, past, iteration):
        """Return [Alert] if a value is far from the past ones of its metric."""
        values = {"name": name, "iter": f"{iteration:.0f}"}
        if name == "perf/tokens_per_sec":
            usual = statistics.median(past)
            if value < usual / 3:
                values |= {"value": f"{value:,.0f}", "usual": f"{usual:,.0f}"}
                return [Alert(*SLOW, values)]
            return []
        mean = statistics.fmean(past)
        deviations = (value - mean) / (statistics.pstdev(past) + 0.02 * abs(mean) + 1e-12)
        if deviations > self.MAX_DEVIATIONS:
            values |= {"value": f"{value:.4g}", "usual": f"{mean:.4g}",
                       "deviations": f"{deviations:.0f}"}
            return [Alert(*JUMP, values)]
        return []
