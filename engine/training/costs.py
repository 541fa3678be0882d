"""
Estimate what a training costs before it begins: parameters, FLOPs, memory and time.

Arithmetic gives a lower bound of the memory (min_memory) and an expected peak (expected_memory);
a trial training on random tokens measures time and corrects the expected peak.
"""
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

from configurator import fail
from engine.formats import layout
from engine.ops import CrossEntropy
from engine.streams import format_seconds
from engine.text import yardsticks
from engine.training import distill, distributed, hardware, lora

PROBED = 1 << 22    # max logits that probe() of instruments.py holds at a time: 16 MiB per copy
EVAL_TOKENS = 1024  # tokens in one unit of eval_iters
TRAIN_EVAL = 8192   # min tokens of the training split that an evaluation reads, but at most as many
                    # as it reads of the validation split
SAMPLE_TOKENS = 96  # max tokens of a sample of an evaluation
EVAL_PASS = 4096    # tokens per forward pass of an evaluation; with passes of 1024, the smallest
                    # models take up to 30 % longer


class Build(NamedTuple):
    """
    The functions that make a trial training.

    model_args(config, vocab_size) returns ModelArgs, whose build(device) returns the model;
    make_optimizer(model, config) returns its optimizer.
    """
    model_args: Callable
    make_optimizer: Callable


class TrialSetup(NamedTuple):
    """
    What a trial training needs besides its settings. amp_dtype: torch dtype of autocast; lora: a
    lora.LoRA, None if all weights are trained.
    """
    build: Build
    device: torch.device
    amp_dtype: torch.dtype
    lora: Any = None


class Pass(NamedTuple):
    """
    The properties of a forward and backward pass that decide how much memory it needs.

    tokens: per pass; half: matrix products run in a 16-bit type; recompute: blocks keep only their
    input, and recompute the rest in the backward pass; accumulating: a step has several passes;
    shards: number of processes over which weights and optimizer are split.
    """
    tokens: int
    half: bool = False
    recompute: bool = False
    accumulating: bool = False
    shards: int = 1


def tokens_per_step(config):
    return config.batch_size * config.gradient_accumulation_steps * config.max_seq_len


def sequences_per_rank(config):
    """Return the sequences of a step that one process computes; the last process may have fewer."""
    return math.ceil(config.batch_size * config.gradient_accumulation_steps / distributed.world)


def largest_pass(config, amp_dtype, rows=0):
    """Return the Pass of `rows` sequences; rows=0: as many as the settings' largest pass has."""
    sequences = sequences_per_rank(config)
    rows = rows or min(config.batch_size, sequences)
    shards = distributed.world if config.fsdp else 1
    return Pass(rows * config.max_seq_len, amp_dtype != torch.float32,
                config.activation_checkpointing, sequences > rows, shards)


# ---- parameters and FLOPs ------------------------------------------------------------------------

def parameter_kind(name, parameter):
    """Return the kind that a parameter is counted as. Vectors, biases included, count as norms."""
    if parameter.dim() < 2:
        return "norms"
    part = name.split(".")[0]
    if part == "layers":
        return "attention" if ".attention." in name else "feed-forward"
    return {"tok_embeddings": "embedding", "output": "lm_head"}.get(part, "norms")


MAX_BUILT = 64  # max layers to build for counting parameters; further ones are like the last
counted = {}    # {repr of ModelArgs: counts}, a cache for `parameters`


def parameters(args):
    """
    Return {kind: number of parameters} of the model of ModelArgs; a parameter that two modules
    share counts once.
    """
    key = repr(args)
    if key not in counted:
        counted[key] = count_parameters(args)
    return counted[key]


def count_parameters(args):
    """Return {kind: number of parameters}, counted in a model built on the meta device."""
    if args.n_layers > MAX_BUILT:  # a mistyped number of layers would take much memory and time
        most = parameters(replace(args, n_layers=MAX_BUILT))
        one_less = parameters(replace(args, n_layers=MAX_BUILT - 1))
        unbuilt = args.n_layers - MAX_BUILT
        return {kind: count + unbuilt * (count - one_less[kind]) for kind, count in most.items()}
    counts = dict.fromkeys(("embedding", "attention", "feed-forward", "norms", "lm_head"), 0)
    for name, parameter in args.build("meta").named_parameters():
        counts[parameter_kind(name, parameter)] += parameter.numel()
    return counts


