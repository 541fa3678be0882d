"""
Checkpoints that survive whatever stops the writer. A checkpoint is a folder

    out/my/checkpoints/step_00001000/
        model.pt          {"args": ModelArgs as a dict, "model": {name: parameter}, a shared one once, "chat": GGUF's
                          metadata about chats, of a fine-tuned model}
        train.pt          {"optimizer": state_dict, "state": step, tokens, best loss, tracker run id, ...}
        config.json       the resolved configuration of the run
        tokenizer.*       the vocabulary, so that a checkpoint is enough to sample from and to export
        checkpoint.json   version, step, size and sha256 of every file above; its presence means: complete

written under a temporary name, synced to disk, and published by one atomic rename. `latest` and `best` in
out/my are small files that name a step folder. Loading is weights_only: a checkpoint can't run code.

`out/my/trainer.json` marks the folder as a run's and says who trains in it; that process holds a lock on the file. Without
the mark, and under other names than those in OURS, nothing is removed, renamed or overwritten: it is the user's.

Processes that share a model out (FSDP2) never hold it whole. Each writes its slices as shard-*.safetensors, by
torch.distributed.checkpoint, in place of "model" and "optimizer" above. Its own file format would do the same, but has
an index that is a pickle, which could run code; safetensors is tensors under a JSON header.
"""
import atexit
import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch

from configurator import convert, fail
from engine.training import distributed
from engine.advice import hub
from engine.files import read_json, sha256, to_disk, why, write_atomic
from engine.tracking.redact import HIDDEN, redact
from engine.untrusted import (MAX_JSON, MAX_SETTINGS, is_plain_name, load_torch, open_untrusted, parse_json, read_json_file,
                              read_untrusted, reading)

VERSION = 2
MARK = "trainer.json"
# what a trainer writes into its out_dir, and into a checkpoint's folder
OURS = ("log.jsonl", "config.json", "wandb.json", "diff.patch", "evaluation.json", "tensorboard", "swanlab", "model.gguf",
        "last.gguf", "latest", "best")
PARTS = re.compile(r"(model|train)\.pt|(config|checkpoint)\.json|tokenizer\.\w+|shard-.*\.safetensors")
STEP = re.compile(r"step_\d{8,}(\.damaged\d*)?")
held = None  # the open MARK of the folder that this process trains in


def fingerprint(path):
    """What the manifest says of a file."""
    return [path.stat().st_size, sha256(path)]


def save(out_dir, step, model, train, config, tokenizer, metric=math.inf, keep_last=1, keep_best=1):
    """
    Publish out_dir/checkpoints/step_N and return it. model, train: dicts of tensors and plain values; config: a dict
    for JSON; tokenizer: path of the vocabulary file; metric: what `best` is the least of, inf where it was not
    measured. Then all go but the newest keep_last (0: all stay), the keep_best with the least metric, and that to which
    early_stop would go back. Raises OSError when the disk fails, MemoryError or RuntimeError when memory runs out; what was
    there before is then untouched. Where "model" is sharded, all processes call this.
    """
    folder, final = Path(out_dir, "checkpoints"), step_folder(out_dir, step)
    temporary = folder / f".tmp_{step:08d}"
    try:
        files = {}
        if any(map(distributed.is_shard, model.get("model", {}).values())):
            files = write_shards(temporary, out_dir, {"model": model["model"], "optimizer": train["optimizer"]})
            model, train = ({k: v for k, v in part.items() if k not in ("model", "optimizer")} for part in (model, train))
        if not distributed.master:
            return final
        if not files:
            begin(temporary, out_dir)
        write(temporary, files, step, model, train, config, tokenizer, metric)
        if final.exists():  # saved twice: before and after the evaluation of a stop
            remove(final)
        os.rename(temporary, final)
    except BaseException:
        if final.exists() or damage(temporary):  # else it is whole and the only one of this step: `finish` publishes it
            discard(temporary)
        raise
    to_disk(folder)
    write_atomic(Path(out_dir, "latest"), final.name)
    ranked = by_metric(out_dir)
    if ranked:
        write_atomic(Path(out_dir, "best"), ranked[0].name)
    back = train.get("state", {}).get("best_due", [math.inf, None])[1]
    prune(out_dir, keep_last, ranked[:keep_best] + ([step_folder(out_dir, back)] if back else []))
    return final


def step_folder(out_dir, step):
    return Path(out_dir, "checkpoints", f"step_{step:08d}")


def begin(folder, out_dir):
    """Make an empty folder in place of what an interrupted writer has left, in an out_dir that is this process's."""
    keep_claim(out_dir)
    discard(folder)
    folder.mkdir(parents=True)


def discard(folder):
    """Delete an unfinished or renamed checkpoint, if nothing else lies in it."""
    with contextlib.suppress(OSError):
        if all(PARTS.fullmatch(name) for name in os.listdir(folder)):
            shutil.rmtree(folder)


