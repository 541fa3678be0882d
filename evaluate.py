"""
Evaluate a trained model.

    python evaluate.py out/my --perplexity=text.txt   how well it predicts a text
    python evaluate.py out/my --data=labelled.jsonl   how often it finds the expected class
    python evaluate.py --make_intents=intents         write a small labelled data set to try that
    python evaluate.py out/my --harness=task.jsonl    multiple choice: how often it is right
    python evaluate.py out/chat --conversations=FILE  how often it gives the expected last answer
    python evaluate.py out/my --pairs=stories         how often it prefers the right text

A labelled prompt is a line {"prompt": ..., "expected": ..., "classes": [...]}; "classes" defaults
to all values of "expected" in the file. The model's answer is the class with the highest likelihood
after the prompt. A line of a task is {"context": ..., "choices": [...], "answer": index from 0}, a
form that fits HellaSwag, ARC and PIQA.

Conversations are lines of .jsonl in any form that train.py reads, and end with an answer. The model
answers the last question greedily. It is right if its answer is the expected one, ignoring white
space at both ends. If lines have a "kind" or a "set", the results are listed by these.

A minimal pair is a line {"good": text, "bad": text}: two texts that differ in one place. If pairs
have a "kind", the results are listed by kind.
"""
import codecs
import collections
import itertools
import json
import math
import random
import sys
from pathlib import Path

from configurator import configure, fail  # first: it reports missing packages

import torch

from engine import charts
from engine.training import checkpoint, distributed, hardware, run_folder
from engine.files import write_atomic
from engine.formats.chat_template import Chat
from engine.text import pairs as story_pairs, questions
from engine.text.conversations import conversation, format_of
from engine.training.likelihood import batch_tokens, compare_pairs, log_likelihoods
from engine.training.load import chat_template, load_model
from engine.tracking.redact import redact
from engine.streams import one_line, pad, width
from engine.untrusted import MAX_JSON, parse_json, read_json, read_untrusted
from tokenizer import decode_utf8
from track import PROJECT, Session, Wandb, new_run_id, reason, wandb_run

out_dir = "out"     # model: a run's folder, a folder of runs (the newest), a checkpoint's folder, a
                    # Hugging Face, PEFT or Meta folder, a GGUF or llama2.c file
tokenizer = ""      # vocabulary of a llama2.c file: tokenizer.model, tokenizer.json, tokenizer.bin
perplexity = ""     # UTF-8 text file to compute the perplexity of
data = ""           # labelled prompts, .jsonl
harness = ""        # a multiple-choice task, .jsonl
conversations = ""  # conversations that end with the expected answer, .jsonl; or "questions": 500
                    # about built-in stories (engine/text/questions.py)
pairs = ""          # minimal pairs, .jsonl; or "stories": 600 of the built-in stories
                    # (engine/text/pairs.py)
between = "\n= "    # text between prompt and answer, as in the text that the model was trained on
make_intents = ""   # folder to write train.jsonl (texts) and test.jsonl (labelled prompts) to
wandb_log = False   # log the table of answers and accuracies to Weights & Biases
wandb_project = "auto"  # W&B project; auto: WANDB_PROJECT, else that of `wandb init`, else llamac
device = "auto"     # auto, cpu, cuda, cuda:1, mps

MAX_TEXT = 1 << 28  # bytes of a text to predict, or of a file of prompts
MAX_ANSWER = 200    # max tokens of an answer in a conversation
AT_ONCE = 16        # max answers that are generated in one batch
TESTS = 500         # conversations of --conversations=questions
MAX_SHOWN = 20      # max classes whose confusion matrix is printed; the picture has all
COLUMNS = ["Successful", "Expected", "Actual", "Score", "Prompt"]
CLASS_COLUMNS = ["Class", "Precision", "Recall", "F1", "Prompts"]
ANSWER_COLUMNS = ["Successful", "Expected", "Answer", "Set", "Kind", "Question"]
GROUP_COLUMNS = ["Set", "Kind", "Accuracy", "Right", "Questions", "Majority"]
PAIR_COLUMNS = ["Successful", "Kind", "Before", "Expected", "Preferred", "Nats"]
KIND_COLUMNS = ["Kind", "Accuracy", "From", "To", "Right", "Pairs"]
CHOICE_COLUMNS = ["Measure", "Accuracy", "From", "To", "Right", "Questions"]
PERPLEXITY_COLUMNS = ["Perplexity", "Nats per token", "Bits per byte", "Tokens"]


