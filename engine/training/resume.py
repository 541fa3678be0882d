"""
Find where a run starts: from new weights, from its own checkpoint or from another model. Restore
the settings and the state of a resumed run.
"""
import math
import re
from dataclasses import asdict
from pathlib import Path

import torch

from configurator import convert, fail
from engine.advice import renamed
from engine.tracking.redact import HIDDEN, redact
from engine.training import checkpoint, distributed, run_folder
from engine.untrusted import MAX_JSON, read_json, reading, reason

STARTS = ("auto", "force", "resume", "scratch")  # values of init_from that are not a path
# Settings of the machine and the session: a resumed run does not take them from its checkpoint.
OF_SESSION = {"out_dir", "eval_only", "init_from", "max_minutes", "cache", "device",
              "fsdp", "compile", "cuda_graphs", "activation_checkpointing", "supervise",
              "peak_tflops", "tensorboard_log", "swanlab_log", "trackio_log", "log_extras",
              "checks", "json", "seeds"}
# Settings of the shape and meaning of weights and optimizer: even a forced resume keeps them.
SHAPES = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_width", "vocab_size", "vocabulary",
          "hidden_dim", "qk_norm", "qkv_bias", "tie_embeddings", "optimizer", "weight_average",
          "lora_rank", "lora_targets")
# The types of the entries of progress.new_state, which describes them. "fixed" is the signature.
STATE_TYPES = {"step": (int,), "best": (int, float), "best_step": (int, type(None)),
               "run_id": (str,),
               # Logging a row sets loss_sum to 0.0; the next step makes it a scalar tensor.
               "loss_sum": (int, float, torch.Tensor),
               "loss_steps": (int,), "last": (int, type(None)), "fixed": (dict,), "clock": (dict,),
               "noted": (list,), "chat": (dict,)}


def folder_of_seed(config):
    """
    Return the folder for a run: out_dir, or NAME-seedN if the run in out_dir has another seed than
    the one that this command gives.
    """
    out_dir = config.out_dir
    if ("seed" not in config.given or config.eval_only or config.init_from in STARTS[1:]
            or not run_folder.is_run(out_dir)):
        return out_dir
    before = read_json(Path(out_dir, "config.json"), MAX_JSON, {}).get("seed", config.seed)
    if before == config.seed:
        return out_dir
    own = f"{out_dir.rstrip('/')}-seed{config.seed}"
    distributed.say(f"{out_dir} holds a run with seed={before}; the run with seed={config.seed} is "
                    f"in {own}")
    return own


def default_out_dir(data):
    """
    Return the folder of a run that was given no out_dir, named after its data: out/stories for
    stories:2000, out/my for texts/my.txt.
    """
    is_file = Path(data).is_file()
    name = Path(data).resolve().stem if is_file else Path(data.partition(":")[0]).resolve().name
    return "out/" + (re.sub(r"[^\w.-]+", "-", name).strip(".-") or "run")


# ---- the checkpoint or model that a run starts from ----------------------------------------------

def is_fine_tuning(config):
    """Return whether init_from is the path of a model to fine-tune."""
    return config.init_from not in STARTS


def same_command(config):
    """Return words for the command that continues a run of this command."""
    sets_aside = config.init_from == "scratch" and "init_from" in config.given
    return "the same command" + " without --init_from=scratch" * sets_aside


def find_start(config):
    """
    Return (the path of the step folder or model that this run starts from, or None for new weights;
    whether it resumes the run there). A run in out_dir takes precedence over the path in
    init_from, so that repeating the command resumes a fine-tuning too.
    """
    if config.eval_only:
        return find_evaluated(config)
    if is_fine_tuning(config):
        origin = Path(config.init_from).resolve()
        if Path(config.out_dir).resolve() in (origin, *origin.parents):
            fail(f"--init_from={config.init_from} is the run in out_dir itself; give another "
                 f"--out_dir to fine-tune it, or --init_from=resume to continue it")
    found = take_out_dir(config)
    if found or not is_fine_tuning(config):
        return found, found is not None
    return checkpoint.origin(config.init_from), False


