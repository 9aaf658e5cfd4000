const $ = id => document.getElementById(id), POLL_MS = 2000, WINDOW_S = 60, SVG = $("ttft").namespaceURI;
const CURVES = {
  ttft: { log: true, of: point => point.ttft_ms.p50, high: point => point.ttft_ms.p99, live: now => now.ttft_ms },
  tpot: { of: point => point.tpot_ms.p50, high: point => point.tpot_ms.p99, live: now => now.tpot_ms },
  done: { of: point => point.requests_per_s, live: now => now.rate },
  cache: { of: point => 100 * point.cache },
};
let variants = [], most = 1, now = null;
const readings = [];

// -- the plan --

/** The points with a finite rate, by rate. */
const rated = one => one.points.filter(point => point.request_rate !== "inf").sort((a, b) => a.request_rate - b.request_rate);

/** A figure at a load between two points; at the ends, the end's own. */
function at(points, load, of) {
  const after = points.findIndex(point => point.request_rate >= load);
  if (after < 0) return of(points[points.length - 1]);
  if (after === 0) return of(points[0]);
  const [low, high] = [points[after - 1], points[after]];
  const part = (load - low.request_rate) / (high.request_rate - low.request_rate);
  return of(low) + part * (of(high) - of(low));
}

function show(plan) {
  variants = plan.results.map(one => ({ flags: one.flags, knee: one.knee, points: rated(one), all: one.points }));
  const loads = variants.flatMap(one => one.points.map(point => point.request_rate));
  if (!loads.length) throw new Error("this plan has no loads; make one with --rate");
  most = Math.max(...loads);
  const shape = variants[0].points[0];
  $("title").textContent = `${plan.model ?? "Plan"} on ${plan.gpus} x ${plan.planned_gpu}`;
  $("about").textContent = `${shape.input_len} tokens in, ${shape.output_len} out. Made by: ${plan.command}`;
  $("load").min = Math.min(...loads);
  $("load").max = most;
  $("load").value = variants[0].knee;
  $("choose").hidden = true;
  $("plan").hidden = false;
  draw();
}

// -- the picture --

function add(parent, name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

const shown = value => !value ? "0" : value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);

function curve(id, load) {
  const { of, high, live, log } = CURVES[id], svg = $(id), { width, height } = svg.viewBox.baseVal;
  const left = 34, bottom = height - 16, own = live && now ? live(now) : null;
  const values = variants.flatMap((one, number) => one.points.flatMap(point => [of(point), high && !number ? high(point) : of(point)]));
  const top = Math.max(...values, own ?? 0, 1e-9) * 1.05, low = log ? Math.min(...values, own ?? top) / 1.2 : 0;
  const part = value => log ? Math.log(value / low) / Math.log(top / low) : value / top; // of the height
  const value = part => log ? low * (top / low) ** part : part * top;
  const x = rate => left + rate / most * (width - left - 6), y = figure => bottom - Math.min(part(figure), 1) * (bottom - 6);
  const line = (points, figure) => points.map(point => `${x(point.request_rate).toFixed(1)},${y(figure(point)).toFixed(1)}`).join(" ");
  svg.replaceChildren();
  for (const tick of [0, 0.5, 1]) {
    add(svg, "line", { x1: left, x2: width, y1: y(value(tick)), y2: y(value(tick)), class: "grid" });
    add(svg, "text", { x: left - 4, y: y(value(tick)) + 3, class: "left" }, shown(value(tick)));
    add(svg, "text", { x: x(tick * most), y: height - 4, class: tick ? "right" : "" }, shown(tick * most));
  }
  add(svg, "line", { x1: x(variants[0].knee), x2: x(variants[0].knee), y1: 6, y2: bottom, class: "knee" });
  add(svg, "line", { x1: x(load), x2: x(load), y1: 6, y2: bottom, class: "at" });
  variants.forEach((one, number) => {
    add(svg, "polyline", { points: line(one.points, of), class: `of v${number % 6}` });
    if (high && !number) add(svg, "polyline", { points: line(one.points, high), class: `high v${number % 6}` });
  });
  if (own !== null && Number.isFinite(own)) add(svg, "circle", { cx: x(Math.min(now.rate, most)), cy: y(own), r: 4, class: "live" });
}

