"""
Vocabularies compared with sentencepiece, its proto, Hugging Face's tokenizers, and the byte layout
of llama2.c's tokenizer.bin.
"""
import hashlib
import json
import os
import random
import struct

import pytest
import sentencepiece as spm
import tokenizers
from sentencepiece import sentencepiece_model_pb2 as proto
from transformers import AutoTokenizer

from tokenizer import (SPACE, Bytes, Characters, Tokenizer, decode_utf8, train_byte_level,
                       train_tokenizer)

TEXT = ["The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
        "  Two spaces, then  two more; 12345 digits, a\ttab and naïve cafés.",
        "She said: \"Don't!\" and he didn't. <s> and </s> and <0x41> are only text here."] * 20
HARD = ["", " ", "   ", "a  b   c ", " leading", "trailing ", "\n\n\ta\r\n", "日本語 and €5 🙂🙃",
        "a\u2581b \u2581", "<s></s><unk><0x0A>", "nul\0byte", "x" * 300, "e\u0301 \u00e9",
        "\ufeffbom", "0123 4 56", "\u2028\u00a0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return train_tokenizer(TEXT, 360, tmp_path_factory.mktemp("vocabulary") / "tokenizer.model")


def trained(path, **options):
    """Return the path of a sentencepiece model trained without train_tokenizer."""
    with open(path, "wb") as f:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT), model_writer=f, minloglevel=5,
            **{"model_type": "bpe", "vocab_size": 360, "byte_fallback": True} | options)
    return path


def random_texts(n):
    rng = random.Random(0)
    alphabet = "abc dog the  .\n1\u2581é日🙂\0<>/s0x41"
    return ["".join(rng.choices(alphabet, k=rng.randrange(60))) for _ in range(n)]


def test_encodes_and_decodes_as_sentencepiece(model, tmp_path):
    model.save(tmp_path / "copy.model")
    oracle = spm.SentencePieceProcessor(model_file=str(tmp_path / "copy.model"))
    for text in HARD + random_texts(500):
        ids = model.encode(text)
        assert ids == oracle.encode(text)
        assert model.decode(ids) == oracle.decode(ids)
        assert model.decode(ids) == text.replace(SPACE, " ")
        assert model.encode(text, bos=True, eos=True) == [1, *ids, 2]
    for ids in (random.Random(1).choices(range(oracle.vocab_size()), k=40), [1, 5, 2], [0, 0],
                [3 + 0xE2, 3 + 0x82]):
        assert model.decode(ids) == oracle.decode(ids)


def test_broken_utf8_as_sentencepiece(model, tmp_path):
    """
    Broken UTF-8 may be in files or on a command line, where Python turns its bytes into surrogates.
    """
    model.save(tmp_path / "copy.model")
    oracle, rng = (spm.SentencePieceProcessor(model_file=str(tmp_path / "copy.model")),
                   random.Random(5))
    texts = [b"caf\xc3", b"\xf0\x9f\x98 b", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80",
             b"\xe2\x96"]
    texts += [bytes(rng.choices(b"a \xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xff\xed",
                                k=rng.randrange(9))) for _ in range(300)]
    for data in texts:
        expected = oracle.encode(data)
        assert model.encode(decode_utf8(data)) == model.encode(os.fsdecode(data)) == expected, data
        assert model.encode_prompt(os.fsdecode(data)) == [1, *expected]


def test_pieces_are_those_of_the_proto(tmp_path):
    path = trained(tmp_path / "m.model", user_defined_symbols=["<user>"], control_symbols=["<ctl>"])
    oracle = proto.ModelProto.FromString(path.read_bytes())
    loaded = Tokenizer.load(path)
    assert loaded.pieces() == [(p.piece.encode(), p.score, p.type) for p in oracle.pieces]
    assert {kind for _, _, kind in loaded.pieces()} == {1, 2, 3, 4, 6}
    assert loaded.vocab_size == len(oracle.pieces)


@pytest.mark.parametrize("options", [
    {}, {"normalization_rule_name": "identity"}, {"add_dummy_prefix": False},
    {"remove_extra_whitespaces": False}, {"normalization_rule_name": "nfkc_cf"}])
