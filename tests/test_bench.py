"""The benchmark programs.

Their model files hold the same weights in every format, and their tables are correct.
"""
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT

# Format: max ratio of the standard deviation of the logits' error to that of the logits
FORMS = {"f32": 0, "bf16": 0.02, "q8_0": 0.05, "q4_0": 0.5, "v0": 1e-6, "v2": 0.05}
PEER = """#!{python}
import json, sys
value = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if value["-m"].endswith("bf16.gguf"):
    sys.exit("this peer reads no bf16")
print(json.dumps([{{"n_prompt": int(value["-p"]), "n_gen": 0, "avg_ts": 0.5}},
                  {{"n_prompt": 0, "n_gen": int(value["-n"]), "avg_ts": {decode}}}]))
"""


def bench(program, *args):
    return subprocess.run([sys.executable, ROOT / "bench" / program, *args], capture_output=True,
                          text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    done = bench("models.py", "--shapes=260K", f"--formats={','.join(FORMS)}", f"--models={folder}")
    assert done.returncode == 0, done.stderr
    return folder


def logits(run_bin, path):
    tokenizer = ["-z", path.with_name("tokenizer.bin")] if path.suffix == ".bin" else []
    done = subprocess.run([run_bin, path, "--logits", "-i", " ".join("a" * 127), *tokenizer],
                          capture_output=True, check=True)
    return np.frombuffer(done.stdout, "f4").reshape(-1, 512)


def test_every_format_holds_the_same_weights(run_bin, models):
    expected = logits(run_bin, models / "260K" / "f32.gguf")
    assert expected.shape == (128, 512)  # <s> and 127 times ▁a, the prompt that run.py measures
    for form, bound in FORMS.items():
        path, = (models / "260K").glob(f"{form}.*")
        # other weights have a ratio of 1.4
        assert (logits(run_bin, path) - expected).std() <= bound * expected.std(), form


def test_unknown_shapes_are_one_line(tmp_path):
    done = bench("models.py", "--shapes=16M", f"--models={tmp_path}")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "16M" in done.stderr
    assert "15M" in done.stderr


@pytest.mark.slow
def test_a_table_beside_a_peer(run_bin, models, tmp_path):
    """Compare with fake peers of known speed.

    Ratios refer to the faster peer, results are kept, and a peer that fails is named.
    """
    for name, decode in ("slow", 1.0), ("fast", 2.0):
        (tmp_path / name).write_text(PEER.format(python=sys.executable, decode=decode))
        (tmp_path / name).chmod(0o755)
    results = tmp_path / "results.json"
    common = ["--shapes=260K", "--threads=2", "--samples=3", "--starts=1", f"--models={models}",
              f"--run={run_bin}", f"--results={results}", f"--llama_bench={tmp_path / 'slow'}"]
    done = bench("run.py", *common, "--formats=q8_0,v2", f"--ik_llama_bench={tmp_path / 'fast'}")
    assert done.returncode == 0, done.stderr
    found = json.loads(results.read_text())
    assert list(found) == ["260K q8_0 2", "260K v2 2"]
    programs = found["260K q8_0 2"]["programs"]
    assert list(programs) == ["llamac", "llama.cpp", "ik_llama.cpp"]
    assert list(found["260K v2 2"]["programs"]) == ["llamac"]
    ours = programs["llamac"]
    assert len(ours["samples"]["decode"]) == 3
    assert sorted(ours["samples"]["decode"])[1] == ours["decode"] > 0
    assert programs["ik_llama.cpp"]["decode"] == 2
    assert 0 < ours["first_1"] < 60000
    assert ours["peak"] > 0
    line = next(line for line in done.stdout.splitlines() if "llamac" in line)
    assert f"({ours['decode'] / 2:.2f}×)" in line and f"({ours['prompt'] / 0.5:.2f}×)" in line
    assert (bench("run.py", "--show=True", f"--results={results}").stdout.strip()
            == done.stdout.strip())
    done = bench("run.py", *common, "--formats=bf16")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "reads no bf16" in done.stderr


BATCHED_PEER = """#!{python}
import json, sys
value = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if value["-m"].endswith("bf16.gguf"):
    sys.exit(0)  # a version that prints no JSON
assert int(value["-c"]) >= int(value["-npl"]) * (2 * int(value["-ntg"])) and \
value["--output-format"] == "jsonl"
print("warming up", file=sys.stderr)
for length in map(int, value["-npp"].split(",")):
    print(json.dumps({{"pp": length, "tg": int(value["-ntg"]), "pl": int(value["-npl"]), \
"speed_pp": 4.0 * length, "speed_tg": 100.0 / length}}))
"""


def test_a_table_of_texts_at_once(run_bin, models, tmp_path):
    """Compare with a fake peer of known speed, which decodes faster after a prompt of one token."""
    (tmp_path / "peer").write_text(BATCHED_PEER.format(python=sys.executable))
    (tmp_path / "peer").chmod(0o755)
    results = tmp_path / "results.json"
    common = ["--shapes=260K", "--samples=1", "--threads=1", "--tokens=4", f"--models={models}",
              f"--run={run_bin}", f"--results={results}"]
    done = bench("batches.py", *common, "--formats=f32", "--texts=1,5",
                 f"--batched_bench={tmp_path / 'peer'}")
    assert done.returncode == 0, done.stderr
    found = json.loads(results.read_text())
    assert list(found) == ["260K f32 1 1", "260K f32 1 5"]
    for key, line in zip(found, done.stdout.splitlines()[2:], strict=True):
        ours, theirs = found[key]["programs"].values()
        assert (theirs["prompt"], theirs["decode"]) == (16, 100)
        assert ours["prompt"] > 0 < ours["decode"]
        cells = line.strip("| ").split(" | ")
        assert cells == [key, f"{ours['prompt']:,.0f}", "16", f"{ours['prompt'] / 16:.2f}",
                         f"{ours['decode']:,.0f}", "100", f"{ours['decode'] / 100:.2f}"]
    assert bench("batches.py", "--show=True", f"--results={results}").stdout == done.stdout
    alone = bench("batches.py", *common, "--formats=f32", "--texts=2")
    assert alone.returncode == 0
    assert "260K f32 1 2 | " in alone.stdout
    assert alone.stdout.count("–") == 4
    done = bench("batches.py", *common, "--formats=bf16", "--texts=1",
                 f"--batched_bench={tmp_path / 'peer'}")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "found those of none" in done.stderr


def test_a_table_of_guessed_texts(run_bin, models):
    done = bench("lookup.py", "--shapes=260K", "--formats=f32", "--threads=1", "--samples=1",
                 "--tokens=64", f"--models={models}", f"--run={run_bin}")
    assert done.returncode == 0, done.stderr
    for line, title in zip(done.stdout.splitlines()[2:], ("repeats", "does not"), strict=True):
        key, text, before, after, ratio, guesses, right = line.strip("| ").split(" | ")
        assert key == "260K f32 1" and text == title and int(right) <= int(guesses)
        assert float(ratio) > 0 < float(before.replace(",", ""))
        assert float(after.replace(",", "")) > 0


@pytest.mark.slow
def test_the_loss_is_that_of_plain_pytorch(tmp_path):
    """Run bench/same_loss.py for a few steps.

    These suffice: with other weights, the loss differs by a tenth at once.
    """
    done = bench("same_loss.py", "--data=stories:200", f"--cache={tmp_path / 'cache'}", "--steps=5",
                 "--seeds=1", "--dim=32", "--n_heads=1", "--batch_size=2", "--max_seq_len=32",
                 f"--json_file={tmp_path / 'curves.json'}")
    assert done.returncode == 0, done.stderr
    curves, = json.loads((tmp_path / "curves.json").read_text())
    plain = curves["transformers"]["train"]
    assert len(plain) == 5 and plain[-1] < plain[0]
    assert np.abs(np.subtract(curves["ours"]["train"], plain)).max() < 1e-4
    assert 0 < np.abs(np.subtract(curves["bfloat16"]["train"], plain)).max() < 2e-2


@pytest.fixture()
def runs(tmp_path):
    """Return the folders of three fake runs: two seeds of one width, and one run of another."""
    for name, dim, losses in (("a", 32, (3.0, 2.0)), ("b", 32, (3.1, 2.2)), ("c", 64, (2.9, 1.5))):
        (tmp_path / name).mkdir()
        config = {"dim": dim, "flops_per_token": 10 * dim, "model_args": {"hidden_dim": 3 * dim},
                  "hidden_dim": 0}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        rows = [{"iter": n, "tokens": 100 * n, "loss/val": loss, "time": 0.0}
                for n, loss in enumerate((7.0, *losses))]
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [tmp_path / name for name in "abc"]


@pytest.mark.parametrize("options", [["--over=flops", "--by=dim"], ["--over=tokens"],
                                     ["--over=dim"], ["--over=hidden_dim"]])
def test_curves_are_drawn(runs, tmp_path, options):
    done = bench("curves.py", *runs, f"--png={tmp_path / 'curves.png'}", *options)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_curves_of_an_unknown_setting_are_one_line(runs, tmp_path):
    done = bench("curves.py", *runs, "--by=width")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "width" in done.stderr


def test_the_plan_for_a_gpu():
    """The times of the steps add up, and steps beyond the time budget are marked.

    A real run skips those steps and exits with code 1.
    """
    done = bench("gpu.py", "--plan", "--seconds=100")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    rows = [(int(line[12:17]), int(line[19:25]), line[28] == "+") for line in lines]
    totals = np.cumsum([took for took, *_ in rows])
    assert [row[1:] for row in rows] == [(total, total > 100) for total in totals]
    assert len(rows) > 15 and last.startswith(f"all: {totals[-1]} s")


def test_the_time_of_a_token_on_a_gpu_is_foretold(monkeypatch):
    """The prediction agrees with the H200 measurements in doc/lab/gpu.md within 4%.

    size: bytes of weights read per token. measured: tokens/s.
    """
    from bench import gpu
    for shape, form, size, measured in (("1.1B", "bf16", 2.069e9, 1162),
                                        ("15M", "bf16", 30.4e6, 8248),
                                        ("15M", "f32", 60.8e6, 7650)):
        answer = {"decode_tokens_per_s": measured, "bytes_per_token": size,
                  "bandwidth_gb_per_s": 4600.0, "prompt_tokens_per_s": 1.0, "first_token_ms": 1.0,
                  "decode_gb_per_s": size * measured / 1e9}
        monkeypatch.setattr(gpu, "call", lambda *words, answer=answer: json.dumps(answer))
        found = gpu.speed(shape)[form]
        assert found["foretold_us"] == pytest.approx(found["token_us"], rel=0.04)


def test_variants_of_a_token_are_timed_in_turns(monkeypatch):
    """The results are checked before the variants are timed.

    Barriers that carry their data are predicted to save 4 of 7 trips to the L2 cache at 88 of 110
    barriers.
    """
    from bench import gpu
    calls = []

    def call(program, path, *words):
        calls.append((str(program), str(path)))
        if "cuda_ops" in program:
            return b"a shape\ntokens of 1 models in one kernel\n"
        speed = {"./runcuda": 1000.0}.get(program, 1250.0)
        return json.dumps({"decode_tokens_per_s": speed, "bytes_per_token": 2.069e9,
                           "bandwidth_gb_per_s": 4600.0})
    monkeypatch.setattr(gpu, "call", call)
    found = gpu.decode()
    assert calls[0][0] == "cache/bench/cuda_ops-both" and found["shapes"] == 1 and len(found) == 6
    of_bf16 = [program for program, path in calls if path.endswith("1.1B/bf16.gguf")]
    assert len(of_bf16) == 12
    assert of_bf16[:4] == of_bf16[4:8] == of_bf16[8:]
    assert len(set(of_bf16)) == 4
    row = found["1.1B bf16"]
    assert row["default"] == 1000 and row["carried"] == 800
    assert row["foretold"] - row["predicted carried"] == pytest.approx(
        0.24 * (4 * 88 + 2 * 22), abs=1)


@pytest.mark.slow
def test_the_peak_of_training_is_that_of_its_steps(tmp_path):
    """With a vocabulary of 16,000, each copy of the probe's logits takes 62 MiB.

    The bound is 1.25, because the gaps in the heap vary by a tenth.
    """
    (tmp_path / "wide.txt").write_text(4 * "".join(map(chr, range(0x4E00, 0x4E00 + 16_000))))
    # explicit sizes: otherwise each process chooses its own by the speed that it measures
    words = (f"--data={tmp_path / 'wide.txt'} --vocab_source=char --max_seq_len=256 --batch_size=8 "
             f"--cache={tmp_path / 'cache'} --dim=128 --n_layers=2 --n_heads=4")
    done = bench("memory.py", f"--only={words}", "--steps=2", "--wandb=False", "--most=1.25")
    assert done.returncode == 0 and done.stdout.count("\n") == 3, done.stdout + done.stderr
