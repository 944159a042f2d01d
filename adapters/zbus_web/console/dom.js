// Elements without markup: text is only ever set as text, so nothing that is shown can be run.

/** `make("td", {class: "number", title: "…"}, "text", child, …)` */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Set text where it differs: what has not changed is not laid out again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// What is to be drawn waits in one line, and a frame takes from it for a few milliseconds only: a second's figures, the
// tree and the stream do not come together in one long frame.
const FRAME_MS = 4;
const due = [];

function frame() {
  const begin = performance.now();
  do due.shift()();
  while (due.length && performance.now() - begin < FRAME_MS);
  if (due.length) requestAnimationFrame(frame);
}

/** Calls `draw` in one of the next frames, once however often it is asked for, at most every `leastMs`. */
export function perFrame(draw, leastMs = 0) {
  let asked = false;
  let last = -Infinity;
  const run = () => {
    asked = false;
    last = performance.now();
    draw();
  };
  const enter = () => due.push(run) === 1 && requestAnimationFrame(frame);
  return () => {
    if (asked) return;
    asked = true;
    const wait = last + leastMs - performance.now();
    if (wait > 0) setTimeout(enter, wait);
    else enter();
  };
}

/** A canvas as large as it is shown: its pen and size, without asking for a layout. `colour("--name")` is read once. */
export class Surface {
  #colours = new Map();

  constructor(canvas, onChange) {
    this.canvas = canvas;
    this.width = this.height = 0;
    this.pen = canvas.getContext("2d");
    new ResizeObserver(([{ contentRect }]) => {
      this.width = Math.round(contentRect.width);
      this.height = Math.round(contentRect.height);
      const ratio = window.devicePixelRatio || 1;
      canvas.width = this.width * ratio;
      canvas.height = this.height * ratio;
      this.pen.scale(ratio, ratio);
      onChange();
    }).observe(canvas);
  }

  /** After a change of the theme. */
  forgetColours() {
    this.#colours.clear();
  }

  colour(name) {
    if (!this.#colours.has(name)) this.#colours.set(name, getComputedStyle(this.canvas).getPropertyValue(name).trim());
    return this.#colours.get(name);
  }

  clear() {
    this.pen.clearRect(0, 0, this.width, this.height);
    return this.width > 0 && this.height > 0;
  }
}
