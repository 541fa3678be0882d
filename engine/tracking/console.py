"""
Metrics in what programs print: a Parser reads lines and returns rows. doc/tracking.md lists the
formats.

A line has metrics as `name=value`, as `name: value`, as a dict or JSON object, as a row under a
header of columns, or as `name value` where nothing else is between two delimiters.
"""
import json
import math
import re
import time
from dataclasses import dataclass

MAX_LINE = 10_000  # max characters that are read of a line
MAX_OBJECT = 100_000  # max characters of a printed dict that are read
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
    """Return a number as a float: 31500.0 for "31.5k", 12.3 for "12.3%" and "12.3ms"; else None."""
    match = SCALED.fullmatch(text.strip())
    if not match:
        return None
    return float(match[1].replace(",", "").replace("_", "")) * SCALES.get(match[2], 1)


def whole(value):
    """Return a float as an int; None for nan and negative, fractional or too large numbers."""
    if value is None or not 0 <= value < MAX_STEP or value != int(value):
        return None
    return int(value)


def epoch(text):
    """Return a printed epoch, such as 0.25, as a float, or None if it can't be an epoch."""
    value = number(text)
    return value if value is not None and 0 <= value < MAX_STEP else None


# ---- the epoch and step of a line ----------------------------------------------------------------

ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
TOTAL = rf"""\s*(?:/|\bof\b)\s*(?P<steps>{NUMBER}[kMGT]?)"""
STEP_END = r"""(?![\w%/]|[.,]\d)"""
NOT_A_POSITION = "".join(f"(?<!{word}[ ])" for word in "best last max total num per warmup".split())
EPOCH = verbose(rf"""
    (?: (?i:(?<![\w/-]) {NOT_A_POSITION} (?<!number[ ]of[ ])
            (?:train(?:ing)?[ ])? epoch (?:\(\w+\))? \s*[:=\#]?\s*)      # Epoch(train) [1]
    | (?i:^\W*train(?:ing)?:[ ]) (?=\d+[ ]*\[) )                         # Train: 0 [
    \[?\s* (?P<epoch>{NUMBER}) (?:\s*(?:/|\bof\b)\s*\d+)? \]? {STEP_END}""")
EPOCH_LINE = verbose(r"""(?i: ^(?:\W|\d|\b(?:info|root)\b)*
    (?:(?:start|begin|train|runn)\w*\W+)? epoch\b )""")
STEP_NAME = r"""(?:
    (?:(?:global|train(?:ing)?|optimizer|current)[ _-]?)? (?:step|iter(?:ation)?)
    | (?:global[ _]?)? (?:step|iter(?:ation)?)s
    | episode | round | it(?=\s*[:=]|$) )"""
STEP = verbose(rf"""
    (?i:(?<![\w/-]) {NOT_A_POSITION} (?<![ ]of[ ]) {STEP_NAME}) \s*[:=\#]?\s*[\[(]?\s*
    (?P<step>{NUMBER}[kM]?) (?:{TOTAL})? {STEP_END}(?!:\d)""")
BATCH_NAME = r"""(?:mini-?)?(?:batch|update)(?:[ _]idx)?"""
STEP_LINE = verbose(rf"(?i: ^\W* (?:\w+\W+)? (?:{STEP_NAME}|{BATCH_NAME}) \b )")
BATCH = verbose(rf"""
    (?i:(?<![\w/-]) {BATCH_NAME}) \s*[:=\#]?\s*[\[(]?\s*
    (?P<step>{NUMBER}) (?:{TOTAL})? {STEP_END}(?!:\d)""")
TQDM = [verbose(bar) for bar in (
    rf"""(?:(?<![\d.])\d+(?:\.\d+)?%\s*)? \|[^|]*\| \s*
         (?P<step>{NUMBER}[kMGT]?)/(?:\?|(?P<steps>{NUMBER}[kMGT]?)) \s*(?=\[)""",
    r"""(?<![\w.])(?P<step>\d+)it\s(?=\[)""")]                                   # without a total
