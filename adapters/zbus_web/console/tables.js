// Sortable tables that are updated in place.

import { make, setText } from "./dom.js";
import { count } from "./format.js";

const ROWS_MAX = 200; // The number of further rows is shown below.

/** `columns`: `[{name, label, number, text(row), level(row), sort(row)}]`; `element` returns the controls of a row. */
export class Table {
  constructor(table, columns, { empty, sortBy = null, descending = true }) {
    this.columns = columns;
    this.empty = empty;
    this.sortBy = sortBy;
    this.descending = descending;
    this.list = [];
    this.lines = [];
    this.body = make("tbody");
    this.note = make("caption", { class: "table-note" });
    const heads = columns.map((column) => this.#head(column));
    table.append(this.note, make("thead", {}, make("tr", {}, ...heads)), this.body);
  }

  update(list) {
    this.list = list;
    this.draw();
  }

  draw() {
    const sorted = this.#sorted().slice(0, ROWS_MAX);
    while (this.lines.length < sorted.length) this.lines.push(this.#line());
    this.lines.forEach((line, at) => this.#fill(line, sorted[at]));
    const more = this.list.length - sorted.length;
    setText(this.note, this.list.length ? (more > 0 ? `and ${count(more)} more` : "") : this.empty);
    for (const column of this.columns) {
      const on = column.name === this.sortBy;
      column.head.setAttribute("aria-sort", on ? (this.descending ? "descending" : "ascending") : "none");
    }
  }

  #head(column) {
    if (column.element) {
      column.head = make("th", { scope: "col" }, make("span", { class: "offscreen" }, column.label));
      return column.head;
    }
    const sort = () => {
      this.descending = this.sortBy === column.name ? !this.descending : Boolean(column.number);
      this.sortBy = column.name;
      this.draw();
    };
    const button = make("button", { type: "button", class: "sort", onclick: sort }, column.label);
    column.head = make("th", { scope: "col", class: column.number ? "number" : null }, button);
    return column.head;
  }

  #sorted() {
    const column = this.columns.find((each) => each.name === this.sortBy);
    if (!column) return this.list;
    const value = column.sort ?? ((row) => row[column.name] ?? (column.number ? -1 : ""));
    const sign = this.descending ? -1 : 1;
    return [...this.list].sort((a, b) => sign * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0));
  }

  #line() {
    const line = { row: null };
    const cells = this.columns.map((column) => {
      const cell = make("td", { class: column.number ? "number" : null, "data-label": column.label });
      if (column.element) cell.append(column.element(() => line.row));
      return cell;
    });
    line.element = make("tr", {}, ...cells);
    line.cells = cells;
    this.body.append(line.element);
    return line;
  }

  #fill(line, row) {
    line.element.hidden = !row;
    line.row = row;
    if (!row) return;
    this.columns.forEach((column, at) => {
      if (column.element) return;
      const value = column.text ? column.text(row) : row[column.name];
      setText(line.cells[at], column.number && typeof value === "number" ? count(value) : String(value ?? "–"));
      const level = column.level?.(row) ?? "";
      if (line.cells[at].dataset.level !== level) line.cells[at].dataset.level = level;
    });
  }
}
