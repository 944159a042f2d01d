"""`GET /events`: a stream of server-sent events. Their ids are offsets in the log.

A browser that reconnects with `Last-Event-ID` misses no event and receives none twice, even across a restart of the
server: the server subscribes first, then reads the earlier events from the log, and then continues live. A client that
does not read costs at most a few hundred events of memory: its subscription spills, and reads the log later.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from time import time_ns

import msgspec
from sse_starlette.event import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

import zbus
from zbus.deliver.start_position import OFFSET_MAX, read_start
from zbus.deliver.subscriber import EventSubscriber, Start
from zbus.errors import BusClosed, EventCorrupt, LogTrimmed, SchemaInvalid, ZbusError
from zbus.introspection import of
from zbus_web.access.authenticator import Authenticator, Permissions
from zbus_web.http.event_json import EventFrames
from zbus_web.http.http_errors import HttpError
from zbus_web.http.settings import WebSettings
from zbus_web.http.streams import EndReason, StreamResponse, Streams

CHUNK_EVENTS = 256
CHUNK_BYTES = 64 * 1024  # A larger chunk is sent before more is gathered, so that a slow client applies backpressure.

BUS_CLOSED = EndReason("bus_closed", "the bus was closed")
TOKEN_EXPIRED = EndReason("token_expired", "the token has expired; connect again with a new one")
REMOVED = ("log_trimmed", "removed by retention")


def routes(bus: zbus.Bus, settings: WebSettings, access: Authenticator) -> list[BaseRoute]:
    """Return the route of event streams."""
    frames = EventFrames()

    async def events(request: Request) -> Response:
        permissions = access.permissions(request)
        keys = read_keys(request, settings)
        permissions.check_read(keys)
        stream = EventStream(bus, settings, frames, permissions, keys)
        await stream.open(*await _read_start(bus, request))
        streams: Streams = request.app.state.streams
        return StreamResponse(stream, streams)

    return [Route("/events", events, methods=["GET"])]


def read_keys(request: Request, settings: WebSettings) -> list[str]:
    """Return the key expressions of a request, `**` by default. They are not validated here: the bus does that."""
    keys = request.query_params.getlist("key") or ["**"]
    if len(keys) > settings.stream_keys_max:
        raise HttpError(
            400, "too_many_keys", f"{len(keys)} key expressions are too many; the limit is {settings.stream_keys_max}"
        )
    return keys


async def _read_start(bus: zbus.Bus, request: Request) -> tuple[Start, int | None]:
    """Return the start that the client requests, or instead of it the last event that the client has."""
    last = request.headers.get("last-event-id") or request.query_params.get("last_event_id")
    if last is not None and last != "":
        if not (last.isascii() and last.isdigit()) or len(last) > 19 or int(last) >= OFFSET_MAX:
            raise HttpError(400, "invalid_last_event_id", f"Last-Event-ID {last[:40]!r} is not an offset")
        if int(last) > of(bus).head and int(last) > (head := await bus.head()):
            message = f"the client has seen offset {last}, but this log ends at {head}: it is another log, or truncated"
            state = "Nothing was changed. Connect again without Last-Event-ID"
            raise HttpError(409, "unknown_position", message, state)
        return "new", int(last)
    try:
        return read_start(request.query_params.get("from") or "new", time_ns), None
    except ValueError as error:
        raise HttpError(400, "invalid_from", f"from: {error}") from None


class EventStream:
    """The stream of one client: a spilling subscription whose events become frames."""

    __slots__ = (
        "_bus",
        "_end_reason",
        "_ended",
        "_frames",
        "_gap",
        "_keys",
        "_last_id",
        "_permissions",
        "_sent",
        "_settings",
        "_start",
        "_sub",
    )

    def __init__(
        self, bus: zbus.Bus, settings: WebSettings, frames: EventFrames, permissions: Permissions, keys: Sequence[str]
    ) -> None:
        self._bus, self._settings, self._frames = bus, settings, frames
        self._permissions, self._keys = permissions, keys
        self._sub: EventSubscriber | None = None
        self._gap: bytes = b""
        self._start = self._last_id = 0  # the id that the client has at the start, and now
        self._sent = True  # whether a chunk was sent since the last pulse
        self._ended = False
        self._end_reason: EndReason | None = BUS_CLOSED  # unless `end` gives another

    async def open(self, start: Start, after: int | None) -> None:
        """Subscribe: the stream misses no event from now on. Raises `KeyInvalid` if a key expression is not legal."""
        await self._subscribe(start, after)
        try:
            assert self._sub is not None
            self._start = self._last_id = self._sub.position
            if after is not None or isinstance(start, int):
                low_water = await (reader := of(self._bus).reader).run(reader.required("an event stream").low_water)
                if self._start < low_water:
                    await self._skip_gap(self._start, low_water, *REMOVED)
        except BaseException:
            await self.aclose()
            raise

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield chunks of frames, a burst at a time."""
        gap, self._gap = self._gap, b""
        # An offset above the head is not sent as an id: the log would reject it on reconnect.
        first_id = b"id: %d\n" % self._start if self._start <= of(self._bus).head else b""
        yield b"retry: %d\n%b\n%b" % (self._settings.retry_ms, first_id, gap)
        while not self._ended:
            try:
                chunks = await self._next()
            except ZbusError as error:  # The log cannot be read: the client gets the reason and may reconnect.
                self.end(BUS_CLOSED if isinstance(error, BusClosed) else EndReason("read_failed", str(error)))
                break
            if chunks is None:
                break
            if self._permissions.is_expired:
                self.end(TOKEN_EXPIRED)
                break
            for chunk in chunks:
                self._sent = True
                yield chunk
        if self._end_reason is not None:
            yield _named_event("end", self._end_reason._asdict())

    async def aclose(self) -> None:
        """Close the subscription."""
        if self._sub is not None:
            await self._sub.aclose()

    def pulse(self) -> None:
        """Wake the stream to send a keep-alive if nothing was sent since the last call, or if the token has expired."""
        if self._sub is not None and (self._permissions.is_expired or not self._sent):
            self._sub.wake()
        self._sent = False

    def end(self, reason: EndReason | None) -> None:
        """End soon. The client receives `reason`; None means that the client has disconnected."""
        self._ended, self._end_reason = True, reason
        if self._sub is not None:
            self._sub.wake()

    async def _next(self) -> Iterable[bytes] | None:
        """Return the next chunks: events, a gap or a keep-alive. Returns None at the end."""
        assert self._sub is not None
        try:
            events = await self._sub.next_batch(CHUNK_EVENTS)
        except LogTrimmed as trimmed:
            await self._skip_gap(trimmed.after, trimmed.low_water, *REMOVED)
        except EventCorrupt as corrupt:
            before = of(self._bus).reader.required("an event stream").before(corrupt.offset)
            await self._skip_gap(before, corrupt.offset, "event_corrupt", corrupt.reason)
        except SchemaInvalid:
            return ()  # The bus has logged and counted it, and the log still has the event.
        else:
            if events is None:
                return None
            return self._encode(events) if events else self._keep_alive()
        gap, self._gap = self._gap, b""
        return (gap,)

    def _encode(self, events: Sequence[zbus.Event]) -> Iterable[bytes]:
        frame, shows = self._frames.frame, self._permissions.shows
        self._last_id = max(self._last_id, events[-1].offset)
        if len(events) == 1:  # the usual case
            return (frame(events[0]),) if shows(events[0].key) else ()
        return _joined(frame(event) for event in events if shows(event.key))

    def _keep_alive(self) -> Iterable[bytes]:
        """Return a comment, or an id without data: a browser stores it as `Last-Event-ID`, but dispatches no event."""
        assert self._sub is not None
        if self._ended:
            return ()
        position = self._sub.position
        if position <= self._last_id:
            return (b": keep-alive\n\n",)
        self._last_id = position
        return (b"id: %d\n\n" % position,)

    async def _skip_gap(self, after: int, until: int, code: str, reason: str) -> None:
        """Queue a gap event for the client, and subscribe again after the gap."""
        assert self._sub is not None
        await self._sub.aclose()
        await self._subscribe("new", after=until)
        self._last_id = max(self._last_id, until)
        fields = {"after": after, "until": until, "code": code, "reason": reason}
        self._gap += b"id: %d\n%b" % (until, _named_event("gap", fields))

    async def _subscribe(self, start: Start, after: int | None) -> None:
        queue = self._settings.stream_queue_events
        sub = self._bus.subscribe(*self._keys, start=start, after=after, overflow="spill", queue_events=queue)
        self._sub = await sub.__aenter__()


def _joined(frames: Iterable[bytes]) -> Iterator[bytes]:
    """Yield chunks of whole frames, of about `CHUNK_BYTES` each."""
    gathered, size = [], 0
    for frame in frames:
        gathered.append(frame)
        size += len(frame)
        if size >= CHUNK_BYTES:
            yield b"".join(gathered)
            gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)


def _named_event(name: str, fields: dict[str, object]) -> bytes:
    return ServerSentEvent(msgspec.json.encode(fields).decode(), event=name, sep="\n").encode()
