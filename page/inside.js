// Look inside: choose a checkpoint and a text, then look at what the model does with it.
import { h, t, ask, say, state, learn } from "./app.js"
import { draw } from "./look.js"

export async function show(main) {
  const { models } = await ask("api/inside"), view = h("div")
  if (!models.length) return void main.append(h("p", {}, t("No models yet: a run leaves one with its first checkpoint")))
  const select = h("select", { id: "model" }, models.map(name => h("option", { value: name, selected: name === state.get("model") }, name)))
  const text = h("textarea", { id: "text", rows: 3, "aria-label": t("Text") }, state.get("text", "Once upon a time, there was a little girl."))
  const asked = () => ({ model: select.value, text: text.value })
  async function look() {
    say(t("This takes a moment"))
    state.set(asked())
    draw(view, await ask("api/inside", asked()), t)
    say("")
  }
  async function save() {
    const answer = await fetch("api/inside.html", { method: "POST", body: JSON.stringify(asked()) })
    const link = h("a", { href: URL.createObjectURL(await answer.blob()), download: "inside.html" })
    link.click()
    URL.revokeObjectURL(link.href)
  }
  main.append(h("div", { class: "card" }, h("div", { class: "row" }, h("label", {}, t("Model"), select),
    h("button", { class: "main", id: "look", onclick: look }, t("Look inside")), h("button", { onclick: save }, t("Save as one HTML file"))), text), view)
  if (state.get("model")) look()
}
