"""
Chat templates: encode a conversation with the tokens around its messages, and mark the answers.

A model file stores its template as Jinja source. This module does not execute the source: like
runtime/chat.c, which has the same table and the same rules, it recognizes which known template the
source is, and encodes by the table. Training thus sees the same tokens that `run -m chat`, the chat
page and transformers send, and user text never becomes a control token. If the source were rendered
to one string, a marker in user text would look the same as a marker of the template.

    chat = Chat(CHATML, tokenizer)           # chat.tokenizer has the markers as control tokens
    ids, marks = chat.encode([("user", "Hi"), ("assistant", "Hello!")])
"""
import re
from dataclasses import dataclass

from tokenizer import CONTROL, USER_DEFINED

# In the strings of a Template and in an Outline, BOS and EOS stand for the vocabulary's tokens.
# VARIABLE stands for anything that a Jinja source computes, such as the user's words.
VARIABLE, BOS, EOS = "\1", "\2", "\3"
MAX_SOURCE = 1 << 20  # max bytes of a Jinja source; a longer one counts as unknown

# Flags of a token, bits of its mark.
TARGET = 1  # training target: part of an answer or the marker that ends it
FIRST = 2   # first token of a conversation
TURN = 4    # first token of a user's turn. BOS and a system prompt before a conversation's first
            # turn belong to no turn

# The template for vocabularies without one, such as those that train.py makes.
CHATML = ("{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' "
          "+ message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}"
          "{{ '<|im_start|>assistant\\n' }}{% endif %}")


@dataclass(frozen=True)
class Template:
    """A row of the table in runtime/chat.c: the strings around user and assistant messages."""
    name: str
    # A Jinja source is this template if its Outline contains all `signs` and none of `others`,
    # which are signs of similar templates.
    signs: tuple
    others: tuple = ()
    markers: tuple = ()  # each becomes one token if the vocabulary has it
    stop: str = ""       # the marker that ends an answer; "": EOS ends it
    # Text before the first turn. None: BOS if the vocabulary adds BOS or the Jinja source names it.
    begin: str | None = None
    open: str = ""       # begins every turn of the user; a system prompt follows it
    system_open: str = ""   # around the system prompt, in the first turn only
    system_close: str = ""
    user_open: str = ""     # around a user message
    user_close: str = ""
    answer_open: str = ""   # around the text of an answer
    answer_end: str = ""
    answer_close: str = ""  # ends an answer: before the next turn, and after the last answer
    system_always: bool = False   # write system_open and system_close without a system prompt too
    strip: bool = False           # strip white space around the system prompt and all messages
    strip_answer: bool = False    # strip white space around answers only
    strip_together: bool = False  # strip the system prompt and the user message as one text
    markers_eat_space: bool = False  # a marker that is one token swallows the white space after it
    leading_space: bool = False  # text after BOS or EOS gets the leading space of the vocabulary


HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA3 = {
    "markers": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "stop": "<|eot_id|>",
    "begin": BOS, "strip": True, "user_open": HEADER.format("user"),
    "user_close": "<|eot_id|>" + HEADER.format("assistant"), "system_close": "<|eot_id|>",
    "answer_close": "<|eot_id|>"}
LLAMA3_SIGNS = "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"
MISTRAL = {"markers": ("[INST]", "[/INST]"), "begin": BOS, "system_close": "\n\n",
           "answer_close": EOS}
PHI = {"markers": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "stop": "<|end|>",
       "markers_eat_space": True}
