"""
Write a model file: GGUF, llama2.c's formats, a Hugging Face folder or a page for browsers, from any
model that engine/training/load.py reads.

    python export.py out/my                      the best checkpoint of a run as out/my/model.gguf
    python export.py out/my --dtype=q8_0         ... in 8 bits
    python export.py out/my --format=v2          out/my/model.bin and tokenizer.bin, for llama2.c
    python export.py out/my --format=hf          out/my/hf, a Hugging Face folder
    python export.py out/my --format=peft        out/my/peft, the adapters of a LoRA, for PEFT
    python export.py out/my --format=html        out/my/model.html, which runs it in a browser
    python export.py model.gguf --dtype=q4_0 --path=small.gguf
    python export.py stories15M.bin --tokenizer=tokenizer.bin    a llama2.c model as GGUF
    python export.py TinyLlama-1.1B --dtype=bf16                 a Hugging Face folder, or Meta's

The formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md,
https://huggingface.co/docs/safetensors, and export.py of https://github.com/karpathy/llama2.c.
Files are written tensor by tensor under temporary names, and renamed once all are complete.
"""
import hashlib
import json
import math
import mmap
import struct
import tempfile
from pathlib import Path

from configurator import configure, fail  # first: it reports missing packages

import numpy as np
import torch

from engine.files import replacing, replacing_all
from engine.formats import rope, web_page
from engine.formats.gguf_file import is_gguf_of_ours
from engine.formats.hf_tokenizer import MADE_BY, is_folder_of_ours, is_vocabulary_of_ours
from engine.formats.layout import (
    ALIGNMENT,
    CHECKSUM,
    END_OF_MESSAGE,
    END_OF_TURN,
    FILE_TYPES,
    ITER,
    LIST_CHECKSUM,
    LLAMA2C_HEADER,
    LLAMA2C_MAGIC,
    LLAMA2C_V0,
    LLAMA2C_V1,
    NO_BYTES,
    PADDING,
    ROPE_FACTORS,
    SINGLE,
    TEMPLATE,
    TYPES,
    architecture,
    gguf_string,
    gguf_type,
    heads_in,
    interleaved_to_halves,
    is_character_level,
    padding_to,
    refuse_other_tensors,
    tensors,
)
from engine.training import checkpoint, run_folder
from engine.training.load import read_adapters, read_model
from engine.training.lora import TARGETS
from tokenizer import BYTE, LETTERS, NORMAL, UNUSED, USER_DEFINED, prefixes_first

out_dir = "out"    # what to export: a run's folder, a folder of runs (the newest), a checkpoint's
                   # folder, a Hugging Face, PEFT or Meta folder, a GGUF or llama2.c file
format = "gguf"    # gguf; hf: a Hugging Face folder; peft: the adapters of a LoRA alone, as PEFT's
                   # folder; html: a page that runs the model; llama2.c's v0: legacy float32, v1:
                   # float32, v2: int8 in groups
dtype = "f32"      # type of the matrices in gguf and html: f32, f16, bf16, q8_0, q6_k, q5_k_m,
                   # q4_k_m or q4_0; in hf: f32, f16 or bf16
group_size = 64    # values that share a scale in v2; halved until it divides dim
tokenizer = ""     # the vocabulary of a llama2.c file: a tokenizer.model, tokenizer.json or
                   # tokenizer.bin
path = ""          # output path; empty: inside the exported folder, or beside the exported file


# ---- GGUF

