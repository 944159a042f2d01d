"""Helpers for the tests of bridges: addresses for the fabrics, and receivers that keep their events."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import zbus
from zbus.bus import Bus

WAIT_S = 30.0
QUIET_S = 0.6


class Receiver:
    """The events that a subscription received, in order."""

    def __init__(self) -> None:
        self.events: list[zbus.Event] = []
        self._news = asyncio.Condition()

    async def listen(self, subscription: zbus.EventSubscriber) -> None:
        async for event in subscription:
            async with self._news:
                self.events.append(event)
                self._news.notify_all()

    async def wait(self, count: int, timeout_s: float = WAIT_S) -> list[zbus.Event]:
        """The events, once there are so many; a failure that says how many there are otherwise."""
        try:
            async with asyncio.timeout(timeout_s), self._news:
                await self._news.wait_for(lambda: len(self.events) >= count)
        except TimeoutError:
            raise AssertionError(f"{len(self.events)} of {count} events came") from None
        return list(self.events)

    async def only(self, count: int) -> list[zbus.Event]:
        """So many events, and after a while still no more."""
        await self.wait(count)
        await asyncio.sleep(QUIET_S)
        assert len(self.events) == count, f"{len(self.events)} events came, not {count}"
        return list(self.events)


@asynccontextmanager
async def receiving(bus: Bus, *expressions: str, **options: Any) -> AsyncIterator[Receiver]:
    """Listen until the block ends."""
    found = Receiver()
    async with bus.subscribe(*expressions, **{"queue_events": 100_000} | options) as subscription:
        task = asyncio.get_running_loop().create_task(found.listen(subscription))
        try:
            yield found
        finally:
            task.cancel()
            await asyncio.wait([task])


async def until(true: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.01)


def identity(event: zbus.Event) -> tuple[object, ...]:
    """All that a bridge must keep."""
    return (
        event.publisher_id,
        event.sequence,
        event.published_at,
        event.key,
        event.topic,
        event.payload,
        dict(event.headers),
    )


def router(port: int) -> Bus:
    return zbus.open(mode="router", listen=[f"tcp/127.0.0.1:{port}"])


class Command:
    """A `zbus` command as a process: its lines of stdout as JSON, its stderr as text."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        self.process = subprocess.Popen(
            [str(Path(sys.executable).with_name("zbus")), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("ZBUS_")} | environment,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.errors: list[str] = []
        self._readers = [threading.Thread(target=each, daemon=True) for each in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def line(self, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """The next line of stdout."""
        try:
            found: dict[str, Any] = json.loads(self.lines.get(timeout=timeout_s))
            return found
        except queue.Empty:
            raise AssertionError(f"no line; stderr: {self.errors}") from None

    def rest(self) -> list[dict[str, Any]]:
        """All further lines, once it has ended."""
        return [json.loads(self.lines.get_nowait()) for _ in range(self.lines.qsize())]

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self._ended()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Tell it to end, and wait until it did."""
        self.process.send_signal(number)
        return self._ended()

    def wait(self) -> int:
        return self._ended()

    def _ended(self) -> int:
        code = self.process.wait(WAIT_S)
        for reader in self._readers:
            reader.join(WAIT_S)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line.rstrip("\n"))


@contextmanager
def command(*arguments: object, **environment: str) -> Iterator[Command]:
    """A running command that ends with the block, one way or another."""
    running = Command(*arguments, **environment)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.kill()