def remove(folder):
    """Delete a checkpoint. It is renamed first, so that a kill leaves none that looks damaged; a user's file keeps it."""
    if (folder / "checkpoint.json").exists() and all(PARTS.fullmatch(name) for name in os.listdir(folder)):
        doomed = folder.with_name(f".old_{folder.name[5:]}")
        discard(doomed)
        os.rename(folder, doomed)
        discard(doomed)


def store(content, path):
    """torch.save, which ends in a RuntimeError where the disk fails; here it is the OSError behind it."""
    with open(path, "wb") as f:
        try:
            torch.save(content, f)
        except RuntimeError as e:
            if distributed.is_out_of_memory(e) or isinstance(e.__context__, MemoryError):
                raise MemoryError(str(e)) from e
            raise e.__context__ if isinstance(e.__context__, OSError) else OSError(str(e)) from e


def write(folder, files, step, model, train, config, tokenizer, metric):
    """All that stands in a step folder but shards, whose {name: [size, sha256]} is `files`; the manifest last."""
    store(model, folder / "model.pt")
    store(train, folder / "train.pt")
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    shutil.copyfile(tokenizer, folder / Path(tokenizer).name)
    files = files | {p.name: fingerprint(p) for p in sorted(folder.iterdir()) if p.name not in files}
    manifest = {"version": VERSION, "step": step, "metric": metric if math.isfinite(metric) else None, "files": files}
    (folder / "checkpoint.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in [*folder.iterdir(), folder]:
        to_disk(path)


def write_shards(folder, out_dir, parts):
    """
    The slices that the processes hold of {"model": {name: tensor}, "optimizer": ...}, one file each, as tensors
    "model.name"; return {file: [size, sha256]} of all of them.
    """
    import torch.distributed.checkpoint as dcp  # takes a tenth of a second that only sharded runs need
    tensors = {f"{part}.{name}": tensor for part, named in parts.items() for name, tensor in named.items()}
    distributed.gather(lambda: begin(folder, out_dir) if distributed.master else None)
    try:
        dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True),
                 process_group=distributed.writers)
    except dcp.CheckpointException as e:
        raise OSError("; ".join(f"process {rank}: {error}" for rank, (error, _) in e.failures.items())) from e
    mine = folder.glob(f"shard-{distributed.rank + 1:05d}-*")
    found = distributed.gather(lambda: {path.name: fingerprint(path) for path in mine})
    return {name: what for files in found for name, what in files.items()}


class Shards(Mapping):
    """{name: whole tensor} of a step folder's shards for the names "part.name"; each is read when it is asked for."""

    def __init__(self, folder, part):
        try:
            from safetensors import safe_open
        except ImportError:
            fail(f"{folder}: was saved by processes that share a model; reading it needs: pip install safetensors")
        self.part, self.pieces = part, {}
        for path in sorted(Path(folder).glob("shard-*.safetensors")):
            open_untrusted(path).close()
            file = safe_open(path, framework="pt")
            where = parse_json(file.metadata()["DCP_SHARDING_INFO"].encode())
            for name in file.keys():
                if name.startswith(f"{part}."):
                    first = (where[name]["saved_offsets"] or [0])[0]  # FSDP2 slices along the rows
                    self.pieces.setdefault(name.removeprefix(f"{part}."), {})[first] = file
        self.folder = folder

    def __getitem__(self, name):
        pieces = sorted(self.pieces[name].items())
        with reading(self.folder, f"the slices of {name}", fail):
            slices = [file.get_tensor(f"{self.part}.{name}") for _, file in pieces]
            return torch.cat(slices) if len(slices) > 1 else slices[0]

    def __iter__(self):
        return iter(self.pieces)

    def __len__(self):
        return len(self.pieces)


def manifest(folder):
    """The content of a checkpoint.json; {} where there is none, or one that a save would not have written."""
    found = read_json(Path(folder, "checkpoint.json"))
    files, metric = found.get("files"), found.get("metric")
    sound = isinstance(files, dict) and "version" in found and type(found.get("step")) is int and is_metric(metric)
    return found if sound and all(is_plain_name(name) and is_fingerprint(what) for name, what in files.items()) else {}


def is_metric(value):
    return value is None or type(value) in (int, float) and -1e300 < value < 1e300


def is_fingerprint(value):
    """Whether a value of a manifest is what `fingerprint` returns."""
    return isinstance(value, list) and [*map(type, value)] == [int, str]


def complete(folder):
    """Whether a step folder holds every file of its manifest at its full size."""
    files = manifest(folder).get("files", {})
    with contextlib.suppress(OSError):
        return bool(files) and all(Path(folder, name).stat().st_size == size for name, (size, _) in files.items())
    return False


def steps(out_dir):
    """The complete step folders of a run, oldest first."""
    return [p for p in sorted(Path(out_dir, "checkpoints").glob("step_*")) if complete(p)]


def by_metric(out_dir):
    """The complete step folders whose metric was measured, the least first."""
    found = [(manifest(folder).get("metric"), folder) for folder in steps(out_dir)]
    return [folder for value, folder in sorted(pair for pair in found if pair[0] is not None)]


