"""Plain NATS as a transport: messages of any program become events, and events become plain messages.

A plain message has no identity, so it gets one when it arrives: a publisher for each subject and run of this process,
and a sequence from 0. A message to an inbox (`_INBOX.…`) is never an event. A request is an event, but this transport
does not reply to it.
"""

from __future__ import annotations

import hashlib
import secrets
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
from zbus.util.memo import Memo
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
RUNS_KEPT = 100


def open_fabric(config: BusConfig, url: str, session: Any = None) -> Fabric:
    """Connect to NATS for plain messages. Blocks: call it off the loop."""
    options = load_options(config, url, session)
    if options.stream or options.durable:
        raise ConfigInvalid("transport", "to read a stream, use nats+js://host/STREAM?durable=name")
    return RawNatsFabric(options)


@lru_cache(maxsize=16_384)
def publisher_id(*parts: str) -> int:
    """Return a publisher id of 53 bits, which JSON numbers of every language can hold."""
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 11


class RawIdentities:
    """Assigns identities to plain messages. One thread calls `next`; any thread may call `made`."""

    def __init__(self) -> None:
        self._runs = [secrets.token_hex(16)]
        # Per subject: the run, the key, the publisher and the next sequence.
        self._publishers = Memo[bytes, list[Any]](PUBLISHERS_MAX, self._new, self._forgotten)

    def next(self, subject: bytes) -> tuple[str, int, int]:
        """Return the key, publisher id and sequence of the next message on a subject, which must map to a key."""
        entry = self._publishers[subject]
        _, key, publisher, sequence = entry
        entry[3] = sequence + 1
        return key, publisher, sequence

    def made(self, event: Event, subject: str) -> bool:
        """Return whether the identity of an event was assigned here."""
        return any(publisher_id(run, subject) == event.publisher_id for run in self._runs)

    def _new(self, subject: bytes) -> list[Any]:
        text, run = subject.decode(), self._runs[0]
        return [run, PLAIN.decode(text), publisher_id(run, text), 0]

    def _forgotten(self, subject: bytes, entry: list[Any]) -> None:
        if entry[0] == self._runs[0]:  # a new run gives it a new publisher, so that no sequence is used twice
            self._runs = [secrets.token_hex(16), *self._runs][:RUNS_KEPT]


class RawNatsFabric(EventsOnly):
    """Plain NATS messages as a `Fabric`."""

    name = "nats+raw"
    dense = False  # a subject may carry only some of a publisher's events

    def __init__(self, options: NatsOptions) -> None:
        self.connection = NatsConnection(options, self.name)
        self._identities = RawIdentities()
        self._listener = NatsListener(self.connection, options.assembly_bytes_max, PLAIN, self._frame)
        self.connection.open()

    def send(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Publish the events of the frames as plain messages, except those that were received here."""
        counts, max_payload = self.connection.counts, self.connection.max_payload
        commands: list[bytes] = []
        for event, subject in plain_events(frames, counts):
            if self._identities.made(event, subject):
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
            key, publisher, sequence = self._identities.next(subject)
            return encode(Event(publisher, sequence, time.time_ns(), key, data, headers))
        return encode(Event(*identity, PLAIN.decode(subject.decode()), data, headers))


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
