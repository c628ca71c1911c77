// The page: one stream of snapshots in, DOM out. Data gets into the document as text only.

const PARTS = {
  routing: "text to token ids, and the choice of a pair",
  admission: "the decode group grants",
  retry: "on groups that were lost",
  queue: "waiting for pages and turns in the prefill group",
  exposed_transfer: "prefill waits for KV to move",
  compute: "the last stage computes the prompt",
  bubble: "the last stage has nothing to compute",
  relay: "between router, leader and client",
};
// What the router does for a request after each lifecycle event.
const PHASES = {
  received: "tokenising", tokenized: "pairing", paired: "admission", admitted: "prefill", resumed: "prefill",
  redirected: "prefill", first_token_sent: "decode", committed: "decode",
};
const ENDS = ["finished", "cancelled", "failed"];
const STATES = { serving: "● serving", draining: "◐ draining", not_serving: "▲ not serving", unreachable: "✕ unreachable" };
// Without news for so long, the connection is taken for lost.
const SILENCE_MS = 5000;
const RETRY_MS = 2000;
// A request's KV may be on its way for a moment after its end.
const SETTLED_SECONDS = 3;
const RATE_SECONDS = 10;
const NARROW = 640;

const view = { snapshot: null, detail: null, problem: "", chosen: null, asking: false, heard: 0, rates: [] };
const at = (id) => document.getElementById(id);

// --- Words and numbers -----------------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

