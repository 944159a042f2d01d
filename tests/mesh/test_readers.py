"""Retention of a publisher waits for the durable subscriptions of other nodes, for a time, and reports it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from inside import node_of
from mesh_fakes import FakeRuntime, MeshHost, recorded
from mesh_lossy import Buses, buses_on, eventually, wanted
from mesh_support import ZenohPeers

import zbus
from zbus.keys import KeySet
from zbus.mesh import network
from zbus.mesh.origins import claims
from zbus.mesh.origins.known_logs import KnownLogs
from zbus.mesh.origins.reader_reports import ReaderReports
from zbus.mesh.origins.readers import Readers
from zbus_log import Rules, SqliteLog

KEY = "shop/orders"
KEPT = 200  # events


@pytest.fixture
async def buses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Buses]:
    monkeypatch.setattr(network, "REPORT_S", 0.1)
    monkeypatch.setattr(network, "STORE_S", 0.1)
    monkeypatch.setattr(claims, "CONFIRM_S", (0.05, 0.2))
    async with buses_on(ZenohPeers, tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def records() -> Iterator[list[dict[str, Any]]]:
    with recorded(logging.WARNING) as found:
        yield found


def passed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in records if each["record"] == "RETENTION_PASSED_NODE"]


def reader_of(bus: zbus.Bus, other: int) -> int | None:
    """Return how far another node has stored the events of a node, as that node knows it."""
    return node_of(bus).network._reports.readers.names().get(f"reader/{other:x}")


def log_of(bus: zbus.Bus) -> SqliteLog:
    log = node_of(bus).log
    assert isinstance(log, SqliteLog)
    return log


async def low_water(bus: zbus.Bus) -> int:
    return await node_of(bus).run(log_of(bus).low_water)


async def publish(bus: zbus.Bus, events: int) -> None:
    await (await bus.publisher(KEY)).publish_many([b"%d" % number for number in range(events)])


async def away(buses: Buses, **of_a: Any) -> tuple[zbus.Bus, int]:
    """Return a publisher that knows how far another node is, and the id of that node, which is closed now."""
    a = await buses.open("a", retain_events=KEPT, **of_a)
    b = await buses.open("b", keep=["shop/**"])
    await wanted(a, KEY)
    await publish(a, 10)
    other = node_of(b).network.origin
    await eventually(lambda: reader_of(a, other) == 10)
    await b.aclose()
    return a, other


def readers_at(offset: int) -> Readers:
    """Return the readers of a log from which nothing was removed: one, which has stored everything up to an offset."""
    readers = Readers(retain_s=60.0)
    readers.reported(7, offset, 0)
    assert readers.take_passed(0) == []
    return readers


def reloaded(readers: Readers) -> Readers:
    found = Readers(retain_s=60.0)
    for name, value in readers.names().items():
        assert found.load(name, value)
    return found


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(("low_water", "removed_until"), [(90, 0), (0, 90), (30, 90)])
def test_a_reader_that_removal_passed_is_reported_once_until_it_has_everything(
    low_water: int, removed_until: int, restarted: bool
) -> None:
    readers = readers_at(20)
    if restarted:
        readers = reloaded(readers)
    assert [each.offset for each in readers.take_passed(low_water, removed_until)] == [20]
    if restarted:
        readers = reloaded(readers)

    readers.reported(7, 20, 1)  # it comes back
    assert readers.take_passed(low_water + 5, removed_until + 5) == []
    readers.reported(7, 200, 2)
    assert readers.take_passed(low_water + 5, removed_until + 5) == []
    assert [each.offset for each in readers.take_passed(0, 201)] == [200]


def test_what_was_removed_from_the_middle_before_a_reader_came_is_not_reported() -> None:
    readers = Readers(retain_s=60.0)
    readers.reported(7, 20, 0)  # it receives the history
    assert readers.take_passed(0, 90) == []
    assert readers.take_passed(0, 90) == []
    assert len(readers.take_passed(0, 91)) == 1


def test_times_of_readers_that_a_wrong_clock_set_into_the_future_end() -> None:
    readers = Readers(retain_s=60.0)
    readers.reported(7, 20, 365 * 86_400 * 10**9)
    readers.limit_seen(1000)

    assert readers.lowest(now_ns=1000) is not None
    assert readers.lowest(now_ns=1000 + 61 * 10**9) is None


async def test_a_clock_that_jumps_does_not_end_the_wait_for_a_node(buses: Buses) -> None:
    a, other = await away(buses)
    runtime = node_of(a).network._runtime
    ahead = runtime.time_ns() + 365 * 86_400 * 10**9
    runtime.time_ns = lambda: ahead
    await asyncio.sleep(0.3)

    assert log_of(a)._pruner.reader == (f"node {other:x}", 10)


@pytest.mark.parametrize("how", ["by key", "purge"])
async def test_a_node_that_misses_events_removed_from_the_middle_is_reported_once(
    buses: Buses, records: list[dict[str, Any]], how: str
) -> None:
    a, other = await away(buses, retain_remote_s=0.0)
    await (await a.publisher("tele/cpu")).publish(b"stays")
    await publish(a, KEPT // 4)
    assert passed(records) == []
    if how == "purge":
        await node_of(a).run(log_of(a).purge, KeySet(["shop/**"]))
    else:
        await asyncio.sleep(0.1)
        await node_of(a).run(log_of(a).prune, Rules(keys=(("shop/**", 0.01),)))

    await eventually(lambda: bool(passed(records)))
    (found,) = passed(records)
    assert (found["origin"], found["offset"], found["until"]) == (f"{other:x}", 10, 11 + KEPT // 4)
    assert a.stats()["readers_passed"] == 1
    await buses.open("b", keep=["shop/**"])
    await eventually(lambda: reader_of(a, other) == 11 + KEPT // 4)
    await asyncio.sleep(0.3)
    assert len(passed(records)) == 1


async def test_retention_waits_for_a_node_that_is_not_connected(buses: Buses, records: list[dict[str, Any]]) -> None:
    a, other = await away(buses)
    await publish(a, 5 * KEPT)
    pruned = await node_of(a).run(log_of(a).prune, Rules(max_events=KEPT))
    assert pruned.held_by == f"node {other:x}"
    assert await low_water(a) == 10

    b = await buses.open("b", keep=["shop/**"])

    await eventually(lambda: node_of(b).network.head == 10 + 5 * KEPT)
    await eventually(lambda: node_of(a).network._reports.readers.lowest(0).offset == 10 + 5 * KEPT)  # type: ignore[union-attr]
    await publish(a, KEPT)  # now that it has everything, retention continues
    async with asyncio.timeout(20):
        while await low_water(a) <= 10:
            await publish(a, 64)
    assert passed(records) == []


async def test_how_far_other_nodes_are_survives_a_restart(buses: Buses) -> None:
    a, other = await away(buses)
    await eventually(lambda: f"reader/{other:x}" in node_of(a).network._stored)
    await a.aclose()

    a = await buses.open("a", retain_events=KEPT)

    await publish(a, 5 * KEPT)
    await eventually(lambda: log_of(a)._pruner.reader == (f"node {other:x}", 10))
    await node_of(a).run(log_of(a).prune, Rules(max_events=KEPT))
    assert await low_water(a) == 10


async def test_a_node_that_was_away_for_too_long_is_passed_and_reported_once(
    buses: Buses, records: list[dict[str, Any]]
) -> None:
    a, other = await away(buses, retain_remote_s=0.0)

    await publish(a, 5 * KEPT)

    await eventually(lambda: bool(passed(records)))
    assert await low_water(a) > 10
    assert a.stats()["readers_passed"] == 1
    (found,) = passed(records)
    assert (found["origin"], found["offset"], found["code"]) == (f"{other:x}", 10, "reader_passed")
    await publish(a, KEPT)
    await buses.open("b", keep=["shop/**"])  # it reports its old position when it comes back
    await eventually(lambda: (reader_of(a, other) or 0) > 10)
    await asyncio.sleep(0.3)
    assert len(passed(records)) == 1
    assert a.stats()["readers_passed"] == 1


@pytest.mark.parametrize("killed", [False, True])
async def test_the_gap_that_retention_made_begins_after_the_events_that_a_node_received_before_it_was_closed(
    buses: Buses, killed: bool, records: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await buses.open("a", retain_remote_s=0.0)
    b = await buses.open("b", keep=["shop/**"])
    await wanted(a, KEY)
    orders, others = await a.publisher(KEY), await a.publisher("shop/others")
    for publisher in (orders, others):
        await publisher.publish_many([b"%d" % number for number in range(10)])
    other = node_of(b).network.origin
    await eventually(lambda: reader_of(a, other) == 20)
    if killed:  # what is stored at the close is missing
        monkeypatch.setattr(node_of(b).network.inbox.received_sequences, "names", dict)
    await b.aclose()
    await orders.publish_many([b"%d" % number for number in range(10, 100)])
    await others.publish(b"10")
    await node_of(a).run(log_of(a).prune, Rules(max_events=20))

    b = await buses.open("b", keep=["shop/**"])
    await eventually(lambda: node_of(b).network.head >= 40)
    await eventually(lambda: b.stats().get("gaps_unrepaired") == (2 if killed else 1))

    gaps = [each for each in records if each.get("code") == "gap_unrepaired"]
    found = {each["key"]: (each["first"], each["last"]) for each in gaps}
    assert found == ({KEY: (0, 80), "shop/others": (0, 9)} if killed else {KEY: (10, 80)})


async def test_a_node_that_comes_back_without_durable_subscriptions_no_longer_holds_events_back(buses: Buses) -> None:
    a, other = await away(buses)

    b = await buses.open("b")
    async with b.subscribe("shop/**"):
        await eventually(lambda: reader_of(a, other) is None)
        await publish(a, 30 * KEPT)

        async with asyncio.timeout(20):
            while await low_water(a) <= 10:
                await asyncio.sleep(0.05)


async def test_a_node_reports_no_position_after_past_events_that_are_owed_to_it() -> None:
    reported: list[Any] = []

    async def request(key: str, body: bytes, timeout_s: float) -> AsyncIterator[bytes]:
        reported.append(msgspec.msgpack.decode(body, strict=False))
        yield b"\0" + msgspec.msgpack.encode((9, 9, 0))

    known_logs, reports = KnownLogs(), ReaderReports(3, MeshHost(), 60.0, FakeRuntime())  # type: ignore[arg-type]
    known_logs.reached(5, 7, 9)
    known_logs.owe(["shop/**"])
    known_logs.fetched(5, "shop/**", 4)
    for fetched in (4, None, None):
        known_logs.fetched(5, "shop/**", fetched)
        await reports.send([5], known_logs, request, reads=True)

    known_at, is_reading_at = 7, 12  # the fields of a request
    assert [(each[known_at], each[is_reading_at]) for each in reported] == [({7: 4}, True), ({7: 9}, True)]
