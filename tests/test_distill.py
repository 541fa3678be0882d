"""
Tests of --teacher. The loss is PyTorch's cross-entropy with the mean of the teachers'
probabilities, in a whole training, a resumed one and one in parts.
"""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.training import distill, validate
from model import ModelArgs
from tests.test_repeat import SMALL, run
from tests.test_train import folder, rows  # noqa: F401

WORDS = ["--data=my.txt", *SMALL, "--vocab_source=byte"]


def models(n, **changed):
    torch.manual_seed(5)
    args = ModelArgs(**dict(dim=32, n_layers=1, n_heads=2, vocab_size=50, max_seq_len=16) | changed)
    found = [args.build().eval() for _ in range(n)]
    for model in found:
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.3)  # so that predictions differ
    return found


def test_the_loss_and_its_gradient_are_those_of_soft_targets():
    student, *teachers = models(4)
    x, y = torch.randint(50, (2, 3, 16))
    y[0, 5:] = -1
    loss = distill.loss(student, distill.Teachers(teachers, None), x, y, None)
    loss.backward()
    found = [p.grad.clone() for p in student.parameters()]
    student.zero_grad()
    with torch.no_grad():
        soft = torch.stack([F.softmax(teacher(x, every=1)[0].double(), -1)
                            for teacher in teachers]).mean(0)
    logits = student(x, every=1)[0].double()
    by_hand = sum(F.cross_entropy(logits[b, t], soft[b, t]) for b in range(3) for t in range(16)
                  if y[b, t] >= 0) / (y >= 0).sum()
    by_hand.backward()
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-6)
    assert all(torch.allclose(a, p.grad, atol=1e-6) for a, p in zip(found, student.parameters()))
    assert all(p.grad is None for teacher in teachers for p in teacher.parameters())


def test_a_batch_without_targets_has_no_loss_and_no_gradient():
    student, teacher = models(2)
    x = torch.randint(50, (2, 16))
    loss = distill.loss(student, distill.Teachers([teacher], None), x, torch.full_like(x, -1), None)
    loss.backward()
    assert loss.item() == 0 and all(not p.grad.any() for p in student.parameters())


