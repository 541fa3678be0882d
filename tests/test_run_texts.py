"""run's samplers, stop strings and batches, against transformers and against runs of one text."""
import json
import random
import re
import shlex
import subprocess
from collections import Counter

import pytest
import torch

from tests.test_chat import CHATML
from tests.test_run import TEXT, Model, ids_of, reciter, run

QWEN = ("{% if messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\\nYou are Qwen<|im_end|>\\n' }}{% endif %}") + CHATML
LETTERS = [(b"%c" % c, 1) for c in range(97, 123)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return (path, Model) of a model that never samples <unk>, BOS or EOS."""
    folder = tmp_path_factory.mktemp("model")
    model = Model(heads=8, kv=2, tied=False, seed=3)
    model.w["output"][:3] = 0
    model.write_gguf(folder / "m.gguf")
    return folder / "m.gguf", model


# ---- samplers

@pytest.fixture
def one_thread():
    """On a busy machine, torch's threads wait for each other longer than a small model computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_penalties_by_the_greedy_text_of_transformers(run_bin, model, one_thread):
    """Penalties apply to the last 64 tokens, including those of the prompt."""
    path, source = model
    for repeat, frequency, presence in ((1.1, 0.5, 0.25), (0.7, 0, -1)):
        oracle, ids = source.oracle(), ids_of("Hello there")
        while len(ids) < 90:
            with torch.no_grad():
                x = oracle(torch.tensor([ids])).logits[0, -1].double()
            for token, count in Counter(ids[-64:]).items():
                x[token] = x[token] / repeat if x[token] > 0 else x[token] * repeat
                x[token] -= count * frequency + presence
            ids.append(int(x.argmax()))
        shown = b"".join(
            source.pieces[0][0] if i == 0 else bytes([i - 3]) if i < 259 else source.pieces[i][0]
            for i in ids[1:])
        assert run(run_bin, path, "-t", 0, "-n", 89, "-i", "Hello there", "--raw",
                   "--repeat-penalty", repeat, "--frequency-penalty", frequency,
                   "--presence-penalty", presence) == shown + b"\n", (repeat, frequency, presence)


def test_one_candidate_is_the_most_likely_token(run_bin, model):
    greedy = run(run_bin, model[0], "-t", 0, "-n", 80)
    for flags in (["-k", 1], ["--min-p", 1], ["-k", 5, "--min-p", 1, "-p", 0.5], ["-p", "1e-9"]):
        assert run(run_bin, model[0], "-t", 1, "-s", 4, "-n", 80, *flags) == greedy
    assert run(run_bin, model[0], "-t", 1, "-s", 4, "-n", 80, "-k", 50) != greedy
    plain = run(run_bin, model[0], "-s", 4, "-n", 80)
    assert run(run_bin, model[0], "-s", 4, "-n", 80, "-k", 0, "--min-p", 0,
               "--repeat-penalty", 1) == plain


# ---- where a text ends, and what it continues

def test_stop_strings(run_bin, tmp_path):
    """
    The text ends before the string, whatever tokens the string is divided into. A stop string in
    the prompt ends nothing.
    """
    path = reciter(tmp_path, [(b"ab", 1), (b"cd", 1), ("é".encode(), 1), *LETTERS[4:8], (b" x", 1)])
    for stops, text in ((["cd"], "ab"), (["bc"], "a"), (["d"], "abc"), (["abc"], ""),
                        (["éef"], "abcd"), (["zz"], "abcdéefgh x"), (["gx", "h "], "abcdéefg"),
                        (["efgh x!", "h"], "abcdéefg"), ([" xy"], "abcdéefgh x")):
        flags = [flag for stop in stops for flag in ("--stop", stop)]
        assert run(run_bin, path, "-t", 0, "-n", 0, *flags).decode() == text + "\n", stops
    assert run(run_bin, path, "-t", 0, "-n", 0, "-i", "ab",
               "--stop", "ab").decode() == "abcdéefgh x\n"
    assert "given 16 times" in run(run_bin, path, *["--stop=x"] * 16, status=1)
    assert "is empty" in run(run_bin, path, "--stop", "", status=1)


def test_a_stop_string_ends_an_answer_and_not_the_chat(run_bin, tmp_path):
    path = reciter(tmp_path, LETTERS, seq=256)
    asked = dict(stdin=b"a\nf\n")
    flags = ["-m", "chat", "-y", "", "-t", 0, "-n", 9, "--template", "llama2"]
    answers = run(run_bin, path, *flags, "--stop", "de", **asked).decode()
    assert answers.count("Assistant: ") == 2 and "de" not in answers.replace("User: ", "")


def test_a_prompt_from_stdin(run_bin, model):
    said = run(run_bin, model[0], "-t", 0, "-n", 60, "-i", "Hello, Zaun")
    assert run(run_bin, model[0], "-t", 0, "-n", 60, "-i", "-", stdin=b"Hello, Zaun") == said
    assert run(run_bin, model[0], "-t", 0, "-n", 60, "-f", "-", stdin=b"Hello, Zaun") == said


def test_the_folder_of_a_run(run_bin, tmp_path):
    Model().write_gguf(tmp_path / "model.gguf")
    assert run(run_bin, tmp_path, "-t", 0, "-n", 20) == run(
        run_bin, tmp_path / "model.gguf", "-t", 0, "-n", 20)
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path}/empty/model.gguf: no such file" in run(
        run_bin, tmp_path / "empty", status=1)


