"""
run --lookup: the text equals that without --lookup, for many seeds, samplers and kinds of requests;
the guessed tokens, and the max time that they cost.
"""
import json
import random
import re
import subprocess

import pytest

from tests.conftest import compile_c
from tests.test_run import TEXT, Model, reciter, run
from tests.test_run_texts import LETTERS

LONGEST, MOST = 8, 8  # MAX_MATCH, MAX_GUESSES
REPEATING = "One two three one two three one two"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compile_c(tmp_path_factory.mktemp("lookup") / "lookup", "-O1", "tests/lookup.c")


def call(program, mode, lines):
    done = subprocess.run([program, mode], input="\n".join(lines) + "\n", capture_output=True,
                          text=True, check=True)
    return done.stdout.splitlines()


def guessed(text, most):
    """
    Guess `most` tokens by the definition: the tokens after the longest earlier match of the text's
    end. A match has at least two tokens; of equally long matches, the latest counts.
    """
    for length in range(min(LONGEST, len(text) - 1), 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length:end] == text[-length:]:
                whole = list(text)
                while len(whole) < end + len(text) + most:  # continue the text as at the match
                    whole.append(whole[len(whole) - (len(text) - end)])
                return whole[len(text):len(text) + most]
    return []


def test_the_tokens_that_are_guessed(program):
    rng, texts = random.Random(4), [[1], [1, 1], [1, 2, 1], [1, 2, 1, 2], [7] * 40]
    for _ in range(2000):
        text = [rng.randrange(rng.choice((2, 3, 9))) for _ in range(rng.randrange(1, 40))]
        begin = rng.randrange(len(text))
        texts.append(text + text[begin:begin + rng.randrange(20)])
    most = [rng.randrange(MOST + 1) for _ in texts]
    found = call(program, "guesses",
                 [f"{n} " + " ".join(map(str, text)) for n, text in zip(most, texts)])
    for n, text, line in zip(most, texts, found, strict=True):
        assert list(map(int, line.split())) == guessed(text, n), (n, text)
    assert sum(map(bool, found)) > 1000


def test_guesses_that_are_wrong_cost_little(program):
    """
    On simulated texts and machines, the time is at most the time without guesses divided by 0.97,
    whatever the load by other programs, and right guesses shorten it.
    """
    cases = [(seed, steps, repeats, slope, noise)
             for seed in range(3)
             for steps in (256, 3000)
             for repeats in (0, 0.1, 0.3, 0.5, 0.7, 0.9, 1)
             for slope in (0.02, 0.1, 0.3, 0.6)
             for noise in (0, 0.1, 0.5)]
    for case, line in zip(
            cases, call(program, "costs", [" ".join(map(str, case)) for case in cases]),
            strict=True):
        seconds, n, right = map(float, line.split())
        _, steps, repeats, slope, _ = case
        assert seconds <= steps / 0.97, (case, line)
        assert n >= 1 and (repeats == 1) == (n == right), (case, line)
        if repeats == 1:
            assert seconds < steps * (1 / (1 + MOST) + slope) + 16, (case, line)


def counts(binary, *args):
    """Run the C program with --lookup; return (stdout, number of right guesses, of all guesses)."""
    done = subprocess.run([binary, *map(str, args), "--lookup"], capture_output=True)
    right, n = re.search(
        rb"lookup: (\d+) of (\d+) guessed tokens were right\n", done.stderr).groups()
    return done.stdout, int(right), int(n)


