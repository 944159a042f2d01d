"""What others send to our inboxes and to the subjects we answer on: never a crash, and later messages arrive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from nats_wire import Wire

from zbus.errors import TransportError
from zbus.ports.fabric import IncomingRequest
from zbus_nats.consumer import Consumer
from zbus_nats.options import NatsOptions
from zbus_nats.publishing import NatsPublishing
from zbus_nats.requests import NatsRequests

NAMES = st.sampled_from([b"Zbus-End", b"Zbus-Large", b"Zbus-Upload", b"Zbus-Part", b"Status", b"X"])
VALUES = st.one_of(
    st.binary(max_size=30),
    st.integers(-1, 10**20).map(lambda number: b"%d" % number),
    st.sampled_from([b"_INBOX.a.1", b"_INBOX.>", b"a b", b"0123456789abcdef 0 1 5", b"0123456789abcdef 0 2 9"]),
)
HEADERS = st.none() | st.one_of(
    st.binary(max_size=40),
    st.lists(st.tuples(NAMES, VALUES), max_size=3).map(
        lambda pairs: b"NATS/1.0\r\n" + b"".join(b"%b: %b\r\n" % pair for pair in pairs) + b"\r\n"
    ),
    st.just(b"NATS/1.0 503\r\n\r\n"),
)
SUBJECTS = st.one_of(
    st.binary(max_size=30),
    st.binary(max_size=20).map(lambda tail: b"@ask." + tail),
    st.sampled_from([b"@ask.a.b", b"@ask.a..b", b"@ask.%zz", b"@ask.", b"@ask.a.*", b"a.b", b"@ask.\xff"]),
)
REPLIES = st.binary(max_size=20) | st.sampled_from([b"", b"_INBOX.me.1", b"_INBOX.*", b"$JS.API.STREAM.DELETE.X"])


@given(SUBJECTS, REPLIES, st.binary(max_size=50), HEADERS, st.booleans())
def test_no_request_crashes_a_responder_and_the_next_one_is_handed_over(
    subject: bytes, reply: bytes, data: bytes, headers: bytes | None, away: bool
) -> None:
    wire, asked = Wire(), list[IncomingRequest]()
    asks = NatsRequests(wire, 10_000)  # type: ignore[arg-type]
    asks.serve(["a/b"], asked.append)
    request = wire.sinks["@ask.a.b"]

    wire.away = away
    request(subject, reply, data, headers)
    wire.away = False
    request(b"@ask.a.b", b"_INBOX.me.1", b"after", None)

    assert asked[-1].payload == b"after"
    for each in asked:
        each.reply(b"yes")
        each.close()
    assert all(command.split()[1].startswith(b"_INBOX.") for command in wire.sent), "replies go to inboxes alone"


@given(st.lists(st.tuples(st.binary(max_size=50), HEADERS), max_size=4), st.booleans())
def test_no_reply_crashes_a_requester_and_the_next_request_receives_its_own(
    replies: list[tuple[bytes, bytes | None]], away: bool
) -> None:
    wire = Wire()
    asks = NatsRequests(wire, 10_000)  # type: ignore[arg-type]
    first: list[bytes | None] = []
    asks.request("a/b", b"?" * 5000, first.append, 5.0)
    (hear,) = (sink for subject, sink in wire.sinks.items() if subject.startswith("_INBOX."))
    inbox = wire.sent[-1].split()[2]

    wire.away = away
    for data, headers in replies:
        hear(inbox, b"", data, headers)
        hear(inbox + b"x", b"", data, headers)  # no request waits there
    wire.away = False
    second: list[bytes | None] = []
    asks.request("a/b", b"?", second.append, 5.0)
    inbox = wire.sent[-1].split()[2]
    hear(inbox, b"", b"yes", None)
    hear(inbox, b"", b"", b"NATS/1.0\r\nZbus-End: 1\r\n\r\n")

    assert first.count(None) <= 1
    assert None not in first[:-1], "nothing is heard after the end"
    assert second == [b"yes", None]


ANSWERS = st.one_of(
    st.binary(max_size=40),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["error", "description", "seq"]), inner)
        ),
        max_leaves=5,
    ).map(lambda value: json.dumps(value).encode()),
    st.integers(1, 3000).map(lambda deep: b"[" * deep),
)


@given(ANSWERS, HEADERS)
@example(b'{"error":{"description":""}}', None)
@example(b"{}", None)
def test_whatever_answers_a_publish_it_is_stored_or_an_error_and_the_next_one_is_stored(
    answer: bytes, headers: bytes | None
) -> None:
    wire = Wire()
    publishing = NatsPublishing(wire)  # type: ignore[arg-type]
    message = (b"a.b", b"NATS/1.0\r\n\r\n", b"x")

    def answered(data: bytes, headers: bytes | None) -> Callable[[], None]:
        return lambda: publishing.subscription.sink(wire.sent[-1].split()[2], b"", data, headers)

    publishing.subscription.sink(b"_INBOX.nobody", b"", answer, headers)
    wire.on_send = answered(answer, headers)
    stored = True
    try:
        publishing.send([message])
    except TransportError:
        stored = False
    assert not stored or ("seq" in json.loads(answer) and "error" not in json.loads(answer))
    wire.on_send = answered(b'{"stream":"S","seq":1}', None)
    publishing.send([message])


@given(ANSWERS)
def test_whatever_tells_of_a_stream_it_is_one_or_an_error(answer: bytes) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async def reported(*arguments: object, **more: object) -> Any:
        return SimpleNamespace(data=answer)

    consumer = Consumer.__new__(Consumer)
    consumer.stream, consumer._options, consumer.created = "S", NatsOptions(), ""
    found = False
    try:
        asyncio.run(consumer.find_stream(SimpleNamespace(request=reported, gone=never)))  # type: ignore[arg-type]
        found = True
    except TransportError:
        pass
    assert not found, "none of these says when the stream was made"


def test_an_announced_request_whose_requester_cannot_be_reached_is_forgotten() -> None:
    wire, asked = Wire(), list[IncomingRequest]()
    asks = NatsRequests(wire, 10_000)  # type: ignore[arg-type]
    asks.serve(["a/b"], asked.append)
    wire.away = True

    wire.sinks["@ask.a.b"](b"@ask.a.b", b"_INBOX.me.1", b"", b"NATS/1.0\r\nZbus-Large: 5000\r\n\r\n")

    assert wire.counts.snapshot() == {"upload_unsent": 1}
    assert not asks._uploads
