"""
Build one self-contained HTML file that runs a model: browser/page.html with the WebAssembly module
and a GGUF file embedded.
"""
import base64
import html
from pathlib import Path
from string import Template

from configurator import fail

ROOT = Path(__file__).resolve().parents[2]
BROWSER = ROOT / "browser"
MODULE = BROWSER / "llamac.wasm"
# Max bytes of a model. The page contains it as one string in base64, which is 4/3 as long; browsers
# allow strings of up to 512 MiB.
MAX_BYTES = 383 << 20
# The comment at the top of page.html begins with this; export.py recognizes its own pages by it.
MARK = b"<!-- Written by export.py: llamac.wasm"


def program():
    """Return the WebAssembly module. Exit with a message if it has not been compiled."""
    if not MODULE.exists():
        fail(f"{MODULE.relative_to(ROOT)} is missing, the WebAssembly module of the page; "
             "run `make wasm`")
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
        worker=text(BROWSER / "llamac.js") + ";\n" + text(BROWSER / "worker.js"),
        page=text(BROWSER / "page.js"),
        program=base64.b64encode(module).decode(),
        model=base64.b64encode(model).decode(),
    ).encode()
