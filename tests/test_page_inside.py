"""Test "Look inside" against plain formulas, and the file of sample.py with hostile texts."""
import base64
import functools
import json
import math
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import evaluate
import optim
import sample
from engine.debug import inside
from engine.text import vocabulary
from engine.training import hardware, resume, validate
from engine.training.load import load_model
from export import export_model
from model import ModelArgs, Transformer
from page.command import choices
from page.inside import Inside
from tests.conftest import ROOT
from tokenizer import Bytes

HOSTILE = ("</script><script>document.title='owned'</script>"
           "<img src=x onerror=\"document.title='owned'\"> <!-- é")


@pytest.fixture(scope="module")
def made():
    torch.manual_seed(0)
    model = Transformer(
        ModelArgs(dim=24, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=259, max_seq_len=160,
                  tied=False)).eval()
    for p in model.parameters():
        p.data *= 6 if p.dim() == 2 else 1  # so that attention is uneven
    return model, Bytes()


@pytest.fixture(scope="module")
def path(made, tmp_path_factory):
    model, vocabulary = made
    path = tmp_path_factory.mktemp("run") / "model.gguf"
    export_model(model.state_dict(), model.args, vocabulary, path)
    return path


def test_the_menus_of_the_form_have_the_trainer_s_own_choices():
    found = choices()
    assert found["optimizer"] == list(optim.OPTIMIZERS)
    assert found["schedule"] == list(validate.CHOICES["schedule"])
    assert found["dtype"] == list(hardware.DTYPES) and found["init_from"] == list(resume.STARTS)
    assert found["vocab_source"] == list(vocabulary.MADE)
    assert all(map(vocabulary.is_made, vocabulary.MADE))


