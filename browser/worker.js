// The worker of the page. Its script begins with llamac.js. A message to the worker is
// { task, ... }, a message from it { kind, ... }.
let model

/** Return the bytes of a text in base64. */
function decode(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64)  // browsers since 2025
  const text = atob(base64), bytes = new Uint8Array(text.length)
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i)
  return bytes
}

const tasks = {
  async open({ program, file }) {
    model = await llamac.open(decode(program), decode(file))
    postMessage({ kind: "ready", canChat: model.canChat, positions: model.positions })
  },

  async generate({ prompt, options }) {
    const show = text =>
      postMessage({ kind: "text", text, tokens: model.tokens, speed: model.speed })
    for await (const text of model.generate(prompt, options)) show(text)
    show("")  // the final numbers
    postMessage({ kind: "done" })
  },

  async stop() {
    model?.stop()
  },
}

onmessage = async ({ data }) => {
  try {
    await tasks[data.task](data)
  } catch (e) {
    postMessage({ kind: "error", message: e.message })
  }
}
