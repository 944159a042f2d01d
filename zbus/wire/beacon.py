"""Beacons: what a node says of how far it has sent, so that a lost end is noticed too.

A receiver sees a hole when the next event on the same key comes; of the last event on a key nothing
comes after. So a node repeats the newest offset of each key that it sent on since its last beacon.
Beacons follow each other without a gap (`since` is the last one's `head`): who missed one asks.
"""

from __future__ import annotations

import msgspec

from zbus.errors import EventInvalid

from .envelope import BEACON, check_received

ENTRIES_MAX = 4096
_PREFIX = bytes([BEACON])


# Of the last event on a key: its offset, publisher_id and sequence.
Newest = tuple[int, int, int]


class Beacon(msgspec.Struct, array_like=True, frozen=True):
    """Everything of `origin` over `since` up to `head` was sent; `newest` is the last event of each key in it."""

    origin: int
    since: int
    head: int
    newest: dict[str, Newest]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Beacon).decode


def beacon_key(origin: int) -> str:
    """Where the beacons of a node are sent."""
    return f"@zbus/beacon/{origin:x}"


BEACONS = "@zbus/beacon/*"


def encode_beacon(beacon: Beacon) -> bytes:
    """A frame with one beacon.

    >>> decode_beacon(encode_beacon(Beacon(3, 0, 7, {"a/b": (7, 1, 0)}))).head
    7
    """
    return _PREFIX + _encode(beacon)


def decode_beacon(frame: bytes) -> Beacon:
    """Read a beacon; raise `EventInvalid` for anything that is none."""
    try:
        beacon = _decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventInvalid(f"not a beacon: {error}") from error
    numbers = [beacon.origin, beacon.since, beacon.head]
    for key, newest in beacon.newest.items():
        check_received(key)
        numbers += newest
    if min(numbers) < 0 or max(numbers) >= 1 << 63 or len(beacon.newest) > ENTRIES_MAX:
        raise EventInvalid("not a beacon: a number out of range")
    return beacon
