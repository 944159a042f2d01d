"""Announcements: a node describes itself to the other nodes, on each new link and then periodically.

They are the handshake between nodes: each names the version of the protocol that it speaks, the oldest version that it
understands, and its capabilities. A node ignores capabilities that it does not know, and refuses a node whose version
is too old or too new. Version 0.1 of zbus, which sends neither, speaks version 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from zbus.errors import EventInvalid
from zbus.ports.lineage import NO_BRANCH, Branch
from zbus.util.malformed import MALFORMED

from .envelope import NODE

NODES = "@zbus/node/*"
# Raise PROTOCOL with each change that older nodes cannot ignore, and PROTOCOL_MIN when older nodes are refused.
PROTOCOL, PROTOCOL_MIN = 2, 1
CAPABILITIES = ("lineage",)  # frames, beacons and pages name the incarnation of their log
NAMES_MAX = 100  # the longest list of names; `more` counts what is left out
_Names = Annotated[tuple[str, ...], msgspec.Meta(max_length=NAMES_MAX)]
_PREFIX = bytes([NODE])


class Announcement(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A node, as it describes itself. Add fields only at the end, with a default."""

    origin: Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
    run: str  # a new one after each start
    leaving: bool
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)]  # the node is considered gone after this long without one
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
    branch: Branch = NO_BRANCH  # of its log
    protocol: int = 1
    protocol_min: int = 1
    capabilities: _Names = ()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Announcement).decode


def node_key(origin: int) -> str:
    """Return the key for the announcements of a node."""
    return f"@zbus/node/{origin:x}"


def encode_announcement(announcement: Announcement) -> bytes:
    """Encode an announcement as a frame."""
    return _PREFIX + _encode(announcement)


def decode_announcement(frame: bytes) -> Announcement:
    """Decode an announcement. Raises `EventInvalid` if it is malformed."""
    try:
        return _decode(memoryview(frame)[1:])
    except MALFORMED as error:
        raise EventInvalid(f"malformed announcement: {error}") from error
