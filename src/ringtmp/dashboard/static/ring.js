// The ring as a drawing: nodes with what they hold and how busy they are, links with what goes over them both ways.
// It is built anew only when other nodes take part or the room changes; else only what differs is written.

import { bytes, rate, percent, say, svg } from "./text.js";
import { look, sharers } from "./runs.js";

const LARGE = 12; // more nodes are drawn small
const CROWDED = 24; // with more, links run past their nodes and not between them
const LABELLED = 10; // with more, a link's rate is told in the table alone

// Without "#" and with a dash: "1-2 dense1 to dense2" -> "layers 1–2".
export const holds = (segments) => {
  const places = segments.map((each) => /^#(\d+)(?:-(\d+))?/.exec(each)).filter(Boolean).map((m) => (m[2] ? `${m[1]}–${m[2]}` : m[1]));
  if (!places.length) return segments.length ? segments.join(", ") : "";
  return `${places.length > 1 || places[0].includes("–") ? "layers" : "layer"} ${places.join(", ")}`;
};

const firstLayer = (member) => Math.min(...member.segments.map((each) => Number(/^#(\d+)/.exec(each)?.[1] ?? 1e9)));

export class RingDrawing {
  constructor(box, chosen) {
    this.box = box;
    this.onChoose = chosen;
    this.key = "";
    new ResizeObserver(() => { this.key = ""; this.last && this.draw(...this.last); }).observe(box);
  }

  draw(view, selected, moving) {
    this.last = [view, selected, moving];
    const members = [...view.members];
    const width = this.box.clientWidth, height = this.box.clientHeight;
    const there = JSON.stringify([view.groups, members.map((m) => m.node)]);
    if (there !== this.there) { this.there = there; this.spoken = new Set(); }
    for (const each of view.links.keys()) this.spoken.add(each);  // who has once spoken to whom stays joined
    const pairs = view.groups.length ? pairsOfGroups(view, members, this.spoken) : pairsOf(view, members);
    const key = JSON.stringify([there, members.map((m) => [m.node, m.name, m.role, m.segments]), pairs, Math.round(width), Math.round(height)]);
    if (key !== this.key) { this.key = key; this.build(members, pairs, width, height, view.groups); }
    this.box.classList.toggle("still", !moving);
    this.box.classList.toggle("many", members.length > LARGE);
    for (const member of members) this.update(member, view, selected);
    if (this.middle) {
      let idle = 0, total = 0;
      for (const each of view.nodes.values()) { idle += each.idle; total += each.total; }
      say(this.middle[0], total ? `${percent(1 - idle / total)} busy` : "–");
      say(this.middle[1], `${members.length} nodes${view.out.size ? `, ${view.out.size} lost` : ""}`);
    }
    let most = 1;
    for (const value of view.links.values()) most = Math.max(most, value);
    for (const [name, link] of this.links) link.set(view.links.get(name) ?? 0, most);
  }

  build(members, pairs, width, height, groups) {
    this.nodes = new Map();
    this.links = new Map();
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "The ring and its nodes" });
    this.box.replaceChildren(drawing);
    if (!members.length) {
      const text = svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle", class: "soft" });
      text.textContent = "No node has joined yet.";
      drawing.append(svg("circle", { class: "rail", cx: width / 2, cy: height / 2, r: Math.min(width, height) / 2.8 }), text);
      return;
    }
    const servers = members.filter((m) => m.role === "server");
    const inside = servers.length && servers.length < members.length && servers.length <= 4 ? servers : [];
    const around = members.filter((m) => !inside.includes(m)).sort((a, b) => (b.node === 0) - (a.node === 0) || (pairs.circle ? firstLayer(a) - firstLayer(b) : 0) || a.node - b.node);
    const n = around.length, small = n > LARGE, narrow = width < 520;
    const radius = small ? Math.max(5, Math.min(18, (Math.PI * (0.5 * Math.min(width - 70, 1.75 * (height - 60)) + 0.5 * (height - 60))) / n / 2.35)) : Math.max(25, Math.min(narrow ? 37 : 50, 270 / n));
    const room = small ? radius + 24 : narrow ? radius + 14 : radius + 38, beside = small ? radius + 20 : radius + (narrow ? 10 : 96);
    const rx = Math.min(width / 2 - beside, 1.75 * (height / 2 - room)), ry = height / 2 - room;
    const cx = width / 2, cy = height / 2 - (small ? 0 : 4);
    const angles = n > LARGE ? spread(n, rx, ry) : around.map((_, i) => -Math.PI / 2 + (2 * Math.PI * i) / n);
    const at = new Map(around.map((m, i) => {
      const angle = angles[i];
      return [m.node, { x: cx + (n > 1 ? rx : 0) * Math.cos(angle), y: cy + (n > 1 ? ry : 0) * Math.sin(angle), angle, place: i }];
    }));
    inside.forEach((m, i) => at.set(m.node, { x: cx + (i - (inside.length - 1) / 2) * radius * 2.9, y: cy, angle: 0, place: -1 }));
    const lanes = svg("g");
    for (const group of groups) if (group.length > 1 && group.every((node) => at.has(node))) {
      const d = hull(group.map((node) => at.get(node)), { cx, cy, rx, ry, more: small ? (0.8 * Math.PI) / n : 0 }), wide = 2 * radius + (small ? 6 : 12), ends = small ? "butt" : "round";
      drawing.append(svg("path", { class: "group edge", d, "stroke-width": wide + 2.5, "stroke-linecap": ends }), svg("path", { class: "group", d, "stroke-width": wide, "stroke-linecap": ends }));
    }
    drawing.append(lanes);
    this.middle = null;
    if (small && !inside.length) {
      const big = svg("text", { x: cx, y: cy, "text-anchor": "middle", class: "name" }), under = svg("text", { x: cx, y: cy + 22, "text-anchor": "middle", class: "soft" });
      big.style.fontSize = "26px";
      drawing.append(big, under);
      this.middle = [big, under];
    }
    const label = n <= LABELLED && !(narrow && n > 3) && !inside.length;
    for (const [a, b, within] of pairs.both) if (at.has(a) && at.has(b)) this.link(lanes, a, b, at.get(a), at.get(b), { cx, cy, rx, ry, n, radius, label, narrow, within, circle: pairs.circle });
    for (const member of members) drawing.append(this.node(member, at.get(member.node), { radius, small, narrow, n, inside: inside.includes(member) }));
  }

  link(lanes, a, b, from, to, room) {
    const next = room.circle && from.place >= 0 && to.place >= 0 && (to.place - from.place + room.n) % room.n === 1;
    const [there, back] = room.within ? ["s", "s"] : ["a", "g"];
    const written = (path, name, value) => { if (path[name] !== value) { path[name] = value; path.style[name] = value; } };
    for (const [source, target, start, end, side, kind] of [[a, b, from, to, 1, there], [b, a, to, from, -1, back]]) {
      const d = next ? arc(from, to, room, side) : straight(start, end, room.radius, room);
      const bed = svg("path", { d, class: `lane bed ${kind}` }), dots = svg("path", { d, class: `lane dots ${kind}` });
      const text = svg("text", { class: `rate ${kind}`, "text-anchor": "middle" });
      lanes.append(bed, dots, text);
      if (room.label && next) {
        const { x, y, nx, ny } = middleOf(from, to, room), away = 17 * side, lean = nx * side;
        text.setAttribute("x", (x + away * nx).toFixed(1));
        text.setAttribute("y", (y + 4 + away * ny).toFixed(1));
        if (room.narrow && (side < 0 || Math.abs(nx) > 0.5)) text.setAttribute("visibility", "hidden");
        text.setAttribute("text-anchor", room.narrow ? "middle" : lean > 0.25 ? "start" : lean < -0.25 ? "end" : "middle");
      }
      this.links.set(`${source}>${target}`, { set(value, most) {
        const share = Math.log1p(value) / Math.log1p(most);
        written(bed, "strokeWidth", `${value ? (2 + 3 * share).toFixed(1) : 1.2}px`);
        written(dots, "strokeWidth", `${value ? (4 + 1.6 * share).toFixed(1) : 0}px`);
        written(dots, "visibility", value ? "visible" : "hidden");
        const pace = paceOf(value ? 2.6 - 2 * share : 2, room.n > LARGE);
        if (dots.pace !== pace) { dots.pace = pace; dots.style.setProperty("--pace", `${pace}s`); dots.style.setProperty("--ticks", String(Math.round(10 * pace))); }
        if (room.label && next) say(text, value ? rate(value) : "");
      } });
    }
  }

  node(member, place, { radius, small, narrow, n, inside }) {
    const group = svg("g", { class: "node", transform: `translate(${place.x.toFixed(1)} ${place.y.toFixed(1)})` });
    const button = svg("g", { class: "press", tabindex: "0", role: "button" }), parts = { group, button, radius, small, arcs: svg("g") };
    group.append(button);
    button.append(member.role === "server" ? svg("rect", { class: "body", x: -radius, y: -radius, width: 2 * radius, height: 2 * radius, rx: radius / 3 }) : svg("circle", { class: "body", r: radius }));
    const stroke = small ? Math.max(2.5, radius / 3.2) : 7, r = radius - stroke / 2 - (small ? 1 : 3);
    parts.stroke = stroke; parts.r = r;
    button.append(svg("circle", { class: "track", r, "stroke-width": stroke }), parts.arcs);
    const text = (y, size, kind) => { const made = svg("text", { x: 0, y, "text-anchor": "middle", class: kind, "aria-hidden": "true" }); made.style.fontSize = `${size}px`; group.append(made); return made; };
    if (!small && narrow) {
      parts.name = text(-2, radius > 30 ? 11 : 9.5, "name");
      parts.share = text(13, radius > 30 ? 13 : 11, "soft");
    } else if (!small) {
      parts.share = text(radius > 36 ? 2 : 5, radius > 36 ? 18 : 13, "name");
      if (radius > 36) parts.word = text(16, 11, "soft");
      // Outside the ring, where no link is: above, below, or to the side.
      const across = inside || n === 1 ? 0 : Math.cos(place.angle), down = inside || n === 1 ? 1 : Math.sin(place.angle), side = Math.abs(across) > 0.4;
      const y = side ? (radius + 10) * down * 0.6 - 2 : down < 0 ? -(radius + 20) : radius + 17, x = side ? Math.sign(across) * (radius * Math.max(0.75, Math.abs(across)) + 9) : 0;
      for (const [key, size, kind, more] of [["name", 13, "name", 0], ["holds", 12, "soft", 15]]) {
        parts[key] = text(y + more, size, kind);
        parts[key].setAttribute("x", x.toFixed(1));
        parts[key].setAttribute("text-anchor", side ? (across > 0 ? "start" : "end") : "middle");
      }
    } else {
      if (radius >= 9) { parts.name = text(3.5, Math.min(11, radius * 0.85), "name"); }
      else if (member.node % 8 === 0) {
        parts.name = text(0, 11, "soft");
        const away = n > CROWDED ? -24 : 18;
        parts.name.setAttribute("x", (away * Math.cos(place.angle)).toFixed(1));
        parts.name.setAttribute("y", (4 + away * Math.sin(place.angle)).toFixed(1));
      }
    }
    const choose = () => this.onChoose(member.node);
    group.addEventListener("click", choose);
    button.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); } });
    this.nodes.set(member.node, parts);
    return group;
  }

  update(member, view, selected) {
    const parts = this.nodes.get(member.node), mine = view.nodes.get(member.node), out = view.out.has(member.node);
    if (!parts) return;
    const busy = mine?.total ? 1 - mine.idle / mine.total : null;
    parts.group.classList.toggle("out", out);
    parts.group.classList.toggle("chosen", selected === member.node);
    if (parts.name) say(parts.name, parts.small ? String(member.node) : member.name);
    if (parts.holds) say(parts.holds, out ? "its place is being taken" : holds(member.segments));
    if (parts.share) say(parts.share, out ? "lost" : busy === null ? "–" : percent(busy));
    if (parts.word) say(parts.word, out ? "" : busy === null ? "" : "busy");
    const others = sharers(view, member.node);
    const said = `${member.name} (${member.role}, ${holds(member.segments)}${others.length ? `, shared with ${others.join(", ")}` : ""}${out ? ", lost" : busy === null ? "" : `, ${percent(busy)} busy`}${mine?.rss ? `, ${bytes(mine.rss)}` : ""})`;
    if (parts.button.getAttribute("aria-label") !== said) parts.button.setAttribute("aria-label", said);
    const wanted = out || !mine?.total ? [] : [...mine.work].map(([kind, s]) => ({ ...look(kind), share: s / mine.total })).filter((each) => !each.idle).sort((x, y) => x.place - y.place);
    while (parts.arcs.children.length < wanted.length) parts.arcs.append(svg("circle", { class: "arc", r: parts.r, "stroke-width": parts.stroke, transform: "rotate(-90)", pathLength: "1" }));
    while (parts.arcs.children.length > wanted.length) parts.arcs.lastChild.remove();
    let done = 0;
    wanted.forEach((each, i) => {
      const arcElement = parts.arcs.children[i], told = `${each.colour} ${each.share.toFixed(3)} ${done.toFixed(3)}`;
      done += each.share;
      if (arcElement.told === told) return;
      arcElement.told = told;
      arcElement.style.stroke = `var(--${each.colour})`;
      arcElement.style.strokeDasharray = `${each.share.toFixed(3)} 2`;
      arcElement.style.strokeDashoffset = `${-(done - each.share).toFixed(3)}`;
    });
  }
}

