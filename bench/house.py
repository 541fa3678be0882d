"""
Measure the size of the program: tokens in each folder, functions with more than six parameters, the
longest function, #undef directives.

    python bench/house.py            # this checkout
    python bench/house.py COMMIT...  # beside earlier commits

Python is counted with its own tokenizer, without comments, docstrings, newlines and indents; C,
CUDA, JavaScript, CSS and HTML with a simple lexer, without comments. Tests, benchmarks and
documents do not count. Functions of C are found by a regular expression, which also matches one or
two macros.
"""
import ast
import collections
import io
import re
import subprocess
import sys
import tarfile
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from configurator import configure, fail

ENDS = (".py", ".c", ".h", ".cu", ".cuh", ".js", ".css", ".html")
SKIPPED = {getattr(tokenize, name)
           for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER", "ENCODING")}
COMMENT_OR_TOKEN = re.compile(
    r"/\*.*?\*/|<!--.*?-->|(?<!:)//[^\n]*"                   # comments, outside the group
    r"|(\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`"  # strings
    r"|[\w$.]+|<<=|>>=|[-+*/%&|^!=<>]=|&&|\|\||\+\+|--|->|=>|<<|>>|::|[^\s\w])", re.S)
BOUNDS = re.compile(r"__launch_bounds__\([^)]*\) ?")
DEFINED = re.compile(
    r"^(?:static |inline |const |struct |__global__ |template)?[\w*][^;={}]*?(\w+)\(([^;{}]*)\)\s*"
    r"(?:const )?\{[^\n]*$(.*?)^\}", re.M | re.S)
MAX_PARAMETERS = 6


def sources(commit):
    """Return {path: text} of the program's files at a commit, or of this checkout for None."""
    if commit:
        done = subprocess.run(["git", "archive", f"{commit}^{{commit}}"], cwd=ROOT,
                              capture_output=True)
        if done.returncode:
            fail(f"{commit} is not a commit of this repository; git log lists them")
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
            found = {member.name: files.extractfile(member).read() for member in files
                     if member.isfile() and is_counted(member.name)}
    else:
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True,
                               text=True).stdout.splitlines()
        found = {name: (ROOT / name).read_bytes() for name in names if is_counted(name)}
    return {name: text.decode() for name, text in found.items()}


def is_counted(name):
    return name.endswith(ENDS) and name.split("/")[0] not in ("tests", "bench", ".ci", "doc")


def count_tokens(name, text):
    """Return the number of tokens of a file."""
    if not name.endswith(".py"):
        return sum(bool(token) for token in COMMENT_OR_TOKEN.findall(text))
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        is_scope = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if is_scope and ast.get_docstring(node) is not None:
            docstrings.add((node.body[0].lineno, node.body[0].col_offset))
    return sum(token.type not in SKIPPED and token.start not in docstrings
               for token in tokenize.generate_tokens(io.StringIO(text).readline))


def functions(name, text):
    """Return [(lines, name, number of parameters)] of a file's functions, including nested ones."""
    found = []
    if name.endswith(".py"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                parameters = [a for a in node.args.args + node.args.kwonlyargs if a.arg != "self"]
                lines = node.end_lineno - node.lineno + 1
                found.append((lines, f"{name}: {node.name}", len(parameters)))
    elif name.endswith((".c", ".h", ".cu", ".cuh")):
        for match in DEFINED.finditer(BOUNDS.sub("", text)):
            parameters = len(match[2].split(",")) * (match[2].strip() not in ("", "void"))
            found.append((match[0].count("\n") + 1, f"{name}: {match[1]}", parameters))
    return found


def measure(commit):
    """Return ({folder or file: tokens}, {other row of the table: figure}) of a commit."""
    rooms, languages = collections.Counter(), collections.Counter()
    found, undefined = [], 0
    for name, text in sources(commit).items():
        tokens = count_tokens(name, text)
        rooms[name if "/" not in name else name.rpartition("/")[0] + "/"] += tokens
        suffix = name.rpartition(".")[2]
        language = {"py": "Python", "js": "page", "css": "page", "html": "page"}.get(suffix, "C")
        languages[f"all {language}"] += tokens
        found += functions(name, text)
        undefined += len(re.findall(r"^\s*#\s*undef", text, re.M))
    longest = max(found)
    many = sum(parameters > MAX_PARAMETERS for _, _, parameters in found)
    totals = languages | {"functions": len(found),
                          f"functions of more than {MAX_PARAMETERS} parameters": many,
                          "longest function, lines": f"{longest[0]} ({longest[1]})",
                          "#undef": undefined}
    return dict(rooms), totals


def main(commits):
    tables = [measure(commit) for commit in (*commits, None)]
    print("| |" + "".join(f" {commit} |" for commit in (*commits, "now")))
    print("| --- |" + " ---: |" * len(tables))
    for part in 0, 1:
        rows = dict.fromkeys(row for table in tables for row in table[part])
        for row in rows if part else sorted(rows):
            print(f"| {row} |" + "".join(f" {table[part].get(row, '')} |" for table in tables))


if __name__ == "__main__":
    words = []
    configure(globals(), positional=words)
    main(words)
