"""
Sizes of a training: all of them from the text, the machine and the time, or from a depth; which are refused. `s` has
train.py's settings as attributes.
"""
import math
import time
from pathlib import Path

from configurator import STARTED, configure, fail, source_knobs
from engine.training import distributed, hardware
from engine.training.validate import check_settings
from engine.training.costs import EVAL_TOKENS, least_memory, show, step_seconds, tokens_per_step
from engine.text.prepare import is_prepared, read_meta, usual_pieces
from engine.untrusted import reading

DERIVED = ("dim", "n_layers", "n_heads", "batch_size", "gradient_accumulation_steps", "learning_rate", "max_iters",
           "warmup_iters")


def derive_from_depth(s, given, vocab):
    """
    {setting: value} of a run of s.depth, which a laptop can train: width 16 a layer in heads of 32, 8 tokens a parameter,
    and batch and rate from compute C, with the exponents of DeepSeek's fits: 0.05 C^0.3271 tokens, 0.156 C^-0.125. What was
    tried stands in doc/lab/recipe.md. What is given explicitly stays. vocab: the data's.
    https://arxiv.org/abs/2203.15556, https://arxiv.org/abs/2401.02954
    """
    def derive(**values):
        nonlocal s
        s = s.changed(**{k: v for k, v in values.items() if k not in given})

    derive(dim=32 * math.ceil(s.depth / 2), n_layers=s.depth)
    derive(n_heads=max(1, s.dim // 32))
    n = 12 * s.n_layers * s.dim ** 2 + s.dim * vocab  # parameters, near enough
    tokens = 8 * n
    compute = (6 * n + 12 * s.n_layers * s.dim * s.max_seq_len) * tokens
    sequences = max(1, round(0.05 * compute ** 0.3271 / s.max_seq_len))
    pieces = math.ceil(sequences / 32)
    derive(batch_size=math.ceil(sequences / pieces), gradient_accumulation_steps=pieces,
           learning_rate=float(f"{0.156 * compute ** -0.125:.1e}"))
    derive(max_iters=math.ceil(tokens / (s.batch_size * s.gradient_accumulation_steps * s.max_seq_len)))
    derive(warmup_iters=s.max_iters // 50)
    derived = {name: getattr(s, name) for name in DERIVED}
    distributed.say(f"depth {s.depth}: {', '.join(f'{name}={value!r}' for name, value in derived.items())}")
    return derived


# ---- from the text, this machine and the time. Every rule's evidence stands in doc/lab/own_text.md. -----------------------
#
# A plan is {setting: (value, why)}. It has two parts: the shape is needed to make the vocabulary, and the length needs the
# tokens of the text, which are counted with that vocabulary.

WIDTHS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 2048)
MINUTES = {"cpu": 5.0, "gpu": 20.0}  # where none are given
RESERVE = 0.03     # of the minutes, for what comes after the last step
EVALUATIONS = 12   # of a run
LARGE = 1 << 26    # bytes of a text that may be too large to prepare all of it
WORTH = 0.006      # of a run's time, that one of them may take
FILLED = 1.25      # how much longer a GPU may take for twice the batch; below, steps wait for kernels to be launched


def from_time(s, given):
    """
    Whether the sizes follow from --minutes: where they are given, or a text of one's own comes without a depth, a number of
    steps (which every preset has) or a time limit.
    """
    own = s.data.split(":")[0] != "stories" and s.init_from in ("auto", "scratch", "resume") and not s.eval_only
    return s.minutes > 0 or own and not given & {"depth", "max_iters", "max_minutes"}


def plan_shape(s, given, size, build, device, amp_dtype):
    """
    The widest model that the time trains on enough tokens, and that a text of `size` bytes can use. Times of steps are
    measured, from the narrowest on until the time is too short.
    """
    minutes = s.minutes or MINUTES["cpu" if device.type == "cpu" else "gpu"]
    plan, free, wrong = {}, hardware.free_memory(device), None
    for dim in (s.dim,) if "dim" in given else WIDTHS:
        wider, why = shape(s, given, dim, size), ""
        trial = s.changed(**values(wider))
        blocks, pieces = 12 * trial.n_layers * dim ** 2, pieces_of(trial, size)
        args = build.model_args(trial, pieces)
        if args.problem():  # what is given, say heads, does not go with this width
            wrong = wrong or args.problem()
            continue
        memory = sum(least_memory(args, trial.batch_size * trial.max_seq_len, s.optimizer).values())
        if blocks > blocks_for(size):
            why = "the widest that a text of this size can use"
        elif free and 2 * memory > free:
            why = "the widest that memory holds"
        elif tokens_per_step(trial) * 54 * minutes < tokens_for(blocks) * step_seconds(trial, pieces, build, device,
                                                                                       amp_dtype):
            why = "the widest that this time can train"
        if why and plan:
            plan |= {"dim": (plan["dim"][0], why)} if "dim" in plan else {}
            break
        plan = wider
    if not plan:
        fail(wrong)
    plan |= part_of_text(s, given, plan, minutes, size, build, device, amp_dtype)
    return {"minutes": (minutes, "as given" if s.minutes else "unless --minutes says otherwise")} | plan


def part_of_text(s, given, plan, minutes, size, *machine):
    """
    The plan's part for a text so large that it would be prepared for longer than it is read: at least four times what the time
    can read, at 4 bytes a token, as a power of two, so that other runs find it prepared.
    """
    if "text_most" in given or size < LARGE or s.data.split(":")[0] == "stories" or is_prepared(s.data):
        return {}
    trial = s.changed(**values(plan))
    pieces = pieces_of(trial, size)
    tokens = tokens_per_step(trial) * 54 * minutes / step_seconds(trial, pieces, *machine)
    most = max(LARGE // 4, 2 ** math.ceil(math.log2(16 * tokens)))
    why = f"bytes are prepared, of {size / 1e6:,.0f} MB and spread over them: more than there is time to read"
    return {"text_most": (most, why)} if 2 * most <= size else {}


def shape(s, given, dim, size):
    """The plan's part that the width decides, without what is given."""
    layers = s.n_layers if "n_layers" in given else max(2, dim // 64)
    context = min(64 * 2 ** round(math.log2(max(1, dim / 64))), 1024)
    held_out = size * min(s.val_fraction or 0.1, 1 - s.val_fraction)
    while context > 4 and held_out < 4 * context:  # each split has to hold one, and should hold more
        context //= 2
    context = s.max_seq_len if "max_seq_len" in given else context
    groups = s.n_kv_heads or 1  # a head has an even width
    heads = max((h for h in range(1, max(1, dim // (32 if dim < 512 else 64)) + 1) if dim % (2 * h) == 0 and h % groups == 0),
                default=groups)
    tokens = min(batch_for(12 * layers * dim ** 2), max(256, size // 100))  # the smaller the text, the more a small batch helps
    sequences = max(1, round(tokens / context))
    passes = math.ceil(sequences / 32)
    plan = {"dim": (dim, "as wide as the rules go"),
            "n_layers": (layers, "few: a short training makes more of width than of depth"),
            "n_heads": (heads, f"{s.head_width or dim // heads} dimensions each"),
            "tied": (False, "embedding and classifier learn more as two tables, where a text is read little")
                    if read_little(dim, layers, size) else (True, "embedding and classifier are one table, as it is read often"),
            "max_seq_len": (context, "tokens of context; more cost more than they teach a model of this width"),
            "batch_size": (math.ceil(sequences / passes), f"sequences of a forward pass; a step has {tokens:,} tokens, about"),
            "gradient_accumulation_steps": (passes, "forward passes a step")}
    if passes == 1:
        del plan["gradient_accumulation_steps"]
    most = vocabulary(dim, layers, size)
    if not known_pieces(s) and not s.vocab_size and most:
        share = "three quarters" if read_little(dim, layers, size) else "a third"
        plan["vocab_most"] = (most, f"pieces: at most {share} of the parameters, and as many as its size teaches")
    elif not known_pieces(s) and not s.vocab_size and "vocab_source" not in given:
        plan["vocab_source"] = ("byte", "a text too short to teach more pieces")
    return {name: both for name, both in plan.items() if name not in given}


def vocabulary(dim, n_layers, size):
    """
    Pieces of the vocabulary of a text of `size` bytes, 0 for bytes: with 6 L D rows the embedding has a third of all
    parameters, with 18 L D it and a classifier of its own have three quarters, and a piece that comes less than once in 192
    bytes is hardly learned. A text that is read often teaches fewer, 1,800 where it has 1 MB.
    """
    third = 6 * n_layers * dim
    rows = max(third, min(3 * third, 4096)) if read_little(dim, n_layers, size) else min(third, 1.8 * size ** 0.5)
    most = int(min(rows, size // 192, 32768)) // 64 * 64
    return most if most >= 384 else 0


def read_little(dim, n_layers, size):
    """Whether the tokens that this model wants, of about 3 bytes, come no more than twice in a text of `size` bytes."""
    return 3 * tokens_for(12 * n_layers * dim ** 2) <= 2 * size


def known_pieces(s):
    """Pieces of a vocabulary that is not made for this run, about; 0 where it is."""
    if is_prepared(s.data):
        with reading(s.data, "prepared data, a folder that data.py made", fail):
            return read_meta(s.data)["vocab_size"]
    return {"custom": 0, "bpe": 0, "byte": 259, "char": 128}.get(s.vocab_source.split(":")[0], 32000)


def pieces_of(s, size):
    """Pieces of the vocabulary of a text of `size` bytes, about."""
    return known_pieces(s) or s.vocab_size or s.vocab_most or usual_pieces(size)


def blocks_for(size):
    """
    Parameters of the blocks that a text of `size` bytes can use: a larger model learns it by heart. 100 kB use 112 x 2, 1 MB
    uses 192 x 3; beyond, little was tried.
    """
    return max(1000 * size ** 0.5, min(335 * size ** 0.6, 1_340_000), size / 15)


def tokens_for(blocks):
    """Tokens that so many parameters in the blocks want at least: 1.5 each for small models, 20 from 100 million on."""
    return blocks * min(20, 1.5 * max(1, blocks / 600_000) ** 0.5)


def batch_for(blocks):
    """Tokens of a step, by the FLOPs of the training, as in derive_from_depth."""
    return max(512, round(0.05 * (9 * blocks * tokens_for(blocks)) ** 0.3271))


def plan_length(s, given, meta, build, device, amp_dtype):
    """
    (seconds to train, the plan's part that needs the prepared text of `meta`): steps, rate, regularisation, evaluations. A
    text that is read often needs dropout, and is read no more often than helps.
    """
    usual = s.batch_size
    s, one = filled(s, given, meta, build, device, amp_dtype)
    seconds = training_seconds(s.minutes)
    passes = tokens_per_step(s) / meta["train_tokens"]  # of the text, in a step
    possible = seconds / one
    enough = epochs_for(meta["train_bytes"]) / passes
    steps = max(20, round(min(possible, enough)))
    epochs, limited = steps * passes, enough < possible
    rate = s.learning_rate if "learning_rate" in given else rate_for(s.dim)
    read = f"{epochs:.3g} times the text" if epochs > 1 else f"{100 * share_of(epochs, meta):.2g} % of the text"
    plan = {"max_iters": (steps, f"{read}: more often it would be learned by heart") if limited else
                         (10 * steps, f"more than there is time for; about {steps:,}, {read}"),
            "learning_rate": (rate, "falls with the width"),
            "table_rate": (2.0 if s.tied else 4.0, "embedding and classifier learn faster; more so where they are two"),
            "warmup_iters": (min(100, max(5, steps // 50)), "a fiftieth of the steps"),
            "dropout": (dropout_for(epochs), "grows with how often the text is read"),
            "weight_decay": (decay_for(epochs, passes, rate), "grows with how often the text is read, the more the smaller it is"),
            "eval_interval": (max(1, steps // EVALUATIONS), f"{EVALUATIONS} evaluations"),
            "eval_iters": (min(200, max(8, round(1.5 * WORTH * steps * tokens_per_step(s) / EVAL_TOKENS))),
                           "thousand tokens, less than a hundredth of the time"),
            "log_interval": (max(1, steps // 100), "100 rows"),
            "early_stop": (3, "evaluations without a better one; then it goes back to the best and ends soon")}
    if s.optimizer == "adamw":
        del plan["table_rate"]
    if s.batch_size > usual:
        why = f"sequences of a forward pass, {tokens_per_step(s):,} tokens a step: fewer take this GPU hardly less time"
        plan["batch_size"] = (s.batch_size, why)
    return seconds, {name: both for name, both in plan.items() if name not in given}


def filled(s, given, meta, build, device, amp_dtype):
    """
    (s, seconds of a step), with a batch that a GPU is busy with: twice as many sequences, as often as they cost little more time,
    sixteen times as many at most, and not more than the text is worth reading in the time.
    """
    one = step_seconds(s, meta["vocab_size"], build, device, amp_dtype)
    for _ in range(4 if device.type == "cuda" and not given & {"batch_size", "gradient_accumulation_steps"} else 0):
        more = s.changed(batch_size=2 * s.batch_size)
        longer = step_seconds(more, meta["vocab_size"], build, device, amp_dtype)
        epochs = training_seconds(s.minutes) / longer * tokens_per_step(more) / meta["train_tokens"]
        if longer > FILLED * one or epochs > epochs_for(meta["train_bytes"]):
            break
        s, one = more, longer
    return s, one


def share_of(epochs, meta):
    """Of the whole text what has been read, where a part of it was prepared and read `epochs` < 1 times."""
    return epochs * meta["train_bytes"] / meta.get("whole_bytes", meta["train_bytes"])


def epochs_for(size):
    """How often a text of `size` bytes is read at most."""
    return 70 * (max(size, 1000) / 10_000) ** -0.28


def dropout_for(epochs):
    return 0.0 if epochs < 5 else 0.1 if epochs < 50 else 0.2


def decay_for(epochs, passes, rate):
    """
    Weight decay that grows with how often a text is read again, up to where weights forget, in 1 / (rate * decay) steps, what
    is older than 1.5 readings. passes: readings in a step. That time: https://arxiv.org/abs/2405.13698
    """
    return min(1.0, max(0.1, float(f"{min(0.07 * (epochs - 1), passes / (1.5 * rate)):.1g}")))


def rate_for(dim):
    """The rate of Muon, and of AdamW for the rest."""
    return float(f"{6e-3 * min(1, (64 / dim) ** 0.5):.1e}")


def training_seconds(minutes):
    """What is left of the minutes to train in, of which at least the half: preparing a large text can take longer."""
    return 60 * max(minutes / 2, minutes * (1 - RESERVE) - (time.monotonic() - STARTED) / 60)


def limit(s, state, row, meta):
    """What keeps the loss of a run that is over from being lower, and what to change, in a line."""
    epochs, blocks = row["epoch"], 12 * s.n_layers * s.dim ** 2
    read = f"read {epochs:.3g} times" if epochs > 1 else f"{100 * share_of(epochs, meta):.2g} % of it was read"
    if state["last"]:
        return f"limited by the text, which is known by heart ({read}): more text lowers the loss, more time does not"
    if "whole_bytes" in meta and epochs > 1:
        return (f"limited by the {meta['train_bytes'] / 1e6:,.0f} MB of the text that were prepared ({read}): more --text_most "
                f"lowers the loss")
    if state["step"] >= s.max_iters and epochs < 0.9 * epochs_for(meta["train_bytes"]):
        return f"limited by --max_iters={s.max_iters}, as given ({read})"
    if state["step"] >= s.max_iters:
        return f"limited by the text ({read}): more text lowers the loss, more time hardly"
    if row["tokens"] > 4 * tokens_for(blocks):
        return f"limited by the size: a larger --dim (now {s.dim}) learns more in this time"
    return f"limited by the time ({read}): --minutes={4 * s.minutes:g} trains a larger model on more of the text"


def values(plan):
    return {name: value for name, (value, _) in plan.items()}


def show_plan(plan):
    distributed.say("sizes from the text, this machine and the time; what the command line gives stays:")
    for name, (value, why) in plan.items():
        distributed.say(f"  {name:14}{value!s:<8} {why}")


def show_costs(build):
    """`python model.py config/NAME.py --key=value`: what train.py would cost with these settings, without its data."""
    path = Path(__file__).resolve().parents[2] / "train.py"
    g = {name: knob[0] for name, knob in source_knobs(path).items()} | {"__file__": str(path), "__doc__": show_costs.__doc__}
    config = configure(g, positional="data", common=("dim", "n_layers", "max_seq_len", "batch_size", "vocab_size"))
    config = config.changed(compile=False)  # compiling takes a minute, and gains nothing on a CPU
    check_settings(config)
    if not config.batch_size:
        fail("--batch_size=0 finds the largest batch when a training begins; give a number here")
    device = distributed.setup(config.device)
    amp_dtype = hardware.autocast_dtype(config.dtype, device)
    pieces = known_pieces(config) or config.vocab_size or config.vocab_most or 1536  # what the built-in stories have
    if config.depth:
        config = config.changed(**derive_from_depth(config, config.given, pieces))
    if device.type == "cpu":
        hardware.keep_memory()
    args = build.model_args(config, pieces)
    if args.problem():
        fail(args.problem())
    show(config, args, device, amp_dtype, build)
