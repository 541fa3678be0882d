"""
Test evaluate.py: scores of labelled prompts against sums of log probabilities, reports, W&B,
multiple choice, perplexity, conversations, and models trained on pairs and conversations.
"""
import copy
import json
import math
import os
import random
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import evaluate
import export
import track
from engine import charts
from engine.formats.chat_template import CHATML, Chat
from engine.formats.layout import TEMPLATE
from engine.training import costs
from model import ModelArgs, Transformer
from page import run_api
from tests import forked
from tokenizer import Bytes, Characters

ROOT = Path(__file__).resolve().parents[1]


def command(folder, script, *words, **env):
    clean = ({k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
             | {"OMP_NUM_THREADS": "1", "HOME": str(folder)})
    return forked.run([ROOT / script, *words], folder, clean | env)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Transformer(ModelArgs(dim=32, n_layers=1, n_heads=2, vocab_size=259,
                                 max_seq_len=48)).eval()


def test_a_score_is_the_likelihood_of_the_whole_answer(model):
    classes = ["on", "off", "on and off"]
    found, = evaluate.score(model, Bytes(), [{"prompt": "switch it", "classes": classes}])
    prefix = Bytes().encode("switch it" + evaluate.between, bos=True)
    likelihoods = []
    for c in classes:  # token by token, each from a forward pass over the tokens before it
        ids, total = prefix + Bytes().encode(c, eos=True), 0.0
        for at in range(len(prefix), len(ids)):
            total += model(torch.tensor([ids[:at]]))[0][0, -1].log_softmax(0)[ids[at]].item()
        likelihoods.append(total)
    assert torch.allclose(found.log(), torch.log_softmax(torch.tensor(likelihoods).double(), 0),
                          atol=1e-4)


@pytest.fixture
def passes(model):
    """Return a list that collects the shape (B, T) of the tokens of each forward pass."""
    seen = []
    hook = model.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    yield seen
    hook.remove()


def test_questions_are_scored_in_batches_and_each_as_alone(model, passes, monkeypatch):
    """
    A batch holds texts of similar lengths and at most EVAL_PASS tokens; a longer text is a batch
    of its own.
    """
    rng = random.Random(0)
    examples = [{"prompt": "x" * rng.randrange(1, 30),
                 "classes": ["on", "off", "a bit"][:rng.randrange(2, 4)]} for _ in range(50)]
    questions = [("The cat sat on the mat " * rng.randrange(3),
                  ["mat", "a long way home", "moon"][:rng.randrange(1, 4)]) for _ in range(50)]

    def passes_of(work):
        passes.clear()
        return work(), list(passes)

    alone = [evaluate.score(model, Bytes(), [example])[0] for example in examples]
    chosen = [evaluate.choose(model, Bytes(), [question])[0] for question in questions]
    assert len(passes) == 100
    tokens = sum(len(ids) - 1 for e in examples
                 for ids in evaluate.encode_answers(model, Bytes(), e["prompt"], e["classes"]))
    for bound, most in (4096, 2), (200, 30), (20, 150):
        monkeypatch.setattr(costs, "EVAL_PASS", bound)
        together, shapes = passes_of(lambda: evaluate.score(model, Bytes(), examples))
        assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(together, alone, strict=True))
        assert len(shapes) <= most and all(B * T <= bound or B == 1 for B, T in shapes)
        assert bound == 4096 or sum(B * T for B, T in shapes) < 1.1 * tokens
        together, shapes = passes_of(lambda: evaluate.choose(model, Bytes(), questions))
        assert together == chosen
        assert len(shapes) <= most
        assert all(B * T <= bound or B == 1 for B, T in shapes)


