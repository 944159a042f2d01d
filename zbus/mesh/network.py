"""The network of a node: its links, its interest, the keys that it serves, and its position with each other node.

A link is a fabric and the send queue that feeds it. Usually there is one. While a fleet moves from one transport to
another there are two, and events that arrive twice are removed by their identity.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import convert

from zbus.errors import (
    BusClosed,
    ConfigInvalid,
    LogDamaged,
    NoResponders,
    TransportError,
    TransportUnsupported,
)
from zbus.event import NUMBER_MAX, Event
from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_ERROR, record_reason
from zbus.ports.fabric import Fabric
from zbus.ports.lineage import Branch, Lineage, Mark
from zbus.ports.log import Log, Row, Stored
from zbus.util.mailbox import Calls
from zbus.util.runtime import Runtime
from zbus.wire.announcement import NODES
from zbus.wire.beacon import BEACONS
from zbus.wire.envelope import encode
from zbus.wire.provenance import Forward

from .host import Host
from .inbox import Inbox
from .interest import Interest
from .link import Link, label, link_names
from .log_service import LOGS, NO_KEYS, LogPage, LogService, Request, log_key, request_page
from .node_registry import NodeRegistry
from .origins.known_logs import KNOWN_KINDS, NOTHING_OWED
from .origins.own_log import OwnLog
from .origins.reader_reports import ReaderReports
from .origins.readers import KINDS as READER_KINDS
from .origins.received_sequences import RECEIVED_KIND
from .request_client import CANCELS, RequestClient
from .request_server import RequestServer
from .send_queue import SendQueue
from .transit import Transit

if TYPE_CHECKING:
    from zbus.config import BusConfig

T = TypeVar("T")

# Kinds of stored positions: the first part of their names.
SENT, SENT_UNTIL_0_1, OWN, CLOCK = "out", "sent", "own", "clock"
REPLACED_KINDS = (*KNOWN_KINDS, *READER_KINDS, RECEIVED_KIND, OWN, CLOCK)  # all of them are stored each time
NO_NAMES: Mapping[str, int] = MappingProxyType({})

STORE_S = 1.0
REPORT_S = 10.0  # how often other nodes learn how far their events are stored here, if that has changed
LINGER_S = 0.15
JOIN_S = 0.1  # how long to wait for a send queue that had its time to drain already
PAST_NS = 100_000_000  # an interest that began less than this ago has no past events to request
PAGE_TIMEOUT_S = 3.0


class Network:
    """The links of a node. Lives on the loop. Declarations to fabrics may block, so one thread makes them, in order."""

    def __init__(
        self,
        host: Host,
        config: BusConfig,
        runtime: Runtime,
        published_keys: Collection[str],
        links_changed: Callable[[], None],
        renew_identities: Callable[[], None],
        forward: Callable[[str], Forward] | None = None,
    ) -> None:
        self._host, self._config, self._log, self._run = host, config, host.log, host.run
        self._runtime, self._links_changed = runtime, links_changed
        self._steady_ns = runtime.steady_ns
        self._failures = Counters("mesh", runtime)
        self.origin = self._log.writer_id if self._log is not None else runtime.randbits(61) << 1
        self.links: list[Link] = []
        self._closing = False
        self.embedded: list[Fabric] = []  # fabrics that no other node can connect to
        self.interest = Interest()
        self.request_server = RequestServer(host.count, runtime)
        self.forward = forward  # in a bridge: returns what to forward over a link, by its name
        self.transit: defaultdict[str, Transit] = defaultdict(Transit)  # of a bridge, by source link
        self._loop = asyncio.get_running_loop()
        self._calls = Calls(self._loop)
        self._last_number = 0  # without a log, events are numbered
        self._unsent: list[Row] = []  # rows of this turn of the loop
        self._stored: dict[str, int] = {}
        self._sent: dict[str, int] = {}  # by link: where it stopped
        self._own_log = OwnLog(self.origin, host, runtime, renew_identities, self._began)
        self._unstored: dict[str, int] = {}  # sequence marks that are not stored yet
        self._since: dict[str, int] = {}
        self._reports = ReaderReports(self.origin, host, config.retain_remote_s, runtime)
        self.inbox = Inbox(
            host, self, self.origin, self.interest, config.payload_bytes_max, forward is not None, runtime
        )
        self.request_client = RequestClient(lambda: [link.fabric for link in self.links], host.run, runtime)
        self.registry = NodeRegistry(config, self, published_keys, host.log is not None, host.count, runtime)
        self._declaring = runtime.executor(1, "zbus-declare")
        self._declared: asyncio.Future[Any] | None = None  # the declaration of this turn of the loop
        self._timer: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._report_at = 0.0

    # Opening, switching, closing.

    async def start(self) -> None:
        """Load the positions of other nodes, and add the interest in what this node stores. Precedes the first link."""
        if self._log is None:
            return
        keep = self._config.keep
        stored_keys = list(keep if keep != "own" else ())
        for cursor in await self._run(self._log.cursors.list):
            stored_keys += cursor.keys
        self._stored, is_damaged = await self._load_positions(self._log)
        for name, value in list(self._stored.items()):
            kind, _, rest = name.partition("/")
            if kind == SENT:
                incarnation, _, label = rest.partition("/")
                self._sent[label] = self._lineage.shared({int(incarnation, 16): value}) or 0
            elif kind == SENT_UNTIL_0_1:
                self._sent.setdefault(rest, self._lineage.shared({0: value}) or 0)
            elif kind == "since":
                self._since[rest] = value
            elif kind == "heard":
                self.inbox.sequence_marks.load(int(rest, 16), self._stored.pop(name))
            elif not (self._reports.readers.load(name, value) or self.inbox.received_sequences.load(name, value)):
                self.inbox.known_logs.load(name, value)
        await self._check_positions(self._log)
        # Continue the clock of earlier processes: times that they stored stay comparable.
        self._runtime.clock_zero_ns = self._stored.get(self._clock_name, self._runtime.clock_zero_ns)
        self._reports.start()  # before retention runs
        now = 0 if is_damaged else self._steady_ns()  # when an interest began may be among what is lost
        new = {each: now for each in dict.fromkeys(stored_keys) if each not in self._since}
        self._since = {each: self._since.get(each, now) for each in dict.fromkeys(stored_keys)}
        for each, since in self._since.items():
            self.interest.add([each], since, store=True)
        await self._begin_storing(new)
        clock_ns = partial(_earlier, self._runtime.time_ns, self._steady_ns)
        tell = partial(self._calls.soon, self._own_log.copies_reported)
        reverted = partial(self._calls.soon, self._own_log.reverted)
        reader = partial(self._calls.soon, self._reports.received)
        self._service = LogService(
            self._log, self.origin, self.forward, self.inbox.other_logs, clock_ns, tell, reverted, reader
        )
        for key in (log_key(self.origin), log_key(self.origin, self._lineage.current.id)):
            self.request_server.serve(key, self._service.page)
        self.request_server.serve(LOGS, self._service.info)
        for name in link_names(self._config.transports).values():
            await self._begin(name)  # before the first link receives, or its events would not be forwarded
        self._timer = asyncio.get_running_loop().create_task(self._store_periodically(self._log))

    @property
    def _clock_name(self) -> str:
        return f"{CLOCK}/{self._runtime.boot_id()}"

    async def _load_positions(self, log: Log) -> tuple[dict[str, int], bool]:
        """Return the stored positions, and whether some were damaged and had to be removed."""
        try:
            return await self._run(log.positions.load), False
        except LogDamaged as error:
            names = await self._run(log.positions.repair)
            if not names:
                raise
            reason = (
                f"{error.reason}. They were removed, and the events of other nodes are requested again; those that are "
                "stored already are recognized by their identity"
            )
            record_reason("POSITIONS_RESET", logging.WARNING, code="positions_damaged", reason=reason, path=log.path)
            return await self._run(log.positions.load), True

    async def _check_positions(self, log: Log) -> None:
        """Forget the positions in other logs if this log does not have what it had when they were stored."""
        stamps = {int(name[len(OWN) + 1 :], 16): at for name, at in self._stored.items() if name.startswith(f"{OWN}/")}
        head = await self._run(log.head) if stamps else 0
        if all(at <= head and self._lineage.shared({incarnation: at}) == at for incarnation, at in stamps.items()):
            return
        self.inbox.known_logs.forget()
        self.inbox.received_sequences.forget()
        self._reports.readers.forget()
        reason = (
            "the positions beside this log are of another log, or of a newer state of this one. The events of other "
            "nodes are requested again; those that are stored already are recognized by their identity"
        )
        record_reason("POSITIONS_RESET", logging.WARNING, code="positions_of_another_log", reason=reason, path=log.path)

    async def add(self, url: str, fabric: Fabric) -> None:
        """Add a fabric: receive first, then send. If that fails or is cancelled, the fabric is closed."""
        if not fabric.networked:
            self.embedded.append(fabric)
            return
        try:
            link = Link(link_names(self._config.transports).get(url) or label(url), fabric)
            link.receiving = self._receives(link, self._config.receive_on)
            await self._run(self._listen_on, link, self.interest.expressions, self.request_server.keys)
            start = await self._begin(link.label)
            forward = self.forward(link.label) if self.forward is not None else None
            if self._closing:  # the others are being closed: it would be left open
                raise BusClosed("open a transport")
            if self._log is None:
                start = self._last_number  # no await from here on, so that no event is skipped
            link.send_queue = SendQueue(
                fabric,
                self.origin,
                self._log,
                start,
                self.head,
                self._host.count,
                self._on_capacity,
                forward,
                self._runtime,
            )
            self.links.append(link)
            self._links_changed()
            self.registry.announce_soon()
        except BaseException:
            # On a thread of its own: if the node is closing, its executor no longer accepts calls.
            self._runtime.thread(partial(_try, fabric.close), "zbus-close-transport")
            raise

    async def _begin(self, name: str) -> int:
        """Return the position after which a link sends: where it stopped, or the head of the log if the link is new."""
        if self._log is None:
            return self._last_number
        if name not in self._sent:
            self._sent[name] = await self._run(self._log.head)
            await self._run(self._log.positions.store, {self._sent_name(name): self._sent[name]})
        return self._sent[name]

    def _sent_name(self, label: str) -> str:
        return f"{SENT}/{self._lineage.current.id:x}/{label}"

    async def remove(self, link: Link, timeout_s: float) -> None:
        """Send the remaining events over a link, and close it. If cancelled, this continues in the background."""
        self.links.remove(link)
        self._links_changed()
        await asyncio.shield(asyncio.ensure_future(self._close_link(link, timeout_s)))

    async def _close_link(self, link: Link, timeout_s: float) -> None:
        await _drain([link], self._calls, timeout_s)
        await self._run(_close, link.send_queue, link.fabric)

    async def receive_on(self, labels: Sequence[str]) -> None:
        """Receive only on the links with these names. The others still send. Raises `ConfigInvalid`."""
        for each in labels:
            if not any(self._receives(link, (each,)) for link in self.links):
                names = ", ".join(link.label for link in self.links) or "none"
                raise ConfigInvalid("receive_on", f"{each!r} is not a transport of this bus, which has: {names}")
        for link in self.links:
            link.receiving = self._receives(link, labels)
        await self._declare()

    def _receives(self, link: Link, labels: Sequence[str]) -> bool:
        return not labels or link.label in labels or link.fabric.name in labels

    async def aclose(self, timeout_s: float) -> int:
        """Stop the tasks on the loop. Return how many did not end within `timeout_s`."""
        self._closing = True
        self._host.backpressure.unblock(self)
        self._flush()
        self.registry.leave()
        ending: set[asyncio.Task[Any]] = {self.registry.task, *self.inbox.close(), *self.request_server.cancel_all()}
        ending |= {*self._own_log.close()}
        if self._reporting is not None:
            self._reporting.cancel()
            ending.add(self._reporting)
        if self._timer is not None:
            self._timer.cancel()
            ending.add(self._timer)
        return len((await asyncio.wait(ending, timeout=timeout_s))[1])

    async def linger(self, timeout_s: float) -> None:
        """Send the remaining events, for at most `timeout_s`, and then serve nodes that miss some of them."""
        await _drain(self.links, self._calls, timeout_s)
        if self._log is not None and any(link.send_queue.has_sent for link in self.links):
            # A node that missed the last events requests them now.
            await self.request_server.finish(LINGER_S, min(1.0, timeout_s))

    def close(self) -> None:
        """Close the transports, and store the positions that were reached. Off the loop, after `linger`."""
        self._declaring.shutdown(cancel_futures=True)
        for link in self.links:
            link.send_queue.close(JOIN_S)
        self._store(self.inbox.sequence_marks.take(), self.inbox.received_sequences.names())
        for fabric in [*(link.fabric for link in self.links), *self.embedded]:
            _try(fabric.close)
        self.request_server.close()

    # Sending and interest.

    def send(self, rows: Sequence[Row], offsets: Sequence[int]) -> None:
        """Queue stored events for all links. Does not block."""
        for link in self.links:
            link.send_queue.offer(rows, offsets)

    def send_unlogged(self, rows: Sequence[Row]) -> None:
        """Queue events that are not stored in a log. They get their positions here."""
        if self.links:
            if not self._unsent:
                self._loop.call_soon(self._flush)
            self._unsent += rows

    def announce(self, events: Sequence[Event]) -> None:
        """Queue events that are sent once, and neither stored nor repaired. Does not block."""
        if self.links:
            self.announce_frames([(event.key, encode(event)) for event in events])

    def announce_frames(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Queue frames that are sent once. Does not block."""
        for link in self.links:
            link.send_queue.announce(frames)

    def forward_unstored(self, rows: Sequence[Row], link: str) -> None:
        """Forward events that the log does not store over the other links of a bridge."""
        self.send_unlogged(rows)
        self.transit[link].entered(self._last_number + len(self._unsent), len(rows), rows[0].published_at)

    def forward_when_stored(self, rows: Sequence[Row], link: str, storing: asyncio.Future[Stored]) -> None:
        """Track events that a bridge forwards once they are stored."""

        def note(stored: asyncio.Future[Stored]) -> None:
            if not stored.cancelled() and stored.exception() is None:
                self.transit[link].entered(max(stored.result().offsets), len(rows), rows[0].published_at)

        storing.add_done_callback(note)

    def _flush(self) -> None:
        rows, self._unsent = self._unsent, []
        if not rows:
            return
        first = self._last_number + 1
        self._last_number += len(rows)
        self.send(rows, range(first, first + len(rows)))
        if any(link.send_queue.congested for link in self.links):
            self._host.backpressure.block(self, "send_queue_full", "the transport is behind, and no log has the events")

    def _on_capacity(self) -> None:
        """Unblock publishers. Called on a send queue's thread."""
        self._calls.soon(self._host.backpressure.unblock, self)

    def add_interest(
        self, expressions: Sequence[str], since_ns: int, store: bool, keep: bool = False
    ) -> asyncio.Future[Any]:
        """Receive events for these expressions from other nodes. The future completes when they are declared.

        `keep` makes the interest permanent, even after a restart, because a durable subscription relies on it.
        """
        self.interest.add(expressions, since_ns, store)
        self.inbox.interest_changed()
        new = {each: since_ns for each in expressions if keep and each not in self._since}
        if not new:
            return self._declare()
        self._since |= new
        for each, since in new.items():
            self.interest.add([each], since, store=True)
        owed: dict[str, int] = {}
        if since_ns < self._steady_ns() - PAST_NS:
            owed = self.inbox.fetch_past(list(new))
            self._report_at = 0.0  # now: retention must wait for it
        return asyncio.ensure_future(self._begin_storing(new, owed))

    async def _begin_storing(self, since: Mapping[str, int], owed: Mapping[str, int] = NOTHING_OWED) -> None:
        """Store since when expressions are stored, so that missed events are requested even after a crash.

        `owed` has what known logs owe to them.
        """
        if self._log is not None and since:
            changed = {f"since/{each}": ns for each, ns in since.items()} | dict(owed)
            if self._runtime.boot_id():
                changed[self._clock_name] = self._runtime.clock_zero_ns
            await self._run(self._log.positions.store, changed)
        await self._declare()

    def _stamps(self) -> dict[str, int]:
        """Return what positions are compared with after a restart: the head of this log, and the clock of this boot."""
        assert self._log is not None
        stamps = {f"{OWN}/{self._lineage.current.id:x}": self._log.head()}
        if self._runtime.boot_id():
            stamps[self._clock_name] = self._runtime.clock_zero_ns
        return stamps

    def remove_interest(self, expressions: Sequence[str], since_ns: int, store: bool) -> None:
        """Undo one `add_interest`, unless `keep` made it permanent."""
        self.interest.remove(expressions, since_ns, store)
        self.inbox.interest_changed()
        self._declare()

    def check_requests_supported(self, links: Sequence[Link] | None = None) -> None:
        """Raise `TransportUnsupported` if none of the links (default: all links) can carry requests."""
        links = self.links if links is None else links
        if links and all(link.fabric.events_only for link in links):
            raise TransportUnsupported(
                ", ".join(link.fabric.name for link in links), "serving requests, as @bus.serve does"
            )

    def declare_served(self) -> asyncio.Future[Any]:
        """Declare the served keys to the fabrics. The future completes when they are declared."""
        return self._declare()

    async def page(
        self,
        origin: int,
        after: int,
        from_ns: int,
        link: str,
        expressions: Sequence[str] | None = None,
        incarnation: int = 0,
        mark: Mark | None = None,
    ) -> LogPage:
        """Request a page of another node's log, which compares `mark` with its events. `link` is tried first.

        Default: the expressions of this node.
        """
        keys = tuple(expressions or self.interest.expressions) or NO_KEYS
        request = self._request_over(link, origin)
        return await request_page(
            request, origin, keys, after, from_ns, PAGE_TIMEOUT_S, incarnation=incarnation, mark=mark
        )

    async def describe(self, origin: int, incarnation: int, link: str, known: Mapping[int, int]) -> LogPage:
        """Request a page without events: how far a log reaches, and what it shares with `known` incarnations."""
        request = self._request_over(link, origin)
        return await request_page(
            request,
            origin,
            NO_KEYS,
            0,
            0,
            PAGE_TIMEOUT_S,
            incarnation=incarnation,
            known=known,
            probe=True,
            copies=self.inbox.copies_of(origin, incarnation),
        )

    def _request_over(self, link: str, origin: int) -> Request:
        if not self.links:
            raise NoResponders(log_key(origin))
        last_seen_on = next((each.fabric for each in self.links if each.label == link), None)
        return partial(self.request_client.request, first=last_seen_on, stream=True)

    # The log of this node.

    def is_copy(self, branch: Branch, offset: int, digest: bytes = b"") -> bool:
        """Return whether a frame that names the log of this node comes from a copy of it, and report that once."""
        return self._own_log.is_copy(branch, offset, digest)

    def _began(self, before: int) -> None:
        """Serve the new incarnation of the log. A request for the one before it is one for a copy from here on."""
        self.request_server.withdraw(log_key(self.origin, before))
        self.request_server.serve(log_key(self.origin, self._lineage.current.id), self._service.page)
        self._declare()

    @property
    def _lineage(self) -> Lineage:
        return self._own_log.lineage

    # Called by the inbox and the node registry.

    def beacon_received(self, origin: int, incarnation: int) -> None:
        """Note that a node sent a beacon, so it is alive."""
        self.registry.seen(origin, incarnation)

    def announcement_received(self, frame: bytes, link: str) -> None:
        """Register a node that announced itself. Raises `EventInvalid` if the frame is malformed."""
        self.inbox.node_announced(self.registry.receive(frame, link, self.trust(link)))

    def is_refused(self, origin: int, incarnation: int) -> bool:
        """Return whether a node was refused, because of the version of its protocol."""
        return self.registry.is_refused(origin, incarnation)

    def request_cancelled(self, request_id: int) -> None:
        """Cancel a request whose requester no longer waits."""
        self.request_server.cancel(request_id)

    @property
    def branch(self) -> Branch:
        """The incarnation of the log of this node."""
        return self._own_log.branch

    @property
    def subscribed(self) -> Sequence[str]:
        """The key expressions that this node subscribes to."""
        return self.interest.expressions

    @property
    def served(self) -> Sequence[str]:
        """The keys that this node serves requests for."""
        return self.request_server.keys

    @property
    def head(self) -> int:
        """The position of the last event: its offset, or without a log the number of events."""
        return self._host.dispatcher.delivered if self._log is not None else self._last_number

    def sent(self, name: str) -> int:
        """Return the position up to which everything was sent over a link, even if the link is not open now."""
        link = next((each for each in self.links if each.label == name), None)
        return link.send_queue.sent if link is not None else self._sent.get(name, self.head)

    def endpoints(self) -> list[str]:
        """Return the addresses at which other nodes can reach this one."""
        found: list[str] = []
        for link in self.links:
            found += self._read(link.fabric, link.label, lambda fabric: convert(fabric.endpoints, list[str]), [])
        return found

    def trust(self, name: str) -> str:
        """Return how a link authenticates peers."""
        link = next((each for each in self.links if each.label == name), None)
        if link is None:
            return "none"
        return self._read(link.fabric, name, lambda fabric: convert(fabric.trust, str), "none")

    def diagnostics(self) -> dict[str, Any]:
        """Return the links, and the position of each."""
        found: dict[str, Any] = {"origin": f"{self.origin:x}"}
        unknown: dict[str, Any] = {}
        for fabric in self.embedded:
            found |= self._read(fabric, fabric.name, _diagnostics, unknown)
        if self.links:
            found["links"] = [
                {"transport": link.label, "sent": link.send_queue.sent, "receiving": link.receiving}
                | self._read(link.fabric, link.label, _diagnostics, unknown)
                for link in self.links
            ]
        return found

    def _read(self, fabric: Fabric, label: str, read: Callable[[Fabric], T], default: T) -> T:
        """Return `read(fabric)`; if it raises, report that and return `default`."""
        try:
            return read(fabric)
        except Exception as error:
            self._failures.report(TRANSPORT_ERROR, "state_unreadable", label, transport=label, detail=repr(error)[:500])
            return default

    def _declare(self) -> asyncio.Future[Any]:
        """Declare the interest and the served keys to the fabrics, once for all changes in one turn of the loop.

        Each caller gets a future of its own: if one is cancelled, the others still wait for the declaration.
        """
        if self._declared is None:
            self._declared = self._loop.create_future()
            self._loop.call_soon(self._declare_now)
        declared = asyncio.shield(self._declared)
        # The caller need not wait for it: an exception counts as retrieved.
        declared.add_done_callback(lambda done: done.cancelled() or done.exception())
        return declared

    def _declare_now(self) -> None:
        declared, self._declared = self._declared, None
        assert declared is not None
        links = list(self.links)
        if not links:
            declared.set_result(None)
            return
        expressions, keys = self.interest.expressions, self.request_server.keys

        def declare() -> None:
            unsupported: TransportUnsupported | None = None
            for link in links:
                try:
                    self._listen_on(link, expressions, keys)
                except TransportUnsupported as error:
                    unsupported = error  # raised once the other links have declared it
                except Exception as error:  # the other links still declare it
                    fields = {"doing": "declare", "transport": link.label}
                    record_reason(
                        TRANSPORT_ERROR, logging.ERROR, error, code="declare_failed", reason=_text(error), **fields
                    )
            if unsupported is not None:
                raise unsupported

        def done(declaring: asyncio.Future[None]) -> None:
            if not declared.done():
                error = None if declaring.cancelled() else declaring.exception()
                declared.set_exception(error) if error is not None else declared.set_result(None)

        try:
            self._loop.run_in_executor(self._declaring, declare).add_done_callback(done)
        except RuntimeError:
            declared.set_result(None)  # closing

    def _listen_on(self, link: Link, expressions: Sequence[str], keys: Sequence[str]) -> None:
        fabric = link.fabric
        wanted = list(expressions) if link.receiving else []
        if not fabric.events_only:
            wanted += [BEACONS, NODES] if link.receiving else []
            wanted.append(CANCELS)
        fabric.listen(wanted, self.inbox.receiver(link.label, fabric.dense, fabric.events_only))
        if not fabric.events_only:
            fabric.serve(keys, partial(self.request_server.on_request, link=link.label))

    # Positions.

    async def _store_periodically(self, log: Log) -> None:
        self._report_at = self._runtime.monotonic() + REPORT_S
        while True:
            await asyncio.sleep(STORE_S)
            await self._reports.check(log, self.registry.present)
            await self._run(self._store, self.inbox.sequence_marks.take())
            if self._runtime.monotonic() >= self._report_at and (self._reporting is None or self._reporting.done()):
                self._report_at = self._runtime.monotonic() + REPORT_S
                request, known_logs = partial(self.request_client.request, stream=True), self.inbox.known_logs
                reporting = self._reports.send(self.registry.present, known_logs, request, bool(self._since))
                self._reporting = self._loop.create_task(reporting)

    def _store(self, sequence_marks: Mapping[int, int], at_close: Mapping[str, int] = NO_NAMES) -> None:
        if self._log is None:
            return
        sent = {link.label: link.send_queue.sent for link in self.links}
        now = {self._sent_name(label): at for label, at in sent.items()} | self.inbox.known_logs.names()
        now |= self._reports.readers.names()
        now |= at_close
        now |= {f"since/{each}": since for each, since in self._since.copy().items()}
        if now:  # an embedded bus without durable subscriptions stores nothing
            now |= self._stamps()
        replaced = {name for name in self._stored if _link_of(name) in sent or _kind(name) in REPLACED_KINDS}
        forgotten = {name for name in replaced if name not in now}
        for publisher_id, number in sequence_marks.items():
            name = f"heard/{publisher_id:x}"
            if number:
                self._unstored[name] = number
            else:  # otherwise a row would stay for each publisher that there ever was
                self._unstored.pop(name, None)
                forgotten.add(name)
        changed = {name: value for name, value in now.items() if self._stored.get(name) != value} | self._unstored
        for name in [name for name, value in changed.items() if not 0 <= value <= NUMBER_MAX]:
            self._failures.report("POSITIONS_NOT_STORED", "position_out_of_range", name, detail=str(changed.pop(name)))
        if changed or forgotten:
            try:
                if changed:
                    self._log.positions.store(changed)
                if forgotten:
                    self._log.positions.remove(list(forgotten))
                self._stored = {name: value for name, value in self._stored.items() if name not in forgotten} | now
                self._unstored = {}
            except Exception as error:
                record_reason("POSITIONS_NOT_STORED", logging.WARNING, code="positions_not_stored", reason=str(error))


