// Curves, drawn by uPlot: loss, score on the test part, speed against the forecast. Every run has its line on the same axis.

import { clock, colour, count, loss, make, percent } from "./text.js";
import { before } from "./runs.js";

const HEIGHT = 196;
export const RUN_COLOURS = ["c0", "c1", "c2", "c3", "c4", "c6", "c5", "c7"];

const SCORES = [
  { at: 3, title: "Accuracy", unit: "right on the test part", show: (v) => percent(v, 1), better: "high" },
  { at: 4, title: "Bits per byte", unit: "of the test part", show: (v) => v.toFixed(3) },
  { at: 5, title: "Perplexity", unit: "of the test part", show: (v) => v.toPrecision(4) },
  { at: 2, title: "Test loss", unit: "on the test part", show: loss },
];

export class Charts {
  constructor(box) {
    this.box = box;
    this.axis = "time";
    this.made = [];
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.anew());
    new ResizeObserver(() => { for (const each of this.made) each.resize(); }).observe(box);
  }

  anew() { this.key = ""; this.last && this.draw(...this.last); }
  set(axis) { this.axis = axis; this.anew(); }

  draw(runs, moment) {
    this.last = [runs, moment];
    const score = SCORES.find((each) => runs.some((run) => run.tests.some((test) => test[each.at] != null))) ?? SCORES[0];
    const key = JSON.stringify([runs.length, score.title, this.axis]);
    if (key !== this.key) {
      this.key = key;
      for (const each of this.made) each.plot.destroy();
      this.box.replaceChildren();
      this.made = [
        new Chart(this.box, this.axis, "Loss", "of the training batches", runs.length, lossOf, loss, { test: runs.length < 3 }),
        new Chart(this.box, this.axis, score.title, score.unit, runs.length, scoreOf(score), score.show, { dots: true }),
        new Chart(this.box, this.axis, "Speed", "samples per second in steps", runs.length, speedOf, (v) => count(v), { forecast: true, zero: true }),
      ];
    }
    const known = runs.map((run) => run.version).join();
    for (const each of this.made) {
      if (each.known !== known) { each.known = known; each.update(runs); }
      each.goTo(moment);
    }
  }
}

const xOf = (axis, step, at) => (axis === "time" ? at : step);
const lossOf = (run, axis) => run.points.map((p) => [xOf(axis, p[0], p[1]), p[2]]);
const scoreOf = (score) => (run, axis) => run.tests.filter((t) => t[score.at] != null).map((t) => [xOf(axis, t[0], t[1]), t[score.at]]);
// The mean of some steps, so that the line shows a course and not the noise.
const speedOf = (run, axis) => {
  const width = Math.max(1, Math.round(run.points.length / 120)), rows = [];
  let samples = 0, wall = 0, since = 0;
  run.points.forEach((p, i) => {
    samples += p[5]; wall += p[6];
    if (i - since + 1 >= width || i === run.points.length - 1) { rows.push([xOf(axis, p[0], p[1]), wall ? samples / wall : null]); samples = wall = 0; since = i + 1; }
  });
  return rows;
};

// Rows of several series on one axis: every x once, null where a series has nothing.
function joined(series) {
  const xs = [...new Set(series.flatMap((rows) => rows.map((row) => row[0])))].sort((a, b) => a - b), place = new Map(xs.map((x, i) => [x, i]));
  return [xs, ...series.map((rows) => { const ys = new Array(xs.length).fill(null); for (const [x, y] of rows) ys[place.get(x)] = y; return ys; })];
}

