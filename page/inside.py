"""
Look inside: what a checkpoint does with a text. It is computed in a process of its own, which ends with the answer, so that
neither PyTorch's memory nor a broken checkpoint stays with the page. The same view stands in the file that sample.py writes.
"""
import json
import subprocess
import sys
from pathlib import Path

from page.programs import Gone, OneAtATime
from page.server import Response, as_file
from page.talk import models_of

SECONDS = 120   # that one look may take
MOST_TEXT = 20_000
FOLDER = Path(__file__).parent
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy"
content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<title>Look inside</title><style>{style}</style><body><main id="main"></main>
<script type="application/json" id="data">{data}</script>
<script type="module">{view}
draw(document.getElementById("main"), JSON.parse(document.getElementById("data").textContent))</script>
"""


def html(data):
    """One file with the view and its data, in which no text can end the script: < is written as an escape."""
    style, dom, look = ((FOLDER / name).read_text(encoding="utf-8") for name in ("style.css", "dom.js", "look.js"))
    view = dom + look.replace('import { h, select, table } from "./dom.js"\n', "")
    return PAGE.format(style=style, view=view, data=json.dumps(data).replace("<", "\\u003c"))


class Inside:
    """What can be looked into: the model files and checkpoints of the runs."""

    def __init__(self, runs):
        self.runs, self.turns = runs, OneAtATime()

    def routes(self):
        return {"GET /api/inside": self.list, "POST /api/inside": self.look, "POST /api/inside.html": self.file}

    def paths(self):
        found = models_of(self.runs)
        for name, run in list(self.runs.runs.items()):
            found |= {f"{name}/{path.name}": path for path in sorted((Path(run.folder) / "checkpoints").glob("step_*[0-9]"))}
        return found

    def list(self, request):
        return {"models": list(self.paths())}

    def data(self, request):
        """The JSON of engine/debug/inside.py for {"model", "text"}. ValueError: what is wrong, in a line."""
        asked, paths = request.json(), self.paths()
        name, text = asked.get("model"), asked.get("text")
        if not isinstance(name, str) or name not in paths:
            raise ValueError(f"there is no model {str(name)[:200]!r}")
        if not isinstance(text, str) or len(text) > MOST_TEXT:
            raise ValueError(f"expected a text of at most {MOST_TEXT} characters")
        command = ["-m", "page.inside", str(paths[name].resolve()), name]
        try:
            code, found, said = self.turns.run(command, SECONDS, request.gone, data=text.encode("utf-8", "replace"),
                                               stderr=subprocess.PIPE, cwd=FOLDER.parent)
        except subprocess.TimeoutExpired as e:
            raise ValueError(f"{name}: nothing was found within {SECONDS} s") from e
        except Gone as e:
            raise ValueError("nobody waits for this any more") from e
        if code:
            lines = said.decode(errors="replace").splitlines() or ["the process was ended"]
            raise ValueError(lines[-1].removeprefix("error: "))
        return found

    def look(self, request):
        return Response(self.data(request))

    def file(self, request):
        return Response(html(json.loads(self.data(request))), kind="text/html",
                        headers=as_file("inside.html"))


def main(path, name):
    """The process: the text comes by stdin, the JSON goes to stdout."""
    from engine.debug import inside
    from engine.training.load import load_model
    text = sys.stdin.buffer.read().decode("utf-8", "replace")
    model, vocabulary = load_model(path, "", "cpu")
    print(json.dumps(inside.describe(model, vocabulary, text, name)))


if __name__ == "__main__":
    main(*sys.argv[1:])
