"""Compare run's encoder with sentencepiece on random strings, for vocabularies of every option."""
import io
import random
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2

from engine.training import load

NORMAL, UNUSED = 1, 5
SPACE = "▁"
WORDS = (
    "once upon a time there was little girl named lily she loved to play outside in the park one "
    "day saw big red ball mom said sun 123 4567 don't what? yes! été naïve größe über привет мир "
    "мама 日本語 こんにちは 你好 θάλασσα שלום مرحبا नमस्ते 😀 👩‍👩‍👧 "
    "x=1; \tif(a) {b} --- ...").split(" ")
SYMBOLS = ["<|user|>", "<|user|>x", "<|", "on", "once upon", SPACE + "lily", SPACE * 3, "a  b",
           " ", "  zz", "😀😀", "\t", "mом"]


def train(unuse=False, **options):
    """
    Train a BPE model and return it as sentencepiece's protocol buffer.

    With `unuse`, most of its longer pieces become "unused": merges still pass through them, but
    their results are split again.
    """
    rng = random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=12)) + "  " * rng.randrange(3) for _ in range(3000)]
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=out,
                                   model_type="bpe", vocab_size=600,
                                   normalization_rule_name="identity", hard_vocab_limit=False,
                                   minloglevel=2, **options)
    model = sentencepiece_model_pb2.ModelProto.FromString(out.getvalue())
    for piece in model.pieces:
        if unuse and piece.type == NORMAL and len(piece.piece) > 1 and rng.random() < .6:
            piece.type = UNUSED
    return model


LIKE_OURS = dict(byte_fallback=True, remove_extra_whitespaces=False, split_digits=True)
VOCABULARIES = {
    "ours": LIKE_OURS,
    "llama2.c's recipe": dict(byte_fallback=True, split_digits=True),
    "no prefix, no bytes": dict(add_dummy_prefix=False, remove_extra_whitespaces=False),
    "no prefix, spaces removed": dict(add_dummy_prefix=False),
    "symbols": dict(user_defined_symbols=SYMBOLS, byte_fallback=True,
                    remove_extra_whitespaces=False, split_by_whitespace=False,
                    allow_whitespace_only_pieces=True),
    "symbols, spaces removed": dict(user_defined_symbols=SYMBOLS),
    "unused": dict(unuse=True, **LIKE_OURS),
}


def write_gguf(path, pieces, prefix=False, remove=False, dim=2, tokenizer="llama", **metadata):
    """Write the smallest model with a vocabulary; pieces are (bytes, score, type)."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(8)
    w.add_embedding_length(dim)
    w.add_block_count(1)
    w.add_feed_forward_length(1)
    w.add_head_count(1)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model(tokenizer)
    w.add_token_list([p for p, _, _ in pieces])
    w.add_token_scores([s for _, s, _ in pieces])
    w.add_token_types([t for _, _, t in pieces])
    w.add_add_space_prefix(prefix)
    w.add_remove_extra_whitespaces(remove)
    for key, value in metadata.items():
        w.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    shapes = {
        "token_embd": (len(pieces), dim), "output_norm": (dim,), "blk.0.attn_norm": (dim,),
        "blk.0.ffn_norm": (dim,), "blk.0.ffn_gate": (1, dim), "blk.0.ffn_up": (1, dim),
        "blk.0.ffn_down": (dim, 1)
    }
    shapes |= {f"blk.0.attn_{n}": (dim, dim) for n in ("q", "k", "v", "output")}
    for name, shape in shapes.items():
        w.add_tensor(name + ".weight", np.ones(shape, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def write_model(path, model):
    """Write the smallest model with the vocabulary of `model`; return sentencepiece's encoder."""
    rules = model.normalizer_spec
    write_gguf(path, pieces_of(model), rules.add_dummy_prefix, rules.remove_extra_whitespaces)
    return spm.SentencePieceProcessor(model_proto=model.SerializeToString())


def pieces_of(model):
    return [(p.piece.encode(), p.score, p.type) for p in model.pieces]


