"""
Where a run stands: its clock, its best loss, early stop, the return to a checkpoint, its last line.

`s` has the settings of train.py as attributes; `state` is what a continuation needs besides weights and optimizer.
"""
import math
import shlex
from pathlib import Path

from configurator import fail
from engine.training import checkpoint, distributed
from engine.untrusted import reading

FRESH = {"seconds": 0.0, "limit": 0.0, "end": math.inf}  # the clock of a run without a limit, see session_clock


def new_state(config, clock, signature):
    """
    Return what a run is besides weights and optimizer, before its first step. clock: that of its
    minutes, which a mode does not have; signature: resume.resume_signature's, which a continuation
    may not change. Keys: tokens: how many the run was trained on; sequences: how many it has read
    of its data.
    """
    return {"step": 0, "tokens": 0, "sequences": 0, "best": math.inf, "best_step": None,
            "run_id": "", "loss_sum": 0.0, "loss_steps": 0, "last": None, "fixed": signature,
            "clock": clock if config.minutes else FRESH, "noted": [], "chat": {}}


def take_weights(folder, model, opt):
    """Weights and optimizer of a checkpoint."""
    with reading(folder, "a checkpoint of this run", fail):
        distributed.load_weights(model, checkpoint.load(folder)["model"])
        opt.load_state_dict(checkpoint.load(folder, "train")["optimizer"])


def warn_of(error):
    if error:
        distributed.say(f"warning: a checkpoint could not be saved ({checkpoint.reason(error)}); training goes on, "
                        f"and the next save tries again")


def go_back(s, model, opt, guard, writer):
    """After max_skips refused steps in a row: the weights of the last checkpoint; the data in between is left behind."""
    warn_of(distributed.on_master(writer.wait))
    folder = distributed.on_master(checkpoint.newest, s.out_dir)
    if folder is None:
        fail(f"{s.max_skips} steps in a row had a loss or gradient out of the ordinary, and there is no checkpoint to go "
             f"back to; lower the learning_rate (now {s.learning_rate})")
    take_weights(folder, model, opt)
    guard.state["in_a_row"] = 0
    distributed.say(f"warning: {s.max_skips} steps in a row were skipped; going on with the weights of {folder}")


def note_best(s, state, loss):
    """
    Remember this step's validation loss (inf where there is none) if it is the least so far. For early_stop that of a stop
    between evaluations does not count: the run is to end as it would have without stops. Untrained weights are nobody's best.
    """
    step = state["step"]
    if not s.early_stop:
        state.pop("best_due", None)
    elif "best_due" not in state:  # also where it is given anew
        state["best_due"] = [state["best"], state["best_step"]]
    if step and loss < state["best"]:
        state |= {"best": loss, "best_step": step}
    if step and s.early_stop and step % s.eval_interval == 0 and loss < state["best_due"][0]:
        state["best_due"] = [loss, step]


def stalled(s, state):
    """Whether the validation loss has stopped falling at this evaluation, at which a resumed run may begin."""
    if not s.early_stop or state["last"] or state["step"] % s.eval_interval:
        return False
    return state["step"] - (state["best_due"][1] or state["step"]) >= s.early_stop * s.eval_interval


def end_soon(s, last_step, model, opt, state, writer):
    """
    The validation loss has stopped falling: go back to the best weights, from which the rate falls to its end in a fifth
    of their steps. Returns the run's last step.
    """
    warn_of(distributed.on_master(writer.wait))
    best = state["best_due"][1]
    folder = checkpoint.step_folder(s.out_dir, best)
    saved = distributed.on_master(checkpoint.complete, folder)  # else the trainer was warned
    if saved:
        take_weights(folder, model, opt)
    last = min(last_step, state["step"] + max(1, best // 5))
    back = "back to its weights; " if saved else ""
    distributed.say(f"no better validation loss since iter {best}: {back}iter {last} is the last")
    return last


def session_clock(clock, max_minutes, minutes=0.0, left=0.0):
    """
    The run's clock, {"seconds": it has trained, "limit": seconds of max_minutes, "end": its reading when they are over}, and
    "minutes" where the sizes follow from them: then they are the run's own, and more of them prolong it. left: seconds of them
    that are left now, for a run that has not trained; checks and other things came after its plan.
    `clock` is that of the session before: a time limit that a stop or a crash has cut short goes on, one that was
    reached begins anew.
    """
    if "minutes" in clock:
        end = clock["end"] + 60 * (minutes - clock["minutes"])
        return clock | {"end": left if left and not clock["seconds"] else end, "minutes": minutes}
    limit = 60 * max_minutes
    if clock["limit"] == limit and clock["seconds"] < clock["end"]:
        return clock
    return clock | {"limit": limit, "end": clock["seconds"] + limit if limit else math.inf}


def is_over(s, state):
    """Whether a run has taken its last step, or the minutes that its sizes follow from are over."""
    clock = state["clock"]
    return (state["step"] >= (state.get("last") or s.max_iters)
            or "minutes" in clock and clock["seconds"] >= session_clock(clock, 0, s.minutes)["end"])


def say_finished(s, state):
    """Answer a finished run that is begun again. Return the exit code: 2 where its model is not there."""
    there = Path(s.out_dir, "model.gguf").exists()
    missing = "" if there else f"; its model.gguf is missing, write it with: python export.py {shlex.quote(str(s.out_dir))}"
    more = "" if state["last"] else f"raise --{'max_iters' if state['step'] >= s.max_iters else 'minutes'} to go on, or "
    distributed.say(f"{s.out_dir}: this run is finished, at iter {state['step']} with validation loss {state['best']:.4f}"
                    f"{missing}; {more}--init_from=scratch for a new one")
    return 0 if there else 2


def final_message(s, state, best, there, wanted):
    """The last line. there, wanted: the iteration whose model stands in the file `best`, and that which should."""
    saved = [int(folder.name[5:]) for folder in checkpoint.steps(s.out_dir)]
    text = f"finished: best validation loss {state['best']:.4f}"
    if not is_over(s, state):
        text = f"stopped at iter {state['step']}; the same command continues from "
        text += "here" if state["step"] in saved else f"iter {max(saved, default=0)}, the last that could be saved"
    elif state["step"] not in saved:
        text += f"; the checkpoint of iter {state['step']} could not be saved"
    if there != wanted:
        text += f"; the model of iter {wanted} could not be written"
        text += f": make room, then: python export.py {shlex.quote(s.out_dir)}" if wanted in saved else " or saved"
    if there is None:
        return text
    older = f"; {best} is that of iter {there}" if there != wanted else ""
    return f"{text}{older}; write with it: ./run {shlex.quote(str(best))} -i {shlex.quote(s.sample_prompt.split('|')[0])}"
