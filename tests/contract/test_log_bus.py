"""A bus on every kind of log: what users are promised does not depend on dense offsets, fresh reads or one writer."""

from __future__ import annotations

import asyncio
import datetime
import pickle
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from fake_log import FakeLane, Fault, History
from inside import node_of
from log_contract import SimLogs

import zbus
from zbus import introspection, plugins
from zbus.ports.log import Log, Promise
from zbus_web.events.publish import Publication, put_once
from zbus_web.http.http_errors import HttpError

WAIT_S = 20.0
Open = Callable[..., Awaitable[zbus.Bus]]


def install(monkeypatch: pytest.MonkeyPatch, scheme: str, open_log: Callable[[zbus.BusConfig], Log]) -> None:
    """Open the logs of a scheme, as if an installed package had one."""
    load = plugins._load

    def load_or(group: str, name: str, field: str) -> Any:
        return open_log if (group, name) == ("zbus.logs", scheme) else load(group, name, field)

    monkeypatch.setattr(plugins, "_load", load_or)


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> History:
    """The history behind `fake://…`."""
    found = History()
    install(monkeypatch, "fake", lambda config: found.open(str(config.log)[7:], read_only=config.read_only))
    return found


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimLogs]:
    """The simulated disk behind `sim://…`."""
    found = SimLogs(tmp_path)
    install(monkeypatch, "sim", lambda config: found.open_as(read_only=config.read_only))
    yield found
    found.close()


@pytest.fixture(params=["sqlite", "memory", "fake", "sim"])
def url(request: pytest.FixtureRequest, history: History, simulated: SimLogs, tmp_path: Path) -> str:
    return {"sqlite": str(tmp_path / "app.db"), "memory": "memory", "fake": "fake://a", "sim": "sim://a"}[request.param]


def fake_of(bus: zbus.Bus) -> FakeLane:
    log = node_of(bus).log
    assert isinstance(log, FakeLane)
    return log


async def take(subscription: zbus.EventSubscriber, count: int) -> list[zbus.Event]:
    async with asyncio.timeout(WAIT_S):
        return [await anext(subscription) for _ in range(count)]


async def nothing_more(subscription: zbus.EventSubscriber) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await anext(subscription)


def payloads(events: list[zbus.Event]) -> list[int]:
    return [int(event.payload) for event in events]


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


# Publishing, subscribing, replaying.


async def test_a_subscriber_receives_what_is_published_with_the_offsets_that_the_publisher_gets(url: str) -> None:
    async with zbus.open(url) as bus, bus.subscribe("a/**") as subscription:
        publisher = await bus.publisher("a/b")
        offsets = [await publisher.publish(b"0"), *await publisher.publish_many(numbers(1, 300))]
        found = await take(subscription, 300)
        await nothing_more(subscription)

    assert payloads(found) == list(range(300))
    assert [event.offset for event in found] == offsets
    assert offsets == sorted(set(offsets))


async def test_a_replay_has_everything_that_was_acknowledged_before_it(url: str) -> None:
    async with zbus.open(url) as bus:
        publisher = await bus.publisher("a/b")
        for number in range(5):
            offsets = await publisher.publish_many(numbers(100 * number, 100 * number + 100))
            async with asyncio.timeout(WAIT_S):
                found = [event async for event in bus.replay("**")]
            assert payloads(found) == list(range(100 * number + 100))
            assert await bus.head() == offsets[-1]


async def test_a_replay_between_two_offsets_has_what_is_between_also_if_no_event_has_them(url: str) -> None:
    async with zbus.open(url) as bus:
        offsets = await (await bus.publisher("a/b")).publish_many(numbers(0, 200))
        for until in range(offsets[50], offsets[55]):
            async with asyncio.timeout(WAIT_S):
                found = [event async for event in bus.replay("**", after=offsets[20], until=until)]
            assert [event.offset for event in found] == [each for each in offsets[21:] if each <= until]


async def test_replay_goes_over_to_live_events_without_a_gap_or_a_repetition(url: str) -> None:
    async with zbus.open(url) as bus:
        publisher = await bus.publisher("a/b")
        await publisher.publish_many(numbers(0, 700))

        async def publish() -> None:
            for first in range(700, 1500, 20):
                await publisher.publish_many(numbers(first, first + 20))
                await asyncio.sleep(0)

        publishing = asyncio.create_task(publish())
        async with bus.subscribe("a/**", start="beginning", queue_events=50, overflow="spill") as subscription:
            found = await take(subscription, 1500)
            await nothing_more(subscription)
            await publishing
            assert subscription.is_live

    assert payloads(found) == list(range(1500))


