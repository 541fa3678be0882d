"""
Train a Llama from scratch.

    python train.py                                 the built-in stories, a small model, about two minutes on a laptop
    python train.py --data=my.txt --wandb_log=True  your own text, tracked in W&B, with or without an account
    python train.py config/stories15M.py            a preset; --key=value after it overrides
    torchrun --nproc_per_node=4 train.py ...        many GPUs

The settings are the globals below; the loop is at the end.
"""
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

from configurator import configure, fail, settings  # first: it answers for packages that are missing

if "OMP_WAIT_POLICY" not in os.environ:              # read once by torch: how long an idle thread spins before it sleeps.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # Not at all is slow alone, for ever is slow on shared cores
import torch
from tqdm import tqdm

from data import Dataset, data_rows, prepare
from engine import ops
from engine.debug import modes, preflight
from engine.training import checkpoint, costs, distributed, plan
from engine.training.validate import check_settings, checked_args, refuse_nonsense, refuse_unseen
from engine.training.fit_batch import largest_batch, until_found
from engine.formats.layout import refuse_leftovers
from engine.debug.instruments import Stopwatch, UpdateNorms, gradient_noise, mean_loss, probe, show, take_notes, write_samples
from engine.formats.load import adopt, start_from
from engine.training.distributed import say
from engine.text.prepare import as_prepared, load, source_files, text_bytes
from engine.tracking.redact import redact
from engine.spans import span
from engine.streams import outlast
from export import ITER, export_model, exported_step, refuse_unexportable
from model import Transformer
from optim import LossScale, SpikeDetector, learning_rate_at, make_optimizer
from track import Tracker, source_version, start_tracking

