"""
Read folders of LoRA adapters that PEFT wrote, adapter_config.json and adapter_model.safetensors,
and merge them into the weights of their base model. The program exits with a message that names the
first setting or tensor that could change the result and is not supported.
https://huggingface.co/docs/peft
"""
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from configurator import fail
from engine.advice import hub
from engine.formats.hf_tokenizer import load_json, printable
from engine.formats.huggingface import open_weights
from engine.formats.layout import halves_to_interleaved, heads_in, tensors
from engine.formats.reader import Tensors, getter, plausible

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Keys of an adapter_config.json that may have any value: they are read below, do not change what
# trained adapters compute, or only list the matrices that have an adapter, which the names of the
# tensors show too.
KNOWN = set("""
    peft_type r lora_alpha use_rslora trainable_token_indices base_model_name_or_path peft_version
    task_type inference_mode revision auto_mapping lora_dropout init_lora_weights target_modules
    exclude_modules layers_to_transform layers_pattern modules_to_save rank_pattern megatron_core
    megatron_config qalora_group_size runtime_config ensure_weight_tying eva_config
    """.split())
# {key: the only value accepted}; any other key must be missing, null, False or empty.
FIXED = {"peft_type": "LORA", "bias": "none"}
# Accepted values of init_lora_weights. Other initializations also change the base model.
INITS = True, False, "gaussian", "orthogonal", "eva"
# Names of tensors: "base_model.model.", the name of a module, and a suffix
LORA = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
ROWS = re.compile(r"base_model\.model\.(.+)\.token_adapter\.trainable_tokens_delta")
WHOLE = re.compile(r"base_model\.model\.(model\.embed_tokens|lm_head)(?:\.base_layer)?\.weight")


def is_adapter(folder):
    return (folder / CONFIG).exists()


def read_config(folder):
    """Return the content of an adapter_config.json. Exit with a message if it is not supported."""
    path = folder / CONFIG
    config = load_json(path)
    for key, value in config.items():
        if key in FIXED:
            is_known = value == FIXED[key]
        elif key == "init_lora_weights":
            is_known = value in INITS
        else:
            is_known = key in KNOWN or not value
        if not is_known:
            expected = f", expected {FIXED[key]}" if key in FIXED else ""
            fail(f"{path}: {printable(key)}={printable(value)} is not supported{expected}; merge "
                 "the adapter first, with merge_and_unload() of the package peft")
    return config


def base_path(folder, config):
    """
    Return the path of the base model that an adapter names, relative to the working directory or to
    the adapter's folder.
    """
    name = getter(config, folder / CONFIG)("base_model_name_or_path", str)
    for path in (Path(name), folder / name):
        if name and path.exists():
            if is_adapter(path):
                fail(f"{folder / CONFIG}: its base model {path} is an adapter too; merge that one "
                     "first, with merge_and_unload() of the package peft")
            return path
    return fail(f"{folder / CONFIG}: its base model {printable(name)} is not a path here; set "
                f"base_model_name_or_path to that of its folder{hub(name)}")


