// What the stream is doing, in words: connected or not, paused, how many wait, what the server refused.

import { byId, setText } from "./dom.js";
import { count } from "./format.js";
import { WAITING_MAX } from "./playback.js";
import { ROWS_MAX } from "./ring.js";

const WORDS = {
  connecting: "Connecting",
  live: "Connected",
  reconnecting: "Reconnecting",
  token: "Token needed",
  refused: "Refused",
};
let head = 0;

export function showState(playback, figures, newHead = head) {
  head = newHead;
  const { state, paused, mode, detail } = playback;
  const worse = state === "live" && figures === "reconnecting" ? "reconnecting" : state;
  const pill = byId("connection");
  pill.dataset.state = worse;
  setText(pill, WORDS[worse]);
  const doing = paused ? "Paused" : mode === "replay" ? "Replaying" : "Live";
  setText(byId("doing"), doing);
  byId("doing").dataset.doing = doing.toLowerCase();
  byId("pause").setAttribute("aria-pressed", paused);
  setText(byId("pause"), paused ? "Resume" : "Pause");
  setText(byId("waiting"), paused ? `${waiting(playback)} waiting` : "");
  byId("waiting").hidden = !paused;
  setText(byId("filter-count"), counted(playback));
  byId("refused").hidden = state !== "refused";
  if (detail) setText(byId("refused-why"), [detail.message, detail.now].filter(Boolean).join(". "));
  byId("stream-empty").hidden = playback.ring.size > 0 || state === "refused";
  document.title = `${paused ? "Paused" : WORDS[worse]} · zbus`;
}

function waiting({ mode, position, waiting: rows, cut }) {
  if (mode === "replay") return count(Math.max(0, head - position));
  return cut ? `${count(WAITING_MAX)}+` : count(rows.length);
}

function counted({ received }) {
  const events = received === 1 ? "1 event" : `${count(received)} events`;
  return received > ROWS_MAX ? `${events}, the last ${count(ROWS_MAX)} here` : events;
}
