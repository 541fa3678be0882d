"""
Each preflight check finds the bug that it is for, and no check fails in a clean run. The tests run
train.py's own main, up to the first step.
"""
import json
import random
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
import model
import train
from configurator import freeze, settings
from engine import ops
from engine.debug import data_checks, model_checks, preflight
from engine.text.corpus import SEED
from engine.text.prepare import load
from engine.training import checkpoint, resolve
from tests.conftest import ROOT
from tokenizer import Characters

SMALL = {
    "data": "stories:300", "vocab_source": "byte", "init_from": "scratch", "dim": 32, "n_heads": 2,
    "max_seq_len": 48, "batch_size": 4, "warmup_iters": 2, "eval_iters": 1, "device": "cpu",
    "peak_tflops": 0.1, "max_iters": 1000
}
TRAIN, KNOBS = train.train, settings(vars(train))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """
    Return a working directory that all tests share, so that each text is prepared once. leaky.txt
    is my.txt followed by its own beginning.
    """
    folder = tmp_path_factory.mktemp("checks")
    rng = random.Random(1)
    words = "the a cat dog sat ran on under mat tree and then it was happy glad über 今天 .".split()
    (folder / "my.txt").write_text(" ".join(rng.choice(words) for _ in range(8000)))
    text = (folder / "my.txt").read_text()
    (folder / "leaky.txt").write_text(text + text[:20_000])
    return folder