function seconds(value) {
  if (value < 0.0005) return "0 ms";
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${(value * 1e3).toFixed(0)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.floor(value % 60)).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

function ago(value) {
  return value < 60 ? `${Math.floor(value)} s` : value < 3600 ? `${Math.floor(value / 60)} min` : `${Math.floor(value / 3600)} h`;
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log10(Math.max(1, value)) / 3));
  return `${(value / 1000 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const words = (name) => name.replaceAll("_", " ");
// After the first token it is decode, whatever else happens.
const phaseOf = (request) => (request.ttft ? "decode" : PHASES[request.event]);
const hasEnded = (request) => ENDS.includes(request.event);

function quantile(values, share) {
  const sorted = values.toSorted((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

// --- The document ----------------------------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Gives `parent` one child for each item, in order; a child that stays is updated, so that focus and scrolling stay too.
function keep(parent, items, key, make, update) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const now = items.map((item) => {
    const child = before.get(String(key(item))) ?? make(item);
    child.dataset.key = key(item);
    update(child, item);
    return child;
  });
  if (now.length !== parent.children.length || now.some((child, i) => parent.children[i] !== child)) {
    parent.replaceChildren(...now);
  }
}

function pairs(list, entries) {
  keep(list, entries, ([name]) => name,
    ([name]) => element("div", {}, element("dt", {}, name), element("dd")),
    (child, [, value, small]) => {
      const node = child.lastElementChild;
      const text = small ? `${value} ${small}` : value;
      if (node.textContent === text) return;
      node.replaceChildren(value, ...(small ? [element("small", {}, small)] : []));
    });
}

function bar(node, shares) {
  while (node.children.length < shares.length) node.append(element("i"));
  shares.forEach((share, i) => { node.children[i].style.width = `${100 * Math.min(1, share || 0)}%`; });
}

function shown(id, visible) {
  at(id).hidden = !visible;
}

// --- Key figures -----------------------------------------------------------------------------------------------------

// Tokens that went through the last stage since the snapshot before, a second.
function noteRate(snapshot) {
  const done = new Map(snapshot.requests.map((request) => [request.number, request.num_tokens_done]));
  const last = view.rates.at(-1);
  const fresh = last ? [...done].reduce((sum, [number, n]) => sum + Math.max(0, n - (last.done.get(number) ?? 0)), 0) : 0;
  view.rates.push({ time: performance.now() / 1e3, done, fresh });
  while (view.rates[0].time < view.rates.at(-1).time - RATE_SECONDS) view.rates.shift();
}

function tokenRate() {
  const [first, ...rest] = view.rates;
  if (!rest.length) return 0;
  return rest.reduce((sum, rate) => sum + rate.fresh, 0) / (rest.at(-1).time - first.time);
}

function showFigures(snapshot) {
  const totals = withTtft(snapshot).map((request) => request.ttft.total);
  const groups = snapshot.groups;
  const serving = groups.filter((group) => group.state === "serving").length;
  const queued = groups.reduce((sum, group) => sum + group.queued_requests, 0);
  pairs(at("figures"), [
    ["groups serving", String(serving), `of ${groups.length}`],
    ["running requests", String(snapshot.num_running), queued ? `${queued} wait for pages` : ""],
    ["prefill, last 10 s", whole.format(tokenRate()), "tokens/s"],
    ["TTFT, median", totals.length ? seconds(quantile(totals, 0.5)) : "–", ""],
    ["TTFT, 90 % below", totals.length ? seconds(quantile(totals, 0.9)) : "–", ""],
  ]);
}

// --- Groups ----------------------------------------------------------------------------------------------------------

function makeGroup() {
  return element("article", { class: "group" },
    element("h3", {}, element("span", { class: "name" }), element("span", { class: "note" }), element("span", { class: "state" })),
    element("p", { class: "why" }), element("div", { class: "stages" }), element("div", { class: "gauges" }),
    element("dl", { class: "rows" }));
}

function updateGroup(card, group) {
  const find = (name) => card.querySelector(`.${name}`);
  write(find("name"), group.name);
  write(find("note"), [group.role, group.layout].filter(Boolean).join(" · "));
  find("state").className = `state ${group.state}`;
  write(find("state"), STATES[group.state] ?? group.state);
  write(find("why"), group.detail);
  find("why").hidden = !group.detail;
  find("stages").hidden = !group.stages.length;
  keep(find("stages"), group.stages.map((stage, i) => ({ ...stage, i })), (stage) => stage.i,
    () => element("span", { class: "stage" }), updateStage);
  keep(find("gauges"), gauges(group), (cell) => cell.key, (cell) => element("span", { class: cell.shares ? "bar" : "" }),
    (node, cell) => (cell.shares ? bar(node, cell.shares) : write(node, cell.text)));
  keep(find("rows"), facts(group).flatMap(([name, value]) => [{ tag: "dt", name, text: name }, { tag: "dd", name, text: value }]),
    (row) => row.tag + row.name, (row) => element(row.tag), (node, row) => write(node, row.text));
}

function updateStage(node, stage) {
  write(node, `layers ${stage.first_layer}–${stage.end_layer - 1}`);
  const ranks = stage.ranks.length > 1 ? `ranks ${stage.ranks[0]}–${stage.ranks.at(-1)}` : `rank ${stage.ranks[0]}`;
  const cost = stage.chunk_seconds === null ? "" : `, a full first chunk takes ${seconds(stage.chunk_seconds)}`;
  node.title = `stage ${stage.i}: ${ranks}${cost}`;
}

function gauges(group) {
  if (!group.capacity_tokens) return [];
  const tokens = `${whole.format(group.used_tokens)} / ${whole.format(group.capacity_tokens)}`;
  const cells = gauge("KV tokens", [group.used_tokens / group.capacity_tokens], tokens);
  const slots = group.slots_free + group.slots_held + group.slots_quarantined;
  if (!slots) return cells;
  const shares = [group.slots_held / slots, group.slots_quarantined / slots];
  return [...cells, ...gauge("landing slots", shares, `${group.slots_held} / ${slots}`)];
}

function gauge(name, shares, text) {
  return [{ key: name, text: name }, { key: `${name} bar`, shares }, { key: `${name} value`, text }];
}

function facts(group) {
  const rows = [["requests", `${group.running_requests} running${group.role === "prefill" ? `, ${group.queued_requests} queued` : ""}`]];
  if (group.role === "prefill" && group.page_tokens) {
    const [held, all] = [group.used_tokens, group.capacity_tokens].map((tokens) => whole.format(Math.ceil(tokens / group.page_tokens)));
    rows.push(["pages", `${held} of ${all} held`]);
  }
  if (group.slots_quarantined) rows.push(["quarantined", `${group.slots_quarantined} slots`]);
  if (group.chunk_tokens) rows.push(["chunks", `${group.chunk_policy} ${whole.format(group.chunk_tokens)}`.trim()]);
  if (group.backlog_tokens) {
    const time = group.backlog_seconds ? `, ≈ ${seconds(group.backlog_seconds)}` : "";
    rows.push(["backlog", `${whole.format(group.backlog_tokens)} tokens${time}`]);
  }
  if (group.prefix_cache) rows.push(["prefix cache", prefixCache(group.prefix_cache)]);
  if (group.transport) rows.push(["transport", group.transport]);
  rows.push(["breaker", words(group.breaker)]);
  rows.push(["epoch", group.epoch ? group.epoch.slice(0, 12) : "–"]);
  rows.push(["address", group.address]);
  return rows;
}

function prefixCache(cache) {
  const hits = cache.query_tokens ? `, ${percent(cache.hit_tokens / cache.query_tokens)} hits` : "";
  return `${whole.format(cache.cached_tokens)} tokens${hits}`;
}

// --- Requests --------------------------------------------------------------------------------------------------------

function makeRequest(request) {
  const row = element("tr", {},
    element("td", {}, element("button", { type: "button", class: "id" })), element("td", {}, element("span")),
    element("td", { class: "number", "data-label": "prompt" }), element("td", {}, element("div", { class: "bar" })),
    element("td", { class: "number", "data-label": "TTFT" }), element("td", { class: "number", "data-label": "out" }),
    element("td", { class: "pair muted" }), element("td", { class: "age number muted" }));
  row.addEventListener("click", () => choose(request.id));
  return row;
}

function updateRequest(row, request) {
  const [id, state, prompt, progress, ttft, out, pair, age] = [...row.cells];
  const button = id.firstElementChild;
  write(button, request.id);
  button.title = request.id;
  const chosen = request.id === shownId();
  row.className = chosen ? "chosen" : "";
  button.setAttribute("aria-pressed", chosen);
  const phase = !hasEnded(request) ? phaseOf(request) : request.event === "finished" ? "finished" : request.outcome;
  const style = hasEnded(request) ? request.event : ["prefill", "decode"].includes(phase) ? "works" : "";
  state.firstElementChild.className = `phase ${style}`;
  write(state.firstElementChild, phase);
  state.title = request.detail;
  write(prompt, request.num_prompt_tokens ? whole.format(request.num_prompt_tokens) : "–");
  bar(progress.firstElementChild, [request.num_tokens_done / request.num_prompt_tokens]);
  progress.title = `${whole.format(request.num_tokens_done)} of ${whole.format(request.num_prompt_tokens)} tokens`;
  write(ttft, request.ttft ? seconds(request.ttft.total) : "–");
  write(out, whole.format(request.num_generated_tokens));
  write(pair, [request.prefill, request.decode].filter(Boolean).join(" → ") + (request.num_legs > 1 ? ` (${request.num_legs} tries)` : ""));
  write(age, ago(request.age_seconds));
}

function showRequests(snapshot) {
  const some = snapshot.requests.length > 0;
  shown("requests-table", some);
  shown("requests-empty", !some);
  const ended = snapshot.requests.filter(hasEnded).length;
  write(at("requests-note"), some ? `${snapshot.num_running} under way, ${ended} ended lately` : "");
  keep(at("requests"), snapshot.requests, (request) => request.number, makeRequest, updateRequest);
}

// --- TTFT ------------------------------------------------------------------------------------------------------------

// The newest first, by their coming.
function withTtft(snapshot) {
  return snapshot.requests.filter((request) => request.ttft).toSorted((a, b) => b.number - a.number);
}

function showTtft(snapshot) {
  const requests = withTtft(snapshot);
  shown("ttft", requests.length > 0);
  shown("ttft-empty", requests.length === 0);
  write(at("ttft-note"), requests.length ? `last ${requests.length === 1 ? "request" : `${requests.length} requests`}` : "");
  if (!requests.length) return;
  drawTtft(at("ttft-chart"), requests);
  const mean = Object.fromEntries(["total", ...Object.keys(PARTS)].map((part) =>
    [part, requests.reduce((sum, request) => sum + request.ttft[part], 0) / requests.length]));
  drawShare(at("ttft-share"), mean);
  keep(at("ttft-parts"), Object.keys(PARTS), (part) => part, makePart, (row, part) => {
    write(row.cells[1], seconds(mean[part]));
    write(row.cells[2], percent(mean[part] / mean.total));
  });
}

function makePart(part) {
  return element("tr", { title: PARTS[part] },
    element("td", {}, element("span", { class: `swatch ${part}` }), words(part)),
    element("td", { class: "number" }), element("td", { class: "number" }));
}

function drawShare(svg, mean) {
  const width = svg.clientWidth;
  // What is left of other clocks' durations may be a little less than nothing.
  const sum = Object.keys(PARTS).reduce((all, part) => all + Math.max(0, mean[part]), 0);
  let x = 0;
  const nodes = Object.keys(PARTS).map((part) => {
    const share = Math.max(0, mean[part]) / sum;
    const node = block(x, 0, width * share, 14, `edge ${part}`, `${words(part)}: ${percent(share)}`);
    x += width * share;
    return node;
  });
  svg.setAttribute("aria-label", Object.keys(PARTS).map((part) => `${words(part)} ${percent(mean[part] / mean.total)}`).join(", "));
  svg.replaceChildren(...nodes);
}

function drawTtft(svg, newestFirst) {
  const requests = newestFirst.toReversed();
  const [left, top, height] = [44, 8, 124];
  const plot = svg.clientWidth - left;
  const most = Math.max(...requests.map((request) => request.ttft.total), 1e-3);
  const ticks = ticksUpTo(most, 4);
  const scale = height / Math.max(most, ticks.at(-1));
  const pitch = Math.min(28, plot / requests.length);
  const nodes = ticks.flatMap((tick) => {
    const y = top + height - tick * scale;
    return [drawn("line", { class: "grid", x1: left, x2: left + plot, y1: y, y2: y }),
      drawn("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, tickText(tick))];
  });
  nodes.push(...requests.map((request, i) => stack(request, left + plot - (requests.length - i) * pitch, top + height, pitch, scale)));
  nodes.push(drawn("text", { x: left + plot, y: top + height + 14, "text-anchor": "end" }, "newest"));
  const totals = requests.map((request) => request.ttft.total);
  svg.setAttribute("aria-label", `time to first token of ${requests.length} requests: median ${seconds(quantile(totals, 0.5))}`);
  svg.replaceChildren(...nodes);
}

function stack(request, x, bottom, pitch, scale) {
  let y = bottom;
  const parts = Object.keys(PARTS).filter((part) => request.ttft[part] > 0);
  const lines = [request.id, `TTFT ${seconds(request.ttft.total)}`, ...parts.map((part) => `${words(part)} ${seconds(request.ttft[part])}`)];
  const blocks = parts.map((part) => {
    const height = request.ttft[part] * scale;
    y -= height;
    return block(x + pitch * 0.12, y, pitch * 0.76, height, height > 2 ? `edge ${part}` : part);
  });
  const group = drawn("g", { class: request.id === shownId() ? "pick chosen" : "pick" }, drawn("title", {}, lines.join("\n")), ...blocks);
  group.addEventListener("click", () => choose(request.id));
  return group;
}

function block(x, y, width, height, style, title) {
  const sizes = { x: x.toFixed(2), y: y.toFixed(2), width: Math.max(0, width).toFixed(2), height: Math.max(0, height).toFixed(2) };
  return drawn("rect", { class: style, ...sizes }, ...(title ? [drawn("title", {}, title)] : []));
}

function tickText(tick) {
  const [number, ...units] = seconds(tick).split(" ");
  return tick ? [Number(number), ...units].join(" ") : "0";
}

// Round numbers from 0 to at least `most`, about `count` of them.
function ticksUpTo(most, count) {
  const rough = most / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough) * power;
  return Array.from({ length: Math.ceil(most / step - 1e-9) + 1 }, (_, i) => i * step);
}

// --- One request -----------------------------------------------------------------------------------------------------

const shownId = () => view.chosen ?? view.snapshot?.requests[0]?.id ?? null;

function choose(id) {
  view.chosen = id;
  history.replaceState(null, "", id === null ? location.pathname : `#${encodeURIComponent(id)}`);
  show();
  ask();
}

