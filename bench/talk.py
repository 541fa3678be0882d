"""
Measure the page's model server over HTTP: tokens per second and latency with one client and with
many.

    python bench/models.py --shapes=15M --formats=f32,q8_0
    python bench/talk.py cache/bench/15M/q8_0.gguf

The clients and the server are two processes on the same cores. Every text is streamed. The numbers
of clients are measured in turns, so that other programs slow all of them alike.
"""
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from configurator import configure, fail

model = ""           # model file
clients = "1,16,64"  # numbers of concurrent clients, separated by commas; ratios refer to the first
max_tokens = 100     # max tokens of each text
samples = 5          # measurements of each number of clients; the table has their medians
prompt = "Once upon a time"
server = ""          # checkout whose server is measured, to compare versions; empty: this one

SERVE = """
import sys
from pathlib import Path
from page.server import Server
from page.talk import Talk
served = Server("127.0.0.1", 0, Talk(lambda: {"m": Path(sys.argv[1])}).routes())
print(served.server_address[1], served.token, flush=True)
served.serve_forever()
"""


def ask(port, token, n):
    """Stream text number n. Return (number of tokens, [seconds until each event of the stream])."""
    body = {"model": "m", "prompt": f"{prompt} {n}", "max_tokens": max_tokens, "seed": n + 1,
            "stream": True, "stream_options": {"include_usage": True}}
    begin = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", json.dumps(body),
                       {"Authorization": f"Bearer {token}"})
    last, times = None, []
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter() - begin)
            last = line
    connection.close()
    return json.loads(last[6:])["usage"]["completion_tokens"], times


def measure(port, token, n_clients):
    """
    Measure n_clients concurrent clients. Return (tokens/s of all clients, median and max seconds to
    the first token, median over the clients of the longest pause between two events in seconds).
    """
    found = []
    threads = [threading.Thread(target=lambda n=n: found.append(ask(port, token, n)))
               for n in range(n_clients)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    first = [times[0] for _, times in found]
    pauses = [max(b - a for a, b in zip(times, times[1:])) for _, times in found]
    return (sum(tokens for tokens, _ in found) / seconds, statistics.median(first), max(first),
            statistics.median(pauses))


def main():
    if not model:
        fail("expected a model file: bench/talk.py MODEL")
    command = [sys.executable, "-c", SERVE, Path(model).resolve()]
    process = subprocess.Popen(command, cwd=server or ROOT, stdout=subprocess.PIPE, text=True)
    try:
        port, token = process.stdout.readline().split()
        ask(int(port), token, 0)  # warm-up: opens the model
        rows = {int(n): [] for n in clients.split(",")}
        for _ in range(samples):
            for n, found in rows.items():
                found.append(measure(int(port), token, n))
        print("| clients | tokens/s of all | ratio | first token | slowest | longest pause |")
        print("| --- | --- | --- | --- | --- | --- |")
        least = None
        for n, found in rows.items():
            speed, *times = map(statistics.median, zip(*found))
            least = least or speed
            times = " | ".join(f"{1000 * t:.0f} ms" for t in times)
            print(f"| {n} | {speed:,.0f} | {speed / least:.2f} | {times} |")
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    configure(globals(), positional="model")
    main()
