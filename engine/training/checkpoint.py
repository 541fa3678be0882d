"""
Write and read checkpoints, which survive a writer that is killed or fails at any moment. A
checkpoint is a folder, called a step folder:

    out/my/checkpoints/step_00001000/
        model.pt          {"args": ModelArgs as a dict,
                           "model": {name: parameter}, tied weights under one name only,
                           "chat": {GGUF key: value} of the chat format; {} if there is none},
                           for a LoRA also "lora": see lora.stored
        frozen.pt         only for a LoRA: {name: parameter} of its frozen weights
        train.pt          {"optimizer": state_dict, "state": see progress.new_state}
        config.json       the resolved settings of the run, and what was derived from them
        tokenizer.*       the vocabulary, so that a checkpoint is enough to sample and to export
        checkpoint.json   the manifest: version, step, validation loss ("metric"), and
                          size and sha256 of every file above

It is written under the temporary name .tmp_00001000, manifest last, synced to disk, and published
by one atomic rename. `latest` and `best` in out/my are small files that name a step folder.
Checkpoints are loaded with weights_only, so they can't run code.

Files that PARTS does not match belong to the user: a folder that holds one is never deleted.
run_folder.py locks the folder of the run, so that only one trainer writes into it.

In a sharded run (FSDP2) no process holds the whole model. Each writes its slices as
shard-*.safetensors, by torch.distributed.checkpoint, in place of "model" and "optimizer" above.
That module also has a format of its own, but its index is a pickle, which could run code.

The frozen weights of a LoRA are the same in all its checkpoints, so the disk holds them once: each
frozen.pt is a hard link to that of the previous checkpoint. A step folder is thus self-contained:
unlike a checkpoint of only the adapters and a path, it remains usable when the model that the run
started from is moved or changed.
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
from types import MappingProxyType
from typing import NamedTuple

import torch

from configurator import fail
from engine.advice import hub
from engine.files import sha256, to_disk, write_atomic
from engine.formats.reader import open_safetensors
from engine.training import distributed, hardware
from engine.untrusted import (MAX_JSON, MAX_SETTINGS, is_plain_name, load_torch, parse_json,
                              read_json, read_untrusted, reading, reason)

VERSION = 2
PARTS = re.compile(
    r"(model|train|frozen)\.pt|(config|checkpoint)\.json|tokenizer\.\w+|shard-.*\.safetensors")
STEP = re.compile(r"step_\d{8,}(\.damaged\d*)?")  # run_folder.recover adds .damaged


class Contents(NamedTuple):
    """
    The contents of a checkpoint. model, train: dicts of tensors and plain values for model.pt and
    train.pt; config: a dict for config.json; tokenizer: path of the vocabulary file; metric: the
    validation loss, inf if it was not measured; frozen: {name: tensor} for frozen.pt, the weights
    that are the same in all checkpoints of the run.
    """
    step: int
    model: dict
    train: dict
    config: dict
    tokenizer: str | Path
    metric: float = math.inf
    frozen: Mapping = MappingProxyType({})


# ---- write ---------------------------------------------------------------------------------------

def save(out_dir, contents, keep_last=1, claim=lambda out_dir: None):
    """
    Publish out_dir/checkpoints/step_N and return its path. Then remove all checkpoints except the
    newest keep_last (0: keep all), the one with the lowest metric on each text that the run was
    trained on, and the one that early_stop would return to.

    contents: a Contents; claim(out_dir): called by the master before the first file is written. In
    a sharded run all processes call this. Raises OSError when the disk fails, MemoryError or
    RuntimeError when memory runs out; earlier checkpoints are then untouched.
    """
    folder, final = Path(out_dir, "checkpoints"), step_folder(out_dir, contents.step)
    temporary = folder / f".tmp_{contents.step:08d}"
    model, train = contents.model, contents.train
    try:
        shards = {}
        if any(map(distributed.is_shard, model.get("model", {}).values())):
            parts = {"model": model["model"], "optimizer": train["optimizer"]}
            shards = write_shards(lambda: begin(temporary, out_dir, claim), temporary, parts)
            contents = contents._replace(
                model={name: part for name, part in model.items() if name != "model"},
                train={name: part for name, part in train.items() if name != "optimizer"})
        # distributed.on_master is unsafe here: a Writer's thread runs during training, and both
        # would communicate in the same process group.
        if not distributed.master:
            return final
        if not shards:
            begin(temporary, out_dir, claim)
        linked = link_frozen(temporary, newest(out_dir)) if contents.frozen else {}
        write_files(temporary, shards | linked, contents)
        if final.exists():  # at a stop, train.py saves a step before its evaluation and again after
            remove(final)
        os.rename(temporary, final)
    except BaseException:
        # Keep a complete temporary folder: run_folder.finish renames it, unless `final` exists.
        if final.exists() or damage(temporary):
            discard(temporary)
        raise
    to_disk(folder)
    write_atomic(Path(out_dir, "latest"), final.name)
    best = best_by_data(out_dir)
    if data_of(final) in best:
        write_atomic(Path(out_dir, "best"), best[data_of(final)].name)
    keep = [*best.values()]
    # "best_due": [loss, step] of the best evaluation that counts for early_stop, see note_best
    _, early_stop_step = train.get("state", {}).get("best_due", [math.inf, None])
    if early_stop_step:
        keep.append(step_folder(out_dir, early_stop_step))
    prune(out_dir, keep_last, keep)
    return final


def step_folder(out_dir, step):
    return Path(out_dir, "checkpoints", f"step_{step:08d}")


def begin(folder, out_dir, claim):
    """Claim out_dir, then make `folder`, deleting one that an interrupted writer left."""
    claim(out_dir)
    discard(folder)
    folder.mkdir(parents=True)


def discard(folder):
    """Delete a folder, unless it holds a file that is not part of a checkpoint. Ignore OSErrors."""
    with contextlib.suppress(OSError):
        if all(PARTS.fullmatch(name) for name in os.listdir(folder)):
            shutil.rmtree(folder)


def remove(folder):
    """
    Delete a step folder, unless it may be the user's: it has no manifest, or holds a file that is
    not part of a checkpoint. It is renamed first, because a kill during the deletion would leave a
    step folder that looks damaged.
    """
    if not (folder / "checkpoint.json").exists():
        return
    if all(PARTS.fullmatch(name) for name in os.listdir(folder)):
        doomed = folder.with_name(folder.name.replace("step_", ".old_"))
        discard(doomed)
        os.rename(folder, doomed)
        discard(doomed)


def torch_save(content, path):
    """
    Write a file by torch.save. Raises OSError if the disk fails, and MemoryError if memory runs
    out. torch.save itself raises a RuntimeError for both, with the cause as its __context__.
    """
    with open(path, "wb") as f:
        try:
            torch.save(content, f)
        except RuntimeError as e:
            if hardware.is_out_of_memory(e) or isinstance(e.__context__, MemoryError):
                raise MemoryError(str(e)) from e
            raise e.__context__ if isinstance(e.__context__, OSError) else OSError(str(e)) from e


def link_frozen(folder, earlier):
    """
    Link frozen.pt of the step folder `earlier` into a folder, and return {file name: [size,
    sha256]}; {} if there is no such folder, or if the file system has no hard links.
    """
    entry = manifest(earlier)["files"].get("frozen.pt") if earlier else None
    if entry:
        with contextlib.suppress(OSError):
            os.link(earlier / "frozen.pt", folder / "frozen.pt")
            return {"frozen.pt": entry}
    return {}


def write_files(folder, written, contents):
    """
    Write the files of a step folder, the manifest last, and sync all to disk. written: {file name:
    [size, sha256]} of the files that are in it already.
    """
    torch_save(contents.model, folder / "model.pt")
    torch_save(contents.train, folder / "train.pt")
    if contents.frozen and "frozen.pt" not in written:
        torch_save(snapshot(dict(contents.frozen)), folder / "frozen.pt")
    (folder / "config.json").write_text(json.dumps(contents.config, indent=1), encoding="utf-8")
    shutil.copyfile(contents.tokenizer, folder / Path(contents.tokenizer).name)
    files = dict(written)
    for path in sorted(folder.iterdir()):
        if path.name not in written:
            files[path.name] = size_and_sha256(path)
    metric = contents.metric if math.isfinite(contents.metric) else None
    manifest = {"version": VERSION, "step": contents.step, "metric": metric, "files": files}
    (folder / "checkpoint.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in [*folder.iterdir(), folder]:
        to_disk(path)


def size_and_sha256(path):
    """Return a file's entry in the manifest: [size, sha256]."""
    return [path.stat().st_size, sha256(path)]


