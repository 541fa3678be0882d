"""
Open a model from a run, a checkpoint, a GGUF or llama2.c file, or a Hugging Face, PEFT or Meta
folder.
"""
from collections import ChainMap
from functools import partial
from pathlib import Path

import torch

from configurator import fail
from engine.advice import renamed
from engine.files import sha256
from engine.formats import gguf_file, gguf_tokenizer, hf_tokenizer, huggingface, llama2c, peft
from engine.formats.layout import CHAT, END_OF_TURN, ITER, TEMPLATE, check_tensors, tensors
from engine.formats.reader import Reader, Tensors, checked
from engine.text.prepared import is_prepared
from engine.text.vocabulary import keep_vocabulary
from engine.training import checkpoint, distill, distributed, lora, resume, run_folder
from engine.training.costs import num_params
from engine.training.plan import rate_for
from engine.untrusted import reading
from model import ModelArgs, Transformer
from tokenizer import Tokenizer

MAX_ADOPTED_CONTEXT = 1024  # tokens; fine-tuning uses a longer context only if asked to


def read_model(path, tokenizer=""):
    """
    Read a run's folder, a step folder, a GGUF or llama2.c file, or a Hugging Face, PEFT or Meta
    folder, for which the path of a .safetensors or .pth file in it may be given. Return ({name:
    tensor}, ModelArgs, Tokenizer or None, {metadata that an export keeps}). Except for runs, a
    tensor is read from disk at each access.

    tokenizer: a vocabulary file to use instead of the one that comes with the model.
    """
    with reading(path, "a model", fail):
        path = Path(path)
        state, args, vocabulary, extra = read_any(path, with_tokenizer=not tokenizer)
        if tokenizer.endswith(".bin"):
            vocabulary = llama2c.read_tokenizer_bin(tokenizer, args.vocab_size)
        elif tokenizer:
            vocabulary = Tokenizer.load(tokenizer)
        if vocabulary and vocabulary.vocab_size != args.vocab_size:
            fail(f"{path}: the vocabulary has {vocabulary.vocab_size} pieces and the model "
                 f"{args.vocab_size}, expected the same; give the tokenizer of this model")
        if args.tied and "output.weight" not in state:
            # The classifier is the embedding: add its name without reading a tensor.
            readers = {name: partial(state.__getitem__, name) for name in state}
            readers["output.weight"] = readers["tok_embeddings.weight"]
            state = Tensors(readers, path, getattr(state, "q8_0", None))
        return state, args, vocabulary, extra


def read_any(path, with_tokenizer):
    """
    Return what `read_model` does, from a model of any kind. with_tokenizer: False returns None for
    the model's own tokenizer, and leaves out the metadata's token ids, which belong to it.
    """
    if path.suffix in (".pth", ".safetensors") and path.is_file():
        huggingface.refuse_unread(path)
        path = path.parent
    # For a missing path, read_run ends the program with the message of checkpoint.locate.
    if checkpoint.is_own(path) or run_folder.is_run(path) or not path.exists():
        return read_run(path, with_tokenizer)
    if peft.is_adapter(path):
        return read_peft(path, with_tokenizer)
    if (path / "config.json").exists():
        return huggingface.read_hf(path, with_tokenizer)
    if (path / "params.json").exists():
        return huggingface.read_meta(path, with_tokenizer)
    if path.is_dir():
        fail(f"{path}: holds no complete checkpoint, no config.json of a Hugging Face model, no "
             "adapter_config.json of PEFT's and no params.json of Meta's")
    if Reader(path).data[:4].tobytes() != b"GGUF":
        return *llama2c.read_llama2c(path), None, {}
    state, args, metadata = gguf_file.read_gguf(path)
    extra = {key: metadata[key] for key in ("general.name", TEMPLATE) if key in metadata}
    if not with_tokenizer:
        return state, args, None, extra
    extra |= gguf_tokenizer.chat_ids(metadata, args.vocab_size)
    return state, args, gguf_tokenizer.read_gguf_tokenizer(metadata, path), extra


