// The runs: a table of what differs and what was reached, charts of all, parallel coordinates, one file to keep.
import { ask, colors, link, listen, number, save, say, settle, state, tell, throttle } from "./app.js"
import { Chart, Curves, axes, smooth } from "./charts.js"
import { h, select, table } from "./dom.js"
import { t } from "./words.js"

/** What the reader chose, from the address. */
const chosen = () => ({ axis: state.get("x", "tokens"), logx: state.get("logx") === "1",
  logy: state.get("logy", "1") === "1", share: +state.get("smooth", "0") })

/** Controls of axes and smoothing; change() is called when one was moved, change(true) where curves are other ones. */
export function controls(change) {
  const set = (name, value, other) => { state.set({ [name]: value }); change(other) }
  const box = (name, label) => h("label", {}, h("input", { type: "checkbox", checked: chosen()[name],
    onchange: e => set(name, e.target.checked ? "1" : "0") }), t(label))
  const slider = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: chosen().share,
    oninput: throttle(() => set("smooth", slider.value), 100) })
  const over = Object.entries(axes).map(([name, title]) => [name, t(title)])
  return h("div", { class: "row" }, select(t("Over"), over, chosen().axis, name => set("x", name, true)),
    box("logx", "Log x"), box("logy", "Log y"), h("label", {}, t("Smoothing"), slider))
}

/** A grid of charts. pick(name): {color, hidden, group} of a run; usual: the metrics, unless the address has others. */
export class Charts {
  constructor({ run = "", pick, usual }) {
    Object.assign(this, { place: h("div", { class: "grid" }), run, pick, usual, charts: [] })
    this.draw = throttle(async () => { await Promise.all(this.charts.map(c => c.paint())); mark("redrawn") }, 120)
  }
  get wanted() { return state.get("charts") ? state.get("charts").split(",") : this.usual }
  want(metrics) { state.set({ charts: metrics.join(",") }); this.build() }

  /** Draw the charts that are wanted; colours are known once `ready` is done. */
  async build(ready) {
    this.end()
    this.charts = this.wanted.map(metric => this.chart(metric))
    this.place.replaceChildren(...this.charts.map(c => c.chart.element))
    await Promise.all(this.charts.map(async c => { await Promise.all([c.curves.load(), ready]); await c.paint() }))
    mark("drawn")
  }

  chart(metric) {
    const { axis } = chosen(), curves = new Curves(metric, axis, this.run)
    const chart = new Chart(metric, { axis, csv: `api/csv?${new URLSearchParams({ metric, run: this.run })}`,
      remove: () => this.want(this.wanted.filter(m => m !== metric)) })
    const paint = async () => chart.draw(...await this.lines(curves), chosen())
    const load = async range => { await curves.load(range); await paint() }
    chart.onzoom = settle(load, 250)
    return { chart, curves, paint, again: throttle(load, 500) }
  }

  /** [lines, bands] of the runs that are shown; a group's mean and band are the server's, as compare.py has them. */
  async lines(curves) {
    const { share } = chosen(), groups = {}, raw = [], lines = []
    for (const [name, { x, y }] of curves.lines) {
      const { color, hidden, group } = this.pick(name)
      if (hidden || !x.length) continue
      if (group !== undefined) (groups[group] ??= { color, runs: [] }).runs.push(name)
      else {
        if (share) raw.push({ name, color, x, y, alpha: 0.22, width: 1 })
        lines.push({ name, color, x, y: smooth(y, share) })
      }
    }
    const found = Object.entries(groups), asked = { metric: curves.metric, x: curves.axis, ...curves.range }
    const parts = found.length ? await tell("api/bands", { ...asked, groups: found.map(([, group]) => group.runs) }) : []
    const bands = parts.map(([x, y, low, high], n) => ({ color: found[n][1].color, x, y: smooth(y, share),
      name: `${found[n][0]} (${found[n][1].runs.length})`, low: smooth(low, share), high: smooth(high, share), width: 2 }))
    return [[...raw, ...lines, ...bands], bands]
  }

  take(event) {
    for (const { curves, again } of this.charts) {
      const news = event.hello ? "again" : curves.take(event)
      if (news === "again") again()
      else if (news) this.draw()
    }
  }
  end() { this.charts.forEach(c => c.chart.end()) }

