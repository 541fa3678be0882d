"""
Track the progress of a run: its clock, its best loss, early stop, the return to a checkpoint, the
message at its end.

`state` is the dict that a resumed run needs besides weights and optimizer; see new_state.
"""
import bisect
import math
import shlex
from pathlib import Path

from configurator import fail
from engine.formats.layout import TEMPLATE
from engine.training import checkpoint, distributed, resume
from engine.untrusted import reading

NO_LIMIT = {"seconds": 0.0, "limit": 0.0, "end": math.inf}  # clock of a new run without a limit
FULL_CONTEXT_FROM = 0.9  # fraction of a run after which a growing context is max_seq_len
MAX_SKIPS = 10  # skipped steps in a row after which the last checkpoint is loaded again


def new_state(config, clock, signature):
    """
    Return the state of a run before its first step.

    clock: of a time budget (has "minutes", see session_clock), used if --minutes is set; otherwise
    the run begins with NO_LIMIT, to which session_clock adds a max_minutes limit. signature: from
    resume.resume_signature; a resumed run must have the same.

    Some of the keys: step, tokens: number of steps and tokens trained so far; sequences: number of
    sequences of the data read so far; best, best_step: the lowest validation loss and its step;
    loss_sum, loss_steps: sum and number of the training losses since the last row of the log; last:
    the run's last step if early_stop has set it; noted: kinds of metrics that have been reported as
    out of range; chat: GGUF metadata of the chat format; schedule: see last_by_clock. note_best
    adds "best_due" for early_stop. repeat.schedule adds "end": the last step of the repetition of a
    run that a clock limited, None if there is no such step.
    """
    return {"step": 0, "tokens": 0, "sequences": 0, "best": math.inf, "best_step": None,
            "run_id": "", "loss_sum": 0.0, "loss_steps": 0, "last": None, "fixed": signature,
            "clock": clock if config.minutes else NO_LIMIT, "noted": [], "chat": {},
            "schedule": []}


def load_checkpoint(folder, model, opt):
    """Load weights and optimizer from a step folder into `model` and `opt`."""
    with reading(folder, "a checkpoint of this run", fail):
        distributed.load_weights(model, checkpoint.load(folder)["model"])
        opt.load_state_dict(checkpoint.load(folder, "train")["optimizer"])


def warn_of(error):
    """Print a warning about a failed save. error: its exception, or None if it succeeded."""
    if error:
        why = checkpoint.why_unsaved(error)
        distributed.say(f"warning: a checkpoint could not be saved ({why}); training goes on, and "
                        f"the next save tries again")


def go_back(config, model, opt, spike_detector, writer):
    """
    After MAX_SKIPS skipped steps in a row, load weights and optimizer from the newest checkpoint.
    Step and data position are not reset. Ends the program if there is no checkpoint.
    """
    warn_of(distributed.on_master(writer.wait))
    folder = distributed.on_master(checkpoint.newest, config.out_dir)
    if folder is None:
        fail(f"{MAX_SKIPS} steps in a row had a loss or gradient out of the ordinary, and "
             f"there is no checkpoint to go back to; lower the learning_rate (now "
             f"{config.learning_rate})")
    load_checkpoint(folder, model, opt)
    spike_detector.state["in_a_row"] = 0
    distributed.say(f"warning: {MAX_SKIPS} steps in a row were skipped; continuing with the "
                    f"weights of {folder}")


def note_best(config, state, loss):
    """
    Record this step's validation loss (inf if it was not measured) if it is the best so far. Step
    0 is never the best.

    "best_due" is [loss, step] of the best regular evaluation, by which early_stop decides. Regular
    evaluations are those at multiples of eval_interval. A stop at another step evaluates too, but
    "best_due" ignores that, so that a run ends at the same step with and without stops.
    """
    step = state["step"]
    if not config.early_stop:
        state.pop("best_due", None)
    elif "best_due" not in state:  # a new run, or one that is resumed with early_stop added
        state["best_due"] = [state["best"], state["best_step"]]
    if step and loss < state["best"]:
        state |= {"best": loss, "best_step": step}
    is_regular = step and config.early_stop and step % config.eval_interval == 0
    if is_regular and loss < state["best_due"][0]:
        state["best_due"] = [loss, step]


def stalled(config, state):
    """
    Return whether the last N regular evaluations brought no new best, where N is config.early_stop.
    This depends on `state` alone, as a run may be resumed at the step of such an evaluation.
    """
    step = state["step"]
    if not config.early_stop or state["last"] or step % config.eval_interval:
        return False
    best_step = state["best_due"][1] or step
    return step - best_step >= config.early_stop * config.eval_interval


