"""Tests of the Python library: the same texts as ./run, threads, errors and memory."""
import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import sentencepiece as spm
from transformers import LlamaTokenizer

import llamac
from tests.conftest import ROOT
from tests.test_chat import AGAIN, ANSWER, CHATML, HI, LLAMA2, MARKS, SYSTEM, ZEPHYR, vocabulary
from tests.test_encode import pieces_of, write_gguf
from tests.test_run import Model, run, two_models

pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return two_models(tmp_path_factory.mktemp("models"))


def started(model, **options):
    """Return an empty sequence of a new engine."""
    return llamac.Sequence(llamac.Engine(model, **options))


def continued(model, prompt, sampler, n):
    """
    Continue a prompt until BOS is followed by n tokens, prompt included, or the text ends. Return
    the bytes.
    """
    sequence, tokens, pos = started(model), model.encode(prompt).tolist(), 0
    while pos <= n:
        sequence.forward(tokens[pos:], pos)
        pos, token = len(tokens), sequence.sample(sampler)
        if model.ends(token):
            break
        tokens.append(token)
    return model.decode(tokens[:n + 1])


def test_it_writes_what_run_writes(run_bin, models):
    for path, flags, sampler in ((models[0], ("-t", 0), (0, 0.9, 1)),
                                 (models[1], ("-t", 0.8, "-s", 7), (0.8, 0.9, 7))):
        expected = run(run_bin, path, *flags, "-n", 40, "--raw", "-i", "One")
        for source in (path, str(path), path.read_bytes()):
            assert continued(
                llamac.Model(source), "One", llamac.Sampler(*sampler), 40) + b"\n" == expected


def test_generate_writes_what_run_writes(run_bin, models):
    """The seed is the same; the longer text exceeds the context, which slides."""
    for path, flags, sampler in ((models[0], ("-t", 0), (0, 0.9, 1)),
                                 (models[1], ("-t", 0.8, "-s", 7), (0.8, 0.9, 7))):
        model = llamac.Model(path)
        prompt = model.encode("One").tolist()
        for most in 20, model.info.seq_len + 20:
            told = list(llamac.generate(started(model), prompt, llamac.Sampler(*sampler), most))
            expected = run(run_bin, path, *flags, "-n", len(prompt) - 1 + most,
                           "--raw", "-i", "One")[:-1]
            assert "One" + "".join(text for text, *_ in told) == expected.decode(errors="replace")
            assert told[-1][2:] in ((most, "length"), (len(told) - 1, "stop"))
            assert not any(entries for _, entries, *_ in told)


def test_a_model_generates_by_itself(run_bin, models, tmp_path):
    """
    The texts equal those of run with the same seed, and those of generate_batch. A stop text ends
    the generation. Logits and embeddings equal those of an Engine.
    """
    path, prompts = models[1], ["One", "Two three", ""]
    model = llamac.Model(path)
    alone = ["".join(model.generate(prompt, 20, temperature=0.8, seed=7 + i))
             for i, prompt in enumerate(prompts)]
    assert model.generate_batch(prompts, 20, temperature=0.8, seed=7) == alone
    assert "engine" in vars(model)
    n = len(model.encode("One")) - 1 + 20
    told = run(run_bin, path, "-t", 0.8, "-s", 7, "-n", n, "--raw", "-i", "One")[:-1]
    assert "One" + alone[0] == told.decode(errors="replace")
    stop = alone[0][5]
    assert ("".join(model.generate("One", 20, stop, temperature=0.8, seed=7))
            == alone[0][:alone[0].index(stop)])
    assert list(model.generate("One", 0)) == []
    # Texts without a seed differ. The temperature is high because this model repeats one token at
    # low temperatures.
    assert ("".join(model.generate("One", 60, temperature=5))
            != "".join(model.generate("One", 60, temperature=5)))
    tokens, sequence = model.encode("One two"), started(model)
    sequence.forward(tokens, 0)
    assert model.logits("One two").shape == (len(tokens), model.info.vocab_size)
    assert (model.logits(tokens)[-1] == sequence.logits).all()
    assert (model.embed("One") == sequence.engine.embed("One")).all()
    model.engine = llamac.Engine(model, threads=1)
    assert "".join(model.generate("One", 20, temperature=0.8, seed=7)) == alone[0]
    with pytest.raises(llamac.Error, match="temprature: a sampler has no such field, expected one "
                       "of: temperature"):
        model.generate("One", temprature=1)


