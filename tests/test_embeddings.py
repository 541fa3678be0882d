"""
Embeddings equal the hidden states of transformers.

They are the same to the last bit for every length of the text, and leave the engine unchanged.
"""
import threading

import numpy as np
import pytest
import torch

import llamac
from tests.test_architectures import CASES, random_model, write_gguf
from tests.test_run import FORMS, ISAS, TEXT, Model, ids_of, is_quantised

pytestmark = pytest.mark.usefixtures("library")

LONG = [1, *(3 + 7 * n % 250 for n in range(299))]  # takes more than two passes


def last_hidden_states(model, ids):
    """Return the hidden states of transformers after the final norm: (tokens, dim)."""
    with torch.no_grad():
        return model.model(torch.tensor([ids])).last_hidden_state[0].numpy()


def assert_embeddings(engine, ids, states, tolerance):
    for pooling, expected in ("mean", states.mean(axis=0)), ("last", states[-1]):
        found = engine.embed(ids, pooling)
        assert found.dtype == np.float32 and found.shape == (engine.model.info.dim,)
        assert np.abs(found - expected).max() <= tolerance * np.abs(states).max()


@pytest.mark.parametrize("form", FORMS)
def test_embeddings_equal_transformers(tmp_path, form):
    """Compare them in every format and instruction set, for one token, one pass and several."""
    model = Model(heads=8, kv=2, tied=False, seq=300)
    (path, *_), held = model.write(tmp_path, form)
    oracle, opened = model.oracle(held), llamac.Model(path)
    for isa in ISAS:
        rounds = is_quantised(form) or form == "bf16" and isa == "avx512bf16"
        engine = llamac.Engine(opened, threads=2, isa=isa)
        for ids in LONG[:1], ids_of(TEXT), LONG:
            assert_embeddings(engine, ids, last_hidden_states(oracle, ids),
                              4e-2 if rounds else 1e-5)


@pytest.mark.parametrize("case", CASES)
def test_embeddings_of_every_architecture_equal_transformers(tmp_path, case):
    model, architecture = random_model(case)
    write_gguf(tmp_path / "m.gguf", model, architecture)
    for isa in ISAS:
        engine = llamac.Engine(llamac.Model(tmp_path / "m.gguf"), isa=isa)
        assert_embeddings(engine, ids_of(TEXT), last_hidden_states(model, ids_of(TEXT)), 1e-5)


@pytest.mark.parametrize("form", ["f32", "q8_0"])
def test_hidden_states_are_the_same_to_the_last_bit_whatever_follows(tmp_path, form):
    """
    The state of each token equals the last state of its prefix, evaluated in passes of other sizes.

    The mean adds the states up in their order.
    """
    Model(layers=1, seq=300).write_gguf(tmp_path / "m.gguf", form)
    model, n = llamac.Model(tmp_path / "m.gguf"), 132  # tokens: more than one pass
    for isa in ISAS:
        engine, other = (llamac.Engine(model, threads=2, isa=isa),
                         llamac.Engine(model, threads=1, isa=isa, no_copy=True))
        states = np.array([engine.embed(LONG[:size], "last") for size in range(1, n + 1)])
        sums = np.cumsum(states, axis=0, dtype=np.float64)
        for size in 1, 2, 31, 127, 128, 129, n:
            expected = (sums[size - 1] / size).astype(np.float32)
            assert (engine.embed(LONG[:size]) == expected).all()
            assert (other.embed(LONG[:size]) == expected).all()
        assert len(np.unique(states, axis=0)) == n


