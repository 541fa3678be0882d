// Talk: one or two models continue a text, or answer, as it comes; by the same addresses that OpenAI's clients use.
import { h, t, ask, say, state } from "./app.js"
import { learn } from "./words.js"

learn({ "Model": "模型", "Beside it": "并排比较", "nobody": "无", "Continue": "续写", "Answer": "回答", "Stop": "停止", "Begin anew": "重新开始", "Text": "文本",
  "Your words": "你的话", "Temperature": "温度", "Top p": "Top p", "Most tokens": "最多词元", "Seed": "种子", "Stop text": "停止文本", "any": "任意",
  "tokens/s": "词元/秒", "No models yet: a run leaves one with its first checkpoint": "还没有模型：训练保存第一个检查点后就有了" })
const KNOBS = { temperature: ["Temperature", 0.8, { type: "number", min: 0, max: 10, step: "any" }], top_p: ["Top p", 0.9, { type: "number", min: 0.01, max: 1, step: "any" }],
  max_tokens: ["Most tokens", 200, { type: "number", min: 1 }], seed: ["Seed", "", { type: "number", placeholder: "any" }], stop: ["Stop text", "", { type: "text" }] }

/** The events of a stream, until it ends or `signal` says so. */
export async function* events(path, body, signal) {
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
  const sides = [state.get("model") || models[0].id, state.get("beside")].map(id => ({ id, said: h("div"), messages: [], speed: h("p", { class: "soft" }) }))
  const text = h("textarea", { id: "words", rows: 3, "aria-label": t("Text") }, state.get("text", "Once upon a time"))
  const panes = h("div", { class: "grid", id: "panes" }), go = h("button", { class: "main", id: "go", onclick: () => talk(false) }, t("Continue"))
  const answer = h("button", { id: "answer", onclick: () => talk(true) }, t("Answer")), stop = h("button", { disabled: true, onclick: () => ended?.abort() }, t("Stop"))
  let ended = null
  const select = (n, others) => h("select", { id: `model${n}`, onchange: e => { sides[n].id = e.target.value; anew() } },
    others, models.map(m => h("option", { value: m.id, selected: m.id === sides[n].id }, m.id)))
  const knobs = Object.entries(KNOBS).map(([name, [title, usual, kind]]) => h("label", {}, t(title),
    h("input", { id: name, style: "width:6.5rem", ...kind, value: state.get(name, String(usual)), onchange: e => state.set({ [name]: e.target.value }) })))

  function anew() {
    ended?.abort()
    state.set({ model: sides[0].id, beside: sides[1].id })
    for (const side of sides) { side.messages = []; side.said.replaceChildren(); side.speed.textContent = "" }
    const used = sides.filter(side => side.id)
    panes.replaceChildren(...used.map(side => h("section", { class: "card" }, h("h2", {}, side.id), side.said, side.speed)))
    answer.hidden = !used.every(side => models.find(m => m.id === side.id)?.chat)
  }
  function wish() {
    const found = {}
    for (const name of Object.keys(KNOBS)) {
      const given = main.querySelector(`#${name}`).value
      if (given !== "") found[name] = name === "stop" ? given : +given
    }
    return found
  }
  async function talk(chat) {
    state.set({ text: text.value })
    ended = new AbortController()
    for (const button of [go, answer, stop]) button.disabled = button !== stop
    say("")
    await Promise.all(sides.filter(side => side.id).map(side => speak(side, chat).catch(e => e.name !== "AbortError" && say(`${side.id}: ${e.message}`, true))))
    for (const button of [go, answer, stop]) button.disabled = button === stop
  }
  async function speak(side, chat) {
    const words = h("span"), asked = text.value, begun = performance.now()
    if (chat) side.messages.push({ role: "user", content: asked })
    if (!chat) { side.said.replaceChildren(); side.messages = [] }
    side.said.append(h("p", { style: "white-space:pre-wrap;overflow-wrap:anywhere" }, h("b", {}, asked), chat ? h("br") : "", words))
    let count = 0
    try {
      const body = { model: side.id, stream: true, ...wish(), ...(chat ? { messages: side.messages } : { prompt: asked }) }
      for await (const { choices: [choice] } of events(chat ? "v1/chat/completions" : "v1/completions", body, ended.signal)) {
        words.append((chat ? choice.delta.content : choice.text) || "")
        side.speed.textContent = `${(1000 * ++count / (performance.now() - begun)).toFixed(0)} ${t("tokens/s")}`
      }
    } finally {
      if (chat) words.textContent ? side.messages.push({ role: "assistant", content: words.textContent }) : side.messages.pop()
    }
  }
  main.append(h("h1", {}, t("Talk")), h("div", { class: "card" }, h("div", { class: "row" }, h("label", {}, t("Model"), select(0, [])),
    h("label", {}, t("Beside it"), select(1, [h("option", { value: "" }, t("nobody"))]))), h("div", { class: "row", style: "margin:.6rem 0" }, knobs), text,
    h("div", { class: "row", style: "margin-top:.5rem" }, go, answer, stop, h("button", { onclick: anew }, t("Begin anew")))), panes)
  anew()
  return { end: () => ended?.abort() }
}
