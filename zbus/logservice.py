"""The replay service: a node answers questions for a page of its log, and asks others for theirs.

A page says how far it reaches (`covered`) and how far the log does (`head`), so the asker knows when it
has everything, and what retention has removed in between.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple

import msgspec

from .codec import Envelope, encode, join, open_frame
from .errors import EventInvalid, FabricError, KeyInvalid
from .event import Event
from .headers import Foreign
from .keys import KeySet
from .ports import Log, Span

PAGE_EVENTS = 2000
FRAME_EVENTS = 256
FRAME_BYTES = 128 * 1024
_encode = msgspec.msgpack.Encoder().encode

Ask = Callable[[str, bytes, float], AsyncIterator[bytes]]

# Says of an event that another node published whether to send it on: the bridges it crossed, or None to leave it out.
Forward = Callable[[Event, Foreign], tuple[int, ...] | None]


class _Wanted(msgspec.Struct, array_like=True, frozen=True):
    keys: tuple[str, ...]
    after: int
    from_ns: int
    own: bool = True


class _Covered(msgspec.Struct, array_like=True, frozen=True):
    covered: int
    head: int
    low_water: int


_decode_wanted = msgspec.msgpack.Decoder(_Wanted).decode
_decode_covered = msgspec.msgpack.Decoder(_Covered).decode


def log_key(origin: int) -> str:
    """Where a log is asked."""
    return f"@zbus/log/{origin:x}"


class LogService:
    """Answers for one log, on any thread. A bridge also answers for what it sent on over the link that asks."""

    def __init__(self, log: Log, origin: int, forward: Callable[[str], Forward] | None = None) -> None:
        self._log, self._origin, self._forward = log, origin, forward

    def page(self, question: bytes, link: str = "") -> Iterator[bytes]:
        """Frames of events, then how far they reach."""
        try:
            wanted = _decode_wanted(question)
            keys = KeySet(wanted.keys)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyInvalid) as error:
            raise EventInvalid(f"not a question for a log: {error}") from error
        if not 0 <= min(wanted.after, wanted.from_ns) <= max(wanted.after, wanted.from_ns) < 1 << 63:
            raise EventInvalid("not a question for a log: a number out of range")
        head, low_water = self._log.head(), self._log.low_water()
        after = max(wanted.after, low_water)
        span = Span(after, head, wanted.from_ns or None, None)
        if wanted.from_ns:
            span = self._log.narrow(span)
        page = self._log.read(keys, span, PAGE_EVENTS)
        events, _, _ = page.events(skip_corrupt=True)
        forward = self._forward(link) if self._forward is not None else None
        frames: list[bytes] = []
        size = 0
        for event in events:
            via: tuple[int, ...] | None = ()
            if wanted.own and type(event.headers) is Foreign:
                via = forward(event, event.headers) if forward is not None else None
            if via is None:
                continue
            frames.append(encode(event, self._origin, 0, via))
            size += len(frames[-1])
            if len(frames) >= FRAME_EVENTS or size >= FRAME_BYTES:
                yield join(frames)
                frames, size = [], 0
        if frames:
            yield join(frames)
        yield b"\0" + _encode(_Covered(min(page.covered, head), head, low_water))


class LogPage(NamedTuple):
    """A page of another node's log."""

    envelopes: list[Envelope]
    covered: int
    head: int
    low_water: int


async def ask_page(ask: Ask, origin: int, keys: tuple[str, ...], after: int, from_ns: int, timeout_s: float) -> LogPage:
    """The next page of a log for some expressions, whole or an error. Cancelled, the other node is told."""
    envelopes: list[Envelope] = []
    covered: _Covered | None = None
    async for body in ask(log_key(origin), _encode(_Wanted(keys, after, from_ns)), timeout_s):
        if body[:1] == b"\0":
            try:
                covered = _decode_covered(memoryview(body)[1:])
            except msgspec.DecodeError as error:
                raise FabricError(f"the log {origin:x} answered nonsense: {error}") from error
        else:
            envelopes += open_frame(body)
    if covered is None:
        raise FabricError(f"the log {origin:x} did not say how far its page reaches; ask again")
    return LogPage(envelopes, covered.covered, covered.head, covered.low_water)
