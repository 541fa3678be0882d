"""What a prepared text looks like: lengths of documents, use of the vocabulary, copies; as tables, a picture, a page."""
import codecs
import collections
import html
import math

import numpy as np

from engine.streams import one_line
from tokenizer import BYTE, NORMAL, SPACE, UNKNOWN, USER_DEFINED, spell

ROWS = 20  # of a table of pieces
STYLE = """body{font:14px system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em;color-scheme:light dark}
table{border-collapse:collapse;margin:.5em 0 2em}td,th{border-bottom:1px solid #8884;padding:.2em .8em;text-align:left;
white-space:pre-wrap;overflow-wrap:anywhere}td.n{text-align:right;font-variant-numeric:tabular-nums}
i{display:inline-block;height:.8em;background:#48a}"""


def spelled(ids, pieces):
    """
    Tokens as one reads them, |between|. Tokens that end in the midst of a character stand together with those that complete it,
    in ⟨⟩.
    """
    found, waiting, text, characters = [], [], "", codecs.getincrementaldecoder("utf-8")("replace")
    for i in ids:
        waiting.append(i)
        text += characters.decode(piece_bytes(pieces[i]))
        if characters.getstate()[0]:
            continue
        found.append(spell(pieces[i], "␣") if len(waiting) == 1 else f"⟨{text.replace(SPACE, ' ').replace(' ', '␣')}⟩")
        waiting, text = [], ""
    return "|".join([*found, *(spell(pieces[i], "␣") for i in waiting)])


def piece_bytes(piece):
    """What a piece adds to the bytes of a text, spaces as U+2581."""
    data, _, kind = piece
    return bytes([int(data[3:5], 16)]) if kind == BYTE else data


def documents(tokens, bos_id):
    """[first, end) of each document: two arrays."""
    starts = np.flatnonzero(tokens == bos_id)
    starts = starts if len(starts) and not starts[0] else np.insert(starts, 0, 0)
    return starts, np.append(starts[1:], len(tokens))


def copies(tokens, starts, ends):
    """{the bytes' hash: [how often, one of its documents]} of documents that come more than once."""
    seen = collections.Counter()
    first = {}
    for a, b in zip(starts.tolist(), ends.tolist()):
        key = hash(tokens[a:b].tobytes())
        seen[key] += 1
        first.setdefault(key, (a, b))
    return {key: (count, first[key]) for key, count in seen.items() if count > 1}


def survey(splits, tokenizer, meta):
    """
    Of {"train", "val"} -> tokens, all of a split or a part: {table: rows}, the first row of each its columns, and under
    "lengths" and "counts" what a picture needs: tokens of each document of train, and how often each piece comes in it.
    """
    pieces, summary, found, more = tokenizer.pieces(), [["", *splits]], {}, "documents that come more than once"
    fallback = tokenizer.kind == "sentencepiece"  # in a byte vocabulary bytes are all there is
    columns = {}
    for split, tokens in splits.items():
        tokens = np.asarray(tokens)
        starts, ends = documents(tokens, tokenizer.bos_id)
        counts, lengths = np.bincount(tokens, minlength=len(pieces)), ends - starts
        kinds = np.array([kind for *_, kind in pieces])
        twice = copies(tokens, starts, ends)
        columns[split] = {
            "tokens": f"{meta[f'{split}_tokens']:,}", "of which were read here": f"{len(tokens):,}",
            "documents": f"{meta[f'{split}_documents']:,}",
            "tokens of a document: half have fewer than": f"{np.median(lengths):,.0f}",
            "... the longest read": f"{lengths.max():,}",
            "bytes a token": f"{meta[f'{split}_bytes'] / meta[f'{split}_tokens']:.2f}",
            "pieces that are used": f"{np.count_nonzero(counts):,} of {len(pieces):,}",
            "byte fallback": f"{counts[kinds == BYTE].sum() / len(tokens):.2%}" if fallback else "every token is a byte"
                             if tokenizer.kind == "byte" else "0.00%",
            "unknown": f"{counts[kinds == UNKNOWN].sum() / len(tokens):.2%}",
            "documents that are copies": f"{sum(n - 1 for n, _ in twice.values()) / len(starts):.2%}"}
        if split == "train":
            found = {"lengths": lengths, "counts": counts, more: [["times", "tokens", "beginning"]] + [
                [n, b - a, tokenizer.decode(tokens[a:min(b, a + 40)].tolist())]
                for n, (a, b) in sorted(twice.values(), key=lambda both: -both[0])[:ROWS]]}
    summary += [[name, *(columns[split][name] for split in splits)] for name in columns["train"]]
    return {"summary": summary} | piece_tables(pieces, found["counts"]) | {"lengths of documents": bins(found["lengths"])} | found


