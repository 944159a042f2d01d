"""The zbus end of the tests of the Dynamo wire: frames to send, and a receiver that keeps the decoded events."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import Any

from zbus.event import Event
from zbus.wire import envelope as codec

AT_NS = 1_700_000_000_123_456_789


class Receiver:
    """The events that a fabric received, decoded."""

    def __init__(self) -> None:
        self.events: SimpleQueue[Event] = SimpleQueue()

    def __call__(self, frame: bytes, done: Any) -> None:
        assert done is None
        self.events.put(codec.decode(frame))

    def next(self) -> Event:
        return self.events.get(timeout=20)

    def drained(self, quiet_s: float = 0.5) -> list[Event]:
        """Return the events that arrive until none arrives for `quiet_s` seconds."""
        found = []
        while True:
            try:
                found.append(self.events.get(timeout=quiet_s))
            except Empty:
                return found


def frame(key: str, sequence: int = 0, payload: bytes = b"x", publisher_id: int = 77) -> tuple[str, bytes]:
    return key, codec.encode(Event(publisher_id, sequence, AT_NS, key, payload))
