"""
Find the metrics in what programs print: a Parser reads lines and returns rows.

A metric is printed as `name=value`, as `name: value`, in a dict or JSON object, in a row under a
header of columns, or as `name value` alone between two delimiters. Metrics that train.py logs too
get its names: `loss` becomes loss/train. doc/tracking.md lists the formats and the names.
"""
import json
import math
import re
import time
from dataclasses import dataclass

MAX_LINE = 10_000  # max characters that are read from a line
MAX_OBJECT = 100_000  # max characters that are read from a printed dict
MAX_STEP = 2 ** 53  # larger floats skip integers, and W&B's steps are 64-bit integers


def verbose(*parts):
    """Compile the joined parts with re.VERBOSE, which ignores white space."""
    return re.compile("".join(parts), re.VERBOSE)


# ---- numbers ------------------------------------------------------------------------------------

NUMBER = r"""[-+]?(?:
    [1-9]\d{0,2} (?:,\d{3})+ (?:\.\d+)?                  # 1,048,576
    | \d+ (?:_\d{3})+ (?:\.\d+)?                         # 1_048_576
    | (?:\d+\.?\d*|\.\d+) (?:[eE][-+]?\d+)?             # 12, 0.5, .5, 1.5e-4
    | (?i:nan|inf(?:inity)?) )"""
UNIT = r"""(?: [kKMGTB](?![\w/])
    | \s?(?:%|[mnuµ]?s|secs?|seconds|min|m|h|hrs?|x|[kKMGTP]?i?B)(?:/\w+)? )?"""
VALUE_END = r"""(?![\w%/@])(?!\.\w)(?![,:-]\d)"""  # not within a version, path, date or time
VALUE = f"{NUMBER} {UNIT} {VALUE_END}"
NUMERIC = re.compile(r"(?i)\d|nan|inf")  # a line without a match has no metrics
SCALED = verbose(f"({NUMBER}) (?: ([kKMGTB]) | {UNIT} )")
SCALES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def number(text):
    """
    Return a printed number as a float, or None for other text: 31500.0 for "31.5k" (see SCALES).
    Other units are dropped: 12.3 for "12.3%", "12.3ms" and "12.3GB".
    """
    match = SCALED.fullmatch(text.strip())
    if not match:
        return None
    return float(match[1].replace(",", "").replace("_", "")) * SCALES.get(match[2], 1)


def whole(value):
    """Return a float as an int; None for None, nan, negative, fractional or too large numbers."""
    if value is None or not 0 <= value < MAX_STEP or value != int(value):
        return None
    return int(value)


def epoch(text):
    """Return a printed epoch, such as 0.25, as a float, or None if it can't be an epoch."""
    value = number(text)
    return value if value is not None and 0 <= value < MAX_STEP else None


# ---- the epoch and step of a line ----------------------------------------------------------------

# Colors and other escape sequences of terminals
ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
TOTAL = rf"""\s*(?:/|\bof\b)\s*(?P<steps>{NUMBER}[kMGT]?)"""
STEP_END = r"""(?![\w%/]|[.,]\d)"""
NOT_A_POSITION = "".join(f"(?<!{word}[ ])" for word in "best last max total num per warmup".split())
EPOCH = verbose(rf"""
    (?: (?i:(?<![\w/-]) {NOT_A_POSITION} (?<!number[ ]of[ ])
            (?:train(?:ing)?[ ])? epoch (?:\(\w+\))? \s*[:=\#]?\s*)      # Epoch(train) [1]
    | (?i:^\W*train(?:ing)?:[ ]) (?=\d+[ ]*\[) )                         # Train: 0 [
    \[?\s* (?P<epoch>{NUMBER}) (?:\s*(?:/|\bof\b)\s*\d+)? \]? {STEP_END}""")
# A line without metrics begins an epoch if it matches this, such as "INFO: Starting epoch 2".
EPOCH_LINE = verbose(r"""(?i: ^(?:\W|\d|\b(?:info|root)\b)*
    (?:(?:start|begin|train|runn)\w*\W+)? epoch\b )""")
