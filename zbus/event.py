"""The event, as it is published, stored, carried and handed to subscribers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, overload

import msgspec

from .errors import CursorError
from .headers import CONTENT_TYPE, CORRELATION_ID, NO_HEADERS, SCHEMA, TRACEPARENT
from .payload import decode_payload
from .util.renamed import Renamed

T = TypeVar("T")
NUMBER_MAX = (1 << 63) - 1  # the highest sequence, offset, id and time: logs store signed 64-bit integers


class DeliveryHandle:
    """The link from an event to the subscription that handed it over. It refers to neither the queue nor the bus."""

    __slots__ = ("acknowledge", "schema")

    def __init__(self, schema: Any, acknowledge: Callable[[int], Awaitable[None]] | None) -> None:
        self.schema, self.acknowledge = schema, acknowledge


class Offset(int):
    """The offset of a published event: an `int` that also carries the identity of the event.

    `first` is False if an event of the same identity was stored before, and nothing was stored now.

    >>> offset = offset_of(12, 7, 0)
    >>> offset + 1, offset.publisher_id, offset.sequence, offset.first
    (13, 7, 0, True)
    """

    # Publishing sets these itself, because a constructor in Python would double the cost of an offset.
    identity: tuple[int, int]
    first: bool = True

    @property
    def publisher_id(self) -> int:
        """The publisher of the event."""
        return self.identity[0]

    @property
    def sequence(self) -> int:
        """The number of the event among those of its publisher."""
        return self.identity[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return offset_of, (int(self), *self.identity, self.first)


def offset_of(offset: int, publisher_id: int, sequence: int, first: bool = True) -> Offset:
    """Return an offset with the identity of its event."""
    made = Offset(offset)
    made.identity, made.first = (publisher_id, sequence), first
    return made


class Provenance(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where an event that another node published came from."""

    origin: int  # the log, or the node without one, that sent it
    offset: int  # its position there
    via: tuple[int, ...] = ()  # the bridges that forwarded it
    link: str = ""  # the transport over which it arrived


# Not tracked by the garbage collector: there are many events, and none is part of a cycle.
class Event(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One event. Identity is (`publisher_id`, `sequence`), on every node and every transport.

    `offset` is the position in the log that the event was read from, or 0 without a log; `published_at` is Unix time
    in nanoseconds; `payload` is bytes.

    >>> event = Event(7, 0, 1_700_000_000_000_000_000, "shop/orders/created", b'{"id": 1}')
    >>> event.topic, event.decode(dict)
    ('created', {'id': 1})
    """

    publisher_id: int
    sequence: int
    published_at: int
    key: str
    payload: bytes
    headers: Mapping[str, str] = NO_HEADERS
    offset: int = 0
    provenance: Provenance | None = None  # None if a publisher of this node published it
    _handle: DeliveryHandle | None = None

    @property
    def topic(self) -> str:
        """The last segment of the key."""
        return self.key.rpartition("/")[2]

    @property
    def identity(self) -> tuple[int, int]:
        """(publisher_id, sequence), the same on every node."""
        return self.publisher_id, self.sequence

    @property
    def correlation_id(self) -> str | None:
        """The `correlation-id` header."""
        return self.headers.get(CORRELATION_ID)

    @property
    def correlation(self) -> str:
        """The id that log records about this event carry: its correlation id, or else its identity."""
        return self.correlation_id or f"{self.publisher_id:x}-{self.sequence}"

    trail = Renamed("correlation")

    @property
    def content_type(self) -> str | None:
        """The `content-type` header, or None for plain bytes."""
        return self.headers.get(CONTENT_TYPE)

    @property
    def traceparent(self) -> str | None:
        """The `traceparent` header: the trace that this event belongs to."""
        return self.headers.get(TRACEPARENT)

    @property
    def schema(self) -> str | None:
        """The `schema` header: the name or hash of the payload's schema."""
        return self.headers.get(SCHEMA)

    @overload
    def decode(self) -> Any: ...
    @overload
    def decode(self, type_: type[T]) -> T: ...
    def decode(self, type_: Any = None) -> Any:
        """Return the payload as `type_`: a pydantic model, dataclass, msgspec struct, dict, list, str, bytes, …

        The default is the subscription's `schema`, or else the content type. Raises `PayloadInvalid` if the payload
        does not match.
        """
        if type_ is None and self._handle is not None:
            type_ = self._handle.schema
        return decode_payload(self, type_)

    def ack(self) -> Awaitable[None]:
        """Acknowledge this event and all before it. They are not redelivered to this durable subscription.

        Awaiting it returns when the acknowledgement is on disk. If cancelled, it may or may not have been stored. For
        an event of `zbus.blocking`, the call itself returns then.
        """
        if self._handle is None or self._handle.acknowledge is None:
            raise CursorError("", "this event is not from a durable subscription; there is nothing to acknowledge")
        return self._handle.acknowledge(self.offset)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Event):
            return NotImplemented
        mine = (self.publisher_id, self.sequence, self.published_at, self.key, self.payload, self.offset)
        return mine == (
            other.publisher_id,
            other.sequence,
            other.published_at,
            other.key,
            other.payload,
            other.offset,
        ) and dict(self.headers) == dict(other.headers)

    def __ne__(self, other: object) -> bool:
        return not self == other  # the base class would compare identities

    def __hash__(self) -> int:
        return hash((self.publisher_id, self.sequence))

    def __reduce__(self) -> tuple[Any, ...]:
        # Without its subscription: an event crosses processes as plain data.
        fields = (self.publisher_id, self.sequence, self.published_at, self.key, self.payload)
        return Event, (*fields, dict(self.headers), self.offset, self.provenance)

    def _with(self, handle: DeliveryHandle) -> Event:
        """Return the same event, linked to the subscription that hands it over."""
        fields = (self.publisher_id, self.sequence, self.published_at, self.key, self.payload)
        return Event(*fields, self.headers, self.offset, self.provenance, handle)
