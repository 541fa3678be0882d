// Curves: read from the server, kept up to date, drawn by Bokeh where it is installed, else as plain lines.
import { ask, keep, number, say } from "./app.js"
import { h } from "./dom.js"
import { t } from "./words.js"

const library = window.Bokeh  // index.html loads it first; without the package it is empty
library?.set_log_level("error")
export const axes = { tokens: "Tokens", iter: "Steps", seconds: "Seconds" }
const floats = text => new Float32Array(Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer)

/** The points of a metric by run, read once and then on from live events. */
export class Curves {
  constructor(metric, axis, run) { Object.assign(this, { metric, axis, run, lines: new Map(), asked: 0, range: {} }) }

  async load(range = this.range) {
    const asked = ++this.asked, query = { metric: this.metric, x: this.axis, run: this.run || "", ...range }
    const found = await ask("api/curves", query), xs = floats(found.x), ys = floats(found.y)
    if (asked !== this.asked) return
    this.range = range
    this.lines.clear()
    let at = 0
    for (const [name, points, rows] of found.runs) {
      this.lines.set(name, { x: [...xs.subarray(at, at + points)], y: [...ys.subarray(at, at + points)], rows })
      at += points
    }
  }

  /** Whether a live event brought points; "again": all are to be read again. */
  take({ run, from, rows, again }) {
    if (!run || this.run && run.name !== this.run) return false
    const line = this.lines.get(run.name)
    if (again || !line || from > line.rows) return again || line || rows[this.metric] ? "again" : false
    const ys = rows[this.metric] || []
    ys.forEach((y, i) => {
      const x = rows[this.axis]?.[i]
      if (from + i >= line.rows && typeof y === "number" && typeof x === "number") {
        line.x.push(x)
        line.y.push(y)
      }
    })
    line.rows = run.rows
    return ys.length > 0
  }
}

/** Exponential moving average, corrected at its beginning; share: of the past. */
export function smooth(ys, share) {
  let sum = 0, weight = 0
  return share ? ys.map(y => {
    sum = share * sum + (1 - share) * y
    weight = share * weight + 1 - share
    return sum / weight
  }) : ys
}

const all = new Set()  // charts, whose range of x is one
let resetting = false

function whole() {
  resetting = true
  for (const chart of all) chart.reset()
  setTimeout(() => { resetting = false }, 100)
}

const make = (name, attributes = {}) => new (library.Models.get(name))(attributes)
const fields = names => Object.fromEntries(Object.entries(names).map(([name, field]) => [name, { field }]))

/** A chart in a card. Lines are [{name, color, x, y, width, alpha}], bands [{color, x, low, high}]. */
export class Chart {
  constructor(title, { csv, remove, axis }) {
    Object.assign(this, { title, axis, place: h("div", { class: "chart", role: "img", "aria-label": title }) })
    const button = (text, onclick, name) => h("button", { class: "plain", onclick, "aria-label": name }, text)
    this.element = h("section", { class: "card" }, h("div", { class: "row" }, h("h2", { class: "grow" }, title),
      button("PNG", () => this.png()), h("a", { href: csv, download: "curves.csv" }, "CSV"), button(t("Whole"), whole),
      button("×", remove, `${t("Remove")} ${title}`)), this.place)
    all.add(this)
  }

  end() {
    all.delete(this)
    this.clear()
  }

  clear() {
    this.manager?.clear?.()
    if (this.plot) library.documents.splice(library.documents.indexOf(this.plot.document), 1)
    this.place.replaceChildren()
    this.plot = null
  }

  async draw(lines, bands, { logx, logy }) {
    if (!library) return this.plain(lines, logx ? Math.log10 : Number, logy ? Math.log10 : Number)
    const of = (found, name, usual) => found.map(part => part[name] ?? usual)
    const round = (x, y) => [...x, ...y.toReversed()]
    const copies = name => lines.map(line => [...line[name]])  // Bokeh takes an array that has only grown for the same one
    const curves = { xs: copies("x"), ys: copies("y"), color: of(lines, "color"), name: of(lines, "name"),
      alpha: of(lines, "alpha", 1), width: of(lines, "width", 1.6) }
    const areas = { xs: bands.map(b => round(b.x, b.x)), ys: bands.map(b => round(b.high, b.low)),
      color: of(bands, "color") }
    if (this.plot && this.scales === `${logx} ${logy}`) {
      this.curves.data = curves
      this.areas.data = areas
    } else if (!this.busy) {
      this.busy = true
      try { await this.begin(curves, areas, logx, logy) } finally { this.busy = false }
    }
  }

