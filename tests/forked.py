"""
Run Python programs as separate processes that have torch from the start. They are forked from a
process that has imported it, because the import takes longer than a tiny training. The call is like
that of subprocess.run:

    done = forked.run([ROOT / "train.py", "--max_iters=2"], cwd=folder, env=environment)
"""
import array
import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def serve(address, program):
    """Call program(argv) for each client, each time in a separate process."""
    import safetensors.torch  # noqa: F401
    import sentencepiece  # noqa: F401
    import torch
    import torch._dynamo  # this module and the next one are for processes that share a model
    import torch.distributed.fsdp
    import torch.distributed.run  # noqa: F401
    import tqdm  # noqa: F401
    gc.collect()
    gc.freeze()  # the garbage collections of the processes skip these objects
    # Our own modules are compiled only once.
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(Path(address).parent / "compiled")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        print("ready", flush=True)
        while True:
            client, _ = server.accept()
            if not os.fork():
                server.close()
                return answer(client, program)
            client.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def answer(client, program):
    """
    Fork once more, in the child of serve(). The new child is the program, with the client's files,
    folder and environment; its parent sends the exit code to the client.
    """
    size, ancillary, _, _ = client.recvmsg(4, 1024)
    files = array.array("i", ancillary[0][2])
    message = b""
    while len(message) < int.from_bytes(size, "big"):
        message += client.recv(1 << 16)
    argv, folder, environment = json.loads(message)
    child = os.fork()
    if child:
        client.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
        os._exit(0)
    client.close()
    for target, file in enumerate(files):
        os.dup2(file, target)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return end_with(program, argv)


def end_with(program, argv):
    """
    Call program(argv) and end as Python does, but free nothing: that would take a quarter of a
    second, and a tiny training takes one second.
    """
    code = 0
    try:
        program(argv)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def forget():
    """Forget our own modules, so that the program imports those beside it."""
    for name in [name for name in sys.modules
                 if name.partition(".")[0] in ("configurator", "engine", "tests")]:
        del sys.modules[name]


def script(argv):
    """Do what `python argv[0] argv[1] ...` does."""
    forget()
    sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
    runpy.run_path(argv[0], run_name="__main__")


@functools.lru_cache
def server():
    """Start a server of this process, which ends with it, and return its address."""
    folder = tempfile.TemporaryDirectory()
    address = str(Path(folder.name, "socket"))
    process = subprocess.Popen([sys.executable, "-m", "tests.forked", address], cwd=ROOT,
                               stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.stdout.readline()
    atexit.register(lambda: (process.terminate(), process.wait(), folder.cleanup()))
    return address


def run(argv, cwd, env):
    """Run a program with one thread and an empty stdin. Return a CompletedProcess with text."""
    argv = [str(word) for word in argv]
    with (tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err,
          socket.socket(socket.AF_UNIX) as s, open(os.devnull) as nothing):
        s.connect(server())
        message = json.dumps([
            argv, str(cwd), {name: str(value) for name, value in env.items()}]).encode()
        files = array.array("i", [nothing.fileno(), out.fileno(), err.fileno()])
        s.sendmsg([len(message).to_bytes(4, "big")],
                  [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        s.sendall(message)
        code = int(s.recv(16) or 1)
        said = []
        for f in out, err:
            f.seek(0)
            said.append(f.read().decode().replace("\r\n", "\n"))
        return subprocess.CompletedProcess(argv, code, *said)


if __name__ == "__main__":
    serve(sys.argv[1], script)
