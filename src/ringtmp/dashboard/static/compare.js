// Several runs side by side, in numbers. The best of a row is marked in words too, not by weight of type alone. As in `ringtmp
// compare` a run that did not finish is never the best, and totals are held against each other only after the same work.

import { bytes, count, joules, loss, make, percent, seconds } from "./text.js";

const sum = (values) => (values.length && values.every((v) => v != null) ? values.reduce((a, b) => a + b, 0) : null);
const idle = (s) => { const busy = sum(s.per_node.map((n) => n.busy_s)), waits = sum(s.per_node.map((n) => n.idle_s)); return busy + waits ? waits / (busy + waits) : null; };
const ROWS = [
  ["strategy", (s) => s.strategy], ["nodes", (s) => s.nodes, String], ["steps", (s) => s.steps, count],
  ["time", (s) => s.wall_s, seconds, "low", "total"], ["samples per second", (s) => s.samples_per_s, count, "high"], ["a step (median)", (s) => s.step_s?.median, seconds, "low"],
  ["last loss", (s) => s.loss.last, loss, "low"], ["test accuracy", (s) => s.accuracy, (v) => percent(v, 1), "high"], ["idle", idle, percent, "low"],
  ["bytes sent", (s) => s.bytes_total, bytes, "low", "total"], ["energy", (s) => sum(s.per_node.map((n) => n.energy_j)), joules, "low", "total"], ["losses healed", (s) => s.recoveries.filter((r) => r.lost.length || r.kind === "restarted").length, String], ["outcome", (s) => s.outcome],
];
const finished = (run) => run.summary && ["done", "stopped early"].includes(run.summary.outcome);
const work = (s) => JSON.stringify([s.model, s.data, s.batch_size, s.steps]);

export function compare(section, table, runs) {
  section.hidden = runs.length < 2;
  if (section.hidden) return;
  const key = JSON.stringify(runs.map((run) => [run.name, run.summary?.steps, run.status, run.summary?.wall_s]));
  if (table.dataset.key === key) return;
  table.dataset.key = key;
  table.tHead.replaceChildren(make("tr", {}, make("th", { scope: "col" }, ""), ...runs.map((run) => make("th", { scope: "col" }, run.name))));
  const sameWork = new Set(runs.filter(finished).map((run) => work(run.summary))).size === 1;
  table.tBodies[0].replaceChildren(...ROWS.map(([name, of, show, better, total]) => {
    const values = runs.map((run) => (run.summary ? of(run.summary) : null)), numbers = values.filter((v, i) => typeof v === "number" && finished(runs[i]));
    const best = better && (sameWork || !total) && numbers.length > 1 && new Set(numbers).size > 1 ? (better === "low" ? Math.min : Math.max)(...numbers) : null;
    return make("tr", {}, make("th", { scope: "row" }, name), ...values.map((v, i) => make("td", {}, v == null ? "–" : show ? show(v) : String(v), best !== null && v === best && finished(runs[i]) ? make("b", {}, " ✓ best") : "")));
  }));
}
