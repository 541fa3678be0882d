"""
The vocabulary of a Hugging Face folder: its tokenizer.json or tokenizer.model, added tokens, special tokens, chat template.
"""
import json

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from configurator import fail
from engine.formats.layout import TEMPLATE
from engine.formats.reader import Reader
from engine.untrusted import MAX_JSON, MAX_SETTINGS, read_json, read_untrusted, reading
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


def load_json(path):
    """Return the object in a .json file, or exit with one line."""
    with reading(path, "JSON", fail):
        return read_json(path, MAX_JSON)


MADE_BY = {"made_by": "llamac"}  # in the header of the weights that export.py writes


def printable(value):
    """The beginning of a stranger's value for a message."""
    return str(value)[:60].encode(errors="replace").decode()


def is_folder_of_ours(folder):
    """Whether export.py wrote the weights of a Hugging Face folder, which then say so."""
    path = folder / "model.safetensors"
    if not path.is_file() or path.stat().st_size < 8:
        return False
    r = Reader(path)
    size, = r.unpack("<Q")
    return size < len(r.data) and json.dumps(MADE_BY)[1:-1].encode() in r.take(min(size, 4096)).tobytes()


def is_vocabulary_of_ours(folder):
    """Whether the tokenizer.model beside weights that export.py wrote is the one whose pieces the tokenizer.json there has."""
    path = folder / "tokenizer.model"
    if not path.is_file() or not is_folder_of_ours(folder):
        return False
    try:
        proto = sentencepiece_model_pb2.ModelProto.FromString(read_untrusted(path, MAX_MODEL))
    except (DecodeError, OSError):
        return False
    model = beside(folder, "tokenizer").get("model")
    return isinstance(model, dict) and model.get("vocab") == {piece.piece: i for i, piece in enumerate(proto.pieces)}


def beside(folder, name):
    """The object in a .json file of a folder, {} where there is no such file."""
    path = folder / f"{name}.json"
    return load_json(path) if path.exists() else {}


def read_hf_vocabulary(folder, rows=0):
    """
    The Tokenizer of a Hugging Face folder, None where it has none. rows: of the embedding, 0 for as many as it has tokens.
    transformers takes the tokenizer.json where there is one; of a sentencepiece vocabulary the
    tokenizer.model beside it is read, once both are known to agree.
    """
    model, fast = folder / "tokenizer.model", folder / "tokenizer.json"
    if not model.exists() or fast.exists() and not of_sentencepiece(beside(folder, "tokenizer")):
        return Tokenizer.load(fast) if fast.exists() else None
    vocabulary = configured(widened(Tokenizer.load(model), folder, rows), folder)
    return agreed(vocabulary, folder) if fast.exists() else vocabulary


def of_sentencepiece(tokenizer):
    """Whether a tokenizer.json may hold a sentencepiece vocabulary: one that is not byte-level BPE."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    return isinstance(vocabulary, dict) and '"ByteLevel"' not in json.dumps(tokenizer.get("pre_tokenizer"))
PROBES = "a", "a  b ", "Once upon a time, in 1234.", "\n\ta", "na\u00efve \ufb01 \u65e5"


def agreed(vocabulary, folder):
    """
    A SentencePiece vocabulary, of a tokenizer.model, with what the tokenizer.json beside it says of BOS. One line where the two
    differ: one is of another model, and transformers would take the tokenizer.json.
    """
    stored, where = beside(folder, "tokenizer"), f"{folder}: tokenizer.model and tokenizer.json"
    advice = "transformers reads tokenizer.json; move the one that is not this model's away"
    pieces = {piece.decode(): i for i, (piece, _, kind) in enumerate(vocabulary.pieces())}
    for name, i in stored["model"]["vocab"].items():
        if pieces.get(name) != i:
            fail(f"{where} differ: token {printable(i)} is {printable(name)!r} in the latter alone; {advice}")
    normal = {piece.decode(): score for piece, score, kind in vocabulary.pieces() if kind == NORMAL}
    try:
        wholes = ("".join(pair.split(" ") if isinstance(pair, str) else pair) for pair in stored["model"]["merges"])
        ranks = [normal[whole] for whole in wholes if whole in normal and whole.strip(SPACE)]  # Llama 2 merges spaces last
    except (KeyError, TypeError, ValueError) as e:
        fail(f"{folder / 'tokenizer.json'}: damaged, its merges are not those of its tokens ({type(e).__name__})")
    if ranks != sorted(ranks, reverse=True):
        fail(f"{where} differ: the latter merges pieces in another order; {advice}")
    try:
        import tokenizers
    except ImportError:
        return vocabulary
    try:
        oracle = tokenizers.Tokenizer.from_str(json.dumps(stored))
    except Exception as e:  # it raises no other kind
        fail(f"{folder / 'tokenizer.json'}: the package tokenizers can't read it ({str(e).splitlines()[0]})")
    named = [piece.decode() for piece, _, kind in vocabulary.pieces() if kind == USER_DEFINED]
    cut_anew = "Llama" in str(beside(folder, "tokenizer_config").get("tokenizer_class"))  # by rules of transformers' own
    for text in [*PROBES, *("" if cut_anew else (f"a {name} b{name}c" for name in named))]:
        ids = oracle.encode(text, add_special_tokens=False).ids
        if vocabulary.encode(text) != ids:
            fail(f"{where} differ: {text!r} is {vocabulary.encode(text)} and {ids}; {advice}")
    return vocabulary.with_bos(oracle.encode("a").ids[:1] == [vocabulary.bos_id], folder / "tokenizer.model")


def configured(vocabulary, folder):
    """A SentencePiece vocabulary that treats a text as a folder's tokenizer_config.json says, with BOS and EOS that it names."""
    config, where = beside(folder, "tokenizer_config"), folder / "tokenizer.model"
    proto, before = (sentencepiece_model_pb2.ModelProto.FromString(vocabulary.data) for _ in range(2))
    for which in "bos", "eos":
        name_special(proto, which, text_of(special_tokens(folder).get(f"{which}_token")))
    taken = proto.trainer_spec.bos_id, proto.trainer_spec.eos_id
    for i in [i for i in generation(folder)["eos_token_id"] if i not in taken][:1]:  # as `claimed` in vocabularies.py has it
        if i < len(proto.pieces) and proto.pieces[i].type == USER_DEFINED:
            proto.pieces[i].type = CONTROL
    prefix, rules = config.get("add_prefix_space"), proto.normalizer_spec
    if isinstance(prefix, bool) and prefix != rules.add_dummy_prefix:
        rules.add_dummy_prefix = prefix
    if proto != before:
        vocabulary = SentencePiece(proto.SerializeToString(), where)
    adds = config.get("add_bos_token")
    return vocabulary.with_bos(adds, where) if isinstance(adds, bool) else vocabulary


