"""Runs compared from their JSON lines and from what the W&B client wrote."""
import json
import os
import re
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

import numpy as np
import pytest

import compare as program
import track

ROOT = Path(__file__).resolve().parents[1]
LOSS = {2: [5.0, 3.0, 2.5], 4: [5.0, 2.0, 1.5], 16: [5.0, 4.0, 4.5]}


def log(batch):
    """A run's rows: every 10 iterations, a second apart, but for a stop of an hour before the last."""
    times = [0, 1, 3601]
    return [{"iter": 10 * i, "tokens": 10 * i * batch, "loss/train": loss + 0.1, "loss/val": loss, "time": times[i]}
            for i, loss in enumerate(LOSS[batch])]


@pytest.fixture()
def folders(tmp_path):
    for batch in LOSS:
        folder = tmp_path / f"b{batch}"
        folder.mkdir()
        config = {"batch_size": batch, "dim": 32, "name<&>": "x", "out_dir": folder.name}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log(batch)) + '{"iter": 30, "lo')
    return tmp_path


def compare(folder, *words):
    return subprocess.run([sys.executable, str(ROOT / "compare.py"), *words], cwd=folder, capture_output=True, text=True)


def test_the_table_has_what_differs_and_the_results_sorted(folders):
    done = compare(folders, "b2", "b4", "b16")
    rows = [re.split("  +", line) for line in done.stdout.splitlines()]
    assert rows[0] == ["run", "batch_size", "iter", "tokens", "last loss/train", "last loss/val", "best loss/val",
                       "best at iter", "minutes"]
    assert [row[0] for row in rows[1:]] == ["b4", "b2", "b16"]
    assert rows[1][1:] == ["4", "20", "80", "1.6000", "1.5000", "1.5000", "20", "0.0333"]  # minutes without the stop
    assert rows[3][2:8] == ["20", "320", "4.6000", "4.5000", "4.0000", "10"]  # the last pair is of one moment
    by_size = compare(folders, "--runs=b16,b4,b2", "--sort=batch_size").stdout.splitlines()
    assert [line.split()[0] for line in by_size[1:]] == ["b2", "b4", "b16"]


def test_a_run_killed_between_evaluations_shows_the_last_pair_with_its_iteration(folders):
    with open(folders / "b4/log.jsonl", "w") as f:
        for row in (log(4) + [{"iter": 30, "tokens": 120, "loss/train": 0.1, "grad/norm": 2.0, "time": 3602}]):
            f.write(json.dumps(row) + "\n")
    head, b4, b2 = (re.split("  +", line) for line in compare(folders, "b4", "b2", "--sort=grad/norm").stdout.splitlines())
    assert head[:3] == ["run", "batch_size", "grad/norm"]  # what rows are sorted by stands before the other results
    assert dict(zip(head, b4)) == {"run": "b4", "batch_size": "4", "grad/norm": "2.0000", "iter": "30", "tokens": "120",
                                   "last loss/train": "1.6000", "last loss/val": "1.5000", "last at iter": "20",
                                   "best loss/val": "1.5000", "best at iter": "20", "minutes": "0.0500"}


def test_what_is_no_run_costs_a_line_and_without_words_out_is_looked_through(folders):
    (folders / "empty").mkdir()
    (folders / "out/sweep").mkdir(parents=True)
    (folders / "b2").rename(folders / "out/运行")
    (folders / "b16").rename(folders / "out/sweep/0")
    (folders / "out/begun").mkdir()
    (folders / "out/begun/config.json").write_text("{}")
    (folders / "out/begun/log.jsonl").touch()
    done = compare(folders)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["run", "out/运行", "out/sweep/0"]
    assert done.stderr == "skipped out/begun: its log has no rows yet\n" and done.returncode == 0
    ends = {len(line) + line.count("运行") * 2 for line in done.stdout.splitlines()}
    assert len(ends) == 1  # a Chinese character takes two columns
    done = compare(folders, "b4", "empty", "none", "b4/../b4")
    assert len(done.stdout.splitlines()) == 2 and done.returncode == 0
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["skipped empty", "skipped none"]


