"""Conversations about the built-in stories: questions of a user, and their answers."""
from configurator import fail
from engine.text import questions

CONVERSATIONS = 30_000


def documents(argument):
    """Yield conversations of engine/text/questions.py. argument: how many, "": CONVERSATIONS."""
    if argument and not argument.isdecimal():
        fail(f"questions:{argument}: expected questions, or questions:N with the number N of "
             "conversations")
    yield from questions.training(int(argument or CONVERSATIONS))