BARS = [verbose(bar) for bar in (
    r"""(?<![\w/.])(?P<step>\d+)/(?P<steps>\d+)[ ]?\[[=>.\s\#-]*\]""",              # Keras 2
    r"""\[\s*(?P<step>\d+)\s*/\s*(?P<steps>\d+)(?![\w/.])""",                      # [  10/5005]
    r"""^\W*(?P<step>\d+)\s*/\s*(?P<steps>\d+)(?![\w/.])""")]                       # Keras 3, Rich
# llama2.c, XGBoost
LEADING_STEP = verbose(r"""^\[?(?P<step>\d+)(?:[\]:]\s+|\s*\|\s*)(?=[^\W\d])""")
# [(pattern, strings of which a line in lower case must have one)]; the first match counts.
STEP_PATTERNS = [
    *((bar, ("/", "it ")) for bar in TQDM), (STEP, ("step", "it", "episode", "round")),
    *((bar, ("/",)) for bar in BARS), (BATCH, ("batch", "update")), (LEADING_STEP, ("]", ":", "|"))]
EVALUATION = verbose(r"""(?i:(?<![\w/=-])
    (?P<split>val|eval|test|predict|sanity)(?:id\w*|uat\w*|ing|ion)? (?![\w/=-]))""")

# ---- metrics ------------------------------------------------------------------------------------

STEPS, BATCHES = verbose(STEP_NAME), verbose(BATCH_NAME)
EPOCHS = verbose(r"(?:(?:train|training|end[ ]of|finished|completed|val|validation|eval)[ ])?epoch")
SCORE = verbose(r"(?i: (?:.*[\W_])?(?:loss|acc|accuracy|perplexity|ppl|bpb|error|f1)(?:@\d+)? )")
KNOWN_METRIC = verbose(SCORE.pattern, r" | (?i: (?:.*[\W_])?(?:learning[ ]rate|lr|mfu) )")
SPLIT = verbose(r"""(?i: \W*(?:(?P<train>train(?:ing)?)|(?P<val>val(?:id(?:ation)?)?)
    |(?P<test>test(?:ing)?)|(?P<eval>eval(?:uation)?))(?:[ ]set)?\W* )""")
IGNORED = {"eta", "v num", "rank"}
NOT_A_NAME = set("after at best by for from in is of on than to top was".split())  # "from 3"
SOURCE_FILE = re.compile(r"(?i)\.(?:py|c|cc|cpp|cu|h|rs|go|js)$")  # train.py:123 is a source line
WORD = r"""[^\W\d][\w./@'-]{0,100}"""
PAIR = verbose(rf"""\s* (?:[-+\d]\S*\s+)*                              # a time, a speed
    (?i:(?:and|with|at|info|debug|warning|warn|error)\s+)*
    (?P<name>{WORD}(?:\s{WORD}){{0,3}}) (?P<sign>\s*(?:[=-]>|[=:]+)\s*|\s+) (?P<value>{VALUE})""")
INSIDE_TEXT = verbose(rf"""
    (?i:(?<![\w/])(?P<known>(?:(?:train\w*|val\w*|test|eval\w*|average|avg|mean)\s)?
        (?:loss|acc|accuracy|perplexity|ppl)))\s*[:=]\s*(?P<known_value>{VALUE})
    | (?<![\w./@'-])(?P<name>{WORD})\s*=\s*(?P<value>{VALUE})""")
ROW = verbose(rf"""[|│] \s*(?P<name>{WORD}(?:\s{WORD}){{0,3}})\s*
    [|│] \s*(?P<value>{VALUE})\s* [|│]""")
FIELDS = verbose(r"""
    [|;\t(){}\[\]━╸╺•│]
    | ,(?!\d) | \.\s | \s[-–]\s
    | \s{2,}(?!\s|[-+.\d(\[=:]|nan|inf)    # two spaces, unless a padded number follows
    | :\s+(?!nan|inf)(?=[^\W\d])""")
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
BAR_CUT = re.compile(r":?\s*(?<!\d)\d+%\|.*")


