"""
Try a change of the program: is its gain larger than the noise of the seeds?

    python experiment.py "a larger rate for the embedding"          the working tree against HEAD
    python experiment.py "the same" --minutes=2 -- --data=my.txt    flags of train.py after --
    python experiment.py                                            the experiments so far

The same training, --minutes or --steps long, runs alternately with the base commit and with the
working tree, once per seed. Each run's best model is scored in bits per byte of the base's
validation text, by the base's code (engine/training/score.py). The change is kept if the difference
is larger than the seeds' noise (engine/verdict.py). A line of JSON in the ledger records what was
tried and the outcome: commit, diff, results, "keep", "discard", "unclear", "failed" or
"interrupted".

The change runs from a copy: the working tree and git's index stay as they are, and what you edit
meanwhile belongs to the next experiment. The text, the time and the settings after -- are the
base's: a change of their defaults has no effect here. Exit code: 0 if there is a verdict, 1 if the
change failed, 130 after Ctrl-C.
"""
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from json import dumps
from pathlib import Path

from configurator import configure, fail, needs_posix, options, source_knobs
from engine.advice import advice
from engine.files import to_disk
from engine.programs import run_program
from engine.streams import one_line, outlast, pad, width
from engine.system import IS_WINDOWS, lock
from engine.tracking.redact import HIDDEN, redact
from engine.untrusted import MAX_JSON, parse_json, read_json, reason
from engine.verdict import judge, sentence

base = "HEAD"       # commit to compare with
minutes = 1.0       # training time of each run
steps = 0           # number of training steps of each run instead of a time, as on a machine that
                    # other programs use, too; 0: by time
seeds = 3           # number of runs of the base, and of the change
seed = 1337         # first of the seeds
ledger = "experiments.jsonl"  # file that gets a line for each experiment
out_dir = "out/experiments"   # folder of the runs: N/base/seedS and N/change/seedS of experiment N
cache = "cache"     # folder of prepared data, and of copies of the program
json = False        # print the new line of the ledger as the last line

ROOT = Path(__file__).resolve().parent
# Settings of train.py that the experiment itself sets for its runs.
OURS = {"out_dir", "cache", "seed", "seeds", "minutes", "max_minutes", "max_iters", "json",
        "eval_only", "supervise", "dry_run", "overfit", "lr_find", "profile"}
OWN_FLAGS = {"seed": "seed", "seeds": "seeds", "minutes": "minutes", "max_minutes": "minutes",
             "max_iters": "steps"}  # the options of experiment.py to use instead
FIXED = ("data", "val_fraction", "column", "max_text_bytes")  # the change gets the base's values
NO_LIMIT = 10 ** 9  # steps; the time limit ends the runs
# Entries of meta.json that must be equal for both prepared texts, even if vocabularies differ.
SAME_TEXT = ("train_bytes", "val_bytes", "train_documents", "val_documents")
SLOWER = 1.1, 10    # a run may take this many times the base's time, plus this many seconds
SLOWER_STEPS = 10, 60  # the same for runs with --steps
BUSY = 1.2          # the machine was busy if the steps of a side's runs differ by this factor
WORTH_A_NOTE = 0.01  # min difference in steps to report, as a fraction of the base's
MAX_DIFF = 200_000  # max characters of a diff in the ledger
MAX_FILE = 1 << 20  # max bytes of an untracked file to include; a larger one may be data


class Failed(Exception):
    """A run has failed or can't be compared; the message gives the reason."""


class Interrupted(Exception):
    """A signal asked to stop. Its argument is the signal's number."""


# ---- git -----------------------------------------------------------------------------------------

def git(*words, folder=ROOT, **environment):
    """Return what a git command prints, as text. Ends the program if it fails."""
    done = try_git(*words, folder=folder, **environment)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        fail(f"git {words[0]}: {said[-1]}")
    return done.stdout.decode(errors="surrogateescape").strip("\n")


def try_git(*words, folder=ROOT, **environment):
    """Run a git command without hooks or a refresh of the index. Return the CompletedProcess."""
    command = ["git", "-c", "core.hooksPath=/dev/null", "-C", str(folder), *words]
    variables = {"GIT_OPTIONAL_LOCKS": "0"} | environment
    try:
        return subprocess.run(command, env=os.environ | variables, capture_output=True)
    except OSError as e:
        fail(f"git cannot be started ({e.strerror}); experiment.py compares commits of git")


def commit_of(name):
    """Return the full hash of a commit. Ends the program if there is no such commit."""
    if try_git("rev-parse", "--git-dir").returncode:
        fail(f"{ROOT} is not in a repository of git; expected one with a commit to compare with")
    found = try_git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if found.returncode:
        fail(f"--base={name}: no such commit")
    return found.stdout.decode().strip()