def _kind(name: str) -> str:
    return name.partition("/")[0]


def _link_of(name: str) -> str | None:
    """Return the link whose position has this name, if it is one."""
    kind, _, rest = name.partition("/")
    if kind == SENT:
        return rest.partition("/")[2]
    return rest if kind == SENT_UNTIL_0_1 else None


def _earlier(*clocks: Callable[[], int]) -> int:
    """Return the earliest of several times: too many events are requested rather than too few."""
    return min(clock() for clock in clocks)


def _diagnostics(fabric: Fabric) -> dict[str, Any]:
    return dict(fabric.diagnostics())


async def _drain(links: Sequence[Link], calls: Calls, timeout_s: float) -> None:
    """Send the remaining events over some links, for at most `timeout_s`.

    It waits on the loop, and so under a simulated clock, and occupies no thread.
    """
    queues = {link.send_queue: asyncio.Event() for link in links}
    for queue, drained in queues.items():
        queue.end(partial(calls.soon, drained.set))
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for drained in queues.values():
                await drained.wait()


def _close(send_queue: SendQueue, fabric: Fabric) -> None:
    send_queue.close(JOIN_S)
    _try(fabric.close)


def _try(close: Callable[[], None]) -> None:
    try:
        close()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # a panic of a Rust library is not an `Exception`
        unexpected = None if isinstance(error, TransportError) else error
        record_reason(
            TRANSPORT_ERROR, logging.WARNING, unexpected, code="close_failed", reason=_text(error), doing="close"
        )


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
