"""The page: its server, its views of runs, its queue, and all of it in a browser."""
import base64
import contextlib
import fcntl
import http.client
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import numpy as np
import pytest
from axe_selenium_python import Axe
from selenium import webdriver
from selenium.common.exceptions import WebDriverException

import compare
from configurator import fail, source_knobs
from engine.text import yardsticks
from engine.tracking import anomalies
from engine.tracking import runs as logs
from page import command, jobs, locks, programs, run_api, runs, server, state, system
from page.programs import OneAtATime
from tests.conftest import usual

ROOT = Path(__file__).resolve().parents[1]


class Page:
    """page.py in a process of its own, and a client that knows its token."""

    def __init__(self, folder, *words, home=ROOT):
        self.process = subprocess.Popen(
            [sys.executable, str(home / "page.py"), "--port=0", *words], cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.url = self.process.stdout.readline().split()[1]
        self.port, self.token = re.search(r":(\d+)/\?token=(.+)", self.url).groups()
        self.port = int(self.port)

    def ask(self, path, body=None, token=True, method=None, **headers):
        """Return (status, headers, text) of a request. Header names have _ in place of -."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        headers |= {"Cookie": f"llamac_{self.port}={self.token}"} if token else {}
        content = body if isinstance(body, (bytes, type(None))) else json.dumps(body)
        connection.request(method or ("GET" if body is None else "POST"), path, content, headers)
        answer = connection.getresponse()
        found = answer.status, answer.headers, answer.read().decode()
        connection.close()
        return found

    def get(self, path, body=None):
        status, _, text = self.ask(path, body)
        assert status == 200, text
        return json.loads(text)

    def raw(self, data, wait=3.0):
        """Return the server's answer to these bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait) as s:
            with contextlib.suppress(OSError):
                s.sendall(data)
            found = b""
            with contextlib.suppress(OSError):
                while piece := s.recv(65536):
                    found += piece
        return found

    def end(self):
        self.process.terminate()  # not SIGINT: the background jobs of a shell script ignore it
        return self.process.communicate(timeout=20)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    found = Page(tmp_path_factory.mktemp("page"))
    yield found
    found.end()


def test_memory_is_counted_in_gib(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text(
        "MemTotal:       16777216 kB\nMemFree:         1048576 kB\n"
        "MemAvailable:    4194304 kB\nHugePages_Total:       0\n")
    monkeypatch.setattr(system, "Path", lambda name: tmp_path / Path(name).name)
    assert system.memory() == [12.0, 16.0]


def test_the_load_of_gpus_is_that_of_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert system.gpus() == []  # PATH has no nvidia-smi
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'NVIDIA H100, 97, 1024, 81559'\necho 'NVIDIA H100, 0, 4, 81559'\n")
    program.chmod(0o755)
    assert system.gpus() == [["NVIDIA H100", "97", "1024", "81559"],
                             ["NVIDIA H100", "0", "4", "81559"]]


def test_the_printed_address_sets_a_cookie_and_only_the_token_opens_the_page(page):
    status, headers, text = page.ask(f"/?token={page.token}", token=False)
    cookie = headers["Set-Cookie"]
    assert status == 200
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert page.token not in text
    assert page.ask("/", token=False, Cookie=cookie.split(";")[0])[0] == 200
    # Browsers also send the cookies of other programs on this machine, however they are written.
    for other in 'prefs={"a":1}', "n=a b", "u[1]=x", "mode", "=":
        both = f"{other}; {cookie.split(';')[0]}; theme=dark"
        assert page.ask("/", token=False, Cookie=both)[0] == 200, other
    assert page.ask("/", token=False, Authorization=f"Bearer {page.token}")[0] == 200
    policy = page.ask("/")[1]["Content-Security-Policy"]
    assert "script-src 'self';" in policy
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy


def attacks(page):
    """Yield (name, bytes) of requests that must be refused."""
    host, good = f"Host: 127.0.0.1:{page.port}", f"Cookie: llamac_{page.port}={page.token}"
    bad = page.token[:-1] + ("a" if page.token[-1] != "a" else "b")

    def get(path="/app.js", *lines, method="GET", first=None, rest=b""):
        return "\r\n".join([first or f"{method} {path} HTTP/1.1", *lines, "", ""]).encode() + rest

    yield "no token", get("/", host)
    yield "wrong token", get(f"/?token={bad}", host)
    yield "empty token", get("/?token=", host)
    yield "part of a token", get(f"/?token={page.token[:-1]}", host)
    yield "token twice", get(f"/?token={page.token}&token=x", host)
    yield "token where it does not open", get(f"/app.js?token={page.token}", host)
    yield "wrong cookie", get("/", host, f"Cookie: llamac_{page.port}={bad}")
    yield "cookie of another port", get("/", host, f"Cookie: llamac_1={page.token}")
    yield "odd cookie", get("/", host, "Cookie: \x00=;;;=\xff")
    yield "bearer wrong", get("/", host, f"Authorization: Bearer {bad}")
    yield "basic", get("/", host, f"Authorization: Basic {page.token}")
    yield "token not ASCII", get("/?token=%C3%A9%FF", host)
    for name in ("evil.example", "evil.example:80", f"127.0.0.1.evil.example:{page.port}",
                 "localhost.evil.example", "10.0.0.1", "[::ffff:10.0.0.1]", "127.0.0.1:99999",
                 "127.0.0.1@evil.example", "", "[", "localhost\t.evil.example"):
        yield f"Host {name!r}", get("/", f"Host: {name}", good)
    yield "no Host", get("/", good)
    yield "Host twice", get("/", host, "Host: evil.example", good)
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{page.port}",
                   "http://127.0.0.1:1", "http://localhost",
                   f"http://127.0.0.1:{page.port}.evil.example", ""):
        yield f"Origin {origin!r}", get("/", host, good, f"Origin: {origin}")
    for site in ("cross-site", "same-site", "other"):
        yield f"Sec-Fetch-Site {site}", get("/app.js", host, good, f"Sec-Fetch-Site: {site}")
    for path in ("/../page.py", "/..%2fpage.py", "/%2e%2e/page.py", "//etc/passwd",
                 "/page/../../etc/passwd", "/etc/passwd", "/static/../server.py", "/server.py",
                 "/app.js/", "/app.js%00", "/./app.js", "/%61pp.js", "/app.js;x", "\\app.js",
                 "http://evil.example/etc/passwd", "file:///etc/passwd", "/" + "a" * 5000,
                 "/~/.netrc", "/.env", "*"):
        yield f"path {path[:40]}", get(path, host, good)
    yield "other method", get("/", host, good, method="PUT")
    yield "CONNECT", get("evil.example:443", host, good, method="CONNECT")
    yield "POST where there is only GET", get("/app.js", host, good, "Content-Length: 0",
                                              method="POST")
    yield "100 MB", get("/", host, good, f"Content-Length: {100 << 20}", method="POST",
                        rest=b"x" * 70000)
    yield "negative length", get("/", host, good, "Content-Length: -1", method="POST")
    yield "odd length", get("/", host, good, "Content-Length: ٣", method="POST")
    yield "a length of 5,000 digits", get("/", host, good, f"Content-Length: {'9' * 5000}",
                                          method="POST", rest=b"x")
    yield "a length of zeros", get("/", host, good, f"Content-Length: {'0' * 5000}5", method="POST",
                                   rest=b"hello")
    yield "two lengths", get("/", host, good, "Content-Length: 0", "Content-Length: 5",
                             method="POST", rest=b"GET /")
    yield "chunks", get("/", host, good, "Transfer-Encoding: chunked", method="POST",
                        rest=b"5\r\nhello\r\n0\r\n\r\n")
    yield "a long header", get("/", host, good, "X: " + "y" * 70000)
    yield "many headers", get("/", host, good, *(f"X{n}: y" for n in range(200)))
    yield "a long line", get(first="GET /" + "a" * 70000 + " HTTP/1.1")
    yield "no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"
    yield "HTTP/3.0", get(first="GET / HTTP/3.0")
    yield "no version", b"GET /\r\n\r\n"


def test_attacks_are_refused_and_the_server_goes_on(page):
    found = list(attacks(page))
    assert len(found) >= 60
    for name, data in found:
        answer = page.raw(data)
        assert not re.match(rb"HTTP/1\.1 2", answer), (name, answer[:300])
        assert page.token.encode() not in answer and b"Traceback" not in answer, name
    assert page.ask("/")[0] == 200 and page.process.poll() is None


def test_a_refused_request_is_told_why(page):
    found = dict(attacks(page))
    for name, status, words in [("chunks", 411, "one Content-Length header"),
                                ("two lengths", 411, "one Content-Length header"),
                                ("a length of zeros", 413, "at most 1,048,576 bytes"),
                                ("POST where there is only GET", 405, "POST is not allowed"),
                                ("other method", 501, "Unsupported method"),
                                ("many headers", 431, "Too many headers")]:
        head, _, body = page.raw(found[name]).decode().partition("\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} "), (name, head, body)
        assert words in json.loads(body)["error"], (name, head, body)


def test_slow_and_many_connections_do_not_block_the_user(page):
    slow = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(150)]
    for connection in slow:
        with contextlib.suppress(OSError):
            connection.sendall(b"GET / HTTP/1.1\r\n")
    since = time.monotonic()
    assert page.ask("/")[0] == 200 and time.monotonic() - since < usual(8)
    assert not Path("/proc").exists() or threads(page) <= 110
    for connection in slow:
        connection.close()


def threads(page):
    return len(os.listdir(f"/proc/{page.process.pid}/task"))


# ---- runs ----------------------------------------------------------------------------------------

EVIL = '<img src=x onerror="window.hacked=1">'
SETTINGS = {
    "data": "t.txt", "vocab_source": "byte", "dim": 16, "n_layers": 1, "n_heads": 2,
    "max_seq_len": 16, "batch_size": 2, "eval_interval": 20, "eval_iters": 1, "log_interval": 2,
    "warmup_iters": 2, "max_iters": 100000}