// Whether the detail that is shown may have changed.
function isOutdated(id) {
  const known = view.detail?.request;
  const news = view.snapshot.requests.find((request) => request.id === id);
  if (known?.id !== id || view.problem) return true;
  if (!news) return false;
  return news.number !== known.number || !hasEnded(known) || news.age_seconds - news.seconds < SETTLED_SECONDS;
}

// One question at a time; a big answer is asked for less often.
async function ask() {
  const id = shownId();
  if (view.asking || id === null || !isOutdated(id)) return;
  view.asking = true;
  const begun = performance.now();
  try {
    const response = await fetch(`api/requests/${encodeURIComponent(id)}`);
    view.problem = response.ok ? "" : response.status === 404 ? "The router does not remember this request any more." : await response.text();
    view.detail = response.ok ? await response.json() : null;
  } catch {
    view.problem = "The router does not answer.";
  }
  if (id === shownId()) showDetail();
  setTimeout(() => { view.asking = false; if (id !== shownId()) ask(); }, 3 * (performance.now() - begun));
}

function showDetail() {
  const id = shownId();
  const detail = view.detail?.request.id === id ? view.detail : null;
  shown("follow", view.chosen !== null);
  shown("detail", detail !== null);
  shown("detail-empty", detail === null);
  write(at("detail-note"), id ?? "");
  if (view.problem) write(at("detail-empty"), view.problem);
  if (detail === null) return;
  showFacts(detail.request);
  write(at("why"), detail.request.detail);
  shown("why", detail.request.detail !== "");
  showParts(detail.request.ttft);
  keep(at("events"), detail.events.map((event, i) => ({ ...event, i })), (event) => event.i,
    () => element("li", {}, element("b"), element("span")), (item, event) => {
      write(item.firstElementChild, words(event.event));
      write(item.lastElementChild, ` ${seconds(event.seconds)} `);
    });
  at("traces").replaceChildren(...detail.traces.map((trace, i) => traceOf(trace, detail, i)));
}

