"""Bridges: what crosses is the same event, once, in order; and nothing runs in a circle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bridge_support import Receiver, identity, receiving, router, until
from free_ports import free_port
from nats_support import NatsServer, nats_server

import zbus
from zbus.bus import Bus
from zbus.wire.envelope import encode, open_frame


@dataclass
class Places:
    """One fabric of each kind, with nothing on it yet."""

    nats: str
    zenoh: str
    zmq: str
    folder: Path
    server: NatsServer

    def log(self, name: str, kept: bool) -> str | None:
        return str(self.folder / f"{name}.db") if kept else None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats") as running:
        yield running


@pytest.fixture
async def places(tmp_path: Path, server: NatsServer) -> AsyncIterator[Places]:
    port = free_port()
    async with router(port):
        yield Places(server.url, f"zenoh://127.0.0.1:{port}", f"zmq://?registry={tmp_path}/zmq", tmp_path, server)


@pytest.mark.parametrize("kept", [True, False], ids=["log", "no-log"])
@pytest.mark.parametrize("other", ["nats", "zmq"])
async def test_an_event_crosses_both_ways_as_the_same_event(places: Places, other: str, kept: bool) -> None:
    there = getattr(places, other)
    async with zbus.open(transport=there) as left, zbus.open(transport=places.zenoh) as right:
        async with receiving(left, "shop/**") as at_left, receiving(right, "shop/**") as at_right:
            between = (there, places.zenoh)
            async with zbus.Bridge(between, ["shop/**"], log=places.log("bridge", kept)) as bridge:
                for near, key in ((left, "shop/orders/created"), (right, "shop/100%/a.b/ünï")):
                    publisher = await near.publisher(key)
                    for number in range(50):
                        await publisher.publish(b"\x00\xff%d" % number, headers={"tenant": "x", "n": str(number)})
                seen_left, seen_right = await at_left.only(100), await at_right.only(100)
                stats = bridge.stats()

    for key in ("shop/orders/created", "shop/100%/a.b/ünï"):
        here, far = ([identity(each) for each in seen if each.key == key] for seen in (seen_left, seen_right))
        assert len(here) == 50
        assert here == far
    assert (stats["forward"]["forwarded"], stats["reverse"]["forwarded"]) == (50, 50)
    assert stats["forward"]["pending_events"] == stats["reverse"]["pending_events"] == 0
    assert 0 < stats["forward"]["lag_ms"] < 20_000
    assert 0 < stats["reverse"]["lag_ms"] < 20_000


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("kept", [True, False], ids=["log", "no-log"])
async def test_one_way_is_one_way(places: Places, direction: Any, kept: bool) -> None:
    async with zbus.open(transport=places.nats) as left, zbus.open(transport=places.zenoh) as right:
        async with receiving(left, "shop/**") as at_left, receiving(right, "shop/**") as at_right:
            log = places.log("bridge", kept)
            async with zbus.Bridge((places.nats, places.zenoh), ["shop/**"], direction=direction, log=log) as bridge:
                await (await left.publisher("shop/left")).publish(b"from the left")
                await (await right.publisher("shop/right")).publish(b"from the right")
                forward = direction == "forward"
                await at_left.only(1 if forward else 2)
                await at_right.only(2 if forward else 1)
                stats = bridge.stats()
                if kept:
                    assert bridge.diagnostics()["delivered"] == 1  # the other side is not even listened to

    assert stats[direction]["forwarded"] == 1
    assert "reverse" not in stats or direction == "reverse"


@pytest.mark.parametrize("kept", [True, False], ids=["log", "no-log"])
async def test_events_on_other_keys_do_not_cross(places: Places, kept: bool) -> None:
    between, keys = (places.nats, places.zenoh), ["shop/*/created", "audit/**"]
    async with zbus.open(transport=places.nats) as left, zbus.open(transport=places.zenoh) as right:
        async with receiving(right, "**") as at_right:
            async with zbus.Bridge(between, keys, log=places.log("bridge", kept)) as bridge:
                for key in ("shop/a/created", "shop/a/b/created", "shop/a/gone", "private/x", "audit/a/b"):
                    await (await left.publisher(key)).publish(key)
                events = await at_right.only(2)
                if kept:
                    assert bridge.diagnostics()["delivered"] == 2  # nor are they in its log

            assert {event.key for event in events} == {"shop/a/created", "audit/a/b"}
            assert bridge.stats()["forward"]["forwarded"] == 2


async def settled(bridges: list[zbus.Bridge]) -> list[dict[str, Any]]:
    """Return their statistics, once nothing has changed for a second."""
    stats, same = [each.stats() for each in bridges], 0
    async with asyncio.timeout(30):
        while same < 5:
            await asyncio.sleep(0.2)
            now = [each.stats() for each in bridges]
            # Lag grows by itself; what is counted does not.
            moved = [
                {**each, "forward": each["forward"]["forwarded"], "reverse": each["reverse"]["forwarded"]}
                for each in now
            ]
            before = [
                {**each, "forward": each["forward"]["forwarded"], "reverse": each["reverse"]["forwarded"]}
                for each in stats
            ]
            same, stats = (same + 1 if moved == before else 0), now
    return stats


@pytest.mark.parametrize("kept", [True, False], ids=["log", "no-log"])
async def test_in_a_ring_of_three_every_event_arrives_once_everywhere_and_traffic_ends(
    places: Places, kept: bool
) -> None:
    urls = [places.nats, places.zenoh, places.zmq]
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(zbus.open(transport=url)) for url in urls]
        received = [await stack.enter_async_context(receiving(node, "shop/**")) for node in nodes]
        bridges = [
            await stack.enter_async_context(
                zbus.Bridge((url, urls[(at + 1) % 3]), ["shop/**"], log=places.log(f"b{at}", kept))
            )
            for at, url in enumerate(urls)
        ]
        await asyncio.gather(*[publish(node, f"shop/from/{at}", 200) for at, node in enumerate(nodes)])

        for each in received:
            events = await each.only(600)
            for at in range(3):
                assert [event.sequence for event in events if event.key == f"shop/from/{at}"] == list(range(200))
        stats = await settled(bridges)

    crossed = [each[way]["forwarded"] for each in stats for way in ("forward", "reverse")]
    # Each event needs to cross twice; where two paths race, a third copy crosses and is stopped as a duplicate.
    assert 1200 <= sum(crossed) <= 1800
    # Three copies of each come back to where it was; one that was late is asked for, and then comes once more.
    assert sum(each["duplicates"] + each["loops_prevented"] for each in stats) <= 2 * 1800


@pytest.mark.parametrize("kept", [True, False], ids=["log", "no-log"])
async def test_an_event_says_which_nodes_it_crossed_and_is_dropped_where_it_was_before(
    places: Places, kept: bool
) -> None:
    async with zbus.open(transport=places.nats) as left, zbus.open(transport=places.zenoh) as right:
        frames: list[bytes] = []
        subscriber = right.zenoh.declare_subscriber("shop/**", lambda sample: frames.append(sample.payload.to_bytes()))
        async with receiving(left, "shop/**") as at_left:
            log = places.log("bridge", kept)
            async with zbus.Bridge((places.nats, places.zenoh), ["shop/**"], log=log) as bridge:
                await publish(left, "shop/orders", 1)
                await until(lambda: frames)
                (envelope,) = open_frame(frames[0])
                own = int(bridge.diagnostics()["origin"], 16)
                assert (envelope.origin, envelope.via) == (own, (int(left.diagnostics()["origin"], 16),))

                for sequence, via in ((0, (7, own, 9)), (1, (7, 9))):  # of these, only the second was never here
                    event = zbus.Event(77, sequence, 5, "shop/back", b"%d" % sequence, {}, 1 + sequence)
                    right.zenoh.put("shop/back", encode(event, 10, 0, via))
                events = await at_left.only(2)
                stats = bridge.stats()
        subscriber.undeclare()

    assert [event.payload for event in events if event.key == "shop/back"] == [b"1"]
    assert (stats["loops_prevented"], stats["reverse"]["forwarded"]) == (1, 1)


async def publish(node: Bus, key: str, count: int) -> None:
    publisher = await node.publisher(key)
    for number in range(count):
        await publisher.publish(b"%d" % number)


@pytest.mark.parametrize("kept", [True, False], ids=["log", "no-log"])
async def test_two_bridges_side_by_side_bring_nothing_twice(places: Places, kept: bool) -> None:
    between = (places.nats, places.zenoh)
    async with zbus.open(transport=places.nats) as left, zbus.open(transport=places.zenoh) as right:
        async with receiving(left, "shop/**") as at_left, receiving(right, "shop/**") as at_right:
            one = zbus.Bridge(between, ["shop/**"], log=places.log("one", kept))
            two = zbus.Bridge(between, ["shop/**"], log=places.log("two", kept))
            async with one, two:
                await asyncio.gather(publish(left, "shop/left", 300), publish(right, "shop/right", 300))
                for seen in (await at_left.only(600), await at_right.only(600)):
                    for key in ("shop/left", "shop/right"):
                        assert [event.sequence for event in seen if event.key == key] == list(range(300))
                stats = await settled([one, two])

    assert sum(each[way]["forwarded"] for each in stats for way in ("forward", "reverse")) >= 600
    assert sum(each["duplicates"] + each["loops_prevented"] for each in stats) > 0  # they did meet each other's copies


async def test_what_a_nats_side_misses_while_its_server_is_dead_crosses_later_in_order_and_counts_once(
    places: Places, tmp_path: Path
) -> None:
    async with zbus.open(transport=places.nats) as left, zbus.open(tmp_path / "r.db", transport=places.zenoh) as right:
        async with receiving(left, "shop/**") as at_left:
            async with zbus.Bridge((places.nats, places.zenoh), ["shop/**"], log=tmp_path / "bridge.db") as bridge:
                publisher = await right.publisher("shop/orders")
                await publisher.publish_many([b"%d" % n for n in range(100)])
                await at_left.wait(100)
                places.server.kill()
                for start in range(100, 500, 50):
                    await publisher.publish_many([b"%d" % n for n in range(start, start + 50)])
                await until(lambda: bridge.stats()["reverse"]["pending_events"] == 400)
                away = bridge.stats()
                await until(lambda: bridge.stats()["reverse"]["lag_ms"] > away["reverse"]["lag_ms"] + 300)
                assert away["forward"]["pending_events"] == 0
                places.server.start()
                events = await at_left.only(500)
                stats = bridge.stats()

    assert [event.sequence for event in events] == list(range(500))
    assert stats["reverse"]["forwarded"] == 500
    assert stats["reverse"]["pending_events"] == 0
    assert stats["reverse"]["lag_ms"] >= 300  # that of the last one, which waited


async def test_what_waits_is_counted_for_its_own_direction_and_lag_is_the_age_of_the_oldest(tmp_path: Path) -> None:
    """One side is away from the start, also in a second run; between the two sides that are there, nothing waits."""
    here, there = f"zmq://?registry={tmp_path}/a", f"zenoh://127.0.0.1:{free_port()}"
    log = tmp_path / "bridge.db"
    async with zbus.open(transport=here) as left:
        async with zbus.Bridge((here, there), ["shop/**"], log=log) as bridge:
            assert {way: bridge.stats()[way]["lag_ms"] for way in ("forward", "reverse")} == {
                "forward": 0,
                "reverse": 0,
            }
            async with asyncio.timeout(20):
                while not bridge.stats()["forward"]["pending_events"]:
                    await publish(left, "shop/orders", 1)
                    await asyncio.sleep(0.05)
            first = bridge.stats()
            await until(lambda: bridge.stats()["forward"]["lag_ms"] > 500)
            assert first["forward"]["lag_ms"] < bridge.stats()["forward"]["lag_ms"]
            assert (first["reverse"]["pending_events"], first["reverse"]["lag_ms"]) == (0, 0)
        async with zbus.Bridge((here, there), ["shop/**"], log=log) as bridge:
            again = bridge.stats()["forward"]
            assert again["pending_events"] >= first["forward"]["pending_events"]
            assert again["lag_ms"] > 500


@pytest.mark.parametrize("away", ["node", "bridge"])
async def test_a_durable_name_behind_a_zmq_bridge_misses_nothing_while_it_or_the_bridge_is_away(
    server: NatsServer, tmp_path: Path, away: str
) -> None:
    between = (server.url, f"zmq://?registry={tmp_path}/zmq")

    def bridge() -> zbus.Bridge:
        return zbus.Bridge(between, ["shop/**"], log=tmp_path / "bridge.db")

    def node() -> Bus:
        return zbus.open(tmp_path / "node.db", transport=between[1])

    async def read(bus: Bus, count: int) -> list[int]:
        async with asyncio.timeout(30), bus.subscribe("shop/**", durable="d") as subscription:
            return [(await anext(subscription)).sequence for _ in range(count)]

    async with AsyncExitStack() as stack:
        left = await stack.enter_async_context(zbus.open(tmp_path / "left.db", transport=between[0]))
        publisher = await left.publisher("shop/orders")
        crossing, reader = bridge(), node()
        for each in (crossing, reader):
            stack.push_async_callback(each.aclose)
            await each.start()
        reading = asyncio.create_task(read(reader, 100))
        await until(lambda: reader.diagnostics()["subscriptions"])
        await publisher.publish_many([b""] * 100)
        assert await reading == list(range(100))
        await (reader if away == "node" else crossing).aclose()
        for _ in range(10):
            await publisher.publish_many([b""] * 50)
        if away == "node":
            await until(lambda: crossing.stats()["forward"]["forwarded"] == 600)  # into the void
            reader = await stack.enter_async_context(node())
        else:
            await stack.enter_async_context(bridge())

        came = await read(reader, 501)

    assert came[-500:] == list(range(100, 600))  # the last one of before was not acknowledged: it was not asked on


async def test_what_a_zenoh_side_misses_while_its_router_is_dead_crosses_later_in_order(
    server: NatsServer, tmp_path: Path
) -> None:
    port = free_port()
    between = (server.url, f"zenoh://127.0.0.1:{port}")
    first = router(port)
    await first.start()
    async with zbus.open(tmp_path / "l.db", transport=between[0]) as left, zbus.open(transport=between[1]) as right:
        async with receiving(right, "shop/**") as at_right:
            async with zbus.Bridge(between, ["shop/**"], log=tmp_path / "bridge.db") as bridge:
                publisher = await left.publisher("shop/orders")
                await publisher.publish_many([b"%d" % n for n in range(100)])
                await at_right.wait(100)
                await first.aclose()
                for start in range(100, 500, 50):
                    await publisher.publish_many([b"%d" % n for n in range(start, start + 50)])
                await until(
                    lambda: bridge.stats()["forward"]["forwarded"] == 500
                )  # into the void, as far as zenoh tells
                assert len(at_right.events) == 100
                async with router(port):
                    events = await at_right.only(500)

    assert [event.sequence for event in events] == list(range(500))


async def test_what_retention_removes_before_it_crossed_is_counted_and_the_rest_goes_on(
    places: Places, tmp_path: Path
) -> None:
    between, log = (places.nats, places.zenoh), tmp_path / "bridge.db"
    async with zbus.open(transport=places.nats) as left, zbus.open(transport=places.zenoh) as right:
        async with receiving(left, "shop/**", "@zbus/gap") as at_left:
            async with zbus.Bridge(between, ["shop/**"], log=log, retain_events=100) as bridge:
                publisher = await right.publisher("shop/orders")
                await publisher.publish(b"first")
                await at_left.wait(1)
                places.server.kill()
                async with asyncio.timeout(30):
                    while not bridge.stats()["counts"].get("dropped_by_retention"):
                        for _ in range(500):
                            await publisher.publish(b"x" * 100)
                        await asyncio.sleep(0.1)
                places.server.start()
                await publisher.publish(b"last")
                await until(lambda: at_left.events[-1].payload == b"last")
                lost = bridge.stats()["counts"]["dropped_by_retention"]

    sequences = [event.sequence for event in at_left.events if event.key == "shop/orders"]
    assert sequences == sorted(set(sequences))
    assert sequences[-1] + 1 - len(sequences) == lost > 0


async def test_a_bridge_with_a_log_starts_while_a_side_is_away_and_keeps_what_that_side_misses(
    server: NatsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    async with zbus.open(transport=server.url) as left:
        url = f"zenoh://127.0.0.1:{port}"
        async with zbus.Bridge((server.url, url), ["shop/**"], log=tmp_path / "bridge.db") as bridge:
            assert "BRIDGE_DISCONNECTED" in caplog.text
            assert not bridge.stats()["forward"]["connected"]
            await publish(left, "shop/orders", 20)
            await until(lambda: bridge.stats()["forward"]["pending_events"] == 20)
            async with (
                router(port),
                zbus.open(transport=url) as right,
                receiving(right, "shop/**", start="new") as at_right,
            ):
                await until(lambda: bridge.stats()["forward"]["connected"])
                await publish(left, "shop/later", 5)
                assert len(await at_right.wait(5)) >= 5
                await until(lambda: bridge.stats()["forward"]["forwarded"] == 25)


async def test_without_a_log_a_side_that_is_away_at_the_start_is_an_error(server: NatsServer) -> None:
    bridge = zbus.Bridge((server.url, f"zenoh://127.0.0.1:{free_port()}"), ["shop/**"])
    with pytest.raises(zbus.TransportError):
        await bridge.start()


@pytest.mark.parametrize("kept", [True, False], ids=["log", "no-log"])
async def test_a_bridge_says_at_its_start_whether_it_is_durable(
    places: Places, kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "zbus")
    async with zbus.Bridge((places.nats, places.zenoh), ["shop/**"], log=places.log("b", kept)) as bridge:
        assert bridge.durable is kept
    (said,) = [each for each in caplog.records if each.getMessage().startswith("BRIDGE_STARTED")]
    assert ("kept in the log" in said.getMessage()) is kept
    assert ("there is no log" in said.getMessage()) is not kept
    assert said.levelno == (logging.INFO if kept else logging.WARNING)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"between": ("nats://a", "nats://a")}, "between"),
        ({"between": ("nats://a", "zenoh://")}, "between"),
        ({"between": ("nats://a", "not a transport")}, "between"),
        ({"keys": ["a//b"]}, "keys"),
        ({"keys": []}, "keys"),
        ({"direction": "up"}, "direction"),
        ({"between": ("zenoh://a:1", "zenoh://b:1"), "raw": True}, "raw"),
        ({"between": ("zenoh://a:1", "zenoh://b:1"), "listen": ["tcp/127.0.0.1:1"]}, "listen"),
        ({"between": ("nats://a", "zenoh://"), "listen": ["nonsense"]}, "listen"),
        ({"mode": "peer"}, "mode"),
        ({"retain_events": 100}, "retain_events"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_bridge_that_makes_no_sense_is_refused_with_the_field(given: dict[str, Any], field: str) -> None:
    right: dict[str, Any] = {"between": ("nats://a", "zenoh://b:1"), "keys": ["shop/**"]}
    with pytest.raises(zbus.ConfigInvalid) as caught:
        zbus.Bridge(**right | given)
    assert caught.value.field.split(".")[0] == field


def test_a_bridge_takes_no_setting_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {"between": ("nats://a", "zenoh://b:1"), "keys": ["shop/**"]}
    expected = zbus.Bridge(**given)._node.config, zbus.Bridge(**given, log=tmp_path / "b.db")._node.config
    for name, value in {"COLD": "tier", "RETAIN_AGE_S": "9", "ACCEPT_LOSS": "true", "DURABILITY": "os"}.items():
        monkeypatch.setenv(f"ZBUS_{name}", value)

    assert zbus.Bridge(**given)._node.config == expected[0]
    assert zbus.Bridge(**given, log=tmp_path / "b.db")._node.config == expected[1]


async def test_a_payload_that_is_larger_than_the_bridge_allows_does_not_cross(tmp_path: Path) -> None:
    between = (f"zmq://?registry={tmp_path}/a", f"zmq://?registry={tmp_path}/b")
    async with zbus.open(transport=between[0]) as left, zbus.open(transport=between[1]) as right:
        async with receiving(right, "shop/**") as at_right, zbus.Bridge(between, ["shop/**"], payload_bytes_max=10):
            publisher = await left.publisher("shop/a")
            await publisher.publish(b"x" * 11)
            await publisher.publish(b"x" * 10)
            assert [len(event.payload) for event in await at_right.only(1)] == [10]


def test_a_secret_in_a_url_is_never_shown() -> None:
    bridge = zbus.Bridge(("nats://user:hunter2@127.0.0.1:4222", "zenoh://127.0.0.1:7447?password=hunter2"), ["a/**"])
    shown = repr(bridge.config) + bridge.name + repr(bridge.stats()) + repr(bridge.diagnostics())
    assert "hunter2" not in shown
    with pytest.raises(zbus.ConfigInvalid) as caught:
        zbus.Bridge(("nats://user:hunter2@127.0.0.1:4222", "zenoh://user:hunter2@x x"), ["a/**"])
    assert "hunter2" not in str(caught.value)


async def test_two_transports_that_only_options_tell_apart_can_be_bridged(tmp_path: Path) -> None:
    between = (f"zmq://?registry={tmp_path}/a", f"zmq://?registry={tmp_path}/b")
    async with zbus.open(transport=between[0]) as left, zbus.open(transport=between[1]) as right:
        async with receiving(right, "shop/**") as at_right, receiving(left, "shop/**") as at_left:
            async with zbus.Bridge(between, ["shop/**"], log=tmp_path / "bridge.db") as bridge:
                await publish(left, "shop/left", 20)
                await publish(right, "shop/right", 20)
                await at_right.only(40)
                await at_left.only(40)
                assert (bridge.stats()["forward"]["forwarded"], bridge.stats()["reverse"]["forwarded"]) == (20, 20)


def test_ears_tell_what_did_not_come() -> None:
    async def deaf() -> None:
        await Receiver().wait(1, timeout_s=0.01)

    with pytest.raises(AssertionError, match="0 of 1"):
        asyncio.run(deaf())
