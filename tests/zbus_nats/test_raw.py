"""Plain NATS messages as events, and events as plain messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nats
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats_support import Collected, NatsServer, nats_server, wait_for

from zbus.config import BusConfig
from zbus.errors import TransportUnsupported
from zbus.event import Event
from zbus.headers import encode_headers
from zbus.observe.counters import Counters
from zbus.wire.envelope import decode, encode, join, unpack
from zbus_nats.plain import read_headers, write_headers
from zbus_nats.raw import RawNatsFabric, open_fabric

Open = Callable[[], RawNatsFabric]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats")) as running:
        yield running


@pytest.fixture
def opened(server: NatsServer) -> Iterator[Open]:
    fabrics: list[RawNatsFabric] = []

    def open_one() -> RawNatsFabric:
        fabric = open_fabric(BusConfig(), server.url.replace("nats://", "nats+raw://"))
        assert isinstance(fabric, RawNatsFabric)
        fabrics.append(fabric)
        return fabric

    yield open_one
    for fabric in fabrics:
        fabric.close()


async def client_of(server: NatsServer) -> Client:
    return await nats.connect(server.url)


def events(frames: list[bytes | None]) -> list[Event]:
    return [decode(frame) for frame in frames if frame is not None]


async def test_a_plain_message_is_an_event_with_an_identity_made_here(server: NatsServer, opened: Open) -> None:
    fabric, came = await asyncio.to_thread(opened), Collected()
    await asyncio.to_thread(fabric.listen, ["shop/**"], came)
    client = await client_of(server)
    before = time.time_ns()

    for number in range(3):
        await client.publish("shop.orders", b"%d" % number, headers={"Trace-Id": "é 7", "B": "c"})
    await client.publish("shop.other", b"x")
    await client.publish("bank.orders", b"not asked for")
    await client.publish("shop.end", b"")
    found = events(await asyncio.to_thread(came.wait, 5))

    orders, other = found[:3], found[3]
    assert [(each.key, each.payload) for each in orders] == [("shop/orders", b"%d" % number) for number in range(3)]
    assert [each.sequence for each in orders] == [0, 1, 2]
    assert len({each.publisher_id for each in orders}) == 1
    assert orders[0].publisher_id < 1 << 53
    assert (other.sequence, other.publisher_id != orders[0].publisher_id) == (0, True)
    assert dict(orders[0].headers) == {"trace-id": "é 7", "b": "c"}
    assert before <= orders[0].published_at <= time.time_ns()
    await client.close()


async def test_an_event_is_a_plain_message_that_reads_back_as_the_same_event(server: NatsServer, opened: Open) -> None:
    here, there, came = await asyncio.to_thread(opened), await asyncio.to_thread(opened), Collected()
    await asyncio.to_thread(there.listen, ["**"], came)
    client = await client_of(server)
    plain = await client.subscribe("shop.orders%2Eeu.ü")
    await client.flush()
    sent = [Event(77, n, 5, "shop/orders.eu/ü", b"payload %d" % n, {"a": "b", "nats-rollup": "all"}) for n in range(2)]

    await asyncio.to_thread(here.send, [("shop/orders.eu/ü", join([encode(each) for each in sent]))])

    message = await plain.next_msg(5)
    assert (message.data, message.headers) == (b"payload 0", {"Zbus-Event": "77 0 5", "a": "b"})
    found = events(await asyncio.to_thread(came.wait, 2))
    assert [each.identity for each in found] == [(77, 0), (77, 1)]
    assert [each.published_at for each in found] == [5, 5]
    assert dict(found[0].headers) == {"a": "b"}
    await client.close()


async def test_an_event_made_here_is_not_sent_back(server: NatsServer, opened: Open) -> None:
    fabric, came = await asyncio.to_thread(opened), Collected()
    await asyncio.to_thread(fabric.listen, ["**"], came)
    client = await client_of(server)
    seen = await client.subscribe("a")
    await client.publish("a", b"once")
    frames = await asyncio.to_thread(came.wait, 1)

    await asyncio.to_thread(fabric.send, [("a", frames[0] or b""), ("a", encode(Event(5, 0, 0, "a", b"other")))])

    assert [(await seen.next_msg(5)).data for _ in range(2)] == [b"once", b"other"]
    assert fabric.diagnostics()["counts"] == {"echo_suppressed": 1}
    await client.close()


async def test_two_bridges_cannot_run_in_a_circle(server: NatsServer, opened: Open) -> None:
    """What one sends as a plain message is, at the other, the event that it was: known, and not carried on."""
    one, other = await asyncio.to_thread(opened), await asyncio.to_thread(opened)
    made, again = Collected(), Collected()
    await asyncio.to_thread(one.listen, ["a"], made)
    client = await client_of(server)
    await client.publish("a", b"x")
    frame = (await asyncio.to_thread(made.wait, 1))[0] or b""
    await asyncio.to_thread(one.listen, ["a"], again)

    await asyncio.to_thread(other.send, [("a", frame)])

    assert events(await asyncio.to_thread(again.wait, 1))[0].identity == decode(frame).identity
    await client.close()


async def test_requests_are_events_and_inboxes_are_left_alone(server: NatsServer, opened: Open) -> None:
    fabric, came = await asyncio.to_thread(opened), Collected()
    await asyncio.to_thread(fabric.listen, ["**"], came)
    client = await client_of(server)

    async def answer(message: object) -> None:
        await message.respond(b"the service's own answer")  # type: ignore[attr-defined]

    await client.subscribe("service.x", cb=answer)
    reply = await client.request("service.x", b"request", timeout=5)
    await client.publish("end", b"")

    found = events(await asyncio.to_thread(came.wait, 2))
    assert reply.data == b"the service's own answer"
    assert [each.key for each in found] == ["service/x", "end"]
    await client.close()


async def test_subjects_without_a_key_and_headers_that_are_none_are_counted(server: NatsServer, opened: Open) -> None:
    fabric, came = await asyncio.to_thread(opened), Collected()
    await asyncio.to_thread(fabric.listen, ["**"], came)
    client = await client_of(server)
    for subject in ("a%2eb", "a#b", "a?b", "a$b", "100%"):
        await client.publish(subject, b"no")
    await client.publish("ok.@x.ü.%2E", b"yes")
    bad = b"NATS/1.0\r\nGood: 1\r\n\xff: 2\r\nno colon\r\nTab: a\tb\r\nGood: 2\r\nZbus-Event: 1 2\r\n\r\n"
    await client._send_command(b"HPUB ok %d %d\r\n%b\r\n" % (len(bad), len(bad), bad))
    await client.publish("end", b"")

    found = events(await asyncio.to_thread(came.wait, 2))

    assert [each.key for each in found] == ["ok", "end"]
    assert dict(found[0].headers) == {"good": "1, 2"}
    counts = fabric.diagnostics()["counts"]
    assert counts == {"subject_malformed": 5, "header_rejected": 3, "identity_malformed": 1}
    await client.close()


def test_what_is_no_event_or_too_large_is_counted_and_the_rest_is_sent(opened: Open) -> None:
    here, there, came = opened(), opened(), Collected()
    there.listen(["**"], came)
    good = encode(Event(1, 0, 0, "a", b"good"))

    here.send([("a", b""), ("a", b"\x03beacon"), ("a", encode(Event(1, 1, 0, "a", bytes(2_000_000)))), ("a", good)])

    assert events(came.wait(1))[0].payload == b"good"
    assert here.diagnostics()["counts"] == {"frame_rejected": 2, "too_large": 1}


def test_a_header_cannot_inject_a_line(opened: Open) -> None:
    here, there, came = opened(), opened(), Collected()
    there.listen(["**"], came)
    hostile = {"a": "b\r\nc: d", "e\r\nf": "g", "ok": "yes"}

    here.send([("a", encode(Event(1, 0, 0, "a", b"x", hostile)))])

    assert dict(events(came.wait(1))[0].headers) == {"ok": "yes"}
    assert here.diagnostics()["counts"] == {"header_rejected": 2}


def test_requests_are_refused_by_name(opened: Open) -> None:
    fabric = opened()
    fabric.serve([], lambda request: None)

    with pytest.raises(TransportUnsupported, match=r"nats\+raw"):
        fabric.request("a", b"", lambda reply: None, 1.0)
    with pytest.raises(TransportUnsupported, match=r"nats\+raw"):
        fabric.serve(["a"], lambda request: None)
    assert fabric.events_only


async def test_many_messages_arrive_each_once_and_in_order_while_what_is_listened_to_changes(
    server: NatsServer, opened: Open
) -> None:
    fabric, came = await asyncio.to_thread(opened), Collected()
    await asyncio.to_thread(fabric.listen, ["flow/*"], came)
    client = await client_of(server)

    async def flow() -> None:
        for _ in range(200):
            for _ in range(100):
                await client.publish("flow.a", b"all the same")
            await client.flush()

    flowing = asyncio.create_task(flow())
    for number in range(20):
        wanted = ["flow/**", "x"] if number % 2 == 0 else ["flow/*", "y"]
        await asyncio.to_thread(fabric.listen, wanted, came)
    await flowing
    await asyncio.to_thread(came.wait, 20_000)
    await client.publish("flow.a", b"end")
    await asyncio.to_thread(wait_for, lambda: decode(came.items[-1] or b"").payload == b"end")

    assert [each.sequence for each in events(came.items)] == list(range(20_001))
    await client.close()


@given(block=st.one_of(st.binary(max_size=200), st.binary(max_size=100).map(lambda rest: b"NATS/1.0\r\n" + rest)))
def test_any_header_block_gives_headers_that_an_event_may_have(block: bytes) -> None:
    headers, _ = read_headers(block, Counters("nats+raw"), b"a")

    if headers:
        assert encode_headers(headers, None, None)


@given(
    headers=st.dictionaries(
        st.from_regex(r"[a-z0-9!#$%&'*+.^_`|~-]{1,20}", fullmatch=True),
        st.text(max_size=30).filter(lambda value: value.strip(" \t") == value and value.isprintable()),
        max_size=5,
    )
)
def test_headers_come_back_as_they_were(headers: dict[str, str]) -> None:
    headers = {name: value for name, value in headers.items() if not name.startswith(("nats-", "zbus-event"))}
    event = Event(3, 4, 5, "a", b"", headers)

    found, identity = read_headers(write_headers(event, Counters("nats+raw")), Counters("nats+raw"), b"a")

    assert (dict(found), identity) == (headers, (3, 4, 5))


def test_a_frame_of_many_is_many_messages(opened: Open, tmp_path: Path) -> None:
    here, there, came = opened(), opened(), Collected()
    there.listen(["a"], came)

    here.send([("a", join([encode(Event(9, n, 0, "a", b"%d" % n)) for n in range(1_000)]))])

    assert [unpack(frame)[0].sequence for frame in came.wait(1_000) if frame] == list(range(1_000))
