"""Choose the prompt of a training's samples: how a validation document of its own text begins."""
import re

import numpy as np

from engine.formats.chat_template import FIRST, TARGET
from engine.streams import one_line, width

MAX_WIDTH = 24     # max columns of a prompt in a terminal; a Chinese character has two
MIN_WIDTH = 8      # min columns to end a prompt before a punctuation mark
MAX_QUESTION = 80  # max columns of a question
LOOKED_AT = 20     # documents, or conversations
HELLO = "Hello"    # the prompt if there is no short question
CLAUSE = re.compile(r"[^,.;:!?…，。；：！？、]+")


def choose(prepared, context):
    """
    Return a prompt, a line without "|", of at most half of the context's tokens: the beginning of
    the first validation document that has one; of conversations, the first question. "" for a text
    without one.
    """
    if prepared.masks:
        return first_question(prepared, context)
    for line in first_lines(prepared):
        prompt = beginning(line)
        while prompt and len(prepared.tokenizer.encode_prompt(prompt)) > max(2, context // 2):
            prompt = prompt[:-1].rstrip()
        if prompt:
            return prompt
    return ""


def first_lines(prepared, max_tokens=1000):
    """
    Return lines of the validation split that may begin a prompt: the first of each document. If
    there is one document, it may begin in the middle of a sentence: then the first lines of its
    paragraphs come first.
    """
    tokens, tokenizer = np.asarray(prepared.val[:1 << 16]), prepared.tokenizer
    starts = np.flatnonzero(tokens == tokenizer.bos_id)[:LOOKED_AT]
    ends = np.append(starts[1:], len(tokens))
    texts = [tokenizer.decode(tokens[start:min(end, start + max_tokens)].tolist()).strip()
             for start, end in zip(starts, ends)]
    lines = [text.partition("\n")[0] for text in texts]
    if len(texts) == 1:
        _, *paragraphs = re.split(r"\n\s*\n", texts[0])
        _, *others = texts[0].split("\n")
        lines = [*(text.partition("\n")[0] for text in paragraphs), *others, *lines]
    return lines


def beginning(line):
    """
    Return how a line begins, up to a punctuation mark or MAX_WIDTH columns; "" if it can't be shown
    or has "|", which separates prompts.
    """
    line = line.strip()
    clause = CLAUSE.match(line)
    if clause and width(clause[0].strip()) >= MIN_WIDTH:
        line = clause[0].strip()
    short = line
    while width(short) > MAX_WIDTH:
        short = short[:-1]
    if len(short) < len(line) and not line[len(short)].isspace() and " " in short:
        short = short.rpartition(" ")[0]  # not within a word
    short = short.strip()
    is_plain = "|" not in short and "\ufffd" not in short and one_line(short) == short
    return short if is_plain and re.search(r"\w", short) else ""


def first_question(prepared, context):
    """Return the question of a validation conversation, HELLO if none is a short line."""
    chat, marks = prepared.chat, np.asarray(prepared.masks["val"][:1 << 18])
    tokens, frame = np.asarray(prepared.val[:len(marks)]), chat.encode_prompt("x")
    for start in np.flatnonzero(marks & FIRST)[:LOOKED_AT]:
        asked = tokens[start:start + context // 2].tolist()
        answers = np.flatnonzero(marks[start:start + len(asked)] & TARGET)
        asked = asked[:answers[0]] if len(answers) else []
        text = chat.decode(between(asked, frame)).strip()
        is_line = width(text) <= MAX_QUESTION and "|" not in text and one_line(text) == text
        # With a system prompt before it, or a template that changes it, it would be encoded
        # otherwise.
        if text and is_line and chat.encode_prompt(text) == asked:
            return text
    return HELLO


def between(ids, frame):
    """Return ids without what they have in common with the beginning and the end of `frame`."""
    def common(a, b):
        equal = [x == y for x, y in zip(a, b)]
        return equal.index(False) if False in equal else len(equal)

    start = common(ids, frame)
    end = len(ids) - common(ids[::-1], frame[::-1])
    return ids[start:end]