def find_evaluated(config):
    """Return find_start's result for --eval_only: the run in out_dir, or the path in init_from."""
    if is_fine_tuning(config):
        return checkpoint.origin(config.init_from), False
    found = checkpoint.newest(config.out_dir) if config.init_from != "scratch" else None
    if not found:
        fail(f"--eval_only=True with --init_from={config.init_from}: {config.out_dir} holds no "
             f"checkpoint to evaluate; give the --out_dir of a run that does, or the path of one "
             f"with --init_from")
    return found, True


def take_out_dir(config):
    """
    Claim out_dir and return the newest intact step folder to resume, or None. Damaged checkpoints
    are set aside; with init_from=scratch the whole old run is.
    """
    out_dir, init_from = config.out_dir, config.init_from
    try:
        run_folder.claim(out_dir)
        if init_from == "scratch":
            if aside := run_folder.set_aside(out_dir):
                distributed.say(f"the earlier run in {out_dir} was moved to {aside}")
            return None
        found, damaged = run_folder.recover(out_dir)
        is_bare = found is None and not damaged and init_from != "resume"
        if is_bare and run_folder.has_results(out_dir):
            aside = run_folder.set_aside(out_dir)
            distributed.say(f"the earlier run in {out_dir} has no checkpoint to resume; it was "
                            f"moved to {aside}")
    except OSError as e:
        fail(f"--out_dir={out_dir}: cannot be written ({reason(e)}); free disk space or choose "
             f"another folder")
    if damaged and not found:
        fail(f"{'; '.join(damaged)}; there is no other checkpoint in {out_dir}: put back a copy, "
             f"or start anew with --init_from=scratch, which moves what is left to {out_dir}.old1")
    for line in damaged:
        distributed.say(f"error: {line}; resuming from the earlier {found.name}")
    if init_from == "resume" and found is None:
        fail(f"--init_from=resume: {out_dir} holds no complete checkpoint; start one with "
             f"--init_from=scratch")
    return found


# ---- the settings of a resumed run ---------------------------------------------------------------

def stored_settings(folder):
    """Return a checkpoint's config.json: its settings, and what was derived from them."""
    with reading(Path(folder, "config.json"), "the settings of a run", fail):
        stored = read_json(Path(folder, "config.json"), MAX_JSON)
    return renamed(stored)


def recorded(config):
    """Return {setting: value} of a run for config.json: all but those of a single command."""
    return {name: value for name, value in config.as_dict().items()
            if name not in ("json", "seeds")}


def leaves_out(checks, name):
    """
    Return whether --checks contains -name. Two names do more than omit a check, so a resumed run
    keeps them: -files skips unreadable files of the data, -export allows a model that can't be
    exported, and writes no model file.
    """
    return f"-{name}" in [word.strip() for word in checks.split(",")]


def resumable(stored):
    """Return the settings in `stored` that a resumed run takes from its checkpoint."""
    return {name: value for name, value in stored.items()
            if name not in OF_SESSION and not name.startswith("wandb_")}


def restore_secrets(config, folder, stored, given):
    """
    Replace stored values in which a secret was redacted by this command's values, where the two
    differ only in the secret. Ends the program if data, init_from or vocab_source stays redacted.
    """
    for name, value in list(stored.items()):
        if not isinstance(value, str) or HIDDEN not in value:
            continue
        if redact(getattr(config, name)) == value:
            stored[name] = getattr(config, name)
        elif (name in ("data", "init_from", "vocab_source") and name not in given
              and not Path(value).exists()):
            fail(f"{folder}: --{name} was {value}, without its secret; give the full value to "
                 f"resume the run")


