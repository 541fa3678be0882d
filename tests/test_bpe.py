"""Compare byte-level BPE with Hugging Face's tokenizers and transformers, and in GGUF with gguf."""
import builtins
import json
import random

import gguf
import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import export
from engine.formats import gguf_tokenizer
from engine.text import prepare
from model import ModelArgs, Transformer
from tokenizer import (BYTE, CONTROL, NORMAL, PRE_TOKENIZERS, UNUSED, USER_DEFINED, Tokenizer,
                       spell, train_byte_level)
from engine.training import load

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog didn't sleep: 12345 digits, 3.14!\n",
    "if (a == b) {\n\treturn x[10];\n}\r\n\r\n    // naïve cafés   and   SPACES  \n",
    "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。寒來暑往，秋收冬藏。你好，世界！\n"
] * 10
HARD = [
    "", " ", "   ", "a  b   c ", " leading", "trailing ", "\n\n\ta\r\n", "日本語 and €5 🙂🙃",
    "a\u2581b \u2581", "IT'S he'Ll 'ſx", "<s></s><|user|><unk>", "nul\0byte", "x" * 300,
    "e\u0301 \u00e9", "\ufeffbom", "0123 4 56", "\u2028\u00a0 a", "\x85 \u3000中"
]
PRES = {  # the pre-tokenizers in the models' own tokenizer.json, built with the library itself
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "llama-bpe": lambda: split_by("{1,3}"),
    "qwen2": lambda: split_by("")
}


def split_by(digits):
    words = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + digits
             + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(words), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def random_texts(n):
    rng = random.Random(0)
    alphabet = [*"abc dog the  .\n\r\t1٣²é日界🙂\0<>/'sSLl!?_", "\u0301", "\u00a0", "\u3000",
                " the", "'ll", "  ", "日月", "<|user|>"]
    return ["".join(rng.choices(alphabet, k=rng.randrange(60))) for _ in range(n)]


def theirs(pre, vocab_size=420):
    """
    Return a tokenizers.Tokenizer as a model's maker would train it, with two special tokens and one
    added token that text may contain.
    """
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    made.pre_tokenizer, made.decoder = PRES[pre](), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    made.train_from_iterator(TEXT, trainer)
    made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens([AddedToken("<|user|>", normalized=False)])
    return made


def hugging_face_folder(folder, pre, **special):
    fast = PreTrainedTokenizerFast(tokenizer_object=theirs(pre),
                                   **({"bos_token": "<s>", "eos_token": "</s>"} | special))
    fast.save_pretrained(folder)
    return fast


def small_model(vocab_size):
    torch.manual_seed(0)
    return Transformer(ModelArgs(vocab_size=vocab_size, dim=16, n_layers=1, n_heads=2,
                                 hidden_dim=16, max_seq_len=32))


def export_both(vocabulary, folder):
    model = small_model(vocabulary.vocab_size)
    for name, format in (("m.gguf", "gguf"), ("hf", "hf")):
        export.export_model(model.state_dict(), model.args, vocabulary, folder / name, format)