# ---- perplexity ----------------------------------------------------------------------------------

@torch.inference_mode()
def negative_log_likelihood(model, ids, device="cpu"):
    """
    Return the sum over ids[1:] of -ln p(id | ids before it in its window), in nats. ids: list of
    int, BOS first. Windows of max_seq_len inputs do not overlap, and each begins at position 0.
    """
    ids, T = torch.tensor(ids), model.args.max_seq_len
    whole = (len(ids) - 1) // T * T
    windows = max(1, batch_tokens(model) // T)
    # Inputs, and targets one id later, in batches of up to `windows` rows: (rows, T).
    x, y = (ids[first:first + whole].view(-1, T).split(windows) for first in (0, 1))
    batches = list(zip(x, y)) if whole else []
    if whole + 1 < len(ids):
        batches.append((ids[None, whole:-1], ids[None, whole + 1:]))
    return sum(model(x.to(device), y.to(device))[1].item() * y.numel() for x, y in batches)


def evaluate_perplexity(model, vocabulary, path, device, folder):
    try:
        text = read_untrusted(path, MAX_TEXT).removeprefix(codecs.BOM_UTF8)
    except OSError as e:
        fail(f"--perplexity={path}: cannot be read ({e.strerror}); expected a text file")
    ids = vocabulary.encode(decode_utf8(text), bos=True)
    if len(ids) < 2:
        fail(f"--perplexity={path}: the text has no tokens")
    count, total = len(ids) - 1, negative_log_likelihood(model, ids, device)
    nats = total / count
    if not nats < 700:  # too large for math.exp, or NaN
        fail(f"{out_dir}: {nats:.4g} nats per token, expected about "
             f"{math.log(model.args.vocab_size):.1f} or less; its weights are broken")
    bits = total / math.log(2) / len(text)
    print(f"perplexity {math.exp(nats):.4f} ({count} tokens, {nats:.6f} nats per token, "
          f"{bits:.6f} bits per byte)")
    save_for_page("perplexity", {"data": path, "names": PERPLEXITY_COLUMNS,
                                 "groups": [[math.exp(nats), nats, bits, count]]}, folder)


# ---- labelled prompts ----------------------------------------------------------------------------

def read_lines(option, path, parse, expected):
    """
    Return [parse(value)] of the lines of a .jsonl file. parse: may raise KeyError, TypeError and
    others; expected: the form of a line, for messages.
    """
    rows, number = [], 0
    try:
        # Only line feeds end a line: JSON allows U+2028 inside a text.
        lines = read_untrusted(path, MAX_TEXT).decode("utf-8-sig").split("\n")
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append(parse(parse_json(line)))
    except OSError as e:
        fail(f"--{option}={path}: cannot be read ({e.strerror}); expected a .jsonl file")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        fail(f"{path}, line {number}: {type(e).__name__} {e}; expected {expected}")
    return rows or fail(f"{path}: is empty; expected lines of {expected}")


def strings(row, name):
    """Return a row's list of strings or numbers as strings. Raises TypeError for other values."""
    found = row[name]
    if isinstance(found, list) and all(isinstance(each, (str, int, float)) for each in found):
        return [str(each) for each in found]
    raise TypeError(f"{name!r} is {json.dumps(found)[:40]}, expected a list of strings")


def read_labelled(path):
    """Return [{"prompt", "expected", "classes"}] of a .jsonl file."""
    def parse(row):
        return {"prompt": str(row["prompt"]), "expected": str(row["expected"]),
                "classes": strings(row, "classes") if "classes" in row else []}

    examples = read_lines("data", path, parse, '{"prompt": ..., "expected": ...}')
    all_classes = sorted({example["expected"] for example in examples})
    for example in examples:
        example["classes"] = example["classes"] or all_classes
        if example["expected"] not in example["classes"]:
            fail(f"{path}: {example['expected']!r} is expected but not among its classes "
                 f"{example['classes']}")
    return examples


def encode_answers(model, vocabulary, prompt, classes):
    """
    Return the ids of the prompt with each class as the answer. EOS ends each answer, so that an
    answer is not favored for being a prefix of another.
    """
    ids = [vocabulary.encode_prompt(prompt + between + c, eos=True) for c in classes]
    longest = max(map(len, ids)) - 1
    if longest > model.args.max_seq_len:
        fail(f"the prompt {prompt[:40]!r} and an answer have {longest} tokens, the model's context "
             f"is {model.args.max_seq_len}; shorten it")
    return ids


def score(model, vocabulary, examples, device="cpu"):
    """
    Return for each example the probability of each class as the answer to the prompt, normalized to
    a sum of 1: a list of (classes,).
    """
    ids = [encode_answers(model, vocabulary, example["prompt"], example["classes"])
           for example in examples]
    flat = list(itertools.chain(*ids))
    # The sums include the prompt, as its last token may depend on the answer; what all classes have
    # in common cancels in the softmax.
    found = log_likelihoods(model, flat, [1] * len(flat), device)
    return [torch.softmax(sums, 0) for sums in found.split([len(rows) for rows in ids])]


def answer(model, vocabulary, examples, device="cpu"):
    """Return rows of the table with COLUMNS."""
    rows = []
    for example, p in zip(examples, score(model, vocabulary, examples, device)):
        expected, actual = example["expected"], example["classes"][int(p.argmax())]
        rows.append([actual == expected, expected, actual, round(p.max().item(), 4),
                     example["prompt"]])
    return rows


def share_right(rows):
    return sum(row[0] for row in rows) / len(rows)


def interval(right, n):
    """
    Return (low, high) of the accuracy of a model that was right `right` times out of n, with 95 %
    confidence: Wilson's interval. Twice the standard error would be 0 where all answers are right.
    """
    share, z2 = right / n, 1.96 ** 2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * share * (1 - share) / n + (z2 / (2 * n)) ** 2) / (1 + z2 / n)
    return middle - half, middle + half


