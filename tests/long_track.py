"""Long test that tracking never stops a training (part of make test-long).

It injects each of four faults ten times, and prints the figures that doc/lab/tracking.md quotes.
"""
import os
import signal
import socket
import threading
import time

import pytest

from engine.tracking.process import children
from tests.test_track_online import TINY, folder, start  # noqa: F401 (folder is a fixture)
from tests.wandb_server import Server
from track import read_rows

ROUNDS = 10


def watch(process):
    """Read the trainer's stdout in a thread.

    Return a dictionary with its "lines" so far, and as "begin" the time of its line "train:", the
    last one before tracking starts.
    """
    seen = {"lines": []}

    def read():
        for line in process.stdout:
            seen["lines"].append(line)
            if line.startswith("train:"):
                seen["begin"] = time.monotonic()
    seen["thread"] = threading.Thread(target=read, daemon=True)
    seen["thread"].start()
    return seen


def kill_service(pid):
    """Kill the W&B client's service, a grandchild of the trainer."""
    for child in children(pid):
        for service in children(child):
            os.kill(service, signal.SIGKILL)


@pytest.mark.parametrize("fault", ["dead", "dies", "service", "hangs"])
def test_a_fault_neither_stops_nor_delays_the_training(folder, fault):  # noqa: F811
    """Inject a fault.

    dead: there is no server. dies: the server stops in the middle of the run. service: W&B's own
    process is killed. hangs: the server accepts connections and never answers.
    """
    delays = []
    for number in range(ROUNDS):
        silent = socket.create_server(("127.0.0.1", 0))
        server = Server() if fault in ("dies", "service") else None
        url = (server.url if server else "http://127.0.0.1:9" if fault == "dead"
               else f"http://127.0.0.1:{silent.getsockname()[1]}")
        out = f"{fault}{number}"
        process = start(folder, url, "train.py", *TINY, "--max_iters=1000000",
                        "--eval_interval=1000000", f"--out_dir={out}")
        seen, log = watch(process), folder / out / "log.jsonl"

        def wait_for(n):
            end = time.monotonic() + 120
            while not log.exists() or log.read_bytes().count(b"\n") < n:
                assert process.poll() is None and time.monotonic() < end, seen["lines"]
                time.sleep(0.005)

        wait_for(1)
        delays.append(time.monotonic() - seen["begin"])
        wait_for(30)
        if fault == "dies":
            server.stop()
        if fault == "service":
            kill_service(process.pid)
        wait_for(len(read_rows(log)) + 100)  # training continues
        process.kill()
        process.wait()
        silent.close()
        if fault == "service":
            server.stop()
        iters = [row["iter"] for row in read_rows(log)]
        assert iters == list(range(0, 5 * len(iters), 5))
    print(f"\n{fault}: {ROUNDS} times, no training stopped, no row missing after kill -9; "
          f"the start took {min(delays):.1f} to {max(delays):.1f} s")
    assert max(delays) <= 5