def write_bin(folder, pieces):
    """Write a llama2.c model (v1) and its tokenizer.bin; return the arguments of run."""
    header = struct.pack("<Iiiiiiiii", 0x616b3432, 1, 2, 1, 1, 1, 1, len(pieces), 8) + b"\1"
    (folder / "model.bin").write_bytes(
        header.ljust(256, b"\0") + struct.pack("<f", 1) * (2 * len(pieces) + 3 * 2 + 4 * 4 + 3 * 2))
    pieces = [(p.replace(SPACE.encode(), b" "), s) for p, s, _ in pieces]
    pieces[1:3] = [(b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0)]
    (folder / "tokenizer.bin").write_bytes(
        struct.pack("<I", max(len(p) for p, _ in pieces))
        + b"".join(struct.pack("<fI", s, len(p)) + p for p, s in pieces))
    return [folder / "model.bin", "-z", folder / "tokenizer.bin"]


def random_string(rng):
    """
    Return bytes with words, symbols, characters of all planes, spaces, U+2581, control characters
    and broken UTF-8.
    """
    def piece():
        kind = rng.randrange(12)
        if kind < 4:
            return rng.choice(WORDS).encode()
        if kind < 6:
            return b" " * rng.choice((1, 1, 1, 2, 3, 5))
        if kind == 6:
            return rng.choice(SYMBOLS).encode()
        if kind == 7:
            return SPACE.encode() * rng.choice((1, 1, 2, 3))
        if kind == 8:
            return bytes(rng.choices(range(256), k=rng.randrange(1, 4)))
        if kind == 9:
            return chr(rng.choice((
                rng.randrange(128), rng.randrange(0x80, 0x3000), rng.randrange(0x3000, 0xd800),
                rng.randrange(0xe000, 0x110000)))).encode()
        if kind == 10:
            return rng.choice(WORDS).encode()[:rng.randrange(1, 4)]
        return rng.choice((b"<s>", b"</s>", b"<unk>", b"<0x41>", b"\0", b"\r", b"\xef\xbf\xbd",
                           b"\xf4\x90\x80\x80", b"\xed\xa0\x80", b"\xc0\x80", b"\xe0\x80\x80",
                           b"\xff"))
    return b"".join(piece() for _ in range(rng.randrange(12))).replace(b"\n", b" ")


def tokenize(run_bin, args, strings):
    out = subprocess.run([run_bin, *args, "--tokenize"], input=b"".join(s + b"\n" for s in strings),
                         check=True, capture_output=True).stdout
    return [[int(i) for i in line.split()] for line in out.decode().split("\n")[:-1]]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_equals_sentencepiece(run_bin, tmp_path, name, count=4000, seed=0):
    rng = random.Random(seed)
    strings = ([random_string(rng) for _ in range(count)]
               + ["".join(rng.choices(WORDS + [" "], k=4000)).encode()])
    model = train(**VOCABULARIES[name])
    expected = write_model(tmp_path / "m.gguf", model).encode(strings)
    for string, ids, ours in zip(strings, expected,
                                 tokenize(run_bin, [tmp_path / "m.gguf"], strings)):
        assert ours == ids, string
    if name == "ours":  # tokenizer.bin can hold all options of such a vocabulary
        for string, ids, ours in zip(
                strings, expected,
                tokenize(run_bin, write_bin(tmp_path, pieces_of(model)), strings)):
            assert ours == ids, string


def encode_file(run_bin, tmp_path, text):
    (tmp_path / "prompt").write_bytes(text)
    out = subprocess.run([run_bin, tmp_path / "m.gguf", "--tokenize", "-f", tmp_path / "prompt"],
                         check=True, capture_output=True, timeout=60).stdout
    return [int(i) for i in out.split()]


def test_newlines_and_nul_in_a_prompt_file(run_bin, tmp_path):
    p = write_model(tmp_path / "m.gguf", train(**LIKE_OURS))
    for text in (b"once\nupon\n\na time\n", b"a\0b\0\0", b"\n", b"", b"  ", "été\r\n日本".encode(),
                 b"\xff\n\xc3"):
        assert encode_file(run_bin, tmp_path, text) == p.encode(text), text


