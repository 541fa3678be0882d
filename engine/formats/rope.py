"""
Rotary positions for contexts beyond the one a model was trained on: functions that return the
divisors of the pairs' frequencies, ModelArgs.rope_factors, and `rule`, which finds the rule that
given factors come from. The names are those of Hugging Face's config.json.
"""
import math

import numpy as np

TRAINED_CONTEXTS = [2 ** n for n in range(3, 21)]  # that `rule` tries


@np.errstate(all="ignore")  # ModelArgs.problem reports what is not finite
def factors(numbers):
    """Return factors as a tuple, rounded to float32 as in every file; () if all of them are 1."""
    rounded = np.asarray(numbers, np.float32)
    return tuple(rounded.tolist()) if (rounded != 1).any() else ()


@np.errstate(all="ignore")
def llama3(head_dim, theta, factor, low_freq_factor, high_freq_factor, context):
    """
    Return the factors of Llama 3.1: pairs that turn less than low_freq_factor times in the trained
    context are slowed down by `factor`, those that turn more than high_freq_factor times are kept,
    and those in between are blended. https://github.com/meta-llama/llama-models
    """
    turns = context / (2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
    kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept = np.clip(kept, 0, 1)
    return factors(1 / ((1 - kept) / factor + kept))


@np.errstate(all="ignore")
def yarn(head_dim, theta, factor, context, beta_fast=32.0, beta_slow=1.0, truncate=True):
    """
    Return the factors of YaRN: pairs that turn more than beta_fast times in the trained context are
    kept, those that turn less than beta_slow times are slowed down by `factor`, and in between the
    share changes linearly with the pair's number. https://arxiv.org/abs/2309.00071
    """
    if theta <= 1:
        raise ValueError(f"rope_theta is {theta}, expected more than 1 with yarn")
    first, last = (head_dim * math.log(context / (2 * math.pi * beta)) / (2 * math.log(theta))
                   for beta in (beta_fast, beta_slow))
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    slowed = np.clip((np.arange(head_dim // 2) - first) / (last - first or 1e-3), 0, 1)
    return factors(1 / (slowed / factor + 1 - slowed))


def yarn_attention(factor):
    """Return the factor of rotated queries and keys that YaRN has by default."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def rule(args):
    """
    Return the rope_scaling of Hugging Face's config.json for these ModelArgs: {} for plain rotary
    positions, else type "linear", "yarn" or "llama3" with its parameters, or "longrope", which
    lists a factor for each pair, where none of these yields the same numbers.
    """
    if not args.rope_factors and args.rope_attention == 1:
        linear = {"rope_type": "linear", "factor": args.rope_scaling}
        return linear if args.rope_scaling != 1 else {}
    largest = max(args.rope_factors, default=1.0)
    searched = args.rope_scaling == 1 and largest > 1
    for context in [*TRAINED_CONTEXTS, args.max_seq_len / largest] if searched else []:
        found = {"factor": largest, "original_max_position_embeddings": round(context)}
        sizes = args.head_dim, args.rope_theta, largest
        if args.rope_theta > 1 and equal(yarn(*sizes, context), args.rope_factors):
            if not equal(args.rope_attention, yarn_attention(largest)):
                found["attention_factor"] = args.rope_attention
            return {"rope_type": "yarn", **found}
        if args.rope_attention == 1 and equal(llama3(*sizes, 1, 4, context), args.rope_factors):
            return {"rope_type": "llama3", **found, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    per_pair = args.rope_factors or [1.0] * (args.head_dim // 2)
    per_pair = [args.rope_scaling * factor for factor in per_pair]
    return {"rope_type": "longrope", "short_factor": per_pair, "long_factor": per_pair,
            "factor": 1.0, "original_max_position_embeddings": args.max_seq_len,
            "attention_factor": args.rope_attention}


def equal(a, b):
    """Return whether numbers have the same shape and differ by rounding alone."""
    return np.shape(a) == np.shape(b) and bool(np.allclose(a, b, rtol=1e-5, atol=0))