def write_shards(begin, folder, parts):
    """
    Write this process's slices of sharded tensors into one file, and return {file name:
    [size, sha256]} of all processes' files.

    begin(): called by the master to make the folder. parts: {"model": {name: tensor}, "optimizer":
    {name: tensor}}; the file names a tensor "model.name" or "optimizer.name".
    """
    import torch.distributed.checkpoint as dcp  # takes 0.1 s; only sharded runs need it
    tensors = {f"{part}.{name}": tensor
               for part, named in parts.items() for name, tensor in named.items()}
    # gather and dcp.save communicate in distributed.writers, a process group that training does not
    # use. This gather returns when the folder exists; if begin() fails, it raises in all processes.
    distributed.gather(lambda: begin() if distributed.master else None)
    try:
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(tensors, storage_writer=writer, process_group=distributed.writers)
    except dcp.CheckpointException as e:
        failures = [f"process {rank}: {error}" for rank, (error, _) in e.failures.items()]
        raise OSError("; ".join(failures)) from e
    own = folder.glob(f"shard-{distributed.rank + 1:05d}-*")
    files = {}
    for found in distributed.gather(lambda: {path.name: size_and_sha256(path) for path in own}):
        files |= found
    return files


class Writer:
    """A thread that writes one checkpoint at a time while training continues."""

    def __init__(self):
        self.thread, self.error = None, None

    def start(self, work):
        """
        Call `wait` for the previous work, then begin `work()`. Returns what `wait` returned; if
        `wait` raises, the new work is not begun.
        """
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
        except BaseException as e:  # `wait` raises it in the main thread
            self.error = e

    def join(self):
        """Wait until no work is in progress."""
        if self.thread:
            self.thread.join()

    def wait(self):
        """
        Wait until no work is in progress. Return None if the last work succeeded, or its exception
        if is_retryable. Raises any other exception of the last work.
        """
        self.join()
        error, self.thread, self.error = self.error, None, None
        if error and not is_retryable(error):
            raise error
        return error