@pytest.mark.parametrize("pre", PRES)
def test_a_hugging_face_folder_encodes_as_transformers_does(pre, tmp_path):
    hugging_face_folder(tmp_path, pre)
    oracle, ours = (AutoTokenizer.from_pretrained(tmp_path),
                    Tokenizer.load(tmp_path / "tokenizer.json"))
    texts = HARD + TEXT[:3] + random_texts(500)
    expected = oracle(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert (ours.kind, ours.pre, ours.vocab_size) == ("bpe", pre, len(oracle))
    assert (ours.bos_id, ours.eos_id, ours.unk_id, ours.add_bos) == (
        oracle.bos_token_id, oracle.eos_token_id, None, False)
    for text, ids in zip(texts, expected):
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == text
    assert ours.encode_prompt("a") == oracle("a")["input_ids"]
    assert ours.encode_prompt("") == [ours.bos_id]
    assert ours.encode("a", bos=True, eos=True) == [ours.bos_id, *ours.encode("a"), ours.eos_id]
    assert [ours.pieces()[i] for i in ours.encode("<|user|>")] == [(b"<|user|>", 0.0, USER_DEFINED)]
    assert ours.pieces()[ours.bos_id] == (b"<s>", 0.0, CONTROL)
    assert ours.decode([ours.bos_id, ours.eos_id]) == ""
    ours.save(tmp_path / "copy.json")
    again = Tokenizer.load(tmp_path / "copy.json")
    assert again.sha256() == ours.sha256() and again.pieces() == ours.pieces()


def test_what_stands_beside_a_tokenizer_is_read(tmp_path):
    """
    Llama 3 adds BOS before a text. Qwen lacks a BOS, lists several EOS tokens, and has more rows in
    its embedding than tokens.
    """
    hugging_face_folder(tmp_path, "qwen2", bos_token=None, eos_token=None)
    config = {"bos_token_id": None, "eos_token_id": [421, 420], "vocab_size": 500}
    (tmp_path / "config.json").write_text(json.dumps(config))
    qwen = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (qwen.bos_id, qwen.eos_id, qwen.add_bos, qwen.vocab_size) == (421, 421, False, 500)
    assert qwen.pieces()[499] == (b"[PAD499]", 0.0, UNUSED) and qwen.decode([499]) == ""
    assert [kind for *_, kind in qwen.pieces()[420:424]] == [CONTROL, CONTROL, USER_DEFINED, UNUSED]
    # As EOS, <|user|> must not be encoded from text any more.
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|user|>"}))
    qwen = Tokenizer.load(tmp_path / "tokenizer.json")
    assert qwen.pieces()[qwen.eos_id] == (b"<|user|>", 0.0, CONTROL)
    assert qwen.eos_id not in qwen.encode("a<|user|>")
    llama = theirs("llama-bpe")
    llama.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A", "<s> $A <s> $B", [("<s>", 420)])
    llama.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (loaded.bos_id, loaded.eos_id, loaded.add_bos) == (420, 421, True)
    assert loaded.encode_prompt("a") == llama.encode("a").ids


@pytest.mark.parametrize("template, bos, add_bos", [
    ("$A </s>", None, False), ("$A </s>", "<s>", False), ("<s> $A", None, True),
    ("<s> $A </s>", None, True), ("</s> $A", None, True), ("</s> $A </s>", None, True)])
def test_a_post_processor_adds_bos_only_before_the_text(template, bos, add_bos, tmp_path):
    made = theirs("qwen2")
    pair = template.replace("$A", "$A $B")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        template, pair, [("<s>", 420), ("</s>", 421)])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": bos, "eos_token": "</s>"}))
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (loaded.bos_id, loaded.eos_id, loaded.add_bos) == (
        420 if "<s>" in (bos, template[:3]) else 421, 421, add_bos)
    assert loaded.encode_prompt("a", eos="$A </s>" in template) == made.encode("a").ids


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_a_trained_vocabulary_goes_out_and_in(pre, tmp_path):
    made = train_byte_level(TEXT, 400, tmp_path / "tokenizer.json", pre)
    assert (made.vocab_size, made.pre, made.bos_id, made.eos_id, made.add_bos) == (
        400, pre, 0, 1, True)
    assert made.sha256() == train_byte_level(iter(TEXT), 400, tmp_path / "again.json", pre).sha256()
    export_both(made, tmp_path)
    oracle, texts = (AutoTokenizer.from_pretrained(tmp_path / "hf"),
                     HARD + TEXT[:3] + random_texts(200))
    inside = load.read_model(str(tmp_path / "m.gguf"))[2]
    outside = Tokenizer.load(tmp_path / "hf" / "tokenizer.json")
    for text in texts:
        ids = made.encode(text)
        assert oracle(text)["input_ids"] == [0, *ids], text
        assert inside.encode(text) == outside.encode(text) == ids and made.decode(ids) == text
    assert inside.pieces() == outside.pieces() == made.pieces() and inside.merges() == made.merges()
    assert ((outside.bos_id, outside.eos_id, outside.add_bos)
            == (inside.bos_id, inside.eos_id, inside.add_bos) == (0, 1, True))


def test_gguf_has_the_keys_that_llama_cpp_reads(tmp_path):
    hugging_face_folder(tmp_path, "smollm")
    made = Tokenizer.load(tmp_path / "tokenizer.json")
    export_both(made, tmp_path)
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    found = {key.removeprefix("tokenizer.ggml."): field.contents()
             for key, field in fields.items() if "tokenizer" in key}
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = {**raw["model"]["vocab"],
             **{token["content"]: token["id"] for token in raw["added_tokens"]}}
    assert found["model"] == "gpt2"
    assert found["pre"] == "smollm"
    assert "scores" not in found
    assert "unknown_token_id" not in found
    assert found["tokens"] == sorted(vocab, key=vocab.get)
    assert found["token_type"] == [NORMAL] * 420 + [CONTROL, CONTROL, USER_DEFINED]
    assert found["merges"] == [" ".join(pair) for pair in raw["model"]["merges"]]
    assert (found["bos_token_id"], found["eos_token_id"], found["add_bos_token"]) == (
        420, 421, False)


