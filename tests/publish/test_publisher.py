"""Publishing: offsets, identities, payloads, limits, and what is true after an error."""

from __future__ import annotations

import asyncio
import dataclasses
import traceback
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest
from inside import node_of

import zbus
from zbus.ports.log import AppendResult, Refused


class Order(pydantic.BaseModel):
    id: int


@dataclasses.dataclass
class Parcel:
    id: int


class Bill(msgspec.Struct):
    id: int


async def test_offsets_start_at_one_and_follow_each_other(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher("shop/orders/created")

        offsets = [await publisher.publish(b"x") for _ in range(3)]
        many = await publisher.publish_many([b"y"] * 2500)

        assert offsets == [1, 2, 3]
        assert list(many) == list(range(4, 2504))
        assert await bus.head() == 2503


async def test_every_publisher_object_is_a_new_identity_with_sequences_from_zero(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        first, second = await bus.publisher("a/b"), await bus.publisher("a/b")
        for publisher in (first, second, first):
            await publisher.publish(b"")

        events = [event async for event in bus.replay()]

    assert first.publisher_id != second.publisher_id
    assert all(0 <= publisher.publisher_id < 1 << 53 for publisher in (first, second))
    assert [event.identity for event in events] == [
        (first.publisher_id, 0),
        (second.publisher_id, 0),
        (first.publisher_id, 1),
    ]


async def test_publishers_and_sessions_get_new_ids_if_a_copy_of_the_process_may_use_the_same_ones(
    log_path: Path,
) -> None:
    async with zbus.open(log_path) as bus:
        publisher, idle = await bus.publisher("a/b"), await bus.publisher("a/b")
        session = bus.session("alice")
        before = [publisher.publisher_id, idle.publisher_id]
        await publisher.publish(b"1")
        await session.publish("todos", b"1")
        node_of(bus).renew_identities()
        await publisher.publish(b"2")
        await publisher.publish_many([b"3", b"4"])
        await idle.publish_many([b"1"])
        await session.publish("todos", b"2")

        events = [event async for event in bus.replay("**")]
        of_session = [event async for event in bus.replay("sessions/**")]

    assert [event.identity for event in events if event.key == "a/b"] == [
        (before[0], 0),
        (publisher.publisher_id, 0),
        (publisher.publisher_id, 1),
        (publisher.publisher_id, 2),
        (idle.publisher_id, 0),
    ]
    assert not {publisher.publisher_id, idle.publisher_id} & set(before)
    assert [event.sequence for event in of_session] == [0, 0]
    assert len({event.publisher_id for event in of_session}) == 2


@pytest.mark.parametrize(
    ("payload", "type_", "content_type"),
    [
        (b"raw", bytes, None),
        (bytearray(b"raw"), bytes, None),
        ("text", str, "text/plain"),
        ({"id": 7}, dict, "application/json"),
        ([1, 2], list, "application/json"),
        (Order(id=7), Order, "application/json"),
        (Parcel(7), Parcel, "application/json"),
        (Bill(7), Bill, "application/json"),
    ],
)
@pytest.mark.parametrize("log", [None, "memory"])
async def test_a_payload_of_any_kind_arrives_as_what_it_was(
    payload: object, type_: type, content_type: str | None, log: str | None
) -> None:
    async with zbus.open(log) as bus, bus.subscribe("**") as subscription:
        publisher = await bus.publisher("a/b")
        await publisher.publish(payload, correlation_id="c-1", headers={"tenant": "x"})

        event = await anext(subscription)

    assert event.decode(type_) == payload
    assert event.content_type == content_type
    assert event.correlation_id == "c-1"
    assert event.headers["tenant"] == "x"


async def test_an_event_over_the_limit_is_refused_and_the_next_one_is_stored(log_path: Path) -> None:
    async with zbus.open(log_path, payload_bytes_max=10) as bus:
        publisher = await bus.publisher("a/b")

        with pytest.raises(zbus.EventTooLarge):
            await publisher.publish(b"x" * 11)
        offset = await publisher.publish(b"x" * 10)

        assert offset == 1
        assert [event.sequence async for event in bus.replay()] == [0]


@pytest.mark.parametrize("key", ["a/*", "a/**", "a//b", "", "@sys/x", "a b", "x\n/PUB admin"])
async def test_a_key_that_no_transport_could_carry_is_refused(key: str) -> None:
    async with zbus.open() as bus:
        with pytest.raises(zbus.KeyInvalid):
            await bus.publisher(key)


async def test_put_of_many_events_uses_commits_that_other_publishers_need_not_wait_for_long(log_path: Path) -> None:
    events = [zbus.Event(9, n, 1, "a/b", b"x") for n in range(2500)]
    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher("c/d")
        putting = asyncio.ensure_future(bus.put(*events))
        await asyncio.sleep(0)  # the first commit has begun
        between = await publisher.publish(b"x")
        offsets = await putting
        again = await bus.put(*events)
        stored = [event.identity async for event in bus.replay("a/b")]

    assert between < 2500
    assert [(offset, offset.first) for offset in offsets] == [(n, True) for n in range(1, 2502) if n != between]
    assert [(offset, offset.first) for offset in again] == [(offset, False) for offset in offsets]
    assert stored == [(9, n) for n in range(2500)]


async def test_a_put_that_fails_says_how_many_of_its_events_were_stored(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [zbus.Event(9, n, 1, "a/b", b"x") for n in range(2500)]
    async with zbus.open(log_path) as bus:
        commits = node_of(bus).entry.commits
        assert commits is not None
        append = commits._append

        def fail(rows: Any, done: Any, about: Any) -> None:
            if rows[0].sequence < 2000:
                append(rows, done, about)
            else:
                done(AppendResult(about, Refused(zbus.LogFull("app.db"))))

        monkeypatch.setattr(commits, "_append", fail)
        with pytest.raises(zbus.LogFull) as caught:
            await bus.put(*events)
        monkeypatch.undo()
        offsets = await bus.put(*events)

    assert caught.value.__notes__ == ["2000 events of this call were stored; it is safe to put all of them again"]
    assert list(offsets) == list(range(1, 2501))
    assert [offset.first for offset in offsets] == [False] * 2000 + [True] * 500


async def test_putting_the_same_identity_again_stores_nothing_and_returns_the_first_offset(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher("a/b")
        await publisher.publish_many([b"0", b"1", b"2"])
        stored = [event async for event in bus.replay()]
        async with bus.subscribe("**") as subscription:
            again = await bus.put(*stored, zbus.Event(5, 0, 1, "x/y", b"new"))
            event = await anext(subscription)

            assert list(again) == [1, 2, 3, 4]
            assert event.payload == b"new"
            assert subscription.queued == 0
        assert await bus.head() == 4


async def test_a_cancelled_publish_leaves_the_publisher_usable_and_its_events_in_order(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher("a/b")
        tasks = [asyncio.create_task(publisher.publish(b"%d" % n)) for n in range(50)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        last = await publisher.publish(b"last")

        stored = [event async for event in bus.replay()]

    acknowledged = [result for result in results if isinstance(result, int)]
    assert len(acknowledged) >= 25
    assert [event.sequence for event in stored] == sorted(event.sequence for event in stored)
    assert {event.offset for event in stored} >= {*acknowledged, last}


async def test_publish_many_says_how_many_were_stored_before_an_error(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher("a/b")

        def payloads() -> object:
            yield from [b"x"] * 3000
            yield object()

        with pytest.raises(zbus.PayloadInvalid) as caught:
            await publisher.publish_many(payloads())  # type: ignore[arg-type]

        assert caught.value.__notes__ == ["3000 events of this call are stored"]
        assert await bus.head() == 3000


async def test_publishing_on_a_closed_bus_is_an_error_and_stores_nothing(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher("a/b")
        await publisher.publish(b"x")
    with pytest.raises(zbus.BusClosed):
        await publisher.publish(b"y")
    with pytest.raises(zbus.BusClosed):
        bus.subscribe("**")

    async with zbus.open(log_path) as bus:
        assert await bus.head() == 1


async def test_without_a_log_publish_returns_zero_and_what_needs_one_says_so() -> None:
    async with zbus.open() as bus:
        publisher = await bus.publisher("a/b")
        assert await publisher.publish(b"x") == 0
        assert await publisher.publish_many([b"x", b"y"]) == [0, 0]
        for attempt in (
            lambda: bus.replay(),
            lambda: bus.subscribe("**", durable="x"),
            lambda: bus.subscribe("**", start="beginning"),
            lambda: bus.subscribe("**", overflow="spill"),
        ):
            with pytest.raises(zbus.LogRequired, match=r"zbus.open\('app.db'\)"):
                attempt()
        with pytest.raises(zbus.LogRequired):
            await bus.head()


async def test_a_publisher_that_never_waits_lets_its_readers_run() -> None:
    async with zbus.open() as bus, bus.subscribe("**", queue_events=100) as subscription:
        publisher = await bus.publisher("a/b")

        async def read() -> int:
            seen = 0
            async for _ in subscription:
                seen += 1
                if seen == 5000:
                    break
            return seen

        reading = asyncio.create_task(read())
        for _ in range(5000):
            await publisher.publish(b"x")

        assert await asyncio.wait_for(reading, 10) == 5000
        assert subscription.dropped == 0


async def test_failures_after_the_writer_stopped_have_an_exception_each(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher("a/b")
        log: Any = node_of(bus).log
        log._writer._stopped = zbus.LogWriterFailed(str(log_path), "fsync failed")
        errors = []
        for _ in range(3):
            with pytest.raises(zbus.LogWriterFailed) as caught:
                await publisher.publish_many([b"x"])
            errors.append(caught.value)

    assert [len(each.__notes__) for each in errors] == [1, 1, 1]
    assert len({len(traceback.extract_tb(each.__traceback__)) for each in errors}) == 1
    assert log._writer._stopped.__traceback__ is None


@pytest.mark.parametrize("one", [{"a": 1}, "hello", b"hello", Order(id=1), 5, None], ids=lambda one: type(one).__name__)
async def test_one_payload_in_place_of_a_list_is_rejected_and_stores_nothing(log_path: Path, one: object) -> None:
    async with zbus.open(log_path) as bus:
        publisher, session = await bus.publisher("a/b"), bus.session("alice")
        for call in (publisher.publish_many, lambda each: session.publish_many("a/b", each)):
            with pytest.raises(zbus.PayloadInvalid) as caught:
                await call(one)  # type: ignore[arg-type]

            name = type(one).__name__
            assert str(caught.value) == (
                f"publish_many takes a list of payloads, not {name}: use publish() for one payload; not stored"
            )
        assert (await bus.head(), publisher.sequence) == (0, 0)
