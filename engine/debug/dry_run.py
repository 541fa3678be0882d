"""
--dry_run=True: try everything that a training does. The program takes two steps in a temporary
folder, with evaluation, tracking, checkpoint and export. It is started again twice: first it must
restore the tensors it saved, then it takes a third step. ./run reads the exported model.
"""
import os
import subprocess
import time
from pathlib import Path

from configurator import fail
from engine.debug.model_checks import PROGRAM
from engine.debug.overfit import differs
from engine.training import distributed, mode, run_folder
from engine.training.distributed import say


def dry_run(config, main):
    """
    Run train.py's main(config, steps) in three sessions and check their results. Exit with a
    message if something does not work; otherwise return the exit code 0.
    """
    seconds = {}

    def session(name, config, steps):
        start = time.perf_counter()
        t, code = main(config, steps)
        seconds[name] = time.perf_counter() - start
        distributed.on_master(run_folder.release)
        if code:
            fail(f"{name}: some files of the run were not written (exit code {code})")
        return t

    first = session("two steps", config, 2)
    config = config.changed(out_dir=first.config.out_dir)
    if config.init_from == "scratch":  # it would start a new run instead of resuming
        config = config.changed(init_from="auto")
    saved = tensors_of(first)
    restored = tensors_of(session("resumed", config, 0))
    for name, tensor in saved.items():
        if name not in restored or differs(tensor, restored[name]):
            fail(f"the checkpoint does not restore the {name} that was saved")
    session("third step", config, 1)
    distributed.on_master(try_files, first.config, first.exports, seconds)
    distributed.on_master(mode.remove_folder)
    spent = ", ".join(f"{name} {taken:.1f} s" for name, taken in seconds.items())
    say(f"dry run passed: {spent}; only the prepared data are kept, in {config.cache}")
    return 0


def tensors_of(t):
    """Return {kind and name: copy} of the tensors of a Training that a checkpoint holds."""
    tensors = {f"weight {name}": p for name, p in t.model.named_parameters()}
    tensors |= {f"optimizer's state {name}": tensor for name, tensor in t.opt.state_dict().items()}
    return {name: copied(tensor) for name, tensor in tensors.items()}


def copied(tensor):
    """Return a copy on the CPU, or on the device if the tensor is a shard."""
    tensor = tensor.detach()
    return tensor.clone() if distributed.is_shard(tensor) else tensor.to("cpu", copy=True)


def try_files(config, exports, seconds):
    """
    Exit with a message if a file of the run is missing or unusable. Add the time of ./run to
    seconds.
    """
    tracked = config.wandb_log and os.environ["WANDB_MODE"] != "disabled"
    if tracked and not any(Path(config.out_dir).rglob("*.wandb")):
        fail("W&B has recorded nothing; the warning above has the reason")
    if not exports:
        return
    model = Path(config.out_dir, "model.gguf")
    if not model.exists():
        fail("no model.gguf was exported")
    if not PROGRAM.exists():
        say("note: ./run is not built (make run), so it has not read the exported file")
        return
    prompt = config.sample_prompt.split("|")[0]
    start = time.perf_counter()
    done = subprocess.run([PROGRAM, model, "-n", "8", "-i", prompt], capture_output=True, text=True,
                          errors="replace")
    seconds["./run"] = time.perf_counter() - start
    if done.returncode:
        error = done.stderr.strip() or f"exit code {done.returncode}"
        fail(f"./run can't read the exported file: {error}")
