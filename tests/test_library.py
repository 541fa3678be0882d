"""
The C library from outside: two models in one process, repeated opening and closing, the symbols
that it exports, and the examples.
"""
import contextlib
import re
import shutil
import socket
import subprocess
import time

import pytest

from tests.conftest import LIBRARY, ROOT, SANITIZE, compile_c, compile_failing
from tests.test_run import Model, run, two_models


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compile_c(
        tmp_path_factory.mktemp("library") / "library", *SANITIZE, "tests/library.c", *LIBRARY)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return two_models(tmp_path_factory.mktemp("models"))


def call(*command):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_two_models_used_by_threads_write_their_own_texts(program, models):
    call(program, "twice", *models)


def test_a_thousand_opens_and_closes_leak_nothing(program, models):
    call(program, "often", models[0], 1000)


def test_mistakes_are_answered_in_one_line(program, models):
    said = call(program, "wrong", models[0]).splitlines()
    assert len(said) == 89 and all(re.fullmatch("[ -~]{5,}", line) for line in said), said
    assert "room for" in said[1]
    assert "outside the vocabulary" in said[4]
    assert "no such file" in said[9]
    assert "temperature is nan" in said[13]
    assert "temperature is -1" in said[14]
    assert "top-p is nan" in said[15]
    assert "is longer" in said[16]


def test_logits_and_errors_stay_what_they_were(program, models):
    """Sampling reads the logits, a mistake changes nothing, and a success empties the error."""
    call(program, "again", models[0])


def test_a_batch_has_the_logits_that_each_sequence_has_alone(program, models):
    """
    The logits are equal to the last bit. The batches hold one to three tokens of each sequence, in
    both orders, and the sequences share a beginning.
    """
    for model in models:
        call(program, "batch", model)


def test_every_call_to_the_system_may_fail_once(models, tmp_path_factory, tmp_path):
    """A call that fails reports it and can be repeated, with the same logits. Nothing leaks."""
    program = compile_failing(tmp_path_factory.mktemp("failures"), "tests/failures.c", LIBRARY)
    assert int(call(program, models[0], tmp_path)) > 60
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_sampling_after_every_token_of_a_batch(program, models):
    """Sampling gives the same result as after the same tokens alone; wrong calls are refused."""
    for model in models:
        said = call(program, "at", model).splitlines()
        assert all(re.fullmatch("[ -~]{5,}", line) for line in said), said
        for line, words in zip(said, (
                "engine is NULL", "sampler is NULL", "no logits of token -1",
                "no logits of token 18", "no logits of token 0", "temperature is -1", "8 bytes",
                "was freed"), strict=True):
            assert words in line


def test_a_program_compiled_with_fewer_fields(program, models):
    call(program, "older", models[0])


def test_errors_name_the_file(program, models, tmp_path):
    said = call(program, "wrong", models[0])
    assert said.count("no such file: no such file\n") == 3
    assert f"{models[0]}: it has no checksum" in said
    assert f"{models[0]}: the first token" not in said and f"{models[0]}: flags are" in said


def test_only_the_interface_is_exported(libraries):
    declared = set(re.findall(r"LLAMAC_API [^;(]*?\b(llamac_\w+)\(",
                              (ROOT / "runtime/llamac.h").read_text()))
    for file, flags in ("libllamac.so", ["-D"]), ("libllamac.a", ["-g"]):
        listed = call("nm", *flags, "--defined-only", libraries / file).splitlines()
        assert {line.split()[2] for line in listed if len(line.split()) == 3} == declared


def test_clean_removes_what_was_built(tmp_path):
    """`make clean` removes nothing else: runs, caches and sources stay."""
    built = ["run", "run-debug", "runcuda", "libllamac.a", "libllamac.so", "cache/lib/llamac.o",
             "cache/cuda/run.o"]
    kept = ["run.c", "my.o", "runs", "out/my/model.gguf", "cache/stories/train.bin",
            ".venv/bin/python"]
    for name in built + kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    shutil.copy(ROOT / "Makefile", tmp_path)
    call("make", "-s", "-C", tmp_path, "clean")
    assert {str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file()} == {
        "Makefile", *kept}


def test_there_is_no_static_state(libraries):
    """The library has no writable static data: models, engines and sequences hold all state."""
    sections = dict(re.findall(r"^(\.(?:bss|data|tbss|tdata))\s+(\d+)",
                               call("size", "-A", libraries / "libllamac.a"), re.M))
    assert sections and set(sections.values()) == {"0"}, call(
        "objdump", "-t", libraries / "libllamac.a")


def compile_example(libraries, folder, name):
    call("cc", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/runtime",
         ROOT / f"examples/{name}.c", libraries / "libllamac.a", "-lm", "-pthread", "-o",
         folder / name)
    return folder / name