def write_run(folder, number=0, rows=60, **config):
    """
    Write a run as train.py does, with a falling loss. `number` is its seed; each unit of it adds
    0.1 to the loss and 0.001 to the learning rate.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"dim": 64, "seed": number, "learning_rate": 0.001 * (number + 1),
                "max_iters": 10 * rows, "sample_prompt": EVIL} | config
    (folder / "config.json").write_text(json.dumps(settings))
    for i in range(rows):
        row = {"iter": 10 * i, "tokens": 1000 * i, "loss/train": 5 / (1 + i / 10) + number / 10,
               "time": 1e9 + i}
        if i % 10 == 0:
            row |= {"loss/val": row["loss/train"] + 0.1, "samples": [[EVIL, "greedily", EVIL]],
                    "predictions": [["val", EVIL, "b", 0.5, EVIL, 0.1, "d", 0.1, "e", 0.1]],
                    f"x/{EVIL}": 1.0}
        add_row(folder, row)


def add_row(folder, row):
    with open(folder / "log.jsonl", "a") as f:
        f.write(json.dumps(row) + "\n")


def points(found):
    """Return {run: (xs, ys)} from a response of /api/curves."""
    xs, ys = (np.frombuffer(base64.b64decode(found[axis]), "<f4") for axis in "xy")
    ends = np.cumsum([n for _, n, _, _ in found["runs"]])
    return {name: (xs[end - n:end], ys[end - n:end])
            for (name, n, _, _), end in zip(found["runs"], ends)}


def end_jobs(folder):
    """Kill the jobs that a test has started."""
    path = state.state_folder(folder / "out") / "jobs.json"
    for job in json.loads(path.read_text())["jobs"] if path.exists() else []:
        with contextlib.suppress(OSError, KeyError):
            os.killpg(job["pid"], signal.SIGKILL)


def until(what, seconds=200):
    """Return what() once it is true. An element that is missing on the page counts as false."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(WebDriverException, IndexError):
            if found := what():
                return found
        time.sleep(0.05)
    raise AssertionError(f"not true within {seconds} s")


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("filled")
    for n in range(4):
        write_run(folder / "out" / ("a", "b", f"sweep/{EVIL.replace('/', '')}", "d")[n], n,
                  dim=32 if n < 2 else 64)
    found = Page(folder)
    found.folder = folder
    yield found
    out, err = found.end()
    assert "Traceback" not in err and "trainings go on" in out


def test_the_table_equals_the_one_of_compare_py(filled):
    found = filled.get("/api/runs")
    done = subprocess.run([sys.executable, str(ROOT / "compare.py"), "--single"], cwd=filled.folder,
                          capture_output=True, text=True).stdout
    rows = [re.split("  +", line) for line in done.splitlines()]
    assert rows[0] == ["run", *found["columns"], *found["settings"]]
    mine = {run["name"]: {**run["settings"], **run["results"]} for run in found["runs"]}
    assert len(rows) == 5
    for row in rows[1:]:
        assert row[1:] == [compare.text(mine[row[0]][name]) for name in rows[0][1:]]
    status, headers, text = filled.ask("/api/save", {"runs": ["out/a", "out/b"]})
    subprocess.run([sys.executable, str(ROOT / "compare.py"), "out/a", "out/b", "--plot=x.html"],
                   cwd=filled.folder, check=True, capture_output=True)
    assert status == 200
    assert text == (filled.folder / "x.html").read_text()
    assert not list(filled.folder.glob("out/.page/saved*"))


def test_curves_have_the_logged_values_and_thinned_curves_keep_their_peaks(filled):
    xs, ys = points(filled.get("/api/curves?metric=loss/train&x=tokens"))["out/b"]
    assert xs.tolist() == [1000 * i for i in range(60)]
    assert ys == pytest.approx([5 / (1 + i / 10) + 0.1 for i in range(60)])
    assert points(filled.get("/api/curves?metric=loss/val&x=seconds&run=out/a"))[
        "out/a"][0].tolist() == [0, 10, 20, 30, 40, 50]
    assert len(points(filled.get("/api/curves?metric=loss/train&x=iter&from=100&to=200"))[
        "out/a"][0]) == 13
    rng = np.random.default_rng(0)
    x, y = np.arange(2000.0), rng.random(2000)
    y[777], y[1234], y[5] = 9, -9, math.nan
    there = np.isfinite(y)
    few, values = compare.thin(x[there], y[there], 100)
    assert len(few) <= 202
    assert {777, 1234, 0, 1999} <= set(few)
    assert list(few) == sorted(few)
    assert np.isfinite(values).all()
    both = {"metric": "loss/train", "x": "iter", "from": 100,
            "groups": [["out/a", "out/b"], [], ["none", ["x"]]]}
    (x, mean, low, high), *empty = filled.get("/api/bands", both)
    assert x[0] == 90
    assert x[-1] == 590
    assert mean[-1] == pytest.approx(5 / 6.9 + 0.05)
    assert empty == [[[]] * 4] * 2
    assert len(x) == 51 and np.subtract(high, low) == pytest.approx([0.1] * 51, abs=1e-5)
    assert (filled.ask("/api/bands", {"groups": 3})[0]
            == filled.ask("/api/bands", {"groups": [3]})[0] == 400)
    status, headers, text = filled.ask("/api/csv?metric=loss/val")
    assert status == 200 and text.count("\n") == 1 + 4 * 6 and '"out/a",0,0,0.000,5.1' in text


def test_a_long_log_has_a_preview_until_it_is_read(tmp_path):
    write_run(tmp_path / "out/long", rows=6000)
    found = runs.Runs(tmp_path / "out")
    found.search()
    glance, = found.shown()
    assert 48 <= glance.count <= 49
    assert glance.metrics["iter"] == 59990
    assert glance.x("iter").tolist() == sorted(glance.x("iter"))
    assert len(glance.line("loss/val", "iter")[0]) >= 24 and not found.runs[glance.name].count
    assert found.refresh(0) and found.shown() == [glance]
    while found.refresh(1):
        pass
    run, = found.shown()
    assert run.count == 6000
    assert run.results() | {"minutes": 0} == glance.results() | {
        "minutes": 0,
        **{name: value for name, value in run.results().items()
           if "best" in name or "last" in name or "val" in name}}


def test_malformed_rows_and_settings_do_not_break_the_table(filled):
    rows = [{f"m{n}": n for n in range(2000)} | {"loss/val": 1.0, "iter": 5},
            {"iter": 6, "loss/val": [1]}, {"iter": True},
            {"iter": 1e308, "time": 1e308, "loss/val": {}, "tokens": "x"},
            {"iter": 7, "loss/train": "nan"}]
    for n in range(len(rows)):
        write_run(filled.folder / f"out/odd{n}", rows=0,
                  max_iters=[math.nan, "x", None, [math.inf], {"a": math.nan}][n])
        for row in rows[n:] + rows[:n]:
            add_row(filled.folder / f"out/odd{n}", row)
    assert until(lambda: sum(run["rows"] == 5 for run in filled.get("/api/runs")["runs"]) == 5)
    status, _, text = filled.ask("/api/runs")
    assert status == 200 and "NaN" not in text and "Infinity" not in text
    for metric in "loss/val", "loss/train", "iter", "m3":
        for axis in "iter", "tokens", "seconds":
            filled.get(f"/api/curves?{urlencode({'metric': metric, 'x': axis})}")
    for n in range(len(rows)):
        assert "NaN" not in filled.ask(f"/api/run?run=out/odd{n}")[2]
        shutil.rmtree(filled.folder / f"out/odd{n}")
    until(lambda: not any("odd" in run["name"] for run in filled.get("/api/runs")["runs"]))


def compared(folder):
    """
    Write six runs of one text with different vocabularies, and two runs of another program. From
    v0 to v5 the loss per token rises while the bits per byte fall. The other settings are equal,
    except `odd`, which is 0, 1 and then 7.
    """
    for n in range(6):
        meta = {"tokenizer_sha256": str(n), "train_tokens": 1000, "train_bytes": 1000 * (n + 1),
                "val_bytes": 500}
        write_run(folder / f"v{n}", rows=0, vocab_source="custom", vocab_size=100 * n, dataset=meta,
                  seed=1, learning_rate=0.1, max_iters=600, odd=n if n < 2 else 7)
        for i in range(60):
            loss = (2 + n) * (1 + 1 / (1 + i))
            row = {"iter": 10 * i, "tokens": 1000 * i, "loss/train": loss, "time": 1e9 + i,
                   "perf/tokens_per_sec": 71852.4 if i % 20 else 5000.0}
            if i % 10 == 0:
                row |= {"loss/val": loss, "bpb/val": loss / (1 + n)}
            if i % 10 == 0 and n == 0:  # the model memorizes the text
                row |= {"loss/train_eval": loss / 2, "epoch": i}
            if i == 0:
                row |= {"yardstick/chance": 9.0 - n, "yardstick/unigram": 4.0,
                        "yardstick/gzip": 2.01, "yardstick/xz": 2.0}
            add_row(folder / f"v{n}", row)
    for n in range(2):
        (folder / f"other{n}").mkdir()
        (folder / f"other{n}/config.json").write_text(json.dumps({"epochs": 3 + n}))
        for i in range(6):
            add_row(folder / f"other{n}",
                    {"iter": i, "accuracy": 0.1 * i + n, "loss/train": 0.5, "time": 1e9 + i})


def test_different_vocabularies_compare_by_bits_per_byte(tmp_path):
    compared(tmp_path / "out")
    found = run_api.RunApi(runs.Runs(tmp_path / "out")).table(None)
    assert found["metric"] == "bpb/val"
    assert found["sort"] == "best bpb/val"
    assert not found["descending"]
    assert found["vocabularies_differ"]
    assert [run["name"][-6:] for run in found["runs"] if run["foreign"]] == ["other0", "other1"]
    assert set(found["settings"]) == {"vocab_size", "text_bytes", "odd", "epochs"}
    for n in range(6):
        shutil.rmtree(tmp_path / f"out/v{n}")
    found = run_api.RunApi(runs.Runs(tmp_path / "out")).table(None)
    assert found["metric"] == found["sort"] == "loss/train" and not found["vocabularies_differ"]
    (tmp_path / "none").mkdir()
    assert run_api.RunApi(runs.Runs(tmp_path / "none")).table(None)["runs"] == []


