// One run: its curves as they grow, what it wrote, what it left on disk.
import { ask, copyable, link, listen, number, say, state, tell, throttle } from "./app.js"
import { Charts, controls } from "./compare.js"
import { h, select, table } from "./dom.js"
import { t } from "./words.js"

const USUAL = ["loss/train", "loss/val", "lr", "grad/norm", "perf/tokens_per_sec", "logits/entropy"]
const TOLD = ["loss/train", "loss/val", "bpb/val", "perf/tokens_per_sec"]
const TABLES = { samples: ["Samples", "prompt", "how", "text"],
  predictions: ["Predictions", "split", "input", "target", "p(target)", "1st", "p(1st)", "2nd", "p(2nd)", "3rd", "p(3rd)"] }
const card = (title, ...content) => h("section", { class: "card" }, h("h2", {}, t(title)), ...content)
const soft = (...words) => h("p", { class: "soft" }, ...words)

export async function show(main) {
  const name = state.get("run"), { knobs } = await ask("api/knobs")
  let run = await ask("api/run", { run: name }), { jobs } = await ask("api/jobs"), first = null
  const charts = new Charts({ run: name, pick: () => ({ color: "#0072b2" }),
    usual: USUAL.filter(m => m in run.results || m === "loss/train") })
  const top = h("div", { class: "card" }), tables = h("div"), side = h("div")

  function drawTop() {
    const { iter = 0 } = run.results, all = run.max_iters || iter || 1, now = Date.now()
    first = first && first.iter <= iter ? first : { iter, now }
    const left = run.training && iter > first.iter && (now - first.now) / (iter - first.iter) * (all - iter) / 1000
    const says = run.training ? `● ${t("trains")}` : t(iter >= all ? "finished" : "not training")
    const stop = () => tell("api/stop", { run: name }).then(() => say(t("Stopping: it saves first")))
    const resume = () => tell("api/start", { resume: name, knobs: {} }).then(() => say(t("Queued")))
    top.replaceChildren(
      h("div", { class: "row" }, h("h1", { class: "grow" }, name),
        h("span", { class: run.training ? "good" : "soft" }, says),
        h("button", { onclick: run.training ? stop : resume }, t(run.training ? "Stop" : "Resume")),
        h("a", { href: link("start", changed()) }, t("Duplicate with changes")),
        /^https?:\/\//.test(run.wandb) && h("a", { href: run.wandb, rel: "noopener noreferrer", target: "_blank" }, "W&B")),
      h("progress", { max: all, value: Math.min(iter, all), "aria-label": t("Progress") }),
      soft(`${t("step")} ${number(iter)} ${t("of")} ${number(all)}`, left !== false && ` · ${t("left")} ${time(left)}`,
        TOLD.map(k => k in run.results && ` · ${k} ${number(run.results[k])}`)),
      run.odd ? h("p", { class: "bad" }, run.odd) : "",
      jobs.find(j => j.out_dir === name)?.state === "failed" ? h("p", { class: "bad" }, t("failed")) : "")
  }
  function changed() {  // what the form shows for a copy of this run
    const from = Object.entries({ ...run.config, out_dir: `${name}-2` })
    return from.filter(([k, v]) => k in knobs && k !== "init_from" && v !== knobs[k].value)
  }

  function drawTables() {
    const iters = run.tables.map(r => r.iter), at = +state.get("step", iters.at(-1) ?? "")
    const row = run.tables.findLast(r => r.iter === at) || run.tables.at(-1) || {}
    const kinds = Object.entries(TABLES).filter(([kind]) => run.tables.some(r => r[kind]))
    const choose = step => { state.set({ step }); drawTables() }
    tables.replaceChildren(...kinds.map(([kind, [title, ...heads]]) => card(title,
      select(t("step"), iters.map(i => [i, number(i)]), row.iter, choose),
      table(t(title), heads.map(t), (row[kind] || []).map(cells => [cells].flat().map(number))))))
  }

  function drawSide() {
    const job = jobs.find(j => j.out_dir === name), said = h("pre", { tabindex: 0 }), found = run.evaluation
    if (job) {
      ask("api/console", { job: job.id }).then(({ text }) => {
        said.textContent = text
        said.scrollTop = said.scrollHeight
      })
    }
    const prompt = run.config.sample_prompt?.split?.("|")[0] || ""
    const files = Object.entries(run.files).map(([file, size]) => [soft(`${file} · ${(size / 2 ** 20).toFixed(1)} MiB`),
      copyable(`./run ${quote(`${name}/${file}`)} -i ${quote(prompt)}`)])
    const alerts = run.alerts.map(([title, text]) => h("li", { class: "bad" }, `${title}: ${text}`))
    const settings = Object.entries(run.config).map(([k, v]) =>
      [k, typeof v === "object" ? JSON.stringify(v).slice(0, 300) : String(v)])
    side.replaceChildren(
      card("Files", files, soft(`${t("Checkpoints")}: ${run.checkpoints.join(", ") || t("None")}`)),
      card("Alerts", alerts.length ? h("ul", {}, alerts) : soft(t("None"))),
      job ? card("Console", said) : "", found.matrix ? card("Evaluation", ...evaluation(found)) : "",
      notes(), card("Settings", table(t("Settings"), [], settings)))
  }
  function notes() {
    const text = h("textarea", { rows: 3, "aria-label": t("Notes") }, run.notes || "")
    const value = /^#[0-9a-f]{6}$/i.test(run.color) ? run.color : "#0072b2"
    const color = h("input", { type: "color", value, "aria-label": t("Colour") })
    const tags = h("input", { value: run.tags || "", "aria-label": t("Tags"), placeholder: t("Tags") })
    const keep = () => tell("api/notes", { run: name, notes: text.value, tags: tags.value, color: color.value })
    return card("Notes", text, h("div", { class: "row" }, color, tags,
      h("button", { onclick: () => keep().then(() => say(t("Saved"))) }, t("Save"))))
  }

  const reread = throttle(async () => {
    run = { ...run, ...await ask("api/run", { run: name }) }
    drawTop()
    drawTables()
    if (!side.contains(document.activeElement)) drawSide()
  }, 2000)
  listen(event => {
    if (event.jobs) jobs = event.jobs
    if (event.jobs || event.hello) reread()
    if (event.hello) charts.take(event)
    if (event.run?.name !== name) return
    const trained = run.training
    Object.assign(run, event.run)
    charts.take(event)
    drawTop()
    if (trained !== run.training || event.again || "loss/val" in (event.rows || {})) reread()
  })
  const metrics = Object.keys(run.results).filter(k => k.includes("/") || k === "lr")
  const tools = h("div", { class: "card" }, h("div", { class: "row" }, charts.adder(metrics),
    controls(rebuild => rebuild === true ? charts.build() : charts.draw())))
  main.append(h("p", {}, h("a", { href: "#runs" }, `← ${t("All runs")}`)), top,
    h("div", { class: "sides" }, h("div", {}, tools, charts.place, tables), side))
  drawTop()
  drawTables()
  drawSide()
  await charts.build()
  return { end: () => charts.end() }
}

const quote = text => `'${text.replaceAll("'", "'\\''")}'`
function time(seconds) {
  if (seconds > 5400) return `${(seconds / 3600).toFixed(1)} h`
  return seconds > 90 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds)} s`
}

/** What evaluate.py left: accuracy, the confusion matrix, the answers that were wrong. */
function evaluation({ data, accuracy, names = [], matrix, columns = [], rows = [] }) {
  const most = Math.max(1, ...matrix.flat())
  const tint = (n, good) => `background: color-mix(in srgb, var(--${good}) ${Math.round(45 * n / most)}%, transparent)`
  const cell = (n, good) => h("td", { style: n ? tint(n, good) : null }, String(n))
  const counts = matrix.map((row, i) => [h("th", { scope: "row" }, names[i]),
    ...row.map((n, j) => cell(n, i === j ? "good" : "bad"))])
  return [h("p", {}, `${data}: ${t("accuracy")} ${number(accuracy)}`),
    table(t("Evaluation"), [t("expected"), ...names], counts, ""),
    rows.length > 0 && table(t("Failures"), columns.slice(1), rows.map(row => row.slice(1).map(number)))]
}
