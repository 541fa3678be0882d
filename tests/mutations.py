"""
Measure how many small changes of the program the tests notice. Change one operator, constant or
condition at a time, in a copy of the program, and run the tests that execute the changed line.
Print every change with the test that noticed it, and the percentage of the changes that were
noticed. The survivors have to be read one by one.

    python -m tests.mutations 200 py      200 changes of Python files, drawn with a seed
    python -m tests.mutations 100 c       100 changes of the C program
    python -m tests.mutations 0 cuda      every barrier, fence, wait and check of the GPU's kernels

--seed=N draws other changes, --workers=N tries N changes at a time, --files=a.py,b.py changes only
these files, --files=-a.py all files but this one, --part=2/7 tries the second seventh of the draw,
--again=output.txt tries the survivors of an earlier run again, --done=output.txt tries only the
changes that the earlier run has not tried. --tests=test_data,test_train runs only those test files.

For changes of Python, one run of all tests (ten minutes) first records which tests reach which
change, on a copy that notes when a change is reached. The result is kept until a file changes.
Runs on Linux only, like the tests that it starts.
"""
import ast
import contextlib
import ctypes
import hashlib
import importlib
import itertools
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from configurator import configure
from tests import forked
from tests.conftest import PROGRAM, compile_object

ROOT = Path(__file__).resolve().parents[1]
MAP = ROOT / "cache" / "mutations"
seed = 1          # seed of the draw
workers = 1       # changes tried at a time
budget = 30       # max seconds of tests for one change of Python, quick tests first; 0: no limit
files = ""        # only these files, separated by commas; a minus before the first: all but these
part = "1/1"      # only this part of the draw
again = ""        # output file of an earlier run: try only its survivors
done = ""         # output file of an earlier run: try only changes that it has not tried
tests = ""        # for Python: only these test files, separated by commas

# Modules that most tests of Python import. A worker imports them once, because the import takes
# longer than most tests.
PRELOADED = ["pytest", "torch", "torch._dynamo", "safetensors.torch", "sentencepiece", "tokenizers",
             "gguf", "transformers.models.llama.modeling_llama"]
# Not run for changes of Python: tests of the C program alone, and test_docs, which needs a git
# repository.
NO_PYTHON = """test_batches test_bench test_cuda test_docs test_encode test_grammar test_hostile \
test_kernels test_kv test_library
    test_run test_run_texts test_sampling test_state"""
# Tests of the C program. The tests that FIRST selects for the changed file, by pytest's -k, run
# first, because they are the most likely to notice the change.
C_TESTS = """test_run test_encode test_bpe_run test_chat test_library test_kv test_architectures \
test_bench test_hostile
    test_grammar test_kernels test_parity"""
RUN, LOADERS = ("test_run.py and not pool",
                "hostile_gguf or hostile_llama2c or of_every_kind or checksum or hashlib")
FIRST = {
    "model.c": f"{RUN} or {LOADERS}", "gguf.c": f"{RUN} or {LOADERS}",
    "bytes.h": f"{RUN} or {LOADERS}", "model.h": RUN, "backend.h": RUN,
    "llama.c": f"{RUN} or test_library", "run.c": f"{RUN} or test_chat or test_bench",
    "sampler.c": "test_sampling", "sampler.h": "test_sampling", "text.c": "test_sampling",
    "chat.c": "test_chat", "bpe.c": "test_bpe_run",
    "tokenizer.c": "test_encode or spaces or utf8 or made_of_byte", "llamac.h": "test_library",
    "grammar.c": "test_grammar", "thread_pool.c": "pool or on_threads",
    "thread_pool.h": "pool or on_threads", "os.c": f"memory or thread_for_each_core or {RUN}"
}
KERNEL_TESTS = "plain_c"  # run first for all other files of runtime/cpu
# Tests that can't notice a change that compiles: a change of any file, of a file outside
# runtime/cpu, and of a file inside it.
BLIND = "compiles_where or hides_nan or 32_bits or interface_is_exported or static_state"
BLIND_OUTSIDE = f"{BLIND} or plain_c or on_arm or every_item_once or memory_that_is_free"
BLIND_INSIDE = (f"{BLIND} or fuzzing or once_failed or tokenizer or vocabular or every_item_once "
                "or memory_that_is_free")
