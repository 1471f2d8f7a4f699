// The page: listens to the stream of news, keeps what is known of each run, and draws the moment that is shown.

import { $, bytes, clock, count, joules, loss, make, percent, rate, say, seconds } from "./text.js";
import { Run, shape } from "./runs.js";
import { RingDrawing } from "./ring.js";
import { NodeTable, legend } from "./nodes.js";
import { Charts, RUN_COLOURS } from "./charts.js";
import { Steps } from "./steps.js";
import { Player } from "./player.js";
import { compare } from "./compare.js";
import { Acts } from "./acts.js";

const STATES = { connecting: ["○", "open"], waiting: ["○", "open", "waiting for the first step"], reading: ["◔", "open"], running: ["●", "good"], healing: ["◐", "mixed"], done: ["✓", "good"],
  "stopped early": ["✓", "good"], interrupted: ["■", "mixed"], failed: ["✗", "bad"], "cut off": ["✗", "bad", "cut off: its process is gone"], lost: ["○", "bad", "no connection"] };
const SIGNS = { start: "▸", join: "+", lost: "✗", healed: "✓", moved: "⇄", kept: "▣", tested: "◎", warning: "!", end: "■" };

const runs = [], nothing = new Run();
// A replay that plays shows what nodes do so often, and the moment itself in every picture.
const LOOKS_S = 0.1;
let shown = 0, node = null, mayAct = false, connected = false, ended = false, due = false, looked = "", lookedAt = 0;
const ring = new RingDrawing($("ring-drawing"), choose), table = new NodeTable($("nodes-table"), choose), charts = new Charts($("charts"));
const steps = new Steps(() => shown, () => runs[shown] ?? nothing), player = new Player(() => runs, ask), acts = new Acts(() => shown, () => runs[shown] ?? nothing);

function choose(which) { node = node === which ? null : which; ask(); }
function ask() { if (!due) { due = true; requestAnimationFrame(() => { due = false; draw(); }); } }

function listen() {
  const stream = new EventSource("/stream");
  stream.addEventListener("hello", (event) => {
    const hello = JSON.parse(event.data);
    while (runs.length < hello.runs) runs.push(new Run());
    mayAct = hello.may_act;
    connected = true;
    ask();
  });
  stream.addEventListener("news", (event) => { const news = JSON.parse(event.data); runs[news.run].take(news); ask(); });
  stream.addEventListener("over", () => { ended = true; stream.close(); ask(); });
  stream.onerror = () => { connected = false; ask(); };
}

function draw() {
  const run = runs[shown] ?? nothing;  // the page has its shape before the first word
  const moment = player.moment, view = run.at(moment);
  head(run, view);
  tiles(run, view);
  devices(run, view);
  say($("nodes-caption"), view.members.length ? `Mean of ${run.frame_s > 2 ? seconds(run.frame_s) : "the last two seconds"}${view.live ? "" : " before that moment"}. Memory: what the process has, of what its device had free when the plan was made. Energy: of the whole run.` : "");
  legend($("work-legend"), run.kinds);
  linkLegend(view);
  log(run, view);
  charts.draw(runs.length ? runs : [nothing], moment);
  choices();
  compare($("compare"), $("compare-table"), runs);
  steps.draw(moment);
  acts.draw(mayAct && connected);
  player.draw();
  footer(run);
}

// Drawn only when it is another: with many nodes this is most of the work.
function devices(run, view) {
  const moving = run.status === "running" && view.live || player.playing, now = performance.now() / 1000;
  const look = [shown, run.version, view.live, view.frame, view.members.map((each) => each.node), view.generation, [...view.out], node, moving].join(" ");
  if (look === looked || player.playing && now - lookedAt < LOOKS_S) return;
  [looked, lookedAt] = [look, now];
  ring.draw(view, node, moving);
  say($("ring-caption"), caption(run, view));
  table.draw(run, view, node);
}

function status(name) {
  const [sign, tone, words] = STATES[name] ?? ["○", "open"], box = $("status");
  say(box.querySelector(".sign"), sign);
  say(box.querySelector(".word"), words ?? name);
  box.dataset.tone = tone;
  box.classList.toggle("beats", name === "running" || name === "healing");
}