def test_a_run_of_an_earlier_version_has_its_settings_under_todays_names(folders):
    old = {"vocab_source": "byte", "batch_size": 2, "dim": 32, "tied": False, "within_documents": True, "skip_bad": False, "wandb_tables": True, "wandb_watch": "off"}
    new = {"vocab_source": "byte", "batch_size": 4, "dim": 32, "tie_embeddings": True, "document_mask": True, "checks": "all", "log_extras": "tables,model"}
    for folder, config in (("b2", old), ("b4", new)):
        (folders / folder / "config.json").write_text(json.dumps(config))
    first, second = program.read_runs([folders / "b2", folders / "b4"])
    assert program.differences([first, second]) == ["batch_size", "tie_embeddings", "checks"]
    assert first.config == {"vocab_source": "byte", "batch_size": 2, "dim": 32, "tie_embeddings": False, "document_mask": True, "log_extras": "tables,model"}
    (folders / "b2/config.json").write_text(json.dumps({"vocab_source": "byte", "wandb_watch": [1], "noise_scale": {}, "skip_bad": None, "tied": "x"}))
    assert program.read_run(folders / "b2").config == {"vocab_source": "byte", "log_extras": "tables,model,[1]", "tie_embeddings": "x"}
    (folders / "b2/config.json").write_text(json.dumps({"vocab_source": "byte", "noise_scale": True}))
    assert program.read_run(folders / "b2").config == {"vocab_source": "byte", "log_extras": "tables,model,noise_scale"}


def test_the_settings_of_another_program_keep_their_names(folders):
    theirs = {"patience": 3, "tied": True, "skip_bad": True, "noise_scale": 0.5, "sharded": False}
    (folders / "b2/config.json").write_text(json.dumps(theirs))
    assert program.read_run(folders / "b2").config == theirs


def test_a_resumed_runs_new_settings_are_read_by_who_has_read_the_old_ones(tmp_path):
    def write(step, settings, iters):
        jsonl = track.Jsonl(tmp_path, settings, step)
        for i in iters:
            jsonl.log({"iter": i, "tokens": i, "loss/val": 2.0})
        jsonl.finish()

    run = program.Run(tmp_path)
    write(0, {"max_iters": 30, "learning_rate": 0.01}, [0, 30])
    run.read()
    first = run.version
    assert run.config == {"max_iters": 30, "learning_rate": 0.01} and run.count == 2
    write(30, {"max_iters": 60, "learning_rate": 0.01}, [])  # resumed, and no row yet
    assert not run.read() and run.config["max_iters"] == 60 and run.count == 2 and run.version > first
    second = run.version
    write(30, {"max_iters": 60, "learning_rate": 0.01}, [40])
    run.read()
    assert run.count == 3 and run.version == second  # who follows it gets the row alone
    Path(tmp_path, "config.json").unlink()
    assert not run.read() and run.config == {}


def test_a_row_may_be_longer_than_what_is_read_at_once_and_have_any_number_of_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "CHUNK", 64)
    monkeypatch.setattr(program, "MAX_METRICS", 4)
    rows = [{"iter": i, "tokens": 10 * i, "loss/train": 1 / (i + 1), **{f"m{n}": i + n for n in range(3 + 40 * (i == 2))}} for i in range(5)]
    rows[1] = {"one": 1, "two": 2, "three": 3} | rows[1] | {"samples": [["once", "greedy", 500 * "upon "]]}
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"iter": -1, "m0": 1, "m1": 1, "m2": 1}, *rows]))
    run = program.Run(tmp_path)
    while run.read():
        pass
    assert run.count == 6 and len(run.tables) == 1
    assert run.columns["tokens"][1:].tolist() == [10 * i for i in range(5)]  # what others stand over, whatever else there is
    assert set(run.columns) == {"iter", "m0", "m1", "m2", "tokens"}


def test_the_chart_puts_losses_over_tokens_and_over_time(folders):
    assert compare(folders, "b2", "b4", "b16", "--plot=c.svg").returncode == 0
    svg = xml.dom.minidom.parse(str(folders / "c.svg"))
    lines = [[tuple(map(float, p.split(","))) for p in line.getAttribute("points").split()]
             for line in svg.getElementsByTagName("polyline")]
    assert len(lines) == 3 * 2 * 2
    validation = lines[1:6:2]  # of the left chart, in the order given
    assert [round((line[-1][0] - 50) / (validation[2][-1][0] - 50), 3) for line in validation] == [0.125, 0.25, 1]
    assert min(y for line in validation for _, y in line) > 20  # within the frame
    assert validation[1][2][1] > validation[0][2][1]  # a lower loss lies lower
    words = svg.getElementsByTagName("text")
    assert {t.firstChild.data for t in words} >= {"b2", "b4", "b16", "minutes"}
    wide, high = map(float, svg.documentElement.getAttribute("viewBox").split()[2:])
    places = [(float(t.getAttribute("x")), float(t.getAttribute("y"))) for t in words]
    assert all(0 < x < wide and 0 < y < high for x, y in places) and len(set(places)) == len(places)  # none over another
    of_losses = [x for t, (x, _) in zip(words, places) if t.getAttribute("text-anchor") == "end"]
    assert of_losses and all(x < 50 or 450 < x < 510 for x in of_losses)  # left of the two frames
    at = {t.firstChild.data: x for t, (x, _) in zip(words, places) if t.getAttribute("text-anchor") == "middle"}
    assert at["0.0003"] == pytest.approx(50 + 400 * 300 / 320, abs=0.1)  # of 320 tokens
    lines, dots = svg.getElementsByTagName("polyline"), svg.getElementsByTagName("circle")
    assert len(dots) == 2 * 9 and {dot.getAttribute("fill") for dot in dots} == {line.getAttribute("stroke") for line in lines}


