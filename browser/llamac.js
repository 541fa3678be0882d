// Runs a model with the WebAssembly module that `make wasm` writes, in a page, a worker or node:
//
//     const model = await llamac.open(program, file)  // the bytes of llamac.wasm and model.gguf
//     for await (const text of model.generate("Once upon a time", { temperature: 0 })) show(text)
//     model.stop()  // ends the text that is being generated
//
// It blocks the thread that calls it for about 30 ms at a time. A page should call it in a worker,
// as page.js does with worker.js.
"use strict"
const llamac = (() => {
  const channel = typeof setImmediate === "function" ? null : new MessageChannel()

  /** Return a promise that resolves when the messages before it, such as "stop", are handled. */
  function pause() {
    if (!channel) return new Promise(setImmediate)
    return new Promise(resolve => {
      channel.port1.onmessage = resolve
      channel.port2.postMessage(0)
    })
  }

  /**
   * Open a model. program: the bytes of llamac.wasm, or a WebAssembly.Module; file: the bytes of a
   * GGUF file, as Uint8Array or ArrayBuffer. Throws an Error that describes what is wrong with it.
   */
  async function open(program, file) {
    const result = await WebAssembly.instantiate(program)  // of bytes: { instance, module }
    const c = (result.instance ?? result).exports
    if (file instanceof ArrayBuffer) file = new Uint8Array(file)
    let turn = 0  // generate and stop increase it, which ends an earlier generate

    /** Return a view of n bytes of the module's memory, which is valid until the memory grows. */
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

    /** Call use(address, bytes) with a copy of a text, then free it; for null call use(0, 0). */
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
      positions: c.positions(),  // context, in tokens
      canChat: !!c.can_chat(),   // the model has a chat template
      tokens: 0,                 // number of tokens generated for the latest text
      speed: 0,                  // generated tokens per second of the latest text

      stop() {
        turn++
      },

      /**
       * Generate a text, and yield it in about 30 parts per second. It ends early if generate or
       * stop is called. chat: the prompt is a user's message, and the text is the answer to it.
       * fresh: the message begins a new chat. system: system prompt of a new chat; null: the
       * default of the chat template. steps: max tokens of the answer; without chat, of prompt and
       * text together.
       */
      async *generate(prompt, { chat = false, fresh = false, system = null, temperature = 1,
        topp = 0.9, seed = Date.now(), steps = model.positions } = {}) {
        if (!Number.isSafeInteger(seed) || seed < 0)
          throw new Error(`seed is ${seed}, expected a whole number of at least 0`)
        const ownTurn = ++turn
        const promptTokens = withText(system, at => withText(prompt, (words, n) =>
          c.begin(words, n, chat, fresh, at, steps, temperature, topp, seed)))
        if (promptTokens < 0) throw failure()
        const decoder = new TextDecoder()
        const take = n => decoder.decode(bytes(c.shown(), n))
        let text = ""
        let lastYield = performance.now()  // ms
        let firstToken = 0                 // time when it was generated, ms
        model.tokens = model.speed = 0
        while (!c.done() && ownTurn === turn) {
          const n = c.step()
          if (n < 0) throw failure()
          if (n) text += take(n)
          const now = performance.now()
          model.tokens = c.sampled()
          if (model.tokens) firstToken ||= now
          const time = now - firstToken
          if (model.tokens > 1 && time > 0) model.speed = 1000 * (model.tokens - 1) / time
          if (now - lastYield < 30) continue
          if (text) yield text
          text = ""
          lastYield = now
          await pause()
        }
        if (ownTurn === turn) {
          const n = c.finish()
          if (n < 0) throw failure()
          if (n) text += take(n)
        }
        if (text) yield text
      },
    }
    return model
  }

  return { open }
})()
if (typeof module === "object") module.exports = llamac