# Tests of the GPU's kernels: whole programs, each op, and race detection. VARIANTS adds the tests
# of a kernel variant to the files that contain its code.
CUDA_TESTS = [["tests/test_cuda.py", "-k", "not make_runcuda and not test_ops_equal"],
              ["tests/test_cuda.py", "-k", "test_ops_equal"]]
RACES = [["tests/long_cuda.py", "-k", "test_kernels_have_no_races"]]
PROMPTS = [["tests/long_cuda.py", "-k", "variants_of_prompt_products"]]
RACES_OF_TOKENS = [["tests/long_cuda.py", "-k", "carry_their_data_have_no_races"]]
VARIANTS = {"tensor_products.cuh": PROMPTS, "whole_token.cuh": RACES_OF_TOKENS,
            "carried.cuh": RACES_OF_TOKENS, "common.cuh": RACES_OF_TOKENS}
# A change counts if the object code of at least one of these compilers differs.
COMPILERS = [[compiler, "-std=c11", "-w", "-O2"]
             for compiler in ("cc", "aarch64-linux-gnu-gcc") if shutil.which(compiler)]

SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And
}
SIGNS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+",
    ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.And: "and",
    ast.Or: "or"
}


def python_changes(source):
    """
    Return [(start, end, new text)] of the changes of a file: one operator swapped, one number
    changed or one condition negated. start and end are in bytes.
    """
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    place = lambda line, column: starts[line - 1] + column  # in bytes
    text, found = source.encode(), []

    def between(left, right, operator):
        """Add the change of the operator between two expressions."""
        begin, end = (place(left.end_lineno, left.end_col_offset),
                      place(right.lineno, right.col_offset))
        old, new = SIGNS[type(operator)].encode(), SIGNS[SWAPS[type(operator)]]
        at = text.find(old, begin, end)
        if at >= 0:
            found.append((at, at + len(old), new))

    for node in ast.walk(ast.parse(source)):
        if (isinstance(node, ast.BinOp) and type(node.op) in SWAPS
                and not isinstance(node.left, ast.Constant | ast.JoinedStr)):
            between(node.left, node.right, node.op)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            between(node.left, node.comparators[0], node.ops[0])
        elif isinstance(node, ast.BoolOp):
            between(node.values[0], node.values[1], node.op)
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            test = node.test
            begin, end = (place(test.lineno, test.col_offset),
                          place(test.end_lineno, test.end_col_offset))
            found.append((begin, end, f"(not ({text[begin:end].decode()}))"))
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            begin, end = (place(node.lineno, node.col_offset),
                          place(node.end_lineno, node.end_col_offset))
            found.append((begin, end, repr(
                node.value + 1 if type(node.value) is int else node.value * 1.5 + 0.1)))
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            begin, end = (place(node.lineno, node.col_offset),
                          place(node.end_lineno, node.end_col_offset))
            found.append((begin, end, repr(not node.value)))
    return found


TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|^[ \t]*#(?:\\\n|[^\n])*'
    r"|(?P<op><<=|>>=|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+<>])"
    r"|(?P<number>\b\d+(?:\.\d+)?\b)", re.M | re.S)
C_SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&",
    "+": "-", "-": "+", "<<": ">>", ">>": "<<", "+=": "-=", "-=": "+="
}


def c_changes(source):
    """
    Return the same for C, found by its tokens. A unary minus and the brackets of templates and
    casts stay unchanged.
    """
    found = []
    for m in TOKEN.finditer(source):
        begin, end = (len(source[:i].encode()) for i in m.span())
        if (m["op"] in C_SWAPS and source[m.start() - 1:m.start()] == " "
                and source[m.end():m.end() + 1] == " "):
            found.append((begin, end, C_SWAPS[m["op"]]))
        elif (m["number"] and "." not in m["number"]
                and source[m.end():m.end() + 1] not in ("x", "u", "f", "L")):
            found.append((begin, end, str(int(m["number"]) + 1)))
    return found


GUARDS = re.compile(
    r"^[ \t]*(?:if \([^;{]*\) )?(?:__sync\w+|__threadfence|grid_barrier|add_release|__pipeline_\w+"
    r"|CUDA\((?:[\w>-]+, )?cuda\w+Synchronize)\(.*;[^\n]*$"
    r"|^[ \t]*if \([^;{]*\) (?:return|break|continue);[^\n]*$", re.M)


def guards(source):
    """Return the changes that each remove one barrier, fence, wait or early exit of the kernels."""
    return [(len(source[:m.start()].encode()), len(source[:m.end()].encode()), "")
            for m in GUARDS.finditer(source)]


