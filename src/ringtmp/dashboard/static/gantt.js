// One step, node by node: a bar for each piece of work, with its microbatch. Zoom with Ctrl and the wheel, by pinching, with buttons or keys.
// The keys say in `where` what is shown and what a node did; the table below has the same in numbers.

import { $, bytes, colour, make, percent, say, seconds } from "./text.js";
import { look } from "./runs.js";

const LEFT = 92, TOP = 6, AXIS = 24, LEAST = 1e-6;

export class Gantt {
  constructor(box) {
    this.box = box;
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.tip = make("div", { class: "tip", hidden: "" });
    box.append(this.canvas, this.tip);
    this.detail = null;
    this.node = null;  // that the arrows have gone to, by its row
    this.mail = false;
    new ResizeObserver(() => this.paint()).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
    this.listen();
  }

  show(detail, names) {
    const fresh = !this.detail || Math.abs(detail.seconds - this.span()) > 1e9 || this.whole;
    this.names = names;
    this.detail = detail;
    if (fresh || this.to === undefined || this.to > detail.seconds * 1.2) this.all(); else this.paint();
    if (this.node >= detail.nodes.length) this.node = null;
    this.box.setAttribute("aria-label", `Step ${detail.step}: what ${detail.nodes.length} nodes did in ${seconds(detail.seconds)}`);
    this.table();
  }

  // Seconds of each kind of work in a row, added up.
  did(row) {
    const found = new Map();
    for (const [kind, , , start, end] of row.bars) if (kind !== "send" && kind !== "receive") found.set(kind, (found.get(kind) ?? 0) + end - start);
    return found;
  }

  called(row) { return this.names.get(row.node) ?? `node ${row.node}`; }

