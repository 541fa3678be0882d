"""
What a trained model is worth.

    python evaluate.py out/my --perplexity=text.txt     how well it predicts a text; `run --perplexity` gives the same
    python evaluate.py out/my --data=labelled.jsonl     how often it finds the answer among the classes
    python evaluate.py --make_intents=intents        write a small data set of labelled commands to try that on
    python evaluate.py out/my --harness=task.jsonl      multiple choice: how often the right one of several ends is likeliest

A labelled prompt is a line {"prompt": ..., "expected": ..., "classes": [...]}; without "classes" all that is expected
anywhere in the file counts. The model's answer is the class whose text it finds likeliest behind the prompt.
A task's line is {"context": ..., "choices": [...], "answer": number from 0 on}, as HellaSwag, ARC and PIQA can be written.
"""
import codecs
import collections
import itertools
import json
import math
import random
from pathlib import Path

from configurator import configure, fail, settings  # first: it answers for packages that are missing

import torch
import torch.nn.functional as F

from compare import pad, width
from engine.training import checkpoint, distributed, run_folder
from engine.files import write_atomic
from engine.training.load import load_model
from engine.tracking.redact import redact
from engine.streams import one_line
from engine.untrusted import parse_json, read_untrusted
from tokenizer import decode_utf8
from track import PROJECT, Session, Wandb, new_run_id, reason, wandb_run

out_dir = "out"      # the model: a run, runs (the newest), a step, a Hugging Face or Meta folder, a GGUF or llama2.c file
tokenizer = ""       # the vocabulary of a llama2.c file: a tokenizer.model, tokenizer.json or tokenizer.bin
perplexity = ""      # a UTF-8 text to predict
data = ""            # labelled prompts, .jsonl
harness = ""         # a task of multiple choice, .jsonl
between = "\n= "     # stands between prompt and answer, as in the text the model was trained on
make_intents = ""    # a folder to write train.jsonl (prompt and answer as text) and test.jsonl (labelled prompts) to
wandb_log = False    # log table, accuracies and confusion matrix to Weights & Biases
wandb_project = "auto"   # W&B project; auto: WANDB_PROJECT or the project of `wandb init`, else llamac
device = "auto"      # auto, cpu, cuda, cuda:1, mps

MAX_TEXT = 1 << 28  # bytes of a text to predict, or of a file of prompts
LOGITS_AT_ONCE = 1 << 25  # 128 MB of float32


