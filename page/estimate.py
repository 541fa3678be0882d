"""
python -m page.estimate --key=value ...: what this choice for train.py comes to, its step timed on this machine. It prepares
the data as the training would, which then finds them.
"""
import sys

import train
from configurator import configure
from engine import costs, parallel, sizes
from optim import make_optimizer


def main():
    given = configure(vars(train), argv=sys.argv[1:], positional="data")
    place = parallel.setup(train.device)
    amp_dtype = parallel.autocast_dtype(train.dtype, place)
    if sizes.from_time(train.knobs(), given):
        prepared, clock = train.plan_from_time(given, place, amp_dtype)
        print(f"steps until {clock['end'] / 60:.1f} minutes are over")
    else:
        prepared = train.load_data(place)
    if train.depth:
        vars(train).update(sizes.derive_from_depth(train.knobs(), given, prepared.meta["vocab_size"]))
    s, args = train.knobs(), train.model_args(prepared)
    memory = costs.least_memory(args, s.batch_size * s.max_seq_len, s.optimizer)
    seconds = costs.step_seconds(s, args.vocab_size, make_optimizer, place, amp_dtype)
    tokens = costs.tokens_per_step(s)
    print(f"{costs.num_params(args):,} parameters, vocabulary {args.vocab_size:,}")
    print(f"memory: at least {sum(memory.values()) / 2 ** 20:,.0f} MiB "
          f"({', '.join(f'{kind} {size / 2 ** 20:,.0f}' for kind, size in memory.items())})")
    epochs = tokens * s.max_iters / prepared.meta["train_tokens"]
    print(f"{tokens:,} tokens a step, {tokens * s.max_iters:,} in all, {epochs:.2f} epochs")
    print(f"a step takes {1000 * seconds:,.1f} ms: {seconds * s.max_iters / 60:,.1f} minutes for {s.max_iters:,} steps, "
          f"without evaluations")


main()