function showFacts(request) {
  const outcome = hasEnded(request) ? request.outcome : phaseOf(request);
  pairs(at("facts"), [
    ["state", outcome],
    ["prompt", `${whole.format(request.num_prompt_tokens)} tokens`],
    ["prefilled", whole.format(request.num_tokens_done)],
    ["TTFT", request.ttft ? seconds(request.ttft.total) : "–"],
    ["answer", `${whole.format(request.num_generated_tokens)} tokens`],
    [hasEnded(request) ? "took" : "for", seconds(request.seconds)],
    ["prefill", request.prefill || "–"],
    ["decode", request.decode || "–"],
  ]);
}

function showParts(ttft) {
  shown("parts", ttft !== null);
  const parts = Object.keys(PARTS).filter((part) => ttft?.[part] >= 0.0005);
  keep(at("parts"), parts, (part) => part, (part) => element("li", { title: PARTS[part] },
    element("span", { class: `swatch ${part}` }), element("span")),
    (item, part) => write(item.lastElementChild, `${words(part)} ${seconds(ttft[part])}`));
}

function traceOf(trace, detail, number) {
  const title = `prefill group ${trace.prefill}${detail.traces.length > 1 ? `, try ${number + 1}` : ""}`;
  const box = element("div", { class: "trace" });
  if (detail.traces.length > 1) box.append(element("h3", {}, title));
  if (trace.error) return filled(box, {}, [element("p", { class: "empty" }, `No timeline: ${trace.error}`)]);
  if (!trace.stages.length) return filled(box, {}, [element("p", { class: "empty" }, "No chunk has been computed yet.")]);
  box.append(gantt(trace, title), numbersOf(trace, hasEnded(detail.request)));
  return box;
}