function head(run, view) {
  const summary = run.summary;
  say($("title"), summary ? `${summary.model} on ${summary.data}` : run.name || "Waiting for the run");
  document.title = `${summary ? `${summary.model}, ` : ""}${run.status} · RingTMP`;
  const several = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
  say($("lead"), summary ? `${summary.strategy}, ${several(view.members.length || summary.nodes, "node")}${view.groups.length ? ` as ${shape(view.groups)}` : ""}, batches of ${summary.batch_size} in ${several(summary.microbatches, "microbatch").replace("microbatchs", "microbatches")}, ${summary.schedule}${summary.emulated ? ", emulated devices" : ""}` : "The page fills as soon as there is something to see.");
  status(run === nothing ? "connecting" : !connected && !ended && !run.ended ? "lost" : run.status);
  const notes = [];
  if (run.status === "reading") notes.push(`Reading the events: ${percent(run.read)}.`);
  if (run.damaged) notes.push(`${run.damaged === 1 ? "One damaged line" : `${run.damaged} damaged lines`} of events.jsonl ${run.damaged === 1 ? "was" : "were"} passed over.`);
  if (run.unknown) notes.push(`${run.unknown} events are of a kind that only a later version knows.`);
  if (run.other_version) notes.push(`The run was written by ringtmp ${run.other_version}.`);
  if (ended) notes.push("The server has ended with the run. ringtmp watch shows it again.");
  $("notice").hidden = !notes.length;
  say($("notice"), notes.join(" "));
}

function tiles(run, view) {
  const summary = run.summary, plan = summary?.forecast, total = run.total_steps, test = view.test, forecast = plan?.step_s ? summary.batch_size / plan.step_s : null;
  const score = test?.[4] != null ? ["Bits per byte", test[4].toFixed(3)] : test?.[3] != null ? ["Test accuracy", percent(test[3], 1)] : ["Test loss", test ? loss(test[2]) : "–"];
  const now = view.live && run.ended && summary?.samples_per_s ? summary.samples_per_s : view.speed;
  const sources = [...new Set((summary?.per_node ?? []).map((each) => each.energy_source).filter(Boolean))].join(", ");
  const known = (summary?.per_node ?? []).map((each) => each.energy_j), energy = known.length && known.every((each) => each != null) ? known.reduce((a, b) => a + b, 0) : null;
  let flow = 0;
  for (const each of view.nodes.values()) flow += each.total ? each.sent / each.total : 0;
  const wanted = [
    ["Step", count(view.step), run.now && view.live && run.epochs ? `epoch ${run.now.epoch} of ${run.epochs}` : total ? `of ${count(total)}` : ""],
    ["Loss", view.loss == null ? "–" : loss(view.loss), summary?.loss.first != null ? `first ${loss(summary.loss.first)}` : ""],
    [...score, test ? `after step ${count(test[0])}` : "no test yet"],
    ["Samples / s", now ? count(now) : "–", forecast ? `forecast ${count(forecast)}` : "no forecast"],
    ["Idle", view.idle == null ? "–" : percent(view.idle), plan ? `forecast ${percent(plan.idle_fraction)}` : "of nodes' time"],
    ["Sent", bytes(view.sent), run.status === "running" && view.live ? `${rate(flow)} now` : !view.live ? `${rate(flow)} then` : "by all nodes"],
    ["Energy", energy == null ? "–" : joules(energy), energy == null ? "not known" : sources],
    ["Time", clock(view.live && run.ended && summary ? summary.wall_s : view.moment), run.now?.unprotected && view.live && !run.ended ? "no snapshot yet" : view.generation > 1 ? `generation ${view.generation}` : "since the start"],
  ];
  const box = $("tiles");
  while (box.children.length < wanted.length) box.append(make("div", {}, make("dt"), make("dd"), make("dd", { class: "more" })));
  wanted.forEach((texts, i) => texts.forEach((text, k) => say(box.children[i].children[k], text)));
}

