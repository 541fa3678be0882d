"""
Checkpoints that survive whatever stops the writer. A checkpoint is a folder

    out/checkpoints/step_00001000/
        model.pt          {"args": ModelArgs as a dict, "model": {name: parameter}, a shared one once}
        train.pt          {"optimizer": state_dict, "state": step, tokens, best loss, tracker run id, ...}
        config.json       the resolved configuration of the run
        tokenizer.*       the vocabulary, so that a checkpoint is enough to sample from and to export
        checkpoint.json   version, step, size and sha256 of every file above; its presence means: complete

written under a temporary name, synced to disk, and published by one atomic rename. `out/latest` and `out/best` are
small files that name a step folder. Loading is weights_only: a checkpoint can't run code.

Processes that share a model out (FSDP2) never hold it whole. Each writes its slices as shard-*.safetensors, by
torch.distributed.checkpoint, in place of "model" and "optimizer" above. Its own file format would do the same, but has
an index that is a pickle, which could run code; safetensors is tensors under a JSON header.
"""
import hashlib
import json
import math
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

import parallel
from configurator import fail

VERSION = 2


def sync(path):
    """Force a file, or a folder's list of names, to disk."""
    # data.py does the same for itself: importing torch here would cost each of its processes seconds and memory.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path, text):
    """Replace a small text file so that a reader sees the old content or the new, never a part."""
    temporary = Path(f"{path}.tmp")
    with open(temporary, "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
    sync(Path(path).parent)


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def fingerprint(path):
    """What the manifest says of a file."""
    return [path.stat().st_size, sha256(path)]


def save(out_dir, step, model, train, config, tokenizer, metric=math.inf, keep_last=1, keep_best=1):
    """
    Publish out_dir/checkpoints/step_N and return it. model, train: dicts of tensors and plain values; config: a dict
    for JSON; tokenizer: path of the vocabulary file; metric: what `best` is the least of, inf where it was not
    measured. Then all go but the newest keep_last (0: all stay) and the keep_best with the least metric. Raises OSError
    when the disk fails; what was there before is then untouched. Where "model" is sharded, all processes call this.
    """
    folder = Path(out_dir, "checkpoints")
    temporary, final = folder / f".tmp_{step:08d}", folder / f"step_{step:08d}"
    try:
        files = {}
        if any(map(parallel.is_slice, model.get("model", {}).values())):
            files = write_shards(temporary, {"model": model["model"], "optimizer": train["optimizer"]})
            model, train = ({k: v for k, v in part.items() if k not in ("model", "optimizer")} for part in (model, train))
        if not parallel.master:
            return final
        if not files:
            begin(temporary)
        write(temporary, files, step, model, train, config, tokenizer, metric)
    except (OSError, RuntimeError) as e:  # torch reports a failed write as RuntimeError
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(str(e)) from e
    shutil.rmtree(final, ignore_errors=True)
    os.rename(temporary, final)
    sync(folder)
    write_atomic(Path(out_dir, "latest"), final.name)
    ranked = by_metric(out_dir)
    if ranked:
        write_atomic(Path(out_dir, "best"), ranked[0].name)
    prune(out_dir, keep_last, ranked[:keep_best])
    return final


def begin(folder):
    """An empty folder, whatever lay there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def write(folder, files, step, model, train, config, tokenizer, metric):
    """All that stands in a step folder but shards, whose {name: [size, sha256]} is `files`; the manifest last."""
    torch.save(model, folder / "model.pt")
    torch.save(train, folder / "train.pt")
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    shutil.copyfile(tokenizer, folder / Path(tokenizer).name)
    files = files | {p.name: fingerprint(p) for p in sorted(folder.iterdir()) if p.name not in files}
    manifest = {"version": VERSION, "step": step, "metric": metric if math.isfinite(metric) else None, "files": files}
    (folder / "checkpoint.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in [*folder.iterdir(), folder]:
        sync(path)


def write_shards(folder, parts):
    """
    The slices that the processes hold of {"model": {name: tensor}, "optimizer": ...}, one file each, as tensors
    "model.name"; return {file: [size, sha256]} of all of them.
    """
    import torch.distributed.checkpoint as dcp  # takes a tenth of a second that only sharded runs need
    tensors = {f"{part}.{name}": tensor for part, named in parts.items() for name, tensor in named.items()}
    parallel.everywhere(lambda: begin(folder) if parallel.master else None)
    try:
        dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True),
                 process_group=parallel.apart)
    except dcp.CheckpointException as e:
        raise OSError("; ".join(f"process {rank}: {error}" for rank, (error, _) in e.failures.items())) from e
    mine = folder.glob(f"shard-{parallel.rank + 1:05d}-*")
    found = parallel.everywhere(lambda: {path.name: fingerprint(path) for path in mine})
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
            file = safe_open(path, framework="pt")
            where = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():
                if name.startswith(f"{part}."):
                    first = (where[name]["saved_offsets"] or [0])[0]  # FSDP2 slices along the rows
                    self.pieces.setdefault(name.removeprefix(f"{part}."), {})[first] = file

    def __getitem__(self, name):
        slices = [file.get_tensor(f"{self.part}.{name}") for _, file in sorted(self.pieces[name].items())]
        return torch.cat(slices) if len(slices) > 1 else slices[0]

    def __iter__(self):
        return iter(self.pieces)

    def __len__(self):
        return len(self.pieces)


def complete(folder):
    """Whether a step folder holds every file of its manifest at its full size."""
    try:
        manifest = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, (size, _) in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def steps(out_dir):
    """The complete step folders of a run, oldest first."""
    return [p for p in sorted(Path(out_dir, "checkpoints").glob("step_*")) if complete(p)]


def by_metric(out_dir):
    """The complete step folders whose metric was measured, the least first."""
    def metric(folder):
        return json.loads((folder / "checkpoint.json").read_text(encoding="utf-8")).get("metric")

    found = [(metric(folder), folder) for folder in steps(out_dir)]
    return [folder for value, folder in sorted(pair for pair in found if pair[0] is not None)]


def clean(out_dir):
    """Remove what interrupted writers have left."""
    leftovers = [*Path(out_dir, "checkpoints").glob(".tmp_*"), *Path(out_dir).glob("*.tmp")]
    leftovers += [p for p in Path(out_dir, "checkpoints").glob("step_*") if not complete(p)]
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def prune(out_dir, keep_last, keep):
    """Remove leftovers and all but `keep` and the newest keep_last checkpoints (0: all stay)."""
    clean(out_dir)
    for old in steps(out_dir)[:-keep_last] if keep_last else []:
        if old not in keep:
            shutil.rmtree(old, ignore_errors=True)


def pointer(out_dir, name):
    """The step folder that `latest` or `best` names; None when there is none or it is not complete."""
    try:
        folder = Path(out_dir, "checkpoints", Path(out_dir, name).read_text(encoding="utf-8").strip())
    except OSError:
        return None
    return folder if complete(folder) else None


def newest(out_dir):
    """The newest complete step folder, whatever else lies there; None when there is none."""
    return (steps(out_dir) or [None])[-1]


def set_aside(out_dir):
    """Rename a run's folder to make place for a new one; return its new name, None when nothing stood there."""
    log = Path(out_dir, "log.jsonl")
    if not newest(out_dir) and not (log.exists() and log.stat().st_size):  # a run may have ended before its first save
        return None
    number = 1
    while (aside := Path(f"{str(out_dir).rstrip('/')}.old{number}")).exists():
        number += 1
    os.rename(out_dir, aside)
    return aside


def locate(path):
    """The step folder meant by a run's folder (its best, else its newest) or by a step folder itself; or one line."""
    path = Path(path)
    if complete(path):
        return path
    found = pointer(path, "best") or newest(path)
    if found is None:
        fail(f"{path}: holds no complete checkpoint; expected a run's out_dir or one of its step folders")
    return found


class Writer:
    """Does one piece of work after the other in a thread, so that training goes on while a disk is slow."""

    def __init__(self):
        self.thread, self.error = None, None

    def start(self, work):
        """Wait for what is under way, then begin `work()`; returns what the one before raised, an OSError or None."""
        error = self.wait()
        self.thread = threading.Thread(target=self._run, args=(work,))
        self.thread.start()
        return error

    def _run(self, work):
        try:
            work()
        except OSError as e:
            self.error = e

    def wait(self):
        """Returns when nothing is under way: the OSError that the last work ended with, or None."""
        if self.thread:
            self.thread.join()
        error, self.thread, self.error = self.error, None, None
        return error


def snapshot(value):
    """A copy in the host's memory of the tensors in nested dicts and lists, which training may change meanwhile."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: snapshot(v) for k, v in value.items()}
    return [snapshot(v) for v in value] if isinstance(value, list) else value


def load(folder, part="model"):
    """
    The dict of model.pt or train.pt of a step folder, checked against its sha256; a damaged one ends in one line. What
    was saved as shards comes as a Shards; the processes check them together.
    """
    path, name = Path(folder, f"{part}.pt"), {"model": "model", "train": "optimizer"}[part]
    try:
        manifest = json.loads(Path(folder, "checkpoint.json").read_text(encoding="utf-8"))
        if manifest["version"] != VERSION:
            fail(f"{folder}: checkpoint version {manifest['version']}, this program reads version {VERSION}")
        shards = sorted(file for file in manifest["files"] if file.startswith("shard-"))
        for path in [*(Path(folder, file) for file in shards[parallel.rank::parallel.world]), path]:
            if sha256(path) != manifest["files"][path.name][1]:
                fail(f"{path}: damaged, its content is not what was saved; remove {folder} to use an older checkpoint")
        content = torch.load(path, map_location="cpu", weights_only=True)
        return content | {name: Shards(folder, name)} if shards else content
    except Exception as e:  # whatever a file may hold that this program did not write
        why = (str(e).splitlines() or [""])[0]
        fail(f"{path}: cannot be read ({type(e).__name__}: {why}); remove {folder} to use an older checkpoint")


def tokenizer_path(folder):
    """The vocabulary file inside a step folder."""
    return next(iter(sorted(Path(folder).glob("tokenizer.*"))))
