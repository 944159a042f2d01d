"""The brokers of a node, in broker mode: events go out to all of them and come in from all of them."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from zbus.observe.counters import Counts
from zbus.observe.records import FABRIC_CONNECT_FAILED
from zbus_zmq.io.curve import Keys
from zbus_zmq.io.io_thread import IoThread
from zbus_zmq.io.links import Links, watch_events

Socket = zmq.Socket[bytes]


class Brokers:
    """The connections of an XPUB socket. `linked` hears when the first is there, and when the last has gone."""

    def __init__(self, io: IoThread, xpub: Socket, keys: Keys | None, counts: Counts) -> None:
        self.connected: set[str] = set()
        self.linked: Callable[[bool], None] = lambda linked: None
        self._counts = counts
        # What waits for a broker that is away would come out of order with what the others carry: let it go.
        xpub.set(zmq.IMMEDIATE, 1)
        watch_events(io, xpub, self._happened)
        self._links = Links(io, xpub, keys, counts)

    def connect(self, endpoints: tuple[str, ...], key: str | None) -> None:
        """Connect to the brokers, which share a public key, and stay connected."""
        self._links.want(dict.fromkeys(endpoints, key))

    def _happened(self, event: int, endpoint: str) -> None:
        before = bool(self.connected)
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected.add(endpoint)
        elif event == zmq.EVENT_DISCONNECTED:
            self.connected.discard(endpoint)
        note_event(event, endpoint, self._counts)
        if bool(self.connected) != before:
            self.linked(not before)


def note_event(event: int, endpoint: str, counts: Counts) -> None:
    """Count what befell a connection, where it is bad."""
    if event == zmq.EVENT_DISCONNECTED:
        counts.note("disconnected")
    elif event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
        counts.tell(FABRIC_CONNECT_FAILED, "handshake_refused", endpoint)
