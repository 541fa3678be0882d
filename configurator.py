"""
Globals are the configuration.

    learning_rate = 1e-3  # peak learning rate
    configure(globals())

A knob is a lower-case global with a literal int, float, bool or str, overridden from the command line, left to right:
--key=value, --key value, --key alone for True, or a file of overrides (.py, .yaml, .json; names with an underscore in
front are its own business). Comments `# ---- name` in the source group the knobs in --help.

Import this before packages that may be missing: it makes of a missing package, of Ctrl-C and of a pipe that nobody reads
what a user expects, rather than a traceback.
"""
import ast
import atexit
import contextlib
import difflib
import functools
import json
import math
import os
import runpy
import symtable
import sys
import time
from collections import Counter
from pathlib import Path

from engine.streams import flush_stdout, gone, open_streams

STARTED = time.monotonic()  # when this program began, about
NO_STDOUT = "stdout cannot be written ({}); make room, or send the output elsewhere"
BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
ELSEWHERE = [  # names of nanoGPT, llama2.c, transformers and their like; the knob here; what else is to be known
    ("lr max_lr peak_lr rate", "learning_rate", ""), ("embedding_lr unembedding_lr", "table_rate", "times learning_rate"),
    ("epochs num_epochs n_epochs num_train_epochs", "max_iters", "which counts steps, not passes over the data"),
    ("steps max_steps num_steps n_steps train_steps iters num_iters num_iterations", "max_iters", ""),
    ("lr_decay_iters lr_decay_steps", "max_iters", "where the schedule always ends"), ("warmup_ratio", "warmup_iters", "in steps"),
    ("warmup_steps num_warmup_steps warmup", "warmup_iters", ""), ("lr_scheduler_type lr_scheduler lr_schedule", "schedule", ""),
    ("optim optimizer_type", "optimizer", ""), ("adam_beta1", "beta1", ""), ("adam_beta2", "beta2", ""),
    ("muon_momentum mu", "momentum", ""), ("max_grad_norm grad_norm_clip clip_grad_norm clip", "grad_clip", ""),
    ("per_device_train_batch_size per_device_batch_size device_batch_size micro_batch_size", "batch_size", "of a forward pass"),
    ("accumulate_grad_batches grad_accum grad_accum_steps accumulation_steps", "gradient_accumulation_steps", "of all processes"),
    ("n_embd n_embed d_model embed_dim hidden_size width", "dim", ""),
    ("n_layer num_layers num_hidden_layers layers", "n_layers", ""), ("n_head num_heads num_attention_heads heads", "n_heads", ""),
    ("num_key_value_heads num_kv_heads n_kv_head kv_heads", "n_kv_heads", ""),
    ("intermediate_size ffn_dim d_ff ffn_hidden_size", "hidden_dim", ""),
    ("block_size context context_length context_size ctx_len n_ctx seq_length sequence_length max_position_embeddings "
     "max_length", "max_seq_len", "in tokens"),
    ("rms_norm_eps layer_norm_eps layer_norm_epsilon", "norm_eps", ""),
    ("tie_word_embeddings tie_embeddings tied_embeddings weight_tying", "tied", ""),
    ("attention_dropout hidden_dropout resid_pdrop", "dropout", ""),
    ("text text_file input input_file ppl", "perplexity", "with a text file"),
    ("dataset dataset_name data_path data_dir data_file train_file train_data input input_file text file", "data", ""),
    ("data dataset dataset_name data_path data_dir data_file input input_file text file", "source", ""),
    ("tokenizer tokenizer_name tokenizer_path tokenizer_model", "vocab_source", ""),
    ("validation_split_percentage val_split test_size", "val_fraction", "between 0 and 1"),
    ("outfile output output_path output_file output_dir save_dir", "path", ""),
    ("output_dir outdir output save_dir checkpoint_dir run_dir", "out_dir", ""),
    ("eval_steps eval_every eval_freq val_interval", "eval_interval", "in steps"),
    ("patience early_stopping early_stopping_patience", "early_stop", "in evaluations"),
    ("save_steps save_every save_interval checkpoint_interval ckpt_interval", "eval_interval", "as every evaluation saves"),
    ("save_total_limit", "keep_last", "beside the best, of which keep_best are kept"),
    ("logging_steps log_every log_freq", "log_interval", "in steps"), ("wandb use_wandb report_to", "wandb_log", "True or False"),
    ("resume_from_checkpoint resume restore", "init_from", "though the same command in the same out_dir resumes by itself"),
    ("model model_name_or_path pretrained pretrained_model load_from checkpoint ckpt ckpt_path", "init_from", "a run's folder"),
    ("bf16 fp16 amp precision mixed_precision torch_dtype outtype quant quantize", "dtype", ""),
    ("gpu cuda cpu use_cpu no_cuda use_cuda", "device", "auto, cpu, cuda, cuda:1 or mps"),
    ("gradient_checkpointing", "activation_checkpointing", ""), ("torch_compile", "compile", ""),
    ("fsdp", "sharded", "True or False"), ("full_determinism", "deterministic", ""), ("random_seed data_seed", "seed", ""),
    ("start text input_text", "prompt", ""), ("temp", "temperature", ""), ("num_return_sequences", "num_samples", ""),
    ("max_length max_tokens num_tokens n_predict", "max_new_tokens", ""),
    ("top_k", "top_p", "which samples from the likeliest tokens that have this probability together"),
    ("model model_path checkpoint checkpoint_path ckpt model_name_or_path filepath input", "out_dir", "a run's folder or a model"),
    ("version", "format", "with v0, v1 or v2 for llama2.c's"), ("num_workers num_proc dataloader_num_workers", "workers", ""),
]


