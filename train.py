"""
Train a Llama from scratch.

    python train.py                                 the built-in stories, two minutes on a laptop
    python train.py --data=my.txt --wandb_log=True  your own text, tracked in W&B, with or
                                                    without an account
    python train.py config/stories15M.py            a preset; --key=value after it overrides
    python train.py out/my/config.json --seed=2     repeat a run, here with another seed
    torchrun --nproc_per_node=4 train.py ...        many GPUs

The settings are the globals below; the loop is in train().
"""
import gc
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from configurator import configure, fail  # before torch: it reports missing packages

if __name__ == "__main__":
    gc.disable()  # until the imports are done: garbage collections during them take 0.2 s
if "OMP_WAIT_POLICY" not in os.environ:
    # An idle OpenMP thread spins this many rounds before it sleeps; importing torch reads the
    # number. Without spinning a step is slower, and endless spinning is slow on cores that other
    # programs use too.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
import torch
from tqdm import tqdm

from data import Dataset, data_rows, prepare
from engine import ops
from engine.debug import modes
from engine.debug.instruments import (Stopwatch, UpdateNorms, gradient_noise, mean_loss,
                                      pair_accuracies, probe, show, write_samples)
from engine.debug.preflight import CheckContext, check_names, run_checks
from engine.formats.layout import refuse_other_tensors, unnamed_parameters
from engine.spans import span
from engine.streams import outlast
from engine.text import yardsticks
from engine.text.packing import BEGINS
from engine.text.prepare import source_files
from engine.tracking.redact import redact
from engine.training import (bigrams, checkpoint, costs, distill, distributed, hardware, load, lora,
                             mode, plan, previous_tokens, progress, repeat, result, resume,
                             run_folder, supervisor)
from engine.training.distributed import say
from engine.training.resolve import resolve
from engine.training.seeds import train_all as train_all_seeds
from engine.training.signals import Signals
from engine.training.teachers import train_all as train_with_teachers
from engine.training.training import Training
from engine.training.validate import check_settings, refuse_nonsense
from export import ITER, export_model, exported_step, refuse_unexportable
from model import ModelArgs
from optim import (LossScale, SpikeDetector, check_optimizer, learning_rate_at, make_optimizer,
                   own_gradients)
from track import Tracker, source_version, start_tracking

# ---- output
out_dir = "auto"            # folder for checkpoints, log.jsonl, result.json and model.gguf; auto:
                            # out/<data>, after the name of the data
eval_interval = 500         # steps between evaluations, each followed by a checkpoint
eval_iters = 50             # tokens of the validation split that an evaluation reads, in units of
                            # 1024; 0: all. Of the training split it reads a quarter of that, see
                            # costs.eval_limits
eval_only = False           # evaluate the checkpoint in out_dir, then exit
log_interval = 20           # steps between rows of the log
early_stop = 0              # after this many evaluations in a row without a new best loss, return
                            # to the best weights and end after a few final steps; 0: never
always_save_checkpoint = False  # keep every checkpoint instead of the newest and the best
init_from = "auto"          # auto: resume the run in out_dir if there is one, else start; force:
                            # like auto, even if batch, data, seed or context have changed; scratch;
                            # resume; or the path of a model to fine-tune
minutes = 0.0               # time budget in minutes; model size and steps are derived from it and
                            # the data. 0: none; but a new model on data other than stories gets 5
                            # (20 on a GPU) unless depth, max_iters or max_minutes is set
max_minutes = 0.0           # save and stop after this many minutes, with the learning rate decayed
                            # to its final value; 0: no limit
checks = "all"              # checks before the first step: all, none, a list (future,leak), or all
                            # except a list (-leak). -files also skips and counts files that can't
                            # be read as text; -export also allows a model that no model file can
                            # hold
sample_prompt = "auto"      # prompts that the model continues at every evaluation, separated by |;
                            # auto: the beginning of a line of the validation text
json = False                # print the content of result.json as the last line
# ---- tracking
wandb_log = False           # track in Weights & Biases; offline without a key or a server
wandb_project = "auto"      # W&B project; auto: WANDB_PROJECT or the project of `wandb init`, else
                            # llamac
wandb_run_name = "auto"     # W&B run name; auto: WANDB_NAME, else from data and size
log_extras = "tables,model"  # what to log besides numbers, separated by commas. tables (of texts)
                             # and model (the exported file) go to W&B; gradients and parameters:
                             # their histograms; noise_scale: batch size in tokens beyond which
                             # returns diminish