# Keras' callbacks after an epoch, such as "Epoch 00002: early stopping"
EPOCH_NOTE = verbose(r"""(?i: \bepoch[ ]\d+:[ ]
    (?: early | restoring | saving | finished | reduce | \w+[ ](?:improved|did[ ]not) ) )""")
STEP_NAME = r"""(?:
    (?:(?:global|train(?:ing)?|optimizer|current)[ _-]?)? (?:step|iter(?:ation)?)
    | (?:global[ _]?)? (?:step|iter(?:ation)?)s
    | episode | round | it(?=\s*[:=]|$) )"""
STEP = verbose(rf"""
    (?i:(?<![\w/-]) {NOT_A_POSITION} (?<![ ]of[ ]) {STEP_NAME}) \s*[:=\#]?\s*[\[(]?\s*
    (?P<step>{NUMBER}[kM]?) (?:{TOTAL})? {STEP_END}(?!:\d)""")
BATCH_NAME = r"""(?:mini-?)?(?:batch|update)(?:[ _]idx)?"""
# A line with a step but no metrics is kept for the metrics of later lines (IterCounter.announce)
# only if it matches this, has a dict or begins with a bar.
STEP_LINE = verbose(rf"(?i: ^\W* (?:\w+\W+)? (?:{STEP_NAME}|{BATCH_NAME}) \b )")
BATCH = verbose(rf"""
    (?i:(?<![\w/-]) {BATCH_NAME}) \s*[:=\#]?\s*[\[(]?\s*
    (?P<step>{NUMBER}) (?:{TOTAL})? {STEP_END}(?!:\d)""")
TQDM = [verbose(bar) for bar in (
    rf"""(?:(?<![\d.])\d+(?:\.\d+)?%\s*)? \|[^|]*\| \s*
         (?P<step>{NUMBER}[kMGT]?)/(?:\?|(?P<steps>{NUMBER}[kMGT]?)) \s*(?=\[)""",
    r"""^\d+%\s+(?P<step>\d+)/(?P<steps>\d+)\s+(?=\[)""",                # without room for a bar
    r"""(?<![\w.])(?P<step>\d+)it\s(?=\[)""")]                                   # without a total
BAR_LINE = re.compile(r"\d+%(?:\||\s+\d+/)")
BARS = [verbose(bar) for bar in (
    r"""(?<![\w/.])(?P<step>\d+)/(?P<steps>\d+)[ ]?\[[=>.\s\#-]*\]""",              # Keras 2
    r"""\[\s*(?P<step>\d+)\s*/\s*(?P<steps>\d+)(?![\w/.])""",                      # [  10/5005]
    r"""^\W*(?P<step>\d+)\s*/\s*(?P<steps>\d+)(?![\w/.])""")]                       # Keras 3, Rich
# llama2.c, XGBoost
LEADING_STEP = verbose(r"""^\[?(?P<step>\d+)(?:[\]:]\s+|\s*\|\s*)(?=[^\W\d])""")
# [(pattern, substrings)]: a pattern is tried only if the line in lower case has one of them, so
# most lines need no search. The first pattern that matches counts.
STEP_PATTERNS = [
    *((bar, ("/", "it ")) for bar in TQDM), (STEP, ("step", "it", "episode", "round")),
    *((bar, ("/",)) for bar in BARS), (BATCH, ("batch", "update")), (LEADING_STEP, ("]", ":", "|"))]
# A word before a step or bar that counts the batches of an evaluation, not the training's steps
EVALUATION = verbose(r"""(?i:(?<![\w/=-])
    (?P<split>val|eval|test|predict|sanity)(?:id\w*|uat\w*|ing|ion)? (?![\w/=-]))""")

# ---- metrics ------------------------------------------------------------------------------------

