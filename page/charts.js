// Curves: read from the server, kept up to date, drawn by Bokeh where it is installed, else as plain lines.
import { h, t, ask, number, say, throttle } from "./app.js"

const library = window.Bokeh  // index.html loads it first; without the package it is empty
library?.set_log_level("error")
function floats(text) {
  const packed = atob(text), bytes = new Uint8Array(packed.length)
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i)
  return new Float32Array(bytes.buffer)
}
export const axes = { tokens: "Tokens", iter: "Steps", seconds: "Seconds" }

/** The points of a metric by run, read once and then on from live events. */
export class Curves {
  constructor(metric, axis, run) { Object.assign(this, { metric, axis, run, lines: new Map(), asked: 0 }) }

  async load(range) {
    const asked = ++this.asked, query = { metric: this.metric, x: this.axis, run: this.run || "", ...range }
    const found = await ask(`api/curves?${new URLSearchParams(query)}`), xs = floats(found.x), ys = floats(found.y)
    if (asked !== this.asked) return
    this.lines.clear()
    let at = 0
    for (const [name, points, rows, version] of found.runs) {
      this.lines.set(name, { x: [...xs.subarray(at, at + points)], y: [...ys.subarray(at, at + points)], rows, version })
      at += points
    }
  }

  /** Whether a live event brought points. */
  take({ run, from, rows, again }) {
    if (!run || this.run && run.name !== this.run) return false
    if (again || !this.lines.has(run.name)) return again || rows[this.metric] ? "again" : false
    const line = this.lines.get(run.name), ys = rows[this.metric] || []
    ys.forEach((y, i) => {
      const x = rows[this.axis]?.[i]
      if (from + i >= line.rows && typeof y === "number" && typeof x === "number") { line.x.push(x); line.y.push(y) }
    })
    line.rows = run.rows
    return ys.length > 0
  }
}

/** Exponential moving average, corrected at its beginning; share: of the past. */
export function smooth(ys, share) {
  let sum = 0, weight = 0
  return ys.map(y => { sum = share * sum + (1 - share) * y; weight = share * weight + 1 - share; return sum / weight })
}

function at(x, y, where) {  // the line's value there, NaN outside of it
  let low = 0, high = x.length - 1
  if (where < x[0] || where > x[high]) return NaN
  while (high - low > 1) { const middle = low + high >> 1; x[middle] <= where ? low = middle : high = middle }
  return x[high] === x[low] ? y[low] : y[low] + (y[high] - y[low]) * (where - x[low]) / (x[high] - x[low])
}

/** Of lines that form a group: their mean, least and greatest along x, where all are that came halfway. */
export function band(all, points = 200) {
  const end = Math.max(...all.map(l => l.x.at(-1))), lines = all.filter(l => l.x.at(-1) >= end / 2)
  const low = Math.max(...lines.map(l => l.x[0])), high = Math.min(...lines.map(l => l.x.at(-1))), found = { x: [], y: [], low: [], high: [] }
  for (let i = 0; i <= points; i++) {
    const x = low + (high - low) * i / points, ys = lines.map(l => at(l.x, l.y, x)).filter(y => !isNaN(y))
    if (ys.length < lines.length) continue
    found.x.push(x); found.y.push(ys.reduce((a, b) => a + b) / ys.length); found.low.push(Math.min(...ys)); found.high.push(Math.max(...ys))
  }
  return found
}

const zoomed = new Set()  // charts whose range of x is one
let resetting = false

function whole() {
  resetting = true
  for (const chart of zoomed) chart.reset()
  setTimeout(() => { resetting = false }, 100)
}

/** A chart in a card. draw(lines, {logx, logy}): lines [{name, color, x, y, width, alpha}], bands [{color, x, low, high}]. */
export class Chart {
  constructor(title, { csv, remove, axis } = {}) {
    this.place = h("div", { class: "chart", role: "img", "aria-label": title })
    this.element = h("section", { class: "card" }, h("div", { class: "row" }, h("h2", { class: "grow" }, title),
      h("button", { class: "plain", onclick: () => this.png(title) }, "PNG"), csv && h("a", { href: csv, download: "curves.csv" }, "CSV"),
      h("button", { class: "plain", onclick: whole }, t("Whole")),
      remove && h("button", { class: "plain", onclick: remove, "aria-label": `${t("Remove")} ${title}` }, "×")), this.place)
    this.axis = axis
    zoomed.add(this)
  }

  end() { zoomed.delete(this); this.clear() }
  clear() { this.manager?.clear?.(); this.place.replaceChildren(); this.plot = null }

  async draw(lines, bands, { logx, logy }) {
    const key = `${logx}${logy}${document.documentElement.lang}`
    this.lines = lines
    if (!library) return this.svg(lines, logx, logy)
    const lines_ = { xs: lines.map(l => l.x), ys: lines.map(l => l.y), color: lines.map(l => l.color), name: lines.map(l => l.name),
      alpha: lines.map(l => l.alpha ?? 1), width: lines.map(l => l.width ?? 1.6) }
    const bands_ = { xs: bands.map(b => [...b.x, ...b.x.toReversed()]), ys: bands.map(b => [...b.high, ...b.low.toReversed()]), color: bands.map(b => b.color) }
    if (this.plot && this.key === key) { this.source.data = lines_; this.areas.data = bands_; return }
    if (this.busy) return
    this.busy = true
    try { await this.make(lines_, bands_, logx, logy, key) } finally { this.busy = false }
  }

