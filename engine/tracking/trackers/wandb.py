"""Track a run in Weights & Biases (https://docs.wandb.ai), online or offline."""
import json
import math
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

from engine.files import sha256, write_atomic
from engine.system import IS_WINDOWS
from engine.tracking.destination import FINISH_SECONDS, Destination, presentable, sync_command
from engine.tracking.log import TABLES, convert_row, read_rows, rising_rows
from engine.tracking.redact import redact
from engine.tracking.source import ROOT, git_remote
from engine.tracking.wandb_client import (
    COUNT_SECONDS, about, client_records, client_rows, count_rows, existing_folders, file_settings,
    reason, user_setting, wandb_mode, wandb_run, wandb_server)

SERVER_SECONDS = 15  # max wait for the server; then the run is offline


class Wandb(Destination):
    """
    A W&B run, one row for each logged step. The x axis of its charts is Session.x. Tables are in
    the section tables/, below the charts.
    """
    title, package, knob = "W&B", "wandb", "wandb_log"
    waits_at_end = True
    reason = staticmethod(reason)

    def __init__(self, session, mode=None):
        """
        Start the run, and log the rows of log.jsonl up to Session.step that the run lacks. mode:
        (mode, why) to use instead of wandb_mode(); finish() then skips its checks of the server.
        """
        self.session, self.counts_rows = session, mode is None
        mode, why = mode or wandb_mode()
        # Artifacts wait for their upload in the client's folder `wandb`, not in the home folder.
        folder = os.path.join(os.environ.get("WANDB_DIR", "."), "wandb")
        os.environ.setdefault("WANDB_DATA_DIR", folder)
        os.makedirs(os.environ["WANDB_DATA_DIR"], exist_ok=True)
        import wandb
        self.wandb, self.tables, self.models = wandb, {}, []
        sys.argv[1:] = redact(sys.argv[1:])  # the client records it
        self.run, self.mode, why = self.init(mode, why)
        self.define_metrics()
        if session.out_dir:
            if not (self.run.settings.disable_git or self.run.settings.disable_code):
                self.save_file(Path(session.out_dir, "diff.patch"))
            self.log_missing_rows()
        if self.mode != "disabled":
            self.say(self.started(why))
        self.warn_of_ignored_settings()

    @classmethod
    def resolve(cls, session, given):
        """Return the entries of the run and write them to wandb.json, for its next sessions."""
        earlier = about(session.out_dir)
        if earlier.get("id") != session.run["id"]:
            earlier = {}
        run = presentable(wandb_run(session.run, given, earlier))
        write_atomic(Path(session.out_dir, "wandb.json"), json.dumps(earlier | run, indent=1))
        return run

    @classmethod
    def remedy(cls, session):
        return f"; upload the run later with: {sync_command(session.out_dir)}"

    def init(self, mode, why):
        """
        Return (run, mode, why). If the server can be reached but refuses or fails, start the run
        offline.
        """
        settings = {"init_timeout": SERVER_SECONDS, "login_timeout": SERVER_SECONDS,
                    "finish_timeout": FINISH_SECONDS, "silent": True, "console": "off",
                    "x_transaction_log_flush_interval": 1, "git_root": str(ROOT)}
        if trainer := self.session.trainer:
            settings |= {"console": "wrap", "finish_timeout": 0, "program": sys.argv[0],
                         "x_stats_pid": trainer}  # record this process's use of CPU and memory
            if not IS_WINDOWS:  # there the signal would end training before it saves
                settings["stop_fn"] = lambda: os.kill(trainer, signal.SIGINT)  # stop button
        # Settings given in code would override the user's, so leave out what the user has set.
        settings = {name: v for name, v in settings.items() if user_setting(name) is None}
        settings["git_remote_url"] = redact(user_setting("git_remote_url") or git_remote())
        options = {"config": self.session.config, "settings": self.wandb.Settings(**settings),
                   **self.session.run}
        try:
            resume = "allow" if mode == "online" and user_setting("resume") is None else None
            return self.wandb.init(mode=mode, resume=resume, **options), mode, why
        except self.wandb.errors.CommError as e:
            if mode != "online":
                raise
            self.wandb.teardown()  # otherwise the client refuses the id as in use
            why = f"{wandb_server()} answers with an error: {str(e).splitlines()[0][:80]}"
            return self.wandb.init(mode="offline", **options), "offline", why

    def started(self, why):
        """Return the message with the run's URL, or its folder and the command to upload it."""
        if self.mode == "online":
            return f"tracking: W&B online ({why}): {self.run.url}"
        folder, out_dir = os.path.relpath(self.run.settings.sync_dir), self.session.out_dir
        upload = sync_command(out_dir) if out_dir else shlex.join(["wandb", "sync", folder])
        return f"tracking: W&B {self.mode} ({why}): {folder}; upload it later with: {upload}"

    def warn_of_ignored_settings(self):
        """Warn of a refused value in a settings file: the client then ignores all of the file."""
        # The client splits, drops or ignores these before it checks the file's settings.
        other = ("ignore_globs", "anonymous", "settings_system", "root_dir")
        found = {name: text for name, text in file_settings().items() if name not in other}
        try:
            self.wandb.Settings(**found)
        except ValueError as e:  # such as pydantic's ValidationError
            self.say(f"warning: {reason(e)}; W&B ignores all settings of that file")

    def define_metrics(self):
        x = self.session.x
        for name in ("iter", "tokens"):
            self.run.define_metric(name, summary="last")
        for name in TABLES:  # hide the metrics that the client derives from columns
            self.run.define_metric(f"tables/{name}.*", hidden=True)
        self.run.define_metric("*", step_metric=x)
        self.run.define_metric("loss/val", step_metric=x, summary="min,last")

    def save_file(self, path):
        """Add a small file to the run, if it exists."""
        if path.exists():
            copy = shutil.copy(path, os.path.abspath(self.run.dir))
            self.run.save(copy, base_path=os.path.dirname(copy), policy="now")

    def log_missing_rows(self):
        """
        Add the client's folder to wandb.json. Log the rows that the run lacks, which earlier
        sessions wrote to log.jsonl while W&B was off or failed.
        """
        if self.mode == "disabled":
            return
        out_dir, online = self.session.out_dir, self.mode == "online"
        noted = about(out_dir)
        folders = existing_folders(noted)
        if online:
            noted["url"] = self.run.url
            last = self.run.starting_step - 1
        else:
            rows = [row for folder in folders for row in client_rows(folder)]
            last = max((row.get("iter", -1) for row in rows), default=-1)
        noted["folders"] = [*folders, str(Path(self.run.settings.sync_dir).resolve())]
        write_atomic(Path(out_dir, "wandb.json"), json.dumps(noted, indent=1))
        end = self.session.step or -1  # a new run has no earlier rows, not even of iteration 0
        for row in read_rows(Path(out_dir, "log.jsonl")):
            if last < row["iter"] <= end:
                self.log(row)

    def log(self, row):
        def extended_table(name, lines):
            if name not in self.tables:
                columns = ["iter", "tokens", *TABLES[name]]
                self.tables[name] = self.wandb.Table(columns=columns, log_mode="INCREMENTAL")
            for line in lines:
                self.tables[name].add_data(row["iter"], row["tokens"], *line)
            return self.tables[name]

        def histogram(counts_and_edges):
            return self.wandb.Histogram(np_histogram=counts_and_edges)

        if not self.session.tables:  # the lists of a row are its tables
            row = {name: value for name, value in row.items() if not isinstance(value, list)}
        self.run.log(convert_row(row, extended_table, histogram), step=row["iter"])

    def alert(self, title, text):
        self.run.alert(title, text, level="WARN")

    def console(self, stream, text):
        getattr(sys, stream).write(text)  # the client records what this process prints

    def model(self, path, metrics, aliases):
        """Log a model and its tokenizer as an artifact; `metrics` are its metadata."""
        try:
            files, metrics = {None: path}, metrics | {"sha256": sha256(path)}
            if tokenizer := metrics.get("tokenizer"):
                files[Path(tokenizer).name] = tokenizer
                metrics["tokenizer"] = Path(tokenizer).name
            self.models.append((self.log_artifact(files, metrics, aliases), path))
        except Exception as e:  # the run goes on without it
            self.say(f"warning: {path} is not in W&B ({redact(reason(e))})")

    def log_artifact(self, files, metadata, aliases):
        """Log a model artifact. files: {name in the artifact, or None for the path's name: path}"""
        artifact = self.wandb.Artifact(f"model-{self.run.id}", type="model", metadata=metadata)
        for name, path in files.items():
            artifact.add_file(path, name=name, skip_cache=True)  # skip_cache: make no copy
        self.run.log_artifact(artifact, aliases=aliases)
        return artifact

    def log_models_of(self, folder, after):
        """
        Log the models of later iterations than `after` that an offline session recorded in a folder
        of the client, if their files still exist.
        """
        for record in client_records(folder, "artifact"):
            contents = record["manifest"]["contents"]
            files = {file["path"]: file["local_path"] for file in contents if "local_path" in file}
            metadata = json.loads(record.get("metadata") or "{}")
            is_later = metadata.get("iter", math.inf) > after
            complete = files and all(map(os.path.exists, files.values()))
            if record["type"] == "model" and is_later and complete:
                self.log_artifact(files, metadata, record["aliases"])

    def finish(self, failed=False, rows=None):
        """
        End the run and warn of what the server lacks. rows: number of rows that the run should
        have; None: as many as log.jsonl has.
        """
        self.run.finish(int(failed))
        if self.mode == "online" and self.counts_rows:
            self.check_models()
            self.check_rows(len(rising_rows(self.session.out_dir)) if rows is None else rows)
        self.wandb.teardown()  # writes the rest of an offline run

    def check_models(self):
        """Warn of models that the client could not upload."""
        for artifact, path in self.models:
            try:
                artifact.wait(timeout=COUNT_SECONDS)
            except Exception as e:
                if type(e) is ValueError:  # a failed upload; other errors come from the query
                    name = f"--name={self.run.project}/{artifact.name}"
                    put = ["wandb", "artifact", "put", "--type=model", name, str(path)]
                    self.say(f"warning: {path} is not in W&B ({redact(reason(e))}); send it with: "
                             f"{shlex.join(put)}")

    def check_rows(self, expected):
        """Warn if the server lacks rows, since the client gives up sending without a message."""
        out_dir = self.session.out_dir
        remedy = f"; send what is missing with: {sync_command(out_dir)}" if out_dir else ""
        run = {"entity": self.run.entity, "project": self.run.project, "id": self.run.id}
        try:
            rows = count_rows(run, expected)
        except Exception as e:  # a broken server may answer anything
            self.say(f"warning: could not find out which of the run's {expected} rows W&B has "
                     f"({redact(reason(e))}){remedy}")
            return
        if rows < expected:
            self.say(f"warning: W&B has {rows} of the run's {expected} rows{remedy}")
