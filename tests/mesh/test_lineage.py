"""Restored and copied logs, forged claims and debts of the past, between real nodes.

Every event that is acknowledged after a log was restored must arrive, and so must those of both copies of a log; and
each of these situations is reported once.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from inside import node_of
from log_support import raw
from mesh_fakes import recorded
from mesh_lossy import Buses, buses_on, eventually, take, wanted
from mesh_support import ZenohPeers

import zbus
import zbus_log.log
from zbus.mesh import node_registry
from zbus.mesh.log_service import LogPage, log_key, request_page
from zbus.mesh.origins import claims, incarnations
from zbus.ports.lineage import Incarnation
from zbus.wire.beacon import Beacon, beacon_key, encode_beacon

KEY = "shop/orders"


@pytest.fixture
async def buses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Buses]:
    async with buses_on(ZenohPeers, tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def records() -> Iterator[list[dict[str, Any]]]:
    with recorded(logging.WARNING) as found:
        yield found


def of(records: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [each for each in records if each["record"] == name]


def copy(source: Path, target: Path) -> None:
    """Copy all files of a closed log."""
    for each in source.parent.glob(f"{source.name}*"):
        if each.is_file():
            shutil.copyfile(each, target.parent / each.name.replace(source.name, target.name, 1))


def remove(path: Path) -> None:
    for each in path.parent.glob(f"{path.name}*"):
        if each.is_file():
            each.unlink()


async def publish(bus: zbus.Bus, events: int, name: str, key: str = KEY) -> list[bytes]:
    publisher = await bus.publisher(key)
    sent = [b"%s %d" % (name.encode(), number) for number in range(events)]
    for payload in sent:
        await publisher.publish(payload)
    return sent


def payloads(events: list[zbus.Event]) -> list[bytes]:
    return [event.payload for event in events]


async def test_what_a_restored_log_publishes_arrives_and_the_rewind_is_reported_once(
    buses: Buses, tmp_path: Path, records: list[dict[str, Any]]
) -> None:
    log, backup = tmp_path / "a.db", tmp_path / "backup.db"
    b = await buses.open("b")
    async with b.subscribe("shop/**", durable="d") as subscription:
        a = await buses.open("a")
        first = await publish(a, 10, "first")
        assert payloads(await take(subscription, 10)) == first
        await a.aclose()
        copy(log, backup)
        a = await buses.open("a")
        second = await publish(a, 100, "second")
        assert payloads(await take(subscription, 100)) == second
        await a.aclose()
        remove(log)
        copy(backup, log)
        a = await buses.open("a")

        third = await publish(a, 80, "third")

        assert payloads(await take(subscription, 80)) == third
        await a.aclose()
        a = await buses.open("a")
        fourth = await publish(a, 5, "fourth")
        assert payloads(await take(subscription, 5)) == fourth
    (rewound,) = of(records, "ORIGIN_REWOUND")
    assert (rewound["code"], rewound["shared"]) == ("log_rewound", 10)
    assert 10 < rewound["known"] <= 110  # as far as its log had confirmed
    assert b.stats()["origins_rewound"] == 1
    assert f"offset {rewound['known']} and now continues after offset 10" in rewound["reason"]


async def test_lost_events_that_are_put_into_a_restored_log_are_duplicates_for_the_nodes_that_have_them(
    buses: Buses, tmp_path: Path
) -> None:
    log, backup = tmp_path / "a.db", tmp_path / "backup.db"
    b = await buses.open("b")
    async with b.subscribe("shop/**", durable="d") as subscription:
        a = await buses.open("a")
        first = await publish(a, 10, "first")
        assert payloads(await take(subscription, 10)) == first
        await a.aclose()
        copy(log, backup)
        a = await buses.open("a")
        second = await publish(a, 5, "second")
        assert payloads(await take(subscription, 5)) == second
        await a.aclose()
        remove(log)
        copy(backup, log)
        a = await buses.open("a")
        third = await publish(a, 5, "third")
        assert payloads(await take(subscription, 5)) == third
        assert payloads([event async for event in a.replay("shop/**")]) == first + third

        await a.put(*[event async for event in b.replay("shop/**")])

        assert payloads([event async for event in a.replay("shop/**")]) == first + third + second
        fourth = await publish(a, 1, "fourth")
        assert payloads(await take(subscription, 1)) == fourth
        assert payloads([event async for event in b.replay("shop/**")]) == first + second + third + fourth


async def test_a_rewind_is_noticed_by_a_node_that_was_closed_meanwhile(
    buses: Buses, tmp_path: Path, records: list[dict[str, Any]]
) -> None:
    log, backup = tmp_path / "a.db", tmp_path / "backup.db"
    b = await buses.open("b")
    async with b.subscribe("shop/**", durable="d") as subscription:
        a = await buses.open("a")
        await publish(a, 10, "first")
        await a.aclose()
        copy(log, backup)
        a = await buses.open("a")
        await publish(a, 20, "second")
        assert len(await take(subscription, 30)) == 30
        origin = node_of(a).network.origin
        known_logs = node_of(b).network.inbox.known_logs
        await eventually(lambda: max(known_logs.of(origin).values(), default=0) == 30)
        await a.aclose()
    await b.aclose()
    remove(log)
    copy(backup, log)
    for _ in range(2):  # the incarnation between the known one and the current one is unknown: its log is asked
        a = await buses.open("a")
        third = await publish(a, 5, "third")
        await a.aclose()
    a = await buses.open("a")
    b = await buses.open("b")
    async with b.subscribe("shop/**", durable="d") as subscription:
        fourth = await publish(a, 5, "fourth")

        (unacknowledged, *got) = payloads(await take(subscription, 16))

    assert unacknowledged == b"second 19"
    assert sorted(got) == sorted([*third, *third, *fourth])
    (rewound,) = of(records, "ORIGIN_REWOUND")
    assert (rewound["known"], rewound["shared"]) == (30, 10)


@pytest.mark.parametrize("events", [5, 20, 40], ids=["fewer", "as-many", "more"])
async def test_a_machine_that_was_reverted_to_a_snapshot_is_noticed_by_a_node_that_was_closed(
    buses: Buses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: list[dict[str, Any]], events: int
) -> None:
    """Its log is in the same incarnation as before, with other events at the same offsets."""
    monkeypatch.setattr(claims, "CONFIRM_S", (0.05, 0.2))
    log, snapshot = tmp_path / "a.db", tmp_path / "snapshot.db"
    a = await buses.open("a")
    await publish(a, 10, "first")
    await a.aclose()
    copy(log, snapshot)
    monkeypatch.setattr(zbus_log.log, "new_incarnation", lambda first: Incarnation(77, first, 1, "a"))
    b = await buses.open("b")
    async with b.subscribe("shop/**", durable="d", start="beginning") as subscription:
        a = await buses.open("a")
        await publish(a, 20, "lost")
        assert len(await take(subscription, 30)) == 30
        origin = node_of(a).network.origin
        known_logs = node_of(b).network.inbox.known_logs
        await eventually(lambda: f"digest/{origin:x}/4d" in known_logs.names() and known_logs.of(origin)[77] == 30)
        await a.aclose()
    await b.aclose()
    remove(log)
    copy(snapshot, log)
    a = await buses.open("a")
    second = await publish(a, events, "second")
    b = await buses.open("b")

    async with b.subscribe("shop/**", durable="d") as subscription:
        (unacknowledged, *got) = payloads(await take(subscription, 1 + events))
        assert (unacknowledged, got) == (b"lost 19", second)
        third = await publish(a, 3, "third")
        assert payloads(await take(subscription, 3)) == third

    found = {each["code"]: each for each in of(records, "ORIGIN_REWOUND")}
    assert len(of(records, "ORIGIN_REWOUND")) == 2  # each of the two nodes reports it once
    assert {code: (each["known"], each["shared"]) for code, each in found.items()} == {
        "log_rewound": (30, 10),
        "own_log_rewound": (30, 10),
    }
    assert b.stats()["origins_rewound"] == 1
    assert node_of(a).network.branch.parent == 77  # so that later events cannot be mistaken for lost ones


def apart(settings: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    """Connect each node to the first one only."""

    def connected_once(name: str) -> dict[str, Any]:
        found = settings(name)
        return found | {"connect": found["connect"][:1]}

    return connected_once


async def test_events_of_two_copies_of_a_log_are_received_and_the_copies_reported(
    buses: Buses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: list[dict[str, Any]]
) -> None:
    for module in (incarnations, node_registry):
        monkeypatch.setattr(module, "LATE_S", 0.2)
    b = await buses.open("b")
    monkeypatch.setattr(buses.wire, "settings", apart(buses.wire.settings))
    async with b.subscribe("shop/**", durable="d") as subscription:
        a = await buses.open("a")
        assert len(await publish(a, 10, "first")) == len(await take(subscription, 10))
        await a.aclose()
        copy(tmp_path / "a.db", tmp_path / "copy.db")
        one, two = await buses.open("a"), await buses.open("copy")
        await wanted(one, KEY)
        await wanted(two, KEY)
        sent: list[bytes] = []
        for number in range(20):
            sent += await publish(one, 2, f"one {number}")
            sent += await publish(two, 2, f"two {number}", "shop/returns")
            await asyncio.sleep(0.02)

        got = payloads(await take(subscription, len(sent)))

        assert sorted(got) == sorted(sent)
        await eventually(lambda: b.stats().get("copies_found", 0) >= 1)
        for number in range(20):  # the node that receives both tells them
            await publish(one, 1, f"later {number}")
            await publish(two, 1, f"later {number}", "shop/returns")
            if one.stats().get("copies_found") and two.stats().get("copies_found"):
                break
            await asyncio.sleep(0.5)
        assert (one.stats()["copies_found"], two.stats()["copies_found"]) == (1, 1)
        networks = [node_of(each).network for each in (one, two)]
        for each in networks * 2:
            each.registry.announce_soon()
            await asyncio.sleep(0.3)
        shown = [node.incarnation for node in b.nodes() if node.id == f"{networks[0].origin:x}" and node.alive]
        assert sorted(shown) == sorted(f"{each.branch.id:x}" for each in networks)
    found = of(records, "ORIGIN_CLONED")
    assert {each["code"] for each in found} <= {"log_copied", "own_log_copied"}
    assert "log_copied" in {each["code"] for each in found}
    assert {each["origin"] for each in found} == {f"{node_of(one).network.origin:x}"}


async def test_a_node_reports_a_copy_of_its_own_log(
    buses: Buses, tmp_path: Path, records: list[dict[str, Any]]
) -> None:
    a = await buses.open("a")
    await publish(a, 3, "first")
    await a.aclose()
    copy(tmp_path / "a.db", tmp_path / "copy.db")
    one = await buses.open("a")
    two = await buses.open("copy")
    async with one.subscribe("shop/**") as subscription:
        await wanted(two, KEY)
        sent = await publish(two, 5, "of the copy")

        assert payloads(await take(subscription, 5)) == sent  # as of any other node
        await eventually(lambda: one.stats().get("copies_found") == 1)
        await eventually(lambda: two.stats().get("copies_found") == 1)
    assert [each["code"] for each in of(records, "ORIGIN_CLONED")] == ["own_log_copied", "own_log_copied"]


async def answers(page: Awaitable[LogPage]) -> bool:
    try:
        await page
    except zbus.NoResponders:
        return False
    return True


async def test_copies_that_share_an_incarnation_notice_it_and_begin_others(
    buses: Buses, records: list[dict[str, Any]]
) -> None:
    """As two machines do that were resumed from one snapshot: only their digests differ."""
    a, b = await buses.open("a"), await buses.open("b")
    await publish(a, 3, "first")
    network = node_of(a).network
    before = network.branch
    own = Beacon(network.origin, 0, 3, {}, before, await node_of(a).run(node_of(a).log.digest, 3))
    other = Beacon(network.origin, 0, 3, {}, before, bytes(16))

    node_of(b).network.announce_frames([(beacon_key(network.origin), encode_beacon(own))])
    await asyncio.sleep(0.3)
    assert network.branch == before  # an echo
    node_of(b).network.announce_frames([(beacon_key(network.origin), encode_beacon(other))])

    await eventually(lambda: network.branch != before)
    assert (network.branch.parent, network.branch.first) == (before.id, 4)
    served = {each for each in network.served if each.startswith(f"@zbus/log/{network.origin:x}")}
    assert served == {log_key(network.origin), log_key(network.origin, network.branch.id)}
    request = partial(node_of(b).network.request_client.request, stream=True)
    page = partial(request_page, request, network.origin, ("**",), 0, 0, 5.0)
    async with asyncio.timeout(20):  # until the keys are declared on both sides
        while not await answers(page(incarnation=network.branch.id)) or await answers(page(incarnation=before.id)):
            await asyncio.sleep(0.05)  # for the earlier incarnation, only the other copy may answer
    assert a.stats()["copies_found"] == 1
    assert [each["code"] for each in of(records, "ORIGIN_CLONED")] == ["own_log_copied"]
    async with b.subscribe("shop/**") as subscription:
        await wanted(a, KEY)
        sent = await publish(a, 3, "second")
        assert payloads(await take(subscription, 3)) == sent


async def test_resumed_copies_with_the_same_publisher_ids_get_new_ones_and_conflicts_are_reported(
    buses: Buses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: list[dict[str, Any]]
) -> None:
    a = await buses.open("a")
    await publish(a, 3, "first")
    await a.aclose()
    copy(tmp_path / "a.db", tmp_path / "copy.db")
    monkeypatch.setattr(zbus_log.log, "new_incarnation", lambda first: Incarnation(77, first, 1, "a"))
    one, two = await buses.open("a"), await buses.open("copy")
    monkeypatch.undo()
    b = await buses.open("b")
    publishers = [await each.publisher(KEY) for each in (one, two)]
    for each in publishers:
        each.publisher_id = 4711  # as in the memory of a resumed machine
    async with b.subscribe("shop/**", durable="d") as subscription:
        for number in range(5):
            for name, each in zip(("one", "two"), publishers, strict=True):
                await each.publish(f"{name} {number}")

        branches = [node_of(each).network for each in (one, two)]
        await eventually(lambda: branches[0].branch.id != branches[1].branch.id)
        await eventually(lambda: b.stats().get("identity_conflicts", 0) >= 1)
        later = [f"later {name} {number}" for number in range(5) for name in ("one", "two")]
        for number, payload in enumerate(later):
            await publishers[number % 2].publish(payload)

        got: list[str] = []
        while not set(later) <= set(got):
            got += [payload.decode() for payload in payloads(await take(subscription, 1))]

    early = {f"{name} {number}" for number in range(5) for name in ("one", "two")}
    assert set(got) <= early | set(later)
    assert len(early - set(got)) <= b.stats()["identity_conflicts"]  # each of them was reported
    assert len({each.publisher_id for each in publishers}) == 2
    conflict = next(each for each in of(records, "EVENT_DROPPED") if each["code"] == "identity_conflict")
    assert (conflict["origin"], conflict["publisher_id"]) == (f"{branches[0].origin:x}", 4711)


@pytest.mark.parametrize("restart", [False, True])
async def test_a_forged_beacon_silences_no_publisher_and_is_reported(
    buses: Buses, monkeypatch: pytest.MonkeyPatch, records: list[dict[str, Any]], restart: bool
) -> None:
    monkeypatch.setattr(claims, "CONFIRM_S", (0.05, 0.2))
    a, b, stranger = await buses.open("a"), await buses.open("b"), await buses.open("stranger")
    network = node_of(a).network
    async with b.subscribe("shop/**", durable="d") as subscription:
        await wanted(a, KEY)
        sent = await publish(a, 3, "before")
        assert payloads(await take(subscription, 3)) == sent
        for branch in (network.branch, network.branch._replace(id=0)):
            frame = encode_beacon(Beacon(network.origin, 0, 1 << 62, {}, branch))
            node_of(stranger).network.announce_frames([(beacon_key(network.origin), frame)])
        await eventually(lambda: b.stats().get("claims_unconfirmed", 0) >= 1)
        sent = await publish(a, 5, "after")
        assert payloads(await take(subscription, 5)) == sent
        known = node_of(b).network.inbox.known_logs.of(network.origin)
        assert max(known.values(), default=0) <= 8
    if restart:
        await b.aclose()
        b = await buses.open("b")
        async with b.subscribe("shop/**", durable="d") as subscription:
            sent = [b"after 4", *await publish(a, 5, "later")]  # the last event was not acknowledged
            assert payloads(await take(subscription, 6)) == sent
    found = of(records, "ORIGIN_UNCONFIRMED")
    assert {(each["code"], each["claimed"]) for each in found} == {("claim_unconfirmed", 1 << 62)}


async def test_past_events_are_owed_by_a_log_that_was_not_connected_when_they_were_wanted(
    buses: Buses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "CONFIRM_S", (0.05, 0.2))
    a, b = await buses.open("a"), await buses.open("b")
    async with b.subscribe("other/**", durable="first"):
        past = await publish(a, 10, "past")
        await publish(a, 1, "other", "other/x")
        origin = node_of(a).network.origin
        known_logs = node_of(b).network.inbox.known_logs
        await eventually(lambda: max(known_logs.of(origin).values(), default=0) == 11)
        await a.aclose()
    async with b.subscribe("shop/**", durable="late", start="beginning"):
        assert known_logs.owed_by(origin) == {"shop/**": 0}
    await b.aclose()
    b = await buses.open("b")  # the debt survives a restart
    assert node_of(b).network.inbox.known_logs.owed_by(origin) == {"shop/**": 0}
    async with b.subscribe("shop/**", durable="late", start="beginning") as subscription:
        a = await buses.open("a")

        assert payloads(await take(subscription, 10)) == past
        await eventually(lambda: node_of(b).network.inbox.known_logs.owed_by(origin) == {})


async def test_positions_beside_a_log_that_was_replaced_are_not_used(
    buses: Buses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: list[dict[str, Any]]
) -> None:
    """Only the log of the receiver is restored, and not its positions: it must request again what it no longer has."""
    monkeypatch.setattr(claims, "CONFIRM_S", (0.05, 0.2))
    a = await buses.open("a")
    b = await buses.open("b", keep=["shop/**"])
    await wanted(a, KEY)
    first = await publish(a, 5, "first")
    await eventually(lambda: node_of(b).network.head == 5)
    await b.aclose()
    for suffix in ("", "-head"):
        shutil.copyfile(tmp_path / f"b.db{suffix}", tmp_path / f"backup.db{suffix}")
    b = await buses.open("b", keep=["shop/**"])
    second = await publish(a, 5, "second")
    await eventually(lambda: node_of(b).network.head == 10)
    origin = node_of(a).network.origin
    await eventually(lambda: max(node_of(b).network.inbox.known_logs.of(origin).values(), default=0) == 10)
    await b.aclose()
    for suffix in ("", "-head"):
        shutil.copyfile(tmp_path / f"backup.db{suffix}", tmp_path / f"b.db{suffix}")

    b = await buses.open("b", keep=["shop/**"])

    await publish(a, 1, "third")
    await eventually(lambda: node_of(b).network.head >= 11, 20)
    assert [event.payload async for event in b.replay("shop/**")][:10] == [*first, *second]
    (reset,) = of(records, "POSITIONS_RESET")
    assert reset["code"] == "positions_of_another_log"


async def test_a_damaged_position_is_removed_and_the_events_are_requested_again(
    buses: Buses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(claims, "CONFIRM_S", (0.05, 0.2))
    a = await buses.open("a")
    b = await buses.open("b", keep=["shop/**"])
    await wanted(a, KEY)
    first = await publish(a, 5, "first")
    await eventually(lambda: node_of(b).network.head == 5)
    origin = node_of(a).network.origin
    await eventually(lambda: max(node_of(b).network.inbox.known_logs.of(origin).values(), default=0) == 5)
    await b.aclose()
    connection = raw(tmp_path / "b.db-cursors")
    connection.execute("UPDATE positions SET position = position | 64 WHERE name LIKE 'from/%'")
    connection.execute("DELETE FROM positions WHERE name LIKE 'since/%'")
    connection.close()
    second = await publish(a, 5, "second")

    b = await buses.open("b", keep=["shop/**"])

    await eventually(lambda: node_of(b).network.head == 10, 20)
    assert [event.payload async for event in b.replay("shop/**")] == [*first, *second]
    (reset,) = of(records, "POSITIONS_RESET")
    assert reset["code"] == "positions_damaged"
    assert f"from/{origin:x}/" in reset["reason"]
