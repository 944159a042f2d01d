"""Everything is counted by reason; the log hears of each source once a minute; a flood is bounded."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from zbus.observe.counters import Counters
from zbus.observe.records import EVENT_DROPPED, TRANSPORT_INPUT_REJECTED
from zbus.observe.throttle import EVERY_S, KEYS_MAX
from zbus.util.run_id import run_id
from zbus.util.runtime import Runtime


@pytest.fixture
def reported(caplog: pytest.LogCaptureFixture) -> Any:
    """What was written so far, as fields."""
    caplog.set_level(logging.WARNING, "zbus")
    return lambda: [each.zbus for each in caplog.records if each.name == "zbus"]


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def runtime(clock: list[float]) -> Runtime:
    found = Runtime()
    found.monotonic = lambda: clock[0]
    return found


def test_everything_is_counted_by_reason_and_shown_in_order(reported: Any) -> None:
    counts = Counters("test")
    counts.add("late")
    counts.add("late", 4)
    counts.report(EVENT_DROPPED, "full", "a", 3)
    counts.report(EVENT_DROPPED, "full", "a", 2)
    assert list(counts.snapshot().items()) == [("full", 5), ("late", 5)]
    assert [each["code"] for each in reported()] == ["full"]


def test_a_record_names_the_transport_the_code_the_reason_the_source_and_the_total(reported: Any) -> None:
    counts = Counters("test")
    counts.add("invalid_topic", 6)
    counts.report(TRANSPORT_INPUT_REJECTED, "invalid_topic", "x" * 1_000, detail="no key")
    expected = {"record": TRANSPORT_INPUT_REJECTED, "transport": "test", "code": "invalid_topic", "source": "x" * 200}
    expected["reason"] = "The topic of a message is malformed."
    assert reported() == [expected | {"count_total": 7, "detail": "no key", "correlation_id": run_id.get()}]


def test_each_source_is_reported_once_a_minute_for_each_reason(reported: Any) -> None:
    counts = Counters("test")
    for _ in range(500):
        counts.report(TRANSPORT_INPUT_REJECTED, "topic", "a")
        counts.report(TRANSPORT_INPUT_REJECTED, "topic", "b")
        counts.report(TRANSPORT_INPUT_REJECTED, "mark", "a")
    assert [(each["code"], each["source"]) for each in reported()] == [("topic", "a"), ("topic", "b"), ("mark", "a")]
    assert counts.snapshot() == {"mark": 500, "topic": 1_000}


def test_a_source_is_reported_again_when_its_time_is_over(reported: Any, clock: list[float], runtime: Runtime) -> None:
    counts = Counters("test", runtime)
    for _ in range(3):
        counts.report(TRANSPORT_INPUT_REJECTED, "topic", "a")
    clock[0] += EVERY_S
    counts.report(TRANSPORT_INPUT_REJECTED, "topic", "a")
    assert [each["count_total"] for each in reported()] == [1, 4]


def test_a_flood_of_sources_is_counted_and_only_so_many_are_reported(reported: Any) -> None:
    counts = Counters("test")
    for number in range(KEYS_MAX + 500):
        counts.report(TRANSPORT_INPUT_REJECTED, "topic", f"source {number}")
    assert counts.snapshot() == {"topic": KEYS_MAX + 500}
    assert [each["source"] for each in reported()] == [f"source {number}" for number in range(KEYS_MAX)]


def test_after_a_flood_new_sources_are_reported_again(reported: Any, clock: list[float], runtime: Runtime) -> None:
    counts = Counters("test", runtime)
    for number in range(KEYS_MAX):
        counts.report(TRANSPORT_INPUT_REJECTED, "topic", f"source {number}")
    counts.report(TRANSPORT_INPUT_REJECTED, "topic", "a late one")
    assert len(reported()) == KEYS_MAX
    clock[0] += EVERY_S
    counts.report(TRANSPORT_INPUT_REJECTED, "topic", "a late one")
    assert reported()[-1]["source"] == "a late one"


def test_threads_lose_no_count_and_tell_once(reported: Any) -> None:
    counts = Counters("test")

    def work() -> None:
        for _ in range(2_000):
            counts.report(TRANSPORT_INPUT_REJECTED, "topic", "a")
            counts.add("late")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert counts.snapshot() == {"late": 8_000, "topic": 8_000}
    assert len(reported()) == 1
