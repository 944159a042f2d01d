// The newest few thousand rows, so that memory is bounded however long the page is open.

export const ROWS_MAX = 5000;

export class Ring {
  #rows = new Array(ROWS_MAX);
  total = 0; // Rows ever appended; the number of a row never changes.

  get size() {
    return Math.min(this.total, ROWS_MAX);
  }

  append(row) {
    row.number = this.total;
    this.#rows[this.total % ROWS_MAX] = row;
    this.total += 1;
  }

  clear() {
    this.#rows = new Array(ROWS_MAX);
    this.total = 0;
  }

  /** Returns the row at `index`; 0 is the newest. */
  at(index) {
    if (index < 0 || index >= this.size) return undefined;
    return this.#rows[(this.total - 1 - index) % ROWS_MAX];
  }

  /** Returns the index of a row, or −1 if it has been dropped. */
  indexOf(row) {
    const index = this.total - 1 - row.number;
    return index >= 0 && this.at(index) === row ? index : -1;
  }
}

/** A row with an event, which is parsed when it is first used. */
export class EventRow {
  #data;
  #event;

  constructor(offset, data, event = null) {
    this.offset = offset;
    this.#data = data;
    this.#event = event;
  }

  get event() {
    if (this.#event === null) {
      this.#event = JSON.parse(this.#data);
      this.#data = null;
    }
    return this.#event;
  }
}

/** A row that is not an event: a gap or a reconnection. */
export class MarkRow {
  constructor(text, level = "info") {
    this.mark = text;
    this.level = level;
  }
}
