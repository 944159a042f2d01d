"""Subscribing: where it starts, what happens when the queue is full, and durable names."""

from __future__ import annotations

import asyncio
import datetime
import resource
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
from inside import node_of

import zbus
from zbus.ports.log import Row


class Order(pydantic.BaseModel):
    id: int


@pytest.fixture
async def bus(log_path: Path) -> AsyncIterator[zbus.Bus]:
    async with zbus.open(log_path) as bus:
        yield bus


async def fill(bus: zbus.Bus, key: str, count: int) -> zbus.EventPublisher:
    publisher = await bus.publisher(key)
    await publisher.publish_many([b"%d" % n for n in range(count)])
    return publisher


async def take(subscription: zbus.EventSubscriber, count: int, within_s: float = 20) -> list[zbus.Event]:
    async with asyncio.timeout(within_s):
        return [await anext(subscription) for _ in range(count)]


async def test_several_expressions_are_one_stream_and_each_event_comes_once(bus: zbus.Bus) -> None:
    async with bus.subscribe("shop/*/created", "shop/**", "audit/**") as subscription:
        for key in ("shop/orders/created", "other/x", "audit/a/b"):
            await (await bus.publisher(key)).publish(b"")
        events = await take(subscription, 2)

        assert [event.key for event in events] == ["shop/orders/created", "audit/a/b"]
        assert subscription.queued == 0


async def test_a_subscription_receives_from_the_moment_it_is_made(bus: zbus.Bus) -> None:
    publisher = await fill(bus, "a/b", 3)
    subscription = bus.subscribe("**")
    await publisher.publish(b"new")

    assert (await take(subscription, 1))[0].payload == b"new"
    await subscription.aclose()


async def test_after_leaves_out_the_event_that_start_would_include(bus: zbus.Bus) -> None:
    publisher = await fill(bus, "a/b", 10)
    stored = [event async for event in bus.replay()]
    moment = datetime.datetime.fromtimestamp(stored[7].published_at / 1e9, datetime.UTC)
    async with (
        bus.subscribe("**", start=8) as including,
        bus.subscribe("**", after=8) as excluding,
        bus.subscribe("**", after=0) as everything,
        bus.subscribe("**", after=moment) as by_time,
    ):
        await publisher.publish(b"live")
        replayed = [event async for event in bus.replay(after=8)]
        assert await take(including, 4) == [*stored[7:8], *replayed]
        assert await take(excluding, 3) == replayed
        assert len(await take(everything, 11)) == 11
        expected = [event async for event in bus.replay(after=moment)]
        assert await take(by_time, len(expected)) == expected


