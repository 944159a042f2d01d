"""What is lost on the way is noticed, and got from the publisher's log before anything later is delivered.

Frames are lost on purpose between the fabric and the inbox. What nobody can bring back is reported as a gap.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from inside import node_of
from mesh_lossy import Buses, Losses, buses_on, eventually, nothing_more, take, wanted
from mesh_support import WIRES, Nats, ZenohPeers, Zmq

import zbus
from zbus.mesh import peer as peers

KEY = "shop/orders"


@pytest.fixture
async def buses(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Buses]:
    async with buses_on(getattr(request, "param", ZenohPeers), tmp_path, monkeypatch) as found:
        yield found


on_every_wire = pytest.mark.parametrize("buses", WIRES, ids=[each.name for each in WIRES], indirect=True)


async def publish_one_by_one(publisher: zbus.EventPublisher, count: int, losses: Losses | None = None) -> None:
    """Each in a frame of its own: the next is published when the one before arrived, or the send queue had a moment."""
    for number in range(count):
        arrived = losses.events_lost + losses.events_passed if losses is not None else 0
        await publisher.publish(b"%d" % number)
        if losses is None:
            await asyncio.sleep(0.002)
        else:
            await eventually(lambda losses=losses, arrived=arrived: losses.events_lost + losses.events_passed > arrived)


def stats_of(bus: zbus.Bus) -> dict[str, int]:
    names = ("gaps", "gaps_repaired", "gaps_unrepaired", "events_repaired")
    return {name: bus.stats().get(name, 0) for name in names}


@pytest.mark.parametrize(
    ("buses", "kept"),
    [(ZenohPeers, True), (ZenohPeers, False), (Nats, True), (Zmq, False)],
    ids=["zenoh-with-own-log", "zenoh-without", "nats-with-own-log", "zmq-without"],
    indirect=["buses"],
)
async def test_an_event_lost_in_the_middle_is_repaired_before_later_ones_are_delivered(
    buses: Buses, kept: bool
) -> None:
    losses = Losses()
    a, b = await buses.open("a"), await buses.open("b", log=kept, losses=losses)
    losses.of_events = lambda sequences: 5 in sequences or 12 in sequences
    async with b.subscribe(KEY, overflow="spill" if kept else None) as subscription:
        await wanted(a, KEY)
        publisher = await a.publisher(KEY)
        await publish_one_by_one(publisher, 20, losses)

        events = await take(subscription, 20)

        assert [event.sequence for event in events] == list(range(20))
        await nothing_more(subscription)
    assert losses.events_lost >= 2
    stats = stats_of(b)
    assert stats["gaps"] == stats["gaps_repaired"] >= 1
    assert stats["gaps_unrepaired"] == 0
    assert stats["events_repaired"] >= losses.events_lost


@on_every_wire
async def test_the_last_event_lost_is_noticed_by_the_beacon(buses: Buses) -> None:
    losses = Losses()
    a, b = await buses.open("a"), await buses.open("b", log=False, losses=losses)
    losses.of_events = lambda sequences: 9 in sequences
    async with b.subscribe(KEY) as subscription:
        await wanted(a, KEY)
        await publish_one_by_one(await a.publisher(KEY), 10, losses)

        events = await take(subscription, 10, 5)

        assert [event.sequence for event in events] == list(range(10))
        await nothing_more(subscription)
    repaired = {"gaps": 1, "gaps_repaired": 1, "gaps_unrepaired": 0, "events_repaired": losses.events_lost}
    await eventually(lambda: stats_of(b) == repaired, 3, lambda: stats_of(b))


async def test_the_only_event_of_a_key_lost_together_with_its_beacon_is_noticed_by_the_next(buses: Buses) -> None:
    losses = Losses()
    a, b = await buses.open("a"), await buses.open("b", log=False, losses=losses)
    async with b.subscribe("shop/**") as subscription:
        await wanted(a, KEY)
        await (await a.publisher("shop/known")).publish(b"")
        assert await take(subscription, 1)
        losses.of_events = lambda sequences: True
        losses.of_beacons = lambda frame: True
        await (await a.publisher("shop/rare/key")).publish(b"once")
        await eventually(lambda: losses.events_lost and losses.beacons_lost)
        losses.of_events = losses.of_beacons = lambda _: False

        events = await take(subscription, 1, 5)

        assert [event.payload for event in events] == [b"once"]


async def test_a_burst_lost_with_all_its_beacons_is_repaired_in_order(buses: Buses) -> None:
    losses = Losses()
    a, b = await buses.open("a"), await buses.open("b", losses=losses)
    async with b.subscribe("shop/**", overflow="spill") as subscription:
        await wanted(a, KEY)
        publisher, other = await a.publisher(KEY), await a.publisher("shop/audit")
        await publisher.publish_many([b""] * 10)
        assert len(await take(subscription, 10)) == 10
        losses.of_events = losses.of_beacons = lambda _: True
        await publisher.publish_many([b""] * 6_000)
        await other.publish_many([b""] * 10)
        await eventually(lambda: losses.events_lost == 6_010)
        losses.of_events = losses.of_beacons = lambda _: False
        await publisher.publish_many([b""] * 10)

        events = await take(subscription, 6_020)

        assert [each.sequence for each in events if each.publisher_id == publisher.publisher_id] == list(
            range(10, 6020)
        )
        assert [each.sequence for each in events if each.publisher_id == other.publisher_id] == list(range(10))
        await nothing_more(subscription)
    assert stats_of(b) | {"gaps": 1, "gaps_repaired": 1} == {
        "gaps": 1,
        "gaps_repaired": 1,
        "gaps_unrepaired": 0,
        "events_repaired": stats_of(b)["events_repaired"],
    }
    assert stats_of(b)["events_repaired"] >= 6_010


@pytest.mark.parametrize("every", [2, 5])
async def test_losses_all_the_time_change_nothing_that_a_reader_sees(buses: Buses, every: int) -> None:
    losses = Losses()
    a, b = await buses.open("a"), await buses.open("b", losses=losses)
    frames = iter(range(1_000_000))
    losses.of_events = lambda sequences: next(frames) % every == 0
    async with b.subscribe("shop/**", overflow="spill") as subscription:
        await wanted(a, KEY)
        publishers = [await a.publisher(f"shop/{n}") for n in range(5)]
        for number in range(150):
            await publishers[number % 5].publish(b"")
            await asyncio.sleep(0.002)

        events = await take(subscription, 150)

        for publisher in publishers:
            came = [event.sequence for event in events if event.publisher_id == publisher.publisher_id]
            assert came == list(range(30))
        await nothing_more(subscription)
    assert losses.events_lost > 10
    assert stats_of(b)["gaps_unrepaired"] == 0
    assert stats_of(b)["gaps"] == stats_of(b)["gaps_repaired"] > 0


async def test_a_publisher_without_a_log_has_its_gaps_reported(buses: Buses, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "zbus")
    losses = Losses()
    a, b = await buses.open("a", log=False), await buses.open("b", log=False, losses=losses)
    losses.of_events = lambda sequences: bool({5, 6} & set(sequences))
    async with b.subscribe(KEY) as subscription, b.subscribe("@zbus/gap") as gaps:
        await wanted(a, KEY)
        publisher = await a.publisher(KEY)
        await publish_one_by_one(publisher, 10, losses)

        events = await take(subscription, 8)

        assert [event.sequence for event in events] == [0, 1, 2, 3, 4, 7, 8, 9]
        (gap,) = await take(gaps, 1, 5)
        reported = gap.decode(dict)
        assert (reported["publisher_id"], reported["first"], reported["last"]) == (publisher.publisher_id, 5, 6)
        await nothing_more(gaps)
    assert stats_of(b) == {"gaps": 1, "gaps_repaired": 0, "gaps_unrepaired": 1, "events_repaired": 0}
    records = [each.zbus for each in caplog.records if getattr(each, "zbus", {}).get("record") == "EVENT_GAP"]
    assert [(each["publisher_id"], each["first"], each["last"]) for each in records] == [(publisher.publisher_id, 5, 6)]


async def test_several_gaps_in_one_burst_without_a_log_are_each_reported(buses: Buses) -> None:
    losses = Losses()
    a, b = await buses.open("a", log=False), await buses.open("b", log=False, losses=losses)
    losses.of_events = lambda sequences: bool({3, 5, 7} & set(sequences))
    async with b.subscribe(KEY) as subscription, b.subscribe("@zbus/gap") as gaps:
        await wanted(a, KEY)
        publisher = await a.publisher(KEY)
        losses.hold()
        for number in range(10):
            await publisher.publish(b"%d" % number)
            await eventually(lambda number=number: losses.events_lost + losses.events_passed > number)
        losses.let_go()

        events = await take(subscription, 7)

        assert [event.sequence for event in events] == [0, 1, 2, 4, 6, 8, 9]
        reported = [gap.decode(dict) for gap in await take(gaps, 3, 3)]
        assert [(each["first"], each["last"]) for each in reported] == [(3, 3), (5, 5), (7, 7)]
    assert stats_of(b)["gaps"] == stats_of(b)["gaps_unrepaired"] == 3


async def test_the_last_event_lost_of_a_publisher_without_a_log_is_reported(buses: Buses) -> None:
    losses = Losses()
    a, b = await buses.open("a", log=False), await buses.open("b", log=False, losses=losses)
    losses.of_events = lambda sequences: 9 in sequences
    async with b.subscribe(KEY) as subscription, b.subscribe("@zbus/gap") as gaps:
        await wanted(a, KEY)
        publisher = await a.publisher(KEY)
        await publish_one_by_one(publisher, 10, losses)

        assert [event.sequence for event in await take(subscription, 9)] == list(range(9))
        (gap,) = await take(gaps, 1, 5)
        reported = gap.decode(dict)
        assert (reported["publisher_id"], reported["first"], reported["last"]) == (publisher.publisher_id, 9, 9)
        await nothing_more(gaps)
    assert stats_of(b) == {"gaps": 1, "gaps_repaired": 0, "gaps_unrepaired": 1, "events_repaired": 0}


async def test_a_reader_that_comes_late_to_a_publisher_without_a_log_gets_no_gap(buses: Buses) -> None:
    a, b = await buses.open("a", log=False), await buses.open("b", log=False)
    async with b.subscribe("other") as other:
        await wanted(a, "other")
        publisher, filler = await a.publisher(KEY), await a.publisher("other")
        await publish_one_by_one(publisher, 20)
        await filler.publish(b"")
        assert await take(other, 1)
        async with b.subscribe(KEY) as subscription, b.subscribe("@zbus/gap") as gaps:
            await wanted(a, KEY)
            await publish_one_by_one(publisher, 10)
            assert [event.sequence for event in await take(subscription, 10)] == list(range(20, 30))
            await nothing_more(gaps, 0.7)
    assert stats_of(b)["gaps"] == 0


async def test_what_retention_removed_at_the_publisher_is_reported_as_a_gap(buses: Buses) -> None:
    losses = Losses()
    a = await buses.open("a", retain_events=1_000)
    b = await buses.open("b", losses=losses)
    async with b.subscribe(KEY, overflow="spill") as subscription, b.subscribe("@zbus/gap") as gaps:
        await wanted(a, KEY)
        publisher = await a.publisher(KEY)
        await publisher.publish_many([b""] * 10)
        assert len(await take(subscription, 10)) == 10
        losses.of_events = losses.of_beacons = lambda _: True
        assert node_of(a).log is not None
        while await node_of(a).run(node_of(a).log.low_water) < 5_000:
            await publisher.publish_many([b""] * 2_000)
        losses.of_events = losses.of_beacons = lambda _: False
        await publisher.publish(b"now")

        came = [await anext(subscription)]
        async with asyncio.timeout(10):
            while came[-1].payload != b"now":
                came.append(await anext(subscription))
        reported = [gap.decode(dict) for gap in await take(gaps, 10, 0.3)]  # retention may go on between two pages
    assert {each["publisher_id"] for each in reported} == {publisher.publisher_id}
    missing = [number for each in reported for number in range(each["first"], each["last"] + 1)]
    seen = [event.sequence for event in came]
    assert seen == sorted(set(seen)), "out of order, or twice"
    assert sorted(seen + missing) == list(range(10, publisher.sequence)), "neither seen nor reported, or both"
    assert len(missing) >= 4_000
    assert stats_of(b)["gaps_unrepaired"] == len(reported)
    assert stats_of(b)["events_repaired"] >= 1


async def lose_one_for_good(a: zbus.Bus, losses: Losses, publisher: zbus.EventPublisher, sequence: int) -> None:
    """The next four are published, one of them is lost, and its node goes away before its log can be asked."""
    assert node_of(a).network is not None
    await node_of(a).run(
        node_of(a).network.links[0].fabric.serve, [], lambda request: None
    )  # alive, but its log cannot be asked
    losses.of_events = lambda sequences: sequence in sequences
    await publish_one_by_one(publisher, 4, losses)
    await a.aclose()


def gaps_reported(caplog: pytest.LogCaptureFixture) -> list[tuple[int, int, int]]:
    found = [each.zbus for each in caplog.records if getattr(each, "zbus", {}).get("record") == "EVENT_GAP"]
    return [(each["publisher_id"], each["first"], each["last"]) for each in found]


@pytest.mark.parametrize("beside", [None, "other/**"], ids=["plain", "plain-beside-durable"])
async def test_a_publisher_that_is_gone_for_good_has_its_gap_reported_after_a_while(
    buses: Buses, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, beside: str | None
) -> None:
    monkeypatch.setattr(peers, "GIVE_UP_S", 1.0)
    losses = Losses()
    a, b = await buses.open("a"), await buses.open("b", log=beside is not None, losses=losses)
    if beside is not None:
        async with b.subscribe(beside, durable="d"):
            pass  # from now on this node records
    async with b.subscribe(KEY) as subscription, b.subscribe("@zbus/gap") as gaps:
        await wanted(a, KEY)
        publisher = await a.publisher(KEY)
        await publish_one_by_one(publisher, 5, losses)
        assert len(await take(subscription, 5)) == 5
        await lose_one_for_good(a, losses, publisher, 6)

        assert [event.sequence for event in await take(subscription, 3, 10)] == [5, 7, 8]
        (gap,) = await take(gaps, 1, 5)
        reported = gap.decode(dict)
        assert (reported["publisher_id"], reported["first"], reported["last"]) == (publisher.publisher_id, 6, 6)
        assert not reported["open"]
        await nothing_more(gaps, 1.5)
    assert stats_of(b) == {"gaps": 1, "gaps_repaired": 0, "gaps_unrepaired": 1, "events_repaired": 0}
    assert not b.stats().get("gaps_open")
    assert gaps_reported(caplog) == [(publisher.publisher_id, 6, 6)]


@pytest.mark.parametrize("options", [{"durable": "d"}, {"overflow": "spill"}], ids=["durable", "spill"])
async def test_a_gap_in_what_is_recorded_is_open_until_its_publisher_is_back(
    buses: Buses, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(peers, "GIVE_UP_S", 0.5)
    losses = Losses()
    a, b = await buses.open("a"), await buses.open("b", losses=losses)
    async with b.subscribe(KEY, **options) as subscription, b.subscribe("@zbus/gap") as gaps:
        await wanted(a, KEY)
        publisher = await a.publisher(KEY)
        await publish_one_by_one(publisher, 5, losses)
        assert len(await take(subscription, 5)) == 5
        await lose_one_for_good(a, losses, publisher, 6)

        assert [event.sequence for event in await take(subscription, 1, 10)] == [5]
        (gap,) = await take(gaps, 1, 10)
        reported = gap.decode(dict)
        assert (reported["publisher_id"], reported["first"], reported["last"]) == (publisher.publisher_id, 6, 6)
        assert reported["open"]
        await nothing_more(gaps, 1.5)  # it is requested again and again, and reported once
        await nothing_more(subscription, 0.1)
        assert b.stats()["gaps_open"] == 1
        assert gaps_reported(caplog) == [(publisher.publisher_id, 6, 6)]
        losses.of_events = lambda sequences: False
        again = await buses.open("a")

        assert [event.sequence for event in await take(subscription, 3, 10)] == [6, 7, 8]
        assert node_of(again).is_open
        await eventually(lambda: b.stats()["gaps_open"] == 0 < stats_of(b)["gaps"], 10, lambda: stats_of(b))
        # A slow machine may have repaired an event before, whose frame came after its beacon.
        assert b.stats()["gaps"] == b.stats()["gaps_repaired"] >= 1
        assert b.stats().get("gaps_unrepaired", 0) == 0
        await nothing_more(gaps)


@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "spill"])
async def test_the_last_event_lost_of_a_publisher_that_is_gone_for_good_is_reported(
    buses: Buses, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    monkeypatch.setattr(peers, "GIVE_UP_S", 1.0)
    losses = Losses()
    a, b = await buses.open("a"), await buses.open("b", log=recorded, losses=losses)
    async with (
        b.subscribe(KEY, overflow="spill" if recorded else None) as subscription,
        b.subscribe("@zbus/gap") as gaps,
    ):
        await wanted(a, KEY)
        publisher = await a.publisher(KEY)
        await publish_one_by_one(publisher, 5, losses)
        assert len(await take(subscription, 5)) == 5
        await lose_one_for_good(a, losses, publisher, 8)

        assert [event.sequence for event in await take(subscription, 3, 10)] == [5, 6, 7]
        (gap,) = await take(gaps, 1, 10)
        reported = gap.decode(dict)
        assert (reported["publisher_id"], reported["first"], reported["last"]) == (publisher.publisher_id, 8, 8)
        assert reported["open"] is recorded
        await nothing_more(gaps, 1.5)
    assert (b.stats().get("gaps_open", 0), stats_of(b)["gaps_unrepaired"]) == ((1, 0) if recorded else (0, 1))


async def test_while_a_recorded_key_waits_at_its_gap_all_other_keys_go_on(
    buses: Buses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher is there all the time, but its log cannot be asked; then it can."""
    monkeypatch.setattr(peers, "GIVE_UP_S", 0.5)
    losses = Losses()
    a, b = await buses.open("a"), await buses.open("b", losses=losses)
    async with (
        b.subscribe("shop/kept", overflow="spill") as kept,
        b.subscribe("shop/whole", overflow="spill") as whole,
        b.subscribe("shop/read") as read,
        b.subscribe("@zbus/gap") as gaps,
    ):
        await wanted(a, "shop/kept")
        await wanted(a, "shop/read")
        keeper, reader = await a.publisher("shop/kept"), await a.publisher("shop/read")
        await publish_one_by_one(keeper, 3, losses)
        await publish_one_by_one(reader, 3, losses)
        assert (len(await take(kept, 3)), len(await take(read, 3))) == (3, 3)
        assert node_of(a).network is not None
        link = node_of(a).network.links[0]
        await node_of(a).run(link.fabric.serve, [], lambda request: None)
        losses.of_events = lambda sequences: 3 in sequences
        unbroken = await a.publisher("shop/whole")
        await publish_one_by_one(keeper, 3, losses)
        await publish_one_by_one(unbroken, 2, losses)
        await publish_one_by_one(reader, 3, losses)
        assert [event.sequence for event in await take(read, 2, 10)] == [4, 5]
        assert [event.sequence for event in await take(whole, 2, 10)] == [0, 1]
        reported = [gap.decode(dict) for gap in await take(gaps, 2, 10)]
        assert {(each["publisher_id"], each["first"], each["last"], each["open"]) for each in reported} == {
            (reader.publisher_id, 3, 3, False),
            (keeper.publisher_id, 3, 3, True),
        }
        monkeypatch.setattr(peers.Peer, "_give_up", lambda self: None)  # what follows does not need it
        losses.of_events = lambda sequences: False
        for _ in range(10):
            await publish_one_by_one(keeper, 1, losses)
            await publish_one_by_one(unbroken, 1, losses)
            await publish_one_by_one(reader, 2, losses)
        assert [event.sequence for event in await take(read, 20, 10)] == list(range(6, 26))
        assert [event.sequence for event in await take(whole, 10, 10)] == list(range(2, 12))
        await nothing_more(kept, 0.1)

        await node_of(a).run(
            node_of(a).network._listen_on,
            link,
            node_of(a).network.interest.expressions,
            node_of(a).network.request_server.keys,
        )

        assert [event.sequence for event in await take(kept, 13, 10)] == list(range(3, 16))
        await eventually(lambda: b.stats()["gaps_open"] == 0)
        await publish_one_by_one(reader, 3, losses)
        assert [event.sequence for event in await take(read, 3, 10)] == [26, 27, 28]
        await nothing_more(gaps)
        for each in (read, whole, kept):
            await nothing_more(each, 0.1)


