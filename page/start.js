// The view "Start": a form for a training or a sweep, its command line, and the job queue.
import { copyable, get, link, listen, notify, post, state, throttle } from "./app.js"
import { button, card, h, row, select, soft } from "./dom.js"
import { help, t } from "./words.js"

const MOST_USED = ["out_dir", "depth", "dim", "n_layers", "max_seq_len", "batch_size", "max_iters",
  "learning_rate", "minutes", "seed", "wandb_log"]
const NOT_SWEPT = ["data", "out_dir"]
/** Return whether train.py reads a text as True. */
const isTrue = text => /^(true|1|yes)$/i.test(text)

/**
 * Parse "1e-3, 3e-3" or "2..6" as a parameter of a sweep.py file. like: default value of the knob.
 * A range is sampled log-uniformly if max / min >= 10 and the knob's default is a fraction.
 */
function parameter(text, like) {
  const isNumber = typeof like === "number"
  const range = isNumber && text.match(/^\s*(\S+?)\s*\.\.\s*(\S+)\s*$/)
  if (range) {
    const min = Number(range[1]), max = Number(range[2])
    const isLog = min > 0 && max / min >= 10 && !Number.isInteger(like)
    return isLog ? { min, max, distribution: "log_uniform_values" } : { min, max }
  }
  const parse = word => isNumber ? Number(word) : typeof like === "boolean" ? isTrue(word) : word
  const words = text.split(",").map(word => word.trim()).filter(word => word !== "")
  return { values: words.map(parse) }
}

/** Return [button, text element]. A click requests the text; query() returns the query. */
function textOnRequest(title, path, query) {
  const text = h("pre", { hidden: true, tabindex: 0 })
  const request = async () => {
    text.hidden = false
    text.textContent = t("This takes a moment")
    text.textContent = (await get(path, query())).text
  }
  return [button(title, request), text]
}

