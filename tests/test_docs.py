"""
Each command of README.md and the other pages runs as written, in order, in a fresh clone.

bash runs the blocks of a page, one page after the other. Programs that take long, or that need a
network, are replaced by others that come first on PATH:

- python forks from a process that has already imported torch, because the import takes longer than
  a tiny training.
- Trainings and estimates of costs get the flags of SHORT after their own, a sweep gets two trials,
  pytest lists its tests, and there are fewer built-in stories.
- Commands that match NOT_RUN are only checked: their files must exist, their flags must be known
  and the values must fit. So are the experiments of doc/lab, which `make test-long` runs
  (long_docs.py).
- make builds targets that need no GPU; of others it only shows that it knows them. runcuda is a
  script that starts run, which has the same flags.
"""
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import configurator
from engine.text import stories
from tests import forked

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted({
    str(path.relative_to(ROOT))
    for pages in ("*.md", "doc/**/*.md", "bench/*.md")
    for path in ROOT.glob(pages)} - {"README.md"})]
STORIES = 400
SHORT = {
    "train.py": ["--peak_tflops=0.1", "--max_iters=2", "--eval_interval=2", "--eval_iters=1",
                 "--log_interval=1", "--max_seq_len=64"],
    "model.py": ["--n_layers=1", "--max_seq_len=64"], "sweep.py": ["--count=2"],
    "pytest": ["--collect-only"]
}
NOT_RUN = {  # {pattern of commands that are only checked: the reason}
    r"^(?!model\.py).*config/(stories|shakespeare)|=tiny": "downloads text, or trains for days",
    r"--nnodes": "needs two machines",
    r"--conversations=questions": "asks 500 questions, to which a model of two steps gives "
                                  "the longest answers",
    r"--lr_find": "trains 500 steps; tests/test_modes.py has fewer",
    r"^bench/(?!curves)": "measures for minutes, partly other programs",
    r"--format=html": "needs the module that `make wasm` compiles for a minute; "
                      "tests/test_browser.py exports pages",
    r"^experiment\.py": "trains six times for a minute; tests/test_experiment.py tries changes",
    r"^track\.py sync": "needs an account; tests/test_track_online.py has a server",
}
PROGRAMS = r"(python|make|torchrun|srun|for|cat|train|source|wandb|git|pip|\.venv/|\./)[ /(a-z]"
FILES = ("my.txt", "en1m.txt", "input.txt", "file.txt",  # files that a reader has or downloads
         "wikitext2_valid.txt", "wikitext2_test.txt")
STUBS = {
    "make": 'case $1 in demo|chat|run|lib) exec {make} "$@";; esac; '
            'exec {make} -n "$@" > /dev/null',
    "srun": 'while [[ $1 == --* ]]; do shift; done; '
            'SLURM_NNODES=2 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=one,two exec "$@"',
    "scontrol": '[[ "$*" == "show hostnames one,two" ]] && printf "one\\ntwo\\n"',
    "torchrun": 'exec python -m torch.distributed.run "$@"',
    # `wandb leet` is interactive, and `wandb sweep` needs a server.
    "wandb": 'exec {wandb} "$1" --help > /dev/null',
}
CLIENT = """#!{python} -SE
import array, json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect("{address}")
    message = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    server.sendmsg([len(message).to_bytes(4, "big")], \
[(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
    server.sendall(message)
    sys.exit(int(server.recv(16) or 1))
"""


# ---- the pages -----------------------------------------------------------------------------------

