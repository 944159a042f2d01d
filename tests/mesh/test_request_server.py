"""Answering: what becomes of a request that is none, and of one that arrives while a node closes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from inside import node_of
from mesh_fakes import recorded

import zbus
from zbus.mesh import request_server
from zbus.mesh.log_service import LogService, log_key
from zbus.mesh.request_client import FAILED, RequestFrame, _read_failure, _read_reply, encode_failure, encode_request
from zbus.mesh.request_server import CANCELLED_KEPT, RequestServer
from zbus.util.runtime import REAL
from zbus.wire.envelope import encode


class Asker:
    """A request as a fabric hands it over."""

    key = "prices/quote"

    def __init__(self, number: int, payload: bytes | None = None, key: str = key) -> None:
        self.payload, self.key = encode_request(RequestFrame(number, b"")) if payload is None else payload, key
        self.replies: list[bytes] = []
        self.closed = threading.Event()

    def reply(self, data: bytes) -> None:
        self.replies.append(data)

    def close(self) -> None:
        self.closed.set()


async def test_a_request_that_arrives_while_the_node_closes_starts_no_handler() -> None:
    started: list[bytes] = []

    async def answer(request: bytes) -> bytes:
        started.append(request)
        await asyncio.sleep(60)
        return b""

    server = RequestServer(lambda name, number: None, REAL)
    server.handle(Asker.key, answer)
    early, late, too_late = Asker(1), Asker(2), Asker(3)
    server.on_request(early)
    async with asyncio.timeout(10):
        while not started:
            await asyncio.sleep(0)

    server.on_request(late)  # on its way to the loop
    cancelled = server.cancel_all()
    await asyncio.wait(cancelled, timeout=10)
    assert await asyncio.to_thread(late.closed.wait, 10)
    assert await asyncio.to_thread(early.closed.wait, 10)
    server.on_request(too_late)
    server.close()
    await asyncio.sleep(0)

    assert (len(started), late.replies, too_late.replies) == (1, [], [])
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_request_that_was_cancelled_before_it_arrived_starts_no_handler() -> None:
    started: list[bytes] = []

    async def answer(request: bytes) -> bytes:
        started.append(request)
        return b""

    server = RequestServer(lambda name, number: None, REAL)
    server.handle(Asker.key, answer)
    for number in range(CANCELLED_KEPT + 1):
        server.cancel(number)  # number 0 is too long ago to be remembered
    forgotten, cancelled = Asker(0), Asker(CANCELLED_KEPT)
    server.on_request(forgotten)
    server.on_request(cancelled)
    for each in (forgotten, cancelled):
        assert await asyncio.to_thread(each.closed.wait, 10)
    server.close()

    assert (len(started), len(forgotten.replies), cancelled.replies) == (1, 3, [])


async def test_a_malformed_request_reaches_no_handler_and_is_counted_and_reported_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "zbus")
    handled: list[bytes] = []
    async with zbus.open() as bus:

        @bus.serve(Asker.key)
        async def answer(request: zbus.Event) -> bytes:
            handled.append(request.payload)
            return b""

        assert node_of(bus).network is not None
        server = node_of(bus).network.request_server
        junk = [Asker(0, b"junk")] + [
            Asker(number, encode_request(RequestFrame(number, b"junk"))) for number in range(1, 50)
        ]
        for each in junk:
            server.on_request(each, "somewhere")
        good = Asker(99, encode_request(RequestFrame(99, encode(zbus.Event(1, 0, 1, Asker.key, b"good")))))
        server.on_request(good, "somewhere")
        for each in (*junk, good):
            assert await asyncio.to_thread(each.closed.wait, 10)

        assert handled == [b"good"]
        assert len(good.replies) == 3
        stats = bus.stats()
        assert (stats["invalid_received"], stats["invalid_request"], "handler_errors" in stats) == (50, 50, False)
        assert reported(caplog) == {"EVENT_INVALID": 1}
        (fields,) = [each.zbus for each in caplog.records if each.name == "zbus"]  # type: ignore[attr-defined]
        assert fields.keys() == {"record", "code", "reason", "link", "key", "correlation_id"}
        assert (fields["code"], fields["link"], fields["key"]) == ("invalid_request", "somewhere", Asker.key)
        assert junk[0].replies == []  # there is no telling who asked for what
        for each in junk[1:]:
            assert [_read_reply(reply)[0] for reply in each.replies] == [FAILED]
            assert _read_failure(_read_reply(each.replies[0])[2])[0] == "EventInvalid"


@pytest.mark.parametrize("wrap", [bytes, lambda body: encode_request(RequestFrame(1, body))], ids=["request", "body"])
async def test_junk_for_a_log_is_counted_and_reported_once_a_minute(
    caplog: pytest.LogCaptureFixture, wrap: Callable[[bytes], bytes]
) -> None:
    caplog.set_level(logging.WARNING, "zbus")
    counts: Counter[str] = Counter()
    server = RequestServer(lambda name, number: counts.update({name: number}), REAL)
    server.serve(log_key(7), LogService(None, 7).page)  # type: ignore[arg-type]  # junk never reaches the log
    junk = [Asker(number, wrap(b"junk"), log_key(7)) for number in range(50)]
    for each in junk:
        server.on_request(each, "somewhere")
    for each in junk:
        assert await asyncio.to_thread(each.closed.wait, 10)
    await asyncio.sleep(0)  # what the threads left for the loop

    assert counts == {"invalid_received": 50, "invalid_request": 50}
    assert reported(caplog) == {"EVENT_INVALID": 1}
    assert all(_read_reply(each.replies[-1])[0] == FAILED for each in junk)
    server.close()


def reported(caplog: pytest.LogCaptureFixture) -> Counter[str]:
    """How often each record of a warning or an error was written."""
    return Counter(each.zbus["record"] for each in caplog.records if each.name == "zbus")


class Clock:
    """The loop's clock of an `RequestServer`, moved by its own sleeping, and requests that come at some times."""

    def __init__(self, *requests: float) -> None:
        self.now, self._requests = 0.0, list(requests)
        self.server: RequestServer | None = None

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while self._requests and self._requests[0] <= end:
            self.now = self._requests.pop(0)
            assert self.server is not None
            self.server.on_request(Asker(1, key="log"))
        self.now = end


