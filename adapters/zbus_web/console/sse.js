// A parser of server-sent events, as the HTML standard defines them.

export class SseParser {
  #rest = "";
  #type = "";
  #data = [];
  #id = null;

  /** Returns the events that `text` completes: `{type, data, id}`. `data` is null if a frame only updates the id. */
  push(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    const found = [];
    for (const line of lines) {
      const event = this.#line(line.endsWith("\r") ? line.slice(0, -1) : line);
      if (event) found.push(event);
    }
    return found;
  }

  #line(line) {
    if (line === "") return this.#dispatch();
    const colon = line.indexOf(":");
    if (colon === 0) return null; // a comment
    const name = colon < 0 ? line : line.slice(0, colon);
    let value = colon < 0 ? "" : line.slice(colon + 1);
    if (value.startsWith(" ")) value = value.slice(1);
    if (name === "data") this.#data.push(value);
    else if (name === "id") this.#id = value;
    else if (name === "event") this.#type = value;
    return null;
  }

  #dispatch() {
    const data = this.#data.length ? this.#data.join("\n") : null;
    const event = { type: this.#type || "message", data, id: this.#id };
    const empty = data === null && this.#id === null;
    this.#data = [];
    this.#type = "";
    this.#id = null;
    return empty ? null : event;
  }
}
