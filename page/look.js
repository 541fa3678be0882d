// Views of what a model computes for a text, as engine/debug/inside.py describes it. The page
// imports this module; page/inside.py joins dom.js and this file, without imports, in an HTML file.
import { button, floats, h, row, select, soft, table } from "./dom.js"

const ROW = 22  // height of a token's row in the picture of one head, in pixels
const BLUE = "0 110 200", ORANGE = "215 90 0"
const range = n => [...Array(n).keys()]
const clamp = x => Math.max(0, Math.min(1, x))
/** Return a CSS colour of this opacity, clamped to 0 … 1. */
const tint = (opacity, color = BLUE) => `rgb(${color} / ${clamp(opacity).toFixed(3)})`
const percent = p => p >= 0.9995 ? "100 %" : `${(100 * p).toFixed(p < 0.1 ? 2 : 1)} %`
const heading = (...children) => h("th", { scope: "row" }, ...children)

/** Replace the white space of a token by visible symbols. */
function visible(token) {
  if (token === "") return "∅"
  return token.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ | $/g, "␣")
}

/** Format a likely next token and its probability. */
const formatLikely = ([token, p]) => `${visible(token)} ${percent(p)}`
/** Make a cell with a probability, darker if higher. p: undefined for the unknown next token. */
const probabilityCell = p =>
  h("td", { style: `background:${tint(0.7 * (p ?? 0))}` }, p === undefined ? "" : percent(p))

/** Decode a row-major tensor of float32 numbers in base64 into { shape, at(...index) }. */
function tensor({ shape, data }) {
  const values = floats(data)
  const offset = index => index.reduce((sum, i, n) => sum * shape[n] + i, 0)
  return { shape, at: (...index) => values[offset(index)] }
}

/** Return [canvas, its drawing context]. width, height: in pixels; the style may scale them. */
function canvas(width, height, style, attributes) {
  style = `image-rendering:pixelated;${style}`
  const element = h("canvas", { width, height, style, ...attributes })
  return [element, element.getContext("2d")]
}

// Each function in VIEWS takes { data, state, show, t }. data: the description; state: the user's
// choices { view, Layer, head, query }, where the last three count from 0; show(changes): changes
// them and redraws; t: translates a text.

/** Draw the attention of all heads: rows are queries, columns are keys, opacity is the weight. */
function allHeads({ data, show, t }) {
  const [layers, heads, T] = data.attention.shape
  const size = Math.max(48, Math.min(150, Math.floor(900 / heads)))
  const color = [46, 134, 222]  // visible in both themes, because a theme change redraws nothing
  function picture(layer, head) {
    const [element, context] = canvas(T, T, `width:${size}px;height:${size}px;display:block`)
    const image = context.createImageData(T, T)
    for (const query of range(T)) {
      for (const key of range(T)) {
        // The exponent makes small weights visible.
        const opacity = 255 * data.attention.at(layer, head, query, key) ** 0.6
        image.data.set([...color, opacity], 4 * (query * T + key))
      }
    }
    context.putImageData(image, 0, 0)
    const name = `${t("Layer")} ${layer + 1}, ${t("head")} ${head + 1}`
    const choose = () => show({ view: "One head", Layer: layer, head })
    return button(element, choose, { style: "padding:2px", title: name, "aria-label": name })
  }
  const layerRow = layer => row(h("span", { class: "soft" }, `${t("Layer")} ${layer + 1}`),
    range(heads).map(head => picture(layer, head)))
  return [
    soft(t("Each picture: rows are queries, columns are keys. Choose one to see its tokens.")),
    h("div", { class: "scroll" }, range(layers).map(layerRow))]
}

/** Make the drop-downs of layer and head. "Layer" and "head" are titles and names in `state`. */
function picker({ data, state, show, t }) {
  return ["Layer", "head"].map((name, axis) => {
    const options = range(data.attention.shape[axis]).map(i => [i, i + 1])
    return select(t(name), options, state[name], value => show({ [name]: Number(value) }))
  })
}

