"""A log on another host, read through the replay service of its node, for executors that cannot open the file.

A read is verified to be complete; otherwise it raises an error. The next page is requested while the current one is
used. If the node is briefly unreachable, the request is repeated from the end of the last page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from operator import ge
from types import TracebackType
from typing import TypeVar

from zbus.config import BusConfig
from zbus.errors import (
    ConfigInvalid,
    EventInvalid,
    LogError,
    LogTrimmed,
    RequestError,
    TransportError,
    TransportUnsupported,
)
from zbus.event import Event
from zbus.keys import KeySet
from zbus.mesh.link import label
from zbus.mesh.log_service import ENDLESS, NO_KEYS, PAGE_EVENTS_MAX, LogPage, request_log_info, request_page
from zbus.mesh.request_client import RequestClient
from zbus.plugins import open_fabric
from zbus.ports.fabric import Fabric
from zbus.ports.log import Span
from zbus.util.backoff import Backoff
from zbus.util.loop_thread import LoopThread
from zbus.util.runtime import REAL

CONNECT_S = 10.0
AWAY_S = 30.0  # how long a node may be unreachable between two pages: time for a restart
RETRY_S = (0.05, 1.0)
CLOSE_S = 5.0

T = TypeVar("T")


class RemoteLog:
    """The log of one node at the URL of a transport: `with RemoteLog("zenoh://127.0.0.1:7447", None, 30.0) as log: …`.

    `origin` identifies the log, as `zbus log stats` prints it; None if only one node has a log. `timeout_s` applies to
    each reply.
    """

    def __init__(self, url: str, origin: int | None, timeout_s: float) -> None:
        self._url, self._origin, self._timeout_s = url, origin, timeout_s
        self._name = label(url)

    def __enter__(self) -> RemoteLog:
        fabric = self._fabric = _connect(self._url, self._name)
        self._thread = LoopThread("zbus-remote", self._live)
        self._client = RequestClient(lambda: [fabric], partial(self._thread.loop.run_in_executor, None), REAL)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.stop(CLOSE_S)
        with suppress(TransportError):
            self._fabric.close()

    def describe(self) -> tuple[int, int, int]:
        """Return the log's origin, head and low-water mark.

        Raises `TransportError` if no log is found, and `ConfigInvalid` if there are several and `origin` is None.
        """
        timeout_s = min(CONNECT_S, self._timeout_s)
        if self._origin is not None:
            failure = f"nothing was read: the log {self._origin:x} is not served at {self._name}"
            request = partial(request_page, self._request, self._origin, NO_KEYS, ENDLESS, 0, timeout_s)
            page = self._thread.run(_with_retries(request, CONNECT_S, failure))
            return self._origin, page.head, page.low_water
        failure = f"nothing was read: no node with a log was found at {self._name}"
        info = self._thread.run(_with_retries(partial(request_log_info, self._request, timeout_s), CONNECT_S, failure))
        if info.other_logs:
            known = ", ".join(f"{each:x}" for each in sorted({info.origin, *info.other_logs}))
            reason = f"several nodes at {self._name} have a log: {known}. Name one; `zbus log stats` prints its origin"
            raise ConfigInvalid("origin", reason)
        self._origin = info.origin
        return info.origin, info.head, info.low_water

    def pages(self, span: Span, keys: Sequence[str] = (), fail_on_data_loss: bool = True) -> Iterator[list[Event]]:
        """Yield all events of a span in order that match one of `keys`, or all events if `keys` is empty.

        Raises `LogTrimmed` if retention removed a part of the span, unless `fail_on_data_loss` is False; `LogError` if
        events are corrupt or the log ends before the span; and `TransportError` with the offset after which nothing
        was read.
        """
        expressions = KeySet(keys).expressions if keys else ()
        origin, head, _ = self.describe() if self._origin is None or span.until is None else (self._origin, 0, 0)
        after, until = span.after, head if span.until is None else span.until
        pending = self._page(origin, expressions, span, after, until) if after < until else None
        try:
            while pending is not None:
                page = pending.result()
                if fail_on_data_loss and page.low_water > after:
                    raise LogTrimmed(after, page.low_water)
                self._check(page, after, until)
                after = page.covered
                pending = self._page(origin, expressions, span, after, until) if after < until else None
                if page.envelopes:
                    yield [envelope.event(envelope.offset) for envelope in page.envelopes]
        finally:
            if pending is not None:
                pending.cancel()

    def _page(self, origin: int, keys: tuple[str, ...], span: Span, after: int, until: int) -> Future[LogPage]:
        times = span.from_ns or 0, ENDLESS if span.to_ns is None else span.to_ns
        request = partial(request_page, self._request, origin, keys, after, times[0], self._timeout_s)
        request = partial(request, own=False, until=until, to_ns=times[1], events=PAGE_EVENTS_MAX)
        failure = (
            f"{self._name}: nothing was read after offset {after}; offset {until} of the log {origin:x} is the last one"
        )
        return self._thread.begin(_with_retries(request, AWAY_S, failure))

    def _check(self, page: LogPage, after: int, until: int) -> None:
        if page.head < until:
            raise LogError(f"{self._name}: the log ends at offset {page.head}, but {until} was requested")
        if page.skipped:
            raise LogError(
                f"{self._name}: {page.skipped} events after offset {after}, up to {page.covered}, are corrupt; "
                "`zbus log verify` lists them. The events around them are not affected"
            )
        reached = [after, *[envelope.offset for envelope in page.envelopes]]
        in_order = not any(map(ge, reached, reached[1:])) and reached[-1] <= page.covered
        if not in_order or not after < page.covered <= until:
            raise TransportError(
                f"{self._name}: the page after offset {after} reaches {page.covered}, or is out of order"
            )

    def _request(self, key: str, body: bytes, timeout_s: float) -> AsyncIterator[bytes]:
        return self._client.request(key, body, timeout_s, stream=True)

    async def _live(self) -> None:
        await self._thread.stopping.wait()


def _connect(url: str, name: str) -> Fabric:
    """Open a transport without a log, to receive only replies."""
    config = BusConfig.exactly()
    deadline, pauses = time.monotonic() + CONNECT_S, Backoff(*RETRY_S)
    while True:
        try:
            fabric = open_fabric(config, url)
            break
        except TransportUnsupported:
            raise
        except TransportError as error:
            if time.monotonic() >= deadline:
                raise TransportError(f"nothing was read: {name} cannot be reached ({error})") from error
            time.sleep(pauses.next())
    if fabric.networked and not fabric.events_only:
        return fabric
    fabric.close()
    raise ConfigInvalid("path", f"{name} has no nodes whose log can be requested")


async def _with_retries(request: Callable[[], Awaitable[T]], retry_s: float, failure: str) -> T:
    """Return the reply to a request. Repeats it for `retry_s` after the first failure, then raises `TransportError`."""
    loop, pauses, deadline = asyncio.get_running_loop(), Backoff(*RETRY_S), None
    while True:
        try:
            return await request()
        except (RequestError, TransportError, EventInvalid) as error:
            deadline, pause = deadline or loop.time() + retry_s, pauses.next()
            if loop.time() + pause > deadline:
                raise TransportError(f"{failure} ({error})") from error
        await asyncio.sleep(pause)
