// Numbers as people write them, as ringtmp/units.py has it, and how elements are made.

export const bytes = (count) => {
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(count) < 1024 || unit === "TiB") return unit === "B" ? `${Math.round(count)} B` : `${count.toFixed(1)} ${unit}`;
    count /= 1024;
  }
};

export const rate = (perSecond) => `${bytes(perSecond)}/s`;

export const seconds = (s) => {
  if (!(s > 0)) return "0 s";
  if (s < 1e-3) return `${Math.round(s * 1e6)} µs`;
  if (s < 1) return `${(s * 1e3).toFixed(1)} ms`;
  if (s < 60) return `${s.toFixed(1)} s`;
  const m = Math.floor(Math.round(s) / 60);
  if (m < 60) return `${m} min ${Math.round(s) % 60} s`;
  return `${Math.floor(m / 60)} h ${m % 60} min`;
};

export const clock = (s) => {
  const whole = Math.max(0, Math.floor(s)), h = Math.floor(whole / 3600), m = Math.floor(whole / 60) % 60;
  const two = (n) => String(n).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(whole % 60)}` : `${m}:${two(whole % 60)}`;
};

export const count = (n) => {
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(n) >= limit) return `${(n / limit).toFixed(2)}${unit}`;
  return n >= 100 || Number.isInteger(n) ? n.toFixed(0) : n.toPrecision(3);
};

export const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;
export const joules = (j) => (j >= 1e4 ? `${(j / 1e3).toFixed(1)} kJ` : `${j >= 100 ? j.toFixed(0) : j.toPrecision(3)} J`);
export const loss = (value) => (Math.abs(value) >= 1000 ? value.toPrecision(4) : value.toFixed(4));

export const $ = (id) => document.getElementById(id);

export const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

export const svg = (tag, attributes = {}, ...children) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

// Written only when it is another: what stays is not laid out again.
export const say = (element, text) => { if (element.textContent !== text) element.textContent = text; };

// Asked of the browser once: it would work out the style of the whole page each time.
const colours = new Map();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => colours.clear());
export const colour = (name) => {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
};
