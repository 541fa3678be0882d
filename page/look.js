// The views of engine/debug/inside.py's data: in the page, and in the one file that sample.py writes, which has dom.js before it.
import { h, select, table } from "./dom.js"

const ROW = 22  // pixels
const count = n => [...Array(n).keys()]
const shown = token => token === "" ? "∅" : token.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ | $/g, "␣")
const percent = p => p >= 0.9995 ? "100 %" : `${(100 * p).toFixed(p < 0.1 ? 2 : 1)} %`
const tint = (p, hue = "0 110 200") => `rgb(${hue} / ${Math.max(0, Math.min(1, p)).toFixed(3)})`
const tinted = (p, ...content) => h("td", { style: `background:${tint(0.7 * p)}` }, ...content)
const likely = ([token, p]) => `${shown(token)} ${percent(p)}`
const soft = text => h("p", { class: "soft" }, text)

/** An array of numbers, and where an index of them stands. */
function unpack({ shape, data }) {
  const values = new Float32Array(Uint8Array.from(atob(data), c => c.charCodeAt(0)).buffer)
  return { shape, at: (...index) => values[index.reduce((sum, i, n) => sum * shape[n] + i, 0)] }
}

/** All heads of all layers: a small picture each, dark where a query (row) looks at a key (column). */
function heads(data, state, show, t) {
  const [layers, n, T] = data.attention.shape, size = Math.max(48, Math.min(150, Math.floor(900 / n)))
  const dark = getComputedStyle(document.documentElement).colorScheme.startsWith("dark")
  function picture(layer, head) {
    const style = `width:${size}px;height:${size}px;image-rendering:pixelated;display:block`
    const canvas = h("canvas", { width: T, height: T, style }), paper = canvas.getContext("2d")
    const image = paper.createImageData(T, T)
    for (const i of count(T)) {
      for (const j of count(T)) {
        const weight = 255 * data.attention.at(layer, head, i, j) ** 0.6
        image.data.set(dark ? [108, 182, 255, weight] : [0, 96, 168, weight], 4 * (i * T + j))
      }
    }
    paper.putImageData(image, 0, 0)
    const name = `${t("Layer")} ${layer + 1}, ${t("head")} ${head + 1}`
    const choose = () => show({ view: "One head", Layer: layer, head })
    return h("button", { style: "padding:2px", title: name, "aria-label": name, onclick: choose }, canvas)
  }
  const row = layer => h("div", { class: "row" }, h("span", { class: "soft" }, `${t("Layer")} ${layer + 1}`),
    count(n).map(head => picture(layer, head)))
  return [soft(t("Each picture: a row is a token that looks, a column one that is looked at. Choose one to see its words.")),
    h("div", { class: "scroll" }, count(layers).map(row))]
}

/** Drop-downs of layer and head. */
function picker(data, state, show, t) {
  const numbers = axis => count(data.attention.shape[axis]).map(i => [i, i + 1])
  return ["Layer", "head"].map((name, axis) => select(t(name), numbers(axis), state[name], i => show({ [name]: +i })))
}

