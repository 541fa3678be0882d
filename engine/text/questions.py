"""
Questions about the built-in stories, each with exactly one right answer.

A program that writes a story of engine/text/stories.py knows all that it drew for it, so it can ask
who, what, where, when and how many, and knows the answers. A model that answers questions about
stories that nobody wrote before has learned to read: it cannot have memorized the answers.

Training leaves out two sets of questions, so that a test shows what carries over: those of the
kinds in NEW_KINDS, and those that ask for a word of NEW_WORDS. The stories that training reads do
contain these words.
"""
import random
import string
from dataclasses import dataclass

from engine.text import stories

TRAIN_SEED, TEST_SEED = 7001, 7002  # of the stories; the stories to pretrain on have another seed
PER_TEXT = 4  # max questions in a conversation to train on
LEARNED_LAST = "how many", "when"  # kinds: stories have several numbers and times to confuse
# The rules of sentences that questions are asked about without the rest of the story.
SENTENCES = "opening", "likes", "companion", "pal", "outing", "scene", "looks"


def fields_of(*texts):
    """Return the names in braces in format strings."""
    parts = [part for text in texts for part in string.Formatter().parse(text)]
    return {field for _, field, _, _ in parts if field}


@dataclass(frozen=True)
class Question:
    """
    rule: the rule of the grammar whose sentence holds the answer; wordings: texts of the question
    that mean the same. A name in braces stands for a word. It is a rule that this sentence draws, a
    rule that the grammar draws once in a story, or a key of the_child. A question is asked only if
    there is a word for each name in the answer and in all wordings.
    """
    kind: str
    rule: str
    answer: str
    wordings: tuple

    @property
    def asked(self):
        """The names in the answer that are in no wording: those of the words asked for."""
        return fields_of(self.answer) - fields_of(*self.wordings)


QUESTIONS = (
    Question("who", "opening", "The {child} was called {hero}.", (
        "What was the {child} called?", "Who was the {child}?")),
    Question("who", "companion", "The {animal} was called {friend}.", (
        "What was the {animal} called?", "Who was the {animal}?")),
    Question("who", "scene", "It was a {worker}.", ("Who did they see with the {birds}?",)),
    Question("who", "scene", "It was a {worker}.", ("Who sat {where} and ate {food}?",)),
    Question("who", "scene", "It was a {worker}.", ("Who gave them {number} {sweets}?",)),
    Question("what", "companion", "{friend} was a {animal}.", (
        "What animal was {friend}?", "What was {friend}?")),
    Question("what", "likes", "{She} liked {food}.", (
        "What did {hero} like to eat?", "What food did {hero} like?")),
    Question("what", "likes", "{She} liked to {hobby}.", (
        "What did {hero} like to do?", "What did {hero} like most of all to do?")),
    Question("what", "plot", "The {toy} was {look}.", (
        "What toy was {look}?", "Which toy was {look}?")),
    Question("where", "outing", "They went to the {place}.", (
        "Where did they go that {weather} {day}?", "Where were they that {weather} {day}?")),
    Question("when", "outing", "On a {weather} {day}.", (
        "When did they first go to the {place}?", "When were they first at the {place}?")),
    Question("how many", "scene", "There were {number} {birds}.", (
        "How many {birds} were at the {place}?", "How many {birds} did they see?")),
    Question("how many", "scene", "There were {number} {sweets}.", (
        "How many {sweets} did the {worker} give them?", "How many {sweets} did they get?")),
    Question("how many", "looks", "The {toy} had {number} {dots}.", (
        "How many {dots} were on the {toy}?", "How many {dots} did the {toy} have?")),
    Question("how old", "pal", "It was {number} years old.", ("How old was {friend}?",)),
)
KINDS = tuple(dict.fromkeys(question.kind for question in QUESTIONS))
NEW_KINDS = ("how old",)
# Every eighth word of each list of the grammar.
NEW_WORDS = {alternative[0] for alternatives in stories.RULES.values()
             for alternative in alternatives[7::8] if len(alternative) == 1}


