// The rows of the stream. Only visible rows are in the page, and they are drawn a few times a second.

import { make, perFrame, setText } from "./dom.js";
import { bytes, timeOfDay, visible } from "./format.js";
import { MarkRow } from "./ring.js";

const PREVIEW_CHARACTERS = 240;
const DRAW_MS = 125; // Faster than people read.
const NARROW = window.matchMedia("(max-width: 760px)");

export class StreamView extends EventTarget {
  constructor(viewport, ring) {
    super();
    this.viewport = viewport;
    this.ring = ring;
    this.selected = null;
    this.drawnTotal = 0;
    this.pool = [];
    this.spacer = make("div", { class: "stream-spacer", role: "presentation" });
    this.window = make("div", { class: "stream-window", role: "presentation" });
    this.spacer.append(this.window);
    viewport.append(this.spacer);
    this.redraw = perFrame(() => this.#draw(), DRAW_MS);
    this.redrawNow = perFrame(() => this.#draw());
    this.top = 0; // From the last scroll event: reading scrollTop would force a layout.
    viewport.addEventListener("scroll", () => ((this.top = viewport.scrollTop), this.redrawNow()), { passive: true });
    viewport.addEventListener("keydown", (event) => this.#key(event));
    // The row under the pointer when it is pressed: a busy stream moves before it is released.
    this.window.addEventListener("pointerdown", (event) => isMouse(event) && event.button === 0 && this.#press(event));
    this.window.addEventListener("click", (event) => !isMouse(event) && this.#press(event));
    new ResizeObserver(() => this.#resized()).observe(viewport);
    NARROW.addEventListener("change", () => this.#resized());
    this.#resized();
  }

  /** Whether the newest row is visible, so that the view follows the stream. */
  get following() {
    return this.top < this.rowHeight;
  }

  toNewest() {
    this.#scrollTo(0);
    this.redrawNow();
  }

  select(row) {
    this.selected = row;
    this.redrawNow();
    this.dispatchEvent(new CustomEvent("select", { detail: row }));
  }

  /** Moves the selection. Older events have a larger index. */
  move(by) {
    const at = this.selected ? this.ring.indexOf(this.selected) : -1;
    let index = at < 0 ? Math.floor(this.top / this.rowHeight) : at + by;
    index = Math.max(0, Math.min(this.ring.size - 1, index));
    while (this.ring.at(index) instanceof MarkRow && this.ring.at(index + Math.sign(by))) index += Math.sign(by) || 1;
    const row = this.ring.at(index);
    if (!row || row instanceof MarkRow) return;
    const top = index * this.rowHeight;
    if (top < this.top) this.#scrollTo(top);
    const below = top + this.rowHeight - this.height;
    if (below > this.top) this.#scrollTo(below);
    this.select(row);
  }

  #resized() {
    this.height = this.viewport.clientHeight;
    this.rowHeight = NARROW.matches ? 46 : 25;
    this.redrawNow();
  }

  #key(event) {
    const steps = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1, PageDown: 20, PageUp: -20 };
    if (event.key in steps) this.move(steps[event.key]);
    else if (event.key === "Home") this.toNewest();
    else if (event.key === "Enter" && !this.selected) this.move(0);
    else if (event.key === "Enter") this.dispatchEvent(new CustomEvent("open", { detail: this.selected }));
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #press(event) {
    const shown = this.pool.find((each) => each.element.contains(event.target));
    if (shown?.row && !(shown.row instanceof MarkRow)) {
      this.select(shown.row);
      this.dispatchEvent(new CustomEvent("open", { detail: shown.row }));
    }
  }

  #scrollTo(top) {
    this.viewport.scrollTop = top;
    this.top = Math.max(0, Math.min(top, this.ring.size * this.rowHeight - this.height));
  }

  #draw() {
    const { ring, rowHeight, viewport } = this;
    const added = Math.max(0, ring.total - this.drawnTotal);
    const tall = `${ring.size * rowHeight}px`;
    this.drawnTotal = ring.total;
    if (this.spacer.style.height !== tall) this.spacer.style.height = tall;
    // If the operator has scrolled away, the rows in view stay in place while newer rows are added above.
    if (added && !this.following) this.#scrollTo(this.top + added * rowHeight);
    const first = Math.max(0, Math.floor(this.top / rowHeight) - 1);
    const shown = Math.max(0, Math.min(ring.size - first, Math.ceil(this.height / rowHeight) + 3));
    while (this.pool.length < shown) this.pool.push(this.#slot());
    const moved = `translateY(${first * rowHeight}px)`;
    if (this.window.style.transform !== moved) this.window.style.transform = moved;
    this.pool.forEach((slot, at) => fill(slot, at < shown ? ring.at(first + at) : null, this.selected));
    const active = this.pool.find((slot) => slot.row && slot.row === this.selected);
    if (active) viewport.setAttribute("aria-activedescendant", active.element.id);
    else viewport.removeAttribute("aria-activedescendant");
  }

  #slot() {
    const cell = (name) => [name, make("span", { class: `c-${name}` })];
    const cells = Object.fromEntries(["time", "offset", "key", "text", "size"].map(cell));
    const attributes = { class: "row", role: "option", id: `row-${this.pool.length}` };
    const element = make("div", attributes, ...Object.values(cells));
    this.window.append(element);
    return { element, cells, row: null };
  }
}

const isMouse = (event) => event.pointerType === "mouse";

function fill(slot, row, selected) {
  const { element, cells } = slot;
  if (slot.row !== row) {
    slot.row = row;
    element.hidden = !row;
    if (!row) return;
    const mark = row instanceof MarkRow;
    element.className = mark ? `row mark ${row.level}` : "row";
    if (mark) fillMark(cells, row);
    else fillEvent(cells, row.event);
  }
  const chosen = String(row === selected);
  if (row && element.ariaSelected !== chosen) element.ariaSelected = chosen;
}

function fillMark(cells, row) {
  for (const cell of Object.values(cells)) setText(cell, "");
  setText(cells.text, row.mark);
}

function fillEvent(cells, event) {
  setText(cells.time, timeOfDay(event.published_at));
  setText(cells.offset, String(event.offset));
  setText(cells.key, visible(event.key));
  const { payload } = event;
  if (payload === undefined) {
    setText(cells.text, `base64 ${event.payload_base64.slice(0, PREVIEW_CHARACTERS)}`);
    setText(cells.size, bytes(Math.floor((event.payload_base64.length * 3) / 4)));
  } else {
    setText(cells.text, visible(payload.slice(0, PREVIEW_CHARACTERS)));
    setText(cells.size, bytes(payload.length));
  }
}
