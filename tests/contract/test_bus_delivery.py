"""Delivery through a bus: a subscriber receives exactly its keys, once, in order, with an unchanged envelope."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from contract_bus import open_bus, take, two_buses, wanted
from contract_keys import EXPRESSIONS, KEYS
from contract_support import Mesh

import zbus
from zbus.keys import matches

PUBLISHABLE = [key for key in KEYS if not key.startswith("@")]
LATE_S = 0.2

REFUSED = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    "@zbus/x",
    "@",
    "a/*",
    "**",
    "a$*b",
    "a$b",
    "a b",
    "a\tb",
    "a\nb",
    "a\r\nPUB x 1",
    "a\0b",
    "a\x7fb",
    "a\x85b",
    "a\u00a0b",
    "a\u2028b",
    "a#b",
    "a?b",
    "k" * 1025,
    "é" * 513,
    "/".join("s" * 65),
    "a/\ud800",
]


async def test_each_subscription_gets_exactly_what_its_expression_matches(any_transport: Mesh) -> None:
    async with two_buses(any_transport) as (here, there), AsyncExitStack() as stack:
        subscriptions = {each: await stack.enter_async_context(there.subscribe(each)) for each in EXPRESSIONS}
        await wanted(here, [key for key in PUBLISHABLE if any(matches(each, key) for each in EXPRESSIONS)])

        for key in PUBLISHABLE:
            await (await here.publisher(key)).publish(key.encode())
        found = {}
        for expression, subscription in subscriptions.items():
            expected = [key for key in PUBLISHABLE if matches(expression, key)]
            found[expression] = [event.key for event in await take(subscription, len(expected))]
            assert sorted(found[expression]) == sorted(expected), expression
        await asyncio.sleep(LATE_S)

        assert {each: subscription.queued for each, subscription in subscriptions.items() if subscription.queued} == {}
        assert len(EXPRESSIONS) * len(PUBLISHABLE) > 4_000


async def test_a_subscription_with_overlapping_expressions_gets_each_event_once(any_transport: Mesh) -> None:
    async with two_buses(any_transport) as (here, there):
        async with there.subscribe(*EXPRESSIONS) as subscription:
            expected = [key for key in PUBLISHABLE if any(matches(each, key) for each in EXPRESSIONS)]
            await wanted(here, expected)
            for key in PUBLISHABLE:
                await (await here.publisher(key)).publish(b"x")

            assert sorted(event.key for event in await take(subscription, len(expected))) == sorted(expected)
            await asyncio.sleep(LATE_S)
            assert subscription.queued == 0


async def test_events_of_each_publisher_keep_their_order(any_transport: Mesh) -> None:
    async with two_buses(any_transport) as (here, there):
        async with there.subscribe("order/**", queue_events=10_000) as subscription:
            await wanted(here, ["order/x"])
            publishers = [await here.publisher("order/x") for _ in range(4)]

            async def publish(publisher: zbus.EventPublisher) -> None:
                for start in range(0, 500, 50):
                    await publisher.publish_many([b"%d" % number for number in range(start, start + 49)])
                    await publisher.publish(b"%d" % (start + 49))

            await asyncio.gather(*map(publish, publishers))
            events = await take(subscription, 2_000)

    found: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
    for event in events:
        found[event.publisher_id].append((event.sequence, event.payload))
    assert found == {each.publisher_id: [(n, b"%d" % n) for n in range(500)] for each in publishers}


async def test_the_envelope_is_the_same_at_both_ends(any_transport: Mesh) -> None:
    payloads = [b"", b"\0", bytes(range(256)), random.Random(1).randbytes(70_000), "text ü 🚀".encode()]
    headers = {"tenant": "x", "size.of-it_2": "größe ü 🚀", "empty": "", "long": "v" * 1000}
    async with two_buses(any_transport) as (here, there):
        async with there.subscribe("shop/**") as far, here.subscribe("shop/**") as near:
            await wanted(here, ["shop/größe/a.b"])
            publisher = await here.publisher("shop/größe/a.b")
            began = time.time_ns()
            for payload in payloads:
                await publisher.publish(payload, headers=headers)
            sent, received = await take(near, len(payloads)), await take(far, len(payloads))

    for ours, theirs, payload in zip(sent, received, payloads, strict=True):
        for name in ("publisher_id", "sequence", "published_at", "key", "topic", "payload", "headers"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert theirs.payload == payload
        assert theirs.headers.items() >= headers.items()
        assert theirs.topic == "a.b"
    assert [event.sequence for event in received] == list(range(len(payloads)))
    assert {event.publisher_id for event in received} == {publisher.publisher_id}
    assert all(began <= event.published_at <= time.time_ns() for event in received)


async def test_a_payload_of_the_largest_size_arrives_and_a_larger_one_is_refused(any_transport: Mesh) -> None:
    async with two_buses(any_transport) as (here, there), there.subscribe("large/x") as subscription:
        await wanted(here, ["large/x"])
        publisher = await here.publisher("large/x")
        largest = random.Random(2).randbytes(here.config.payload_bytes_max)
        with pytest.raises(zbus.EventTooLarge):
            await publisher.publish(largest + b"x")
        await publisher.publish(largest)
        await publisher.publish(b"after")

        events = await take(subscription, 2)
        assert events[0].payload == largest
        assert events[1].payload == b"after"


async def test_a_key_that_one_transport_could_not_carry_is_refused_on_all(any_transport: Mesh) -> None:
    async with two_buses(any_transport) as (here, there), there.subscribe("**") as subscription:
        await wanted(here, ["after/all"])
        for key in REFUSED:
            with pytest.raises(zbus.KeyInvalid):
                await here.publisher(key)
            with pytest.raises(zbus.KeyInvalid):
                await here.request(key, b"x", timeout=1.0)
            with pytest.raises(zbus.KeyInvalid):
                here.serve(key)(_echo)
        for expression in ("", "/a", "a//b", "a*", "a$b", "***", "a b", "@x$*", "a#b", "a?b", "k" * 1025):
            with pytest.raises(zbus.KeyInvalid):
                there.subscribe(expression)
        await (await here.publisher("after/all")).publish(b"x")

        assert [event.key for event in await take(subscription, 1)] == ["after/all"]
        assert subscription.queued == 0


async def test_nothing_is_received_twice_or_missed_while_subscriptions_come_and_go(any_transport: Mesh) -> None:
    async with two_buses(any_transport) as (here, there):
        async with there.subscribe("kept/x", queue_events=10_000) as kept:
            await wanted(here, ["kept/x"])
            publisher = await here.publisher("kept/x")

            async def come_and_go() -> None:
                for number in range(15):
                    async with there.subscribe("kept/**", f"other/{number}"), there.subscribe("kept/*"):
                        await asyncio.sleep(0.005)

            changing = asyncio.create_task(come_and_go())
            published = 0
            while not changing.done() or published < 500:
                await publisher.publish(b"%d" % published)
                published += 1
                await asyncio.sleep(0.0005)
            await changing

            events = await take(kept, published)
            assert [event.sequence for event in events] == list(range(published))
            await asyncio.sleep(LATE_S)
            assert kept.queued == 0


async def test_a_bus_receives_its_own_events_once(any_transport: Mesh) -> None:
    async with two_buses(any_transport) as (here, there):
        async with here.subscribe("own/**") as near, there.subscribe("own/**") as far:
            await wanted(here, ["own/x"])
            publisher = await here.publisher("own/x")
            for number in range(50):
                await publisher.publish(b"%d" % number)

            for subscription in (near, far):
                assert [event.sequence for event in await take(subscription, 50)] == list(range(50))
            await asyncio.sleep(LATE_S)
            assert (near.queued, far.queued) == (0, 0)


async def test_a_late_publisher_is_found_and_reaches_every_earlier_subscriber(transport: Mesh, tmp_path: Path) -> None:
    took_s = []
    async with open_bus(transport) as there, there.subscribe("late/**") as subscription:
        for number in range(6):
            began = time.monotonic()
            async with open_bus(transport, tmp_path / f"{number}.db") as here:
                publisher = await here.publisher(f"late/{number}")
                for _ in range(3):
                    await publisher.publish(b"x")
                events = await take(subscription, 3)
                took_s.append(time.monotonic() - began)
            assert [(event.key, event.sequence) for event in events] == [(f"late/{number}", n) for n in range(3)]
        assert subscription.queued == 0

    assert sorted(took_s)[len(took_s) // 2] < 1.5, took_s
    assert max(took_s) < 5.0, took_s


async def _echo(request: zbus.Event) -> bytes:
    return request.payload
