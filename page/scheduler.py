"""
Texts for many clients at once: one thread owns the engines and evaluates a batch a step.

A batch has the next token of each running text, and a chunk of the prompts of those that have just
begun, so that running texts do not stall behind a long prompt. Engines of several models take
turns, because one batch uses all cores. A text does not depend on the others in its batch.
"""
import threading
import traceback
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

import llamac

MAX_RUNNING = 16  # texts that are generated at once; others wait in the order of their arrival
PROMPT_CHUNK = 64  # tokens of prompts in a batch, of all together
MAX_QUEUED = 256  # events that a client has not taken yet; its text pauses until then
MAX_KEPT = 16  # sequences that are kept for later requests, of an engine
MAX_KEPT_BYTES = 1 << 28  # of their KV caches in all, of an engine


class SequenceCache:
    """Sequences of an engine whose texts have ended. A request that begins like one reuses it."""

    def __init__(self, engine):
        self.engine, self.kept = engine, []  # [(Sequence, its tokens)], the latest last
        info = engine.model.info
        kv_dim = info.dim // info.n_heads * info.n_kv_heads
        token_bytes = 2 * info.n_layers * kv_dim * 4  # keys and values, 32 bits at most
        self.max_tokens = MAX_KEPT_BYTES // token_bytes

    def take(self, tokens, running=()):
        """
        Return a sequence that begins with as many of the tokens, (n,) int32, as a kept sequence or
        one of `running` does.
        """
        found = [*self.kept, *((sequence, sequence.tokens) for sequence in running)]
        shared = [llamac.common_prefix(known, tokens) for _, known in found]
        n = max(shared, default=0)
        if not n:
            return llamac.Sequence(self.engine)
        at = shared.index(n)
        sequence, known = found[at]
        if at < len(self.kept) and n == len(known):  # the text goes on where this one ended
            del self.kept[at]
            return sequence
        return sequence.copy(n)

    def keep(self, sequence):
        """Keep a sequence, and free the oldest ones beyond the limits."""
        self.kept.append((sequence, sequence.tokens))
        while len(self.kept) > MAX_KEPT or sum(len(t) for _, t in self.kept) > self.max_tokens:
            self.kept.pop(0)[0].free()


@dataclass(eq=False)
class Task:
    """
    A text to generate. The scheduler puts (index, event) into `events`: what
    llamac.Continuation.advance() returns, or the llamac.Error that ends the text.
    """
    cache: SequenceCache
    tokens: list  # of the prompt; texts of the same prompt share the list
    options: dict  # further arguments of llamac.Continuation
    events: SimpleQueue
    index: int = 0
    text: llamac.Continuation | None = None  # None: it waits
    cancelled: bool = False

    def is_paused(self):
        return self.events.qsize() >= MAX_QUEUED


