"""Large messages in parts: whole or not at all, in bounded memory."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbus.observe.counters import Counters
from zbus_nats import parts
from zbus_nats.parts import PART_HEADERS_BYTES_MAX, Assembler, publish

MAX_PAYLOAD = 1_000


def messages(commands: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Header block and payload of each command, as the far end gets them."""
    found = []
    for command in commands:
        line, _, rest = command.partition(b"\r\n")
        sizes = re.fullmatch(rb"HPUB a  (\d+) (\d+)", line)
        assert sizes, line
        headers, total = int(sizes[1]), int(sizes[2])
        assert total <= MAX_PAYLOAD
        assert len(rest) == total + 2
        found.append((rest[:headers], rest[headers:total]))
    return found


def assembler(bytes_max: int = 100_000) -> tuple[Assembler, Counters]:
    counts = Counters("nats")
    return Assembler(bytes_max, counts), counts


@given(size=st.integers(MAX_PAYLOAD + 1, 20 * MAX_PAYLOAD))
def test_a_large_message_comes_out_whole(size: int) -> None:
    data = bytes(number % 251 for number in range(size))
    built, counts = assembler()

    out = [built.take(b"a", *each) for each in messages(publish(b"a", data, MAX_PAYLOAD))]

    assert out == [None] * (len(out) - 1) + [data]
    assert built.held_bytes == 0
    assert counts.snapshot() == {}


def test_one_without_its_middle_never_comes_out_and_is_counted() -> None:
    built, counts = assembler()
    several = messages(publish(b"a", bytes(5_000), MAX_PAYLOAD))
    del several[2]

    assert [built.take(b"a", *each) for each in several] == [None] * len(several)
    assert counts.snapshot()["frame_incomplete"] >= 1
    assert built.held_bytes == 0


def test_messages_that_never_end_do_not_fill_the_memory() -> None:
    built, counts = assembler(bytes_max=10_000)

    for _ in range(100):
        for each in messages(publish(b"a", bytes(5_000), MAX_PAYLOAD))[:-1]:
            built.take(b"a", *each)
        assert built.held_bytes <= 10_000

    assert counts.snapshot()["frame_incomplete"] >= 90


def test_a_message_that_stopped_coming_is_let_go_when_another_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "UNFINISHED_S", 0.2)
    built, counts = assembler()
    built.take(b"a", *messages(publish(b"a", bytes(5_000), MAX_PAYLOAD))[0])
    time.sleep(0.3)  # its time passes

    built.take(b"a", *messages(publish(b"a", bytes(5_000), MAX_PAYLOAD))[0])

    assert counts.snapshot() == {"frame_incomplete": 1}


@given(
    value=st.one_of(
        st.binary(max_size=60),
        st.tuples(*[st.integers(-1, 10**13)] * 3).map(lambda numbers: b"0123456789abcdef %d %d %d" % numbers),
    ),
    data=st.binary(max_size=50),
)
def test_any_header_is_survived(value: bytes, data: bytes) -> None:
    built, _ = assembler()

    built.take(b"a", b"NATS/1.0\r\nZbus-Part: %b\r\n\r\n" % value, data)

    assert built.held_bytes <= 100_000


def test_a_message_that_lies_about_its_size_is_refused() -> None:
    built, counts = assembler()
    start = b"NATS/1.0\r\nZbus-Part: 0123456789abcdef %d 2 %d\r\n\r\n"

    assert built.take(b"a", start % (0, 10), bytes(11)) is None
    assert built.take(b"a", start % (1, 10), b"x") is None
    assert counts.snapshot()["frame_incomplete"] >= 1
    assert built.take(b"a", start % (0, 10**11), b"x") is None
    assert counts.snapshot()["part_rejected"] == 1


def test_the_headers_of_a_part_fit_the_room_left_for_them() -> None:
    longest = messages(publish(b"a", bytes(MAX_PAYLOAD * 900), MAX_PAYLOAD))

    assert max(len(headers) for headers, _ in longest) <= PART_HEADERS_BYTES_MAX
