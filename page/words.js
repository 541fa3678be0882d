// Translation. The code contains the English texts; zh.json maps them to Chinese.
const browserLanguage = navigator.language.startsWith("zh") ? "zh" : "en"
export const language = localStorage.getItem("language") || browserLanguage
const chinese = language === "zh" ? await (await fetch("zh.json")).json() : { words: {}, knobs: {} }

/** Translate a text of the page; a text without translation stays English. */
export const t = text => chinese.words[text] ?? text
/** Translate a text, then replace each {name} by its value. values: { name: value }. */
export const fill = (text, values) => t(text).replace(/\{(\w+)\}/g, (_, name) => values[name])
/** Return a train.py knob's help in the chosen language. english: its comment in train.py. */
export const help = (knob, english) => chinese.knobs[knob] ?? english
