"""Cancelling any await at any point leaves the bus usable, and loses nothing that was acknowledged."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import zbus

OPERATIONS = (
    "publish",
    "publish_many",
    "put",
    "live",
    "spill",
    "durable",
    "ack",
    "replay",
    "head",
    "subscribe",
    "resume",
    "block",
)
reached: Counter[str] = Counter()

steps = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 40), st.booleans()), min_size=1, max_size=25)


class Session:
    """One bus and one of each kind of reader; every operation is one await that can be cancelled."""

    def __init__(self, bus: zbus.Bus, publisher: zbus.EventPublisher) -> None:
        self.bus, self.publisher = bus, publisher
        self.live = bus.subscribe("**", queue_events=100_000)
        self.spill = bus.subscribe("**", queue_events=3, overflow="spill")
        self.durable = bus.subscribe("**", durable="d", queue_events=3)
        self.block = bus.subscribe("held/**", queue_events=5, overflow="block")
        self.acknowledged: set[int] = set()
        self.seen: dict[str, list[int]] = {"live": [], "spill": [], "durable": []}
        self.last: zbus.Event | None = None

    async def run(self, operation: str) -> None:
        match operation:
            case "publish":
                self.acknowledged.add(await self.publisher.publish(b"x"))
            case "publish_many":
                self.acknowledged.update(await self.publisher.publish_many([b"y"] * 1200))
            case "put":
                event = zbus.Event(1, len(self.acknowledged), 1, "put/x", b"z")
                self.acknowledged.update(await self.bus.put(event))
            case "live" | "spill" | "durable":
                event = await anext(getattr(self, operation))
                self.seen[operation].append(event.offset)
                if operation == "durable":
                    self.last = event
            case "ack":
                if self.last is not None:
                    await self.last.ack()
            case "replay":
                offsets = [event.offset async for event in self.bus.replay()]
                assert offsets == list(range(1, len(offsets) + 1))
            case "head":
                assert await self.bus.head() >= max(self.acknowledged, default=0)
            case "subscribe":
                async with self.bus.subscribe("**", start="beginning") as subscription:
                    if self.acknowledged:
                        await anext(subscription)
            case "resume":
                async with self.bus.subscribe("**", start="beginning", durable="other") as subscription:
                    if self.acknowledged:
                        await anext(subscription)
            case "block":
                held = await self.bus.publisher("held/x")
                for _ in range(10):
                    self.acknowledged.add(await held.publish(b"h"))


async def cancelled_after(session: Session, operation: str, spins: int, wait: bool) -> None:
    task = asyncio.create_task(session.run(operation))
    for _ in range(spins):
        # Some turns give the threads time to answer, so that every await is reached.
        await asyncio.sleep(0.0005 if wait else 0)
    reached[f"{operation} {'done' if task.done() else 'cancelled'}"] += 1
    task.cancel()
    result = (await asyncio.gather(task, return_exceptions=True))[0]
    if isinstance(result, Exception):
        raise result


async def scenario(folder: str, plan: list[tuple[str, int, bool]]) -> None:
    async with asyncio.timeout(60), zbus.open(Path(folder) / "app.db") as bus:
        session = Session(bus, await bus.publisher("a/b"))
        for operation, spins, wait in plan:
            await cancelled_after(session, operation, spins, wait)

        # Usable: publishing works, and what was acknowledged is stored once, in order, from 1 on.
        await session.block.aclose()
        end = await session.publisher.publish(b"end")
        stored = [event async for event in bus.replay()]
        assert [event.offset for event in stored] == list(range(1, end + 1))
        assert len({event.identity for event in stored}) == len(stored)
        assert {event.offset for event in stored} >= session.acknowledged

        # No reader missed or repeated an event because a read of its was cancelled.
        for name in ("live", "spill", "durable"):
            subscription = getattr(session, name)
            seen = session.seen[name]
            while not seen or seen[-1] < end:
                seen.append((await anext(subscription)).offset)
            assert seen == list(range(1, end + 1)), name
            await subscription.aclose()
        async with bus.subscribe("**", durable="other"), bus.subscribe("**", durable="d"):
            pass  # no name stays claimed


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps)
@example([(operation, 1, False) for operation in OPERATIONS])  # each of them in the middle, for sure
def test_cancelling_any_await_at_any_point_leaves_the_bus_usable(plan: list[tuple[str, int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(folder, plan))


def test_the_cancellations_reached_both_finished_and_unfinished_operations() -> None:
    """The test above is worth something only if it really cancels: every operation, in the middle."""
    if not reached:
        test_cancelling_any_await_at_any_point_leaves_the_bus_usable()
    for operation in OPERATIONS:
        if operation != "ack":  # it has nothing to await until something durable was read
            assert reached[f"{operation} cancelled"], f"{operation} was never cancelled: {dict(reached)}"
