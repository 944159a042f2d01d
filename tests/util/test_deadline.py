"""A deadline that steps share, and blocking calls that do not hold up their caller."""

from __future__ import annotations

import asyncio
import threading

from zbus.util.deadline import LEAST_S, Deadline, run_within
from zbus.util.runtime import REAL


async def test_each_step_gets_a_share_of_what_is_left_and_never_nothing() -> None:
    deadline, past = Deadline(10.0), Deadline(-1.0)

    assert 4.0 < deadline.share(1 / 2) <= 5.0
    assert past.share() == past.share(1 / 4) == LEAST_S


async def test_a_call_that_ends_in_time_has_ended_with_its_thread() -> None:
    called: list[str] = []

    assert await run_within(10.0, lambda: called.append(threading.current_thread().name), REAL, "zbus-test")

    assert called == ["zbus-test"]
    assert "zbus-test" not in [each.name for each in threading.enumerate()]


async def test_a_call_that_hangs_is_left_behind_and_still_ends() -> None:
    go_on, ended = threading.Event(), threading.Event()

    def hang() -> None:
        go_on.wait(30)
        ended.set()

    assert not await run_within(0.01, hang, REAL, "zbus-test")

    go_on.set()
    assert await asyncio.to_thread(ended.wait, 10)