def prune(out_dir, keep_last, keep):
    """Remove leftovers and all but `keep` and the newest keep_last checkpoints (0: all stay)."""
    clean(out_dir)
    for old in steps(out_dir)[:-keep_last] if keep_last else []:
        if old not in keep:
            with contextlib.suppress(OSError):
                remove(old)


def clean(out_dir):
    """Remove what interrupted writers of checkpoints have left."""
    for folder in leftovers(out_dir):
        discard(folder)


def leftovers(out_dir):
    """Step folders under the names that writers give them before they are whole, or before they go."""
    return [*Path(out_dir, "checkpoints").glob(".tmp_*"), *Path(out_dir, "checkpoints").glob(".old_*")]


def pointer(out_dir, name):
    """The step folder that `latest` or `best` names; None when there is none or it is not complete."""
    try:
        named = read_untrusted(Path(out_dir, name), MAX_SETTINGS).decode().strip()
    except (OSError, ValueError):
        return None
    folder = Path(out_dir, "checkpoints", named) if is_plain_name(named) else None
    return folder if folder and complete(folder) else None


def newest(out_dir):
    """The newest complete step folder, whatever else lies there; None when there is none."""
    return (steps(out_dir) or [None])[-1]


def damage(folder):
    """What is wrong with a step folder, all of which is read; None where every file is what its manifest says."""
    found = manifest(folder)
    if not found:
        return "checkpoint.json cannot be read"
    if found["version"] != VERSION:
        fail(f"{folder}: checkpoint version {found['version']}, this program reads version {VERSION}")
    for name, (size, digest) in found["files"].items():
        path = folder / name
        try:
            if not path.exists():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size:,} bytes, expected {size:,}"
            if sha256(path) != digest:
                return f"{name} is not what was saved"
        except OSError as e:
            return f"{name[:80]} cannot be read, {why(e)}"
    return None


def recover(out_dir):
    """
    (the newest intact step folder, None where there is none; lines that name the damaged ones). Those that are newer
    than it are renamed. For the process that has claimed out_dir.
    """
    finish(out_dir)
    lines = []
    for folder in reversed([p for p in all_steps(out_dir) if not p.suffix]):
        wrong = damage(folder)
        if not wrong:
            return folder, lines
        aside = unused(f"{folder}.damaged")
        os.rename(folder, aside)
        lines.append(f"{folder} is damaged ({wrong}) and was set aside as {aside.name}")
    return None, lines or [f"{p} is damaged" for p in all_steps(out_dir)]


def all_steps(out_dir):
    """The step folders of a run, oldest first, damaged ones too."""
    return sorted(p for p in Path(out_dir, "checkpoints").glob("step_*") if STEP.fullmatch(p.name))


def finish(out_dir):
    """Publish the checkpoints whose writers were killed in the last moment, remove what others have left."""
    for folder in Path(out_dir, "checkpoints").glob(".tmp_*"):
        final = folder.with_name(f"step_{folder.name[5:]}")
        if STEP.fullmatch(final.name) and not final.exists() and damage(folder) is None:
            os.rename(folder, final)
    clean(out_dir)
    for path in unfinished(out_dir):
        path.unlink(missing_ok=True)


def unfinished(out_dir):
    """Files that their writers, who name them NAME.PID.tmp until they are whole, won't finish: those processes are gone."""
    found = [(path, path.name[len(name) + 1:-4]) for name in OURS for path in Path(out_dir).glob(f"{name}.*.tmp")]
    return [path for path, number in found if number.isdecimal() and not lives(int(number))]


def lives(pid):
    """Whether there is a process of this number here."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's
    return True


def unused(name):
    """`name`, or `name` with the first number behind it that nothing has yet."""
    path, number = Path(name), 1
    while path.exists():
        path, number = Path(f"{name}{number}"), number + 1
    return path


def is_run(out_dir):
    """Whether a trainer has worked in this folder: it left its mark there, or, before it set marks, checkpoints."""
    made_by = read_json(Path(out_dir, MARK)).get("made_by")
    return made_by == "llamac" if made_by is not None else any(map(manifest, all_steps(out_dir)))


class Refused(OSError):
    """The reason why this process may not train in a folder, in a line."""


def refuse_foreign(out_dir):
    """Raise Refused if something in out_dir has a name of ours and isn't known to be ours."""
    known = is_run(out_dir)
    found = [folder for folder in all_steps(out_dir) if not (known and (folder / "checkpoint.json").exists())]
    if not known:
        found += leftovers(out_dir) + unfinished(out_dir) + [path for name in OURS if (path := Path(out_dir, name)).exists()]
        found += [path for path in [Path(out_dir, MARK)] if path.exists() and path.stat().st_size]
    if found:
        raise Refused(f"--out_dir={out_dir}: holds {found[0].relative_to(out_dir)}, which is not known to be a trainer's and "
                      f"would be in the way; move it elsewhere or choose another folder")