# ---- output
out_dir = "auto"            # checkpoints, log.jsonl and model.gguf of the run; auto: out/ and the name of the data
eval_interval = 500         # steps between evaluations, each followed by a checkpoint
eval_iters = 50             # times 1024 tokens of each split an evaluation, always the same; 0: all of val, as many of train
eval_only = False           # evaluate the checkpoint in out_dir, and end
log_interval = 20           # steps between rows of the log
noise_scale = False         # at evaluations also the gradient noise scale: the batch, in tokens, from which on more pays less
early_stop = 0              # evaluations without a better one, after which the run goes back to the best and ends soon; 0: never
always_save_checkpoint = False  # keep every checkpoint; else the newest and the best few
keep_last = 1               # newest checkpoints kept
keep_best = 1               # checkpoints with the least validation loss kept
init_from = "auto"          # auto: resume what stands in out_dir, else start; scratch; resume; or the path of a model to fine-tune
force_resume = False        # continue even where batch, data, seed or context have changed; sizes can't
minutes = 0.0               # how long all of it takes: sizes and steps follow from it and the text; 0: 5, on a GPU 20
max_minutes = 0.0           # save and end after so long, with the rate at the end of its schedule; 0: no limit
checks = "all"              # before the first step: all, none, some (future,leak), or all but some (-leak)
sample_prompt = "Once upon a time"  # continued by the model at every evaluation; several: separated by |
# ---- tracking
wandb_log = False           # track in Weights & Biases; offline where there is no key or no server
wandb_project = "auto"      # W&B project; auto: WANDB_PROJECT or the project of `wandb init`, else llamac
wandb_run_name = "auto"     # W&B run name; auto: WANDB_NAME, else from data and size
wandb_group = ""            # W&B: runs that belong together
wandb_tags = ""             # W&B tags, separated by commas
wandb_notes = ""            # W&B: what this run is to find out
wandb_job_type = "auto"     # W&B job type; auto: WANDB_JOB_TYPE, else train
wandb_tables = True         # documents, samples and predictions go to W&B as tables of text; False: numbers alone
wandb_log_model = True      # the exported model goes to W&B as an artifact
wandb_watch = "off"         # histograms of gradients, parameters, or all; off
tensorboard_log = False     # the same metrics as TensorBoard event files (needs: pip install tensorboard)
swanlab_log = False         # the same metrics and tables in SwanLab; offline without a key or a server (pip install swanlab)
trackio_log = False         # the same metrics and tables in trackio, on this machine (pip install trackio)
# ---- data
data = "stories"            # stories, stories:N, tinystories, tinyshakespeare, a file, a folder, prepared data
vocab_source = "custom"     # custom: BPE trained on the data; bpe: byte-level BPE; byte; char; llama2; or a tokenizer's path
vocab_size = 0              # of a custom vocabulary; 0: what data.py chooses for this source
vocab_most = 0              # where vocab_size is 0: at most so many, and the rarest characters as bytes; 0: no limit
text_most = 0               # bytes of the text to prepare for training, spread over all of it; 0: all of it
val_fraction = 0.0          # part held out for validation; 0: a tenth, at most 5 MB
column = "text"             # where the text stands in .jsonl, .csv, .tsv, .parquet; "text": "story" too
skip_bad = False            # leave out files of a folder that can't be read as text, and count them
cache = "cache"             # prepared data goes here; of processes on several machines, where all of them see it
# ---- model
depth = 0                   # derive all sizes, batch, rate and steps from this one number; 0: as they are set
dim = 64                    # model width
n_layers = 2                # blocks
n_heads = 2                 # query heads
n_kv_heads = 0              # key/value heads; 0: as many as n_heads
head_width = 0              # width of a head; 0: dim / n_heads
hidden_dim = 0              # width inside the feed-forward; 0: 8/3 dim, rounded up
multiple_of = 32            # rounding of the hidden width
max_seq_len = 192           # context, in tokens
dropout = 0.0               # of what blocks add; 0 for large data, 0.1 or more when epochs repeat
within_documents = True     # attention sees no other document; False: faster where contexts are long
tied = True                 # the classifier shares the embedding's weights
rope_theta = 10000.0        # base of the rotary positions
rope_scaling = 1.0          # linear scaling of the positions
rope_factors = ""           # what divides the frequency of each pair of a head, as in Llama 3.1: numbers separated by commas
rope_attention = 1.0        # what the rotated queries and keys are multiplied by, as YaRN does
qkv_bias = False            # queries, keys and values have biases, as in Qwen2
qk_norm = False             # each head's query and key is normed, as in Qwen3
norm_eps = 1e-5             # of RMSNorm
# ---- optimization
batch_size = 6              # sequences per forward pass; 0: the most that fit; lower it when memory is short ...
gradient_accumulation_steps = 1  # ... and raise this: a step is batch_size x this many sequences, over all processes
max_iters = 3000            # steps
optimizer = "muon"          # muon for the matrices of the blocks and adamw for the rest; or adamw for all
learning_rate = 6e-3        # peak
table_rate = 1.0            # of embedding and classifier, times learning_rate
weight_decay = 0.1          # of the matrices
momentum = 0.95             # Muon
beta1 = 0.9                 # AdamW
beta2 = 0.95                # AdamW
grad_clip = 1.0             # largest gradient norm; 0: no limit
decay_lr = True             # lower the rate after warm-up
schedule = "linear"         # linear: constant, then down over the last decay_fraction of the steps; or cosine
decay_fraction = 0.6        # of the linear schedule
warmup_iters = 50           # steps of linear warm-up
min_lr = 0.0                # at the end of the schedule
# ---- system
device = "auto"             # auto, cpu, cuda, cuda:1, mps
dtype = "auto"              # auto, float32 (on NVIDIA's GPUs: TF32), bfloat16, float16 (auto on V100 and T4)
peak_tflops = 0.0           # what mfu is measured against, of one device; 0: its data sheet, or a product timed here
sharded = False             # many processes share weights and optimizer (FSDP2) rather than copy them (DDP)
compile = False             # torch.compile: faster steps after a minute of compiling
activation_checkpointing = False  # keep of each block its input alone, and compute it again for the gradients: less memory
supervise = False           # restart this program from its last checkpoint when it crashes
max_restarts = 10           # of a supervised program
spike_z = 6.0               # skip a step whose loss or gradient norm lies so many deviations above the usual; 0: never
max_skips = 10              # steps skipped in a row before the weights go back to the last checkpoint
deterministic = False       # on a GPU: the same bits every time, by slower kernels
seed = 1337                 # of initialisation, data order and dropout
# ---- before a training
overfit = 0                 # learn so many windows by heart, whatever it takes, and say PASS or FAIL
dry_run = False             # 3 steps of everything, in a folder that is removed
lr_find = False             # which learning_rate? a ramp, then four rates over 100 steps each; a table and a picture
profile = False             # where the time of 5 steps goes; a table and a trace


