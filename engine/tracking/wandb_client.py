"""
Read the settings of the W&B client, the runs that it wrote, and the state of runs on its server.

The client itself is imported only where it is used.
"""
import configparser
import json
import netrc
import os
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from engine.tracking.destination import error_line, resolve_run
from engine.tracking.network import is_reachable
from engine.untrusted import read_json

COUNT_SECONDS = 5  # max wait until the server has counted the rows that it received

# {entry of Session.run: the client's setting}
RUN_SETTINGS = {"id": "run_id", "project": "project", "entity": "entity", "name": "run_name",
                "group": "run_group", "tags": "run_tags", "notes": "run_notes",
                "job_type": "run_job_type"}
# {the client's setting: its environment variable}, if the name is not WANDB_<SETTING>
VARIABLES = {"run_name": "WANDB_NAME", "run_tags": "WANDB_TAGS", "run_notes": "WANDB_NOTES",
             "run_job_type": "WANDB_JOB_TYPE"}
# {the client's setting: the flag of train.py}
FLAGS = {"project": "--wandb_project", "run_name": "--wandb_run_name"}


# ---- settings -----------------------------------------------------------------------------------

def settings_files():
    """Return the client's settings files. The second overrides the first."""
    user = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb", "settings").expanduser()
    local = ".wandb" if Path(".wandb").exists() else "wandb"
    return [user, Path(local, "settings")]


def read_settings(files):
    """Return {name: text} of the client's settings files, {} if they can't be read."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(files)
        return dict(parser["default"]) if "default" in parser else {}
    except (OSError, ValueError, configparser.Error):
        return {}


def file_settings():
    """Return {name: text} of all settings in the client's files."""
    return read_settings(settings_files())


def variable_of(setting):
    """Return the environment variable of a setting of the client."""
    if setting.startswith("x_"):  # internal settings of the client
        return f"WANDB__{setting.removeprefix('x_').upper()}"
    return VARIABLES.get(setting, f"WANDB_{setting.upper()}")


def user_setting(setting):
    """Return the user's value of a client setting, from the environment or a file, or None."""
    return os.environ.get(variable_of(setting)) or file_settings().get(setting)


def origin(setting, value):
    """Return a phrase that names the source of a setting's value, such as "from ~/settings"."""
    variable = variable_of(setting)
    if os.environ.get(variable) == value:
        return f"from the variable {variable}"
    for path in reversed(settings_files()):
        if read_settings([path]).get(setting) == value:
            return f"from {path}"
    return f"from {FLAGS[setting]}" if setting in FLAGS else "set by llamac"


def wandb_run(run, given, earlier=()):
    """Return resolve_run with the user's W&B settings, from variables or else from files."""
    settings = {entry: user_setting(setting) for entry, setting in RUN_SETTINGS.items()}
    return resolve_run(run, given, settings, earlier)


def wandb_server():
    """Return the URL of the server that the client connects to."""
    url = user_setting("base_url")
    if not url:
        import wandb
        url = wandb.Settings().base_url
    return url.rstrip("/")


def has_wandb_key():
    """
    Return whether there is an API key where the client looks for one: in WANDB_API_KEY, in its
    settings files, or in the user's netrc file under the server's host and port.
    """
    if user_setting("api_key"):
        return True
    host = urlsplit(wandb_server()).netloc
    files = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    path = next(filter(os.path.exists, map(os.path.expanduser, files)), None)
    if not path:
        return False
    try:
        login = netrc.netrc(path).authenticators
        # Keys made before the server was renamed are stored under its old name.
        old_login = host == "api.forge.coreweave.com" and login("api.wandb.ai")
        return bool(login(host) or old_login)
    except (OSError, ValueError, netrc.NetrcParseError):  # ValueError: not UTF-8
        return False


def wandb_mode():
    """
    Return (mode, why). mode: the user's, set by WANDB_MODE or `wandb offline`; otherwise "online"
    if there is a key and the server can be reached, else "offline".
    """
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"], "WANDB_MODE"
    mode = file_settings().get("mode", "online")
    if mode != "online":
        return mode, "W&B's settings"
    if not has_wandb_key():
        return "offline", "no API key"
    if not is_reachable(wandb_server()):
        return "offline", f"{wandb_server()} does not answer"
    return "online", "API key found"


# ---- errors -------------------------------------------------------------------------------------

def reason(error):
    """
    Return an exception as one line. If the client refused a setting, the line has its name, value
    and source.
    """
    kind = type(error).__name__
    if kind == "ValidationError" and hasattr(error, "errors"):  # pydantic's
        return "; ".join(map(refused_setting, error.errors()))
    if kind != "UsageError":
        return error_line(error)
    text = str(error).splitlines()[0]
    # The client's text describes the setting that it refuses, but lacks its value.
    for words, setting in (("project", "project"), ("Run ID", "run_id")):
        if words in text:
            value = user_setting(setting)
            return f"{text} ({setting}={value!r}, {origin(setting, value)})" if value else text
    return text


def refused_setting(error):
    """Return one of pydantic's errors, {"loc", "input", "msg"}, as a line."""
    name = str(error["loc"][0]) if error["loc"] else "a setting"
    value = error["input"]
    value = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    shown = value if len(value) <= 80 else f"{value[:77]}..."
    message = error["msg"].removeprefix("Value error, ")
    return f"W&B refuses {name}={shown!r}, {origin(name, value)}: {message}"


# ---- what the client wrote ----------------------------------------------------------------------

def about(out_dir):
    """
    Return the content of out_dir/wandb.json, or {}: the run's entries ("id", "project", "name",
    ...) and "folders", the folders that the client wrote, one for each session.
    """
    return read_json(Path(out_dir, "wandb.json"), default={})


def existing_folders(run):
    """Return the client's folders of a run, as about() returns it, that still exist."""
    return [folder for folder in run.get("folders", []) if Path(folder).exists()]


def read_wandb(folder):
    """Return the records in a folder of the client or in its .wandb file, as dicts."""
    tool = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    done = subprocess.run(tool, capture_output=True, text=True, encoding="utf-8",
                          stdin=subprocess.DEVNULL)
    if done.returncode:
        why = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise OSError(f"not readable as a W&B run: {why}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def client_records(folder, kind):
    """Return the records of one kind in a folder of the client, [] if it can't be read."""
    try:
        return [record[kind] for record in read_wandb(folder) if record["type"] == kind]
    except (OSError, ValueError):
        return []


def client_rows(folder):
    """Return the rows in a folder of the client."""
    return [record["item"] for record in client_records(folder, "history")]


# ---- what the server has ------------------------------------------------------------------------

def at_server(run):
    """
    Return (number of rows, step of the last row) that the server has of a run, or None if the
    server does not know the run. Raises OSError if the server does not answer.
    """
    import wandb
    from wandb.apis.public.runs import RunNotFoundError
    try:
        path = "/".join(run[key] for key in ("entity", "project", "id") if key in run)
        found = wandb.Api().run(path).load()
    except wandb.errors.CommError as e:
        if isinstance(e.exc, RunNotFoundError):
            return None
        raise OSError(f"{wandb_server()} answers with an error: {str(e).splitlines()[0]}") from e
    last_step = (found["historyKeys"] or {}).get("lastStep", -1)
    return found["historyLineCount"] or 0, last_step


def count_rows(run, expected):
    """Return how many rows of a run the server has; wait up to COUNT_SECONDS for `expected`."""
    until = time.monotonic() + COUNT_SECONDS
    while True:
        rows, _ = at_server(run) or (0, -1)
        if rows >= expected or time.monotonic() > until:
            return rows
        time.sleep(1)
