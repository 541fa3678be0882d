"""
The view "Look inside": what a checkpoint computes for a text.

A separate process computes it and then exits, so that the page neither keeps PyTorch in memory nor
crashes on a broken checkpoint. sample.py writes the same view to a file.
"""
import json
import re
import subprocess
import sys
from pathlib import Path

from engine.tracking.runs import first_prompt
from page.programs import ClientGone, OneAtATime
from page.server import Response, as_download
from page.talk import model_files

MAX_SECONDS = 120  # time limit of the process
MAX_TEXT = 20_000  # max characters of a text
FOLDER = Path(__file__).parent
# Template of the file to save, which works without a server and without other files.
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy"
content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<title>Look inside</title><style>{style}</style><body><main id="main"></main>
<script type="application/json" id="data">{data}</script>
<script type="module">{view}
const data = JSON.parse(document.getElementById("data").textContent)
draw(document.getElementById("main"), data)</script>
"""


def is_page_of_ours(path):
    """Return whether `html` made this file."""
    with open(path, "rb") as f:
        return PAGE.partition("<style>")[0].encode() in f.read(1000)


def html(data):
    """
    Return an HTML file with the view and its data. data: the result of inside.describe(); each `<`
    in it is escaped, so that no text can close the script element.
    """
    style, dom, look = ((FOLDER / name).read_text(encoding="utf-8")
                        for name in ("style.css", "dom.js", "look.js"))
    data = json.dumps(data).replace("<", "\\u003c")
    view = dom + re.sub(r"^import .*\n", "", look, flags=re.M)  # its only import is dom.js
    return PAGE.format(style=style, view=view, data=data)


class Inside:
    """The routes for the model files and checkpoints of the runs."""

    def __init__(self, runs):
        self.runs = runs
        self.programs = OneAtATime()

    def routes(self):
        return {"GET /api/inside": self.list, "POST /api/inside": self.look,
                "POST /api/inside.html": self.file}

    def paths(self):
        """Return {name: path} of the model files and checkpoints of all runs."""
        found = model_files(self.runs)
        for name, run in list(self.runs.runs.items()):
            steps = sorted(Path(run.folder, "checkpoints").glob("step_*[0-9]"))
            found |= {f"{name}/{path.name}": path for path in steps}
        return found

    def list(self, request):
        """Return {"models": [name, ...], "prompts": {run: the first prompt of its samples}}."""
        prompts = {name: first_prompt(run.config) for name, run in list(self.runs.runs.items())}
        known = {name: prompt for name, prompt in prompts.items() if prompt}
        return {"models": list(self.paths()), "prompts": known}

    def data(self, request):
        """
        Return what engine/debug/inside.py describes for the request {"model", "text"}, as JSON in
        bytes. Raises ValueError.
        """
        body, paths = request.json(), self.paths()
        name, text = body.get("model"), body.get("text")
        if not isinstance(name, str) or name not in paths:
            raise ValueError(f"there is no model {str(name)[:200]!r}")
        if not isinstance(text, str) or len(text) > MAX_TEXT:
            raise ValueError(f"expected a text of at most {MAX_TEXT} characters")
        command = ["-m", "page.inside", str(paths[name].resolve()), name]
        try:
            code, found, stderr = self.programs.run(
                command, MAX_SECONDS, request.gone, data=text.encode("utf-8", "replace"),
                stderr=subprocess.PIPE, cwd=FOLDER.parent)
        except subprocess.TimeoutExpired as e:
            raise ValueError(f"{name}: no result within {MAX_SECONDS} s") from e
        except ClientGone as e:
            raise ValueError("the client has closed the connection") from e
        if code:
            lines = stderr.decode(errors="replace").splitlines() or ["the process was killed"]
            raise ValueError(lines[-1].removeprefix("error: "))
        return found

    def look(self, request):
        return Response(self.data(request))

    def file(self, request):
        content = html(json.loads(self.data(request)))
        return Response(content, kind="text/html", headers=as_download("inside.html"))


def main(path, name):
    """Run in the separate process: read the text from stdin, and print the JSON to stdout."""
    from engine.debug import inside
    from engine.training.load import load_model
    text = sys.stdin.buffer.read().decode("utf-8", "replace")
    model, vocabulary = load_model(path, "", "cpu")
    print(json.dumps(inside.describe(model, vocabulary, text, name)))


if __name__ == "__main__":
    main(*sys.argv[1:])