def knobs():
    """The settings above as they stand, for engine/, which gives back what it changes."""
    return SimpleNamespace(**settings(globals()))


def train_step(step, model, opt, dataset, device, amp, guard, update_norms):
    """
    One step on this process's slice of the global batch of `step`, in micro-batches of batch_size. Returns (mean loss,
    gradient norm) of the global batch, scalar tensors on the device, and whether the step was taken.
    """
    torch.manual_seed(seed + step * distributed.world + distributed.rank)  # dropout too is a pure function of the step
    x, y = dataset.batch(step)
    micro_batches = list(zip(x.split(batch_size), y.split(batch_size)))  # as many in each process
    sequences = batch_size * gradient_accumulation_steps / distributed.world  # of a process, on average
    packed = within_documents and ops.has_packed_attention(device, amp, head_width or dim // n_heads, 0 < n_kv_heads < n_heads)
    total = torch.zeros((), device=device)
    for i, (xb, yb) in enumerate(micro_batches):
        share = (yb >= 0).any(1).sum().item() / sequences  # of those that are not padding
        documents = ops.documents_of(xb, dataset.separator, device) if packed else None
        xb, yb = distributed.to_device(device, xb, yb)
        with distributed.accumulate(model, last=i == len(micro_batches) - 1):
            with span("forward"), amp:
                loss = model(xb, yb, documents=documents)[1] * share
            with span("backward"):
                (loss * opt.scale.factor).backward()  # out of autocast, which would make of float32 sums products in bfloat16
        total += loss.detach()
    with span("clipping"):
        length = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm, loss = distributed.unshard(length) / opt.scale.factor, distributed.mean(total)
    read = distributed.reading(torch.stack((loss, norm)))
    with span("clipping"):
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), (grad_clip or math.inf) * opt.scale.factor, length)
    taken = not (spike_z or opt.scale.wanted) or not guard.refuses(*read())  # one wait for the device
    if taken:
        opt.step(*[update_norms] * update_norms.wanted)
    opt.scale.update(norm)
    opt.zero_grad()
    return loss, norm, taken


@torch.no_grad()
def evaluate(model, dataset, device, amp):
    """
    {"train", "val"}: mean loss in nats per token over the same documents of a split every time, as many tokens of both,
    each document read from its beginning, long ones in pieces of the context's length. The processes share the work.
    """
    model.eval()
    wide, losses = torch.float32 if device.type == "mps" else torch.float64, {}  # which Apple's GPUs lack
    for split in ("train", "val"):
        total = torch.zeros(2, dtype=wide, device=device)  # sum of losses, predictions
        for x, y, counts in dataset.eval_batches(split, eval_iters * costs.EVAL_TOKENS, costs.EVAL_PASS):
            x, y = distributed.to_device(device, x, y)
            with amp:
                loss = model(x, y)[1]
            predictions = (y >= 0).sum() * counts
            total += torch.stack((loss.to(wide) * predictions, predictions))
        nats, predictions = distributed.mean(total).tolist()
        losses[split] = nats / predictions
    model.train()
    return losses


