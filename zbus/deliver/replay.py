"""Replay: stored events from the log, page by page, up to the head when the replay starts."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from datetime import datetime
from typing import Any

from zbus.errors import LogError
from zbus.event import Event
from zbus.keys import KeySet
from zbus.observe.records import (
    EVENT_REPLAY_DELIVERED,
    EVENT_REPLAY_FAILED,
    EVENT_REPLAY_REQUESTED,
    record,
    record_reason,
)
from zbus.ports.log import Log, Page, Span

from .host import Host
from .log_reader import STALE_S
from .start_position import to_ns

HEAD_START_S = 0.0002
PAGE_EVENTS = 2000  # a page takes some tenths of a millisecond before its first event


class Replay:
    """An async iterator over stored events, from `bus.replay`. If a step is cancelled, no event is lost."""

    def __init__(
        self, host: Host, keys: KeySet, after: int | datetime, until: int | datetime | None, skip_corrupt: bool
    ) -> None:
        self._reader, self._dispatcher, self._count = host.reader, host.dispatcher, host.dispatcher.count
        self._keys, self._skip_corrupt = keys, skip_corrupt
        # Times follow the same rule as offsets: `after` is excluded, `until` is included.
        self._span = Span(
            after if isinstance(after, int) else 0,
            until if isinstance(until, int) else None,
            to_ns(after) + 1 if isinstance(after, datetime) else None,
            to_ns(until) if isinstance(until, datetime) else None,
        )
        self._ready: deque[Event] = deque()
        self._failed: LogError | None = None
        self._narrowed = False
        self._reading: asyncio.Future[Page] | None = None
        self._page: Page | None = None
        self._before = 0  # the position before that page
        self._fields: dict[str, Any] = {"keys": keys.expressions, "correlation_id": host.runtime.token_hex(8)}
        self._events, self._ended = 0, False

    def __aiter__(self) -> Replay:
        return self

    async def __anext__(self) -> Event:
        while not self._ready:
            if self._failed is not None:
                failed, self._failed = self._failed, None
                self._report_failure(failed)
                raise failed
            try:
                await self._read_page()
            except LogError as error:
                self._report_failure(error)
                raise
        return self._ready.popleft()

    def _report_failure(self, error: LogError) -> None:
        events, fields = self._events, self._fields
        record_reason(
            EVENT_REPLAY_FAILED, logging.INFO, code="replay_failed", reason=str(error), events=events, **fields
        )

    async def _read_page(self) -> None:
        log = self._reader.required("replay")
        if not self._narrowed:
            record(EVENT_REPLAY_REQUESTED, logging.DEBUG, span=tuple(self._span), **self._fields)
            self._span = await self._narrow(log, self._span)
            self._narrowed = True
        if self._page is None:
            await self._fetch()
        assert self._page is not None
        page, self._page = self._page, None
        events, self._failed, skipped = page.events(self._skip_corrupt)
        self._count("corrupt_skipped", skipped)
        self._ready.extend(events)
        self._events += len(events)
        if self._failed is not None:  # stay before the corrupt event: only `skip_corrupt` skips it
            self._reading = None
            self._span = self._span._replace(after=events[-1].offset if events else self._before)

    async def _narrow(self, log: Log, span: Span) -> Span:
        """Turn times into offsets and set the end, which includes all delivered events even if the head is stale."""
        narrowed: Span = await self._reader.run(log.narrow, span)
        if span.to_ns is None:
            delivered = self._dispatcher.delivered
            until = delivered if span.until is None else min(span.until, delivered)
            narrowed = narrowed._replace(until=max(until, narrowed.until or 0))
        return narrowed

    async def _fetch(self) -> None:
        """Get the next page, and let a thread start to read the one after it."""
        span = self._span
        if span.until is None or span.after >= span.until:
            if not self._ended:
                self._ended = True
                record(EVENT_REPLAY_DELIVERED, logging.DEBUG, events=self._events, **self._fields)
            raise StopAsyncIteration
        if self._reading is None:
            self._read_ahead()
        assert self._reading is not None
        try:
            self._page = await asyncio.shield(self._reading)
        finally:
            if self._reading.done():
                self._reading = None
        self._before, self._span = span.after, span._replace(after=self._page.covered)
        if self._page.covered < span.until:
            if self._page.covered == span.after:
                await asyncio.sleep(STALE_S)
            self._read_ahead()
            # Let that thread start first, because decoding holds the interpreter lock.
            await asyncio.sleep(HEAD_START_S)

    def _read_ahead(self) -> None:
        """Let a thread read the next page while this one is processed."""
        log = self._reader.required("replay")
        self._reading = self._reader.run(log.read, self._keys, self._span, PAGE_EVENTS)
        self._reading.add_done_callback(_retrieve_error)


def _retrieve_error(reading: asyncio.Future[Page]) -> None:
    """Mark an error as retrieved, because the replay may never use this page."""
    if not reading.cancelled():
        reading.exception()