KINDS = {
    "py": (("*.py", "engine/*.py", "engine/*/*.py", "engine/*/*/*.py", "llamac/*.py", "page/*.py"),
           python_changes),
    "c": (("*.c", "runtime/*.[ch]", "runtime/cpu/*.[ch]"), c_changes),
    "cuda": (("runtime/cuda/*.cu*",), guards)
}

# For a copy whose guards have switches: the environment variable MISSING_GUARD is the number of
# the guard to skip.
SWITCH = """
#include <stdlib.h>
inline const char *const missing_guard = getenv("MISSING_GUARD");
inline bool is_missing(int guard) { return missing_guard && guard == atoi(missing_guard); }
"""


def all_guards():
    """Return [(path, change)] of all guards of the GPU's kernels; a guard's number is its index."""
    paths = sorted(path for pattern in KINDS["cuda"][0] for path in ROOT.glob(pattern))
    return [(path, change) for path in paths for change in guards(path.read_text(encoding="utf-8"))]


def add_switches(folder):
    """Put each guard of a copy's kernels behind a switch, so that one build serves all changes."""
    for number, (path, (begin, end, _)) in reversed(list(enumerate(all_guards()))):
        copy = folder / relative(path)
        text = copy.read_bytes()  # unchanged up to here: the last guard of a file comes first
        switch = f"if (is_missing({number})) {{}} else ".encode()
        copy.write_bytes(text[:begin] + switch + text[begin:])
    header = folder / "tests" / "cuda_on_cpu" / "cuda_runtime.h"
    header.write_text(header.read_text().replace("#pragma once", "#pragma once" + SWITCH))


def copy_to(folder):
    """Copy the program's tracked files from the working tree."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode().split("\0")
    for name in filter(None, tracked):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def children():
    return [int(pid) for task in Path("/proc/self/task").iterdir()
            for pid in (task / "children").read_text().split()]


def pytest(folder, *words, limit, **env):
    """
    Run pytest in a copy; return (exit code, or None after `limit` seconds, output). No process that
    a test started outlives it.
    """
    own = {"WARN": "-w", "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder.parent / "tmp")}
    (folder.parent / "tmp").mkdir()
    with open(folder.parent / "output", "w+") as output:
        child = os.fork()
        if not child:
            run_pytest(folder, words, own | env, output)
        try:
            code = exit_code(child, limit)
        finally:
            # The children of a subreaper include all orphans of its descendants.
            while found := children():
                for pid in found:
                    with contextlib.suppress(ChildProcessError, ProcessLookupError):  # reaped above
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
        output.seek(0)
        return code, output.read()


def run_pytest(folder, words, env, output):
    """Do what `python -m pytest` does in a copy, and exit. Runs in a fork, which has PRELOADED."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with open(os.devnull) as nothing:
            for target, file in enumerate((nothing, output, output)):
                os.dup2(file.fileno(), target)
        os.chdir(folder)
        os.environ.update(env)
        tempfile.tempdir = None  # so that TMPDIR is read again
        forked.forget()
        sys.path[0], sys.dont_write_bytecode = str(folder), True
        sys.argv = ["pytest", "-q", "-p", "no:cacheprovider", *words]
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    except SystemExit as e:
        code = int(e.code)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def exit_code(pid, limit):
    """Return the exit code of a child, or None if it runs longer than `limit` seconds."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    return None


def adopt():
    """Adopt all processes that the tests leave behind, and exit cleanly on SIGTERM."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.nice(5)


def work():
    """Initialize a worker, which ends when the main program ends."""
    adopt()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    os.environ["OMP_NUM_THREADS"] = "1"  # PyTorch reads it when it is imported
    for name in PRELOADED:
        importlib.import_module(name)


def statement_of(source, start):
    """
    Return (the innermost statement at an offset that a line can be written before, whether a
    function holds it). Statements of a class's body don't count: the line would add a name to it.
    """
    line, tree = source[:start].count(b"\n") + 1, ast.parse(source)
    of_classes = {id(node)
                  for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for node in c.body}
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)
              and first_line(node) <= line <= node.end_lineno]
    in_function = any(isinstance(node, ast.FunctionDef) and line >= node.body[0].lineno
                      for node in around)
    return [node for node in around
            if id(node) not in of_classes and begins_line(source, node)][-1], in_function


