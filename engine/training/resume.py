"""
Where a run starts: from nothing, from its own checkpoint or from another model; which settings a resumed run keeps.

`s` has the settings of train.py as attributes.
"""
import re
from dataclasses import asdict
from pathlib import Path

import torch

from configurator import convert, fail
from engine.files import why
from engine.tracking.redact import HIDDEN, redact
from engine.training import checkpoint, distributed, run_folder
from engine.untrusted import MAX_JSON, read_json, reading

# settings of the place and of the day, which a resumed run does not take from the one before
PLACE = {"out_dir", "eval_only", "init_from", "force_resume", "max_minutes", "cache", "device", "sharded", "compile",
         "activation_checkpointing", "supervise", "max_restarts", "peak_tflops", "tensorboard_log", "swanlab_log",
         "trackio_log", "checks"}


# what weights and optimizer have their shape and meaning from
SHAPES = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_width", "vocab_size", "hidden_dim", "qk_norm", "qkv_bias", "tied",
          "optimizer")
RENAMED = {"patience": "early_stop"}  # settings in older checkpoints


def default_out_dir(data):
    """A run that nobody has named is named after its data: stories:2000 goes to out/stories, texts/my.txt to out/my."""
    name = Path(data).resolve().stem if Path(data).is_file() else Path(data.partition(":")[0]).resolve().name
    return "out/" + (re.sub(r"[^\w.-]+", "-", name).strip(".-") or "run")


def fine_tuning(s):
    """Whether init_from is the path of a model to fine-tune."""
    return s.init_from not in ("auto", "resume", "scratch")


def find_start(s):
    """
    (the checkpoint folder this run starts from, None to start from nothing; whether it continues the run in it). What
    stands in out_dir goes before the path of init_from, so that a fine-tuning run too is resumed by its own command.
    """
    if s.eval_only:
        return find_evaluated(s)
    if fine_tuning(s) and Path(s.out_dir).resolve() in (Path(s.init_from).resolve(), *Path(s.init_from).resolve().parents):
        fail(f"--init_from={s.init_from} is the run in out_dir itself; give another --out_dir to fine-tune it, or "
             f"--init_from=resume to continue it")
    found = take_out_dir(s)
    if found or not fine_tuning(s):
        return found, found is not None
    return checkpoint.origin(s.init_from), False


def find_evaluated(s):
    """What find_start returns where nothing is trained: the run in out_dir, or the checkpoint that init_from names."""
    if fine_tuning(s):
        return checkpoint.origin(s.init_from), False
    found = checkpoint.newest(s.out_dir) if s.init_from != "scratch" else None
    if not found:
        fail(f"--eval_only=True with --init_from={s.init_from}: {s.out_dir} holds no checkpoint to evaluate; give the "
             f"--out_dir of a run that does, or the path of one with --init_from")
    return found, True


def take_out_dir(s):
    """Claim the folder; the checkpoint in it that is to be resumed, or None. Damaged ones and an old run are set aside."""
    try:
        run_folder.claim(s.out_dir)
        if s.init_from == "scratch":
            if aside := run_folder.set_aside(s.out_dir):
                distributed.say(f"the run that stood in {s.out_dir} is now {aside}")
            return None
        found, damaged = run_folder.recover(s.out_dir)
    except OSError as e:
        fail(f"--out_dir={s.out_dir}: cannot be written ({why(e)}); make room or choose another folder")
    if damaged and not found:
        fail(f"{'; '.join(damaged)}; there is no other checkpoint in {s.out_dir}: put back a copy, or start anew with "
             f"--init_from=scratch, which moves what is left to {s.out_dir}.old1")
    for line in damaged:
        distributed.say(f"error: {line}; resuming from the one before, {found.name}")
    if s.init_from == "resume" and found is None:
        fail(f"--init_from=resume: {s.out_dir} holds no complete checkpoint; start one with --init_from=scratch")
    return found


def stored_settings(folder):
    """The config.json of a checkpoint: the settings that it was trained with, and what was derived from them."""
    with reading(Path(folder, "config.json"), "the settings of a run", fail):
        stored = read_json(Path(folder, "config.json"), MAX_JSON)
    return {RENAMED.get(name, name): value for name, value in stored.items()}


def resumable(stored):
    """The settings that a resumed run takes from its checkpoint."""
    return {k: v for k, v in stored.items() if k not in PLACE and not k.startswith("wandb_")}