  table() {
    const kinds = this.kinds().sort((a, b) => look(a).place - look(b).place), head = ["node", "busy", "waiting", ...kinds.map((kind) => look(kind).label)];
    $("gantt-table").tHead.replaceChildren(make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name))));
    $("gantt-table").tBodies[0].replaceChildren(...this.detail.nodes.map((row) => {
      const did = this.did(row), cells = [seconds(row.busy_s), seconds(row.idle_s), ...kinds.map((kind) => (did.has(kind) ? seconds(did.get(kind)) : "–"))];
      return make("tr", {}, make("th", { scope: "row" }, this.called(row)), ...cells.map((text) => make("td", {}, text)));
    }));
  }

  // What the keys have just done, in words.
  tell() {
    if (!this.detail) return;
    const row = this.node === null ? null : this.detail.nodes[this.node];
    if (!row) { say($("gantt-where"), this.whole ? `The whole step, ${seconds(this.detail.seconds)}` : `From ${seconds(this.from)} to ${seconds(this.to)}`); return; }
    const work = [...this.did(row)].map(([kind, s]) => `${look(kind).label} ${seconds(s)}`), all = row.busy_s + row.idle_s;
    say($("gantt-where"), `${this.called(row)}: busy ${percent(all ? row.busy_s / all : 0)}, ${work.join(", ")}, waiting ${seconds(row.idle_s)}`);
  }

  goTo(by) {
    if (!this.detail) return;
    const last = this.detail.nodes.length - 1;
    this.node = this.node === null ? (by > 0 ? 0 : last) : Math.min(last, Math.max(0, this.node + by));
    this.paint();
  }

  span() { return this.to - this.from; }
  all() { this.from = 0; this.to = this.detail?.seconds ?? 1; this.whole = true; this.paint(); }

  zoom(factor, at = 0.5) {
    if (!this.detail) return;
    const middle = this.from + at * this.span(), span = Math.min(this.detail.seconds, Math.max(LEAST, this.span() * factor));
    this.from = middle - at * span; this.to = this.from + span;
    this.move(0);
  }

  move(by) {
    if (!this.detail) return;
    const span = this.span(), from = Math.min(Math.max(0, this.from + by), Math.max(0, this.detail.seconds - span));
    this.from = from; this.to = from + span;
    this.whole = span >= this.detail.seconds * 0.999;
    this.paint();
  }

  listen() {
    const box = this.box, share = (event) => Math.min(1, Math.max(0, (event.clientX - box.getBoundingClientRect().left - LEFT) / (box.clientWidth - LEFT - 6)));
    box.addEventListener("wheel", (event) => { if (event.ctrlKey || event.metaKey) { event.preventDefault(); this.zoom(Math.exp(event.deltaY / 200), share(event)); } else if (event.deltaX && !this.whole) { event.preventDefault(); this.move((event.deltaX / box.clientWidth) * this.span()); } }, { passive: false });
    const fingers = new Map();
    box.addEventListener("pointerdown", (event) => { fingers.set(event.pointerId, event.clientX); box.setPointerCapture(event.pointerId); });
    box.addEventListener("pointermove", (event) => {
      if (!fingers.has(event.pointerId)) { this.point(event); return; }
      const last = fingers.get(event.pointerId);
      if (fingers.size === 1) this.move(((last - event.clientX) / (box.clientWidth - LEFT)) * this.span());
      else { const other = [...fingers].find(([id]) => id !== event.pointerId)[1], was = Math.abs(last - other) || 1, is = Math.abs(event.clientX - other) || 1; this.zoom(was / is, share(event)); }
      fingers.set(event.pointerId, event.clientX);
    });
    for (const name of ["pointerup", "pointercancel", "pointerleave"]) box.addEventListener(name, (event) => { fingers.delete(event.pointerId); this.tip.hidden = true; });
    box.addEventListener("keydown", (event) => {
      const does = { "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1.6), ArrowLeft: () => this.move(-0.2 * this.span()), ArrowRight: () => this.move(0.2 * this.span()),
        ArrowUp: () => this.goTo(-1), ArrowDown: () => this.goTo(1), "0": () => { this.node = null; this.all(); } }[event.key];
      if (!does || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      if (!event.key.startsWith("Arrow") || event.key === "ArrowLeft" || event.key === "ArrowRight") this.node = null;
      does();
      this.tell();
    });
  }

  rows() {
    const n = this.detail.nodes.length, high = n > 24 ? 12 : n > 10 ? 20 : 30;
    let y = TOP;
    return this.detail.nodes.map((each) => {
      const lanes = this.mail ? Math.max(0, ...each.bars.map((bar) => bar[6])) : 0, row = { y, high, lanes: Math.min(lanes, 4), node: each };
      y += high + row.lanes * 5 + (n > 24 ? 2 : 6);
      return row;
    });
  }

  paint() {
    if (!this.detail) return;
    const width = this.box.clientWidth, rows = this.rows(), last = rows.at(-1), height = last.y + last.high + last.lanes * 5 + AXIS, ratio = devicePixelRatio || 1;
    if (!width) return;
    this.canvas.width = width * ratio; this.canvas.height = height * ratio; this.canvas.style.height = `${height}px`;
    const ctx = this.canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    const ink = colour("ink"), muted = colour("muted"), track = colour("track"), grid = colour("grid"), tints = new Map();
    const tint = (kind) => { if (!tints.has(kind)) tints.set(kind, kind === "send" || kind === "receive" ? colour("c7") : colour(look(kind).colour)); return tints.get(kind); };
    const wide = width - LEFT - 6, x = (s) => LEFT + ((s - this.from) / this.span()) * wide;
    this.drawn = [];
    ctx.font = "12px system-ui, sans-serif"; ctx.textBaseline = "middle";
    const mark = niceTick(this.span() / Math.max(2, wide / 90));
    ctx.fillStyle = muted; ctx.textAlign = "center";
    for (let s = Math.ceil(this.from / mark) * mark; s <= this.to + 1e-12; s += mark) { ctx.fillStyle = grid; ctx.fillRect(Math.round(x(s)), TOP, 1, height - AXIS - TOP + 4); ctx.fillStyle = muted; ctx.fillText(s < mark / 2 ? "0" : seconds(s), Math.min(x(s), width - 26), height - 9); }
    for (const row of rows) {
      ctx.fillStyle = muted; ctx.textAlign = "right";
      const name = this.called(row.node), marked = this.node !== null && row.node === this.detail.nodes[this.node];
      ctx.font = `${row.high < 16 ? 10 : 12}px system-ui, sans-serif`;
      ctx.fillStyle = ink; ctx.fillText(name.length > 12 ? `${name.slice(0, 11)}…` : name, LEFT - 10, row.y + row.high / 2);
      ctx.save(); ctx.beginPath(); ctx.rect(LEFT, 0, wide, height); ctx.clip();
      ctx.fillStyle = track; ctx.fillRect(LEFT, row.y, wide, row.high);
      for (const bar of row.node.bars) {
        const [kind, visit, microbatch, start, end, size, lane] = bar;
        if (end < this.from || start > this.to || (lane && (!this.mail || lane > 4))) continue;
        const left = x(start), long = Math.max(0.6, x(end) - left), y = lane ? row.y + row.high + (lane - 1) * 5 + 1 : row.y, tall = lane ? 4 : row.high;
        ctx.fillStyle = tint(kind); ctx.fillRect(left, y, long > 4 ? long - 0.8 : long, tall);
        if (!lane && microbatch >= 0 && long > 15 && row.high > 16) { ctx.fillStyle = "#11161d"; ctx.textAlign = "center"; ctx.fillText(String(microbatch), left + long / 2, row.y + row.high / 2 + 0.5); }
        this.drawn.push([left, y, long, tall, kind, microbatch, end - start, size, name]);
      }
      ctx.restore();
      if (marked) { ctx.strokeStyle = ink; ctx.lineWidth = 2; ctx.strokeRect(LEFT - 2, row.y - 1, wide + 4, row.high + 2); }
    }
  }

  point(event) {
    if (!this.drawn) return;
    const box = this.box.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    const hit = this.drawn.findLast(([x, y, w, h]) => px >= x - 1 && px <= x + w + 1 && py >= y && py <= y + h);
    this.tip.hidden = !hit;
    if (!hit) return;
    const [, y, , , kind, microbatch, took, size, name] = hit;
    this.tip.textContent = `${name}: ${kind === "send" || kind === "receive" ? kind : look(kind).label}${microbatch >= 0 ? `, microbatch ${microbatch}` : ""}, ${seconds(took)}${size ? `, ${bytes(size)}` : ""}`;
    this.tip.style.left = `${Math.min(px + 10, box.width - this.tip.offsetWidth - 4)}px`;
    this.tip.style.top = `${Math.max(0, y - 26)}px`;
  }

  kinds() { return this.detail ? [...new Set(this.detail.nodes.flatMap((each) => each.bars.map((bar) => bar[0])))].filter((kind) => kind !== "send" && kind !== "receive") : []; }
}

const niceTick = (least) => { for (let power = -9; power < 9; power++) for (const factor of [1, 2, 5]) if (factor * 10 ** power >= least) return factor * 10 ** power; return 1; };
