"""TensorBoard: https://www.tensorflow.org/tensorboard. Metrics, texts, histograms over tokens."""
import os

from engine.tracking.destination import Destination
from engine.tracking.log import TABLES


class TensorBoard(Destination):
    """Event files in out_dir/tensorboard."""
    title, package, knob = "TensorBoard", "tensorboard", "tensorboard_log"
    own_process = False  # it only writes files

    def __init__(self, session):
        """
        Open the folder for more event files. Points after session.last_row, the last row kept in
        log.jsonl, are dropped, because this session writes them again.
        """
        from torch.utils.tensorboard import SummaryWriter
        self.tokens = session.last_row.get("tokens")
        first = self.tokens + 1 if isinstance(self.tokens, int) else None  # None: drop nothing
        folder = os.path.join(session.out_dir, "tensorboard")
        self.writer = SummaryWriter(folder, purge_step=first, flush_secs=10)

    def log(self, row):
        self.tokens = row["tokens"]
        for name, value in row.items():
            if isinstance(value, dict):
                self.histogram(name, value["counts"], value["edges"])
            elif isinstance(value, list):
                self.writer.add_text(name, markdown([TABLES[name], *value]), self.tokens)
            else:
                self.writer.add_scalar(name, float(value), self.tokens)

    def histogram(self, name, counts, edges):
        """Write a histogram; its sums are estimates, as if each value was its bucket's center."""
        centers = [(low + high) / 2 for low, high in zip(edges, edges[1:])]
        self.writer.add_histogram_raw(
            name, min=edges[0], max=edges[-1], num=sum(counts),
            sum=sum(n * c for n, c in zip(counts, centers)),
            sum_squares=sum(n * c * c for n, c in zip(counts, centers)),
            bucket_limits=edges[1:], bucket_counts=counts, global_step=self.tokens)

    def alert(self, title, text):
        self.writer.add_text("alerts", f"{title}: {text}", self.tokens)

    def finish(self, failed=False):
        self.writer.close()


def markdown(rows):
    """Return a table in Markdown; its first row is the header."""
    header, *rows = rows
    rows = [header, ["---"] * len(header), *rows]
    cells = [[str(cell).replace("\n", " ").replace("|", "¦") for cell in row] for row in rows]
    return "\n".join(map("|".join, cells))
