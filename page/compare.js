// The runs: a table of what differs and what was reached, charts of all, parallel coordinates, one file to keep.
import { h, t, ask, say, state, link, number, throttle, listen, colors } from "./app.js"
import { Chart, Curves, axes, smooth, band } from "./charts.js"

/** What the reader chose, from the address. */
export const chosen = () => ({ axis: state.get("x", "tokens"), logx: state.get("logx") === "1", logy: state.get("logy", "1") === "1", share: +state.get("smooth", "0") })

/** Controls of axes and smoothing; change() is called when one was moved. */
export function controls(change) {
  const box = (name, label, otherwise) => h("label", {}, h("input", { type: "checkbox", checked: state.get(name, otherwise) === "1",
    onchange: e => { state.set({ [name]: e.target.checked ? "1" : "0" }); change() } }), t(label))
  return h("div", { class: "row" },
    h("label", {}, t("Over"), h("select", { onchange: e => { state.set({ x: e.target.value }); change(true) } },
      Object.entries(axes).map(([name, title]) => h("option", { value: name, selected: name === chosen().axis }, t(title))))),
    box("logx", "Log x", "0"), box("logy", "Log y", "1"),
    h("label", {}, t("Smoothing"), h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: String(chosen().share),
      oninput: throttle(() => change(), 60), onchange: e => { state.set({ smooth: e.target.value }); change() } })))
}

/** A grid of charts. pick(name, n): {color, hidden, group} of a run; metrics() are kept in the address. */
export class Charts {
  constructor(place, { run, pick, metrics, usual }) {
    Object.assign(this, { place, run, pick, usual, metrics, charts: [] })
    this.draw = throttle(() => { this.charts.forEach(c => c.paint()); mark("redrawn") }, 120)
  }
  get wanted() { return state.get("charts") ? state.get("charts").split(",") : this.usual }

  /** Draw the charts that are wanted; colours are known once `ready` is done. */
  async build(ready) {
    this.end()
    this.charts = this.wanted.map(metric => {
      const curves = new Curves(metric, chosen().axis, this.run)
      const chart = new Chart(metric, { axis: chosen().axis, csv: `api/csv?${new URLSearchParams({ metric, run: this.run || "" })}`,
        remove: () => { state.set({ charts: this.wanted.filter(m => m !== metric).join(",") }); this.build() } })
      const load = async range => { await curves.load(range); await paint() }
      const paint = () => chart.draw(...this.lines(curves), chosen())
      chart.onzoom = throttleLast(load, 250)
      return { chart, curves, load, paint }
    })
    this.place.replaceChildren(...this.charts.map(c => c.chart.element))
    await Promise.all(this.charts.map(async c => { await Promise.all([c.curves.load(), ready]); await c.paint() }))
    mark("drawn")
  }

  lines(curves) {
    const { share } = chosen(), groups = new Map(), raw = [], lines = [], bands = []
    for (const [name, line] of curves.lines) {
      const { color, hidden, group } = this.pick(name)
      if (hidden || !line.x.length) continue
      if (group === undefined) {
        if (share) raw.push({ name, color, ...line, alpha: 0.22, width: 1 })
        lines.push({ name, color, x: line.x, y: share ? smooth(line.y, share) : line.y })
      } else groups.set(group, [...groups.get(group) || [], { ...line, color }])
    }
    for (const [name, members] of groups) {
      const { x, y, low, high } = band(members.map(m => share ? { x: m.x, y: smooth(m.y, share) } : m)), color = members[0].color
      lines.push({ name: `${name} (${members.length})`, color, x, y, width: 2 })
      bands.push({ color, x, low, high })
    }
    return [[...raw, ...lines], bands]
  }

  take(event) {
    for (const { curves, load } of this.charts) {
      const news = curves.take(event)
      if (news === "again" || news && event.again) load()
      else if (news) this.draw()
    }
  }
  end() { this.charts.forEach(c => c.chart.end()) }

  /** A list of all metrics to add a chart of. */
  adder(names) {
    return h("label", {}, t("Add a chart"), h("select", { onchange: e => {
      if (e.target.value) { state.set({ charts: [...this.wanted, e.target.value].join(",") }); e.target.value = ""; this.build() } } },
    h("option", { value: "" }, "…"), names.map(name => h("option", {}, name))))
  }
}

/** Notes when a picture was drawn, for those who measure. */
function mark(name) {
  performance.clearMarks(name)
  requestAnimationFrame(() => setTimeout(() => performance.mark(name)))
}