tensorboard_log = False     # the same metrics as TensorBoard event files (needs: pip install
                            # tensorboard)
swanlab_log = False         # the same metrics and tables in SwanLab; offline without a key or a
                            # server (pip install swanlab)
trackio_log = False         # the same metrics and tables in trackio, on this machine (pip install
                            # trackio)
# ---- data
data = "stories"            # stories, stories:N, tinystories, tinyshakespeare, a file, a folder,
                            # prepared data
vocab_source = "custom"     # custom: BPE trained on the data; bpe: byte-level BPE; byte; char;
                            # llama2; or a tokenizer's path
vocab_size = 0              # size of a vocabulary trained on the data; 0: chosen from the size of
                            # the text
max_vocab_size = 0          # max size to choose when vocab_size is 0; rare characters become bytes
                            # to stay below it; 0: no limit
max_text_bytes = 0          # max bytes of text to train on, as evenly spaced stretches; 0: all of
                            # it
val_fraction = 0.0          # fraction of the text held out for validation; 0: a tenth, at most 5 MB
column = "text"             # name of the text field in .jsonl, .csv, .tsv and .parquet; with
                            # "text", "story" is found too
cache = "cache"             # folder for prepared data; runs on several machines need a shared one
# ---- model
depth = 0                   # derive model size, batch size, learning rate and steps from this
                            # number; 0: use the settings below
dim = 64                    # model width
n_layers = 2                # number of blocks
n_heads = 2                 # number of query heads
n_kv_heads = 0              # number of key/value heads; 0: as many as n_heads
hidden_dim = 0              # width of the feed-forward; 0: 8/3 dim, rounded up to a multiple of
                            # multiple_of
multiple_of = 32            # the hidden width is rounded up to a multiple of this
max_seq_len = 192           # context, in tokens
first_seq_len = 0           # context of the first steps, in tokens: shorter is faster. It doubles
                            # in stages; the last tenth of the run has max_seq_len. 0: max_seq_len
                            # throughout
dropout = 0.0               # dropout probability after the embeddings and in each residual
                            # branch; 0 for large data, 0.1 for many epochs
document_mask = True        # attention sees only its own document; False is faster with long
                            # contexts
tie_embeddings = True       # the classifier shares the embedding's weights
bigram_start = False        # initialize embedding and classifier of a new model from bigram counts,
                            # so that it predicts the next token from the current one even before
                            # the first step; needs tie_embeddings=False
rope_theta = 10000.0        # base of the rotary position embedding
qkv_bias = False            # biases for queries, keys and values, as in Qwen2
lora_rank = 0               # freeze the weights of init_from and train LoRA adapters of this rank
                            # for its matrices, with alpha 16, and with AdamW unless optimizer is
                            # given; 0: train all weights
lora_targets = "all"        # matrices with an adapter: all of the blocks, or some of wq,wk,wv,wo,
                            # w1,w2,w3, also as q_proj,k_proj,v_proj,o_proj,gate_proj,down_proj,
                            # up_proj
# ---- optimization
batch_size = 6              # sequences per forward pass; 0: as many as fit into memory
gradient_accumulation_steps = 1  # forward passes per step, summed over all processes: a step
                                 # has batch_size times this many sequences
max_iters = 3000            # number of steps
optimizer = "muon"          # muon: Muon for the blocks' matrices and AdamW for the rest; adamw:
                            # AdamW for all; or another row of OPTIMIZERS in optim.py
learning_rate = 6e-3        # peak learning rate
embedding_lr_scale = 1.0    # learning rate of embedding and classifier, as a multiple of
                            # learning_rate
weight_decay = 0.1          # weight decay of the matrices
momentum = 0.95             # momentum of Muon
beta1 = 0.9                 # AdamW: decay of the mean of gradients
beta2 = 0.95                # AdamW: decay of the mean of squared gradients; 0.999 if most tokens of
                            # the vocabulary are rare
grad_clip = 1.0             # max norm of the gradient; 0: no limit
schedule = "linear"         # learning rate after warm-up. linear: constant, then linear decay over
                            # the last decay_fraction of the steps; or cosine; or constant
decay_fraction = 0.6        # fraction of the steps over which the linear schedule decays
warmup_iters = 50           # steps of linear warm-up
min_lr = 0.0                # learning rate at the end of the schedule
weight_average = 0.0        # evaluate, save and export a running average of the weights over about
                            # this fraction of the steps so far, instead of the last weights; for
                            # training over many epochs; 0: off