  /** A list of all metrics to add a chart of. */
  adder(names) {
    return select(t("Add a chart"), [["", "…"], ...names], "", name => name && this.want([...this.wanted, name]))
  }
}

/** Notes when a picture was drawn, for those who measure. */
function mark(name) {
  performance.clearMarks(name)
  requestAnimationFrame(() => setTimeout(() => performance.mark(name)))
}

/** Numbers before words, and what is missing behind both. */
function before(a, b) {
  const rank = value => (value ?? null) === null ? 2 : typeof value === "number" ? 0 : 1
  return rank(a) - rank(b) || (a < b ? -1 : a > b ? 1 : 0)
}

export async function show(main) {
  let found, order = [], tries = 0
  const hidden = new Set(JSON.parse(state.get("hide", "[]"))), looks = new Map()
  const values = run => ({ ...run.results, ...run.settings, run: run.name, tags: run.tags })
  const pick = name => looks.get(name) || { color: "#888", hidden: true }
  const charts = new Charts({ pick, usual: ["loss/val", "loss/train"] })
  const body = h("div", { class: "card" }), parallel = h("div"), tools = h("div", { class: "card" })
  const sort = () => ({ column: state.get("sort", "best loss/val"), down: state.get("down") === "1" })

  /** Order, colour, group and whether it is shown, of each run. */
  function refresh() {
    const by = state.get("group"), groups = [...new Set(found.runs.map(run => run.settings[by]))], { column, down } = sort()
    let filter = /^/
    try { filter = new RegExp(state.get("filter"), "i") } catch { say(t("Not a regular expression"), true) }
    const matches = run => filter.test(run.name) || filter.test(run.tags || "")
    found.runs.forEach((run, n) => looks.set(run.name, { hidden: hidden.has(run.name) || !matches(run),
      group: by ? `${by}=${run.settings[by]}` : undefined,
      color: by ? colors[groups.indexOf(run.settings[by]) % colors.length] : run.color || colors[n % colors.length] }))
    order = found.runs.filter(matches).sort((a, b) => before(values(a)[column], values(b)[column]) * (down ? -1 : 1))
  }
  function changed(rebuild) {
    refresh()
    drawTable()
    if (rebuild === true) charts.build()
    else charts.draw()
  }
  function hide(names, yes) {
    for (const name of names) hidden[yes ? "add" : "delete"](name)
    state.set({ hide: hidden.size ? JSON.stringify([...hidden]) : "" })
    changed()
  }

  function head(name) {
    const { column, down } = sort(), now = name === column
    const turn = () => { state.set({ sort: name, down: now && !down ? "1" : "" }); refresh(); drawTable() }
    return h("th", { scope: "col", "aria-sort": !now ? "none" : down ? "descending" : "ascending" },
      h("button", { onclick: turn }, t(name), now ? down ? " ▾" : " ▴" : ""))
  }
  function row(run, columns) {
    const box = h("input", { type: "checkbox", checked: !hidden.has(run.name), "aria-label": `${t("Show")} ${run.name}`,
      style: `accent-color: ${pick(run.name).color}`, onchange: e => hide([run.name], !e.target.checked) })
    const first = h("td", {}, h("span", { class: "row" }, box, h("a", { href: link("run", { run: run.name }) }, run.name),
      h("span", { class: "good trains" }), h("span", { class: "bad odd" })))
    return h("tr", { class: hidden.has(run.name) ? "hidden" : "", "data-run": run.name }, first,
      columns.map(column => h("td", { "data-column": column })))
  }
  function drawTable() {
    const columns = ["tags", ...found.settings, ...found.columns], { scrollTop = 0, scrollLeft = 0 } = body.firstChild ?? {}
    body.replaceChildren(table(t("Runs"), ["run", ...columns].map(head), order.map(run => row(run, columns)), ""))
    update()
    Object.assign(body.firstChild, { scrollTop, scrollLeft })
    parallel.replaceChildren(...coordinates(order.filter(run => !hidden.has(run.name)), found.settings, pick))
  }
  /** The numbers of the table as it stands, so that nobody loses his place in it. */
  function update() {
    const runs = new Map(found.runs.map(run => [run.name, run]))
    for (const row of body.querySelectorAll("tr[data-run]")) {
      const run = runs.get(row.dataset.run), of = values(run)
      for (const cell of row.querySelectorAll("[data-column]")) {
        const now = number(of[cell.dataset.column])
        if (cell.textContent !== now) cell.textContent = now
      }
      row.querySelector(".trains").textContent = run.training ? `● ${t("trains")}` : ""
      row.querySelector(".odd").textContent = run.odd || ""
    }
  }

  function drawTools() {
    const button = (text, onclick) => h("button", { onclick }, t(text)), names = () => order.map(run => run.name)
    const shown = () => names().filter(name => !hidden.has(name)), group = name => { state.set({ group: name }); changed() }
    tools.replaceChildren(h("div", { class: "row" },
      h("label", {}, t("Filter"), h("input", { type: "search", value: state.get("filter"), placeholder: "regex",
        oninput: settle(e => { state.set({ filter: e.target.value }); changed() }, 200) })),
      select(t("Group by"), [["", "–"], ...found.settings], state.get("group"), group),
      charts.adder(found.metrics), controls(changed),
      button("Show all", () => hide(names(), false)), button("Hide all", () => hide(names(), true)),
      button("Save as one HTML file", () => save("api/save", { runs: shown(), group: state.get("group") }, "runs.html"))))
  }

  async function load() {
    found = await ask("api/runs")
    refresh()
    if (found.more && tries++ < 9) again()  // logs are still being read
  }
  const ready = load(), later = throttle(update, 1000), again = throttle(() => load().then(changed), 1500)
  listen(event => {
    const run = event.run && found?.runs.find(r => r.name === event.run.name)
    if (run) {
      Object.assign(run, event.run)
      later()
    } else if (event.run || event.hello) again()
    charts.take(event)
  })
  main.append(h("h1", { class: "soft" }, t("Runs")), tools, charts.place, body, parallel)
  await Promise.all([charts.build(ready), ready.then(drawTools)])
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)))  // the curves first
  drawTable()
  if (!found.runs.length) say(t("No runs yet: start one"))
  return { end: () => charts.end() }
}