def end_soon(config, last_step, model, opt, state, writer):
    """
    Load the best checkpoint, as the validation loss has stopped falling, and return the run's new
    last step. The run takes a fifth as many further steps as led to that checkpoint, but none after
    last_step; the learning rate decays during them.
    """
    warn_of(distributed.on_master(writer.wait))
    best = state["best_due"][1]
    folder = checkpoint.step_folder(config.out_dir, best)
    # If the best checkpoint could not be saved (a warning said so), keep the current weights.
    is_saved = distributed.on_master(checkpoint.complete, folder)
    if is_saved:
        load_checkpoint(folder, model, opt)
    last = min(last_step, state["step"] + max(1, best // 5))
    back = "back to its weights; " if is_saved else ""
    distributed.say(f"no better validation loss since iter {best}: {back}iter {last} is the last")
    return last


def session_clock(clock, max_minutes, minutes=0.0, left=0.0):
    """
    Return the clock for this session: {"seconds": trained in all sessions, "limit": max_minutes in
    seconds, "end": the value of "seconds" at which training stops, or inf}. If the sizes were
    derived from a time budget, "minutes" is that budget.

    clock: of the previous session. A max_minutes limit applies to a session. If the previous
    session ended before its limit (after a stop or a crash) and max_minutes is the same, this
    session has the rest of that limit; otherwise it has max_minutes from now. A budget applies to
    the run: a larger `minutes` extends it. left: seconds of the budget that remain for training
    (plan.training_seconds), 0 if not given; replaces "end" if nothing has been trained yet.
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


def last_by_clock(state, spent, anew=False):
    """
    Return the step at which the clock will end a run, extrapolated from its speed so far; inf
    without a limit. spent: fraction of the time that has passed. The step is extrapolated whenever
    1 % more steps have been taken or 1 % of the time has passed, and if `anew`. state["schedule"]
    keeps [step, result] of each extrapolation, with which a repetition has the same learning rates.
    """
    step, schedule = state["step"], state.setdefault("schedule", [])
    if step and spent:
        before, last = schedule[-1] if schedule else (0, 1)
        if anew or step >= 1.01 * before or spent >= before / last + 0.01:
            schedule.append([step, max(step + 1, round(step / spent))])
    known = bisect.bisect_right(schedule, step, key=lambda pair: pair[0])
    return schedule[known - 1][1] if known else math.inf


def drop_time_limit(config, state):
    """
    Note in state["schedule"] that from this step on the steps alone end the run. Earlier
    extrapolations of a session with a time limit would keep the learning rate at its final value.
    """
    schedule = state.get("schedule")
    if schedule and schedule[-1][1] != config.max_iters:
        schedule.append([state["step"], config.max_iters])


def context_at(config, done):
    """
    Return the context of a step in tokens: first_seq_len at first, doubled after equal fractions of
    the run, and max_seq_len from FULL_CONTEXT_FROM on. done: the fraction of the steps, or of the
    time budget, that has passed.
    """
    if not config.first_seq_len:
        return config.max_seq_len
    doublings = (config.max_seq_len // config.first_seq_len).bit_length() - 1
    return config.first_seq_len << min(doublings, int(done / FULL_CONTEXT_FROM * doublings))


def is_over(config, state):
    """Return whether a run has taken its last step or has used up its time budget (--minutes)."""
    clock = state["clock"]
    if state["step"] >= (state.get("last") or config.max_iters):
        return True
    if state.get("end"):
        return state["step"] >= state["end"]
    if "minutes" not in clock:
        return False
    return clock["seconds"] >= session_clock(clock, 0, config.minutes)["end"]


def ended_by(config, state):
    """
    Return what ended a training: "early_stop", "max_iters", the time budget "minutes", the limit
    "max_minutes", or a "signal" such as Ctrl-C.
    """
    if state["last"] and state["step"] >= state["last"]:
        return "early_stop"
    if state["step"] >= config.max_iters:
        return "max_iters"
    is_repeated = state.get("end") and state["step"] >= state["end"]
    if is_repeated or state["clock"]["seconds"] >= state["clock"]["end"]:
        return "minutes" if "minutes" in state["clock"] else "max_minutes"
    return "signal"


def say_finished(config, state, exports):
    """
    Tell the user, who has started a finished run again, what can be done. exports: see Training.
    Return the exit code: 0, or 2 if model.gguf is missing.
    """
    is_exported = not exports or Path(config.out_dir, "model.gguf").exists()
    missing = ""
    if not is_exported:
        missing = (f"; its model.gguf is missing, write it with: python export.py "
                   f"{shlex.quote(str(config.out_dir))}")
    more = ""
    # After an early stop, and in a repetition, a higher limit would have no effect.
    if not (state["last"] or state.get("end")):
        name = "max_iters" if state["step"] >= config.max_iters else "minutes"
        more = f"raise --{name} to go on, or "
    distributed.say(f"{config.out_dir}: this run is finished, at iter {state['step']} with "
                    f"validation loss {state['best']:.4f}{missing}; {more}--init_from=scratch for "
                    f"a new one")
    return 0 if is_exported else 2


def final_message(config, state, gguf, exported, wanted):
    """
    Return the last line of a run: its result, what could not be saved, what to type next.

    gguf: path of model.gguf; exported: the step of the model in that file, None if there is no
    file; wanted: the step of the model that should be in it.
    """
    saved = [int(folder.name.removeprefix("step_")) for folder in checkpoint.steps(config.out_dir)]
    text = f"finished: best validation loss {state['best']:.4f}"
    if not is_over(config, state):
        text = f"stopped at iter {state['step']}; {resume.same_command(config)} continues from "
        if state["step"] in saved:
            text += "here"
        else:
            text += f"iter {max(saved, default=0)}, the last that could be saved"
    elif state["step"] not in saved:
        text += f"; the checkpoint of iter {state['step']} could not be saved"
    if exported != wanted:
        text += f"; the model of iter {wanted} could not be written"
        if wanted in saved:
            text += f": free disk space, then: python export.py {shlex.quote(config.out_dir)}"
        else:
            text += " or saved"
        if exported is not None:
            text += f"; {gguf} holds the model of iter {exported}"
    if exported is None:
        return text
    if TEMPLATE in state.get("chat", ()):
        return f"{text}; talk with it: ./run {shlex.quote(str(gguf))} -m chat"
    prompt = config.sample_prompt.split("|")[0]
    return f"{text}; write with it: ./run {shlex.quote(str(gguf))} -i {shlex.quote(prompt)}"
