// The entry point: requests to the server, the state in the address, live events, switching views.
import { button, h, row } from "./dom.js"
import { t, language } from "./words.js"

// The views: titles of those with a tab, and their files.
const tabs = { runs: "Runs", start: "Start", inside: "Look inside", talk: "Talk" }
const modules = { runs: "compare", run: "follow", start: "start", inside: "inside", talk: "talk" }
// ---- requests

/** Return the server's JSON answer. If it is an error, show its message and throw it. */
async function request(path, options) {
  let answer
  try {
    const response = await fetch(path, options)
    const isJson = response.headers.get("Content-Type").startsWith("application/json")
    answer = isJson ? await response.json() : { error: await response.text() }
  } catch {
    answer = { error: t("The page's server does not answer") }
  }
  if (!answer.error) return answer
  notify(answer.error, true)
  throw new Error(answer.error)
}
export const get = (path, query = {}) => request(`${path}?${new URLSearchParams(query)}`)
export const post = (path, body) => request(path, { method: "POST", body: JSON.stringify(body) })

/** Save a Blob as a file, through the browser's download. */
export function download(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name })
  link.click()
  URL.revokeObjectURL(link.href)
}

/** Save the server's answer to a POST request as a file. */
export async function downloadFrom(path, body, name) {
  const answer = fetch(path, { method: "POST", body: JSON.stringify(body) })
  const response = await answer.catch(() => null)
  if (!response) return notify(t("The page's server does not answer"), true)
  if (!response.ok) return notify((await response.json()).error, true)
  download(await response.blob(), name)
  notify(t("Saved"))
}

/** Show a message at the top of the page; "" removes it. */
export function notify(text, isError) {
  const place = document.getElementById("message")
  place.textContent = text
  place.className = isError ? "bad" : "soft"
}

// ---- the address: #view?name=value&...

export const state = {
  get view() { return location.hash.slice(1).split("?")[0] || "runs" },
  get params() { return new URLSearchParams(location.hash.split("?").slice(1).join("?")) },
  get(name, fallback = "") { return this.params.get(name) ?? fallback },
  /** Return a parameter that holds JSON; `fallback` if it is missing or malformed. */
  getJson(name, fallback) {
    try {
      return JSON.parse(this.params.get(name)) ?? fallback
    } catch {
      return fallback
    }
  },
  /** Change parameters; "" and null remove one. Add no history entry and draw nothing. */
  set(values) {
    const params = this.params
    for (const [name, value] of Object.entries(values)) {
      if (value === "" || value === null) params.delete(name)
      else params.set(name, value)
    }
    history.replaceState(null, "", `#${this.view}${params.size ? "?" : ""}${params}`)
  },
}
export const link = (view, params) => `#${view}?${new URLSearchParams(params)}`

// ---- helpers of the views

/** Format a cell as compare.py does: with 4 decimals, tiny and large numbers with 4 digits. */
export function format(value) {
  if (typeof value !== "number") return String(value ?? "")
  if (Number.isInteger(value)) return value.toLocaleString("en")
  const size = Math.abs(value)
  if (size >= 1e-3 && size < 100) return value.toFixed(4)
  const rounded = Number(value.toPrecision(4))
  return size >= 1e3 && size < 1e15 ? rounded.toLocaleString("en") : String(rounded)
}

