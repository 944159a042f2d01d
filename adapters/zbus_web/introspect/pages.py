"""`GET /log`: pages of stored events, by key expression, time, publisher and header, forwards or backwards.

The work of one request is bounded: after `SCAN_EVENTS` events the response has the matches so far, and `next` is the
position to continue from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from time import time_ns

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
SCAN_EVENTS = 20_000  # the maximum that one request examines
SCAN_PAGES = 20
RESPONSE_BYTES = 8 * 1024 * 1024  # of events in one response, except that one event is always included
WINDOW_MIN, WINDOW_MAX = 1000, 1 << 20  # offsets in one backward step
WINDOW_PAGES = 8


@dataclass(slots=True)
class PageQuery:
    """The filters, span and order of a request."""

    keys: KeySet
    span: Span
    limit: int
    forwards: bool
    publisher: int | None
    headers: Sequence[tuple[str, str | None]]
    shows: Callable[[str], bool]

    def matches(self, event: Event) -> bool:
        """Return whether an event within the key expressions and the span passes the other filters."""
        if self.publisher is not None and event.publisher_id != self.publisher:
            return False
        for name, value in self.headers:
            found = event.headers.get(name)
            if found is None or (value is not None and found != value):
                return False
        return self.shows(event.key)


def routes(bus: zbus.Bus, settings: WebSettings, access: Authenticator) -> list[BaseRoute]:
    """Return the route of pages."""

    async def pages(request: Request) -> Response:
        permissions = access.permissions(request)
        keys = read_keys(request, settings)
        permissions.check_read(keys)
        reader = of(bus).reader
        log = reader.required("GET /log")
        body = await reader.run(read_page, log, _read_query(request, log, KeySet(keys), permissions.shows))
        return Response(body, media_type="application/json")

    return [Route("/log", pages, methods=["GET"])]


def read_page(log: Log, query: PageQuery) -> bytes:
    """Return the JSON of one page. It blocks, so it must run on a reader thread of the bus."""
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
            # Retention removed events in the meantime: read what remains.
    tail = f'],"next":{"null" if following is None else following},"head":{head},"low_water":{low_water}}}'
    return b'{"events":[' + b",".join(found) + tail.encode()


class _PageBuilder:
    """Encoded events until the page is full."""

    def __init__(self, query: PageQuery) -> None:
        self.query = query
        self.events: list[bytes] = []
        self.last = 0
        self._bytes = self.scanned = self.pages = 0

    @property
    def spent(self) -> bool:
        return self.scanned >= SCAN_EVENTS or self.pages >= SCAN_PAGES

    def add(self, events: Sequence[Event]) -> bool:
        """Add the matching events and return whether the page is full. `last` is the last event examined."""
        self.pages += 1
        for event in events:
            self.scanned += 1
            if self.query.matches(event):
                encoded = event_json(event)
                if self.events and self._bytes + len(encoded) > RESPONSE_BYTES:
                    return True
                self.events.append(encoded)
                self._bytes += len(encoded)
            self.last = event.offset
            if len(self.events) >= self.query.limit or self.scanned >= SCAN_EVENTS:
                return True
        return False


def _forwards(log: Log, query: PageQuery, span: Span) -> tuple[list[bytes], int | None]:
    assert span.until is not None
    builder, after = _PageBuilder(query), span.after
    while after < span.until:
        page = log.read(query.keys, span._replace(after=after), min(LIMIT_MAX, max(128, query.limit)))
        events, error, _ = page.events()
        if error is not None and not isinstance(error, EventCorrupt):
            raise error
        if builder.add(events):
            return builder.events, builder.last if builder.last < span.until else None
        # A corrupt event is skipped: `zbus log verify` reports it, and the events around it are readable.
        after = error.offset if isinstance(error, EventCorrupt) else page.covered
        if builder.spent:
            break
    return builder.events, after if after < span.until else None


def _backwards(log: Log, query: PageQuery, span: Span) -> tuple[list[bytes], int | None]:
    """Read windows from the end and reverse each. Windows grow after few matches, and shrink if one is too large."""
    assert span.until is not None
    builder, end, window = _PageBuilder(query), span.until, WINDOW_MIN
    while end > span.after:
        begin = max(span.after, end - window)
        events = _read_window(log, query.keys, span._replace(after=begin, until=end))
        if events is None:
            builder.pages += 1
            window = max(1, (end - begin) // 8)
            continue
        if builder.add(events[::-1]):
            return builder.events, builder.last if log.before(builder.last) > span.after else None
        end = begin
        window = min(WINDOW_MAX, window * 4) if len(events) < WINDOW_MIN // 4 else window
        if builder.spent:
            break
    return builder.events, end + 1 if end > span.after else None


def _read_window(log: Log, keys: KeySet, span: Span) -> list[Event] | None:
    """Return every event of a window, or None if it needs too much work. A window of one offset never does.

    A page of the log may end early, with few events or none.
    """
    until = span.until
    assert until is not None
    found: list[Event] = []
    size = pages = 0
    while span.after < until:
        if len(found) >= LIMIT_MAX or size >= RESPONSE_BYTES or pages >= WINDOW_PAGES:
            return None
        page = log.read(keys, span, LIMIT_MAX)
        events, error, _ = page.events()
        if error is not None and not isinstance(error, EventCorrupt):
            raise error
        found += events
        size += sum(len(event.payload) for event in events)
        pages += 1
        span = span._replace(after=error.offset if isinstance(error, EventCorrupt) else page.covered)
    return found


def _read_query(request: Request, log: Log, keys: KeySet, shows: Callable[[str], bool]) -> PageQuery:
    given = request.query_params
    if "tag" in given:
        raise HttpError(400, "renamed_parameter", "tag was renamed: use header=NAME or header=NAME:VALUE")
    order = given.get("order") or "asc"
    if order not in ("asc", "desc"):
        raise HttpError(400, "invalid_order", f"order: {order[:40]!r} must be 'asc' or 'desc'")
    limit = _number(request, "limit", 1, LIMIT_MAX)
    after = _number(request, "after", 0, OFFSET_MAX)
    span = _read_span(request, log)
    if after is not None and order == "asc":
        span = span._replace(after=max(span.after, after))
    elif after is not None:
        until = log.before(after)
        span = span._replace(until=until if span.until is None else min(span.until, until))
    headers = [(name.lower(), value if colon else None) for name, colon, value in map(_split, given.getlist("header"))]
    publisher = _number(request, "publisher", 0, OFFSET_MAX)
    return PageQuery(keys, span, LIMIT if limit is None else limit, order == "asc", publisher, headers, shows)


def _read_span(request: Request, log: Log) -> Span:
    """Return the span between `from` and `to`, which are times or offsets, both inclusive."""
    span = Span()
    for name in ("from", "to"):
        text = request.query_params.get(name)
        if not text:
            continue
        try:
            position = read_position(text, time_ns)
        except ValueError as error:
            raise HttpError(400, f"invalid_{name}", f"{name}: {error}") from None
        if isinstance(position, datetime):
            span = span._replace(**{f"{name}_ns": to_ns(position)})
        elif name == "from":
            span = span._replace(after=log.before(position))
        else:
            span = span._replace(until=position)
    return span


def _split(header: str) -> tuple[str, str, str]:
    name, colon, value = header.partition(":")
    if not name:
        raise HttpError(400, "invalid_header", "header: must be NAME or NAME:VALUE")
    return name, colon, value


def _number(request: Request, name: str, least: int, most: int) -> int | None:
    text = request.query_params.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 19 or not least <= int(text) <= most:
        raise HttpError(400, f"invalid_{name}", f"{name}: {text[:40]!r} must be a number from {least} to {most}")
    return int(text)