@pytest.mark.parametrize(
    ("requests", "ends_at"),
    [((), 0.15), ((0.1,), 0.25), ((0.1, 0.2, 0.3), 0.45), ((0.2,), 0.15), ([0.1 * n for n in range(1, 30)], 1.0)],
    ids=["none", "one", "several", "too-late", "without-end"],
)
async def test_a_node_that_closes_answers_until_no_request_came_for_a_moment(
    monkeypatch: pytest.MonkeyPatch, requests: tuple[float, ...], ends_at: float
) -> None:
    clock = Clock(*requests)
    server = clock.server = RequestServer(lambda name, number: None, REAL)
    server.serve("log", lambda body, link: ())
    monkeypatch.setattr(server, "_loop", clock)
    monkeypatch.setattr(request_server, "asyncio", clock)

    await server.finish(0.15, 1.0)

    assert clock.now == pytest.approx(ends_at)
    server.close()


class GoneAsker(Asker):
    """A request whose sender is no longer connected."""

    def reply(self, data: bytes) -> None:
        raise zbus.TransportError("the client is gone")


async def test_a_reply_that_cannot_be_sent_is_recorded() -> None:
    server = RequestServer(lambda name, number: None, REAL)

    async def answer(request: bytes) -> bytes:
        return b""

    server.handle(Asker.key, answer)
    gone = GoneAsker(1)
    with recorded() as records:
        server.on_request(gone)
        assert await asyncio.to_thread(gone.closed.wait, 10)
    server.close()

    found = {(each["record"], each["code"], each["key"], each["reason"]) for each in records}
    assert found == {("REPLY_FAILED", "reply_failed", Asker.key, "the client is gone")}


class Odd(BaseException):
    """Not an `Exception`."""


@pytest.mark.parametrize("error", [asyncio.CancelledError("its own task"), Odd("x")], ids=["cancelled", "odd"])
async def test_whatever_a_handler_raises_is_its_failure_and_the_requester_learns_it_at_once(
    error: BaseException,
) -> None:
    counts: Counter[str] = Counter()
    server = RequestServer(lambda name, number: counts.update({name: number}), REAL)

    async def answer(request: bytes) -> bytes:
        raise error

    server.handle(Asker.key, answer)
    asker = Asker(1)
    with recorded() as records:
        server.on_request(asker)
        assert await asyncio.to_thread(asker.closed.wait, 10)
    server.close()

    assert asker.replies[-1][0] == FAILED
    assert counts == {"handler_errors": 1}
    assert [each["record"] for each in records] == ["HANDLER_FAILED"]


async def test_a_handler_on_this_node_that_leaks_a_cancellation_does_not_cancel_the_requester() -> None:
    async with zbus.open() as bus:

        @bus.serve("shop/price")
        async def price(request: zbus.Event) -> bytes:
            raise asyncio.CancelledError("its own task")

        with pytest.raises(zbus.HandlerFailed, match="CancelledError"):
            await bus.request("shop/price", b"")


async def test_a_handler_that_raises_is_counted_and_recorded() -> None:
    counts: Counter[str] = Counter()
    server = RequestServer(lambda name, number: counts.update({name: number}), REAL)

    async def answer(request: bytes) -> bytes:
        raise ValueError("no such price")

    server.handle(Asker.key, answer)
    asker = Asker(1)
    with recorded() as records:
        server.on_request(asker)
        assert await asyncio.to_thread(asker.closed.wait, 10)
    server.close()

    assert counts == {"handler_errors": 1}
    assert [(each["record"], each["error"]) for each in records] == [("HANDLER_FAILED", "ValueError: no such price")]


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [(ValueError("bad file \udcff"), "bad file \\udcff"), (Unreadable(), "its text cannot be read")],
)
def test_an_error_is_sent_whatever_its_text_is(error: Exception, text: str) -> None:
    assert msgspec.msgpack.decode(encode_failure(error)) == [type(error).__name__, text]


async def test_a_request_with_the_id_of_one_in_progress_is_rejected() -> None:
    counts: Counter[str] = Counter()
    server = RequestServer(lambda name, number: counts.update({name: number}), REAL)
    started = asyncio.Event()

    async def answer(request: bytes) -> bytes:
        assert not started.is_set(), "it ran twice"
        started.set()
        await asyncio.Event().wait()
        return b""

    server.handle(Asker.key, answer)
    first, second = Asker(1), Asker(1)
    server.on_request(first)
    server.on_request(second)
    assert await asyncio.to_thread(second.closed.wait, 10)
    await asyncio.wait_for(started.wait(), 10)
    assert counts["invalid_request"] == 1
    await asyncio.wait(server.cancel_all())
    assert await asyncio.to_thread(first.closed.wait, 10)
    server.close()
