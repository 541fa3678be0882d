"""
Import and export of third-party models: Hugging Face and Meta folders and GGUF files.

The references are transformers and the gguf package.
"""
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import sentencepiece as spm
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import sentencepiece_model_pb2
from transformers import (AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MistralConfig,
                          Qwen2Config, Qwen3Config)

import export
from configurator import source_knobs
from engine.formats import gguf_file, hf_tokenizer, rope
from engine.text import prepare
from engine.text.vocabulary import keep_vocabulary
from engine.training import checkpoint, load
from engine.formats.layout import architecture, interleaved_to_halves
from model import ModelArgs, Transformer
from tests import forked
from tests.test_export import refused
from tokenizer import Bytes, Tokenizer, train_byte_level, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
V = 330
TEXT = ("once upon a time there was a little girl who played outside, in the park: "
        "Girl outside, 12 girls of 7.")
TINY = dict(vocab_size=V, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            rms_norm_eps=1e-5, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "rope_theta": 5e5, "original_max_position_embeddings": 16
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope", "short_factor": [1.0 + i for i in range(8)],
    "long_factor": [1.0 + i for i in range(8)], "original_max_position_embeddings": 64,
    "attention_factor": 1.0, "rope_theta": 1e4, "factor": 1.0
}
CASES = {
    "llama": (LlamaConfig, {}),
    "llama, mha, tied, theta": (
        LlamaConfig, dict(num_key_value_heads=4, tie_word_embeddings=True,
                          rope_parameters={"rope_theta": 5e5, "rope_type": "default"})),
    "llama 3.2": (LlamaConfig, dict(tie_word_embeddings=True, head_dim=16, rope_parameters=LLAMA3)),
    "llama, linear": (
        LlamaConfig,
        dict(rope_parameters={"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4})),
    "llama, yarn": (LlamaConfig, dict(rope_parameters=YARN)),
    "llama, each its own": (LlamaConfig, dict(rope_parameters=LONG)),
    "mistral, heads wide": (MistralConfig, dict(head_dim=24, sliding_window=None)),
    "qwen2": (Qwen2Config, {}),
    "qwen2, tied, yarn": (
        Qwen2Config, dict(tie_word_embeddings=True, rms_norm_eps=1e-6, rope_parameters=YARN)),
    "qwen3": (Qwen3Config, dict(head_dim=32)),
    "qwen3, tied, linear": (
        Qwen3Config,
        dict(head_dim=16, tie_word_embeddings=True,
             rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6})),
}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    words = ["once", "upon", "a", "time", "there", "was", "little", "girl", "who", "played",
             "outside", "park"]
    lines = [" ".join(random.Random(n).choices(words, k=9)) for n in range(200)]
    lines += [word[i:] for word in words for i in range(len(word))] * 3
    return train_tokenizer(lines, V, tmp_path_factory.mktemp("vocabulary") / "tokenizer.model",
                           exact=False)


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: models this small run slower on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(folder, kind, values, vocabulary, dtype=torch.float32, **options):
    """Save a transformers model whose weights are all random, so that each affects the logits."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(
        kind(**TINY | {"vocab_size": vocabulary.vocab_size} | values)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1, 0.2) if p.dim() == 1 and not p.shape[0] == 0 else p.normal_(0, 0.15)
    model.to(dtype).save_pretrained(folder, **options)
    vocabulary.save(folder / "tokenizer.model")
    return model


def imported(path):
    """Return model.py's Transformer with the weights of the model at `path`."""
    state, args, _, _ = load.read_model(path)
    model = Transformer(args).eval()
    model.load_state_dict(state)
    return model


def far(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_and_after_a_round_trip(case, tmp_path, vocabulary, run_bin):
    """Compare the logits of model.py, of run on a GGUF export and of a Hugging Face re-export."""
    kind, values = CASES[case]
    theirs = make(tmp_path / "theirs", kind, values, vocabulary, max_shard_size="100KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    x = torch.randint(V, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, ours = theirs(x).logits, imported(tmp_path / "theirs")
        assert far(ours(x, every=True)[0], expected) < 1e-4
        state, args, found, extra = load.read_model(tmp_path / "theirs")
        assert found.encode("once upon") == vocabulary.encode("once upon")
        export.export_model(state, args, found, tmp_path / "m.gguf", extra=extra)
        again = load.read_model(tmp_path / "m.gguf")
        assert again[1] == args and all(torch.equal(again[0][name], w) for name, w in state.items())
        assert (gguf.GGUFReader(tmp_path / "m.gguf").get_field("general.architecture").contents()
                == architecture(args))
        ids = torch.tensor([found.encode(TEXT, bos=True)])
        said = subprocess.run([run_bin, tmp_path / "m.gguf", "--logits", "-i", TEXT],
                              stdout=subprocess.PIPE, check=True).stdout
        by_run = torch.from_numpy(np.frombuffer(said, "<f4").reshape(ids.shape[1], -1).copy())
        assert 30 < ids.shape[1] <= 64 and far(by_run, theirs(ids).logits[0]) < 1e-4
        export.export_model(state, args, found, tmp_path / "hf", "hf")
        assert far(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()(x).logits,
                   expected) < 1e-4
    before, after = (json.loads((tmp_path / name / "config.json").read_text())
                     for name in ("theirs", "hf"))
    kinds = [config.get("rope_parameters", config.get("rope_scaling")) or {}
             for config in (before, after)]
    assert kinds[0].get("rope_type", "default") == kinds[1].get("rope_type", "default")
    again = load.read_model(tmp_path / "hf")
    assert again[1] == args and all(torch.equal(again[0][name], w) for name, w in state.items())


@pytest.mark.parametrize("factor", [1.0, 1.5, 40.0])
def test_yarn_scales_attention_by_the_factor_of_transformers(factor):
    config = LlamaConfig(**TINY | dict(rope_parameters=YARN | {"factor": factor}))
    theirs = AutoModelForCausalLM.from_config(config).model.rotary_emb.attention_scaling
    assert rope.yarn_attention(factor) == pytest.approx(theirs)


def test_bfloat16_shards_are_read_tensor_by_tensor(tmp_path, vocabulary):
    """The model is over 40 times its largest tensor; the peak memory stays below 10 tensors."""
    wide = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=9)
    theirs = make(tmp_path / "theirs", LlamaConfig, wide, vocabulary, torch.bfloat16,
                  max_shard_size="5MB")
    x, peaks = torch.randint(V, (1, 20)), []
    for _ in range(2):  # the first pass also loads what is loaded only once
        tracemalloc.start()
        state, args, found, _ = load.read_model(tmp_path / "theirs")
        export.export_model(state, args, found, tmp_path / "m.gguf", dtype="bf16")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    whole, tensor = sum(p.numel() for p in theirs.parameters()), 4 * 256 * 512
    assert 4 * whole > 40 * tensor and peaks[1] < 10 * tensor
    assert all(torch.equal(w, load.read_model(tmp_path / "m.gguf")[0][name].bfloat16())
               for name, w in state.items())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval()
    with torch.no_grad():
        assert far(imported(tmp_path / "m.gguf")(x, every=True)[0], again(x).logits) < 1e-4


def doubled(folder, into, index=None):
    """Save twice the weights of `folder` to its file `into`, and optionally an index of it."""
    w = load_file(folder / "model.safetensors")
    save_file({name: 2 * x for name, x in w.items()}, folder / into, metadata={"format": "pt"})
    if index:
        (folder / index).write_text(json.dumps({"metadata": {},
                                                "weight_map": dict.fromkeys(w, into)}))


def change_json(path, **values):
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


def test_of_several_files_of_weights_those_that_transformers_loads(tmp_path, vocabulary, capsys):
    """
    Where several files may hold the weights, read the file that transformers reads.

    Beside model.safetensors are a stale index, its shard, a pytorch_model.bin, and a file that
    config.json names.
    """
    def both():
        theirs = AutoModelForCausalLM.from_pretrained(folder).model.embed_tokens.weight
        return load.read_model(folder)[0]["tok_embeddings.weight"], theirs

    folder, shard, index = (tmp_path / "m", "model-00001-of-00001.safetensors",
                            "model.safetensors.index.json")
    make(folder, LlamaConfig, {}, vocabulary)
    before = both()[0]
    doubled(folder, shard, index)
    torch.save({}, folder / "pytorch_model.bin")
    ours, theirs = both()
    assert torch.equal(ours, theirs) and torch.equal(ours, before)
    assert "not part of the model" in refused(capsys, load.read_model, folder / shard)
    assert torch.equal(load.read_model(folder / "model.safetensors")[0]["tok_embeddings.weight"],
                       before)
    change_json(folder / "config.json", transformers_weights=shard)
    ours, theirs = both()
    assert torch.equal(ours, theirs) and torch.equal(ours, 2 * before)
    change_json(folder / "config.json", transformers_weights="../x.safetensors")
    assert "transformers_weights=" in refused(capsys, load.read_model, folder)
    change_json(folder / "config.json", transformers_weights=None)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    ours, theirs = both()
    assert torch.equal(ours, theirs) and torch.equal(ours, 2 * before)
    assert torch.equal(load.read_model(folder / shard)[0]["tok_embeddings.weight"], 2 * before)
    assert "weights are in model-00001-of" in refused(capsys, load.read_model,
                                                      folder / "other.safetensors")
    where = json.loads((folder / index).read_text())["weight_map"]
    change_json(folder / index, weight_map=where | {"model.norm.weight": "other.safetensors"})
    assert "is in model-00001-of-00001.safetensors and in other.safetensors" in refused(
        capsys, load.read_model, folder)
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter_config.json: base_model_name_or_path is None" in refused(
        capsys, load.read_model, folder)


@pytest.mark.parametrize("same", [True, False])
def test_a_classifier_that_config_json_calls_tied(same, tmp_path, vocabulary, capsys):
    """
    config.json ties the embeddings, but the file also stores a classifier.

    If it differs from the embedding, transformers 5 uses it, transformers 4 ignored it, and
    importing refuses it.
    """
    folder = tmp_path / "m"
    make(folder, LlamaConfig, dict(tie_word_embeddings=True), vocabulary)
    w = load_file(folder / "model.safetensors")
    save_file(w | {"lm_head.weight": w["model.embed_tokens.weight"] * (1 if same else 2)},
              folder / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight) == same
    if same:
        assert torch.equal(load.read_model(folder)[0]["output.weight"], theirs.lm_head.weight)
    else:
        assert "lm_head.weight differs from model.embed_tokens.weight" in refused(
            capsys, load.read_model, folder)
        change_json(folder / "config.json", tie_word_embeddings=False)
        assert torch.equal(load.read_model(folder)[0]["output.weight"], theirs.lm_head.weight)


def test_of_two_vocabularies_the_one_that_transformers_loads(tmp_path, vocabulary, capsys):
    """tokenizer.json overrides tokenizer.model; if both are SentencePiece, they must agree."""
    model = Transformer(
        ModelArgs(dim=32, n_layers=1, n_heads=2, vocab_size=vocabulary.vocab_size, max_seq_len=64))
    folder, text = tmp_path / "hf", "once upon a girl"
    export.export_model(model.state_dict(), model.args, vocabulary, folder, "hf")
    whole, other = ((folder / "tokenizer.json").read_text(),
                    train_tokenizer([TEXT[::-1]] * 99, V, tmp_path / "other.model", exact=False))
    assert load.read_model(folder)[2].data == vocabulary.data
    stored = json.loads(whole)
    change_json(folder / "tokenizer.json", post_processor=None)
    assert (AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
            == load.read_model(folder)[2].encode_prompt(text) == vocabulary.encode(text))
    change_json(folder / "tokenizer.json", normalizer=None)
    assert "tokenizer.model and tokenizer.json differ: 'a' is" in refused(
        capsys, load.read_model, folder)
    (folder / "tokenizer.json").write_text(whole)
    other.save(folder / "tokenizer.model")
    assert "tokenizer.model and tokenizer.json differ: token" in refused(
        capsys, load.read_model, folder)
    vocabulary.save(folder / "tokenizer.model")
    change_json(folder / "tokenizer.json",
                model=stored["model"] | {"merges": stored["model"]["merges"][::-1]})
    assert ("tokenizer.model and tokenizer.json differ: the latter merges pieces in another order"
            in refused(capsys, load.read_model, folder))
    made = train_byte_level([TEXT] * 99, V, tmp_path / "bpe.json", exact=False)
    model = Transformer(
        ModelArgs(dim=32, n_layers=1, n_heads=2, vocab_size=made.vocab_size, max_seq_len=64))
    export.export_model(model.state_dict(), model.args, made, tmp_path / "bpe", "hf")
    vocabulary.save(tmp_path / "bpe/tokenizer.model")
    assert (AutoTokenizer.from_pretrained(tmp_path / "bpe")(text)["input_ids"]
            == load.read_model(tmp_path / "bpe")[2].encode_prompt(text))


def test_of_two_names_of_eos_and_two_templates_those_that_transformers_takes(tmp_path, vocabulary):
    n = vocabulary.vocab_size
    make(tmp_path / "m", LlamaConfig, dict(vocab_size=n + 2), vocabulary)
    (tmp_path / "m/added_tokens.json").write_text(json.dumps({"<|im_end|>": n, "<|end|>": n + 1}))
    (tmp_path / "m/special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    (tmp_path / "m/chat_template.jinja").write_text("a file")
    oracle = tokenizer_config(tmp_path / "m", eos_token="<|end|>", chat_template="a key")
    _, _, found, extra = load.read_model(tmp_path / "m")
    assert found.eos_id == oracle.eos_token_id == n
    assert oracle.chat_template == extra["tokenizer.chat_template"] == "a file"
    change_json(tmp_path / "m/config.json", eos_token_id=7)
    change_json(tmp_path / "m/generation_config.json", eos_token_id=[n, 9, n + 1])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m").generation_config
    assert theirs.eos_token_id == [found.eos_id, 9, n + 1]
    ids = {f"tokenizer.ggml.{key}_token_id": i for key, i in (("eot", 9), ("eom", n + 1))}
    assert ids.items() <= load.read_model(tmp_path / "m")[3].items()
    (tmp_path / "m/generation_config.json").unlink()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m").generation_config.eos_token_id == 7
    assert load.read_model(tmp_path / "m")[3]["tokenizer.ggml.eot_token_id"] == 7
    (tmp_path / "m/chat_template.jinja").unlink()
    oracle = tokenizer_config(tmp_path / "m",
                              chat_template=[{"name": "tool_use", "template": "b"},
                                             {"name": "default", "template": "c"}])
    assert (oracle.get_chat_template()
            == load.read_model(tmp_path / "m")[3]["tokenizer.chat_template"] == "c")


FLAGS = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
def test_added_tokens_that_reach_beyond_themselves_are_refused(flag, file, kind, tmp_path,
                                                               vocabulary, capsys):
    """
    Neither run nor GGUF supports flags that make a token match its neighbours.

    Special tokens may have any flag, as they never come from text.
    """
    made = (train_byte_level([TEXT] * 99, V, tmp_path / "bpe.json", exact=False)
            if kind == "bpe" else vocabulary)
    n = made.vocab_size
    model = Transformer(ModelArgs(dim=32, n_layers=1, n_heads=2, vocab_size=n, max_seq_len=64))
    export.export_model(model.state_dict(), model.args, made, tmp_path / "hf", "hf")

    def read(token, rows=n + 1):
        stored = json.loads((tmp_path / "hf/tokenizer.json").read_text())
        config = json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
        config |= {"tokenizer_class": "LlamaTokenizer"} if kind == "sentencepiece" else {}
        if file == "tokenizer.json":
            stored["added_tokens"] = ([t for t in stored["added_tokens"] if t["id"] < n]
                                      + [{"id": n} | token])
        else:
            config["added_tokens_decoder"] = {
                str(t["id"]): {k: v for k, v in t.items() if k != "id"}
                for t in stored["added_tokens"]
            } | {str(n): token}
        (tmp_path / "hf/tokenizer.json").write_text(json.dumps(stored))
        (tmp_path / "hf/tokenizer_config.json").write_text(json.dumps(config))
        return hf_tokenizer.read_hf_tokenizer(tmp_path / "hf", rows)

    token = FLAGS | {"content": "<tool>"}
    found, oracle = read(token), AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = found.encode("once <tool> upon<tool>")
    assert n in ids
    assert ids == oracle("once <tool> upon<tool>", add_special_tokens=False)["input_ids"]
    said = refused(capsys, read, token | {flag: True})
    assert f"the added token '<tool>' has {flag}: it " in said
    assert f"set {flag} to false there" in said
    found = read(token | {flag: True, "special": True})
    assert found.pieces()[n][2] == 3 and n not in found.encode("once <tool> upon")
    if kind == "sentencepiece":
        read(token)
        # PreTrainedTokenizerFast follows tokenizer.json, which adds a space after each added token.
        change_json(tmp_path / "hf/tokenizer_config.json",
                    tokenizer_class="PreTrainedTokenizerFast")
        oracle = AutoTokenizer.from_pretrained(tmp_path / "hf")
        assert oracle("a<tool>c", add_special_tokens=False)["input_ids"] != found.encode("a<tool>c")
        assert "differ: 'a <tool> b<tool>c' is" in refused(capsys, hf_tokenizer.read_hf_tokenizer,
                                                           tmp_path / "hf", n + 1)


def test_added_tokens_that_overlap_and_are_looked_for_one_after_the_other(tmp_path, capsys):
    """
    Added tokens are refused if run would split a text unlike transformers.

    transformers first matches the tokens that are not normalized, anywhere in the text; run takes
    the leftmost match.
    """
    made = train_byte_level([TEXT] * 99, V, tmp_path / "bpe.json", exact=False)
    n, folder = made.vocab_size, tmp_path / "hf"
    model = Transformer(ModelArgs(dim=32, n_layers=1, n_heads=2, vocab_size=n, max_seq_len=64))
    export.export_model(model.state_dict(), model.args, made, folder, "hf")
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    for late, early, overlap in (("<a", "a>", True), ("<ab>", "ab", True), ("ab", "<ab>", False),
                                 ("a>", "<a", False), ("<x>", "<y>", False)):
        new = [FLAGS | {"id": n, "content": late, "normalized": True},
               FLAGS | {"id": n + 1, "content": early}]
        change_json(folder / "tokenizer.json", added_tokens=[*added, *new])
        if overlap:
            assert "overlap" in refused(capsys, hf_tokenizer.read_hf_tokenizer, folder)
            continue
        oracle, found = (AutoTokenizer.from_pretrained(folder),
                         hf_tokenizer.read_hf_tokenizer(folder))
        texts = [f"once {late}{early} {early}{late}", "<<aab>>aab>x>a<y><x>"]
        assert ([found.encode(text) for text in texts]
                == [oracle(text, add_special_tokens=False)["input_ids"] for text in texts])


def test_tokens_that_a_folder_adds(tmp_path, vocabulary):
    """Rows beyond the sentencepiece model are added tokens, or unused."""
    n = vocabulary.vocab_size
    make(tmp_path / "m", LlamaConfig, dict(vocab_size=n + 4), vocabulary)
    added = {
        str(n): {"content": "<|im_start|>", "special": True},
        str(n + 1): {"content": "<think>", "special": False}
    }
    (tmp_path / "m/tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": added, "chat_template": "{{x}}"}))
    _, _, found, extra = load.read_model(tmp_path / "m")
    assert found.pieces()[n:] == [(b"<|im_start|>", 0.0, 3), (b"<think>", 0.0, 4),
                                  (b"[PAD%d]" % (n + 2), 0.0, 5), (b"[PAD%d]" % (n + 3), 0.0, 5)]
    assert extra == {"tokenizer.chat_template": "{{x}}"}
    assert found.encode("once upon") == vocabulary.encode("once upon")
    assert n + 1 in found.encode("once<think>")
    (tmp_path / "my.txt").write_text(TEXT * 99)
    folder = prepare.prepare(tmp_path / "my.txt", str(tmp_path / "m"), cache=tmp_path / "cache",
                             workers=1)
    assert prepare.load(folder).tokenizer.pieces() == found.pieces()[:n + 2]


def tokenizer_config(folder, **values):
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer"} | values))
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("adds", [True, False])
def test_whether_a_prompt_begins_with_bos(adds, tmp_path, vocabulary):
    """tokenizer_config.json decides; GGUF, Hugging Face exports and prepared data keep it."""
    make(tmp_path / "m", LlamaConfig, {}, vocabulary)
    oracle = tokenizer_config(tmp_path / "m", add_bos_token=adds)
    state, args, found, _ = load.read_model(tmp_path / "m")
    expected = oracle("once upon")["input_ids"]
    assert found.encode_prompt("once upon") == expected
    assert found.add_bos == adds == (expected[0] == 1)
    assert (found.data == vocabulary.data) == found.add_bos
    assert (spm.SentencePieceProcessor(model_proto=found.data).encode(TEXT)
            == vocabulary.encode(TEXT))
    export.export_model(state, args, found, tmp_path / "m.gguf")
    assert (gguf.GGUFReader(tmp_path / "m.gguf").get_field("tokenizer.ggml.add_bos_token")
            .contents() == found.add_bos)
    for name, format in ("again.gguf", "gguf"), ("hf", "hf"):
        export.export_model(*load.read_model(tmp_path / "m.gguf")[:3], tmp_path / name, format)
        assert load.read_model(tmp_path / name)[2].encode_prompt("once upon") == expected
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("once upon")["input_ids"] == expected
    # llama.cpp's converter reads the folder with this class.
    assert gguf.SpecialVocab(tmp_path / "hf").add_special_token.get("bos", True) == adds
    (tmp_path / "my.txt").write_text(TEXT * 99)
    file = keep_vocabulary(found, tmp_path / "cache")
    for source in file, tmp_path / "m":
        made = prepare.load(prepare.prepare(tmp_path / "my.txt", str(source),
                                            cache=tmp_path / "cache", workers=1)).tokenizer
        assert made.encode_prompt("once upon") == expected and made.sha256() == found.sha256()


def test_tokens_that_an_old_folder_adds(tmp_path, vocabulary):
    """
    added_tokens.json lists the tokens where tokenizer_config.json does not.

    Only the tokens that tokenizer_config.json names, such as eos_token, are special.
    """
    n = vocabulary.vocab_size
    make(tmp_path / "m", LlamaConfig, dict(vocab_size=n + 4), vocabulary)
    (tmp_path / "m/added_tokens.json").write_text(
        json.dumps({"<|im_end|>": n, "<think>": n + 1, "<|im_start|>": n + 2}))
    oracle = tokenizer_config(tmp_path / "m", eos_token="<|im_end|>",
                              additional_special_tokens=["<|im_start|>"])
    found = load.read_model(tmp_path / "m")[2]
    assert [(piece.decode(), kind) for piece, _, kind in found.pieces()[n:]] == [
        ("<|im_end|>", 3), ("<think>", 4), ("<|im_start|>", 3), (f"[PAD{n + 3}]", 5)]
    names = oracle.convert_ids_to_tokens([n, n + 1, n + 2])
    assert names == [piece.decode() for piece, *_ in found.pieces()[n:n + 3]]
    assert found.eos_id == oracle.eos_token_id == n
    assert {*names} & {*oracle.all_special_tokens} == {"<|im_end|>", "<|im_start|>"}
    assert n + 1 in found.encode("once<think>") and n + 1 in oracle("once<think>")["input_ids"]
    for odd in {"<x>": "1"}, {"<x>": None}, {"<x>": [n]}, {"<x>": -1}, {"<x>": 1.5}:
        (tmp_path / "m/added_tokens.json").write_text(json.dumps(odd))
        assert {kind for *_, kind in load.read_model(tmp_path / "m")[2].pieces()[n:]} == {5}


def test_tokens_that_a_tokenizer_json_adds_where_nothing_else_lists_them(tmp_path):
    end = {"id": 7, "content": "<|end|>", "special": True}
    change_json(tmp_path / "tokenizer.json",
                added_tokens=[end, "odd", {"id": 8}, {"id": 9, "content": 9}])
    assert hf_tokenizer.added_tokens(tmp_path) == {"7": end}
    change_json(tmp_path / "tokenizer.json", added_tokens=7)
    assert hf_tokenizer.added_tokens(tmp_path) == {}


@pytest.mark.parametrize("named", [
    {}, {"eos_token": "<|im_end|>"},
    {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}, "bos_token": "<|im_start|>"},
    {"bos_token": "</s>"}])
