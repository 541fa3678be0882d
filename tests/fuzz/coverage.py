"""
Which branches of run.c's loaders and tokenizer were taken, from what gcov recorded (make coverage).

    python tests/fuzz/coverage.py FOLDER        FOLDER holds the .gcda files of programs that contain run.c
"""
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

SECTIONS = {"loaders": ("// Model files.", "// The transformer"), "tokenizer": ("// The tokenizer:", "// Printing:")}


def taken_branches(folder):
    """{line of run.c: [how often each of its branches was taken, over all programs]}"""
    counts = defaultdict(list)
    for data in sorted(Path(folder).glob("*.gcda")):
        out = subprocess.run(["gcov", "--json-format", "--stdout", "--branch-probabilities", data.name], cwd=folder,
                             capture_output=True, check=True).stdout
        for file in (f for report in out.splitlines() if report for f in json.loads(report)["files"]):
            for line in file["lines"] if Path(file["file"]).name == "run.c" else ():
                sums = counts[line["line_number"]]
                for i, branch in enumerate(line["branches"]):
                    sums += [0] * (i + 1 - len(sums))
                    sums[i] += branch["count"]
    return counts


def main(folder):
    source = (Path(__file__).resolve().parents[2] / "run.c").read_text().splitlines()
    counts = taken_branches(folder)
    for name, (first, last) in SECTIONS.items():
        begin, end = (next(i for i, text in enumerate(source) if text.startswith(mark)) for mark in (first, last))
        branches = [(line, n) for line in range(begin, end) for n in counts.get(line, ())]
        missed = sorted({line for line, n in branches if not n})
        for line in missed:
            print(f"run.c:{line}: {sum(not n for n in counts[line])} of {len(counts[line])} not taken: {source[line - 1].strip()}")
        taken = sum(n > 0 for _, n in branches)
        print(f"{name}: {taken} of {len(branches)} branches taken, {100 * taken / len(branches):.1f} %")


if __name__ == "__main__":
    main(sys.argv[1])
