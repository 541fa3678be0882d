"""
Tests of the questions about built-in stories: readers of a story's text check the answers, and
training leaves out some kinds and words.
"""
import random
import re

import pytest

from engine.text import corpus, questions, stories

ANIMALS, TOYS, PLACES = ("|".join(word for (word,) in stories.RULES[rule])
                         for rule in ("animal", "toy", "place"))
# (pattern of a question, pattern of what answers it in the story, the answer). {0}, ... are the
# groups of the question; in the answer, the last one is the word found in the story. The readers
# know nothing of how the story was drawn.
READERS = (
    (r"(?:What|Who) was the (girl|boy)(?: called)?\?", r"{0} named (\w+)",
     "The {0} was called {1}."),
    (rf"(?:What|Who) was the ({ANIMALS})(?: called)?\?", r"{0} named (\w+)",
     "The {0} was called {1}."),
    (r"Who did they see with the (\w+)\?", r"they saw \w+ \w+ {0} and a \w+ (\w+)\.",
     "It was a {1}."),
    (r"Who sat ([\w ]+) and ate (\w+)\?", r"a \w+ (\w+) sat {0} and ate {1}\b", "It was a {2}."),
    (r"Who gave them (\w+) (\w+)\?", r"a \w+ (\w+) gave them \w+ and {0} {1}\b", "It was a {2}."),
    (r"What (?:animal )?was (\w+)\?", r"a \w+ (\w+) named {0}\b", "{0} was a {1}."),
    (r"What (?:food )?did (\w+) like(?: to eat)?\?",
     r"{0} (?:loved to \w+ and to eat|liked(?= \w+, but)|ate(?= \w+ every)|"
     r"and h\w+ \w+ ate) (\w+)",
     "S?[Hh]e liked {1}."),
    (r"What did (\w+) like (?:most of all )?to do\?",
     r"(?:{0} loved to|most of all s?he liked to|{0} ate \w+ every \w+ and went out to|"
     r"{0} and h\w+ \w+ ate \w+ and liked to) (\w+)",
     "S?[Hh]e liked to {1}."),
    (r"(?:What|Which) toy was (\w+)\?", rf"\b({TOYS})\b", "The {1} was {0}."),
    (r"Where (?:did they go|were they) that (\w+) (\w+)\?", rf"(?:to|[Aa]t) the ({PLACES})\b",
     "They went to the {2}."),
    (r"When (?:did they first go to|were they first at) the (\w+)\?",
     r"(?:One|On a|It was a) (\w+ \w+), (?:so )?[A-Z]\w+ (?:and|took) [A-Z]", "On a {1}."),
    (r"How many (\w+) (?:were at the \w+|did they see)\?", r"(?:saw|were) (\w+) \w+ {0}\b",
     "There were {1} {0}."),
    (r"How many (\w+) did (?:the (?!ball)\w+ give them|they get)\?",
     r"gave them \w+ and (\w+) {0}\.", "There were {1} {0}."),
    (r"How many (\w+) (?:were on the|did the) (\w+)(?: have)?\?",
     r"The {1} was \w+ and had (\w+) {0} on it", "The {1} had {2} {0}."),
    (r"How old was (\w+)\?", r"\. {0} was (\w+) years old", "It was {1} years old."),
)


def split(content):
    """Return (text, question) of the first turn of a conversation."""
    question = re.search(r"(?:What|Who|Which|Where|When|How) [^.!?\"]*\?$", content)[0]
    return content[:-len(question)], question


def read(question, story):
    """Return the answers that a reader finds in the story: patterns of the whole answer."""
    matches = [(re.fullmatch(asked, question), told, answer) for asked, told, answer in READERS]
    (match, told, answer), = [found for found in matches if found[0]]
    return {answer.format(*match.groups(), word)
            for word in re.findall(told.format(*match.groups()), story)}


@pytest.fixture(params=["all words", "two words"])
def some_stories(request, monkeypatch):
    """
    Return [(text, facts)]. With two words in each list, two sentences of a story often have the
    same word by chance.
    """
    if request.param == "two words":
        words = {rule for rule, found in stories.RULES.items()
                 if len(found) > 7 and all(len(a) == 1 for a in found)}
        monkeypatch.setattr(stories, "RULES", {
            rule: found[:2] if rule in words else found for rule, found in stories.RULES.items()})
    return [stories.write_with_facts(3, number)[::2] for number in range(1000)]


