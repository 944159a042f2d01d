"""Payloads and headers: what users hand in, what they get back, and what is refused before it costs anything."""

from __future__ import annotations

import dataclasses
import pickle
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zbus
from zbus import Event, EventInvalid, EventTooLarge, PayloadInvalid
from zbus.headers import HEADERS_BYTES_MAX, decode_headers, encode_headers
from zbus.payload import encode_payload

LIMIT = 8 * 1024 * 1024


class Order(pydantic.BaseModel):
    id: int
    note: str = ""


@dataclasses.dataclass
class Parcel:
    id: int
    stops: list[str]


class Reading(msgspec.Struct):
    id: int
    celsius: float | None = None


def event_of(payload: Any, **headers: str) -> Event:
    body, kind = encode_payload(payload, LIMIT)
    return Event(1, 0, 5, "shop/orders/created", body, decode_headers(encode_headers(headers, None, kind)), 9)


@contextmanager
def few_bytes_allocated(allowed_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < allowed_bytes, f"{peak:,} bytes were allocated"


# Out and in again.


@pytest.mark.parametrize(
    "payload", [b"\x00\xff", bytearray(b"\x00\xff"), memoryview(b"\x00\xff")], ids=["bytes", "bytearray", "memoryview"]
)
def test_bytes_travel_as_they_are_without_a_content_type(payload: Any) -> None:
    event = event_of(payload)

    assert event.payload == b"\x00\xff"
    assert type(event.payload) is bytes
    assert event.content_type is None
    assert event.decode() == event.decode(bytes) == b"\x00\xff"


def test_a_buffer_that_changes_after_the_call_does_not_change_the_event() -> None:
    buffer = bytearray(b"before")
    through_bytearray, through_memoryview = event_of(buffer), event_of(memoryview(buffer))

    buffer[:] = b"after!"

    assert through_bytearray.payload == through_memoryview.payload == b"before"


def test_a_memoryview_with_steps_and_wide_items_travels_as_its_bytes() -> None:
    assert event_of(memoryview(b"abcdef")[::2]).payload == b"ace"
    assert event_of(memoryview(bytes(8)).cast("I")).payload == bytes(8)


@pytest.mark.parametrize("text", ["", "plain", "ünïcödé ☃ 🚀"])
def test_text_travels_as_utf_8(text: str) -> None:
    event = event_of(text)

    assert event.payload == text.encode()
    assert event.content_type == "text/plain"
    assert event.decode() == event.decode(str) == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.lists(json_values, max_size=3) | st.dictionaries(st.text("ab", max_size=3), json_values, max_size=3))
def test_dicts_and_lists_come_back_equal(value: Any) -> None:
    event = event_of(value)

    assert event.content_type == "application/json"
    assert event.decode() == event.decode(type(value)) == value


@pytest.mark.parametrize(
    "value",
    [Order(id=1, note="é"), Parcel(1, ["a", "b"]), Reading(1, 20.5)],
    ids=["pydantic", "dataclass", "msgspec"],
)
def test_a_typed_value_comes_back_equal_as_its_type(value: Any) -> None:
    event = event_of(value)

    assert event.content_type == "application/json"
    assert event.decode(type(value)) == value
    assert event.decode(dict)["id"] == 1
    assert event.decode()["id"] == 1


@pytest.mark.parametrize("type_", [Order, Reading], ids=["pydantic", "msgspec"])
def test_plain_bytes_that_hold_json_decode_to_the_type_requested(type_: Any) -> None:
    assert Event(1, 0, 5, "a", b'{"id": 3}').decode(type_) == type_(id=3)


def test_containers_of_typed_values_decode() -> None:
    event = event_of([{"id": 1}, {"id": 2}])

    assert event.decode(list[Reading]) == [Reading(1), Reading(2)]
    assert event.decode(list[dict[str, int]]) == [{"id": 1}, {"id": 2}]