embedding_noise = 0.0       # fine-tuning: standard deviation of the noise added to the embedding
                            # before the first step; it separates words that the base model treats
                            # alike
teacher = ""                # distillation: learn the predictions of these models, on the text and
                            # on text that they generate; paths separated by commas, or a folder
                            # made by --seeds. auto: first train three teachers with other seeds, in
                            # out/<data>-teachers. ngrams: learn the predictions of n-gram counts of
                            # the text
# ---- system
device = "auto"             # auto, cpu, cuda, cuda:1, mps
dtype = "auto"              # auto, float32 (TF32 on NVIDIA's GPUs), bf32 (float32, but inputs of
                            # matrix products are rounded to bfloat16; auto on CPUs with AMX where
                            # faster), bfloat16, float16 (auto on V100 and T4)
peak_tflops = 0.0           # peak TFLOPS per device, the reference for mfu (model FLOPs
                            # utilization); 0: from its data sheet, or measured with a matrix
                            # product
fsdp = False                # split weights and optimizer over the processes (FSDP2) instead of
                            # copying them (DDP)
compile = False             # torch.compile: faster steps after a minute of compiling
cuda_graphs = False         # with compile, on one GPU: replay forward and backward pass as CUDA
                            # graphs; for models so small that the GPU waits for Python
activation_checkpointing = False  # keep only the input of each block and recompute the rest in the
                                  # backward pass: less memory
supervise = False           # restart this program from its last checkpoint when it crashes
spike_z = 6.0               # skip a step whose loss or gradient norm exceeds its running mean by
                            # this many standard deviations; 0: never
deterministic = False       # on a GPU: bitwise reproducible results, with slower kernels
seed = 1337                 # seed of initialization, data order and dropout
seeds = 1                   # number of runs to train one after the other, with this seed and the
                            # following ones, each in its own folder in out_dir; then print mean and
                            # standard deviation
# ---- before a training
overfit = 0                 # overfit this many windows, and report PASS or FAIL
dry_run = False             # run everything for 3 steps in a temporary folder
lr_find = False             # find a learning_rate: a ramp, then four rates for 100 steps each;
                            # prints a table, draws a picture
profile = False             # profile 5 steps: a table of where the time goes, and a trace

# What a trial needs to build a model and its optimizer. Trials measure the speed for the plan, and
# find the largest batch that fits.
BUILD = costs.Build(ModelArgs.of, make_optimizer)


def train_step(t, step, x, y, spike_detector, update_norms, context=0):
    """
    Take one optimizer step of a Training in micro-batches of batch_size sequences. x, y: this
    process's slice of the global batch, (sequences, max_seq_len) each. context: length in tokens of
    the pieces that each sequence is cut into; 0: sequences stay whole. Return (loss, norm, taken):
    the mean loss and the gradient norm of the global batch, scalar tensors on the device, and
    whether the step was taken, since the spike detector may refuse it.
    """
    context = context or x.shape[1]
    # Dropout, like the batch, depends on seed, step and rank alone: a resumed run repeats it.
    torch.manual_seed(seed + step * distributed.world + distributed.rank)
    # Every process has the same number of micro-batches.
    micro_batches = list(zip(x.split(batch_size), y.split(batch_size)))
    places = t.dataset.places(step) if t.teachers else None
    # Targets per process, on average. Each micro-batch's loss is weighted by its share of this
    # number, so that the mean over processes is the mean over all targets of the global batch.
    targets = distributed.total((y >= 0).sum().item()) / distributed.world
    grouped_queries = 0 < n_kv_heads < n_heads
    packed = document_mask and ops.has_packed_attention(t.device, t.amp, t.args.head_dim,
                                                        grouped_queries)
    total = torch.zeros((), device=t.device)
    for i, (xb, yb) in enumerate(micro_batches):
        share = (yb >= 0).sum().item() / targets if targets else 0.0
        xb, yb = xb.reshape(-1, context), yb.reshape(-1, context)
        # None: the network masks other documents by model.bos_id, if that is set.
        documents = None
        if packed:
            borders = yb if t.dataset.separator == BEGINS else xb  # of documents
            documents = ops.documents_of(borders, t.dataset.separator, t.device, cuda_graphs)
        xb, yb = distributed.to_device(t.device, xb, yb)
        with distributed.accumulate(t.network, last=i == len(micro_batches) - 1):
            with span("forward"), t.amp:
                if t.teachers:
                    rows = places[i * batch_size:(i + 1) * batch_size].reshape(-1, context)
                    loss = distill.loss(t.network, t.teachers, xb, yb, rows, documents) * share
                else:
                    loss = t.network(xb, yb, documents=documents)[1] * share
            with span("backward"):  # outside autocast, which would downcast the float32 reductions
                (loss * t.opt.scale.factor).backward()
        if cuda_graphs and i == 0:
            own_gradients(t.model)  # the next replay overwrites the gradients of this one
        total += loss.detach()
    with span("clipping"):
        grads = [p.grad for p in t.model.parameters() if p.grad is not None]
        scaled_norm = torch.nn.utils.get_total_norm(grads)
    norm = distributed.unshard(scaled_norm) / t.opt.scale.factor  # over the slices of all processes
    loss = distributed.mean(total)
    read = distributed.read_async(torch.stack((loss, norm)))
    with span("clipping"):
        max_norm = (grad_clip or math.inf) * t.opt.scale.factor
        torch.nn.utils.clip_grads_with_norm_(t.model.parameters(), max_norm, scaled_norm)
    is_judged = spike_z or t.opt.scale.wanted
    taken = not (is_judged and spike_detector.refuses(*read()))  # read() waits for the device
    if taken and update_norms.wanted:
        t.opt.step(update_norms)
    elif taken:
        t.opt.step()
    if t.opt.scale.wanted:
        t.opt.scale.update(read()[1])  # no wait: read above
    t.opt.zero_grad()
    return loss, norm, taken