def test_the_report_counts_per_class_and_shows_what_went_wrong():
    rows = [[True, "a", "a", 0.9, "p1"], [False, "a", "b", 0.6, "p2"], [True, "b", "b", 0.8, "p3"]]
    text = "\n".join(evaluate.report(rows, ["a", "b", "c"]))
    assert "accuracy 0.6667 (2 of 3)" in text
    assert "wrong: 'p2': expected a, actual b (score 0.60)" in text
    table = [line.split() for line in text.splitlines()
             if line[:2] in ("a ", "b ", "c ") or line.startswith("macro")]
    # Computed by hand: one of the two answers b is right, one of the two prompts of a is answered
    # rightly, and F1 is 2 * 1 / (2 + 1) for both.
    assert table == [["a", "1.0000", "0.5000", "0.6667", "2"],
                     ["b", "0.5000", "1.0000", "0.6667", "1"],
                     ["c", "-", "-", "-", "0"],
                     ["macro", "average", "0.7500", "0.7500", "0.6667", "3"],
                     ["a", "1", "1", "0", "[0]"],
                     ["b", "0", "1", "0", "[1]"],
                     ["c", "0", "0", "0", "[2]"]]
    assert "without prompts in the test: c\n" in text
    few, many = ("\n".join(evaluate.report([[False, "a", "b", 0.6, "p"]] * n, ["a", "b"]))
                 for n in (20, 21))
    assert few.count("wrong: ") == many.count("wrong: ") == 20
    assert "more" not in few
    assert many.endswith("\n... and 1 more")
    assert "accuracy 0.0000 (0 of 21)" in many


def test_scores_of_classes_are_those_of_scikit_learn():
    """
    Compare with classification_report of scikit-learn 1.9.1 (zero_division=0), to four digits, for
    the expected classes x x x x y y y z z w and the answers x x y z y y x z y v. The class w is
    never the answer, v is never expected, and u is neither, so it is not part of the average.
    """
    rows = [[a == b, a, b, 1.0, "p"] for a, b in zip("xxxxyyyzzw", "xxyzyyxzyv")]
    matrix = evaluate.confusion_matrix(rows, [*"uvwxyz"])
    scores = {name: values for name, *values in evaluate.class_scores(matrix, [*"uvwxyz"])}
    assert scores["u"] == [None, None, None, 0]
    assert scores["v"] == [0, None, 0, 0]
    assert scores["w"] == [None, 0, 0, 1]
    assert [[round(value, 4) for value in scores[name]] for name in "xyz"] == [
        [0.6667, 0.5, 0.5714, 4], [0.5, 0.6667, 0.5714, 3], [0.5, 0.5, 0.5, 2]]
    average = evaluate.macro_average([[name, *values] for name, values in scores.items()])
    assert average == pytest.approx(
        [(2 / 3 + 0.5 + 0.5) / 5, (0.5 + 2 / 3 + 0.5) / 5, (4 / 7 + 4 / 7 + 0.5) / 5])