def load_data(device):
    """The Prepared of the settings, which the master makes for all processes. All end where one does not see it."""
    folder = distributed.on_master(prepare, data, vocab_source, vocab_size, val_fraction, cache, skip_bad=skip_bad,
                                column=column, vocab_most=vocab_most, text_most=text_most)
    refuse_unseen(folder, device)
    return load(folder)


def make_model(args, dataset, device):
    """The model of the settings, untrained, and its optimizer."""
    torch.manual_seed(seed)
    model = Transformer(args).to(device)
    model.bos_id = dataset.separator if within_documents else None
    model.recompute = activation_checkpointing
    if sharded and distributed.world > 1:
        distributed.shard(model)
    return model, make_optimizer(model, optimizer, learning_rate, weight_decay, beta1, beta2, table_rate, momentum)


def plan_from_time(given, *machine):
    """Take what follows from the text, the machine (device, dtype) and --minutes. Returns the prepared text and the clock."""
    size = distributed.on_master(text_bytes, data, cache, column)
    shape = distributed.on_master(plan.plan_shape, knobs(), given, size, make_optimizer, *machine)
    globals().update(plan.values(shape))
    prepared = load_data(machine[0])
    seconds, length = distributed.on_master(plan.plan_length, knobs(), given, prepared.meta, make_optimizer, *machine)
    globals().update(plan.values(length))
    plan.show_plan(shape | length)
    return prepared, {"seconds": 0.0, "limit": 0.0, "end": seconds, "minutes": minutes}


def settle():
    """Refuse settings that can't train; the run's folder."""
    check_settings(knobs())
    globals()["out_dir"] = checkpoint.default_out_dir(data) if out_dir == "auto" else out_dir


def assess(model, dataset, device, amp):
    """Evaluate: losses in nats per token, "bpb/val" in bits per byte of text, samples, and what the instruments read."""
    losses = evaluate(model, dataset, device, amp)
    if not math.isfinite(losses["val"]):  # such a model has nothing to say, and refuse_nonsense ends the run
        return {"loss/val": losses["val"], "loss/train_eval": losses["train"]}
    probed = {split: distributed.to_device(device, *both) for split, both in dataset.probe_batches().items()}
    samples = write_samples(model, dataset.tokenizer, device, sample_prompt.split("|"), seed)
    noise = gradient_noise(model, dataset, device, amp) if noise_scale else {}
    return {"loss/val": losses["val"], "loss/train_eval": losses["train"], "bpb/val": dataset.bits_per_byte(losses["val"]),
            "samples": samples} | noise | probe(model, probed, dataset.tokenizer, amp)


def assess_in_time(*args):
    """The evaluation at a stop, which another Ctrl-C cuts short."""
    try:
        return assess(*args)
    except KeyboardInterrupt:
        if distributed.world > 1:  # the others would wait for this one
            raise
        say("interrupted again: the model is not evaluated")
        return {}