def test_generate_slides_over_prompts_longer_than_the_context(run_bin, models):
    """As in run, the context keeps the first token and the latest ones."""
    model, words = llamac.Model(models[0]), "Once upon a time there was a cat. " * 5
    prompt = model.encode(words).tolist()
    for positions in 1, 2, 3, 4, 16, 128:
        sequence = started(model, positions=positions)
        told = "".join(text for text, *_ in llamac.generate(
            sequence, prompt, llamac.Sampler(0, 0, 1), 12))
        expected = run(run_bin, models[0], "-t", 0, "-c", positions, "-n", len(prompt) - 1 + 12,
                       "--raw", "-i", words)[:-1]
        assert len(prompt) > 128 and words + told == expected.decode(errors="replace")


def test_generate_without_tokens(models):
    """max_tokens=0 yields nothing; a negative limit and an empty prompt are errors."""
    sequence, greedy = started(llamac.Model(models[0])), llamac.Sampler(0, 0, 1)
    assert list(llamac.generate(sequence, [1, 5], greedy, 0)) == []
    for tokens, most, message in (
            ([1, 5], -1, "max_tokens is -1, expected"),
            ([1, 5], 0.5, "max_tokens is 0.5, expected"), ([], 3, "0 tokens")):
        with pytest.raises(llamac.Error, match=message):
            next(llamac.generate(sequence, tokens, greedy, most))
        assert len(list(llamac.generate(sequence, [1, 5], greedy, 1))) == 1


def test_two_models_used_by_threads(models):
    """Each thread has its own engine and generates the same text as alone."""
    one, other = map(llamac.Model, models)
    alone = [continued(m, "Ab", llamac.Sampler(0.9, 0.9, 3), 30) for m in (one, other)]
    said = {}

    def work(n):
        said[n] = continued((one, other)[n % 2], "Ab", llamac.Sampler(0.9, 0.9, 3), 30)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [said[n] for n in range(6)] == alone * 3


def test_of_equal_logits_the_first_is_sampled(models):
    sequence, greedy = started(llamac.Model(models[0])), llamac.Sampler(temperature=0)
    sequence.forward([1], 0)
    address = llamac.library().llamac_logits(sequence.pointer)  # the library's own memory
    logits = np.ctypeslib.as_array((ctypes.c_float * 300).from_address(address))
    for place in *range(70), 255, 256, len(logits) - 1:
        logits[:place], logits[place:] = -3, 2
        assert sequence.sample(greedy) == place


def test_logits_equal_transformers(models):
    """
    This holds for the last token and for each token of a batch. The logits are copies, which stay
    when the engine evaluates again.
    """
    model = llamac.Model(models[0])
    sequence, tokens = started(model, positions=16), model.encode("One two")
    engine = sequence.engine
    assert engine.positions == 16 and tokens.dtype == np.int32 and tokens[0] == model.info.bos == 1
    assert (model.encode("One two", bos=False) == tokens[1:]).all()
    assert model.decode(tokens) == b"One two"
    expected = Model(heads=8, kv=2, tied=False).logits(tokens.tolist())
    engine.evaluate([llamac.Part(sequence, tokens, 0, "all")])
    rows = np.stack([engine.logits(i) for i in range(len(tokens))])
    assert rows.shape == expected.shape and np.allclose(rows, expected, atol=2e-3)
    assert (sequence.logits == rows[-1]).all()
    assert (sequence.tokens == tokens).all()
    assert len(sequence) == len(tokens)
    assert [engine.sample(i, llamac.Sampler()) for i in range(len(tokens))] == (
        rows.argmax(1).tolist())
    before = rows[-1].copy()
    last = sequence.logits
    sequence.forward(tokens[:3][::-1].copy(), 0)
    assert sequence.logits.shape == (300,)
    assert len(sequence) == 3
    assert not (sequence.logits == last).all()
    with pytest.raises(llamac.Error, match="no logits"):
        engine.logits(0)  # forward computes the logits of its last token alone
    with pytest.raises(llamac.Error, match="no logits of token 0"):
        engine.sample(0, llamac.Sampler())
    del model, sequence, engine, tokens
    gc.collect()
    assert (last == before).all()


