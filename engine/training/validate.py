"""Refuse settings, data and losses that can't train."""
import importlib.util
import math
import sys

from configurator import fail
from engine.files import refuse_impossible_paths
from engine.spans import spanned
from engine.training import distill, distributed, lora, mode
from engine.training.ngrams import MAX_VOCAB

AT_LEAST_1 = ("eval_interval", "log_interval", "gradient_accumulation_steps", "max_iters",
              "max_seq_len", "multiple_of", "dim", "n_layers", "n_heads", "seeds")
AT_LEAST_0 = ("batch_size", "eval_iters", "warmup_iters", "weight_decay", "grad_clip", "min_lr",
              "vocab_size", "max_vocab_size", "max_text_bytes", "depth", "minutes", "early_stop",
              "peak_tflops", "seed", "max_minutes", "spike_z", "decay_fraction", "embedding_noise",
              "lora_rank", "first_seq_len")
CHOICES = {"schedule": ("constant", "cosine", "linear")}
# Settings that are names separated by commas.
LISTS = {"log_extras": ("tables", "model", "gradients", "parameters", "noise_scale")}


def check_settings(config):
    """End the program with one line if the settings can't train."""
    for name in AT_LEAST_1:
        if getattr(config, name) < 1:
            fail(f"{name} is {getattr(config, name)}, expected at least 1")
    if config.minutes and (config.depth or config.max_minutes):
        other = "depth" if config.depth else "max_minutes"
        fail(f"--minutes={config.minutes:g} and --{other}: expected one of them")
    for name in AT_LEAST_0:
        if getattr(config, name) < 0:
            fail(f"{name} is {getattr(config, name)}, expected 0 or more")
    refuse_impossible_paths(data=config.data, cache=config.cache, out_dir=config.out_dir,
                            init_from=config.init_from, vocab_source=config.vocab_source)
    if config.eval_only and config.supervise:
        fail("--eval_only and --supervise: expected one of them")
    if config.cuda_graphs and not config.compile:
        fail("cuda_graphs is True without compile, whose graphs are recorded; add "
             "--compile=True")
    if config.cuda_graphs and distributed.world > 1:
        fail("--cuda_graphs=True is for one process; several exchange gradients while they compute "
             "them, which is not recorded")
    if config.first_seq_len and config.compile:
        fail(f"first_seq_len is {config.first_seq_len} with --compile=True, which would compile "
             "the model again for each context; expected --first_seq_len=0")
    if not 0 < config.learning_rate < 1:
        fail(f"learning_rate is {config.learning_rate}, expected above 0 and below 1; 1e-3 is a "
             f"good start")
    if not 0 < config.embedding_lr_scale * config.learning_rate < 1:
        fail(f"embedding_lr_scale is {config.embedding_lr_scale}, expected above 0, and below 1 "
             f"when multiplied by learning_rate; 2 is a good start")
    for name in ("momentum", "beta1", "beta2", "weight_average"):
        if not 0 <= getattr(config, name) < 1:
            fail(f"{name} is {getattr(config, name)}, expected 0 <= {name} < 1")
    for name, choices in CHOICES.items():
        if getattr(config, name) not in choices:
            expected = f"{', '.join(choices[:-1])} or {choices[-1]}"
            fail(f"{name} is {getattr(config, name)!r}, expected {expected}")
    for name, choices in LISTS.items():
        for word in getattr(config, name).split(","):
            if word.strip() not in ("", *choices):
                fail(f"{name} is {getattr(config, name)!r}, expected some of {', '.join(choices)}, "
                     f"separated by commas")
    lora.parse_targets(config.lora_targets)
    if config.lora_rank and config.fsdp and distributed.world > 1:
        fail("--lora_rank and --fsdp: expected one of them; LoRA trains in copies (DDP)")
    if config.teacher not in ("", distill.NGRAMS_ALONE) and not distill.paths(config.teacher):
        fail(f"--teacher={config.teacher}: names no model; expected paths, separated by commas")
    mode.check(config)
    if config.fsdp and distributed.world > 1 and not importlib.util.find_spec("safetensors"):
        fail("--fsdp=True saves its slices as safetensors; needed: pip install safetensors")


def checked_args(config, args, dataset):
    """
    Return `args`, the run's ModelArgs, unchanged. Ends the program if no model can have these
    sizes, or if a split of the data is shorter than one context.
    """
    if args.problem():
        fail(args.problem())
    if config.first_seq_len:
        ratio = config.max_seq_len / config.first_seq_len
        if ratio not in (2 ** n for n in range(20)):
            fail(f"first_seq_len is {config.first_seq_len}, expected max_seq_len="
                 f"{config.max_seq_len} divided by 1, 2, 4, 8 or another power of 2, or "
                 f"--first_seq_len=0 for max_seq_len throughout")
        if dataset.masks:
            fail(f"first_seq_len is {config.first_seq_len}, which would cut conversations apart; "
                 f"expected --first_seq_len=0 for conversations")
    if config.bigram_start and args.tied and not config.eval_only:
        fail("bigram_start is True with tied embeddings, expected --tie_embeddings=False: the "
             "classifier needs its own weights")
    if config.teacher == distill.NGRAMS_ALONE and not distill.ngrams_can_teach(dataset.meta):
        fail(f"--teacher=ngrams: {config.data} has {dataset.meta['train_tokens']:,} tokens of a "
             f"vocabulary of {args.vocab_size:,}; expected a text, no conversations, of "
             f"{distill.MAX_TOKENS:,} tokens at most and a vocabulary of {MAX_VOCAB:,} at most; "
             f"leave --teacher out")
    for split in ("train", "val"):
        tokens = len(getattr(dataset, split))
        if tokens < config.max_seq_len and not dataset.masks:
            fail(f"the {split} split of {config.data} has {tokens} tokens, less than one context "
                 f"of max_seq_len={config.max_seq_len}; use more text, a shorter context, or "
                 f"another val_fraction")
    return args


def refuse_unseen(folder, device):
    """End all processes if one of them does not see the folder that the master has prepared."""
    is_unseen = not folder.exists()
    if distributed.any_true([is_unseen], device)[0]:
        if not is_unseen:
            sys.exit(2)  # the processes that miss the folder print the message
        fail(f"{folder.absolute()}: prepared by the first process, but process {distributed.rank} "
             f"does not see it; give a --cache that all machines share")


@spanned("logging")
def refuse_nonsense(config, row, tracker):
    """
    Log the row of metrics and end the run if its validation loss, or its training loss, is not
    finite. With the spike detector on, the training loss may be infinite or NaN: the detector skips
    those steps.
    """
    checked = ("loss/val",) if config.spike_z else ("loss/val", "loss/train")
    for name in checked:
        if not math.isfinite(row.get(name, 0.0)):
            tracker.log(row)
            tracker.finish()
            fail(f"{name} is {row[name]} at iter {row['iter']}; lower the learning_rate (now "
                 f"{config.learning_rate}) and start again from the last checkpoint in "
                 f"{config.out_dir}")