def table(names, rows):
    """Yield the lines of a table: names of the columns, then rows of texts and numbers."""
    cells = [[name.lower() for name in names]]
    for row in rows:
        cells.append([f"{cell:.4f}" if isinstance(cell, float) else one_line(str(cell))
                      for cell in row])
    widths = [max(width(row[n]) for row in cells) for n in range(len(names))]
    for row in cells:
        yield "  ".join(pad(cell, size) for cell, size in zip(row, widths)).rstrip()


def confusion_matrix(rows, names):
    """Return counts of [expected class][actual class]."""
    counts = collections.Counter((row[1], row[2]) for row in rows)
    return [[counts[expected, actual] for actual in names] for expected in names]


def class_scores(matrix, names):
    """
    Return a row with CLASS_COLUMNS for each class. matrix: from confusion_matrix. A score whose
    denominator is 0 is None: the precision of a class that is never the answer, the recall of a
    class without prompts, the F1 of both.
    """
    rows = []
    for n, name in enumerate(names):
        right, prompts = matrix[n][n], sum(matrix[n])
        answers = sum(counts[n] for counts in matrix)
        precision = right / answers if answers else None
        recall = right / prompts if prompts else None
        f1 = 2 * right / (prompts + answers) if prompts + answers else None
        rows.append([name, precision, recall, f1, prompts])
    return rows


def macro_average(scores):
    """
    Return the means of precision, recall and F1 over the classes that are expected or answered,
    with 0 for None, as scikit-learn's classification_report computes them.
    """
    used = [row for row in scores if row[3] is not None]
    return [sum(row[n] or 0.0 for row in used) / len(used) for n in (1, 2, 3)]


def report(rows, names):
    """
    Yield lines: the overall accuracy, the scores of each class and their average, the confusion
    matrix, the failures.
    """
    matrix = confusion_matrix(rows, names)
    scores = class_scores(matrix, names)
    yield f"accuracy {share_right(rows):.4f} ({sum(row[0] for row in rows)} of {len(rows)})"
    yield ""
    average = ["macro average", *macro_average(scores), len(rows)]
    shown = [["-" if cell is None else cell for cell in row] for row in [*scores, average]]
    yield from table(CLASS_COLUMNS, shown)
    if without := [one_line(name) for name, *_, prompts in scores if not prompts]:
        yield f"without prompts in the test: {', '.join(without)}"
    yield ""
    if len(names) > MAX_SHOWN:
        yield f"{len(names)} classes: the confusion matrix is in the picture"
    else:
        yield from matrix_lines(matrix, names)
    failures = [row for row in rows if not row[0]]
    for _, expected, actual, p, prompt in failures[:20]:
        yield (f"wrong: {prompt!r}: expected {one_line(expected)}, actual {one_line(actual)} "
               f"(score {p:.2f})")
    if len(failures) > 20:
        yield f"... and {len(failures) - 20} more"