def test_help_is_one_screen_and_version_names_the_machine(run_bin):
    lines = run(run_bin, "--help").decode().splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 100
    version = run(run_bin, "--version").decode()
    assert re.fullmatch(r"llamac, library version \d+\ninstruction set: \w+\ndevices: [a-z, ]+\n",
                        version)


# ---- batches of texts

def singles(run_bin, path, seeds, *flags):
    return b"---\n".join(run(run_bin, path, "-s", seed, *flags) for seed in seeds)


@pytest.mark.parametrize("form", ["f32", "q8_0"])
def test_texts_at_once_equal_single_texts(run_bin, tmp_path, form):
    """
    This also holds for contexts that slide, and for prompts of one token or longer than the
    context.
    """
    for seq in 128, 24:
        source = Model(seq=seq, heads=8, kv=2, tied=False, seed=3, hidden=192)
        source.w["output"][:2] = 0  # some texts end early
        source.write_gguf(tmp_path / "m.gguf", form)
        for prompt, more in ((TEXT[:20], []), ("", ["-k", 20, "--min-p", 0.01]),
                             (TEXT, ["--repeat-penalty", 1.2]), ("x", ["--stop", "e"])):
            flags = ["-i", prompt, "-n", 110, "-t", 1.2, *more]
            expected = singles(run_bin, tmp_path / "m.gguf", range(7, 10), *flags)
            assert run(run_bin, tmp_path / "m.gguf", "-s", 7, "-b", 3, *flags) == expected, (
                seq, prompt, more)


def test_lines_of_a_file_equal_single_prompts(run_bin, model, tmp_path):
    """
    The file has more lines than the batch size, of many lengths, an empty line, a line longer than
    -n, and both kinds of line end.
    """
    path, _ = model
    lines = ["Hello", "", TEXT, "a", "é日", TEXT[:50], "b" * 300, "The end", "x y", "z"]
    (tmp_path / "lines").write_bytes("\n".join(lines).encode())
    for flags in (["-s", 5, "-n", 100], ["-t", 0, "-n", 20]):
        expected = b"---\n".join(run(run_bin, path, "-i", line, *flags) for line in lines)
        for at_once in ([], ["-b", 1], ["-b", 3]):
            assert run(run_bin, path, "--prompts", tmp_path / "lines", *at_once, *flags) == expected
    (tmp_path / "lines").write_bytes(b"a\r\nb\n")
    assert run(run_bin, path, "--prompts", tmp_path / "lines",
               "-t", 0, "-n", 9).count(b"\n---\n") == 1