def test_runs_that_differ_in_the_seed_alone_are_a_group(tmp_path):
    """The groups and their figures equal those of compare.py; the table still lists each run."""
    for n in range(5):
        write_run(tmp_path / f"out/{'ab'[n > 2]}-seed{n}", n, vocab_source="byte",
                  learning_rate=0.1 * (n > 2), max_iters=600)
    found = run_api.RunApi(runs.Runs(tmp_path / "out")).table(None)
    done = subprocess.run([sys.executable, str(ROOT / "compare.py"), "--json"], cwd=tmp_path,
                          capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout)["groups"]
    assert [group["n"] for group in theirs] == [3, 2]
    assert len(found["runs"]) == 5
    assert found["metric"] == "loss/val"
    for mine, its in zip(found["groups"], theirs):
        assert ([mine[name] for name in ("n", "mean", "sd", "best")]
                == [its[name] for name in ("n", "mean", "sd", "best")])
        assert ([Path(name).name for name in mine["runs"]]
                == [Path(run["run"]).name for run in its["runs"]])
        assert mine["name"].endswith(its["group"])
        assert mine["results"]["best loss/val"] == pytest.approx(its["mean"])
        assert mine["settings"] == {"learning_rate": its["settings"]["learning_rate"]}
    assert found["settings"] == ["seed", "learning_rate"]


def test_the_time_left_is_that_of_the_clock_or_of_the_steps(tmp_path, monkeypatch):
    """The session begins at 1000 s and takes one step per second from 1010 s; now is 1030 s."""
    monkeypatch.setattr(run_api, "time", SimpleNamespace(time=lambda: 1030.0))
    write_run(tmp_path, rows=0)
    for settings, before, left, share, clock in (
            ({"max_iters": 50}, [], 30, 0.4, ""),
            ({"max_iters": 50, "minutes": 1}, [], 30, 0.4, ""),
            ({"max_iters": 5000, "minutes": 1}, [], 30, 0.5, "minutes"),
            ({"max_iters": 5000, "max_minutes": 1}, [], 40, 1 / 3, "max_minutes"),
            # 10 s of training in an earlier session and 20 s in this one.
            ({"max_iters": 5000, "minutes": 1}, range(10, 20), 30, 0.5, "minutes"),
            ({"max_iters": 5000, "max_minutes": 0.1}, [], 0, 1, "max_minutes"),
            ({"max_iters": "x"}, [], None, 0, "")):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        rows = [{"iter": i - len(before), "time": t}
                for i, t in enumerate([*before, *range(1010, 1031)])]
        (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "trainer.json").touch()
        os.utime(tmp_path / "trainer.json", (1000, 1000))
        run = compare.Run(tmp_path)
        run.read()
        run.results()
        found = run_api.time_left(run)
        if left is None:
            assert found is None
        else:
            assert found["left"] == pytest.approx(left, abs=1.1)
            assert found["share"] == pytest.approx(share, abs=0.03)
            assert found["clock"] == clock
    (tmp_path / "trainer.json").unlink()
    assert run_api.time_left(run) is None


def test_why_a_run_ended_is_that_of_its_last_session(tmp_path):
    write_run(tmp_path, rows=3)
    run = compare.Run(tmp_path)
    run.read()
    for content, words in (('{"iter": 20, "ended_by": "early_stop"}', "early_stop"),
                           ('{"iter": 10, "ended_by": "signal"}', ""), ("[1]", ""), ("{", "")):
        (tmp_path / "result.json").write_text(content)
        assert run_api.ended_by(run) == words
    (tmp_path / "result.json").unlink()
    assert run_api.ended_by(run) == ""


def test_alerts_of_a_kind_are_counted_together(monkeypatch):
    monkeypatch.setattr(run_api, "MAX_ALERTS", 2)
    losses = np.array([1.0] * 12 + [50.0] + [1.0] * 60 + [60.0] + [1.0] * 60 + [70.0, math.inf])
    jumps, infinite = run_api.alerts(["iter", "loss/val"], [np.arange(len(losses)), losses])
    assert jumps[:2] == ["{name} jumps", 3]
    assert [values["value"] for _, values in jumps[2]] == ["60", "70"]
    assert infinite == ["{name} is {value}", 1, [
        ["at iter {iter}", {"name": "loss/val", "value": "inf", "iter": "135"}]]]


def test_data_that_does_not_exist_is_refused_before_it_is_queued(filled):
    for data in "nowhere.txt", "/none/x", "storie":
        status, _, text = filled.ask("/api/start", {"knobs": {"data": data}})
        assert status == 400 and "no such file; expected stories, " in text
    for data in "stories", "stories:200", "tinystories", ".", __file__:
        command.refuse_missing(data)
    assert filled.get("/api/jobs") == {"jobs": []}