def test_right_guesses_spare_calls(run_bin, tmp_path):
    """
    The call that evaluates the prompt yields c, and calls without guesses yield def. Then calls
    with 1, 2, 4, 8 and 8 guesses follow, the last of which ends at z.
    """
    path = reciter(tmp_path, LETTERS)
    prompt = "abcdefghijklmnopqrstuvwxyzab"
    said = counts(run_bin, path, "-t", 0, "-n", 0, "-i", prompt)
    assert said == (prompt.encode() + b"cdefghijklmnopqrstuvwxyz\n", 1 + 2 + 4 + 8 + 1,
                    1 + 2 + 4 + 8 + 8)
    # No guess exceeds the limit of -n, which leaves n tokens after the prompt.
    for n, right in ((1, 0), (4, 0), (5, 0), (6, 1), (7, 1), (8, 2), (9, 3), (10, 3)):
        assert counts(run_bin, path, "-t", 0, "-n", 28 + n, "-i", prompt)[1:] == (right, right), n
    assert counts(run_bin, path, "-t", 0, "-n", 0, "-i", "a")[1:] == (0, 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return model files, with long and short contexts, that repeat at low temperatures."""
    folder, found = tmp_path_factory.mktemp("models"), []
    for seq, form in ((256, "f32"), (256, "q8_0"), (24, "f32"), (5, "f32")):
        model = Model(seq=seq, heads=8, kv=2, tied=False, seed=3, hidden=192)
        likely = [2] + [3 + letter for letter in b"abcde tuv"]  # token 2 ends some texts early
        model.w["output"][[i for i in range(model.vocab) if i not in likely]] = 0
        model.write_gguf(folder / f"{seq}{form}.gguf", form)
        found.append(folder / f"{seq}{form}.gguf")
    return found


SETTINGS = [["-t", 0], ["-t", 0.3], ["-t", 0.6, "-k", 5], ["-t", 1, "-p", 0.5],
            ["-t", 0.5, "--repeat-penalty", 1.05],
            ["-t", 0, "--frequency-penalty", 0.1, "--presence-penalty", -0.5],
            ["-t", 0.4, "--min-p", 0.1, "--stop", "e", "--stop", "aa"], ["-t", 1.3],
            ["-t", 0.3, "-n", 117]]


@pytest.mark.parametrize("seeds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_the_text_is_the_same(run_bin, models, seeds):
    """Compare also sliding windows, limits of -n, and several texts at once."""
    right = n = 0
    for i, path in enumerate(models):
        for k, settings in enumerate(SETTINGS):
            for seed in range(1 + k, 1 + k + seeds):
                flags = ["-n", 180, "-i", (REPEATING, TEXT, "")[seed % 3], "-s", seed, *settings,
                         "--raw"]
                flags += ["-b", 3] * ((seed + k) % 3 == 0)
                said, more_right, more = counts(run_bin, path, *flags)
                assert said == run(run_bin, path, *flags), (i, flags)
                right, n = right + more_right, n + more
    # The number of guesses depends on the measured time of the calls.
    assert right > 100 and n - right > 50, (right, n)


def test_texts_of_lines_and_requests_are_the_same(run_bin, run_debug_bin, models, tmp_path):
    (tmp_path / "lines").write_text("\n".join([REPEATING, "", "a", TEXT, "b b b b", REPEATING[4:]]))
    for path in models[::2]:
        flags = ["--prompts", tmp_path / "lines", "-t", 0.4, "-n", 120, "-s", 3]
        for at_once in (1, 4):
            assert run(run_debug_bin, path, *flags, "-b", at_once, "--lookup") == run(
                run_bin, path, *flags), path
        requests = [{"id": i, "prompt": REPEATING[i:], "temperature": i % 3 / 4,
                     "max_tokens": 10 + 17 * i, "seed": 1 + i} for i in range(8)]
        lines = "\n".join(map(json.dumps, requests)).encode()
        said = [sorted(run(run_bin, path, "--jsonl", "-b", 3, *more, stdin=lines).splitlines())
                for more in ([], ["--lookup"])]
        assert said[0] == said[1] and len(said[0]) == 8


def test_chats_are_the_same(run_bin, models):
    for path in models[:3]:
        flags = ["-m", "chat", "-y", "", "-n", 40, "--template", "llama2", "-s", 4]
        for more in (["-t", 0], ["-t", 0.4], ["-t", 0.4, "--stop", "ab"]):
            asked = dict(stdin=b"one two one two\nand so on\nand so on\n")
            assert run(run_bin, path, *flags, *more, "--lookup", **asked) == run(
                run_bin, path, *flags, *more, **asked)


def test_a_prompt_is_kept_without_guesses(run_bin, models, tmp_path):
    """
    The file of --prompt-cache is the same with and without --lookup, if the whole prompt is
    evaluated and if only its last token is.
    """
    for more, name in (([], "plain"), (["--lookup"], "lookup")):
        flags = ["-t", 0, "-n", 200, *more, "--prompt-cache", tmp_path / name]
        for prompt in REPEATING, REPEATING + " ":
            text = run(run_bin, models[0], *flags, "-i", prompt)
            assert text == run(run_bin, models[0], "-t", 0, "-n", 200, "-i", prompt)
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "lookup").read_bytes()


def test_lookup_beside_another_task(run_bin, models):
    for task in (["--bench"], ["--tokenize"], ["--perplexity", "x"]):
        assert "--lookup" in run(run_bin, models[0], "--lookup", *task, status=1)
