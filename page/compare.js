// The view "Runs": charts of all runs, a table of their settings and results, parallel coordinates.
// The view of one run, follow.js, also uses the charts.
import {
  debounce, downloadFrom, format, get, link, listen, notify, post, state, status, throttle,
} from "./app.js"
import { Chart, Curves, axes, curveStyle, smooth } from "./charts.js"
import { button, card, h, row, select, soft, table } from "./dom.js"
import { t } from "./words.js"

/** Return the user's chart settings. They are in the address, so that links keep them. */
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

// Names of the yardsticks of engine/text/yardsticks.py.
const YARDSTICKS = { chance: "chance", unigram: "token frequencies", gzip: "gzip", xz: "xz",
  floor: "no model can beat" }

/**
 * Return the yardsticks of a metric as marks of a Chart, if they are the same for all runs. They
 * are in bits per byte; the ratio of a run's losses in both units converts them to nats per token.
 */
export function yardsticks(metric, runs) {
  const factor = ({ results }) => {
    if (metric === "bpb/val") return 1
    const isLoss = ["loss/val", "loss/train"].includes(metric)
    return isLoss ? results["last loss/val"] / results["last bpb/val"] : NaN
  }
  const found = []
  for (const [name, words] of Object.entries(YARDSTICKS)) {
    const have = runs.filter(run => `yardstick/${name}` in run.results)
    const values = have.map(run => run.results[`yardstick/${name}`] * factor(run))
    const y = Math.max(...values)
    if (y > 0 && y < 1.02 * Math.min(...values)) found.push({ y, text: t(words) })
  }
  // Lines closer than 4 % get one label.
  const merged = []
  for (const { y, text } of found.sort((a, b) => b.y - a.y)) {
    const last = merged.at(-1)
    const label = `${text} ${y.toPrecision(3)}`
    if (last && last.y < 1.04 * y) last.text += `, ${label}`
    else merged.push({ y, text: label })
  }
  return merged
}

/**
 * A grid of charts. run: the only run to draw, or "" for all; styleOf(name): returns { color, dash,
 * hidden, group } of a run; marksOf(metric): returns the marks of its Chart; defaultMetrics: the
 * metrics to show unless the address names others.
 */