def is_retryable(error):
    """Return whether a later save may succeed: the disk failed, or memory ran out."""
    return isinstance(error, OSError) or hardware.is_out_of_memory(error)


def why_unsaved(error):
    """Return as text why a save failed with a retryable exception."""
    return reason(error if isinstance(error, OSError) else MemoryError())


def snapshot(value, copy=False):
    """
    Return new dicts and lists with the content of nested ones, and all tensors in host memory.

    GPU tensors are copied. CPU tensors are not, which saves as much memory as the weights take: the
    caller must not change them until they are written (Writer.join). copy: copy CPU tensors too, as
    the weights of a sharded run require, because FSDP frees the storage of gathered weights.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=copy)
    if isinstance(value, dict):
        return {k: snapshot(v, copy) for k, v in value.items()}
    return [snapshot(v, copy) for v in value] if isinstance(value, list) else value


# ---- read ----------------------------------------------------------------------------------------

class Shards(Mapping):
    """
    A mapping {name: whole tensor} of a part of a sharded checkpoint, "model" or "optimizer". Each
    access reads the tensor's slices from the shards and joins them.
    """

    def __init__(self, folder, part):
        self.folder, self.part = folder, part
        self.slices = {}  # {name: {first row: file}}
        for path in sorted(Path(folder).glob("shard-*.safetensors")):
            file = open_safetensors(path)
            sharding = parse_json(file.metadata()["DCP_SHARDING_INFO"].encode())
            for name in file.keys():
                if name.startswith(f"{part}."):
                    # The offset along dimension 0, as FSDP2 slices rows; a scalar has no offsets.
                    row = (sharding[name]["saved_offsets"] or [0])[0]
                    self.slices.setdefault(name.removeprefix(f"{part}."), {})[row] = file

    def __getitem__(self, name):
        files = [file for _, file in sorted(self.slices[name].items())]
        with reading(self.folder, f"the slices of {name}", fail):
            slices = [file.get_tensor(f"{self.part}.{name}") for file in files]
            return torch.cat(slices) if len(slices) > 1 else slices[0]

    def __iter__(self):
        return iter(self.slices)

    def __len__(self):
        return len(self.slices)


def load(folder, part="model", check=True, mmap=False):
    """
    Return the dict in a step folder's model.pt or train.pt; in a sharded checkpoint "model" or
    "optimizer" is a Shards. "model" includes the frozen weights of a LoRA. Ends the program if a
    file is damaged.

    part: "model" or "train". check: compare sha256 with the manifest, each process for its share
    of the shards; False after run_folder.recover, which has done so. mmap: map the file, so that
    a tensor's numbers are read when they are used.
    """
    path, key = Path(folder, f"{part}.pt"), {"model": "model", "train": "optimizer"}[part]
    with reading(path, "part of a checkpoint; use another one", fail):
        # Read directly: manifest() returns {} if another version's file has another format.
        version = read_json(Path(folder, "checkpoint.json"), MAX_JSON, {})["version"]
        found = manifest(folder)
        if version != VERSION:
            fail(f"{folder}: checkpoint version {version!r}, this program reads version {VERSION}")
        shards = sorted(name for name in found["files"] if name.startswith("shard-"))
        own = [Path(folder, name) for name in shards[distributed.rank::distributed.world]]
        if part == "model" and "frozen.pt" in found["files"]:
            own.append(Path(folder, "frozen.pt"))
        for file in [*own, path] if check else []:
            if sha256(file) != found["files"][file.name][1]:
                fail(f"{file}: damaged, its content is not what was saved; use another checkpoint")
        content = load_torch(path, mmap)
        if Path(folder, "frozen.pt") in own:
            content["model"] |= load_torch(Path(folder, "frozen.pt"), mmap)
        return content | {key: Shards(folder, key)} if shards else content


def tokenizer_path(folder):
    """Return the vocabulary file of a step folder."""
    found = sorted(Path(folder).glob("tokenizer.*"))
    if not found:
        fail(f"{folder}: holds no tokenizer.model and no tokenizer.json; use another checkpoint")
    return found[0]


def manifest(folder):
    """Return the content of a checkpoint.json; {} if it is missing or malformed."""
    found = read_json(Path(folder, "checkpoint.json"), MAX_JSON, {})
    files = found.get("files")
    is_valid = (isinstance(files, dict) and "version" in found and type(found.get("step")) is int
                and is_metric(found.get("metric"))
                and all(is_plain_name(name) and is_size_and_sha256(entry)
                        for name, entry in files.items()))
    return found if is_valid else {}


def is_metric(value):
    """Return whether a manifest's metric is None or a finite number that fits in a float."""
    return value is None or type(value) in (int, float) and -1e300 < value < 1e300


