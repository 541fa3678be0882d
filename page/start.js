// A training from choices: preset, data, knobs, sweeps; the line to type for the same; the queue.
import { ask, copyable, link, listen, say, state, tell, throttle } from "./app.js"
import { h, select } from "./dom.js"
import { help, t } from "./words.js"

const USUAL = ["out_dir", "depth", "dim", "n_layers", "max_seq_len", "batch_size", "max_iters", "learning_rate", "minutes",
  "seed", "wandb_log"]
const DATA = ["stories", "stories:2000", "tinyshakespeare", "tinystories"]
const card = (title, ...content) => h("section", { class: "card" }, title && h("h2", {}, t(title)), ...content)

/** "1e-3, 3e-3" or "2..6" as sweep.py's parameter of a knob like `like`. */
function spec(text, like) {
  const isNumber = typeof like === "number", isTrue = word => /^(true|1|yes)$/i.test(word)
  const read = word => isNumber ? Number(word) : typeof like === "boolean" ? isTrue(word) : word
  const range = isNumber && text.match(/^\s*(\S+?)\s*\.\.\s*(\S+)\s*$/)
  if (!range) return { values: text.split(",").map(word => read(word.trim())) }
  const [min, max] = [Number(range[1]), Number(range[2])], wide = min > 0 && max / min >= 10 && !Number.isInteger(like)
  return { min, max, ...(wide ? { distribution: "log_uniform_values" } : {}) }
}

/** A text that is read from the server when its button is pressed: [button, text]. */
function asked(title, path, query) {
  const text = h("pre", { hidden: true, tabindex: 0 })
  const read = async () => {
    text.hidden = false
    text.textContent = t("This takes a moment")
    text.textContent = (await ask(path, query())).text
  }
  return [h("button", { onclick: read }, title), text]
}

