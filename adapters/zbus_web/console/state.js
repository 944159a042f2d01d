// The state of the stream in words: connected or not, paused, the number of waiting events, rejected requests.

import { byId, setText } from "./dom.js";
import { count } from "./format.js";
import { WAITING_MAX } from "./playback.js";
import { ROWS_MAX } from "./ring.js";

const WORDS = {
  connecting: "Connecting",
  live: "Connected",
  reconnecting: "Reconnecting",
  token: "Token required",
  rejected: "Rejected",
};
let head = 0;

export function showState(playback, liveState, newHead = head) {
  head = newHead;
  const { state, paused, mode, detail } = playback;
  const worse = state === "live" && liveState === "reconnecting" ? "reconnecting" : state;
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
  byId("rejected").hidden = state !== "rejected";
  if (detail) setText(byId("rejected-why"), [detail.message, detail.state].filter(Boolean).join(". "));
  byId("stream-empty").hidden = playback.ring.size > 0 || state === "rejected";
  document.title = `${paused ? "Paused" : WORDS[worse]} · zbus`;
}

function waiting({ mode, position, waiting: rows, cut }) {
  if (mode === "replay") return count(Math.max(0, head - position));
  return cut ? `${count(WAITING_MAX)}+` : count(rows.length);
}

function counted({ received }) {
  const events = received === 1 ? "1 event" : `${count(received)} events`;
  return received > ROWS_MAX ? `${events}, the last ${count(ROWS_MAX)} shown` : events;
}
