"""
Metrics of a training besides its loss: norms of gradients, weights and updates, the gradient noise
scale, predictions and samples, the speed. Also the display of a row of metrics.
"""
import collections
import contextlib
import math
import time

import torch

from engine.debug.activations import ActivationStats, watch
from engine.spans import spanned
from engine.text import pairs
from engine.training import distributed, hardware
from engine.training.costs import PROBED, SAMPLE_TOKENS
from engine.training.likelihood import compare_pairs
from tokenizer import spell


def histogram(values, bins=32):
    """Return {"counts", "edges"} of a tensor's finite values."""
    values = values.detach().float().flatten()
    if not values.isfinite().all():
        values = values[values.isfinite()]
    if not len(values):
        return {"counts": [0], "edges": [0.0, 1.0]}
    low, high = torch.stack((values.min(), values.max())).tolist()
    if high <= low:
        high = low + 1e-6 * max(1.0, abs(low))
    edges = [low + (high - low) * i / bins for i in range(bins + 1)]
    counts = torch.histc(values, bins, low, high).tolist()
    return {"counts": [int(count) for count in counts], "edges": edges}


# ---- norms ------------------------------------------------------------------------------------

# {kind of norm: word in log_extras that enables histograms of its tensors}. The word is also the
# prefix of their names in the log.
HISTOGRAMS = {"grad": "gradients", "weight": "parameters"}


def layer_of(name):
    """Return a parameter's layer: layers.3.attention.wq.weight -> layers.3; norm.weight -> norm."""
    words = name.split(".")
    return ".".join(words[:2]) if words[0] == "layers" else words[0]


class UpdateNorms:
    """
    Measure an optimizer step if `wanted` is set: for each layer the norm of the gradient as the
    optimizer receives it (clipped), the norm of the weights after the update, and the norm of the
    update divided by that of the weights. log_extras: the setting of train.py, in which "gradients"
    and "parameters" enable histograms.

        optimizer.step(update_norms)

    The optimizer enters update_norms(params) around the update of each chunk of parameters, so only
    one chunk is copied at a time.
    """

    def __init__(self, model, log_extras=""):
        self.names = {p: name for name, p in model.named_parameters()}
        self.log_extras, self.wanted = log_extras, False
        self.norms, self.histograms = [], {}

    @contextlib.contextmanager
    def __call__(self, params):
        if not self.wanted:
            yield
            return
        weights = [p.detach() for p in params]
        before = [w.clone() for w in weights]
        self.measure("grad", params, [p.grad for p in params])
        yield
        self.measure("weight", params, weights)
        torch._foreach_sub_(before, weights)  # before - after has the norm of the update
        self.measure("update", params, before)

    def measure(self, kind, params, tensors):
        """
        Add the norms of tensors, which stay on their device until `take`, and the histograms that
        log_extras asks for. kind: "grad", "weight" or "update".
        """
        names, prefix = [self.names[p] for p in params], HISTOGRAMS.get(kind)
        for name, norm in zip(names, torch._foreach_norm(tensors)):
            self.norms.append((kind, layer_of(name), norm))
        if prefix and prefix in self.log_extras:
            for name, tensor in zip(names, tensors):
                self.histograms[f"{prefix}/{name}"] = histogram(distributed.unshard(tensor))

    @spanned("logging")
    def take(self):
        """Return the metrics of the measured step and forget them; waits for the device once."""
        measured, metrics = self.norms, self.histograms
        self.norms, self.histograms = [], {}
        if not measured:
            return metrics
        squares = collections.Counter()
        norms = torch.stack(distributed.unshard([norm for *_, norm in measured])).tolist()
        for (kind, layer, _), norm in zip(measured, norms):
            squares[kind, layer] += norm * norm
        for (kind, layer), square in squares.items():
            metrics[f"norm/{kind}/{layer}"] = math.sqrt(square)
        for kind, layer in squares:
            if kind == "update":
                metrics[f"norm/update/{layer}"] /= metrics[f"norm/weight/{layer}"] + 1e-12
        return metrics


# ---- gradients and predictions ----------------------------------------------------------------

MAX_PAIRS = 32  # minimal pairs of each kind at an evaluation