def claim(out_dir):
    """
    Make a run's folder, or go on in one, and lock it for as long as this process lives: the system drops the lock of a
    dead process. One line refuses a folder in which another process trains, or which holds what no trainer wrote.
    Raises OSError when it can't be written.
    """
    new = not Path(out_dir).exists()
    try:
        take(out_dir)
    except Refused as e:
        fail(e)
    if new:
        atexit.register(tidy, out_dir)


def take(out_dir):
    """What `claim` does, but for Refused, which is raised."""
    global held
    file, is_new = lock(out_dir)
    try:
        refuse_foreign(out_dir)
    except Refused:
        if is_new:
            os.unlink(file.name)
        file.close()
        raise
    mark(file)
    held = file


def lock(out_dir):
    """
    Return (the open and locked MARK of a folder, whether this call made it), or raise Refused where another process has
    locked it. The folder and an empty MARK are made where there are none. Everything else about the folder is looked at under
    this lock, so that of two trainings begun together the second sees a finished claim.
    """
    path = Path(out_dir, MARK)
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file, is_new = open(path, "x+", encoding="utf-8"), True
        except FileExistsError:
            try:
                file, is_new = open(path, "r+", encoding="utf-8"), False
            except FileNotFoundError:  # its owner has removed it in between
                if path.is_symlink():
                    raise Refused(f"--out_dir={out_dir}: {MARK} is a link to nothing, expected a file; remove the link, or "
                                  f"choose another folder") from None
                continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                raise Refused(f"--out_dir={out_dir}: another process trains there{described(file.read())}; wait for it, stop "
                              f"it, or choose another folder") from None
        except OSError as e:  # some network file systems have no locks
            print(f"warning: {out_dir} cannot be locked ({e.strerror}); see to it that nobody else trains there", flush=True)
        if is_file_at(file, path):
            return file, is_new
        file.close()  # its owner has removed it between the opening and the locking


def keep_claim(out_dir):
    """
    Claim out_dir again where it was deleted or moved away while this process trains in it; other folders stay as they are.
    Raises OSError where another process trains there by now.
    """
    if not held or Path(held.name) != Path(out_dir, MARK) or is_file_at(held, Path(out_dir, MARK)):
        return
    before = held
    take(out_dir)
    before.close()
    distributed.say(f"warning: {out_dir} was deleted or moved while this process trains in it; the run goes on in a new one, "
                 f"without what was there")


def is_file_at(file, path):
    """Return whether an open file is the one that this path names now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:
        return False


def tidy(out_dir):
    """Take away a folder that this process has made for a run that was then refused: nothing but this process's mark is in it."""
    mine = Path(out_dir, MARK)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if held and os.listdir(out_dir) == [MARK] and json.loads(mine.read_text(encoding="utf-8"))["pid"] == os.getpid():
            mine.unlink()
            os.rmdir(out_dir)


def described(text):
    """" (process 12 on HOST since TIME)" from a MARK's text."""
    try:
        found = json.loads(text)
        return f" (process {found['pid']} on {found['host']} since {found['since']})"
    except (ValueError, KeyError, TypeError):  # being written
        return ""


def mark(file):
    """Write a MARK: in place, since a lock is on the file, and in one write, so that a kill leaves the old or the new."""
    text = json.dumps({"made_by": "llamac", "pid": os.getpid(), "host": socket.gethostname()[:64],
                       "since": time.strftime("%Y-%m-%d %H:%M:%S")}) + "\n"
    new = not os.fstat(file.fileno()).st_size
    try:
        if os.pwrite(file.fileno(), text.encode().ljust(256), 0) < 256:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        if new:
            os.unlink(file.name)
        raise


def release():
    """Let others train in the folder that this process has claimed."""
    global held
    held = held and held.close()


def set_aside(out_dir):
    """
    Move what a run has written, and nothing else, to out_dir.old1 (.old2 ...), to make place for a new run in the folder
    this process has claimed. Returns the new folder's name, None when there was no run. Checkpoints go last: were it
    interrupted before, they could still be resumed.
    """
    finish(out_dir)
    mine = [path for name in OURS if (path := Path(out_dir, name)).exists()] + all_steps(out_dir)
    if not any(path.name != "log.jsonl" or path.stat().st_size for path in mine):
        return None
    number = 1
    while (aside := Path(f"{str(out_dir).rstrip('/')}.old{number}")).exists():
        number += 1
    (aside / "checkpoints").mkdir(parents=True)
    with open(aside / MARK, "w", encoding="utf-8") as f:
        mark(f)
    for path in mine:
        os.rename(path, aside / path.relative_to(out_dir))
    return aside


def is_own(path):
    """Whether a path is a run with a complete checkpoint, or a step folder."""
    return complete(path) or pointer(path, "best") is not None or newest(path) is not None


def origin(path):
    """What init_from names: the step folder of a run, or, where somebody else's model stands, the path as it is."""
    return Path(path) if Path(path).exists() and not is_own(path) else locate(path)


