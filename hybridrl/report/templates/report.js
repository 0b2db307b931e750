"use strict";
// Texts of models are shown through textContent only: `el` appends strings as text nodes.
const $ = (selector) => document.querySelector(selector);
const PALETTE = ["#4269d0", "#e8932a", "#ff725c", "#38a89d", "#a463f2", "#3ca951", "#e66bb2", "#7f9fe8", "#9c6b4e", "#9498a0"];
const DASHES = ["solid", "dot", "dash", "dashdot", "longdash"];
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

// What follows the last mark, unless several of the names would then be the same.
function shortName(name, names, mark) {
  const ending = name.slice(name.lastIndexOf(mark) + 1);
  return names.some((other) => other !== name && other.endsWith(mark + ending)) ? name : ending;
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
    const own = keys.map((key) => `${shortName(key, keys, ".")}=${run.settings[key] ?? "default"}`).join(" ");
    run.label = own && own.length < 60 ? own : run.folder;
    const times = (counts[run.label] = (counts[run.label] ?? 0) + 1);
    if (times > 1) run.label += ` (${times})`;
  }
}

function showRuns() {
  if (runs.length < 2) return;
  $("#runs").hidden = false;
  const keys = varied(), numbers = ["accuracy", "+-", "reward", "KL", "steps", "minutes"];
  const rank = (run) => run.result.accuracy ?? -Infinity;
  const sorted = [...runs].sort((a, b) => rank(b) - rank(a) || 0);
  $("#runs_table").replaceChildren(
    el("tr", {}, ...["run", ...numbers, "state", ...keys].map((name) => el("th", {}, name))),
    ...sorted.map((run) => el("tr", {}, ...[run.folder, ...numbers.map((name) => format(run.result[name])), run.state, ...keys.map((key) => run.settings[key] ?? "default")].map((text) => el("td", {}, text))))
  );
  const numeric = (values) => values.every((value) => value !== "" && value !== null && Number.isFinite(Number(value)));
  const setting = (key) => {
    const values = scored.map((run) => run.settings[key] ?? "default"), texts = [...new Set(values)];
    texts.sort(numeric(texts) ? (a, b) => a - b : undefined);
    const ticks = texts.map((text) => literal(text.length > 16 ? "…" + text.slice(-15) : text));
    return { label: literal(shortName(key, keys, ".")), values: values.map((value) => texts.indexOf(value)), tickvals: texts.map((_, index) => index), ticktext: ticks };
  };
  const scored = sorted.filter((run) => run.result.accuracy !== null);
  if (!keys.length || scored.length < 2) return;
  const accuracies = scored.map((run) => run.result.accuracy);
  const rewards = scored.map((run) => run.result.reward);
  const dimensions = [...keys.map(setting), ...(numeric(rewards) ? [{ label: "reward", values: rewards }] : []), { label: "accuracy", values: accuracies }];
  const style = look();
  const line = { color: accuracies, colorscale: [[0, "#7f9fe8"], [1, "#e8932a"]], showscale: true };
  Object.assign($("#parallel").style, { height: "360px", minWidth: `${120 * dimensions.length}px` });
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
      const label = literal([panel.names.length > 1 || !several ? shortName(name, panel.names, "/") : "", several ? run.label : ""].filter(Boolean).join(" "));
      const base = { x, type: "scatter", connectgaps: name.startsWith("eval/") || count < y.length / 2, line: { color, dash, width: 1.6 }, marker: { color, size: 5 }, mode: count < 30 ? "lines+markers" : "lines", legendgroup: `${r} ${name}`, showlegend: !several };
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

// Of several runs: which metric has which line style.
function lineStyles(names) {
  if (runs.length === 1 || names.length === 1) return [];
  return names.map((name, m) => ({ x: [null], y: [null], type: "scatter", mode: "lines", line: { color: "#888", dash: DASHES[m % DASHES.length], width: 1.6 }, legendgroup: name, name: literal(shortName(name, names, "/")), hoverinfo: "skip" }));
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
    showlegend: (runs.length === 1 ? lines : panel.names.length) > 1 && panel.names.length <= 6,
    yaxis: { ...style.yaxis, rangemode: new Set(data.flatMap((trace) => trace.y).filter((y) => y !== null)).size > 1 ? "normal" : "tozero" },
    legend: { ...(runs.length > 1 ? { itemclick: false, itemdoubleclick: false } : {}), orientation: "h", yref: "container", y: 0, yanchor: "bottom", font: { size: 10 } },
    hovermode: lines <= 14 ? "x unified" : "closest",
  };
  Plotly.react(panel.node, [...data, ...lineStyles(panel.names)], layout, { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d", "pan2d"] });
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

// Times of an equal share: blue below, orange above.
function showExperts() {
  const style = look(), colors = [[0, PALETTE[0]], [0.5, "#f4f4f4"], [1, PALETTE[1]]];
  $("#experts").replaceChildren();
  for (const { experts, label } of runs.filter((run) => run.experts)) {
    const node = el("div", { className: "plot" });
    const title = `Load of experts, step ${experts.step}` + (runs.length > 1 ? `, ${label}` : "");
    $("#experts").append(el("h2", {}, title), node);
    const z = experts.shares.map((shares) => shares.map((share) => share * shares.length));
    const trace = { type: "heatmap", z, zmin: 0, zmax: 2, colorscale: colors, hovertemplate: "layer %{y}, expert %{x}: %{z:.2f} of an equal share<extra></extra>" };
    const layout = { ...style, margin: { l: 8, r: 12, t: 8, b: 8 }, xaxis: { ...style.xaxis, title: { text: "expert" } }, yaxis: { ...style.yaxis, dtick: Math.ceil(z.length / 12), title: { text: "layer" } } };
    Plotly.newPlot(node, [trace], layout, { displaylogo: false, responsive: true });
  }
}

function showRunLegend() {
  if (runs.length > 1) $("#run_legend").append(...runs.map((run, index) => {
    const chip = el("button", { type: "button", ariaPressed: "true", onclick: () => { run.isHidden = !run.isHidden; chip.ariaPressed = String(!run.isHidden); redraw(); } }, run.label);
    chip.style.borderLeft = `12px solid ${PALETTE[index % PALETTE.length]}`;
    return chip;
  }));
}

const redraw = () => panels.filter((panel) => panel.isDrawn).forEach(draw);

// ---- Page

const OPENED = { curves: showExperts, responses: showTable, tokens: () => tokenSteps(), timeline: timelineSteps };
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
  matchMedia("(prefers-color-scheme: dark)").onchange = () => { redraw(); showRuns(); if (opened.has("curves")) showExperts(); if (opened.has("timeline")) showTimeline(); };
  document.querySelectorAll("nav button").forEach((button) => (button.onclick = () => openTab(button.dataset.tab)));
  const tabs = [...document.querySelectorAll("main")].map((main) => "#" + main.id);
  openTab((tabs.find((tab) => tab === location.hash) ?? tabs[0]).slice(1));
  document.body.dataset.ready = "yes";
}

start().catch((error) => {
  $("#failure").textContent = `The page could not be built: ${error}. It needs a browser of 2023 or later.`;
  $("#failure").hidden = false;
});