def test_the_story_has_one_answer_to_each_question(some_stories):
    kinds = set()
    for number, (story, facts) in enumerate(some_stories):
        answers = {}
        for kind, _, question, answer in (questions.ask(facts, random.Random(number))
                                          + questions.ask(facts, random.Random(-number))):
            pattern, = read(question, story)
            assert re.fullmatch(pattern, answer), (story, question, answer)
            assert answers.setdefault(question, answer) == answer
            kinds.add((kind, question.split()[0]))
    assert {kind for kind, _ in kinds} == set(questions.KINDS)


def test_a_part_of_a_story_has_the_answers_to_its_questions():
    asked = 0
    for record in questions.training(1000):
        contents = [message["content"] for message in record["messages"]]
        story = split(contents[0])[0]
        for question, answer in zip(contents[::2], contents[1::2]):
            pattern, = read(split(question)[1], story)
            assert re.fullmatch(pattern, answer), (story, question)
            asked += 1
    assert asked > 1600


def test_most_whole_stories_have_one_question_to_train_on():
    """Each kind is frequent, and what short texts lack is more frequent."""
    kinds, toys, lengths = dict.fromkeys(set(questions.KINDS) - set(questions.NEW_KINDS), 0), 0, []
    for record in questions.training(2000):
        story, question = split(record["messages"][0]["content"])
        if len(re.findall(r"[.!?]", story)) > 8:
            lengths.append(len(record["messages"]) // 2)
            kind = next(kind for kind in ("How many", "Where", "When", "Who", "Wh")
                        if question.startswith(kind))
            kinds["who" if re.match(r"What was the", question)
                  else "what" if kind == "Wh" else kind.lower()] += 1
            toys += " toy was " in question
    assert min(kinds.values()) > 50 and toys > 150, (kinds, toys)
    assert 0.1 < sum(length > 1 for length in lengths) / len(lengths) < 0.15
    assert max(lengths) == questions.PER_TEXT


def test_training_leaves_out_the_new_kinds_and_the_new_words():
    assert {"nine", "dancer", "bridge", "snowy", "Sunday"} <= questions.NEW_WORDS
    for record in questions.training(2000):
        contents = [message["content"] for message in record["messages"]]
        assert 1 <= len(contents) // 2 <= questions.PER_TEXT
        assert [message["role"] for message in record["messages"]] == (
            ["user", "assistant"] * (len(contents) // 2))
        for question, answer in zip(contents[::2], contents[1::2]):
            assert "How old" not in question
            told = set(re.findall(r"\w+", answer)) - set(re.findall(r"\w+", split(question)[1]))
            assert not told & questions.NEW_WORDS, (question, answer)


def test_tests_are_about_other_stories_and_tell_kind_and_set():
    tests = list(questions.testing(500))
    assert len({stories.write(seed, 5)
                for seed in (questions.TRAIN_SEED, questions.TEST_SEED, corpus.SEED)}) == 3
    stories_of = lambda records: {split(record["messages"][0]["content"])[0] for record in records}
    assert len(stories_of(tests)) == 500
    assert not stories_of(tests) & stories_of(questions.training(2000))
    count = {kind: sum(record["kind"] == kind for record in tests) for kind in questions.KINDS}
    assert max(count.values()) - min(count.values()) <= 1
    assert {record["set"] for record in tests} == {"known", "new words", "new kinds"}
    for record in tests:
        question, answer = (message["content"] for message in record["messages"])
        told = set(re.findall(r"\w+", answer)) - set(re.findall(r"\w+", split(question)[1]))
        assert ((record["set"] == "new kinds") == ("years old" in answer)
                == (record["kind"] in questions.NEW_KINDS))
        assert record["set"] != "new words" or told & questions.NEW_WORDS
        assert record["set"] != "known" or not told & questions.NEW_WORDS


def test_the_same_questions_every_time_whatever_their_number():
    for write in questions.training, questions.testing:
        assert list(write(50)) == list(write(200))[:50]
