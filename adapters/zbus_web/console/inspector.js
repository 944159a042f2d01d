// One event in full: its payload formatted, raw and in hex, its headers and its identity.

import { byId, make, setText } from "./dom.js";
import { base64Bytes, bytes, moment, visible } from "./format.js";
import { hexLines, plain, spans, tokens } from "./pretty.js";
import { Tabs } from "./tabs.js";

const SHOWN_CHARACTERS = 64_000; // Shown of a payload; the copy has all of it.
const SHOWN_BYTES = 4096;

export class Inspector {
  constructor({ onClose, onFilter }) {
    this.element = byId("inspector");
    this.body = byId("inspector-body");
    this.event = null;
    this.tabs = new Tabs(byId("inspector-tabs"), () => this.#draw());
    this.onClose = onClose;
    byId("inspector-close").addEventListener("click", () => this.close());
    byId("inspector-copy").addEventListener("click", () => this.copy());
    byId("inspector-key").addEventListener("click", () => this.event && onFilter(this.event.key));
    this.element.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.close();
    });
  }

  show(event) {
    this.event = event;
    this.element.hidden = false;
    document.body.classList.add("inspecting");
    setText(byId("inspector-key"), visible(event.key));
    setText(byId("inspector-offset"), `Event ${event.offset}`);
    this.#draw();
  }

  close() {
    if (this.element.hidden) return;
    this.element.hidden = true;
    document.body.classList.remove("inspecting");
    this.onClose();
  }

  async copy() {
    await copyText(this.text);
    const button = byId("inspector-copy");
    setText(button, "Copied");
    setTimeout(() => setText(button, "Copy"), 1500);
  }

  #draw() {
    if (!this.event) return;
    const draw = { pretty, raw, hex, headers, identity }[this.tabs.selected];
    const { text, nodes, note = "" } = draw(this.event);
    this.text = text;
    this.body.replaceChildren(...nodes);
    setText(byId("inspector-note"), note);
  }
}

const binary = (event) => event.payload === undefined;
const payloadBytes = (event) =>
  binary(event) ? base64Bytes(event.payload_base64) : new TextEncoder().encode(event.payload);
const block = (...content) => make("pre", { class: "payload", tabindex: "0" }, ...content);

function pretty(event) {
  if (binary(event)) return { ...hex(event), note: `Binary: ${bytes(payloadBytes(event).length)}, shown in hex.` };
  const found = event.payload.length <= SHOWN_CHARACTERS ? tokens(event.payload) : null;
  if (!found) return { ...raw(event), note: event.payload.length > SHOWN_CHARACTERS ? tooLong(event) : "Plain text." };
  return { text: plain(found), nodes: [block(...spans(found))], note: `JSON, ${bytes(payloadBytes(event).length)}.` };
}

function raw(event) {
  const text = binary(event) ? event.payload_base64 : event.payload;
  const note = text.length > SHOWN_CHARACTERS ? tooLong(event) : binary(event) ? "In base64, because it is not UTF-8." : "";
  return { text, nodes: [block(text.slice(0, SHOWN_CHARACTERS))], note };
}

function tooLong(event) {
  const all = event.payload ?? event.payload_base64;
  return `The first ${bytes(SHOWN_CHARACTERS)} of ${bytes(all.length)}; “Copy” copies all of it.`;
}

function hex(event) {
  const data = payloadBytes(event);
  const text = hexLines(data.subarray(0, SHOWN_BYTES));
  const size = bytes(data.length);
  const note = data.length > SHOWN_BYTES ? `The first ${bytes(SHOWN_BYTES)} of ${size}.` : size;
  return { text, nodes: [block(text)], note };
}

function headers(event) {
  const found = Object.entries(event.headers ?? {});
  const text = found.map(([name, value]) => `${name}: ${value}`).join("\n");
  if (!found.length) return { text, nodes: [make("p", { class: "empty" }, "This event has no headers.")] };
  return { text, nodes: [pairs(found)] };
}

function identity(event) {
  const found = [
    ["key", event.key],
    ["offset", event.offset],
    ["publisher_id", event.publisher_id],
    ["sequence", event.sequence],
    ["published_at", event.published_at],
    ["local time", moment(event.published_at)],
    ["published_ns", event.published_ns],
  ];
  return { text: found.map(([name, value]) => `${name}: ${value}`).join("\n"), nodes: [pairs(found)] };
}

function pairs(list) {
  const rows = list.flatMap(([name, value]) => [make("dt", {}, visible(name)), make("dd", {}, visible(value))]);
  return make("dl", { class: "pairs" }, ...rows);
}

/** Copies text. The clipboard API is only available over https or on loopback, so there is a fallback. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", { class: "offscreen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
