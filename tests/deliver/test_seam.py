"""The seam between the log and live events: nothing is missed there, and nothing comes twice."""

from __future__ import annotations

import pytest
from deliver_support import KEY, FakeHost, FakeLog, soon

import zbus
from zbus.deliver import dispatcher
from zbus.deliver.subscriber import EventSubscriber
from zbus.keys import KeySet

ALL = KeySet(["**"])


async def sequences(subscription: EventSubscriber, most: int = 1000) -> list[int]:
    """What can be read now."""
    found: list[int] = []
    while len(found) < most and (event := await soon(subscription)) is not None:
        found.append(event.sequence)
    return found


def recent(host: FakeHost, after: int, limit: int = 1000, keys: KeySet = ALL) -> list[int] | None:
    found = host.dispatcher.recent_after(after, limit, keys)
    return None if found is None else [event.offset for event in found]


@pytest.mark.parametrize("step", [1, 10], ids=["dense", "with-gaps"])
def test_memory_has_exactly_the_events_after_an_offset(step: int) -> None:
    host = FakeHost(FakeLog(step))
    for events in (3, 1, 4):
        host.store(events)
    offsets = [event.offset for event in host.log.stored] if host.log is not None else []

    assert recent(host, 0) == offsets
    for at, offset in enumerate(offsets):
        assert recent(host, offset) == offsets[at + 1 :]
        assert recent(host, offset, len(offsets) - at - 1) == offsets[at + 1 :]
        if at + 2 <= len(offsets):
            assert recent(host, offset, len(offsets) - at - 2) is None
    assert recent(host, offsets[-1] + 5) == []


def test_memory_that_lacks_the_first_event_after_an_offset_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "RECENT_EVENTS", 5)
    host = FakeHost(FakeLog(10))
    for events in (2, 3, 2):
        host.store(events)  # the first two are forgotten

    assert recent(host, 0) is None
    assert recent(host, 10) is None
    assert recent(host, 20) == [30, 40, 50, 60, 70]
    assert recent(host, 25) == [30, 40, 50, 60, 70]


def test_memory_forgets_by_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "RECENT_BYTES", 10)
    host = FakeHost(FakeLog())
    assert host.log is not None
    for _ in range(3):
        rows = host.rows(1, 1, KEY, b"12345")
        host.dispatcher.stored(rows, host.log.add(rows))

    assert recent(host, 0) is None
    assert recent(host, 1) == [2, 3]


def test_only_events_of_the_keys_count_towards_the_limit() -> None:
    host = FakeHost(FakeLog())
    host.store(2, "a/b")
    host.store(50, "busy/x")
    host.store(1, "a/b")

    assert recent(host, 0, 3, KeySet(["a/**"])) == [1, 2, 53]
    assert recent(host, 0, 2, KeySet(["a/**"])) is None
    assert recent(host, 2, 1, KeySet(["a/**"])) == [53]


def test_a_log_that_was_there_before_this_node_is_not_in_memory() -> None:
    host = FakeHost(FakeLog())
    host.dispatcher.delivered = 7

    assert recent(host, 7) == []
    assert recent(host, 6) is None
    assert host.log is not None
    rows = host.rows(2, 1)
    host.dispatcher.stored(rows, [8, 9])
    assert recent(host, 6) is None
    assert recent(host, 7) == [8, 9]


@pytest.mark.parametrize("step", [1, 10], ids=["dense", "with-gaps"])
@pytest.mark.parametrize("behind", range(8))
async def test_a_subscription_that_catches_up_sees_each_event_once(step: int, behind: int) -> None:
    host = FakeHost(FakeLog(step))
    host.store(200)
    subscription = host.subscribe(queue_events=4, start="beginning")
    seen = await sequences(subscription, 200)  # a page and a part of one
    for _ in range(behind):
        host.store(1)
    seen += await sequences(subscription)
    assert subscription.is_live
    host.store(2)
    seen += await sequences(subscription)

    assert seen == list(range(202 + behind))
    await subscription.aclose()


async def test_a_subscription_one_event_behind_joins_from_memory_without_another_page() -> None:
    host = FakeHost(FakeLog())
    host.store(3)
    subscription = host.subscribe(queue_events=4, start=2)
    log = host.log
    assert log is not None

    assert await sequences(subscription) == [1, 2]
    assert log.pages == 0
    await subscription.aclose()


async def test_a_start_too_far_back_for_memory_is_read_from_the_log_first() -> None:
    host = FakeHost(FakeLog())
    host.store(3)
    subscription = host.subscribe(queue_events=2, start="beginning")
    log = host.log
    assert log is not None

    assert await sequences(subscription) == [0, 1, 2]
    assert log.pages == 1
    await subscription.aclose()


async def test_events_that_come_while_a_page_is_read_are_seen_once() -> None:
    host = FakeHost(FakeLog(3))
    host.store(300)
    subscription = host.subscribe(queue_events=4, start="beginning")
    seen: list[int] = []
    while len(seen) < 400:
        event = await soon(subscription)
        assert event is not None
        seen.append(event.sequence)
        if len(seen) <= 300 and len(seen) % 3 == 0:
            host.store(1)

    assert seen == list(range(400))
    assert await soon(subscription) is None
    await subscription.aclose()


@pytest.mark.parametrize("ahead", [1, 2, 3])
async def test_a_stored_event_that_was_read_from_the_log_is_not_offered_again(ahead: int) -> None:
    host = FakeHost(FakeLog())
    assert host.log is not None
    host.dispatcher.delivered = 1
    host.log.add(host.rows(1, 1))
    subscription = host.subscribe(queue_events=10, start="beginning")
    rows = host.rows(ahead, 1)
    offsets = host.log.add(rows)  # readable, but its commit has not come back
    assert await sequences(subscription) == list(range(1 + ahead))

    host.dispatcher.stored(rows, offsets)
    host.store(1)

    assert await sequences(subscription) == [1 + ahead]
    await subscription.aclose()


async def test_a_bad_event_is_met_again_until_it_can_be_read() -> None:
    host = FakeHost(FakeLog(10))
    host.store(5)
    subscription = host.subscribe(queue_events=1, start="beginning")
    assert host.log is not None
    host.log.bad = 30
    assert await sequences(subscription, 2) == [0, 1]
    for _ in range(2):
        with pytest.raises(zbus.LogError, match="a bad event"):
            await soon(subscription)
    host.log.bad = None

    assert await sequences(subscription) == [2, 3, 4]
    await subscription.aclose()


async def test_corrupt_events_that_are_skipped_are_counted() -> None:
    host = FakeHost(FakeLog())
    host.store(3)
    subscription = host.subscribe(queue_events=1, start="beginning")
    assert host.log is not None
    host.log.skipped = 2

    await sequences(subscription)

    assert host.counts["corrupt_skipped"] == 2
    await subscription.aclose()


async def test_delivered_events_are_counted_once_each_whether_live_or_from_the_log() -> None:
    host = FakeHost(FakeLog())
    host.store(5)
    subscription = host.subscribe(queue_events=3, start="beginning", overflow="spill")
    await sequences(subscription)
    host.store(10)
    host.store(1)
    await sequences(subscription)
    host.store(2)

    assert host.dispatcher.deliveries == 18
    await subscription.aclose()
