"""The durable subscriber of `zbus demo`, in its own process: `python -m zbus.cli.demo.child LOG NAME`.

It reports on stdout, line by line: `handled` before it acknowledges an event, `acknowledged` once that is on disk.
Each line is written immediately, so that the reports survive a kill of the process. It exits when its stdin is closed.
"""

from __future__ import annotations

import asyncio
import os
import sys

import zbus

SKIPPED = 100  # with --skip, the handler ignores its hundredth event, a loss that the demo must detect


def report(what: str, event: zbus.Event) -> None:
    """Write one report in one system call, so that a kill never leaves half a line."""
    os.write(1, f"{what} {event.publisher_id} {event.sequence} {event.offset}\n".encode())


async def acknowledge(event: zbus.Event) -> None:
    """Acknowledge an event, wait until that is on disk, and report it."""
    await event.ack()
    report("acknowledged", event)


async def handle(log: str, name: str, skip: bool) -> None:
    """Handle every event of the shop and the fleet, from where the durable subscription stopped."""
    acknowledging: set[asyncio.Task[None]] = set()
    seen = 0
    async with zbus.open(config=zbus.BusConfig.exactly(log=log, read_only=True)) as bus:
        async with bus.subscribe("shop/**", "fleet/**", durable=name, start="beginning") as subscriber:
            os.write(1, b"ready\n")
            try:
                async for event in subscriber:
                    seen += 1
                    if skip and seen == SKIPPED:
                        continue
                    report("handled", event)
                    # The next event does not wait for the disk: acknowledgements are stored many at a time.
                    task = asyncio.create_task(acknowledge(event))
                    acknowledging.add(task)
                    task.add_done_callback(acknowledging.discard)
            finally:
                await asyncio.gather(*acknowledging)


async def run(log: str, name: str, skip: bool) -> None:
    """Handle events until the parent closes stdin or exits."""
    handling = asyncio.create_task(handle(log, name, skip))
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(0)  # a closed stdin stays readable and would call this again
        handling.cancel()

    loop.add_reader(0, end)
    try:
        await handling
    except asyncio.CancelledError:
        pass


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], sys.argv[2], "--skip" in sys.argv[3:]))
