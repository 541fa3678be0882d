"""The story grammar: unambiguous, its probabilities exact, its stories coherent."""
import hashlib
import itertools
import math
import random
import re

import pytest

from engine.text import stories

SOME = [stories.write(11, number) for number in range(3000)]


def names(rule):
    return [word for (word,) in stories.RULES[rule]]


def parse(text):
    """Return the bits of every derivation of a text: one number for a story, [] for other texts."""
    return [bits for end, _, bits in derive((("[", "story"),), text, 0, {}) if end == len(text)]


def derive(sequence, text, at, kept):
    """
    Yield (end, kept, bits) for each way in which a sequence of symbols derives text[at:end].
    kept: {rule: its text} and {"boy": 0 or 1}, as far as they are known.
    """
    if not sequence:
        yield at, kept, 0.0
        return
    for middle, known, bits in derive_one(sequence[0], text, at, kept):
        for end, all_known, more in derive(sequence[1:], text, middle, known):
            yield end, all_known, bits + more


def derive_one(symbol, text, at, kept):
    """Yield the same as `derive` for one symbol."""
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
        for alternative in stories.RULES[rule]:
            for end, known, bits in derive(alternative, text, at, kept):
                known = {**known, rule: text[at:end]} if kind == "{" else known
                yield end, known, bits + stories.BITS[rule]


# ---- probability ---------------------------------------------------------------------------------

def test_every_story_has_one_derivation_of_the_probability_it_was_drawn_with():
    for text, bits in SOME:
        (found,) = parse(text)
        assert found == pytest.approx(bits, abs=1e-9)


def test_texts_that_are_no_stories_have_no_derivation():
    rng = random.Random(0)
    assert parse("") == parse("Once upon a time") == parse("the") == []
    for text, _ in SOME[:200]:
        at = rng.randrange(len(text))
        assert parse(text[:at]) == [] == parse(text + " The end.")
        assert parse(text[:at] + "#" + text[at + 1:]) == []
        # Replace one occurrence of a name: the story then has two names for one thing.
        for rule in "girl_name", "boy_name", "friend", "toy", "place":
            word, other = (next((w for w in names(rule) if re.search(rf"\b{w}\b", text)), None),
                           rng.choice(names(rule)))
            if word and other != word:
                places = [m.span() for m in re.finditer(rf"\b{word}\b", text)]
                a, b = rng.choice(places)
                if len(places) > 1:
                    assert parse(text[:a] + other + text[b:]) == []


def test_entropy_is_the_mean_of_what_stories_cost():
    costs = [bits for _, bits in SOME]
    mean = sum(costs) / len(costs)
    error = math.sqrt(sum((c - mean) ** 2 for c in costs)) / len(costs)
    assert abs(mean - stories.entropy()) < 4 * error < 1


def test_there_are_a_billion_stories_and_more():
    assert isinstance(stories.count(), int) and stories.count() > 10 ** 40
    assert len({text for text, _ in SOME}) == len(SOME)
    documented = re.search(r"10\^([\d.]+) different stories, ([\d.]+) bits",
                           stories.__doc__.replace("\n", " "))
    assert float(documented[1]) == pytest.approx(math.log10(stories.count()), abs=0.06)
    assert float(documented[2]) == pytest.approx(stories.entropy(), abs=0.06)


SMALL = """
story
    [start] {hero} {did|has} [thing]. [end] [nod]
start
    A {girl|boy}
    The {size} {girl|boy}
end
    So {size} was {thing}.
    [thing] [thing]!
    {hero}?
hero
    {[girl_name]|[boy_name]}
girl_name: Ann, Sue
boy_name: Tom, Ben
nod: Yes., No.
size: big, small, tiny
thing: cat, dog, owl, fox
"""


def enumerate_derivations(rules):
    """
    Return every (text, probability) by trying all draws. It shares no code with stories.py, which
    it checks.
    """
    def expand(rule_or_sequence, kept):
        if isinstance(rule_or_sequence, str):
            for alternative in rules[rule_or_sequence]:
                for text, p, after in expand(alternative, kept):
                    yield text, p / len(rules[rule_or_sequence]), after
            return
        if not rule_or_sequence:
            yield "", 1.0, kept
            return
        first, rest = rule_or_sequence[0], rule_or_sequence[1:]
        if isinstance(first, str):
            heads = [(first, 1.0, kept)]
        elif first[0] == "[":
            heads = expand(first[1], kept)
        elif first[0] == "{":
            heads = ([(kept[first[1]], 1.0, kept)] if first[1] in kept else
                     [(t, p, {**k, first[1]: t}) for t, p, k in expand(first[1], kept)])
        else:
            sexes = [(kept["boy"], 1.0)] if "boy" in kept else [(0, 0.5), (1, 0.5)]
            heads = [(t, p * q, k) for sex, p in sexes
                     for t, q, k in expand(first[1][sex], {**kept, "boy": sex})]
        for (text, p, after) in heads:
            for more, q, last in expand(rest, after):
                yield text + more, p * q, last

    return [(text, p) for text, p, _ in expand("story", {})]