def first_line(node):
    """Return the line where a statement begins, with its decorators."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def begins_line(source, node):
    """Return whether a statement is the first of its line; an elif is not."""
    line = source.splitlines()[node.lineno - 1]
    return not line[:node.col_offset].strip() and not line.lstrip().startswith(b"elif")


def with_notes(source, statements, name):
    """
    Return the source of a file that notes when a test reaches one of the statements, {number of a
    change: statement}, and, under `name`, when a test runs any function of the file.
    """
    lines = source.splitlines(keepends=True)
    places = [(node, str(number)) for number, node in statements.items()]
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            body = function.body[1:] if ast.get_docstring(function) else function.body
            places += [(body[0], name)] if body and begins_line(source, body[0]) else []
    for node, note in sorted(places, key=lambda place: -first_line(place[0])):
        call = f"from tests import reached as _reached; _reached.at({note!r})\n"
        lines.insert(first_line(node) - 1, b" " * node.col_offset + call.encode())
    return b"".join(lines)


def find_tests(drawn):
    """
    Return {test: (0 or 1, seconds)} for each change of Python: the tests that reach it, and pass
    where nothing is changed. A module's own statements, and what they call, run once in a process,
    so a change there belongs to all tests that run any function of the file: these have a 1.
    """
    paths = sorted({*ROOT.glob("tests/test_*.py"), *(path for path, _ in drawn)})
    words = [f"tests/{name}.py" for name in tests.split(",")] if tests else [
        relative(path) for path in paths
        if path.parent.name == "tests" and path.stem not in NO_PYTHON.split()]
    key = repr([words, *(title(*job) for job in drawn), *(path.read_bytes() for path in paths)])
    stored = MAP / f"reached-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if not stored.exists():
        stored.write_text(json.dumps(run_with_notes(drawn, words)))
    passed, noted = json.loads(stored.read_text())
    noted = {name: set(notes) for name, notes in noted.items()}
    found = []
    for number, (path, change) in enumerate(drawn):
        notes = noted[str(number)]
        reach = {test: (0, seconds) for test, seconds in passed.items() if is_noted(test, notes)}
        if "" in notes or not statement_of(path.read_bytes(), change[0])[1]:
            notes = noted[name_of(path)]
            reach = {test: (1, seconds) for test, seconds in passed.items()
                     if is_noted(test, notes)} | reach
        found.append(reach)
    return found


def is_noted(test, notes):
    """Return whether a test, or a fixture of its module, made one of the notes."""
    module = test.split("::")[0]
    return not notes.isdisjoint([f"{test} (call)", f"{module} (setup)", f"{module} (teardown)"])


def run_with_notes(drawn, words):
    """
    Return ({test: seconds} of the tests that pass without a change, {number of a change or name of
    a file: notes}). tests/reached.py writes the notes; a note of a fixture names only its module.
    """
    numbers = {}
    for number, (path, _) in enumerate(drawn):
        numbers.setdefault(path, []).append(number)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "llamac").resolve()
        copy_to(copy)
        for path, own in numbers.items():
            source = path.read_bytes()
            statements = {n: statement_of(source, drawn[n][1][0])[0] for n in own}
            (copy / relative(path)).write_bytes(with_notes(source, statements, name_of(path)))
        notes = copy / "tests" / "reached_by"
        notes.mkdir()
        code, output = pytest(copy, "-p", "tests.reached", "-m", "not slow", "-n", str(workers),
                              "--dist=loadfile", "--no-loadscope-reorder", *words,
                              limit=10800, PYTHONPATH=str(copy))
        if not (notes / "tests.json").exists():
            raise RuntimeError(output)
        ran = json.loads((notes / "tests.json").read_text())
        noted = {name: read_notes(notes / name)
                 for name in [*map(str, range(len(drawn))), *map(name_of, numbers)]}
    passed = {test: what["seconds"] for test, what in ran.items() if what["passed"]}
    print(f"{len(ran)} tests, {sum(passed.values()):.0f} s", flush=True)
    if code:
        failed = sorted(ran.keys() - passed.keys())
        print(output, "These do not pass and guard nothing:", *failed, sep="\n  ", flush=True)
    return passed, noted


def read_notes(path):
    """Return the notes in a file, each once; [] if no test has written one."""
    notes = set()
    for note in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        test, _, when = note.rpartition(" ")
        notes.add(note if when in ("", "(call)") else f"{test.split('::')[0]} {when}")
    return sorted(notes)


def tests_of(path, change, reach):
    """
    Return pytest's arguments for each of the consecutive runs. For Python: the quickest of the
    tests that reach the change, as find_tests returns them, module by module, beginning with the
    file's own module. For C and CUDA: the tests of the lists above.
    """
    if path.parent.name == "cuda":
        # A guard without a condition is a barrier, a fence or a wait: it orders accesses.
        orders = b" if " not in b" " + path.read_bytes()[change[0]:change[1]]
        return [*(RACES + CUDA_TESTS if orders else CUDA_TESTS + RACES),
                *VARIANTS.get(path.name, [])]
    if path.suffix in (".c", ".h"):
        modules, first = ([f"tests/{test}.py" for test in C_TESTS.split()],
                          FIRST.get(path.name, KERNEL_TESTS))
        blind = BLIND_INSIDE if path.parent.name == "cpu" else BLIND_OUTSIDE
        return [[*modules, "-k", first], [*modules, "-k", f"not ({first} or {blind})"]]
    chosen, total = [], 0.0
    for test in sorted(reach, key=reach.get):
        total += reach[test][1]
        if chosen and budget and total > budget:
            break
        chosen.append(test)
    modules = {}
    for test in chosen:
        modules.setdefault(test.split("::")[0], []).append(test)
    order = sorted(modules, key=lambda m: (
        path.stem not in m, sum(reach[t][1] for t in modules[m])))
    return [[test for module in order for test in modules[module]]]


def relative(path):
    """Return a path relative to the repository, as git lists it."""
    return str(path.relative_to(ROOT))


def name_of(path):
    """Return the name of the file with the notes about a source file."""
    return relative(path).replace("/", ".")


def title(path, change):
    """Return a change as it is printed: the position, the old text and the new text."""
    begin, end, new = change
    text = path.read_bytes()
    line, column = text[:begin].count(b"\n") + 1, begin - text.rfind(b"\n", 0, begin)
    return f"{relative(path)}:{line}:{column} {text[begin:end].decode()!r} -> {new!r}"


def in_worker(function, *arguments):
    """Call a function in a worker of the pool. SystemExit, raised by a signal, ends the worker."""
    try:
        return function(*arguments)
    except SystemExit:
        os._exit(1)


def attempt(path, change, runs, seconds):
    """
    Run the tests with one change; return the name of the first that fails, or None if the change
    survives. runs: pytest's arguments of each run; a run that fails is the last. seconds: the
    duration of each run without a change; None if unknown.
    """
    started, who, count = time.monotonic(), None, 0
    for n, words in enumerate(filter(None, runs)):
        # Seconds; a run that takes longer hangs, so the change counts as noticed.
        limit = 600 if seconds is None else 240 + 6 * seconds[n]
        code, output = run_changed(path, change, words, limit)
        noticed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
        failed = noticed[1] if noticed else f"exit code {code}"
        who = (f"no end within {limit:.0f} s" if code is None
               else failed if code not in (0, 5) else None)  # 5: no test was selected
        count += int((re.search(r"(\d+) passed", output) or "00")[1])
        if who:
            break
    print(f"{'noticed ' if who else 'SURVIVED'} {title(path, change)}"
          f"  [{who or f'{count} tests'}; {time.monotonic() - started:.0f} s]", flush=True)
    return who


def run_changed(path, change, words, limit):
    """
    Run pytest in a copy with one change; return what pytest() returns. change: None to keep all
    guards.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copy = Path(folder, "llamac").resolve()
        copy_to(copy)
        if path.parent.name != "cuda":
            apply(copy, path, change)
            return pytest(copy, "-x", *words, limit=limit)
        add_switches(copy)
        missing = {"MISSING_GUARD": str(all_guards().index((path, change)))} if change else {}
        return pytest(copy, "-x", *words, limit=limit, **missing)


