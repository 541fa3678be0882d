"""compare.py on runs read from their JSON lines and from what the W&B client wrote."""
import csv
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
from engine import charts
from engine.tracking import runs as logs

ROOT = Path(__file__).resolve().parents[1]
LOSS = {2: [5.0, 3.0, 2.5], 4: [5.0, 2.0, 1.5], 16: [5.0, 4.0, 4.5]}


def log(batch):
    """Return a run's rows, 10 iterations and a second apart; the last follows an hour's pause."""
    times = [0, 1, 3601]
    return [{
        "iter": 10 * i, "tokens": 10 * i * batch, "loss/train": loss + 0.1, "loss/val": loss,
        "time": times[i]
    } for i, loss in enumerate(LOSS[batch])]


@pytest.fixture()
def folders(tmp_path):
    for batch in LOSS:
        folder = tmp_path / f"b{batch}"
        folder.mkdir()
        config = {"batch_size": batch, "dim": 32, "name<&>": "x", "out_dir": folder.name}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "log.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in log(batch)) + '{"iter": 30, "lo')
    return tmp_path


def compare(folder, *words):
    return subprocess.run([sys.executable, str(ROOT / "compare.py"), *words], cwd=folder,
                          capture_output=True, text=True)


def test_the_table_has_what_differs_and_the_results_sorted(folders):
    done = compare(folders, "b2", "b4", "b16")
    rows = [re.split("  +", line) for line in done.stdout.splitlines()]
    assert rows[0] == ["run", "iter", "tokens", "last loss/train", "last loss/val", "best loss/val",
                       "best at iter", "minutes", "batch_size"]
    assert [row[0] for row in rows[1:]] == ["b4", "b2", "b16"]
    # Minutes exclude the pause.
    assert rows[1][1:] == ["20", "80", "1.6000", "1.5000", "1.5000", "20", "0.0333", "4"]
    # The last losses are from the same iteration.
    assert rows[3][1:7] == ["20", "320", "4.6000", "4.5000", "4.0000", "10"]
    by_size = compare(folders, "--runs=b16,b4,b2", "--sort=batch_size").stdout.splitlines()
    assert [line.split()[0] for line in by_size[1:]] == ["b2", "b4", "b16"]


def test_a_run_killed_between_evaluations_shows_the_last_pair_with_its_iteration(folders):
    with open(folders / "b4/log.jsonl", "w") as f:
        for row in (log(4)
                    + [{"iter": 30, "tokens": 120, "loss/train": 0.1, "grad/norm": 2.0,
                        "time": 3602}]):
            f.write(json.dumps(row) + "\n")
    head, b4, b2 = (
        re.split("  +", line)
        for line in compare(folders, "b4", "b2", "--sort=grad/norm").stdout.splitlines())
    assert head[:2] == ["run", "grad/norm"]  # the sort key precedes the other results
    assert head[-1] == "batch_size"
    assert dict(zip(head, b4)) == {
        "run": "b4", "batch_size": "4", "grad/norm": "2.0000", "iter": "30", "tokens": "120",
        "last loss/train": "1.6000", "last loss/val": "1.5000", "last at iter": "20",
        "best loss/val": "1.5000", "best at iter": "20", "minutes": "0.0500"
    }


def test_what_is_no_run_costs_a_line_and_without_words_out_is_looked_through(folders):
    (folders / "empty").mkdir()
    (folders / "out/sweep").mkdir(parents=True)
    (folders / "b2").rename(folders / "out/运行")
    (folders / "b16").rename(folders / "out/sweep/0")
    (folders / "out/begun").mkdir()
    (folders / "out/begun/config.json").write_text("{}")
    (folders / "out/begun/log.jsonl").touch()
    done = compare(folders)
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "run", "out/运行", "out/sweep/0"]
    assert done.stderr == "skipped out/begun: its log has no rows yet\n" and done.returncode == 0
    ends = {len(line) + line.count("运行") * 2 for line in done.stdout.splitlines()}
    assert len(ends) == 1  # a Chinese character takes two columns
    done = compare(folders, "b4", "empty", "none", "b4/../b4")
    assert len(done.stdout.splitlines()) == 2 and done.returncode == 0
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [
        "skipped empty", "skipped none"]


