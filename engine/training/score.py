"""
Score the models that experiment.py compares, in bits per byte of one text.

    python score.py TREE texts RUN FILE    write validation texts of a run, a JSON string per line
    python score.py TREE model RUN FILE    score a run's model on them; print the result as JSON

experiment.py runs this file from the base commit, with the modules of TREE: a change to the program
may change how a text is encoded and modeled, but not how it is scored. So this file computes the
likelihood itself, from the model's logits, and imports none of TREE's code for scoring.
"""
import json
import math
import sys
from pathlib import Path

import numpy as np

MAX_BYTES = 1 << 18   # max bytes of text to score
BATCH_TOKENS = 4096   # max tokens per batch
LONG = 8              # every window begins with BOS if documents fill this many windows on average,
                      # as in data.py
LEAK = 1e-3           # max change of a logit by later tokens, relative to the largest


def validation_texts(run):
    """
    Return documents of a run's validation split, up to MAX_BYTES in total, drawn with a fixed seed.
    The last one is cut. Exits with a message if they are conversations or missing.
    """
    from engine.text.prepared import load  # from TREE, like all imports in functions
    config = json.loads(Path(run, "config.json").read_bytes())
    wanted = config["dataset"]["fingerprint"]
    for meta in (Path(config["data"], "meta.json"), *Path(config["cache"]).glob("*/meta.json")):
        if meta.exists() and json.loads(meta.read_bytes()).get("fingerprint") == wanted:
            break
    else:
        sys.exit(f"{config['cache']}: holds no prepared data of {run}")
    prepared = load(meta.parent)
    if prepared.masks:
        sys.exit("conversations have no text to compare by; expected texts")
    tokens, bos_id = np.asarray(prepared.val), prepared.tokenizer.bos_id
    edges = np.append(np.flatnonzero(tokens == bos_id), len(tokens))
    texts, left = [], MAX_BYTES
    for n in np.random.Generator(np.random.PCG64(0)).permutation(len(edges) - 1):
        part = tokens[edges[n]:min(edges[n + 1], edges[n] + left)]  # a token has at least a byte
        text = prepared.tokenizer.decode(part.tolist()).encode(errors="replace")[:left]
        texts.append(text.decode(errors="ignore"))
        left -= len(text)
        if left <= 0:
            break
    return [text for text in texts if text]


def windows_of(documents, seq_len, bos_id):
    """
    Return [(inputs, targets)], lists of token ids, that predict each token of the documents except
    BOS once, in windows of at most seq_len. documents: lists of ids, BOS first.
    """
    is_long = sum(map(len, documents)) >= LONG * seq_len * len(documents)
    found = []
    for ids in documents:
        for start in range(0, len(ids) - 1, seq_len):
            inputs, targets = ids[start:start + seq_len], ids[start + 1:start + seq_len + 1]
            first = bos_id if is_long else inputs[0]
            found.append(([first, *inputs[1:len(targets)]], targets))
    return sorted(found, key=lambda window: -len(window[0]))


def logits_of(model, inputs, device):
    """Return a model's logits, (rows, T, V), for lists of token ids, padded to the longest."""
    import torch
    T = max(map(len, inputs))
    x = torch.tensor([ids + [0] * (T - len(ids)) for ids in inputs])
    return model(x.to(device), every=True)[0].float()


def sees_the_future(model, inputs, device, vocab_size):
    """Return whether later tokens of a window change the logits of earlier ones."""
    half = len(inputs) // 2
    changed = inputs[:half] + [(i + 1) % vocab_size for i in inputs[half:]]
    before, after = (logits_of(model, [ids], device)[0, :half] for ids in (inputs, changed))
    return bool((before - after).abs().max() > LEAK * before.abs().max())


def score(run, texts):
    """
    Return {"bpb": bits per byte, "bytes", "tokens", "lost": number of texts that decoding does not
    restore} of a run's best model. Exits with a message if a prediction is not finite, or depends
    on later tokens.
    """
    import torch
    from engine.training.load import load_model
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode():
        model, vocabulary = load_model(run, "", device)
        documents = [[*vocabulary.encode(text, bos=True), vocabulary.eos_id] for text in texts]
        windows = windows_of(documents, model.args.max_seq_len, vocabulary.bos_id)
        if sees_the_future(model, windows[0][0], device, vocabulary.vocab_size):
            sys.exit("its predictions depend on later tokens: it sees what it should predict")
        nats, tokens = 0.0, 0
        while windows:
            rows = max(1, BATCH_TOKENS // len(windows[0][0]))
            batch, windows = windows[:rows], windows[rows:]
            logits = logits_of(model, [inputs for inputs, _ in batch], device)
            for row, (_, targets) in zip(logits, batch):
                log_p = row[:len(targets)].log_softmax(-1)
                at = torch.tensor(targets, device=device)[:, None]
                nats -= log_p.gather(1, at).double().sum().item()
                tokens += len(targets)
    if not math.isfinite(nats):
        sys.exit("its predictions are not finite")
    size = sum(len(text.encode()) for text in texts)
    lost = sum(vocabulary.decode(ids) != text for ids, text in zip(documents, texts))
    return {"bpb": nats / math.log(2) / size, "bytes": size, "tokens": tokens, "lost": lost}


def main(tree, what, run, file):
    sys.path[0] = tree  # instead of the folder of this file
    if what == "texts":
        lines = [json.dumps(text) + "\n" for text in validation_texts(run)]
        Path(file).write_text("".join(lines))
    else:
        texts = [json.loads(line) for line in Path(file).read_text().splitlines()]
        print(json.dumps(score(run, texts)))


if __name__ == "__main__":
    main(*sys.argv[1:])
