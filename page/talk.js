// The view "Talk": one or two models continue a text or answer a question, over the server's
// OpenAI-compatible API.
import { get, notify, promptOf, state } from "./app.js"
import { button, h, row, select } from "./dom.js"
import { t } from "./words.js"

const FIELDS = {  // {field of a request: [title, default, attributes of its input]}
  temperature: ["Temperature", 0.8, { min: 0, max: 10, step: "any" }],
  top_p: ["Top p", 0.9, { min: 0.01, max: 1, step: "any" }],
  max_tokens: ["Max tokens", 200, { min: 1 }],
  seed: ["Seed", "", { placeholder: t("any") }],
  stop: ["Stop text", "", { type: "text" }],
}

/** Post a request and yield its server-sent events. signal: from an AbortController. */
async function* events(path, body, signal) {
  const response = await fetch(path, { method: "POST", body: JSON.stringify(body), signal })
  if (!response.headers.get("Content-Type").startsWith("text/event-stream")) {
    const { error } = await response.json()
    throw new Error(error.message || error)
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ""  // the incomplete event at the end of the data so far
  for (;;) {
    const { done, value } = await reader.read()
    if (done) return
    const blocks = (rest + value).split("\n\n")
    rest = blocks.pop()
    for (const block of blocks) {
      if (!block.startsWith("data: ") || block === "data: [DONE]") continue
      const event = JSON.parse(block.slice("data: ".length))
      if (event.error) throw new Error(event.error.message)
      yield event
    }
  }
}

export async function show(main) {
  const models = (await get("v1/models")).data
  if (!models.length) {
    main.append(h("p", {}, t("No models yet: a run exports one with its first checkpoint")))
    return
  }
  const { prompts } = await get("api/inside")
  let suggested = ""  // suggested prompt, replaced unless the user edits it
  let stopper = null  // AbortController of the current requests
  // A side is a model's column: the model's id ("": no model) and the messages of its conversation.
  const makeSide = id => ({ id, output: h("div"), messages: [], speed: h("p", { class: "soft" }) })
  const newest = models.reduce((a, b) => b.created > a.created ? b : a).id
  const sides = [makeSide(state.get("model") || newest), makeSide(state.get("beside"))]
  const usedSides = () => sides.filter(side => side.id)
  const text = h("textarea", {
    id: "words", rows: 3, "aria-label": t("Text") }, state.get("text"))
  const panes = h("div", { class: "grid", id: "panes" })
  const go = button(t("Continue"), () => talk(false), { class: "main", id: "go" })
  const answer = button(t("Answer"), () => talk(true), { id: "answer" })
  const stop = button(t("Stop"), () => stopper?.abort(), { disabled: true })
  const chooser = (n, title, others) => {
    const choose = id => {
      sides[n].id = id
      restart()
    }
    const options = [...others, ...models.map(model => model.id)]
    return select(t(title), options, sides[n].id, choose, { id: `model${n}` })
  }
  const inputs = Object.entries(FIELDS).map(([id, [title, defaultValue, attributes]]) => {
    const value = state.get(id, String(defaultValue)), style = "width:6.5rem"
    const onchange = event => state.set({ [id]: event.target.value })
    return h("label", {}, t(title),
      h("input", { id, type: "number", style, ...attributes, value, onchange }))
  })

  /** Stop the requests, clear both sides, and show those with a model. */
  function restart() {
    stopper?.abort()
    state.set({ model: sides[0].id, beside: sides[1].id })
    if (text.value === suggested) {
      text.value = suggested = promptOf(prompts, sides[0].id, "Once upon a time")
    }
    for (const side of sides) {
      side.messages = []
      side.output.replaceChildren()
      side.speed.textContent = ""
    }
    panes.replaceChildren(...usedSides().map(({ id, output, speed }) =>
      h("section", { class: "card" }, h("h2", {}, id), output, speed)))
    const canChat = side => models.find(model => model.id === side.id)?.chat
    answer.hidden = !usedSides().every(canChat)
  }

  /** Return {field: value} of the FIELDS that the user has filled in. */
  function fields() {
    const found = {}
    for (const name of Object.keys(FIELDS)) {
      const { value } = main.querySelector(`#${name}`)
      if (value !== "") found[name] = name === "stop" ? value : Number(value)
    }
    return found
  }

  function setBusy(yes) {
    go.disabled = answer.disabled = yes
    stop.disabled = !yes
  }

  /** Let all chosen models answer, or continue the text, at the same time. */
  async function talk(isChat) {
    state.set({ text: text.value })
    stopper = new AbortController()
    setBusy(true)
    notify("")
    await Promise.all(usedSides().map(async side => {
      try {
        await speak(side, isChat)
      } catch (e) {
        if (e.name !== "AbortError") notify(`${side.id}: ${e.message}`, true)
      }
    }))
    setBusy(false)
  }

  /** Stream one model's answer, or its continuation, into its side. */
  async function speak(side, isChat) {
    const prompt = text.value, reply = h("span"), begun = performance.now()
    if (!isChat) {
      side.output.replaceChildren()
      side.messages = []
    }
    const { messages } = side  // restart() begins another list while this one is answered
    if (isChat) messages.push({ role: "user", content: prompt })
    const style = "white-space:pre-wrap;overflow-wrap:anywhere"
    side.output.append(h("p", { style }, h("b", {}, prompt), isChat && h("br"), reply))
    const path = isChat ? "v1/chat/completions" : "v1/completions"
    const input = isChat ? { messages } : { prompt }
    const body = { model: side.id, stream: true, ...fields(), ...input }
    let count = 0
    try {
      for await (const { choices: [choice] } of events(path, body, stopper.signal)) {
        reply.append((isChat ? choice.delta.content : choice.text) || "")
        const speed = 1000 * ++count / (performance.now() - begun)
        side.speed.textContent = `${speed.toFixed(0)} ${t("tokens/s")}`
      }
    } finally {
      // Keep an incomplete answer, but drop a question without one, because roles must alternate.
      if (isChat && reply.textContent) {
        messages.push({ role: "assistant", content: reply.textContent })
      } else if (isChat) messages.pop()
    }
  }

  main.append(h("h1", {}, t("Talk")),
    h("div", { class: "card" },
      row(chooser(0, "Model", []), chooser(1, "Compare with", [["", t("none")]])),
      h("div", { class: "row", style: "margin:.6rem 0" }, inputs), text,
      h("div", { class: "row", style: "margin-top:.5rem" }, go, answer, stop,
        button(t("Start over"), restart))),
    panes)
  restart()
  return { end: () => stopper?.abort() }
}