def test_a_run_of_an_earlier_version_has_its_settings_under_todays_names(folders):
    old = {
        "vocab_source": "byte", "batch_size": 2, "dim": 32, "tied": False, "within_documents": True,
        "skip_bad": False, "wandb_tables": True, "wandb_watch": "off"
    }
    new = {
        "vocab_source": "byte", "batch_size": 4, "dim": 32, "tie_embeddings": True,
        "document_mask": True, "checks": "all", "log_extras": "tables,model"
    }
    for folder, config in (("b2", old), ("b4", new)):
        (folders / folder / "config.json").write_text(json.dumps(config))
    first, second = program.read_runs([folders / "b2", folders / "b4"])
    assert program.differences([first, second]) == ["batch_size", "tie_embeddings"]
    assert first.config == {
        "vocab_source": "byte", "batch_size": 2, "dim": 32, "tie_embeddings": False,
        "document_mask": True, "log_extras": "tables,model"
    }
    (folders / "b2/config.json").write_text(json.dumps({
        "vocab_source": "byte", "wandb_watch": [1], "noise_scale": {}, "skip_bad": None,
        "tied": "x"
    }))
    assert program.read_run(folders / "b2").config == {
        "vocab_source": "byte", "log_extras": "tables,model,[1]", "tie_embeddings": "x"
    }
    (folders / "b2/config.json").write_text(
        json.dumps({"vocab_source": "byte", "noise_scale": True}))
    assert program.read_run(folders / "b2").config == {
        "vocab_source": "byte", "log_extras": "tables,model,noise_scale"
    }
    for decay, schedule in ((True, "cosine"), (False, "constant")):
        (folders / "b2/config.json").write_text(
            json.dumps({"vocab_source": "byte", "schedule": "cosine", "decay_lr": decay}))
        assert program.read_run(folders / "b2").config == {
            "vocab_source": "byte", "schedule": schedule}


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
    assert not run.read()
    assert run.config["max_iters"] == 60
    assert run.count == 2
    assert run.version > first
    second = run.version
    write(30, {"max_iters": 60, "learning_rate": 0.01}, [40])
    run.read()
    assert run.count == 3
    assert run.version == second  # a reader that has the earlier rows receives only the new row
    Path(tmp_path, "config.json").unlink()
    assert not run.read() and run.config == {}


def test_a_row_may_be_longer_than_what_is_read_at_once_and_have_any_number_of_metrics(
        tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "CHUNK", 64)
    monkeypatch.setattr(logs, "MAX_METRICS", 4)
    rows = [{
        "iter": i, "tokens": 10 * i, "loss/train": 1 / (i + 1),
        **{f"m{n}": i + n for n in range(3 + 40 * (i == 2))}
    } for i in range(5)]
    rows[1] = ({"one": 1, "two": 2, "three": 3} | rows[1]
               | {"samples": [["once", "greedy", 500 * "upon "]]})
    (tmp_path / "log.jsonl").write_text("".join(
        json.dumps(row) + "\n" for row in [{"iter": -1, "m0": 1, "m1": 1, "m2": 1}, *rows]))
    run = program.Run(tmp_path)
    while run.read():
        pass
    assert run.count == 6 and len(run.tables) == 1
    # The columns of the x axis are kept, whatever other metrics there are.
    assert run.columns["tokens"][1:].tolist() == [10 * i for i in range(5)]
    assert set(run.columns) == {"iter", "m0", "m1", "m2", "tokens"}


def test_the_chart_puts_losses_over_tokens_and_over_time(folders):
    assert compare(folders, "b2", "b4", "b16", "--plot=c.svg").returncode == 0
    svg = xml.dom.minidom.parse(str(folders / "c.svg"))
    lines = [[tuple(map(float, p.split(","))) for p in line.getAttribute("points").split()]
             for line in svg.getElementsByTagName("polyline")]
    assert len(lines) == 3 * 2 * 2
    b4, b2, b16 = lines[1:6:2]  # validation in the left chart, in the order of the table
    left = charts.LEFTS[0]
    assert [round((line[-1][0] - left) / (b16[-1][0] - left), 3) for line in (b2, b4, b16)] == [
        0.125, 0.25, 1]
    assert all(charts.TOP < y < charts.TOP + charts.HEIGHT  # within the frame
               for line in lines for _, y in line)
    assert b4[2][1] > b2[2][1]  # a lower loss is drawn lower
    words = svg.getElementsByTagName("text")
    shown = [t.firstChild.data for t in words]
    assert {"Validation loss", "validation loss (nats per token)", "tokens (millions)", "minutes",
            "pale: training loss"} <= set(shown)
    assert shown[-4:-1] == ["b4", "b2", "b16"]
    wide, high = map(float, svg.documentElement.getAttribute("viewBox").split()[2:])
    places = [(float(t.getAttribute("x")), float(t.getAttribute("y"))) for t in words]
    assert all(0 < x < wide and 0 < y < high for x, y in places)
    assert len(set(places)) == len(places)  # no label is over another
    of_losses = [x for t, (x, _) in zip(words, places) if t.getAttribute("text-anchor") == "end"]
    assert of_losses
    # The labels of the loss axes are left of the two frames.
    assert all(x < left or left + charts.WIDTH < x < charts.LEFTS[1] for x in of_losses)
    at = {t.firstChild.data: x for t, (x, _) in zip(words, places)
          if t.getAttribute("text-anchor") == "middle"}
    assert at["0.0003"] == pytest.approx(left + charts.WIDTH * 300 / 320, abs=0.1)  # 320 tokens
    lines, dots = svg.getElementsByTagName("polyline"), svg.getElementsByTagName("circle")
    assert len(dots) == 2 * 9
    assert {dot.getAttribute("fill") for dot in dots} == {
        line.getAttribute("stroke") for line in lines}