/** Format a duration in s, min or h. */
function duration(seconds) {
  if (seconds > 5400) return `${(seconds / 3600).toFixed(1)} h`
  return seconds > 90 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds)} s`
}

/** Return the remaining time of a run's training, in words. */
export const timeLeft = run => t("{time} left").replace("{time}", duration(run.time_left.left))

// {ended_by in a run's result.json: the reason in words}
const ENDS = {
  max_iters: "finished: all steps done", minutes: "finished: time budget used up",
  early_stop: "finished: the validation loss no longer fell",
  max_minutes: "stopped: time limit reached", signal: "stopped by Stop or Ctrl-C",
}

export const isFinished = run => ["max_iters", "minutes", "early_stop"].includes(run.ended_by)

/**
 * Return the state of a run as [text, CSS class]. run: an entry of api/runs; job: the latest job
 * that trains it, if any.
 */
export function status(run, job) {
  if (run.training) {
    const left = run.time_left ? `, ${timeLeft(run)}` : ""
    return [`● ${t("training")}${left}`, "good"]
  }
  if (job?.state === "failed") return [`${t("failed")}: ${job.error ?? ""}`, "bad"]
  if (ENDS[run.ended_by]) return [t(ENDS[run.ended_by]), "soft"]
  if (run.foreign) return ["", "soft"]
  return [t(run.results.iter >= run.max_iters ? "finished" : "not training"), "soft"]
}

/**
 * Return a suitable prompt for a model: its run's sample prompt, otherwise `example`. prompts: from
 * api/inside; model: name of a run, or of a file or checkpoint in its folder.
 */
export const promptOf = (prompts, model, example) =>
  prompts[model] ?? prompts[model.replace(/\/[^/]*$/, "")] ?? example

/** Make a text with a button that copies it. */
export function copyable(text) {
  const copy = () => navigator.clipboard.writeText(text).then(() => notify(t("Copied")))
  return row(h("pre", { class: "grow", tabindex: 0 }, text), button(t("Copy"), copy))
}

/** Call f at most once in `wait` ms, and always `wait` ms or less after the last call. */
export function throttle(f, wait) {
  let timer = null
  return () => {
    timer ??= setTimeout(() => {
      timer = null
      f()
    }, wait)
  }
}

/** Call f with the arguments of the last call, once `wait` ms have passed without another call. */
export function debounce(f, wait) {
  let timer
  return (...values) => {
    clearTimeout(timer)
    timer = setTimeout(() => f(...values), wait)
  }
}

// ---- live events

let source, listener  // an EventSource; the function of the shown view
let greeted = false  // whether the first {hello} has arrived

/**
 * Pass live events to f until another view is shown. See live() in run_api.py for their fields.
 * {hello}: the EventSource has connected again and may have missed events, so f reloads its data.
 */
export function listen(f) { listener = f }

function connect() {
  source = new EventSource("api/live")
  source.onmessage = message => {
    const event = JSON.parse(message.data)
    if (event.system) drawSystem(event.system)
    if (greeted) listener?.(event)  // skips the first {hello}
    greeted = true
  }
}

function drawSystem({ cpu, memory, gpus }) {
  const texts = gpus.map(([name, busy, used]) => `${name} ${busy} % ${used} MiB`)
  if (memory) texts.unshift(`${memory.join(" / ")} GiB`)
  if (cpu !== undefined) texts.unshift(`CPU ${cpu} %`)
  document.getElementById("system").textContent = texts.join(" · ")
}

// ---- views: each module's show(element) draws one and may return { end() }

let shown     // what the view's show() returned
let turn = 0  // number of show() calls, so that a call that waits notices later ones

function drawTabs(view) {
  const current = view === "run" ? "runs" : view  // the view of one run has no tab
  const tab = ([name, title]) =>
    h("a", { href: `#${name}`, "aria-current": name === current ? "page" : null }, t(title))
  document.getElementById("tabs").replaceChildren(...Object.entries(tabs).map(tab))
}

/** Show the view in the address. */
async function show() {
  const view = state.view in modules ? state.view : "runs", mine = ++turn
  listener = null
  shown?.end?.()
  shown = null
  drawTabs(view)
  notify("")
  try {
    const module = await import(`./${modules[view]}.js`)
    if (mine !== turn) return  // the user has chosen another view in the meantime
    const element = h("div")
    document.getElementById("main").replaceChildren(element)
    const made = await module.show(element)
    if (mine === turn) shown = made
    else made?.end?.()
  } catch (e) {
    notify(e.message, true)
    console.error(e)
  }
}

document.documentElement.lang = language
document.getElementById("language").textContent = language === "zh" ? "English" : "中文"
document.getElementById("language").onclick = () => {
  localStorage.setItem("language", language === "zh" ? "en" : "zh")
  location.reload()
}
document.getElementById("theme").onclick = () => {
  const root = document.documentElement
  const isDark = getComputedStyle(root).colorScheme.startsWith("dark")
  root.dataset.theme = isDark ? "light" : "dark"
  localStorage.setItem("theme", root.dataset.theme)
  document.dispatchEvent(new Event("theme"))
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  document.dispatchEvent(new Event("theme")))
window.addEventListener("hashchange", show)
window.addEventListener("pagehide", () => source?.close())
show().then(connect)  // the requests of the first view come before live events
