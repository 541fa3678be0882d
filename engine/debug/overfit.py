"""
--overfit=N: can the model learn at all? It trains on N windows until it has memorized them, or says what to look at.
"""
import math
from collections import Counter, defaultdict

import torch

from engine.debug.trial import trial_steps
from engine.training import distributed
from engine.training.distributed import say

ENOUGH = 0.05        # nats above the lowest possible loss at which it passes
HOPELESS = 400       # steps without a loss that is 1 % lower after which it fails ...
LONGEST = 5000       # ... or so many steps in all
WARM = 10            # steps of warm-up before the constant rate


def overfit(t, train_step):
    """
    Take step 0 again and again: the same windows, the same randomness, a constant rate. A model that can learn anything
    memorizes these. Return the exit code, 0 for PASS.
    """
    take, model, dataset, config = trial_steps(t, train_step), t.model, t.dataset, t.config
    rate, rows = config.learning_rate, config.batch_size
    x, y = whole_batch(dataset)
    least = {reach: least_loss(x, y, model.bos_id, reach) for reach in (0, 1, None)}
    enough = least[None] + ENOUGH
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    right = [p_right(t, rows)]
    say(f"overfit: {len(x)} window{'s' * (len(x) > 1)} of {x.shape[1]} tokens, the same at every step, without dropout, at "
        f"learning_rate={rate}; a model that has memorized them has a loss of {least[None]:.4f}, {enough:.4f} is enough")
    losses, lowest, since = [], math.inf, 0
    while len(losses) < LONGEST and len(losses) - since < HOPELESS:
        losses.append(take(0, rate * min(1, (len(losses) + 1) / WARM)))
        if losses[-1] < 0.99 * lowest:
            lowest, since = losses[-1], len(losses)
        if (n := len(losses) - 1) & (n - 1) == 0:  # 0, 1, 2, 4, 8 ...
            say(f"step {n:>5} | loss {losses[-1]:.4f}")
        if losses[-1] <= enough or not math.isfinite(losses[-1]):
            break
    right.append(p_right(t, rows))
    still = [name for name, p in model.named_parameters() if not differs(p, before[name])]
    reached = f"loss {losses[-1]:.4f} after {len(losses)} steps, the right tokens' probability {right[0]:.4f} -> {right[1]:.4f}"
    moved = f"; {named(still)} never changed" if still else ""
    if losses[-1] <= enough and right[1] > 0.5 * math.exp(-losses[-1]):
        say(f"PASS: {reached}{moved}")
        return 0
    say(f"FAIL: {reached}; {suspect(losses, right, least, enough, batch_changes(dataset))}{moved}")
    return 1


def suspect(losses, right, least, enough, changes):
    """What to look at, by where the loss stands. least: what can be had from 0 tokens, the last one, all."""
    end, start = losses[-1], losses[0]
    if not math.isfinite(end):
        return f"the loss is no number from step {len(losses)} on: lower --learning_rate, or look for a division by 0"
    if changes:
        return "the batch of a step, asked for twice, is not the same: look at the data's order, augmentation and targets"
    if end <= enough:
        return "the loss falls, but it is not that of these targets: look at what the model shifts or compares"
    if end > 0.97 * start:
        return (f"stuck at the start, about ln V = {start:.2f}: look at whether gradients reach the weights, whether the "
                f"optimizer has these parameters, and at the rate")
    if end > 0.95 * least[0]:
        return (f"no better than without seeing the text ({least[0]:.2f}): look at whether the tokens reach the lm_head, at "
                f"detached or frozen layers, a limit on the logits, and the rate, which may be too high")
    if end > 0.95 * least[1]:
        return f"no better than from the last token alone ({least[1]:.2f}): look at the attention, its mask and positions"
    return ("it falls, but not to the end: look at the rate (too high or too low?), at capacity, a limit on the logits, a mask "
            "that hides too much, a frozen layer")


def whole_batch(dataset):
    """The global batch of step 0, (x, y), in every process."""
    return dataset.make_batch(0, whole=True)


def least_loss(x, y, bos_id, reach=None):
    """
    The mean loss, in nats, of who knows x, y (N, T) by heart and sees of the text the last `reach` tokens (None: all in the
    window, back to bos_id): the same tokens may go on in several ways.
    """
    after = defaultdict(Counter)  # {what is seen: {target: times}}
    for tokens, targets in zip(x.tolist(), y.tolist()):
        seen = ()
        for token, target in zip(tokens, targets):
            seen = (token,) if token == bos_id else (hash(seen), token)
            if target >= 0:
                after[seen if reach is None else seen[-1:] * reach][target] += 1
    counts = [list(targets.values()) for targets in after.values()]
    return sum(n * math.log(sum(row) / n) for row in counts for n in row) / max(1, sum(map(sum, counts)))


@torch.no_grad()
def p_right(t, rows):
    """The mean probability that a Training's model gives to the targets of step 0, over all processes."""
    total = torch.zeros(2, device=t.device)  # sum of probabilities, predictions
    t.model.eval()
    for x, y in zip(*(both.split(rows) for both in t.dataset.batch(0))):
        x, y = distributed.to_device(t.device, x, y)
        with t.amp:
            logits = t.model(x, every=1)[0]  # (B, T, V)
        p = logits.float().softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0]
        total += torch.stack(((p * (y >= 0)).sum(), (y >= 0).sum()))
    t.model.train()
    right, predictions = distributed.mean(total).tolist()
    return right / max(1, predictions)


def batch_changes(dataset):
    """Whether the batch of step 0 differs when it is asked for again."""
    return any(not torch.equal(a, b) for a, b in zip(dataset.batch(0), dataset.batch(0)))


def differs(a, b):
    """Whether two tensors differ anywhere. All processes have to call it, as either may be sharded."""
    a, b = (distributed.unshard(t.detach()).cpu() for t in (a, b))
    return not torch.equal(a, b)


def named(names, most=3):
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
