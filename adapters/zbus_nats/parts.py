"""Messages larger than the server's limit: split into parts by the sender, and reassembled by the receiver.

The parts of a message are sent in order over one connection, so they arrive in order or not at all. The memory for
incomplete messages is bounded, and a message that is never completed is counted.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator

from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_INPUT_REJECTED

PART_HEADER = b"Zbus-Part"
PARTS_MAX = 100_000
UNFINISHED_MAX = 1_000
UNFINISHED_S = 30.0
PART_HEADERS_BYTES_MAX = 128  # the header block of a part is shorter than this

_PART = re.compile(rb"\r\nZbus-Part: ([0-9a-f]{16}) (\d{1,6}) (\d{1,6}) (\d{1,12})\r\n")


def publish(subject: bytes, data: bytes, max_payload: int, reply: bytes = b"") -> list[bytes]:
    """Return the commands that publish `data`, in as many parts as necessary."""
    size = len(data)
    if size <= max_payload:
        if reply:
            return [b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, size, data)]
        return [b"PUB %b %d\r\n%b\r\n" % (subject, size, data)]
    return [
        publish_headers(subject, headers, part, reply)
        for headers, part in _cut(data, max(1, max_payload - PART_HEADERS_BYTES_MAX))
    ]


def publish_headers(subject: bytes, headers: bytes, data: bytes | memoryview = b"", reply: bytes = b"") -> bytes:
    """Return the command that publishes a message with a raw header block."""
    total = len(headers) + len(data)
    start = b"HPUB %b %b %d %d\r\n%b" % (subject, reply, len(headers), total, headers)
    return b"".join((start, data, b"\r\n"))


def _cut(data: bytes, part_bytes: int) -> Iterator[tuple[bytes, memoryview]]:
    view, name = memoryview(data), secrets.token_hex(8).encode()
    count = -(-len(data) // part_bytes)
    for index in range(count):
        headers = b"NATS/1.0\r\n%b: %b %d %d %d\r\n\r\n" % (PART_HEADER, name, index, count, len(data))
        yield headers, view[index * part_bytes : (index + 1) * part_bytes]


class _Unfinished:
    __slots__ = ("chunks", "count", "moved_at", "size", "total")

    def __init__(self, count: int, total: int) -> None:
        self.count, self.total, self.size = count, total, 0
        self.chunks: list[bytes] = []
        self.moved_at = time.monotonic()


class Assembler:
    """Reassembles messages. Not thread-safe."""

    def __init__(self, bytes_max: int, counts: Counters) -> None:
        self._bytes_max, self._counts = bytes_max, counts
        self._unfinished: dict[tuple[bytes, bytes], _Unfinished] = {}  # the least recently extended one comes first
        self.held_bytes = 0

    def take(self, subject: bytes, headers: bytes, data: bytes) -> bytes | None:
        """Return a message without parts unchanged. For a part, return None, or the whole message for the last part."""
        found = _PART.search(headers)
        if found is None:
            if PART_HEADER in headers:
                self._refuse("part_malformed", subject)
                return None
            return data
        name, index, count, total = found[1], int(found[2]), int(found[3]), int(found[4])
        if not 0 <= index < count <= PARTS_MAX or total > self._bytes_max:
            self._refuse("part_rejected", subject)
            return None
        place = (subject, name)
        if index == 0:
            self._drop(place)
            self._evict(len(data))
            self._unfinished[place] = _Unfinished(count, total)
        return self._append(place, index, count, total, data)

    def clear(self) -> None:
        """Drop incomplete messages, because the connection that would bring the rest is lost."""
        for place in list(self._unfinished):
            self._drop(place)

    def _append(self, place: tuple[bytes, bytes], index: int, count: int, total: int, data: bytes) -> bytes | None:
        unfinished = self._unfinished.pop(place, None)
        if unfinished is None:
            if index == count - 1:  # a message without its first part is reported once, not for each part
                self._refuse("frame_incomplete", place[0])
            return None
        self._unfinished[place] = unfinished
        agrees = (unfinished.count, unfinished.total, len(unfinished.chunks)) == (count, total, index)
        if not agrees or unfinished.size + len(data) > total:
            self._drop(place)
            return None
        unfinished.chunks.append(data)
        unfinished.size += len(data)
        unfinished.moved_at = time.monotonic()
        self.held_bytes += len(data)
        if index < count - 1:
            self._evict(0)
            return None
        if unfinished.size != total:
            self._drop(place)
            return None
        del self._unfinished[place]
        self.held_bytes -= unfinished.size
        return b"".join(unfinished.chunks)

    def _evict(self, more: int) -> None:
        """Drop stale messages, and the oldest ones while the limits are exceeded."""
        limit = time.monotonic() - UNFINISHED_S
        while self._unfinished:
            place = next(iter(self._unfinished))
            full = self.held_bytes + more > self._bytes_max or len(self._unfinished) >= UNFINISHED_MAX
            if not full and self._unfinished[place].moved_at > limit:
                return
            self._drop(place)

    def _drop(self, place: tuple[bytes, bytes]) -> None:
        unfinished = self._unfinished.pop(place, None)
        if unfinished is not None:
            self.held_bytes -= unfinished.size
            self._refuse("frame_incomplete", place[0])

    def _refuse(self, reason: str, subject: bytes) -> None:
        self._counts.report(TRANSPORT_INPUT_REJECTED, reason, subject.decode(errors="replace"))
