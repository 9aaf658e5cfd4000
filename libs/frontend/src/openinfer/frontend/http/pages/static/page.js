const $ = id => document.getElementById(id), POLL_MS = 1000, READINGS = 120, DRAW_MS = 50;
const rates = [];
let messages = [], last = null, running = null;

const headers = () => ({ "content-type": "application/json", ...($("key").value && { authorization: "Bearer " + $("key").value }) });

async function refusal(answer) {
  if (answer.status === 401) $("key").hidden = false;
  return new Error((await answer.json()).error.message);
}

// -- the server's state --

async function state() {
  try {
    const answer = await fetch("/state", { headers: headers() });
    if (!answer.ok) throw await refusal(answer);
    const now = await answer.json();
    $("model").textContent = now.model + (now.healthy ? "" : ": " + now.detail);
    $("model").className = now.healthy ? "up" : "down";
    $("log").dataset.about = now.description ? now.description + " " : "";
    $("running").textContent = now.running;
    $("waiting").textContent = now.waiting;
    $("cache").textContent = (100 * now.kv_used_tokens / Math.max(now.kv_capacity_tokens, 1)).toFixed(1) + " %";
    for (const name in now.sampling) $("form").elements[name].placeholder = now.sampling[name] || (name === "top_k" ? "all" : 0);
    if (now.drafts) drafts(now);
    if (last && now.time > last.time) rate(now, now.time - last.time);
    last = now;
  } catch (error) { $("model").textContent = error.message; $("model").className = "down"; last = null; }
  setTimeout(state, document.hidden ? 5 * POLL_MS : POLL_MS);
}

function rate(now, seconds) {
  const tokens = Math.max(0, now.generation_tokens - last.generation_tokens), steps = Math.max(0, now.steps - last.steps);
  $("rate").textContent = (tokens / seconds).toFixed(0);
  if (steps && last.running && now.running) $("steps").textContent = (1000 * seconds / steps).toFixed(1) + " ms";
  if (steps) $("width").textContent = (tokens / steps).toFixed(1);
  rates.push(tokens / seconds);
  if (rates.length > READINGS) rates.shift();
  plot();
}

/** Acceptance since the start. A row need not have a draft at each position, so a position's share is of all rows. */
function drafts(now) {
  const of = (count, all) => (100 * count / all).toFixed(0), places = now.accepted_by_position;
  const all = of(places.reduce((sum, count) => sum + count, 0), now.draft_tokens);
  $("drafts").hidden = false;
  $("accepted").textContent = `${all} % (${places.map(count => of(count, now.drafts)).join(", ")})`;
}

function plot() {
  const { width, height } = $("plot").viewBox.baseVal, top = Math.max(...rates, 1);
  const x = at => width - (rates.length - 1 - at) * width / (READINGS - 1), y = rate => height - 1 - rate / top * (height - 2);
  const points = rates.map((rate, at) => `${x(at).toFixed(1)},${y(rate).toFixed(1)}`).join(" ");
  $("line").setAttribute("points", points);
  $("area").setAttribute("points", `${x(0).toFixed(1)},${height} ${points} ${width},${height}`);
  $("top").textContent = top.toFixed(0);
}

// -- the log --

function say(place, kind, text = "") {
  const node = document.createElement("div");
  node.className = kind;
  node.textContent = text;
  place.append(node);
  return node;
}

/** Nodes of markdown() as the page's own: text only ever becomes text. */
function element(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const [tag, attributes, ...children] = node, made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.map(element));
  if (tag !== "pre") return made;
  const block = document.createElement("div");
  block.className = "code";
  block.append(made, copyButton(() => made.textContent));
  return block;
}

/** Draws a text that grows: blocks that stay the same are left alone, so that what is selected stays selected. */
function drawing(node) {
  const shown = [];
  return text => {
    const made = markdown(text), keys = made.map(block => JSON.stringify(block));
    const from = keys.findIndex((key, at) => key !== shown[at]), start = from < 0 ? keys.length : from;
    while (node.children.length > start) node.lastElementChild.remove();
    node.append(...made.slice(start).map(element));
    shown.splice(start, shown.length, ...keys.slice(start));
  };
}

function copyButton(text) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    button.textContent = await copied(text()) ? "Copied" : "Not allowed";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const area = document.createElement("textarea"); // plain HTTP from another machine has no clipboard
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

// -- a turn of the chat --

