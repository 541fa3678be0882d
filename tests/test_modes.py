"""The modes to run before a training: each finds the problem it looks for and leaves no traces."""
import gzip
import json
import math
import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import optim
import train
from configurator import freeze, settings
from engine import ops
from engine.debug import lr_find, modes, overfit, profiler
from engine.training import hardware, plan, resume, signals
from model import Transformer
from tests import forked
from tests.conftest import usual
from tests.trainer_config import trainer_config

ROOT = Path(__file__).resolve().parents[1]
TINY = {
    "vocab_source": "byte", "dim": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 32,
    "batch_size": 4, "log_interval": 5, "eval_iters": 1, "device": "cpu", "sample_prompt": "The",
    "learning_rate": 6e-3, "peak_tflops": 0.1, "max_iters": 20, "data": "my.txt", "warmup_iters": 2,
    # The checks find most of the planted bugs before a mode begins.
    "checks": "none"
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a working directory with 40 kB of random words: equal contexts go on differently."""
    folder = tmp_path_factory.mktemp("modes")
    rng = random.Random(1)
    words = "the a cat dog sat ran on under mat tree and then it was happy .".split()
    (folder / "my.txt").write_text(" ".join(rng.choice(words) for _ in range(10_000)))
    return folder


@pytest.fixture
def trainer(folder, monkeypatch):
    """Return trainer(**settings): it runs train.py's main here, in the folder; returns its code."""
    defaults, signals = settings(vars(train)), {
        n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    monkeypatch.chdir(folder)
    # It would also keep the memory that the other tests in this process free.
    monkeypatch.setattr(hardware, "keep_memory", lambda: None)
    for name in ("MODE", "DIR", "DATA_DIR", "CACHE_DIR", "CONFIG_DIR", "ARTIFACT_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", "disabled")

    def start(**given):
        for name, value in (defaults | TINY | {"out_dir": "out/my"} | given).items():
            monkeypatch.setattr(train, name, value)
        try:
            return train.start(freeze(vars(train), dict.fromkeys(TINY.keys() | given.keys())))
        except SystemExit as e:
            return e.code
    yield start
    for number, handler in signals.items():
        signal.signal(number, handler)


# ---- overfit -------------------------------------------------------------------------------------

@pytest.mark.parametrize("windows, optimizer", [(1, "muon"), (6, "adamw")])
def test_what_can_learn_learns_by_heart(trainer, capsys, folder, windows, optimizer):
    start = time.monotonic()
    assert trainer(overfit=windows, optimizer=optimizer, dropout=0.3) == 0
    said = capsys.readouterr().out
    assert f"overfit: {windows} window{'s' * (windows > 1)} of 32 tokens" in said
    last, enough = said.splitlines()[-1], float(re.search(r"([\d.]+) is enough", said)[1])
    assert last.startswith("PASS: loss ") and float(last.split()[2]) <= enough < 0.2, last
    assert time.monotonic() - start < usual(30)
    before, after = map(float, last.split("probability ")[1].split(" -> "))
    assert before < 0.02 and after > 0.9
    assert {path.name for path in folder.iterdir()} <= {"my.txt", "cache"}


def head_alone(monkeypatch):
    plain = ops.cross_entropy
    monkeypatch.setattr(ops, "cross_entropy",
                        lambda x, head, targets: plain(x.detach(), head, targets))


def no_gradient(monkeypatch):
    plain = ops.cross_entropy
    monkeypatch.setattr(ops, "cross_entropy",
                        lambda *three: plain(*three).detach() + 0 * plain(*three))


def shuffled_targets(monkeypatch):
    plain = train.Dataset.make_batch

    def make_batch(self, step, *whole, **named):
        x, y = plain(self, step, *whole, **named)
        return x, y[:, torch.randperm(
            y.shape[1], generator=self.__dict__.setdefault("noise", torch.Generator()))]
    monkeypatch.setattr(train.Dataset, "make_batch", make_batch)


def cut_logits(monkeypatch):
    monkeypatch.setattr(
        ops, "cross_entropy",
        lambda x, head, targets: torch.nn.functional.cross_entropy(head(x).tanh(), targets))


def dropped_tokens(monkeypatch):
    plain = Transformer.forward
    monkeypatch.setattr(
        Transformer, "forward",
        lambda self, tokens, *more, **named: plain(self, tokens * 0, *more, **named))


def blind_attention(monkeypatch):
    monkeypatch.setattr(ops, "attention", lambda q, k, v, mask=None: v[:, -q.shape[1]:].flatten(2))


def wild_rate(monkeypatch):
    return {"learning_rate": 0.9}


def no_update(monkeypatch):
    monkeypatch.setattr(optim.CombinedOptimizer, "step", lambda self, observe=None: None)


def other_targets(monkeypatch):
    plain = ops.cross_entropy
    monkeypatch.setattr(ops, "cross_entropy",
                        lambda x, head, targets: plain(x, head, targets.roll(1)))


@pytest.mark.parametrize("bug, words", [
    (head_alone, "never changed"), (no_gradient, "stuck at the start, about ln V = 5."),
    (no_update, "stuck at the start"), (shuffled_targets, "read twice, is not the same"),
    (cut_logits, "a limit on the logits"),
    (dropped_tokens, "no better than a model that ignores its input"),
    (blind_attention, "no better than a model that sees only the last token"),
    (other_targets, "computed from other targets"), (wild_rate, "the rate")])
def test_what_cannot_learn_fails_and_is_told_where_to_look(trainer, capsys, monkeypatch, bug,
                                                           words):
    monkeypatch.setattr(overfit, "PATIENCE", 60)
    code = trainer(overfit=1, **bug(monkeypatch) or {})
    last = capsys.readouterr().out.splitlines()[-1]
    assert code == 1 and last.startswith("FAIL: ") and words in last, last
    assert bug is not no_update or "after 61 steps" in last  # the first step and PATIENCE more


def test_advice_compares_the_loss_with_what_less_of_the_context_allows():
    lowest = {0: 3.0, 1: 2.0, None: 0.1}
    for end, words in ((4.95, "stuck at the start"), (2.95, "that ignores its input"),
                       (2.5, "sees only the last token"), (1.95, "sees only the last token"),
                       (1.5, "but not to the end"), (0.15, "computed from other targets")):
        assert words in overfit.advice([5.0, end], lowest, 0.2, changes=False)


def test_the_least_loss_of_what_goes_on_in_several_ways():
    x = torch.tensor([[1, 5, 6, 1, 5, 6], [1, 5, 6, 2, 2, 2]])
    y = torch.tensor([[5, 6, 1, 5, 6, 7], [5, 6, 2, 2, 2, -1]])
    after = overfit.memorized_loss(x, y, 1)  # 1 5 6 is followed by 1, 7 or 2; all else is certain
    assert after == pytest.approx(3 * math.log(3) / 11)
    # Without bos_id, the context reaches back to the start of the row: the second 1 5 6 differs.
    assert overfit.memorized_loss(x, y, None) == pytest.approx(2 * math.log(2) / 11)
    assert overfit.memorized_loss(x, y, 1, 1) == pytest.approx(3 * math.log(3) / 11)
    counts = [3, 3, 1, 3, 1]  # targets 5, 6, 1, 2, 7
    assert overfit.memorized_loss(x, y, 1, 0) == pytest.approx(
        sum(n * math.log(11 / n) for n in counts) / 11)


# ---- the rate ------------------------------------------------------------------------------------

def test_a_range_of_rates_and_nothing_else_changes(trainer, capsys, monkeypatch, folder):
    monkeypatch.setattr(lr_find, "RAMP", 40)
    monkeypatch.setattr(lr_find, "SWEEP", 20)
    seen, plain = [], lr_find.lr_find

    def watched(t, train_step):
        def everything():
            weights, rates = ([p.clone() for p in t.model.parameters()],
                              [group["lr"] for group in t.opt.param_groups])
            return weights, torch.get_rng_state(), t.opt.state_dict(), rates
        before = everything()
        assert not plain(t, train_step)
        after = everything()
        assert all(torch.equal(a, b)
                   for a, b in zip(before[0] + [before[1]], after[0] + [after[1]]))
        assert before[2:] == after[2:] and before[2] == {}
        seen.append(True)
    monkeypatch.setitem(modes.MODES, "lr_find", watched)
    assert trainer(lr_find=True) == 0 and seen
    said = capsys.readouterr().out
    low, high = map(float, re.search(r"likely to lie between (\S+) and (\S+);", said).groups())
    middle = float(re.search(r"to copy: --learning_rate=(\S+)\n", said)[1])
    assert 1e-4 < low < middle < high < 1 and high < 10 * low
    assert said.count("  learning_rate ") >= 4
    assert "did not diverge up to" in said or "diverged at" in said
    assert (folder / "out/my.lr_find.png").read_bytes()[1:4] == b"PNG"
    table = (folder / "out/my.lr_find.csv").read_text().splitlines()
    assert table[0] == "kind,rate,loss,smooth"
    rates = [float(line.split(",")[1]) for line in table if line.startswith("sweep")]
    assert len(rates) >= 4
    # The parabola needs equal steps.
    assert all(2.3 < b / a < 2.7 for a, b in zip(rates, rates[1:]))
    assert ({path.name for path in (folder / "out").iterdir()}
            == {"my.lr_find.png", "my.lr_find.csv"})
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    assert trainer(lr_find=True) == 0
    assert "a picture needs: pip install matplotlib" in capsys.readouterr().out
    assert ({path.name for path in (folder / "out").iterdir()}
            == {"my.lr_find.png", "my.lr_find.csv", "my.lr_find2.csv"})


def test_a_ramp_grows_by_a_factor_and_its_smoothed_loss_has_no_bias():
    rates, losses, smooth = zip(*lr_find.take_ramp(lambda step, rate: 3.0))
    assert (rates[0], rates[-1]) == (lr_find.LOW, pytest.approx(lr_find.HIGH))
    assert {*losses} == {3.0}
    assert ([b / a for a, b in zip(rates, rates[1:])]
            == pytest.approx([rates[1] / rates[0]] * (lr_find.RAMP - 1)))
    assert smooth == pytest.approx([3.0] * lr_find.RAMP)


def test_the_knee_is_where_most_of_the_fall_is_done():
    assert lr_find.knee([(1, 9.0, 4.0), (2, 0.1, 3.0), (3, 0.1, 2.5), (4, 0.1, 2.0), (5, 9.0, 5.0),
                         (6, math.nan, math.nan)]) == 4
    assert lr_find.knee([(1, 9.0, 4.0), (2, 0.1, 2.5), (3, 0.1, 2.01), (4, 0.1, 2.0)]) == 3


def test_a_short_training_is_judged_by_its_last_tenth_and_lost_at_the_first_loss_that_is_no_number(
        monkeypatch):
    monkeypatch.setattr(lr_find, "SWEEP", 20)
    s, taken = trainer_config(), []

    def take(step, rate):
        taken.append(rate)
        return math.nan if (step, lost) == (7, True) else 20.0 - step

    lost = False
    assert lr_find.short_training(take, s, 1e-2) == 1.5
    assert max(taken) == taken[1] == 1e-2
    assert taken[-1] < 1e-3 < taken[0] < 1e-2
    lost = True
    assert lr_find.short_training(take, s, 1e-2) == math.inf and len(taken) == 28


def test_the_rates_of_a_sweep():
    falling = [(1e-3, 3.0), (2.5e-3, 2.0), (6.2e-3, 1.5), (1.6e-2, 1.4)]
    assert lr_find.beyond(falling) == 4e-2
    assert lr_find.beyond(falling[::-1][:1] + [(4e-2, 2.0)]) == 6.4e-3
    assert lr_find.beyond([*falling, (4e-2, 1.6)]) is None
    assert lr_find.beyond([(0.1, 2.0), (0.8, 1.0)]) is None
    low, middle, high = lr_find.suggestion([(1e-3, 2.0), (2.5e-3, 1.0), (6.25e-3, 2.0)])
    assert ((low, high) == (2.5e-3 / 4, 5e-3)
            or math.isclose(low, 6.2e-4, rel_tol=0.02) and math.isclose(high, 5e-3, rel_tol=0.02))
    assert math.isclose(middle ** 2, low * high, rel_tol=0.03)
    assert (lr_find.suggestion([(1e-3, 1.2), (2.5e-3, 1.0), (6.25e-3, 2.0)])[2] < high
            < lr_find.suggestion([(1e-3, 2.0), (2.5e-3, 1.0), (6.25e-3, 1.2)])[2])
    lost = [(1e-4, 3.0, 3.0), (1e-3, 2.0, 2.0), (1e-2, 9.0, 9.0)]
    assert lr_find.diverged(lost) and not lr_find.diverged(lost[:2])
    assert lr_find.diverged([*lost[:2], (1e-2, math.nan, math.nan)])


# ---- the profile ---------------------------------------------------------------------------------

def test_the_shares_of_a_profile_add_up_to_the_clock(trainer, capsys, folder):
    # The steps are long compared with the pauses of a busy machine.
    assert trainer(profile=True, batch_size=48, dim=64) == 0
    said = capsys.readouterr().out
    shares = {
        name: float(share)
        for name, share in re.findall(r"^  (\w+) +(-?[\d.]+) %  +[\d.-]+ ms a step$", said, re.M)
    }
    assert list(shares) == ["data", "forward", "backward", "clipping", "optimizer",
                            "communication", "logging", "waiting"]
    assert abs(sum(shares.values()) - 100) < 2
    assert min(shares.values()) >= 0
    assert shares["communication"] == 0
    assert min(shares[name]
               for name in ("data", "forward", "backward", "clipping", "optimizer", "logging")) > 0
    ops = re.findall(r"^  (\S.*?) +\d+ +([\d.]+) +([\d.]+) %   (\d+ % \((?:FLOPs|bytes)\)|-)$",
                     said, re.M)
    assert len(ops) == 10 and sum(roofline != "-" for *_, roofline in ops) >= 5
    step = float(re.search(r"([\d.]+) ms a step; without", said)[1])
    assert ([float(share) for _, _, share, _ in ops]
            == pytest.approx([100 * float(ms) / step for _, ms, *_ in ops], abs=0.1))
    trace = folder / "out/my.profile.json.gz"
    assert str(trace.relative_to(folder)) in said
    events = [event for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
              if event.get("dur")]
    assert {"data", "forward", "backward", "clipping", "optimizer", "logging",
            "aten::mm"} <= {event["name"] for event in events}

    def within(outer, name):
        """Count the events called `name` that are inside an event called `outer`."""
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == outer]
        return sum(any(a <= e["ts"] and e["ts"] + e["dur"] <= b for a, b in spans)
                   for e in events if e["name"] == name)

    # The gradients of the classifier are computed together with the loss.
    assert within("forward", "backward") >= 5
    assert (within("clipping", "aten::linalg_vector_norm")
            + within("clipping", "aten::_foreach_norm") >= 5)
    assert within("clipping", "aten::_foreach_mul_") >= 5
    trace.unlink()


def test_of_nested_spans_the_inner_one_owns_its_time():
    """This holds across threads: one thread waits for backward, another communicates for DDP."""
    def event(name, start, end, thread=1, kind=torch.autograd.DeviceType.CPU):
        return SimpleNamespace(name=name, thread=thread, device_type=kind,
                               time_range=SimpleNamespace(start=start, end=end))

    events = [event("forward", 0, 1e6), event("backward", 4e5, 6e5), event("aten::mm", 1, 2),
              event("backward", 1e6, 4e6), event("communication", 2e6, 3e6, thread=2),
              event("forward", 0, 9e6, kind=torch.autograd.DeviceType.CUDA)]
    assert profiler.phase_seconds(events) == pytest.approx(
        {"forward": 0.8, "backward": 2.2, "communication": 1.0})


def test_the_largest_ops_and_their_share_of_the_roofline():
    """A low peak makes FLOPs the limit, a high peak the bytes, which autocast halves."""
    def event(name, milliseconds, shapes=None, span=False):
        return SimpleNamespace(name=name, self_cpu_time_total=1e3 * milliseconds,
                               input_shapes=shapes, is_user_annotation=span)

    def largest(peak_flops, events, amp=False):
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=amp)
        return {
            op.name: op
            for op in profiler.largest_ops(events, peak_flops, torch.device("cpu"), autocast, 3)
        }

    product = [event("aten::mm", 40, [[30, 40], [40, 50]])] * 2  # 120,000 FLOPs each
    others = [event("forward", 900, span=True), event("aten::relu", 30), event("aten::empty", 1),
              event("aten::add", 50)]
    found = largest(6e6, product + others)
    assert [*found] == ["aten::mm", "aten::add", "aten::relu"]
    assert found["aten::relu"].roofline == "-"
    assert (found["aten::mm"].calls, found["aten::mm"].seconds) == (2, pytest.approx(0.08))
    assert found["aten::mm"].roofline == "50 % (FLOPs)"
    wide, narrow = (largest(1e30, product, amp)["aten::mm"] for amp in (False, True))
    assert "(bytes)" in wide.roofline and [*wide.ideal] == ["bytes"]
    speeds = [profiler.copy_seconds(size, torch.device("cpu")) for size in (18800, 9400)]
    assert ([sum(op.ideal.values()) for op in (wide, narrow)]
            == pytest.approx([2 * speed for speed in speeds]))


