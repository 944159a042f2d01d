// DOM helpers. Text is only ever set as text, never as markup, so displayed data cannot run.

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

/** Sets the text if it differs, to avoid a needless layout. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// All drawing waits in one queue, and each frame spends only a few milliseconds on it, so that the metrics, the tree and
// the stream are not drawn together in one long frame.
const FRAME_MS = 4;
const due = [];

function frame() {
  const begin = performance.now();
  do due.shift()();
  while (due.length && performance.now() - begin < FRAME_MS);
  if (due.length) requestAnimationFrame(frame);
}

/** Returns a function that schedules `draw` in one of the next frames, once per `leastMs` at most. */
export function perFrame(draw, leastMs = 0) {
  let scheduled = false;
  let last = -Infinity;
  const run = () => {
    scheduled = false;
    last = performance.now();
    draw();
  };
  const enter = () => due.push(run) === 1 && requestAnimationFrame(frame);
  return () => {
    if (scheduled) return;
    scheduled = true;
    const wait = last + leastMs - performance.now();
    if (wait > 0) setTimeout(enter, wait);
    else enter();
  };
}

/** A canvas that follows its displayed size without forcing a layout. `colour("--name")` is cached. */
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

  /** Clears the cached colours after a change of the theme. */
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
