"""
Compare our loss with that of plain float32 PyTorch. Three runs start from the same weights and use
the same batches: our model in float32, our model in bfloat16, and transformers' LlamaForCausalLM in
float32.

    python bench/same_loss.py                     width 256 on the built-in stories
    python bench/same_loss.py --steps=60 --seeds=1,2,3

All runs use AdamW: ours for our model, PyTorch's for transformers' model. The learning rate warms
up over a tenth of the steps and decays to 0. The program prints how far the loss curves differ, in
nats: per step, and for the mean of the last 20 steps, since the loss of one step depends on its
batch. Needs: pip install transformers.
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

import data as corpus  # the name `data` is a setting below
from configurator import configure
from engine.formats.layout import interleaved_to_halves, tensors
from model import ModelArgs, Transformer
from optim import OptimizerConfig, make_optimizer

steps = 200           # training steps of each run
seeds = "1,2,3"       # random seeds, separated by commas; three runs for each
dim = 256             # width of the model
n_layers = 2          # number of blocks
n_heads = 4           # number of attention heads
batch_size = 4        # sequences per step
max_seq_len = 128     # tokens per sequence
learning_rate = 2e-3  # peak learning rate
hf = True             # also train transformers' model
data = "stories"      # a source of data.py
cache = "cache"       # folder of the prepared data
json_file = ""        # file for the curves


def ours(args):
    """Return our model, our AdamW, and a function from (x, y) to the loss."""
    model = Transformer(args)
    opt = make_optimizer(model, OptimizerConfig("adamw", learning_rate))
    return model, opt, lambda x, y: model(x, y)[1]


def transformers_like(model):
    """
    Return LlamaForCausalLM with the weights of our model, PyTorch's AdamW with the same parameter
    groups, and a function from (x, y) to the loss.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    args = model.args
    state = model.state_dict()
    theirs = LlamaForCausalLM(LlamaConfig(
        vocab_size=args.vocab_size, hidden_size=args.dim, intermediate_size=args.hidden_dim,
        num_hidden_layers=args.n_layers, num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads, max_position_embeddings=args.max_seq_len,
        rms_norm_eps=args.norm_eps, tie_word_embeddings=args.tied, use_cache=False))
    their_state = theirs.state_dict()
    for name, _, hf_name, _ in tensors(args):
        weight = state[name]
        if name.endswith(("wq.weight", "wk.weight")):
            # RoPE rotates neighbors in our model and the two halves of a head in transformers.
            weight = interleaved_to_halves(weight, args.n_heads)
        their_state[hf_name].copy_(weight)
    matrices = [p for p in theirs.parameters() if p.dim() > 1]
    vectors = [p for p in theirs.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
    cross_entropy = torch.nn.functional.cross_entropy
    return theirs, opt, lambda x, y: cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())


def lr_at(step):
    """Return the learning rate of a step."""
    warmup = (step + 1) / (steps / 10)
    decay = (steps - step) / (0.9 * steps)
    return learning_rate * min(warmup, decay)


def train(dataset, seed, model, opt, loss_of, bfloat16=False):
    """Return ([loss of each step], loss on 100 sequences of the validation split)."""
    losses = []
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bfloat16)
    for step in range(steps):
        x, y = corpus.batch_slice(dataset.train, seed, step, batch_size, max_seq_len)
        with autocast:
            loss = loss_of(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in opt.param_groups:
            group["lr"] = lr_at(step)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    with torch.no_grad(), autocast:
        x, y = corpus.batch_slice(dataset.val, 0, 0, 100, max_seq_len)
        return losses, loss_of(x, y).item()


def difference(reference, curve):
    """Return in words how far a loss curve differs from ours in float32, in nats."""
    gaps = [abs(a - b) for a, b in zip(reference, curve)]
    mean_gap = sum(gaps) / len(gaps)
    n_last = len(reference[-20:])
    last = (sum(curve[-20:]) - sum(reference[-20:])) / n_last
    return (f"differs from ours in float32 by {mean_gap:.1e} nats per step on average, "
            f"{max(gaps):.1e} at most, and by {last:+.5f} in the mean of the last {n_last} steps")


def main():
    dataset = corpus.load(corpus.prepare(data, cache=cache))
    vocab_size = dataset.meta["vocab_size"]
    args = ModelArgs(dim=dim, n_layers=n_layers, n_heads=n_heads, vocab_size=vocab_size,
                     max_seq_len=max_seq_len)
    names = ["ours", "bfloat16"]
    if hf:
        names.append("transformers")
    results = []
    for seed in map(int, seeds.split(",")):
        torch.manual_seed(seed)
        first = Transformer(args).state_dict()
        result = {"seed": seed}
        for name in names:
            model, opt, loss_of = ours(args)
            model.load_state_dict(first)
            if name == "transformers":
                model, opt, loss_of = transformers_like(model)
            losses, val = train(dataset, seed, model, opt, loss_of, bfloat16=name == "bfloat16")
            result[name] = {"train": losses, "val": val}
            line = f"seed {seed}, {name}: validation loss {val:.4f}"
            if name != "ours":
                line += "; " + difference(result["ours"]["train"], losses)
            print(line, flush=True)
        results.append(result)
    if json_file:
        Path(json_file).write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    configure(globals())
    main()
