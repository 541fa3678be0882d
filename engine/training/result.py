"""
The result of a training as data: result.json in the run's folder, written at every end of a
training, and with --json=True the last line on stdout. doc/experiments.md lists the entries.
"""
import json
import math
import shlex
import sys
from pathlib import Path

from engine.files import write_atomic
from engine.tracking.redact import redact
from engine.tracking.source import source_version
from engine.training import costs, distributed, hardware, progress
from engine.untrusted import MAX_JSON, read_json, reason

NAME = "result.json"


def command_line():
    """Return the command of this program, quoted for a shell, with secrets hidden."""
    start = ["python"]
    if distributed.world > 1:
        start = ["torchrun", f"--nproc_per_node={distributed.local_world}"]
    return shlex.join([*start, *redact(sys.argv)])


def result_of(t, status, row, model=None):
    """
    Return the result of a Training as a dict that JSON can hold. status: "finished", "stopped" or
    "evaluated"; row: the row of the log for its last step; model: path of the file with the best
    weights, None if there is none.
    """
    state, config, losses = t.state, t.config, {}
    for name in ("loss/train", "loss/val", "loss/train_eval", "bpb/val"):
        losses[name] = row.get(name)
    if "loss/train" not in row and state["loss_steps"]:  # a stop between two rows of the log
        losses["loss/train"] = float(state["loss_sum"]) / state["loss_steps"]
    best = {"iter": state["best_step"], "loss/val": state["best"],
            "bpb/val": t.dataset.bits_per_byte(state["best"])}
    found = {"status": status, "iter": state["step"], "tokens": state["tokens"],
             "last": losses, "best": best, "seconds": round(state["clock"]["seconds"], 3),
             "n_params": costs.num_params(t.args),
             "peak_mib": round(hardware.peak_memory(t.device) / 2 ** 20, 1), "seed": config.seed,
             "out_dir": config.out_dir, "model": str(model) if model else None,
             "command": command_line()}
    if status != "evaluated":
        found["ended_by"] = progress.ended_by(config, state)
    return finite(redact(found | source_version()))


def finite(value):
    """Return a value with None for each number that JSON lacks: NaN and the infinities."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    is_number = isinstance(value, float) and not math.isfinite(value)
    return None if is_number else value


def write(out_dir, result):
    """Write result.json. Return whether it is on disk; print a warning if it is not."""
    try:
        text = json.dumps(result, indent=1, allow_nan=False)
        write_atomic(Path(out_dir, NAME), text + "\n")
    except OSError as e:
        distributed.say(f"warning: {out_dir}/{NAME} could not be written ({reason(e)})")
        return False
    return True


def read(out_dir):
    """Return the result in a run's folder; {} if it has none."""
    return read_json(Path(out_dir, NAME), MAX_JSON, {})


def show(config, result):
    """With --json=True, print a result as one line."""
    if config.json:
        distributed.say(json.dumps(result, allow_nan=False))


def repeat(t):
    """
    Show the result of a run that was finished before this command, which started it again. Write
    it if an earlier version of the program did not.
    """
    found = read(t.config.out_dir)
    if found.get("iter") != t.state["step"]:
        model = Path(t.config.out_dir, "model.gguf")
        found = result_of(t, "finished", {}, model if model.exists() else None)
        write(t.config.out_dir, found)
    show(t.config, found)
