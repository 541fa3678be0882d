"""
--dry_run=True: does everything work? The real program takes two steps in a temporary folder, with evaluation, tracking,
checkpoint and export; it is begun again, and has to find what it left; it takes the third step; ./run reads the model.
"""
import os
import subprocess
import time
from pathlib import Path

from configurator import fail
from engine.debug.overfit import differs
from engine.training import distributed, mode, run_folder
from engine.training.distributed import say

PROGRAM = Path(__file__).resolve().parents[2] / "run"


def dry_run(config, main):
    """
    Run main(config, steps) in three sessions. End in one line where something does not work. Return
    the exit code, 0.
    """
    seconds = {}

    def session(what, config, steps):
        begin = time.perf_counter()
        t, code = main(config, steps)
        seconds[what] = time.perf_counter() - begin
        distributed.on_master(run_folder.release)
        if code:
            fail(f"{what}: the files that a training promises were not written (exit code {code})")
        return t

    first = session("two steps", config, 2)
    config = config.changed(out_dir=first.config.out_dir)
    if config.init_from == "scratch":
        config = config.changed(init_from="auto")
    saved = contents(first)
    again = session("resumed", config, 0)
    for kind, tensors in contents(again).items():
        for name, tensor in saved[kind].items():
            if name not in tensors or differs(tensor, tensors[name]):
                fail(f"the checkpoint gives back another {kind} {name} than was saved")
    session("third step", config, 1)
    distributed.on_master(try_files, first.config, seconds)
    distributed.on_master(mode.remove_folder)
    spent = ", ".join(f"{what} {taken:.1f} s" for what, taken in seconds.items())
    say(f"dry run: all worked, 3 steps with everything around them: {spent}; of all this only prepared data stay, in "
        f"{config.cache}")
    return 0


def contents(t):
    """Return copies of what a checkpoint of a Training holds: {"weight" or "optimizer's state": {name: tensor}}."""
    kinds = {"weight": dict(t.model.named_parameters()), "optimizer's state": t.opt.state_dict()}
    return {kind: {name: kept(tensor) for name, tensor in tensors.items()} for kind, tensors in kinds.items()}


def kept(tensor):
    return tensor.detach().clone() if distributed.is_shard(tensor) else tensor.detach().to("cpu", copy=True)


def try_files(config, seconds):
    """Try the files that the run has left. Ends in one line where one is missing or can't be used."""
    model = Path(config.out_dir, "model.gguf")
    if not model.exists():
        fail("no model.gguf was exported")
    tracked = config.wandb_log and os.environ["WANDB_MODE"] != "disabled"
    if tracked and not any(Path(config.out_dir).rglob("*.wandb")):
        fail("W&B has recorded nothing; the warning above says why")
    if not PROGRAM.exists():
        say("note: ./run is not built (make run), so it has not read the exported file")
        return
    command = [PROGRAM, model, "-n", "8", "-i", config.sample_prompt.split("|")[0]]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    seconds["./run"] = time.perf_counter() - begin
    if done.returncode:
        fail(f"./run does not read the exported file: {done.stderr.strip() or f'exit code {done.returncode}'}")