def test_paths_are_completed(filled):
    for name in ("texts/a b.txt", "texts/ab.txt", "texts/b.txt", "texts/.abc", "texts/abc/x",
                 "texts/a\udcff"):
        (filled.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (filled.folder / name).touch()
    ask = lambda start: filled.get(f"/api/paths?{urlencode({'start': start})}")["paths"]
    assert ask("te") == ["texts/"]
    assert ask("texts/ab") == ["texts/ab.txt", "texts/abc/"]
    assert ask(f"{filled.folder}/texts/b") == [f"{filled.folder}/texts/b.txt"]
    assert ask("texts/a") == ["texts/a b.txt", "texts/ab.txt", "texts/abc/", "texts/a\udcff"]
    assert ask("none/x") == ask("texts/x") == ask("texts/b.txt/") == ask("a\0/") == []


def test_new_rows_are_live_events_and_a_rewritten_log_is_read_again(filled):
    folder = filled.folder / "out/live"
    write_run(folder, 3, rows=20)
    until(lambda: 20 in {run["rows"] for run in filled.get("/api/runs")["runs"]
                         if run["name"] == "out/live"})
    connection = http.client.HTTPConnection("127.0.0.1", filled.port, timeout=30)
    connection.request("GET", "/api/live", headers={"Authorization": f"Bearer {filled.token}"})
    stream = connection.getresponse()

    def event(name):
        for line in stream:
            if line.startswith(b"data: ") and name in (found := json.loads(line[6:])):
                return found

    assert event("hello")
    with open(folder / "log.jsonl", "a") as f:
        f.write('{"iter": 200, "tokens": 20000, "loss/tr')
        f.flush()
        time.sleep(1)
        f.write('ain": 1.25, "time": 1000000020}\n')
    since, found = time.monotonic(), event("run")
    assert found["from"] == 20
    assert found["rows"]["loss/train"] == [1.25]
    assert found["rows"]["seconds"] == [20.0]
    assert time.monotonic() - since < usual(5)
    (folder / "log.jsonl").write_text(
        '{"iter": 0, "tokens": 0, "loss/train": NaN}\n7\n{"iter": "x"}\n'
        '{"iter": 10, "loss/train": 2}\n')
    assert event("again")["run"]["rows"] == 2
    assert points(filled.get("/api/curves?metric=loss/train&x=iter"))[
        "out/live"][1].tolist() == [2.0]
    connection.close()


def test_live_events_report_that_a_training_begins_and_ends(tmp_path):
    write_run(tmp_path / "out/a", rows=3)
    mark = tmp_path / "out/a/trainer.json"
    mark.write_text(
        json.dumps({"made_by": "llamac", "pid": os.getpid(), "host": socket.gethostname()[:64]}))
    told = (event for _, event
            in zip(range(5), run_api.RunApi(runs.Runs(tmp_path / "out")).live(None)) if event)
    assert next(told) == {"hello": True}
    with open(mark) as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        begun = next(told)
    ended = next(told)
    assert [(e["run"]["training"], e["from"], e["run"]["rows"]) for e in (begun, ended)] == [
        (True, 3, 3), (False, 3, 3)]


def test_live_events_report_the_queue_once_and_after_each_change(tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=itertools.count().__next__, sleep=lambda seconds: None)
    for module in runs, run_api:
        monkeypatch.setattr(module, "time", clock)
    (tmp_path / "out").mkdir()
    queue = [1]
    told = run_api.RunApi(runs.Runs(tmp_path / "out"), lambda: {"queue": list(queue)}).live(None)
    assert [next(told), next(told)] == [{"hello": True}, {"queue": [1]}]
    queue.append(2)
    assert next(told) == {"queue": [1, 2]}
    assert next(told) is None  # after five seconds without news


def test_names_of_unknown_runs_and_malformed_forms_are_refused(filled):
    (filled.folder / "secret").mkdir()
    write_run(filled.folder / "secret", 1)
    for name in ("../secret", "secret", str(filled.folder / "secret"), "out/../secret", "out/a/",
                 "", "a", "out/a\0", "\ud800"):
        assert filled.ask(
            f"/api/run?{urlencode({'run': name.encode('utf-8', 'surrogatepass')})}")[0] == 400
        assert filled.ask("/api/notes", {"run": name, "notes": "x"})[0] == 400
        assert filled.ask("/api/stop", {"run": name})[0] == 400
        assert filled.ask("/api/save", {"runs": [name]})[0] == 400
    for knobs in ({"nope": 1}, {"dim": "wide"}, {"dim": "1;rm"}, {"--dim": 3}, {"dim\0": 3},
                  {"data": "a\0b"}, {"wandb_log": "maybe"}):
        assert filled.ask("/api/start", {"knobs": knobs})[0] == 400, knobs
    for body in (b"", b"[]", b"{", b"[" * 100000, b'{"preset": "../train.py"}', b'{"knobs": 3}',
                 b'{"sweep": {"parameters": {"x": {}}}}',
                 b'{"sweep": {"parameters": {"dim": {"values": 3}}}}', b'{"preset": [1]}'):
        assert filled.ask("/api/start", body)[0] == 400, body[:40]
    assert filled.ask("/api/curves?metric=loss/val&from=x")[0] == 400
    assert filled.ask("/api/console?job=1/../x")[0] == 400
    found = filled.get("/api/line", {"knobs": {"data": "$(id) '\"; & <b>", "dim": 32},
                                     "preset": "debug.py"})["line"]
    assert shlex.split(found)[2:] == [os.path.relpath(ROOT / "config/debug.py", filled.folder),
                                      "--data=$(id) '\"; & <b>", "--dim=32"]
    assert filled.get("/api/jobs") == {"jobs": []}


def test_each_sweep_has_its_own_file(tmp_path):
    page = Page(tmp_path)
    kept = []
    for name, dims in ("jobs", [32, 64]), ("jobs", [32, 96]), ("other", [32]):
        form = {"knobs": {"out_dir": f"out/{name}"},
                "sweep": {"parameters": {"dim": {"values": dims}}}}
        words = shlex.split(page.get("/api/line", form)["line"])
        kept.append((next(word for word in words if word.endswith(".json")), dims))
    folders = [
        shlex.split(
            page.get("/api/line", {"sweep": {"parameters": {"dim": {"values": dims}}}})["line"])[-1]
        for dims in ([32], [64], [32])]
    assert folders[0] == folders[2] != folders[1]
    assert all("--out_dir=" in word and "/sweep-" in word for word in folders)
    assert page.get("/api/jobs") == {"jobs": []}
    assert len({path for path, _ in kept}) == 3
    assert all(json.loads((tmp_path / path).read_text())["parameters"]["dim"]["values"] == dims
               for path, dims in kept)
    page.end()


def test_a_foreign_folder_of_runs_starts_nothing_and_is_not_written_to(tmp_path):
    """Its .page folder has a queue, and links in place of console, lock and sweep files."""
    write_run(tmp_path / "out/a", rows=3)
    theirs, mine, started = tmp_path / "out/.page", tmp_path / "mine.txt", tmp_path / "started"
    theirs.mkdir()
    mine.write_text("mine")
    evil = f"open({str(started)!r}, 'w').close()"
    for name in "evil.py", "train.py":
        (tmp_path / name).write_text(evil)
    jobs_of = [{"program": str(tmp_path / "evil.py"), "arguments": []},
               {"program": "../../evil.py", "arguments": []},
               {"program": "train.py", "arguments": [str(tmp_path / "evil.py")]},
               {"program": "train.py", "arguments": [], "id": "../../mine"},
               {"program": "sweep.py", "arguments": ["s.json"]}]
    queue = [{"id": str(n), "state": "queued", "out_dir": "x", "line": ""} | job
             for n, job in enumerate(jobs_of, 1)]
    (theirs / "jobs.json").write_text(json.dumps({"at_once": 9, "jobs": queue}))
    for name in "1.txt", "2.txt", "lock", "sweep-000000000000.json":
        (theirs / name).symlink_to(mine)
    (theirs / "notes.json").write_text(json.dumps({
        "out/a": {"notes": "old", "tags": 3, "color": "red;}", "rows": "x"}, "out/b": 7}))
    stamps = lambda: {path: path.lstat().st_ctime_ns for path in tmp_path.rglob("*")}
    before = stamps()
    page = Page(tmp_path)
    time.sleep(1)
    assert page.get("/api/jobs") == {"jobs": []}
    run, = page.get("/api/runs")["runs"]
    assert run["rows"] == 3 and run["notes"] == "old" and "tags" not in run and "color" not in run
    page.get("/api/notes", {"run": "out/a", "tags": "good"})
    run, = page.get("/api/runs")["runs"]
    assert run["notes"] == "old" and run["tags"] == "good"
    out, err = page.end()
    assert "a queue in a folder of runs is not started" in err and err.count("\n") == 1
    assert not started.exists() and mine.read_text() == "mine" and stamps() == before
    assert (state.state_folder(tmp_path / "out").stat().st_mode & 0o77) == 0


def test_no_note_of_the_user_is_lost(tmp_path):
    """Notes that are too long are refused, and an unreadable notes file is left unchanged."""
    write_run(tmp_path / "out/a", rows=3)
    page, path = Page(tmp_path), state.state_folder(tmp_path / "out") / "notes.json"
    page.get("/api/notes", {"run": "out/a", "notes": "x" * 5000})
    kept = path.read_text()
    assert page.ask("/api/notes", {"run": "out/a", "notes": "x" * 5001})[0] == 400
    assert path.read_text() == kept
    for content in kept[:-9], "[]":
        path.write_text(content)
        status, _, text = page.ask("/api/notes", {"run": "out/a", "tags": "good"})
        assert status == 400
        assert "notes.json: cannot be read" in text
        assert path.read_text() == content
        assert len(page.get("/api/runs")["runs"]) == 1
    path.unlink()
    page.get("/api/notes", {"run": "out/a", "tags": "good"})
    assert json.loads(path.read_text()) == {"out/a": {"tags": "good"}}
    page.end()


def test_a_read_only_folder_of_runs_is_shown(tmp_path):
    write_run(tmp_path / "out/a", rows=3)
    for path in tmp_path / "out/a", tmp_path / "out":
        path.chmod(0o555)
    page = Page(tmp_path)
    # A loaded machine takes longer to read the log.
    until(lambda: page.get("/api/runs")["runs"][0]["rows"] == 3, 20)
    page.end()
    (tmp_path / "file").touch()
    for words, env, said in ((["file"], {}, "expected a folder of runs"),
                             ([], {"XDG_STATE_HOME": "/dev/null/x"}, "set XDG_STATE_HOME")):
        done = subprocess.run([sys.executable, ROOT / "page.py", "--port=0", *words], cwd=tmp_path,
                              capture_output=True, text=True, env=os.environ | env, timeout=60)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_training_outlives_the_page_and_the_next_page_stops_and_resumes_it(tmp_path, request):
    (tmp_path / "t.txt").write_text("To be or not to be, that is the question.\n" * 400)
    page = Page(tmp_path)
    page.get("/api/start", {"knobs": SETTINGS | {"out_dir": "out/mine"}})
    request.addfinalizer(lambda: end_jobs(tmp_path))
    until(lambda: any(run["rows"] > 3 and run["training"] for run in page.get("/api/runs")["runs"]))
    page.process.kill()
    page.process.communicate()
    page = Page(tmp_path)
    assert page.get("/api/jobs")["jobs"][0]["state"] == "running"
    assert subprocess.run([sys.executable, str(ROOT / "page.py"), "--port=0"], cwd=tmp_path,
                          capture_output=True, timeout=60).returncode == 2
    page.get("/api/stop", {"run": "out/mine"})
    until(lambda: page.get("/api/jobs")["jobs"][0]["state"] == "ended")
    assert "stopped at iter" in page.get("/api/console?job=1")["text"]
    details = page.get("/api/run?run=out/mine")
    assert details["checkpoints"] and "model.gguf" in details["files"] and not details["training"]
    step = details["results"]["iter"]
    page.get("/api/start", {"resume": "out/mine", "knobs": {"max_iters": step + 4}})
    until(lambda: page.get("/api/jobs")["jobs"][0]["state"] == "ended")
    assert page.get("/api/run?run=out/mine")["results"]["iter"] == step + 4
    page.get("/api/start", {"knobs": SETTINGS | {"optimizer": "none", "out_dir": "out/none"}})
    until(lambda: page.get("/api/jobs")["jobs"][0]["state"] == "failed")
    job = page.get("/api/jobs")["jobs"][0]
    assert job["error"] == "error: optimizer is 'none', expected muon or adamw"
    assert job["error"] in page.get("/api/console?job=3")["text"]
    page.end()


def test_a_broken_preset_is_reported_and_left_out(tmp_path, monkeypatch):
    (tmp_path / "config").mkdir()
    for name, text in (("good.py", "dim = 32\n_tokens = 3\n"), ("syntax.py", "batch_size = = 4"),
                       ("unknown.py", "import os\ndim = 8"), ("nan.py", "dropout = float('nan')"),
                       ("exit.py", "raise SystemExit"), ("none.py", "dim = None")):
        (tmp_path / "config" / name).write_text(text)
    monkeypatch.setattr(command, "HOME", tmp_path)
    found, wrong = command.presets()
    assert found == {"good.py": {"dim": 32}}
    assert [text.partition(":")[0] for text in wrong] == [
        "exit.py", "nan.py", "none.py", "syntax.py", "unknown.py"]
    assert "no setting 'os'" in wrong[4] and command.train_arguments({}, "good.py")
    with pytest.raises(ValueError, match="no preset 'syntax.py' that can be used"):
        command.train_arguments({}, "syntax.py")


def test_a_handler_that_exits_is_answered_with_an_error():
    served = server.Server("127.0.0.1", 0, {"GET /": lambda request: fail("x.py: wrong")})
    threading.Thread(target=served.serve_forever, daemon=True).start()
    asked = http.client.HTTPConnection("127.0.0.1", served.server_address[1], timeout=5)
    asked.request("GET", "/", headers={"Authorization": f"Bearer {served.token}"})
    answer = asked.getresponse()
    assert answer.status == 500 and "terminal" in json.loads(answer.read())["error"]
    served.shutdown()
    served.server_close()


# lock_holders() returns None on macOS, which has no /proc/locks.
@pytest.mark.parametrize("holders", [locks.lock_holders, lambda: None])
def test_only_the_process_that_holds_the_lock_is_the_trainer(tmp_path, holders):
    mark = tmp_path / "trainer.json"
    mark.write_text(
        json.dumps({"made_by": "llamac", "pid": os.getpid(), "host": socket.gethostname()[:64]}))
    # The trainer has ended, and another process has its id.
    assert locks.trainer_pid(tmp_path, holders()) is None
    with open(mark, "r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert locks.trainer_pid(tmp_path, holders()) == os.getpid()
    assert locks.trainer_pid(tmp_path, holders()) is None


def leave_queue(folder, *words, at_once=1, **changed):
    """
    Write a queue of waiting jobs, one for each word, and copy the program. Return (folder of the
    queue, file, folder of the copy). The copy's train.py appends its data, the word, to the file
    and runs for a minute. changed: other values for fields of the jobs.
    """
    home, queue = folder / "home", state.state_folder(folder / "out")
    home.mkdir()
    for name in "page", "engine", "llamac", "config":
        shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("*.py"):
        shutil.copy(path, home)
    (home / "train.py").write_text(
        "import pathlib, sys, time\ndata = ''  # a word\n"
        f"open({str(folder / 'started')!r}, 'a').write(sys.argv[-1][7:])\ntime.sleep(60)\n")
    queue.mkdir(parents=True)
    (queue / "jobs.json").write_text(json.dumps({
        "at_once": at_once, "jobs": [
            {"id": str(n), "state": "queued", "program": "train.py",
             "arguments": [f"--data={word}"]} | changed for n, word in enumerate(words, 1)]}))
    return queue, folder / "started", home


def states(page):
    """Return the states of the jobs, oldest first."""
    return [job["state"] for job in page.get("/api/jobs")["jobs"]][::-1]


def test_a_disk_error_stops_the_queue_and_no_job_starts_twice(tmp_path, request):
    queue, started, home = leave_queue(tmp_path, "a", "b\ud800", "c", at_once=0)
    page = Page(tmp_path, home=home)
    request.addfinalizer(lambda: end_jobs(tmp_path))
    in_the_way = queue / f"jobs.json.{page.process.pid}.tmp"
    in_the_way.mkdir()  # makes each write of the queue fail
    assert page.ask("/api/queue", {"at_once": 1})[0] == 500
    until(lambda: "cannot be written" in page.get("/api/console?job=1")["text"], 5)
    assert page.ask("/api/start", {"knobs": {}})[0] == 500
    assert states(page) == ["queued"] * 3
    assert not started.exists()
    in_the_way.rmdir()
    until(lambda: started.exists() and started.read_text() == "a", 5)
    in_the_way.mkdir()
    page.ask("/api/stop", {"job": "1"})
    until(lambda: states(page) == ["stopped", "queued", "queued"], 5)
    in_the_way.rmdir()
    until(lambda: started.read_text() == "ac", 5)
    page.end()
    page = Page(tmp_path, home=home)
    assert states(page) == ["stopped", "failed", "running"]
    assert "surrogates" in page.get("/api/console?job=2")["text"]
    assert [job["error"] for job in page.get("/api/jobs")["jobs"] if job["state"] == "failed"] == [
        page.get("/api/console?job=2")["text"].strip()]
    page.get("/api/stop", {"job": "3"})
    until(lambda: states(page) == ["stopped", "failed", "stopped"], 5)
    assert started.read_text() == "ac"
    page.end()


def test_a_job_that_runs_but_is_stored_as_queued_is_not_started_again(tmp_path):
    queue, started, home = leave_queue(tmp_path, "a")
    with open(queue / "1.txt", "w") as printed:
        fcntl.flock(printed, fcntl.LOCK_EX)
        printed.write("iter 1\n")
        printed.flush()
        page = Page(tmp_path, home=home)
        time.sleep(0.5)
        assert states(page) == ["running"] and page.get("/api/console?job=1")["text"] == "iter 1\n"
        assert json.loads((queue / "jobs.json").read_text())["jobs"][0]["state"] == "running"
        assert page.ask("/api/stop", {"job": "1"})[0] == 400  # its process id is unknown
    until(lambda: states(page) == ["ended"], 5)
    assert not started.exists()
    page.end()


def test_every_text_and_every_knob_has_a_chinese_translation():
    found, knobs = (json.loads((ROOT / "page/zh.json").read_text(encoding="utf-8")),
                    source_knobs(ROOT / "train.py"))
    sentences = {*yardsticks.SENTENCES.values(), yardsticks.GAP, yardsticks.LONGER,
                 *anomalies.NOT_FINITE, *anomalies.SLOW, *anomalies.JUMP}
    assert list(found["knobs"]) == list(knobs)
    assert all(text and text != knobs[name][2] for name, text in found["knobs"].items())
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "page").glob("*.js"))
    sections, states = ({section for _, section, _ in knobs.values()},
                        {"queued", "running", "stopped", "failed", "ended"})
    columns = {
        word for line in re.findall(r"(?m)^\w*COLUMNS = (.+)", (ROOT / "evaluate.py").read_text())
        for word in re.findall('"(.+?)"', line)}
    columns |= {name for name in compare.RESULTS if "/" not in name}  # metric names stay English
    named = sections | states | sentences | columns
    assert set(re.findall(r'\bt\("([^"]+)"\)', source)) | named <= found["words"].keys()
    tables = re.search(r"const TABLES = {(.+?)\n}", source, re.S)[1]
    assert set(re.findall('"(.+?)"', tables)) <= found["words"].keys()
    assert all(f'"{word}"' in source or re.search(rf"\b{word}: ", source) or word in named
               for word in found["words"])
    for sentence in sentences:  # both languages fill in the same values
        assert (sorted(re.findall(r"{\w+}", sentence))
                == sorted(re.findall(r"{\w+}", found["words"][sentence])))