class Chart {
  constructor(box, axis, title, unit, runs, rowsOf, show, options) {
    Object.assign(this, { axis, rowsOf, show, options, title, marks: [], line: null });
    this.chart = make("div", { class: "chart", role: "img" });
    this.read = make("div", { class: "read" });
    this.figure = make("figure", {}, make("div", { class: "bar" }, make("h2", {}, title), make("span", { class: "note" }, unit)), this.chart, this.read);
    box.append(this.figure);
    const plain = { stroke: colour("muted"), font: "12px system-ui, sans-serif", grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("grid"), width: 1, size: 4 } };
    const series = [{}];
    for (let i = 0; i < runs; i++) {
      const stroke = colour(RUN_COLOURS[i]);
      series.push({ stroke, width: 2, spanGaps: true, points: options.dots ? { show: true, size: 7, fill: stroke } : { show: false } });
      if (options.test) series.push({ stroke: runs > 1 ? stroke : colour("c1"), width: 0, paths: () => null, points: { show: true, size: 8, fill: runs > 1 ? colour("ground") : colour("c1") } });
      if (options.forecast) series.push({ stroke, width: 1.5, dash: [6, 5], spanGaps: true, points: { show: false } });
    }
    this.per = 1 + (options.test ? 1 : 0) + (options.forecast ? 1 : 0);
    this.plot = new uPlot({
      width: this.chart.clientWidth || 360, height: HEIGHT, series, legend: { show: false }, cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { time: false, range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(high ?? 1, 1)] }, y: { range: (_, low, high) => yRange(low, high, options.zero) } },
      axes: [{ ...plain, size: 30, space: 60, values: (_, ticks) => ticks.map((t) => (axis === "time" ? clock(t) : count(t))) }, { ...plain, size: 56, space: 34, values: (_, ticks) => ticks.map((v) => tick(v, show, title)) }],
      hooks: { drawClear: [(u) => this.shade(u)], draw: [() => this.hair()], setCursor: [(u) => this.tell(u.cursor.idx)] },
    }, [[], ...series.slice(1).map(() => [])], this.chart);
    this.hairline = make("div", { class: "hair", hidden: "" });
    this.plot.over.append(this.hairline);
  }

  resize() { const width = this.chart.clientWidth; if (width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT }); }

  update(runs) {
    const series = [];
    this.runs = runs;
    for (const run of runs) {
      const rows = this.rowsOf(run, this.axis);
      series.push(rows);
      if (this.options.test) series.push(run.tests.map((t) => [xOf(this.axis, t[0], t[1]), t[2]]));
      if (this.options.forecast) {
        const plan = run.summary?.forecast, speed = plan?.step_s ? run.summary.batch_size / plan.step_s : null;
        series.push(speed && rows.length ? [[rows[0][0], speed], [rows.at(-1)[0], speed]] : []);
      }
    }
    this.marks = runs.length === 1 ? runs[0].outages.map((each) => [each.from_s, each.to_s ?? runs[0].end]) : [];
    this.plot.setData(joined(series));
    this.told = null;
    this.chart.setAttribute("aria-label", `${this.title}: ${runs.map((run) => this.said(run)).join("; ")}`);
  }

  // Curves stay; only the line at the moment shown moves.
  goTo(moment) {
    const points = this.runs[0].points;
    this.line = moment === Infinity ? null : { time: moment, step: points[before(points, moment, (p) => p[1])]?.[0] ?? 0 }[this.axis];
    this.hair();
    if (this.plot.cursor.idx == null) this.tell(null);
  }

  said(run) {
    const rows = this.rowsOf(run, this.axis).filter((row) => row[1] != null);
    return rows.length ? `${this.runs.length > 1 ? `${run.name} ` : ""}from ${this.show(rows[0][1])} to ${this.show(rows.at(-1)[1])}` : "nothing yet";
  }

  // The values under the pointer, else at the moment that is shown.
  tell(index) {
    const data = this.plot.data, x = data[0];
    const at = index ?? (this.line === null ? x.length - 1 : before(x, this.line, (v) => v)), items = [];
    if (this.told === at) return;
    this.told = at;
    this.runs.forEach((run, i) => {
      const names = [this.runs.length > 1 ? run.name : this.options.dots ? "test" : "training"];
      if (this.options.test) names.push("test");
      if (this.options.forecast) { if (this.runs.length === 1) names[0] = "measured"; names.push("forecast"); }
      names.forEach((name, k) => {
        const values = data[1 + i * this.per + k];
        let j = Math.min(at, (values?.length ?? 0) - 1);
        while (j >= 0 && values[j] == null) j--;
        if (this.options.forecast && k === 1 && j < 0) j = values.findIndex((v) => v != null);
        if (j < 0 || (this.runs.length > 1 && k > 0)) return;
        const swatch = make("i", name === "forecast" ? { class: "dash" } : {});
        swatch.style.setProperty("--c", name === "test" && this.options.test && this.runs.length === 1 ? "var(--c1)" : `var(--${RUN_COLOURS[i]})`);
        items.push(make("span", {}, swatch, `${name} `, make("b", {}, this.show(values[j]))));
      });
    });
    this.read.replaceChildren(...(items.length ? items : ["nothing yet"]));
  }

  // While the ring healed.
  shade(u) {
    if (this.axis !== "time") return;
    u.ctx.save();
    u.ctx.fillStyle = colour("limit");
    u.ctx.globalAlpha = 0.18;
    for (const [from, to] of this.marks) { const x = u.valToPos(from, "x", true); u.ctx.fillRect(x, u.bbox.top, Math.max(3, u.valToPos(to, "x", true) - x), u.bbox.height); }
    u.ctx.restore();
  }

  hair() {
    if (!this.hairline) return;  // the first drawing comes before it
    this.hairline.hidden = this.line === null;
    if (this.line !== null) this.hairline.style.transform = `translateX(${Math.round(this.plot.valToPos(this.line, "x"))}px)`;
  }
}

const yRange = (low, high, zero) => {
  if (low == null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  return [zero ? 0 : Math.max(low - room, low >= 0 ? 0 : -Infinity), high + room];
};
const tick = (value, show, title) => (title === "Accuracy" ? `${+(100 * value).toFixed(1)} %` : title === "Speed" ? count(value) : String(+value.toPrecision(4)));
