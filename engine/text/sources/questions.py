"""Conversations about the built-in stories: questions of a user, and their answers."""
import re

from configurator import fail
from engine.text import questions

CONVERSATIONS = 30_000
# Raise this when engine/text/questions.py changes its conversations. The cached file's name has a
# hash of this file, so the conversations are then written again.
VERSION = 2


def documents(argument):
    """
    Yield conversations of engine/text/questions.py. argument: "", "N", "short" or "short:N". N:
    how many, CONVERSATIONS if not given; short: about a few sentences only.
    """
    match = re.fullmatch("(short)?(?:(?:^|:)([0-9]+))?", argument)
    if not match:
        fail(f"questions:{argument}: expected questions, questions:N, questions:short or "
             "questions:short:N, with the number N of conversations")
    yield from questions.training(int(match[2] or CONVERSATIONS), short=bool(match[1]))