def test_says_what_a_loaded_model_does_to_text(options, tmp_path):
    path = trained(tmp_path / "m.model", **options)
    rules = proto.ModelProto.FromString(path.read_bytes()).normalizer_spec
    loaded = Tokenizer.load(path)
    assert (loaded.add_dummy_prefix == rules.add_dummy_prefix
            == options.get("add_dummy_prefix", True))
    assert loaded.remove_extra_whitespaces == rules.remove_extra_whitespaces
    assert loaded.normalizer == options.get("normalization_rule_name", "nmt_nfkc")


def test_a_model_with_other_special_ids(tmp_path):
    for bos, eos in (0, 1), (1, 0):
        loaded = Tokenizer.load(trained(tmp_path / "m.model", unk_id=2, bos_id=bos, eos_id=eos))
        assert (loaded.unk_id, loaded.bos_id, loaded.eos_id) == (2, bos, eos)
        assert loaded.encode("a", bos=True, eos=True)[::len(loaded.encode("a")) + 1] == [bos, eos]


def test_our_vocabularies_are_llama_style(model):
    rules = proto.ModelProto.FromString(model.data)
    assert model.pieces()[:3] == [(b"<unk>", 0.0, 2), (b"<s>", 0.0, 3), (b"</s>", 0.0, 3)]
    assert ([p for p, _, kind in model.pieces() if kind == 6]
            == [b"<0x%02X>" % b for b in range(256)])
    assert rules.normalizer_spec.precompiled_charsmap == b""
    assert not rules.normalizer_spec.remove_extra_whitespaces
    assert model.normalizer == "identity"
    assert model.add_dummy_prefix
    assert not model.remove_extra_whitespaces
    # Each digit is a token, although the text is full of 12345.
    assert len(model.encode("1234554321")) == 1 + 10


def test_training_is_deterministic(model, tmp_path):
    again = train_tokenizer(iter(TEXT), 360, tmp_path / "again.model")
    assert (again.sha256() == model.sha256()
            == hashlib.sha256((tmp_path / "again.model").read_bytes()).hexdigest())


@pytest.mark.parametrize("size, words", [
    (10, "too small"), (270, "expected at least"), (30000, "expected at most")])
def test_unreachable_vocabulary_sizes(size, words, tmp_path, capfd):
    with pytest.raises(SystemExit) as end:
        train_tokenizer(TEXT, size, tmp_path / "m.model")
    complaint = capfd.readouterr().err
    assert end.value.code == 2 and complaint.count("\n") == 1
    assert complaint.startswith(f"error: --vocab_size={size}: ") and words in complaint


def test_the_sizes_named_in_the_complaint_are_the_limits(tmp_path, capfd):
    for size, word in (10, "least"), (30000, "most"):
        with pytest.raises(SystemExit):
            train_tokenizer(TEXT, size, tmp_path / "m.model")
        limit = int(capfd.readouterr().err.split(f"expected at {word} ")[1].split()[0])
        assert train_tokenizer(TEXT, limit, tmp_path / "m.model").vocab_size == limit
        with pytest.raises(SystemExit):
            train_tokenizer(TEXT, limit + (1 if word == "most" else -1), tmp_path / "m.model")


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("text, least", [(TEXT, 261), (["x" * 500], 261), ([" " * 500], 260)])
def test_a_maximum_size_too_small_for_one_character_is_refused_with_the_least_that_is_not(
        text, least, exact, tmp_path, capfd):
    for size in 10, 257, 258, least - 1:
        with pytest.raises(SystemExit):
            train_tokenizer(text, size, tmp_path / "m.model", exact, is_maximum=True)
        complaint = capfd.readouterr().err
        assert complaint.startswith(f"error: --vocab_size={size}: too small")
        assert f"expected at least {least} " in complaint
    assert train_tokenizer(text, least, tmp_path / "m.model", exact,
                           is_maximum=True).vocab_size == least


def test_a_wished_size_bends_to_the_text(tmp_path):
    assert 300 < train_tokenizer(TEXT, 30000, tmp_path / "m.model", exact=False).vocab_size < 30000
    assert train_tokenizer(TEXT, 260, tmp_path / "m.model", exact=False).vocab_size > 280


