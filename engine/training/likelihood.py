"""Log-likelihoods of texts, computed in batches, and minimal pairs compared by them."""
import torch
import torch.nn.functional as F

from engine.training import costs

MAX_LOGITS = 1 << 25  # logits to compute at once: 128 MiB of float32


def batch_tokens(model):
    """Return the max tokens, padding included, of a batch of several texts."""
    return min(costs.EVAL_PASS, MAX_LOGITS // model.args.vocab_size)


# Not inference mode: a sharded model keeps gathered weights, which training could not use then.
@torch.no_grad()
def log_likelihoods(model, ids, starts, device="cpu"):
    """
    Return the sum over ids[row][starts[row]:] of ln p(id | ids before it) for each row: (rows,)
    float64, on the CPU. ids: lists of at least two ids; starts: indices of at least 1. Rows of
    similar lengths are computed in one batch.
    """
    found = torch.zeros(len(ids), dtype=torch.float64)
    rows = sorted(range(len(ids)), key=lambda row: len(ids[row]), reverse=True)
    while rows:
        size = max(1, batch_tokens(model) // (len(ids[rows[0]]) - 1))
        batch, rows = rows[:size], rows[size:]
        found[batch] = batch_log_likelihoods(
            model, [ids[row] for row in batch], [starts[row] for row in batch], device)
    return found


def batch_log_likelihoods(model, ids, starts, device):
    """Return log_likelihoods of rows that are padded to the longest and computed at once."""
    T = max(map(len, ids)) - 1
    x, y = torch.zeros(len(ids), T, dtype=torch.int64), torch.full((len(ids), T), -1)
    for row, (tokens, start) in enumerate(zip(ids, starts)):
        tokens = torch.tensor(tokens)
        x[row, :len(tokens) - 1] = tokens[:-1]
        y[row, start - 1:len(tokens) - 1] = tokens[start:]
    logits = model(x.to(device), every=True)[0].flatten(0, 1).float()  # (rows * T, V)
    nll = F.cross_entropy(logits, y.to(device).flatten(), ignore_index=-1, reduction="none")
    return -nll.view(-1, T).cpu().double().sum(1)


def compare_pairs(model, vocabulary, pairs, device="cpu"):
    """
    Return [(pair, ln p(good text) - ln p(bad text))] of the minimal pairs whose texts fit into the
    model's context. pairs: {"good": text, "bad": text, ...} each, see engine/text/pairs.py.
    """
    fitting, ids = [], []
    for pair in pairs:
        good, bad = (vocabulary.encode(pair[name], bos=True) for name in ("good", "bad"))
        if max(len(good), len(bad)) - 1 <= model.args.max_seq_len:
            fitting.append(pair)
            ids += [good, bad]
    sums = log_likelihoods(model, ids, [1] * len(ids), device).view(len(fitting), 2)
    return list(zip(fitting, (sums[:, 0] - sums[:, 1]).tolist()))
