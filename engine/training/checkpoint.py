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
import contextlib
import json
import math
import os
import re
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from configurator import fail
from engine.advice import hub
from engine.files import sha256, to_disk, why, write_atomic
from engine.training import distributed, hardware
from engine.untrusted import (
    MAX_JSON,
    MAX_SETTINGS,
    is_plain_name,
    load_torch,
    open_untrusted,
    parse_json,
    read_json,
    read_untrusted,
    reading,
)

VERSION = 2
PARTS = re.compile(r"(model|train)\.pt|(config|checkpoint)\.json|tokenizer\.\w+|shard-.*\.safetensors")
STEP = re.compile(r"step_\d{8,}(\.damaged\d*)?")


def size_and_sha256(path):
    """Return what the manifest stores of a file: [bytes, hex SHA-256]."""
    return [path.stat().st_size, sha256(path)]


def save(out_dir, step, model, train, config, tokenizer, metric=math.inf, keep_last=1, keep_best=1,
         claim=lambda out_dir: None):
    """
    Publish out_dir/checkpoints/step_N and return it. Then remove all but the newest keep_last (0:
    none is removed), the keep_best with the lowest metric, and the one that early_stop would return
    to.

    model, train: dicts of tensors and plain values; config: a dict for JSON; tokenizer: path of the
    vocabulary file; metric: inf where it was not measured; claim(out_dir): called by the master
    before the first file is written. Raises OSError when the disk fails, MemoryError or
    RuntimeError when memory runs out; earlier checkpoints are then untouched. Where "model" is
    sharded, all processes call this.
    """
    folder, final = Path(out_dir, "checkpoints"), step_folder(out_dir, step)
    temporary = folder / f".tmp_{step:08d}"
    try:
        files = {}
        if any(map(distributed.is_shard, model.get("model", {}).values())):
            parts = {"model": model["model"], "optimizer": train["optimizer"]}
            files = write_shards(lambda: begin(temporary, out_dir, claim), temporary, parts)
            model, train = ({k: v for k, v in part.items() if k not in ("model", "optimizer")} for part in (model, train))
        if not distributed.master:
            return final
        if not files:
            begin(temporary, out_dir, claim)
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


def begin(folder, out_dir, claim):
    """Claim out_dir, then make an empty folder in place of what an interrupted writer has left."""
    claim(out_dir)
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
            if hardware.is_out_of_memory(e) or isinstance(e.__context__, MemoryError):
                raise MemoryError(str(e)) from e
            raise e.__context__ if isinstance(e.__context__, OSError) else OSError(str(e)) from e


def write(folder, files, step, model, train, config, tokenizer, metric):
    """All that stands in a step folder but shards, whose {name: [size, sha256]} is `files`; the manifest last."""
    store(model, folder / "model.pt")
    store(train, folder / "train.pt")
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    shutil.copyfile(tokenizer, folder / Path(tokenizer).name)
    files = files | {p.name: size_and_sha256(p) for p in sorted(folder.iterdir()) if p.name not in files}
    manifest = {"version": VERSION, "step": step, "metric": metric if math.isfinite(metric) else None, "files": files}
    (folder / "checkpoint.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in [*folder.iterdir(), folder]:
        to_disk(path)


def write_shards(begin, folder, parts):
    """
    The slices that the processes hold of {"model": {name: tensor}, "optimizer": ...}, one file each, as tensors
    "model.name"; return {file: [size, sha256]} of all of them.
    """
    import torch.distributed.checkpoint as dcp  # takes a tenth of a second that only sharded runs need
    tensors = {f"{part}.{name}": tensor for part, named in parts.items() for name, tensor in named.items()}
    distributed.gather(lambda: begin() if distributed.master else None)
    try:
        dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True),
                 process_group=distributed.writers)
    except dcp.CheckpointException as e:
        raise OSError("; ".join(f"process {rank}: {error}" for rank, (error, _) in e.failures.items())) from e
    mine = folder.glob(f"shard-{distributed.rank + 1:05d}-*")
    found = distributed.gather(lambda: {path.name: size_and_sha256(path) for path in mine})
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
    found = read_json(Path(folder, "checkpoint.json"), MAX_JSON, {})
    files, metric = found.get("files"), found.get("metric")
    sound = isinstance(files, dict) and "version" in found and type(found.get("step")) is int and is_metric(metric)
    return found if sound and all(is_plain_name(name) and is_size_and_sha256(what) for name, what in files.items()) else {}


def is_metric(value):
    return value is None or type(value) in (int, float) and -1e300 < value < 1e300


def is_size_and_sha256(value):
    """Return whether a value of a manifest has the form of `size_and_sha256`."""
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


def all_steps(out_dir):
    """The step folders of a run, oldest first, damaged ones too."""
    return sorted(p for p in Path(out_dir, "checkpoints").glob("step_*") if STEP.fullmatch(p.name))


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


def newest_run(path):
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
    return isinstance(error, OSError) or hardware.is_out_of_memory(error)


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
        version, found = read_json(Path(folder, "checkpoint.json"), MAX_JSON, {})["version"], manifest(folder)
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



