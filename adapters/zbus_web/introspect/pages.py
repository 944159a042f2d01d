"""`GET /log`: pages of stored events, by key expression, time, publisher and header, forwards or backwards.

The work of one request is bounded: when it has looked at enough without filling a page, it answers what it has, and
`next` says where to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

import zbus
from zbus.deliver.start_position import OFFSET_MAX, read_position, to_ns
from zbus.errors import EventCorrupt, LogTrimmed
from zbus.event import Event
from zbus.introspection import of
from zbus.keys import KeySet
from zbus.ports.log import Log, Span
from zbus_web.access.authenticator import Authenticator
from zbus_web.events.event_stream import read_keys
from zbus_web.http.event_json import event_json
from zbus_web.http.http_errors import HttpError
from zbus_web.http.settings import WebSettings

LIMIT, LIMIT_MAX = 100, 1000
SCAN_EVENTS = 20_000  # looked at for one answer, at most
SCAN_PAGES = 20
ANSWER_BYTES = 8 * 1024 * 1024  # of events in one answer; one event is always taken
WINDOW_MIN, WINDOW_MAX = 1000, 1 << 20  # offsets read at once, backwards


@dataclass(slots=True)
class PageQuery:
    """What a request asks for."""

    keys: KeySet
    span: Span
    limit: int
    forwards: bool
    publisher: int | None
    tags: Sequence[tuple[str, str | None]]
    shows: Callable[[str], bool]

    def wants(self, event: Event) -> bool:
        """Whether an event of the right key and time is one of those asked for."""
        if self.publisher is not None and event.publisher_id != self.publisher:
            return False
        for name, value in self.tags:
            found = event.headers.get(name)
            if found is None or (value is not None and found != value):
                return False
        return self.shows(event.key)


def routes(bus: zbus.Bus, settings: WebSettings, access: Authenticator) -> list[BaseRoute]:
    """The route of pages."""

    async def pages(request: Request) -> Response:
        grant = access.grant(request)
        keys = read_keys(request, settings)
        grant.check_read(keys)
        query = _read_query(request, KeySet(keys), grant.shows)
        reader = of(bus).reader
        body = await reader.run(answer, reader.required("GET /log"), query)
        return Response(body, media_type="application/json")

    return [Route("/log", pages, methods=["GET"])]


def answer(log: Log, query: PageQuery) -> bytes:
    """The JSON of one page. It blocks: on a thread of the bus."""
    while True:
        head, low_water = log.head(), log.low_water()
        span = query.span._replace(after=max(query.span.after, low_water))
        try:
            span = log.narrow(span)
            until = head if span.until is None else min(span.until, head)
            found, following = (_forwards if query.forwards else _backwards)(log, query, span._replace(until=until))
            break
        except LogTrimmed as trimmed:
            if trimmed.low_water <= low_water:
                raise
            # Retention went on this very moment: look again at what it left.
    tail = f'],"next":{"null" if following is None else following},"head":{head},"low_water":{low_water}}}'
    return b'{"events":[' + b",".join(found) + tail.encode()


class _Gathered:
    """Encoded events until the answer is full."""

    def __init__(self, query: PageQuery) -> None:
        self.query = query
        self.events: list[bytes] = []
        self.last = 0
        self._bytes = self.scanned = self.pages = 0

    @property
    def spent(self) -> bool:
        return self.scanned >= SCAN_EVENTS or self.pages >= SCAN_PAGES

    def take(self, events: Sequence[Event]) -> bool:
        """Add those that are wanted; whether the answer is full, with `last` as the last one looked at."""
        self.pages += 1
        for event in events:
            self.scanned += 1
            if self.query.wants(event):
                encoded = event_json(event)
                if self.events and self._bytes + len(encoded) > ANSWER_BYTES:
                    return True
                self.events.append(encoded)
                self._bytes += len(encoded)
            self.last = event.offset
            if len(self.events) >= self.query.limit or self.scanned >= SCAN_EVENTS:
                return True
        return False


def _forwards(log: Log, query: PageQuery, span: Span) -> tuple[list[bytes], int | None]:
    assert span.until is not None
    gathered, after = _Gathered(query), span.after
    while after < span.until:
        page = log.read(query.keys, span._replace(after=after), min(LIMIT_MAX, max(128, query.limit)))
        events, error, _ = page.events()
        if error is not None and not isinstance(error, EventCorrupt):
            raise error
        if gathered.take(events):
            return gathered.events, gathered.last if gathered.last < span.until else None
        # A corrupt one is passed over: `zbus log verify` tells of it, and the log around it is what was asked for.
        after = error.offset if isinstance(error, EventCorrupt) else page.covered
        if gathered.spent:
            break
    return gathered.events, after if after < span.until else None


def _backwards(log: Log, query: PageQuery, span: Span) -> tuple[list[bytes], int | None]:
    """Windows from the end, each read forwards and turned round: they grow where little is found, and shrink again."""
    assert span.until is not None
    gathered, end, window = _Gathered(query), span.until, WINDOW_MIN
    while end > span.after:
        begin = max(span.after, end - window)
        events = _read_window(log, query.keys, span._replace(after=begin, until=end))
        if events is None:  # too much for one page
            gathered.pages += 1
            window = max(1, (end - begin) // 8)
            continue
        if gathered.take(events[::-1]):
            return gathered.events, gathered.last if log.before(gathered.last) > span.after else None
        end = begin
        window = min(WINDOW_MAX, window * 4) if len(events) < WINDOW_MIN // 4 else window
        if gathered.spent:
            break
    return gathered.events, end + 1 if end > span.after else None


def _read_window(log: Log, keys: KeySet, span: Span) -> list[Event] | None:
    """Every event of a window, or None where they are more than a page. Of one offset it is always all."""
    until = span.until
    assert until is not None
    found: list[Event] = []
    while span.after < until:
        page = log.read(keys, span, LIMIT_MAX)
        events, error, _ = page.events()
        found += events
        if isinstance(error, EventCorrupt):
            span = span._replace(after=error.offset)
        elif error is not None:
            raise error
        elif page.covered >= until:
            break
        else:
            return None
    return found


def _read_query(request: Request, keys: KeySet, shows: Callable[[str], bool]) -> PageQuery:
    given = request.query_params
    order = given.get("order") or "asc"
    if order not in ("asc", "desc"):
        raise HttpError(400, "order_invalid", f"order: {order[:40]!r} is neither 'asc' nor 'desc'")
    limit = _number(request, "limit", 1, LIMIT_MAX)
    after = _number(request, "after", 0, OFFSET_MAX)
    span = _read_span(request)
    if after is not None and order == "asc":
        span = span._replace(after=max(span.after, after))
    elif after is not None:
        span = span._replace(until=max(0, after - 1) if span.until is None else min(span.until, max(0, after - 1)))
    tags = [(name.lower(), value if colon else None) for name, colon, value in map(_parted, given.getlist("tag"))]
    publisher = _number(request, "publisher", 0, OFFSET_MAX)
    return PageQuery(keys, span, LIMIT if limit is None else limit, order == "asc", publisher, tags, shows)


def _read_span(request: Request) -> Span:
    """`from` and `to`: times, or offsets, both included."""
    span = Span()
    for name in ("from", "to"):
        text = request.query_params.get(name)
        if not text:
            continue
        try:
            position = read_position(text)
        except ValueError as error:
            raise HttpError(400, f"{name}_invalid", f"{name}: {error}") from None
        if isinstance(position, datetime):
            span = span._replace(**{f"{name}_ns": to_ns(position)})
        elif name == "from":
            span = span._replace(after=max(0, position - 1))
        else:
            span = span._replace(until=position)
    return span


def _parted(tag: str) -> tuple[str, str, str]:
    name, colon, value = tag.partition(":")
    if not name:
        raise HttpError(400, "tag_invalid", "tag: it is written like NAME or NAME:VALUE")
    return name, colon, value


def _number(request: Request, name: str, least: int, most: int) -> int | None:
    text = request.query_params.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 19 or not least <= int(text) <= most:
        raise HttpError(400, f"{name}_invalid", f"{name}: {text[:40]!r} is not a number from {least} to {most}")
    return int(text)