@pytest.mark.parametrize("options", [{}, {"overflow": "spill"}], ids=["plain", "spill"])
async def test_if_retention_removed_everything_it_is_reported_at_the_next_event(
    buses: Buses, options: dict[str, Any]
) -> None:
    losses = Losses()
    a = await buses.open("a", retain_events=1_000)
    b = await buses.open("b", losses=losses)
    async with b.subscribe(KEY, **options) as subscription, b.subscribe("@zbus/gap") as gaps:
        await wanted(a, KEY)
        publisher, filler = await a.publisher(KEY), await a.publisher("unwanted")
        await publisher.publish_many([b""] * 10)
        assert len(await take(subscription, 10)) == 10
        losses.of_events = losses.of_beacons = lambda _: True
        await publisher.publish_many([b""] * 10)
        assert node_of(a).log is not None
        while await node_of(a).run(node_of(a).log.low_water) < 5_000:
            await filler.publish_many([b""] * 2_000)
        losses.of_events = losses.of_beacons = lambda _: False
        await eventually(lambda: stats_of(b)["gaps_unrepaired"] == 1)  # by a beacon; nothing is left to tell it by
        await nothing_more(gaps, 0.1)

        await publisher.publish(b"now")

        assert [event.sequence for event in await take(subscription, 1)] == [20]
        (gap,) = await take(gaps, 1)
        reported = gap.decode(dict)
        assert (reported["publisher_id"], reported["first"], reported["last"]) == (publisher.publisher_id, 10, 19)
        await publisher.publish_many([b"and on"] * 3)
        assert [event.sequence for event in await take(subscription, 3)] == [21, 22, 23]
        await nothing_more(gaps, 0.2)
    assert stats_of(b)["gaps"] == stats_of(b)["gaps_unrepaired"] == 1, "counted twice"


async def test_a_publisher_that_went_away_before_the_repair_has_its_gap_repaired_when_it_is_back(
    buses: Buses,
) -> None:
    losses = Losses()
    a, b = await buses.open("a"), await buses.open("b", losses=losses)
    async with b.subscribe(KEY, overflow="spill") as subscription:
        await wanted(a, KEY)
        publisher = await a.publisher(KEY)
        await publish_one_by_one(publisher, 5, losses)
        assert len(await take(subscription, 5)) == 5
        losses.of_events = losses.of_beacons = lambda _: True
        await publish_one_by_one(publisher, 5, losses)
        await a.aclose()
        losses.of_events = losses.of_beacons = lambda _: False
        again = await buses.open("a")

        events = await take(subscription, 5, 10)

        assert [event.sequence for event in events] == [5, 6, 7, 8, 9]
        assert node_of(again).is_open
    repaired = {"gaps": 1, "gaps_repaired": 1, "gaps_unrepaired": 0, "events_repaired": 5}
    await eventually(lambda: stats_of(b) == repaired, 3, lambda: stats_of(b))