def test_a_batch_computes_what_each_sequence_computes_alone(models):
    """
    The logits are equal to the last bit for prompts of several lengths and for one more token of
    each. One sequence takes this token at an earlier position of its text.
    """
    model = llamac.Model(models[1])
    engine, texts = llamac.Engine(model), [model.encode("Once upon " * n) for n in range(1, 6)]
    alone = []
    for n, text in enumerate(texts):
        sequence = llamac.Sequence(engine)
        sequence.forward(text, 0)
        first = sequence.logits
        sequence.forward([7], len(text) if n else 2)
        alone.append((first, sequence.logits))
    sequences = [llamac.Sequence(engine) for _ in texts]
    engine.evaluate([llamac.Part(s, t[:4], logits="none") for s, t in zip(sequences, texts)])
    engine.evaluate([llamac.Part(s, t[4:]) for s, t in zip(sequences[::-1], texts[::-1])])
    assert all((s.logits == a).all() for s, (a, _) in zip(sequences, alone))
    engine.evaluate([llamac.Part(s, [7], None if n else 2) for n, s in enumerate(sequences)])
    assert all((s.logits == b).all() for s, (_, b) in zip(sequences, alone))
    assert all((engine.logits(n) == b).all() for n, (_, b) in enumerate(alone))
    assert sequences[0].tokens.tolist() == [*texts[0][:2], 7]
    assert sequences[1].tokens.tolist() == [*texts[1], 7]


def test_many_sequences_are_sampled_in_one_call(models, tmp_path):
    """
    The tokens and the sampler states equal those of single calls. An error of one sequence leaves
    the others unaffected.
    """
    model = llamac.Model(models[1])
    engine, wishes = llamac.Engine(model), [
        {}, {"temperature": 1}, {"temperature": 0.8, "topp": 0.9}, {"temperature": 2, "topk": 5},
        {"temperature": 1, "repeat_penalty": 1.5, "frequency_penalty": 0.5}]
    sequences = [llamac.Sequence(engine) for _ in wishes]
    engine.evaluate([llamac.Part(s, [1, 5, n]) for n, s in enumerate(sequences)])
    one, many = [[llamac.Sampler(state=n + 1, **wish) for n, wish in enumerate(wishes)]
                 for _ in range(2)]
    for _ in range(20):
        assert engine.sample_batch(sequences, many) == [s.sample(x) for s, x in zip(sequences, one)]
        assert [x.state for x in many] == [x.state for x in one]
    assert engine.sample_batch([], []) == []
    with pytest.raises(llamac.Error, match="another engine"):
        llamac.Engine(engine.model).sample_batch(sequences, one)
    sequences[1].free()
    none, one[3].topk = llamac.Sequence(engine), -1
    found = engine.sample_batch([*sequences, none], [*one, llamac.Sampler()])
    assert [type(token) for token in found] == [
        int, llamac.Error, int, llamac.Error, int, llamac.Error]
    assert [str(found[n]) for n in (1, 3)] == [
        "the sequence is NULL", "top-k is -1, expected 0 or more"]
    assert "no logits" in str(found[5])
    assert [many[n].state for n in (0, 2, 4)] != [one[n].state for n in (0, 2, 4)]
    engine.sample_batch([sequences[n] for n in (0, 2, 4)], [many[n] for n in (0, 2, 4)])
    assert [many[n].state for n in (0, 2, 4)] == [one[n].state for n in (0, 2, 4)]