# Names of values that are a step or an epoch, not a metric
STEP_KEY, BATCH_KEY = verbose(STEP_NAME), verbose(BATCH_NAME)
EPOCH_KEY = verbose(
    r"(?:(?:train|training|end[ ]of|finished|completed|val|validation|eval)[ ])?epoch")
SCORE = verbose(r"(?i: (?:.*[\W_])?(?:loss|acc|accuracy|perplexity|ppl|bpb|error|f1)(?:@\d+)? )")
KNOWN_METRIC = verbose(SCORE.pattern, r" | (?i: (?:.*[\W_])?(?:learning[ ]rate|lr|mfu) )")
# A field of its own that names the split of the metrics after it: "Val: loss 2.3"
SPLIT = verbose(r"""(?i: \W*(?:(?P<train>train(?:ing)?)|(?P<val>val(?:id(?:ation)?)?)
    |(?P<test>test(?:ing)?)|(?P<eval>eval(?:uation)?))(?:[ ]set)?\W* )""")
IGNORED = {"eta", "v num", "rank", "max epochs", "max steps"}
# {name in lower case: the name of the same metric in the rows of train.py}
OUR_NAMES = {
    **dict.fromkeys(["loss", "lm_loss", "loss_step", "loss_step/train", "train/loss",
                     "train/crossentropyloss"], "loss/train"),
    **dict.fromkeys(["eval_loss", "eval/loss", "val/loss", "valid/loss", "loss_epoch/val"],
                    "loss/val"),
    **dict.fromkeys(["learning_rate", "train/lr", "train/learning_rate"], "lr"),
    **dict.fromkeys(["grad_norm", "gnorm", "train/grad_norm"], "grad/norm"),
    **dict.fromkeys(["tok/s", "tok/sec", "tokens/s", "tokens/sec", "tokens_per_sec",
                     "tokens_per_second"], "perf/tokens_per_sec")}
# A value whose unit names its metric, alone in a field: llm.c's `2517.44 ms | 208262 tok/s`
NAMED_BY_UNIT = verbose(rf"""\s*(?P<value>{NUMBER})\s*(?:
    (?P<iter_ms>ms) | (?P<mfu>%[ ]\w+[ ]MFU) | (?P<tokens_per_sec>tok/s) )\s*""")
# nanoGPT's evaluation of both splits. In other lines a train loss is that of the training itself.
EVALUATED = verbose(rf"step[ ]\d+:[ ]train[ ]loss[ ]{NUMBER},[ ]val[ ]loss[ ]{NUMBER}")
NOT_A_NAME = set("after at best by for from in is of on than to top was".split())  # "from 3"
SOURCE_FILE = re.compile(r"(?i)\.(?:py|c|cc|cpp|cu|h|rs|go|js)$")  # train.py:123 is a source line
WORD = r"""[^\W\d][\w./@'-]{0,100}"""
PAIR = verbose(rf"""\s* (?:[-+\d]\S*\s+)*                        # skip a time or a speed
    (?i:(?:and|with|at|info|debug|warning|warn|error)\s+)*
    (?P<name>{WORD}(?:\s{WORD}){{0,3}}) (?P<sign>\s*(?:[=-]>|[=:]+)\s*|\s+) (?P<value>{VALUE})""")
# Searched in the rest of a field, after its PAIRs, where other text may surround `loss: value` and
# `name=value`.
INSIDE_TEXT = verbose(rf"""
    (?i:(?<![\w/])(?P<known>(?:(?:train\w*|val\w*|test|eval\w*|average|avg|mean)\s)?
        (?:loss|acc|accuracy|perplexity|ppl)))\s*[:=]\s*(?P<known_value>{VALUE})
    | (?<![\w./@'-])(?P<name>{WORD})\s*=\s*(?P<value>{VALUE})""")
ROW = verbose(rf"""[|│] \s*(?P<name>{WORD}(?:\s{WORD}){{0,3}})\s*
    [|│] \s*(?P<value>{VALUE})\s* [|│]""")
