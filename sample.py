"""
Generate text from a trained model in PyTorch. `run` does the same in C, faster.

    python sample.py out/my --num_samples=3 --temperature=0.8
    python sample.py out/my --prompt="Once upon a time"
    python sample.py out/my --prompts=prompts.txt --temperature=0
    python sample.py out/my --attention=look.html

The last command draws how the model processes the prompt: attention, likely next tokens.
"""
import codecs
import sys
from pathlib import Path

from configurator import configure, fail  # first: it reports missing packages

import torch

from engine.debug import inside
from engine.files import write_atomic
from engine.training import checkpoint, distributed, hardware, run_folder
from engine.training.load import load_model
from engine.streams import without_controls
from engine.untrusted import read_untrusted, reason
from page.inside import html, is_page_of_ours
from tokenizer import decode_utf8

out_dir = "out"         # model: a run's folder, a folder of runs (the newest), a checkpoint's
                        # folder, a Hugging Face, PEFT or Meta folder, a GGUF or llama2.c file
tokenizer = ""          # vocabulary of a llama2.c file: tokenizer.model, .json or .bin
prompt = "auto"         # text to continue; auto: the prompt of the samples in the run's log, which
                        # is by default from its own text; empty: none, the model begins the text
prompts = ""            # instead continue each line of this UTF-8 file
num_samples = 1         # number of continuations of each prompt
max_new_tokens = 256    # max tokens of each; beyond its context the model sees the latest tokens
temperature = 1.0       # 0: always the likeliest token; above 1: flatter distribution than learned
top_p = 0.9             # sample from the likeliest tokens with this total probability; 1: from all
seed = 1337             # seed of the first sample of each prompt; the next ones add 1, 2, ...
attention = ""          # instead write this .html file: attention and likely tokens for the prompt
device = "auto"         # auto, cpu, cuda, cuda:1, mps

MAX_PROMPTS = 1 << 28   # bytes of a file of prompts
AT_ONCE = 16            # max texts that are generated in one batch


def check_settings():
    for name, value, valid, expected in (
            ("num_samples", num_samples, num_samples >= 1, "at least 1"),
            ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
            ("temperature", temperature, temperature >= 0, "0 or more"),
            ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1")):
        if not valid:
            fail(f"{name} is {value}, expected {expected}")
    if prompt not in ("auto", "") and prompts:
        fail(f"--prompts={prompts} and --prompt: expected one of them")
    if attention and not (prompt and attention.endswith(".html")):
        fail(f"--attention={attention}: expected a name that ends in .html, "
             "and a --prompt to look at")


def read_prompts(own):
    """
    Return the lines of the file `prompts`, or [own] without one. own: the prompt. Empty lines are
    prompts, too.
    """
    if not prompts:
        return [own]
    try:
        data = read_untrusted(prompts, MAX_PROMPTS).removeprefix(codecs.BOM_UTF8)
    except OSError as e:
        fail(f"--prompts={prompts}: cannot be read ({e.strerror}); expected a text file")
    if not data:
        fail(f"--prompts={prompts}: the file has no lines")
    lines = decode_utf8(data).removesuffix("\n").split("\n")
    return [line.removesuffix("\r") for line in lines]


def write_attention(model, vocabulary, text):
    """Write a page that shows the model's computation on a text to the file `attention`."""
    page = html(inside.describe(model, vocabulary, text, out_dir))
    try:
        if Path(attention).exists() and not is_page_of_ours(attention):
            fail(f"{attention}: exists and was not written by sample.py; move it, or give another "
                 "--attention")
        write_atomic(attention, page)
    except OSError as e:
        fail(f"--attention={attention}: cannot be written ({reason(e)})")
    print(f"wrote {attention}")


def main():
    check_settings()
    torch_device = distributed.setup(device)
    folder = checkpoint.newest_run(out_dir)
    model, vocabulary = load_model(folder, tokenizer, torch_device)
    own = run_folder.sample_prompt(folder) if prompt == "auto" else prompt
    if attention:
        if not own:
            fail(f"--attention={attention}: {folder} has no prompt of its own; give a --prompt")
        return write_attention(model, vocabulary, own)
    texts = [(vocabulary.encode_prompt(line), seed + n)
             for line in read_prompts(own) for n in range(num_samples)]
    stop, context = (vocabulary.bos_id, vocabulary.eos_id), model.args.max_seq_len
    warned = False
    for first in range(0, len(texts), AT_ONCE):
        starts, seeds = zip(*texts[first:first + AT_ONCE])
        generators = [torch.Generator(device=torch_device).manual_seed(each) for each in seeds]
        try:
            batch = model.generate(starts, max_new_tokens, temperature, top_p, stop, generators)
        except RuntimeError as e:  # torch.multinomial refuses NaN
            if hardware.is_out_of_memory(e):
                fail("out of memory on the device; lower --max_new_tokens or --num_samples")
            fail(f"{out_dir}: cannot be sampled from ({e}); its weights are broken")
        for n, tokens in enumerate(batch, first):
            # The model never reads the last token, so context + 1 tokens still fit.
            if len(tokens) > context + 1 and not warned:
                warned = True
                print(f"the context of {context} tokens is full: the oldest tokens are dropped",
                      file=sys.stderr)
            text = without_controls(vocabulary.decode(tokens))
            print("\n" * (n > 0) + text, flush=True)


if __name__ == "__main__":
    configure(globals(), positional="out_dir")
    main()