# ---- in a browser --------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def browser():
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip(
            "needs chromium and chromedriver on PATH: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--window-size=1300,1000", "--lang=en"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options,
                             service=webdriver.ChromeService(shutil.which("chromedriver")))
    found.set_script_timeout(120)  # axe takes seconds on a wide table and a minute under load
    yield found
    found.quit()


def script(browser, text, *values):
    return browser.execute_script(text, *values)


def check_page(browser):
    """Assert that the console is empty, data add no HTML, and axe reports nothing serious."""
    assert [line for line in browser.get_log("browser")
            if line["level"] not in ("INFO", "DEBUG")] == []
    assert script(browser, "return window.hacked") is None
    assert script(browser, "return document.querySelectorAll('main img').length") == 0
    axe = Axe(browser)
    axe.inject()
    found = axe.run()["violations"]
    assert [(v["id"], v["nodes"][0]["html"][:200]) for v in found
            if v["impact"] in ("serious", "critical")] == []


def test_runs_are_compared_in_a_browser(filled, browser):
    browser.get(filled.url)
    names = ("return [...document.querySelectorAll('tbody tr')]"
             ".filter(r => r.className != 'hidden').map(r => r.querySelector('a').textContent)")
    drawn = ("return [...document.querySelectorAll('.chart')]"
             ".every(c => c.querySelector('.bk-Figure, .bk-Plot, svg, div'))"
             " && document.querySelectorAll('.chart').length")
    until(lambda: len(script(browser, names)) >= 4 and script(browser, drawn) == 2)
    assert filled.token not in browser.current_url
    assert EVIL.replace("/", "") in "".join(script(browser, names))
    check_page(browser)
    box = browser.find_element("css selector", "input[type=search]")
    box.send_keys("out/[ab]$")
    until(lambda: script(browser, names) == ["out/a", "out/b"])
    script(browser, "document.querySelectorAll('tbody input[type=checkbox]')[0].click()")
    until(lambda: script(browser, names) == ["out/b"])
    state = browser.current_url
    assert "filter=" in state and "hide=" in state
    browser.get("about:blank")
    browser.get(state)
    until(lambda: script(browser, names) == ["out/b"])
    script(browser, "location.hash = '#runs?hide=%5B%22out'")  # a truncated link
    until(lambda: len(script(browser, names)) >= 4)
    script(browser,
           "location.hash = '#runs?group=dim&smooth=0.8&x=seconds&logx=0&charts=loss%2Ftrain'")
    until(lambda: script(browser, drawn) == 1)
    check_page(browser)
    script(browser, "document.getElementById('language').click()")
    until(lambda: script(browser, "return document.documentElement.lang") == "zh")
    assert "训练" in browser.find_element("id", "tabs").text
    script(browser, "document.getElementById('language').click()")
    script(browser, "location.hash = '#run?run=out/a'")
    until(lambda: script(browser, "return document.querySelectorAll('.left td').length > 9"))
    check_page(browser)
    assert EVIL in browser.find_element("tag name", "main").text
    script(browser, "document.querySelector('textarea').value = 'mine'")
    save = "[...document.querySelectorAll('button')].find(b => b.textContent === 'Save').click()"
    notes = lambda: {run["name"]: run for run in filled.get("/api/runs")["runs"]}["out/a"]
    script(browser, save)
    until(lambda: notes().get("notes") == "mine")
    # A color that the user did not choose would override the color of the runs view.
    assert "color" not in notes()
    script(browser, "document.querySelector('input[type=color]').value = '#ff0000';" + save)
    until(lambda: notes().get("color") == "#ff0000")
    ends = "return Bokeh.documents.map(d => [...d.roots()][0].x_range.end)"
    until(lambda: len(script(browser, ends)) == 2 and max(script(browser, ends)) < 60000)
    add_row(filled.folder / "out/a",
            {"iter": 600, "tokens": 99000, "loss/train": 0.8, "loss/val": 0.9, "time": 1e9 + 60})
    until(lambda: min(script(browser, ends)) > 90000)  # the new row is drawn
    script(browser, "location.hash = '#start?dim=128'")
    until(lambda: "--dim=128" in browser.find_element("tag name", "main").text)
    check_page(browser)


def test_a_group_opens_to_its_runs_in_a_browser(filled, browser):
    """
    Two seeds share one row and one curve. A run that has used up its time budget shows its alerts
    and evaluations, in English and in Chinese.
    """
    for n in 1, 2:
        write_run(filled.folder / f"out/g-seed{n}", n, vocab_source="byte", learning_rate=0.1,
                  max_iters=9160, minutes=0.3)
    folder = filled.folder / "out/g-seed1"
    (folder / "result.json").write_text('{"iter": 600, "ended_by": "minutes"}')
    (filled.folder / "out/g-seed2/result.json").write_text('{"iter": 590, "ended_by": "minutes"}')
    add_row(folder, {"iter": 600, "tokens": 60000, "loss/train": 50.0, "time": 1e9 + 60,
                     "yardstick/xz": 2.0})
    result = {
        "data": "t.jsonl", "accuracy": 0.75, "names": ["go", "stop"], "matrix": [[3, 1], [0, 0]],
        "score_columns": ["Class", "F1"], "scores": [["go", 0.857], ["stop", None]],
        "macro_average": {"f1": 0.4286}, "columns": ["Successful", "Expected"],
        "rows": [[False, "go"]]}
    (folder / "evaluation.json").write_text(json.dumps({
        "data": result,
        "pairs": {"data": "stories", "accuracy": 0.5, "names": ["Kind"], "groups": [["order"]]}}))
    browser.get(filled.url)
    script(browser, "location.hash = '#runs?filter=g-seed'")
    rows = "return [...document.querySelectorAll('tbody tr')].map(r => r.textContent)"
    group, = until(lambda: len(script(browser, rows)) == 1 and script(browser, rows))
    found, = (one for one in filled.get("/api/runs")["groups"] if "g" in one["name"])
    assert (f"out/g2 runs{found['mean']:.4f} ± {found['sd']:.4f}"
            "finished: time budget used up" in group)
    until(lambda: script(browser, LINES)[0]["name"] == ["out/g (2)"])
    check_page(browser)
    # Not a click of the mouse: the table may be redrawn between button press and release.
    script(browser, "document.querySelector('tr[data-group] button').click()")
    until(lambda: script(browser, ROWS) == ["g-seed1", "g-seed2"]
          and script(browser, LINES)[0]["name"] == ["out/g-seed1", "out/g-seed2"])
    link = browser.current_url  # records which groups are open
    browser.get("about:blank")
    browser.get(link)
    until(lambda: script(browser, ROWS) == ["g-seed1", "g-seed2"])
    spread = ("import('/charts.js').then(({ spread }) => "
              "arguments[0]([spread([10, 12, 60, 61], 14), spread([], 14)]))")
    assert browser.execute_async_script(spread) == [[12, 26, 62, 76], []]
    script(browser, "location.hash = '#run?run=out/g-seed1'")
    text = lambda: browser.find_element("id", "main").text
    until(lambda: "step 600 · by the clock: minutes = 0.3" in text())
    assert "9,160" not in text().split("Settings")[0]
    assert "F1 0.4286" in text()
    assert "Wrong answers: 1" in text()
    assert "stories: accuracy 0.5000" in text()
    script(browser, "document.getElementById('language').click()")
    until(lambda: "loss/train 突然升高" in text() and "准确率 0.7500, F1 0.4286" in text()
          and "种类" in text())
    assert script(
        browser, "return document.querySelector('details.bad li').textContent"
    ).startswith("第 600 步为 50，比平常的 ")
    script(browser, "location.hash = '#runs?filter=g-seed'")
    until(lambda: "2 次训练" in text() and "最好 loss/val" in text())
    assert script(browser, "return document.querySelector('input[type=search]').placeholder"
                  ) == "正则表达式"
    script(browser, "document.getElementById('language').click()")
    script(browser, "localStorage.clear()")
    for n in 1, 2:
        shutil.rmtree(filled.folder / f"out/g-seed{n}")


