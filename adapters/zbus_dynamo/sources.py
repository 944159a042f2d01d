"""The publishers of other processes that this one listens to: one socket for each endpoint.

A message names its topic and its publisher but not its scope, so its key follows from the endpoint that it came from
and the records that led there. A record that disappears is kept a moment longer, for messages that are still in flight.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import zmq

from zbus.errors import EventInvalid
from zbus.keys import KeySet
from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_CONNECT_FAILED, TRANSPORT_INPUT_REJECTED
from zbus.ports.fabric import Receive
from zbus_zmq.address.options import ZmqOptions
from zbus_zmq.io.io_thread import IoThread
from zbus_zmq.io.links import Links
from zbus_zmq.io.receive import received
from zbus_zmq.io.sockets import make_socket

from .frames import unpack
from .records import Channel
from .refusal import NotDynamo, code_of
from .scopes import Scoped
from .translate import incoming

DRAIN_S = 1.0
RETRY_S = 1.0  # after a socket could not be made

Topics = dict[bytes, dict[int, Scoped]]  # topic -> its publishers, and the scope of each


class PublisherSource:
    """A socket that is connected to one endpoint."""

    def __init__(self, io: IoThread, endpoint: str, options: ZmqOptions, counts: Counters) -> None:
        self.endpoint, self.topics, self._io = endpoint, Topics(), io
        self.socket = make_socket(io.context, zmq.SUB, options, None, server=False)
        try:
            self._links = Links(io, self.socket, None, counts)
        except zmq.ZMQError:
            self.socket.close(0)
            raise
        self._links.want({endpoint: None})

    @property
    def connected(self) -> bool:
        """Whether the endpoint is connected."""
        return bool(self._links.connected)

    def subscribe(self, topics: Topics) -> None:
        """Subscribe to these topics and to no others."""
        for topic in topics.keys() - self.topics.keys():
            self.socket.subscribe(topic)
        for topic in self.topics.keys() - topics.keys():
            self.socket.unsubscribe(topic)
        self.topics = topics

    def place(self, topic: bytes, publisher_id: int) -> Scoped | None:
        """Return where a message belongs, or None for a topic that only starts like one that is subscribed to."""
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

    def close(self) -> None:
        """Close the socket."""
        self._io.forget(self.socket)
        self._links.close()
        self.socket.close(0)


class PublisherSources:
    """Connects, subscribes and receives. On the I/O thread; `linked` and `connections` may be called on any thread."""

    def __init__(self, io: IoThread, counts: Counters, options: ZmqOptions, payload_bytes_max: int) -> None:
        self._io, self._counts, self._options, self._payload_bytes_max = io, counts, options, payload_bytes_max
        self._channels: dict[str, Channel] = {}
        self._gone: dict[str, float] = {}  # records that have disappeared, and when to forget each
        self._wanted: KeySet | None = None
        self._receive: Receive | None = None
        self._retrying = False
        self.by_endpoint: dict[str, PublisherSource] = {}

    def found(self, channels: Mapping[str, Channel]) -> None:
        """Replace the known records with these."""
        gone = self._channels.keys() - channels.keys() - self._gone.keys()
        if gone:
            self._gone.update(dict.fromkeys(gone, time.monotonic() + DRAIN_S))
            self._io.later(DRAIN_S, self._forget_gone)
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
        """Whether every endpoint that is listened to is connected."""
        return all(self.connections().values())

    def connections(self) -> dict[str, bool]:
        """Return every endpoint that is listened to, and whether it is connected."""
        return {source.endpoint: source.connected for source in list(self.by_endpoint.values())}

    def _forget_gone(self) -> None:
        now = time.monotonic()
        due = [name for name, at in self._gone.items() if at <= now]
        for name in due:
            del self._gone[name]
            self._channels.pop(name, None)
        if due:
            self._arrange()

    def _retry(self) -> None:
        self._retrying = False
        self._arrange()

    def _arrange(self) -> None:
        needed: dict[str, Topics] = {}
        for channel in self._channels.values():
            place, endpoint = channel.place, channel.endpoint
            if endpoint is not None and self._wanted is not None and place.key in self._wanted:
                topics = needed.setdefault(endpoint, {})
                topics.setdefault(place.topic.encode(), {})[channel.publisher_id] = place
        for endpoint in self.by_endpoint.keys() - needed.keys():
            self.by_endpoint.pop(endpoint).close()
        for endpoint, topics in needed.items():
            try:
                source = self.by_endpoint.get(endpoint) or self._open(endpoint)
            except zmq.ZMQError as error:  # for example, too many open files
                if not self._retrying:
                    self._retrying = True
                    self._io.later(RETRY_S, self._retry)
                self._counts.report(TRANSPORT_CONNECT_FAILED, "connect_failed", endpoint, detail=str(error)[:500])
                continue
            source.subscribe(topics)

    def _open(self, endpoint: str) -> PublisherSource:
        source = self.by_endpoint[endpoint] = PublisherSource(self._io, endpoint, self._options, self._counts)
        self._io.on_readable(source.socket, lambda: self._receive_from(source))
        return source

    def _receive_from(self, source: PublisherSource) -> None:
        wanted, receive = self._wanted, self._receive
        assert wanted is not None
        assert receive is not None
        for frames in received(source.socket):
            try:
                topic, envelope = unpack([frame.bytes for frame in frames])
                place = source.place(topic, envelope.publisher_id)
                if place is None:
                    continue
                frame = incoming(envelope, place, wanted, self._payload_bytes_max)
            except EventInvalid as error:
                self._counts.report(TRANSPORT_INPUT_REJECTED, code_of(error), source.endpoint, detail=str(error)[:500])
                continue
            if frame is not None:
                receive(frame, None)
