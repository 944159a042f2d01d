"""Frames of a hostile or faulty node: what they cost is bounded, and what they spoil is counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inside import node_of
from mesh_fakes import FakeFabric, recorded

import zbus
from zbus import plugins
from zbus.event import NUMBER_MAX
from zbus.mesh import dedup, inbox, peer
from zbus.mesh.origins import known_logs, sequence_marks
from zbus.ports.lineage import NO_BRANCH
from zbus.wire.announcement import PROTOCOL, Announcement, encode_announcement
from zbus.wire.beacon import Beacon, encode_beacon
from zbus.wire.envelope import encode


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> FakeFabric:
    """The fabric of `fake://`."""
    found = FakeFabric()
    monkeypatch.setattr(plugins, "open_fabric", lambda config, url, session=None: found)
    return found


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def receive(fabric: FakeFabric, *frames: bytes) -> None:
    assert fabric.receive is not None
    for frame in frames:
        fabric.receive(frame, None)


def event(publisher_id: int, sequence: int, key: str = "shop/orders", **place: Any) -> bytes:
    """The frame of one event; without `origin`, its sender is not a node."""
    offset, origin, previous = (place.get(name, 0) for name in ("offset", "origin", "previous"))
    return encode(zbus.Event(publisher_id, sequence, 1, key, b"x", {}, offset), origin, previous)


def announcement(protocol_min: int) -> bytes:
    """The frame of a node without a log that announces itself."""
    known = Announcement(
        **dict.fromkeys(("origin", "pid", "started_at", "more"), 8),
        **dict.fromkeys(("run", "name", "bus", "host", "version"), "future"),
        **dict.fromkeys(("endpoints", "publishes", "subscribes", "serves"), ()),
        leaving=False,
        ttl_s=15.0,
        has_log=False,
        metadata={},
        protocol=protocol_min,
        protocol_min=protocol_min,
    )
    return encode_announcement(known)


async def test_an_event_that_cannot_be_told_from_a_duplicate_is_counted_as_late(
    fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedup, "RANGES_MAX", 1)
    with recorded() as records:
        async with zbus.open(transport="fake://") as bus, bus.subscribe("shop/**") as subscription:
            receive(fabric, *[event(7, sequence) for sequence in (0, 2, 4, 4, 1, 3, 5)])
            async with asyncio.timeout(10):
                assert [(await anext(subscription)).sequence for _ in range(5)] == [0, 2, 4, 3, 5]

            stats = bus.stats()
            assert (stats["duplicates_received"], stats["dropped_late"]) == (1, 1)
    assert [each["code"] for each in records if each["record"] == "EVENT_DROPPED"] == ["late"]


async def test_a_forged_first_event_does_not_silence_its_publisher(fabric: FakeFabric) -> None:
    async with zbus.open(transport="fake://") as bus, bus.subscribe("shop/**") as subscription:
        receive(fabric, event(7, 1 << 60), *[event(7, number, offset=number + 1, origin=9) for number in range(3)])

        async with asyncio.timeout(10):
            assert [(await anext(subscription)).sequence for _ in range(4)] == [1 << 60, 0, 1, 2]
        assert "dropped_late" not in bus.stats()


async def test_the_frames_of_a_refused_node_are_not_read_until_it_speaks_a_known_protocol(fabric: FakeFabric) -> None:
    async with zbus.open(transport="fake://") as bus, bus.subscribe("shop/**") as subscription:
        receive(fabric, event(7, 0, offset=1, origin=8))  # before it announced itself
        receive(fabric, announcement(PROTOCOL + 1), event(7, 1, offset=2, origin=8, previous=1))
        receive(fabric, encode_beacon(Beacon(8, 0, 2, {"shop/orders": (2, 7, 1)})), event(3, 0, offset=1, origin=6))
        receive(fabric, announcement(PROTOCOL), event(7, 2, offset=3, origin=8))

        async with asyncio.timeout(10):
            assert [(await anext(subscription)).identity for _ in range(3)] == [(7, 0), (3, 0), (7, 2)]
        stats = bus.stats()
    assert (stats["frames_refused"], stats["nodes_refused"]) == (2, 1)


async def test_forgotten_publishers_are_counted(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "PUBLISHERS_MAX", 2)
    async with zbus.open(transport="fake://") as bus, bus.subscribe("shop/**"):
        receive(fabric, *[event(publisher_id, 0) for publisher_id in range(5)])

        await until(lambda: bus.stats().get("publishers_evicted") == 3)


async def test_each_gap_is_counted_and_published_but_logged_once_per_publisher_and_minute(fabric: FakeFabric) -> None:
    with recorded() as records:
        async with zbus.open(transport="fake://") as bus, bus.subscribe("shop/**"), bus.subscribe("@zbus/gap") as gaps:
            for publisher_id in (7, 8):
                receive(fabric, *[event(publisher_id, sequence) for sequence in (0, 2, 4, 6)])
            async with asyncio.timeout(10):
                published = [json.loads((await anext(gaps)).payload) for _ in range(6)]

            assert [(each["publisher_id"], each["first"]) for each in published] == [
                (publisher_id, first) for publisher_id in (7, 8) for first in (1, 3, 5)
            ]
            assert bus.stats()["gaps_unrepaired"] == 6
    logged = [each for each in records if each["record"] == "EVENT_GAP"]
    assert [(each["code"], each["publisher_id"]) for each in logged] == [("gap_unrepaired", 7), ("gap_unrepaired", 8)]


async def test_a_beacon_with_the_highest_sequence_does_not_keep_positions_from_being_stored(
    fabric: FakeFabric, log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_marks, "BEACON_NS", 0)
    with recorded() as records:
        async with zbus.open(log_path, transport="fake://", keep=["shop/**"]) as bus:
            receive(fabric, encode_beacon(Beacon(8, 0, 0, {"shop/orders": (1, 7, NUMBER_MAX)})))
            receive(fabric, encode_beacon(Beacon(8, 0, 0, {"shop/orders": (1, 9, 3)})))
            network: Any = node_of(bus).network
            await until(lambda: network.inbox.sequence_marks._changed.keys() == {7, 9})
            await node_of(bus).run(network._store, network.inbox.sequence_marks.take())

            stored = await node_of(bus).run(network._log.positions.load)
    assert (stored["heard/7"], stored["heard/9"]) == (NUMBER_MAX, 4)
    assert [each for each in records if each["record"] == "POSITIONS_NOT_STORED"] == []


async def test_nodes_without_a_log_leave_nothing_behind_and_positions_are_bounded(
    fabric: FakeFabric, log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_logs, "LOGS_MAX", 3)
    monkeypatch.setattr(inbox, "PEERS_MAX", 4)
    async with zbus.open(log_path, transport="fake://", keep=["shop/**"]) as bus:
        network: Any = node_of(bus).network

        def stored() -> set[str]:
            network._store({})
            return {name for name in network._log.positions.load() if name.startswith("from/")}

        for origin in (2, 4, 6):
            receive(fabric, event(origin, 0, offset=1, origin=origin))
            receive(fabric, encode_beacon(Beacon(origin, 0, 1, {"shop/orders": (1, origin, 0)})))
        await until(lambda: len(network.inbox._peers) == 3 and not network.inbox._storing)
        assert await node_of(bus).run(stored) == set()

        for origin in (3, 5, 7):
            network.inbox.covered(origin, NO_BRANCH, 1)
        assert await node_of(bus).run(stored) == {"from/3/0", "from/5/0", "from/7/0"}
        network.inbox.covered(3, NO_BRANCH, 2)
        network.inbox.covered(9, NO_BRANCH, 1)
        assert await node_of(bus).run(stored) == {"from/3/0", "from/7/0", "from/9/0"}

        receive(fabric, *[event(origin, 0, offset=1, origin=origin) for origin in (8, 10)])
        await until(lambda: bus.stats().get("peers_evicted") == 1)


async def test_a_node_that_sends_new_keys_and_no_beacons_costs_bounded_memory(
    fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "KEYS_MAX", 10)
    async with zbus.open(transport="fake://") as bus, bus.subscribe("shop/**") as subscription:
        for number in range(25):
            receive(fabric, event(7, number, f"shop/{number}", offset=number + 1, origin=8))
        receive(fabric, event(7, 25, "shop/0", offset=26, origin=8, previous=1))  # it was forgotten
        async with asyncio.timeout(10):
            assert [(await anext(subscription)).sequence for _ in range(26)] == list(range(26))

        network: Any = node_of(bus).network
        assert len(network.inbox._peers[8, 0]._last) <= 10
        assert bus.stats()["peer_keys_evicted"] >= 10
        assert not bus.stats().get("gaps")
