// Translation. The code has the English texts; zh.json maps them to the Chinese ones.
const browserLanguage = navigator.language.startsWith("zh") ? "zh" : "en"
export const language = localStorage.getItem("language") || browserLanguage
const chinese = language === "zh" ? await (await fetch("zh.json")).json() : { words: {}, knobs: {} }

/** Translate a text of the page; a text without translation stays English. */
export const t = text => chinese.words[text] ?? text
/** Return the help of a knob of train.py in the chosen language. english: its comment there. */
export const help = (knob, english) => chinese.knobs[knob] ?? english
