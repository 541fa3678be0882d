"""
Which rate? --lr_find=True: a ramp finds the neighbourhood, short trainings the rate. A ramp alone misleads on transformers:
a step at a rate is over long before it shows what a training at that rate does.
"""
import math

import torch

from engine.training import distributed
from engine.debug.trial import trial_steps
from engine.training.distributed import say
from engine.training.mode import artifact
from optim import learning_rate_at

LOW, HIGH, RAMP = 1e-5, 0.9, 100   # the ramp's ends and steps
KNEE = 0.9                         # of its fall: the rate at which that is reached is the third of the sweep's four
SWEEP, APART = 100, 2.5            # steps of each, the factor between their rates
MORE = 3                           # rates that may be added where the best is the first or the last
BELOW, ABOVE = 4.0, 2.0            # the range around the best of them: longer trainings want a rate that is rather lower
DIVERGED = 1.5                     # nats that the loss rises above its least, or twice the least, until it counts as lost


def lr_find(t, train_step):
    """
    A ramp of the rate from LOW to HIGH, which shows where training becomes unstable; then four short trainings around what
    it suggests, each from the same weights over the same batches. Weights, optimizer and random numbers end as they began.
    """
    take, config, model, opt = trial_steps(t, train_step), t.config, t.model, t.opt
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def train_shortly(rate):
        begin_again(model, opt, weights)
        return rate, short_training(take, config, rate)

    before = [group["lr"] for group in opt.param_groups]
    with torch.random.fork_rng(devices=[t.device] if t.device.type == "cuda" else []):
        say(f"lr_find: a ramp of {RAMP} steps from {LOW:g} to {HIGH:g}, then four rates over {SWEEP} steps each, and more where "
            f"the best lies at an end; nothing is applied")
        ramp = take_ramp(take)
        sweep = [train_shortly(rate) for rate in around(knee(ramp))]
        while (rate := beyond(sweep)) and len(sweep) < 4 + MORE:
            sweep = sorted([*sweep, train_shortly(rate)])
        begin_again(model, opt, weights)
    for group, rate in zip(opt.param_groups, before):
        group["lr"] = rate
    report_rates(config, ramp, sweep)


def begin_again(model, opt, weights):
    """The weights of the beginning, and an optimizer that has not taken a step."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    for optimizer in opt.optimizers:
        optimizer.state.clear()


def take_ramp(take):
    """[(rate, loss, smooth loss)] of steps whose rate grows by the same factor each time, until the loss is lost."""
    ramp, mean = [], 0.0
    for step in range(RAMP):
        rate = LOW * (HIGH / LOW) ** (step / (RAMP - 1))
        loss = take(step, rate)
        mean = 0.8 * mean + 0.2 * loss
        ramp.append((rate, loss, mean / (1 - 0.8 ** (step + 1))))
        if lost(ramp):
            break
    return ramp


def lost(ramp):
    """Whether the loss at the end of the ramp is no number or far above the least so far."""
    smooth, least = ramp[-1][2], min(smooth for *_, smooth in ramp)
    return not math.isfinite(smooth) or smooth > min(least + DIVERGED, 2 * least)


def knee(ramp):
    """The rate at which the smooth loss has fallen nearly as far as it ever does."""
    smooth = [loss for *_, loss in ramp if math.isfinite(loss)]
    enough = smooth[0] - KNEE * (smooth[0] - min(smooth))
    return next(rate for rate, _, loss in ramp if loss <= enough)


def around(rate):
    """Four rates, of which the best is likely to be one in the middle."""
    return [rounded(min(rate * APART ** n, HIGH)) for n in (-2, -1, 0, 1)]


def rounded(rate):
    return float(f"{rate:.1e}")


def beyond(sweep):
    """The next rate below or above, where the best is the first or the last of [(rate, loss)]; None where it is neither."""
    rates, best = [rate for rate, _ in sweep], min(sweep, key=lambda both: both[1])[0]
    if best == rates[0]:
        return rounded(best / APART)
    return rounded(best * APART) if best == rates[-1] and best * APART < HIGH else None


def short_training(take, config, rate):
    """The mean loss of the last tenth of a training over SWEEP steps, with warm-up and decay; inf where it is lost."""
    schedule = config.changed(learning_rate=rate, warmup_iters=SWEEP // 10)
    losses = []
    for step in range(SWEEP):
        losses.append(take(step, learning_rate_at(schedule, step, SWEEP)))
        if not math.isfinite(losses[-1]):
            return math.inf
    last = losses[-max(1, SWEEP // 10):]
    return sum(last) / len(last)


def suggestion(sweep):
    """(lowest, middle, highest rate) by [(rate, loss)]: around the least of a parabola through the best and those beside it."""
    at = min(range(len(sweep)), key=lambda i: sweep[i][1])
    rate, shift = sweep[at][0], 0.0
    if 0 < at < len(sweep) - 1 and all(math.isfinite(loss) for _, loss in sweep[at - 1:at + 2]):
        (_, left), (_, least), (_, right) = sweep[at - 1:at + 2]
        shift = (left - right) / (2 * (left - 2 * least + right) or 1)
    rate *= APART ** shift
    return rounded(rate / BELOW), rounded(rate * (ABOVE / BELOW) ** 0.5), rounded(rate * ABOVE)


def report_rates(config, ramp, sweep):
    """The tables, the range and what to type; a file of both, and a picture where matplotlib is installed."""
    end = f"diverged at {ramp[-1][0]:.2g}" if lost(ramp) else f"did not diverge up to {ramp[-1][0]:.2g}"
    say(f"the ramp {end}; its loss had fallen by {KNEE:.0%} of all it fell at {knee(ramp):.2g}")
    for rate, loss in sweep:
        say(f"  learning_rate {rate:<8g} loss {loss:.4f} after {SWEEP} steps")
    low, middle, high = suggestion(sweep)
    if distributed.master:
        table, picture = artifact(config, "csv"), artifact(config, "png")
        lines = [f"ramp,{rate:.4g},{loss:.5f},{smooth:.5f}" for rate, loss, smooth in ramp]
        lines += [f"sweep,{rate:.4g},{loss:.5f}," for rate, loss in sweep]
        table.write_text("\n".join(["kind,rate,loss,smooth", *lines]) + "\n")
        drawn = draw(ramp, sweep, low, high, picture)
        say(f"wrote {table}" + (f" and {picture}" if drawn else "; a picture needs: pip install matplotlib"))
    say(f"lr_find: the best rate is likely to lie between {low:g} and {high:g}; to copy: --learning_rate={middle:g}")


def draw(ramp, sweep, low, high, path):
    """The ramp and the sweep as a picture; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([rate for rate, *_ in ramp], [smooth for *_, smooth in ramp], label=f"a ramp over {len(ramp)} steps")
    axes.plot(*zip(*sweep), "o-", label=f"{SWEEP} steps each")
    axes.axvspan(low, high, alpha=0.15, color="green", label="suggested")
    axes.set(xscale="log", xlabel="learning_rate", ylabel="loss", ylim=(None, 1.1 * ramp[0][1]))
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
