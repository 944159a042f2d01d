"""The client side of the web benchmarks: the server process, and cheap clients on bare asyncio protocols."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

CHILD = Path(__file__).parent / "_web_child.py"
_EVENT = re.compile(rb'"key": ?"([^"]+)".*?"published_ns": ?"(\d+)".*?"payload": ?"(\d+) ')


class Child:
    """A server process of `_web_child.py`."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, str(CHILD), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self._read()["port"])

    def rss_mb(self) -> float:
        """Return its resident memory."""
        with open(f"/proc/{self.process.pid}/statm") as numbers:
            return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def cpu_s(self) -> float:
        """Return the processor time that it has used."""
        with open(f"/proc/{self.process.pid}/stat") as numbers:
            fields = numbers.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def play(self, *arguments: float) -> dict[str, Any]:
        """Let it publish. Returns the numbers of published events."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        return await asyncio.get_running_loop().run_in_executor(None, self._read)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


@contextmanager
def child(*arguments: str) -> Iterator[Child]:
    """Run a server during the block."""
    running = Child(*arguments)
    try:
        yield running
    finally:
        assert running.process.stdin is not None
        running.process.stdin.close()
        try:
            running.process.wait(10)
        except subprocess.TimeoutExpired:
            running.process.kill()
            running.process.wait()


class Reader(asyncio.Protocol):
    """A client of an event stream. It checks the order of each key's events and measures their latency."""

    def __init__(self, path: str, latencies_ns: list[int]) -> None:
        self._path, self._latencies = path, latencies_ns
        self.subscribed = asyncio.get_running_loop().create_future()
        self.expected: dict[bytes, int] = {}
        self.received = 0
        self.wrong = ""
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(f"GET {self._path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = time.time_ns()
        if not self.subscribed.done() and b"retry:" in data:
            self.subscribed.set_result(None)
        whole, end, rest = (self._rest + data).rpartition(b"\n\n")
        if not end:
            self._rest = rest
            return
        self._rest = rest
        for key, published, number in _EVENT.findall(whole):
            if int(number) != self.expected.get(key, 0):
                self.wrong = f"{key.decode()}: {int(number)} after {self.expected.get(key, 0) - 1}"
            self.expected[key] = int(number) + 1
            self.received += 1
            self._latencies.append(now - int(published))


class Poster(asyncio.Protocol):
    """A connection that posts again as soon as it receives a response."""

    def __init__(self, request: bytes, budget: list[int], durations_ns: list[int]) -> None:
        self._request, self._budget, self._durations = request, budget, durations_ns
        self.done = asyncio.get_running_loop().create_future()
        self._begun = 0
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def send(self) -> None:
        if self._budget[0] <= 0:
            self.done.set_result(None)
            return
        self._budget[0] -= 1
        self._begun = time.perf_counter_ns()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        if not data.endswith(b"}"):  # the body of every response is one JSON object
            self._rest = data
            return
        self._rest = b""
        if not data.startswith(b"HTTP/1.1 201 "):
            self.done.set_exception(RuntimeError(f"not stored: {data!r}"))
            return
        self._durations.append(time.perf_counter_ns() - self._begun)
        self.send()


def allow_files(number: int) -> None:
    """Raise the limit of open files for this number of connections, in this process and its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(number, hard), hard))


def web_versions() -> dict[str, str]:
    """Return the versions of the libraries that both sides use."""
    return {name: version(name) for name in ("starlette", "sse-starlette", "uvicorn", "httptools")}
