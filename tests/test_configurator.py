"""The configurator through a script of its own, as a user runs it."""
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import configurator
from engine import advice

ROOT = Path(__file__).resolve().parents[1]

SCRIPT = '''"""What the script is for."""
import json
from configurator import configure, settings
out_dir = "out"     # where it goes
# ---- numbers
rate = 1e-3         # peak rate
steps = 10          # how many
# ---- names
log = False         # whether
name = "auto"       # may look like a number
PI, _hidden = 3, 4
if __name__ == "__main__":
    config = configure(globals(), positional="name", common=("rate", "name"))
    print(json.dumps([config.as_dict(), sorted(config.given)]))
'''


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)

    def call(*args):
        done = subprocess.run([sys.executable, "script.py", *args], cwd=tmp_path,
                              capture_output=True, text=True,
                              env={"PYTHONPATH": str(ROOT), "HOME": "/home/her"})
        return done.returncode, done.stdout, done.stderr
    call.folder = tmp_path
    return call


def values(script, *args):
    code, out, err = script(*args)
    assert code == 0, err
    return json.loads(out)


def test_defaults(script):
    assert values(script) == [
        {"out_dir": "out", "rate": 1e-3, "steps": 10, "log": False, "name": "auto"}, []]


@pytest.mark.parametrize("arg, key, value", [
    ("--rate=1", "rate", 1.0),
    ("--rate=3e-4", "rate", 3e-4),
    ("--steps=1_000", "steps", 1000),
    ("--log=True", "log", True),
    ("--log=yes", "log", True),
    ("--log=1", "log", True),
    ("--log=no", "log", False),
    ("--name=a=b", "name", "a=b"),
    ("--name=123", "name", "123"),
    ("--name=", "name", ""),
    ("--name=ünï cödé", "name", "ünï cödé"),
    ("free", "name", "free"),
    ("--log", "log", True),
    ("--log False", "log", False),
    ("--log 1", "log", True),
    ("--steps 7", "steps", 7),
    ("--steps=1e3", "steps", 1000),
    ("--steps=2.0", "steps", 2),
    ("--steps -3", "steps", -3),
    ("--rate 2", "rate", 2.0),
    ("--out-dir x/y", "out_dir", "x/y"),
    ("--name no", "name", "no"),
    ("~/my.txt", "name", "/home/her/my.txt"),
    ("--out_dir=~/o", "out_dir", "/home/her/o"),
    ("--name=~", "name", "~"),
    ("--name a.py", "name", "a.py"),
])
def test_override(script, arg, key, value):
    settings, given = values(script, *([arg] if "=" in arg else arg.split()))
    assert settings[key] == value and type(settings[key]) is type(value) and given == [key]


def test_files_and_arguments_apply_left_to_right(script):
    (script.folder / "a.py").write_text(
        "_per_day = 5\nsteps = 4 * _per_day  # arithmetic\nrate = 1\n")
    (script.folder / "b.yaml").write_text("steps: 30\nrate: 1e-2\nlog: true\n")
    (script.folder / "c.json").write_text(json.dumps({"steps": 40, "name": "7"}))
    assert values(script, "a.py")[0]["steps"] == 20
    settings, given = values(script, "--steps=1", "a.py", "b.yaml", "--rate=0.5", "c.json",
                             "--log=False")
    assert settings == {"out_dir": "out", "rate": 0.5, "steps": 40, "log": False, "name": "7"}
    assert given == ["log", "name", "rate", "steps"]


def test_what_a_preset_overrides_is_said(script):
    (script.folder / "a.py").write_text("steps = 4\nrate = 0.5\nname = 'a'\n")
    for args in "--steps=3 a.py", "my.txt a.py", "--steps 3 a.py":
        code, out, err = script(*args.split())
        assert code == 0 and json.loads(out)[0]["steps"] == 4 and err.count("\n") == 1, err
        assert err.startswith("note: a.py sets ") and f", which overrides {args[:-5]}; " in err
    for args in (["a.py", "--steps=3"], ["--steps=4", "a.py"], ["a.py", "a.py"],
                 ["--steps=3", "--steps=5", "--log"]):
        assert script(*args)[2] == ""


