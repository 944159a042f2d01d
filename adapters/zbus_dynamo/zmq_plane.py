"""Dynamo's event plane over ZMQ as a `Fabric`: direct from process to process, or through brokers.

The core exchanges zbus frames with this module; the sockets carry only Dynamo's wire. The I/O thread, the sockets,
their connections and the queues are those of the ZMQ adapter.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import zmq

from zbus.errors import EventInvalid
from zbus.keys import KeySet
from zbus.observe.counters import Counters
from zbus.observe.records import EVENT_DROPPED
from zbus.ports.fabric import EventsOnly
from zbus_zmq.carry.capacity import Capacity
from zbus_zmq.io.io_thread import IoThread

from .broker import Brokered
from .direct import Direct
from .scopes import check_expressions, place_of_key
from .settings import ZmqSettings, zmq_settings
from .translate import outgoing

if TYPE_CHECKING:
    from zbus.config import BusConfig
    from zbus.ports.fabric import Fabric, Receive

NAME = "zmq with the dynamo wire"
LINK_S = 1.0  # how long listen() waits for the connections it made
FLUSH_S = 2.0  # how long close() waits until the queued events have been sent
CLOSE_S = 5.0  # how long close() waits for the sockets after that
SOCKETS_MAX = 16_384  # one for each endpoint that is listened to, and one for its events


def open_fabric(config: BusConfig, url: str, session: Any = None) -> DynamoZmq:
    """Open the fabric of a URL. No socket listens before the first event is sent."""
    return DynamoZmq(zmq_settings(url, config.options_for("zmq")), config.payload_bytes_max)


class DynamoZmq(EventsOnly):
    """ZMQ with Dynamo's wire, as a `Fabric`."""

    name = "zmq+dynamo"
    dense = True

    def __init__(self, settings: ZmqSettings, payload_bytes_max: int) -> None:
        self._counts = Counters(self.name)
        self._capacity = Capacity(f"no broker is connected at {', '.join(settings.xsub)}")
        self._closed = False
        self._io = IoThread("zbus-dynamo", self._counts)
        self._io.context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        kind: type[Direct] | type[Brokered] = Brokered if settings.xsub else Direct
        try:
            self._side: Direct | Brokered = self._io.call(
                "open its sockets", lambda: kind(self._io, self._counts, settings, payload_bytes_max, self._capacity)
            )
        except BaseException:
            self._io.close(CLOSE_S)
            raise

    def send(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Hand over events. Events that this wire cannot carry are left out, counted and reported."""
        self._side.send(list(outgoing(frames, self._counts)))

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        """Receive the events that these expressions match.

        Raises `TransportUnsupported` if one of them can match nothing here. The other expressions are active even then.
        """
        wanted = KeySet(expressions) if expressions else None
        self._io.call("subscribe", lambda: self._side.listen(wanted, receive))
        deadline = time.monotonic() + LINK_S
        while wanted is not None and not self._side.linked and time.monotonic() < deadline:
            time.sleep(0.005)
        check_expressions(NAME, expressions)

    def ready(self, key: str) -> bool:
        """Return whether `key` has a subscriber, as far as this end can tell."""
        try:
            return self._side.wanted(place_of_key(key))
        except EventInvalid:
            return True  # waiting would not help: the key is rejected when it is sent

    def check(self, key: str) -> None:
        """Raise `KeyInvalid` unless the key has two to four segments: a scope and a topic."""
        place_of_key(key)

    def diagnostics(self) -> dict[str, Any]:
        """Return the endpoints, the connections, the queue and the counters."""
        found = {"fabric": self.name, "networked": True, "queued_events": self._capacity.messages}
        return found | self._side.diagnostics() | {"counts": self._counts.snapshot()}

    def close(self) -> None:
        """Send the queued events, close the sockets and remove our records, in bounded time. Safe to call twice."""
        self._capacity.close()
        if not self._closed:
            self._closed = True
            self._io.post(self._side.hurry)
            if not self._capacity.wait_empty(FLUSH_S):
                self._counts.report(EVENT_DROPPED, "closed_before_sent", self.name, self._capacity.messages)
        self._io.close(CLOSE_S)
        self._side.closed()


if TYPE_CHECKING:
    _port: type[Fabric] = DynamoZmq