/** One head: every token on the left looks at those on the right; pointing at one shows its lines alone. */
function head(data, state, show, t) {
  const T = data.tokens.length, left = 150, right = 330, weight = (i, j) => data.attention.at(state.Layer, state.head, i, j)
  const lines = h("g"), marks = h("g"), stroke = "var(--accent)"
  const box = (x, i, width, more, ...inside) => h("rect", { x, y: ROW * i + 4, width, height: ROW - 3, ...more }, inside)
  const line = (i, j) => h("line", { x1: left + 4, x2: right - 4, y1: ROW * i + 15, y2: ROW * j + 15, stroke,
    "stroke-width": 2, "stroke-opacity": weight(i, j).toFixed(3) })
  const mark = (i, j) => box(right - 2, j, 130, { fill: tint(0.75 * weight(i, j)) }, h("title", {}, percent(weight(i, j))))
  function paint(only) {
    const queries = only === undefined ? count(T) : [only]
    lines.replaceChildren(...queries.flatMap(i => count(i + 1).filter(j => weight(i, j) >= 0.01).map(j => line(i, j))))
    marks.replaceChildren(...(only === undefined ? [] : [box(8, only, left - 6, { fill: "none", stroke }),
      ...count(only + 1).map(j => mark(only, j))]))
  }
  const word = (i, x, anchor) =>
    h("text", { x, y: ROW * i + 19, "text-anchor": anchor, style: "fill:var(--ink);font-size:13px" }, shown(data.tokens[i]))
  const token = i => [word(i, right + 4, "start"),
    h("g", { tabindex: 0, onmouseenter: () => paint(i), onfocus: () => paint(i), onclick: () => { state.query = i } },
      box(0, i, left, { fill: "transparent" }), word(i, left - 2, "end"))]
  const view = h("svg", { viewBox: `0 0 480 ${ROW * T + 8}`, style: "width:100%;max-width:640px", role: "img",
    "aria-label": t("Lines from each token to those it looks at"), onmouseleave: () => paint() },
  marks, lines, count(T).map(token))
  paint()
  return [h("div", { class: "row" }, picker(data, state, show, t)), soft(t("Point at a token on the left.")),
    h("div", { class: "scroll" }, view)]
}

/** One query and the keys before it, number by number: their products add up to the score, whose softmax is the weight. */
function neurons(data, state, show, t) {
  const { q, k } = data, Q = q.shape[3], i = Math.min(state.query, data.tokens.length - 1), keys = count(i + 1)
  const group = Math.floor(state.head * data.kv_heads / data.heads)
  const query = count(Q).map(d => q.at(state.Layer, state.head, i, d))
  const key = keys.map(j => count(Q).map(d => k.at(state.Layer, group, j, d)))
  const both = key.map(row => row.map((x, d) => x * query[d]))
  const largest = values => Math.max(1e-9, ...values.flat().map(Math.abs))
  const mosts = { q: largest(query), k: largest(key), "q × k": largest(both) }
  function strip(name, values) {
    const style = "width:100%;min-width:120px;height:16px;image-rendering:pixelated"
    const told = `${name}: ${values.map(x => x.toPrecision(2)).join(" ")}`
    const canvas = h("canvas", { width: Q, height: 1, style, role: "img", "aria-label": told, title: name })
    const paper = canvas.getContext("2d")
    values.forEach((x, d) => {
      paper.fillStyle = tint(Math.abs(x) / mosts[name], x < 0 ? "215 90 0" : "0 110 200")
      paper.fillRect(d, 0, 1, 1)
    })
    return canvas
  }
  const row = j => {
    const score = both[j].reduce((sum, x) => sum + x, 0) / Math.sqrt(Q)
    const weight = data.attention.at(state.Layer, state.head, i, j), name = shown(data.tokens[j])
    return [name, strip("k", key[j]), strip("q × k", both[j]), score.toFixed(3), tinted(weight, percent(weight))]
  }
  const queries = data.tokens.map((token, n) => [n, `${n} ${shown(token)}`])
  const chooser = select(t("query"), queries, i, n => show({ query: +n }))
  return [h("div", { class: "row" }, picker(data, state, show, t), chooser), soft(t("Blue is above zero, orange below.")),
    h("div", { class: "row" }, "q", h("div", { class: "grow" }, strip("q", query))),
    table(t("Query × key"), ["", "k", "q × k", "Σ / √Q", t("weight")], keys.map(row), "")]
}

/** The text, dark where the model knew; and beside each token what it thought likelier. */
function probabilities(data, state, show, t) {
  const told = data.tokens.slice(1).map((token, i) => ({ token, ...data.predictions[i] }))
  const nats = told.reduce((sum, { p }) => sum - Math.log(Math.max(p, 1e-12)), 0) / told.length
  const spans = told.map(({ token, p, rivals }) => h("span", { title: `${percent(p)}; ${rivals.map(likely).join(", ")}`,
    style: `background:${tint(0.75 * p)};padding:2px 0;border-radius:3px` }, token))
  const rows = [...told, { ...data.predictions.at(-1), token: t("what follows") }]
  return [h("p", { style: "line-height:2.1;white-space:pre-wrap" }, data.tokens[0], spans),
    soft(told.length ? `${nats.toFixed(4)} ${t("nats per token")}` : ""),
    table(t("Probabilities"), [t("token"), "p", "1", "2", "3"], rows.map(({ token, p, rivals }) =>
      [shown(token), tinted(p || 0, p === undefined ? "" : percent(p)), ...rivals.map(likely)]))]
}

