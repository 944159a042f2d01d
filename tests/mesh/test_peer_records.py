"""The log records of a repair: an attempt that fails, one that takes too long, and events that retention removed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from mesh_fakes import Counts, FakeRuntime, envelope, recorded

from zbus.errors import LogError
from zbus.mesh.interest import Interest
from zbus.mesh.log_service import LogPage
from zbus.mesh.peer import GIVE_UP_S, Peer
from zbus.wire.envelope import Envelope

ORIGIN = 5


class Context:
    """The node of a peer. `page` is scripted: a page, or an error; the last one is repeated."""

    def __init__(self, *pages: LogPage | Exception) -> None:
        self.pages, self.counts, self.interest = list(pages), Counts(), Interest()
        self.asked = 0
        self.on_page: Callable[[], object] = lambda: None
        self.gaps: list[tuple[int, str]] = []
        self.count = self.counts.add

    async def page(self, origin: int, after: int, from_ns: int, link: str, expressions: Any = None) -> LogPage:
        self.asked += 1
        self.on_page()
        found = self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]
        if isinstance(found, Exception):
            raise found
        return found

    def accept(self, envelopes: Sequence[Envelope], link: str, repaired: bool = False) -> None:
        pass

    async def wait_for_capacity(self) -> None:
        pass

    def covered(self, origin: int, offset: int) -> None:
        pass

    def report_gap(self, origin: int, key: str, publisher_id: int, sequence: int, counted: bool = False) -> bool:
        self.gaps.append((origin, key))
        return True

    def report_open_gap(self, origin: int, key: str, publisher_id: int, after: int, sequence: int) -> bool:
        return True


class Bench:
    def __init__(self) -> None:
        self.runtime = FakeRuntime()
        self.peers: list[Peer] = []

    def miss_events(self, context: Context) -> None:
        """Let a peer receive an event after a gap, so that it begins a repair."""
        peer = Peer(ORIGIN, context, 1, self.runtime)  # type: ignore[arg-type]
        self.peers.append(peer)
        assert peer.take([envelope(9, previous=8)], "link") == []


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    ending = [task for peer in bench.peers if (task := peer.close()) is not None]
    if ending:
        await asyncio.wait(ending)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_repair_that_fails_is_recorded_and_tried_again(bench: Bench) -> None:
    context = Context(LogError("the disk is slow"), LogPage([], 9, 9, 0))
    with recorded() as records:
        bench.miss_events(context)
        await until(lambda: context.asked == 2)

    (failed,) = [each for each in records if each["record"] == "EVENT_RETRY"]
    assert (failed["code"], failed["reason"], failed["origin"]) == ("repair_failed", "the disk is slow", ORIGIN)
    assert failed["again_in_s"] > 0


async def test_a_repair_that_takes_too_long_is_recorded_once_and_its_events_are_reported_as_a_gap(bench: Bench) -> None:
    context = Context(LogError("the disk is slow"))

    def pass_time() -> None:
        bench.runtime.now += GIVE_UP_S + 1

    context.on_page = pass_time
    with recorded() as records:
        bench.miss_events(context)
        await until(lambda: context.gaps)

    (failed,) = [each for each in records if each["record"] == "EVENT_REPLAY_FAILED"]
    assert (failed["code"], failed["events"]) == ("repair_timeout", 0)
    assert context.gaps == [(ORIGIN, "shop/orders")]


async def test_events_that_retention_removed_at_the_publisher_are_counted_and_recorded(bench: Bench) -> None:
    context = Context(LogPage([], 10, 10, 10))
    with recorded() as records:
        bench.miss_events(context)
        await until(lambda: context.counts)

    (gap,) = [each for each in records if each["record"] == "EVENT_GAP"]
    assert (gap["code"], gap["origin"], gap["after"], gap["until"]) == ("gap_trimmed", ORIGIN, 1, 10)
    assert (context.counts["gaps"], context.counts["gaps_unrepaired"]) == (1, 1)