def test_options_that_exclude_each_other(run_bin, model, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    for flags, named in (
            (["-b", 2, "-m", "chat"], "-b"), (["-b", 2, "--logits"], "-b"), (["-b", 0], "-b"),
            (["-b", 5000], "-b"), (["--prompts", "x", "-i", "y"], "-i"),
            (["--prompts", "x", "--tokenize"], "--prompts"),
            (["--jsonl", "--prompts", "x"], "--jsonl"), (["--jsonl", "-m", "chat"], "--jsonl"),
            (["--prompts", tmp_path / "none"], "none"),
            (["--prompts", tmp_path / "empty"], "no lines"), (["-k", -1], "-k"),
            (["-k", 1.5], "-k"), (["--min-p", 2], "--min-p"), (["--repeat-penalty", 101], "100"),
            (["--presence-penalty", "nan"], "--presence-penalty")):
        assert named in run(run_bin, model[0], *flags, status=1), flags


def test_texts_at_once_report_their_speed(run_bin, model):
    p = subprocess.run([run_bin, model[0], "-b", "3", "-n", "20", "-i", "ab", "-t", "0"],
                       capture_output=True, text=True)
    assert re.fullmatch(r"3 texts: \d+ tokens evaluated, tok/s: [\d.]+\n", p.stderr)
    assert p.stdout.count("---\n") == 2


def test_the_speed_of_texts_at_once_counts_the_time_of_their_prompt(run_bin, tmp_path):
    """n texts that each add one token to a prompt take at least about as long as the prompt."""
    Model(seq=1024, heads=8, kv=2, hidden=192).write_gguf(tmp_path / "m.gguf")

    def time_of(*flags):
        p = subprocess.run(
            [run_bin, tmp_path / "m.gguf", "-j", "1", "-i", "x" * 900, "-n", "901", *flags],
            capture_output=True, text=True)
        tokens, speed = re.search(r"(\d+) tokens evaluated, tok/s: ([\d.]+)", p.stderr).groups()
        return int(tokens) / float(speed)

    assert max(time_of("-b", "2") for _ in range(3)) > 0.5 * min(time_of() for _ in range(3))


# ---- requests

def answers(binary, path, requests, *flags):
    """
    Return the answers in the order of their arrival. A request is an object, or a line of bytes
    that is sent unchanged.
    """
    lines = [r if isinstance(r, bytes) else
             json.dumps(r, ensure_ascii=len(requests) % 2 == 0).encode() for r in requests]
    return [json.loads(line) for line in
            run(binary, path, "--jsonl", *flags, stdin=b"\n".join(lines)).splitlines()]


def test_answers_equal_single_texts(run_debug_bin, run_bin, model):
    """Each request has its own settings, and there are more requests than are answered at once."""
    path, _ = model
    requests, expected = [], {}
    for i, (prompt, more) in enumerate(
        (("Hello", {}), ("é日 \"x\"\n\t", {"temperature": 0}), (TEXT, {"top_p": 0.4}),
         ("", {"top_k": 9}), ("a", {"min_p": 0.05, "temperature": 0.7}),
         ("b\u00a0", {"repeat_penalty": 1.3, "seed": 77}), ("c", {"stop": "e"}),
         ("d", {"stop": ["q", "aa"], "presence_penalty": 0.5}),
         ("e", {"frequency_penalty": 0.5, "top_p": 1, "stop": None}))):
        count, seed = 10 + 9 * (i % 4), more.get("seed", 5)
        flags = {
            "temperature": "-t", "top_p": "-p", "top_k": "-k", "min_p": "--min-p",
            "repeat_penalty": "--repeat-penalty", "presence_penalty": "--presence-penalty",
            "frequency_penalty": "--frequency-penalty"
        }
        given = [flag for name, value in more.items() if name in flags
                 for flag in (flags[name], value)]
        stops = [more["stop"]] if isinstance(more.get("stop"), str) else more.get("stop") or []
        given += [flag for stop in stops for flag in ("--stop", stop)]
        text = run(run_bin, path, "-s", seed, "-n", len(ids_of(prompt)) - 1 + count,
                   "-i", prompt, *given).decode()
        requests.append({"id": i, "prompt": prompt, "max_tokens": count} | more)
        expected[i] = text[:-1]
    for at_once in (1, 3, 16):
        found = answers(run_debug_bin, path, requests, "-s", 5, "-b", at_once)
        assert {a["id"] for a in found} == set(expected)
        for answer in found:
            asked = requests[answer["id"]]
            visible = "".join(c for c in answer["text"]
                              if c in "\n\t" or not (c < " " or "\x7f" <= c < "\xa0"))
            assert asked["prompt"] + visible == expected[answer["id"]], (at_once, asked)
            assert answer["prompt_tokens"] == len(ids_of(asked["prompt"]))
            assert answer["tokens"] <= asked["max_tokens"]
            if answer["tokens"] < asked["max_tokens"]:
                assert answer["finish_reason"] == "stop"
            elif not asked.get("stop"):
                assert answer["finish_reason"] == "length"


def test_messages_are_the_turns_of_a_chat(run_bin, tmp_path):
    path = tmp_path / "m.gguf"
    Model(seq=256).write_gguf(path)
    chat = ["-m", "chat", "--template", "llama2", "-t", 0, "-n", 20]
    said = run(run_bin, path, *chat, "-y", "Be brief",
               stdin=b"Hi\n").decode().split("Assistant: ")[1].split("\nUser: ")[0]
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    ask = {"max_tokens": 20, "temperature": 0}
    found, = answers(run_bin, path, [ask | {"messages": messages}], "--template", "llama2")
    assert found["id"] is None
    assert "".join(c for c in found["text"]
                   if c in "\n\t" or not (c < " " or "\x7f" <= c < "\xa0")) == said
    longer = [*messages, {"role": "assistant", "content": "Yes"},
              {"role": "user", "content": "More"}]
    found, = answers(run_bin, path, [ask | {"messages": longer}], "--template", "llama2")
    assert found["tokens"] and found["prompt_tokens"] > 60
    found, = answers(run_bin, path, [ask | {"messages": messages}])  # the file has no template
    assert "template" in found["error"]


def test_messages_without_a_system_prompt_use_that_of_the_template(run_bin, tmp_path):
    path = tmp_path / "m.gguf"
    Model(seq=256).write_gguf(path, template=QWEN)
    counts = []
    for system, flags in ((None, []), ("", ["-y", ""]), ("Be brief", ["-y", "Be brief"])):
        messages = [{"role": "system", "content": system}] * (system is not None) + [
            {"role": "user", "content": "Hi"}]
        found, = answers(run_bin, path, [{"messages": messages, "max_tokens": 1}])
        tokens = run(run_bin, path, "--tokenize", "-m", "chat", "-i", "Hi", *flags).split()
        assert found["prompt_tokens"] == len(tokens), system
        counts.append(len(tokens))
    assert counts[0] > counts[2] > counts[1]


def test_an_empty_array_of_stop_strings_replaces_those_of_the_command_line(run_bin, tmp_path):
    path, ask = reciter(tmp_path, LETTERS), {"prompt": "a", "temperature": 0, "max_tokens": 9}
    stops = [{}, {"stop": None}, {"stop": []}, {"stop": "g"}]
    found = answers(run_bin, path, [ask | {"id": i} | stop for i, stop in enumerate(stops)],
                    "--stop", "d")
    texts = {a["id"]: a["text"] for a in found}
    assert texts == {0: "bc", 1: "bc", 2: "bcdefghij", 3: "bcdef"}


def test_requests_that_are_refused_by_name(run_debug_bin, model):
    message = {"role": "user", "content": "x"}
    for request, named in (
            ({"prompt": "a", "foo": 1}, "unknown field 'foo'"), ({}, "an empty object"),
            ({"id": 1}, "either prompt or messages"),
            ({"prompt": "a", "messages": [message]}, "either prompt or messages"),
            ({"prompt": 3}, "expected a string"), ({"prompt": "a", "top_k": -1}, "top_k is -1"),
            ({"prompt": "a", "top_k": 1.5}, "top_k is 1.5"),
            ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
            ({"prompt": "a", "temperature": "1"}, "expected a number"),
            ({"prompt": "a", "top_p": 1e999}, "expected a number"),
            ({"prompt": "a", "stop": [""]}, "is empty"),
            ({"prompt": "a", "stop": ["\0"]}, "zero byte"),
            ({"prompt": "a", "prompt\0": "b"}, "zero byte"),
            ({"messages": [message | {"role": "user\0"}]}, "zero byte"),
            ({"messages": [message | {"content\0": "x"}]}, "zero byte"),
            ({"messages": [{"role": "system", "content": "a\0b"}, message]}, "zero byte"),
            (b'{"prompt": "a"} \0 x', "text after"),
            ({"prompt": "a", "stop": ["x"] * 17}, "more than 16"),
            ({"prompt": "a", "id": [1]}, "expected a number"), ({"messages": []}, "expected {"),
            ({"messages": [{"role": "tool", "content": "x"}]}, "'tool'"),
            ({"messages": [{"role": "user"}]}, "no content"),
            ({"messages": [message, message]}, "expected the assistant"),
            ({"messages": [message | {"name": "x"}]}, "'name'"),
            ({"messages": [message, {"role": "assistant", "content": "x"}]}, "not from the user"),
            ({"messages": [message, {"role": "system", "content": "x"}]}, "is not the first"),
            (b'{"prompt": "a"} x', "text after"), (b'{"prompt": "a", "prompt": "b"}', "twice"),
            (b'{"prompt": "a\x01"}', "control"), (b'{"prompt": "\\x"}', "escape"),
            (b'{"prompt": "a', "no closing quote"), (b'{"prompt" "a"}', "expected :"),
            (b'{"prompt": "\\u12"}', "4 hexadecimal"), (b'["a"]', "expected {"),
            (b'{"prompt": "a", "seed": 01}', "expected }")):
        found, = answers(run_debug_bin, model[0], [request])
        assert set(found) == {"id", "error"} and named in found["error"], (request, found)


def test_lines_that_python_refuses_are_refused(run_debug_bin, tmp_path):
    """
    Each randomly changed line is answered with a line of JSON. Only a line that Python's json
    accepts as an object gets a text.
    """
    path, rng = tmp_path / "m.gguf", random.Random(6)
    Model(dim=32, hidden=32, layers=1, heads=1, kv=1, seq=16).write_gguf(path)
    good = [
        b'{"id": "a\\u00e9\\ud83d\\ude00", "prompt": "x\\n\\"y", "max_tokens": 2, '
        b'"temperature": 1.5e-1}',
        b'{"id": -12.5, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}',
        ' { "prompt" : "é" , "stop" : [ "a" , "b" ] , "max_tokens" : 1 , "top_p" : null } '.encode()
    ]
    lines = [*good]
    while len(lines) < 600:
        line = bytearray(rng.choice(good))
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(line))
            line[at:at + rng.choice((0, 1, 1, 3))] = rng.choice(
                (b"", b"\\", b'"', b"{", b"}", b",", b"0", b"\xc3", b"u", b"\\ud800", b"-"))
        lines.append(bytes(line))
    # one at a time, so that the answers have the order of the lines
    found = answers(run_debug_bin, path, lines, "--template", "llama2", "-b", 1)
    assert len(found) == len(lines) and sum("text" in a for a in found) > 30
    for line, answer in zip(lines, found):
        if "text" in answer:
            assert isinstance(json.loads(line.decode(errors="replace")), dict), line


