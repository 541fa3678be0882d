"""Text from a model, as it comes: whole characters, up to a stop text, in a context that slides where it is full."""
import codecs
import contextlib

import numpy as np

import llamac

PIECE = 64  # tokens of a prompt that are evaluated at once


class Held:
    """Text that comes in bytes and goes out when it is certain: whole characters, none that a stop text may begin with."""

    def __init__(self, stop):
        self.stop, self.decoder, self.held, self.stopped = stop, codecs.getincrementaldecoder("utf-8")("replace"), "", False

    def take(self, data, last=False):
        self.held += self.decoder.decode(data, last)
        cuts = [at for s in self.stop if (at := self.held.find(s)) >= 0]
        if cuts:
            self.held, self.stopped, last = self.held[:min(cuts)], True, True
        most = max((len(s) for s in self.stop), default=1) - 1
        keep = 0 if last else next((n for n in range(min(most, len(self.held)), 0, -1)
                                    if any(s.startswith(self.held[-n:]) for s in self.stop)), 0)
        out, self.held = self.held[:len(self.held) - keep], self.held[len(self.held) - keep:]
        return out


def entry(model, row, previous, token, rivals, offset):
    """What is told of a token: its text and log probability, and those of the likeliest."""
    row = row.astype(np.float64) - row.max()
    row -= np.log(np.exp(row).sum())
    likeliest = np.argsort(-row, kind="stable")[:rivals]

    def told(t):
        data = model.decode([int(t)], previous)
        try:
            spelled = data.decode()
        except UnicodeDecodeError:
            spelled = "bytes:" + "".join(f"\\x{b:02x}" for b in data)
        return {"token": spelled, "logprob": float(row[t]), "bytes": list(data)}
    return told(token) | {"top_logprobs": [told(t) for t in likeliest], "offset": offset}


def slide(window, new, positions):
    """What is to be evaluated behind the window, which loses its older half, but not BOS, where it is full; as run does."""
    if len(window) + len(new) <= positions:
        return new
    half = positions // 2 if positions > 3 else 1
    kept = [(window or new)[0], *(window + new)[1 - half:]] if half > 1 else new[-1:]
    window.clear()
    return kept


def generate(session, tokens, sampler, most=None, stop=(), rivals=None, turn=None):
    """
    Continue tokens, at most `most` of them, until the model ends its text or one of the texts `stop` comes, which is cut off.
    Yields for each token (text that is certain by now, [what is told of its tokens], tokens so far, None or why it ends:
    "stop" or "length"); nothing where most is 0. rivals: how many likeliest tokens are told beside each; None: nothing. turn: held
    while computing.
    """
    model, window, held, turn = session.model, [], Held(list(stop)), turn or contextlib.nullcontext()
    count = length = 0
    entries, reason, new = [], None, list(tokens)
    if most is not None and llamac.whole("most", most) < 0:
        raise llamac.Error(f"most is {most}, expected 0 or more tokens, or None for no end but the model's")
    while not reason and most != 0:
        new = slide(window, new, session.positions)
        for at in range(0, len(new) or 1, PIECE):
            with turn:
                session.forward(new[at:at + PIECE], len(window))
            window += new[at:at + PIECE]
        with turn:
            row = session.logits[-1].copy() if rivals is not None else None
            token = session.sample(sampler)
        ended, data = model.ends(token), b""
        if not ended:
            if row is not None:
                entries.append(entry(model, row, window[-1], token, rivals, length + len(held.held)))
            data, count = model.decode([token], window[-1]), count + 1
        text = held.take(data, ended or count == most)
        length, new = length + len(text), [token]
        reason = "stop" if ended or held.stopped else "length" if count == most else None
        certain = [e for e in entries if e["offset"] < length or reason and not held.stopped]
        entries = entries[len(certain):]
        yield text, certain, count, reason
