// Formatting of numbers, times and untrusted text. Nothing here touches the page.

const WHOLE = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });
const TENTHS = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 1 });

export const count = (number) => (Number.isFinite(number) ? WHOLE.format(number) : "–");

/** Formats a rate with the digits that matter: 0.4, 12.5, 1,204. */
export function rate(perSecond) {
  if (!Number.isFinite(perSecond)) return "–";
  return perSecond < 100 ? TENTHS.format(perSecond) : WHOLE.format(perSecond);
}

export function milliseconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value >= 1000) return `${TENTHS.format(value / 1000)} s`;
  if (value >= 100) return `${WHOLE.format(value)} ms`;
  if (value >= 1) return `${TENTHS.format(value)} ms`;
  return `${value.toFixed(value < 0.1 && value > 0 ? 2 : 1)} ms`;
}

export function bytes(number) {
  if (!Number.isFinite(number)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (number >= 1000 && at < units.length - 1) {
    number /= 1000;
    at += 1;
  }
  return `${at ? TENTHS.format(number) : WHOLE.format(number)} ${units[at]}`;
}

/** Returns the local time of day of an ISO time, with milliseconds. */
export function timeOfDay(iso) {
  const at = new Date(iso);
  if (Number.isNaN(at.getTime())) return "–";
  const two = (number) => String(number).padStart(2, "0");
  const clock = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return `${clock}.${String(at.getMilliseconds()).padStart(3, "0")}`;
}

/** Returns date and time to the second, without the date if it is today. */
export function moment(iso) {
  const at = new Date(iso);
  if (Number.isNaN(at.getTime())) return "–";
  const clock = timeOfDay(iso).slice(0, 8);
  const today = at.toDateString() === new Date().toDateString();
  return today ? clock : `${at.toLocaleDateString("en-CA")} ${clock}`;
}

export function age(iso) {
  const seconds = Math.max(0, (Date.now() - new Date(iso).getTime()) / 1000);
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} d ago`;
}

// Control characters, and those that change the direction of text: a key must not look like another one.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** Returns untrusted text on one line, with invisible characters made visible. */
export function visible(text) {
  return String(text).replace(UNSEEN, (each) => {
    const code = each.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

export function base64Bytes(text) {
  const binary = atob(text);
  return Uint8Array.from(binary, (each) => each.charCodeAt(0));
}
