"""Beacons: heartbeats of a node with the newest offset of each key, so that the loss of the last events is noticed.

A receiver detects a gap when the next event on the same key arrives. Nothing follows the last event on a key, so a node
repeats the newest offset of each key to which it sent events since the last beacon. `since` is the `head` of the beacon
before, so a receiver also notices a lost beacon, and then requests the missing events from the log.

A beacon also names the incarnation of the log (`branch`), and a digest of its events up to `head`: two copies of one
log that share an incarnation, as after a snapshot of a virtual machine was resumed, differ in it.
"""

from __future__ import annotations

import msgspec

from zbus.errors import EventInvalid
from zbus.event import NUMBER_MAX
from zbus.ports.lineage import NO_BRANCH, Branch
from zbus.util.malformed import MALFORMED

from .envelope import BEACON, check_received

ENTRIES_MAX = 4096
DIGEST_BYTES_MAX = 32
_PREFIX = bytes([BEACON])


# The last event on a key: its offset, publisher_id and sequence.
Newest = tuple[int, int, int]


class Beacon(msgspec.Struct, array_like=True, frozen=True):
    """All events of `origin` after `since`, up to `head`, were sent. `newest` has the last of them on each key."""

    origin: int
    since: int
    head: int
    newest: dict[str, Newest]
    branch: Branch = NO_BRANCH
    digest: bytes = b""  # of the log up to `head`; empty if it is unknown


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Beacon).decode


def beacon_key(origin: int) -> str:
    """Return the key for the beacons of a node."""
    return f"@zbus/beacon/{origin:x}"


BEACONS = "@zbus/beacon/*"


def encode_beacon(beacon: Beacon) -> bytes:
    """Encode a beacon as a frame.

    >>> decode_beacon(encode_beacon(Beacon(3, 0, 7, {"a/b": (7, 1, 0)}))).head
    7
    """
    return _PREFIX + _encode(beacon)


def decode_beacon(frame: bytes) -> Beacon:
    """Decode a beacon. Raises `EventInvalid` if it is malformed."""
    try:
        beacon = _decode(memoryview(frame)[1:])
    except MALFORMED as error:
        raise EventInvalid(f"malformed beacon: {error}") from error
    numbers = [beacon.origin, beacon.since, beacon.head]
    for key, newest in beacon.newest.items():
        check_received(key)
        numbers += newest
    if min(numbers) < 0 or max(numbers) > NUMBER_MAX or len(beacon.newest) > ENTRIES_MAX:
        raise EventInvalid("malformed beacon: a number is out of range")
    if len(beacon.digest) > DIGEST_BYTES_MAX:
        raise EventInvalid("malformed beacon: its digest is too long")
    return beacon
