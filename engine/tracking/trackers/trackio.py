"""trackio: https://github.com/gradio-app/trackio. Metrics, tables and histograms over iter."""
import shlex

from engine.tracking.destination import Destination
from engine.tracking.log import TABLES, convert_row


class Trackio(Destination):
    """A trackio run in trackio's own folder on this machine, for `trackio show`."""
    title, package, knob = "trackio", "trackio", "trackio_log"

    def __init__(self, session):
        import trackio
        self.trackio, project = trackio, session.run["project"]
        run = trackio.init(project, session.run["id"], group=session.run.get("group"),
                           config=session.config, resume="allow", embed=False,
                           auto_log_cpu=False, auto_log_gpu=False)
        # Private in trackio: the step after the last logged one, if the run is resumed.
        next_step = getattr(run, "_next_step", 0)
        self.next_step = next_step if isinstance(next_step, int) else 0
        self.say(f"tracking: trackio: trackio show --project {shlex.quote(project)}")

    def log(self, row):
        if row["iter"] >= self.next_step:  # trackio would append an earlier row a second time
            self.trackio.log(convert_row(row, self.table, self.histogram), step=row["iter"])

    def table(self, name, lines):
        return self.trackio.Table(columns=TABLES[name], data=lines)

    def histogram(self, counts_and_edges):
        return self.trackio.Histogram(np_histogram=counts_and_edges)

    def alert(self, title, text):
        self.trackio.alert(title, text, level=self.trackio.AlertLevel.WARN)

    def finish(self, failed=False):
        self.trackio.finish()