@torch.no_grad()
def evaluate(t):
    """
    Return {split: mean loss in nats per token} for "train" and "val". Every call reads the same
    documents, with costs.eval_limits predictions. Each document is read from its beginning, a long
    one in pieces of the context's length. The processes share the work.
    """
    t.model.eval()
    # Apple's GPUs have no float64.
    precise = torch.float32 if t.device.type == "mps" else torch.float64
    losses = {}
    for split, limit in costs.eval_limits(eval_iters, t.dataset.meta).items():
        total = torch.zeros(2, dtype=precise, device=t.device)  # [sum of losses, predictions]
        for x, y, is_counted in t.dataset.eval_batches(split, limit, costs.EVAL_PASS):
            x, y = distributed.to_device(t.device, x, y)
            with t.amp:
                loss = t.model(x, y)[1]
            predictions = (y >= 0).sum() * is_counted  # 0: repeated by an idle rank
            total += torch.stack((loss.to(precise) * predictions, predictions))
        nats, predictions = distributed.mean(total).tolist()
        losses[split] = nats / predictions
    t.model.train()
    return losses


def assess(t):
    """
    Evaluate. Return a row: losses in nats per token, "bpb/val" in bits per byte of text, samples,
    and the metrics of engine/debug/instruments.py.
    """
    t.opt.use_averages()
    losses = evaluate(t)
    row = {"loss/val": losses["val"], "loss/train_eval": losses["train"]}
    if not math.isfinite(losses["val"]):
        return row  # skip sampling: refuse_nonsense ends the run
    probed = {split: distributed.to_device(t.device, *batch)
              for split, batch in t.dataset.probe_batches().items()}
    prompts = sample_prompt.split("|")
    samples = write_samples(t.model, t.dataset.coder, t.device, prompts, seed)
    noise = {}
    if "noise_scale" in log_extras:
        noise = gradient_noise(t.model, t.dataset, t.device, t.amp)
    row |= {"bpb/val": t.dataset.bits_per_byte(losses["val"]), "samples": samples}
    row |= pair_accuracies(t.model, t.dataset, t.device, t.amp, eval_iters)
    return row | noise | probe(t.model, probed, t.dataset.tokenizer, t.amp)


def assess_at_stop(t):
    """Evaluate as `assess` does; another Ctrl-C skips the evaluation."""
    try:
        return assess(t)
    except KeyboardInterrupt:
        if distributed.world > 1:  # the other processes would wait for this one
            raise
        say("interrupted again: the model is not evaluated")
        return {}