function throttleLast(f, wait) {
  let timer
  return (...values) => { clearTimeout(timer); timer = setTimeout(() => f(...values), wait) }
}

const rank = value => value === null || value === undefined ? [2, 0] : typeof value === "number" ? [0, value] : [1, String(value)]
function before(a, b) {
  const [x, y] = [rank(a), rank(b)]
  return x[0] - y[0] || (x[1] < y[1] ? -1 : x[1] > y[1] ? 1 : 0)
}

export async function show(main) {
  let table, order = []
  const hidden = new Set(state.get("hide") ? JSON.parse(state.get("hide")) : [])
  const value = (run, column) => column === "run" ? run.name : column === "tags" ? run.tags : run.settings[column] ?? run.results[column]
  const byName = new Map()
  let matches = () => true

  /** Colour, group and whether it is shown, of each run. */
  function refresh() {
    const by = state.get("group"), groups = [], found = table.runs.map(run => by ? `${by}=${run.settings[by]}` : undefined)
    let filter = /^/
    try { filter = new RegExp(state.get("filter"), "i") } catch { say(t("Not a regular expression"), true) }
    matches = run => filter.test(run.name) || filter.test(run.tags || "")
    table.runs.forEach((run, n) => {
      const group = found[n]
      if (group !== undefined && !groups.includes(group)) groups.push(group)
      const color = group === undefined ? run.color || colors[n % colors.length] : colors[groups.indexOf(group) % colors.length]
      byName.set(run.name, { color, hidden: hidden.has(run.name) || !matches(run), group })
    })
  }
  const pick = name => byName.get(name) || { color: "#888", hidden: true }
  const colour = run => pick(run.name).color
  const charts = new Charts(h("div", { class: "grid" }), { pick, usual: ["loss/val", "loss/train"] })
  const body = h("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": t("Runs") }), parallel = h("div"), tools = h("div", { class: "card" })

  function sorted() {
    const [column, down] = [state.get("sort", "best loss/val"), state.get("down") === "1"]
    order = table.runs.filter(matches).sort((a, b) => before(value(a, column), value(b, column)) * (down ? -1 : 1))
  }
  function keepHidden() { state.set({ hide: hidden.size ? JSON.stringify([...hidden]) : "" }); changed() }

  function head(column) {
    const now = state.get("sort", "best loss/val") === column, down = state.get("down") === "1"
    return h("th", { scope: "col", "aria-sort": now ? down ? "descending" : "ascending" : "none" }, h("button", { onclick: () => {
      state.set({ sort: column, down: now && !down ? "1" : "" }); drawTable() } }, t(column), now ? down ? " ▾" : " ▴" : ""))
  }
  function drawTable() {
    sorted()
    const columns = ["run", "tags", ...table.settings, ...table.columns]
    const rows = order.map(run => h("tr", { class: hidden.has(run.name) ? "hidden" : "", "data-run": run.name }, columns.map((column, n) => n
      ? h("td", { "data-column": column }, number(value(run, column)))
      : h("td", {}, h("span", { class: "row" }, h("input", { type: "checkbox", checked: !hidden.has(run.name), "aria-label": `${t("Show")} ${run.name}`,
        style: `accent-color: ${colour(run)}`, onchange: e => { e.target.checked ? hidden.delete(run.name) : hidden.add(run.name); keepHidden() } }),
      h("a", { href: link("run", { run: run.name }) }, run.name), h("span", { class: "good trains" }, run.training ? `● ${t("trains")}` : ""))))))
    const at = body.scrollTop
    body.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, columns.map(head))), h("tbody", {}, rows)))
    body.scrollTop = at
  }
  function changed(rebuild) {
    refresh()
    drawTable()
    parallel.replaceChildren(...coordinates(order.filter(r => !hidden.has(r.name)), table.settings, colour))
    rebuild === true ? charts.build() : charts.draw()
  }
  /** New numbers in the table as it stands, so that nobody loses his place in it. */
  const update = throttle(() => {
    for (const row of body.querySelectorAll("tr[data-run]")) {
      const run = table.runs.find(r => r.name === row.dataset.run)
      for (const cell of row.querySelectorAll("[data-column]")) {
        const now = number(value(run, cell.dataset.column))
        if (cell.textContent !== now) cell.textContent = now
      }
      row.querySelector(".trains").textContent = run.training ? `● ${t("trains")}` : ""
    }
  }, 1000), again = throttle(() => load().then(changed), 1500)
  async function load() { table = await ask("api/runs"); refresh() }

  function drawTools() {
    tools.replaceChildren(h("div", { class: "row" },
      h("label", {}, t("Filter"), h("input", { type: "search", value: state.get("filter"), placeholder: "regex", oninput: throttleLast(e => {
        state.set({ filter: e.target.value }); changed() }, 200) })),
      h("label", {}, t("Group by"), h("select", { onchange: e => { state.set({ group: e.target.value }); changed() } },
        h("option", { value: "" }, "–"), table.settings.map(name => h("option", { selected: name === state.get("group") }, name)))),
      charts.adder(table.metrics), controls(changed),
      h("button", { onclick: () => { order.forEach(run => hidden.delete(run.name)); keepHidden() } }, t("Show all")),
      h("button", { onclick: () => { order.forEach(run => hidden.add(run.name)); keepHidden() } }, t("Hide all")),
      h("button", { onclick: save }, t("Save as one HTML file"))))
  }
  async function save() {
    const names = order.filter(run => !hidden.has(run.name)).map(run => run.name)
    const answer = await fetch("api/save", { method: "POST", body: JSON.stringify({ runs: names }) })
    if (!answer.ok) return say((await answer.json()).error, true)
    h("a", { href: URL.createObjectURL(await answer.blob()), download: "runs.html" }).click()
    say(t("Saved"))
  }

  const drawn = load()
  listen(event => {
    const run = event.run && table?.runs.find(r => r.name === event.run.name)
    if (run) { Object.assign(run, event.run); update(); charts.take(event) } else if (event.run || event.gone) again(), charts.take(event)
  })
  main.append(h("h1", { class: "soft" }, t("Runs")), tools, charts.place, h("div", { class: "card" }, body), parallel)
  await Promise.all([charts.build(drawn), drawn.then(drawTools)])
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)))  // the curves first
  drawTable()
  if (!table.runs.length) say(t("No runs yet: start one"))
  parallel.replaceChildren(...coordinates(order, table.settings, colour))
  return { end: () => charts.end() }
}

