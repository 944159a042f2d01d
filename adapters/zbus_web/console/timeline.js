// The log as a timeline: its density, the position of the stream, and a scrubber that replays from any point.

import { byId, perFrame, setText, Surface } from "./dom.js";
import { count, moment } from "./format.js";
import { getJson } from "./http.js";

const POINTS = 33; // positions in the log whose times are loaded
const RELOAD_MS = 20_000;
const DRAW_MS = 250; // while events arrive

export class Timeline {
  constructor(playback) {
    this.playback = playback;
    this.scrubber = byId("scrubber");
    this.head = 0;
    this.lowest = 1;
    this.points = []; // {offset, at: ms}
    this.loadedAt = -Infinity;
    this.dragging = false;
    this.redraw = perFrame(() => this.#draw());
    const redrawSlowly = perFrame(() => this.#draw(), DRAW_MS);
    this.surface = new Surface(byId("timeline-density"), this.redraw);
    this.scrubber.addEventListener("input", () => this.#moving());
    this.scrubber.addEventListener("change", () => this.#replay(Number(this.scrubber.value)));
    byId("back-to-live").addEventListener("click", () => playback.live());
    byId("speed").addEventListener("change", () => this.#speed());
    byId("go-to").addEventListener("submit", (event) => this.#goTo(event));
    playback.addEventListener("change", this.redraw);
    playback.addEventListener("rows", redrawSlowly);
    this.#speed();
  }

  update(live) {
    this.head = live.stats?.log?.head ?? this.head;
    const grown = this.head > (this.points.at(-1)?.offset ?? 0);
    if (grown && performance.now() - this.loadedAt > RELOAD_MS) this.#load();
    this.redraw();
  }

  themed() {
    this.surface.forgetColours();
    this.redraw();
  }

  #speed() {
    const value = byId("speed").value;
    this.playback.replaying.speed = value === "max" ? Infinity : Number(value);
  }

  #moving() {
    this.dragging = true;
    this.redraw();
  }

  #replay(offset) {
    this.dragging = false;
    setText(byId("go-to-error"), "");
    this.playback.replay(offset);
  }

  /** Accepts an offset, a time or an age such as -10m. The server parses times. */
  async #goTo(event) {
    event.preventDefault();
    const wanted = byId("go-to-where").value.trim();
    if (!wanted) return;
    if (/^\d+$/.test(wanted)) return this.#replay(Number(wanted));
    try {
      const { events, head } = await getJson("log", { from: wanted, limit: 1 });
      this.#replay(events[0]?.offset ?? head + 1);
    } catch (error) {
      setText(byId("go-to-error"), error.message);
    }
  }

  async #load() {
    this.loadedAt = performance.now();
    const points = [];
    try {
      const first = await getJson("log", { limit: 1 });
      const lowest = first.events[0]?.offset ?? first.low_water + 1;
      const head = first.head;
      const step = Math.max(1, (head - lowest) / (POINTS - 1));
      for (let at = lowest; at <= head; at += step) points.push(await this.#point(Math.floor(at)));
      if (head > lowest) points.push(await this.#point(head));
      this.lowest = lowest;
    } catch {
      return; // The timeline stays as it was.
    }
    this.points = points.filter(Boolean);
    this.redraw();
  }

  async #point(offset) {
    const { events } = await getJson("log", { after: offset - 1, limit: 1 });
    return events.length ? { offset: events[0].offset, at: Date.parse(events[0].published_at) } : null;
  }

  /** Returns the approximate publish time of an offset, interpolated between two loaded points. */
  #timeOf(offset) {
    const after = this.points.findIndex((point) => point.offset >= offset);
    if (after < 0) return this.points.length ? Date.now() : NaN;
    const [one, two] = [this.points[Math.max(0, after - 1)], this.points[after]];
    const part = two.offset === one.offset ? 0 : (offset - one.offset) / (two.offset - one.offset);
    return one.at + part * (two.at - one.at);
  }

  #draw() {
    const { playback, scrubber } = this;
    const replaying = playback.mode === "replay";
    const position = this.dragging ? Number(scrubber.value) : replaying ? playback.position : this.head;
    scrubber.min = this.lowest;
    scrubber.max = Math.max(this.head, this.lowest, position);
    if (!this.dragging && document.activeElement !== scrubber) scrubber.value = position;
    else if (!this.dragging && replaying) scrubber.value = position;
    byId("back-to-live").hidden = !replaying;
    byId("timeline").classList.toggle("replaying", replaying || this.dragging);
    const time = moment(this.#timeOf(position));
    setText(byId("timeline-where"), this.#where(replaying, position, time));
    scrubber.setAttribute("aria-valuetext", `${count(position)} of ${count(this.head)}, ${time}`);
    this.#ends();
    this.#density(position);
  }

  #where(replaying, position, time) {
    if (this.dragging) return `Replay from ${count(position)}, ${time}`;
    if (replaying) return `Replaying: at ${count(position)} of ${count(this.head)}, ${time}`;
    return `Live: at the head, ${count(this.head)}`;
  }

  #ends() {
    const first = this.points[0];
    setText(byId("timeline-begin"), first ? `${count(first.offset)} · ${moment(first.at)}` : "");
    const middle = this.points.length > 2 ? Math.round((this.lowest + this.head) / 2) : null;
    setText(byId("timeline-middle"), middle ? moment(this.#timeOf(middle)) : "");
    setText(byId("timeline-end"), first ? "now" : "");
  }

  #density(position) {
    const { surface } = this;
    if (!surface.clear() || this.points.length < 2) return;
    const { pen, width, height } = surface;
    const [past, ahead] = [surface.colour("--series-1"), surface.colour("--axis")];
    const points = [...this.points, { offset: Math.max(this.head, this.points.at(-1).offset + 1), at: Date.now() }];
    const parts = points.slice(1).map((point, at) => this.#part(points[at], point));
    const most = Math.max(...parts.map((part) => part.perSecond));
    const x = (offset) => ((offset - this.lowest) / Math.max(1, this.head - this.lowest)) * width;
    for (const { from, to, perSecond } of parts) {
      const tall = Math.max(2, Math.sqrt(perSecond / most) * (height - 2));
      pen.fillStyle = from <= position ? past : ahead;
      pen.fillRect(x(from), height - tall, Math.max(1, x(to) - x(from) - 1), tall);
    }
  }

  #part(one, two) {
    const seconds = Math.max(0.001, (two.at - one.at) / 1000);
    return { from: one.offset, to: two.offset, perSecond: (two.offset - one.offset) / seconds };
  }
}
