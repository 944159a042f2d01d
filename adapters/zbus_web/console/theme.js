// Light or dark theme: that of the system, until the operator chooses one.

import { byId, setText } from "./dom.js";

const KEPT = "zbus-theme";
const ORDER = ["auto", "light", "dark"];
const NAMES = { auto: "system", light: "light", dark: "dark" };

export class Theme {
  constructor(onChange) {
    this.button = byId("theme");
    this.onChange = onChange;
    this.set(localStorage.getItem(KEPT) ?? "auto");
    this.button.addEventListener("click", () => this.next());
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange);
  }

  next() {
    this.set(ORDER[(ORDER.indexOf(this.name) + 1) % ORDER.length]);
  }

  set(name) {
    this.name = ORDER.includes(name) ? name : "auto";
    document.documentElement.dataset.theme = this.name;
    localStorage.setItem(KEPT, this.name);
    setText(byId("theme-name"), NAMES[this.name]);
    this.button.setAttribute("aria-label", `Theme: ${NAMES[this.name]}`);
    this.onChange();
  }
}
