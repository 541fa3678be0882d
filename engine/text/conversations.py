"""
Conversations as data: recognize the records that contain one, read their formats, and find faults.

    {"messages": [{"role": "user", "content": "Hi"}, ...]}       OpenAI's
    {"conversations": [{"from": "human", "value": "Hi"}, ...]}   ShareGPT's
    {"prompt": "Hi", "response": "Hello"}                        or "completion"
    {"instruction": "Add", "input": "1, 2", "output": "3"}       Alpaca's; "input" is optional

The values of "prompt" or "instruction" and of its answer may also be lists of turns, like
"messages". If one is a list, both must be.

A conversation is a list of turns, (role, text): at most one system prompt, then user and assistant
alternately.
"""
import collections
import hashlib
import json
import re

from engine.text.blocks import Unfit

# {key by which a record is recognized: name of its format}
FORMATS = {"messages": "OpenAI's messages", "conversations": "ShareGPT's conversations",
           "prompt": "prompts and responses", "instruction": "Alpaca's instructions"}
LISTS = "messages", "conversations"             # keys of a list of turns
ANSWERS = "response", "completion", "output"    # keys of the answer to a prompt or instruction
KEYS = *FORMATS, *ANSWERS, "input", "system"    # all keys that are read
# A file whose beginning matches this probably contains conversations.
LOOKS = re.compile(f"""\"({'|'.join(LISTS)})\"\\s*:\\s*\\[\\s*\\{{|"""
                   f"""\"(prompt|instruction)\"\\s*:.*?\"({'|'.join(ANSWERS)})\"\\s*:""", re.S)
ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user",
         "assistant": "assistant", "gpt": "assistant", "model": "assistant"}
ADVICE = ("to leave out damaged conversations and count them, add --checks=-files to train.py, or "
          "--skip_bad=True to data.py")
# Faults of a conversation, in the words of report().
DAMAGED = "damaged"
REPEATED = "the same as an earlier one"
UNANSWERED = "without an answer"
EMPTY = "with an empty answer"


def format_of(record, columns):
    """
    Return the key in FORMATS that makes a JSON object a conversation, or None if it is not one.
    columns: names of the text column; an object with a string under one of them is a text.
    """
    if not isinstance(record, dict) or any(isinstance(record.get(name), str) for name in columns):
        return None
    for key in FORMATS:
        if key in record and (key in LISTS or any(answer in record for answer in ANSWERS)):
            return key
    return None


def stored(record):
    """
    Return the fields of a record that `conversation` reads. This is what is kept of a table's row
    when the table is converted to JSON lines. Fields that are null are left out, since a table has
    all columns in every row, unless the record is no conversation without them: it is damaged then.
    """
    fields = {key: record[key] for key in KEYS if key in record}
    without_null = {key: value for key, value in fields.items() if value is not None}
    return without_null if format_of(without_null, ()) else fields


def described(value):
    """Describe the type of a JSON value in words."""
    kinds = {str: "a text", list: "a list", dict: "an object", bool: "true or false",
             type(None): "null"}
    return kinds.get(type(value), "a number")


def conversation(record, key):
    """
    Return the conversation in a record of the format `key`. Raises ValueError if a turn has no text
    or an unknown role, or if the roles are out of order.
    """
    if key in LISTS:
        turns = turns_of(record[key], key)
    else:
        answer = next(name for name in ANSWERS if name in record)
        question = record[key]
        if isinstance(question, list) or isinstance(record[answer], list):
            turns = turns_of(question, key) + turns_of(record[answer], answer)
        else:
            question = text_of(question, key)
            if key == "instruction" and record.get("input"):
                question += "\n\n" + text_of(record["input"], "input")
            turns = [("user", question), ("assistant", text_of(record[answer], answer))]
        if record.get("system"):
            turns.insert(0, ("system", text_of(record["system"], "system")))
    check_order([role for role, _ in turns])
    return turns


def turns_of(entries, key):
    """Return [(role, text)] of a list of turns."""
    if not isinstance(entries, list):
        raise ValueError(f'"{key}" is {described(entries)}, expected a list of turns')
    turns = []
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise ValueError(f"turn {number} is {described(entry)}, expected an object with a role "
                             "and a content")
        role = entry.get("role", entry.get("from"))
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"turn {number} has the role {json.dumps(role)[:40]}, expected one of "
                             f"{', '.join(ROLES)}")
        name = "content" if "content" in entry else "value"
        turns.append((ROLES[role], text_of(entry.get(name), f"{name} of turn {number}")))
    return turns