def test_bos_and_eos_of_a_folder(named, tmp_path, vocabulary):
    """tokenizer_config.json overrides config.json; BOS and EOS may be added tokens."""
    n = vocabulary.vocab_size
    # Its config.json has the ids 1 and 2.
    make(tmp_path / "m", LlamaConfig, dict(vocab_size=n + 2), vocabulary)
    added = {
        str(n): {"content": "<|im_start|>", "special": True},
        str(n + 1): {"content": "<|im_end|>", "special": False}
    }
    oracle = tokenizer_config(tmp_path / "m", add_bos_token=True, added_tokens_decoder=added,
                              **named)
    state, args, found, _ = load.read_model(tmp_path / "m")
    ids = oracle.bos_token_id, oracle.eos_token_id
    assert (found.bos_id, found.eos_id) == ids
    assert ids[0] == {"</s>": 2, "<|im_start|>": n}.get(named.get("bos_token"), 1)
    assert {found.pieces()[i][2] for i in ids} == {3}
    assert found.decode([*ids, *found.encode("once upon")]) == "once upon"
    assert found.encode_prompt("once upon") == oracle("once upon")["input_ids"]
    # Special tokens never come from text.
    assert found.encode("once <|im_start|>") == vocabulary.encode("once <|im_start|>")
    for name, format in ("m.gguf", "gguf"), ("hf", "hf"):
        export.export_model(state, args, found, tmp_path / name, format)
        again = load.read_model(tmp_path / name)[2]
        assert (again.bos_id, again.eos_id) == ids and again.pieces() == found.pieces()
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == ids


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_the_space_before_a_text_is_what_a_folder_says(before, prefix, tmp_path, vocabulary):
    model = sentencepiece_model_pb2.ModelProto.FromString(vocabulary.data)
    model.normalizer_spec.add_dummy_prefix = before
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    oracle = tokenizer_config(tmp_path, add_prefix_space=prefix, bos_token="<s>", eos_token="</s>")
    found = hf_tokenizer.read_hf_tokenizer(tmp_path, vocabulary.vocab_size)
    assert found.add_dummy_prefix == prefix
    # With add_prefix_space, transformers adds no second space before " once".
    for text in ["once upon", "the\nonce", " once"][:2 if prefix else 3]:
        ids = oracle(text, add_special_tokens=False)["input_ids"]
        assert found.encode(text) == ids and found.decode(ids) == oracle.decode(ids) == text


