"""
Make a prepared folder of a text source, once, in the cache.

    sources/       find_source: find the files of a source
    corpus.py      make_corpus: find the documents, and choose those of the validation split
    vocabulary.py  make_vocabulary: train or load the vocabulary
    encode.py      encode_parts: encode to token ids with worker processes; join_parts
    prepared.py    load: load and check the folder

Finished parts are kept in NAME.partial, so the same command continues an interrupted one.
"""
import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import re
import shutil
from pathlib import Path

from configurator import fail  # first: it reports missing packages

from engine.files import publish, refuse_impossible_paths, write_atomic
from engine.formats.chat_template import CHATML, Chat
from engine.system import cores, lock
from engine.text import stories
from engine.text.blocks import Unfit
from engine.text.corpus import Conversations, changed_meanwhile, load_corpus, make_corpus
from engine.text.downloads import DOWNLOADS, download
from engine.text.encode import encode_parts, join_parts, token_type
from engine.text.prepared import SPLITS, VERSION, fingerprint, is_prepared, load, read_meta
from engine.text.readers import first_text
from engine.text.sources import Source, file_stamps, find_source, source_size, text_files
from engine.text.vocabulary import (chat_template_of, check_vocabulary, file_name, is_made,
                                    make_vocabulary, usual_pieces, vocabulary_file)
from tokenizer import Tokenizer

MAX_VAL_BYTES = 5e6  # max bytes to hold out for validation, unless val_fraction is given


@dataclasses.dataclass
class Options:
    """
    How to prepare a source: settings of data.py, which has a comment for each. urls: {name of a
    download: URL of the folder of its files}; chat_template: the Jinja source that encodes
    conversations; "": the vocabulary's template if it has one, otherwise ChatML.
    """
    vocab_source: str = "custom"
    vocab_size: int = 0
    val_fraction: float = 0.0
    cache: str = "cache"
    workers: int = 0
    skip_bad: bool = False
    column: str = "text"
    urls: dict = None
    max_vocab_size: int = 0
    max_text_bytes: int = 0
    chat_template: str = ""


# Options that determine the content of a prepared folder, and their defaults. as_prepared accepts
# the defaults with every prepared folder, except for vocab_source, which it compares.
NEUTRAL = {field.name: field.default for field in dataclasses.fields(Options)
           if field.name not in ("cache", "workers", "urls")}


@dataclasses.dataclass
class Job:
    """The preparation of one source."""
    source: Source
    options: Options
    vocab_file: Path  # file of the vocabulary; None if it is made for the text
    vocab_goal: int   # size or max size of a vocabulary to train: from the options, or the default
    name: str         # name of the prepared folder


def prepare(source, *options, **named_options):
    """
    Return the Path of the prepared folder of a source. Make it first if it does not exist. The
    options are the fields of Options. The folder is the same for any number of workers. Fails with
    one line if the source cannot be prepared.
    """
    options = Options(*options, **named_options)
    cache = Path(options.cache)
    with errors_in_one_line(source, cache):
        refuse_impossible_paths(source=source, cache=cache, vocab_source=options.vocab_source)
        if is_prepared(source):
            return Path(source)
        job = make_job(str(source), options)
        folder = cache / job.name
        if not folder.exists():
            with locked(cache):
                if not folder.exists():  # another process may have made it meanwhile
                    build(job, folder)
        return folder


@contextlib.contextmanager
def errors_in_one_line(source, cache):
    """Report Unfit, OSError and Ctrl-C in the block in one line, with exit code 2."""
    try:
        yield
    except Unfit as e:
        fail(e)
    except BrokenPipeError:  # the reader of stdout has closed it
        raise
    except OSError as e:
        is_full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "; free disk space, then the same command continues" if is_full else ""
        fail(f"{e.filename or cache}: {e.strerror or e}{advice}")
    except KeyboardInterrupt:
        fail(f"{source}: preparation was interrupted; the same command continues it")


def text_bytes(source, cache="cache", column="text"):
    """Return the approximate bytes of text in a source, without preparing it."""
    if is_prepared(source):
        meta = load(source).meta
        return meta["train_bytes"] + meta["val_bytes"]
    with errors_in_one_line(source, cache):
        return source_size(str(source), Path(cache).resolve(), column)