def text_of(value, name):
    """Return the text of a value: a string, or a list of parts as in OpenAI's content."""
    if isinstance(value, list) and value:
        parts = [part.get("text") if isinstance(part, dict) else None for part in value]
        if all(isinstance(part, str) for part in parts):
            value = "".join(parts)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {described(value)}, expected a text")
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"{name} holds a character that UTF-8 can't write "
                         f"({e.object[e.start]!r})") from e
    return value


def check_order(roles):
    """Raise ValueError unless user and assistant alternate, after at most one system prompt."""
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if any(role != ("user", "assistant")[i % 2] for i, role in enumerate(turns)):
        shown = ", ".join(roles[:6]) + (", ..." if len(roles) > 6 else "")
        raise ValueError(f"its roles are {shown}, expected user and assistant alternately, after "
                         "at most one system prompt")


def trained_part(turns):
    """
    Return (the turns up to the last answer, None), or ([], the fault). Conversations without an
    answer have nothing to train on, and an empty answer would teach a model to say nothing.
    """
    if turns[-1:] and turns[-1][0] != "assistant":
        turns = turns[:-1]
    answers = [text for role, text in turns if role == "assistant"]
    if not answers:
        return [], UNANSWERED
    if not all(text.strip() for text in answers):
        return [], EMPTY
    return turns, None


class Intake:
    """
    Checks the conversations of a source, file by file, and counts those that are left out. Repeated
    conversations and those with a missing or empty answer are always left out, damaged ones only if
    skip_bad. Without skip_bad, a file with a damaged conversation is refused.

        intake.begin(path)  # call it again to read the file anew: its counts start over
        ...                 # for each record: is_conversation(), and if it is one, keeps()
        intake.accept()     # the file was read to its end
    """

    def __init__(self, skip_bad=False):
        self.skip_bad, self.seen = skip_bad, set()
        self.formats = collections.Counter()  # {key in FORMATS: conversations kept}
        self.faults = {}  # {fault: (count, place of the first)}; DAMAGED: place and reason
        # {True: the first file with conversations, False: the first with texts}, for corpus.py
        self.files = {}

    def begin(self, path, unit="line"):
        """Begin a file. unit: the word of error messages for a record, such as "line"."""
        self.path, self.unit = path, unit
        self.kind = None  # True if its records are conversations, False if texts
        self.file_seen, self.file_formats, self.file_faults = set(), collections.Counter(), {}

    def accept(self):
        """Add the counts of the file to those of all files."""
        self.seen |= self.file_seen
        self.formats += self.file_formats
        for fault, (count, first) in self.file_faults.items():
            total, earliest = self.faults.get(fault, (0, f"{self.path}, {first}"))
            self.faults[fault] = total + count, earliest
        if self.kind is not None:
            self.files.setdefault(self.kind, self.path)

    def is_conversation(self, key, where):
        """
        Return whether a record is a conversation, not a text. key: format_of the record. where: its
        place, such as "line 3". Raises Unfit if the records before it are of the other kind.
        """
        kind = key is not None
        if self.kind not in (None, kind):
            names = {True: "a conversation", False: "a text"}
            raise Unfit(f"{where} is {names[kind]}, but the file began with {names[self.kind]}",
                        "expected one kind in a file")
        self.kind = kind
        return kind

    def keeps(self, record, key, where):
        """
        Return whether to train on the conversation in a record, and count it. Raises Unfit if the
        conversation is damaged, unless skip_bad.
        """
        try:
            turns, fault = trained_part(conversation(record, key))
        except ValueError as e:
            if not self.skip_bad:
                raise Unfit(f"{where}: {e}", ADVICE) from e
            fault, where = DAMAGED, f"{where}: {e}"
        if not fault:
            digest = hashlib.sha256(json.dumps(turns).encode()).digest()[:16]
            fault = REPEATED if digest in self.seen or digest in self.file_seen else None
            self.file_seen.add(digest)
        if fault:
            count, first = self.file_faults.get(fault, (0, where))
            self.file_faults[fault] = count + 1, first
            return False
        self.file_formats[key] += 1
        return True

    def report(self, name):
        """Return a line about the conversations of a source, or "" if it has none."""
        if not self.formats and not self.faults:
            return ""
        found = [f"{count:,} in {FORMATS[key]} format" for key, count in self.formats.items()]
        # If --data names a single file, the line begins with its path: leave it out of the places.
        left_out = [f"{count:,} {fault} (the first: {where.removeprefix(f'{name}, ')})"
                    for fault, (count, where) in self.faults.items()]
        line = f"{name}: conversations: {', '.join(found) or 'none'}"
        return line + (f"; left out: {', '.join(left_out)}" if left_out else "")