def test_a_groups_mean_stands_where_all_its_runs_have_values(folders):
    """It is that of plain sums, and does not jump where a run ends; one that hardly began says nothing."""
    lines = [(np.arange(n), slope * np.arange(float(n)) + 1) for n, slope in ((101, 1), (81, 2), (61, 6), (20, 1000), (0, 0))]
    x, mean, low, high = program.band(lines)
    assert x[0] == 0 and x[-1] == 60 and mean == pytest.approx(3 * x + 1) and low == pytest.approx(x + 1)
    assert high == pytest.approx(6 * x + 1) and [len(part) for part in program.band([])] == [0, 0, 0, 0]
    assert [len(part) for part in program.band([([1, 2], [1, 1]), ([3, 4], [1, 1])])] == [0, 0, 0, 0]  # they never stand together
    (folders / "b16/config.json").write_text(json.dumps({"batch_size": 4, "dim": 32}))
    assert compare(folders, "b2", "b4", "b16", "--plot=c.svg", "--group=batch_size").returncode == 0
    svg = xml.dom.minidom.parse(str(folders / "c.svg"))
    assert len(svg.getElementsByTagName("polyline")) == len(svg.getElementsByTagName("polygon")) == 2 * 2 * 2
    assert {"batch_size=2 (1)", "batch_size=4 (2)"} <= {t.firstChild.data for t in svg.getElementsByTagName("text")}


def test_the_axis_of_losses_is_logarithmic_and_fills_the_frame():
    line = np.arange(5.0), np.array([40.0, 20.0, 40 ** 0.5, 2.0, 1.0])
    svg = xml.dom.minidom.parseString(f"<svg>{program.panel([('red', line, line)], 50, 'x', 2.0, 20.0)}</svg>")
    for shown in svg.getElementsByTagName("polyline"):
        points = [tuple(map(float, point.split(","))) for point in shown.getAttribute("points").split()]
        assert [x for x, _ in points] == [50, 150, 250, 350, 450] and [y for _, y in points] == [20, 20, 170, 320, 320]


def test_ticks_are_round_and_within():
    for low, high in (0, 7), (0, 0.00032), (2, 3), (0.1, 0.11), (0, 1e6):
        found = program.ticks(low, high)
        step = found[1] - found[0]
        assert 3 <= len(found) <= 7 and low <= found[0] < low + step and high - step < found[-1] <= high * (1 + 1e-12)
        assert f"{step:.0e}"[0] in "125" and float(f"{step:.0e}") == pytest.approx(step)
    assert program.log_ticks(0.9, 12) == [1, 1.5, 2, 3, 5, 7, 10] and program.log_ticks(0.02, 0.03) == [0.02, 0.03]


def test_values_as_the_table_shows_and_sorts_them():
    for value, shown in ((0.00099, "0.00099"), (0.001, "0.0010"), (99.99, "99.9900"), (100.0, "100"), (12345.6, "1.235e+04"),
                         (-0.5, "-0.5000"), (1234567, "1,234,567"), (True, "True"), (None, ""), ("a" * 40, "a" * 10),
                         ("a" * 39, "a" * 39)):
        assert program.text(value) == shown
    assert sorted([None, "b", 2, "a", 1.5], key=program.sort_key) == [1.5, 2, "a", "b", None]
    assert program.pad("运e\u0301", 5) == "运e\u0301  " and program.pad("ab", 4, right=True) == "  ab"
    pauses = [0, 2, 4, 6, 55, 105, 106]  # a gap above 20 usual ones and 10 s is a pause
    assert program.seconds(pauses) == [0, 2, 4, 6, 55, 57, 58]


def test_the_page_stands_alone_and_holds_the_values_to_sort_by(folders):
    assert compare(folders, "b2", "b16", "--plot=c.html").returncode == 0
    page = (folders / "c.html").read_text()
    assert not re.search(r'(src|href)="', page) and page.count("<svg") == 1
    assert re.findall(r'<td data-value="(\d+)">\d+</td><td data-value="20"', page) == ["2", "16"]