def locate(path):
    """The step folder meant by a run's folder (its best, else its newest) or by a step folder itself; or one line."""
    path = Path(path)
    if complete(path):
        return path
    found = pointer(path, "best") or newest(path)
    if found is None:
        fail(f"{path}: holds no complete checkpoint; expected a run's out_dir or one of its step folders{hub(path)}")
    return found


def run_folder(path):
    """The path of a model as it is, or, where it is a folder of runs rather than of one, its newest run."""
    if Path(path).is_file() or complete(path) or newest(path):
        return str(path)
    runs = [(newest(folder).stat().st_mtime, str(folder)) for folder in Path(path).glob("*/") if newest(folder)]
    if not runs:
        return str(path)  # whoever reads it says what is wrong
    print(f"{max(runs)[1]}: the newest run in {path}", file=sys.stderr)
    return max(runs)[1]


class Writer:
    """Does one piece of work after the other in a thread, so that training goes on meanwhile."""

    def __init__(self):
        self.thread, self.error = None, None

    def start(self, work):
        """Wait for what is under way, then begin `work()`. Returns and raises what `wait` does about the work before."""
        error = self.wait()
        self.thread = threading.Thread(target=self._run, args=(work,))
        try:
            self.thread.start()
        except RuntimeError:  # no memory for the stack of a thread
            self.thread = None
            self._run(work)
        return error

    def _run(self, work):
        try:
            work()
        except BaseException as e:  # `wait` raises it where somebody sees it
            self.error = e

    def join(self):
        """Returns when nothing is under way."""
        if self.thread:
            self.thread.join()

    def wait(self):
        """
        Wait until no work is under way. Return None if the last work succeeded, and its exception if the next may succeed,
        because the disk or the memory was full. Raises any other exception of the last work.
        """
        self.join()
        error, self.thread, self.error = self.error, None, None
        if error and not may_pass(error):
            raise error
        return error


def may_pass(error):
    """Return whether a save may succeed later though it failed by this exception: the disk or the memory was full."""
    return isinstance(error, OSError) or distributed.is_out_of_memory(error)


def reason(error):
    """What a user is told about an exception that may pass."""
    return why(error) if isinstance(error, OSError) else "there is not enough memory"


