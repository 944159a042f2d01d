"""Broker mode: every process connects to the brokers, and the topic frame is the whole subject.

With several brokers, every event goes through all of them, and all copies but the first are dropped. A broker also
returns this process's own events; those are dropped too.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import zmq

from zbus.errors import EventInvalid
from zbus.keys import KeySet
from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_INPUT_REJECTED
from zbus.ports.fabric import Receive
from zbus.util.window import Window
from zbus_zmq.carry.capacity import Capacity
from zbus_zmq.carry.publishing import ZmqPublishing
from zbus_zmq.io.io_thread import IoThread
from zbus_zmq.io.links import Links
from zbus_zmq.io.receive import received
from zbus_zmq.io.sockets import make_socket

from .frames import ID_BYTES, pack, split, unpack
from .refusal import NotDynamo, code_of
from .scopes import Scoped, place_of_key, place_of_subject, prefixes
from .settings import ZmqSettings
from .translate import SEEN_MAX, DynamoOutgoing, Identity, identity_of, incoming

HOLD_S = 0.3  # after connecting, until the broker has sent its subscriptions
OWN_MAX = 100_000
SOURCE_BYTES_MAX = 150
SCHEMES = ("tcp://", "ipc://")


class Brokered:
    """One socket to each side of the brokers. On the I/O thread, except where a method says otherwise."""

    def __init__(
        self, io: IoThread, counts: Counters, settings: ZmqSettings, payload_bytes_max: int, capacity: Capacity
    ) -> None:
        self._io, self._counts, self._settings = io, counts, settings
        self._payload_bytes_max = payload_bytes_max
        options = settings.socket_options(payload_bytes_max)
        xpub = make_socket(io.context, zmq.XPUB, options, None, server=False)
        xpub.set(zmq.IMMEDIATE, 1)  # events do not wait for a broker that is away: the others carry them
        self._socket = make_socket(io.context, zmq.SUB, options, None, server=False)
        self._publishing = ZmqPublishing(
            io, xpub, "", options, counts, topic_of=_topic_of, shape=split, capacity=capacity
        )
        self._publishing.set_linked(False)
        self._sending = Links(io, xpub, None, counts, SCHEMES)
        self._sending.on_linked = self._on_linked
        self._receiving = Links(io, self._socket, None, counts, SCHEMES)
        io.on_readable(xpub, self._publishing.on_readable)
        io.on_readable(self._socket, self._receive_all)
        self._sending.want(dict.fromkeys(settings.xsub))
        self._receiving.want(dict.fromkeys(settings.xpub))
        self._prefixes: set[bytes] = set()
        self._wanted: KeySet | None = None
        self._receive: Receive | None = None
        self._own: Window[int] = Window(OWN_MAX)  # the publishers of this process
        self._own_lock = threading.Lock()
        self._seen = Window[Identity](SEEN_MAX) if len(settings.xpub) > 1 else None

    def send(self, events: Sequence[DynamoOutgoing]) -> None:
        """Queue events; wait for capacity and for a broker. Any thread."""
        with self._own_lock:
            for event in events:
                self._own.add(event.publisher_id)
        self._publishing.send(
            [(event.place.key, pack(event.publisher_id, event.sequence, event.body)) for event in events]
        )

    @property
    def linked(self) -> bool:
        """Whether a broker is connected that events can arrive from. Any thread."""
        return bool(self._receiving.connected)

    def wanted(self, place: Scoped) -> bool:
        """Return whether a broker is connected and has a subscriber for this place. Any thread."""
        return self._publishing.wants(place.key)

    def listen(self, wanted: KeySet | None, receive: Receive) -> None:
        """Receive these keys from now on."""
        self._wanted, self._receive = wanted, receive
        needed = set(prefixes(wanted.expressions)) if wanted is not None else set()
        for prefix in needed - self._prefixes:
            self._socket.subscribe(prefix)
        for prefix in self._prefixes - needed:
            self._socket.unsubscribe(prefix)
        self._prefixes = needed

    def hurry(self) -> None:
        """Do nothing: no event is held here."""

    def closed(self) -> None:
        """Do nothing: no record has to be removed."""

    def diagnostics(self) -> dict[str, Any]:
        """Return the brokers, and how many of them are connected. Any thread."""
        return {
            "brokers": {"xsub": list(self._settings.xsub), "xpub": list(self._settings.xpub)},
            "connected_xsub": len(self._sending.connected),
            "connected_xpub": len(self._receiving.connected),
        }

    def _on_linked(self, linked: bool) -> None:
        if linked:
            self._io.later(HOLD_S, lambda: self._publishing.set_linked(bool(self._sending.connected)))
        else:
            self._publishing.set_linked(False)

    def _receive_all(self) -> None:
        for frames in received(self._socket):
            message = [frame.bytes for frame in frames]
            try:
                frame = self._accept(message)
            except EventInvalid as error:
                self._counts.report(TRANSPORT_INPUT_REJECTED, code_of(error), _source(message), detail=str(error)[:500])
                continue
            if frame is not None and self._receive is not None:
                self._receive(frame, None)

    def _accept(self, message: list[bytes]) -> bytes | None:
        subject, envelope = unpack(message)
        if self._wanted is None or envelope.publisher_id in self._own:
            return None
        try:
            place = place_of_subject(subject.decode())
        except UnicodeDecodeError as error:
            raise NotDynamo("invalid_subject", "a subject that is not UTF-8") from error
        frame = incoming(envelope, place, self._wanted, self._payload_bytes_max)
        if frame is None or self._seen is None:
            return frame
        return None if self._seen.seen(identity_of(envelope, place)) else frame


def _topic_of(key: str) -> bytes:
    return place_of_key(key).subject.encode()


def _source(message: Sequence[bytes]) -> str:
    """Return the sender of a message as far as the message names it: a broker hides the connection."""
    subject = message[0][:SOURCE_BYTES_MAX].decode(errors="replace")
    return f"{subject} of {message[1].hex()}" if len(message) > 1 and len(message[1]) == ID_BYTES else subject