def test_the_matrix_is_a_picture_with_names_and_counts():
    names = ["on & off", "音乐", "x" * 40]
    image = ElementTree.fromstring(
        charts.heat_map([[3, 1, 0], [0, 4, 0], [0, 0, 0]], names, "actual", "expected"))
    texts = [node.text for node in image.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == [
        "actual", "expected",
        *[name for name in ("on & off", "音乐", "x" * 23 + "…") for _ in range(2)], "3", "1", "4"]
    cells = list(image.iter("{http://www.w3.org/2000/svg}rect"))[1:]
    assert [float(node.get("fill-opacity")) for node in cells] == [0.75, 0.25, 0, 0, 1, 0, 0, 0, 0]
    assert cells[1][0].text == "expected on & off, actual 音乐: 1"
    assert len({cells[0].get("fill"), cells[1].get("fill")}) == 2
    many = charts.heat_map([[0] * 150 for _ in range(150)], [str(n) for n in range(150)], "actual",
                           "expected")
    assert many.count("<rect") == 1 + 150 ** 2 and 'viewBox="0 0 1301 1281"' in many


def test_the_intents_are_the_same_every_time_and_no_test_prompt_is_trained_on(tmp_path, capsys):
    assert command(tmp_path, "evaluate.py", "--make_intents=one").returncode == 0
    for _ in range(2):  # into a new folder, then over identical files
        evaluate.write_intents(tmp_path / "new/two")
    assert ((tmp_path / "one/train.jsonl").read_bytes()
            == (tmp_path / "new/two/train.jsonl").read_bytes())
    tests = [json.loads(line) for line in (tmp_path / "one/test.jsonl").read_text().splitlines()]
    trained = (tmp_path / "one/train.jsonl").read_text()
    assert {t["expected"] for t in tests} == set(evaluate.INTENTS)
    assert len(tests) == (len(tests) + trained.count("\n")) // 10
    mine = tmp_path / "mine/train.jsonl"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(SystemExit):
        evaluate.write_intents(mine.parent)
    assert ("mine/train.jsonl: exists with other content; give another folder"
            in capsys.readouterr().err)
    assert [path.read_text() for path in mine.parent.iterdir()] == ["mine"]
    (tmp_path / "file").touch()
    for wrong, message in ((lambda: evaluate.write_intents(tmp_path / "file"), "File exists"),
                           (evaluate.main, "nothing to"),
                           (lambda: evaluate.read_labelled(tmp_path / "none"), "No such file")):
        with pytest.raises(SystemExit) as e:
            wrong()
        err = capsys.readouterr().err
        assert e.value.code == 2 and message in err and err.count("\n") == 1
    assert not any(json.dumps(t["prompt"] + evaluate.between)[:-1] in trained for t in tests)


@pytest.mark.slow
def test_a_model_trained_on_pairs_answers_and_the_result_is_in_wandb(tmp_path):
    words = {"red": "stop", "green": "go", "blue": "wait"}
    pairs = [{"text": f"{color} light {i}\n= {act}"}
             for i in range(60) for color, act in words.items()]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs))
    base = ["--vocab_source=byte", "--dim=64", "--n_layers=2", "--n_heads=2", "--max_seq_len=32",
            "--batch_size=16", "--device=cpu", "--log_interval=100", "--eval_interval=500",
            "--eval_iters=1", "--wandb_log=False"]
    (tmp_path / "base.txt").write_text(
        "".join(f"{color} light {i}\n" for i in range(300) for color in words))
    first = command(tmp_path, "train.py", "--data=base.txt", "--max_iters=2", "--out_dir=base",
                    *base)
    tuned = command(tmp_path, "train.py", "--init_from=base", "--data=pairs.jsonl",
                    "--out_dir=tuned", "--max_iters=200", "--learning_rate=6e-3", *base)
    assert (first.returncode, tuned.returncode) == (0, 0), first.stderr + tuned.stderr
    labelled = [{"prompt": f"{color} light {i}", "expected": act}
                for i in range(60, 70) for color, act in words.items()]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(e) + "\n" for e in labelled))
    done = command(tmp_path, "evaluate.py", "tuned", "--data=test.jsonl", "--wandb_log=True",
                   "--device=cpu")
    assert done.returncode == 0 and "wandb sync" in done.stdout, done.stderr
    assert float(done.stdout.split()[1]) > 0.9, done.stdout
    table = json.loads(next((tmp_path / "wandb").rglob("evaluation_*.table.json")).read_text())
    assert table["columns"] == ["Successful", "Expected", "Actual", "Score", "Prompt"]
    assert len(table["data"]) == 30
    records = track.read_wandb(next((tmp_path / "wandb").glob("offline-run-*")))
    row = next(r["history"]["item"] for r in records if r["type"] == "history")
    assert row["accuracy"] > 0.9
    assert row["recall/go"] > 0.9
    assert row["f1"] > 0.9
    assert row["precision"] > 0.9
    assert any(key.startswith("confusion_matrix") for key in row)
    matrix = json.loads(
        next((tmp_path / "wandb").rglob("confusion_matrix_table_*.table.json")).read_text())
    counts = {(a, b): n for a, b, n in matrix["data"]}
    assert sum(counts.values()) == 30 and counts["go", "go"] >= 9
    kept = json.loads((tmp_path / "tuned/evaluation.json").read_text())["data"]  # the page reads it
    assert kept["accuracy"] == row["accuracy"] and kept["names"] == ["go", "stop", "wait"]
    assert kept["matrix"] == [[counts[a, b] for b in kept["names"]] for a in kept["names"]]
    assert kept["macro_average"]["f1"] == row["f1"]
    assert kept["scores"][0] == ["go", *(row[f"{m}/go"] for m in kept["macro_average"]), 10]
    assert (tmp_path / "tuned/confusion.svg").read_text().startswith(
        "<!-- llamac: heat map -->\n<svg")
    assert "wrote tuned/confusion.svg" in done.stdout


