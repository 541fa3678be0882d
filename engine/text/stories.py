"""
Small children's stories from a grammar, as many as asked, without a network: text whose entropy is known exactly.

The rules stand in stories.txt. A rule is a name and its alternatives, one of which is drawn, each as likely as the
others. In an alternative

    [food]       is an alternative of the rule `food`, drawn anew at each place
    {toy}        is drawn once in a story; from its second place on it is repeated
    {She|He}     is the first for a story about a girl, the second about a boy (one draw in a story)

No two derivations give the same text (`parse` finds them all, so that a test can tell). So the probability of a
story is the product of its draws, and -log2 of it is what the story costs at best: a model that sees nothing but the
stories comes near that cost and never below it. There are 10^47.1 different stories, 140.4 bits each on average.

Who and what a story is about is named again and again, for a model to show that it has learnt to copy. Each of them
has its first echo close by (named Lily. Lily ...), which is where a small model learns it soonest.
"""
import functools
import hashlib
import math
import re
from pathlib import Path

VOCAB_SIZE = 1536  # enough for every word of the grammar to be one piece
SAMPLE = 1 << 22   # bytes of stories that are enough to train it on

GRAMMAR = Path(__file__).with_name("stories.txt").read_text(encoding="utf-8")


def read_grammar(text):
    """{rule: (alternative, ...)}, an alternative being a tuple of symbols."""
    rules, name = {}, None
    text = text.replace(",\n    ", ", ")  # a list of words may go on in the next line
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
    An alternative as a tuple of symbols: a str as it stands, or (kind, rule) with kind "[" (drawn) or "{" (drawn
    once and kept), or ("|", (symbols for a girl, symbols for a boy)).
    """
    made = []
    for literal, drawn, kept, girl, boy in re.findall(r"([^][{}]+)|\[(\w+)\]|\{(\w+)\}|\{([^{}|]+)\|([^{}|]+)\}", text):
        made.append(literal or (drawn and ("[", drawn)) or (kept and ("{", kept)) or ("|", (symbols(girl), symbols(boy))))
    return tuple(made)


RULES = read_grammar(GRAMMAR)
BITS = {name: math.log2(len(alternatives)) for name, alternatives in RULES.items()}  # of one draw
CHARACTERS = "".join(sorted(set(GRAMMAR) - set("[]{}|_:\n")))  # all that a story can hold


def write(seed, number):
    """
    Story `number` of a seed -> (text, bits), a pure function of both; bits is -log2 of the story's probability.
    The draws are the digits of a hash, read as one long number (2^1024, so a draw is even to 1 part in 2^700).
    """
    digits = int.from_bytes(hashlib.shake_256(f"{seed} {number}".encode()).digest(128), "little")
    kept, bits = {}, 0.0

    def draw(rule):
        nonlocal digits, bits
        digits, choice = divmod(digits, len(RULES[rule]))
        bits += BITS[rule]
        return tell(RULES[rule][choice])

    def tell(sequence):
        nonlocal digits, bits
        said = []
        for symbol in sequence:
            if isinstance(symbol, str):
                said.append(symbol)
                continue
            kind, rule = symbol
            if kind == "[":
                said.append(draw(rule))
            elif kind == "{":
                if rule not in kept:
                    kept[rule] = draw(rule)
                said.append(kept[rule])
            else:
                if "boy" not in kept:
                    digits, kept["boy"] = divmod(digits, 2)
                    bits += 1
                said.append(tell(rule[kept["boy"]]))
        return "".join(said)

    return tell(RULES["story"][0]), bits


def parse(text):
    """The bits of every derivation of a text: one number for a story, none for a text that is not one."""
    return [bits for end, _, bits in derive((("[", "story"),), text, 0, {}) if end == len(text)]


def derive(sequence, text, at, kept):
    """
    Yields (end, kept, bits) for each way in which `sequence` derives text[at:end]. kept: what is known so far,
    {rule: its text} and {"boy": 0 or 1}.
    """
    if not sequence:
        yield at, kept, 0.0
        return
    for middle, known, bits in derive_one(sequence[0], text, at, kept):
        for end, all_known, more in derive(sequence[1:], text, middle, known):
            yield end, all_known, bits + more


def derive_one(symbol, text, at, kept):
    """What `derive` does, for one symbol."""
    if isinstance(symbol, str):
        if text.startswith(symbol, at):
            yield at + len(symbol), kept, 0.0
        return
    kind, rule = symbol
    if kind == "|":
        for boy in [kept["boy"]] if "boy" in kept else [0, 1]:
            for end, known, bits in derive(rule[boy], text, at, {**kept, "boy": boy}):
                yield end, known, bits + ("boy" not in kept)
    elif kind == "{" and rule in kept:
        yield from derive_one(kept[rule], text, at, kept)
    else:
        for alternative in RULES[rule]:
            for end, known, bits in derive(alternative, text, at, kept):
                yield end, {**known, rule: text[at:end]} if kind == "{" else known, bits + BITS[rule]


@functools.cache
def measure(sequence, kept=frozenset()):
    """
    Everything `sequence` derives once the rules in `kept` are settled, as {kept after it: (probability, number of
    derivations, probability × mean bits)}.
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
    """What `measure` does, for one symbol."""
    if isinstance(symbol, str) or symbol[1] in kept:
        return {kept: (1.0, 1, 0.0)}
    kind, rule = symbol
    alternatives, name = (rule, "boy") if kind == "|" else (RULES[rule], rule)
    if kind == "|" and "boy" in kept:  # both sides have the same measure: lists of equal length
        return measure(rule[0], kept)
    share, then = 1 / len(alternatives), {}
    for alternative in alternatives:
        for after, (q, m, c) in measure(alternative, kept).items():
            after = after if kind == "[" else after | {name}
            old = then.get(after, (0.0, 0, 0.0))
            then[after] = (old[0] + share * q, old[1] + m, old[2] + share * (c - q * math.log2(share)))
    return then


def entropy():
    """Bits per story: the mean of -log2 of its probability, exactly."""
    return sum(bits for _, _, bits in measure((("[", "story"),)).values())


def count():
    """How many different stories there are, exactly."""
    return sum(n for _, n, _ in measure((("[", "story"),)).values())