def matrix_lines(matrix, names):
    """Yield the lines of a confusion matrix: a row for each expected class."""
    columns = max(map(width, ["expected", *map(one_line, names)])) + 2
    yield "expected".ljust(columns) + "".join(f"[{n}]".rjust(6) for n in range(len(names)))
    for n, (name, counts) in enumerate(zip(names, matrix)):
        yield pad(one_line(name), columns) + "".join(f"{c:>6}" for c in counts) + f"  [{n}]"


def log_to_wandb(folder, results):
    """
    Log to one run of job type `evaluate`; print a warning if that fails. results(wandb): returns
    {name: value} to log.
    """
    flags = {"project": wandb_project} if wandb_project != "auto" else {}
    described = {"project": PROJECT, "name": f"evaluate-{Path(folder).name}",
                 "job_type": "evaluate"}
    run = wandb_run(described | flags, flags)
    run["id"] = new_run_id(run["name"])
    config = {"out_dir": folder, "tokenizer": tokenizer, "data": data, "between": between,
              "conversations": conversations, "pairs": pairs}
    try:
        tracker = Wandb(Session("", redact(config), run, x="iter"))
        print(*tracker.take_messages(), sep="\n")
        tracker.run.log(results(tracker.wandb))
        tracker.finish(rows=1)
        for line in tracker.take_messages():
            print(line)
    except Exception as e:
        print(f"warning: not logged to W&B ({redact(reason(e))})")


def save_for_page(kind, found, folder):
    """
    Store {name: value} as the result of an evaluation in folder/evaluation.json, which the page
    shows with the run. kind: name of the evaluation's setting.
    """
    if not run_folder.is_run(folder):
        return
    path = Path(folder, "evaluation.json")
    try:
        kept = read_json(path, MAX_JSON, {})
    except (OSError, ValueError):
        kept = {}
    if not isinstance(kept, dict) or "accuracy" in kept:  # written by an earlier version
        kept = {}
    try:
        write_atomic(path, json.dumps(kept | {kind: found}))
    except OSError as e:
        print(f"warning: {path} cannot be written ({e.strerror})")


def save_picture(matrix, names, folder):
    """
    Draw a confusion matrix to folder/confusion.svg if `folder` is a run's. An existing file that
    evaluate.py has not drawn is kept, with a warning.
    """
    if not run_folder.is_run(folder):
        return
    path = Path(folder, "confusion.svg")
    try:
        if path.exists() and not path.read_bytes().startswith(charts.HEAT_MAP.encode()):
            print(f"warning: {path} was not written by evaluate.py; move it elsewhere to get the "
                  "picture of the confusion matrix")
            return
        write_atomic(path, charts.heat_map(matrix, names, "actual", "expected"))
    except OSError as e:
        print(f"warning: {path} cannot be written ({e.strerror})")
        return
    print(f"wrote {path}")


def wrong(rows):
    """Return the rows of the first 100 wrong answers."""
    return [row for row in rows if not row[0]][:100]


def evaluate_labelled(model, vocabulary, device, folder):
    examples = read_labelled(data)
    rows = answer(model, vocabulary, examples, device)
    names = sorted({c for example in examples for c in example["classes"]})
    print("\n".join(report(rows, names)))
    matrix = confusion_matrix(rows, names)
    scores = class_scores(matrix, names)
    average = dict(zip(("precision", "recall", "f1"), macro_average(scores)))
    save_for_page("data", {"data": data, "accuracy": share_right(rows), "names": names,
                           "matrix": matrix, "score_columns": CLASS_COLUMNS, "scores": scores,
                           "macro_average": average, "columns": COLUMNS, "rows": wrong(rows)},
                  folder)
    save_picture(matrix, names, folder)

    def results(wandb):
        number = {name: n for n, name in enumerate(names)}
        chart = wandb.plot.confusion_matrix(
            y_true=[number[row[1]] for row in rows], preds=[number[row[2]] for row in rows],
            class_names=names)
        by_class = {}
        for name, *values, _ in scores:
            for metric, value in zip(average, values):
                if value is not None:
                    by_class[f"{metric}/{name}"] = value
        return {"evaluation": wandb.Table(columns=COLUMNS, data=rows), "confusion_matrix": chart,
                "classes": wandb.Table(columns=CLASS_COLUMNS, data=scores),
                "accuracy": share_right(rows), **average, **by_class}

    if wandb_log:
        log_to_wandb(folder, results)