def read_peft(folder, with_tokenizer):
    """
    Return what `read_any` does, from a folder of PEFT's adapters, merged into the base model that
    the folder names. If the folder has a tokenizer and chat template of its own, as it does after
    tokens were added, these are used instead of the base model's.
    """
    config = peft.read_config(folder)
    state, args, vocabulary, extra = read_any(peft.base_path(folder, config), with_tokenizer)
    state, args = peft.merged(folder, config, state, args)
    extra |= hf_tokenizer.chat_template(folder)
    own = hf_tokenizer.read_hf_tokenizer(folder, args.vocab_size) if with_tokenizer else None
    if own:
        extra |= huggingface.chat_ids(folder, own)
    return state, args, own or vocabulary, extra


def read_run(path, with_tokenizer):
    """
    Return what `read_any` does, from a run's folder or a step folder. The adapters of a LoRA are
    merged into its weights.
    """
    folder = checkpoint.locate(path)
    saved = checkpoint.load(folder)
    state, args, adapters = checked_model(saved, folder / "model.pt")
    vocabulary = Tokenizer.load(checkpoint.tokenizer_path(folder)) if with_tokenizer else None
    extra = saved.get("chat", {}) | {ITER: checkpoint.manifest(folder)["step"]}
    return lora.merged(state, adapters), args, vocabulary, extra


def checked_model(saved, file, dtype=torch.float32):
    """
    Return ({name: tensor}, ModelArgs, lora.LoRA or None) of the dict in a checkpoint's model.pt.
    dtype: of the LoRA. Exit with a message if they do not match.
    """
    state, args = saved["model"], checked(ModelArgs(**saved["args"]), file)
    adapters = lora.of_checkpoint(saved, dtype)
    # A damaged file may claim huge sizes: compare them with the tensors before a model is built. A
    # sharded checkpoint is not a dict and would read every tensor for its shape. load_weights
    # refuses names that are unknown.
    if isinstance(state, dict):
        shapes = {name: w.shape for name, w in state.items()}
        expected = ((name, shape) for name, _, _, shape in tensors(args))
        if adapters:
            expected = lora.expected_tensors(args, adapters)
        check_tensors(shapes, expected, file, ignored=shapes)
    return state, args, adapters


def read_adapters(path):
    """
    Return ({name: tensor} of the adapters and new rows of a LoRA, its lora.LoRA, the path that the
    run started from), from a run's folder or a step folder. Exit with a message if it has none.
    """
    folder = checkpoint.locate(path)
    saved = checkpoint.load(folder)
    with reading(folder, "a model", fail):
        adapters = lora.of_checkpoint(saved)
    if not adapters:
        fail(f"{path}: holds no adapters; expected a run of train.py --lora_rank=8")
    return saved["model"], adapters, resume.stored_settings(folder).get("init_from", "")


def load_model(path, tokenizer, device):
    """Return (Transformer in evaluation mode, its Tokenizer) of a model that `read_model` reads."""
    state, args, vocabulary, _ = read_model(path, tokenizer)
    if vocabulary is None:
        fail(f"{path}: holds no vocabulary; give --tokenizer=tokenizer.bin (or .model, or .json)")
    with reading(path, "a model", fail):
        model = Transformer(args)
        distributed.load_weights(model, state)
    return model.to(device).eval(), vocabulary


# ---- distillation --------------------------------------------------------------------------------

def teachers_vocabulary(config, given):
    """
    Return {setting: value} that a training takes from its first teacher: the vocabulary, unless it
    is given or the data are prepared.
    """
    paths = distill.paths(config.teacher)
    if not paths or "vocab_source" in given or is_prepared(config.data):
        return {}
    path = paths[0]
    vocabulary = read_model(checkpoint.origin(path))[2]
    if vocabulary is None:
        fail(f"--teacher={path}: holds no vocabulary; give it as --vocab_source=tokenizer.bin (or "
             ".model, or .json)")
    return {"vocab_source": str(keep_vocabulary(vocabulary, config.cache)), "vocab_size": 0}


