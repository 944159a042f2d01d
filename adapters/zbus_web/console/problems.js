// Gaps, drops and errors, as the server told of them; the newest first.

import { byId, make, setText } from "./dom.js";
import { count, moment, visible } from "./format.js";
import { getJson } from "./http.js";

const KEPT = 500;
const SHOWN = 200;
const OWN = new Set(["record", "level", "at", "time", "name", "correlation_id"]);

export class Problems {
  constructor() {
    this.list = byId("records");
    this.badge = byId("problems-badge");
    this.records = [];
    this.unseen = 0;
    this.looking = false;
  }

  async load() {
    try {
      const { records } = await getJson("api/records");
      this.records = records.slice(-KEPT);
      this.#draw();
    } catch {
      // The live feed brings what is new; the past stays with the server.
    }
  }

  add(records) {
    if (!records?.length) return;
    this.records = [...this.records, ...records].slice(-KEPT);
    if (!this.looking) this.unseen += records.length;
    this.#draw();
  }

  look(on) {
    this.looking = on;
    if (on) this.unseen = 0;
    this.#draw();
  }

  #draw() {
    this.badge.hidden = this.unseen === 0;
    setText(this.badge, count(this.unseen));
    if (!this.looking) return;
    const shown = this.records.slice(-SHOWN).reverse();
    this.list.replaceChildren(...shown.map(line));
    byId("records-none").hidden = this.records.length > 0;
  }
}

function line(record) {
  const level = String(record.level ?? "WARNING").toLowerCase();
  const fields = { ...record, ...(record.fields ?? {}) };
  const text = Object.entries(fields)
    .filter(([name]) => !OWN.has(name) && name !== "fields")
    .map(([name, value]) => `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`)
    .join("  ");
  return make(
    "li",
    { class: "record", "data-level": level === "warning" ? "warning" : "error" },
    make("time", {}, moment(record.at ?? record.time)),
    make("b", {}, visible(record.record ?? record.name ?? "")),
    make("span", {}, visible(text)),
  );
}
