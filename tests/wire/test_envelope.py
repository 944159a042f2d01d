"""The envelope: its bytes are a promise to other versions and other languages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zbus import Event, EventInvalid, KeyInvalid
from zbus.keys import check_key
from zbus.wire.envelope import MANY, decode, encode, join, open_frame
from zbus.wire.envelope import ONE as VERSION

EVENT = Event(
    0x1FFFFFFFFFFFFF,
    7,
    1_700_000_000_000_000_000,
    "shop/orders/created",
    b'{"id":1}',
    {"content-type": "application/json"},
    42,
)
# Version 1, for ever: a reader of today must read what a writer of today left behind.
GOLDEN = bytes.fromhex(
    "01"  # the version
    "98"  # an array of 8
    "cf001fffffffffffff"  # publisher_id, 53 bits
    "07"  # sequence
    "cf17979cfe362a0000"  # published_at, ns
    "a763726561746564"  # topic: created
    "c4087b226964223a317d"  # payload, as binary
    "b373686f702f6f72646572732f63726561746564"  # key
    "81ac636f6e74656e742d74797065b06170706c69636174696f6e2f6a736f6e"  # headers
    "2a"  # offset
)


def is_key(text: str) -> bool:
    try:
        return bool(check_key(text))
    except KeyInvalid:
        return False


numbers = st.integers(0, (1 << 63) - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
events = st.builds(
    Event,
    numbers,
    numbers,
    numbers,
    st.lists(st.text("abé.%>@", min_size=1, max_size=4), min_size=1, max_size=4).map("/".join).filter(is_key),
    st.binary(max_size=200),
    st.dictionaries(texts, texts, max_size=4),
    numbers,
)


def fields(**changed: Any) -> list[Any]:
    """The fields of `EVENT` as any msgpack library would write them, some of them changed."""
    named = {
        "publisher_id": EVENT.publisher_id,
        "sequence": EVENT.sequence,
        "published_at": EVENT.published_at,
        "topic": EVENT.topic,
        "payload": EVENT.payload,
        "key": EVENT.key,
        "headers": dict(EVENT.headers),
        "offset": EVENT.offset,
    }
    assert changed.keys() <= named.keys()
    return list((named | changed).values())


def envelope(values: Any) -> bytes:
    return bytes([VERSION]) + msgspec.msgpack.encode(values)


@settings(deadline=None)
@given(events)
def test_an_event_comes_back_equal_from_its_envelope(event: Event) -> None:
    assert decode(encode(event)) == event


def test_the_bytes_of_version_1_never_change() -> None:
    assert encode(EVENT) == GOLDEN
    assert decode(GOLDEN) == EVENT


@given(events)
def test_any_msgpack_reader_finds_the_five_fields_of_every_event_plane_first(event: Event) -> None:
    version, rest = encode(event)[0], msgspec.msgpack.decode(encode(event)[1:])

    assert version == 1
    assert rest[:5] == [event.publisher_id, event.sequence, event.published_at, event.topic, event.payload]
    assert rest[5:] == [event.key, dict(event.headers), event.offset]


def test_further_fields_at_the_end_are_accepted_so_that_later_versions_can_add_some() -> None:
    assert decode(envelope([*fields(), 3, 41, [5], [7, 1, 7], "later", {"more": [1, None]}])) == EVENT


def test_an_envelope_is_read_from_any_buffer() -> None:
    assert decode(bytearray(GOLDEN)) == EVENT  # type: ignore[arg-type]
    assert decode(memoryview(GOLDEN)) == EVENT  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [version for version in range(256) if version not in (VERSION, MANY)])
def test_another_version_is_refused_and_named(version: int) -> None:
    with pytest.raises(EventInvalid, match=f"version 1: its first byte is {version}$"):
        decode(bytes([version]) + GOLDEN[1:])


def test_an_envelope_says_which_log_it_is_from_and_what_came_before_it_there() -> None:
    (found,) = open_frame(encode(EVENT, 3, 41, (5, 9)))

    assert (found.origin, found.previous, found.via, found.offset) == (3, 41, (5, 9), 42)
    assert decode(encode(EVENT, 3, 41, (5, 9))) == EVENT


@given(st.lists(events, min_size=1, max_size=20))
def test_envelopes_that_share_a_frame_are_the_same_as_alone(several: list[Event]) -> None:
    frames = [encode(event, 3, 1) for event in several]

    assert open_frame(join(frames)) == [open_frame(frame)[0] for frame in frames]


def test_of_several_keys_that_could_not_be_published_the_first_one_is_named() -> None:
    keys = [f"no//{number}" for number in range(20)]
    with pytest.raises(EventInvalid, match=f"key '{keys[0]}' rejected"):
        open_frame(join([encode(msgspec.structs.replace(EVENT, key=key)) for key in keys]))


def test_nothing_at_all_is_refused() -> None:
    with pytest.raises(EventInvalid, match="it is empty"):
        decode(b"")


@pytest.mark.parametrize("size", range(len(GOLDEN)))
def test_an_envelope_that_was_cut_short_is_refused(size: int) -> None:
    with pytest.raises(EventInvalid):
        decode(GOLDEN[:size])


def test_bytes_after_the_envelope_are_refused() -> None:
    with pytest.raises(EventInvalid):
        decode(GOLDEN + b"\x00")


@pytest.mark.parametrize("field", ["publisher_id", "sequence", "published_at", "offset"])
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (-1, ">= 0"),
        (-(1 << 63), ">= 0"),
        (1 << 63, "malformed envelope"),
        ((1 << 64) - 1, "malformed envelope"),
        (1.5, "int"),
        ("1", "int"),
        (None, "int"),
    ],
)
def test_a_number_that_no_log_could_hold_is_refused(field: str, number: Any, reason: str) -> None:
    with pytest.raises(EventInvalid, match=reason):
        decode(envelope(fields(**{field: number})))


@pytest.mark.parametrize("field", ["publisher_id", "sequence", "published_at", "offset"])
def test_the_largest_number_of_63_bits_is_accepted(field: str) -> None:
    event = decode(envelope(fields(**{field: (1 << 63) - 1})))

    assert getattr(event, field) == (1 << 63) - 1


@pytest.mark.parametrize("key", ["", "a/*", "a/**", "$SYS", "@zbus/a", "a b", "a//b", "a\x00", "a" * 2000, 5, None])
def test_a_key_that_could_not_be_published_is_refused_from_the_wire_too(key: Any) -> None:
    with pytest.raises(EventInvalid):
        decode(envelope(fields(key=key)))


@pytest.mark.parametrize(
    "changed",
    [
        {"payload": "text"},
        {"payload": None},
        {"topic": 5},
        {"headers": []},
        {"headers": {"a": 1}},
        {"headers": {1: "a"}},
    ],
    ids=str,
)
def test_a_field_of_another_type_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(EventInvalid):
        decode(envelope(fields(**changed)))


@pytest.mark.parametrize("values", [[], fields()[:5], fields()[:7], {"key": "a"}, "text", 7, None], ids=str)
def test_something_else_than_the_eight_fields_is_refused(values: Any) -> None:
    with pytest.raises(EventInvalid):
        decode(envelope(values))


@pytest.mark.parametrize("field", ["topic", "key", "headers"])
def test_text_that_is_not_utf_8_is_refused(field: str) -> None:
    marked = fields(**{field: {"a": "MARK"} if field == "headers" else "MARK"})

    with pytest.raises(EventInvalid):
        decode(envelope(marked).replace(b"MARK", b"\xff\xfe\xc0\x80"))


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(EventInvalid):
        decode(envelope(fields())[:1] + b"\x99" + envelope(fields())[2:] + b"\x91" * 100_000 + b"\x00")


def assert_event_or_invalid(data: bytes) -> None:
    try:
        event = decode(data)
    except EventInvalid:
        return
    assert decode(encode(event)) == event


@settings(deadline=None, max_examples=500)
@given(st.binary(max_size=100))
def test_random_bytes_are_an_event_or_refused_and_nothing_else(data: bytes) -> None:
    assert_event_or_invalid(data)
    assert_event_or_invalid(bytes([VERSION]) + data)
    assert_event_or_invalid(bytes([VERSION, 0x98]) + data)


@settings(deadline=None, max_examples=1000)
@given(st.lists(st.tuples(st.integers(0, len(GOLDEN) - 1), st.integers(0, 255)), min_size=1, max_size=3))
@example([(24, 0xFF)])
def test_a_damaged_envelope_is_an_event_or_refused_and_nothing_else(damage: list[tuple[int, int]]) -> None:
    damaged = bytearray(GOLDEN)
    for at, value in damage:
        damaged[at] = value

    assert_event_or_invalid(bytes(damaged))