def gradient_noise(model, dataset, device, amp, steps=4, small_batches=32):
    """
    Return {"grad/noise_scale": the batch size in tokens beyond which returns diminish}, or {} if
    there are fewer than two sequences or the estimated squared norm is not positive. It is
    B_simple of https://arxiv.org/abs/1812.06162, appendix A.1: the variance of the gradient over
    its squared norm, from the mean squared norm of the gradients of small batches and the squared
    norm of their mean. The batches of the first `steps` steps are split into at most
    `small_batches` small batches.
    """
    batches = [dataset.make_batch(step) for step in range(steps)]
    x, y = (torch.cat(tensors) for tensors in zip(*batches))
    n = min(small_batches, len(x))
    if n < 2:
        return {}
    rows, total, small = len(x) // n, None, 0.0
    model.eval()
    for xb, yb in zip(x.split(rows)[:n], y.split(rows)):
        xb, yb = distributed.to_device(device, xb, yb)
        with amp:
            loss = model(xb, yb)[1]
        (loss * 1024).backward()  # keeps float16 from underflowing; the ratio below cancels it
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        small += sum(g.square().sum() for g in grads) / n
        total = grads if total is None else torch._foreach_add(total, grads)
        for p in model.parameters():
            p.grad = None
    model.train()
    large = sum((g / n).square().sum() for g in total)
    small, large = (distributed.mean(distributed.unshard(z)) for z in (small, large))
    # The gradients of a sharded model are means over all processes, so that a small batch consists
    # of the tokens of all processes.
    processes = distributed.world if distributed.is_sharded(model) else 1
    tokens = rows * x.shape[1] * processes  # tokens of a small batch
    square = (n * large - small) / (n - 1)
    variance = (small - large) * tokens / (1 - 1 / n)
    return {"grad/noise_scale": (variance / square).item()} if square > 0 else {}


def probe(model, batches, tokenizer, amp, examples=6):
    """
    Return metrics of the predictions on fixed batches, {split: (x, y)} with (B, T) each: logits/*
    and ActivationStats, both of the last split only, and the table `predictions` with some examples
    of every split. With a large vocabulary only every n-th position is evaluated, to hold at most
    PROBED logits.
    """
    metrics, pieces, table = {}, tokenizer.pieces(), []
    model.eval()
    for split, (x, y) in batches.items():
        every = math.ceil(x.numel() * tokenizer.vocab_size / PROBED)
        stats = ActivationStats(model, x)
        with torch.no_grad(), amp, watch(stats.callbacks()):
            logits = model(x, every=every)[0].float()  # (B, N, V)
        metrics = {"logits/histogram": histogram(logits)} | stats.read()
        log_p = logits.sub_(logits.logsumexp(-1, keepdim=True))
        p = log_p.exp()
        targets = y[:, ::every]  # (B, N); -1: no target
        p_target = p.gather(-1, targets.clamp(min=0)[..., None])[..., 0].where(targets >= 0, 0)
        top_p, top = p.topk(3)
        for n in range(examples):
            # Take the next sequence for each example, and positions spread over the context.
            b, i = n % len(x), (2 * n + 1) * p.shape[1] // (2 * examples)
            t = i * every
            if y[b, t] < 0:
                continue
            context = tokenizer.decode(x[b, max(0, t - 24):t + 1].tolist())
            cells = [split, context, spell(pieces[int(y[b, t])]), round(p_target[b, i].item(), 4)]
            for token, probability in zip(top[b, i].tolist(), top_p[b, i].tolist()):
                cells += [spell(pieces[token]), round(probability, 4)]
            table.append(cells)
        metrics |= {"logits/p_target": (p_target.sum() / (targets >= 0).sum().clamp(min=1)).item(),
                    "logits/p_max": top_p[..., 0].mean().item(),
                    "logits/entropy": -p.mul_(log_p).sum(-1).mean().item()}
    model.train()
    return metrics | {"predictions": table}