def conclude(state, args, model, dataset, tracker, row):
    """
    Export what the training ended with, hand the models to the tracker, say what is on disk and what to type next. Return
    the exit code: 0 where the last checkpoint, the models and the whole log are there, else 2.
    """
    best, last, step = Path(out_dir, "model.gguf"), Path(out_dir, "last.gguf"), state["step"]
    wanted = step if state["best_step"] is None else state["best_step"]  # a run that was never evaluated
    newest = checkpoint.newest(out_dir) if distributed.is_sharded(model) else None
    weights = checkpoint.load(newest)["model"] if newest else model.state_dict()
    origin = {"iter": step, "tokenizer": str(dataset.folder / dataset.meta["tokenizer"]),
              "dataset": dataset.meta["fingerprint"], "tokens": row["tokens"]}
    try:
        if step == wanted != exported_step(best):
            export_model(weights, args, dataset.tokenizer, best, extra={ITER: step} | state["chat"])
        if step != wanted:
            export_model(weights, args, dataset.tokenizer, last, extra={ITER: step} | state["chat"])
            tracker.model(last, origin | {"loss/val": row.get("loss/val")}, ["latest"])
        elif exported_step(last):  # of an earlier end
            last.unlink()
    except (OSError, MemoryError, RuntimeError) as e:
        if not checkpoint.may_pass(e):
            raise
        say(f"warning: the model of iter {step} could not be written to {out_dir} ({checkpoint.reason(e)})")
    there = exported_step(best)
    if there == wanted:
        tracker.model(best, origin | {"loss/val": state["best"]}, ["best"] if step != wanted else ["best", "latest"])
    tracker.finish()
    if minutes and checkpoint.is_over(knobs(), state):
        say(plan.limit(knobs(), state, row, dataset.meta))
    say(checkpoint.farewell(knobs(), state, best, there, wanted))
    models = there == wanted and step in (wanted, exported_step(last))
    return 0 if models and checkpoint.complete(checkpoint.step_folder(out_dir, step)) and tracker.is_logged() else 2


def save(writer, t, metric, unlogged=()):
    """
    Begin to write a checkpoint, and the exported model when it is the best so far, while training goes on. A disk that fails costs
    a warning, and the next save tries again. Sharded processes each write their slices.
    """
    sharded, dataset = distributed.is_sharded(t.model), t.dataset
    try:
        weights = checkpoint.snapshot(dict(t.model.named_parameters()), copy=sharded)  # a tied one once
        train = checkpoint.snapshot({"optimizer": t.opt.state_dict(), "state": t.state | {"row": dict(unlogged)}})
    except (MemoryError, RuntimeError) as e:  # a GPU's weights find no place in the host's memory
        if sharded or not checkpoint.may_pass(e):
            raise
        return checkpoint.warn_of(e)
    step, best, keep = t.state["step"], t.state["best_step"], 0 if always_save_checkpoint else keep_last

    def work():
        folder = checkpoint.save(out_dir, step, {"args": asdict(t.args), "model": weights, "chat": t.state["chat"]}, train,
                                 t.config, dataset.folder / dataset.meta["tokenizer"], metric, keep, keep_best)
        if step == best and distributed.master:
            whole = checkpoint.load(folder)["model"] if sharded else weights
            export_model(whole, t.args, dataset.tokenizer, Path(out_dir, "model.gguf"), extra={ITER: step} | t.state["chat"])

    if distributed.master or sharded:
        checkpoint.warn_of(writer.wait())  # before the next save, which may remove what the warning is about
        writer.start(work)
    return None