def load_teachers(config, dataset, device):
    """
    Return the models of --teacher, Transformers in evaluation mode; [] if it names none. Ends the
    program if one of them has another vocabulary than the dataset, or a shorter context.
    """
    if config.teacher and dataset.masks:
        fail(f"--teacher={config.teacher}: {config.data} holds conversations, expected a text")
    teachers = []
    for path in distill.paths(config.teacher):
        teacher, vocabulary = load_model(checkpoint.origin(path), "", device)
        if vocabulary.pieces() != dataset.tokenizer.pieces():
            fail(f"--teacher={path}: has another vocabulary than {config.data}, expected the same; "
                 f"train both on the same data, or leave --vocab_source out")
        if teacher.args.max_seq_len < dataset.seq_len:
            fail(f"--teacher={path}: has a context of {teacher.args.max_seq_len} tokens, expected "
                 f"{dataset.seq_len}; give --max_seq_len={teacher.args.max_seq_len}")
        teacher.bos_id = dataset.separator if config.document_mask else None
        teachers.append(teacher.requires_grad_(False))
    return teachers


# ---- fine-tuning ---------------------------------------------------------------------------------

def start_from(model, path, resuming, check=True, grows=False, noise=0.0):
    """
    Copy the weights at a path that `checkpoint.origin` returned into a model. Return {GGUF's key:
    value} of its chat template and of the ids of padding and of tokens that end an answer; the
    run's checkpoints store them. resuming: whether the path is a checkpoint of this run; check:
    passed to checkpoint.load; grows: whether the model may have more tokens than those weights, see
    with_new_rows; noise: see with_noise. The weights of a resumed run already have both.
    """
    if checkpoint.complete(path):
        saved = checkpoint.load(path, check=check)
        state, extra = saved["model"], saved.get("chat", {})
    else:
        state, _, _, extra = read_model(path)
    with reading(path, "a model", fail):
        if checkpoint.complete(path) and not resuming:
            state = lora.merged(state, lora.of_checkpoint(saved))
        if model.lora and not resuming:
            state = lora.base_weights(state, model)
        elif grows and not resuming:
            state = with_new_rows(state, model.args.vocab_size)
        if noise and not resuming:
            state = with_noise(state, noise)
        distributed.load_weights(model, state)
    return {key: extra[key] for key in CHAT if key in extra}


def with_new_rows(state, vocab_size):
    """
    Return weights {name: tensor} with at least vocab_size rows in embedding and classifier. A
    vocabulary for conversations has markers that a base model's vocabulary may lack. Each of their
    rows is initialized to the mean of the others: a marker is then as likely as an average token,
    and hardly changes the probabilities of the others.
    https://nlp.stanford.edu/~johnhew/vocab-expansion.html
    """
    longer = {}
    for name in {"tok_embeddings.weight", "output.weight"} & state.keys():
        weight = state[name]
        missing = vocab_size - len(weight)
        if missing > 0:
            mean = weight.float().mean(0, keepdim=True).to(weight.dtype)
            longer[name] = torch.cat((weight, mean.expand(missing, -1)))
    return ChainMap(longer, state) if longer else state


def with_noise(state, std):
    """
    Return weights {name: tensor} with noise of this standard deviation added to the embedding, and
    to a classifier that shares its weights. It separates tokens that the base model had no reason
    to distinguish: their rows are nearly equal, so attention can't find or copy one of them. The
    noise depends on PyTorch's random state. doc/lab/chat.md
    """
    embedding = state["tok_embeddings.weight"]
    noisy = embedding + std * torch.randn(embedding.shape).to(embedding)
    changed = {"tok_embeddings.weight": noisy}
    if "output.weight" in state and torch.equal(state["output.weight"], embedding):
        changed["output.weight"] = noisy
    return ChainMap(changed, state)


def plan_lora(config, dtype, path, resuming):
    """
    Return the lora.LoRA of a run with these settings that starts from a path, None without LoRA.
    dtype: torch dtype of the training. A resumed run has the LoRA of its checkpoint, except for the
    dtype.
    """
    if resuming:
        with reading(path, "a model", fail):
            saved = checkpoint.load(path, check=False, mmap=True)
            return checked_model(saved, path / "model.pt", dtype)[2]
    if not config.lora_rank:
        return None
    if path is None:
        fail(f"--lora_rank={config.lora_rank}: LoRA adapts a trained model; give its path as "
             "--init_from")
    state, args, _, _ = read_model(path)
    quantized = frozenset(name.removesuffix(".weight") for name in getattr(state, "q8_0", ()))
    return lora.new(config, dtype, args.vocab_size, quantized)


