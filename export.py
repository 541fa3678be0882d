"""
Checkpoint ⇄ model file.

    python export.py out/my                      the best checkpoint of a run as out/my/model.gguf
    python export.py out/my --dtype=q8_0         ... in 8 bits
    python export.py out/my --format=v2          out/my/model.bin and tokenizer.bin, for llama2.c and its ports
    python export.py out/my --format=hf          out/my/hf, a Hugging Face folder
    python export.py model.gguf --dtype=q4_0 --path=small.gguf
    python export.py stories15M.bin --tokenizer=tokenizer.bin    a llama2.c model as GGUF
    python export.py TinyLlama-1.1B --dtype=bf16                 a Hugging Face folder, or Meta's

The formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, https://huggingface.co/docs/safetensors, and
export.py of https://github.com/karpathy/llama2.c. A file is written tensor by tensor under a temporary name, then renamed.
"""
import hashlib
import json
import math
import mmap
import struct
from pathlib import Path

from configurator import configure, fail  # first: it answers for packages that are missing

import numpy as np
import torch

from engine.formats import rope
from engine.training import checkpoint, run_folder
from engine.files import replacing, write_atomic
from engine.formats.layout import (ALIGNMENT, CHECKSUM, END_OF_MESSAGE, END_OF_TURN, FILE_TYPES, ITER, LIST_CHECKSUM,
                                   LLAMA2C_HEADER, LLAMA2C_MAGIC, LLAMA2C_V0, LLAMA2C_V1, NO_BYTES, PADDING, ROPE_FACTORS, SINGLE,
                                   TEMPLATE, TYPES,
                            architecture, gap, gguf_string, gguf_type, heads_in, interleaved_to_halves, of_characters,
                            refuse_leftovers, tensors)
from engine.formats.hf_vocabulary import is_vocabulary_of_ours
from engine.formats.hf_vocabulary import MADE_BY, is_folder_of_ours
from engine.formats.gguf_file import is_gguf_of_ours
from engine.training.load import read_model
from tokenizer import BYTE, LETTERS, NORMAL, UNUSED, USER_DEFINED

out_dir = "out"    # what to export: a run, runs (the newest), a step, a Hugging Face or Meta folder, a GGUF or llama2.c file
format = "gguf"    # gguf; v0, v1, v2 (llama2.c: legacy float32, float32, int8 in groups); hf (a Hugging Face folder)
dtype = "f32"      # of the matrices in gguf: f32, f16, bf16, q8_0, q6_k, q5_k_m, q4_k_m or q4_0; in hf: f32, f16 or bf16
group_size = 64    # values that share a scale in v2; halved until it divides dim
tokenizer = ""     # the vocabulary of a llama2.c file: a tokenizer.model, tokenizer.json or tokenizer.bin
path = ""          # where to write; empty: beside what is exported