def test_the_work_of_an_op():
    assert profiler.work("aten::mm", [[3, 4], [4, 5]]) == (2 * 3 * 4 * 5, 4 * (12 + 20 + 15))
    assert profiler.work("aten::addmm_", [[3, 5], [3, 4], [4, 5], [], []])[0] == 2 * 3 * 4 * 5
    assert (profiler.work("aten::bmm", [[2, 3, 4], [2, 4, 5], [2, 3, 5]], 2)
            == (2 * 2 * 3 * 4 * 5, 2 * (24 + 40 + 30 + 30)))
    assert profiler.work("aten::_scaled_dot_product_flash_attention_for_cpu",
                         [[2, 4, 6, 8], [2, 2, 6, 8], [2, 2, 6, 8]])[0] == 4 * 2 * 4 * 6 * 6 * 8
    assert profiler.work("aten::copy_", [[10], [10], []]) == (0, 80)
    assert profiler.work("aten::empty", []) == (0, 0)


# ---- a dry run -----------------------------------------------------------------------------------

def test_a_dry_run_tries_everything_and_leaves_nothing(folder):
    """Dry-run with W&B, a preset and accumulation; the files of a user's run stay unchanged."""
    def everything():
        return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")
                if path.is_file() and "cache" not in path.parts}
    (folder / "out/my").mkdir(parents=True)
    (folder / "out/my/model.gguf").write_text("the user's own")
    before, home = everything(), folder / "cache/home"
    home.mkdir(parents=True)
    env = ({k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
           | {"OMP_NUM_THREADS": "1", "HOME": str(home)})
    words = [f"--{name}={value}" for name, value in TINY.items()]
    done = forked.run([
        ROOT / "train.py", ROOT / "config/debug.py", *words, "--dry_run", "--wandb_log",
        "--out_dir=out/my", "--gradient_accumulation_steps=8"
    ], folder, env)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("dry run passed: two steps ")
    for what in ("two steps", "resumed", "third step"):
        assert re.search(rf"{what} \d+\.\d s[,;]", last), what
    assert ("./run " in last) == (ROOT / "run").exists() != ("./run is not built" in done.stdout)
    assert "W&B offline" in done.stdout
    assert "iter      3 | tokens" in done.stdout
    assert everything() == before
    assert not [*home.rglob("wandb/*")]


def test_a_dry_run_ends_where_something_does_not_work(trainer, capsys, monkeypatch, folder):
    monkeypatch.setattr(
        resume, "restore", lambda s, start, now, opt, is_forced:  # skips the optimizer
        {"step": 2, "best": 1.0, "last": None, "clock": {"seconds": 0.0}})
    assert trainer(dry_run=True) == 2
    assert "the checkpoint does not restore the optimizer's state " in capsys.readouterr().err


@pytest.mark.parametrize("mode, words", [
    ("overfit", "PASS"), ("dry_run", "dry run passed"),
    pytest.param("lr_find", "to copy: --learning_rate=", marks=pytest.mark.slow),
    ("profile", "the ten largest ops")])
def test_modes_take_the_sizes_that_follow_from_the_minutes(trainer, capsys, folder, mode, words):
    assert trainer(minutes=0.2, out_dir="out/timed",
                   **{mode: 1 if mode == "overfit" else True}) == 0
    out = capsys.readouterr().out
    assert "settings derived from the text, this machine and the time" in out, out
    assert words in out and "is finished" not in out, out


def test_the_minutes_are_those_of_the_whole_program(trainer, monkeypatch):
    begun, plain, over = time.monotonic(), signals.Signals, []
    monkeypatch.setattr(plan, "STARTED", begun)
    monkeypatch.setattr(train, "run_checks", lambda ctx: time.sleep(1.5))
    monkeypatch.setattr(
        train, "Signals",
        lambda seconds, end: over.append(time.monotonic() + end) or plain(seconds, end))
    assert trainer(minutes=1.0, out_dir="out/timed") == 0
    assert over[0] - begun == pytest.approx(60 * (1 - plan.RESERVE), abs=0.5)


def test_what_does_not_go_with_a_mode(trainer, capsys):
    for given, words in (
            ({"overfit": 1, "lr_find": True}, "--overfit and --lr_find: expected one of them"),
            ({"profile": True, "eval_only": True},
             "--profile and --eval_only: expected one of them"),
            ({"dry_run": True, "supervise": True},
             "--dry_run and --supervise: expected one of them"),
            ({"overfit": -1}, "overfit is -1, expected"),
            ({"lr_find": True, "init_from": "resume"}, "it does not resume a run")):
        assert trainer(**given) == 2 and words in capsys.readouterr().err
