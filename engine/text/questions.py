"""
Questions about the built-in stories, each with exactly one right answer.

The generator of a story (engine/text/stories.py) knows all random choices of the story, so it can
ask who, what, where, when and how many, and knows the answers. A model that answers questions about
unseen stories has learned to read: it cannot have memorized the answers.

Training leaves out two sets of questions, so that a test shows what generalizes: those of the kinds
in NEW_KINDS, and those that ask for a word of NEW_WORDS. The training stories do contain these
words.
"""
import random
import string
from dataclasses import dataclass

from engine.text import stories

TRAIN_SEED, TEST_SEED = 7001, 7002  # of the stories; the stories for pretraining have another seed
PER_TEXT = 4  # max questions in a training conversation
LEARNED_LAST = "how many", "when"  # kinds learned last: a story has several numbers and times
# Rules of the sentences that can be asked about without the rest of the story.
SENTENCES = "opening", "likes", "companion", "pal", "outing", "scene", "looks"


def fields_of(*texts):
    """Return the names in braces in format strings."""
    parts = [part for text in texts for part in string.Formatter().parse(text)]
    return {field for _, field, _, _ in parts if field}


@dataclass(frozen=True)
class Question:
    """
    rule: the rule of the grammar whose sentence contains the answer; wordings: texts of the
    question that mean the same. A name in braces stands for a word. It is a rule that this sentence
    draws, a rule that the grammar draws once per story, or a key of the_child(). A question is
    asked only if there is a word for each name in the answer and in all wordings.
    """
    kind: str
    rule: str
    answer: str
    wordings: tuple

    @property
    def asked(self):
        """The names of the words asked for: those in the answer and in none of the wordings."""
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
    Return all questions about a story as [(kind, set, question, answer)], in random order. facts:
    from stories.write_with_facts. A key is a rule that the grammar draws once per story, or a pair:
    the rule of a sentence and a rule that this sentence draws. sentences: the rules of the
    sentences that the reader sees; None or empty: all. set: "known", "new words" or "new kinds";
    training has only the known ones.
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
    """Return {"messages": ...}: a text with the first question, its answer, the other questions."""
    messages = []
    for _, _, question, answer in questions:
        asked = question if messages else f"{text} {question}"
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def some_sentences(facts, rng):
    """Return {rule: text} of one to three sentences of a story, in the order of the story."""
    drawn = {key[1]: text for key, text in facts.items()
             if key[0] in ("story", "plot") and key[1] in SENTENCES}
    chosen = sorted(rng.sample(range(len(drawn)), rng.randint(1, 3)))
    return {rule: drawn[rule] for rule in (list(drawn)[i] for i in chosen)}


def known_questions(facts, rng, sentences=None):
    """Return the questions of `ask` without those that training leaves out."""
    return [question for question in ask(facts, rng, sentences) if question[1] == "known"]


def training(count, short=False):
    """
    Yield `count` training conversations with known questions. Half of the texts, or all of them if
    `short`, are one to three sentences of a story, where an answer is easier to find. Up to
    PER_TEXT questions follow, chosen with preference for the kinds in LEARNED_LAST.

    The other texts are whole stories. Only an eighth of them have up to PER_TEXT questions: most of
    these are far from the story, and a small model learns less from them. The others have one
    question; in a quarter of all whole stories it is about the plot, which short texts lack.
    (doc/lab/chat.md)
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
            whole = number // 2  # number of whole stories so far
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
    Yield `count` test conversations, each with one question about a whole story, its "kind" and its
    "set". The kinds alternate. The seed of the stories differs from that of training. Stories
    without a question of the kind are skipped.
    """
    number = 0
    for i in range(count):
        kind, asked = KINDS[i % len(KINDS)], []
        while not asked:
            story, _, facts = stories.write_with_facts(TEST_SEED, number)
            asked = [q for q in ask(facts, random.Random(number)) if q[0] == kind]
            number += 1
        yield conversation(story, asked[:1]) | {"kind": kind, "set": asked[0][1]}