  async make(lines, bands, logx, logy, key) {
    this.clear()
    const style = getComputedStyle(document.documentElement), color = name => style.getPropertyValue(name).trim()
    const make = (name, attributes = {}) => new (library.Models.get(name))(attributes)
    const text = { axis_label_text_color: color("--soft"), major_label_text_color: color("--soft"), axis_line_color: color("--line"),
      major_tick_line_color: color("--line"), minor_tick_line_color: null, axis_label_text_font_style: "normal" }
    const plot = make("Plot", { x_range: make("DataRange1d", { range_padding: 0.01 }), y_range: make("DataRange1d"), x_scale: make(logx ? "LogScale" : "LinearScale"),
      y_scale: make(logy ? "LogScale" : "LinearScale"), sizing_mode: "stretch_both", toolbar_location: null, background_fill_color: color("--card"),
      border_fill_color: color("--card"), outline_line_color: null, min_border: 4 })
    const below = make(logx ? "LogAxis" : "LinearAxis", { axis_label: t(axes[this.axis]), ...text, ...(logx ? {} : { formatter: make("NumeralTickFormatter", { format: "0[.]0a" }) }) })
    const left = make(logy ? "LogAxis" : "LinearAxis", { ...text, formatter: make("BasicTickFormatter", { use_scientific: false, precision: "auto" }) })
    plot.add_layout(below, "below"); plot.add_layout(left, "left")
    for (const axis of [below, left]) plot.add_layout(make("Grid", { axis, dimension: axis === below ? 0 : 1, grid_line_color: color("--grid") }))
    this.source = make("ColumnDataSource", { data: lines }); this.areas = make("ColumnDataSource", { data: bands })
    plot.add_renderers(make("GlyphRenderer", { data_source: this.areas, glyph: make("Patches", { xs: { field: "xs" }, ys: { field: "ys" }, fill_color: { field: "color" }, fill_alpha: 0.18, line_color: null }) }))
    const renderer = make("GlyphRenderer", { data_source: this.source, glyph: make("MultiLine", { xs: { field: "xs" }, ys: { field: "ys" }, line_color: { field: "color" }, line_alpha: { field: "alpha" }, line_width: { field: "width" } }) })
    plot.add_renderers(renderer)
    const zoom = make("BoxZoomTool", { dimensions: "width" })
    plot.toolbar.tools = [zoom, make("HoverTool", { renderers: [renderer], line_policy: "nearest", tooltips: [["", "@name"], [t(axes[this.axis]), "$data_x{0[.]00a}"], ["", "$data_y{0.0000}"]] })]
    plot.toolbar.active_drag = zoom
    const document_ = new (library.require("document").Document)()
    document_.add_root(plot)
    this.manager = await library.embed.add_document_standalone(document_, this.place, [this.place])
    Object.assign(this, { plot, key })
    plot.on_event("rangesupdate", () => this.zoom({ start: plot.x_range.start, end: plot.x_range.end }))
  }

  get view() { return this.manager && [...this.manager.roots ?? this.manager][0] }

  /** All charts show the range that was drawn with the mouse in one, and read it again in full. */
  zoom({ start, end }) {
    if (resetting) return
    this.plot.y_range.have_updated_interactively = false  // it fits what is shown
    for (const other of zoomed) if (other.plot && other.axis === this.axis) {
      if (other !== this) { other.plot.x_range.have_updated_interactively = true; other.plot.x_range.setv({ start, end }) }
      other.onzoom?.({ from: start, to: end })
    }
  }
  reset() { this.view?.reset?.(); this.onzoom?.({}) }

  png(title) {
    this.view?.export("png").canvas.toBlob(blob =>
      h("a", { href: URL.createObjectURL(blob), download: `${title.replaceAll("/", "-")}.png` }).click())
  }

  svg(lines, logx, logy) {
    const fx = logx ? Math.log10 : v => v, fy = logy ? Math.log10 : v => v, W = 600, H = 300
    const points = lines.map(l => l.x.map((x, i) => [fx(x), fy(l.y[i])]).filter(p => isFinite(p[0]) && isFinite(p[1])))
    const all = points.flat(), low = i => all.reduce((a, p) => Math.min(a, p[i]), Infinity), high = i => all.reduce((a, p) => Math.max(a, p[i]), -Infinity)
    const [x0, x1, y0, y1] = [low(0), high(0), low(1), high(1)]
    const svg = (tag, attributes, text) => {
      const element = document.createElementNS("http://www.w3.org/2000/svg", tag)
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value)
      element.textContent = text ?? ""
      return element
    }
    const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none" })
    points.forEach((line, n) => picture.append(svg("polyline", { fill: "none", stroke: lines[n].color, "stroke-opacity": lines[n].alpha ?? 1,
      points: line.map(([x, y]) => `${(50 + (W - 60) * (x - x0) / (x1 - x0 || 1)).toFixed(1)},${(10 + (H - 40) * (y1 - y) / (y1 - y0 || 1)).toFixed(1)}`).join(" ") })))
    const back = (value, log) => number(log ? 10 ** value : value)
    if (all.length) [[2, 18, back(y1, logy)], [2, H - 32, back(y0, logy)], [50, H - 10, back(x0, logx)], [W - 60, H - 10, back(x1, logx)]]
      .forEach(([x, y, text]) => picture.append(svg("text", { x, y }, text)))
    this.place.replaceChildren(picture)
    say(t("Plain lines; for charts with zoom: pip install bokeh"))
  }
}