/** Draw one head: lines from each token on the left to those on the right that it attends to. */
function oneHead(view) {
  const { data, state, t } = view
  const T = data.tokens.length, left = 150, right = 330, stroke = "var(--accent)"
  const lines = h("g"), marks = h("g")
  const weight = (query, key) => data.attention.at(state.Layer, state.head, query, key)
  const box = (x, i, width, attributes, ...children) =>
    h("rect", { x, y: ROW * i + 4, width, height: ROW - 3, ...attributes }, children)
  const line = (query, key) => h("line", {
    x1: left + 4, x2: right - 4, y1: ROW * query + 15, y2: ROW * key + 15, stroke,
    "stroke-width": 2, "stroke-opacity": weight(query, key).toFixed(3) })
  const mark = (query, key) => {
    const p = weight(query, key)
    return box(right - 2, key, 130, { fill: tint(0.75 * p) }, h("title", {}, percent(p)))
  }
  /** Draw the lines of all queries; with `only`, those of one query, and mark its keys. */
  function paint(only) {
    const queries = only === undefined ? range(T) : [only]
    const keys = query => range(query + 1).filter(key => weight(query, key) >= 0.01)
    lines.replaceChildren(...queries.flatMap(query => keys(query).map(key => line(query, key))))
    marks.replaceChildren()
    if (only === undefined) return
    marks.append(box(8, only, left - 6, { fill: "none", stroke }),
      ...range(only + 1).map(key => mark(only, key)))
  }
  const word = (i, x, anchor) => h("text", {
    x, y: ROW * i + 19, "text-anchor": anchor, style: "fill:var(--ink);font-size:13px" },
  visible(data.tokens[i]))
  const token = i => {
    const events = {
      onmouseenter: () => paint(i), onfocus: () => paint(i), onclick: () => { state.query = i } }
    return [word(i, right + 4, "start"), h("g", { tabindex: 0, ...events },
      box(0, i, left, { fill: "transparent" }), word(i, left - 2, "end"))]
  }
  const picture = h("svg", {
    viewBox: `0 0 480 ${ROW * T + 8}`, style: "width:100%;max-width:640px", role: "img",
    "aria-label": t("Lines from each token to those it attends to"),
    onmouseleave: () => paint() }, marks, lines, range(T).map(token))
  paint()
  return [row(picker(view)), soft(t("Point at a token on the left.")),
    h("div", { class: "scroll" }, picture)]
}

/** Draw the elements of a query, of its keys and of their products, whose sum is the score. */
function queryAndKeys(view) {
  const { data, state, show, t } = view
  const { q, k } = data, size = q.shape[3]
  const i = Math.min(state.query, data.tokens.length - 1)
  const kvHead = Math.floor(state.head * data.kv_heads / data.heads)
  const query = range(size).map(d => q.at(state.Layer, state.head, i, d))
  const keys = range(i + 1).map(j => range(size).map(d => k.at(state.Layer, kvHead, j, d)))
  const products = keys.map(key => key.map((x, d) => x * query[d]))
  const max = values => Math.max(1e-9, ...values.flat().map(Math.abs))
  const scales = { q: max(query), k: max(keys), "q × k": max(products) }
  /** Make a strip with a colour for each value. name: "q", "k" or "q × k". */
  function strip(name, values) {
    const label = `${name}: ${values.map(x => x.toPrecision(2)).join(" ")}`
    const attributes = { role: "img", "aria-label": label, title: name }
    const [element, context] = canvas(size, 1, "width:100%;min-width:120px;height:16px", attributes)
    values.forEach((x, d) => {
      context.fillStyle = tint(Math.abs(x) / scales[name], x < 0 ? ORANGE : BLUE)
      context.fillRect(d, 0, 1, 1)
    })
    return element
  }
  const line = (product, j) => {
    const score = product.reduce((sum, x) => sum + x, 0) / Math.sqrt(size)
    const weight = data.attention.at(state.Layer, state.head, i, j)
    return [visible(data.tokens[j]), strip("k", keys[j]), strip("q × k", product),
      score.toFixed(3), probabilityCell(weight)]
  }
  const options = data.tokens.map((token, n) => [n, `${n} ${visible(token)}`])
  const chooser = select(t("query"), options, i, value => show({ query: Number(value) }))
  const heads = ["", "k", "q × k", "Σ / √Q", t("weight")]
  return [row(picker(view), chooser), soft(t("Blue is above zero, orange below.")),
    row("q", h("div", { class: "grow" }, strip("q", query))),
    table(t("Query × key"), heads, products.map(line), "")]
}

