"""Dynamo's envelope and ZMQ frames: byte for byte, and nothing else is accepted."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mesh_fakes import recorded

from zbus.errors import EventInvalid, KeyInvalid
from zbus.event import Event
from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_INPUT_REJECTED
from zbus.wire import envelope as codec
from zbus_dynamo import envelope, frames
from zbus_dynamo.refusal import NotDynamo, code_of
from zbus_dynamo.translate import outgoing

GOLDEN = bytes.fromhex(
    "85ac7075626c69736865725f6964cd3039a873657175656e63652aac7075626c69736865645f6174cf0000018bcfe56800"
    "a5746f706963aa746573742d746f706963a77061796c6f6164c40c74657374207061796c6f6164"
)
FIELDS = {"publisher_id": 1, "sequence": 2, "published_at": 3, "topic": "t", "payload": b"p"}
pack_any = msgspec.msgpack.encode


def packed_frames(topic: bytes, publisher_id: int, sequence: int, body: bytes) -> list[bytes]:
    return list(frames.split(topic, frames.pack(publisher_id, sequence, body)))


def test_the_envelope_is_the_golden_one_byte_for_byte() -> None:
    written = envelope.encode(12345, 42, 1_700_000_000_000 * 1_000_000, "test-topic", b"test payload")

    assert written == GOLDEN
    assert len(written) == 88


def test_the_golden_envelope_is_read() -> None:
    event = envelope.decode(GOLDEN).event("ns/test-topic")

    assert event == Event(12345, 42, 1_700_000_000_000_000_000, "ns/test-topic", b"test payload")


def test_the_frames_are_the_golden_ones_byte_for_byte() -> None:
    packed = packed_frames(b"test-topic", 12345, 42, GOLDEN)

    assert packed == [
        b"test-topic",
        bytes.fromhex("0000000000003039"),
        bytes.fromhex("000000000000002a"),
        bytes.fromhex("0100000058") + GOLDEN,
    ]
    assert frames.unpack(packed) == (b"test-topic", envelope.decode(GOLDEN))


def test_times_are_cut_to_the_millisecond() -> None:
    found = envelope.decode(envelope.encode(1, 0, 1_999_999, "t", b""))

    assert found.event("a/t").published_at == 1_000_000


def test_keys_of_a_later_version_are_ignored_and_the_order_of_the_keys_does_not_matter() -> None:
    later = dict(reversed(FIELDS.items())) | {"trace": {"deep": [1, 2]}, "zeta": None}

    assert envelope.decode(pack_any(later)) == envelope.DynamoEnvelope(1, 2, 3, "t", b"p")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"payload": [1, 2, 3]}, "bytes"),
        ({"payload": "text"}, "bytes"),
        ({"topic": 5}, "str"),
        ({"topic": b"t"}, "str"),
        ({"sequence": -1}, "negative"),
        ({"sequence": 1.0}, "int"),
        ({"publisher_id": 1 << 63}, "63 bits"),
        ({"published_at": 1 << 62}, "2262"),
        ({"published_at": None}, "int"),
    ],
)
def test_a_wrong_field_is_refused_with_the_reason(changed: dict[str, object], reason: str) -> None:
    with pytest.raises(EventInvalid, match=reason):
        envelope.decode(pack_any(FIELDS | changed))


@pytest.mark.parametrize("missing", list(FIELDS))
def test_a_missing_field_is_refused(missing: str) -> None:
    with pytest.raises(EventInvalid, match=missing):
        envelope.decode(pack_any({name: value for name, value in FIELDS.items() if name != missing}))


def test_every_truncation_and_any_trailing_byte_is_refused() -> None:
    for cut in range(len(GOLDEN)):
        with pytest.raises(EventInvalid):
            envelope.decode(GOLDEN[:cut])
    with pytest.raises(EventInvalid):
        envelope.decode(GOLDEN + b"\0")


@given(st.binary(max_size=200))
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x81" * 5000)
def test_no_bytes_at_all_crash_the_decoder_of_envelopes(data: bytes) -> None:
    try:
        found = envelope.decode(data)
    except EventInvalid:
        return
    assert found.event("a/b").published_at >= 0


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=8) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.fixed_dictionaries(dict.fromkeys(FIELDS, json_like)))
def test_whatever_the_fields_hold_it_is_an_event_or_refused(fields: dict[str, object]) -> None:
    try:
        found = envelope.decode(pack_any(fields))
    except EventInvalid:
        return
    assert codec.decode(codec.encode(found.event("a/b"))).payload == found.payload


@given(
    st.integers(0, (1 << 63) - 1),
    st.integers(0, (1 << 63) - 1),
    st.integers(0, (1 << 63) - 1),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.binary(max_size=100),
)
def test_what_is_packed_is_unpacked_the_same(publisher: int, sequence: int, at: int, topic: str, body: bytes) -> None:
    packed = packed_frames(b"x", publisher, sequence, envelope.encode(publisher, sequence, at, topic, body))

    _, found = frames.unpack(packed)

    assert found == envelope.DynamoEnvelope(publisher, sequence, at // 1_000_000, topic, body)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ([], "0 frames"),
        (packed_frames(b"t", 12345, 42, GOLDEN)[:3], "3 frames"),
        ([*packed_frames(b"t", 12345, 42, GOLDEN), b""], "5 frames"),
        ([b"t", b"\0" * 7, b"\0" * 8, b"\1\0\0\0\0"], "8 bytes"),
        ([b"t", b"\0" * 8, b"\0" * 9, b"\1\0\0\0\0"], "8 bytes"),
        ([b"t", b"\0" * 8, b"\0" * 8, b"\1\0\0\0"], "no header"),
        ([b"t", b"\0" * 8, b"\0" * 8, b"\2\0\0\0\0"], "version 2"),
        ([b"t", b"\0" * 8, b"\0" * 8, b"\1\0\0\0\5abcd"], "5 bytes announced, 4"),
        ([b"t", b"\0" * 8, b"\0" * 8, b"\1\0\0\0\3abcd"], "3 bytes announced, 4"),
        (packed_frames(b"t", 12346, 42, GOLDEN), "different events"),
        (packed_frames(b"t", 12345, 43, GOLDEN), "different events"),
    ],
)
def test_any_other_count_length_version_or_id_is_refused(message: list[bytes], reason: str) -> None:
    with pytest.raises(EventInvalid, match=reason):
        frames.unpack(message)


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_no_frames_at_all_crash_the_decoder_of_messages(message: list[bytes]) -> None:
    with pytest.raises(EventInvalid):
        frames.unpack(message)


def test_an_event_with_headers_goes_without_them_and_that_is_counted_and_recorded() -> None:
    counts = Counters("test")
    plain = codec.encode(Event(1, 0, 0, "ns/c/t", b"a", {"content-type": "text/plain"}))
    traced = codec.encode(Event(1, 1, 0, "ns/c/t", b"b", {"traceparent": "00-1"}))

    with recorded() as records:
        sent = list(outgoing([("ns/c/t", plain), ("ns/c/t", traced)], counts))

    assert [envelope.decode(each.body).payload for each in sent] == [b"a", b"b"]
    assert counts.snapshot() == {"headers_dropped": 1}
    assert [(each["record"], each["code"]) for each in records] == [("EVENT_CHANGED", "headers_dropped")]


def test_a_key_of_five_segments_is_refused_and_counted_and_the_rest_goes_on() -> None:
    counts = Counters("test")
    given = [(key, codec.encode(Event(1, n, 0, key, b""))) for n, key in enumerate(("a/b/c/d/e", "alone", "ns/t"))]

    assert [each.place.key for each in outgoing(given, counts)] == ["ns/t"]
    assert counts.snapshot() == {"key_rejected": 2}


def test_a_frame_of_many_events_becomes_as_many_envelopes_in_order() -> None:
    many = codec.join([codec.encode(Event(9, n, 0, "ns/t", b"%d" % n)) for n in range(5)])

    assert [each.sequence for each in outgoing([("ns/t", many)], Counters("test"))] == [0, 1, 2, 3, 4]


def test_a_flood_of_one_kind_is_reported_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    counts = Counters("test")

    for _ in range(500):
        counts.report(TRANSPORT_INPUT_REJECTED, "invalid_received", "tcp://127.0.0.1:1", detail="rubbish")

    assert counts.snapshot() == {"invalid_received": 500}
    assert len([each for each in caplog.records if "invalid_received" in each.getMessage()]) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotDynamo("topic_mismatch", "two topics"), "topic_mismatch"),
        (KeyInvalid("a//b", "it has an empty segment"), "invalid_key"),
        (EventInvalid("anything else"), "invalid_message"),
    ],
)
def test_a_rejected_message_is_counted_by_the_kind_of_its_error(error: Exception, code: str) -> None:
    assert code_of(error) == code