@pytest.mark.parametrize("name",
                         ["<unk>", "<0x41>", "no such token", 3, None, {"content": []}, "\ud800"])
def test_names_that_cannot_be_eos_are_passed_over(name, tmp_path, vocabulary):
    vocabulary.save(tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": name, "bos_token": name, "add_prefix_space": name}))
    assert hf_tokenizer.read_hf_tokenizer(tmp_path, vocabulary.vocab_size).data == vocabulary.data


@pytest.mark.parametrize("changed, said", [
    ({"architectures": ["GemmaForCausalLM"]},
     "['GemmaForCausalLM'], expected one of LlamaForCausalLM"),
    ({"architectures": None}, "architectures is None"),
    ({"hidden_act": "gelu"}, "hidden_act=gelu is not supported"),
    ({"mlp_bias": True}, "mlp_bias=True"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config="),
    ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map="),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 32},
     "sliding_window=32 is not supported"),
    ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192},
     "sliding_window=4096"),
    ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 8,
      "max_window_layers": 1}, "sliding_window=8"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    ({"rope_scaling": {"type": "linear"}}, "factor is None"),
    ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor is -1"),
    ({"rope_scaling": 3}, "rope_scaling is 3"),
    ({"rope_scaling": YARN | {"mscale": 0.7}}, "mscale is not supported"),
    ({"rope_scaling": YARN | {"beta_fast": 1e-300}}, "beta_fast is 1e-300"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor is 4.0"),
    ({"rope_scaling": LONG | {"long_factor": [1.0] * 8}}, "another long_factor"),
    ({"rope_scaling": LONG | {"short_factor": [2.0], "long_factor": [2.0]}},
     "rope_factors has length 1, expected 8"),
    ({"rope_scaling": YARN | {"rope_theta": 0.5}}, "rope_theta is 0.5"),
    ({"rope_scaling": YARN | {"factor": 1e300}}, "rope_factors"),
    ({"head_dim": 15}, "head_width is 15"),
    ({"hidden_size": 10 ** 400}, "embed_tokens.weight has shape"),
    ({"hidden_size": "64"}, "hidden_size is '64'"),
    ({"num_hidden_layers": 3}, "is missing"),
    ({"num_hidden_layers": 1}, "is not part"),
    ({"head_dim": 1 << 40}, "expected at most 8192"),
    ({"vocab_size": 331}, "has shape"),
    ({"intermediate_size": 95}, "has shape"),
    ({"max_position_embeddings": 1 << 40}, "a context of"),
    ({"num_key_value_heads": 3}, "not a multiple"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
])
def test_what_is_not_supported_is_refused_by_name(changed, said, tmp_path, vocabulary, capsys):
    folder = tmp_path / "m"
    make(folder, LlamaConfig, {}, vocabulary)
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(config | changed))
    assert said in refused(capsys, load.read_model, folder)


