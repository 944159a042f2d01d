// Log records of gaps, drops and errors, the newest first.

import { byId, make, setText } from "./dom.js";
import { count, moment, visible } from "./format.js";
import { getJson } from "./http.js";

const KEPT = 500;
const SHOWN = 200;
const OWN = new Set(["id", "at", "level", "record", "correlation_id"]);

export class Problems {
  constructor() {
    this.list = byId("records");
    this.badge = byId("problems-badge");
    this.records = [];
    this.unseen = 0;
    this.visible = false;
  }

  /** Loads the log records of a server after connecting, and merges those that arrive in the meantime. */
  async load() {
    this.records = [];
    try {
      const { log_records: records } = await getJson("api/log-records");
      this.records = [...records, ...this.#unknown(this.records, records)].slice(-KEPT);
      this.#draw();
    } catch {
      // The live stream has new records; earlier ones are not shown.
    }
  }

  add(records) {
    if (!records?.length) return;
    this.records = [...this.records, ...this.#unknown(records, this.records)].slice(-KEPT);
    if (!this.visible) this.unseen += records.length;
    this.#draw();
  }

  #unknown(records, among) {
    const known = new Set(among.map((record) => record.id));
    return records.filter((record) => !known.has(record.id));
  }

  setVisible(on) {
    this.visible = on;
    if (on) this.unseen = 0;
    this.#draw();
  }

  #draw() {
    this.badge.hidden = this.unseen === 0;
    setText(this.badge, count(this.unseen));
    if (!this.visible) return;
    const shown = this.records.slice(-SHOWN).reverse();
    this.list.replaceChildren(...shown.map(line));
    byId("records-none").hidden = this.records.length > 0;
  }
}

function line(record) {
  const text = Object.entries(record)
    .filter(([name]) => !OWN.has(name))
    .map(([name, value]) => `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`)
    .join("  ");
  return make(
    "li",
    { class: "record", "data-level": record.level === "WARNING" ? "warning" : "error" },
    make("time", { title: record.at }, moment(record.at)),
    make("b", {}, visible(record.record)),
    make("span", {}, visible(text)),
  );
}