def is_size_and_sha256(value):
    """Return whether a manifest's entry has the types that `size_and_sha256` returns."""
    return isinstance(value, list) and [*map(type, value)] == [int, str]


def complete(folder):
    """Return whether every file listed in a step folder's manifest has the size listed there."""
    files = manifest(folder).get("files", {})
    with contextlib.suppress(OSError):
        return bool(files) and all(Path(folder, name).stat().st_size == size
                                   for name, (size, _) in files.items())
    return False


def damage(folder):
    """
    Return as text what is wrong with a step folder; None if every file has the size and sha256 in
    the manifest. Ends the program if another version of the program wrote the folder.
    """
    found = manifest(folder)
    if not found:
        return "checkpoint.json cannot be read"
    if found["version"] != VERSION:
        fail(f"{folder}: checkpoint version {found['version']}, this program reads version "
             f"{VERSION}")
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
            return f"{name[:80]} cannot be read, {reason(e)}"
    return None


# ---- the checkpoints of a run --------------------------------------------------------------------

def all_steps(out_dir):
    """Return all step folders of a run, also incomplete and .damaged ones, oldest first."""
    found = Path(out_dir, "checkpoints").glob("step_*")
    return sorted(path for path in found if STEP.fullmatch(path.name))


def steps(out_dir):
    """Return the complete step folders of a run, oldest first, except those named .damaged."""
    return [path for path in all_steps(out_dir) if not path.suffix and complete(path)]