ROWS = ("return [...document.querySelectorAll('tbody tr[data-run]')]"
        ".map(r => r.dataset.run.slice(4))")
HEADS = ("return [...document.querySelectorAll('thead button')]"
         ".map(b => b.textContent.split(' ▴')[0])")
PLOTS = ("const lines = p => p.renderers.map(r => r.data_source.data).find(d => d.dash)\n"
         "           const plots = Bokeh.documents.map(d => [...d.roots()][0])"
         ".sort((a, b) => lines(a).name.length - lines(b).name.length);")
LINES = PLOTS + " return plots.map(lines)"
MARKS = PLOTS + (" return plots.map(p => p.renderers.map(r => r.data_source.data.text)"
                 ".find(t => t))")
TICKS = PLOTS + " return plots.map(p => p.left[0].ticker.ticks)"


def test_a_comparison_is_readable_in_a_browser(tmp_path, browser, request):
    compared(tmp_path / "out")
    for n in 4, 2, 5:  # the newest model is v5's
        (tmp_path / f"out/v{n}/model.gguf").touch()
        os.utime(tmp_path / f"out/v{n}/model.gguf", (n, n))
    (tmp_path / "out/v0/result.json").write_text('{"iter": 590, "ended_by": "early_stop"}')
    page = Page(tmp_path)
    request.addfinalizer(page.end)
    request.addfinalizer(
        lambda: browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {}))
    browser.get(page.url)
    # Sorted by bits per byte.
    until(lambda: script(browser, ROWS)
          == ["v5", "v4", "v3", "v2", "v1", "v0", "other0", "other1"])
    titles = "return [...document.querySelectorAll('h2')].slice(0, 2).map(e => e.textContent)"
    # The titles differ until all logs are read.
    until(lambda: script(browser, titles) == ["bpb/val", "loss/train"])
    heads = script(browser, HEADS)
    assert heads[:3] == ["run", "best bpb/val", "status"]
    assert heads[-4:] == ["vocab_size", "odd", "text_bytes", "epochs"]
    text = lambda: browser.find_element("id", "main").text
    assert "Runs of other programs" in text()
    assert "Vocabularies differ" in text()
    assert "finished: the validation loss no longer fell" in text()
    bits, loss = until(lambda: [len(line["name"]) for line in script(browser, LINES)] == [6, 8]
                       and script(browser, LINES))
    assert len(bits["name"]) == 6
    assert len(loss["name"]) == 8
    assert set(loss["dash"]) == {"solid", "7 3"}
    legends = ("return [...document.querySelectorAll('.legend')]"
               ".map(l => l.querySelectorAll('span').length)")
    offsets = PLOTS + (" return plots.map(p => p.renderers.map(r => r.data_source.data.offset)"
                       ".find(t => t))")
    # The labels are so far apart that each keeps its place.
    assert until(lambda: script(browser, offsets))[0] == [-2] * len(script(browser, MARKS)[0])
    assert script(browser, legends) == [6, 8]
    assert script(browser, MARKS)[0] == ["token frequencies 4.00", "gzip 2.01, xz 2.00"]
    check_page(browser)
    # Set the ranges as a zoom does.
    script(browser, PLOTS + "for (const p of plots) { p.x_range.have_updated_interactively = true;"
           " p.x_range.setv({start: 1e4, end: 2e4}) }")
    for column in "tr[data-run='out/v1'] input", "tr[data-run='out/v0'] input":
        browser.find_element("css selector", column).click()
    until(lambda: script(browser, LINES)[0]["name"] == [f"out/v{n}" for n in (2, 3, 4, 5)])
    assert "odd" not in script(browser, HEADS)  # the remaining runs have the same value
    light = script(browser, LINES)
    browser.find_element("id", "theme").click()
    until(lambda: script(browser, LINES)[0]["color"] != light[0]["color"])
    ends = PLOTS + ("return plots.map(p => "
                    "[p.x_range.start, p.x_range.end, p.left[0].axis_line_color])")
    assert script(browser, ends) == [[1e4, 2e4, "#2c343d"]] * 2
    assert [line["name"] for line in script(browser, LINES)] == [line["name"] for line in light]
    script(browser, "location.hash = '#runs?charts=perf%2Ftokens_per_sec'")
    until(lambda: script(browser, TICKS) == [[5000, 10000, 20000, 50000]])
    values = [71852.4, 503.04, 0.00012345, 2764800.0, 12.34567, -71852.4, 0.5, 7, 1234567, 99.99999]
    shown = browser.execute_async_script(
        "import('/app.js').then(app => arguments[1](arguments[0].map(app.format)))", values)
    assert shown == [compare.text(value) for value in values[:3]] + ["2,764,800"] + [
        compare.text(value) for value in values[4:]]
    pairs = (
        "import('/charts.js').then(({ curveStyle }) => "
        "arguments[0]([...Array(21).keys()].map(n => {\n"
        "      const { color, dash } = curveStyle(n),"
        " style = getComputedStyle(document.documentElement)\n"
        "      return style.getPropertyValue(color.slice(4, -1)) + dash })))")
    assert len(set(browser.execute_async_script(pairs))) == 21
    ticks = ("import('/charts.js').then(({ logTicks }) => "
             "arguments[1](arguments[0].map(range => logTicks(...range))))")
    ranges = [(1e-8, 1e9), (5.9, 6.4), (0.3, 12), (2, 2.9), (500, 21000), (0.0001, 0.00012), (1, 2),
              (0, 1), (3, 3), (1e-300, 1e300)]
    for (low, high), found in zip(ranges, browser.execute_async_script(ticks, ranges)):
        assert found == sorted(found)
        assert all(low <= tick * (1 + 1e-9) and tick <= high * (1 + 1e-9) for tick in found)
        assert 4 <= len(found) <= 10 if 0 < low < high else not found
    script(browser, "location.hash = '#run?run=out/v0'")
    until(lambda: "the speed has collapsed × 2" in text())
    assert "usual" not in text()
    assert "Is my loss normal?\nnormal for a short training: 2.0" in text()
    assert "the validation loss is 100 % above the training loss" in text()
    browser.find_element("css selector", "details.bad summary").click()
    until(lambda: text().count("5,000 tokens/s at iter") == 2)
    check_page(browser)
    script(browser, "location.hash = '#start'")
    until(lambda: browser.find_elements("id", "knob-optimizer"))
    assert script(browser, "return [...document.getElementById('knob-optimizer').options]"
                  ".map(o => o.value)") == ["muon", "adamw"]
    script(browser, "const e = document.getElementById('knob-optimizer'); e.value = 'adamw';"
           " e.dispatchEvent(new Event('change'))")
    until(lambda: "--optimizer=adamw" in text())
    browser.find_element("id", "knob-data").send_keys("\b" * 9 + "ou")
    until(lambda: "out/" in script(
        browser, "return [...document.getElementById('knob-data').list.options].map(o => o.value)"))
    script(browser, "document.getElementById('language').click()")
    until(lambda: script(browser, "return document.documentElement.lang") == "zh")
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                            {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True})
    for view, words in (("run?run=out/v0", "我的损失正常吗？\n就短训练而言正常：每字节"),
                        ("run?run=out/v0", "；验证损失比训练损失高 100%"), ("talk", "对话"),
                        ("inside", ""), ("start", "预设"), ("runs", "v5")):
        script(browser, "location.hash = arguments[0]", view)
        until(lambda: words in text() and len(text()) > 5, 60)
        assert script(browser, "return document.documentElement.scrollWidth") == 390, view
        if view == "talk":
            assert script(browser, "return document.getElementById('model0').value") == "out/v5"
    script(browser, "document.getElementById('language').click()")
    script(browser, "localStorage.clear()")


