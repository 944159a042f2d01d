"""The node under a bus: its log, its packages and its threads, opened and closed together.

`bus.py` is the API. The node creates each part once and passes it only what it needs.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from . import plugins
from .deliver.dispatcher import Dispatcher
from .deliver.log_reader import CallThreads, LogReader
from .deliver.overflow import Overflow
from .deliver.subscriber import EventSubscriber, Start, check_options, check_schema
from .errors import BusClosed, ConfigInvalid, LogRequired, TransportUnsupported, ZbusError
from .event import Event
from .keys import KeySet, check_key
from .mesh.requests import Requests
from .observe.burst_records import BurstRecords
from .observe.record_feed import RecordFeed
from .observe.records import BUS_STARTED, BUS_STOPPED, record, record_reason, wanted
from .observe.stats import Stats
from .ports.cache import Cache
from .ports.fabric import Fabric
from .ports.log import Backup, Cursor, Log, Row
from .publish.backpressure import Backpressure
from .publish.commit_queue import CommitQueue
from .publish.entry import UNYIELDED_MAX, Entry
from .publish.proxied_writes import ProxiedWrites
from .schema.registry import Schemas
from .schema.validators import Validators
from .session import SESSION_PUBLISHERS_MAX, Sessions
from .util.deadline import Deadline, run_within
from .util.identities import Identities
from .util.mailbox import Calls
from .util.process import on_fork
from .util.runtime import REAL, Runtime
from .wire.provenance import Forward

if TYPE_CHECKING:
    from .config import BusConfig
    from .mesh.network import Network
    from .observe.tracing import Tracing

T = TypeVar("T")

READ_THREADS = 2
UNDO_S = 1.0  # how long a cancelled opening waits until it is undone


class Ports(Protocol):
    """Turns settings into implementations. `zbus.plugins` finds them by entry point; a simulator passes its own."""

    def open_log(self, config: BusConfig) -> Log | None:
        """Open the log."""

    def open_fabric(self, config: BusConfig, url: str, session: Any) -> Fabric:
        """Open a transport."""

    def open_tracing(self, config: BusConfig) -> Tracing | None:
        """Return what makes spans."""


class Node:
    """Belongs to the event loop that starts it.

    `make_subscriber` makes the object that users read from. `forward` and `open_link` are for bridges: `forward`
    decides what is sent on over each link, and `open_link` opens a transport now or later.
    """

    def __init__(
        self,
        config: BusConfig,
        session: Any = None,
        *,
        runtime: Runtime = REAL,
        ports: Ports = plugins,
        make_subscriber: Callable[..., EventSubscriber] = EventSubscriber,
        forward: Callable[[str], Forward] | None = None,
        open_link: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self.config, self._ports, self._make_subscriber = config, ports, make_subscriber
        self.runtime = runtime = runtime.for_node()
        self._session, self._forward, self._open_link = session, forward, open_link or self.link
        self.log: Log | None = None
        self.network: Network | None = None
        self.requests: Requests | None = None
        self.tracing: Tracing | None = None  # decided when the node starts
        self.validators: Validators | None = None  # None if no schema is registered, so that nothing has to be checked
        self.validates = config.validate_schemas
        self.stats = Stats()
        self.count = self.stats.count
        self.backpressure = Backpressure(runtime)
        self._burst_records = BurstRecords(runtime)
        delivery = self.stats.delivery if config.latency_metrics else None
        self.dispatcher = Dispatcher(self.count, self._burst_records, runtime, delivery)
        self.entry = Entry(self, self.backpressure, config.payload_bytes_max, runtime)
        self.schemas = Schemas(self, runtime)
        secret = config.session_secret
        self.sessions = Sessions(
            self.entry,
            Identities(SESSION_PUBLISHERS_MAX, runtime.randbits),
            self.subscribe,
            None if secret is None else secret.get_secret_value().encode(),
        )
        self.cursors_known: Sequence[Cursor] = ()
        self.caches: dict[str, Cache] = {}
        self.on_start: list[Callable[[], None]] = []  # what was registered before the node was open
        self._services: dict[asyncio.Task[None], None] = {}
        self._threads = CallThreads()
        self._record_feed: RecordFeed | None = None
        self._listing: Future[None] | None = None
        self._unyielded = 0
        self._switching = asyncio.Lock()
        self._opening: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._started = False
        self._closing_begun = asyncio.Event()
        on_fork(self)

    def forked(self, parent: int) -> None:
        """Reject every use in a forked process: the bus, its loop and its threads belong to the parent."""
        self.entry.closed_because = (
            f"process {parent} opened the bus, and this is a process that was forked from it (start "
            "processes with 'spawn', or open the bus after forking)"
        )
        self.entry.is_open = False
        self._threads.executor = None  # `aclose` then does nothing

    def renew_identities(self) -> None:
        """Give all publishers new ids, because a copy of this process may use the same ones."""
        self.entry.renew_identities()
        self.sessions.identities.renew()

    # Opening and closing.

    async def start(self) -> None:
        """Open the log and the transports. If cancelled or failed, nothing stays open.

        Raises `BusClosed` if `aclose` is called before it returns.
        """
        with self.runtime.running():
            await self._start()

    async def _start(self) -> None:
        if self._threads.executor is not None:
            raise ZbusError("a bus is opened once: create a new one with zbus.open(…)")
        self.tracing = self.entry.tracing = self._ports.open_tracing(self.config)
        self._threads.executor = self.runtime.executor(READ_THREADS, "zbus-read")
        self._opening = asyncio.ensure_future(self._open())
        try:
            await self._opening
            if self.is_closing:
                raise BusClosed("start")
            self.entry.is_open = self._started = True
            for start in self.on_start:
                start()
        except BaseException as error:
            closed_meanwhile, task = self.is_closing, asyncio.current_task()
            await self.aclose()
            if closed_meanwhile and isinstance(error, asyncio.CancelledError) and task and not task.cancelling():
                raise BusClosed("start") from None  # `aclose` cancelled the opening, not the caller
            raise
        if self.config.system_events != "off":
            level = logging.getLevelName(self.config.system_events.upper())
            self._record_feed = RecordFeed(level, self._send_records, self.count, self.runtime)
        if self.log is not None and self.commits is not None:
            self.log.accept_proxied_writes(ProxiedWrites(self.entry).take)
        record(BUS_STARTED, **self.diagnostics())

    async def aclose(self) -> None:
        """Flush and close everything within `close_timeout_s`; safe to call twice.

        If cancelled, closing continues in the background and still ends in time.
        """
        if self._threads.executor is None:
            return
        if self._closing is None:
            self.entry.is_open = False
            self._closing_begun.set()
            with self.runtime.running():
                self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _open(self) -> None:
        self.log = await self._opened(
            lambda: self._ports.open_log(self.config), lambda log: log.close(1.0) if log is not None else None
        )
        await self.schemas.load()
        await self._connect()

    async def _opened(self, make: Callable[[], T], unmake: Callable[[T], object]) -> T:
        """Run `make` on a thread. If cancelled, close its result again, and wait up to `UNDO_S` for that."""
        assert self._threads.executor is not None
        try:
            making = self._threads.executor.submit(make)
        except RuntimeError:  # the executor was shut down
            raise BusClosed("open a log or a transport") from None
        try:
            return await asyncio.shield(asyncio.wrap_future(making))
        except asyncio.CancelledError:
            if making.cancelled():  # the executor was shut down before it began
                raise BusClosed("open a log or a transport") from None

            def undo() -> None:
                with suppress(Exception):
                    unmake(making.result())

            await run_within(min(UNDO_S, self.close_timeout_s / 2), undo, self.runtime, "zbus-undo")
            raise

    async def _connect(self) -> None:
        log, config = self.log, self.config
        if log is not None:
            self.cursors_known = await self.run(log.cursors.list)
            if log.read_only:
                self.entry.read_only = log.path
                self.dispatcher.delivered = await self.run(log.head)
                log.watch(partial(Calls(asyncio.get_running_loop()).soon, self.dispatcher.head_moved))
                return
            took = self.stats.commit if config.latency_metrics else None
            listeners = (self.dispatcher.stored,)
            commits = self.entry.commits = CommitQueue(
                log,
                self.backpressure,
                config.pending_bytes_max,
                listeners,
                took,
                self.count,
                self._burst_records,
                self.runtime,
            )
            self.dispatcher.delivered = commits.tail_after
        from .mesh.network import Network  # not before: it takes a while to import

        keys, changed = self.entry.published_keys, self._links_changed
        self.network = Network(self, config, self.runtime, keys, changed, self.renew_identities, self._forward)
        self.dispatcher.interest = self.network
        self.requests = Requests(self.network, config.payload_bytes_max, self.runtime)
        await self.network.start()
        for url in config.transports or (config.transport,):
            await self._open_link(url)

    async def link(self, url: str) -> None:
        """Open a transport and use it beside the others. If cancelled or failed, it is closed again."""
        assert self.network is not None
        if self.config.reaches_nodes(url):
            self._check_is_no_fork()
        fabric = await self._opened(
            lambda: self._ports.open_fabric(self.config, url, self._session), lambda fabric: fabric.close()
        )
        if self.is_closing:  # it was opened too late to be closed with the others
            self.runtime.thread(fabric.close, "zbus-close-transport")
            raise BusClosed("open a transport")
        if fabric.networked:  # such as a Zenoh session that was given to the bus
            try:
                self._check_is_no_fork()
            except ConfigInvalid:
                self.runtime.thread(fabric.close, "zbus-close-transport")
                raise
        await self.network.add(url, fabric)
        self.entry.recheck()

    def _check_is_no_fork(self) -> None:
        if self.log is not None and self.log.is_fork:
            reason = (
                f"{self.log.path} is a fork, which is for rehearsals and sends nothing: open it without a transport. "
                f"To make it an ordinary log: zbus log promote {shlex.quote(self.log.path)}"
            )
            raise ConfigInvalid("log", reason)

    async def switch_transport(self, url: str, overlap_s: float) -> None:
        """Open a transport, use all for `overlap_s` seconds, then close the old ones. See `Bus.switch_transport`."""
        network = self.need_network("switch the transport")
        with self.runtime.running():
            await self._switch(network, url, overlap_s)

    async def _switch(self, network: Network, url: str, overlap_s: float) -> None:
        async with self._switching:
            old = list(network.links)
            await self.link(url)
            new = network.links[len(old) :]
            try:
                if network.request_server.serves:
                    network.check_requests_supported(new)
            except TransportUnsupported:  # the new transport cannot carry the requests that are served here
                for link in new:
                    await network.remove(link, self.config.close_timeout_s / 2)
                raise
            with suppress(TimeoutError):
                async with asyncio.timeout(overlap_s if old else 0):
                    await self._closing_begun.wait()
                raise BusClosed("switch the transport")
            for link in old:
                await network.remove(link, self.config.close_timeout_s / 2)

    async def _close(self) -> None:
        deadline = Deadline(self.config.close_timeout_s)
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait((self._opening,), timeout=deadline.share(3 / 4))
        diagnostics = self.diagnostics()
        for reason in (*self.dispatcher.subscriptions, self.commits, self.network):
            self.backpressure.unblock(reason)  # a publisher that waits for it gets `BusClosed`, even if the log hangs
        unfinished = 0
        try:
            async with asyncio.timeout(deadline.share(1 / 2)):
                if self.commits is not None:
                    await self.commits.drained()
                for subscription in tuple(self.dispatcher.subscriptions):
                    subscription.end()
                if self._services:
                    await asyncio.wait(self._services)
        except TimeoutError:
            unfinished = len(self._services)
        for subscription in tuple(self.dispatcher.subscriptions):
            subscription.end()
        for service in self._services:
            service.cancel()
        if self._services:
            await asyncio.wait(self._services, timeout=deadline.share(1 / 4))
        ending = {asyncio.ensure_future(each.aclose()): each for each in self.dispatcher.subscriptions}
        closing = [*ending, *(asyncio.ensure_future(each.aclose()) for each in self.caches.values())]
        if closing:
            await asyncio.wait(closing, timeout=deadline.share(1 / 4))
        if self._record_feed is not None:
            self._record_feed.close()
        unfinished += await self._release(deadline)
        if closing:  # what still waited for the log has failed now
            await asyncio.wait(closing, timeout=deadline.share())
        for each, subscription in ending.items():
            error = each.exception() if each.done() else BusClosed("store its position")
            if error is not None and subscription.durable is not None:
                _report_unstored(subscription.durable, error)
        if unfinished:
            diagnostics["unfinished"] = unfinished
        if self._started:
            record(BUS_STOPPED, **diagnostics, counts=self.stats.counts())

    async def _release(self, deadline: Deadline) -> int:
        """Close what is open, outermost first. Returns how many tasks and calls did not end in time.

        Joining threads may take some time, so it is done neither on the loop nor on the threads that are joined.
        """
        self.entry.is_open = False
        unfinished, within = 0, partial(run_within, runtime=self.runtime, name="zbus-close")
        if self.network is not None:
            unfinished += await self.network.aclose(deadline.share(1 / 4))
            await self.network.linger(deadline.share(1 / 4))
            unfinished += not await within(deadline.share(1 / 2), partial(_try, "network", self.network.close))
        if self.log is not None:
            close = partial(self.log.close, deadline.share(3 / 4))
            unfinished += not await within(deadline.share(), partial(_try, "log", close))
        if self.commits is not None:
            self.commits.close()
        if self._threads.executor is not None:
            shutdown = partial(self._threads.executor.shutdown, wait=True, cancel_futures=True)
            unfinished += not await within(deadline.share(), partial(_try, "threads", shutdown))
        return unfinished

    # Called by the bus.

    @property
    def is_open(self) -> bool:
        """Whether the bus is open."""
        return self.entry.is_open

    @property
    def is_closing(self) -> bool:
        """Whether closing has begun."""
        return self._closing is not None

    @property
    def commits(self) -> CommitQueue | None:
        """The commit queue; None if no log is written here."""
        return self.entry.commits

    @property
    def read_only(self) -> bool:
        """Whether this bus only reads a log that another process owns."""
        return self.config.read_only

    @property
    def reader(self) -> LogReader:
        """The log and the threads that read it."""
        return LogReader(self.log, self._threads.run, self.config.skip_corrupt)

    def check_open(self, doing: str) -> None:
        """Raise `BusClosed` if the bus is not open."""
        if not self.entry.is_open:
            raise BusClosed(doing, self.entry.closed_because)

    def need_log(self, doing: str) -> Log:
        """Return the log. Raises `LogRequired` if this bus has no log."""
        if self.log is None:
            raise LogRequired(doing)
        return self.log

    def need_network(self, doing: str) -> Network:
        """Return the network of an open bus. Raises `ConfigInvalid` if the bus is read-only."""
        self.check_open(doing)
        if self.network is None:
            reason = "a read-only bus has no transport: do this in the process that owns the log, without read_only"
            raise ConfigInvalid("transport", reason)
        return self.network

    def run(self, call: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run a blocking call on a thread of the node. Raises `BusClosed`, now or later, if the node closes first."""
        return self._threads.run(call, *args)

    async def backup(self, target: str, progress: Callable[[int, int], None] | None) -> Backup:
        """Back up the log, on a thread of its own: it may take long. If cancelled, it ends after its current step."""
        log, is_cancelled = self.need_log("backup()"), False

        def check() -> None:
            if is_cancelled or self.is_closing:
                raise BusClosed("back up the log")

        executor = self.runtime.executor(1, "zbus-backup")
        running = asyncio.get_running_loop().run_in_executor(executor, log.backup, target, progress, check)
        executor.shutdown(wait=False)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            is_cancelled = True
            running.add_done_callback(lambda ended: ended.exception())  # which is this cancellation
            raise

    def serve(self, task: asyncio.Task[None]) -> None:
        """Keep a task of a handler until it ends; closing waits for it."""
        self._services[task] = None
        task.add_done_callback(self._service_ended)

    def begin(self, start: Callable[[], None]) -> None:
        """Call `start` now, or as soon as the bus is open."""
        if not self.is_open:
            self.on_start.append(start)
            return
        self.entry.check_usable("register a handler")
        with self.runtime.running():
            start()

    def subscribe(
        self,
        *key_exprs: str,
        start: Start = "new",
        after: int | datetime | None = None,
        durable: str | None = None,
        queue_events: int = 1000,
        overflow: Overflow | None = None,
        schema: Any = None,
    ) -> EventSubscriber:
        """Open a subscription; see `Bus.subscribe`."""
        self.entry.check_usable("subscribe")
        keys = KeySet(key_exprs)
        policy = check_options(self.log is not None, start, after, durable, queue_events, overflow)
        check_schema(schema)
        with self.runtime.running():
            return self._make_subscriber(
                self,
                keys,
                start=start,
                after=after,
                durable=durable,
                queue_events=queue_events,
                overflow=policy,
                schema=schema,
            )

    def add_cache(self, name: str | None, default: str, *options: Any) -> Any:
        """Open a cache; without a name it gets the default one, with a number if that is taken."""
        if self.is_closing:
            raise BusClosed("make a cache")
        if name in self.caches:
            raise ConfigInvalid("name", f"this bus has a cache {name!r} already")
        numbered = (default if number == 1 else f"{default}-{number}" for number in count(1))
        name = name or next(each for each in numbered if each not in self.caches)
        cache = self.caches[name] = plugins.open_cache(self, name, *options)
        self.begin(cache.begin)
        return cache

    def diagnostics(self) -> dict[str, Any]:
        """Return the mode, the log and the transports of this node, without secrets."""
        found: dict[str, Any] = {
            "pid": self.runtime.pid(),
            "mode": self.config.mode,
            "subscriptions": len(self.dispatcher.subscriptions),
        }
        if self.network is not None:
            found |= self.network.diagnostics()
        if self.log is not None:
            found |= {"log": self.log.path, "read_only": self.log.read_only, "delivered": self.dispatcher.delivered}
        return found

    def list_cursors(self) -> None:
        """Read the cursors in the background, for the next call of `stats()`. Any thread."""
        if (
            self.log is not None
            and self._threads.executor is not None
            and (self._listing is None or self._listing.done())
        ):
            with suppress(RuntimeError):  # the executor was shut down
                self._listing = self._threads.executor.submit(self._list_cursors)

    # Called by the packages and the caches.

    @property
    def close_timeout_s(self) -> float:
        """Seconds that closing may take."""
        return self.config.close_timeout_s

    @property
    def route(self) -> Callable[..., asyncio.Future[Any] | None]:
        """`Dispatcher.route`."""
        return self.dispatcher.route

    @property
    def unroute(self) -> Callable[..., None]:
        """`Dispatcher.unroute`."""
        return self.dispatcher.unroute

    def forget_cache(self, name: str) -> None:
        """The cache of this name was closed: the name is free."""
        self.caches.pop(name, None)

    def check_key(self, key: str) -> str:
        """Return a key that every transport in use can carry. Raises `KeyInvalid`."""
        key = check_key(key)
        for link in self.network.links if self.network is not None else ():
            link.fabric.check(key)
        return key

    def is_blocked(self, reasons: Set[Any], keys: Iterable[str]) -> bool:
        """Return whether a full subscription wants one of the keys, or too many bytes await commit or sending."""
        if self.commits in reasons or self.network in reasons:
            return True
        return any(not reasons.isdisjoint(self.dispatcher.trie.routes(key)) for key in keys)

    def deliver_unlogged(self, rows: Sequence[Row]) -> bool:
        """Deliver events of one key that no log stores. Returns whether subscribers should run now."""
        assert self.network is not None
        number, dispatcher = len(rows), self.dispatcher
        self.entry.published_events += number
        if wanted(logging.DEBUG):
            self._burst_records.published(rows)
        dispatcher.unlogged(rows)
        if self.network.links:
            self.network.send_unlogged(rows)
        self._unyielded += number
        if dispatcher.crowded or self._unyielded >= UNYIELDED_MAX:
            dispatcher.crowded, self._unyielded = False, 0
            return True
        return False

    def validate_with(self, validators: Validators | None) -> None:
        """Validate published and received events against these schemas from now on."""
        self.validators = self.entry.validators = validators
        for subscription in self.dispatcher.subscriptions:
            subscription.checks_changed()

    @property
    def published_events(self) -> int:
        """How many events were published here and stored, or delivered without a log."""
        if self.commits is None:
            return self.entry.published_events
        kept = self.network.inbox.stored_events if self.network is not None else 0
        return self.commits.stored_events - kept

    def _links_changed(self) -> None:
        """The log's tail goes to the dispatcher, and to the network only while it has a link."""
        assert self.network is not None
        if self.commits is not None:
            sends = (self.network.send,) if self.network.links else ()
            self.commits.listeners = (self.dispatcher.stored, *sends)

    def _send_records(self, events: Sequence[Event]) -> None:
        self.dispatcher.unstored(events)
        if self.network is not None:
            self.network.announce(events)

    def _list_cursors(self) -> None:
        with suppress(ZbusError):  # readers of the file see the error; these numbers are only older then
            self.cursors_known = self.need_log("list cursors").cursors.list()

    def _service_ended(self, service: asyncio.Task[None]) -> None:
        self._services.pop(service, None)
        error = asyncio.CancelledError() if service.cancelled() else service.exception()
        if error is not None and not (service.cancelled() and self.is_closing):
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a handler of @bus.on stopped: its subscription failed", "exception": error}
            )


def _report_unstored(durable: str, error: BaseException) -> None:
    """Report a durable subscription whose position was not stored before the bus closed."""
    cause = "the log did not reply" if isinstance(error, BusClosed) else error
    reason = (
        f"the position of the durable subscription {durable!r} was not stored in the time that closing may take "
        f"({cause}): events after its last stored position may be delivered again"
    )
    record_reason("DURABLE_NOT_STORED", logging.WARNING, code="durable_not_stored", reason=reason, durable=durable)


def _try(part: str, close: Callable[[], object]) -> None:
    """Close a part of the node. If that raises, it is recorded, and the other parts are closed as well."""
    try:
        close()
    except Exception as error:
        reason = str(error) or type(error).__name__
        record_reason("BUS_CLOSE_FAILED", logging.ERROR, error, code="close_failed", reason=reason, part=part)
