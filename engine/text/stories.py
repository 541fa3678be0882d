"""
Write children's stories from a grammar: any number, without a network, with exactly known entropy.

stories.txt has the rules. A rule is a name and its alternatives, each with the same probability. An
alternative contains

    [food]       an alternative of the rule `food`, drawn anew at each place
    {toy}        the same, but drawn only once per story and repeated later
    {She|He}     the first in a story about a girl, the second about a boy; drawn once per story

The grammar is unambiguous: no text has two derivations, as tests/test_stories.py shows by parsing.
The probability of a story is therefore the product of the probabilities of its draws, and -log2 of
it is the minimal cost of the story in bits: a model trained only on stories approaches this cost
and cannot beat it. There are 10^47.1 different stories, 140.4 bits each on average.

A story often repeats the names of its people and things, so that a model can show that it has
learned to copy. Each name is first repeated nearby (named Lily. Lily ...), because a small model
learns close repetitions soonest.
"""
import functools
import hashlib
import math
import re
from pathlib import Path

VOCAB_SIZE = 1536  # enough for each word of the grammar to become one token
SAMPLE = 1 << 22   # bytes of stories to train this vocabulary on

GRAMMAR = Path(__file__).with_name("stories.txt").read_text(encoding="utf-8")


def read_grammar(text):
    """
    Return {rule: (alternative, ...)}; an alternative is a tuple of symbols, see `symbols`.

    A rule is a line with its name and an indented line for each alternative, or "name: word, word".
    """
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
    Parse an alternative. Return a tuple of symbols.

    A symbol is a literal str, ("[", rule) or ("{", rule) as in the text, or ("|", (symbols for a
    girl, symbols for a boy)).
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
BITS = {name: math.log2(len(alternatives)) for name, alternatives in RULES.items()}  # per draw
CHARACTERS = "".join(sorted(set(GRAMMAR) - set("[]{}|_:\n")))  # all characters of stories


def write(seed, number):
    """
    Return (text, bits) of story `number` of a seed. The story depends only on these two.

    bits: -log2 of the story's probability.
    """
    text, bits, _ = write_with_facts(seed, number)
    return text, bits


def write_with_facts(seed, number):
    """
    Return (text, bits, facts) of a story, see `write`. facts: a dict of what questions can ask for:
    {rule: its text} for the rules in { }, {"boy": 0 or 1}, and for all draws {(outer rule, drawn
    rule): the first text drawn}, such as ("companion", "animal"): "duck".

    A hash is read as a number below 2^1024. Each draw takes its last digit in base n, for n
    alternatives, so a draw is uniform to 1 part in 2^700.
    """
    digits = int.from_bytes(hashlib.shake_256(f"{seed} {number}".encode()).digest(128), "little")
    kept, drawn, bits = {}, {}, 0.0

    def draw(rule, outer):
        nonlocal digits, bits
        digits, choice = divmod(digits, len(RULES[rule]))
        bits += BITS[rule]
        text = expand(RULES[rule][choice], rule)
        drawn.setdefault((outer, rule), text)
        return text

    def expand(sequence, outer):
        """Return the text of a sequence of symbols, an alternative of the rule `outer`."""
        nonlocal digits, bits
        parts = []
        for symbol in sequence:
            if isinstance(symbol, str):
                parts.append(symbol)
                continue
            kind, rule = symbol
            if kind == "[":
                parts.append(draw(rule, outer))
            elif kind == "{":
                if rule not in kept:
                    kept[rule] = draw(rule, outer)
                parts.append(kept[rule])
            else:
                if "boy" not in kept:
                    digits, kept["boy"] = divmod(digits, 2)
                    bits += 1
                parts.append(expand(rule[kept["boy"]], outer))
        return "".join(parts)

    text = expand(RULES["story"][0], "story")
    return text, bits, drawn | kept


@functools.cache
def measure(sequence, kept=frozenset()):
    """
    Return {kept afterwards: (probability, number of derivations, probability x mean bits)} of all
    texts that a sequence of symbols derives.

    kept: names of the rules in { } that were drawn before the sequence, and "boy" if girl or boy
    was drawn. Repeating them costs nothing.
    """
    ways = {kept: (1.0, 1, 0.0)}
    for symbol in sequence:
        then = {}
        for before, (p1, n1, b1) in ways.items():
            for after, (p2, n2, b2) in measure_one(symbol, before).items():
                old = then.get(after, (0.0, 0, 0.0))
                then[after] = (old[0] + p1 * p2, old[1] + n1 * n2, old[2] + p1 * b2 + p2 * b1)
        ways = then
    return ways


def measure_one(symbol, kept):
    """Return the same as `measure`, for one symbol. A rule is used in [ ] or in { }, never both."""
    if isinstance(symbol, str) or symbol[1] in kept:
        return {kept: (1.0, 1, 0.0)}
    kind, rule = symbol
    if kind == "|" and "boy" in kept:  # the same for both sides: their rules are equally long
        return measure(rule[0], kept)
    alternatives, name = (rule, "boy") if kind == "|" else (RULES[rule], rule)
    share, then = 1 / len(alternatives), {}
    for alternative in alternatives:
        for after, (p, n, b) in measure(alternative, kept).items():
            after = after if kind == "[" else after | {name}
            old = then.get(after, (0.0, 0, 0.0))
            bits = b - p * math.log2(share)  # the draw itself costs -log2(share) bits
            then[after] = (old[0] + share * p, old[1] + n, old[2] + share * bits)
    return then


def entropy():
    """Return the exact mean of -log2 of a story's probability: bits per story."""
    return sum(bits for _, _, bits in measure((("[", "story"),)).values())


def count():
    """Return the exact number of different stories."""
    return sum(n for _, n, _ in measure((("[", "story"),)).values())
