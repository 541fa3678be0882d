"""
The C program, compiled once for all tests: as users build it, with sanitizers, and with system
calls that fail.
"""
import atexit
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FUZZ = ROOT / "tests" / "fuzz"
SANITIZE = ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
LIBRARY = sorted(str(f.relative_to(ROOT)) for f in ROOT.glob("runtime/**/*.c"))
PROGRAM = ["run.c", *LIBRARY]
FUZZED = [FUZZ / "fuzz.c", FUZZ / "printer.c",
          *(f for f in LIBRARY if Path(f).parent.name == "cpu")]  # fuzz.c includes the others
SETS = ("avx2", "avxvnni", "avx512bw", "avx512", "neon", "neondot", "neoni8mm")
ISAS = [f for f in LIBRARY if Path(f).stem in SETS]  # take most of the compile time
BACKEND = ("cpu", "products", "attention")  # files of runtime/cpu that tests of the backend include
# Files that those tests link
KERNELS = [f for f in LIBRARY
           if Path(f).parent.name == "cpu" and Path(f).stem not in BACKEND] + ["runtime/os.c"]
COVERAGE = os.environ.get("COVERAGE")  # set by `make coverage`: a folder for gcov's files
SLOWEST = ["test_train", "test_hostile", "test_docs", "test_track_online", "test_kernels",
           "test_cuda", "test_page", "test_track"]
WARN = os.environ.get("WARN", "-Wall -Wextra -Werror").split()


def usual(seconds):
    """
    Convert seconds on a usual machine to seconds on this machine under its present load. Counting
    to two million takes 0.08 s on a usual machine.
    """
    begin, n = time.monotonic(), 0
    while n < 2_000_000:
        n += 1
    return seconds * max(1, (time.monotonic() - begin) / 0.08)


def pytest_configure():
    """
    Create folders for object files and for what the page stores about a user. pytest's workers
    share them.
    """
    for name, is_set in (("OBJECTS", "OBJECTS" in os.environ),
                         ("XDG_STATE_HOME", "PYTEST_XDIST_WORKER" in os.environ)):
        if not is_set:
            os.environ[name] = tempfile.mkdtemp()
            atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)


def pytest_collection_modifyitems(items):
    """
    Run the slowest files first, in an order that `make test` keeps, so that no worker is left alone
    with one of them.
    """
    items.sort(key=lambda item: SLOWEST.index(item.path.stem)
               if item.path.stem in SLOWEST else len(SLOWEST))


@contextlib.contextmanager
def alone(path):
    """Let one of pytest's workers at a time enter; `path` is the lock file."""
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(autouse=True)
def float32_products():
    """Restore float32 products after a test, because train.py may have set another precision."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_float32_matmul_precision("highest")


def preprocessed(source, command, folder=ROOT):
    """Return a C file as the compiler's command sees it, with all that it includes."""
    return subprocess.run([*command, "-E", "-P", source], check=True, cwd=folder,
                          stdout=subprocess.PIPE).stdout


def compile_object(source, command, folder=ROOT):
    """
    Return the object of a C file. The same text is compiled once with the same command, by the
    worker that asks first.
    """
    text = preprocessed(source, command, folder)
    name = hashlib.sha256(repr(command).replace(str(folder), "").encode() + text).hexdigest()
    done = Path(os.environ["OBJECTS"], f"{name}.o")
    with alone(done.with_suffix(".lock")):
        if not done.exists():
            part = done.with_suffix(".part")
            subprocess.run([*command, "-c", source, "-o", part], check=True, cwd=folder)
            part.rename(done)
    return done


def compile_c(target, *what, standard="c11", compiler=os.environ.get("CC", "cc")):
    """
    Compile a program, or with -c an object, and return its path. The kernels of an instruction set
    are always compiled as C11, whatever `standard` is.
    """
    what, command = [str(w) for w in what], [compiler, f"-std={standard}", *WARN]
    ours = [compiler, "-std=c11", *WARN]
    if COVERAGE:  # without optimisation and sanitizers, which would change the branches
        target = Path(COVERAGE, target.name)
        what = ["--coverage", *(w for w in what
                                if not w.startswith(("-O", "-fsanitize", "-fno-sanitize")))]
        subprocess.run([*command, *what, "-o", target, "-lm", "-pthread"], check=True, cwd=ROOT)
        return str(target)
    flags = [w for w in what
             if w != "-c" and not w.endswith((".c", ".o")) and not w.startswith("-l")]
    objects = [compile_object(w, [*(ours if w in ISAS else command), *flags])
               if w.endswith(".c") else w for w in what if w.endswith((".c", ".o"))]
    if "-c" in what:
        shutil.copy(objects[0], target)
    else:
        libraries = [w for w in what if w.startswith("-l")]
        subprocess.run([compiler, *flags, *objects, "-o", target, *libraries, "-lm", "-pthread"],
                       check=True, cwd=ROOT)
    return str(target)