def newest(out_dir):
    """Return the newest complete step folder; None if there is none."""
    return (steps(out_dir) or [None])[-1]


def best_by_data(out_dir):
    """
    Return {fingerprint of the data: complete step folder with the lowest metric on them}. A run
    has several data after a forced resume on another text.
    """
    found = [(manifest(folder).get("metric"), folder) for folder in steps(out_dir)]
    best = {}
    for _, folder in sorted(pair for pair in found if pair[0] is not None):
        best.setdefault(data_of(folder), folder)
    return best


def data_of(folder):
    """Return the fingerprint of the data of a step folder, "" if it is unknown."""
    stored = read_json(folder / "config.json", MAX_JSON, {})
    dataset = stored.get("dataset") if isinstance(stored, dict) else None
    return str(dataset.get("fingerprint", "")) if isinstance(dataset, dict) else ""


def pointer(out_dir, name):
    """Return the step folder that `latest` or `best` names; None if it is missing or incomplete."""
    try:
        target = read_untrusted(Path(out_dir, name), MAX_SETTINGS).decode().strip()
    except (OSError, ValueError):
        return None
    folder = Path(out_dir, "checkpoints", target)
    return folder if is_plain_name(target) and complete(folder) else None


def prune(out_dir, keep_last, keep):
    """Remove leftovers, and all checkpoints but `keep` and the newest keep_last (0: keep all)."""
    clean(out_dir)
    for old in steps(out_dir)[:-keep_last] if keep_last else []:
        if old not in keep:
            with contextlib.suppress(OSError):
                remove(old)


def clean(out_dir):
    """Remove the leftovers of interrupted writers."""
    for folder in leftovers(out_dir):
        discard(folder)


def leftovers(out_dir):
    """Return the temporary folders of writers, and the renamed ones that `remove` deletes."""
    folder = Path(out_dir, "checkpoints")
    return [*folder.glob(".tmp_*"), *folder.glob(".old_*")]


def is_own(path):
    """Return whether a path is a complete step folder, or a run that has one."""
    return complete(path) or pointer(path, "best") is not None or newest(path) is not None


def origin(path):
    """
    Resolve the path in init_from: return the path itself if it exists and is neither a run nor a
    step folder (so it is another model), else the step folder that `locate` returns.
    """
    return Path(path) if Path(path).exists() and not is_own(path) else locate(path)


def locate(path):
    """
    Return `path` if it is a complete step folder, else the best step folder of the run at `path`,
    else its newest. Ends the program if there is none.
    """
    path = Path(path)
    if complete(path):
        return path
    found = pointer(path, "best") or newest(path)
    if found is None:
        fail(f"{path}: holds no complete checkpoint; expected a run's out_dir or one of its step "
             f"folders{hub(path)}")
    return found


def newest_run(path):
    """Return the newest run in a folder of runs; return any other path unchanged."""
    if Path(path).is_file() or complete(path) or newest(path):
        return str(path)
    runs = [(newest(folder).stat().st_mtime, str(folder))
            for folder in Path(path).glob("*/") if newest(folder)]
    if not runs:
        return str(path)  # its reader will report what is wrong
    run = max(runs)[1]
    print(f"{run}: the newest run in {path}", file=sys.stderr)
    return run
