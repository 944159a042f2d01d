"""What runs under a bus: its log, delivery, network and threads, opened and closed together.

Publishers, subscribers, replays and caches work on it; `bus.py` is what users call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from .deliver.dispatcher import Delivery, Target
from .deliver.subscriber import EventSubscriber
from .errors import BusClosed, LogMissing, LogReadOnly, ZbusError
from .headers import is_foreign
from .keys import check_key
from .mesh.requests import Requests
from .observe.burst_records import tell_published
from .observe.record_feed import RecordFeed
from .observe.records import BUS_STARTED, BUS_STOPPED, record, wanted
from .observe.stats import Stats
from .ports.log import Cursor, Log, Row
from .publish.backpressure import Gate
from .publish.commit_queue import Commits
from .publish.proxied_writes import Intake
from .schema.registry import Schemas
from .schema.validators import Checks

if TYPE_CHECKING:
    from .config import BusConfig
    from .mesh.network import Network
    from .observe.tracing import Tracing
    from .ports.cache import Cache
    from .wire.provenance import Forward

T = TypeVar("T")

READ_THREADS = 2
UNYIELDED_MAX = 512  # events delivered without a log before readers have their turn


class Engine:
    """A bus without its face. All of its methods belong to the event loop that entered it."""

    def __init__(self, config: BusConfig, session: Any = None) -> None:
        self.config = config
        self.payload_bytes_max = config.payload_bytes_max
        self.read_only = config.read_only
        self.log: Log | None = None
        self.network: Network | None = None
        self.commits: Commits | None = None
        self.tracing: Tracing | None = None  # decided when it starts
        self.gate = Gate()
        self.is_open = False
        self.crowded = False  # some queue is half full: a publisher that never waits should let readers run
        self.figures = Stats()
        self.delivery = Delivery(self.figures.end_to_end if config.metrics else None)
        self.published_events = 0
        self.published_keys: dict[str, None] = {}  # for others to know; the first of them, if they are many
        self.cursors_known: Sequence[Cursor] = ()
        self.count = self.figures.count
        self.checks: Checks | None = None  # None where no schema is in force: nothing else is looked at then
        self.schemas = Schemas(self)
        self.forward: Callable[[str], Forward] | None = None  # set by a bridge, for each of its links by name
        self._session = session
        self._requests: Requests | None = None
        self._subscriptions: set[EventSubscriber] = set()
        self._caches: dict[str, Cache] = {}
        self._executor: ThreadPoolExecutor | None = None
        self._services: set[asyncio.Task[None]] = set()
        self._record_feed: RecordFeed | None = None
        self._listing: Future[None] | None = None
        self._handlers: list[Callable[[], None]] = []
        self._unyielded = 0
        self._switching = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    # Opening and closing.

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Open the log and the fabric; `async with` does this. Cancelled or failed, nothing stays open."""
        from .plugins import open_log, open_tracing

        if self._executor is not None:
            raise ZbusError("a bus is opened once: make another one")
        self.tracing = open_tracing(self.config)
        self._executor = ThreadPoolExecutor(READ_THREADS, "zbus-read")
        try:
            self.log = await self._opened(
                lambda: open_log(self.config), lambda log: log.close(1.0) if log is not None else None
            )
            await self.schemas.load()
            await self._connect()
        except BaseException:
            if self.network is not None:
                await asyncio.shield(asyncio.ensure_future(self.network.aclose(1.0)))
            self._release(1.0)
            raise
        self.is_open = True
        try:
            for start in self._handlers:
                start()
        except BaseException:
            await self.aclose()
            raise
        if self.config.records != "off":
            self._record_feed = RecordFeed(self, logging.getLevelName(self.config.records.upper()))
        if self.log is not None and self.commits is not None:
            self.log.take_errands(Intake(self).take)
        record(BUS_STARTED, **self.diagnostics())

    async def aclose(self) -> None:
        """Flush and close everything, in `close_timeout_s` at most; safe to call twice.

        What was published is stored, what is queued stays readable, handlers finish what they have.
        Cancelled, it goes on in the background and still closes in time.
        """
        if self._executor is None:
            return
        if self._closing is None:
            self.is_open = False
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _opened(self, make: Callable[[], T], unmake: Callable[[T], object]) -> T:
        """Run `make` on a thread. Cancelled in between, what it made is closed again."""
        making = asyncio.get_running_loop().run_in_executor(self._executor, make)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(lambda done: None if done.exception() else unmake(done.result()))
            raise

    async def _connect(self) -> None:
        log, config = self.log, self.config
        if log is not None:
            self.delivery.delivered = await self.run(log.head)
            self.cursors_known = await self.run(log.cursors.list)
            if log.read_only:
                loop = asyncio.get_running_loop()
                log.watch(lambda head: _call_soon(loop, self._moved, head))
                return
            took = self.figures.commit if config.metrics else None
            self.commits = Commits(log, self.gate, config.pending_bytes_max, self._stored, took)
        from .mesh.network import Network  # not before: it takes a while to import

        self.network = Network(self)
        self._requests = Requests(self.network, self.payload_bytes_max)
        await self.network.start()
        for url in config.transports or (config.transport,):
            await self.link(url)

    async def link(self, url: str) -> None:
        """Open a transport and use it beside the others. Cancelled or failed, it is closed again."""
        from .plugins import open_fabric

        assert self.network is not None
        fabric = await self._opened(lambda: open_fabric(self.config, url, self._session), lambda fabric: fabric.close())
        await self.network.add(url, fabric)

    async def _close(self) -> None:
        timeout_s = self.config.close_timeout_s
        deadline = asyncio.get_running_loop().time() + timeout_s
        diagnostics = self.diagnostics() | {"counts": self.figures.counts()}
        for subscription in self._subscriptions:
            self.gate.open(subscription)  # a publisher that waits for it is told that the bus is closed
        try:
            async with asyncio.timeout(timeout_s / 2):
                if self.commits is not None:
                    await self.commits.drained()
                for subscription in tuple(self._subscriptions):
                    subscription.end()
                if self._services:
                    await asyncio.wait(self._services)
        except TimeoutError:
            diagnostics["unfinished"] = len(self._services)
        for subscription in tuple(self._subscriptions):
            subscription.end()
        for service in self._services:
            service.cancel()
        left = max(0.2, deadline - asyncio.get_running_loop().time())
        if self._services:
            await asyncio.wait(self._services, timeout=left / 4)
        await asyncio.gather(*[each.aclose() for each in tuple(self._subscriptions)], return_exceptions=True)
        await asyncio.gather(*[each.aclose() for each in tuple(self._caches.values())], return_exceptions=True)
        if self._record_feed is not None:
            self._record_feed.close()
        if self.network is not None:
            diagnostics["unfinished"] = diagnostics.get("unfinished", 0) + await self.network.aclose(left / 4)
        # Joining threads may take a moment: not on the loop, and not on the threads that are joined. A daemon, so
        # that an interrupt at this very moment leaves nothing that the process would wait for.
        loop = asyncio.get_running_loop()
        released: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not released.done():
                released.set_result(None)

        def release() -> None:
            try:
                self._release(left / 2)
            finally:
                _call_soon(loop, settle)

        ending = threading.Thread(target=release, name="zbus-close", daemon=True)
        ending.start()
        await released
        ending.join()
        record(BUS_STOPPED, **diagnostics)

    def _release(self, timeout_s: float) -> None:
        """Close what is open, outermost first. Each part has a bound of its own."""
        self.is_open = False
        if self.network is not None:
            self.network.close(timeout_s / 2)
        if self.log is not None:
            self.log.close(timeout_s)
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def check_key(self, key: str) -> str:
        """Return a key that can be published to on every transport in use, or raise `KeyInvalid`."""
        check_key(key)
        for link in self.network.links if self.network is not None else ():
            link.fabric.check(key)
        return key

    def diagnostics(self) -> dict[str, Any]:
        """What this bus is made of."""
        found: dict[str, Any] = {
            "pid": os.getpid(),
            "mode": self.config.mode,
            "subscriptions": len(self._subscriptions),
        }
        if self.network is not None:
            found |= self.network.diagnostics()
        if self.log is not None:
            found |= {"log": self.log.path, "read_only": self.log.read_only, "delivered": self.delivery.delivered}
        return found

    # For publishers, subscribers and replays, on the loop.

    def attach(self, subscription: EventSubscriber) -> asyncio.Future[Any] | None:
        """Route to a new subscription; the future tells when other nodes are asked for it too."""
        self._subscriptions.add(subscription)
        return self.route(subscription, keep=subscription.durable is not None)

    def detach(self, subscription: EventSubscriber) -> None:
        """Forget a subscription."""
        if subscription in self._subscriptions:
            self._subscriptions.discard(subscription)
            self.gate.open(subscription)
            self.unroute(subscription)

    def route(self, target: Target, keep: bool = False) -> asyncio.Future[Any] | None:
        """Deliver to a target; the future tells when other nodes are asked for it too. `keep` as for `Network.want`."""
        for expression in target.key_exprs:
            self.delivery.router.add(expression, target)
        if self.network is None:
            return None
        return self.network.want(target.key_exprs, target.since_ns, target.records, keep=keep)

    def unroute(self, target: Target) -> None:
        """Undo `route`."""
        for expression in target.key_exprs:
            self.delivery.router.remove(expression, target)
        if self.network is not None:
            self.network.unwant(target.key_exprs, target.since_ns, target.records)

    def forget(self, cache: Cache) -> None:
        """A cache was closed: its name is free."""
        self._caches.pop(cache.name, None)

    async def room(self, key: str) -> None:
        """Wait while a full subscription that must not drop wants `key`, or while too much is unwritten."""
        await self.gate.wait(
            lambda reasons: (
                self.is_open
                and (
                    self.commits in reasons
                    or self.network in reasons
                    or not reasons.isdisjoint(self.delivery.router.routes(key))
                )
            )
        )

    def deliver_unlogged(self, rows: Sequence[Row]) -> bool:
        """Deliver events of one key that no log keeps; whether readers should have their turn now."""
        if self.network is None:
            raise LogReadOnly(self.need_log("publish").path)
        self.published_events += len(rows)
        if wanted(logging.DEBUG):
            tell_published(rows)
        self.delivery.unlogged(rows)
        if self.network.links:
            self.network.send_unlogged(rows)
        self._unyielded += len(rows)
        if self.crowded or self._unyielded >= UNYIELDED_MAX:
            self.crowded, self._unyielded = False, 0
            return True
        return False

    async def deliver_many_unlogged(self, rows: Sequence[Row]) -> None:
        """The same for many, with turns for readers in between."""
        for at in range(0, len(rows), UNYIELDED_MAX):
            if self.deliver_unlogged(rows[at : at + UNYIELDED_MAX]):
                await asyncio.sleep(0)

    def run(self, call: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run something that blocks on a thread of the bus."""
        if self._executor is None:
            raise BusClosed("read")
        try:
            return asyncio.get_running_loop().run_in_executor(self._executor, lambda: call(*args))
        except RuntimeError:  # the executor was shut down
            raise BusClosed("read") from None

    def need_log(self, doing: str) -> Log:
        """The log, or the error that says it is missing."""
        if self.log is None:
            raise LogMissing(doing)
        return self.log

    @property
    def subscriptions(self) -> tuple[EventSubscriber, ...]:
        """Those that are open now. Any thread."""
        return tuple(self._subscriptions)

    def _list_cursors(self) -> None:
        with suppress(ZbusError):  # shown to whoever reads them; the figures are as old as they are
            self.cursors_known = self.need_log("list cursors").cursors.list()

    def hold_to(self, checks: Checks | None) -> None:
        """Hold what is published and read from now on to other schemas."""
        self.checks = checks
        for subscription in self._subscriptions:
            subscription.checks_changed()

    def _stored(self, rows: Sequence[Row], offsets: Sequence[int]) -> None:
        rows, offsets = self.delivery.stored(rows, offsets)
        if rows:
            self._published(rows, offsets)
        if self.network is not None and rows:
            self.network.send(rows, offsets)

    def _published(self, rows: Sequence[Row], offsets: Sequence[int] | None) -> None:
        own = rows
        if self.network is not None and self.network.wants.records:  # some may be of other nodes
            own = [row for row in rows if not is_foreign(row[5])]
        self.published_events += len(own)
        if own and wanted(logging.DEBUG):
            tell_published(own, offsets)

    def _moved(self, head: int) -> None:
        if head > self.delivery.delivered:
            self.delivery.delivered = head
            for subscription in self._subscriptions:
                subscription.moved()

    def _check_open(self, doing: str) -> None:
        if not self.is_open:
            raise BusClosed(doing)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        pass  # the loop is closed, and with it the bus
