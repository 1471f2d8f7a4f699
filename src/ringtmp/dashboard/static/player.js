// Replay: any moment of the run, at any speed. The end of the slider is the newest moment, and goes with it.

import { $, clock, make, say } from "./text.js";

const SPEEDS = [["1", "1×"], ["4", "4×"], ["20", "20×"], ["100", "100×"], ["fit", "all in 20 s"]];

export class Player {
  constructor(runs, changed) {
    this.runs = runs;
    this.changed = changed;
    this.moment = Infinity;
    this.playing = false;
    $("speed").append(...SPEEDS.map(([value, text]) => make("option", { value }, text)));
    $("speed").value = "fit";
    $("play").addEventListener("click", () => this.toggle());
    $("live").addEventListener("click", () => { this.playing = false; this.moment = Infinity; changed(); });
    $("slider").addEventListener("input", () => { const at = Number($("slider").value) / 1000; this.playing = false; this.moment = at >= 1 ? Infinity : at * this.end(); changed(); });
    addEventListener("keydown", (event) => { if (event.key === " " && event.target === document.body) { event.preventDefault(); this.toggle(); } });
  }

  end() { return Math.max(0, ...this.runs().map((each) => each.end)); }

  toggle() {
    this.playing = !this.playing;
    if (this.playing) {
      if (this.moment === Infinity) this.moment = 0;
      this.last = performance.now();
      requestAnimationFrame((now) => this.tick(now));
    }
    this.changed();
  }

  tick(now) {
    if (!this.playing) return;
    const speed = $("speed").value, pace = speed === "fit" ? Math.max(this.end(), 1) / 20 : Number(speed);
    this.moment += ((now - this.last) / 1000) * pace;
    this.last = now;
    if (this.moment >= this.end()) { this.moment = Infinity; this.playing = false; }
    this.changed();
    requestAnimationFrame((next) => this.tick(next));
  }

  draw() {
    const end = this.end(), at = this.moment === Infinity ? end : this.moment, slider = $("slider");
    const place = String(end ? Math.round((1000 * at) / end) : 1000);
    if (slider.value !== place && document.activeElement !== slider || this.playing || this.moment === Infinity) slider.value = place;
    const text = `${clock(at)} of ${clock(end)}`;
    say($("moment"), text);
    slider.setAttribute("aria-valuetext", text);
    say($("play").firstElementChild, this.playing ? "❚❚" : "▶");
    $("play").setAttribute("aria-label", this.playing ? "Pause" : "Play");
    const over = this.runs().every((each) => each.ended);
    say($("live"), over ? "End" : "Live");
    $("live").setAttribute("aria-pressed", String(this.moment === Infinity));
  }
}