@pytest.mark.parametrize("sample_only", [False, True])
def test_an_embedding_leaves_no_trace_in_the_engine(tmp_path, sample_only):
    """
    Embed a text before every token of two texts that are written in turns.

    It has one token, whose pass is like those of the two texts, or more.
    """
    Model(seq=200, tied=False).write_gguf(tmp_path / "m.gguf")
    model = llamac.Model(tmp_path / "m.gguf")

    def write(embed):
        engine, found = llamac.Engine(model, sample_only=sample_only), []
        sequences = [llamac.Sequence(engine) for _ in range(2)]
        for sequence, prompt in zip(sequences, ("Once", "There was")):
            sequence.forward(model.encode(prompt), 0)
            found.append([sequence.sample(llamac.Sampler(0.9, 0.9, 3))])
        for n in range(70):
            embed(engine, n)
            engine.evaluate([llamac.Part(sequence, tokens[-1:])
                             for sequence, tokens in zip(sequences, found)][n % 2:])
            embed(engine, n)
            for sequence, tokens in list(zip(sequences, found))[n % 2:]:
                tokens.append(sequence.sample(llamac.Sampler(0.9, 0.9, n)))
                if not sample_only:
                    before = sequence.logits
                    embed(engine, n)
                    assert (sequence.logits == before).all()
        return found, [sequence.tokens.tolist() for sequence in sequences]

    assert write(lambda engine, n: None) == write(lambda engine, n: engine.embed(
        LONG[:1 + n % 3 * 60], ("mean", "last")[n % 2]))


def test_texts_and_lists_of_texts(tmp_path):
    Model(seq=64).write_gguf(tmp_path / "m.gguf")
    engine = llamac.Engine(llamac.Model(tmp_path / "m.gguf"))
    ids = engine.model.encode("One two")
    one = engine.embed("One two")
    for same in ids, ids.tolist(), tuple(ids.tolist()):
        assert (engine.embed(same) == one).all()
    for texts in (["One two", "A"], ("One two", "A"), [ids, [1, 68]],
                  ["One two", engine.model.encode("A")]):
        found = engine.embed(texts, "last")
        assert len(found) == 2
        assert (found[0] == engine.embed(ids, "last")).all()
        assert (found[1] == engine.embed("A", "last")).all()
    (row,) = engine.embed(ids[None])  # an array of texts
    assert (row == one).all()
    assert (engine.embed("") == engine.embed([1])).all()  # BOS alone


def test_mistakes_are_refused(tmp_path):
    Model(seq=64).write_gguf(tmp_path / "m.gguf")
    broken = Model()
    broken.w["norm"][0] = np.nan
    broken.write_gguf(tmp_path / "broken.gguf")
    engine, sick = (llamac.Engine(llamac.Model(tmp_path / name))
                    for name in ("m.gguf", "broken.gguf"))
    for mistake, message in ((lambda: engine.embed([]), "0 tokens, expected 1 to 64"),
                             (lambda: engine.embed(np.array([], int)), "0 tokens"),
                             (lambda: engine.embed([1] * 65), "65 tokens, expected 1 to 64"),
                             (lambda: engine.embed("A" * 65), "66 tokens"),
                             (lambda: engine.embed([300]), "300 is outside the vocabulary of 300"),
                             (lambda: engine.embed([1, -1]), "token -1 is outside"),
                             (lambda: engine.embed([1.5]), "whole numbers"),
                             (lambda: engine.embed([1, "A"]), "whole numbers"),
                             (lambda: engine.embed(5), "a text"),
                             (lambda: engine.embed(["A", 5]), "a text"),
                             (lambda: engine.embed(None), "a text"),
                             (lambda: engine.embed([1 << 32]), "32-bit"),
                             (lambda: engine.embed("A", "max"), "'max', expected 'mean' or 'last'"),
                             (lambda: sick.embed("A"), "not finite")):
        with pytest.raises(llamac.Error, match=message):
            mistake()
    assert np.isfinite(engine.embed("A")).all()


def test_embeddings_of_many_threads(tmp_path):
    """They take turns with a thread that generates text."""
    Model(seq=200).write_gguf(tmp_path / "m.gguf")
    engine = llamac.Engine(llamac.Model(tmp_path / "m.gguf"))
    texts = [LONG[:5 + 20 * n] for n in range(8)]
    alone, found = engine.embed(texts), {}

    def work(n):
        for _ in range(10):
            found[n] = engine.embed(texts[n])

    def write():
        return [text for text, *_ in llamac.generate(llamac.Sequence(engine), [1, 70],
                                                     llamac.Sampler(0.9, 0.9, 3), 60)]
    written, threads = write(), [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    assert write() == written
    for thread in threads:
        thread.join()
    assert all((found[n] == alone[n]).all() for n in range(8))