def test_byte_vocabulary(tmp_path):
    made = Bytes()
    made.save(tmp_path / "tokenizer.json")
    for t in made, Tokenizer.load(tmp_path / "tokenizer.json"):
        assert (t.kind, t.vocab_size, t.bos_id, t.eos_id, t.unk_id, t.add_dummy_prefix) == (
            "byte", 259, 1, 2, 0, False)
        for text in HARD + random_texts(100):
            text = text.replace(SPACE, " ")
            assert t.encode(text) == [3 + b for b in text.encode()]
            assert t.decode(t.encode(text, bos=True, eos=True)) == text
        assert t.encode(SPACE) == t.encode(" ")  # as in sentencepiece
        assert t.decode([3 + 0xE2, 3 + 0x82]) == "\ufffd" and t.decode([0]) == " \u2047 "
        assert len(t.pieces()) == 259 and t.pieces()[3 + 32] == ("\u2581".encode(), 0.0, 1)
        assert all(t.pieces()[3 + b] == (b"<0x%02X>" % b, 0.0, 6) for b in range(256) if b != 32)
        assert t.sha256() == hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()


def test_char_vocabulary(tmp_path):
    made = Characters("hello wörld\n\u2581日")
    made.save(tmp_path / "tokenizer.json")
    for t in made, Tokenizer.load(tmp_path / "tokenizer.json"):
        assert (t.kind, t.vocab_size) == ("char", 3 + len("\n dehlorwö日"))
        assert t.encode("lo w\u2581\n") == [3 + "\n dehlorwö日".index(c) for c in "lo w \n"]
        assert t.decode(t.encode("hold\n wö日", bos=True, eos=True)) == "hold\n wö日"
        assert t.encode("hXYZe?") == [t.encode("h")[0], 0, t.encode("e")[0], 0]
        assert t.decode(t.encode("hXYZe")) == "h \u2047 e"
        assert [p for p, _, _ in t.pieces()] == [
            b"<unk>", b"<s>", b"</s>", b"\n", "\u2581".encode(),
            *(c.encode() for c in "dehlorwö日")]
        assert [kind for _, _, kind in t.pieces()] == [2, 3, 3] + [1] * 11


def test_a_char_vocabulary_encodes_as_sentencepiece_would(tmp_path):
    """A sentencepiece model with these pieces gives the same ids, unknown characters included."""
    made = Characters("the quick brown fox.\n")
    model = proto.ModelProto.FromString(trained(tmp_path / "m.model").read_bytes())
    model.trainer_spec.byte_fallback = False
    model.normalizer_spec.CopyFrom(proto.NormalizerSpec(
        name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False))
    del model.pieces[:]
    for piece, score, kind in made.pieces():
        model.pieces.add(piece=piece.decode(), score=score, type=kind)
    oracle = spm.SentencePieceProcessor(model_proto=model.SerializeToString())
    for text in HARD + random_texts(200) + ["the fox 日本 the", "ZZZ", "quick\n\n brown"]:
        assert made.encode(text) == oracle.encode(text)
        assert made.decode(made.encode(text)) == oracle.decode(oracle.encode(text))


@pytest.mark.parametrize("options", [
    {"normalization_rule_name": "identity"},
    {"normalization_rule_name": "identity", "add_dummy_prefix": False},
    {"normalization_rule_name": "identity", "remove_extra_whitespaces": False,
     "byte_fallback": False, "vocab_size": 250},
    {},
    {"normalization_rule_name": "nfkc_cf", "remove_extra_whitespaces": False},
    {"unk_id": 2, "bos_id": 0, "eos_id": 1},
    {"normalization_rule_name": "identity",
     "user_defined_symbols": ["<user>", "<us", "\u2581fox"], "control_symbols": ["<c>"]},
])
def test_hugging_faces_tokenizers_encodes_the_same(options, tmp_path):
    """
    tokenizers encodes like sentencepiece with every rule that a model can have. No text compared
    here is a single symbol, since tokenizers would put no space before it.
    """
    path = trained(tmp_path / "m.model", **options)
    oracle, loaded = spm.SentencePieceProcessor(model_file=str(path)), Tokenizer.load(path)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(loaded.hugging_face()))
    theirs.encode_special_tokens = True
    for text in HARD + random_texts(500) + [
            "<user>the <us\n fox <c> foxes", " <user><user>", "  the\u2581fox  \u2581 "]:
        ids = oracle.encode(text)
        assert theirs.encode(text).ids == [loaded.bos_id, *ids], text
        if loaded.unk_id not in ids:
            assert theirs.decode([loaded.bos_id, *ids, loaded.eos_id]) == oracle.decode(ids), text
    assert theirs.get_vocab_size() == loaded.vocab_size
    pair = theirs.encode("the", "fox")
    first = len(theirs.encode("the").ids)
    assert pair.ids[first] == loaded.bos_id
    assert pair.type_ids == [0] * first + [1] * (len(pair) - first)
    assert set(theirs.encode("the").type_ids) == {0}


