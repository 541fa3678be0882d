"""
Minimal pairs: the grammar's parser accepts one text and refuses the other, and they differ in one
place. Scores are compared with sums made token by token.
"""
import collections
import hashlib
import json
import re
from types import SimpleNamespace

import pytest
import torch

import evaluate
import export
import track
from engine.debug import instruments
from engine.text import corpus, pairs, questions, stories
from engine.training.likelihood import compare_pairs
from model import ModelArgs, Transformer
from page import run_api
from tests.test_evaluate import command
from tests.test_stories import derive_one
from tokenizer import Bytes

PAIRS = list(pairs.write(pairs.TEST))


def begins_a_story(text, sequence=None, at=0, kept=None):
    """Return whether a text is the beginning of a story and ends with a sentence."""
    sequence, kept = stories.RULES["story"][0] if sequence is None else sequence, kept or {}
    if at == len(text) or not sequence:
        return at == len(text)
    if sequence[0] == ("[", "plot"):  # the sentences of a plot are rules, like those of the story
        return any(begins_a_story(text, plot + sequence[1:], at, kept)
                   for plot in stories.RULES["plot"])
    return any(begins_a_story(text, sequence[1:], end, known)
               for end, known, _ in derive_one(sequence[0], text, at, kept))


def words(text):
    return re.findall(r"\w+|[^\w ]", text)


def place(pair):
    """Return the words in which the texts of a pair differ: (good, bad), lists of one length."""
    good, bad = words(pair["good"]), words(pair["bad"])
    assert len(good) == len(bad)
    differing = [n for n, (a, b) in enumerate(zip(good, bad)) if a != b]
    part = slice(differing[0], differing[-1] + 1)
    return good[part], bad[part]


# ---- the pairs -----------------------------------------------------------------------------------

def test_the_good_text_is_of_the_grammar_and_the_bad_one_is_not():
    for pair in PAIRS:
        assert begins_a_story(pair["good"]), pair
        assert not begins_a_story(pair["bad"]), pair


def test_a_pair_differs_in_one_place_as_its_kind_says():
    names = {rule: [word for (word,) in stories.RULES[rule]]
             for rule in ("girl_name", "boy_name", "friend", "toy", "place")}
    numbers, found = ({word for (word,) in stories.RULES["number"]},
                      collections.defaultdict(collections.Counter))
    for pair in PAIRS:
        good, bad = place(pair)
        if pair["kind"] == "order":
            assert len(good) == 2 and bad == good[::-1]
            continue
        (right,), (wrong,) = good, bad
        before = words(pair["good"][:len(evaluate.differing_words(pair["good"], pair["bad"])[0])])
        if pair["kind"] == "agreement":
            found["agreement"][right] += 1
            sides = [{"she", "She", "her", "Her"}, {"he", "He", "his", "His"}]
            if not any(right in side for side in sides):
                singular, plural = sorted((right, wrong), key=len)
                assert plural in (singular + "s", singular[:-1] + "ies")
                determiner = before[-1] if before[-1] == "a" else before[-2]
                assert (determiner.lower() == "a" if right == singular
                        else determiner in numbers), pair
            else:
                assert {right, wrong} & sides[0]
                assert {right, wrong} & sides[1]
                assert right.lower() != wrong.lower()
                assert (right in sides[0]) == ("girl" in before)
        else:
            assert right in before
            rule = next(rule for rule in names if right in names[rule])
            was_named = wrong in before
            found["reference"][rule, was_named] += 1
            assert was_named or wrong in names[rule]
            assert not was_named or (
                {rule, next(rule for rule in names if wrong in names[rule])} & {"friend"})
    count = found["agreement"]
    assert (sum(count[w] for w in ("she", "She", "her", "Her"))
            == sum(count[w] for w in ("he", "He", "his", "His")) == pairs.TEST / 4)
    assert (sum(count[w] for w in pairs.PLURAL)
            == sum(count[w] for w in pairs.PLURAL.values()) == pairs.TEST / 4)
    by_rule = collections.Counter()
    for (rule, was_named), n in found["reference"].items():
        by_rule[rule] += n
    assert set(by_rule) == set(names) and min(by_rule.values()) > 10
    assert sum(n for (_, was_named), n in found["reference"].items() if was_named) == pairs.TEST / 2


