// Requests to the server of this page, with the operator's token. This is the only module that calls fetch.

const ROOT = new URL("../", document.baseURI); // The console may be behind a proxy with a prefix.
const TOKEN = "zbus-token";

/** An error response of the server, with its message. */
export class HttpError extends Error {
  constructor(status, body, stale = false) {
    const error = body?.error ?? {};
    super(error.message ?? `the server responded with ${status}`);
    this.status = status;
    this.code = error.code ?? "";
    this.state = error.state ?? "";
    this.stale = stale; // The request had a token that has been replaced since.
  }

  /** Whether a later attempt may succeed. */
  get transient() {
    return this.stale || this.status >= 500 || this.status === 429 || this.status === 408;
  }
}

/** Dispatches `required` when a token is needed, and `given` when there is a new one. */
export const access = new EventTarget();

export const hasToken = () => sessionStorage.getItem(TOKEN) !== null;

export function giveToken(token) {
  if (token) sessionStorage.setItem(TOKEN, token);
  else sessionStorage.removeItem(TOKEN);
  access.dispatchEvent(new Event("given"));
}

/** `open("events", {key: ["a/**"], from: 3})` returns a successful response, or throws an HttpError. */
export async function open(path, query = {}, options = {}) {
  const url = new URL(path, ROOT);
  for (const [name, value] of Object.entries(query)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") url.searchParams.append(name, each);
    }
  }
  const headers = { ...options.headers };
  const token = sessionStorage.getItem(TOKEN);
  if (token) headers.Authorization = `Bearer ${token}`;
  const response = await fetch(url, { cache: "no-store", ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const stale = response.status === 401 && token !== sessionStorage.getItem(TOKEN);
  if (response.status === 401 && !stale) access.dispatchEvent(new Event("required"));
  throw new HttpError(response.status, body, stale);
}

export const getJson = async (path, query, signal) => (await open(path, query, { signal })).json();

export async function sendJson(method, path, body) {
  const headers = { "Content-Type": "application/json" };
  const response = await open(path, {}, { method, headers, body: JSON.stringify(body) });
  return response.status === 204 ? null : response.json();
}
