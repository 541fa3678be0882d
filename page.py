"""
The page: start trainings, follow and compare them, look into models and talk to them, from a browser.

    python page.py                    the runs in out; open the address it prints
    python page.py RUNS --port=9000   those in another folder
    ssh -L 8765:localhost:8765 HOST   then the same address here, for a page on another machine

The page reads the runs' own folders and needs no account. Trainings it starts are processes of their own: they go on when
the page ends, and the next page finds them. Whoever has the address can start programs and read files as you: keep it.
"""
import importlib.util
import os
import signal
import sys
from pathlib import Path

from configurator import configure, fail
from page.inside import Inside
from page.jobs import Jobs
from page.programs import end_all
from page.runs import Runs
from page.server import Response, Server, file, files, is_loopback
from page.system import system
from page.talk import Talk, models_of

runs = "out"         # the folder of runs
host = "127.0.0.1"   # who reaches the page: this machine alone; 0.0.0.0: everybody who knows the address, unencrypted
port = 8765          # of the address; 0: any that is free


def routes():
    """All there is. The runs are found in their folder; jobs.py has the trainings that were started here."""
    if os.path.exists(runs) and not os.path.isdir(runs):
        fail(f"{runs}: is not a folder; expected a folder of runs")
    found = Runs(runs)
    found.look()  # so that the first picture waits for nothing
    try:
        jobs = Jobs(found)
    except BlockingIOError:
        fail(f"another page serves {runs}; open its address, or end it first")
    except OSError as e:
        fail(f"{e.filename or found.own}: cannot be written ({e.strerror}); the queue and the notes stand there: set "
             f"XDG_STATE_HOME to a folder of your own")
    foreign = Path(runs, ".page/jobs.json")
    if os.path.lexists(foreign):
        print(f"note: {foreign} is left alone: a queue in a folder of runs is not started; yours stands in {found.own}",
              file=sys.stderr)
    found.extra = lambda: jobs.state() | {"system": system()}
    talk, inside = Talk(lambda: models_of(found)), Inside(found)
    return (files(Path(__file__).with_name("page")) | charts() | found.routes() | jobs.routes() | talk.routes()
            | inside.routes())


def charts():
    """The route of the library that draws, which is an extra: pip install bokeh. Without it curves are plain lines."""
    found = importlib.util.find_spec("bokeh")
    path = Path(found.origin).parent / "server/static/js/bokeh.min.js" if found else Path()
    kept = {"Cache-Control": "private, max-age=3600"}
    return {"GET /bokeh.js": file(path, **kept) if path.is_file() else lambda request: Response("", kind="text/javascript")}


def main():
    try:
        server = Server(host, port, routes())
    except (OSError, OverflowError) as e:
        fail(f"--host={host} --port={port}: cannot be listened on ({e}); --port=0 takes any that is free")
    if not is_loopback(host):
        print("warning: other machines reach this page, and nothing is encrypted; ssh -L is safer", file=sys.stderr)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"page: {server.url()}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("the page has ended; trainings go on")
    finally:
        end_all()


if __name__ == "__main__":
    configure(globals(), positional="runs")
    main()
