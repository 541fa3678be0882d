"""
Serve a web page to start, follow and compare trainings, look inside models and talk to them.

    python page.py                    show the runs in out/; open the address that it prints
    python page.py RUNS --port=9000   show the runs in another folder, on another port
    python page.py --serve=out/my     serve one model to other programs, without a page
    ssh -L 8765:localhost:8765 HOST   make the address of a page on HOST work on this machine

The page reads the runs' folders and needs no account. It starts each training as a separate
process, which continues when the page ends and which the next page finds. Keep the address private:
whoever has it can start programs and read files as you.
"""
import importlib.util
import os
import signal
import sys
from pathlib import Path

from configurator import configure, fail
from page.embeddings import Embeddings
from page.inside import Inside
from page.jobs import Jobs
from page.programs import end_all
from page.run_api import RunApi
from page.runs import Runs
from page.server import Response, Server, file_route, file_routes, is_loopback
from page.system import system
from page.talk import Talk, model_files

runs = "out"         # folder of runs
host = "127.0.0.1"   # address to listen on; 127.0.0.1 serves only this machine;  0.0.0.0 serves all
                     # networks, unencrypted
port = 8765          # port to listen on; 0: any free port
serve = ""           # a run's folder or a model file: serve only OpenAI's API with this model, /v1;
                     # a client can neither start trainings nor see runs


def routes():
    """Return all routes of the page. End the program if the page can't be served."""
    if os.path.exists(runs) and not os.path.isdir(runs):
        fail(f"{runs}: is not a folder; expected a folder of runs")
    all_runs = Runs(runs)
    all_runs.search()  # so that the first request does not wait for it
    try:
        jobs = Jobs(all_runs)
    except BlockingIOError:
        fail(f"another page serves {runs}; open its address, or end it first")
    except OSError as e:
        fail(f"{e.filename or all_runs.state}: cannot be read or written ({e.strerror}); the page "
             f"keeps its queue and notes there: set XDG_STATE_HOME to a folder of your own")
    # Earlier versions kept the queue here. It may be another person's, if they made the folder.
    foreign = Path(runs, ".page/jobs.json")
    if os.path.lexists(foreign):
        print(f"note: {foreign} is ignored: a queue in a folder of runs is not started; your queue "
              f"is in {all_runs.state}", file=sys.stderr)
    talk = Talk(lambda: model_files(all_runs))
    apis = (RunApi(all_runs, lambda: jobs.list() | {"system": system()}), jobs, talk,
            Embeddings(talk), Inside(all_runs))
    found = file_routes(Path(__file__).with_name("page")) | {"GET /bokeh.js": bokeh_route()}
    for api in apis:
        found |= api.routes()
    return found


def model_routes():
    """Return the routes of the API alone, with one model. End the program if it can't be used."""
    path = Path(serve, "model.gguf") if os.path.isdir(serve) else Path(serve)
    talk = Talk(lambda: {serve: path})
    try:
        talk.load(serve).sequence_cache()  # start the engine now, not with the first request
    except (ValueError, RuntimeError) as e:
        fail(f"--serve: {e}")
    return talk.routes() | Embeddings(talk).routes()


def bokeh_route():
    """Return the handler that sends Bokeh's script, or an empty one if Bokeh is not installed."""
    package = importlib.util.find_spec("bokeh")
    if package:
        path = Path(package.origin).parent / "server/static/js/bokeh.min.js"
        if path.is_file():
            return file_route(path, **{"Cache-Control": "private, max-age=3600"})
    return lambda request: Response("", kind="text/javascript")


def main():
    try:
        server = Server(host, port, model_routes() if serve else routes())
    except (OSError, OverflowError) as e:
        fail(f"--host={host} --port={port}: cannot listen there ({e}); --port=0 takes a free port")
    if not is_loopback(host):
        print("warning: other machines can reach this page, and nothing is encrypted; ssh -L is "
              "safer", file=sys.stderr)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the page like Ctrl-C
    if serve:
        address, _, key = server.url().partition("/?token=")
        print(f"API: {address}/v1 with the key {key} and the model {serve}", flush=True)
    else:
        print(f"page: {server.url()}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("the API has ended" if serve else "the page has ended; trainings go on")
    finally:
        end_all()


if __name__ == "__main__":
    configure(globals(), positional="runs")
    main()