def save(t, writer, metric, unlogged=()):
    """
    Start writing a checkpoint in the background, and model.gguf if this step is the best so far.
    metric: the validation loss, inf if it was not measured; unlogged: the row of this step if it is
    not logged yet, which a resumed run logs first. If the disk fails, warn; the next save tries
    again. If the model is sharded, each process writes its slices.
    """
    t.opt.use_averages()
    sharded = distributed.is_sharded(t.model)
    state = t.state | {"row": dict(unlogged)}
    try:
        # A shared parameter is listed once. Shards are copied: FSDP may free the storage that they
        # refer to while the writer reads it.
        trained, frozen = lora.split(t.model)
        weights = checkpoint.snapshot(trained, copy=sharded)
        train = checkpoint.snapshot({"optimizer": t.opt.state_dict(), "state": state})
    except (MemoryError, RuntimeError) as e:  # a GPU's weights don't fit into the host's memory
        if sharded or not checkpoint.is_retryable(e):
            raise
        progress.warn_of(e)
        return
    step, best, extra = t.state["step"], t.state["best_step"], t.state["chat"]
    keep_last = 0 if always_save_checkpoint else 1  # 0: no limit

    def work():
        model = {"args": asdict(t.args), "model": weights, "chat": extra}
        model |= lora.stored(t.model.lora)
        tokenizer = t.dataset.folder / t.dataset.meta["tokenizer"]
        contents = checkpoint.Contents(step, model, train, t.record, tokenizer, metric, frozen)
        # keep_claim: if out_dir was deleted meanwhile, claim it for this process again.
        folder = checkpoint.save(out_dir, contents, keep_last, claim=run_folder.keep_claim)
        if step == best and t.exports and distributed.master:
            whole = checkpoint.load(folder)["model"] if sharded else weights | frozen
            whole = lora.merged(whole, t.model.lora)
            path = Path(out_dir, "model.gguf")
            export_model(whole, t.args, t.dataset.tokenizer, path, extra={ITER: step} | extra)

    if distributed.master or sharded:
        # Wait for the last save and report its failure: the next save may remove its files.
        progress.warn_of(writer.wait())
        writer.start(work)


def conclude(t, tracker, row):
    """
    Export the model that the training ended with, hand the models to the tracker, and report what
    is on disk and what to type next. row: the row of the last step. Return the exit code: 0 if the
    last checkpoint, the models, the result and the whole log are on disk, else 2.
    """
    t.opt.use_averages()
    state, step = t.state, t.state["step"]
    best, last = Path(out_dir, "model.gguf"), Path(out_dir, "last.gguf")
    never_evaluated = state["best_step"] is None
    wanted = None  # the step whose weights model.gguf should have
    if t.exports:
        wanted = step if never_evaluated else state["best_step"]
    # A sharded model's whole weights are read from its checkpoint.
    newest = checkpoint.newest(out_dir) if distributed.is_sharded(t.model) else None
    weights = checkpoint.load(newest)["model"] if newest else t.model.state_dict()
    weights = lora.merged(weights, t.model.lora)
    extra = {ITER: step} | state["chat"]
    origin = {"tokenizer": str(t.dataset.folder / t.dataset.meta["tokenizer"]),
              "dataset": t.dataset.meta["fingerprint"]}
    at_last = origin | {"iter": step, "tokens": row["tokens"]}
    try:
        if step == wanted and exported_step(best) != step:
            export_model(weights, t.args, t.dataset.tokenizer, best, extra=extra)
        if t.exports and step != wanted:
            export_model(weights, t.args, t.dataset.tokenizer, last, extra=extra)
            tracker.model(last, at_last | {"loss/val": row.get("loss/val")}, ["latest"])
        elif t.exports and exported_step(last):  # of an earlier session, out of date now
            last.unlink()
    except (OSError, MemoryError, RuntimeError) as e:  # a full disk, for example
        if not checkpoint.is_retryable(e):
            raise
        say(f"warning: the model of iter {step} could not be written to {out_dir} "
            f"({checkpoint.why_unsaved(e)})")
    exported = exported_step(best)
    if t.exports and exported == wanted:
        is_last = step == wanted
        at_best = at_last if is_last else origin | {"iter": wanted}
        aliases = ["best", "latest"] if is_last else ["best"]
        tracker.model(best, at_best | {"loss/val": state["best"]}, aliases)
    tracker.finish()
    if minutes and progress.is_over(t.config, state):
        say(plan.limiting_factor(t.config, state, row, t.dataset.meta))
    best_bits, scale = t.dataset.bits_per_byte(state["best"]), t.record.get("yardsticks")
    if scale and math.isfinite(best_bits) and not dry_run:
        say(yardsticks.assess(best_bits, scale, row, t.dataset.meta))
    status = "finished" if progress.is_over(t.config, state) else "stopped"
    model = best if t.exports and exported is not None else None
    found = result.result_of(t, status, row, model)
    is_written = result.write(out_dir, found)
    if not dry_run:
        say(progress.final_message(t.config, state, best, exported, wanted))
        result.show(t.config, found)
    has_models = not t.exports or (exported == wanted and step in (wanted, exported_step(last)))
    is_saved = checkpoint.complete(checkpoint.step_folder(out_dir, step))
    return 0 if has_models and is_saved and is_written and tracker.is_logged() else 2


