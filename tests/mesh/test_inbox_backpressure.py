"""The inbox and backpressure: the log and a bridge's links delay what is received; a full subscription does not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from deliver_support import soon
from mesh_fakes import OTHER, MeshHost, turns

from zbus.errors import EventInvalid, LogError
from zbus.mesh import inbox as inboxes
from zbus.observe.records import EVENT_DROPPED, EVENT_GAP, EVENT_INVALID
from zbus.wire.beacon import Beacon, encode_beacon
from zbus.wire.envelope import CANCEL, NODE, encode, join


@pytest.fixture
async def host() -> AsyncIterator[MeshHost]:
    host = MeshHost()
    yield host
    for subscription in tuple(host.dispatcher.subscriptions):
        await subscription.aclose()


@pytest.mark.parametrize("forwards", [False, True])
async def test_a_full_blocking_subscription_delays_nothing_else(host: MeshHost, forwards: bool) -> None:
    blocked = host.subscribe("slow/**", overflow="block", queue_events=2)
    same_key = host.subscribe("slow/**", queue_events=100)
    other = host.subscribe("fast/**", queue_events=100)
    host.interest.add(["kept/**"], 0, store=True)
    receive = host.inbox(forwards).receiver("a", False)
    for _ in range(10):
        receive(host.frame("slow/x"))
    await turns()
    assert host.backpressure.blocked

    receive(host.frame("fast/x"))
    receive(host.frame("kept/x"))
    receive(encode_beacon(Beacon(OTHER, 0, 0, {})))
    receive(bytes([NODE]))
    receive(bytes([CANCEL]) + (7).to_bytes(8))
    await turns()

    assert (same_key.queued, other.queued, len(host.commits.rows)) == (10, 1, 1)
    assert (host.beacons, len(host.announcements), host.cancelled) == ([OTHER], 1, [7])
    assert (blocked.queued, blocked.dropped) == (10, 0)
    assert [event.sequence for event in [await soon(blocked) for _ in range(10)] if event] == list(range(10))
    assert not host.backpressure.blocked


async def test_received_events_wait_while_too_many_bytes_await_commit(host: MeshHost) -> None:
    subscription, inbox = host.subscribe("**", queue_events=100), host.inbox()
    receive = inbox.receiver("a", False)
    host.backpressure.block(host.commits, "commits_pending", "the log is behind")
    for _ in range(3):
        receive(host.frame("a/b"))
    await turns(50)
    assert subscription.queued == 0

    host.backpressure.unblock(host.commits)
    await turns()

    assert subscription.queued == 3
    receive(host.frame("a/b"))
    await turns()
    assert subscription.queued == 4
    assert inbox.close() == []  # nothing waits any longer


async def test_nothing_is_polled_while_received_events_wait(host: MeshHost, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timers = asyncio.get_running_loop(), list[float]()
    call_at = loop.call_at

    def timed(when: float, *more: Any, **named: Any) -> asyncio.TimerHandle:
        timers.append(when)
        return call_at(when, *more, **named)

    monkeypatch.setattr(loop, "call_at", timed)  # `call_later` calls it
    host.backpressure.block(host.commits, "commits_pending", "the log is behind")
    host.inbox().receiver("a", False)(host.frame("a/b"))
    await turns(100)

    assert timers == []
    assert len(host.backpressure._waiters) == 1
    host.backpressure.unblock(host.commits)
    await turns()
    assert len(host.backpressure._waiters) == 0


async def test_events_wait_again_if_the_log_falls_behind_again_at_once(host: MeshHost) -> None:
    subscription = host.subscribe("**", queue_events=100)
    receive = host.inbox().receiver("a", False)
    host.backpressure.block(host.commits, "commits_pending", "the log is behind")
    receive(host.frame("a/b"))
    await turns()

    host.backpressure.unblock(host.commits)
    host.backpressure.block(host.commits, "commits_pending", "the log is behind")
    await turns()
    assert subscription.queued == 0

    host.backpressure.unblock(host.commits)
    await turns()
    assert subscription.queued == 1


async def test_another_reason_that_ends_does_not_let_received_events_through(host: MeshHost) -> None:
    full = host.subscribe("full/**", overflow="block", queue_events=1)
    host.receive(1, "full/x")
    subscription = host.subscribe("a/**", queue_events=100)
    host.backpressure.block(host.commits, "commits_pending", "the log is behind")
    host.inbox().receiver("a", False)(host.frame("a/b"))
    await turns()

    await full.aclose()
    await turns()
    assert subscription.queued == 0

    host.backpressure.unblock(host.commits)
    await turns()
    assert subscription.queued == 1


@pytest.mark.parametrize("forwards", [True, False])
async def test_a_send_queue_that_is_full_delays_what_a_bridge_receives(host: MeshHost, forwards: bool) -> None:
    subscription = host.subscribe("**", queue_events=100)
    host.backpressure.block(host, "send_queue_full", "the transport is behind")  # the fake host is the network too
    host.inbox(forwards).receiver("a", False)(host.frame("a/b"))
    await turns()
    assert subscription.queued == (0 if forwards else 1)

    host.backpressure.unblock(host)
    await turns()
    assert subscription.queued == 1
    assert len(host.forwarded) == forwards


async def test_a_repair_waits_for_the_log_and_not_for_a_full_subscription(host: MeshHost) -> None:
    inbox = host.inbox()
    host.subscribe("full/**", overflow="block", queue_events=1)
    host.receive(1, "full/x")
    assert host.backpressure.blocked
    async with asyncio.timeout(5):
        await inbox.wait_for_capacity()

    host.backpressure.block(host.commits, "commits_pending", "the log is behind")
    waiting = asyncio.create_task(inbox.wait_for_capacity())
    await turns()
    assert not waiting.done()
    host.backpressure.unblock(host.commits)
    async with asyncio.timeout(5):
        await waiting


async def test_an_inbox_that_is_closed_while_events_wait_leaves_nothing_behind(host: MeshHost) -> None:
    subscription, inbox = host.subscribe("**"), host.inbox()
    host.backpressure.block(host.commits, "commits_pending", "the log is behind")
    inbox.receiver("a", False)(host.frame("a/b"))
    await turns()

    ending = inbox.close()
    async with asyncio.timeout(5):
        await asyncio.wait(ending)
    host.backpressure.unblock(host.commits)
    await turns()

    assert len(ending) == 1
    assert subscription.queued == 0


async def test_an_inbox_that_was_closed_does_not_wait_for_what_still_arrives(host: MeshHost) -> None:
    inbox = host.inbox()
    host.backpressure.block(host.commits, "commits_pending", "the log is behind")
    inbox.receiver("a", False)(host.frame("a/b"))
    assert inbox.close() == []
    await turns()

    assert host.backpressure._waiters == {}


# Records have a code for programs beside the sentence for people.


def codes_of(caplog: pytest.LogCaptureFixture, name: str) -> list[tuple[str, str]]:
    found: list[dict[str, Any]] = [getattr(each, "zbus", {}) for each in caplog.records if each.name == "zbus"]
    return [(each["code"], each["reason"]) for each in found if each.get("record") == name]


async def test_frames_beyond_the_inbox_are_counted_and_recorded(
    host: MeshHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(inboxes, "INBOX_BYTES_MAX", 100)
    receive = host.inbox().receiver("a", False)
    for _ in range(10):
        receive(host.frame("a/b", b"x" * 60))
    await turns()

    (dropped,) = codes_of(caplog, EVENT_DROPPED)
    assert dropped == ("inbox_full", "the inbox is full; events that their publisher's log has are requested again")
    assert host.counts["dropped_inbox_full"] == 9  # one of them fits


async def test_a_dropped_frame_counts_as_many_events_as_it_holds(
    host: MeshHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inboxes, "INBOX_BYTES_MAX", 100)
    receive = host.inbox().receiver("a", False)
    receive(host.frame("a/b", b"x" * 90))
    receive(join([host.frame("a/b", b"x" * 10) for _ in range(20)]))  # a frame of 20 events
    receive(encode_beacon(Beacon(OTHER, 0, 0, {f"k/{n}": (1, 2, 3) for n in range(20)})))  # a frame of none
    await turns()

    assert host.counts["dropped_inbox_full"] == 20


async def test_events_that_the_log_does_not_take_are_counted_and_recorded(
    host: MeshHost, caplog: pytest.LogCaptureFixture
) -> None:
    host.interest.add(["kept/**"], 0, store=True)
    host.inbox().receiver("a", False)(host.frame("kept/x"))
    await turns()
    host.commits.storing[0].set_exception(LogError("the disk is full"))
    await turns()

    assert codes_of(caplog, EVENT_DROPPED) == [("store_failed", "not stored: the disk is full")]
    assert host.counts["store_failed"] == 1


async def test_malformed_frames_are_counted_by_kind_and_recorded(
    host: MeshHost, caplog: pytest.LogCaptureFixture
) -> None:
    def reject(frame: bytes, link: str) -> None:
        raise EventInvalid("not an announcement")

    host.announcement_received = reject  # type: ignore[method-assign]
    inbox = host.inbox()
    inbox.receiver("a", False)(bytes([9, 9]))
    inbox.receiver("b", False)(bytes([CANCEL]))
    inbox.receiver("c", False)(host.frame("a/b", b"x" * 1001))
    inbox.receiver("d", False)(bytes([NODE]))
    await turns()

    assert [code for code, _ in codes_of(caplog, EVENT_INVALID)] == [
        "invalid_version",
        "invalid_cancel",
        "invalid_too_large",
        "invalid_node",
    ]
    assert all(reason for _, reason in codes_of(caplog, EVENT_INVALID))
    assert {name: number for name, number in host.counts.items() if name.startswith("invalid")} == {
        "invalid_received": 4,
        "invalid_version": 1,
        "invalid_cancel": 1,
        "invalid_too_large": 1,
        "invalid_node": 1,
    }


async def test_a_frame_that_causes_an_unexpected_error_is_counted_and_recorded_and_the_next_one_arrives(
    host: MeshHost, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(frame: bytes, link: str) -> None:
        raise RuntimeError("a bug of ours")

    host.announcement_received = fail  # type: ignore[method-assign]
    subscription = host.subscribe("a/**")
    receive = host.inbox().receiver("a", False)
    receive(bytes([NODE]))
    receive(host.frame("a/b"))
    await turns()

    found = [each.zbus["record"] for each in caplog.records if each.name == "zbus"]  # type: ignore[attr-defined]
    assert (found, host.counts["receive_errors"]) == (["RECEIVE_FAILED"], 1)
    assert subscription.queued == 1


async def test_a_gap_of_a_sender_without_a_log_is_counted_recorded_and_published(
    host: MeshHost, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "zbus")
    gaps, subscription = host.subscribe("@zbus/gap"), host.subscribe("a/**")
    receive = host.inbox().receiver("a", True)
    receive(host.frame("a/b"))
    host.rows(2, 3)  # two sequences that never arrive
    receive(host.frame("a/b"))
    await turns()

    assert codes_of(caplog, EVENT_GAP) == [("gap_unrepaired", "events are missing and could not be repaired")]
    assert (host.counts["gaps"], host.counts["gaps_unrepaired"]) == (1, 1)
    gap = await soon(gaps)
    assert gap is not None
    assert gap.decode(dict) | {"publisher_id": 0} == {
        "publisher_id": 0,
        "first": 1,
        "last": 2,
        "key": "a/b",
        "open": False,
    }
    assert subscription.queued == 2


async def test_a_gap_that_is_still_requested_is_counted_and_recorded_as_open(
    host: MeshHost, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = host.inbox()

    assert inbox.report_open_gap(7, "a/b", 9, 3, 6)
    assert not inbox.report_open_gap(7, "a/b", 9, 5, 6)

    assert [code for code, _ in codes_of(caplog, EVENT_GAP)] == ["gap_open"]
    assert host.counts["gaps_open"] == 1


async def test_events_of_a_link_without_requests_do_not_wait_for_a_repair(host: MeshHost) -> None:
    """The event comes from a node with a log, and an earlier one is missing: no log can be asked over this link."""
    subscription = host.subscribe("a/**", queue_events=100)
    (row,) = host.rows(1, 3, "a/b")
    host.inbox().receiver("a", False, events_only=True)(encode(row.event(9), origin=OTHER | 1, previous=8))
    await turns()

    assert subscription.queued == 1
