// Shows a deployment, and streams an answer to a prompt. Texts of engines and users only ever become text.

const LOOK_MS = 1000;
const KEPT_LOOKS = 60; // of which rates and lines are made

const STREAMS = {
  chat: {
    path: "v1/chat/completions",
    body: (prompt) => ({ messages: [{ role: "user", content: prompt }] }),
    text: (choice) => choice.delta?.content ?? "",
  },
  completion: {
    path: "v1/completions",
    body: (prompt) => ({ prompt }),
    text: (choice) => choice.text ?? "",
  },
};

const looks = []; // {at: seconds, tokens, routed, hits, queried, running}, the oldest first
let key = ""; // nowhere else
let wake = () => {};

const $ = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const percent = (part, all) => (all > 0 ? `${((100 * Math.max(0, part)) / all).toFixed(0)} %` : "–");
const sum = (items, value) => items.reduce((total, item) => total + (value(item) ?? 0), 0);

/** An element with a class and children: strings become text nodes. */
function make(tag, style, ...children) {
  const element = document.createElement(tag);
  if (style) element.className = style;
  element.append(...children);
  return element;
}

const headers = (more) => (key ? { authorization: `Bearer ${key}`, ...more } : more);

async function problemOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// ---- looking ----

async function look() {
  const response = await fetch("deployment", { headers: headers({}), cache: "no-store", signal: AbortSignal.timeout(10000) });
  $("ask-key").hidden = response.status !== 401;
  if (response.status === 401) return tell(key ? "this key is not known" : "give an API key", "warn");
  if (!response.ok) return tell(await problemOf(response), "bad");
  const found = await response.json();
  $("main").hidden = false;
  note(found);
  show(found);
  tell("live", "good");
}

async function watch() {
  for (;;) {
    try {
      if (!document.hidden) await look();
    } catch {
      tell("no answer", "bad");
    }
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, LOOK_MS);
    });
  }
}

function tell(text, style) {
  $("status").textContent = text;
  $("status").className = `pill ${style}`;
}

function note({ engines, routing }) {
  looks.push({
    at: performance.now() / 1000,
    tokens: sum(engines, (engine) => engine.tokens),
    routed: routing.routed,
    hits: sum(engines, (engine) => sum(Object.values(engine.hit_tokens ?? {}), (tokens) => tokens)),
    queried: sum(engines, (engine) => engine.queried_tokens),
    running: sum(engines, (engine) => engine.running),
    byEngine: new Map(engines.map((engine) => [engine.name, engine.tokens ?? 0])),
  });
  if (looks.length > KEPT_LOOKS) looks.shift();
}

/** Per second over the last few looks; a counter that began anew counts from there. */
function rate(value, last = looks.length - 1) {
  const from = looks[Math.max(0, last - 3)];
  const to = looks[last];
  const seconds = to.at - from.at;
  return seconds > 0 ? Math.max(0, value(to) - value(from)) / seconds : 0;
}

const rates = (value) => looks.map((_, place) => rate(value, place));

// ---- showing ----

function show(found) {
  const { engines, routing, index, wanted } = found;
  $("model").textContent = found.model;
  document.title = `headwise: ${found.model}`;
  const [first, last] = [looks[0], looks[looks.length - 1]];
  $("tiles").replaceChildren(
    tile(short.format(rate((each) => each.tokens)), "tokens per second", rates((each) => each.tokens)),
    tile(whole.format(last.running), "requests running", looks.map((each) => each.running)),
    tile(whole.format(sum(engines, (engine) => engine.waiting) + routing.queued), "requests waiting"),
    tile(percent(last.hits - first.hits, last.queried - first.queried), "hit rate, last minute"),
    tile(percent(last.hits, last.queried), "hit rate, all"),
    tile(whole.format(routing.routed), "requests routed", rates((each) => each.routed)),
  );
  $("wanted").textContent = `${engines.length} report; wanted ${wanted}`;
  $("engines").tBodies[0].replaceChildren(...engines.map(engineRow));
  $("hits").replaceChildren(...hitRows(engines));
  $("policy").textContent = routing.policy;
  $("routes").replaceChildren(...routeRows(routing));
  $("groups").replaceChildren(...found.groups.flatMap(([name, text]) => [make("dt", "", name), make("dd", "", text)]));
  $("index-blocks").textContent = index.is_silent ? "does not answer" : `${whole.format(index.blocks)} distinct blocks`;
  $("index").tBodies[0].replaceChildren(...index.nodes.map(indexRow));
  $("faults").replaceChildren(...(found.faults.length ? found.faults.toReversed().map(faultRow) : [make("li", "note", "none")]));
}

function tile(number, text, line) {
  const shown = make("div", "tile", make("b", "", number), make("span", "note", text));
  if (line && line.length > 1) shown.append(sparkline(line));
  return shown;
}

function sparkline(values) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const drawn = document.createElementNS(space, "polyline");
  const most = Math.max(...values, 1e-9);
  const points = values.map((value, place) => `${(100 * place) / (values.length - 1)},${27 - (26 * value) / most}`);
  svg.setAttribute("viewBox", "0 0 100 28");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  drawn.setAttribute("points", points.join(" "));
  svg.append(drawn);
  return svg;
}