def resume_settings(s, folder, given):
    """
    A resumed run keeps its settings, but for those `given` anew. Returns (the settings to take, those that no depth
    derives any more, [[name, before, now]] of what was changed).
    """
    where = Path(folder, "config.json")
    stored = {k: convert(k, v, getattr(s, k), where) for k, v in stored_settings(folder).items() if k in s.defaults}
    for name in [name for name, value in stored.items() if isinstance(value, str) and HIDDEN in value]:
        if redact(getattr(s, name)) == stored[name]:  # what was hidden is given again
            stored[name] = getattr(s, name)
        elif name in ("data", "init_from", "vocab_source") and name not in given and not Path(stored[name]).exists():
            fail(f"{folder}: --{name} was {stored[name]}, in which a secret was hidden; give it again to resume the run")
    begun = stored.get("init_from", "auto")
    if fine_tuning(s) and Path(begun).resolve() != Path(s.init_from).resolve():
        origin = "nothing" if begun in ("auto", "scratch", "resume") else begun
        fail(f"{s.out_dir} holds a run that began from {origin}, not from {s.init_from}; give another --out_dir, or "
             f"--init_from=resume to continue it")
    kept = resumable(stored)
    changes = [[k, str(v), str(getattr(s, k))] for k, v in kept.items() if k in given and getattr(s, k) != v]
    taken = {k: v for k, v in kept.items() if k not in given} | {"init_from": begun}
    now = s.changed(**taken)
    if fine_tuning(now) and ("vocab_source" not in given or s.vocab_source.endswith(".bin")):  # its origin may have gone
        taken["vocab_source"] = str(checkpoint.tokenizer_path(folder))
    doing, step = "evaluating" if s.eval_only else "resuming", checkpoint.manifest(folder)["step"]
    distributed.say(f"{doing} {s.out_dir} at iteration {step:,} of "
                 f"{now.max_iters:,}")
    for name, before, after in changes:
        distributed.say(f"{name}: {before} -> {after}")
    return taken, given if "depth" in [name for name, *_ in changes] else given | kept.keys(), changes


def resume_signature(s, args, dataset):
    """What may not differ between a run and its continuation."""
    same = {k: v for k, v in asdict(args).items() if k not in ("multiple_of", "dropout")}
    names = ("batch_size", "gradient_accumulation_steps", "seed", "optimizer", "within_documents")
    return same | {name: getattr(s, name) for name in names} | {"data": dataset.meta["fingerprint"]}


def restore(s, folder, now, opt):
    """Load the optimizer and return the state of a run that is to continue; refuse another run's. now: its signature."""
    with reading(Path(folder, "train.pt"), "the state of a run", fail):
        return restored(s, folder, now, opt, checkpoint.load(folder, "train", check=s.eval_only))
STATE = {"step": (int,), "best": (int, float), "best_step": (int, type(None)), "run_id": (str,),
         "loss_sum": (int, float, torch.Tensor),  # a number before the first step since the last row, then a scalar tensor
         "loss_steps": (int,), "last": (int, type(None)), "fixed": (dict,), "clock": (dict,), "noted": (list,), "chat": (dict,)}


def restored(s, folder, now, opt, train):
    """Return what `restore` returns. train: the content of a train.pt, which may be damaged; this may raise anything."""
    wrong = [name for name, kinds in STATE.items() if type(train["state"][name]) not in kinds]
    if not wrong and torch.as_tensor(train["state"]["loss_sum"]).numel() != 1:
        wrong = ["loss_sum"]
    if wrong or not all(type(value) in (int, float) for value in train["state"]["clock"].values()):
        raise ValueError(f"its state has another {(wrong or ['clock'])[0]} than a run writes")
    before = train["state"]["fixed"]
    different = [name for name in ("data", *now) if before.get(name, now[name]) != now[name]]
    never = [name for name in different if name in SHAPES]
    if different and (never or not s.force_resume):
        name = different[0]
        what = other_data(s, folder) if name == "data" else f"holds a run with {name}={before[name]}, now it is {now[name]}"
        fail(f"{s.out_dir} {what}; give the old value to resume it, another --out_dir, or --init_from=scratch"
             f"{'' if never else ', or --force_resume=True'}")
    if s.minutes and "minutes" not in train["state"]["clock"]:
        fail(f"{s.out_dir} holds a run whose sizes do not follow from --minutes; --max_minutes limits the time of this session")
    opt.load_state_dict(train["optimizer"])
    state = counted(train["state"], before)
    read = 0 if "data" in different else state["sequences"] * before["max_seq_len"] // now["max_seq_len"]
    return state | {"fixed": now, "sequences": read}


def counted(state, before):
    """The state with its counters of tokens and sequences, which older checkpoints lack. before: its resume signature."""
    batch = before["batch_size"] * before["gradient_accumulation_steps"]
    return {"tokens": state["step"] * batch * before["max_seq_len"], "sequences": state["step"] * batch} | state


def other_data(s, folder):
    """In words: how the data differ from those that a checkpoint was trained on."""
    from engine.text.prepare import source_files  # here: it takes half a tenth of a second to import
    stored = stored_settings(folder)
    for name in ("data", "vocab_source", "vocab_size", "vocab_most", "text_most", "val_fraction"):
        if stored.get(name, getattr(s, name)) != getattr(s, name):
            return f"holds a run with {name}={stored[name]}, now it is {getattr(s, name)}"
    before, now = ({path: rest for path, *rest in files}
                   for files in (stored.get("data_files", []), source_files(s.data, s.cache, s.column)))
    changed = sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
    named = f"{changed[0]}{f' and {len(changed) - 1} more' if len(changed) > 1 else ''}" if changed else s.data
    return f"holds a run on another text: {named} changed since"
