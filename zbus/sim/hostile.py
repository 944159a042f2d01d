"""Frames of a stranger: malformed ones, and forged ones that look right."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING

from zbus.wire.beacon import Beacon, beacon_key, encode_beacon

from .node import SimNode

if TYPE_CHECKING:
    from .world import World


def malformed_frames(chance: Random, number: int) -> Iterator[tuple[str, bytes]]:
    """Return frames that no node sends, with the keys on which they arrive."""
    for _ in range(number):
        kind = chance.choice((0, 1, 2, 3, 4, 5, 6, 255))
        yield chance.choice(KEYS), bytes([kind]) + chance.randbytes(chance.choice((0, 1, 8, 40, 400)))


def forged_frames(world: World, node: SimNode, chance: Random, number: int) -> Iterator[tuple[str, bytes]]:
    """Return malformed frames, and beacons of real logs that claim a position which those have not reached."""
    logs = [each.disk for each in world.nodes.values() if each.disk is not None and each is not node]
    for key, frame in malformed_frames(chance, number):
        if logs and chance.random() < 0.3:
            disk = chance.choice(logs)
            head = disk.head + chance.choice((1, 1_000, 1 << 40))
            yield beacon_key(disk.log_id), encode_beacon(Beacon(disk.log_id, disk.head, head, {}))
        else:
            yield key, frame


KEYS = ("shop/a/orders", "@zbus/beacon/1", "@zbus/nodes", "@zbus/cancel")