@dataclass
class ParsedLine:
    """The metrics of a line, {name: float}, and its position in the run; None: it does not say."""
    metrics: dict
    epoch: float = None
    step: int = None
    steps: int = None       # total
    bar: bool = False       # a progress bar, which is printed repeatedly
    split: str = ""         # name of an evaluation's split
    ended: bool = True      # by a newline: no later text overwrites the line


def flat(tree, prefix="", depth=3):
    """Yield (name, text of a value) of a JSON object; join nested names by slashes."""
    for name, value in tree.items():
        if isinstance(value, dict) and depth:
            yield from flat(value, f"{prefix}{name}/", depth - 1)
        elif type(value) in (int, float, str):
            yield prefix + name, str(value)


def members(text):
    """Return [(name, text of a value)] of a JSON object or a printed dict, which may be cut off."""
    try:
        return list(flat(json.loads(text)))
    except (ValueError, RecursionError, AttributeError):
        found = MEMBER.finditer(text[:MAX_OBJECT])
        return [(m["name"], re.sub(r"^[\w.]+\(|[)\s]+$", "", m["value"])) for m in found]


def pairs(field, has_position):
    """
    Return [(name, text of a value)] of the text between two delimiters. `name value` counts if the
    field has nothing else; an unknown name also needs a line with a step or epoch (has_position).
    """
    found, at = [], 0
    while match := PAIR.match(field, at):
        sign, name = match["sign"], match["name"]
        if "=" in sign and not KNOWN_METRIC.fullmatch(name):
            name = name.split()[-1]
        elif sign == ":" and " " in name and not KNOWN_METRIC.fullmatch(name):
            break  # such as "listening on localhost:8080"
        found.append((name, match["value"], bool(sign.strip())))
        at = match.end()
    unsigned = [name for name, _, sign in found if not sign]
    phrase = any(word in NOT_A_NAME for name in unsigned for word in name.lower().split())
    alone = not field[at:].strip(" \t.!:*") and not phrase
    values = []
    for name, value, sign in found:
        if sign or alone and (KNOWN_METRIC.fullmatch(name) or has_position and name.count(" ") < 2):
            values.append((name, value))
    rest = INSIDE_TEXT.finditer(field, at)
    return values + [(m["name"] or m["known"], m["value"] or m["known_value"]) for m in rest]


def of_split(name, split):
    """Return loss/val for loss; keep a name that has a split already."""
    return name if "/" in name else f"{name}/{split}"


