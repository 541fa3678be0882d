"""What `data.py --show`, --page and --png report of a text, and the first row of a run's log."""
import html.parser
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import data
from configurator import freeze
from engine.text import survey
from engine.training import plan
from tests import forked

ROOT = Path(__file__).resolve().parents[1]


def rows_of(text, title):
    """Return the lines of a printed table."""
    return text.split(f"\n{title}\n")[1].split("\n\n")[0].splitlines()


def test_a_text_is_shown_as_tables_page_and_picture(tmp_path):
    """
    Counts equal those of the prepared folder, copies are counted, Chinese is shown as Chinese, and
    all text is escaped.
    """
    lines = ["<b>bold</b> &amp; 你好世界"] * 5
    lines += [f"天地玄黃 number {i} and more words" for i in range(60)]
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    done = forked.run([ROOT / "data.py", "d.jsonl", "--vocab_source=byte", "--show=True",
                       "--page=p.html", "--png=p.png"], tmp_path, os.environ)
    assert done.returncode == 0, done.stderr
    dataset = data.load(next((tmp_path / "cache").glob("d-byte-*/meta.json")).parent)
    counts = np.bincount(dataset.train, minlength=259)
    assert rows_of(done.stdout, "most frequent pieces")[1].split()[1] == f"{counts.max():,}"
    assert f"{np.count_nonzero(counts)} of 259" in done.stdout
    assert "every token is a byte" in done.stdout
    train = [split[1:-1]
             for split in np.split(dataset.train, np.flatnonzero(dataset.train == 1)[1:])]
    copied = sum(bytes((document - 3).astype(np.uint8)) == lines[0].encode() for document in train)
    twice = rows_of(done.stdout, "documents that occur more than once")[1].split(maxsplit=2)
    assert twice == [str(copied), str(len(lines[0].encode()) + 2), lines[0][:len(twice[2])]]
    assert copied > 1
    assert "<s>|⟨天⟩|⟨地⟩|⟨玄⟩|⟨黃⟩|␣|n|u" in done.stdout
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "<b>bold" not in text
    assert "&lt;b&gt;bold" in text
    assert "&amp;amp;" in text
    assert "http" not in text
    html.parser.HTMLParser().feed(text)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    for words, said in ((["--page=p.txt"], "ends in .html"),
                        (["--png=no/p.png"], "cannot be written")):
        done = forked.run([ROOT / "data.py", "d.jsonl", "--vocab_source=byte", *words], tmp_path,
                          os.environ)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr


def test_a_large_text_is_read_in_part_and_the_table_says_so():
    pieces = [(b"<unk>", 0, 2), (b"<s>", 0, 3), (b"</s>", 0, 3), ("世".encode(), 0, 1),
              ("▁ab".encode(), 0, 1)]

    class Vocabulary:
        kind, bos_id = "char", 1
        pieces = staticmethod(lambda: pieces)
        decode = staticmethod(lambda ids: "".join("世" if i == 3 else " ab" for i in ids if i > 2))

    tokens = np.tile(np.array([1, 3, 4, 4, 2], np.uint16), 1_200_000)
    meta = {f"{split}_{what}": 6_000_000 for split in ("train", "val")
            for what in ("tokens", "documents", "bytes")}
    prepared = data.Prepared(None, meta, tokens, tokens[:50], Vocabulary())
    found = data.survey_excerpts(prepared, 1 << 20)
    said = {row[0]: row[1:] for row in found["summary"]}
    assert 900_000 < int(said["tokens read here"][0].replace(",", "")) <= 1 << 20
    assert said["tokens"][0] == "6,000,000"
    assert found["most frequent pieces"][1][0] == "␣ab" and found["longest pieces"][2][0] == "世"
    assert said["pieces that are used"][0] == "4 of 5"
    assert found["documents that occur more than once"][1][2] == "世 ab ab"
    assert survey.bins(np.array([1, 5, 6, 40]))[1:] == [
        ["1 to 1", 1], ["2 to 3", 0], ["4 to 7", 2], ["8 to 15", 0], ["16 to 31", 0],
        ["32 to 63", 1]]
    row = data.data_rows(prepared)
    assert sum(row["data/lengths"]["counts"]) > 100_000
    assert row["pieces"][0][0] == "␣ab"
    assert len(row["documents"]) == 6
    json.dumps(row)