@pytest.mark.parametrize("args, words", [
    (["--stesp=3"], ["'stesp'", "did you mean 'steps'"]),
    (["--zzzzzz=3"], ["'zzzzzz'", "--help"]),
    (["--PI=3"], ["unknown key 'PI'"]),
    (["--_hidden=3"], ["unknown key"]),
    (["--json=3"], ["unknown key"]),
    (["--steps=ten"], ["steps is 'ten'", "expected int"]),
    (["--steps=1.5"], ["expected int"]),
    (["--steps="], ["expected int"]),
    (["--rate=nan"], ["expected float"]),
    (["--rate=inf"], ["expected float"]),
    (["--log=maybe"], ["expected bool"]),
    (["--steps"], ["--steps: has no value", "--steps=10"]),
    (["--name", "--steps=3"], ["--name: has no value"]),
    (["one", "two"], ["one and two: expected one name"]),
    (["steps=3"], ["expected --steps=3"]),
    (["-steps=3"], ["expected --steps=3"]),
    (["--"], ["unknown key"]),
    (["-x"], ["expected --key=value"]),
    (["missing.py"], ["missing.py", "cannot be read"]),
    (["broken.py"], ["broken.py", "SyntaxError"]),
    (["raises.py"], ["raises.py", "ZeroDivisionError"]),
    (["unknown.py"], ["unknown.py", "'stpes'", "did you mean 'steps'"]),
    (["typed.py"], ["typed.py", "steps is 3.5", "expected int"]),
    (["list.yaml"], ["list.yaml", "cannot be read"]),
    (["broken.json"], ["broken.json", "cannot be read"]),
])
def test_mistakes_are_one_line(script, args, words):
    files = {
        "broken.py": "steps = = 3", "raises.py": "steps = 1 / 0", "unknown.py": "stpes = 3",
        "typed.py": "steps = 3.5", "list.yaml": "- 1\n- 2\n", "broken.json": "{"
    }
    for name, text in files.items():
        (script.folder / name).write_text(text)
    code, out, err = script(*args)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    "name, text, words",
    [("code.py", "open('ran', 'w')\nx = 1\n", "code.py: unknown key 'x'; "),
     ("code.py", "open('ran', 'w')\n",
      "code.py: cannot be read as a configuration (ValueError: it contains no setting)"),
     ("code.py", "import os\nopen('ran', 'w')\nstesp = 3\n",
      "code.py: unknown key 'stesp'; did you mean 'steps'?"),
     ("code.py", "import os\nopen('ran', 'w')\nstesp = 3\nrate = 1 / stesp\n",
      "code.py: unknown key 'stesp'; did you mean"),
     ("code.py", "import os\nopen('ran', 'w')\n",
      "code.py: cannot be read as a configuration (ValueError: it contains no setting)"),
     ("code.py", "def f(x):\n    steps = x\nif __name__ == '__main__':\n    open('ran', 'w')\n",
      "code.py: cannot be read as a configuration (ValueError: it contains no setting)"),
     ("old.py", "print 'x'\nsteps = 3\n",
      "old.py: cannot be read as a configuration (SyntaxError: "),
     ("my.json", '[{"text": "hello"}, {"text": "you there"}]',
      "my.json: cannot be read as a configuration ("),
     ("my.json", '[{"id": 1, "text": "a"}]', "my.json: "),
     ("my.json", '{"text": "hello"}\n{"text": "you there"}\n',
      "my.json: cannot be read as a configuration ("),
     ("my.json", '{"text": "hello"}', "my.json: unknown key 'text'; "),
     ("my.yaml", "- a\n- b\n", "my.yaml: cannot be read as a")])