def snapshot(message):
    """
    Return a commit of the working tree as it is now, on top of HEAD: tracked files, and untracked
    ones that git does not ignore, up to MAX_FILE. It is on no branch, and the index stays as it is.
    """
    ledger_path = os.path.relpath(Path(ledger).absolute(), ROOT)
    is_inside = not ledger_path.startswith("../")
    untracked = git("ls-files", "-z", "--others", "--exclude-standard").split("\0")
    names = [name for name in untracked if name and name != ledger_path]
    small = [name for name in names if os.lstat(ROOT / name).st_size <= MAX_FILE]
    for name in set(names) - set(small):
        print(f"note: {name} is larger than {MAX_FILE >> 20} MiB and not in git: it is left out")
    who = {f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER")
           for what, value in (("NAME", "experiment.py"), ("EMAIL", "experiment@localhost"))}
    with tempfile.TemporaryDirectory() as folder:
        own = Path(ROOT, git("rev-parse", "--git-path", "index"))
        # copy2 keeps the time of writing, by which git finds files that were edited just after it.
        index = {"GIT_INDEX_FILE": shutil.copy2(own, folder)}
        excluded = [f":(exclude){ledger_path}"] if is_inside else []
        git("add", "--update", "--", ".", *excluded, **index)
        if small:
            git("--literal-pathspecs", "add", "--", *small, **index)
        tree = git("write-tree", **index)
    return git("commit-tree", tree, "-p", "HEAD", "-m", message, **who)


def add_copy(commit, folder):
    """
    Check a commit out as a git worktree at `folder`, unless it is already there, and return the
    folder of the program in it.
    """
    head = try_git("rev-parse", "HEAD", folder=folder) if folder.is_dir() else None
    is_there = head and head.stdout.decode().strip() == commit
    if is_there and git("rev-parse", "--show-toplevel", folder=folder) == str(folder.resolve()):
        if not git("status", "--porcelain", folder=folder):
            return folder / git("rev-parse", "--show-prefix")
    remove_copy(folder)
    git("worktree", "add", "--detach", "--force", str(folder), commit)
    return folder / git("rev-parse", "--show-prefix")


def remove_copy(folder):
    """Remove a worktree that add_copy made. A folder that is not a worktree of git is kept."""
    if folder.is_dir():
        try_git("worktree", "remove", "--force", "--force", str(folder))


# ---- the runs ------------------------------------------------------------------------------------

class Side:
    """
    One of the two programs that are compared. name: "base" or "change"; program: its folder; words:
    its flags for train.py; cache: its folder of prepared data; results: {seed: bits per byte};
    wall: seconds that its runs took; config: config.json of its latest run; steps: numbers of steps
    of its runs.
    """

    def __init__(self, name, program, words, folder, cache_folder):
        self.name, self.program, self.words = name, program, words
        self.folder, self.cache = folder, cache_folder
        self.results, self.wall, self.steps, self.config = {}, [], [], {}

    def call(self, words, output, limit=None):
        """
        Run Python with these words, its output going to the file `output`, and wait for its end.
        Raises Failed with the last line of output if it fails, Interrupted after a signal.
        """
        with open(output, "wb") as f:
            code, signals = run_program([sys.executable, *map(str, words)], None, limit, f)
        if signals:
            raise Interrupted(signals[0])
        if code:
            lines = Path(output).read_text(errors="replace").strip().splitlines() or ["no message"]
            raise Failed(f"the {self.name} ended with code {code}: {one_line(lines[-1][-500:])}")

    def train(self, number, more, limit):
        """
        Train with the seed `number` and the flags `more` in addition to self.words. limit: max
        seconds, or None. Raises Failed, Interrupted.
        """
        run, begin = self.folder / f"seed{number}", time.monotonic()
        length = [f"--max_minutes={minutes}", f"--max_iters={NO_LIMIT}"]
        if steps:
            length = ["--max_minutes=0", f"--max_iters={steps}"]
        command = [self.program / "train.py", *self.words, "--minutes=0", *length, *more,
                   f"--seed={number}", f"--out_dir={run}", f"--cache={self.cache}"]
        try:
            self.call(command, run.with_suffix(".txt"), limit)
        except Failed as e:
            if limit and time.monotonic() - begin >= limit:
                raise Failed(self.too_slow(limit)) from e
            raise
        took = time.monotonic() - begin
        if limit and took >= limit:  # SIGTERM stopped it, and it then saved and exited with code 0
            raise Failed(self.too_slow(limit))
        self.wall.append(took)
        self.config = read_json(run / "config.json", MAX_JSON, {})
        self.steps.append(read_json(run / "result.json", MAX_JSON, {}).get("iter", 0))
        if not isinstance(self.config.get("dataset"), dict):
            raise Failed(f"the {self.name} left no config.json with its data in {run}")

    def too_slow(self, limit):
        return (f"the {self.name} takes too long: it was stopped after {limit:.0f} s, "
                f"and the base takes {(limit - slower()[1]) / slower()[0]:.0f} s")

    def score(self, number, scorer, texts):
        """Score the run of a seed with the base's code. Raises Failed, Interrupted."""
        run, output = self.folder / f"seed{number}", self.folder / f"seed{number}.score.txt"
        self.call([scorer, self.program, "model", run, texts], output)
        found = parse_json(output.read_bytes().splitlines()[-1])
        self.results[number] = found["bpb"]
        return found


