// The views of engine/inside.py's data: in the page, and in the one file that sample.py writes. All text is text, never HTML.
const SVG = "http://www.w3.org/2000/svg", ROW = 22

function h(tag, attributes, ...children) {
  const svg = ["svg", "g", "line", "rect", "text", "path", "title"].includes(tag)
  const element = svg ? document.createElementNS(SVG, tag) : document.createElement(tag)
  for (const [name, value] of Object.entries(attributes || {}))
    name.startsWith("on") ? element.addEventListener(name.slice(2), value) : element.setAttribute(name, value)
  element.append(...children.flat(9))
  return element
}
const shown = token => token === "" ? "∅" : token.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ | $/g, "␣")
const percent = p => p >= 0.9995 ? "100 %" : `${(100 * p).toFixed(p < 0.1 ? 2 : 1)} %`
const tint = (p, hue = "0 110 200") => `rgb(${hue} / ${Math.max(0, Math.min(1, p)).toFixed(3)})`

/** An array of numbers, and where an index of them stands. */
function unpack({ shape, data }) {
  const values = new Float32Array(Uint8Array.from(atob(data), c => c.charCodeAt(0)).buffer)
  return { shape, at: (...index) => values[index.reduce((sum, i, n) => sum * shape[n] + i, 0)] }
}

/** All heads of all layers: a small picture each, dark where a query (row) looks at a key (column). */
function heads(data, choose, t) {
  const [layers, n, T] = data.attention.shape, size = Math.max(48, Math.min(150, Math.floor(900 / n))), dark = getComputedStyle(document.documentElement).colorScheme.startsWith("dark")
  const rows = [...Array(layers).keys()].map(l => h("div", { class: "row" }, h("span", { class: "soft", style: "width:4.5rem" }, `${t("Layer")} ${l + 1}`),
    [...Array(n).keys()].map(head => {
      const picture = h("canvas", { width: T, height: T, style: `width:${size}px;height:${size}px;image-rendering:pixelated;display:block` })
      const paper = picture.getContext("2d"), image = paper.createImageData(T, T)
      for (let i = 0; i < T; i++) for (let j = 0; j < T; j++) {
        const weight = data.attention.at(l, head, i, j) ** 0.6
        image.data.set([dark ? 108 : 0, dark ? 182 : 96, dark ? 255 : 168, 255 * weight], 4 * (i * T + j))
      }
      paper.putImageData(image, 0, 0)
      return h("button", { style: "padding:2px", title: `${t("Layer")} ${l + 1}, ${t("head")} ${head + 1}`, "aria-label": `${t("Layer")} ${l + 1}, ${t("head")} ${head + 1}`,
        onclick: () => choose(l, head) }, picture)
    })))
  return h("div", { class: "scroll" }, h("p", { class: "soft" }, t("Each picture: a row is a token that looks, a column one that is looked at. Choose one to see its words.")), rows)
}

function picker(data, state, again, t) {
  const select = (name, n) => h("label", {}, t(name), h("select", { onchange: e => { state[name] = +e.target.value; again() } },
    [...Array(n).keys()].map(i => h("option", { value: i, ...(i === state[name] ? { selected: "" } : {}) }, String(i + 1)))))
  return h("div", { class: "row" }, select("Layer", data.attention.shape[0]), select("head", data.attention.shape[1]))
}

/** One head: every token on the left looks at those on the right; pointing at one shows its lines alone. */
function head(data, state, again, t) {
  const T = data.tokens.length, left = 150, right = 330, weight = (i, j) => data.attention.at(state.Layer, state.head, i, j)
  const lines = h("g", {}), marks = h("g", {}), view = h("svg", { viewBox: `0 0 480 ${ROW * T + 8}`, style: "width:100%;max-width:640px", role: "img",
    "aria-label": t("Lines from each token to those it looks at") })
  function paint(only = null) {
    lines.replaceChildren(); marks.replaceChildren()
    for (let i = 0; i < T; i++) for (let j = 0; j <= i; j++) {
      if (only !== null && i !== only || weight(i, j) < 0.01) continue
      lines.append(h("line", { x1: left + 4, x2: right - 4, y1: ROW * i + 15, y2: ROW * j + 15, stroke: "var(--accent)",
        "stroke-width": 2, "stroke-opacity": weight(i, j).toFixed(3) }))
    }
    if (only === null) return
    for (let j = 0; j <= only; j++) marks.append(h("rect", { x: right - 2, y: ROW * j + 4, width: 130, height: ROW - 3, rx: 3, fill: tint(0.75 * weight(only, j)) },
      h("title", {}, percent(weight(only, j)))))
    marks.append(h("rect", { x: 8, y: ROW * only + 4, width: left - 6, height: ROW - 3, rx: 3, fill: "none", stroke: "var(--accent)" }))
  }
  const word = (i, x, anchor) => h("text", { x, y: ROW * i + 19, "text-anchor": anchor, style: "fill:var(--ink);font-size:13px" }, shown(data.tokens[i]))
  view.append(marks, lines, ...data.tokens.map((_, i) => [
    h("g", { tabindex: 0, onmouseenter: () => paint(i), onfocus: () => paint(i), onclick: () => { state.query = i } },
      h("rect", { x: 0, y: ROW * i + 3, width: left, height: ROW, fill: "transparent" }), word(i, left - 2, "end")), word(i, right + 4, "start")]).flat())
  view.addEventListener("mouseleave", () => paint())
  paint()
  return h("div", {}, picker(data, state, again, t), h("p", { class: "soft" }, t("Point at a token on the left.")), h("div", { class: "scroll" }, view))
}

