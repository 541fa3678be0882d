// The reader's language. The code has the English texts, zh.json the Chinese ones.
const usual = navigator.language.startsWith("zh") ? "zh" : "en"
export const language = localStorage.getItem("language") || usual
const chinese = language === "zh" ? await (await fetch("zh.json")).json() : { words: {}, knobs: {} }

/** Translate a text of the page. */
export const t = text => chinese.words[text] ?? text
/** Translate the help of a knob of train.py. */
export const help = (knob, english) => chinese.knobs[knob] ?? english
