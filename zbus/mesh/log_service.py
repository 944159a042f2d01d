"""The replay service: a node serves pages of its log to other nodes, and requests pages of theirs.

A page names the offset that it reaches (`covered`), the head and the low-water mark of the log, and the number of
corrupt events that it leaves out. The requester therefore knows when it has everything, and what retention removed.
Every node with a log also serves `@zbus/log`, so that a requester can find out which logs exist.

A page also names the incarnation of the log, and how far the log shares the history that the requester knows. Each
incarnation has a key of its own, so that no request meant for one copy of a log is answered by another. The requester
keeps the mark of the last page, and the log compares it with its events when the requester asks again after a pause.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, NamedTuple

import msgspec

from zbus.errors import EventInvalid, KeyInvalid, LogError, NoResponders, TransportError
from zbus.event import Event
from zbus.headers import raw_headers
from zbus.keys import KeySet
from zbus.ports.lineage import NO_BRANCH, NO_MARK, Branch, Lineage, Mark, digest_number
from zbus.ports.log import Log, Span
from zbus.util.malformed import MALFORMED
from zbus.wire.envelope import Envelope, Fields, encode_run, fields_of, open_frame
from zbus.wire.provenance import Forward

LOGS = "@zbus/log"  # the key on which every node with a log describes it
NO_KEYS = ("@zbus/none",)  # an expression that matches no event
PAGE_EVENTS, PAGE_EVENTS_MAX = 2000, 8000
FRAME_EVENTS = 256
FRAME_BYTES = 128 * 1024
ENDLESS = (1 << 63) - 1  # later than any time
OTHER_LOGS_MAX = 100_000
KNOWN_MAX = 64
NOTHING_KNOWN: Mapping[int, int] = MappingProxyType({})
_Number = Annotated[int, msgspec.Meta(ge=0, le=ENDLESS)]
_encode = msgspec.msgpack.Encoder().encode

Request = Callable[[str, bytes, float], AsyncIterator[bytes]]


class _PageRequest(msgspec.Struct, array_like=True, frozen=True):
    """A request for a page, as it is encoded. Add fields only at the end, with a default."""

    keys: tuple[str, ...]  # empty: every key, including those that no wildcard matches
    after: int
    from_ns: int
    own: bool = True  # only events of the node's own publishers, and those that it forwards as a bridge
    until: int = 0  # 0: the head
    to_ns: int = ENDLESS
    events: int = PAGE_EVENTS  # the largest number of events in the page
    known: Annotated[dict[int, int], msgspec.Meta(max_length=KNOWN_MAX)] = {}  # incarnations, with the offset reached
    probe: bool = False  # no events, only the description
    copies: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=KNOWN_MAX)] = ()  # incarnations of copies in use
    mark: Mark | None = None  # of an earlier page, to compare with the log
    reader: _Number = 0  # the node that requests, if it has stored what is `known` for durable subscriptions
    is_reading: bool = True  # False: the `reader` no longer needs events of this log


class _Covered(msgspec.Struct, array_like=True, frozen=True):
    covered: _Number
    head: _Number
    low_water: _Number
    skipped: _Number = 0  # the number of corrupt events that were left out
    branch: Branch = NO_BRANCH
    shared: _Number | None = None  # the highest offset that is the same event for the requester; None: unknown
    now_ns: _Number = 0  # by the clock of the log's node; 0: unknown
    mark: Mark = NO_MARK  # of the head, in the last page
    differs_after: _Number | None = None  # the log has not what `mark` of the request says; it shares up to this offset
    lacks: bool = False  # retention removed events after `after` that may be of the requested time


class LogInfo(msgspec.Struct, array_like=True, frozen=True):
    """A description of a node's log, as it is encoded, and the logs of other nodes that it has seen since its start."""

    origin: _Number
    head: _Number
    low_water: _Number
    other_logs: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=OTHER_LOGS_MAX)]
    branch: Branch = NO_BRANCH


_decode_request = msgspec.msgpack.Decoder(_PageRequest).decode
_decode_covered = msgspec.msgpack.Decoder(_Covered).decode
_decode_info = msgspec.msgpack.Decoder(LogInfo).decode


def log_key(origin: int, incarnation: int = 0) -> str:
    """Return the key on which a log serves pages: of any copy of it, or of one incarnation."""
    return f"@zbus/log/{origin:x}/{incarnation:x}" if incarnation else f"@zbus/log/{origin:x}"


