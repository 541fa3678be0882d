"""
`run` reads transformers' Llama, Mistral, Qwen2 and Qwen3 models as GGUF, with the same logits and
the same greedy text.
"""
import math

import gguf
import numpy as np
import pytest
import torch
from transformers import (LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
                          Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

from tests.test_run import ISAS, TEXT, TYPES, Model, assert_close, ids_of, logits, run

VOCABULARY = Model()  # only its pieces are used
CLASSES = {"llama": (LlamaConfig, LlamaForCausalLM), "mistral": (MistralConfig, MistralForCausalLM),
           "qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
        "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
CASES = {
    "llama": dict(),
    "llama, Llama-3 factors, GQA": dict(num_key_value_heads=1, rope_parameters=LLAMA3,
                                        tie_word_embeddings=True),
    "llama, biases": dict(attention_bias=True, num_key_value_heads=2),
    "llama, heads wider than dim": dict(head_dim=48),
    "llama, heads of 10": dict(head_dim=10, rope_parameters=YARN),
    "mistral": dict(num_key_value_heads=2, sliding_window=None, head_dim=32),
    "mistral, window": dict(num_key_value_heads=2, sliding_window=20),
    "qwen2": dict(),
    "qwen2, tied, GQA": dict(num_key_value_heads=2, tie_word_embeddings=True,
                             rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen2, YaRN, 8 heads": dict(num_attention_heads=8, num_key_value_heads=1,
                                 rope_parameters=YARN),
    "qwen2, linear, heads of 6": dict(hidden_size=36, num_attention_heads=6, num_key_value_heads=3,
                                      rope_parameters=LINEAR),
    "qwen3": dict(head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3, tied, GQA, narrow heads": dict(head_dim=10, num_key_value_heads=2,
                                           tie_word_embeddings=True),
    "qwen3, GQA, wide heads": dict(head_dim=64, num_attention_heads=6, num_key_value_heads=1,
                                   rope_parameters=YARN),
}
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
         "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def random_model(case, seed=0, **options):
    """
    Return transformers' model of a case, with weights large enough to matter, and GGUF's name of
    its architecture.
    """
    config, cls = CLASSES[case.split(",")[0]]
    options = dict(dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=4),
                   **CASES[case], **options)
    torch.manual_seed(seed)
    model = cls(config(
        vocab_size=300, intermediate_size=96, num_hidden_layers=2, max_position_embeddings=128,
        rms_norm_eps=1e-5, attn_implementation="eager",
        **{"tie_word_embeddings": False, **options})).eval()
    for name, p in model.named_parameters():
        large = 3 if name in ("model.embed_tokens.weight", "lm_head.weight") else 1
        p.data = (torch.randn(p.shape) * large / math.sqrt(p.shape[-1]) if p.ndim == 2
                  else torch.randn(p.shape) * 0.3)
        if "norm" in name:
            p.data += 1
        # Llama with biases has this bias. Readers of GGUF know it, but `run` does not.
        if name.endswith("o_proj.bias"):
            p.data.zero_()
    return model, {"mistral": "llama"}.get(case.split(",")[0], case.split(",")[0])


def tensors(model, architecture):
    """
    Yield (name, tensor) with GGUF's names and order of rows: RoPE rotates neighbouring rows of a
    head in the llama architecture, and rows half a head apart in the others.
    """
    config = model.config
    for name, x in model.state_dict().items():
        if name.endswith("o_proj.bias") or (
                name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        heads = {"q": config.num_attention_heads,
                 "k": config.num_key_value_heads}.get(name.split(".")[-2][0])
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            x = x.view(heads, 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
        if name.startswith("model.layers."):
            layer, rest = name.removeprefix("model.layers.").split(".", 1)
            part, kind = rest.rsplit(".", 1)
            name = f"blk.{layer}.{NAMES[part]}.{kind}"
        else:
            name = {"model.embed_tokens.weight": "token_embd.weight",
                    "model.norm.weight": "output_norm.weight",
                    "lm_head.weight": "output.weight"}[name]
        yield name, x.contiguous().numpy()


def write_gguf(path, model, architecture, dtype="f32", changes={}, **metadata):
    """
    Write a file as llama.cpp's converter does. changes: {name: replacement of a tensor, None to
    omit it}.
    """
    config, rope = model.config, model.config.rope_parameters
    width = model.model.layers[0].self_attn.head_dim
    w = gguf.GGUFWriter(path, architecture)
    w.add_context_length(128)
    w.add_embedding_length(config.hidden_size)
    w.add_block_count(config.num_hidden_layers)
    w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(config.num_attention_heads)
    w.add_head_count_kv(config.num_key_value_heads)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_key_length(width)
    w.add_value_length(width)
    if architecture == "llama":
        w.add_rope_dimension_count(width)
    if getattr(config, "sliding_window", None) and architecture == "llama":
        w.add_sliding_window(config.sliding_window)
    w.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        w.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        w.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    w.add_tokenizer_model("llama")
    w.add_token_list([p for p, _ in VOCABULARY.pieces])
    w.add_token_scores([0.0] * 300)
    w.add_token_types([t for _, t in VOCABULARY.pieces])
    w.add_add_space_prefix(False)
    for key, value in metadata.items():
        w.add_key_value(f"{architecture}.{key}", value, gguf.GGUFValueType.get_type(value))
    held = dict(tensors(model, architecture))
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** (-np.arange(0, width, 2) / width)
        held["rope_freqs.weight"] = (
            plain / model.model.rotary_emb.inv_freq.double().numpy()).astype(np.float32)
    for name, x in {**held, **changes}.items():
        if x is None:
            continue
        if dtype != "f32" and x.ndim == 2:
            w.add_tensor(name, gguf.quants.quantize(x, TYPES[dtype]), raw_dtype=TYPES[dtype])
        else:
            w.add_tensor(name, x)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(run_bin, tmp_path, case):
    model, architecture = random_model(case)
    with torch.no_grad():
        expected = model(torch.tensor([ids_of(TEXT)])).logits[0].numpy()
    write_gguf(tmp_path / "m.gguf", model, architecture)
    for isa in ISAS:
        assert_close(logits(run_bin, [tmp_path / "m.gguf"], TEXT, 300, isa), expected, "f32")


@pytest.mark.parametrize("case", [
    "mistral, window", "qwen2, tied, GQA", "qwen2", "qwen3", "qwen3, GQA, wide heads"])
def test_greedy_text_equals_transformers(run_bin, tmp_path, case):
    """
    The text is generated token by token with the KV cache, with one thread and with several, some
    of which then compute whole heads.
    """
    model, architecture = random_model(case, seed=3)
    # The greedy text has none of the first three tokens.
    (model.model.embed_tokens if model.config.tie_word_embeddings
     else model.lm_head).weight.data[:3] = 0
    ids = ids_of("Hello there")
    with torch.no_grad():
        while len(ids) < 100:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1, 3:].argmax()) + 3)
    shown = b"".join(bytes([i - 3]) if i < 259 else VOCABULARY.pieces[i][0] for i in ids[1:])
    write_gguf(tmp_path / "m.gguf", model, architecture)
    for isa in ISAS:
        for threads in (1, 2, 3):
            assert run(run_bin, tmp_path / "m.gguf", "-t", 0, "-n", 99, "-i", "Hello there",
                       "--raw", "-j", threads, isa=isa) == shown + b"\n"
