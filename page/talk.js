// Talk: one or two models continue a text, or answer, as it comes; by the same addresses that OpenAI's clients use.
import { ask, say, state } from "./app.js"
import { h, select } from "./dom.js"
import { t } from "./words.js"

const KNOBS = {  // name: title, usual value, and of its field what is not usual
  temperature: ["Temperature", 0.8, { min: 0, max: 10, step: "any" }],
  top_p: ["Top p", 0.9, { min: 0.01, max: 1, step: "any" }],
  max_tokens: ["Most tokens", 200, { min: 1 }],
  seed: ["Seed", "", { placeholder: t("any") }],
  stop: ["Stop text", "", { type: "text" }],
}

/** The events of a stream, until it ends or `signal` says so. */
async function* events(path, body, signal) {
  const answer = await fetch(path, { method: "POST", body: JSON.stringify(body), signal })
  if (!answer.headers.get("Content-Type").startsWith("text/event-stream")) {
    const { error } = await answer.json()
    throw new Error(error.message || error)
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader()
  for (let held = "", part; !(part = await reader.read()).done;) {
    const lines = (held + part.value).split("\n\n")
    held = lines.pop()
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue
      const event = JSON.parse(line.slice(6))
      if (event.error) throw new Error(event.error.message)
      yield event
    }
  }
}

export async function show(main) {
  const models = (await ask("v1/models")).data
  if (!models.length) return void main.append(h("p", {}, t("No models yet: a run leaves one with its first checkpoint")))
  const sides = [state.get("model") || models[0].id, state.get("beside")].map(id =>
    ({ id, said: h("div"), messages: [], speed: h("p", { class: "soft" }) }))
  const used = () => sides.filter(side => side.id)
  const text = h("textarea", { id: "words", rows: 3, "aria-label": t("Text") }, state.get("text", "Once upon a time"))
  const panes = h("div", { class: "grid", id: "panes" })
  const go = h("button", { class: "main", id: "go", onclick: () => talk(false) }, t("Continue"))
  const answer = h("button", { id: "answer", onclick: () => talk(true) }, t("Answer"))
  const stop = h("button", { disabled: true, onclick: () => ended?.abort() }, t("Stop"))
  let ended = null
  const choose = (n, title, others) => select(t(title), [...others, ...models.map(m => m.id)], sides[n].id,
    id => { sides[n].id = id; anew() }, { id: `model${n}` })
  const knobs = Object.entries(KNOBS).map(([name, [title, usual, kind]]) => h("label", {}, t(title),
    h("input", { id: name, style: "width:6.5rem", type: "number", ...kind, value: state.get(name, String(usual)),
      onchange: e => state.set({ [name]: e.target.value }) })))

  function anew() {
    ended?.abort()
    state.set({ model: sides[0].id, beside: sides[1].id })
    for (const side of sides) {
      side.messages = []
      side.said.replaceChildren()
      side.speed.textContent = ""
    }
    const pane = ({ id, said, speed }) => h("section", { class: "card" }, h("h2", {}, id), said, speed)
    panes.replaceChildren(...used().map(pane))
    answer.hidden = !used().every(side => models.find(m => m.id === side.id)?.chat)
  }
  function wish() {
    const fields = Object.keys(KNOBS).map(name => [name, main.querySelector(`#${name}`).value])
    const given = fields.filter(([, value]) => value !== "")
    return Object.fromEntries(given.map(([name, value]) => [name, name === "stop" ? value : +value]))
  }
  function busy(yes) {
    go.disabled = answer.disabled = yes
    stop.disabled = !yes
  }
  async function talk(chat) {
    state.set({ text: text.value })
    ended = new AbortController()
    busy(true)
    say("")
    const failed = (side, e) => e.name !== "AbortError" && say(`${side.id}: ${e.message}`, true)
    await Promise.all(used().map(side => speak(side, chat).catch(e => failed(side, e))))
    busy(false)
  }
  async function speak(side, chat) {
    const words = h("span"), asked = text.value, begun = performance.now()
    if (chat) side.messages.push({ role: "user", content: asked })
    else {
      side.said.replaceChildren()
      side.messages = []
    }
    const style = "white-space:pre-wrap;overflow-wrap:anywhere"
    side.said.append(h("p", { style }, h("b", {}, asked), chat && h("br"), words))
    const body = { model: side.id, stream: true, ...wish(), ...(chat ? { messages: side.messages } : { prompt: asked }) }
    let count = 0
    try {
      for await (const { choices: [said] } of events(`v1/${chat ? "chat/" : ""}completions`, body, ended.signal)) {
        words.append((chat ? said.delta.content : said.text) || "")
        side.speed.textContent = `${(1000 * ++count / (performance.now() - begun)).toFixed(0)} ${t("tokens/s")}`
      }
    } finally {
      if (chat && words.textContent) side.messages.push({ role: "assistant", content: words.textContent })
      else if (chat) side.messages.pop()
    }
  }
  const again = h("button", { onclick: anew }, t("Begin anew"))
  main.append(h("h1", {}, t("Talk")), h("div", { class: "card" },
    h("div", { class: "row" }, choose(0, "Model", []), choose(1, "Beside it", [["", t("nobody")]])),
    h("div", { class: "row", style: "margin:.6rem 0" }, knobs), text,
    h("div", { class: "row", style: "margin-top:.5rem" }, go, answer, stop, again)), panes)
  anew()
  return { end: () => ended?.abort() }
}
