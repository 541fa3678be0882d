"""
Predictions of n-grams: interpolated Kneser-Ney smoothing, with one discount for each order.
https://doi.org/10.1006/csla.1999.0128 (equations 15 and 17)

A model memorizes a small text before it predicts similar texts as well as n-grams do. So n-grams
are an additional teacher of a distillation (distill.py). They are counted in the training text, and
predict it and the text that the teachers have written. When they predict a token of the training
text, that occurrence is left out of the counts, as it would reveal the token.

A place is an index into the tokens. The order of a context is its number of tokens. A pair is a
context and a token that occurs after it. Shapes: N tokens, V vocabulary, n places or contexts.
"""
import numpy as np

ORDER = 8         # tokens of the longest context
TEXTS = 256       # texts that are written in parallel
SEED = 1337       # seed of the written text
MAX_VOCAB = 8192  # max vocabulary size; the table of order 1 then takes 256 MiB
MAX_KEPT = 1 << 28  # max bytes of cached predictions


def kept_bytes(n, V):
    """Return the bytes of the predictions that Ngrams cache for n places; 0: too many to cache."""
    size = 4 * n * V
    return size if size <= MAX_KEPT else 0


class Order:
    """
    The pairs of one order. They are numbered by context, then token: those of context c are
    first[c] to first[c + 1] - 1.

    context_of, pair_of: (N,), the numbers of the context before each place and of the pair there;
    token: (pairs,), the token of each pair. count_pairs sets count: (pairs,), how often each pair
    occurs at the places that Ngrams passes; counts_before: (pairs,), the sum of the counts of all
    pairs with lower numbers; total: (contexts,), the sum of a context's counts; kinds: (contexts,),
    how many of these are not 0; discount: what is subtracted from each nonzero count and left to
    shorter contexts.
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
        probability discount / count, the draw is not kept, and a shorter context decides.
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
        # The pairs of all contexts, concatenated: lengths[i] for row i, beginning with first[i].
        first, lengths = self.first[context], self.first[context + 1] - self.first[context]
        row = np.repeat(np.arange(len(found)), lengths)
        pair = np.arange(len(row)) + np.repeat(first - np.cumsum(lengths) + lengths, lengths)
        found[row, self.token[pair]] += scale[row] * np.maximum(self.count[pair] - self.discount, 0)


class Ngrams:
    """
    N-grams of the first `counted` of the tokens (N,), which predict the token at any place. The
    tokens form a ring: the last ones are the context of the first ones.

    Training asks for each place once per epoch, so predictions are cached if those of all places
    fit in MAX_KEPT bytes.
    """

    def __init__(self, tokens, counted, V):
        self.tokens, self.counted, self.V = np.asarray(tokens, np.int64), counted, V
        context_of, self.orders, self.context_keys = np.zeros(len(tokens), np.int64), [], []
        for order in range(ORDER + 1):
            self.orders.append(Order(context_of, self.tokens, V))
            if order < ORDER:
                # The key of the context one token longer: the number of this one, and that token.
                keys = context_of * V + np.roll(self.tokens, order + 1)
                keys, context_of = np.unique(keys, return_inverse=True)
                self.context_keys.append(keys)
        # A pair of the longest order counts once per place. A shorter pair counts once per
        # different token before it, that is, once per counted pair of the next longer order.
        places = np.arange(counted)
        for order in reversed(self.orders):
            order.count_pairs(order.pair_of[places])
            places = order.a_place_of_each()
        for order in self.orders[:2]:  # the orders with many pairs for each context
            order.make_table(V)
        self.kept = None  # (N, V) float32, cached predictions of the places where is_kept (N,)
        if kept_bytes(len(tokens), V):
            self.kept = np.empty((len(tokens), V), np.float32)
            self.is_kept = np.zeros(len(tokens), bool)

    def probabilities(self, places):
        """Return the probabilities of all tokens at places (n,): (n, V) float32."""
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
        is_left_out = places < self.counted  # the place adds 1 to its pair's count in this order
        for order in reversed(self.orders):
            context = order.context_of[places]
            # That count is 1: without the place, the pair does not occur.
            is_only = is_left_out & (order.count[order.pair_of[places]] == 1)
            total = order.total[context] - is_left_out
            # What one count adds to a probability; 0 if no other place has this context.
            scale = np.where(total > 0, weight / np.maximum(total, 1), 0)
            order.add(found, context, scale)
            # Leave out the place: subtract 1 or, if the count was 1, the whole discounted count.
            found[rows, actual] -= scale * np.where(is_only, 1 - order.discount, is_left_out)
            kinds = order.kinds[context] - is_only
            weight = np.where(total > 0, scale * order.discount * kinds, weight)
            # A pair that still occurs elsewhere keeps its count in the next shorter order.
            is_left_out = is_only
        return found + (weight / self.V).astype(np.float32)[:, None]

    def write(self, n):
        """
        Return n tokens, or up to TEXTS - 1 more, sampled from the n-grams: TEXTS texts,
        concatenated, each of which continues the text from a random place. All tokens must be
        counted.
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
        """Sample a token after each row of recent tokens (n, ORDER), oldest first. Return (n,)."""
        rows, context = np.arange(len(recent)), np.zeros(len(recent), np.int64)
        known = [(rows, context)]  # per order: rows whose context occurs, and the context's number
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
        return drawn  # if no draw was kept, the last one, of order 0: a token that occurs
