// Where the stream is: live, paused, or replaying the log. Nothing is lost on the way from one to another.

import { Feed } from "./feed.js";
import { getJson, Refused } from "./http.js";
import { Replay } from "./replay.js";
import { EventRow, MarkRow } from "./ring.js";

export const WAITING_MAX = 5000; // rows kept while paused; beyond that they stay in the log until they are wanted
const RECENT = 100; // of the past, for a page that was just opened

export class Playback extends EventTarget {
  constructor(ring) {
    super();
    this.ring = ring;
    this.keys = ["**"];
    this.mode = "live";
    this.paused = false;
    this.waiting = [];
    this.cut = false; // while paused, more came than is kept: the rest is read from the log
    this.received = 0; // events shown since the stream began where it is
    this.position = 0; // the offset of the last one
    this.state = "connecting";
    this.detail = null;
    this.feed = new Feed("events", {
      onEvents: (events) => this.#take(events),
      onState: (state, detail) => this.#connection(state, detail),
    });
    this.replaying = new Replay({
      onEvents: (events) => this.#show(events.map(pastRow)),
      onEnd: (after) => this.#caughtUp(after),
      onState: (state, detail) => this.#connection(state, detail),
    });
  }

  /** From now on, with a little of the past. */
  live() {
    this.#reset("live");
    this.feed.start({ key: this.keys }, { prepare: (signal) => this.#recent(signal) });
  }

  /** Everything from an offset on, at the pace of the replay, and then live. */
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
    if (this.mode === "replay") this.replaying.hold();
    this.#changed();
  }

  resume() {
    if (!this.paused) return;
    this.paused = false;
    const waiting = this.waiting;
    this.waiting = [];
    this.#show(waiting);
    if (this.mode === "replay") this.replaying.goOn();
    else if (this.cut) this.feed.start({ key: this.keys }, { lastId: this.feed.lastId });
    this.cut = false;
    this.#changed();
  }

  #reset(mode) {
    this.feed.stop();
    this.replaying.stop();
    this.ring.clear();
    Object.assign(this, { mode, paused: false, waiting: [], cut: false, received: 0, position: 0 });
    this.#changed();
  }

  // The head is asked first: the past is what is not after it, the feed begins after it, and nothing falls between.
  async #recent(signal) {
    const { head } = await getJson("log", { key: this.keys, order: "desc", limit: 1 }, signal);
    const page = await getJson("log", { key: this.keys, order: "desc", limit: RECENT }, signal);
    const events = page.events.filter((event) => event.offset <= head).reverse();
    if (!signal.aborted) this.#show(events.map(pastRow));
    return String(head);
  }

  #take(events) {
    const rows = [];
    for (const { type, data, id } of events) {
      if (type === "message") rows.push(new EventRow(Number(id), data));
      else if (type === "gap") rows.push(gapRow(data));
    }
    if (!this.paused) return this.#show(rows);
    for (const row of rows) this.waiting.push(row);
    if (this.waiting.length >= WAITING_MAX) {
      this.feed.stop(); // it goes on after the last one that waits
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
    this.feed.start({ key: this.keys }, { lastId: String(after) });
    this.#changed();
  }

  #connection(state, detail) {
    if (state === "reconnecting") this.lost = true;
    if (state === "live" && this.lost) {
      this.lost = false;
      if (this.received) this.#show([new MarkRow(`Connected again, going on after ${this.position}`)]);
    }
    this.state = state;
    this.detail = detail instanceof Refused ? detail : null;
    this.#changed();
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

const pastRow = (event) => new EventRow(event.offset, null, event);

function gapRow(data) {
  const { after, until, reason } = JSON.parse(data);
  return new MarkRow(`Gap: what follows ${after} up to ${until} is not there any more. ${reason ?? ""}`, "warning");
}
