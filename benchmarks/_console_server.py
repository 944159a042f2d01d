"""The server process of `console_frames`: a bus, its web server, and events at a steady rate.

    python _console_server.py LOG EVENTS_PER_S

The first line on stdout is the URL. It publishes from the first line on stdin to the second, then prints the number
of events and ends.
"""

from __future__ import annotations

import asyncio
import sys
import time

import zbus
from zbus_web import WebSettings, serve

KEYS, BURST_S = 50, 0.02


async def main(path: str, events_per_s: int) -> None:
    async with zbus.open(path) as bus, serve(bus, WebSettings(port=0)) as server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        end = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        print(await publish(bus, events_per_s, end), flush=True)
        await asyncio.to_thread(sys.stdin.readline)


async def publish(bus: zbus.Bus, events_per_s: int, end: asyncio.Task[str]) -> int:
    """Publish events over all keys and catch up after delays to keep the rate. Returns their number."""
    publishers = [await bus.publisher(f"load/part-{number % 5}/device-{number}") for number in range(KEYS)]
    begin, sent = time.monotonic(), 0
    while not end.done():
        due = int((time.monotonic() - begin) * events_per_s)
        work = []
        for number in range(sent, due):
            payload = {"number": number, "value": number % 997 / 10, "text": "x" * 60}
            work.append(publishers[number % KEYS].publish(payload, headers={"region": "eu"}))
        await asyncio.gather(*work)
        sent = max(sent, due)
        await asyncio.sleep(BURST_S)
    return sent


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
