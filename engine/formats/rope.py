"""
Contexts beyond the one a model was trained on: rules that slow the rotation of some pairs, as ModelArgs' rope_factors, and the
rule that such numbers come from. The rules and their names are those of Hugging Face's config.json.
"""
import math

import numpy as np

CONTEXTS = [2 ** n for n in range(3, 21)]  # of trainings before the stretching
BETA = {"beta_fast": 32.0, "beta_slow": 1.0}


@np.errstate(all="ignore")  # a caller refuses what is no number
def factors(numbers):
    """float32 numbers, as every file holds them, as a tuple; () where all are 1."""
    rounded = np.asarray(numbers, np.float32)
    return tuple(rounded.tolist()) if (rounded != 1).any() else ()


@np.errstate(all="ignore")
def llama3(head_dim, theta, factor, low_freq_factor, high_freq_factor, context):
    """
    Pairs that turn less than low_freq_factor times in the context are slowed by the factor, those that turn more than
    high_freq_factor times not at all, those between by a mean. https://github.com/meta-llama/llama-models
    """
    turns = context / (2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
    share = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)  # of what is not slowed
    return factors(1 / ((1 - share) / factor + share))


@np.errstate(all="ignore")
def yarn(head_dim, theta, factor, context, beta_fast=32.0, beta_slow=1.0, truncate=True):
    """
    As llama3's, but the share falls evenly from the pair that turns beta_fast times in the context to the one that turns
    beta_slow times. https://arxiv.org/abs/2309.00071
    """
    ends = [head_dim * math.log(context / (2 * math.pi * beta)) / (2 * math.log(theta)) for beta in (beta_fast, beta_slow)]
    first, last = (math.floor(ends[0]), math.ceil(ends[1])) if truncate else ends
    first, last = max(first, 0), min(last, head_dim - 1)
    slowed = np.clip((np.arange(head_dim // 2) - first) / (last - first or 1e-3), 0, 1)
    return factors(1 / (slowed / factor + 1 - slowed))


def yarn_attention(factor):
    """What YaRN multiplies rotated queries and keys by, unless a model says otherwise."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def rule(args):
    """
    The rule behind rope_scaling, rope_factors and rope_attention, in Hugging Face's words: {} where there is none, "linear",
    "yarn", "llama3"; "longrope", which has a number for each pair, where it is none of these.
    """
    most = max(args.rope_factors, default=1.0)
    if not args.rope_factors and args.rope_attention == 1:
        return {"rope_type": "linear", "factor": args.rope_scaling} if args.rope_scaling != 1 else {}
    for context in [*CONTEXTS, args.max_seq_len / most] if args.rope_scaling == 1 and most > 1 else []:
        found = {"factor": most, "original_max_position_embeddings": round(context)}
        if close(yarn(args.head_dim, args.rope_theta, most, context), args.rope_factors):
            usual = close(args.rope_attention, yarn_attention(most))
            return {"rope_type": "yarn", **found, **({} if usual else {"attention_factor": args.rope_attention})}
        if args.rope_attention == 1 and close(llama3(args.head_dim, args.rope_theta, most, 1, 4, context), args.rope_factors):
            return {"rope_type": "llama3", **found, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    each = [args.rope_scaling * number for number in args.rope_factors or [1.0] * (args.head_dim // 2)]
    return {"rope_type": "longrope", "short_factor": each, "long_factor": each, "factor": 1.0,
            "original_max_position_embeddings": args.max_seq_len, "attention_factor": args.rope_attention}


def close(a, b):
    """Whether numbers, of which there are as many, differ by rounding alone."""
    return np.shape(a) == np.shape(b) and bool(np.allclose(a, b, rtol=1e-5, atol=0))
