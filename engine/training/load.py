"""
Open a model, whatever holds it: a run, a checkpoint, a GGUF or llama2.c file, a Hugging Face or Meta folder.
"""
from functools import partial
from pathlib import Path

from configurator import fail
from engine.files import sha256
from engine.formats import gguf_file, huggingface, llama2c, vocabularies
from engine.formats.layout import CHAT, ITER, TEMPLATE, tensors
from engine.formats.reader import Reader, Tensors, checked, refuse
from engine.text.vocabulary import keep_vocabulary
from engine.training import checkpoint, distributed, resume, run_folder
from engine.training.costs import num_params
from engine.training.plan import rate_for
from engine.untrusted import reading
from model import ModelArgs, Transformer
from tokenizer import Tokenizer


def read_model(path, tokenizer=""):
    """
    ({name: tensor}, ModelArgs, Tokenizer or None, {metadata to keep}) of a run's folder, a step folder, a GGUF or llama2.c file,
    a Hugging Face folder, a folder of Meta's, or a file of weights in one of these. The tensors of all but runs are read when
    they are asked for. tokenizer: a vocabulary file to use instead of the one that comes with the model.
    """
    with reading(path, "a model", fail):
        return read_any(path, tokenizer)


def read_any(path, tokenizer):
    """What `read_model` returns; a file that is damaged, or of another kind than it seems, may raise anything."""
    vocabulary, extra, path = tokenizer and not tokenizer.endswith(".bin") and Tokenizer.load(tokenizer) or None, {}, Path(path)
    if path.suffix in (".pth", ".safetensors") and path.is_file():
        huggingface.refuse_unread(path)
        path = path.parent
    if checkpoint.is_own(path) or run_folder.is_run(path) or not path.exists():
        folder = checkpoint.locate(path)
        saved = checkpoint.load(folder)
        state, args = saved["model"], checked(ModelArgs(**saved["args"]), partial(refuse, folder / "model.pt"))
        for name, *_, shape in tensors(args) if isinstance(state, dict) else ():  # before a model of these sizes is made
            if state[name].shape != shape:
                raise ValueError(f"{name} has shape {tuple(state[name].shape)}, expected {shape}")
        vocabulary = vocabulary or Tokenizer.load(checkpoint.tokenizer_path(folder))
        extra = saved.get("chat", {}) | {ITER: checkpoint.manifest(folder)["step"]}
    elif path.is_dir() and ((path / "config.json").exists() or (path / "params.json").exists()):
        meta = (path / "params.json").exists() and not (path / "config.json").exists()
        read = huggingface.read_meta if meta else huggingface.read_hf
        state, args, vocabulary, extra = read(path, vocabulary)
    elif path.is_dir():
        fail(f"{path}: holds no complete checkpoint, no config.json of Hugging Face's and no params.json of Meta's")
    elif Reader(path).data[:4].tobytes() == b"GGUF":
        state, args, metadata = gguf_file.read_gguf(path)
        extra = {key: metadata[key] for key in ("general.name", TEMPLATE) if key in metadata}
        extra |= {} if tokenizer else vocabularies.chat_ids(metadata, args.vocab_size)
        vocabulary = vocabulary or vocabularies.gguf_vocabulary(metadata, path)
    else:
        state, args = llama2c.read_llama2c(path)
    if tokenizer.endswith(".bin"):
        vocabulary = vocabularies.llama2c_vocabulary(tokenizer, args.vocab_size)
    if args.tied and "output.weight" not in state:
        state = Tensors({name: partial(state.__getitem__, name) for name in state} |
                        {"output.weight": partial(state.__getitem__, "tok_embeddings.weight")}, path)
    return state, args, vocabulary, extra


def load_model(path, tokenizer, device):
    """(Transformer ready to use, its Tokenizer) from whatever `read_model` reads."""
    state, args, vocabulary, _ = read_model(path, tokenizer)
    if vocabulary is None:
        fail(f"{path}: holds no vocabulary; give --tokenizer=tokenizer.bin (or .model, or .json)")
    if vocabulary.vocab_size != args.vocab_size:
        fail(f"{path}: the vocabulary has {vocabulary.vocab_size} pieces and the model {args.vocab_size}, expected the same; "
             "give the --tokenizer of this model")
    with reading(path, "a model", fail):
        model = Transformer(args)
        distributed.load_weights(model, state)
    return model.to(device).eval(), vocabulary
MOST_ADOPTED = 1024  # tokens of context that fine-tuning takes over; more are for those who ask for them


def start_from(model, path, check=True):
    """The weights of what `checkpoint.origin` gives into a model. Returns {GGUF's key: value} of its chats, which it keeps."""
    if checkpoint.complete(path):
        saved = checkpoint.load(path, check=check)
        state, extra = saved["model"], saved.get("chat", {})
    else:
        state, _, _, extra = read_model(path)
    with reading(path, "a model", fail):
        distributed.load_weights(model, state)
    return {key: extra[key] for key in CHAT if key in extra}


def adopt(s, given):
    """
    To fine-tune: sizes, vocabulary and context are those of the model that init_from names, and the rate is a tenth of what a
    model of its width begins with; return these settings. What is `given` and says otherwise is refused, but for context and rate.
    """
    path = checkpoint.origin(s.init_from)
    own = checkpoint.complete(path)
    _, args, vocabulary, _ = read_model(path)
    compared = {"vocab_source"}
    if vocabulary is None and Path(s.vocab_source).is_file():
        vocabulary, compared = read_model(path, s.vocab_source)[2], set()
    if vocabulary is None:
        fail(f"--init_from={s.init_from}: holds no vocabulary; give it as --vocab_source=tokenizer.bin (or .model, or .json)")
    if vocabulary.vocab_size != args.vocab_size:
        fail(f"--init_from={s.init_from}: its vocabulary has {vocabulary.vocab_size} pieces, the model {args.vocab_size}")
    before = resume.stored_settings(path) if own else {}
    file = checkpoint.tokenizer_path(path) if own else keep_vocabulary(vocabulary, s.cache)
    adopted = {k: v for k, v in vars(args).items() if k in s.defaults and k not in ("dropout", "max_seq_len")}
    adopted["rope_factors"] = ",".join(map(repr, args.rope_factors))
    for name in sorted(given & {*adopted, *compared}):
        now = getattr(s, name)
        same = now in (adopted.get(name), before.get(name))
        if not same and not (name == "vocab_source" and same_file(now, file)):
            fail(f"--{name}={now}: fine-tuning keeps sizes and vocabulary of {s.init_from}, where {name} is "
                 f"{before.get(name, adopted.get(name))}; leave --{name} out, or train from nothing, without --init_from")
    free = {"max_seq_len": min(args.max_seq_len, MOST_ADOPTED), "learning_rate": float(f"{rate_for(args.dim) / 10:.1e}")}
    if s.eval_only and before.get("text_most"):  # else all of a large text would be prepared
        free["text_most"] = before["text_most"]
    free = {name: value for name, value in free.items() if name not in given}
    distributed.say(f"fine-tuning {s.init_from} ({num_params(args):,} parameters, context {args.max_seq_len:,})"
                 + "".join(f"; {name}={value}" for name, value in free.items()))
    return adopted | free | {"vocab_source": str(file)}


def same_file(a, b):
    return Path(a).is_file() and sha256(a) == sha256(b)
