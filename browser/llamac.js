// Runs a model by the WebAssembly module that `make wasm` writes, in a page, a worker or node:
//
//     const model = await llamac.open(program, file)  // the bytes of llamac.wasm and model.gguf
//     for await (const text of model.generate("Once upon a time", { temperature: 0 })) show(text)
//     model.stop()  // ends the text that is being generated
//
// It computes in the thread that calls it. A page should call it in a worker, as page.js does.
"use strict"
const llamac = (() => {
  /** Return a promise that is fulfilled after the messages that have arrived, such as "stop". */
  function pause() {
    if (typeof setImmediate === "function") return new Promise(setImmediate)
    const { port1, port2 } = new MessageChannel()
    return new Promise(resolve => {
      port1.onmessage = resolve
      port2.postMessage(0)
    })
  }

  /**
   * Open a model. program: the bytes of llamac.wasm, or a WebAssembly.Module; file: the bytes of a
   * GGUF file (Uint8Array). Throws an Error that says what is wrong with the file.
   */
  async function open(program, file) {
    const made = await WebAssembly.instantiate(program)
    const c = (made.instance ?? made).exports
    let turn = 0  // number of the text that is being generated

    /** Return n bytes of the module's memory. When it grows, earlier views become invalid. */
    const bytes = (at, n) => new Uint8Array(c.memory.buffer, at >>> 0, n)

    /** Return the Error of the module's latest failure. */
    function failure() {
      const all = bytes(c.error(), 512)
      return new Error(new TextDecoder().decode(all.subarray(0, all.indexOf(0))))
    }

    /** Copy bytes to the module's memory. Return their address. */
    function place(data) {
      const at = c.allocate(data.length || 1)
      if (!at) throw new Error(`not enough memory for ${data.length} bytes`)
      bytes(at, data.length).set(data)
      return at
    }

    /** Call `use` with the address and the length of a text; with 0 and 0 if it is null. */
    function withText(text, use) {
      if (text === null) return use(0, 0)
      const data = new TextEncoder().encode(text + "\0")
      const at = place(data)
      try {
        return use(at, data.length - 1)
      } finally {
        c.release(at)
      }
    }

    c._initialize()
    if (!c.open(place(file), file.length)) throw failure()

    const model = {
      positions: c.positions(),  // max tokens that the model sees
      canChat: !!c.can_chat(),   // the model has a chat template
      tokens: 0,                 // of the latest text, without its prompt
      speed: 0,                  // tokens per second of the latest text, without its prompt

      stop() {
        turn++
      },

      /**
       * Yield a text in parts, about 30 each second. It ends if generate or stop is called.
       * chat: the prompt is a message, the text the answer. fresh: the message begins a new chat.
       * system: system prompt of a new chat; null: that of the model. steps: max tokens, of a chat
       * those of the answer, otherwise those of the prompt count too, as for `run -n`.
       */
      async *generate(prompt, { chat = false, fresh = false, system = null, temperature = 1,
        topp = 0.9, seed = Date.now(), steps = model.positions } = {}) {
        const mine = ++turn
        const began = withText(system, at => withText(prompt, (words, n) =>
          c.begin(words, n, chat, fresh, at, steps, temperature, topp, seed)))
        if (began < 0) throw failure()
        const decoder = new TextDecoder()
        const take = n => decoder.decode(bytes(c.shown(), n))
        let text = ""
        let shown = performance.now(), first = 0  // times in ms: of the latest part, of token 1
        model.tokens = model.speed = 0
        while (!c.done() && mine === turn) {
          const n = c.step()
          if (n < 0) throw failure()
          if (n) text += take(n)
          const now = performance.now()
          model.tokens = c.sampled()
          if (model.tokens) first ||= now
          if (model.tokens > 1) model.speed = 1000 * (model.tokens - 1) / (now - first)
          if (now - shown < 30) continue
          if (text) yield text
          text = ""
          shown = now
          await pause()
        }
        if (mine !== turn) return
        const n = c.finish()
        if (n) text += take(n)
        if (text) yield text
      },
    }
    return model
  }

  return { open }
})()
if (typeof module === "object") module.exports = llamac