// Rows for spans that overlap: each span gets the first row that is free. Times of reports are a little off, so a little
// does not count.
function inLanes(spans) {
  const ends = [];
  return spans.toSorted((a, b) => a.start - b.start).map((span) => {
    let lane = ends.findIndex((end) => end <= span.start + 0.1 * (span.end - span.start));
    if (lane < 0) lane = ends.length;
    ends[lane] = span.end;
    return { ...span, lane };
  });
}

function tracksOf(trace) {
  const stages = Array.from({ length: trace.num_stages }, (_, stage) => ({
    name: `stage ${stage}`, height: 24, spans: inLanes(trace.stages.filter((span) => span.stage === stage)),
  }));
  const ranks = [...new Set(trace.transfers.map((span) => span.rank))].sort((a, b) => a - b);
  const transfers = ranks.map((rank) => ({
    name: `KV rank ${rank}`, height: 10, spans: inLanes(trace.transfers.filter((span) => span.rank === rank)),
  }));
  return [...stages, ...transfers];
}

function gantt(trace, title) {
  const width = at("traces").clientWidth || at("detail-panel").clientWidth - 30;
  const left = width < NARROW ? 62 : 76;
  const end = Math.max(...trace.stages.map((span) => span.end), ...trace.transfers.map((span) => span.end));
  const ticks = ticksUpTo(end, width < NARROW ? 4 : 10).filter((tick) => tick <= end * 1.001);
  const scale = (width - left - 8) / end;
  const nodes = [];
  let y = 4;
  for (const track of tracksOf(trace)) {
    const lanes = 1 + Math.max(0, ...track.spans.map((span) => span.lane));
    nodes.push(drawn("text", { class: "row", x: 0, y: y + track.height / 2 + 4 }, track.name));
    for (const span of track.spans) nodes.push(...barOf(span, left, y, track.height, scale));
    y += lanes * (track.height + 2) + 4;
  }
  const grid = ticks.flatMap((tick) => [
    drawn("line", { class: "grid", x1: left + tick * scale, x2: left + tick * scale, y1: 0, y2: y }),
    drawn("text", { x: left + tick * scale, y: y + 13, "text-anchor": "middle" }, tickText(tick)),
  ]);
  return drawn("svg", { role: "img", height: y + 18, "aria-label": `Timeline of ${title}; the table says the same in numbers` }, ...grid, ...nodes);
}

