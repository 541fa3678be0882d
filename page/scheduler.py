"""
Generate texts for many clients at once. A text is what a model writes for one prompt (a Task).

One thread owns the engines and works in steps. In each step, each engine evaluates a batch: the
next token of each of its running texts, and a chunk of the prompts of those that have just begun,
so that running texts do not stall behind a long prompt. Engines of several models take turns,
because one batch uses all cores. A text does not depend on the others in its batch.

A text begins when there is memory for all its tokens. If the library cannot allocate memory
nevertheless, sequences that were kept for later requests are freed, and then the text that began
last goes back to the queue, until another one ends. It loses nothing: its tokens are evaluated
again.
"""
import contextlib
import threading
import traceback
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import llamac
from page.system import available_memory

MAX_RUNNING = 64  # texts that are generated at once; others wait in the order of their arrival
PROMPT_CHUNK = 64  # max tokens of prompts in a batch, of all its prompts together
MAX_QUEUED = 2048  # events in an Inbox; its texts pause until the client has taken some
MAX_KEPT = 64  # sequences that an engine keeps for later requests
MAX_KEPT_BYTES = 1 << 28  # bytes of the KV caches of all sequences that an engine keeps
MEMORY_ERRORS = llamac.OutOfMemory, MemoryError
# The running texts of an engine may take this share of the memory that is free when the
# SequenceCache of the engine is made.
MEMORY_SHARE = 0.5
POLL = 0.2  # max seconds to wait for an event, before checking whether the client has left


class SequenceCache:
    """
    Keeps the sequences of texts that have ended, for one engine. A later text that begins with the
    same tokens reuses the sequence, so these tokens are not evaluated again.
    """

    def __init__(self, engine):
        self.engine, self.kept = engine, []  # [(Sequence, its tokens)], the latest last
        info = engine.model.info
        kv_dim = info.dim // info.n_heads * info.n_kv_heads
        # Bytes of a token's keys and values, if the KV cache has its widest type: 32 bits
        token_bytes = 2 * info.n_layers * kv_dim * 4
        self.max_kept_tokens = MAX_KEPT_BYTES // token_bytes
        # Tokens of all running texts together. This limit is needed because Linux promises more
        # memory than there is, and kills a program that uses it.
        self.max_running_tokens = MEMORY_SHARE * available_memory() / token_bytes

    def take(self, tokens, running=()):
        """
        Return a sequence that contains as many of the first tokens of `tokens` as possible, and no
        others. Among the kept and running sequences, find the one that begins with the most of
        these tokens. If it is a kept one without further tokens, remove it from `kept` and return
        it. Otherwise return a copy of its beginning, or a new sequence if none shares a token.

        tokens: (T,) int32; running: the sequences of the running texts of the engine.
        """
        found = [*self.kept, *((sequence, sequence.tokens) for sequence in running)]
        shared = [llamac.common_prefix(known, tokens) for _, known in found]
        n = max(shared, default=0)
        if not n:
            return llamac.Sequence(self.engine)
        at = shared.index(n)
        sequence, known = found[at]
        if at < len(self.kept) and n == len(known):  # the text continues the kept one
            del self.kept[at]
            return sequence
        return sequence.copy(n)

    def keep(self, sequence):
        """
        Keep a sequence with a copy of its tokens, or free it if there is no memory for the copy.
        Then free the oldest sequences until the limits are met.
        """
        try:
            self.kept.append((sequence, sequence.tokens))  # this attribute makes the copy
        except MEMORY_ERRORS:
            sequence.free()
            return
        while len(self.kept) > MAX_KEPT or sum(len(t) for _, t in self.kept) > self.max_kept_tokens:
            self.kept.pop(0)[0].free()

    def free_oldest(self):
        """Free the oldest kept sequence. Return whether there was one."""
        if self.kept:
            self.kept.pop(0)[0].free()
            return True
        return False