# Delimiters: a line is split here into fields, in which `name value` may be alone.
FIELDS = verbose(r"""
    [|;\t(){}\[\]━╸╺•│]
    | ,(?!\d) | \.\s | \s[-–]\s
    | \s{2,}(?!\s|[-+.\d(\[=:]|nan|inf)    # two spaces, unless a padded number follows
    | :\s+(?!nan|inf)(?=[^\W\d])""")
# Values that are replaced by the number in them; a unit after a name is removed
SCALAR = verbose(rf"""
    \b(?:tensor|array|(?:np|numpy|jnp)\.\w+)\(\s*\[?\s*(?P<tensor>{NUMBER})\s*\]?\s*(?:,[^()]*)?\)
    | (?<=[=:])\s*\[+(?P<list>{NUMBER})\]+                                # lr=[1e-4]
    | \s*\(\w+(?:/\w+)?\)(?=\s*[:=])""")                                # time (ms): 12
OBJECT_START = re.compile(r"""\{\s*['"]|^['"][^'"]{1,100}['"]\s*:\s""")  # or a line with one member
MEMBER = verbose(r"""['"](?P<name>[^'"]{1,100})['"] \s*:\s* ['"]?(?P<value>[^'",{}]{1,60})""")
HEADER_COLUMNS = {"epoch", "step", "iter", "iteration", "class"}  # one of them makes a header
COLUMN = re.compile(r"[^\W\d][\w./@%()-]*(?: [\w./@%()-]+)*")
COLUMN_GAP = re.compile(r"\s{2,}|\t|\s*[,|│┃]\s*")
CELL_GAP = re.compile(r"\s*[,|│┃]\s*|\s+")
# tqdm's bar after the cells of a row
BAR_CUT = re.compile(r":?\s*(?<!\d)\d+%\|.*")


@dataclass
class ParsedLine:
    """The metrics of a line, {name: float}, and its position in the run, None if not printed."""
    metrics: dict
    epoch: float = None
    step: int = None
    steps: int = None       # total number of steps
    bar: bool = False       # a progress bar, which is printed repeatedly
    split: str = ""         # name of an evaluation's split
    ended: bool = True      # by a newline, so that no later text overwrites it


def flat(tree, prefix="", depth=3):
    """Yield (name, value as text) of a JSON object; join nested names with slashes."""
    for name, value in tree.items():
        if isinstance(value, dict) and depth:
            yield from flat(value, f"{prefix}{name}/", depth - 1)
        elif type(value) in (int, float, str):
            yield prefix + name, str(value)


def members(text):
    """Return [(name, value as text)] of a JSON object or a printed dict, which may be cut off."""
    try:
        return list(flat(json.loads(text)))
    except (ValueError, RecursionError, AttributeError):
        found = MEMBER.finditer(text[:MAX_OBJECT])
        # tensor(0.5, device=...) counts as 0.5
        return [(m["name"], re.sub(r"^[\w.]+\(|[)\s]+$", "", m["value"])) for m in found]


def pairs(field, has_position):
    """
    Return [(name, value as text)] of a field, the text between two delimiters. A pair with a sign,
    such as `name=value`, may be followed by other text. `name value` is returned only if the field
    has no other text, and the name either is a known metric, or has at most two words and the line
    has a step or epoch (has_position).
    """
    found, end = [], 0
    while match := PAIR.match(field, end):
        sign, name = match["sign"], match["name"]
        if "=" in sign and not KNOWN_METRIC.fullmatch(name):
            name = name.split()[-1]
        elif sign == ":" and " " in name and not KNOWN_METRIC.fullmatch(name):
            break  # such as "listening on localhost:8080"
        found.append((name, match["value"], bool(sign.strip())))
        end = match.end()
    unsigned = " ".join(name for name, _, has_sign in found if not has_sign)
    is_phrase = not NOT_A_NAME.isdisjoint(unsigned.lower().split())
    alone = not field[end:].strip(" \t.!:*") and not is_phrase
    values = []
    for name, value, has_sign in found:
        if has_sign or alone and (
                KNOWN_METRIC.fullmatch(name) or has_position and name.count(" ") < 2):
            values.append((name, value))
    rest = INSIDE_TEXT.finditer(field, end)
    return values + [(m["name"] or m["known"], m["value"] or m["known_value"]) for m in rest]


