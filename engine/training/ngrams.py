"""
What n-grams predict: interpolated Kneser-Ney, with one discount for each order.
https://doi.org/10.1006/csla.1999.0128 (equations 15 and 17)

A model knows a small text by heart before it predicts others like it as well as n-grams do. So they
are one more teacher of a distillation (distill.py). They count the training text, and predict it
and the text that the teachers have written. Where they predict the training text, the predicted
place is left out of the counts, which would give its token away.

The order of a context is its number of tokens. A pair is a context and a token that occurs after
it. Shapes: N tokens, V vocabulary, n rows, each with a place of the tokens or a context.
"""
import numpy as np

ORDER = 8         # tokens of the longest context
TEXTS = 256       # texts that are written side by side
SEED = 1337       # of the writing
MAX_VOCAB = 8192  # max vocabulary; the table of order 1 then takes 256 MiB
MAX_KEPT = 1 << 28  # max bytes of kept predictions


def kept_bytes(n, V):
    """Return the bytes of the predictions that Ngrams keep for n places; 0: too many to keep."""
    size = 4 * n * V
    return size if size <= MAX_KEPT else 0


class Order:
    """
    The pairs of one order. They are numbered by context, then token: those of context c are
    first[c] to first[c + 1] - 1.

    context_of, pair_of: (N,), numbers of the context before each place and of the pair there.
    token: (pairs,), of each pair. By count_pairs: count, (pairs,), how often it occurs in what
    Ngrams passes, see there; counts_before, (pairs,), the sum of the counts of pairs with lower
    numbers; total, kinds, (contexts,), sum of the counts of a context, and how many of them are not
    0; discount, what is taken from each count that is not 0 and given to shorter contexts.
    """

    def __init__(self, context_of, tokens, V):
        pairs, self.pair_of = np.unique(context_of * V + tokens, return_inverse=True)
        contexts, self.token = np.divmod(pairs, V)
        self.context_of = context_of
        self.first = np.searchsorted(contexts, np.arange(context_of.max() + 2))
        self.table = None

    def count_pairs(self, pair_of):
        """Count each pair as often as it occurs in pair_of (n,)."""
        self.count = np.bincount(pair_of, minlength=len(self.token))
        once, twice = (np.count_nonzero(self.count == times) for times in (1, 2))
        self.discount = max(once, 1) / max(once + 2 * twice, 2)  # the maxima avoid 0 and 0 / 0
        self.counts_before = np.cumsum(self.count) - self.count
        self.total = np.add.reduceat(self.count, self.first[:-1])
        self.kinds = np.add.reduceat(self.count > 0, self.first[:-1], dtype=np.int64)

    def a_place_of_each(self):
        """Return one place of each counted pair; it may be in text that is not counted."""
        place = np.zeros(len(self.token), np.int64)
        place[self.pair_of] = np.arange(len(self.pair_of))
        return place[self.count > 0]

    def draw(self, context, dice):
        """
        Draw a pair of each context (n,) in proportion to the counts. Return (token, is_kept): with
        the probability discount / count it is not kept, and a shorter context decides.
        """
        drawn = self.counts_before[self.first[context]] + dice.integers(self.total[context])
        pair = np.searchsorted(self.counts_before, drawn, "right") - 1
        return self.token[pair], dice.random(len(pair)) >= self.discount / self.count[pair]

    def make_table(self, V):
        """Store the discounted counts as a table (contexts, V), which is faster to read."""
        contexts = len(self.total)
        self.table = np.zeros((contexts, V), np.float32)
        context = np.repeat(np.arange(contexts), np.diff(self.first))
        self.table[context, self.token] = np.maximum(self.count - self.discount, 0)

    def add(self, found, context, scale):
        """Add scale (n,) times the discounted counts of context (n,) to the rows of found."""
        if self.table is not None:
            found += scale.astype(np.float32)[:, None] * self.table[context]
            return
        # The pairs of all contexts, one after the other: lengths[i] for row i, from first[i] on.
        first, lengths = self.first[context], self.first[context + 1] - self.first[context]
        row = np.repeat(np.arange(len(found)), lengths)
        pair = np.arange(len(row)) + np.repeat(first - np.cumsum(lengths) + lengths, lengths)
        found[row, self.token[pair]] += scale[row] * np.maximum(self.count[pair] - self.discount, 0)


