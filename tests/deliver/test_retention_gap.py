"""A subscription that retention has passed: it is notified once of what it missed, and resumes at the log's start."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from inside import node_of

import zbus
from zbus.deliver.subscriber import EventSubscriber
from zbus.observe.records import EVENT_GAP
from zbus_log import Rules, SqliteLog

EVENTS, LEFT = 9000, 1000


async def prune(bus: zbus.Bus, events: int = LEFT) -> None:
    log = node_of(bus).log
    assert isinstance(log, SqliteLog)
    await asyncio.to_thread(log.prune, Rules(max_events=events, ignore_cursors=True))


async def fill(bus: zbus.Bus, events: int = EVENTS) -> None:
    await (await bus.publisher("a/b")).publish_many([b"x"] * events)


async def read(subscription: EventSubscriber, events: int) -> tuple[list[int], list[zbus.LogTrimmed]]:
    """Read as a user does who catches the error and continues."""
    offsets: list[int] = []
    errors: list[zbus.LogTrimmed] = []
    while len(offsets) < events:
        try:
            event = await asyncio.wait_for(subscription.next(), 5)
        except zbus.LogTrimmed as error:
            errors.append(error)
            assert len(errors) < 10, "the same error again and again"
            continue
        assert event is not None
        offsets.append(event.offset)
    return offsets, errors


def gaps_in(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [getattr(each, "zbus", {}) for each in caplog.records if each.name == "zbus"]
    return [each for each in found if each.get("record") == EVENT_GAP]


async def test_a_spilling_subscription_resumes_after_one_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "zbus")
    async with zbus.open(tmp_path / "app.db") as bus:
        await fill(bus, 10)
        async with (
            bus.subscribe("a/**", overflow="spill", queue_events=100) as subscription,
            bus.subscribe("@zbus/gap") as gaps,
        ):
            await fill(bus, 20_000)
            await prune(bus)

            before, none = await read(subscription, 100)
            after, errors = await read(subscription, LEFT)

            gap = await asyncio.wait_for(gaps.next(), 5)
        assert none == []
        assert [(each.after, each.low_water, each.missed) for each in errors] == [
            (before[-1], 20_010 - LEFT, 20_010 - LEFT - before[-1])
        ]
        assert after == list(range(20_010 - LEFT + 1, 20_011))
        assert bus.stats()["missed_by_retention"] == errors[0].missed
        assert gap is not None
        expected = {"after": before[-1], "until": 20_010 - LEFT, "missed": errors[0].missed, "durable": None}
        assert json.loads(gap.payload) == expected | {"keys": ["a/**"], "open": False}
    (reported,) = gaps_in(caplog)
    assert expected.items() <= reported.items()


async def test_a_subscription_at_position_0_is_notified_too(tmp_path: Path) -> None:
    async with zbus.open(tmp_path / "app.db") as bus:
        async with bus.subscribe("a/**", durable="d", queue_events=100) as subscription:
            await fill(bus, 20_000)
            await prune(bus)
            offsets, errors = await read(subscription, LEFT)

    assert [(each.after, each.low_water) for each in errors] == [(0, 20_000 - LEFT)]
    assert offsets == list(range(20_000 - LEFT + 1, 20_001))


@pytest.mark.parametrize("read_before", [0, 5])
async def test_a_durable_subscription_is_notified_once_and_its_position_moves_on(
    tmp_path: Path, read_before: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "zbus")
    async with zbus.open(tmp_path / "app.db") as bus:
        async with bus.subscribe("a/**", durable="d", start="beginning") as subscription:
            await fill(bus)
            await read(subscription, read_before)
        await prune(bus)

        async with bus.subscribe("a/**", durable="d", start="beginning") as subscription:
            offsets, errors = await read(subscription, 3)
        async with bus.subscribe("a/**", durable="d") as subscription:
            again, no_errors = await read(subscription, 1)

    acknowledged = max(0, read_before - 1)  # the last one that was read was not acknowledged
    assert [(each.after, each.low_water, each.missed) for each in errors] == [
        (acknowledged, EVENTS - LEFT, EVENTS - LEFT - acknowledged)
    ]
    assert offsets == [8001, 8002, 8003]
    assert (again, no_errors) == ([8003], [])
    assert [(each["durable"], each["code"]) for each in gaps_in(caplog)] == [("d", "gap_retention")]


async def test_a_durable_subscription_that_was_only_notified_is_not_notified_again(tmp_path: Path) -> None:
    async with zbus.open(tmp_path / "app.db") as bus:
        async with bus.subscribe("a/**", durable="d", start="beginning"):
            pass
        await fill(bus)
        await prune(bus)
        async with bus.subscribe("a/**", durable="d") as subscription:
            with pytest.raises(zbus.LogTrimmed):
                await subscription.next()
            first = await subscription.next()
        async with bus.subscribe("a/**", durable="d") as subscription:
            offsets, errors = await read(subscription, 1)

    assert first is not None
    assert (first.offset, offsets, errors) == (8001, [8001], [])


@pytest.mark.parametrize("durable", [None, "new"])
async def test_a_subscription_from_the_beginning_starts_with_the_oldest_event_and_missed_nothing(
    tmp_path: Path, durable: str | None
) -> None:
    async with zbus.open(tmp_path / "app.db") as bus:
        await fill(bus)
        await prune(bus)

        async with bus.subscribe("a/**", durable=durable, start="beginning") as subscription:
            first = await read(subscription, 1)
        if durable:  # the position says where it began, so nothing is reported now either
            async with bus.subscribe("a/**", durable=durable) as subscription:
                assert await read(subscription, 1) == ([8001], [])
        assert "missed_by_retention" not in bus.stats()

    assert first == ([8001], [])


async def test_a_subscription_that_starts_at_removed_events_continues_after_them(tmp_path: Path) -> None:
    async with zbus.open(tmp_path / "app.db") as bus:
        await fill(bus)
        await prune(bus)

        async with bus.subscribe("a/**", after=100) as subscription:
            offsets, errors = await read(subscription, 2)

    assert (offsets, [(each.after, each.low_water) for each in errors]) == ([8001, 8002], [(100, 8000)])


@pytest.mark.parametrize("durable", [None, "service"])
async def test_a_handler_that_retention_passed_continues(tmp_path: Path, durable: str | None) -> None:
    handled: list[int] = []
    slow = asyncio.Event()
    async with zbus.open(tmp_path / "app.db") as bus:

        @bus.on("a/**", durable=durable, start="beginning", overflow="spill", queue_events=100)
        async def handle(event: zbus.Event) -> None:
            handled.append(event.offset)
            await slow.wait()

        await fill(bus, 20_000)
        while not handled:
            await asyncio.sleep(0.01)
        await prune(bus)
        slow.set()
        await fill(bus, 1)
        async with asyncio.timeout(10):
            while handled[-1] < 20_001:
                await asyncio.sleep(0.01)
        assert bus.stats()["missed_by_retention"] > 0

    assert handled[-LEFT:] == list(range(20_002 - LEFT, 20_002))
    assert len(handled) < 20_000