def pair_accuracies(model, dataset, device, amp, eval_iters):
    """
    Return {"eval/pairs/<kind>": accuracy} of the first minimal pairs of the built-in stories that
    fit into the context; {} if the model is trained on other data. eval_iters: the setting of
    train.py. The number of pairs follows from it so that they add about a tenth to the time of an
    evaluation.
    """
    if dataset.meta["source"].split(":")[0] != "stories":
        return {}
    count = min(MAX_PAIRS, 2 * eval_iters // 5) if eval_iters else MAX_PAIRS
    model.eval()
    with amp:
        compared = compare_pairs(model, dataset.tokenizer, pairs.write(count), device)
    model.train()
    right = collections.defaultdict(list)
    for pair, difference in compared:
        right[f"eval/pairs/{pair['kind']}"].append(difference > 0)
    return {name: sum(found) / len(found) for name, found in right.items()}


def write_samples(model, tokenizer, device, prompts, seed):
    """
    Return rows (prompt, method, text) of the table `samples`: each prompt continued greedily, then
    by sampling. All texts are generated in one batch. Each has its own random generator with this
    seed. A prompt that fills the context is cut to its first token.
    """
    methods = {"greedy": 0, "sampled": 0.8}  # temperatures
    rows = [[prompt, method] for prompt in prompts for method in methods]
    ids = [tokenizer.encode_prompt(prompt) for prompt, _ in rows]
    ids = [tokens[:1] if len(tokens) >= model.args.max_seq_len else tokens for tokens in ids]
    temperatures = [methods[method] for _, method in rows]
    generators = [torch.Generator(device=device).manual_seed(seed) for _ in rows]
    stop = tokenizer.bos_id, tokenizer.eos_id
    model.eval()
    try:
        texts = model.generate(ids, SAMPLE_TOKENS, temperatures, 0.95, stop, generators)
        texts = [tokenizer.decode(text[len(prompt):]) for text, prompt in zip(texts, ids)]
    except RuntimeError as e:  # from torch.multinomial, if probabilities are NaN
        if hardware.is_out_of_memory(e):
            raise
        texts = ["(no text: the model's probabilities are not finite)"] * len(rows)
    model.train()
    return [[*row, text] for row, text in zip(rows, texts)]


# ---- speed ------------------------------------------------------------------------------------

class Stopwatch:
    """
    Steps and seconds of training since the last `read`, without the blocks in `paused`. The caller
    counts `steps`, and adds the context of each step, in tokens, to `context_sum`.
    """

    def __init__(self, device):
        self.device, self.steps, self.context_sum = device, 0, 0
        self.start = time.perf_counter()

    @contextlib.contextmanager
    def paused(self):
        since = time.perf_counter()
        yield
        self.start += time.perf_counter() - since

    @spanned("logging")
    def read(self, record):
        """Return the speed metrics, and restart at zero. It may correct record["peak_flops"]."""
        seconds = time.perf_counter() - self.start
        speed = self.steps * record["tokens_per_iter"] / seconds
        # Steps of a shorter context than the model's have less attention to compute.
        mean_context = self.context_sum / self.steps
        skipped = 1 - mean_context / record["model_args"]["max_seq_len"]  # fraction of attention
        attention = record["attention_flops_per_token"]
        flops_per_token = record["flops_per_token"] - skipped * attention
        flops = speed * flops_per_token / distributed.world  # FLOP/s of each device
        check_peak(record, flops, self.device)
        metrics = {"perf/tokens_per_sec": speed, "perf/iter_ms": 1e3 * seconds / self.steps,
                   "perf/peak_mib": hardware.peak_memory(self.device) / 2 ** 20,
                   "mfu": 100 * flops / record["peak_flops"]}
        self.__init__(self.device)
        return metrics


REMEASURED = ", measured again"  # end of record["mfu_basis"] after the second measurement


def check_peak(record, reached, device):
    """
    Correct record["peak_flops"] if training reaches more FLOP/s than that, which happens if it was
    measured on a busy machine. The first correction measures the peak again, which takes a second,
    and prints a message; later ones set the peak to the FLOP/s that training has reached.
    """
    if reached <= record["peak_flops"]:
        return
    if record["mfu_basis"].endswith(REMEASURED):
        # A third measurement is not worth its time: on a CPU without bfloat16 units, one of its
        # matrix products takes longer than many training steps.
        record["peak_flops"] = reached
        return
    dtype = hardware.TORCH_DTYPES[record["compute_dtype"]]
    again = hardware.measured_flops(device, dtype, seconds=1, products=math.inf)
    old, record["peak_flops"] = record["peak_flops"], max(again, reached)
    distributed.say(f"mfu: training reaches {reached / 1e12:.3g} TFLOP/s, more than the peak of "
                    f"{old / 1e12:.3g} ({record['mfu_basis']}); a matmul measured again reaches "
                    f"{again / 1e12:.3g}; the new peak for mfu is "
                    f"{record['peak_flops'] / 1e12:.3g}")
    record["mfu_basis"] += REMEASURED


# ---- rows of the log --------------------------------------------------------------------------

SHOWN = {"loss/train": "loss {:.4f}", "loss/val": "val loss {:.4f}", "bpb/val": "bits/byte {:.4f}",
         "lr": "lr {:.2e}", "perf/tokens_per_sec": "{:,.0f} tok/s", "mfu": "mfu {:.1f}%"}


@spanned("logging")
def mean_loss(state):
    """
    Return the mean training loss of the steps since the last call, NaN if all were skipped, and
    reset the sums.
    """
    total, steps = float(state["loss_sum"]), state["loss_steps"]
    state["loss_sum"], state["loss_steps"] = 0.0, 0
    return total / steps if steps else math.nan


@spanned("logging")
def show(row, bar):
    """Show a row on the progress bar; print it if it is an evaluation or there is no bar."""
    if "loss/train" in row:
        speed = row["perf/tokens_per_sec"] / 1e3
        bar.set_postfix_str(f"loss {row['loss/train']:.3f}, {speed:.1f}k tok/s", refresh=False)
    if "loss/val" in row or bar.disable:
        words = [text.format(row[name]) for name, text in SHOWN.items() if name in row]
        distributed.say(f"iter {row['iter']:>6} | tokens {row['tokens'] / 1e6:.2f}M | "
                        f"epoch {row['epoch']:.2f} | {' | '.join(words)}")
