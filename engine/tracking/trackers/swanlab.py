"""SwanLab: https://docs.swanlab.cn. Metrics and tables over iter; it has no histograms."""
import os
from pathlib import Path

from engine.tracking.destination import Destination
from engine.tracking.log import TABLES, tables_of
from engine.tracking.network import is_reachable


class SwanLab(Destination):
    """
    A SwanLab run. SWANLAB_MODE, if set, is its mode. Otherwise it is online if SWANLAB_API_KEY or a
    login is found and the server can be reached. If not, it is offline, and `swanlab sync` uploads
    it later from out_dir/swanlab.
    """
    title, package, knob = "SwanLab", "swanlab", "swanlab_log"
    variables = {"project": "SWANLAB_PROJ_NAME", "name": "SWANLAB_EXP_NAME",
                 "group": "SWANLAB_GROUP", "tags": "SWANLAB_TAGS", "notes": "SWANLAB_DESCRIPTION",
                 "job_type": "SWANLAB_JOB_TYPE"}

    def __init__(self, session):
        import swanlab
        self.swanlab, run = swanlab, session.run
        host = os.environ.get("SWANLAB_API_HOST", "https://api.swanlab.cn")
        login = Path("~/.swanlab/.netrc").expanduser()
        has_key = os.environ.get("SWANLAB_API_KEY") or login.exists()
        mode = os.environ.get("SWANLAB_MODE")
        mode = mode or ("online" if has_key and is_reachable(host) else "offline")
        options = {name: run[name] for name in ("id", "group", "tags", "job_type") if name in run}
        if not os.environ.get("SWANLAB_LOGDIR"):
            options["log_dir"] = os.path.join(session.out_dir, "swanlab")
            os.makedirs(options["log_dir"], exist_ok=True)
        self.run = swanlab.init(mode=mode, config=session.config, project=run["project"],
                                name=run["name"], description=run.get("notes"),
                                resume="allow" if mode == "online" else None, **options)
        if mode == "online":
            self.say(f"tracking: SwanLab online: {self.run.url}")
        elif mode != "disabled":
            self.say(f"tracking: SwanLab {mode}; upload it later with: swanlab sync {self.run.dir}")

    def log(self, row):
        logged = {name: v for name, v in row.items() if isinstance(v, (int, float))}
        for name in tables_of(row):
            table = logged[f"tables/{name}"] = self.swanlab.echarts.Table()
            table.add(TABLES[name], row[name])
        self.swanlab.log(logged, step=row["iter"])

    def finish(self, failed=False):
        self.swanlab.finish("crashed" if failed else "success")