def test_a_file_that_is_no_configuration_is_not_run_and_how_to_name_it_is_said(
        script, name, text, words):
    (script.folder / name).write_text(text)
    code, out, err = script(name)
    assert code == 2 and err.startswith(f"error: {words}") and err.count("\n") == 1, err
    assert err.endswith(f"; if it is the name itself: --name={name}\n")
    assert not (script.folder / "ran").exists()
    assert values(script, f"--name={name}")[0]["name"] == name


def test_files_that_set_knobs_in_the_ways_of_python_are_configurations(script):
    (script.folder / "a.py").write_text(
        '"""Mine."""\nimport math as _math\ndef _half(x):\n    y = x / 2\n    return y\n'
        "if _half(4) == 2:\n    steps: int = _math.isqrt(49)\n    name = 'b'\nsteps += 1\n")
    (script.folder / "commented.py").write_text('"""Nothing yet."""\n# steps = 3\n')
    assert values(script, "a.py", "commented.py") == [
        {"out_dir": "out", "rate": 1e-3, "steps": 8, "log": False, "name": "b"}, ["name", "steps"]]


@pytest.mark.parametrize(
    "text, expected",
    [("import time\nname = 'run' + str(time.time())[:0]\n", {"name": "run"}),
     ("import os, sys\nfrom math import sqrt as root, pi\nrate = root(0.25)\n", {"rate": 0.5}),
     ("from math import *\nsteps = floor(7.5)\n", {"steps": 7}),
     ("import numpy as np\nsteps = np.int64(6)\nrate = np.sqrt(0.25)\nlog = np.bool_(True)\n",
      {"steps": 6, "rate": 0.5, "log": True}),
     ("from pathlib import Path\nname = Path('a') / 'b'\n", {"name": "a/b"}),
     ("n = 12\nsteps = 5 * n  # 5 passes\n", {"steps": 60}),
     ("TOKENS = 2 ** 10\n_batch = 8\nsteps = TOKENS // _batch\n", {"steps": 128}),
     ("def half(x):\n    return x / divisor\ndivisor = 2\nsteps = half(8)\nclass Own:\n    pass\n",
      {"steps": 4}),
     ("steps = steps * 3\nrate /= 10\n", {"steps": 30, "rate": 1e-4}),
     ("def longer():\n    return steps + 1\nsteps = longer()\n", {"steps": 11}),
     ("if rate < 1:\n    steps = 4\nelse:\n    name = 'x'\n", {"steps": 4}),
     ("for i in range(3):\n    steps = i\n", {"steps": 2}),
     ("steps = 1e2 / 2\n", {"steps": 50})])
def test_a_configuration_is_written_as_nanogpts_are(script, text, expected):
    (script.folder / "a.py").write_text(text)
    settings, given = values(script, "a.py")
    assert {name: settings[name] for name in given} == expected


def test_a_configuration_reads_the_knobs_as_they_stand(script):
    (script.folder / "a.py").write_text("steps = steps + 1\n")
    assert values(script, "--steps=5", "a.py", "a.py")[0]["steps"] == 7


@pytest.mark.parametrize(
    "text, words",
    [("import sys\nsteps = 3\nsys.exit()\n", "(SystemExit: )"),
     ("import nothing_such\nsteps = 3\n", "nothing_such"),
     ("steps = 3\nunused = 4\n",
      "unknown key 'unused'; --help lists all; a name of the file's own begins with an underscore: "
      "_unused"),
     ("steps = 10 ** 400\n", "steps is 1000"), ("rate = 10 ** 400\n", "rate is 1000"),
     ("rate = float('nan')\n", "rate is nan"), ("rate = None\n", "rate is None"),
     ("def rate():\n    pass\n", "rate is <function"),
     ("import numpy as np\nrate = np.ones(3)\n", "rate is array("),
     ("def f():\n    return f()\nsteps = f()\n", "RecursionError")])
