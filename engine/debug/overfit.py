"""
--overfit=N: test whether the model can learn at all. Train on N windows until it has memorized
them, or report what to look at.
"""
import math
from collections import Counter, defaultdict

import torch

from engine.debug.trial import trial_steps
from engine.training import distributed, lora
from engine.training.distributed import say

MARGIN = 0.05      # the test passes at this many nats above the lowest possible loss,
PATIENCE = 400     # and fails after this many steps in which the best loss has not fallen by 1 %,
MAX_STEPS = 5000   # or after this many steps in all
WARMUP_STEPS = 10


def overfit(t, train_step):
    """
    Repeat step 0 with the same windows and random numbers, at a learning rate that is constant
    after a warm-up. Return the exit code, 0 for PASS and 1 for FAIL.
    """
    take, model, rate = trial_steps(t, train_step), t.model, t.config.learning_rate
    x, y = global_batch(t.dataset)
    lowest = {context: memorized_loss(x, y, model.bos_id, context) for context in (0, 1, None)}
    goal = lowest[None] + MARGIN
    trained, _ = lora.split(model)
    before = {name: p.detach().clone() for name, p in trained.items()}
    p_before = target_probability(t)
    say(f"overfit: {len(x)} window{'s' * (len(x) > 1)} of {x.shape[1]} tokens, the same at every "
        f"step, without dropout, at learning_rate={rate}; a model that has memorized them has a "
        f"loss of {lowest[None]:.4f}, {goal:.4f} is enough")
    losses, best, improved = [], math.inf, 0  # improved: number of steps until the best loss
    while len(losses) < MAX_STEPS and len(losses) - improved < PATIENCE:
        step = len(losses)
        losses.append(take(0, rate * min(1, (step + 1) / WARMUP_STEPS)))
        if losses[-1] < 0.99 * best:
            best, improved = losses[-1], len(losses)
        if step & (step - 1) == 0:  # 0, 1, 2, 4, 8 ...
            say(f"step {step:>5} | loss {losses[-1]:.4f}")
        if losses[-1] <= goal or not math.isfinite(losses[-1]):
            break
    p_after = target_probability(t)
    unchanged = [name for name, p in trained.items() if not differs(p, before[name])]
    result = (f"loss {losses[-1]:.4f} after {len(losses)} steps, the right tokens' probability "
              f"{p_before:.4f} -> {p_after:.4f}")
    note = f"; {listed(unchanged)} never changed" if unchanged else ""
    if model.lora:
        note += "; LoRA can't learn tokens that the frozen model has never seen"
    # The mean of p is at least exp(mean of ln p). If it is less, the loss has other targets than y.
    if losses[-1] <= goal and p_after > 0.5 * math.exp(-losses[-1]):
        say(f"PASS: {result}{note}")
        return 0
    say(f"FAIL: {result}; {advice(losses, lowest, goal, batch_changes(t.dataset))}{note}")
    return 1


def advice(losses, lowest, goal, changes):
    """
    Return advice on where to look for the bug. losses: of each step; lowest: {context:
    memorized_loss} for the contexts 0, 1 and None; changes: whether the batch of a step changes
    when it is read again.
    """
    end, start = losses[-1], losses[0]
    if not math.isfinite(end):
        return (f"the loss is not finite after {len(losses)} steps: lower --learning_rate, or look "
                f"for a division by 0")
    if changes:
        return ("the batch of a step, read twice, is not the same: look at the data's order, "
                "augmentation and targets")
    if end <= goal:
        return ("the loss falls, but it is computed from other targets: look at how the model "
                "shifts and compares them")
    if end > 0.97 * start:
        return (f"stuck at the start, about ln V = {start:.2f}: look at whether gradients reach "
                f"the weights, whether the optimizer has these parameters, and at the rate")
    if end > 0.95 * lowest[0]:
        return (f"no better than a model that ignores its input ({lowest[0]:.2f}): look at "
                f"whether the tokens reach the lm_head, at detached or frozen layers, a limit on "
                f"the logits, and the rate, which may be too high")
    if end > 0.95 * lowest[1]:
        return (f"no better than a model that sees only the last token ({lowest[1]:.2f}): look at "
                f"the attention, its mask and positions, and the rate, which may be too high")
    return ("the loss falls, but not to the end: look at the rate (too high or too low?), at "
            "capacity, a limit on the logits, a mask that hides too much, a frozen layer")


def global_batch(dataset):
    """Return the global batch of step 0, (x, y), in every process."""
    return dataset.make_batch(0, whole=True)


def memorized_loss(x, y, bos_id, context=None):
    """
    Return the mean loss in nats of a model that has memorized x, y (N, T). It predicts from the
    last `context` tokens, 0 or 1; None: from all tokens of the window back to bos_id. The loss is
    above 0 if the same context has several targets.
    """
    targets_after = defaultdict(Counter)  # {context: {target: count}}
    is_in_targets = bos_id is not None and bos_id < 0  # see Transformer.bos_id
    for tokens, targets in zip(x.tolist(), y.tolist()):
        seen = ()
        for token, target in zip(tokens, targets):
            # A context is two numbers: a hash of all earlier tokens, and the latest token.
            is_first = (target if is_in_targets else token) == bos_id
            seen = (token,) if is_first else (hash(seen), token)
            if target >= 0:
                key = seen if context is None else seen[-1:] * context
                targets_after[key][target] += 1
    loss, predictions = 0.0, 0
    for counts in targets_after.values():
        total = counts.total()
        predictions += total
        loss += sum(n * math.log(total / n) for n in counts.values())
    return loss / max(1, predictions)


@torch.no_grad()
def target_probability(t):
    """Return the mean probability of the targets of step 0, over all processes."""
    total = torch.zeros(2, device=t.device)  # sum of probabilities, number of predictions
    t.model.eval()
    for x, y in zip(*(tokens.split(t.config.batch_size) for tokens in t.dataset.batch(0))):
        x, y = distributed.to_device(t.device, x, y)
        with t.amp:
            documents = t.model.document_mask(x, y)
            logits = t.model(x, every=1, documents=documents)[0]  # (B, T, V)
        p = logits.float().softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0]
        total += torch.stack(((p * (y >= 0)).sum(), (y >= 0).sum()))
    t.model.train()
    probability, predictions = distributed.mean(total).tolist()
    return probability / max(1, predictions)


def batch_changes(dataset):
    """Return whether the batch of step 0 differs when it is read again."""
    return any(not torch.equal(a, b) for a, b in zip(dataset.batch(0), dataset.batch(0)))


def differs(a, b):
    """Return whether two tensors differ. All processes must call it: the tensors may be sharded."""
    a, b = (distributed.unshard(tensor.detach()).cpu() for tensor in (a, b))
    return not torch.equal(a, b)


def listed(names, max_names=3):
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more
