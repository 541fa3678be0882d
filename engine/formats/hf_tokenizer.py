"""
Read the tokenizer of a Hugging Face folder: tokenizer.json or tokenizer.model, added tokens,
special tokens and chat template. If the files of the folder disagree, follow transformers.
"""
import json

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from configurator import fail
from engine.formats.layout import TEMPLATE
from engine.untrusted import (
    MAX_JSON,
    MAX_SETTINGS,
    open_untrusted,
    read_json,
    read_untrusted,
    reading,
)
from tokenizer import (
    BYTE,
    CONTROL,
    MAX_MODEL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePiece,
    Tokenizer,
    generation,
    refuse_flags,
    special_tokens,
    text_of,
)

MADE_BY = {"made_by": "llamac"}  # metadata in the header of the weights that export.py writes
# Texts that the tokenizer.model and the tokenizer.json of one model encode to the same tokens
PROBES = "a", "a  b ", "Once upon a time, in 1234.", "\n\ta", "na\u00efve \ufb01 \u65e5"


def load_json(path):
    """Return the object in a .json file. Exit with a message if the file is not a JSON object."""
    with reading(path, "JSON", fail):
        return read_json(path, MAX_JSON)


def read_json_of(folder, name):
    """Return the object in NAME.json of a folder, or {} if there is no such file."""
    path = folder / f"{name}.json"
    return load_json(path) if path.exists() else {}


