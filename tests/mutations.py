"""
Do the tests notice? Changes one operator, constant or condition of the program at a time, in a copy of it, and runs the tests
of that file. Prints every change with what noticed it, and the share that was noticed; the survivors are to be read one by one.

    python -m tests.mutations 200 py          200 changes of Python files, drawn with a seed
    python -m tests.mutations 100 c           of the C program
    python -m tests.mutations 0 cuda          each barrier, fence, wait and check of the GPU's kernels, all of them

--seed=N draws others, --workers=N runs so many at a time, --files=a.py,b.py changes those alone.
"""
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from configurator import configure

ROOT = Path(__file__).resolve().parents[1]
seed = 1          # of the draw
workers = 2       # changes tried at a time
limit = 400       # seconds for the tests of one change; more counts as noticed, for the suite would hang
files = ""        # only these, separated by commas

# The tests that guard a file, the quick ones first: pytest ends at the first that fails.
TESTS = {
    "model.py": "test_model test_parity test_train", "optim.py": "test_model test_train", "ops.py": "test_model test_train",
    "configurator.py": "test_configurator", "tokenizer.py": "test_tokenizer test_encode test_export",
    "data.py": "test_data test_train", "prepare.py": "test_data test_train", "stories.py": "test_stories test_data",
    "export.py": "test_export test_parity", "checkpoint.py": "test_checkpoint test_train", "files.py": "test_data test_checkpoint",
    "parallel.py": "test_train test_checkpoint", "sizes.py": "test_model test_train", "checks.py": "test_train",
    "instruments.py": "test_track test_train", "redact.py": "test_track", "follow.py": "test_track",
    "track.py": "test_track test_track_online test_train", "compare.py": "test_compare", "sweep.py": "test_sweep",
    "evaluate.py": "test_evaluate", "sample.py": "test_export test_evaluate", "train.py": "test_train test_checkpoint",
    ".c": "test_kernels test_run test_encode test_hostile test_parity", ".cu": "test_cuda", "token.h": "test_cuda",
    ".h": "test_kernels test_run test_parity",
}

SWAPS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
         ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
         ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And}
SIGNS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
         ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
         ast.FloorDiv: "//", ast.Mod: "%", ast.And: "and", ast.Or: "or"}


def python_changes(source):
    """[(start, end, new text)] in characters: one operator swapped, one number changed, one condition turned."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    place = lambda line, column: starts[line - 1] + column  # in bytes
    text, found = source.encode(), []

    def between(left, right, operator):
        """The operator that stands between two expressions."""
        begin, end = place(left.end_lineno, left.end_col_offset), place(right.lineno, right.col_offset)
        old, new = SIGNS[type(operator)].encode(), SIGNS[SWAPS[type(operator)]]
        at = text.find(old, begin, end)
        if at >= 0:
            found.append((at, at + len(old), new))

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            between(node.left, node.right, node.op)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            between(node.left, node.comparators[0], node.ops[0])
        elif isinstance(node, ast.BoolOp):
            between(node.values[0], node.values[1], node.op)
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            test = node.test
            begin, end = place(test.lineno, test.col_offset), place(test.end_lineno, test.end_col_offset)
            found.append((begin, end, f"(not ({text[begin:end].decode()}))"))
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            begin, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
            found.append((begin, end, repr(node.value + 1 if type(node.value) is int else node.value * 1.5 + 0.1)))
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            begin, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
            found.append((begin, end, repr(not node.value)))
    return found


TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|^[ \t]*#(?:\\\n|[^\n])*'
                   r"|(?P<op><<=|>>=|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+<>])|(?P<number>\b\d+(?:\.\d+)?\b)", re.M | re.S)
C_SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&", "+": "-", "-": "+",
           "<<": ">>", ">>": "<<", "+=": "-=", "-=": "+="}


def c_changes(source):
    """The same of C, by its tokens; a minus that is a sign and the brackets of templates and casts stay."""
    found = []
    for m in TOKEN.finditer(source):
        begin, end = (len(source[:i].encode()) for i in m.span())
        if m["op"] in C_SWAPS and source[m.start() - 1:m.start()] == " " and source[m.end():m.end() + 1] == " ":
            found.append((begin, end, C_SWAPS[m["op"]]))
        elif m["number"] and "." not in m["number"] and source[m.end():m.end() + 1] not in ("x", "u", "f", "L"):
            found.append((begin, end, str(int(m["number"]) + 1)))
    return found


GUARDS = re.compile(r"^[ \t]*(?:__sync\w+|__threadfence|meet_grid|await|__pipeline_\w+|expect_nothing|prepare|CUDA)\(.*;[^\n]*$"
                    r"|^[ \t]*if \([^;{]*\) (?:return|break|continue);[^\n]*$", re.M)


def guards(source):
    """Every barrier, fence, wait and early end of the GPU's kernels, each to be taken out."""
    return [(len(source[:m.start()].encode()), len(source[:m.end()].encode()), "") for m in GUARDS.finditer(source)]


KINDS = {"py": (("*.py", "engine/*.py"), python_changes), "c": (("*.c", "runtime/*.[ch]", "runtime/cpu/*.[ch]"), c_changes), "cuda": (("runtime/cuda/*.cu", "runtime/cuda/token.h"), guards)}


def tests_of(path):
    name = path.name if path.name in TESTS else next(key for key in TESTS if key.startswith((".", "_")) and path.name.endswith(key))
    return [f"tests/{test}.py" for test in TESTS[name].split() if (ROOT / f"tests/{test}.py").exists()]


def attempt(number, path, change, folder):
    """Run the tests with one change; the name of the first that failed, or None: a survivor."""
    copy = folder / str(number)
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, tracked):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    begin, end, new = change
    text = (copy / path.relative_to(ROOT)).read_bytes()
    (copy / path.relative_to(ROOT)).write_bytes(text[:begin] + new.encode() + text[end:])
    started = time.monotonic()
    try:
        done = subprocess.run([sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests_of(path)], cwd=copy,
                              capture_output=True, text=True, timeout=limit, env=os.environ | {"OMP_NUM_THREADS": "1"})
        noticed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
        who = noticed[1] if noticed else None if done.returncode == 0 else f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        who = f"no end within {limit} s"
    shutil.rmtree(copy, ignore_errors=True)
    line = text[:begin].count(b"\n") + 1
    old = text[begin:end].decode()
    print(f"{'noticed ' if who else 'SURVIVED'} {path.relative_to(ROOT)}:{line} {old!r} -> {new!r}"
          f"  [{who or ', '.join(tests_of(path))}; {time.monotonic() - started:.0f} s]", flush=True)
    return who


def main(count, kind):
    patterns, find = KINDS[kind]
    wanted = {name for name in files.split(",") if name}
    paths = sorted({path for pattern in patterns for path in ROOT.glob(pattern) if not wanted or path.name in wanted})
    changes = [(path, change) for path in paths for change in find(path.read_text(encoding="utf-8"))]
    drawn = random.Random(seed).sample(changes, min(count or len(changes), len(changes)))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(lambda job: attempt(job[0], *job[1], Path(folder)), enumerate(drawn)))
    noticed = sum(who is not None for who in found)
    print(f"{noticed} of {len(drawn)} changes were noticed ({100 * noticed / len(drawn):.0f} %), of {len(changes)} that there are")


if __name__ == "__main__":
    words = []
    configure(globals(), positional=words)
    main(int(words[0]), words[1])