@pytest.mark.parametrize("content, message", [
    ("", "is empty"), ('{"prompt": 1}\n', "line 1: KeyError 'expected'"),
    ("nonsense\n", "line 1: JSONDecodeError"),
    ('{"prompt": "a", "expected": "x", "classes": ["y"]}\n', "not among its classes"),
    ("[1]\n", "line 1: TypeError"),
    ('{"prompt": "a", "expected": "x", "classes": "xyz"}\n',
     "line 1: TypeError 'classes' is \"xyz\", expected a list"),
    ('{"prompt": "a", "expected": "x", "classes": {"x": 1}}\n', "line 1: TypeError 'classes' is {"),
    ('\n{"prompt": "a", "expected": "x", "classes": ["x", ["y"]]}\n',
     "line 2: TypeError 'classes' is "),
    ("[" * 100_000, "line 1: ValueError nested too deeply"),
    ('{"prompt": "%s", "expected": "x"}\n' % ("long " * 30), "shorten it")
])
def test_mistakes_end_in_one_line(model, tmp_path, monkeypatch, capsys, content, message):
    export.export_model(model.state_dict(), model.args, Bytes(), tmp_path / "m.gguf")
    (tmp_path / "d.jsonl").write_text(content)
    for knob, value in {"out_dir": str(tmp_path / "m.gguf"), "data": str(tmp_path / "d.jsonl"),
                        "device": "cpu"}.items():
        monkeypatch.setattr(evaluate, knob, value)
    with pytest.raises(SystemExit) as e:
        evaluate.main()
    err = capsys.readouterr().err
    assert e.value.code == 2 and message in err and err.count("\n") == 1


def test_the_likeliest_choice_with_and_without_regard_to_its_length(
        model, tmp_path, monkeypatch, capsys):
    """
    Compare with log probabilities summed token by token. A context that is too long is cut at its
    beginning to fit the model's 48 tokens.
    """
    questions = [("The cat sat on the", ["mat", "a very long way home"], 0),
                 ("x " * 40, ["y", "no"], 1), ("One", ["two", "2", "zwei"], 2)]
    expected = []
    for context, choices, _ in questions:
        sums = []
        for choice in choices:
            ids, total = Bytes().encode(f"{context.rstrip()} {choice}", bos=True), 0.0
            ids = ids[-49:]
            for at in range(len(ids) - len(choice) - 1, len(ids)):
                total += model(torch.tensor([ids[:at]]))[0][0, -1].log_softmax(0)[ids[at]].item()
            sums.append(total)
        normed = [s / len(c) for s, c in zip(sums, choices)]
        expected.append((sums.index(max(sums)), normed.index(max(normed))))
    assert evaluate.choose(model, Bytes(), [question[:2] for question in questions]) == expected
    (tmp_path / "task.jsonl").write_text(
        "".join(json.dumps({"context": c, "choices": o, "answer": a}) + "\n"
                for c, o, a in questions))
    monkeypatch.setattr(evaluate, "harness", str(tmp_path / "task.jsonl"))
    evaluate.evaluate_choices(model, Bytes(), "cpu", tmp_path)
    right = [sum(found[n] == a for found, (*_, a) in zip(expected, questions)) / 3 for n in (0, 1)]
    for p, line in zip(right, capsys.readouterr().out.splitlines(), strict=True):
        error = math.sqrt(p * (1 - p) / 2)
        told = [float(n) for n in re.findall(r"[\d.]+", line)][:4]
        assert told == [round(n, 4) for n in (p, error, *evaluate.interval(round(3 * p), 3))], line
    for line in ('{"context": "a", "choices": ["b"], "answer": 1}', '{"context": "a"}', "no"):
        (tmp_path / "task.jsonl").write_text(line)
        with pytest.raises(SystemExit):
            evaluate.read_task(tmp_path / "task.jsonl")
        assert "task.jsonl, line 1: " in capsys.readouterr().err
    broken = copy.deepcopy(model)
    broken.norm.weight.data[0] = torch.nan
    with pytest.raises(SystemExit):
        evaluate.choose(broken, Bytes(), [question[:2] for question in questions])
    assert "its weights are broken" in capsys.readouterr().err
    arc = {"text": ["a", "b"], "label": ["A", "B"]}
    for choices in arc, "ab", [["a"], ["b"]], [None, "b"], 3, []:
        (tmp_path / "task.jsonl").write_text(
            json.dumps({"context": "a", "choices": choices, "answer": 0}))
        with pytest.raises(SystemExit):
            evaluate.read_task(tmp_path / "task.jsonl")
        err = capsys.readouterr().err
        assert "task.jsonl, line 1: " in err
        assert err.count("\n") == 1
        assert "expected a list" in err or not choices


