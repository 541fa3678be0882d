// A training from choices: preset, data, knobs, sweeps; the line to type for the same; the queue.
import { h, t, ask, say, state, link, throttle, listen, copyable } from "./app.js"

const USUAL = ["out_dir", "depth", "dim", "n_layers", "max_seq_len", "batch_size", "max_iters", "learning_rate", "minutes", "seed", "wandb_log"]
const DATA = ["stories", "stories:2000", "tinyshakespeare", "tinystories"]
const OURS = ["preset", "sweep", "count", "resume"]  // of the address; all else in it is knobs

/** "1e-3, 3e-3" or "2..6" as sweep.py's parameter of a knob like `like`. */
function spec(text, like) {
  const read = word => typeof like === "number" ? Number(word) : typeof like === "boolean" ? /^(true|1|yes)$/i.test(word) : word
  const range = typeof like === "number" && text.match(/^\s*(\S+?)\s*\.\.\s*(\S+)\s*$/)
  if (!range) return { values: text.split(",").map(word => read(word.trim())) }
  const [min, max] = [Number(range[1]), Number(range[2])]
  return { min, max, ...(min > 0 && max / min >= 10 && !Number.isInteger(like) ? { distribution: "log_uniform_values" } : {}) }
}

export async function show(main) {
  const { knobs, presets, cpus, root, at_once } = await ask("api/knobs")
  const command = h("div"), estimate = h("pre", { hidden: true, tabindex: 0 }), queue = h("div"), look = h("pre", { hidden: true, tabindex: 0 })
  const given = () => Object.fromEntries([...state.params].filter(([name]) => name in knobs))
  const sweeps = () => JSON.parse(state.get("sweep", "{}"))
  const preset = () => presets[state.get("preset")] ? state.get("preset") : ""

  function form() {
    const tried = sweeps(), parameters = Object.fromEntries(Object.entries(tried).map(([name, text]) => [name, spec(text, knobs[name].value)]))
    const method = Object.values(parameters).some(p => "min" in p) ? "random" : "grid"
    return { preset: preset(), knobs: given(), resume: state.get("resume"), ...(Object.keys(tried).length
      ? { sweep: { method, parameters, count: state.get("count") || (method === "random" ? "6" : "") } } : {}) }
  }
  const refresh = throttle(async () => {
    try { command.replaceChildren(copyable((await ask("api/line", form())).line)); say("") } catch (e) { command.replaceChildren(h("p", { class: "bad" }, e.message)) }
  }, 200)
  const usual = name => preset() && presets[preset()][name] !== undefined ? presets[preset()][name] : knobs[name].value

  function knob(name) {
    const { help } = knobs[name], otherwise = usual(name), now = given()[name] ?? String(otherwise), id = `knob-${name}`
    const tried = h("input", { type: "text", value: sweeps()[name] || "", placeholder: t("values, or from..to"), "aria-label": `${t("Sweep")} ${name}`,
      oninput: e => { state.set({ sweep: JSON.stringify({ ...sweeps(), [name]: e.target.value }) }); refresh() } })
    const set = value => {
      state.set({ [name]: value === String(otherwise) ? "" : value })
      row.className = `knob ${name in given() ? "changed" : ""}`
      refresh()
    }
    const field = typeof otherwise === "boolean"
      ? h("input", { id, type: "checkbox", checked: /^true$/i.test(now), onchange: e => set(e.target.checked ? "true" : "false") })
      : h("input", { id, type: "text", value: now, inputmode: typeof otherwise === "number" ? "decimal" : null, oninput: e => set(e.target.value.trim()),
        spellcheck: false, list: name === "data" ? "data" : null })
    const place = h("span", {}, name in sweeps() ? tried : field)
    const mark = h("label", { class: "soft" }, h("input", { type: "checkbox", checked: name in sweeps(), "aria-label": `${t("Sweep")} ${name}`, onchange: e => {
      const { [name]: old, ...rest } = sweeps(), marked = e.target.checked ? { ...rest, [name]: tried.value } : rest
      state.set({ sweep: Object.keys(marked).length ? JSON.stringify(marked) : "" })
      place.replaceChildren(e.target.checked ? tried : field); refresh() } }), t("Sweep"))
    const row = h("div", { class: `knob ${name in given() ? "changed" : ""}` }, h("label", { for: id }, name), place,
      ["data", "out_dir"].includes(name) ? h("span") : mark, h("span", { class: "soft" }, help))
    return row
  }

  const left = h("div")
  function draw() {
    const sections = [...new Set(Object.values(knobs).map(k => k.section))]
    left.replaceChildren(h("section", { class: "card" }, h("div", { class: "row" }, h("label", {}, t("Preset"), h("select", { id: "preset", onchange: e => {
      state.set({ preset: e.target.value }); draw(); refresh() } }, h("option", { value: "" }, t("none")), Object.keys(presets).map(name =>
      h("option", { value: name, selected: name === preset() }, name)))),
    h("button", { onclick: async () => { look.hidden = false; look.textContent = t("This takes a moment")
      look.textContent = (await ask(`api/look?${new URLSearchParams({ data: given().data ?? usual("data") })}`)).text } }, `${t("Data")}: ${t("Look at it")}`)),
    h("datalist", { id: "data" }, DATA.map(name => h("option", {}, name))), knob("data"), look),
    h("section", { class: "card" }, h("h2", {}, t("The most used")), USUAL.map(knob)),
    h("section", { class: "card" }, h("h2", {}, t("All knobs")), sections.map(section => h("details", {}, h("summary", {}, section),
      Object.keys(knobs).filter(name => knobs[name].section === section && name !== "data" && !USUAL.includes(name)).map(knob)))))
  }

  async function start() {
    const { id } = await ask("api/start", form())
    say(`${t("Queued")}: ${id}`)
  }
  const right = h("div", { class: "sticky" }, h("section", { class: "card" }, h("h2", {}, t("Command line")), command,
    h("p", { class: "soft" }, t("Only what was changed is passed on")),
    h("div", { class: "row" }, h("button", { class: "main", id: "start", onclick: start }, t("Put into the queue")),
      h("label", {}, t("At once"), h("input", { type: "number", min: 1, max: cpus, value: String(at_once), style: "width:4.5rem",
        onchange: e => ask("api/queue", { at_once: +e.target.value }) })),
      h("label", {}, t("Trials"), h("input", { type: "number", min: 1, value: state.get("count"), style: "width:4.5rem",
        oninput: e => { state.set({ count: e.target.value }); refresh() } }))),
    h("div", { class: "row" }, h("button", { onclick: async () => { estimate.hidden = false; estimate.textContent = t("This takes a moment")
      estimate.textContent = (await ask(`api/estimate?${new URLSearchParams({ preset: preset(), knobs: JSON.stringify(given()) })}`)).text } }, t("Estimate memory and time"))), estimate),
  h("section", { class: "card" }, h("h2", {}, t("Queue")), queue))
  main.append(h("h1", {}, t("Start")), h("div", { class: "sides" }, left, right))
  const drawJobs = jobs => queue.replaceChildren(...jobs.slice(0, 30).map(job => line(job, root)))
  listen(event => { if (event.jobs) drawJobs(event.jobs) })
  draw(); refresh()
  drawJobs((await ask("api/jobs")).jobs)
}

