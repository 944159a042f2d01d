"""The child process of `zbus demo` in the parent: start, kill, restart, and the reports of the child."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from pathlib import Path

Identity = tuple[int, int]  # publisher_id and sequence of an event

STOP_S = 20.0  # time limit to store the last acknowledgements; well under a second unless the machine is busy


class Worker:
    """A durable subscriber in another process. Its reports remain after it is killed."""

    def __init__(self, log: Path, name: str, *options: str) -> None:
        self._command = [sys.executable, "-m", "zbus.cli.demo.child", str(log), name, *options]
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self.handled: Counter[Identity] = Counter()
        self.seen_again: set[Identity] = set()
        self._offsets: dict[Identity, int] = {}
        self.position = 0  # highest offset that it reported as handled
        self._acknowledged = 0  # highest offset that it reported as acknowledged

    @property
    def acknowledged(self) -> int:
        """Number of handled events that are acknowledged. An acknowledgement covers all earlier events."""
        return sum(offset <= self._acknowledged for offset in self._offsets.values())

    @property
    def running(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process and wait until it has subscribed. It resumes where its durable subscription stopped."""
        self._ready.clear()
        self._process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE)
        self._reading = asyncio.create_task(self._read(self._process))
        await self._ready.wait()

    async def kill(self) -> None:
        """Send SIGKILL, then read the reports that the process had written."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        await self._ended()

    async def stop(self) -> None:
        """Let the process store its last acknowledgements and exit. Kill it if it does not exit in time."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                async with asyncio.timeout(STOP_S):
                    await self._ended()
            except TimeoutError:
                await self.kill()

    async def _ended(self) -> None:
        if self._process is not None and self._reading is not None:
            await asyncio.shield(self._reading)
            await self._process.wait()

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self._take(line.split())
        self._ready.set()  # even if the process ended before it was ready, so that `start` returns

    def _take(self, report: list[bytes]) -> None:
        if len(report) != 4:
            self._ready.set()
            return
        identity, offset = (int(report[1]), int(report[2])), int(report[3])
        if report[0] == b"acknowledged":
            self._acknowledged = max(self._acknowledged, offset)
            return
        if offset <= self._acknowledged:
            self.seen_again.add(identity)
        self.handled[identity] += 1
        self._offsets[identity] = offset
        self.position = max(self.position, offset)