# ---- multiple choice -----------------------------------------------------------------------------

def read_task(path):
    """Return [(context, [choice], index of the right one)] of a .jsonl file."""
    def parse(row):
        choices, right = strings(row, "choices"), int(row["answer"])
        if not all(choices) or not 0 <= right < len(choices):
            raise ValueError(f"answer {right} of {len(choices)} choices")
        return str(row["context"]), choices, right

    return read_lines("harness", path, parse, '{"context": ..., "choices": [...], "answer": 0}')


def encode_choices(model, vocabulary, context, choices):
    """
    Return [(ids, index of the id with which the choice begins)] of each choice as the continuation
    of the context and a space. Ids that exceed the model's context are cut off at the beginning.
    """
    context, found = context.rstrip(), []
    before = len(vocabulary.encode_prompt(context))
    for choice in choices:
        whole = vocabulary.encode(f"{context} {choice}", bos=vocabulary.add_bos or not context)
        ids = whole[-model.args.max_seq_len - 1:]
        cut = len(whole) - len(ids)
        found.append((ids, max(1, before - cut)))
    return found


def choose(model, vocabulary, questions, device="cpu"):
    """
    Return for each question the indices of two choices: the likeliest, and the likeliest per
    character (acc and acc_norm of lm-eval, https://arxiv.org/abs/2405.14782). questions: [(context,
    choices)].
    """
    rows = []
    for context, choices in questions:
        rows += encode_choices(model, vocabulary, context, choices)
    sums = log_likelihoods(model, *zip(*rows), device)
    if not torch.isfinite(sums).all():
        fail(f"{out_dir}: the log-likelihood of a text is not finite; its weights are broken")
    found = []
    for (_, choices), total in zip(questions, sums.split([len(c) for _, c in questions])):
        lengths = torch.tensor([len(choice) for choice in choices])
        found.append((int(total.argmax()), int((total / lengths).argmax())))
    return found


def evaluate_choices(model, vocabulary, device, folder):
    questions = read_task(harness)
    chosen = choose(model, vocabulary, [question[:2] for question in questions], device)
    answers = [(right, *indices) for (*_, right), indices in zip(questions, chosen)]
    n, measures = len(answers), []
    for name, column in ("acc", 1), ("acc_norm", 2):
        count = sum(row[column] == row[0] for row in answers)
        share, (low, high) = count / n, interval(count, n)
        measures.append([name, share, low, high, count, n])
        error = math.sqrt(share * (1 - share) / max(1, n - 1))  # standard error of the mean
        print(f"{name:<9}{share:.4f} +- {error:.4f} ({low:.4f} to {high:.4f} with 95 % confidence; "
              f"{n} questions)")
    save_for_page("harness", {"data": harness, "accuracy": measures[0][1],
                              "names": CHOICE_COLUMNS, "groups": measures}, folder)


# ---- conversations -------------------------------------------------------------------------------

def read_conversations(path):
    """
    Return [(turns, set, kind)] of a .jsonl file, or of the built-in questions. turns: [(role,
    text)], the last one an answer; set and kind: "" if the line has none.
    """
    def parse(record):
        key = format_of(record, ())
        if key is None:
            raise ValueError("it is not a conversation")
        turns = conversation(record, key)
        if not turns or turns[-1][0] != "assistant":
            raise ValueError("its last turn is not an answer")
        return turns, str(record.get("set", "")), str(record.get("kind", ""))

    if path == "questions":
        return [parse(record) for record in questions.testing(TESTS)]
    return read_lines("conversations", path, parse,
                      'a conversation that ends with an answer: {"messages": [...]}')


def chat_of(model, vocabulary, folder):
    """
    Return the Chat that encodes a model's conversations, None for a base model, which has no chat
    template.
    """
    source = chat_template(checkpoint.origin(folder))
    if not source:
        return None
    try:
        chat = Chat(source, vocabulary)
    except ValueError as e:
        fail(f"{folder}: {e}")
    if len(chat.tokenizer.pieces()) > model.args.vocab_size:
        fail(f"{folder}: its vocabulary lacks the markers of its chat template; fine-tune it on "
             "conversations first")
    return chat