def blocks(page):
    """
    Yield (line, commands) of each block of a page that begins with a command. The commands of a
    transcript are the lines that begin with `$ `.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in re.finditer(r"^```.*\n((?s:.*?))^```", text, re.M):
        lines = match[1].splitlines()
        if lines[0].startswith("$ "):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        if re.match(PROGRAMS, lines[0]):
            yield text[:match.start()].count("\n") + 2, replace_placeholders("\n".join(lines))


def replace_placeholders(command):
    """
    Replace the placeholders for what the reader chooses: `...` by nothing, --knob=N by a value that
    fits, the knob's default.
    """
    knobs = configurator.source_knobs(ROOT / "train.py")
    command = re.sub(r" \.\.\.(?=['\s]|$)", "", command)
    return re.sub(r"--(\w+)=(\d+/)?[A-Z](/\d+)?(?=\s|$)", lambda m: f"--{m[1]}={knobs[m[1]][0]}",
                  command)


def read_only(argv):
    """Check a command that is not run: its script and presets exist, its flags are known."""
    if argv[:2] == ["-m", "torch.distributed.run"]:
        from torch.distributed.run import get_args_parser
        args = get_args_parser().parse_args(argv[2:])
        argv = [args.training_script, *args.training_script_args]
    if "--" in argv and argv[0] == "experiment.py":  # settings of train.py follow the --
        read_only(["train.py", *argv[argv.index("--") + 1:]])
        argv = argv[:argv.index("--")]
    knobs = configurator.source_knobs(ROOT / argv[0])
    # The config.json belongs to a run that does not exist here.
    argv = [word for word in argv if not word.endswith("/config.json")]
    if argv[0] != "track.py":
        configurator.configure(
            {"__file__": str(ROOT / argv[0])} | {name: knob[0] for name, knob in knobs.items()},
            "data" if argv[0] == "train.py" else [], argv[1:])


# ---- python, forked ------------------------------------------------------------------------------

def run_command(argv):
    sys.executable = shutil.which("python")
    argv = argv[1:] if argv[0] == "-u" else argv
    if "ONLY_READ" in os.environ or any(re.search(pattern, " ".join(argv)) for pattern in NOT_RUN):
        return read_only(argv)
    if argv[0] == "-m":
        forked.forget()
        sys.argv = [*argv[1:], *SHORT.get(argv[1], [])]
        return runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    short = [*SHORT.get(argv[0], [])]
    if any(word.startswith("--data=examples/chats") for word in argv):
        short += ["--max_seq_len=192"]  # conversations need a context in which a turn fits
    if len(argv) > 1 and argv[1].startswith("config/chat"):
        short += ["--max_seq_len=320", "--data=questions:200"]
    return forked.script([*argv, *short])


# ---- the clone -----------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def clone(tmp_path_factory, libraries):
    """Return a fresh clone of the working tree, with the stubs of programs and a reader's files."""
    folder = tmp_path_factory.mktemp("docs") / "llamac"
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    changed = subprocess.check_output(["git", "ls-files", "-mo", "--exclude-standard"], cwd=ROOT,
                                      text=True)
    for name in changed.splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            shutil.copy(ROOT / name, folder / name)
        else:
            (folder / name).unlink()
    fewer, count = re.subn(r"^STORIES = [\d_]+", f"STORIES = {STORIES}",
                           (folder / "engine/text/sources/__init__.py").read_text(), flags=re.M)
    assert count == 1
    (folder / "engine/text/sources/__init__.py").write_text(fewer)
    # `make test` has built run, and the tests of the library have built the libraries.
    if subprocess.run(["make", "-q", "run"], cwd=ROOT).returncode == 0:
        shutil.copy(ROOT / "run", folder / "run")
    for library in "libllamac.a", "libllamac.so":
        shutil.copy(libraries / library, folder / library)
    story = "\n<|endoftext|>\n".join(stories.write(0, number)[0] for number in range(150))
    for name in FILES:
        (folder / name).write_text(story)
    (folder / "other_trainer.py").write_text(
        "for step in 1, 2: print(f'step {step}: train loss {3 / step:.1f}')\n")
    for name, text in {"program": "echo 'BLEU 12.5'", "runcuda": 'exec ./run "$@"'}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    add_programs(folder)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.test_docs", str(folder / "python.socket")], cwd=ROOT,
        stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert server.stdout.readline()
    yield folder
    server.terminate()
    server.wait()


def add_programs(folder):
    """Write the virtual environment that `make demo` would set up, with the stubs in its bin."""
    programs = folder / ".venv/bin"
    programs.mkdir(parents=True)
    for stamp in "demo", "test":
        (folder / ".venv" / stamp).touch()
    (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
    (programs / "python").write_text(
        CLIENT.format(python=sys.executable, address=folder / "python.socket"))
    where = {"make": shutil.which("make"), "wandb": Path(sys.executable).with_name("wandb")}
    for name, text in STUBS.items():
        (programs / name).write_text("#!/bin/bash\n" + text.format(**where) + "\n")
    for path in programs.iterdir():
        path.chmod(0o755)


def run_page(page, clone, **variables):
    script = ("set -Eo pipefail\ntrap 'code=$?; failed+=$at; "
              "echo \"==== $at: $BASH_COMMAND: exit code $code\"' ERR\n")
    for line, commands in blocks(page):
        script += f"at='{page}, line {line}'; echo \"---- $at\"\n{commands}\n"
    environment = {k: v for k, v in os.environ.items()
                   if not k.startswith(("WANDB", "PYTHON", "MAKE", "MFLAGS"))}
    environment |= {"PATH": f"{clone}/.venv/bin:{environment['PATH']}",
                    "HOME": str(clone.parent), "WANDB_MODE": "offline"}
    done = subprocess.run(["bash", "-c", script + "trap - ERR; [[ -z $failed ]]"], cwd=clone,
                          env=environment | variables, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


# Only `make test-long` runs these pages.
LONG_PAGES = {"README.zh.md", *(f"doc/{name}.md" for name in (
    "data", "instruments", "models", "start", "tracking", "training"))}


@pytest.mark.parametrize("page", [
    pytest.param(page, marks=pytest.mark.slow if page in LONG_PAGES else ()) for page in PAGES])
def test_the_commands_of_a_page_run_as_written(page, clone):
    # These pages expect that the reader has run the commands of the README.
    if page in LONG_PAGES and not (clone / "out/batch6").exists():
        run_page("README.md", clone)
    run_page(page, clone, **({"ONLY_READ": "1"} if page.startswith("doc/lab/") else {}))


def test_commands_within_sentences_are_known(monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = subprocess.run(["grep", "-oh", "-e", "--[a-z-]*", "run.c", "cli/options.h"],
                           capture_output=True, text=True).stdout.split()
    for page in PAGES:
        text = re.sub(
            r"^```(?s:.*?)^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.M)
        assert not re.search(rf"^    {PROGRAMS}", text, re.M), (
            f"{page}: commands stand between lines of ```")
        for program, words in re.findall(r"`(python|make|\./run) ([^`]+)`", text):
            if program == "python":
                read_only(shlex.split(replace_placeholders(words)))
            elif program == "make":
                subprocess.run(["make", "-n", *shlex.split(words)], check=True,
                               stdout=subprocess.DEVNULL)
            else:
                assert {word for word in words.split() if word.startswith("--")} <= set(flags), (
                    f"{page}: run {words}")


if __name__ == "__main__":
    forked.serve(sys.argv[1], run_command)