def test_layer_types_tell_which_layers_have_a_window(tmp_path, vocabulary, capsys):
    make(tmp_path / "m", Qwen2Config, {}, vocabulary)
    change_json(tmp_path / "m/config.json", sliding_window=8, use_sliding_window=True,
                max_window_layers=0)
    for second, slides in ("full_attention", False), ("sliding_attention", True):
        change_json(tmp_path / "m/config.json", layer_types=["full_attention", second])
        assert ("sliding_attention"
                in Qwen2Config.from_pretrained(tmp_path / "m").layer_types) == slides
        if slides:
            assert "sliding_window=8 is not supported" in refused(capsys, load.read_model,
                                                                  tmp_path / "m")
        else:
            assert load.read_model(tmp_path / "m")[1].n_layers == 2


@pytest.mark.parametrize("window, slides", [({"sliding_window": None}, False), ({}, True),
                                            ({"sliding_window": 4096}, True)])
def test_mistral_has_a_window_unless_it_says_none(window, slides, tmp_path, vocabulary, capsys):
    """
    A null sliding_window means none; without the key, transformers takes 4096.

    Mistral 7B v0.2 and v0.3 have a null and a context longer than that.
    """
    theirs = make(tmp_path / "m", MistralConfig,
                  dict(max_position_embeddings=8192, sliding_window=None), vocabulary)
    config = json.loads((tmp_path / "m/config.json").read_text())
    config.pop("sliding_window", None)
    (tmp_path / "m/config.json").write_text(json.dumps(config | window))
    assert (MistralConfig.from_pretrained(tmp_path / "m").sliding_window is not None) == slides
    if slides:
        assert "sliding_window=4096 is not supported" in refused(capsys, load.read_model,
                                                                 tmp_path / "m")
    else:
        x = torch.arange(40)[None]
        with torch.no_grad():
            assert load.read_model(tmp_path / "m")[1].max_seq_len == 8192
            assert far(imported(tmp_path / "m")(x, every=True)[0], theirs(x).logits) < 1e-4


