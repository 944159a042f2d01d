// The main metrics, at the top of the page.

import { byId, setText } from "./dom.js";
import { bytes, count, milliseconds, rate, visible } from "./format.js";

export function showOverview(live) {
  const { stats = {}, rates = {}, latency = {} } = live;
  const dropped = sum(stats, (name) => name.startsWith("dropped_"));
  const gaps = (stats.gaps_open ?? 0) + (stats.gaps_unrepaired ?? 0);
  const lags = (live.cursors ?? []).map((cursor) => cursor.lag ?? 0);
  const own = (live.nodes ?? []).find((node) => node.is_self);
  setText(byId("node"), own ? visible([own.name, own.host].filter(Boolean).join(" on ")) : "");
  set("published", rate(rates.published_per_s));
  set("delivered", rate(rates.delivered_per_s));
  set("commit", milliseconds(latency.commit_ms?.p99));
  set("delivery", milliseconds(latency.delivery_ms?.p99));
  set("head", count(stats.log?.head));
  set("size", bytes(stats.log?.bytes));
  set("subscriptions", count(stats.subscriptions));
  set("lag", count(Math.max(0, ...lags)), Math.max(0, ...lags) > 0 ? "warning" : "");
  set("dropped", count(dropped), dropped ? "error" : "");
  set("gaps", count(gaps), gaps ? "error" : "");
}

function set(name, text, level = "") {
  const element = byId(`metric-${name}`);
  setText(element, text);
  element.dataset.level = level;
}

function sum(stats, matches) {
  return Object.entries(stats).reduce((all, [name, value]) => (matches(name) ? all + value : all), 0);
}