def flags_for(program, flags):
    """
    Return flags in which each preset of this folder is replaced by the program's own copy, if it
    has one: presets are part of the change.
    """
    words = []
    for word in flags:
        path = Path(word).absolute()
        is_preset = word.endswith((".py", ".yaml", ".yml", ".json")) and path.is_relative_to(ROOT)
        own = program / path.relative_to(ROOT) if is_preset else path
        words.append(str(own) if is_preset and own.exists() else word)
    return words


def check_flags(flags, program):
    """Exit if train.py does not have a flag, or if the experiment itself sets it."""
    known = source_knobs(program / "train.py")
    for word, key, _ in options(flags, {name: value for name, (value, *_) in known.items()}):
        if key is not None and key not in known:
            fail(f"{word}: train.py has no setting {key!r}; {advice(key, known)}")
        if key in OURS:
            own = f"; give --{OWN_FLAGS[key]}=N before the --" if key in OWN_FLAGS else ""
            fail(f"{word}: an experiment itself sets {key} of its runs{own}")


def link_cache(source, target):
    """
    Make a cache with links to the data prepared in `source`, so that a change writes elsewhere.
    """
    target.mkdir(parents=True)
    for path in source.iterdir():
        if not path.name.startswith(".") and not path.name.endswith(".partial"):
            if path.name != "experiments":
                (target / path.name).symlink_to(path.absolute())


def slower():
    """Return (factor, seconds) by which a run of the change may take longer than the base's."""
    return SLOWER_STEPS if steps else SLOWER


def compare_runs(base_side, change_side, folder):
    """Train and score both sides once per seed, in turns. Raises Failed, Interrupted."""
    scorer = base_side.program / "engine/training/score.py"
    if not scorer.exists():
        raise Failed("the base has no engine/training/score.py; name a later commit with --base")
    texts, lost = folder / "texts.jsonl", {}
    for number in range(seed, seed + seeds):
        # The sides take turns to begin, so that a machine that becomes slower or faster meanwhile
        # favors neither. The base begins first, since the change uses its prepared data.
        sides = [base_side, change_side] if (number - seed) % 2 == 0 else [change_side, base_side]
        for side in sides:
            fixed, limit = [], None
            if side is change_side:
                fixed = [f"--{name}={base_side.config[name]}" for name in FIXED
                         if HIDDEN not in str(base_side.config[name])]
                limit = slower()[0] * max(base_side.wall) + slower()[1]
                if not side.cache.exists():
                    link_cache(base_side.cache, side.cache)
            side.train(number, fixed, limit)
            if side is change_side:
                refuse_other_text(base_side.config["dataset"], side.config["dataset"])
            if not texts.exists():
                side.call([scorer, side.program, "texts", side.folder / f"seed{number}", texts],
                          folder / "texts.txt")
            lost[side.name] = side.score(number, scorer, texts)["lost"]
        print(f"seed {number}: base {base_side.results[number]:.4f}, change "
              f"{change_side.results[number]:.4f} bits per byte", flush=True)
        if lost["change"] > lost["base"]:
            raise Failed(f"the change's vocabulary does not restore {lost['change']} of the "
                         f"validation texts, the base's {lost['base']}")


def refuse_other_text(before, now):
    """Raise Failed if two prepared texts, described by their meta.json, are not the same."""
    names = SAME_TEXT
    if before.get("tokenizer_sha256") == now.get("tokenizer_sha256"):
        names = (*SAME_TEXT, "fingerprint")
    for name in names:
        if before.get(name) != now.get(name):
            raise Failed(f"the change trains on another text: {name} is {now.get(name)}, with the "
                         f"base {before.get(name)}")


# ---- the ledger ----------------------------------------------------------------------------------

