"""Preparation of every kind of source, its error messages and interruptions, and the batches."""
import errno
import functools
import gzip
import hashlib
import http.server
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
from engine.text import blocks, corpus, downloads, encode, prepare, sources, stories, tables
from tests import forked
from tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
WORDS = ("the quick brown fox jumps over a lazy dog while naïve cats watch from high walls "
         "12 times\n").split(" ")


def prose(n_bytes, seed=0):
    """Return about n_bytes of words in random order, with single spaces, in lines of ~60 bytes."""
    return " ".join(np.random.default_rng(seed).choice(WORDS, n_bytes // 5))


@pytest.fixture
def small(monkeypatch):
    """Shrink blocks, segments and parts, so that a short text has many of each."""
    monkeypatch.setattr(blocks, "BLOCK", 4096)
    monkeypatch.setattr(corpus, "SEGMENT", 512)
    monkeypatch.setattr(encode, "PART", 2048)


def refused(capfd, call):
    """Return the one error line with which a call exits."""
    with pytest.raises(SystemExit) as end:
        call()
    lines = [line for line in re.split(r"[\n\r]", capfd.readouterr().err)
             if line.startswith("error: ")]
    assert end.value.code == 2
    assert len(lines) == 1
    return lines[0]


def documents(tokens, tokenizer):
    """Return the texts of a split's documents. Checks that each document is BOS … EOS."""
    tokens = np.array(tokens)
    assert tokens[0] == tokenizer.bos_id and tokens[-1] == tokenizer.eos_id
    ends = np.flatnonzero(tokens == tokenizer.eos_id)
    starts = np.insert(ends[:-1] + 1, 0, 0)
    assert (tokens[starts] == tokenizer.bos_id).all()
    assert (tokens == tokenizer.bos_id).sum() == len(starts)
    return [tokenizer.decode(tokens[a + 1:b].tolist()) for a, b in zip(starts, ends)]


# ---- splitting and encoding ----------------------------------------------------------------------

@pytest.mark.parametrize("vocab_source", ["custom", "byte", "char"])
def test_one_long_text_is_split_by_position(vocab_source, small, tmp_path):
    text = prose(40_000)
    (tmp_path / "a.txt").write_text(text)
    folder = data.prepare(tmp_path / "a.txt", vocab_source,
                          400 if vocab_source == "custom" else 0,
                          cache=tmp_path / "cache", workers=1)
    d = data.load(folder)
    (train,), (val,) = documents(d.train, d.tokenizer), documents(d.val, d.tokenizer)
    assert train + " " + val == text
    assert abs(d.meta["val_bytes"] / len(text.encode()) - 0.1) < 0.002
    assert d.meta["train_bytes"] == len(train.encode())
    assert d.meta["val_bytes"] == len(val.encode())
    assert (d.meta["train_documents"], d.meta["val_documents"]) == (1, 1)
    # The segments give the same tokens as the whole text encoded at once.
    assert d.train.tolist() == d.tokenizer.encode(train, bos=True, eos=True)
    assert d.val.tolist() == d.tokenizer.encode(val, bos=True, eos=True)


def llama_like(path):
    """Train a vocabulary like Llama's: a dummy prefix, and pieces that include runs of spaces."""
    return train_tokenizer([prose(30_000, 5) + "    and   more" * 50], 420, path)


@pytest.mark.parametrize("text", [
    prose(20_000).replace(" ", "  "),  # no single space anywhere
    "日本語の長い文章です。" * 700,  # no space at all, three bytes per character
    "\n".join(prose(60, i).replace(" ", "_") for i in range(300)),
    " \u2581 ".join(["a b c"] * 3000),
    prose(9000) + " " * 3000 + prose(9000),
], ids=["double", "japanese", "lines", "U+2581", "gap"])
def test_segments_of_difficult_texts_lose_nothing(text, small, tmp_path):
    (tmp_path / "a.txt").write_text(text)
    llama_like(tmp_path / "t.model")
    for vocab_source in "byte", "char", str(tmp_path / "t.model"):
        d = data.load(data.prepare(tmp_path / "a.txt", vocab_source, cache=tmp_path / "cache",
                                   workers=1))
        (train,), (val,) = documents(d.train, d.tokenizer), documents(d.val, d.tokenizer)
        assert re.sub(r"\s", "", train + val) == re.sub(r"\s", "", text.replace("\u2581", " "))
        if not d.tokenizer.add_dummy_prefix:
            assert text.replace("\u2581", " ") in (train + val, train + " " + val)


@pytest.mark.parametrize(
    "options", [{}, {"remove_extra_whitespaces": True, "normalization_rule_name": "nmt_nfkc"}])
def test_segments_give_the_tokens_of_the_whole(options, small, tmp_path, monkeypatch):
    import sentencepiece as spm
    with open(tmp_path / "t.model", "wb") as f:
        spm.SentencePieceTrainer.train(sentence_iterator=iter(prose(30_000, 5).split("\n")),
                                       model_writer=f, vocab_size=400, model_type="bpe",
                                       byte_fallback=True, minloglevel=5, **options)
    text = prose(30_000).replace("fox", "fox,  \u2581 and") + " x  y " * 200
    (tmp_path / "a.txt").write_text(text)
    d = data.load(data.prepare(tmp_path / "a.txt", str(tmp_path / "t.model"),
                               cache=tmp_path / "cache", workers=1))
    stop = d.meta["train_bytes"]
    raw = text.encode()
    assert d.train.tolist() == d.tokenizer.encode(raw[:stop].decode(), bos=True, eos=True)
    assert d.val.tolist() == d.tokenizer.encode(raw[stop + 1:].decode(), bos=True, eos=True)
    source = sources.find_source(str(tmp_path / "a.txt"), tmp_path, "text")
    assert len(corpus.make_corpus(source, prepare.Options(), 0.1, 5e6,
                                  tmp_path / "copies").rows) > 20


def test_a_separator_at_the_end_of_a_line_longer_than_a_block_separates_nothing(tmp_path):
    """The line is cut just before the separator, which then starts a block but not a line."""
    from array import array
    from engine.text import blocks, corpus
    # The first block ends four bytes early, since these may be part of a character.
    mark, line = corpus.SEPARATOR, blocks.BLOCK - 4
    (tmp_path / "a.txt").write_bytes(b"x" * line + mark + b"\n" + mark + b"\nend\n" + mark)
    found, cuts = array("q"), array("q")
    corpus.scan_text(tmp_path / "a.txt", lambda size: None, found, cuts)
    first, size = line + len(mark) + 1, (tmp_path / "a.txt").stat().st_size
    assert [tuple(found[i:i + 2]) for i in range(0, len(found), 3)] == [
        (0, first), (first + len(mark), size - len(mark)), (size, size)]


def test_separators_make_documents(small, tmp_path):
    texts = ([prose(30 + 7 * i, i) for i in range(100)]
             + [prose(5000), "short", "not <|endoftext|> alone"])
    texts.append(re.sub(" +", "\n", prose(9000, 7)))  # is cut after line feeds, which are kept
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\r\n".join(f"\n {t} \n" for t in texts)
                                    + "\n<|endoftext|>\n\n")
    d = data.load(data.prepare(tmp_path / "a.txt", "char", cache=tmp_path / "cache", workers=1))
    train, val = documents(d.train, d.tokenizer), documents(d.val, d.tokenizer)
    stripped = [t.strip() for t in texts]
    assert sorted(train + val) == sorted(stripped)
    assert [t for t in stripped if t in train] == train  # in the order of the file
    assert 0.05 <= d.meta["val_bytes"] / sum(len(t.encode()) for t in texts) <= 0.1
    assert d.meta["train_documents"] == len(train)
    assert d.meta["val_documents"] == len(val) > 1


def test_folder_of_txt_and_jsonl(tmp_path):
    source = tmp_path / "in"
    (source / "deep").mkdir(parents=True)
    (source / "b.txt").write_text("alone in a file, kept as it is \n")
    (source / "a.jsonl").write_text("".join(
        json.dumps({"text": f"text {i}: {prose(50, i)}"}) + "\n" for i in range(40)))
    (source / "deep" / "c.jsonl").write_text("\n".join(
        json.dumps({"story": f" story \u2028 {i} ", "x": 1}) for i in range(40)) + "\n\n")
    (source / "ignored.md").write_text("not this")
    d = data.load(data.prepare(source, "byte", cache=tmp_path / "cache", workers=1))
    found = documents(d.train, d.tokenizer) + documents(d.val, d.tokenizer)
    assert sorted(found) == sorted([f"text {i}: {prose(50, i)}".strip() for i in range(40)]
                                   + [f"story \u2028 {i}" for i in range(40)]
                                   + ["alone in a file, kept as it is \n"])


def test_what_is_no_text_of_a_folder_is_left_out_and_named(tmp_path, monkeypatch, capfd):
    """
    A working folder also holds environments, hidden folders, runs, W&B's logs, the cache and other
    kinds of files.
    """
    monkeypatch.chdir(tmp_path)
    texts = {"a.txt": "one " * 300, "deep/b.jsonl": json.dumps({"text": "two " * 300})}
    foreign = [
        ".git/info.txt", ".venv/pyvenv.cfg", ".venv/lib/x.txt", "env/pyvenv.cfg",
        "env/lib/python3/top_level.txt", "deep/site-packages/y.txt", "node_modules/z.txt",
        "__pycache__/w.txt", "out/my/log.jsonl", "out/my/out.txt",
        "wandb/run/files/requirements.txt", "llamac.egg-info/SOURCES.txt",
        "cache/tinyshakespeare/input.txt", "notes.md", ".hidden.txt", "deep/table.csv"
    ]
    for name in [*texts, *foreign]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(texts.get(name, "foreign"))
    (tmp_path / "linked").symlink_to(tmp_path / "deep")
    d = data.load(data.prepare(".", "byte", cache="cache", workers=1))
    assert "".join(documents(d.train, d.tokenizer)
                   + documents(d.val, d.tokenizer)).strip("onetw ") == ""
    line, = [line for line in capfd.readouterr().out.splitlines() if "left out" in line]
    assert line.startswith("left out of .: 11 folder(s): ")
    assert "; 3 file(s) hidden or of another kind: " in line
    for name in ".git", ".venv", "env", "deep/table.csv", "notes.md", ".hidden.txt":
        assert name in line
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/only.png").write_bytes(b"\x89PNG\r\n")
    assert "left out: 1 file(s) hidden or of another kind: only.png" in refused(
        capfd, lambda: data.prepare("docs"))


def test_files_that_are_no_text_are_left_out_when_asked(tmp_path, capfd):
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.txt").write_text(prose(3000))
    (source / "empty.jsonl").write_text("")
    (source / "latin.txt").write_bytes("déjà vu".encode("latin-1"))
    (source / "z.txt").write_text(prose(2000, 1))
    call = functools.partial(data.prepare, source, "byte", cache=tmp_path / "cache", workers=1)
    line = refused(capfd, call)
    assert "latin.txt: not UTF-8" in line and line.endswith("--skip_bad=True leaves such files out")
    d = data.load(call(skip_bad=True))
    train, val = documents(d.train, d.tokenizer), documents(d.val, d.tokenizer)
    assert train[0] == prose(3000) and train[1] + " " + val[0] == prose(2000, 1)
    assert "left out of " + str(source) + ": 1 of 4 files can't be read: " in capfd.readouterr().out
    assert d.meta["skipped"] == [str(source / "latin.txt")]
    for name in "a.txt", "z.txt":
        (source / name).write_bytes(b"\xff\xfe")
    for name in "empty.jsonl", "latin.txt":
        (source / name).unlink()
    assert "2 of 2 files can't be read: " in refused(capfd, lambda: call(skip_bad=True))


@pytest.mark.parametrize("at", [0, 20, 39])
def test_one_very_long_document_stays_in_the_training_text(tmp_path, at):
    texts = [prose(600, n) for n in range(40)]
    texts[at] = prose(200_000, 99)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    d = data.load(data.prepare(tmp_path / "a.jsonl", "byte", cache=tmp_path / "cache", workers=1,
                               val_fraction=0.05))
    val = documents(d.val, d.tokenizer)
    assert texts[at] not in val and set(val) <= set(texts)
    assert 0.025 <= d.meta["val_bytes"] / sum(map(len, texts)) <= 0.05
    assert len(val) + d.meta["train_documents"] == 40


def test_if_short_documents_are_too_few_the_longest_one_is_still_trained_on(tmp_path):
    texts = [prose(100_000, 1), prose(1000, 2), prose(500, 3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    made = functools.partial(data.prepare, vocab_source="byte", cache=tmp_path / "cache", workers=1)
    d = data.load(made(tmp_path / "a.jsonl", val_fraction=0.2))
    assert documents(d.val, d.tokenizer) == texts[1:]
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": texts[0]}))
    with pytest.raises(SystemExit):
        made(tmp_path / "one.jsonl")


def test_few_documents_are_split_by_position(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for name, size in ("a", 5000), ("b", 300), ("c", 4000):
        (source / f"{name}.txt").write_text(prose(size, size))
    d = data.load(data.prepare(source, "char", cache=tmp_path / "cache", workers=1))
    train, val = documents(d.train, d.tokenizer), documents(d.val, d.tokenizer)
    assert train[:2] == [prose(5000, 5000), prose(300, 300)]
    assert train[2] + " " + val[0] == prose(4000, 4000)
    total = sum(len(prose(n, n).encode()) for n in (5000, 300, 4000))
    assert abs(d.meta["val_bytes"] / total - 0.1) < 0.02


def test_a_tenth_is_held_out_up_to_a_limit(tmp_path, monkeypatch):
    """
    By default a tenth is held out, at most MAX_VAL_BYTES. Below that limit, the folder is the one
    that --val_fraction=0.1 makes.
    """
    (tmp_path / "a.txt").write_text(prose(40_000))
    made = functools.partial(data.prepare, vocab_source="byte", cache=tmp_path / "cache", workers=1)
    for source in tmp_path / "a.txt", "stories:60":
        assert made(source) == made(source, val_fraction=0.1)
    tenth = made(tmp_path / "a.txt")
    monkeypatch.setattr(prepare, "MAX_VAL_BYTES", 2000)
    few = made(tmp_path / "a.txt")
    assert few != tenth == made(tmp_path / "a.txt", val_fraction=0.1)
    assert abs(data.load(few).meta["val_bytes"] - 2000) < 20
    assert data.load(made("stories:60")).meta["val_documents"] == 6


@pytest.mark.parametrize("source", ["text", "documents", "jsonl"])
def test_a_part_of_a_text_is_spread_over_all_of_it(source, small, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(corpus, "STRETCH", 2048)
    texts = [" ".join(f"{n}.{word}" for word in prose(450, n).split(" ")) for n in range(200)]
    path = tmp_path / ("a.jsonl" if source == "jsonl" else "a.txt")
    between = {"text": " ", "documents": "\n<|endoftext|>\n", "jsonl": "\n"}[source]
    path.write_text(between.join(json.dumps({"text": text}) if source == "jsonl" else text
                                 for text in texts))
    whole, part = (data.load(data.prepare(path, "byte", cache=tmp_path / "cache", workers=1,
                                          max_text_bytes=most)) for most in (0, 20_000))
    assert ["% of the text)" in line
            for line in capfd.readouterr().out.splitlines()] == [False, True]
    assert bytes(whole.val) == bytes(part.val)
    assert part.meta["whole_bytes"] == pytest.approx(whole.meta["train_bytes"], rel=0.02)
    assert 10_000 < part.meta["train_bytes"] < 30_000 and "whole_bytes" not in whole.meta
    found = documents(part.train, part.tokenizer)
    if source == "text":
        assert all(text in " ".join(texts) and text[:1].strip() and text[-1:].strip()
                   for text in found)
    else:
        assert set(found) <= {text.strip() for text in texts}
    begun = [int(text.split(".")[0]) for text in found]
    assert begun == sorted(begun) and max(np.diff([*begun, 200])) < 40 and begun[0] == 0
    assert data.prepare(path, "byte", cache=tmp_path / "cache",
                        max_text_bytes=20_000) == part.folder != whole.folder
    more = data.load(data.prepare(path, "byte", cache=tmp_path / "cache", workers=1,
                                  max_text_bytes=10 ** 9))
    assert more.meta == whole.meta | {"source": str(path)}
    assert "expected stories:N" in refused(
        capfd, lambda: data.prepare("stories", cache=tmp_path / "cache", max_text_bytes=9))


def test_a_part_of_a_text_is_measured_without_the_other_columns(tmp_path):
    """Three quarters of this file are not text."""
    lines = [json.dumps({"text": prose(1000, n), "url": "x" * 3000}) for n in range(2000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    made = functools.partial(data.prepare, tmp_path / "a.jsonl", "byte", cache=tmp_path / "cache",
                             workers=1, val_fraction=0.01)
    whole = data.load(made()).meta
    part = data.load(made(max_text_bytes=1_000_000)).meta
    assert part["train_bytes"] == pytest.approx(1_000_000, rel=0.25)
    assert part["whole_bytes"] == pytest.approx(whole["train_bytes"], rel=0.02)


def test_how_much_text_a_source_holds(tmp_path, capfd):
    text = prose(40_000).encode()
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_bytes(text)
    (tmp_path / "in/b.jsonl").write_bytes(b"x" * 500)
    assert prepare.text_bytes(tmp_path / "in", tmp_path / "cache") == len(text) + 500
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text))
    assert prepare.text_bytes(tmp_path / "a.txt.gz") == len(text)
    # The last four bytes of this text, read as a number, are a plausible size field of a .gz file
    # of 12 MB.
    (tmp_path / "large.txt").write_bytes(b"once upon a time\n" * 700_000)
    assert prepare.text_bytes(tmp_path / "large.txt") == 700_000 * 17
    (tmp_path / "large.txt").unlink()
    assert prepare.text_bytes("stories:100") == 56_000
    assert prepare.text_bytes("tinyshakespeare") == 1_115_394
    folder = data.prepare(tmp_path / "in/a.txt", "byte", cache=tmp_path / "cache", workers=1)
    # The space between the splits may be missing.
    assert prepare.text_bytes(folder) in (len(text), len(text) - 1)
    assert "no such file" in refused(capfd, lambda: prepare.text_bytes(tmp_path / "nowhere.txt"))


def test_byte_order_mark_and_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"one two\r\n" * 50)
    d = data.load(data.prepare(tmp_path / "a.txt", "byte", cache=tmp_path / "cache", workers=1))
    assert documents(d.train, d.tokenizer)[0].startswith("one two\r\none")


def test_where_counting_begins_and_what_is_long(capfd):
    assert sources.count_stories("stories:2") == 2
    assert sources.count_stories("stories:999999999") == 999_999_999
    for source in ("stories:1", "stories:1000000000", "stories:", "stories:two"):
        assert "expected stories, or stories:N" in refused(
            capfd, lambda: sources.count_stories(source))
    two = 2 * corpus.SEGMENT
    rows = corpus.segments(np.array([[0, 0, two, 3], [0, two, 2 * two + 1, 3]]),
                           [np.array([1, two + 9])])
    # Only documents longer than two segments are cut.
    assert rows[:, 1:3].tolist() == [[0, two], [two, two + 9], [two + 9, 2 * two + 1]]
    # window_bos is set from a mean document length of 8 windows on.
    for tokens, bos in (8 * 32 * 5 - 1, None), (8 * 32 * 5, 1):
        described = SimpleNamespace(meta={"train_tokens": tokens, "train_documents": 5}, seq_len=32,
                                    tokenizer=SimpleNamespace(bos_id=1))
        assert data.Dataset.window_bos.fget(described) == bos
    assert corpus.Corpus([], []).sizes(np.array([[0, 5, 12, 0]])).tolist() == [7]


def test_large_vocabularies_are_stored_in_32_bits(tmp_path):
    (tmp_path / "a.txt").write_text("".join(map(chr, range(0x4E00, 0x9FA5)))
                                    + "".join(map(chr, range(0x10000, 0x1D000))))
    d = data.load(data.prepare(tmp_path / "a.txt", "char", cache=tmp_path / "cache", workers=1))
    assert d.meta["vocab_size"] > 1 << 16
    assert d.train.dtype == np.uint32
    assert d.val[-2] == d.meta["vocab_size"] - 1


# ---- stories -------------------------------------------------------------------------------------

@functools.lru_cache
def some_stories(cache):
    return data.load(data.prepare("stories:300", "custom", 800, cache=cache, workers=2))


def test_stories_and_their_floor(tmp_path_factory):
    d = some_stories(tmp_path_factory.getbasetemp() / "cache")
    train, val = documents(d.train, d.tokenizer), documents(d.val, d.tokenizer)
    written = [stories.write(corpus.SEED, i) for i in range(300)]
    assert train + val == [text for text, _ in written]
    assert len(val) == 30 == d.meta["val_documents"]
    bits, size = (sum(bits for _, bits in written[270:]),
                  sum(len(text.encode()) for text, _ in written[270:]))
    assert d.meta["floor_bpb"] == pytest.approx(bits / size, rel=1e-12)
    assert d.meta["val_bytes"] == size
    assert d.meta["entropy_bits_per_story"] == stories.entropy()
    assert d.meta["vocab_size"] == 800 and d.meta["source"] == "stories:300"


def test_stories_in_characters_know_them_all(tmp_path):
    d = data.load(data.prepare("stories:50", "char", cache=tmp_path / "cache", workers=1))
    assert d.tokenizer.unk_id not in d.train
    assert documents(d.val, d.tokenizer)[-1] == stories.write(corpus.SEED, 49)[0]


# ---- a source of one's own -----------------------------------------------------------------------

def test_a_source_is_one_new_file(tmp_path, monkeypatch, capfd):
    """
    The example of doc/data.md is read by its name, made once, and made again when its argument or
    its code changes.
    """
    page = (ROOT / "doc/data.md").read_text(encoding="utf-8")
    name, code = re.search(r"cat > engine/text/sources/(\w+)\.py <<'END'\n(.*?)END\n", page,
                           re.S).groups()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"{name}.py").write_text(code)
    monkeypatch.setattr(sources, "__path__", [str(tmp_path / "in")])
    call = functools.partial(data.prepare, vocab_source="byte", cache=tmp_path / "cache", workers=1)
    d = data.load(call(f"{name}:50"))
    train, val = documents(d.train, d.tokenizer), documents(d.val, d.tokenizer)
    example = sys.modules[f"engine.text.sources.{name}"]
    assert sorted(train + val) == sorted(example.documents("50")) and len(val) > 2
    assert prepare.text_bytes(f"{name}:50", tmp_path / "cache") == pytest.approx(
        d.meta["train_bytes"] + d.meta["val_bytes"], rel=0.2)
    monkeypatch.setattr(example, "documents", lambda argument: 1 / 0)
    assert call(f"{name}:50") == d.folder  # its documents are in the cache
    monkeypatch.undo()
    monkeypatch.setattr(sources, "__path__", [str(tmp_path / "in")])
    others = {d.folder, call(f"{name}:51"), call(f"{name}:50", column="body")}
    (tmp_path / "in" / f"{name}.py").write_text(code + "\n")
    assert len(others | {call(f"{name}:50")}) == 4
    assert f"expected stories, tinystories, tinyshakespeare, {name}, a text file" in refused(
        capfd, lambda: call("nowhere"))
    monkeypatch.delitem(sys.modules, example.__name__)


# ---- the cache, workers and interruption ---------------------------------------------------------

def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_prepared_once(tmp_path):
    (tmp_path / "a.txt").write_text(prose(3000))
    first = data.prepare(tmp_path / "a.txt", "byte", cache=tmp_path / "cache", workers=1)
    before = {p: p.stat().st_mtime_ns for p in first.iterdir()}
    assert data.prepare(tmp_path / "a.txt", "byte",
                        cache=tmp_path / "cache") == first == data.prepare(first)
    assert {p: p.stat().st_mtime_ns for p in first.iterdir()} == before
    assert sorted(before) == sorted(
        first / n for n in ("train.bin", "val.bin", "meta.json", "tokenizer.json"))
    others = {data.prepare(tmp_path / "a.txt", *how, cache=tmp_path / "cache", workers=1)
              for how in (("char",), ("byte", 0, 0.2), ("custom", 300), ("custom", 301))}
    (tmp_path / "a.txt").write_text(prose(3100))
    others.add(data.prepare(tmp_path / "a.txt", "byte", cache=tmp_path / "cache", workers=1))
    assert len(others | {first}) == 6


def test_vocabulary_of_other_prepared_data(tmp_path):
    (tmp_path / "a.txt").write_text(prose(3000))
    (tmp_path / "b.txt").write_text(prose(4000, 1))
    first = data.load(data.prepare(tmp_path / "a.txt", "custom", 300, cache=tmp_path / "cache",
                                   workers=1))
    for vocab_source in first.folder, first.folder / "tokenizer.model":
        second = data.load(data.prepare(tmp_path / "b.txt", str(vocab_source),
                                        cache=tmp_path / "cache", workers=1))
        assert second.meta["tokenizer_sha256"] == first.meta["tokenizer_sha256"]


def test_chosen_vocabulary_sizes(tmp_path):
    (tmp_path / "a.txt").write_text("tiny text, tiny words " * 20)
    assert data.load(data.prepare(tmp_path / "a.txt", cache=tmp_path / "cache",
                                  workers=1)).meta["vocab_size"] < 400
    (tmp_path / "b.txt").write_text("".join(chr(0x4E00 + i % 900) for i in range(30000)))
    assert data.load(data.prepare(tmp_path / "b.txt", cache=tmp_path / "cache",
                                  workers=1)).meta["vocab_size"] > 1159


def test_one_worker_and_two_give_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a worker finds the program from any working folder
    one = data.prepare("stories:9000", "byte", cache=tmp_path / "one", workers=1)
    two = data.prepare("stories:9000", "byte", cache=tmp_path / "two", workers=2)
    assert contents(one) == contents(two) and one.name == two.name


CALL = ("import sys; sys.path.insert(0, {root!r}); import data; "
        "data.prepare('stories:12000', 'byte', cache={cache!r}, workers=2)")


def test_killed_preparation_continues_to_the_same_bytes(tmp_path, monkeypatch):
    whole = data.prepare("stories:12000", "byte", cache=tmp_path / "whole", workers=1)
    command = [sys.executable, "-c", CALL.format(root=str(ROOT), cache=str(tmp_path / "cut"))]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    parts = tmp_path / "cut" / f"{whole.name}.partial" / "parts"
    while not list(parts.glob("*.npz")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    done = {p: p.stat().st_mtime_ns for p in parts.glob("*.npz")}
    assert not (tmp_path / "cut" / whole.name).exists()
    (parts / "0.npz.1.tmp").write_bytes(b"half a part")
    (parts.parent / "train.bin.1.tmp").write_bytes(b"half a file")
    after = []

    def encode(*arguments):
        encode_parts(*arguments)
        after.append({p: p.stat().st_mtime_ns for p in done})

    encode_parts = prepare.encode_parts
    monkeypatch.setattr(prepare, "encode_parts", encode)
    cut = data.prepare("stories:12000", "byte", cache=tmp_path / "cut", workers=2)
    assert after == [done]  # finished parts are not made again
    assert contents(cut) == contents(whole)


def test_what_gets_its_name_is_on_disk(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def note_replace(a, b):
        events.append((os.stat(a).st_ino, os.stat(Path(b).parent).st_ino))
        replace(a, b)

    monkeypatch.setattr(
        os, "fsync", lambda handle: (events.append(os.fstat(handle).st_ino), fsync(handle)))
    monkeypatch.setattr(os, "replace", note_replace)
    data.prepare("stories:20", "byte", cache=tmp_path, workers=1)
    renamed = [i for i, event in enumerate(events) if isinstance(event, tuple)]
    # job, rows, vocabulary, a part, train.bin, val.bin, meta.json, and the folder
    assert len(renamed) == 8
    for i in renamed:
        assert [events[i - 1], events[i + 1]] == [*events[i]]


def test_interrupted_before_it_is_published(tmp_path, monkeypatch, capfd):
    whole = data.prepare("stories:50", "byte", cache=tmp_path / "whole", workers=1)

    def stop(temporary, final):
        if final.name == whole.name:
            raise KeyboardInterrupt
        publish(temporary, final)

    publish = prepare.publish
    for _ in range(2):  # the second time the folder is complete except for its name
        monkeypatch.setattr(prepare, "publish", stop)
        assert "interrupted" in refused(
            capfd, lambda: data.prepare("stories:50", "byte", cache=tmp_path / "cut", workers=1))
    monkeypatch.setattr(prepare, "publish", publish)
    assert contents(data.prepare("stories:50", "byte", cache=tmp_path / "cut",
                                 workers=1)) == contents(whole)


def test_interrupted_by_ctrl_c(tmp_path):
    command = [sys.executable, ROOT / "data.py", "stories:30000", "--vocab_source=byte",
               f"--cache={tmp_path}", "--workers=2"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # as in a terminal
    while not list(tmp_path.glob("*.partial/parts/*.npz")):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, complaint = process.communicate(timeout=30)
    assert process.returncode == 2 and "Traceback" not in complaint
    assert (complaint.split("error: ")[1] ==
            "stories:30000: preparation was interrupted; the same command continues it\n")
    assert len(list(tmp_path.glob("*.partial/parts/*.npz"))) < 8  # it left out the remaining parts


def test_a_worker_that_dies_is_reported(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    line = refused(capfd, lambda: data.prepare("stories:9000", "byte", cache=tmp_path, workers=2))
    assert "ended with code 1" in line


def test_two_processes_prepare_together(tmp_path):
    command = [sys.executable, ROOT / "data.py", "stories:3000", "--vocab_source=byte",
               f"--cache={tmp_path}"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for _ in range(2)]
    out = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len({text.strip().split("\n")[-1] for text in out}) == 1
    assert sorted("prepared" in text for text in out) == [False, True]


# ---- refusals ------------------------------------------------------------------------------------

def test_command_line(tmp_path):
    (tmp_path / "my text.txt").write_text(prose(5000))
    command = [sys.executable, ROOT / "data.py", tmp_path / "my text.txt", "--vocab_size=300",
               "--val_fraction=0.2", f"--cache={tmp_path / 'cache'}"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "vocabulary of 300" in out
    assert abs(data.load(out.strip().split("\n")[-1]).meta["val_bytes"] / len(prose(5000))
               - 0.2) < 0.01
    assert "--tinystories_url" in subprocess.run([*command, "--help"], capture_output=True,
                                                 text=True).stdout


@pytest.mark.parametrize("content, words", [
    (None, "no such file"),
    (b"", "is empty"),
    (b"\n \n<|endoftext|>\n \n" * 30, "no text"),
    (b"x", "too short"),
    (b"good " * 1000 + b"\xff bad", "byte 0xff at offset 5000"),
    (b"cut off \xe2\x82", "at offset 8"),
    ("utf-16 text".encode("utf-16")[:-1], "UTF-16, but byte 0x74 near offset"),
])
def test_bad_text_is_refused_in_one_line(content, words, small, tmp_path, capfd):
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    line = refused(capfd, lambda: data.prepare(path, "byte", cache=tmp_path / "cache", workers=1))
    assert words in line and "a.txt" in line
    assert not list(tmp_path.glob("cache/[!.]*"))  # nothing is left behind


@pytest.mark.parametrize("line, workers, found", [
    ("{", 1, "is not JSON (Expecting property name"),
    ('{"text": 5}', 1, 'holds "text": 5'),
    ("[1]", 1, "holds [1], not an object"),
    ('{"prompt": "b", "answer": "c"}', 1, "holds an object with the keys prompt, answer"),
    ("5", 1, "holds 5, not an object"),
    ('{"text": "\\ud800"}', 1, "holds a character that UTF-8 can't write"),
    ("{", 2, "is not JSON"),
    ("[" * 99_999, 1, "is not JSON"),
    ('{"story": null}', 1, 'holds "story": null'),
    ("{}", 1, "holds an object without keys"),
])
def test_bad_jsonl_is_refused_in_one_line(line, workers, found, tmp_path, capfd):
    good = json.dumps({"text": prose(400_000)}) + "\n"
    (tmp_path / "a.jsonl").write_text(good * 12 + line)
    line = refused(capfd, lambda: data.prepare(tmp_path / "a.jsonl", "byte",
                                               cache=tmp_path / "cache", workers=workers))
    assert f'a.jsonl: line 13 {found}' in line
    assert line.endswith('; expected an object with a string under "text" or "story"')


@pytest.mark.parametrize("record, column", [
    ({"messages": [{"role": "user", "content": "Hi"}]}, "text"),
    ({"conversations": [{"from": "human", "value": "Hi"}]}, "text"),
    ({"instruction": "Hi", "output": "Ho"}, "text"),
    ({"messages": [{"role": "user", "content": "Hi"}]}, "messages"),
])
def test_conversations_are_refused_with_how_to_write_them(record, column):
    with pytest.raises(blocks.Unfit, match=r"; expected an object with a string under .*; "
                                           r"or a conversation: messages"):
        tables.jsonl_text(json.dumps(record), column, 1)


def test_prepared_data_are_not_prepared_otherwise(tmp_path):
    (tmp_path / "a.txt").write_text(prose(3000))
    folder = data.prepare(tmp_path / "a.txt", "byte", cache=tmp_path / "cache", workers=1)
    for words, status in ((["--vocab_source=byte", "--val_fraction=0"], 0),
                          (["--vocab_source=char"], 2), (["--max_text_bytes=99"], 2)):
        done = forked.run([ROOT / "data.py", folder, *words], tmp_path, os.environ)
        assert done.returncode == status, done
        assert (done.stdout == f"{folder}\n" if not status else
                done.stderr.count("\n") == 1 and f"error: {words[0]}: " in done.stderr), done


@pytest.mark.parametrize("arguments, words", [
    (dict(vocab_size=10), "--vocab_size=10"),
    (dict(vocab_size=-1), "--vocab_size=-1"),
    (dict(vocab_size=100_000), "expected at most"),
    (dict(vocab_size=264), "expected at least"),
    (dict(vocab_source="byte", vocab_size=300), "has 259"),
    (dict(vocab_source="char", vocab_size=300), "--vocab_size=300"),
    (dict(val_fraction=-0.1), "--val_fraction=-0.1"),
    (dict(val_fraction=1.5), "--val_fraction=1.5"),
    (dict(vocab_source="nowhere.model"), "nowhere.model"),
    (dict(vocab_source="llama2"), "tokenizer.model"),
    (dict(source="stories:x"), "stories:N"),
    (dict(source="stories:0"), "stories:N"),
    (dict(source="stories:" + "9" * 200), "stories:N"),
    (dict(vocab_source="chars"), "custom, bpe, byte, char"),
    (dict(source="."), "a folder without"),
    (dict(source="/dev/null"), "not a regular file"),
])
def test_bad_arguments_are_refused_in_one_line(arguments, words, tmp_path, monkeypatch, capfd):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text(prose(3000))
    monkeypatch.chdir(tmp_path / "empty")
    arguments = {"source": "../a.txt", "cache": tmp_path / "cache", "workers": 1} | arguments
    assert words in refused(capfd, lambda: data.prepare(**arguments))


def test_unreadable_folder(tmp_path, monkeypatch, capfd):
    (tmp_path / "in").mkdir()

    def walk(path, onerror):
        onerror(PermissionError(errno.EACCES, "Permission denied", str(path)))
        return []

    monkeypatch.setattr(os, "walk", walk)  # the test may run as root, which can read all folders
    assert "Permission denied" in refused(
        capfd, lambda: data.prepare(tmp_path / "in", cache=tmp_path / "cache"))


def test_file_that_changes_while_it_is_read(tmp_path, monkeypatch, capfd):
    path = tmp_path / "a.txt"
    path.write_text(prose(3000))
    monkeypatch.setattr(prepare, "make_vocabulary", lambda *a, real=prepare.make_vocabulary: (
        path.write_text(prose(3100)), real(*a))[1])
    assert "changed" in refused(
        capfd, lambda: data.prepare(path, "byte", cache=tmp_path / "cache", workers=1))


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
sys.path.insert(0, {root!r})
import data
data.prepare("stories:6000", "byte", cache={cache!r}, workers={workers})
"""


# The first limit stops the write of a part, the last one that of train.bin.
@pytest.mark.parametrize("limit, workers", [(10_000, 1), (10_000, 2), (3_000_000, 2)])
def test_a_disk_that_takes_no_more(limit, workers, tmp_path):
    program = FULL.format(limit=limit, root=str(ROOT), cache=str(tmp_path), workers=workers)
    result = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr.count("error: ") == 1
    assert "File too large" in result.stderr.split("error: ")[1]
    data.load(data.prepare("stories:6000", "byte", cache=tmp_path, workers=1))


def test_preparing_starts_without_torch():
    done = subprocess.run([sys.executable, "-c", "import sys, data; print('torch' in sys.modules)"],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_a_wrong_name_of_an_output_is_refused_before_the_work(tmp_path):
    (tmp_path / "d.txt").write_text("one two three " * 100)
    for words in (("data.py", "d.txt", "--vocab_source=byte", "--page=p.txt"),
                  ("sample.py", "none", "--attention=a.txt"), ("compare.py", "--plot=c.jpg")):
        done = subprocess.run([sys.executable, ROOT / words[0], *words[1:]], cwd=tmp_path,
                              capture_output=True, text=True)
        assert done.returncode == 2
        assert "expected a name that ends in" in done.stderr
        assert not (tmp_path / "cache").exists()


def test_full_disk_says_what_to_do(tmp_path, monkeypatch, capfd):
    def full(path, *arguments):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(corpus, "replacing", full)
    line = refused(capfd, lambda: data.prepare("stories:10", "byte", cache=tmp_path, workers=1))
    assert "No space left on device; free disk space" in line


# ---- load ----------------------------------------------------------------------------------------

def damaged(folder, name, change):
    """Replace the content of a file of a folder by change(content)."""
    content = bytearray((folder / name).read_bytes())
    (folder / name).write_bytes(change(content))


@pytest.mark.parametrize("name, change", [
    ("train.bin", lambda b: b[:-1]),
    ("val.bin", lambda b: b[:-2]),
    ("val.bin", lambda b: b + b"\0\0"),
    ("train.bin", lambda b: b[:100] + b"\7" + b[101:]),
    ("tokenizer.json", lambda b: b + b" "),
    ("meta.json", lambda b: b[:50]),
    ("meta.json", lambda b: b.replace(b'"version": 1', b'"version": 9')),
    ("meta.json", lambda b: b.replace(b'"vocab_size": 259', b'"vocab_size": 260')),
    ("meta.json", lambda b: b"[]"),
    ("meta.json", lambda b: b.replace(b"uint16", b"nonsense")),
    ("val.bin", None),
    ("tokenizer.json", None),
])
def test_damaged_folders_are_refused_in_one_line(name, change, tmp_path, capfd):
    folder = data.prepare("stories:20", "byte", cache=tmp_path, workers=1)
    data.load(folder)
    capfd.readouterr()
    damaged(folder, name, change) if change else (folder / name).unlink()
    assert str(folder) in refused(capfd, lambda: data.load(folder))


# ---- batches -------------------------------------------------------------------------------------

@pytest.mark.parametrize("n_tokens, batch_size, seq_len", [
    (1000, 4, 16), (257, 3, 64), (130, 8, 64), (65, 2, 64), (10_000, 7, 3), (64 * 20, 5, 64)])
def test_an_epoch_covers_every_window_once(n_tokens, batch_size, seq_len):
    tokens = np.arange(n_tokens, dtype=np.uint16)  # a token is its position
    windows = n_tokens // seq_len
    epochs, orders = 3, []
    steps = -(-epochs * windows // batch_size)
    rows = torch.cat([data.batch_slice(tokens, 7, step, batch_size, seq_len)[0]
                      for step in range(steps)])
    for epoch in range(epochs):
        starts = rows[epoch * windows:(epoch + 1) * windows, 0].numpy()
        along = np.sort((starts - starts[0]) % n_tokens)  # distances from the first, cyclically
        gaps = np.diff(along, append=along[0] + n_tokens)
        assert gaps.min() >= seq_len
        assert (gaps > seq_len).sum() <= 1  # side by side; the remainder is at most one gap
        orders.append(starts.tolist())
    if windows > 10:
        assert orders[0] != orders[1] != orders[2] and orders[0] != sorted(orders[0])


def test_windows_move_over_the_whole_context():
    """
    Windows start at every offset, even if few tokens or none are left over, and the windows that
    extend past the end of the text continue with its beginning.
    """
    for n_tokens in 131, 128:
        starts = np.concatenate([data.epoch_windows(3, epoch, n_tokens, 64)
                                 for epoch in range(600)])
        assert set((starts % 64).tolist()) == set(range(64))
    rows = torch.cat([data.batch_slice(np.arange(131, dtype=np.uint16), 3, step, 2, 64)[0]
                      for step in range(40)])
    assert (rows[:, -1] < rows[:, 0]).any() and rows.unique().tolist() == list(range(131))


def test_targets_are_the_next_tokens():
    tokens = np.arange(5000, dtype=np.uint16)
    x, y = data.batch_slice(tokens, 1, 3, 6, 32)
    assert x.shape == y.shape == (6, 32)
    assert x.dtype == y.dtype == torch.int64
    assert x.is_contiguous()
    assert y.is_contiguous()
    assert torch.equal(y, (x + 1) % 5000) and torch.equal(x[:, 1:], y[:, :-1])


def test_a_single_window_keeps_inputs_and_targets_apart():
    tokens = np.arange(100, 200, dtype=np.uint16)
    x, y = data.read_windows(tokens, np.array([3]), 4, np.array([2]), bos_id=1)
    assert x.tolist() == [[1, 104, 105, 106]] and y.tolist() == [[104, 105, -1, -1]]


def test_windows_of_long_documents_begin_with_bos(tmp_path):
    """
    In a file of one document, BOS replaces the first input of a window and the targets stay as they
    are. A file of many short documents stays unchanged.
    """
    (tmp_path / "long.txt").write_text(prose(5000))
    (tmp_path / "short.txt").write_text("\n<|endoftext|>\n".join(prose(40, i) for i in range(100)))
    for name in "long", "short":
        d = data.load(data.prepare(tmp_path / f"{name}.txt", "byte", cache=tmp_path / "cache",
                                   workers=1))
        d = data.Dataset(d, 16, 4, 4, seed=1)
        bos_id = d.window_bos
        assert bos_id == (d.tokenizer.bos_id if name == "long" else None)
        for step in range(90):
            plain, x = data.batch_slice(d.train, 1, step, 4, 16), d.batch(step)
            assert torch.equal(plain[1], x[1]) and torch.equal(plain[0][:, 1:], x[0][:, 1:])
            if name == "short":
                assert torch.equal(plain[0], x[0])
            else:  # a window that begins at the EOS keeps it: its first target is BOS
                assert torch.equal(x[0][:, 0] == bos_id, x[1][:, 0] != bos_id)


def test_an_evaluation_draws_from_all_of_a_large_split(monkeypatch):
    """
    An evaluation predicts exactly the number of tokens asked for, from every region, each token at
    most once, and reads only a part of the split.
    """
    rng = np.random.default_rng(1)
    tokens = np.concatenate([np.r_[1, rng.integers(3, 4000, n), 2]
                             for n in rng.integers(5, 300, 2000)]).astype(np.uint16)
    for size in 1 << 30, 1 << 16:
        monkeypatch.setattr(data, "EXCERPT", size)
        seen, starts, lengths = data.eval_windows(tokens, 1, 64, 10_000)
        assert lengths.sum() == 10_000
        assert (lengths[:-1] >= lengths[1:]).all()
        assert 1 <= lengths.min()
        assert lengths.max() == 64
        assert len(seen) == len(tokens) if size == 1 << 30 else len(seen) <= 1 << 16
        # The positions of the tokens that are predicted.
        places = (starts[:, None] + np.arange(1, 65))[np.arange(64) < lengths[:, None]]
        assert len(set(places.tolist())) == 10_000
        assert (seen[places] != 1).all()
        assert np.histogram(starts, 10, (0, len(seen)))[0].min() > 3  # windows in each tenth
        assert all(np.array_equal(a, b) for a, b in zip(
            (seen, starts, lengths), data.eval_windows(tokens, 1, 64, 10_000)))
    # A larger number than the split holds: all of its spans are used.
    assert (len(data.eval_windows(tokens, 1, 64, 10 ** 9)[1])
            == len(data.eval_spans(tokens, 1, 64)[0]))


@pytest.mark.parametrize("at_once", [1024, 4096, 10 ** 6])
def test_processes_share_an_evaluation(tmp_path, at_once):
    d = some_stories(tmp_path / "cache")
    whole = [t for x, y, _ in data.Dataset(d, 64, 18, 18, 1).eval_batches("val", 3000, at_once)
             for t in y[y >= 0].tolist()]
    shares = [[(y[y >= 0].tolist(), counts)
               for x, y, counts in data.Dataset(d, 64, 18, 54, 1, rank, 3).eval_batches(
                   "val", 3000, at_once)] for rank in range(3)]
    assert len(whole) == 3000
    assert len({len(share) for share in shares}) == 1  # all ranks have equally many batches
    assert sorted(whole) == sorted(
        t for share in shares for ids, counts in share if counts for t in ids)
    assert all(share[0][1] for share in shares)  # each rank has a share of it


@pytest.mark.parametrize("world", [2, 3, 5, 6, 16])
def test_ranks_share_the_batch_of_one_process(world):
    tokens = np.random.default_rng(0).integers(0, 60000, 3000).astype(np.uint16)
    for step in 0, 1, 17, 400:
        whole = data.batch_slice(tokens, 5, step, 12, 16)
        shares = [data.batch_slice(tokens, 5, step, 12, 16, (rank, world)) for rank in range(world)]
        # All ranks have equally many rows; the targets of surplus rows are blank.
        assert len({x.shape for x, _ in shares}) == 1
        assert torch.equal(whole[0], torch.cat([x[y[:, 0] >= 0] for x, y in shares]))
        assert torch.equal(whole[1], torch.cat([y[y[:, 0] >= 0] for x, y in shares]))
        assert all((y >= 0).all(1).eq((y >= 0).any(1)).all() for x, y in shares)


def test_a_batch_depends_on_its_arguments_alone():
    tokens = np.arange(4000, dtype=np.uint16)
    first = data.batch_slice(tokens, 5, 9, 8, 16)[0]
    data.epoch_windows.cache_clear()
    assert torch.equal(first, data.batch_slice(tokens, 5, 9, 8, 16)[0])
    assert not torch.equal(first, data.batch_slice(tokens, 6, 9, 8, 16)[0])
    assert not torch.equal(first, data.batch_slice(tokens, 5, 10, 8, 16)[0])
    # The order is the same on every platform.
    assert data.batch_slice(tokens, 5, 9, 4, 16)[0][:, 0].tolist() == [970, 1786, 650, 1066]


def test_splits_that_hold_no_window(capfd):
    assert "holds no window of 64" in refused(
        capfd, lambda: data.batch_slice(np.zeros(63, np.uint16), 0, 0, 1, 64))


# ---- download ------------------------------------------------------------------------------------

BODIES = {
    "TinyStoriesV2-GPT4-train.txt":
        "\n<|endoftext|>\n".join(prose(200, i) for i in range(400)).encode(),
    "TinyStoriesV2-GPT4-valid.txt":
        "\n<|endoftext|>\n".join(prose(200, i) for i in range(500, 510)).encode(),
    "input.txt": prose(5000).encode()
}
STORIES = list(BODIES)[:2]


class Hub(http.server.BaseHTTPRequestHandler):
    """
    A server of BODIES. mood: what to do to each of the next requests; all later ones are served
    well.
    """
    mood, requests = [], []
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        mood = self.mood.pop(0) if self.mood else "well"
        self.requests.append((self.path, self.headers.get("Range"), mood))
        body = BODIES[self.path.split("/")[-1]]
        start = (int(re.match(r"bytes=(\d+)-", self.headers["Range"])[1])
                 if "Range" in self.headers else 0)
        if mood == "redirect":
            self.send_response(302)
            self.send_header("Location", f"http://{self.headers['Host']}/elsewhere{self.path}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if isinstance(mood, int):
            return self.send_error(mood)
        if mood == "hang up":
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        if mood == "wrong":
            body = body[:-1] + b"?"
        if mood in ("ignore range", "begin anew"):
            start = 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range",
                             f"bytes {start + (mood == 'shift')}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        part = body[start:]
        if mood in ("break", "begin anew"):
            self.wfile.write(part[:len(part) // 2])
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        self.wfile.write(part)


@pytest.fixture
def hub(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    sums = {name: (len(body), hashlib.sha256(body).hexdigest()) for name, body in BODIES.items()}
    monkeypatch.setitem(downloads.DOWNLOADS, "tinystories", {name: sums[name] for name in STORIES})
    monkeypatch.setitem(downloads.DOWNLOADS, "tinyshakespeare", {"input.txt": sums["input.txt"]})
    monkeypatch.setattr(downloads, "PATIENCE", (0, 0, 0))
    for source in downloads.DOWNLOADS:
        monkeypatch.setattr(data, f"{source}_url", f"http://127.0.0.1:{server.server_port}/base")
    for name in "http_proxy", "HTTP_PROXY", "all_proxy":
        monkeypatch.delenv(name, raising=False)
    Hub.mood, Hub.requests = [], []
    yield Hub
    server.shutdown()
    server.server_close()


def test_tinystories_from_download_to_tokens(hub, tmp_path):
    d = data.load(data.prepare("tinystories", "byte", cache=tmp_path, workers=1))
    for split, name in zip((d.train, d.val), STORIES):
        assert documents(split, d.tokenizer) == [
            t.strip() for t in BODIES[name].decode().split("\n<|endoftext|>\n")]
    assert [path for path, _, _ in hub.requests] == [f"/base/{name}" for name in STORIES]
    for path in (tmp_path / "tinystories").iterdir():
        path.unlink()  # once prepared, the text is not needed
    assert data.prepare("tinystories", "byte", cache=tmp_path) == d.folder
    assert len(hub.requests) == 2


def test_tinyshakespeare_is_downloaded_or_taken_where_it_lies(hub, tmp_path, capfd):
    text, first = (BODIES["input.txt"].decode(),
                   data.prepare("tinyshakespeare", "char", cache=tmp_path / "one", workers=1))
    d = data.load(first)
    (train,), (val,) = documents(d.train, d.tokenizer), documents(d.val, d.tokenizer)
    assert train + " " + val == text and abs(len(val) / len(text) - 0.1) < 0.01  # the last tenth
    mine = tmp_path / "two/tinyshakespeare/input.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text(text[:-1])
    line = refused(
        capfd, lambda: data.prepare("tinyshakespeare", "char", cache=tmp_path / "two", workers=1))
    assert f"{mine}: {len(text.encode()) - 1:,} bytes with sha256" in line
    assert "move it elsewhere" in line
    assert mine.exists()
    mine.write_text(text)
    assert contents(data.prepare("tinyshakespeare", "char", cache=tmp_path / "two",
                                 workers=1)) == contents(first)
    assert len(hub.requests) == 1


def test_the_shakespeare_presets_train_on_shakespeare():
    for name in "shakespeare", "shakespeare_short":
        assert runpy.run_path(str(ROOT / f"config/{name}.py"))["data"] == "tinyshakespeare"
    assert downloads.DOWNLOADS["tinyshakespeare"] == {
        "input.txt": (1_115_394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")
    }


@pytest.mark.parametrize("mood", [
    ["break"] * 5, ["hang up", "break", 503, "break"], ["redirect", "break"],
    ["break", "ignore range"], ["break", "begin anew", "break"], ["break", "shift"],
    ["break", 429, 500]])
def test_downloads_survive(mood, hub, tmp_path):
    name, body = next(iter(BODIES.items()))
    hub.mood = list(mood)
    downloads.download(tmp_path / "deep" / "er" / name, data.tinystories_url,
                       *downloads.DOWNLOADS["tinystories"][name])
    assert (tmp_path / "deep" / "er" / name).read_bytes() == body and not hub.mood
    assert [p.name for p in (tmp_path / "deep" / "er").iterdir()] == [name]
    if mood == ["break"] * 5:  # every request asks only for the missing bytes
        asked = [int(range_[6:-1]) for _, range_, _ in hub.requests[1:]]
        assert asked == sorted(asked) and len(set(asked)) == 5 and asked[0] == len(body) // 2


def test_a_download_waits_longer_after_each_failure_in_a_row(hub, tmp_path, monkeypatch):
    waits, name = [], next(iter(BODIES))
    monkeypatch.setattr(downloads, "PATIENCE", (1, 2, 4))
    monkeypatch.setattr(downloads, "time", SimpleNamespace(sleep=waits.append))
    hub.mood = ["hang up", "hang up", "break", "hang up"]
    downloads.download(tmp_path / name, data.tinystories_url,
                       *downloads.DOWNLOADS["tinystories"][name])
    assert waits == [1, 2, 1]


def test_a_later_call_continues_a_download(hub, tmp_path, capfd):
    name, body = next(iter(BODIES.items()))
    hub.mood = ["break"] + ["hang up"] * 4
    line = refused(capfd, lambda: data.prepare("tinystories", "byte", cache=tmp_path))
    tmp_path /= "tinystories"
    assert f"{len(body) // 2:,} of {len(body):,} bytes are downloaded" in line
    assert f"put the file at {tmp_path / name}" in line
    assert not (tmp_path / name).exists()
    downloads.download(tmp_path / name, data.tinystories_url,
                       *downloads.DOWNLOADS["tinystories"][name])
    assert (tmp_path / name).read_bytes() == body
    assert hub.requests[-1][1] == f"bytes={len(body) // 2}-"


@pytest.mark.parametrize("mood, words, requests", [
    (["wrong"], "sha256", 1), ([404], "404", 1), ([403], "403", 1),
    (["hang up"] * 9, "continues", 4)])
def test_failed_downloads_end_in_one_line(mood, words, requests, hub, tmp_path, capfd):
    name, body = next(iter(BODIES.items()))
    hub.mood = list(mood)
    assert words in refused(capfd, lambda: data.prepare("tinystories", "byte", cache=tmp_path))
    tmp_path /= "tinystories"
    assert len(hub.requests) == requests and not (tmp_path / name).exists()
    if words == "sha256":
        assert not (tmp_path / f"{name}.part").exists()


def test_a_server_that_is_not_there(hub, tmp_path, monkeypatch, capfd):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    monkeypatch.setattr(data, "tinystories_url", f"http://127.0.0.1:{port}")
    assert "refused" in refused(capfd, lambda: data.prepare("tinystories", "byte", cache=tmp_path))


def test_no_room_for_a_download(hub, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(downloads.DOWNLOADS["tinystories"], "TinyStoriesV2-GPT4-train.txt",
                        (1 << 60, "0"))
    line = refused(capfd, lambda: data.prepare("tinystories", "byte", cache=tmp_path))
    assert "too little disk space" in line and not hub.requests


def test_prefetched_batches_are_those_asked_for():
    made = []
    prefetch = data.Prefetch(lambda step: made.append(step) or 10 * step)
    assert [prefetch.get(step) for step in (5, 6, 7, 3, 4)] == [50, 60, 70, 30, 40]
    prefetch.thread.shutdown()
    assert sorted(made) == [3, 4, 5, 5, 6, 7, 8]


@pytest.mark.parametrize("rank, world", [(0, 1), (0, 2), (1, 2)])
def test_the_places_of_a_batch_are_those_of_its_targets(tmp_path, rank, world):
    """This includes windows that extend past the end, and text read beside the training split."""
    letters = np.random.default_rng(1).integers(97, 123, 2000)
    (tmp_path / "my.txt").write_bytes(bytes(letters.tolist()))
    prepared = data.load(data.prepare(tmp_path / "my.txt", "byte", cache=tmp_path))
    dataset = data.Dataset(prepared, 64, 3, 6, 5, rank, world)
    for beside in (0, 500):
        dataset.read_beside(np.arange(beside, dtype=np.uint16) % 200)
        for step in range(20):
            y, places = dataset.make_batch(step)[1], dataset.places(step)
            assert y.shape == places.shape == (6 // world, 64)
            assert (dataset.read_from[places] == y.numpy()).all()


@pytest.mark.parametrize("settings, words", [
    ({"vocab_size": -1}, "--vocab_size=-1: expected 0 or more"),
    ({"max_vocab_size": -1}, "--max_vocab_size=-1: expected 0 or more"),
    ({"max_text_bytes": -5}, "--max_text_bytes=-5: expected 0 or more"),
    ({"max_vocab_size": 300}, "--max_vocab_size=300: too few, expected at least 320"),
    ({"vocab_source": "custom:5000"},
     "--vocab_source=custom:5000: expected custom; --vocab_size sets the number of pieces"),
    ({"vocab_source": "byte:x"}, "expected byte"),
    ({"cache": "loop"}, "loop: Too many levels of symbolic links"),
    ({"source": "loop"}, "loop: Too many levels"),
    ({"source": "a" * 999}, "File name too long"),
    ({"source": "a\0b"}, "null byte"),
    ({"vocab_source": "b" * 999}, "File name too long"),
    ({"val_fraction": 1e-20}, "too short to hold out"),
])
def test_settings_that_cannot_be_are_one_line(tmp_path, monkeypatch, capsys, settings, words):
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")
    (tmp_path / "my.txt").write_text("A dog and a cat. " * 500)
    with pytest.raises(SystemExit) as end:
        data.prepare(**({"source": "my.txt", "vocab_source": "byte"} | settings))
    err = capsys.readouterr().err
    assert end.value.code == 2 and words in err and err.count("\n") == 1


def test_a_vocabulary_is_learned_of_the_least_size_and_where_blocks_are_drawn(tmp_path):
    """
    Train the smallest vocabulary from a text with U+2585. This block of a progress bar is
    sentencepiece's own mark of an unknown piece.
    """
    (tmp_path / "bars.txt").write_text(
        "\u2585\u2586 half of the work is done, \u2585 and a dog sat on the mat\n" * 300)
    found = data.load(data.prepare(tmp_path / "bars.txt", max_vocab_size=320, cache=tmp_path))
    assert 259 < found.tokenizer.vocab_size <= 320
    text = "\u2585 the dog is done"
    assert found.tokenizer.decode(found.tokenizer.encode(text, bos=False, eos=False)) == text


def test_a_link_to_what_is_read_anyway_is_left_out(tmp_path, capsys):
    """If the link were read too, a document could be both trained on and held out."""
    folder, elsewhere = tmp_path / "texts", tmp_path / "elsewhere.txt"
    folder.mkdir()
    elsewhere.write_text("Another text, from another folder. " * 30)
    for n in range(3):
        (folder / f"{n}.txt").write_text(f"This is text number {n}. " * 30)
    (folder / "again.txt").symlink_to("1.txt")
    (folder / "other.txt").symlink_to(elsewhere)
    found = data.load(data.prepare(folder, vocab_source="byte", cache=tmp_path / "cache"))
    read = sum(path.stat().st_size
               for path in (elsewhere, *(folder / f"{n}.txt" for n in range(3))))
    # The space where the last document is cut is dropped.
    assert read - 1 <= found.meta["train_bytes"] + found.meta["val_bytes"] <= read
    assert "1 file(s) hidden or of another kind: again.txt\n" in capsys.readouterr().out


def test_a_file_of_that_name_in_the_cache_is_not_emptied(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/.lock").write_text("mine")
    (tmp_path / "my.txt").write_text("A dog and a cat. " * 500)
    data.prepare(tmp_path / "my.txt", vocab_source="byte", cache=tmp_path / "cache")
    assert (tmp_path / "cache/.lock").read_text() == "mine"


def test_what_stands_beside_the_text_is_none(tmp_path):
    """Other fields of a record do not count as text."""
    rows = [json.dumps({"id": n, "text": "A dog. " * 9, "meta": "x" * 900}) for n in range(100)]
    (tmp_path / "my.jsonl").write_text("\n".join(rows))
    assert prepare.text_bytes(tmp_path / "my.jsonl") == pytest.approx(6300, rel=0.01)
    (tmp_path / "odd.jsonl").write_text("nonsense\n" * 10)
    # Invalid lines are reported only when the file is read.
    assert prepare.text_bytes(tmp_path / "odd.jsonl") == 90


def test_a_file_that_changes_while_it_is_read_is_one_line(tmp_path, monkeypatch, capsys):
    text, vocabulary = tmp_path / "my.txt", prepare.make_vocabulary
    text.write_text("Ein Bär läuft durch den Wald. " * 500)

    def changed(*arguments):
        text.write_bytes(b"\xe4" + text.read_bytes()[1:])
        return vocabulary(*arguments)
    monkeypatch.setattr(prepare, "make_vocabulary", changed)
    with pytest.raises(SystemExit):
        data.prepare(text, vocab_source="byte", cache=tmp_path / "cache")
    err = capsys.readouterr().err.splitlines()
    assert err[-1].endswith("my.txt: changed while it was read; run the same command again")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_preparation_is_continued_from_another_folder(tmp_path, monkeypatch):
    """The other folder has other relative paths for the same files."""
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/my.txt").write_text(prose(50_000))
    monkeypatch.chdir(tmp_path / "a")
    assemble = prepare.assemble
    monkeypatch.setattr(prepare, "assemble", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        data.prepare("my.txt", vocab_source="byte", cache=tmp_path / "cache")
    assert next((tmp_path / "cache").glob("*.partial"))
    monkeypatch.setattr(prepare, "assemble", assemble)
    monkeypatch.chdir(tmp_path / "a/b")
    found = data.load(data.prepare("../my.txt", vocab_source="byte", cache=tmp_path / "cache"))
    assert found.meta["train_bytes"] + found.meta["val_bytes"] >= 49_000


def test_who_waits_for_another_preparation_says_so(tmp_path):
    text = tmp_path / "my.txt"
    text.write_text(prose(20_000))
    with prepare.locked(tmp_path / "cache"):
        waiting = subprocess.Popen([sys.executable, ROOT / "data.py", text, "--vocab_source=byte",
                                    f"--cache={tmp_path / 'cache'}"],
                                   stdout=subprocess.PIPE, text=True)
        assert (waiting.stdout.readline() ==
                f"waiting for another program that is preparing data in {tmp_path / 'cache'}\n")
    assert "prepared" in waiting.communicate()[0] and waiting.returncode == 0


def test_a_text_without_spaces_is_cut_behind_lines_and_stays_the_same(tmp_path, small):
    """Its segments are encoded separately, and together they hold the whole text."""
    rng = np.random.default_rng(1)
    lines = ["".join(map(chr, rng.integers(0x4e00, 0x4e80, 30))) for _ in range(900)]
    text = "\n".join(lines)
    (tmp_path / "zh.txt").write_text(text)
    for source in "custom", "bpe", "char":
        found = data.load(data.prepare(tmp_path / "zh.txt", vocab_source=source,
                                       max_vocab_size=512 * (source != "char"), cache=tmp_path,
                                       workers=1))
        both = (found.tokenizer.decode(found.train.tolist())
                + found.tokenizer.decode(found.val.tolist()))
        assert both.replace("\n", "") == text.replace("\n", "")
        assert text.count("\n") - both.count("\n") in (0, 1)


def test_a_part_of_a_text_without_spaces_is_as_large_as_it_should_be(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "STRETCH", 8192)
    monkeypatch.setattr(corpus, "SEGMENT", 1024)
    (tmp_path / "zh.txt").write_text("\n".join("天地玄黃宇宙洪荒" * 4 for _ in range(5000)))
    for most in 30_000, 100_000, 300_000:
        meta = data.load(data.prepare(tmp_path / "zh.txt", vocab_source="byte",
                                      max_text_bytes=most, cache=tmp_path)).meta
        assert meta["train_bytes"] == pytest.approx(most, rel=0.2)


def test_a_table_without_the_column_does_not_keep_a_source_tree_from_being_read(tmp_path, capsys):
    (tmp_path / "tree").mkdir()
    for n in range(3):
        (tmp_path / f"tree/{n}.py").write_text(f"x = {n}\n" * 500)
    (tmp_path / "tree/results.csv").write_text("step,loss\n" + "1,2\n" * 200)
    assert data.load(data.prepare(tmp_path / "tree", vocab_source="byte",
                                  cache=tmp_path / "cache")).meta["train_bytes"] > 3000
    assert "of another kind: results.csv" in capsys.readouterr().out


@pytest.mark.parametrize("content", [
    json.dumps([{"content": prose(3000)}, {"content": prose(3000, 1)}], indent=1),
    "".join(json.dumps({"content": prose(3000, n)}) + "\n" for n in range(3))])
def test_records_without_the_column_are_not_taken_for_text(content, tmp_path, capfd):
    """Like those of a .jsonl file. In a source tree they are text."""
    (tmp_path / "tree").mkdir()
    path = tmp_path / "tree/a.json"
    path.write_text(content)
    made = functools.partial(data.prepare, vocab_source="byte", cache=tmp_path / "cache", workers=1)
    line = refused(capfd, lambda: made(path))
    assert "with the keys content; expected an object with a string under" in line
    assert data.load(made(path, column="content")).meta["train_bytes"] > 3000
    (tmp_path / "tree/b.py").write_text("x = 1\n" * 10)
    assert data.load(made(tmp_path / "tree")).meta["train_bytes"] > 3000
    path.write_text(json.dumps({"name": "settings", "text size": 9}, indent=1) * 99)  # no records
    assert data.load(made(path)).meta["train_bytes"] > 3000


def test_a_folder_with_a_meta_json_of_its_own_is_one_of_texts(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/a.txt").write_text(prose(20_000))
    (tmp_path / "mine/meta.json").write_text('{"title": "my corpus"}')
    assert data.load(data.prepare(tmp_path / "mine", vocab_source="byte",
                                  cache=tmp_path / "cache")).meta["val_bytes"] > 1000


def test_of_few_stories_one_is_left_to_learn(tmp_path):
    found = data.load(data.prepare("stories:3", vocab_source="byte", val_fraction=0.9,
                                   cache=tmp_path))
    assert (found.meta["train_documents"], found.meta["val_documents"]) == (1, 2)


def test_workers_import_nothing_from_the_current_folder(tmp_path):
    """Text may be prepared in a folder of someone else's programs."""
    (tmp_path / "random.py").write_text("raise SystemExit('this file was imported')")
    (tmp_path / "big.txt").write_text("Some words that fill more than one part.\n" * 140_000)
    done = subprocess.run([sys.executable, ROOT / "data.py", "big.txt", "--vocab_source=byte",
                           "--workers=2"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
