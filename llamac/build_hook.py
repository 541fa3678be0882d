"""
The build hook that `pip install .` runs through hatchling (pyproject.toml): it compiles runtime/
into a library inside the package.

The environment variable CC names the compiler. The default is cc; on Windows, it is the compiler of
the PyPI package ziglang, because Microsoft's cannot compile runtime/. CFLAGS replaces -O3, as in
the Makefile.
"""
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = "llamac.dll" if sys.platform == "win32" else "libllamac.so"  # as in llamac/__init__.py


def words(variable, default):
    """Return the words of an environment variable, `default` if it is unset or empty."""
    text = os.environ.get(variable, "")
    return shlex.split(text, posix=sys.platform != "win32") or default


def build_library(root, path):
    """Compile the sources in root/runtime into a shared library at `path`. Exit if that fails."""
    sources = sorted(str(p.relative_to(root)) for p in [*root.glob("runtime/*.c"),
                                                        *root.glob("runtime/cpu/*.c")])
    zig = [sys.executable, "-m", "ziglang", "cc"]
    command = [*words("CC", zig if sys.platform == "win32" else ["cc"]), *words("CFLAGS", ["-O3"]),
               "-fPIC", "-fvisibility=hidden", "-shared", "-o", str(path), *sources, "-lm",
               "-pthread"]
    try:
        code = subprocess.run(command, cwd=root).returncode
    except OSError as e:
        sys.exit(f"error: the C compiler {command[0]} cannot be started ({e.strerror}); install "
                 "one, or name it in the environment variable CC")
    if code:
        sys.exit(f"error: the C compiler ended with code {code}: {shlex.join(command)}")


class LibraryHook(BuildHookInterface):
    """Adds the library to a wheel, and tags the wheel for one platform and any Python 3."""

    def initialize(self, version, build_data):
        """
        Compile the library. version: "editable" for `pip install -e .`: the library is then written
        to the checkout, from where the package is loaded. build_data: hatchling's settings of this
        build, which this method changes.
        """
        root = Path(self.root)
        platform = self.build_config.builder.get_best_matching_tag().rpartition("-")[2]
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{platform}"
        if version == "editable":
            build_library(root, root / NAME)
            return
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name, NAME)
        build_library(root, path)
        build_data["force_include"][str(path)] = f"llamac/{NAME}"

    def finalize(self, version, build_data, artifact_path):
        """Remove the folder in which the library was compiled."""
        if version != "editable":
            self.folder.cleanup()
