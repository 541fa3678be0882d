"""Text from a model as it is generated, up to a stop text, in a context that slides when full."""
import codecs
import contextlib

import numpy as np

import llamac

CHUNK = 64  # tokens of a prompt that are evaluated in one call


class TextStream:
    """
    Text that arrives in bytes and is released once it is certain: whole characters, and none that
    may begin a stop text. stopped: whether a stop text was found; it is cut off.
    """

    def __init__(self, stop):
        self.stop, self.stopped, self.held = stop, False, ""
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data, last=False):
        """Add bytes and return the text that is certain now. last: no more bytes follow."""
        self.held += self.decoder.decode(data, last)
        ends = [at for text in self.stop if (at := self.held.find(text)) >= 0]
        if ends:
            self.held, self.stopped, last = self.held[:min(ends)], True, True
        size = len(self.held) - (0 if last else self.uncertain())
        certain, self.held = self.held[:size], self.held[size:]
        return certain

    def uncertain(self):
        """Return how many characters at the end may begin a stop text."""
        longest = max((len(text) for text in self.stop), default=1) - 1
        for size in range(min(longest, len(self.held)), 0, -1):
            if any(text.startswith(self.held[-size:]) for text in self.stop):
                return size
        return 0


def token_details(model, logits, previous, token, count):
    """
    Return {"token", "logprob", "bytes", "top_logprobs"} of a token, as OpenAI's API has them.

    logits: (vocab_size,), from which the token was sampled; count: of the likeliest tokens.
    """
    log_p = logits.astype(np.float64) - logits.max()
    log_p -= np.log(np.exp(log_p).sum())

    def describe(token):
        data = model.decode([int(token)], previous)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return {"token": text, "logprob": float(log_p[token]), "bytes": list(data)}

    likeliest = np.argsort(-log_p, kind="stable")[:count]
    return describe(token) | {"top_logprobs": [describe(t) for t in likeliest]}


def slide(window, new, positions):
    """
    Return the tokens to evaluate after those in `window`, the list of evaluated tokens: `new`, if
    they fit into `positions`. Otherwise empty the window and return its first token and the latest
    ones, half a context in all, as run does.
    """
    if len(window) + len(new) <= positions:
        return new
    half = positions // 2 if positions > 3 else 1
    tokens = window + new
    kept = [tokens[0], *tokens[1 - half:]] if half > 1 else new[-1:]
    window.clear()
    return kept


def generate(session, tokens, sampler, max_tokens=None, stop=(), top_logprobs=None, lock=None):
    """
    Continue tokens until the model ends its text, a text of `stop` appears (it is cut off), or
    max_tokens are generated.

    Yield (text, details, count, reason) after each token; nothing for max_tokens=0. text: what has
    become certain, see TextStream; details: token_details of the tokens in it, and the "offset" of
    each in the generated text, in characters; count: tokens so far; reason: None, or why generation
    ends: "stop" or "length".

    top_logprobs: how many likeliest tokens the details of a token have; None: no details.
    lock: a context manager that is entered for each computation.
    """
    model, window, stream = session.model, [], TextStream(list(stop))
    lock = lock or contextlib.nullcontext()
    count = length = 0  # tokens, and characters that were yielded
    details, reason, new = [], None, list(tokens)
    if max_tokens is not None and llamac.c_integer("max_tokens", max_tokens) < 0:
        raise llamac.Error(f"max_tokens is {max_tokens}, expected 0 or more, or None for no limit")
    while not reason and max_tokens != 0:
        new = slide(window, new, session.positions)
        for at in range(0, len(new) or 1, CHUNK):  # without any token, let forward() refuse
            with lock:
                session.forward(new[at:at + CHUNK], len(window))
            window += new[at:at + CHUNK]
        with lock:
            logits = None if top_logprobs is None else session.logits[-1].copy()
            token = session.sample(sampler)
        ended, data = model.ends(token), b""
        if not ended:
            if logits is not None:
                entry = token_details(model, logits, window[-1], token, top_logprobs)
                details.append(entry | {"offset": length + len(stream.held)})
            data, count = model.decode([token], window[-1]), count + 1
        text = stream.add(data, ended or count == max_tokens)
        length, new = length + len(text), [token]
        if ended or stream.stopped:
            reason = "stop"
        elif count == max_tokens:
            reason = "length"
        # At the end all text is certain, but a stop text cuts off tokens, and so their details.
        complete = reason and not stream.stopped
        certain = [entry for entry in details if entry["offset"] < length or complete]
        details = details[len(certain):]
        yield text, certain, count, reason
