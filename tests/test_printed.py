"""Untrusted text that programs print has no character that a terminal obeys."""
import json
import re
import subprocess
import sys

import pytest

from engine.streams import one_line, printable
from tests.conftest import ROOT
from tests.test_run import reciter, run

EVIL = "\x1b[2J\x1b]0;x\x07\x9b31m\x7f\x08\r\u202e\u2066\u2028"
OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def program(folder, *words):
    """
    Run a program of the project. Return (exit code, stdout, stderr) after checking that a terminal
    obeys none of its output.
    """
    done = subprocess.run([sys.executable, ROOT / words[0], *words[1:]], cwd=folder,
                          capture_output=True)
    # A progress bar returns to the start of its line before a message.
    out, err = done.stdout.decode(), re.sub("\r(?=[a-z]+:)", "", done.stderr.decode())
    assert "Traceback" not in err and not OBEYED.search(out + err), (out, err)
    return done.returncode, out, err


def test_every_character_that_a_terminal_obeys_is_spelled_out():
    odd = [chr(n) for n in (*range(32), *range(127, 160), *range(0x202a, 0x202f),
                            *range(0x2066, 0x206a), 0xd800, 0xdfff)]
    for character in odd:
        kept = character in "\t\n"
        assert printable(f"a{character}b") == (
            f"a{character}b" if kept else f"a{ascii(character)[1:-1]}b")
        assert one_line(f"a{character}b") == f"a{ascii(character)[1:-1]}b"
    plain = "Grüße, 日本語 שלום مرحبا 👩‍👩‍👧 e\u0301 \u200f \\x1b"
    assert printable(plain) == one_line(plain) == plain


def test_what_a_program_prints_is_filtered_but_for_what_moves_its_progress_bars(tmp_path):
    (tmp_path / "x.py").write_text(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import configurator, tqdm
for stream in sys.stdout, sys.stderr:
    print({EVIL!r} + "\\ud800", "\\tß\\n", file=stream, flush=True)
for i in tqdm.tqdm(range(2), desc="a\\x1bb", file=sys.stderr):
    for j in tqdm.tqdm(range(2), file=sys.stderr):
        pass
raise ValueError({EVIL!r})
""")
    for flags in [], ["-u"]:
        done = subprocess.run([sys.executable, *flags, "x.py"], cwd=tmp_path, capture_output=True)
        out, err = done.stdout.decode(), done.stderr.decode()
        assert not OBEYED.search(out)
        assert "\\x1b[2J" in out
        assert "\\ud800 \tß\n" in out
        assert done.returncode == 1
        assert not OBEYED.search(
            err.replace("\x1b[A", "").replace("\n\r", "").replace("\r", "", err.count("it/s")))
        assert "\ra\\x1bb: 100%" in err and "ValueError: \\x1b[2J" in err


def test_a_models_text_is_printed_as_run_prints_it(tmp_path, run_bin):
    pieces = [(c.encode(), 1) for c in (
        "a", "\x1b", "[", "2", "J", "\x9b", "\x7f", "\t", "\n", "\r", "é", "\u202e", "z")]
    path = reciter(tmp_path, pieces)
    code, out, err = program(tmp_path, "sample.py", path.name, "--prompt=a", "--temperature=0")
    assert code == 0, err
    said = run(run_bin, path, "-t", 0, "-n", 0, "-i", "a").decode()
    assert out == said.replace("\u202e", "\\u202e") == "a[2J\t\né\\u202ez\n"


def test_a_run_that_sends_escapes_is_shown_in_one_line(tmp_path):
    for n, name in enumerate(("plain", f"b{EVIL}\nlast loss/val")):
        folder = tmp_path / "out" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(
            json.dumps({f"knob{EVIL}\n": f"{n}{EVIL}\n\tx", "text": "x" * 10000 * n}))
        (folder / "log.jsonl").write_text(
            json.dumps({"iter": 1, "time": 1, "loss/val": 2.5, f"m{EVIL}": 1}) + "\n")
    code, out, err = program(tmp_path, "compare.py", "out", "--plot=x.svg")
    assert code == 0 and out.count("\n") == 4 and max(map(len, out.splitlines())) < 1000, out
    assert not OBEYED.search((tmp_path / "x.svg").read_text())
    code, out, err = program(tmp_path, "compare.py", "out", "--plot=x.html")
    assert code == 0 and not OBEYED.search((tmp_path / "x.html").read_text())
    (tmp_path / "out" / f"c{EVIL}").mkdir()
    (tmp_path / "out" / f"c{EVIL}" / "log.jsonl").touch()
    code, out, err = program(tmp_path, "compare.py", "out")
    assert code == 0 and "skipped out/c\\x1b[2J" in err and err.count("\n") == 1


@pytest.mark.parametrize("words", [
    ["data.py", "--source=texts", "--vocab_source=byte", "--show=True", "--skip_bad=True"],
    ["compare.py", f"no{EVIL}"], ["compare.py", f"--{EVIL}=1"], ["sweep.py", f"{EVIL}.yaml"],
    ["evaluate.py", f"no{EVIL}", "--perplexity=x"]])
def test_names_and_lines_with_escapes_are_spelled_out(tmp_path, words):
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(3):
        (texts / f"{n}{EVIL}\nx.txt").write_bytes(
            f"Some {EVIL} text.\n".encode() * 200 + b"\xff" * (n == 0))
    code, out, err = program(tmp_path, *words)
    assert "\\x1b" in out + err and err.count("error:") <= 1
    if code:
        assert code == 2 and len(err.splitlines()) == 1
