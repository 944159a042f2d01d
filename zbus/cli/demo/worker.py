"""The child process of `zbus demo`, as the parent sees it: started, killed, started again, and what it reported."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from pathlib import Path

Identity = tuple[int, int]  # publisher_id, sequence: what an event is, wherever it is seen

STOP_S = 20.0  # it stores its last acknowledgements and ends: well under a second, unless the machine is busy


class Worker:
    """A durable subscriber in another process. Its reports outlive it."""

    def __init__(self, log: Path, name: str, *options: str) -> None:
        self._command = [sys.executable, "-m", "zbus.cli.demo.child", str(log), name, *options]
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self.handled: Counter[Identity] = Counter()
        self.seen_again: set[Identity] = set()
        self._offsets: dict[Identity, int] = {}
        self.position = 0  # the highest offset that it reported as handled
        self._acknowledged = 0  # the same for acknowledged

    @property
    def acknowledged(self) -> int:
        """How many events it handled and acknowledged: to acknowledge one is to acknowledge all before it."""
        return sum(offset <= self._acknowledged for offset in self._offsets.values())

    @property
    def running(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process and wait until it subscribes; it resumes where its durable name stopped."""
        self._ready.clear()
        self._process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE)
        self._reading = asyncio.create_task(self._read(self._process))
        await self._ready.wait()

    async def kill(self) -> None:
        """SIGKILL, at once; then read the reports that it had written."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        await self._ended()

    async def stop(self) -> None:
        """Let it store its last acknowledgements and end; kill it if it does not."""
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
        self._ready.set()  # also when it ended before it began: nobody waits for ever

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
