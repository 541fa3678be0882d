// The page that export.py writes: a form, and texts that a worker generates.
"use strict"
const find = id => document.getElementById(id)
let isReady = false  // the model is open
let isChat = false   // true: the model answers messages; false: it continues texts
let fresh = true     // the next message begins a new chat
let output           // the element to which the generated text is added

/** Return the text of a script element. Remove the element, to free its memory. */
function take(id) {
  const text = find(id).textContent.trim()
  find(id).remove()
  return text
}

// A page that was opened as a file cannot load a worker from another file, only from a Blob.
const script = new Blob([take("worker")], { type: "text/javascript" })
const worker = new Worker(URL.createObjectURL(script))

function showStatus(text, isBad = false) {
  find("status").textContent = text
  find("status").className = isBad ? "bad" : "soft"
}

function setBusy(busy) {
  find("go").disabled = busy || !isReady
  find("stop").disabled = !busy
  find("texts").ariaBusy = busy  // screen readers then read the text when it is complete
}

function setMode(mode) {
  isChat = mode === "chat"
  find("prompt-label").textContent = isChat ? "Your message" : "Beginning of the text"
  find("go").textContent = isChat ? "Send" : "Write"
  find("clear").textContent = isChat ? "New chat" : "Clear"
  find("system-label").hidden = !isChat
  find("prompt").value = isChat ? "" : "Once upon a time"
  clear()
}

function clear() {
  worker.postMessage({ task: "stop" })
  find("texts").replaceChildren()
  find("count").textContent = ""
  fresh = true
}

/** Call `change`. If the page was scrolled to its end before, scroll to the new end. */
function followEnd(change) {
  const page = document.documentElement
  const isAtEnd = innerHeight + scrollY > page.scrollHeight - 40
  change()
  if (isAtEnd) scrollTo(0, page.scrollHeight)
}

/** Add an article: the prompt, and an element for the text that follows. */
function addArticle(prompt) {
  const article = document.createElement("article")
  const given = document.createElement(isChat ? "p" : "span")
  output = document.createElement("span")
  given.className = "prompt"
  given.textContent = prompt
  article.append(given, output)
  find("texts").append(article)
}

/** Return the number in a field, `otherwise` if it is empty. */
const number = (id, otherwise) => find(id).value === "" ? otherwise : find(id).valueAsNumber

function generate() {
  const prompt = find("prompt").value
  if (isChat && !prompt.trim()) return
  const seed = number("seed", Date.now() % 1e6)
  const options = {
    chat: isChat, fresh, seed, temperature: number("temperature", 1), topp: number("topp", 0.9),
    system: isChat && find("system-prompt").value || null, steps: number("steps") }
  followEnd(() => addArticle(prompt))
  setBusy(true)
  showStatus(`Writing with seed ${seed} …`)
  worker.postMessage({ task: "generate", prompt, options })
  if (!isChat) return
  fresh = false
  find("prompt").value = ""
}

const handlers = {
  ready(data) {
    isReady = true
    find("steps").placeholder = data.positions
    find("modes").hidden = !data.canChat
    if (data.canChat) {
      find("form").mode.value = "chat"
      setMode("chat")
    }
    setBusy(false)
    showStatus(`Ready after ${(performance.now() / 1000).toFixed(1)} s`)
  },

  text(data) {
    followEnd(() => output.append(data.text))
    const speed = data.speed.toFixed(data.speed < 10 ? 1 : 0)
    find("count").textContent = `${data.tokens} tokens, ${speed} tokens/s`
  },

  done() {
    setBusy(false)
    showStatus(find("status").textContent.replace("Writing", "Written").replace(" …", ""))
  },

  error(data) {
    setBusy(false)
    showStatus(`Error: ${data.message}`, true)
  },
}

worker.onmessage = ({ data }) => handlers[data.kind](data)
worker.onerror = handlers.error

find("form").onsubmit = event => {
  event.preventDefault()
  generate()
}
// A browser shows the error of an invalid field only if the field is visible.
find("form").addEventListener("invalid", () => find("settings").open = true, { capture: true })
find("modes").onchange = event => setMode(event.target.value)
find("prompt").onkeydown = event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return
  event.preventDefault()
  if (!find("go").disabled) find("form").requestSubmit()
}
find("stop").onclick = () => worker.postMessage({ task: "stop" })
find("clear").onclick = clear
worker.postMessage({ task: "open", program: take("program"), file: take("model") })
