"""Whatever comes off the network: an event, a beacon, a question, a reply, or a clear refusal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inside import node_of

import zbus
from zbus.errors import EventInvalid, FabricError
from zbus.mesh.log_service import LogPage, LogService, LogTold, ask_log, ask_page
from zbus.mesh.request_client import Asked, _read_failure, _read_reply, decode_asked, encode_asked, encode_reply
from zbus.wire.beacon import Beacon, decode_beacon, encode_beacon
from zbus.wire.envelope import CANCEL, encode

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

    assert not found or found.startswith(("not a beacon", "not an envelope"))


@given(st.integers(0, (1 << 62) - 1), st.binary(max_size=50))
def test_a_question_is_read_as_it_was_written(number: int, body: bytes) -> None:
    assert decode_asked(encode_asked(Asked(number, body))) == Asked(number, body)


@given(st.binary(max_size=60))
@example(b"\x92" * 50_000)
def test_anything_else_is_no_question(payload: bytes) -> None:
    found = refusal(lambda: decode_asked(payload))

    assert not found or found.startswith("not a question")


@given(st.binary(max_size=60))
@example(b"\x93\x91\xa1*\xff\x00")
def test_a_log_is_asked_nonsense_and_says_so(question: bytes) -> None:
    service = LogService(None, 1)  # type: ignore[arg-type]  # nonsense never reaches the log
    found = refusal(lambda: list(service.page(question)))

    assert found.startswith("not a question for a log")


@given(st.integers(0, 255), st.integers(0, (1 << 32) - 1), st.binary(max_size=50))
def test_a_reply_is_read_as_it_was_written(kind: int, number: int, body: bytes) -> None:
    assert _read_reply(encode_reply(kind, number, body)) == (kind, number, body)


@given(st.binary(max_size=20))
def test_anything_shorter_is_no_reply(data: bytes) -> None:
    if len(data) >= 5:
        assert encode_reply(*_read_reply(data)) == data
    else:
        with pytest.raises(FabricError, match="a reply that is none"):
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
        return await ask_page(answered(*bodies), 7, ("**",), 0, 0, 1.0)

    try:
        page = asyncio.run(ask())
    except FabricError as error:
        refused = str(error)
    else:
        refused = ""
        assert 0 <= min(page[1:]) <= max(page[1:]) < 1 << 63
    assert not refused or refused.startswith("the log 7 ")


@given(st.binary(max_size=60))
@example(b"\x95\x01\0\0\x90" + b"\x91" * 50_000)
@example(b"\x94\xff\x00\x00\x90")
@example(b"\x94\x01\x00\x00\x91\xff")
@example(b"\x94\x01\x00\xcf" + b"\xff" * 8 + b"\x90")
def test_a_node_that_says_nonsense_of_its_log_is_an_error(body: bytes) -> None:
    async def ask() -> LogTold:
        return await ask_log(answered(body), 1.0)

    try:
        told = asyncio.run(ask())
    except FabricError as error:
        refused = str(error)
    else:
        refused = ""
        numbers = (told.origin, told.head, told.low_water, *told.heard)
        assert 0 <= min(numbers) <= max(numbers) < 1 << 63
    assert not refused or "answered nonsense" in refused


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