def bytes_per_character(source, cache="cache", column="text"):
    """
    Return the approximate bytes of UTF-8 per character of a source, measured on the beginnings of
    its first files: 1 for English, 1.8 for Russian, 3 for Chinese. Return 1.0 for prepared data and
    for a source without files.
    """
    if is_prepared(source):
        return 1.0
    with errors_in_one_line(source, cache):
        files = find_source(str(source), Path(cache).resolve(), column).files
        text = "".join(first_text(path) for path in files[:16] if Path(path).exists())
    return len(text.encode("utf-8", "surrogatepass")) / max(1, len(text)) or 1.0


def source_files(source, cache, column="text"):
    """Return file_stamps of a source that is a path of text files, or [] for any other source."""
    path = Path(source)
    if not path.exists() or is_prepared(path):
        return []
    return file_stamps(text_files(path, Path(cache).resolve(), column)[0])


def as_prepared(config, given, meta):
    """
    Return the options in which `config` differs from the prepared folder config.data, as {name: the
    folder's value}, or {} if config.data is not a prepared folder. Fails if the user set such an
    option, since it would have no effect. meta: the folder's meta.json; given: names of the
    settings that the user set.
    """
    if not is_prepared(config.data):
        return {}
    changed = {}
    for name, neutral in NEUTRAL.items():
        value, found = getattr(config, name, neutral), meta.get(name, neutral)
        if name == "vocab_source":
            is_same = is_vocabulary(value, name in given, meta, config.cache)
        else:
            is_same = value in (found, neutral)
            # A max size is accepted if the folder's vocabulary is not larger.
            is_same |= name == "max_vocab_size" and value >= meta["vocab_size"]
        if is_same:
            continue
        if name in given:
            how = f", with {name}={found}" if name in meta else ""
            fail(f"--{name}={value}: {config.data} is prepared already{how}; leave --{name} "
                 f"out, set it to {found} if a preset sets it, or name the text instead")
        changed[name] = found
    return changed


def is_vocabulary(source, is_given, meta, cache):
    """
    Return whether a vocab_source names the vocabulary of prepared data. Fails if a file that the
    user gave is missing.
    """
    if source == meta["vocab_source"] or is_made(source):  # if made, there is no file to compare
        return source == meta["vocab_source"]
    if not is_given and not Path(source).exists():
        return False
    vocabulary = Tokenizer.load(vocabulary_file(source, cache))
    if "chat_template" in meta:
        vocabulary = Chat(meta["chat_template"], vocabulary).tokenizer
    return vocabulary.sha256() == meta["tokenizer_sha256"]


def make_job(text, options):
    """Return the Job for a source. Its name ends in a hash of everything the folder depends on."""
    if not 0 <= options.val_fraction < 1:
        fail(f"--val_fraction={options.val_fraction}: expected a number between 0 and 1 "
             "(0: a tenth, at most 5 MB)")
    for name in "vocab_size", "max_vocab_size", "max_text_bytes", "workers":
        if getattr(options, name) < 0:
            fail(f"--{name}={getattr(options, name)}: expected 0 or more")
    check_vocabulary(options)
    if not options.chat_template:
        options.chat_template = chat_template_of(options.vocab_source)
    if options.chat_template == CHATML:  # the default
        options.chat_template = ""
    cache = Path(options.cache).resolve()
    source = find_source(text, cache, options.column)
    if source.stories and options.max_text_bytes:
        fail(f"--max_text_bytes={options.max_text_bytes}: the stories are generated, not read; "
             "expected stories:N")
    usual = stories.VOCAB_SIZE if source.stories else usual_pieces(source.size)
    goal = options.vocab_size or options.max_vocab_size or usual
    identity, vocab_name, vocab_file = source.identity, options.vocab_source, None
    if not is_made(options.vocab_source):
        vocab_file = vocabulary_file(options.vocab_source, cache)
        identity = [*identity, Tokenizer.load(vocab_file).sha256()]
        vocab_name = vocab_file.stem
    # Existing folders must keep their names, so newer options are in the key only if they are set.
    key = [VERSION, identity, vocab_name, options.vocab_size, goal, options.val_fraction or 0.1]
    if options.skip_bad:
        key.append("skip_bad")
    if options.max_vocab_size and not options.vocab_size:
        key.append("vocab_most")  # the option's old name; its value is in the key as goal
    if options.max_text_bytes:
        key += ["text_most", options.max_text_bytes]
    if options.column != "text":
        key.append(options.column)
    if options.chat_template:
        key += ["chat_template", options.chat_template]
    may_be_limited = not source.is_exact or source.size > 10 * MAX_VAL_BYTES
    if not options.val_fraction and may_be_limited:
        key.append("most")  # a tenth of the text may exceed the limit MAX_VAL_BYTES
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]
    words = [source.name, f"{vocab_name}{options.vocab_size or ''}", digest]
    name = "-".join(re.sub(r"[^\w.]+", "_", word)[:40] for word in words)
    return Job(source, options, vocab_file, goal, name)


