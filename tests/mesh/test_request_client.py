"""An answer is complete, in order and counted, or it is an error: whatever the fabric does to its replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbus.errors import HandlerFailed, NoResponders, RequestTimeout, TransportError
from zbus.mesh.request_client import ACCEPTED, CANCELS, DATA, END, FAILED, RequestClient, encode_failure, encode_reply
from zbus.ports.fabric import OnReply
from zbus.util.runtime import Runtime
from zbus.wire.envelope import CANCEL

WHOLE = [
    encode_reply(ACCEPTED, 0),
    *[encode_reply(DATA, number, b"%d" % number) for number in range(3)],
    encode_reply(END, 3),
    None,
]
BODIES = [b"0", b"1", b"2"]


class Replying:
    """A fabric on which somebody answers with these replies; None ends them."""

    name, events_only = "replying", False

    def __init__(self, replies: Sequence[bytes | None]) -> None:
        self._replies = replies
        self.sent: list[tuple[str, bytes]] = []
        self.closed = 0

    def request(self, key: str, payload: bytes, on_reply: OnReply, timeout_s: float) -> Any:
        for reply in self._replies:
            on_reply(reply)
        return self

    def send(self, frames: Sequence[tuple[str, bytes]]) -> None:
        self.sent += frames

    def close(self) -> None:
        self.closed += 1


def run(call: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    """As a bus does, but at once."""
    done = asyncio.get_running_loop().create_future()
    done.set_result(call(*args))
    return done


async def ask(*fabrics: Replying, timeout_s: float = 5.0) -> list[bytes]:
    client = RequestClient(lambda: fabrics, run, Runtime())  # type: ignore[arg-type]
    return [body async for body in client.request("prices/quote", b"", timeout_s)]


def without(*places: int) -> list[bytes | None]:
    return [reply for at, reply in enumerate(WHOLE) if at not in places]


@contextmanager
def sent_to_the_other_end(fabric: Replying, reported: bool = True) -> Iterator[None]:
    """The responder is notified that the requester is gone, unless it had ended by itself."""
    yield
    assert [(key, frame[0], len(frame)) for key, frame in fabric.sent] == ([(CANCELS, CANCEL, 9)] if reported else [])
    assert fabric.closed == 1


async def test_an_answer_that_came_whole_is_handed_over_in_order() -> None:
    fabric = Replying(WHOLE)
    with sent_to_the_other_end(fabric, False):
        assert await ask(fabric) == BODIES


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_a_reply_that_is_lost_is_an_error(lost: int) -> None:
    fabric = Replying(without(lost))
    with (
        sent_to_the_other_end(fabric),
        pytest.raises(TransportError, match=f"are missing: {lost - 1} came before number"),
    ):
        await ask(fabric)


async def test_an_answer_whose_end_is_lost_is_an_error() -> None:
    fabric = Replying(without(4))
    with sent_to_the_other_end(fabric, False), pytest.raises(TransportError, match="ended early, after 3;"):
        await ask(fabric)


async def test_a_response_that_ends_before_its_first_reply_is_an_error_and_not_no_responders() -> None:
    with pytest.raises(TransportError, match="ended early, after 0;"):
        await ask(Replying([WHOLE[0], None]))


async def test_an_answer_whose_end_counts_more_than_came_is_an_error() -> None:
    with pytest.raises(TransportError, match="are missing: 3 came before number 4"):
        await ask(Replying([*WHOLE[:4], encode_reply(END, 4), None]))


async def test_replies_out_of_order_are_an_error() -> None:
    fabric = Replying([WHOLE[at] for at in (0, 2, 1, 3, 4, 5)])
    with sent_to_the_other_end(fabric), pytest.raises(TransportError, match="are missing: 0 came before number 1"):
        await ask(fabric)


async def test_a_reply_that_comes_twice_is_an_error_rather_than_twice_in_the_answer() -> None:
    with pytest.raises(TransportError, match="are missing: 2 came before number 1"):
        await ask(Replying([WHOLE[at] for at in (0, 1, 2, 2, 3, 4, 5)]))


async def test_a_reply_that_is_none_is_an_error() -> None:
    fabric = Replying([WHOLE[0], b"\x01", *WHOLE[1:]])
    with sent_to_the_other_end(fabric), pytest.raises(TransportError, match="malformed reply"):
        await ask(fabric)


async def test_the_handlers_error_is_reported_after_what_came_before_it() -> None:
    failed = encode_reply(FAILED, 0, encode_failure(KeyError("no such thing")))
    with pytest.raises(HandlerFailed) as caught:
        await ask(Replying([*WHOLE[:2], failed, None]))
    assert (caught.value.kind, caught.value.reason) == ("KeyError", "'no such thing'")


async def test_an_answer_that_never_ends_is_over_when_its_time_is() -> None:
    fabric = Replying(WHOLE[:3])
    with sent_to_the_other_end(fabric), pytest.raises(RequestTimeout):
        await ask(fabric, timeout_s=0.1)


async def test_without_responders_the_next_fabric_is_tried_but_not_if_replies_are_missing() -> None:
    assert await ask(Replying([None]), Replying(WHOLE)) == BODIES
    with pytest.raises(NoResponders):
        await ask(Replying([None]), Replying([None]))
    with pytest.raises(TransportError, match="are missing"):
        await ask(Replying(without(1)), Replying(WHOLE))  # it was handled: another would handle it again


@settings(max_examples=200)
@given(st.lists(st.one_of(st.sampled_from(WHOLE[:-1]), st.binary(max_size=12)), max_size=12))
def test_whatever_comes_the_answer_is_whole_or_an_error(replies: list[bytes]) -> None:
    async def answer() -> None:
        try:
            bodies = await ask(Replying([*replies, None]))
        except (TransportError, NoResponders, HandlerFailed):
            return
        ends = [at for at, reply in enumerate(replies) if reply[:1] == bytes([END])]
        data = [reply[5:] for reply in replies[: ends[0]] if reply[:1] == bytes([DATA])]
        assert bodies == data
        assert int.from_bytes(replies[ends[0]][1:5]) == len(bodies)

    asyncio.run(answer())
