"""A peer: events are delivered in order and once; gaps are repaired from its log, or reported.

Time is virtual: the event loop jumps to the next timer instead of sleeping.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from mesh_fakes import Counts, FakeRuntime, envelope, recorded

from zbus.errors import LogError, NoResponders, TransportError
from zbus.mesh import buffered_events
from zbus.mesh.dedup import Arrival, Dedup
from zbus.mesh.interest import Interest
from zbus.mesh.log_service import LogPage
from zbus.mesh.origins.claims import CONFIRM_S, UNCONFIRMED_MAX
from zbus.mesh.peer import EMPTY_PAGE_S, GIVE_UP_S, RETRY_S, TAIL_S, TAIL_TURNS_MAX, Peer
from zbus.ports.lineage import NO_BRANCH, Branch, Incarnation, Lineage, Mark
from zbus.wire.beacon import Beacon, Newest
from zbus.wire.envelope import Envelope

LOGGED, UNLOGGED = 5, 6  # an odd origin has a log
A, B = "shop/a", "shop/b"


class VirtualSelector:
    """Lets virtual time pass instead of waiting for sockets."""

    def __init__(self, selector: Any, runtime: FakeRuntime) -> None:
        self._selector, self._runtime = selector, runtime

    def select(self, timeout: float | None) -> Any:
        assert timeout is not None, "nothing is left to wait for"
        self._runtime.now += max(0.0, timeout)
        return self._selector.select(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)


@pytest.fixture
async def runtime() -> AsyncIterator[FakeRuntime]:
    found = FakeRuntime()
    loop: Any = asyncio.get_running_loop()
    selector = loop._selector
    loop._selector, loop.time = VirtualSelector(selector, found), found.monotonic
    yield found
    loop._selector = selector
    del loop.time


class Context:
    """A node with one peer: what it accepted, the gaps that it reported, and the log of the peer."""

    def __init__(self, runtime: FakeRuntime, origin: int, covered: int | None, **more: Any) -> None:
        self.runtime, self.origin = runtime, origin
        self.interest, self.counts = Interest(), Counts()
        self.interest.add(["shop/**"], 0, store=False)
        self.accepted: list[tuple[list[int], str, bool]] = []
        self.delivered: list[int] = []  # offsets; a gap is its key
        self.timeline: list[Any] = []  # offsets and gaps, in order
        self.gaps: list[tuple[str, int, bool]] = []  # key, sequence after the gap, counted
        self.open_gaps: list[tuple[str, int, int]] = []  # key, after, before
        self.coverages: list[int] = []
        self.seen, self.buffer_budget = Dedup(), buffered_events.BufferBudget()
        self.proofs = 0
        self.marks: list[Mark] = []
        self.splits: dict[int, int] = {}
        self.compared: list[Mark] = []
        self.digest = 0  # of the log; 0: unknown
        self.lacks = False  # whether retention removed events of the requested time
        self.rewound: list[tuple[int, int]] = []  # known, shared
        self.unconfirmed: list[tuple[int, int]] = []  # claimed, head
        self.fetched: list[tuple[str, int | None]] = []
        self.descriptions: list[dict[int, int]] = []  # what was known in each request
        self.lineage, self.clock_ns = Lineage((Incarnation(0, 1),)), 0
        self.storing: asyncio.Future[object] | None = None  # what `accept` returns for a page
        self.capacity = asyncio.Event()
        self.capacity.set()
        # The log of the peer.
        self.log: list[Envelope] = []
        self.low_water, self.page_events = 0, 100
        self.hidden: set[int] = set()  # corrupt events
        self.beyond = 0  # what its pages say that they cover, although the log ends before it
        self.errors: list[Exception] = []  # of the next requests
        self.error: Exception | None = None  # of all requests
        self.available = asyncio.Event()
        self.available.set()
        self.requests: list[tuple[int, int, str, tuple[str, ...] | None]] = []
        self.requested_at: list[float] = []
        self.peer = Peer(origin, self, covered, runtime, **more)

    # The context.

    def accept(self, envelopes: Sequence[Envelope], link: str, repaired: bool = False) -> asyncio.Future[object] | None:
        for each in envelopes:
            self.seen.arrival(each.publisher_id, each.sequence)
        offsets = [each.offset for each in envelopes]
        if offsets:
            self.accepted.append((offsets, link, repaired))
        self.delivered += offsets
        self.timeline += offsets
        return self.storing if repaired else None

    async def describe(self, origin: int, incarnation: int, link: str, known: Mapping[int, int]) -> LogPage:
        assert (origin, incarnation) == (self.origin, self.peer.branch.id)
        self.descriptions.append(dict(known))
        if self.error is not None:
            raise self.error
        shared = self.lineage.shared(known)
        head = self.log[-1].offset if self.log else 0
        rest = (self.lineage.branch, shared, self.clock_ns, Mark(self.peer.branch.id, head, self.digest))
        return LogPage([], head, head, self.low_water, 0, *rest)

    async def page(
        self,
        origin: int,
        after: int,
        from_ns: int,
        link: str,
        expressions: Sequence[str] | None = None,
        incarnation: int = 0,
        mark: Mark | None = None,
    ) -> LogPage:
        assert (origin, incarnation) == (self.origin, self.peer.branch.id)
        self.requests.append((after, from_ns, link, None if expressions is None else tuple(expressions)))
        self.requested_at.append(self.runtime.now)
        if self.errors:
            raise self.errors.pop(0)
        if self.error is not None:
            raise self.error
        head = self.log[-1].offset if self.log else 0
        events = [
            each for each in self.log if each.offset > max(after, self.low_water) and each.published_at >= from_ns
        ]
        events = events[: self.page_events]
        covered = self.beyond or (events[-1].offset if len(events) == self.page_events else head)
        await self.available.wait()
        kept = [msgspec.structs.replace(each, previous=0) for each in events if each.offset not in self.hidden]
        self.compared += [mark] if mark is not None else []
        differs = None if mark is None or mark.digest == self.digest else 0
        rest = (NO_BRANCH, None, 0, Mark(self.peer.branch.id, head, self.digest), differs, self.lacks)
        return LogPage(kept, covered, head, self.low_water, len(events) - len(kept), *rest)

    async def wait_for_capacity(self) -> None:
        await self.capacity.wait()

    def covered(self, origin: int, branch: Branch, offset: int) -> None:
        assert (origin, branch) == (self.origin, self.peer.branch)
        self.coverages.append(offset)

    def look_up(self, publisher_id: int, sequence: int) -> Arrival:
        return self.seen.look_up(publisher_id, sequence)

    def marked(self, origin: int, mark: Mark, confirmed: bool) -> bool:
        self.marks += [mark] if confirmed else []
        return mark.incarnation not in self.splits

    def split(self, origin: int, incarnation: int, before: int) -> None:
        self.splits[incarnation] = before

    def proven(self, origin: int, incarnation: int, shared: int) -> None:
        self.proofs += 1

    def report_late(self, envelope: Envelope, link: str) -> None:
        self.count("dropped_late", 1)

    def report_rewound(self, origin: int, branch: Branch, known: int, shared: int) -> None:
        self.rewound.append((known, shared))

    def report_unconfirmed(self, origin: int, claimed: int, head: int, link: str) -> None:
        self.unconfirmed.append((claimed, head))

    def past_fetched(self, origin: int, expression: str, reached: int | None) -> None:
        self.fetched.append((expression, reached))

    def report_gap(self, origin: int, key: str, publisher_id: int, sequence: int, counted: bool = False) -> bool:
        assert (origin, publisher_id) == (self.origin, 7)
        self.gaps.append((key, sequence, counted))
        self.timeline.append(f"gap before {sequence}")
        return True

    def report_open_gap(self, origin: int, key: str, publisher_id: int, after: int, sequence: int) -> bool:
        assert (origin, publisher_id) == (self.origin, 7)
        self.open_gaps.append((key, after, sequence))
        self.count("gaps_open", 1)
        return True

    def count(self, name: str, events: int) -> None:
        self.counts.add(name, events)

    # What a test does.

    def publish(self, *offsets: int, key: str = A) -> list[Envelope]:
        """Store events of one key in the log of the peer, and return them."""
        previous = max((each.offset for each in self.log if each.key == key), default=0)
        found = []
        for offset in offsets:
            found.append(envelope(offset, previous, key, origin=self.origin))
            previous = offset
        self.log = sorted([*self.log, *found], key=lambda each: each.offset)
        return found

    def receive(self, *envelopes: Envelope, link: str = "nats") -> None:
        """Receive one frame."""
        self.accept(self.peer.take(envelopes, link), link)

    def beacon(self, since: int, head: int, newest: dict[str, Newest] | None = None, link: str = "nats") -> None:
        found = {A: (head, 7, head)} if newest is None else newest
        self.peer.beacon(Beacon(self.origin, since, head, found), link)

    async def settle(self) -> None:
        """Run everything that needs no time to pass."""
        for _ in range(20):
            await asyncio.sleep(0)


Make = Callable[..., Context]


@pytest.fixture
async def make(runtime: FakeRuntime) -> AsyncIterator[Make]:
    made: list[Context] = []

    def make(origin: int = LOGGED, covered: int | None = 0, **more: Any) -> Context:
        made.append(Context(runtime, origin, covered, **more))
        return made[-1]

    yield make
    for context in made:
        if ending := context.peer.close():
            await asyncio.wait(ending)


# Events in order.


@pytest.mark.parametrize("origin", [LOGGED, UNLOGGED])
async def test_events_in_order_are_delivered_at_once_and_nothing_is_requested(make: Make, origin: int) -> None:
    context = make(origin)
    one, two, three = context.publish(1, 2, 3)

    context.receive(one, two)
    context.receive(three)
    assert context.delivered == [1, 2, 3]
    await asyncio.sleep(60)

    assert (context.requests, context.gaps, context.counts) == ([], [], {})


async def test_each_key_has_its_own_order(make: Make) -> None:
    context = make()
    one, three, five = context.publish(1, 3, 5)
    two, four = context.publish(2, 4, key=B)

    context.receive(one, three, five)
    context.receive(two, four)

    assert context.delivered == [1, 3, 5, 2, 4]
    await context.settle()
    assert context.requests == []


@pytest.mark.parametrize("origin", [LOGGED, UNLOGGED])
async def test_a_duplicate_is_counted_and_not_delivered(make: Make, origin: int) -> None:
    context = make(origin)
    one, two, three = context.publish(1, 2, 3)

    context.receive(one, two)
    context.receive(one, two, three, link="zmq")
    context.receive(two)

    assert context.delivered == [1, 2, 3]
    assert context.counts == {"duplicates_received": 3}


async def test_only_its_identity_makes_an_event_a_duplicate_whatever_its_offset(make: Make) -> None:
    context = make(covered=2)
    one, two, three = context.publish(1, 2, 3)
    context.seen.arrival(7, 1)

    context.receive(one, two, three)

    assert context.delivered == [2, 3]
    assert context.counts == {"duplicates_received": 1}
    await context.settle()
    assert [after for after, *_ in context.requests] == [2]  # the log is asked what else is missing


# Gaps that the log repairs.


async def test_a_gap_is_repaired_from_the_log_before_later_events_are_delivered(make: Make) -> None:
    context = make()
    one, _, three, four = context.publish(1, 2, 3, 4)
    context.receive(one)
    context.receive(three)
    context.receive(four)
    assert context.delivered == [1]

    await context.settle()

    assert context.requests == [(0, 0, "nats", None)]
    assert context.delivered == [1, 2, 3, 4]
    assert context.accepted == [([1], "nats", False), ([2, 3, 4], "nats", True)]
    assert context.counts == {
        "gaps": 1,
        "gaps_repaired": 1,
        "events_repaired": 3,
    }
    assert (context.gaps, context.coverages) == ([], [4])


async def test_events_that_arrive_during_a_repair_follow_the_page_in_order(make: Make) -> None:
    context = make()
    one, _, three = context.publish(1, 2, 3)
    context.available.clear()
    context.receive(one, three)
    await context.settle()
    four, five, six = context.publish(4, 5, 6)
    context.receive(six, link="zmq")
    context.receive(four, link="nats")
    context.receive(five, link="nats")
    await context.settle()
    assert context.delivered == [1]

    context.available.set()
    await context.settle()

    assert context.accepted[1:] == [([2, 3], "nats", True), ([4, 5], "nats", False), ([6], "zmq", False)]
    assert context.coverages == [3]
    context.receive(*context.publish(7))
    assert context.delivered[-1] == 7


async def test_events_after_a_repair_are_delivered_at_once(make: Make) -> None:
    context = make()
    one, _, three = context.publish(1, 2, 3)
    context.receive(one, three)
    await context.settle()

    context.receive(*context.publish(4))

    assert context.delivered == [1, 2, 3, 4]
    await context.settle()
    assert len(context.requests) == 1


async def test_all_events_of_a_frame_after_the_gap_are_buffered(make: Make) -> None:
    context = make()
    one, _, three = context.publish(1, 2, 3)
    four = envelope(4, 3, A)  # the log does not show it yet
    context.receive(one)
    context.receive(three, four)
    await context.settle()

    assert context.delivered == [1, 2, 3, 4]
    assert len(context.requests) == 1


async def test_a_gap_among_the_buffered_events_starts_another_repair(make: Make) -> None:
    context = make()
    one, _, three = context.publish(1, 2, 3)
    context.available.clear()
    context.receive(one, three)
    await context.settle()
    _, five = context.publish(4, 5)
    context.receive(five)

    context.available.set()
    await context.settle()

    assert context.delivered == [1, 2, 3, 4, 5]
    assert [after for after, *_ in context.requests] == [0, 3]
    assert (context.counts["gaps"], context.counts["gaps_repaired"]) == (2, 2)
    assert context.coverages == [5]


async def test_a_late_frame_is_a_duplicate_of_the_repair(make: Make) -> None:
    context = make()
    one, two, three = context.publish(1, 2, 3)
    context.receive(one)
    context.receive(three)
    context.receive(two)
    await context.settle()
    context.receive(two)

    assert context.delivered == [1, 2, 3]
    assert context.counts["duplicates_received"] == 1


async def test_a_long_gap_is_requested_page_by_page_after_the_last_covered_offset(make: Make) -> None:
    context = make()
    events = context.publish(*range(1, 8))
    context.page_events = 3
    context.receive(events[0])
    context.receive(events[-1])

    await context.settle()

    assert [after for after, *_ in context.requests] == [0, 3, 6]
    assert context.delivered == [1, 2, 3, 4, 5, 6, 7]
    assert context.counts["events_repaired"] == 6
    assert context.counts["gaps"] == 1


async def test_the_next_page_is_requested_once_the_last_one_is_stored(make: Make) -> None:
    context = make()
    events = context.publish(*range(1, 5))
    context.page_events = 2
    context.storing = asyncio.get_running_loop().create_future()
    context.receive(events[0])
    context.receive(events[-1])

    await context.settle()
    assert (len(context.requests), context.delivered) == (1, [1, 2])
    context.storing.set_result(None)
    await context.settle()

    assert context.delivered == [1, 2, 3, 4]
    assert [after for after, *_ in context.requests] == [0, 2]


async def test_a_page_that_could_not_be_stored_is_requested_again(make: Make) -> None:
    context = make()
    one, _, three = context.publish(1, 2, 3)
    failed = context.storing = asyncio.get_running_loop().create_future()
    context.receive(one, three)
    await context.settle()

    context.storing = None
    failed.set_exception(LogError("the disk is full"))
    with recorded(logging.WARNING) as records:
        await asyncio.sleep(1)

    assert [after for after, *_ in context.requests] == [0, 0]
    assert context.delivered == [1, 2, 3, 2, 3]  # known by their identity
    assert [(each["record"], each["reason"]) for each in records] == [("EVENT_RETRY", "the disk is full")]


async def test_a_page_waits_for_capacity(make: Make) -> None:
    context = make()
    one, _, three = context.publish(1, 2, 3)
    context.capacity.clear()
    context.receive(one, three)
    await asyncio.sleep(5)
    assert (len(context.requests), context.delivered) == (1, [1])

    context.capacity.set()
    await context.settle()

    assert context.delivered == [1, 2, 3]


async def test_an_empty_page_that_covers_a_range_is_followed_by_the_next_one(make: Make) -> None:
    """The range had only events that this node does not want."""
    context = make()
    one, *_, six = context.publish(1, 2, 3, 4, 5, 6)
    context.page_events, context.hidden = 2, {3, 4}
    context.receive(one)
    context.receive(six)

    await asyncio.sleep(2 * EMPTY_PAGE_S)

    assert [after for after, *_ in context.requests] == [0, 2, 4]
    assert context.delivered == [1, 2, 5, 6]


async def test_an_empty_log_ends_the_repair_and_the_buffered_events_are_requested_again(make: Make) -> None:
    """The log lags behind its own send queue: its first page shows nothing yet."""
    context = make()
    one, _, three = context.publish(1, 2, 3)
    log, context.log = context.log, []
    context.available.clear()
    context.receive(one, three)
    await context.settle()
    context.log = log

    context.available.set()
    await context.settle()

    assert context.delivered == [1, 2, 3]
    assert [after for after, *_ in context.requests] == [0, 0]


async def test_the_page_request_names_the_link_where_the_peer_was_last_seen(make: Make) -> None:
    context = make()
    one, _, three = context.publish(1, 2, 3)
    context.receive(one, link="nats")
    context.receive(three, link="zmq")
    await context.settle()

    assert context.requests == [(0, 0, "zmq", None)]
    assert context.accepted[-1] == ([2, 3], "zmq", True)


# Requests that fail.


async def test_a_malformed_page_is_logged_and_requested_again_after_a_pause(make: Make, runtime: FakeRuntime) -> None:
    context = make()
    one, _, three = context.publish(1, 2, 3)
    context.errors = [TransportError("log 5 sent a malformed reply"), TransportError("log 5 sent a malformed reply")]
    began = runtime.now
    with recorded(logging.WARNING) as records:
        context.receive(one, three)
        await asyncio.sleep(1)

    assert context.delivered == [1, 2, 3]
    first_s = RETRY_S[0]
    assert [at - began for at in context.requested_at] == pytest.approx([0.0, first_s, 3 * first_s])
    assert [(each["record"], each["code"], each["reason"], each["again_in_s"]) for each in records] == [
        ("EVENT_RETRY", "repair_failed", "log 5 sent a malformed reply", first_s),
        ("EVENT_RETRY", "repair_failed", "log 5 sent a malformed reply", 2 * first_s),
    ]


async def test_a_page_that_arrived_resets_the_pause(make: Make, runtime: FakeRuntime) -> None:
    context = make()
    events = context.publish(*range(1, 5))
    context.page_events = 2
    fails = TransportError("incomplete")
    context.errors = [fails, fails]
    context.receive(events[0])
    context.receive(events[-1])
    await asyncio.sleep(2.5 * RETRY_S[0])  # after two errors, and before the next request
    context.available.clear()
    await asyncio.sleep(1)
    context.errors = [fails]  # of the second page
    context.available.set()
    await asyncio.sleep(1)

    assert round(context.requested_at[-1] - context.requested_at[-2], 3) == RETRY_S[0]
    assert context.delivered == [1, 2, 3, 4]


async def test_a_repair_that_takes_long_is_not_given_up_as_long_as_pages_arrive(make: Make) -> None:
    context = make()
    events = context.publish(*range(1, 5))
    context.page_events = 2
    context.available.clear()
    context.receive(events[0])
    context.receive(events[-1])
    await asyncio.sleep(GIVE_UP_S + 1)
    context.errors = [NoResponders("@zbus/log/5")]
    context.available.set()
    await asyncio.sleep(1)

    assert context.timeline == [1, 2, 3, 4]


async def test_a_bug_in_the_node_does_not_end_the_repair(make: Make) -> None:
    context = make()
    one, _, three = context.publish(1, 2, 3)
    context.errors = [ZeroDivisionError("a bug")]
    with recorded(logging.WARNING) as records:
        context.receive(one, three)
        await asyncio.sleep(1)

    assert context.delivered == [1, 2, 3]
    assert [each["record"] for each in records] == ["EVENT_RETRY"]


async def test_a_request_without_a_reply_is_repeated_without_a_warning(make: Make) -> None:
    context = make()
    one, _, three = context.publish(1, 2, 3)
    context.errors = [NoResponders("@zbus/log/5")]
    with recorded(logging.WARNING) as records:
        context.receive(one, three)
        await asyncio.sleep(1)

    assert context.delivered == [1, 2, 3]
    assert records == []


@pytest.mark.parametrize("sign", ["event", "beacon"])
async def test_a_peer_that_is_seen_again_gets_a_request_at_once(make: Make, runtime: FakeRuntime, sign: str) -> None:
    context = make()
    one, _, three = context.publish(1, 2, 3)
    context.error = NoResponders("@zbus/log/5")
    context.receive(one, three)
    await asyncio.sleep(5)  # the pauses are long by now
    before, context.error = len(context.requests), None
    if sign == "event":
        context.receive(*context.publish(4))
    else:
        context.beacon(3, 4)
    now = runtime.now
    await context.settle()

    assert runtime.now == now
    assert len(context.requests) == before + 1
    assert context.delivered[:3] == [1, 2, 3]


# Gaps that cannot be repaired.


async def test_a_gap_is_reported_when_the_log_does_not_reply_and_delivery_resumes(make: Make) -> None:
    context = make()
    one, _, three, four = context.publish(1, 2, 3, 4)
    context.error = NoResponders("@zbus/log/5")
    with recorded(logging.WARNING) as records:
        context.receive(one, three)
        context.receive(four)
        await asyncio.sleep(GIVE_UP_S - 1)
        assert (context.delivered, context.gaps) == ([1], [])
        await asyncio.sleep(2 * RETRY_S[1] + 1)

    assert context.timeline == [1, "gap before 3", 3, 4]
    assert context.gaps == [(A, 3, False)]
    assert [(each["record"], each["code"], each["events"]) for each in records] == [
        ("EVENT_REPLAY_FAILED", "repair_timeout", 0)
    ]
    requests = len(context.requests)
    context.receive(*context.publish(5))
    assert context.delivered[-1] == 5
    context.beacon(4, 5)
    await asyncio.sleep(60)
    assert len(context.requests) == requests  # the lost event is not requested again


async def test_only_keys_with_a_gap_are_reported(make: Make) -> None:
    context = make()
    one, _, three = context.publish(1, 2, 3)
    four, five = context.publish(4, 5, key=B)
    context.error = NoResponders("@zbus/log/5")
    context.receive(one, three)
    context.receive(four, five)
    context.receive(four)
    await asyncio.sleep(GIVE_UP_S + 3)

    assert context.timeline == [1, "gap before 3", 3, 4, 5]
    assert context.counts["duplicates_received"] == 1


@pytest.mark.parametrize("first", [2, 10**6], ids=["covered", "far"])
@pytest.mark.parametrize("stored", [False, True], ids=["live", "stored"])
async def test_a_log_that_never_catches_up_and_sends_no_events_is_given_up(
    make: Make, stored: bool, first: int
) -> None:
    context = make(covered=None if first == 2 else 0)
    if stored:
        context.interest.add(["shop/a"], 0, store=True)
    one, _, three, four = context.publish(1, first, first + 1, first + 2)
    pages = 0

    async def creep(
        origin: int, after: int, from_ns: int, link: str, expressions: object = None, **more: object
    ) -> LogPage:
        nonlocal pages
        pages += 1
        return LogPage([], after + 1, 1 << 60, 0)

    context.page = creep  # type: ignore[method-assign, assignment]
    with recorded(logging.WARNING) as records:
        context.receive(one, three)
        await asyncio.sleep(GIVE_UP_S + 1)
        assert [each["code"] for each in records if each["record"] == "EVENT_REPLAY_FAILED"] == ["repair_timeout"]
        if stored:
            assert (context.timeline, context.open_gaps) == ([1], [(A, -1, three.sequence)])
            context.receive(*context.publish(first + 3, key=B))
            assert context.timeline == [1, first + 3]  # a key without a gap is not held back
        else:
            assert context.timeline == [1, f"gap before {three.sequence}", three.offset]
            if first > 2:
                context.receive(four)
                assert context.timeline[-1] == four.offset
    assert pages <= 1.1 * GIVE_UP_S / EMPTY_PAGE_S + 110  # it pauses between them


async def test_a_gap_of_a_stored_key_stays_open_until_the_peer_is_back(make: Make) -> None:
    context = make()
    context.interest.add(["shop/a"], 0, store=True)
    one, _, three = context.publish(1, 2, 3)
    four, _, six = context.publish(4, 5, 6, key=B)
    context.error = NoResponders("@zbus/log/5")
    with recorded(logging.WARNING) as records:
        context.receive(one, three)
        context.receive(four, six)
        await asyncio.sleep(3 * GIVE_UP_S + 7)

    assert [each["record"] for each in records] == ["EVENT_REPLAY_FAILED"]  # once
    assert context.timeline == [1, 4, "gap before 6", 6]  # only this node's log needs the stored key
    assert context.open_gaps == [(A, -1, 3)]  # once
    assert context.counts["gaps_open"] == 1

    seven, eight = context.publish(7, key=B)[0], envelope(8, 3, A)  # the log does not show the last one yet
    context.receive(seven, eight)
    assert context.delivered[-1] == 7  # a key without a gap is not delayed
    context.receive(seven)
    assert context.delivered.count(7) == 1

    context.error = None
    await asyncio.sleep(2 * RETRY_S[1])

    assert context.delivered[-3:] == [2, 3, 8]
    assert context.counts["gaps_open"] == 0
    assert context.counts["gaps_repaired"] == 1
    context.log.append(eight)
    context.receive(*context.publish(9))
    assert context.delivered[-1] == 9

    context.available.clear()
    _, eleven = context.publish(10, 11)
    context.receive(eleven)
    context.receive(*context.publish(12, key=B))
    assert context.delivered[-1] == 9  # the next repair delays all keys again
    context.available.set()
    await context.settle()
    assert context.delivered[-3:] == [10, 11, 12]


async def test_a_stored_key_without_a_gap_does_not_wait(make: Make) -> None:
    context = make()
    context.interest.add(["shop/**"], 0, store=True)
    one, _, three = context.publish(1, 2, 3)
    context.error = NoResponders("@zbus/log/5")
    context.receive(one, three)
    context.receive(*context.publish(4, 5, key=B))
    await asyncio.sleep(GIVE_UP_S + 3)

    assert context.timeline == [1, 4, 5]
    assert context.open_gaps == [(A, -1, 3)]


async def test_lost_last_events_of_a_stored_key_are_an_open_gap(make: Make) -> None:
    context = make()
    context.interest.add(["shop/**"], 0, store=True)
    one, _, _ = context.publish(1, 2, 3)
    context.error = NoResponders("@zbus/log/5")
    context.receive(one)
    context.beacon(0, 3)
    await asyncio.sleep(TAIL_S + GIVE_UP_S + 3)

    assert (context.gaps, context.open_gaps) == ([], [(A, -1, 4)])
    context.error = None
    await asyncio.sleep(2 * RETRY_S[1])
    assert context.delivered == [1, 2, 3]
    assert context.counts["gaps_open"] == 0


async def test_known_events_are_duplicates_even_if_the_log_does_not_reply(make: Make) -> None:
    context = make(covered=7)
    events = context.publish(*range(1, 11))
    context.seen.arrival(7, 5)
    context.error = NoResponders("@zbus/log/5")
    context.receive(events[9])
    context.receive(events[4])
    await asyncio.sleep(GIVE_UP_S + 3)

    assert context.timeline == ["gap before 10", 10]
    assert context.counts == {"duplicates_received": 1}


@pytest.mark.parametrize("store", [False, True])
async def test_a_peer_without_a_log_has_its_gaps_reported_after_a_moment(make: Make, store: bool) -> None:
    context = make(UNLOGGED)
    context.interest.add([A], 0, store)
    one, _, three, four = context.publish(1, 2, 3, 4)
    context.receive(one)
    context.receive(three)
    context.receive(four)
    assert context.delivered == [1]
    await asyncio.sleep(TAIL_S - 0.01)
    assert context.gaps == []
    await asyncio.sleep(0.02)

    assert context.timeline == [1, "gap before 3", 3, 4]
    assert (context.requests, context.counts) == ([], {})
    context.receive(*context.publish(5))
    assert context.delivered[-1] == 5


async def test_events_over_two_links_are_put_in_order_without_a_gap(make: Make) -> None:
    context = make(UNLOGGED)
    one, two, three = context.publish(1, 2, 3)
    context.receive(one, link="nats")
    context.receive(three, link="zmq")
    context.receive(two, link="nats")
    await asyncio.sleep(1)

    assert context.accepted == [([1], "nats", False), ([2], "nats", False), ([3], "zmq", False)]
    assert context.gaps == []


async def test_the_first_event_of_a_key_of_a_new_peer_without_a_log_shows_no_gap(make: Make) -> None:
    context = make(UNLOGGED, covered=None)
    *_, five, six = context.publish(1, 2, 3, 4, 5, 6)
    context.receive(five)
    *_, eight = context.publish(7, 8, key=B)
    context.receive(eight)
    context.receive(six)
    assert context.delivered == [5, 8, 6]

    context.beacon(0, 8, {})
    context.beacon(8, 9, {})
    *_, twelve = context.publish(11, 12, key="shop/c")
    context.receive(twelve)
    assert context.delivered == [5, 8, 6]  # two beacons later, a new key has a predecessor that is missing
    await asyncio.sleep(1)

    assert context.gaps == [("shop/c", 12, False)]


async def test_after_a_change_of_interest_the_first_event_of_a_key_shows_no_gap(make: Make) -> None:
    context = make(UNLOGGED)
    context.receive(*context.publish(1))
    context.peer.interest_changed()
    _, three, _, five = context.publish(2, 3, 4, 5, key=B)
    context.receive(three)
    assert context.delivered == [1, 3]

    context.receive(five)  # but the second one does
    assert context.delivered == [1, 3]
    await asyncio.sleep(1)
    assert context.timeline == [1, 3, "gap before 5", 5]


async def test_after_a_change_of_interest_a_peer_with_a_log_still_gets_requests(make: Make) -> None:
    context = make()
    context.peer.interest_changed()
    _, two = context.publish(1, 2)
    context.receive(two)
    assert context.delivered == []
    await context.settle()

    assert context.delivered == [1, 2]


# Retention and damage at the peer.


async def test_a_trimmed_range_is_reported_before_the_first_event_after_it(make: Make) -> None:
    context = make()
    one, *_, five = context.publish(1, 2, 3, 4, 5)
    context.low_water = 3
    context.receive(one)
    context.receive(five)
    await context.settle()

    assert context.timeline == [1, "gap before 4", 4, 5]
    assert context.gaps == [(A, 4, False)]
    assert "gaps_unrepaired" not in context.counts  # `report_gap` counts it
    context.receive(*context.publish(6))
    assert len(context.gaps) == 1


async def test_a_log_that_ends_before_what_it_confirmed_is_reported_and_followed_from_its_end(make: Make) -> None:
    context = make(covered=7)
    context.publish(1, 2)
    context.beacon(8, 9)
    await context.settle()
    assert (context.rewound, context.peer.confirmed) == ([(7, 2)], 2)

    await asyncio.sleep(1)
    context.receive(*context.publish(3))
    assert context.delivered == [3]


async def test_a_page_that_covers_more_than_its_log_has_is_not_believed(make: Make) -> None:
    context = make()
    one, _, three = context.publish(1, 2, 3)
    context.beyond = 1 << 60
    context.receive(one)
    context.receive(three)
    await context.settle()
    assert context.peer.confirmed == 0

    context.beyond = 0
    await asyncio.sleep(2 * RETRY_S[1])
    assert (context.delivered, context.peer.confirmed) == ([1, 2, 3], 3)


async def test_a_false_beacon_that_passes_lost_events_is_noticed_with_the_next_event_of_their_key(make: Make) -> None:
    context = make()
    one, _, _, four = context.publish(1, 2, 3, 4)
    context.receive(one)
    await asyncio.sleep(1)
    context.beacon(0, 1, {A: (1, 7, 1)})
    context.beacon(1, 3, {"other/key": (3, 9, 9)})
    assert context.peer.covered == 3

    context.receive(four)
    await context.settle()

    assert context.delivered == [1, 2, 3, 4]


async def test_a_beacon_that_names_an_unknown_event_is_not_believed_because_of_a_later_offset_of_its_key(
    make: Make,
) -> None:
    context = make()
    one, two = context.publish(1, 2)
    context.receive(one, msgspec.structs.replace(two, offset=1000, sequence=500, publisher_id=99))
    context.beacon(0, 2, {A: (2, 7, 2)})
    await asyncio.sleep(1)

    assert context.delivered == [1, 1000, 2]


async def test_a_range_that_was_trimmed_up_to_the_head_is_counted_and_then_reported(make: Make) -> None:
    context = make()
    context.publish(1, 2, 3)
    context.low_water = 3
    with recorded(logging.WARNING) as records:
        context.beacon(2, 3)
        await context.settle()

    assert [(each["record"], each["code"], each["after"], each["until"]) for each in records] == [
        ("EVENT_GAP", "gap_trimmed", 0, 3)
    ]
    assert context.counts == {"gaps": 1, "gaps_unrepaired": 1}
    assert context.gaps == []

    context.receive(*context.publish(4))
    assert context.gaps == [(A, 4, True)]  # the counters have it already


async def test_a_new_peer_does_not_miss_what_was_trimmed_before(make: Make) -> None:
    context = make(covered=None)
    context.publish(1, 2, 3, 4)
    context.low_water = 2
    context.beacon(3, 4)
    await context.settle()

    assert context.timeline == [3, 4]
    assert (context.gaps, context.counts) == ([], {"events_repaired": 2})


async def test_a_corrupt_event_in_the_log_does_not_stop_the_repair_and_is_reported_as_a_gap(make: Make) -> None:
    context = make()
    one, *_, four = context.publish(1, 2, 3, 4)
    context.hidden = {2}
    context.receive(one)
    with recorded(logging.WARNING) as records:
        context.receive(four)
        await context.settle()

    assert context.delivered == [1, 3, 4]
    assert len(context.requests) == 1
    found = [(each["record"], each["code"], each["events"], each["after"], each["until"]) for each in records]
    assert found == [("EVENT_GAP", "gap_corrupt", 1, 0, 4)]
    assert context.counts["gaps_unrepaired"] == 1


async def test_a_page_that_covers_nothing_of_a_longer_log_is_requested_again_after_a_pause(make: Make) -> None:
    context = make(covered=1)
    events = context.publish(1, 2, 3)
    stale = LogPage([], 1, 3, 0, 0)
    pages = [stale, stale]
    page = context.page

    async def stale_at_first(*args: Any, **more: Any) -> LogPage:
        found = await page(*args, **more)
        return pages.pop() if pages else found

    context.page = stale_at_first  # type: ignore[method-assign]
    with recorded(logging.WARNING) as records:
        context.receive(events[2])
        await asyncio.sleep(30)

    assert context.delivered == [2, 3]
    assert len(context.requests) == 3
    assert context.requested_at[1] > context.requested_at[0]
    assert [(each["record"], each["code"]) for each in records] == [("EVENT_RETRY", "repair_failed")] * 2


# Beacons.


async def test_a_beacon_of_events_that_arrived_advances_the_covered_offset(make: Make) -> None:
    context = make()
    context.receive(*context.publish(1, 2, 3))
    context.beacon(0, 3)
    await asyncio.sleep(10)

    assert (context.coverages, context.requests) == ([3], [])
    context.beacon(0, 3)
    assert context.coverages == [3]


async def test_events_named_by_a_beacon_may_be_in_flight_for_a_moment(make: Make) -> None:
    context = make()
    one, two = context.publish(1, 2)
    context.receive(one)
    context.beacon(0, 2)
    await asyncio.sleep(TAIL_S / 2)
    context.receive(two)
    await asyncio.sleep(TAIL_S + CONFIRM_S[0])

    assert (context.delivered, context.requests, context.coverages) == ([1, 2], [], [2])


async def test_lost_last_events_are_requested_after_a_beacon(make: Make) -> None:
    context = make()
    one, *_ = context.publish(1, 2, 3)
    context.receive(one)
    context.beacon(0, 3)
    await asyncio.sleep(TAIL_S - 0.01)
    assert context.requests == []
    await asyncio.sleep(0.02)

    assert context.delivered == [1, 2, 3]
    assert context.coverages == [3]


async def test_while_events_keep_arriving_the_request_waits_but_not_forever(make: Make) -> None:
    context = make()
    context.publish(1, 2)  # lost
    context.beacon(0, 2)
    others = iter(range(3, 1000))
    for _ in range(TAIL_TURNS_MAX):
        context.receive(*context.publish(next(others), key=B))
        await asyncio.sleep(TAIL_S)
    assert context.requests == []

    context.receive(*context.publish(next(others), key=B))
    await asyncio.sleep(TAIL_S + 0.01)

    assert len(context.requests) == 1
    assert context.delivered[-2:] == [1, 2]


@pytest.mark.parametrize("lost", [2, 3])
async def test_beacons_that_follow_each_other_are_one(make: Make, lost: int) -> None:
    context = make()
    one, two = context.publish(1, 2)
    (three,) = context.publish(3, key=B)
    context.receive(one)
    context.beacon(0, 2, {A: (2, 7, 2)})
    context.beacon(2, 3, {B: (3, 7, 3)})
    context.receive(three if lost == 2 else two)
    await asyncio.sleep(TAIL_S / 2)
    assert context.requests == []
    await asyncio.sleep(1)

    assert sorted(context.delivered) == [1, 2, 3]
    assert [after for after, *_ in context.requests] == [0]


async def test_a_beacon_may_name_events_again_that_are_covered(make: Make) -> None:
    context = make()
    context.receive(*context.publish(1, 2))
    context.beacon(0, 2)
    context.receive(*context.publish(3, key=B))
    await asyncio.sleep(2 * CONFIRM_S[0])
    context.beacon(0, 3, {A: (2, 7, 2), B: (3, 7, 3)})
    await asyncio.sleep(2 * CONFIRM_S[0])

    assert context.coverages == [2, 3]


async def test_a_missing_beacon_starts_a_repair_at_once(make: Make, runtime: FakeRuntime) -> None:
    context = make()
    context.receive(*context.publish(1))
    context.publish(2, 3, 4)
    now = runtime.now
    context.beacon(3, 4)
    await context.settle()

    assert runtime.now == now
    assert context.delivered == [1, 2, 3, 4]


async def test_a_beacon_of_keys_that_this_node_does_not_want_requests_nothing(make: Make) -> None:
    context = make()
    context.publish(5, key="audit/x")
    context.beacon(0, 5, {"audit/x": (5, 7, 5)})
    await asyncio.sleep(10)

    assert (context.requests, context.coverages) == ([], [5])


async def test_lost_last_events_of_a_peer_without_a_log_are_reported(make: Make) -> None:
    context = make(UNLOGGED)
    one, *_ = context.publish(1, 2, 3)
    context.receive(one)
    context.beacon(0, 3)
    await asyncio.sleep(TAIL_S - 0.01)
    assert context.gaps == []
    await asyncio.sleep(0.02)

    assert context.gaps == [(A, 4, False)]
    context.receive(*context.publish(4))
    assert context.delivered == [1, 4]
    context.beacon(0, 4)
    await asyncio.sleep(1)
    assert len(context.gaps) == 1


async def test_a_new_peer_without_a_log_misses_nothing_that_its_first_beacon_names(make: Make) -> None:
    context = make(UNLOGGED, covered=None)
    context.beacon(2, 5)
    await asyncio.sleep(1)

    assert (context.gaps, context.coverages, context.peer.covered) == ([], [], 5)


async def test_events_after_the_first_beacon_of_a_new_peer_without_a_log_follow_its_start(make: Make) -> None:
    context = make(UNLOGGED, covered=None)
    _, _, three, four, five = context.publish(1, 2, 3, 4, 5)
    context.beacon(2, 5)
    context.beacon(5, 6, {})
    context.receive(three, four, five)

    assert context.delivered == [3, 4, 5]


async def test_a_new_peer_whose_log_does_not_reply_has_no_gap_before_its_first_event(make: Make) -> None:
    context = make(covered=None)
    context.publish(1, 2, 3, 4)
    context.error = NoResponders("@zbus/log/5")
    context.beacon(3, 4)
    await asyncio.sleep(1)
    context.beacon(3, 4)
    await asyncio.sleep(GIVE_UP_S + 3)

    assert (context.gaps, context.open_gaps) == ([], [])


async def test_lost_last_events_are_reported_when_the_log_does_not_reply(make: Make) -> None:
    context = make()
    one, _, _ = context.publish(1, 2, 3)
    context.error = NoResponders("@zbus/log/5")
    context.receive(one)
    context.beacon(0, 3)
    await asyncio.sleep(TAIL_S + GIVE_UP_S + 3)

    assert context.gaps == [(A, 4, False)]
    requests = len(context.requests)
    context.beacon(0, 3)
    await asyncio.sleep(10)
    assert (len(context.gaps), len(context.requests)) == (1, requests)


async def test_events_that_a_recent_beacon_names_are_not_given_up_with_the_others(make: Make) -> None:
    context = make()
    one, _, three = context.publish(1, 2, 3)
    context.error = NoResponders("@zbus/log/5")
    context.receive(one, three)
    while not context.gaps:
        context.beacon(3, 4)  # so its event is always in flight
        await asyncio.sleep(TAIL_S / 2)
    assert context.gaps == [(A, 3, False)]
    context.receive(*context.publish(4))
    context.error = None
    await asyncio.sleep(5)

    assert context.timeline == [1, "gap before 3", 3, 4]
    assert context.coverages == [4]


async def test_an_event_that_a_later_one_on_another_key_overtook_is_not_given_up_with_the_others(make: Make) -> None:
    context = make()
    one, _, three = context.publish(1, 2, 3)
    context.error = NoResponders("@zbus/log/5")
    context.receive(one, three)
    context.beacon(0, 3)
    await asyncio.sleep(GIVE_UP_S - 1)
    (four,) = context.publish(4)
    (five,) = context.publish(5, key="b/other")
    context.receive(five)  # and not the fourth, which is in flight
    while not context.gaps:
        await asyncio.sleep(TAIL_S / 2)
    context.receive(four)
    await asyncio.sleep(5)

    assert context.timeline == [1, "gap before 3", 3, 5, 4]


@pytest.mark.parametrize("shown_by", ["the next event", "a beacon"])
async def test_an_event_that_was_lost_when_the_repair_was_given_up_is_reported(make: Make, shown_by: str) -> None:
    """It comes before a lost event of another key, of which later events are known."""
    context = make()
    one, _, three = context.publish(1, 2, 3)
    context.error = NoResponders("@zbus/log/5")
    context.receive(one, three)
    context.beacon(0, 3)
    await asyncio.sleep(GIVE_UP_S - 1)
    context.publish(4)  # lost
    *_, six = context.publish(5, 6, key="b/other")  # the fifth is lost too
    context.receive(six)
    while len(context.gaps) < 2:
        await asyncio.sleep(TAIL_S / 2)
    assert [gap[0] for gap in context.gaps] == [A, "b/other"]
    if shown_by == "the next event":
        context.receive(*context.publish(7))
    else:
        context.beacon(3, 6, {A: (4, 7, 4), "b/other": (6, 7, 6)})
    await asyncio.sleep(1)

    assert [gap[0] for gap in context.gaps] == [A, "b/other", A]


# New peers, and peers that were known before a restart.


async def test_after_a_restart_the_repair_begins_after_the_stored_position(make: Make) -> None:
    context = make(covered=7)
    *_, ten = context.publish(*range(1, 11))
    context.receive(ten)
    await context.settle()

    assert context.requests == [(7, 0, "nats", None)]
    assert context.delivered == [8, 9, 10]


async def test_after_a_restart_a_beacon_shows_what_was_missed(make: Make) -> None:
    context = make(covered=7)
    context.publish(*range(1, 11))
    context.beacon(9, 10)
    await context.settle()

    assert context.delivered == [8, 9, 10]
    assert context.coverages == [10]


async def test_a_new_peer_gets_a_request_for_the_events_since_this_node_subscribed(make: Make) -> None:
    context = make(covered=None)
    context.interest.remove(["shop/**"], 0, store=False)
    context.interest.add([A], 1003, store=False)
    context.interest.add([B], 1005, store=False)
    context.publish(1, 3, 5)
    context.publish(2, 4, 6, key=B)
    context.beacon(5, 6)
    await context.settle()

    assert context.requests == [(0, 1003, "nats", None)]
    assert context.delivered == [3, 5, 6]
    assert "gaps" not in context.counts


async def test_a_new_peer_whose_clock_is_behind_gets_a_request_by_its_own_clock(make: Make) -> None:
    context = make(covered=None)
    context.interest.remove(["shop/**"], 0, store=False)
    context.interest.add(["shop/**"], 5000, store=False)
    context.receive(envelope(1, 0, A))  # published at 1001, by its clock
    _, three = context.publish(2, 3)
    context.receive(msgspec.structs.replace(three, previous=2))
    await context.settle()

    assert context.requests == [(0, 1001, "nats", None)]
    assert context.delivered == [1, 2, 3]


async def test_a_known_peer_gets_no_request_by_time(make: Make) -> None:
    context = make(covered=1)
    context.interest.remove(["shop/**"], 0, store=False)
    context.interest.add(["shop/**"], 5000, store=False)
    *_, four = context.publish(1, 2, 3, 4)
    context.receive(four)
    await context.settle()

    assert context.requests == [(1, 0, "nats", None)]
    assert context.delivered == [2, 3, 4]


async def test_of_an_expression_that_is_new_only_later_events_are_delivered(make: Make, runtime: FakeRuntime) -> None:
    context = make(covered=0)
    one, _, three = context.publish(1, 2, 3)
    context.publish(4, key="audit/x")
    await asyncio.sleep(1)
    context.interest.add(["audit/**"], runtime.time_ns(), store=False)
    context.receive(one, three)
    await context.settle()

    assert context.delivered == [1, 2, 3]


async def test_an_expression_that_is_older_than_the_covered_offset_does_not_depend_on_clocks(
    make: Make, runtime: FakeRuntime
) -> None:
    context = make()
    await asyncio.sleep(1)
    context.interest.add(["audit/**"], runtime.time_ns(), store=False)
    await asyncio.sleep(1)
    context.receive(*context.publish(1))
    context.beacon(0, 1)
    context.publish(2, key="audit/x")  # published long ago, by the clock of the peer
    _, four = context.publish(3, 4)
    context.receive(four)
    await context.settle()

    assert context.delivered == [1, 2, 3, 4]


# Events that could not be stored, and events of the past.


async def test_events_that_could_not_be_stored_are_requested_again(make: Make) -> None:
    context = make()
    context.receive(*context.publish(1, 2, 3, 4))
    context.beacon(0, 4)
    context.peer.rewind(3)
    context.peer.rewind(1)
    await context.settle()

    assert [after for after, *_ in context.requests] == [1]
    assert context.delivered == [1, 2, 3, 4, 2, 3, 4]
    assert context.coverages == [4]


async def test_a_rewind_during_a_repair_extends_it(make: Make) -> None:
    context = make()
    context.receive(*context.publish(1, 2))
    context.beacon(0, 2)
    _, four = context.publish(3, 4)
    context.available.clear()
    context.receive(four)
    await context.settle()
    context.peer.rewind(1)
    context.available.set()
    await context.settle()

    assert [after for after, *_ in context.requests] == [2, 1]
    assert context.delivered == [1, 2, 3, 4, 2, 3, 4]


async def test_a_peer_without_a_log_cannot_be_rewound(make: Make) -> None:
    context = make(UNLOGGED)
    context.receive(*context.publish(1, 2))
    context.peer.rewind(0)
    context.peer.fetch_past([A])
    context.receive(*context.publish(3))
    assert context.delivered == [1, 2, 3]  # at once
    await asyncio.sleep(1)

    assert context.requests == []


async def test_past_events_of_a_known_peer_are_requested_page_by_page(make: Make) -> None:
    context = make()
    context.receive(*context.publish(1, 2, 3))
    context.interest.remove(["shop/**"], 0, store=False)
    context.interest.add([A], 1002, store=False)
    context.page_events = 2
    context.peer.fetch_past([A])
    await asyncio.sleep(2 * EMPTY_PAGE_S)

    assert context.requests == [(0, 0, "nats", (A,)), (2, 0, "nats", (A,)), (0, 0, "nats", None), (2, 0, "nats", None)]
    assert context.accepted[1:] == [([2], "nats", True), ([3], "nats", True)]  # and not those before the interest
    assert "gaps" not in context.counts


async def test_past_events_of_a_new_peer_are_requested_once_it_has_sent_an_event(make: Make) -> None:
    context = make(covered=None)
    context.receive(*context.publish(1))
    context.peer.fetch_past([A])
    await context.settle()

    assert context.requests[0] == (0, 0, "nats", (A,))


async def test_past_events_that_are_wanted_during_a_repair_extend_it(make: Make) -> None:
    context = make()
    one, _, three = context.publish(1, 2, 3)
    context.available.clear()
    context.receive(one, three)
    await context.settle()
    context.peer.fetch_past([B])
    context.available.set()
    await context.settle()

    assert [expressions for *_, expressions in context.requests] == [None, (B,), None]


async def test_past_events_are_requested_again_after_an_error(make: Make) -> None:
    context = make(covered=3)
    context.publish(1, 2, 3)
    context.errors = [NoResponders("@zbus/log/5")]
    context.peer.fetch_past([A])
    await asyncio.sleep(1)

    assert [expressions for *_, expressions in context.requests] == [(A,), (A,), None]
    assert context.delivered == [1, 2, 3]


async def test_past_events_wait_for_capacity_and_until_they_are_stored(make: Make) -> None:
    context = make(covered=3)
    context.publish(1, 2, 3)
    context.capacity.clear()
    stored = context.storing = asyncio.get_running_loop().create_future()
    context.peer.fetch_past([A])
    await context.settle()
    assert context.delivered == []
    context.capacity.set()
    await context.settle()
    assert (context.delivered, len(context.requests)) == ([1, 2, 3], 1)
    stored.set_result(None)
    await context.settle()

    assert len(context.requests) == 2


async def test_a_peer_that_is_not_known_yet_has_no_past_to_request(make: Make) -> None:
    context = make(covered=None)
    context.publish(1, 2)
    context.peer.fetch_past([A])
    await asyncio.sleep(1)

    assert context.requests == []


# Bounds.


async def test_the_buffer_is_bounded_and_evicted_events_are_requested(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffered_events, "BUFFERED_EVENTS_MAX", 3)
    context = make()
    one, _, three = context.publish(1, 2, 3)
    context.available.clear()
    context.receive(one, three)
    await context.settle()  # the page that is being read reaches 3
    context.receive(*context.publish(4, 5, 6, 7, 8))
    assert len(context.peer._buffered) == 3

    context.available.set()
    await context.settle()

    assert context.delivered == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [after for after, *_ in context.requests] == [0, 3]
    assert context.counts["gaps"] == 1


async def test_positions_of_keys_are_forgotten_once_they_are_covered(make: Make) -> None:
    context = make()
    for number in range(1, 101):
        context.receive(*context.publish(number, key=f"shop/{number}"))
    context.beacon(0, 99, {"shop/99": (99, 7, 99)})

    assert list(context.peer._last) == ["shop/100"]


# The end.


async def test_closing_cancels_a_repair_and_delivers_nothing_more(make: Make) -> None:
    context = make()
    one, _, three = context.publish(1, 2, 3)
    context.available.clear()
    context.receive(one, three)
    await context.settle()

    (task,) = context.peer.close()
    context.available.set()
    await asyncio.wait([task], timeout=1)

    assert task.cancelled()
    assert context.delivered == [1]


async def test_closing_while_waiting_to_retry_ends_at_once(make: Make, runtime: FakeRuntime) -> None:
    context = make()
    one, _, three = context.publish(1, 2, 3)
    context.error = NoResponders("@zbus/log/5")
    context.receive(one, three)
    await asyncio.sleep(3)
    now = runtime.now

    (task,) = context.peer.close()
    await asyncio.wait([task])

    assert task.cancelled()
    assert runtime.now == now


async def test_closing_ends_the_wait_for_events_that_a_beacon_named(make: Make) -> None:
    context = make()
    context.publish(1, 2)
    context.beacon(0, 1)
    context.beacon(1, 2)
    assert context.peer.close() == []
    await asyncio.sleep(5)

    assert context.requests == []


async def test_open_gaps_no_longer_count_once_the_peer_is_closed(make: Make) -> None:
    context = make()
    context.interest.add([A], 0, store=True)
    one, _, three = context.publish(1, 2, 3)
    context.error = NoResponders("@zbus/log/5")
    context.receive(one, three)
    await asyncio.sleep(GIVE_UP_S + 3)
    assert context.counts["gaps_open"] == 1

    context.peer.close()

    assert context.counts["gaps_open"] == 0


# What the log confirms.


async def test_a_position_is_noted_once_the_log_has_confirmed_it(make: Make) -> None:
    context = make()
    context.receive(*context.publish(1, 2))
    context.error = NoResponders("@zbus/log/5")
    context.beacon(0, 2)
    with recorded(logging.DEBUG) as records:
        await asyncio.sleep(60)
    assert (context.coverages, context.peer.covered) == ([], 2)  # events are delivered, and the position waits
    assert {(each["record"], each["code"]) for each in records} == {("EVENT_RETRY", "confirm_failed")}

    context.error = None
    await asyncio.sleep(2 * CONFIRM_S[1])

    assert context.coverages == [2]
    asked = len(context.descriptions)
    await asyncio.sleep(60)
    assert len(context.descriptions) == asked


async def test_a_claim_that_the_log_does_not_confirm_is_reported_and_forgotten(make: Make) -> None:
    context = make()
    context.receive(*context.publish(1, 2))
    context.beacon(0, 2)
    await asyncio.sleep(2 * CONFIRM_S[0])
    context.beacon(0, 1 << 60, {})
    assert context.peer.covered == 2
    context.publish(3)  # lost; nothing names it

    await asyncio.sleep(UNCONFIRMED_MAX * CONFIRM_S[1] + 1)

    assert (context.delivered, context.peer.covered) == ([1, 2, 3], 3)  # the log is asked for what nothing named
    assert (context.coverages[-1], context.rewound) == (3, [])
    context.beacon(3, 1 << 60, {})
    await asyncio.sleep(UNCONFIRMED_MAX * CONFIRM_S[1] + 1)
    assert context.unconfirmed == [(1 << 60, 3)]
    assert context.peer.covered == 3


async def test_a_log_of_the_first_version_that_is_shorter_than_it_was_is_reported_as_rewound(make: Make) -> None:
    context = make(covered=10)
    context.publish(1, 2, 3)
    context.beacon(10, 12, {})

    await asyncio.sleep(UNCONFIRMED_MAX * CONFIRM_S[1] + 1)

    assert context.rewound == [(10, 3)]
    context.receive(*context.publish(4))
    assert context.delivered == [4]


async def test_an_event_that_contradicts_a_forged_one_is_delivered_and_the_log_is_asked(make: Make) -> None:
    context = make()
    one, two, three = context.publish(1, 2, 3)
    forged = msgspec.structs.replace(envelope(1 << 60, 0, A, origin=LOGGED), publisher_id=8)
    context.receive(forged)
    context.receive(one)
    context.receive(two)
    await context.settle()
    context.receive(three)

    assert context.delivered == [1 << 60, 1, 1, 2, 3]  # the page has the first one again, which the inbox recognizes
    assert [after for after, *_ in context.requests] == [0]


async def test_a_late_event_whose_loss_was_accepted_is_dropped_and_counted(make: Make) -> None:
    context = make(UNLOGGED)
    one, two, three = context.publish(1, 2, 3)
    context.receive(one, three)
    await asyncio.sleep(1)
    assert context.timeline == [1, "gap before 3", 3]

    context.receive(two)

    assert context.delivered == [1, 3]
    assert context.counts["dropped_late"] == 1


# Incarnations.


OLD, NEW = Branch(7, 1, 7), Branch(9, 4, 7)


async def test_a_peer_whose_lineage_is_unknown_asks_its_log_what_they_share(make: Make) -> None:
    context = make(covered=None, branch=NEW, known={5: 8, 7: 6})
    context.lineage = Lineage((Incarnation(7, 1), Incarnation(8, 3), Incarnation(9, 4)))
    context.publish(1, 2, 3)
    context.receive(*context.publish(4, 5))
    await context.settle()

    assert context.descriptions == [{5: 8, 7: 6}]
    assert [after for after, *_ in context.requests] == [2]
    assert context.delivered == [3, 4, 5]
    assert context.rewound == []  # its branch has shown that already


async def test_a_log_that_shares_nothing_is_asked_for_everything_since_the_interest_began(make: Make) -> None:
    context = make(covered=None, branch=NEW, known={5: 8})
    context.receive(*context.publish(1, 2)[1:])
    await context.settle()

    assert (context.delivered, context.rewound) == ([1, 2], [])
    later = make(covered=None, branch=NEW._replace(first=20), known={5: 8})
    later.receive(*later.publish(1, 2)[1:])
    await later.settle()
    assert (later.delivered, later.rewound) == ([1, 2], [(8, 0)])  # only the lineage shows it


async def test_a_peer_takes_over_from_the_incarnation_before_it(make: Make) -> None:
    before = make(branch=OLD)
    one, _, three = before.publish(1, 2, 3)
    before.error = NoResponders("@zbus/log/5")
    before.receive(one, three)
    await before.settle()
    after = make(branch=NEW)
    after.log = before.log
    after.accept([one], "")

    after.peer.succeed(before.peer)
    await after.settle()

    assert after.delivered == [1, 2, 3]
    stranger = make(branch=Branch(11, 4, 5))
    stranger.peer.succeed(before.peer)
    await stranger.settle()
    assert stranger.requests == []


@pytest.mark.parametrize("behind_s", [0, 30, -30])
async def test_a_new_peer_is_asked_by_its_own_clock(make: Make, runtime: FakeRuntime, behind_s: int) -> None:
    context = make(covered=None)
    since = runtime.steady_ns()
    context.interest = Interest()
    context.interest.add(["shop/**"], since, store=False)
    runtime.now += 10
    context.clock_ns = runtime.steady_ns() - behind_s * 10**9
    early = envelope(1, 0, A, origin=LOGGED, published_at=since - (behind_s + 5) * 10**9)
    late = envelope(2, 1, A, origin=LOGGED, published_at=since - (behind_s - 5) * 10**9)
    context.log = [early, late]
    context.beacon(0, 2)
    await context.settle()

    assert context.delivered == [2]


# Debts of the past.


async def test_owed_events_are_fetched_when_the_peer_is_seen_and_the_progress_is_noted(make: Make) -> None:
    context = make(covered=5, owed={A: 2})
    context.publish(*range(1, 6))
    context.page_events = 2
    context.beacon(5, 5)
    await asyncio.sleep(1)

    assert context.delivered == [3, 4, 5]
    assert context.fetched == [(A, 4), (A, None)]
    assert [expressions for *_, expressions in context.requests if expressions] == [(A,)] * 2
    context.beacon(5, 5)
    await asyncio.sleep(1)
    assert context.fetched == [(A, 4), (A, None)]


# Bounds in bytes.


HEADERS = msgspec.Raw(msgspec.msgpack.encode({"trace": "x" * 90}))


@pytest.mark.parametrize("size", [{"payload": bytes(100)}, {"payload": b"", "headers": HEADERS}])
async def test_buffered_events_are_bounded_in_bytes_and_the_log_supplies_the_others(
    make: Make, monkeypatch: pytest.MonkeyPatch, size: dict[str, Any]
) -> None:
    monkeypatch.setattr(buffered_events, "BUFFERED_BYTES_MAX", 250)
    context = make()
    events = [msgspec.structs.replace(each, **size) for each in context.publish(*range(1, 11))]
    context.available.clear()
    context.receive(events[0])
    context.receive(*events[2:])
    await context.settle()
    assert len(context.peer._buffered) == 2
    context.available.set()
    await context.settle()

    assert context.delivered == list(range(1, 11))
    assert context.peer._buffered._bytes == 0


# Marks: what the log had when it was asked.


BRANCH = Branch(9, 1, 9)


async def test_owed_events_that_retention_removed_before_they_were_fetched_are_reported(make: Make) -> None:
    context = make(covered=10, owed={A: 4})
    context.publish(*range(1, 11))
    context.low_water = 7
    context.beacon(9, 10)
    await context.settle()

    assert [gap[:2] for gap in context.gaps] == [(A, 8)]
    assert {8, 9, 10} <= set(context.delivered)


async def test_owed_events_of_which_retention_left_none_are_reported_as_a_range(make: Make) -> None:
    context = make(covered=10, owed={A: 4})
    context.publish(10)
    context.low_water = 10
    with recorded(logging.WARNING) as records:
        context.beacon(10, 10)
        await context.settle()

    assert [(each["code"], each["after"], each["until"]) for each in records] == [("gap_trimmed", 4, 10)]


async def test_a_log_that_never_replies_is_not_asked_to_confirm_for_ever_but_again_when_its_node_is_seen(
    make: Make,
) -> None:
    context = make()
    context.error = NoResponders("log")
    context.receive(*context.publish(1))
    context.beacon(0, 1)
    await asyncio.sleep(3600)
    asked = len(context.descriptions)
    await asyncio.sleep(3600)
    assert len(context.descriptions) == asked < 20

    context.error = None
    context.peer.seen()
    await asyncio.sleep(5)
    assert context.coverages == [1]


async def test_the_mark_of_a_page_is_remembered_and_compared_in_the_next_repair(make: Make) -> None:
    context = make(branch=BRANCH)
    context.digest = 77
    one, _, three = context.publish(1, 2, 3)
    context.receive(one)
    context.receive(three)
    await context.settle()
    assert (context.marks[-1], context.compared) == (Mark(9, 3, 77), [])

    _, five = context.publish(4, 5)
    context.receive(five)
    await context.settle()

    assert context.compared == [Mark(9, 3, 77)]
    assert (context.marks[-1], context.rewound) == (Mark(9, 5, 77), [])
    assert context.delivered == [1, 2, 3, 4, 5]


async def test_a_log_that_has_other_events_than_its_mark_is_asked_for_all_of_them(make: Make) -> None:
    context = make(covered=3, branch=BRANCH, mark=Mark(9, 3, 77))
    context.digest = 78
    context.publish(1, 2, 3, 4)

    context.peer.ask()
    await context.settle()
    await asyncio.sleep(1)

    assert context.compared == [Mark(9, 3, 77)]
    assert context.rewound == [(3, 0)]
    assert context.delivered == [1, 2, 3, 4]
    assert context.marks[-1] == Mark(9, 4, 78)


async def test_a_log_whose_branch_shows_that_it_was_replaced_is_reported_once_only(make: Make) -> None:
    """The node reports it when the branch is first seen. Its events may differ from where the incarnation began."""
    context = make(covered=2, branch=Branch(9, 3, 5), mark=Mark(5, 8, 77))
    context.publish(1, 2, 3)

    context.peer.ask()
    await context.settle()
    await asyncio.sleep(1)

    assert (context.compared, context.rewound) == ([Mark(5, 8, 77)], [])
    assert context.delivered == [1, 2, 3]


async def test_a_beacon_that_names_less_than_the_mark_makes_the_log_compare_it(make: Make) -> None:
    context = make(covered=3, branch=BRANCH, mark=Mark(9, 3, 77))
    context.publish(1, 2)
    context.digest = 78

    context.beacon(1, 2)
    await context.settle()
    await asyncio.sleep(1)

    assert context.rewound == [(3, 0)]
    assert context.delivered == [1, 2]


async def test_an_unknown_event_below_the_mark_waits_until_the_log_has_compared_it(make: Make) -> None:
    """Otherwise it would be delivered before the events of its publisher that are missing as well."""
    context = make(covered=3, branch=BRANCH, mark=Mark(9, 3, 77))
    context.digest = 78
    _, two = context.publish(1, 2)

    context.receive(two)
    assert context.delivered == []
    await context.settle()
    await asyncio.sleep(1)

    assert context.delivered == [1, 2]


async def test_an_unknown_event_below_a_mark_that_is_still_true_is_delivered_after_the_comparison(make: Make) -> None:
    context = make(covered=3, branch=BRANCH, mark=Mark(9, 3, 77))
    context.digest = 77
    _, two, _ = context.publish(1, 2, 3)

    context.receive(two)
    await context.settle()

    assert set(context.compared) == {Mark(9, 3, 77)}
    assert (context.delivered[0], context.rewound) == (2, [])


async def test_the_digest_of_a_beacon_whose_events_arrived_is_compared_but_not_stored(make: Make) -> None:
    context = make(branch=BRANCH)
    context.digest = 77
    one, two, _ = context.publish(1, 2, 3)
    context.receive(one, two)
    context.peer.beacon(Beacon(LOGGED, 0, 2, {A: (2, 7, 2)}, BRANCH, (77 << 2).to_bytes(8)), "nats")
    context.peer.beacon(Beacon(LOGGED, 2, 9, {}, BRANCH, (78 << 2).to_bytes(8)), "nats")  # no event shows it
    assert context.marks == []

    context.peer.ask()
    await context.settle()

    assert context.compared == [Mark(9, 2, 77)]
    assert context.marks[-1] == Mark(9, 3, 77)


async def test_an_incarnation_with_two_histories_is_not_compared_again(make: Make) -> None:
    context = make(covered=3, branch=BRANCH, mark=Mark(9, 3, 77))
    context.digest = 78
    context.publish(1, 2, 3, 4)
    for _ in range(2):
        context.peer.ask()
        await asyncio.sleep(5)

    assert (context.splits, context.rewound) == ({9: 0}, [(3, 0)])
    assert context.compared == [Mark(9, 3, 77)]


async def test_a_position_that_may_be_one_in_another_copy_is_not_used(make: Make) -> None:
    context = make(covered=3, branch=BRANCH)
    context.publish(1, 2, 3)

    context.peer.distrust(1)
    assert context.peer.confirmed == 1
    await context.settle()

    assert context.delivered == [2, 3]
    assert context.peer.confirmed == 3


# Retention before the first contact.


@pytest.mark.parametrize("stored", [False, True], ids=["live", "stored"])
@pytest.mark.parametrize("lacks", [False, True], ids=["nothing", "something"])
async def test_a_new_peer_that_removed_events_which_a_stored_key_waited_for_is_reported_once(
    make: Make, stored: bool, lacks: bool
) -> None:
    context = make(covered=None)
    if stored:
        context.interest.add([A], 0, store=True)
    context.publish(1, 2, 3, 4, 5, 6)
    context.low_water, context.lacks = 4, lacks

    context.peer.ask()
    await context.settle()
    seven, eight = context.publish(7, 8)
    context.receive(seven)
    context.receive(eight)

    assert context.gaps == ([(A, 5, False)] if stored and lacks else [])
    assert context.delivered == [5, 6, 7, 8]


async def test_removed_events_from_before_a_stored_key_was_wanted_are_not_reported(make: Make) -> None:
    """The request was for an earlier time because of another key."""
    context = make(covered=None)
    context.interest.add([B], 5, store=True)
    context.interest.remove(["shop/**"], 0, store=False)
    context.interest.add([A], 0, store=False)
    context.publish(5, 6, key=B)
    context.low_water, context.lacks = 4, True

    context.peer.ask()
    await context.settle()

    assert context.gaps == []
