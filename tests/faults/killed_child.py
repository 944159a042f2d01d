"""The process that the kill tests kill: it publishes, or reads durably, and writes down what it knows.

Each line is written with one `write` after the fact that it states, so whatever a killed process had
learned is in the file, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import sys

import zbus

PUBLISHERS = 8


async def publish(log: str, out: int) -> None:
    async with zbus.open(log) as bus:

        async def run(number: int) -> None:
            publisher = await bus.publisher(f"kill/{number}/x")
            while True:
                sequence = publisher.sequence
                if sequence % 7 == 3:
                    offsets = await publisher.publish_many([b"%d" % (sequence + n) for n in range(20)])
                    acknowledged = list(enumerate(offsets, sequence))
                else:
                    acknowledged = [(sequence, await publisher.publish(b"%d" % sequence))]
                lines = [f"{publisher.publisher_id} {number} {offset}\n" for number, offset in acknowledged]
                os.write(out, "".join(lines).encode())

        await asyncio.gather(*[run(number) for number in range(PUBLISHERS)])


async def read(log: str, out: int) -> None:
    async with zbus.open(log, read_only=True) as bus:
        async with bus.subscribe("kill/**", start="beginning", durable="reader") as subscription:
            os.write(out, b"start\n")
            async for event in subscription:
                os.write(out, f"seen {event.publisher_id} {event.sequence} {event.offset}\n".encode())
                if event.offset % 5 == 0:
                    await event.ack()
                    os.write(out, f"acked {event.offset}\n".encode())


if __name__ == "__main__":
    role, log, path = sys.argv[1:]
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    asyncio.run({"publish": publish, "read": read}[role](log, target))
