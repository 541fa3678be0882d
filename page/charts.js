// Curves: loaded from the server, extended by live events, drawn by Bokeh or as plain SVG lines.
import { download, format, get, notify } from "./app.js"
import { button, floats, h, row } from "./dom.js"
import { t } from "./words.js"

const bokeh = window.Bokeh  // from bokeh.js, which is empty if Bokeh is not installed
bokeh?.set_log_level("error")
export const axes = { tokens: "Tokens", iter: "Steps", seconds: "Seconds" }

/**
 * The points of a metric, for all runs or one. lines: Map of run name to { x, y, rows }; rows is
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
  let sum = 0, weight = 0  // weight: total weight of the values in the sum, 1 in the limit
  return ys.map(y => {
    sum = decay * sum + (1 - decay) * y
    weight = decay * weight + 1 - decay
    return sum / weight
  })
}

// ---- styles

const COLORS = 7, DASHES = ["", "7 3", "2 2"]
/** Return the { color, dash } of the n-th curve; 21 of them are distinct in either theme. */
export const curveStyle = n => ({
  color: `var(--curve${n % COLORS})`, dash: DASHES[Math.floor(n / COLORS) % DASHES.length] })

const rootStyle = () => getComputedStyle(document.documentElement)
/** Return a colour; if it is a variable of the style sheet, its value in the current theme. */
const resolved = color => color.startsWith("var(")
  ? rootStyle().getPropertyValue(color.slice(4, -1)).trim() : color

// ---- ticks

const isInside = (value, low, high) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9)

/** Return about five round numbers from low to high. */
function evenTicks(low, high) {
  const power = 10 ** Math.floor(Math.log10((high - low) / 4))
  const step = power * [1, 2, 5, 10].find(k => (high - low) / (k * power) <= 6)
  const found = []
  for (let n = Math.ceil(low / step); n * step <= high; n++) found.push(n * step)
  return found
}

/** Return 4 to 10 round numbers from low to high for a logarithmic axis. */
export function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), powers = Math.ceil(Math.log10(high)) - first + 1
  if (!(low > 0 && high > low && powers < 700)) return []
  for (const digits of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 5, 7]]) {
    let found = []
    for (let k = first; k < first + powers; k++) found.push(...digits.map(d => d * 10 ** k))
    found = found.filter(value => isInside(value, low, high))
    const every = Math.ceil(found.length / 10)  // > 1 if there are more than 10 powers of ten
    if (found.length >= 4) return found.filter((_, n) => n % every === 0)
  }
  return evenTicks(low, high)
}

/**
 * Return the tops of labels below their lines, moved down where they would overlap. heights:
 * distances of the lines from the top, ascending; line: height of a label; all in pixels.
 */
export function spread(heights, line) {
  let next = -Infinity
  return heights.map(height => {
    const top = Math.max(height + 2, next)
    next = top + line
    return top
  })
}

// ---- charts

const charts = new Set()  // all charts in the page: a zoom of one zooms all
let resetting = false  // ignore the range events that Bokeh sends on a reset
const MAX_LEGEND = 24  // curves in a legend
const LABEL = 14  // height of a mark's label in pixels

document.addEventListener("theme", () => {
  for (const chart of charts) chart.repaint()
})

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
 * A chart in a card, drawn from lines { name, color, dash, x, y, width, alpha },
 * bands { color, x, low, high } and marks { y, text }: dashed horizontal lines, which don't widen
 * the range. Lines with an alpha are not in the legend. csv: address of the numbers; remove():
 * called by the remove button; axis: a key of axes; onzoom(range): set by the owner, loads the
 * points of a range.
 */