class Ngrams:
    """
    Count the first `counted` of tokens (N,), and predict at any place of them. The tokens are a
    ring: the context of the first ones is the end.

    A training asks for each place once a reading, so predictions are kept, if those of all places
    fit in MAX_KEPT bytes.
    """

    def __init__(self, tokens, counted, V):
        self.tokens, self.counted, self.V = np.asarray(tokens, np.int64), counted, V
        context_of, self.orders, self.context_keys = np.zeros(len(tokens), np.int64), [], []
        for order in range(ORDER + 1):
            self.orders.append(Order(context_of, self.tokens, V))
            if order < ORDER:
                # A context that is one token longer: the number of this one, and that token.
                keys = context_of * V + np.roll(self.tokens, order + 1)
                keys, context_of = np.unique(keys, return_inverse=True)
                self.context_keys.append(keys)
        # A pair of the longest order counts once for each place, a shorter one once for each token
        # that occurs before it, which is each counted pair of the next longer order.
        places = np.arange(counted)
        for order in reversed(self.orders):
            order.count_pairs(order.pair_of[places])
            places = order.a_place_of_each()
        for order in self.orders[:2]:  # those with many pairs for each context
            order.make_table(V)
        self.kept = None  # (N, V) float32, the rows of the places where is_kept (N,)
        if kept_bytes(len(tokens), V):
            self.kept = np.empty((len(tokens), V), np.float32)
            self.is_kept = np.zeros(len(tokens), bool)

    def probabilities(self, places):
        """Return the probabilities of the tokens that may stand at places (n,): (n, V) float32."""
        if self.kept is None:
            return self.predict(places)
        new = places[~self.is_kept[places]]
        if len(new):
            self.kept[new], self.is_kept[new] = self.predict(new), True
        return self.kept[places]

    def predict(self, places):
        """Compute what probabilities() returns."""
        rows, actual = np.arange(len(places)), self.tokens[places]
        found = np.zeros((len(places), self.V), np.float32)
        weight = np.ones(len(places))  # the probability that longer orders leave to this one
        is_left_out = places < self.counted  # the place is 1 of its pair's count in this order
        for order in reversed(self.orders):
            context = order.context_of[places]
            # The place is all of that count: without it the pair does not occur.
            is_only = is_left_out & (order.count[order.pair_of[places]] == 1)
            total = order.total[context] - is_left_out
            # What one count adds to a probability; 0 if at most this place has this context.
            scale = np.where(total > 0, weight / np.maximum(total, 1), 0)
            order.add(found, context, scale)
            # The pair has its count less 1, or, where that is 0, nothing.
            found[rows, actual] -= scale * np.where(is_only, 1 - order.discount, is_left_out)
            kinds = order.kinds[context] - is_only
            weight = np.where(total > 0, scale * order.discount * kinds, weight)
            # A pair that still occurs elsewhere counts as before in the next shorter order.
            is_left_out = is_only
        return found + (weight / self.V).astype(np.float32)[:, None]

    def write(self, n):
        """
        Return n tokens, or up to TEXTS - 1 more, drawn from what the n-grams predict: TEXTS texts,
        one after the other, each of which continues the text from a random place. All tokens must
        be counted.
        """
        dice = np.random.Generator(np.random.PCG64(SEED))
        starts = dice.integers(self.counted, size=TEXTS)
        recent = self.tokens[(starts[:, None] + np.arange(ORDER)) % self.counted]  # (TEXTS, ORDER)
        columns = []
        for _ in range(-(-n // TEXTS)):
            columns.append(self.draw(recent, dice))
            recent = np.concatenate((recent[:, 1:], columns[-1][:, None]), 1)
        return np.stack(columns, 1).ravel()

    def draw(self, recent, dice):
        """Return a token after each row of recent tokens (n, ORDER), the oldest first: (n,)."""
        rows, context = np.arange(len(recent)), np.zeros(len(recent), np.int64)
        known = [(rows, context)]  # of each order: the rows whose context occurs, and its number
        for order, context_keys in enumerate(self.context_keys):
            keys = context * self.V + recent[rows, ORDER - 1 - order]
            number = np.searchsorted(context_keys, keys)
            occurs = context_keys[np.minimum(number, len(context_keys) - 1)] == keys
            rows, context = rows[occurs], number[occurs]
            known.append((rows, context))
        drawn, is_open = np.zeros(len(recent), np.int64), np.ones(len(recent), bool)
        for order, (rows, context) in zip(reversed(self.orders), reversed(known)):
            rows, context = rows[is_open[rows]], context[is_open[rows]]
            drawn[rows], is_kept = order.draw(context, dice)
            is_open[rows] = ~is_kept
        return drawn  # where no draw was kept, that of order 0: a token that occurs
