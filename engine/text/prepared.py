"""A prepared folder and its checks. data.py's docstring lists its files."""
import dataclasses
import os
from pathlib import Path

from configurator import fail  # first: it reports missing packages

import numpy as np

from engine.files import sha256
from engine.formats.chat_template import Chat
from engine.untrusted import is_plain_name, open_untrusted, read_json, reading
from tokenizer import Tokenizer

VERSION = 1
# {dtype in meta.json: dtype of the .bin files}
TOKENS = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SPLITS = "train", "val"
# Types of the values that meta.json must have.
META = {"vocab_size": int, "vocab_source": str, "tokenizer": str, "tokenizer_sha256": str,
        "dtype": str, "source": str, "fingerprint": str}
META |= {f"{split}_{unit}": int for split in SPLITS for unit in ("tokens", "documents", "bytes")}
# Types of further values that meta.json must have for conversations.
CHAT_META = {"chat_template": str}
CHAT_META |= {f"{split}_answer_{unit}": int for split in SPLITS for unit in ("tokens", "bytes")}
CHECKED_AT_ONCE = 1 << 28  # .bin files of fewer bytes in total are read and checked on loading


@dataclasses.dataclass
class Prepared:
    """
    A prepared folder. meta: its meta.json; train, val: 1-D memory maps of token ids; masks: for
    conversations, {split: memory map of the marks of its tokens, uint8 (chat_template.py)},
    otherwise {}; chat: the Chat that encoded the conversations, or None.
    """
    folder: Path
    meta: dict
    train: np.memmap
    val: np.memmap
    tokenizer: Tokenizer
    masks: dict = dataclasses.field(default_factory=dict)
    chat: Chat = None


def mask_name(split):
    """Return the name, without .bin, of the file with the marks of a split."""
    return f"{split}_mask"


def is_prepared(folder):
    """
    Return whether data.py made a folder, even if some of its files are missing now. meta.json alone
    is not enough, since a folder of texts may contain a meta.json of its own.
    """
    others = "train.bin", "val.bin", "tokenizer.model", "tokenizer.json"
    has_others = any(Path(folder, name).exists() for name in others)
    return has_others and Path(folder, "meta.json").is_file()


def load(folder):
    """
    Return the Prepared of a folder. Fails if a file disagrees with meta.json.

    Always check file sizes and the hash of the vocabulary. If the .bin files have fewer than
    CHECKED_AT_ONCE bytes, also check their hash and the range of the token ids, which takes up to
    0.2 s. In larger data, Dataset checks the ids of each batch.
    """
    folder = Path(folder)
    with reading(folder, "prepared data, a folder that data.py made", fail):
        meta = read_meta(folder)
        dtype = TOKENS[meta["dtype"]]
        splits = [map_file(folder, split, dtype, meta[f"{split}_tokens"]) for split in SPLITS]
        masks = {}
        if "chat_template" in meta:
            masks = {split: map_file(folder, mask_name(split), np.dtype("u1"),
                                     meta[f"{split}_tokens"]) for split in SPLITS}
        tokenizer = Tokenizer.load(folder / meta["tokenizer"])
        is_same = (tokenizer.sha256() == meta["tokenizer_sha256"]
                   and tokenizer.vocab_size == meta["vocab_size"])
        chat = Chat(meta["chat_template"], tokenizer) if masks else None
        if chat and chat.tokenizer.vocab_size != tokenizer.vocab_size:
            raise ValueError("its vocabulary lacks markers of its chat template")
        is_small = sum(tokens.nbytes for tokens in splits) < CHECKED_AT_ONCE
        if not is_same or (is_small and fingerprint(folder) != meta["fingerprint"]):
            fail(f"{folder}: is not what its meta.json records (hashes differ); "
                 "delete it to prepare it anew")
        if is_small:
            for tokens in splits:
                check_ids(folder, tokens, meta["vocab_size"])
    return Prepared(folder, meta, *splits, tokenizer, masks, chat)


def map_file(folder, name, dtype, count):
    """Return the memory map of `count` numbers in NAME.bin. Fails if the file has another size."""
    with open_untrusted(folder / f"{name}.bin") as file:
        size, expected = os.fstat(file.fileno()).st_size, dtype.itemsize * count
        if size != expected:
            fail(f"{folder}/{name}.bin: {size} bytes, expected {expected}; "
                 f"delete {folder} to prepare it anew")
        return np.memmap(file, dtype, "r")


def read_meta(folder):
    """
    Return the meta.json of a prepared folder. A damaged one raises many types of errors, which
    `reading` turns into a one-line message in `load`.
    """
    meta = read_json(Path(folder, "meta.json"))
    if meta["version"] != VERSION:
        raise ValueError(f"version {meta['version']!r}; delete it to prepare it anew")
    kinds = META | CHAT_META if "chat_template" in meta else META
    wrong = [name for name, kind in kinds.items()
             if type(meta[name]) is not kind or (kind is int and not 0 < meta[name] < 1 << 62)]
    if not wrong and meta["dtype"] not in TOKENS:
        wrong = ["dtype"]
    if not wrong and not is_plain_name(meta["tokenizer"]):
        wrong = ["tokenizer"]
    if wrong:
        raise ValueError(f"its meta.json has {wrong[0]}={repr(meta[wrong[0]])[:80]}")
    if any(meta[f"{split}_documents"] > meta[f"{split}_tokens"] for split in SPLITS):
        raise ValueError("its meta.json counts more documents than tokens")
    return meta


def check_ids(folder, tokens, vocab_size):
    """Return `tokens`, an array of ids. Fails if an id is not in the folder's vocabulary."""
    if (largest := int(tokens.max())) >= vocab_size:
        fail(f"{folder}: holds the token {largest}, expected ids below the vocabulary's size "
             f"{vocab_size}; delete it to prepare it anew")
    return tokens


def fingerprint(folder):
    """Return the hex sha256 of train.bin followed by val.bin, and by the masks if there are any."""
    masks = [folder / f"{mask_name(split)}.bin" for split in SPLITS]
    return sha256(folder / "train.bin", folder / "val.bin", *filter(Path.exists, masks))
