"""
Pack conversations into rows of one length, cut longer ones between turns, and read the rows as
inputs and targets.

A piece is a conversation, or some turns of one. It has four positions in the tokens of a split and
consists of the tokens [opening, first) and [begin, end). The opening is everything before the first
turn: BOS and a system prompt. Each piece of a long conversation thus begins like a conversation.
"""
from typing import NamedTuple

import numpy as np

from engine.formats.chat_template import FIRST, TARGET, TURN

NO_TARGET = -1  # in targets: nothing is predicted from this input
BEGINS = -2     # the same; this input begins a conversation, and attention stays within it


class Cut(NamedTuple):
    """
    pieces: (n, 4) int64; cut: number of conversations longer than a row; too_long: number of turns
    that are left out because a single one does not fit into a row.
    """
    pieces: np.ndarray
    cut: int
    too_long: int


def cut_at_turns(marks, size):
    """Cut a split into pieces of at most `size` tokens. marks: the marks of its tokens."""
    starts = np.flatnonzero(marks & FIRST)
    ends = np.append(starts, len(marks))[1:]
    is_long = ends - starts > size
    whole = np.stack([starts, starts, starts, ends], 1)
    pieces, too_long = [], 0
    for start, end in zip(starts[is_long].tolist(), ends[is_long].tolist()):
        turns = start + np.flatnonzero(marks[start:end] & TURN)
        edges, i = np.append(turns, end), 0
        first = int(edges[0])
        room = size - (first - start)
        while i < len(turns):
            # The last edge within the room of a row.
            j = int(np.searchsorted(edges, edges[i] + room, "right")) - 1
            if j > i:
                pieces.append((start, first, int(edges[i]), int(edges[j])))
            else:
                too_long += 1
            i = max(j, i + 1)
    pieces = np.array(pieces, np.int64).reshape(-1, 4)
    return Cut(np.concatenate([whole[~is_long], pieces]), int(is_long.sum()), too_long)


def lengths_of(pieces):
    """Return the number of tokens of each piece, (n,)."""
    return (pieces[:, 1] - pieces[:, 0]) + (pieces[:, 3] - pieces[:, 2])


def pack(lengths, size):
    """
    Pack pieces into rows of at most `size` tokens, best fit decreasing: each piece, the longest
    first, goes into the row with the least room that it fits. Return (order, edges): row k consists
    of the pieces order[edges[k]:edges[k + 1]].
    """
    rows_with = [[] for _ in range(size + 1)]  # the rows with n tokens of room
    rooms = 0                                  # bit n: whether there is such a row
    row_of, count = np.empty(len(lengths), np.int64), 0
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        fitting = rooms >> length << length
        if fitting:
            room = (fitting & -fitting).bit_length() - 1  # the lowest bit
            row = rows_with[room].pop()
            if not rows_with[room]:
                rooms ^= 1 << room
        else:
            row, room, count = count, size, count + 1
        row_of[i] = row
        rows_with[room - length].append(row)
        rooms |= 1 << room - length
    order = np.argsort(row_of, kind="stable")
    return order, np.searchsorted(row_of[order], np.arange(count + 1))


def read_rows(tokens, marks, rows, seq_len, padding):
    """
    Return inputs and targets, (n, seq_len) int64 each. rows: n arrays of pieces, (m, 4) each;
    padding: the token that fills a row. Only tokens marked as TARGET are targets; the others are
    NO_TARGET, or BEGINS where a conversation or the padding begins.
    """
    import torch  # here, so that preparation and its worker processes start without it
    inputs = np.full((len(rows), seq_len + 1), padding, np.int64)
    targets = np.full((len(rows), seq_len + 1), NO_TARGET, np.int64)
    begins = np.zeros((len(rows), seq_len + 1), bool)
    for n, row in enumerate(rows):
        at = 0
        for opening, first, begin, end in row.tolist():
            begins[n, at] = True
            for a, b in (opening, first), (begin, end):
                ids = tokens[a:b].astype(np.int64)
                inputs[n, at:at + b - a] = ids
                targets[n, at:at + b - a] = np.where(marks[a:b] & TARGET, ids, NO_TARGET)
                at += b - a
        begins[n, at:at + 1] = True
    y = np.where(begins[:, :-1], BEGINS, targets[:, 1:])
    return torch.from_numpy(inputs[:, :-1].copy()), torch.from_numpy(y)
