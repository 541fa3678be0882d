"""
Draw curves of runs side by side: as SVG, or as a picture or PDF with matplotlib. Draw a confusion
matrix as SVG.

A curve is (x, y), or (x, mean, min, max) for a group of runs: arrays of the same length.
"""
import html
import math
import warnings
from typing import NamedTuple

import numpy as np

from engine.streams import one_line, width as columns

# Distinguishable for color-blind readers: https://jfly.uni-koeln.de/color/
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("", "7 3", "2 2")  # in SVG, and LINES in matplotlib: 7 colors * 3 = 21 styles
LINES = ("-", "--", ":")
WIDTH, HEIGHT, TOP, LEFTS = 400, 300, 44, (76, 540)  # layout of the two charts, in pixels
MAX_LEGEND = 100  # characters of a name in the legend
# Fonts for names that are not in Latin script, if the machine has them.
FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Micro Hei",
         "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans GB", "Arial Unicode MS")


class Curve(NamedTuple):
    """
    An entry of the legend, drawn once for each x axis. main: curves drawn at full opacity; pale:
    curves drawn faintly beside them, or [].
    """
    name: str
    main: list
    pale: list


class Figure(NamedTuple):
    """
    Charts of the same curves over several x axes. y_label: what the values are; note: below the
    legend; is_log: whether the y axis is logarithmic; x_labels: one for each chart.
    """
    title: str
    y_label: str
    note: str
    is_log: bool
    x_labels: tuple
    curves: list


def limits(figure):
    """Return (low, high) of the y axis. Raises ValueError if there is nothing to draw."""
    parts = [np.zeros(0)]
    for curve in figure.curves:
        for _, *ys in (*curve.main, *curve.pale):
            parts += ys
    values = np.concatenate(parts)
    values = values[values > 0] if figure.is_log else values
    if not len(values):
        raise ValueError("there are no values to draw")
    low, high = float(values.min()), float(values.max())
    if figure.is_log:
        return 0.97 * low, 1.03 * high
    margin = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
    return low - margin, high + margin


def style(number):
    """Return (color, index of the dashes) of a curve: distinct for 21 curves."""
    return COLORS[number % len(COLORS)], number // len(COLORS) % len(DASHES)


