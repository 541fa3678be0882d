"""What a training costs, before it begins: parameters, FLOPs, memory, time. `s` has train.py's settings as attributes."""
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import NamedTuple

import torch

from configurator import fail
from engine.formats import layout
from engine.training import distributed, hardware
from engine.ops import CrossEntropy

PROBED = 1 << 22    # logits that the instruments hold at a time, in several copies: 16 MiB each
EVAL_TOKENS = 1024  # of each split, that eval_iters counts
EVAL_PASS = 4096    # tokens of a forward pass of an evaluation, about: of the smallest models 1024 take up to 30 % longer each


def tokens_per_step(s):
    return s.batch_size * s.gradient_accumulation_steps * s.max_seq_len


class Build(NamedTuple):
    """
    How a trial training is made. model_args(config, vocab_size) returns ModelArgs, whose build(device) returns the model;
    make_optimizer(model, kind, learning_rate, ...) returns its optimizer.
    """
    model_args: Callable
    make_optimizer: Callable


def kind_of(name, parameter):
    """What a parameter of a model is counted as. Vectors, biases among them, count as norms."""
    if parameter.dim() < 2:
        return "norms"
    part = name.split(".")[0]
    if part == "layers":
        return "attention" if ".attention." in name else "feed-forward"
    return {"tok_embeddings": "embedding", "output": "lm_head"}.get(part, "norms")


MAX_BUILT = 512  # layers of a model that is built to be counted; the others are taken to be like its last one


def parameters(args):
    """
    Return {kind: number of parameters} of the model of ModelArgs, counted on the meta device, where
    they take no memory. A parameter that two modules share counts once.
    """
    if args.n_layers > MAX_BUILT:  # building a mistaken number of layers would take memory and time
        whole, less = (parameters(replace(args, n_layers=n)) for n in (MAX_BUILT, MAX_BUILT - 1))
        more = args.n_layers - MAX_BUILT
        return {kind: count + more * (count - less[kind]) for kind, count in whole.items()}
    counts = dict.fromkeys(("embedding", "attention", "feed-forward", "norms", "lm_head"), 0)
    for name, parameter in args.build("meta").named_parameters():
        counts[kind_of(name, parameter)] += parameter.numel()
    return counts


def num_params(args):
    return sum(parameters(args).values())


def flops_per_token(args):
    """
    FLOPs of forward and backward for one token: 6 N + 12 L H Q T, where N leaves out the embedding look-up but has the
    lm_head, and the second term is attention over the context. https://arxiv.org/abs/2204.02311 appendix B
    """
    counts = parameters(args)
    n = sum(counts.values()) - (0 if args.tied else counts["embedding"])
    return 6 * n + 12 * args.n_layers * args.n_heads * args.head_dim * args.max_seq_len


def held(args, optimizer, shares=1):
    """{"weights", "optimizer"}: bytes that stay from step to step."""
    counts = parameters(args)
    total, blocks = sum(counts.values()), counts["attention"] + counts["feed-forward"]
    states = 2 * total - (blocks if optimizer == "muon" else 0)  # Muon keeps one number for each weight, AdamW two
    return {"weights": 4 * total / shares, "optimizer": 4 * states / shares}