def resume_settings(config, folder, given):
    """
    Return (the settings that a resumed run takes from its checkpoint, the names of the settings
    that --depth leaves as they are, [[name, before, now]] of the settings that the user changed).

    given: names of the settings in this command, which take precedence over the checkpoint's.
    --depth leaves these as they are. If --depth was not changed, it also leaves the checkpoint's.
    """
    where = Path(folder, "config.json")
    older = {"first_seq_len": 0}  # values of runs from before these settings existed
    stored = {name: convert(name, value, getattr(config, name), where)
              for name, value in (older | stored_settings(folder)).items()
              if name in config.defaults}
    restore_secrets(config, folder, stored, given)
    first_start = stored.get("init_from", "auto")
    if is_fine_tuning(config) and Path(first_start).resolve() != Path(config.init_from).resolve():
        origin = "nothing" if first_start in STARTS else first_start
        fail(f"{config.out_dir} holds a run that began from {origin}, not from "
             f"{config.init_from}; give another --out_dir, or --init_from=resume to continue it")
    kept = resumable(stored)
    changes = [[name, str(value), str(getattr(config, name))] for name, value in kept.items()
               if name in given and getattr(config, name) != value]
    taken = {name: value for name, value in kept.items() if name not in given}
    taken["init_from"] = first_start  # so that is_fine_tuning holds for a resumed fine-tuning too
    before = stored.get("checks", "")
    if "checks" not in given and (leaves_out(before, "files") or leaves_out(before, "export")):
        taken["checks"] = before  # so that this session handles bad files and export as before
    resumed = config.changed(**taken)
    # A fine-tuning takes the vocabulary in its checkpoint, as the model it began from may be gone.
    # It also does so if a tokenizer.bin is given: the checkpoint holds that vocabulary, converted.
    uses_stored_vocabulary = "vocab_source" not in given or config.vocab_source.endswith(".bin")
    if is_fine_tuning(resumed) and uses_stored_vocabulary:
        taken["vocab_source"] = str(checkpoint.tokenizer_path(folder))
    doing = "evaluating" if config.eval_only else "resuming"
    step = checkpoint.manifest(folder)["step"]
    distributed.say(f"{doing} {config.out_dir} at iteration {step:,} of {resumed.max_iters:,}")
    for name, before, now in changes:
        distributed.say(f"{name}: {before} -> {now}")
    if "depth" not in [name for name, *_ in changes]:
        given = given | kept.keys()
    return taken, given, changes


# ---- the state of a resumed run ------------------------------------------------------------------

def resume_signature(config, args, dataset):
    """Return {name: value} of the sizes, settings and data that must be the same after a resume."""
    # dropout may change; multiple_of only serves to compute hidden_dim, which is compared.
    same = {k: v for k, v in renamed(asdict(args)).items() if k not in ("multiple_of", "dropout")}
    names = ("batch_size", "gradient_accumulation_steps", "seed", "optimizer", "document_mask",
             "weight_average", "lora_rank", "lora_targets", "teacher")
    same |= {name: getattr(config, name) for name in names}
    # Another vocabulary of the same size would give every row of the embedding another meaning.
    return same | {"vocabulary": dataset.meta["tokenizer_sha256"],
                   "data": dataset.meta["fingerprint"]}


