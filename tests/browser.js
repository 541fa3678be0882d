// Runs models with the WebAssembly module. Reads a JSON list of jobs from stdin and prints a JSON
// list of results.
//
// Usage: node browser.js llamac.wasm
//
// A job is { file, calls: [[prompt, options]] }. The option `cut` stops the generation after that
// many parts. Its result is { texts, canChat, positions, tokens } or { error }.
const fs = require("fs")
const llamac = require("../browser/llamac.js")

async function result(program, { file, calls }) {
  try {
    const model = await llamac.open(program, fs.readFileSync(file))
    const texts = []
    for (const [prompt, { cut, ...options }] of calls) {
      let text = "", parts = 0
      for await (const part of model.generate(prompt, options)) {
        text += part
        if (++parts === cut) model.stop()
      }
      texts.push(text)
    }
    return { texts, canChat: model.canChat, positions: model.positions, tokens: model.tokens }
  } catch (e) {
    return { error: e.message }
  }
}

async function main() {
  const program = await WebAssembly.compile(fs.readFileSync(process.argv[2]))
  const results = []
  for (const job of JSON.parse(fs.readFileSync(0))) results.push(await result(program, job))
  console.log(JSON.stringify(results))
}
main()