def read_ledger():
    """Return the rows of the ledger; lines that are not rows are left out."""
    rows = []
    try:
        lines = Path(ledger).read_bytes().splitlines()
    except FileNotFoundError:
        lines = []
    except (OSError, ValueError) as e:
        fail(f"--ledger={ledger}: cannot be read ({reason(e)}); expected a file")
    for line in lines:
        with contextlib.suppress(ValueError):
            row = parse_json(line)
            if isinstance(row, dict) and "decision" in row:
                rows.append(row)
    return rows


def check_writable():
    """End the program if the ledger or a folder can't be written, before anything is trained."""
    for name, path in ("out_dir", out_dir), ("cache", cache), ("ledger", ledger):
        try:
            if name == "ledger":
                with open(path, "ab") as f:
                    is_empty = not f.tell()
                if is_empty:
                    os.unlink(path)
            else:
                Path(path).mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as e:
            fail(f"--{name}={path}: cannot be written ({reason(e)}); expected a "
                 f"{'file' if name == 'ledger' else 'folder'}")


def append(row):
    """Append a row to the ledger, as one write. Ends the program if the disk fails."""
    try:
        with open(ledger, "a+b", buffering=0) as f:
            line, size = dumps(row, allow_nan=False) + "\n", f.seek(0, os.SEEK_END)
            if size:  # an editor may have removed the last newline
                f.seek(size - 1)
                line = "\n" * (f.read(1) != b"\n") + line
            f.write(line.encode())
        to_disk(ledger)
    except OSError as e:
        fail(f"--ledger={ledger}: cannot be written ({e.strerror}); the row was: {dumps(row)}")


def show_ledger():
    """Print the experiments as a table."""
    rows = read_ledger()
    if not rows:
        fail(f'{ledger}: holds no experiments yet; begin with: python experiment.py "what I '
             f'changed"')
    table = [("n", "decision", "difference", "95 % interval", "seeds", "length", "base",
              "what was changed")]
    for row in rows:
        interval = ""
        if row.get("low") is not None:
            interval = f"{row['low']:+.4f} to {row['high']:+.4f}"
        difference = f"{row['difference']:+.4f}" if "difference" in row else ""
        length = f"{row['steps']} steps" if row.get("steps") else f"{row.get('minutes')} min"
        table.append((row.get("n", ""), row["decision"], difference, interval,
                      len(row.get("seeds", ())), length, str(row.get("base", ""))[:8],
                      row.get("hypothesis", "")))
    table = [[one_line(str(cell)) for cell in row] for row in table]
    widths = [max(map(width, column)) for column in zip(*table)]
    for row in table:
        print("  ".join(map(pad, row, widths)).rstrip())
    print("difference: in bits per byte, change minus base; less is better")


def diff_of(base_commit, change_commit):
    """
    Return the diff in the form that `git apply` reads, with secrets hidden, cut after MAX_DIFF.
    """
    text = git("diff", "--no-color", "--no-ext-diff", "--no-textconv", base_commit, change_commit)
    text = redact(text.encode(errors="surrogateescape").decode(errors="replace"))
    cut = f"\n... ({len(text):,} characters)" if len(text) > MAX_DIFF else "\n"
    return text[:MAX_DIFF] + cut


# ---- an experiment -------------------------------------------------------------------------------