def test_a_copied_grammar_has_a_text_of_its_own(models):
    model = llamac.Model(models[0])
    grammar = llamac.Grammar(model)
    first, second = grammar.copy(), grammar.copy()
    del grammar
    gc.collect()
    for byte in b"{}":
        assert first.accept(3 + byte)
    assert first.complete
    assert not second.complete
    assert second.accept(3 + ord("{"))
    assert second.accept(3 + ord('"'))


def test_a_text_goes_on_in_another_sequence(models):
    """The tokens stay the same, also after the context has slid."""
    model = llamac.Model(models[0])
    engine, tokens = llamac.Engine(model), [1, 5, 9]

    def say(changes):
        sampler = llamac.Sampler(temperature=1, state=3, repeat_penalty=1.2)
        sampler.set_biases({1: float("-inf"), 2: float("-inf")})  # BOS and EOS, which end a text
        text, found = llamac.Continuation(llamac.Sequence(engine), tokens, sampler, 200), []
        for n in range(200):
            part = text.part(64)
            if n in changes:
                text.take_back(part)
                text.suspend()
                assert not text.sequence.pointer and text.pending[-1] == text.last
                text.resume(llamac.Sequence(engine))
                part = text.part(64)
            engine.evaluate([part])
            while not text.ready:
                engine.evaluate([text.part(64)])
            found.append(text.advance())
        assert text.reason == "length"
        return found
    assert say({0, 1, 2, 100, 127, 150, 199}) == say({})


def test_copies_and_truncated_sequences(models):
    """A copy shares its tokens with the original, and neither changes the other."""
    model = llamac.Model(models[0])
    sequence, tokens = started(model), model.encode("Once upon a time there was")
    sequence.forward(tokens, 0)
    whole = sequence.logits
    copy = sequence.copy(5)
    assert (copy.tokens == tokens[:5]).all() and copy.engine is sequence.engine
    copy.forward([9], 5)
    changed = copy.logits
    sequence.forward(tokens[5:], 5)
    assert (sequence.logits == whole).all()
    assert (sequence.tokens == tokens).all()
    assert not (changed == whole).all()
    sequence.truncate(5)
    sequence.forward([9], 5)
    assert (sequence.logits == changed).all() and len(sequence) == len(copy) == 6
    assert len(llamac.Sequence(sequence.engine)) == 0
    assert len(llamac.Sequence(sequence.engine).tokens) == 0
    assert llamac.Sequence(copy.engine)
    other = started(model)
    for mistake, message in (
            (lambda: copy.copy(7), "7 tokens, but the sequence has 6"),
            (lambda: copy.truncate(-1), "-1 tokens"),
            (lambda: sequence.engine.evaluate([llamac.Part(other, [1])]), "another engine"),
            (lambda: sequence.engine.evaluate([llamac.Part(copy, [1], 7)]), "position 7"),
            (lambda: sequence.engine.evaluate([llamac.Part(copy, [1], 0, "some")]),
             "'some', expected"),
            (lambda: sequence.engine.evaluate([]), "0 tokens"),
            (lambda: sequence.engine.logits(0), "no logits")):
        with pytest.raises(llamac.Error, match=message):
            mistake()
    copy.free()
    copy.free()
    for mistake in (lambda: copy.forward([1], 0), lambda: copy.copy(0),
                    lambda: sequence.engine.evaluate([llamac.Part(copy, [1])])):
        with pytest.raises(llamac.Error, match="the sequence is NULL"):
            mistake()


