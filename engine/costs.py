"""What a training costs, before it begins: parameters, FLOPs, memory, time. `s` has train.py's settings as attributes."""
import math
import time
from dataclasses import asdict, fields

import torch

from configurator import fail
from engine import parallel
from engine.ops import CrossEntropy
from model import ModelArgs, Transformer


def tokens_per_step(s):
    return s.batch_size * s.gradient_accumulation_steps * s.max_seq_len


def model_args(s, vocab_size):
    return ModelArgs(**{f.name: getattr(s, f.name) for f in fields(ModelArgs)} | {"vocab_size": vocab_size})


def parameters(args):
    """{kind: parameters} of a model, each counted once."""
    a, kv_dim = args, args.n_kv_heads * args.head_dim
    return {"embedding": a.vocab_size * a.dim, "attention": a.n_layers * (2 * a.dim ** 2 + 2 * a.dim * kv_dim),
            "feed-forward": a.n_layers * 3 * a.dim * a.hidden_dim, "norms": (2 * a.n_layers + 1) * a.dim,
            "lm_head": 0 if a.tied else a.vocab_size * a.dim}


def num_params(args):
    return sum(parameters(args).values())


def flops_per_token(args):
    """
    FLOPs of forward and backward for one token: 6 N + 12 L H Q T, where N leaves out the embedding look-up but has the
    lm_head, and the second term is attention over the context. https://arxiv.org/abs/2204.02311 appendix B
    """
    a = args
    n = num_params(a) - (0 if a.tied else a.vocab_size * a.dim)
    return 6 * n + 12 * a.n_layers * a.n_heads * a.head_dim * a.max_seq_len


def least_memory(args, tokens, optimizer, half=False, frugal=False, accumulating=False, shares=1):
    """
    {kind: bytes} that a training step holds at once at the very least, by arithmetic alone. tokens: of a forward pass;
    half: matrix products in bfloat16; frugal: blocks are compiled or keep their inputs alone; accumulating: over several
    passes; shares: processes that share weights and optimizer. Temporaries and what Python takes are not in it.
    """
    a, kv_dim = args, args.n_kv_heads * args.head_dim
    blocks = a.n_layers * (2 * a.dim ** 2 + 2 * a.dim * kv_dim + 3 * a.dim * a.hidden_dim)
    rest = (1 if a.tied else 2) * a.vocab_size * a.dim + (2 * a.n_layers + 1) * a.dim
    weights, size = 4 * (blocks + rest) / shares, 2 if half else 4
    states = 4 * ((1 if optimizer == "muon" else 2) * blocks + 2 * rest) / shares
    kept = size * a.dim if frugal else 8 * a.dim + 2 * size * (a.dim + kv_dim + a.hidden_dim)  # norms' x; q k v, out, a b
    inside = {"activations": tokens * a.n_layers * kept, "logits": 4 * min(tokens * a.vocab_size, CrossEntropy.PIECE // 2)}
    after = {"gradients": weights}  # when all of them are there, nothing is left of the last pass
    if accumulating:
        inside |= after
    return {"weights": weights, "optimizer": states} | max(inside, after, key=lambda kinds: sum(kinds.values()))


def refuse_too_large(s, args, device, amp_dtype):
    """End in one line where training needs more memory than there is, even by the least that can be said."""
    share = math.ceil(s.batch_size * s.gradient_accumulation_steps / parallel.world)  # of a process
    here = 1 if device.type == "cuda" else parallel.local_world
    free = parallel.free_memory(device)

    def need(sequences):
        return least_memory(args, sequences * s.max_seq_len, s.optimizer, amp_dtype != torch.float32,
                            s.compile or s.activation_checkpointing, share > sequences, parallel.world if s.sharded else 1)

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


def step_seconds(s, vocab_size, make_optimizer, device, amp_dtype, count=3):
    """Seconds of a training step of these sizes, on random tokens: the shortest of `count` after the first."""
    model = Transformer(model_args(s, vocab_size)).to(device)
    optimizer = make_optimizer(model, s.optimizer, s.learning_rate, s.weight_decay, s.beta1, s.beta2)
    share = max(1, s.batch_size // parallel.world)
    x = torch.randint(vocab_size, (share, s.max_seq_len), device=device)
    times = []
    for _ in range(1 + count):
        start = time.perf_counter()
        for _ in range(s.gradient_accumulation_steps):
            with torch.autocast(device.type, amp_dtype, enabled=amp_dtype != torch.float32):
                loss = model(x, x)[1]
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device
        times.append(time.perf_counter() - start)
    return min(times[1:])


def describe(s, args, dataset, device, amp_dtype):
    """What was derived rather than set: shown at the start, and part of the recorded configuration."""
    peak, basis = parallel.peak_flops(device, amp_dtype, s.peak_tflops)
    name = parallel.device_name(device)
    about = {"model_args": asdict(args), "n_params": num_params(args), "flops_per_token": flops_per_token(args),
             "tokens_per_iter": s.batch_size * s.gradient_accumulation_steps * s.max_seq_len, "device_name": name,
             "compute_dtype": str(amp_dtype).split(".")[-1], "world_size": parallel.world, "peak_flops": peak,
             "mfu_basis": basis, "torch_version": torch.__version__, "dataset": dataset.meta}
    meta = dataset.meta
    parallel.say(f"data:  {s.data}: {meta['train_tokens']:,} tokens to train on, {meta['val_tokens']:,} to validate, "
                 f"vocabulary {args.vocab_size}")
    parallel.say(f"model: {about['n_params']:,} parameters: dim {args.dim}, {args.n_layers} layers, {args.n_heads} heads "
                 f"({args.n_kv_heads} key/value), hidden {args.hidden_dim}, context {args.max_seq_len}")
    parallel.say(f"train: {s.max_iters} iterations of {about['tokens_per_iter']:,} tokens on {name}"
                 f"{f' x {parallel.world}' if parallel.world > 1 else ''} in {about['compute_dtype']}; peak "
                 f"{peak / 1e12:.3g} TFLOP/s ({basis})")
    sequences = s.batch_size * s.gradient_accumulation_steps
    if sequences % parallel.world:
        parallel.say(f"note: a step's {sequences} sequences are {math.ceil(sequences / parallel.world)} a process, the last "
                     f"ones of {parallel.world} have fewer; a multiple would use them all")
    return about
