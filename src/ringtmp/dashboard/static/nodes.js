// The table of nodes: what each did in the last seconds, by kind and cause, what it sent, and its memory against its cap.

import { bytes, joules, make, percent, rate, say } from "./text.js";
import { look, sharers } from "./runs.js";
import { holds } from "./ring.js";

export class NodeTable {
  constructor(table, choose) {
    this.body = table.tBodies[0];
    this.choose = choose;
    this.rows = new Map();
  }

  draw(run, view, selected) {
    const members = view.members, key = members.map((m) => m.node).join();
    if (key !== this.key) {
      this.key = key;
      this.rows = new Map(members.map((m) => [m.node, this.row(m)]));
      this.body.replaceChildren(...[...this.rows.values()].map((each) => each.row));
    }
    const planned = new Map((run.summary?.forecast?.per_node ?? []).map((each) => [each.node, each]));
    const told = new Map((run.summary?.per_node ?? []).map((each) => [each.node, each]));
    for (const member of members) this.update(this.rows.get(member.node), member, view, planned.get(member.node), told.get(member.node), selected);
  }

  row(member) {
    const name = make("th", { scope: "row" }), small = make("small");
    const title = make("span");
    name.append(title, small);
    const stack = make("div", { class: "stack", role: "img" }), time = make("td", { class: "time" }, stack);
    const idle = make("td", { "data-name": "idle" }), sent = make("td", { class: "rate", "data-name": "sends" }), received = make("td", { class: "rate", "data-name": "receives" });
    const text = make("span", { class: "small-text" }), fill = make("i"), meter = make("div", { class: "meter" }, fill);
    const memory = make("td", { class: "memory" }, text, meter), energy = make("td", { class: "energy", "data-name": "energy" });
    const row = make("tr", {}, name, time, idle, sent, received, memory, energy);
    row.addEventListener("click", () => this.choose(member.node));
    return { row, title, small, stack, idle, sent, received, text, fill, meter, energy };
  }

  update(parts, member, view, planned, told, selected) {
    const mine = view.nodes.get(member.node), out = view.out.has(member.node);
    parts.row.classList.toggle("out", out);
    parts.row.classList.toggle("chosen", selected === member.node);
    say(parts.title, member.role === "server" ? `${member.name} (server)` : member.name);
    const others = sharers(view, member.node), held = holds(member.segments) + (others.length ? `, shared with ${others.length > 2 ? `${others.length} others` : others.join(" and ")}` : "");
    say(parts.small, out ? "lost; its place is being taken" : held || member.role);
    parts.small.title = member.segments.join(", ") + (others.length ? `, shared with ${others.join(", ")}` : "");
    const wanted = mine?.total && !out ? [...mine.work].map(([kind, s]) => ({ ...look(kind), s })).sort((a, b) => a.place - b.place) : [];
    while (parts.stack.children.length < wanted.length) parts.stack.append(make("i"));
    while (parts.stack.children.length > wanted.length) parts.stack.lastChild.remove();
    wanted.forEach((each, i) => {
      const bar = parts.stack.children[i], told = `${each.colour} ${each.idle} ${((100 * each.s) / mine.total).toFixed(1)} ${each.label}`;
      if (bar.told === told) return;
      bar.told = told;
      bar.style.setProperty("--c", `var(--${each.colour})`);
      bar.style.width = `${((100 * each.s) / mine.total).toFixed(1)}%`;
      bar.className = each.idle ? "waits" : "";
      bar.title = `${each.label}: ${percent(each.s / mine.total)}`;
    });
    const said = wanted.length ? wanted.filter((each) => each.s / mine.total >= 0.005).map((each) => `${each.label} ${percent(each.s / mine.total)}`).join(", ") : "nothing told yet";
    if (parts.stack.getAttribute("aria-label") !== said) parts.stack.setAttribute("aria-label", said);
    say(parts.idle, mine?.total && !out ? percent(mine.idle / mine.total) : "–");
    say(parts.sent, mine?.total && !out ? rate(mine.sent / mine.total) : "–");
    say(parts.received, mine?.total && !out ? rate(mine.received / mine.total) : "–");
    this.memory(parts, mine, planned, told);
    say(parts.energy, told?.energy_j != null ? joules(told.energy_j) : "–");
  }

  // Against what the device said it had free when the plan was made.
  memory(parts, mine, planned, told) {
    const has = mine?.rss || told?.peak_rss_bytes || 0, cap = planned?.free_bytes;
    say(parts.text, has ? (cap ? `${bytes(has)} of ${bytes(cap)}` : bytes(has)) : planned ? `${bytes(planned.memory_bytes)} planned` : "–");
    const share = has && cap ? Math.min(1, has / cap) : 0;
    parts.fill.style.width = `${(100 * share).toFixed(1)}%`;
    parts.meter.className = `meter${share > 0.98 ? " over" : share > 0.85 ? " tight" : ""}`;
  }
}

// Every kind that was seen so far, in the order in which it is drawn.
export function legend(list, kinds) {
  const wanted = kinds.map(look).sort((a, b) => a.place - b.place), key = wanted.map((each) => each.label).join();
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...wanted.map((each) => {
    const swatch = make("i", each.idle ? { class: "waits" } : {});
    swatch.style.setProperty("--c", `var(--${each.colour})`);
    return make("li", {}, swatch, each.label);
  }));
}
