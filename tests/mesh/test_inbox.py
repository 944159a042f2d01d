"""The inbox: what it does with each kind of frame, what it stores and delivers, and what it reports.

Time is virtual, the log is a fake that stores when the test says so, and other nodes reply from a list.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from deliver_support import soon
from mesh_fakes import OTHER, OWN, MeshHost, envelope, recorded, turns

from zbus.errors import BusClosed, LogError
from zbus.event import Event, Provenance
from zbus.mesh import buffered_events
from zbus.mesh import inbox as module
from zbus.mesh.inbox import REPORT_S, Inbox
from zbus.mesh.origins.known_logs import INCARNATIONS_MAX
from zbus.ports.lineage import NO_BRANCH, Branch
from zbus.ports.log import Stored
from zbus.wire.beacon import Beacon, encode_beacon
from zbus.wire.envelope import CANCEL, MANY, NODE, Envelope, encode, encode_run

LOGGED = 5  # an odd origin has a log
KEPT, LIVE = "kept/x", "live/x"


class InboxHost(MeshHost):
    """Makes inboxes, and closes them at the end of the test."""

    def __init__(self) -> None:
        super().__init__()
        self.runtime.time_ns = lambda: 5_000
        self.interest.add(["kept/**"], 0, store=True)
        self._inboxes: list[Inbox] = []

    def count(self, name: str, events: int) -> None:
        if events:  # a counter appears once it differs from 0
            super().count(name, events)

    def inbox(self, forwards: bool = False) -> Inbox:
        self._inboxes.append(super().inbox(forwards))
        return self._inboxes[-1]

    async def aclose(self) -> None:
        for inbox in self._inboxes:
            if ending := inbox.close():
                await asyncio.wait(ending)
        for subscription in tuple(self.dispatcher.subscriptions):
            await subscription.aclose()


@pytest.fixture
async def host() -> AsyncIterator[InboxHost]:
    host, errors = InboxHost(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
    yield host
    await host.aclose()
    assert errors == []  # of callbacks


def framed(*envelopes: Envelope) -> bytes:
    """A frame of some envelopes."""
    return encode_run([msgspec.structs.astuple(each) for each in envelopes])  # type: ignore[misc]


def kept(*offsets: int, origin: int = LOGGED, **fields: Any) -> list[Envelope]:
    """Events in a row on a key that this node stores."""
    previous = (0, *offsets[:-1])
    return [envelope(*each, KEPT, origin=origin, **fields) for each in zip(offsets, previous, strict=True)]


def positions(inbox: Inbox) -> dict[int, int]:
    """The positions in logs of version 0.1, which has no incarnations."""
    return {int(name.split("/")[1], 16): offset for name, offset in inbox.known_logs.names().items()}


def identities(host: MeshHost) -> list[tuple[int, int]]:
    return [(row.publisher_id, row.sequence) for row in host.commits.rows]


# Storing.


async def test_events_that_this_node_stores_go_to_its_log_with_their_provenance_and_not_to_subscriptions(
    host: InboxHost,
) -> None:
    subscription, inbox = host.subscribe("**"), host.inbox()

    stored = inbox.accept(kept(1, 2, via=(8,)), "nats")

    assert stored is host.commits.storing[0]
    assert identities(host) == [(7, 1), (7, 2)]
    assert [row.provenance for row in host.commits.rows] == [
        Provenance(LOGGED, 1, (8,), "nats"),
        Provenance(LOGGED, 2, (8,), "nats"),
    ]
    assert (subscription.queued, host.forwarded, host.forwarded_when_stored) == (0, [], [])


async def test_events_that_this_node_does_not_store_are_delivered_at_once_and_once(host: InboxHost) -> None:
    subscription, inbox = host.subscribe("**"), host.inbox()

    assert inbox.accept([envelope(1, key=LIVE), envelope(2, key=LIVE)], "nats") is None
    assert inbox.accept([envelope(2, key=LIVE), envelope(3, key=LIVE)], "zmq") is None

    assert [event.sequence for _ in range(3) if (event := await soon(subscription))] == [1, 2, 3]
    assert host.commits.rows == []
    assert host.counts == {"duplicates_received": 1}
    assert inbox.received == {"nats": 2, "zmq": 2}
    inbox.accept([envelope(4, key=LIVE)], "zmq")
    assert inbox.received == {"nats": 2, "zmq": 3}


async def test_each_event_of_a_batch_is_stored_or_delivered_by_its_own_key(host: InboxHost) -> None:
    subscription, inbox = host.subscribe("**"), host.inbox()

    inbox.accept([envelope(1, key=KEPT), envelope(2, key=LIVE), envelope(3, key=KEPT), envelope(4, key=LIVE)], "nats")

    assert identities(host) == [(7, 1), (7, 3)]
    assert [event.sequence for _ in range(2) if (event := await soon(subscription))] == [2, 4]


async def test_an_event_that_passed_this_node_already_is_not_taken_again(host: InboxHost) -> None:
    subscription, inbox = host.subscribe("**"), host.inbox()

    inbox.accept([envelope(1, key=LIVE, via=(8, OWN)), envelope(2, key=LIVE, via=(8,))], "nats")

    event = await soon(subscription)
    assert event is not None
    assert (event.sequence, subscription.queued) == (2, 0)
    assert host.counts == {"loops_prevented": 1}


async def test_a_payload_may_be_as_large_as_the_limit(host: InboxHost) -> None:
    subscription, inbox = host.subscribe("**"), host.inbox()
    with recorded(logging.WARNING) as records:
        large = [envelope(1, key=LIVE, payload=b"x" * 1001), envelope(2, key=LIVE, payload=b"x" * 1000)]
        inbox.accept(large, "nats")

    event = await soon(subscription)
    assert event is not None
    assert event.sequence == 2
    assert host.counts == {"invalid_received": 1, "invalid_too_large": 1}
    assert records == [
        {
            "level": logging.WARNING,
            "record": "EVENT_INVALID",
            "code": "invalid_too_large",
            "reason": "the payload is over the limit",
            "link": "nats",
            "key": LIVE,
        }
    ]


async def test_a_stored_event_that_arrives_twice_is_stored_again_and_live_subscriptions_do_not_get_it_again(
    host: InboxHost,
) -> None:
    inbox = host.inbox()
    inbox.accept(kept(1), "nats")
    assert host.dispatcher.passed == set()
    host.commits.store()
    await turns()

    inbox.accept(kept(1), "zmq")

    assert identities(host) == [(7, 1), (7, 1)]
    assert host.dispatcher.passed == {(7, 1)}
    assert host.counts == {"duplicates_received": 1}


@pytest.mark.parametrize("in_one_batch", [True, False])
async def test_an_event_that_arrives_twice_before_it_is_stored_reaches_live_subscriptions_once(
    host: InboxHost, in_one_batch: bool
) -> None:
    subscription, inbox = host.subscribe("**"), host.inbox()
    if in_one_batch:
        inbox.accept([*kept(1, origin=0), *kept(1, origin=0)], "nats")
    else:
        inbox.accept(kept(1, origin=0), "nats")
        inbox.accept(kept(1, origin=0), "zmq")
    host.dispatcher.stored(host.commits.rows[:1], [1])  # the log stores it once

    assert subscription.queued == 1


@pytest.mark.parametrize("end", ["stored", "failed", "cancelled"])
async def test_identities_that_live_subscriptions_must_not_get_are_forgotten_when_storing_ends(
    host: InboxHost, end: str
) -> None:
    inbox = host.inbox()
    inbox.accept([envelope(1, key=LIVE)], "nats")
    host.interest.add([LIVE], 0, store=True)
    inbox.accept([envelope(1, key=LIVE)], "nats")
    assert host.dispatcher.passed == {(7, 1)}
    if end == "stored":
        host.commits.store()
    elif end == "failed":
        host.commits.storing[0].set_exception(LogError("the disk is full"))
    else:
        host.commits.storing[0].cancel()
    await turns()

    assert host.dispatcher.passed == set()


async def test_a_repaired_event_from_before_a_live_subscription_is_only_stored(host: InboxHost) -> None:
    inbox = host.inbox()
    host.interest.add(["kept/**"], 1_003, store=False)  # an event is published at 1,000 plus its offset

    inbox.accept(kept(1), "nats")
    inbox.accept(kept(2, 3), "nats", repaired=True)

    assert identities(host) == [(7, 1), (7, 2), (7, 3)]
    assert host.dispatcher.passed == {(7, 2)}


async def test_events_that_the_log_had_already_are_not_counted_as_stored(host: InboxHost) -> None:
    inbox = host.inbox()
    inbox.accept(kept(1, 2, 3), "nats")
    await turns()
    assert inbox.stored_events == 0
    host.commits.store(repeated=[1])
    await turns()
    assert inbox.stored_events == 2

    inbox.accept(kept(4), "nats")
    host.commits.storing[-1].cancel()
    inbox.accept(kept(5, origin=0), "nats")
    host.commits.storing[-1].set_exception(LogError("the disk is full"))
    await turns()
    assert inbox.stored_events == 2


@pytest.mark.parametrize("beacon", [False, True])
async def test_events_that_could_not_be_stored_are_requested_and_stored_again(host: InboxHost, beacon: bool) -> None:
    inbox = host.inbox()
    receive = inbox.receiver("nats", False)
    inbox.known_logs.reached(LOGGED, 0, 3)
    host.remote_log = kept(4, 5, 6)
    with recorded(logging.WARNING) as records:
        receive(framed(*host.remote_log[:2]))
        if beacon:  # nothing is missing up to 5, but it is not stored yet
            receive(encode_beacon(Beacon(LOGGED, 3, 5, {KEPT: (5, 7, 5)})))
        await turns()
        assert positions(inbox)[LOGGED] == 3
        host.commits.storing[0].set_exception(LogError("the disk is full"))
        await turns()

    assert host.counts["store_failed"] == 2
    assert [(each["record"], each["code"], each["reason"], each["events"]) for each in records] == [
        ("EVENT_DROPPED", "store_failed", "not stored: the disk is full", 2)
    ]
    assert host.page_requests == [(LOGGED, 3, 0, "nats", None)]
    assert identities(host)[2:] == [(7, 4), (7, 5), (7, 6)]
    host.commits.store()
    await turns()
    assert (inbox.stored_events, positions(inbox)[LOGGED]) == (3, 6)


async def test_received_events_under_a_used_identity_are_counted_and_reported(host: InboxHost) -> None:
    inbox = host.inbox()
    receive = inbox.receiver("nats", False)
    with recorded(logging.WARNING) as records:
        receive(framed(*kept(1, 2, 3)))
        await turns()
        host.commits.store(repeated=[1, 2], conflicts={2: "shop/other"})
        await turns()

    assert host.counts["identity_conflicts"] == 1
    (found,) = records
    assert (found["record"], found["code"], found["events"]) == ("EVENT_DROPPED", "identity_conflict", 1)
    assert (found["publisher_id"], found["sequence"], found["key"]) == (7, 3, KEPT)
    assert (found["stored_key"], found["offset"], found["origin"]) == ("shop/other", 3, f"{LOGGED:x}")
    assert inbox.stored_events == 1
    receive(framed(*kept(4)))
    await turns()
    assert identities(host)[3:] == [(7, 4)], "the mesh continues after it"
    assert host.page_requests == []


async def test_only_an_error_of_the_log_makes_events_be_requested_again(host: InboxHost) -> None:
    inbox = host.inbox()
    receive = inbox.receiver("nats", False)
    receive(framed(*kept(1)))
    receive(framed(*kept(2, origin=OTHER)))
    await turns()
    assert len(host.commits.storing) == 1
    host.commits.storing[0].set_exception(BusClosed("store"))
    await turns()

    assert (host.page_requests, host.counts) == ([], {})


async def test_events_of_a_sender_that_is_not_a_node_cannot_be_requested_again(host: InboxHost) -> None:
    host.inbox().receiver("nats", False)(framed(*kept(1, origin=0)))
    await turns()
    host.commits.storing[0].set_exception(LogError("the disk is full"))
    await turns()

    assert (host.page_requests, host.counts) == ([], {"store_failed": 1})


async def test_a_bridge_forwards_events_at_once_or_when_they_are_stored(host: InboxHost) -> None:
    inbox = host.inbox(forwards=True)

    stored = inbox.accept([envelope(1, key=LIVE), *kept(2)], "nats")

    assert [(row.sequence, row.provenance and row.provenance.link) for row in host.forwarded] == [(1, "nats")]
    assert host.forwarded_over == ["nats"]
    assert host.forwarded_when_stored == [(host.commits.rows, "nats", stored)]
    inbox.accept([envelope(1, key=LIVE)], "zmq")
    assert (len(host.forwarded), len(host.forwarded_when_stored)) == (1, 1)  # a duplicate is not forwarded


async def test_live_subscriptions_get_an_event_that_was_stored_only_when_it_was_requested_again(
    host: InboxHost,
) -> None:
    inbox = host.inbox()
    host.interest.add(["kept/**"], 0, store=False)
    inbox.known_logs.reached(LOGGED, 0, 3)
    host.remote_log = kept(4, 5)
    inbox.receiver("nats", False)(framed(*host.remote_log[:1]))
    await turns()
    host.commits.storing[0].set_exception(LogError("the disk is full"))
    await turns()

    assert identities(host) == [(7, 4), (7, 4), (7, 5)]
    assert (host.dispatcher.passed, host.counts["duplicates_received"]) == (set(), 0)


# Positions.


async def test_a_position_is_kept_once_everything_before_it_is_stored(host: InboxHost) -> None:
    inbox = host.inbox()
    inbox.covered(LOGGED, NO_BRANCH, 0)
    assert positions(inbox) == {LOGGED: 0}
    inbox.covered(LOGGED, NO_BRANCH, 3)
    assert positions(inbox) == {LOGGED: 3}

    inbox.accept(kept(4, 5), "nats")
    inbox.covered(LOGGED, NO_BRANCH, 5)
    inbox.covered(OTHER, NO_BRANCH, 9)  # a node without a log has no position that could be used again
    assert positions(inbox) == {LOGGED: 3}
    host.commits.store()
    await turns()
    assert positions(inbox) == {LOGGED: 5}
    inbox.covered(LOGGED, NO_BRANCH, 6)
    assert positions(inbox)[LOGGED] == 6


@pytest.mark.parametrize("end", ["failed", "cancelled"])
async def test_a_position_is_not_kept_if_the_events_before_it_are_not_stored(host: InboxHost, end: str) -> None:
    inbox = host.inbox()
    inbox.accept(kept(4, 5), "nats")
    inbox.covered(LOGGED, NO_BRANCH, 5)
    if end == "failed":
        host.commits.storing[0].set_exception(LogError("the disk is full"))
    else:
        host.commits.storing[0].cancel()
    await turns()

    assert positions(inbox) == {}


async def test_a_position_is_not_kept_if_only_the_last_of_the_events_before_it_are_stored(host: InboxHost) -> None:
    inbox = host.inbox()
    receive = inbox.receiver("nats", False)
    receive(framed(*kept(1)))
    await turns()
    receive(framed(envelope(2, 1, KEPT)))
    await turns()
    inbox.covered(LOGGED, NO_BRANCH, 2)
    failed, stored = host.commits.storing
    failed.set_exception(LogError("the disk is full"))
    stored.set_result(Stored([1]))
    await turns()
    assert positions(inbox) == {}  # after a restart, the first event is requested again

    inbox.accept(kept(3), "nats")
    inbox.covered(LOGGED, NO_BRANCH, 3)
    host.commits.store()
    await turns()
    assert positions(inbox) == {LOGGED: 3}


async def test_a_position_never_goes_back(host: InboxHost) -> None:
    inbox = host.inbox()
    inbox.accept(kept(4), "nats")
    inbox.covered(LOGGED, NO_BRANCH, 5)
    inbox.known_logs.reached(LOGGED, 0, 8)
    host.commits.store()
    await turns()

    assert positions(inbox) == {LOGGED: 8}


# Acknowledgements to the fabric.


async def test_a_frame_is_acknowledged_when_its_events_are_stored(host: InboxHost) -> None:
    done: list[str] = []
    receive = host.inbox().receiver("nats", False)
    receive(framed(*kept(1)), lambda: done.append("kept"))
    receive(framed(envelope(1, key=LIVE, publisher_id=8, origin=0)), lambda: done.append("live"))
    receive(framed(*kept(2)), lambda: done.append("failed"))
    receive(framed(*kept(3, origin=0)), lambda: done.append("cancelled"))
    receive(bytes([9]), lambda: done.append("malformed"))
    await turns()
    assert done == ["live", "malformed"]

    kept_one, failed, cancelled = host.commits.storing
    kept_one.set_result(Stored([1]))
    failed.set_exception(BusClosed("store"))
    cancelled.cancel()
    await turns()
    assert done == ["live", "malformed", "kept"]


async def test_frames_of_one_link_are_stored_in_one_batch_and_those_of_another_in_another(host: InboxHost) -> None:
    inbox = host.inbox()
    nats, zmq = inbox.receiver("nats", False), inbox.receiver("zmq", False)
    for receive, offset in ((nats, 1), (nats, 2), (zmq, 3), (nats, 4)):
        receive(framed(envelope(offset, key=KEPT, origin=0)))
    await turns()

    assert [[row.sequence for row in batch] for batch in host.commits.batches] == [[1, 2], [3], [4]]
    assert [batch[0].provenance and batch[0].provenance.link for batch in host.commits.batches] == [
        "nats",
        "zmq",
        "nats",
    ]
    assert inbox.received == {"nats": 3, "zmq": 1}


# Kinds of frames.


async def test_what_this_node_sent_itself_is_ignored(host: InboxHost) -> None:
    subscription, inbox = host.subscribe("**"), host.inbox()
    receive = inbox.receiver("nats", True)
    receive(framed(envelope(1, key=LIVE, origin=OWN)))
    receive(encode_beacon(Beacon(OWN, 0, 9, {})))
    receive(bytes([MANY, 0x90]))  # a frame of no events
    await turns()

    assert (subscription.queued, host.beacons, inbox.other_logs(), host.counts) == (0, [], (), {})


async def test_a_frame_of_several_nodes_is_malformed(host: InboxHost) -> None:
    subscription = host.subscribe("**")
    with recorded(logging.WARNING) as records:
        host.inbox().receiver("nats", True)(framed(envelope(1, key=LIVE), envelope(2, key=LIVE, origin=9)))
        await turns()

    assert subscription.queued == 0
    assert host.counts == {"invalid_received": 1, "invalid_envelope": 1}
    assert [(each["code"], each["reason"], each["link"]) for each in records] == [
        ("invalid_envelope", "malformed frame: its envelopes come from several nodes", "nats")
    ]


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"", "invalid_envelope"),
        (b"\x01", "invalid_envelope"),
        (b"\x02", "invalid_envelope"),
        (encode(Event(1, 0, 5, "a/*", b"")), "invalid_key"),
        (b"\x03", "invalid_beacon"),
        (bytes([CANCEL]) + bytes(7), "invalid_cancel"),
        (b"\x06", "invalid_version"),
    ],
)
async def test_a_malformed_frame_is_counted_by_its_kind(host: InboxHost, frame: bytes, code: str) -> None:
    host.inbox().receiver("nats", False)(frame)
    await turns()

    assert host.counts == {"invalid_received": 1, code: 1}


async def test_a_cancellation_names_a_request(host: InboxHost) -> None:
    receive = host.inbox().receiver("nats", False)
    receive(bytes([CANCEL]) + (0x0102030405060708).to_bytes(8))
    receive(bytes([CANCEL]) + (7).to_bytes(8) + b"later versions")
    await turns()

    assert host.cancelled == [0x0102030405060708, 7]


async def test_a_beacon_keeps_its_node_alive_and_reveals_what_is_missing(host: InboxHost) -> None:
    inbox = host.inbox()
    host.remote_log = kept(1, 2)
    inbox.receiver("nats", False)(encode_beacon(Beacon(LOGGED, 0, 2, {KEPT: (2, 7, 2)})))
    await turns()

    assert host.beacons == [LOGGED]
    assert [(origin, after, link) for origin, after, _, link, _ in host.page_requests] == [(LOGGED, 0, "nats")]
    assert identities(host) == [(7, 1), (7, 2)]


async def test_a_beacon_names_the_last_sequence_of_a_publisher_whose_events_are_stored(host: InboxHost) -> None:
    host.runtime.time_ns = lambda: 10**18
    inbox = host.inbox()
    inbox.receiver("nats", False)(encode_beacon(Beacon(OTHER, 0, 2, {KEPT: (2, 7, 2), LIVE: (1, 8, 1)})))
    await turns()

    assert inbox.sequence_marks.take() == {7: 3}


async def test_an_announcement_is_passed_on_with_its_link(host: InboxHost) -> None:
    found: list[tuple[bytes, str]] = []
    host.announcement_received = lambda frame, link: found.append((frame, link))  # type: ignore[method-assign]
    host.inbox().receiver("nats", False)(bytes([NODE, 1]))
    await turns()

    assert found == [(bytes([NODE, 1]), "nats")]


async def test_a_gap_is_buffered_and_repaired_but_not_over_a_link_without_requests(host: InboxHost) -> None:
    subscription, inbox = host.subscribe("**"), host.inbox()
    inbox.known_logs.reached(LOGGED, 0, 0)
    inbox.receiver("nats", False)(framed(envelope(2, 1, LIVE)))
    await turns()
    assert subscription.queued == 0
    inbox.receiver("zmq", False, events_only=True)(framed(envelope(2, 1, LIVE)))
    await turns()
    assert subscription.queued == 1


# Gaps.


async def test_gaps_in_the_sequences_of_a_sender_that_is_not_a_node_are_reported_once(host: InboxHost) -> None:
    gaps, inbox = host.subscribe("@zbus/gap", queue_events=100), host.inbox()
    receive = inbox.receiver("nats", True)

    def events(*sequences: int) -> bytes:
        return framed(*[envelope(each, key=LIVE, origin=0) for each in sequences])

    with recorded(logging.WARNING) as records:
        receive(events(3))  # the first event of a publisher reveals no gap
        receive(events(4, 6))  # one is missing
        receive(events(5))  # late: it is no gap that 7 follows
        receive(events(7))
        await turns()
        receive(events(8))
        receive(events(10))
        await turns()

    assert [(each["first"], each["last"], each["origin"]) for each in records] == [(5, 5, 0)]  # one a minute
    assert inbox._opened == {}  # only of one turn: it would grow with each publisher
    assert host.counts == {"gaps": 2, "gaps_unrepaired": 2}
    gap = await soon(gaps)
    assert gap is not None
    assert (gap.publisher_id, gap.sequence) == (0, 0)
    assert (gap.key, gap.published_at, dict(gap.headers)) == ("@zbus/gap", 5_000, {"content-type": "application/json"})
    assert gap.decode(dict) == {"publisher_id": 7, "first": 5, "last": 5, "key": LIVE, "open": False}


async def test_gaps_in_sequences_are_not_reported_over_a_link_that_does_not_promise_all_events(host: InboxHost) -> None:
    subscription = host.subscribe("**")
    host.inbox().receiver("nats", False)(framed(envelope(1, key=LIVE, origin=0), envelope(3, key=LIVE, origin=0)))
    await turns()

    assert (subscription.queued, host.counts) == (2, {})


async def test_a_link_with_events_only_reports_gaps_in_sequences_if_it_promises_all_events(host: InboxHost) -> None:
    subscription = host.subscribe(LIVE)
    host.inbox().receiver("nats", True, events_only=True)(framed(envelope(1, key=LIVE), envelope(3, key=LIVE)))
    await turns()

    assert (subscription.queued, host.counts) == (2, {"gaps": 1, "gaps_unrepaired": 1})


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_gap_is_reported_from_the_first_missing_sequence(host: InboxHost, is_open: bool) -> None:
    gaps, inbox = host.subscribe("@zbus/gap", queue_events=100), host.inbox()

    def report(after: int, sequence: int) -> bool:
        if is_open:
            return inbox.report_open_gap(LOGGED, LIVE, 7, after, sequence)
        return inbox.report_gap(LOGGED, LIVE, 7, sequence, after=after)

    with recorded(logging.WARNING) as records:
        assert report(-1, 1)  # nothing is known of the publisher: 0 is missing
        inbox.accept([envelope(4, key=LIVE)], "nats")
        assert not report(-1, 5)
        assert report(-1, 6)
        assert report(6, 9)
        assert not report(8, 9)

    code = "gap_open" if is_open else "gap_unrepaired"
    assert [(each["code"], each["origin"], each["first"], each["last"], each["key"]) for each in records] == [
        (code, LOGGED, 0, 0, LIVE)  # one a minute, and each gap as an event
    ]
    assert host.counts == ({"gaps_open": 3} if is_open else {"gaps": 3, "gaps_unrepaired": 3})
    gap = await soon(gaps)
    assert gap is not None
    assert gap.published_at == 5_000
    assert gap.decode(dict) == {"publisher_id": 7, "first": 0, "last": 0, "key": LIVE, "open": is_open}


async def test_a_gap_that_was_counted_already_is_only_reported(host: InboxHost) -> None:
    with recorded(logging.WARNING) as records:
        assert host.inbox().report_gap(LOGGED, LIVE, 7, 3, counted=True)

    assert (len(records), host.counts) == (1, {})


# Reports.


async def test_the_same_report_is_written_once_a_minute_per_link_and_always_counted(host: InboxHost) -> None:
    inbox = host.inbox()

    async def receive(link: str) -> None:
        inbox.receiver(link, False)(bytes([9]))
        await turns()

    with recorded(logging.WARNING) as records:
        await receive("nats")
        host.now += REPORT_S - 1
        await receive("nats")
        await receive("zmq")
        host.now += 1
        await receive("nats")

    assert [each["link"] for each in records] == ["nats", "zmq", "nats"]
    assert host.counts["invalid_version"] == 4


async def test_an_unexpected_error_is_written_once_a_minute_per_link_and_always_counted(host: InboxHost) -> None:
    def fail(frame: bytes, link: str) -> None:
        raise RuntimeError("a bug of ours")

    host.announcement_received = fail  # type: ignore[method-assign]
    inbox = host.inbox()
    with recorded(logging.WARNING) as records:
        for link in ("nats", "nats", "zmq"):
            inbox.receiver(link, False)(bytes([NODE]))
        await turns()

    assert [(each["record"], each["level"], each["link"]) for each in records] == [
        ("RECEIVE_FAILED", logging.WARNING, "nats"),
        ("RECEIVE_FAILED", logging.WARNING, "zmq"),
    ]
    assert host.counts == {"receive_errors": 3}


async def test_frames_that_did_not_fit_are_reported_once_with_their_events(
    host: InboxHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INBOX_BYTES_MAX", 100)
    receive = host.inbox().receiver("nats", False)
    with recorded(logging.WARNING) as records:
        for _ in range(4):
            receive(host.frame("a/b", b"x" * 60))
        await turns()
        receive(host.frame("a/b"))
        await turns()

    assert [(each["record"], each["code"], each["events"]) for each in records] == [("EVENT_DROPPED", "inbox_full", 3)]
    assert host.counts == {"dropped_inbox_full": 3}


# Peers.


def beacons(inbox: Inbox) -> Callable[[int], None]:
    receive = inbox.receiver("nats", False)
    return lambda origin: receive(encode_beacon(Beacon(origin, 0, 0, {})))


async def test_a_full_table_of_peers_closes_the_one_that_was_not_seen_for_longest(
    host: InboxHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PEERS_MAX", 3)
    inbox = host.inbox()
    receive, beacon = inbox.receiver("nats", False), beacons(inbox)
    for origin in (5, 7, 9):
        receive(framed(envelope(2, 1, LIVE, origin=origin)))  # one is missing: a repair begins
        host.now += 1
    receive(framed(envelope(2, 1, LIVE, origin=5)))
    beacon(7)
    await turns()
    repairs = asyncio.all_tasks() - {asyncio.current_task()}
    assert (set(inbox.other_logs()), len(repairs)) == ({5, 7, 9}, 3)

    beacon(11)
    await turns()

    assert set(inbox.other_logs()) == {5, 7, 11}
    assert sum(task.cancelled() for task in repairs) == 1  # of the one that was closed


async def test_the_incarnations_of_one_log_that_never_replied_are_bounded(host: InboxHost) -> None:
    inbox = host.inbox()
    receive = inbox.receiver("nats", False)
    for number in range(1, 100):
        receive(encode_beacon(Beacon(LOGGED, 0, 1, {}, Branch(number, 1, number))))
        await turns()

    assert len(inbox._peers) == len(inbox._of_origin[LOGGED]) == INCARNATIONS_MAX
    assert inbox._of_origin[LOGGED][-1].branch.id == 99


async def test_all_repairs_together_buffer_a_bounded_number_of_bytes(
    host: InboxHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffered_events, "BUFFERED_TOTAL_MAX", 3_000)
    inbox = host.inbox()
    receive = inbox.receiver("nats", False)
    for origin in (5, 7, 9, 11):
        receive(framed(envelope(1, 0, LIVE, origin=origin, publisher_id=origin)))
        receive(framed(envelope(3, 2, LIVE, origin=origin, publisher_id=origin, payload=bytes(990))))
    await turns()

    assert inbox.buffer_budget.used_bytes <= 3_000
    assert [len(each._buffered) for each in inbox._peers.values()] == [1, 1, 1, 0]
    inbox.close()
    assert inbox.buffer_budget.used_bytes == 0


async def test_a_peer_that_returns_goes_on_from_its_position(host: InboxHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PEERS_MAX", 1)
    inbox = host.inbox()
    inbox.known_logs.reached(LOGGED, 0, 4)
    beacon = beacons(inbox)
    beacon(LOGGED)
    beacon(7)
    inbox.receiver("nats", False)(framed(envelope(6, 5, KEPT)))
    await turns()

    assert host.counts == {"peers_evicted": 2}
    assert [(origin, after) for origin, after, *_ in host.page_requests] == [(LOGGED, 4)]


async def test_a_new_peer_in_a_full_table_costs_the_same_as_in_a_small_one(
    host: InboxHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile node can announce as many ids as it likes. The table is not searched for each of them."""
    visits = 0

    class CountedPeer(module.Peer):
        def __getattribute__(self, name: str) -> Any:
            nonlocal visits
            visits += 1
            return super().__getattribute__(name)

    monkeypatch.setattr(module, "PEERS_MAX", 500)
    monkeypatch.setattr(module, "Peer", CountedPeer)
    beacon = beacons(host.inbox())
    for origin in range(500):
        beacon(4 + 2 * origin)
    await turns()
    visits = 0
    beacon(2004)
    await turns()

    assert 0 < visits < 100


