"""
Measure how much page.py slows down a training that a browser watches. The same training runs alone
and watched, in turns.

    python bench/page.py                                         five pairs with the defaults
    python bench/page.py --rounds=9 --only="--dim=128"           add these options to train.py's

A reader makes the requests of a browser that shows one run: it receives the live events, and
fetches the run's details and two curves every ten seconds. The browser's drawing is not measured,
because it may happen on another machine. For each pair, the program prints the ratio of the speeds
watched and alone (at 0.99 the training keeps 99 % of its speed), and the CPU seconds that the page
uses per minute. The machine must be idle otherwise.
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

rounds = 5      # number of pairs: one training alone, one watched
steps = 1000    # steps of each training
only = ""       # more options for train.py

ROOT = Path(__file__).resolve().parents[1]


class Watched:
    """
    Context manager that runs page.py and a reader of one run for the duration of its block.

    folder: the working directory of page.py, whose subfolder "out" has the runs. run: path of the
    watched run, relative to `folder`. After the block, `events` is the number of live events about
    runs that the reader received, and `share` the CPU seconds that the page used per minute.
    """

    def __init__(self, folder, run):
        self.folder, self.run = folder, run
        self.ended, self.events = threading.Event(), 0

    def __enter__(self):
        command = [sys.executable, ROOT / "page.py", "out", "--port=0"]
        self.page = subprocess.Popen(command, cwd=self.folder, text=True, stdout=subprocess.PIPE)
        address = self.page.stdout.readline()
        self.port, self.token = re.search(r":(\d+)/\?token=(.+)", address).groups()
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
        """Return the CPU seconds that the page has used so far."""
        words = Path(f"/proc/{self.page.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def get(self, path, **query):
        """Request a path from the page; return the response."""
        connection = http.client.HTTPConnection("127.0.0.1", int(self.port), timeout=60)
        headers = {"Authorization": f"Bearer {self.token}"}
        connection.request("GET", f"/{path}?{urlencode(query)}", headers=headers)
        return connection.getresponse()

    def listen(self):
        """Receive the live events and count those about runs, until the block ends."""
        for line in self.get("api/live"):
            self.events += line.startswith(b"data: ") and b'"run"' in line
            if self.ended.is_set():
                return

    def look(self):
        """Fetch the run's details and two curves every ten seconds, until the block ends."""
        while not self.ended.wait(10):
            self.get("api/run", run=self.run).read()
            for metric in "loss/train", "loss/val":
                self.get("api/curves", metric=metric, x="tokens", run=self.run).read()


def train(folder, number):
    """
    Run train.py in `folder`, with out/NUMBER as its out_dir. Return the sum, in milliseconds, of
    the logged step times (perf/iter_ms) after the first row. These times leave out startup,
    evaluations and checkpoints.
    """
    words = [f"--out_dir=out/{number}", f"--max_iters={steps}", "--init_from=scratch",
             *only.split()]
    command = [sys.executable, ROOT / "train.py", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        fail(f"train.py {' '.join(words)}: {done.stderr.strip().splitlines()[-1]}")
    run = compare.read_run(folder / "out" / str(number))
    return float(sum(run.line("perf/iter_ms", "iter")[1][1:]))


def main():
    if not Path("/proc/self/stat").exists():
        fail("/proc/self/stat is missing, from which CPU time is read; run this on Linux")
    with tempfile.TemporaryDirectory() as name:
        folder, ratios, shares = Path(name), [], []
        (folder / "out").mkdir()
        train(folder, "first")  # warm-up: prepares the data
        for n in range(rounds):
            # Alternate which of the two runs first, to average out drifts of the machine's speed.
            alone = None if n % 2 else train(folder, f"alone{n}")
            with Watched(folder, f"out/watched{n}") as watched:
                beside = train(folder, f"watched{n}")
            if alone is None:
                alone = train(folder, f"alone{n}")
            ratios.append(alone / beside)
            shares.append(watched.share)
            print(f"pair {n + 1}: speed watched / alone {ratios[-1]:.4f}; the page uses "
                  f"{shares[-1]:.2f} s of CPU time per minute; {watched.events} live events",
                  flush=True)
    print(f"median: {statistics.median(ratios):.4f}; the page uses "
          f"{statistics.median(shares):.2f} s of CPU time per minute")


if __name__ == "__main__":
    configure(globals())
    main()
