"""How fast are `cache.get` and `await` of a cached function, with invalidation, compared with a bare moka `get`?

The peer is `Moka.get` of the same key in a plain loop. zbus counts hits, rejects unhashable keys and distinguishes a
cached None from a miss. The function's hit binds its arguments and is awaited; its key is its argument, as without
`key=`. All reads are hits, and the cache is subscribed to an event that invalidates the entries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from importlib.metadata import version
from time import perf_counter_ns
from typing import Any

from _harness import Measurement, Row, Sizes, alternate, compare, median_of, run_one, zbus_versions
from moka_py import Moka

import zbus

ENTRIES = 1000
KEY = 7
TARGET = 0.5


def rows(sizes: Sizes) -> list[Row]:
    """Measure the cache and the function."""
    reads, rounds = sizes.of(300_000, 20_000), sizes.of(9, 1)
    versions = {"zbus": zbus_versions() | _moka(), "peer": _moka()}

    def against_moka(ours: Callable[[int], Coroutine[Any, Any, Measurement]]) -> list[tuple[Measurement, Measurement]]:
        return alternate(rounds, lambda: asyncio.run(ours(reads)), lambda: asyncio.run(bare(reads)))

    by_template = [asyncio.run(function(reads, key="todo/{todo_id}")) for _ in range(sizes.of(3, 1))]
    common: dict[str, Any] = {"unit": "reads/s", "peer_name": "moka", "target": TARGET, "versions": versions}
    return [
        compare("cached_read", "a hit: `cache.get(key)` vs. a bare moka `get`", rounds=against_moka(cache), **common),
        compare(
            "cached_read",
            "a hit: `await todo(7)` of a cached function vs. a bare moka `get`",
            rounds=against_moka(function),
            zbus_with_a_template_as_key=median_of(by_template),
            **common,
        ),
    ]


def _moka() -> dict[str, str]:
    return {"moka-py": version("moka-py")}


async def bare(reads: int) -> Measurement:
    """Measure reads per second of bare moka."""
    moka: Moka[int, int] = Moka(10_000)
    for key in range(ENTRIES):
        moka.set(key, key)
    begin = perf_counter_ns()
    for _ in range(reads):
        moka.get(KEY)
    return Measurement(reads / (perf_counter_ns() - begin) * 1e9)


async def cache(reads: int) -> Measurement:
    """Measure reads per second of `cache.get`."""
    async with zbus.open() as bus:
        kept = bus.cache().invalidate_on("events/Todo/**")
        for key in range(ENTRIES):
            kept.set(key, key)
        begin = perf_counter_ns()
        for _ in range(reads):
            kept.get(KEY)
        elapsed = perf_counter_ns() - begin
        _check(kept.stats()["hits"], reads)
    return Measurement(reads / elapsed * 1e9)


async def function(reads: int, key: str | None = None) -> Measurement:
    """Measure awaited hits per second of a function."""
    async with zbus.open() as bus:

        @bus.cached(key=key, invalidate_on="events/Todo/{todo_id}", name="todo")
        async def todo(todo_id: int) -> int:
            return todo_id

        for each in range(ENTRIES):
            await todo(each)
        begin = perf_counter_ns()
        for _ in range(reads):
            await todo(KEY)
        elapsed = perf_counter_ns() - begin
        _check(bus.stats()["caches"]["todo"]["hits"], reads)
    return Measurement(reads / elapsed * 1e9)


def _check(hits: int, reads: int) -> None:
    if hits != reads:
        raise RuntimeError(f"{hits} of {reads} reads were hits")


if __name__ == "__main__":
    run_one(rows)