def test_attention_and_lens_equal_plain_formulas(made):
    """Compute heads by explicit rotations and sums; the last layer's lens equals the logits."""
    model, vocabulary = made
    ids, a = vocabulary.encode("One day, Tom", bos=True), model.args
    found, T = inside.record(model, ids), len(vocabulary.encode("One day, Tom", bos=True))
    assert found["attention"].shape == (3, 4, T, T)
    assert found["q"].shape == (3, 4, T, 6)
    assert found["k"].shape == (3, 2, T, 6)
    assert torch.allclose(found["attention"].sum(-1), torch.ones(3, 4, T), atol=1e-6)
    assert not found["attention"].triu(1).any()
    turned = lambda x, t: np.concatenate([
        (x[2 * i] + 1j * x[2 * i + 1]) * np.exp(1j * t * 10000 ** (-2 * i / 6))
        for i in range(3)], axis=None)
    with torch.no_grad():
        x = model.tok_embeddings(torch.tensor(ids))
        for n, layer in enumerate(model.layers):
            assert torch.allclose(found["residual"][n], x, atol=1e-4)
            y = (x * (x.square().mean(-1, keepdim=True) + a.norm_eps).rsqrt()
                 * layer.attention_norm.weight)
            q, k, v = (y @ w.weight.T
                       for w in (layer.attention.wq, layer.attention.wk, layer.attention.wv))
            heads = []
            for head in range(4):
                mine, theirs = (slice(6 * head, 6 * head + 6),
                                slice(6 * (head // 2), 6 * (head // 2) + 6))
                weights = np.zeros((T, T))
                for i in range(T):
                    scores = [(turned(q[i, mine].numpy(), i).conj()
                               * turned(k[j, theirs].numpy(), j)).real.sum() / math.sqrt(6)
                              for j in range(i + 1)]
                    weights[i, :i + 1] = (np.exp(np.array(scores) - max(scores))
                                          / np.exp(np.array(scores) - max(scores)).sum())
                assert np.allclose(found["attention"][n, head], weights, atol=1e-4)
                heads.append(torch.tensor(weights, dtype=torch.float32) @ v[:, theirs])
            x = x + torch.cat(heads, -1) @ layer.attention.wo.weight.T
            x = x + layer.feed_forward(layer.ffn_norm(x))
        *_, last = inside.logit_lens(model, found["residual"])
        assert torch.allclose(last, found["logits"], atol=1e-4)
        assert torch.equal(found["logits"], model(torch.tensor([ids]), every=True)[0][0])
        assert not any(module._forward_hooks for module in model.modules())


def test_description(made):
    """Probabilities, likeliest tokens, neighbours and histograms equal recomputed ones."""
    model, vocabulary = made
    data = json.loads(json.dumps(inside.describe(model, vocabulary, "One day"), allow_nan=False))
    ids = vocabulary.encode("One day", bos=True)
    assert data["ids"] == ids and data["tokens"] == ["<s>", *"One day"] and data["cut"] == 0
    nll = -sum(math.log(said["p"]) for said in data["predictions"][:-1])
    assert abs(nll - evaluate.negative_log_likelihood(model, ids)) < 1e-2 * len(ids)
    p = model(torch.tensor([ids]), every=True)[0][0].softmax(-1)
    for row, said, lens in zip(p, data["predictions"], data["lens"][-1]):
        assert ([q for _, q in said["rivals"]]
                == pytest.approx(row.topk(3).values.tolist(), abs=2e-5))
        assert said == lens
    assert "p" not in data["predictions"][-1] and len(data["lens"]) == 4
    near = torch.cosine_similarity(model.tok_embeddings.weight[ids[3]][None],
                                   model.tok_embeddings.weight)
    near[ids[3]] = -1
    assert ([c for _, c in data["neighbours"][3]]
            == pytest.approx(near.topk(8).values.tolist(), abs=1e-4))
    assert {w["name"] for w in data["weights"]} == {name for name, _ in model.named_parameters()}
    assert all(sum(w["counts"]) == math.prod(w["shape"]) for w in data["weights"])
    attention = np.frombuffer(
        base64.b64decode(data["attention"]["data"]), "<f4").reshape(data["attention"]["shape"])
    assert np.array_equal(attention, inside.record(model, ids)["attention"].numpy())
    assert inside.describe(model, vocabulary, "x" * 500)["cut"] == 501 - 160


def test_sample_writes_one_file_in_which_texts_are_no_script(made, path, tmp_path, monkeypatch,
                                                             capsys):
    file = tmp_path / "look.html"
    done = subprocess.run(
        [sys.executable, "sample.py", path, f"--prompt={HOSTILE}", f"--attention={file}"],
        capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout == f"wrote {file}\n", done.stderr
    text = file.read_text()
    assert text.count("<script") == text.count("</script") == 2
    assert "src=" not in text.replace(json.dumps(HOSTILE), "")
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert "".join(data["tokens"][1:]).replace("<0xC3><0xA9>", "é") == HOSTILE
    write = functools.partial(sample.write_attention, *made, "a")
    again = shutil.copy(file, tmp_path / "again.html")
    monkeypatch.setattr(sample, "attention", str(again))
    write()  # over a page that it has written
    assert again.read_text() != text
    (tmp_path / "mine.html").write_text("<!doctype html><title>mine</title>")
    for refuse, attention, prompt, said in (
            (write, f"{tmp_path}/no/x.html", "a", "cannot be written"),
            (write, f"{tmp_path}/mine.html", "a", "exists and was not written by sample.py"),
            (sample.check_settings, f"{tmp_path}/x.txt", "a", ".html"),
            (sample.check_settings, f"{tmp_path}/y.html", "", "a --prompt to look at")):
        monkeypatch.setattr(sample, "attention", attention)
        monkeypatch.setattr(sample, "prompt", prompt)
        with pytest.raises(SystemExit) as e:
            refuse()
        assert e.value.code == 2 and said in capsys.readouterr().err
    chromium = shutil.which("chromium") or pytest.skip(
        "no chromium: how a browser reads the file is not tried")
    seen = subprocess.run([
        chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/c",
        "--dump-dom", file.as_uri()
    ], capture_output=True, text=True, timeout=60)
    dom = seen.stdout
    assert dom.count('role="tab"') == 7
    assert "<title>Look inside</title>" in dom
    assert dom.count("<canvas") == 12
    assert "<img" not in dom.replace("\\u003cimg", "")


def test_the_page_looks_inside_in_another_process(path, made, tmp_path):
    broken = tmp_path / "model.gguf"
    broken.write_bytes(path.read_bytes()[:5000])
    folders = {"good": path.parent, "broken": tmp_path}
    prompts = {"good": "One day|Two", "broken": "auto"}
    runs = SimpleNamespace(refresh=lambda: None, runs={
        name: SimpleNamespace(folder=folder, config={"sample_prompt": prompts[name]})
        for name, folder in folders.items()})
    pages = Inside(runs)
    assert pages.list(None) == {"models": ["good", "broken"], "prompts": {"good": "One day"}}

    def asked(**body):
        return SimpleNamespace(json=lambda: body, gone=lambda: False)
    found = json.loads(pages.look(asked(model="good", text="\ud800 One")).content)
    assert found["name"] == "good" and found["tokens"][1:] == list("? One")
    model, vocabulary = load_model(path, "", "cpu")
    assert found["predictions"] == inside.describe(model, vocabulary, "? One")["predictions"]
    for body, said in (({"model": "broken", "text": "a"}, "model.gguf"),
                       ({"model": "x", "text": "a"}, "there is no model"),
                       ({"model": ["good"], "text": "a"}, "there is no model"),
                       ({"model": "good", "text": "a" * 30000}, "at most"),
                       ({"model": "good"}, "expected a text")):
        with pytest.raises(ValueError, match=said) as e:
            pages.look(asked(**body))
        assert "\n" not in str(e.value)
    assert "torch" not in subprocess.run(
        [sys.executable, "-c", "import sys, page.inside, page.talk; print(*sys.modules)"], cwd=ROOT,
        capture_output=True, text=True, check=True).stdout.split()
