"""
--lr_find=True: suggest a learning rate. A ramp of the rate finds the region, and short trainings
find the rate in it. A ramp alone is misleading for transformers: a single step at a rate does not
show how a training at that rate would go.
"""
import math

import torch

from engine.debug.trial import trial_steps
from engine.training import distributed, lora
from engine.training.distributed import say
from engine.training.mode import artifact
from optim import learning_rate_at

LOW, HIGH = 1e-5, 0.9    # learning rates at the ends of the ramp
RAMP = 100               # steps of the ramp
KNEE = 0.9               # share of the ramp's loss decrease reached at the third rate of the sweep
SWEEP = 100              # steps of each training of the sweep
FACTOR = 2.5             # ratio of neighbouring rates of the sweep
MAX_ADDED = 3            # max rates added to the sweep while the best is its first or last
BELOW, ABOVE = 4.0, 2.0  # suggested range: best / BELOW to best * ABOVE; BELOW is larger, since
                         # long trainings need lower rates than these short ones
MAX_RISE = 1.5           # diverged: this many nats above the minimum, or twice the minimum


def lr_find(t, train_step):
    """
    Raise the learning rate from LOW to HIGH until training diverges; then run four short trainings
    at rates around the knee of the loss, each from the same weights over the same batches. Print
    the suggested range. Restore weights, optimizer and random numbers at the end.
    """
    take, config, model, opt = trial_steps(t, train_step), t.config, t.model, t.opt
    weights = {name: p.detach().clone() for name, p in lora.split(model)[0].items()}

    def try_rate(rate):
        reset(model, opt, weights)
        return rate, short_training(take, config, rate)

    before = [group["lr"] for group in opt.param_groups]
    with torch.random.fork_rng(devices=[t.device] if t.device.type == "cuda" else []):
        say(f"lr_find: a ramp of {RAMP} steps from {LOW:g} to {HIGH:g}, then four rates over "
            f"{SWEEP} steps each, more while the best is at an end; no setting is changed")
        ramp = take_ramp(take)
        third = knee(ramp)
        sweep = [try_rate(rounded(min(third * FACTOR ** n, HIGH))) for n in (-2, -1, 0, 1)]
        while (rate := beyond(sweep)) and len(sweep) < 4 + MAX_ADDED:
            sweep = sorted([*sweep, try_rate(rate)])
        reset(model, opt, weights)
    for group, rate in zip(opt.param_groups, before):
        group["lr"] = rate
    report_rates(config, ramp, sweep)


def reset(model, opt, weights):
    """Restore the weights, {name: tensor}, and the state of an optimizer before its first step."""
    with torch.no_grad():
        for name, p in lora.split(model)[0].items():
            p.copy_(weights[name])
    for optimizer in opt.optimizers:
        optimizer.state.clear()


def take_ramp(take):
    """
    Take steps whose rate grows by a constant factor, until the loss diverges. Return [(rate, loss,
    smoothed loss)], with the bias-corrected moving average as in Adam.
    """
    ramp, mean = [], 0.0
    for step in range(RAMP):
        rate = LOW * (HIGH / LOW) ** (step / (RAMP - 1))
        loss = take(step, rate)
        mean = 0.8 * mean + 0.2 * loss
        ramp.append((rate, loss, mean / (1 - 0.8 ** (step + 1))))
        if diverged(ramp):
            break
    return ramp


def diverged(ramp):
    """Return whether the last smoothed loss is not finite, or far above its minimum."""
    smooth, lowest = ramp[-1][2], min(smooth for *_, smooth in ramp)
    return not math.isfinite(smooth) or smooth > min(lowest + MAX_RISE, 2 * lowest)


def knee(ramp):
    """Return the first rate at which the smoothed loss has made KNEE of its total decrease."""
    smooth = [loss for *_, loss in ramp if math.isfinite(loss)]
    enough = smooth[0] - KNEE * (smooth[0] - min(smooth))
    return next(rate for rate, _, loss in ramp if loss <= enough)


def rounded(rate):
    return float(f"{rate:.1e}")


def beyond(sweep):
    """
    Return the rate to add to a sweep, [(rate, loss)], if its best rate is the first or the last,
    because a better one may lie beyond it; otherwise None.
    """
    best, _ = min(sweep, key=lambda pair: pair[1])
    if best == sweep[0][0]:
        return rounded(best / FACTOR)
    if best == sweep[-1][0] and best * FACTOR < HIGH:
        return rounded(best * FACTOR)
    return None


def short_training(take, config, rate):
    """
    Train for SWEEP steps, with warm-up and decay. Return the mean loss of the last tenth of the
    steps, or inf if a loss is not finite.
    """
    schedule = config.changed(learning_rate=rate, warmup_iters=SWEEP // 10)
    losses = []
    for step in range(SWEEP):
        losses.append(take(step, learning_rate_at(schedule, step, SWEEP)))
        if not math.isfinite(losses[-1]):
            return math.inf
    last = losses[-(SWEEP // 10):]
    return sum(last) / len(last)


def suggestion(sweep):
    """
    Return the lowest, middle and highest suggested rate of a sweep, [(rate, loss)], around the
    minimum of a parabola through the best rate and its neighbours, over the logarithm of the rate.
    """
    at = min(range(len(sweep)), key=lambda i: sweep[i][1])
    rate, losses = sweep[at][0], [loss for _, loss in sweep[max(0, at - 1):at + 2]]
    if 0 < at < len(sweep) - 1 and all(map(math.isfinite, losses)):
        left, lowest, right = losses
        rate *= FACTOR ** ((left - right) / (2 * (left - 2 * lowest + right) or 1))
    return rounded(rate / BELOW), rounded(rate * (ABOVE / BELOW) ** 0.5), rounded(rate * ABOVE)


def report_rates(config, ramp, sweep):
    """
    Print the results and the suggested range; write them to a .csv file, and to a .png file if
    matplotlib is installed.
    """
    end = "diverged at" if diverged(ramp) else "did not diverge up to"
    say(f"the ramp {end} {ramp[-1][0]:.2g}; at {knee(ramp):.2g} its loss had fallen by {KNEE:.0%} "
        f"of the total")
    for rate, loss in sweep:
        say(f"  learning_rate {rate:<8g} loss {loss:.4f} after {SWEEP} steps")
    low, middle, high = suggestion(sweep)
    if distributed.master:
        table, picture = artifact(config, "csv"), artifact(config, "png")
        lines = [f"ramp,{rate:.4g},{loss:.5f},{smooth:.5f}" for rate, loss, smooth in ramp]
        lines += [f"sweep,{rate:.4g},{loss:.5f}," for rate, loss in sweep]
        table.write_text("\n".join(["kind,rate,loss,smooth", *lines]) + "\n")
        if draw(ramp, sweep, low, high, picture):
            say(f"wrote {table} and {picture}")
        else:
            say(f"wrote {table}; a picture needs: pip install matplotlib")
    say(f"lr_find: the best rate is likely to lie between {low:g} and {high:g}; to copy: "
        f"--learning_rate={middle:g}")


def draw(ramp, sweep, low, high, path):
    """Draw the ramp and the sweep. Return False if matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    rates, _, smooth = zip(*ramp)
    axes.plot(rates, smooth, label=f"a ramp over {len(ramp)} steps")
    axes.plot(*zip(*sweep), "o-", label=f"{SWEEP} steps each")
    axes.axvspan(low, high, alpha=0.15, color="green", label="suggested")
    top = 1.1 * ramp[0][1]
    axes.set(xscale="log", xlabel="learning_rate", ylabel="loss", ylim=(None, top))
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