def named_by_unit(text):
    """Return [(name, value as text)] of the fields that hold only a value with a telling unit."""
    found = []
    for match in filter(None, map(NAMED_BY_UNIT.fullmatch, FIELDS.split(text))):
        name = match.lastgroup if match.lastgroup == "mfu" else f"perf/{match.lastgroup}"
        found.append((name, match["value"]))
    return found


def of_split(name, split):
    """Append the split to a name, as in loss/val, unless the name has a split already."""
    return name if "/" in name else f"{name}/{split}"


def with_our_names(metrics):
    """
    Return {name: value} with the names of train.py for the metrics that it logs too. If several
    metrics map to the same name, only the first gets it.
    """
    renamed = {}
    for name, value in metrics.items():
        ours = OUR_NAMES.get(name.lower(), name)
        if name == "loss/train" and "runtime/train" in metrics:
            ours = "loss/train_mean"  # of all steps, in the Trainer's last dict
        elif name == "norm" and "lr" in metrics:
            ours = "grad/norm"  # as in llm.c; without lr beside it, it may be another norm
        elif name == "mfu" and value == -100:
            continue  # nanoGPT and llm.c print -100 if it is unknown
        if ours != name and (ours in metrics or ours in renamed):
            ours = name
        renamed[ours] = value
    return renamed