function asked() {
  const system = $("system").value.trim(), body = { stream: true, stream_options: { include_usage: true } };
  for (const input of $("settings").querySelectorAll("input")) if (input.value) body[input.name] = Number(input.value);
  if ($("thinking").value) body.chat_template_kwargs = { enable_thinking: $("thinking").value === "true" };
  return { ...body, messages: [...(system ? [{ role: "system", content: system }] : []), ...messages] };
}

async function* events(body) {
  let rest = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part; !(part = await reader.read()).done;) {
    const lines = (rest + part.value).split("\n\n"); rest = lines.pop();
    for (const line of lines) if (line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

/** One answer in its place on the page: a sign of life at once, then what comes. */
class Answer {
  constructor(place) {
    this.place = place;
    this.began = performance.now();
    this.text = "";
    this.first = 0;
    this.usage = null;
    this.waiting = say(place, "waiting");
    this.clock = setInterval(() => this.wait(), 100);
    this.wait();
    this.drawn = null; // a timer
  }

  wait() {
    this.waiting.textContent = `waiting for the first token: ${((performance.now() - this.began) / 1000).toFixed(1)} s`;
  }

  take(data) {
    if (data.error) throw new Error(data.error.message);
    this.usage = data.usage ?? this.usage;
    const delta = data.choices[0]?.delta ?? {};
    if (!delta.reasoning && !delta.content) return;
    const stay = follows();
    if (!this.first) { this.first = performance.now(); this.waited(); }
    if (delta.reasoning) (this.reasoning ??= say(this.place, "reasoning")).append(delta.reasoning);
    if (delta.content) { this.text += delta.content; this.drawn ??= setTimeout(() => this.draw(), DRAW_MS); }
    if (stay) follow();
  }

  draw() {
    clearTimeout(this.drawn);
    this.drawn = null;
    if (!this.text) return;
    const stay = follows();
    this.content ??= say(this.place, "content");
    (this.drawing ??= drawing(this.content))(this.text);
    if (stay) follow();
  }

  waited() { clearInterval(this.clock); this.waiting.remove(); }

  end(stopped) {
    this.waited();
    this.draw();
    const seconds = (performance.now() - (this.first || this.began)) / 1000, tokens = this.usage?.completion_tokens;
    const first = this.first ? `, the first after ${(this.first - this.began).toFixed(0)} ms` : "";
    const said = this.usage ? `${tokens} tokens, ${(tokens / seconds).toFixed(0)} a second${first}`
      : stopped ? `stopped after ${((performance.now() - this.began) / 1000).toFixed(1)} s` : "";
    const note = say(this.place, "note");
    say(note, "", said);
    if (this.text) note.append(copyButton(() => this.text));
  }
}

const follows = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 60;
const follow = () => { $("log").scrollTop = $("log").scrollHeight; };

function busy(control) {
  running = control;
  $("send").disabled = control !== null;
  $("stop").hidden = control === null;
}

async function chat(text) {
  const mine = messages, control = new AbortController();
  mine.push({ role: "user", content: text });
  const place = say($("log"), "turn"), question = say(place, "user", text), answer = new Answer(place);
  busy(control);
  follow();
  let error = null;
  try {
    const response = await fetch("/v1/chat/completions",
      { method: "POST", headers: headers(), signal: control.signal, body: JSON.stringify(asked()) });
    if (!response.ok) throw await refusal(response);
    for await (const data of events(response.body)) answer.take(data);
  } catch (caught) { error = caught; }
  const stopped = error?.name === "AbortError";
  if (error && !stopped) say(place, "error", error.message);
  answer.end(stopped);
  // An answer that never came is no turn of the chat: the next message would be refused with it.
  if (answer.text) mine.push({ role: "assistant", content: answer.text });
  else {
    mine.pop();
    question.classList.add("lost");
    if (!error) say(place, "note", "The model has said nothing. The chat goes on without this question.");
  }
  if (running !== control) return; // another chat has begun
  follow();
  busy(null);
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (running || !text) return; // Enter stops no answer, and what is written stays
  $("text").value = "";
  chat(text);
});
$("form").addEventListener("invalid", () => { $("settings").open = true; }, true); // it cannot be shown in a closed one
$("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
});
$("stop").addEventListener("click", () => { running?.abort(); $("text").focus(); });
$("new").addEventListener("click", () => {
  messages = [];
  running?.abort();
  busy(null);
  $("log").replaceChildren();
  $("text").focus();
});
state();
