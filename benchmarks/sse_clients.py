"""How long do events take to 1,000 SSE clients of one server, each with its own key, and how much memory is used?

The server process durably publishes 2,000 events per second in total, and 5 per second that reach every client; the
clients run in another process. A missed event or a wrong order invalidates the row. The peer uses sse-starlette like
its documentation, with a queue in memory for each client, and without a log.
"""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

from _harness import Measurement, Row, Sizes, compare, folder, percentile_us, run_one, settled, zbus_versions
from _web import Child, Reader, allow_files, child, web_versions

OWN_PER_S, ALL_PER_S = 2000, 5
LATENCY_MS, MEMORY_MB = 200.0, 50.0
WAIT_S = 60.0


def rows(sizes: Sizes) -> list[Row]:
    """Measure one row for the latency and one for the memory."""
    clients, seconds = sizes.of(1000, 40), float(sizes.of(15, 1))
    allow_files(clients * 2 + 200)
    per_s = OWN_PER_S if clients == 1000 else clients * 2
    with folder() as where:
        (zbus, grown), (peer, _) = (
            settled_pair("zbus", clients, seconds, per_s, where),
            settled_pair("bare-feeds", clients, seconds, per_s, where),
        )
    versions = {"zbus": zbus_versions() | web_versions(), "peer": web_versions()}
    about = {"clients": clients, "seconds": seconds, **{f"zbus_{name}": value for name, value in zbus.extra.items()}}
    broken = "events were missed" if zbus.extra["missed"] else ""
    return [
        compare(
            "sse_clients",
            "1,000 SSE clients, 2,000 events/s and 5/s to all: p99 from publishing to the client",
            unit="ms",
            peer_name="sse-starlette, in memory",
            rounds=[(zbus, peer)],
            target=LATENCY_MS,
            target_is="zbus at most",
            versions=versions,
            broken=broken,
            **about,
        ),
        compare(
            "sse_clients",
            "the same: memory of the server vs. the same server without clients",
            unit="MB",
            peer_name="idle",
            rounds=[grown],
            target=MEMORY_MB,
            target_is="more than peer at most",
            versions=versions,
            broken=broken,
            **about,
        ),
    ]


def settled_pair(
    task: str, clients: int, seconds: float, per_s: int, where: Path
) -> tuple[Measurement, tuple[Measurement, Measurement]]:
    """Measure the latency of one side, and its memory with clients and idle."""
    arguments = (task, str(where / "log.db")) if task == "zbus" else (task,)
    with child(*arguments) as server:
        found: list[Measurement] = []

        def measured() -> Measurement:
            found[:] = asyncio.run(measure(server, clients, seconds, per_s))
            return found[0]

        settled(measured)
    return found[0], (found[1], found[2])


async def measure(server: Child, clients: int, seconds: float, per_s: int) -> list[Measurement]:
    """Measure the p99 in milliseconds, the peak memory, and that of the idle server."""
    loop = asyncio.get_running_loop()
    idle = server.rss_mb()
    latencies: list[int] = []
    readers: list[Reader] = []
    for number in range(clients):
        path = f"/events?key=bench/client-{number}&key=bench/all"
        _, reader = await loop.create_connection(lambda path=path: Reader(path, latencies), "127.0.0.1", server.port)
        readers.append(reader)
        if number % 50 == 49:
            await asyncio.wait_for(asyncio.gather(*[each.subscribed for each in readers]), WAIT_S)
    await asyncio.wait_for(asyncio.gather(*[each.subscribed for each in readers]), WAIT_S)
    connected, cpu = server.rss_mb(), server.cpu_s()
    highest = connected
    gc.collect()
    gc.disable()  # a pause of the clients must not count as latency of the server
    playing = asyncio.ensure_future(server.play(clients, seconds, per_s, ALL_PER_S))
    while not playing.done():
        await asyncio.wait((playing,), timeout=0.2)
        highest = max(highest, server.rss_mb())
    sent = playing.result()
    expected = sent["own"] + sent["all"] * clients
    deadline = loop.time() + WAIT_S
    while sum(reader.received for reader in readers) < expected and loop.time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    gc.enable()
    cpu = server.cpu_s() - cpu
    received = sum(reader.received for reader in readers)
    wrong = next((reader.wrong for reader in readers if reader.wrong), "")
    for reader in readers:
        reader.transport.abort()  # type: ignore[attr-defined]
    if wrong:
        raise RuntimeError(f"out of order: {wrong}")
    extra = {
        "missed": expected - received,
        "received": received,
        "connected_mb": connected - idle,
        "highest_mb": highest - idle,
        "cpu": cpu / sent["seconds"],
        "late_ms": sent["late_ms"],
    }
    p99 = (percentile_us(latencies, 99) or 0.0) / 1000
    return [Measurement(p99, latencies, extra), Measurement(highest), Measurement(idle)]


if __name__ == "__main__":
    run_one(rows)
