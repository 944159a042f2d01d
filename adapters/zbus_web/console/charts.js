// Line charts of the last minutes on a canvas, with axes, and the values under the pointer.

import { byId, make, perFrame, setText, Surface } from "./dom.js";

const SAMPLES = 300; // one per second
const LEFT = 46;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 20;

/** `series`: `[{name, label, colour: "--series-1", dashed, wide}]`; `scale` maps values to heights and ticks. */
export class LineChart {
  constructor(id, series, format, scale = linear) {
    this.canvas = byId(id);
    this.series = series;
    this.format = format;
    this.scaleOf = scale;
    this.samples = [];
    this.hover = null; // an index into samples
    this.legend = byId(`${id}-legend`);
    this.values = new Map(series.map((each) => [each.name, this.#entry(each)]));
    this.when = make("span", { class: "legend-when" });
    this.legend.append(this.when);
    this.redraw = perFrame(() => this.#draw());
    this.surface = new Surface(this.canvas, this.redraw);
    this.font = `11px ${getComputedStyle(this.canvas).fontFamily}`;
    this.canvas.addEventListener("pointermove", (event) => this.#point(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => this.#show(null));
    this.canvas.addEventListener("blur", () => this.#show(null));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  add(at, values) {
    this.samples.push({ at, values });
    if (this.samples.length > SAMPLES) {
      this.samples.shift();
      if (this.hover) this.hover -= 1;
    }
    this.redraw();
  }

  themed() {
    this.surface.forgetColours();
    this.redraw();
  }

  #entry(each) {
    const swatch = make("span", { class: `swatch${each.dashed ? " dashed" : ""}` });
    swatch.style.setProperty("--colour", `var(${each.colour})`);
    const value = make("b", {}, "–");
    this.legend.append(make("span", { class: "legend-entry" }, swatch, each.label, value));
    return value;
  }

  #point(x) {
    if (this.samples.length < 2) return;
    const at = this.begin + ((x - LEFT) / (this.width - LEFT - RIGHT)) * (this.end - this.begin);
    let best = 0;
    this.samples.forEach((sample, index) => {
      if (Math.abs(sample.at - at) < Math.abs(this.samples[best].at - at)) best = index;
    });
    this.#show(best);
  }

  #key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.samples.length) return;
    event.preventDefault();
    const last = this.samples.length - 1;
    this.#show(Math.max(0, Math.min(last, (this.hover ?? last) + step)));
  }

  #show(index) {
    this.hover = index;
    this.redraw();
  }

  #draw() {
    const { surface } = this;
    if (!surface.clear()) return;
    const { pen } = surface;
    this.width = surface.width;
    this.height = surface.height;
    pen.font = this.font;
    this.end = this.samples.at(-1)?.at ?? Date.now();
    this.begin = Math.min(this.samples[0]?.at ?? this.end, this.end - 60_000);
    this.scale = this.scaleOf(this.samples.flatMap((sample) => Object.values(sample.values).filter(Number.isFinite)));
    this.#axes(pen);
    for (const each of [...this.series].reverse()) this.#line(pen, each);
    this.#cross(pen);
    this.#showValues();
  }

  #x = (at) => LEFT + ((at - this.begin) / (this.end - this.begin)) * (this.width - LEFT - RIGHT);
  #y = (value) => TOP + (1 - this.scale.part(value)) * (this.height - TOP - BOTTOM);
  #colour = (name) => this.surface.colour(name);

  #axes(pen) {
    pen.lineWidth = 1;
    pen.textBaseline = "middle";
    for (const value of this.scale.ticks) {
      const y = Math.round(this.#y(value)) + 0.5;
      pen.strokeStyle = this.#colour(value === this.scale.ticks[0] ? "--axis" : "--grid");
      stroke(pen, [[LEFT, y], [this.width - RIGHT, y]]);
      pen.fillStyle = this.#colour("--muted");
      pen.textAlign = "right";
      pen.fillText(this.format(value, true), LEFT - 6, y);
    }
    const span = (this.end - this.begin) / 1000;
    const every = [15, 30, 60, 120].find((each) => span / each <= 6) ?? 120;
    pen.textBaseline = "alphabetic";
    for (let back = 0; back <= span; back += every) {
      const x = this.#x(this.end - back * 1000);
      pen.textAlign = back ? (x < LEFT + 14 ? "left" : "center") : "right";
      pen.fillText(back ? (back % 60 ? `−${back} s` : `−${back / 60} min`) : "now", x, this.height - 5);
    }
  }

  #line(pen, { name, colour, dashed, wide }) {
    pen.strokeStyle = this.#colour(colour);
    pen.lineWidth = (dashed ? 1.5 : 2) * (wide ? 1.8 : 1); // A line below another one stays visible.
    pen.lineJoin = "round";
    pen.setLineDash(dashed ? [4, 3] : []);
    let part = [];
    for (const { at, values } of [...this.samples, { at: 0, values: {} }]) {
      if (Number.isFinite(values[name])) part.push([this.#x(at), this.#y(values[name])]);
      else if (part.length) {
        stroke(pen, part); // A gap in the data is a gap in the line.
        part = [];
      }
    }
    pen.setLineDash([]);
  }

  #cross(pen) {
    const sample = this.samples[this.hover];
    if (!sample) return;
    const x = Math.round(this.#x(sample.at)) + 0.5;
    pen.strokeStyle = this.#colour("--axis");
    pen.lineWidth = 1;
    stroke(pen, [[x, TOP], [x, this.height - BOTTOM]]);
    for (const { name, colour } of this.series) {
      if (!Number.isFinite(sample.values[name])) continue;
      pen.fillStyle = this.#colour(colour);
      pen.beginPath();
      pen.arc(x, this.#y(sample.values[name]), 3.5, 0, 2 * Math.PI);
      pen.fill();
    }
  }

  #showValues() {
    const sample = this.samples[this.hover] ?? this.samples.at(-1);
    for (const [name, element] of this.values) setText(element, this.format(sample?.values[name] ?? NaN));
    const hovering = this.hover !== null && sample;
    setText(this.when, hovering ? new Date(sample.at).toLocaleTimeString("en-GB") : "");
    const texts = this.series.map(({ name, label }) => `${label} ${this.format(sample?.values[name] ?? NaN)}`);
    this.canvas.setAttribute("aria-label", `${this.canvas.dataset.title}: ${texts.join(", ")}`);
  }
}

function stroke(pen, points) {
  pen.beginPath();
  points.forEach(([x, y], at) => (at ? pen.lineTo(x, y) : pen.moveTo(x, y)));
  pen.stroke();
}

const ROUND = [1, 1.2, 1.6, 2, 2.4, 2.8, 3.2, 4, 5, 6, 8, 10];

/** A scale from zero to the next round number above all values, with four equal steps. */
export function linear(values) {
  const most = Math.max(...values, 0) * 1.02 || 1;
  const power = 10 ** Math.floor(Math.log10(most));
  const top = power * ROUND.find((each) => each * power >= most);
  return { part: (value) => value / top, ticks: [0, 1, 2, 3, 4].map((step) => (top * step) / 4) };
}

/** A scale of whole powers of ten around all values, so that a median is legible beside the maximum. */
export function logarithmic(values) {
  const above = values.filter((value) => value > 0);
  const low = above.length ? Math.floor(Math.log10(Math.min(...above))) : 0;
  const high = Math.max(low + 1, above.length ? Math.ceil(Math.log10(Math.max(...above))) : 2);
  const ticks = Array.from({ length: high - low + 1 }, (_, at) => 10 ** (low + at));
  return { part: (value) => Math.max(0, (Math.log10(Math.max(value, 1e-9)) - low) / (high - low)), ticks };
}
