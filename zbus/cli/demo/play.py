"""What happens in `zbus demo`: publishers, subscribers, a child that is killed and resumes, and a replay by time."""

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

# Ways to break it, so that it can be seen to notice: the child passes over an event; its position is forgotten.
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
RATE_EACH = 625  # events a second; less on a machine that is slower than that: the time is what is fixed
BURST_EVENTS = 10
AWAY_S = 0.4  # how long nobody reads with the durable name after the kill
QUIET_S = 2.0  # when nothing has arrived for so long, nothing will

Say = Callable[[str], None]


class Play:
    """One run of the demo. `ledger` and `seconds` fill while it runs."""

    def __init__(self, folder: Path, say: Say, publish_s: float, fault: str) -> None:
        self._log, self._say, self._publish_s, self._fault = folder / "demo.db", say, publish_s, fault
        self.ledger = Ledger(watches=[Watch(expression, frozenset(keys)) for expression, keys in WATCHED])
        self.worker = Worker(self._log, DURABLE, *(["--skip"] if fault == "skip" else []))
        self.ledger.handled, self.ledger.seen_again = self.worker.handled, self.worker.seen_again
        self.seconds: dict[str, float] = {}  # how long each phase took
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Play it to the end; the ledger then tells what was lost."""
        async with zbus.open(self._log, mode="embedded", listen=(), connect=(), durability="fsync") as bus:
            try:
                await self._perform(bus)
            finally:
                await self.worker.kill()
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _perform(self, bus: zbus.Bus) -> None:
        subscribers = [bus.subscribe(watch.expression, overflow="spill") for watch in self.ledger.watches]
        self._tasks += [
            asyncio.create_task(_watch(*each)) for each in zip(subscribers, self.ledger.watches, strict=True)
        ]
        self._say(f"an embedded bus on {self._log}; a durable subscriber starts in another process")
        await self.worker.start()
        begun = time.perf_counter()
        publishers = [await bus.publisher(key) for key in SHOP + FLEET]
        publishing = [asyncio.create_task(self._publish(publisher, begun)) for publisher in publishers]
        self._tasks += publishing
        self._say(f"{len(publishers)} publishers, {len(subscribers)} wildcard subscribers in this process")
        await asyncio.sleep(self._publish_s / 2)
        moment, early = _now(publishers)
        await self._kill_and_resume(bus)
        await asyncio.gather(*publishing)
        self.seconds["publishing"] = time.perf_counter() - begun
        self._say(f"{len(self.ledger.acknowledged):,} events published and on disk")
        await self._until(
            lambda: self.ledger.acknowledged <= self.worker.handled.keys(), lambda: len(self.worker.handled)
        )
        self.seconds["handling"] = time.perf_counter() - begun
        await self.worker.stop()
        self._say(f"the durable subscriber has handled {len(self.worker.handled):,} events")
        expected = self.ledger.deliveries_expected
        await self._until(lambda: self.ledger.delivered >= expected, lambda: self.ledger.delivered)
        self.seconds["delivering"] = time.perf_counter() - begun
        await self._replay(bus, moment, early)

    async def _kill_and_resume(self, bus: zbus.Bus) -> None:
        await self.worker.kill()
        self._say(
            f"SIGKILL to the durable subscriber after {len(self.worker.handled):,} events, "
            f"{self.worker.acknowledged:,} of them acknowledged; publishing goes on"
        )
        await asyncio.sleep(AWAY_S)
        if self._fault == "forget":
            reader = of(bus).reader
            await reader.run(reader.required("the demo").cursors.reset, DURABLE, 0)
        await self.worker.start()
        self._say("the durable subscriber is back")

    async def _publish(self, publisher: zbus.EventPublisher, begun: float) -> None:
        """Publish at a steady rate, one by one and now and then a burst; write down what is acknowledged."""
        ledger, me = self.ledger, publisher.publisher_id
        while time.perf_counter() < begun + self._publish_s:
            first, burst = publisher.sequence, BURST_EVENTS if publisher.sequence % 4 == 3 else 1
            identities = [(me, first + number) for number in range(burst)]
            ledger.published |= dict.fromkeys(identities, publisher.key)
            if burst == 1:
                await publisher.publish({"number": first, "at": time.time()})
            else:
                await publisher.publish_many({"number": number} for _, number in identities)
            ledger.acknowledged.update(identities)
            due = begun + publisher.sequence / RATE_EACH
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    async def _until(self, done: Callable[[], bool], arrived: Callable[[], int]) -> None:
        """Wait for something while more of it arrives: what never comes is lost, and the ledger says so."""
        before, deadline = -1, 0.0
        while not done() and (arrived() != before or time.perf_counter() < deadline):
            if arrived() != before:
                before, deadline = arrived(), time.perf_counter() + QUIET_S
            await asyncio.sleep(0.01)

    async def _replay(self, bus: zbus.Bus, moment: datetime, early: dict[int, int]) -> None:
        """Everything from the log, to see what is stored; then what was published after the kill, by its time."""
        ledger = self.ledger
        begun = time.perf_counter()
        ledger.stored.update([event.identity async for event in bus.replay("**")])
        self.seconds["reading"] = time.perf_counter() - begun
        ledger.replay_expected = {each for each in ledger.acknowledged if each[1] >= early[each[0]]}
        begun = time.perf_counter()
        ledger.replayed.update([event.identity async for event in bus.replay("**", after=moment)])
        self.seconds["replaying"] = time.perf_counter() - begun
        self._say(f"replayed {len(ledger.replayed):,} events published after {moment:%H:%M:%S.%f} UTC")


async def _watch(subscriber: zbus.EventSubscriber, watch: Watch) -> None:
    async for event in subscriber:
        watch.seen[event.identity] += 1


def _now(publishers: list[zbus.EventPublisher]) -> tuple[datetime, dict[int, int]]:
    """A moment, and the next sequence of each publisher then: all from there on were published after the moment."""
    moment = datetime.now(UTC) + timedelta(microseconds=1)
    while datetime.now(UTC) <= moment:  # a datetime has no nanoseconds: let its microsecond pass
        pass
    return moment, {publisher.publisher_id: publisher.sequence for publisher in publishers}
