// The view of one run: its growing curves, its output, tables, alerts, files, notes and settings.
import {
  copyable, format, get, isFinished, link, listen, notify, post, state, status, throttle, timeLeft,
} from "./app.js"
import { curveStyle } from "./charts.js"
import { Charts, controls, isWide, yardsticks } from "./compare.js"
import { button, card, h, row, select, soft, table } from "./dom.js"
import { fill, t } from "./words.js"

const COLOR = "#435cd1"
const DEFAULT_METRICS = ["loss/train", "bpb/val", "loss/val", "lr", "grad/norm",
  "perf/tokens_per_sec", "logits/entropy"]
const HEADLINE = ["loss/train", "loss/val", "bpb/val", "perf/tokens_per_sec"]
const TABLES = {  // {field of a log's row: [title, names of the columns]}
  samples: ["Samples", "prompt", "how", "text"],
  predictions: ["Predictions", "split", "input", "target", "p(target)", "1st", "p(1st)", "2nd",
    "p(2nd)", "3rd", "p(3rd)"],
}

export async function show(main) {
  const name = state.get("run"), { knobs } = await get("api/knobs")
  let run = await get("api/run", { run: name }), { jobs } = await get("api/jobs")
  const isShown = metric => metric in run.results || metric === "loss/train"
  const defaultMetrics = DEFAULT_METRICS.filter(isShown)
  const marksOf = metric => yardsticks(metric, [run])
  const styleOf = () => curveStyle(0)
  const charts = new Charts({ run: name, styleOf, marksOf, defaultMetrics })
  const top = h("div", { class: "card" }), tables = h("div"), side = h("div")
  const job = () => jobs.find(other => other.out_dir === name)

  /** Return the time limit that has ended the training, or when it will end and why, in words. */
  function clockWords() {
    const { ended_by } = run
    if (["minutes", "max_minutes"].includes(ended_by) && run.config[ended_by] > 0) {
      return ` · ${t("by the clock")}: ${ended_by} = ${run.config[ended_by]}`
    }
    if (!run.training || !run.time_left) return ""
    const { left, clock } = run.time_left
    const end = new Date(Date.now() + 1000 * left)
    const hour = end.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })
    const limit = clock
      ? `${t("by the clock")}: ${clock} = ${run.config[clock]}` : t("at this speed")
    return ` · ${timeLeft(run)} (${limit}, ${t("until {time}").replace("{time}", hour)})`
  }

  /** Return the step in words, with the total if the number of steps ends the training. */
  function stepWords() {
    const { iter = 0 } = run.results, { minutes, max_minutes } = run.config, end = run.ended_by
    const hasClock = minutes > 0 || max_minutes > 0
    const hasEnded = end === "early_stop" || hasClock && end !== "max_iters"
    const isOpen = run.training ? run.time_left?.clock : hasEnded
    const all = isOpen || !run.max_iters ? "" : ` ${t("of")} ${format(run.max_iters)}`
    return `${t("step")} ${format(iter)}${all}`
  }

  function drawTop() {
    const { iter = 0 } = run.results, maxIters = run.max_iters || iter || 1
    const [words, kind] = status(run, job())
    const stop = async () => {
      await post("api/stop", { run: name })
      notify(t("Stopping; it saves a checkpoint first"))
    }
    const resume = async () => {
      await post("api/start", { resume: name, knobs: {} })
      notify(t("Queued"))
    }
    const wandbLink = { href: run.wandb, rel: "noopener noreferrer", target: "_blank" }
    const numbers = HEADLINE.filter(metric => metric in run.results)
      .map(metric => ` · ${metric} ${format(run.results[metric])}`)
    top.replaceChildren(
      row(h("h1", { class: "grow" }, name),
        h("span", { class: kind }, words),
        run.training ? button(t("Stop"), stop) : button(t("Resume"), resume),
        h("a", { href: link("start", settings()) }, t("Duplicate with changes")),
        /^https?:\/\//.test(run.wandb) && h("a", wandbLink, "W&B")),
      h("progress", {
        max: 1, value: run.time_left?.share ?? (isFinished(run) ? 1 : Math.min(1, iter / maxIters)),
        "aria-label": t("Progress") }),
      soft(stepWords(), clockWords(), numbers),
      run.odd ? h("p", { class: "bad" }, run.odd) : "")
  }

  /** Return the [knob, value] pairs with which the form copies this run. */
  function settings() {
    return Object.entries({ ...run.config, out_dir: `${name}-2` }).filter(([knob, value]) =>
      knob in knobs && knob !== "init_from" && value !== knobs[knob].value)
  }

  /** Draw the samples and predictions of the chosen step, by default the latest. */
  function drawTables() {
    const iters = run.tables.map(line => line.iter)
    const chosen = Number(state.get("step", iters.at(-1)))
    const line = run.tables.findLast(other => other.iter === chosen) || run.tables.at(-1) || {}
    const steps = iters.map(iter => [iter, format(iter)])
    const choose = step => {
      state.set({ step })
      drawTables()
    }
    const draw = ([kind, [title, ...heads]]) => {
      const rows = (line[kind] || []).map(cells => [cells].flat().map(textCell))
      return card(t(title), select(t("step"), steps, line.iter, choose),
        table(t(title), heads.map(t), rows))
    }
    const isLogged = ([kind]) => run.tables.some(other => other[kind])
    tables.replaceChildren(...Object.entries(TABLES).filter(isLogged).map(draw))
  }

  /** Draw the column beside the curves. */
  function drawSide() {
    /** Collapse the alerts of each kind into one line. */
    const alerts = run.alerts.map(([title, count, texts]) => {
      const words = fill(title, texts[0][1])
      return h("details", { class: "bad" },
        h("summary", {}, count > 1 ? `${words} × ${format(count)}` : words),
        h("ul", {}, texts.map(([text, values]) => h("li", {}, fill(text, values)))))
    })
    const checkpoints = run.checkpoints.join(", ") || t("none")
    const judged = run.normal.map(([text, values]) => fill(text, values))
    const settings = Object.entries(run.config).map(([knob, value]) =>
      [knob, typeof value === "object" ? JSON.stringify(value).slice(0, 300) : String(value)])
    side.replaceChildren(
      judged.length ? card(t("Is my loss normal?"), h("p", {}, judged)) : "",
      card(t("Files"), files(), soft(`${t("Checkpoints")}: ${checkpoints}`)),
      card(t("Alerts"), alerts.length ? alerts : soft(t("none"))),
      job() ? card(t("Console"), output(job().id)) : "",
      run.evaluations.length ? card(t("Evaluation"), run.evaluations.map(evaluation)) : "",
      card(t("Notes"), notes()),
      card(t("Settings"), table(t("Settings"), [], settings, "left names")))
  }

  /** List the model files, each with the command that runs it. */
  function files() {
    const prompt = run.config.sample_prompt?.split?.("|")[0] || ""
    return Object.entries(run.files).map(([file, size]) => [
      soft(`${file} · ${(size / 2 ** 20).toFixed(1)} MiB`),
      copyable(`./run ${quote(`${name}/${file}`)} -i ${quote(prompt)}`)])
  }

  /** Show the end of a job's output. */
  function output(id) {
    const place = h("pre", { tabindex: 0 })
    get("api/console", { job: id }).then(({ text }) => {
      place.textContent = text
      place.scrollTop = place.scrollHeight
    })
    return place
  }

  /** Make the fields of notes, colour and tags, which the server keeps outside the run's folder. */
  function notes() {
    const text = h("textarea", { rows: 3, "aria-label": t("Notes") }, run.notes || "")
    const color = h("input", {
      type: "color", value: run.color || COLOR, "aria-label": t("Colour") })
    const tags = h("input", {
      value: run.tags || "", "aria-label": t("Tags"), placeholder: t("Tags") })
    const save = async () => {
      const given = { notes: text.value, tags: tags.value }
      if (color.value !== (run.color || COLOR)) given.color = color.value
      await post("api/notes", { run: name, ...given })
      Object.assign(run, given)
      notify(t("Saved"))
    }
    return [text, row(color, tags, button(t("Save"), save))]
  }

  const reload = throttle(async () => {
    run = { ...run, ...await get("api/run", { run: name }) }
    drawTop()
    drawTables()
    if (!side.contains(document.activeElement)) drawSide()  // the user may be writing notes
  }, 2000)
  listen(event => {
    if (event.jobs) jobs = event.jobs
    if (event.jobs || event.hello) reload()
    if (event.hello) charts.add(event)
    if (event.run?.name !== name) return
    const wasTraining = run.training
    Object.assign(run, event.run)
    charts.add(event)
    drawTop()
    const evaluated = "loss/val" in (event.rows || {})
    if (wasTraining !== run.training || event.again || evaluated) reload()
  })
  const metrics = Object.keys(run.results).filter(metric => metric.includes("/") || metric === "lr")
  const redraw = rebuild => rebuild === true ? charts.build() : charts.draw()
  const tools = h("details", { class: "card tools", open: isWide() },
    h("summary", {}, t("Charts")), row(charts.adder(metrics), controls(redraw)))
  main.append(h("p", {}, h("a", { href: "#runs" }, `← ${t("All runs")}`)), top,
    h("div", { class: "sides" }, h("div", {}, tools, charts.place, tables), side))
  drawTop()
  drawTables()
  drawSide()
  await charts.build()
  return { end: () => charts.end() }
}

