"""Backpressure: publishers wait while a reason concerns them, in the order of their arrival; each time is counted."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from mesh_fakes import FakeRuntime, recorded

from zbus.observe.records import EVENT_BACKPRESSURE
from zbus.publish.backpressure import RECORD_EVERY_S, Backpressure
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