async def test_a_durable_subscription_that_is_new_starts_after_an_offset(bus: zbus.Bus) -> None:
    await fill(bus, "a/b", 5)
    async with bus.subscribe("**", after=3, durable="billing") as subscription:
        event = (await take(subscription, 1))[0]
        assert event.offset == 4
        await event.ack()
    async with bus.subscribe("**", after=0, durable="billing") as subscription:
        assert (await take(subscription, 1))[0].offset == 5  # it resumes: a start is only for a new name


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"after": 3, "start": 4}, "either `start`"),
        ({"after": -1}, "must be from 0"),
        ({"after": 1 << 63}, "must be from 0"),
        ({"start": -1}, "must be from 0"),
        ({"start": datetime.datetime.min}, "not a time"),
        ({"after": True}, "must be an offset or a datetime"),
        ({"after": "beginning"}, "must be an offset or a datetime"),
    ],
)
async def test_after_is_refused_with_the_reason(bus: zbus.Bus, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(zbus.ConfigInvalid, match=reason):
        bus.subscribe("**", **options)


async def test_after_needs_a_log() -> None:
    async with zbus.open() as bus:
        with pytest.raises(zbus.LogRequired):
            bus.subscribe("**", after=3)


async def test_a_start_in_the_past_goes_over_into_live_events(bus: zbus.Bus) -> None:
    publisher = await fill(bus, "a/b", 10)
    async with bus.subscribe("**", start="beginning") as all_of_it, bus.subscribe("**", start=8) as from_offset:
        await publisher.publish(b"live")

        assert [event.offset for event in await take(all_of_it, 11)] == list(range(1, 12))
        assert [event.offset for event in await take(from_offset, 4)] == [8, 9, 10, 11]


async def test_a_start_in_time_begins_with_the_first_event_published_then(bus: zbus.Bus) -> None:
    publisher = await fill(bus, "a/b", 5)
    first_after = [event async for event in bus.replay()][-1].published_at // 1000 * 1000 + 2000
    while (await _now_ns()) < first_after + 1000:
        await asyncio.sleep(0)
    moment = datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(microseconds=first_after // 1000)
    offset = await publisher.publish(b"later")

    async with bus.subscribe("**", start=moment) as subscription:
        assert (await take(subscription, 1))[0].offset == offset


async def _now_ns() -> int:
    import time

    return time.time_ns()


# Lag.


async def test_the_ranges_of_two_lags_do_not_overlap(bus: zbus.Bus) -> None:
    publisher = await bus.publisher("a/b")
    spans: list[tuple[int, int, int]] = []
    async with bus.subscribe("a/b", queue_events=4) as subscription:
        for _ in range(2):
            await publisher.publish_many([b"x"] * 10)
            with pytest.raises(zbus.SubscriberLagged) as caught:
                await subscription.next()
            spans.append((caught.value.missed, caught.value.after, caught.value.until))

    assert spans == [(6, 0, 6), (10, 6, 16)]


# The four overflow policies.


async def test_drop_newest_keeps_the_first_events_and_tells_where_to_replay_from(bus: zbus.Bus) -> None:
    async with bus.subscribe("a/**", queue_events=2, overflow="drop_newest") as subscription:
        publisher = await fill(bus, "a/b", 5)

        seen = [event.offset for event in await take(subscription, 2)]
        with pytest.raises(zbus.SubscriberLagged) as caught:
            await take(subscription, 1)
        await publisher.publish(b"after")
        following = await take(subscription, 1)

        lag = caught.value
        missed = [event.offset async for event in bus.replay(*lag.keys, after=lag.after, until=lag.until)]
        assert seen == [1, 2]
        assert (lag.missed, lag.after, lag.until, subscription.dropped) == (3, 2, 5, 3)
        assert missed == [3, 4, 5]
        assert following[0].offset == 6


async def test_drop_oldest_keeps_the_last_events_and_tells_first_what_is_missing(bus: zbus.Bus) -> None:
    async with bus.subscribe("a/**", queue_events=2) as subscription:
        publisher = await bus.publisher("a/b")
        await publisher.publish(b"")
        await take(subscription, 1)
        await publisher.publish_many([b""] * 5)

        with pytest.raises(zbus.SubscriberLagged) as caught:
            await take(subscription, 1)
        seen = [event.offset for event in await take(subscription, 2)]

        assert (caught.value.missed, caught.value.after, caught.value.until) == (3, 1, 4)
        assert seen == [5, 6]
        assert subscription.dropped == 3
        assert bus.stats()["dropped_queue_full"] == 3


async def test_without_a_log_a_drop_is_counted_and_reported_as_final() -> None:
    async with zbus.open() as bus, bus.subscribe("**", queue_events=2) as subscription:
        publisher = await bus.publisher("a/b")
        await publisher.publish_many([b""] * 3)

        with pytest.raises(zbus.SubscriberLagged, match="no log to replay them from"):
            await anext(subscription)
        assert subscription.dropped == 1


@pytest.mark.parametrize("log", [None, "memory"])
async def test_block_lets_publishers_wait_and_loses_nothing(log: str | None) -> None:
    async with zbus.open(log) as bus, bus.subscribe("a/**", queue_events=10, overflow="block") as subscription:
        publisher, other = await bus.publisher("a/b"), await bus.publisher("free/x")
        done = 0

        async def publish() -> None:
            nonlocal done
            for n in range(100):
                await publisher.publish(b"%d" % n)
                done += 1

        publishing = asyncio.create_task(publish())
        async with asyncio.timeout(10):
            while subscription.queued < 10:
                await asyncio.sleep(0)
            for _ in range(50):
                await other.publish(b"a key that nobody full wants is not held up")
        held_at = done
        events = await take(subscription, 100)
        await publishing

        assert held_at <= 11
        assert [int(event.payload) for event in events] == list(range(100))
        assert subscription.dropped == 0


async def test_closing_a_full_blocking_subscription_frees_its_publishers() -> None:
    async with zbus.open() as bus:
        subscription = bus.subscribe("a/**", queue_events=1, overflow="block")
        publisher = await bus.publisher("a/b")
        publishing = asyncio.create_task(publisher.publish_many([b""] * 3000))
        async with asyncio.timeout(10):
            while subscription.queued < 1:
                await asyncio.sleep(0)
            await subscription.aclose()
            assert len(await publishing) == 3000


async def test_a_slow_reader_that_spills_sees_every_one_of_200_000_events_with_bounded_memory(bus: zbus.Bus) -> None:
    total = 200_000
    async with bus.subscribe("a/**", queue_events=1000, overflow="spill") as subscription:
        publisher = await bus.publisher("a/b")
        await publisher.publish_many([b"x" * 100] * 10_000)
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        most_queued = 0

        async def publish() -> None:
            for _ in range(19):
                await publisher.publish_many([b"x" * 100] * 10_000)

        async def read() -> list[int]:
            nonlocal most_queued
            seen = []
            async for event in subscription:
                seen.append(event.offset)
                if len(seen) == total:
                    return seen
                if len(seen) % 1000 == 0:
                    most_queued = max(most_queued, subscription.queued)
                    await asyncio.sleep(0.001)  # the slow part
            raise AssertionError("the stream ended")

        async with asyncio.timeout(100):
            _, seen = await asyncio.gather(publish(), read())

        grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024
        assert seen == list(range(1, total + 1))
        assert subscription.dropped == 0
        assert bus.stats()["spilled"] >= 1
        assert most_queued <= 1000
        assert grown_mb < 60  # the offsets that this test collects are 8 of them


async def test_an_event_that_was_read_from_the_log_before_it_was_delivered_comes_once(bus: zbus.Bus) -> None:
    """A commit is readable a moment before the loop hears of it: made to last here, by appending behind its back."""
    assert node_of(bus).log is not None
    await fill(bus, "a/b", 1500)
    loop = asyncio.get_running_loop()
    stored: asyncio.Future[object] = loop.create_future()
    rows = [Row(7, sequence, 1, "a/b", b"%d" % sequence, None) for sequence in range(3)]
    commits = node_of(bus).commits
    assert commits is not None
    commits._mailbox.pause()
    node_of(bus).log.append(rows, lambda answer: loop.call_soon_threadsafe(stored.set_result, answer), None)
    await stored

    async with bus.subscribe("**", start="beginning", overflow="spill", queue_events=10) as subscription:
        read = [event.offset for event in await take(subscription, 1503)]
        waiting = asyncio.create_task(take(subscription, 1))
        async with asyncio.timeout(10):
            while not subscription.is_live:
                await asyncio.sleep(0.001)
        commits._mailbox.resume()
        await (await bus.publisher("a/b")).publish(b"3")

        assert read == list(range(1, 1504))
        assert [event.offset for event in await waiting] == [1504]


async def test_a_reader_that_caught_up_is_live_again(bus: zbus.Bus) -> None:
    async with bus.subscribe("a/**", queue_events=10, overflow="spill") as subscription:
        publisher = await fill(bus, "a/b", 5000)
        assert not subscription.is_live
        await take(subscription, 5000)
        waiting = asyncio.create_task(take(subscription, 1))
        async with asyncio.timeout(10):
            while not subscription.is_live:
                await asyncio.sleep(0.001)
        await publisher.publish(b"live")

        assert (await waiting)[0].offset == 5001


# Durable names.


async def test_a_durable_name_resumes_after_its_last_acknowledged_event(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        await fill(bus, "a/b", 10)
        async with bus.subscribe("**", start="beginning", durable="billing") as subscription:
            events = await take(subscription, 3)
            await events[-1].ack()
            await take(subscription, 1)  # handed over, never acknowledged
        async with bus.subscribe("**", start="beginning", durable="billing") as subscription:
            assert (await take(subscription, 1))[0].offset == 4

    async with zbus.open(log_path) as bus, bus.subscribe("**", durable="billing") as subscription:
        assert [event.offset for event in await take(subscription, 7)] == list(range(4, 11))


async def test_asking_for_the_next_event_acknowledges_the_last(bus: zbus.Bus) -> None:
    await fill(bus, "a/b", 10)
    async with bus.subscribe("**", start="beginning", durable="billing") as subscription:
        await take(subscription, 6)
    async with bus.subscribe("**", durable="billing") as subscription:
        assert (await take(subscription, 1))[0].offset == 6


async def test_a_new_durable_name_starts_where_it_was_made_also_after_a_crash(bus: zbus.Bus) -> None:
    publisher = await fill(bus, "a/b", 10)
    async with bus.subscribe("**", durable="billing"):
        pass
    await publisher.publish(b"while away")
    async with bus.subscribe("**", durable="billing") as subscription:
        assert (await take(subscription, 1))[0].payload == b"while away"


async def test_a_durable_name_has_one_reader_at_a_time(bus: zbus.Bus) -> None:
    async with bus.subscribe("**", durable="billing"):
        with pytest.raises(zbus.CursorError, match=r"process \d+ holds its lease"):
            async with bus.subscribe("**", durable="billing"):
                pass
    async with bus.subscribe("**", durable="billing"):
        pass


async def test_a_durable_name_never_drops(bus: zbus.Bus) -> None:
    async with bus.subscribe("a/**", durable="billing", queue_events=3) as subscription:
        await fill(bus, "a/b", 3000)
        assert [event.offset for event in await take(subscription, 3000)] == list(range(1, 3001))
    with pytest.raises(zbus.ConfigInvalid, match="never drops"):
        bus.subscribe("a/**", durable="x", overflow="drop_newest")


async def test_a_durable_name_for_rare_keys_moves_on_past_the_events_of_others(bus: zbus.Bus) -> None:
    async with bus.subscribe("rare/**", durable="rare") as subscription:
        waiting = asyncio.create_task(take(subscription, 1))
        await fill(bus, "common/x", 2000)
        await (await bus.publisher("rare/x")).publish(b"")
        await waiting
        waiting = asyncio.create_task(anext(subscription))
        await fill(bus, "common/x", 2000)
        assert node_of(bus).log is not None
        async with asyncio.timeout(10):
            while node_of(bus).log.cursors.list()[0].offset < 4001:
                await asyncio.sleep(0.005)
        waiting.cancel()


# Schemas and the shape of it.


async def test_a_schema_refuses_what_does_not_fit_and_goes_on(bus: zbus.Bus) -> None:
    async with bus.subscribe("**", schema=Order) as subscription:
        publisher = await bus.publisher("a/b")
        for payload in ({"id": 1}, {"id": "x"}, {"id": 3}):
            await publisher.publish(payload)

        assert (await anext(subscription)).decode() == Order(id=1)
        with pytest.raises(zbus.PayloadInvalid, match="offset 2 on 'a/b'") as caught:
            await anext(subscription)
        assert caught.value.event is not None
        assert caught.value.event.payload == b'{"id":"x"}'
        assert (await anext(subscription)).decode() == Order(id=3)


async def test_two_tasks_that_read_one_subscription_get_an_error(bus: zbus.Bus) -> None:
    async with bus.subscribe("**") as subscription:
        reading = asyncio.create_task(anext(subscription))
        await asyncio.sleep(0)
        with pytest.raises(zbus.ZbusError, match="already being read"):
            await anext(subscription)
        reading.cancel()


@pytest.mark.parametrize(
    "options", [{"start": "yesterday"}, {"queue_events": 0}, {"overflow": "explode"}, {"start": True}]
)
async def test_a_wrong_option_is_refused_with_its_name(bus: zbus.Bus, options: dict[str, object]) -> None:
    with pytest.raises(zbus.ConfigInvalid, match=next(iter(options))):
        bus.subscribe("**", **options)  # type: ignore[arg-type]


async def test_what_is_queued_can_be_read_after_the_subscription_was_closed(bus: zbus.Bus) -> None:
    subscription = bus.subscribe("**")
    await fill(bus, "a/b", 3)
    await subscription.aclose()
    await fill(bus, "a/b", 3)

    assert [event.offset async for event in subscription] == [1, 2, 3]
    assert await subscription.next() is None