def test_pieces_are_spelled_by_their_bytes():
    assert [spell((piece, 0.0, NORMAL), "␣")
            for piece in (b" the", "日".encode(), "日".encode()[:2], b"\xadx\xff", b"\n")] == [
        "␣the", "日", "<0xE6><0x97>", "<0xAD>x<0xFF>", "\n"]


@pytest.mark.parametrize("source, pre", [("bpe", "qwen2"), ("bpe:gpt-2", "gpt-2")])
def test_prepared_data_hold_the_text(source, pre, tmp_path):
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join(TEXT), encoding="utf-8")
    folder = prepare.prepare(tmp_path / "text.txt", source, cache=tmp_path / "cache", workers=1)
    data = prepare.load(folder)
    assert data.tokenizer.pre == pre and 256 < data.tokenizer.vocab_size <= 512
    tokens = [*data.train, *data.val]
    assert tokens.count(0) == tokens.count(1) == len(TEXT)
    assert data.tokenizer.decode(data.train[:list(data.train).index(1)]) == TEXT[0].strip()
    assert {*data.tokenizer.decode(tokens)} == {*"".join(TEXT)}


def test_a_token_that_is_both_bos_and_eos_stands_once_between_documents(tmp_path):
    hugging_face_folder(tmp_path, "gpt-2", bos_token="</s>")
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join(TEXT), encoding="utf-8")
    data = prepare.load(prepare.prepare(tmp_path / "text.txt", str(tmp_path),
                                        cache=tmp_path / "cache", workers=1))
    assert data.tokenizer.bos_id == data.tokenizer.eos_id == 421
    assert [*data.train, *data.val].count(421) == len(TEXT) and data.train[0] == 421


def refused(capfd, call, *arguments):
    with pytest.raises(SystemExit) as end:
        call(*arguments)
    complaint = capfd.readouterr().err
    assert end.value.code == 2 and complaint.count("\n") == 1
    return complaint


def test_sizes_that_a_text_cannot_give(tmp_path, capfd):
    out = tmp_path / "t.json"
    assert "expected at least 258" in refused(capfd, train_byte_level, TEXT, 257, out)
    complaint = refused(capfd, train_byte_level, TEXT, 9999, out)
    most = int(complaint.split("at most ")[1])
    assert (train_byte_level(TEXT, most, out).vocab_size
            == train_byte_level(TEXT, 9999, out, exact=False).vocab_size == most)
    assert train_byte_level([""], 9999, out, exact=False).vocab_size == 258
    assert "expected bpe, or bpe:NAME" in refused(capfd, prepare.prepare, __file__, "bpe:gpt2")


def test_llama2cs_formats_are_refused(tmp_path, capfd):
    made, model = train_byte_level(TEXT, 300, tmp_path / "t.json"), small_model(300)
    for format in ("v0", "v1", "v2"):
        assert "byte-level BPE" in refused(capfd, export.export_model, model.state_dict(),
                                           model.args, made, tmp_path / "m", format)


def changed(**changes):
    """Return the text of a tokenizer.json; changes: a__b=value sets content["a"]["b"]."""
    content = json.loads(theirs("qwen2").to_str())
    for where, value in changes.items():
        *path, last = where.split("__")
        inner = content
        for key in path:
            inner = inner[key]
        inner[last] = value
    return json.dumps(content)


@pytest.mark.parametrize("changes, words", [
    ({"model__type": "Unigram"}, "not byte-level BPE"),
    ({"pre_tokenizer": None}, "not byte-level BPE"),
    ({"pre_tokenizer": {"type": "Metaspace", "replacement": "▁"}}, "Metaspace"),
    ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
     "unknown to ./run, expected one of gpt-2"),
    ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}}, "expected"),
    ({"normalizer": {"type": "NFKC"}}, "NFKC"),
    ({"model__dropout": 0.5}, "dropout"),
    ({"model__byte_fallback": True}, "byte_fallback"),
    ({"model__ignore_merges": True}, "ignore_merges"),
    ({"model__merges": [["a", "nothing"]]}, "out of vocabulary"),
    ({"model__merges": ["ab"]}, "expected"),
    ({"model__vocab__日": 900}, "GPT-2's letters"),
    ({"model__vocab__zz": 5}, "expected a different id"),
    ({"model__vocab__zz": 1 << 30}, "expected at most"),
    ({"model__vocab__zz": -1}, "expected"),
    ({"model": 5}, "expected"),
    ({"added_tokens": 5}, "expected"),
    ({}, "defines EOS")])