def chat_template(path):
    """
    Return the Jinja source of a model's chat template, "" if it has none. path: as for start_from.
    """
    if checkpoint.complete(path):
        with reading(path, "a model", fail):
            extra = checkpoint.load(path, check=False, mmap=True).get("chat", {})
    else:
        extra = read_model(path)[3]
    source = extra.get(TEMPLATE, "")
    return source.decode(errors="replace") if isinstance(source, bytes) else source


def chat_metadata(prepared):
    """
    Return {GGUF's key: value} of the chat template of prepared conversations, and of the token that
    ends an answer if it is not EOS; {} for texts.
    """
    chat = prepared.chat
    if not chat:
        return {}
    end = {END_OF_TURN: chat.stop} if chat.template.stop else {}
    return {TEMPLATE: chat.source} | end


def stored_args(folder):
    """Return the ModelArgs of a step folder, without reading its weights."""
    with reading(folder, "a model", fail):
        saved = checkpoint.load(folder, check=False, mmap=True)
        return checked(ModelArgs(**saved["args"]), folder / "model.pt")


def adopt(config, given):
    """
    Return ({setting: value} that fine-tuning takes from the model at init_from, that model's
    ModelArgs). The settings are its sizes and vocabulary, and, unless given, its context and a
    tenth of the learning rate for its width; for LoRA the whole learning rate, and AdamW.

    given: names of the settings that the user gave. Ends the program if one of the sizes or the
    vocabulary is given and differs from the model's.
    """
    path = checkpoint.origin(config.init_from)
    own = checkpoint.complete(path)
    _, args, vocabulary, _ = read_model(path)
    compared = {"vocab_source"}
    if vocabulary is None and Path(config.vocab_source).is_file():
        # The model has no vocabulary that could differ from this one.
        vocabulary, compared = read_model(path, config.vocab_source)[2], set()
    if vocabulary is None:
        fail(f"--init_from={config.init_from}: holds no vocabulary; give it as "
             "--vocab_source=tokenizer.bin (or .model, or .json)")
    before = resume.stored_settings(path) if own else {}
    file = checkpoint.tokenizer_path(path) if own else keep_vocabulary(vocabulary, config.cache)
    adopted = {name: value for name, value in renamed(vars(args)).items()
               if name in config.defaults and name not in ("dropout", "max_seq_len")}
    for name in sorted(given & {*adopted, *compared}):
        value = getattr(config, name)
        # A checkpoint's settings may have hidden_dim=0; the model has the size derived from it.
        same = value in (adopted.get(name), before.get(name))
        if not same and not (name == "vocab_source" and same_content(value, file)):
            fail(f"--{name}={value}: fine-tuning keeps sizes and vocabulary of {config.init_from}, "
                 f"where {name} is {before.get(name, adopted.get(name))}; leave --{name} out, or "
                 "train from scratch, without --init_from")
    # The vocabulary file determines vocab_size, to which conversations add their markers.
    adopted.pop("vocab_size", None)
    suggested = {"max_seq_len": min(args.max_seq_len, MAX_ADOPTED_CONTEXT),
                 "learning_rate": float(f"{rate_for(args.dim) / 10:.1e}")}  # two digits
    if config.lora_rank:  # adapters need ten times the rate, and AdamW is better: doc/lab/lora.md
        suggested |= {"learning_rate": rate_for(args.dim), "optimizer": "adamw"}
    # Without this limit an evaluation would prepare all of a large text.
    if config.eval_only and before.get("max_text_bytes"):
        suggested["max_text_bytes"] = before["max_text_bytes"]
    suggested = {name: value for name, value in suggested.items() if name not in given}
    notes = "".join(f"; {name}={value}" for name, value in suggested.items())
    distributed.say(f"fine-tuning {config.init_from} ({num_params(args):,} parameters, context "
                    f"{args.max_seq_len:,}){notes}")
    return adopted | suggested | {"vocab_source": str(file)}, args


def same_content(a, b):
    """Return whether `a` is a file with the same bytes as the file `b`."""
    return Path(a).is_file() and sha256(a) == sha256(b)
