"""
How large the program is: lines of every room, the longest function, functions of more than six parameters, #undef.

    python bench/house.py            # as it stands here
    python bench/house.py COMMIT...  # beside earlier ones

Tests, benchmarks, documents and words in other languages do not count; a line is a line, empty or not. Functions of C are found by
a regular expression, which takes one or two macros for functions; nested functions of Python count for themselves too.
"""
import ast
import collections
import io
import re
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from configurator import configure, fail

ENDS = (".py", ".c", ".h", ".cu", ".cuh", ".js", ".css", ".html")
BOUNDS = re.compile(r"__launch_bounds__\([^)]*\) ?")
DEFINED = re.compile(r"^(?:static |inline |const |struct |__global__ |template)?[\w*][^;={}]*?(\w+)\(([^;{}]*)\)\s*(?:const )?\{[^\n]*$"
                     r"(.*?)^\}", re.M | re.S)
MOST = 6  # parameters


def sources(commit):
    """{path: text} of the program's files at a commit; None: of the files here."""
    if commit:
        done = subprocess.run(["git", "archive", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True)
        if done.returncode:
            fail(f"{commit} is no commit of this repository; git log names those that are")
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
            found = {member.name: files.extractfile(member).read() for member in files if member.isfile() and is_ours(member.name)}
    else:
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True, text=True).stdout.splitlines()
        found = {name: (ROOT / name).read_bytes() for name in names if is_ours(name)}
    return {name: text.decode() for name, text in found.items()}


def is_ours(name):
    return name.endswith(ENDS) and name.split("/")[0] not in ("tests", "bench", ".ci", "doc")


def functions(name, text):
    """[(lines, name, parameters)] of a file."""
    if name.endswith(".py"):
        every = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        parameters = [[a.arg for a in node.args.args + node.args.kwonlyargs if a.arg != "self"] for node in every]
        return [(node.end_lineno - node.lineno + 1, f"{name}: {node.name}", len(some)) for node, some in zip(every, parameters)]
    if name.endswith((".c", ".h", ".cu")):
        return [(m[0].count("\n") + 1, f"{name}: {m[1]}", len(m[2].split(",")) * (m[2].strip() not in ("", "void")))
                for m in DEFINED.finditer(BOUNDS.sub("", text))]
    return []


def room(name):
    """The folder of a file, or the file itself on the top floor."""
    return name if "/" not in name else name.rpartition("/")[0] + "/"


def measure(commit):
    """{row of the table: figure}."""
    files, rows = sources(commit), collections.Counter()
    for name, text in files.items():
        rows[room(name)] += text.count("\n")
    every = [f for name, text in files.items() for f in functions(name, text)]
    longest = max(every)
    return dict(sorted(rows.items())) | {
        "all": sum(rows.values()), "longest function": f"{longest[0]} ({longest[1]})",
        f"functions of more than {MOST} parameters": sum(count > MOST for _, _, count in every),
        "functions": len(every), "#undef": sum(len(re.findall(r"^\s*#\s*undef", text, re.M)) for text in files.values())}


def main(commits):
    tables = [measure(commit) for commit in (*commits, None)]
    print("| |" + "".join(f" {commit} |" for commit in (*commits, "now")) + "\n| --- |" + " ---: |" * len(tables))
    rooms = {row for table in tables for row in table}
    last = ["all", "functions", f"functions of more than {MOST} parameters", "longest function", "#undef"]
    for row in [*sorted(rooms - set(last)), *last]:
        print(f"| {row} |" + "".join(f" {table.get(row, '')} |" for table in tables))


if __name__ == "__main__":
    words = []
    configure(globals(), positional=words)
    main(words)
