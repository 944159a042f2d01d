"""Sequence marks from beacons are kept in the log: the end of a publisher is known although its events are missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from inside import node_of
from mesh_fakes import FakeRuntime
from mesh_lossy import Buses, Losses, buses_on, eventually, wanted
from mesh_support import WIRES, Node, ZenohPeers

import zbus
from zbus.mesh.interest import Interest
from zbus.mesh.origins import sequence_marks as received
from zbus.mesh.origins.sequence_marks import BEACON_NS, SequenceMarks
from zbus.wire.beacon import Beacon, decode_beacon

KEY = "shop/orders"


@pytest.fixture
async def buses(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Buses]:
    monkeypatch.setattr(received, "BEACON_NS", 0)  # nothing was published before these recorders were there
    async with buses_on(getattr(request, "param", ZenohPeers), tmp_path, monkeypatch) as found:
        yield found


def positions_of(bus: zbus.Bus) -> dict[int, int]:
    assert node_of(bus).log is not None
    stored = node_of(bus).log.positions.load()
    return {int(name[6:], 16): number for name, number in stored.items() if name.startswith("heard/")}


async def recorded(bus: zbus.Bus) -> dict[int, int]:
    """Of each publisher, the last sequence in the log."""
    return {event.publisher_id: event.sequence async for event in bus.replay()}


@pytest.mark.parametrize("buses", WIRES, ids=[each.name for each in WIRES], indirect=True)
async def test_a_last_event_that_never_came_is_reported_because_of_beacons_of_its_publisher(
    buses: Buses, tmp_path: Path
) -> None:
    losses = Losses()
    sink = await buses.open("sink", losses=losses, keep=["shop/**"])
    losses.of_events = lambda sequences: 9 in sequences
    node = Node(tmp_path, "publisher", buses.wire)
    try:
        await asyncio.to_thread(node.start)

        def kill_it_once_it_announced(frame: bytes) -> bool:
            if any(sequence == 9 for _, _, sequence in decode_beacon(frame).newest.values()):
                node.kill()  # before this beacon arrives: no node has the missing events
            return False

        losses.of_beacons = kill_it_once_it_announced
        publisher_id = await asyncio.to_thread(node.call, "publish", KEY, 9)
        await eventually(lambda: losses.events_passed == 9)
        # And nothing is under way that could bring the tenth by another way.
        peers = node_of(sink).network.inbox._peers  # type: ignore[union-attr]
        await eventually(lambda: all((each._covered or 0) >= 9 and not each._repairing for each in peers.values()))
        await asyncio.to_thread(node.begin, "publish", KEY, 1)

        await eventually(lambda: positions_of(sink) == {publisher_id: 10}, reported=lambda: positions_of(sink))
        assert await recorded(sink) == {publisher_id: 8}
    finally:
        node.stop()


async def test_only_publishers_of_keys_that_are_recorded_are_kept_and_only_what_changed(buses: Buses) -> None:
    a, sink = await buses.open("a"), await buses.open("sink", keep=["shop/**"])
    assert node_of(a).network is not None
    assert node_of(sink).log is not None
    writes: list[dict[str, int]] = []
    store = node_of(sink).log.positions.store
    orders, audit = await a.publisher(KEY), await a.publisher("audit/x")
    async with sink.subscribe("**"):  # received, but not stored
        await wanted(a, KEY)
        node_of(sink).log.positions.store = lambda changed: (writes.append(dict(changed)), store(changed))[1]  # type: ignore[method-assign]
        await orders.publish_many([b""] * 5)
        await audit.publish_many([b""] * 5)

        await eventually(lambda: positions_of(sink) == {orders.publisher_id: 5})
        before = len(writes)
        await audit.publish(b"")
        await eventually(lambda: len(writes) > before)
        await orders.publish(b"")
        await eventually(lambda: positions_of(sink) == {orders.publisher_id: 6})
    reported = [number for changed in writes for name, number in changed.items() if name.startswith("heard/")]
    assert reported == [5, 6]


async def test_marks_from_beacons_outlive_the_process_and_never_go_back(buses: Buses) -> None:
    a, sink = await buses.open("a"), await buses.open("sink", keep=["shop/**"])
    publisher = await a.publisher(KEY)
    await publisher.publish_many([b""] * 5)
    await eventually(lambda: positions_of(sink) == {publisher.publisher_id: 5})
    await sink.aclose()

    again = await buses.open("sink", keep=["shop/**"])
    assert node_of(again).network is not None
    node_of(again).network.inbox.sequence_marks.note_beacon(
        Beacon(3, 0, 9, {KEY: (9, publisher.publisher_id, 2)}), node_of(again).network.interest
    )
    assert node_of(again).network.inbox.sequence_marks.take() == {}
    await publisher.publish(b"")
    await eventually(lambda: positions_of(again) == {publisher.publisher_id: 6})


@pytest.mark.parametrize(
    ("recorded_for_ns", "expected"), [(0, {}), (2 * BEACON_NS, {7: 4})], ids=["just-now", "before"]
)
def test_what_was_sent_before_it_was_recorded_is_not_reported(recorded_for_ns: int, expected: dict[int, int]) -> None:
    runtime, interest = FakeRuntime(), Interest()
    found = SequenceMarks(runtime)
    interest.add(["shop/**"], runtime.time_ns() - recorded_for_ns, store=True)

    found.note_beacon(Beacon(3, 0, 9, {KEY: (9, 7, 3), "audit/x": (8, 8, 3)}), interest)

    assert found.take() == expected


def test_publishers_announced_longest_ago_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received, "PUBLISHERS_MAX", 3)
    found = SequenceMarks(FakeRuntime())
    for publisher_id in (1, 2, 3, 1, 4):
        found.remember(publisher_id, 5)
    assert found.take() == {1: 5, 2: 0, 3: 5, 4: 5}  # 2 is not stored any more

    for publisher_id in (1, 3, 4):
        found.remember(publisher_id, 5)
    assert found.take() == {}
    found.remember(2, 5)  # forgotten, so it is new again
    assert found.take() == {2: 5, 1: 0}
