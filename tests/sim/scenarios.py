"""The scenarios that zbus itself must survive. `make sim` runs them with 2,000 seeds, `make faults` with 20,000.

A seed is 30 virtual seconds of three nodes unless the scenario says otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Any

import zbus
from zbus.sim import ORDINARY, Faults, World, scenario
from zbus.sim.ledger import GAP_REAL, ORDER

SECONDS = 30.0
Program = Callable[[Any], Awaitable[object]]


# Programs: what the nodes do.


def publishing(chance: Random, *keys: str, pause_s: float, until_s: float, size: int = 30) -> Program:
    """Publish on each key, with random pauses, until a time. A publish that fails is given up."""

    async def program(bus: Any) -> None:
        await asyncio.gather(*(one(bus, key) for key in keys))

    async def one(bus: Any, key: str) -> None:
        publisher = await bus.publisher(key)
        loop, number = asyncio.get_running_loop(), 0
        while loop.time() < until_s:
            await asyncio.sleep(chance.uniform(0.2, 1.8) * pause_s)
            number += 1
            with suppress(zbus.LogError):
                if chance.random() < 0.1:
                    await publisher.publish_many([b"%d of many" % each for each in range(3)])
                else:
                    headers = {"number": str(number)} if number % 3 == 0 else None
                    await publisher.publish(f"{number} on {key}".ljust(size).encode(), headers=headers)

    return program


def subscribing(*keys: str, **options: Any) -> Program:
    """Read a subscription for ever; start again after an overflow, or if a full disk refuses to open it."""

    async def program(bus: Any) -> None:
        subscription = await opened(bus)
        async with subscription:
            while True:
                with suppress(zbus.SubscriberLagged):
                    if await subscription.next() is None:
                        return

    async def opened(bus: Any) -> Any:
        while True:
            subscription = bus.subscribe(*keys, **options)
            try:
                return await subscription.__aenter__()
            except zbus.LogFull:
                await asyncio.sleep(0.5)

    return program


def in_turns(chance: Random, *keys: str, **options: Any) -> Program:
    """Read a subscription, close it after some seconds, and open it again in the same process."""

    async def program(bus: Any) -> None:
        while True:
            async with bus.subscribe(*keys, **options) as subscription:
                with suppress(TimeoutError):
                    async with asyncio.timeout(chance.uniform(0.5, 8.0)):
                        while await subscription.next() is not None:
                            pass
                        return

    return program


def together(*programs: Program) -> Program:
    """Do several things at once."""

    async def program(bus: Any) -> None:
        await asyncio.gather(*(each(bus) for each in programs))

    return program


async def start_publishers(world: World, names: str, pause_s: float = 0.2, seconds: float = SECONDS) -> None:
    """Let each node publish on two keys."""
    for name in names:
        keys = (f"shop/{name}/orders", f"shop/{name}/stock")
        chance = world.source(f"load/{name}")
        program = publishing(chance, *keys, pause_s=pause_s, until_s=world.now + seconds)
        node = world.nodes.get(name)
        if node is None:
            await world.node(name, log=True, program=program)
        else:
            node.also(program)


def is_ready(world: World, node: str, durable: str) -> bool:
    """Whether a durable subscription was opened."""
    account = world.ledger.accounts.get((node, durable))
    return account is not None and account.ready_at is not None


# Publish and subscribe.


@scenario(share=0.09)
async def three_nodes(world: World) -> None:
    """A durable and a live subscriber of everything that three nodes publish."""
    await world.node("c", log=True, program=subscribing("shop/**", durable="billing"))
    await world.node("b", log=True, program=subscribing("shop/*/orders", queue_events=100_000))
    await world.run(1.0)
    await start_publishers(world, "abc")
    await world.play(ORDINARY, SECONDS)


@scenario(share=0.06)
async def some_nodes(world: World) -> None:
    """Two to five nodes, each with a durable subscriber, that are cut off from each other."""
    names = "abcde"[: world.choose("nodes", 2, 5)]
    for name in names:
        program = in_turns(world.source(f"turns/{name}"), "shop/**", durable=f"all-{name}")
        await world.node(name, log=True, program=program)
    await world.run(1.0)
    await start_publishers(world, names[: world.choose("publishers", 1, 3)], 0.4)
    faults = Faults(isolate=(0, 2), partition=(0, 2), kill=(0, 1), freeze=(0, 2), one_way=(0, 1))
    await world.play(faults, SECONDS)


@scenario(share=0.05)
async def aimed_kills(world: World) -> None:
    """kill -9 at named steps, such as between a commit and its acknowledgement."""
    await world.node("c", log=True, program=subscribing("shop/**", durable="billing"))
    await world.node("b", log=True, keep=["shop/**"])
    await world.run(1.0)
    await start_publishers(world, "ac", 0.1)
    faults = Faults(aimed_kill=(2, 4), restart=(0, 1), for_s=(0.05, 2.0), drop=(0.0, 0.1, 0.3))
    await world.play(faults, SECONDS)


@scenario(share=0.05)
async def sinks(world: World) -> None:
    """A node that stores everything, and one that joins late and replays nothing twice."""
    await world.node("a", log=True, keep=["**"], program=subscribing("shop/**", durable="archive"))
    await world.run(1.0)
    await start_publishers(world, "b", 0.1)
    await world.node("c", program=subscribing("shop/**", queue_events=100_000))
    await world.play(ORDINARY, SECONDS)


@scenario(share=0.05)
async def disks_fail(world: World) -> None:
    """Full disks, failing and slow ones."""
    await world.node("c", log=True, program=subscribing("shop/**", durable="billing"))
    await world.run(1.0)
    await start_publishers(world, "ab", 0.1)
    faults = Faults(disk_full=(0, 2), disk_errors=(0, 2), slow_disk=(0, 2), kill=(0, 1), power_cut=(0, 1))
    await world.play(faults, SECONDS)


@scenario(share=0.05)
async def slow_links_and_big_events(world: World) -> None:
    """Events of up to 50 kB over links of a few kB/s."""
    await world.node("c", log=True, program=subscribing("shop/**", durable="billing"))
    await world.run(1.0)
    size = world.choose("size", 100, 50_000)
    program = publishing(world.source("load"), "shop/big", pause_s=1.0, until_s=SECONDS, size=size)
    await world.node("a", log=True, program=program)
    await world.node("b", log=True, program=subscribing("shop/**", durable="copy"))
    await world.play(Faults(slow_link=(1, 3), disconnect=(0, 1), kill=(0, 1)), SECONDS)


async def absent(world: World, faults: Faults, most: int = 200) -> None:
    """Publishers keep few events, and a subscriber is away for longer than that."""
    kept = world.choose("kept", 5, most)
    await world.node("c", log=True, program=subscribing("shop/**", durable="billing"))
    await world.run(1.0)
    for name in "ab":
        program = publishing(world.source(name), f"shop/{name}", pause_s=0.1, until_s=SECONDS + 33.0)
        await world.node(name, log=True, retain_events=kept, program=program)
    await world.run(3.0)  # until the position in each log is stored: see `retention_before_the_first_contact`
    await world.play(faults, SECONDS)
    await world.run(5.0)  # the next event of a publisher shows what is missing


@scenario(share=0.05)
async def absent_subscribers_and_retention(world: World) -> None:
    """The same, except that after a kill a gap may be reported of events that were received before it."""
    world.without(GAP_REAL)
    await absent(world, Faults(isolate=(0, 2), kill=(0, 2), freeze=(0, 1), for_s=(0.5, 10.0)))


@scenario(share=0.04)
async def flipped_bits(world: World) -> None:
    """Stored events fail their checksums."""
    await world.node("c", log=True, program=subscribing("shop/**", durable="billing"))
    await world.run(1.0)
    await start_publishers(world, "ab", 0.2)
    await world.play(Faults(corrupt=(1, 5), partition=(0, 2), kill=(0, 1), isolate=(0, 1)), SECONDS)


@scenario(share=0.04)
async def malformed_frames(world: World) -> None:
    """A stranger sends frames that no node sends."""
    await world.node("c", log=True, program=subscribing("shop/**", durable="billing"))
    await world.run(1.0)
    await start_publishers(world, "ab", 0.2)
    await world.play(Faults(malformed=(1, 3), kill=(0, 1), disconnect=(0, 1)), SECONDS)


# Nodes without a log.


@scenario(share=0.03)
async def without_a_log(world: World) -> None:
    """Nodes that store nothing, on a network that loses nothing."""
    await world.node("b", program=subscribing("shop/**", queue_events=100_000))
    await world.node("c", log=True, program=subscribing("shop/**", durable="billing"))
    await world.run(1.0)
    program = publishing(world.source("load"), "shop/a", "shop/b", pause_s=0.2, until_s=SECONDS)
    await world.node("a", program=program)
    await world.play(Faults(drop=(0.0,), duplicate=(0.0, 0.05), freeze=(0, 2), kill=(0, 1)), SECONDS)


@scenario(share=0.03)
async def without_a_log_and_disconnected(world: World) -> None:
    """Nodes that store nothing, and whose transport is down at times: what was not sent waits, in order."""
    await world.node("b", program=subscribing("shop/**", queue_events=100_000))
    await world.run(1.0)
    program = publishing(world.source("load"), "shop/a", "shop/b", pause_s=0.05, until_s=SECONDS)
    await world.node("a", program=program)
    await world.run(2.0)

    @world.invariant
    def nothing_is_missing(world: World) -> str | None:
        return f"{len(world.ledger.gaps['b'])} gaps were reported" if world.ledger.gaps.get("b") else None

    chance = world.source("outages")
    for _ in range(world.choose("outages", 1, 5)):
        await world.run(chance.uniform(0.5, 5.0))
        world.disconnect(world.nodes["a"])
        await world.run(chance.uniform(0.1, 4.0))
        world.reconnect(world.nodes["a"])
    await world.run(max(0.0, SECONDS - world.now))


# Handlers and requests.


@scenario(share=0.05)
async def handlers_and_requests(world: World) -> None:
    """Handlers that fail at times, and requests to a node that is killed."""
    chance = world.source("handlers")
    handled: set[tuple[int, int]] = set()
    skipped: list[zbus.Event] = []

    @world.invariant
    def no_event_is_skipped(world: World) -> str | None:
        return f"the handler never succeeded with {skipped[0]}" if skipped else None

    async def service(bus: Any) -> None:
        last: zbus.Event | None = None

        @bus.on("shop/**", durable="billing")
        async def bill(event: zbus.Event) -> None:
            nonlocal last
            if last is not None and last.identity not in handled and last.identity != event.identity:
                skipped.append(last)
            last = event
            await asyncio.sleep(chance.random() * 0.02)
            if chance.random() < 0.1:
                raise ValueError("it fails now and then")
            handled.add(event.identity)

        @bus.serve("prices/quote")
        async def quote(request: Any) -> Any:
            await asyncio.sleep(chance.random() * 0.05)
            return b"price of " + request.payload

        await asyncio.Event().wait()

    async def client(bus: Any) -> None:
        number = 0
        while asyncio.get_running_loop().time() < SECONDS:
            await asyncio.sleep(chance.random() * 0.5)
            number += 1
            with suppress(zbus.RequestError, zbus.TransportError):
                reply = await bus.request("prices/quote", b"%d" % number, timeout=2.0)
                assert reply.payload == b"price of %d" % number

    await world.node("c", log=True, program=service)
    await world.run(1.0)
    program = publishing(world.source("load"), "shop/a", "shop/b", pause_s=0.3, until_s=SECONDS)
    await world.node("a", log=True, program=together(program, client))
    await world.node("b", log=True, program=client)
    await world.play(ORDINARY, SECONDS)
    for _ in range(20):
        with suppress(zbus.RequestError, zbus.TransportError):
            await world.nodes["b"].bus.request("prices/quote", b"at last", timeout=2.0)
            return
        await world.run(0.5)
    raise AssertionError("no request is answered after the faults")


@scenario(share=0.03)
async def slow_subscribers(world: World) -> None:
    """Queues that overflow, with each policy."""
    chance = world.source("reader")

    def slowly(keys: str = "shop/**", **options: Any) -> Program:
        async def program(bus: Any) -> None:
            async with bus.subscribe(keys, queue_events=5, **options) as subscription:
                while True:
                    with suppress(zbus.SubscriberLagged):
                        if await subscription.next() is None:
                            return
                    await asyncio.sleep(chance.random() * 0.1)

        return program

    policies: list[dict[str, Any]] = [{"overflow": each} for each in ("drop_oldest", "drop_newest", "block", "spill")]
    readers = [*(slowly(**each) for each in policies), slowly(durable="slow"), slowly("shop/*/orders", durable="some")]
    await world.node("c", log=True, program=together(*readers))
    await world.run(1.0)
    await start_publishers(world, "ac", 0.15, 20.0)
    await world.play(ORDINARY, 20.0)


# Several transports.


@scenario(share=0.05)
async def two_transports(world: World) -> None:
    """Each node is on two transports, so each event comes twice, in any order."""
    both = ("sim://one", "sim://two")
    await world.node("c", log=True, transports=both, program=subscribing("shop/**", durable="billing"))
    await world.node("b", log=True, transports=both, program=subscribing("shop/**", queue_events=100_000))
    await world.run(1.0)
    program = publishing(world.source("load"), "shop/a", "shop/b", pause_s=0.1, until_s=SECONDS)
    await world.node("a", log=True, transports=both, program=program)
    await world.play(ORDINARY, SECONDS)


@scenario(share=0.03)
async def switching_transports(world: World) -> None:
    """A fleet moves from one transport to another while events are published."""
    old, new = "sim://old", "sim://new"

    async def move(name: str) -> None:
        await asyncio.sleep(world.source(f"move/{name}").uniform(5.0, 20.0))
        with suppress(zbus.BusClosed, zbus.sim.ProcessKilled):
            await world.nodes[name].bus.switch_transport(new, overlap_s=12.0)

    await world.node("c", log=True, transport=old, program=subscribing("shop/**", durable="billing"))
    await world.run(1.0)
    program = publishing(world.source("load"), "shop/a", "shop/b", pause_s=0.15, until_s=SECONDS)
    await world.node("a", log=True, transport=old, program=program)
    faults = Faults(partition=(0, 1), freeze=(0, 1), disconnect=(0, 1), for_s=(0.05, 3.0))
    await asyncio.gather(world.play(faults, SECONDS), move("a"), move("c"))


@scenario(share=0.06)
async def bridged(world: World) -> None:
    """A bridge with a log between two transports. Either side may be down, and the bridge may be killed."""
    await world.bridge("x", ("sim://left", "sim://right"), ["shop/**"], log=True)
    await world.node("c", log=True, transport="sim://right", program=subscribing("shop/**", durable="billing"))
    await world.run(1.0)
    program = publishing(world.source("load"), "shop/a", "shop/b", pause_s=0.2, until_s=SECONDS)
    await world.node("a", log=True, transport="sim://left", program=program)
    await world.play(ORDINARY, SECONDS)


async def ring(world: World) -> None:
    """Three bridges in a ring: no event circulates, and each arrives once."""
    sides = ("sim://one", "sim://two", "sim://three")
    for number in range(3):
        ends = (sides[number], sides[(number + 1) % 3])
        await world.bridge(f"x{number}", ends, ["shop/**"], log=True)
    for name, side in zip("bc", sides[1:], strict=True):
        await world.node(name, log=True, transport=side, program=subscribing("shop/**", durable=f"all-{name}"))
    await world.run(1.0)
    program = publishing(world.source("load"), "shop/a", pause_s=0.3, until_s=15.0)
    await world.node("a", log=True, transport=sides[0], program=program)
    await world.play(Faults(partition=(0, 1), kill=(0, 1), disconnect=(0, 1)), 15.0)


@scenario(share=0.03)
async def ring_of_bridges(world: World) -> None:
    """The same, except for the order of events, which two ways at once do not keep today."""
    world.without(ORDER)
    await ring(world)


@scenario(share=0.04)
async def parallel_bridges(world: World) -> None:
    """Two bridges between the same transports, and a subscriber that stores nothing: what one loses, the other has."""
    world.without(ORDER)
    for number in range(2):
        await world.bridge(f"x{number}", ("sim://left", "sim://right"), ["shop/**"], log=True)
    await world.node("b", transport="sim://right", program=subscribing("shop/**", queue_events=100_000))
    await world.run(1.0)
    program = publishing(world.source("load"), "shop/a", pause_s=0.2, until_s=20.0)
    await world.node("a", log=True, transport="sim://left", program=program)
    await world.play(Faults(one_way=(0, 2), kill=(0, 1), freeze=(0, 1), drop=(0.02, 0.1)), 20.0)


# Known failures: each is run with its seeds until it is fixed.


@scenario(
    known_failure="an event that one bridge lost comes after later ones that another bridge has forwarded",
    known_seeds=range(10),
)
async def order_in_a_ring_of_bridges(world: World) -> None:
    await ring(world)


@scenario(share=0.03)
async def restored_logs(world: World) -> None:
    """A log is replaced by an older copy; what is published afterwards must arrive."""
    await world.node("c", log=True, program=subscribing("shop/**", durable="billing"))
    await world.run(1.0)
    await start_publishers(world, "a", 0.1)
    await world.play(Faults(restore=(1, 1), drop=(0.0, 0.1), for_s=(2.0, 6.0)), SECONDS)


@scenario(share=0.03)
async def cloned_logs(world: World) -> None:
    """A second node starts with a copy of a log, and both publish."""
    await world.node("c", log=True, program=subscribing("shop/**", durable="billing"))
    await world.run(1.0)
    await start_publishers(world, "a", 0.1)
    await world.play(Faults(clone=(1, 1), drop=(0.0, 0.1)), SECONDS)


@scenario(share=0.02)
async def resumed_snapshots(world: World) -> None:
    """A copy of a running machine is resumed, so its log has the same incarnation, until the copies notice each other.

    The events that both publish before that have the same offsets, and must arrive as well.
    """
    await world.node("c", log=True, program=subscribing("shop/**", durable="billing"))
    await world.run(1.0)
    await start_publishers(world, "a", 0.3, 4.0)
    await world.run(5.0)
    copied = world.nodes["a"].disk
    assert copied is not None
    world.disks["a-copy.db"] = copy = copied.copy()
    copy.name, copy.chance, copy.is_resumed = "a-copy.db", world.source("disk/a-copy.db"), True
    world.ledger.log_replaced(copy, world.disks.values())
    other = await world.node("a-copy", log=True)
    one, two = await world.nodes["a"].bus.publisher("shop/a/first"), await other.bus.publisher("shop/a/second")
    if world.choose("apart", 0, 1):  # both publish before one of them is connected
        world.without(ORDER)  # later events arrive live, before the copies separate and the earlier ones are requested
        for name in "ac":
            world.partition(world.nodes[name], other)
        for number in range(world.choose("first", 1, 20)):
            await one.publish(b"one, apart %d" % number)
        for number in range(world.choose("second", 1, 20)):
            await two.publish(b"two, apart %d" % number)
        await world.run(world.choose("seconds", 0, 5))
        await world.heal()
    await one.publish(b"one")
    await two.publish(b"two")  # at the same offset
    await world.until(lambda: copied.incarnations[-1] != copy.incarnations[-1])
    for number in range(world.choose("events", 3, 30)):
        await one.publish(b"one %d" % number)
        await two.publish(b"two %d" % number)
        await world.run(0.1)
    await world.play(Faults(drop=(0.0, 0.05), kill=(0, 1)), 6.0)


@scenario(share=0.02)
async def reverted_machines(world: World) -> None:
    """A machine is reverted to a snapshot while the subscriber is away or cut off: its log is in the same incarnation.

    The events that it publishes afterwards must arrive, although they have the offsets of lost events.
    """
    reader = await world.node("c", log=True, program=subscribing("shop/**", durable="billing"))
    await world.run(1.0)
    node = await world.node("a", log=True)
    publisher = await node.bus.publisher("shop/a/first")
    for number in range(world.choose("before", 1, 20)):
        await publisher.publish(b"before %d" % number)
    assert node.disk is not None
    snapshot = node.disk.copy()
    for number in range(world.choose("lost", 1, 20)):
        await publisher.publish(b"lost %d" % number)
    await world.run(3.0)  # the position is confirmed and stored
    away = world.choose("away", 0, 2)
    if away == 0:
        await reader.stop()
    elif away == 1:
        reader.kill()
    else:
        world.isolate(reader)
    node.kill()
    node.disk.restore(snapshot)
    node.disk.is_resumed = True
    world.ledger.log_replaced(node.disk, world.disks.values())
    await node.start()
    publisher = await node.bus.publisher("shop/a/second")
    for number in range(world.choose("after", 1, 40)):
        await publisher.publish(b"after %d" % number)
    await world.run(1.0)
    await world.heal()
    for number in range(3):
        await publisher.publish(b"later %d" % number)
        await world.run(1.0)
    await world.play(Faults(drop=(0.0, 0.1), kill=(0, 1)), 6.0)


@scenario(share=0.03)
async def wrong_clocks(world: World) -> None:
    """The clock of a node is wrong by 5 or 30 s, and is moved while it runs."""
    off = (-30.0, -5.0, 5.0, 30.0)[world.choose("clock", 0, 3)]
    await world.node("c", log=True, program=subscribing("shop/**", durable="billing"), clock_ahead_s=off)
    await world.run(1.0)
    await start_publishers(world, "ab", 0.2)
    faults = Faults(clock=(0, 2), partition=(0, 1), kill=(0, 2), restart=(0, 1), disconnect=(0, 1))
    await world.play(faults, SECONDS)


@scenario(share=0.03)
async def forged_beacons(world: World) -> None:
    """A stranger sends beacons that claim a position which a log has not reached."""
    await world.node("c", log=True, program=subscribing("shop/**", durable="billing"))
    await world.run(1.0)
    await start_publishers(world, "ab", 0.2)
    await world.play(Faults(forge=(1, 2), kill=(0, 1), drop=(0.0, 0.1), for_s=(1.0, 6.0)), SECONDS)


@scenario(share=0.03)
async def past_events_that_are_owed(world: World) -> None:
    """A durable subscription from the beginning, opened on a node that knew the publisher before."""
    await world.node("c", log=True, program=subscribing("other/**", durable="other"))
    await world.run(1.0)
    await start_publishers(world, "a", 0.2, 10.0)
    await world.play(ORDINARY, 12.0)
    world.nodes["c"].also(subscribing("shop/**", durable="late", start="beginning"))
    await world.until(lambda: is_ready(world, "c", "late"))
    world.ledger.accounts["c", "late"].owes_past()
    await world.play(ORDINARY, 12.0)


@scenario(
    known_failure="a restarted node does not know which sequences it has received, and reports what it has as missing",
    known_seeds=range(205, 225),
)
async def gaps_that_are_not_real(world: World) -> None:
    await absent(world, Faults(kill=(3, 5), for_s=(2.0, 4.0), drop=(0.0,)), most=10)


@scenario(
    known_failure="events of a node without a log that are lost together with a beacon are not reported",
    known_seeds=range(10),
)
async def lossy_without_a_log(world: World) -> None:
    """Nodes that store nothing, on a network that loses events: every loss must be reported."""
    await world.node("b", program=subscribing("shop/**", queue_events=100_000))
    await world.run(1.0)
    program = publishing(world.source("load"), "shop/a", "shop/b", pause_s=0.2, until_s=SECONDS)
    await world.node("a", program=program)
    await world.play(Faults(drop=(0.02, 0.1), partition=(0, 2), one_way=(0, 2), disconnect=(0, 1)), SECONDS)


@scenario(share=0.01)
async def retention_before_the_first_contact(world: World) -> None:
    """A durable subscription is older than events that are removed before their publisher can be reached."""
    await world.node("c", log=True, program=subscribing("shop/**", durable="billing"))
    await world.run(1.0)
    node = await world.node("a", log=True, retain_events=5)
    world.isolate(node)
    publisher = await node.bus.publisher("shop/a")
    for number in range(100):
        await publisher.publish(b"%d" % number)
        await world.run(0.3)
    await world.heal()
    await publisher.publish(b"last")
