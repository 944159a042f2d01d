"""Records as events: bounded, numbered by name, and at the time of the node's clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest
from mesh_fakes import Counts, FakeRuntime

from zbus.event import Event
from zbus.observe import record_feed as module
from zbus.observe.record_feed import RecordFeed
from zbus.observe.records import EVENT_RETRY, record


class Feed:
    def __init__(self) -> None:
        self.runtime, self.counts = FakeRuntime(), Counts()
        self.bursts: list[Sequence[Event]] = []
        self.feed = RecordFeed(logging.INFO, self.bursts.append, self.counts.add, self.runtime)

    @property
    def events(self) -> list[Event]:
        return [event for burst in self.bursts for event in burst]


async def test_records_of_one_turn_of_the_loop_are_sent_together_with_a_sequence_for_each_name() -> None:
    here = Feed()
    for number in range(3):
        record(EVENT_RETRY, number=number)
    record("OTHER")
    await asyncio.sleep(0)
    here.feed.close()

    assert len(here.bursts) == 1
    assert [(event.key, event.sequence) for event in here.events] == [
        ("@zbus/record/EVENT_RETRY", 0),
        ("@zbus/record/EVENT_RETRY", 1),
        ("@zbus/record/EVENT_RETRY", 2),
        ("@zbus/record/OTHER", 0),
    ]
    assert len({event.publisher_id for event in here.events}) == 2


async def test_the_time_and_the_publisher_come_from_the_runtime_of_the_node() -> None:
    here = Feed()
    here.runtime.now += 5
    record(EVENT_RETRY)
    await asyncio.sleep(0)
    here.feed.close()

    (event,) = here.events
    assert (event.published_at, event.publisher_id) == (here.runtime.time_ns(), 1)


async def test_records_that_do_not_fit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 3)
    here = Feed()
    for _ in range(5):
        record(EVENT_RETRY)
    await asyncio.sleep(0)
    here.feed.close()

    assert len(here.events) == 3
    assert here.counts == {"dropped_records": 2}


async def test_a_record_about_records_makes_no_event() -> None:
    here = Feed()
    record(EVENT_RETRY, keys=["@zbus/record/*"])
    record(EVENT_RETRY, keys=["shop/x"])
    await asyncio.sleep(0)
    here.feed.close()

    assert len(here.events) == 1