function cell(row, text, name) {
  const made = row.insertCell();
  made.textContent = text;
  if (name) made.className = name;
}

function binds(one, load) {
  const names = [...new Set(one.points.flatMap(point => Object.keys(point.binds)))];
  const shares = names.map(name => [name, at(one.points, load, point => point.binds[name] ?? 0)]).sort((a, b) => b[1] - a[1]);
  const waits = load > 0.97 * Math.max(...one.all.map(point => point.requests_per_s)) ? ", queue" : "";
  return shares.slice(0, 2).map(([name, share]) => `${name} ${(100 * share).toFixed(0)} %`).join(", ") + waits;
}

function draw() {
  const load = Number($("load").value);
  $("rate").textContent = `${shown(load)} requests/s`;
  for (const id of Object.keys(CURVES)) curve(id, load);
  $("rows").replaceChildren();
  variants.forEach((one, number) => {
    const row = $("rows").insertRow(), of = figure => at(one.points, load, figure);
    cell(row, one.flags, `name v${number % 6}`);
    cell(row, `${shown(of(point => point.ttft_ms.p50))} / ${shown(of(point => point.ttft_ms.p99))}`);
    cell(row, `${shown(of(point => point.tpot_ms.p50))} / ${shown(of(point => point.tpot_ms.p99))}`);
    cell(row, shown(of(point => point.requests_per_s)));
    cell(row, of(point => point.rows).toFixed(0));
    cell(row, `${(100 * of(point => point.cache)).toFixed(1)} %`);
    cell(row, binds(one, load));
  });
  if (!now) return;
  const mean = figure => shown(at(variants[0].points, now.rate, figure));
  $("live").textContent = `This server: ${shown(now.rate)} requests/s in the last minute, TTFT ${shown(now.ttft_ms)} ms where ` +
    `${mean(point => point.ttft_ms.mean)} are predicted, TPOT ${shown(now.tpot_ms)} ms where ${mean(point => point.tpot_ms.mean)} are.`;
}

// -- this server --

/** The sum of a metric over its labels. */
function total(text, name) {
  let sum = 0;
  for (const line of text.split("\n")) if (line.startsWith(name + "{") || line.startsWith(name + " ")) sum += Number(line.slice(line.lastIndexOf(" ")));
  return sum;
}

const headers = () => $("key").value ? { authorization: "Bearer " + $("key").value } : {};

async function measure() {
  try {
    const answer = await fetch("/metrics", { headers: headers() });
    if (answer.ok) reading(await answer.text(), performance.now() / 1000);
  } catch { now = null; } // the server is away; the plan stays
  if (variants.length) draw();
  setTimeout(measure, document.hidden ? 5 * POLL_MS : POLL_MS);
}

function reading(text, time) {
  const read = name => total(text, `vllm:${name}`);
  readings.push({ time, done: read("request_success_total"),
    firsts: read("time_to_first_token_seconds_count"), ttft: read("time_to_first_token_seconds_sum"),
    answers: read("request_time_per_output_token_seconds_count"), tpot: read("request_time_per_output_token_seconds_sum") });
  while (readings[0].time < time - WINDOW_S) readings.shift();
  const first = readings[0], last = readings[readings.length - 1], done = last.done - first.done;
  now = done > 0 && last.answers > first.answers && last.firsts > first.firsts ? {
    rate: done / (last.time - first.time),
    ttft_ms: 1e3 * (last.ttft - first.ttft) / (last.firsts - first.firsts),
    tpot_ms: 1e3 * (last.tpot - first.tpot) / (last.answers - first.answers),
  } : null;
}

async function begin() {
  const answer = await fetch("/plan.json", { headers: headers() });
  $("key").hidden = answer.status !== 401;
  if (answer.ok) show(await answer.json());
  else if (answer.status === 404) $("about").textContent = "This server has no plan. Start it with --plan FILE, or choose a file here.";
}

$("load").addEventListener("input", draw);
$("ask").addEventListener("submit", event => { event.preventDefault(); begin(); });
$("file").addEventListener("change", async () => {
  try { show(JSON.parse(await $("file").files[0].text())); }
  catch (error) { $("about").textContent = `This is no plan: ${error.message}`; }
});
begin();
measure();