# Refused on the way in.


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_over_the_limit_are_refused_before_they_are_copied(kind: Any) -> None:
    payload = kind(bytes(LIMIT + 1))

    with few_bytes_allocated(100_000), pytest.raises(EventTooLarge) as caught:
        encode_payload(payload, LIMIT)

    assert (caught.value.what, caught.value.size_bytes, caught.value.limit_bytes) == ("payload", LIMIT + 1, LIMIT)


def test_the_size_of_a_memoryview_is_its_bytes_and_not_its_items() -> None:
    wide = memoryview(bytes(LIMIT + 8)).cast("Q")

    with few_bytes_allocated(100_000), pytest.raises(EventTooLarge) as caught:
        encode_payload(wide, LIMIT)

    assert caught.value.size_bytes == LIMIT + 8


def test_text_over_the_limit_is_refused_before_it_is_encoded() -> None:
    text = "x" * (LIMIT + 1)

    with few_bytes_allocated(100_000), pytest.raises(EventTooLarge):
        encode_payload(text, LIMIT)


def test_the_limit_counts_encoded_bytes() -> None:
    with pytest.raises(EventTooLarge) as text:
        encode_payload("€" * 4, 10)
    with pytest.raises(EventTooLarge) as value:
        encode_payload({"a": "x" * 10}, 10)

    assert text.value.size_bytes == 12
    assert value.value.size_bytes == len('{"a":"xxxxxxxxxx"}')


@pytest.mark.parametrize("payload", [b"x" * 10, "x" * 10, ["x" * 6]], ids=["bytes", "str", "list"])
def test_a_payload_of_exactly_the_limit_is_accepted(payload: Any) -> None:
    assert len(encode_payload(payload, 10)[0]) == 10


@pytest.mark.parametrize(
    "payload",
    [object(), {"a": object()}, lambda: None, {(1, 2): 3}, 1j, "\ud800", {"a": "\ud800"}],
    ids=lambda x: ascii(x)[:20],
)
def test_what_cannot_be_encoded_is_refused_and_nothing_is_stored(payload: Any) -> None:
    with pytest.raises(PayloadInvalid, match="not stored") as caught:
        encode_payload(payload, LIMIT)

    assert caught.value.event is None


def test_a_value_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)

    with pytest.raises(PayloadInvalid):
        encode_payload(endless, LIMIT)


async def test_a_bus_refuses_a_payload_over_its_own_limit_and_goes_on() -> None:
    async with zbus.open(payload_bytes_max=4) as bus:
        publisher = await bus.publisher("a/b")
        async with bus.subscribe("**") as sub:
            with pytest.raises(EventTooLarge):
                await publisher.publish(b"12345")
            await publisher.publish(b"1234")

            event = await sub.next()

    assert event is not None
    assert (event.payload, event.sequence) == (b"1234", 0)


# Refused on the way out.