def test_a_configuration_that_fails_ends_in_one_line(script, text, words):
    (script.folder / "a.py").write_text(text)
    code, out, err = script("a.py")
    assert code == 2 and out == "" and err.startswith("error: a.py: "), err
    assert err.count("\n") == 1 and words in err, err


@pytest.mark.parametrize("value, kind", [(value, kind) for kind, values in (
    ("steps", ["1" + "0" * 400, "-" + "9" * 400, "9" * 5000, "1e308", "-1e300", "inf",
               str(1 << 53), str(-1 << 63)]),
    ("rate", ["1e308", "-1e308", "1e40", "1e30", "-1e13", "1e-308", "5e-324", "-1e-40",
              "9" * 400, "9" * 5000, "inf", "nan", "-inf"]),
) for value in values])
def test_a_number_beyond_its_types_range_is_refused_in_one_short_line(value, kind, script):
    code, out, err = script(f"--{kind}={value}")
    assert code == 2 and out == "" and err.count("\n") == 1 and len(err) < 400, err
    assert err.startswith(f"error: --{kind}=") and f"{kind} is '" in err and "expected " in err


def test_numbers_within_the_range_are_taken(script):
    settings, _ = values(script, f"--steps={(1 << 53) - 1}", "--rate=1e-30")
    assert settings["steps"] == (1 << 53) - 1 and settings["rate"] == 1e-30
    assert values(script, "--rate=-1e12", "--steps=-7")[0]["rate"] == -1e12
    assert values(script, "--rate=0", "--steps=-0")[0]["rate"] == 0


def test_help_lists_every_knob_with_default_type_and_comment(script):
    code, out, err = script("--help")
    assert code == 0 and err == "" and out.startswith("What the script is for.")
    assert "a value without --key sets name" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["--rate=0.001", "float", "peak", "rate"] in lines
    assert ["--log=False", "bool", "whether"] in lines
    shown = [line.split()[0].split("=")[0] for line in out.splitlines()
             if line.startswith("  --") or line.endswith(":")]
    assert shown == ["the", "--rate", "--name", "all:", "--out_dir", "numbers:", "--rate",
                     "--steps", "names:", "--log", "--name"]


# Names from other programs or typos, and the setting that the answer suggests for each; it is
# empty where no suggestion would be right.
ANSWERS = {
    "train": "lr>learning_rate epochs>max_iters num_train_epochs>max_iters n_embd>dim "
        "n_layer>n_layers n_head>n_heads block_size>max_seq_len hidden_size>dim "
        "intermediate_size>hidden_dim num_hidden_layers>n_layers num_attention_heads>n_heads "
        "num_key_value_heads>n_kv_heads max_position_embeddings>max_seq_len "
        "tie_word_embeddings>tie_embeddings dataset>data output_dir>out_dir "
        "per_device_train_batch_size>batch_size max_steps>max_iters eval_steps>eval_interval "
        "save_steps>eval_interval logging_steps>log_interval warmup_steps>warmup_iters "
        "adam_beta2>beta2 max_grad_norm>grad_clip lr_scheduler_type>schedule report_to>wandb_log "
        "bf16>dtype gradient_checkpointing>activation_checkpointing "
        "resume_from_checkpoint>init_from run_name>wandb_run_name lora>lora_rank "
        "use_peft>lora_rank lora_r>lora_rank target_modules>lora_targets model>init_from "
        "batchsize>batch_size lerning_rate>learning_rate weight_deacy>weight_decay "
        "rate>learning_rate embedding_lr>embedding_lr_scale warmup_itters>warmup_iters "
        "min_iters> top_k> keep_list> bias>qkv_bias",
    "sample": "model>out_dir start>prompt checkpoint>out_dir max_length>max_new_tokens",
    "export": "version>format output>path",
    "data": "dataset>source",
    "evaluate": "text>perplexity",
}