def test_the_same_pairs_every_time_whatever_their_number_each_of_a_story_that_training_lacks():
    assert list(pairs.write(20)) == PAIRS[:60] and list(pairs.write(0)) == []
    assert [pair["kind"] for pair in PAIRS] == list(pairs.KINDS) * pairs.TEST
    assert len({pair["good"][:60] for pair in PAIRS}) > 590  # few stories begin alike
    assert len({stories.write(seed, 5) for seed in (
        pairs.SEED, corpus.SEED, questions.TRAIN_SEED, questions.TEST_SEED)}) == 4
    # The digest is the same on every platform.
    assert hashlib.sha256(json.dumps(PAIRS).encode()).hexdigest()[:16] == "98ca78ed8bd540e5"


# ---- models that know something, and one that knows nothing --------------------------------------

class Words:
    """A vocabulary of all words of the grammar; 0 is BOS."""
    def __init__(self):
        self.ids = {word: n for n, word in enumerate(sorted(set(words(stories.GRAMMAR))), 1)}
        self.size = len(self.ids) + 1

    def encode(self, text, bos=False):
        return [0] * bos + [self.ids[word] for word in words(text)]


class Counted:
    """
    A model of the counts of `order` (1 or 2) words in a row in 600 stories. copies: words that the
    text already has are likelier, as to a model that has learned to copy names.
    """
    def __init__(self, vocabulary, order, copies=False):
        self.args, self.copies = (
            SimpleNamespace(vocab_size=vocabulary.size, max_seq_len=300), copies)
        counts = torch.full((vocabulary.size, vocabulary.size), 0.01)
        for number in range(600):
            ids = torch.tensor(vocabulary.encode(stories.write(corpus.SEED, number)[0], bos=True))
            counts.index_put_((ids[:-1], ids[1:]), torch.ones(len(ids) - 1), accumulate=True)
        self.counts = counts if order == 2 else counts.sum(0).expand_as(counts)

    def __call__(self, tokens, every):
        counts = self.counts[tokens]  # (B, T, V)
        if self.copies:
            seen = torch.nn.functional.one_hot(tokens, self.args.vocab_size).cumsum(1) > 0
            counts = counts * (1 + 100 * seen)
        return counts.log(), None


def accuracies(model, vocabulary):
    right = collections.defaultdict(list)
    for pair, difference in compare_pairs(model, vocabulary, PAIRS):
        right[pair["kind"]].append(difference > 0)
    return {kind: sum(found) / len(found) for kind, found in right.items()}


def test_a_model_is_above_chance_in_what_it_knows():
    vocabulary = Words()
    one, two, copying = (accuracies(Counted(vocabulary, *how), vocabulary)
                         for how in ((1,), (2,), (2, True)))
    # Counts of single words know nothing, as no form is the right one more often than the other.
    assert one["agreement"] == pytest.approx(0.5, abs=0.1)
    assert one["reference"] == pytest.approx(0.5, abs=0.1)
    # Two words in a row tell order, and number by the word after the noun, but no gender or name.
    assert two["order"] > 0.95 and 0.65 < two["agreement"] < 0.85 and two["reference"] < 0.75
    assert copying["reference"] > two["reference"] + 0.1


def test_a_model_with_random_weights_is_right_in_half_of_the_pairs():
    vocabulary, found = Words(), collections.Counter()
    for seed in range(2):
        torch.manual_seed(seed)
        args = ModelArgs(dim=32, n_layers=1, n_heads=2, vocab_size=vocabulary.size, max_seq_len=256)
        for kind, share in accuracies(Transformer(args).eval(), vocabulary).items():
            found[kind] += share / 2
    assert all(share == pytest.approx(0.5, abs=0.1) for share in found.values()), found
    assert len(found) == 3, found


# ---- scores --------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Transformer(ModelArgs(dim=32, n_layers=1, n_heads=2, vocab_size=259,
                                 max_seq_len=48)).eval()


def test_a_difference_is_that_of_whole_texts_made_token_by_token_and_long_pairs_are_left_out(model):
    def likelihood(text):
        ids, total = Bytes().encode(text, bos=True), 0.0
        for at in range(1, len(ids)):
            total += model(torch.tensor([ids[:at]]))[0][0, -1].log_softmax(0)[ids[at]].item()
        return total

    some = [{"good": "The dogs bark", "bad": "The dogs barks"},
            {"good": "x" * 48, "bad": "x" * 47 + "y"}, {"good": "x" * 49, "bad": "y"},
            {"good": "y", "bad": "x" * 49}, {"good": "a", "bad": "b"}]
    found = compare_pairs(model, Bytes(), some)
    assert [pair for pair, _ in found] == [some[0], some[1], some[4]]
    for pair, difference in found:
        assert difference == pytest.approx(
            likelihood(pair["good"]) - likelihood(pair["bad"]), abs=1e-4)
    assert compare_pairs(model, Bytes(), some[2:4]) == []


