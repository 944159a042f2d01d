"""Nodes in another process, driven as if they were here: `FarNode` has the methods of `Node`."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from contract_node import WAIT_S
from far_process import pack, unpack

from zbus import errors

CALL_S = 60.0
_numbers = itertools.count(1)


class FarProcess:
    """A child that opens nodes. Many tests share one: an import of Zenoh takes longer than most tests."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("ZBUS_", "DYN_"))}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", str(Path(__file__).with_name("far_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._calls: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="contract-far", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, node: int, name: str, *arguments: Any) -> Any:
        number = next(_numbers)
        answer: Future[Any] = Future()
        line = json.dumps({"id": number, "node": node, "call": name, "arguments": pack(arguments)})
        with self._lock:
            self._calls[number] = answer
            assert self._process.stdin is not None
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        reported = answer.result(CALL_S)
        if "error" in reported:
            raise _as_raised(reported)
        return unpack(reported["result"])

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._process.send_signal(signal.SIGKILL)
        self._gone()

    def end(self) -> None:
        """End it, whatever it does."""
        if self.alive:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._gone()

    def _gone(self) -> None:
        self._process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:  # a call that was under way when it was killed
                pass

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            reported = json.loads(line)
            with self._lock:
                self._calls.pop(reported["id"]).set_result(reported)
        with self._lock:
            for call in self._calls.values():
                call.set_exception(EOFError("the other process ended"))
            self._calls.clear()


class FarNode:
    """A node in another process."""

    def __init__(self, process: FarProcess, config: dict[str, Any], url: str) -> None:
        self.process, self.config, self.url = process, config, url
        self._number = next(_numbers)
        self.closed = False
        self._call("open", config, url)

    def send(self, frames: Sequence[tuple[str, bytes]]) -> float:
        return float(self._call("send", frames))

    def listen(self, expressions: Sequence[str]) -> None:
        self._call("listen", expressions)

    def received(self, count: int, timeout_s: float = WAIT_S) -> list[bytes]:
        return list(self._call("received", count, timeout_s))

    def received_frame(self, frame: bytes, timeout_s: float = WAIT_S) -> bool:
        return bool(self._call("received_frame", frame, timeout_s))

    def received_all(self, frames: Sequence[bytes], timeout_s: float = WAIT_S) -> list[bytes]:
        return list(self._call("received_all", frames, timeout_s))

    def forget(self) -> None:
        self._call("forget")

    def ready(self, key: str) -> bool:
        return bool(self._call("ready", key))

    def wanted(self, keys: Sequence[str], timeout_s: float = WAIT_S) -> None:
        self._call("wanted", keys, timeout_s)

    def unwanted(self, key: str, timeout_s: float = WAIT_S) -> None:
        self._call("unwanted", key, timeout_s)

    def flood(self, key: str, pause_s: float = 0.0) -> None:
        self._call("flood", key, pause_s)

    def calm(self, timeout_s: float = WAIT_S) -> dict[str, Any]:
        return dict(self._call("calm", timeout_s))

    def answer(self, scripts: dict[str, dict[str, Any]]) -> None:
        self._call("answer", scripts)

    def asked(self, count: int, timeout_s: float = WAIT_S) -> list[bytes]:
        return list(self._call("asked", count, timeout_s))

    def release(self) -> None:
        self._call("release")

    def ask(self, key: str, payload: bytes = b"", timeout_s: float = 10.0) -> dict[str, Any]:
        return dict(self._call("ask", key, payload, timeout_s))

    def ask_and_leave(self, key: str, payload: bytes = b"", after_replies: int = 0, timeout_s: float = 10.0) -> float:
        return float(self._call("ask_and_leave", key, payload, after_replies, timeout_s))

    def close(self) -> float:
        self.closed = True
        return float(self._call("close"))

    def threads(self) -> list[str]:
        """The threads of zbus that run in the other process."""
        return list(self._call("threads"))

    def kill(self) -> None:
        """kill -9 of the whole process."""
        self.closed = True
        self.process.kill()

    def _call(self, name: str, *arguments: Any) -> Any:
        return self.process.call(self._number, name, *arguments)


def _as_raised(reported: dict[str, Any]) -> Exception:
    """The error of the other process, of the same type where it is one of zbus."""
    kind = getattr(errors, reported["error"], None)
    if kind is not None:
        return kind(*unpack(reported["fields"]))  # type: ignore[no-any-return]
    return AssertionError(f"{reported['error']} in the other process: {reported['text']}")
