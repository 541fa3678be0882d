"""
The progress of a run: its clock, its best loss, early stop, the return to a checkpoint, its last
line.

`state` is what a resumed run needs besides weights and optimizer; see new_state.
"""
import math
import shlex
from pathlib import Path

from configurator import fail
from engine.training import checkpoint, distributed
from engine.untrusted import reading

NO_LIMIT = {"seconds": 0.0, "limit": 0.0, "end": math.inf}  # a new run's clock, see session_clock
MAX_SKIPS = 10  # steps refused in a row before the weights return to the last checkpoint


def new_state(config, clock, signature):
    """
    Return the state of a run before its first step.

    clock: of the time budget, if --minutes is set; a mode has none; signature:
    resume.resume_signature's, which a resumed run may not change. Some of the keys: tokens: trained
    on so far; sequences: read of the data so far; last: the last step, if early stop has set it.
    """
    return {"step": 0, "tokens": 0, "sequences": 0, "best": math.inf, "best_step": None,
            "run_id": "", "loss_sum": 0.0, "loss_steps": 0, "last": None, "fixed": signature,
            "clock": clock if config.minutes else NO_LIMIT, "noted": [], "chat": {}}


def load_checkpoint(folder, model, opt):
    """Load weights and optimizer from a step folder."""
    with reading(folder, "a checkpoint of this run", fail):
        distributed.load_weights(model, checkpoint.load(folder)["model"])
        opt.load_state_dict(checkpoint.load(folder, "train")["optimizer"])


def warn_of(error):
    """Print a warning about a failed save; error: None if it succeeded."""
    if error:
        why = checkpoint.why_unsaved(error)
        distributed.say(f"warning: a checkpoint could not be saved ({why}); training goes on, and "
                        f"the next save tries again")


def go_back(config, model, opt, spike_detector, writer):
    """
    After MAX_SKIPS refused steps in a row, load the weights of the last checkpoint. The data that
    was read since then is not read again.
    """
    warn_of(distributed.on_master(writer.wait))
    folder = distributed.on_master(checkpoint.newest, config.out_dir)
    if folder is None:
        fail(f"{MAX_SKIPS} steps in a row had a loss or gradient out of the ordinary, and "
             f"there is no checkpoint to go back to; lower the learning_rate (now "
             f"{config.learning_rate})")
    load_checkpoint(folder, model, opt)
    spike_detector.state["in_a_row"] = 0
    distributed.say(f"warning: {MAX_SKIPS} steps in a row were skipped; going on with the "
                    f"weights of {folder}")


def note_best(config, state, loss):
    """
    Record this step's validation loss (inf if it was not measured) if it is the best so far.

    For early_stop only regular evaluations count, not those at a stop in between, so that a run
    ends at the same step with and without stops. Step 0 is never the best.
    """
    step = state["step"]
    if not config.early_stop:
        state.pop("best_due", None)
    elif "best_due" not in state:  # a resumed run may have been given early_stop
        state["best_due"] = [state["best"], state["best_step"]]
    if step and loss < state["best"]:
        state |= {"best": loss, "best_step": step}
    is_regular = step and config.early_stop and step % config.eval_interval == 0
    if is_regular and loss < state["best_due"][0]:
        state["best_due"] = [loss, step]


def stalled(config, state):
    """
    Return whether early_stop evaluations have passed without a new best. A resumed run may begin at
    such an evaluation.
    """
    step = state["step"]
    if not config.early_stop or state["last"] or step % config.eval_interval:
        return False
    best_step = state["best_due"][1] or step
    return step - best_step >= config.early_stop * config.eval_interval


def end_soon(config, last_step, model, opt, state, writer):
    """
    Return the run's last step after the validation loss has stopped falling. The weights return to
    the best ones, from which the rate decays to its end over a fifth of the steps that they took.
    """
    warn_of(distributed.on_master(writer.wait))
    best = state["best_due"][1]
    folder = checkpoint.step_folder(config.out_dir, best)
    # If it could not be saved, the user has been warned.
    is_saved = distributed.on_master(checkpoint.complete, folder)
    if is_saved:
        load_checkpoint(folder, model, opt)
    last = min(last_step, state["step"] + max(1, best // 5))
    back = "back to its weights; " if is_saved else ""
    distributed.say(f"no better validation loss since iter {best}: {back}iter {last} is the last")
    return last


def session_clock(clock, max_minutes, minutes=0.0, left=0.0):
    """
    Return the run's clock for this session: {"seconds": trained so far, "limit": seconds of
    max_minutes, "end": the value of "seconds" at which the time is over}, with "minutes" if the
    sizes are derived from a time budget. Such a budget is the run's own, and a larger one extends
    the run.

    clock: of the session before: a time limit that a stop or a crash cut short continues, one that
    was reached starts anew. left: seconds of the budget that are left for a run that has not
    trained yet, after checks and the like.
    """
    if "minutes" in clock:
        end = clock["end"] + 60 * (minutes - clock["minutes"])
        if left and not clock["seconds"]:
            end = left
        return clock | {"end": end, "minutes": minutes}
    limit = 60 * max_minutes
    if clock["limit"] == limit and clock["seconds"] < clock["end"]:
        return clock
    return clock | {"limit": limit, "end": clock["seconds"] + limit if limit else math.inf}


def is_over(config, state):
    """Return whether a run has taken its last step or used up the budget of --minutes."""
    clock = state["clock"]
    if state["step"] >= (state.get("last") or config.max_iters):
        return True
    if "minutes" not in clock:
        return False
    return clock["seconds"] >= session_clock(clock, 0, config.minutes)["end"]


def say_finished(config, state, exports):
    """
    Tell the user that a run which is started again is finished. exports: as of Training. Return the
    exit code: 2 if its model.gguf is missing.
    """
    is_exported = not exports or Path(config.out_dir, "model.gguf").exists()
    missing = ""
    if not is_exported:
        missing = (f"; its model.gguf is missing, write it with: python export.py "
                   f"{shlex.quote(str(config.out_dir))}")
    more = ""
    if not state["last"]:
        name = "max_iters" if state["step"] >= config.max_iters else "minutes"
        more = f"raise --{name} to go on, or "
    distributed.say(f"{config.out_dir}: this run is finished, at iter {state['step']} with "
                    f"validation loss {state['best']:.4f}{missing}; {more}--init_from=scratch for "
                    f"a new one")
    return 0 if is_exported else 2


def final_message(config, state, best, exported, wanted):
    """
    Return the last line of a run: its result, what could not be saved, what to type next.

    best: path of the best model's file; exported, wanted: the step of the model that is in it (None
    if there is none), and the step that should be.
    """
    saved = [int(folder.name[5:]) for folder in checkpoint.steps(config.out_dir)]
    text = f"finished: best validation loss {state['best']:.4f}"
    if not is_over(config, state):
        text = f"stopped at iter {state['step']}; the same command continues from "
        if state["step"] in saved:
            text += "here"
        else:
            text += f"iter {max(saved, default=0)}, the last that could be saved"
    elif state["step"] not in saved:
        text += f"; the checkpoint of iter {state['step']} could not be saved"
    if exported != wanted:
        text += f"; the model of iter {wanted} could not be written"
        if wanted in saved:
            text += f": make room, then: python export.py {shlex.quote(config.out_dir)}"
        else:
            text += " or saved"
        if exported is not None:
            text += f"; {best} is that of iter {exported}"
    if exported is None:
        return text
    prompt = config.sample_prompt.split("|")[0]
    return f"{text}; write with it: ./run {shlex.quote(str(best))} -i {shlex.quote(prompt)}"
