"""
Describe a prepared text: lengths of documents, use of the vocabulary, repeated documents; as text
tables, an HTML page and a picture.
"""
import codecs
import collections
import html
import math
import re

import numpy as np

from engine.streams import one_line, pad, width
from tokenizer import BYTE, NORMAL, SPACE, UNKNOWN, USER_DEFINED, spell

MAX_ROWS = 20  # max rows of a table of pieces or copies
STYLE = """body{font:14px system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em;
color-scheme:light dark}table{border-collapse:collapse;margin:.5em 0 2em}
td,th{border-bottom:1px solid #8884;padding:.2em .8em;text-align:left;
white-space:pre-wrap;overflow-wrap:anywhere}td.n{text-align:right;font-variant-numeric:tabular-nums}
i{display:inline-block;height:.8em;background:#48a}"""
COPIES = "documents that occur more than once"


def visible(text):
    """Return a text as one line with visible white space: ␣, and escapes such as \\n."""
    text = text.replace(SPACE, " ").replace(" ", "␣")
    return re.sub(r"\s", lambda found: found[0].encode("unicode_escape").decode(), text)


def spelled(ids, pieces):
    """
    Return tokens as readable text, separated by |.

    A token that ends inside a character is joined with those that complete it, as ⟨text⟩. pieces:
    tokenizer.pieces().
    """
    found, waiting, text = [], [], ""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for i in ids:
        data, _, kind = pieces[i]
        waiting.append(visible(spell(pieces[i])))
        is_byte = kind == BYTE  # its data is <0x..>
        text += decoder.decode(bytes([int(data[3:5], 16)]) if is_byte else data)
        if decoder.getstate()[0]:  # bytes of an incomplete character
            continue
        joined = f"⟨{visible(text)}⟩"
        found.append(waiting[0] if len(waiting) == 1 else joined)
        waiting, text = [], ""
    return "|".join(found + waiting)


def with_markers(ids, pieces):
    """Return the text of tokens, with control tokens spelled out. pieces: tokenizer.pieces()."""
    data = b"".join(bytes([int(piece[3:5], 16)]) if kind == BYTE else piece
                    for piece, _, kind in (pieces[i] for i in ids))
    return data.decode(errors="replace").replace(SPACE, " ")


def documents(tokens, bos_id):
    """
    Return (starts, ends) of the documents as positions in `tokens`. An end is exclusive.

    A document starts at each BOS token; the first document starts at 0.
    """
    starts = np.flatnonzero(tokens == bos_id)
    if not len(starts) or starts[0]:
        starts = np.insert(starts, 0, 0)
    return starts, np.append(starts[1:], len(tokens))


def copies(tokens, starts, ends):
    """Return (count, start, end) of each repeated document; start and end are of its first copy."""
    counts, first = collections.Counter(), {}
    for a, b in zip(starts.tolist(), ends.tolist()):
        key = hash(tokens[a:b].tobytes())
        counts[key] += 1
        first.setdefault(key, (a, b))
    return [(n, *first[key]) for key, n in counts.most_common() if n > 1]


def survey(splits, tokenizer, meta, starts=None):
    """
    Return {title: rows} of tables whose first row names the columns. For `picture`, the dict also
    has "lengths", the tokens of each training document, and "counts", the uses of each piece in
    the training split.

    splits: {"train": tokens, "val": tokens}, all or a part of each; meta: the prepared folder's
    meta.json; starts: {split: positions where documents start}; None: at each BOS.
    """
    pieces, found, columns = tokenizer.pieces(), {}, {}
    kinds = np.array([kind for *_, kind in pieces])
    for split, tokens in splits.items():
        tokens = np.asarray(tokens)
        if starts:
            begins, ends = starts[split], np.append(starts[split][1:], len(tokens))
        else:
            begins, ends = documents(tokens, tokenizer.bos_id)
        counts, lengths = np.bincount(tokens, minlength=len(pieces)), ends - begins
        repeated = copies(tokens, begins, ends)
        fallback = f"{counts[kinds == BYTE].sum() / len(tokens):.2%}"
        if tokenizer.kind != "sentencepiece":  # a byte vocabulary consists of bytes only
            fallback = "every token is a byte" if tokenizer.kind == "byte" else "0.00%"
        columns[split] = {
            "tokens": f"{meta[f'{split}_tokens']:,}",
            "tokens read here": f"{len(tokens):,}",
            "documents": f"{meta[f'{split}_documents']:,}",
            "median tokens per document": f"{np.median(lengths):,.0f}",
            "longest document read, in tokens": f"{lengths.max():,}",
            "bytes per token": f"{meta[f'{split}_bytes'] / meta[f'{split}_tokens']:.2f}",
            "pieces that are used": f"{np.count_nonzero(counts):,} of {len(pieces):,}",
            "byte fallback": fallback,
            "unknown": f"{counts[kinds == UNKNOWN].sum() / len(tokens):.2%}",
            "documents that are copies": f"{sum(n - 1 for n, *_ in repeated) / len(begins):.2%}"}
        if split == "train":
            rows = [[n, b - a, tokenizer.decode(tokens[a:min(b, a + 40)].tolist())]
                    for n, a, b in repeated[:MAX_ROWS]]
            found = {"lengths": lengths, "counts": counts,
                     COPIES: [["times", "tokens", "beginning"], *rows]}
    summary = [[name, *(columns[split][name] for split in splits)] for name in columns["train"]]
    return {"summary": [["", *splits], *summary], **piece_tables(pieces, found["counts"]),
            "lengths of documents": bins(found["lengths"]), **found}