/** Quote a text for a shell. */
const quote = text => `'${text.replaceAll("'", "'\\''")}'`

/** Make a table cell with a text or a number. */
function textCell(value) {
  const kind = typeof value === "number" ? "number" : String(value).length > 24 && "long"
  return h("td", { class: kind }, format(value))
}

/**
 * Show a result of evaluate.py: accuracy, wrong answers, and the confusion matrix of labelled
 * prompts (rows: expected) with the scores of each class, or a table of other figures (groups).
 */
function evaluation(found) {
  const { data, accuracy, names, matrix, groups, columns, rows, scores, score_columns } = found
  const max = Math.max(1, ...matrix.flat())
  /** Make a cell whose background grows stronger with the count. color: a CSS variable. */
  const cell = (count, color) => {
    const share = Math.round(45 * count / max)
    const background = `color-mix(in srgb, var(--${color}) ${share}%, transparent)`
    return h("td", { style: count ? `background: ${background}` : null }, String(count))
  }
  const counts = matrix.map((line, i) => [
    h("th", { scope: "row" }, names[i]),
    ...line.map((count, j) => cell(count, i === j ? "good" : "bad"))])
  const answers = rows.map(cells => cells.slice(1).map(textCell))
  const isMatrix = matrix.length > 0, lines = list => list.map(cells => cells.map(format))
  const f1 = found.macro_average?.f1
  const figures = [accuracy !== undefined && `${t("accuracy")} ${format(accuracy)}`,
    f1 !== undefined && `F1 ${format(f1)}`].filter(Boolean).join(", ")
  return [h("p", {}, figures ? `${data}: ${figures}` : data),
    scores.length > 0 && table(t("Scores"), score_columns.map(t), lines(scores), ""),
    isMatrix && table(t("Evaluation"), [t("expected"), ...names], counts, ""),
    !isMatrix && table(t("Evaluation"), names.map(t), lines(groups), ""),
    rows.length > 0 && h("details", {}, h("summary", {}, `${t("Wrong answers")}: ${rows.length}`),
      table(t("Wrong answers"), columns.slice(1).map(t), answers))]
}