/** What each layer would say next, if it were the last. */
function lens(data, state, show, t) {
  const came = p => p === undefined ? "" : `; ${t("what came")}: ${percent(p)}`
  const cell = ({ rivals, p }) => h("td", { style: `background:${tint(0.7 * rivals[0][1])}`,
    title: rivals.map(likely).join(", ") + came(p) }, shown(rivals[0][0]))
  const name = l => h("th", { scope: "row" }, l ? `${t("Layer")} ${l}` : t("embedding"))
  const rows = data.lens.map((row, l) => [name(l), ...row.map(cell)])
  return [soft(t("Each row: the likeliest next token, if the model ended with that layer.")),
    table(t("Logit lens"), ["", ...data.tokens.map(shown)], rows.reverse(), "")]
}

function neighbours(data, state, show, t) {
  const once = [...data.ids.keys()].filter(i => data.ids.indexOf(data.ids[i]) === i)
  const near = ([other, c]) => `${shown(other)} ${c.toFixed(2)}`
  return [soft(t("The tokens with the most similar embeddings, by cosine.")), table(t("Embeddings"), [],
    once.map(i => [h("th", { scope: "row" }, shown(data.tokens[i])), ...data.neighbours[i].map(near)]))]
}

function weights(data, state, show, t) {
  const histogram = ({ name, shape, counts, edges, std }) => {
    const ends = (from, to) => `${edges[from].toPrecision(3)} … ${edges.at(to).toPrecision(3)}`
    const high = n => 52 * n / Math.max(...counts), wide = 200 / counts.length, fill = "var(--accent)"
    const bars = counts.map((n, i) => h("rect", { x: wide * i, width: wide - 0.6, y: 54 - high(n), height: high(n), fill },
      h("title", {}, `${ends(i, i + 1)}: ${n}`)))
    return h("figure", { style: "margin:0;overflow-wrap:anywhere" },
      h("svg", { viewBox: "0 0 200 56", style: "width:100%", role: "img", "aria-label": name }, bars),
      h("figcaption", { class: "soft" }, `${name} (${shape.join(" × ")})`, h("br"),
        `${ends(0, -1)}, ${t("deviation")} ${std.toPrecision(3)}`))
  }
  const style = "grid-template-columns:repeat(auto-fill,minmax(min(230px,100%),1fr))"
  return h("div", { class: "grid", style }, data.weights.map(histogram))
}

const VIEWS = { "Attention": heads, "One head": head, "Query × key": neurons, "Probabilities": probabilities,
  "Logit lens": lens, "Embeddings": neighbours, "Weights": weights }

/** All views in `root`, one at a time. data: of engine/debug/inside.py; t: words in the reader's language. */
export function draw(root, data, t = text => text) {
  data = { ...data, attention: unpack(data.attention), q: unpack(data.q), k: unpack(data.k) }
  const state = { view: "Attention", Layer: 0, head: 0, query: data.tokens.length - 1 }
  function show(changes) {
    Object.assign(state, changes)
    const tab = name => h("button", { role: "tab", "aria-selected": String(name === state.view),
      class: name === state.view ? "main" : null, onclick: () => show({ view: name }) }, t(name))
    root.replaceChildren(h("h1", {}, data.name), data.cut ? soft(`${t("Tokens left out at the end")}: ${data.cut}`) : "",
      h("div", { class: "row", role: "tablist" }, Object.keys(VIEWS).map(tab)),
      h("section", { class: "card", style: "margin-top:.7rem" }, VIEWS[state.view](data, state, show, t)))
    root.querySelector("[aria-selected=true]").focus({ preventScroll: true })
  }
  show({})
}
