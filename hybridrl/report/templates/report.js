"use strict";
// Texts of models are shown through textContent only: `el` appends strings as text nodes.
const $ = (selector) => document.querySelector(selector);
const PALETTE = ["#4269d0", "#e8932a", "#ff725c", "#38a89d", "#a463f2", "#3ca951", "#e66bb2", "#7f9fe8", "#9c6b4e", "#9498a0"];
const DASHES = ["solid", "dot", "dash", "dashdot", "longdash"];
const BLUE = "66 105 208", ORANGE = "226 112 34";
const PAGE = 200; // rows of the table that are added at a time
let runs, groups;

function el(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

const format = (value) =>
  value === null || value === undefined ? "-" : typeof value === "number" ? String(+value.toPrecision(5)) : String(value);
// Plotly reads tags in texts.
const literal = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");

function options(select, pairs, chosen) {
  select.replaceChildren(...pairs.map(([value, text]) => el("option", { value, textContent: text })));
  if (pairs.some(([value]) => String(value) === String(chosen))) select.value = chosen;
}

async function unpack(id) {
  const bytes = Uint8Array.from(atob($("#" + id).textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

// ---- Several runs: names, table, parallel coordinates

function varied() {
  const known = runs.filter((run) => Object.keys(run.settings).length);
  const keys = [...new Set(known.flatMap((run) => Object.keys(run.settings)))];
  return keys.filter((key) => new Set(known.map((run) => run.settings[key])).size > 1);
}

function nameRuns() {
  const keys = varied();
  const counts = {};
  for (const run of runs) {
    const own = keys.map((key) => `${key.split(".").pop()}=${run.settings[key] ?? "default"}`).join(" ");
    run.label = own && own.length < 60 ? own : run.folder;
    const times = (counts[run.label] = (counts[run.label] ?? 0) + 1);
    if (times > 1) run.label += ` (${times})`;
  }
}

function showRuns() {
  if (runs.length < 2) return;
  $("#runs").hidden = false;
  const keys = varied(), numbers = ["accuracy", "ci95", "reward", "KL", "steps", "minutes"];
  const rank = (run) => run.result.accuracy ?? -Infinity;
  const sorted = [...runs].sort((a, b) => rank(b) - rank(a) || 0);
  $("#runs_table").replaceChildren(
    el("tr", {}, ...["run", ...keys, ...numbers, "state"].map((name) => el("th", {}, name))),
    ...sorted.map((run) => el("tr", {}, ...[run.folder, ...keys.map((key) => run.settings[key] ?? "default"), ...numbers.map((name) => format(run.result[name])), run.state].map((text) => el("td", {}, text))))
  );
  const numeric = (values) => values.every((value) => value !== "" && value !== null && Number.isFinite(Number(value)));
  const setting = (key) => {
    const values = scored.map((run) => run.settings[key] ?? "default"), texts = [...new Set(values)];
    texts.sort(numeric(texts) ? (a, b) => a - b : undefined);
    return { label: literal(key), values: values.map((value) => texts.indexOf(value)), tickvals: texts.map((_, index) => index), ticktext: texts.map(literal) };
  };
  const scored = sorted.filter((run) => run.result.accuracy !== null);
  if (!keys.length || scored.length < 2) return;
  const accuracies = scored.map((run) => run.result.accuracy);
  const rewards = scored.map((run) => run.result.reward);
  const dimensions = [...keys.map(setting), ...(numeric(rewards) ? [{ label: "reward", values: rewards }] : []), { label: "accuracy", values: accuracies }];
  const style = look();
  const line = { color: accuracies, colorscale: [[0, "#7f9fe8"], [1, "#e8932a"]], showscale: true };
  $("#parallel").style.height = "360px";
  Plotly.react("parallel", [{ type: "parcoords", dimensions, line, labelfont: { color: style.font.color }, tickfont: { color: style.font.color }, rangefont: { color: "transparent" } }], { ...style, margin: { l: 80, r: 60, t: 60, b: 30 } }, { displaylogo: false, responsive: true });
}

// ---- Curves

const panels = []; // { node, title, unit, names, isDrawn }
let zoom = null, isLinking = false;

function look() {
  const css = getComputedStyle(document.documentElement);
  const ink = css.getPropertyValue("--ink"), line = css.getPropertyValue("--line"), panel = css.getPropertyValue("--panel");
  // A negative thickness: without an outline.
  const axis = { gridcolor: line, zerolinecolor: line, automargin: true, exponentformat: "e", minexponent: 4 };
  return { paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { color: ink, size: 11 }, xaxis: { ...axis, spikecolor: ink, spikethickness: -1 }, yaxis: { ...axis }, modebar: { bgcolor: "transparent", color: line, activecolor: ink }, hoverlabel: { bgcolor: panel, bordercolor: line, font: { color: ink } }, colorway: PALETTE };
}

function makePanels() {
  const all = [...new Set(runs.flatMap((run) => Object.keys(run.series)))];
  const left = new Set(all.filter((name) => name !== "step" && name !== "wall" && !name.startsWith("eval/ci95") && runs.some((run) => run.series[name]?.some((value) => value !== null))));
  const watch = new IntersectionObserver((entries) => entries.forEach((entry) => entry.isIntersecting && draw(panels.find((panel) => panel.node === entry.target))), { rootMargin: "150px" });
  const add = (grid, title, unit, names) => {
    const node = el("div", { className: "plot" });
    panels.push({ node, title, unit, names });
    grid.append(node);
    watch.observe(node);
  };
  for (const [group, members] of Object.entries(groups)) {
    const grid = el("div", { className: "grid" });
    for (const [title, unit, wanted] of members) {
      const names = [...left].filter((name) => wanted.some((want) => (want.endsWith("*") ? name.startsWith(want.slice(0, -1)) : name === want)));
      names.forEach((name) => left.delete(name));
      if (names.length) add(grid, title, unit, names);
    }
    if (grid.children.length) $("#panels").append(el("h2", {}, group), grid);
  }
  const grid = el("div", { className: "grid" });
  [...left].sort().forEach((name) => add(grid, name, "", [name]));
  if (left.size) $("#panels").append(el("details", {}, el("summary", {}, `All other metrics (${left.size})`), grid));
  if (!panels.length) $("#panels").append(el("p", { className: "quiet" }, "metrics.jsonl has no numbers yet."));
}

function smooth(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return +(mean / total).toPrecision(6);
  });
}

function traces(panel) {
  const weight = +$("#smoothing").value, wall = $("#x_axis").value === "wall", found = [];
  const scale = wallUnit()[1];
  runs.forEach((run, r) =>
    panel.names.forEach((name, m) => {
      const y = run.series[name];
      if (run.isHidden || !y?.some((value) => value !== null)) return;
      const x = wall ? run.series.wall.map((seconds) => seconds / scale) : run.series.step;
      const count = y.filter((value) => value !== null).length, several = runs.length > 1;
      const color = PALETTE[(several ? r : m) % PALETTE.length], dash = DASHES[several ? m % DASHES.length : Math.floor(m / PALETTE.length) % DASHES.length];
      const label = literal([panel.names.length > 1 || !several ? name.slice(name.indexOf("/") + 1) : "", several ? run.label : ""].filter(Boolean).join(" "));
      const base = { x, type: "scatter", connectgaps: name.startsWith("eval/") || count < y.length / 2, line: { color, dash, width: 1.6 }, marker: { color, size: 5 }, mode: count < 30 ? "lines+markers" : "lines", legendgroup: `${r} ${name}` };
      const width = name.startsWith("eval/accuracy") && run.series[name.replace("eval/accuracy", "eval/ci95")];
      if (width) {
        const known = y.map((_, i) => i).filter((i) => y[i] !== null && width[i] !== null);
        const edge = (sign) => ({ ...base, x: known.map((i) => x[i]), y: known.map((i) => y[i] + sign * width[i]), mode: "lines", line: { width: 0, color }, hoverinfo: "skip", showlegend: false });
        found.push(edge(1), { ...edge(-1), fill: "tonexty", fillcolor: color + "22" });
      }
      if (weight > 0) found.push({ ...base, y, opacity: 0.25, mode: "lines", hoverinfo: "skip", showlegend: false });
      found.push({ ...base, y: weight > 0 ? smooth(y, weight) : y, name: label, hovertemplate: "%{y:.5g}" });
    })
  );
  return found;
}

function wallUnit() {
  const longest = Math.max(0, ...runs.flatMap((run) => run.series.wall?.at(-1) ?? 0));
  return longest > 10800 ? ["hours", 3600] : longest > 180 ? ["minutes", 60] : ["seconds", 1];
}

function draw(panel) {
  const data = traces(panel), style = look(), lines = data.filter((trace) => trace.name).length;
  const x = $("#x_axis").value === "wall" ? `${wallUnit()[0]} in steps` : "step";
  const layout = {
    ...style,
    title: { text: literal(panel.title) + (panel.unit ? ` <span style="font-size:11px">${literal(panel.unit)}</span>` : ""), font: { size: 13 }, x: 0.02, y: 0.97, yanchor: "top" },
    margin: { l: 8, r: 12, t: 34, b: 8 },
    xaxis: { ...style.xaxis, title: { text: x, standoff: 4 }, ...(zoom ? { range: [...zoom] } : {}) },
    showlegend: runs.length === 1 && lines > 1 && lines <= 6,
    yaxis: { ...style.yaxis, rangemode: new Set(data.flatMap((trace) => trace.y).filter((y) => y !== null)).size > 1 ? "normal" : "tozero" },
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", font: { size: 10 } },
    hovermode: lines <= 14 ? "x unified" : "closest",
  };
  Plotly.react(panel.node, data, layout, { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d", "pan2d"] });
  if (!panel.isDrawn) panel.node.on("plotly_relayout", link);
  panel.isDrawn = true;
}

async function link(event) {
  const range = event["xaxis.range"] ?? [event["xaxis.range[0]"], event["xaxis.range[1]"]];
  if (isLinking || (range[0] === undefined && !event["xaxis.autorange"])) return;
  zoom = range[0] === undefined ? null : range;
  isLinking = true;
  const change = () => (zoom ? { "xaxis.range": [...zoom] } : { "xaxis.autorange": true });
  await Promise.all(panels.filter((panel) => panel.isDrawn).map((panel) => Plotly.relayout(panel.node, change())));
  isLinking = false;
}

function showRunLegend() {
  if (runs.length > 1) $("#run_legend").append(...runs.map((run, index) => {
    const chip = el("button", { type: "button", ariaPressed: "true", onclick: () => { run.isHidden = !run.isHidden; chip.ariaPressed = String(!run.isHidden); redraw(); } }, run.label);
    chip.style.borderLeft = `12px solid ${PALETTE[index % PALETTE.length]}`;
    return chip;
  }));
}

const redraw = () => panels.filter((panel) => panel.isDrawn).forEach(draw);

// ---- Responses

const COLUMNS = [["step", "56px"], ["kind", "78px"], ["score", "64px"], ["length", "64px"], ["cut off", "62px"], ["failed", "56px"], ["question", "38%"], ["response", "62%"]];
let sortBy = "step", descending = false, shown = PAGE, chosen = null;
const inRun = (name) => runs[$(`#${name}_run`).value || 0];

function cell(run, record, column) {
  if (column === "question") return run.prompts[record.prompt].question || run.prompts[record.prompt].prompt;
  if (column === "response") return record.text;
  if (column === "cut off") return record.truncated;
  return column === "failed" ? record.failure !== null && record.failure !== undefined : record[column];
}

function matching(run) {
  const form = $("#filters").elements, text = form.text.value.toLowerCase();
  const within = (name, value) => (form[name + "_min"].value === "" || value >= +form[name + "_min"].value) && (form[name + "_max"].value === "" || value <= +form[name + "_max"].value);
  return run.responses.filter(
    (record) =>
      ["step", "score", "length"].every((name) => within(name, record[name])) &&
      (!form.kind.value || record.kind === form.kind.value) && (!form.truncated.checked || record.truncated) &&
      (!form.failed.checked || cell(run, record, "failed")) &&
      (!text || (cell(run, record, "question") + "\n" + record.text).toLowerCase().includes(text))
  );
}

function showTable() {
  const run = inRun("responses"), found = matching(run), sign = descending ? -1 : 1;
  const value = (record) => cell(run, record, sortBy) ?? -Infinity;
  found.sort((a, b) => sign * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0));
  $("#count").textContent = run.responses.length ? `${found.length.toLocaleString("en")} of ${run.responses.length.toLocaleString("en")} responses. ${run.notes.filter((note) => note.startsWith("Resp")).join("")}` : "No recorded responses (trainer.samples_every_steps).";
  $("#table thead").replaceChildren(el("tr", {}, ...COLUMNS.map(([name, width]) => {
    const head = el("th", { onclick: () => { descending = sortBy === name && !descending; sortBy = name; showTable(); } }, name + (name === sortBy ? (descending ? " ▾" : " ▴") : ""));
    head.style.width = width;
    return head;
  })));
  $("#table tbody").replaceChildren(...found.slice(0, shown).map((record) => {
    const texts = COLUMNS.map(([name]) => cell(run, record, name)).map((value) => (value === true ? "yes" : value === false ? "" : typeof value === "string" ? value.slice(0, 160) : format(value)));
    return el("tr", { className: record === chosen ? "chosen" : "", tabIndex: 0, onclick: () => choose(run, record), onkeydown: (event) => event.key === "Enter" && choose(run, record) }, ...texts.map((text) => el("td", {}, text)));
  }));
  $("#more").hidden = found.length <= shown;
}

function choose(run, record) {
  chosen = record;
  showTable();
  const prompt = run.prompts[record.prompt];
  const block = (title, text) => (text ? [el("h3", {}, title), el("pre", {}, text)] : []);
  const token = run.tokens.find((one) => record.kind === "training" && one.step === record.step && one.response === record.k);
  const parts = Object.entries(record.parts).map(([name, value]) => ` · ${name} ${format(value)}`).join("");
  const version = record.weight_version === null ? "" : ` · policy version ${record.weight_version}`;
  const buttons = el("p", {}, el("button", { id: "all_samples", onclick: () => showSamples(run, record.prompt) }, "All samples of this prompt"), " ");
  if (token) buttons.append(el("button", { id: "to_tokens", onclick: () => openTokens(run, token) }, "Tokens"));
  const answer = record.turns.length
    ? [el("h3", {}, "conversation"), ...record.turns.map((turn) => el("div", { className: `turn ${turn.role === "assistant" ? "assistant" : ""}` }, el("span", { className: "quiet" }, turn.role), el("pre", {}, turn.text)))]
    : block("response", record.text || "(empty)");
  $("#detail").replaceChildren(
    el("p", {}, el("b", {}, `score ${format(record.score)}`), `${parts} · ${format(record.length)} tokens${record.truncated ? ", cut off" : ""} · step ${record.step}, ${record.kind}, response ${record.k}${version}`),
    ...(record.failure ? [el("p", { className: "bad" }, `reward failed: ${record.failure}`)] : []),
    buttons, ...block("prompt", prompt.prompt), ...answer, ...block("expected", prompt.answer)
  );
  $("#samples").replaceChildren();
  if (innerWidth < 900) $("#detail").scrollIntoView({ behavior: "smooth" });
}

function showSamples(run, index) {
  const prompt = run.prompts[index];
  const its = run.responses.filter((record) => run.prompts[record.prompt].id === prompt.id && run.prompts[record.prompt].prompt === prompt.prompt);
  const byStep = Map.groupBy(its, (record) => record.step);
  const steps = [...byStep].sort((a, b) => a[0] - b[0]).map(([step, records]) => {
    const mean = records.reduce((sum, record) => sum + record.score, 0) / records.length;
    return el("div", {}, el("b", {}, `step ${step}`), el("span", { className: "quiet" }, ` mean score ${format(+mean.toFixed(3))} of ${records.length}`),
      ...records.map((record) => el("div", { className: "card" }, el("span", { className: "quiet" }, `score ${format(record.score)}, ${record.length} tokens${record.kind === "training" ? "" : ", " + record.kind}${record.truncated ? ", cut off" : ""}`), el("pre", {}, record.text))));
  });
  $("#samples").replaceChildren(el("h2", {}, "All samples of this prompt"), el("pre", {}, prompt.question || prompt.prompt), el("div", { className: "steps" }, ...steps));
  $("#samples").scrollIntoView({ behavior: "smooth" });
}

// ---- Tokens

const minus = (a, b) => (one) => one[a] && one[b] && one[a].map((value, i) => (value === null || one[b][i] === null ? null : value - one[b][i]));
const column = (name) => (one) => one[name];
const logRatio = minus("new_log_prob", "old_log_prob");
const QUANTITIES = [
  ["log-prob in the rollout", column("rollout_log_prob"), "size"], ["old log-prob", column("old_log_prob"), "size"], ["reference log-prob", column("ref_log_prob"), "size"], ["new log-prob, after the step", column("new_log_prob"), "size"],
  ["old - rollout log-prob", minus("old_log_prob", "rollout_log_prob"), "sign"], ["old - reference log-prob", minus("old_log_prob", "ref_log_prob"), "sign"], ["new - old log-prob", logRatio, "sign"],
  ["ratio new / old", (one) => logRatio(one)?.map((value) => (value === null ? null : Math.exp(value))), "sign", 1],
  ["entropy", column("entropy"), "size"], ["advantage", column("advantage"), "sign"], ["value", column("value"), "sign"], ["return", column("return_"), "sign"],
  ["clipped", column("clipped"), "kind"], ["trained", column("trained"), "kind"], ["policy version", column("version"), "kind"],
];
let token, pinned = null;

function openTokens(run, one) {
  openTab("tokens");
  $("#tokens_run").value = runs.indexOf(run);
  tokenSteps(one.step, one.response);
}

function tokenSteps(step, response) {
  const run = inRun("tokens");
  options($("#tokens_step"), [...new Set(run.tokens.map((one) => one.step))].map((value) => [value, value]), step);
  tokenResponses(response);
}

function tokenResponses(response) {
  const run = inRun("tokens"), step = +$("#tokens_step").value;
  const its = run.tokens.filter((one) => one.step === step);
  const score = (one) => run.responses.find((record) => record.kind === "training" && record.step === step && record.k === one.response)?.score;
  options($("#tokens_response"), its.map((one) => [one.response, `${one.response}: score ${format(score(one))}, ${one.length} tokens`]), response);
  showTokens();
}

function showTokens() {
  const run = inRun("tokens");
  token = run.tokens.find((one) => one.step === +$("#tokens_step").value && one.response === +$("#tokens_response").value);
  pinned = null;
  $("#token_facts").hidden = true;
  if (!token) return $("#token_text").replaceChildren("No recorded tokens (tracking.token_samples).");
  const known = QUANTITIES.filter(([, of]) => of(token));
  options($("#quantity"), known.map(([name]) => [name, name]), $("#quantity").value);
  const [, of, kind, center = 0] = known.find(([name]) => name === $("#quantity").value);
  const values = of(token), numbers = values.filter((value) => value !== null).map((value) => Math.abs(value - center)).sort((a, b) => a - b);
  const largest = numbers[Math.floor(0.98 * (numbers.length - 1))] || numbers.at(-1) || 1;
  const kinds = [...new Set(values)].sort();
  const color = (value) => {
    if (value === null || value === false) return "transparent";
    if (kind === "kind") return value === true ? `rgb(${ORANGE} / 0.55)` : PALETTE[kinds.indexOf(value) % PALETTE.length] + "80";
    return `rgb(${kind === "sign" && value < center ? BLUE : ORANGE} / ${0.85 * Math.min(1, Math.abs(value - center) / largest)})`;
  };
  $("#token_text").replaceChildren(...token.token.map((text, i) => {
    const span = el("span", { textContent: text.replaceAll("\n", "↵\n") || "∅", className: token.trained?.[i] === false ? "untrained" : "" });
    span.style.background = color(values[i]);
    span.dataset.index = i;
    return span;
  }), ...(token.length > token.token.length ? [el("span", { className: "untrained" }, ` ... ${token.length - token.token.length} more tokens`)] : []));
  showLegend(kind, center, largest, kinds, values.filter((value) => value !== null), color);
}

function showLegend(kind, center, largest, kinds, values, color) {
  const bar = el("div", { className: "bar" }), swatch = (value) => {
    const chip = el("span", { className: "chip" }, value === null ? "not known" : value === true ? "yes" : value === false ? "no" : format(value));
    chip.style.background = color(value);
    return chip;
  };
  bar.style.background = kind === "sign" ? `linear-gradient(90deg, rgb(${BLUE} / 0.85), transparent, rgb(${ORANGE} / 0.85))` : `linear-gradient(90deg, transparent, rgb(${ORANGE} / 0.85))`;
  if (kind === "kind") return $("#legend").replaceChildren(...kinds.map(swatch), "untrained tokens in italics");
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  const least = Math.min(...values), most = Math.max(...values);
  const [from, to] = kind === "sign" ? [center - largest, center + largest] : [0, most > 0 ? largest : -largest];
  $("#legend").replaceChildren(format(+from.toPrecision(3)), bar, format(+to.toPrecision(3)), el("span", { className: "quiet" }, `mean ${format(mean)}, from ${format(least)} to ${format(most)}; untrained tokens in italics`));
}

function tokenFacts(event) {
  const span = event.target.closest("span[data-index]"), box = $("#token_facts");
  if (!span) return pinned === null && (box.hidden = true);
  if (event.type === "click") {
    document.querySelector(".pinned")?.classList.remove("pinned");
    pinned = pinned === span ? null : span;
    pinned?.classList.add("pinned");
  } else if (pinned) return;
  const i = +span.dataset.index;
  const facts = [["token", JSON.stringify(token.token[i])], ["id", token.token_id[i]], ["position", i], ...QUANTITIES.filter(([, of]) => of(token)).map(([name, of]) => [name, of(token)[i]])];
  box.replaceChildren(el("table", {}, ...facts.map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, value === true ? "yes" : value === false ? "no" : format(value))))));
  box.hidden = false;
  const at = span.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(at.left, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${at.bottom + box.offsetHeight + 8 < innerHeight ? at.bottom + 6 : Math.max(4, at.top - box.offsetHeight - 6)}px`;
}

// ---- Timeline

const total = (spans) => spans.reduce((sum, span) => sum + span.seconds, 0);

function timelineSteps() {
  options($("#timeline_step"), inRun("timeline").timeline.map((one) => [one.step, one.step]));
  showTimeline();
}

function showTimeline() {
  const one = inRun("timeline").timeline.find((step) => step.step === +$("#timeline_step").value);
  if (!one) return $("#lanes").replaceChildren("No recorded steps in timeline.jsonl (trainer.samples_every_steps).");
  const ranks = [...Array(one.num_ranks).keys()];
  const idle = (rank) => one.seconds - one.sections.reduce((sum, section) => sum + total(section.ranks[rank] ?? []), 0);
  const lane = (rank) => `rank ${rank}, idle ${((100 * idle(rank)) / one.seconds).toFixed(1)} %`;
  const bars = new Map();
  const bar = (name, y, span) => {
    if (!bars.has(name)) bars.set(name, { type: "bar", orientation: "h", name: literal(name), y: [], x: [], base: [], hovertemplate: "%{customdata:.4g} s from %{base:.4g} s", customdata: [], marker: { color: PALETTE[bars.size % PALETTE.length], pattern: { shape: bars.size < PALETTE.length ? "" : "/" } } });
    const its = bars.get(name);
    its.y.push(y); its.x.push(span.seconds); its.base.push(span.start); its.customdata.push(span.seconds);
  };
  for (const section of one.sections) {
    bar(section.name, "driver", section);
    section.ranks.forEach((spans, rank) => spans.forEach((span) => bar(span.method, lane(rank), span)));
  }
  const style = look(), lanes = ["driver", ...ranks.map(lane)];
  $("#lanes").style.height = `${150 + 26 * lanes.length}px`;
  Plotly.react("lanes", [...bars.values()], { ...style, barmode: "overlay", bargap: 0.25, margin: { l: 8, r: 12, t: 10, b: 8 }, xaxis: { ...style.xaxis, title: { text: `seconds of step ${one.step}` }, range: [0, one.seconds] }, yaxis: { ...style.yaxis, categoryarray: lanes.reverse(), categoryorder: "array" }, legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom" }, hovermode: "closest" }, { displaylogo: false, responsive: true });
  showWaits(one, ranks, idle);
}

function showWaits(one, ranks, idle) {
  const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : 0);
  const rows = one.sections.map((section) => {
    const waits = ranks.map((rank) => section.seconds - total(section.ranks[rank] ?? []));
    const spans = section.ranks.flatMap((its, rank) => its.map((span) => ({ ...span, rank })));
    const last = spans.reduce((late, span) => (!late || span.start + span.seconds > late.start + late.seconds ? span : late), null);
    return [section.name, section.seconds, mean(waits), Math.max(0, ...waits), last ? `rank ${last.rank}, ${last.method}` : "the driver"];
  });
  const between = one.seconds - total(one.sections);
  rows.push(["between", between, between, between, "the driver"], ["step", one.seconds, mean(ranks.map(idle)), Math.max(0, ...ranks.map(idle)), ""]);
  const titles = ["section", "seconds", "idle, mean of ranks", "idle, largest", "waited last for"];
  $("#waits").replaceChildren(el("tr", {}, ...titles.map((title) => el("th", {}, title))), ...rows.map((row) => el("tr", {}, ...row.map((value) => el("td", {}, typeof value === "number" ? value.toFixed(3) : value)))));
}

// ---- Page

const OPENED = { responses: showTable, tokens: () => tokenSteps(), timeline: timelineSteps };
const opened = new Set();

function openTab(name) {
  document.querySelectorAll("main").forEach((main) => (main.hidden = main.id !== name));
  document.querySelectorAll("nav button").forEach((button) => button.setAttribute("aria-selected", button.dataset.tab === name));
  history.replaceState(null, "", "#" + name);
  if (!opened.has(name)) OPENED[name]?.();
  opened.add(name);
}

async function start() {
  ({ runs, groups } = JSON.parse(await unpack("data")));
  document.head.append(el("script", { textContent: await unpack("plotly") }));
  nameRuns();
  for (const name of ["responses", "tokens", "timeline"]) options($(`#${name}_run`), runs.map((run, index) => [index, run.label]));
  document.querySelectorAll(".of_run").forEach((label) => (label.hidden = runs.length < 2));
  document.querySelectorAll("form").forEach((form) => (form.onsubmit = () => false));
  showRuns();
  makePanels();
  showRunLegend();
  $("#smoothing").oninput = () => { $("#smoothing_value").textContent = $("#smoothing").value; redraw(); };
  $("#x_axis").onchange = () => { zoom = null; redraw(); };
  const filter = () => { shown = PAGE; showTable(); };
  $("#filters").oninput = filter;
  $("#filters").onreset = () => setTimeout(filter);
  $("#more").onclick = () => { shown += PAGE; showTable(); };
  $("#tokens_run").onchange = () => tokenSteps();
  $("#tokens_step").onchange = () => tokenResponses();
  $("#tokens_response").onchange = $("#quantity").onchange = showTokens;
  for (const kind of ["mouseover", "mouseleave", "click"]) $("#token_text").addEventListener(kind, tokenFacts);
  $("#timeline_run").onchange = timelineSteps;
  $("#timeline_step").onchange = showTimeline;
  matchMedia("(prefers-color-scheme: dark)").onchange = () => { redraw(); showRuns(); if (opened.has("timeline")) showTimeline(); };
  document.querySelectorAll("nav button").forEach((button) => (button.onclick = () => openTab(button.dataset.tab)));
  const tabs = [...document.querySelectorAll("main")].map((main) => "#" + main.id);
  openTab((tabs.find((tab) => tab === location.hash) ?? tabs[0]).slice(1));
  document.body.dataset.ready = "yes";
}

start().catch((error) => {
  $("#failure").textContent = `The page could not be built: ${error}. It needs a browser of 2023 or later.`;
  $("#failure").hidden = false;
});
