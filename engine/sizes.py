"""
Sizes of a training: all of them from one number, which are refused, and what they cost in FLOPs and memory. `s` has
train.py's settings as attributes.
"""
import copy
import math
from dataclasses import asdict

import torch

from configurator import fail
from engine import parallel
from engine.ops import CrossEntropy

DERIVED = ("dim", "n_layers", "n_heads", "batch_size", "gradient_accumulation_steps", "learning_rate", "max_iters",
           "warmup_iters")


def derive_from_depth(s, given, vocab):
    """
    {setting: value} of a run of s.depth, which a laptop can train: width 16 a layer in heads of 32, 8 tokens a parameter,
    and batch and rate from compute C, with the exponents of DeepSeek's fits: 0.05 C^0.3271 tokens, 0.156 C^-0.125. What was
    tried stands in doc/lab/recipe.md. What is given explicitly stays. vocab: the data's.
    https://arxiv.org/abs/2203.15556, https://arxiv.org/abs/2401.02954
    """
    s = copy.copy(s)

    def derive(**values):
        vars(s).update({k: v for k, v in values.items() if k not in given})

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
    parallel.say(f"depth {s.depth}: {', '.join(f'{name}={value!r}' for name, value in derived.items())}")
    return derived


def problem(args):
    """What is wrong with these ModelArgs, as one line; None when nothing is."""
    for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "hidden_dim", "max_seq_len"):
        if getattr(args, name) < 1:
            return f"{name} is {getattr(args, name)}, expected at least 1"
    if args.dim % args.n_heads or args.head_dim % 2:
        return f"dim={args.dim} over n_heads={args.n_heads} is no even head width; choose dim a multiple of 2 n_heads"
    if args.n_heads % args.n_kv_heads:
        return f"n_heads={args.n_heads} is not a multiple of n_kv_heads={args.n_kv_heads}"
    if not 0 <= args.dropout < 1:
        return f"dropout is {args.dropout}, expected 0 <= dropout < 1"
    if args.rope_theta <= 0 or args.rope_scaling <= 0 or args.norm_eps <= 0:
        return "rope_theta, rope_scaling and norm_eps must be positive"
    return None


def num_params(model):
    """Parameters of a Transformer, each counted once."""
    return sum(p.numel() for p in model.parameters())


def flops_per_token(model):
    """
    FLOPs of forward and backward for one token: 6 N + 12 L H Q T, where N leaves out the embedding look-up but has the
    lm_head, and the second term is attention over the context. https://arxiv.org/abs/2204.02311 appendix B
    """
    a = model.args
    n = num_params(model) - (0 if a.tied else model.tok_embeddings.weight.numel())
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


def describe(s, args, model, dataset, device, amp_dtype):
    """What was derived rather than set: shown at the start, and part of the recorded configuration."""
    peak, basis = parallel.peak_flops(device, amp_dtype, s.peak_tflops)
    name = parallel.device_name(device)
    about = {"model_args": asdict(args), "n_params": num_params(model), "flops_per_token": flops_per_token(model),
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