/** Draw the text, darker the more probable a token, and a table with the likeliest next tokens. */
function probabilities({ data, t }) {
  // predictions[i] predicts token i + 1; the last one predicts the token after the text.
  const tokens = data.tokens.slice(1).map((token, i) => ({ token, ...data.predictions[i] }))
  const nats = tokens.reduce((sum, { p }) => sum - Math.log(Math.max(p, 1e-12)), 0) / tokens.length
  const span = ({ token, p, rivals }) => h("span", {
    title: `${percent(p)}; ${rivals.map(formatLikely).join(", ")}`,
    style: `background:${tint(0.75 * p)};padding:2px 0;border-radius:3px` }, token)
  const line = ({ token, p, rivals }) =>
    [visible(token), probabilityCell(p), ...rivals.map(formatLikely)]
  const next = { ...data.predictions.at(-1), token: t("next token") }
  return [
    h("p", { style: "line-height:2.1;white-space:pre-wrap" }, data.tokens[0], tokens.map(span)),
    soft(tokens.length ? `${nats.toFixed(4)} ${t("nats per token")}` : ""),
    table(t("Probabilities"), [t("token"), "p", "1", "2", "3"], [...tokens, next].map(line))]
}

/** Draw the logit lens: final norm and classifier on each layer's residual, last layer on top. */
function lens({ data, t }) {
  const cell = ({ rivals, p }) => {
    const actual = p === undefined ? "" : `; ${t("actual")}: ${percent(p)}`
    const [token, highest] = rivals[0]
    return h("td", {
      style: `background:${tint(0.7 * highest)}`,
      title: rivals.map(formatLikely).join(", ") + actual }, visible(token))
  }
  const rows = data.lens.map((predictions, layer) => [
    heading(layer ? `${t("Layer")} ${layer}` : t("embedding")), ...predictions.map(cell)])
  return [soft(t("Each row: the likeliest next token, if the model ended with that layer.")),
    table(t("Logit lens"), ["", ...data.tokens.map(visible)], rows.reverse(), "")]
}

/** List the nearest embeddings of each distinct token. */
function neighbours({ data, t }) {
  const first = [...data.ids.keys()].filter(i => data.ids.indexOf(data.ids[i]) === i)
  const near = ([token, cosine]) => `${visible(token)} ${cosine.toFixed(2)}`
  const rows = first.map(i => [heading(visible(data.tokens[i])), ...data.neighbours[i].map(near)])
  return [soft(t("The tokens with the most similar embeddings, by cosine.")),
    table(t("Embeddings"), [], rows)]
}

/** Draw a histogram of each weight tensor. */
function weights({ data, t }) {
  const histogram = ({ name, shape, counts, edges, std }) => {
    const ends = (from, to) => `${edges[from].toPrecision(3)} … ${edges.at(to).toPrecision(3)}`
    const max = Math.max(...counts), width = 200 / counts.length
    const bars = counts.map((count, i) => {
      const height = 52 * count / max
      return h("rect", {
        x: width * i, y: 54 - height, width: width - 0.6, height, fill: "var(--accent)" },
      h("title", {}, `${ends(i, i + 1)}: ${count}`))
    })
    const style = "width:100%", viewBox = "0 0 200 56"
    return h("figure", { style: "margin:0;overflow-wrap:anywhere" },
      h("svg", { viewBox, style, role: "img", "aria-label": name }, bars),
      h("figcaption", { class: "soft" }, `${name} (${shape.join(" × ")})`, h("br"),
        `${ends(0, -1)}, ${t("standard deviation")} ${std.toPrecision(3)}`))
  }
  const style = "grid-template-columns:repeat(auto-fill,minmax(min(230px,100%),1fr))"
  return h("div", { class: "grid", style }, data.weights.map(histogram))
}

const VIEWS = {
  "Attention": allHeads, "One head": oneHead, "Query × key": queryAndKeys,
  "Probabilities": probabilities, "Logit lens": lens, "Embeddings": neighbours, "Weights": weights,
}

/** Draw one view at a time in `root`. data: from describe() of engine/debug/inside.py. */
export function draw(root, data, t = text => text) {
  data = { ...data }
  for (const name of ["attention", "q", "k"]) data[name] = tensor(data[name])
  const state = { view: "Attention", Layer: 0, head: 0, query: data.tokens.length - 1 }
  function show(changes) {
    Object.assign(state, changes)
    const tab = name => button(t(name), () => show({ view: name }), {
      role: "tab", "aria-selected": String(name === state.view),
      class: name === state.view ? "main" : null })
    const cutNote = data.cut ? soft(`${t("Tokens left out at the end")}: ${data.cut}`) : ""
    const view = h("section", { class: "card", style: "margin-top:.7rem" },
      VIEWS[state.view]({ data, state, show, t }))
    const tabs = h("div", { class: "row", role: "tablist" }, Object.keys(VIEWS).map(tab))
    root.replaceChildren(h("h1", {}, data.name), cutNote, tabs, view)
    root.querySelector("[aria-selected=true]").focus({ preventScroll: true })
  }
  show({})
}