function caption(run, view) {
  if (node !== null) {
    const member = view.members.find((each) => each.node === node), mine = view.nodes.get(node);
    if (member) return `${member.name}: ${member.segments.join(", ") || member.role}, ${count(member.parameters)} parameters${mine?.total ? `; sends ${rate(mine.sent / mine.total)}${to(view, node)}, receives ${rate(mine.received / mine.total)}` : ""}.`;
  }
  return view.members.length ? `Ring around each node: its busy share, by kind of work. Dots: tensors on their way${view.links.size ? ", the faster the more bytes a second" : ""}.` : "";
}

// What goes to each, where that is told: " (1.2 MiB/s to node 2, 3.4 MiB/s to node 3)".
function to(view, node) {
  const found = view.members.map((each) => [view.links.get(`${node}>${each.node}`), each.name]).filter(([value]) => value).map(([value, name]) => `${rate(value)} to ${name}`);
  return found.length > 1 && found.length <= 6 ? ` (${found.join(", ")})` : "";
}

function linkLegend(view) {
  const ringlike = !view.members.some((each) => each.role === "server") && view.members.some((each) => each.segments.some((name) => /^#\d/.test(name)));
  const texts = ringlike ? ["activations, clockwise", "gradients, back", ...(view.groups.length ? ["gradients added up in a group"] : [])] : ["one way", "the other way"], list = $("link-legend");
  if (list.dataset.key === texts.join()) return;
  list.dataset.key = texts.join();
  list.replaceChildren(...texts.map((text, i) => { const swatch = make("i"); swatch.style.setProperty("--c", `var(--c${i})`); return make("li", {}, swatch, text); }));
}

// The newest first.
function log(run, view) {
  const list = $("log"), entries = view.live ? run.log : run.log.filter((each) => each[0] <= view.moment + 1e-9), key = `${shown}:${entries.length}:${entries.at(-1)?.[0]}:${run.left_out}`;
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...[...entries].reverse().map(([at, kind, text, step]) => make("li", { class: kind },
    make("span", { class: "sign", "aria-hidden": "true" }, SIGNS[kind] ?? "·"), make("span", {}, text), make("span", { class: "when" }, `${clock(at)}${step != null ? ` · step ${step}` : ""}`))));
  if (run.left_out) list.append(make("li", {}, make("span"), make("span", {}, `${run.left_out} entries between are left out.`)));
  if (!entries.length) list.append(make("li", {}, make("span"), make("span", {}, "Nothing yet.")));
}

function choices() {
  const box = $("runs");
  box.hidden = runs.length < 2;
  const key = runs.map((each) => each.name).join() + shown;
  if (box.hidden || box.dataset.key === key) return;
  box.dataset.key = key;
  const had = box.contains(document.activeElement);
  box.replaceChildren(...runs.map((each, i) => {
    const swatch = make("i"), button = make("button", { type: "button", "aria-pressed": String(i === shown) }, swatch, each.name || `run ${i + 1}`);
    swatch.style.setProperty("--c", `var(--${RUN_COLOURS[i]})`);
    button.addEventListener("click", () => { shown = i; node = null; steps.forget(); ask(); });
    return button;
  }));
  if (had) box.children[shown].focus();
}

function footer(run) {
  const s = run.summary, parts = [`Run ${run.name}`];
  if (run.began) parts.push(`began ${run.began.replace("T", " ").replace("+00:00", " UTC")}`);
  if (s?.weights_sha256) parts.push(`weights ${s.weights_sha256.slice(0, 16)}…`);
  if (s) parts.push(`promise: ${s.exactness}`, `wire ${s.wire}`);
  say($("foot"), parts.join(" · "));
}

$("axis").addEventListener("click", (event) => {
  const axis = event.target.dataset?.axis;
  if (!axis) return;
  for (const each of $("axis").children) each.setAttribute("aria-pressed", String(each.dataset.axis === axis));
  charts.set(axis);
});
listen();
ask();
window.ringtmp = { state: () => ({ status: runs[shown]?.status, step: runs[shown]?.now?.step, summary: runs[shown]?.summary, read: runs[shown]?.read, points: runs[shown]?.points.length }) };