def test_a_groups_mean_stands_where_all_its_runs_have_values(folders):
    """
    The mean is the plain average over the range that all runs share, so it does not jump where a
    run ends. Runs that end before half of the longest are left out.
    """
    lines = [(np.arange(n), slope * np.arange(float(n)) + 1)
             for n, slope in ((101, 1), (81, 2), (61, 6), (20, 1000), (0, 0))]
    x, mean, low, high = program.band(lines)
    assert x[0] == 0
    assert x[-1] == 60
    assert mean == pytest.approx(3 * x + 1)
    assert low == pytest.approx(x + 1)
    assert high == pytest.approx(6 * x + 1)
    assert [len(part) for part in program.band([])] == [0, 0, 0, 0]
    assert [len(part) for part in program.band([([1, 2], [1, 1]), ([3, 4], [1, 1])])] == [
        0, 0, 0, 0]  # the two ranges of x do not overlap
    # The x values of the runs themselves are kept while there are few.
    assert program.band([([0, 2, 4], [1, 3, 5]), ([0, 3, 4], [1, 1, 1])])[0].tolist() == [
        0, 2, 3, 4]
    assert program.band([(np.arange(999), np.arange(999))])[0].tolist() == (
        np.linspace(0, 998, 200).tolist())
    (folders / "b16/config.json").write_text(json.dumps({"batch_size": 4, "dim": 32}))
    assert compare(folders, "b2", "b4", "b16", "--plot=c.svg", "--group=batch_size").returncode == 0
    svg = xml.dom.minidom.parse(str(folders / "c.svg"))
    assert len(svg.getElementsByTagName("polyline")) == 2 * 2 * 2
    assert len(svg.getElementsByTagName("polygon")) == 2
    assert len(svg.getElementsByTagName("circle")) == 2 * 3  # a single run has dots
    assert {"batch_size=2 (1)", "batch_size=4 (2)"} <= {
        t.firstChild.data for t in svg.getElementsByTagName("text")}


def figure(lines, is_log=True):
    return charts.Figure("title", "loss", "", is_log, ("x",),
                         [charts.Curve(f"run {n}", [line], []) for n, line in enumerate(lines)])


def test_the_axis_of_losses_is_logarithmic_and_fills_the_frame():
    drawn = figure([(np.arange(5.0), np.array([40.0, 20.0, 40 ** 0.5, 2.0, 1.0]))])
    for is_log, middle in (True, 194), (False, 44 + 300 * (20 - 40 ** 0.5) / 18):
        svg = xml.dom.minidom.parseString(
            f"<svg>{charts.panel(drawn._replace(is_log=is_log), 0, 2.0, 20.0)}</svg>")
        [line] = svg.getElementsByTagName("polyline")
        points = [tuple(map(float, point.split(",")))
                  for point in line.getAttribute("points").split()]
        assert [x for x, _ in points] == [76, 176, 276, 376, 476]
        assert [y for _, y in points] == pytest.approx([44, 44, middle, 344, 344], abs=0.05)


def test_many_lines_can_be_told_apart():
    svg = charts.svg(
        figure([(np.arange(2.0), np.arange(1.0, 3.0))] * 21)._replace(x_labels=("x", "y")))
    lines = xml.dom.minidom.parseString(svg).getElementsByTagName("polyline")
    assert len({(line.getAttribute("stroke"), line.getAttribute("stroke-dasharray"))
                for line in lines}) == 21
    low, high = charts.limits(figure([(np.arange(2.0), np.array([0.5, 0.5]))], is_log=False))
    assert low < 0.5 < high


def test_ticks_are_round_and_within():
    for low, high in (0, 7), (0, 0.00032), (2, 3), (0.1, 0.11), (0, 1e6):
        found = charts.ticks(low, high)
        step = found[1] - found[0]
        assert 3 <= len(found) <= 7
        assert low <= found[0] < low + step
        assert high - step < found[-1] <= high * (1 + 1e-12)
        assert f"{step:.0e}"[0] in "125" and float(f"{step:.0e}") == pytest.approx(step)
    assert charts.log_ticks(0.9, 12) == [1, 1.5, 2, 3, 5, 7, 10]
    assert charts.log_ticks(0.02, 0.03) == [0.02, 0.025, 0.03]


def test_values_as_the_table_shows_and_sorts_them():
    for value, shown in ((0.00099, "0.00099"), (0.001, "0.0010"), (99.99, "99.9900"),
                         (100.0, "100"), (12345.6, "12,350"), (2764800.0, "2,764,800"),
                         (-0.5, "-0.5000"), (1234567, "1,234,567"), (True, "True"), (None, ""),
                         ("a" * 40, "a" * 10), ("a" * 39, "a" * 39)):
        assert program.text(value) == shown
    assert sorted([None, "b", 2, "a", 1.5], key=program.sort_key) == [1.5, 2, "a", "b", None]
    assert program.pad("运e\u0301", 5) == "运e\u0301  "
    assert program.pad("ab", 4, right=True) == "  ab"
    pauses = [0, 2, 4, 6, 55, 105, 106]  # gaps of 20 times the median + 10 s or more are pauses
    assert logs.seconds(pauses) == [0, 2, 4, 6, 55, 57, 58]