def check_export(args, model, tokenizer, chat):
    """
    End the program if model files can't hold this model. Return whether this training writes model
    files: False if they have no name for a parameter and --checks=-export allows that. chat: GGUF's
    metadata about chats, {key: value}.
    """
    refuse_unexportable(args, tokenizer, {ITER: max_iters} | chat)
    is_sharded = distributed.is_sharded(model)
    weights = dict(model.named_parameters()) if is_sharded else model.state_dict()
    weights = lora.merged(weights, model.lora)
    unnamed = unnamed_parameters(weights, args)
    if unnamed and resume.leaves_out(checks, "export"):
        say(f"warning: model files have no name for {unnamed[0]}: this training writes "
            f"checkpoints but no model.gguf")
        return False
    refuse_other_tensors(weights, args)
    return True


def main(config, steps=math.inf):
    """
    Train, evaluate, or run a mode, as the settings of `config` ask. steps: max steps of this
    session. Return the Training and the exit code of the program.
    """
    # ---- settings: resolved once, constant below -------------------------------------------------
    device = distributed.setup(config.device, config.deterministic)
    if device.type == "cpu":
        hardware.keep_memory()
    is_forced = config.init_from == "force"
    repeated = distributed.on_master(repeat.schedule, config)
    found = resolve(config, device, prepare, BUILD)
    config, args, setup = found.config, found.args, found.setup
    globals().update(config.as_dict())

    # ---- data ------------------------------------------------------------------------------------
    sequences = batch_size * gradient_accumulation_steps  # per step, over all processes
    dataset = Dataset.of(found.prepared, max_seq_len, batch_size, sequences, seed, distributed.rank,
                         distributed.world, pinned=device.type == "cuda")
    if not eval_only:
        costs.refuse_too_large(config, args, setup)
        begun = checkpoint.manifest(found.start)["step"] if found.resuming else 0
        estimate = costs.estimate_run(config, args, setup, dataset.meta, begun)

    # ---- teachers of a distillation --------------------------------------------------------------
    teachers = None
    if teacher and not eval_only:
        models = load.load_teachers(config, dataset, device)
        teachers = distill.assemble(models, config, dataset)

    # ---- model and optimizer ---------------------------------------------------------------------
    torch.manual_seed(seed)
    model = lora.build(args, setup.lora, device)
    model.bos_id = dataset.separator if document_mask else None
    model.recompute = activation_checkpointing
    if not found.start:
        if bigram_start:
            bigrams.start_tables(model, dataset.train)
        previous_tokens.start_heads(model, rows_are_random=not bigram_start)
    if fsdp and distributed.world > 1:
        distributed.shard(model)
    opt = make_optimizer(model, config)
    amp = torch.autocast(device.type, setup.amp_dtype, enabled=setup.amp_dtype != torch.float32)

    # ---- resume, or start from another model -----------------------------------------------------
    state = progress.new_state(config, found.clock, resume.resume_signature(config, args, dataset))
    if found.resuming:
        state |= resume.restore(config, found.start, state["fixed"], opt, is_forced)
        dataset.resumed_at = state["step"], state["sequences"]
    else:
        state |= repeated
    if found.start:
        state["chat"] = load.start_from(model, found.start, found.resuming,
                                        check=eval_only or not found.resuming,
                                        grows=bool(dataset.masks), noise=embedding_noise)
    state["chat"] |= load.chat_metadata(found.prepared)
    opt.scale = LossScale(setup.amp_dtype == torch.float16, state.get("scale"))
    network = distributed.wrap(model)
    if compile:
        how = "reduce-overhead" if cuda_graphs else None  # torch.compile's name for CUDA graphs
        network = torch.compile(network, mode=how)
        if cuda_graphs:
            opt.compile(mode=how)
    saves = not eval_only and mode.chosen(config) in (None, "dry_run")  # other modes save nothing
    exports = saves and check_export(args, model, dataset.tokenizer, state["chat"])
    t = Training(config, {}, state, dataset, args, model, network, opt, device, amp, found.changes,
                 exports, teachers)
    if eval_only:
        losses = evaluate(t)
        read = costs.eval_limits(eval_iters, dataset.meta)
        say(f"validation loss {losses['val']:.4f} over up to {read['val']:,} tokens, training loss "
            f"{losses['train']:.4f} over up to {read['train']:,}")
        row = {"loss/val": losses["val"], "loss/train_eval": losses["train"],
               "bpb/val": dataset.bits_per_byte(losses["val"])}
        result.show(config, result.result_of(t, "evaluated", row))
        return t, 0
    if progress.is_over(config, state):
        code = distributed.on_master(progress.say_finished, config, state, exports)
        distributed.on_master(result.repeat, t)
        return t, code

    # ---- before the first step: the record of the settings, and the checks -----------------------
    derived = costs.describe(config, args, dataset, setup, estimate)
    derived |= source_version() | {"data_files": source_files(data, cache, column)}
    if not found.resuming:
        repeat.note_differences(config, derived)
    settings = resume.recorded(config)
    t.record.update(redact(settings | derived))
    # Settings that resuming needs are recorded without redaction.
    t.record.update(resume.resumable(settings), init_from=init_from)
    if saves and not found.resuming:
        is_random = not found.start and not bigram_start
        run_checks(CheckContext(t, is_random, train_step, make_optimizer, export_model))

    # ---- training, or a mode that calls train_step in a loop of its own --------------------------
    if saves:
        return t, train(t, steps) if steps else 0  # no steps: set up and check only
    code = modes.MODES[mode.chosen(config)](t, train_step) or 0
    distributed.on_master(run_folder.release)
    distributed.on_master(mode.remove_folder)
    return t, code


