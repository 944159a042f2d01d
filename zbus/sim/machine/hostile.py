"""Frames of a stranger: malformed ones, and forged ones that look right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from zbus.ports.lineage import NO_BRANCH
from zbus.wire.beacon import Beacon, beacon_key, encode_beacon

from .disk import Disk

KEYS = ("shop/a/orders", "@zbus/beacon/1", "@zbus/node/1", "@zbus/cancel")


def malformed_frames(chance: Random, number: int) -> Iterator[tuple[str, bytes]]:
    """Return frames that no node sends, with the keys on which they arrive."""
    for _ in range(number):
        kind = chance.choice((0, 1, 2, 3, 4, 5, 6, 255))
        yield chance.choice(KEYS), bytes([kind]) + chance.randbytes(chance.choice((0, 1, 8, 40, 400)))


def forged_beacons(disks: Sequence[Disk], chance: Random, number: int) -> Iterator[tuple[str, bytes]]:
    """Return beacons of real logs that claim a position which those have not reached."""
    for _ in range(number if disks else 0):
        disk = chance.choice(disks)
        head = disk.head + chance.choice((1, 1_000, 1 << 40))
        branch = chance.choice((disk.lineage.branch, disk.lineage.branch, NO_BRANCH))
        beacon = Beacon(disk.log_id, disk.head, head, {}, branch, chance.choice((b"", chance.randbytes(8))))
        yield beacon_key(disk.log_id), encode_beacon(beacon)