def test_rows_of_a_training(model):
    dataset = SimpleNamespace(meta={"source": "stories:50"}, tokenizer=Bytes())
    wide = Transformer(ModelArgs(dim=32, n_layers=1, n_heads=2, vocab_size=259,
                                 max_seq_len=1024)).train()
    cpu = torch.device("cpu")
    for eval_iters, count in (
            (50, 20), (500, instruments.MAX_PAIRS), (0, instruments.MAX_PAIRS), (5, 2)):
        rows = instruments.pair_accuracies(wide, dataset, cpu, torch.autocast("cpu", enabled=False),
                                           eval_iters)
        expected = collections.defaultdict(list)
        for pair, difference in compare_pairs(wide.eval(), Bytes(), PAIRS[:3 * count]):
            expected[f"eval/pairs/{pair['kind']}"].append(difference > 0)
        assert rows == {name: sum(found) / count for name, found in expected.items()}
        assert len(rows) == 3
        wide.train()
    amp = torch.autocast("cpu", enabled=False)
    # Pairs may take a tenth of an evaluation's time, which is too short for a pair here.
    assert instruments.pair_accuracies(wide, dataset, cpu, amp, 2) == {}
    for source in "my.txt", "questions", "storiesfile":
        other = SimpleNamespace(meta={"source": source}, tokenizer=Bytes())
        assert instruments.pair_accuracies(wide, other, cpu, amp, 50) == {}
    instruments.pair_accuracies(wide, dataset, cpu, amp, 5)
    assert wide.training


# ---- evaluate.py ---------------------------------------------------------------------------------

def evaluated(monkeypatch, folder, model, lines):
    """Evaluate a model with a byte vocabulary on a file with these lines."""
    export.export_model(model.state_dict(), model.args, Bytes(), folder / "m.gguf")
    (folder / "p.jsonl").write_text(lines)
    for knob, value in {"out_dir": str(folder / "m.gguf"), "pairs": str(folder / "p.jsonl"),
                        "device": "cpu"}.items():
        monkeypatch.setattr(evaluate, knob, value)
    evaluate.main()


def test_the_report_of_a_file(model, tmp_path, monkeypatch, capsys):
    mine = [{"good": "The dogs bark loudly", "bad": "The dogs barks loudly", "kind": "verbs"},
            {"good": "a b", "bad": "b a", "kind": "order"},
            {"good": "x y z", "bad": "x y w", "kind": "order"},
            {"good": "x" * 50, "bad": "y", "kind": "long"}]
    mine += [{"good": pair["bad"], "bad": pair["good"], "kind": "turned"} for pair in mine[:3]]
    evaluated(monkeypatch, tmp_path, model, "".join(json.dumps(pair) + "\n" for pair in mine))
    lines = capsys.readouterr().out.splitlines()
    rights = {"verbs": [], "order": [], "turned": []}
    compared = compare_pairs(model, Bytes(), mine)
    for pair, difference in compared:
        rights[pair["kind"]].append(difference > 0)
    assert lines[0] == (
        "warning: 1 of 7 pairs exceed the model's context of 48 tokens and are left out")
    assert re.fullmatch(
        r"accuracy 0\.5000 \(0\.\d{4} to 0\.\d{4} with 95 % confidence; 3 of 6 pairs\); "
        r"chance is 0\.5", lines[1])
    table = {line.split()[0]: line.split()[1:] for line in lines[3:7]}
    assert table.pop("kind") == ["accuracy", "from", "to", "right", "pairs"]
    assert table == {
        kind: [f"{sum(found) / len(found):.4f}",
               *(f"{bound:.4f}" for bound in evaluate.interval(sum(found), len(found))),
               str(sum(found)), str(len(found))]
        for kind, found in rights.items()
    }
    wrong = [line for line in lines if line.startswith("wrong: ")]
    assert len(wrong) == 3
    assert any(re.fullmatch(
        r"wrong: 'The dogs': expected barks?, preferred barks? \(\d+\.\d\d nats\)", line)
        for line in wrong)