export class Charts {
  constructor({ run = "", styleOf, marksOf, defaultMetrics }) {
    const place = h("div", { class: "grid" })
    Object.assign(this, { place, run, styleOf, marksOf, defaultMetrics, charts: [] })
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

  /** Make and draw all charts. ready: a promise that resolves when the runs' styles are known. */
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
   * Return the smoothed [lines, bands, marks] of the shown runs: a line for each run, over its
   * faint raw curve; if runs are grouped, the mean of each group and its band from min to max.
   */
  async lines(curves) {
    const { decay } = choices(), raw = [], lines = [], groups = {}
    for (const [name, { x, y }] of curves.lines) {
      const { color, dash, hidden, group } = this.styleOf(name)
      if (hidden || !x.length) continue
      if (group !== undefined) {
        groups[group] ??= { title: group, color, dash, runs: [] }
        groups[group].runs.push(name)
        continue
      }
      if (decay) raw.push({ name, color, dash, x, y, alpha: 0.22, width: 1 })
      lines.push({ name, color, dash, x, y: smooth(y, decay) })
    }
    const bands = await this.bands(Object.values(groups), curves, decay)
    return [[...raw, ...lines, ...bands], bands, this.marksOf(curves.metric)]
  }

  /** Return the mean and the band of each group, computed by the server. */
  async bands(groups, { metric, axis, range }, decay) {
    if (!groups.length) return []
    const query = { metric, x: axis, ...range, groups: groups.map(group => group.runs) }
    return (await post("api/bands", query)).map(([x, mean, low, high], n) => {
      const { title, color, dash, runs } = groups[n]
      return { name: `${title} (${runs.length})`, color, dash, width: 2, x, y: smooth(mean, decay),
        low: smooth(low, decay), high: smooth(high, decay) }
    })
  }

  /** Handle a live event: draw its points, or load all points again. */
  add(event) {
    for (const { curves, reload } of this.charts) {
      const result = event.hello ? "again" : curves.add(event)
      if (result === "again") reload()
      else if (result) this.draw()
    }
  }

  end() { this.charts.forEach(one => one.chart.end()) }

  /** Make the drop-down that adds a chart. names: names of metrics. */
  adder(names) {
    const add = name => name && this.show([...this.metrics, name])
    const drawn = names.filter(name => !name.startsWith("yardstick/"))
    return select(t("Add a chart"), [["", "…"], ...drawn], "", add)
  }
}

/** Set a performance mark after the next paint. Tests read "drawn" to measure the page. */
function markTime(name) {
  performance.clearMarks(name)
  requestAnimationFrame(() => setTimeout(() => performance.mark(name)))
}

/** Compare two values for sort(): numbers come first, then texts, then missing values. */
function compareValues(a, b, descending) {
  const rank = value => {
    if (value === undefined || value === null || value === "") return 2
    return typeof value === "number" ? 0 : 1
  }
  if (rank(a) !== rank(b)) return rank(a) - rank(b)
  const order = a < b ? -1 : a > b ? 1 : 0
  return descending ? -order : order
}

/** Return the title of a column. Names of metrics and settings are not translated. */
function titleOf(column) {
  const [first, ...rest] = column.split(" ")
  const words = { best: t("best"), last: t("last"), setting: t("setting") }
  return t(column) === column && rest.length && words[first]
    ? `${words[first]} ${rest.join(" ")}` : t(column)
}

/** Return whether the window is wider than on a phone, where chart controls are collapsed. */
export const isWide = () => innerWidth > 800

export async function show(main) {
  let found       // the response of api/runs
  let order = []  // its runs that match the filter, sorted
  let reads = 0   // reloads while the server was still reading logs
  const hidden = new Set(state.getJson("hide", [])), styles = new Map()
  let jobs = []   // the queue, the newest job first
  const styleOf = name => styles.get(name) || { color: "#888", hidden: true }
  const isShown = run => !styleOf(run.name).hidden
  const marksOf = metric => yardsticks(metric, found.runs.filter(isShown))
  const charts = new Charts({ styleOf, marksOf, defaultMetrics: ["loss/val", "loss/train"] })
  const opened = new Set(state.getJson("open", []))  // names of the expanded groups
  let groups = []  // groups of runs that differ only in the seed, if the filter matches all
  const body = card(), parallel = h("div"), note = h("div")
  const tools = h("details", { class: "card tools" })
  /** Return the state of a run; for a group, its slowest training's, or the one shared by all. */
  function statusOf(run) {
    if (!run.runs) return status(run, jobs.find(job => job.out_dir === run.name))
    const members = found.runs.filter(member => run.runs.includes(member.name))
    const left = member => member.time_left?.left ?? 0
    const training = members.filter(member => member.training).sort((a, b) => left(b) - left(a))
    if (training.length) return statusOf(training[0])
    const all = members.map(statusOf)
    return all.every(([text]) => text === all[0][0]) ? all[0] : ["", "soft"]
  }

  /** Return the cells of a run or of a group of runs as { column: value }. */
  const values = run => ({ ...run.settings, ...run.results, run: run.name, tags: run.tags,
    status: statusOf(run)[0] })
  /** Return the sort order of the table: the user's choice, or the metric from good to bad. */
  const sorting = () => state.get("sort")
    ? { column: state.get("sort"), descending: state.get("down") === "1" }
    : { column: found.sort, descending: found.descending }

  /** Return the filter as a regular expression; if it is malformed, one that matches all. */
  function filter() {
    try {
      return new RegExp(state.get("filter"), "i")
    } catch {
      notify(t("Not a regular expression"), true)
      return /^/
    }
  }

  /** Return a run's group, whose runs differ only in the seed, if it has one. */
  const groupOf = run => groups.find(group => group.runs.includes(run.name))
  const closedGroup = run => {
    const group = groupOf(run)
    return group && !opened.has(group.name) ? group : undefined
  }

  /**
   * Filter and sort the runs, those of other programs last, and set the style of each: colour,
   * dash, group, whether it is hidden. The runs of a group are adjacent. A collapsed group of runs
   * that differ only in the seed is drawn as one curve, unless the user groups by a setting.
   */
  function arrange() {
    const by = state.get("group"), pattern = filter(), { column, descending } = sorting()
    const matching = found.runs.filter(run =>
      pattern.test(run.name) || pattern.test(run.tags || ""))
    const names = new Set(matching.map(run => run.name))
    groups = by ? [] : found.groups.filter(group => group.runs.every(name => names.has(name)))
    const groupName = run => by ? `${by}=${run.settings[by]}` : closedGroup(run)?.name
    const keyOf = run => groupName(run) ?? `run ${run.name}`
    const keys = [...new Set(matching.map(keyOf))]
    styles.clear()
    for (const run of matching) {
      const group = groupName(run), isAlone = group === undefined
      const own = isAlone && run.color && { color: run.color, dash: "" }
      styles.set(run.name, {
        hidden: hidden.has(run.name), group, ...own || curveStyle(keys.indexOf(keyOf(run))) })
    }
    // A run is sorted by the row of its group, if any, then by its own. Compute the values once.
    const keyed = matching.map(run => {
      const row = groupOf(run) ?? run
      return { run, row, ofRow: values(row)[column], ofRun: values(run)[column] }
    })
    keyed.sort((a, b) => a.run.foreign - b.run.foreign
      || compareValues(a.ofRow, b.ofRow, descending) || compareValues(a.row.name, b.row.name)
      || compareValues(a.ofRun, b.ofRun, descending))
    order = keyed.map(({ run }) => run)
  }

  /**
   * Return the settings in which the shown rows differ. Runs of other programs may lack a setting,
   * so only those that have it are compared, separately from ours. A collapsed group has no
   * settings in which its runs may differ, such as the seed.
   */
  function differing() {
    const shown = order.filter(isShown), compared = shown.length ? shown : order
    const count = (isForeign, name) => {
      const rows = compared.filter(run => run.foreign === isForeign)
      const all = rows.map(run => (closedGroup(run) ?? run).settings[name])
      const isCounted = value => value !== undefined && !(isForeign && value === null)
      return new Set(all.filter(isCounted)).size
    }
    return found.settings.filter(name => count(false, name) > 1 || count(true, name) > 1)
  }

  /** Redraw everything after the user has changed a setting. reload: true loads new points. */
  function changed(reload) {
    arrange()
    drawTable()
    if (reload === true) charts.build()
    else charts.draw()
  }

  /** Warn if the losses of the runs are not comparable. */
  function drawNote() {
    const text = t("Vocabularies differ, so losses per token do not compare; bits per byte do")
    note.replaceChildren(found.vocabularies_differ ? soft(text) : "")
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
    const attributes = { "data-column": name, "aria-sort": isSorted ? direction : "none" }
    return h("th", { scope: "col", ...attributes },
      h("button", { onclick: sort }, titleOf(name), isSorted && (descending ? " ▾" : " ▴")))
  }

  /** Make the row of a group for its means, with empty cells; update() fills them. */
  function groupRow(group, columns) {
    const { name, runs, n } = group, isOpen = opened.has(name)
    const toggle = () => {
      if (isOpen) opened.delete(name)
      else opened.add(name)
      state.set({ open: opened.size ? JSON.stringify([...opened]) : "" })
      changed()
    }
    const isHidden = runs.every(run => hidden.has(run))
    const box = h("input", {
      type: "checkbox", checked: !isHidden, "aria-label": `${t("Show")} ${name}`,
      style: `accent-color: ${isOpen ? "var(--accent)" : styleOf(runs[0]).color}`,
      onchange: event => setHidden(runs, !event.target.checked) })
    const opener = button(`${isOpen ? "▾" : "▸"} ${name}`, toggle, {
      class: "plain", "aria-expanded": String(isOpen) })
    const count = t("{n} runs").replace("{n}", runs.length)
    const first = h("td", {}, h("span", { class: "row" }, box, opener,
      h("span", { class: "soft" }, count)))
    const title = `${t("mean ± standard deviation")}, n = ${n}`
    const cell = column =>
      h("td", { "data-column": column, title: column === found.sort && title })
    const attributes = { class: isHidden ? "hidden" : "", "data-group": name }
    return h("tr", attributes, first, columns.map(cell))
  }

  /** Make a row with empty cells; update() fills them. */
  function runRow(run, columns) {
    const box = h("input", {
      type: "checkbox", checked: !hidden.has(run.name), "aria-label": `${t("Show")} ${run.name}`,
      style: `accent-color: ${styleOf(run.name).color}`,
      onchange: event => setHidden([run.name], !event.target.checked) })
    const name = h("a", { href: link("run", { run: run.name }) }, run.name)
    const first = h("td", {}, h("span", { class: "row" }, box, name,
      h("span", { class: "bad odd" })))
    const kind = `${hidden.has(run.name) ? "hidden" : ""} ${groupOf(run) ? "member" : ""}`.trim()
    return h("tr", { class: kind, "data-run": run.name }, first,
      columns.map(column => h("td", { "data-column": column })))
  }

  /**
   * Draw the table. Its columns are the default sort column, the state, other results, settings
   * and tags. Runs of other programs are at the end.
   */
  function drawTable() {
    const settings = differing()
    const tags = order.some(run => run.tags) ? ["tags"] : []
    const others = found.columns.filter(name => name !== found.sort)
    const columns = [found.sort, "status", ...others, ...settings, ...tags]
    const { scrollTop = 0, scrollLeft = 0 } = body.firstChild ?? {}
    const rows = [], shownGroups = new Set()
    for (const [n, run] of order.entries()) {
      if (n > 0 && run.foreign && !order[n - 1].foreign) {
        const title = h("th", { scope: "rowgroup", colspan: 1 + columns.length },
          t("Runs of other programs"))
        rows.push(h("tr", {}, title))
      }
      const group = groupOf(run)
      if (group && !shownGroups.has(group)) rows.push(groupRow(group, columns))
      if (group) shownGroups.add(group)
      if (!closedGroup(run)) rows.push(runRow(run, columns))
    }
    body.replaceChildren(table(t("Runs"), ["run", ...columns].map(headCell), rows, "runs"))
    update()
    Object.assign(body.firstChild, { scrollTop, scrollLeft })
    const shown = order.filter(run => !hidden.has(run.name))
    parallel.replaceChildren(...coordinates(shown, settings, found.sort, styleOf))
  }

  /** Fill the cells in place, so that the table keeps its scroll position and focus. */
  function update() {
    const runs = new Map(found.runs.map(run => [run.name, run]))
    for (const line of body.querySelectorAll("tr[data-run], tr[data-group]")) {
      const group = groups.find(each => each.name === line.dataset.group)
      const run = group ?? runs.get(line.dataset.run), now = values(run)
      const deviation = group && group.sd !== null ? ` ± ${format(group.sd)}` : ""
      for (const cell of line.querySelectorAll("[data-column]")) {
        const { column } = cell.dataset
        const text = format(now[column]) + (column === found.sort ? deviation : "")
        if (cell.textContent !== text) cell.textContent = text
      }
      const [text, kind] = statusOf(run), cell = line.querySelector("[data-column=status]")
      cell.className = kind
      cell.title = text  // shows the whole text if the cell cuts it off
      if (!group) line.querySelector(".odd").textContent = run.odd || ""
    }
  }

  function drawTools() {
    const names = () => order.map(run => run.name)
    const choose = values => {
      state.set(values)
      changed()
    }
    const search = h("input", {
      type: "search", value: state.get("filter"), placeholder: t("regular expression"),
      oninput: debounce(event => choose({ filter: event.target.value }), 200) })
    const saveShown = () => {
      const shown = names().filter(name => !hidden.has(name))
      downloadFrom("api/save", { runs: shown, group: state.get("group") }, "runs.html")
    }
    const groupings = [["", "–"], ...found.settings]
    tools.open = isWide()
    tools.replaceChildren(h("summary", {}, t("Filter and charts")), row(
      h("label", {}, t("Filter"), search),
      select(t("Group by"), groupings, state.get("group"), group => choose({ group })),
      charts.adder(found.metrics), controls(changed),
      button(t("Show all"), () => setHidden(names(), false)),
      button(t("Hide all"), () => setHidden(names(), true)),
      button(t("Save as one HTML file"), saveShown)))
  }

  /** Load the table. Return whether the default charts have changed. */
  async function load() {
    const before = found?.metric
    found = await get("api/runs")
    charts.defaultMetrics = [found.metric, "loss/train"].filter((name, n) =>
      n === 0 || found.metric !== name)
    arrange()
    drawNote()
    if (found.more && reads++ < 9) reload()  // the server is still reading logs
    return before !== undefined && before !== found.metric
  }

  const ready = load(), updateLater = throttle(update, 1000)
  const reload = throttle(() => load().then(changed), 1500)
  listen(event => {
    const run = event.run && found?.runs.find(other => other.name === event.run.name)
    if (run) {
      const isGrouped = found.groups.some(group => group.runs.includes(run.name))
      const isEvaluated = found.metric in (event.rows ?? {}) || run.training !== event.run.training
      const isFirst = !run.rows  // once it has rows, it may belong to a group
      Object.assign(run, event.run)
      if (isFirst || isGrouped && isEvaluated) reload()  // the server computes the means
      updateLater()
    } else if (event.run || event.hello) reload()
    if (event.jobs) {
      jobs = event.jobs
      if (found) updateLater()
    }
    charts.add(event)
  })
  main.append(h("h1", { class: "soft" }, t("Runs")), tools, note, charts.place, body, parallel)
  if (!state.get("charts")) await ready  // it sets the default charts
  await Promise.all([charts.build(ready), ready.then(drawTools)])
  // Let the browser paint the curves before the table is made.
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)))
  jobs = (await get("api/jobs")).jobs
  drawTable()
  if (!found.runs.length) notify(t("No runs yet: start one"))
  return { end: () => charts.end() }
}