async def test_only_nodes_with_a_log_are_other_logs(host: InboxHost) -> None:
    inbox = host.inbox()
    beacon = beacons(inbox)
    for origin in (4, 5, 6, 7):
        beacon(origin)
    await turns()

    assert inbox.other_logs() == (5, 7)


async def test_a_change_of_interest_reaches_every_peer(host: InboxHost, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, Any]] = []
    monkeypatch.setattr(module.Peer, "interest_changed", lambda peer: calls.append((peer.id, None)))
    monkeypatch.setattr(module.Peer, "fetch_past", lambda peer, expressions: calls.append((peer.id, expressions)))
    inbox = host.inbox()
    beacon = beacons(inbox)
    beacon(5)
    beacon(7)
    await turns()
    inbox.interest_changed()
    inbox.fetch_past(["a/**"])

    assert calls == [(5, None), (7, None), (5, ["a/**"]), (7, ["a/**"])]


async def test_a_closed_inbox_ends_its_repairs_and_ignores_what_still_arrives(host: InboxHost) -> None:
    subscription, inbox = host.subscribe("**"), host.inbox()
    receive = inbox.receiver("nats", False)
    receive(framed(envelope(2, 1, LIVE)))
    await turns()
    receive(framed(envelope(1, key=LIVE, origin=0)))

    ending = inbox.close()
    assert (len(ending), inbox.other_logs()) == (1, ())
    await turns()

    assert (ending[0].cancelled(), subscription.queued, inbox.received) == (True, 0, {})
    assert inbox.close() == []
