"""Plain NATS as a transport: messages of any program become events, and events become plain messages.

A plain message has no identity, so it gets one when it arrives: a publisher for each subject and run of this process,
and a sequence from 0. A message to an inbox (`_INBOX.…`) is never an event. A request is an event, but this transport
does not reply to it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from zbus.config import BusConfig
from zbus.errors import ConfigInvalid, EventInvalid
from zbus.event import Event
from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_INPUT_REJECTED
from zbus.ports.fabric import EventsOnly, Receive
from zbus.util.identities import AssignedIdentities
from zbus.wire.envelope import encode, unpack

from .connection import NatsConnection
from .listener import NatsListener
from .options import NatsOptions, load_options
from .parts import publish_headers
from .plain import fits, read_headers, write_headers
from .subjects import PLAIN

if TYPE_CHECKING:
    from zbus.ports.fabric import Fabric

PUBLISHERS_MAX = 100_000


def open_fabric(config: BusConfig, url: str, session: Any = None) -> Fabric:
    """Connect to NATS for plain messages. Blocks: call it off the loop."""
    options = load_options(config, url, session)
    if options.stream or options.durable:
        raise ConfigInvalid("transport", "to read a stream, use nats+js://host/STREAM?durable=name")
    return RawNatsFabric(options)


class RawNatsFabric(EventsOnly):
    """Plain NATS messages as a `Fabric`."""

    name = "nats+raw"
    dense = False  # a subject may carry only some of a publisher's events

    def __init__(self, options: NatsOptions) -> None:
        self.connection = NatsConnection(options, self.name)
        self._identities = AssignedIdentities(PUBLISHERS_MAX)
        self._listener = NatsListener(self.connection, options.assembly_bytes_max, PLAIN, self._frame)
        self.connection.open()

    def send(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Publish the events of the frames as plain messages, except those that were received here."""
        counts, max_payload = self.connection.counts, self.connection.max_payload
        commands: list[bytes] = []
        for event, subject in plain_events(frames, counts):
            if self._identities.assigned(event.publisher_id, subject.encode()):
                counts.add("echo_suppressed")
                continue
            headers = write_headers(event, counts)
            if fits(event, headers, max_payload, counts):
                commands.append(publish_headers(subject.encode(), headers, event.payload))
        if commands:
            self.connection.send(commands)

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        """Receive plain messages whose keys match."""
        self._listener.listen(expressions, receive)

    def ready(self, key: str) -> bool:
        """Return whether a server is connected. NATS does not reveal subscribers."""
        return self.connection.connected

    def check(self, key: str) -> None:
        """Accept every valid key."""

    def diagnostics(self) -> dict[str, Any]:
        """Return the state of the connection."""
        return {"fabric": self.name, "networked": True, **self.connection.diagnostics()}

    def close(self) -> None:
        """Close the connection within bounded time."""
        self.connection.close()

    def _frame(self, subject: bytes, data: bytes, block: bytes | None) -> bytes:
        headers, identity = read_headers(block, self.connection.counts, subject)
        if identity is None:
            identity = (*self._identities.next(subject), time.time_ns())
        return encode(Event(*identity, plain_key(subject), data, headers))


@lru_cache(maxsize=16_384)
def plain_key(subject: bytes) -> str:
    """Return the key of a plain subject."""
    return PLAIN.decode(subject.decode())


@lru_cache(maxsize=16_384)
def plain_subject(key: str) -> str:
    """Return the plain subject of a key."""
    return PLAIN.encode(key)


def plain_events(frames: Sequence[tuple[str, bytes]], counts: Counters) -> list[tuple[Event, str]]:
    """Return the events of frames with their subjects. Malformed frames are counted and left out."""
    found = []
    for key, frame in frames:
        try:
            found += [(event, plain_subject(event.key)) for event in unpack(frame)]
        except EventInvalid as error:
            counts.report(TRANSPORT_INPUT_REJECTED, "frame_rejected", key, error=str(error)[:200])
    return found


if TYPE_CHECKING:
    _port: type[Fabric] = RawNatsFabric
