"""How many durable publishes per second over HTTP, compared with a bare starlette handler that responds immediately?

64 keep-alive connections each post again when they receive a response. The clients run in this process, each server in
its own process with the same uvicorn. zbus responds once the event is on disk.
"""

from __future__ import annotations

import asyncio
import time

from _harness import PAYLOAD, Measurement, Row, Sizes, alternate, compare, folder, run_one, zbus_versions
from _web import Child, Poster, child, web_versions

CONNECTIONS = 64
WARM_UP = 500
TARGET = 0.5


def rows(sizes: Sizes) -> list[Row]:
    """Measure the row."""
    events, rounds = sizes.of(20_000, 500), sizes.of(5, 1)
    with folder() as where, child("zbus", str(where / "log.db")) as zbus, child("bare-post") as bare:
        found = alternate(
            rounds,
            lambda: asyncio.run(measure(zbus, events)),
            lambda: asyncio.run(measure(bare, events)),
        )
    return [
        compare(
            "http_publish",
            "POST of durable events, 64 connections",
            unit="events/s",
            peer_name="starlette that answers at once",
            rounds=found,
            target=TARGET,
            versions={"zbus": zbus_versions() | web_versions(), "peer": web_versions()},
            events=events,
            connections=CONNECTIONS,
        )
    ]


async def measure(server: Child, events: int) -> Measurement:
    """Measure responses per second, and the duration of each request."""
    loop = asyncio.get_running_loop()
    head = "POST /events/bench/orders HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/octet-stream\r\n"
    request = f"{head}Content-Length: {len(PAYLOAD)}\r\n\r\n".encode() + PAYLOAD
    budget, durations = [WARM_UP], []
    posters = []
    for _ in range(CONNECTIONS):
        _, poster = await loop.create_connection(lambda: Poster(request, budget, durations), "127.0.0.1", server.port)
        posters.append(poster)
    await _turn(posters)
    budget[0] = events
    durations.clear()
    cpu, begin = server.cpu_s(), time.perf_counter()
    await _turn(posters)
    took, cpu = time.perf_counter() - begin, server.cpu_s() - cpu
    for poster in posters:
        poster.transport.abort()
    return Measurement(events / took, durations, {"cpu": cpu / took, "cpu_us_each": cpu / events * 1e6})


async def _turn(posters: list[Poster]) -> None:
    for poster in posters:
        poster.done = asyncio.get_running_loop().create_future()
    for poster in posters:
        poster.send()
    await asyncio.gather(*[poster.done for poster in posters])


if __name__ == "__main__":
    run_one(rows)