/** Parallel coordinates of the numeric settings that differ, to the best loss: lines from one axis to the next. */
function coordinates(runs, settings, pick) {
  const all = name => runs.map(run => run.settings[name]), isNumber = value => typeof value === "number"
  const numeric = settings.filter(name => all(name).every(isNumber) && new Set(all(name)).size > 1).slice(0, 8)
  if (runs.length < 3 || !numeric.length) return []
  const columns = [...numeric.map(name => [name, run => run.settings[name]]),
    ["best loss/val", run => run.results["best loss/val"] ?? run.results["last loss/train"]]]
  const axes = columns.map(([name, of], n) => {
    const values = runs.map(of).filter(isNumber), low = Math.min(...values), high = Math.max(...values)
    const scale = low > 0 && high / low > 20 ? Math.log : Number
    const y = run => 25 + 190 * (1 - (scale(of(run)) - scale(low)) / (scale(high) - scale(low) || 1))
    return { name, of, low, high, y, x: 60 + n * 760 / (columns.length - 1) }
  })
  const picture = h("svg", { viewBox: "0 0 900 240" },
    axes.map(({ name, low, high, x }) => [h("path", { d: `M${x} 25V215`, stroke: "var(--line)" }),
      h("text", { x, y: 12, "text-anchor": "middle" }, name), h("text", { x: x + 4, y: 34 }, number(high)),
      h("text", { x: x + 4, y: 212 }, number(low))]),
    runs.filter(run => isNumber(axes.at(-1).of(run))).map(run => h("polyline", { fill: "none", "stroke-width": 1.5,
      stroke: pick(run.name).color, "stroke-opacity": 0.75, points: axes.map(({ x, y }) => `${x},${y(run)}`).join(" ") },
    h("title", {}, run.name))))
  return [h("section", { class: "card" }, h("h2", {}, t("Settings and result")), h("div", { class: "scroll" }, picture))]
}