function barOf(span, left, top, height, scale) {
  const isTransfer = span.rank !== undefined;
  const x = left + span.start * scale;
  const width = Math.max(1, (span.end - span.start) * scale);
  const tokens = `${whole.format(span.token_start)}–${whole.format(span.token_end)}`;
  const style = isTransfer ? "transfer" : !span.own ? "others" : `own${isOdd(span) ? " odd" : ""}`;
  const what = isTransfer ? `KV of tokens ${tokens}, ${bytes(span.num_bytes)}` : `tokens ${tokens}${span.own ? "" : " of another request"}`;
  const title = `${what}\n${seconds(span.start)} – ${seconds(span.end)} (${seconds(span.end - span.start)})`;
  const rect = block(x, top + span.lane * (height + 2), width, height, `${width > 4 ? "edge " : ""}${style}`, title);
  if (isTransfer || !span.own || width < 7 * tokens.length) return [rect];
  return [rect, drawn("text", { class: "label", x: x + 5, y: top + span.lane * (height + 2) + height / 2 + 4 }, tokens)];
}

const parity = new Map();
// Chunks are shaded by turns; a chunk has one shade on all stages.
function isOdd(span) {
  const key = `${view.detail.request.number}:${span.token_start}`;
  if (!parity.has(key)) {
    if (parity.size > 20000) parity.clear();
    const starts = view.detail.traces.flatMap((trace) => trace.stages.filter((other) => other.own).map((other) => other.token_start));
    [...new Set(starts)].sort((a, b) => a - b).forEach((start, i) => parity.set(`${view.detail.request.number}:${start}`, i % 2 === 1));
  }
  return parity.get(key);
}

function numbersOf(trace, ended) {
  const rows = Array.from({ length: trace.num_stages }, (_, stage) => stageNumbers(trace, stage));
  const table = element("table", {}, element("caption", { class: "hidden" }, "Stages in numbers"),
    element("thead", {}, element("tr", {}, ...["stage", "chunks", "busy", "bubble"].map((name) => element("th", { scope: "col", class: "number" }, name)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((text) => element("td", { class: "number" }, text))))));
  return element("div", { class: "numbers" }, table, element("div", {}, legend(trace), element("p", {}, transferNumbers(trace, ended))));
}

