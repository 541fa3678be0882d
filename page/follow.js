// One run: its curves as they grow, what it wrote, what it left on disk.
import { h, t, ask, say, state, link, number, throttle, listen, copyable } from "./app.js"
import { Charts, controls } from "./compare.js"

const USUAL = ["loss/train", "loss/val", "lr", "grad/norm", "perf/tokens_per_sec", "logits/entropy"]
const HEADS = { samples: ["prompt", "how", "text"], predictions: ["split", "input", "target", "p(target)", "1st", "p(1st)", "2nd", "p(2nd)", "3rd", "p(3rd)"] }
const card = (title, ...content) => h("section", { class: "card" }, h("h2", {}, t(title)), ...content)

export async function show(main) {
  const name = state.get("run")
  let run = await ask(`api/run?${new URLSearchParams({ run: name })}`), jobs = (await ask("api/jobs")).jobs, first = null
  const charts = new Charts(h("div", { class: "grid" }), { run: name, pick: () => ({ color: "#0072b2" }),
    usual: USUAL.filter(m => m in run.results || m === "loss/train") })
  const top = h("div", { class: "card" }), tables = h("div"), side = h("div")

  function drawTop() {
    const { iter = 0 } = run.results, all = run.max_iters || iter || 1, now = Date.now()
    first = first && first.iter <= iter ? first : { iter, now }
    const left = run.training && iter > first.iter ? (now - first.now) / (iter - first.iter) * (all - iter) / 1000 : null
    const job = jobs.find(j => j.out_dir === name)
    top.replaceChildren(...[h("div", { class: "row" }, h("h1", { class: "grow" }, name), h("span", { class: run.training ? "good" : "soft", id: "training" },
      run.training ? `● ${t("trains")}` : iter >= all ? t("finished") : t("not training")),
    run.training ? h("button", { onclick: () => ask("api/stop", { run: name }).then(() => say(t("Stopping: it saves first"))) }, t("Stop"))
      : h("button", { onclick: () => ask("api/start", { resume: name, knobs: {} }).then(() => say(t("Queued"))) }, t("Resume")),
    h("a", { href: link("start", changed(run.config)) }, t("Duplicate with changes")),
    /^https?:\/\//.test(run.wandb) && h("a", { href: run.wandb, rel: "noopener noreferrer", target: "_blank" }, "W&B")),
    h("progress", { max: all, value: Math.min(iter, all), "aria-label": t("Progress") }),
    h("p", { class: "soft" }, `${t("step")} ${number(iter)} ${t("of")} ${number(all)}`, left !== null && ` · ${t("left")} ${time(left)}`,
      ["loss/train", "loss/val", "bpb/val", "perf/tokens_per_sec"].map(k => k in run.results && ` · ${k} ${number(run.results[k])}`)),
    job && job.state === "failed" && h("p", { class: "bad" }, t("failed"))].filter(Boolean))
  }
  function changed(config) {  // what the form shows for a copy of this run
    const from = { ...config, out_dir: `${name}-2` }
    return Object.fromEntries(Object.entries(from).filter(([k, v]) => k in known && k !== "init_from" && v !== known[k].value).map(([k, v]) => [k, String(v)]))
  }
  const known = (await ask("api/knobs")).knobs

  function drawTables() {
    const iters = run.tables.map(r => r.iter), at = +state.get("step", String(iters.at(-1) ?? ""))
    const row = run.tables.findLast(r => r.iter === at) || run.tables.at(-1) || {}
    tables.replaceChildren(...Object.entries(HEADS).filter(([kind]) => run.tables.some(r => r[kind])).map(([kind, head]) => card(
      kind === "samples" ? "Samples" : "Predictions",
      h("label", {}, t("step"), h("select", { onchange: e => { state.set({ step: e.target.value }); drawTables() } },
        iters.map(i => h("option", { value: i, selected: i === row.iter }, number(i))))),
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t(kind === "samples" ? "Samples" : "Predictions") }, h("table", { class: "left" }, h("thead", {}, h("tr", {}, head.map(c => h("th", { scope: "col" }, t(c))))),
        h("tbody", {}, (row[kind] || []).map(cells => h("tr", {}, (Array.isArray(cells) ? cells : [cells]).map(c => h("td", {}, number(c)))))))))))
  }
  function drawSide() {
    const notes = h("textarea", { rows: 3, "aria-label": t("Notes") }), color = h("input", { type: "color", value: /^#[0-9a-f]{6}$/i.test(run.color) ? run.color : "#0072b2", "aria-label": t("Colour") })
    const tags = h("input", { value: run.tags || "", "aria-label": t("Tags"), placeholder: t("Tags") })
    notes.value = run.notes || ""
    const matrix = run.evaluation.matrix, job = jobs.find(j => j.out_dir === name), said = h("pre", { tabindex: 0 })
    if (job) ask(`api/console?job=${job.id}`).then(found => { said.textContent = found.text; said.scrollTop = 1e9 })
    side.replaceChildren(...[
      card("Files", ...Object.entries(run.files).map(([file, size]) => h("div", {}, h("p", { class: "soft" }, `${file} · ${(size / 2 ** 20).toFixed(1)} MiB`),
        copyable(`./run ${quote(`${name}/${file}`)} -i ${quote(run.config.sample_prompt?.split?.("|")[0] || "")}`))),
      h("p", { class: "soft" }, `${t("Checkpoints")}: ${run.checkpoints.join(", ") || t("None")}`)),
      card("Alerts", run.alerts.length ? h("ul", {}, run.alerts.map(([title, text]) => h("li", { class: "bad" }, `${title}: ${text}`))) : h("p", { class: "soft" }, t("None"))),
      job && card("Console", said),
      matrix && card("Evaluation", h("p", {}, `${run.evaluation.data}: ${t("accuracy")} ${number(run.evaluation.accuracy)}`), confusion(run.evaluation), ...failures(run.evaluation)),
      card("Notes", notes, h("div", { class: "row" }, color, tags, h("button", { onclick: () => ask("api/notes", { run: name, notes: notes.value, tags: tags.value, color: color.value }).then(() => say(t("Saved"))) }, t("Save")))),
      card("Settings", h("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": t("Settings") }, h("table", { class: "left" }, h("tbody", {}, Object.entries(run.config).map(([k, v]) =>
        h("tr", {}, h("td", {}, k), h("td", {}, typeof v === "object" ? JSON.stringify(v).slice(0, 300) : String(v)))))))),
    ].filter(Boolean))
  }
  const reread = throttle(async () => { run = { ...run, ...await ask(`api/run?${new URLSearchParams({ run: name })}`) }; drawTop(); drawTables(); if (!side.contains(document.activeElement)) drawSide() }, 2000)
  listen(event => {
    if (event.jobs) { jobs = event.jobs; reread() }
    if (event.run?.name !== name) return
    const trained = run.training
    Object.assign(run, event.run)
    charts.take(event); drawTop()
    if (trained !== run.training || event.again || "loss/val" in (event.rows || {})) reread()
  })
  const main_ = h("div", {}, h("div", { class: "card" }, h("div", { class: "row" }, charts.adder(known && Object.keys(run.results).filter(k => k.includes("/") || k === "lr")), controls(rebuild => rebuild === true ? charts.build() : charts.draw()))), charts.place, tables)
  main.append(h("p", {}, h("a", { href: "#runs" }, `← ${t("All runs")}`)), top, h("div", { class: "sides" }, main_, side))
  drawTop(); drawTables(); drawSide()
  await charts.build()
  return { end: () => charts.end() }
}

const quote = text => `'${text.replaceAll("'", "'\\''")}'`
const time = seconds => seconds > 5400 ? `${(seconds / 3600).toFixed(1)} h` : seconds > 90 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds)} s`

/** The answers that were wrong. */
function failures({ columns = [], rows = [] }) {
  return rows.length ? [h("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": t("Failures") }, h("table", { class: "left" },
    h("thead", {}, h("tr", {}, columns.slice(1).map(c => h("th", { scope: "col" }, c)))),
    h("tbody", {}, rows.map(row => h("tr", {}, row.slice(1).map(c => h("td", {}, number(c))))))))] : []
}

function confusion({ names = [], matrix }) {
  const most = Math.max(1, ...matrix.flat())
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("Evaluation") }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("expected")), names.map(n => h("th", { scope: "col" }, n)))),
    h("tbody", {}, matrix.map((row, i) => h("tr", {}, h("th", { scope: "row" }, names[i]), row.map((n, j) =>
      h("td", { style: n ? `background: color-mix(in srgb, ${i === j ? "var(--good)" : "var(--bad)"} ${Math.round(45 * n / most)}%, transparent)` : null }, String(n))))))))
}