def fail(message):
    """End the program the way every user's mistake ends: one line on stderr, exit code 2."""
    flush_stdout()
    print("error: " + " ".join(str(message).split()), file=sys.stderr)
    sys.exit(2)


@atexit.register
def last_flush():
    """End with one line and exit code 2, rather than 0, where what was printed can't be written."""
    if why := flush_stdout():
        with contextlib.suppress(SystemExit):
            fail(NO_STDOUT.format(why))
        os._exit(2)  # an exit within atexit would change no exit code


def end(kind, error, trace):
    """sys.excepthook: a missing package, Ctrl-C and a pipe without a reader are no faults of the program."""
    if kind is ModuleNotFoundError and error.name:
        fail(f"{sys.executable} has no package {error.name}; {missing(error.name)}")
    if kind is KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    if kind is BrokenPipeError and gone(sys.stdout):
        sys.exit(141)  # as a shell reports SIGPIPE
    if issubclass(kind, OSError) and (why := flush_stdout("\n")):  # where nothing is buffered, only a write tells
        fail(NO_STDOUT.format(why))
    sys.__excepthook__(kind, error, trace)


if sys.platform == "win32":
    fail("llamac runs on Linux and macOS; on Windows use it in WSL, the Windows Subsystem for Linux")
open_streams()
sys.excepthook = end


def missing(package):
    """What to do about a package that is not installed."""
    home = Path(__file__).absolute().parent / ".venv"
    folder = home.relative_to(Path.cwd()) if home.is_relative_to(Path.cwd()) else home
    if Path(sys.prefix).resolve() == home.resolve():
        return f"install it: {folder}/bin/python -m pip install {package}"
    if home.exists():
        return (f"use the project's: {folder}/bin/python {' '.join(sys.argv)}, or activate it first: "
                f"source {folder}/bin/activate")
    return "make demo sets up an environment, .venv, that has all; or here: pip install -r requirements.txt"


@functools.cache
def source_knobs(path):
    """
    {name: (value, section, comment)} of the knobs of a script, in the order of its source. Read once: a script that is
    edited while it runs goes on with the knobs it has.
    """
    source, found = Path(path).read_text(encoding="utf-8"), {}
    lines = source.splitlines()
    sections = {n: line[6:].strip(" -") for n, line in enumerate(lines, 1) if line.startswith("# ---- ")}
    for node in ast.parse(source).body:
        name = getattr(node.targets[0], "id", "_") if isinstance(node, ast.Assign) else "_"
        with contextlib.suppress(ValueError):  # not a literal
            value = ast.literal_eval(node.value) if name.islower() and not name.startswith("_") else None
            if type(value) in (int, float, bool, str):
                section = sections.get(max((n for n in sections if n < node.lineno), default=0), "")
                found[name] = value, section, lines[node.end_lineno - 1][node.end_col_offset:].strip(" #")
    return found


def settings(g):
    """{key: value} of all knobs as they stand now: the resolved configuration."""
    return {name: g[name] for name in source_knobs(g["__file__"])}


def whole(text):
    """The int that a text stands for, where 1e3 is one; other numbers as float."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def convert(key, value, default, where, refuse=fail):
    """`value` as the type of `default`: text is parsed, 1e3 is a whole number, an int a float; all else is refused."""
    kind, got = type(default), value
    with contextlib.suppress(ValueError, KeyError):
        if isinstance(value, str):
            got = BOOLS[value.lower()] if kind is bool else whole(value) if kind is int else kind(value)
    if kind is int and type(got) is float and got.is_integer():
        got = int(got)
    if kind is float and type(got) is int:
        got = float(got)
    if type(got) is not kind or (kind is float and not math.isfinite(got)):
        refuse(f"{where}: {key} is {value!r}, expected {kind.__name__}, such as {default!r}")
    return os.path.expanduser(got) if kind is str and got.startswith("~/") else got


def read_file(path, known=None, hint=""):
    """
    {key: value} of a .py, .yaml or .json file of overrides; a .py file is not run where it sets names beside those `known`,
    which it has as {name: None} then: it may be a program. hint: what else the file may be, for the line that refuses it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        if path.endswith(".py"):
            names = symtable.symtable(text, path, "exec").get_symbols()
            own = [name.get_name() for name in names if name.is_assigned() or name.is_imported()]
            if names and not own:
                raise ValueError("it sets no knob")
            odd = [name for name in own if known and name not in known and not name.startswith("_")]
            return dict.fromkeys(odd) or {k: v for k, v in runpy.run_path(path).items() if not k.startswith("_")}
        import yaml  # comes with wandb
        return dict((json.loads if path.endswith(".json") else yaml.safe_load)(text) or {})
    except Exception as e:  # whatever a user's file can do wrong ends in one line
        fail(f"{path}: cannot be read as a configuration ({type(e).__name__}: {e}); config/debug.py shows one{hint}")