@pytest.mark.slow
def test_a_browser_reads_rows_that_it_has_missed(tmp_path, browser):
    """
    Some rows are written while the connection is lost, others between the first drawing and the
    first event.
    """
    write_run(tmp_path / "out/a", rows=3)
    listed = runs.Runs(tmp_path / "out")
    found = run_api.RunApi(listed)
    own = server.file_routes(ROOT / "page")
    own["GET /bokeh.js"] = lambda request: server.Response("", kind="text/javascript")
    served = server.Server("127.0.0.1", 0, own | found.routes() | jobs.Jobs(listed).routes())
    threading.Thread(target=served.serve_forever, daemon=True).start()
    points = ("return document.querySelector('[aria-label=\"loss/train\"] polyline')"
              ".getAttribute('points').split(' ').length")
    rows, name = 3, tmp_path / "out/a"
    browser.get(served.url())
    until(lambda: script(browser, points) == rows and len(served.connections) == 1, 20)
    for view, shown in (("#runs", f"tr[data-run='{name}'] [data-column=iter]"),
                        (f"#run?{urlencode({'run': name})}", "p.soft")):
        script(browser, "location.hash = arguments[0]", view)
        until(lambda: script(browser, points) == rows and len(served.connections) == 1
              and browser.find_elements("css selector", shown))
        for connection in list(served.connections):
            served.close_now(connection)
        for i in range(rows, rows + 50):
            add_row(name, {"iter": 10 * i, "tokens": 1000 * i, "loss/train": 1.0, "time": 1e9 + i})
        rows += 50
        until(lambda: script(browser, points) == rows, 10)
        until(lambda: str(10 * rows - 10) in browser.find_element(
            "css selector", shown).text.replace(",", ""), 10)
    gap = (
        "import('/charts.js').then(({ Curves }) => {\n"
        '      const curves = new Curves("m", "iter"), event = (from, rows) => '
        '({ run: { name: "a", rows }, from, rows: { m: [1], iter: [7] } })\n'
        '      curves.lines.set("a", { x: [1], y: [1], rows: 3 })\n'
        "      arguments[0]([curves.add(event(3, 4)), curves.add(event(5, 6)),"
        ' curves.lines.get("a").x])\n'
        "    })")
    assert browser.execute_async_script(gap) == [True, "again", [1, 7]]
    browser.get("about:blank")
    served.shutdown()
    served.server_close()


def test_a_malformed_queue_ends_the_page_with_one_line(tmp_path):
    """Each field of a job is checked, such as its program, its id and its process id."""
    job = {"id": "1", "state": "queued", "program": "train.py", "arguments": [], "pid": 2}
    odd = [{"id": "../../x"}, {"id": 1}, {"id": "0"}, {"id": "1" * 20}, {"id": "١"},
           {"state": "waits"}, {"state": ["queued"]}, {"program": "evil.py"},
           {"program": "../x/train.py"}, {"program": str(ROOT / "train.py")},
           {"program": ["train.py"]}, {"error": 3}, {"arguments": "--dim=8"}, {"arguments": [3]},
           {"pid": -1}, {"pid": 1}, {"pid": "2"}, {"folder": 3}, {"out_dir": []}]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps({"at_once": 2, "jobs": [job]}))
    assert jobs.read_queue(path) == (2, [job])
    for content in [{"jobs": [1]}, {"jobs": [{"id": "1"}]}, {"jobs": 3}, {"at_once": "many"},
                    *({"jobs": [job | part]} for part in odd)]:
        path.write_text(json.dumps(content))
        with pytest.raises(SystemExit):
            jobs.read_queue(path)
    # A file of the user's own or a truncated one: a new queue would overwrite it.
    for content in "[]", '{"at_once": 2, "jobs": [', "":
        path.write_text(content)
        with pytest.raises(SystemExit):
            jobs.read_queue(path)
    path.unlink()
    assert jobs.read_queue(path) == (1, [])
    path.write_text('{"jobs": [1')
    own = state.state_folder(tmp_path / "out")
    own.mkdir(parents=True)
    (own / "jobs.json").write_text(path.read_text())
    done = subprocess.run([sys.executable, ROOT / "page.py", "--port=0"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 2
    assert "jobs.json: expected a queue that the page has written" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_long_queue_keeps_the_jobs_that_have_not_ended(monkeypatch):
    monkeypatch.setattr(jobs, "MAX_JOBS", 3)
    states = "queued", "ended", "running", "failed", "stopped", "queued"
    found = [{"id": str(n), "state": name} for n, name in enumerate(states)]
    assert jobs.without_old(found[:3]) == found[:3]
    assert [job["id"] for job in jobs.without_old(found[:5])] == ["0", "2", "4"]
    assert [job["id"] for job in jobs.without_old(found)] == ["0", "2", "5"]


def test_a_stored_job_may_only_have_arguments_that_a_form_produces(tmp_path):
    sweep = tmp_path / "sweep-0123.json"
    sweep.touch()
    preset = os.path.relpath(ROOT / "config/debug.py", tmp_path)
    for program, arguments, fine in (
            ("train.py", [], True), ("train.py", [preset, "--dim=64", "--data=-x"], True),
            ("train.py", ["--dim=64"], True), ("train.py", ["evil.py"], False),
            ("train.py", [preset, preset], False), ("train.py", ["--dim", "64"], False),
            ("train.py", ["--dim=wide"], False), ("train.py", ["--nope=1"], False),
            ("train.py", ["/etc/x.yaml"], False), ("train.py", ["--data=a\0b"], False),
            ("sweep.py", [str(sweep), "--out_dir=x", "--count=3"], True), ("sweep.py", [], False),
            ("sweep.py", ["other.json"], False), ("sweep.py", [str(sweep), "--count=x"], False),
            ("sweep.py", [str(sweep), "x.yaml"], False)):
        job = {"program": program, "arguments": arguments, "folder": str(tmp_path)}
        with contextlib.nullcontext() if fine else pytest.raises(ValueError):
            command.check_arguments(job, tmp_path)


def test_an_estimate_of_malformed_knobs_is_refused(page):
    deep = "[" * 8000 + "]" * 8000
    for knobs in ("[1]", "{", "", '{"dim": {"a": ' + "[" * 800 + "]" * 800 + "}}",
                  '{"dim": ' + "9" * 5000 + "}", '{"nope": 1}', deep):
        status, _, text = page.ask(f"/api/estimate?{urlencode({'knobs': knobs})}")
        assert status == 400 and len(json.loads(text)["error"]) < 1000, text


def test_an_estimate_beyond_its_time_limit_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "PREVIEW_SECONDS", 0.1)
    monkeypatch.chdir(tmp_path)
    wait = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1])\n"
        "import configurator, time\nfrom engine.training import mode\n"
        "mode.make_folder(type('s', (), {'out_dir': 'out/x', 'dry_run': True, 'overfit': 0,"
        " 'lr_find': False, 'profile': False}))\n"
        "pathlib.Path('began').touch()\ntime.sleep(60)\n")
    communicate = subprocess.Popen.communicate

    def after_its_start(program, *args, **more):
        until(lambda: (tmp_path / "began").exists(), 60)
        return communicate(program, *args, **more)
    monkeypatch.setattr(subprocess.Popen, "communicate", after_its_start)
    assert "takes more than 0.1 s" in jobs.printed(["-c", wait, str(ROOT)], OneAtATime())
    assert [path.name for path in tmp_path.iterdir()] == ["began"]


def test_a_program_without_a_client_is_terminated_and_the_next_one_runs(tmp_path):
    """
    A program ends when its client closes the connection, whether it runs or waits, and when the
    page ends.
    """
    turns, gone, found = OneAtATime(), threading.Event(), []
    slow = ["-c", "import sys, time; open(sys.argv[1], 'a').write('x'); time.sleep(60)",
            str(tmp_path / "began")]

    def work(is_gone):
        with contextlib.suppress(programs.ClientGone):
            found.append(turns.run(slow, 60, is_gone))

    waits = [threading.Thread(target=work, args=(is_gone,))
             for is_gone in (gone.is_set, lambda: True)]
    for thread in waits:
        thread.start()
        until((tmp_path / "began").exists, 20)
    waits[1].join(20)  # its client has closed the connection while it waited
    assert (tmp_path / "began").read_text() == "x"
    assert len(programs.running) == 1
    assert not waits[1].is_alive()
    gone.set()
    waits[0].join(20)
    assert not programs.running and not found
    # The data are longer than the buffer of a pipe.
    late = "import sys, time; time.sleep(1); print(len(sys.stdin.buffer.read()))"
    assert turns.run(["-c", late], 60, data=b"x" * 1_000_000) == (0, b"1000000\n", None)
    last = threading.Thread(target=work, args=(lambda: False,))
    last.start()
    until(lambda: programs.running, 20)
    programs.end_all()
    last.join(20)
    assert found and found[0][0] == -signal.SIGTERM and not programs.running


def test_open_streams_do_not_block_their_user_and_strangers_close_none(tmp_path):
    def endless(request):
        while True:
            yield {"x": 1}
            time.sleep(0.2)

    served = server.Server(
        "127.0.0.1", 0,
        {"GET /live": endless, "GET /": lambda request: server.Response("ok", kind="text/plain")})
    threading.Thread(target=served.serve_forever, daemon=True).start()
    head = (f"Host: 127.0.0.1:{served.server_address[1]}\r\n"
            f"Authorization: Bearer {served.token}\r\n\r\n")

    def connect(text):
        found = socket.create_connection(served.server_address, timeout=10)
        found.sendall(text.encode())
        return found

    streams = [connect(f"GET /live HTTP/1.1\r\n{head}") for _ in range(server.MAX_CONNECTIONS)]
    assert all(stream.recv(12) == b"HTTP/1.1 200" for stream in streams)
    strangers = [connect("GET / HTTP/1.1\r\n") for _ in range(2 * server.MAX_CONNECTIONS)]
    time.sleep(0.5)
    assert sum(c.authenticated for c in served.connections.values()) == len(streams)
    assert len(served.connections) <= 2 * len(streams)
    for _ in range(3):
        assert connect(f"GET / HTTP/1.1\r\n{head}").recv(15) == b"HTTP/1.1 200 OK"
    streams += [connect(f"GET /live HTTP/1.1\r\n{head}") for _ in range(5)]
    assert all(stream.recv(12) == b"HTTP/1.1 200" for stream in streams[-5:])
    until(lambda: sum(c.authenticated for c in served.connections.values())
          <= server.MAX_CONNECTIONS + 1, 10)
    for connection in streams + strangers:
        connection.close()
    served.shutdown()
    served.server_close()


def odd_files(folder):
    """
    Write runs with a pipe, a device or a link loop in place of a file, and one with a socket.
    Return the socket.
    """
    for name in ("config.json", "log.jsonl", "evaluation.json", "result.json", "wandb.json",
                 "trainer.json", "model.gguf", "notes"):
        for kind in "pipe", "device", "link":
            run = folder / f"{name} {kind}"
            write_run(run, rows=3)
            path = run / name
            path.unlink(missing_ok=True)
            if kind == "pipe":
                os.mkfifo(path)
            else:
                path.symlink_to("/dev/zero" if kind == "device" else path)  # a link to itself
    sockets = socket.socket(socket.AF_UNIX)
    with contextlib.chdir(folder) if hasattr(contextlib, "chdir") else contextlib.suppress(OSError):
        write_run(folder / "socket", rows=3)
        (folder / "socket/config.json").unlink()
        sockets.bind("socket/config.json")
    return sockets