class LogService:
    """Serves one log, on any thread. A bridge also serves the events that it forwarded over the requester's link."""

    def __init__(
        self,
        log: Log,
        origin: int,
        forward: Callable[[str], Forward] | None = None,
        other_logs: Callable[[], tuple[int, ...]] = tuple,
        clock_ns: Callable[[], int] = int,
        on_copies: Callable[[tuple[int, ...]], None] = lambda _: None,
        on_reverted: Callable[[Mark], None] = lambda _: None,
        on_reader: Callable[[int, int | None], None] = lambda *_: None,
    ) -> None:
        self._log, self._origin, self._forward, self._other_logs = log, origin, forward, other_logs
        self._clock_ns, self._on_copies = clock_ns, on_copies
        self._on_reverted, self._on_reader = on_reverted, on_reader

    def info(self, request: bytes, link: str = "") -> Iterator[bytes]:
        """Return the log's origin, head and low-water mark, and the other logs that this node knows."""
        log = self._log
        yield _encode(LogInfo(self._origin, log.head(), log.low_water(), self._other_logs(), log.lineage.branch))

    def page(self, request: bytes, link: str = "") -> Iterator[bytes]:
        """Return frames of events, then the offset that they reach. Raises `EventInvalid` for a malformed request."""
        try:
            wanted = _decode_request(request)
            keys = KeySet(wanted.keys) if wanted.keys else KeySet.all()
        except (*MALFORMED, KeyInvalid) as error:
            raise EventInvalid(f"malformed page request: {error}") from error
        numbers = (wanted.after, wanted.until, wanted.from_ns, wanted.to_ns, wanted.events)
        if not 0 <= min(numbers) <= max(numbers) <= ENDLESS:
            raise EventInvalid("malformed page request: a number is out of range")
        lineage, head, low_water = self._log.lineage, self._log.head(), self._log.low_water()
        shared = lineage.shared(wanted.known)
        rest = (lineage.branch, shared, self._clock_ns())
        if wanted.reader and not wanted.is_reading:
            self._on_reader(wanted.reader, None)
        elif wanted.reader and shared is not None:
            self._on_reader(wanted.reader, min(shared, head))
        if wanted.copies:
            self._on_copies(wanted.copies)
        differs_after = self._differs_after(wanted.mark, lineage, head) if wanted.mark is not None else None
        if wanted.probe:
            yield b"\0" + _encode(_Covered(head, head, low_water, 0, *rest, self._mark(lineage, head), differs_after))
            return
        until = min(head, wanted.until or head)
        span = Span(max(wanted.after, low_water), until, wanted.from_ns or None)
        if wanted.to_ns != ENDLESS:
            span = span._replace(to_ns=wanted.to_ns)
        narrow = self._log.narrow(span) if span.from_ns is not None or span.to_ns is not None else span
        if wanted.own:  # a repair wants every event after the first one of that time, whatever its clock showed then
            narrow = narrow._replace(from_ns=None)
        page = self._log.read(keys, narrow, min(max(1, wanted.events), PAGE_EVENTS_MAX))
        events, failed, skipped = page.events(skip_corrupt=True)
        if failed is not None:
            raise failed
        yield from self._frames(events, wanted.own, link, lineage.branch)
        # The log has no events after the end that `to_ns` sets, so the page covers everything up to `until`.
        covered = until if narrow.until is not None and page.covered >= narrow.until else min(page.covered, until)
        mark = self._mark(lineage, head) if covered >= head else NO_MARK
        lacks = low_water > wanted.after and narrow.after <= low_water
        yield b"\0" + _encode(_Covered(covered, head, low_water, skipped, *rest, mark, differs_after, lacks))

    def _mark(self, lineage: Lineage, head: int) -> Mark:
        return Mark(lineage.current.id, head, self._digest_number(head))

    def _digest_number(self, offset: int) -> int:
        try:
            return digest_number(self._log.digest(offset))
        except LogError:
            return 0  # unknown: nothing is compared with it

    def _differs_after(self, mark: Mark, lineage: Lineage, head: int) -> int | None:
        """Compare a mark with the log. Returns the offset up to which both are the same for certain, if they differ.

        The incarnation of the mark may have ended before it. Then the lineage shows that the log was replaced, but not
        whether the events of that incarnation are the same.
        """
        until = lineage.until(mark.incarnation)
        if until is None or (mark.offset <= head and self._digest_number(mark.offset) in (0, mark.digest)):
            return None
        if mark.offset <= until:
            self._on_reverted(mark)
        return lineage.before(mark.incarnation)

    def _frames(self, events: Sequence[Event], own: bool, link: str, branch: Branch) -> Iterator[bytes]:
        forward = self._forward(link) if own and self._forward is not None else None
        run: list[Fields] = []
        size = 0
        for event in events:
            via: tuple[int, ...] = ()
            if own and event.provenance is not None:
                passed = forward(event.key, event.provenance) if forward is not None else None
                if passed is None:
                    continue
                via = passed
            run.append(fields_of(event, self._origin, via=via))
            size += len(event.payload) + len(raw_headers(event.headers) or b"")
            if len(run) >= FRAME_EVENTS or size >= FRAME_BYTES:
                yield encode_run(run, branch)
                run, size = [], 0
        if run:
            yield encode_run(run, branch)