def split_evenly(needs, budget):
    """
    Return how much of a budget each one gets: what it needs, or else an equal part of what the
    others leave, and at least 1.
    """
    shares = [0] * len(needs)
    order = sorted(range(len(needs)), key=needs.__getitem__)
    for done, i in enumerate(order):
        shares[i] = min(needs[i], max(1, budget // (len(needs) - done)))
        budget -= shares[i]
    return shares


class Scheduler:
    """Generates the texts of all clients in a thread of its own."""

    def __init__(self):
        self.changed = threading.Condition()  # for the queues
        self.waiting, self.running = deque(), []
        self.calls = deque()  # [(Future, function)] of call()
        self.thread = None

    def submit(self, tasks):
        """Generate texts, as soon as it is their turn."""
        with self.changed:
            self.waiting.extend(tasks)
            self.wake()

    def wake(self):
        """Let the thread look into the queues. The caller holds self.changed."""
        if not self.thread:
            self.thread = threading.Thread(target=self.work, daemon=True)
            self.thread.start()
        self.changed.notify()

    def call(self, function):
        """
        Return what a function returns that uses an engine. It is called between two batches, in the
        thread that owns the engines. Raises what the function raises.
        """
        future = Future()
        with self.changed:
            self.calls.append((future, function))
            self.wake()
        return future.result()

    def cancel(self, tasks):
        """End texts whose client has left. Their sequences are freed before the next batch."""
        with self.changed:
            for task in tasks:
                task.cancelled = True
            self.changed.notify()

    def work(self):
        while True:
            with self.changed:
                while not (self.waiting or self.running or self.calls):
                    self.changed.wait()
            try:
                self.step()
            except Exception as e:  # a mistake in this program: end the texts, serve the next ones
                traceback.print_exc()
                for task in [*self.running]:
                    self.end(task, llamac.Error(f"{type(e).__name__}: {e}"))

    def step(self):
        """
        Drop the texts of clients that have left, begin others, evaluate a batch per engine, and
        answer one call.
        """
        for task in [task for task in self.running if task.cancelled]:
            self.end(task, llamac.Error("the client has left"))
        self.begin()
        ready = [task for task in self.running if not task.is_paused()]
        for cache in {id(task.cache): task.cache for task in ready}.values():
            self.evaluate(cache.engine, [task for task in ready if task.cache is cache])
        with self.changed:
            future, function = self.calls.popleft() if self.calls else (None, None)
            if not ready and not future:
                self.changed.wait(0.01)  # until clients have taken some events
        if future:
            try:
                future.set_result(function())
            except Exception as e:
                future.set_exception(e)

    def begin(self):
        """Move texts from the queue to those that run, as long as there is room."""
        while True:
            with self.changed:
                self.waiting = deque(task for task in self.waiting if not task.cancelled)
                # The first text of a prompt evaluates it; the others then copy its sequence.
                busy = [task.tokens for task in self.running if not task.text.count]
                ready = [task for task in self.waiting
                         if not any(task.tokens is tokens for tokens in busy)]
                if not ready or len(self.running) >= MAX_RUNNING:
                    return
                # A request with many texts leaves room for the others.
                task = min(ready, key=lambda task: sum(other.events is task.events
                                                       for other in self.running))
                self.waiting.remove(task)
                running = [other.text.sequence for other in self.running
                           if other.cache is task.cache]
                self.running.append(task)
            try:
                tokens = llamac.token_array(task.tokens)
                sequence = task.cache.take(tokens, running)
                task.text = llamac.Continuation(sequence, tokens, **task.options)
            except llamac.Error as e:  # too little memory
                self.end(task, e)

    def evaluate(self, engine, tasks):
        """Evaluate a batch of an engine."""
        prompts = [task for task in tasks if task.text.n_new > 1]
        shares = split_evenly([task.text.n_new for task in prompts], PROMPT_CHUNK)
        sizes = dict(zip(map(id, prompts), shares))
        self.evaluate_parts(engine, [(task, task.text.part(sizes.get(id(task), 1)))
                                     for task in tasks])

    def evaluate_parts(self, engine, batch):
        """Evaluate [(task, its Part)], and sample a token for each whose prompt is complete."""
        try:
            engine.evaluate([part for _, part in batch])
        except llamac.Error as e:
            if len(batch) == 1:
                self.end(batch[0][0], e)
            else:  # end only those that fail alone
                for one in batch:
                    self.evaluate_parts(engine, [one])
            return
        for task, _ in batch:
            if task.text.ready:
                self.advance(task)

    def advance(self, task):
        """Sample the next token of a text, and end the text if it is complete."""
        try:
            event = task.text.advance()
        except llamac.Error as e:  # broken weights
            self.end(task, e)
            return
        if task.text.reason:
            self.end(task)
        task.events.put((task.index, event))

    def end(self, task, error=None):
        """Take a text out of those that run. Without an error, keep its sequence."""
        with self.changed:
            self.running.remove(task)
        if error:
            task.events.put((task.index, error))
        if task.text and error:
            task.text.sequence.free()
        elif task.text:
            task.cache.keep(task.text.sequence)