@pytest.mark.parametrize("rule", [LLAMA3, YARN, LONG])
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_the_context_before_the_stretching_may_stand_outside(rule, key, tmp_path, vocabulary):
    """transformers prefers the config's own original_max_position_embeddings to the RoPE rule's."""
    make(tmp_path / "m", LlamaConfig, dict(rope_parameters=rule), vocabulary)
    config = json.loads((tmp_path / "m/config.json").read_text())
    del config["rope_parameters"]
    x, factors = torch.randint(V, (1, 64), generator=torch.Generator().manual_seed(1)), []
    for inside, outside in ((64, 16), (None, 16), (16, None)):
        rule = rule | {"original_max_position_embeddings": inside}
        changed = config | {"original_max_position_embeddings": outside,
                            key: {k: v for k, v in rule.items() if v is not None}}
        (tmp_path / "m/config.json").write_text(
            json.dumps({k: v for k, v in changed.items() if v is not None}))
        with torch.no_grad():
            expected, ours = (AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()(x).logits,
                              imported(tmp_path / "m"))
            assert far(ours(x, every=True)[0], expected) < 1e-4, (inside, outside)
        factors.append(ours.args.rope_factors)
    assert factors[0] == factors[1] == factors[2] != ()


ODD = [None, [], {}, "x", -1, 0, 1.5, True, [[]], "\ud800", 10 ** 30, 1e300, {"a": {}}, [None]]


def test_odd_values_are_read_or_refused_in_one_line(tmp_path, vocabulary, capsys):
    """Replace each value in a folder's JSON files by odd ones, one at a time."""
    folder, outcomes = tmp_path / "m", []
    make(folder, Qwen2Config,
         dict(num_hidden_layers=1, rope_parameters=YARN, vocab_size=vocabulary.vocab_size + 1),
         vocabulary)
    added = {str(vocabulary.vocab_size): {"content": "<x>", "special": True}}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": added, "chat_template": "{{x}}"}))
    capsys.readouterr()  # discard transformers' progress bars
    for path in folder / "config.json", folder / "tokenizer_config.json":
        whole = json.loads(path.read_text())
        places = ([(whole, key) for key in whole]
                  + [(value, key) for value in whole.values() if isinstance(value, dict)
                     for key in value])
        places += [(added[key], inner) for added in [whole.get("added_tokens_decoder", {})]
                   for key in added for inner in added[key]]
        for values, key in places:
            before = values[key]
            for odd in ODD:
                values[key] = odd
                path.write_text(json.dumps(whole))
                try:
                    state, _, found, extra = load.read_model(folder)
                    ([state[name] for name in state], found.pieces(),
                     export.gguf_value(extra.get("tokenizer.chat_template", "")))
                    outcomes.append("read")
                except SystemExit as e:
                    said = capsys.readouterr().err
                    assert e.code == 2 and said.count("\n") == 1, said
                    outcomes.append("refused")
            values[key] = before
        path.write_text(json.dumps(whole))
    assert min(outcomes.count("read"), outcomes.count("refused")) > 50


def with_header(path, change):
    """Rewrite a safetensors file's JSON header: `change` edits it in place or returns another."""
    data = path.read_bytes()
    size, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    text = change(header) or header
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size:])