/** Parallel coordinates of the numeric settings that differ, to the best loss: lines from one axis to the next. */
function coordinates(runs, settings, colour) {
  const result = run => run.results["best loss/val"] ?? run.results["last loss/train"]
  const numeric = settings.filter(s => runs.length && runs.every(r => typeof r.settings[s] === "number"))
    .filter(s => new Set(runs.map(r => r.settings[s])).size > 1).slice(0, 8)
  if (runs.length < 3 || numeric.length < 1) return []
  const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg"), W = 900, H = 240
  const put = (tag, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag)
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value)
    if (text !== undefined) element.textContent = text
    picture.append(element)
    return element
  }
  picture.setAttribute("viewBox", `0 0 ${W} ${H}`)
  const columns = [...numeric.map(s => [s, r => r.settings[s]]), ["best loss/val", result]]
  const x = n => 60 + n * (W - 140) / (columns.length - 1)
  const scales = columns.map(([, f]) => {
    const values = runs.map(f).filter(v => typeof v === "number"), low = Math.min(...values), high = Math.max(...values)
    const log = low > 0 && high / low > 20, g = v => log ? Math.log(v) : v
    return { low, high, y: v => 25 + (H - 50) * (1 - (g(v) - g(low)) / (g(high) - g(low) || 1)) }
  })
  columns.forEach(([name], n) => {
    put("path", { d: `M${x(n)} 25V${H - 25}`, stroke: "var(--line)" })
    put("text", { x: x(n), y: 12, "text-anchor": "middle" }, name)
    put("text", { x: x(n) + 4, y: 34 }, number(scales[n].high))
    put("text", { x: x(n) + 4, y: H - 28 }, number(scales[n].low))
  })
  for (const run of runs) if (typeof result(run) === "number")
    put("polyline", { fill: "none", stroke: colour(run), "stroke-width": 1.5, "stroke-opacity": 0.75,
      points: columns.map(([, f], n) => `${x(n)},${scales[n].y(f(run))}`).join(" ") }).append(
      Object.assign(document.createElementNS("http://www.w3.org/2000/svg", "title"), { textContent: run.name }))
  return [h("section", { class: "card" }, h("h2", {}, t("Settings and result")), h("div", { class: "scroll" }, picture))]
}
