// The view "Runs": charts of all runs, a table of their settings and results, parallel coordinates.
// The view of one run, follow.js, uses the charts, too.
import {
  colors, debounce, downloadFrom, format, get, link, listen, notify, post, state, throttle,
} from "./app.js"
import { Chart, Curves, axes, smooth } from "./charts.js"
import { button, card, h, row, select, table } from "./dom.js"
import { t } from "./words.js"

/** Return the user's choices for the charts. They are in the address, so that links keep them. */
const choices = () => ({
  axis: state.get("x", "tokens"), logx: state.get("logx") === "1",
  logy: state.get("logy", "1") === "1", decay: Number(state.get("smooth", "0")) })

/** Make the controls of charts. change(reload): reload is true if new points are needed. */
export function controls(change) {
  const set = (name, value, reload) => {
    state.set({ [name]: value })
    change(reload)
  }
  const box = (name, label) => {
    const onchange = event => set(name, event.target.checked ? "1" : "0")
    const checked = choices()[name]
    return h("label", {}, h("input", { type: "checkbox", checked, onchange }), t(label))
  }
  const slider = h("input", {
    type: "range", min: 0, max: 0.99, step: 0.01, value: choices().decay,
    oninput: throttle(() => set("smooth", slider.value), 100) })
  const options = Object.entries(axes).map(([name, title]) => [name, t(title)])
  return row(select(t("X axis"), options, choices().axis, name => set("x", name, true)),
    box("logx", "Log x"), box("logy", "Log y"), h("label", {}, t("Smoothing"), slider))
}

/**
 * A grid of charts. run: the only run to draw, or "" for all; styleOf(name): { color, hidden,
 * group } of a run; defaultMetrics: the metrics shown unless the address names others.
 */
export class Charts {
  constructor({ run = "", styleOf, defaultMetrics }) {
    const place = h("div", { class: "grid" })
    Object.assign(this, { place, run, styleOf, defaultMetrics, charts: [] })
    this.draw = throttle(() => this.drawAll("redrawn"), 120)
  }

  get metrics() {
    return state.get("charts") ? state.get("charts").split(",") : this.defaultMetrics
  }

  /** Show charts of these metrics, and keep them in the address. */
  show(metrics) {
    state.set({ charts: metrics.join(",") })
    this.build()
  }

  /** Draw all charts, then set the performance mark. */
  async drawAll(mark) {
    await Promise.all(this.charts.map(one => one.draw()))
    markTime(mark)
  }

  /** Make and draw all charts. ready: a promise; the runs' styles are known once it resolves. */
  async build(ready) {
    this.end()
    this.charts = this.metrics.map(metric => this.make(metric))
    this.place.replaceChildren(...this.charts.map(one => one.chart.element))
    await Promise.all(this.charts.map(async one => {
      await Promise.all([one.curves.load(), ready])
      await one.draw()
    }))
    markTime("drawn")
  }

  /** Return { chart, curves, draw(), reload() } of a metric. */
  make(metric) {
    const { axis } = choices(), curves = new Curves(metric, axis, this.run)
    const csv = `api/csv?${new URLSearchParams({ metric, run: this.run })}`
    const remove = () => this.show(this.metrics.filter(other => other !== metric))
    const chart = new Chart(metric, { axis, csv, remove })
    const draw = async () => chart.draw(...await this.lines(curves), choices())
    const load = async range => {
      await curves.load(range)
      await draw()
    }
    chart.onzoom = debounce(load, 250)
    return { chart, curves, draw, reload: throttle(load, 500) }
  }

  /**
   * Return the smoothed [lines, bands] of the shown runs: a line for each run, over its faint raw
   * curve; if runs are grouped, the mean of each group and its band from min to max.
   */
  async lines(curves) {
    const { decay } = choices(), raw = [], lines = [], groups = {}
    for (const [name, { x, y }] of curves.lines) {
      const { color, hidden, group } = this.styleOf(name)
      if (hidden || !x.length) continue
      if (group !== undefined) {
        groups[group] ??= { title: group, color, runs: [] }
        groups[group].runs.push(name)
        continue
      }
      if (decay) raw.push({ name, color, x, y, alpha: 0.22, width: 1 })
      lines.push({ name, color, x, y: smooth(y, decay) })
    }
    const bands = await this.bands(Object.values(groups), curves, decay)
    return [[...raw, ...lines, ...bands], bands]
  }

  /** Return the mean and the band of each group, computed by the server. */
  async bands(groups, { metric, axis, range }, decay) {
    if (!groups.length) return []
    const query = { metric, x: axis, ...range, groups: groups.map(group => group.runs) }
    return (await post("api/bands", query)).map(([x, mean, low, high], n) => {
      const { title, color, runs } = groups[n]
      return { name: `${title} (${runs.length})`, color, width: 2, x, y: smooth(mean, decay),
        low: smooth(low, decay), high: smooth(high, decay) }
    })
  }

