"""
Measure the page's models over HTTP: tokens per second of one client and of several at once.

    python bench/talk.py out/demo/model.gguf

The clients and the server are two processes on the same cores. Every text is streamed.
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

model = ""         # model file
clients = 16       # clients at once
max_tokens = 100   # tokens of each text
samples = 5        # measurements; the table has their medians
prompt = "Once upon a time"
server = ""        # folder of another version that serves, to compare; empty: this one

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
    """Stream text number n. Return (tokens, seconds to the first one, seconds)."""
    body = {"model": "m", "prompt": f"{prompt} {n}", "max_tokens": max_tokens, "seed": n + 1,
            "stream": True, "stream_options": {"include_usage": True}}
    begin, first = time.perf_counter(), None
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", json.dumps(body),
                       {"Authorization": f"Bearer {token}"})
    last = None
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - begin
            last = line
    return (json.loads(last[6:])["usage"]["completion_tokens"], first,
            time.perf_counter() - begin)


def measure(port, token, n_clients):
    """Return (tokens/s of all, mean seconds to the first token) of clients at once."""
    found = []
    threads = [threading.Thread(target=lambda n=n: found.append(ask(port, token, n)))
               for n in range(n_clients)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    return (sum(tokens for tokens, _, _ in found) / seconds,
            statistics.mean(first for _, first, _ in found))


def main():
    if not model:
        fail("expected a model file: bench/talk.py MODEL")
    command = [sys.executable, "-c", SERVE, Path(model).resolve()]
    process = subprocess.Popen(command, cwd=server or ROOT, stdout=subprocess.PIPE, text=True)
    try:
        port, token = process.stdout.readline().split()
        ask(int(port), token, 0)  # opens the model
        print("| clients | tokens/s of all | first token |\n| --- | --- | --- |")
        for n in 1, clients:
            rows = [measure(int(port), token, n) for _ in range(samples)]
            speed, first = map(statistics.median, zip(*rows))
            print(f"| {n} | {speed:,.0f} | {1000 * first:.0f} ms |", flush=True)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    configure(globals(), positional="model")
    main()
