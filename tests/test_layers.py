"""
Layers of imports that import-linter cannot check: it knows packages, and the top layer is single
files. `make lint` checks the layers inside engine/.
"""
import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
           for pattern in ("*.py", "engine/**/*.py", "page/*.py") for path in ROOT.glob(pattern)}


def imports(module):
    """Return the modules of the project that a module imports, anywhere in its source."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found & MODULES.keys()


def reached(module):
    """Return all modules that a module imports, directly or through others."""
    found, todo = set(), [module]
    while todo:
        new = imports(todo.pop()) - found
        found |= new
        todo += new
    return found


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_module_imports_itself_by_way_of_others(module):
    assert module not in reached(module)


@pytest.mark.parametrize("module, allowed", [
    ("tokenizer", {"configurator"}), ("configurator", set())])
def test_what_engine_imports_of_the_top_floor_stands_on_little(module, allowed):
    below = {"engine", "engine.streams", "engine.files", "engine.advice", "engine.untrusted",
             "engine.system"}
    assert reached(module) <= allowed | below