def piece_tables(pieces, counts):
    """Return {title: rows}: pieces by count, the most frequent and the longest used pieces."""
    total = max(1, counts.sum())

    def table_of(ids):
        rows = [[visible(spell(pieces[i])), int(counts[i]), f"{counts[i] / total:.2%}"]
                for i in ids]
        return [["piece", "times", "share"], *rows]

    use = [["times", "pieces"]]
    edges = [0, 1, 10, 100, 1000, 10_000, math.inf]
    for low, high in zip(edges, edges[1:]):
        name = f"{low:,} to {high - 1:,}"
        if high == math.inf:
            name = f"{low:,} or more"
        elif high == 1:
            name = "0"
        within = (counts >= low) & (counts < high)
        use.append([name, int(np.count_nonzero(within))])
    frequent = np.argsort(-counts, kind="stable")[:MAX_ROWS].tolist()
    length = {i: len(data.decode(errors="replace")) for i, (data, _, kind) in enumerate(pieces)
              if counts[i] and kind in (NORMAL, USER_DEFINED)}
    longest = sorted(length, key=lambda i: (-length[i], -counts[i]))[:MAX_ROWS]
    return {"use of the vocabulary": use, "most frequent pieces": table_of(frequent),
            "longest pieces": table_of(longest)}


def bins(lengths):
    """Return the rows of a histogram with the bins [2^n, 2^(n+1))."""
    power = np.log2(np.maximum(lengths, 1)).astype(int)
    return [["tokens", "documents"],
            *([f"{1 << n:,} to {(2 << n) - 1:,}", int((power == n).sum())]
              for n in range(power.min(), power.max() + 1))]


def table(rows):
    """Return the lines of a text table."""
    rows = [[f"{cell:,}" if isinstance(cell, int) else one_line(" ".join(str(cell).split()))
             for cell in row] for row in rows]
    widths = [max(map(width, column)) for column in zip(*rows)]
    return ["  " + "  ".join(map(pad, row, widths)).rstrip() for row in rows]


def tables(found):
    """Return the tables in the result of `survey` that have rows below their header."""
    return {title: rows for title, rows in found.items()
            if isinstance(rows, list) and len(rows) > 1}


def page(name, found):
    """Return the tables as a self-contained HTML page. Bars show the numbers in column 2."""
    title = html.escape(name)
    parts = [f'<!doctype html><meta charset="utf-8"><title>{title}</title>'
             f"<style>{STYLE}</style><h1>{title}</h1>"]
    for name, (head, *rows) in tables(found).items():
        names = "".join(f"<th>{html.escape(str(column))}</th>" for column in head)
        parts.append(f"<h2>{html.escape(name)}</h2><table><tr>{names}</tr>")
        largest = max((row[1] for row in rows if isinstance(row[1], int)), default=0)
        for row in rows:
            cells = [f'<td class="n">{cell:,}</td>' if isinstance(cell, int)
                     else f"<td>{html.escape(str(cell))}</td>" for cell in row]
            if largest and isinstance(row[1], int):
                bar = 12 * row[1] / largest
                cells.append(f'<td><i style="width:{bar:.2f}em"></i></td>')
            parts.append(f"<tr>{''.join(cells)}</tr>")
        parts.append("</table>")
    return "\n".join(parts) + "\n"


def picture(name, found, path):
    """Draw a PNG: lengths of documents, and frequency of pieces by rank (needs matplotlib)."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    lengths, counts = found["lengths"], np.sort(found["counts"])[::-1]
    edges = np.geomspace(max(1, lengths.min()), lengths.max() + 1, 40)
    left.hist(lengths, bins=edges if len(lengths) > 1 else 1)
    left.set(xscale="log", xlabel="tokens of a document", ylabel="documents")
    right.loglog(np.arange(1, np.count_nonzero(counts) + 1), counts[counts > 0])
    right.set(xlabel="rank of a piece", ylabel="times")
    figure.suptitle(name.replace("$", r"\$"))
    figure.savefig(path, dpi=120)
    plt.close(figure)
