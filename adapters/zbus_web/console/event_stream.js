// A stream of server-sent events that stays open. It reconnects after the last id that it received.

import { access, HttpError, open } from "./http.js";
import { SseParser } from "./sse.js";
import { firstOf, once, sleep } from "./waiting.js";

const WAIT_MS = [250, 500, 1000, 2000, 4000]; // Between attempts; the last value repeats.
const SILENT_MS = 60_000; // Several keep-alives are missing: the connection is dead.

export class EventStream {
  /** Calls `onEvents(list)` once for each chunk, and `onState(state, detail)` when the connection changes. */
  constructor(path, { onEvents, onState = () => {} }) {
    this.path = path;
    this.onEvents = onEvents;
    this.onState = onState;
    this.lastId = null;
    this.running = null;
  }

  /** Start again. If `lastId` is null, `prepare(signal)` returns the id to start after. */
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
        if (error instanceof HttpError && !error.transient) {
          this.onState(error.status === 401 ? "token" : "rejected", error);
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
    let lastChunkAt = performance.now();
    const watch = setInterval(() => performance.now() - lastChunkAt > SILENT_MS && end(), 5000);
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
        lastChunkAt = performance.now();
        this.#receive(parser.push(decoder.decode(value, { stream: true })));
      }
    } finally {
      clearInterval(watch);
      signal.removeEventListener("abort", end);
      end();
    }
  }

  #receive(events) {
    for (const event of events) if (event.id !== null) this.lastId = event.id;
    const withData = events.filter((event) => event.data !== null);
    if (withData.length) this.onEvents(withData);
  }
}