const open = new Set()  // jobs whose console is shown

/** A job: its state, its folder, its command and the end of what it printed. */
function line(job, root) {
  const text = h("pre", { hidden: !open.has(job.id), tabindex: 0 }), alive = ["queued", "running"].includes(job.state)
  const read = async () => {
    text.textContent = `${job.line}\n\n${(await ask(`api/console?job=${job.id}`)).text}`
    text.scrollTop = text.scrollHeight
    if (job.state === "running" && open.has(job.id)) setTimeout(() => text.isConnected && read(), 2000)
  }
  if (open.has(job.id)) read()
  return h("div", { class: "job", "data-state": job.state }, h("div", { class: "row" }, h("b", {}, job.id),
    h("span", { class: job.state === "failed" ? "bad" : job.state === "running" ? "good" : "soft" }, t(job.state)),
    job.out_dir && job.out_dir !== "auto" ? h("a", { class: "grow", href: link("run", { run: job.out_dir }) }, job.out_dir) : h("a", { class: "grow", href: "#runs" }, root),
    h("button", { "aria-expanded": String(!text.hidden), onclick: e => { text.hidden = !text.hidden
      e.target.setAttribute("aria-expanded", !text.hidden)
      if (text.hidden) open.delete(job.id); else { open.add(job.id); read() } } }, t("Console")),
    alive && h("button", { onclick: () => ask("api/stop", { job: job.id }).then(() => say(t("Stopping: it saves first"))) }, t("Stop"))), text)
}
