// Look inside: choose a checkpoint and a text, then look at what the model does with it.
import { ask, tell, save, say, state } from "./app.js"
import { h, select } from "./dom.js"
import { draw } from "./look.js"
import { t } from "./words.js"

export async function show(main) {
  const { models } = await ask("api/inside"), view = h("div")
  if (!models.length) return void main.append(h("p", {}, t("No models yet: a run leaves one with its first checkpoint")))
  const model = select(t("Model"), models, state.get("model"), () => {}, { id: "model" })
  const text = h("textarea", { id: "text", rows: 3, style: "margin-top:.6rem", "aria-label": t("Text") },
    state.get("text", "Once upon a time, there was a little girl."))
  const asked = () => ({ model: model.querySelector("select").value, text: text.value })
  async function look() {
    say(t("This takes a moment"))
    state.set(asked())
    draw(view, await tell("api/inside", asked()), t)
    say("")
  }
  const file = () => save("api/inside.html", asked(), "inside.html")
  main.append(h("div", { class: "card" }, h("div", { class: "row" }, model,
    h("button", { class: "main", id: "look", onclick: look }, t("Look inside")),
    h("button", { onclick: file }, t("Save as one HTML file"))), text), view)
  if (state.get("model")) look()
}
