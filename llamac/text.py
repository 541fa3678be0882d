"""Text generation token by token, up to a stop text, in a context that slides when it is full."""
from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import llamac

CHUNK = 64  # tokens of a prompt that are evaluated in one call
NO_LIMIT = (1 << 31) - 1  # tokens that may still follow if max_tokens is None
Step = tuple[str, list[dict[str, Any]], int, str | None]  # what Continuation.advance() returns


class TextStream:
    """
    Text that arrives in bytes and is returned once it is certain: whole characters, except those
    that may begin a stop text. stopped: whether a stop text was found; it is cut off.
    """

    def __init__(self, stop):
        self.stop, self.stopped, self.held = stop, False, ""
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data, last=False):
        """Add bytes and return the text that is certain now. last: no more bytes follow."""
        text = self.decoder.decode(data, last)
        if not self.stop:
            return text
        self.held += text
        ends = [at for stop in self.stop if (at := self.held.find(stop)) >= 0]
        if ends:
            self.held, self.stopped, last = self.held[:min(ends)], True, True
        size = len(self.held) - (0 if last else self.uncertain())
        certain, self.held = self.held[:size], self.held[size:]
        return certain

    def uncertain(self):
        """Return how many of the held characters, at their end, may begin a stop text."""
        longest = max((len(stop) for stop in self.stop), default=1) - 1
        for size in range(min(longest, len(self.held)), 0, -1):
            if any(stop.startswith(self.held[-size:]) for stop in self.stop):
                return size
        return 0


