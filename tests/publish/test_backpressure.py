"""Backpressure: publishers wait while a reason concerns them, in the order of their arrival; each time is counted."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from mesh_fakes import FakeRuntime, recorded

import zbus
from zbus.observe.records import EVENT_BACKPRESSURE
from zbus.publish import backpressure as module
from zbus.publish.backpressure import RECORD_EVERY_S, WAKE_MAX, Backpressure
from zbus.util.runtime import Runtime


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_no_publisher_waits_without_a_reason() -> None:
    backpressure = Backpressure(FakeRuntime())

    await backpressure.wait(lambda reasons: True)

    assert (backpressure.blocked, backpressure.blocked_count) == (False, 0)


async def test_publishers_are_served_in_the_order_of_their_arrival() -> None:
    backpressure, served = Backpressure(FakeRuntime()), list[int]()
    backpressure.block("log", "code", "the log is behind")

    async def publish(number: int) -> None:
        await backpressure.wait(lambda reasons: True)
        served.append(number)

    waiting = [asyncio.create_task(publish(number)) for number in range(50)]
    await settle()
    assert served == []

    backpressure.unblock("log")
    await asyncio.gather(*waiting)

    assert served == list(range(50))


async def test_a_publisher_that_arrives_when_a_reason_was_just_removed_waits_behind_the_others() -> None:
    backpressure, served = Backpressure(FakeRuntime()), list[str]()
    backpressure.block("log", "code", "the log is behind")

    async def publish(name: str) -> None:
        await backpressure.wait(lambda reasons: "log" in reasons)
        served.append(name)

    waiting = [asyncio.create_task(publish(name)) for name in ("first", "second")]
    await settle()
    backpressure.unblock("log")
    await asyncio.gather(publish("late"), *waiting)
    await settle()

    assert served == ["first", "second", "late"]
    assert not backpressure.blocked


async def test_a_publisher_of_another_key_does_not_wait_behind_the_others() -> None:
    backpressure, served = Backpressure(FakeRuntime()), list[str]()
    backpressure.block("reader", "code", "a reader is full")

    async def publish(name: str, reason: str) -> None:
        await backpressure.wait(lambda reasons: reason in reasons)
        served.append(name)

    waiting = asyncio.create_task(publish("waiting", "reader"))
    await settle()
    backpressure.unblock("reader")
    await publish("other", "another reader")
    await waiting

    assert served == ["other", "waiting"]


async def test_publishers_that_are_blocked_again_keep_their_places_and_share_the_capacity() -> None:
    backpressure, served = Backpressure(FakeRuntime()), list[int]()

    async def publish(number: int) -> None:
        while True:
            if backpressure.blocked:
                await backpressure.wait(lambda reasons: True)
            served.append(number)
            backpressure.block("queue of one", "code", "it is full")

    tasks = [asyncio.create_task(publish(number)) for number in range(5)]
    for _ in range(20):
        await settle()
        backpressure.unblock("queue of one")
    await settle()
    for task in tasks:
        task.cancel()

    assert served == [0, *[*range(5)] * 4]  # nothing was blocked when the first one came


async def test_more_waiters_than_are_woken_in_one_turn_are_all_served_in_order() -> None:
    backpressure, served = Backpressure(FakeRuntime()), list[int]()
    backpressure.block("log", "code", "the log is behind")

    async def publish(number: int) -> None:
        await backpressure.wait(lambda reasons: True)
        served.append(number)

    tasks = [asyncio.create_task(publish(number)) for number in range(WAKE_MAX * 2 + 10)]
    await settle()
    tasks[7].cancel()
    backpressure.unblock("log")
    await asyncio.wait(tasks)
    await settle()

    assert served == [number for number in range(WAKE_MAX * 2 + 10) if number != 7]
    assert (backpressure.blocked, backpressure._waiters, backpressure._clearing) == (False, {}, {})


async def test_publishers_wait_while_one_of_two_reasons_is_left() -> None:
    backpressure = Backpressure(FakeRuntime())
    backpressure.block("log", "code", "the log is behind")
    backpressure.block("reader", "code", "a reader is full")
    waiting = asyncio.create_task(backpressure.wait(lambda reasons: True))
    await settle()

    backpressure.unblock("log")
    await settle()
    assert backpressure.blocked
    assert not waiting.done()

    backpressure.unblock("reader")
    await waiting
    assert not backpressure.blocked


async def test_a_publisher_waits_only_for_the_reasons_that_concern_it() -> None:
    backpressure = Backpressure(FakeRuntime())
    backpressure.block("log", "code", "the log is behind")
    backpressure.block("reader", "code", "a reader is full")
    waiting = asyncio.create_task(backpressure.wait(lambda reasons: "reader" in reasons))
    await backpressure.wait(lambda reasons: reasons.isdisjoint({"log", "reader"}))  # no reason concerns another one
    await settle()

    backpressure.unblock("reader")
    await waiting

    assert backpressure.blocked


async def test_a_publisher_that_is_cancelled_leaves_nothing_behind() -> None:
    backpressure = Backpressure(FakeRuntime())
    backpressure.block("log", "code", "the log is behind")
    first, second = (asyncio.create_task(backpressure.wait(lambda reasons: True)) for _ in range(2))
    await settle()

    first.cancel()
    await settle()
    backpressure.unblock("log")
    await second

    assert first.cancelled()
    assert backpressure._waiters == {}


async def test_every_reason_is_counted_and_recorded_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zbus")
    now, runtime = [0.0], Runtime()
    runtime.monotonic = lambda: now[0]
    backpressure = Backpressure(runtime)

    def records() -> list[Any]:
        found = [each.zbus for each in caplog.records if each.name == "zbus"]
        return [each["blocked_total"] for each in found if each["record"] == EVENT_BACKPRESSURE]

    for _ in range(3):
        backpressure.block("log", "code", "the log is behind")
        backpressure.block("log", "code", "the log is behind")  # this reason is known already
        backpressure.unblock("log")
    assert (backpressure.blocked_count, records()) == (3, [1])

    now[0] += RECORD_EVERY_S
    backpressure.block("log", "code", "the log is behind")
    assert (backpressure.blocked_count, records()) == (4, [1, 4])


async def test_a_reason_that_was_never_given_cannot_be_taken_away() -> None:
    backpressure = Backpressure(FakeRuntime())
    backpressure.block("log", "code", "the log is behind")

    backpressure.unblock("reader")

    assert backpressure.blocked


async def test_both_reasons_may_be_taken_away_before_the_publisher_runs() -> None:
    backpressure = Backpressure(FakeRuntime())
    backpressure.block("log", "code", "the log is behind")
    backpressure.block("reader", "code", "a reader is full")
    waiting = asyncio.create_task(backpressure.wait(lambda reasons: True))
    await settle()

    backpressure.unblock("log")
    backpressure.unblock("reader")

    await waiting


async def test_the_record_names_the_reason_and_the_number_of_closings() -> None:
    backpressure = Backpressure(FakeRuntime())

    with recorded() as found:
        backpressure.block("log", "code", "the log is behind")

    about = {"code": "code", "reason": "the log is behind", "blocked_total": 1}
    assert found == [{"level": logging.INFO, "record": EVENT_BACKPRESSURE, **about}]


class FullSubscription:
    key_exprs = ("a/**",)


async def test_a_publisher_that_waits_for_a_subscription_which_is_not_read_is_reported_once() -> None:
    runtime = FakeRuntime()
    backpressure, subscription = Backpressure(runtime), FullSubscription()
    with recorded(logging.WARNING) as found:
        backpressure.block(subscription, "queue_full", "a subscription's queue is full")
        backpressure.block("log", "commit_behind", "the log is behind")
        waiting = asyncio.create_task(backpressure.wait(lambda reasons: not reasons.isdisjoint({subscription, "log"})))
        await settle()
        runtime.advance(module.STALLED_S * 0.9)
        backpressure.progressed(subscription)  # it is read, however slowly
        runtime.advance(module.STALLED_S * 0.9)
        backpressure._report_stalled()
        assert found == []

        for _ in range(3):
            runtime.advance(module.STALLED_S)
            backpressure._report_stalled()
        backpressure.unblock(subscription)
        backpressure.unblock("log")
        await waiting

    (record,) = found
    assert (record["record"], record["code"]) == (EVENT_BACKPRESSURE, "subscription_not_read")
    assert (record["keys"], record["blocked_total"]) == (("a/**",), 2)
    assert "Read it in another task" in record["reason"]


async def test_publishing_and_reading_in_one_task_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "STALLED_S", 0.05)
    with recorded(logging.WARNING) as found:
        async with zbus.open("memory") as bus:
            publisher = await bus.publisher("a/b")
            async with bus.subscribe("a/**", queue_events=2, overflow="block"):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.5):
                        for number in range(5):
                            await publisher.publish(number)

    assert [each["code"] for each in found] == ["subscription_not_read"]
