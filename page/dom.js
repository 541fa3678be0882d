// Elements, in the page and in the file that sample.py writes. What comes from a log or a model is text, never HTML.
const DRAWN = ["svg", "g", "line", "rect", "text", "path", "polyline", "title"]

/** An element: h("a", { href: "#x", onclick: f }, "text", child, ...). Children that are no elements become text. */
export function h(tag, attributes, ...children) {
  const drawn = DRAWN.includes(tag)
  const element = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag)
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value)
    else if (typeof value === "boolean") element.toggleAttribute(name, value)
    else if (value !== null && value !== undefined) element.setAttribute(name, value)
  }
  element.append(...children.flat(9).filter(c => c !== null && c !== undefined && c !== false))
  return element
}

/** A table with a name, which scrolls by itself; cells are texts, elements, or td and th. */
export function table(name, heads, rows, kind = "left") {
  const cell = c => ["TD", "TH"].includes(c?.tagName) ? c : h("td", {}, c)
  return h("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": name }, h("table", { class: kind },
    heads.length > 0 && h("thead", {}, h("tr", {}, heads.map(c => c?.tagName ? c : h("th", { scope: "col" }, c)))),
    h("tbody", {}, rows.map(cells => cells.tagName ? cells : h("tr", {}, cells.map(cell))))))
}

/** A drop-down with its label. choices: texts, or [value, text]; change(value). */
export function select(label, choices, chosen, change, attributes = {}) {
  const option = ([value, text]) => h("option", { value, selected: String(value) === String(chosen) }, text)
  return h("label", {}, label, h("select", { ...attributes, onchange: e => change(e.target.value) },
    choices.map(c => option(Array.isArray(c) ? c : [c, c]))))
}
