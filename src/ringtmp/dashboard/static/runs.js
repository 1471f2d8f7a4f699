// What is known of a run, and how it stood at any moment. News come in rows that replace what stood there and after.

const IDLE = "idle: ";
// The ring shows the mean of so many seconds, or of one stretch where the history is coarser.
const WINDOW_S = 2;

const WORK = { forward: ["c5", "forward"], backward: ["c1", "backward"], weights: ["c6", "weight gradients"], update: ["c2", "update"],
  compute: ["c5", "compute"], reduce: ["c3", "reduce"], serialise: ["c3", "hand on"], mail: ["c8", "mail"] };
const WAITS = { activations: "c5", gradients: "c1", parameters: "c2", window: "c3", norms: "c6", slowest: "c4" };
const ORDER = Object.keys(WORK);

// How a kind of work, or of waiting, is drawn and called.
export const look = (kind) => {
  if (!kind.startsWith(IDLE)) return { colour: WORK[kind]?.[0] ?? "c7", label: WORK[kind]?.[1] ?? kind, idle: false, place: ORDER.indexOf(kind) };
  const cause = kind.slice(IDLE.length);
  return { colour: WAITS[cause.split(/[ :]/)[0]] ?? "c7", label: `waits for ${cause}`, idle: true, place: 100 + Object.keys(WAITS).indexOf(cause) };
};

export class Run {
  constructor() { this.forget(); }

  forget() {
    Object.assign(this, { name: "", status: "waiting", points: [], frames: [], tests: [], log: [], kinds: [], memberships: [], outages: [],
      detailed: [], summary: null, now: null, read: 1, damaged: 0, unknown: 0, left_out: 0, other_version: "", total_steps: null, epochs: null });
    this.version = (this.version ?? 0) + 1;
  }

  take(news) {
    if (news.whole) this.forget();
    for (const key of ["points", "frames", "tests", "log"]) {
      if (!news[key]) continue;
      this[key].length = Math.min(this[key].length, news[key].since);
      for (const row of news[key].rows) this[key].push(row);
    }
    for (const key of ["name", "status", "kinds", "memberships", "outages", "detailed", "summary", "now", "total_steps", "epochs", "began",
      "other_version", "damaged", "unknown", "left_out", "frame_s"]) if (news[key] !== undefined) this[key] = news[key];
    this.read = news.read ?? 1;
    this.version += 1;
    this.sums = null;
  }

  get ended() { return !["waiting", "reading", "running", "healing"].includes(this.status); }
  get end() { return Math.max(this.points.at(-1)?.[1] ?? 0, this.log.at(-1)?.[0] ?? 0, this.frames.at(-1)?.[0] ?? 0, this.now?.at_s ?? 0); }

  // Idle and busy seconds and bytes up to each frame.
  soFar() {
    if (this.sums) return this.sums;
    let idle = 0, busy = 0, sent = 0;
    const servers = new Set((this.memberships.at(-1)?.members ?? []).filter((m) => m.role === "server").map((m) => m.node));
    const waits = this.kinds.map((kind) => kind.startsWith(IDLE));
    this.sums = this.frames.map(([, , nodes]) => {
      for (const [node, work, out] of nodes) {
        sent += out;
        if (servers.has(node)) continue;
        for (let i = 0; i < work.length; i += 2) { if (waits[work[i]]) idle += work[i + 1]; else busy += work[i + 1]; }
      }
      return { idle, busy, sent };
    });
    return this.sums;
  }

  at(moment) {
    const live = moment === Infinity;
    const frame = live ? this.frames.length - 1 : before(this.frames, moment, (each) => each[0]);
    const point = live ? this.points.at(-1) : this.points[before(this.points, moment, (each) => each[1])];
    const group = live ? this.memberships.at(-1) : this.memberships[Math.max(0, before(this.memberships, moment, (each) => each.at_s))];
    const out = new Set(this.outages.filter((each) => live ? each.to_s == null && !this.ended : each.from_s <= moment && (each.to_s ?? Infinity) > moment).map((each) => each.node));
    const whole = live && this.summary;
    const sums = this.soFar()[frame] ?? { idle: 0, busy: 0, sent: 0 };
    return {
      live, moment: live ? this.end : moment, point, frame, out, members: group?.members ?? [], groups: group?.groups ?? [], generation: group?.generation,
      step: live ? this.now?.step ?? 0 : point?.[0] ?? 0, loss: live ? this.now?.loss : point?.[2],
      test: live ? this.tests.at(-1) : this.tests[before(this.tests, moment, (each) => each[1])],
      speed: this.speed(live ? this.end : moment), ...this.share(frame),
      idle: whole ? idleOf(this.summary) : sums.busy + sums.idle ? sums.idle / (sums.busy + sums.idle) : null,
      sent: whole ? this.summary.bytes_total : sums.sent,
    };
  }

