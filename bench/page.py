"""
Measure how much a watched page slows down a training: the same training alone and beside a page
with a reader, in turns.

    python bench/page.py                                         five pairs with the defaults
    python bench/page.py --rounds=9 --only="--dim=128"           of this command line of train.py

The reader does what a browser does with one run: it fetches the run's details and two curves, then
the live events, and the curves again every ten seconds. The browser's own drawing is not included;
it may run on another machine. Each pair prints the seconds of the steps alone over those watched
(0.99: the training keeps 99 % of its speed), and the CPU seconds of the page per minute. The
machine must be idle otherwise.
"""
import http.client
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlencode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import compare
from configurator import configure, fail

rounds = 5      # pairs
steps = 1000    # of each training
only = ""       # more of train.py's command line

ROOT = Path(__file__).resolve().parents[1]


class Watched:
    """A page on a folder of runs, and a reader of one of them, while the block runs."""

    def __init__(self, folder, run):
        self.folder, self.run, self.ended, self.events = folder, run, threading.Event(), 0

    def __enter__(self):
        self.page = subprocess.Popen([sys.executable, ROOT / "page.py", "out", "--port=0"], cwd=self.folder, text=True,
                                     stdout=subprocess.PIPE)
        self.port, self.token = re.search(r":(\d+)/\?token=(.+)", self.page.stdout.readline()).groups()
        self.begin, self.before = time.monotonic(), self.processor()
        for work in self.listen, self.look:
            threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.share = 60 * (self.processor() - self.before) / (time.monotonic() - self.begin)
        self.page.terminate()
        self.page.wait()

    def processor(self):
        """Return the CPU seconds that the page has used."""
        words = Path(f"/proc/{self.page.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def get(self, path, **query):
        connection = http.client.HTTPConnection("127.0.0.1", int(self.port), timeout=60)
        connection.request("GET", f"/{path}?{urlencode(query)}", headers={"Authorization": f"Bearer {self.token}"})
        return connection.getresponse()

    def listen(self):
        for line in self.get("api/live"):
            self.events += line.startswith(b"data: ") and b'"run"' in line
            if self.ended.is_set():
                return

    def look(self):
        while not self.ended.wait(10):
            self.get("api/run", run=self.run).read()
            for metric in "loss/train", "loss/val":
                self.get("api/curves", metric=metric, x="tokens", run=self.run).read()


def train(folder, number):
    """
    Return the seconds that a training's steps took, as logged: without start, evaluations and
    checkpoints.
    """
    words = [f"--out_dir=out/{number}", f"--max_iters={steps}", "--init_from=scratch", *only.split()]
    done = subprocess.run([sys.executable, ROOT / "train.py", *words], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        fail(f"train.py {' '.join(words)}: {done.stderr.strip().splitlines()[-1]}")
    run = compare.read_run(folder / "out" / str(number))
    return float(sum(run.line("perf/iter_ms", "iter")[1][1:]))


def main():
    if not Path("/proc/self/stat").exists():
        fail("processor time is read from /proc: this measures on Linux")
    with tempfile.TemporaryDirectory() as name:
        folder, ratios, shares = Path(name), [], []
        (folder / "out").mkdir()
        train(folder, "first")  # prepares the data
        for n in range(rounds):
            alone = None if n % 2 else train(folder, f"alone{n}")
            with Watched(folder, f"out/watched{n}") as watched:
                beside = train(folder, f"watched{n}")
            ratios.append((alone or train(folder, f"alone{n}")) / beside)
            shares.append(watched.share)
            print(f"pair {n + 1}: speed watched / alone {ratios[-1]:.4f}; the page {shares[-1]:.2f} s of processor time a "
                  f"minute, {watched.events} live events", flush=True)
    print(f"median: {statistics.median(ratios):.4f}; the page {statistics.median(shares):.2f} s of processor time a minute")


if __name__ == "__main__":
    configure(globals())
    main()
