"""
Read folders of models: Hugging Face's (config.json, model.safetensors in one or several files) and
Meta's (params.json, consolidated.*.pth). The program exits with a message that names the first
setting or tensor that model.py does not support. Tensors are read one at a time.
https://huggingface.co/docs/safetensors, https://github.com/meta-llama/llama-models
"""
import contextlib
from functools import partial

import torch

from configurator import fail
from engine.formats import rope
from engine.formats.hf_tokenizer import chat_template, load_json, printable, read_hf_tokenizer
from engine.formats.layout import (
    END_OF_MESSAGE,
    END_OF_TURN,
    PADDING,
    check_tensors,
    halves_to_interleaved,
    heads_in,
    tensors,
)
from engine.formats.reader import Tensors, checked, getter, open_safetensors, plausible
from engine.untrusted import (
    MAX_JSON,
    is_plain_name,
    load_torch,
    read_json,
    reading,
)
from model import ModelArgs
from tokenizer import generation

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# Keys of a config.json that must be missing, null, or have this value, which is their default.
FIXED = {"hidden_act": "silu", "mlp_bias": False, "attention_bias": False,
         "partial_rotary_factor": 1, "quantization_config": None, "auto_map": None,
         "num_experts": None, "num_local_experts": None}
# Keys that rope_parameters (or rope_scaling) may have, by rope_type, and keys that all types share
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate", "finetuned"),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
}
COMMON_ROPE_KEYS = {"rope_type", "type", "rope_theta", "original_max_position_embeddings"}
DTYPES = "F32", "F16", "BF16"  # safetensors' names of the types that weights may have


# ---- Hugging Face

def read_hf(folder, with_tokenizer=True):
    """
    Return (Tensors, ModelArgs, Tokenizer or None, chat) of a Hugging Face folder. chat: {key of
    GGUF's metadata: value} for the chat template, and for the tokens of chat_ids.
    """
    args = hf_args(folder / "config.json")
    state = hf_tensors(folder, args)
    vocabulary = read_hf_tokenizer(folder, args.vocab_size) if with_tokenizer else None
    chat = chat_template(folder)
    if vocabulary:
        chat |= chat_ids(folder, vocabulary)
    return state, args, vocabulary, chat


