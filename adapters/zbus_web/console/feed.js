// One feed of the server that stays open: it reconnects by itself, exactly after the last id that it saw.

import { access, open, Refused } from "./http.js";
import { SseParser } from "./sse.js";
import { firstOf, once, sleep } from "./waiting.js";

const WAIT_MS = [250, 500, 1000, 2000, 4000]; // between attempts; the last one again and again
const SILENT_MS = 60_000; // several keep-alives long: the connection is dead and nobody said so

export class Feed {
  /** `onEvents(list)` is called once for each chunk, `onState(state, detail)` when the connection changes. */
  constructor(path, { onEvents, onState = () => {} }) {
    this.path = path;
    this.onEvents = onEvents;
    this.onState = onState;
    this.lastId = null;
    this.running = null;
  }

  /** Begin anew. `prepare(signal)` is asked for the id to begin after where `lastId` is null. */
  start(query = {}, { lastId = null, prepare = null } = {}) {
    this.stop();
    this.lastId = lastId;
    this.query = query;
    this.prepare = prepare;
    this.running = new AbortController();
    this.#run(this.running.signal);
  }

  stop() {
    this.running?.abort();
    this.running = null;
  }

  async #run(signal) {
    let failures = 0;
    this.onState("connecting");
    while (!signal.aborted) {
      try {
        if (this.lastId === null && this.prepare) this.lastId = await this.prepare(signal);
        if (signal.aborted) return;
        await this.#read(signal, () => (failures = 0));
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Refused && !error.passing) {
          this.onState(error.status === 401 ? "token" : "refused", error);
          if (error.status !== 401) return;
          await once(access, "given", signal);
          continue;
        }
      }
      if (signal.aborted) return;
      const wait = WAIT_MS[Math.min(failures, WAIT_MS.length - 1)];
      failures += 1;
      this.onState("reconnecting", { attempt: failures });
      await firstOf(signal, (each) => sleep(wait, each), (each) => once(window, "online", each));
    }
  }

  async #read(signal, onOpen) {
    const headers = { Accept: "text/event-stream" };
    if (this.lastId !== null) headers["Last-Event-ID"] = this.lastId;
    const attempt = new AbortController();
    const end = () => attempt.abort();
    signal.addEventListener("abort", end);
    let heard = performance.now();
    const watch = setInterval(() => performance.now() - heard > SILENT_MS && end(), 5000);
    try {
      const response = await open(this.path, this.query, { headers, signal: attempt.signal });
      onOpen();
      this.onState("live");
      const reader = response.body.getReader();
      const decoder = new TextDecoder();
      const parser = new SseParser();
      for (;;) {
        const { done, value } = await reader.read();
        if (done || signal.aborted) return;
        heard = performance.now();
        this.#take(parser.push(decoder.decode(value, { stream: true })));
      }
    } finally {
      clearInterval(watch);
      signal.removeEventListener("abort", end);
      end();
    }
  }

  #take(events) {
    for (const event of events) if (event.id !== null) this.lastId = event.id;
    const told = events.filter((event) => event.data !== null);
    if (told.length) this.onEvents(told);
  }
}