def train(t, steps=math.inf):
    """
    Train until the last step, the end of the time budget, early_stop, or a signal. steps: max steps
    of this session. Return the exit code of `conclude`.
    """
    config, state, record, model, opt = t.config, t.state, t.record, t.model, t.opt
    first_step, changes = state["step"], t.changes
    last_step, end = state["last"] or max_iters, state.get("end") or math.inf
    tracker = start_tracking(config, record, state) if distributed.master else Tracker()
    writer = checkpoint.Writer()
    if t.device.type == "cpu":
        opt.ready = writer.join  # the weights may not change while the writer reads them
    clock = state["clock"]
    if "end" not in state:  # not a repetition, which follows another run's clock
        budget_left = distributed.on_master(plan.training_seconds, minutes)  # seconds
        clock = progress.session_clock(clock, max_minutes, minutes, budget_left)
        if math.isinf(clock["end"]):
            progress.drop_time_limit(config, state)
    signals = Signals(clock["seconds"], clock["end"])
    spike_detector = SpikeDetector(spike_z, state.get("guard"))
    state |= {"guard": spike_detector.state, "scale": opt.scale.state}
    stopwatch, update_norms = Stopwatch(t.device), UpdateNorms(model, log_extras)
    norm, rate = None, None  # gradient norm and learning rate of the last step
    bar = tqdm(total=last_step, initial=first_step, unit="it", dynamic_ncols=True,
               disable=not (distributed.master and sys.stderr.isatty()))
    while True:
        step = state["step"]
        is_last, is_new = step >= min(last_step, end), step > first_step
        stop, save_now, seconds = False, False, clock["seconds"]
        if is_new:
            stop, save_now, seconds = signals.read()
        stop = stop or step >= first_step + steps
        state["clock"] = clock | {"seconds": seconds}
        epoch = t.dataset.epochs(state["sequences"])
        row = {"iter": step, "tokens": state["tokens"], "epoch": epoch}
        n_coordinates = len(row)  # a row with only these entries is not logged

        with stopwatch.paused():
            # At the first step: tables of the data. After resuming, if the last session ended
            # before it logged its last row: that row, with an evaluation if one is due.
            if step == 0:
                row |= data_rows(t.dataset) | yardsticks.metrics(record)
            unlogged = state.pop("row", {})
            row |= unlogged

        # Every log_interval steps: the training loss, the rate, norms and the speed.
        if stopwatch.steps and (step % log_interval == 0 or is_last):
            row |= {"loss/train": mean_loss(state), "grad/norm": norm.item(),
                    "grad/skipped": spike_detector.state["skipped"], "lr": rate}
            row |= stopwatch.read(record) | update_norms.take()

        with stopwatch.paused():
            # At a stop: save before the evaluation, which may be cut short. If it isn't, a second
            # save follows.
            if stop:
                save(t, writer, math.inf, row)

            # Every eval_interval steps, and at a stop: losses over fixed documents, samples, probes
            # of the model.
            due = (step % eval_interval == 0 or is_last) and (step == 0 or is_new or unlogged)
            if due or stop:
                row |= (assess_at_stop if stop else assess)(t)
            progress.note_best(config, state, row.get("loss/val", math.inf))

            # A row with metrics is checked, logged and shown.
            if len(row) > n_coordinates:
                if changes:
                    row, changes = row | {"settings": changes}, []
                refuse_nonsense(config, row, tracker)
                tracker.log(row)
                show(row, bar)

            # After an evaluation, or on request: a checkpoint.
            if (is_new or unlogged) and ("loss/val" in row or save_now):
                save(t, writer, row.get("loss/val", math.inf))

            # After MAX_SKIPS refused steps in a row: back to the weights of the last checkpoint.
            if spike_detector.state["in_a_row"] >= progress.MAX_SKIPS:
                progress.go_back(config, model, opt, spike_detector, writer)
        if is_last or stop:
            break

        # When the validation loss has stopped falling: back to the best weights, then a few last
        # steps; the step count goes on.
        if progress.stalled(config, state):
            last_step = progress.end_soon(config, last_step, model, opt, state, writer)
            state["last"] = last_step

        # One step.
        # The rate follows the steps or the clock, whichever is further ahead.
        spent = seconds / clock["end"]  # fraction of the time budget
        last_by_clock = progress.last_by_clock(state, spent, anew=step == first_step)
        rate = learning_rate_at(config, step, last_step, step / last_by_clock)
        opt.set_rate(rate)
        context = progress.context_at(config, step / min(last_step, last_by_clock))
        if weight_average:
            opt.averaging = 1 / (1 + weight_average * step)
        update_norms.wanted = (step + 1) % log_interval == 0 or step + 1 == last_step
        opt.use_trained()
        x, y = t.dataset.batch(step)
        loss, norm, taken = train_step(t, step, x, y, spike_detector, update_norms, context)
        if taken:
            state["loss_sum"] = state["loss_sum"] + loss
            state["loss_steps"] += 1
        state["step"] += 1
        state["tokens"] += record["tokens_per_iter"]
        state["sequences"] += batch_size * gradient_accumulation_steps
        stopwatch.steps += 1
        stopwatch.context_sum += context
        bar.total = min(last_step, last_by_clock)
        bar.update()
        if compile and step == first_step:
            loss.item()  # waits for an asynchronous device
            compiling = time.perf_counter() - stopwatch.start
            say(f"compile: the first step took {compiling:.1f} s; the speeds below exclude it")
            stopwatch = Stopwatch(t.device)
    bar.close()
    progress.warn_of(writer.wait())
    return distributed.on_master(conclude, t, tracker, row)