@pytest.mark.parametrize("script, theirs, ours", [
    (script, *pair.split(">")) for script, pairs in ANSWERS.items() for pair in pairs.split()])
def test_unknown_names_are_answered_with_ours_or_not_at_all(script, theirs, ours):
    said = advice.advice(theirs, configurator.source_knobs(ROOT / f"{script}.py"))
    assert re.match(
        f"(here it is|did you mean) '{ours}'[,?]?( (?!or)|$)" if ours else "--help lists all$",
        said), said


def test_a_part_of_names_is_answered_with_all_of_them():
    assert (advice.advice("vocab", ["vocab_source", "vocab_size"])
            == "did you mean 'vocab_source' or 'vocab_size'?")
    assert advice.advice("", ["vocab_source"]) == "--help lists all"


def test_the_table_of_other_programs_names_only_what_exists():
    everywhere = {name for path in ROOT.glob("*.py") for name in configurator.source_knobs(path)}
    assert {ours for _, ours, _ in advice.OTHER_NAMES + advice.NO_COUNTERPART} <= everywhere


@pytest.mark.parametrize("script, theirs, words",
                         [("sample", "top_k", "--top_p limits their probability"),
                          ("sample", "repetition_penalty", "--temperature and --top_p"),
                          ("train", "lora_alpha", "16 / lora_rank"),
                          ("train", "lora_dropout", "--dropout"),
                          ("train", "load_in_4bit", "a GGUF file in Q8_0"),
                          ("train", "messages", "conversations in .jsonl"),
                          ("train", "num_experts", "blocks are dense"),
                          ("train", "deepspeed", "--fsdp=True")])
def test_what_is_not_here_is_answered_with_what_is_there_instead(script, theirs, words):
    said = advice.advice(theirs, configurator.source_knobs(ROOT / f"{script}.py"))
    assert said.startswith("there is no such setting here: ")
    assert words in said
    assert "did you mean" not in said


@pytest.mark.parametrize(
    "path, kind, command",
    [("Qwen/Qwen2-0.5B", "", "hf download Qwen/Qwen2-0.5B --local-dir Qwen2-0.5B "),
     ("https://huggingface.co/Qwen/Qwen2-0.5B", "",
      "hf download Qwen/Qwen2-0.5B --local-dir Qwen2-0.5B "),
     ("https:/huggingface.co/Qwen/Qwen2-0.5B/tree/main", "",
      "hf download Qwen/Qwen2-0.5B --local-dir Qwen2-0.5B "),
     ("huggingface.co/a/b", "", "hf download a/b "),
     ("roneneldan/TinyStories", "dataset",
      "hf download roneneldan/TinyStories --repo-type=dataset --local-dir TinyStories "),
     ("https://huggingface.co/datasets/a/b", "dataset", "hf download a/b --repo-type=dataset "),
     ("out", "", ""), ("tests/nothing", "", ""), ("/a/b", "", ""), ("../a/b", "", ""),
     ("a/b/c", "", ""), ("", "", "")])
def test_a_name_of_the_hub_is_answered_with_how_to_download_it(path, kind, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    said = advice.hub(path, kind)
    assert command in said if command else not said


def test_models_and_data_that_are_not_here_yet(monkeypatch, tmp_path, capsys):
    from engine.text import prepare
    from engine.training import checkpoint
    monkeypatch.chdir(tmp_path)
    for call in (lambda: checkpoint.origin("Qwen/Qwen2-0.5B"),
                 lambda: prepare.text_bytes("roneneldan/TinyStories")):
        with pytest.raises(SystemExit):
            call()
        said = capsys.readouterr().err
        assert "hf download " in said and said.count("\n") == 1


def test_outside_its_environment_a_command_says_how_to_get_in(tmp_path, monkeypatch):
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "engine", tmp_path / "engine")

    def start(name, cwd=tmp_path):  # -S hides the installed packages
        done = subprocess.run([sys.executable, "-S", tmp_path / name], cwd=cwd, capture_output=True,
                              text=True)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert " has no package " in done.stderr, done.stderr
        return done.stderr

    # The other commands start without any package.
    for name in "data.py", "sample.py", "export.py", "evaluate.py", "model.py", "train.py":
        said = start(name)
        assert "; make demo sets up an environment" in said
    (tmp_path / ".venv").mkdir()
    said = start("train.py")
    assert f"use the project's: .venv/bin/python {tmp_path}/train.py, or " in said
    assert "source .venv/bin/activate" in said
    assert f"use the project's: {tmp_path}/.venv/bin/python" in start("sample.py", ROOT)
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    assert configurator.missing("torch").endswith("bin/python -m pip install torch")