def snapshot(value, copy=False):
    """
    Nested dicts and lists as they are now, their tensors in the host's memory: those of a GPU are copied, but those of a
    CPU are the very same, and may not change before they are written (Writer.join). A copy would outweigh the weights.
    copy: those of a CPU too, since FSDP frees the storage of weights it has gathered.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=copy)
    if isinstance(value, dict):
        return {k: snapshot(v, copy) for k, v in value.items()}
    return [snapshot(v, copy) for v in value] if isinstance(value, list) else value


def load(folder, part="model", check=True):
    """
    The dict of model.pt or train.pt of a step folder, checked against its sha256; a damaged one ends in one line. What
    was saved as shards comes as a Shards; the processes check them together. check: False after `recover`, which did.
    """
    path, name = Path(folder, f"{part}.pt"), {"model": "model", "train": "optimizer"}[part]
    with reading(path, "part of a checkpoint; use another one", fail):
        version, found = read_json(Path(folder, "checkpoint.json"))["version"], manifest(folder)
        if version != VERSION:
            fail(f"{folder}: checkpoint version {version!r}, this program reads version {VERSION}")
        shards = sorted(file for file in found["files"] if file.startswith("shard-"))
        for file in [*(Path(folder, file) for file in shards[distributed.rank::distributed.world]), path] if check else []:
            if sha256(file) != found["files"][file.name][1]:
                fail(f"{file}: damaged, its content is not what was saved; use another checkpoint")
        content = load_torch(path)
        return content | {name: Shards(folder, name)} if shards else content


def tokenizer_path(folder):
    """The vocabulary file inside a step folder."""
    found = sorted(Path(folder).glob("tokenizer.*"))
    return found[0] if found else fail(f"{folder}: holds no tokenizer.model and no tokenizer.json; use another checkpoint")


# ---- where a run starts; `s` has the settings of train.py as attributes -------------------------------------------

# settings of the place and of the day, which a resumed run does not take from the one before
PLACE = {"out_dir", "eval_only", "init_from", "force_resume", "max_minutes", "cache", "device", "sharded", "compile",
         "activation_checkpointing", "supervise", "max_restarts", "peak_tflops", "tensorboard_log", "swanlab_log",
         "trackio_log", "checks"}
# what weights and optimizer have their shape and meaning from
SHAPES = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_width", "vocab_size", "hidden_dim", "qk_norm", "qkv_bias", "tied",
          "optimizer")
RENAMED = {"patience": "early_stop"}  # settings in older checkpoints
FRESH = {"seconds": 0.0, "limit": 0.0, "end": math.inf}  # the clock of a run without a limit, see session_clock


def default_out_dir(data):
    """A run that nobody has named is named after its data: stories:2000 goes to out/stories, texts/my.txt to out/my."""
    name = Path(data).resolve().stem if Path(data).is_file() else Path(data.partition(":")[0]).resolve().name
    return "out/" + (re.sub(r"[^\w.-]+", "-", name).strip(".-") or "run")


def fine_tuning(s):
    """Whether init_from is the path of a model to fine-tune."""
    return s.init_from not in ("auto", "resume", "scratch")


def find_start(s):
    """
    (the checkpoint folder this run starts from, None to start from nothing; whether it continues the run in it). What
    stands in out_dir goes before the path of init_from, so that a fine-tuning run too is resumed by its own command.
    """
    if s.eval_only:
        return find_evaluated(s)
    if fine_tuning(s) and Path(s.out_dir).resolve() in (Path(s.init_from).resolve(), *Path(s.init_from).resolve().parents):
        fail(f"--init_from={s.init_from} is the run in out_dir itself; give another --out_dir to fine-tune it, or "
             f"--init_from=resume to continue it")
    found = take_out_dir(s)
    if found or not fine_tuning(s):
        return found, found is not None
    return origin(s.init_from), False


def find_evaluated(s):
    """What find_start returns where nothing is trained: the run in out_dir, or the checkpoint that init_from names."""
    if fine_tuning(s):
        return origin(s.init_from), False
    found = newest(s.out_dir) if s.init_from != "scratch" else None
    if not found:
        fail(f"--eval_only=True with --init_from={s.init_from}: {s.out_dir} holds no checkpoint to evaluate; give the "
             f"--out_dir of a run that does, or the path of one with --init_from")
    return found, True


def take_out_dir(s):
    """Claim the folder; the checkpoint in it that is to be resumed, or None. Damaged ones and an old run are set aside."""
    try:
        claim(s.out_dir)
        if s.init_from == "scratch":
            if aside := set_aside(s.out_dir):
                distributed.say(f"the run that stood in {s.out_dir} is now {aside}")
            return None
        found, damaged = recover(s.out_dir)
    except OSError as e:
        fail(f"--out_dir={s.out_dir}: cannot be written ({why(e)}); make room or choose another folder")
    if damaged and not found:
        fail(f"{'; '.join(damaged)}; there is no other checkpoint in {s.out_dir}: put back a copy, or start anew with "
             f"--init_from=scratch, which moves what is left to {s.out_dir}.old1")
    for line in damaged:
        distributed.say(f"error: {line}; resuming from the one before, {found.name}")
    if s.init_from == "resume" and found is None:
        fail(f"--init_from=resume: {s.out_dir} holds no complete checkpoint; start one with --init_from=scratch")
    return found


def stored_settings(folder):
    """The config.json of a checkpoint: the settings that it was trained with, and what was derived from them."""
    with reading(Path(folder, "config.json"), "the settings of a run", fail):
        stored = read_json_file(Path(folder, "config.json"), MAX_JSON)
    return {RENAMED.get(name, name): value for name, value in stored.items()}


def resumable(stored):
    """The settings that a resumed run takes from its checkpoint."""
    return {k: v for k, v in stored.items() if k not in PLACE and not k.startswith("wandb_")}


def resume_settings(s, folder, given):
    """
    A resumed run keeps its settings, but for those `given` anew. Returns (the settings to take, those that no depth
    derives any more, [[name, before, now]] of what was changed).
    """
    where = Path(folder, "config.json")
    stored = {k: convert(k, v, getattr(s, k), where) for k, v in stored_settings(folder).items() if k in vars(s)}
    for name in [name for name, value in stored.items() if isinstance(value, str) and HIDDEN in value]:
        if redact(getattr(s, name)) == stored[name]:  # what was hidden is given again
            stored[name] = getattr(s, name)
        elif name in ("data", "init_from", "vocab_source") and name not in given and not Path(stored[name]).exists():
            fail(f"{folder}: --{name} was {stored[name]}, in which a secret was hidden; give it again to resume the run")
    begun = stored.get("init_from", "auto")
    if fine_tuning(s) and Path(begun).resolve() != Path(s.init_from).resolve():
        origin = "nothing" if begun in ("auto", "scratch", "resume") else begun
        fail(f"{s.out_dir} holds a run that began from {origin}, not from {s.init_from}; give another --out_dir, or "
             f"--init_from=resume to continue it")
    kept = resumable(stored)
    changes = [[k, str(v), str(getattr(s, k))] for k, v in kept.items() if k in given and getattr(s, k) != v]
    taken = {k: v for k, v in kept.items() if k not in given} | {"init_from": begun}
    now = SimpleNamespace(**vars(s) | taken)
    if fine_tuning(now) and ("vocab_source" not in given or s.vocab_source.endswith(".bin")):  # its origin may have gone
        taken["vocab_source"] = str(tokenizer_path(folder))
    distributed.say(f"{'evaluating' if s.eval_only else 'resuming'} {s.out_dir} at iteration {manifest(folder)['step']:,} of "
                 f"{now.max_iters:,}")
    for name, before, after in changes:
        distributed.say(f"{name}: {before} -> {after}")
    return taken, given if "depth" in [name for name, *_ in changes] else given | kept.keys(), changes


def take_weights(folder, model, opt):
    """Weights and optimizer of a checkpoint."""
    with reading(folder, "a checkpoint of this run", fail):
        distributed.load_weights(model, load(folder)["model"])
        opt.load_state_dict(load(folder, "train")["optimizer"])


def warn_of(error):
    if error:
        distributed.say(f"warning: a checkpoint could not be saved ({reason(error)}); training goes on, and the next save tries "
                     f"again")


def go_back(s, model, opt, guard, writer):
    """After max_skips refused steps in a row: the weights of the last checkpoint; the data in between is left behind."""
    warn_of(distributed.on_master(writer.wait))
    folder = distributed.on_master(newest, s.out_dir)
    if folder is None:
        fail(f"{s.max_skips} steps in a row had a loss or gradient out of the ordinary, and there is no checkpoint to go "
             f"back to; lower the learning_rate (now {s.learning_rate})")
    take_weights(folder, model, opt)
    guard.state["in_a_row"] = 0
    distributed.say(f"warning: {s.max_skips} steps in a row were skipped; going on with the weights of {folder}")


def note_best(s, state, loss):
    """
    Remember this step's validation loss (inf where there is none) if it is the least so far. For early_stop that of a stop
    between evaluations does not count: the run is to end as it would have without stops. Untrained weights are nobody's best.
    """
    step = state["step"]
    if not s.early_stop:
        state.pop("best_due", None)
    elif "best_due" not in state:  # also where it is given anew
        state["best_due"] = [state["best"], state["best_step"]]
    if step and loss < state["best"]:
        state |= {"best": loss, "best_step": step}
    if step and s.early_stop and step % s.eval_interval == 0 and loss < state["best_due"][0]:
        state["best_due"] = [loss, step]


def stalled(s, state):
    """Whether the validation loss has stopped falling at this evaluation, at which a resumed run may begin."""
    if not s.early_stop or state["last"] or state["step"] % s.eval_interval:
        return False
    return state["step"] - (state["best_due"][1] or state["step"]) >= s.early_stop * s.eval_interval


def end_soon(s, model, opt, state, writer):
    """
    The validation loss has stopped falling: go back to the best weights, from which the rate falls to its end in a fifth
    of their steps. Returns the run's last step.
    """
    warn_of(distributed.on_master(writer.wait))
    best = state["best_due"][1]
    folder = step_folder(s.out_dir, best)
    saved = distributed.on_master(complete, folder)  # else the trainer was warned
    if saved:
        take_weights(folder, model, opt)
    last = min(s.max_iters, state["step"] + max(1, best // 5))
    back = "back to its weights; " if saved else ""
    distributed.say(f"no better validation loss since iter {best}: {back}iter {last} is the last")
    return last


def resume_signature(s, args, dataset):
    """What may not differ between a run and its continuation."""
    same = {k: v for k, v in asdict(args).items() if k not in ("multiple_of", "dropout")}
    names = ("batch_size", "gradient_accumulation_steps", "seed", "optimizer", "within_documents")
    return same | {name: getattr(s, name) for name in names} | {"data": dataset.meta["fingerprint"]}


def new_state(s, args, dataset, clock):
    """
    What a run is beside weights and optimizer, before its first step. tokens: that it was trained on; sequences: that it
    has read of its data; clock: that of its minutes, which no mode has.
    """
    return {"step": 0, "tokens": 0, "sequences": 0, "best": math.inf, "best_step": None, "run_id": "", "loss_sum": 0.0,
            "loss_steps": 0, "last": None, "fixed": resume_signature(s, args, dataset),
            "clock": clock if s.minutes else FRESH, "noted": [], "chat": {}}


def restore(s, folder, now, opt):
    """Load the optimizer and return the state of a run that is to continue; refuse another run's. now: its signature."""
    with reading(Path(folder, "train.pt"), "the state of a run", fail):
        return restored(s, folder, now, opt, load(folder, "train", check=s.eval_only))


