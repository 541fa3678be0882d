// Curves: loaded from the server, extended by live events, drawn by Bokeh or as plain SVG lines.
import { download, format, get, notify } from "./app.js"
import { button, floats, h, row } from "./dom.js"
import { t } from "./words.js"

const bokeh = window.Bokeh  // from bokeh.js, which is empty if Bokeh is not installed
bokeh?.set_log_level("error")
export const axes = { tokens: "Tokens", iter: "Steps", seconds: "Seconds" }

/**
 * The points of a metric, of all runs or of one. lines: Map of run name to { x, y, rows }; rows is
 * the number of rows read from the run's log.
 */
export class Curves {
  constructor(metric, axis, run) {
    Object.assign(this, { metric, axis, run, lines: new Map(), requests: 0, range: {} })
  }

  /** Load all points, thinned by the server. range: {} or { from, to } on the x axis. */
  async load(range = this.range) {
    const number = ++this.requests
    const query = { metric: this.metric, x: this.axis, run: this.run || "", ...range }
    const found = await get("api/curves", query)
    if (number !== this.requests) return  // a later load() has begun
    const xs = floats(found.x), ys = floats(found.y)  // the points of one run after another
    this.range = range
    this.lines.clear()
    let start = 0
    for (const [name, points, rows] of found.runs) {
      const x = [...xs.subarray(start, start + points)]
      const y = [...ys.subarray(start, start + points)]
      this.lines.set(name, { x, y, rows })
      start += points
    }
  }

  /**
   * Add the points of a live event (see RunApi.live in run_api.py): rows { metric: values } from
   * row `from` of the log on. Return whether it has points, or "again" if load() is needed, because
   * rows were missed, the log was rewritten or the curve is new.
   */
  add({ run, from, rows, again }) {
    if (!run || this.run && run.name !== this.run) return false
    const line = this.lines.get(run.name)
    if (again) return "again"
    if (!line) return rows[this.metric] ? "again" : false
    if (from > line.rows) return "again"
    const xs = rows[this.axis] || [], ys = rows[this.metric] || []
    ys.forEach((y, i) => {
      const isNew = from + i >= line.rows
      if (isNew && typeof y === "number" && typeof xs[i] === "number") {
        line.x.push(xs[i])
        line.y.push(y)
      }
    })
    line.rows = run.rows
    return ys.length > 0
  }
}

/** Return the exponential moving average with bias correction. decay: 0 (no smoothing) to < 1. */
export function smooth(ys, decay) {
  if (!decay) return ys
  let sum = 0, weight = 0  // weight: of all values in the sum, 1 in the limit
  return ys.map(y => {
    sum = decay * sum + (1 - decay) * y
    weight = decay * weight + 1 - decay
    return sum / weight
  })
}

// ---- charts

const charts = new Set()  // all charts in the page: a zoom of one zooms all
let resetting = false  // ignore the range events that Bokeh sends on a reset

/** Show the whole range in all charts. */
function resetZoom() {
  resetting = true
  for (const chart of charts) chart.reset()
  setTimeout(() => { resetting = false }, 100)
}

/** Make a Bokeh model, such as a "Plot". */
const make = (name, attributes = {}) => new (bokeh.Models.get(name))(attributes)
/** Bind a glyph's attributes to columns of its data source. names: { attribute: column }. */
const columns = names =>
  Object.fromEntries(Object.entries(names).map(([name, field]) => [name, { field }]))

/**
 * A chart in a card, drawn from lines { name, color, x, y, width, alpha } and
 * bands { color, x, low, high }. csv: address of the numbers; remove(): called by its button;
 * axis: a key of axes; onzoom(range), set by the owner: loads the points of a range.
 */
export class Chart {
  constructor(title, { csv, remove, axis }) {
    const place = h("div", { class: "chart", role: "img", "aria-label": title })
    Object.assign(this, { title, axis, place })
    const plain = (text, onclick, label) =>
      button(text, onclick, { class: "plain", "aria-label": label })
    this.element = h("section", { class: "card" },
      row(h("h2", { class: "grow" }, title),
        plain("PNG", () => this.png()), h("a", { href: csv, download: "curves.csv" }, "CSV"),
        plain(t("Reset zoom"), resetZoom), plain("×", remove, `${t("Remove")} ${title}`)),
      place)
    charts.add(this)
  }

