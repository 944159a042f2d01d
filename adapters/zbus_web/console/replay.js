// Replay of the log from an offset, page by page, at the original speed or faster, until it has caught up.

import { access, getJson, HttpError } from "./http.js";
import { once, sleep } from "./waiting.js";

const PAGE = 500;
const STEP_MS = 50;
const QUIET_MS = 1000; // Longer pauses in the log are shortened to this.
const RETRY_MS = 1000;

export class Replay {
  speed = 10; // a factor of the original speed; Infinity: as fast as the log can be read

  constructor({ onEvents, onEnd, onState }) {
    Object.assign(this, { onEvents, onEnd, onState });
    this.running = null;
    this.pausing = null; // a promise while paused
  }

  start(keys, after) {
    this.stop();
    this.running = new AbortController();
    this.#run(keys, after, this.running.signal);
  }

  stop() {
    this.resume();
    this.running?.abort();
    this.running = null;
  }

  pause() {
    if (!this.pausing) this.pausing = new Promise((resolve) => (this.release = resolve));
  }

  resume() {
    this.release?.();
    this.pausing = this.release = null;
  }

  async #run(keys, after, signal) {
    this.onState("connecting");
    while (!signal.aborted) {
      let page;
      try {
        page = await getJson("log", { key: keys, after, limit: PAGE }, signal);
      } catch (error) {
        if (signal.aborted || !(await this.#canRetry(error, signal))) return;
        continue;
      }
      this.onState("live");
      if (!(await this.#play(page.events, signal))) return;
      const last = page.events.at(-1)?.offset ?? after;
      after = Math.max(last, page.next ?? 0);
      if (page.next === null) {
        await this.pausing;
        if (!signal.aborted) this.onEnd(Math.min(after, page.head));
        return;
      }
    }
  }

  async #canRetry(error, signal) {
    if (!(error instanceof HttpError) || error.transient) {
      this.onState("reconnecting");
      await sleep(RETRY_MS, signal);
      return true;
    }
    this.onState(error.status === 401 ? "token" : "rejected", error);
    if (error.status === 401) await once(access, "given", signal);
    return error.status === 401;
  }

  /** Emits the events of a page at their time. Returns false if the replay was stopped. */
  async #play(events, signal) {
    let begin = 0;
    while (begin < events.length) {
      await this.pausing;
      if (signal.aborted) return false;
      let end = begin + 1;
      let due = 0; // ms since the first event of this step
      while (end < events.length) {
        due += this.#gap(events[end - 1], events[end]);
        if (due > STEP_MS) break;
        end += 1;
      }
      this.onEvents(events.slice(begin, end));
      if (due > 0) await sleep(Math.min(Math.max(due, STEP_MS), QUIET_MS), signal);
      begin = end;
    }
    return !signal.aborted;
  }

  #gap(one, next) {
    if (!Number.isFinite(this.speed)) return 0;
    const past = Date.parse(next.published_at) - Date.parse(one.published_at);
    return Math.min(Math.max(past, 0) / this.speed, QUIET_MS);
  }
}