def main(given):
    settle()
    given, search = until_found(globals(), given)
    place = distributed.setup(device, deterministic)
    if place.type == "cpu":
        distributed.keep_memory()
    globals().update(distributed.on_master(modes.own_place, knobs()))
    start, resuming = distributed.on_master(checkpoint.find_start, knobs())
    changes, clock = [], checkpoint.FRESH
    if resuming:
        taken, given, changes = checkpoint.resume_settings(knobs(), start, given)
        globals().update(taken)
        check_settings(knobs())
    elif checkpoint.fine_tuning(knobs()):
        globals().update(adopted := distributed.on_master(adopt, knobs(), given))
        given = given | adopted.keys()
    amp_dtype = distributed.autocast_dtype(dtype, place)
    amp = torch.autocast(place.type, amp_dtype, enabled=amp_dtype != torch.float32)
    if not resuming and plan.from_time(knobs(), given):
        prepared, clock = plan_from_time(given, place, amp_dtype)
    else:
        prepared = load_data(place)
    globals().update(as_prepared(knobs(), {name for name, *_ in changes} if resuming else given, prepared.meta))
    if depth:
        globals().update(plan.derive_from_depth(knobs(), given, prepared.meta["vocab_size"]))
    globals().update(modes.own_settings(knobs()))
    args = checked_args(knobs(), prepared)
    if search and not resuming and not eval_only and not overfit:
        globals().update(distributed.on_master(largest_batch, knobs(), args, place, amp_dtype, make_optimizer))
    dataset = Dataset(prepared, max_seq_len, batch_size, batch_size * gradient_accumulation_steps, seed, distributed.rank,
                      distributed.world, pinned=place.type == "cuda")
    if not eval_only:
        costs.refuse_too_large(knobs(), args, place, amp_dtype)
        begun = checkpoint.manifest(start)["step"] if resuming else 0
        foreseen = costs.foresee(knobs(), args, place, amp_dtype, make_optimizer, prepared.meta, begun)
    model, opt = make_model(args, dataset, place)
    state = checkpoint.new_state(knobs(), args, dataset, clock)
    if resuming:
        state |= checkpoint.restore(knobs(), start, state["fixed"], opt)
        dataset.changed = state["step"], state["sequences"]
    if start:
        state["chat"] = start_from(model, start, check=eval_only or not resuming)
    if not eval_only and modes.chosen(knobs()) in (None, "dry_run"):
        refuse_unexportable(args, dataset.tokenizer, {ITER: max_iters} | state["chat"])
    code = 0
    if eval_only:
        losses = evaluate(model, dataset, place, amp)
        say(f"validation loss {losses['val']:.4f}, training loss {losses['train']:.4f}, over as many tokens")
    elif checkpoint.is_over(knobs(), state):
        code = distributed.on_master(checkpoint.say_finished, knobs(), state)
    else:
        about = costs.describe(knobs(), args, dataset, place, amp_dtype, foreseen) | source_version()
        if modes.chosen(knobs()) in (None, "dry_run"):
            sharded = distributed.is_sharded(model)
            refuse_leftovers(dict(model.named_parameters()) if sharded else model.state_dict(), args)
        config = redact(settings(globals()) | about | {"data_files": source_files(data, cache, column)})
        config |= checkpoint.resumable(settings(globals())) | {"init_from": init_from}  # what resuming needs, as it was given
        if not resuming and modes.chosen(knobs()) in (None, "dry_run"):
            preflight.run_checks(preflight.Ready(knobs(), args, model, opt, dataset, place, amp, not start, config, globals()))
        code = modes.loop(globals())(modes.Training(config, state, dataset, args, model, opt, place, amp, changes)) or 0
    distributed.close(code)
    if code:
        sys.exit(code)