def test_the_clients_logs_read_the_same(folders):
    program = ("import json, wandb\nfor b in (2, 4, 16):\n"
               "    rows = [json.loads(l) for l in open(f'b{b}/log.jsonl').read().splitlines()[:3]]\n"
               "    run = wandb.init(project='p', name=f'b{b}', mode='offline', config={'batch_size': b, 'dim': 32})\n"
               "    for row in rows: run.log({k: v for k, v in row.items() if k != 'time'}, step=row['iter'])\n"
               "    run.finish()\nwandb.teardown()\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"HOME": str(folders), "WANDB_SILENT": "true"}
    subprocess.run([sys.executable, "-c", program], cwd=folders, env=env, check=True, capture_output=True)
    done = compare(folders, "wandb")
    rows = [re.split("  +", line) for line in done.stdout.splitlines()]
    assert [row[0].split()[0] for row in rows[1:]] == ["b4", "b2", "b16"]
    assert rows[0][:6] == ["run", "batch_size", "iter", "tokens", "last loss/train", "last loss/val"]
    assert "(offline-run-" in rows[1][0] and rows[1][1:6] == ["4", "20", "80", "1.6000", "1.5000"]


def test_whole_numbers_count_as_the_clients_log_writes_them(tmp_path):
    """The client writes 2.0 as 2. A loss of 2 may be the best, and equal settings are no difference between runs."""
    for name, kind in ("a", int), ("b", float):
        (tmp_path / name).mkdir()
        config = {"dropout": kind(0), "grad_clip": kind(1), "learning_rate": kind(1) if name == "a" else 0.5}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        rows = [{"iter": i, "tokens": i, "time": 0, "loss/val": loss} for i, loss in enumerate([kind(3), kind(2), 2.5, "nan"])]
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head, *rows = (re.split("  +", line) for line in compare(tmp_path, "a", "b").stdout.splitlines())
    assert head[:2] == ["run", "learning_rate"] and {row[1] for row in rows} == {"1.0000", "0.5000"}
    for row in rows:
        assert dict(zip(head, row)) | {"best loss/val": "2.0000", "best at iter": "1"} == dict(zip(head, row))
    assert compare(tmp_path, "a", "b", "--plot=c.svg", "--group=grad_clip").returncode == 0
    assert "grad_clip=1 (2)" in (tmp_path / "c.svg").read_text()
    assert compare(tmp_path, "a", "b", "--plot=c.html").returncode == 0
    assert 'data-value="1.0">1.0000<' in (tmp_path / "c.html").read_text()


def test_a_setting_that_is_no_number_and_no_word_sorts_and_groups(folders):
    for batch in LOSS:
        config = json.loads((folders / f"b{batch}/config.json").read_text())
        (folders / f"b{batch}/config.json").write_text(json.dumps(config | {"run": 7, "args": {"dim": 64 // batch}}))
    table = compare(folders, "b2", "b4", "b16", "--sort=args").stdout.splitlines()
    assert [line.split()[0] for line in table[1:]] == ["b4", "b2", "b16"]
    done = compare(folders, "b2", "b4", "b16", "--plot=c.html", "--group=args")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words, message", [
    ([], "out: not a run"), (["odd"], "holds a list, expected an object"), (["bare", "--plot=c.svg"], "has a loss"), (["none"], "none: not a run"), (["b2", "--sort=nothing"], "no such setting or metric"),
    (["b2", "--plot=c.png"], ".html or .svg"),
    (["b2", "b4", "--plot=c.svg", "--group=nothing"], "no such setting; expected one of batch_size"), (["b2", "--plot=no/c.svg"], "cannot be written")])
def test_mistakes_end_in_one_line(folders, words, message):
    for name, config, row in ("odd", [], {"iter": 1}), ("bare", {}, {"iter": 1, "time": 0, "loss/val": float("nan")}):
        (folders / name).mkdir()
        (folders / name / "config.json").write_text(json.dumps(config))
        (folders / name / "log.jsonl").write_text(json.dumps(row) + "\n")
    done = compare(folders, *words)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_run_of_thousands_of_settings_leaves_those_of_all_runs_in_the_table():
    found = [program.Run(f"{n}") for n in range(3)]
    for n, run in enumerate(found):
        run.config = {f"odd{k}": k for k in range(1000 * (n == 0))} | {"dim": n, "seed": 7, "batch_size": n}
    columns = program.differences(found)
    assert len(columns) == program.MAX_SETTINGS and columns[-2:] == ["dim", "batch_size"]


def test_odd_values_sort_behind_and_break_no_cell():
    assert sorted([float("nan"), 2, None, float("-inf"), "a", 10 ** 40], key=program.sort_key)[:4] == [float("-inf"), 2, 10 ** 40, "a"]
    assert program.text(10 ** 40).replace(",", "") == str(10 ** 40) and program.text(int("1" * 40)).startswith("1,111")
    assert len(program.text("x" * 10 ** 6)) == len(program.text(10 ** 4000)) == program.MAX_CELL + 3
    deep = current = []
    for _ in range(10_000):
        current.append([])
        current = current[0]
    tamed = program.tame({"a": deep, "b": "x" * 10 ** 6, "c" * 1000: list(range(10 ** 5))} | {str(n): n for n in range(10 ** 5)})
    assert len(json.dumps(tamed)) < 40_000 and tamed["b"].endswith("...")