def test_other_tokenizers_are_refused_in_one_line(changes, words, tmp_path, capfd):
    (tmp_path / "tokenizer.json").write_text(changed(**changes))
    if changes:
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    complaint = refused(capfd, Tokenizer.load, tmp_path / "tokenizer.json")
    assert "tokenizer.json" in complaint and words in complaint


@pytest.mark.parametrize(
    "changes", [{"bos": 300}, {"eos": -1}, {"bos": "x"}, {"vocab_size": 5}, {"vocab_size": 1 << 60},
                {"tokenizer": None}, {"tokenizer": {}}, {"kind": "bpe2"}, {"add_bos": None}])
def test_a_damaged_file_of_ours_is_refused_in_one_line(changes, tmp_path, capfd):
    stored = json.loads(train_byte_level(TEXT, 300, tmp_path / "t.json").data) | changes
    (tmp_path / "t.json").write_text(
        json.dumps({key: value for key, value in stored.items() if value is not None}))
    assert "t.json" in refused(capfd, Tokenizer.load, tmp_path / "t.json")


GGUF_CHANGES = {
    "pre": "deepseek-llm", "tokens": [b"a"] * 300, "token_type": [1] * 299,
    "merges": [b"a nothing"], "eos_token_id": 300, "bos_token_id": "x", "model": "bert"
}


def as_read(made):
    """Return a vocabulary's metadata as read from a GGUF file: lists hold bytes, not str."""
    return {
        name: [word.encode() if isinstance(word, str) else word for word in value]
        if isinstance(value, list) else value
        for name, value in export.vocabulary_metadata(made).items()}


@pytest.mark.parametrize("key", GGUF_CHANGES)
def test_a_damaged_vocabulary_in_gguf_is_refused_in_one_line(key, tmp_path, capfd):
    made = train_byte_level(TEXT, 300, tmp_path / "t.json")
    metadata = as_read(made)
    assert gguf_tokenizer.read_gguf_tokenizer(metadata, "m.gguf").pieces() == made.pieces()
    assert "m.gguf" in refused(capfd, gguf_tokenizer.read_gguf_tokenizer,
                               metadata | {f"tokenizer.ggml.{key}": GGUF_CHANGES[key]}, "m.gguf")


def test_a_token_in_gguf_without_a_type_is_refused(tmp_path, capfd):
    metadata = as_read(train_byte_level(TEXT, 300, tmp_path / "t.json"))
    metadata["tokenizer.ggml.tokens"].append(b"<|more|>")
    assert "m.gguf" in refused(capfd, gguf_tokenizer.read_gguf_tokenizer, metadata, "m.gguf")


@pytest.mark.parametrize("token, kind", [("日", NORMAL), ("zz", BYTE)])
def test_a_token_in_gguf_of_other_letters_or_of_a_type_that_bpe_lacks_is_refused(
        token, kind, tmp_path, capfd):
    metadata = as_read(train_byte_level(TEXT, 300, tmp_path / "t.json"))
    (metadata["tokenizer.ggml.tokens"][299],
     metadata["tokenizer.ggml.token_type"][299]) = token.encode(), kind
    assert f"token 299 is {token!r} of type {kind}" in refused(
        capfd, gguf_tokenizer.read_gguf_tokenizer, metadata, "m.gguf")


def test_without_the_package_a_line_says_so(tmp_path, capfd, monkeypatch):
    train_byte_level(TEXT, 300, tmp_path / "t.json")
    ours = builtins.__import__
    monkeypatch.setattr(
        builtins, "__import__", lambda name, *rest, **more:
        ours("no such module" if name == "tokenizers" else name, *rest, **more))
    for call, *arguments in ((Tokenizer.load, tmp_path / "t.json"),
                             (train_byte_level, TEXT, 300, tmp_path / "t.json")):
        assert "pip install tokenizers" in refused(capfd, call, *arguments)
