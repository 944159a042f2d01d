"""Events to stdout: JSON lines, a burst at a time, or readable lines on a terminal."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from rich.console import Console

from zbus.errors import SubscriberLagged
from zbus.event import Event
from zbus.subscriber import EventSubscriber

from .eventline import json_line, readable_line
from .output import is_terminal, note, write

BURST_BYTES = 64 * 1024
BURST_S = 0.1


class EventPrinter:
    """Gathers lines; `flush` writes them. It flushes by itself when much has gathered, or for long."""

    def __init__(self) -> None:
        self._console = Console() if is_terminal() else None
        self._burst = bytearray()
        self._flushed_at = time.monotonic()
        self.printed = 0

    def add(self, event: Event) -> None:
        """Print one event, now or with the burst that it belongs to."""
        if self._console is not None:
            self._console.print(readable_line(event), soft_wrap=True)
        else:
            self._burst += json_line(event)
        self.printed += 1
        if len(self._burst) >= BURST_BYTES or time.monotonic() - self._flushed_at >= BURST_S:
            self.flush()

    def flush(self) -> None:
        """Write what has gathered."""
        burst, self._burst = bytes(self._burst), bytearray()
        self._flushed_at = time.monotonic()
        write(burst)


async def print_stored(events: AsyncIterator[Event], printer: EventPrinter) -> None:
    """Print events to the end of a replay."""
    try:
        async for event in events:
            printer.add(event)
    finally:
        printer.flush()


async def print_live(subscriber: EventSubscriber, printer: EventPrinter, count: int | None = None) -> None:
    """Print events as they come, `count` of them at most.

    With a durable name each is written before it is acknowledged, and the last one is acknowledged at the end.
    """
    last: Event | None = None
    durable = subscriber.durable is not None
    try:
        while count is None or printer.printed < count:
            try:
                event = await subscriber.next()
            except SubscriberLagged as gap:
                printer.flush()
                note(f"zbus: {gap}")
                continue
            if event is None:
                return
            printer.add(event)
            if durable or not subscriber.queued:
                printer.flush()
            last = event
    finally:
        printer.flush()
        if durable and last is not None:
            await last.ack()