def test_pipes_devices_and_link_loops_do_not_block_the_page(tmp_path):
    write_run(tmp_path / "out/plain", rows=3)
    odd_files(tmp_path / "out").close()
    since, page = time.monotonic(), Page(tmp_path)
    found = {run["name"]: run for run in page.get("/api/runs")["runs"]}
    assert found["out/plain"]["rows"] == 3
    assert not found["out/plain"]["odd"]
    assert len(found) == 26
    for name, run in found.items():
        asked = page.ask(f"/api/run?{urlencode({'run': name})}")
        assert asked[0] == 200, asked
        reads = name.startswith(("out/config.json", "out/log.jsonl", "out/socket"))
        assert bool(run["odd"]) == reads and (run["rows"] == 3 or "log.jsonl" in name), run
        # The message begins with the name of the faulty file.
        assert (not reads or "socket" in name
                or run["odd"].startswith(f"{name[4:].split()[0]}: ")), run
        assert page.get(
            f"/api/curves?{urlencode({'metric': 'loss/train', 'x': 'iter', 'run': name})}")
    assert page.get("/v1/models")["data"] == []
    assert "model.gguf" not in page.ask("/api/inside")[2].replace("out/model.gguf", "")
    assert page.ask("/api/csv?metric=loss/train")[0] == 200 and time.monotonic() - since < usual(20)
    out, err = page.end()
    assert "Traceback" not in err
    done = subprocess.run([sys.executable, ROOT / "compare.py", "--single"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "\nout/plain " in done.stdout
    assert "Traceback" not in done.stderr
    assert ("skipped out/config.json pipe: not a run (config.json: not a regular file)"
            in done.stderr)
    assert "skipped out/log.jsonl device: not a run (not a regular file)" in done.stderr


DEEP = {depth: "[" * depth + "1" + "]" * depth for depth in (5, 300, 900, 5000, 100_000)}
ODD_CONFIGS = [
    *DEEP.values(), *(f'{{"a": {deep}, "dim": 8}}' for deep in DEEP.values()),
    '{"dim": ' + "9" * 40 + "}", '{"dim": 1e400}', '{"dim": ' + "9" * 4000 + "}",
    '{"dim": ' + "9" * 5000 + "}", '{"dim": NaN, "seed": Infinity}', '{"dim": "\\ud800"}',
    '{"\\ud800\\n": 1}', json.dumps({str(n): n for n in range(20_000)}),
    json.dumps({"x" * 100_000: "y" * 200_000}), '{"dim": "' + "a" * 40 + '"}',
    '{"dim": ' + "1" * 40 + "}", '{"dim": [1, {"a": null}], "max_iters": {"a": [1]}}', "7", "null",
    '"x"', "", "\ufeff{}", '{"name": 1, "results": 2, "rows": "x", "settings": 3}',
    '{"__proto__": {"x": 1}, "toString": 1}']
ODD_ROWS = [f'{{"iter": 1, "loss/val": 2.5, "samples": {deep}}}' for deep in DEEP.values()] + [
    '{"iter": ' + "9" * 40 + ', "loss/val": ' + "9" * 400 + "}",
    '{"iter": NaN, "loss/val": NaN, "tokens": Infinity}',
    '{"iter": 1, "loss/val": "\\ud800", "time": "x"}',
    '{"iter": 1, "time": -1e308, "loss/val": 1}\n{"iter": 2, "time": 1e308, "loss/val": 1e38}',
    '{"iter": 1, "loss/val": ' + "9" * 40 + ', "loss/train": 1e-320}',
    json.dumps({"iter": 1, "m" * 100_000: 1, "loss/val": True}),
    json.dumps({"iter": 1, "loss/val": 2.0, "s": "x" * 9_000_000}), "\0" * 9_000_000]


def odd_runs(tmp_path):
    """Make three plain runs and many malformed ones."""
    for n in range(3):
        write_run(tmp_path / f"out/plain{n}", n, rows=3)
    for n, content in enumerate(ODD_CONFIGS):
        write_run(tmp_path / f"out/config{n}", n, rows=3)
        (tmp_path / f"out/config{n}/config.json").write_text(content)
    for n, row in enumerate(ODD_ROWS):
        write_run(tmp_path / f"out/row{n}", n, rows=0)
        (tmp_path / f"out/row{n}/log.jsonl").write_text(
            row + '\n{"iter": 3, "loss/train": 1, "time": 7}\n')
    for name in "surrogate\udcff", "evil\x1b[2J\n<b>", "x" * 200:
        write_run(tmp_path / "out" / name, rows=3)
    for n, deep in enumerate((DEEP[900], DEEP[100_000])):
        for name in "evaluation.json", "wandb.json", "trainer.json":
            write_run(tmp_path / f"out/{name}{n}", n, rows=3)
            (tmp_path / f"out/{name}{n}" / name).write_text(
                f'{{"url": {deep}, "matrix": {deep}, "pid": {deep}, "host": 1}}')


def test_malformed_runs_are_marked_and_do_not_hide_others(tmp_path):
    odd_runs(tmp_path)
    page = Page(tmp_path)
    all_read = lambda found: all(run["rows"] or run["odd"] for run in found["runs"]) and found
    found = until(lambda: all_read(page.get("/api/runs")), 60)
    text = page.ask("/api/runs")[2]
    assert "NaN" not in text and "Infinity" not in text and len(text) < 3_000_000
    shown = {run["name"]: run for run in found["runs"]}
    assert len(shown) == 3 + len(ODD_CONFIGS) + len(ODD_ROWS) + 3 + 6
    assert all(shown[f"out/plain{n}"]["rows"] == 3 and not shown[f"out/plain{n}"]["odd"]
               for n in range(3))
    assert "out/surrogate\\udcff" in shown and "nested too deeply" in shown["out/config4"]["odd"]
    names = list(shown)
    for name in names:
        status, _, text = page.ask(f"/api/run?{urlencode({'run': name})}")
        assert status == 200 and "NaN" not in text and len(text) < 3_000_000, (name, text[:300])
    for name in names[:1] + names[-3:]:
        assert page.ask("/api/notes", {"run": name, "tags": "x"})[0] == 200
    for query in "metric=loss/val&x=tokens", "metric=loss/train&x=seconds", "metric=iter&x=iter":
        assert all(np.isfinite(line).all()
                   for line in points(page.get(f"/api/curves?{query}")).values())
    assert (page.ask("/api/csv?metric=loss/val")[0]
            == page.ask("/api/save", {"runs": names})[0] == 200)
    assert page.ask("/api/bands", {"metric": "loss/val", "groups": [names]})[0] == 200
    assert page.ask("/v1/models")[0] == page.ask("/api/inside")[0] == 200
    out, err = page.end()
    assert "Traceback" not in err, err[-3000:]
    for words in (["--plot=x.html", "--sort=dim", "--single"], ["--plot=x.svg", "--group=dim"],
                  ["--plot=x.pdf", "--json"]):
        done = subprocess.run([sys.executable, ROOT / "compare.py", *words], cwd=tmp_path,
                              capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
        assert "--single" not in words or done.stdout.count("\n") > 30 and all(
            f"\nout/plain{n} " in done.stdout for n in range(3))


@pytest.mark.slow
def test_malformed_runs_are_drawn_in_a_browser(tmp_path, browser):
    odd_runs(tmp_path)
    for n, value in enumerate(('3', '"x"', '[1]', '[[1, 2], ["a"]]', '{"a": 1}', "[[1]]")):
        folder = tmp_path / f"out/left{n}"
        write_run(folder, n, rows=3)
        (folder / "evaluation.json").write_text("{" + ", ".join(
            f'"{name}": {value}'
            for name in ("matrix", "names", "rows", "columns", "accuracy")) + "}")
        (folder / "wandb.json").write_text(f'{{"url": {value}}}')
        (folder / "log.jsonl").write_text(
            f'{{"iter": 40, "samples": [{value}], "predictions": {value}}}\n')
    page = Page(tmp_path)
    browser.get(page.url)
    odd = ("return [...document.querySelectorAll('tr[data-run] .odd')]"
           ".filter(e => e.textContent).length")
    names = [run["name"] for run in page.get("/api/runs")["runs"]]
    until(lambda: script(browser, odd) == sum(
        bool(run["odd"]) for run in page.get("/api/runs")["runs"]) > 9, 60)
    check_page(browser)
    for name in [name for name in names
                 if re.search(r"config\d|row\d$|left|evil|x{200}", name)][::3]:
        script(browser, "location.hash = arguments[0]", f"#run?{urlencode({'run': name})}")
        until(lambda: script(
            browser, "return document.querySelector('h1')?.textContent == arguments[0]", name), 20)
        assert not browser.find_element("id", "message").text, name
    check_page(browser)
    browser.get("about:blank")
    page.end()


def test_a_huge_log_does_not_delay_other_runs(tmp_path):
    write_run(tmp_path / "out/a", rows=3)
    with open(tmp_path / "out/a/log.jsonl", "ab") as f:
        f.truncate(1 << 40)  # filled with zeros
    write_run(tmp_path / "out/b", rows=3)
    found = runs.Runs(tmp_path / "out")
    until(lambda: found.refresh() and found.runs[str(tmp_path / "out/b")].count == 3, 20)
    add_row(tmp_path / "out/b", {"iter": 99})
    until(lambda: found.refresh() and found.runs[str(tmp_path / "out/b")].count == 4, 20)
    assert "are left out" in found.runs[str(tmp_path / "out/a")].problem


def test_metrics_in_few_rows_take_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "MAX_FILLED", 1_000_000)
    write_run(tmp_path / "out/a", rows=0)
    with open(tmp_path / "out/a/log.jsonl", "w") as f:
        f.write('{"iter":1}\n' * 20_000)
        f.write(json.dumps({"iter": 2} | {f"m{n}": 1.0 for n in range(900)}) + "\n")
    run = compare.Run(tmp_path / "out/a")
    while run.read():
        pass
    assert run.count == 20_001 and 900_000 < sum(map(len, run.columns.values())) <= 1_021_000
