"""Dynamo's event plane over NATS core as a `Fabric`: a message is a bare envelope, and its subject the scope and topic.

The NATS adapter connects, authenticates and reconnects; this module implements only Dynamo's wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zbus.errors import EventInvalid
from zbus.keys import KeySet
from zbus.observe.counters import Counters
from zbus.observe.records import EVENT_DROPPED, TRANSPORT_INPUT_REJECTED
from zbus.ports.fabric import EventsOnly
from zbus.util.window import Window
from zbus_nats.connection import HandoverPhase, NatsConnection, Subscribed
from zbus_nats.options import load_options

from . import envelope
from .refusal import code_of
from .scopes import check_expressions, place_of_key, place_of_subject, subjects
from .translate import SEEN_MAX, Identity, identity_of, incoming, outgoing

if TYPE_CHECKING:
    from zbus.config import BusConfig
    from zbus.ports.fabric import Fabric, Receive

NAME = "nats with the dynamo wire"


def open_fabric(config: BusConfig, url: str, session: Any = None) -> DynamoNats:
    """Connect to the server in the URL or, if the URL is bare, in `NATS_SERVER`."""
    connection = NatsConnection(load_options(config, url, session), DynamoNats.name).open()
    return DynamoNats(connection, config.payload_bytes_max)


class DynamoNats(EventsOnly):
    """NATS core with Dynamo's wire, as a `Fabric`."""

    name = "nats+dynamo"
    dense = True

    def __init__(self, connection: NatsConnection, payload_bytes_max: int) -> None:
        self._connection, self._payload_bytes_max = connection, payload_bytes_max
        self._counts = Counters(self.name)
        self._sids: dict[str, int] = {}  # by subject
        self._wanted: KeySet | None = None
        self._receive: Receive | None = None
        self._seen: Window[Identity] | None = None  # while new subscriptions replace the old ones

    def send(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Hand over events. Events that this wire cannot carry are left out, counted and reported."""
        commands: list[bytes] = []
        limit = self._connection.max_payload
        for event in outgoing(frames, self._counts):
            body = event.body
            if limit and len(body) > limit:
                reason = f"{len(body):,} bytes are over the {limit:,} that the server takes, and the wire has no parts"
                self._counts.report(EVENT_DROPPED, "too_large", event.place.key, detail=reason[:500])
                continue
            commands.append(b"PUB %b %d\r\n%b\r\n" % (event.place.subject.encode(), len(body), body))
        self._connection.send(commands)

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        """Receive the events that these expressions match.

        Raises `TransportUnsupported` if one of them can match nothing here. The other expressions are active even then.
        """
        needed = subjects(expressions)
        wanted = KeySet(expressions) if expressions else None
        gone = [subject for subject in self._sids if subject not in needed]
        new = [subject for subject in needed if subject not in self._sids]

        def phase(now: HandoverPhase) -> None:  # on the connection's thread, as is the sink
            if now is HandoverPhase.BOTH_BEGIN:
                self._wanted, self._receive, self._seen = wanted, receive, Window(SEEN_MAX)
            elif now is HandoverPhase.DONE:
                self._seen = None

        added = [Subscribed(subject, "", self._on_message) for subject in new]
        sids = self._connection.change(added, [self._sids.pop(subject) for subject in gone], phase)
        self._sids.update(zip(new, sids, strict=True))
        check_expressions(NAME, expressions)

    def ready(self, key: str) -> bool:
        """Return whether a server is connected. NATS does not report subscriptions."""
        return self._connection.connected

    def check(self, key: str) -> None:
        """Raise `KeyInvalid` unless the key has two to four segments: a scope and a topic."""
        place_of_key(key)

    def diagnostics(self) -> dict[str, Any]:
        """Return the state of the connection, the subjects and the counters."""
        found = self._connection.diagnostics()
        counts = found.pop("counts") | self._counts.snapshot()
        return {"fabric": self.name, "networked": True, "subjects": sorted(self._sids), **found, "counts": counts}

    def close(self) -> None:
        """Close the connection, in bounded time. Calling it again has no effect."""
        self._connection.close()

    def _on_message(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        wanted, receive = self._wanted, self._receive
        if wanted is None or receive is None:
            return
        try:
            place = place_of_subject(subject.decode(errors="replace"))
            found = envelope.decode(payload)
            frame = incoming(found, place, wanted, self._payload_bytes_max)
        except EventInvalid as error:
            source = subject.decode(errors="replace")
            self._counts.report(TRANSPORT_INPUT_REJECTED, code_of(error), source, detail=str(error)[:500])
            return
        seen = self._seen
        if frame is not None and (seen is None or not seen.seen(identity_of(found, place))):
            receive(frame, None)


if TYPE_CHECKING:
    _port: type[Fabric] = DynamoNats
