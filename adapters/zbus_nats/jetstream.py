"""A JetStream stream as a transport for bridges: `nats+js://host:4222/STREAM?durable=name`.

Messages of the stream become events, and are acknowledged when the log of this node has stored them. The identity of an
event is its position in the stream, so a redelivered message is the same event: each stream is one publisher, with the
stream's sequence and time. Sent events carry their identity as the message id, so the server stores each of them once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zbus.config import BusConfig
from zbus.errors import ConfigInvalid, TransportError
from zbus.event import Event
from zbus.keys import KeySet
from zbus.observe.records import TRANSPORT_INPUT_REJECTED
from zbus.ports.fabric import EventsOnly, Receive
from zbus.util.identities import derived_publisher_id
from zbus.util.memo import Memo
from zbus.wire.envelope import encode

from .connection import NatsConnection
from .consumer import Consumer
from .delivery import Delivery
from .options import NatsOptions, load_options
from .plain import fits, read_headers, write_headers
from .publishing import NatsPublishing
from .raw import plain_events
from .subjects import FOREIGN, PLAIN, SubjectInvalid

if TYPE_CHECKING:
    from zbus.ports.fabric import Fabric

SETUP_S = 15.0
RECEIVED_KEPT = 100_000


def open_fabric(config: BusConfig, url: str, session: Any = None) -> Fabric:
    """Connect to NATS and look up the stream. Blocks: call it off the loop."""
    options = load_options(config, url, session)
    if not options.stream or not options.durable:
        raise ConfigInvalid("transport", "must name the stream and the consumer: nats+js://host/STREAM?durable=name")
    return JetStreamFabric(options, options.stream, options.durable)


class JetStreamFabric(EventsOnly):
    """A stream and its durable consumer as a `Fabric`."""

    name = "nats+js"
    dense = False  # other subjects and deleted messages leave gaps

    def __init__(self, options: NatsOptions, stream: str, durable: str) -> None:
        self.connection = NatsConnection(options, self.name)
        self._consumer = Consumer(self.connection, stream, durable, self._take)
        self._publishing = NatsPublishing(self.connection)
        self._keys: KeySet | None = None
        self._receive: Receive | None = None
        self._received = Memo[tuple[int, int], None](RECEIVED_KEPT)  # events of zbus that were received from the stream
        self._lock = threading.Lock()
        self.connection.open()
        try:
            self.connection.run(self._find_stream(), SETUP_S)
            self.connection.change([self._consumer.subscription, self._publishing.subscription], [])
        except TransportError:
            self.close()
            raise

    def send(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Store the events of the frames in JetStream. Returns when the server has acknowledged them."""
        counts, max_payload = self.connection.counts, self.connection.max_payload
        messages = []
        for event, subject in plain_events(frames, counts):
            if event.publisher_id == self._publisher or event.identity in self._received:
                counts.add("echo_suppressed")
                continue
            headers = write_headers(event, counts, f"Nats-Msg-Id: {event.publisher_id}-{event.sequence}\r\n")
            if fits(event, headers, max_payload, counts):
                messages.append((subject.encode(), headers, event.payload))
        self._publishing.send(messages)

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        """Receive messages from the position of the consumer on. Messages that match no expression are acknowledged."""
        with self._lock:
            self._receive = receive
            self._keys = KeySet(expressions) if expressions else None
            self.connection.run(self._set_listening(bool(expressions)), SETUP_S)

    def ready(self, key: str) -> bool:
        """Return whether a server is connected."""
        return self.connection.connected

    def check(self, key: str) -> None:
        """Accept every valid key."""

    def diagnostics(self) -> dict[str, Any]:
        """Return the state of the connection and of the consumer."""
        return {
            "fabric": self.name,
            "networked": True,
            **self.connection.diagnostics(),
            "consumer": self._consumer.diagnostics(),
        }

    def close(self) -> None:
        """Close the connection within bounded time. The consumer keeps its position."""
        self.connection.close()

    @property
    def _publisher(self) -> int:
        return derived_publisher_id(b"jetstream", self._consumer.stream.encode(), self._consumer.created.encode())

    # -- the connection's thread -----------------------------------------------------------------------------

    async def _find_stream(self) -> None:
        if self.connection.client is None:
            raise TransportError("not connected to a NATS server")
        await self._consumer.find_stream(self.connection.client)

    async def _set_listening(self, listening: bool) -> None:
        if listening:
            self._consumer.start()
        else:
            self._consumer.stop()

    def _take(self, delivery: Delivery) -> None:
        counts, keys, receive = self.connection.counts, self._keys, self._receive
        source = delivery.subject.decode(errors="replace")
        try:
            if delivery.subject.startswith(FOREIGN):
                raise SubjectInvalid("not a key")
            key = PLAIN.decode(delivery.subject.decode())
        except (SubjectInvalid, UnicodeDecodeError):
            counts.report(TRANSPORT_INPUT_REJECTED, "subject_malformed", source)
            delivery.done()
            return
        if keys is None or receive is None:
            self._consumer.stop()
            return  # there is no listener now: the message is delivered again
        if key not in keys:
            counts.add("filtered")
            delivery.done()
            return
        try:
            receive(self._frame(delivery, key), delivery.done)
        except Exception as error:  # a bug in the receiver must not stop the reading of the socket
            counts.report(TRANSPORT_INPUT_REJECTED, "receiver_failed", source, error=repr(error)[:200])
            self._consumer.again()

    def _frame(self, delivery: Delivery, key: str) -> bytes:
        headers, identity = read_headers(delivery.headers, self.connection.counts, delivery.subject)
        if identity is None:
            identity = (self._publisher, delivery.sequence, delivery.published_at)
        else:
            self._received[identity[:2]] = None
        return encode(Event(*identity, key, delivery.data, headers))


if TYPE_CHECKING:
    _port: type[Fabric] = JetStreamFabric
