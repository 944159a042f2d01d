// The console: creates the parts of the page and connects them to the two streams, of events and of live statistics.

import { LineChart, logarithmic } from "./charts.js";
import { Cursors } from "./cursors.js";
import { byId, perFrame, setText } from "./dom.js";
import { EventStream } from "./event_stream.js";
import { count, milliseconds, rate } from "./format.js";
import { getJson } from "./http.js";
import { Inspector } from "./inspector.js";
import { showOverview } from "./overview.js";
import { Participants } from "./participants.js";
import { Playback } from "./playback.js";
import { Problems } from "./problems.js";
import { Ring } from "./ring.js";
import { watchShortcuts } from "./shortcuts.js";
import { StreamView } from "./stream.js";
import { Tabs } from "./tabs.js";
import { Theme } from "./theme.js";
import { Timeline } from "./timeline.js";
import { watchToken } from "./token.js";
import { KeyTree } from "./tree.js";
import { showState } from "./state.js";

const TOPICS_LIVE = 50; // The live stream has this many of the busiest keys; if there are more, all keys are loaded.
const TOPICS_EVERY_MS = 10_000;
const WIDE = window.matchMedia("(min-width: 1100px)");

const ring = new Ring();
const playback = new Playback(ring);
const stream = new StreamView(byId("rows"), ring);
const inspector = new Inspector({ onClose: () => byId("rows").focus(), onFilter: filter });
const tree = new KeyTree(byId("tree"), filter);
const timeline = new Timeline(playback);
const cursors = new Cursors();
const participants = new Participants();
const problems = new Problems();
const rates = new LineChart(
  "rates",
  [
    { name: "published", label: "Published", colour: "--series-1" },
    { name: "delivered", label: "Delivered", colour: "--series-2" },
  ],
  (value, axis) => (axis ? rate(value) : `${rate(value)}/s`),
);
const latencies = new LineChart(
  "latencies",
  [
    { name: "commit99", label: "Commit p99", colour: "--series-1" },
    { name: "commit50", label: "p50", colour: "--series-1", dashed: true },
    { name: "delivery99", label: "Delivery p99", colour: "--series-2", wide: true },
    { name: "delivery50", label: "p50", colour: "--series-2", dashed: true, wide: true },
  ],
  (value, axis) => (axis ? decade(value) : milliseconds(value)),
  logarithmic,
);
const tabs = new Tabs(byId("tabs"), showPanel);
const theme = new Theme(() => [rates, latencies, timeline].forEach((each) => each.themed()));

function decade(value) {
  return value >= 1000 ? `${value / 1000} s` : `${Number(value.toPrecision(1))} ms`;
}

function filter(text) {
  byId("filter").value = text;
  tree.choose(text);
  stream.select(null);
  playback.filter(text.split(/[\s,]+/).filter(Boolean));
}

function togglePause() {
  if (playback.paused) playback.resume();
  else playback.pause();
}

function showPanel(name) {
  participants.setVisible(name === "participants");
  cursors.setVisible(name === "cursors");
  problems.setVisible(name === "problems");
  stream.redrawNow();
  [rates, latencies, timeline].forEach((each) => each.redraw());
}

let liveState = "connecting";
let isFirst = true; // The first snapshot has no rates, because there is nothing to compare it with.
const liveStream = new EventStream("api/live", {
  onEvents: (events) => events.forEach(({ data }) => showLive(JSON.parse(data))),
  onState: (state) => {
    liveState = state;
    isFirst = true;
    if (state === "live") problems.load();
    showState(playback, liveState);
  },
});

function showLive(live) {
  showOverview(live);
  if (!isFirst) showCharts(live);
  isFirst = false;
  participants.update(live);
  cursors.update(live);
  timeline.update(live);
  cursors.lowWater = timeline.lowest;
  problems.add(live.log_records);
  showTopics(live.topics ?? []);
  showState(playback, liveState, live.stats?.log?.head);
}

