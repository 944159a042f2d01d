"""The event: who it is, when two are the same, and what it takes along to another process."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import zbus
from zbus import CursorError, Event
from zbus.event import Provenance

FIELDS = (7, 3, 1_700_000_000_000_000_000, "shop/orders/created", b"x", {"a": "b"}, 12)


def test_an_event_is_known_by_its_publisher_and_sequence() -> None:
    event = Event(*FIELDS)

    assert event.identity == (7, 3)


@pytest.mark.parametrize(
    ("key", "topic"), [("shop/orders/created", "created"), ("created", "created"), ("a/b/c/@d", "@d")]
)
def test_the_topic_is_the_last_segment_of_the_key(key: str, topic: str) -> None:
    assert Event(1, 0, 0, key, b"").topic == topic


def test_events_with_the_same_fields_are_equal_and_hash_alike() -> None:
    first, second = Event(*FIELDS), Event(*FIELDS)

    assert first == second
    assert not first != second  # noqa: SIM202 - `!=` is a method of its own
    assert hash(first) == hash(second)
    assert len({first, second}) == 1


@pytest.mark.parametrize("at", range(len(FIELDS)))
def test_events_that_differ_in_any_field_are_not_equal(at: int) -> None:
    other = [8, 4, 0, "shop/orders/paid", b"y", {}, 13][at]

    event, changed = Event(*FIELDS), Event(*FIELDS[:at], other, *FIELDS[at + 1 :])

    assert event != changed
    assert not event == changed  # noqa: SIM201 - `==` is a method of its own


def test_an_event_equals_nothing_that_is_not_an_event() -> None:
    assert Event(*FIELDS) != FIELDS
    assert Event(*FIELDS) != None  # noqa: E711


def test_the_headers_may_be_of_any_kind_of_mapping() -> None:
    class Headers(dict[str, str]):
        pass

    assert Event(*FIELDS) == Event(*FIELDS[:5], Headers(a="b"), FIELDS[6])


def test_an_event_does_not_change() -> None:
    event = Event(*FIELDS)

    with pytest.raises(AttributeError):
        event.offset = 5  # type: ignore[misc]


def test_an_event_without_headers_has_no_correlation_id_and_no_content_type() -> None:
    event = Event(1, 0, 0, "a", b"")

    assert (event.correlation_id, event.content_type, dict(event.headers), event.offset) == (None, None, {}, 0)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_event_pickles(protocol: int) -> None:
    assert pickle.loads(pickle.dumps(Event(*FIELDS), protocol)) == Event(*FIELDS)


async def test_an_event_crosses_processes_without_its_subscription(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        async with bus.subscribe("**", durable="reader", schema=dict) as sub:
            await (await bus.publisher("a/b")).publish({"id": 1})
            event = await sub.next()
            assert event is not None

            twin: Event = pickle.loads(pickle.dumps(event))

            assert twin == event
            assert twin._handle is None
            assert event.decode() == twin.decode() == {"id": 1}
            with pytest.raises(CursorError):
                await twin.ack()
            await event.ack()


async def test_acknowledging_an_event_that_came_from_nowhere_is_a_clear_error() -> None:
    with pytest.raises(
        CursorError, match="is not from a durable subscription; there is nothing to acknowledge"
    ) as caught:
        await Event(*FIELDS).ack()

    assert "''" not in str(caught.value), "a name that is not there is not shown"


@pytest.mark.parametrize("schema", [None, dict])
async def test_acknowledging_outside_of_a_durable_subscription_is_a_clear_error(
    schema: type | None, log_path: Path
) -> None:
    async with zbus.open(log_path) as bus, bus.subscribe("**", schema=schema) as sub:
        await (await bus.publisher("a/b")).publish({"id": 1})
        event = await sub.next()
        assert event is not None

        with pytest.raises(CursorError, match="is not from a durable subscription"):
            await event.ack()


def test_events_without_headers_share_no_dict_that_can_change() -> None:
    event = Event(1, 0, 1, "a/b", b"")

    with pytest.raises(TypeError):
        event.headers["x"] = "leak"  # type: ignore[index]
    assert Event(2, 0, 1, "a/b", b"").headers == {}


def test_a_pickled_event_keeps_its_provenance() -> None:
    event = Event(1, 0, 1, "a/b", b"", provenance=Provenance(7, 3, (9,), "nats"))

    assert pickle.loads(pickle.dumps(event)).provenance == event.provenance