/**
 * Return [a card with parallel coordinates], or [] if there is too little to show: an axis for each
 * numeric setting that differs (8 at most) and for the result, and a line for each run.
 */
function coordinates(runs, settings, result, styleOf) {
  const isNumber = value => typeof value === "number"
  const isNumericAndDiffers = name => {
    const all = runs.map(run => run.settings[name])
    return all.every(isNumber) && new Set(all).size > 1
  }
  const names = settings.filter(isNumericAndDiffers).slice(0, 8)
  if (runs.length < 3 || !names.length) return []
  const loss = run => run.results[result]
  const columns = names.map(name => ({ name, value: run => run.settings[name] }))
  columns.push({ name: result, value: loss })
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
    h("text", { x, y: 12, "text-anchor": "middle" }, titleOf(name)),
    h("text", { x: x + 4, y: 34 }, format(high)), h("text", { x: x + 4, y: 212 }, format(low))]
  const line = run => h("polyline", {
    fill: "none", stroke: styleOf(run.name).color, "stroke-width": 1.5,
    "stroke-dasharray": styleOf(run.name).dash,
    points: columns.map(({ x, y }) => `${x},${y(run)}`).join(" ") }, h("title", {}, run.name))
  const lines = runs.filter(run => isNumber(loss(run))).map(line)
  const picture = h("svg", { viewBox: "0 0 900 240", style: "min-width:600px" },
    columns.map(axis), lines)
  return [card(t("Settings and result"), h("div", { class: "scroll" }, picture))]
}