export class Chart {
  constructor(title, { csv, remove, axis }) {
    const place = h("div", { class: "chart", role: "img", "aria-label": title })
    const legend = h("div", { class: "legend" })
    Object.assign(this, { title, axis, place, legend })
    const plain = (text, onclick, label) =>
      button(text, onclick, { class: "plain", "aria-label": label })
    this.element = h("section", { class: "card" },
      row(h("h2", { class: "grow" }, title),
        plain("PNG", () => this.png()), h("a", { href: csv, download: "curves.csv" }, "CSV"),
        plain(t("Reset zoom"), resetZoom), plain("×", remove, `${t("Remove")} ${title}`)),
      place, legend)
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

  /** Redraw in the colours of the current theme, and keep the zoom. */
  repaint() {
    if (!this.drawn || !bokeh) return  // the style sheet colours an SVG
    if (this.plot) this.paint()
    this.draw(...this.drawn)
  }

  /** Draw the curves. Build a new plot only if the scale of an axis has changed. */
  async draw(lines, bands, marks, options) {
    this.drawn = [lines, bands, marks, options]
    const isPositive = key => lines.every(line => line[key].every(value => value > 0))
    const logx = options.logx, logy = options.logy && isPositive("y")
    this.named = lines.filter(line => line.alpha === undefined)
    this.drawLegend()
    if (!bokeh) return this.drawPlain(lines, marks, logx, logy)
    // Copy the arrays: Bokeh treats an array that has grown in place as unchanged.
    const lineData = {
      xs: lines.map(line => [...line.x]), ys: lines.map(line => [...line.y]),
      color: lines.map(line => resolved(line.color)), name: lines.map(line => line.name),
      dash: lines.map(line => line.dash || "solid"),
      alpha: lines.map(line => line.alpha ?? 1), width: lines.map(line => line.width ?? 1.8),
    }
    const bandData = {  // each band is a polygon: its top from left to right, its bottom back
      xs: bands.map(band => [...band.x, ...band.x.toReversed()]),
      ys: bands.map(band => [...band.high, ...band.low.toReversed()]),
      color: bands.map(band => resolved(band.color)),
    }
    const markData = {
      y: marks.map(mark => mark.y), text: marks.map(mark => mark.text), offset: marks.map(() => -2)
    }
    if (this.plot && this.scales === `${logx} ${logy}`) {
      this.lineSource.data = lineData
      this.bandSource.data = bandData
      this.markSource.data = markData
      this.spreadLabels()
    } else if (!this.busy) {  // while a plot is being built, further draws are dropped
      this.busy = true
      try {
        await this.build(lineData, bandData, markData, logx, logy)
      } finally {
        this.busy = false
      }
    }
  }

  /** List the names of several curves below the chart. */
  drawLegend() {
    const key = ({ color, dash }) => h("svg", { viewBox: "0 0 26 8", "aria-hidden": "true" },
      h("path", { d: "M0 4H26", stroke: color, "stroke-width": 2.5, "stroke-dasharray": dash }))
    const shown = this.named.length > 1 ? this.named.slice(0, MAX_LEGEND) : []
    const text = shown.map(({ name, color, dash }) => `${name} ${color} ${dash}`).join("\n")
    if (text === this.legendText) return  // unchanged: keep the selection and scroll position
    this.legendText = text
    const more = this.named.length - shown.length
    this.legend.replaceChildren(
      ...shown.map(line => h("span", {}, key(line), line.name)),
      shown.length && more ? `+ ${more}` : "")
  }

  /** Make the plot and show it in the page. */
  async build(lineData, bandData, markData, logx, logy) {
    this.clear()
    this.lineSource = make("ColumnDataSource", { data: lineData })
    this.bandSource = make("ColumnDataSource", { data: bandData })
    this.markSource = make("ColumnDataSource", { data: markData })
    const lineColumns = columns({
      xs: "xs", ys: "ys", line_color: "color", line_alpha: "alpha", line_width: "width",
      line_dash: "dash" })
    const bandColumns = columns({ xs: "xs", ys: "ys", fill_color: "color" })
    const lines = make("GlyphRenderer", {
      data_source: this.lineSource, glyph: make("MultiLine", lineColumns) })
    const bands = make("GlyphRenderer", {
      data_source: this.bandSource,
      glyph: make("Patches", { ...bandColumns, fill_alpha: 0.18, line_color: null }) })
    this.rule = make("HSpan", { y: { field: "y" }, line_dash: [5, 4], line_width: 1 })
    const rules = make("GlyphRenderer", { data_source: this.markSource, glyph: this.rule })
    this.labels = make("LabelSet", {
      source: this.markSource, x: { value: 0 }, x_offset: -4, y: { field: "y" },
      y_offset: { field: "offset" }, text: { field: "text" }, text_font_size: "11px",
      text_baseline: "top", text_align: "right" })
    const plot = this.frame(logx, logy, [lines, bands])
    plot.add_renderers(bands)
    plot.add_renderers(rules)
    plot.add_renderers(lines)
    plot.add_layout(this.labels)
    const zoom = make("BoxZoomTool", { dimensions: "width" })
    const x = [t(axes[this.axis]), "$data_x{0[.]00a}"]
    const tooltips = [["", "@name"], x, ["", "$data_y{0,0.0000}"]]
    const hover = make("HoverTool", { renderers: [lines], line_policy: "nearest", tooltips })
    plot.toolbar.tools = [zoom, hover]
    plot.toolbar.active_drag = zoom
    plot.x_range.change.connect(() => this.labels.setv({ x: { value: plot.x_range.end } }))
    plot.y_range.change.connect(() => this.spreadLabels())
    this.plot = plot
    this.paint()
    const page = new (bokeh.require("document").Document)()
    page.add_root(plot)
    this.manager = await bokeh.embed.add_document_standalone(page, this.place, [this.place])
    this.scales = `${logx} ${logy}`
    this.spreadLabels()
    plot.on_event("rangesupdate", () => this.zoom(plot.x_range.start, plot.x_range.end))
  }

  /** Move the labels of the marks in the shown range apart. */
  spreadLabels() {
    const { start, end } = this.plot.y_range, data = this.markSource.data
    const scale = this.plot.y_scale.type === "LogScale" ? Math.log : Number
    const size = this.view?.frame?.bbox.height
    if (!(size > 0) || !data.y.length || !(end > start)) return
    const pixels = size / (scale(end) - scale(start))
    const heights = data.y.map(y => pixels * (scale(end) - scale(y)))
    const inside = [...heights.keys()].filter(n => heights[n] >= 0 && heights[n] <= size)
    const tops = spread(inside.map(n => heights[n]), LABEL)
    const offset = data.y.map(() => -2)  // a positive offset is upwards
    inside.forEach((n, i) => { offset[n] = heights[n] - tops[i] })
    if (String(offset) !== String(data.offset)) this.markSource.data = { ...data, offset }
  }

  /** Return an empty plot with axes and grids. renderers: its ranges fit their data. */
  frame(logx, logy, renderers) {
    const plot = make("Plot", {
      x_range: make("DataRange1d", { range_padding: 0.01, renderers }),
      y_range: make("DataRange1d", { renderers }),
      x_scale: make(logx ? "LogScale" : "LinearScale"),
      y_scale: make(logy ? "LogScale" : "LinearScale"),
      sizing_mode: "stretch_both", toolbar_location: null, min_border: 4,
      background_fill_color: null, border_fill_color: null, outline_line_color: null })
    this.axes = []
    const addAxis = (side, isLog, range, attributes) => {
      const axis = make(isLog ? "LogAxis" : "LinearAxis", {
        axis_label_text_font_style: "normal", minor_tick_line_color: null, ...attributes })
      const dimension = side === "below" ? 0 : 1
      if (isLog) {
        axis.ticker = make("FixedTicker")
        range.change.connect(() => { axis.ticker.ticks = logTicks(range.start, range.end) })
      }
      const grid = make("Grid", { axis, dimension })
      plot.add_layout(axis, side)
      plot.add_layout(grid)
      this.axes.push([axis, grid])
    }
    const formatter = format => make("NumeralTickFormatter", { format })
    addAxis("below", logx, plot.x_range, {
      axis_label: t(axes[this.axis]), formatter: formatter("0[.]0a") })
    addAxis("left", logy, plot.y_range, { formatter: formatter("0,0.[00000000]") })
    return plot
  }

  /** Give the plot the colours of the page. */
  paint() {
    const [soft, line, grid] = ["soft", "line", "grid"].map(name => resolved(`var(--${name})`))
    this.rule.setv({ line_color: { value: soft } })
    this.labels.setv({ text_color: { value: soft } })
    for (const [axis, lines] of this.axes) {
      axis.setv({
        axis_label_text_color: soft, major_label_text_color: soft, axis_line_color: line,
        major_tick_line_color: line })
      lines.setv({ grid_line_color: grid })
    }
  }

  /** Return Bokeh's view of the plot. Older managers have no `roots` and are iterable. */
  get view() { return this.manager && [...this.manager.roots ?? this.manager][0] }

  /** Show this x range in all charts with the same axis, and load their points in it. */
  zoom(start, end) {
    if (resetting) return
    this.plot.y_range.have_updated_interactively = false  // fit y to the shown points again
    for (const other of charts) {
      if (!other.plot || other.axis !== this.axis) continue
      if (other !== this) {
        other.plot.x_range.have_updated_interactively = true  // do not fit x to the points
        other.plot.x_range.setv({ start, end })
      }
      other.onzoom?.({ from: start, to: end })
    }
  }

  reset() {
    this.view?.reset?.()
    this.onzoom?.({})
  }

  /** Save the chart as a PNG file, with its title above and its legend below. */
  png() {
    if (!this.view) return
    const chart = this.view.export("png").canvas, line = 20
    const ratio = chart.width / this.place.clientWidth  // pixels of the canvas per CSS pixel
    const legend = this.named.length > 1 ? this.named.slice(0, MAX_LEGEND) : []
    const canvas = h("canvas", {
      width: chart.width, height: chart.height + ratio * line * (legend.length + 2) })
    const context = canvas.getContext("2d")
    context.fillStyle = resolved("var(--card)")
    context.fillRect(0, 0, canvas.width, canvas.height)
    context.drawImage(chart, 0, ratio * line)
    context.scale(ratio, ratio)
    context.fillStyle = resolved("var(--ink)")
    context.font = "bold 13px sans-serif"
    context.fillText(this.title, 10, 15)
    context.font = "12px sans-serif"
    context.lineWidth = 2.5
    legend.forEach(({ name, color, dash }, n) => {
      const y = chart.height / ratio + line * (n + 2)
      context.strokeStyle = resolved(color)
      context.setLineDash(dash ? dash.split(" ").map(Number) : [])
      context.beginPath()
      context.moveTo(10, y - 4)
      context.lineTo(40, y - 4)
      context.stroke()
      context.fillText(name, 48, y)
    })
    canvas.toBlob(blob => download(blob, `${this.title.replaceAll("/", "-")}.png`))
  }

  /** Draw without Bokeh, in an SVG of 600 x 300: the lines, and min and max of both axes. */
  drawPlain(lines, marks, logx, logy) {
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
      "stroke-dasharray": lines[n].dash,
      points: part.map(p => `${pixelX(p).toFixed(1)},${pixelY(p).toFixed(1)}`).join(" ") })
    const labels = [[2, 18, high.y], [2, 268, low.y], [50, 290, left.x], [540, 290, right.x]]
    const label = ([x, y, value]) => h("text", { x, y }, format(value))
    const shown = marks.map(({ y, text }) => ({ y: pixelY(point(1, y)), text }))
      .filter(({ y }) => y > 10 && y < 270)
    const tops = spread(shown.map(({ y }) => y), LABEL)
    const rule = ({ y, text }, n) => [
      h("path", { d: `M50 ${y}H590`, stroke: "var(--soft)", "stroke-dasharray": "5 4" }),
      h("text", { x: 56, y: tops[n] + 10 }, text)]
    this.place.replaceChildren(h("svg", { viewBox: "0 0 600 300", preserveAspectRatio: "none" },
      shown.map(rule), points.map(line), labels.map(label)))
    notify(t("Plain lines; for charts with zoom: pip install bokeh"))
  }
}