EACH_COMMAND = """
import gc, os, runpy, sys
import train, evaluate, sweep  # once for all commands: torch takes seconds, at the end too
gc.freeze()
for name in "compare train data sample export evaluate compare track sweep".split():
    if not os.fork():
        sys.argv = [name + ".py", "--help"]
        runpy.run_path(name + ".py", run_name="__main__")
        sys.exit()
    sys.stdout.reconfigure(line_buffering=True)  \
# then the pipe breaks at the first line, not at the end
    print(name, os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr)
"""


def test_help_into_a_pipe_that_nobody_reads_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", EACH_COMMAND], cwd=ROOT, stdout=write,
                          stderr=subprocess.PIPE, text=True,
                          env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"})
    os.close(write)
    assert done.stderr == "compare 0\n" + "".join(
        f"{name} 141\n" for name in "train data sample export evaluate compare track sweep".split())


EACH_OUTPUT = """
import os, sys
from configurator import fail
for number, text in enumerate(("a", "a" * 100_000, "a")):
    if not os.fork():
        print(text)
        fail("b") if number == 2 else sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr)
"""


@pytest.mark.parametrize("buffered", [False, True])
def test_output_that_cannot_be_written_is_one_line_and_exit_code_2(buffered):
    """Output fails at exit, midway and before an error, whose buffered line is still printed."""
    line = ("error: stdout cannot be written (No space left on device); free disk space, "
            "or send the output elsewhere\n")
    env = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", EACH_OUTPUT], cwd=ROOT, stdout=full,
                              stderr=subprocess.PIPE, text=True, env=env)
        assert done.stderr == f"{line}2\n{line}2\n{'error: b' + chr(10) if buffered else line}2\n"
        assert done.returncode == 0
        assert subprocess.run([sys.executable, ROOT / "compare.py", "--odd=1"], stdout=full,
                              stderr=full, env=env).returncode == 2


CONSOLE = """
import os, resource, sys
from engine import streams
if sys.argv[1:] == ["limit"]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
streams.open_streams(), streams.outlast("stdout")
for stream in sys.stdout, sys.stderr:
    print("a" * 20, file=stream, flush=True)
    print("b" * 10_000, file=stream, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
print("c")
print("c", file=sys.stderr)
for name, lost, why in streams.console_notes():
    os.write(3, f"{name} {lost} {why}\\n".encode())
assert not streams.console_notes()
"""


def consoles(tmp_path):
    """Yield (descriptor for stdout and stderr, text of the error that it raises, arguments)."""
    reader, pipe = os.pipe()
    os.close(reader)
    terminal, closed = pty.openpty()
    os.close(terminal)
    (tmp_path / "text").write_text("")
    yield os.open("/dev/full", os.O_WRONLY), "No space left on device", []
    yield pipe, "Broken pipe", []
    yield closed, "Input/output error", []
    yield os.open(os.devnull, os.O_RDONLY), "Bad file descriptor", []
    yield os.open(tmp_path / "text", os.O_WRONLY | os.O_APPEND), "File too large", ["limit"]


