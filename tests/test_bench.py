"""What is measured with: model files that hold the same weights in every format."""
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT

FORMS = {"f32": 0, "bf16": 0.02, "q8_0": 0.05, "q4_0": 0.5, "v0": 1e-6, "v2": 0.05}  # error of the logits ÷ their spread


def bench(program, *args):
    return subprocess.run([sys.executable, ROOT / "bench" / program, *args], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    done = bench("models.py", "--shapes=260K", f"--formats={','.join(FORMS)}", f"--models={folder}")
    assert done.returncode == 0, done.stderr
    return folder


def logits(run_bin, path):
    tokenizer = ["-z", path.with_name("tokenizer.bin")] if path.suffix == ".bin" else []
    done = subprocess.run([run_bin, path, "--logits", "-i", " ".join("a" * 127), *tokenizer], capture_output=True, check=True)
    return np.frombuffer(done.stdout, "f4").reshape(-1, 512)


def test_every_format_holds_the_same_weights(run_bin, models):
    expected = logits(run_bin, models / "260K" / "f32.gguf")
    assert expected.shape == (128, 512)  # <s> and ▁a 127 times, the prompt that run.py measures
    for form, bound in FORMS.items():
        path, = (models / "260K").glob(f"{form}.*")
        assert (logits(run_bin, path) - expected).std() <= bound * expected.std(), form  # 1.4 with other weights


def test_unknown_shapes_are_one_line(tmp_path):
    done = bench("models.py", "--shapes=16M", f"--models={tmp_path}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "16M" in done.stderr and "15M" in done.stderr
