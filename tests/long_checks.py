"""
The checks before the first step give no false alarms: they neither warn nor end a run.

They see 50 clean configurations, and texts of few letters with ten seeds each.
doc/lab/instruments.md has their cost.
"""
import random
from pathlib import Path

import pytest

from engine.debug import model_checks
from tests.test_preflight import KINDS, SHAPES, alarms, folder, start  # noqa: F401  (fixtures)

ROOT = Path(__file__).resolve().parents[1]
CHINESE = ("今天 天气 很好 我们 去 公园 散步 看见 一只 小猫 它 在 树下 睡觉 孩子 笑 了 老师 "
           "说 故事 从前 有 一个 国王 住 山上 河边 花 开 红色 大 鱼").split() + [" llamac "]
SOURCES = [(data, vocabulary) for data in ("stories:2000", "en.txt", "zh.txt")
           for vocabulary in ("custom", "byte", "char")]


def configurations(count=50):
    rng = random.Random(7)
    for number in range(count):
        heads = rng.choice((1, 2, 4, 6))
        optimizer = rng.choice(("muon", "adamw"))
        dim = heads * rng.choice((8, 16, 32)) if number else 384
        rate = 6e-3 * min(1, (64 / dim) ** 0.5) if optimizer == "muon" else 1e-3
        data, vocabulary = rng.choice(SOURCES)
        yield {
            "dim": dim, "n_layers": rng.choice((1, 2, 3, 6)), "n_heads": heads,
            "n_kv_heads": rng.choice((0, 1)), "max_seq_len": rng.choice((2, 7, 32, 64, 192, 256)),
            "batch_size": rng.choice((1, 3, 6, 16)),
            "gradient_accumulation_steps": rng.choice((1, 1, 2, 5)),
            "dropout": rng.choice((0.0, 0.0, 0.1, 0.3)), "tie_embeddings": rng.random() < 0.7,
            "dtype": rng.choice(("float32", "bfloat16")), "optimizer": optimizer,
            "learning_rate": rate * rng.choice((0.1, 0.3, 1, 2)),
            "document_mask": rng.random() < 0.7, "rope_theta": rng.choice((1e4, 5e5)),
            "activation_checkpointing": rng.random() < 0.2,
            "weight_decay": rng.choice((0.0, 0.1)), "seed": rng.randrange(1000), "data": data,
            "vocab_source": vocabulary
        }


def test_no_false_alarm_in_50_clean_configurations(
        folder, start, run_bin, monkeypatch):  # noqa: F811
    monkeypatch.setattr(model_checks, "PROGRAM", Path(run_bin))
    (folder / "en.txt").write_text(
        "\n".join(page.read_text() for page in sorted(ROOT.glob("doc/**/*.md"))))
    rng = random.Random(2)
    words = (rng.choice(CHINESE) + "，。"[rng.random() < 0.3] * (rng.random() < 0.3)
             for _ in range(40_000))
    (folder / "zh.txt").write_text("".join(words))
    alarms, lines = [], []
    for number, given in enumerate(configurations()):
        done = start(**given)
        line = [line for line in done.out.splitlines() if line.startswith("checks:")]
        lines.append(f"{number:2} {' '.join(line)}: {' '.join(map(str, given.values()))}")
        if done.code or "warning: check" in done.out or not line:
            alarms.append((number, [line for line in done.all.splitlines() if "check " in line]))
    print(*lines, sep="\n")
    assert not alarms, alarms


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 20, 64, 150, 297])
def test_no_false_alarm_of_texts_of_few_letters(
        kind, count, folder, start, run_bin, monkeypatch):  # noqa: F811
    """
    Try vocabularies of 4 to 300 pieces with ten seeds each.

    Each seed has another shape of the model, with letters and with bytes.
    """
    monkeypatch.setattr(model_checks, "PROGRAM", Path(run_bin))
    found = []
    for seed in range(10):
        for vocabulary in ("char", "byte"):
            shape = SHAPES[(seed + (vocabulary == "byte") + count) % len(SHAPES)]
            found += alarms(start, folder, kind, count, vocab_source=vocabulary, seed=seed, **shape)
    assert not found, found
