// The participants: nodes, publishers and subscriptions, with their queued and dropped events.

import { byId } from "./dom.js";
import { age, visible } from "./format.js";
import { getJson } from "./http.js";
import { Table } from "./tables.js";

const EVERY_MS = 3000; // The live stream has no publishers: they are requested while the panel is visible.

const ifAny = (level) => (name) => (row) => (row[name] > 0 ? level : "");
const warn = ifAny("warning");
const bad = ifAny("error");

export class Participants {
  constructor() {
    this.nodes = new Table(byId("nodes"), NODES, { empty: "No nodes.", sortBy: "name", descending: false });
    const none = "No publishers yet.";
    this.publishers = new Table(byId("publishers"), PUBLISHERS, { empty: none, sortBy: "events" });
    this.subscriptions = new Table(byId("subscriptions"), SUBSCRIPTIONS, { empty: "No subscriptions.", sortBy: "lag" });
  }

  update(live) {
    this.last = live;
    if (!this.timer) return; // The panel is not visible.
    this.nodes.update(live.nodes ?? []);
    this.subscriptions.update(live.subscriptions ?? []);
  }

  /** Called when the panel is shown or hidden. */
  setVisible(on) {
    clearInterval(this.timer);
    this.timer = on ? setInterval(() => this.#load(), EVERY_MS) : null;
    if (!on) return;
    this.update(this.last ?? {});
    this.#load();
  }

  async #load() {
    try {
      this.publishers.update((await getJson("api/publishers")).publishers ?? []);
    } catch {
      // The streams show that the server is unreachable; the next interval retries.
    }
  }
}

const joined = (value) => visible(Array.isArray(value) ? value.join(", ") : (value ?? "–"));

const NODES = [
  { name: "name", label: "Node", text: (row) => visible(row.name || row.id) },
  { name: "is_self", label: "State", text: state, level: (row) => (row.alive ? "" : "warning"), sort: state },
  { name: "host", label: "Host", text: (row) => visible(row.host) },
  { name: "pid", label: "Process", number: true, text: (row) => String(row.pid) },
  { name: "transport", label: "Seen over", text: seenOver },
  { name: "version", label: "Version", text: (row) => visible(row.version) },
  { name: "started_at", label: "Started", text: (row) => age(row.started_at) },
];

function seenOver(row) {
  return visible(row.is_self ? "–" : `${row.transport}, ${row.trust}`);
}

function state(row) {
  if (row.is_self) return "this node";
  return row.alive ? "alive" : "gone";
}

const PUBLISHERS = [
  { name: "key", label: "Key", text: (row) => visible(row.key) },
  { name: "id", label: "Publisher", text: (row) => visible(row.id) },
  { name: "sequence", label: "Sequence", number: true },
  { name: "events", label: "Events", number: true },
  { name: "last_at", label: "Last", text: (row) => age(row.last_at) },
];

const source = (row) => (row.live ? "live" : "log");

const SUBSCRIPTIONS = [
  { name: "key_exprs", label: "Keys", text: (row) => joined(row.key_exprs), sort: (row) => joined(row.key_exprs) },
  { name: "durable", label: "Durable", text: (row) => visible(row.durable || "–") },
  { name: "live", label: "Source", text: source, level: (row) => (row.live ? "" : "warning") },
  { name: "queued", label: "Queued", number: true },
  { name: "lag", label: "Lag", number: true, level: warn("lag") },
  { name: "dropped", label: "Dropped", number: true, level: bad("dropped") },
  { name: "overflow", label: "Overflow", text: (row) => visible(row.overflow ?? "–") },
];