def floats(name, tensor, largest=SINGLE):
    """Yields a tensor (any shape), some rows at a time, as flat float32 arrays that hold nothing beyond `largest`."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    for part in rows.split(max(1, (1 << 20) // rows.shape[1])):
        x = part.to("cpu", torch.float32).reshape(-1).numpy()
        if not np.abs(x).max() <= largest:  # NaN is not, either
            fail(f"{name} holds {np.abs(x).max()}, expected finite weights of at most {largest:.6g}; "
                 f"the run has diverged, or --dtype=f32 is needed")
        yield x


def encoded(name, tensor, dtype):
    """Yields the bytes of a tensor as `dtype`, some rows at a time."""
    for x in floats(name, tensor, TYPES[dtype].largest):
        yield TYPES[dtype].encode(x).tobytes()


def gguf_value(value, in_list=False):
    """(GGUF's number of the type, bytes) of a bool, int, float, str or bytes, or a list of one of them."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):  # counts are unsigned; token types, the one list of ints, are signed by convention
        return (5, struct.pack("<i", value)) if in_list else (4, struct.pack("<I", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, list):
        parts = [gguf_value(v, in_list=True) for v in value]
        return 9, struct.pack("<IQ", parts[0][0] if parts else 8, len(parts)) + b"".join(data for _, data in parts)
    return 8, gguf_string(value)


def gguf_tokenizer(vocabulary):
    """
    The name of the encoder that llama.cpp shall use. "llama", its sentencepiece BPE, ends the program at a character
    that is no piece where no byte pieces are; "t5", its unigram encoder, gives <unk> for a run of those, and for pieces
    of one character, which nothing merges, it is the same otherwise. NO_BYTES is a name that llama.cpp refuses.
    """
    if any(kind == BYTE for _, _, kind in vocabulary.pieces()):
        return "llama"
    return "t5" if of_characters(vocabulary) else NO_BYTES


def vocabulary_metadata(vocabulary):
    """The keys tokenizer.ggml.* of a GGUF file. Byte-level BPE, there "gpt2", is spelled in GPT-2's letters of bytes."""
    pieces, scores, types = (list(column) for column in zip(*vocabulary.pieces()))
    if vocabulary.kind == "bpe":
        letters = ["".join(LETTERS[b] for b in piece) if kind == NORMAL else piece for piece, kind in zip(pieces, types)]
        own = {"model": "gpt2", "pre": vocabulary.pre, "tokens": letters, "token_type": types, "merges": vocabulary.merges()}
    else:
        own = {"model": gguf_tokenizer(vocabulary), "tokens": pieces, "scores": [float(score) for score in scores],
               "token_type": types, "unknown_token_id": vocabulary.unk_id}
    own |= {"bos_token_id": vocabulary.bos_id, "eos_token_id": vocabulary.eos_id, "add_bos_token": vocabulary.add_bos,
            "add_eos_token": False, "add_space_prefix": vocabulary.add_dummy_prefix,
            "remove_extra_whitespaces": vocabulary.remove_extra_whitespaces}
    return {f"tokenizer.ggml.{key}": value for key, value in own.items()}


def gguf_rope(args):
    """
    (keys after the architecture's name, ROPE_FACTORS where there is such a tensor). YaRN is named, since programs compute it
    themselves; other factors are a tensor, which llama.cpp has for llama alone.
    """
    rule, kind = rope.rule(args), architecture(args)
    found = {f"rope.scaling.{key}": value for key, value in (("type", rule.get("rope_type")), ("factor", rule.get("factor")))}
    if not rule or rule["rope_type"] == "linear":
        return found if rule else {}, ()
    if rule["rope_type"] == "yarn" and "attention_factor" not in rule:
        return found | {"rope.scaling.original_context_length": rule["original_max_position_embeddings"]}, ()
    if args.rope_attention != 1 or kind != "llama":
        fail(f"GGUF can't say how {kind} slows its rotary positions, by {rule['rope_type']} with "
             f"rope_attention={args.rope_attention:g}; use --format=hf")
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": float(args.rope_scaling)}
    return linear if args.rope_scaling != 1 else {}, args.rope_factors


def gguf_metadata(args, vocabulary, dtype, name, infos, extra):
    sizes = {
        "vocab_size": args.vocab_size,
        "context_length": args.max_seq_len,
        "embedding_length": args.dim,
        "block_count": args.n_layers,
        "feed_forward_length": args.hidden_dim,
        "attention.head_count": args.n_heads,
        "attention.head_count_kv": args.n_kv_heads,
        **({f"attention.{each}_length": args.head_dim for each in ("key", "value")} if args.head_width or args.qk_norm else {}),
        "attention.layer_norm_rms_epsilon": float(args.norm_eps),
        "rope.dimension_count": args.head_dim,
        "rope.freq_base": float(args.rope_theta),
        **gguf_rope(args)[0],
    }
    return {
        CHECKSUM: "0" * 64,  # first, so that its place in the file is known when the sum is
        LIST_CHECKSUM: hashlib.sha256(infos).hexdigest(),
        "general.architecture": architecture(args),
        "general.name": name,
        "general.alignment": ALIGNMENT,
        "general.file_type": FILE_TYPES[dtype],
        **({"general.quantization_version": 2} if dtype[0] == "q" else {}),
        **{f"{architecture(args)}.{key}": value for key, value in sizes.items()},
        **vocabulary_metadata(vocabulary),
        **extra,
    }


def gguf_header(args, vocabulary, dtype, name, layout, extra):
    """GGUF version 3: counts, metadata, names, shapes, types and places of the tensors, padding."""
    infos, offset = b"", 0
    for _, gguf, shape, kind in layout:
        infos += gguf_string(gguf) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos += struct.pack("<IQ", TYPES[kind].number, offset)
        offset += math.prod(shape) // TYPES[kind].block * TYPES[kind].size
        offset += gap(offset, ALIGNMENT)
    metadata = gguf_metadata(args, vocabulary, dtype, name, infos, extra)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(layout), len(metadata))
    for key, value in metadata.items():
        number, data = gguf_value(value)
        header += gguf_string(key) + struct.pack("<I", number) + data
    header += infos
    return header + bytes(gap(len(header), ALIGNMENT))


def gguf_layout(args, dtype):
    """[(our name, GGUF's name, shape, type)] of the tensors of a GGUF file, and the tensor ROPE_FACTORS, which may be empty."""
    layout = [(ours, gguf, shape, gguf_type(ours, shape, dtype, args.n_layers)) for ours, gguf, _, shape in tensors(args)]
    factors = torch.tensor(gguf_rope(args)[1])
    return layout + ([(ROPE_FACTORS, ROPE_FACTORS, factors.shape, "f32")] if len(factors) else []), factors


def refuse_unexportable(args, vocabulary, extra):
    """End in one line where a model with these settings can't be written as GGUF, whatever its weights are."""
    try:
        gguf_header(args, vocabulary, "f32", "", gguf_layout(args, "f32")[0], extra)
    except (OverflowError, struct.error):
        numbers = {k: v for k, v in vars(args).items() if type(v) in (int, float)} | {"max_iters": extra[ITER]}
        large = {k: v for k, v in numbers.items() if abs(v) > (SINGLE if isinstance(v, float) else 2 ** 32 - 1)}
        fail(f"GGUF can't hold {', '.join(f'{k}={v:g}' for k, v in large.items()) or 'these settings'}: expected at most "
             f"{SINGLE:.3g}, and {2 ** 32 - 1} of whole numbers")


def write_gguf(path, state, args, vocabulary, dtype, name, extra):
    """The header, then the tensors, each padded to the alignment."""
    layout, factors = gguf_layout(args, dtype)
    header = gguf_header(args, vocabulary, dtype, name, layout, extra)
    digest, halves = hashlib.sha256(), architecture(args) != "llama"
    with replacing(path) as f:
        f.write(header)
        for ours, _, _, kind in layout:
            w = factors if ours == ROPE_FACTORS else state[ours]
            for data in encoded(ours, interleaved_to_halves(w, heads_in(ours, args) if halves else 0), kind):
                f.write(data)
                digest.update(data)
            padding = bytes(gap(f.tell(), ALIGNMENT))
            f.write(padding)
            digest.update(padding)
        f.seek(header.index(b"0" * 64))
        f.write(digest.hexdigest().encode())


def check_llama2c(args, vocabulary, version, group_size):
    """The group size that fits dim; says, in one line each, what these formats can't."""
    for key, standard in (("norm_eps", 1e-5), ("rope_theta", 10000.0), ("rope_scaling", 1.0), ("rope_attention", 1.0),
                          ("rope_factors", ()), ("head_width", 0), ("qkv_bias", False), ("qk_norm", False)):
        if getattr(args, key) != standard:
            found = f"{getattr(args, key)}"
            fail(f"the model has {key}={found[:40]}, llama2.c's formats imply {standard}; use --format=gguf")
    if group_size < 1:
        fail(f"--group_size={group_size}: expected at least 1, such as 64")
    asked = group_size
    while args.dim % group_size:
        group_size //= 2
    if version == 2 and group_size != asked:
        print(f"groups of {group_size}: {asked} does not divide dim={args.dim}")
    if version == 2 and args.hidden_dim % group_size:
        print(f"groups of {group_size} run across the rows of w2, hidden_dim={args.hidden_dim}: run reads that, "
              f"llama2.c's runq does not; for it choose a --group_size that divides {args.dim} and {args.hidden_dim}")
    if vocabulary and not vocabulary.add_dummy_prefix:
        print("llama2.c's tokenizer.bin implies a space before every text, this vocabulary has none; "
              "--format=gguf can say so")
    return group_size


def frequency_tables(args):
    """cos and sin (max_seq_len, Q/2) as v0 stores them, in float32 throughout like llama2.c; readers skip them."""
    i = torch.arange(0, args.head_dim, 2).float()
    angle = torch.outer(torch.arange(args.max_seq_len), 1.0 / (args.rope_theta ** (i / args.head_dim))).float()
    return angle.cos(), angle.sin()


def to_groups(x, group_size):
    """float32 -> int8 (n, group_size) and float32 scales (n,), rounded as llama2.c does: ties to even."""
    groups = x.reshape(-1, group_size)
    scale = np.abs(groups).max(axis=1) / np.float32(127)
    return np.rint(groups / np.where(scale == 0, 1, scale)[:, None]).astype(np.int8), scale


def llama2c_sizes(args, version):
    """The header's seven ints; the first version says by a negative vocabulary that there is a classifier of its own."""
    return struct.pack("<7i", args.dim, args.hidden_dim, args.n_layers, args.n_heads, args.n_kv_heads,
                       args.vocab_size if version or args.tied else -args.vocab_size, args.max_seq_len)


def write_llama2c(path, state, args, version, group_size):
    """llama2.c version 0, 1 or 2: a header of ints, then the tensors, each for all layers in turn."""
    header = llama2c_sizes(args, version)
    if version:
        header = struct.pack("<Ii", LLAMA2C_MAGIC, version) + header + struct.pack("<B", args.tied)
        header += struct.pack("<i", group_size) if version == 2 else b""
        header += bytes(LLAMA2C_HEADER - len(header))
    with replacing(path) as f:
        f.write(header)
        for name, _, _, shape in tensors(args, LLAMA2C_V1 if version else LLAMA2C_V0):
            if version == 2 and len(shape) == 2:
                q, scale = to_groups(np.concatenate(list(floats(name, state[name]))), group_size)
                f.write(q.tobytes() + scale.tobytes())
            else:
                f.writelines(encoded(name, state[name], "f32"))
            if version == 0 and name == "norm.weight":
                f.writelines(table.numpy().tobytes() for table in frequency_tables(args))


def write_safetensors(path, state, args, dtype):
    """The tensors under Hugging Face's names: uint64 length of a JSON header, the header, the data."""
    header, offset = {"__metadata__": {"format": "pt"} | MADE_BY}, 0
    for _, _, hf, shape in tensors(args):
        size = math.prod(shape) * TYPES[dtype].size
        header[hf] = {"dtype": dtype.upper(), "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * gap(len(text), 8)
    with replacing(path) as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name, _, _, _ in tensors(args):
            f.writelines(encoded(name, interleaved_to_halves(state[name], heads_in(name, args)), dtype))


def write_hf(path, state, args, vocabulary, dtype, extra):
    """
    A Hugging Face folder: model.safetensors, config.json, generation_config.json and the tokenizer. A text that holds
    "<s>" holds three letters, as everywhere here (split_special_tokens); generation ends where sample.py's does, and where
    the GGUF metadata `extra` says so; its chat template comes along.
    """
    folder, kind = Path(path), architecture(args)
    if args.qkv_bias and args.qk_norm:
        fail("transformers has no model with both qkv_bias and qk_norm; use --format=gguf")
    folder.mkdir(exist_ok=True)
    earlier = is_vocabulary_of_ours(folder)
    write_safetensors(folder / "model.safetensors", state, args, dtype)
    config = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"], "model_type": kind, "hidden_act": "silu", "attention_bias": False,
        "hidden_size": args.dim, "intermediate_size": args.hidden_dim, "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads, "num_key_value_heads": args.n_kv_heads, "head_dim": args.head_dim,
        "vocab_size": args.vocab_size, "max_position_embeddings": args.max_seq_len, "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta, "tie_word_embeddings": args.tied,
        "rope_scaling": rope.rule(args) or None,
        "bos_token_id": vocabulary.bos_id, "eos_token_id": vocabulary.eos_id,
        "torch_dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype],
    }
    ends = [extra[key] for key in (END_OF_TURN, END_OF_MESSAGE) if key in extra]
    stop = {"eos_token_id": [vocabulary.eos_id, vocabulary.bos_id, *ends], "pad_token_id": extra.get(PADDING, vocabulary.eos_id)}
    template = extra.get(TEMPLATE)
    template = template.decode(errors="replace") if isinstance(template, bytes) else template
    generation = {"bos_token_id": vocabulary.bos_id, **stop, "max_length": args.max_seq_len}
    special = {f"{kind}_token": vocabulary.pieces()[i][0].decode() for kind, i in
               (("unk", vocabulary.unk_id), ("bos", vocabulary.bos_id), ("eos", vocabulary.eos_id)) if i is not None}
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": args.max_seq_len,
        **special, **({} if vocabulary.add_bos else {"add_bos_token": False}),  # for llama.cpp's converter
        "split_special_tokens": True, "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"], **({"chat_template": template} if isinstance(template, str) else {}),
    }
    for file, values in (("config", config), ("generation_config", generation), ("tokenizer_config", tokenizer),
                         ("tokenizer", vocabulary.hugging_face())):
        write_atomic(folder / f"{file}.json", json.dumps(values, indent=1))
    if vocabulary.kind == "sentencepiece":
        vocabulary.save(folder / "tokenizer.model")
    elif earlier:  # an earlier export's would be read instead
        (folder / "tokenizer.model").unlink(missing_ok=True)