  // Samples per second in the steps of the last seconds.
  speed(moment) {
    let samples = 0, wall = 0;
    for (let i = before(this.points, moment, (each) => each[1]); i >= 0 && (wall === 0 || this.points[i][1] > moment - 5); i--) { samples += this.points[i][5]; wall += this.points[i][6]; }
    return wall ? samples / wall : null;
  }

  // What each node did in the last seconds before a frame's end, and what went over the links.
  share(frame) {
    const nodes = new Map(), links = new Map();
    if (frame < 0) return { nodes, links };
    const until = this.frames[frame][0];
    const told = new Map((this.summary?.per_node ?? []).map((each) => [each.node, each]));
    for (let i = frame; i >= 0 && (i === frame || this.frames[i][0] > until - WINDOW_S); i--) {
      for (const [node, work, sent, received, rss, to] of this.frames[i][2]) {
        let mine = nodes.get(node);
        if (!mine) nodes.set(node, (mine = { work: new Map(), total: 0, idle: 0, sent: 0, received: 0, rss: 0 }));
        for (let k = 0; k < work.length; k += 2) {
          const kind = this.kinds[work[k]], s = work[k + 1];
          mine.work.set(kind, (mine.work.get(kind) ?? 0) + s);
          mine.total += s;
          if (kind.startsWith(IDLE)) mine.idle += s;
        }
        mine.sent += sent; mine.received += received; mine.rss ||= rss;
        for (let k = 0; k < to.length; k += 2) if (!links.has(`${node}>${to[k]}`)) links.set(`${node}>${to[k]}`, to[k + 1]);
      }
    }
    const speakers = new Set([...links.keys()].map((key) => Number(key.split(">")[0])));
    for (const [node, mine] of nodes) {
      if (!mine.rss) mine.rss = this.lastMemory(node, frame) || told.get(node)?.peak_rss_bytes || 0;
      if (speakers.has(node) || !mine.total) continue;
      const to = Object.entries(told.get(node)?.sent_to ?? {}), all = to.reduce((sum, [, c]) => sum + c, 0);
      for (const [peer, c] of to) links.set(`${node}>${peer}`, (mine.sent / mine.total) * (c / all));
    }
    return { nodes, links };
  }

  lastMemory(node, frame) {
    for (let i = frame; i >= Math.max(0, frame - 40); i--) { const row = this.frames[i][2].find((each) => each[0] === node); if (row?.[4]) return row[4]; }
    return 0;
  }
}

// The other nodes that hold the same layers.
export const sharers = (view, node) => (view.groups.find((group) => group.includes(node)) ?? []).filter((each) => each !== node).map((each) => view.members.find((m) => m.node === each)?.name ?? `node ${each}`);

// "M-2-2-M": how many nodes hold each part of the model, beginning and ending at the master.
export const shape = (groups) => ["M", ...groups.map((group) => group.length), "M"].join("-");

// As ringtmp's own summary has it: dedicated servers are told of apart.
const idleOf = (summary) => {
  const nodes = summary.per_node.filter((each) => each.role !== "server"), busy = nodes.reduce((s, each) => s + each.busy_s, 0);
  const idle = nodes.reduce((s, each) => s + each.idle_s, 0);
  return busy + idle ? idle / (busy + idle) : null;
};

// The place of the last row that is not after a moment; -1: none.
export const before = (rows, moment, at) => {
  let low = 0, high = rows.length;
  while (low < high) { const middle = (low + high) >> 1; if (at(rows[middle]) <= moment) low = middle + 1; else high = middle; }
  return low - 1;
};
