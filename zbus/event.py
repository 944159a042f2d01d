"""The event: what is published, stored, carried and handed to subscribers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, overload

import msgspec

from .errors import CursorError
from .headers import CONTENT_TYPE, CORRELATION_ID, NO_HEADERS, SCHEMA, TRACEPARENT
from .payload import decode_payload

T = TypeVar("T")


class DeliveryHandle:
    """What an event knows of the subscription that handed it over. It refers to neither queue nor bus."""

    __slots__ = ("acknowledge", "schema")

    def __init__(self, schema: Any, acknowledge: Callable[[int], Awaitable[None]] | None) -> None:
        self.schema, self.acknowledge = schema, acknowledge


class Offset(int):
    """The offset of a published event: an `int` that also says which event it is.

    `first` is False if an event of the same identity was stored before, and nothing was stored now.

    >>> offset = offset_of(12, 7, 0)
    >>> offset + 1, offset.publisher_id, offset.sequence, offset.first
    (13, 7, 0, True)
    """

    # Publishing sets these itself, because a constructor of ours would double what an offset costs.
    identity: tuple[int, int]
    first: bool = True

    @property
    def publisher_id(self) -> int:
        """Who published the event."""
        return self.identity[0]

    @property
    def sequence(self) -> int:
        """Which of the publisher's events it is."""
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


# Not tracked by the garbage collector: events are many, and no cycle leads through one.
class Event(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One event. Identity is (`publisher_id`, `sequence`), on every node and every transport.

    `offset` is the position in the log it was read from, and 0 where there is none;
    `published_at` is Unix time in nanoseconds; `payload` is bytes.

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
    _receipt: DeliveryHandle | None = None

    @property
    def topic(self) -> str:
        """The last segment of the key."""
        return self.key.rpartition("/")[2]

    @property
    def identity(self) -> tuple[int, int]:
        """(publisher_id, sequence): the same wherever the event is seen."""
        return self.publisher_id, self.sequence

    @property
    def correlation_id(self) -> str | None:
        """The `correlation-id` header."""
        return self.headers.get(CORRELATION_ID)

    @property
    def trail(self) -> str:
        """What ties records to this event: its correlation id, or its identity where it has none."""
        return self.correlation_id or f"{self.publisher_id:x}-{self.sequence}"

    @property
    def content_type(self) -> str | None:
        """The `content-type` header; None stands for plain bytes."""
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
        """The payload as `type_`: a pydantic model, dataclass, msgspec struct, dict, list, str, bytes, …

        Without an argument: as the subscription's `schema`, or by the content type. Raises `PayloadInvalid`.
        """
        if type_ is None and self._receipt is not None:
            type_ = self._receipt.schema
        return decode_payload(self, type_)

    async def ack(self) -> None:
        """Acknowledge this event and all before it: none of them is seen again by this durable name.

        Returns once that is on disk. Cancelled, the acknowledgement may or may not have happened.
        """
        if self._receipt is None or self._receipt.acknowledge is None:
            raise CursorError("", "this event did not come from a durable subscription; nothing to acknowledge")
        await self._receipt.acknowledge(self.offset)

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
        return not self == other  # the base class has one of its own, by identity

    def __hash__(self) -> int:
        return hash((self.publisher_id, self.sequence))

    def __reduce__(self) -> tuple[Any, ...]:
        # The subscription stays behind: an event crosses processes as plain data.
        fields = (self.publisher_id, self.sequence, self.published_at, self.key, self.payload)
        return Event, (*fields, dict(self.headers), self.offset)

    def _with(self, receipt: DeliveryHandle) -> Event:
        """The same event, as one subscription hands it over."""
        fields = (self.publisher_id, self.sequence, self.published_at, self.key, self.payload)
        return Event(*fields, self.headers, self.offset, self.provenance, receipt)