class LogPage(NamedTuple):
    """A page of another node's log."""

    envelopes: list[Envelope]
    covered: int
    head: int
    low_water: int
    skipped: int = 0
    branch: Branch = NO_BRANCH
    shared: int | None = None
    now_ns: int = 0
    mark: Mark = NO_MARK
    differs_after: int | None = None
    lacks: bool = False


async def request_page(
    request: Request,
    origin: int,
    keys: tuple[str, ...],
    after: int,
    from_ns: int,
    timeout_s: float,
    *,
    own: bool = True,
    until: int = 0,
    to_ns: int = ENDLESS,
    events: int = PAGE_EVENTS,
    incarnation: int = 0,
    known: Mapping[int, int] = NOTHING_KNOWN,
    probe: bool = False,
    copies: tuple[int, ...] = (),
    mark: Mark | None = None,
    reader: int = 0,
    is_reading: bool = True,
) -> LogPage:
    """Request the next page of a log for some key expressions. If cancelled, the other node stops as well.

    `own` limits it to events of that node's own publishers (and those that it forwards as a bridge). `until` 0 means
    its head. `incarnation` 0 means any copy of the log. `probe` requests only what describes the log. `copies`
    names other incarnations of it that are in use at the same time. The log compares `mark` with its events. `reader`
    is the node that requests, if retention should keep what is not `known` to it, and `is_reading` is False once it
    need not. Raises `TransportError` unless the
    page arrived whole, and the errors of `bus.request`.
    """
    envelopes: list[Envelope] = []
    covered: _Covered | None = None
    rest = (probe, copies, mark, reader, is_reading)
    body = _encode(_PageRequest(keys, after, from_ns, own, until, to_ns, events, dict(known), *rest))
    parts = 0
    async for part in _request_parts(request, origin, incarnation, body, timeout_s):
        parts += 1
        if parts > max(1, events) + 2:  # each part has an event, except for the last one
            raise TransportError(f"log {origin:x} sent more than {parts - 1} parts for {events} events")
        if part[:1] == b"\0":
            try:
                covered = _decode_covered(memoryview(part)[1:])
            except MALFORMED as error:
                raise TransportError(f"log {origin:x} sent a malformed reply: {error}") from error
        else:
            try:
                found = open_frame(part)
            except EventInvalid as error:
                raise TransportError(f"log {origin:x} sent a malformed reply: {error}") from error
            if not found:  # such replies could continue forever and look like progress
                raise TransportError(f"log {origin:x} sent a malformed reply: a part without events")
            envelopes += found
            if len(envelopes) > max(1, events):
                raise TransportError(f"log {origin:x} sent more than the {events} events that were requested")
    if covered is None:
        raise TransportError(f"log {origin:x} sent an incomplete page; retry the request")
    return LogPage(envelopes, *msgspec.structs.astuple(covered))


async def _request_parts(
    request: Request, origin: int, incarnation: int, body: bytes, timeout_s: float
) -> AsyncIterator[bytes]:
    """Request a page from an incarnation of a log. Version 0.1, to which a node may go back, knows only the log."""
    try:
        async for part in request(log_key(origin, incarnation), body, timeout_s):
            yield part
    except NoResponders as error:
        if not incarnation:
            raise
        parts = [part async for part in request(log_key(origin), body, timeout_s)]
        if not parts or _names_incarnation(parts[-1]):
            raise error
        for part in parts:
            yield part


def _names_incarnation(end: bytes) -> bool:
    """Return whether the last part of a page names the incarnation of its log, as all versions after 0.1 do."""
    try:
        return end[:1] != b"\0" or _decode_covered(memoryview(end)[1:]).branch != NO_BRANCH
    except MALFORMED:
        return True


async def request_log_info(request: Request, timeout_s: float) -> LogInfo:
    """Request the description of a log. If several nodes have a log, any one of them replies."""
    info: LogInfo | None = None
    async for body in request(LOGS, b"", timeout_s):
        try:
            info = _decode_info(body)
        except MALFORMED as error:
            raise TransportError(f"a node sent a malformed reply for {LOGS!r}: {error}") from error
    if info is None:
        raise TransportError(f"a node sent no reply for {LOGS!r}; retry the request")
    return info