@torch.inference_mode()
def write_answers(model, vocabulary, chat, asked):
    """
    Return [(text, number of tokens)] of the model's greedy answers. asked: lists of turns that end
    with a question. chat: None continues the plain text, one turn per line.
    """
    if chat:
        prompts, ends = [chat.encode(turns)[0] for turns in asked], [chat.stop]
    else:
        plain = ["\n".join(text for _, text in turns) for turns in asked]
        prompts, ends = [vocabulary.encode_prompt(text) for text in plain], []
    ends += [vocabulary.bos_id, vocabulary.eos_id]
    longest, context = max(map(len, prompts)), model.args.max_seq_len
    if longest > context:
        fail(f"the longest conversation has {longest} tokens, the model's context is {context}; "
             "shorten it")
    found = []
    for first in range(0, len(prompts), AT_ONCE):
        batch = prompts[first:first + AT_ONCE]
        try:
            texts = model.generate(batch, MAX_ANSWER, temperature=0, stop=ends)
        except RuntimeError as e:
            if hardware.is_out_of_memory(e):
                fail("out of memory on the device; give --device=cpu")
            raise
        for prompt, text in zip(batch, texts):
            new = text[len(prompt):]
            new = new[:-1] if new[-1] in ends else new
            found.append((vocabulary.decode(new).strip(), len(new)))
    return found


def majority_guess(rows):
    """
    Return the fraction of the most frequent expected answer: the accuracy of always giving it.
    """
    return collections.Counter(row[1] for row in rows).most_common(1)[0][1] / len(rows)


def group_results(rows):
    """
    Return a row with GROUP_COLUMNS for each set and kind of the answers, in order of appearance.
    """
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row[3], row[4]].append(row)
    # Sets in the order of the file, and kinds within them.
    sets, kinds = (list(dict.fromkeys(key[n] for key in groups)) for n in (0, 1))
    ordered = sorted(groups, key=lambda key: (sets.index(key[0]), kinds.index(key[1])))
    return [[*key, share_right(groups[key]), sum(row[0] for row in groups[key]), len(groups[key]),
             majority_guess(groups[key])] for key in ordered]


def report_answers(rows, lengths, groups):
    """
    Yield lines: overall accuracy and majority guess, the same by set and kind, the failures.
    lengths: mean tokens of the model's answers, and of the expected ones.
    """
    guess = sum(share * count for *_, count, share in groups) / len(rows)
    yield (f"accuracy {share_right(rows):.4f} ({sum(row[0] for row in rows)} of {len(rows)}), "
           f"{guess:.4f} by always giving the most frequent answer of each kind; "
           f"{lengths[0]:.1f} tokens on average, expected {lengths[1]:.1f}")
    if len(groups) > 1:
        yield ""
        yield from table(GROUP_COLUMNS, groups)
    failures = [row for row in rows if not row[0]]
    for _, expected, given, _, _, question in failures[:20]:
        asked = question if len(question) <= 60 else "..." + question[-57:]
        yield f"wrong: {asked!r}: expected {one_line(expected)}, answered {one_line(given)}"
    if len(failures) > 20:
        yield f"... and {len(failures) - 20} more"


def evaluate_conversations(model, vocabulary, folder):
    found = read_conversations(conversations)
    chat = chat_of(model, vocabulary, folder)
    if not chat:
        print("the model has no chat template: it continues the plain text, as a base model does")
    answers = write_answers(model, vocabulary, chat, [turns[:-1] for turns, *_ in found])
    rows = []
    for (turns, of_set, kind), (given, _) in zip(found, answers):
        question, expected = turns[-2][1], turns[-1][1].strip()
        rows.append([given == expected, expected, given, of_set, kind, question])
    lengths = (sum(length for _, length in answers) / len(rows),
               sum(len(vocabulary.encode_inside(row[1])) for row in rows) / len(rows))
    groups = group_results(rows)
    print("\n".join(report_answers(rows, lengths, groups)))
    save_for_page("conversations", {"data": conversations, "accuracy": share_right(rows),
                                    "names": GROUP_COLUMNS, "groups": groups,
                                    "columns": ANSWER_COLUMNS, "rows": wrong(rows)}, folder)

    def results(wandb):
        by_group = {"/".join(filter(None, ("accuracy", of_set, kind))): share
                    for of_set, kind, share, *_ in groups}
        return by_group | {"evaluation": wandb.Table(columns=ANSWER_COLUMNS, data=rows),
                           "accuracy": share_right(rows)}

    if wandb_log:
        log_to_wandb(folder, results)