def entry(**values):
    return lambda header: header["model.norm.weight"].update(values)


@pytest.mark.parametrize("change, said", [
    (entry(dtype="I32"), "is I32, expected F32"), (entry(shape=[32, 2]), "has shape (32, 2)"),
    *((entry(**wrong), "model.safetensors: cannot be read (SafetensorError")
      for wrong in (dict(dtype="F8_E4M3"), dict(shape=[65]), dict(shape=[-64]), dict(shape="64"),
                    dict(data_offsets=[0, 1 << 60]), dict(data_offsets=[256, 0]),
                    dict(data_offsets=[0, 128]), dict(data_offsets=[-256, 0]),
                    dict(data_offsets=[0]))),
    (lambda header: header.update(more=header.pop("model.norm.weight")),
     "model.norm.weight (64,) is missing"),
    (lambda header: header.update(more={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
     "'more' is not part"),
    *((change, "expected a safetensors file")
      for change in (lambda header: header.pop("model.norm.weight") and None,
                     lambda header: header.update(more=header["model.norm.weight"]),
                     lambda header: b"[1]", lambda header: b"\xff",
                     lambda header: header.update(a=3), lambda header: b"[" * 50_000))])
def test_damaged_safetensors(change, said, tmp_path, vocabulary, capsys):
    make(tmp_path / "m", LlamaConfig, dict(num_hidden_layers=1), vocabulary)
    with_header(tmp_path / "m/model.safetensors", change)
    assert said in refused(capsys, load.read_model, tmp_path / "m")


def test_without_safetensors_a_line_names_the_package(tmp_path, vocabulary, capsys, monkeypatch):
    make(tmp_path / "m", LlamaConfig, {}, vocabulary)
    (tmp_path / "run").mkdir()
    save_file({"model.w": torch.ones(2)}, tmp_path / "run/shard-00001.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)  # as if it were not installed
    for read, folder in ((load.read_model, "m"),
                         (lambda path: checkpoint.Shards(path, "model"), "run")):
        assert "pip install safetensors" in refused(capsys, read, tmp_path / folder)


def test_damaged_folders(tmp_path, vocabulary, capsys):
    folder, index = tmp_path / "m", tmp_path / "m/model.safetensors.index.json"
    make(folder, LlamaConfig, {}, vocabulary, max_shard_size="100KB")
    data = json.loads(index.read_text())
    first = sorted(folder.glob("*.safetensors"))[0]
    for weight_map, said in ((3, "expected an index"),
                             ({"a": "../x.safetensors"}, "names a file outside this folder"),
                             (data["weight_map"] | {"a": "none.safetensors"}, "No such file")):
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert said in refused(capsys, load.read_model, folder)
    index.write_text("{")
    assert "expected an index of .safetensors files" in refused(capsys, load.read_model, folder)
    index.write_text(json.dumps(data))
    for size in (0, 3, 8, 20, first.stat().st_size - 1):
        whole = first.read_bytes()
        first.write_bytes(whole[:size])
        refused(capsys, load.read_model, folder)
        first.write_bytes(whole)
    bad = bytearray(first.read_bytes())
    bad[-4:] = struct.pack("<f", float("nan"))
    first.write_bytes(bad)
    state = load.read_model(folder)[0]
    assert "not finite" in refused(capsys, lambda: [state[name] for name in state])
    for name in folder.glob("*.safetensors*"):
        name.unlink()
    (folder / "pytorch_model.bin").touch()
    assert "which could run code" in refused(capsys, load.read_model, folder)
    (folder / "pytorch_model.bin").unlink()
    assert "expected model.safetensors or model.safetensors.index.json, found none" in refused(
        capsys, load.read_model, folder)
    (folder / "config.json").unlink()
    assert "no config.json" in refused(capsys, load.read_model, folder)


# ---- Meta


@pytest.mark.parametrize("n, params", [
    (1, {}), (2, {}), (2, {"use_scaled_rope": True, "rope_theta": 5e5, "tables": 0}),
    (2, {"tied": True})])
def test_a_folder_of_metas(n, params, tmp_path, vocabulary, capsys):
    """
    Read weights that are sliced as Meta's programs slice them.

    wq, wk, wv, w1, w3 and output are split by rows; wo, w2 and, before Llama 3, the embedding by
    columns.
    """
    torch.manual_seed(2)
    size, embedding, tied = (vocabulary.vocab_size - vocabulary.vocab_size % 2,
                             params.pop("tables", 1), params.pop("tied", False))
    args = ModelArgs(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=size, hidden_dim=96,
                     tied=tied, max_seq_len=4096)
    weights = {name: w for name, w in Transformer(args).state_dict().items()
               if not (tied and name == "output.weight")}
    columns = {"tok_embeddings": embedding, "wo": 1, "w2": 1}
    for i in range(n):
        shard = {
            name: (w if w.dim() == 1 else
                   w.chunk(n, columns.get(name.split(".")[-2], 0))[i].clone().bfloat16())
            for name, w in weights.items()
        }
        torch.save(shard | {"rope.freqs": torch.ones(8)}, tmp_path / f"consolidated.{i:02d}.pth")
    (tmp_path / "params.json").write_text(json.dumps(
        dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=32, norm_eps=1e-5,
             vocab_size=-1) | params))
    state, found, nobody, _ = load.read_model(tmp_path / "consolidated.00.pth")
    assert nobody is None
    assert found.hidden_dim == 96
    assert found.n_kv_heads == 2
    assert found.vocab_size == size
    assert found.tied == tied
    assert all(torch.equal(state[name].float(), w.bfloat16().float() if w.dim() > 1 else w)
               for name, w in weights.items())
    if params:
        assert found.max_seq_len == 131072
        assert rope.rule(found) == {
            "rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0
        }
    else:
        assert found == args
    (tmp_path / "params.json").write_text(
        json.dumps(dict(dim=64, n_layers=3, n_heads=4, norm_eps=1e-5)))
    refused(capsys, load.read_model, tmp_path)
    (tmp_path / "consolidated.00.pth").write_bytes(b"cos\nsystem\n(S'echo'\ntR.")
    assert "cannot be read" in refused(capsys, load.read_model, tmp_path)


# ---- GGUF

def test_types_that_we_do_not_write(tmp_path, vocabulary):
    """Read TQ2_0 with the gguf package, in a Qwen3 file, which stores each head in halves."""
    make(tmp_path / "m", Qwen3Config, dict(head_dim=64, hidden_size=256, intermediate_size=256),
         vocabulary)
    state, args, found, _ = load.read_model(tmp_path / "m")
    export.export_model(state, args, found, tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    w = gguf.GGUFWriter(tmp_path / "q.gguf", "qwen3")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture", "llamac.")):
            w.add_key_value(key, field.contents(), field.types[0],
                            field.types[-1] if len(field.types) > 1 else None)
    expected = {}
    for t in reader.tensors:
        data = np.asarray(t.data).reshape(t.shape[::-1])
        if data.ndim == 2:
            stored = gguf.quants.quantize(data, gguf.GGMLQuantizationType.TQ2_0)
            w.add_tensor(t.name, stored, raw_dtype=gguf.GGMLQuantizationType.TQ2_0)
            expected[t.name] = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.TQ2_0)
        else:
            w.add_tensor(t.name, data)
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    again, args2, _ = gguf_file.read_gguf(tmp_path / "q.gguf")
    assert args2 == args
    assert np.array_equal(interleaved_to_halves(again["layers.0.attention.wq.weight"], 4).numpy(),
                          expected["blk.0.attn_q.weight"])
    assert np.array_equal(again["layers.1.feed_forward.w2.weight"].numpy(),
                          expected["blk.1.ffn_down.weight"])


def test_a_type_of_weights_that_nothing_decodes(tmp_path, capsys, monkeypatch):
    """
    Refuse type 26, which is int32, and type 99, which is unknown.

    Without the gguf package the message asks for it, as the package may decode the type.
    """
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    r = gguf_file.Reader(tmp_path / "m.gguf")
    for number in 26, 99:
        said = refused(capsys, gguf_file.find_type, r, "token_embd.weight", number)
        assert f"token_embd.weight has type {number}, expected one of f32, f16" in said
        assert "pip" not in said
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    assert "pip install gguf" in refused(capsys, gguf_file.find_type, r, "token_embd.weight", 35)


@pytest.mark.parametrize("dim, n_heads", [(98, 3), (97, 3), (96, 3), (128, 3)])
def test_a_stored_head_width_beside_any_dim(dim, n_heads, tmp_path):
    """The width may equal dim // n_heads even if n_heads does not divide dim."""
    args = ModelArgs(dim=dim, n_layers=1, n_heads=n_heads, head_width=32 * (dim != 96),
                     vocab_size=259, hidden_dim=64, max_seq_len=32)
    export.export_model(Transformer(args).state_dict(), args, Bytes(), tmp_path / "m.gguf")
    assert load.read_model(tmp_path / "m.gguf")[1] == args


def test_what_ends_an_answer_is_kept(tmp_path, vocabulary):
    """
    Exports to GGUF and to Hugging Face keep the chat template and its eot, eom and padding ids.

    The ids are dropped if they are invalid or if the vocabulary is replaced.
    """
    model = Transformer(
        ModelArgs(dim=32, n_layers=1, n_heads=2, vocab_size=vocabulary.vocab_size, max_seq_len=64))
    ids = {f"tokenizer.ggml.{key}_token_id": i
           for key, i in (("eot", 7), ("eom", 8), ("padding", 9))}
    template = "{% for m in messages %}<|{{ m.role }}|>é{{ m.content }}{% endfor %}"
    export.export_model(model.state_dict(), model.args, vocabulary, tmp_path / "m.gguf",
                        extra={"tokenizer.chat_template": template} | ids)
    state, args, found, extra = load.read_model(tmp_path / "m.gguf")
    export.export_model(state, args, found, tmp_path / "again.gguf", extra=extra)
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    export.export_model(state, args, found, tmp_path / "hf", "hf", extra=extra)
    oracle = AutoTokenizer.from_pretrained(tmp_path / "hf")
    said = oracle.apply_chat_template([{"role": "user", "content": "once"}], tokenize=False)
    assert oracle.chat_template == template and said == "<|user|>éonce"
    generation = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").generation_config
    assert generation.eos_token_id == [2, 1, 7, 8] and generation.pad_token_id == 9
    state, args, found, extra = load.read_model(tmp_path / "hf")
    assert extra == {"tokenizer.chat_template": template} | ids
    export.export_model(state, args, found, tmp_path / "back", "hf", extra=extra)
    assert AutoTokenizer.from_pretrained(tmp_path / "back").chat_template == template
    vocabulary.save(tmp_path / "other.model")
    assert load.read_model(
        tmp_path / "m.gguf", str(tmp_path / "other.model"))[3].keys().isdisjoint(ids)
    for bad in vocabulary.vocab_size, 1 << 31, True, "7":
        export.export_model(model.state_dict(), args, found, tmp_path / "bad.gguf",
                            extra=dict.fromkeys(ids, bad))
        assert load.read_model(tmp_path / "bad.gguf")[3].keys().isdisjoint(ids)


@pytest.mark.parametrize("case, format, said", [
    ("qwen2", "v1", "qkv_bias=True"), ("qwen3", "v0", "head_width=32"),
    ("llama 3.2", "v2", "rope_theta=500000.0"),
    ("qwen3, tied, linear", "v2", "rope_theta=1000000.0")])
def test_llama2c_refuses_what_it_cannot_say(case, format, said, tmp_path, vocabulary, capsys):
    make(tmp_path / "m", *CASES[case], vocabulary)
    state, args, found, _ = load.read_model(tmp_path / "m")
    assert said in refused(capsys, export.export_model, state, args, found, tmp_path / "m.bin",
                           format)


# ---- the vocabulary beside a model


@pytest.mark.parametrize("command, more", [("sample.py", ["--prompt=once", "--max_new_tokens=4"]),
                                           ("evaluate.py", ["--perplexity=my.txt"])])
def test_a_vocabulary_of_another_size_is_one_line(command, more, tmp_path, vocabulary):
    """Without this check, ids beyond the rows of the embedding would end in a traceback."""
    model = Transformer(ModelArgs(dim=32, n_layers=1, n_heads=2, vocab_size=100, max_seq_len=64))
    export.export_model(model.state_dict(), model.args, None, tmp_path / "m.bin", "v1")
    vocabulary.save(tmp_path / "v.model")
    (tmp_path / "my.txt").write_text(TEXT)
    done = forked.run([ROOT / command, "m.bin", "--tokenizer=v.model", "--device=cpu", *more],
                      tmp_path, os.environ)
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1, done.stderr
    assert (f"the vocabulary has {vocabulary.vocab_size} pieces and the model 100, "
            "expected the same") in done.stderr


# ---- fine-tuning

def test_what_fine_tuning_takes_over(tmp_path, vocabulary, capsys):
    """Keep sizes and vocabulary and limit the context; a llama2.c file needs --vocab_source."""
    make(tmp_path / "m", *CASES["llama 3.2"], vocabulary)
    knobs = ({name: knob[0] for name, knob in source_knobs(ROOT / "train.py").items()}
             | {"cache": str(tmp_path / "cache")})

    def adopt(path, **given):
        return load.adopt(
            SimpleNamespace(**knobs | given | {"init_from": str(path)}, defaults=knobs),
            given.keys())

    found, imported = adopt(tmp_path / "m")
    args = ModelArgs.of(SimpleNamespace(**knobs | found), vocabulary.vocab_size, imported)
    assert args == load.read_model(tmp_path / "m")[1]
    assert found["learning_rate"] == 6e-4
    assert found["max_seq_len"] == 64
    assert Path(found["vocab_source"]).read_bytes() == vocabulary.data
    assert {"learning_rate", "max_seq_len"}.isdisjoint(
        adopt(tmp_path / "m", learning_rate=1e-3, max_seq_len=32)[0])
    assert "--rope_theta=3.0: fine-tuning keeps" in refused(capsys, adopt, tmp_path / "m",
                                                            rope_theta=3.0)
    assert "--vocab_source=byte: fine-tuning keeps" in refused(capsys, adopt, tmp_path / "m",
                                                               vocab_source="byte")
    model = Transformer(ModelArgs(dim=32, n_layers=1, n_heads=2, vocab_size=vocabulary.vocab_size,
                                  max_seq_len=4096))
    export.export_model(model.state_dict(), model.args, vocabulary, tmp_path / "m.bin", "v1")
    found, _ = adopt(tmp_path / "m.bin", vocab_source=str(tmp_path / "tokenizer.bin"))
    assert found["dim"] == 32 and found["max_seq_len"] == 1024 and found["learning_rate"] == 6e-4
    assert (Tokenizer.load(found["vocab_source"]).encode("once upon")
            == vocabulary.encode("once upon"))
    assert "give it as --vocab_source" in refused(capsys, adopt, tmp_path / "m.bin")
    assert "holds no complete checkpoint" in refused(capsys, adopt, tmp_path / "none")


def test_byte_level_vocabulary_of_a_folder(tmp_path, vocabulary):
    """Read a tokenizer.json with fewer tokens than the model has rows."""
    made = train_byte_level(
        ["once upon a time there was a girl who played outside in the park, 12 times"] * 9, 290,
        tmp_path / "bpe.json", exact=False)
    make(tmp_path / "m", Qwen2Config,
         dict(tie_word_embeddings=True, vocab_size=made.vocab_size + 7), vocabulary)
    (tmp_path / "m/tokenizer.model").unlink()
    (tmp_path / "m/tokenizer.json").write_text(json.dumps(made.hugging_face()))
    (tmp_path / "m/tokenizer_config.json").write_text(
        json.dumps({"eos_token": made.pieces()[made.eos_id][0].decode()}))
    state, args, found, _ = load.read_model(tmp_path / "m")
    assert found.kind == "bpe" and found.vocab_size == args.vocab_size == made.vocab_size + 7
    export.export_model(state, args, found, tmp_path / "m.gguf")
    assert (load.read_model(tmp_path / "m.gguf")[2].encode("once upon 12")
            == made.encode("once upon 12") == found.encode("once upon 12"))


def train(folder, *arguments):
    return forked.run(
        [ROOT / "train.py", "--device=cpu", "--checks=-run", "--peak_tflops=0.1", *arguments],
        folder, os.environ)


def test_fine_tuning_an_imported_model(tmp_path, vocabulary):
    """
    Fine-tune a sharded Qwen3 on a context shorter than its own.

    The loss falls, and the export has the logits of transformers.
    """
    make(tmp_path / "m", Qwen3Config,
         dict(head_dim=32, max_position_embeddings=2048, initializer_range=0.02), vocabulary,
         max_shard_size="100KB")
    words = ["once", "upon", "a", "time", "there", "was", "little", "girl", "who", "played",
             "outside", "park"]
    (tmp_path / "my.txt").write_text(
        "\n".join(" ".join(random.Random(n).choices(words, k=40)) for n in range(400)))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "m/chat_template.jinja").write_text(template)
    done = train(tmp_path, "--data=my.txt", "--init_from=m", "--out_dir=tuned", "--max_iters=25",
                 "--eval_interval=25", "--eval_iters=2", "--log_interval=5", "--max_seq_len=64",
                 "--batch_size=4", "--warmup_iters=5")
    assert not done.returncode, done.stderr
    assert "fine-tuning m (" in done.stdout
    assert "learning_rate=0.0006" in done.stdout
    assert "context 2,048" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "tuned/log.jsonl").read_text().splitlines()]
    losses = [row["loss/val"] for row in rows if "loss/val" in row]
    assert losses[-1] < losses[0] - 0.5
    assert (gguf.GGUFReader(tmp_path / "tuned/model.gguf").get_field("general.architecture")
            .contents() == "qwen3")
    state, args, found, extra = load.read_model(tmp_path / "tuned")
    assert args.qk_norm
    assert args.head_dim == 32
    assert args.max_seq_len == 64
    assert found.encode("once upon") == vocabulary.encode("once upon")
    export.export_model(state, args, found, tmp_path / "hf", "hf", extra=extra)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template == template
    x = torch.randint(V, (1, 60))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()(x).logits
        assert far(imported(tmp_path / "tuned/model.gguf")(x, every=True)[0], theirs) < 1e-4
    shutil.rmtree(tmp_path / "m")  # a resumed run does not need the model it began with
    more = train(tmp_path, "--init_from=resume", "--out_dir=tuned", "--data=my.txt",
                 "--max_iters=26")
    assert not more.returncode, more.stderr
    models = [*(tmp_path / "tuned").glob("*.gguf")]
    assert models
    for path in models:
        field = gguf.GGUFReader(path).get_field("tokenizer.chat_template")
        assert field.contents() == template
    assert load.read_model(tmp_path / "tuned")[3]["tokenizer.chat_template"] == template
    more = train(tmp_path, "--init_from=hf", "--eval_only=True", "--data=my.txt",
                 "--max_seq_len=64", "--eval_iters=2", "--out_dir=none")
    assert f"validation loss {losses[-1]:.3f}"[:-1] in more.stdout, more.stderr


