"""Rare failures of a NATS transport: each is counted, and those that a person should know of are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import nats.errors
import pytest
from mesh_fakes import recorded
from nats_wire import Wire

from zbus.event import Event
from zbus.observe.counters import Counters
from zbus.ports.fabric import IncomingRequest
from zbus_nats.connection import NatsConnection
from zbus_nats.consumer import Consumer
from zbus_nats.options import NatsOptions
from zbus_nats.plain import write_headers
from zbus_nats.publishing import NatsPublishing
from zbus_nats.reconnect import Reconnect
from zbus_nats.requests import NatsRequests

LARGE = b"NATS/1.0\r\nZbus-Large: %d\r\n\r\n"


class Bench:
    def __init__(self) -> None:
        self.wire, self.taken = Wire(), list[IncomingRequest]()
        self.timers: list[Callable[[], object]] = []
        self.wire.later = self._later  # type: ignore[method-assign]
        self.requests = NatsRequests(self.wire, 10_000)  # type: ignore[arg-type]

    def _later(self, delay_s: float, call: Callable[[], object]) -> Any:
        self.timers.append(call)
        return SimpleNamespace(cancel=lambda: None)

    def serve(self) -> Callable[..., None]:
        self.requests.serve(["a/b"], self.taken.append)
        receive: Callable[..., None] = self.wire.sinks["@ask.a.b"]
        return receive

    def ask(self, payload: bytes = b"?") -> tuple[Callable[..., None], bytes]:
        """Send a request; return what receives its replies, and its inbox."""
        self.requests.request("a/b", payload, lambda reply: None, 5.0)
        (receive,) = (sink for subject, sink in self.wire.sinks.items() if subject.startswith("_INBOX."))
        return receive, self.wire.sent[-1].split()[2]

    @property
    def counted(self) -> dict[str, int]:
        return self.wire.counts.snapshot()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def reported(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each["record"], each.get("code", "")) for each in records]


def test_the_end_of_replies_that_cannot_be_sent_is_reported(bench: Bench) -> None:
    bench.serve()(b"@ask.a.b", b"_INBOX.me.1", b"?", None)
    bench.wire.away = True
    with recorded() as records:
        bench.taken[0].close()

    assert bench.counted == {"end_unsent": 1}
    assert reported(records) == [("TRANSPORT_INPUT_REJECTED", "end_unsent")]


def test_replies_that_are_missing_at_the_end_are_reported(bench: Bench) -> None:
    receive, inbox = bench.ask()
    receive(inbox, b"", b"one", None)
    receive(inbox, b"", b"", b"NATS/1.0\r\nZbus-End: 2\r\n\r\n")

    assert bench.counted == {"replies_missing": 1}


def test_an_inbox_for_a_large_request_that_is_not_an_inbox_is_rejected(bench: Bench) -> None:
    receive, inbox = bench.ask(b"?" * 5000)
    receive(inbox, b"", b"", b"NATS/1.0\r\nZbus-Upload: orders.new\r\n\r\n")

    assert bench.counted == {"upload_rejected": 1}


def test_a_request_in_parts_that_was_not_announced_is_rejected(bench: Bench) -> None:
    headers = b"NATS/1.0\r\nZbus-Part: 0123456789abcdef 0 2 9\r\n\r\n"
    bench.serve()(b"@ask.a.b", b"_INBOX.me.1", b"?", headers)

    assert (bench.taken, bench.counted) == ([], {"request_in_parts": 1})


def test_an_announced_request_over_the_limit_is_rejected(bench: Bench) -> None:
    with recorded() as records:
        bench.serve()(b"@ask.a.b", b"_INBOX.me.1", b"", LARGE % 10_001)

    assert (bench.taken, bench.counted) == ([], {"request_too_large": 1})
    assert records[0]["size_bytes"] == 10_001


def test_an_announced_request_that_does_not_arrive_in_time_is_reported(bench: Bench) -> None:
    bench.serve()(b"@ask.a.b", b"_INBOX.me.1", b"", LARGE % 5000)
    bench.timers[0]()

    assert (bench.taken, bench.counted) == ([], {"request_incomplete": 1})


def test_a_request_on_a_subject_that_is_not_a_key_is_reported(bench: Bench) -> None:
    receive = bench.serve()
    with recorded() as records:
        receive(b"@ask.a.%zz", b"_INBOX.a.1", b"?", None)

    assert (bench.taken, bench.counted) == ([], {"request_malformed": 1})
    assert reported(records) == [("TRANSPORT_INPUT_REJECTED", "request_malformed")]


def test_a_header_with_a_meaning_to_nats_is_left_out_and_counted() -> None:
    counts = Counters("nats")
    event = Event(1, 2, 3, "a/b", b"", {"nats-msg-id": "7", "tenant": "acme"})

    assert b"7" not in write_headers(event, counts)
    assert counts.snapshot() == {"header_reserved": 1}


def test_an_acknowledgement_of_jetstream_that_is_malformed_fails_the_batch_and_is_reported(bench: Bench) -> None:
    publishing = NatsPublishing(bench.wire)  # type: ignore[arg-type]
    answer = publishing.subscription.sink
    bench.wire.on_send = lambda: answer(next(iter(publishing._batches)), b"", b"[]", None)
    with recorded() as records, pytest.raises(Exception, match="did not store the messages"):
        publishing.send([(b"a.b", b"NATS/1.0\r\n\r\n", b"x")])

    assert bench.counted == {"acknowledgement_malformed": 1}
    assert reported(records) == [("TRANSPORT_INPUT_REJECTED", "acknowledgement_malformed")]


async def test_a_delivery_out_of_order_is_counted_and_the_consumer_is_set_up_again(bench: Bench) -> None:
    wire: Any = bench.wire
    wire.loop, wire.closed = asyncio.get_running_loop(), False
    consumer = Consumer(wire, "ORDERS", "billing", lambda delivery: None)
    consumer.healthy, consumer._next = True, 1
    with recorded() as records:
        consumer._message(b"a.b", b"$JS.ACK.ORDERS.billing.1.7.2.1700000000000000000.0", b"x", None)

    assert (consumer.healthy, bench.counted) == (False, {"consumer_lost": 1, "delivered_out_of_order": 1})
    assert reported(records) == [("JETSTREAM_CONSUMER_LOST", "consumer_lost")]


async def test_an_acknowledgement_that_cannot_be_sent_is_counted(bench: Bench) -> None:
    wire: Any = bench.wire
    wire.loop, wire.closed = asyncio.get_running_loop(), False
    consumer = Consumer(wire, "ORDERS", "billing", lambda delivery: None)
    consumer._unacknowledged[7] = b"$JS.ACK.x"
    wire.away = True
    consumer._send_acks([("", 7)])

    assert bench.counted == {"acknowledgement_unsent": 1}


# The connection itself.


class FakeOutgoing:
    unsent = 0

    def start(self, client: object) -> None:
        pass

    def stop(self) -> int:
        return self.unsent


class FakeClient:
    discovered_servers: tuple[Any, ...] = ()
    why = nats.errors.ConnectionClosedError()
    is_connected = False

    def write(self, commands: object) -> None:
        pass

    def take(self, sid: int, *subscribed: object) -> bytes:
        return b""

    async def flush(self, timeout_s: float) -> None:
        raise nats.errors.TimeoutError

    async def gone(self) -> None:
        await asyncio.Event().wait()


def upkeep(counts: Counters) -> Any:
    return Reconnect(NatsOptions(), "nats", counts, FakeOutgoing(), asyncio.Event())  # type: ignore[arg-type]


async def test_the_first_connection_is_recorded_and_so_is_its_loss_with_what_was_not_sent() -> None:
    counts, client = Counters("nats"), FakeClient()
    keeping = upkeep(counts)
    keeping._outgoing.unsent = 12
    with recorded() as records:
        keeping._connected(client, "here:4222")
        keeping._lost(client)

    assert [(each["record"], each["server"]) for each in records] == [
        ("TRANSPORT_CONNECTED", "here:4222"),
        ("TRANSPORT_DISCONNECTED", "here:4222"),
    ]
    assert (records[1]["unsent_bytes"], counts.snapshot()) == (12, {"unsent_at_disconnect": 1})


async def test_a_denied_subject_is_reported() -> None:
    counts = Counters("nats")
    with recorded() as records:
        await upkeep(counts).on_error(nats.errors.Error('nats: permissions violation for subscription to "x"'))

    assert counts.snapshot() == {"permission_denied": 1}
    assert reported(records) == [("TRANSPORT_PERMISSION_DENIED", "permission_denied")]


@pytest.fixture
def connection() -> Any:
    """A connection that was never opened: its thread does not run."""
    made: Any = NatsConnection(NatsOptions(), "nats")
    yield made
    made.close()


async def test_a_task_of_the_connection_that_fails_is_reported(connection: Any) -> None:
    async def fail() -> None:
        raise RuntimeError("a bug")

    connection._reconnect.run = fail
    connection._reconnect.opened.set_result(None)
    with recorded() as records:
        await connection._live()

    assert connection.counts.snapshot() == {"connection_failed": 1}
    assert reported(records) == [("TRANSPORT_DISCONNECTED", "connection_failed")]


async def test_a_change_of_subscriptions_that_the_server_does_not_confirm_is_reported(connection: Any) -> None:
    connection._reconnect.client = FakeClient()
    with recorded() as records:
        await connection._change([("a.b", "", None)], [], lambda phase: None)
    connection._reconnect.client = None

    assert connection.counts.snapshot() == {"subscribe_unconfirmed": 1}
    assert reported(records) == [("TRANSPORT_INPUT_REJECTED", "subscribe_unconfirmed")]
