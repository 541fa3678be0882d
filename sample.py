"""
Generate text from a trained model in PyTorch. `run` does the same in C, faster.

    python sample.py out/my --prompt="Once upon a time" --num_samples=3 --temperature=0.8
    python sample.py out/my --prompt="Once upon a time" --attention=look.html

The second command draws how the model processes the prompt: attention, likely next tokens.
"""
import sys
from pathlib import Path

from configurator import configure, fail  # first: it reports packages that are missing

import torch

from engine.debug import inside
from engine.training import checkpoint, distributed
from engine.training.load import load_model
from engine.streams import without_controls
from page.inside import html

out_dir = "out"         # model: a run's folder, a folder of runs (the newest), a checkpoint's
                        # folder, a Hugging Face or Meta folder, a GGUF or llama2.c file
tokenizer = ""          # vocabulary of a llama2.c file: tokenizer.model, .json or .bin
prompt = ""             # text to continue
num_samples = 1         # number of continuations
max_new_tokens = 256    # max tokens of each; beyond its context the model sees the latest tokens
temperature = 1.0       # 0: always the likeliest token; above 1: flatter distribution than learned
top_p = 0.9             # sample from the likeliest tokens with this total probability; 1: from all
seed = 1337             # of the samples
attention = ""          # instead write this .html file: attention and likely tokens for the prompt
device = "auto"         # auto, cpu, cuda, cuda:1, mps


def check_settings():
    for name, value, valid, expected in (
            ("num_samples", num_samples, num_samples >= 1, "at least 1"),
            ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
            ("temperature", temperature, temperature >= 0, "0 or more"),
            ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1")):
        if not valid:
            fail(f"{name} is {value}, expected {expected}")
    if attention and not (prompt and attention.endswith(".html")):
        fail(f"--attention={attention}: expected a name that ends in .html, "
             "and a --prompt to look at")


def write_attention(model, vocabulary):
    """Write the page's view of the model's computation on the prompt to a file."""
    page = html(inside.describe(model, vocabulary, prompt, out_dir))
    try:
        Path(attention).write_text(page, encoding="utf-8")
    except OSError as e:
        fail(f"--attention={attention}: cannot be written ({e.strerror})")
    print(f"wrote {attention}")


def main():
    check_settings()
    torch_device = distributed.setup(device)
    model, vocabulary = load_model(checkpoint.newest_run(out_dir), tokenizer, torch_device)
    if attention:
        return write_attention(model, vocabulary)
    start = torch.tensor([vocabulary.encode_prompt(prompt)], device=torch_device)
    generator = torch.Generator(device=torch_device).manual_seed(seed)
    stop, context = (vocabulary.bos_id, vocabulary.eos_id), model.args.max_seq_len
    warned = False
    for n in range(num_samples):
        try:
            tokens = model.generate(start, max_new_tokens, temperature, top_p, stop, generator)
        except RuntimeError as e:  # torch.multinomial refuses NaN
            fail(f"{out_dir}: cannot be sampled from ({e}); its weights are broken")
        # The model never reads the last token, so context + 1 tokens still fit.
        if tokens.shape[1] > context + 1 and not warned:
            warned = True
            print(f"the context of {context} tokens is full: it slides over the text",
                  file=sys.stderr)
        text = without_controls(vocabulary.decode(tokens[0].tolist()))
        print("\n" * (n > 0) + text, flush=True)


if __name__ == "__main__":
    configure(globals(), positional="out_dir")
    main()
