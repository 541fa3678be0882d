"""The default prompt comes from the training text.

It is used for the samples of a training, in its last line, and by sample.py.
"""
import json
import os
import shutil

import pytest

import data
from engine.text import sample_prompts
from engine.training import run_folder
from tests import forked
from tests.test_train import ROOT

CHINESE = ("此开卷第一回也。作者自云：曾历过一番梦幻之后，故将真事隐去，"
           "而借通灵说此《石头记》一书也。\n\n")
CODE = ('"""Read a table."""\nimport csv\n\n\ndef read(path):\n    with open(path) as f:\n'
        '        return list(csv.reader(f))\n')


def prompt_of(folder, context=64, **options):
    return sample_prompts.choose(data.load(data.prepare(
        folder, cache=folder.parent / "cache", vocab_source="char", **options)), context)


def test_a_prompt_is_how_a_line_of_the_text_begins(tmp_path):
    texts = {
        "english": "The moon was up, and the sea was calm.\nIt was late.\n<|endoftext|>\n" * 30,
        "chinese": (CHINESE.strip() + "\n<|endoftext|>\n") * 30
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "code").mkdir()
    for n in range(30):
        (tmp_path / "code" / f"{n}.py").write_text(CODE)
    assert prompt_of(tmp_path / "english.txt") == "The moon was up"
    assert prompt_of(tmp_path / "chinese.txt") == "此开卷第一回也"
    assert prompt_of(tmp_path / "code") == "def read(path)"
    # A prompt fills at most half of the context, which matters in a tiny model
    assert prompt_of(tmp_path / "english.txt", context=8) == "The"
    assert prompt_of(tmp_path / "chinese.txt", context=8) == "此开卷"


def test_the_prompt_of_one_long_text_begins_a_paragraph(tmp_path):
    """The validation split is the end of the text, which may begin in the middle of a sentence."""
    (tmp_path / "novel.txt").write_text(CHINESE * 40)
    (tmp_path / "pi.txt").write_text("3.14159" + "26535897932384626433832795" * 300)
    (tmp_path / "table.txt").write_text("| a | b |\n" * 300)
    assert prompt_of(tmp_path / "novel.txt") == "此开卷第一回也"
    digits = prompt_of(tmp_path / "pi.txt")
    assert digits.isdecimal() and len(digits) == sample_prompts.MAX_WIDTH
    assert prompt_of(tmp_path / "table.txt") == ""  # "|" separates prompts


def test_what_does_not_look_like_the_text_is_passed_over(tmp_path):
    """Skip code and a licence that do not look like the text.

    They are at the start of each of many documents, or of the validation part of a single one.
    """
    first = "Copyright (c) 2020 The Authors. All rights reserved.\n" + CODE
    (tmp_path / "many.txt").write_text((first + CHINESE.strip() + "\n<|endoftext|>\n") * 30)
    (tmp_path / "one.txt").write_text(CHINESE * 9 + first + CHINESE)
    assert (prompt_of(tmp_path / "many.txt")
            == prompt_of(tmp_path / "one.txt", val_fraction=0.4) == "此开卷第一回也")


@pytest.mark.parametrize("prompts, known, chosen", [
    (["# Chapter 1", "It was late"], "# Chapter 1\nIt was late, and the moon was up.\n",
     "It was late"),
    (["1. 2. 3.", "It was late"], "It was 1 o'clock, and the moon was up.\n", "It was late"),
    (["第一章", "It was late"], "It was late, and the moon was up.\n", "It was late"),
    (["It was late", "def f(x)"], "def f(x):\n    return x + 1\n" * 9, "def f(x)"),
    (["x = [1, 2, 3]", "return x"], "# of 1\nx = [1, 2]\ny = x[0]\n" * 9, "x = [1, 2, 3]"),
    (["- one", "- two"], "It was late, and the moon was up.\n", "- one"), (["12"], "", "12")])
def test_a_typical_prompt_has_the_characters_of_the_text(prompts, known, chosen):
    assert sample_prompts.typical(prompts, known) == chosen