def name_special(proto, which, name):
    """Makes the piece of that name BOS or EOS ("bos" or "eos") of a ModelProto; sentencepiece wants a control piece for that."""
    for i, piece in enumerate(proto.pieces):
        if piece.piece == name and piece.type not in (UNKNOWN, BYTE) and getattr(proto.trainer_spec, f"{which}_piece") != name:
            piece.type = CONTROL
            setattr(proto.trainer_spec, f"{which}_piece", name)
            setattr(proto.trainer_spec, f"{which}_id", i)


def widened(vocabulary, folder, rows):
    """
    A SentencePiece vocabulary with the tokens that a folder adds to it, and unused ones up to the number of rows (0: of tokens).
    """
    added = added_tokens(folder)
    refuse_flags(added.values(), folder)
    if vocabulary.vocab_size >= rows > 0:
        return vocabulary
    rows = rows or vocabulary.vocab_size + sum(i.isdecimal() and int(i) >= vocabulary.vocab_size for i in added)
    proto = sentencepiece_model_pb2.ModelProto.FromString(vocabulary.data)
    for i in range(vocabulary.vocab_size, rows):
        token = added.get(str(i))
        kind = UNUSED if token is None else CONTROL if token.get("special") else USER_DEFINED
        name = token["content"] if token else f"[PAD{i}]"
        proto.pieces.add(piece=name.encode(errors="replace").decode(), score=0.0, type=kind)
    return SentencePiece(proto.SerializeToString(), folder / "tokenizer.model")


def added_tokens(folder):
    """
    {id: {"content": text, "special": bool}} of a folder, the ids as text. tokenizer_config.json lists them all; where it lists
    none they are in the tokenizer.json, or in an older folder's added_tokens.json.
    """
    config = beside(folder, "tokenizer_config")
    if "added_tokens_decoder" not in config:
        lists = [found.get("additional_special_tokens") for found in (config, beside(folder, "special_tokens_map"))]
        special = [text_of(token) for each in lists if isinstance(each, list) for token in each]
        found = {str(i): {"content": name, "special": name in special} for name, i in beside(folder, "added_tokens").items()
                 if type(i) is int}
        listed = beside(folder, "tokenizer").get("added_tokens")
        listed = [token for token in (listed if isinstance(listed, list) else ()) if isinstance(token, dict)]
        return found | {str(token.get("id")): token for token in listed if isinstance(token.get("content"), str)}
    added = config["added_tokens_decoder"]
    tokens = added.values() if isinstance(added, dict) else [None]
    if not all(isinstance(token, dict) and isinstance(token.get("content"), str) for token in tokens):
        fail(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder is no object of tokens")
    return added


def chat_template(folder):
    """{GGUF's key: template} where the folder has one; a file of its own comes before the one in tokenizer_config.json."""
    found, other = beside(folder, "tokenizer_config").get("chat_template"), folder / "chat_template.jinja"
    if other.exists():
        with reading(other, "a chat template", fail):
            found = read_untrusted(other, MAX_SETTINGS).decode(errors="replace")
    elif isinstance(found, list):  # several, by name
        found = next((each.get("template") for each in found if isinstance(each, dict) and each.get("name") == "default"), None)
    return {TEMPLATE: found.encode(errors="replace").decode()} if isinstance(found, str) else {}
