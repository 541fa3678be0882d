// Functions that make DOM elements, for the page and for the HTML file that sample.py writes.
// Strings become text nodes, so logs and models, which anyone may have written, can't inject HTML.
const SVG_TAGS = ["svg", "g", "line", "rect", "text", "path", "polyline", "title"]
const isAbsent = value => value === null || value === undefined || value === false

/**
 * Make an element: h("a", { href: "#x", onclick: f }, "text", child, [more children]).
 *
 * A boolean attribute is present or absent. null, undefined and false children are left out, so
 * `condition && child` works.
 */
export function h(tag, attributes, ...children) {
  const element = SVG_TAGS.includes(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag)
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value)
    else if (typeof value === "boolean") element.toggleAttribute(name, value)
    else if (!isAbsent(value)) element.setAttribute(name, value)
  }
  element.append(...children.flat(Infinity).filter(child => !isAbsent(child)))
  return element
}

export const soft = (...children) => h("p", { class: "soft" }, ...children)
export const row = (...children) => h("div", { class: "row" }, ...children)
export const button = (text, onclick, attributes) => h("button", { onclick, ...attributes }, text)

/** Make a framed section. title: its heading, or "" for none. */
export const card = (title, ...children) =>
  h("section", { class: "card" }, title && h("h2", {}, title), ...children)

/**
 * Make a table in a scrollable box. name: its label for screen readers; kind: its CSS
 * class. heads: texts or th elements; rows: tr elements, or lists of texts, elements, td and th.
 */
export function table(name, heads, rows, kind = "left") {
  const isCell = cell => ["TD", "TH"].includes(cell?.tagName)
  const head = cell => cell?.tagName ? cell : h("th", { scope: "col" }, cell)
  const data = cell => isCell(cell) ? cell : h("td", {}, cell)
  const line = cells => cells.tagName ? cells : h("tr", {}, cells.map(data))
  return h("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": name },
    h("table", { class: kind },
      heads.length > 0 && h("thead", {}, h("tr", {}, heads.map(head))),
      h("tbody", {}, rows.map(line))))
}

/** Make a labelled drop-down. choices: texts or [value, text]; change(value): its listener. */
export function select(label, choices, chosen, change, attributes = {}) {
  const option = choice => {
    const [value, text] = Array.isArray(choice) ? choice : [choice, choice]
    return h("option", { value, selected: String(value) === String(chosen) }, text)
  }
  const onchange = event => change(event.target.value)
  return h("label", {}, label, h("select", { ...attributes, onchange }, choices.map(option)))
}

/** Decode float32 numbers from base64. */
export const floats = text =>
  new Float32Array(Uint8Array.from(atob(text), character => character.charCodeAt(0)).buffer)