def test_a_program_that_outlasts_its_console_goes_on_and_tells_of_it_once(tmp_path):
    for console, why, words in consoles(tmp_path):
        with open(tmp_path / "notes", "w") as notes:
            command = ["sh", "-c", 'exec "$@" 3>&4 4>&-', "", sys.executable, "-c", CONSOLE, *words]
            done = subprocess.run(command, cwd=ROOT, stdout=console, stderr=console, pass_fds=[4],
                                  preexec_fn=lambda notes=notes: os.dup2(notes.fileno(), 4))
        os.close(console)
        lines = (tmp_path / "notes").read_text().splitlines()
        assert done.returncode == 0, why
        assert [line.split()[0] for line in lines] == ["console/stdout", "console/stderr"], why
        assert all(f"({why})" in line for line in lines), lines
    # Output resumes once there is room again.
    assert (tmp_path / "text").read_text() == "a" * 10 + "c\nc\n"


def test_a_console_whose_reader_does_not_block_gets_all(tmp_path):
    reader, pipe = os.pipe()
    os.set_blocking(pipe, False)
    program = ("import sys; from engine import streams; streams.outlast('stdout'); "
               "print('a' * 300_000)")
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=pipe) as p:
        os.close(pipe)
        time.sleep(0.5)
        with open(reader, "rb") as f:
            assert f.read() == b"a" * 300_000 + b"\n"
    assert p.returncode == 0


def test_other_pipes_that_break_are_faults_still(tmp_path):
    program = "import configurator, os\nr, w = os.pipe()\nos.close(r)\nos.write(w, b'x')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" in done.stderr and "BrokenPipeError" in done.stderr


def test_ctrl_c_is_no_traceback(tmp_path):
    program = "import configurator, time\nprint('ready', flush=True)\ntime.sleep(60)"
    # A background job of a shell ignores SIGINT, so the child restores the default action.
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as p:
        p.stdout.readline()
        p.send_signal(signal.SIGINT)
        assert (p.communicate()[1], p.returncode) == ("interrupted\n", 130)


def test_a_training_as_people_type_it_ends_well_though_nobody_reads_what_it_says(tmp_path):
    (tmp_path / "my.txt").write_text("Once upon a time there was a dog. " * 300)
    options = ("--out-dir run --vocab_source byte --dim 32 --n_layers=1 --max_seq_len 16 "
               "--batch_size 2 --max_iters 1e1 --eval_interval 5 --eval_iters 1 --deterministic "
               "--log_interval=1e0")
    with subprocess.Popen([sys.executable, ROOT / "train.py", "~/my.txt", *options.split()],
                          cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=os.environ | {"HOME": str(tmp_path)}) as p:
        assert p.stdout.readline()
        p.stdout.close()
        assert p.wait() == 0 and "Error" not in p.stderr.read()
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["data"] == str(tmp_path / "my.txt")
    assert config["deterministic"] is True
    assert config["max_iters"] == 10
    assert [json.loads(line)["iter"]
            for line in (tmp_path / "run/log.jsonl").read_text().splitlines()][-1] == 10


def test_a_script_that_is_edited_while_it_runs_keeps_its_knobs(tmp_path):
    """A training reads its settings again at its end, hours later."""
    script = tmp_path / "script.py"
    script.write_text(f"""import sys
sys.path.insert(0, {str(ROOT)!r})
from configurator import configure, settings
knob = 1
configure(globals())
open(__file__, "a").write("another = 2\\n")
print(settings(globals()))
""")
    done = subprocess.run([sys.executable, script, "--knob=3"], capture_output=True, text=True)
    assert done.stdout == "{'knob': 3}\n", done.stderr


def test_every_package_that_users_are_asked_to_install_is_pinned():
    pinned = set(re.findall(
        r"^([a-z-]+)==", "".join(path.read_text() for path in ROOT.glob("requirements*.txt")),
        re.M))
    asked = {
        name for where in ("*.py", "engine/*.py", "page/*.js", "doc/*.md", "README*.md")
        for path in ROOT.glob(where)
        for name in re.findall(r"pip install (?:-c \S+ )?([a-z]+)\b",
                               path.read_text(encoding="utf-8"))
    }
    assert {"bokeh", "tokenizers", "optuna", "trackio"} <= asked <= pinned


