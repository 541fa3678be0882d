"""
Minimal pairs from the built-in stories: two texts that differ in one place, of which one is right.
A model passes a pair if it assigns the right text a higher probability; a model without knowledge
passes half of the pairs. No questions are asked, so a base model can be tested.
After BLiMP, https://arxiv.org/abs/1912.00582

The right text is the beginning of a story of engine/text/stories.py, up to the end of the sentence
that contains the place. The kinds of mistakes in the wrong text:

    agreement  a pronoun of the other sex than the child's ("Lily ... He played with a dog"), or a
               noun in the wrong number ("three big dog", "a big dogs")
    order      two words of a sentence swapped ("a duck small named Pip")
    reference  a name, toy or place that the story mentioned before, replaced by another one from
               the same list of the grammar ("went to the park. At the lake, ..."), or the child and
               its friend confused ("Pip and Pip went to the park")
"""
import random
import re

from engine.text import stories

SEED = 7003  # of the stories; training has other seeds, see questions.py and corpus.py
TEST = 200   # pairs of each kind in a test


def words_of(rule):
    """Return the words of a rule that is a list of words."""
    return [alternative[0] for alternative in stories.RULES[rule]]


def plurals():
    """Return {noun: its plural} of the animals that stories mention in both forms."""
    forms = {}
    for noun in words_of("animal"):
        for plural in (noun + "s", noun.removesuffix("y") + "ies"):
            if plural in words_of("birds"):
                forms[noun] = plural
    return forms


def swapped(forms):
    return {other: word for word, other in forms.items()}


HE = {"she": "he", "She": "He", "her": "his", "Her": "His"}
PLURAL = plurals()
# Tables {right word: wrong word}. They alternate, so a model that prefers one form in all texts,
# such as the singular, is right in half of them.
WRONG_FORMS = HE, swapped(HE), PLURAL, swapped(PLURAL)


# ---- mistakes: each function returns [(start, end, wrong text)] for all places in a story --------

def wrong_forms(text, facts, turn, rng):
    forms = WRONG_FORMS[turn % len(WRONG_FORMS)]
    words = re.finditer(r"\w+", text)
    return [(*word.span(), forms[word[0]]) for word in words if word[0] in forms]


def wrong_order(text, facts, turn, rng):
    # Two adjacent words without capitals are not names, and are in one sentence. A lookahead finds
    # the second word, so that the next match can begin with it.
    found = re.finditer(r"(?<= )([a-z]+)(?= ([a-z]+)\b)", text)
    return [(m.start(1), m.end(2), f"{m[2]} {m[1]}") for m in found if m[1] != m[2]]


def wrong_reference(text, facts, turn, rng):
    return confused(text, facts) if turn % 2 else replaced(text, facts, rng)


def replaced(text, facts, rng):
    """Replace a repeated mention of a name, toy or place by another word of its list."""
    lists = {"hero": "boy_name" if facts["boy"] else "girl_name"}  # other lists: the rule itself
    found = []
    for rule in "hero", "friend", "toy", "place":
        word = facts[rule]
        others = [other for other in words_of(lists.get(rule, rule)) if other != word]
        for mention in list(re.finditer(rf"\b{word}\b", text))[1:]:
            found.append((*mention.span(), rng.choice(others)))
    return found


def confused(text, facts):
    """Swap the child's name with the friend's or vice versa, once the story has named both."""
    hero, friend = facts["hero"], facts["friend"]
    other = {hero: friend, friend: hero}
    names = list(re.finditer(rf"\b({hero}|{friend})\b", text))
    first = [name[0] for name in names].index(friend)
    return [(*name.span(), other[name[0]]) for name in names[first + 1:]]


MISTAKES = {"agreement": wrong_forms, "order": wrong_order, "reference": wrong_reference}
KINDS = tuple(MISTAKES)


# ---- pairs ---------------------------------------------------------------------------------------

def sentence_ends(facts):
    """Return the index after each sentence of a story, in order. facts: see write_with_facts()."""
    ends, at = [], -1
    drawn = {key: text for key, text in facts.items() if isinstance(key, tuple)}
    for (outer, rule), text in drawn.items():
        # Each rule in `story` is a sentence, except `plot`, whose rules are sentences.
        if outer in ("story", "plot") and rule != "plot":
            at += 1 + len(text)  # 1: the space between sentences
            ends.append(at)
    return ends


def write(count):
    """
    Yield `count` pairs of each kind, {"good": text, "bad": text, "kind"}. The kinds alternate. The
    first pairs are the same for every count, and each pair is from a different story.
    """
    number = 0
    for turn in range(count):
        for kind in KINDS:
            places = []
            while not places:
                story, _, facts = stories.write_with_facts(SEED, number)
                rng = random.Random(number)
                places = MISTAKES[kind](story, facts, turn, rng)
                number += 1
            start, end, wrong = rng.choice(places)
            last = next(at for at in sentence_ends(facts) if at >= end)
            yield {"good": story[:last], "bad": story[:start] + wrong + story[end:last],
                   "kind": kind}
