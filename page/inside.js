// The view "Look inside": choose a model and a text; look.js draws what the model computes for it.
import { downloadFrom, get, notify, post, promptOf, state } from "./app.js"
import { button, h, row, select } from "./dom.js"
import { draw } from "./look.js"
import { t } from "./words.js"

export async function show(main) {
  const { models, prompts } = await get("api/inside"), view = h("div")
  if (!models.length) {
    main.append(h("p", {}, t("No models yet: a run exports one with its first checkpoint")))
    return
  }
  const example = name => promptOf(prompts, name, "Once upon a time, there was a little girl.")
  let suggested = example(state.get("model") || models[0])  // replaced unless the user edits it
  const change = name => {
    const isOwn = text.value !== suggested
    suggested = example(name)
    if (!isOwn) text.value = suggested
  }
  const model = select(t("Model"), models, state.get("model"), change, { id: "model" })
  const text = h("textarea", {
    id: "text", rows: 3, style: "margin-top:.6rem", "aria-label": t("Text") },
  state.get("text", suggested))
  const query = () => ({ model: model.querySelector("select").value, text: text.value })
  /** Compute for the chosen model and text, and draw the result. */
  async function look() {
    notify(t("This takes a moment"))
    state.set(query())
    draw(view, await post("api/inside", query()), t)
    notify("")
  }
  const saveFile = () => downloadFrom("api/inside.html", query(), "inside.html")
  const buttons = row(model, button(t("Look inside"), look, { class: "main", id: "look" }),
    button(t("Save as one HTML file"), saveFile))
  main.append(h("div", { class: "card" }, buttons, text), view)
  if (state.get("model")) look()
}
