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

/** Calls `draw` once in the next frame, however often it is asked for; never more often than every `leastMs`. */
export function perFrame(draw, leastMs = 0) {
  let asked = false;
  let last = -Infinity;
  const frame = (now) => {
    if (now - last < leastMs) return requestAnimationFrame(frame);
    asked = false;
    last = now;
    draw(now);
  };
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(frame);
  };
}