class Parser:
    """Reads text piece by piece; newlines, carriage returns and backspaces end a line."""

    def __init__(self, patterns=(), interval=1.0):
        """
        patterns: regular expressions with named groups; interval: seconds between rows of one
        progress bar. The attribute `error` is the last exception that a line raised.
        """
        self.patterns, self.interval = [re.compile(p) for p in patterns], interval
        self.text, self.pending, self.last, self.error = "", None, -math.inf, None
        self.columns, self.counter = [], IterCounter()

    def feed(self, text, end=False):
        """Return the rows of the lines that this text completes. end: no text follows."""
        rows = []
        pieces = re.split(r"(\n|\r\n?|\x08+)", text)
        *lines, self.text = [(self.text + pieces[0])[:1 << 20], *pieces[1:]]
        lines = list(zip(lines[::2], lines[1::2]))
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
        """Return the rows of a line; one that is overwritten counts every `interval` seconds."""
        found = self.read(ANSI.sub("", line).strip() if "\x1b" in line else line.strip(), ended)
        if not found:
            waiting = self.pending if ended else None
            self.pending = None if ended else self.pending
            return self.counter.rows(waiting) if waiting else []
        if not ended and time.monotonic() - self.last < self.interval:
            self.pending = found
            return []
        self.pending, self.last = None, time.monotonic()
        return self.counter.rows(found)

    def read(self, line, ended):
        """Return a line as ParsedLine, or None if it has no metric; note its position then."""
        line = line.replace("：", ":").replace("，", ", ")
        start = OBJECT_START.search(line)
        values, words = [], line
        if start:
            values, words = members(line[start.start():]), line[:start.start()]
        words = re.sub(r"\s{3,}", "  ", words[:MAX_LINE])  # long runs of spaces are slow to split
        if not start and not self.patterns and not NUMERIC.search(words):
            self.table(words)
            return None
        found, rest = self.position(words)
        row = [] if start else self.table(words)
        values += row or self.words(rest, found.step is not None or found.epoch is not None)
        for pattern in self.patterns:
            for match in pattern.finditer(line[:MAX_LINE]):
                values += [(name, value) for name, value in match.groupdict().items() if value]
        self.sort(found, values)
        found.ended = ended
        if found.metrics:
            return found
        if found.epoch is not None and EPOCH_LINE.match(words):
            self.counter.begin_epoch(found.epoch)
        if found.step is not None and not found.split:
            if start or STEP_LINE.match(words) or re.match(r"\d+%\|", words):
                self.counter.announce(found)
        return None

    def words(self, text, has_position):
        """Return [(name, text of a value)] of all fields; after `Val:` a loss is loss/val."""
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
            rest = rest[:match.start()] + " | " * bool(match.start()) + rest[match.end():]
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
            before = line[:line.find(match[0].strip(" [("))].rstrip()
            evaluated = EVALUATION.search(before)
            if evaluated and (found.bar or found.steps and evaluated.end() == len(before)):
                found.bar, found.split = True, evaluated["split"].lower()
            rest = f"{rest[:match.start()]} | {rest[match.end():]}"
            break
        return found, rest

    def table(self, line):
        """Return [(name, text of a value)] of a row under a header; remember a header."""
        if match := ROW.fullmatch(line.strip()):  # a table of two columns
            return [(match["name"], match["value"])]
        line = BAR_CUT.sub("", line).strip(" |│┃")
        cells = CELL_GAP.split(line)
        at = cells[0].partition("/")[0]  # 1/3: epoch 1 of 3
        if len(cells) == len(self.columns) and (number(at) is not None or at == "all"):
            row = zip(self.columns, [at, *cells[1:]])
            return [(name, value) for name, value in row if number(value) is not None]
        names = COLUMN_GAP.split(line)
        names = names if len(names) > 2 else line.split()
        named = len(names) > 2 and all(map(COLUMN.fullmatch, names))
        if named and not HEADER_COLUMNS.isdisjoint(name.lower() for name in names):
            # YOLO's `Class Images Box(P R mAP50)` has a column P
            self.columns = [name.removeprefix("Box(").rstrip(")") for name in names]
        return []

    def sort(self, found, values):
        """Sort the values of a line into metrics, step and epoch."""
        for name, text in values:
            plain, value = name.lower().replace("_", " ").strip(), number(text)
            if STEPS.fullmatch(plain.removesuffix("/max steps")) or BATCHES.fullmatch(plain):
                if found.step is None:  # ms-swift: 'global_step/max_steps': '10/500'
                    found.step = whole(number(text.partition("/")[0]))
            elif EPOCHS.fullmatch(plain):
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
        if split in ("train", "val", "valid", "test") and metric[:1].isalpha():
            return f"{metric}/{split}"
        return name