def test_an_interval_has_the_shares_from_which_the_result_deviates_by_less_than_1_96_errors():
    for n in 1, 3, 50, 2000:
        for right in {0, 1, n // 3, n - 1, n}:
            low, high = evaluate.interval(right, n)
            assert -1e-12 <= low < high <= 1 + 1e-12
            assert low <= right / n + 1e-12
            assert high >= right / n - 1e-12
            for bound in low, high:
                assert abs(right / n - bound) == pytest.approx(
                    1.96 * math.sqrt(abs(bound * (1 - bound)) / n), abs=1e-6)


def test_lines_end_at_line_feeds_alone_and_empty_ones_are_none(tmp_path):
    """JSON allows U+2028, U+2029 and U+0085 unescaped in strings, so they do not end a line."""
    odd = "one\u2028two\u2029three\x85four"
    rows = [{"context": odd, "choices": [odd, 2, 1.5], "answer": 1},
            {"context": "b", "choices": ["c"], "answer": 0}]
    labelled = [{"prompt": odd, "expected": odd}, {"prompt": "b", "expected": 2, "classes": [1, 2]}]
    for name, content in ("task", rows), ("labelled", labelled):
        lines = [json.dumps(row, ensure_ascii=False) for row in content]
        (tmp_path / name).write_text("\ufeff" + "\n\n".join(lines) + "\n \r\n\n", encoding="utf-8",
                                     newline="")
    assert evaluate.read_task(tmp_path / "task") == [(odd, [odd, "2", "1.5"], 1), ("b", ["c"], 0)]
    assert evaluate.read_labelled(tmp_path / "labelled") == [
        {"prompt": odd, "expected": odd, "classes": sorted(["2", odd])},
        {"prompt": "b", "expected": "2", "classes": ["1", "2"]}]


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"context": "a", "choices": ["b", "c"], "answer": 1e400}'])
def test_a_question_that_cannot_be_read_is_one_line(tmp_path, capsys, line):
    (tmp_path / "task.jsonl").write_text(line)
    with pytest.raises(SystemExit):
        evaluate.read_task(tmp_path / "task.jsonl")
    err = capsys.readouterr().err
    assert "task.jsonl, line 1: " in err and err.count("\n") == 1


def test_a_byte_order_mark_is_no_text(model, tmp_path, capsys, run_bin):
    """Both evaluate.py and the C program run ignore it."""
    export.export_model(model.state_dict(), model.args, Bytes(), tmp_path / "m.gguf")
    (tmp_path / "plain.txt").write_text("one day in the forest", encoding="utf-8")
    (tmp_path / "marked.txt").write_text("one day in the forest", encoding="utf-8-sig")
    told = []
    for name in "plain.txt", "marked.txt":
        evaluate.evaluate_perplexity(model, Bytes(), tmp_path / name, torch.device("cpu"), tmp_path)
        done = subprocess.run([run_bin, tmp_path / "m.gguf", "--perplexity", tmp_path / name],
                              capture_output=True, text=True, check=True)
        prompt = subprocess.run([run_bin, tmp_path / "m.gguf", "-f", tmp_path / name, "--tokenize"],
                                capture_output=True, text=True, check=True)
        told.append((capsys.readouterr().out, done.stdout, prompt.stdout))
    assert told[0] == told[1]