class Inbox:
    """
    What a request's texts have generated: (index of the text, event), where an event is what
    llamac.Continuation.advance() returns, or the exception that ends the text.
    """

    def __init__(self):
        self.queue = SimpleQueue()
        self.ended = threading.Event()  # a text has ended since the latest call of take()

    def put(self, index, event, ends):
        """Append an event. ends: it is the last one of its text."""
        self.queue.put((index, event))
        if ends:
            self.ended.set()

    def take(self, pause=0):
        """
        Return all that has arrived since the latest call, in a list that is empty if nothing
        arrives within POLL seconds.

        pause: seconds to wait first, unless a text ends. The pause collects several events,
        because waking a thread takes more time than generating a token.
        """
        if pause:
            self.ended.wait(pause)
        self.ended.clear()
        found = []
        with contextlib.suppress(Empty):
            found.append(self.queue.get(timeout=POLL))
            while True:
                found.append(self.queue.get_nowait())
        return found

    def is_full(self):
        return self.queue.qsize() >= MAX_QUEUED


@dataclass(eq=False)
class Task:
    """A text of a request, from the queue until it ends."""
    cache: SequenceCache
    tokens: list  # of the prompt; texts of the same prompt share the list
    options: dict  # further arguments of llamac.Continuation
    inbox: Inbox
    index: int = 0
    grammar: llamac.Grammar | None = None  # a copy of it masks the tokens of the text
    text: llamac.Continuation | None = None  # what generates it; None before it begins
    cancelled: bool = False

    def max_length(self):
        """Return the max length of the sequence in tokens, prompt included."""
        wanted = len(self.tokens) + self.options["max_tokens"]
        return min(wanted, self.cache.engine.positions)

    def begin(self, running):
        """
        Begin the text, or resume it after `suspend`, in a sequence from SequenceCache.take.
        running: see SequenceCache.take. Raises llamac.Error or MemoryError.
        """
        # After `suspend`, all tokens of the text are pending: they have to be evaluated again.
        tokens = self.text.pending if self.text else llamac.token_array(self.tokens)
        sequence = self.cache.take(tokens, running)
        try:
            if self.text:
                self.text.resume(sequence)
            else:
                grammar = self.grammar and self.grammar.copy()
                self.text = llamac.Continuation(sequence, tokens, grammar=grammar, **self.options)
        except (llamac.Error, MemoryError):
            sequence.free()
            raise