def test_generate_keeps_what_the_sequence_has_of_the_tokens(models, monkeypatch):
    """The text is that of a new sequence, and only the new tokens are evaluated."""
    model, evaluated = llamac.Model(models[0]), []
    evaluate = llamac.Engine.evaluate
    monkeypatch.setattr(llamac.Engine, "evaluate", lambda engine, parts: (
        evaluated.append(sum(len(part.tokens) for part in parts)), evaluate(engine, parts)))
    first, other = (model.encode("Once upon a time there was a cat"),
                    model.encode("Once upon a time there is"))

    def say(sequence, tokens):
        evaluated.clear()
        return "".join(text for text, *_ in llamac.generate(
            sequence, tokens, llamac.Sampler(0.9, 0.9, 3), 10)), evaluated[0]
    alone = [say(started(model), tokens) for tokens in (first, other)]
    sequence = started(model)
    shared = next(n for n in range(99) if first[n] != other[n])
    assert say(sequence, first) == alone[0] == (alone[0][0], len(first))
    assert say(sequence, other) == (alone[1][0], len(other) - shared)
    assert say(sequence, other) == (alone[1][0], 1)
    assert say(sequence, [*sequence.tokens, 5])[1] == 1


@pytest.mark.parametrize("prefix", [True, False])
def test_a_conversation_equals_transformers(tmp_path, prefix):
    """Turns and answers have the tokens of the template; text never encodes to control tokens."""
    made = vocabulary("control", prefix)
    (tmp_path / "tokenizer.model").write_bytes(made.SerializeToString())
    oracle = LlamaTokenizer.from_pretrained(tmp_path, legacy=False, add_prefix_space=prefix)
    oracle.add_special_tokens({"additional_special_tokens": sum(MARKS.values(), [])})
    meta = spm.SentencePieceProcessor(model_proto=made.SerializeToString())
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": HI},
                {"role": "assistant", "content": ANSWER}, {"role": "user", "content": AGAIN}]
    for source in CHATML, ZEPHYR, LLAMA2:
        write_gguf(tmp_path / "m.gguf", pieces_of(made), prefix,
                   **{"tokenizer.chat_template": source})
        model = llamac.Model(tmp_path / "m.gguf")
        model.use_template()
        told = [*model.encode_turn(HI, True, SYSTEM), *model.encode_answer(ANSWER),
                *model.encode_turn(AGAIN, False)]
        if source == LLAMA2:  # as in Meta's reference code
            first = meta.encode(f"[INST] <<SYS>>\n{SYSTEM}\n<</SYS>>\n\n{HI} [/INST] {ANSWER} ")
            assert told == [1, *first, 2, 1, *meta.encode("[INST] And you? [/INST]")]
        else:
            assert told == [1] + oracle.apply_chat_template(
                messages, chat_template=source, add_generation_prompt=True)["input_ids"]
        assert not {i for i, piece in enumerate(pieces_of(made)) if piece[2] == 3} & set(
            model.encode_answer("</s><|im_end|>"))
        model = llamac.Model(tmp_path / "m.gguf")  # chooses the template by itself
        assert model.encode_chat(messages).tolist() == told
        sequence = started(model)
        answer = llamac.generate(sequence, model.encode_chat(messages[1:2]),
                                 llamac.Sampler(temperature=0), 5)
        assert ("".join(model.chat(messages[1:2], 5, temperature=0))
                == "".join(text for text, *_ in answer))
    for wrong in [], messages[:1], messages[:3], messages[2:], [messages[1]] * 2:
        with pytest.raises(llamac.Error, match="expected an optional system message, then user and "
                           "assistant in turn"):
            model.chat(wrong)
    model = llamac.Model(tmp_path / "m.gguf")
    with pytest.raises(llamac.Error, match="zero byte"):
        model.encode_turn("Hi", True, "a\0b")
    for call in (lambda: model.encode_turn("Hi"), lambda: model.encode_answer("Hi")):
        with pytest.raises(llamac.Error, match="no chat template is in use"):
            call()