  /** Take over a live event: draw its points, or load all points again. */
  add(event) {
    for (const { curves, reload } of this.charts) {
      const result = event.hello ? "again" : curves.add(event)
      if (result === "again") reload()
      else if (result) this.draw()
    }
  }

  end() { this.charts.forEach(one => one.chart.end()) }

  /** Make the drop-down that adds a chart. names: of metrics. */
  adder(names) {
    const add = name => name && this.show([...this.metrics, name])
    return select(t("Add a chart"), [["", "…"], ...names], "", add)
  }
}

/** Set a performance mark after the next paint. Tests read "drawn" to measure the page. */
function markTime(name) {
  performance.clearMarks(name)
  requestAnimationFrame(() => setTimeout(() => performance.mark(name)))
}

/** Compare two values for sort(): numbers come first, then texts, then missing values. */
function compareValues(a, b) {
  const rank = value => {
    if (value === undefined || value === null) return 2
    return typeof value === "number" ? 0 : 1
  }
  if (rank(a) !== rank(b)) return rank(a) - rank(b)
  return a < b ? -1 : a > b ? 1 : 0
}

export async function show(main) {
  let found       // the answer of api/runs
  let order = []  // its runs that match the filter, sorted
  let reads = 0   // reloads while the server was still reading logs
  const hidden = new Set(state.getJson("hide", [])), styles = new Map()
  const styleOf = name => styles.get(name) || { color: "#888", hidden: true }
  const charts = new Charts({ styleOf, defaultMetrics: ["loss/val", "loss/train"] })
  const body = card(), parallel = h("div"), tools = h("div", { class: "card" })
  const values = run => ({ ...run.results, ...run.settings, run: run.name, tags: run.tags })
  const sorting = () => ({
    column: state.get("sort", "best loss/val"), descending: state.get("down") === "1" })

  /** Return the filter as a regular expression that matches all if the user's is malformed. */
  function filter() {
    try {
      return new RegExp(state.get("filter"), "i")
    } catch {
      notify(t("Not a regular expression"), true)
      return /^/
    }
  }

  /** Sort and filter the runs, and set the style of each: colour, group, whether it is hidden. */
  function arrange() {
    const by = state.get("group"), pattern = filter(), { column, descending } = sorting()
    const groups = [...new Set(found.runs.map(run => run.settings[by]))]
    const matches = run => pattern.test(run.name) || pattern.test(run.tags || "")
    found.runs.forEach((run, n) => {
      const value = run.settings[by], ownColor = by ? "" : run.color
      styles.set(run.name, {
        hidden: hidden.has(run.name) || !matches(run),
        group: by ? `${by}=${value}` : undefined,
        color: ownColor || colors[(by ? groups.indexOf(value) : n) % colors.length] })
    })
    const sign = descending ? -1 : 1
    const compare = (a, b) => sign * compareValues(values(a)[column], values(b)[column])
    order = found.runs.filter(matches).sort(compare)
  }

  /** Draw all again after a change of the user's choices. reload: true: load new points. */
  function changed(reload) {
    arrange()
    drawTable()
    if (reload === true) charts.build()
    else charts.draw()
  }

  function setHidden(names, isHidden) {
    for (const name of names) {
      if (isHidden) hidden.add(name)
      else hidden.delete(name)
    }
    state.set({ hide: hidden.size ? JSON.stringify([...hidden]) : "" })
    changed()
  }

  function headCell(name) {
    const { column, descending } = sorting(), isSorted = name === column
    const sort = () => {
      state.set({ sort: name, down: isSorted && !descending ? "1" : "" })
      arrange()
      drawTable()
    }
    const direction = descending ? "descending" : "ascending"
    return h("th", { scope: "col", "aria-sort": isSorted ? direction : "none" },
      h("button", { onclick: sort }, t(name), isSorted && (descending ? " ▾" : " ▴")))
  }

  /** Make a row with empty cells; update() fills them. */
  function runRow(run, columns) {
    const box = h("input", {
      type: "checkbox", checked: !hidden.has(run.name), "aria-label": `${t("Show")} ${run.name}`,
      style: `accent-color: ${styleOf(run.name).color}`,
      onchange: event => setHidden([run.name], !event.target.checked) })
    const name = h("a", { href: link("run", { run: run.name }) }, run.name)
    const first = h("td", {}, h("span", { class: "row" }, box, name,
      h("span", { class: "good training" }), h("span", { class: "bad odd" })))
    return h("tr", { class: hidden.has(run.name) ? "hidden" : "", "data-run": run.name }, first,
      columns.map(column => h("td", { "data-column": column })))
  }

  function drawTable() {
    const columns = ["tags", ...found.settings, ...found.columns]
    const { scrollTop = 0, scrollLeft = 0 } = body.firstChild ?? {}
    const rows = order.map(run => runRow(run, columns))
    body.replaceChildren(table(t("Runs"), ["run", ...columns].map(headCell), rows, ""))
    update()
    Object.assign(body.firstChild, { scrollTop, scrollLeft })
    const shown = order.filter(run => !hidden.has(run.name))
    parallel.replaceChildren(...coordinates(shown, found.settings, styleOf))
  }

  /** Fill the cells in place, so that the table keeps its scroll position and focus. */
  function update() {
    const runs = new Map(found.runs.map(run => [run.name, run]))
    for (const line of body.querySelectorAll("tr[data-run]")) {
      const run = runs.get(line.dataset.run), now = values(run)
      for (const cell of line.querySelectorAll("[data-column]")) {
        const text = format(now[cell.dataset.column])
        if (cell.textContent !== text) cell.textContent = text
      }
      line.querySelector(".training").textContent = run.training ? `● ${t("training")}` : ""
      line.querySelector(".odd").textContent = run.odd || ""
    }
  }

  function drawTools() {
    const names = () => order.map(run => run.name)
    const choose = values => {
      state.set(values)
      changed()
    }
    const search = h("input", {
      type: "search", value: state.get("filter"), placeholder: "regex",
      oninput: debounce(event => choose({ filter: event.target.value }), 200) })
    const saveShown = () => {
      const shown = names().filter(name => !hidden.has(name))
      downloadFrom("api/save", { runs: shown, group: state.get("group") }, "runs.html")
    }
    const groupings = [["", "–"], ...found.settings]
    tools.replaceChildren(row(
      h("label", {}, t("Filter"), search),
      select(t("Group by"), groupings, state.get("group"), group => choose({ group })),
      charts.adder(found.metrics), controls(changed),
      button(t("Show all"), () => setHidden(names(), false)),
      button(t("Hide all"), () => setHidden(names(), true)),
      button(t("Save as one HTML file"), saveShown)))
  }

  async function load() {
    found = await get("api/runs")
    arrange()
    if (found.more && reads++ < 9) reload()  // the server is still reading logs
  }

  const ready = load(), updateLater = throttle(update, 1000)
  const reload = throttle(() => load().then(changed), 1500)
  listen(event => {
    const run = event.run && found?.runs.find(other => other.name === event.run.name)
    if (run) {
      Object.assign(run, event.run)
      updateLater()
    } else if (event.run || event.hello) reload()
    charts.add(event)
  })
  main.append(h("h1", { class: "soft" }, t("Runs")), tools, charts.place, body, parallel)
  await Promise.all([charts.build(ready), ready.then(drawTools)])
  // Let the browser paint the curves before the table is made.
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)))
  drawTable()
  if (!found.runs.length) notify(t("No runs yet: start one"))
  return { end: () => charts.end() }
}

