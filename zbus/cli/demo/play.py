"""The acts of `zbus demo`: publishers, subscribers, a child that is killed and resumes, and a replay by time.

Each act ends when a condition holds, never only because time has passed, so that a busy machine takes longer but shows
the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import zbus
from zbus.introspection import of

from .ledger import Ledger, Watch
from .worker import Worker

# Faults that the demo must detect: the child ignores an event; its position is reset.
FAULTS = ("", "skip", "forget")

SHOP = ("shop/orders/created", "shop/orders/paid", "shop/payments/settled")
FLEET = ("fleet/truck-1/position", "fleet/truck-2/position", "fleet/truck-3/fuel")
WATCHED = (
    ("shop/**", SHOP),
    ("*/orders/*", SHOP[:2]),
    ("fleet/*/position", FLEET[:2]),
    ("fleet/truck-$*/fuel", FLEET[2:]),
)
DURABLE = "demo-billing"
RATE_EACH = 625  # events per second of each publisher, if the machine is fast enough
BURST_EVENTS = 10
EVENTS_EACH_SIDE = 150  # minimum number of events before the kill, and after it
AWAY_S = 0.4  # time between the kill and the restart of the durable subscriber
FLOOD_KEY, FLOOD_PAYLOAD = "load/sensor/reading", b"x" * 100
FLOOD_BATCH_EVENTS, FLOOD_EVENTS, FLOOD_S = 1000, 100_000, 1.5
TICK_S = 0.01
QUIET_TICKS = 1000  # after 10 s or more without a new event, the missing ones are considered lost

Say = Callable[[str], None]


class Play:
    """One run of the demo. `ledger` and `seconds` are filled while it runs."""

    def __init__(self, folder: Path, say: Say, publish_s: float, fault: str) -> None:
        self._log, self._say, self._publish_s, self._fault = folder / "demo.db", say, publish_s, fault
        self.ledger = Ledger(watches=[Watch(expression, frozenset(keys)) for expression, keys in WATCHED])
        self.worker = Worker(self._log, DURABLE, *(["--skip"] if fault == "skip" else []))
        self.ledger.handled, self.ledger.seen_again = self.worker.handled, self.worker.seen_again
        self.seconds: dict[str, float] = {}  # duration of each phase
        self._tasks: list[asyncio.Task[None]] = []
        self._enough = asyncio.Event()

    @property
    def progress(self) -> tuple[int, bool]:
        """A value that changes whenever the demo makes progress."""
        return self.ledger.progress, self.worker.running

    async def run(self) -> None:
        """Run all acts. The ledger then contains the lost events."""
        self._say(f"an embedded bus on {self._log}; a durable subscriber starts in another process")
        async with zbus.open(config=zbus.BusConfig.exactly(log=str(self._log))) as bus:
            try:
                await self._perform(bus)
            finally:
                await self.worker.kill()
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _perform(self, bus: zbus.Bus) -> None:
        ledger, worker = self.ledger, self.worker
        subscribers = [bus.subscribe(watch.expression, overflow="spill") for watch in ledger.watches]
        self._tasks += [asyncio.create_task(_watch(*each)) for each in zip(subscribers, ledger.watches, strict=True)]
        await worker.start()
        publishers = [await bus.publisher(key) for key in SHOP + FLEET]
        begun = time.perf_counter()
        publishing = [asyncio.create_task(self._publish(publisher, begun)) for publisher in publishers]
        self._tasks += publishing
        self._say(f"{len(publishers)} publishers, {len(subscribers)} wildcard subscribers in this process")
        await self._published_for(self._publish_s / 2, 0)
        await self._until(lambda: worker.acknowledged > 0, lambda: len(worker.handled))
        moment, early = _now(publishers)
        await self._kill_and_resume(bus)
        await self._published_for(self._publish_s / 2, len(ledger.acknowledged))
        self._enough.set()
        await asyncio.gather(*publishing)
        self.seconds["publishing"] = time.perf_counter() - begun
        self._say(f"{len(ledger.acknowledged):,} events published and on disk")
        await self._until(lambda: ledger.arrived(worker.position), lambda: len(worker.handled))
        self.seconds["handling"] = time.perf_counter() - begun
        await worker.stop()
        self._say(f"the durable subscriber has handled {len(worker.handled):,} events")
        await self._until(
            lambda: all(ledger.arrived(watch.position, watch.keys) for watch in ledger.watches),
            lambda: ledger.delivered,
        )
        self.seconds["delivering"] = time.perf_counter() - begun
        await self._flood(bus)
        await self._replay(bus, moment, early)

    async def _kill_and_resume(self, bus: zbus.Bus) -> None:
        await self.worker.kill()
        self._say(
            f"SIGKILL to the durable subscriber after {len(self.worker.handled):,} events, "
            f"{self.worker.acknowledged:,} of them acknowledged; publishing continues"
        )
        await asyncio.sleep(AWAY_S)
        if self._fault == "forget":
            reader = of(bus).reader
            await reader.run(reader.required("the demo").cursors.reset, DURABLE, 0)
        await self.worker.start()
        self._say("the durable subscriber is back")

    async def _publish(self, publisher: zbus.EventPublisher, begun: float) -> None:
        """Publish at a steady rate, singly and in bursts, and note what is acknowledged."""
        ledger, me = self.ledger, publisher.publisher_id
        while not self._enough.is_set():
            first, burst = publisher.sequence, BURST_EVENTS if publisher.sequence % 4 == 3 else 1
            identities = [(me, first + number) for number in range(burst)]
            ledger.published |= dict.fromkeys(identities, publisher.key)
            offset: int
            if burst == 1:
                offset = await publisher.publish({"number": first, "at": time.time()})
            else:
                offset = (await publisher.publish_many({"number": number} for _, number in identities))[-1]
            ledger.acknowledged.update(identities)
            ledger.heads[publisher.key] = offset
            due = begun + publisher.sequence / RATE_EACH
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    async def _published_for(self, seconds: float, before: int) -> None:
        """Wait for `seconds`, and until enough events were published after the first `before` events."""
        await asyncio.sleep(seconds)
        published = self.ledger.acknowledged
        await self._until(lambda: len(published) >= before + EVENTS_EACH_SIDE, lambda: len(published))

    async def _until(self, done: Callable[[], bool], arrived: Callable[[], int]) -> None:
        """Wait until `done`, or until no more events arrive: the ledger then counts the missing ones as lost.

        It counts ticks rather than seconds, because a suspended process receives nothing.
        """
        before, quiet = -1, 0
        while not done() and quiet < QUIET_TICKS:
            before, quiet = (before, quiet + 1) if arrived() == before else (arrived(), 0)
            await asyncio.sleep(TICK_S)

    async def _flood(self, bus: zbus.Bus) -> None:
        """Publish as fast as one publisher can, in batches. Each batch is on disk before the next one begins."""
        publisher = await bus.publisher(FLOOD_KEY)
        batch, flood, me = [FLOOD_PAYLOAD] * FLOOD_BATCH_EVENTS, self.ledger.flood, publisher.publisher_id
        begun = time.perf_counter()
        while len(flood) < FLOOD_EVENTS and time.perf_counter() < begun + FLOOD_S:
            first = publisher.sequence
            await publisher.publish_many(batch)
            flood.update((me, number) for number in range(first, publisher.sequence))
        taken_s = self.seconds["flood"] = time.perf_counter() - begun
        self._say(
            f"full speed: {len(flood) / taken_s:,.0f} events/s of {len(FLOOD_PAYLOAD)} bytes from one "
            f"publisher, in batches of {FLOOD_BATCH_EVENTS:,}, each on disk (fsync) before the next; no subscribers"
        )

    async def _replay(self, bus: zbus.Bus, moment: datetime, early: dict[int, int]) -> None:
        """Read the whole log to see what is stored, then replay the events since the kill by time."""
        ledger = self.ledger
        begun = time.perf_counter()
        async for event in bus.replay("**"):
            ledger.stored.add(event.identity)
        self.seconds["reading"] = time.perf_counter() - begun
        ledger.replay_expected = {each for each in ledger.acknowledged if each[1] >= early[each[0]]}
        begun = time.perf_counter()
        async for event in bus.replay("shop/**", "fleet/**", after=moment):
            ledger.replayed.add(event.identity)
        self.seconds["replaying"] = time.perf_counter() - begun
        self._say(f"replayed {len(ledger.replayed):,} events published after {moment:%H:%M:%S.%f} UTC")


async def _watch(subscriber: zbus.EventSubscriber, watch: Watch) -> None:
    async for event in subscriber:
        watch.seen[event.identity] += 1
        watch.position = event.offset


def _now(publishers: list[zbus.EventPublisher]) -> tuple[datetime, dict[int, int]]:
    """Return the current time and the next sequence of each publisher: later events have at least that sequence."""
    moment = datetime.now(UTC) + timedelta(microseconds=1)
    while datetime.now(UTC) <= moment:  # a datetime has no nanoseconds: wait for the next microsecond
        pass
    return moment, {publisher.publisher_id: publisher.sequence for publisher in publishers}