@pytest.mark.parametrize("start", ["offset", "time"])
async def test_a_subscription_starts_at_an_offset_or_a_time(url: str, start: str) -> None:
    async with zbus.open(url) as bus:
        publisher = await bus.publisher("a/b")
        await publisher.publish_many(numbers(0, 50))
        moment = datetime.datetime.now(datetime.UTC)
        await asyncio.sleep(0.002)
        offsets = await publisher.publish_many(numbers(50, 100))
        async with bus.subscribe("**", start=offsets[0] if start == "offset" else moment) as subscription:
            found = await take(subscription, 50)
            await publisher.publish(b"100")
            found += await take(subscription, 1)

    assert payloads(found) == list(range(50, 101))


async def test_a_slow_subscriber_that_spills_loses_nothing(url: str) -> None:
    async with zbus.open(url) as bus, bus.subscribe("a/**", queue_events=10, overflow="spill") as subscription:
        publisher, other = await bus.publisher("a/b"), await bus.publisher("x/y")
        for first in range(0, 1000, 100):
            await publisher.publish_many(numbers(first, first + 100))
            await other.publish_many([b"other"] * 10)
        found = await take(subscription, 1000)
        await nothing_more(subscription)

    assert payloads(found) == list(range(1000))


async def test_what_a_lagging_subscriber_missed_can_be_replayed_from_its_error(url: str) -> None:
    async with zbus.open(url) as bus, bus.subscribe("a/**", queue_events=10) as subscription:
        publisher = await bus.publisher("a/b")
        await publisher.publish_many(numbers(0, 100))
        with pytest.raises(zbus.SubscriberLagged) as caught:
            await anext(subscription)
        missed = [event async for event in bus.replay("a/**", after=caught.value.after, until=caught.value.until)]
        rest = await take(subscription, 10)

    assert caught.value.missed == len(missed) == 90
    assert payloads(missed + rest) == list(range(100))


async def test_putting_an_event_twice_stores_it_once(url: str) -> None:
    event = zbus.Event(7, 3, 1, "a/b", b"1", {})
    async with zbus.open(url) as bus, bus.subscribe("**") as subscription:
        (first,) = await bus.put(event)
        (again,) = await bus.put(event)
        (found,) = await take(subscription, 1)
        await nothing_more(subscription)
        stored = [each.identity async for each in bus.replay("**")]

    assert (first.first, again.first) == (True, False)
    assert first == again == found.offset
    assert stored == [(7, 3)]


# Durable subscriptions.


async def test_a_durable_subscription_goes_on_where_it_stopped(url: str) -> None:
    async with zbus.open(url) as bus:
        publisher = await bus.publisher("a/b")
        await publisher.publish_many(numbers(0, 200))
        async with bus.subscribe("**", durable="worker", start="beginning") as subscription:
            first = await take(subscription, 120)
            await first[-1].ack()
        async with bus.subscribe("**", durable="worker") as subscription:
            rest = await take(subscription, 80)
            await nothing_more(subscription)

    assert payloads(first + rest) == list(range(200))


async def test_a_durable_subscription_has_what_was_stored_while_its_node_was_away(history: History) -> None:
    """Reads are stale after the restart: the head is one that has less than the tail begins after."""
    async with zbus.open("fake://a") as bus, bus.subscribe("**", durable="worker") as subscription:
        await (await bus.publisher("a/b")).publish_many(numbers(0, 10))
        await (await take(subscription, 10))[-1].ack()
    async with zbus.open("fake://b") as other:
        await (await other.publisher("a/b")).publish_many(numbers(10, 300))
        async with zbus.open("fake://a") as bus, bus.subscribe("**", durable="worker") as subscription:
            await (await other.publisher("a/b")).publish_many(numbers(300, 350))
            await (await bus.publisher("a/b")).publish_many(numbers(350, 400))
            found = await take(subscription, 390)
            await nothing_more(subscription)

    assert payloads(found) == list(range(10, 400))


