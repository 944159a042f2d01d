"""Helpers for the tests of the ZMQ adapter; run as a program, it is the other process of a test.

    python zmq_support.py publish URL KEY        one frame per line of stdin, then the line `sent N`
    python zmq_support.py listen URL EXPRESSION  a line per frame that arrives
    python zmq_support.py hold URL               opens a fabric and prints its diagnostics
    python zmq_support.py run CODE               whatever else a test needs

Each first prints `ready`, and ends when stdin is closed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from zbus.config import BusConfig
from zbus_zmq.fabric import open_fabric

DEADLINE_S = 20.0


class Collector:
    """A `Receive` that keeps what arrives."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self._news = threading.Condition()

    def __call__(self, frame: bytes, done: Callable[[], None] | None = None) -> None:
        with self._news:
            self.frames.append(frame)
            self._news.notify_all()

    def wait(self, number: int, timeout_s: float = DEADLINE_S) -> list[bytes]:
        """The frames, once there are so many; fewer if time is over."""
        with self._news:
            self._news.wait_for(lambda: len(self.frames) >= number, timeout_s)
            return list(self.frames)

    def stays_at(self, number: int, for_s: float = 0.3) -> bool:
        """Whether no further frame arrives for a while."""
        with self._news:
            return not self._news.wait_for(lambda: len(self.frames) != number, for_s)


class Replies:
    """An `OnReply` that keeps the replies."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.ends = 0
        self._news = threading.Condition()

    def __call__(self, reply: bytes | None) -> None:
        with self._news:
            if reply is None:
                self.ends += 1
            else:
                self.received.append(reply)
            self._news.notify_all()

    def wait(self, timeout_s: float = DEADLINE_S) -> list[bytes]:
        """All replies, once they have ended."""
        with self._news:
            assert self._news.wait_for(lambda: self.ends > 0, timeout_s), f"no end after {len(self.received)} replies"
            return list(self.received)


def until(true: Callable[[], Any], timeout_s: float = DEADLINE_S) -> bool:
    """Whether something becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.002)
    return True


@contextmanager
def fabrics(url: str, number: int = 2, **config: Any) -> Iterator[list[Any]]:
    """Several nodes in this process, each of which sees the others."""
    made: list[Any] = []
    try:
        for _ in range(number):
            made.append(open_fabric(BusConfig(**config), url))
        brokered = "xsub=" in url
        assert until(lambda: brokered or all(each.diagnostics()["nodes_connected"] == number - 1 for each in made))
        yield made
    finally:
        for each in made:
            each.close()


class Child:
    """Another process of a test. It is killed when the test is over."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | (env or {}),
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()

    def wait_for(self, start: str, timeout_s: float = DEADLINE_S) -> str:
        """The first line that begins so."""

        def found() -> str | None:
            return next((line for line in self.lines if line.startswith(start)), None)

        with self._news:
            assert self._news.wait_for(found, timeout_s), f"no line {start!r} among {self.lines[-5:]}"
            return found() or ""

    def say(self, *lines: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{line}\n" for line in lines))
        self.process.stdin.flush()

    def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    def end(self) -> int:
        """Let it end by itself."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        code = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        self.process.stdout.close()
        return code


@contextmanager
def children() -> Iterator[Callable[..., Child]]:
    """Start processes; none is left when the block ends."""
    started: list[Child] = []

    def start(*arguments: str, **env: str) -> Child:
        started.append(Child(*arguments, env=env))
        return started[-1]

    try:
        yield start
    finally:
        for child in started:
            child.process.kill()
            if not child.process.stdin.closed:  # type: ignore[union-attr]
                child.end()


@contextmanager
def broker_process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """`zbus broker` as a process, and the line by which it says that it is ready."""
    command = [str(Path(sys.executable).with_name("zbus")), "broker", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the broker said nothing: {process.stderr.read() if process.stderr else ''}"
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def raw_socket(context: zmq.Context[Any], kind: int, **options: Any) -> Any:
    """A bare socket that does not linger."""
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    for name, value in options.items():
        socket.set(getattr(zmq, name), value)
    return socket


def _publish(url: str, key: str) -> None:
    fabric = open_fabric(BusConfig(), url)
    print("ready", flush=True)
    for sent, line in enumerate(sys.stdin, 1):
        fabric.send([(key, line.rstrip("\n").encode())])
        print(f"sent {sent}", flush=True)
    fabric.close()


def _listen(url: str, expression: str) -> None:
    fabric = open_fabric(BusConfig(), url)
    fabric.listen([expression], lambda frame, done: print(f"frame {frame.decode()}", flush=True))
    print("ready", flush=True)
    sys.stdin.read()
    fabric.close()


def _hold(url: str) -> None:
    fabric = open_fabric(BusConfig(), url)
    print("ready", flush=True)
    print(f"diagnostics {json.dumps(fabric.diagnostics())}", flush=True)
    sys.stdin.read()
    fabric.close()


if __name__ == "__main__":
    {"publish": _publish, "listen": _listen, "hold": _hold, "run": exec}[sys.argv[1]](*sys.argv[2:])