def test_the_example_writes_what_run_writes(libraries, models, run_bin, tmp_path):
    embed = compile_example(libraries, tmp_path, "embed")
    unmarked, model = models[0].with_name("no_bos.gguf"), Model(heads=8, kv=2, tied=False)
    model.pieces[-1] = ("x" * 100, model.pieces[-1][1])
    model.write_gguf(unmarked, **{"tokenizer.ggml.add_bos_token": False})
    for path in models[0], unmarked:
        text = subprocess.run([embed, path, "One"], capture_output=True).stdout.removesuffix(b"\n")
        written = run(run_bin, path, "-t", 0, "-n", 0, "--raw", "-i", "One").removesuffix(b"\n")
        assert (b"One" + text).startswith(written)
        assert len(written) > 50  # without BOS, run stops at the last position
    refused = subprocess.run([embed, "none.gguf", "One"], capture_output=True, text=True)
    assert refused.returncode == 1
    assert refused.stderr == "embed MODEL TEXT: none.gguf: no such file\n"


def test_make_lib_works_in_a_folder_with_a_space(libraries):
    assert " " in libraries.name
    assert (libraries / "libllamac.so").exists()
    assert (libraries / "libllamac.a").exists()


def test_texts_in_a_batch_are_what_run_writes(libraries, models, run_bin, tmp_path):
    batch, prompts = (compile_example(libraries, tmp_path, "batch"),
                      ["One", "The cat sat on a mat", "A", "One"])
    for path in models:
        said = subprocess.run([batch, path, *prompts], capture_output=True).stdout
        for prompt in prompts:
            alone = run(run_bin, path, "-t", 0, "-n", 0, "--raw", "-i", prompt).removesuffix(b"\n")
            assert said.startswith(alone) and len(alone) > 50
            said = said[said.index(b"\n", len(alone)) + 1:] if b"\n" in said[len(alone):] else b""
        assert not said
    for arguments, words in ((["none.gguf", "A"], "none.gguf: no such file"),
                             ([models[0]], "1 to 16 texts"),
                             ([models[0], "A" * 300], "position 128")):
        done = subprocess.run([batch, *arguments], capture_output=True, text=True)
        assert done.returncode == 1 and words in done.stderr and done.stdout == ""


def post(port, body, length="content-length: {}"):
    """Return a socket that has sent a request in two pieces."""
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    request = (f"POST / HTTP/1.1\r\nHost: localhost\r\n{length.format(len(body))}\r\n\r\n"
               f"{body}").encode()
    client.sendall(request[:20])
    client.sendall(request[20:])
    return client


def answer(client):
    """Return what the server sends until it closes the connection."""
    with client:
        found = b"".join(iter(lambda: client.recv(4096), b""))
    head, _, text = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 OK") == bool(found)
    return text


def test_a_server_answers_several_clients_at_once(libraries, models, run_bin, tmp_path):
    """
    Each client receives the text that run writes. Clients that leave or send bad requests do not
    disturb the others.
    """
    server = compile_example(libraries, tmp_path, "server")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([server, models[0], str(port)])
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.05)
        prompts = [f"One{n}" * (1 + n % 5) for n in range(24)]  # more than the server takes at once
        clients, texts = [], []
        for n, prompt in enumerate(prompts):
            clients.append(post(port, prompt))
            if n % 6 == 0:
                post(port, "Gone").close()
            if n % 6 == 1:
                assert not answer(
                    post(port, "A", f"Content-Length: {(0, -1, 1 << 20, 'x')[n // 6]}"))
        for prompt, client in zip(prompts, clients):
            texts.append(prompt.encode() + answer(client))
            assert texts[-1].startswith(run(run_bin, models[0], "-t", 0, "-n", 0, "--raw",
                                            "-i", prompt).removesuffix(b"\n"))
        assert sum(map(len, texts)) > 40 * len(texts)
        assert not answer(post(port, "A" * 500))  # longer than the context
        assert process.poll() is None
        (opened := socket.create_connection(
            ("127.0.0.1", port), timeout=60)).sendall(b"POST / HTTP/1.1\r\n")
        assert not answer(opened)  # the request is incomplete
    finally:
        process.kill()
        process.wait()


def test_a_server_without_files_for_connections_goes_on(libraries, models, tmp_path):
    """
    accept() fails while the limit on open files is reached. No client's place is lost, and the
    next requests are answered.
    """
    server = compile_example(libraries, tmp_path, "server")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # 8 files: 3 standard streams, the listening socket and perhaps the model
    process = subprocess.Popen(["prlimit", "--nofile=8", server, models[0], str(port)])
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.05)
        expected = answer(post(port, "One"))
        for _ in range(3):
            assert [answer(client) for client in [post(port, "One") for _ in range(20)]] == [
                expected] * 20
        assert expected and process.poll() is None
    finally:
        process.kill()
        process.wait()
