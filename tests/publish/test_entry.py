"""The publish path: every path enforces every step, in one order, and a rejected event uses up no sequence number.

| path | open | read-only | access | key | payload | headers | schema | backpressure | identity |
|---|---|---|---|---|---|---|---|---|---|
| publish, publish_many, session.publish, session.publish_many | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | numbered last |
| put | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | given |
| proxied write, a bus owns the log | (1) | (1) | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | given |
| proxied write, no bus has the log open | (1) | (1) | (2) | legal | ✓ | ✓ | ✓ | (2) | given |
| POST | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | numbered last |
| POST with an Idempotency-Key | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | follows from the Idempotency-Key |

(1) A writer takes over a log that no bus owns, so a bus that was closed or only reads rejects nothing.
(2) Without a bus there are no access rules, no transports and no subscribers.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import pytest
from publish_paths import (
    BAD,
    GIVEN,
    GIVEN_ID,
    GOOD,
    HEADERS_BAD,
    IN_PROCESS,
    KEY,
    LARGE,
    PATHS,
    SCHEMA,
    STEPS,
    Denies,
    rejected_by,
    rig,
    until,
)

import zbus
import zbus_log
from zbus.headers import HEADERS_BYTES_MAX, Headers
from zbus.ports.log import Row

BEFORE_PATH = ("open", "read_only")  # steps that depend on the bus alone
APPLIES = [(path, step) for path in PATHS for step in STEPS if path != "proxied write" or step not in BEFORE_PATH]
WITHOUT_LOG = [(path, step) for path in IN_PROCESS for step in STEPS if step != "read_only"]
ILLEGAL = ["shop/*", "shop//orders", "@zbus/x", "shop/or ders"]


def log_of(path: str, log_path: Path) -> Path | str:
    """A log in memory, but for the path that needs a file."""
    return log_path if path == "proxied write" else "memory"


def expected_sequences(path: str, events: int) -> list[int]:
    return list(GIVEN.get(path, range(events)))[:events]


@pytest.mark.parametrize(("path", "step"), APPLIES)
async def test_each_path_enforces_each_step_and_the_next_event_has_the_next_sequence(
    path: str, step: str, log_path: Path
) -> None:
    send = PATHS[path]
    async with rig(log_of(path, log_path)) as bus:
        await send(bus, GOOD, None)
        payload, headers = await bus.violate([step])
        before = len(await bus.everything())

        assert await rejected_by(send(bus, payload, headers), bus) == step

        assert len(await bus.everything()) == before
        if step == "open":
            return
        await bus.restore()
        await send(bus, GOOD, None)
        stored = await bus.stored()

    assert [event.sequence for event in stored] == expected_sequences(path, 2)
    assert stored[1].offset == before + 1


@pytest.mark.parametrize(("path", "step"), WITHOUT_LOG)
async def test_without_a_log_each_path_enforces_the_same(path: str, step: str) -> None:
    send = PATHS[path]
    async with rig(None) as bus:
        await send(bus, GOOD, None)
        payload, headers = await bus.violate([step])
        before = len(await bus.everything())

        assert await rejected_by(send(bus, payload, headers), bus) == step

        assert len(await bus.everything()) == before
        if step == "open":
            return
        await bus.restore()
        await send(bus, GOOD, None)

        assert [event.sequence for event in await bus.stored()] == expected_sequences(path, 2)


@pytest.mark.parametrize("tracing", ["off", "on"])
@pytest.mark.parametrize(("path", "step"), APPLIES)
async def test_of_several_steps_that_would_reject_an_event_the_first_one_does(
    path: str, step: str, log_path: Path, tracing: str
) -> None:
    send = PATHS[path]
    async with rig(log_of(path, log_path), tracing=tracing) as bus:
        await send(bus, GOOD, None)
        payload, headers = await bus.violate(STEPS[STEPS.index(step) :])

        assert await rejected_by(send(bus, payload, headers), bus) == step


@pytest.mark.parametrize("path", IN_PROCESS)
@pytest.mark.parametrize("step", STEPS[: STEPS.index("headers")])
async def test_headers_that_are_not_a_mapping_are_rejected_in_their_turn_if_events_are_traced(
    path: str, step: str
) -> None:
    """A span needs the headers before the first step."""
    headers: Any = 7
    async with rig("memory", tracing="on") as bus:
        await PATHS[path](bus, GOOD, None)
        assert await rejected_by(PATHS[path](bus, GOOD, headers), bus) == "headers"
        payload, _ = await bus.violate([step])

        assert await rejected_by(PATHS[path](bus, payload, headers), bus) == step


@pytest.mark.parametrize("path", PATHS)
async def test_an_illegal_key_is_rejected_on_every_path(path: str, log_path: Path) -> None:
    async with rig(log_of(path, log_path)) as bus:
        for bus.key in ILLEGAL:
            assert await rejected_by(PATHS[path](bus, GOOD, None)) == "key"

        bus.key = KEY
        await PATHS[path](bus, GOOD, None)
        (event,) = await bus.everything() if not path.startswith("session") else (await bus.everything())[:1]

    assert (event.offset, event.sequence) == (1, 0)


@pytest.mark.parametrize("path", PATHS)
async def test_where_access_is_denied_nothing_is_encoded_validated_or_made_known(
    path: str, log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Validators:
        def validate(self, key: str, body: bytes) -> None:
            done.append("validated")

    async with rig(log_of(path, log_path)) as bus:
        await PATHS[path](bus, GOOD, None)
        for step in ("encode_payload", "encode_headers", "check_encoded"):
            monkeypatch.setattr(f"zbus.publish.entry.{step}", lambda *_, step=step: done.append(step))
        monkeypatch.setattr(bus.node, "check_key", lambda key: done.append("checked the key"))
        bus.entry.access, bus.entry.validators = Denies(), Validators()
        bus.key = "secret/key"
        known = dict(bus.entry.published_keys)

        assert await rejected_by(PATHS[path](bus, BAD, None), bus) == "access"

        assert done == []
        assert bus.entry.published_keys == known


@pytest.mark.parametrize("path", PATHS)
async def test_a_rejected_event_never_waits_and_an_accepted_one_does(path: str, log_path: Path) -> None:
    send = PATHS[path]
    async with rig(log_of(path, log_path)) as bus:
        await bus.bus.schemas.register("**", SCHEMA)
        await bus.fill()

        assert await rejected_by(send(bus, BAD, None), bus) == "schema"
        sending = asyncio.create_task(send(bus, GOOD, None))
        await until(lambda: bus.entry.backpressure._waiters)
        assert await bus.stored() == []

        await bus.free()
        await asyncio.wait_for(sending, 10)

        assert [event.sequence for event in await bus.stored()] == [0]


async def write_unowned(path: Path, row: Row) -> None:
    await asyncio.to_thread(zbus_log.put, path, [[row]])


@pytest.mark.parametrize(
    ("key", "payload", "headers", "step"),
    [
        *[(key, LARGE, HEADERS_BAD, "key") for key in ILLEGAL],
        (KEY, LARGE, HEADERS_BAD, "payload"),
        (KEY, BAD, HEADERS_BAD, "headers"),
        (KEY, BAD, None, "schema"),
    ],
)
async def test_a_proxied_write_while_no_bus_has_the_log_open_is_checked_in_the_same_order(
    key: str, payload: bytes, headers: Any, step: str, log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBUS_PAYLOAD_BYTES_MAX", "100")
    async with zbus.open(log_path) as bus:
        await bus.schemas.register("**", SCHEMA)

    encoded = msgspec.msgpack.encode(headers) if headers else None
    assert await rejected_by(write_unowned(log_path, Row(GIVEN_ID, 0, 1, key, payload, encoded))) == step
    await write_unowned(log_path, Row(GIVEN_ID, 0, 1, KEY, GOOD, None))

    async with zbus.open(log_path) as bus:
        assert [(event.offset, event.identity) async for event in bus.replay()] == [(1, (GIVEN_ID, 0))]


@pytest.mark.parametrize("log", [None, "memory"])
@pytest.mark.parametrize(
    "numbers",
    [
        (True, 0, 1),
        (7, False, 1),
        (7, 0, True),
        (7, 0.0, 1),
        (-1, 0, 1),
        (1 << 63, 0, 1),
        ("7", 0, 1),
        (7, -1, 1),
        (7, 1 << 64, 1),
        (7, "0", 1),
        (7, 0, -5),
        (7, 0, None),
    ],
)
async def test_a_put_with_impossible_numbers_is_rejected_and_harms_no_other_publisher(
    numbers: Any, log: str | None
) -> None:
    async with zbus.open(log) as bus:
        publisher = await bus.publisher(KEY)
        others = [asyncio.create_task(publisher.publish(GOOD)) for _ in range(3)]

        with pytest.raises(zbus.EventInvalid, match="2\\^63 - 1; not stored"):
            await bus.put(zbus.Event(7, 0, 1, KEY, GOOD), zbus.Event(*numbers, KEY, GOOD))

        assert await asyncio.gather(*others) == ([1, 2, 3] if log else [0, 0, 0])
        assert list(await bus.put(zbus.Event(7, 0, 1, KEY, GOOD))) == ([4] if log else [0])


@pytest.mark.parametrize("log", [None, "memory"])
@pytest.mark.parametrize(
    ("event", "words"),
    [
        (zbus.Event(7, 1, 1, None, GOOD), "a key is text, not NoneType"),  # type: ignore[arg-type]
        (zbus.Event(7, 1, 1, ["a"], GOOD), "a key is text, not list"),  # type: ignore[arg-type]
        (zbus.Event(7, 1, 1, "shop/*", GOOD), "without wildcards"),
        (zbus.Event(7, 1, 1, "\ud800", GOOD), "rejected"),
        (zbus.Event(7, 1, 1, KEY, object()), "cannot be encoded"),  # type: ignore[arg-type]
        (zbus.Event(7, 1, 1, KEY, GOOD, "text"), "headers are names and values"),  # type: ignore[arg-type]
        (zbus.Event(7, 1, 1, KEY, GOOD, {"a": 1}), "must be text"),  # type: ignore[dict-item]
        (zbus.Event(7, 1, 1, KEY, GOOD, {"a": "\ud800"}), "headers rejected"),
    ],
    ids=lambda value: "",
)
async def test_a_put_with_an_impossible_key_payload_or_header_is_rejected_and_harms_no_other_publisher(
    event: zbus.Event, words: str, log: str | None
) -> None:
    async with zbus.open(log) as bus:
        publisher = await bus.publisher(KEY)
        others = [asyncio.create_task(publisher.publish(GOOD)) for _ in range(3)]

        with pytest.raises(zbus.EventInvalid, match=words):
            await bus.put(zbus.Event(7, 0, 1, KEY, GOOD), event)

        assert await asyncio.gather(*others) == ([1, 2, 3] if log else [0, 0, 0])
        assert list(await bus.put(zbus.Event(7, 0, 1, KEY, GOOD))) == ([4] if log else [0])


async def test_a_put_of_another_event_under_a_used_identity_is_a_conflict_that_names_the_stored_one() -> None:
    async with zbus.open("memory") as bus:
        publisher = await bus.publisher("shop/a")
        await bus.put(zbus.Event(7, 0, 1, "shop/orders", b"order 1"))

        putting = bus.put(
            zbus.Event(7, 1, 1, "shop/orders", b"order 2"),
            zbus.Event(7, 0, 1, "shop/refunds", b"refund 99"),
            zbus.Event(7, 0, 2, "shop/orders", b"order 1", {"again": "yes"}),
        )
        others = asyncio.gather(*[publisher.publish(b"x") for _ in range(20)], bus.put(zbus.Event(8, 0, 1, "b", b"")))
        with pytest.raises(zbus.IdentityConflict, match="on 'shop/orders' at offset 1") as caught:
            await putting

        error = caught.value
        assert (error.publisher_id, error.sequence, error.key, error.offset) == (7, 0, "shop/orders", 1)
        assert error.outcome == "refused"
        assert [(event.key, event.payload) for event in error.events] == [("shop/refunds", b"refund 99")]
        assert error.__notes__ == ["2 events of this call are stored"]
        assert len(await others) == 21
        (again,) = await bus.put(zbus.Event(7, 0, 1, "shop/orders", b"order 1"))
        assert (again, again.first) == (1, False)
        found = [event.payload async for event in bus.replay("shop/orders", "shop/refunds")]
        assert found == [b"order 1", b"order 2"]


async def test_a_published_event_under_a_used_identity_is_a_conflict() -> None:
    async with zbus.open("memory") as bus:
        publisher = await bus.publisher(KEY)
        await bus.put(zbus.Event(publisher.publisher_id, 0, 1, KEY, b"first"))

        with pytest.raises(zbus.IdentityConflict):
            await publisher.publish(b"another")
        assert await publisher.publish(b"next") == 2


async def test_a_retry_after_retention_is_recognized(log_path: Path) -> None:
    event = zbus.Event(7, 0, 1, KEY, GOOD)
    async with zbus.open(log_path) as bus:
        await bus.put(event, zbus.Event(7, 1, 1, KEY, GOOD))
        await asyncio.to_thread(zbus_log.prune, log_path, zbus_log.Rules(until=1))
        (again,) = await bus.put(event)

        assert (again, again.first) == (1, False), "the low-water mark"
        assert await bus.head() == 2


@pytest.mark.parametrize("owned", [True, False])
async def test_a_proxied_write_with_impossible_numbers_is_rejected(owned: bool, log_path: Path) -> None:
    async with zbus.open(log_path, durability="os") as bus:
        if not owned:
            await bus.aclose()
        for row in (Row(1 << 63, 0, 1, KEY, GOOD), Row(7, -1, 1, KEY, GOOD), Row(7, 0, 1 << 63, KEY, GOOD)):
            with pytest.raises(zbus.EventInvalid):
                await write_unowned(log_path, row)
        await write_unowned(log_path, Row(7, 0, 1, KEY, GOOD))

    async with zbus.open(log_path, read_only=True) as bus:
        assert [event.offset async for event in bus.replay()] == [1]


@pytest.mark.parametrize("path", ["put", "proxied write", "POST, idempotent"])
async def test_keys_of_events_without_a_publisher_are_known_to_other_nodes_once_they_are_admitted(
    path: str, log_path: Path
) -> None:
    async with rig(log_of(path, log_path)) as bus:
        await rejected_by(PATHS[path](bus, LARGE, None))
        assert KEY not in bus.entry.published_keys

        await PATHS[path](bus, GOOD, None)

        assert KEY in bus.entry.published_keys


@pytest.mark.parametrize("path", ["put", "publish", "publish_many"])
async def test_headers_of_a_read_event_are_passed_on_as_they_were_encoded(path: str, log_path: Path) -> None:
    raw = msgspec.msgpack.encode({"region": "eu", "content-type": "text/plain"})
    await write_unowned(log_path, Row(7, 0, 1, KEY, GOOD, raw))
    async with zbus.open(log_path, read_only=True) as source, zbus.open("memory", tracing="off") as copy:
        publisher = await copy.publisher(KEY)
        (event,) = [event async for event in source.replay()]
        assert isinstance(event.headers, Headers)
        if path == "put":
            await copy.put(event)
        elif path == "publish":
            await publisher.publish(event.payload, headers=event.headers)
        else:
            await publisher.publish_many([event.payload], headers=event.headers)
        (copied,) = [event async for event in copy.replay()]

    assert event.headers._decoded is None
    assert isinstance(copied.headers, Headers)
    assert copied.headers.raw == raw


async def test_headers_of_a_read_event_are_encoded_again_if_something_is_added(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher(KEY)
        await publisher.publish(b"x", headers={"region": "eu"})
        (event,) = [event async for event in bus.replay()]
        await publisher.publish({"id": 1}, headers=event.headers)
        await publisher.publish(b"x", headers=event.headers, correlation_id="order-7")
        found = [dict(event.headers) async for event in bus.replay(after=1)]

    assert found == [
        {"content-type": "application/json", "region": "eu"},
        {"correlation-id": "order-7", "region": "eu"},
    ]


async def test_headers_that_another_node_encoded_have_the_same_limit() -> None:
    large = Headers(msgspec.msgpack.encode({"region": "x" * HEADERS_BYTES_MAX}))
    async with zbus.open("memory") as bus:
        with pytest.raises(zbus.EventTooLarge, match="headers"):
            await bus.put(zbus.Event(7, 0, 1, KEY, GOOD, large))


class Topic(StrEnum):
    ORDERS = "shop/orders"


async def test_subclasses_of_int_and_str_are_stored_as_plain_values(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher(Topic.ORDERS)
        offset = await publisher.publish(b"x", headers={"region": Topic.ORDERS})
        await bus.put(zbus.Event(offset, offset, offset, Topic.ORDERS, b"y"))  # `Offset` is an int too
        await publisher.publish(b"z")
        found = [event async for event in bus.replay()]

    assert [event.payload for event in found] == [b"x", b"y", b"z"]
    assert {type(event.key) for event in found} == {str}
    assert found[0].headers["region"] == "shop/orders"
    assert (found[1].publisher_id, found[1].sequence, found[1].published_at) == (1, 1, 1)


@pytest.mark.parametrize("given", [{"key": "a"}, [zbus.Event(1, 0, 1, "a", b"")], None])
async def test_put_of_something_that_is_not_an_event_is_rejected(log_path: Path, given: Any) -> None:
    async with zbus.open(log_path) as bus:
        with pytest.raises(zbus.EventInvalid, match="put takes events"):
            await bus.put(given)
        assert await bus.head() == 0
