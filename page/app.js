// The page's frame: views by the address, elements, live events. What comes from a log or a model is text, never HTML.
import { t, language, setLanguage } from "./words.js"

export { t }
export const views = { runs: "Runs", start: "Start", inside: "Look inside", talk: "Talk" }  // and run, which follows one run
export const colors = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f5fc7", "#8a8a8a"]

/** An element: h("a", {href: "#x", onclick: f}, "text", child, ...). Children that are no elements become text. */
export function h(tag, attributes, ...children) {
  const element = document.createElement(tag)
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value)
    else if (name in element && !["list", "form"].includes(name) && typeof value !== "string") element[name] = value
    else if (value !== null && value !== undefined) element.setAttribute(name, value)
  }
  element.append(...children.flat(9).filter(c => c !== null && c !== undefined && c !== false))
  return element
}

/** What the server answers; an error is said to the reader and thrown. */
export async function ask(path, body) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) }
  let found
  try {
    const answer = await fetch(path, options)
    found = answer.headers.get("Content-Type").startsWith("application/json") ? await answer.json() : { error: await answer.text() }
    if (!answer.ok && !found.error) found.error = answer.statusText
  } catch (e) { found = { error: t("The page's server does not answer") } }
  if (found.error) { say(found.error, true); throw new Error(found.error) }
  return found
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
    for (const [name, value] of Object.entries(values)) value === "" || value === null ? params.delete(name) : params.set(name, value)
    history.replaceState(null, "", `#${this.view}${params.size ? "?" : ""}${params}`)
  },
}
export const link = (view, params) => `#${view}?${new URLSearchParams(params)}`

/** The seven figures of compare.py's tables. */
export function number(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "" : String(value)
  if (Number.isInteger(value)) return value.toLocaleString("en")
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 100 ? value.toFixed(4) : value.toPrecision(4)
}

export function copyable(text) {
  return h("div", { class: "row" }, h("pre", { class: "grow", tabindex: 0 }, text),
    h("button", { onclick: () => navigator.clipboard.writeText(text).then(() => say(t("Copied"))) }, t("Copy")))
}

/** Call f at most every `wait` ms, and once more behind the last call. */
export function throttle(f, wait) {
  let timer = null
  return () => { timer ??= setTimeout(() => { timer = null; f() }, wait) }
}

let live, listener = () => {}, current = 0, shown
export function listen(f) { listener = f }

function connect() {
  live = new EventSource("api/live")
  live.onmessage = message => {
    const event = JSON.parse(message.data)
    if (event.system) {
      const { cpu, memory, gpus } = event.system
      document.getElementById("system").textContent = [cpu !== undefined && `CPU ${cpu} %`, memory && `${memory[0]} / ${memory[1]} GiB`,
        ...(gpus || []).map(g => `${g[0]} ${g[1]} % ${g[2]} MiB`)].filter(Boolean).join(" · ")
    }
    listener(event)
  }
}

async function show() {
  const view = state.view, turn = ++current, main = document.getElementById("main")
  listener = () => {}
  shown?.end?.()
  document.getElementById("tabs").replaceChildren(...Object.entries(views).map(([name, title]) =>
    h("a", { href: `#${name}`, "aria-current": name === view || view === "run" && name === "runs" ? "page" : null }, t(title))))
  document.documentElement.lang = language()
  document.getElementById("language").textContent = language() === "zh" ? "English" : "中文"
  const names = { runs: "compare", run: "follow", start: "start", inside: "inside", talk: "talk" }
  say("")
  try {
    const module = await import(`./${names[view] || "compare"}.js`)
    if (turn !== current) return
    const fresh = h("div")
    main.replaceChildren(fresh)
    shown = await module.show(fresh)
  } catch (e) { say(e.message, true); console.error(e) }
}

document.getElementById("language").onclick = () => { setLanguage(language() === "zh" ? "en" : "zh"); show() }
document.getElementById("theme").onclick = () => {
  const dark = getComputedStyle(document.documentElement).colorScheme.startsWith("dark")
  localStorage.setItem("theme", document.documentElement.dataset.theme = dark ? "light" : "dark")
  show()
}
window.addEventListener("hashchange", show)
window.addEventListener("pagehide", () => live?.close())
connect()
show()
