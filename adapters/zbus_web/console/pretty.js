// JSON with line breaks and colours. It keeps the original characters, so that a 64-bit number keeps all its digits.

import { make } from "./dom.js";

const TOKEN = /"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g;

/** Returns the formatted text as tokens `[kind, text]`, or null if it is not JSON. */
export function tokens(text) {
  try {
    JSON.parse(text);
  } catch {
    return null;
  }
  const found = [];
  const raw = text.match(TOKEN) ?? [];
  let depth = 0;
  const line = () => found.push(["", `\n${"  ".repeat(depth)}`]);
  raw.forEach((each, at) => {
    const next = raw[at + 1];
    if (each === "{" || each === "[") {
      found.push(["", each]);
      depth += 1;
      if (next !== "}" && next !== "]") line();
    } else if (each === "}" || each === "]") {
      depth -= 1;
      if (raw[at - 1] !== "{" && raw[at - 1] !== "[") line();
      found.push(["", each]);
    } else if (each === ",") {
      found.push(["", ","]);
      line();
    } else if (each === ":") {
      found.push(["", ": "]);
    } else {
      found.push([kind(each, next), each]);
    }
  });
  return found;
}

export const plain = (list) => list.map(([, text]) => text).join("");

export function spans(list) {
  return list.map(([kind_, text]) => (kind_ ? make("span", { class: `j-${kind_}` }, text) : text));
}

function kind(token, next) {
  if (token.startsWith('"')) return next === ":" ? "name" : "text";
  return token === "true" || token === "false" || token === "null" ? "word" : "number";
}

/** Returns a hex dump: offsets, bytes and characters, sixteen bytes per line. */
export function hexLines(data) {
  const lines = [];
  for (let at = 0; at < data.length; at += 16) {
    const part = Array.from(data.subarray(at, at + 16));
    const hex = part.map((each) => each.toString(16).padStart(2, "0"));
    const left = hex.slice(0, 8).join(" ").padEnd(23);
    const right = hex.slice(8).join(" ").padEnd(23);
    const text = part.map((each) => (each > 31 && each < 127 ? String.fromCharCode(each) : ".")).join("");
    lines.push(`${at.toString(16).padStart(6, "0")}  ${left}  ${right}  ${text}`);
  }
  return lines.join("\n");
}
