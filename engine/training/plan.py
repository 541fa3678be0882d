"""
Derive the sizes of a training: from the text, the machine and a time budget, or from a depth.

The evidence for the rules that use the text and the time budget is in doc/lab/own_text.md. Below,
`given` is the set of settings that the user has set, which no rule changes; `size` is the number of
bytes of the text; `setup` is the costs.TrialSetup with which the time of a step is measured.

A plan is {setting: (value, reason)}. It is made in four parts. plan_characters decides whether the
tokens of a small text are characters. plan_shape comes next, since the shape of the model decides
the size of any other vocabulary. Once the text is encoded, plan_context lengthens the context for
conversations, and plan_length, which needs the number of tokens, chooses the length.
"""
import math
import time
from pathlib import Path

import numpy as np

from configurator import STARTED, Config, configure, fail, source_knobs
from engine.formats.chat_template import FIRST
from engine.text import yardsticks
from engine.text.prepare import (bytes_per_character, is_prepared, read_meta, text_bytes,
                                 usual_pieces)
from engine.training import distill, distributed, hardware, lora, resume
from engine.training.costs import (Pass, TrialSetup, eval_limits, expected_memory, min_memory, show,
                                   step_seconds, tokens_per_step)
from engine.training.validate import check_settings
from engine.untrusted import reading
from tokenizer import Tokenizer

WIDTHS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024,
          1280, 1536, 2048)
DEFAULT_MINUTES = {"cpu": 5.0, "gpu": 20.0}
MAX_SEQUENCES = 32    # max sequences per forward pass
MAX_CONTEXT = 1024    # max tokens of context
RESERVE = 0.03        # fraction of the time budget reserved for the work after the last step
TRAINING_SECONDS = 54  # seconds of training expected from each minute of the time budget
EVALUATIONS = 3, 12   # min and max per run
EVAL_FRACTION = 0.08  # max fraction of a run's time for evaluations, if there are more than the min
OFTEN = 10            # min epochs for averaging weights, and for n-grams as teachers
NGRAMS_TEACH_BELOW = 200_000  # bytes; a larger text teaches a model more than n-grams do
CHARACTERS_BELOW = 300_000  # bytes of a text in a script with several bytes per character, below
                            # which characters are better tokens than bytes or subwords
TWO_TABLES_FROM = 500_000  # bytes of a text from which untied embedding and classifier memorize it
                           # no sooner than tied ones
RARE_TOKENS_BETA2 = 0.999  # with 0.95, AdamW forgets a rare token's gradients before it occurs
                           # again; the classifier gains most
LARGE_TEXT = 1 << 26  # a text of at least this many bytes may be prepared in part
GPU_BUSY = 1.25       # a GPU is busy if doubling the batch makes a step more than this many times
                      # as long; otherwise it still waits for kernel launches
GPU_MEMORY = 0.85     # max fraction of a GPU's free memory that a training is expected to use


# ---- from a depth --------------------------------------------------------------------------------

