"""Acknowledging: the cursors' thread answers, and the task that waits goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from zbus.deliver.acknowledgements import Durable
from zbus.errors import LogError


class FakeCursors:
    """Stores positions on a thread of its own when the test says so."""

    def __init__(self) -> None:
        self.advanced: list[int] = []
        self._done: list[Callable[[Any], object]] = []

    def advance(self, name: str, token: str, offset: int, done: Callable[[Any], object] | None = None) -> None:
        self.advanced.append(offset)
        if done is not None:
            self._done.append(done)

    def store(self, error: LogError | None = None) -> None:
        def run() -> None:
            for done in self._done:
                done(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()


def durable(cursors: FakeCursors) -> Durable:
    return Durable(cursors, lambda *call: None, "billing", ["**"])  # type: ignore[arg-type, return-value]


async def test_many_acknowledgements_return_once_their_positions_are_stored() -> None:
    cursors = FakeCursors()
    name = durable(cursors)
    waiting = [asyncio.ensure_future(name.acknowledge(offset)) for offset in range(1, 6)]
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)

    cursors.store()
    await asyncio.wait_for(asyncio.gather(*waiting), 5)

    assert (cursors.advanced, name.acknowledged) == ([1, 2, 3, 4, 5], 5)


async def test_a_position_that_could_not_be_stored_raises_and_a_cancelled_wait_is_left_alone() -> None:
    cursors = FakeCursors()
    name = durable(cursors)
    failing, cancelled = (asyncio.ensure_future(name.acknowledge(offset)) for offset in (1, 2))
    await asyncio.sleep(0)
    cancelled.cancel()

    cursors.store(LogError("the disk is full"))

    with pytest.raises(LogError, match="full"):
        await asyncio.wait_for(failing, 5)
    assert cancelled.cancelled()