def num_params(args):
    return sum(parameters(args).values())


class Weights(NamedTuple):
    """
    The weights of a training. trained: number of trained parameters; matrices: number of those that
    Muon updates; frozen: bytes of the frozen parameters.
    """
    trained: int
    matrices: int
    frozen: int


weighed = {}  # {(repr of ModelArgs, LoRA): Weights}, a cache for `weights`


def weights(args, adapters=None):
    """Return the Weights of the model of ModelArgs. adapters: a lora.LoRA or None."""
    if adapters is None:
        counts = parameters(args)
        return Weights(sum(counts.values()), counts["attention"] + counts["feed-forward"], 0)
    key = repr(args), adapters
    if key not in weighed:
        trained, frozen = lora.split(lora.build(args, adapters, "meta"))
        matrices = sum(p.numel() for name, p in trained.items() if name.startswith("layers."))
        weighed[key] = Weights(sum(p.numel() for p in trained.values()), matrices,
                               sum(p.nbytes for p in frozen.values()))
    return weighed[key]


def flops_per_token(args, predicted=1.0, adapters=None):
    """
    Return the FLOPs of forward and backward per token: 6 N + 12 L H Q T.

    N counts the lm_head but not the embedding, which is a look-up. The second term is attention: L
    layers, H heads of Q dimensions, a context of T. https://arxiv.org/abs/2204.02311 appendix B
    predicted: the fraction of tokens for which the lm_head computes logits.

    With adapters, a lora.LoRA, the first term is 4 N for frozen weights, which need no gradient,
    and 6 N for trained ones.
    """
    counts = parameters(args)
    lm_head = args.vocab_size * args.dim
    n = sum(counts.values()) - (0 if args.tied else counts["embedding"])
    n -= round(lm_head * (1 - predicted))
    if adapters is None:
        return 6 * n + attention_flops_per_token(args)
    return 4 * n + 6 * weights(args, adapters).trained + attention_flops_per_token(args)


def attention_flops_per_token(args):
    """Return the part of flops_per_token that is proportional to the context."""
    return 12 * args.n_layers * args.n_heads * args.head_dim * args.max_seq_len


# ---- memory --------------------------------------------------------------------------------------

def persistent_memory(args, optimizer, shards=1, adapters=None):
    """
    Return {"weights": bytes, "optimizer": bytes} that one process holds between steps. With
    adapters, a lora.LoRA, "weights" are the trained ones, and "frozen weights" comes first.
    """
    found = weights(args, adapters)
    # AdamW keeps two numbers per weight, Muon one; the state of other optimizers is unknown.
    states = {"adamw": 2 * found.trained, "muon": 2 * found.trained - found.matrices}
    kinds = {"frozen weights": found.frozen} if adapters else {}
    return kinds | {"weights": 4 * found.trained / shards,
                    "optimizer": 4 * states.get(optimizer, 0) / shards}


def larger(first, second):
    """Return the {kind: bytes} with the larger sum."""
    return max(first, second, key=lambda kinds: sum(kinds.values()))