CUT = [
    b"caf\xc3", b"a\xe2\x82", b"a\xf0\x9f\x98 b", b"\xf0\x9f\x98", b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80", b"\xc0\x80b", b"\xff\xfea", b"\x80\xbf",
    "é".encode() + b"\xe2\x96 \xe2\x96\x81"]


def test_bytes_that_are_no_character_count_as_in_run(model, tmp_path, capsys, run_bin):
    """
    Each such byte is read as one U+FFFD, in files (also at a character cut off by the end of the
    file) and on the command line.
    """
    def run(*flags):
        return subprocess.run([run_bin, tmp_path / "m.gguf", *flags], capture_output=True,
                              check=True).stdout.decode()

    export.export_model(model.state_dict(), model.args, Bytes(), tmp_path / "m.gguf")
    for data in CUT:
        (tmp_path / "text").write_bytes(data)
        evaluate.evaluate_perplexity(model, Bytes(), tmp_path / "text", torch.device("cpu"),
                                     tmp_path)
        ours, theirs = (re.findall(r"[0-9.]+", said)
                        for said in (capsys.readouterr().out,
                                     run("--perplexity", tmp_path / "text")))
        assert list(map(float, theirs)) == pytest.approx(list(map(float, ours)), rel=1e-4), data
        assert Bytes().encode(os.fsdecode(data)) == [
            int(i) for i in run("--tokenize", "-i", data).split()], data


# ---- conversations ------------------------------------------------------------------------------

def chat_model(folder, seed=0, context=256):
    """
    Write an untrained model with a vocabulary of lower-case letters and ChatML's markers as a GGUF
    file, and return its path. Its greedy answers depend on the question.
    """
    vocabulary = Chat(CHATML, Characters("abcdefghijklmnopqrstuvwxyz ?\n")).tokenizer
    torch.manual_seed(seed)
    model = Transformer(ModelArgs(dim=32, n_layers=2, n_heads=2,
                                  vocab_size=len(vocabulary.pieces()), max_seq_len=context)).eval()
    for p in model.parameters():  # larger than initialized, so that answers depend on questions
        p.data += torch.randn_like(p) * 0.3
    export.export_model(model.state_dict(), model.args, vocabulary, folder / "chat.gguf",
                        extra={TEMPLATE: CHATML})
    return str(folder / "chat.gguf")


def dialogue(*texts, **more):
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": text}
                         for n, text in enumerate(texts)]} | more


def evaluated(monkeypatch, capsys, path, records, folder):
    """Return what evaluate.py prints for a model and conversations."""
    (folder / "c.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for knob, value in {"out_dir": path, "conversations": str(folder / "c.jsonl"),
                        "device": "cpu"}.items():
        monkeypatch.setattr(evaluate, knob, value)
    evaluate.main()
    return capsys.readouterr().out


def test_answers_are_those_of_run_and_right_if_they_are_the_expected_ones(
        tmp_path, monkeypatch, capsys, run_bin):
    path, rng = chat_model(tmp_path), random.Random(0)
    asked = [["".join(rng.choices("abcdefg ", k=rng.randrange(1, 12)))
              for _ in range((1, 3)[n % 2])] for n in range(20)]
    requests = [json.dumps(dialogue(*texts) | {"id": n, "temperature": 0,
                                               "max_tokens": evaluate.MAX_ANSWER})
                for n, texts in enumerate(asked)]
    done = subprocess.run([run_bin, path, "--jsonl"], input="\n".join(requests),
                          capture_output=True, text=True, check=True)
    answers = [row["text"] for row in sorted(map(json.loads, done.stdout.splitlines()),
                                             key=lambda row: row["id"])]
    assert len({answer[:5] for answer in answers}) > 5
    records = [dialogue(*texts, answer if n % 4 else answer + "x", kind="ab"[n % 3 == 0], set="s")
               for n, (texts, answer) in enumerate(zip(asked, answers))]
    told = evaluated(monkeypatch, capsys, path, records, tmp_path)
    assert told.startswith("accuracy 0.7500 (15 of 20), ") and told.count("wrong: ") == 5
    right = {kind: [n % 4 > 0 for n in range(20) if "ab"[n % 3 == 0] == kind] for kind in "ab"}
    table = {line.split()[1]: line.split()[2:]
             for line in told.splitlines() if line.startswith("s ")}
    assert {kind: row[:3] for kind, row in table.items()} == {
        kind: [f"{sum(found) / len(found):.4f}", str(sum(found)), str(len(found))]
        for kind, found in right.items()}


