"""The gate: publishers wait while a reason concerns them, are served in order, and every closing is counted."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from mesh_fakes import FakeRuntime, recorded

from zbus.observe.records import EVENT_BACKPRESSURE
from zbus.publish.backpressure import RECORD_EVERY_S, Gate
from zbus.util.runtime import Runtime


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_gate_that_is_open_lets_everybody_through() -> None:
    gate = Gate()

    await gate.wait(lambda reasons: True)

    assert (gate.shut, gate.closings) == (False, 0)


async def test_publishers_are_served_in_the_order_of_their_arrival() -> None:
    gate, served = Gate(), list[int]()
    gate.close("log", "code", "the log is behind")

    async def publish(number: int) -> None:
        await gate.wait(lambda reasons: True)
        served.append(number)

    waiting = [asyncio.create_task(publish(number)) for number in range(50)]
    await settle()
    assert served == []

    gate.open("log")
    await asyncio.gather(*waiting)

    assert served == list(range(50))


async def test_the_gate_stays_shut_while_one_of_two_reasons_is_left() -> None:
    gate = Gate()
    gate.close("log", "code", "the log is behind")
    gate.close("reader", "code", "a reader is full")
    waiting = asyncio.create_task(gate.wait(lambda reasons: True))
    await settle()

    gate.open("log")
    await settle()
    assert gate.shut
    assert not waiting.done()

    gate.open("reader")
    await waiting
    assert not gate.shut


async def test_a_publisher_waits_only_for_the_reasons_that_concern_it() -> None:
    gate = Gate()
    gate.close("log", "code", "the log is behind")
    gate.close("reader", "code", "a reader is full")
    waiting = asyncio.create_task(gate.wait(lambda reasons: "reader" in reasons))
    await gate.wait(lambda reasons: reasons.isdisjoint({"log", "reader"}))  # another publisher: nothing concerns it
    await settle()

    gate.open("reader")
    await waiting

    assert gate.shut


async def test_a_publisher_that_is_cancelled_leaves_nothing_behind() -> None:
    gate = Gate()
    gate.close("log", "code", "the log is behind")
    first, second = (asyncio.create_task(gate.wait(lambda reasons: True)) for _ in range(2))
    await settle()

    first.cancel()
    await settle()
    gate.open("log")
    await second

    assert first.cancelled()
    assert gate._waiters == {}


async def test_every_closing_is_counted_and_recorded_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zbus")
    now, runtime = [0.0], Runtime()
    runtime.monotonic = lambda: now[0]
    gate = Gate(runtime)

    def records() -> list[Any]:
        found = [each.zbus for each in caplog.records if each.name == "zbus"]
        return [each["closings_total"] for each in found if each["record"] == EVENT_BACKPRESSURE]

    for _ in range(3):
        gate.close("log", "code", "the log is behind")
        gate.close("log", "code", "the log is behind")  # it is shut for this reason already
        gate.open("log")
    assert (gate.closings, records()) == (3, [1])

    now[0] += RECORD_EVERY_S
    gate.close("log", "code", "the log is behind")
    assert (gate.closings, records()) == (4, [1, 4])


async def test_a_reason_that_was_never_given_cannot_be_taken_away() -> None:
    gate = Gate()
    gate.close("log", "code", "the log is behind")

    gate.open("reader")

    assert gate.shut


async def test_both_reasons_may_be_taken_away_before_the_publisher_runs() -> None:
    gate = Gate()
    gate.close("log", "code", "the log is behind")
    gate.close("reader", "code", "a reader is full")
    waiting = asyncio.create_task(gate.wait(lambda reasons: True))
    await settle()

    gate.open("log")
    gate.open("reader")

    await waiting


async def test_the_record_names_the_reason_and_the_number_of_closings() -> None:
    gate = Gate(FakeRuntime())

    with recorded() as found:
        gate.close("log", "code", "the log is behind")

    about = {"code": "code", "reason": "the log is behind", "closings_total": 1}
    assert found == [{"level": logging.INFO, "record": EVENT_BACKPRESSURE, **about}]