@contextlib.contextmanager
def alone(folder):
    """Exit if another experiment is running: each would take time from the runs of the other."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as f:
        try:
            lock(f)
        except BlockingIOError:
            fail("another experiment is running; wait for it: two at a time slow each other down")
        yield


def next_folder():
    """Make and return the folder of the next experiment, and its number."""
    parent = Path(out_dir).absolute()
    parent.mkdir(parents=True, exist_ok=True)
    numbers = [int(path.name) for path in parent.iterdir() if path.name.isdecimal()]
    numbers += [row["n"] for row in read_ledger() if type(row.get("n")) is int]
    number = max(numbers, default=0) + 1
    folder = parent / str(number)
    for name in "base", "change":
        (folder / name).mkdir(parents=True)
    return folder, number


def try_change(hypothesis, flags):
    """Run an experiment and append its row to the ledger. Return the row."""
    copies = Path(cache).absolute() / "experiments"
    base_commit = commit_of(base)
    with alone(copies):
        for leftover in copies.glob("change-*"):  # of an experiment that was killed
            remove_copy(leftover)
            if leftover.suffix == ".cache":
                shutil.rmtree(leftover, ignore_errors=True)
        for other in copies.glob("base-*"):
            if other.name != f"base-{base_commit[:12]}":
                remove_copy(other)
        base_program = add_copy(base_commit, copies / f"base-{base_commit[:12]}")
        check_flags(flags, base_program)
        change_commit = snapshot(f"experiment: {hypothesis}")
        diff = diff_of(base_commit, change_commit)
        if not diff.strip():
            fail(f"the working tree is the same as {base}: nothing to compare; --base names "
                 f"another commit")
        folder, number = next_folder()
        copy = copies / f"change-{number}"
        row = {"n": number, "time": time.strftime("%Y-%m-%d %H:%M:%S"),
               "hypothesis": redact(hypothesis), "base": base_commit, "head": commit_of("HEAD"),
               "diff": diff, "command": shlex.join(["train.py", *redact(flags)]),
               "minutes": None if steps else minutes, "steps": steps or None,
               "seeds": list(range(seed, seed + seeds)), "out_dir": os.path.relpath(folder)}
        try:
            change_program = add_copy(change_commit, copy)
            sides = [Side("base", base_program, flags_for(base_program, flags), folder / "base",
                          Path(cache).absolute()),
                     Side("change", change_program, flags_for(change_program, flags),
                          folder / "change", copies / f"change-{number}.cache")]
            row |= measured(sides, folder)
        finally:
            remove_copy(copy)
            shutil.rmtree(copies / f"change-{number}.cache", ignore_errors=True)
        append(row)
    return row


def measured(sides, folder):
    """Return the entries of a row that come from the runs, even if they fail or are interrupted."""
    found = {}
    try:
        compare_runs(*sides, folder)
        results = [side.results for side in sides]
        verdict = judge(*results)
        decision = "unclear"
        if verdict.distinguishable or verdict.low == verdict.high == 0:  # 0: the same results
            decision = "keep" if verdict.difference < 0 else "discard"
        found = {name: value if value == value else None  # NaN with a single seed
                 for name, value in verdict._asdict().items()
                 if name in ("difference", "low", "high", "p")}
        found |= {"decision": decision,
                  "why": sentence(verdict, "the base", "the change", unit="bits per byte")
                  + notes_on_steps(sides)}
    except Failed as e:
        found = {"decision": "failed", "why": redact(str(e))}
    except (Interrupted, KeyboardInterrupt) as e:
        number = int(e.args[0]) if e.args else int(signal.SIGINT)
        found = {"decision": "interrupted", "why": f"stopped by {signal.Signals(number).name}",
                 "signal": number}
    for side in sides:
        found[f"{side.name}_bpb"] = list(side.results.values())
        found[f"{side.name}_steps"] = side.steps
        found[f"{side.name}_seconds"] = [round(seconds, 1) for seconds in side.wall]
    return found


def notes_on_steps(sides):
    """
    Return notes for a verdict on runs of the same duration: that some runs of a side took many more
    steps than others, and that the two sides took different numbers of steps. "" if there are none.
    """
    notes, (base_side, change_side) = "", sides
    for side in sides:
        low, high = min(side.steps), max(side.steps)
        if high > BUSY * low:
            notes += f"; the machine was busy: the {side.name} took {low:,} to {high:,} steps"
    more = sum(change_side.steps) / max(1, sum(base_side.steps)) - 1
    if abs(more) >= WORTH_A_NOTE:
        notes += f"; the change took {abs(more):.0%} {'more' if more > 0 else 'fewer'} steps"
    return notes


def main(hypothesis, flags):
    if IS_WINDOWS:
        fail(f"experiment.py {needs_posix('a signal at which a run saves and ends')}")
    if not 0 < minutes <= 1e6:
        fail(f"--minutes={minutes}: expected the training time of a run, such as 1")
    if steps < 0:
        fail(f"--steps={steps}: expected a number of steps, or 0")
    if seeds < 2:
        fail(f"--seeds={seeds}: expected at least 2, as a single one shows no noise")
    check_writable()
    row = try_change(hypothesis, flags)
    print(f"{row['decision']}: {one_line(row['why'])}")
    if json:
        print(dumps(row, allow_nan=False))
    if row["decision"] == "interrupted":
        return 128 + row["signal"]
    return int(row["decision"] == "failed")


if __name__ == "__main__":
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    words = []
    config = configure(globals(), positional=words, argv=sys.argv[1:split])
    if len(words) > 1:
        fail(f"{' and '.join(words)}: expected one hypothesis, in quotes")
    if not words and (sys.argv[split + 1:] or config.given.keys() - {"ledger"}):
        fail('expected what was changed, as in: python experiment.py "a larger batch"')
    outlast("stdout")  # the experiment goes on if stdout fails: its result is in the ledger
    if not words:
        show_ledger()
        sys.exit(0)
    sys.exit(main(words[0], sys.argv[split + 1:]))