@pytest.mark.parametrize("kind", ["bpe", "byte"])
def test_a_tokenizer_json_that_cuts_or_pads_its_texts(kind, tmp_path):
    """
    Training programs leave such settings in the file. transformers encodes a whole text all the
    same, and so does Tokenizer.
    """
    made = train_byte_level(TEXT, 300, tmp_path / "bpe.json") if kind == "bpe" else Bytes()
    theirs = tokenizers.Tokenizer.from_str(json.dumps(made.hugging_face()))
    theirs.enable_truncation(8)
    theirs.enable_padding(length=32, pad_id=1, pad_token="</s>")
    theirs.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    oracle, loaded = (AutoTokenizer.from_pretrained(tmp_path),
                      Tokenizer.load(tmp_path / "tokenizer.json"))
    assert (loaded.kind, loaded.bos_id, loaded.eos_id, loaded.add_bos) == (
        kind, made.bos_id, made.eos_id, True)
    for text in "", "fox", TEXT[0]:
        assert (loaded.encode_prompt(text) == oracle(text)["input_ids"]
                == [made.bos_id, *made.encode(text)]), text
    assert loaded.hugging_face()["truncation"] is loaded.hugging_face()["padding"] is None
    loaded.save(tmp_path / "saved.json")
    assert b'"truncation": {' not in loaded.data
    assert Tokenizer.load(tmp_path / "saved.json").encode(TEXT[0]) == made.encode(TEXT[0])


def test_bytes_that_are_not_utf8_decode_the_same_in_hugging_faces_tokenizers():
    ours, rng = Bytes(), random.Random(4)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(ours.hugging_face()))
    for _ in range(500):
        ids = (rng.choices(range(3, 259), k=rng.randrange(9))
               + ours.encode("日€"[:rng.randrange(3)])[:-1])
        assert theirs.decode(ids) == ours.decode(ids)


@pytest.mark.parametrize("kind", ["sentencepiece", "byte", "char"])
def test_tokenizer_bin_has_llama2c_layout(kind, model, tmp_path):
    tokenizer = {"sentencepiece": model, "byte": Bytes(), "char": Characters("abc é")}[kind]
    (tmp_path / "tokenizer.bin").write_bytes(tokenizer.tokenizer_bin())
    expected, pieces = b"", []
    for number, (piece, score, _) in enumerate(tokenizer.pieces()):
        text = {1: "\n<s>\n", 2: "\n</s>\n"}.get(
            number, piece.decode().replace("\u2581", " ")).encode()
        pieces.append(text)
        expected += struct.pack("<f", score) + struct.pack("<i", len(text)) + text
    expected = struct.pack("<I", max(map(len, pieces))) + expected
    assert (tmp_path / "tokenizer.bin").read_bytes() == expected


@pytest.mark.parametrize("name, content", [
    ("a.model", b"not a model"), ("b.model", b""), ("c.json", b"{}"), ("d.json", b"[1"),
    ("e.json", b'{"kind": "char", "characters": 5}'),
    ("f.json", b'{"kind": "char", "characters": "ba"}'), ("missing.model", None)])
def test_what_is_no_tokenizer_is_refused_in_one_line(name, content, tmp_path, capfd):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as end:
        Tokenizer.load(tmp_path / name)
    complaint = capfd.readouterr().err
    assert end.value.code == 2
    assert complaint.count("\n") == 1
    assert name in complaint
    assert "expected" in complaint


@pytest.mark.parametrize("options", [{"model_type": "unigram"}, {"bos_id": -1}])
def test_models_that_are_not_llama_style_are_refused(options, tmp_path, capfd):
    path = trained(tmp_path / "m.model", **{"vocab_size": 310} | options)
    with pytest.raises(SystemExit):
        Tokenizer.load(path)
    assert capfd.readouterr().err.count("\n") == 1


def test_a_long_line_without_a_space_is_given_back(tmp_path):
    """
    Chinese texts have such lines. The space that sentencepiece puts before a text is too rare in
    them for training to learn it by itself.
    """
    text = "天地玄黃宇宙洪荒日月盈昃辰宿列張" * 2000
    tokenizer = train_tokenizer([text], 300, tmp_path / "chinese.model", exact=False)
    assert tokenizer.decode(tokenizer.encode(text[:20])) == text[:20]
