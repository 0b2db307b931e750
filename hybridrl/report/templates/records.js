"use strict";
// Tabs of recorded responses, tokens and timelines. Texts of models are shown through textContent only.
// ---- Responses

const BLUE = "66 105 208", ORANGE = "226 112 34";
const PAGE = 200; // rows of the table that are added at a time
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
  if (chosen && !run.responses.includes(chosen)) {
    chosen = null;
    $("#detail").replaceChildren();
    $("#samples").replaceChildren();
  }
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
    : block("response", record.text || (record.failure ? "" : "(empty)"));
  $("#detail").replaceChildren(
    el("p", {}, el("b", {}, `score ${format(record.score)}`), `${parts} · ${format(record.length)} tokens${record.truncated ? ", cut off" : ""} · step ${record.step}, ${record.kind}, response ${record.k}${version}`),
    ...(record.failure ? [el("p", { className: "bad" }, `reward failed: ${record.failure}`)] : []),
    buttons, ...block("prompt", prompt.prompt), ...pictures(run, prompt), ...answer, ...block("expected", prompt.answer)
  );
  $("#samples").replaceChildren();
  if (innerWidth < 900) $("#detail").scrollIntoView({ behavior: "smooth" });
}

function pictures(run, prompt) {
  return prompt.images.map((name) => run.images[name]).filter((src) => src).map((src) => el("img", { src, className: "picture", alt: "image of the prompt, scaled down" }));
}

function showSamples(run, index) {
  const prompt = run.prompts[index];
  const its = run.responses.filter((record) => record.prompt === index);
  const byStep = Map.groupBy(its, (record) => record.step);
  const steps = [...byStep].sort((a, b) => a[0] - b[0]).map(([step, records]) => {
    const mean = records.reduce((sum, record) => sum + record.score, 0) / records.length;
    return el("div", {}, el("b", {}, `step ${step}`), el("span", { className: "quiet" }, ` mean score ${format(+mean.toFixed(3))} of ${records.length}`),
      ...records.map((record) => el("div", { className: "card" }, el("span", { className: "quiet" }, `score ${format(record.score)}, ${record.length} tokens${record.kind === "training" ? "" : ", " + record.kind}${record.truncated ? ", cut off" : ""}`), el("pre", {}, record.text))));
  });
  $("#samples").replaceChildren(el("h2", {}, "All samples of this prompt"), el("pre", {}, prompt.question || prompt.prompt), ...pictures(run, prompt), el("div", { className: "steps" }, ...steps));
  $("#samples").scrollIntoView({ behavior: "smooth" });
}

// ---- Tokens

const minus = (a, b) => (one) => one[a] && one[b] && one[a].map((value, i) => (value === null || one[b][i] === null ? null : value - one[b][i]));
const column = (name) => (one) => one[name];
const logRatio = minus("new_log_prob", "old_log_prob");
const QUANTITIES = [
  ["log-prob in the rollout", column("rollout_log_prob"), "size"], ["old log-prob", column("old_log_prob"), "size"], ["reference log-prob", column("ref_log_prob"), "size"], ["teacher's log-prob", column("teacher_log_prob"), "size"], ["new log-prob, after the step", column("new_log_prob"), "size"],
  ["old - rollout log-prob", minus("old_log_prob", "rollout_log_prob"), "sign"], ["old - reference log-prob", minus("old_log_prob", "ref_log_prob"), "sign"], ["teacher's - old log-prob", minus("teacher_log_prob", "old_log_prob"), "sign"], ["new - old log-prob", logRatio, "sign"],
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
  $("#legend").replaceChildren();
  if (!token) return $("#token_text").replaceChildren("No recorded tokens (tracking.token_samples).");
  const known = QUANTITIES.filter(([, of]) => of(token));
  options($("#quantity"), known.map(([name]) => [name, name]), $("#quantity").value);
  const [, of, kind, center = 0] = known.find(([name]) => name === $("#quantity").value);
  const values = of(token), numbers = values.filter((value) => value !== null).map((value) => Math.abs(value - center)).sort((a, b) => a - b);
  const largest = numbers[Math.ceil(0.98 * (numbers.length - 1))] || numbers.at(-1) || 1;
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

// A rank's calls in a section; of ranks that only sample, the parts of all their calls that are in it.
function within(one, section, rank) {
  if (!(one.beside ?? []).includes(rank)) return section.ranks[rank] ?? [];
  const end = section.start + section.seconds, calls = one.sections.flatMap((other) => other.ranks[rank] ?? []);
  return calls.map((span) => ({ ...span, seconds: Math.max(0, Math.min(end, span.start + span.seconds) - Math.max(section.start, span.start)) }));
}

function timelineSteps() {
  options($("#timeline_step"), inRun("timeline").timeline.map((one) => [one.step, one.step]));
  showTimeline();
}

function showTimeline() {
  const one = inRun("timeline").timeline.find((step) => step.step === +$("#timeline_step").value);
  $("#waits").replaceChildren();
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
  const style = look(), lanes = ["driver", ...ranks.map(lane)], node = el("div");
  node.style.height = `${150 + 26 * lanes.length}px`;
  $("#lanes").replaceChildren(node);
  Plotly.newPlot(node, [...bars.values()], { ...style, barmode: "overlay", bargap: 0.25, margin: { l: 8, r: 12, t: 10, b: 8 }, xaxis: { ...style.xaxis, title: { text: `seconds of step ${one.step}` }, range: [0, one.seconds] }, yaxis: { ...style.yaxis, categoryarray: lanes.reverse(), categoryorder: "array" }, legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom" }, hovermode: "closest" }, { displaylogo: false, responsive: true });
  showWaits(one, ranks, idle);
}

function showWaits(one, ranks, idle) {
  const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : 0);
  const rows = one.sections.map((section) => {
    const waits = ranks.map((rank) => section.seconds - total(within(one, section, rank)));
    const spans = section.ranks.flatMap((its, rank) => its.map((span) => ({ ...span, rank })));
    const last = spans.reduce((late, span) => (!late || span.start + span.seconds > late.start + late.seconds ? span : late), null);
    return [section.name, section.seconds, mean(waits), Math.max(0, ...waits), last ? `rank ${last.rank}, ${last.method}` : "the driver"];
  });
  const between = one.seconds - total(one.sections);
  rows.push(["between", between, between, between, "the driver"], ["step", one.seconds, mean(ranks.map(idle)), Math.max(0, ...ranks.map(idle)), ""]);
  const titles = ["section", "seconds", "idle, mean of ranks", "idle, largest", "waited last for"];
  $("#waits").replaceChildren(el("tr", {}, ...titles.map((title) => el("th", {}, title))), ...rows.map((row) => el("tr", {}, ...row.map((value) => el("td", {}, typeof value === "number" ? value.toFixed(3) : value)))));
}