def differences(vocabulary, format):
    """Yields, a line each, where the readers of a format will not encode a text as this vocabulary does."""
    kinds = {kind for _, _, kind in vocabulary.pieces()}
    if vocabulary.normalizer != "identity" and (format, vocabulary.kind) != ("hf", "bpe"):
        problem = "transformers combines accents otherwise" if format == "hf" else "model files can't say that"
        yield (f"the vocabulary rewrites text by {vocabulary.normalizer} and {problem}: "
               "unusual characters of a prompt may be encoded otherwise")
    if vocabulary.kind == "bpe":
        return
    if format == "gguf" and gguf_tokenizer(vocabulary) == NO_BYTES:
        yield "the vocabulary has no byte pieces, which llama.cpp needs: it will refuse this file, run reads it"
    elif format == "gguf" and vocabulary.remove_extra_whitespaces:
        yield "the vocabulary removes extra spaces, llama.cpp keeps them: it will encode such texts otherwise than run"
    if format == "gguf" and USER_DEFINED in kinds and vocabulary.add_dummy_prefix:
        yield "llama.cpp puts a space after each user-defined piece: it will encode texts with them otherwise than run"
    if format in ("gguf", "hf") and UNUSED in kinds:
        reader = "llama.cpp" if format == "gguf" else "transformers"
        yield f"the vocabulary has unused pieces, which {reader} does not take apart: it may encode texts otherwise than run"