def token_details(model, logits, previous, token, count):
    """
    Return {"token", "logprob", "bytes", "top_logprobs"} of a token, as in OpenAI's API.

    logits: (vocab_size,) as the model computed them, without temperature, penalties and grammar;
    previous: the token before this one, on which its bytes depend; count: how many tokens to list
    in top_logprobs, the likeliest first.
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


def common_prefix(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return how many tokens at the beginning of two arrays of tokens are the same."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n


class Continuation:
    """
    The text that follows some tokens, generated one token at a time. It ends when the model ends
    it, when a text of `stop` appears (which is cut off), or after max_tokens.

        while not continuation.reason:
            engine.evaluate([continuation.part(64)])
            if continuation.ready:
                text, details, count, reason = continuation.advance()

    One call of evaluate() may have the parts of several continuations. Tokens with which the
    sequence already begins are not evaluated again. When the context is full, it slides.

    grammar: a Grammar that the text obeys. It ends as soon as it is complete.
    reason: None, or why the text ended: "stop" or "length".
    ready: whether part() has returned all tokens. After their evaluation, call advance().
    """

    reason: str | None

    def __init__(self, sequence: llamac.Sequence, tokens: ArrayLike, sampler: llamac.Sampler,
                 max_tokens: int | None = None, stop: Iterable[str] = (),
                 top_logprobs: int | None = None, grammar: llamac.Grammar | None = None) -> None:
        if max_tokens is not None and llamac.c_integer("max_tokens", max_tokens) < 0:
            raise llamac.Error(f"max_tokens is {max_tokens}, expected 0 or more, or None for no "
                               "limit")
        tokens = llamac.token_array(tokens)
        if not len(tokens):
            raise llamac.Error("a text of 0 tokens, expected 1 or more")
        self.sampler, self.max_tokens = sampler, max_tokens
        self.model, self.top_logprobs = sequence.engine.model, top_logprobs
        self.grammar = grammar
        if grammar:
            grammar.reset()
        self.stream, self.details = TextStream(list(stop)), []
        self.count = 0  # tokens generated so far, without the end token
        self.length = 0  # characters of the text that advance() has returned
        self.reason = "length" if max_tokens == 0 else None
        self.last = int(tokens[-1])  # the latest token
        self.pending = tokens  # those that are still to be evaluated
        self.resume(sequence)
        self.slide()

    @property
    def ready(self) -> bool:
        return not len(self.pending)

    @property
    def n_pending(self) -> int:
        """Number of tokens that are still to be evaluated."""
        return len(self.pending)

    def suspend(self) -> None:
        """Free the sequence. resume() continues the same text in another sequence."""
        self.pending = np.concatenate([self.sequence.tokens, self.pending])
        self.sequence.free()

    def resume(self, sequence: llamac.Sequence) -> None:
        """
        Continue the text, all of whose tokens are pending, in another sequence. Tokens with which
        the sequence already begins are no longer pending; its other tokens are dropped.
        """
        # The last token is always evaluated, for its logits.
        known = common_prefix(sequence.tokens, self.pending[:-1])
        sequence.truncate(known)
        self.sequence, self.pending = sequence, self.pending[known:]

    def slide(self):
        """
        If the pending tokens do not fit into the context, start over with the first token of the
        sequence and the latest ones, half a context in total, as the program run does.
        """
        positions = self.sequence.engine.positions
        if len(self.sequence) + len(self.pending) <= positions:
            return
        half = positions // 2 if positions > 3 else 1
        tokens = np.concatenate([self.sequence.tokens, self.pending])
        self.pending = np.append(tokens[:1], tokens[1 - half:]) if half > 1 else self.pending[-1:]
        self.sequence.truncate(0)

    def part(self, max_tokens: int) -> llamac.Part:
        """Return the next Part to evaluate, of up to max_tokens tokens."""
        tokens, self.pending = self.pending[:max_tokens], self.pending[max_tokens:]
        return llamac.Part(self.sequence, tokens, logits="none" if len(self.pending) else "last")

    def take_back(self, part: llamac.Part) -> None:
        """Make the tokens of the latest Part, whose evaluation has failed, pending again."""
        self.pending = np.concatenate([part.tokens, self.pending])

    def prepare(self) -> None:
        """Let the sampler draw only tokens that the grammar allows next."""
        if self.grammar:
            left = NO_LIMIT if self.max_tokens is None else self.max_tokens - self.count
            self.sampler.allowed = self.grammar.allowed(left)

    def advance(self, token: int | None = None) -> Step:
        """
        Append the next token. Return (text, details, count, reason).

        token: the token that Engine.sample_batch sampled after prepare(); None: sample it here.

        text: the text that has become certain, see TextStream; details: token_details of the tokens
        in it, with the "offset" of each in the whole text, in characters; count: tokens so far.
        """
        model, stream = self.model, self.stream
        logits = None if self.top_logprobs is None else self.sequence.logits
        if token is None:
            self.prepare()
            token = self.sequence.sample(self.sampler)
        if self.grammar:
            self.grammar.accept(token)
        ended, data = model.ends(token), b""
        if not ended:
            if logits is not None:
                entry = token_details(model, logits, self.last, token, self.top_logprobs)
                self.details.append(entry | {"offset": self.length + len(stream.held)})
            data = model.decode_next(token, self.last)
            self.count += 1
        complete = bool(self.grammar and self.grammar.complete)
        text = stream.add(data, ended or complete or self.count == self.max_tokens)
        self.length, self.last = self.length + len(text), token
        self.pending = np.array([token], np.int32)
        if ended or complete or stream.stopped:
            self.reason = "stop"
        elif self.count == self.max_tokens:
            self.reason = "length"
        else:
            self.slide()
        certain = self.certain_details() if self.details else []
        return text, certain, self.count, self.reason

    def run(self) -> Iterator[str]:
        """Return an iterator over the text, in the parts that advance() returns, up to its end."""
        return (text for text, *_ in self.advance_to_end())

    def advance_to_end(self) -> Iterator[Step]:
        """Evaluate and yield what advance() returns, until the text ends."""
        while not self.reason:
            self.sequence.engine.evaluate([self.part(CHUNK)])
            if self.ready:
                yield self.advance()

    def certain_details(self):
        """Remove and return the details of the tokens in the text that is certain."""
        # A token is in the certain text if its first character is. At the end of the text, all
        # other tokens are returned too, unless a stop text was found: it is cut off with them.
        return_all = self.reason and not self.stream.stopped
        certain = [entry for entry in self.details if entry["offset"] < self.length or return_all]
        self.details = self.details[len(certain):]
        return certain


def generate(sequence: llamac.Sequence, tokens: ArrayLike, sampler: llamac.Sampler,
             max_tokens: int | None = None, stop: Iterable[str] = (),
             top_logprobs: int | None = None,
             grammar: llamac.Grammar | None = None) -> Iterator[Step]:
    """
    Continue tokens until the model ends its text, a text of `stop` appears (which is cut off), or
    max_tokens are generated.

    Yield (text, details, count, reason) after each token, as Continuation.advance() returns them;
    nothing for max_tokens=0.

    top_logprobs: how many likeliest tokens to list in the details of a token; None: no details.
    grammar: a Grammar that the text obeys.
    """
    continuation = Continuation(sequence, tokens, sampler, max_tokens, stop, top_logprobs, grammar)
    yield from continuation.advance_to_end()
