"""Cancelling any path at any await: nothing waits for ever, no sequence is wrong, and the bus stays usable."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
from inside import node_of
from publish_paths import GIVEN, GOOD, KEY, PATHS, Rig, rejected_by, rig, until

import zbus
from zbus.ports.log import AppendResult, Refused

TURNS = 12  # of the loop; a path that has not ended by then waits for a thread
ON_THE_LOOP = [path for path in PATHS if path != "proxied write"]  # a thread cannot be cancelled
LOGS = [(path, log) for path in ON_THE_LOOP for log in ("memory", None) if log or path != "POST, idempotent"]
MANY = 1500


async def cancelled_after(turns: int, sending: Any) -> bool:
    """Cancel after so many turns of the loop. Returns whether it had ended before."""
    task = asyncio.ensure_future(sending)
    for _ in range(turns):
        await asyncio.sleep(0)
    ended = task.done()
    task.cancel()
    await asyncio.wait([task])
    return ended


def assert_numbered(path: str, events: list[zbus.Event]) -> None:
    """The events of each publisher follow each other without a gap."""
    sequences: dict[tuple[int, str], list[int]] = {}
    for event in events:
        sequences.setdefault((event.publisher_id, event.key), []).append(event.sequence)
    for found in sequences.values():
        assert found == (list(GIVEN[path])[: len(found)] if path in GIVEN else list(range(len(found))))


@pytest.mark.parametrize(("path", "log"), LOGS)
async def test_a_path_that_is_cancelled_at_any_turn_leaves_no_gap_and_a_usable_bus(path: str, log: str | None) -> None:
    async with rig(log) as bus:
        for turns in range(TURNS):
            await cancelled_after(turns, PATHS[path](bus, GOOD, None))
        await PATHS[path](bus, GOOD, None)

        assert_numbered(path, await bus.everything())
        assert bus.entry.backpressure._waiters == {}


@pytest.mark.parametrize(("path", "log"), LOGS)
async def test_a_path_that_is_cancelled_while_it_waits_leaves_nothing_behind(path: str, log: str | None) -> None:
    async with rig(log) as bus:
        await PATHS[path](bus, GOOD, None)
        await bus.fill()
        for turns in range(TURNS):
            await cancelled_after(turns, PATHS[path](bus, GOOD, None))
        if (
            path == "POST, idempotent"
        ):  # a request that is repeated joins the first, which goes on when its client leaves
            await until(lambda: len(bus.entry.backpressure._waiters) <= 1)
        else:
            assert bus.entry.backpressure._waiters == {}
        before = len(await bus.stored())
        assert before == 1

        await bus.restore()
        await PATHS[path](bus, GOOD, None)

        stored = await bus.stored()
        assert len(stored) == 2
        assert_numbered(path, stored)


@pytest.mark.parametrize("log", ["memory", None])
@pytest.mark.parametrize("path", ["publish_many", "session.publish_many", "put"])
async def test_a_call_with_many_events_that_is_cancelled_leaves_no_gap_and_parts_no_pair(
    path: str, log: str | None
) -> None:
    def many(bus: Rig, publisher: zbus.EventPublisher) -> Any:
        match path:
            case "publish_many":
                return publisher.publish_many([GOOD] * MANY)
            case "session.publish_many":
                return bus.bus.session("s").publish_many(KEY, [GOOD] * MANY)
            case _:
                first = bus.given
                bus.given += MANY
                return bus.bus.put(*[zbus.Event(7, first + n, 1, KEY, GOOD) for n in range(MANY)])

    async with rig(log) as bus:
        publisher = await bus.bus.publisher(KEY)
        crowded = bus.bus.subscribe("**", queue_events=10)  # so that the paths yield often
        partly = 0
        for turns in range(TURNS):
            await cancelled_after(turns, many(bus, publisher))
            partly += len(await bus.stored()) % MANY > 0
        await crowded.aclose()
        await many(bus, publisher)
        events = await bus.everything()

    if path != "put":
        assert_numbered(path, events)
    if path == "session.publish_many":
        assert [event.key for event in events] == [KEY, f"sessions/s/{KEY}"] * (len(events) // 2)
    assert partly or log is not None  # without a log, some call was cancelled in the middle


@pytest.mark.parametrize("log", ["memory", None])
async def test_the_two_events_of_a_session_are_both_delivered_when_it_is_cancelled_or_neither(log: str | None) -> None:
    async with rig(log) as bus:
        crowded = bus.bus.subscribe("**", queue_events=1)  # every event fills it
        for turns in range(TURNS):
            await cancelled_after(turns, bus.bus.session("s").publish(KEY, GOOD))
        await bus.bus.session("s").publish(KEY, GOOD)
        await crowded.aclose()
        events = await bus.everything()

    assert [event.key for event in events] == [KEY, f"sessions/s/{KEY}"] * (len(events) // 2)
    assert_numbered("session.publish", events)


async def test_commits_that_fail_after_a_cancelled_publish_many_are_not_an_unhandled_error() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with zbus.open("memory") as bus:
        commits = node_of(bus).commits
        held: list[tuple[Callable[[AppendResult], None], Any]] = []
        commits._append = lambda rows, done, about: held.append((done, about))  # type: ignore[union-attr]
        publisher = await bus.publisher("a/b")
        task = asyncio.create_task(publisher.publish_many([b"x"] * 3500))
        await until(lambda: held)
        task.cancel()
        await asyncio.wait([task])

        while held:
            done, about = held.pop()
            done(AppendResult(about, Refused(zbus.LogError("the disk is gone"))))
        await until(lambda: not node_of(bus).commits.pending_bytes)  # type: ignore[union-attr]
        del task
        gc.collect()

    assert reported == []


# Closing.


@pytest.mark.parametrize("path", ON_THE_LOOP)
async def test_closing_ends_the_wait_for_a_full_subscription(path: str) -> None:
    async with rig("memory", close_timeout_s=0.4) as bus:
        await bus.fill()
        task = asyncio.ensure_future(PATHS[path](bus, GOOD, None))
        await until(lambda: bus.entry.backpressure._waiters)

        await asyncio.wait_for(bus.bus.aclose(), 10)

        assert await asyncio.wait_for(rejected_by(task), 5) == "open"
        assert await bus.stored() == []


@pytest.mark.parametrize("path", ON_THE_LOOP)
async def test_closing_ends_the_wait_for_a_log_that_hangs(path: str) -> None:
    async with rig("memory", close_timeout_s=0.4, pending_bytes_max=1024, payload_bytes_max=2000) as bus:
        held = list[Any]()
        bus.node.commits._append = lambda rows, *more: held.append((rows, *more))  # type: ignore[union-attr]
        first = asyncio.create_task((await bus.bus.publisher("filler")).publish(b"x" * 2000))
        await until(lambda: bus.entry.backpressure.blocked)
        task = asyncio.ensure_future(PATHS[path](bus, GOOD, None))
        await until(lambda: bus.entry.backpressure._waiters)

        await asyncio.wait_for(bus.bus.aclose(), 10)

        assert await asyncio.wait_for(rejected_by(task), 5) == "open"
        assert len(held) == 1
        first.cancel()
        await asyncio.wait([first])


@pytest.mark.parametrize("path", ON_THE_LOOP)
async def test_closing_ends_the_wait_for_a_network_that_is_slow(path: str) -> None:
    async with rig("memory", close_timeout_s=0.4) as bus:
        bus.entry.backpressure.block(bus.node.network, "send_queue_full", "the network is slow")
        task = asyncio.ensure_future(PATHS[path](bus, GOOD, None))
        await until(lambda: bus.entry.backpressure._waiters)

        await asyncio.wait_for(bus.bus.aclose(), 10)

        assert await asyncio.wait_for(rejected_by(task), 5) == "open"
