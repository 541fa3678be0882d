"""
Models of other projects that come as folders: Hugging Face's (config.json, model.safetensors in one or several files) and Meta's
(params.json, consolidated.*.pth). What model.py can't compute is refused by its name. Tensors are read one at a time.
https://huggingface.co/docs/safetensors, https://github.com/meta-llama/llama-models
"""
import math
from functools import partial

import numpy as np
import torch

from configurator import fail
from engine.formats import rope
from engine.formats.hf_vocabulary import chat_template, load_json, printable, read_hf_vocabulary
from engine.formats.layout import END_OF_MESSAGE, END_OF_TURN, PADDING, halves_to_interleaved, heads_in, tensors
from engine.formats.reader import Reader, Tensors, checked, finite, getter
from engine.untrusted import MAX_JSON, is_plain_name, load_torch, parse_json, reading
from model import ModelArgs
from tokenizer import generation

ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2",
                 "Qwen3ForCausalLM": "qwen3"}
# Keys of a config.json that are fine with one value, which is also what a missing one means.
FIXED = {"hidden_act": "silu", "mlp_bias": False, "attention_bias": False, "partial_rotary_factor": 1,
         "quantization_config": None, "auto_map": None, "num_experts": None, "num_local_experts": None}
# Keys of its rope_parameters or rope_scaling, by type.
ROPE_KEYS = {"default": "", "linear": "factor", "llama3": "factor low_freq_factor high_freq_factor",
             "yarn": "factor attention_factor beta_fast beta_slow truncate finetuned",
             "longrope": "factor attention_factor short_factor long_factor"}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


# ---- Hugging Face