  end() {
    charts.delete(this)
    this.clear()
  }

  /** Remove the plot from the page and from Bokeh. */
  clear() {
    this.manager?.clear?.()
    if (this.plot) bokeh.documents.splice(bokeh.documents.indexOf(this.plot.document), 1)
    this.place.replaceChildren()
    this.plot = null
  }

  /** Draw the curves. Only a changed scale of an axis needs a new plot. */
  async draw(lines, bands, { logx, logy }) {
    if (!bokeh) return this.drawPlain(lines, logx, logy)
    // Copy the arrays: Bokeh treats the same array, grown by some points, as unchanged.
    const lineData = {
      xs: lines.map(line => [...line.x]), ys: lines.map(line => [...line.y]),
      color: lines.map(line => line.color), name: lines.map(line => line.name),
      alpha: lines.map(line => line.alpha ?? 1), width: lines.map(line => line.width ?? 1.6),
    }
    const bandData = {  // each band is a polygon: its top from left to right, its bottom back
      xs: bands.map(band => [...band.x, ...band.x.toReversed()]),
      ys: bands.map(band => [...band.high, ...band.low.toReversed()]),
      color: bands.map(band => band.color),
    }
    if (this.plot && this.scales === `${logx} ${logy}`) {
      this.lineSource.data = lineData
      this.bandSource.data = bandData
    } else if (!this.busy) {  // while a plot is being built, further draws are dropped
      this.busy = true
      try {
        await this.build(lineData, bandData, logx, logy)
      } finally {
        this.busy = false
      }
    }
  }

  /** Make the plot and show it in the page. */
  async build(lineData, bandData, logx, logy) {
    this.clear()
    this.lineSource = make("ColumnDataSource", { data: lineData })
    this.bandSource = make("ColumnDataSource", { data: bandData })
    const lineColumns = columns({
      xs: "xs", ys: "ys", line_color: "color", line_alpha: "alpha", line_width: "width" })
    const bandColumns = columns({ xs: "xs", ys: "ys", fill_color: "color" })
    const lines = make("GlyphRenderer", {
      data_source: this.lineSource, glyph: make("MultiLine", lineColumns) })
    const bands = make("GlyphRenderer", {
      data_source: this.bandSource,
      glyph: make("Patches", { ...bandColumns, fill_alpha: 0.18, line_color: null }) })
    const plot = this.frame(logx, logy)
    plot.add_renderers(bands)
    plot.add_renderers(lines)
    const zoom = make("BoxZoomTool", { dimensions: "width" })
    const x = [t(axes[this.axis]), "$data_x{0[.]00a}"]
    const tooltips = [["", "@name"], x, ["", "$data_y{0.0000}"]]
    const hover = make("HoverTool", { renderers: [lines], line_policy: "nearest", tooltips })
    plot.toolbar.tools = [zoom, hover]
    plot.toolbar.active_drag = zoom
    const page = new (bokeh.require("document").Document)()
    page.add_root(plot)
    this.manager = await bokeh.embed.add_document_standalone(page, this.place, [this.place])
    Object.assign(this, { plot, scales: `${logx} ${logy}` })
    plot.on_event("rangesupdate", () => this.zoom(plot.x_range.start, plot.x_range.end))
  }

