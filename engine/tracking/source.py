"""Record which version of this program a run uses: the git commit and the diff from it."""
import contextlib
import subprocess
from pathlib import Path

from engine.files import replacing
from engine.tracking.redact import redact

ROOT = Path(__file__).resolve().parents[2]  # folder of the program


def git(*words):
    """
    Return the bytes that a git command prints about the program's folder. Raises OSError or
    SubprocessError.
    """
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, timeout=5,
                          check=True).stdout


def git_remote():
    """Return the address of the program's repository without a token in it, or None."""
    try:
        return redact(git("remote", "get-url", "origin").decode(errors="replace").strip())
    except (OSError, subprocess.SubprocessError):
        return None


def source_version():
    """Return {"git_commit", "git_changed": whether files differ from it}; {} if git fails."""
    try:
        commit = git("rev-parse", "HEAD").decode().strip()
        return {"git_commit": commit, "git_changed": bool(git("diff", "--stat", "HEAD"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def keep_diff(out_dir, config):
    """
    Write out_dir/diff.patch if the program differs from the commit in the configuration, unless git
    fails. The options override the user's git settings, and all bytes except secrets are kept, so
    that `git apply` accepts the file.
    """
    if config.get("git_changed"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            diff = git("diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD")
            text = redact(diff.decode(errors="surrogateescape"))
            with replacing(Path(out_dir, "diff.patch")) as f:
                f.write(text.encode(errors="surrogateescape"))
