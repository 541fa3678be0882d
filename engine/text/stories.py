"""
Write children's stories from a grammar: any number, without a network, with exactly known entropy.

stories.txt has the rules. A rule is a name and its alternatives, each with the same probability. An
alternative contains

    [food]       an alternative of the rule `food`, drawn anew at each place
    {toy}        the same, but drawn only once in a story and repeated later
    {She|He}     the first for a story about a girl, the second about a boy, drawn once in a story

The grammar is unambiguous: no text has two derivations, as tests/test_stories.py shows by parsing.
So the probability of a story is the product of the probabilities of its draws, and -log2 of it is
the minimal cost of the story in bits: a model that is trained on stories alone approaches this cost
and cannot beat it. There are 10^47.1 different stories, 140.4 bits each on average.

A story repeats its names of people and things often, so that a model can show that it has learned
to copy. Each has its first repetition close by (named Lily. Lily ...), where a small model learns
it soonest.
"""
import functools
import hashlib
import math
import re
from pathlib import Path

VOCAB_SIZE = 1536  # enough for every word of the grammar to become one piece
SAMPLE = 1 << 22   # bytes of stories that suffice to train this vocabulary

GRAMMAR = Path(__file__).with_name("stories.txt").read_text(encoding="utf-8")


def read_grammar(text):
    """Return {rule: (alternative, ...)}; an alternative is a tuple of symbols, see `symbols`."""
    rules, name = {}, None
    text = text.replace(",\n    ", ", ")  # a list of words may continue on the next line
    for line in filter(str.strip, text.split("\n")):
        if line.startswith(" "):
            rules[name] += (symbols(line.strip()),)
        elif ":" in line:
            name, words = line.split(": ")
            rules[name] = tuple((word,) for word in words.split(", "))
        else:
            name = line
            rules[name] = ()
    return rules


def symbols(text):
    """
    Return an alternative as a tuple of symbols: a literal str, or ("[", rule) or ("{", rule) as in
    the text, or ("|", (symbols for a girl, symbols for a boy)).
    """
    made = []
    pattern = r"([^][{}]+)|\[(\w+)\]|\{(\w+)\}|\{([^{}|]+)\|([^{}|]+)\}"
    for literal, drawn, kept, girl, boy in re.findall(pattern, text):
        if literal:
            made.append(literal)
        elif drawn or kept:
            made.append(("[", drawn) if drawn else ("{", kept))
        else:
            made.append(("|", (symbols(girl), symbols(boy))))
    return tuple(made)


RULES = read_grammar(GRAMMAR)
BITS = {name: math.log2(len(alternatives)) for name, alternatives in RULES.items()}  # of a draw
CHARACTERS = "".join(sorted(set(GRAMMAR) - set("[]{}|_:\n")))  # of all stories


def write(seed, number):
    """
    Return (text, bits) of story `number` of a seed, a pure function of both. bits: -log2 of the
    story's probability.

    The draws are the digits of a hash, read as one number below 2^1024 in the base of each draw,
    which makes a draw uniform to 1 part in 2^700.
    """
    digits = int.from_bytes(hashlib.shake_256(f"{seed} {number}".encode()).digest(128), "little")
    kept, bits = {}, 0.0

    def draw(rule):
        nonlocal digits, bits
        digits, choice = divmod(digits, len(RULES[rule]))
        bits += BITS[rule]
        return expand(RULES[rule][choice])

    def expand(sequence):
        nonlocal digits, bits
        parts = []
        for symbol in sequence:
            if isinstance(symbol, str):
                parts.append(symbol)
                continue
            kind, rule = symbol
            if kind == "[":
                parts.append(draw(rule))
            elif kind == "{":
                if rule not in kept:
                    kept[rule] = draw(rule)
                parts.append(kept[rule])
            else:
                if "boy" not in kept:
                    digits, kept["boy"] = divmod(digits, 2)
                    bits += 1
                parts.append(expand(rule[kept["boy"]]))
        return "".join(parts)

    return expand(RULES["story"][0]), bits


@functools.cache
def measure(sequence, kept=frozenset()):
    """
    Return {kept afterwards: (probability, number of derivations, probability x mean bits)} of all
    texts that a sequence of symbols derives. kept: names of the rules drawn before it, whose
    repetitions cost nothing.
    """
    ways = {kept: (1.0, 1, 0.0)}
    for symbol in sequence:
        then = {}
        for before, (p, n, b) in ways.items():
            for after, (q, m, c) in measure_one(symbol, before).items():
                old = then.get(after, (0.0, 0, 0.0))
                then[after] = (old[0] + p * q, old[1] + n * m, old[2] + p * c + q * b)
        ways = then
    return ways


def measure_one(symbol, kept):
    """Return the same as `measure` of one symbol."""
    if isinstance(symbol, str) or symbol[1] in kept:
        return {kept: (1.0, 1, 0.0)}
    kind, rule = symbol
    if kind == "|" and "boy" in kept:  # both sides measure the same: their lists have equal lengths
        return measure(rule[0], kept)
    alternatives, name = (rule, "boy") if kind == "|" else (RULES[rule], rule)
    share, then = 1 / len(alternatives), {}
    for alternative in alternatives:
        for after, (q, m, c) in measure(alternative, kept).items():
            after = after if kind == "[" else after | {name}
            old = then.get(after, (0.0, 0, 0.0))
            bits = c - q * math.log2(share)
            then[after] = (old[0] + share * q, old[1] + m, old[2] + share * bits)
    return then


def entropy():
    """Return the exact mean of -log2 of a story's probability: bits per story."""
    return sum(bits for _, _, bits in measure((("[", "story"),)).values())


def count():
    """Return the exact number of different stories."""
    return sum(n for _, n, _ in measure((("[", "story"),)).values())