def ticks(low, high):
    """Return about five round numbers from low to high."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(k for k in (1, 2, 5, 10) if (high - low) / (k * step) <= 6)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low, high):
    """Return round numbers from low to high for a logarithmic axis."""
    powers, found = range(math.floor(math.log10(low)), math.ceil(math.log10(high))), []
    for digits in ((1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)):
        candidates = [n * 10.0 ** k for k in powers for n in digits]
        found = [y for y in candidates if low <= y <= high]
        if len(found) >= 4:
            break
    return found


def thin(x, y, buckets=300):
    """
    Return fewer points of a long line: the min and the max of each bucket of neighbors, and the
    line's first and last point.
    """
    if len(y) <= 2 * buckets:
        return x, y
    size = math.ceil(len(y) / buckets)
    padding = np.repeat(y[-1], -len(y) % size)  # fills the last bucket
    whole = np.append(y, padding).reshape(-1, size)  # (buckets, size)
    first = np.arange(len(whole)) * size  # index of each bucket's first point
    keep = np.concatenate((first + whole.argmin(1), first + whole.argmax(1), [0, len(y) - 1]))
    keep = np.unique(np.minimum(keep, len(y) - 1))
    return x[keep], y[keep]


def band(lines, points=200):
    """
    Return (x, mean, min, max) of several lines [(x, y)]: four arrays. x covers only the range that
    all lines share, since the mean would jump where one of them begins or ends. To keep this range
    long, lines that end before half of the longest are left out. x are the lines' own points, or
    `points` evenly spaced ones if those are more.
    """
    lines = [line for line in lines if len(line[0])]
    end = max((x[-1] for x, _ in lines), default=0)
    lines = [(x, y) for x, y in lines if x[-1] >= end / 2]
    low, high = max((x[0] for x, _ in lines), default=0), min((x[-1] for x, _ in lines), default=-1)
    x = np.unique(np.concatenate([x for x, _ in lines] or [np.zeros(0)]))
    x = x[(low <= x) & (x <= high)]
    if len(x) > points:
        x = np.linspace(low, high, points)
    ys = np.array([np.interp(x, *line) for line in lines] or [x])
    return x, ys.mean(0), ys.min(0), ys.max(0)


# ---- SVG -----------------------------------------------------------------------------------------

def panel(figure, index, low, high):
    """
    Return one of the charts as SVG, WIDTH x HEIGHT pixels, with its left edge at LEFTS[index]. A
    main curve has a band, or dots if it shows a single run.
    """
    left, right = LEFTS[index], 0.0
    for curve in figure.curves:
        for line in (*curve.main[index:index + 1], *curve.pale[index:index + 1]):
            right = max(right, line[0].max(initial=0))
    right = right or 1

    def pixel_x(x):
        return f"{left + WIDTH * x / right:.1f}"

    def pixel_y(y, shift=0):
        y = min(max(y, low), high)
        share = (high - y) / (high - low)
        if figure.is_log:
            share = math.log(high / y) / math.log(high / low)
        return f"{TOP + HEIGHT * share + shift:.1f}"

    def points(x, y):
        return " ".join(f"{pixel_x(a)},{pixel_y(b)}" for a, b in zip(x, y))

    parts = []
    for x in ticks(0, right):
        parts.append(f'<path d="M{pixel_x(x)} {TOP}v{HEIGHT}" stroke="#e5e5e5"/>'
                     f'<text x="{pixel_x(x)}" y="{TOP + HEIGHT + 17}" text-anchor="middle">{x:g}'
                     '</text>')
    for y in log_ticks(low, high) if figure.is_log else ticks(low, high):
        parts.append(f'<path d="M{left} {pixel_y(y)}h{WIDTH}" stroke="#e5e5e5"/>'
                     f'<text x="{left - 6}" y="{pixel_y(y, 4)}" text-anchor="end">{y:g}</text>')
    parts.append(f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" '
                 'stroke="#666"/>')
    parts.append(f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 37}" text-anchor="middle">'
                 f'{html.escape(figure.x_labels[index])}</text>')
    for n, curve in enumerate(figure.curves):
        color, dash = style(n)
        dashes = f' stroke-dasharray="{DASHES[dash]}"' if dash else ""
        for lines, weight in ((curve.pale, 'opacity="0.4"'), (curve.main, 'stroke-width="1.8"')):
            for x, y, *edges in lines[index:index + 1]:
                is_main = lines is curve.main
                if edges and is_main:
                    around = points(np.append(x, x[::-1]), np.append(edges[0], edges[1][::-1]))
                    parts.append(f'<polygon points="{around}" fill="{color}" opacity="0.15"/>')
                parts.append(f'<polyline points="{points(x, y)}" fill="none" stroke="{color}" '
                             f'{weight}{dashes}/>')
                if is_main and not edges:
                    parts += [f'<circle cx="{pixel_x(a)}" cy="{pixel_y(b)}" r="2.5" '
                              f'fill="{color}"/>' for a, b in zip(x, y)]
    return "".join(parts)


def svg(figure):
    """Return a Figure of two charts as SVG. Raises ValueError if there is nothing to draw."""
    low, high = limits(figure)
    width, legend = LEFTS[1] + WIDTH + 30, TOP + HEIGHT + 62
    height = legend + 18 * (len(figure.curves) + bool(figure.note))
    middle = TOP + HEIGHT / 2
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
             f'width="{width}" font-size="12" font-family="sans-serif">'
             '<rect width="100%" height="100%" fill="white"/>'
             f'<text x="{width / 2}" y="24" font-size="15" text-anchor="middle">'
             f'{html.escape(figure.title)}</text>'
             f'<text x="20" y="{middle}" text-anchor="middle" transform="rotate(-90 20 {middle})">'
             f'{html.escape(figure.y_label)}</text>']
    parts += [panel(figure, index, low, high) for index in range(len(figure.x_labels))]
    for n, curve in enumerate(figure.curves):
        (color, dash), y = style(n), legend + 18 * n
        dashes = f' stroke-dasharray="{DASHES[dash]}"' if dash else ""
        parts.append(f'<path d="M{LEFTS[0]} {y - 4}h28" stroke="{color}" stroke-width="2"{dashes}/>'
                     f'<text x="{LEFTS[0] + 36}" y="{y}">{html.escape(curve.name)}</text>')
    if figure.note:
        parts.append(f'<text x="{LEFTS[0]}" y="{height - 14}" fill="#555">'
                     f'{html.escape(figure.note)}</text>')
    return "".join(parts) + "</svg>\n"


HEAT_MAP = "<!-- llamac: heat map -->\n"  # first line of each heat map


def heat_map(counts, names, x_label, y_label):
    """
    Return a square matrix of counts as SVG, with the names of its rows and columns. The opacity of
    a cell is its share of its row; cells are blue on the diagonal and red elsewhere.
    """
    cell = min(40, max(8, 800 // len(names)))  # pixels
    shown = [f"{name[:23]}…" if len(name) > 24 else name for name in map(one_line, names)]
    left = 50 + max(map(columns, shown)) * 7
    size, top = cell * len(names), 40 + max(map(columns, shown)) * 7
    middle = top + size / 2
    parts = [HEAT_MAP + f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + size + 30} '
             f'{top + size + 20}" width="{left + size + 30}" font-size="{min(12, cell)}" '
             'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
             f'<text x="{left + size / 2}" y="20" text-anchor="middle">{html.escape(x_label)}'
             f'</text><text x="20" y="{middle}" text-anchor="middle" '
             f'transform="rotate(-90 20 {middle})">{html.escape(y_label)}</text>']
    for n, name in enumerate(map(html.escape, shown)):
        x, y = left + cell * (n + 0.5), top + cell * (n + 0.5) + 4
        parts.append(f'<text x="{left - 8}" y="{y}" text-anchor="end">{name}</text>'
                     f'<text transform="translate({x + 4} {top - 8}) rotate(-90)">{name}</text>')
    for i, row in enumerate(counts):
        for j, count in enumerate(row):
            share = count / max(1, sum(row))
            color, x, y = COLORS[i != j], left + cell * j, top + cell * i
            what = f"{y_label} {one_line(names[i])}, {x_label} {one_line(names[j])}: {count}"
            parts.append(f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" fill="{color}" '
                         f'fill-opacity="{share:.3f}" stroke="#ddd">'
                         f'<title>{html.escape(what)}</title></rect>')
            if count and cell >= 24:
                parts.append(f'<text x="{x + cell / 2}" y="{y + cell / 2 + 4}" '
                             f'text-anchor="middle" fill="{"white" if share > 0.6 else "black"}">'
                             f'{count}</text>')
    return "".join(parts) + "</svg>\n"


# ---- matplotlib ----------------------------------------------------------------------------------

def save_picture(figure, path):
    """
    Write a Figure as .png or .pdf. Return whether the machine has fonts for all its characters.
    Raises ImportError without matplotlib, OSError, and ValueError if there is nothing to draw.
    """
    import matplotlib
    from matplotlib import font_manager
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas
    low, high = limits(figure)
    installed = {font.name for font in font_manager.fontManager.ttflist}
    fonts = [name for name in FONTS if name in installed]
    rows = math.ceil(len(figure.curves) / 2)
    # fonttype 42 keeps text in a PDF as text, which publishers require.
    with (matplotlib.rc_context({"font.family": fonts, "pdf.fonttype": 42}),
          warnings.catch_warnings(record=True) as caught):
        warnings.simplefilter("always")
        canvas = Canvas(figsize=(9.6, 3.8 + 0.22 * rows), layout="constrained")
        FigureCanvasAgg(canvas)
        charts = canvas.subplots(1, len(figure.x_labels), sharey=True)
        for index, axes in enumerate(charts):
            draw_chart(axes, figure, index)
            axes.set(xlabel=figure.x_labels[index], ylim=(low, high))
            if figure.is_log:
                axes.set_yscale("log")
                at = log_ticks(low, high)
                axes.set_yticks(at, [f"{y:g}" for y in at])
                axes.set_yticks([], minor=True)
        charts[0].set_ylabel(plain(figure.y_label))
        canvas.suptitle(plain(figure.title))
        canvas.legend(*charts[0].get_legend_handles_labels(), loc="outside lower center", ncols=2,
                      fontsize=9, frameon=False, title=plain(figure.note) or None)
        canvas.savefig(path, dpi=200)
    return not any("missing from font" in str(warning.message) for warning in caught)


def draw_chart(axes, figure, index):
    """Draw one chart of a Figure on matplotlib's axes."""
    for n, curve in enumerate(figure.curves):
        color, dash = style(n)
        for x, y, *edges in curve.pale[index:index + 1]:
            axes.plot(x, y, LINES[dash], color=color, alpha=0.35, lw=1)
        for x, y, *edges in curve.main[index:index + 1]:
            if edges:
                axes.fill_between(x, *edges, color=color, alpha=0.15, lw=0)
            axes.plot(x, y, LINES[dash], color=color, lw=1.6, marker="" if edges else ".",
                      label=plain(curve.name))
    axes.set_xlim(left=0)
    axes.grid(color="#e5e5e5")
    axes.set_axisbelow(True)


def plain(text):
    """Escape each $ in a text, so that matplotlib does not parse it as a formula."""
    return text.replace("$", r"\$")