def test_tokens_that_are_a_character_together_stand_together():
    """
    Tokens are pieces of bytes, as in byte-level BPE, or bytes that sentencepiece spells <0x..>. A
    character that is never completed is shown as bytes.
    """
    day, world = "日".encode(), "界".encode()
    pieces = [(b"<s>", 0.0, 3), (b" the", 0.0, 1), (day, 0.0, 1), (day[:2], 0.0, 1),
              (day[2:] + world[:1], 0.0, 1), (world[1:], 0.0, 1), (b"<0xE6>", 0.0, 6),
              (b"<0x97>", 0.0, 6), (b"<0xA5>", 0.0, 6), (b"<0x41>", 0.0, 6),
              ("\u2581a".encode(), 0.0, 1), (b"\n\t", 0.0, 1), (b"<0x0A>", 0.0, 6)]
    for ids, text in (
            ([0, 1, 2], "<s>|␣the|日"), ([3, 4, 5, 2], "⟨日界⟩|日"),
            ([6, 7, 8, 9, 10], "⟨日⟩|A|␣a"), ([2, 3], "日|<0xE6><0x97>"),
            ([6, 7], "<0xE6>|<0x97>"), ([5, 1], "<0x95><0x8C>|␣the"),
            ([3, 1], "⟨\ufffd␣the⟩"), ([], ""), ([11, 12, 2], r"\n\t|\n|日")):
        assert survey.spelled(ids, pieces) == text
    assert survey.piece_tables(pieces, np.arange(13))["most frequent pieces"][1][0] == r"\n"


def test_a_text_is_shown_with_the_vocabulary_that_a_training_would_choose(
        tmp_path, monkeypatch, capsys):
    """
    A vocabulary that is given is kept. A small Chinese text is read by characters, another text by
    as many pieces as its model can use.
    """
    (tmp_path / "zh.txt").write_text("列位看官：你道此书从何而来？\n" * 50)
    (tmp_path / "en.txt").write_text("".join(
        f"Once upon a time there were {n} cats.\n" for n in range(4000)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "step_seconds", lambda *arguments: 0.01)
    for name, given, vocabulary in (
            ("zh.txt", {}, "--vocab_source=char"), ("zh.txt", {"vocab_source": "byte"}, ""),
            ("en.txt", {}, "--max_vocab_size="), ("stories:10", {}, "")):
        values = {"source": name, "vocab_source": "custom", "max_vocab_size": 0} | given
        for setting, value in values.items():
            monkeypatch.setattr(data, setting, value)
        found = data.vocabulary_of_training(freeze(vars(data), given))
        said = capsys.readouterr().out
        assert bool(found) == bool(vocabulary)
        assert all(f"--{setting}={value}" in said for setting, value in found.items())
        assert said.startswith(
            f"as `python train.py --data={name}` would prepare it: {vocabulary}"
        ) if vocabulary else not said


def test_the_page_of_a_text_whose_name_is_no_utf8(tmp_path):
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / name).write_text("A dog and a cat. " * 500)
    done = subprocess.run(
        [sys.executable, ROOT / "data.py", f"--source={name}", "--vocab_source=byte", "--show=True",
         "--page=look.html"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr.decode()
    assert "caf\\udce9" in (tmp_path / "look.html").read_text(encoding="utf-8")


def test_columns_of_a_table_align_beside_letters_of_two_columns():
    head, one, two = survey.table([["piece", "times"], ["一个", 1], ["hello", 2]])
    assert head == "  piece  times" and one == "  一个   1" and two == "  hello  2"