@pytest.fixture
def start(folder, monkeypatch, capsys):
    """
    Return start(knob=value, ...), which returns the exit code and output of train.py up to the
    first step. The training itself is skipped.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setattr(train, "train", lambda *args: None)
    monkeypatch.setattr(train, "source_version", dict)
    monkeypatch.setattr(preflight, "SECONDS", 1000)  # so that a busy machine runs all checks

    def start(**given):
        for name, value in {**KNOBS, **SMALL, **given}.items():
            monkeypatch.setattr(train, name, value)
        capsys.readouterr()
        code = 0
        try:
            train.start(freeze(vars(train), dict.fromkeys({*SMALL, *given})))
        except SystemExit as e:
            code = e.code
        train.run_folder.release()
        said = capsys.readouterr()
        return SimpleNamespace(code=code, out=said.out, err=said.err, all=said.out + said.err)

    return start


def found(done, name):
    """Return whether the run ended with exactly one error line, which names this check."""
    return (done.code == 2 and done.err.splitlines()[-1].startswith(f"error: check {name}: ")
            and done.err.count("error") == 1)


def warned(done, name):
    return (done.code == 0 and f"warning: check {name}: " in done.out
            and done.out.count("warning: check") == 1)


# ---- bugs ----------------------------------------------------------------------------------------

def sees_next(monkeypatch):
    def off_by_one(tokens, bos_id):
        document = (tokens == bos_id).cumsum(1)
        return (document[:, None, :, None] == document[:, None, None, :]).tril(1)
    monkeypatch.setattr(ops, "within_documents", off_by_one)


def sees_all(monkeypatch):
    def everything(q, k, v, mask=None):
        return plain(q, k, v, torch.ones(q.shape[1], k.shape[1], dtype=torch.bool))
    plain = ops.attention
    monkeypatch.setattr(ops, "attention", everything)


def one_layer_sees_next(monkeypatch):
    """Plant the bug in the second block of the model only."""
    plain, calls = ops.attention, []

    def second(q, k, v, mask=None):
        calls.append(1)
        T = q.shape[1]
        mask = torch.ones(T, T, dtype=torch.bool).tril(1) if len(calls) % 2 == 0 else mask
        return plain(q, k, v, mask)

    monkeypatch.setattr(ops, "attention", second)


def forgets_documents(monkeypatch):
    monkeypatch.setattr(ops, "within_documents", lambda tokens, bos_id: None)


def document_off_by_one(monkeypatch):
    def shifted(tokens, bos_id):
        # Each document begins one token late.
        document = (tokens == bos_id)[:, [0, *range(tokens.shape[1] - 1)]].cumsum(1)
        return (document[:, None, :, None] == document[:, None, None, :]).tril()
    monkeypatch.setattr(ops, "within_documents", shifted)


def swapped_halves(monkeypatch):
    def rotate(x, rope):
        (a, b), (cos, sin) = x.float().chunk(2, -1), rope[:, None].unbind(-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).type_as(x)
    monkeypatch.setattr(ops, "rotate", rotate)


def no_positions(monkeypatch):
    monkeypatch.setattr(ops, "rotate", lambda x, rope: x)


def wrong_scale(monkeypatch):
    plain = ops.attention
    monkeypatch.setattr(ops, "attention", lambda q, k, v, *rest: plain(q * 2, k, v, *rest))


def one_head_with_a_wrong_scale(monkeypatch):
    """Scale one of eight heads by 1.1."""
    plain, factor = ops.attention, torch.ones(8, 1)
    factor[3] = 1.1
    monkeypatch.setattr(ops, "attention", lambda q, k, v, *rest: plain(q * factor, k, v, *rest))


def heads_mixed_up(monkeypatch):
    plain = ops.attention
    monkeypatch.setattr(ops, "attention",
                        lambda q, k, v, *rest: plain(q, k.flip(2), v.flip(2), *rest))


def frozen(monkeypatch):
    plain = model.Transformer.init_weights

    def init(self):
        plain(self)
        self.layers[1].attention.wq.weight.requires_grad_(False)
    monkeypatch.setattr(model.Transformer, "init_weights", init)


def detached_block(monkeypatch):
    monkeypatch.setattr(model.FeedForward, "forward",
                        lambda self, x: self.w2(ops.swiglu(self.w1(x).detach(), self.w3(x))))


def detached_embedding(monkeypatch):
    plain = model.Block.forward
    monkeypatch.setattr(model.Block, "forward",
                        lambda self, x, *rest: plain(self, x.detach(), *rest))


def dead_layer(monkeypatch):
    monkeypatch.setattr(model.Attention, "forward",
                        lambda self, x, *rest: 0 * self.wo(self.wq(x) + self.wk(x) + self.wv(x)))


def left_out_of_the_optimizer(monkeypatch):
    plain = train.make_optimizer

    def make(*args):
        opt = plain(*args)
        opt.param_groups[-1]["params"].pop()
        return opt
    monkeypatch.setattr(train, "make_optimizer", make)


def without_divisor(monkeypatch):
    """Make train_step behave as if it did not divide by gradient_accumulation_steps."""
    edit(monkeypatch, "targets = distributed.total((y >= 0).sum().item()) / distributed.world",
         "targets = batch_size * y.shape[1]")


def only_the_last(monkeypatch):
    edit(monkeypatch, "(loss * t.opt", "t.opt.zero_grad(); (len(micro_batches) * loss * t.opt")


def edit(monkeypatch, old, new):
    """Replace `old` in the source of train.train_step by `new`."""
    import inspect
    source = inspect.getsource(train.train_step)
    assert old in source
    monkeypatch.setattr(train, "train_step", train.train_step)  # restored after the test
    exec(source.replace(old, new), vars(train))


def shifted(monkeypatch):
    plain = data.read_windows

    def read(*args):
        x, y = plain(*args)
        y[:, :-1] = y[:, 1:].clone()
        return x, y
    monkeypatch.setattr(data, "read_windows", read)


def inputs_as_targets(monkeypatch):
    plain = data.read_windows
    monkeypatch.setattr(data, "read_windows", lambda *args: (plain(*args)[0], plain(*args)[0]))


def without_targets(monkeypatch):
    plain = data.read_windows
    monkeypatch.setattr(data, "read_windows", lambda *args:
                        (plain(*args)[0], torch.full_like(plain(*args)[1], -1)))


def augmented(monkeypatch):
    plain = data.Dataset.batch

    def noisy(self, step):
        x, y = plain(self, step)
        return torch.where(torch.rand(x.shape) < 0.05, 5, x), y
    monkeypatch.setattr(data.Dataset, "batch", noisy)


def altered(monkeypatch):
    plain = data.read_windows

    def lower(*args):
        x, y = plain(*args)
        return x.where(x != 3 + ord("e"), 3 + ord("E")), y
    monkeypatch.setattr(data, "read_windows", lower)


def not_normalised(part):
    def plant(monkeypatch):
        plain = model.Transformer.__init__

        def init(self, args):
            plain(self, args)
            for module in [self] if part == "norm" else self.layers:
                setattr(module, part, Identity(args.dim))
        monkeypatch.setattr(model.Transformer, "__init__", init)
    return plant


class Identity(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * self.weight


def large_init(monkeypatch):
    plain = model.Transformer.init_weights

    def init(self):
        plain(self)
        torch.nn.init.normal_(self.tok_embeddings.weight, std=1.0)
    monkeypatch.setattr(model.Transformer, "init_weights", init)


def loss_as_a_sum(monkeypatch):
    plain = ops.cross_entropy
    monkeypatch.setattr(ops, "cross_entropy", lambda x, head, y: plain(x, head, y) * len(y))


def other_vocabulary(monkeypatch):
    """Pair the data with a character vocabulary of the same size and other characters."""
    def swapped(prepared):
        found = load(prepared)
        found.tokenizer = Characters("".join(chr(ord(c) + 1) for c in found.tokenizer.characters))
        return found
    monkeypatch.setattr(resolve, "load_prepared", swapped)


def likely_tokens(monkeypatch):
    """Initialize an untied classifier with large weights."""
    plain = model.Transformer.init_weights

    def init(self):
        plain(self)
        torch.nn.init.normal_(self.output.weight, std=0.5)
    monkeypatch.setattr(model.Transformer, "init_weights", init)


def small_vocabulary(monkeypatch):
    """Add a token id beyond the vocabulary, as in data of a larger vocabulary."""
    def larger(prepared):
        found = load(prepared)
        found.train = found.train.copy()
        found.train[-1] = found.tokenizer.vocab_size
        return found
    monkeypatch.setattr(resolve, "load_prepared", larger)


def unsaved_buffer(monkeypatch):
    plain = model.Transformer.__init__

    def init(self, args):
        plain(self, args)
        self.rope += 0.1 * torch.rand(())  # random, and not saved in checkpoints
    monkeypatch.setattr(model.Transformer, "__init__", init)


PLANTED = [
    (sees_next, "future", {}),
    (sees_all, "future", {"document_mask": False}),
    (one_layer_sees_next, "future", {}),
    (forgets_documents, "documents", {}),
    (document_off_by_one, "documents", {}),
    (swapped_halves, "attention", {}),
    (no_positions, "attention", {}),
    (wrong_scale, "attention", {}),
    (heads_mixed_up, "attention", {"n_heads": 4, "n_kv_heads": 2}),
    (one_head_with_a_wrong_scale, "attention", {"n_heads": 8, "dim": 64}),
    (frozen, "gradients", {}),
    (detached_block, "gradients", {}),
    (detached_embedding, "gradients", {}),
    (dead_layer, "gradients", {"checks": "gradients"}),
    (left_out_of_the_optimizer, "gradients", {}),
    (without_divisor, "accumulation", {"gradient_accumulation_steps": 3}),
    (only_the_last, "accumulation", {"gradient_accumulation_steps": 3}),
    (shifted, "targets", {}),
    (inputs_as_targets, "targets", {}),
    (augmented, "batch", {}),
    (altered, "text", {}),
    (not_normalised("attention_norm"), "norms", {}),
    (not_normalised("ffn_norm"), "norms", {}),
    (not_normalised("norm"), "norms", {}),
    (large_init, "loss", {}),
    (loss_as_a_sum, "loss", {}),
    (likely_tokens, "loss", {"tie_embeddings": False}),
    (other_vocabulary, "vocabulary", {"vocab_source": "char"}),
    (small_vocabulary, "vocabulary", {}),
    (unsaved_buffer, "saved", {"checks": "saved"}),
    (without_targets, "targets", {"checks": "targets"}),
]


@pytest.mark.parametrize("plant, name, given", PLANTED,
                         ids=[f"{i}-{p.__name__}" for i, (p, *_) in enumerate(PLANTED)])
def test_a_planted_bug_is_found_by_its_check(plant, name, given, start, monkeypatch):
    plant(monkeypatch)
    done = start(**given)
    assert found(done, name), done.all


CLEAN = [
    {},
    {"data": "my.txt", "vocab_source": "char", "dropout": 0.2, "tie_embeddings": False,
     "gradient_accumulation_steps": 3},
    {"n_heads": 4, "n_kv_heads": 2, "dtype": "bfloat16", "optimizer": "adamw",
     "learning_rate": 1e-3},
    {"data": "my.txt", "vocab_source": "custom", "vocab_size": 300, "document_mask": False,
     "max_seq_len": 17},
    {"max_seq_len": 1, "batch_size": 1}]


@pytest.mark.parametrize("given", CLEAN)
def test_no_false_alarm(given, start):
    done = start(**given)
    assert done.code == 0 and "warning" not in done.all and "passed in" in done.out, done.all


LETTERS = [*map(chr, range(33, 127)), *map(chr, range(0x400, 0x500))]


def few_letters(kind, count, size=30_000):
    """
    Return a text of the first `count` LETTERS, of one of KINDS, as in training data such as DNA,
    bits or logs.
    """
    rng, letters = random.Random(1), LETTERS[:count]
    if kind == "drawn":
        return "".join(rng.choices(letters, k=size))
    if kind == "runs":
        return "".join(rng.choice(letters) * rng.choice((1, 50, 400)) for _ in range(size // 100))
    if kind == "lines":  # the same line repeated
        return ("".join(rng.choices(letters, k=39)) + "\n") * (size // 40)
    if kind == "mostly one":
        return "".join(rng.choice(letters) if rng.random() < 0.01 else letters[0]
                       for _ in range(size))
    documents = ("".join(rng.choices(letters, k=rng.choice((1, 2, 5, 30))))
                 for _ in range(size // 20))
    return "\n<|endoftext|>\n".join(documents)


KINDS = ["drawn", "runs", "lines", "mostly one", "documents"]
SHAPES = [
    {"dim": 64}, {"dim": 2, "n_heads": 1}, {"dim": 256, "max_seq_len": 16},
    {"dim": 8, "max_seq_len": 2, "tie_embeddings": False, "qkv_bias": True},
    {"max_seq_len": 8, "batch_size": 1, "gradient_accumulation_steps": 5, "dtype": "bfloat16"}]


def alarms(start, folder, kind, count, **given):
    """
    Return what the checks report about a correct training on such a text. The check `leak` may
    warn: in a text that repeats itself, validation text does occur in the training text.
    """
    (folder / f"{kind} {count}.txt").write_text(few_letters(kind, count))
    done = start(data=f"{kind} {count}.txt", **given)
    said = [line for line in done.all.splitlines()
            if "check " in line and "warning: check leak" not in line]
    return said if done.code == 0 and "checks: " in done.out else said + [
        f"{kind} {count} {given}: {done.code} {done.err}"]


def test_the_formula_of_attention_is_the_models_for_what_an_imported_one_may_have():
    args = model.ModelArgs(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, vocab_size=9, max_seq_len=8,
                           qkv_bias=True, qk_norm=True, rope_scaling=2.0,
                           rope_factors=(1.0, 1.5, 3.0, 8.0), rope_attention=1.2)
    torch.manual_seed(1)
    net = args.build()
    attention, x = net.layers[0].attention.eval(), torch.randn(6, 32)
    with torch.no_grad():
        for p in attention.parameters():
            p.copy_(torch.randn(p.shape) / 3)
        ours = attention(x[None], net.rope[:6])[0].double().numpy()
    assert model_checks.difference(ours, model_checks.plain_attention(attention, x, args)) < 1e-5
    assert model_checks.difference(
        ours, model_checks.plain_attention(attention, x, args, halves=True)) > 0.01


@pytest.mark.parametrize("kind, count, vocabulary, shape", [
    pytest.param(kind, count, vocabulary, shape,
                 marks=[pytest.mark.slow] * (vocabulary == "char" or number > 1))
    for number, (kind, shape) in enumerate(zip(KINDS, SHAPES))
    for count, vocabulary in (((1, 3)[number % 2], "byte"), ((2, 1, 297)[number % 3], "char"))
])
def test_no_false_alarm_of_a_text_of_few_letters(kind, count, vocabulary, shape, start, folder):
    for seed in (0, 1):
        assert not alarms(start, folder, kind, count, vocab_source=vocabulary, seed=seed, **shape)


def test_a_loss_worse_than_guessing_is_suspect_in_a_model_that_was_trained(start, monkeypatch):
    """After one step of training, a loss like that of guessing is not suspect."""
    monkeypatch.setattr(train, "train", TRAIN)
    given = {"max_iters": 1, "eval_interval": 1, "log_interval": 1}
    assert start(**given, checks="none", out_dir="begun").code == 0
    done = start(**given, checks="loss", out_dir="begun 2", init_from="begun")
    assert done.code == 0 and "checks: 1 passed" in done.out and "warning" not in done.all, done.all
    large_init(monkeypatch)
    assert start(**given, checks="none", out_dir="wild").code == 0
    done = start(**given, checks="loss", out_dir="wild 2", init_from="wild")
    assert warned(done, "loss") and "worse than ln V = 5.56" in done.out, done.all


def test_no_false_alarm_where_the_batch_has_few_targets(start, monkeypatch):
    """
    Sequences have different numbers of targets, as in conversations, where only the answers are
    learned.
    """
    plain = data.read_windows

    def read(*args):
        x, y = plain(*args)
        kept = 1 + torch.arange(len(y)) * (y.shape[1] - 1) // max(1, len(y) - 1)
        return x, y.masked_fill(torch.arange(y.shape[1]) >= kept[:, None], -1)
    monkeypatch.setattr(data, "read_windows", read)
    done = start(batch_size=2, gradient_accumulation_steps=4)
    assert done.code == 0 and "warning" not in done.all and "passed in" in done.out, done.all


def test_no_false_alarm_where_documents_are_packed(start, monkeypatch):
    """On a GPU, a step finds the documents of its batch; here they are masked."""
    monkeypatch.setattr(ops, "has_packed_attention", lambda *args: True)
    seen = []
    monkeypatch.setattr(ops, "documents_of", lambda tokens, bos_id, *_: seen.append(bos_id))
    done = start()
    assert done.code == 0 and "warning" not in done.all and "passed in" in done.out, done.all
    assert seen and None not in seen, done.all


@pytest.mark.parametrize("name", ["x.ndjson", "X.JSONL", "X.CSV", "UTF16.txt"])
def test_no_false_alarm_of_a_text_that_is_not_read_as_it_lies(name, folder, start):
    lines = [f'"Hello {i}", said the cat. {"It sat on the mat. " * 9}' for i in range(60)]
    table = "".join('"' + line.replace('"', '""') + '"\n' for line in ["text", *lines])
    text = (table if name == "X.CSV" else "\n".join(lines) if name == "UTF16.txt" else
            "".join(json.dumps({"text": line}) + "\n" for line in lines))
    (folder / name).write_bytes(text.encode("utf-16-le" if name == "UTF16.txt" else "utf-8"))
    done = start(data=name, checks="vocabulary")
    assert done.code == 0 and "checks: 1 passed" in done.out, done.all


def test_pieces_of_a_text_are_all_of_it_or_lie_at_equal_distances():
    pieces = lambda n, most, size: [piece.tolist()
                                    for piece in data_checks.spread(range(n), most, size)]
    assert pieces(10, 12, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert pieces(3, 1, 4) == [[0, 1, 2]]
    assert pieces(10, 6, 2) == [[0, 1], [4, 5], [8, 9]] and pieces(1000, 1, 3) == [[0, 1, 2]]


def test_no_false_alarm_where_the_first_document_is_held_out(folder, start, monkeypatch):
    """The first document is larger than the part of the source that the check reads."""
    monkeypatch.setattr(data_checks, "HEAD_BYTES", 4096)
    order = next(
        order for order in (np.random.Generator(np.random.PCG64(SEED)).permutation(n)
                            for n in range(12, 400)) if not order[0])
    (folder / "books").mkdir()
    for i in range(len(order)):
        (folder / f"books/{i:03}.txt").write_text(
            f"Book {i}. " + "It sat on the mat.\n" * (300 if not i else 50))
    done = start(data="books", checks="vocabulary")
    assert done.code == 0 and "checks: 1 passed" in done.out, done.all
    (folder / "books/000.txt").write_text(
        "Now the first one is short, and held out as it was. It sat on the mat.\n")
    assert start(data="books", checks="vocabulary").code == 0
    other_vocabulary(monkeypatch)
    assert found(start(data="books", checks="vocabulary", vocab_source="char"), "vocabulary")


@pytest.mark.parametrize("given", [
    {"learning_rate": 0.6}, {"learning_rate": 0.1, "optimizer": "adamw"}])
def test_a_rate_a_hundred_times_too_high(given, start):
    done = start(**given)
    assert warned(done, "rate"), done.all


@pytest.mark.slow
def test_a_presets_own_rate_is_not_too_high(start):
    """
    The short preset has the highest learning rate of all: after a first fall, the loss of the
    trial's batch rises by as much as 1.
    """
    preset = runpy.run_path(str(ROOT / "config/shakespeare_short.py"))
    given = {name: value for name, value in preset.items()
             if not name.startswith(("__", "out_dir", "eval", "max_iters"))}
    for seed in range(1, 5):
        done = start(**given | {
            "data": str(ROOT / "doc/training.md"), "checks": "rate", "seed": seed})
        assert done.code == 0 and "checks: 1 passed" in done.out, done.all


def test_the_costly_ones_are_left_out_and_named_when_the_time_is_over(start, monkeypatch):
    monkeypatch.setattr(preflight, "SECONDS", 0)
    monkeypatch.setattr(preflight, "SHARE", 0)
    done = start()
    assert done.code == 0, done.all
    assert ("skipped, since the others took more than 0 s: "
            "rate, saved, run, leak") in done.out, done.all


def test_leaked_validation_text(start):
    done = start(data="leaky.txt", vocab_source="custom", vocab_size=330)
    assert warned(done, "leak"), done.all


def test_the_exported_model_in_run(start, run_bin, monkeypatch):
    monkeypatch.setattr(model_checks, "PROGRAM", Path(run_bin))
    done = start(checks="run", n_heads=4, n_kv_heads=2, data="my.txt", vocab_source="custom",
                 vocab_size=330)
    assert done.code == 0 and "checks: 1 passed" in done.out, done.all
    swapped_halves(monkeypatch)
    assert found(start(checks="run"), "run")
    monkeypatch.setattr(model_checks, "PROGRAM", Path("run"))
    assert "checks: 0 passed" in start(checks="run").out


def test_a_run_with_checks_is_the_same_bit_for_bit(folder, start, monkeypatch):
    monkeypatch.setattr(train, "train", TRAIN)
    given = {
        "max_iters": 3, "log_interval": 1, "eval_interval": 3, "dropout": 0.1,
        "gradient_accumulation_steps": 2
    }
    seen = []
    for checks, words in ("all", "passed in"), ("none", "finished"):
        done = start(**given, out_dir=checks, checks=checks)
        assert done.code == 0 and words in done.out, done.all
        assert ("passed in" in done.out) == (checks == "all"), done.all
        rows = [json.loads(line) for line in Path(checks, "log.jsonl").read_text().splitlines()]
        seen.append([{k: v for k, v in row.items() if not k.startswith(("perf/", "mfu", "time"))}
                     for row in rows])
        seen.append(checkpoint.load(checkpoint.newest(checks))["model"])
    assert seen[0] == seen[2] and len(seen[0]) == 4
    assert all(torch.equal(weight, seen[3][name]) for name, weight in seen[1].items())


@pytest.mark.parametrize("words, names", [
    ("none", []), ("future, leak", ["future", "leak"]),
    ("-leak,-run,-rate,-saved", list(preflight.CHECKS)[:-4]), ("all", list(preflight.CHECKS))])
def test_checks_are_chosen(words, names):
    assert preflight.chosen(words) == names


@pytest.mark.parametrize("words, advice", [
    ("futur", "did you mean 'future'?"), ("-xyz", "expected all, none"),
    ("run,-leak", "each with a -"), ("", "expected names")])
def test_a_wrong_choice_is_one_line(words, advice, capsys):
    with pytest.raises(SystemExit):
        preflight.chosen(words)
    said = capsys.readouterr().err
    assert advice in said and said.count("\n") == 1


def test_a_check_that_cannot_be_made_is_a_warning(start, monkeypatch):
    """The check cannot find a module, as in a model whose modules have other names."""
    def hidden(self, name):
        if name == "w1":
            raise AttributeError(name)
        return torch.nn.Module.__getattr__(self, name)

    monkeypatch.setattr(model.FeedForward, "__getattr__", hidden, raising=False)
    monkeypatch.setattr(model.FeedForward, "forward",
                        lambda self, x: self.w2(ops.swiglu(self._modules["w1"](x), self.w3(x))))
    done = start(checks="-run")
    assert warned(done, "norms") and "could not run (AttributeError" in done.out, done.all


@pytest.mark.parametrize("given", [{}, {"checks": "none"}, {"tie_embeddings": False}])
def test_what_could_not_be_exported_is_refused_before_the_first_step(given, start, monkeypatch):
    """Model files have no name for the extra matrix of each block."""
    plain = model.Block.__init__

    def init(self, args):
        plain(self, args)
        self.mix = torch.nn.Linear(args.dim, args.dim, bias=False)
    monkeypatch.setattr(model.Block, "__init__", init)
    done = start(**given)
    assert done.code == 2
    assert "error: the model's layers.0.mix.weight and " in done.err
    assert "TENSORS in engine/formats/layout.py" in done.err


def test_what_a_vocabulary_loses_is_counted(start, folder):
    """The text has an é, which is missing from the vocabulary of another text."""
    (folder / "plain.txt").write_text("words of a text " * 400)
    (folder / "accents.txt").write_text("words of a text " * 400 + "é, a text")
    assert start(data="plain.txt", vocab_source="char", checks="vocabulary",
                 out_dir="out/plain").code == 0
    vocabulary = next((folder / "cache").glob("plain-char-*/tokenizer.json"))
    done = start(data="accents.txt", vocab_source=str(vocabulary), checks="vocabulary")
    assert warned(done, "vocabulary"), done.all
    assert "bytes 3 are lost or changed, first 'é" in done.out, done.all


def test_a_bar_that_stands_for_a_space_is_explained(start, folder):
    """
    ▁ occurs in bars that consoles draw, and sentencepiece uses it to write a space. Other
    characters of boxes and bars are kept.
    """
    for name, bars, count in ("bars", "▁▂▃█ ▁", 2), ("boxes", "┌──┐ ▂▃█", 0):
        (folder / f"{name}.txt").write_text("训练的损失。" * 600 + bars)
        done = start(data=f"{name}.txt", vocab_source="byte", checks="vocabulary",
                     out_dir=f"out/{name}")
        told = (f"{count} ▁ (U+2581) in the first {10_800 + len(bars.encode()):,} bytes of the "
                "text become spaces, as this vocabulary writes a space")
        assert not done.code, done.all
        assert (told in done.out) == warned(done, "vocabulary") == (count > 0), done.all
        assert done.out.count("--vocab_source=bpe keeps them") == (count > 0)
        assert "lost or changed" not in done.out
