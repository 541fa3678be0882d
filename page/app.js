// The frame of the page: requests, the view in the address, live events.
import { button, h, row } from "./dom.js"
import { t, language } from "./words.js"

const tabs = { runs: "Runs", start: "Start", inside: "Look inside", talk: "Talk" }
const modules = { runs: "compare", run: "follow", start: "start", inside: "inside", talk: "talk" }
export const colors =
  ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f5fc7", "#8a8a8a"]

// ---- requests

/** Return the server's answer. Show an error to the reader and throw it. */
async function request(path, options) {
  let found
  try {
    const response = await fetch(path, options)
    const isJson = response.headers.get("Content-Type").startsWith("application/json")
    found = isJson ? await response.json() : { error: await response.text() }
  } catch {
    found = { error: t("The page's server does not answer") }
  }
  if (!found.error) return found
  notify(found.error, true)
  throw new Error(found.error)
}
export const get = (path, query = {}) => request(`${path}?${new URLSearchParams(query)}`)
export const post = (path, body) => request(path, { method: "POST", body: JSON.stringify(body) })

/** Let the reader save a Blob as a file. */
export function download(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name })
  link.click()
  URL.revokeObjectURL(link.href)
}

/** Let the reader save the server's answer as a file. */
export async function downloadFrom(path, body, name) {
  const response = await fetch(path, { method: "POST", body: JSON.stringify(body) })
  if (!response.ok) return notify((await response.json()).error, true)
  download(await response.blob(), name)
  notify(t("Saved"))
}

/** Show a message at the top of the page. */
export function notify(text, isError) {
  const place = document.getElementById("message")
  place.textContent = text
  place.className = isError ? "bad" : "soft"
}

// ---- the address: #view?name=value&...

export const state = {
  get view() { return location.hash.slice(1).split("?")[0] || "runs" },
  get params() { return new URLSearchParams(location.hash.split("?").slice(1).join("?")) },
  get(name, otherwise = "") { return this.params.get(name) ?? otherwise },
  /** Change values without a new entry in the history and without drawing the view again. */
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

/** Format a value as compare.py's tables do. */
export function format(value) {
  if (typeof value !== "number") return String(value ?? "")
  if (Number.isInteger(value)) return value.toLocaleString("en")
  const size = Math.abs(value)
  return size >= 1e-3 && size < 100 ? value.toFixed(4) : value.toPrecision(4)
}

/** Make a text with a button that copies it. */
export function copyable(text) {
  const copy = () => navigator.clipboard.writeText(text).then(() => notify(t("Copied")))
  return row(h("pre", { class: "grow", tabindex: 0 }, text), button(t("Copy"), copy))
}

/** Call f at most once in `wait` ms, and always after the last call. */
export function throttle(f, wait) {
  let timer = null
  return () => {
    timer ??= setTimeout(() => {
      timer = null
      f()
    }, wait)
  }
}

/** Call f once there was no call for `wait` ms, with the arguments of the last one. */
export function debounce(f, wait) {
  let timer
  return (...values) => {
    clearTimeout(timer)
    timer = setTimeout(() => f(...values), wait)
  }
}

// ---- live events

let source, listener, greeted

/** Pass live events to f until another view is shown. {hello}: earlier ones may be missing. */
export function listen(f) { listener = f }

function connect() {
  source = new EventSource("api/live")
  source.onmessage = message => {
    const event = JSON.parse(message.data)
    if (event.system) drawSystem(event.system)
    if (greeted) listener?.(event)  // skips the first {hello}: nothing was missed
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

let shown, turn = 0

function drawTabs(view) {
  const current = view === "run" ? "runs" : view
  const tab = ([name, title]) =>
    h("a", { href: `#${name}`, "aria-current": name === current ? "page" : null }, t(title))
  document.getElementById("tabs").replaceChildren(...Object.entries(tabs).map(tab))
}

async function show() {
  const view = state.view in modules ? state.view : "runs", mine = ++turn
  listener = null
  shown?.end?.()
  shown = null
  drawTabs(view)
  notify("")
  try {
    const module = await import(`./${modules[view]}.js`)
    if (mine !== turn) return
    const element = h("div")
    document.getElementById("main").replaceChildren(element)
    const made = await module.show(element)
    if (mine === turn) shown = made
    else made?.end?.()  // the reader has gone on to another view
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
  show()
}
window.addEventListener("hashchange", show)
window.addEventListener("pagehide", () => source?.close())
show().then(connect)  // live events come after the first picture
