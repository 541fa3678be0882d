// Look inside: choose a checkpoint and a text, then look at what the model does with it.
import { h, t, ask, say, state } from "./app.js"
import { learn } from "./words.js"
import { draw } from "./look.js"

learn({ "Model": "模型", "Text": "文本", "Attention": "注意力", "One head": "单个头", "Query × key": "查询 × 键", "Probabilities": "概率", "Logit lens": "逐层预测",
  "Embeddings": "嵌入", "Weights": "权重", "Layer": "层", "head": "头", "query": "查询", "weight": "权重", "token": "词元", "embedding": "嵌入",
  "what follows": "接下来", "what came": "实际", "nats per token": "奈特/词元", "deviation": "标准差", "Tokens left out at the end": "末尾省略的词元",
  "Point at a token on the left.": "指向左边的一个词元。", "Blue is above zero, orange below.": "蓝色大于零，橙色小于零。",
  "Lines from each token to those it looks at": "每个词元到其所关注词元的连线",
  "Each picture: a row is a token that looks, a column one that is looked at. Choose one to see its words.": "每幅图：行是发出关注的词元，列是被关注的词元。选择一幅可看其文字。",
  "Each row: the likeliest next token, if the model ended with that layer.": "每行：若模型止于该层，最可能的下一个词元。",
  "The tokens with the most similar embeddings, by cosine.": "嵌入最相似的词元（余弦）。",
  "No models yet: a run leaves one with its first checkpoint": "还没有模型：训练保存第一个检查点后就有了" })

export async function show(main) {
  const { models } = await ask("api/inside"), view = h("div")
  if (!models.length) return void main.append(h("p", {}, t("No models yet: a run leaves one with its first checkpoint")))
  const select = h("select", { id: "model" }, models.map(name => h("option", { value: name, selected: name === state.get("model") }, name)))
  const text = h("textarea", { id: "text", rows: 3, style: "margin-top:.6rem", "aria-label": t("Text") }, state.get("text", "Once upon a time, there was a little girl."))
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
