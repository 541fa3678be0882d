"""One HTML file that runs a model: browser/page.html with the program and a GGUF file inside."""
import base64
import html
from pathlib import Path
from string import Template

from configurator import fail

ROOT = Path(__file__).resolve().parents[2]
BROWSER = ROOT / "browser"
MODULE = BROWSER / "llamac.wasm"
MAX_BYTES = 384 << 20  # of a model: a browser's strings hold 512 MiB, and base64 adds a third
MARK = b"<!-- Written by export.py: llamac.wasm"


def program():
    """Return the WebAssembly module. Exit with a message if it has not been compiled."""
    if not MODULE.exists():
        fail(f"{MODULE.relative_to(ROOT)} is missing, the program of the page: run `make wasm`")
    return MODULE.read_bytes()


def is_page_of_ours(path):
    """Return whether export.py wrote this HTML file."""
    with open(path, "rb") as f:
        return MARK in f.read(200)


def page(name, facts, module, model):
    """
    Return the HTML file in bytes. name, facts: the title and a line about the model; module, model:
    bytes of llamac.wasm and of a GGUF file.
    """
    def text(path):
        return path.read_text(encoding="utf-8")

    return Template(text(BROWSER / "page.html")).substitute(
        name=html.escape(name),
        facts=html.escape(facts),
        style=text(ROOT / "page" / "style.css"),
        worker=text(BROWSER / "llamac.js") + text(BROWSER / "worker.js"),
        page=text(BROWSER / "page.js"),
        program=base64.b64encode(module).decode(),
        model=base64.b64encode(model).decode(),
    ).encode()