def floats(name, tensor, largest=SINGLE):
    """
    Yield the values of a tensor of any shape as flat float32 arrays, about a million values each.
    Exit with a message if a value is NaN or its magnitude exceeds `largest`.
    """
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    for part in rows.split(max(1, (1 << 20) // rows.shape[1])):
        x = part.to("cpu", torch.float32).reshape(-1).numpy()
        found = np.abs(x).max()
        if not found <= largest:  # also true of NaN
            remedy = ", or --dtype=f32 is needed" if largest < SINGLE else ""
            fail(f"{name} holds {found}, expected finite weights of at most {largest:.6g}; the run "
                 f"has diverged{remedy}")
        yield x


def encoded(name, tensor, dtype):
    """Yield the bytes that store a tensor as `dtype`, a key of TYPES, some rows at a time."""
    for x in floats(name, tensor, TYPES[dtype].largest):
        yield TYPES[dtype].encode(x).tobytes()


def gguf_value(value, in_list=False):
    """
    Return (GGUF's number for the type, encoded bytes) of a metadata value: a bool, int, float, str
    or bytes, or a list of one of these types.
    """
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        # A single int is uint32. The only list of ints is token_type, by convention int32.
        return (5, struct.pack("<i", value)) if in_list else (4, struct.pack("<I", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, list):
        entries = [gguf_value(entry, in_list=True) for entry in value]
        kind = entries[0][0] if entries else 8
        data = b"".join(data for _, data in entries)
        return 9, struct.pack("<IQ", kind, len(entries)) + data
    return 8, gguf_string(value)


def gguf_tokenizer_model(vocabulary):
    """
    Return tokenizer.ggml.model, the name of llama.cpp's encoder, for a vocabulary that is not
    byte-level BPE.

    "llama", the sentencepiece encoder, spells a character that is not a piece with byte pieces, and
    aborts if the vocabulary lacks them. "t5", the unigram encoder, returns <unk> for such a
    character; where every piece is one character, there is nothing to merge, so its result equals
    that of the vocabulary's own encoder. Other vocabularies without byte pieces get the name
    NO_BYTES, so that llama.cpp refuses the file.
    """
    if any(kind == BYTE for _, _, kind in vocabulary.pieces()):
        return "llama"
    return "t5" if is_character_level(vocabulary) else NO_BYTES


def vocabulary_metadata(vocabulary):
    """
    Return the keys tokenizer.ggml.* of a GGUF file. GGUF calls byte-level BPE "gpt2" and stores
    each byte of its pieces as the letter by which GPT-2 represents that byte.
    """
    pieces, scores, types = map(list, zip(*vocabulary.pieces()))
    if vocabulary.kind == "bpe":
        spelled = ["".join(LETTERS[byte] for byte in piece) if kind == NORMAL else piece
                   for piece, kind in zip(pieces, types)]
        found = {
            "model": "gpt2",
            "pre": vocabulary.pre,
            "tokens": spelled,
            "token_type": types,
            "merges": vocabulary.merges(),
        }
    else:
        found = {
            "model": gguf_tokenizer_model(vocabulary),
            "tokens": pieces,
            "scores": [float(score) for score in scores],
            "token_type": types,
            "unknown_token_id": vocabulary.unk_id,
        }
    found |= {
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": False,
        "add_space_prefix": vocabulary.add_dummy_prefix,
        "remove_extra_whitespaces": vocabulary.remove_extra_whitespaces,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def gguf_rope(args):
    """
    Return how a GGUF file stores the scaling of rotary positions: metadata {key without the
    architecture's prefix: value}, and the values of the tensor ROPE_FACTORS, () if the file has no
    such tensor.

    Readers compute linear scaling, and YaRN with its default attention factor, from metadata. The
    factors of other rules, and of YaRN with another attention factor, are stored as the tensor,
    which llama.cpp reads only for the architecture llama: for other architectures, exit. Also exit
    if args.rope_attention is not 1, since the tensor can't hold it. Readers that use the tensor
    still apply linear scaling, so an args.rope_scaling other than 1 is stored as linear scaling
    beside the tensor.
    """
    rule, kind = rope.rule(args), architecture(args)
    if not rule:
        return {}, ()
    keys = {"rope.scaling.type": rule["rope_type"], "rope.scaling.factor": rule["factor"]}
    if rule["rope_type"] == "linear":
        return keys, ()
    default_attention = "attention_factor" not in rule
    if rule["rope_type"] == "yarn" and default_attention:
        keys["rope.scaling.original_context_length"] = rule["original_max_position_embeddings"]
        return keys, ()
    if args.rope_attention != 1 or kind != "llama":
        fail(f"GGUF can't store how {kind} scales its rotary positions: {rule['rope_type']} with "
             f"rope_attention={args.rope_attention:g}; use --format=hf")
    if args.rope_scaling == 1:
        return {}, args.rope_factors
    keys = {"rope.scaling.type": "linear", "rope.scaling.factor": float(args.rope_scaling)}
    return keys, args.rope_factors


def gguf_layout(args, dtype):
    """
    Return the tensors of a GGUF file as [(name in model.py, name in GGUF, shape, type)], and the
    data of the tensor ROPE_FACTORS, empty if the file has no such tensor.
    """
    layout = [(ours, gguf, shape, gguf_type(ours, shape, dtype, args.n_layers))
              for ours, gguf, _, shape in tensors(args)]
    factors = torch.tensor(gguf_rope(args)[1])
    if len(factors):
        layout.append((ROPE_FACTORS, ROPE_FACTORS, factors.shape, "f32"))
    return layout, factors


def gguf_metadata(args, vocabulary, dtype, name, tensor_list, extra):
    """
    Return the metadata {key: value} of a GGUF file. tensor_list: the bytes of its list of tensors;
    extra: more metadata.
    """
    kind = architecture(args)
    sizes = {
        "vocab_size": args.vocab_size,
        "context_length": args.max_seq_len,
        "embedding_length": args.dim,
        "block_count": args.n_layers,
        "feed_forward_length": args.hidden_dim,
        "attention.head_count": args.n_heads,
        "attention.head_count_kv": args.n_kv_heads,
    }
    if args.head_width or args.qk_norm:
        sizes |= {"attention.key_length": args.head_dim, "attention.value_length": args.head_dim}
    sizes |= {
        "attention.layer_norm_rms_epsilon": float(args.norm_eps),
        "rope.dimension_count": args.head_dim,
        "rope.freq_base": float(args.rope_theta),
        **gguf_rope(args)[0],
    }
    return {
        # write_gguf replaces the zeros once it has written the tensors. It finds them as the first
        # 64 zeros of the header, so this key comes before any text that could hold as many.
        CHECKSUM: "0" * 64,
        LIST_CHECKSUM: hashlib.sha256(tensor_list).hexdigest(),
        "general.architecture": kind,
        "general.name": name,
        "general.alignment": ALIGNMENT,
        "general.file_type": FILE_TYPES[dtype],
        **({"general.quantization_version": 2} if dtype[0] == "q" else {}),
        **{f"{kind}.{key}": value for key, value in sizes.items()},
        **vocabulary_metadata(vocabulary),
        **extra,
    }


def gguf_header(args, vocabulary, dtype, name, extra):
    """
    Return the header of a GGUF file, version 3: counts, metadata, the list of tensors (name, shape,
    type, offset of each), padding.
    """
    tensor_list, offset = b"", 0
    layout, _ = gguf_layout(args, dtype)
    for _, gguf, shape, kind in layout:
        stored = TYPES[kind]
        tensor_list += gguf_string(gguf)
        tensor_list += struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        tensor_list += struct.pack("<IQ", stored.number, offset)
        offset += math.prod(shape) // stored.block * stored.size
        offset += padding_to(offset, ALIGNMENT)
    metadata = gguf_metadata(args, vocabulary, dtype, name, tensor_list, extra)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(layout), len(metadata))
    for key, value in metadata.items():
        number, data = gguf_value(value)
        header += gguf_string(key) + struct.pack("<I", number) + data
    header += tensor_list
    return header + bytes(padding_to(len(header), ALIGNMENT))


def refuse_unexportable(args, vocabulary, extra):
    """
    Exit with a message if GGUF cannot store the settings of a model, such as a number beyond 32
    bits. train.py calls this before its first step; extra[ITER] is then max_iters, the last step
    that an export of the run can have.
    """
    try:
        gguf_header(args, vocabulary, "f32", "", extra)
    except (OverflowError, struct.error):
        limits = {int: 2 ** 32 - 1, float: SINGLE}
        numbers = vars(args) | {"max_iters": extra[ITER]}
        large = [f"{key}={value:g}" for key, value in numbers.items()
                 if type(value) in limits and abs(value) > limits[type(value)]]
        fail(f"GGUF can't hold {', '.join(large) or 'these settings'}: expected whole numbers up "
             f"to {2 ** 32 - 1} and other numbers up to {SINGLE:.3g}")


def write_gguf(path, state, args, dtype, header):
    """
    Write the header, then the tensors, each padded to the alignment, then put the tensors' checksum
    into the header.
    """
    layout, factors = gguf_layout(args, dtype)
    # For the architecture llama, GGUF orders the rows of each head as model.py does; for other
    # architectures, as Hugging Face does.
    reorder = architecture(args) != "llama"
    digest = hashlib.sha256()
    with replacing(path) as f:
        f.write(header)
        for name, _, _, kind in layout:
            w = factors if name == ROPE_FACTORS else state[name]
            if reorder:
                w = interleaved_to_halves(w, heads_in(name, args))
            for data in encoded(name, w, kind):
                f.write(data)
                digest.update(data)
            padding = bytes(padding_to(f.tell(), ALIGNMENT))
            f.write(padding)
            digest.update(padding)
        f.seek(header.index(b"0" * 64))
        f.write(digest.hexdigest().encode())


def write_html(path, state, args, vocabulary, dtype, name, extra):
    """Write a page that runs the model in a browser: one file, with the model as GGUF inside."""
    module = web_page.program()
    layout, _ = gguf_layout(args, dtype)
    size = sum(math.prod(shape) // TYPES[kind].block * TYPES[kind].size
               for _, _, shape, kind in layout)
    if size > web_page.MAX_BYTES:
        fail(f"the weights have {size / 1e6:.0f} MB as {dtype}, expected at most "
             f"{web_page.MAX_BYTES / 1e6:.0f} MB in a page; try --dtype=q8_0 or q4_k_m")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write_gguf(file, state, args, dtype, gguf_header(args, vocabulary, dtype, name, extra))
        model = file.read_bytes()
    facts = f"{size / 1e6:.3g} MB of weights as {dtype.upper()}, all in this file"
    with replacing(path) as f:
        f.write(web_page.page(name, facts, module, model))


def exported_step(path):
    """Return the training step of the model in a GGUF file, None if there is no file or no step."""
    try:
        with (open(path, "rb") as f,
              mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data):
            key = gguf_string(ITER)
            at = data.find(key)
            value_at = at + len(key) + 4  # 4 bytes of type lie between key and value
            return struct.unpack_from("<I", data, value_at)[0] if at >= 0 else None
    except (OSError, ValueError, struct.error):  # ValueError: the file is empty
        return None


# ---- llama2.c

def refuse_beyond_llama2c(args):
    """
    Exit with a message if a setting that llama2.c's formats do not store differs from the value
    that their readers assume.
    """
    implied = {"norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": 1.0, "rope_attention": 1.0,
               "rope_factors": (), "head_width": 0, "qkv_bias": False, "qk_norm": False}
    for key, value in implied.items():
        found = getattr(args, key)
        if found != value:
            fail(f"the model has {key}={str(found)[:40]}, llama2.c's formats imply {value}; use "
                 "--format=gguf")


def fitting_group_size(args, group_size):
    """
    Return the group size of v2, halved until it divides dim. Print a line if it was halved, and one
    if llama2.c's runq cannot read such groups.
    """
    if group_size < 1:
        fail(f"--group_size={group_size}: expected at least 1, such as 64")
    asked = group_size
    while args.dim % group_size:
        group_size //= 2
    if group_size != asked:
        print(f"groups of {group_size}: {asked} does not divide dim={args.dim}")
    if args.hidden_dim % group_size:
        print(f"groups of {group_size} do not divide the rows of w2, hidden_dim={args.hidden_dim}: "
              "./run reads such a file, llama2.c's runq does not; for runq choose a --group_size "
              f"that divides {args.dim} and {args.hidden_dim}")
    return group_size


def frequency_tables(args):
    """
    Return the tables of cos and sin (max_seq_len, head_dim / 2) that v0 stores and readers skip.
    They are computed in float32, as by llama2.c's export.py, so that the bytes are the same.
    """
    i = torch.arange(0, args.head_dim, 2).float()
    frequency = 1.0 / (args.rope_theta ** (i / args.head_dim))
    angle = torch.outer(torch.arange(args.max_seq_len), frequency).float()
    return angle.cos(), angle.sin()


def to_groups(x, group_size):
    """
    Quantise a float32 array to int8 (n, group_size) and float32 scales (n,). Ties are rounded to
    even, as by llama2.c.
    """
    groups = x.reshape(-1, group_size)
    scale = np.abs(groups).max(axis=1) / np.float32(127)
    return np.rint(groups / np.where(scale == 0, 1, scale)[:, None]).astype(np.int8), scale


def llama2c_sizes(args, version):
    """
    Return the bytes of the header's seven int32. In version 0 a negative vocabulary size means that
    the classifier is a tensor of its own, not tied to the embedding.
    """
    vocab_size = args.vocab_size if version or args.tied else -args.vocab_size
    return struct.pack("<7i", args.dim, args.hidden_dim, args.n_layers, args.n_heads,
                       args.n_kv_heads, vocab_size, args.max_seq_len)


def write_llama2c(f, state, args, version, group_size):
    """
    Write llama2.c's version 0, 1 or 2 to an open file: a header of ints, then the tensors, ordered
    by kind: wq of all layers, then wk of all layers, and so on.
    """
    header = llama2c_sizes(args, version)
    if version:
        header = struct.pack("<Ii", LLAMA2C_MAGIC, version) + header + struct.pack("<B", args.tied)
        header += struct.pack("<i", group_size) if version == 2 else b""
        header += bytes(LLAMA2C_HEADER - len(header))
    f.write(header)
    for name, _, _, shape in tensors(args, LLAMA2C_V1 if version else LLAMA2C_V0):
        if version == 2 and len(shape) == 2:
            x = np.concatenate(list(floats(name, state[name])))
            q, scale = to_groups(x, group_size)
            f.write(q.tobytes() + scale.tobytes())
        else:
            f.writelines(encoded(name, state[name], "f32"))
        if version == 0 and name == "norm.weight":
            f.writelines(table.numpy().tobytes() for table in frequency_tables(args))


# ---- Hugging Face

def write_safetensors(f, shapes, read, dtype):
    """
    Write tensors to an open file: a uint64 length, a JSON header of that length, the data. shapes:
    {name: shape}; read: returns the tensor of a name. The safetensors library would need all
    tensors in memory at once.
    """
    header, offset = {"__metadata__": {"format": "pt"} | MADE_BY}, 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * TYPES[dtype].size
        header[name] = {"dtype": dtype.upper(), "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * padding_to(len(text), 8)
    f.write(struct.pack("<Q", len(text)) + text)
    for name in shapes:
        f.writelines(encoded(name, read(name), dtype))


def hf_config(args, vocabulary, dtype):
    """Return the content of config.json."""
    kind = architecture(args)
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "hidden_act": "silu",
        "attention_bias": False,
        "hidden_size": args.dim,
        "intermediate_size": args.hidden_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "vocab_size": args.vocab_size,
        "max_position_embeddings": args.max_seq_len,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "tie_word_embeddings": args.tied,
        "rope_scaling": rope.rule(args) or None,
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "torch_dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype],
    }


def hf_generation_config(args, vocabulary, extra):
    """
    Return the content of generation_config.json. Generation ends at EOS, at BOS (a model that
    emits it begins another text), and at the ids in `extra` that end a turn or a message.
    """
    ends = [extra[key] for key in (END_OF_TURN, END_OF_MESSAGE) if key in extra]
    return {
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": [vocabulary.eos_id, vocabulary.bos_id, *ends],
        "pad_token_id": extra.get(PADDING, vocabulary.eos_id),
        "max_length": args.max_seq_len,
    }


def hf_tokenizer_config(args, vocabulary, extra):
    """
    Return the content of tokenizer_config.json. With split_special_tokens, "<s>" in a text is
    encoded as three characters, never as the special token, as by tokenizer.py and ./run. A chat
    template needs the opposite: transformers encodes what it writes as one text.
    """
    pieces = vocabulary.pieces()
    ids = {"unk": vocabulary.unk_id, "bos": vocabulary.bos_id, "eos": vocabulary.eos_id}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": args.max_seq_len}
    config |= {f"{name}_token": pieces[i][0].decode() for name, i in ids.items() if i is not None}
    if not vocabulary.add_bos:
        config["add_bos_token"] = False  # for llama.cpp's converter
    template = extra.get(TEMPLATE)
    config |= {"split_special_tokens": not template, "clean_up_tokenization_spaces": False,
               "model_input_names": ["input_ids", "attention_mask"]}
    if isinstance(template, bytes):
        template = template.decode(errors="replace")
    return config | ({"chat_template": template} if isinstance(template, str) else {})


def write_hf(path, state, args, vocabulary, dtype, extra):
    """
    Write a Hugging Face folder: model.safetensors, the configs and the tokenizer. extra: GGUF
    metadata, of which the ids that end an answer and the chat template are written.
    """
    folder = Path(path)
    if args.qkv_bias and args.qk_norm:
        fail("transformers has no model with both qkv_bias and qk_norm; use --format=gguf")
    ours, shapes = {}, {}  # by Hugging Face's name of the tensor
    for name, _, theirs, shape in tensors(args):
        ours[theirs], shapes[theirs] = name, shape

    def read(theirs):
        return interleaved_to_halves(state[ours[theirs]], heads_in(ours[theirs], args))

    def write_weights(f):
        write_safetensors(f, shapes, read, dtype)

    configs = {"config": hf_config(args, vocabulary, dtype)}
    configs |= tokenizer_configs(args, vocabulary, extra)
    write_folder(folder / "model.safetensors", write_weights, configs, vocabulary)


def tokenizer_configs(args, vocabulary, extra):
    """Return {name: content} of the .json files of a Hugging Face folder about its tokens."""
    return {
        "generation_config": hf_generation_config(args, vocabulary, extra),
        "tokenizer_config": hf_tokenizer_config(args, vocabulary, extra),
        "tokenizer": vocabulary.hugging_face(),
    }


def write_folder(weights, write_weights, configs, vocabulary):
    """
    Write the files of a Hugging Face or PEFT folder, all or none. weights: path of the file that
    write_weights(open file) writes; configs: {name: content} of the .json files beside it.
    """
    folder = weights.parent
    folder.mkdir(exist_ok=True)
    had_our_vocabulary = is_vocabulary_of_ours(folder)
    with replacing_all() as writing:
        with writing(weights) as f:
            write_weights(f)
        for name, content in configs.items():
            with writing(folder / f"{name}.json") as f:
                f.write(json.dumps(content, indent=1).encode())
        if vocabulary.kind == "sentencepiece":
            with writing(folder / "tokenizer.model") as f:
                f.write(vocabulary.data)
    if vocabulary.kind != "sentencepiece" and had_our_vocabulary:
        # A reader would prefer this file of an earlier export to the new tokenizer.json.
        (folder / "tokenizer.model").unlink(missing_ok=True)


# ---- PEFT

def peft_config(state, args, lora, base):
    """Return the content of adapter_config.json. base: path of the model that is adapted."""
    rows = None
    if "tok_embeddings.new_rows" in state:
        new = [*range(lora.frozen_rows, args.vocab_size)]
        rows = new if args.tied else {"embed_tokens": new, "lm_head": new}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [TARGETS[name] for name in lora.targets],
        # Only the rows of new tokens, where modules_to_save would hold whole embeddings. PEFT reads
        # them for a base model that has been resized to the tokenizer, as AutoPeftModel does.
        "trainable_token_indices": rows,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
    }


def write_peft(path, adapters, args, vocabulary, extra):
    """
    Write a folder that PEFT loads: adapter_config.json, adapter_model.safetensors and, since new
    tokens are part of the adapter, the tokenizer. adapters: what load.read_adapters returns; extra:
    as for write_hf.
    """
    state, lora, base = adapters
    for line in differences(vocabulary, "hf"):
        print(line)
    found = {}  # {PEFT's name: tensor}
    for name, _, theirs, _ in tensors(args):
        ours = name.removesuffix(".weight")
        theirs = "base_model.model." + theirs.removesuffix(".weight")
        if f"{ours}.lora_A" in state:
            found[f"{theirs}.lora_A.weight"] = state[f"{ours}.lora_A"]
            found[f"{theirs}.lora_B.weight"] = interleaved_to_halves(state[f"{ours}.lora_B"],
                                                                     heads_in(name, args))
        if f"{ours}.new_rows" in state:
            found[f"{theirs}.token_adapter.trainable_tokens_delta"] = state[f"{ours}.new_rows"]

    def write_weights(f):
        shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
        write_safetensors(f, shapes, found.get, "f32")

    configs = {"adapter_config": peft_config(state, args, lora, base)}
    configs |= tokenizer_configs(args, vocabulary, extra)
    write_folder(Path(path) / "adapter_model.safetensors", write_weights, configs, vocabulary)
    if checkpoint.is_own(base) or not (Path(base) / "config.json").exists():
        print(f"PEFT needs {base} as a Hugging Face folder; to write it: python export.py {base} "
              "--format=hf")


# ---- any format

# The values of --dtype that each format accepts. v2 is always int8: it accepts only --dtype's
# default, f32, which has no effect on it.
FORMATS = {"gguf": tuple(FILE_TYPES), "hf": ("f32", "f16", "bf16"), "v0": ("f32",), "v1": ("f32",),
           "v2": ("f32",), "peft": ("f32",), "html": tuple(FILE_TYPES)}


def differences(vocabulary, format):
    """
    Yield a message for each way in which readers of a format may encode a text differently from
    `vocabulary`.
    """
    kinds = {kind for _, _, kind in vocabulary.pieces()}
    other = "llama.cpp" if format == "gguf" else "transformers"
    # A byte-level BPE has no normalizer but NFC, and tokenizer.json can store NFC exactly: no
    # message.
    if vocabulary.normalizer != "identity" and (format, vocabulary.kind) != ("hf", "bpe"):
        problem = ("transformers combines accents differently" if format == "hf"
                   else "model files can't store that rule")
        yield (f"the vocabulary rewrites text by {vocabulary.normalizer} and {problem}: unusual "
               "characters of a prompt may be encoded differently")
    if vocabulary.kind == "bpe" or format == "html":  # a page encodes as ./run does
        return
    if format == "gguf" and gguf_tokenizer_model(vocabulary) == NO_BYTES:
        yield ("the vocabulary has no byte pieces, which llama.cpp needs: it will refuse this "
               "file, ./run reads it")
    elif format == "gguf" and vocabulary.remove_extra_whitespaces:
        yield ("the vocabulary removes extra spaces, llama.cpp keeps them: it will encode such "
               "texts differently from ./run")
    if format == "gguf" and USER_DEFINED in kinds and vocabulary.add_dummy_prefix:
        yield ("llama.cpp puts a space after each user-defined piece: it will encode texts with "
               "them differently from ./run")
    if format in ("gguf", "hf") and UNUSED in kinds:
        yield (f"the vocabulary has unused pieces, which ./run splits and {other} keeps: it may "
               "encode texts differently from ./run")
    if format == "hf" and prefixes_first(vocabulary):
        yield ("transformers puts no space before a text that begins with one: it encodes such a "
               "text differently from ./run, except in conversations")
    if format not in ("gguf", "hf") and not vocabulary.add_dummy_prefix:
        yield ("llama2.c's tokenizer.bin implies a space before every text, this vocabulary "
               "adds none; --format=gguf can store that")


def export_model(model_state, args, vocabulary, path, format="gguf", dtype="f32", group_size=64,
                 name="llamac", extra=None):
    """
    Write a model file, or the folder of a Hugging Face model. Raise OSError if it cannot be
    written, such as on a full disk; all files of an earlier export then stay unchanged.

    model_state: state_dict of a Transformer; args: its ModelArgs; vocabulary: its Tokenizer, which
    may be None for v0, v1 and v2; group_size: for v2; name: GGUF's general.name; extra: more GGUF
    metadata.
    """
    if format not in FORMATS:
        fail(f"--format={format}: expected {' or '.join(FORMATS)}")
    if dtype not in FORMATS[format]:
        fail(f"--dtype={dtype}: expected {' or '.join(FORMATS[format])} with --format={format}")
    if not vocabulary and format in ("gguf", "hf", "html"):
        fail(f"--format={format} needs the vocabulary; give --tokenizer=tokenizer.model (or .json, "
             "or llama2.c's .bin)")
    refuse_other_tensors(model_state, args)
    if vocabulary:
        if vocabulary.vocab_size != args.vocab_size:
            fail(f"the vocabulary has {vocabulary.vocab_size} pieces and the model "
                 f"{args.vocab_size}, expected the same")
        for line in differences(vocabulary, format):
            print(line)
    extra = extra or {}
    if format == "gguf":
        header = gguf_header(args, vocabulary, dtype, name, extra)
        write_gguf(path, model_state, args, dtype, header)
    elif format == "hf":
        write_hf(path, model_state, args, vocabulary, dtype, extra)
    elif format == "html":
        write_html(path, model_state, args, vocabulary, dtype, name, extra)
    else:
        refuse_beyond_llama2c(args)
        version = int(format[1])
        group_size = fitting_group_size(args, group_size) if version == 2 else 1
        tokenizer_bin = vocabulary.tokenizer_bin() if vocabulary else None
        with replacing_all() as writing:
            with writing(path) as f:
                write_llama2c(f, model_state, args, version, group_size)
            if tokenizer_bin:
                with writing(Path(path).with_name("tokenizer.bin")) as f:
                    f.write(tokenizer_bin)


# ---- the command

TOKENIZER_FILES = ("generation_config.json", "tokenizer_config.json", "tokenizer.json",
                   "tokenizer.model")
HF_FILES = ("model.safetensors", "config.json", *TOKENIZER_FILES)
PEFT_FILES = ("adapter_model.safetensors", "adapter_config.json", *TOKENIZER_FILES)


def is_bin_of_run(path, args):
    """
    Return whether a llama2.c file seems to be an export of this model: it is the model.bin of a
    run's folder and its header has the same sizes. llama2.c's formats do not name their writer.
    """
    if path.name != "model.bin" or not run_folder.is_run(path.absolute().parent):
        return False
    with open(path, "rb") as f:
        head = f.read(36)
    # v1 and v2 have the same sizes, after 8 bytes of magic number and version.
    return llama2c_sizes(args, 0) == head[:28] or llama2c_sizes(args, 1) == head[8:]


def refuse_foreign(target, format, args, vocabulary):
    """Exit with a message if an export would replace a file that is not an earlier export."""
    # {file that the export writes: function that returns whether it is an earlier export}
    if format == "gguf":
        checks = {target: is_gguf_of_ours}
    elif format == "html":
        checks = {target: web_page.is_page_of_ours}
    elif format in ("hf", "peft"):
        names = HF_FILES if format == "hf" else PEFT_FILES
        checks = {target / name: lambda path: is_folder_of_ours(target) for name in names}
        checks[target / "tokenizer.model"] = lambda path: is_vocabulary_of_ours(target)
    else:
        checks = {target: lambda path: is_bin_of_run(path, args)}
        if vocabulary:
            tokenizer_bin = target.with_name("tokenizer.bin")
            checks[tokenizer_bin] = lambda path: path.read_bytes() == vocabulary.tokenizer_bin()
    for path, is_ours in checks.items():
        is_device = path.exists() and not path.is_file() and not path.is_dir()
        if is_device or path.is_file() and not is_ours(path):
            fail(f"{path}: exists and is not known to be an export; move it, or give another "
                 "--path")


def main():
    """Export the model that --out_dir names."""
    origin = checkpoint.newest_run(out_dir)
    source = Path(origin)
    names = {"gguf": "model.gguf", "hf": "hf", "peft": "peft", "html": "model.html"}
    name = names.get(format, "model.bin")
    target = Path(path or source / name)
    if not path and not source.is_dir():  # beside stories15M.bin: stories15M.gguf, or the folder hf
        target = source.with_name(name.replace("model", source.stem))
    if source.is_file() and target.exists() and target.samefile(source):
        fail(f"{target}: would overwrite the model to export; give another --path")
    state, args, vocabulary, extra = read_model(origin, tokenizer)
    adapters = read_adapters(origin) if format == "peft" else None
    resolved = source.resolve()
    # A folder's name may have a dot, such as Qwen2.5-0.5B.
    model_name = resolved.stem if source.is_file() else resolved.name
    try:
        if format in FORMATS:  # export_model reports other formats
            refuse_foreign(target, format, args, vocabulary)
        if adapters:
            write_peft(target, adapters, args, vocabulary, extra)
        else:
            export_model(state, args, vocabulary, target, format, dtype, group_size, model_name,
                         extra)
    except OSError as e:
        fail(f"{target}: cannot be written ({e.strerror or e}); no file was replaced")
    print(f"wrote {target}")


if __name__ == "__main__":
    configure(globals(), positional="out_dir")
    main()
