"""
Print which branches of the library's loaders and tokenizer were taken, as recorded by gcov (make
coverage).

    python tests/fuzz/coverage.py FOLDER

FOLDER holds the .gcda files of programs that contain the library.
"""
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

RUNTIME = Path(__file__).resolve().parents[2] / "runtime"
PARTS = {"loaders": ("gguf.c", "model.c"), "tokenizer": ("tokenizer.c", "chat.c")}


def taken_branches(folder):
    """Return {(file, line): [how often each branch of the line was taken, in all programs]}."""
    counts = defaultdict(list)
    for data in sorted(Path(folder).glob("*.gcda")):
        out = subprocess.run(
            ["gcov", "--json-format", "--stdout", "--branch-probabilities", data.name],
            cwd=folder, capture_output=True, check=True).stdout
        for file in (f for report in out.splitlines() if report
                     for f in json.loads(report)["files"]):
            for line in file["lines"]:
                sums = counts[Path(file["file"]).name, line["line_number"]]
                for i, branch in enumerate(line["branches"]):
                    sums += [0] * (i + 1 - len(sums))
                    sums[i] += branch["count"]
    return counts


def main(folder):
    counts = taken_branches(folder)
    for part, names in PARTS.items():
        branches = [(place, n) for place, sums in counts.items() if place[0] in names for n in sums]
        for name, line in sorted({place for place, n in branches if not n}):
            sums, source = counts[name, line], (RUNTIME / name).read_text().splitlines()
            print(f"{name}:{line}: {sum(not n for n in sums)} of {len(sums)} not taken: "
                  f"{source[line - 1].strip()}")
        taken = sum(n > 0 for _, n in branches)
        print(f"{part}: {taken} of {len(branches)} branches taken, "
              f"{100 * taken / len(branches):.1f} %")


if __name__ == "__main__":
    main(sys.argv[1])
