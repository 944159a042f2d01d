// The console: what is on the page is made here and wired to the two feeds, that of events and that of figures.

import { LineChart, logarithmic } from "./charts.js";
import { Cursors } from "./cursors.js";
import { byId, perFrame, setText } from "./dom.js";
import { Feed } from "./feed.js";
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

const TOPICS_LIVE = 50; // the busiest keys, which the live feed brings; with more, all of them are asked for
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
    { name: "end99", label: "Delivery p99", colour: "--series-2", wide: true },
    { name: "end50", label: "p50", colour: "--series-2", dashed: true, wide: true },
  ],
  (value, axis) => (axis && value >= 1000 ? `${value / 1000} s` : axis ? `${Number(value.toPrecision(1))} ms` : milliseconds(value)),
  logarithmic,
);
const tabs = new Tabs(byId("tabs"), showPanel);
const theme = new Theme(() => [rates, latencies, timeline].forEach((each) => each.themed()));

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
  participants.look(name === "participants");
  cursors.look(name === "cursors");
  problems.look(name === "problems");
  stream.redrawNow();
  [rates, latencies, timeline].forEach((each) => each.redraw());
}

let figuresState = "connecting";
let firstFigures = true; // nothing to compare with: its rates are no rates
const figures = new Feed("api/live", {
  onEvents: (events) => events.forEach(({ data }) => showFigures(JSON.parse(data))),
  onState: (state) => {
    figuresState = state;
    firstFigures = true;
    if (state === "live") problems.load();
    showState(playback, figuresState);
  },
});

function showFigures(live) {
  showOverview(live);
  if (!firstFigures) showCharts(live);
  firstFigures = false;
  participants.update(live);
  cursors.update(live);
  timeline.update(live);
  cursors.lowWater = timeline.lowest;
  problems.add(live.records);
  showTopics(live.topics ?? []);
  showState(playback, figuresState, live.stats?.log?.head);
}

function showCharts({ at, rates: now = {}, latency = {} }) {
  const moment = new Date(at).getTime();
  rates.add(moment, { published: now.published_per_s, delivered: now.delivered_per_s });
  latencies.add(moment, {
    commit50: latency.commit_ms?.p50,
    commit99: latency.commit_ms?.p99,
    end50: latency.end_to_end_ms?.p50,
    end99: latency.end_to_end_ms?.p99,
  });
}

let topicsAskedAt = -Infinity;
function showTopics(topics) {
  const whole = topics.length < TOPICS_LIVE;
  tree.update(topics, whole);
  if (whole || performance.now() - topicsAskedAt < TOPICS_EVERY_MS) return;
  topicsAskedAt = performance.now();
  getJson("api/topics", { limit: 10_000 }).then((all) => tree.update(all.topics, true), () => {});
}

const showStateSoon = perFrame(() => showState(playback, figuresState), 80);
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

// On a narrow screen keys and charts are panels of their own; on a wide one they are always there.
WIDE.addEventListener("change", () => {
  if (WIDE.matches && ["keys", "charts"].includes(tabs.selected)) tabs.select("stream");
});

// A page that nobody sees needs no figures; a browser opens few connections to one server, and tabs share them.
document.addEventListener("visibilitychange", () => (document.hidden ? figures.stop() : figures.start()));

const PANELS = ["stream", "participants", "cursors", "problems", "keys", "charts"];
watchToken();
watchShortcuts([
  { keys: ["/"], shown: "/", text: "Filter by key expression", run: () => (byId("filter").focus(), byId("filter").select()) },
  { keys: ["p"], shown: "P", text: "Pause, and go on where it stopped", run: togglePause },
  { keys: ["l"], shown: "L", text: "Back to live", run: () => playback.live() },
  { keys: ["j", "k"], shown: "J K", text: "Next and previous event", run: (key) => (byId("rows").focus(), stream.move(key === "j" ? 1 : -1)) },
  { keys: ["Enter"], shown: "Enter", text: "Inspect the event that is selected", run: () => stream.selected && inspector.show(stream.selected.event) },
  { keys: ["Escape"], shown: "Esc", text: "Close the inspector", run: () => inspector.close() },
  { keys: ["1", "2", "3", "4", "5", "6"], shown: "1 – 6", text: "Stream, participants, cursors, problems; keys, charts", run: (key) => showTab(PANELS[key - 1]) },
  { keys: ["s"], shown: "S", text: "To the scrubber: arrows choose, and it replays from there", run: () => (tabs.select("stream"), byId("scrubber").focus()) },
  { keys: ["t"], shown: "T", text: "Theme: system, light, dark", run: () => theme.next() },
]);

function showTab(name) {
  if (name === "keys" && WIDE.matches) byId("tree").querySelector("[tabindex='0']")?.focus();
  else if (name === "charts" && WIDE.matches) byId("rates").focus();
  else tabs.select(name, true);
}

setText(byId("filter-count"), count(0));
playback.live();
figures.start();

// For the browser's own console, and for tests: what the page holds, not what it draws.
window.zbusConsole = { playback, ring, stream, rates };