async def test_a_durable_subscription_whose_lease_ended_learns_it_and_the_new_holder_goes_on(history: History) -> None:
    async with zbus.open("fake://a") as bus, zbus.open("fake://b") as other:
        async with bus.subscribe("**", durable="worker", start="beginning") as subscription:
            await (await bus.publisher("a/b")).publish_many(numbers(0, 20))
            found = await take(subscription, 10)
            await found[4].ack()
            with pytest.raises(zbus.CursorError, match="lane a"):
                await other.subscribe("**", durable="worker").__aenter__()
            fake_of(bus).silent = True
            history.pass_time(31.0)
            async with other.subscribe("**", durable="worker") as taken_over:
                with pytest.raises(zbus.CursorError, match="lease"):
                    await found[9].ack()
                after = await take(taken_over, 15)
        assert history.cursors["worker"].offset >= found[4].offset

    assert payloads(after) == list(range(5, 20))


async def test_the_lag_of_a_durable_subscription_is_what_the_log_counts(url: str) -> None:
    async with zbus.open(url) as bus:
        offsets = await (await bus.publisher("a/b")).publish_many(numbers(0, 100))
        async with bus.subscribe("**", durable="worker", start="beginning") as subscription:
            await (await take(subscription, 10))[-1].ack()
            log = node_of(bus).log
            assert log is not None
            expected = log.count(offsets[9], offsets[-1])
            (reader,) = introspection.of(bus).subscriptions()
            (position,) = await introspection.of(bus).positions()
            reported = bus.stats()["cursors"]

    assert expected >= 90
    assert (reader.lag, position.lag, reported) == (expected, expected, {"worker": expected})


# Outcomes that are not known.


@pytest.mark.parametrize(("fault", "first"), [("stored, answer lost", False), ("lost", True)])
async def test_a_publish_with_an_unknown_outcome_says_so_and_can_be_put_again(
    history: History, fault: Fault, first: bool
) -> None:
    async with zbus.open("fake://a") as bus, bus.subscribe("**") as subscription:
        publisher = await bus.publisher("a/b")
        await publisher.publish(b"0")
        fake_of(bus).faults.append(fault)
        with pytest.raises(zbus.LogError, match="the outcome is unknown") as caught:
            await publisher.publish(b"1")
        counted = bus.stats()["outcome_unknown"]
        (again,) = await bus.put(*caught.value.events)
        await publisher.publish(b"2")
        found = await take(subscription, 3)
        await nothing_more(subscription)

    assert (counted, caught.value.outcome) == (1, "unknown")
    assert again.first is first
    assert pickle.loads(pickle.dumps(caught.value)).events == caught.value.events
    assert payloads(found) == [0, 1, 2]
    assert [entry.row.sequence for entry in history.entries] == [0, 1, 2]


async def test_a_refused_publish_is_no_unknown_outcome_and_stores_nothing(history: History) -> None:
    async with zbus.open("fake://a") as bus:
        publisher = await bus.publisher("a/b")
        fake_of(bus).faults.append("refused")
        with pytest.raises(zbus.LogError, match="not stored") as caught:
            await publisher.publish(b"1")
        counted, stored = bus.stats().get("outcome_unknown", 0), len(history.entries)
        (again,) = await bus.put(*caught.value.events)

    assert (counted, stored, caught.value.outcome) == (0, 0, "refused")
    assert (again.first, again.sequence) == (True, 0)


async def test_many_events_that_were_stored_in_part_are_counted_and_can_be_put_again(history: History) -> None:
    async with zbus.open("fake://a") as bus, bus.subscribe("**") as subscription:
        publisher = await bus.publisher("a/b")
        fake_of(bus).faults.append("stored in part, answer lost")
        with pytest.raises(zbus.LogError, match="the outcome is unknown") as caught:
            await publisher.publish_many(numbers(0, 250))
        counted, stored = bus.stats()["outcome_unknown"], len(history.entries)
        again = await bus.put(*caught.value.events)
        found = await take(subscription, 250)
        await nothing_more(subscription)

    assert (counted, stored) == (250, 100)
    assert caught.value.__notes__ == ["0 events of this call are stored; 250 more may be"]
    assert [offset.first for offset in again] == [False] * 100 + [True] * 150
    assert payloads(found) == list(range(250))