def least_memory(args, tokens, optimizer, half=False, frugal=False, accumulating=False, shares=1):
    """
    {kind: bytes} that a training step holds at once at the very least, by arithmetic alone. tokens: of a forward pass;
    half: matrix products in bfloat16; frugal: blocks are compiled or keep their inputs alone; accumulating: over several
    passes; shares: processes that share weights and optimizer. Temporaries and what Python takes are not in it.
    """
    a, q_dim, kv_dim = args, args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    size, always = 2 if half else 4, held(args, optimizer, shares)
    # norms' x; q k v, out, a b; q k before they are rotated
    kept = size * a.dim if frugal else 8 * a.dim + size * (2 * (q_dim + kv_dim + a.hidden_dim) + a.qk_norm * (q_dim + kv_dim))
    inside = {"activations": tokens * a.n_layers * kept, "logits": 4 * min(tokens * a.vocab_size, CrossEntropy.PIECE // 2)}
    after = {"gradients": always["weights"]}  # when all of them are there, nothing is left of the last pass
    if accumulating:
        inside |= after
    return always | max(inside, after, key=lambda kinds: sum(kinds.values()))


# What a process on a CPU takes beside its tensors where that can't be measured; doc/lab/instruments.md.
PYTHON = 272 << 20  # a process that has imported and called all that a training needs
LATER = 20 << 20    # code and files that a training loads after its first steps
HOLES = 0.27        # of a pass: memory that is free but too scattered for what is needed next, or becomes so with time


def expected_memory(s, args, device, amp_dtype, rows=0):
    """
    {kind: bytes} of the peak of a training process, by arithmetic; on a GPU of its tensors. "working": what a step needs for
    a moment, and holes between. rows: sequences of a forward pass, if not the settings'.
    """
    a, half, cpu = args, amp_dtype != torch.float32, device.type == "cpu"
    q_dim, kv_dim = a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim
    size, frugal = 2 if half else 4, s.activation_checkpointing
    rows = rows or min(s.batch_size, sequences_here(s))
    tokens, accumulating = rows * s.max_seq_len, sequences_here(s) > rows
    # norms' inputs where their outputs don't tell; norms' outputs, q and attention's output, k v; a, b or their product
    block = (0 if cpu and not half else 8 * a.dim) + size * (2 * a.dim + 2 * (q_dim + kv_dim) + a.qk_norm * (q_dim + kv_dim)
                                                             + a.hidden_dim * (3 if half and cpu else 2 if cpu else 4))
    block += 4 * (a.n_heads + 2) + s.within_documents * size * s.max_seq_len  # the mask as numbers, which each block keeps
    kept = block + 4 * a.dim * a.n_layers if frugal else block * a.n_layers
    logits = 4 * min(tokens * a.vocab_size, CrossEntropy.PIECE if cpu else CrossEntropy.GPU_PIECE) * (1.5 if half else 1)
    logits += 8 * (tokens + a.vocab_size) * a.dim
    kinds = held(a, s.optimizer, distributed.world if s.sharded else 1)
    kinds |= {"gradients": kinds["weights"], "activations": tokens * (kept + 8 * a.dim) + half * kinds["weights"] / 2,
              "logits": logits}
    alike = a.n_layers * a.dim * max((4 if kv_dim == q_dim else 2) * q_dim, 2 * a.hidden_dim)  # go through Muon together
    update = 4 * min(alike, 1 << 28) * (4.3 if a.dim >= 128 else 6) if s.optimizer == "muon" else 0
    backward = max(0, 3 * size * tokens * a.hidden_dim - logits)
    if not cpu:  # whose memory has no holes: either a pass or an update
        inside = {"activations": kinds.pop("activations"), "logits": kinds.pop("logits"), "working": backward}
        after = {"gradients": kinds.pop("gradients"), "working": update}
        inside |= {"gradients": after["gradients"]} if accumulating else {}
        return kinds | max(inside, after, key=lambda some: sum(some.values()))
    return kinds | {"working": update + backward + HOLES * (kinds["activations"] + logits + backward)}


def refuse_too_large(s, args, device, amp_dtype):
    """End in one line where training needs more memory than there is, even by the least that can be said."""
    share = math.ceil(s.batch_size * s.gradient_accumulation_steps / distributed.world)  # of a process
    here = 1 if device.type == "cuda" else distributed.local_world
    free = hardware.free_memory(device)

    def need(sequences):
        return least_memory(args, sequences * s.max_seq_len, s.optimizer, amp_dtype != torch.float32,
                            s.compile or s.activation_checkpointing, share > sequences, distributed.world if s.sharded else 1)

    kinds = need(min(s.batch_size, share))
    total = sum(kinds.values())
    if free is None or total * here <= free:
        return
    if sum(need(1).values()) * here <= free:
        advice = f"lower --batch_size (now {s.batch_size}) and raise --gradient_accumulation_steps by as much"
    else:
        advice = f"choose a smaller --dim (now {args.dim}), --n_layers (now {args.n_layers}) or --depth"
    fail(f"this training needs at least {total / 2 ** 30:.1f} GiB of memory "
         f"({', '.join(f'{kind} {size / 2 ** 30:.1f}' for kind, size in kinds.items())})"
         f"{f' in each of {here} processes' if here > 1 else ''} and there are {free / 2 ** 30:.1f}; {advice}")


def sequences_here(s):
    """Sequences of a step that this process computes."""
    return math.ceil(s.batch_size * s.gradient_accumulation_steps / distributed.world)


class Rehearsal:
    """
    A model and its optimizer that train on random tokens. A step does all that train.py's does, so that it takes as long:
    masks, clipping, the wait for its loss.
    """

    def __init__(self, s, vocab_size, build, device, amp_dtype):
        self.s, self.vocab_size, self.device = s, vocab_size, device
        self.model = build.model_args(s, vocab_size).build().to(device)
        self.model.bos_id, self.model.recompute = 1 if s.within_documents else None, s.activation_checkpointing
        self.optimizer = build.make_optimizer(self.model, s.optimizer, s.learning_rate, s.weight_decay, s.beta1, s.beta2)
        self.amp = torch.autocast(device.type, amp_dtype, enabled=amp_dtype != torch.float32)

    def tokens(self, rows):
        return torch.randint(self.vocab_size, (rows, self.s.max_seq_len), device=self.device)

    def forward_backward(self, rows):
        x = self.tokens(rows)
        with self.amp:
            loss = self.model(x, x)[1]
        loss.backward()
        return loss.detach()

    def update(self):
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.s.grad_clip or math.inf)
        norm.item()  # as train.py waits for it
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def check(self):
        """As the check of the rate, which keeps the weights to put them back."""
        before = [p.detach().clone() for p in self.model.parameters()]
        self.forward_backward(max(1, 1024 // self.s.max_seq_len))
        self.update()
        return before

    @torch.no_grad()
    def predict(self):
        """As the instruments look at predictions."""
        x = self.tokens(4)
        with self.amp:
            logits = self.model(x, every=math.ceil(x.numel() * self.vocab_size / PROBED))[0].float()
        return logits.softmax(-1).topk(min(3, self.vocab_size))

    @torch.no_grad()
    def forward(self, rows):
        with self.amp:
            x = self.tokens(rows)
            return self.model(x, x)[1]


def measured_step(trial, seconds):
    """
    (seconds of a training step, sequences of its passes): the median over `seconds`, or less for a run that is short itself.
    A large batch is measured by some of its sequences.
    """
    s, share = trial.s, sequences_here(trial.s)
    timed(trial.forward_backward, 1), timed(trial.update)  # load what is loaded once
    one = timed(trial.forward_backward, 1)
    seconds = min(seconds, 0.02 * s.max_iters * share * one)
    rows = max(1, min(s.batch_size, share, int(max(seconds, 0.4) / 4 / one)))
    passes, updates, end = [], [], time.perf_counter() + seconds
    while len(passes) < 3 or time.perf_counter() < end:
        passes.append(timed(trial.forward_backward, rows))
        updates.append(timed(trial.update))
    return share / rows * statistics.median(passes[1:]) + statistics.median(updates[1:]), rows


def measure(s, args, build, device, amp_dtype, seconds=1.0):
    """
    What a training takes, by trying: {"step", "forward", "sample"}: seconds of a step, of a token in an evaluation, of a token in
    a sample; {"memory"}: bytes of the process at its peak, on a GPU of tensors.
    """
    trial, share = Rehearsal(s, args.vocab_size, build, device, amp_dtype), sequences_here(s)
    step, rows = measured_step(trial, seconds)
    whole = min(s.batch_size, share, max(rows, int(seconds * share / step)))  # of a pass that shows what it holds
    for _ in range(min(2, -(-share // whole))):  # the second finds the gradients of the first
        trial.forward_backward(whole)
    trial.update()
    trial.check()
    trial.model.eval()
    trial.predict()
    forward = forward_seconds(trial, rows, seconds)
    sample = min(timed(trial.model.generate, trial.tokens(1)[:, :1], 8) for _ in range(2)) / 8
    kinds, tried = (expected_memory(s, args, device, amp_dtype, n) for n in (0, whole))
    memory = sum(kinds.values()) - sum(tried.values())  # of what is larger than the trial
    if device.type == "cpu":  # where the heap stays as large as it was
        memory += hardware.memory_now(device) + LATER + HOLES * (kinds["activations"] + kinds["logits"])
    else:
        memory += hardware.peak_memory(device)
    return {"step": step, "forward": forward, "sample": sample, "memory": memory}


def forward_seconds(trial, rows, seconds):
    """Of a token in an evaluation: of two passes of `rows` sequences or, where `seconds` suffice for them, of two of its own."""
    def of_token(n):
        return min(timed(trial.forward, n) for _ in range(2)) / n / trial.s.max_seq_len

    found, wide = of_token(rows), EVAL_PASS // trial.s.max_seq_len
    return of_token(wide) if rows < wide and 2 * EVAL_PASS * found < seconds else found


def timed(work, *args):
    """Seconds that work(*args) takes, with the wait for a device that computes by itself."""
    start = time.perf_counter()
    work(*args).sum().item()
    return time.perf_counter() - start


def step_seconds(*arguments, seconds=0.3):
    """Seconds of a training step, by a model of its own: a short look, for the plan of --minutes."""
    return measured_step(Rehearsal(*arguments), seconds)[0]


def foresee(s, args, device, amp_dtype, build, meta, begun=0):
    """
    What a run will take, for its record: {"memory": {kind: bytes}, "seconds", "tokens_per_sec"}. begun: steps it has taken
    already. Seconds are None where they can't be measured in moments.
    """
    width, left = 2 if args.vocab_size <= 1 << 16 else 4, s.max_iters - begun
    text = width * min(meta["train_tokens"] + meta["val_tokens"], 2 * left * tokens_per_step(s))  # which is mapped
    kinds, cpu, seconds, speed = expected_memory(s, args, device, amp_dtype), device.type == "cpu", 60 * s.minutes or None, None
    rest = PYTHON * cpu
    if not (s.compile or s.sharded or left < 1):  # else it would take more than moments
        found = measure(s, args, build, device, amp_dtype, 0.1 if s.minutes else 1.0)
        step, forward, sample, rest = distributed.all_max([found[name] for name in ("step", "forward", "sample", "memory")], device)
        kinds.pop("working")
        rest = max(0, rest - sum(kinds.values()))
        evaluations = -(-left // s.eval_interval) + (begun == 0)
        seconds = seconds or left * step + evaluations * evaluation_seconds(s, meta, forward, sample)
        speed = None if s.minutes else tokens_per_step(s) / step
    kinds |= {"text": text * cpu, "Python, torch and room to work" if cpu else "room to work": rest}
    return {"memory": kinds, "seconds": seconds, "tokens_per_sec": speed}


def evaluation_seconds(s, meta, forward, sample):
    """Seconds of one evaluation: both splits, fixed batches, two samples of 96 tokens for each prompt."""
    most = meta["val_tokens"] - meta["val_documents"]
    tokens = 2 * min(EVAL_TOKENS * s.eval_iters or most, most) / distributed.world + 8 * s.max_seq_len
    return tokens * forward + 2 * 96 * len(s.sample_prompt.split("|")) * sample


def describe(s, args, dataset, device, amp_dtype, foreseen):
    """What was derived rather than set: shown at the start, and part of the recorded configuration."""
    peak, basis = hardware.peak_flops(device, amp_dtype, s.peak_tflops)
    name = hardware.device_name(device)
    about = {"model_args": asdict(args), "n_params": num_params(args), "flops_per_token": flops_per_token(args),
             "tokens_per_iter": s.batch_size * s.gradient_accumulation_steps * s.max_seq_len, "device_name": name,
             "compute_dtype": str(amp_dtype).split(".")[-1], "world_size": distributed.world, "peak_flops": peak,
             "mfu_basis": basis, "torch_version": torch.__version__, "dataset": dataset.meta,
             "foreseen": foreseen | {"memory": sum(foreseen["memory"].values())}}
    meta = dataset.meta
    distributed.say(f"data:  {s.data}: {meta['train_tokens']:,} tokens to train on, {meta['val_tokens']:,} to validate, "
                 f"vocabulary {args.vocab_size}")
    distributed.say(f"model: {about['n_params']:,} parameters: dim {args.dim}, {args.n_layers} layers, {args.n_heads} heads "
                 f"({args.n_kv_heads} key/value), hidden {args.hidden_dim}, context {args.max_seq_len}")
    distributed.say(f"train: {s.max_iters} iterations of {about['tokens_per_iter']:,} tokens on {name}"
                 f"{f' x {distributed.world}' if distributed.world > 1 else ''} in {about['compute_dtype']}; peak "
                 f"{peak / 1e12:.3g} TFLOP/s ({basis})")
    distributed.say(f"memory: {memory_line(foreseen['memory'], hardware.free_memory(device))}")
    distributed.say(f"time:  {time_line(s, foreseen)}")
    sequences = s.batch_size * s.gradient_accumulation_steps
    if sequences % distributed.world:
        distributed.say(f"note: a step's {sequences} sequences are {math.ceil(sequences / distributed.world)} a process, the last "
                     f"ones of {distributed.world} have fewer; a multiple would use them all")
    return about


def binary(size):
    """Bytes in words: 12 MiB, 3.4 GiB."""
    return f"{size / 2 ** 30:.1f} GiB" if size >= 2 ** 30 else f"{size / 2 ** 20:.0f} MiB"


def memory_line(kinds, free=None):
    """The kinds that matter, and their sum."""
    named = ", ".join(f"{kind} {binary(size)}" for kind, size in kinds.items() if size >= 1 << 20)
    there = f" of {binary(free)} that are free" if free else ""
    return f"about {binary(sum(kinds.values()))}{there}: {named}"


def time_line(s, foreseen):
    if foreseen["seconds"] is None:
        return "not measured before the first step of a run that is compiled or sharded" if s.compile or s.sharded else "over"
    limit = 60 * (s.minutes or s.max_minutes) or math.inf
    seconds = min(foreseen["seconds"], limit)
    until = time.strftime("%H:%M" if seconds < 72_000 else "%Y-%m-%d", time.localtime(time.time() + min(seconds, 1e10)))
    speed = foreseen["tokens_per_sec"]
    return (f"about {span(seconds)}, until {until}{', the limit' * (seconds == limit)}"
            + (f"; {speed:,.0f} tokens/s, measured on random tokens" if speed else ""))


def span(seconds):
    """Seconds in words, of two digits: 45 s, 3.2 min, 5.1 h, 12 days."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{float(f'{seconds / size:.2g}'):g} {unit}"
    return f"{seconds:.2g} s"


def file_sizes(args, group_size=64):
    """{format: bytes} of the model's files. A vocabulary takes 22 bytes a piece, about, and 4 kB come before it."""
    found, shapes = {}, [(name, shape) for name, _, _, shape in layout.tensors(args)]
    for dtype in layout.FILE_TYPES:
        types = [layout.TYPES[layout.gguf_type(name, shape, dtype, args.n_layers)] for name, shape in shapes]
        size = sum(math.prod(shape) // t.block * t.size for (_, shape), t in zip(shapes, types))
        found[f"gguf {dtype}"] = 4096 + 22 * args.vocab_size + size
    while args.dim % group_size:
        group_size //= 2
    norms = parameters(args)["norms"]
    matrices = num_params(args) - norms
    found["v0"] = 28 + 4 * num_params(args) + 4 * args.max_seq_len * args.head_dim
    return found | {"v2": 256 + 4 * norms + matrices + 4 * matrices // group_size}


def bandwidth(size, seconds=0.2):
    """Bytes a second at which this machine's cores read `size` bytes again and again, from a cache if they fit there."""
    numbers, best, end = torch.ones(max(1, int(size) // 4)), math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end or best == math.inf:
        best = min(best, timed(numbers.sum))
    return 4 * len(numbers) / best


def show(s, args, device, amp_dtype, build):
    """All that can be said of a preset without its data."""
    meta = {"train_tokens": 10 ** 9, "val_tokens": 10 ** 6, "val_documents": 0}  # as if they were enough
    foreseen, counts, flops = foresee(s, args, device, amp_dtype, build, meta), parameters(args), flops_per_token(args)
    foreseen["memory"].pop("text", None)
    steps, tokens = s.max_iters, s.max_iters * tokens_per_step(s)
    print(f"parameters  {num_params(args):,} with a vocabulary of {args.vocab_size:,}")
    for kind, count in counts.items():
        each = f", {count // args.n_layers:,} a block" if kind in ("attention", "feed-forward") else ""
        print(f"            {kind:<13}{count:>15,}  {count / num_params(args):4.0%}{each}")
    print(f"FLOPs       {flops:,} a token, forward and backward; {flops * tokens:.3g} in {steps:,} steps of "
          f"{tokens_per_step(s):,} tokens")
    free = hardware.free_memory(device)
    print(f"memory      {binary(sum(foreseen['memory'].values()))}, about{f', of {binary(free)} that are free' if free else ''}")
    for kind, size in foreseen["memory"].items():
        print(f"            {kind:<17}{binary(size):>11}")
    print(f"time        {time_line(s, foreseen)}")
    print(f"{'files':<12}bytes               ./run, tokens/s at most, by the speed of reading")
    numbers = args.n_layers * args.n_kv_heads * args.head_dim * args.max_seq_len  # half of the context, keys and values
    for name, size in file_sizes(args).items():
        read = size * (1 if args.tied else 1 - counts["embedding"] / num_params(args))
        read += numbers * (4 if name in ("gguf f32", "gguf f16", "gguf bf16", "v0") else 2)  # of quantised weights float16
        print(f"            {name:<13}{size:>15,}  {bandwidth(read) / read:>10,.0f}")
