// Runs a model by the WebAssembly module that `make wasm` writes, in a page, a worker or node:
//
//     const model = await llamac.open(program, file); // bytes of llamac.wasm, of model.gguf
//     for await (const text of model.generate("Once upon a time", { temperature: 0 })) show(text);
//     model.stop(); // ends the text that is being generated
//
// Computes in the thread that calls it. In a page, use a worker, as page.js does.
"use strict";
const llamac = (() => {
  const imports = { wasi_snapshot_preview1: { sched_yield: () => 0 } };

  // Returns a promise that is kept once the messages that have arrived are handled.
  function pause() {
    if (typeof setImmediate === "function") return new Promise(setImmediate);
    const { port1, port2 } = new MessageChannel();
    return new Promise(resolve => {
      port1.onmessage = resolve;
      port2.postMessage(0);
    });
  }

  // Opens a model. program: bytes of llamac.wasm, or a WebAssembly.Module; file: bytes of a model
  // file with a tokenizer (Uint8Array). Throws an Error that says what is wrong with the file.
  async function open(program, file) {
    const made = await WebAssembly.instantiate(program, imports);
    const c = (made.instance ?? made).exports;
    let turn = 0; // of the text that is being generated

    // The views of the memory are made anew each time: it moves when it grows.
    const bytes = (at, n) => new Uint8Array(c.memory.buffer, at >>> 0, n);

    function failure() {
      const all = bytes(c.error(), 512);
      return new Error(new TextDecoder().decode(all.subarray(0, all.indexOf(0))));
    }

    function place(data) {
      const at = c.allocate(data.length || 1);
      if (!at) throw new Error(`not enough memory for ${data.length} bytes`);
      bytes(at, data.length).set(data);
      return at;
    }

    // Calls `use` with the address and the length of a text in memory; null: with 0 and 0.
    function withText(text, use) {
      if (text === null) return use(0, 0);
      const data = new TextEncoder().encode(text + "\0"), at = place(data);
      try {
        return use(at, data.length - 1);
      } finally {
        c.release(at);
      }
    }

    c._initialize();
    if (!c.open(place(file), file.length)) throw failure();

    const model = {
      positions: c.positions(), // max tokens that the model sees
      canChat: !!c.can_chat(),  // the model has a chat template
      tokens: 0,                // generated of the latest text
      speed: 0,                 // tokens generated per second, without the prompt's
      stop: () => void turn++,

      // Yields a text in parts, a few each second. In a chat, the prompt is the user's turn and the
      // text the answer; the chat begins anew if `fresh`. steps: max tokens, those of the prompt
      // counted, as by `run -n`; of a chat, those of the answer. system: of a chat, null for that of
      // the model. Another call of generate ends this text.
      async *generate(prompt, { chat = false, fresh = false, system = null, temperature = 1,
        topp = 0.9, seed = Date.now(), steps = model.positions } = {}) {
        const mine = ++turn;
        const began = withText(system, at => withText(prompt, (words, n) =>
          c.begin(words, n, chat, fresh, at, steps, temperature, topp, seed)));
        if (began < 0) throw failure();
        const decoder = new TextDecoder();
        const take = n => decoder.decode(bytes(c.shown(), n));
        let text = "", shown = performance.now(), first = 0; // times in ms
        model.tokens = model.speed = 0;
        while (!c.done() && mine === turn) {
          const n = c.step();
          if (n < 0) throw failure();
          if (n) text += take(n);
          const now = performance.now();
          model.tokens = c.sampled();
          if (model.tokens) first ||= now;
          if (model.tokens > 1) model.speed = 1000 * (model.tokens - 1) / (now - first);
          if (now - shown < 30) continue;
          if (text) yield text;
          text = "", shown = now;
          await pause();
        }
        if (mine !== turn) return;
        const n = c.finish();
        if (n) text += take(n);
        if (text) yield text;
      },
    };
    return model;
  }

  return { open };
})();
if (typeof module === "object") module.exports = llamac;