def test_errors_have_the_messages_of_the_library(models, tmp_path):
    model, greedy = llamac.Model(models[0]), llamac.Sampler(0, 0, 1)
    quiet = started(model, sample_only=True)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(60))
    for mistake, message in (
            (lambda: llamac.Model("none.gguf"), "none.gguf: no such file"),
            (lambda: llamac.Model(b""), "."),
            (lambda: llamac.Model(tmp_path / "bad.gguf"), "version"),
            (lambda: model.use_template("alpaca"), "unknown template 'alpaca'"),
            (lambda: llamac.Engine(model, positions=1 << 20), "context is 128"),
            (lambda: started(model).sample(greedy), "no logits"),
            (lambda: started(model).logits, "no logits"),
            (lambda: llamac.Engine(model, device="tpu"), "unknown device 'tpu'"),
            (lambda: quiet.forward([1] * 129, 0), "room for"),
            (lambda: quiet.forward([1], -1), "position"),
            (lambda: (quiet.forward([1], 0), quiet.logits), "no logits"),
            (lambda: quiet.forward([], 0), "0 tokens"),
            (lambda: quiet.forward([300], 0), "outside the vocabulary")):
        with pytest.raises(llamac.Error, match=message):
            mistake()
    assert model.decode([-5, 300, 1 << 30]) == b"" and not model.ends(-7)


def test_end_tokens_are_those_of_the_tokenizer_in_use(models, tmp_path):
    """Without a tokenizer no token ends a text; another tokenizer has other end tokens."""
    bare, _ = Model(vocab=261).write(tmp_path, "v1:")
    model = llamac.Model(bare[0])
    assert not model.info.has_tokenizer and not any(map(model.ends, range(-1, 261)))
    llamac.library().llamac_open_tokenizer(ctypes.c_void_p(model.pointer), bytes(bare[2]), None)
    assert [n for n in range(-1, 261) if model.ends(n)] == [1, 2]
    marked = Model(vocab=261)
    marked.pieces[259:] = [(b"<|im_start|>", 3), (b"<|im_end|>", 3)]
    marked.write_gguf(tmp_path / "m.gguf")
    model = llamac.Model(tmp_path / "m.gguf")
    model.use_template("chatml")
    assert model.ends(260)
    llamac.library().llamac_open_tokenizer(ctypes.c_void_p(model.pointer), bytes(bare[2]), None)
    assert [n for n in range(-1, 261) if model.ends(n)] == [1, 2]


def test_a_seed_of_0_is_valid(models):
    """A random number generator in state 0 would draw 0 forever."""
    model = llamac.Model(models[0])
    texts = [
        "".join(text for text, *_ in llamac.generate(
            started(model), [1, 5], llamac.Sampler(9, topp, state), 30))
        for topp in (0, 0.9) for state in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] == texts[4] != texts[5]
    assert "<unk>" * 5 not in texts[0]
    assert len(set(texts[0])) > 5 < len(set(texts[3]))


def test_numbers_that_do_not_fit_c_are_refused(models):
    """Unchecked, ctypes would drop their high bits and numpy their fractions."""
    model = llamac.Model(models[0])
    sequence, big = started(model), (1 << 32) + 5
    for mistake in (lambda: sequence.forward([1, 2, 3], 1 << 32),
                    lambda: sequence.forward([big], 0),
                    lambda: sequence.forward(np.array([big]), 0),
                    lambda: sequence.forward([1.7], 0), lambda: sequence.forward(["1"], 0),
                    lambda: sequence.forward([1 << 64], 0), lambda: sequence.copy(1 << 32),
                    lambda: sequence.truncate(0.0), lambda: sequence.engine.logits(1 << 32),
                    lambda: sequence.engine.evaluate([llamac.Part(sequence, [1], 1 << 32)]),
                    lambda: sequence.engine.evaluate(
                        [llamac.Part(sequence, [1, 2], (1 << 31) - 1)]),
                    lambda: sequence.forward([1], 0.5),
                    lambda: sequence.forward(np.array([1], np.uint64) << 63, 0),
                    lambda: llamac.Engine(model, positions=(1 << 32) + 16),
                    lambda: llamac.Engine(model, positions=16.0),
                    lambda: llamac.Engine(model, threads=(1 << 32) + 1),
                    lambda: llamac.Engine(model, kv_bits=(1 << 32) + 16),
                    lambda: model.decode([big]), lambda: model.decode([5.0]),
                    lambda: model.decode([5], previous=big), lambda: model.ends(big),
                    lambda: model.ends("a"),
                    lambda: next(llamac.generate(sequence, [1.7], llamac.Sampler(), 1))):
        with pytest.raises(llamac.Error, match="expected"):
            mistake()
    assert [llamac.c_integer("n", n) for n in (-2 ** 31, 2 ** 31 - 1)] == [-2 ** 31, 2 ** 31 - 1]
    for n in -2 ** 31 - 1, 2 ** 31:
        with pytest.raises(llamac.Error, match="32-bit"):
            llamac.c_integer("n", n)
    for tokens in ([1, 5], (1, 5), np.array([1, 5]), np.array([1, 5], np.uint8),
                   np.array([1, 0, 5, 0], np.int32)[::2]):
        sequence.forward(tokens, np.int64(0))
        assert model.decode(tokens) == model.decode([1, 5])
    assert model.ends(np.int64(1))
    assert llamac.Engine(model, np.int16(16), np.int64(1)).positions == 16


