"""
Choose the prompt for the samples of a training: the beginning of a document of its validation text,
or a question of its validation conversations.
"""
import re

import numpy as np

from engine.formats.chat_template import FIRST, TARGET
from engine.streams import one_line, width

MAX_WIDTH = 24     # max columns of a prompt in a terminal; a Chinese character has two
MIN_WIDTH = 8      # a prompt ends before a punctuation mark that has at least so many columns
                   # before it
MAX_QUESTION = 80  # max columns of a question
MAX_TRIED = 20     # max documents or conversations to look at
HELLO = "Hello"    # the prompt if there is no short question
SEARCHED = 1 << 16  # tokens of validation text to search for documents
SEARCHED_CHATS = 1 << 18  # tokens of validation conversations to search for a question
# text up to the first punctuation mark
CLAUSE = re.compile(r"[^,.;:!?…，。；：！？、]+")


def choose(prepared, context):
    """
    Return a prompt of one line without "|", which has at most half as many tokens as the context
    (`context`). Of a text it is the beginning of the first validation document that gives one, ""
    if none does; of conversations the first question that can be used, otherwise HELLO.
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
    Return lines of the validation split whose beginnings may be prompts: the first line of each
    document. A single document may begin within a sentence, where the text was split. So its later
    paragraphs' first lines come first, then its other lines, then its first line.
    """
    tokens, tokenizer = np.asarray(prepared.val[:SEARCHED]), prepared.tokenizer
    starts = np.flatnonzero(tokens == tokenizer.bos_id)
    ends = np.append(starts[1:], len(tokens))
    texts = [tokenizer.decode(tokens[start:min(end, start + max_tokens)].tolist()).strip()
             for start, end in zip(starts[:MAX_TRIED], ends)]
    lines = [text.partition("\n")[0] for text in texts]
    if len(texts) == 1:
        _, *paragraphs = re.split(r"\n\s*\n", texts[0])
        _, *others = texts[0].split("\n")
        lines = [*(text.partition("\n")[0] for text in paragraphs), *others, *lines]
    return lines


def beginning(line):
    """
    Return the beginning of a line, up to a punctuation mark, at most MAX_WIDTH columns. Return ""
    if it has damaged bytes, control characters, no letter or digit, or "|", which separates
    prompts.
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
    columns, HELLO if there is none.
    """
    chat, marks = prepared.chat, np.asarray(prepared.masks["val"][:SEARCHED_CHATS])
    tokens = np.asarray(prepared.val[:len(marks)])
    frame = chat.encode_prompt("x")  # what the chat template puts around a message
    for start in np.flatnonzero(marks & FIRST)[:MAX_TRIED]:
        asked = tokens[start:start + context // 2].tolist()
        answers = np.flatnonzero(marks[start:start + len(asked)] & TARGET)
        asked = asked[:answers[0]] if len(answers) else []
        text = chat.decode(between(asked, frame)).strip()
        is_line = width(text) <= MAX_QUESTION and "|" not in text and one_line(text) == text
        # The prompt is encoded alone. That would give other tokens if a system prompt came before
        # it, or if the template had changed it.
        if text and is_line and chat.encode_prompt(text) == asked:
            return text
    return HELLO


def between(ids, frame):
    """Return ids without the first and the last ones that they share with `frame`."""
    def common(a, b):
        equal = [x == y for x, y in zip(a, b)]
        return equal.index(False) if False in equal else len(equal)

    start = common(ids, frame)
    end = len(ids) - common(ids[::-1], frame[::-1])
    return ids[start:end]