@pytest.mark.parametrize("line, prompt", [
    ("Once upon a time, there was a girl", "Once upon a time"),
    ("No. It was not he who came in at once", "No. It was not he who"),
    ("    return x", "return x"), ("def main():", "def main()"),
    ("import numpy as np", "import numpy as np"),
    ("= Valkyria Chronicles III =", "= Valkyria Chronicles"),
    ("吾輩は猫である。名前はまだ無い。", "吾輩は猫である"),
    ("滚滚长江东逝水浪花淘尽英雄是非成败转头空", "滚滚长江东逝水浪花淘尽英"),
    ("* * *", ""), ("", ""), ("a | b", ""), ("\x1b[31mred", ""),
    ("Donaudampfschifffahrtsgesellschaft", "Donaudampfschifffahrtsge")])
def test_a_beginning_ends_at_a_mark_or_between_words(line, prompt):
    assert sample_prompts.beginning(line) == prompt


def test_of_conversations_it_is_a_question_of_theirs(tmp_path):
    def chats(name, question, system=()):
        turns = [[*system, {"role": "user", "content": question},
                  {"role": "assistant", "content": f"{n}."}] for n in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("".join(
            json.dumps({"messages": each}) + "\n" for each in turns))
        return prompt_of(tmp_path / f"{name}.jsonl", context=128)

    assert chats("plain", "How many moons are there?") == "How many moons are there?"
    assert chats("long", "How many? " * 20) == chats(
        "system", "How?", [{"role": "system", "content": "Be brief."}]) == "Hello"


def test_a_training_on_chinese_continues_and_suggests_chinese(tmp_path):
    """Training and sample.py continue a Chinese text, with a vocabulary of characters.

    The prompt is in the settings of the run and of its checkpoints, which a resumed run reads.
    """
    (tmp_path / "novel.txt").write_text(CHINESE * 40)
    env = ({k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
           | {"OMP_NUM_THREADS": "1"})
    words = ["--data=novel.txt", "--minutes=0.02", "--dim=32", "--n_layers=1", "--device=cpu",
             "--checks=none", "--peak_tflops=0.1"]
    done = forked.run([ROOT / "train.py", *words], tmp_path, env)
    assert json.loads((tmp_path / "out/novel/config.json").read_text())["vocab_source"] == "char"
    assert "2.9 bytes, and the text is too short" in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(
        "./run out/novel/model.gguf -i '此开卷第一回也'\n"), done.stdout + done.stderr
    shown = forked.run([ROOT / "data.py", "novel.txt", "--show=True"], tmp_path, env)
    assert ("train.py --data=novel.txt` would prepare it: --vocab_source=char"
            in shown.stdout), shown.stderr
    assert "此|开|卷|第|一|回|也|。" in shown.stdout, shown.stderr
    # data.py found the text that the training prepared, instead of preparing it again
    assert len([*tmp_path.glob("cache/*/meta.json")]) == 1
    rows = [json.loads(line)
            for line in (tmp_path / "out/novel/log.jsonl").read_text().splitlines()]
    assert {prompt for row in rows for prompt, *_ in row.get("samples", [])} == {"此开卷第一回也"}
    for place in ".", "model.gguf", (
            tmp_path / "out/novel/latest").read_text().strip().join(("checkpoints/", "")):
        assert run_folder.sample_prompt(tmp_path / "out/novel" / place) == "此开卷第一回也", place
    for more, begins in ([], "此开卷第一回也"), (["--prompt="], ""):
        done = forked.run([ROOT / "sample.py", "out/novel", "--max_new_tokens=2", "--device=cpu",
                           *more], tmp_path, env)
        assert done.returncode == 0 and done.stdout.startswith(begins), done.stderr
        assert len(done.stdout.strip("\n")) <= len(begins) + 2, done.stderr
    shutil.copy(tmp_path / "out/novel/model.gguf", tmp_path)
    done = forked.run([ROOT / "sample.py", "model.gguf", "--attention=a.html", "--device=cpu"],
                      tmp_path, env)
    assert done.returncode == 2
    assert done.stderr.endswith(
        "--attention=a.html: model.gguf has no prompt of its own; give a --prompt\n")
