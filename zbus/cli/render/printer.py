"""Events on stdout: JSON lines in bursts, or readable lines on a terminal."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from rich.console import Console
from rich.text import Text

from zbus.deliver.subscriber import EventSubscriber
from zbus.errors import SubscriberLagged
from zbus.event import Event

from .eventline import json_line, readable_line
from .output import is_terminal, note, write

BURST_BYTES = 64 * 1024
BURST_S = 0.1


class EventPrinter:
    """Buffers lines until `flush`, or until `BURST_BYTES` or `BURST_S` are reached.

    `as_json` selects JSON lines or readable lines. The default is readable lines on a terminal, JSON lines otherwise.
    """

    def __init__(self, as_json: bool | None = None) -> None:
        self.as_json = not is_terminal() if as_json is None else as_json
        self._console = Console() if is_terminal() and not self.as_json else None
        self._burst = bytearray()
        self._flushed_at = time.monotonic()
        self.printed = 0

    async def prepare(self) -> None:
        """Prepare for the next event. A subclass may override this; here it does nothing."""

    def add(self, event: Event) -> None:
        """Print one event, immediately or with the rest of its burst."""
        self.print(json_line(event) if self.as_json else readable_line(event))
        self.printed += 1

    def print(self, line: bytes | Text) -> None:
        """Print bytes unchanged, or text, in colour if stdout is a terminal."""
        if isinstance(line, bytes):
            self._burst += line
        elif self._console is not None:
            self._console.print(line, soft_wrap=True)
        else:
            self._burst += f"{line.plain}\n".encode(errors="backslashreplace")
        if len(self._burst) >= BURST_BYTES or time.monotonic() - self._flushed_at >= BURST_S:
            self.flush()

    def flush(self) -> None:
        """Write the buffered lines."""
        burst, self._burst = bytes(self._burst), bytearray()
        self._flushed_at = time.monotonic()
        write(burst)


async def print_stored(events: AsyncIterator[Event], printer: EventPrinter) -> None:
    """Print the events of a replay."""
    try:
        async for event in events:
            printer.add(event)
    finally:
        printer.flush()


async def print_live(subscriber: EventSubscriber, printer: EventPrinter, count: int | None = None) -> None:
    """Print events as they arrive, at most `count`.

    A durable subscription writes each event before it acknowledges it, and acknowledges the last one at the end.
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
            await printer.prepare()
            printer.add(event)
            if durable or not subscriber.queued:
                printer.flush()
            last = event
    finally:
        printer.flush()
        if durable and last is not None:
            await last.ack()