# ---- minimal pairs -------------------------------------------------------------------------------

def read_pairs(path, vocabulary):
    """Return the minimal pairs of a .jsonl file, or of the built-in stories."""
    def parse(row):
        pair = {"good": row["good"], "bad": row["bad"], "kind": str(row.get("kind", ""))}
        for name in "good", "bad":
            if not isinstance(pair[name], str):
                raise TypeError(f"{name!r} is {json.dumps(pair[name])[:40]}, expected a text")
            if not vocabulary.encode(pair[name]):
                raise ValueError(f"{name!r} has no tokens")
        if pair["good"] == pair["bad"]:
            raise ValueError("both texts are the same")
        return pair

    if path == "stories":
        return list(story_pairs.write(story_pairs.TEST))
    return read_lines("pairs", path, parse, '{"good": ..., "bad": ..., "kind": ...}')


def differing_words(good, bad):
    """
    Return the words before the difference of two texts, those of `good` in it, those of `bad`.
    """
    def common(words, others):
        n = 0
        while n < min(len(words), len(others)) and words[n] == others[n]:
            n += 1
        return n

    good, bad = good.split(" "), bad.split(" ")
    start = common(good, bad)
    end = common(good[start:][::-1], bad[start:][::-1])  # words after the difference
    parts = good[:start], good[start:len(good) - end], bad[start:len(bad) - end]
    return [" ".join(words) for words in parts]


def kind_results(rows):
    """Return a row with KIND_COLUMNS for each kind of pairs, in order of appearance."""
    kinds = collections.defaultdict(list)
    for row in rows:
        kinds[row[1]].append(row)
    found = []
    for kind, group in kinds.items():
        count = sum(row[0] for row in group)
        found.append([kind, share_right(group), *interval(count, len(group)), count, len(group)])
    return found


def report_pairs(rows, kinds):
    """Yield lines: the overall accuracy, that of each kind, the failures."""
    count, n = sum(row[0] for row in rows), len(rows)
    low, high = interval(count, n)
    yield (f"accuracy {count / n:.4f} ({low:.4f} to {high:.4f} with 95 % confidence; {count} of "
           f"{n} pairs); chance is 0.5")
    if len(kinds) > 1:
        yield ""
        yield from table(KIND_COLUMNS, kinds)
    failures = [row for row in rows if not row[0]]
    for _, _, before, expected, preferred, nats in failures[:20]:
        context = before if len(before) <= 60 else "..." + before[-57:]
        yield (f"wrong: {context!r}: expected {one_line(expected)}, preferred "
               f"{one_line(preferred)} ({-nats:.2f} nats)")
    if len(failures) > 20:
        yield f"... and {len(failures) - 20} more"


def evaluate_pairs(model, vocabulary, device, folder):
    found = read_pairs(pairs, vocabulary)
    compared = compare_pairs(model, vocabulary, found, device)
    context, left_out = model.args.max_seq_len, len(found) - len(compared)
    if not compared:
        fail(f"--pairs={pairs}: each pair exceeds the model's context of {context} tokens; give "
             "shorter ones")
    if left_out:
        print(f"warning: {left_out} of {len(found)} pairs exceed the model's context of {context} "
              "tokens and are left out")
    if not all(math.isfinite(nats) for _, nats in compared):
        fail(f"{folder}: the log-likelihood of a text is not finite; its weights are broken")
    rows = [[nats > 0, pair["kind"], *differing_words(pair["good"], pair["bad"]), round(nats, 4)]
            for pair, nats in compared]
    kinds = kind_results(rows)
    print("\n".join(report_pairs(rows, kinds)))
    save_for_page("pairs", {"data": pairs, "accuracy": share_right(rows), "names": KIND_COLUMNS,
                            "groups": kinds, "columns": PAIR_COLUMNS, "rows": wrong(rows)}, folder)

    def results(wandb):
        by_kind = {"/".join(filter(None, ("accuracy", kind))): share for kind, share, *_ in kinds}
        return by_kind | {"evaluation": wandb.Table(columns=PAIR_COLUMNS, data=rows),
                          "accuracy": share_right(rows)}

    if wandb_log:
        log_to_wandb(folder, results)


# ---- a small labelled data set -------------------------------------------------------------------

