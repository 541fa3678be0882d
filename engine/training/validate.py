"""What is refused rather than computed. `s` has the settings of train.py as attributes."""
import importlib.util
import math
import sys

from configurator import fail
from engine.training import distributed, mode
from engine.files import refuse_odd
from engine.spans import spanned


def check_settings(s):
    """Refuse settings that can't train."""
    for name in ("eval_interval", "log_interval", "gradient_accumulation_steps", "max_iters", "max_seq_len", "multiple_of",
                 "max_skips", "dim", "n_layers", "n_heads"):
        if getattr(s, name) < 1:
            fail(f"{name} is {getattr(s, name)}, expected at least 1")
    if s.minutes and (s.depth or s.max_minutes):
        fail(f"--minutes={s.minutes:g} and --{'depth' if s.depth else 'max_minutes'}: expected one of them")
    for name in ("batch_size", "eval_iters", "warmup_iters", "weight_decay", "grad_clip", "min_lr", "vocab_size", "vocab_most",
                 "text_most", "depth", "minutes", "early_stop", "peak_tflops", "seed", "keep_last", "keep_best",
                 "max_minutes", "spike_z", "max_restarts", "decay_fraction"):
        if getattr(s, name) < 0:
            fail(f"{name} is {getattr(s, name)}, expected 0 or more")
    refuse_odd(data=s.data, cache=s.cache, out_dir=s.out_dir, init_from=s.init_from, vocab_source=s.vocab_source)
    if s.eval_only and s.supervise:
        fail("--eval_only and --supervise: expected one of them")
    if not 0 < s.learning_rate < 1:
        fail(f"learning_rate is {s.learning_rate}, expected above 0 and below 1; 1e-3 is a good start")
    if not 0 < s.table_rate * s.learning_rate < 1:
        fail(f"table_rate is {s.table_rate}, expected above 0, and below 1 when multiplied by learning_rate; 2 is a good start")
    for name in ("momentum", "beta1", "beta2"):
        if not 0 <= getattr(s, name) < 1:
            fail(f"{name} is {getattr(s, name)}, expected 0 <= {name} < 1")
    if s.optimizer not in ("muon", "adamw"):
        fail(f"optimizer is {s.optimizer!r}, expected muon or adamw")
    if s.schedule not in ("cosine", "linear"):
        fail(f"schedule is {s.schedule!r}, expected cosine or linear")
    if s.wandb_watch not in ("off", "all", "gradients", "parameters"):
        fail(f"wandb_watch is {s.wandb_watch!r}, expected off, all, gradients or parameters")
    mode.check(s)
    if s.sharded and distributed.world > 1 and not importlib.util.find_spec("safetensors"):
        fail("--sharded=True saves its slices as safetensors; needed: pip install safetensors")


def checked_args(s, args, dataset):
    """Return the ModelArgs `args`. Refuses sizes that no model can have, and data shorter than one context."""
    if args.problem():
        fail(args.problem())
    for split in ("train", "val"):
        if len(getattr(dataset, split)) < s.max_seq_len:
            fail(f"the {split} split of {s.data} has {len(getattr(dataset, split))} tokens, less than one context of "
                 f"max_seq_len={s.max_seq_len}; use more text, a shorter context, or another val_fraction")
    return args


def refuse_unseen(folder, device):
    """End all processes where one does not see what the first has prepared."""
    unseen = not folder.exists()
    if distributed.any_true([unseen], device)[0]:
        sys.exit(2) if not unseen else fail(f"{folder.absolute()}: prepared by the first process, but process "
                                            f"{distributed.rank} does not see it; give a --cache that all machines share")


@spanned("logging")
def refuse_nonsense(s, row, tracker):
    """A loss that is not a number ends the run, with the row on record; of the training loss only if no step is skipped."""
    for name in ("loss/val",) if s.spike_z else ("loss/val", "loss/train"):
        if not math.isfinite(row.get(name, 0.0)):
            tracker.log(row)
            tracker.finish()
            fail(f"{name} is {row[name]} at iter {row['iter']}; lower the learning_rate (now {s.learning_rate}) and start "
                 f"again from the last checkpoint in {s.out_dir}")