/** One query and the keys before it, number by number: their products add up to the score, and softmax makes the weight of it. */
function neurons(data, state, again, t) {
  const { q, k } = data, Q = q.shape[3], group = Math.floor(state.head * data.kv_heads / data.heads), i = Math.min(state.query, data.tokens.length - 1)
  const query = d => q.at(state.Layer, state.head, i, d), key = (j, d) => k.at(state.Layer, group, j, d), all = [...Array(Q).keys()]
  const most = Math.max(1e-9, ...all.map(d => Math.abs(query(d)))), mostKey = Math.max(1e-9, ...[...Array(i + 1).keys()].flatMap(j => all.map(d => Math.abs(key(j, d)))))
  const mostBoth = Math.max(1e-9, ...[...Array(i + 1).keys()].flatMap(j => all.map(d => Math.abs(query(d) * key(j, d)))))
  function strip(name, value, largest) {
    const picture = h("canvas", { width: Q, height: 1, style: "width:100%;min-width:120px;height:16px;image-rendering:pixelated", role: "img",
      "aria-label": `${name}: ${all.map(d => value(d).toPrecision(2)).join(" ")}`, title: name })
    const paper = picture.getContext("2d")
    for (const d of all) { paper.fillStyle = tint(Math.abs(value(d)) / largest, value(d) < 0 ? "215 90 0" : "0 110 200"); paper.fillRect(d, 0, 1, 1) }
    return picture
  }
  const row = j => {
    const score = all.reduce((sum, d) => sum + query(d) * key(j, d), 0) / Math.sqrt(Q), weight = data.attention.at(state.Layer, state.head, i, j)
    return h("tr", {}, h("td", {}, shown(data.tokens[j])), h("td", {}, strip("k", d => key(j, d), mostKey)),
      h("td", {}, strip("q × k", d => query(d) * key(j, d), mostBoth)), h("td", {}, score.toFixed(3)),
      h("td", { style: `background:${tint(0.7 * weight)}` }, percent(weight)))
  }
  const chooser = h("label", {}, t("query"), h("select", { onchange: e => { state.query = +e.target.value; again() } },
    data.tokens.map((token, n) => h("option", { value: n, ...(n === i ? { selected: "" } : {}) }, `${n} ${shown(token)}`))))
  return h("div", {}, h("div", { class: "row" }, picker(data, state, again, t), chooser), h("p", { class: "soft" }, t("Blue is above zero, orange below.")),
    h("div", { class: "row" }, h("span", {}, "q"), h("div", { class: "grow" }, strip("q", query, most))),
    h("div", { class: "scroll" }, h("table", {}, h("tr", {}, ["", "k", "q × k", "Σ / √Q", t("weight")].map(name => h("th", {}, name))), [...Array(i + 1).keys()].map(row))))
}

/** The text, dark where the model knew; and beside each token what it thought likelier. */
function probabilities(data, t) {
  const told = data.tokens.map((token, i) => [token, i ? data.predictions[i - 1] : null])
  const nats = told.slice(1).reduce((sum, [, { p }]) => sum - Math.log(Math.max(p, 1e-12)), 0) / Math.max(1, told.length - 1)
  return h("div", {}, h("p", { style: "line-height:2.1;white-space:pre-wrap" }, told.map(([token, said]) =>
    h("span", { style: `background:${tint(said ? 0.75 * said.p : 0)};padding:2px 0;border-radius:3px`, title: said ? `${percent(said.p)}; ${said.rivals.map(([r, p]) => `${shown(r)} ${percent(p)}`).join(", ")}` : "" }, token))),
    h("p", { class: "soft" }, told.length > 1 ? `${nats.toFixed(4)} ${t("nats per token")}` : ""),
    h("div", { class: "scroll tall", tabindex: 0 }, h("table", { class: "left" }, h("tr", {}, [t("token"), "p", "1", "2", "3"].map(n => h("th", {}, n))),
      [...told.slice(1), [t("what follows"), { ...data.predictions.at(-1), p: null }]].map(([token, said]) => h("tr", {}, h("td", {}, shown(token)),
        h("td", { style: `background:${tint(0.7 * (said.p || 0))}` }, said.p === null ? "" : percent(said.p)),
        said.rivals.map(([rival, p]) => h("td", {}, `${shown(rival)} ${percent(p)}`)))))))
}