def test_results_by_set_and_kind_beside_the_majority_guess():
    rows = [[True, "x", "x", "known", "who", "q1"], [False, "x", "y", "known", "who", "q2"],
            [True, "z", "z", "known", "who", "q3"], [False, "w", "", "new", "who", "q4"],
            [True, "v", "v", "known", "what", "q" * 70]]
    groups = evaluate.group_results(rows)
    assert groups == [["known", "who", 2 / 3, 2, 3, 2 / 3], ["known", "what", 1.0, 1, 1, 1.0],
                      ["new", "who", 0.0, 0, 1, 1.0]]
    lines = list(evaluate.report_answers(rows, (1.25, 1.0), groups))
    assert lines[0] == (
        "accuracy 0.6000 (3 of 5), 0.8000 by always giving the most frequent answer of each kind; "
        "1.2 tokens on average, expected 1.0")
    assert [line.split() for line in lines[2:6]] == [
        ["set", "kind", "accuracy", "right", "questions", "majority"],
        ["known", "who", "0.6667", "2", "3", "0.6667"],
        ["known", "what", "1.0000", "1", "1", "1.0000"],
        ["new", "who", "0.0000", "0", "1", "1.0000"]]
    assert lines[6:] == ["wrong: 'q2': expected x, answered y",
                         "wrong: 'q4': expected w, answered "]
    many = list(evaluate.report_answers([[False, "x", "y", "", "", "q" * 70]] * 21, (1, 1),
                                        [["", "", 0.0, 0, 21, 1.0]]))
    assert len(many) == 22
    assert many[-1] == "... and 1 more"
    assert many[1] == f"wrong: '...{'q' * 57}': expected x, answered y"


def test_a_model_without_a_chat_template_continues_the_plain_text(
        model, tmp_path, monkeypatch, capsys, run_bin):
    export.export_model(model.state_dict(), model.args, Bytes(), tmp_path / "m.gguf")
    found = evaluate.write_answers(
        model, Bytes(), None, [[("user", "switch"), ("assistant", "on"), ("user", "it")]])
    plain, = model.generate([Bytes().encode("switch\non\nit", bos=True)], evaluate.MAX_ANSWER, 0,
                            stop=(Bytes().bos_id, Bytes().eos_id))
    new = [token for token in plain[13:] if token > 2]
    assert found == [(Bytes().decode(new).strip(), len(new))]
    told = evaluated(monkeypatch, capsys, str(tmp_path / "m.gguf"),
                     [{"prompt": "switch it", "response": "on"}], tmp_path)
    assert told.startswith("the model has no chat template: it continues the plain text")
    assert "accuracy 0.0000 (0 of 1), 1.0000" in told


@pytest.mark.parametrize(
    "record, message",
    [("", "is empty; expected lines of a conversation that ends with an answer"),
     ("{}", "line 1: ValueError it is not a conversation"),
     (json.dumps({"text": "a"}), "it is not a conversation"),
     (json.dumps({"messages": []}), "its last turn is not an answer"),
     (json.dumps(dialogue("a")), "line 1: ValueError its last turn is not an answer"),
     ("3", "it is not a conversation"),
     (json.dumps({"messages": [{"role": "assistant", "content": "a"}]}),
      "expected user and assistant alternately"),
     (json.dumps(dialogue("a", "b")) + "\n" + json.dumps(dialogue("a", 3)),
      "line 2: ValueError content of turn 2 is a number"),
     (json.dumps(dialogue("a " * 200, "b")), "tokens, the model's context is 256; shorten it")])
