// The keys as a tree, with rates. Keyboard control follows the ARIA pattern; choosing a key filters the stream.

import { make, perFrame, setText } from "./dom.js";
import { count, rate, visible } from "./format.js";

const CHILDREN_MAX = 200; // per branch; the number of further children is shown
const OPEN_KEYS = 60; // With more keys, branches below the first level start closed.

export class KeyTree {
  constructor(element, onChoose) {
    this.element = element;
    this.onChoose = onChoose;
    this.topics = new Map();
    this.toggled = new Map(); // path → open, if the operator has changed it
    this.current = null; // the path that has the focus
    this.chosen = "**";
    this.rows = [];
    this.redraw = perFrame(() => this.draw());
    element.addEventListener("click", (event) => this.#click(event));
    element.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Updates the counts. `whole` means that the list has every key. */
  update(topics, whole) {
    if (whole) this.topics.clear();
    for (const topic of topics) this.topics.set(topic.key, topic);
    this.redraw();
  }

  choose(expression) {
    this.chosen = expression;
    this.draw();
  }

  draw() {
    const root = this.#build();
    const listed = [];
    this.#flatten(root, 1, listed);
    const top = Math.max(...root.children.map((child) => child.perSecond), 0.001);
    while (this.rows.length < listed.length) this.rows.push(this.#row());
    const focus = listed.some((node) => node.path === this.current) ? this.current : listed[0]?.path;
    this.rows.forEach((row, at) => this.#fill(row, listed[at], top, focus));
    this.listed = listed;
    this.element.classList.toggle("none", listed.length === 0);
  }

  #build() {
    const root = branch("", "");
    for (const topic of this.topics.values()) {
      let node = root;
      for (const part of topic.key.split("/")) {
        if (!node.byName.has(part)) node.byName.set(part, branch(part, node.path ? `${node.path}/${part}` : part));
        node = node.byName.get(part);
        node.perSecond += topic.events_per_s || 0;
        node.events += topic.events || 0;
      }
    }
    return finish(root);
  }

  #isOpen(node, level) {
    return this.toggled.get(node.path) ?? (level === 1 || this.topics.size <= OPEN_KEYS);
  }

  #flatten(node, level, into) {
    node.children.slice(0, CHILDREN_MAX).forEach((child, at) => {
      Object.assign(child, { level, at, of: node.children.length, parent: node.path });
      child.open = child.children.length > 0 && this.#isOpen(child, level);
      into.push(child);
      if (child.open) this.#flatten(child, level + 1, into);
    });
    const more = node.children.length - CHILDREN_MAX;
    if (more > 0) into.push({ path: `${node.path}/\u0000`, more, level, children: [], parent: node.path });
  }

  #row() {
    const twist = make("span", { class: "twist", "aria-hidden": "true" });
    const name = make("span", { class: "name" });
    const rateText = make("span", { class: "rate" });
    const bar = make("span", { class: "bar", "aria-hidden": "true" });
    const element = make("div", { class: "branch", role: "treeitem" }, bar, twist, name, rateText);
    this.element.append(element);
    return { element, twist, name, rateText, bar };
  }

  #fill(row, node, top, focus) {
    row.element.hidden = !node;
    row.node = node;
    if (!node) return;
    const { element } = row;
    const inner = node.children.length > 0;
    setText(row.name, node.more ? `… ${count(node.more)} more` : visible(node.name));
    setText(row.rateText, node.more ? "" : `${rate(node.perSecond)}/s`);
    setText(row.twist, inner ? (node.open ? "▾" : "▸") : "");
    element.title = node.more ? "" : `${visible(node.path)}: ${count(node.events)} events`;
    element.style.setProperty("--level", node.level - 1);
    row.bar.style.transform = `scaleX(${Math.min(1, (node.perSecond || 0) / top)})`;
    element.setAttribute("aria-level", node.level);
    if (inner) element.setAttribute("aria-expanded", node.open);
    else element.removeAttribute("aria-expanded");
    element.setAttribute("aria-setsize", node.of ?? 1);
    element.setAttribute("aria-posinset", (node.at ?? 0) + 1);
    element.setAttribute("aria-selected", this.chosen === expression(node));
    element.tabIndex = node.path === focus ? 0 : -1;
  }

  #click(event) {
    const row = this.rows.find((each) => each.element.contains(event.target));
    if (!row?.node || row.node.more) return;
    this.current = row.node.path;
    if (row.twist.contains(event.target)) this.#toggle(row.node, !row.node.open);
    else this.#pick(row.node);
  }

  #pick(node) {
    const picked = expression(node);
    this.onChoose(this.chosen === picked ? "**" : picked); // The same key again clears the filter.
  }

  #toggle(node, open) {
    if (!node.children.length) return;
    this.toggled.set(node.path, open);
    this.draw();
  }

  #focus(node) {
    if (!node) return;
    this.current = node.path;
    this.draw();
    this.rows.find((row) => row.node?.path === node.path)?.element.focus();
  }

  #key(event) {
    const at = this.rows.findIndex((row) => row.element === document.activeElement);
    const node = this.rows[at]?.node;
    if (!node) return;
    const listed = this.listed;
    const moves = { ArrowDown: listed[at + 1], ArrowUp: listed[at - 1], Home: listed[0], End: listed.at(-1) };
    if (event.key in moves) this.#focus(moves[event.key]);
    else if (event.key === "ArrowRight") node.open ? this.#focus(listed[at + 1]) : this.#toggle(node, true);
    else if (event.key === "ArrowLeft" && node.open) this.#toggle(node, false);
    else if (event.key === "ArrowLeft") this.#focus(listed.find((each) => each.path === node.parent));
    else if ((event.key === "Enter" || event.key === " ") && !node.more) this.#pick(node);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

const branch = (name, path) => ({ name, path, perSecond: 0, events: 0, byName: new Map(), children: [] });

function finish(node) {
  node.children = [...node.byName.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
  node.children.forEach(finish);
  return node;
}

// `a/**` matches `a` too. A key has no wildcards, so it is an expression as it is.
const expression = (node) => (node.children.length ? `${node.path}/**` : node.path);
