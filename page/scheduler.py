"""
Generate texts for many clients at once. A text is what a model writes for one prompt. A Task is
one text, and a sequence holds its tokens and their KV cache.

One thread owns the engines and works in steps. In each step, each engine evaluates a batch: the
next token of each of its running texts, and a chunk of the prompts of those that have just begun,
so that running texts do not stall behind a long prompt. Engines of several models take turns,
because one batch uses all cores. A text does not depend on the other texts in its batch.

A text begins when there is memory for all its tokens. If the library still fails to allocate
memory, the scheduler frees the sequences that it keeps for later requests. If that is not enough,
it suspends the text that began last: the text waits in the queue until another one ends, and then
continues where it was, after its tokens have been evaluated again.
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

MAX_RUNNING = 64  # max texts that run at once; others wait in the order of their arrival
PROMPT_CHUNK = 64  # max prompt tokens in a batch, all prompts together
MAX_QUEUED = 2048  # texts pause while their Inbox has this many events
MAX_KEPT = 64  # max sequences that a SequenceCache keeps for later requests
MAX_KEPT_BYTES = 1 << 28  # max bytes of the KV caches of all sequences that it keeps
MEMORY_ERRORS = llamac.OutOfMemory, MemoryError
# Max share of the free memory that the running texts of an engine may use. The free memory is
# measured once, when the SequenceCache of the engine is made.
MEMORY_SHARE = 0.5
POLL = 0.2  # max seconds to wait for an event before checking the client's connection


class SequenceCache:
    """
    Keeps the sequences of texts that have ended, for one engine. A later text that begins with the
    same tokens reuses the sequence, so these tokens are not evaluated again.
    """

    def __init__(self, engine):
        self.engine, self.kept = engine, []  # [(Sequence, its tokens)], the latest last
        info = engine.model.info
        kv_dim = info.dim // info.n_heads * info.n_kv_heads
        # Bytes of a token's keys and values in the widest type of a KV cache, 32 bits
        token_bytes = 2 * info.n_layers * kv_dim * 4
        self.max_kept_tokens = MAX_KEPT_BYTES // token_bytes
        # Max tokens of all running texts together. Waiting for a failed allocation is not enough:
        # Linux overcommits memory, and kills a program that uses more than there is.
        self.max_running_tokens = MEMORY_SHARE * available_memory() / token_bytes

    def take(self, tokens, running=()):
        """
        Return a sequence with the first n of `tokens` and no others, where n is the length of the
        longest prefix that a kept or running sequence shares with `tokens`. If a kept sequence is
        just that prefix, remove it from `kept` and return it; otherwise return a copy of the prefix
        or, for n = 0, a new sequence.

        tokens: (T,) int32; running: the sequences of the running texts of the engine.
        """
        known = [*self.kept, *((sequence, sequence.tokens) for sequence in running)]
        prefixes = [llamac.common_prefix(its_tokens, tokens) for _, its_tokens in known]
        n = max(prefixes, default=0)
        if not n:
            return llamac.Sequence(self.engine)
        at = prefixes.index(n)
        sequence, its_tokens = known[at]
        if at < len(self.kept) and n == len(its_tokens):
            del self.kept[at]
            return sequence
        return sequence.copy(n)

    def keep(self, sequence):
        """
        Keep a sequence with a copy of its tokens, or free it if there is no memory for the copy.
        Then free the oldest kept sequences until both limits are met.
        """
        try:
            self.kept.append((sequence, sequence.tokens))  # the property `tokens` makes the copy
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
    The queue from the scheduler to one request, of (index of a text, event). An event is what
    llamac.Continuation.advance() returns, or the exception that ends the text.
    """

    def __init__(self):
        self.queue = SimpleQueue()
        self.ended = threading.Event()  # set if a text has ended since the latest call of take()

    def put(self, index, event, ends):
        """Append an event. ends: whether it is the last one of its text."""
        self.queue.put((index, event))
        if ends:
            self.ended.set()

    def take(self, pause=0):
        """
        Return a list of all events since the latest call. If there are none, wait up to POLL
        seconds for one; the list may still be empty.

        pause: seconds to wait before that, or less if a text ends. A pause collects several events,
        because waking a thread takes longer than generating a token.
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
    """One text of a request: waiting, running or suspended."""
    cache: SequenceCache
    tokens: list  # prompt tokens; texts of one prompt share the list object, see next_task
    options: dict  # arguments of llamac.Continuation, besides sequence, tokens and grammar
    inbox: Inbox
    index: int = 0  # index of the text in its request
    grammar: llamac.Grammar | None = None  # a copy of it decides which tokens are allowed
    text: llamac.Continuation | None = None  # generates the text; None before it first begins
    cancelled: bool = False

    def max_length(self):
        """Return how many tokens the sequence may have at most, prompt included."""
        wanted = len(self.tokens) + self.options["max_tokens"]
        return min(wanted, self.cache.engine.positions)

    def begin(self, running):
        """
        Begin the text, or resume it after a suspension, in a sequence from SequenceCache.take.
        running: see SequenceCache.take. Raises llamac.Error or MemoryError.
        """
        # All tokens of a suspended text are pending: they have to be evaluated again.
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
    Return a share of the budget for each need. Small needs are met in full; the larger ones get
    equal shares of the rest. Each need gets at least 1, even if that exceeds the budget.
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
        self.waiting, self.running = deque(), []  # Tasks; the last of running began last
        self.memory_is_short = False  # True: no text begins until another one has ended
        self.calls = deque()  # [(Future, function)] of call()
        self.thread = None

    def submit(self, tasks):
        """Add texts to the queue."""
        with self.changed:
            self.waiting.extend(tasks)
            self.wake()

    def wake(self):
        """Start the thread, or wake it if it waits. The caller holds self.changed."""
        if not self.thread or not self.thread.is_alive():
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
        """Mark texts whose client has left. The next step ends them and frees their sequences."""
        with self.changed:
            for task in tasks:
                task.cancelled = True
            self.changed.notify()

    def work(self):
        """Run steps forever; wait while there is nothing to do."""
        while True:
            with self.changed:
                while not (self.waiting or self.running or self.calls):
                    self.changed.wait()
            try:
                self.step()
            except Exception as e:  # a bug in this program: end the running texts and go on
                traceback.print_exc()
                for task in [*self.running]:
                    self.end(task, llamac.Error(f"{type(e).__name__}: {e}"))

    def step(self):
        """
        End the running texts that are cancelled, begin others, evaluate a batch per engine, and
        then run one function that `call` has queued.
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
                self.changed.wait(0.01)  # clients may have taken some events by then
        if future:
            try:
                future.set_result(function())
            except Exception as e:
                future.set_exception(e)

    def begin(self):
        """Begin texts from the queue, as long as there is room."""
        while True:
            with self.changed:
                task = self.next_task()
                if not task:
                    return
                self.waiting.remove(task)
                sequences = [other.text.sequence for other in self.running
                             if other.cache is task.cache]
                self.running.append(task)  # first, because put_back and end remove it from here
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
        """Return the waiting text to begin next, or None. Drop waiting texts that are cancelled."""
        if len(self.running) >= MAX_RUNNING or self.memory_is_short:
            return None
        self.waiting = deque(task for task in self.waiting if not task.cancelled)
        # Of several texts of one prompt, the first evaluates the prompt. The others wait until only
        # the last token of the prompt is pending, and then copy the sequence. Each evaluates the
        # last token itself, because it needs the logits.
        unfinished = [task.tokens for task in self.running
                      if task.text.count == 0 and task.text.n_pending > 1]
        candidates = [task for task in self.waiting
                      if not any(task.tokens is prompt for prompt in unfinished)]

        def n_running_of_request(task):
            return sum(other.inbox is task.inbox for other in self.running)

        # Prefer requests with fewer running texts; among equals, the text that arrived first.
        task = min(candidates, default=None, key=n_running_of_request)
        return task if task and self.has_memory(task) else None

    def has_memory(self, task):
        """
        Return whether a text fits into memory together with the running texts of its engine. The
        only text of an engine may always begin.
        """
        lengths = [other.max_length() for other in self.running if other.cache is task.cache]
        return not lengths or sum(lengths) + task.max_length() <= task.cache.max_running_tokens

    def put_back(self, task, wait):
        """
        Move a running text to the front of the queue, because memory is short. wait: whether no
        text may begin until another one has ended.
        """
        with self.changed:
            self.running.remove(task)
            self.waiting.appendleft(task)
            if wait:
                self.memory_is_short = True

    def evaluate(self, engine, tasks):
        """Evaluate a batch of an engine, and append a token to each text that has none pending."""
        # A text has one pending token, its latest; more until its prompt is evaluated.
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
        # ready: all tokens of the text are evaluated. Texts with long prompts are not ready yet.
        self.advance(engine, [task for task in tasks if task.text.ready])

    def recover(self, engine, tasks, error):
        """
        Recover from a failed batch. If memory was short, free a kept sequence or suspend the text
        that began last; the next step tries again. Otherwise evaluate the texts one by one, and end
        those that fail even alone.
        """
        cache = tasks[0].cache
        if isinstance(error, MEMORY_ERRORS):
            if cache.free_oldest():
                return
            running = [task for task in self.running if task.cache is cache]
            if len(running) > 1:
                running[-1].text.suspend()
                self.put_back(running[-1], wait=True)
                return
        if len(tasks) == 1:
            self.end(tasks[0], error)
            return
        for task in tasks:
            if task in self.running:  # an earlier evaluate() may have suspended this one
                self.evaluate(engine, [task])

    def advance(self, engine, tasks):
        """Sample the next token of each text, and end those that are complete."""
        for task in tasks:
            task.text.prepare()  # limits the sampler to tokens that the grammar allows
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
        """
        Remove a text from the running ones. After an error, free its sequence and report the error
        to its request; otherwise keep the sequence for later requests.
        """
        with self.changed:
            self.running.remove(task)
            self.memory_is_short = False
        try:
            if task.text and error:
                task.text.sequence.free()
            elif task.text:
                task.cache.keep(task.text.sequence)
        finally:  # even if freeing or keeping fails, the request must not wait forever
            if error:
                task.inbox.put(task.index, error, ends=True)
