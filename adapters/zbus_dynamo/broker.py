"""Broker mode: everybody connects to brokers, and the topic frame is the whole subject.

With several brokers side by side every event goes through all of them, and all but the first copy is dropped.
A broker also sends our own events back to us; those are dropped too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from zbus.errors import EventInvalid
from zbus.keys import KeySet
from zbus.observe.counters import Counts
from zbus.observe.records import FABRIC_INPUT_REFUSED
from zbus.ports.fabric import Receive

from .frames import ID_BYTES, pack, unpack
from .link import Link
from .refusal import NotDynamo, code_of
from .scopes import Place, place_of_subject, prefixes
from .sender import Sender
from .settings import ZmqSettings
from .sockets import make_socket, received
from .translate import Outgoing, incoming
from .window import Window
from .zmq_loop import ZmqLoop

HOLD_S = 0.3  # after connecting, for the broker to tell who listens
AGAIN_S = 0.002
OWN_MAX = 100_000
SOURCE_BYTES_MAX = 150


class Brokered:
    """A `Side` of the loop: one socket towards the publishers' side of all brokers, one towards the other."""

    def __init__(self, loop: ZmqLoop, counts: Counts, settings: ZmqSettings, payload_bytes_max: int) -> None:
        self._loop, self._counts, self._settings = loop, counts, settings
        self._payload_bytes_max = payload_bytes_max
        self._sender = Sender(loop, counts, "zmq broker")
        self._sent = Link(loop, self._sender.socket)
        self._socket: Any = make_socket(loop.context, zmq.SUB, 2 * payload_bytes_max + 64 * 1024)
        self._heard = Link(loop, self._socket)
        loop.watch(self._socket, self._receive_all)
        for endpoint in settings.xsub:
            self._sender.socket.connect(endpoint)
        for endpoint in settings.xpub:
            self._socket.connect(endpoint)
        self._prefixes: set[bytes] = set()
        self._wanted: KeySet | None = None
        self._receive: Receive | None = None
        self._own: dict[int, None] = {}
        self._window = Window() if len(settings.xpub) > 1 else None

    @property
    def connected(self) -> bool:
        """Whether some broker takes our events."""
        return self._sent.up > 0

    @property
    def linked(self) -> bool:
        """Whether some broker brings events."""
        return self._heard.up > 0

    def take(self, events: Sequence[Outgoing]) -> None:
        """Queue events."""
        for place, publisher_id, sequence, body in events:
            self._own.pop(publisher_id, None)
            self._own[publisher_id] = None
            if len(self._own) > OWN_MAX:
                self._own.pop(next(iter(self._own)))
            self._sender.queue.append((pack(place.subject.encode(), publisher_id, sequence, body), len(body)))

    def flush(self, now: float) -> tuple[int, int, float]:
        """Send, while there is a broker that had the time to tell who listens."""
        since = self._sent.since
        if not self._sender.queue or since is None:
            return 0, 0, now + 60.0
        if now < since + HOLD_S:
            return 0, 0, since + HOLD_S
        events, size = self._sender.flush(now)
        return events, size, now + (AGAIN_S if self._sender.queue else 60.0)

    def wanted(self, place: Place) -> bool:
        """Whether a broker is there and somebody behind it listens to this place."""
        return self.connected and self._sender.wanted(place.subject.encode())

    def listen(self, wanted: KeySet | None, receive: Receive) -> None:
        """Receive these keys from now on."""
        self._wanted, self._receive = wanted, receive
        needed = set(prefixes(wanted.expressions)) if wanted is not None else set()
        for prefix in needed - self._prefixes:
            self._socket.subscribe(prefix)
        for prefix in self._prefixes - needed:
            self._socket.unsubscribe(prefix)
        self._prefixes = needed

    def close(self) -> None:
        """Close every socket."""
        self._sent.close()
        self._heard.close()
        self._sender.close()
        self._loop.unwatch(self._socket)
        self._socket.close(0)

    def closed(self) -> None:
        """Nothing is left to do."""

    def diagnostics(self) -> dict[str, Any]:
        """Which brokers, and whether one of them is there."""
        return {
            "brokers": {"xsub": list(self._settings.xsub), "xpub": list(self._settings.xpub)},
            "connected_xsub": self._sent.up,
            "connected_xpub": self._heard.up,
        }

    def _receive_all(self) -> None:
        for message in received(self._socket):
            try:
                frame = self._accept(message)
            except EventInvalid as error:
                self._counts.tell(FABRIC_INPUT_REFUSED, code_of(error), _source(message), detail=str(error)[:500])
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
            raise NotDynamo("subject", "a subject that is not UTF-8") from error
        frame = incoming(envelope, place, self._wanted, self._payload_bytes_max)
        if frame is None or self._window is None:
            return frame
        return frame if self._window.first(envelope.publisher_id, envelope.sequence, place.key) else None


def _source(message: Sequence[bytes]) -> str:
    """Who sent a message, as far as it says: a broker does not."""
    subject = message[0][:SOURCE_BYTES_MAX].decode(errors="replace")
    return f"{subject} of {message[1].hex()}" if len(message) > 1 and len(message[1]) == ID_BYTES else subject
