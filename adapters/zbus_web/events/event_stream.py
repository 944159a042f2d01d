"""`GET /events`: a feed of server-sent events. Its ids are positions in the log.

A browser that connects again with `Last-Event-ID` misses nothing and repeats nothing, also across a restart of the
server: the subscription is made first, what lies before it is read from the log, and then it goes on live. A client
that does not read holds a few hundred events in memory at most: its subscription spills, and reads the log later.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence

import msgspec
from sse_starlette.event import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

import zbus
from zbus.deliver.start_position import OFFSET_MAX, read_start
from zbus.deliver.subscriber import EventSubscriber, Start
from zbus.errors import EventCorrupt, LogTrimmed, SchemaInvalid, ZbusError
from zbus.introspection import of
from zbus_web.access.authenticator import Authenticator, Permissions
from zbus_web.http.event_json import EventFrames
from zbus_web.http.http_errors import HttpError
from zbus_web.http.settings import WebSettings
from zbus_web.http.streams import StreamResponse, Streams

CHUNK_EVENTS = 256
CHUNK_BYTES = 64 * 1024  # then it is sent, and waits for the client to read


def routes(bus: zbus.Bus, settings: WebSettings, access: Authenticator) -> list[BaseRoute]:
    """The route of feeds."""
    frames = EventFrames()

    async def events(request: Request) -> Response:
        grant = access.grant(request)
        keys = read_keys(request, settings)
        grant.check_read(keys)
        feed = EventStream(bus, settings, frames, grant, keys)
        await feed.open(await _start(bus, request))
        streams: Streams = request.app.state.streams
        return StreamResponse(feed, streams)

    return [Route("/events", events, methods=["GET"])]


def read_keys(request: Request, settings: WebSettings) -> list[str]:
    """The key expressions of a request; everything where it names none. Which of them are legal the bus says."""
    keys = request.query_params.getlist("key") or ["**"]
    if len(keys) > settings.feed_keys_max:
        raise HttpError(
            400, "keys_too_many", f"{len(keys)} key expressions; at most {settings.feed_keys_max} are taken"
        )
    return keys


async def _start(bus: zbus.Bus, request: Request) -> Start:
    """Where to start: after the last event that the client has, or where it asks to."""
    last = request.headers.get("last-event-id") or request.query_params.get("last_event_id")
    if last is not None and last != "":
        if not (last.isascii() and last.isdigit()) or len(last) > 19 or int(last) >= OFFSET_MAX:
            raise HttpError(400, "last_event_id_invalid", f"Last-Event-ID {last[:40]!r} is not the id of an event here")
        if int(last) > of(bus).head and int(last) > (head := await bus.head()):
            reason = (
                f"the client has seen position {last}, and this log ends at {head}: it is another log, or lost its end"
            )
            raise HttpError(409, "position_unknown", reason, "Nothing was changed. Connect again without Last-Event-ID")
        return int(last) + 1
    try:
        return read_start(request.query_params.get("from") or "new")
    except ValueError as error:
        raise HttpError(400, "from_invalid", f"from: {error}") from None


class EventStream:
    """One client's stream: a subscription that spills, turned into frames."""

    __slots__ = (
        "_bus",
        "_ended",
        "_frames",
        "_gap",
        "_grant",
        "_keys",
        "_reason",
        "_sent",
        "_settings",
        "_start",
        "_sub",
        "_told",
    )

    def __init__(
        self, bus: zbus.Bus, settings: WebSettings, frames: EventFrames, grant: Permissions, keys: Sequence[str]
    ) -> None:
        self._bus, self._settings, self._frames, self._grant, self._keys = bus, settings, frames, grant, keys
        self._sub: EventSubscriber | None = None
        self._gap: bytes = b""
        self._start = self._told = 0  # the id that the client has at first, and now
        self._sent = True  # since the last pulse
        self._ended, self._reason = False, ""

    async def open(self, start: Start) -> None:
        """Subscribe; from here on nothing is missed. Raises where the bus refuses the keys."""
        await self._subscribe(start)
        try:
            assert self._sub is not None
            self._start = self._told = self._sub.position
            if isinstance(start, int):
                low_water = await (reader := of(self._bus).reader).run(reader.required("a feed").low_water)
                if max(0, start - 1) < low_water:
                    await self._go_on(max(0, start - 1), low_water, "removed by retention")
        except BaseException:
            await self.aclose()
            raise

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The frames, a burst at a time."""
        gap, self._gap = self._gap, b""
        # A position that is still to come is no id yet: this log would not know it.
        place = b"id: %d\n" % self._start if self._start <= of(self._bus).head else b""
        yield b"retry: %d\n%b\n%b" % (self._settings.retry_ms, place, gap)
        while not self._ended:
            try:
                chunks = await self._next()
            except ZbusError as error:  # the log cannot be read: the client is told, and may come back
                self.end(str(error))
                break
            if chunks is None:
                break
            if self._grant.is_over:
                self.end("the token has expired; connect again with another one")
                break
            for chunk in chunks:
                self._sent = True
                yield chunk
        if self._reason or not self._ended:
            yield _named("end", {"reason": self._reason or "the bus was closed"})

    async def aclose(self) -> None:
        """Receive nothing any more."""
        if self._sub is not None:
            await self._sub.aclose()

    def pulse(self) -> None:
        """Say something, if nothing was said for a while."""
        if self._sub is not None and (self._grant.is_over or not self._sent):
            self._sub.wake()
        self._sent = False

    def end(self, reason: str | None) -> None:
        """End soon; the client is told why, unless it is gone."""
        self._ended, self._reason = True, reason or ""
        if self._sub is not None:
            self._sub.wake()

    async def _next(self) -> Iterable[bytes] | None:
        """The next chunks: events, a gap, or a sign of life. None at the end."""
        assert self._sub is not None
        try:
            events = await self._sub.next_batch(CHUNK_EVENTS)
        except LogTrimmed as trimmed:
            await self._go_on(trimmed.after, trimmed.low_water, "removed by retention")
        except EventCorrupt as corrupt:
            before = of(self._bus).reader.required("a stream").before(corrupt.offset)
            await self._go_on(before, corrupt.offset, corrupt.reason)
        except SchemaInvalid:
            return ()  # told and counted by the bus; the log still has it
        else:
            if events is None:
                return None
            return self._framed(events) if events else self._alive()
        gap, self._gap = self._gap, b""
        return (gap,)

    def _framed(self, events: Sequence[zbus.Event]) -> Iterable[bytes]:
        frame, shows = self._frames.frame, self._grant.shows
        self._told = max(self._told, events[-1].offset)
        if len(events) == 1:  # most of the time
            return (frame(events[0]),) if shows(events[0].key) else ()
        return _joined(frame(event) for event in events if shows(event.key))

    def _alive(self) -> Iterable[bytes]:
        """An id alone moves on what the browser will ask for, and is no event to it."""
        assert self._sub is not None
        if self._ended:
            return ()
        position = self._sub.position
        if position <= self._told:
            return (b": keep-alive\n\n",)
        self._told = position
        return (b"id: %d\n\n" % position,)

    async def _go_on(self, after: int, until: int, reason: str) -> None:
        """Something is gone: tell of it, and go on behind it."""
        assert self._sub is not None
        await self._sub.aclose()
        await self._subscribe(until + 1)
        self._told = max(self._told, until)
        fields = {"after": after, "until": until, "reason": reason}
        self._gap += b"id: %d\n%b" % (until, _named("gap", fields))

    async def _subscribe(self, start: Start) -> None:
        queue = self._settings.feed_queue_events
        sub = self._bus.subscribe(*self._keys, start=start, overflow="spill", queue_events=queue)
        self._sub = await sub.__aenter__()


def _joined(frames: Iterable[bytes]) -> Iterator[bytes]:
    """Chunks of whole frames, of a size that a connection takes at once."""
    gathered, size = [], 0
    for frame in frames:
        gathered.append(frame)
        size += len(frame)
        if size >= CHUNK_BYTES:
            yield b"".join(gathered)
            gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)


def _named(name: str, fields: dict[str, object]) -> bytes:
    return ServerSentEvent(msgspec.json.encode(fields).decode(), event=name, sep="\n").encode()
