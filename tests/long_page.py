"""
Long tests of the page: all views by clicks, 200 runs, 1,000 connections.

The figures are in doc/lab/page.md.
"""
import json
import math
import os
import random
import re
import socket
import subprocess
import time
from pathlib import Path

import pytest

from page.state import state_folder
from tests import test_page
from tests.test_page import SETTINGS, Page, check_page, end_jobs, script, threads, until

ROWS, RUNS = 2000, 200
browser = test_page.browser
PICTURES = os.environ.get("PICTURES")  # a folder for pictures of the page


def memory(process):
    """Return [peak memory, current memory] of a process in MB."""
    found = dict(
        line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return [int(found[name].split()[0]) / 1000 for name in ("VmHWM", "VmRSS")]


def click(browser, text, tag="button"):
    """Click the element that begins with this text, once it exists."""
    def try_it():
        found = [e for e in browser.find_elements("css selector", tag)
                 if e.text.strip().startswith(text) and e.is_displayed()]
        script(browser, "arguments[0].scrollIntoView({block: 'center'})", found[0])
        found[0].click()
        return True

    until(try_it)


def fill(browser, name, value):
    """Type a value into the field of a knob."""
    field = browser.find_element("id", f"knob-{name}")
    script(browser, "for (let e = arguments[0]; e; e = e.parentElement) "
           "if (e.tagName == 'DETAILS') e.open = true", field)
    field.clear()
    field.send_keys(str(value))


def picture(browser, name):
    if PICTURES:
        browser.save_screenshot(str(Path(PICTURES, f"{name}.png")))


def text(browser):
    return browser.find_element("id", "main").text


def test_all_views_by_clicks(tmp_path, browser, request):
    (tmp_path / "t.txt").write_text("To be or not to be, that is the question.\n" * 400)
    page = Page(tmp_path)
    request.addfinalizer(page.end)
    request.addfinalizer(lambda: end_jobs(tmp_path))
    browser.execute_cdp_cmd("Browser.setDownloadBehavior",
                            {"behavior": "allow", "downloadPath": str(tmp_path)})
    browser.get(page.url)
    until(lambda: "No runs yet" in browser.find_element("id", "message").text)
    click(browser, "Start", "nav a")
    until(lambda: browser.find_elements("id", "knob-data"))
    for name, value in SETTINGS.items():
        fill(browser, name, value)
    at_once = browser.find_element("css selector", "input[type=number]")
    at_once.clear()
    at_once.send_keys("2\t")
    for number, name in enumerate(("one", "two")):
        fill(browser, "out_dir", f"out/{name}")
        fill(browser, "seed", number)
        until(lambda: f"--out_dir=out/{name}" in text(browser)
              and f"--seed={number}" in text(browser))
        click(browser, "Put into the queue")
        until(lambda: f"out/{name}" in browser.find_element("css selector", ".job").text)
    fill(browser, "out_dir", "out/sweep")
    fill(browser, "max_iters", 40)
    script(browser, "document.querySelector('[aria-label=\"Sweep learning_rate\"]').click()")
    browser.find_element(
        "css selector", "input[type=text][aria-label='Sweep learning_rate']"
    ).send_keys("1e-3, 3e-3, 1e-2,")
    until(lambda: "sweep.py" in text(browser))
    click(browser, "Put into the queue")
    until(lambda: len(browser.find_elements("css selector", ".job[data-state=running]")) == 2)
    until(lambda: len(browser.find_elements("css selector", ".job[data-state=queued]")) == 1)
    check_page(browser)
    script(browser, "document.querySelector('.job:last-child button').click()")
    until(lambda: "iter" in browser.find_element("css selector", ".job:last-child pre").text)
    picture(browser, "start")
    click(browser, "Runs", "nav a")
    # The runs share a row, as they differ only in the seed.
    until(lambda: text(browser).count("● training") == 1)
    click(browser, "▸ ", "td button")
    until(lambda: text(browser).count("● training") == 3)
    click(browser, "out/one", "td a")
    until(lambda: "loss/val" in text(browser) and "● training" in text(browser)
          and "Samples" in text(browser))
    check_page(browser)
    picture(browser, "follow")
    click(browser, "Stop")
    until(lambda: "stopped by" in text(browser))
    assert "model.gguf" in text(browser) and "step_" in text(browser)
    click(browser, "Resume")
    until(lambda: "● training" in text(browser))
    click(browser, "Stop")
    until(lambda: "stopped by" in text(browser))
    until(lambda: json.loads((state_folder(tmp_path / "out") / "jobs.json").read_text())
          ["jobs"][2]["state"] == "ended")
    (click(browser, "All runs", "a") if browser.find_elements("link text", "All runs")
     else click(browser, "Runs", "nav a"))
    until(lambda: "out/sweep/2" in text(browser) and "Settings and result" in text(browser))
    check_page(browser)
    picture(browser, "runs")
    click(browser, "Save as one HTML file")
    saved = until(lambda: (tmp_path / "runs.html").exists()
                  and (tmp_path / "runs.html").read_text())
    assert "out/sweep/2" in saved and "<svg" in saved
    click(browser, "▸ ", "td button")
    click(browser, "out/two", "td a")
    until(lambda: "● training" in text(browser))
    click(browser, "Stop")
    until(lambda: "stopped by" in text(browser))
    look_inside(browser)
    talk(browser)
    script(browser, "document.getElementById('theme').click()")
    check_page(browser)
    # Each view in dark colours, then at the width of a phone.
    for name in "start", "run?run=out/one", "runs", "inside", "talk":
        script(browser, f"location.hash = '#{name}'")
        until(lambda: len(text(browser)) > 50)
        time.sleep(1)
        check_page(browser)
        picture(browser, f"dark-{name[:3]}")
        browser.set_window_size(400, 850)
        time.sleep(1)
        assert script(browser, "return document.documentElement.scrollWidth <= innerWidth"), name
        picture(browser, f"phone-{name[:3]}")
        browser.set_window_size(1280, 900)


def look_inside(browser):
    """Open all views of the model in out/one."""
    click(browser, "Look inside", "nav a")
    until(lambda: browser.find_elements("css selector", "#model option"))
    script(browser, "document.getElementById('model').value = 'out/one'")
    words = browser.find_element("id", "text")
    words.clear()
    words.send_keys("To be or not to be")
    click(browser, "Look inside", "#look")
    until(lambda: browser.find_elements("css selector", "main canvas"))
    check_page(browser)
    picture(browser, "inside")
    # Show the words of the first head.
    script(browser, "document.querySelector('main canvas').closest('button').click()")
    until(lambda: len(browser.find_elements("css selector", "main svg line")) > 10)
    for view in "Query × key", "Probabilities", "Logit lens", "Embeddings", "Weights":
        click(browser, view)
        until(lambda: browser.find_element("css selector", "[aria-selected=true]").text == view)
        check_page(browser)
    click(browser, "Logit lens")
    picture(browser, "lens")


def talk(browser):
    """Let two models continue a text."""
    click(browser, "Talk", "nav a")
    until(lambda: browser.find_elements("css selector", "#model1 option"))
    names = [option.text for option in browser.find_elements("css selector", "#model0 option")]
    assert {"out/one", "out/two", *(f"out/sweep/{n}" for n in (1, 2, 3))} <= set(names), names
    for n in 0, 1:
        script(browser, "const e = document.getElementById(arguments[0]); e.value = arguments[1]; "
               "e.dispatchEvent(new Event('change'))", f"model{n}", names[n])
    words = browser.find_element("id", "words")
    words.clear()
    words.send_keys("To be")
    script(browser, "const e = document.getElementById('max_tokens'); e.value = 40; "
           "e.dispatchEvent(new Event('change'))")
    click(browser, "Continue")
    said = lambda: [pane.text for pane in browser.find_elements("css selector", "#panes section")]
    until(lambda: len(said()) == 2 and all(
        re.search(r"To be.+\n\d+ tokens/s", pane, re.S) for pane in said()))
    assert script(browser, "return !document.getElementById('go').disabled")
    check_page(browser)
    picture(browser, "talk")


# ---- 200 runs ------------------------------------------------------------------------------------

def write_row(out, number, i, rng):
    row = {
        "iter": i * 20, "tokens": i * 20 * 1152, "epoch": i / 100, "grad/norm": rng.random(),
        "grad/skipped": 0, "lr": 1e-3,
        "loss/train": 1 + number / 300 + 4 * math.exp(-i / (80 + number)) + rng.gauss(0, 0.05),
        "perf/tokens_per_sec": 5e4 + rng.gauss(0, 500), "perf/iter_ms": 20.5,
        "perf/peak_mib": 300.5, "mfu": 40.1
    }
    row |= {f"norm/{kind}/{layer}": rng.random()
            for kind in ("grad", "weight", "update") for layer in ("embed", 0, 1, "head")}
    if i % 25 == 0:
        row |= {"loss/val": row["loss/train"] + 0.05, "bpb/val": row["loss/train"] / 3,
                "samples": [["Once", "greedily", "x" * 300]]}
    out.write(json.dumps(row | {"time": 1.7e9 + number * 1e5 + i * 0.5}) + "\n")


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("many"), random.Random(0)
    for number in range(RUNS):
        run = folder / f"out/run{number:03d}"
        run.mkdir(parents=True)
        config = {"learning_rate": 10 ** rng.uniform(-4, -2), "batch_size": 4 << number % 3,
                  "seed": number % 4, "max_iters": 40000}
        (run / "config.json").write_text(json.dumps(config))
        with open(run / "log.jsonl", "w") as out:
            for i in range(ROWS):
                write_row(out, number, i, rng)
    page = Page(folder)
    page.folder = folder
    yield page
    page.end()


def first_picture(browser, url):
    """Return the seconds from opening the address to the first curves."""
    browser.get("about:blank")
    browser.get(url)
    mark = "return performance.getEntriesByName('drawn')[0]?.startTime"
    return until(lambda: script(browser, mark), 60) / 1000


def test_200_runs_of_2000_rows(many, browser):
    since = time.monotonic()
    cold = first_picture(browser, many.url)
    until(lambda: all(run["rows"] >= ROWS for run in many.get("/api/runs")["runs"]))
    read = time.monotonic() - since
    until(lambda: len(browser.find_elements("css selector", "tbody tr")) == RUNS)
    warm = sorted(first_picture(browser, many.url) for _ in range(3))
    print(f"\nfirst picture: {cold:.2f} s of a page that has just begun, all read after "
          f"{read:.1f} s; then {', '.join(f'{s:.2f}' for s in warm)} s")
    time.sleep(3)
    delays = []
    for i in range(5):
        now, since = script(browser, "return performance.now()"), time.monotonic()
        with open(many.folder / "out/run100/log.jsonl", "a") as out:
            write_row(out, 100, ROWS + i, random.Random(i))
        until(lambda: script(
            browser, "return performance.getEntriesByName('redrawn')[0]?.startTime > arguments[0]"
            " && Bokeh.documents.every(d => [...d.roots()][0].x_range.end > arguments[1])",
            now, (ROWS + i) * 20 * 1152))
        delays.append(time.monotonic() - since)
    most, now = memory(many.process)
    print(f"a live row is on the chart after {', '.join(f'{s:.2f}' for s in delays)} s")
    print(f"server: {now:.0f} MB, at most {most:.0f} MB")
    assert warm[0] < 1 and max(delays) < 1 and most < 150
    picture(browser, "many")


def processor(page):
    """Return the processor time of the server in seconds."""
    words = Path(f"/proc/{page.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def test_the_server_takes_little_processor_time(many):
    """Measure it while a client watches a run that grows."""
    until(lambda: all(run["rows"] >= ROWS for run in many.get("/api/runs")["runs"]))
    client = subprocess.Popen(["curl", "-sN", "-H", f"Authorization: Bearer {many.token}",
                               f"http://127.0.0.1:{many.port}/api/live"], stdout=subprocess.DEVNULL)
    time.sleep(3)
    since, before, rng = time.monotonic(), processor(many), random.Random(1)
    with open(many.folder / "out/run101/log.jsonl", "a") as out:
        for i in range(60):
            write_row(out, 101, ROWS + i, rng)
            out.flush()
            time.sleep(0.5)
    share = (processor(many) - before) / (time.monotonic() - since) / os.cpu_count()
    client.terminate()
    client.wait()
    print(f"\nserver, two rows a second: {100 * share:.2f} % of {os.cpu_count()} processors")
    assert share < 0.01


def test_1000_connections(many):
    held = []
    for _ in range(1000):
        connection = socket.create_connection(("127.0.0.1", many.port))
        connection.setblocking(False)
        held.append(connection)
    since = time.monotonic()
    assert many.ask("/")[0] == 200
    print(f"\nan answer behind 1,000 connections: {time.monotonic() - since:.2f} s, "
          f"{threads(many)} threads")
    assert threads(many) < 110
    for connection in held:
        connection.close()
    body = b"x" * (100 << 20)
    request = ("POST /api/start HTTP/1.1\r\nHost: localhost\r\n"
               f"Cookie: llamac_{many.port}={many.token}\r\nContent-Length: {len(body)}\r\n\r\n")
    answer = many.raw(request.encode() + body)[:20]  # empty if the server closes before all is sent
    assert (b" 413 " in answer or not answer) and many.process.poll() is None
    slow = socket.create_connection(("127.0.0.1", many.port))
    since, sent = time.monotonic(), 0
    with pytest.raises(OSError):
        while time.monotonic() < since + 60:
            slow.sendall(b"GET / HTTP/1.1\r\nX: "[sent % 20:sent % 20 + 1])
            sent += 1
            time.sleep(0.5)
    print(f"a byte every half second: cut off after {time.monotonic() - since:.0f} s")
    assert many.ask("/")[0] == 200
