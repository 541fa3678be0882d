"""
The WebAssembly module, in node and in the page of export.py, writes the same texts as ./run.

Chromium opens the page from file://.
"""
import itertools
import json
import shutil
import subprocess
import sys
import unicodedata
from functools import partial
from importlib.util import find_spec

import pytest
import torch

import export
from engine.formats import web_page
from engine.formats.chat_template import CHATML
from tests import test_page
from tests.conftest import ROOT, alone
from tests.test_export import build, command, refused
from tests.test_hostile import hostile_gguf
from tests.test_page import check_page, script, until
from tests.test_run import Model, run
from tokenizer import Bytes

browser = test_page.browser
PROMPT, QUESTIONS = "Once ü", ("Hi", "And you?")


@pytest.fixture(scope="module")
def program():
    """Return the path of browser/llamac.wasm; `make` compiles it if a source is newer."""
    if not find_spec("ziglang"):
        pytest.skip("needs ziglang: pip install -r requirements-dev.txt")
    (ROOT / "cache").mkdir(exist_ok=True)
    with alone(ROOT / "cache/wasm.lock"):
        compiler = f"WITH={sys.executable} -m ziglang cc -target wasm32-wasi"
        subprocess.run(["make", "-s", "-C", ROOT, compiler, "wasm"], check=True)
    return web_page.MODULE


