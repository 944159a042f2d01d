"""What joins this node to others: its links, what it wants of them, what it answers, how far it is with each.

A link is one fabric and the send queue that feeds it. Usually there is one; while a fleet moves from one
transport to another there are two, and each event arrives once, since it is known by its identity.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from zbus.errors import NoResponders, TransportError, TransportUnsupported
from zbus.event import Event
from zbus.observe.records import TRANSPORT_ERROR, record, record_reason
from zbus.ports.fabric import Fabric
from zbus.ports.log import Row, Stored
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
from .log_service import LOGS, NO_KEYS, LogPage, LogService, log_key, request_page
from .node_registry import NodeRegistry
from .request_client import CANCELS, RequestClient
from .request_server import RequestServer
from .send_queue import SendQueue
from .transit import Transit

if TYPE_CHECKING:
    from zbus.config import BusConfig

STORE_S = 1.0
LINGER_S = 0.15
JOIN_S = 0.1  # of a send queue that had its time to drain already
PAST_NS = 100_000_000  # what began so short ago need not be asked for
PAGE_TIMEOUT_S = 3.0


class Network:
    """Lives on the loop. Declaring to fabrics may block: one thread does it, in order."""

    def __init__(
        self,
        host: Host,
        config: BusConfig,
        runtime: Runtime,
        published_keys: Collection[str],
        links_changed: Callable[[], None],
        forward: Callable[[str], Forward] | None = None,
    ) -> None:
        self._host, self._config, self._log, self._run = host, config, host.log, host.run
        self._runtime, self._links_changed = runtime, links_changed
        self._time_ns = runtime.time_ns
        self.origin = self._log.writer_id if self._log is not None else runtime.randbits(61) << 1
        self.links: list[Link] = []
        self.embedded: list[Fabric] = []  # with nobody at the far end
        self.interest = Interest()
        self.request_server = RequestServer(host.count, runtime)
        self.forward = forward  # a bridge sends on what others published, over each of its links by name
        self.transit: defaultdict[str, Transit] = defaultdict(Transit)  # and has these to send, by where they came
        self._loop = asyncio.get_running_loop()
        self._calls = Calls(self._loop)
        self._position = 0  # without a log, the number of the last event
        self._unsent: list[Row] = []  # of this turn of the loop
        self._stored: dict[str, int] = {}
        self._unstored: dict[str, int] = {}  # what beacons told
        self._since: dict[str, int] = {}
        self.inbox = Inbox(
            host, self, self.origin, self.interest, config.payload_bytes_max, forward is not None, runtime
        )
        self.request_client = RequestClient(lambda: [link.fabric for link in self.links], host.run, runtime)
        self.registry = NodeRegistry(config, self, published_keys, host.log is not None, host.count, runtime)
        self._declaring = runtime.executor(1, "zbus-declare")
        self._declared: asyncio.Future[Any] | None = None  # of this turn of the loop
        self._timer: asyncio.Task[None] | None = None

    # Opening, switching, closing.

    async def start(self) -> None:
        """Load how far this node was with others; want what it records. Before the first link."""
        if self._log is None:
            return
        keep = self._config.keep
        stored_keys = list(keep if keep != "own" else ())
        for cursor in await self._run(self._log.cursors.list):
            stored_keys += cursor.keys
        self._stored = await self._run(self._log.positions.load)
        for name, value in list(self._stored.items()):
            kind, _, rest = name.partition("/")
            if kind == "from":
                self.inbox.positions[int(rest, 16)] = value
            elif kind == "since":
                self._since[rest] = value
            elif kind == "heard":
                self.inbox.sequence_marks.load(int(rest, 16), self._stored.pop(name))
        now = self._time_ns()
        new = {each: now for each in dict.fromkeys(stored_keys) if each not in self._since}
        self._since = {each: self._since.get(each, now) for each in dict.fromkeys(stored_keys)}
        for each, since in self._since.items():
            self.interest.add([each], since, store=True)
        await self._begin_storing(new)
        service = LogService(self._log, self.origin, self.forward, self.inbox.other_logs)
        self.request_server.serve(log_key(self.origin), service.page)
        self.request_server.serve(LOGS, service.info)
        for name in link_names(self._config.transports).values():
            await self._begin(name)  # before the first is heard, or what it brings meanwhile would not cross
        self._timer = asyncio.get_running_loop().create_task(self._store_periodically())

    async def add(self, url: str, fabric: Fabric) -> None:
        """Use a fabric: hear first, then send. Closed again if that fails or is cancelled."""
        if not fabric.networked:
            self.embedded.append(fabric)
            return
        try:
            link = Link(link_names(self._config.transports).get(url) or label(url), fabric)
            link.receiving = self._receives(link, self._config.receive_on)
            await self._run(self._listen_on, link, self.interest.expressions, self.request_server.keys)
            start = await self._begin(link.label)
            forward = self.forward(link.label) if self.forward is not None else None
            if self._log is None:
                start = self._position  # nothing may be published between this and the next lines
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
            self._run(_try, fabric.close)
            raise

    async def _begin(self, name: str) -> int:
        """Where a link goes on: after what it sent the last time, or with what is stored from now on."""
        if self._log is None:
            return self._position
        sent = f"sent/{name}"
        if sent not in self._stored:
            self._stored[sent] = await self._run(self._log.head)
            await self._run(self._log.positions.store, {sent: self._stored[sent]})
        return self._stored[sent]

    async def remove(self, link: Link, timeout_s: float) -> None:
        """Send what is left over a link, and let it go. Cancelled, that goes on in the background."""
        self.links.remove(link)
        self._links_changed()
        await asyncio.shield(self._run(_close, link.send_queue, link.fabric, timeout_s))

    async def receive_on(self, labels: Sequence[str]) -> None:
        """Hear on the links of these names only; the others go on sending."""
        for link in self.links:
            link.receiving = self._receives(link, labels)
        await self._declare()

    def _receives(self, link: Link, labels: Sequence[str]) -> bool:
        return not labels or link.label in labels or link.fabric.name in labels

    async def aclose(self, timeout_s: float) -> int:
        """Stop what runs on the loop; returns how much of it did not end in time."""
        self._host.backpressure.unblock(self)
        self._flush()
        self.registry.leave()
        ending: set[asyncio.Task[Any]] = {self.registry.task, *self.inbox.close(), *self.request_server.cancel_all()}
        if self._timer is not None:
            self._timer.cancel()
            ending.add(self._timer)
        return len((await asyncio.wait(ending, timeout=timeout_s))[1])

    async def linger(self, timeout_s: float) -> None:
        """Send the remaining events, for at most `timeout_s`, and then answer nodes that miss some of them.

        Before `close`, because it waits on the loop and so under a simulated clock.
        """
        queues = {link.send_queue: asyncio.Event() for link in self.links}
        for queue, drained in queues.items():
            queue.end(partial(self._calls.soon, drained.set))
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for drained in queues.values():
                    await drained.wait()
        if self._log is not None and any(queue.has_sent for queue in queues):
            await self.request_server.finish(
                LINGER_S, min(1.0, timeout_s)
            )  # a node that missed the last events asks now

    def close(self) -> None:
        """Close the transports, and store the positions that were reached. Off the loop, after `linger`."""
        self._declaring.shutdown(cancel_futures=True)
        for link in self.links:
            link.send_queue.close(JOIN_S)
        self._store(self.inbox.sequence_marks.take())
        for fabric in [*(link.fabric for link in self.links), *self.embedded]:
            _try(fabric.close)
        self.request_server.close()

    # Sending and wanting.

    def send(self, rows: Sequence[Row], offsets: Sequence[int]) -> None:
        """Let other nodes have these. Never waits."""
        for link in self.links:
            link.send_queue.offer(rows, offsets)

    def send_unlogged(self, rows: Sequence[Row]) -> None:
        """The same for events that no log keeps: they are numbered here."""
        if self.links:
            if not self._unsent:
                self._loop.call_soon(self._flush)
            self._unsent += rows

    def announce(self, events: Sequence[Event]) -> None:
        """Let other nodes have events that no log keeps and nobody asks for again. Never waits."""
        if self.links:
            self.announce_frames([(event.key, encode(event)) for event in events])

    def announce_frames(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """The same for frames."""
        for link in self.links:
            link.send_queue.announce(frames)

    def forward_unstored(self, rows: Sequence[Row], link: str) -> None:
        """Send on what came over a link, where no log keeps it."""
        self.send_unlogged(rows)
        self.transit[link].entered(self._position + len(self._unsent), len(rows), rows[0].published_at)

    def forward_when_stored(self, rows: Sequence[Row], link: str, storing: asyncio.Future[Stored]) -> None:
        """Note what came over a link and goes out over the other once it is stored."""

        def note(stored: asyncio.Future[Stored]) -> None:
            if not stored.cancelled() and stored.exception() is None:
                self.transit[link].entered(max(stored.result().offsets), len(rows), rows[0].published_at)

        storing.add_done_callback(note)

    def _flush(self) -> None:
        rows, self._unsent = self._unsent, []
        if not rows:
            return
        first = self._position + 1
        self._position += len(rows)
        self.send(rows, range(first, first + len(rows)))
        if any(link.send_queue.congested for link in self.links):
            self._host.backpressure.block(self, "send_queue_full", "the transport is behind, and no log has the events")

    def _on_capacity(self) -> None:
        """On a send queue's thread."""
        self._calls.soon(self._host.backpressure.unblock, self)

    def add_interest(
        self, expressions: Sequence[str], since_ns: int, store: bool, keep: bool = False
    ) -> asyncio.Future[Any]:
        """Receive these from other nodes; the future tells when the fabrics know.

        `keep`: as long as this node lives, and again after a restart, since its log has a durable name for them.
        """
        self.interest.add(expressions, since_ns, store)
        self.inbox.interest_changed()
        new = {each: since_ns for each in expressions if keep and each not in self._since}
        if not new:
            return self._declare()
        self._since |= new
        for each, since in new.items():
            self.interest.add([each], since, store=True)
        if since_ns < self._time_ns() - PAST_NS:
            self.inbox.fetch_past(list(new))
        return asyncio.ensure_future(self._begin_storing(new))

    async def _begin_storing(self, since: Mapping[str, int]) -> None:
        """Since when something is recorded must outlive a crash, or what follows is not asked for after it."""
        if self._log is not None and since:
            await self._run(self._log.positions.store, {f"since/{each}": ns for each, ns in since.items()})
        await self._declare()

    def remove_interest(self, expressions: Sequence[str], since_ns: int, store: bool) -> None:
        """Undo one `want`; what is kept stays."""
        self.interest.remove(expressions, since_ns, store)
        self.inbox.interest_changed()
        self._declare()

    def check_requests_supported(self, links: Sequence[Link] | None = None) -> None:
        """Raise `TransportUnsupported` where none of the links (or of these) can carry a question."""
        links = self.links if links is None else links
        if links and all(link.fabric.events_only for link in links):
            raise TransportUnsupported(
                ", ".join(link.fabric.name for link in links), "answering questions, as @bus.serve does"
            )

    def declare_served(self) -> asyncio.Future[Any]:
        """Tell the fabrics for which keys this node answers."""
        return self._declare()

    async def page(
        self, origin: int, after: int, from_ns: int, link: str, expressions: Sequence[str] | None = None
    ) -> LogPage:
        """A page of another node's log, for what is wanted here; asked first where that node was heard."""
        keys = tuple(expressions or self.interest.expressions) or NO_KEYS
        last_seen_on = next((each.fabric for each in self.links if each.label == link), None)
        request = partial(self.request_client.request, first=last_seen_on, stream=True)
        if not self.links:
            raise NoResponders(log_key(origin))
        return await request_page(request, origin, keys, after, from_ns, PAGE_TIMEOUT_S)

    # What the inbox and the node registry call.

    def beacon_received(self, origin: int) -> None:
        """A node sent a beacon: it is alive."""
        self.registry.seen(origin)

    def announcement_received(self, frame: bytes, link: str) -> None:
        """A node announced itself. Raises `EventInvalid` for a malformed frame."""
        self.registry.receive(frame, link, self.trust(link))

    def request_cancelled(self, request_id: int) -> None:
        """A requester no longer waits."""
        self.request_server.cancel(request_id)

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
        """The number of the last event: its offset, or without a log how many were sent."""
        return self._host.dispatcher.delivered if self._log is not None else self._position

    def sent(self, name: str) -> int:
        """Up to which number everything was handed to a link, also to one that is not there now."""
        link = next((each for each in self.links if each.label == name), None)
        return link.send_queue.sent if link is not None else self._stored.get(f"sent/{name}", self.head)

    def endpoints(self) -> list[str]:
        """Where others can reach this node, as far as its transports say."""
        return [each for link in self.links for each in link.fabric.endpoints]

    def trust(self, name: str) -> str:
        """How a link makes sure who is at the far end."""
        return next((link.fabric.trust for link in self.links if link.label == name), "none")

    def diagnostics(self) -> dict[str, Any]:
        """The links, and how far each is."""
        found: dict[str, Any] = {"origin": f"{self.origin:x}"}
        for fabric in self.embedded:
            found |= fabric.diagnostics()
        if self.links:
            found["links"] = [
                {"transport": link.label, "sent": link.send_queue.sent, "receiving": link.receiving}
                | link.fabric.diagnostics()
                for link in self.links
            ]
        return found

    def _declare(self) -> asyncio.Future[Any]:
        """Tell the fabrics what is wanted and answered here: once for all that changes in one turn of the loop."""
        if self._declared is None:
            self._declared = self._loop.create_future()
            self._declared.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait
            self._loop.call_soon(self._declare_now)
        return self._declared

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
                    unsupported = error  # for whoever asked for it, once the others know
                except TransportError as error:
                    record(TRANSPORT_ERROR, logging.ERROR, error, doing="declare", transport=link.label)
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
        fabric.listen(wanted, self.inbox.receiver(link.label, fabric.dense))
        if not fabric.events_only:
            fabric.serve(keys, partial(self.request_server.on_request, link=link.label))

    # How far this node is.

    async def _store_periodically(self) -> None:
        while True:
            await asyncio.sleep(STORE_S)
            await self._run(self._store, self.inbox.sequence_marks.take())

    def _store(self, sequence_marks: Mapping[int, int]) -> None:
        if self._log is None:
            return
        now = {f"sent/{link.label}": link.send_queue.sent for link in self.links}
        now |= {f"from/{origin:x}": offset for origin, offset in self.inbox.positions.copy().items()}
        now |= {f"since/{each}": since for each, since in self._since.copy().items()}
        self._unstored |= {f"heard/{publisher_id:x}": number for publisher_id, number in sequence_marks.items()}
        changed = {name: value for name, value in now.items() if self._stored.get(name) != value} | self._unstored
        if changed:
            try:
                self._log.positions.store(changed)
                self._stored |= now
                self._unstored = {}
            except Exception as error:
                record_reason("POSITIONS_NOT_STORED", logging.WARNING, code="positions_not_stored", reason=str(error))


def _close(send_queue: SendQueue, fabric: Fabric, timeout_s: float) -> None:
    send_queue.close(timeout_s)
    _try(fabric.close)


def _try(close: Callable[[], None]) -> None:
    try:
        close()
    except TransportError as error:
        record_reason(TRANSPORT_ERROR, logging.WARNING, code="close_failed", reason=str(error), doing="close")