def train(t):
    """
    The loop of a modes.Training, until its steps, its time or its text come to an end, or somebody stops it. Returns the
    exit code.
    """
    config, state, dataset, args, raw_model, opt, device, amp, changes = t
    s, writer = knobs(), checkpoint.Writer()
    tracker = start_tracking(s, config, state) if distributed.master else Tracker()
    clock = checkpoint.session_clock(state["clock"], max_minutes, minutes, distributed.on_master(plan.training_seconds, minutes))
    signals = distributed.Signals(clock["seconds"], clock["end"])
    guard = SpikeDetector(spike_z, state.get("guard"))
    opt.scale = LossScale(config["compute_dtype"] == "float16", state.get("scale"))
    state |= {"guard": guard.state, "scale": opt.scale.state}
    if device.type == "cpu":
        opt.ready = writer.join
    model = torch.compile(distributed.wrap(raw_model)) if compile else distributed.wrap(raw_model)
    resumed, watch, update_norms = state["step"], Stopwatch(device), UpdateNorms(raw_model, wandb_watch)
    norm, rate = None, None  # of the last step
    s.max_iters = state["last"] or max_iters
    bar = tqdm(total=s.max_iters, initial=resumed, unit="it", disable=not (distributed.master and sys.stderr.isatty()),
               dynamic_ncols=True)
    while True:
        step = state["step"]
        end = step >= s.max_iters
        epoch = state["sequences"] * max_seq_len / dataset.meta["train_tokens"]
        row = {"iter": step, "tokens": state["tokens"], "epoch": epoch}
        if step == 0:
            row |= data_rows(dataset)
        row |= (unlogged := state.pop("row", {}))  # of a stop that somebody cut short
        if watch.steps and (step % log_interval == 0 or end):
            row |= {"loss/train": mean_loss(state), "grad/norm": norm.item(), "grad/skipped": guard.state["skipped"],
                    "lr": rate} | watch.read(config) | update_norms.take()
        due = (step % eval_interval == 0 or end) and (step == 0 or step > resumed or unlogged)
        stop, save_now, seconds = signals.read(device) if step > resumed else (False, False, clock["seconds"])
        state["clock"] = clock | {"seconds": seconds}
        with watch.paused():
            if stop:
                save(writer, t, math.inf, row)  # at once, whatever follows
            if due or stop:
                row |= (assess_in_time if stop else assess)(raw_model, dataset, device, amp)
            checkpoint.note_best(s, state, row.get("loss/val", math.inf))
            if len(row) > 3:
                row, changes = row | ({"settings": changes} if changes else {}), []
                row |= take_notes(row, state)
                refuse_nonsense(s, row, tracker)
                tracker.log(row)
                show(row, bar)
            if (step > resumed or unlogged) and ("loss/val" in row or save_now):
                save(writer, t, row.get("loss/val", math.inf))
            if guard.state["in_a_row"] >= max_skips:
                checkpoint.go_back(s, raw_model, opt, guard, writer)
        if end or stop:
            break
        if checkpoint.stalled(s, state):
            s.max_iters = state["last"] = checkpoint.end_soon(s, raw_model, opt, state, writer)
        update_norms.wanted = (step + 1) % log_interval == 0 or step + 1 == s.max_iters
        rate = learning_rate_at(s, step, spent := seconds / clock["end"])
        bar.total = min(s.max_iters, round(step / spent)) if spent and step else s.max_iters  # what the time allows
        opt.set_rate(rate)
        loss, norm, taken = train_step(step, model, opt, dataset, device, amp, guard, update_norms)
        if taken:
            state["loss_sum"], state["loss_steps"] = state["loss_sum"] + loss, state["loss_steps"] + 1
        state["step"] += 1
        state["tokens"] += config["tokens_per_iter"]
        state["sequences"] += batch_size * gradient_accumulation_steps
        watch.steps += 1
        bar.update()
        if compile and step == resumed:
            loss.item()  # waits for an asynchronous device
            say(f"compile: the first step took {time.perf_counter() - watch.start:.1f} s, which no speed below counts")
            watch = Stopwatch(device)
    bar.close()
    checkpoint.warn_of(writer.wait())
    return distributed.on_master(conclude, state, args, raw_model, dataset, tracker, row)


if __name__ == "__main__":
    overrides = configure(globals(), positional="data", common=(
        "data", "out_dir", "depth", "max_iters", "max_minutes", "batch_size", "learning_rate", "wandb_log", "init_from"))
    outlast("stdout")
    try:
        if not supervise:
            main(overrides)
        elif distributed.world == 1:
            settle()
            checkpoint.find_start(knobs())  # where init_from=scratch sets the old run aside: once, not at every restart
            checkpoint.release()
            distributed.supervise(max_restarts, *["--init_from=auto"] * (init_from == "scratch"))
        else:
            fail("--supervise=True is for one process; torchrun has --max-restarts")
    except (MemoryError, RuntimeError) as e:
        if not distributed.is_out_of_memory(e):
            raise
        fail(f"out of memory on the device; lower --batch_size (now {batch_size}) and raise "
             f"--gradient_accumulation_steps by as much ({(str(e) or 'of Python').splitlines()[0]})")
    except KeyboardInterrupt:
        fail("interrupted; what was saved before can be resumed")