def min_memory(args, optimizer, step, adapters=None):
    """
    Return {kind: bytes}, a lower bound of what a training step holds at once, by arithmetic alone.

    args: ModelArgs; optimizer: a name in OPTIMIZERS; step: a Pass; adapters: a lora.LoRA or None.
    Temporaries and Python's own memory are left out.
    """
    q_dim, kv_dim = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    size = 2 if step.half else 4
    # Bytes that a block keeps per token. With recompute, only its input. Otherwise the inputs of
    # its two norms, in float32; and in `size` bytes per number Q, K, V, attention's output, the two
    # halves of SwiGLU, and Q and K before qk_norm.
    block = size * args.dim
    if not step.recompute:
        block = 8 * args.dim + size * (2 * (q_dim + kv_dim + args.hidden_dim)
                                       + args.qk_norm * (q_dim + kv_dim))
    kinds = persistent_memory(args, optimizer, step.shards, adapters)
    # The first block of a LoRA may need no gradients before its first adapter: don't count it.
    layers = args.n_layers - (adapters is not None)
    # CrossEntropy holds one piece of the logits at a time. It cuts them into equal pieces of at
    # most PIECE; if there are several, each has at least PIECE // 2.
    inside = {"activations": step.tokens * layers * block,
              "logits": 4 * min(step.tokens * args.vocab_size, CrossEntropy.PIECE // 2)}
    # All gradients exist only after the last pass, when its activations are freed. So the peak is
    # the larger of what exists inside a pass and after it. With several passes, the gradients also
    # exist inside all passes but the first.
    after = {"gradients": kinds["weights"]}
    if step.accumulating:
        inside |= after
    return kinds | larger(inside, after)


# Memory of a CPU process besides its tensors. PYTHON counts only if no trial training runs. LATER
# counts only if one runs, because a trial ends too early to measure this memory. HOLES counts in
# both cases. Experiments: doc/lab/instruments.md.
PYTHON = 272 << 20  # bytes of a process that has imported and called everything training needs
LATER = 20 << 20    # bytes of code and files that a training loads after its first steps
HOLES = 0.27        # fraction of a pass's memory that is lost to fragmentation of the heap


def block_activations(config, args, half, cpu):
    """Return the bytes per token that one block keeps for its backward pass."""
    q_dim, kv_dim = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    size = 2 if half else 4
    # The float32 inputs of both norms; on a CPU in float32 they are recomputed from the outputs.
    block = 0 if cpu and not half else 8 * args.dim
    # Both norms' outputs, Q and the attention's output, K and V, Q and K before qk_norm.
    block += size * (2 * args.dim + 2 * (q_dim + kv_dim) + args.qk_norm * (q_dim + kv_dim))
    # SwiGLU: its two halves, and what the device keeps of their product.
    hidden_copies = 4
    if cpu:
        hidden_copies = 3 if half else 2
    block += size * args.hidden_dim * hidden_copies
    # Statistics of norms and attention; each block also keeps the document mask as numbers.
    return block + 4 * (args.n_heads + 2) + config.document_mask * size * config.max_seq_len


def expected_memory(config, args, device, amp_dtype, rows=0, adapters=None):
    """
    Return {kind: bytes} of the expected peak of a training process: tensors, and on a CPU the
    fragmentation of the heap.

    "working" holds the temporaries of a step, and on a CPU that fragmentation. rows: sequences of a
    forward pass; 0: those of the settings. adapters: a lora.LoRA or None.
    """
    step, cpu = largest_pass(config, amp_dtype, rows), device.type == "cpu"
    tokens, half, size = step.tokens, step.half, 2 if step.half else 4
    q_dim = args.n_heads * args.head_dim

    block = block_activations(config, args, half, cpu)
    # With recompute every block keeps its input, and one block at a time the rest.
    kept = block + 4 * args.dim * args.n_layers if step.recompute else block * args.n_layers
    piece = CrossEntropy.PIECE if cpu else CrossEntropy.GPU_PIECE
    # A piece of float32 logits, with a 16-bit copy if half.
    logits = 4 * min(tokens * args.vocab_size, piece) * (1.5 if half else 1)
    # The float32 gradients of the cross entropy's input and of the lm_head's weights, counted twice
    # as an allowance for temporary copies of either.
    logits += 8 * (tokens + (0 if adapters else args.vocab_size)) * args.dim
    table = "tok_embeddings" if args.tied else "output"
    if adapters and (table in adapters.quantized or args.vocab_size > adapters.frozen_rows):
        logits += size * args.vocab_size * args.dim  # the classifier, dequantized or with new rows
    kinds = persistent_memory(args, config.optimizer, step.shards, adapters)
    if config.weight_average:
        kinds["optimizer"] += kinds["weights"]
    kinds["gradients"] = kinds["weights"]
    # Autocast keeps 16-bit copies of the weights.
    kinds["activations"] = tokens * (kept + 8 * args.dim) + half * kinds["weights"] / 2
    kinds["logits"] = logits

    # Muon updates the matrices of one shape together, up to Muon.MAX_CHUNK elements. The largest
    # stack holds, of all layers, either Q and O (with K and V, if these have as many heads) or two
    # of SwiGLU's three matrices. The number of copies is fitted to runs; wide matrices need fewer,
    # as they are orthogonalized in bfloat16 where the device has it.
    alike = 4 if args.n_kv_heads == args.n_heads else 2
    stacked = args.n_layers * args.dim * max(alike * q_dim, 2 * args.hidden_dim)
    copies = 4.3 if args.dim >= 128 else 6
    if adapters:
        stacked, copies = weights(args, adapters).matrices, 6
    update = 4 * min(stacked, 1 << 28) * copies if config.optimizer == "muon" else 0
    # The temporaries of SwiGLU's backward pass reuse the memory of the freed logits.
    backward = max(0, 3 * size * tokens * args.hidden_dim - logits)
    if cpu:
        holes = HOLES * (kinds["activations"] + logits + backward)
        return kinds | {"working": update + backward + holes}

    # A GPU's allocator reuses memory, so the peak is either in a pass or in an update.
    inside = {"activations": kinds.pop("activations"), "logits": kinds.pop("logits"),
              "working": backward}
    after = {"gradients": kinds.pop("gradients"), "working": update}
    if step.accumulating:
        inside["gradients"] = after["gradients"]
    return kinds | larger(inside, after)


def refuse_too_large(config, args, setup):
    """End the program if even the lower bound of a training's memory exceeds what is free."""
    device = setup.device
    # Processes share the memory of a CPU; each has a GPU of its own.
    processes = 1 if device.type == "cuda" else distributed.local_world
    free = hardware.free_memory(device)

    def bound(rows):
        step = largest_pass(config, setup.amp_dtype, rows)
        # A compiled block may recompute, too: only its input is sure to be kept.
        step = step._replace(recompute=config.compile or config.activation_checkpointing)
        return min_memory(args, config.optimizer, step, setup.lora)

    kinds = bound(0)
    total = sum(kinds.values())
    if free is None or total * processes <= free:
        return
    if sum(bound(1).values()) * processes <= free:
        advice = (f"lower --batch_size (now {config.batch_size}) and raise "
                  f"--gradient_accumulation_steps by the same factor")
    else:
        advice = (f"choose a smaller --dim (now {args.dim}), --n_layers (now {args.n_layers}) or "
                  f"--depth")
    parts = ", ".join(f"{kind} {size / 2 ** 30:.1f}" for kind, size in kinds.items())
    each = f" in each of {processes} processes" if processes > 1 else ""
    fail(f"this training needs at least {total / 2 ** 30:.1f} GiB of memory ({parts}){each} and "
         f"{free / 2 ** 30:.1f} are free; {advice}")


# ---- a trial training ----------------------------------------------------------------------------

class TrialTraining:
    """
    A model and its optimizer that train on random tokens. A step takes as long as one of train.py,
    since it also masks documents, clips gradients and waits for its result.
    """

    def __init__(self, config, vocab_size, setup):
        self.config, self.vocab_size, self.device = config, vocab_size, setup.device
        args = setup.build.model_args(config, vocab_size)
        hardware.use_dtype(config, setup.device, args.dim)  # as train.py does
        self.model = lora.build(args, setup.lora, setup.device)
        for p in lora.split(self.model)[1].values():
            p.fill_(1 if p.dtype == torch.int8 else 0.01)
        self.model.bos_id = 1 if config.document_mask else None
        self.model.recompute = config.activation_checkpointing
        self.optimizer = setup.build.make_optimizer(self.model, config)
        self.amp = torch.autocast(setup.device.type, setup.amp_dtype,
                                  enabled=setup.amp_dtype != torch.float32)

    def tokens(self, rows):
        return torch.randint(self.vocab_size, (rows, self.config.max_seq_len), device=self.device)

    def forward_backward(self, rows):
        x = self.tokens(rows)
        with self.amp:
            loss = self.model(x, x)[1]
        loss.backward()
        return loss.detach()

    def update(self):
        max_norm = self.config.grad_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        norm.item()  # wait for the device, as train.py does
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def check(self):
        """
        Take a step while a copy of the weights exists, as the learning rate check of
        model_checks.py does, so that the measured memory includes the copy. Return the copy.
        """
        before = [p.detach().clone() for p in self.model.parameters() if p.requires_grad]
        self.forward_backward(max(1, 1024 // self.config.max_seq_len))
        self.update()
        return before

    @torch.no_grad()
    def predict(self):
        """Return the top 3 predictions at every n-th position, computed as probe() does."""
        x = self.tokens(4)
        every = math.ceil(x.numel() * self.vocab_size / PROBED)
        with self.amp:
            logits = self.model(x, every=every)[0].float()
        return logits.softmax(-1).topk(min(3, self.vocab_size))

    @torch.no_grad()
    def forward(self, rows):
        with self.amp:
            x = self.tokens(rows)
            return self.model(x, x)[1]

    def generate(self, n):
        """Return the samples of an evaluation, two per prompt: a first token and n generated."""
        rows = 2 * len(self.config.sample_prompt.split("|"))
        return torch.tensor(self.model.generate(self.tokens(rows)[:, :1], n))


def timed(work, *args):
    """Return the seconds that work(*args) takes, including the wait for an asynchronous device."""
    start = time.perf_counter()
    work(*args).sum().item()
    return time.perf_counter() - start


def measured_step(trial, seconds):
    """
    Return (seconds of a training step, sequences of a measured pass).

    Steps are measured for `seconds`, or 2 % of the run if that is shorter, but at least three. Only
    a part of a large batch is measured, and its time scaled up. The medians leave out the first
    measurement.
    """
    config, sequences = trial.config, sequences_per_rank(trial.config)
    # The first calls load libraries, so they are not measured.
    timed(trial.forward_backward, 1)
    timed(trial.update)
    one = timed(trial.forward_backward, 1)
    seconds = min(seconds, 0.02 * config.max_iters * sequences * one)
    rows = max(1, min(config.batch_size, sequences, int(max(seconds, 0.4) / 4 / one)))
    passes, updates, end = [], [], time.perf_counter() + seconds
    while len(passes) < 3 or time.perf_counter() < end:
        passes.append(timed(trial.forward_backward, rows))
        updates.append(timed(trial.update))
    one_pass = sequences / rows * statistics.median(passes[1:])
    # Assume teachers as large as the model: the forward pass of each takes a third of the time of
    # forward and backward.
    one_pass *= 1 + len(distill.paths(config.teacher)) / 3
    return one_pass + statistics.median(updates[1:]), rows


def measure(config, args, setup, seconds=1.0):
    """
    Return the costs found by a trial training: {"step": seconds of a step, "forward": seconds per
    token of an evaluation, "sample": seconds to add one token to every sample of an evaluation,
    "memory": peak bytes of the process, or on a GPU of its tensors}.
    """
    trial, sequences = TrialTraining(config, args.vocab_size, setup), sequences_per_rank(config)
    step, rows = measured_step(trial, seconds)

    # Memory is measured with as many sequences as the time allows. If a step has more, a second
    # pass runs while the gradients of the first exist.
    tried = min(config.batch_size, sequences, max(rows, int(seconds * sequences / step)))
    if rows < sequences:  # otherwise whole steps were measured above
        for _ in range(min(2, math.ceil(sequences / tried))):
            trial.forward_backward(tried)
        trial.update()
    trial.check()
    trial.model.eval()
    trial.predict()
    forward = forward_seconds(trial, rows, seconds)
    sample = min(timed(trial.generate, 8) for _ in range(2)) / 8

    whole, part = (
        expected_memory(config, args, setup.device, setup.amp_dtype, rows, setup.lora)
        for rows in (0, tried))
    # The trial's own memory is measured; arithmetic adds what the full batch needs beyond that.
    memory = sum(whole.values()) - sum(part.values())
    if setup.device.type == "cpu":
        # The heap does not shrink, so the current memory is about the trial's peak. A longer
        # training adds code that is loaded later, and more fragmentation.
        memory += hardware.current_memory(setup.device) + LATER
        memory += HOLES * (whole["activations"] + whole["logits"])
    else:
        memory += hardware.peak_memory(setup.device)
    return {"step": step, "forward": forward, "sample": sample, "memory": memory}


def forward_seconds(trial, rows, seconds):
    """
    Return the seconds per token of an evaluation, measured with passes of `rows` sequences, or of
    EVAL_PASS tokens if two of those take less than `seconds`.
    """
    def per_token(n):
        return min(timed(trial.forward, n) for _ in range(2)) / n / trial.config.max_seq_len

    found, eval_rows = per_token(rows), EVAL_PASS // trial.config.max_seq_len
    if rows < eval_rows and 2 * EVAL_PASS * found < seconds:
        return per_token(eval_rows)
    return found


def step_seconds(config, vocab_size, setup):
    """Return the seconds of a training step, measured for 0.3 seconds."""
    return measured_step(TrialTraining(config, vocab_size, setup), 0.3)[0]


# ---- a run's estimate ----------------------------------------------------------------------------

def estimate_run(config, args, setup, meta, begun=0):
    """
    Return {"memory": {kind: bytes}, "seconds", "tokens_per_sec"}, expected of a run.

    meta: meta.json of the prepared data; begun: steps that the run has already taken. With
    config.minutes, "seconds" is that time budget, and "tokens_per_sec" is None. Otherwise both are
    None for a compiled or sharded run, whose trial would take too long, and if no steps are left.
    """
    cpu, steps_left = setup.device.type == "cpu", config.max_iters - begun
    token_bytes = 2 if args.vocab_size <= 1 << 16 else 4
    # Bytes of the data that get mapped into memory: twice the tokens that the remaining steps read,
    # a rough allowance for whole pages and for evaluations, but at most all tokens of the data.
    text = token_bytes * min(meta["train_tokens"] + meta["val_tokens"],
                             2 * steps_left * tokens_per_step(config))
    kinds = expected_memory(config, args, setup.device, setup.amp_dtype, adapters=setup.lora)
    seconds, speed = 60 * config.minutes or None, None
    rest = PYTHON * cpu
    if not (config.compile or config.fsdp or steps_left < 1):
        found = measure(config, args, setup, 0.1 if config.minutes else 1.0)
        step, forward, sample, memory = distributed.all_max([*found.values()], setup.device)
        kinds.pop("working")
        rest = max(0, memory - sum(kinds.values()))
        if not config.minutes:
            evaluations = math.ceil(steps_left / config.eval_interval) + (begun == 0)
            seconds = steps_left * step
            seconds += evaluations * evaluation_seconds(config, meta, forward, sample)
            speed = tokens_per_step(config) / step
    kinds["text"] = text * cpu
    kinds["n-grams"] = distill.ngrams_memory(config, meta)
    kinds["Python, torch and temporary buffers" if cpu else "temporary buffers"] = rest
    return {"memory": kinds, "seconds": seconds, "tokens_per_sec": speed}


def eval_limits(eval_iters, meta):
    """
    Return {split: max predictions of an evaluation}. eval_iters: the setting of train.py; meta:
    meta.json of the prepared text. The training split gets a quarter of the predictions, as its
    loss only shows whether the model memorizes the text, but not fewer than TRAIN_EVAL if the
    validation split has as many.
    """
    available = meta["val_tokens"] - meta["val_documents"]
    val = min(EVAL_TOKENS * eval_iters or available, available)
    return {"train": min(val, max(TRAIN_EVAL, val // 4)), "val": val}


def evaluation_seconds(config, meta, forward, sample):
    """
    Return the seconds of an evaluation: both splits, the probe batches (four windows of each split)
    and the samples, which are generated together, up to SAMPLE_TOKENS each. forward: seconds per
    token; sample: seconds to add one token to every sample.
    """
    predictions = sum(eval_limits(config.eval_iters, meta).values())
    tokens = predictions / distributed.world + 8 * config.max_seq_len
    return tokens * forward + SAMPLE_TOKENS * sample


def describe(config, args, dataset, setup, estimate):
    """
    Print the derived values, and return them as a part of the recorded configuration. estimate:
    what estimate_run returned.
    """
    device, meta, say = setup.device, dataset.meta, distributed.say
    peak, basis = hardware.peak_flops(device, setup.amp_dtype, config.peak_tflops)
    name = hardware.device_name(device)
    # On the CPU, ops.cross_entropy computes logits only for answers.
    predicted = dataset.answer_share if dataset.masks and device.type == "cpu" else 1.0
    derived = {"model_args": asdict(args), "n_params": num_params(args),
               "n_trained": weights(args, setup.lora).trained,
               "flops_per_token": flops_per_token(args, predicted, setup.lora),
               "attention_flops_per_token": attention_flops_per_token(args),
               "tokens_per_iter": tokens_per_step(config), "device_name": name,
               "compute_dtype": hardware.dtype_name(setup.amp_dtype, device),
               "world_size": distributed.world, "peak_flops": peak, "mfu_basis": basis,
               "torch_version": torch.__version__, "dataset": meta,
               "estimate": estimate | {"memory": sum(estimate["memory"].values())}}
    say(f"data:  {config.data}: {meta['train_tokens']:,} tokens to train on, "
        f"{meta['val_tokens']:,} to validate, vocabulary {args.vocab_size}")
    if dataset.masks:
        say(f"chat:  {dataset.describe()}")
    derived["yardsticks"] = yardsticks.measure(dataset)
    if derived["yardsticks"]:
        say(f"scale: {yardsticks.describe(derived['yardsticks'], args.vocab_size)}")
    say(f"model: {derived['n_params']:,} parameters: dim {args.dim}, {args.n_layers} layers, "
        f"{args.n_heads} heads ({args.n_kv_heads} key/value), hidden {args.hidden_dim}, context "
        f"{args.max_seq_len}")
    if setup.lora:
        say(f"lora:  {lora.describe(setup.lora, derived['n_trained'], derived['n_params'])}")
    devices = f"{name} x {distributed.world}" if distributed.world > 1 else name
    say(f"train: {config.max_iters} iterations of {derived['tokens_per_iter']:,} tokens on "
        f"{devices} in {derived['compute_dtype']}; peak {peak / 1e12:.3g} TFLOP/s ({basis})")
    say(f"memory: {memory_line(estimate['memory'], hardware.free_memory(device))}")
    say(f"time:  {time_line(config, estimate)}")
    sequences = config.batch_size * config.gradient_accumulation_steps
    if sequences % distributed.world:
        say(f"note: the {sequences} sequences of a step are up to {sequences_per_rank(config)} per "
            f"process, and the last of {distributed.world} processes get fewer; a multiple of "
            f"{distributed.world} would use all processes fully")
    return derived


# ---- words and tables ----------------------------------------------------------------------------

def format_bytes(size):
    """Return a size with its unit: 12 MiB, 3.4 GiB."""
    return f"{size / 2 ** 30:.1f} GiB" if size >= 2 ** 30 else f"{size / 2 ** 20:.0f} MiB"


def memory_line(kinds, free=None):
    """Return the sum of {kind: bytes} as text, with the kinds of at least 1 MiB."""
    named = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in kinds.items() if n >= 1 << 20)
    available = f" of {format_bytes(free)} free" if free else ""
    return f"about {format_bytes(sum(kinds.values()))}{available}: {named}"


def time_line(config, estimate):
    """Return an estimated duration, the time of day or date of its end, and the speed, as text."""
    if estimate["seconds"] is None:
        if config.compile or config.fsdp:
            return "not measured before the first step of a run that is compiled or sharded"
        return "no steps left"
    limit = 60 * (config.minutes or config.max_minutes) or math.inf
    seconds = min(estimate["seconds"], limit)
    end = time.localtime(time.time() + min(seconds, 1e10))
    until = time.strftime("%H:%M" if seconds < 72_000 else "%Y-%m-%d", end)
    text = f"about {format_seconds(seconds)}, until {until}"
    if seconds == limit:
        text += ", the limit"
    if speed := estimate["tokens_per_sec"]:
        text += f"; {speed:,.0f} tokens/s, measured on random tokens"
    return text


def file_sizes(args, group_size=64):
    """
    Return {format: bytes} of the model's files. A GGUF file is taken to have 4 kB of metadata and
    22 bytes per token of the vocabulary; v0 and v2 are formats of llama2.c.
    """
    sizes = {}
    for dtype in layout.FILE_TYPES:
        size = 4096 + 22 * args.vocab_size
        for name, *_, shape in layout.tensors(args):
            kind = layout.TYPES[layout.gguf_type(name, shape, dtype, args.n_layers)]
            size += math.prod(shape) // kind.block * kind.size
        sizes[f"gguf {dtype}"] = size
    while args.dim % group_size:
        group_size //= 2
    total, norms = num_params(args), parameters(args)["norms"]
    matrices = total - norms
    sizes["v0"] = 28 + 4 * total + 4 * args.max_seq_len * args.head_dim
    sizes["v2"] = 256 + 4 * norms + matrices + 4 * matrices // group_size
    return sizes


def bandwidth(size, seconds=0.2):
    """
    Return the bytes per second at which this machine's cores read `size` bytes repeatedly, from a
    cache if they fit into it.
    """
    numbers, best = torch.ones(max(1, int(size) // 4)), math.inf
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or best == math.inf:
        best = min(best, timed(numbers.sum))
    return 4 * len(numbers) / best


def show(config, args, setup):
    """Print parameters, FLOPs, memory, time and file sizes of a preset, without its data."""
    meta = {"train_tokens": 10 ** 9, "val_tokens": 10 ** 6, "val_documents": 0}  # enough data
    estimate = estimate_run(config, args, setup, meta)
    estimate["memory"].pop("text", None)
    counts, total = parameters(args), num_params(args)
    flops = flops_per_token(args, adapters=setup.lora)
    steps, step_tokens = config.max_iters, tokens_per_step(config)
    print(f"parameters  {total:,} with a vocabulary of {args.vocab_size:,}")
    for kind, count in counts.items():
        is_block = kind in ("attention", "feed-forward")
        per_block = f", {count // args.n_layers:,} a block" if is_block else ""
        print(f"            {kind:<13}{count:>15,}  {count / total:4.0%}{per_block}")
    if setup.lora:
        trained = weights(args, setup.lora).trained
        print(f"            {'trained':<13}{trained:>15,}  {trained / total:4.0%}, in adapters of "
              f"rank {setup.lora.rank}; all others are frozen")
    print(f"FLOPs       {flops:,} a token, forward and backward; {flops * steps * step_tokens:.3g} "
          f"in {steps:,} steps of {step_tokens:,} tokens")
    free = hardware.free_memory(setup.device)
    available = f", of {format_bytes(free)} free" if free else ""
    print(f"memory      {format_bytes(sum(estimate['memory'].values()))}, about{available}")
    for kind, size in estimate["memory"].items():
        print(f"            {kind:<17}{format_bytes(size):>11}")
    print(f"time        {time_line(config, estimate)}")
    print(f"{'files':<12}bytes               ./run, max tokens/s, limited by memory bandwidth")
    # To compute a token, ./run reads the weights except the embedding (unless it is also the
    # classifier) and on average half of the context's keys and values. `cached` counts the numbers
    # in that half, which are as many as in all keys. Each has 4 bytes, or 2 if the weights are
    # quantized, because the KV cache is then float16.
    cached = args.n_layers * args.n_kv_heads * args.head_dim * args.max_seq_len
    for name, size in file_sizes(args).items():
        read = size * (1 if args.tied else 1 - counts["embedding"] / total)
        read += cached * (4 if name in ("gguf f32", "gguf f16", "gguf bf16", "v0") else 2)
        print(f"            {name:<13}{size:>15,}  {bandwidth(read) / read:>10,.0f}")