def seconds_unchanged(path, runs):
    """Return {arguments of a run: seconds} with all guards. Compiles what all changes share."""
    found = {}
    for words in runs:
        started = time.monotonic()
        code, output = run_changed(path, None, words, limit=7200)
        if code or not re.search(r"\d+ passed", output):
            raise RuntimeError(f"{words} guard nothing:\n{output}")
        found[words] = time.monotonic() - started
        print(f"{found[words]:.0f} s where nothing is changed: {words[-1]}", flush=True)
    return found


def apply(folder, path, change):
    """Apply a change to a copy of the program."""
    begin, end, new = change
    text = path.read_bytes()
    (folder / path.relative_to(ROOT)).write_bytes(text[:begin] + new.encode() + text[end:])


def objects_of(folder, compiler, path):
    """Return the object code of a C file, or, for a header, of all files that may include it."""
    sources = PROGRAM if path.suffix == ".h" else [str(path.relative_to(ROOT))]
    return [compile_object(source, compiler, folder).read_bytes() for source in sources]


def is_another_program(path, change):
    """
    Return whether a change of C compiles, and into other instructions for at least one of the
    processors; None if it does not compile. The result is stored, because it takes seconds.
    """
    stored = MAP / "compiled.json"
    verdicts = json.loads(stored.read_text()) if stored.exists() else {}
    sources = b"".join(sorted(
        file.read_bytes() for pattern in KINDS["c"][0] for file in ROOT.glob(pattern)))
    key = f"{title(path, change)} {hashlib.sha256(sources).hexdigest()[:16]}"
    if key not in verdicts:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder).resolve()
            copy_to(copy)
            apply(copy, path, change)
            try:
                verdicts[key] = any(
                    objects_of(copy, c, path) != objects_of(ROOT, c, path) for c in COMPILERS)
            except subprocess.CalledProcessError:
                verdicts[key] = None
        MAP.mkdir(parents=True, exist_ok=True)
        stored.write_text(json.dumps(verdicts))
        print({True: "to try  ", False: "the same", None: "no C    "}[verdicts[key]],
              title(path, change), flush=True)
    return verdicts[key]


