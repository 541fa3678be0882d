"""
Choose the prompt for the samples of a training run: the beginning of a line of its validation text,
or a question of its validation conversations.
"""
import collections
import re
import unicodedata

import numpy as np

from engine.formats.chat_template import FIRST, TARGET
from engine.streams import one_line, width

MAX_WIDTH = 24     # max columns of a prompt in a terminal; a Chinese character has two
MIN_WIDTH = 8      # a prompt ends at the first punctuation mark if at least this many columns
                   # precede it
MAX_QUESTION = 80  # max columns of a question
MAX_TRIED = 20     # max documents or conversations to look at
HELLO = "Hello"    # the prompt if no question is short enough
SEARCHED = 1 << 16  # tokens of validation text to search for documents
SEARCHED_CHATS = 1 << 18  # tokens of validation conversations to search for a question
# text up to the first punctuation mark
CLAUSE = re.compile(r"[^,.;:!?…，。；：！？、]+")


def choose(prepared, context):
    """
    Return a prompt of one line without "|", of at most half of the context. context: its length in
    tokens. For a text, the prompt is the beginning of a line of the validation split that looks
    like the training text, or "" if no line is usable. For conversations, it is the first usable
    question, or HELLO.
    """
    if prepared.masks:
        return first_question(prepared, context)
    prompts = []
    for line in lines_to_begin(prepared):
        prompt = beginning(line)
        while prompt and len(prepared.tokenizer.encode_prompt(prompt)) > max(2, context // 2):
            prompt = prompt[:-1].rstrip()
        if prompt:
            prompts.append(prompt)
    known = prepared.tokenizer.decode(np.asarray(prepared.train[:SEARCHED]).tolist())
    return typical(prompts, known) if prompts else ""


def lines_to_begin(prepared, max_tokens=1000):
    """
    Return lines of the validation split whose beginnings may be prompts: the first line of each
    document, then the first lines of its later paragraphs, then the others. A single document may
    begin within a sentence, where the text was split, so its first line is the last choice.
    """
    tokens, tokenizer = np.asarray(prepared.val[:SEARCHED]), prepared.tokenizer
    starts = np.flatnonzero(tokens == tokenizer.bos_id)
    ends = np.append(starts[1:], len(tokens))
    texts = [tokenizer.decode(tokens[start:min(end, start + max_tokens)].tolist()).strip()
             for start, end in zip(starts[:MAX_TRIED], ends)]
    firsts, paragraphs, others = [], [], []
    for text in texts:
        first, *rest = text.split("\n")
        firsts.append(first)
        paragraphs += (part.partition("\n")[0] for part in re.split(r"\n\s*\n", text)[1:])
        others += rest
    if len(texts) == 1:
        return [*paragraphs, *others, *firsts]
    return [*firsts, *paragraphs, *others]


def typical(prompts, known):
    """
    Return the first of the prompts that looks like the text `known`. This skips code, headings,
    tables and lines in another script, unless the text consists of them. The prompt begins with the
    usual kind of character: the kind that begins the lines with most of the text. Of the prompts
    that do, its distance from the text in the mix of kinds is at most the median. Both measures
    count bytes: a Chinese character says as much as several Latin letters, and has three bytes.
    """
    lines_of = collections.Counter()
    for line in map(str.strip, known.split("\n")):
        lines_of[kind(line[:1])] += len(line.encode(errors="replace"))
    usual, _ = lines_of.most_common(1)[0]
    prompts = [prompt for prompt in prompts if kind(prompt[0]) == usual] or prompts
    of_text = shares(known)
    distances = [sum(abs(share - of_text[name]) for name, share in shares(prompt).items())
                 for prompt in prompts]
    limit = sorted(distances)[(len(distances) - 1) // 2]
    return next(prompt for prompt, far in zip(prompts, distances) if far <= limit)


def kind(character):
    """Return the script of a letter, "digit", "mark", or "" for white space or an empty string."""
    if not character.strip():
        return ""
    if character.isalpha():
        return unicodedata.name(character, "unnamed").split()[0]
    return "digit" if character.isdigit() else "mark"


def shares(text):
    """Return {kind: fraction of the bytes} of a text without its white space, as a Counter."""
    found = collections.Counter()
    for character, count in collections.Counter(text).items():
        found[kind(character)] += count * len(character.encode(errors="replace"))
    del found[""]
    return collections.Counter({name: n / found.total() for name, n in found.items()})


def beginning(line):
    """
    Return the beginning of a line, up to a punctuation mark, at most MAX_WIDTH columns. Return ""
    if it contains damaged bytes, control characters, or "|", which separates prompts, or if it has
    no letter or digit.
    """
    line = line.strip()
    clause = CLAUSE.match(line)
    if clause and width(clause[0].strip()) >= MIN_WIDTH:
        line = clause[0].strip()
    short = line
    while width(short) > MAX_WIDTH:
        short = short[:-1]
    if len(short) < len(line) and not line[len(short)].isspace() and " " in short:
        short = short.rpartition(" ")[0]  # do not end within a word
    short = short.strip()
    is_plain = "|" not in short and "\ufffd" not in short and one_line(short) == short
    return short if is_plain and re.search(r"\w", short) else ""


def first_question(prepared, context):
    """
    Return the first question of a validation conversation that is one line of at most MAX_QUESTION
    columns, or HELLO if there is none.
    """
    chat, marks = prepared.chat, np.asarray(prepared.masks["val"][:SEARCHED_CHATS])
    tokens = np.asarray(prepared.val[:len(marks)])
    frame = chat.encode_prompt("x")  # the tokens that the chat template puts around a message
    for start in np.flatnonzero(marks & FIRST)[:MAX_TRIED]:
        asked = tokens[start:start + context // 2].tolist()
        answers = np.flatnonzero(marks[start:start + len(asked)] & TARGET)
        asked = asked[:answers[0]] if len(answers) else []
        text = chat.decode(between(asked, frame)).strip()
        is_line = width(text) <= MAX_QUESTION and "|" not in text and one_line(text) == text
        # The prompt is encoded alone. Its tokens differ if a system prompt preceded it, or if the
        # template changed it.
        if text and is_line and chat.encode_prompt(text) == asked:
            return text
    return HELLO


def between(ids, frame):
    """Return `ids` without the common prefix and the common suffix with `frame`."""
    def common(a, b):
        equal = [x == y for x, y in zip(a, b)]
        return equal.index(False) if False in equal else len(equal)

    start = common(ids, frame)
    end = len(ids) - common(ids[::-1], frame[::-1])
    return ids[start:end]
