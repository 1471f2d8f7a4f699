// Which step the Gantt chart shows: the newest that was recorded in full at the moment shown, or the one that was chosen.

import { $, make, say } from "./text.js";
import { before } from "./runs.js";
import { legend } from "./nodes.js";
import { Gantt } from "./gantt.js";
import { wish } from "./acts.js";

export class Steps {
  constructor(number, run) {
    this.number = number;
    this.run = run;
    this.gantt = new Gantt($("gantt"));
    this.asked = null;
    this.chosen = null;
    $("gantt-in").addEventListener("click", () => this.gantt.zoom(0.5));
    $("gantt-out").addEventListener("click", () => this.gantt.zoom(2));
    $("gantt-all").addEventListener("click", () => this.gantt.all());
    $("gantt-mail").addEventListener("change", (event) => { this.gantt.mail = event.target.checked; this.gantt.paint(); });
    setInterval(() => { if ($("gantt-detail").checked && !this.run().ended) wish("/detail", this.number(), "detail").catch(() => {}); }, 2500);
    $("gantt-detail").addEventListener("change", (event) => { if (event.target.checked) wish("/detail", this.number(), "detail").catch(() => {}); });
    $("gantt-step").addEventListener("change", (event) => { this.chosen = event.target.value === "newest" ? null : Number(event.target.value); this.draw(this.moment); });
  }

  forget() { this.asked = this.chosen = null; }

  draw(moment) {
    this.moment = moment;
    $("gantt-more").hidden = this.run().ended || this.run().status === "waiting";
    const run = this.run(), list = run.detailed, select = $("gantt-step"), key = `${this.number()}:${list.join()}`;
    if (select.dataset.key !== key) {
      select.dataset.key = key;
      select.replaceChildren(make("option", { value: "newest" }, "newest"), ...[...list].reverse().map((step) => make("option", { value: String(step) }, String(step + 1))));
      select.value = this.chosen === null || !list.includes(this.chosen) ? "newest" : String(this.chosen);
    }
    if (!list.length) { say($("gantt-said"), run.points.length ? "no step was recorded in full" : "no step yet"); return; }
    const last = moment === Infinity ? Infinity : (run.points[before(run.points, moment, (p) => p[1])]?.[0] ?? 1) - 1;
    const wanted = this.chosen !== null && list.includes(this.chosen) ? this.chosen : list.findLast((step) => step <= last) ?? list[0];
    const question = `${this.number()}:${wanted}`;
    if (question === this.asked || this.busy) return;
    this.asked = question;
    this.busy = true;
    fetch(`/step?run=${this.number()}&step=${wanted}`).then((answer) => (answer.ok ? answer.json() : null)).then((found) => {
      this.busy = false;
      if (!found) return;
      const names = new Map(run.memberships.flatMap((each) => each.members).map((m) => [m.node, m.name]));
      this.gantt.show(found, names);
      say($("gantt-said"), `step ${found.step}`);
      legend($("gantt-legend"), this.gantt.kinds());
    }).catch(() => { this.busy = false; this.asked = null; });
  }
}
