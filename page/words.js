// Translation. The code has the English texts; zh.json maps them to the Chinese ones.
const browserLanguage = navigator.language.startsWith("zh") ? "zh" : "en"
export const language = localStorage.getItem("language") || browserLanguage
const chinese = language === "zh" ? await (await fetch("zh.json")).json() : { words: {}, knobs: {} }

/** Translate a text of the page; a text without translation stays English. */
export const t = text => chinese.words[text] ?? text
/** Translate a text with {name} in the place of each value. values: { name: value }. */
export const fill = (text, values) => t(text).replace(/\{(\w+)\}/g, (_, name) => values[name])
/** Return the help of a knob of train.py in the chosen language. english: its comment there. */
export const help = (knob, english) => chinese.knobs[knob] ?? english