  async begin(curves, areas, logx, logy) {
    this.clear()
    this.curves = make("ColumnDataSource", { data: curves })
    this.areas = make("ColumnDataSource", { data: areas })
    const lines = make("GlyphRenderer", { data_source: this.curves, glyph: make("MultiLine",
      fields({ xs: "xs", ys: "ys", line_color: "color", line_alpha: "alpha", line_width: "width" })) })
    const bands = make("GlyphRenderer", { data_source: this.areas, glyph: make("Patches",
      { ...fields({ xs: "xs", ys: "ys", fill_color: "color" }), fill_alpha: 0.18, line_color: null }) })
    const plot = this.frame(logx, logy)
    plot.add_renderers(bands)
    plot.add_renderers(lines)
    const zoom = make("BoxZoomTool", { dimensions: "width" })
    const tooltips = [["", "@name"], [t(axes[this.axis]), "$data_x{0[.]00a}"], ["", "$data_y{0.0000}"]]
    plot.toolbar.tools = [zoom, make("HoverTool", { renderers: [lines], line_policy: "nearest", tooltips })]
    plot.toolbar.active_drag = zoom
    const page = new (library.require("document").Document)()
    page.add_root(plot)
    this.manager = await library.embed.add_document_standalone(page, this.place, [this.place])
    Object.assign(this, { plot, scales: `${logx} ${logy}` })
    plot.on_event("rangesupdate", () => this.zoom({ start: plot.x_range.start, end: plot.x_range.end }))
  }

  /** Bokeh's plot with its axes and grids, in the page's colours. */
  frame(logx, logy) {
    const style = getComputedStyle(document.documentElement), color = name => style.getPropertyValue(name).trim()
    const plot = make("Plot", { x_range: make("DataRange1d", { range_padding: 0.01 }), y_range: make("DataRange1d"),
      x_scale: make(logx ? "LogScale" : "LinearScale"), y_scale: make(logy ? "LogScale" : "LinearScale"),
      sizing_mode: "stretch_both", toolbar_location: null, background_fill_color: color("--card"),
      border_fill_color: color("--card"), outline_line_color: null, min_border: 4 })
    const axis = (side, log, attributes) => {
      const axis = make(log ? "LogAxis" : "LinearAxis", { axis_label_text_color: color("--soft"),
        major_label_text_color: color("--soft"), axis_line_color: color("--line"), major_tick_line_color: color("--line"),
        minor_tick_line_color: null, axis_label_text_font_style: "normal", ...attributes })
      plot.add_layout(axis, side)
      plot.add_layout(make("Grid", { axis, dimension: side === "below" ? 0 : 1, grid_line_color: color("--grid") }))
    }
    const short = logx ? {} : { formatter: make("NumeralTickFormatter", { format: "0[.]0a" }) }
    axis("below", logx, { axis_label: t(axes[this.axis]), ...short })
    axis("left", logy, { formatter: make("BasicTickFormatter", { use_scientific: false, precision: "auto" }) })
    return plot
  }

  get view() { return this.manager && [...this.manager.roots ?? this.manager][0] }

  /** All charts show the range that was drawn with the mouse in one, and read it again in full. */
  zoom({ start, end }) {
    if (resetting) return
    this.plot.y_range.have_updated_interactively = false  // it fits what is shown
    for (const other of all) {
      if (!other.plot || other.axis !== this.axis) continue
      if (other !== this) {
        other.plot.x_range.have_updated_interactively = true
        other.plot.x_range.setv({ start, end })
      }
      other.onzoom?.({ from: start, to: end })
    }
  }

  reset() {
    this.view?.reset?.()
    this.onzoom?.({})
  }

  png() { this.view?.export("png").canvas.toBlob(blob => keep(blob, `${this.title.replaceAll("/", "-")}.png`)) }

  /** Without Bokeh: lines and the ends of the axes. */
  plain(lines, fx, fy) {
    const points = lines.map(l => l.x.map((x, i) => [fx(x), fy(l.y[i]), x, l.y[i]]).filter(p => isFinite(p[0] + p[1])))
    const flat = points.flat(), none = [0, 0, 0, 0]
    const end = (i, sign) => flat.reduce((a, p) => sign * p[i] > sign * a[i] ? p : a, flat[0] ?? none)
    const [left, right, low, high] = [end(0, -1), end(0, 1), end(1, -1), end(1, 1)]
    const across = x => 50 + 540 * (x - left[0]) / (right[0] - left[0] || 1)
    const down = y => 10 + 260 * (high[1] - y) / (high[1] - low[1] || 1)
    const labels = [[2, 18, high[3]], [2, 268, low[3]], [50, 290, left[2]], [540, 290, right[2]]]
    this.place.replaceChildren(h("svg", { viewBox: "0 0 600 300", preserveAspectRatio: "none" },
      points.map((line, n) => h("polyline", { fill: "none", stroke: lines[n].color, "stroke-opacity": lines[n].alpha ?? 1,
        points: line.map(([x, y]) => `${across(x).toFixed(1)},${down(y).toFixed(1)}`).join(" ") })),
      labels.map(([x, y, value]) => h("text", { x, y }, number(value)))))
    say(t("Plain lines; for charts with zoom: pip install bokeh"))
  }
}
