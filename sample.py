"""
Text from a trained model, in PyTorch. `run` does the same in C, faster.

    python sample.py out/my --prompt="Once upon a time" --num_samples=3 --temperature=0.8
    python sample.py out/my --prompt="Once upon a time" --attention=look.html    what it does with a text, to look at
"""
import sys
from pathlib import Path

from configurator import configure, fail  # first: it answers for packages that are missing

import torch

from engine.debug import inside
from engine.training import checkpoint, distributed
from engine.training.load import load_model
from engine.streams import generated
from page.inside import html

out_dir = "out"         # the model: a run, runs (the newest), a step, a Hugging Face or Meta folder, a GGUF or llama2.c file
tokenizer = ""          # the vocabulary of a llama2.c file: a tokenizer.model, tokenizer.json or tokenizer.bin
prompt = ""             # the text to continue
num_samples = 1         # how many continuations
max_new_tokens = 256    # tokens of each, at most; beyond the model's context it sees the latest ones
temperature = 1.0       # 0: always the likeliest token; above 1: wilder than what was learnt
top_p = 0.9             # sample from the likeliest tokens that have this probability together; 1: from all
seed = 1337             # of the samples
attention = ""          # write an .html file instead that shows what the model does with the prompt: attention, likely tokens
device = "auto"         # auto, cpu, cuda, cuda:1, mps


def check_settings():
    for name, fine, expected in (
            ("num_samples", num_samples >= 1, "at least 1"), ("max_new_tokens", max_new_tokens >= 1, "at least 1"),
            ("temperature", temperature >= 0, "0 or more"), ("top_p", 0 < top_p <= 1, "above 0 and at most 1")):
        if not fine:
            fail(f"{name} is {globals()[name]}, expected {expected}")


def write_attention(model, vocabulary):
    """The page's view of what is inside, as one file."""
    if not prompt or not attention.endswith(".html"):
        fail(f"--attention={attention}: expected a name that ends in .html, and a --prompt to look at")
    try:
        Path(attention).write_text(html(inside.describe(model, vocabulary, prompt, out_dir)), encoding="utf-8")
    except OSError as e:
        fail(f"--attention={attention}: cannot be written ({e.strerror})")
    print(f"wrote {attention}")


def main():
    check_settings()
    place = distributed.setup(device)
    model, vocabulary = load_model(checkpoint.newest_run(out_dir), tokenizer, place)
    if attention:
        return write_attention(model, vocabulary)
    ids = vocabulary.encode_prompt(prompt)
    start = torch.tensor([ids], device=place)
    generator = torch.Generator(device=place).manual_seed(seed)
    stop, slid = (vocabulary.bos_id, vocabulary.eos_id), False
    for n in range(num_samples):
        try:
            tokens = model.generate(start, max_new_tokens, temperature, top_p, stop, generator)
        except RuntimeError as e:  # torch.multinomial, of probabilities that are NaN
            fail(f"{out_dir}: cannot be sampled from ({e}); its weights are broken")
        if not slid and (slid := tokens.shape[1] > model.args.max_seq_len + 1):  # the last one has not been evaluated
            print(f"the context of {model.args.max_seq_len} tokens is full: it slides over the text", file=sys.stderr)
        print("\n" * (n > 0) + generated(vocabulary.decode(tokens[0].tolist())), flush=True)


if __name__ == "__main__":
    configure(globals(), positional="out_dir")
    main()