def the_child(facts):
    """Return {name in a question's braces: word} that depend on whether the child is a boy."""
    return {"child": "boy", "She": "He"} if facts["boy"] else {"child": "girl", "She": "She"}


def ask(facts, rng, sentences=None):
    """
    Return [(kind, set, question, answer)] of all that can be asked about a story, in random order.
    facts: as from stories.write_with_facts. Its keys are a rule that the grammar draws once in a
    story, or a pair: the rule of a sentence and a rule that this sentence draws. sentences: the
    rules of the sentences that the reader sees; None or empty: all. set: "known", "new words" or
    "new kinds"; training has the known ones alone.
    """
    found, once = [], {rule: text for rule, text in facts.items() if isinstance(rule, str)}
    for question in QUESTIONS:
        if sentences and question.rule not in sentences:
            continue
        in_sentence = {key[1]: text for key, text in facts.items() if key[0] == question.rule}
        words = once | in_sentence | the_child(facts)
        if not fields_of(question.answer, *question.wordings) <= words.keys():
            continue
        name = "known"
        if question.kind in NEW_KINDS:
            name = "new kinds"
        elif not NEW_WORDS.isdisjoint(words[field] for field in question.asked):
            name = "new words"
        found.append((question.kind, name, rng.choice(question.wordings).format(**words),
                      question.answer.format(**words)))
    rng.shuffle(found)
    return found


def conversation(text, questions):
    """Return {"messages": ...}: a text with the first question, its answer, then the others."""
    messages = []
    for _, _, question, answer in questions:
        asked = question if messages else f"{text} {question}"
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def some_sentences(facts, rng):
    """Return {rule: text} of one to three sentences of a story, in its order."""
    drawn = {key[1]: text for key, text in facts.items()
             if key[0] in ("story", "plot") and key[1] in SENTENCES}
    chosen = sorted(rng.sample(range(len(drawn)), rng.randint(1, 3)))
    return {rule: drawn[rule] for rule in (list(drawn)[i] for i in chosen)}


def known_questions(facts, rng, sentences=None):
    """Return what `ask` does, without what training leaves out."""
    return [question for question in ask(facts, rng, sentences) if question[1] == "known"]


def training(count, short=False):
    """
    Yield `count` conversations to train on, with known questions. Half of the texts, or all of them
    if `short`, are one to three sentences of a story, where an answer is found sooner. They are
    followed by up to PER_TEXT questions, those of the kinds in LEARNED_LAST before others.

    The other texts are whole stories. Only an eighth of them has up to PER_TEXT questions: most of
    these stand far from the story, and a small model learns less from them. The others have one, in
    a quarter of all about the plot, which short texts lack. (doc/lab/chat.md)
    """
    number = 0
    while count:
        story, _, facts = stories.write_with_facts(TRAIN_SEED, number)
        rng = random.Random(number)
        if short or number % 2:
            sentences = some_sentences(facts, rng)
            story = " ".join(sentences.values())
            known = known_questions(facts, rng, sentences)
            known.sort(key=lambda question: question[0] not in LEARNED_LAST)
            asked = known[:PER_TEXT]
            rng.shuffle(asked)
        else:
            whole = number // 2  # whole stories so far
            known = known_questions(facts, rng)  # in random order
            if whole % 4 == 0:
                known = known_questions(facts, rng, ["plot"]) or known
            asked = known[:PER_TEXT if whole % 8 == 1 else 1]
        number += 1
        if asked:
            yield conversation(story, asked)
            count -= 1


def testing(count):
    """
    Yield `count` conversations to test with: each has one question about a whole story, its "kind"
    and its "set". The kinds take turns. The stories have another seed than those of training. A
    story without a question of the kind is skipped.
    """
    number = 0
    for i in range(count):
        kind, asked = KINDS[i % len(KINDS)], []
        while not asked:
            story, _, facts = stories.write_with_facts(TEST_SEED, number)
            asked = [q for q in ask(facts, random.Random(number)) if q[0] == kind]
            number += 1
        yield conversation(story, asked[:1]) | {"kind": kind, "set": asked[0][1]}