def test_the_page_stands_alone_and_holds_the_values_to_sort_by(folders):
    assert compare(folders, "b2", "b16", "--plot=c.html").returncode == 0
    page = (folders / "c.html").read_text()
    assert page.startswith('<!doctype html><html lang="en">')
    assert "<title>Validation loss of 2 runs</title>" in page
    assert not re.search(r'(src|href)="', page) and page.count("<svg") == 1
    assert re.findall(r'<td data-value="(\d+)">\d+</td></tr', page) == ["2", "16"]


def test_the_clients_logs_read_the_same(folders):
    program = (
        "import json, wandb\nfor b in (2, 4, 16):\n"
        "    rows = [json.loads(l) for l in open(f'b{b}/log.jsonl').read().splitlines()[:3]]\n"
        "    run = wandb.init(project='p', name=f'b{b}', mode='offline', "
        "config={'batch_size': b, 'dim': 32})\n"
        "    for row in rows: run.log({k: v for k, v in row.items() if k != 'time'}, "
        "step=row['iter'])\n"
        "    run.finish()\nwandb.teardown()\n")
    env = ({k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
           | {"HOME": str(folders), "WANDB_SILENT": "true"})
    subprocess.run([sys.executable, "-c", program], cwd=folders, env=env, check=True,
                   capture_output=True)
    done = compare(folders, "wandb")
    rows = [re.split("  +", line) for line in done.stdout.splitlines()]
    assert [row[0].split()[0] for row in rows[1:]] == ["b4", "b2", "b16"]
    assert rows[0][:5] == ["run", "iter", "tokens", "last loss/train", "last loss/val"]
    assert rows[0][-1] == "batch_size"
    assert "(offline-run-" in rows[1][0]
    assert rows[1][1:5] == ["20", "80", "1.6000", "1.5000"]
    assert rows[1][-1] == "4"


def test_whole_numbers_count_as_the_clients_log_writes_them(tmp_path):
    """
    The client writes 2.0 as 2. A loss of 2 can be the best, and equal settings do not count as a
    difference between runs.
    """
    for name, kind in ("a", int), ("b", float):
        (tmp_path / name).mkdir()
        config = {
            "dropout": kind(0), "grad_clip": kind(1),
            "learning_rate": kind(1) if name == "a" else 0.5
        }
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        rows = [{"iter": i, "tokens": i, "time": 0, "loss/val": loss}
                for i, loss in enumerate([kind(3), kind(2), 2.5, "nan"])]
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head, *rows = (re.split("  +", line)
                   for line in compare(tmp_path, "a", "b").stdout.splitlines())
    assert (head[0], head[-1]) == ("run", "learning_rate")
    assert {row[-1] for row in rows} == {"1.0000", "0.5000"}
    for row in rows:
        assert dict(zip(head, row)) | {
            "best loss/val": "2.0000", "best at iter": "1"} == dict(zip(head, row))
    assert compare(tmp_path, "a", "b", "--plot=c.svg", "--group=grad_clip").returncode == 0
    assert "grad_clip=1 (2)" in (tmp_path / "c.svg").read_text()
    assert compare(tmp_path, "a", "b", "--plot=c.html").returncode == 0
    assert 'data-value="1.0">1.0000<' in (tmp_path / "c.html").read_text()


def test_a_setting_that_is_no_number_and_no_word_sorts_and_groups(folders):
    for batch in LOSS:
        config = json.loads((folders / f"b{batch}/config.json").read_text())
        (folders / f"b{batch}/config.json").write_text(
            json.dumps(config | {"run": 7, "args": {"dim": 64 // batch}}))
    table = compare(folders, "b2", "b4", "b16", "--sort=args").stdout.splitlines()
    assert [line.split()[0] for line in table[1:]] == ["b4", "b2", "b16"]
    done = compare(folders, "b2", "b4", "b16", "--plot=c.html", "--group=args")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words, message",
    [([], "out: not a run"), (["odd"], "holds a list, expected an object"),
     (["bare", "--plot=c.svg"], "has a loss"), (["none"], "none: not a run"),
     (["b2", "--sort=nothing"], "no such setting or metric"),
     (["b2", "--plot=c.jpg"], "ends in .html, .svg, .png, .pdf"),
     (["b2", "--verdict", "--group=nothing"], "--group=nothing: no such setting"),
    (["b2", "--metric=acc"], "--metric=acc: no such setting or metric; expected one of iter"),
     (["b2", "--json", "--csv"], "expected one of them"),
     (["b2", "b4", "--verdict", "--difference=-1"], "expected a positive number"),
     (["b2", "b4", "b16", "--verdict"], "expected two folders or groups"),
     (["b2", "nowhere", "--verdict"], "nowhere: expected a folder of runs"),
     (["b2", "--plot=no/c.png"], "cannot be written"),
     (["b2", "b4", "--plot=c.svg", "--group=nothing"],
      "no such setting; expected one of batch_size"),
     (["b2", "--plot=no/c.svg"], "cannot be written")])
def test_mistakes_end_in_one_line(folders, words, message):
    for name, config, row in (("odd", [], {"iter": 1}),
                              ("bare", {}, {"iter": 1, "time": 0, "loss/val": float("nan")})):
        (folders / name).mkdir()
        (folders / name / "config.json").write_text(json.dumps(config))
        (folders / name / "log.jsonl").write_text(json.dumps(row) + "\n")
    done = compare(folders, *words)
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_run_of_thousands_of_settings_leaves_those_of_all_runs_in_the_table():
    found = [program.Run(f"{n}") for n in range(3)]
    for n, run in enumerate(found):
        run.config = ({f"odd{k}": k + n for k in range(1000 * (n < 2))}
                      | {"dim": n, "seed": 7, "batch_size": n})
    columns = program.differences(found)
    assert len(columns) == program.MAX_COLUMNS and columns[-2:] == ["dim", "batch_size"]


def test_odd_values_sort_behind_and_break_no_cell():
    assert sorted([float("nan"), 2, None, float("-inf"), "a", 10 ** 40],
                  key=program.sort_key)[:4] == [float("-inf"), 2, 10 ** 40, "a"]
    assert program.text(10 ** 40).replace(",", "") == str(10 ** 40)
    assert program.text(int("1" * 40)).startswith("1,111")
    assert len(program.text("x" * 10 ** 6)) == len(program.text(10 ** 4000)) == program.MAX_CELL + 3
    deep = current = []
    for _ in range(10_000):
        current.append([])
        current = current[0]
    tamed = program.tame({"a": deep, "b": "x" * 10 ** 6, "c" * 1000: list(range(10 ** 5))}
                         | {str(n): n for n in range(10 ** 5)})
    assert len(json.dumps(tamed)) < 40_000 and tamed["b"].endswith("...")


# ---- groups and verdicts -------------------------------------------------------------------------

STORIES = {
    "vocab_source": "custom", "data": "stories", "dim": 64, "batch_size": 6, "max_iters": 40,
    "minutes": 0.0, "init_from": "auto", "wandb_run_name": "auto", "git_commit": "a" * 40,
    "git_changed": False
}


def write_run(folder, name, loss, bits_per_nat=0.5, patch="", **settings):
    """Write a run of train.py with five evaluations, of which the last is the best."""
    out = folder / name
    out.mkdir(parents=True)
    meta = {
        "tokenizer_sha256": "0" * 64, "train_bytes": 9000, "val_bytes": 1000, "train_tokens": 3000
    }
    config = STORIES | {
        "out_dir": name, "dataset": meta, "estimate": {"seconds": loss}, "n_params": 7
    } | settings
    if patch:
        config["git_changed"] = True
        (out / "diff.patch").write_text(patch)
    (out / "config.json").write_text(json.dumps(config))
    rows = [{
        "iter": 10 * i, "tokens": 1000 * i, "time": 1e9 + i, "loss/train": value, "loss/val": value,
        "bpb/val": value * bits_per_nat
    } for i, value in enumerate(loss + extra for extra in (4.0, 1.0, 0.5, 0.1, 0.0))]
    (out / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


NOISE = {1: 0.001, 2: -0.003, 3: 0.006}


@pytest.fixture()
def seeds(tmp_path):
    """
    Write three seeds of each of two widths, in both layouts of folders, one run with other
    max_iters, and one run of another program.
    """
    for seed, noise in NOISE.items():
        write_run(tmp_path / "out", f"narrow-seed{seed}", 2.6 + noise, seed=seed,
                  wandb_run_name=f"n{seed}", log_interval=seed)
        write_run(tmp_path / "out", f"wide/seed{seed}", 2.4 + noise + 0.001 * seed,
                  seed=seed, dim=96)
    write_run(tmp_path / "out", "long", 2.5, seed=1, max_iters=80)
    other = tmp_path / "out/program"
    other.mkdir()
    (other / "config.json").write_text('{"command": ["./program"], "seed": 1}')
    (other / "log.jsonl").write_text('{"iter": 5, "loss/val": 0.5, "time": 1}\n')
    return tmp_path


def table_in(folder, *words):
    """Return the table on stdout as [{column: cell}]. Only the last cell of a row may be empty."""
    done = compare(folder, *words)
    assert done.returncode == 0, done.stderr
    [head, *rows] = csv.reader(done.stdout.splitlines())
    return [dict(zip(head, row)) for row in rows]


def test_runs_that_differ_in_the_seed_alone_are_one_row(seeds):
    rows = table_in(seeds, "--csv")
    assert list(rows[0]) == [
        "run", "n", "mean loss/val", "sd", "best loss/val", "iter", "tokens", "last loss/train",
        "last loss/val", "last bpb/val", "best bpb/val", "minutes", "dim", "max_iters"
    ]
    assert [(row["run"], row["n"]) for row in rows] == [
        ("out/wide", "3"), ("out/long", "1"), ("out/narrow", "3"), ("out/program", "1")]
    wide = rows[0]
    values = [2.4 + noise + 0.001 * seed for seed, noise in NOISE.items()]
    assert float(wide["mean loss/val"]) == pytest.approx(np.mean(values))
    assert float(wide["sd"]) == pytest.approx(np.std(values, ddof=1))
    assert float(wide["best loss/val"]) == pytest.approx(min(values))
    assert (wide["dim"], wide["max_iters"], wide["iter"]) == ("96", "40", "40")
    assert rows[-1] == dict.fromkeys(wide, "") | {
        "run": "out/program", "n": "1", "mean loss/val": "0.5", "best loss/val": "0.5", "iter": "5",
        "last loss/val": "0.5", "minutes": "0.0"
    }  # a setting that it lacks does not count as a difference
    single = table_in(seeds, "--csv", "--single")
    assert len(single) == 8
    assert [row["seed"] for row in single[:3]] == ["2", "1", "3"]
    assert single[-1]["run"] == "out/program"
    assert "log_interval" not in single[0] and "wandb_run_name" not in single[0]
    assert [row["run"] for row in table_in(seeds, "--csv", "--sort=dim")] == [
        "out/long", "out/narrow", "out/wide", "out/program"]
    assert [row["run"] for row in table_in(seeds, "--csv", "--group=max_iters")] == [
        "max_iters=80 (1)", "max_iters=40 (6)", "max_iters=None (1)"]


def test_changed_programs_texts_and_time_budgets_are_told_apart(tmp_path):
    for seed in 1, 2:
        notes = f"diff --git a/doc/x.md b/doc/x.md\n+{seed}\n"  # does not affect the program
        for name, patch in (("same", notes * (seed - 1)),
                            ("try1", "diff --git a/model.py b/model.py\n+a\n" + notes),
                            ("try2", "+b")):
            write_run(tmp_path / "out", f"{name}-{seed}", 2.5, seed=seed, patch=patch)
        other_text = {"tokenizer_sha256": "0" * 64, "train_bytes": 9001, "val_bytes": 1000,
                      "train_tokens": 3000}
        write_run(tmp_path / "out", f"text-{seed}", 2.5, seed=seed, dataset=other_text)
        # Speed decides the number of steps, unless the command sets it.
        for name, given in (("timed", "--minutes=5"),
                            ("given", f"--minutes=5 --max_iters {400 + seed}"),
                            ("preset", "config/x.py --minutes=5")):
            write_run(tmp_path / "out", f"{name}-{seed}", 2.5, seed=seed, minutes=5.0,
                      max_iters=400 + seed, weight_decay=0.1 * seed)
            (tmp_path / f"out/{name}-{seed}/result.json").write_text(
                json.dumps({"command": f"python train.py {given}"}))
        command = ("--minutes=5 --dropout=0.1" if seed == 1 else
                   f"{tmp_path}/out/repeated-1/config.json --seed=2")
        write_run(tmp_path / "out", f"repeated-{seed}", 2.5, seed=seed, minutes=5.0, dim=32,
                  dropout=0.1)
        (tmp_path / f"out/repeated-{seed}/result.json").write_text(
            json.dumps({"command": f"python train.py {command}"}))
    rows = table_in(tmp_path, "--csv")
    assert {row["run"]: row["n"] for row in rows} == {
        f"out/{name}": "2" for name in ("same", "try1", "try2", "text", "timed", "repeated")
    } | {f"out/{name}-{seed}": "1" for name in ("given", "preset") for seed in (1, 2)}
    assert len({row["diff"] for row in rows}) == 3
    assert {row["text_bytes"] for row in rows} == {"10000", "10001"}


def test_a_setting_has_another_column_than_a_result_of_its_name(tmp_path):
    for minutes in 1.0, 2.0:
        write_run(tmp_path / "out", f"of-{minutes:.0f}", 2.5 - minutes / 10, minutes=minutes)
    rows = table_in(tmp_path, "--csv")
    assert [(row["run"], row["setting minutes"]) for row in rows] == [
        ("out/of-2", "2"), ("out/of-1", "1")]
    assert all(float(row["minutes"]) < 1 for row in rows)  # the runs took four seconds


def test_foreign_runs_are_repetitions_only_if_they_have_seeds(tmp_path):
    for n in range(1, 7):
        name, config = [
            ("seeded", {"lr": 0.1, "random_seed": n}), ("program", {"command": ["./program"]}),
            ("same", {"seed": 1})][(n - 1) // 2]
        out = tmp_path / f"out/{name}{n}"
        out.mkdir(parents=True)
        (out / "config.json").write_text(json.dumps(config))
        (out / "log.jsonl").write_text(f'{{"iter": 5, "acc": 0.{n}, "time": 1}}\n')
    rows = table_in(tmp_path, "--csv")  # larger values of this metric are better
    assert [(row["run"], row["n"], row["best acc"]) for row in rows] == [
        ("out/same6", "1", "0.6"), ("out/same5", "1", "0.5"), ("out/program4", "1", "0.4"),
        ("out/program3", "1", "0.3"), ("out/seeded", "2", "0.2")]


def test_a_verdict_names_the_difference_its_interval_and_the_settings(seeds):
    done = compare(seeds, "out/narrow", "out/wide", "--verdict")
    sentence, differing = done.stdout.splitlines()[-2:]
    half = 4.302652729749464 * 0.0005 / 3 ** 0.5  # the differences are 0.1 - 0.0005 seed
    assert sentence == ("out/wide is better by 0.099 bits per byte (95 % interval "
                        f"{0.099 - half:.3f} to {0.099 + half:.3f}, n = 3)")
    assert differing == "differing: dim 64 -> 96" and done.stderr == ""
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:3]] == [
        ["out/wide", "3"], ["out/narrow", "3"]]
    same = compare(seeds, "out/narrow", "out/narrow-seed1", "--verdict", "--metric=loss/val",
                   "--difference=0.02").stdout.splitlines()
    assert same[-2].startswith("not distinguishable: a single seed shows no noise")
    assert same[-1] == "no setting differs"
    found = json.loads(
        compare(seeds, "out/narrow", "out/wide", "--verdict", "--json").stdout)["verdict"]
    assert (found["a"], found["b"], found["n_a"], found["paired"], found["distinguishable"]) == (
        "out/narrow", "out/wide", 3, True, True)
    assert found["sentence"] == sentence
    assert found["differs"] == {"dim": [64, 96]}
    assert found["difference"] == pytest.approx(-0.099)


def test_groups_of_other_seeds_and_repeated_seeds_are_not_paired(tmp_path):
    """Welch's test compares them, and two runs of the same seed count once."""
    for seed, noise in NOISE.items():
        write_run(tmp_path / "out", f"a{seed}", 2.6 + noise, seed=seed)
        write_run(tmp_path / "out", f"b{seed}", 2.6 + 1.3 * noise, seed=seed + 1, dim=96)
    write_run(tmp_path / "out", "b4", 2.6 + 1.3 * NOISE[3], seed=4, dim=96)
    done = compare(tmp_path, "--verdict", "--json", "--difference=0.001")
    found = json.loads(done.stdout)["verdict"]
    assert (found["a"], found["b"], found["n_a"], found["n_b"], found["paired"]) == (
        "out/a", "out/b", 3, 3, False)
    assert found["more"] > 3
    assert found["sentence"].startswith(
        f"not distinguishable; {found['more']} more seeds each would show a difference of 0.001 "
        "(out/b minus out/a: 0.00"
    )


def test_a_verdict_takes_groups_of_the_current_folder_and_of_a_setting(seeds):
    """As the table and the advice name them."""
    by_folders = json.loads(compare(seeds, "out/narrow", "out/wide", "--verdict",
                                    "--json").stdout)["verdict"]
    here = compare(seeds / "out", "narrow", "wide", "--verdict", "--json")
    assert json.loads(here.stdout)["verdict"]["difference"] == by_folders["difference"], here.stderr
    for seed in 1, 2:
        for name, dim in ("x", 64), ("y", 96):
            write_run(seeds, f"grid/{name}{seed}", 2 + dim / 1000 + seed / 1e4, seed=seed, dim=dim)
    done = compare(seeds, "grid", "out/long", "--verdict", "--group=dim", "--json")
    found = json.loads(done.stdout)["verdict"]
    assert (found["a"], found["b"]) == ("dim=64 (3)", "dim=96 (2)")


def test_the_evaluation_before_the_first_step_is_not_the_best_result(tmp_path):
    """A fine-tuning that only makes a model worse is not as good as the model before."""
    for name, rows in ("worse", {0: 1.0, 10: 3.0, 20: 2.5}), ("only", {0: 1.5}):
        write_run(tmp_path / "out", name, 1.0, seed=1)
        (tmp_path / "out" / name / "log.jsonl").write_text("".join(
            json.dumps({"iter": at, "tokens": at, "time": at, "loss/val": loss}) + "\n"
            for at, loss in rows.items()))
    found = {row["run"]: row for row in table_in(tmp_path, "--csv", "--single",
                                                 "--metric=loss/val")}
    assert found["out/worse"]["best loss/val"] == "2.5"
    assert found["out/only"]["best loss/val"] == "1.5"


def test_a_verdict_on_what_does_not_compare_says_so(seeds):
    done = compare(seeds, "out", "out/wide", "--verdict")
    assert done.returncode == 2
    assert ("out: its runs differ in dim, max_iters; "
            "expected runs that differ only in the seed") in done.stderr
    other = {
        "tokenizer_sha256": "1" * 64, "train_bytes": 9000, "val_bytes": 999, "train_tokens": 2000
    }
    for seed in 1, 2:
        write_run(seeds, f"other/{seed}", float("nan") if seed == 2 else 1.5, seed=seed,
                  dataset=other)
    write_run(seeds, "other/3", 1.6, seed=3, dataset=other, git_commit="b" * 40)
    log = seeds / "out/narrow-seed3/log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:3]))
    done = compare(seeds, "out/narrow", "other", "--verdict", "--metric=loss/val")
    assert done.stderr.splitlines() == [
        "note: vocabularies differ, so losses per token are not comparable; use --metric=bpb/val",
        "note: other: 1 of 3 runs have no finite loss/val and are left out",
        "note: other: its runs are of different versions of the program",
        "note: out/narrow: some runs ended at step 20, others at 40",
        "note: their validation texts differ, so a difference may come from the texts"]
    done = compare(seeds, "out/narrow", "other/2", "--verdict")
    assert done.returncode == 2 and "other/2: no run has a finite bpb/val" in done.stderr


def test_vocabularies_are_compared_in_bits_per_byte(tmp_path):
    """Byte tokens have the smallest loss per token, and here the largest loss per byte."""
    for size, (loss, bits_per_nat) in {
            259: (1.7, 1.44), 512: (2.9, 0.72), 4096: (4.6, 0.4)}.items():
        meta = {"tokenizer_sha256": str(size), "train_bytes": 9000, "val_bytes": 1000,
                "train_tokens": int(3000 * bits_per_nat)}
        write_run(tmp_path / "out", str(size), loss, bits_per_nat, vocab_size=size, dataset=meta)
    done = compare(tmp_path, "--plot=c.svg")
    assert [line.split()[0] for line in done.stdout.splitlines()[1:4]] == [
        "out/4096", "out/512", "out/259"]
    words = [t.firstChild.data for t in
             xml.dom.minidom.parse(str(tmp_path / "c.svg")).getElementsByTagName("text")]
    assert words[:2] == ["Validation loss", "validation loss (bits per byte)"]
    assert "text (MB)" in words
    assert words[-3:] == ["out/4096", "out/512", "out/259"]
    assert [one["group"] for one in json.loads(compare(tmp_path, "--json").stdout)["groups"]] == [
        "out/4096", "out/512", "out/259"]
    by_loss = compare(tmp_path, "--metric=loss/val")
    assert [line.split()[0] for line in by_loss.stdout.splitlines()[1:4]] == [
        "out/259", "out/512", "out/4096"]
    assert by_loss.stderr.startswith("note: vocabularies differ")


def test_json_has_the_groups_with_their_runs(seeds):
    found = json.loads(compare(seeds, "--json", "--metric=bpb/val").stdout)
    assert (found["metric"], found["unit"]) == ("bpb/val", "bits per byte")
    assert "verdict" not in found
    wide = found["groups"][0]
    assert (wide["group"], wide["n"], wide["settings"]) == (
        "out/wide", 3, {"dim": 96, "max_iters": 40})
    assert [(run["run"], run["seed"]) for run in wide["runs"]] == [
        (f"out/wide/seed{seed}", seed) for seed in (1, 2, 3)]
    assert (wide["best"] == min(run["value"] for run in wide["runs"])
            == min(run["results"]["best bpb/val"] for run in wide["runs"]))
    assert found["groups"][-1]["n"] == 0
    assert found["groups"][-1]["mean"] is None  # the other program has no bpb/val


def test_pictures_are_of_the_kind_that_their_name_says(seeds, monkeypatch, capsys):
    from PIL import Image
    write_run(seeds / "out", "小说$x$", 2.7, seed=1, dim=48)
    comparison = program.arranged(
        program.groups_of(program.read_runs(logs.run_folders([seeds / "out"]))))
    for name in "c.png", "c.pdf":
        monkeypatch.setattr(program, "plot", str(seeds / name))
        program.write_plot(comparison)
        said = capsys.readouterr().err
        assert not said or said.startswith("note: this machine has no font")
    with Image.open(seeds / "c.png") as picture:
        assert picture.format == "PNG" and picture.width > 1500
        colors = {color for _, color in picture.convert("RGB").getcolors(1 << 24)}
    assert {(0, 0x72, 0xb2), (0xd5, 0x5e, 0), (0, 0x9e, 0x73)} <= colors
    assert (seeds / "c.pdf").read_bytes().startswith(b"%PDF-")
    (seeds / "hidden/matplotlib").mkdir(parents=True)
    (seeds / "hidden/matplotlib/__init__.py").write_text(
        "raise ModuleNotFoundError('no', name='matplotlib')")
    monkeypatch.setenv("PYTHONPATH", str(seeds / "hidden"))
    done = compare(seeds, "--plot=d.png")
    assert done.returncode == 2
    assert ("needs matplotlib (pip install matplotlib); "
            "names that end in .svg or .html") in done.stderr
    assert compare(seeds, "--plot=d.svg").returncode == 0
