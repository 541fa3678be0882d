"""
Questions about the built-in stories, each with exactly one right answer.

A story of engine/text/stories.py is known draw by draw, so a program can ask who, what, where, when
and how many, and knows the answer. A model that answers questions about stories that nobody wrote
before has learned to read: it cannot have memorized the answers.

Two things never occur in training, so that a test shows what carries over: the kinds of questions
in NEW_KINDS, and questions that a word of NEW_WORDS answers, though stories contain that word.
"""
import random
from dataclasses import dataclass

from engine.text import stories

TRAIN_SEED, TEST_SEED = 7001, 7002  # of the stories; the stories to pretrain on have another seed
PER_STORY = 3  # questions about a story in a conversation to train on


@dataclass(frozen=True)
class Question:
    """
    facts: {field of the texts: fact of a story}; facts are named as by stories.write_with_facts,
    and the question can be asked if the story has all of them. asked: the fields that the answer
    adds. wordings: texts of the question, which all mean the same.
    """
    kind: str
    asked: tuple
    facts: dict
    wordings: tuple
    answer: str


CHILD, FRIEND, PLACE = {"hero": "hero"}, {"friend": "friend"}, {"place": "place"}
ANIMAL = {"animal": ("companion", "animal")}
TOY = {"toy": "toy", "look": "look"}
COUNT = {"n": ("scene", "number")}
QUESTIONS = (
    Question("who", ("hero",), CHILD, (
        "What was the name of the {child}?", "What was the {child} called?",
        "Who is the story about?"), "The {child} was called {hero}."),
    Question("who", ("friend",), FRIEND | ANIMAL, (
        "What was the name of the {animal}?", "What was the {animal} called?"),
        "The {animal} was called {friend}."),
    Question("who", ("worker",), PLACE | {"worker": ("scene", "worker")}, (
        "Who was at the {place}?", "Who did they meet at the {place}?"),
        "There was a {worker} at the {place}."),
    Question("what", ("animal",), FRIEND | ANIMAL, (
        "What was {friend}?", "What animal was {friend}?"), "{friend} was a {animal}."),
    Question("what", ("food",), CHILD | {"food": ("likes", "food")}, (
        "What did {hero} like to eat?", "What food did {hero} like?"), "{hero} liked {food}."),
    Question("what", ("hobby",), CHILD | {"hobby": ("likes", "hobby")}, (
        "What did {hero} like to do?", "What did {hero} love to do?"), "{hero} liked to {hobby}."),
    Question("what", ("toy",), TOY, (
        "What was {look}?", "Which toy was {look}?"), "The {toy} was {look}."),
    Question("where", ("place",), CHILD | FRIEND | PLACE, (
        "Where did {hero} and {friend} go?", "Where did they go?"),
        "They went to the {place}."),
    Question("when", ("weather", "day"), PLACE | {
        "weather": ("outing", "weather"), "day": ("outing", "day")}, (
        "When did they go to the {place}?", "When were they at the {place}?"),
        "They went there on a {weather} {day}."),
    Question("how", ("look",), TOY, (
        "What did the {toy} look like?", "How did the {toy} look?"), "The {toy} was {look}."),
    Question("how many", ("n",), PLACE | COUNT | {"things": ("scene", "birds")}, (
        "How many {things} were at the {place}?", "How many {things} did they see?"),
        "There were {n} {things}."),
    Question("how many", ("n",), PLACE | COUNT | {"things": ("scene", "sweets")}, (
        "How many {things} did they get at the {place}?", "How many {things} were they given?"),
        "There were {n} {things}."),
    Question("how old", ("n",), FRIEND | {"n": ("pal", "number")}, (
        "How old was {friend}?",), "{friend} was {n} years old."),
)
KINDS = tuple(dict.fromkeys(question.kind for question in QUESTIONS))
NEW_KINDS = ("how old",)
# Every eighth word of each list of the grammar.
NEW_WORDS = {alternative[0] for alternatives in stories.RULES.values()
             for alternative in alternatives[7::8] if len(alternative) == 1}


def ask(facts, rng):
    """
    Return [(kind, set, question, answer)] of all that can be asked about a story, in random order.
    facts: as from stories.write_with_facts. set: "known", "new words" or "new kinds"; training has
    the known ones alone.
    """
    fields = {"child": "boy" if facts["boy"] else "girl"}
    found = []
    for question in QUESTIONS:
        if any(fact not in facts for fact in question.facts.values()):
            continue
        words = fields | {field: facts[fact] for field, fact in question.facts.items()}
        name = "known"
        if question.kind in NEW_KINDS:
            name = "new kinds"
        elif not NEW_WORDS.isdisjoint(words[field] for field in question.asked):
            name = "new words"
        found.append((question.kind, name, rng.choice(question.wordings).format(**words),
                      question.answer.format(**words)))
    rng.shuffle(found)
    return found


def conversation(story, questions):
    """Return {"messages": ...}: the story with the first question, its answer, then the others."""
    messages = []
    for _, _, question, answer in questions:
        asked = question if messages else f"{story} {question}"
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def training(count):
    """Yield `count` conversations to train on, each about one story."""
    for number in range(count):
        story, _, facts = stories.write_with_facts(TRAIN_SEED, number)
        asked = ask(facts, random.Random(number))
        known = [question for question in asked if question[1] == "known"]
        yield conversation(story, known[:PER_STORY])


def testing(count):
    """
    Yield `count` conversations to test with: one question each about a story that training has
    not, with its "kind" and its "set". The kinds take turns.
    """
    number = 0
    for i in range(count):
        while True:
            story, _, facts = stories.write_with_facts(TEST_SEED, number)
            number += 1
            kind = KINDS[i % len(KINDS)]
            asked = [q for q in ask(facts, random.Random(number)) if q[0] == kind]
            if asked:
                break
        yield conversation(story, asked[:1]) | {"kind": kind, "set": asked[0][1]}