def test_a_missing_library_is_reported_with_make_lib(tmp_path):
    (tmp_path / "llamac").symlink_to(tmp_path / "real")
    shutil.copytree(ROOT / "llamac", tmp_path / "real")
    for content in (None, b"", b"not a library"):
        if content is not None:
            (tmp_path / "libllamac.so").write_bytes(content)
        done = subprocess.run(
            [sys.executable, "-c",
             "import llamac\ntry: llamac.Model('x')\nexcept llamac.Error as e: print(e)"],
            capture_output=True, text=True, cwd=tmp_path)
        assert "libllamac.so cannot be loaded" in done.stdout, done.stderr
        assert "make lib" in done.stdout, done.stderr


def test_many_engines_and_sequences_leak_no_memory(models):
    model = llamac.Model(models[1])
    kept = llamac.Engine(model, threads=1)

    def memory():
        gc.collect()
        return int(open("/proc/self/statm").read().split()[1]) * 4096
    for n in range(600):
        if n == 100:
            before = memory()
        engine = (llamac.Engine(llamac.Model(models[1]) if n % 9 == 0 else model, threads=1)
                  if n % 3 == 0 else kept)
        sequence = llamac.Sequence(engine)
        sequence.forward(model.encode("One two three"), 0)
        copies = [sequence.copy(2) for _ in range(3)]
        copies[0].free()
    assert memory() - before < 8 << 20


def test_a_model_with_an_engine_of_its_own_is_freed_with_its_last_reference(models):
    gc.disable()
    try:
        model = llamac.Model(models[0])
        "".join(model.generate("One", 3))
        memory, engine = weakref.ref(model.memory), weakref.ref(model.engine)
        del model
        assert memory() is None and engine() is None
        engine = llamac.Model(models[0]).engine  # outlives its model
        assert engine.embed("One").any()
    finally:
        gc.enable()


