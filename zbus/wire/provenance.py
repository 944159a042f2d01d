"""The stored form of provenance: the node that an event came from, and the bridges that forwarded it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from zbus.event import Provenance

# Decides by key and provenance whether a bridge forwards an event of another node. Returns the nodes that forwarded it
# (`via`), or None to skip the event.
Forward = Callable[[str, Provenance], tuple[int, ...] | None]

_FIVE = 0x95  # an array of five: an encoded map of headers never begins like this
_NO_HEADERS = b"\x80"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, int, tuple[int, ...], str, msgspec.Raw]).decode


def join_headers(headers: bytes | None, provenance: Provenance | None) -> bytes | None:
    """Return encoded headers and the provenance as one value, as a log stores them."""
    if provenance is None:
        return headers
    return _encode((*msgspec.structs.astuple(provenance), msgspec.Raw(headers or _NO_HEADERS)))


def split_headers(stored: bytes) -> tuple[bytes | None, Provenance | None]:
    """Return the encoded headers and the provenance of a stored value."""
    if stored[0] != _FIVE:
        return stored, None
    origin, offset, via, link, headers = _decode(stored)
    raw = bytes(headers)
    return None if raw == _NO_HEADERS else raw, Provenance(origin, offset, via, link)