class Parser:
    """Reads text in chunks; newlines, carriage returns and backspaces end a line."""

    def __init__(self, patterns=(), interval=1.0):
        """
        patterns: the user's regular expressions, whose named groups are metrics. interval: min
        seconds between rows of a progress bar. self.error is the last exception that a line raised.
        """
        self.patterns, self.interval = [re.compile(p) for p in patterns], interval
        self.text, self.pending, self.last, self.error = "", None, -math.inf, None
        self.columns, self.counter = [], IterCounter()

    def feed(self, text, end=False):
        """Return the rows of the lines that this text completes. end: no text follows."""
        rows = []
        pieces = re.split(r"(\n|\r\n?|\x08+)", text)  # line, its end, line, its end, ..., rest
        pieces[0] = (self.text + pieces[0])[:1 << 20]
        self.text = pieces.pop()
        lines = list(zip(pieces[::2], pieces[1::2]))
        if end:
            lines.append((self.text, "\n"))
            self.text = ""
        for line, stop in lines:
            try:
                rows += self.line(line, "\n" in stop)
            except Exception as e:  # go on with the next line
                self.error = e
        return rows

    def line(self, line, ended):
        """
        Return the rows of a line. A line that will be overwritten (not ended) becomes pending
        and returns no rows if less than `interval` seconds have passed since the last rows. The
        next line with metrics replaces it; if a newline ends a line without metrics before that,
        the rows of the pending line are returned.
        """
        found = self.read(ANSI.sub("", line).strip() if "\x1b" in line else line.strip(), ended)
        if not found:
            if not ended or not self.pending:
                return []
            found, self.pending = self.pending, None
            return self.counter.rows(found)
        if not ended and time.monotonic() - self.last < self.interval:
            self.pending = found
            return []
        self.pending, self.last = None, time.monotonic()
        return self.counter.rows(found)

    def read(self, line, ended):
        """
        Return a line as ParsedLine, or None if it has no metric. If a line without metrics has an
        epoch or step, the counter keeps that for the lines that follow.
        """
        line = line.replace("：", ":").replace("，", ", ")
        start = OBJECT_START.search(line)
        values, words = [], line
        if start:
            values, words = members(line[start.start():]), line[:start.start()]
        words = re.sub(r"\s{3,}", "  ", words[:MAX_LINE])  # long runs of spaces are slow to split
        if not start and not self.patterns and not NUMERIC.search(words):
            self.table(words)  # keeps the columns if this is a header
            return None
        found, rest = self.position(words)
        row = [] if start else self.table(words)
        values += row or self.words(rest, found.step is not None or found.epoch is not None)
        if values and found.step is not None and not found.bar:
            values += named_by_unit(rest)
        for pattern in self.patterns:
            for match in pattern.finditer(line[:MAX_LINE]):
                values += [(name, value) for name, value in match.groupdict().items() if value]
        self.assign(found, values)
        if EVALUATED.fullmatch(line):
            found.metrics["loss/train_eval"] = found.metrics.pop("loss/train")
        found.ended = ended
        if found.metrics:
            return found
        begins_epoch = EPOCH_LINE.match(words) and not EPOCH_NOTE.search(words)
        if found.epoch is not None and begins_epoch:
            self.counter.begin_epoch(found.epoch)
        if found.step is not None and not found.split:
            if start or STEP_LINE.match(words) or BAR_LINE.match(words):
                self.counter.announce(found)
        return None

    def words(self, text, has_position):
        """Return [(name, value as text)] of all fields; after `Val:` a loss is loss/val."""
        values, split = [], ""
        for field in FIELDS.split(text):
            if match := SPLIT.fullmatch(field):
                split = match.lastgroup
            for name, value in pairs(field, has_position):
                if split and SCORE.fullmatch(name) and "/" not in self.name(name):
                    name = of_split(name, split)
                values.append((name, value))
        return values

    def position(self, line):
        """Return (ParsedLine without metrics, the line without its epoch and step)."""
        found, rest = ParsedLine({}), SCALAR.sub(lambda m: m["tensor"] or m["list"] or "", line)
        lower = line.lower()
        if match := ("epoch" in lower or "train" in lower) and EPOCH.search(rest):
            found.epoch = epoch(match["epoch"])
            delimiter = " | " if match.start() else ""
            rest = rest[:match.start()] + delimiter + rest[match.end():]
        for expression, needed in STEP_PATTERNS:
            match = any(word in lower for word in needed) and expression.search(rest)
            step = whole(number(match["step"])) if match else None
            if step is not None and re.search(r"\.\d+$", match["step"]):  # 1.000 may be 1 or 1000
                step = None
            if step is None:
                continue
            found.step = step
            found.steps = whole(number(match.groupdict().get("steps") or ""))
            found.bar = expression in TQDM or expression in BARS
            # The text before the step, taken from the line: `rest` lacks the epoch.
            before = line[:line.find(match[0].strip(" [("))].rstrip()
            evaluated = EVALUATION.search(before)
            if evaluated and (found.bar or found.steps and evaluated.end() == len(before)):
                found.bar, found.split = True, evaluated["split"].lower()
            rest = f"{rest[:match.start()]} | {rest[match.end():]}"
            break
        return found, rest

    def table(self, line):
        """Return [(name, value as text)] of a row under a header; keep a header's columns."""
        if match := ROW.fullmatch(line.strip()):  # a table of two columns
            return [(match["name"], match["value"])]
        line = BAR_CUT.sub("", line).strip(" |│┃")
        cells = CELL_GAP.split(line)
        first = cells[0].partition("/")[0]  # 1/3: epoch 1 of 3
        if len(cells) == len(self.columns) and (number(first) is not None or first == "all"):
            row = zip(self.columns, [first, *cells[1:]])
            return [(name, value) for name, value in row if number(value) is not None]
        names = COLUMN_GAP.split(line)
        names = names if len(names) > 2 else line.split()
        named = len(names) > 2 and all(map(COLUMN.fullmatch, names))
        if named and not HEADER_COLUMNS.isdisjoint(name.lower() for name in names):
            # YOLO's `Class Images Box(P R mAP50)` has a column P
            self.columns = [name.removeprefix("Box(").rstrip(")") for name in names]
        return []

    def assign(self, found, values):
        """Assign the values of a line to the metrics, step and epoch of its ParsedLine."""
        for name, text in values:
            plain, value = name.lower().replace("_", " ").strip(), number(text)
            # ms-swift: 'global_step/max_steps': '10/500'
            if STEP_KEY.fullmatch(plain.removesuffix("/max steps")) or BATCH_KEY.fullmatch(plain):
                if found.step is None:
                    found.step = whole(number(text.partition("/")[0]))
            elif EPOCH_KEY.fullmatch(plain):
                found.epoch = epoch(text) if found.epoch is None else found.epoch
            elif plain in IGNORED or SOURCE_FILE.search(name):
                continue
            elif value is not None and name:
                found.metrics[self.name(name)[:100]] = value

    @staticmethod
    def name(text):
        """Return the name of a metric in a row, such as loss/val for `val loss` and `val_loss`."""
        text = text.strip().lower() if " " in text else text.strip()
        if text == "time":
            return "program/time"  # the `time` of a row is when it was logged
        name = text.replace(" ", "_")
        split, _, metric = name.partition("_")
        split = {"valid": "val", "validation": "val"}.get(split, split)
        if split in ("train", "val", "test") and metric[:1].isalpha():
            return f"{metric}/{split}"
        return name


