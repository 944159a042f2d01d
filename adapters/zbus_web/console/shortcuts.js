// Keyboard shortcuts. They are listed under “?”, and are disabled while the operator types.

import { byId, make } from "./dom.js";

/** `list`: `[{keys: ["p"], shown: "P", text, run}]` */
export function watchShortcuts(list) {
  const help = byId("help");
  const all = [...list, { keys: ["?"], shown: "?", text: "Show this list", run: () => help.showModal() }];
  const line = ({ shown, text }) => {
    const keys = shown.split(" ").map((key) => make("kbd", {}, key));
    return [make("dt", {}, ...keys), make("dd", {}, text)];
  };
  byId("help-list").replaceChildren(...all.flatMap(line));
  byId("help-open").addEventListener("click", () => help.showModal());
  byId("help-close").addEventListener("click", () => help.close());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (document.querySelector("dialog[open]") || isTyping(event.target)) return;
    const found = all.find(({ keys }) => keys.includes(event.key));
    if (!found) return;
    event.preventDefault();
    found.run(event.key);
  });
}

function isTyping(element) {
  if (element instanceof HTMLInputElement) return element.type !== "range";
  return element instanceof HTMLSelectElement || element.isContentEditable;
}