def test_one_megabyte_without_a_space_is_encoded_at_once(run_bin, tmp_path):
    """An encoder in quadratic time would take hours and hit the time limit."""
    p = write_model(tmp_path / "m.gguf", train(**LIKE_OURS))
    text = "".join(random.Random(1).choices("abcdefghilmnoprstuwé日", k=10**6)).encode()
    assert encode_file(run_bin, tmp_path, text) == p.encode(text)


SPECIAL = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
LETTERS = [("a", 0.0, 1), ("b", 0.0, 1), ("c", 0.0, 1), ("ab", -1.0, 1)]
BYTES = [(f"<0x{b:02X}>", 0.0, 6) for b in range(256)]
# The pieces, and the error that run must print; None: run must accept the vocabulary and encode as
# sentencepiece does.
DOUBTFUL = {
    "one piece twice": ([*SPECIAL, *LETTERS, ("ab", -2.0, 1)], "tokens 6 and 7 have the same text"),
    "also user-defined": ([*SPECIAL, *LETTERS, ("ab", 0.0, 4)],
                          "tokens 6 and 7 have the same text"),
    "also unused": ([*SPECIAL, *LETTERS, ("c", 0.0, 5)], "tokens 5 and 7 have the same text"),
    "a control piece as text": ([*SPECIAL, *LETTERS, ("<s>", 0.0, 1)],
                                "tokens 1 and 7 have the same text"),
    "a byte twice": ([*SPECIAL, *BYTES, BYTES[65], *LETTERS],
                     "tokens 68 and 259 have the same text"),
    "some bytes": ([*SPECIAL, *BYTES[:100], *LETTERS], "none for the byte 0x64"),
    "all but one": ([*SPECIAL, *BYTES[:10], *BYTES[11:], *LETTERS], "none for the byte 0x0A"),
    "bytes in small digits": ([*SPECIAL, *((p.lower(), s, t) for p, s, t in BYTES), *LETTERS],
                              "not written <0x00> to <0xFF>"),
    "an empty piece": ([*SPECIAL, *LETTERS, ("", 0.0, 1)], "token 7 is empty"),
    "all bytes": ([*SPECIAL, *BYTES, *LETTERS], None),
    "no bytes": ([*SPECIAL, *LETTERS], None),
    "what looks like a byte": ([*SPECIAL, *LETTERS, ("0x41", 0.0, 1), ("<0x41", 0.0, 1)], None),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_vocabularies_that_sentencepiece_refuses_are_refused(run_bin, tmp_path, name):
    pieces, complaint = DOUBTFUL[name]
    model = sentencepiece_model_pb2.ModelProto()
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = (
        2, any(t == 6 for *_, t in pieces))
    model.normalizer_spec.add_dummy_prefix = model.normalizer_spec.remove_extra_whitespaces = False
    for text, score, kind in pieces:
        model.pieces.add(piece=text, score=score, type=kind)
    strings = ["abc", "xyz ab\tc", "<0x41>", "<s>é", ""]
    if complaint:
        with pytest.raises(RuntimeError):
            write_model(tmp_path / "m.gguf", model)
        refused = subprocess.run([run_bin, tmp_path / "m.gguf", "--tokenize"], capture_output=True,
                                 text=True, stdin=subprocess.DEVNULL)
        assert refused.returncode == 1 and complaint in refused.stderr
    else:
        expected = write_model(tmp_path / "m.gguf", model).encode(strings)
        assert tokenize(run_bin, [tmp_path / "m.gguf"], [s.encode() for s in strings]) == expected


def test_a_vocabulary_whose_first_piece_is_text(run_bin, tmp_path):
    """If <unk> is not token 0, token 0 is an ordinary piece: byte fallback does not replace it."""
    ids = {"tokenizer.ggml.unknown_token_id": 2, "tokenizer.ggml.bos_token_id": 3,
           "tokenizer.ggml.eos_token_id": 4}
    for more in ([], BYTES):
        model = sentencepiece_model_pb2.ModelProto()
        model.trainer_spec.model_type, model.trainer_spec.byte_fallback = 2, bool(more)
        model.normalizer_spec.add_dummy_prefix = \
            model.normalizer_spec.remove_extra_whitespaces = False
        for text, score, kind in [("a", 0.0, 1), ("b", 0.0, 1), *SPECIAL, *more]:
            model.pieces.add(piece=text, score=score, type=kind)
        write_gguf(tmp_path / "m.gguf", pieces_of(model), **ids)
        strings = ["xaxxbx", "aab", "é"]
        expected = spm.SentencePieceProcessor(model_proto=model.SerializeToString()).encode(strings)
        assert tokenize(run_bin, [tmp_path / "m.gguf"], [s.encode() for s in strings]) == expected


def test_infinite_scores_and_a_wrong_longest_length_are_refused(run_bin, tmp_path):
    """Trainers do not write such scores; llama2.c would never merge to a score of -infinity."""
    def refusal(*args):
        p = subprocess.run([run_bin, *args, "--tokenize"], capture_output=True, text=True,
                           stdin=subprocess.DEVNULL)
        assert p.returncode == 1 and p.stderr.count("\n") == 1
        return p.stderr
    for score in (float("inf"), float("-inf"), float("nan")):
        write_gguf(tmp_path / "m.gguf",
                   [(p.encode(), s, t) for p, s, t in [*SPECIAL, *LETTERS, ("bc", score, 1)]])
        assert "the score of token 7 is not a finite number" in refusal(tmp_path / "m.gguf")
    args = write_bin(tmp_path, [(p.encode(), s, t) for p, s, t in [*SPECIAL, *LETTERS]])
    data = args[2].read_bytes()
    assert tokenize(run_bin, args, [b"abc"]) == [[0, 6, 5]]
    for longest in (0, 5, 7, 2**31):
        args[2].write_bytes(struct.pack("<I", longest) + data[4:])
        assert re.search(rf"header (allows|says) {longest}\b", refusal(*args))


def test_byte_and_character_vocabularies(run_bin, tmp_path):
    """
    Encode with bytes alone, and with characters alone.

    Without bytes, adjacent unknown characters become one <unk>.
    """
    special = [(b"<unk>", 0.0, 2), (b"<s>", 0.0, 3), (b"</s>", 0.0, 3)]
    letters = [(b"<0x%02X>" % b, 0.0, 6) for b in range(256)]
    letters[32] = (SPACE.encode(), 0.0, 1)
    write_gguf(tmp_path / "byte.gguf", special + letters)
    texts = ["hello  world", "été 日本 😀", "\t\x01"]
    assert tokenize(run_bin, [tmp_path / "byte.gguf"], [t.encode() for t in texts]) == \
        [[3 + b for b in t.encode()] for t in texts]
    characters = special + [(c.encode(), 0.0, 1) for c in (SPACE, "a", "é", "日")]
    for name in ("llama", "t5", "llama-without-bytes"):
        write_gguf(tmp_path / "char.gguf", characters, tokenizer=name)
        assert tokenize(
            run_bin, [tmp_path / "char.gguf"],
            ["a é日".encode(), "xya zé".encode(), "zzz".encode(), b""]
        ) == [[4, 3, 5, 6], [0, 4, 3, 0, 5], [0], []]
    # A t5 tokenizer would treat these pieces otherwise.
    for more in (b"aa", 0.0, 1), (b"<0x41>", 0.0, 6), (b"b", 0.0, 4), (b"c", 0.0, 5):
        write_gguf(tmp_path / "t5.gguf", characters + [more], tokenizer="t5")
        refused = subprocess.run([run_bin, tmp_path / "t5.gguf", "--tokenize"], input=b"",
                                 capture_output=True)
        assert refused.returncode == 1 and b"token 7 is not a single character" in refused.stderr


def compare_many(run_bin, folder, count):
    """
    Compare `count` random strings over all vocabularies; stop at the first difference.

    Prints the number of compared strings.
    """
    for i, name in enumerate(VOCABULARIES):
        model, rng = train(**VOCABULARIES[name]), random.Random(f"long {name}")
        processor = write_model(folder / "m.gguf", model)
        for batch in range(0, count // len(VOCABULARIES) + 1, 20000):
            strings = [random_string(rng)
                       for _ in range(min(20000, count // len(VOCABULARIES) + 1 - batch))]
            for string, ids, ours in zip(strings, processor.encode(strings),
                                         tokenize(run_bin, [folder / "m.gguf"], strings),
                                         strict=True):
                assert ours == ids, (name, string)
        print(f"{name}: {count // len(VOCABULARIES) + 1:,} strings, no difference", flush=True)


def program_seconds(command):
    """Return the processor seconds of a program, whose output is discarded."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def time_encoding(run_bin, folder):
    """
    Print a table of processor seconds of run and sentencepiece, best of five.

    run is the whole program with start and printing, sentencepiece the call of encode alone.
    """
    processor = write_model(folder / "m.gguf", train(**LIKE_OURS))
    rng = random.Random(2)
    texts = {"words": " ".join(rng.choices(WORDS, k=2 * 10**6)),
             "one word": "".join(rng.choices("abcdefghilmnoprstuwé日", k=10**7))}
    print("| text | bytes | run | sentencepiece |\n| --- | ---: | ---: | ---: |")
    for name, text in texts.items():
        for size in (10**4, 10**5, 10**6, 10**7):
            data, ours, theirs = text.encode()[:size], [], []
            (folder / "text").write_bytes(data)
            for _ in range(5):
                ours.append(program_seconds(
                    [run_bin, folder / "m.gguf", "--tokenize", "-f", folder / "text"]))
                start = time.process_time()
                processor.encode(data)
                theirs.append(time.process_time() - start)
            print(f"| {name} | {size:,} | {min(ours):.4f} | {min(theirs):.4f} |", flush=True)


@pytest.mark.slow
def test_long_pieces_do_not_slow_the_encoder(run_bin, tmp_path, capsys):
    """
    Encode 100 kB with vocabularies that are made to be slow.

    It takes less than 300 times as long as with letters alone; searching all pieces at each place
    took 900 times as long. A user-defined piece of more than 256 bytes is refused.
    """
    specials = [(b"<unk>", 0.0, 2), (b"<s>", 0.0, 3), (b"</s>", 0.0, 3)]
    letters = [(c, -9.0, 1) for c in ("\u2581".encode(), b"a", b"b", b"c")]
    nested = [(b"a" * n + b"b", 0.0, 4) for n in range(1, 256)]  # all may begin at every position
    doubled = [(b"a" * (1 << n), 0.0, 1) for n in range(1, 17)]  # long pieces
    grown = [(b"b" * n, -1.0, 1) for n in range(2, 200)]  # short pieces, each a letter longer
    (tmp_path / "a.txt").write_bytes(b"a" * 100_000)
    (tmp_path / "ab.txt").write_bytes((b"a" * 65536 + b"b" * 199) * 2)
    for pieces, text in (nested, "a.txt"), (doubled + grown, "ab.txt"):
        seconds = []
        for more in [], pieces:
            write_gguf(tmp_path / "m.gguf", specials + letters + more, False)
            command = [run_bin, tmp_path / "m.gguf", "--tokenize", "-f", tmp_path / text]
            seconds.append(min(program_seconds(command) for _ in range(3)))
        assert seconds[1] < 300 * seconds[0], (text, seconds)
    write_gguf(tmp_path / "m.gguf", specials + letters + [(b"a" * 256, 0.0, 4)], False)
    command = [run_bin, tmp_path / "m.gguf", "--tokenize", "-i", "a" * 256 + "c"]
    assert subprocess.check_output(command) == b"7 6\n"
    assert load.read_model(tmp_path / "m.gguf")[2].encode("a" * 256 + "c") == [7, 6]
    write_gguf(tmp_path / "m.gguf", specials + letters + [(b"a" * 257, 0.0, 4)], False)
    refusal = "token 7 is user-defined and has 257 bytes, expected at most 256"
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1 and refusal in refused.stderr
    with pytest.raises(SystemExit):
        load.read_model(tmp_path / "m.gguf")
    assert refusal in capsys.readouterr().err


if __name__ == "__main__":  # python -m tests.test_encode RUN [strings]
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) > 2:
            compare_many(sys.argv[1], Path(folder), int(sys.argv[2]))
        else:
            time_encoding(sys.argv[1], Path(folder))
