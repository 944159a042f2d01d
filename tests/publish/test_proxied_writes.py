"""Proxied writes: from the log's thread onto the loop, in order, with few wake-ups."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from mesh_fakes import rows

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


async def turns(number: int = 10) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def take_on_a_thread(writes: ProxiedWrites, batches: Iterable[list[Row]], answers: list[Any]) -> None:
    def run() -> None:
        for batch in batches:
            writes.take(batch, answers.append)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


async def test_writes_of_the_log_s_thread_are_stored_in_order_and_answered() -> None:
    entry, answers = FakeEntry(), list[Any]()
    writes = ProxiedWrites(entry)  # type: ignore[arg-type]

    await take_on_a_thread(writes, ([row] for row in rows(range(20))), answers)
    assert entry.stored == []  # only the loop touches the entry
    await turns(50)

    assert entry.stored == list(range(20))
    assert answers == [[number] for number in range(1, 21)]


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
    writes.take(rows([0]), lambda answer: None)