POLITE = ("{}", "please {}", "{} please", "can you {}", "could you {} now", "hey, {}", "{} for me")
INTENTS = {
    "open_application": ("open {app}", "start {app}", "launch {app}", "bring up {app}"),
    "set_alarm": ("wake me at {hour}", "set an alarm for {hour}", "ring at {hour} {day}",
                  "alarm at {hour} {day}"),
    "set_timer": ("set a timer for {minutes} minutes", "count down {minutes} minutes",
                  "remind me in {minutes} minutes"),
    "battery": ("tell me how much battery is left", "check the battery {day}",
                "say whether the phone needs charging", "show the charge of the {device}"),
    "volume_up": ("turn up the {device}", "make the {device} louder", "raise the volume of {app}"),
    "volume_down": ("turn down the {device}", "make the {device} quieter",
                    "lower the volume of {app}"),
    "call": ("call {person}", "phone {person} {day}", "ring up {person}",
             "get {person} on the line"),
    "chat": ("tell me a joke about {person}", "say how you are {day}", "talk to me about {person}",
             "tell me what you think of {app}"),
}
SLOTS = {
    "app": ("the camera", "music", "the calendar", "maps", "mail", "the browser", "photos",
            "notes", "the clock", "chess"),
    "hour": ("six", "seven", "half past eight", "nine", "noon", "ten in the evening",
             "five thirty", "four"),
    "day": ("today", "tomorrow", "on monday", "on friday", "this evening", "next week"),
    "minutes": ("two", "three", "five", "ten", "fifteen", "twenty", "forty", "ninety"),
    "device": ("radio", "speaker", "phone", "television", "headset", "tablet"),
    "person": ("mum", "dad", "anna", "the doctor", "my boss", "tom", "the neighbour", "grandma"),
}


def intents(seed=1337):
    """Return [(prompt, class)]: every combination of pattern, slots and manner, shuffled."""
    found = []
    for name, patterns in INTENTS.items():
        for pattern, manner in itertools.product(patterns, POLITE):
            used = [slot for slot in SLOTS if f"{{{slot}}}" in pattern]
            for filling in itertools.product(*(SLOTS[slot] for slot in used)):
                prompt = manner.format(pattern.format(**dict(zip(used, filling))))
                found.append((prompt, name))
    random.Random(seed).shuffle(found)
    return found


def write_intents(folder):
    """Write a tenth to test.jsonl as labelled prompts and the rest to train.jsonl as texts."""
    found, folder = intents(), Path(folder)
    tests = len(found) // 10
    rows = {"test.jsonl": [{"prompt": prompt, "expected": name} for prompt, name in found[:tests]],
            "train.jsonl": [{"text": prompt + between + name} for prompt, name in found[tests:]]}
    files = {folder / name: "".join(json.dumps(row) + "\n" for row in rows[name]) for name in rows}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            if path.exists() and path.read_bytes() != text.encode():
                fail(f"{path}: exists with other content; give another folder than "
                     f"--make_intents={folder}")
        for path, text in files.items():
            write_atomic(path, text)
    except OSError as e:
        fail(f"--make_intents={folder}: cannot be written ({e.strerror})")
    print(f"wrote {len(found) - tests} prompts and answers to {folder}/train.jsonl, {tests} "
          f"labelled prompts to {folder}/test.jsonl")


def main():
    if make_intents:
        return write_intents(make_intents)
    if not (perplexity or data or harness or conversations or pairs):
        fail("nothing to evaluate; give --perplexity=FILE, --data=FILE, --harness=FILE, "
             "--conversations=FILE or --pairs=FILE")
    if wandb_log and (perplexity or harness):
        print("note: --wandb_log=True logs --data, --conversations and --pairs, not --perplexity "
              "and --harness", file=sys.stderr)
    torch_device, folder = distributed.setup(device), checkpoint.newest_run(out_dir)
    model, vocabulary = load_model(folder, tokenizer, torch_device)
    if perplexity:
        evaluate_perplexity(model, vocabulary, perplexity, torch_device, folder)
    if data:
        evaluate_labelled(model, vocabulary, torch_device, folder)
    if harness:
        evaluate_choices(model, vocabulary, torch_device, folder)
    if conversations:
        evaluate_conversations(model, vocabulary, folder)
    if pairs:
        evaluate_pairs(model, vocabulary, torch_device, folder)


if __name__ == "__main__":
    configure(globals(), positional="out_dir")
    main()
