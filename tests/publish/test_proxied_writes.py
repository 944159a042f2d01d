"""Proxied writes: from the log's thread onto the loop, in order, with few wake-ups."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mesh_fakes import rows

import zbus
import zbus_log
from zbus.errors import BusClosed, EventInvalid
from zbus.ports.log import Row
from zbus.publish.proxied_writes import ProxiedWrites


class FakeEntry:
    """Stores at once, or rejects; `commits` of an entry is the entry itself here."""

    def __init__(self) -> None:
        self.stored: list[int] = []
        self.error: Exception | None = None
        self.commits = self

    def check_rows(self, rows: Sequence[Row]) -> None:
        if rows[0].key == "not/allowed":
            raise EventInvalid("no")

    async def admit(self, events: Iterable[tuple[str, bytes]]) -> None:
        if self.error is not None:
            raise self.error
        await asyncio.sleep(0)

    def announce_keys(self, rows: Sequence[Row]) -> None:
        pass

    def add_many(self, rows: Sequence[Row]) -> asyncio.Future[Any]:
        self.stored += [row.sequence for row in rows]
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done.set_result(SimpleNamespace(offsets=[len(self.stored)]))
        return done


async def turns(number: int = 200) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def take_on_a_thread(writes: ProxiedWrites, batches: Iterable[list[Row]], answers: list[Any]) -> None:
    def run() -> None:
        for batch in batches:
            writes.take(batch, answers.append, lambda: True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


async def test_writes_of_the_log_s_thread_are_stored_in_order_and_answered() -> None:
    entry, answers = FakeEntry(), list[Any]()
    writes = ProxiedWrites(entry)  # type: ignore[arg-type]

    await take_on_a_thread(writes, ([row] for row in rows(range(20))), answers)
    assert entry.stored == []  # only the loop touches the entry
    await turns()

    assert entry.stored == list(range(20))
    assert answers == [[number] for number in range(1, 21)]


async def test_what_a_write_waits_for_does_not_depend_on_hashes() -> None:
    entry, keys = FakeEntry(), [f"key/{number}" for number in range(20)]
    writes = ProxiedWrites(entry)  # type: ignore[arg-type]
    batch = [Row(number, 0, 1, key, b"") for number, key in enumerate(keys)]

    writes.take(batch, lambda answer: None, lambda: True)
    await asyncio.sleep(0)

    assert list(writes._last) == [name for number, key in enumerate(keys) for name in (key, number)]
    await turns()
    assert not writes._last


async def test_a_rejected_write_is_answered_and_the_next_one_is_stored() -> None:
    entry, answers = FakeEntry(), list[Any]()
    writes = ProxiedWrites(entry)  # type: ignore[arg-type]

    await take_on_a_thread(writes, [rows([0], "not/allowed"), rows([1])], answers)
    await turns()

    assert entry.stored == [1]
    assert isinstance(answers[0], EventInvalid)
    assert answers[1] == [1]


async def test_a_write_to_a_closed_bus_is_not_answered() -> None:
    entry, answers = FakeEntry(), list[Any]()
    entry.error = BusClosed("publish")
    writes = ProxiedWrites(entry)  # type: ignore[arg-type]

    await take_on_a_thread(writes, [rows([0])], answers)
    await turns()

    assert (entry.stored, answers) == ([], [])


def test_a_write_after_the_loop_was_closed_is_left_alone() -> None:
    async def make() -> ProxiedWrites:
        return ProxiedWrites(FakeEntry())  # type: ignore[arg-type]

    writes = asyncio.run(make())
    writes.take(rows([0]), lambda answer: None, lambda: True)


async def test_a_blocked_key_does_not_delay_proxied_writes_of_other_keys(log_path: Path) -> None:
    async with zbus.open(log_path) as bus, bus.subscribe("a/b", overflow="block", queue_events=1) as subscription:
        await (await bus.publisher("a/b")).publish(b"fills the queue")
        blocked = asyncio.ensure_future(asyncio.to_thread(zbus_log.put, log_path, [[Row(7, 0, 1, "a/b", b"1")]]))
        async with asyncio.timeout(20):
            await asyncio.to_thread(zbus_log.put, log_path, [[Row(8, 0, 1, "c/d", b"3")]])
            assert not blocked.done()

            await subscription.next()
            await blocked
        stored = [event.identity async for event in bus.replay() if event.publisher_id in (7, 8)]

    assert stored == [(8, 0), (7, 0)]


async def test_writes_that_share_a_key_or_a_publisher_keep_their_order_while_others_pass() -> None:
    class Blocked(FakeEntry):
        free = asyncio.Event()

        async def admit(self, events: Iterable[tuple[str, bytes]]) -> None:
            if [key for key, _ in events] == ["a"]:
                await self.free.wait()

    entry, answers = Blocked(), list[Any]()
    writes = ProxiedWrites(entry)  # type: ignore[arg-type]
    batches = [[Row(7, 1, 1, "a", b"")], [Row(7, 2, 1, "b", b"")], [Row(8, 3, 1, "b", b"")], [Row(9, 4, 1, "c", b"")]]
    await take_on_a_thread(writes, batches, answers)
    await turns()
    assert entry.stored == [4]  # 2 follows 1 by its publisher, and 3 follows 2 by its key

    entry.free.set()
    await turns()
    assert entry.stored == [4, 1, 2, 3]
    assert writes._last == {}


async def test_few_writes_are_committed_at_a_time_so_that_local_publishers_do_not_wait_long() -> None:
    class Slow(FakeEntry):
        def __init__(self) -> None:
            super().__init__()
            self.commits_open: list[asyncio.Future[Any]] = []

        def add_many(self, rows: Sequence[Row]) -> asyncio.Future[Any]:
            self.stored += [row.sequence for row in rows]
            self.commits_open.append(asyncio.get_running_loop().create_future())
            return self.commits_open[-1]

    entry, answers = Slow(), list[Any]()
    writes = ProxiedWrites(entry)  # type: ignore[arg-type]
    await take_on_a_thread(writes, [[Row(n, n, 1, f"k/{n}", b"")] for n in range(5)], answers)
    await turns()
    assert entry.stored == [0, 1, 2]

    entry.commits_open[1].set_result(SimpleNamespace(offsets=[1]))
    await turns()

    assert entry.stored == [0, 1, 2, 3]
    assert answers == [[1]]
    for number in (0, 2, 3):
        entry.commits_open[number].set_result(SimpleNamespace(offsets=[1]))
    await turns()
    assert entry.stored == [0, 1, 2, 3, 4]


async def test_a_write_that_nobody_waits_for_any_more_is_dropped_with_the_next_write() -> None:
    class Blocked(FakeEntry):
        async def admit(self, events: Iterable[tuple[str, bytes]]) -> None:
            if next(iter(events))[0] == "blocked":
                await asyncio.Event().wait()

    entry, answers = Blocked(), list[Any]()
    writes = ProxiedWrites(entry)  # type: ignore[arg-type]
    wanted = True
    writes.take([Row(7, 1, 1, "blocked", b"")], answers.append, lambda: wanted)
    await turns()

    wanted = False
    writes.take([Row(7, 2, 1, "free", b"")], answers.append, lambda: True)
    await turns()

    assert entry.stored == [2]
    assert answers == [[1]]
    assert (writes._last, writes._waiting) == ({}, {})


async def test_a_write_that_was_withdrawn_while_its_key_was_blocked_is_not_stored() -> None:
    class Blocked(FakeEntry):
        free = asyncio.Event()

        async def admit(self, events: Iterable[tuple[str, bytes]]) -> None:
            await self.free.wait()

    entry, answers = Blocked(), list[Any]()
    writes = ProxiedWrites(entry)  # type: ignore[arg-type]
    wanted = True
    writes.take([Row(7, 1, 1, "a", b"")], answers.append, lambda: wanted)
    await turns()

    wanted = False
    entry.free.set()
    await turns()

    assert (entry.stored, answers) == ([], [])