def derive_from_depth(config, given, vocab_size):
    """
    Return {setting: value} of a run with depth config.depth that a laptop can train.

    The width is 16 per layer, rounded up to whole heads of 32; the run reads 8 tokens per
    parameter. Tokens per step and learning rate follow from the FLOPs C of the run with the
    exponents of DeepSeek's fits: 0.05 C^0.3271 and 0.156 C^-0.125.
    Experiments: doc/lab/recipe.md. https://arxiv.org/abs/2203.15556,
    https://arxiv.org/abs/2401.02954
    """
    derived = {}

    def derive(name, value):
        derived[name] = getattr(config, name) if name in given else value
        return derived[name]

    dim = derive("dim", 32 * math.ceil(config.depth / 2))
    layers = derive("n_layers", config.depth)
    derive("n_heads", max(1, dim // 32))
    params = 12 * layers * dim ** 2 + dim * vocab_size  # approximately
    tokens = 8 * params
    compute = (6 * params + 12 * layers * dim * config.max_seq_len) * tokens
    sequences = max(1, round(0.05 * compute ** 0.3271 / config.max_seq_len))
    passes = math.ceil(sequences / MAX_SEQUENCES)
    batch_size = derive("batch_size", math.ceil(sequences / passes))
    passes = derive("gradient_accumulation_steps", passes)
    derive("learning_rate", float(f"{0.156 * compute ** -0.125:.1e}"))
    steps = derive("max_iters", math.ceil(tokens / (batch_size * passes * config.max_seq_len)))
    derive("warmup_iters", steps // 50)
    shown = ", ".join(f"{name}={value!r}" for name, value in derived.items())
    distributed.say(f"depth {config.depth}: {shown}")
    return derived


# ---- from the text, this machine and the time budget: the shape of the model ---------------------

def derives_from_time(config, given):
    """
    Return whether the sizes are derived from a time budget. They are if --minutes is set. Without
    it, they are for new weights trained on the user's own text, unless the user sets depth,
    max_iters (as every preset does) or max_minutes.
    """
    if config.minutes > 0:
        return True
    is_own_text = config.data.split(":")[0] != "stories"
    trains_anew = not (resume.is_fine_tuning(config) or config.eval_only)
    return is_own_text and trains_anew and not given & {"depth", "max_iters", "max_minutes"}


def plan_characters(config, given, size):
    """
    Return the plan of a vocabulary of characters for a small text in a script with several bytes
    per character; {} in other cases.
    """
    if size > CHARACTERS_BELOW or given & {"vocab_source", "vocab_size", "max_vocab_size"}:
        return {}
    if is_prepared(config.data) or config.data.split(":")[0] == "stories":
        return {}
    length = bytes_per_character(config.data, config.cache, config.column)
    if length < 1.5:
        return {}
    return {"vocab_source": ("char", f"a character has {length:.2g} bytes, and the text is too "
                                     f"short to learn characters from bytes, or to learn words")}


def plan_shape(config, given, size, setup):
    """
    Return the plan of the shape: the widest model that the text can use, that fits in memory and
    that can be trained on enough tokens within the time budget.

    Widths are tried in ascending order until one is too wide; the step of each is measured if its
    model fits text and memory. The narrowest valid width is accepted in any case. Ends the program
    if no width is valid.
    """
    device = setup.device.type
    minutes = config.minutes or DEFAULT_MINUTES["cpu" if device == "cpu" else "gpu"]
    plan, free, problem = None, hardware.free_memory(setup.device), None
    for dim in (config.dim,) if "dim" in given else WIDTHS:
        candidate = shape_of_width(config, given, dim, size)
        trial = config.changed(**values(candidate))
        block_params, vocab_size = 12 * trial.n_layers * dim ** 2, expected_vocab_size(trial, size)
        args = setup.build.model_args(trial, vocab_size)
        if args.problem():  # for example, a given number of heads does not divide it
            problem = problem or args.problem()
            continue
        reason = ""
        if block_params > max_block_params(size):
            reason = "the widest that a text of this size can use"
        elif not fits(trial, args, setup, free):
            reason = "the widest that fits into memory"
        elif not is_fast_enough(trial, vocab_size, setup, minutes):
            reason = "the widest that can be trained in this time"
        if reason and plan is not None:  # None: the first or given width is accepted
            plan["dim"] = plan["dim"][0], reason
            break
        plan = candidate
    if plan is None:
        fail(problem)
    planned = config.changed(minutes=minutes, **values(plan))
    reason = "as given" if config.minutes else "the default; --minutes changes it"
    return {"minutes": (minutes, reason)} | plan | max_text(planned, given, size, setup)


def is_fast_enough(config, vocab_size, setup, minutes):
    """
    Return whether this machine can train on min_tokens in this time. If not, the step is measured
    once more, because other programs may have slowed it.
    """
    steps = min_tokens(12 * config.n_layers * config.dim ** 2) / tokens_per_step(config)
    seconds = TRAINING_SECONDS * minutes / steps  # the longest step that is fast enough
    return any(step_seconds(config, vocab_size, setup) <= seconds for _ in range(2))


def fits(config, args, setup, free):
    """
    Return whether a training is expected to fit into `free` bytes (None: unknown).

    On a GPU the estimate is expected_memory, which has not been compared with a measured peak
    there. On a CPU it is twice the lower bound, which omits temporaries and Python itself.
    """
    if not free:
        return True
    if setup.device.type == "cuda":
        expected = expected_memory(config, args, setup.device, setup.amp_dtype)
        return sum(expected.values()) <= GPU_MEMORY * free
    one_pass = Pass(config.batch_size * config.max_seq_len)
    return 2 * sum(min_memory(args, config.optimizer, one_pass).values()) <= free


def max_text(config, given, size, setup):
    """
    Return the plan of max_text_bytes, or {} if the whole text is prepared. The limit is at least
    four times what is read within the time budget, at 4 bytes per token. It is rounded up to a
    power of two, so that other runs find the same prepared data, and omitted if it would save less
    than half of the text.
    """
    if ("max_text_bytes" in given or size < LARGE_TEXT or config.data.split(":")[0] == "stories"
            or is_prepared(config.data)):
        return {}
    step_time = step_seconds(config, expected_vocab_size(config, size), setup)
    tokens = tokens_per_step(config) * TRAINING_SECONDS * config.minutes / step_time
    limit = max(LARGE_TEXT // 4, 2 ** math.ceil(math.log2(4 * 4 * tokens)))
    if 2 * limit > size:
        return {}
    reason = (f"bytes of the {size / 1e6:,.0f} MB of text are prepared, as evenly spaced "
              f"stretches: more than can be read in this time")
    return {"max_text_bytes": (limit, reason)}


def shape_of_width(config, given, dim, size):
    """Return the part of the plan that follows from the width, without the settings in `given`."""
    layers = config.n_layers if "n_layers" in given else max(2, dim // 64)
    is_ample = has_ample_text(dim, layers, size)

    context = min(64 * 2 ** round(math.log2(max(1, dim / 64))), MAX_CONTEXT)
    # A val_fraction of 0 means a tenth.
    smaller_split = size * min(config.val_fraction or 0.1, 1 - config.val_fraction)  # bytes
    while context > 4 and smaller_split < 4 * context:  # shorter than a context of 4-byte tokens
        context //= 2
    context = config.max_seq_len if "max_seq_len" in given else context

    # RoPE needs an even head width, and query heads come in groups of equal size.
    kv_heads = config.n_kv_heads or 1
    max_heads = max(1, dim // (32 if dim < 512 else 64))
    valid = [n for n in range(1, max_heads + 1) if dim % (2 * n) == 0 and n % kv_heads == 0]
    heads = max(valid, default=kv_heads)

    # The smaller a text, the more a small batch helps: at most a token per 100 bytes of text.
    tokens = min(batch_tokens(12 * layers * dim ** 2), max(256, size // 100))
    sequences = max(1, round(tokens / context))
    passes = math.ceil(sequences / MAX_SEQUENCES)

    tied = (True, "embedding and classifier share weights, to memorize less of the text")
    vocab_size = config.vocab_size or known_vocab_size(config)  # 0: a new one, assumed large
    begins_with_counts = config.bigram_start
    if "bigram_start" not in given and size >= TWO_TABLES_FROM:
        begins_with_counts = not vocab_size or has_many_tokens(vocab_size, dim)
    if begins_with_counts or is_ample:
        tied = (False, "embedding and classifier learn more with separate weights")
    plan = {"dim": (dim, "the largest width that is tried"),
            "n_layers": (layers, "few layers: a short training gains more from width than depth"),
            "n_heads": (heads, f"{dim // heads} dimensions each"),
            "tie_embeddings": tied,
            "max_seq_len": (context, "tokens of context; more would not pay at this width"),
            "batch_size": (math.ceil(sequences / passes),
                           f"sequences per forward pass; a step has about {tokens:,} tokens")}
    if passes > 1:
        plan["gradient_accumulation_steps"] = passes, "forward passes per step"
    if not known_vocab_size(config) and not config.vocab_size:
        limit = max_vocab_size(dim, layers, size)
        share = "three quarters" if is_ample else "a third" if tied[0] else "half"
        if limit:
            plan["max_vocab_size"] = limit, (f"max vocabulary: at most {share} of the parameters, "
                                             f"and as many tokens as this text can teach")
        elif "vocab_source" not in given:
            plan["vocab_source"] = "byte", "the text is too short to learn a larger vocabulary"
    return {name: entry for name, entry in plan.items() if name not in given}


def plan_context(config, given, prepared):
    """
    Return the plan of a longer context and, in exchange, a smaller batch, if conversations need it;
    {} if they do not, and for texts, which may be cut anywhere. prepared: the Prepared tokens.
    """
    if not prepared.masks or "max_seq_len" in given:
        return {}
    starts = np.flatnonzero(prepared.masks["train"] & FIRST)
    length = np.quantile(np.diff(starts, append=len(prepared.train)), 0.95)
    context = min(MAX_CONTEXT, 64 * 2 ** math.ceil(math.log2(max(1, length / 64))))
    if context <= config.max_seq_len:
        return {}
    plan = {"max_seq_len": (context, "tokens of context, for 95 of 100 conversations or the max"),
            "batch_size": (max(1, config.batch_size * config.max_seq_len // context),
                           "sequences per forward pass; fewer, as they are longer")}
    return {name: entry for name, entry in plan.items() if name not in given}


def max_vocab_size(dim, n_layers, size):
    """
    Return the max vocabulary size for a text of `size` bytes; 0: use single bytes as tokens.

    The blocks have 12 L D^2 parameters (L layers, width D). So with 6 L D rows, a tied embedding
    has a third of all parameters; with 18 L D rows, embedding and untied classifier have three
    quarters, but more than a third is allowed only up to 4,096 rows. On average, each token needs
    192 bytes of text to be learned. A text that is not ample, and so is read often, supports fewer
    tokens: 1,800 for 1 MB.
    """
    rows_of_third = 6 * n_layers * dim
    if has_ample_text(dim, n_layers, size):
        rows = max(rows_of_third, min(3 * rows_of_third, 4096))
    else:
        rows = min(rows_of_third, 1.8 * size ** 0.5)
    rounded = int(min(rows, size // 192, 32768)) // 64 * 64
    return rounded if rounded >= 384 else 0


def has_ample_text(dim, n_layers, size):
    """Return whether two epochs have the tokens that this model needs, at 3 bytes per token."""
    return 3 * min_tokens(12 * n_layers * dim ** 2) <= 2 * size


def has_many_tokens(vocab_size, dim):
    """
    Return whether a vocabulary is so large for the width that embedding and classifier should be
    initialized from counts of token pairs. With 65 characters and width 128, a model learns more
    with random initialization.
    """
    return vocab_size >= 4 * dim


def known_vocab_size(config):
    """Return the approximate size of an existing vocabulary; 0 if a new one will be trained."""
    if is_prepared(config.data):
        with reading(config.data, "prepared data, a folder that data.py made", fail):
            return read_meta(config.data)["vocab_size"]
    if Path(config.vocab_source).is_file():
        return Tokenizer.load(config.vocab_source).vocab_size
    sizes = {"custom": 0, "bpe": 0, "byte": 259, "char": 128}
    return sizes.get(config.vocab_source.split(":")[0], 32000)


def expected_vocab_size(config, size):
    """Return the approximate vocabulary size for a text of `size` bytes."""
    return (known_vocab_size(config) or config.vocab_size or config.max_vocab_size
            or usual_pieces(size))


def max_block_params(size):
    """
    Return the max parameters of the blocks for a text of `size` bytes; a larger model memorizes it.
    100 kB allow width 112 with 2 layers, and 1 MB width 192 with 3; few experiments were made
    outside this range.
    """
    return max(1000 * size ** 0.5, min(335 * size ** 0.6, 1_340_000), size / 15)


def min_tokens(block_params):
    """Return the min tokens to train on: 1.5 per block parameter, rising to 20 at 100 million."""
    return block_params * min(20, 1.5 * max(1, block_params / 600_000) ** 0.5)


def batch_tokens(block_params):
    """
    Return the tokens per step, computed from the FLOPs of the training as in derive_from_depth. The
    FLOPs are approximated as 9 per block parameter and token.
    """
    return max(512, round(0.05 * (9 * block_params * min_tokens(block_params)) ** 0.3271))


# ---- from the text, this machine and the time budget: the length of the training -----------------

def plan_length(config, given, meta, setup):
    """
    Return (seconds to train, plan of the length): steps, learning rate, regularization and
    evaluations. The steps are those that fit into the time, but at most max_epochs of the text.
    meta: meta.json of the prepared text.
    """
    usual_batch = config.batch_size
    config, step_time = fill_gpu(config, given, meta, setup)
    seconds = training_seconds(config.minutes)
    step_epochs = tokens_per_step(config) / meta["train_tokens"]
    possible_steps = seconds / step_time
    useful_steps = max_epochs(meta["train_bytes"]) / step_epochs
    steps = max(20, round(min(possible_steps, useful_steps)))
    epochs = steps * step_epochs
    # With a GPU, steps are so fast that n-gram predictions, made by the CPU, would delay them.
    may_be_taught = ("teacher" not in given and not config.teacher and setup.device.type == "cpu"
                     and distill.ngrams_can_teach(meta) and not resume.is_fine_tuning(config))
    if may_be_taught and epochs >= OFTEN and meta["train_bytes"] < NGRAMS_TEACH_BELOW:
        config = config.changed(teacher=distill.NGRAMS_ALONE)
    written = distill.written_tokens(config, meta)  # read in addition to the text
    text_epochs = epochs * meta["train_tokens"] / (meta["train_tokens"] + written)
    rate = config.learning_rate if "learning_rate" in given else rate_for(config.dim)
    # Whether the model is new and has many tokens.
    has_many = (has_many_tokens(meta["vocab_size"], config.dim)
                and not resume.is_fine_tuning(config))
    begins_with_counts = config.bigram_start
    if "bigram_start" not in given:
        begins_with_counts = has_many and not config.tie_embeddings
    # Bytes, characters and the subword tokens of the built-in stories are all frequent. With Muon,
    # beta2 applies to embedding, classifier, norms and biases; with AdamW it would apply to the
    # blocks too.
    has_rare_tokens = (has_many and meta.get("vocab_source") not in ("byte", "char")
                       and config.data.split(":")[0] != "stories")
    averages_for_long = has_rare_tokens and config.optimizer == "muon"

    read = f"{epochs:.3g} times the text"
    if epochs <= 1:
        read = f"{100 * fraction_read(epochs, meta):.2g} % of the text"
    max_iters = 10 * steps, (
        f"more than the time allows, which is about {steps:,} steps, {read}")
    if useful_steps < possible_steps:
        max_iters = steps, f"{read}: the model would memorize it if it read it more often"
    # Every evaluation reads the same tokens on fast and slow machines, so that runs are comparable.
    # Per token, a training step computes three times as much as an evaluation.
    eval_tokens = sum(eval_limits(config.eval_iters, meta).values())
    affordable = 3 * EVAL_FRACTION * steps * tokens_per_step(config) / eval_tokens
    evaluations = min(max(int(affordable), EVALUATIONS[0]), EVALUATIONS[1])
    plan = {"max_iters": max_iters,
            "learning_rate": (rate, "falls with widths above 64"),
            "bigram_start": (begins_with_counts,
                             "embedding and classifier start from bigram counts"),
            "embedding_lr_scale": (2.0 if config.tie_embeddings or begins_with_counts else 4.0,
                                   "embedding and classifier learn faster than the blocks"),
            "beta2": (RARE_TOKENS_BETA2, "AdamW averages squared gradients over 1,000 steps, as "
                                         "most tokens are rare"),
            "warmup_iters": (min(100, max(5, steps // 50)), "a fiftieth of the steps; 5 to 100"),
            "dropout": (dropout_for(text_epochs), "0.1 from 5 epochs on, 0.2 from 50"),
            "weight_decay": (decay_for(text_epochs, step_epochs, rate),
                             "grows with the number of epochs, more so for a small text"),
            "weight_average": (average_for(text_epochs), "the fraction of the steps over which "
                               "weights are averaged, if the text is read often"),
            "eval_interval": (max(1, steps // evaluations), f"{evaluations} evaluations"),
            "log_interval": (max(1, steps // 100), "100 rows"),
            "early_stop": (3, "evaluations without a new best; then the run returns to the best "
                              "weights and ends soon")}
    if not begins_with_counts:
        del plan["bigram_start"]
    if not averages_for_long:
        del plan["beta2"]
    if config.teacher == distill.NGRAMS_ALONE:
        plan["teacher"] = config.teacher, "also learn the predictions of n-grams of the text"
    if config.optimizer == "adamw":
        del plan["embedding_lr_scale"]
    if written:
        del plan["early_stop"]  # the model can't memorize what its teachers write
    if config.batch_size > usual_batch:
        plan["batch_size"] = config.batch_size, (
            f"sequences per forward pass, {tokens_per_step(config):,} tokens per step: fewer would "
            f"leave this GPU idle")
    return seconds, {name: entry for name, entry in plan.items() if name not in given}


def fill_gpu(config, given, meta, setup):
    """
    Return (config, seconds of a step), with a batch that keeps a GPU busy. The batch is doubled at
    most four times, while it fits into the GPU's memory, a step gets only a little longer, and the
    text is read at most max_epochs times.
    """
    step_time = step_seconds(config, meta["vocab_size"], setup)
    if setup.device.type != "cuda" or given & {"batch_size", "gradient_accumulation_steps"}:
        return config, step_time
    args = setup.build.model_args(config, meta["vocab_size"])
    free = hardware.free_memory(setup.device)
    for _ in range(4):
        doubled = config.changed(batch_size=2 * config.batch_size)
        if not fits(doubled, args, setup, free):
            break
        try:
            doubled_time = step_seconds(doubled, meta["vocab_size"], setup)
        except RuntimeError as e:
            if not hardware.is_out_of_memory(e):
                raise
            break
        steps = training_seconds(config.minutes) / doubled_time
        epochs = steps * tokens_per_step(doubled) / meta["train_tokens"]
        if (doubled_time > GPU_BUSY * step_time
                or epochs > max_epochs(meta["train_bytes"])):
            break
        config, step_time = doubled, doubled_time
    return config, step_time


def fraction_read(epochs, meta):
    """Return the fraction of the whole text that `epochs` (<= 1) of its prepared part are."""
    return epochs * meta["train_bytes"] / meta.get("whole_bytes", meta["train_bytes"])


def max_epochs(size):
    """Return the max epochs for a text of `size` bytes: 70 for 10 kB, 19 for 1 MB."""
    return 70 * (max(size, 1000) / 10_000) ** -0.28


def dropout_for(epochs):
    if epochs < 5:
        return 0.0
    return 0.1 if epochs < 50 else 0.2


def average_for(epochs):
    """
    Return weight_average, which is not 0 if the text is read often. Then a model memorizes it as
    the learning rate falls, and averaged weights are better than the last ones.
    """
    return 0.15 if epochs >= OFTEN else 0.0


def decay_for(epochs, step_epochs, rate):
    """
    Return a weight decay that grows with the number of epochs. It is limited because weights forget
    within 1 / (rate * decay) steps, which must be at least 1.5 epochs; it is at least 0.1.
    step_epochs: epochs of a step.
    https://arxiv.org/abs/2405.13698
    """
    decay = min(0.07 * (epochs - 1), step_epochs / (1.5 * rate))
    return min(1.0, max(0.1, float(f"{decay:.1g}")))


def rate_for(dim):
    """Return the learning rate for a model of this width, for Muon and AdamW alike."""
    return float(f"{6e-3 * min(1, (64 / dim) ** 0.5):.1e}")


def training_seconds(minutes):
    """
    Return the seconds left for training: the time budget without RESERVE and the time since the
    program started, but at least half of the budget, as preparing a large text can take longer.
    """
    spent = (time.monotonic() - STARTED) / 60
    return 60 * max(minutes / 2, minutes * (1 - RESERVE) - spent)


# ---- for other programs --------------------------------------------------------------------------

def text_settings(values, given, build):
    """
    Return the plan of the settings with which `train.py --data=SOURCE` prepares its text on this
    machine: those of the vocabulary, and max_text_bytes. values: {setting of train.py: value};
    given: names of those that the user set.
    """
    path = Path(__file__).resolve().parents[2] / "train.py"
    defaults = {name: knob[0] for name, knob in source_knobs(path).items()}
    config = Config(defaults | values, defaults, given)
    if is_prepared(config.data) or not derives_from_time(config, given):
        return {}
    size = text_bytes(config.data, config.cache, config.column)
    plan = plan_characters(config, given, size)
    if not plan:
        device = distributed.setup(config.device)
        setup = TrialSetup(build, device, hardware.use_dtype(config, device, config.dim))
        plan = plan_shape(config, given, size, setup)
    names = "vocab_source", "max_vocab_size", "max_text_bytes"
    return {name: plan[name] for name in names if name in plan}


# ---- messages for the user -----------------------------------------------------------------------

def limiting_factor(config, state, row, meta):
    """
    Return a line that names what limits the loss of a finished run, and what to change. row: the
    last logged row.
    """
    epochs = row["epoch"]
    read = f"read {epochs:.3g} times"
    if epochs <= 1:
        read = f"{100 * fraction_read(epochs, meta):.2g} % of it was read"
    if state["last"]:  # set only if early_stop has chosen the last step
        return (f"limited by the text, which the model has memorized ({read}): "
                f"{beyond_the_text(config, state, meta)}")
    if "whole_bytes" in meta and epochs > 1:
        return (f"limited by the {meta['train_bytes'] / 1e6:,.0f} MB of the text that were "
                f"prepared ({read}): more --max_text_bytes lowers the loss")
    # A max_iters that is reached before max_epochs was given by the user. Derived steps include
    # those on teachers' text.
    planned = epochs * (1 + distill.written_tokens(config, meta) / meta["train_tokens"])
    if state["step"] >= config.max_iters and planned < 0.9 * max_epochs(meta["train_bytes"]):
        return f"limited by --max_iters={config.max_iters}, as given ({read})"
    if state["step"] >= config.max_iters or yardsticks.gap(row, meta):
        return f"limited by the text ({read}): {beyond_the_text(config, state, meta)}"
    if row["tokens"] > 4 * min_tokens(12 * config.n_layers * config.dim ** 2):
        return (f"limited by the size: a larger --dim (now {config.dim}) learns more in this "
                f"time")
    gain = "a larger model on more of the text" if epochs <= 1 else "longer, or a larger model"
    return f"limited by the time ({read}): --minutes={4 * config.minutes:g} trains {gain}"


def beyond_the_text(config, state, meta):
    """Return words that say what lowers a loss that is limited by the text."""
    words = "more text lowers the loss, more time hardly does"
    # Where n-grams already write text, models as teachers would add nothing.
    is_taught = config.teacher and (distill.paths(config.teacher)
                                    or distill.written_tokens(config, meta))
    refuses_teachers = "teacher" in config.given and not config.teacher  # as a teacher itself does
    is_too_large = meta["train_tokens"] > distill.MAX_TOKENS
    if is_taught or refuses_teachers or is_too_large or "chat_template" in meta:
        return words
    minutes = math.ceil(5 * state["clock"]["seconds"] / 60)  # 3 teachers + 2 for the student
    return f"{words} unless teachers use it: --teacher=auto --minutes={minutes}"


def values(plan):
    """Return {setting: value} of a plan."""
    return {name: value for name, (value, _) in plan.items()}


def show_plan(plan):
    distributed.say("settings derived from the text, this machine and the time; those given on the "
                    "command line stay:")
    for name, (value, reason) in plan.items():
        distributed.say(f"  {name:18} {value!s:<8} {reason}")


def show_costs(build):
    """
    Print what train.py would cost with these settings, without its data.

        python model.py config/NAME.py --key=value
    """
    path = Path(__file__).resolve().parents[2] / "train.py"
    knobs = {name: knob[0] for name, knob in source_knobs(path).items()}
    # --help of that command shows this docstring and train.py's knobs.
    knobs |= {"__file__": str(path), "__doc__": show_costs.__doc__}
    config = configure(knobs, positional="data", common=(
        "dim", "n_layers", "max_seq_len", "batch_size", "vocab_size"))
    config = config.changed(compile=False)  # takes a minute, and gains nothing on a CPU
    check_settings(config)
    if not config.batch_size:
        fail("--batch_size=0 finds the largest batch when a training begins; give a number here")
    device = distributed.setup(config.device)
    stories = 1536  # vocabulary size of the built-in stories
    vocab_size = known_vocab_size(config) or config.vocab_size or config.max_vocab_size or stories
    if config.depth:
        config = config.changed(**derive_from_depth(config, config.given, vocab_size))
    if device.type == "cpu":
        hardware.keep_memory()
    amp_dtype = hardware.use_dtype(config, device, config.dim)
    adapters = lora.new(config, amp_dtype, vocab_size) if config.lora_rank else None
    setup = TrialSetup(build, device, amp_dtype, adapters)
    args = build.model_args(config, vocab_size)
    if args.problem():
        fail(args.problem())
    show(config, args, setup)
