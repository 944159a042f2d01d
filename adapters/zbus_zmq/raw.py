"""Plain ZMQ messages as events, and events as plain messages: for programs without zbus.

`zmq+raw://?connect=tcp://…&bind=tcp://…`: a SUB socket connects to their PUB sockets, and a PUB socket of ours is bound
for their SUB sockets. A message is [topic, payload], or with `layout=single` one frame of topic, space and payload. It
becomes an event with an identity of its own: a publisher per topic, new at each start, sequences from 0. This fabric
never sends the events that it made; but if both sockets connect to one broker, sent events come back as new ones.

A PUB socket drops messages without a subscriber. On a node with a log, this one refuses to send while there is no
subscription, so the log keeps the events and they are sent to the first subscriber. While there are subscriptions, an
event that matches none of them is dropped, because it would block the others forever; without a log, every event is.
Both are counted. ZMQ acknowledges nothing: messages in flight are lost if their subscriber disconnects.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import zmq

from zbus.errors import EventInvalid, KeyInvalid
from zbus.event import Event
from zbus.keys import KeySet
from zbus.observe.counters import Counters
from zbus.observe.records import EVENT_DROPPED, TRANSPORT_INPUT_REJECTED, record
from zbus.ports.fabric import EventsOnly, Receive
from zbus.util.identities import AssignedIdentities
from zbus.util.memo import Memo
from zbus.wire.envelope import encode, unpack

from .address.options import from_url, validated
from .address.raw_options import RawOptions
from .address.raw_topics import key_from, topic_from, topic_prefix
from .address.topics import widest
from .carry.capacity import Capacity
from .carry.publishing import ZmqPublishing
from .io.io_thread import IoThread
from .io.links import Links
from .io.receive import received
from .io.sockets import bind, make_socket
from .io.source import source_of

if TYPE_CHECKING:
    from zbus.config import BusConfig
    from zbus.ports.fabric import Fabric

TOPICS_MAX = 100_000
JOINING_S = 0.1  # a program that connects subscribes to one topic after the other


def open_fabric(config: BusConfig, url: str, session: Any = None) -> RawZmqFabric:
    """Open the fabric of a `zmq+raw://` URL. Blocks: call it off the loop."""
    options = validated(RawOptions, config.options_for("zmq+raw") | from_url(url))
    return RawZmqFabric(options, kept=config.log is not None)


class RawZmqFabric(EventsOnly):
    """Plain ZMQ sockets as a `Fabric` that carries only events."""

    name = "zmq+raw"
    dense = True

    def __init__(self, options: RawOptions, *, kept: bool = False) -> None:
        """`kept`: a log keeps the sent events, so they can wait for a subscriber."""
        self._options, self._counts = options, Counters(self.name)
        self._waits = kept and bool(options.bind or options.publish)  # without these, no subscriber can connect
        self._identities = AssignedIdentities(TOPICS_MAX)
        self._keys: KeySet | None = None
        self._receive: Receive | None = None
        self._known: Memo[bytes, str | None] = Memo(TOPICS_MAX)
        self._prefixes: set[bytes] = set()
        self.endpoint: str | None = None
        self._io = IoThread("zbus-zmq-raw", self._counts)
        try:
            self._io.call("open its sockets", self._open)
        except BaseException:
            self._io.close(options.linger_s + 2.0)
            raise
        record("TRANSPORT_OPEN", logging.DEBUG, transport=self.name, bound=self.endpoint)

    def send(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Send the payloads of all events that were not made here. Raises `TransportError` unless all are sent."""
        plain: list[tuple[str, bytes]] = []
        invalid, unnamed, own = list[str](), list[str](), 0
        for key, frame in frames:
            try:
                events = unpack(frame)
            except EventInvalid:
                invalid.append(key)
                continue
            for event in events:
                topic = self._topic(event.key)
                if not topic:
                    unnamed.append(event.key)
                elif self._identities.assigned(event.publisher_id, topic):
                    own += 1
                else:
                    plain.append((event.key, event.payload))
        if plain:
            self._publishing.send(plain)
        # After sending: a failed call is repeated, and would count these again.
        for key in invalid:
            self._counts.report(TRANSPORT_INPUT_REJECTED, "frame_not_events", key)
        for key in unnamed:
            self._counts.report(EVENT_DROPPED, "key_without_topic", key)
        if own:
            self._counts.add("echo_suppressed", own)
        self._count_unwanted(plain)

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        """Receive the messages whose keys match."""
        keys = KeySet(expressions) if expressions else None
        prefixes = widest(topic_prefix(each, self._options.separator) for each in keys.expressions) if keys else set()
        self._io.call("subscribe", lambda: self._change(keys, prefixes, receive))

    def ready(self, key: str) -> bool:
        """Return whether a subscription may match the topic of `key`."""
        return self._publishing.wants(key)

    def check(self, key: str) -> None:
        """Raise `KeyInvalid` if the key is not the key of any topic: its topic would belong to another key."""
        if not self._topic(key):
            raise KeyInvalid(
                key, f"it does not correspond to a ZMQ topic with the separator {self._options.separator!r}"
            )

    def diagnostics(self) -> dict[str, Any]:
        """Return the endpoints and the counters."""
        return {
            "fabric": self.name,
            "networked": self.networked,
            "bound": self.endpoint,
            "connect": list(self._options.connect),
            **self._publishing.diagnostics(),
            "counts": self._counts.snapshot(),
        }

    def close(self) -> None:
        """Send queued messages for a bounded time, and close every socket. Safe to call twice."""
        self._publishing.close()
        self._io.close(2 * self._options.linger_s + 2.0)

    def _open(self) -> None:
        options, io = self._options, self._io
        limits = options.limits()
        out = make_socket(io.context, zmq.XPUB, limits, None, server=options.bind is not None)
        self._in = make_socket(io.context, zmq.SUB, limits, None, server=False)
        shape = _joined if options.layout == "single" else None
        self._publishing = ZmqPublishing(
            io,
            out,
            "",
            limits,
            self._counts,
            topic_of=self._topic,
            shape=shape,
            capacity=Capacity("no subscriber"),
        )
        self._publishing.set_linked(not self._waits)
        self._incoming = Links(io, self._in, None, self._counts)
        self._incoming.want(dict.fromkeys(options.connect))
        self._outgoing = Links(io, out, None, self._counts)
        self._outgoing.want(dict.fromkeys(options.publish))
        if options.bind is not None:
            self.endpoint = bind(out, options.bind, limits)
        io.on_readable(out, self._on_subscriptions)
        io.on_readable(self._in, self._take)
        io.at_end(lambda: self._publishing.drain(options.linger_s))

    def _on_subscriptions(self) -> None:
        """React to changed subscriptions."""
        self._publishing.on_readable()
        if self._waits and self._publishing.subscribed:
            self._io.later(JOINING_S, self._link)
        elif self._waits:
            self._publishing.set_linked(False)

    def _link(self) -> None:
        self._publishing.set_linked(self._publishing.subscribed)

    def _count_unwanted(self, plain: Sequence[tuple[str, bytes]]) -> None:
        missed = sum(not self._publishing.wants(key) for key, _ in plain)
        if missed and self._publishing.subscribed:
            self._counts.add("no_interest", missed)  # as usual with PUB sockets
        elif missed:
            where = self.endpoint or ", ".join(self._options.publish) or "no socket to send on"
            self._counts.report(EVENT_DROPPED, "no_subscribers", where, missed)

    def _topic(self, key: str) -> bytes:
        topic = topic_from(key, self._options.separator) or b""
        return b"" if self._options.layout == "single" and b" " in topic else topic

    def _change(self, keys: KeySet | None, prefixes: set[bytes], receive: Receive) -> None:
        self._keys, self._receive = keys, receive
        self._known.clear()
        before, self._prefixes = self._prefixes, prefixes
        for prefix in prefixes - before:
            self._in.set(zmq.SUBSCRIBE, prefix)
        for prefix in before - prefixes:
            self._in.set(zmq.UNSUBSCRIBE, prefix)

    def _take(self) -> None:
        for frames in received(self._in):
            parts = [frame.bytes for frame in frames]
            if self._options.layout == "single" and len(parts) == 1:
                parts = parts[0].split(b" ", 1)
            if len(parts) != 2:
                self._counts.report(
                    TRANSPORT_INPUT_REJECTED, "invalid_frame_count", source_of(frames[0], "a publisher")
                )
                continue
            key = self._known[parts[0]] if parts[0] in self._known else self._judge(parts[0], frames[0])
            if key is not None and self._receive is not None:
                publisher, sequence = self._identities.next(parts[0])
                self._receive(encode(Event(publisher, sequence, time.time_ns(), key, parts[1])), None)

    def _judge(self, topic: bytes, frame: zmq.Frame) -> str | None:
        """Return the key of a topic, or None if this node does not listen to it."""
        key = key_from(topic, self._options.separator)
        if key is None:
            self._counts.report(TRANSPORT_INPUT_REJECTED, "invalid_topic", source_of(frame, "a publisher"))
            return None
        found = self._known[topic] = key if self._keys is not None and key in self._keys else None
        return found


def _joined(topic: bytes, payload: bytes) -> tuple[bytes]:
    return (topic + b" " + payload,)


if TYPE_CHECKING:
    _port: type[Fabric] = RawZmqFabric
