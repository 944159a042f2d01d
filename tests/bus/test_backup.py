"""`bus.backup`: beside publishers, with progress, cancelled, and while the bus closes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import zbus
from zbus.errors import BusClosed, LogRequired
from zbus_log.backup import log_copy, make


async def test_a_bus_backs_up_its_log_while_it_publishes(tmp_path: Path) -> None:
    async with zbus.open(tmp_path / "app.db") as bus:
        publisher = await bus.publisher("shop/orders")
        await publisher.publish_many([b"%d" % number for number in range(5_000)])
        seen: list[tuple[int, int]] = []
        publishing = asyncio.create_task(publisher.publish_many([b"more"] * 500))

        made = await bus.backup(tmp_path / "app.zbus", progress=lambda *at: seen.append(at))
        await publishing
        again = await bus.backup(tmp_path / "app.zbus")

    assert 5_000 <= made.cut <= 5_500
    assert (again.cut, again.added) == (5_500, 5_500 - made.cut)
    assert seen[-1][0] == seen[-1][1] >= 5_000


async def test_a_cancelled_backup_leaves_the_earlier_one_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_copy, "STEP_EVENTS", 10)
    async with zbus.open(tmp_path / "app.db") as bus:
        publisher = await bus.publisher("shop/orders")
        await publisher.publish(b"1")
        await bus.backup(tmp_path / "app.zbus")
        before = (tmp_path / "app.zbus").read_bytes()
        await publisher.publish_many([b"2"] * 100)
        begun, released = threading.Event(), threading.Event()

        def wait(*_: int) -> None:
            begun.set()
            released.wait(10)

        backing_up = asyncio.create_task(bus.backup(tmp_path / "app.zbus", progress=wait))
        await asyncio.to_thread(begun.wait, 10)
        backing_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await backing_up
        released.set()
        async with asyncio.timeout(10):
            while any(each.name.startswith(".app.zbus") for each in tmp_path.iterdir()):
                await asyncio.sleep(0.01)

    assert (tmp_path / "app.zbus").read_bytes() == before


async def test_closing_the_bus_ends_a_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_copy, "STEP_PAGES", 1)
    begun = threading.Event()
    async with zbus.open(tmp_path / "app.db") as bus:
        publisher = await bus.publisher("shop/orders")
        await publisher.publish_many([b"2" * 1000] * 3000)

        def slowly(*_: int) -> None:
            begun.set()
            threading.Event().wait(0.01)

        backing_up = asyncio.create_task(bus.backup(tmp_path / "app.zbus", progress=slowly))
        await asyncio.to_thread(begun.wait, 10)
    with pytest.raises(BusClosed):
        await backing_up
    assert not (tmp_path / "app.zbus").exists()


async def test_a_bus_without_a_log_has_nothing_to_back_up(tmp_path: Path) -> None:
    async with zbus.open() as bus:
        with pytest.raises(LogRequired):
            await bus.backup(tmp_path / "app.zbus")


def test_a_blocking_bus_backs_up_too(tmp_path: Path) -> None:
    with zbus.blocking.open(tmp_path / "app.db") as bus:
        bus.publisher("shop/orders").publish(b"1")
        assert bus.backup(f"{tmp_path}/kept/").path == f"{tmp_path}/kept"
    assert make.file_of(f"{tmp_path}/kept").is_file()