def piece_tables(pieces, counts):
    """{table: rows}: how many pieces come how often; the most frequent; the longest that are used."""
    total = max(1, counts.sum())

    def row(i):
        return [spell(pieces[i], "␣"), int(counts[i]), f"{counts[i] / total:.2%}"]

    edges = [0, 1, 10, 100, 1000, 10_000, math.inf]
    use = [[f"{a:,}" if b <= a + 1 else f"{a:,} or more" if b == math.inf else f"{a:,} to {b - 1:,}",
            int(np.count_nonzero((counts >= a) & (counts < b)))] for a, b in zip(edges, edges[1:])]
    frequent = np.argsort(-counts, kind="stable")[:ROWS].tolist()
    length = {i: len(data.decode(errors="replace")) for i, (data, _, kind) in enumerate(pieces)
              if counts[i] and kind in (NORMAL, USER_DEFINED)}
    longest = sorted(length, key=lambda i: (-length[i], -counts[i]))[:ROWS]
    return {"use of the vocabulary": [["times", "pieces"], *use],
            "most frequent pieces": [["piece", "times", "share"], *map(row, frequent)],
            "longest pieces": [["piece", "times", "share"], *map(row, longest)]}


def bins(lengths):
    """Rows of a histogram whose bins double."""
    power = np.log2(np.maximum(lengths, 1)).astype(int)
    rows = [[f"{1 << n:,} to {(2 << n) - 1:,}", int((power == n).sum())] for n in range(power.min(), power.max() + 1)]
    return [["tokens", "documents"], *rows]


def table(rows):
    """Lines of text, in columns."""
    rows = [[f"{cell:,}" if isinstance(cell, int) else one_line(" ".join(str(cell).split())) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def tables(found):
    return {name: rows for name, rows in found.items() if isinstance(rows, list) and len(rows) > 1}


def page(name, found):
    """A page of HTML that needs no other file: the tables, with bars beside the numbers of the last column."""
    parts = [f'<!doctype html><meta charset="utf-8"><title>{html.escape(name)}</title><style>{STYLE}</style>'
             f"<h1>{html.escape(name)}</h1>"]
    for title, (head, *rows) in tables(found).items():
        most = max((row[1] for row in rows if isinstance(row[1], int)), default=0)
        parts.append(f"<h2>{html.escape(title)}</h2><table><tr>{''.join(f'<th>{html.escape(str(c))}</th>' for c in head)}</tr>")
        for row in rows:
            cells = "".join(f'<td class="n">{cell:,}</td>' if isinstance(cell, int) else f"<td>{html.escape(str(cell))}</td>"
                            for cell in row)
            bar = f'<td><i style="width:{12 * row[1] / most:.2f}em"></i></td>' if most and isinstance(row[1], int) else ""
            parts.append(f"<tr>{cells}{bar}</tr>")
        parts.append("</table>")
    return "\n".join(parts) + "\n"


def picture(name, found, path):
    """A PNG: how long documents are, and how often pieces come by their rank (needs matplotlib)."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    lengths, counts = found["lengths"], np.sort(found["counts"])[::-1]
    left.hist(lengths, bins=np.geomspace(max(1, lengths.min()), lengths.max() + 1, 40) if len(lengths) > 1 else 1)
    left.set(xscale="log", xlabel="tokens of a document", ylabel="documents")
    right.loglog(np.arange(1, np.count_nonzero(counts) + 1), counts[counts > 0])
    right.set(xlabel="rank of a piece", ylabel="times")
    figure.suptitle(name.replace("$", r"\$"))
    figure.savefig(path, dpi=120)
    plt.close(figure)