def test_count_entropy_and_parser_on_a_grammar_small_enough_to_enumerate(monkeypatch):
    rules = stories.read_grammar(SMALL)
    monkeypatch.setattr(stories, "RULES", rules)
    monkeypatch.setattr(stories, "BITS", {name: math.log2(len(a)) for name, a in rules.items()})
    stories.measure.cache_clear()
    every = enumerate_derivations(rules)
    assert len(every) == len({text for text, _ in every}) == stories.count()
    assert sum(p for _, p in every) == pytest.approx(1)
    assert stories.entropy() == pytest.approx(-sum(p * math.log2(p) for _, p in every))
    for text, p in random.Random(0).sample(every, 300):
        assert parse(text) == [pytest.approx(-math.log2(p))]
    drawn = [stories.write(0, number) for number in range(20_000)]
    assert {text for text, _ in drawn} <= {text for text, _ in every}
    likely = max(every, key=lambda pair: pair[1])
    assert sum(text == likely[0] for text, _ in drawn) == pytest.approx(20_000 * likely[1], rel=0.5)
    stories.measure.cache_clear()


# ---- the grammar ---------------------------------------------------------------------------------

def references(sequence):
    for symbol in sequence:
        if not isinstance(symbol, str):
            yield from ([symbol[1]] if symbol[0] != "|"
                        else itertools.chain(*map(references, symbol[1])))


def test_every_rule_is_used_and_every_reference_is_a_rule():
    used = {"story"} | {name for a in stories.RULES.values() for sequence in a
                        for name in references(sequence)}
    assert used == set(stories.RULES)
    for name, alternatives in stories.RULES.items():
        assert len(set(alternatives)) == len(alternatives) > 0, name
    # `measure` assumes equally many.
    assert len(stories.RULES["girl_name"]) == len(stories.RULES["boy_name"])
    assert len(stories.RULES["plot"]) >= 6


def test_who_and_what_is_kept_together_is_told_apart():
    """A model can copy the right name only if no word belongs to two kinds."""
    kinds = ["girl_name", "boy_name", "friend", "toy", "place", "look"]
    words = [word for kind in kinds for word in names(kind)]
    assert len(words) == len(set(words))


def test_a_story_is_a_function_of_seed_and_number():
    assert [stories.write(11, n) for n in (2999, 0, 7)] == [SOME[2999], SOME[0], SOME[7]]
    assert stories.write(12, 0) != SOME[0]
    digest = hashlib.sha256("\n".join(text for text, _ in SOME[:100]).encode()).hexdigest()
    assert digest[:16] == "09d784c71afcd913"  # the same on every platform


# ---- what it reads like --------------------------------------------------------------------------

def test_names_things_and_pronouns_stay_the_same():
    mentions = {"hero": 0, "friend": 0, "toy": 0, "place": 0}
    for text, _ in SOME:
        words = re.findall(r"[A-Za-z]+", text)
        girl, boy = set(words) & set(names("girl_name")), set(words) & set(names("boy_name"))
        hero, = girl | boy
        friend, = set(words) & set(names("friend"))
        toy, = set(words) & set(names("toy"))
        place, = set(words) & set(names("place"))
        assert text.index(hero) < text.index(friend) < text.index(toy)
        assert text.index(place) < text.index(toy)
        sex = ({"girl", "She", "she", "Her", "her"} if girl
               else {"boy", "He", "he", "His", "his", "him"})
        assert not set(words) & (
            {"girl", "boy", "She", "she", "Her", "her", "He", "he", "His", "his", "him"} - sex)
        for kind, word in zip(mentions, (hero, friend, toy, place)):
            mentions[kind] += words.count(word) / len(SOME)
        assert words.count(hero) >= 3
        assert words.count(friend) >= 3
        assert words.count(toy) >= 2
    assert mentions["hero"] > 4
    assert mentions["friend"] > 4
    assert mentions["toy"] > 3
    assert mentions["place"] > 2


def test_sentences_are_well_formed():
    for text, _ in SOME:
        assert text.isascii()
        assert set(text) <= set(stories.CHARACTERS)
        assert "  " not in text
        assert not re.search(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou]", text), text
        assert re.match(r"[A-Z]", text) and text.endswith(".")
        assert not re.search(r"[.!?] [a-z]", re.sub(r'"[^"]*"', "Q", text)), text
        assert text.count('"') % 2 == 0 and not re.search(r"\b(\w+) \1\b", text), text


def test_length():
    sizes = [len(text) for text, _ in SOME]
    assert 400 < sum(sizes) / len(sizes) < 700
    assert min(sizes) > 300
    assert max(sizes) < 1000