def compile_once(tmp_path_factory, name, *what):
    """Return the program, compiled by the first of pytest's workers that asks for it."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with alone(folder / f"{name}.lock"):
        done = folder / f"{name}.done"
        program = done.read_text() if done.exists() else compile_c(folder / name, *what)
        done.write_text(program)
    return program


@pytest.fixture(scope="session")
def run_bin(tmp_path_factory):
    return compile_once(tmp_path_factory, "run", "-O3", *PROGRAM)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """
    Return a folder, with a space in its name, with the output of `make lib`, built once for all of
    pytest's workers.
    """
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "the library"
    folder.mkdir(exist_ok=True)
    with alone(folder / "lock"):
        if not (folder / "libllamac.so").exists():
            shutil.copy(ROOT / "Makefile", folder)
            for name in "runtime", "examples":
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.o"),
                                dirs_exist_ok=True)
            subprocess.run(["make", "-s", "-C", folder, "lib", "CFLAGS=-O1"], check=True)
    return folder


@pytest.fixture(scope="session")
def library(libraries):
    """Return the path of libllamac.so, which the package llamac then loads."""
    import llamac
    llamac.PATHS[:] = [libraries / "libllamac.so"]
    llamac.library.cache_clear()
    return llamac.PATHS[0]


@pytest.fixture(scope="session")
def run_debug_bin(tmp_path_factory):
    return compile_once(tmp_path_factory, "debug", *SANITIZE, *PROGRAM)


def compile_failing(folder, program, sources):
    """Compile a program whose `sources` may fail at each call to the system (fuzz/faults.h)."""
    calling = [source for source in sources if source not in ISAS]
    objects = [Path(COVERAGE or folder, f"{Path(source).stem}.o") for source in calling]
    for source, done in zip(calling, objects):
        compile_c(folder / done.name, *SANITIZE, "-include", FUZZ / "faults.h", "-c", source,
                  standard="gnu11")
    target = folder / Path(program).stem
    return compile_c(target, *SANITIZE, program, *objects, *ISAS, standard="gnu11")


@pytest.fixture(scope="session")
def faults_bin(tmp_path_factory):
    """Return run with sanitizers, where each system call fails in turn (fuzz/faults.c)."""
    return compile_failing(tmp_path_factory.mktemp("faults"), FUZZ / "faults.c", PROGRAM)


@pytest.fixture(scope="session")
def mutate_bin(tmp_path_factory):
    """Return the fuzz targets driven by fuzz/mutate.c."""
    return compile_c(
        tmp_path_factory.mktemp("mutate") / "mutate", *SANITIZE, *FUZZED, FUZZ / "mutate.c",
        standard="gnu11")


@pytest.fixture(scope="session")
def libfuzzer_bin(tmp_path_factory):
    """
    Return the fuzz targets driven by clang's libFuzzer, which follows branches everywhere but in
    runtime/cpu. The usual compiler compiles runtime/cpu, with sanitizers: clang 14 takes minutes to
    optimise the kernels.
    """
    folder = tmp_path_factory.mktemp("libfuzzer")
    followed = ["-g", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all",
                "-Qunused-arguments"]
    objects = [folder / f"{Path(source).stem}.o" for source in FUZZED[1:]]
    for source, name in zip(FUZZED[1:], objects):
        if source in LIBRARY:
            compile_c(name, *SANITIZE, "-c", source)
        else:
            compile_c(name, "-O0", *followed, "-c", source, standard="gnu11", compiler="clang")
    return compile_c(folder / "fuzz", "-O1", *followed, FUZZED[0], *objects, standard="gnu11",
                     compiler="clang")