def hf_args(path):
    """Return the ModelArgs of a config.json."""
    stored = load_json(path)
    with reading(path, "the config.json of a model", fail):
        config = {key: value for key, value in stored.items() if value is not None}
        get, names = getter(config, path), config.get("architectures")
        kind = next((kind for name, kind in ARCHITECTURES.items() if names == [name]), None)
        if not kind:
            fail(f"{path}: architectures is {repr(names)[:80]}, expected one of "
                 f"{', '.join(ARCHITECTURES)}")
        for key, value in FIXED.items():
            if config.get(key, value) != value:
                fail(f"{path}: {key}={printable(config[key])} is not supported, expected "
                     f"{'none' if value is None else value}")
        dim, n_heads = get("hidden_size", int), get("num_attention_heads", int)
        head_dim = get("head_dim", int, 128 if kind == "qwen3" else max(1, dim // n_heads))
        args = checked(ModelArgs(
            dim=dim,
            n_layers=get("num_hidden_layers", int),
            n_heads=n_heads,
            n_kv_heads=get("num_key_value_heads", int, n_heads),
            head_width=0 if head_dim * n_heads == dim else head_dim,  # 0: dim / n_heads
            vocab_size=get("vocab_size", int),
            hidden_dim=get("intermediate_size", int),
            max_seq_len=get("max_position_embeddings", int),
            norm_eps=get("rms_norm_eps", float, 1e-6),
            tied=get("tie_word_embeddings", bool, False),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3"), path)
        # In the config.json of a Mistral, null means no window, and a missing key 4096 tokens.
        window = stored.get("sliding_window", 4096 if kind == "mistral" else None)
        refuse_window(window, config, kind, args, path)
        vars(args).update(hf_rope(config, args, path))
        return checked(args, path)


def refuse_window(window, config, kind, args, path):
    """
    Exit with a message if a layer has a sliding window that is shorter than the context. window:
    its length in tokens, or None.
    """
    layers = config.get("layer_types")
    if kind == "mistral":
        slides = True
    elif isinstance(layers, list):
        slides = any(layer != "full_attention" for layer in layers)
    else:
        first = getter(config, path)("max_window_layers", int, 28)  # first layer with a window
        slides = bool(config.get("use_sliding_window")) and first < args.n_layers
    holds_context = window is None or type(window) is int and window >= args.max_seq_len
    if slides and not holds_context:
        fail(f"{path}: sliding_window={printable(window)} is not supported, expected none, or one "
             f"that holds the context of {args.max_seq_len}; "
             f"set max_position_embeddings to {printable(window)} for a shorter context")


def hf_rope(config, args, path):
    """
    Return {setting of ModelArgs: value} for the rotary embeddings that a config.json describes.
    args: the ModelArgs read so far, for head_dim and max_seq_len.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = getter({"rope_scaling": found}, path)("rope_scaling", dict)
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in list(ROPE_KEYS):
        fail(f"{path}: rope_type {repr(kind)[:80]} is not supported, expected "
             f"{', '.join(ROPE_KEYS)}")
    defaults = {"rope_theta": config.get("rope_theta", 10000.0),
                "original_max_position_embeddings": args.max_seq_len}
    found = defaults | {key: value for key, value in found.items() if value is not None}
    if "original_max_position_embeddings" in config:  # transformers prefers the outer value
        found["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    for key in found.keys() - COMMON_ROPE_KEYS - {*ROPE_KEYS[kind]}:
        if (key, found[key]) != ("partial_rotary_factor", 1):  # 1: the whole head is rotated
            fail(f"{path}: {printable(key)} is not supported in the {kind} scaling of rotary "
                 "positions")
    get = getter(found, path)
    settings = {"rope_theta": get("rope_theta", float)}
    sizes = args.head_dim, settings["rope_theta"]
    if kind == "linear":
        settings["rope_scaling"] = get("factor", float)
    elif kind == "llama3":
        low, high = get("low_freq_factor", float), get("high_freq_factor", float)
        if low >= high:
            fail(f"{path}: low_freq_factor is {low}, expected less than high_freq_factor, {high}")
        context = get("original_max_position_embeddings", int)
        settings["rope_factors"] = rope.llama3(*sizes, get("factor", float), low, high, context)
    elif kind == "yarn":
        fast, slow = get("beta_fast", float, 32.0), get("beta_slow", float, 1.0)
        if not 0.01 <= slow <= fast <= 1000:
            fail(f"{path}: beta_fast is {fast} and beta_slow {slow}, expected numbers such as 32 "
                 "and 1")
        factor, context = get("factor", float), get("original_max_position_embeddings", int)
        truncate = get("truncate", bool, True)
        default = rope.yarn_attention(factor)
        settings["rope_factors"] = rope.yarn(*sizes, factor, context, fast, slow, truncate)
        settings["rope_attention"] = get("attention_factor", float, default)
    elif kind == "longrope":
        short, long = found["short_factor"], found["long_factor"]
        if short != long:  # model.py has one table of factors for all text lengths
            fail(f"{path}: rope_type 'longrope' with another long_factor than short_factor is not "
                 "supported")
        settings["rope_factors"] = rope.factors(short)
        settings["rope_attention"] = get("attention_factor", float)
    return settings


def weight_files(folder):
    """
    Return the paths of a Hugging Face folder's weights, in transformers' order of precedence: the
    file that config.json names, model.safetensors, the shards of an index. Other files, such as
    those of an earlier model, are not read.
    """
    named = load_json(folder / "config.json").get("transformers_weights")
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if named is not None:
        kinds = ".safetensors", ".safetensors.index.json"
        if not is_plain_name(named) or not named.endswith(kinds):
            fail(f"{folder}: transformers_weights={printable(named)} in its config.json, expected "
                 "a .safetensors file in this folder")
        single = index = folder / named  # the suffix tests below select which of the two it is
    if single.exists() and single.suffix == ".safetensors":
        return [single]
    if index.exists() and index.suffix == ".json":
        with reading(index, "an index of .safetensors files", fail):
            names = {*read_json(index, MAX_JSON)["weight_map"].values()}
        if not all(map(is_plain_name, names)):
            fail(f"{index}: weight_map names a file outside this folder, expected files in it")
        return [folder / name for name in sorted(names)]
    found = "none"
    if any(folder.glob("pytorch_model*.bin")):
        found = ("pytorch_model*.bin, which could run code; save it with save_pretrained of a "
                 "newer transformers")
    expected = named or "model.safetensors or model.safetensors.index.json"
    return fail(f"{folder}: expected {expected}, found {found}")


def refuse_unread(path):
    """
    Exit with a message if `path`, a file of weights, is not one that the model in its folder uses.
    """
    folder, files = path.parent, [path]
    if (folder / "config.json").exists():
        files = weight_files(folder)
    elif (folder / "params.json").exists():
        files = sorted(folder.glob("consolidated.*.pth"))
    if path not in files:
        names = ", ".join(file.name for file in files[:3])
        fail(f"{path}: not part of the model in {folder}, whose weights are in {names}; name the "
             "folder, or a folder with only this file")


def hf_tensors(folder, args):
    """
    Return the Tensors of a Hugging Face folder. Exit with a message unless their names, shapes and
    types are those of a model with these ModelArgs.
    """
    files, shapes, dtypes = {}, {}, {}
    for path in weight_files(folder):
        with open_weights(path) as weights:
            for name in weights.keys():
                if name in files:
                    fail(f"{folder}: tensor {name[:80]!r} is in {files[name].name} and in "
                         f"{path.name}; one of them belongs to another model")
                stored = weights.get_slice(name)
                files[name], shapes[name], dtypes[name] = (
                    path, stored.get_shape(), stored.get_dtype())
    both = "lm_head.weight", "model.embed_tokens.weight"
    if args.tied and all(name in files for name in both) and not equal_weights(files, *both):
        fail(f"{folder}: config.json sets tie_word_embeddings, but lm_head.weight differs "
             "from model.embed_tokens.weight; set it to false there if lm_head.weight is the "
             "classifier, as transformers assumes since version 5")
    # Old files contain tables of rotary frequencies.
    ignored = {name for name in shapes if name.endswith("rotary_emb.inv_freq")}
    ignored |= {"lm_head.weight"} if args.tied else set()
    expected = ((theirs, shape) for _, _, theirs, shape in tensors(args))
    check_tensors(shapes, expected, folder, ignored)
    readers = {}
    for ours, _, theirs, _ in tensors(args):
        if dtypes[theirs] not in DTYPES:
            fail(f"{files[theirs]}: {theirs} is {dtypes[theirs]}, expected {', '.join(DTYPES)}")
        readers[ours] = partial(hf_tensor, files[theirs], theirs, heads_in(ours, args))
    return Tensors(readers, folder)


@contextlib.contextmanager
def open_weights(path):
    """Open a .safetensors file. Exit with a message if it is damaged."""
    with reading(path, "a safetensors file", fail):
        with open_safetensors(path) as weights:
            yield weights


def equal_weights(files, a, b):
    """
    Return whether the tensors named a and b are equal, comparing 1024 rows at a time. files: {name:
    path of the file that holds the tensor}.
    """
    with open_weights(files[a]) as in_a, open_weights(files[b]) as in_b:
        a, b = in_a.get_slice(a), in_b.get_slice(b)
        if a.get_shape() != b.get_shape():
            return False
        step = 1 << 10
        return all(torch.equal(a[row:row + step], b[row:row + step])
                   for row in range(0, a.get_shape()[0], step))


def hf_tensor(path, name, heads):
    """
    Return one tensor in its stored type, with the rows of heads in model.py's order. Exit with a
    message if a value is not finite, or if all values are zero in a tensor where that is a sign of
    damage.
    """
    with open_weights(path) as weights:
        return halves_to_interleaved(plausible(name, weights.get_tensor(name), path), heads)


def chat_ids(folder, vocabulary):
    """
    Return {GGUF's key: id} of up to two tokens besides EOS that end an answer, and of the padding
    token. Ids beyond the vocabulary are left out.
    """
    config, taken = generation(folder), (vocabulary.eos_id, vocabulary.bos_id)
    ends = [i for i in config["eos_token_id"] if i not in taken]
    padding = [i for i in config["pad_token_id"] if i not in taken]
    found = dict(zip((END_OF_TURN, END_OF_MESSAGE), ends))
    if padding:
        found[PADDING] = padding[0]
    return {key: i for key, i in found.items() if i < vocabulary.vocab_size}


# ---- Meta

def read_meta(folder, with_tokenizer=True):
    """
    Return (Tensors, ModelArgs, Tokenizer or None, {}) of a folder with Meta's params.json and
    consolidated.*.pth, each of which holds a slice of most tensors.
    """
    paths = sorted(folder.glob("consolidated.*.pth"))
    if not paths:
        fail(f"{folder}: expected consolidated.00.pth next to params.json")
    shards, n = [load_shard(path) for path in paths], len(paths)
    args = meta_args(folder / "params.json", shards[0], n)
    columns = shards[0]["tok_embeddings.weight"].shape[1] < args.dim

    def slices():
        for name, _, _, shape in tensors(args):  # Meta's names are model.py's
            dim = split_dim(name, shape, columns)
            yield name, tuple(size // n if i == dim else size for i, size in enumerate(shape))

    for path, shard in zip(paths, shards):
        check_tensors({name: w.shape for name, w in shard.items()}, slices(), path)
    readers = {name: partial(meta_tensor, name, shards, split_dim(name, shape, columns), folder)
               for name, _, _, shape in tensors(args)}
    vocabulary = read_hf_tokenizer(folder, args.vocab_size) if with_tokenizer else None
    return Tensors(readers, folder), args, vocabulary, {}


def load_shard(path):
    """Return {name: tensor} of a consolidated.*.pth, whose data is memory-mapped."""
    with reading(path, "weights of Meta's", fail):
        found = load_torch(path, mmap=True)
        return {name: w for name, w in found.items()
                if isinstance(w, torch.Tensor) and name != "rope.freqs"}


def meta_args(path, first, n):
    """
    Return the ModelArgs of a params.json. first: {name: tensor} of the first of n shards, whose
    shapes determine the sizes that params.json lacks.
    """
    params = {key: value for key, value in load_json(path).items() if value is not None}
    for key in params.keys() & {
            "moe", "moe_args", "quantization_args", "lora_args", "vision_chunk_size"}:
        fail(f"{path}: {key} is not supported")
    get = getter(params, path)
    dim, n_heads = get("dim", int), get("n_heads", int)
    theta, eps = get("rope_theta", float, 10000.0), get("norm_eps", float)
    scaled = get("use_scaled_rope", bool, False)
    if scaled:
        context = 131072  # tokens, Llama 3.1
    elif theta >= 5e5:
        context = 8192    # Llama 3
    else:
        context = 4096 if eps > 5e-6 else 2048  # Llama 2, Llama 1
    with reading(path.parent, "the weights of a Llama", fail):
        hidden, _ = first["layers.0.feed_forward.w1.weight"].shape
        embedding, width = first["tok_embeddings.weight"].shape
        tied = "output.weight" not in first
        rows = embedding if tied else first["output.weight"].shape[0]
    # Each shard has 1 / n of these rows, or all of them if a tied embedding is split into columns.
    if not tied or width == dim:
        rows *= n
    args = checked(ModelArgs(
        dim=dim,
        n_layers=get("n_layers", int),
        n_heads=n_heads,
        n_kv_heads=get("n_kv_heads", int, n_heads),
        vocab_size=rows,
        hidden_dim=hidden * n,
        norm_eps=eps,
        rope_theta=theta,
        tied=tied,
        max_seq_len=get("max_seq_len", int, context)), path)
    if scaled:
        default = 32.0 if dim < 4096 else 8.0  # Llama 3.2's small models, Llama 3.1
        factor = get("rope_scaling_factor", float, default)
        args.rope_factors = rope.llama3(args.head_dim, theta, factor, 1, 4, 8192)
    return checked(args, path)


def split_dim(name, shape, columns):
    """
    Return the dimension along which Meta's files split a tensor, or None if each file has all of
    it. columns: whether the embedding is split into columns, as before Llama 3.
    """
    if len(shape) == 1:
        return None
    part = name.split(".")[-2]
    return 1 if part in ("wo", "w2") or part == "tok_embeddings" and columns else 0


def meta_tensor(name, shards, dim, where):
    """
    Return a tensor that is split along `dim` into one slice per shard. If `dim` is None, every
    shard has the whole tensor. where: the folder, for messages.
    """
    whole = dim is None or len(shards) == 1
    w = shards[0][name].clone() if whole else torch.cat([shard[name] for shard in shards], dim)
    return plausible(name, w, where)
