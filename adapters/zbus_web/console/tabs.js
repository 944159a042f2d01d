// Tabs that follow the ARIA pattern: arrow keys move between them, and only the selected tab is a tab stop.

export class Tabs {
  constructor(list, onSelect = () => {}) {
    this.list = list;
    this.onSelect = onSelect;
    list.addEventListener("click", (event) => {
      const tab = event.target.closest("[role=tab]");
      if (tab) this.select(tab.dataset.tab);
    });
    list.addEventListener("keydown", (event) => this.#key(event));
    this.#mark(this.selected);
  }

  get tabs() {
    return [...this.list.querySelectorAll("[role=tab]")];
  }

  get selected() {
    return (this.tabs.find((tab) => tab.getAttribute("aria-selected") === "true") ?? this.tabs[0]).dataset.tab;
  }

  select(name, focus = false) {
    this.#mark(name);
    if (focus) this.tabs.find((tab) => tab.dataset.tab === name)?.focus();
    this.onSelect(name);
  }

  #mark(name) {
    for (const tab of this.tabs) {
      const on = tab.dataset.tab === name;
      tab.setAttribute("aria-selected", on);
      tab.tabIndex = on ? 0 : -1;
      const panel = document.getElementById(tab.getAttribute("aria-controls"));
      if (panel?.dataset.panel) panel.classList.toggle("chosen", on);
    }
  }

  #key(event) {
    const seen = this.tabs.filter((tab) => tab.offsetParent !== null);
    const at = seen.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: seen.length - 1 }[event.key];
    if (to === undefined || at < 0) return;
    event.preventDefault();
    this.select(seen[(to + seen.length) % seen.length].dataset.tab, true);
  }
}
