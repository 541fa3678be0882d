"""
Rotary embeddings for contexts beyond the one a model was trained on. llama3 and yarn return
ModelArgs.rope_factors, the divisor of each pair's frequency. `rule` does the reverse: it finds
which of the two, with which parameters, returns given factors. The parameters have the names of
Hugging Face's config.json; context: the trained context in tokens.
"""
import math

import numpy as np

TRAINED_CONTEXTS = [2 ** n for n in range(3, 21)]  # tokens; the candidates that `rule` tries


@np.errstate(all="ignore")  # ModelArgs.problem reports NaN and infinity
def factors(numbers):
    """
    Return ModelArgs.rope_factors: the numbers as a tuple, rounded to float32, the type in which
    files store them, or () if all of them are 1.
    """
    rounded = np.asarray(numbers, np.float32)
    return tuple(rounded.tolist()) if (rounded != 1).any() else ()


@np.errstate(all="ignore")
def llama3(head_dim, theta, factor, low_freq_factor, high_freq_factor, context):
    """
    Return the factors of Llama 3.1. Pairs that rotate less than low_freq_factor times in the
    trained context are slowed down by `factor`, pairs that rotate more than high_freq_factor times
    are kept, and the frequencies in between are blended.
    https://github.com/meta-llama/llama-models
    """
    turns = context / (2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
    kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept = np.clip(kept, 0, 1)
    return factors(1 / ((1 - kept) / factor + kept))


@np.errstate(all="ignore")
def yarn(head_dim, theta, factor, context, beta_fast=32.0, beta_slow=1.0, truncate=True):
    """
    Return the factors of YaRN. Pairs that rotate more than beta_fast times in the trained context
    are kept, pairs that rotate less than beta_slow times are slowed down by `factor`, and in
    between the blend changes linearly with the index of the pair. truncate: widen the range of
    blended pairs to whole indices. Raise ValueError if theta is at most 1.
    https://arxiv.org/abs/2309.00071
    """
    if theta <= 1:
        raise ValueError(f"rope_theta is {theta}, expected more than 1 with yarn")

    def pair_with(turns):
        """Return the (fractional) index of the pair that rotates `turns` times in the context."""
        return head_dim * math.log(context / (2 * math.pi * turns)) / (2 * math.log(theta))

    first, last = pair_with(beta_fast), pair_with(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 1e-3  # avoids a division by 0
    slowed = np.clip((np.arange(head_dim // 2) - first) / width, 0, 1)
    return factors(1 / (slowed / factor + 1 - slowed))


def yarn_attention(factor):
    """Return YaRN's default for ModelArgs.rope_attention, which scales rotated queries and keys."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def rule(args):
    """
    Return the rope_scaling of Hugging Face's config.json for these ModelArgs: {} for plain rotary
    embeddings, otherwise rope_type "linear", "yarn" or "llama3" with its parameters. If none of
    these yields the same numbers, return "longrope", which lists the factor of each pair.
    """
    if not args.rope_factors and args.rope_attention == 1:
        linear = {"rope_type": "linear", "factor": args.rope_scaling}
        return linear if args.rope_scaling != 1 else {}
    # YaRN and Llama 3.1 slow down the slowest pairs by the full `factor`.
    largest = max(args.rope_factors, default=1.0)
    searched = args.rope_scaling == 1 and largest > 1
    for context in [*TRAINED_CONTEXTS, args.max_seq_len / largest] if searched else []:
        # A trained context is a whole number: round off the float32 error of `largest`.
        found = {"factor": largest, "original_max_position_embeddings": round(context)}
        sizes = args.head_dim, args.rope_theta, largest
        if args.rope_theta > 1 and equal(yarn(*sizes, context), args.rope_factors):
            if not equal(args.rope_attention, yarn_attention(largest)):
                found["attention_factor"] = args.rope_attention
            return {"rope_type": "yarn", **found}
        if args.rope_attention == 1 and equal(llama3(*sizes, 1, 4, context), args.rope_factors):
            return {"rope_type": "llama3", **found, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    per_pair = args.rope_factors or [1.0] * (args.head_dim // 2)
    # Dividing all frequencies by rope_scaling equals dividing all positions by it.
    per_pair = [args.rope_scaling * factor for factor in per_pair]
    return {"rope_type": "longrope", "short_factor": per_pair, "long_factor": per_pair,
            "factor": 1.0, "original_max_position_embeddings": args.max_seq_len,
            "attention_factor": args.rope_attention}


def equal(a, b):
    """Return whether numbers a and b have the same shape and differ only by rounding."""
    return np.shape(a) == np.shape(b) and bool(np.allclose(a, b, rtol=1e-5, atol=0))