export async function show(main) {
  const { knobs, presets, wrong: presetErrors, cpus, root, at_once, data: sources } =
    await get("api/knobs")
  const command = h("div"), queue = h("div"), left = h("div")
  // The address holds all choices: one parameter for each changed knob, "preset", "resume", "count"
  // (number of trials of a sweep), and "sweep", JSON of {knob: the text that the user typed}.
  const given = () => Object.fromEntries([...state.params].filter(([name]) => name in knobs))
  const swept = () => state.getJson("sweep", {})
  const preset = () => presets[state.get("preset")] ? state.get("preset") : ""
  const defaultOf = name => presets[preset()]?.[name] ?? knobs[name].value

  /** Return the choices in the server's format, see from_form() in command.py. */
  function form() {
    const request = { preset: preset(), knobs: given(), resume: state.get("resume"), sweep: null }
    const parameters = Object.fromEntries(Object.entries(swept()).map(([name, text]) =>
      [name, parameter(text, knobs[name].value)]))
    const specs = Object.values(parameters)
    if (specs.length) {
      const isRandom = specs.some(spec => "min" in spec)
      const count = state.get("count") || (isRandom ? "6" : "")
      request.sweep = { method: isRandom ? "random" : "grid", parameters, count }
    }
    return request
  }

  const refresh = throttle(async () => {
    try {
      command.replaceChildren(copyable((await post("api/line", form())).line))
      notify("")
    } catch (e) {
      command.replaceChildren(h("p", { class: "bad" }, e.message))
    }
  }, 200)
  const choose = values => {
    state.set(values)
    refresh()
  }

  /** Make the form's row for a knob: name, value (or the values to sweep), checkbox, help. */
  function knob(name) {
    const defaultValue = defaultOf(name), id = `knob-${name}`, title = `${t("Sweep")} ${name}`
    const rowClass = () => `knob ${name in given() ? "changed" : ""}`
    const set = value => {
      choose({ [name]: value === String(defaultValue) ? "" : value })
      element.className = rowClass()
    }
    /** Sweep the values in the text; undefined, which JSON.stringify drops, removes the sweep. */
    const sweep = text => {
      const json = JSON.stringify({ ...swept(), [name]: text })
      choose({ sweep: json === "{}" ? "" : json })
    }
    const now = given()[name] ?? String(defaultValue)
    const { choices, open } = knobs[name]
    /** Make the field: a checkbox, a menu of names, or a text field that suggests names. */
    function makeField() {
      if (typeof defaultValue === "boolean") {
        const onchange = event => set(String(event.target.checked))
        return h("input", { id, type: "checkbox", checked: isTrue(now), onchange })
      }
      if (choices.length && !open) {
        const onchange = event => set(event.target.value)
        const options = [...new Set([...choices, now])].map(value =>
          h("option", { value, selected: value === now }, value))
        return h("select", { id, onchange }, options)
      }
      const options = texts => texts.map(text => h("option", {}, text))
      const names = h("datalist", { id: `names-${name}` },
        options(name === "data" ? sources : choices))
      const complete = throttle(async () => {
        const { paths } = await get("api/paths", { start: input.value })
        names.replaceChildren(...options([...sources, ...paths]))
      }, 200)
      const input = h("input", {
        id, type: "text", value: now, spellcheck: "false", list: names.id,
        inputmode: typeof defaultValue === "number" ? "decimal" : null,
        oninput: event => {
          set(event.target.value.trim())
          if (name === "data") complete()
        } })
      return [names, input]
    }
    const field = h("span", {}, makeField())
    const values = h("input", {
      type: "text", value: swept()[name] || "", placeholder: t("values, or min..max"),
      "aria-label": title, oninput: event => sweep(event.target.value) })
    const place = h("span", {}, name in swept() ? values : field)
    const box = h("input", {
      type: "checkbox", checked: name in swept(), "aria-label": title,
      onchange: ({ target }) => {
        sweep(target.checked ? values.value : undefined)
        place.replaceChildren(target.checked ? values : field)
      } })
    const sweepLabel = h("label", { class: "soft" }, box, t("Sweep"))
    const element = h("div", { class: rowClass() }, h("label", { for: id }, name), place,
      NOT_SWEPT.includes(name) ? h("span") : sweepLabel,
      h("span", { class: "soft" }, help(name, knobs[name].help)))
    return element
  }

  function draw() {
    const lessUsed = Object.keys(knobs).filter(name => name !== "data" && !MOST_USED.includes(name))
    const sections = [...new Set(lessUsed.map(name => knobs[name].section))]
    const details = section => h("details", {}, h("summary", {}, t(section)),
      lessUsed.filter(name => knobs[name].section === section).map(knob))
    const change = name => {
      choose({ preset: name })
      draw()
    }
    const options = [["", t("none")], ...Object.keys(presets)]
    const data = () => ({ data: given().data ?? defaultOf("data") })
    const [preview, text] = textOnRequest(`${t("Data")}: ${t("Preview")}`, "api/look", data)
    left.replaceChildren(
      card("", row(select(t("Preset"), options, preset(), change, { id: "preset" }), preview),
        presetErrors.map(message => h("p", { class: "bad" }, message)),
        knob("data"), text),
      card(t("Most used"), MOST_USED.map(knob)),
      card(t("All knobs"), sections.map(details)))
  }

  const numberField = (title, attributes) => h("label", {}, t(title),
    h("input", { type: "number", min: 1, style: "width:4.5rem", ...attributes }))
  const atOnce = numberField("Jobs at once", {
    max: cpus, value: at_once,
    onchange: event => post("api/queue", { at_once: Number(event.target.value) }) })
  const trials = numberField("Trials", {
    value: state.get("count"), oninput: event => choose({ count: event.target.value }) })
  const choices = () => ({ preset: preset(), knobs: JSON.stringify(given()) })
  const [estimate, estimated] =
    textOnRequest(t("Estimate memory and time"), "api/estimate", choices)
  const start = async () => notify(`${t("Queued")}: ${(await post("api/start", form())).id}`)
  const right = h("div", { class: "sticky" },
    card(t("Command line"), command, soft(t("Only changed settings are passed on")),
      row(button(t("Put into the queue"), start, { class: "main", id: "start" }), atOnce, trials,
        estimate),
      estimated),
    card(t("Queue"), queue))
  main.append(h("h1", {}, t("Start")), h("div", { class: "sides" }, left, right))
  const drawJobs = jobs => queue.replaceChildren(...jobs.slice(0, 30).map(job => entry(job, root)))
  listen(event => event.jobs && drawJobs(event.jobs))
  draw()
  refresh()
  drawJobs((await get("api/jobs")).jobs)
}

// Ids of the jobs whose output is shown. Global, because each live event makes new entries.
const opened = new Set()

/** Make a job's entry in the queue: state, folder, buttons, and its command line and output. */
function entry(job, root) {
  const text = h("pre", { hidden: !opened.has(job.id), tabindex: 0 })
  /** Show the output so far, and again every 2 s while the job runs. */
  async function read() {
    text.textContent = `${job.line}\n\n${(await get("api/console", { job: job.id })).text}`
    text.scrollTop = text.scrollHeight
    if (job.state !== "running" || !opened.has(job.id)) return
    setTimeout(() => text.isConnected && read(), 2000)
  }
  function toggle({ target }) {
    text.hidden = !text.hidden
    target.setAttribute("aria-expanded", !text.hidden)
    if (text.hidden) return opened.delete(job.id)
    opened.add(job.id)
    read()
  }
  const stop = async () => {
    await post("api/stop", { job: job.id })
    notify(t("Stopping; it saves a checkpoint first"))
  }
  if (opened.has(job.id)) read()
  const isAlive = ["queued", "running"].includes(job.state)
  const style = { failed: "bad", running: "good" }[job.state] || "soft"
  const isNamed = job.out_dir && job.out_dir !== "auto"
  const href = isNamed ? link("run", { run: job.out_dir }) : "#runs"
  return h("div", { class: "job", "data-state": job.state },
    row(h("b", {}, job.id), h("span", { class: style }, t(job.state)),
      h("a", { class: "grow", href }, isNamed ? job.out_dir : root),
      button(t("Console"), toggle, { "aria-expanded": String(!text.hidden) }),
      isAlive && button(t("Stop"), stop)),
    job.error ? h("p", { class: "bad error" }, job.error) : "", text)
}