class IterCounter:
    """
    Assigns an iter to each row. Iters rise; a line with other metrics of the same step gets the
    same iter. Steps that start again, as in each epoch, continue from the last iter.
    """

    def __init__(self):
        self.iter, self.row = 0, {}   # of the last row; row: all metrics of this iter
        self.epoch = None
        self.last_step_iter = None    # iter of the last row with a step
        self.measured = False         # a loss or an accuracy was printed
        # The current series of steps, as printed, such as those of an epoch:
        self.first = self.step = self.steps = self.series_epoch = None
        self.offset = 0               # iter of the series' step 0
        self.bar_complete = False     # the series' bar has reached its total ...
        self.epoch_began = False      # ... and a new epoch was printed since
        self.announced = None         # the last line with a step and without metrics ...
        self.announced_steps = None   # ... and the total of steps of those that counted

    def begin_epoch(self, epoch):
        """Note the epoch that a line has."""
        self.epoch, self.epoch_began = int(epoch) if whole(epoch) is not None else epoch, True

    def announce(self, found):
        """Note a line with only a step, such as the Trainer's bar before its dict of metrics."""
        if self.announced_steps in (None, found.steps):  # an evaluation's bar has another total
            self.announced = found

    def rows(self, found):
        """Return [row] of a line; [] if it repeats a bar or is within an evaluation."""
        if found.epoch is not None:
            self.begin_epoch(found.epoch)
        if found.step is not None:
            self.announced = None
        elif self.announced:
            found.step, self.announced_steps = self.announced.step, self.announced.steps
        if found.step is None:
            return self.without_step(found)
        if found.bar and (found.split or self.evaluates(found)):
            return self.evaluation(found)
        if found.bar and found.step == 0 and not found.ended:
            return []  # the metrics are still those of the last bar
        again = (found.step, self.epoch) == (self.step, self.series_epoch)
        if found.bar and again and not self.is_next_bar(found):
            self.bar_complete = found.ended and found.step == found.steps
            new = {name: value for name, value in found.metrics.items() if name not in self.row
                   or found.ended and repr(value) != repr(self.row[name])}
            return self.write(self.iter, new) if new else []
        self.advance(found)
        rows = self.write(self.free_iter(self.offset + found.step, found.metrics), found.metrics)
        self.last_step_iter = self.iter
        return rows

    def advance(self, found):
        """Note the step; begin a new series if the steps start again."""
        anew = False
        if self.step is not None and found.step <= self.step:
            from_first = found.step < self.step and found.step <= self.first
            anew = from_first or self.epoch != self.series_epoch or self.is_next_bar(found)
        if anew:
            in_epochs = self.steps and self.series_epoch is not None
            length = max(self.step, self.steps) if in_epochs else self.step
            self.offset = max(self.offset + length, self.last_step_iter)
        if anew or self.step is None:
            self.first = found.step
            if found.bar and found.steps and whole(self.epoch):
                self.offset = max(self.offset, min((self.epoch - 1) * found.steps, MAX_STEP))
        self.step, self.steps, self.series_epoch = found.step, found.steps, self.epoch
        self.bar_complete = found.bar and found.ended and found.step == found.steps
        self.epoch_began = False

    def is_next_bar(self, found):
        """Return whether a bar comes after a complete one, in the same epoch."""
        return found.bar and self.bar_complete and found.epoch is None

    def evaluates(self, found):
        """Return whether a bar after the training's is an evaluation, as of Keras' evaluate()."""
        other = found.steps != self.steps or self.epoch is not None
        return other and self.is_next_bar(found) and not self.epoch_began

    def evaluation(self, found):
        """Return the row of an evaluation's bar at its end, with the iter of the training."""
        if not found.ended or found.step != found.steps:
            return []
        metrics = {of_split(name, found.split or "eval"): v for name, v in found.metrics.items()}
        return self.write(self.free_iter(self.iter, metrics), metrics)

    def without_step(self, found):
        """Return [row] of a line without a step: after the last step, or the next of a count."""
        if self.last_step_iter is not None:
            return self.write(self.free_iter(self.last_step_iter + 1, found.metrics), found.metrics)
        parts = [part for name in found.metrics for part in name.split("/")]
        known, measured = any(map(KNOWN_METRIC.fullmatch, parts)), self.measured
        self.measured = measured or known
        if self.epoch is None and not (known and measured):
            # settings, or the first metrics: those of step 0 may follow
            return self.write(self.free_iter(self.iter, found.metrics), found.metrics)
        return self.write(self.iter + 1, found.metrics)

    def free_iter(self, at, metrics):
        """Return the first iter from `at` on that doesn't have these metrics yet."""
        at = max(at, self.iter)
        return at + 1 if at == self.iter and self.row.keys() & metrics.keys() else at

    def write(self, at, metrics):
        self.row = self.row | metrics if at == self.iter else metrics
        self.iter = at
        return [{"iter": at} | ({} if self.epoch is None else {"epoch": self.epoch}) | metrics]
