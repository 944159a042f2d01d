"""The publishers of other processes that this one listens to: one connection for each endpoint.

A message says its topic and its publisher but not its scope, so it is known by the endpoint that it came
from and the records that led there. A record that disappears is honoured a moment longer, for what is on its way.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import zmq

from zbus.errors import EventInvalid
from zbus.keys import KeySet
from zbus.observe.counters import Counts
from zbus.observe.records import FABRIC_CONNECT_FAILED, FABRIC_INPUT_REFUSED
from zbus.ports.fabric import Receive

from .frames import unpack
from .link import Link
from .records import Channel
from .refusal import NotDynamo, code_of
from .scopes import Place
from .sockets import make_socket, received
from .translate import incoming
from .zmq_loop import ZmqLoop

DRAIN_S = 1.0
RETRY_S = 1.0
MESSAGE_SLACK_BYTES = 64 * 1024

Topics = dict[bytes, dict[int, Place]]  # who publishes a topic, and in which scope


class Source:
    """A connection to one endpoint."""

    def __init__(self, loop: ZmqLoop, endpoint: str, message_bytes_max: int) -> None:
        self.endpoint, self.topics = endpoint, Topics()
        self.socket: Any = make_socket(loop.context, zmq.SUB, message_bytes_max)
        self.link = Link(loop, self.socket)

    def place(self, topic: bytes, publisher_id: int) -> Place | None:
        """Where a message belongs; None for a topic that only begins like one of ours."""
        places = self.topics.get(topic)
        if places is None:
            return None
        found = places.get(publisher_id)
        if found is None and len(set(places.values())) == 1:
            found = next(iter(places.values()))
        if found is None:
            text = f"no record of publisher {publisher_id:x}, and several scopes have its topic"
            raise NotDynamo("publisher_unknown", text)
        return found


class Sources:
    """Connects, subscribes, receives, and lets go of the dead. On the loop's thread, but for `linked`."""

    def __init__(self, loop: ZmqLoop, counts: Counts, payload_bytes_max: int) -> None:
        self._loop, self._counts, self._payload_bytes_max = loop, counts, payload_bytes_max
        self._channels: dict[str, Channel] = {}
        self._gone: dict[str, float] = {}
        self._wanted: KeySet | None = None
        self._receive: Receive | None = None
        self._again_at: float | None = None  # when to try what failed
        self.by_endpoint: dict[str, Source] = {}

    def found(self, channels: Mapping[str, Channel]) -> None:
        """These are the records that there are now."""
        now = time.monotonic()
        for name in self._channels.keys() - channels.keys():
            self._gone.setdefault(name, now + DRAIN_S)
        self._channels.update(channels)
        for name in channels:
            self._gone.pop(name, None)
        self._arrange()

    def listen(self, wanted: KeySet | None, receive: Receive) -> None:
        """Receive these keys from now on."""
        self._wanted, self._receive = wanted, receive
        self._arrange()

    @property
    def linked(self) -> bool:
        """Whether every endpoint that we listen to is connected."""
        return all(self.connections().values())

    def connections(self) -> dict[str, bool]:
        """Every endpoint that we listen to, and whether it is connected."""
        return {source.endpoint: source.link.up > 0 for source in list(self.by_endpoint.values())}

    def tidy(self, now: float) -> float:
        """Let go of what disappeared a while ago; returns when to look again."""
        gone = [name for name, at in self._gone.items() if at <= now]
        for name in gone:
            del self._gone[name]
            self._channels.pop(name, None)
        if gone or (self._again_at is not None and self._again_at <= now):
            self._again_at = None
            self._arrange()
        return min(self._again_at or now + 60.0, *self._gone.values(), now + 60.0)

    def close(self) -> None:
        """Close every connection."""
        for endpoint in list(self.by_endpoint):
            self._drop(endpoint)

    def _arrange(self) -> None:
        needed: dict[str, Topics] = {}
        for channel in self._channels.values():
            place, endpoint = channel.place, channel.endpoint
            if endpoint is not None and self._wanted is not None and place.key in self._wanted:
                topics = needed.setdefault(endpoint, {})
                topics.setdefault(place.topic.encode(), {})[channel.publisher_id] = place
        for endpoint in self.by_endpoint.keys() - needed.keys():
            self._drop(endpoint)
        for endpoint, topics in needed.items():
            try:
                self._connect(endpoint, topics)
            except zmq.ZMQError as error:
                self._drop(endpoint)
                self._again_at = time.monotonic() + RETRY_S
                self._counts.tell(FABRIC_CONNECT_FAILED, "connect_failed", endpoint, detail=str(error)[:500])

    def _connect(self, endpoint: str, topics: Topics) -> None:
        source = self.by_endpoint.get(endpoint) or self._new(endpoint)
        for topic in topics.keys() - source.topics.keys():
            source.socket.subscribe(topic)
        for topic in source.topics.keys() - topics.keys():
            source.socket.unsubscribe(topic)
        source.topics = topics

    def _new(self, endpoint: str) -> Source:
        """ZMQ itself tries again for ever where nobody answers."""
        source = Source(self._loop, endpoint, 2 * self._payload_bytes_max + MESSAGE_SLACK_BYTES)
        self.by_endpoint[endpoint] = source
        self._loop.watch(source.socket, lambda: self._heard(source))
        source.socket.connect(endpoint)
        return source

    def _drop(self, endpoint: str) -> None:
        source = self.by_endpoint.pop(endpoint)
        self._loop.unwatch(source.socket)
        source.link.close()
        source.socket.close(0)

    def _heard(self, source: Source) -> None:
        wanted, receive = self._wanted, self._receive
        assert wanted is not None
        assert receive is not None
        for message in received(source.socket):
            try:
                topic, envelope = unpack(message)
                place = source.place(topic, envelope.publisher_id)
                if place is None:
                    continue
                frame = incoming(envelope, place, wanted, self._payload_bytes_max)
            except EventInvalid as error:
                self._counts.tell(FABRIC_INPUT_REFUSED, code_of(error), source.endpoint, detail=str(error)[:500])
                continue
            if frame is not None:
                receive(frame, None)