STATE = {"step": (int,), "best": (int, float), "best_step": (int, type(None)), "run_id": (str,),
         "loss_sum": (int, float, torch.Tensor),  # a number before the first step since the last row, then a scalar tensor
         "loss_steps": (int,), "last": (int, type(None)), "fixed": (dict,), "clock": (dict,), "noted": (list,), "chat": (dict,)}


def restored(s, folder, now, opt, train):
    """Return what `restore` returns. train: the content of a train.pt, which may be damaged; this may raise anything."""
    wrong = [name for name, kinds in STATE.items() if type(train["state"][name]) not in kinds]
    if not wrong and torch.as_tensor(train["state"]["loss_sum"]).numel() != 1:
        wrong = ["loss_sum"]
    if wrong or not all(type(value) in (int, float) for value in train["state"]["clock"].values()):
        raise ValueError(f"its state has another {(wrong or ['clock'])[0]} than a run writes")
    before = train["state"]["fixed"]
    different = [name for name in ("data", *now) if before.get(name, now[name]) != now[name]]
    never = [name for name in different if name in SHAPES]
    if different and (never or not s.force_resume):
        name = different[0]
        what = other_data(s, folder) if name == "data" else f"holds a run with {name}={before[name]}, now it is {now[name]}"
        fail(f"{s.out_dir} {what}; give the old value to resume it, another --out_dir, or --init_from=scratch"
             f"{'' if never else ', or --force_resume=True'}")
    if s.minutes and "minutes" not in train["state"]["clock"]:
        fail(f"{s.out_dir} holds a run whose sizes do not follow from --minutes; --max_minutes limits the time of this session")
    opt.load_state_dict(train["optimizer"])
    state = counted(train["state"], before)
    read = 0 if "data" in different else state["sequences"] * before["max_seq_len"] // now["max_seq_len"]
    return state | {"fixed": now, "sequences": read}