@pytest.mark.parametrize(
    ("payload", "type_"),
    [
        ({"id": "x"}, Order),
        ({}, Order),
        ({"id": 1}, Parcel),
        ([1], Reading),
        ([1], dict),
        ({"a": 1}, list),
        (b"not json", Reading),
        (b"not json", Order),
        (b"\xff", str),
        (b"", dict),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_a_payload_of_another_type_is_an_error_that_carries_the_event(payload: Any, type_: Any) -> None:
    event = event_of(payload)

    with pytest.raises(PayloadInvalid) as caught:
        event.decode(type_)

    assert caught.value.event is event
    assert "offset 9 on 'shop/orders/created'" in str(caught.value)
    assert type_.__name__ in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).event == event


async def test_a_reader_with_a_schema_gets_the_event_that_does_not_fit_in_the_error_and_goes_on() -> None:
    async with zbus.open() as bus, bus.subscribe("**", schema=Order) as sub:
        publisher = await bus.publisher("a/b")
        await publisher.publish({"id": "x"})
        await publisher.publish({"id": 2})

        with pytest.raises(PayloadInvalid) as caught:
            await sub.next()
        event = await sub.next()

    assert caught.value.event is not None
    assert caught.value.event.payload == b'{"id":"x"}'
    assert event is not None
    assert event.decode() == Order(id=2)


# Headers.


def test_headers_come_back_with_the_content_type_and_the_correlation_id() -> None:
    encoded = encode_headers({"traceparent": "00-ab-cd-01", "x-own": "ü"}, "c-1", "application/json")

    assert decode_headers(encoded) == {
        "content-type": "application/json",
        "correlation-id": "c-1",
        "traceparent": "00-ab-cd-01",
        "x-own": "ü",
    }


def test_no_headers_are_stored_as_nothing() -> None:
    assert encode_headers(None, None, None) is None
    assert encode_headers({}, None, None) is None
    assert decode_headers(None) == {}


def test_headers_that_are_given_win_over_those_of_zbus() -> None:
    encoded = encode_headers({"content-type": "image/png", "correlation-id": "mine"}, "mine", "application/json")

    assert decode_headers(encoded) == {"content-type": "image/png", "correlation-id": "mine"}


def test_an_empty_correlation_id_is_one() -> None:
    assert decode_headers(encode_headers(None, "", None)) == {"correlation-id": ""}


@pytest.mark.parametrize(
    "name", ["", "Upper", "with space", "a:b", "a\n", "é", "x" * 129, 5, None, b"a"], ids=lambda name: repr(name)[:12]
)
def test_a_header_name_that_not_every_transport_has_is_refused(name: Any) -> None:
    with pytest.raises(EventInvalid, match=r"header name .* not stored"):
        encode_headers({name: "value"}, None, None)


@pytest.mark.parametrize("value", ["a\r\nb: c", "\x00", "\x7f", 5, None, b"a", "\ud800"], ids=ascii)
def test_a_header_value_that_is_not_plain_text_is_refused(value: Any) -> None:
    with pytest.raises(EventInvalid, match="not stored"):
        encode_headers({"a": value}, None, None)


@pytest.mark.parametrize("correlation_id", ["a\nb", 5, b"a"], ids=repr)
def test_a_correlation_id_is_plain_text(correlation_id: Any) -> None:
    with pytest.raises(EventInvalid, match="correlation-id"):
        encode_headers(None, correlation_id, None)


@pytest.mark.parametrize("headers", [["a"], "ab", 5, [("a", "b", "c")]], ids=repr)
def test_headers_that_are_no_mapping_are_refused(headers: Any) -> None:
    with pytest.raises(EventInvalid):
        encode_headers(headers, None, None)


def test_headers_over_the_limit_are_refused() -> None:
    with pytest.raises(EventTooLarge) as caught:
        encode_headers({"a": "x" * HEADERS_BYTES_MAX}, None, None)

    assert caught.value.what == "headers"
    assert caught.value.limit_bytes == HEADERS_BYTES_MAX


async def test_a_correlation_id_and_headers_reach_the_subscriber() -> None:
    async with zbus.open() as bus, bus.subscribe("**") as sub:
        publisher = await bus.publisher("a/b")
        await publisher.publish({"id": 1}, headers={"x-own": "1"}, correlation_id="c-1")
        await publisher.publish_many([b"x"], correlation_id="c-2")

        first, second = await sub.next(), await sub.next()

    assert first is not None
    assert second is not None
    assert (first.correlation_id, first.content_type, first.headers["x-own"]) == ("c-1", "application/json", "1")
    assert (second.correlation_id, second.content_type) == ("c-2", None)


class _Item(pydantic.BaseModel):
    id: int


def test_models_inside_lists_and_dicts_go_out_and_come_in_as_models() -> None:
    body, content_type = encode_payload({"items": [_Item(id=1)]}, 1000)
    event = Event(1, 0, 1, "a/b", body, {"content-type": content_type or ""})

    assert event.decode(dict[str, list[_Item]]) == {"items": [_Item(id=1)]}


def test_a_payload_of_another_type_is_said_to_be_no_valid_one() -> None:
    with pytest.raises(PayloadInvalid, match="the payload is not a valid int"):
        event_of("five").decode(int)