// From the request's first chunk on stage 0 to its last one here; others' chunks keep a stage busy too.
function stageNumbers(trace, stage) {
  const own = trace.stages.filter((span) => span.own);
  const here = own.filter((span) => span.stage === stage);
  const start = Math.min(...own.filter((span) => span.stage === 0).map((span) => span.start));
  const end = Math.max(...here.map((span) => span.end));
  if (!here.length || !(start < end)) return [String(stage), String(here.length), "–", "–"];
  const busy = covered(trace.stages.filter((span) => span.stage === stage), start, end);
  return [String(stage), String(here.length), seconds(busy), percent(1 - busy / (end - start))];
}

// Seconds of [start, end] in which at least one span lies.
function covered(spans, start, end) {
  let [sum, until] = [0, start];
  for (const span of spans.toSorted((a, b) => a.start - b.start)) {
    const from = Math.max(span.start, until);
    const to = Math.min(span.end, end);
    if (to > from) { sum += to - from; until = to; }
  }
  return sum;
}

function legend(trace) {
  const entries = [["own", "this request's chunks"]];
  if (trace.stages.some((span) => !span.own)) entries.push(["others", "other requests'"]);
  if (trace.transfers.length) entries.push(["transfer", "KV on its way, from begin to acknowledgement"]);
  return element("div", { class: "legend" }, ...entries.map(([name, text]) =>
    element("span", {}, element("span", { class: `swatch ${name}` }), text)));
}

function transferNumbers(trace, ended) {
  if (!trace.transfers.length) return "No KV has moved.";
  const total = trace.transfers.reduce((sum, span) => sum + span.num_bytes, 0);
  const end = Math.max(...trace.transfers.map((span) => span.end));
  const last = trace.stages.filter((span) => span.own && span.stage === trace.num_stages - 1).map((span) => span.end);
  const exposed = ended && last.length ? `; the last box was acknowledged ${seconds(Math.max(0, end - Math.max(...last)))} after the last chunk` : "";
  return `${whole.format(trace.transfers.length)} boxes of KV, ${bytes(total)}${exposed}.`;
}

// --- The stream ------------------------------------------------------------------------------------------------------

function show() {
  const snapshot = view.snapshot;
  if (!snapshot) return;
  write(at("who"), `${snapshot.router.name} · ${snapshot.router.model} · ${snapshot.router.version}`);
  document.title = `${snapshot.num_running ? `(${snapshot.num_running}) ` : ""}Headwater · ${snapshot.router.name}`;
  showFigures(snapshot);
  shown("groups-empty", snapshot.groups.length === 0);
  keep(at("groups"), snapshot.groups, (group) => `${group.role} ${group.name}`, makeGroup, updateGroup);
  showRequests(snapshot);
  showTtft(snapshot);
  showDetail();
}

function setLink(live, text) {
  at("link").className = `link ${live ? "live" : "gone"}`;
  write(at("link"), text);
  document.body.classList.toggle("stale", !live);
  shown("lost", !live);
}

function lose() {
  setLink(false, "no connection");
  const since = view.heard ? ` What is shown is from ${new Date(view.heard).toLocaleTimeString()}.` : "";
  write(at("lost"), `The router does not answer; trying again every ${RETRY_MS / 1000} seconds.${since}`);
}

let source = null;
let silence = 0;

function listen() {
  stop();
  source = new EventSource("api/events");
  source.onmessage = (message) => {
    view.heard = Date.now();
    view.snapshot = JSON.parse(message.data);
    noteRate(view.snapshot);
    setLink(true, "live");
    expect(SILENCE_MS);
    show();
    ask();
  };
  source.onerror = () => { lose(); expect(RETRY_MS); };
  expect(SILENCE_MS);
}

// Connects anew when nothing comes for so long.
function expect(milliseconds) {
  clearTimeout(silence);
  silence = setTimeout(() => { lose(); listen(); }, milliseconds);
}

function stop() {
  clearTimeout(silence);
  source?.close();
  source = null;
}

function fromLocation() {
  view.chosen = location.hash.length > 1 ? decodeURIComponent(location.hash.slice(1)) : null;
  show();
  ask();
}

at("follow").addEventListener("click", () => choose(null));
addEventListener("hashchange", fromLocation);
addEventListener("resize", show);
// Who does not look costs the router nothing.
document.addEventListener("visibilitychange", () => (document.hidden ? stop() : listen()));
if (location.hash.length > 1) view.chosen = decodeURIComponent(location.hash.slice(1));
listen();