def test_a_conversation_that_cannot_be_answered_is_one_line(
        tmp_path, monkeypatch, capsys, record, message):
    (tmp_path / "bad.jsonl").write_text(record)
    for knob, value in {"out_dir": chat_model(tmp_path),
                        "conversations": str(tmp_path / "bad.jsonl"), "device": "cpu"}.items():
        monkeypatch.setattr(evaluate, knob, value)
    with pytest.raises(SystemExit) as e:
        evaluate.main()
    err = capsys.readouterr().err
    assert e.value.code == 2 and message in err and err.count("\n") == 1


def test_the_built_in_questions_are_500_in_three_sets():
    found = evaluate.read_conversations("questions")
    assert len(found) == 500
    assert {of_set for _, of_set, _ in found} == {"known", "new words", "new kinds"}
    assert all([role for role, _ in turns] == ["user", "assistant"] and kind
               for turns, _, kind in found)


@pytest.mark.slow
def test_a_model_trained_on_conversations_answers_and_the_result_is_in_wandb_and_on_the_page(
        tmp_path):
    words = {"red": "stop", "green": "go", "blue": "wait"}
    records = [dialogue(f"{color} light {i}", act, kind=color)
               for i in range(70) for color, act in words.items()]
    for name, part in ("train", records[:180]), ("test", records[180:]):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in part))
    tuned = command(tmp_path, "train.py", "--data=train.jsonl", "--out_dir=tuned",
                    "--max_iters=200", "--learning_rate=6e-3", "--vocab_source=byte", "--dim=64",
                    "--n_layers=2", "--n_heads=2", "--max_seq_len=128", "--batch_size=8",
                    "--device=cpu", "--log_interval=100", "--eval_interval=500", "--eval_iters=1")
    assert tuned.returncode == 0, tuned.stderr
    done = command(tmp_path, "evaluate.py", "tuned", "--conversations=test.jsonl",
                   "--wandb_log=True", "--device=cpu")
    assert done.returncode == 0 and "wandb sync" in done.stdout, done.stderr
    assert float(done.stdout.split()[1]) > 0.9, done.stdout
    table = json.loads(next((tmp_path / "wandb").rglob("evaluation_*.table.json")).read_text())
    assert table["columns"] == evaluate.ANSWER_COLUMNS and len(table["data"]) == 30
    history = track.read_wandb(next((tmp_path / "wandb").glob("offline-run-*")))
    row = next(r["history"]["item"] for r in history if r["type"] == "history")
    assert row["accuracy"] > 0.9 and row["accuracy/red"] > 0.9
    shown, = run_api.evaluations(tmp_path / "tuned")
    assert shown["accuracy"] == row["accuracy"]
    assert [group[1] for group in shown["groups"]] == ["red", "green", "blue"]
    assert shown["names"] == evaluate.GROUP_COLUMNS and shown["matrix"] == []


def test_each_kind_of_result_is_kept_for_the_page(tmp_path, monkeypatch):
    """The first save drops the content of a file of an earlier version or of a damaged one."""
    monkeypatch.setattr(evaluate.run_folder, "is_run", lambda folder: True)
    path = tmp_path / "evaluation.json"
    for before in '{"accuracy": 0.5, "groups": [[1]]}', "{", "[]":
        path.write_text(before)
        assert len(run_api.evaluations(tmp_path)) == ("groups" in before)
        for kind, accuracy in ("pairs", 0.1), ("harness", 0.2), ("pairs", 0.3):
            evaluate.save_for_page(
                kind, {"data": "x", "accuracy": accuracy, "names": ["a"], "groups": [[1]]},
                tmp_path)
        assert [found["accuracy"] for found in run_api.evaluations(tmp_path)] == [0.3, 0.2]


def test_a_picture_that_is_not_ours_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate.run_folder, "is_run", lambda folder: True)
    path = tmp_path / "confusion.svg"
    path.write_text("<svg>mine</svg>")
    evaluate.save_picture([[1, 0], [0, 1]], ["a", "b"], tmp_path)
    assert path.read_text() == "<svg>mine</svg>"
    assert "was not written by evaluate.py; move it elsewhere" in capsys.readouterr().out
    path.unlink()
    for matrix in [[1, 0], [0, 1]], [[1, 1], [0, 3]]:
        evaluate.save_picture(matrix, ["a", "b"], tmp_path)
    assert ">3</text>" in path.read_text()
