// Waiting with an abort signal. No listener is left behind.

export function sleep(ms, signal) {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, ms);
    signal.addEventListener("abort", end);
  });
}

export function once(target, name, signal) {
  return new Promise((resolve) => {
    const end = () => {
      target.removeEventListener(name, end);
      signal.removeEventListener("abort", end);
      resolve();
    };
    target.addEventListener(name, end);
    signal.addEventListener("abort", end);
  });
}

/** Waits for the first of several: `firstOf(signal, (each) => sleep(100, each), …)`, and aborts the others. */
export async function firstOf(signal, ...waits) {
  const others = new AbortController();
  const either = AbortSignal.any([signal, others.signal]);
  await Promise.race(waits.map((wait) => wait(either)));
  others.abort();
}
