"""
Large texts are read in constant memory: one line of 1 GB, 1 GB compressed, 100,000 files, 5
million rows. These tests are part of make test-long and need four minutes, 6 GB of disk and Linux.
They print the time that each text takes and the peak memory of a process.
"""
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import data
from tests.test_data import prose

ROOT = Path(__file__).resolve().parents[1]
GB = 1_000_000_000
CHUNK = (prose(2_000_000).replace("\n", " ") + " ").encode()
MEASURED = """
import re, resource, sys, time
sys.path.insert(0, {root!r})
import data
start, folder = time.time(), data.prepare({source!r}, "byte", cache={cache!r})
own = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())  # ru_maxrss has what \
stood here before this program
most = max(int(own[1]), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
print(folder, time.time() - start, most / 1024, sep="\\n")
"""


def pieces():
    for _ in range(GB // len(CHUNK)):
        yield CHUNK


def one_line(folder):
    with open(folder / "a.txt", "wb") as f:
        f.writelines(pieces())
    return folder / "a.txt", 1, len(CHUNK) * (GB // len(CHUNK)), 300


def packed(folder):
    with gzip.open(folder / "a.txt.gz", "wb", 1) as f:
        f.writelines(pieces())
    return folder / "a.txt.gz", 1, len(CHUNK) * (GB // len(CHUNK)), 300


def many_files(folder):
    size = 0
    for number in range(100_000):
        path = folder / f"{number // 1000:03}" / f"{number:06}.txt"
        path.parent.mkdir(exist_ok=True)
        text = f"file {number}: " + prose(300, number % 1000)
        path.write_text(text)
        size += len(text.encode())
    return folder, 100_000, size, 500


def many_rows(folder):
    with open(folder / "a.jsonl", "w") as f:
        f.writelines(
            json.dumps({"text": f"row {n:08} of many short ones"}) + "\n" for n in range(5_000_000))
    return folder / "a.jsonl", 5_000_000, 5_000_000 * len("row 00000000 of many short ones"), 700


@pytest.mark.parametrize("make", [one_line, packed, many_files, many_rows])
def test_large_texts_in_little_memory(make, tmp_path):
    (tmp_path / "in").mkdir()
    source, documents, size, megabytes = make(tmp_path / "in")
    command = MEASURED.format(root=str(ROOT), source=str(source), cache=str(tmp_path / "cache"))
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True,
                          cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-999:]
    folder, seconds, most = done.stdout.splitlines()[-3:]
    print(f"\n{make.__name__}: {float(seconds):.0f} s, {float(most):.0f} MB of memory, "
          f"{os.cpu_count()} cores")
    d = data.load(folder)
    assert sum(d.meta[f"{split}_documents"] for split in ("train", "val")) in (
        documents, documents + 1)  # one document may be split
    assert size - 1 <= d.meta["train_bytes"] + d.meta["val_bytes"] <= size
    assert float(most) < megabytes
    if documents == 1:
        for at in range(0, len(d.train) - 2, len(CHUNK)):
            read = d.train[1 + at:1 + at + len(CHUNK)][:len(d.train) - 2 - at]
            assert (read - 3).astype(np.uint8).tobytes() == CHUNK[:len(read)]
