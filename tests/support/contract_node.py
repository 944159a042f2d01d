"""A node of a mesh as the contract suite drives it: a fabric, what it received, and scripts that answer requests.

The same object serves in the test's process and, driven over pipes, in another one (`far_process.py`), so that a
promise is written once and does not care at which end a node is.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from zbus.errors import TransportError
from zbus.ports.fabric import Fabric, IncomingRequest, RequestHandle

WAIT_S = 20.0  # how long anything may take before it counts as never
POLL_S = 0.005


class Replies:
    """What a request brought: the replies, when the end came, and whatever came after the end (which must not)."""

    def __init__(self) -> None:
        self.replies: list[bytes] = []
        self.ends = 0
        self.after_end = 0
        self.asking: RequestHandle | None = None  # kept, as a requester keeps it
        self.changed = threading.Condition()

    def received(self, data: bytes | None) -> None:
        with self.changed:
            if self.ends:
                self.after_end += 1
            if data is None:
                self.ends += 1
            else:
                self.replies.append(data)
            self.changed.notify_all()

    def wait(self, enough: Callable[[], bool], timeout_s: float) -> bool:
        with self.changed:
            return self.changed.wait_for(enough, timeout_s)


class Node:
    """One fabric and what happens to it. Every wait has a deadline; a wait that fails says what there was."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self._frames: list[bytes] = []
        self._changed = threading.Condition()
        self._requests: queue.SimpleQueue[tuple[IncomingRequest, dict[str, Any]] | None] = queue.SimpleQueue()
        self._held: list[IncomingRequest] = []
        self._asked: list[bytes] = []
        self.strange_keys: list[str] = []  # of requests without a script
        self._worker: threading.Thread | None = None
        self._flood: tuple[threading.Thread, threading.Event, dict[str, Any]] | None = None

    # --- frames

    def send(self, frames: Sequence[tuple[str, bytes]]) -> float:
        """Send, and say how long it took."""
        began = time.monotonic()
        self.fabric.send([(key, frame) for key, frame in frames])
        return time.monotonic() - began

    def listen(self, expressions: Sequence[str]) -> None:
        self.fabric.listen(list(expressions), self._receive)

    def _receive(self, frame: bytes, acknowledge: Callable[[], None] | None) -> None:
        with self._changed:
            self._frames.append(frame)
            self._changed.notify_all()
        if acknowledge is not None:
            acknowledge()

    def received(self, count: int, timeout_s: float = WAIT_S) -> list[bytes]:
        """All frames so far, once there are `count` of them or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._frames) >= count, timeout_s)
            return list(self._frames)

    def received_frame(self, frame: bytes, timeout_s: float = WAIT_S) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: frame in self._frames, timeout_s)

    def received_all(self, frames: Sequence[bytes], timeout_s: float = WAIT_S) -> list[bytes]:
        """Those of the frames that have not come when the time is over; returns as soon as all have."""
        missing = set(frames)

        def found() -> bool:
            missing.difference_update(self._frames)
            return not missing

        with self._changed:
            self._changed.wait_for(found, timeout_s)
            return sorted(missing)

    def forget(self) -> None:
        with self._changed:
            self._frames.clear()

    def ready(self, key: str) -> bool:
        return self.fabric.ready(key)

    def wanted(self, keys: Sequence[str], timeout_s: float = WAIT_S) -> None:
        """Until the fabric says that some other node wants each of the keys."""
        deadline = time.monotonic() + timeout_s
        for key in keys:
            while not self._ready(key):
                assert time.monotonic() < deadline, f"ready({key!r}) stayed false for {timeout_s} s"
                time.sleep(POLL_S)

    def unwanted(self, key: str, timeout_s: float = WAIT_S) -> None:
        """Until the fabric says that it has lost who wanted the key."""
        deadline = time.monotonic() + timeout_s
        while self._ready(key):
            assert time.monotonic() < deadline, f"ready({key!r}) stayed true for {timeout_s} s"
            time.sleep(POLL_S)

    def _ready(self, key: str) -> bool:
        try:
            return self.fabric.ready(key)
        except TransportError:
            return False

    # --- sending without pause

    def flood(self, key: str, pause_s: float = 0.0) -> None:
        """Send numbered frames from a thread until `calm`."""
        over = threading.Event()
        reported: dict[str, Any] = {"sent": 0, "errors": 0, "longest_s": 0.0, "unexpected": ""}

        def run() -> None:
            number = 0
            while not over.is_set():
                began = time.monotonic()
                try:
                    self.fabric.send([(key, b"%d" % number)])
                    reported["sent"] += 1
                except TransportError:
                    reported["errors"] += 1
                    over.wait(0.01)
                except Exception as error:
                    reported["unexpected"] = repr(error)
                    return
                finally:
                    reported["longest_s"] = max(reported["longest_s"], time.monotonic() - began)
                number += 1
                if pause_s:
                    over.wait(pause_s)

        thread = threading.Thread(target=run, name="contract-flood", daemon=True)
        self._flood = thread, over, reported
        thread.start()

    def calm(self, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """End the flood and say what became of it."""
        assert self._flood is not None, "no flood"
        thread, over, reported = self._flood
        over.set()
        thread.join(timeout_s)
        return reported | {"ended": not thread.is_alive()}

    # --- requests

    def answer(self, scripts: dict[str, dict[str, Any]]) -> None:
        """Answer each key as its script says.

        {"echo": true}, {"text": …}, {"count": n} (numbered replies), {"silent": true}, or {"hold": true}, which
        neither replies nor closes until `release`.
        """
        if self._worker is None:
            self._worker = threading.Thread(target=self._answering, name="contract-answers", daemon=True)
            self._worker.start()

        def asked(request: IncomingRequest) -> None:
            if request.key not in scripts:
                self.strange_keys.append(request.key)
            self._requests.put((request, scripts.get(request.key, {"silent": True})))

        self.fabric.serve(list(scripts), asked)

    def asked(self, count: int, timeout_s: float = WAIT_S) -> list[bytes]:
        """The payloads of all requests so far, once there are `count`."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._asked) >= count, timeout_s)
            return list(self._asked)

    def release(self) -> None:
        held, self._held = self._held, []
        for request in held:
            request.close()

    def _answering(self) -> None:
        while (task := self._requests.get()) is not None:
            request, script = task
            with self._changed:
                self._asked.append(request.payload)
                self._changed.notify_all()
            if "hold" in script:
                self._held.append(request)
                continue
            try:
                if "echo" in script:
                    request.reply(request.payload)
                if "text" in script:
                    request.reply(script["text"].encode())
                for number in range(script.get("count", 0)):
                    request.reply(b"%d" % number)
            except TransportError:
                pass  # the requester is gone, or this fabric is closing
            finally:
                request.close()
                request.close()  # safe to call twice

    def ask(self, key: str, payload: bytes = b"", timeout_s: float = 10.0) -> dict[str, Any]:
        """Send a request and wait for the end: {"replies", "ends", "after_end", "took_s"}."""
        reported = Replies()
        began = time.monotonic()
        asking = self.fabric.request(key, payload, reported.received, timeout_s)
        reported.wait(lambda: reported.ends > 0, timeout_s + WAIT_S)
        took_s = time.monotonic() - began
        asking.close()
        asking.close()  # safe to call twice
        return {"replies": reported.replies, "ends": reported.ends, "after_end": reported.after_end, "took_s": took_s}

    def ask_later(self, key: str, payload: bytes = b"", timeout_s: float = 10.0) -> Replies:
        """Send a request without waiting for its replies."""
        reported = Replies()
        reported.asking = self.fabric.request(key, payload, reported.received, timeout_s)
        return reported

    def ask_and_leave(self, key: str, payload: bytes = b"", after_replies: int = 0, timeout_s: float = 10.0) -> float:
        """Send a request, close it after some replies, and return how long closing took."""
        reported = Replies()
        asking: RequestHandle = self.fabric.request(key, payload, reported.received, timeout_s)
        assert reported.wait(lambda: len(reported.replies) >= after_replies or reported.ends > 0, WAIT_S)
        began = time.monotonic()
        asking.close()
        return time.monotonic() - began

    # --- the end

    def close(self) -> float:
        """Close the fabric, and say how long it took."""
        began = time.monotonic()
        self.fabric.close()
        took_s = time.monotonic() - began
        if self._flood is not None:
            self._flood[1].set()
        if self._worker is not None:
            self._requests.put(None)
            self._worker = None
        return took_s


def zbus_threads() -> list[str]:
    """The names of the threads of zbus that run in this process."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("zbus-"))