def split_evenly(needs, budget):
    """
    Divide a budget. The smallest needs are met first; each of the larger ones gets an equal share
    of what is left, but at least 1.
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
        self.changed = threading.Condition()  # guards waiting, running and calls
        self.waiting, self.running = deque(), []  # Tasks
        self.memory_is_short = False  # no text begins until another one has ended
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
        Call a function that uses an engine, in the thread that owns the engines, between two
        batches. Return what it returns, or raise what it raises.
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
        then call one function of `call`.
        """
        for task in [task for task in self.running if task.cancelled]:
            self.end(task, llamac.Error("the client has left"))
        if self.waiting:
            self.begin()
        active = [task for task in self.running if not task.inbox.is_full()]  # the others pause
        for cache in {id(task.cache): task.cache for task in active}.values():
            self.evaluate(cache.engine, [task for task in active if task.cache is cache])
        with self.changed:
            future, function = self.calls.popleft() if self.calls else (None, None)
            if not active and not future:
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
                task = self.next_task()
                if not task:
                    return
                self.waiting.remove(task)
                sequences = [other.text.sequence for other in self.running
                             if other.cache is task.cache]
                self.running.append(task)  # so that put_back or end can take it out again
            try:
                task.begin(sequences)
            except MEMORY_ERRORS as e:
                if task.cache.free_oldest():
                    self.put_back(task, wait=False)
                elif len(self.running) > 1:
                    self.put_back(task, wait=True)
                else:
                    self.end(task, e)
            except llamac.Error as e:
                self.end(task, e)

    def next_task(self):
        """Return the text that is to begin next, or None."""
        if len(self.running) >= MAX_RUNNING or self.memory_is_short:
            return None
        self.waiting = deque(task for task in self.waiting if not task.cancelled)
        # Several texts of one prompt: the first evaluates the prompt, and the others wait for that
        # and then copy its sequence. They do not wait for the last token of the prompt, which each
        # text evaluates itself, for its logits.
        busy = [task.tokens for task in self.running
                if task.text.count == 0 and task.text.n_pending > 1]
        candidates = [task for task in self.waiting
                      if not any(task.tokens is tokens for tokens in busy)]
        # A request with many running texts comes after requests with fewer.
        task = min(candidates, default=None, key=lambda task: sum(other.inbox is task.inbox
                                                                  for other in self.running))
        return task if task and self.has_memory(task) else None

    def has_memory(self, task):
        """
        Return whether there is memory for a text beside the running ones of its engine. An
        engine without running texts may always begin one.
        """
        beside = [other.max_length() for other in self.running if other.cache is task.cache]
        return not beside or sum(beside) + task.max_length() <= task.cache.max_running_tokens

    def put_back(self, task, wait):
        """
        Move a running text to the front of the queue, because memory is short. wait: let no text
        begin until another one has ended.
        """
        with self.changed:
            self.running.remove(task)
            self.waiting.appendleft(task)
            if wait:
                self.memory_is_short = True

    def evaluate(self, engine, tasks):
        """Evaluate a batch of an engine, and append a token to each text whose prompt is done."""
        # A text has one pending token, its latest; until its prompt is evaluated, it has more.
        prompts = [task for task in tasks if task.text.n_pending > 1]
        shares = split_evenly([task.text.n_pending for task in prompts], PROMPT_CHUNK)
        sizes = dict(zip(map(id, prompts), shares))
        parts = [task.text.part(sizes.get(id(task), 1)) for task in tasks]
        try:
            engine.evaluate(parts)
        except (llamac.Error, MemoryError) as e:
            for task, part in zip(tasks, parts):
                task.text.take_back(part)
            self.recover(engine, tasks, e)
            return
        # A text is ready if its whole prompt is evaluated, and so all its tokens.
        self.advance(engine, [task for task in tasks if task.text.ready])

    def recover(self, engine, tasks, error):
        """
        After a failed batch: if memory was short, free a kept sequence or put the latest text back
        into the queue, so that the next step can try again. Otherwise evaluate the texts one by
        one, and end those that fail even then.
        """
        cache = tasks[0].cache
        if isinstance(error, MEMORY_ERRORS):
            if cache.free_oldest():
                return  # the next step tries again
            running = [task for task in self.running if task.cache is cache]
            if len(running) > 1:
                running[-1].text.suspend()
                self.put_back(running[-1], wait=True)
                return
        if len(tasks) == 1:
            self.end(tasks[0], error)
            return
        for task in tasks:
            if task in self.running:  # recovering from an earlier task may have put this one back
                self.evaluate(engine, [task])

    def advance(self, engine, tasks):
        """Sample the next token of each text, and end those that are complete."""
        for task in tasks:
            task.text.prepare()  # the mask of the grammar
        tokens = engine.sample_batch([task.text.sequence for task in tasks],
                                     [task.text.sampler for task in tasks])
        for task, token in zip(tasks, tokens):
            if isinstance(token, llamac.Error):  # such as logits that are not finite
                self.end(task, token)
                continue
            event = task.text.advance(token)
            if task.text.reason:
                self.end(task)
            task.inbox.put(task.index, event, ends=task.text.reason is not None)

    def end(self, task, error=None):
        """Take a text out of those that run. Without an error, keep its sequence."""
        with self.changed:
            self.running.remove(task)
            self.memory_is_short = False
        if task.text and error:
            task.text.sequence.free()
        elif task.text:
            task.cache.keep(task.text.sequence)
        if error:
            task.inbox.put(task.index, error, ends=True)