FORMATS = {"gguf": tuple(FILE_TYPES), "hf": ("f32", "f16", "bf16"), "v0": ("f32",), "v1": ("f32",), "v2": ("f32",)}  # dtypes


def export_model(model_state, args, vocabulary, path, format="gguf", dtype="f32", group_size=64, name="llamac",
                 extra=None):
    """
    Write a model file. model_state: state_dict of a Transformer, args: its ModelArgs, vocabulary: its Tokenizer (None
    will do for v0, v1, v2), name: general.name, extra: more GGUF metadata, of which a Hugging Face folder gets what belongs
    to chats. Raises OSError when the disk fails; what stood at `path` before is then untouched.
    """
    if format not in FORMATS:
        fail(f"--format={format}: expected {' or '.join(FORMATS)}")
    if dtype not in FORMATS[format]:
        fail(f"--dtype={dtype}: expected {' or '.join(FORMATS[format])} with --format={format}")
    if vocabulary and vocabulary.vocab_size != args.vocab_size:
        fail(f"the vocabulary has {vocabulary.vocab_size} pieces and the model {args.vocab_size}, expected the same")
    if vocabulary and vocabulary.kind == "bpe" and format not in ("gguf", "hf"):
        fail(f"--format={format}: llama2.c's tokenizer.bin can't hold byte-level BPE; use gguf or hf")
    if not vocabulary and format in ("gguf", "hf"):
        fail(f"--format={format} needs the vocabulary; give --tokenizer=tokenizer.model (or .json, or llama2.c's .bin)")
    refuse_leftovers(model_state, args)
    for line in differences(vocabulary, format) if vocabulary else ():
        print(line)
    if format == "gguf":
        return write_gguf(path, model_state, args, vocabulary, dtype, name, extra or {})
    if format == "hf":
        return write_hf(path, model_state, args, vocabulary, dtype, extra or {})
    group_size = check_llama2c(args, vocabulary, int(format[1]), group_size)
    write_llama2c(path, model_state, args, int(format[1]), group_size)
    if vocabulary:
        with replacing(Path(path).with_name("tokenizer.bin")) as f:
            f.write(vocabulary.tokenizer_bin())