def in_node(program, *jobs):
    """Return the result of each job; see browser.js."""
    if not shutil.which("node"):
        pytest.skip("needs node: apt-get install nodejs")
    done = subprocess.run(["node", ROOT / "tests/browser.js", program], input=json.dumps(jobs),
                          capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def job(file, *calls):
    return {"file": str(file), "calls": calls}


def printable(text):
    """Remove control characters, which ./run does not print."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def make(path, **extra):
    """Export a GGUF file; with a chat template in `extra`, its greedy answers end soon."""
    vocabulary = Bytes().with_control(["<|im_start|>", "<|im_end|>"])
    found = build(vocabulary.vocab_size, dim=32, n_layers=1, n_heads=2, max_seq_len=256, tied=False)
    with torch.no_grad():
        found.output.weight[260] *= 3
        found.output.weight[:3] = found.output.weight[259] = 0
    export.export_model(found.state_dict(), found.args, vocabulary, path, extra=extra)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make(tmp_path_factory.mktemp("model") / "m.gguf", **{"tokenizer.chat_template": CHATML})


def answers(run_bin, path):
    """Return the answers of ./run to QUESTIONS."""
    out = run(run_bin, path, "-m", "chat", "-t", 0, "-y", "Be brief.",
              stdin="\n".join([*QUESTIONS, ""]).encode()).decode()
    return [answer.removesuffix("\nUser: ") for answer in out.split("Assistant: ")[1:]]


def told(run_bin, path, prompt, *flags):
    """
    Return the text with which ./run continues a prompt.

    It runs without vector instructions: their rounding could decide between equally likely tokens.
    """
    return run(run_bin, path, "-i", prompt, *flags,
               isa="scalar").decode().removesuffix("\n").removeprefix(prompt)


def test_node_writes_the_text_of_run(program, run_bin, tmp_path):
    """Compare greedy and sampled texts, some beyond the context, for every type of weights."""
    forms = "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"
    jobs, expected = [], []
    for form in forms:
        path = tmp_path / f"{form}.gguf"
        Model(dim=256, heads=8, kv=2, layers=1, hidden=256, seq=32, seed=3).write_gguf(path, form)
        calls = [[PROMPT, {"temperature": 0, "steps": 60}],
                 [PROMPT, {"temperature": 0.7, "topp": 0.9, "seed": 7, "steps": 25}]]
        jobs.append(job(path, *calls))
        flags = ["-t", 0, "-n", 60], ["-t", 0.7, "-p", 0.9, "-s", 7, "-n", 25]
        expected.append([told(run_bin, path, PROMPT, *f) for f in flags])
    found = in_node(program, *jobs)
    assert [[*map(printable, result["texts"])] for result in found] == expected
    assert not found[0]["canChat"] and found[0]["positions"] == 32


def test_node_chats_like_run(program, run_bin, model):
    first, second = ([q, {"chat": True, "temperature": 0, "system": "Be brief."}]
                     for q in QUESTIONS)
    anew = [QUESTIONS[0], {**first[1], "fresh": True}]
    found, = in_node(program, job(model, first, second, ["x", {"cut": 1}], first, second, anew))
    expected = answers(run_bin, model)
    assert found["canChat"] and len(expected) == 2 and all(expected)
    texts = [*map(printable, found["texts"])]
    assert texts[:2] == texts[3:5] == expected and texts[5] == expected[0]


def test_stop_ends_a_text(program, model):
    found, = in_node(program, job(model, ["a", {"temperature": 1, "steps": 100_000_000, "cut": 2}]))
    assert 0 < found["tokens"] < 100_000


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_hostile_files_are_refused_as_by_run(program, run_bin, tmp_path, every):
    """The messages are the same. Sizes have 32 bits here, and their sums must not wrap around."""
    Model(vocab=260, layers=1, seq=16).write_gguf(tmp_path / "m.gguf")
    jobs, expected = [], []
    files = hostile_gguf((tmp_path / "m.gguf").read_bytes())
    for i, bad in enumerate(itertools.islice(files, 0, None, every)):
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(bad)
        expected.append(
            run(run_bin, path, status=1).removeprefix(f"run: {path}: ").removesuffix("\n"))
        jobs.append(job(path))
    assert [result.get("error") for result in in_node(program, *jobs)] == expected


def test_a_file_without_a_tokenizer(program, tmp_path):
    Model().write(tmp_path, "v0:")
    found, = in_node(program, job(tmp_path / "m.bin"))
    assert "tokenizer" in found["error"]


# ---- the page

def export_page(monkeypatch, source, path):
    command(monkeypatch, source, format="html", path=path)
    return path.as_uri()


def opened(browser, address):
    """Open a page and wait for its model."""
    browser.get(address)
    until(lambda: script(browser, "return find('status').textContent")
          .startswith(("Ready", "Error")))
    assert script(browser, "return find('status').textContent").startswith("Ready after ")
    browser.find_element("css selector", "summary").click()
    fill(browser, "temperature", 0)


def fill(browser, name, value):
    field = browser.find_element("id", name)
    field.clear()
    field.send_keys(str(value))


def written(browser, prompt):
    """Type a prompt and the Return key; return the text that follows once it is complete."""
    fill(browser, "prompt", prompt + "\n")
    until(lambda: script(browser, "return find('go').disabled === false"))
    return printable(script(
        browser, "return document.querySelector('article:last-child').lastChild.textContent"))


def test_the_page_writes_and_chats(program, run_bin, model, browser, tmp_path, monkeypatch):
    address = export_page(monkeypatch, model, tmp_path / "ä page.html")
    browser.set_network_conditions(offline=True, latency=0, throughput=0)
    opened(browser, address)
    fill(browser, "system-prompt", "Be brief.")
    assert [written(browser, question) for question in QUESTIONS] == answers(run_bin, model)
    check_page(browser)
    browser.find_element("css selector", "[value=story]").click()
    fill(browser, "steps", 50)
    text = written(browser, "Once")  # ends at the token that ends answers
    assert text and told(run_bin, model, "Once", "-t", 0, "-n", 50).startswith(text)
    assert "Written with seed" in script(browser, "return find('status').textContent")
    fill(browser, "steps", 900_000)
    fill(browser, "temperature", 1)
    fill(browser, "prompt", "a\n")
    until(lambda: script(browser, "return find('count').textContent").endswith("tokens/s"))
    browser.find_element("id", "stop").click()  # the page responds while its worker computes
    until(lambda: script(browser, "return find('stop').disabled"))
    fill(browser, "temperature", -1)
    browser.find_element("css selector", "summary").click()
    browser.find_element("id", "go").click()  # shows which field is wrong
    assert (script(browser, "return find('settings').open && document.activeElement.id")
            == "temperature")
    browser.set_network_conditions(offline=False, latency=0, throughput=0)


@pytest.mark.parametrize("scheme, width", [("light", 1300), ("dark", 390)])
def test_the_page_in_the_dark_and_on_a_telephone(program, run_bin, browser, tmp_path, monkeypatch,
                                                 scheme, width):
    plain = make(tmp_path / "m.gguf")
    address = export_page(monkeypatch, plain, tmp_path / "m.html")
    media = partial(browser.execute_cdp_cmd, "Emulation.setEmulatedMedia")
    media({"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 800})
    try:
        opened(browser, address)
        assert written(browser, PROMPT) == told(run_bin, plain, PROMPT, "-t", 0, "-n", 0)
        assert script(browser, "return document.documentElement.scrollWidth") <= width
        assert script(browser, "return getComputedStyle(document.body).colorScheme") == scheme
        check_page(browser)
    finally:
        media({"features": []})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_says_what_is_wrong(program, model, browser, tmp_path, monkeypatch):
    export_page(monkeypatch, model, tmp_path / "m.html")
    page = (tmp_path / "m.html").read_text()
    held = page.split('id="model">')[1].split("<")[0]
    (tmp_path / "bad.html").write_text(page.replace(held, held[:4000]))
    browser.get((tmp_path / "bad.html").as_uri())
    until(lambda: script(browser, "return find('status').textContent").startswith("Error: "))
    assert script(browser, "return find('go').disabled")


def test_mistakes_of_the_export_are_one_line(model, tmp_path, monkeypatch, capsys):
    page = partial(command, monkeypatch, model, format="html", path=tmp_path / "m.html")
    monkeypatch.setattr(web_page, "MODULE", ROOT / "browser/none.wasm")
    assert ("browser/none.wasm is missing, the WebAssembly module of the page; run `make wasm`"
            in refused(capsys, page))
    (tmp_path / "none.wasm").touch()
    monkeypatch.setattr(web_page, "ROOT", tmp_path)
    monkeypatch.setattr(web_page, "MODULE", tmp_path / "none.wasm")
    monkeypatch.setattr(web_page, "MAX_BYTES", 1000)
    assert "expected at most 0 MB in a page; try --dtype=q8_0" in refused(capsys, page)
    (tmp_path / "m.html").write_text("mine")
    assert "m.html: exists and is not known to be an export" in refused(capsys, page)
    assert (tmp_path / "m.html").read_text() == "mine" and "html" in export.FORMATS