def test_of_one_teacher_that_knows_the_text_the_loss_is_the_usual_one():
    student, sure = models(2, tied=False)
    x = torch.randint(50, (2, 16))
    with torch.no_grad():
        y = sure(x, every=1)[0].argmax(-1)
        sure.output.weight.mul_(1e4)
    assert distill.loss(student, distill.Teachers([sure], None), x, y, None).item() == (
        pytest.approx(student(x, y)[1].item(), rel=1e-5))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder with a text of 4 kB, a run `first`, and runs of two seeds in `group`."""
    path = tmp_path_factory.mktemp("distill")
    draw = np.random.default_rng(3)
    words = "the a cat dog sat ran on under mat tree and then saw found".split()
    (path / "my.txt").write_text(" ".join(draw.choice(words, 900)))
    run(path, *WORDS, "--out_dir=first", "--seed=7")
    for seed in (1, 2):
        run(path, *WORDS, f"--out_dir=group/seed{seed}", f"--seed={seed}")
    return path


def test_a_run_with_teachers_goes_on_bit_for_bit_and_is_repeated(trained):
    words = [*WORDS, "--teacher=group, first", "--schedule=constant"]
    done = run(trained, *words, "--out_dir=whole")
    size = (trained / "my.txt").stat().st_size
    assert "teachers: 3 write" in done.stdout
    written, = (trained / "cache/written").iterdir()
    assert written.stat().st_size / 2 >= 8 * 0.89 * size
    before = written.read_bytes()
    run(trained, *words, "--out_dir=parts", "--max_iters=6")
    written.unlink()  # the same teachers write the same bytes again
    run(trained, *words, "--out_dir=parts")
    assert written.read_bytes() == before
    run(trained, "whole/config.json")
    last = [{name: rows(trained, out)[-1][name]
             for name in ("loss/train", "loss/val", "bpb/val", "grad/norm")}
            for out in ("whole", "parts", "whole-repeat")]
    assert last[0] == last[1] == last[2]
    # The evaluation leaves out what teachers write: it has as many tokens as without teachers.
    meta = json.loads((trained / "whole/config.json").read_text())["dataset"]
    assert 0 <= size - meta["train_bytes"] - meta["val_bytes"] <= 2  # the space between the splits
    done = run(trained, *WORDS, "--teacher=first", "--out_dir=whole", code=2)
    assert "teacher" in done.stderr


def test_a_run_that_ngrams_teach_goes_on_bit_for_bit_and_is_repeated(trained):
    words = [*WORDS, "--teacher=ngrams", "--schedule=constant"]
    done = run(trained, *words, "--out_dir=ngrams")
    assert "teachers: n-grams write 13,720 tokens" in done.stdout  # four per token of the text
    run(trained, *words, "--out_dir=ngrams-parts", "--max_iters=6")
    run(trained, *words, "--out_dir=ngrams-parts")
    run(trained, "ngrams/config.json")
    names = "loss/train", "loss/val", "bpb/val", "grad/norm"
    last = []
    for out in "ngrams", "ngrams-parts", "ngrams-repeat":
        row = rows(trained, out)[-1]
        last.append({name: row[name] for name in names})
    assert last[0] == last[1] == last[2]
    assert last[0]["loss/val"] != rows(trained, "first")[-1]["loss/val"]


def text(separator, window_bos):
    """Return a dataset with documents of 5 to 11 tokens: BOS 1, words from 3 on, EOS 2."""
    draw = np.random.default_rng(2)
    train = np.concatenate([[1, *draw.integers(3, 50, draw.integers(3, 10)), 2]
                            for _ in range(40)]).astype(np.uint16)
    return SimpleNamespace(train=train, separator=separator, window_bos=window_bos, seq_len=16,
                           tokenizer=SimpleNamespace(eos_id=2))


@pytest.mark.parametrize("separator, window_bos", [(1, None), (1, 1), (None, None)])
def test_teachers_continue_the_training_text(separator, window_bos):
    dataset, teacher = text(separator, window_bos), models(1)[0]
    starts = distill.prompts(dataset, torch.Generator().manual_seed(1), "cpu").tolist()
    stored = dataset.train.tolist()
    assert len(starts) == distill.ROWS
    assert all(any(stored[i:i + distill.PROMPT] == start for i in range(len(stored)))
               for start in starts)
    if separator and window_bos is None:
        assert all(start[0] == 1 for start in starts)  # the beginning of a document
    seen = []
    teacher.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].clone()))
    rows = distill.sample_texts(teacher, dataset, torch.Generator().manual_seed(1), "cpu").tolist()
    assert seen[0][:, 0].tolist() == [
        window_bos if window_bos is not None else start[0] for start in starts]
    # Each text is a prompt as it is in the training text, followed by the tokens drawn, up to EOS
    # or the end of the context.
    for start in starts:
        end = rows.index(2, 8) + 1 if 2 in rows[8:16] else 16
        own, rows = rows[:end], rows[end:]
        assert own[:distill.PROMPT] == start
    assert not rows


def test_what_a_teacher_writes_has_the_frequencies_that_it_predicts():
    teacher, dataset = models(1)[0], text(None, None)
    # This text has only one place where a prompt can begin.
    dataset.train = np.tile(
        np.arange(5, 5 + distill.PROMPT, dtype=np.uint16), 3)[:distill.PROMPT + 1]
    dataset.seq_len = distill.PROMPT + 1
    dice = torch.Generator().manual_seed(3)
    drawn = np.concatenate([
        distill.sample_texts(teacher, dataset, dice, "cpu").reshape(distill.ROWS, -1)[:, -1]
        for _ in range(40)])
    with torch.no_grad():
        expected = F.softmax(
            teacher(torch.arange(5, 5 + distill.PROMPT)[None])[0][0, 0], -1).numpy()
    found = np.bincount(drawn, minlength=50) / len(drawn)
    assert abs(found - expected).max() < 4 * np.sqrt(0.25 / len(drawn))


@pytest.mark.parametrize("words, said", [
    (["--teacher=nowhere"], "nowhere: holds no complete checkpoint"),
    (["--teacher=first", "--max_seq_len=64"],
     "--teacher=first: has a context of 32 tokens, expected 64; give --max_seq_len=32"),
    (["--teacher=first", "--vocab_source=char"],
     "--teacher=first: has another vocabulary than my.txt, expected the same"),
    (["--teacher=first", "--overfit=4"], "--overfit and --teacher: expected one of them"),
    (["--teacher=my.txt"], "my.txt"),
    (["--teacher=ngrams", "--overfit=4"], "--overfit and --teacher: expected one of them"),
    (["--teacher=,"], "--teacher=,: names no model; expected paths, separated by commas"),
])
def test_what_cannot_teach_is_refused(trained, words, said):
    done = run(trained, *WORDS, "--out_dir=refused", *words, code=2)
    assert said in done.stderr and "Traceback" not in done.stderr


def test_ngrams_teach_neither_a_large_vocabulary_nor_conversations(trained, tmp_path, capsys):
    meta = {"train_tokens": 900, "vocab_size": 32_000}
    with pytest.raises(SystemExit):
        config = SimpleNamespace(teacher="ngrams", data="my.txt", bigram_start=False,
                                 first_seq_len=0)
        validate.checked_args(config, ModelArgs(vocab_size=32_000), SimpleNamespace(meta=meta))
    said = capsys.readouterr().err
    assert "my.txt has 900 tokens of a vocabulary of 32,000; expected a text" in said
    with open(tmp_path / "chat.jsonl", "w") as f:
        for n in range(300):
            turns = [{"role": "user", "content": f"a cat {n}"},
                     {"role": "assistant", "content": f"a dog {n}"}]
            f.write(json.dumps({"messages": turns}) + "\n")
    words = ["--data=chat.jsonl", *SMALL, "--vocab_source=byte", "--teacher=ngrams"]
    done = run(tmp_path, *words, code=2)
    assert "expected a text, no conversations" in done.stderr and "Traceback" not in done.stderr


def test_the_vocabulary_is_the_teachers(trained):
    words = ["--data=my.txt", *SMALL, "--teacher=first/model.gguf", "--max_iters=2",
             "--out_dir=own"]
    done = run(trained, *words)
    assert "vocabulary 259" in done.stdout