/** What each layer would say next, if it were the last. */
function lens(data, t) {
  const name = l => l === 0 ? t("embedding") : `${t("Layer")} ${l}`
  return h("div", {}, h("p", { class: "soft" }, t("Each row: the likeliest next token, if the model ended with that layer.")), h("div", { class: "scroll" },
    h("table", {}, h("tr", {}, h("th", {}, ""), data.tokens.map(token => h("th", {}, shown(token)))),
      data.lens.map((row, l) => h("tr", {}, h("th", {}, name(l)), row.map(({ rivals, p }) =>
        h("td", { style: `background:${tint(0.7 * rivals[0][1])}`, title: rivals.map(([r, q]) => `${shown(r)} ${percent(q)}`).join(", ") + (p === undefined ? "" : `; ${t("what came")}: ${percent(p)}`) }, shown(rivals[0][0]))))).reverse())))
}

function neighbours(data, t) {
  const seen = new Set(), rows = data.tokens.map((token, i) => [token, data.neighbours[i], data.ids[i]]).filter(([, , id]) => !seen.has(id) && seen.add(id))
  return h("div", { class: "scroll" }, h("p", { class: "soft" }, t("The tokens with the most similar embeddings, by cosine.")), h("table", { class: "left" },
    rows.map(([token, near]) => h("tr", {}, h("th", {}, shown(token)), near.map(([other, c]) => h("td", {}, `${shown(other)} ${c.toFixed(2)}`))))))
}

function weights(data, t) {
  return h("div", { class: "grid", style: "grid-template-columns:repeat(auto-fill,minmax(min(230px,100%),1fr))" }, data.weights.map(w => {
    const most = Math.max(...w.counts), n = w.counts.length
    return h("figure", { style: "margin:0;overflow-wrap:anywhere" }, h("svg", { viewBox: "0 0 200 56", style: "width:100%", role: "img", "aria-label": w.name }, w.counts.map((count, i) =>
      h("rect", { x: 200 * i / n, width: 200 / n - 0.6, y: 54 - 52 * count / most, height: 52 * count / most, fill: "var(--accent)" }, h("title", {}, `${w.edges[i].toPrecision(3)} … ${w.edges[i + 1].toPrecision(3)}: ${count}`)))),
    h("figcaption", { class: "soft" }, `${w.name} (${w.shape.join(" × ")})`, h("br"), `${w.edges[0].toPrecision(3)} … ${w.edges.at(-1).toPrecision(3)}, ${t("deviation")} ${w.std.toPrecision(3)}`))
  }))
}

/** All views in `root`, one at a time. data: of engine/inside.py; t: words in the reader's language. */
export function draw(root, data, t = text => text) {
  data = { ...data, attention: unpack(data.attention), q: unpack(data.q), k: unpack(data.k) }
  const state = { view: "Attention", Layer: 0, head: 0, query: data.tokens.length - 1 }
  const choose = (layer, n) => { Object.assign(state, { view: "One head", Layer: layer, head: n }); paint() }
  const views = { "Attention": () => heads(data, choose, t), "One head": () => head(data, state, paint, t), "Query × key": () => neurons(data, state, paint, t),
    "Probabilities": () => probabilities(data, t), "Logit lens": () => lens(data, t), "Embeddings": () => neighbours(data, t), "Weights": () => weights(data, t) }
  function paint() {
    const tabs = h("div", { class: "row", role: "tablist" }, Object.keys(views).map(name => h("button", { role: "tab", "aria-selected": name === state.view,
      ...(name === state.view ? { class: "main" } : {}), onclick: () => { state.view = name; paint() } }, t(name))))
    root.replaceChildren(h("h1", {}, data.name), ...(data.cut ? [h("p", { class: "soft" }, `${t("Tokens left out at the end")}: ${data.cut}`)] : []), tabs,
      h("section", { class: "card", style: "margin-top:.7rem" }, views[state.view]()))
    root.querySelector("[aria-selected=true]").focus({ preventScroll: true })
  }
  paint()
}
