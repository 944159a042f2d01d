"""Whatever comes off the network: an event, a beacon, a request, a reply, or a clear refusal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inside import node_of
from mesh_fakes import rows

import zbus
from zbus.errors import EventInvalid, TransportError
from zbus.event import Provenance
from zbus.headers import encode_headers
from zbus.mesh.log_service import LogInfo, LogPage, LogService, request_log_info, request_page
from zbus.mesh.request_client import (
    RequestFrame,
    _read_failure,
    _read_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from zbus.ports.lineage import Branch
from zbus.ports.log import Row
from zbus.wire import frames as frames_module
from zbus.wire.beacon import Beacon, decode_beacon, encode_beacon
from zbus.wire.envelope import CANCEL, Envelope, encode, open_frame
from zbus.wire.frames import ENVELOPE_BYTES, FRAME_BYTES_MAX, FRAME_EVENTS_MAX, Frames, Framing, Sendable

numbers = st.integers(0, (1 << 63) - 1)
beacons = st.builds(
    Beacon,
    numbers,
    numbers,
    numbers,
    st.dictionaries(st.sampled_from(["a", "a/b", "é/.", "x/@y"]), st.tuples(numbers, numbers, numbers)),
)


def refusal(read: Callable[[], object]) -> str:
    """Why it was refused; empty if it was not."""
    try:
        read()
        return ""
    except EventInvalid as error:
        return str(error)


@given(beacons)
def test_a_beacon_is_read_as_it_was_written(beacon: Beacon) -> None:
    assert decode_beacon(encode_beacon(beacon)) == beacon


@given(st.binary(max_size=100))
@example(b"\x03" + b"\x91" * 50_000)
@example(b"\x03\x94\x01\x02\x03\x81\xa1a\x93\xff\x00\x00")  # a negative number
@example(b"\x03\x94\x01\x02\x03\x81\xa0\x93\x01\x00\x00")  # an empty key
def test_anything_else_is_no_beacon(frame: bytes) -> None:
    found = refusal(lambda: decode_beacon(frame))

    assert not found or found.startswith(("malformed beacon", "malformed envelope"))


@given(st.integers(0, (1 << 62) - 1), st.binary(max_size=50))
def test_a_request_is_read_as_it_was_written(number: int, body: bytes) -> None:
    assert decode_request(encode_request(RequestFrame(number, body))) == RequestFrame(number, body)


@given(st.binary(max_size=60))
@example(b"\x92" * 50_000)
def test_anything_else_is_not_a_request(payload: bytes) -> None:
    found = refusal(lambda: decode_request(payload))

    assert not found or found.startswith("malformed request")


@given(st.binary(max_size=60))
@example(b"\x93\x91\xa1*\xff\x00")
def test_a_log_rejects_a_malformed_request_with_a_reason(request: bytes) -> None:
    service = LogService(None, 1)  # type: ignore[arg-type]  # nonsense never reaches the log
    found = refusal(lambda: list(service.page(request)))

    assert found.startswith("malformed page request")


@given(st.integers(0, 255), st.integers(0, (1 << 32) - 1), st.binary(max_size=50))
def test_a_reply_is_read_as_it_was_written(kind: int, number: int, body: bytes) -> None:
    assert _read_reply(encode_reply(kind, number, body)) == (kind, number, body)


@given(st.binary(max_size=20))
def test_anything_shorter_is_no_reply(data: bytes) -> None:
    if len(data) >= 5:
        assert encode_reply(*_read_reply(data)) == data
    else:
        with pytest.raises(TransportError, match="malformed reply"):
            _read_reply(data)


@given(st.one_of(st.binary(max_size=60), st.tuples(st.text(), st.text()).map(msgspec.msgpack.encode)))
@example(b"\x91" * 50_000)
@example(b"\x92\xa1\xff\xa1a")  # no text
@example(b"\x93\xa1a\xa1b\xa1c")  # three of them
def test_a_failure_is_always_a_kind_and_a_reason(body: bytes) -> None:
    kind, reason = _read_failure(body)

    assert isinstance(kind, str)
    assert isinstance(reason, str)


def answered(*bodies: bytes) -> Callable[[str, bytes, float], AsyncIterator[bytes]]:
    """Somebody whose replies these are."""

    async def ask(key: str, body: bytes, timeout_s: float) -> AsyncIterator[bytes]:
        for each in bodies:
            yield each

    return ask


@given(st.lists(st.one_of(st.binary(max_size=60), st.binary(max_size=40).map(lambda rest: b"\0" + rest)), max_size=3))
@example([b"\0\x95\0\0\0\0" + b"\x91" * 50_000])  # a field of a later version, and a deep one
@example([b"\0\x93\xff\x00\x00"])  # a negative number
@example([b"\0\x93\xcf" + b"\xff" * 8 + b"\x00\x00"])  # one that no log counts up to
@example([b"\x01\x93\x01"])
def test_a_log_that_answers_nonsense_is_an_error_and_a_page_is_in_range(bodies: list[bytes]) -> None:
    async def ask() -> LogPage:
        return await request_page(answered(*bodies), 7, ("**",), 0, 0, 1.0)

    try:
        page = asyncio.run(ask())
    except TransportError as error:
        refused = str(error)
    else:
        refused = ""
        assert 0 <= min(page[1:]) <= max(page[1:]) < 1 << 63
    assert not refused or refused.startswith("log 7 ")


@given(st.binary(max_size=60))
@example(b"\x95\x01\0\0\x90" + b"\x91" * 50_000)
@example(b"\x94\xff\x00\x00\x90")
@example(b"\x94\x01\x00\x00\x91\xff")
@example(b"\x94\x01\x00\xcf" + b"\xff" * 8 + b"\x90")
def test_a_node_that_says_nonsense_of_its_log_is_an_error(body: bytes) -> None:
    async def ask() -> LogInfo:
        return await request_log_info(answered(body), 1.0)

    try:
        reported = asyncio.run(ask())
    except TransportError as error:
        refused = str(error)
    else:
        refused = ""
        numbers = (reported.origin, reported.head, reported.low_water, *reported.other_logs)
        assert 0 <= min(numbers) <= max(numbers) < 1 << 63
    assert not refused or "malformed reply" in refused


cancels = st.binary(max_size=12).map(lambda rest: bytes([CANCEL]) + rest)


@settings(max_examples=60)
@given(st.lists(st.one_of(st.binary(max_size=80), beacons.map(encode_beacon), cancels), max_size=30))
@example([bytes([CANCEL]), bytes([CANCEL]) + b"\xff" * 7, bytes([CANCEL]) + b"\xff" * 8, bytes([CANCEL]) * 50])
def test_nothing_that_arrives_stops_what_follows(frames: list[bytes]) -> None:
    async def receive() -> None:
        async with zbus.open(mode="embedded") as bus, bus.subscribe("**") as subscription:
            assert node_of(bus).network is not None
            receive = node_of(bus).network.inbox.receiver("test", True)
            for frame in frames:
                receive(frame, None)
            receive(encode(zbus.Event(5, 0, 1, "a/b", b"after it all")), None)
            async with asyncio.timeout(10):
                while (await anext(subscription)).payload != b"after it all":
                    pass
            assert "receive_errors" not in bus.stats()

    asyncio.run(receive())


async def test_bad_input_is_counted_by_reason_and_reported_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with zbus.open(payload_bytes_max=10) as bus, bus.subscribe("**") as subscription:
        assert node_of(bus).network is not None
        receive = node_of(bus).network.inbox.receiver("somewhere", True)
        bad_key = encode(zbus.Event(5, 0, 1, "a/b", b"x")).replace(b"\xa3a/b", b"\xa3a//")
        short, large = (b"\x04" + b"\x00" * 7, encode(zbus.Event(5, 0, 1, "a/b", b"x" * 11)))
        bad = (b"", b"\x07", b"\x01\x93\x01", b"\x02\xdd\xff\xff\xff\xff", b"\x03\x00", bad_key, short, large)
        for frame in bad:
            receive(frame, None)
        receive(encode(zbus.Event(5, 0, 1, "a/b", b"x")), None)

        assert (await anext(subscription)).payload == b"x"

        counted = {name: count for name, count in bus.stats().items() if name.startswith("invalid_")}
        assert counted == {
            "invalid_received": 8,
            "invalid_envelope": 3,
            "invalid_version": 1,
            "invalid_beacon": 1,
            "invalid_key": 1,
            "invalid_cancel": 1,
            "invalid_too_large": 1,
        }
        assert [record.message.split()[0] for record in caplog.records].count("EVENT_INVALID") == 1


async def test_an_event_over_the_limit_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    async with zbus.open(payload_bytes_max=10) as bus, bus.subscribe("**") as subscription:
        assert node_of(bus).network is not None
        receive = node_of(bus).network.inbox.receiver("somewhere", True)
        receive(encode(zbus.Event(5, 0, 1, "a/b", b"x" * 11)), None)
        receive(encode(zbus.Event(5, 1, 1, "a/b", b"x" * 10)), None)

        assert (await anext(subscription)).sequence == 1
        assert bus.stats()["invalid_received"] == 1


# Frames out of events.

ORIGIN, FLOOR = 3, 100


def sendable(*keys: str, first: int = 101) -> list[Sendable]:
    """One event per key; the sequence of each is its offset."""
    return [(rows([offset], key)[0], offset) for offset, key in enumerate(keys, first)]


def opened(made: Frames) -> list[list[Envelope]]:
    return [open_frame(frame) for _, frame in made.frames]


def chain(made: Frames) -> list[tuple[str, int, int]]:
    return [(each.key, each.offset, each.previous) for frame in opened(made) for each in frame]


def test_events_of_one_key_in_a_row_share_a_frame_and_the_order_is_kept() -> None:
    made = Framing(ORIGIN, FLOOR, None).make(sendable("a", "a", "b", "a", "a"))

    assert [(key, len(frame)) for (key, _), frame in zip(made.frames, opened(made), strict=True)] == [
        ("a", 2),
        ("b", 1),
        ("a", 2),
    ]
    assert [each.offset for frame in opened(made) for each in frame] == [101, 102, 103, 104, 105]
    assert {(each.origin, each.via) for frame in opened(made) for each in frame} == {(ORIGIN, ())}
    assert made.events == 5


def test_each_event_names_the_one_before_it_on_its_key() -> None:
    made = Framing(ORIGIN, FLOOR, None).make(sendable("a", "a", "b", "a", "b", "b"))

    found = [("a", 101, 100), ("a", 102, 101), ("b", 103, 100), ("a", 104, 102), ("b", 105, 103), ("b", 106, 105)]
    assert chain(made) == found
    assert made.last == {"a": 104, "b": 106}
    assert made.newest == {"a": (104, 7, 104), "b": (106, 7, 106)}


def test_the_chain_continues_after_frames_that_were_sent_and_only_then() -> None:
    framing = Framing(ORIGIN, FLOOR, None)
    first = framing.make(sendable("a", "b"))
    assert chain(framing.make(sendable("a", "b"))) == chain(first)  # it failed, and is made again

    framing.sent(first, 102)

    assert chain(framing.make(sendable("b", "a", "c", first=103))) == [
        ("b", 103, 102),
        ("a", 104, 101),
        ("c", 105, 100),
    ]


def test_a_chain_that_starts_again_names_the_position_it_starts_after() -> None:
    framing = Framing(ORIGIN, FLOOR, None)
    framing.sent(framing.make(sendable("a")), 101)

    framing.restart(200)

    assert chain(framing.make(sendable("a", first=201))) == [("a", 201, 200)]


def test_the_keys_of_a_chain_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "KEYS_MAX", 2)
    framing = Framing(ORIGIN, FLOOR, None)
    framing.sent(framing.make(sendable("a", "b")), 102)
    assert chain(framing.make(sendable("a", first=103))) == [("a", 103, 101)]

    framing.sent(framing.make(sendable("c", first=103)), 103)

    assert chain(framing.make(sendable("a", first=104))) == [("a", 104, 103)]  # as if its gap ended there


def test_a_frame_has_a_limited_number_of_events() -> None:
    made = Framing(ORIGIN, FLOOR, None).make(sendable(*["a"] * (2 * FRAME_EVENTS_MAX + 1)))

    assert [len(frame) for frame in opened(made)] == [FRAME_EVENTS_MAX, FRAME_EVENTS_MAX, 1]
    assert [previous for _, _, previous in chain(made)] == list(range(100, 100 + made.events))


@pytest.mark.parametrize(
    ("size", "frames"),
    [(FRAME_BYTES_MAX // 10, [9, 11]), (FRAME_BYTES_MAX // 3, [2] * 8 + [4]), (3 * FRAME_BYTES_MAX, [1] * 18 + [2])],
)
def test_a_frame_has_a_limited_size_unless_one_event_is_larger(size: int, frames: list[int]) -> None:
    large: list[Sendable] = [(rows([offset], "a", payload=b"x" * size)[0], offset) for offset in range(101, 119)]
    small = sendable("a", "a", first=119)

    made = Framing(ORIGIN, FLOOR, None).make([*large, *small])

    assert [len(frame) for frame in opened(made)] == frames
    assert all(len(frame) <= FRAME_BYTES_MAX or len(open_frame(frame)) == 1 for _, frame in made.frames)


@pytest.mark.parametrize(("more_bytes", "frames"), [(0, [2]), (1, [1, 1])])
def test_a_frame_may_be_as_large_as_its_limit(more_bytes: int, frames: list[int]) -> None:
    sizes = [1000, FRAME_BYTES_MAX - 1000 - 2 * ENVELOPE_BYTES + more_bytes]
    events: list[Sendable] = [(rows([at], "a", payload=b"x" * size)[0], 101 + at) for at, size in enumerate(sizes)]

    made = Framing(ORIGIN, FLOOR, None).make(events)

    assert [len(frame) for frame in opened(made)] == frames


def test_headers_count_towards_the_size_of_a_frame() -> None:
    headers = {"note": "x" * 40_000}
    encoded = encode_headers(headers, None, None)
    events: list[Sendable] = [(Row(7, offset, 1, "a", b"", encoded), offset) for offset in range(101, 111)]

    made = Framing(ORIGIN, FLOOR, None).make(events)

    assert [len(frame) for frame in opened(made)] == [3, 3, 3, 1]
    assert all(each.event().headers == headers for frame in opened(made) for each in frame)


def far(offset: int, published_at: int) -> Sendable:
    """An event of node 21 that crossed bridge 19."""
    came = Provenance(21, 4, (19,), "nats://far")
    return Row(8, offset, published_at, "a", b"x", encode_headers({"a": "b"}, None, None), came), offset


def test_a_bridge_forwards_events_of_other_nodes_with_the_nodes_that_they_crossed() -> None:
    asked: list[tuple[str, Provenance]] = []

    def forward(key: str, came: Provenance) -> tuple[int, ...] | None:
        asked.append((key, came))
        return None if len(asked) == 2 else (*came.via, came.origin)

    events = [far(101, 11), *sendable("a", first=102), far(103, 13), far(104, 12)]
    made = Framing(ORIGIN, FLOOR, forward).make([*events, *sendable("a", first=105)])

    found = [(each.offset, each.via, each.previous) for frame in opened(made) for each in frame]
    assert found == [(101, (19, 21), 100), (102, (), 101), (104, (19, 21), 102), (105, (), 104)]
    assert (made.events, made.forwarded, made.forwarded_at) == (4, 2, 12)
    assert asked == [("a", Provenance(21, 4, (19,), "nats://far"))] * 3


def test_a_node_that_is_not_a_bridge_leaves_out_events_of_other_nodes() -> None:
    made = Framing(ORIGIN, FLOOR, None).make([far(101, 11), *sendable("a", first=102)])

    assert chain(made) == [("a", 102, 100)]
    assert (made.events, made.forwarded, made.forwarded_at) == (1, 0, 0)


def test_the_topic_is_the_last_segment_of_the_key() -> None:
    made = Framing(ORIGIN, FLOOR, None).make(sendable("shop/orders/created", "orders"))

    assert [(each.key, each.topic) for frame in opened(made) for each in frame] == [
        ("shop/orders/created", "created"),
        ("orders", "orders"),
    ]


def test_nothing_makes_no_frames() -> None:
    assert Framing(ORIGIN, FLOOR, None).make([]) == Frames()


# Lineage and versions.


def test_the_first_event_of_a_frame_names_the_incarnation_of_the_log() -> None:
    framing = Framing(ORIGIN, FLOOR, None)
    framing.branch = Branch(9, 101, 7)
    made = framing.make(sendable("a", "a", "b"))

    assert [[each.branch.id for each in open_frame(frame)] for _, frame in made.frames] == [[9, 0], [9]]


class FirstEnvelope(msgspec.Struct, array_like=True):
    """An envelope as version 0.1 decodes it."""

    publisher_id: int
    sequence: int
    published_at: int
    topic: str
    payload: bytes
    key: str
    headers: msgspec.Raw
    offset: int
    origin: int = 0
    previous: int = 0
    via: tuple[int, ...] = ()


class FirstBeacon(msgspec.Struct, array_like=True):
    """A beacon as version 0.1 decodes it."""

    origin: int
    since: int
    head: int
    newest: dict[str, tuple[int, int, int]]


def test_version_0_1_reads_the_frames_of_this_version() -> None:
    framing = Framing(ORIGIN, FLOOR, None)
    framing.branch = Branch(9, 101, 7)
    (one, two) = [frame for _, frame in framing.make(sendable("a", "a", "b")).frames]

    both = msgspec.msgpack.decode(one[1:], type=list[FirstEnvelope])
    assert [(each.key, each.origin) for each in both] == [("a", ORIGIN), ("a", ORIGIN)]
    assert msgspec.msgpack.decode(two[1:], type=FirstEnvelope).key == "b"
    beacon = encode_beacon(Beacon(3, 0, 7, {"a": (7, 1, 0)}, Branch(9, 101, 7), b"digest"))
    assert msgspec.msgpack.decode(beacon[1:], type=FirstBeacon).head == 7


def test_a_digest_that_is_too_long_is_malformed() -> None:
    with pytest.raises(EventInvalid, match="digest"):
        decode_beacon(encode_beacon(Beacon(3, 0, 7, {}, Branch(9, 1, 9), bytes(33))))
