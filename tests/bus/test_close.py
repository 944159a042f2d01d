"""Closing ends within `close_timeout_s`, whatever the log and the transports do, and reports what it gave up."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_log import History
from inside import bus_over, node_of

import zbus
from zbus import plugins
from zbus_log.file import sqlite_driver

TIMEOUT_S = 0.5
LIMIT_S = 4.0  # less than the default limit of 5 s, and more than a busy machine adds


async def closed_in(bus: zbus.Bus) -> float:
    began = time.monotonic()
    await bus.aclose()
    return time.monotonic() - began


def written(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, Any]]:
    return [each.zbus for each in caplog.records if getattr(each, "zbus", {}).get("record") == name]  # type: ignore[attr-defined]


@contextmanager
def write_lock(path: str) -> Iterator[None]:
    """Hold the write lock of an SQLite file, as a process does that hangs in the middle of a write."""
    connection = sqlite_driver.connect(path)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.close()


async def test_closing_ends_in_time_while_another_process_locks_the_cursors(
    log_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bus = zbus.open(log_path, close_timeout_s=TIMEOUT_S)
    await bus.start()
    names = [f"d{number}" for number in range(4)]
    subscriptions = [bus.subscribe("**", durable=name, start="beginning") for name in names]
    await (await bus.publisher("a/b")).publish_many([b"1", b"2"])
    for each in subscriptions:
        await anext(each)
    with write_lock(f"{log_path}-cursors"):
        for each in subscriptions:
            await anext(each)  # acknowledges the first

        took_s = await closed_in(bus)

    assert took_s < LIMIT_S
    unstored = written(caplog, "DURABLE_NOT_STORED")
    assert sorted(each["durable"] for each in unstored) == names
    assert {each["code"] for each in unstored} == {"durable_not_stored"}
    async with zbus.open(log_path) as bus, bus.subscribe("**", durable="d0") as again:
        assert (await anext(again)).payload in (b"1", b"2")  # nothing is lost: the second was never acknowledged


async def test_closing_ends_in_time_while_a_read_of_the_log_hangs(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with zbus.open(log_path) as bus:
        await (await bus.publisher("a/b")).publish(b"")
    bus = zbus.open(log_path, close_timeout_s=TIMEOUT_S)
    await bus.start()
    log = node_of(bus).log
    assert log is not None
    reading, go_on, read = threading.Event(), threading.Event(), log.read

    def hang(*args: Any) -> Any:
        reading.set()
        go_on.wait(30)
        return read(*args)

    monkeypatch.setattr(log, "read", hang)
    waiting = asyncio.create_task(bus.subscribe("**", start="beginning").next())
    assert await asyncio.to_thread(reading.wait, 10)
    try:
        assert await closed_in(bus) < LIMIT_S
    finally:
        go_on.set()
    await asyncio.wait((waiting,), timeout=10)


async def test_closing_ends_in_time_while_a_transport_is_opened_that_never_replies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    open_fabric, opening, go_on = plugins.open_fabric, threading.Event(), threading.Event()

    def hang(*args: Any) -> Any:
        opening.set()
        go_on.wait(30)
        return open_fabric(*args)

    monkeypatch.setattr(plugins, "open_fabric", hang)
    bus = zbus.open(close_timeout_s=TIMEOUT_S)
    starting = asyncio.create_task(bus.start())
    assert await asyncio.to_thread(opening.wait, 10)
    try:
        assert await closed_in(bus) < LIMIT_S
    finally:
        go_on.set()
    with pytest.raises(zbus.BusClosed):
        await asyncio.wait_for(starting, 10)


async def test_publishers_that_the_log_never_answers_get_an_error_when_the_bus_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "zbus")
    lane = History().open()
    bus = bus_over(lane, close_timeout_s=TIMEOUT_S)
    await bus.start()
    publisher = await bus.publisher("a/b")
    lane.held.clear()
    waiting: list[asyncio.Task[Any]] = [
        asyncio.create_task(publisher.publish(b"1")),
        asyncio.create_task(publisher.publish_many([b"2", b"3"])),
        asyncio.create_task(bus.put(zbus.Event(1, 1, 1, "a/b", b"4"))),
        asyncio.create_task(bus.session("alice").publish("a/b", b"5")),
    ]
    await asyncio.sleep(0)
    try:
        assert await closed_in(bus) < LIMIT_S
        done, pending = await asyncio.wait(waiting, timeout=10)
    finally:
        lane.held.set()

    assert not pending
    assert {type(each.exception()) for each in done} == {zbus.LogError}
    assert all("unknown" in str(each.exception()) for each in done)
    (stopped,) = written(caplog, "BUS_STOPPED")
    assert stopped["counts"]["outcome_unknown"] == 6


def open_slowly(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let opening a log begin, and end only when the second event is set."""
    open_log, opening, go_on = plugins.open_log, threading.Event(), threading.Event()

    def slow(config: Any) -> Any:
        opening.set()
        go_on.wait(30)
        return open_log(config)

    monkeypatch.setattr(plugins, "open_log", slow)
    return opening, go_on


async def test_a_log_whose_opening_was_cancelled_can_be_opened_at_once(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, go_on = open_slowly(monkeypatch)
    starting = asyncio.create_task(zbus.open(log_path).start())
    assert await asyncio.to_thread(opening.wait, 10)
    starting.cancel()
    asyncio.get_running_loop().call_later(0.05, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await starting

    async with zbus.open(log_path):
        pass


async def test_closing_a_bus_while_it_starts_makes_the_start_fail_and_frees_the_log(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, go_on = open_slowly(monkeypatch)
    bus = zbus.open(log_path)
    starting = asyncio.create_task(bus.start())
    assert await asyncio.to_thread(opening.wait, 10)
    asyncio.get_running_loop().call_later(0.05, go_on.set)
    await bus.aclose()

    with pytest.raises(zbus.BusClosed):
        await asyncio.wait_for(starting, 10)
    async with zbus.open(log_path):
        pass


@pytest.mark.parametrize("turns", range(1, 12))
async def test_closing_at_any_time_of_the_start_raises_nothing_but_bus_closed(log_path: Path, turns: int) -> None:
    bus = zbus.open(log_path)
    starting = asyncio.create_task(bus.start())
    for _ in range(turns):
        await asyncio.sleep(0.002 if turns % 2 else 0)
    await bus.aclose()

    (result,) = await asyncio.wait_for(asyncio.gather(starting, return_exceptions=True), 10)
    assert result is None or isinstance(result, zbus.BusClosed)
    assert not node_of(bus).is_open
    async with zbus.open(log_path):
        pass


@pytest.mark.parametrize("durable", [None, "billing"])
async def test_a_closed_bus_does_not_stay_in_memory_while_events_wait_in_a_subscription(durable: str | None) -> None:
    """The garbage collector does not see events, so no cycle may lead through one."""

    async def use() -> list[weakref.ref[Any]]:
        async with zbus.open("memory") as bus, bus.subscribe("a/**", durable=durable) as subscription:
            publisher = await bus.publisher("a/b")
            await publisher.publish(b"0")
            assert (await anext(subscription)).payload == b"0"
            await publisher.publish_many([b"1", b"2", b"3"])
            assert subscription.queued == 3
            return [weakref.ref(bus), weakref.ref(node_of(bus)), weakref.ref(subscription)]

    kept = await use()
    gc.collect()
    gc.collect()

    assert [reference() for reference in kept] == [None, None, None]