TEMPLATES = (
    Template(
        "chatml", ("<|im_start|>", "<|im_end|>"), ("<|im_sep|>", "<|im_user|>", "<|im_middle|>"),
        markers=("<|im_start|>", "<|im_end|>"), stop="<|im_end|>",
        system_open="<|im_start|>system\n", system_close="<|im_end|>\n",
        user_open="<|im_start|>user\n", user_close="<|im_end|>\n<|im_start|>assistant\n",
        answer_close="<|im_end|>\n"),
    Template(
        "llama3", LLAMA3_SIGNS, ("<|im_start|>", "Today Date: ", "BEGIN CONVERSATION"), **LLAMA3,
        system_open=HEADER.format("system")),
    Template(
        "llama3.1", (*LLAMA3_SIGNS, "Cutting Knowledge Date: December 2023\n", "Today Date: "),
        ("<|im_start|>",), **LLAMA3, system_always=True,
        system_open=HEADER.format("system") + "Cutting Knowledge Date: December 2023\n"
                                              "Today Date: 26 Jul 2024\n\n"),
    Template(
        "zephyr", ("<|user|>", "<|assistant|>", f"<|user|>\n{VARIABLE}{EOS}"),
        ("<|end|>", "<|endoftext|>", "<|im_start|>", "[gMASK]"),
        markers=("<|system|>", "<|user|>", "<|assistant|>"),
        system_open="<|system|>\n", system_close=EOS + "\n", user_open="<|user|>\n",
        user_close=EOS + "\n<|assistant|>\n", answer_close=EOS + "\n"),
    Template(
        "llama2", ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"),
        ("[SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "<|im_start|>"), begin="", strip=True,
        strip_together=True, leading_space=True, open=BOS + "[INST] ", system_open="<<SYS>>\n",
        system_close="\n<</SYS>>\n\n", user_close=" [/INST]", answer_open=" ", answer_end=" ",
        answer_close=EOS),
    Template(
        "mistral-v0", ("[INST] ", " [/INST]", VARIABLE + EOS),
        (" [INST]", "<<SYS>>", "[SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]",
         f"{VARIABLE} {VARIABLE}{EOS}"),
        **MISTRAL, leading_space=True, open="[INST] ", user_close=" [/INST]"),
    Template(
        "mistral-v1", (" [INST] ", " [/INST]", f"{VARIABLE} {VARIABLE}{EOS}"),
        ("<<SYS>>", "[SYSTEM_PROMPT]"), **MISTRAL, open=" [INST] ", user_close=" [/INST]",
        answer_open=" "),
    Template(
        "mistral-v3", ("[INST] ", VARIABLE + "[/INST]", f"{VARIABLE} {VARIABLE}{EOS}"),
        (" [INST]", "<<SYS>>", "[SYSTEM_PROMPT]"), **MISTRAL, strip_answer=True, open="[INST] ",
        user_close="[/INST]", answer_open=" "),
    Template(
        "mistral-v3-tekken", ("[INST]" + VARIABLE, VARIABLE + "[/INST]", VARIABLE + EOS),
        (" [INST]", "<<SYS>>", "[SYSTEM_PROMPT]", f"{VARIABLE} {VARIABLE}{EOS}"), **MISTRAL,
        open="[INST]", user_close="[/INST]"),
    Template(
        "phi3", ("<|end|>\n", "<|assistant|>\n"), ("<|im_start|>", "<|endoftext|>", "[gMASK]"),
        **PHI, system_open="<|system|>\n", system_close="<|end|>\n", user_open="<|user|>\n",
        user_close="<|end|>\n<|assistant|>\n", answer_close="<|end|>\n"),
    Template(
        "phi4-mini", ("<|end|>" + VARIABLE, "<|assistant|>" + VARIABLE),
        ("<|end|>\n", "<|im_start|>", "[gMASK]", "<|system|>Your name is Phi"), **PHI,
        system_open="<|system|>", system_close="<|end|>", user_open="<|user|>",
        user_close="<|end|><|assistant|>", answer_close="<|end|>"),
)


# ---- recognition ---------------------------------------------------------------------------------

BLANKS = " \t\n\r"
TAG = re.compile(r"\{[{%#]")
CLOSERS = {"{{": "}}", "{%": "%}", "{#": "#}"}
NAME = re.compile(r"[A-Za-z0-9_]+")


class Outline:
    """
    The constant texts of a Jinja source, in the order of the source. BOS and EOS replace bos_token
    and eos_token; one VARIABLE replaces all other code between two texts.
    """

    def __init__(self, source):
        self.source, self.at, self.text = source, 0, []
        after_minus = after_statement = False
        while tag := self.raw_text(after_minus, after_statement):
            closer = CLOSERS[tag]
            if tag == "{#":
                end = source.find(closer, self.at)
                self.at = end if end >= 0 else len(source)
            else:
                self.code(closer)
            after_minus = self.at < len(source) and source[self.at - 1] == "-"
            after_statement = tag != "{{"
            self.at = min(self.at + 2, len(source))  # after the closer
        self.variable()

    def __str__(self):
        return "".join(self.text)

    def variable(self):
        if self.text[-1:] != [VARIABLE]:
            self.text.append(VARIABLE)

    def add(self, text):
        self.text += [c for c in text if c not in (VARIABLE, BOS, EOS)]

    def raw_text(self, after_minus, after_statement):
        """
        Add the text up to the next tag. Return the opener of the tag, such as "{{", or None at the
        end of the source. Drop the white space that transformers' Jinja drops: all of it on a side
        of a tag that has a minus; the newline after a statement or comment; and the indentation of
        a statement or comment that begins its line.
        """
        source = self.source
        if after_statement and not after_minus and source[self.at:self.at + 1] == "\n":
            self.at += 1
        while after_minus and source[self.at:self.at + 1] in [*BLANKS]:
            self.at += 1
        start, tag = self.at, TAG.search(source, self.at)
        end = tag.start() if tag else len(source)
        text = source[start:end]
        if tag and source[end + 2:end + 3] == "-":
            text = text.rstrip(BLANKS)
        elif tag and tag[0] != "{{":
            indent = start + len(text.rstrip(" \t"))  # where the blanks before the tag begin
            if indent == 0 or source[indent - 1] == "\n":
                text = source[start:indent]
        self.add(text)
        self.at = end + 2 if tag else end
        return tag and tag[0]

    def code(self, closer):
        """Add the content of a tag up to its closer."""
        source, depth, before = self.source, 0, ""  # depth: nesting of the braces of dictionaries
        is_statement = closer == "%}"
        if is_statement:
            self.variable()
        while self.at < len(source) and (depth or not source.startswith(closer, self.at)):
            c = source[self.at]
            if c in "'\"":
                self.string(is_subscript=before == "[")
            elif name := NAME.match(source, self.at):
                self.name(name)
            else:
                depth += (c == "{") - (c == "}" and depth > 0)
                if c not in BLANKS + "+~-":  # + and ~ join texts; a - belongs to the tag
                    self.variable()
                self.at += 1
            before = c  # a "[" before a string makes it a subscript
        if is_statement:
            self.variable()

    def string(self, is_subscript):
        """Add the string that begins here, unless it is a subscript such as ['role']."""
        source, quote, text = self.source, self.source[self.at], []
        self.at += 1
        while self.at < len(source) and source[self.at] != quote:
            c = source[self.at]
            if c == "\\":
                self.at += 1
                c = source[self.at:self.at + 1]
                c = {"n": "\n", "t": "\t"}.get(c, c)
            text.append(c)
            self.at += 1
        if not is_subscript:
            self.add(text)
        self.at = min(self.at + 1, len(source))

    def name(self, match):
        self.at = match.end()
        token = {"bos_token": BOS, "eos_token": EOS}.get(match[0])
        if token:
            self.text.append(token)
        else:
            self.variable()


def find_template(outline):
    """Return the first Template with all signs and none of the others in an outline, or None."""
    for template in TEMPLATES:
        has_signs = all(sign in outline for sign in template.signs)
        if has_signs and not any(other in outline for other in template.others):
            return template
    return None


def default_system(template, outline):
    """
    Return the template's own system prompt, for conversations without one: in the outline, the
    first constant text between system_open and system_close; "" if there is none.
    """
    if not template.system_open:
        return ""
    for part in outline.split(template.system_open)[1:]:
        prompt, close, _ = part.partition(template.system_close)
        if close and not {VARIABLE, BOS, EOS} & {*prompt}:
            return prompt
    return ""


# ---- encoding ------------------------------------------------------------------------------------

# The characters with Unicode's property White_Space. If the template has markers_eat_space, a
# marker swallows those that follow it.
WHITE_SPACE = ("\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008"
               "\u2009\u200a\u2028\u2029\u202f\u205f\u3000")


class Chat:
    """
    Encodes conversations by a chat template. source: its Jinja source; tokenizer: the vocabulary.
    Raises ValueError for an unknown source.

    Attributes: template; source; tokenizer: the vocabulary with markers(tokenizer) as control
    tokens, which are added at its end if it lacks them; stop: the token that ends an answer.
    """

    def __init__(self, source, tokenizer):
        outline = str(Outline(source)) if len(source.encode()) <= MAX_SOURCE else ""
        self.source, self.template = source, find_template(outline)
        if not self.template:
            names = ", ".join(template.name for template in TEMPLATES)
            raise ValueError(f"its chat template is unknown, expected one of {names}")
        self.system = ""
        # Sources with enable_thinking contain texts that they write only if a caller sets it.
        if "enable_thinking" not in source:
            self.system = default_system(self.template, outline)
        self.tokenizer = tokenizer.with_control(self.markers(tokenizer))
        self.controls = {piece.decode(errors="replace"): i for i, (piece, _, kind)
                         in enumerate(self.tokenizer.pieces()) if kind == CONTROL}
        self.begins_with_bos = tokenizer.add_bos or BOS in outline
        self.stop = self.controls.get(self.template.stop, tokenizer.eos_id)

    def markers(self, tokenizer):
        """
        Return the markers to encode as control tokens.

        If the vocabulary lacks the marker that ends an answer, the model was never trained with
        this template and learns it now: return all markers. Otherwise return those that the
        vocabulary has: a model like TinyLlama, whose answers end with EOS, was trained with its
        markers as text.
        """
        pieces = {piece for piece, _, kind in tokenizer.pieces() if kind in (CONTROL, USER_DEFINED)}
        template = self.template
        if template.stop and template.stop.encode() not in pieces:
            return template.markers
        return [marker for marker in template.markers if marker.encode() in pieces]

    def encode(self, turns):
        """
        Encode a conversation. Return (ids, marks), two lists of int of the same length. turns:
        [(role, text)], at most one system prompt, then user and assistant alternately. If the last
        turn is the user's, the ids end where the answer begins.
        """
        ids, marks = [], []

        def add(turn, mark=0):
            turn.end_text()
            ids.extend(turn.ids)
            marks.extend([mark] * len(turn.ids))

        system = None
        if turns[0][0] == "system":
            system, turns = turns[0][1], turns[1:]
        for number, (role, text) in enumerate(turns):
            if role == "assistant":
                add(self.answer(text), TARGET)
                continue
            start, turn = len(ids), Turn(self, begun=number > 0)
            begin = self.user_turn(turn, number == 0, system, text)
            add(turn)
            if number:
                marks[start] |= TARGET  # the token that ends the previous answer
            marks[start + begin] |= TURN
        if turns[-1][0] == "assistant":
            start, closing = len(ids), Turn(self, begun=True)
            closing.markup(self.template.answer_close)
            add(closing)
            marks[start] |= TARGET
        marks[0] |= FIRST
        return ids, marks

    # In instruments.write_samples, a Chat takes the place of a Tokenizer: a prompt is the first
    # turn of a conversation, and the token that ends an answer ends the text.

    def encode_prompt(self, text):
        return self.encode([("user", text)])[0]

    def decode(self, ids):
        return self.tokenizer.decode(ids)

    @property
    def bos_id(self):
        return self.tokenizer.bos_id

    @property
    def eos_id(self):
        return self.stop

    def user_turn(self, turn, is_first, system, text):
        """
        Add to `turn` the markup that ends the previous answer or begins the conversation, and then
        the user's turn, up to where the answer begins. Return the index in turn.ids of the first
        token of the user's turn itself.
        """
        template = self.template
        if not is_first:
            turn.markup(template.answer_close)
        elif template.begin is not None:
            turn.markup(template.begin)
        elif self.begins_with_bos:
            turn.token(self.tokenizer.bos_id, is_marker=False)
            # transformers adds the BOS of a vocabulary after it has encoded the text: the text then
            # begins with a leading space. A BOS in the template's source is part of the text, which
            # then continues after it without one.
            turn.begun = not self.tokenizer.add_bos
        begin = None
        if template.open:
            begin = turn.place(template.open)
        turn.markup(template.open)
        system_begin = len(turn.text)
        if is_first:
            self.add_system(turn, system)
        if template.strip_together and len(turn.text) > system_begin:
            text = text.rstrip()
        elif template.strip:
            text = text.strip()
        if begin is None:
            begin = turn.place(template.user_open)
        turn.markup(template.user_open)
        turn.text += text
        if template.strip_together:  # `text` may be empty now: strip system_close, too
            turn.text = turn.text[:system_begin] + turn.text[system_begin:].rstrip()
        turn.markup(template.user_close)
        return begin

    def add_system(self, turn, system):
        """Add the system prompt. system: its text; None: the template's own."""
        template = self.template
        system = self.system if system is None else system
        if not system and not template.system_always:
            return
        if template.strip and not template.strip_together:
            system = system.strip()
        turn.markup(template.system_open)
        turn.text += system
        turn.markup(template.system_close)

    def answer(self, text):
        """Return the Turn of an answer, without the marker that ends it."""
        template, turn = self.template, Turn(self, begun=True)
        # The user's turn ends with a marker, which is a token if the stop marker is one.
        turn.after_marker = template.markers_eat_space and template.stop in self.controls
        if template.strip or template.strip_answer:
            text = text.strip()
        turn.markup(template.answer_open)
        turn.text += text
        turn.markup(template.answer_end)
        return turn


class Turn:
    """
    The tokens of a turn so far. text: pending text, not yet encoded; begun: whether the pending
    text continues earlier text and so gets no leading space; after_marker: whether it follows a
    marker that swallows white space.
    """

    def __init__(self, chat, begun):
        self.chat, self.ids, self.text, self.begun, self.after_marker = chat, [], "", begun, False

    def end_text(self):
        """Encode the pending text."""
        tokenizer = self.chat.tokenizer
        text = self.text.lstrip(WHITE_SPACE) if self.after_marker else self.text
        self.ids += (tokenizer.encode_inside if self.begun else tokenizer.encode)(text)
        if text:
            self.begun, self.after_marker = True, False
        self.text = ""

    def token(self, token, is_marker):
        self.end_text()
        self.ids.append(token)
        self.begun = is_marker or not self.chat.template.leading_space
        self.after_marker = is_marker and self.chat.template.markers_eat_space

    def first_token(self, markup):
        """Return (length, id, whether it is a marker) of the token that begins markup, or None."""
        tokenizer = self.chat.tokenizer
        if markup[0] in (BOS, EOS):
            return 1, tokenizer.bos_id if markup[0] == BOS else tokenizer.eos_id, False
        for marker in self.chat.template.markers:
            if markup.startswith(marker) and marker in self.chat.controls:
                return len(marker), self.chat.controls[marker], True
        return None

    def markup(self, markup):
        """Add a string of the template. Markers, BOS and EOS in it become tokens."""
        while markup:
            length = 1
            if found := self.first_token(markup):
                length, token, is_marker = found
                self.token(token, is_marker)
            else:
                self.text += markup[0]
            markup = markup[length:]

    def place(self, markup):
        """Return the index that the first token of `markup` will have if it is added next."""
        if markup and self.first_token(markup):
            self.end_text()  # adding that token does this first
        return len(self.ids)
