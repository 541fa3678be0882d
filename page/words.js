// The reader's language: English is what the code says, zh.json has the Chinese.
export const language = localStorage.getItem("language") || (navigator.language.startsWith("zh") ? "zh" : "en")
const { words = {}, knobs = {} } = language === "zh" ? await (await fetch("zh.json")).json() : {}
export const t = text => words[text] ?? text
/** What a knob of train.py is for. */
export const help = (knob, english) => knobs[knob] ?? english