/**
 * Return [a card with parallel coordinates], or [] if there is too little to show: an axis for each
 * numeric setting that differs (8 at most) and for the loss, and a line for each run.
 */
function coordinates(runs, settings, styleOf) {
  const isNumber = value => typeof value === "number"
  const isNumericAndDiffers = name => {
    const all = runs.map(run => run.settings[name])
    return all.every(isNumber) && new Set(all).size > 1
  }
  const names = settings.filter(isNumericAndDiffers).slice(0, 8)
  if (runs.length < 3 || !names.length) return []
  const loss = run => run.results["best loss/val"] ?? run.results["last loss/train"]
  const columns = names.map(name => ({ name, value: run => run.settings[name] }))
  columns.push({ name: "best loss/val", value: loss })
  columns.forEach((column, n) => {
    const all = runs.map(column.value).filter(isNumber)
    const low = Math.min(...all), high = Math.max(...all)
    const scale = low > 0 && high / low > 20 ? Math.log : Number  // a wide range: log axis
    const range = scale(high) - scale(low) || 1  // 1: all values are equal
    const y = run => 25 + 190 * (1 - (scale(column.value(run)) - scale(low)) / range)
    Object.assign(column, { low, high, y, x: 60 + n * 760 / (columns.length - 1) })
  })
  const axis = ({ name, low, high, x }) => [
    h("path", { d: `M${x} 25V215`, stroke: "var(--line)" }),
    h("text", { x, y: 12, "text-anchor": "middle" }, name),
    h("text", { x: x + 4, y: 34 }, format(high)), h("text", { x: x + 4, y: 212 }, format(low))]
  const line = run => h("polyline", {
    fill: "none", stroke: styleOf(run.name).color, "stroke-width": 1.5, "stroke-opacity": 0.75,
    points: columns.map(({ x, y }) => `${x},${y(run)}`).join(" ") }, h("title", {}, run.name))
  const lines = runs.filter(run => isNumber(loss(run))).map(line)
  const picture = h("svg", { viewBox: "0 0 900 240" }, columns.map(axis), lines)
  return [card(t("Settings and result"), h("div", { class: "scroll" }, picture))]
}
