"""Measurements in a fresh interpreter: `python benchmarks/_child.py TASK` prints one line of JSON.

Nothing but the standard library is imported before the task begins.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

OPTIONAL = ("nats", "zmq", "moka_py", "pyspark", "starlette", "prometheus_client")
HEAVY = ("zenoh", "sqlalchemy", "pydantic", "apsw")
ZENOH_SETTINGS = {
    "mode": '"peer"',
    "listen/endpoints": "[]",
    "connect/endpoints": "[]",
    "scouting/multicast/enabled": "false",
    "scouting/gossip/enabled": "false",
    "transport/shared_memory/enabled": "false",
}


def rss_mb() -> float:
    """Return the resident memory of this process."""
    gc.collect()
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def import_module(name: str) -> dict[str, Any]:
    """Measure the duration of an import, and list the libraries that it loaded."""
    begin = time.perf_counter()
    __import__(name)
    took = time.perf_counter() - begin
    return {"ms": took * 1000, "loaded": [each for each in OPTIONAL + HEAVY if each in sys.modules]}


def zbus_subscriptions(count: int) -> dict[str, Any]:
    """Measure the memory of subscriptions on a bus."""
    import asyncio

    import zbus

    async def run() -> float:
        async with zbus.open() as bus:
            bus.subscribe("warm/up")
            before = rss_mb()
            kept = [bus.subscribe(f"shop/{number}/*", f"audit/{number}") for number in range(count)]
            return (rss_mb() - before) * 1000 / len(kept)

    return {"mb_per_1000": asyncio.run(run())}


def _bare_session() -> Any:
    import zenoh

    config = zenoh.Config()
    for name, value in ZENOH_SETTINGS.items():
        config.insert_json5(name, value)
    return zenoh.open(config)


def zenoh_subscriptions(count: int) -> dict[str, Any]:
    """Measure the memory of bare zenoh subscribers with the default callback."""
    with _bare_session() as session:
        first = session.declare_subscriber("warm/up", lambda _: None)
        before = rss_mb()
        kept = [session.declare_subscriber(f"shop/{number}/*", lambda _: None) for number in range(count)]
        taken = rss_mb() - before
        for each in [first, *kept]:
            each.undeclare()
    return {"mb_per_1000": taken * 1000 / count}


def zbus_idle(log: str) -> dict[str, Any]:
    """Measure the memory of an open bus with a log, beyond its libraries and beyond `import zbus`."""
    import asyncio

    import zbus

    imported = rss_mb()
    import zbus.config
    import zbus_log  # noqa: F401
    import zbus_zenoh.fabric  # noqa: F401

    libraries = rss_mb()

    async def run() -> tuple[float, int]:
        async with zbus.open(log) as bus:
            await (await bus.publisher("warm/up")).publish(b"x")
            await asyncio.sleep(0.3)
            return rss_mb(), len(os.listdir("/proc/self/task"))

    is_open, threads = asyncio.run(run())
    return {
        "over_libraries_mb": is_open - libraries,
        "over_import_zbus_mb": is_open - imported,
        "rss_mb": is_open,
        "threads": threads,
    }


def bare_idle(path: str) -> dict[str, Any]:
    """Measure the memory of a bare zenoh session with a bare SQLite file."""
    import apsw
    import zenoh  # noqa: F401

    libraries = rss_mb()
    with _bare_session():
        connection = apsw.Connection(path)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE events (offset INTEGER PRIMARY KEY, payload BLOB)")
        connection.execute("INSERT INTO events (payload) VALUES (x'')")
        time.sleep(0.3)
        is_open = rss_mb()
        connection.close()
    return {"over_libraries_mb": is_open - libraries, "rss_mb": is_open}


def main() -> None:
    """Run the task named by the arguments."""
    task, argument = sys.argv[1:]
    tasks: dict[str, Any] = {
        "import": lambda: import_module(argument),
        "zbus-subscriptions": lambda: zbus_subscriptions(int(argument)),
        "zenoh-subscriptions": lambda: zenoh_subscriptions(int(argument)),
        "zbus-idle": lambda: zbus_idle(argument),
        "bare-idle": lambda: bare_idle(argument),
    }
    print(json.dumps(tasks[task]()))


if __name__ == "__main__":
    main()
