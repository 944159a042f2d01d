// Cursors of durable subscriptions. A reset shows which events will be delivered again or skipped, and asks first.

import { byId, make, setText } from "./dom.js";
import { age, count, visible } from "./format.js";
import { sendJson } from "./http.js";
import { Table } from "./tables.js";

export class Cursors {
  constructor() {
    this.dialog = byId("reset");
    this.offset = byId("reset-offset");
    this.head = 0;
    this.lowWater = 0;
    const columns = [
      { name: "name", label: "Name", text: (row) => visible(row.name) },
      { name: "keys", label: "Keys", text: (row) => visible([row.keys ?? []].flat().join(", ") || "–") },
      { name: "offset", label: "Offset", number: true },
      { name: "lag", label: "Lag", number: true, level: (row) => (row.lag > 0 ? "warning" : "") },
      { name: "updated_at", label: "Moved", text: (row) => (row.updated_at ? age(row.updated_at) : "–") },
      { name: "owner", label: "Read by", text: (row) => row.owner ?? "–" },
      { name: "reset", label: "Reset", element: (row) => this.#button(row) },
    ];
    const empty = "No cursors. A subscription with durable=“…” creates one.";
    this.table = new Table(byId("cursor-table"), columns, { empty, sortBy: "lag" });
    this.offset.addEventListener("input", () => this.#showEffect());
    byId("reset-beginning").addEventListener("click", () => this.#set(this.lowWater ? this.lowWater - 1 : 0));
    byId("reset-head").addEventListener("click", () => this.#set(this.head));
    byId("reset-cancel").addEventListener("click", () => this.dialog.close());
    byId("reset-form").addEventListener("submit", (event) => this.#submit(event));
  }

  update(live) {
    this.head = live.stats?.log?.head ?? this.head;
    this.last = live.cursors ?? [];
    if (this.visible) this.table.update(this.last);
  }

  setVisible(on) {
    this.visible = on;
    if (on) this.table.update(this.last ?? []);
  }

  #button(row) {
    const open = () => this.#open(row());
    return make("button", { type: "button", class: "small", onclick: open }, "Reset…");
  }

  #open(cursor) {
    this.cursor = cursor;
    setText(byId("reset-name"), visible(cursor.name));
    setText(byId("reset-now"), count(cursor.offset));
    const reader = cursor.owner ? `${cursor.owner} is reading it now, and may have to stop first.` : "";
    setText(byId("reset-reader"), reader);
    setText(byId("reset-error"), "");
    this.dialog.showModal();
    this.#set(this.lowWater ? this.lowWater - 1 : 0);
    this.offset.focus();
  }

  #set(offset) {
    this.offset.value = offset;
    this.#showEffect();
  }

  #showEffect() {
    const text = this.offset.value.trim();
    const offset = Number(text);
    const valid = /^\d+$/.test(text) && offset <= this.head;
    byId("reset-confirm").disabled = !valid || offset === this.cursor.offset;
    const effect = valid ? this.#effect(offset) : `The offset must be a whole number from 0 to ${count(this.head)}.`;
    setText(byId("reset-effect"), effect);
    byId("reset-effect").dataset.level = valid && offset > this.cursor.offset ? "error" : "";
  }

  #effect(offset) {
    const events = Math.abs(offset - this.cursor.offset);
    const of = events === 1 ? "1 event" : `up to ${count(events)} events`;
    if (events === 0) return "No change: the cursor is already at this offset.";
    if (offset < this.cursor.offset) return `${of[0].toUpperCase()}${of.slice(1)} will be delivered again.`;
    return `${of[0].toUpperCase()}${of.slice(1)} will be skipped and never delivered to this subscription.`;
  }

  async #submit(event) {
    event.preventDefault();
    byId("reset-confirm").disabled = true;
    try {
      const path = `api/cursors/${encodeURIComponent(this.cursor.name)}/reset`;
      await sendJson("POST", path, { offset: Number(this.offset.value) });
      this.dialog.close();
    } catch (error) {
      setText(byId("reset-error"), [error.message, error.state].filter(Boolean).join(". "));
      byId("reset-confirm").disabled = false;
    }
  }
}