def is_a_change(source, change):
    """
    Return whether the changed file is still a program, and a different one. It may not be: within
    f-strings, Python before 3.12 reports wrong positions.
    """
    begin, end, new = change
    text = source.encode()
    try:
        return (ast.dump(ast.parse(text[:begin] + new.encode() + text[end:]))
                != ast.dump(ast.parse(source)))
    except SyntaxError:
        return False


def main(count, kind):
    patterns, find = KINDS[kind]
    named = set(files.removeprefix("-").split(","))
    wanted = lambda path: not files or (path.name in named) != files.startswith("-")
    paths = sorted({path for pattern in patterns for path in ROOT.glob(pattern) if wanted(path)})
    sources = {path: path.read_text(encoding="utf-8") for path in paths}
    changes = [(path, change) for path in paths for change in find(sources[path])]
    random.Random(seed).shuffle(changes)
    is_sound = {"py": lambda path, change: is_a_change(sources[path], change),
                "c": is_another_program, "cuda": lambda *_: True}
    sound = (job for job in changes if is_sound[kind](*job))
    this, parts = map(int, part.split("/"))
    count = count or len(changes)
    drawn = sorted(itertools.islice(sound, count * (this - 1) // parts, count * this // parts))
    if again:
        survivors = Path(again).read_text()
        drawn = [job for job in drawn if f"SURVIVED {title(*job)}  [" in survivors]
    if done:
        tried = Path(done).read_text()
        drawn = [job for job in drawn if f" {title(*job)}  [" not in tried]
    with ProcessPoolExecutor(workers, initializer=work) as pool:
        reached = (pool.submit(in_worker, find_tests, drawn).result() if kind == "py"
                   else [None] * len(drawn))
        if kind == "cuda":
            different = list(dict.fromkeys(
                tuple(words) for job in drawn for words in tests_of(*job, None)))
            unchanged = pool.submit(in_worker, seconds_unchanged, paths[0], different).result()
        jobs = []
        for (path, change), reach in zip(drawn, reached):
            runs, seconds = tests_of(path, change, reach), None
            if kind == "py":
                seconds = [sum(reach[test][1] for test in runs[0])]
            elif kind == "cuda":
                seconds = [unchanged[tuple(words)] for words in runs]
            jobs.append(pool.submit(in_worker, attempt, path, change, runs, seconds))
        found = [job.result() for job in jobs]
    for path in paths:
        results = [who for who, (where, _) in zip(found, drawn) if where == path]
        if results:
            print(f"{relative(path)}: {sum(who is not None for who in results)} of {len(results)}")
    noticed = sum(who is not None for who in found)
    share = 100 * noticed / max(1, len(drawn))
    print(f"{noticed} of {len(drawn)} changes were noticed ({share:.0f} %), "
          f"of {len(changes)} that there are")


if __name__ == "__main__":
    words = []
    configure(globals(), positional=words)
    os.environ["OBJECTS"] = str(MAP / "objects")
    (MAP / "objects").mkdir(parents=True, exist_ok=True)
    main(int(words[0]), words[1])