  /** Return an empty plot with axes and grids in the page's colours. */
  frame(logx, logy) {
    const style = getComputedStyle(document.documentElement)
    const color = name => style.getPropertyValue(name).trim()
    const [card, soft, line] = [color("--card"), color("--soft"), color("--line")]
    const plot = make("Plot", {
      x_range: make("DataRange1d", { range_padding: 0.01 }), y_range: make("DataRange1d"),
      x_scale: make(logx ? "LogScale" : "LinearScale"),
      y_scale: make(logy ? "LogScale" : "LinearScale"),
      sizing_mode: "stretch_both", toolbar_location: null, min_border: 4,
      background_fill_color: card, border_fill_color: card, outline_line_color: null })
    const addAxis = (side, isLog, attributes) => {
      const axis = make(isLog ? "LogAxis" : "LinearAxis", {
        axis_label_text_color: soft, axis_label_text_font_style: "normal",
        major_label_text_color: soft, axis_line_color: line, major_tick_line_color: line,
        minor_tick_line_color: null, ...attributes })
      const dimension = side === "below" ? 0 : 1
      plot.add_layout(axis, side)
      plot.add_layout(make("Grid", { axis, dimension, grid_line_color: color("--grid") }))
    }
    const short = { formatter: make("NumeralTickFormatter", { format: "0[.]0a" }) }
    const plain = make("BasicTickFormatter", { use_scientific: false, precision: "auto" })
    addAxis("below", logx, { axis_label: t(axes[this.axis]), ...(logx ? {} : short) })
    addAxis("left", logy, { formatter: plain })
    return plot
  }

  /** Return Bokeh's view of the plot. Without `roots`, older managers are themselves iterable. */
  get view() { return this.manager && [...this.manager.roots ?? this.manager][0] }

  /** Show the x range selected here in all charts with this axis, and load their points in it. */
  zoom(start, end) {
    if (resetting) return
    this.plot.y_range.have_updated_interactively = false  // y fits the shown points again
    for (const other of charts) {
      if (!other.plot || other.axis !== this.axis) continue
      if (other !== this) {
        other.plot.x_range.have_updated_interactively = true  // x is not fitted to the points
        other.plot.x_range.setv({ start, end })
      }
      other.onzoom?.({ from: start, to: end })
    }
  }

  reset() {
    this.view?.reset?.()
    this.onzoom?.({})
  }

  png() {
    const name = `${this.title.replaceAll("/", "-")}.png`
    this.view?.export("png").canvas.toBlob(blob => download(blob, name))
  }

  /** Draw without Bokeh, in an SVG of 600 x 300: the lines, and min and max of both axes. */
  drawPlain(lines, logx, logy) {
    const [fx, fy] = [logx, logy].map(isLog => isLog ? Math.log10 : Number)
    const point = (x, y) => ({ x, y, scaledX: fx(x), scaledY: fy(y) })
    const points = lines.map(({ x, y }) =>
      x.map((_, i) => point(x[i], y[i])).filter(p => isFinite(p.scaledX + p.scaledY)))
    const all = points.flat(), first = all[0] ?? { x: 0, y: 0, scaledX: 0, scaledY: 0 }
    const minBy = key => all.reduce((a, b) => b[key] < a[key] ? b : a, first)
    const maxBy = key => all.reduce((a, b) => b[key] > a[key] ? b : a, first)
    const left = minBy("scaledX"), right = maxBy("scaledX")
    const low = minBy("scaledY"), high = maxBy("scaledY")
    const pixelX = p => 50 + 540 * (p.scaledX - left.scaledX) / (right.scaledX - left.scaledX || 1)
    const pixelY = p => 10 + 260 * (high.scaledY - p.scaledY) / (high.scaledY - low.scaledY || 1)
    const line = (part, n) => h("polyline", {
      fill: "none", stroke: lines[n].color, "stroke-opacity": lines[n].alpha ?? 1,
      points: part.map(p => `${pixelX(p).toFixed(1)},${pixelY(p).toFixed(1)}`).join(" ") })
    const labels = [[2, 18, high.y], [2, 268, low.y], [50, 290, left.x], [540, 290, right.x]]
    const label = ([x, y, value]) => h("text", { x, y }, format(value))
    this.place.replaceChildren(h("svg", { viewBox: "0 0 600 300", preserveAspectRatio: "none" },
      points.map(line), labels.map(label)))
    notify(t("Plain lines; for charts with zoom: pip install bokeh"))
  }
}