def counted(state, before):
    """The state with its counters of tokens and sequences, which older checkpoints lack. before: its resume signature."""
    batch = before["batch_size"] * before["gradient_accumulation_steps"]
    return {"tokens": state["step"] * batch * before["max_seq_len"], "sequences": state["step"] * batch} | state


def other_data(s, folder):
    """In words: how the data differ from those that a checkpoint was trained on."""
    from engine.text.prepare import source_files  # here: it takes half a tenth of a second to import
    stored = stored_settings(folder)
    for name in ("data", "vocab_source", "vocab_size", "vocab_most", "text_most", "val_fraction"):
        if stored.get(name, getattr(s, name)) != getattr(s, name):
            return f"holds a run with {name}={stored[name]}, now it is {getattr(s, name)}"
    before, now = ({path: rest for path, *rest in files}
                   for files in (stored.get("data_files", []), source_files(s.data, s.cache, s.column)))
    changed = sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
    named = f"{changed[0]}{f' and {len(changed) - 1} more' if len(changed) > 1 else ''}" if changed else s.data
    return f"holds a run on another text: {named} changed since"


def session_clock(clock, max_minutes, minutes=0.0, left=0.0):
    """
    The run's clock, {"seconds": it has trained, "limit": seconds of max_minutes, "end": its reading when they are over}, and
    "minutes" where the sizes follow from them: then they are the run's own, and more of them prolong it. left: seconds of them
    that are left now, for a run that has not trained; checks and other things came after its plan.
    `clock` is that of the session before: a time limit that a stop or a crash has cut short goes on, one that was
    reached begins anew.
    """
    if "minutes" in clock:
        end = clock["end"] + 60 * (minutes - clock["minutes"])
        return clock | {"end": left if left and not clock["seconds"] else end, "minutes": minutes}
    limit = 60 * max_minutes
    if clock["limit"] == limit and clock["seconds"] < clock["end"]:
        return clock
    return clock | {"limit": limit, "end": clock["seconds"] + limit if limit else math.inf}


def is_over(s, state):
    """Whether a run has taken its last step, or the minutes that its sizes follow from are over."""
    clock = state["clock"]
    return (state["step"] >= (state.get("last") or s.max_iters)
            or "minutes" in clock and clock["seconds"] >= session_clock(clock, 0, s.minutes)["end"])


def say_finished(s, state):
    """Answer a finished run that is begun again. Return the exit code: 2 where its model is not there."""
    there = Path(s.out_dir, "model.gguf").exists()
    missing = "" if there else f"; its model.gguf is missing, write it with: python export.py {shlex.quote(str(s.out_dir))}"
    more = "" if state["last"] else f"raise --{'max_iters' if state['step'] >= s.max_iters else 'minutes'} to go on, or "
    distributed.say(f"{s.out_dir}: this run is finished, at iter {state['step']} with validation loss {state['best']:.4f}"
                    f"{missing}; {more}--init_from=scratch for a new one")
    return 0 if there else 2


def farewell(s, state, best, there, wanted):
    """The last line. there, wanted: the iteration whose model stands in the file `best`, and that which should."""
    saved = [int(folder.name[5:]) for folder in steps(s.out_dir)]
    text = f"finished: best validation loss {state['best']:.4f}"
    if not is_over(s, state):
        text = f"stopped at iter {state['step']}; the same command continues from "
        text += "here" if state["step"] in saved else f"iter {max(saved, default=0)}, the last that could be saved"
    elif state["step"] not in saved:
        text += f"; the checkpoint of iter {state['step']} could not be saved"
    if there != wanted:
        text += f"; the model of iter {wanted} could not be written"
        text += f": make room, then: python export.py {shlex.quote(s.out_dir)}" if wanted in saved else " or saved"
    if there is None:
        return text
    older = f"; {best} is that of iter {there}" if there != wanted else ""
    return f"{text}{older}; write with it: ./run {shlex.quote(str(best))} -i {shlex.quote(s.sample_prompt.split('|')[0])}"