function showCharts({ at, rates: now = {}, latency = {} }) {
  const moment = new Date(at).getTime();
  rates.add(moment, { published: now.published_per_s, delivered: now.delivered_per_s });
  latencies.add(moment, {
    commit50: latency.commit_ms?.p50,
    commit99: latency.commit_ms?.p99,
    delivery50: latency.delivery_ms?.p50,
    delivery99: latency.delivery_ms?.p99,
  });
}

let topicsLoadedAt = -Infinity;
function showTopics(topics) {
  const whole = topics.length < TOPICS_LIVE;
  tree.update(topics, whole);
  if (whole || performance.now() - topicsLoadedAt < TOPICS_EVERY_MS) return;
  topicsLoadedAt = performance.now();
  getJson("api/topics", { limit: 10_000 }).then((all) => tree.update(all.topics, true), () => {});
}

const showStateSoon = perFrame(() => showState(playback, liveState), 80);
for (const name of ["rows", "change"]) {
  playback.addEventListener(name, () => {
    stream.redraw();
    showStateSoon();
  });
}
stream.addEventListener("select", ({ detail }) => detail && !byId("inspector").hidden && inspector.show(detail.event));
stream.addEventListener("open", ({ detail }) => inspector.show(detail.event));

byId("pause").addEventListener("click", togglePause);
byId("filter-form").addEventListener("submit", (event) => {
  event.preventDefault();
  filter(byId("filter").value.trim() || "**");
});
byId("filter-all").addEventListener("click", () => filter("**"));
byId("start-again").addEventListener("click", () => filter(byId("filter").value.trim() || "**"));
byId("to-newest").addEventListener("click", () => stream.toNewest());
byId("rows").addEventListener("scroll", () => (byId("to-newest").hidden = stream.following), { passive: true });

// On a narrow screen, keys and charts are separate panels; on a wide one they are always visible.
WIDE.addEventListener("change", () => {
  if (WIDE.matches && ["keys", "charts"].includes(tabs.selected)) tabs.select("stream");
});

// A hidden page needs no live statistics. A browser opens few connections to one server, and its tabs share them.
document.addEventListener("visibilitychange", () => (document.hidden ? liveStream.stop() : liveStream.start()));

const PANELS = ["stream", "participants", "cursors", "problems", "keys", "charts"];
const PANELS_TEXT = "Stream, participants, cursors, problems; keys, charts";
watchToken();
const shortcut = (keys, shown, text, run) => ({ keys, shown, text, run });
watchShortcuts([
  shortcut(["/"], "/", "Filter by key expression", () => byId("filter").select()),
  shortcut(["p"], "P", "Pause or resume", togglePause),
  shortcut(["l"], "L", "Back to live", () => playback.live()),
  shortcut(["j", "k"], "J K", "Next or previous event", (key) => step(key === "j" ? 1 : -1)),
  shortcut(["Enter"], "Enter", "Inspect the selected event", inspectSelected),
  shortcut(["Escape"], "Esc", "Close the inspector", () => inspector.close()),
  shortcut(["1", "2", "3", "4", "5", "6"], "1 – 6", PANELS_TEXT, (key) => showTab(PANELS[key - 1])),
  shortcut(["s"], "S", "Focus the scrubber; arrow keys choose where to replay from", toScrubber),
  shortcut(["t"], "T", "Theme: system, light, dark", () => theme.next()),
]);

function step(by) {
  byId("rows").focus();
  stream.move(by);
}

function inspectSelected() {
  if (stream.selected) inspector.show(stream.selected.event);
}

function toScrubber() {
  tabs.select("stream");
  byId("scrubber").focus();
}

function showTab(name) {
  if (name === "keys" && WIDE.matches) byId("tree").querySelector("[tabindex='0']")?.focus();
  else if (name === "charts" && WIDE.matches) byId("rates").focus();
  else tabs.select(name, true);
}

setText(byId("filter-count"), count(0));
playback.live();
liveStream.start();

// For the developer tools and for tests: the data of the page, not what it draws.
window.zbusConsole = { playback, ring, stream, rates };