def exported_step(path):
    """The iteration of the model that a GGUF file holds; None where there is no file, or one that doesn't say."""
    try:
        with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            key = gguf_string(ITER)
            at = data.find(key)
            return struct.unpack_from("<I", data, at + len(key) + 4)[0] if at >= 0 else None
    except (OSError, ValueError, struct.error):  # ValueError: empty
        return None


HF_FILES = ("model.safetensors", "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json",
            "tokenizer.model")


def is_bin_of_run(path, args):
    """Whether a llama2.c file, which bears no mark, is known by its place in a run's folder and its sizes."""
    if path.name != "model.bin" or not run_folder.is_run(path.absolute().parent):
        return False
    with open(path, "rb") as f:
        head = f.read(36)
    return llama2c_sizes(args, 0) == head[:28] or llama2c_sizes(args, 1) == head[8:]


def refuse_foreign(target, format, args, vocabulary):
    """One line where an export to `target` would replace a file that is not known to be an earlier one."""
    if format == "gguf":
        known = {target: is_gguf_of_ours}
    elif format == "hf":
        known = {target / name: lambda path: is_folder_of_ours(target) for name in HF_FILES}
        known[target / "tokenizer.model"] = lambda path: is_vocabulary_of_ours(target)
    else:
        known = {target: lambda path: is_bin_of_run(path, args)}
        if vocabulary:
            known[target.with_name("tokenizer.bin")] = lambda path: path.read_bytes() == vocabulary.tokenizer_bin()
    for path, is_ours in known.items():
        if path.is_file() and not is_ours(path):
            fail(f"{path}: is there and not known to be an export; move it, or give another --path")


def main():
    origin = checkpoint.newest_run(out_dir)
    source, name = Path(origin), "model.gguf" if format == "gguf" else "hf" if format == "hf" else "model.bin"
    beside = source / name if source.is_dir() else source.with_name(name.replace("model", source.stem))
    target = Path(path or beside)
    if source.is_file() and target.exists() and target.samefile(source):
        fail(f"{target}: would be written over itself; give another --path")
    state, args, vocabulary, extra = read_model(origin, tokenizer)
    called = source.resolve().stem if source.is_file() else source.resolve().name  # a folder may be called Qwen2.5-0.5B
    try:
        if format in FORMATS:
            refuse_foreign(target, format, args, vocabulary)
        export_model(state, args, vocabulary, target, format, dtype, group_size, called, extra)
    except OSError as e:
        fail(f"{target}: cannot be written ({e.strerror or e}); nothing was changed")
    print(f"wrote {target}")


if __name__ == "__main__":
    configure(globals(), positional="out_dir")
    main()