def test_a_closed_stream_is_nobody_to_talk_to(tmp_path):
    """Closed standard streams can be used, and the next opened file does not get their numbers."""
    program = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import configurator\n"
        "print('a'); print('b', file=sys.stderr); sys.stdin.read(); f = open('kept', 'w'); "
        "f.write(str(f.fileno()))"
    )
    subprocess.run(["sh", "-c", '"$0" -c "$1" "$2" <&- >&- 2>&-', sys.executable, program, ROOT],
                   cwd=tmp_path, check=True)
    assert int((tmp_path / "kept").read_text()) > 2


def test_a_name_that_the_terminal_cannot_show_is_shown_by_its_bytes(tmp_path):
    name = b"caf\xe9-\xe7\x8c\xab.txt"
    program = "import sys; sys.path.insert(0, sys.argv[1]); import configurator; print(sys.argv[2])"
    for encoding, shown in (("ascii", b"caf\\udce9-\\u732b.txt\n"),
                            ("utf-8", b"caf\\udce9-\xe7\x8c\xab.txt\n")):
        done = subprocess.run([sys.executable, "-c", program, ROOT, name], capture_output=True,
                              env=os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"})
        assert (done.returncode, done.stdout) == (0, shown), done.stderr


def test_a_warning_into_a_pipe_that_nobody_reads_is_lost_and_the_program_goes_on(tmp_path):
    program = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import configurator; "
        "from engine.streams import tell\n"
        "r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2)\n"
        "tell('a'); tell('b', sys.stderr); print('c', flush=True); open('went on', 'w')")
    subprocess.run([sys.executable, "-c", program, ROOT], cwd=tmp_path, check=True)
    assert (tmp_path / "went on").exists()


def test_train_has_few_settings_and_the_page_lists_them_in_order():
    knobs = configurator.source_knobs(ROOT / "train.py")
    assert len(knobs) <= 79
    assert (list(json.loads((ROOT / "page/zh.json").read_text(encoding="utf-8"))["knobs"])
            == list(knobs))


@pytest.mark.parametrize("old, said", [
    ("tied", "'tie_embeddings'"), ("sharded", "'fsdp'"), ("within_documents", "'document_mask'"),
    ("vocab_most", "'max_vocab_size'"), ("text_most", "'max_text_bytes'"),
    ("table_rate", "'embedding_lr_scale'"), ("force_resume", "--init_from=force"),
    ("skip_bad", "--checks=-files"), ("noise_scale", "--log_extras=noise_scale"),
    ("decay_lr", "--schedule=constant"), ("wandb_watch", "--log_extras=gradients,parameters"),
    ("wandb_tables", "'log_extras'"), ("wandb_log_model", "'log_extras'"),
    ("wandb_group", "WANDB_RUN_GROUP"), ("wandb_tags", "WANDB_TAGS"),
    ("wandb_notes", "WANDB_NOTES"), ("wandb_job_type", "WANDB_JOB_TYPE"),
    ("keep_last", "--always_save_checkpoint=True"), ("keep_best", "--always_save_checkpoint=True"),
    ("max_restarts", "at most 10 times"), ("max_skips", "10 skipped steps"),
    ("rope_scaling", "ModelArgs"), ("rope_factors", "ModelArgs"), ("rope_attention", "ModelArgs"),
    ("qk_norm", "ModelArgs"), ("head_width", "ModelArgs"), ("norm_eps", "ModelArgs")])
def test_an_old_name_of_a_setting_is_answered_with_what_is_there_instead(old, said):
    assert said in advice.advice(old, configurator.source_knobs(ROOT / "train.py"))