export async function show(main) {
  const { knobs, presets, wrong, cpus, root, at_once } = await ask("api/knobs")
  const command = h("div"), queue = h("div"), left = h("div")
  const given = () => Object.fromEntries([...state.params].filter(([name]) => name in knobs))
  const sweeps = () => JSON.parse(state.get("sweep", "{}"))
  const preset = () => presets[state.get("preset")] ? state.get("preset") : ""
  const usual = name => presets[preset()]?.[name] ?? knobs[name].value

  function form() {
    const tried = Object.entries(sweeps()).map(([name, text]) => [name, spec(text, knobs[name].value)])
    const parameters = Object.fromEntries(tried)
    const random = Object.values(parameters).some(p => "min" in p), count = state.get("count") || (random ? "6" : "")
    const sweep = tried.length ? { method: random ? "random" : "grid", parameters, count } : null
    return { preset: preset(), knobs: given(), resume: state.get("resume"), sweep }
  }
  const refresh = throttle(async () => {
    try {
      command.replaceChildren(copyable((await tell("api/line", form())).line))
      say("")
    } catch (e) {
      command.replaceChildren(h("p", { class: "bad" }, e.message))
    }
  }, 200)
  const choose = values => { state.set(values); refresh() }

  function knob(name) {
    const otherwise = usual(name), now = given()[name] ?? String(otherwise), id = `knob-${name}`
    const look = () => `knob ${name in given() ? "changed" : ""}`, title = `${t("Sweep")} ${name}`
    const set = value => {
      choose({ [name]: value === String(otherwise) ? "" : value })
      row.className = look()
    }
    const field = typeof otherwise === "boolean"
      ? h("input", { id, type: "checkbox", checked: /^true$/i.test(now), onchange: e => set(String(e.target.checked)) })
      : h("input", { id, type: "text", value: now, inputmode: typeof otherwise === "number" ? "decimal" : null,
        oninput: e => set(e.target.value.trim()), spellcheck: "false", list: name === "data" ? "data" : null })
    const tried = h("input", { type: "text", value: sweeps()[name] || "", placeholder: t("values, or from..to"),
      "aria-label": title, oninput: e => sweep(e.target.value) })
    const place = h("span", {}, name in sweeps() ? tried : field)
    const sweep = text => {  // undefined: no longer one of the sweep
      const all = { ...sweeps(), [name]: text }, some = Object.values(all).some(v => v !== undefined)
      choose({ sweep: some ? JSON.stringify(all) : "" })
    }
    const turn = e => {
      sweep(e.target.checked ? tried.value : undefined)
      place.replaceChildren(e.target.checked ? tried : field)
    }
    const mark = h("input", { type: "checkbox", checked: name in sweeps(), "aria-label": title, onchange: turn })
    const row = h("div", { class: look() }, h("label", { for: id }, name), place,
      ["data", "out_dir"].includes(name) ? h("span") : h("label", { class: "soft" }, mark, t("Sweep")),
      h("span", { class: "soft" }, help(name, knobs[name].help)))
    return row
  }

  function draw() {
    const rest = Object.keys(knobs).filter(name => name !== "data" && !USUAL.includes(name))
    const sections = [...new Set(rest.map(name => knobs[name].section))]
    const change = name => { choose({ preset: name }); draw() }
    const data = () => ({ data: given().data ?? usual("data") })
    const [look, said] = asked(`${t("Data")}: ${t("Look at it")}`, "api/look", data)
    const some = select(t("Preset"), [["", t("none")], ...Object.keys(presets)], preset(), change, { id: "preset" })
    left.replaceChildren(
      card("", h("div", { class: "row" }, some, look), wrong.map(text => h("p", { class: "bad" }, text)),
        h("datalist", { id: "data" }, DATA.map(name => h("option", {}, name))), knob("data"), said),
      card("The most used", USUAL.map(knob)),
      card("All knobs", sections.map(section => h("details", {}, h("summary", {}, t(section)),
        rest.filter(name => knobs[name].section === section).map(knob)))))
  }

  const number = (title, attributes) => h("label", {}, t(title),
    h("input", { type: "number", min: 1, style: "width:4.5rem", ...attributes }))
  const wanted = () => ({ preset: preset(), knobs: JSON.stringify(given()) })
  const [estimate, told] = asked(t("Estimate memory and time"), "api/estimate", wanted)
  const start = async () => say(`${t("Queued")}: ${(await tell("api/start", form())).id}`)
  const right = h("div", { class: "sticky" },
    card("Command line", command, h("p", { class: "soft" }, t("Only what was changed is passed on")),
      h("div", { class: "row" }, h("button", { class: "main", id: "start", onclick: start }, t("Put into the queue")),
        number("At once", { max: cpus, value: at_once, onchange: e => tell("api/queue", { at_once: +e.target.value }) }),
        number("Trials", { value: state.get("count"), oninput: e => choose({ count: e.target.value }) }), estimate), told),
    card("Queue", queue))
  main.append(h("h1", {}, t("Start")), h("div", { class: "sides" }, left, right))
  const drawJobs = jobs => queue.replaceChildren(...jobs.slice(0, 30).map(job => line(job, root)))
  listen(event => event.jobs && drawJobs(event.jobs))
  draw()
  refresh()
  drawJobs((await ask("api/jobs")).jobs)
}

const open = new Set()  // jobs whose console is shown

/** A job: its state, its folder, its command and the end of what it printed. */
function line(job, root) {
  const text = h("pre", { hidden: !open.has(job.id), tabindex: 0 }), alive = ["queued", "running"].includes(job.state)
  async function read() {
    text.textContent = `${job.line}\n\n${(await ask("api/console", { job: job.id })).text}`
    text.scrollTop = text.scrollHeight
    if (job.state === "running" && open.has(job.id)) setTimeout(() => text.isConnected && read(), 2000)
  }
  function toggle(e) {
    text.hidden = !text.hidden
    e.target.setAttribute("aria-expanded", !text.hidden)
    open[text.hidden ? "delete" : "add"](job.id)
    if (!text.hidden) read()
  }
  if (open.has(job.id)) read()
  const stop = () => tell("api/stop", { job: job.id }).then(() => say(t("Stopping: it saves first")))
  const run = job.out_dir && job.out_dir !== "auto", look = { failed: "bad", running: "good" }[job.state] || "soft"
  return h("div", { class: "job", "data-state": job.state }, h("div", { class: "row" }, h("b", {}, job.id),
    h("span", { class: look }, t(job.state)),
    h("a", { class: "grow", href: run ? link("run", { run: job.out_dir }) : "#runs" }, run ? job.out_dir : root),
    h("button", { "aria-expanded": String(!text.hidden), onclick: toggle }, t("Console")),
    alive && h("button", { onclick: stop }, t("Stop"))), text)
}