def merged(folder, config, state, args):
    """
    Return (Tensors of a base model with the adapter merged in, ModelArgs). Matrices that the
    adapter changes are in float32; those that it replaces as a whole keep their stored type. state,
    args: Tensors and ModelArgs of the base model. The vocabulary may grow.
    """
    path = folder / WEIGHTS
    if not path.exists():
        fail(f"{folder}: expected {WEIGHTS}, which save_pretrained of the package peft writes")
    with open_weights(path) as weights:
        found = {name: plausible(name, weights.get_tensor(name), path) for name in weights.keys()}
    both = [f"base_model.model.{name}.weight" for name in ("model.embed_tokens", "lm_head")]
    trains_embedding = "embed_tokens" in (config.get("modules_to_save") or [])
    if (args.tied and trains_embedding and both[0] in found and both[1] not in found
            and not config.get("ensure_weight_tying")):
        fail(f"{folder}: modules_to_save has embed_tokens without lm_head, so in PEFT the "
             "classifier is no longer tied to the embedding, which is not supported; expected "
             "ensure_weight_tying=true, or merge it first, with merge_and_unload() of the package "
             "peft")
    if args.tied and all(name in found for name in both) and torch.equal(*map(found.get, both)):
        del found[both[1]]  # a second copy of the tied matrix
    ours = {theirs.removesuffix(".weight"): (name, shape)
            for name, _, theirs, shape in tensors(args) if len(shape) == 2}
    products, rows, whole = {}, {}, {}
    for key, tensor in found.items():
        lora, new, full = LORA.fullmatch(key), ROWS.fullmatch(key), WHOLE.fullmatch(key)
        module = (lora or new or full or [key, ""])[1]
        is_table = module in ("model.embed_tokens", "lm_head")
        if module not in ours or (new and not is_table):
            fail(f"{path}: {key[:100]!r} is not an adapter of a matrix of this model, or of a kind "
                 "that is not supported; merge it first, with merge_and_unload() of the package "
                 "peft")
        name, shape = ours[module]
        if lora:
            products.setdefault(name, {})[lora[2]] = tensor.float()
        elif new:
            indices = token_indices(config, module.split(".")[-1], folder / CONFIG)
            rows[name] = indices, tensor.float()
        else:
            whole[name] = tensor
    shapes = dict(ours.values())
    for name, parts in products.items():
        check_product(name, parts, shapes[name], path)
    alpha = getter(config, folder / CONFIG)("lora_alpha", float, 8.0)  # PEFT's default

    def scale(rank):
        return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    args = replace(args, vocab_size=new_vocab_size(args, rows, whole, path))

    def read(name):
        w = whole[name] if name in whole else state[name]
        if name in products:
            a, b = products[name]["A"], products[name]["B"]
            w = w.float() + scale(len(a)) * (halves_to_interleaved(b, heads_in(name, args)) @ a)
        if name in rows:
            indices, values = rows[name]
            missing = args.vocab_size - len(w)
            w = torch.cat((w.float(), values.new_zeros(missing, values.shape[1])))
            w[indices] = values
        return w

    return Tensors({name: partial(read, name) for name in state}, folder), args


def token_indices(config, module, where):
    """Return trainable_token_indices for a module, "embed_tokens" or "lm_head"."""
    indices = config.get("trainable_token_indices")
    if isinstance(indices, dict):
        indices = indices.get(module)
    is_valid = isinstance(indices, list) and all(type(i) is int and i >= 0 for i in indices)
    if not is_valid or len({*indices}) != len(indices):
        fail(f"{where}: trainable_token_indices is {printable(indices)}, expected the ids of the "
             f"tokens of {module} that the adapter has")
    return indices


def check_product(name, parts, shape, path):
    """
    Exit with a message unless `parts`, {"A": tensor, "B": tensor} of an adapter, fit a matrix of
    this shape.
    """
    if parts.keys() != {"A", "B"}:
        fail(f"{path}: the adapter of {name} has only {'/'.join(parts)}, expected A and B")
    a, b = tuple(parts["A"].shape), tuple(parts["B"].shape)
    if len(a) != 2 or not a[0] or a[1] != shape[1] or b != (shape[0], a[0]):
        fail(f"{path}: the adapter of {name} {shape} has the shapes {a} and {b}, expected (r, "
             f"{shape[1]}) and ({shape[0]}, r)")


def new_vocab_size(args, rows, whole, path):
    """
    Return the vocabulary size of the model with an adapter. rows: {name: (indices, new rows)};
    whole: {name: replaced tensor}. Exit with a message if embedding and classifier would get
    different sizes, or if a new token has no row.
    """
    sizes = {}
    for name in ("tok_embeddings.weight", "output.weight"):
        size = len(whole[name]) if name in whole else args.vocab_size
        indices, values = rows.get(name, ([], torch.empty(0, args.dim)))
        new = {i for i in indices if i >= size}
        if values.shape != (len(indices), args.dim) or new != {*range(size, size + len(new))}:
            fail(f"{path}: the rows of {name} are {tuple(values.shape)} for the tokens "
                 f"{printable(indices)}, expected a row of {args.dim} numbers for each of them, "
                 f"and for each token from {size} on")
        if name in whole and whole[name].shape != (size, args.dim):
            fail(f"{path}: {name} has shape {tuple(whole[name].shape)}, expected rows of "
                 f"{args.dim}")
        sizes[name] = size + len(new)
    if args.tied:
        del sizes["output.weight"]
    if len({*sizes.values()}) > 1:
        fail(f"{path}: embedding and classifier have {' and '.join(map(str, sizes.values()))} "
             "tokens, expected the same number")
    return sizes["tok_embeddings.weight"]