/** Stacked shares of a whole, by their CSS class. */
function bar(shares, all) {
  const shown = make("div", "bar");
  for (const [style, share] of shares) {
    const part = make("i", style);
    part.style.width = `${all ? (100 * share) / all : 0}%`;
    shown.append(part);
  }
  return shown;
}

function pool(blocks) {
  if (!blocks) return make("td", "bars note", "–");
  const { held, cached, free } = blocks;
  const all = held + cached + free;
  const text = `${short.format(held)} + ${short.format(cached)} of ${short.format(all)}`;
  return make("td", "bars", bar([["held", held], ["cached", cached]], all), make("span", "note", text));
}

function engineRow(engine) {
  const state = make("td", "", make("span", `pill ${engine.state === "awake" ? "good" : "warn"}`, engine.state));
  if (!engine.pools) return make("tr", "", make("td", "", engine.name), state);
  const perSecond = rate((each) => each.byEngine.get(engine.name) ?? 0);
  const hits = sum(Object.values(engine.hit_tokens), (tokens) => tokens);
  const number = (value) => make("td", "", value === null ? "–" : short.format(value));
  return make(
    "tr", "", make("td", "", engine.name), state, number(engine.running), number(engine.waiting),
    make("td", "", perSecond.toFixed(perSecond < 10 ? 1 : 0)), pool(engine.pools.device), pool(engine.pools.host),
    number(engine.stored_blocks), make("td", "", percent(hits, engine.queried_tokens)),
    number(engine.evicted_blocks), number(engine.recycled_blocks), number(engine.restarts),
  );
}

function share(name, part, all) {
  const text = `${short.format(part)} · ${percent(part, all)}`;
  return make("div", "share", make("span", "", name), bar([["held", part]], all), make("span", "note", text));
}

function hitRows(engines) {
  const queried = sum(engines, (engine) => engine.queried_tokens);
  return ["device", "host", "storage"].map((tier) => share(tier, sum(engines, (engine) => engine.hit_tokens?.[tier]), queried));
}

function routeRows({ decisions, rerouted, refused }) {
  const reasons = Object.entries(decisions).sort((one, other) => other[1] - one[1]);
  const all = sum(reasons, ([, count]) => count);
  const rows = reasons.map(([reason, count]) => share(reason.replaceAll("_", " "), count, all));
  const others = `${whole.format(rerouted)} routed again, ${whole.format(refused)} refused`;
  return [...rows, make("div", "note", reasons.length ? others : "no request yet")];
}

function indexRow({ name, blocks, agrees }) {
  const counts = ["device", "host", "storage"].map((tier) => make("td", "", short.format(blocks[tier])));
  return make("tr", "", make("td", "", name), ...counts, make("td", agrees ? "good" : "warn", agrees ? "yes" : "not yet"));
}

function faultRow({ at, text }) {
  return make("li", "", make("time", "", new Date(1000 * at).toLocaleTimeString()), text);
}

// ---- trying ----

let running = null; // the AbortController of the answer that is being streamed

async function send() {
  const stream = STREAMS[document.querySelector("input[name=kind]:checked").value];
  const body = {
    ...stream.body($("prompt").value),
    max_tokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  const began = performance.now();
  const response = await fetch(stream.path, {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify(body),
    signal: running.signal,
  });
  if (!response.ok) throw new Error(await problemOf(response));
  const times = { began, first: 0, last: 0 };
  let usage = null;
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    usage = event.usage ?? usage;
    const text = event.choices?.length ? stream.text(event.choices[0]) : "";
    if (!text) continue;
    times.last = performance.now();
    times.first ||= times.last;
    $("answer").append(text);
    $("answer").scrollTop = $("answer").scrollHeight;
  }
  $("timing").textContent = inWords(times, usage);
}

/** The events of a stream, until its last one. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the answer broke off");
    const parts = (left + value).split("\n\n");
    left = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function inWords({ began, first, last }, usage) {
  const words = first ? [`first token after ${((first - began) / 1000).toFixed(2)} s`] : ["no text"];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    words.push(`${usage.prompt_tokens} prompt tokens, ${cached} of them cached`, `${usage.completion_tokens} generated`);
    if (last > first) words.push(`${((1000 * (usage.completion_tokens - 1)) / (last - first)).toFixed(1)} tokens/s`);
  }
  return words.join(" · ");
}

async function attempt() {
  running?.abort();
  const mine = (running = new AbortController());
  $("answer").hidden = false;
  $("answer").replaceChildren();
  $("timing").textContent = "";
  $("send").disabled = true;
  $("stop").hidden = false;
  try {
    await send();
  } catch (problem) {
    if (mine === running) $("timing").textContent = problem.name === "AbortError" ? "stopped" : problem.message;
  }
  $("send").disabled = false;
  $("stop").hidden = true;
}

$("ask-key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  wake();
});
$("try").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt();
});
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("visibilitychange", () => wake());
watch();