def advice(key, known):
    """What to write instead of the unknown `key`: another program's name, a slip of the keys, or a part of a name."""
    for names, ours, note in ELSEWHERE:
        if key in names.split() and ours in known:
            return f"here it is {ours!r}" + (f", {note}" if note else "")

    def slip(name):  # letters left out, doubled or swapped; or one wrong in a long name: top_k is not top_p
        have, want = Counter(key), Counter(name)
        likeness = difflib.SequenceMatcher(None, key, name).ratio()
        return likeness > 0.9 or likeness > 0.75 and (have <= want or want <= have)

    near = ([name for name in difflib.get_close_matches(key, known, 9, 0.75) if slip(name)][:1]
            or [name for name in known if set(key.split("_")) <= set(name.split("_"))])
    return f"did you mean {' or '.join(map(repr, near))}?" if near else "--help lists all"


def print_help(g, known, common, positional):
    def show(names):
        for name in names:
            value, _, comment = known[name]
            print(f"  {f'--{name}={value}':<34} {type(value).__name__:<5} {comment}")

    print((g.get("__doc__") or "").strip() + "\n\nKnobs, as --key=value or --key value"
          + (f"; a word by itself is {positional}" if isinstance(positional, str) else ""))
    if common:
        print("\nthe most used:")
        show(common)
    for section in dict.fromkeys(section for _, section, _ in known.values()):
        print(f"\n{section or 'all'}:")
        show(name for name in known if known[name][1] == section)


def options(argv, defaults):
    """(as written, key, value) of each word of a command line; key is None where it is no option."""
    words = list(argv)
    while words:
        word = words.pop(0)
        key, equals, value = word[2:].partition("=")
        key, follows = key.replace("-", "_"), bool(words) and not words[0].startswith("--")
        if not word.startswith("--"):
            key, value = None, word
        elif key in defaults and not equals:
            if type(defaults[key]) is bool:
                follows, value = follows and words[0].lower() in BOOLS, "True"
            elif not follows:
                fail(f"{word}: has no value, expected {word}={defaults[key]}")
            if follows:
                value = words.pop(0)
                word = f"{word} {value}"
        yield word, key, value


def configure(g, positional=None, argv=None, common=()):
    """
    Override the knobs in `g`, the caller's globals(), from `argv` (default: the command line); return the keys given,
    whose `mapping` has the value of each before it was last given.
    positional: the knob that a word which is neither option nor configuration file is for, or a list that takes every
    word which is no option. common: the knobs that --help shows first.
    """
    argv, known = sys.argv[1:] if argv is None else argv, source_knobs(g["__file__"])
    defaults, typed, given = {name: g[name] for name in known}, {}, {}
    if "--help" in argv or "-h" in argv:
        print_help(g, known, common, positional)
        sys.exit(0)

    def meant(word):
        return f"; if it is the {positional} itself: --{positional}={word}" * bool(positional and Path(word).exists())

    def override(key, value, where, word=None):
        if key not in defaults:
            fail(f"{where}: unknown key {key!r}; {advice(str(key), defaults)}{meant(where)}")
        value = convert(key, value, defaults[key], where)
        if not word and key in typed and g[key] != value and os.environ.get("RANK", "0") == "0":
            print(f"note: {where} sets {key}={value}, which overrides {typed[key]}; what comes last counts", file=sys.stderr)
        given[key], g[key] = g[key], value
        typed.pop(key, None)
        typed.update({key: word} if word else {})

    for word, key, value in options(argv, defaults):
        bare, is_file = word.lstrip("-"), word.endswith((".py", ".yaml", ".yml", ".json"))
        if key is not None:
            override(key, value, word, word)
        elif bare.partition("=")[0] in defaults and not Path(word).exists():
            fail(f"{word}: expected --{bare}")
        elif word.startswith("-") or not (positional or is_file or isinstance(positional, list)):
            fail(f"{word}: expected --key=value or a configuration file")
        elif isinstance(positional, list):
            positional.append(word)
        elif is_file:
            for key, value in read_file(word, defaults, meant(word)).items():
                override(key, value, word)
        elif positional and not typed.get(positional, "--").startswith("--"):
            fail(f"{typed[positional]} and {word}: expected one {positional}")
        else:
            override(positional, word, word, word)
    return given.keys()