def start(config):
    """
    Check the settings, name the run's folder, and train: here, supervised, or as a dry run. Return
    the exit code.
    """
    check_settings(config)
    check_names(config.checks)
    check_optimizer(config.optimizer)
    config = repeat.name_folder(config)
    if config.out_dir == "auto":
        ending = "-student" if config.teacher == "auto" else "-seeds" * (config.seeds > 1)
        config = config.changed(out_dir=resume.default_out_dir(config.data) + ending)
    if config.teacher == "auto":
        return train_with_teachers(config)
    if config.seeds > 1:
        return train_all_seeds(config)
    config = config.changed(out_dir=resume.folder_of_seed(config))
    if config.dry_run:
        return modes.dry_run(config, main)
    if not config.supervise:
        return main(config)[1]
    if distributed.world > 1:
        fail("--supervise=True is for one process; torchrun has --max-restarts")
    # With init_from=scratch, find_start sets the old run aside. Do this only once, here: all
    # supervised starts then get --init_from=auto.
    resume.find_start(config)
    run_folder.release()
    more = ["--init_from=auto"] if config.init_from == "scratch" else []
    return supervisor.supervise(*more)


if __name__ == "__main__":
    gc.freeze()  # later garbage collections skip the imported objects
    gc.enable()
    config = configure(globals(), positional="data", common=(
        "data", "out_dir", "minutes", "depth", "max_iters", "batch_size", "learning_rate",
        "wandb_log", "init_from"), adapt=repeat.settings)
    outlast("stdout")  # training goes on when the terminal, disk or pipe behind stdout fails
    try:
        code = start(config)
        distributed.close(code)
    except (MemoryError, RuntimeError) as e:
        if not hardware.is_out_of_memory(e):
            raise
        reason = (str(e) or "MemoryError").splitlines()[0]
        fail(f"out of memory on the device; lower --batch_size (now {batch_size}) and raise "
             f"--gradient_accumulation_steps by the same factor ({reason})")
    except KeyboardInterrupt:
        fail("interrupted; what was saved before can be resumed")
    sys.exit(code)