def encodable(text):
    """Return the text with "?" for each lone surrogate, which JSON can hold but UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def printable(value):
    """Return the beginning of an untrusted value, for a message."""
    return encodable(str(value)[:60])


def is_folder_of_ours(folder):
    """Return whether export.py wrote the weights of a Hugging Face or PEFT folder."""
    for path in (folder / "model.safetensors", folder / "adapter_model.safetensors"):
        if path.is_file():
            with open_untrusted(path) as file:
                head = file.read(4096)  # the header begins with MADE_BY
            return json.dumps(MADE_BY)[1:-1].encode() in head
    return False


def is_vocabulary_of_ours(folder):
    """
    Return whether export.py wrote the tokenizer.model of a folder: its pieces are those of the
    tokenizer.json, and export.py wrote the weights beside it.
    """
    path = folder / "tokenizer.model"
    if not path.is_file() or not is_folder_of_ours(folder):
        return False
    try:
        proto = parse_model(read_untrusted(path, MAX_MODEL))
    except (DecodeError, OSError):
        return False
    model = read_json_of(folder, "tokenizer").get("model")
    pieces = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    return isinstance(model, dict) and model.get("vocab") == pieces


def parse_model(data):
    """Return the ModelProto in the bytes of a sentencepiece model."""
    return sentencepiece_model_pb2.ModelProto.FromString(data)


def read_hf_tokenizer(folder, rows=0):
    """
    Return the Tokenizer of a Hugging Face folder, or None if the folder has none. rows: number of
    rows of the model's embedding; 0: unknown, use the number of tokens.

    transformers reads the tokenizer.json if there is one. We read sentencepiece vocabularies only
    from a tokenizer.model, so we read the tokenizer.model beside it and exit if the two differ.
    """
    model, fast = folder / "tokenizer.model", folder / "tokenizer.json"
    if not model.exists():
        return Tokenizer.load(fast) if fast.exists() else None
    stored = load_json(fast) if fast.exists() else None
    if stored is not None and not may_be_sentencepiece(stored):
        return Tokenizer.load(fast)
    vocabulary = apply_config(add_tokens(Tokenizer.load(model), folder, rows), folder)
    return vocabulary if stored is None else check_agreement(vocabulary, stored, folder)


def may_be_sentencepiece(stored):
    """Return whether a tokenizer.json has a vocabulary that is not byte-level BPE."""
    model = stored.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    byte_level = '"ByteLevel"' in json.dumps(stored.get("pre_tokenizer"))
    return isinstance(vocabulary, dict) and not byte_level


def check_agreement(vocabulary, stored, folder):
    """
    Compare the SentencePiece of a tokenizer.model with `stored`, the content of the tokenizer.json
    beside it. Return the SentencePiece with the tokenizer.json's add_bos. Exit if the two differ:
    one belongs to another model, and transformers would read the tokenizer.json.
    """
    def differ(how):
        fail(f"{folder}: tokenizer.model and tokenizer.json differ: {how}; transformers reads "
             "tokenizer.json; move the file that belongs to another model elsewhere")

    pieces = {piece.decode(): i for i, (piece, _, _) in enumerate(vocabulary.pieces())}
    for name, i in stored["model"]["vocab"].items():
        if pieces.get(name) != i:
            differ(f"token {printable(i)} is {printable(name)!r} only in the latter")
    with reading(folder / "tokenizer.json", "the tokenizer of this model", fail):
        if not has_merges_of(vocabulary, stored["model"]["merges"]):
            differ("the latter merges pieces in another order")
        try:
            import tokenizers
        except ImportError:
            return vocabulary  # the package is optional; do without the checks that need it
        oracle = tokenizers.Tokenizer.from_str(json.dumps(stored))
    texts = [*PROBES]
    # For Llama's tokenizer classes, transformers splits texts at added tokens by other rules than
    # those of the tokenizer.json, so texts that contain added tokens are not compared then.
    if "Llama" not in str(read_json_of(folder, "tokenizer_config").get("tokenizer_class")):
        named = [piece.decode() for piece, _, kind in vocabulary.pieces() if kind == USER_DEFINED]
        texts += [f"a {name} b{name}c" for name in named]
    for text in texts:
        ours, theirs = vocabulary.encode(text), oracle.encode(text, add_special_tokens=False).ids
        if ours != theirs:
            differ(f"{text!r} is {ours} and {theirs}")
    adds_bos = oracle.encode("a").ids[:1] == [vocabulary.bos_id]
    return vocabulary.with_bos(adds_bos, folder / "tokenizer.model")


def has_merges_of(vocabulary, merges):
    """Return whether merges are in the order of the scores of a SentencePiece."""
    scores = {piece.decode(): score for piece, score, kind in vocabulary.pieces() if kind == NORMAL}
    wholes = ("".join(pair.split(" ") if isinstance(pair, str) else pair) for pair in merges)
    # Ignore runs of spaces: Llama 2 merges them last, regardless of their scores.
    ranks = [scores[whole] for whole in wholes if whole in scores and whole.strip(SPACE)]
    return ranks == sorted(ranks, reverse=True)


def apply_config(vocabulary, folder):
    """
    Return a SentencePiece with the settings of a folder's tokenizer_config.json and other files:
    BOS, EOS, whether a space is put before every text, and add_bos.
    """
    config, where = read_json_of(folder, "tokenizer_config"), folder / "tokenizer.model"
    proto, before = parse_model(vocabulary.data), parse_model(vocabulary.data)
    for which in "bos", "eos":
        name_special(proto, which, text_of(special_tokens(folder).get(f"{which}_token")))
    # Like BOS and EOS, the first other token that ends an answer becomes a control piece, so that
    # no text is encoded as it (see gguf_tokenizer.with_control).
    special = proto.trainer_spec.bos_id, proto.trainer_spec.eos_id
    others = [i for i in generation(folder)["eos_token_id"] if i not in special]
    for i in others[:1]:
        if i < len(proto.pieces) and proto.pieces[i].type == USER_DEFINED:
            proto.pieces[i].type = CONTROL
    prefix, rules = config.get("add_prefix_space"), proto.normalizer_spec
    if isinstance(prefix, bool) and prefix != rules.add_dummy_prefix:
        rules.add_dummy_prefix = prefix
    if proto != before:
        vocabulary = SentencePiece(proto.SerializeToString(), where)
    adds_bos = config.get("add_bos_token")
    return vocabulary.with_bos(adds_bos, where) if isinstance(adds_bos, bool) else vocabulary


def name_special(proto, which, name):
    """
    Make the piece called `name` the BOS or EOS of a ModelProto (which: "bos" or "eos"), and a
    control piece, as sentencepiece requires.
    """
    if getattr(proto.trainer_spec, f"{which}_piece") == name:
        return
    for i, piece in enumerate(proto.pieces):
        if piece.piece == name and piece.type not in (UNKNOWN, BYTE):
            piece.type = CONTROL
            setattr(proto.trainer_spec, f"{which}_piece", name)
            setattr(proto.trainer_spec, f"{which}_id", i)
            return


def add_tokens(vocabulary, folder, rows):
    """
    Return a SentencePiece with the tokens that a folder adds to it, and unused tokens for the other
    ids below `rows`. rows: number of rows of the embedding; 0: as many as the tokens need.
    """
    added, size = added_tokens(folder), vocabulary.vocab_size
    with reading(folder / "tokenizer_config.json", "an object of added tokens", fail):
        refuse_flags(added.values(), folder)
        if size >= rows > 0:
            return vocabulary
        rows = rows or size + sum(i.isdecimal() and int(i) >= size for i in added)
        proto = parse_model(vocabulary.data)
        for i in range(size, rows):
            name, kind = f"[PAD{i}]", UNUSED
            if token := added.get(str(i)):
                name, kind = token["content"], CONTROL if token.get("special") else USER_DEFINED
            proto.pieces.add(piece=encodable(name), score=0.0, type=kind)
    return SentencePiece(proto.SerializeToString(), folder / "tokenizer.model")


def added_tokens(folder):
    """
    Return {id as text: {"content": text, "special": bool, ...}} of the tokens that a folder adds.
    tokenizer_config.json lists them all; if it has no such list, they are in tokenizer.json, or in
    an older folder's added_tokens.json.
    """
    config = read_json_of(folder, "tokenizer_config")
    if "added_tokens_decoder" in config:
        return config["added_tokens_decoder"]
    special = []
    for source in config, read_json_of(folder, "special_tokens_map"):
        names = source.get("additional_special_tokens")
        special += [text_of(name) for name in names] if isinstance(names, list) else []
    found = {str(i): {"content": name, "special": name in special}
             for name, i in read_json_of(folder, "added_tokens").items() if type(i) is int}
    listed = read_json_of(folder, "tokenizer").get("added_tokens")
    for token in listed if isinstance(listed, list) else ():
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            found[str(token.get("id"))] = token
    return found


def chat_template(folder):
    """
    Return {GGUF's key: template}, or {} if the folder has no template. chat_template.jinja takes
    precedence over tokenizer_config.json, whose template may be a list of named templates; use the
    one called "default" then.
    """
    found = read_json_of(folder, "tokenizer_config").get("chat_template")
    path = folder / "chat_template.jinja"
    if path.exists():
        with reading(path, "a chat template", fail):
            found = read_untrusted(path, MAX_SETTINGS).decode(errors="replace")
    elif isinstance(found, list):
        defaults = (each.get("template") for each in found
                    if isinstance(each, dict) and each.get("name") == "default")
        found = next(defaults, None)
    if not isinstance(found, str):
        return {}
    return {TEMPLATE: encodable(found)}