// Many dots move ten times a second and all at once, at one of three speeds, so that between two moves nothing is painted.
const paceOf = (s, many) => (many ? [0.6, 1.2, 2.4].find((each) => s <= each * 1.4) ?? 2.4 : Math.max(0.5, Math.round(10 * s) / 10));

// Who speaks to whom: of the links that carried something, else neighbours in the order of layers.
function pairsOf(view, members) {
  const known = new Set(members.map((m) => m.node)), both = new Map();
  const put = (a, b) => { const key = a < b ? `${a}-${b}` : `${b}-${a}`; if (a !== b && known.has(a) && known.has(b) && !both.has(key)) both.set(key, [a, b]); };
  const served = members.some((m) => m.role === "server");
  const order = [...members].sort((a, b) => (b.node === 0) - (a.node === 0) || firstLayer(a) - firstLayer(b) || a.node - b.node).map((m) => m.node);
  const layered = members.length > 1 && !served && members.filter((m) => m.segments.some((each) => /^#\d/.test(each))).length > 1;
  if (layered) order.forEach((node, i) => put(node, order[(i + 1) % order.length]));
  for (const key of [...view.links.keys()].sort()) { const [a, b] = key.split(">").map(Number); put(a, b); }
  const neighbours = [...both.values()].filter(([a, b]) => { const gap = (order.indexOf(b) - order.indexOf(a) + order.length) % order.length; return gap === 1 || gap === order.length - 1; });
  const list = [...both.values()].map(([a, b]) => ((order.indexOf(b) - order.indexOf(a) + order.length) % order.length === 1 || order.length === 2 ? [a, b] : neighbours.some(([x, y]) => x === a && y === b) ? [b, a] : [a, b]));
  return { both: list, circle: layered };
}

// Among groups a microbatch goes from whoever has it in one group to whoever has it in the next: who that is, the links that
// carried something say, and before the first has, anyone of the next may be. Within a group go the sums of gradients.
function pairsOfGroups(view, members, spoken) {
  const stages = view.groups.length + 1, stage = new Map(members.map((m) => [m.node, 0])), both = new Map();
  view.groups.forEach((group, i) => group.forEach((node) => stage.set(node, i + 1)));
  const put = (a, b) => {
    if (a === b || !stage.has(a) || !stage.has(b)) return;
    const gap = (stage.get(b) - stage.get(a) + stages) % stages, on = gap === 0 ? a < b : stages === 2 ? stage.get(a) === 0 : gap === 1 || (gap !== stages - 1 && stage.get(a) < stage.get(b));
    both.set(a < b ? `${a}-${b}` : `${b}-${a}`, on ? [a, b, gap === 0] : [b, a, gap === 0]);
  };
  for (const each of [...spoken].sort()) put(...each.split(">").map(Number));
  const order = [members.filter((m) => stage.get(m.node) === 0).map((m) => m.node), ...view.groups];
  order.forEach((group, i) => {
    const next = order[(i + 1) % stages], joined = group.some((a) => next.some((b) => spoken.has(`${a}>${b}`)));
    if (!joined) for (const a of group) for (const b of next) put(a, b);
  });
  return { both: [...both.values()], circle: true };
}

const middleOf = (from, to, { cx, cy, rx, ry, n }) => {
  const angle = from.angle + Math.PI / n;
  const nx = Math.cos(angle) * ry, ny = Math.sin(angle) * rx, length = Math.hypot(nx, ny) || 1;
  return { x: cx + rx * Math.cos(angle), y: cy + ry * Math.sin(angle), nx: nx / length, ny: ny / length };
};

// As many angles, from the top on, of places that are equally far from each other along the ellipse.
function spread(n, rx, ry) {
  const fine = 2048, lengths = [0], found = [];
  for (let i = 0; i < fine; i++) { const angle = (2 * Math.PI * (i + 0.5)) / fine - Math.PI / 2; lengths.push(lengths[i] + Math.hypot(rx * Math.sin(angle), ry * Math.cos(angle))); }
  for (let i = 0, k = 0; k < n; k++) { while (lengths[i] < (lengths[fine] * k) / n) i++; found.push((2 * Math.PI * i) / fine - Math.PI / 2); }
  return found;
}

// Along the ellipse, a little outside (clockwise) or inside (back), from the edge of one node to that of the other; where nodes
// are crowded, past both of them.
function arc(from, to, { cx, cy, rx, ry, n, radius }, side) {
  const crowded = n > CROWDED, shift = (crowded ? radius + 4 : 5) * side, steps = crowded ? 4 : 24, points = [];
  const place = (angle) => [cx + (rx + shift) * Math.cos(angle), cy + (ry + shift) * Math.sin(angle)];
  const span = (to.angle - from.angle + 4 * Math.PI) % (2 * Math.PI);
  for (let i = 0; i <= steps * 2; i++) {
    const [x, y] = place(from.angle + (span * i) / (steps * 2));
    if (crowded || Math.hypot(x - from.x, y - from.y) > radius + 3 && Math.hypot(x - to.x, y - to.y) > radius + 3) points.push(`${x.toFixed(1)} ${y.toFixed(1)}`);
  }
  if (side < 0) points.reverse();
  return points.length ? `M${points.join("L")}` : `M${from.x} ${from.y}`;
}

// What lies behind the nodes of a group: along the ellipse, from the first of them to the last.
function hull(places, { cx, cy, rx, ry, more }) {
  const angles = places.map((each) => each.angle), first = Math.min(...angles) - more, last = Math.max(...angles) + more, points = [];
  for (let i = 0; i <= 40; i++) { const angle = first + ((last - first) * i) / 40; points.push(`${(cx + rx * Math.cos(angle)).toFixed(1)} ${(cy + ry * Math.sin(angle)).toFixed(1)}`); }
  return `M${points.join("L")}`;
}

// Between two that are not next to each other; to the right of its way, so that both ways are seen.
function straight(start, end, radius) {
  const dx = end.x - start.x, dy = end.y - start.y, length = Math.hypot(dx, dy) || 1, ux = dx / length, uy = dy / length;
  const shift = 4, keep = radius + 5;
  const x1 = start.x + ux * keep - uy * shift, y1 = start.y + uy * keep + ux * shift, x2 = end.x - ux * keep - uy * shift, y2 = end.y - uy * keep + ux * shift;
  return `M${x1.toFixed(1)} ${y1.toFixed(1)}L${x2.toFixed(1)} ${y2.toFixed(1)}`;
}