@pytest.mark.parametrize("like, kind", [("qk_norm=True", "qwen3"), ("qkv_bias=True", "qwen2"),
                                        ("head_width=24", "llama")])
def test_training_with_what_others_have(like, kind, tmp_path):
    """All checks before the first step pass, and the export names the architecture that fits."""
    (tmp_path / "my.txt").write_text("\n".join(
        f"the girl played {n} times in the park and once outside" for n in range(700)))
    script = tmp_path / "like.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import functools, train\n"
        f"args = functools.partial(train.ModelArgs.of, imported=train.ModelArgs({like}))\n"
        "train.BUILD = train.BUILD._replace(model_args=args)\n"
        "sys.exit(train.start(train.configure(vars(train))))\n")
    flag = [f"--{like}"] * (kind == "qwen2")
    done = forked.run([
        script, "--data=my.txt", "--vocab_source=byte", "--max_iters=4", "--eval_interval=4",
        "--eval_iters=1", "--max_seq_len=32", "--device=cpu", "--peak_tflops=0.1", *flag,
        "--out_dir=out"
    ], tmp_path, os.environ)
    assert not done.returncode, done.stdout + done.stderr
    assert "warning" not in done.stdout + done.stderr, done.stdout + done.stderr
    assert " passed" in done.stdout, done.stdout + done.stderr
    assert (gguf.GGUFReader(tmp_path / "out/model.gguf").get_field("general.architecture")
            .contents() == kind)
    model, again = (imported(tmp_path / name) for name in ("out", "out/model.gguf"))
    x = torch.randint(259, (1, 20))
    with torch.no_grad():
        assert torch.equal(model(x, every=True)[0], again(x, every=True)[0])
