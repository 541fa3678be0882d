// The page's frame: views by the address, what the server is asked, live events.
import { h } from "./dom.js"
import { t, language } from "./words.js"

const views = { runs: "Runs", start: "Start", inside: "Look inside", talk: "Talk" }
const modules = { runs: "compare", run: "follow", start: "start", inside: "inside", talk: "talk" }
export const colors = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f5fc7", "#8a8a8a"]

/** What the server answers; an error is said to the reader and thrown. */
async function answer(path, options) {
  let found
  try {
    const got = await fetch(path, options)
    const isJson = got.headers.get("Content-Type").startsWith("application/json")
    found = isJson ? await got.json() : { error: await got.text() }
  } catch {
    found = { error: t("The page's server does not answer") }
  }
  if (!found.error) return found
  say(found.error, true)
  throw new Error(found.error)
}
export const ask = (path, query = {}) => answer(`${path}?${new URLSearchParams(query)}`)
export const tell = (path, body) => answer(path, { method: "POST", body: JSON.stringify(body) })

/** Keep a Blob as a file. */
export function keep(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name })
  link.click()
  URL.revokeObjectURL(link.href)
}

/** Keep what the server answers as a file. */
export async function save(path, body, name) {
  const got = await fetch(path, { method: "POST", body: JSON.stringify(body) })
  if (!got.ok) return say((await got.json()).error, true)
  keep(await got.blob(), name)
  say(t("Saved"))
}

export function say(text, bad) {
  const said = document.getElementById("said")
  said.textContent = text
  said.className = bad ? "bad" : "soft"
}

/** The address: #view?name=value&... */
export const state = {
  get view() { return location.hash.slice(1).split("?")[0] || "runs" },
  get params() { return new URLSearchParams(location.hash.split("?").slice(1).join("?")) },
  get(name, otherwise = "") { return this.params.get(name) ?? otherwise },
  set(values) {  // without a new entry in the history, nor a new view
    const params = this.params
    for (const [name, value] of Object.entries(values)) {
      if (value === "" || value === null) params.delete(name)
      else params.set(name, value)
    }
    history.replaceState(null, "", `#${this.view}${params.size ? "?" : ""}${params}`)
  },
}
export const link = (view, params) => `#${view}?${new URLSearchParams(params)}`

/** As compare.py's tables show it. */
export function number(value) {
  if (typeof value !== "number") return String(value ?? "")
  if (Number.isInteger(value)) return value.toLocaleString("en")
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 100 ? value.toFixed(4) : value.toPrecision(4)
}

export function copyable(text) {
  const copy = () => navigator.clipboard.writeText(text).then(() => say(t("Copied")))
  const shown = h("pre", { class: "grow", tabindex: 0 }, text)
  return h("div", { class: "row" }, shown, h("button", { onclick: copy }, t("Copy")))
}

/** Call f at most every `wait` ms, and once more behind the last call. */
export function throttle(f, wait) {
  let timer = null
  return () => { timer ??= setTimeout(() => { timer = null; f() }, wait) }
}

/** Call f once nobody has asked for `wait` ms, as last asked. */
export function settle(f, wait) {
  let timer
  return (...values) => { clearTimeout(timer); timer = setTimeout(() => f(...values), wait) }
}

let live, listener, shown, greeted, current = 0
/** Hand live events to f, until another view is shown; {hello} means that some may have been missed. */
export function listen(f) { listener = f }

function connect() {
  live = new EventSource("api/live")
  live.onmessage = message => {
    const event = JSON.parse(message.data)
    if (event.system) drawSystem(event.system)
    if (greeted) listener?.(event)
    greeted = true
  }
}

function drawSystem({ cpu, memory, gpus }) {
  const words = [cpu !== undefined && `CPU ${cpu} %`, memory && `${memory.join(" / ")} GiB`,
    ...gpus.map(([name, busy, used]) => `${name} ${busy} % ${used} MiB`)]
  document.getElementById("system").textContent = words.filter(Boolean).join(" · ")
}

async function show() {
  const view = state.view in modules ? state.view : "runs", turn = ++current, tab = view === "run" ? "runs" : view
  listener = null
  shown?.end?.()
  shown = null
  document.getElementById("tabs").replaceChildren(...Object.entries(views).map(([name, title]) =>
    h("a", { href: `#${name}`, "aria-current": name === tab ? "page" : null }, t(title))))
  say("")
  try {
    const module = await import(`./${modules[view]}.js`)
    if (turn !== current) return
    const fresh = h("div")
    document.getElementById("main").replaceChildren(fresh)
    const made = await module.show(fresh)
    if (turn === current) shown = made
    else made?.end?.()  // another view was asked for meanwhile
  } catch (e) {
    say(e.message, true)
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
  const dark = getComputedStyle(document.documentElement).colorScheme.startsWith("dark")
  localStorage.setItem("theme", document.documentElement.dataset.theme = dark ? "light" : "dark")
  show()
}
window.addEventListener("hashchange", show)
window.addEventListener("pagehide", () => live?.close())
show().then(connect)  // the first picture comes first