def test_a_request_longer_than_the_context_is_reported(run_bin, model):
    """Once, on stderr: most of its prompt is dropped."""
    lines = [json.dumps({"id": i, "prompt": "a b " * size, "max_tokens": 3}).encode()
             for i, size in enumerate((2, 3000, 3000))]
    done = subprocess.run([run_bin, model[0], "--jsonl"], input=b"\n".join(lines),
                          capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stdout.count(b"\n") == 3
    assert done.stderr.count(b"is full: the oldest tokens are dropped") == 1


@pytest.mark.parametrize("words", [["-i", "-"], ["--jsonl"], ["--prompts", "-"]])
def test_a_closed_stdin_is_empty(run_bin, model, words):
    """The model file must not take its place."""
    run_on = shlex.join([str(run_bin), str(model[0]), "-n", "5", *words])
    closed, empty = (
        subprocess.run(["sh", "-c", f"{run_on} {end}"], capture_output=True, timeout=60)
        for end in ("<&-", "</dev/null"))
    assert (closed.returncode, closed.stdout) == (empty.returncode, empty.stdout)
    without_times = [re.sub(rb"[0-9.]+", b"", done.stderr) for done in (closed, empty)]
    assert without_times[0] == without_times[1]


def test_an_answer_comes_while_the_input_is_open(run_bin, model):
    """Answers arrive in order of completion. A program may wait for one before it asks again."""
    with subprocess.Popen([run_bin, model[0], "--jsonl"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as p:
        for i in range(3):
            p.stdin.write(
                json.dumps({"id": i, "prompt": "a", "max_tokens": 3, "temperature": 0}).encode()
                + b"\n")
            p.stdin.flush()
            assert json.loads(p.stdout.readline())["id"] == i
        for i, count in (("long", 100), ("short", 2)):
            p.stdin.write(
                json.dumps({"id": i, "prompt": "a", "max_tokens": count, "temperature": 0}).encode()
                + b"\n")
        p.stdin.close()
        assert [json.loads(line)["id"] for line in p.stdout] == ["short", "long"]
    assert p.returncode == 0
