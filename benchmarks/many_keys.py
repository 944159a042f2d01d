"""How much does a log with a million keys cost: a replay of a tenth of them, its first event, and opening the log?

Every event has its own key, which is the worst case for an index by key. The peer of the replay is a replay of all
events in the same run; ratios are of events per second. The other targets are absolute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns, time_ns

from _harness import Measurement, Row, Sizes, alternate, compare, folder, run_one, zbus_versions

import zbus

NAMESPACES = 10
BATCH = 2000
PART, EVERYTHING = "ns3/**", "**"
TARGET_RATE, TARGET_FIRST_MS, TARGET_OPEN_MS = 0.5, 200.0, 2000.0


def rows(sizes: Sizes) -> list[Row]:
    """Measure the three rows on one log."""
    keys = sizes.of(1_000_000, 20_000)
    with folder() as where:
        log = where / "log.db"
        asyncio.run(fill(log, keys))
        found = alternate(sizes.of(5, 1), _replay(log, PART, keys // NAMESPACES), _replay(log, EVERYTHING, keys))
    return [
        _row(keys, "replay of a tenth of many keys vs. of all", "events/s", found, TARGET_RATE),
        _row(keys, "the first event of that replay", "ms", _extra(found, "first_ms"), TARGET_FIRST_MS, at_most=True),
        _row(keys, "opening that log", "ms", _extra(found, "open_ms"), TARGET_OPEN_MS, at_most=True),
    ]


def _row(
    keys: int,
    title: str,
    unit: str,
    rounds: list[tuple[Measurement, Measurement]],
    target: float,
    *,
    at_most: bool = False,
) -> Row:
    return compare(
        "many_keys",
        title,
        unit=unit,
        peer_name="all keys",
        rounds=rounds,
        target=target,
        target_is="zbus at most" if at_most else "ratio at least",
        versions={"zbus": zbus_versions(), "peer": zbus_versions()},
        keys=keys,
    )


def _extra(rounds: list[tuple[Measurement, Measurement]], name: str) -> list[tuple[Measurement, Measurement]]:
    return [(Measurement(ours.extra[name]), Measurement(theirs.extra[name])) for ours, theirs in rounds]


def _replay(log: Path, expression: str, events: int) -> Callable[[], Measurement]:
    return lambda: asyncio.run(measure(log, expression, events))


async def fill(log: Path, keys: int) -> None:
    """Create a log with one event for each of `keys` keys."""
    async with zbus.open(log) as bus:
        for first in range(0, keys, BATCH):
            numbers = range(first, min(keys, first + BATCH))
            names = [(number, f"ns{number % NAMESPACES}/orders/{number:09d}") for number in numbers]
            await bus.put(*[zbus.Event(1, number, time_ns(), name, b"x" * 50) for number, name in names])


async def measure(log: Path, expression: str, events: int) -> Measurement:
    """Measure events per second of a first replay, with the time to open the log and to the first event."""
    begin = perf_counter_ns()
    async with zbus.open(log) as bus:
        opened = perf_counter_ns()
        seen, first = 0, opened
        async for _ in bus.replay(expression):
            if not seen:
                first = perf_counter_ns()
            seen += 1
        elapsed = perf_counter_ns() - opened
    if seen != events:
        raise RuntimeError(f"{expression} gave {seen} events instead of {events}")
    return Measurement(
        events / elapsed * 1e9, extra={"open_ms": (opened - begin) / 1e6, "first_ms": (first - opened) / 1e6}
    )


if __name__ == "__main__":
    run_one(rows)