def test_sequences_that_other_threads_drop_are_freed(models):
    """A sequence dropped while the engine computes is freed at once or by the next call."""
    engine, stop = llamac.Engine(llamac.Model(models[0])), threading.Event()
    sequence, tokens = (llamac.Sequence(engine),
                        engine.model.encode("Once upon a time there was a cat"))
    sequence.forward(tokens, 0)
    before = sequence.logits

    def drop():
        while not stop.is_set():
            sequence.copy(5)
            llamac.Sequence(engine)
    threads = [threading.Thread(target=drop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        engine.evaluate([llamac.Part(sequence, tokens, 0)])
    stop.set()
    for thread in threads:
        thread.join()
    sequence.forward(tokens, 0)
    assert not engine.dropped and (sequence.logits == before).all()


ENDS = """
import pathlib, sys, threading, time
import llamac
llamac.PATHS[:] = [pathlib.Path(sys.argv[1])]
path = pathlib.Path(sys.argv[2])
model = llamac.Model(path.read_bytes() if sys.argv[3] else path)
sequence, tokens = llamac.Sequence(llamac.Engine(model)), model.encode("One two " * 12)[:100]

def work():
    while True:
        sequence.forward(tokens, 0)

threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
"""


@pytest.mark.parametrize("memory", ["", "bytes"])
def test_a_program_may_end_while_a_thread_computes(models, memory):
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", ENDS, llamac.PATHS[0], models[1], memory],
                              cwd=ROOT, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")


def test_callbacks_see_progress_and_stop_calls(models):
    """An exception reaches the caller unchanged; the engine then computes the same results."""
    model, shares, stop = llamac.Model(models[0]), [], []

    def abort():
        if stop and isinstance(stop[0], Exception):
            raise stop[0]
        return stop
    engine = llamac.Engine(model, progress=shares.append, abort=abort)
    assert shares[0] == 0 and shares[-1] == 1 and shares == sorted(shares) and len(shares) > 5
    sequence, text = llamac.Sequence(engine), model.encode("Once upon a time")
    sequence.forward(text, 0)
    before, embedding = sequence.logits, engine.embed(text)
    calls = (lambda: sequence.forward(text, 0),
             lambda: engine.evaluate([llamac.Part(sequence, text, 0)]), lambda: engine.embed(text))
    for reason, raised, message in ((1, llamac.Error, "aborted by the program"),
                                    (ValueError("no"), ValueError, "^no$")):
        for call in calls:
            stop[:] = [reason]
            with pytest.raises(raised, match=message) as caught:
                call()
            stop.clear()
            assert caught.value is reason or raised is llamac.Error
            sequence.forward(text, 0)
            assert (sequence.logits == before).all() and (engine.embed(text) == embedding).all()

    def fail(share):
        assert share < 0.5, "half"

    for progress, raised, message in (
            (lambda share: share < 0.5, llamac.Error, "aborted by the program"),
            (fail, AssertionError, "half")):
        with pytest.raises(raised, match=message):
            llamac.Engine(model, progress=progress)
    used = llamac.Engine(model, abort=lambda: llamac.Sequence(used))
    with pytest.raises(llamac.Error, match="a callback of the engine must not use the engine"):
        llamac.Sequence(used).forward(text, 0)
    with pytest.raises(TypeError, match="callable"):  # from Python, which can't call 5
        llamac.Sequence(llamac.Engine(model, abort=5)).forward(text, 0)


def test_ctrl_c_stops_a_call_whenever_it_comes(tmp_path, library, monkeypatch):
    """
    No interrupt is lost in a callback, where Python could only print it. A signal handler other
    than Python's is called once.
    """
    lost, told = [], []
    # The training of another test may have left its own handler.
    before_all = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(sys, "unraisablehook",
                        lambda details: lost.append(f"{details.exc_value!r} in {details.object!r}"))
    Model(seq=1024).write_gguf(tmp_path / "m.gguf")
    engine = llamac.Engine(llamac.Model(tmp_path / "m.gguf"), abort=lambda: False)
    sequence, tokens = llamac.Sequence(engine), [5] * 1024
    sequence.forward(tokens, 0)
    before = sequence.logits

    def compute(seconds=60):
        end = time.monotonic() + seconds
        while time.monotonic() < end and not lost:
            sequence.forward(tokens, 0)
        pytest.fail(f"not interrupted; lost: {lost}")
    for n in range(30):
        timer = threading.Timer(0.02 + 0.001 * n, os.kill, [os.getpid(), signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            compute()
        assert not lost
    sequence.forward(tokens, 0)
    assert (sequence.logits == before).all()
    interrupted = llamac.Engine(engine.model, abort=lambda: os.kill(os.getpid(), signal.SIGINT))
    handler = signal.signal(signal.SIGINT, lambda *details: told.append(details[0]))
    try:
        with pytest.raises(llamac.Error, match="aborted by the program"):
            llamac.Sequence(interrupted).forward(tokens, 0)
        assert told == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, handler)
    with pytest.raises(KeyboardInterrupt):
        llamac.Engine(engine.model, progress=lambda share: os.kill(os.getpid(), signal.SIGINT))
    assert not lost
    signal.signal(signal.SIGINT, before_all)