class IterCounter:
    """
    Assigns an iter to each row. Iters never decrease. A line with other metrics of the same step
    gets the same iter. If steps restart, as in each epoch, iters continue from the last one.
    """

    def __init__(self):
        self.iter, self.row = 0, {}   # the last iter and all its metrics
        self.epoch = None             # last printed epoch
        self.last_step_iter = None    # iter of the last row with a step
        self.measured = False         # a line without a step had a known metric, such as a loss
        # The current series of steps, such as those of an epoch: its first and last step, its total
        # and its epoch, all as printed.
        self.first = self.step = self.steps = self.series_epoch = None
        self.offset = 0               # iter of the series' step 0
        self.bar_complete = False     # the series' bar has ended at its total
        self.epoch_began = False      # an epoch was printed since the last step
        self.announced = None         # ParsedLine of a step whose metrics may follow
        self.announced_steps = None   # total of the last announced step that was used

    def begin_epoch(self, epoch):
        """Keep the printed epoch for the rows that follow, as an int if it is whole."""
        self.epoch, self.epoch_began = int(epoch) if whole(epoch) is not None else epoch, True

    def announce(self, found):
        """
        Keep a line with only a step, such as the Trainer's bar before its dict of metrics. Ignore
        the bar of an evaluation: its total differs from that of the steps used so far or, if none
        were, from that of an unfinished bar.
        """
        bar = self.announced
        is_within = bar and bar.bar and bar.steps != found.steps and bar.step != bar.steps
        if self.announced_steps == found.steps or self.announced_steps is None and not is_within:
            self.announced = found

    def rows(self, found):
        """Return [row] of a line; [] for a repeated bar or an incomplete evaluation."""
        if found.epoch is not None:
            self.begin_epoch(found.epoch)
        if found.step is not None:
            self.announced = None
        elif self.announced:
            found.step, self.announced_steps = self.announced.step, self.announced.steps
            if found.step == self.step:
                self.series_epoch = self.epoch  # the same series, even if the epoch differs
        if found.step is None:
            found.metrics = with_our_names(found.metrics)
            return self.without_step(found)
        if found.bar and (found.split or self.evaluates(found)):
            return self.evaluation(found)
        found.metrics = with_our_names(found.metrics)
        if found.bar and found.step == 0 and not found.ended:
            return []  # a new bar still shows the metrics of the bar before it
        again = (found.step, self.epoch) == (self.step, self.series_epoch)
        if found.bar and again and not self.is_next_bar(found):
            self.bar_complete = found.ended and found.step == found.steps
            new = {}  # compared by repr, as nan != nan
            for name, value in found.metrics.items():
                if name not in self.row or found.ended and repr(value) != repr(self.row[name]):
                    new[name] = value
            return self.make_row(self.iter, new) if new else []
        if again:  # torchtune prints a step in its bar and in a line
            printed = {name: v for name, v in found.metrics.items() if self.row.get(name) == v}
            found.metrics = {k: v for k, v in found.metrics.items() if k not in printed}
            if not found.metrics:
                return []
        self.advance(found)
        rows = self.make_row(self.free_iter(self.offset + found.step, found.metrics), found.metrics)
        self.last_step_iter = self.iter
        return rows

    def advance(self, found):
        """Make this the current step; begin a new series if the steps restart."""
        starts_again = False
        if self.step is not None and found.step <= self.step:
            from_first = found.step < self.step and found.step <= self.first
            starts_again = from_first or self.epoch != self.series_epoch or self.is_next_bar(found)
        if starts_again:
            # If epochs are printed, a series is as long as its total, even if its last steps were
            # not printed.
            in_epochs = self.steps and self.series_epoch is not None
            length = max(self.step, self.steps) if in_epochs else self.step
            self.offset = max(self.offset + length, self.last_step_iter)
        if starts_again or self.step is None:
            self.first = found.step
            if found.bar and found.steps and whole(self.epoch):  # the log may begin at epoch 3
                self.offset = max(self.offset, min((self.epoch - 1) * found.steps, MAX_STEP))
        self.step, self.steps, self.series_epoch = found.step, found.steps, self.epoch
        self.bar_complete = found.bar and found.ended and found.step == found.steps
        self.epoch_began = False

    def is_next_bar(self, found):
        """Return whether a bar follows a complete one and prints no epoch."""
        return found.bar and self.bar_complete and found.epoch is None

    def evaluates(self, found):
        """
        Return whether a bar is an evaluation's, such as that of Keras' evaluate(): it follows a
        complete bar of the training without a new epoch, and its total differs or epochs are used.
        """
        differs = found.steps != self.steps or self.epoch is not None
        return differs and self.is_next_bar(found) and not self.epoch_began

    def evaluation(self, found):
        """Return the row of an evaluation's bar at its end, with the iter of the training."""
        if not found.ended or found.step != found.steps:
            return []
        metrics = {of_split(name, found.split or "eval"): v for name, v in found.metrics.items()}
        metrics = with_our_names(metrics)
        return self.make_row(self.free_iter(self.iter, metrics), metrics)

    def without_step(self, found):
        """
        Return [row] of a line without a step. Its iter is after that of the last row with a step;
        if no row had a step, iters number these lines.
        """
        if self.last_step_iter is not None:
            at = self.free_iter(self.last_step_iter + 1, found.metrics)
            return self.make_row(at, found.metrics)
        parts = [part for name in found.metrics for part in name.split("/")]
        known, measured = any(map(KNOWN_METRIC.fullmatch, parts)), self.measured
        self.measured = measured or known
        if self.epoch is None and not (known and measured):
            # Settings and the first known metrics, such as those of step 0, share an iter. Each
            # later line with a known metric gets the next.
            return self.make_row(self.free_iter(self.iter, found.metrics), found.metrics)
        return self.make_row(self.iter + 1, found.metrics)

    def free_iter(self, at, metrics):
        """Return the first iter from `at` on that has none of these metrics yet."""
        at = max(at, self.iter)
        return at + 1 if at == self.iter and self.row.keys() & metrics.keys() else at

    def make_row(self, at, metrics):
        """Return [row] with the metrics at iter `at`; make this the last iter."""
        self.row = self.row | metrics if at == self.iter else metrics
        self.iter = at
        return [{"iter": at} | ({} if self.epoch is None else {"epoch": self.epoch}) | metrics]