@torch.inference_mode()
def negative_log_likelihood(model, ids, device="cpu"):
    """
    Sum over ids[1:] of -ln p(id | those before it in its window), in nats. ids: list of int, BOS first. The inputs are
    cut into windows of max_seq_len that don't overlap; each starts anew at position 0.
    """
    ids, T = torch.tensor(ids), model.args.max_seq_len
    inputs, targets = ids[:-1], ids[1:]
    whole = len(inputs) // T * T
    windows = max(1, LOGITS_AT_ONCE // (T * model.args.vocab_size))
    batches = list(zip(inputs[:whole].view(-1, T).split(windows), targets[:whole].view(-1, T).split(windows))) if whole else []
    if whole < len(inputs):
        batches.append((inputs[None, whole:], targets[None, whole:]))
    return sum(model(x.to(device), y.to(device))[1].item() * y.numel() for x, y in batches)


def print_perplexity(model, vocabulary, path, device):
    try:
        text = read_untrusted(path, MAX_TEXT).removeprefix(codecs.BOM_UTF8)
    except OSError as e:
        fail(f"--perplexity={path}: cannot be read ({e.strerror}); expected a text file")
    ids = vocabulary.encode(decode_utf8(text), bos=True)
    if len(ids) < 2:
        fail(f"--perplexity={path}: the text has no tokens")
    count, total = len(ids) - 1, negative_log_likelihood(model, ids, device)
    nats = total / count
    if not nats < 700:  # NaN is not, either
        fail(f"{out_dir}: {nats:.4g} nats per token, expected about {math.log(model.args.vocab_size):.1f} or less; "
             "its weights are broken")
    print(f"perplexity {math.exp(nats):.4f} ({count} tokens, {nats:.6f} nats per token, "
          f"{total / math.log(2) / len(text):.6f} bits per byte)")


# ---- labelled prompts -------------------------------------------------------------------------------------------

def json_lines(path):
    """[(number, line)] of a .jsonl file but for blank ones. Lines end at line feeds alone: JSON allows U+2028 as it is."""
    lines = read_untrusted(path, MAX_TEXT).decode("utf-8-sig").split("\n")
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def strings(row, name):
    """A list of strings or numbers that a row has, as strings. TypeError: it is none."""
    found = row[name]
    if not isinstance(found, list) or not all(isinstance(each, (str, int, float)) for each in found):
        raise TypeError(f"{name!r} is {json.dumps(found)[:40]}, expected a list of strings")
    return [str(each) for each in found]


def read_labelled(path):
    """[{"prompt", "expected", "classes"}] of a .jsonl file."""
    examples, number = [], 0
    try:
        for number, line in json_lines(path):
            example = parse_json(line)
            examples.append({"prompt": str(example["prompt"]), "expected": str(example["expected"]),
                             "classes": strings(example, "classes") if "classes" in example else []})
    except OSError as e:
        fail(f"--data={path}: cannot be read ({e.strerror}); expected a .jsonl file")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        fail(f"{path}, line {number}: {type(e).__name__} {e}; expected {{\"prompt\": ..., \"expected\": ...}}")
    if not examples:
        fail(f"{path}: is empty; expected a labelled prompt a line")
    every = sorted({e["expected"] for e in examples})
    for example in examples:
        example["classes"] = example["classes"] or every
        if example["expected"] not in example["classes"]:
            fail(f"{path}: {example['expected']!r} is expected but not among its classes {example['classes']}")
    return examples


@torch.inference_mode()
def score(model, vocabulary, prompt, classes, device="cpu"):
    """
    The probability of each class among `classes` as what stands behind the prompt, to its end (EOS): (len(classes),).
    """
    ids = [vocabulary.encode_prompt(prompt + between + c, eos=True) for c in classes]
    longest = max(map(len, ids)) - 1
    if longest > model.args.max_seq_len:
        fail(f"the prompt {prompt[:40]!r} and an answer have {longest} tokens, the model's context is "
             f"{model.args.max_seq_len}; shorten it")
    return torch.softmax(log_likelihoods(model, ids, [1] * len(ids), device), 0)


def log_likelihoods(model, ids, starts, device="cpu"):
    """The sum of ln p of each row's tokens from its start on: (len(ids),) float64."""
    longest = max(map(len, ids)) - 1
    x = torch.tensor([(i[:-1] + [0] * longest)[:longest] for i in ids], device=device)  # (rows, T)
    y = torch.tensor([([-1] * (start - 1) + i[start:] + [-1] * longest)[:longest] for i, start in zip(ids, starts)], device=device)
    logits = model(x, every=True)[0]  # (rows, T, V)
    nll = F.cross_entropy(logits.transpose(1, 2), y, ignore_index=-1, reduction="none")
    return -nll.cpu().double().sum(1)


def answer(model, vocabulary, examples, device="cpu"):
    """Rows of the table: [successful, expected, actual, score, prompt]."""
    rows = []
    for example in examples:
        p = score(model, vocabulary, example["prompt"], example["classes"], device)
        actual = example["classes"][int(p.argmax())]
        rows.append([actual == example["expected"], example["expected"], actual, round(p.max().item(), 4),
                     example["prompt"]])
    return rows


def accuracies(rows):
    """{class: (right, all)} by what was expected."""
    found = collections.defaultdict(lambda: [0, 0])
    for successful, expected, *_ in rows:
        found[expected][0] += successful
        found[expected][1] += 1
    return {name: tuple(found[name]) for name in sorted(found)}


def report(rows, names):
    """Lines: accuracy over all and per class, the confusion matrix, the failures."""
    right = sum(row[0] for row in rows)
    counts = collections.Counter((row[1], row[2]) for row in rows)
    columns = max(map(width, ["expected", *map(one_line, names)])) + 2
    yield f"accuracy {right / len(rows):.4f} ({right} of {len(rows)})"
    yield "\n" + "expected".ljust(columns) + "accuracy  " + "".join(f"[{n}]".rjust(6) for n in range(len(names)))
    per_class = accuracies(rows)
    for n, name in enumerate(names):
        good, all_ = per_class.get(name, (0, 0))
        share = f"{good / all_:.4f}" if all_ else "-"
        yield f"{pad(one_line(name), columns)}{share:<10}" + "".join(f"{counts[name, other]:>6}" for other in names) + f"  [{n}]"
    failures = [row for row in rows if not row[0]]
    for _, expected, actual, p, prompt in failures[:20]:
        yield f"wrong: {prompt!r}: expected {one_line(expected)}, actual {one_line(actual)} (score {p:.2f})"
    if len(failures) > 20:
        yield f"... and {len(failures) - 20} more"


def log_to_wandb(rows, names):
    """One run of job type `evaluate`; a tracker that fails costs a warning."""
    flags = {"project": wandb_project} if wandb_project != "auto" else {}
    run = wandb_run({"project": PROJECT, "name": f"evaluate-{Path(out_dir).name}", "job_type": "evaluate"} | flags, flags)
    run["id"] = new_run_id(run["name"])
    try:
        tracker = Wandb(Session("", redact(settings(globals())), run, x="iter"))
        print(*tracker.take_messages(), sep="\n")
        wandb, place = tracker.wandb, {name: n for n, name in enumerate(names)}
        table = wandb.Table(columns=["Successful", "Expected", "Actual", "Score", "Prompt"], data=rows)
        matrix = wandb.plot.confusion_matrix(y_true=[place[row[1]] for row in rows], preds=[place[row[2]] for row in rows],
                                             class_names=names)
        tracker.run.log({"evaluation": table, "confusion_matrix": matrix, "accuracy": sum(r[0] for r in rows) / len(rows)}
                        | {f"accuracy/{name}": good / all_ for name, (good, all_) in accuracies(rows).items()})
        tracker.finish(rows=1)
        for line in tracker.take_messages():
            print(line)
    except Exception as e:
        print(f"warning: not logged to W&B ({redact(reason(e))})")


def keep(rows, names):
    """out_dir/evaluation.json, which the page shows with the run."""
    counts = collections.Counter((row[1], row[2]) for row in rows)
    found = {"data": data, "accuracy": sum(row[0] for row in rows) / len(rows), "names": names,
             "matrix": [[counts[expected, actual] for actual in names] for expected in names],
             "columns": ["Successful", "Expected", "Actual", "Score", "Prompt"], "rows": [r for r in rows if not r[0]][:100]}
    try:
        write_atomic(Path(out_dir, "evaluation.json"), json.dumps(found))
    except OSError as e:
        print(f"warning: {out_dir}/evaluation.json cannot be written ({e.strerror})")


def evaluate_labelled(model, vocabulary, device):
    examples = read_labelled(data)
    rows = answer(model, vocabulary, examples, device)
    names = sorted({c for example in examples for c in example["classes"]})
    print("\n".join(report(rows, names)))
    if run_folder.is_run(out_dir):
        keep(rows, names)
    if wandb_log:
        log_to_wandb(rows, names)


# ---- multiple choice --------------------------------------------------------------------------------------------

def read_task(path):
    """[(context, [choice], the right one's number)] of a .jsonl file."""
    questions, number = [], 0
    try:
        for number, line in json_lines(path):
            row = parse_json(line)
            choices, right = strings(row, "choices"), int(row["answer"])
            if not all(choices) or not 0 <= right < len(choices):
                raise ValueError(f"answer {right} of {len(choices)} choices")
            questions.append((str(row["context"]), choices, right))
    except OSError as e:
        fail(f"--harness={path}: cannot be read ({e.strerror}); expected a .jsonl file")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as e:
        fail(f"{path}, line {number}: {type(e).__name__} {e}; expected {{\"context\": ..., \"choices\": [...], \"answer\": 0}}")
    return questions or fail(f"{path}: is empty; expected a question a line")


@torch.inference_mode()
def choose(model, vocabulary, context, choices, device="cpu"):
    """
    (the likeliest choice, the likeliest for its number of characters) behind the context and a space. What does not fit the
    model's context loses its beginning. As lm-eval's acc and acc_norm: https://arxiv.org/abs/2405.14782
    """
    context = context.rstrip()
    before, ids, starts = len(vocabulary.encode_prompt(context)), [], []
    for choice in choices:
        whole = vocabulary.encode(f"{context} {choice}", bos=vocabulary.add_bos or not context)
        kept = whole[-model.args.max_seq_len - 1:]
        ids.append(kept)
        starts.append(max(1, before - (len(whole) - len(kept))))
    found = log_likelihoods(model, ids, starts, device)
    return int(found.argmax()), int((found / torch.tensor([len(choice) for choice in choices])).argmax())


def evaluate_choices(model, vocabulary, device):
    questions = read_task(harness)
    answers = [(right, *choose(model, vocabulary, context, choices, device)) for context, choices, right in questions]
    for name, place in ("acc", 1), ("acc_norm", 2):
        share = sum(row[place] == row[0] for row in answers) / len(answers)
        error = math.sqrt(share * (1 - share) / max(1, len(answers) - 1))  # of the mean, from the sample's deviation
        low, high = max(0, share - 1.96 * error), min(1, share + 1.96 * error)
        print(f"{name:<9}{share:.4f} +- {error:.4f} ({low:.4f} to {high:.4f} with 95 % confidence; {len(answers)} questions)")


# ---- a small labelled data set ----------------------------------------------------------------------------------

POLITE = ("{}", "please {}", "{} please", "can you {}", "could you {} now", "hey, {}", "{} for me")
INTENTS = {
    "open_application": ("open {app}", "start {app}", "launch {app}", "bring up {app}"),
    "set_alarm": ("wake me at {hour}", "set an alarm for {hour}", "ring at {hour} {day}", "alarm at {hour} {day}"),
    "set_timer": ("set a timer for {minutes} minutes", "count down {minutes} minutes", "remind me in {minutes} minutes"),
    "battery": ("tell me how much battery is left", "check the battery {day}", "say whether the phone needs charging",
                "show the charge of the {device}"),
    "volume_up": ("turn up the {device}", "make the {device} louder", "raise the volume of {app}"),
    "volume_down": ("turn down the {device}", "make the {device} quieter", "lower the volume of {app}"),
    "call": ("call {person}", "phone {person} {day}", "ring up {person}", "get {person} on the line"),
    "chat": ("tell me a joke about {person}", "say how you are {day}", "talk to me about {person}",
             "tell me what you think of {app}"),
}
SLOTS = {
    "app": ("the camera", "music", "the calendar", "maps", "mail", "the browser", "photos", "notes", "the clock", "chess"),
    "hour": ("six", "seven", "half past eight", "nine", "noon", "ten in the evening", "five thirty", "four"),
    "day": ("today", "tomorrow", "on monday", "on friday", "this evening", "next week"),
    "minutes": ("two", "three", "five", "ten", "fifteen", "twenty", "forty", "ninety"),
    "device": ("radio", "speaker", "phone", "television", "headset", "tablet"),
    "person": ("mum", "dad", "anna", "the doctor", "my boss", "tom", "the neighbour", "grandma"),
}


def intents(seed=1337):
    """[(prompt, class)]: every pattern with every filling and manner, in a fixed shuffled order."""
    found = []
    for name, patterns in INTENTS.items():
        for pattern, manner in itertools.product(patterns, POLITE):
            used = [slot for slot in SLOTS if f"{{{slot}}}" in pattern]
            for filling in itertools.product(*(SLOTS[slot] for slot in used)):
                found.append((manner.format(pattern.format(**dict(zip(used, filling)))), name))
    random.Random(seed).shuffle(found)
    return found


def write_intents(folder):
    """One in ten goes to test.jsonl, as labelled prompts, the rest to train.jsonl, as text."""
    found, folder = intents(), Path(folder)
    tests = len(found) // 10
    files = {folder / "test.jsonl": [{"prompt": prompt, "expected": name} for prompt, name in found[:tests]],
             folder / "train.jsonl": [{"text": prompt + between + name} for prompt, name in found[tests:]]}
    files = {path: "".join(json.dumps(row) + "\n" for row in rows) for path, rows in files.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            if path.exists() and path.read_bytes() != text.encode():
                fail(f"{path}: is there and holds something else; give another folder than --make_intents={folder}")
        for path, text in files.items():
            write_atomic(path, text)
    except OSError as e:
        fail(f"--make_intents={folder}: cannot be written ({e.strerror})")
    print(f"wrote {len(found) - tests} prompts and answers to {folder}/train.jsonl, {tests} labelled prompts to "
          f"{folder}/test.jsonl")


def main():
    if make_intents:
        return write_intents(make_intents)
    if not (perplexity or data or harness):
        fail("nothing to evaluate; give --perplexity=FILE, --data=FILE or --harness=FILE")
    place = distributed.setup(device)
    globals()["out_dir"] = checkpoint.newest_run(out_dir)
    model, vocabulary = load_model(out_dir, tokenizer, place)
    if perplexity:
        print_perplexity(model, vocabulary, perplexity, place)
    if data:
        evaluate_labelled(model, vocabulary, place)
    if harness:
        evaluate_choices(model, vocabulary, place)


if __name__ == "__main__":
    configure(globals(), positional="out_dir")
    main()
