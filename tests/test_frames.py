"""Whatever comes off the network: an event, a beacon, a question, a reply, or a clear refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zbus
from zbus.asking import Asked, decode_asked, encode_asked
from zbus.beacon import Beacon, decode_beacon, encode_beacon
from zbus.codec import encode
from zbus.errors import EventInvalid
from zbus.logservice import LogService

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


@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(st.binary(max_size=80), beacons.map(encode_beacon)), max_size=30))
def test_nothing_that_arrives_stops_what_follows(frames: list[bytes]) -> None:
    async def receive() -> None:
        async with zbus.open(mode="embedded") as bus, bus.subscribe("**") as subscription:
            assert bus.network is not None
            receive = bus.network.inbox.receiver("test", True)
            for frame in frames:
                receive(frame, None)
            receive(encode(zbus.Event(5, 0, 1, "a/b", b"after it all")), None)
            async with asyncio.timeout(10):
                while (await anext(subscription)).payload != b"after it all":
                    pass
            assert "receive_errors" not in bus.stats()

    asyncio.run(receive())


async def test_bad_input_is_counted_and_reported_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with zbus.open() as bus, bus.subscribe("**") as subscription:
        assert bus.network is not None
        receive = bus.network.inbox.receiver("somewhere", True)
        for frame in (b"", b"\x07", b"\x01\x93\x01", b"\x01" + b"\xff" * 50, b"\x02\xdd\xff\xff\xff\xff", b"\x03\x00"):
            receive(frame, None)
        receive(encode(zbus.Event(5, 0, 1, "a/b", b"x")), None)

        assert (await anext(subscription)).payload == b"x"

        assert bus.stats()["invalid_received"] == 6
        assert [record.message.split()[0] for record in caplog.records].count("EVENT_INVALID") == 1


async def test_an_event_over_the_limit_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    async with zbus.open(payload_bytes_max=10) as bus, bus.subscribe("**") as subscription:
        assert bus.network is not None
        receive = bus.network.inbox.receiver("somewhere", True)
        receive(encode(zbus.Event(5, 0, 1, "a/b", b"x" * 11)), None)
        receive(encode(zbus.Event(5, 1, 1, "a/b", b"x" * 10)), None)

        assert (await anext(subscription)).sequence == 1
        assert bus.stats()["invalid_received"] == 1