def build(job, folder):
    """Make a prepared folder. It is called NAME.partial until it is complete."""
    source, options = job.source, job.options
    partial = folder.with_name(folder.name + ".partial")
    (partial / "parts").mkdir(parents=True, exist_ok=True)
    if source.left_out:
        print(f"left out of {source.text}: {source.left_out}")
    for name, (size, sha256) in DOWNLOADS.get(source.text, {}).items():
        download(folder.parent / source.text / name, options.urls[source.text], size, sha256)
    try:
        if not (partial / "meta.json").exists():
            if not (partial / "corpus.json").exists():
                max_val_bytes = math.inf if options.val_fraction else MAX_VAL_BYTES
                corpus = make_corpus(source, options, options.val_fraction or 0.1, max_val_bytes,
                                     partial / "texts")
                corpus.save(partial)
            # Load it even if it was just made, so that its table rows.npy is memory-mapped.
            corpus = load_corpus(partial)
            tokenizer = make_vocabulary(job, corpus, partial)
            encode_parts(corpus, partial, options.workers or cores())
            meta = assemble(job, corpus, partial, tokenizer)
            if source.stamps and source.stamps != file_stamps(source.files):
                raise changed_meanwhile(source.text)
            write_atomic(partial / "meta.json", json.dumps(meta, indent=1))
            del corpus  # Windows cannot delete a memory-mapped file
    except (Unfit, SystemExit):  # SystemExit: from fail()
        # Start over next time. After an OSError or Ctrl-C the folder stays, and the same command
        # continues it.
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for name in "parts", "texts":
        shutil.rmtree(partial / name, ignore_errors=True)
    for path in [partial / "corpus.json", partial / "rows.npy", *partial.glob("*.tmp")]:
        path.unlink(missing_ok=True)
    publish(partial, folder)
    meta = read_meta(folder)
    share = ""
    if "whole_bytes" in meta:
        share = f" ({meta['train_bytes'] / meta['whole_bytes']:.2%} of the text)"
    print(f"prepared {folder}: {meta['train_tokens']:,} tokens to train on{share}, "
          f"{meta['val_tokens']:,} to validate, vocabulary of {meta['vocab_size']:,}, "
          f"{meta['train_bytes'] / meta['train_tokens']:.2f} bytes per token")


def assemble(job, corpus, folder, tokenizer):
    """Write train.bin and val.bin, and return the content of meta.json."""
    counts, dtype = join_parts(corpus, folder), token_type(tokenizer)
    for (documents, *_), use in zip(counts, ("train on", "validate")):
        if not documents:
            raise Unfit(f"{job.source.text}: no text to {use}", "expected more documents")
    meta = {"version": VERSION, "vocab_size": tokenizer.vocab_size,
            "vocab_source": job.options.vocab_source, "tokenizer": file_name(tokenizer),
            "tokenizer_sha256": tokenizer.sha256(), "dtype": dtype.name, "source": job.source.text}
    for split, (documents, size, *_) in zip(SPLITS, counts):
        tokens = (folder / f"{split}.bin").stat().st_size // dtype.itemsize
        meta |= {f"{split}_tokens": tokens, f"{split}_documents": int(documents),
                 f"{split}_bytes": int(size)}
    if isinstance(corpus, Conversations):
        meta["chat_template"] = corpus.chat_template
        for split, (*_, tokens, size) in zip(SPLITS, counts):
            meta |= {f"{split}_answer_tokens": int(tokens), f"{split}_answer_bytes": int(size)}
    meta["fingerprint"] = fingerprint(folder)
    if corpus.skipped:
        meta["skipped"] = corpus.skipped
    if corpus.whole_bytes:
        meta["whole_bytes"] = corpus.whole_bytes
    if job.source.stories:
        _, size, bits, *_ = counts[1]  # of validation; bits: information content of its stories
        meta["floor_bpb"] = bits / size
        meta["entropy_bits_per_story"] = stories.entropy()
    return meta


@contextlib.contextmanager
def locked(cache):
    """Let only one process at a time prepare data in this cache; others wait."""
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / ".lock", "a") as f:
        try:
            lock(f)
        except BlockingIOError:
            print(f"waiting for another program that is preparing data in {cache}", flush=True)
            lock(f, wait=True)
        yield
