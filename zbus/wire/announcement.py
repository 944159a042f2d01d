"""What a node tells others about itself, again and again, so that each knows who is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from zbus.errors import EventInvalid

from .envelope import NODE

NODES = "@zbus/node/*"
NAMES_MAX = 100  # of each list: what is left out is counted in `more`
_Names = Annotated[tuple[str, ...], msgspec.Meta(max_length=NAMES_MAX)]
_PREFIX = bytes([NODE])


class Announcement(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A node, as it describes itself. Fields are added at the end alone, with what stands for their absence."""

    origin: Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
    run: str  # another one after each start
    leaving: bool
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)]  # it is gone if nothing is heard of it for so long
    name: str
    bus: str
    host: str
    pid: int
    started_at: int
    version: str
    has_log: bool
    endpoints: _Names
    publishes: _Names  # keys
    subscribes: _Names  # expressions
    serves: _Names  # keys
    more: int
    metadata: Mapping[str, str]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Announcement).decode


def node_key(origin: int) -> str:
    """Where a node tells of itself."""
    return f"@zbus/node/{origin:x}"


def encode_announcement(announcement: Announcement) -> bytes:
    """A frame with one announcement."""
    return _PREFIX + _encode(announcement)


def decode_announcement(frame: bytes) -> Announcement:
    """Read an announcement; raise `EventInvalid` for anything that is none."""
    try:
        return _decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventInvalid(f"not an announcement of a node: {error}") from error