def restore(config, folder, signature, opt, is_forced):
    """
    Load the optimizer's state and return the state of a run to resume.

    signature: of this command, by resume_signature. is_forced: allow differences in settings that
    are not in SHAPES. Ends the program if the checkpoint's signature differs in anything else.
    """
    with reading(Path(folder, "train.pt"), "the state of a run", fail):
        # Only an evaluation checks sha256 here: before a resume, run_folder.recover has done so.
        train = checkpoint.load(folder, "train", check=config.eval_only)
        check_state(train["state"])
        state = with_counters(train["state"])
        # Older runs train all weights, have no teacher, and do not average.
        before = {"lora_rank": 0, "teacher": "", "weight_average": 0.0} | renamed(state["fixed"])
        refuse_other_run(config, folder, before, signature, is_forced)
        if config.minutes and "minutes" not in state["clock"]:
            fail(f"{config.out_dir} holds a run whose sizes were not derived from --minutes, so it "
                 f"can't be resumed with --minutes; --max_minutes limits the time of this session")
        opt.load_state_dict(train["optimizer"])
        # The same number of tokens, counted in sequences of this run's length.
        sequences = state["sequences"] * before["max_seq_len"] // signature["max_seq_len"]
        if before.get("data", signature["data"]) != signature["data"]:
            # New data is read from its beginning, and its losses are not comparable.
            sequences = 0
            state |= {"best": math.inf, "best_step": None, "last": None}
            state.pop("best_due", None)
        return state | {"fixed": signature, "sequences": sequences}


def check_state(state):
    """Raise KeyError if the state of a checkpoint lacks an entry, ValueError if one is invalid."""
    wrong = [name for name, types in STATE_TYPES.items() if type(state[name]) not in types]
    if not wrong and torch.as_tensor(state["loss_sum"]).numel() != 1:
        wrong = ["loss_sum"]
    if not wrong and not all(type(value) in (int, float) for value in state["clock"].values()):
        wrong = ["clock"]
    if not wrong and not is_schedule(state.get("schedule", []), state.get("end")):
        wrong = ["schedule"]
    if wrong:
        raise ValueError(f"the entry {wrong[0]} of its state is invalid")


def is_schedule(schedule, end):
    """Return whether the entries "schedule" and "end" of a state have their types."""
    return isinstance(schedule, list) and type(end) in (int, type(None)) and all(
        isinstance(pair, list) and [*map(type, pair)] == [int, int] for pair in schedule)


def refuse_other_run(config, folder, before, now, is_forced):
    """
    End the program if the signatures `before` and `now` differ, unless the resume is forced and no
    difference is in SHAPES.
    """
    # "data" is first, as other data may change sizes too: the message then names the cause.
    different = [name for name in ("data", *now) if before.get(name, now[name]) != now[name]]
    never = [name for name in different if name in SHAPES]
    if not different or is_forced and not never:
        return
    name = different[0]
    what = f"holds a run with {name}={before[name]}, now it is {now[name]}"
    if name == "data":
        what = describe_data_change(config, folder)
    force = "" if never else ", or --init_from=force"
    if name == "data" and "vocabulary" in never:
        force = (f", or --init_from={config.out_dir} with another --out_dir to train its model, "
                 f"with its vocabulary, on this text")
    fail(f"{config.out_dir} {what}; give the old value to resume it, another --out_dir, or "
         f"--init_from=scratch{force}")


def with_counters(state):
    """Return a state with counters of tokens and sequences, computed for older checkpoints."""
    before = state["fixed"]
    sequences = state["step"] * before["batch_size"] * before["gradient_accumulation_steps"]
    return {"tokens": sequences * before["max_seq_len"], "sequences": sequences} | state


def describe_data_change(config, folder):
    """
    Return as text how the data differ from those that a checkpoint was trained on: by a setting,
    else by files.
    """
    from engine.text.prepare import source_files  # the import takes 0.05 s
    stored = stored_settings(folder)
    for name in ("data", "vocab_source", "vocab_size", "max_vocab_size", "max_text_bytes",
                 "val_fraction"):
        now = getattr(config, name)
        if stored.get(name, now) != now:
            return f"holds a run with {name}={stored[name]}, now it is {now}"
    files = source_files(config.data, config.cache, config.column)
    before = {path: rest for path, *rest in stored.get("data_files", [])}
    now = {path: rest for path, *rest in files}
    changed = [path for path in sorted(before.keys() | now.keys())
               if before.get(path) != now.get(path)]
    named = changed[0] if changed else config.data
    if len(changed) > 1:
        named += f" and {len(changed) - 1} more"
    return f"holds a run on another text: {named} changed since"
