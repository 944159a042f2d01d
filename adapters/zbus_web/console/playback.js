// The state of the stream: live, paused, or replaying the log. No event is lost in a transition.

import { EventStream } from "./event_stream.js";
import { getJson, HttpError } from "./http.js";
import { Replay } from "./replay.js";
import { EventRow, MarkRow } from "./ring.js";

export const WAITING_MAX = 5000; // Rows kept while paused. Later events are read from the log on resume.
const RECENT = 100; // past events for a page that was just opened

export class Playback extends EventTarget {
  constructor(ring) {
    super();
    this.ring = ring;
    this.keys = ["**"];
    this.mode = "live";
    this.paused = false;
    this.waiting = [];
    this.cut = false; // More than WAITING_MAX events arrived while paused: the rest is read from the log.
    this.received = 0; // events shown since the last start
    this.position = 0; // the offset of the last event shown
    this.state = "connecting";
    this.detail = null;
    this.eventStream = new EventStream("events", {
      onEvents: (events) => this.#receive(events),
      onState: (state, detail) => this.#connection(state, detail),
    });
    this.replaying = new Replay({
      onEvents: (events) => this.#show(events.map(pastRow)),
      onEnd: (after) => this.#caughtUp(after),
      onState: (state, detail) => this.#connection(state, detail),
    });
  }

  /** Shows the latest events, and then live events. */
  live() {
    this.#reset("live");
    this.eventStream.start({ key: this.keys }, { prepare: (signal) => this.#recent(signal) });
  }

  /** Replays from an offset, at the speed of the replay, and then shows live events. */
  replay(offset) {
    this.#reset("replay");
    this.position = Math.max(0, offset - 1);
    this.replaying.start(this.keys, this.position);
  }

  filter(keys) {
    this.keys = keys.length ? keys : ["**"];
    if (this.mode === "replay") this.replay(this.position + 1);
    else this.live();
  }

  pause() {
    if (this.paused) return;
    this.paused = true;
    if (this.mode === "replay") this.replaying.pause();
    this.#changed();
  }

  resume() {
    if (!this.paused) return;
    this.paused = false;
    const waiting = this.waiting;
    this.waiting = [];
    this.#show(waiting);
    if (this.mode === "replay") this.replaying.resume();
    else if (this.cut) this.eventStream.start({ key: this.keys }, { lastId: this.eventStream.lastId });
    this.cut = false;
    this.#changed();
  }

  #reset(mode) {
    this.eventStream.stop();
    this.replaying.stop();
    this.ring.clear();
    Object.assign(this, { mode, paused: false, waiting: [], cut: false, received: 0, position: 0 });
    this.#changed();
  }

  // The head is read first: past events are up to it, and the stream starts after it, so no event is missed.
  async #recent(signal) {
    const { head } = await getJson("log", { key: this.keys, order: "desc", limit: 1 }, signal);
    const page = await getJson("log", { key: this.keys, order: "desc", limit: RECENT }, signal);
    const events = page.events.filter((event) => event.offset <= head).reverse();
    if (!signal.aborted) this.#show(events.map(pastRow));
    return String(head);
  }

  #receive(events) {
    const shown = events.filter(({ type }) => type === "message" || type === "gap");
    if (!this.paused) return this.#show(shown.map(row));
    const kept = shown.slice(0, WAITING_MAX - this.waiting.length);
    for (const event of kept) this.waiting.push(row(event));
    if (kept.length && this.waiting.length === WAITING_MAX) {
      this.eventStream.stop();
      this.eventStream.lastId = kept.at(-1).id; // On resume it continues after the last event that waits.
      this.cut = true;
    }
    this.#changed();
  }

  #show(rows) {
    if (!rows.length) return;
    for (const row of rows) {
      this.ring.append(row);
      if (row instanceof EventRow) this.received += 1;
    }
    const last = rows[rows.length - 1];
    if (last instanceof EventRow) this.position = last.offset;
    this.dispatchEvent(new Event("rows"));
  }

  #caughtUp(after) {
    this.mode = "live";
    this.eventStream.start({ key: this.keys }, { lastId: String(after) });
    this.#changed();
  }

  #connection(state, detail) {
    if (state === "reconnecting") this.lost = true;
    if (state === "live" && this.lost) {
      this.lost = false;
      if (this.received) this.#show([new MarkRow(`Reconnected, continuing after ${this.position}`)]);
    }
    this.state = state;
    this.detail = detail instanceof HttpError ? detail : null;
    this.#changed();
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

const row = ({ type, data, id }) => (type === "gap" ? gapRow(data) : new EventRow(Number(id), data));
const pastRow = (event) => new EventRow(event.offset, null, event);

function gapRow(data) {
  const { after, until, reason } = JSON.parse(data);
  return new MarkRow(`Gap: the events after ${after} up to ${until} are no longer available. ${reason ?? ""}`, "warning");
}
