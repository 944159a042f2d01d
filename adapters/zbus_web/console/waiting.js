// Waiting that can be called off, and that leaves no listener behind.

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

/** The first of several: `firstOf(signal, (each) => sleep(100, each), …)`; the others are called off. */
export async function firstOf(signal, ...waits) {
  const others = new AbortController();
  const either = AbortSignal.any([signal, others.signal]);
  await Promise.race(waits.map((wait) => wait(either)));
  others.abort();
}