def test_the_words_that_differ():
    assert evaluate.differing_words("the dogs bark now", "the dogs barks now") == [
        "the dogs", "bark", "barks"]
    assert evaluate.differing_words("a b c", "b a c") == ["", "a b", "b a"]
    assert evaluate.differing_words("a a", "a a a") == ["a a", "", "a"]
    assert evaluate.differing_words("a", "b") == ["", "a", "b"]
    rows = [[False, "k", "x" * 70, "a", "b", -1.25]] * 21
    report = list(evaluate.report_pairs(rows, evaluate.kind_results(rows)))
    assert report[0].startswith("accuracy 0.0000 (")
    assert report[1] == f"wrong: '...{'x' * 57}': expected a, preferred b (1.25 nats)"
    assert len(report) == 22 and report[-1] == "... and 1 more"


@pytest.mark.parametrize("lines, message", [
    ("", "is empty; expected lines of"), ("no\n", "line 1: JSONDecodeError"),
    ('{"good": "a"}\n', "line 1: KeyError 'bad'"), ("[1]\n", "line 1: TypeError"),
    ('{"good": "a", "bad": 3}\n', "line 1: TypeError 'bad' is 3, expected a text"),
    ('\n{"good": "a", "bad": "a"}\n', "line 2: ValueError both texts are the same"),
    ('{"good": "", "bad": "a"}\n', "line 1: ValueError 'good' has no tokens"),
    ("[" * 100_000, "line 1: ValueError nested too deeply"),
    ('{"good": "%s", "bad": "y"}\n' % ("x" * 60),
     "each pair exceeds the model's context of 48 tokens")])
def test_mistakes_end_in_one_line(model, tmp_path, monkeypatch, capsys, lines, message):
    with pytest.raises(SystemExit) as e:
        evaluated(monkeypatch, tmp_path, model, lines)
    err = capsys.readouterr().err
    assert e.value.code == 2 and message in err and err.count("\n") == 1


def test_weights_that_are_not_finite_are_one_line(model, tmp_path, monkeypatch, capsys):
    broken = Transformer(model.args)
    broken.norm.weight.data.fill_(torch.nan)
    monkeypatch.setattr(evaluate, "load_model", lambda *args: (broken, Bytes()))
    with pytest.raises(SystemExit) as e:
        evaluated(monkeypatch, tmp_path, model, '{"good": "a", "bad": "b"}\n')
    err = capsys.readouterr().err
    assert e.value.code == 2
    assert "not finite; its weights are broken" in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_the_built_in_pairs_in_training_in_wandb_and_on_the_page(tmp_path):
    made = command(tmp_path, "train.py", "--data=stories:200", "--out_dir=made", "--max_iters=60",
                   "--learning_rate=6e-3", "--dim=32", "--n_layers=1", "--device=cpu",
                   "--log_interval=100", "--eval_interval=60", "--eval_iters=20", "--checks=none")
    assert made.returncode == 0, made.stderr
    logged = [json.loads(line) for line in (tmp_path / "made/log.jsonl").read_text().splitlines()]
    evaluations = [row for row in logged if "loss/val" in row]
    assert len(evaluations) == 2
    for row in evaluations:
        assert {f"eval/pairs/{kind}" for kind in pairs.KINDS} == {
            name for name in row if name.startswith("eval/")}
    assert evaluations[1]["eval/pairs/order"] > 0.8
    done = command(tmp_path, "evaluate.py", "made", "--pairs=stories", "--wandb_log=True",
                   "--device=cpu")
    assert done.returncode == 0 and "wandb sync" in done.stdout, done.stderr
    table = json.loads(next((tmp_path / "wandb").rglob("evaluation_*.table.json")).read_text())
    assert table["columns"] == evaluate.PAIR_COLUMNS and len(table["data"]) == 3 * pairs.TEST
    history = track.read_wandb(next((tmp_path / "wandb").glob("offline-run-*")))
    row = next(r["history"]["item"] for r in history if r["type"] == "history")
    assert row["accuracy/order"] > 0.9
    assert set(row) > {"accuracy", "accuracy/agreement", "accuracy/reference"}
    shown, = run_api.evaluations(tmp_path / "made")
    assert shown["accuracy"] == row["accuracy"]
    assert [group[0] for group in shown["groups"]] == list(pairs.KINDS)
    assert shown["names"] == evaluate.KIND_COLUMNS and shown["columns"] == evaluate.PAIR_COLUMNS