async def test_only_the_events_that_are_not_known_to_be_stored_are_put_again(history: History) -> None:
    async with zbus.open("fake://a") as bus:
        publisher = await bus.publisher("a/b")

        def payloads() -> Iterator[bytes]:
            yield from numbers(0, 4000)  # four commits, which are in flight together
            fake_of(bus).faults.append("stored, answer lost")
            yield from numbers(4000, 4500)

        with pytest.raises(zbus.LogError) as caught:
            await publisher.publish_many(payloads())
        again = await bus.put(*caught.value.events)

    assert caught.value.__notes__ == ["4000 events of this call are stored; 500 more may be"]
    assert [event.sequence for event in caught.value.events] == list(range(4000, 4500))
    assert not any(offset.first for offset in again)
    assert len(history.entries) == 4500


async def test_the_payloads_of_a_session_that_may_be_stored_are_counted(history: History) -> None:
    async with zbus.open("fake://a") as bus:
        fake_of(bus).faults.append("stored, answer lost")
        with pytest.raises(zbus.LogError) as caught:
            await bus.session("alice").publish_many("a/b", numbers(0, 20))

    assert caught.value.__notes__ == ["0 payloads of this call are stored; 20 more may be"]
    assert len(caught.value.events) == 40


# Many writers.


async def test_two_nodes_that_share_one_history_see_the_same_events_in_the_same_order(history: History) -> None:
    async with AsyncExitStack() as stack:
        buses = [await stack.enter_async_context(zbus.open(f"fake://{lane}")) for lane in ("a", "b")]
        subscriptions = [await stack.enter_async_context(bus.subscribe("**")) for bus in buses]

        async def publish(bus: zbus.Bus, key: str) -> None:
            publisher = await bus.publisher(key)
            for number in range(40):
                await publisher.publish_many(numbers(5 * number, 5 * number + 5))

        await asyncio.gather(publish(buses[0], "from/a"), publish(buses[1], "from/b"))
        found = [await take(each, 400) for each in subscriptions]
        published = [bus.stats()["published"] for bus in buses]
        replayed = [[event.offset async for event in bus.replay("**")] for bus in buses]

    assert [event.offset for event in found[0]] == [event.offset for event in found[1]]
    assert [event.offset for event in found[0]] == replayed[0] == replayed[1] == sorted(replayed[0])
    for key in ("from/a", "from/b"):
        assert payloads([event for event in found[0] if event.key == key]) == list(range(200))
    assert published == [200, 200]


async def test_a_subscription_of_one_node_spills_and_catches_up_with_the_events_of_the_other(history: History) -> None:
    async with zbus.open("fake://a") as bus, zbus.open("fake://b") as other:
        async with bus.subscribe("**", queue_events=10, overflow="spill") as subscription:
            await (await other.publisher("a/b")).publish_many(numbers(0, 500))
            found = await take(subscription, 500)
            await nothing_more(subscription)

    assert payloads(found) == list(range(500))


# The guarantees of the log.


async def test_the_stats_have_the_promise_of_the_log(url: str) -> None:
    async with zbus.open(url) as bus:
        log = node_of(bus).log
        assert log is not None
        reported = bus.stats()["log"]["promise"]

        assert reported == log.promise._asdict()
        assert reported.keys() == set(Promise._fields)


async def test_a_scheme_that_no_package_has_is_an_error_that_names_those_installed(tmp_path: Path) -> None:
    with pytest.raises(zbus.ConfigInvalid, match=r"there is no log 'oracle'.*memory.*sqlite"):
        await zbus.open("oracle://somewhere").start()


async def test_the_scheme_of_sqlite_is_a_path(tmp_path: Path) -> None:
    async with zbus.open(f"sqlite://{tmp_path}/app.db") as bus:
        await (await bus.publisher("a/b")).publish(b"1")

    assert (tmp_path / "app.db").is_file()


# HTTP


async def test_a_repeated_post_is_recognized_although_reads_are_stale(url: str) -> None:
    async with zbus.open(url) as bus:
        await (await bus.publisher("a/b")).publish_many(numbers(0, 200))
        first = await put_once(bus, Publication("a/b", b"x", None, "key"))
        again = [await put_once(bus, Publication("a/b", b"x", None, "key")) for _ in range(3)]
        with pytest.raises(HttpError) as caught:
            await put_once(bus, Publication("a/b", b"another", None, "key"))

    assert first[1]
    assert again == [(first[0], False)] * 3
    assert caught.value.code == "idempotency_mismatch"