def hf_args(path):
    """The ModelArgs of a config.json."""
    stored = load_json(path)
    config = {key: value for key, value in stored.items() if value is not None}

    def refuse(problem):
        fail(f"{path}: {problem}")

    get, names = getter(config, refuse), config.get("architectures")
    kind = next((kind for name, kind in ARCHITECTURES.items() if names == [name]), None)
    if not kind:
        refuse(f"architectures is {repr(names)[:80]}, expected one of {', '.join(ARCHITECTURES)}")
    for key, value in FIXED.items():
        if config.get(key, value) != value:
            refuse(f"{key}={printable(config[key])} is not supported, expected {'none' if value is None else value}")
    context, n_heads = get("max_position_embeddings", int), get("num_attention_heads", int)
    dim, layers = get("hidden_size", int), get("num_hidden_layers", int)
    refuse_window(stored, kind, context, get("max_window_layers", int, 28) < layers, refuse)
    head_width = get("head_dim", int, 128 if kind == "qwen3" else max(1, dim // n_heads))
    args = ModelArgs(
        dim=dim, n_layers=layers, n_heads=n_heads, n_kv_heads=get("num_key_value_heads", int, n_heads),
        head_width=0 if head_width * n_heads == dim else head_width, vocab_size=get("vocab_size", int),
        hidden_dim=get("intermediate_size", int), max_seq_len=context, norm_eps=get("rms_norm_eps", float, 1e-6),
        tied=get("tie_word_embeddings", bool, False), qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3")
    vars(args).update(hf_rope(config, checked(args, refuse), refuse))
    return checked(args, refuse)


def refuse_window(config, kind, context, some, refuse):
    """
    A sliding window shorter than the context changes what attention sees. config: with its nulls, since Mistral's says so that it
    has no window. some: whether Qwen's would slide in a layer.
    """
    window = config.get("sliding_window", 4096 if kind == "mistral" else None)
    layers = config.get("layer_types")
    slides = kind == "mistral" or bool(config.get("use_sliding_window"))
    if isinstance(layers, list):
        slides = any(layer != "full_attention" for layer in layers) or kind == "mistral" and slides
    elif kind != "mistral":
        slides = slides and some
    if slides and window is not None and not (type(window) is int and window >= context):
        refuse(f"sliding_window={printable(window)} is not supported, expected none, or one that holds the context of {context}; "
               f"max_position_embeddings={printable(window)} would give a model of that context")


def hf_rope(config, args, refuse):
    """{setting of ModelArgs: value} of a config.json's rotary positions."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        refuse(f"rope_scaling is {repr(found)[:80]}, expected an object")
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in [*ROPE_KEYS]:
        refuse(f"rope_type {repr(kind)[:80]} is not supported, expected {', '.join(ROPE_KEYS)}")
    found = {"rope_theta": config.get("rope_theta", 10000.0), "original_max_position_embeddings": args.max_seq_len} | {
        key: value for key, value in found.items() if value is not None}
    if "original_max_position_embeddings" in config:  # which transformers believes rather than the scaling's own
        found["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    for key in found.keys() - {"rope_type", "type", "rope_theta", "original_max_position_embeddings", *ROPE_KEYS[kind].split()}:
        if (key, found[key]) != ("partial_rotary_factor", 1):
            refuse(f"{printable(key)} is not supported in the {kind} scaling of rotary positions")
    get, Q = getter(found, refuse), args.head_dim
    theta, scaling = get("rope_theta", float), {}
    if theta <= 1:
        refuse(f"rope_theta is {theta}, expected more than 1")
    if kind == "linear":
        scaling = {"rope_scaling": get("factor", float)}
    elif kind == "llama3":
        low, high = get("low_freq_factor", float), get("high_freq_factor", float)
        if low >= high:
            refuse(f"low_freq_factor is {low}, expected less than high_freq_factor, {high}")
        scaling = {"rope_factors": rope.llama3(Q, theta, get("factor", float), low, high,
                                               get("original_max_position_embeddings", int))}
    elif kind == "yarn":
        fast, slow, factor = get("beta_fast", float, 32.0), get("beta_slow", float, 1.0), get("factor", float)
        if not 0.01 <= slow <= fast <= 1000:
            refuse(f"beta_fast is {fast} and beta_slow {slow}, expected numbers such as 32 and 1")
        scaling = {"rope_factors": rope.yarn(Q, theta, factor, get("original_max_position_embeddings", int), fast, slow,
                                             get("truncate", bool, True)),
                   "rope_attention": get("attention_factor", float, rope.yarn_attention(factor))}
    elif kind == "longrope":
        scaling = {"rope_factors": longrope(found, Q, refuse), "rope_attention": get("attention_factor", float)}
    return {"rope_theta": theta} | scaling


def longrope(found, Q, refuse):
    """The factors of a rope_type "longrope", whose two lists must be one: model.py has one table for all lengths."""
    short, long = found.get("short_factor"), found.get("long_factor")
    if short != long:
        refuse("rope_type 'longrope' with another long_factor than short_factor is not supported")
    if not isinstance(short, list) or len(short) != Q // 2 or not all(type(x) in (int, float) and 0 < x < math.inf for x in short):
        refuse(f"short_factor is no list of {Q // 2} positive numbers, one a pair of a head")
    return rope.factors(short)


def safetensors(path):
    """{name: (dtype, shape, place, bytes)} of a .safetensors file, every number of whose header is checked."""
    r = Reader(path)
    size, = r.unpack("<Q")
    if size > min(MAX_JSON, len(r.data) - 8):
        r.fail(f"its header of {size} bytes is larger than the file, or than {MAX_JSON >> 20} MiB; damaged")
    with reading(path, "a safetensors file", fail):
        header = parse_json(r.take(size).tobytes())
        header.pop("__metadata__", None)
        found = {name: (str(what["dtype"]), tuple(what["shape"]), *what["data_offsets"]) for name, what in header.items()}
    most, placed = len(r.data) - r.at, {}
    for name, (dtype, shape, *ends) in found.items():
        if len(ends) != 2 or not all(type(n) is int and 0 <= n for n in (*shape, *ends)) or not ends[0] <= ends[1] <= most:
            r.fail(f"{name[:80]!r} has shape {list(shape)} and stands at {ends}, which can't be in {most} bytes; damaged")
        placed[name] = dtype, shape, r.at + ends[0], ends[1] - ends[0]
    return placed


def same_bytes(a, b):
    """Return whether two tensors (file, dtype, shape, place, bytes) hold the same bytes; True if one is None."""
    if not a or not b or a[0] == b[0] and a[3:] == b[3:]:
        return True
    readers, step = [Reader(path) for path in (a[0], b[0])], 1 << 24
    return a[1:3] == b[1:3] and a[4] == b[4] and all(
        np.array_equal(*(r.bytes_at(at + done, min(step, a[4] - done)) for r, at in zip(readers, (a[3], b[3]))))
        for done in range(0, a[4], step))


def weight_files(folder, config):
    """
    The paths of a Hugging Face folder's weights, in transformers' order of precedence: the file that
    config.json names, one file, the shards of an index. Others in the folder, such as those of an
    earlier model, are not read.
    """
    named, single = config.get("transformers_weights"), folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if named is not None:
        if not is_plain_name(named) or not named.endswith((".safetensors", ".safetensors.index.json")):
            fail(f"{folder}: transformers_weights={printable(named)} in its config.json, expected a "
                 ".safetensors file in this folder")
        single, index = folder / named, folder / named
    if single.exists() and single.suffix == ".safetensors":
        return [single]
    if index.exists() and index.suffix == ".json":
        where = load_json(index).get("weight_map")
        if not isinstance(where, dict) or not all(map(is_plain_name, where.values())):
            fail(f"{index}: weight_map is no list of names of files in this folder; damaged")
        files = [folder / name for name in sorted({*where.values()})]
        for name, file in where.items():
            if name not in safetensors(folder / file):
                fail(f"{folder / file}: tensor {name[:80]!r} is missing, which {index.name} says is there")
        return files
    others = "pytorch_model*.bin, which could run code; save it with save_pretrained of a newer transformers" \
        if any(folder.glob("pytorch_model*.bin")) else "none"
    return fail(f"{folder}: expected {named or 'model.safetensors or model.safetensors.index.json'}, found {others}")


def refuse_unread(path):
    """One line where a file of weights is named, but the model of its folder is in others."""
    folder = path.parent
    if (folder / "config.json").exists():
        files = weight_files(folder, load_json(folder / "config.json"))
    else:
        files = sorted(folder.glob("consolidated.*.pth")) if (folder / "params.json").exists() else [path]
    if path not in files:
        names = ", ".join(file.name for file in files[:3])
        fail(f"{path}: not read for the model in {folder}, whose weights are in {names}; name the "
             "folder, or a folder with this file alone")


def hf_files(folder):
    """{tensor: (its file, dtype, shape, place, bytes)} of a folder's safetensors."""
    config, adapter = load_json(folder / "config.json"), folder / "adapter_config.json"
    if adapter.exists():
        fail(f"{adapter}: an adapter, whose changes of the weights are not read; merge it first, "
             "with merge_and_unload() of the package peft")
    found = {}
    for path in weight_files(folder, config):
        for name, place in safetensors(path).items():
            if name in found:
                fail(f"{folder}: tensor {name[:80]!r} stands in {found[name][0].name} and in "
                     f"{path.name}; one of them is another model's")
            found[name] = path, *place
    return found


def hf_tensor(path, name, ours, dtype, shape, at, size, heads):
    """One tensor as it is stored, but in our order of rows."""
    w = torch.from_numpy(Reader(path).bytes_at(at, size)).view(DTYPES[dtype]).reshape(shape)
    return halves_to_interleaved(finite(name, w, path), heads)


def hf_state(folder, args):
    """The Tensors of a Hugging Face folder; one line where they are not those of the config."""
    there, reads = hf_files(folder), {}
    both = there.get("lm_head.weight"), there.get("model.embed_tokens.weight")
    if args.tied and not same_bytes(*both):
        fail(f"{folder}: config.json says tie_word_embeddings, but lm_head.weight is not "
             "model.embed_tokens.weight; say false there if it is the classifier, which transformers "
             "takes it for since version 5")
    for ours, _, name, shape in tensors(args):
        if name not in there:
            fail(f"{folder}: tensor {name} {shape} is missing")
        path, dtype, found, at, size = there.pop(name)
        if dtype not in DTYPES:
            fail(f"{path}: {name} is {str(dtype)[:20]}, expected {', '.join(DTYPES)}")
        if found != shape or size != math.prod(shape) * DTYPES[dtype].itemsize:
            fail(f"{path}: {name} has shape {found} and {size} bytes, expected {shape}")
        reads[ours] = partial(hf_tensor, path, name, ours, dtype, shape, at, size, heads_in(ours, args))
    for name in there:  # tables of positions, which old files hold, and the classifier that is the embedding
        if not name.endswith("rotary_emb.inv_freq") and not (name == "lm_head.weight" and args.tied):
            fail(f"{folder}: tensor {name[:80]!r} is no part of a model of this config.json")
    return Tensors(reads, folder)


def chat_ids(folder, vocabulary):
    """{GGUF's key: id} of what ends an answer beside EOS and BOS, and of padding."""
    config, taken = generation(folder), (vocabulary.eos_id, vocabulary.bos_id)
    ends = [i for i in config["eos_token_id"] if i not in taken]
    padding = [i for i in config["pad_token_id"] if i not in taken]
    found = [*zip((END_OF_TURN, END_OF_MESSAGE), ends), *zip((PADDING,), padding)]
    return {key: i for key, i in found if i < vocabulary.vocab_size}


def read_hf(folder, tokenizer=None):
    """(Tensors, ModelArgs, Tokenizer or None, {metadata}) of a Hugging Face folder. tokenizer: one that is used instead."""
    args = hf_args(folder / "config.json")
    state, vocabulary = hf_state(folder, args), tokenizer or read_hf_vocabulary(folder, args.vocab_size)
    chat = chat_template(folder)
    if vocabulary and not tokenizer:
        chat |= chat_ids(folder, vocabulary)
    return state, args, vocabulary, chat


# ---- Meta

def meta_shards(folder):
    """[{name: tensor}] of consolidated.*.pth, mapped rather than read."""
    paths = sorted(folder.glob("consolidated.*.pth"))
    if not paths:
        fail(f"{folder}: expected consolidated.00.pth beside params.json")
    shards = []
    for path in paths:
        with reading(path, "weights of Meta's", fail):
            shard = load_torch(path, mmap=True)
            shards.append({name: w for name, w in shard.items() if isinstance(w, torch.Tensor) and name != "rope.freqs"})
    if any(shard.keys() != shards[0].keys() for shard in shards):
        fail(f"{folder}: its {len(paths)} consolidated files hold different tensors; some are of another model")
    return shards


def meta_tensor(name, shards, dim, where):
    """A tensor of which the shards hold slices along `dim`; None: each holds all of it."""
    w = torch.cat([shard[name] for shard in shards], dim) if dim is not None and len(shards) > 1 else shards[0][name].clone()
    return finite(name, w, where)


def meta_args(folder, first, n):
    """The ModelArgs of a params.json; first: the first of n shards, whose shapes say what the file doesn't."""
    path = folder / "params.json"
    params = {key: value for key, value in load_json(path).items() if value is not None}

    def refuse(problem):
        fail(f"{path}: {problem}")

    get, dim = getter(params, refuse), getter(params, refuse)("dim", int)
    shapes = {name: tuple(w.shape) for name, w in first.items()}
    for key in params.keys() & {"moe", "moe_args", "quantization_args", "lora_args", "vision_chunk_size"}:
        refuse(f"{key} is not supported")
    rows = [shapes.get(name, (0, 0)) for name in ("layers.0.feed_forward.w1.weight", "output.weight", "tok_embeddings.weight")]
    if any(len(shape) != 2 for shape in rows):
        refuse("the tensors beside it are not those of a Llama")
    (hidden, _), (output, _), (embedding, width) = rows
    n_heads, theta, eps = get("n_heads", int), get("rope_theta", float, 10000.0), get("norm_eps", float)
    scaled = get("use_scaled_rope", bool, False)
    context = 131072 if scaled else 8192 if theta >= 5e5 else 4096 if eps > 5e-6 else 2048  # of Llama 3.1, 3, 2 and 1
    args = checked(ModelArgs(
        dim=dim, n_layers=get("n_layers", int), n_heads=n_heads, n_kv_heads=get("n_kv_heads", int, n_heads),
        vocab_size=output * n or (embedding if width < dim else embedding * n), hidden_dim=hidden * n, norm_eps=eps,
        rope_theta=theta, tied=not output, max_seq_len=get("max_seq_len", int, context)), refuse)
    if scaled:
        factor = get("rope_scaling_factor", float, 32.0 if dim < 4096 else 8.0)  # of Llama 3.2's small models, and of 3.1
        args.rope_factors = rope.llama3(args.head_dim, theta, factor, 1, 4, 8192)
    return checked(args, refuse)


def read_meta(folder, tokenizer=None):
    """(Tensors, ModelArgs, Tokenizer or None, {metadata}) of a folder with Meta's params.json and consolidated.*.pth."""
    shards = meta_shards(folder)
    args, n, reads = meta_args(folder, shards[0], len(shards)), len(shards), {}
    for name, _, _, shape in tensors(args):
        if name not in shards[0]:
            fail(f"{folder}: tensor {name} {shape} is missing")
        slices = [tuple(shard[name].shape) for shard in shards]
        whole = [dim for dim in range(len(shape)) if slices == [(*shape[:dim], shape[dim] // n, *shape[dim + 1:])] * n]
        if len(shape) == 1:
            whole = [None] if slices == [shape] * n else []
        if not whole:
            fail(f"{folder}: {name} has shape {slices[0]} in the first of {n} files, expected slices of {shape}")
        reads[name] = partial(meta_tensor, name, shards, whole[0], folder)
    for name in shards[0].keys() - reads.keys():
        if not (name == "output.weight" and args.tied):
            fail(f"{folder}: tensor {name[:80]!r} is no part of a model of this params.json")
    return Tensors(reads, folder), args, tokenizer or read_hf_vocabulary(folder, args.vocab_size), {}
