"""
Compare our loss with plain float32 PyTorch: the same initial weights and batches, trained as
transformers' LlamaForCausalLM in float32, as ours in float32, and as ours in bfloat16.

    python bench/same_loss.py                     width 256 on the built-in stories
    python bench/same_loss.py --steps=60 --seeds=1,2,3

All use AdamW, transformers with PyTorch's own. The learning rate warms up over a tenth of the steps
and decays to 0. The difference of two curves is given in nats per step, and for the mean of the
last 20 steps, since one step's loss depends on its batch. Needs: pip install transformers.
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

import data as corpus  # `data` is a knob
from configurator import configure
from engine.formats.layout import interleaved_to_halves, tensors
from model import ModelArgs, Transformer
from optim import OptimizerConfig, make_optimizer

steps = 200           # of each run
seeds = "1,2,3"       # separated by commas; three runs each
dim = 256             # width
n_layers = 2          # blocks
n_heads = 4           # heads
batch_size = 4        # sequences of a step
max_seq_len = 128     # tokens of a sequence
learning_rate = 2e-3  # peak
hf = True             # also train transformers' model
data = "stories"      # a source of data.py
cache = "cache"       # prepared data
json_file = ""        # file for the curves


def ours(args):
    model = Transformer(args)
    return model, make_optimizer(model, OptimizerConfig("adamw", learning_rate)), lambda x, y: model(x, y)[1]


def transformers_like(model):
    """
    Return LlamaForCausalLM with our weights, PyTorch's AdamW with the same groups, and its loss.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    a, state = model.args, model.state_dict()
    theirs = LlamaForCausalLM(LlamaConfig(
        vocab_size=a.vocab_size, hidden_size=a.dim, intermediate_size=a.hidden_dim, num_hidden_layers=a.n_layers,
        num_attention_heads=a.n_heads, num_key_value_heads=a.n_kv_heads, max_position_embeddings=a.max_seq_len,
        rms_norm_eps=a.norm_eps, tie_word_embeddings=a.tied, use_cache=False))
    named = theirs.state_dict()
    for name, _, hf_name, _ in tensors(a):
        turned = name.endswith(("wq.weight", "wk.weight"))
        named[hf_name].copy_(interleaved_to_halves(state[name], a.n_heads) if turned else state[name])
    matrices, vectors = ([p for p in theirs.parameters() if (p.dim() > 1) == big] for big in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
    cross_entropy = torch.nn.functional.cross_entropy
    return theirs, opt, lambda x, y: cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())


def rate(step):
    return learning_rate * min((step + 1) / (steps / 10), (steps - step) / (0.9 * steps))


def train(dataset, seed, model, opt, loss_of, half=False):
    """Return ([loss of each step], loss on 100 sequences of the validation split)."""
    losses, amp = [], torch.autocast("cpu", torch.bfloat16, enabled=half)
    for step in range(steps):
        x, y = corpus.batch_slice(dataset.train, seed, step, batch_size, max_seq_len)
        with amp:
            loss = loss_of(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in opt.param_groups:
            group["lr"] = rate(step)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    with torch.no_grad(), amp:
        x, y = corpus.batch_slice(dataset.val, 0, 0, 100, max_seq_len)
        return losses, loss_of(x, y).item()


def apart(a, b):
    """Return the difference of two curves, in words."""
    gaps = [abs(x - y) for x, y in zip(a, b)]
    late = (sum(b[-20:]) - sum(a[-20:])) / len(a[-20:])
    return f"a step {sum(gaps) / len(gaps):.1e} on average, {max(gaps):.1e} at most; the last 20 together {late:+.5f}"


def main():
    dataset = corpus.load(corpus.prepare(data, cache=cache))
    args = ModelArgs(dim=dim, n_layers=n_layers, n_heads=n_heads, vocab_size=dataset.meta["vocab_size"], max_seq_len=max_seq_len)
    kept = []
    for seed in map(int, seeds.split(",")):
        torch.manual_seed(seed)
        first = Transformer(args).state_dict()
        curves = {}
        for name in ["ours"] + ["bfloat16"] + ["transformers"] * hf:
            model, opt, loss_of = ours(args)
            model.load_state_dict(first)
            if name == "transformers":
                model, opt, loss_of = transformers_like(model)
            curves[name] = train(dataset, seed, model, opt, loss_of, half=name == "bfloat16")
            print(f"seed {seed}, {name}: validation {curves[name][1]:.4f}" + (
                "" if name == "ours" else f"; from ours in float32 {apart(curves['ours'][0], curves[name][0])}"), flush=True)
        kept.append({"seed": seed} | {name: {"train": losses, "val": val} for name, (losses, val) in curves.items()})
    if json_file:
        Path(json_file).write_text(json.dumps(kept) + "\n")


if __name__ == "__main__":
    configure(globals())
    main()
