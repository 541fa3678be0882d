"""The vocabulary of a text: trained on it, or loaded from other data or another model."""
import math
from pathlib import Path

from configurator import fail  # first: it reports missing packages

from engine.files import replacing
from engine.formats.chat_template import Chat
from engine.text.blocks import Unfit
from engine.text.corpus import Conversations
from engine.text.prepared import is_prepared, load
from tokenizer import (PRE_TOKENIZERS, Bytes, Characters, Tokenizer, train_byte_level,
                       train_tokenizer)

MADE = ("custom", "bpe", "byte", "char")  # vocabularies that are made for the text
MIN_PIECES = 320  # min --max_vocab_size: 259 special and byte tokens, some characters and merges


def usual_pieces(size):
    """
    Return the default vocabulary size for `size` bytes of text: the power of two nearest to
    sqrt(size), from 512 to 32768; 1024 for 1 MB, 32768 for 1 GB.
    """
    return min(max(1 << round(math.log2(max(1, size)) / 2), 512), 32768)


def check_vocabulary(options):
    """Fail if these prepare.Options describe an impossible vocabulary."""
    source = options.vocab_source
    kind, _, argument = source.partition(":")
    if 0 < options.max_vocab_size < MIN_PIECES:
        fail(f"--max_vocab_size={options.max_vocab_size}: too few, expected at least {MIN_PIECES}, "
             "or --vocab_source=byte")
    if argument and kind in ("custom", "byte", "char"):
        fail(f"--vocab_source={source}: expected {kind}; --vocab_size sets the number of pieces")
    if kind == "bpe" and argument not in ("", *PRE_TOKENIZERS):
        fail(f"--vocab_source={source}: expected bpe, or bpe:NAME with a pre-tokenizer's name: "
             f"{', '.join(PRE_TOKENIZERS)}")


def is_made(vocab_source):
    """Return whether a vocabulary is made for the text, instead of loaded from a file."""
    return vocab_source.partition(":")[0] in MADE


def vocabulary_file(vocab_source, cache):
    """
    Return the path of a vocabulary that is not made for the text. Fails if there is no such file.

    It is tokenizer.model for llama2, the tokenizer of prepared data or of a Hugging Face folder, or
    the given path itself.
    """
    path = Path("tokenizer.model" if vocab_source == "llama2" else vocab_source)
    if is_prepared(path):
        path /= load(path).meta["tokenizer"]
    elif (path / "tokenizer.model").is_file():  # Hugging Face: more files may add tokens
        from engine.formats import hf_tokenizer  # here: it imports torch, which takes a second
        path = keep_vocabulary(hf_tokenizer.read_hf_tokenizer(path), cache)
    elif (path / "tokenizer.json").is_file():
        path /= "tokenizer.json"
    if not path.is_file():
        fail(f"--vocab_source={vocab_source}: no file {path}; expected custom, bpe, byte, char, "
             "llama2 (tokenizer.model in the working directory) or the path of a tokenizer")
    return path


def chat_template_of(vocab_source):
    """Return the chat template in a vocabulary's folder, prepared data or a model, or ""."""
    path = Path(vocab_source)
    if is_made(vocab_source) or not path.is_dir():
        return ""
    if is_prepared(path):
        return load(path).meta.get("chat_template", "")
    from engine.formats import hf_tokenizer, layout  # here: they import torch, which takes a second
    return hf_tokenizer.chat_template(path).get(layout.TEMPLATE, "")


def keep_vocabulary(vocabulary, cache):
    """Write a vocabulary to the cache, under its hash, and return its path."""
    suffix = Path(file_name(vocabulary)).suffix
    path = Path(cache, "vocabularies", vocabulary.sha256()[:16] + suffix)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as f:
            f.write(vocabulary.data)
    return path


def file_name(tokenizer):
    """Return the file name of a tokenizer in a prepared folder."""
    return "tokenizer.model" if tokenizer.kind == "sentencepiece" else "tokenizer.json"


def stored_vocabulary(folder):
    """Return the Tokenizer in a folder, or None."""
    files = [folder / "tokenizer.model", folder / "tokenizer.json"]
    return next((Tokenizer.load(path) for path in files if path.exists()), None)


def make_vocabulary(job, corpus, folder):
    """
    Return the Tokenizer of a preparation.

    Load the one that an interrupted attempt stored in the folder. If there is none, make or load
    one according to `job`, a prepare.Job, and store it.
    """
    if stored := stored_vocabulary(folder):
        return stored
    made = new_vocabulary(job, corpus, folder / "vocabulary.tmp")
    sizes = {0, made.vocab_size}
    if isinstance(corpus, Conversations):
        made = chat_of(job.source.text, corpus, made).tokenizer
        sizes.add(made.vocab_size)
    size = job.options.vocab_size
    if size not in sizes:
        fail(f"--vocab_size={size}: the vocabulary of --vocab_source={job.options.vocab_source} "
             f"has {made.vocab_size}; leave --vocab_size out")
    with replacing(folder / file_name(made)) as f:
        f.write(made.data)
    return made


def chat_of(name, corpus, vocabulary):
    """Return the Chat that encodes Conversations. name: the source, for messages."""
    try:
        return Chat(corpus.chat_template, vocabulary)
    except ValueError as e:
        raise Unfit(f"{name}: can't be encoded for the model: {e}") from e


def new_vocabulary(job, corpus, temporary):
    """Train or load a vocabulary. temporary: path of a temporary file that training writes."""
    if job.vocab_file:
        return Tokenizer.load(job.vocab_file)
    kind, _, pre_tokenizer = job.options.vocab_source.partition(":")
    if kind == "byte":
        return Bytes()
    if kind == "char":
        return Characters(corpus.characters())
    size = min(corpus.sizes(corpus.rows).sum(), corpus.vocab_sample)
    if size > 1 << 23:
        print(f"learning a vocabulary of {job.vocab_goal:,} from {size / 1e6:.0f} MB of text: "
              "10 to 60 seconds", flush=True)
    # Without --vocab_size the trained size may differ from the goal; --max_vocab_size bounds it.
    is_exact = job.options.vocab_size > 0
    is_max = job.options.max_vocab_size > 0 and not is_exact
    sample, goal = corpus.sample(), job.vocab_goal
    if isinstance(corpus, Conversations):  # leave room for the markers of the chat template
        goal -= len(chat_of(job.source.text, corpus, Bytes()).tokenizer.control)
    if kind == "bpe":
        return train_byte_level(sample, goal, temporary, pre_tokenizer or "qwen2", is_exact)
    return train_tokenizer(sample, goal, temporary, is_exact, is_max)
