"""A JetStream stream as a source: acknowledged when stored, the same event when it comes again, looked after."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import nats
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats_support import Collected, NatsServer, nats_server, wait_for

from zbus.config import BusConfig
from zbus.errors import ConfigInvalid, TransportError, TransportUnsupported
from zbus.event import Event
from zbus.wire.envelope import decode, encode, join
from zbus_nats.delivery import read_place
from zbus_nats.jetstream import JetStreamFabric, open_fabric

Open = Callable[..., JetStreamFabric]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path, jetstream=True) as running:
        yield running


@pytest.fixture
def opened(server: NatsServer) -> Iterator[Open]:
    fabrics: list[JetStreamFabric] = []

    def open_one(stream: str = "SHOP", durable: str = "bridge", **options: str) -> JetStreamFabric:
        url = f"nats+js://127.0.0.1:{server.port}/{stream}?durable={durable}"
        fabric = open_fabric(BusConfig(options=options), url)
        assert isinstance(fabric, JetStreamFabric)
        fabrics.append(fabric)
        return fabric

    yield open_one
    for fabric in fabrics:
        fabric.close()


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[Client]:
    connected = await nats.connect(server.url, reconnect_time_wait=0.05)
    await connected.jetstream().add_stream(name="SHOP", subjects=["shop.>"])
    yield connected
    await connected.close()


@pytest.fixture
def stream(client: Client) -> JetStreamContext:
    return client.jetstream()


def events(frames: list[bytes | None]) -> list[Event]:
    return [decode(frame) for frame in frames if frame is not None]


async def fill(stream: JetStreamContext, count: int, start: int = 0) -> None:
    for number in range(start, start + count):
        await stream.publish("shop.orders", b"%d" % number)


async def pending(stream: JetStreamContext) -> tuple[int, int]:
    """Delivered but not acknowledged, and not delivered yet."""
    info = await stream.consumer_info("SHOP", "bridge")
    return info.num_ack_pending or 0, info.num_pending or 0


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(wait_for, condition)


async def test_what_the_stream_holds_comes_in_order_and_is_acknowledged_only_when_stored(
    stream: JetStreamContext, opened: Open
) -> None:
    await fill(stream, 500)
    fabric, came = await asyncio.to_thread(opened), Collected()
    await asyncio.to_thread(fabric.listen, ["shop/**"], came)
    found = events(await asyncio.to_thread(came.wait, 500))

    assert [each.payload for each in found] == [b"%d" % number for number in range(500)]
    assert [each.sequence for each in found] == list(range(1, 501))
    assert len({each.publisher_id for each in found}) == 1
    assert abs(found[-1].published_at - time.time_ns()) < 60e9
    assert await pending(stream) == (500, 0)

    for done in came.dones[:300]:
        assert done is not None
        done()
        done()
    await until(lambda: fabric.diagnostics()["consumer"]["unacknowledged"] == 200)
    async with asyncio.timeout(20):
        while await pending(stream) != (200, 0):
            await asyncio.sleep(0.02)


async def test_what_was_not_acknowledged_comes_again_as_the_same_event(stream: JetStreamContext, opened: Open) -> None:
    await fill(stream, 10)
    first, came = await asyncio.to_thread(opened, ack_wait_s="1"), Collected()
    await asyncio.to_thread(first.listen, ["shop/**"], came)
    before = events(await asyncio.to_thread(came.wait, 10))
    for done in came.dones[:4]:
        assert done is not None
        done()
    await asyncio.to_thread(first.close)

    second, again = await asyncio.to_thread(opened), Collected()
    await asyncio.to_thread(second.listen, ["shop/**"], again)
    after = events(await asyncio.to_thread(again.wait, 6))

    assert after == before[4:]


async def test_what_is_not_stored_in_time_comes_again_before_what_is_newer(
    stream: JetStreamContext, opened: Open
) -> None:
    await fill(stream, 6)
    fabric, came = await asyncio.to_thread(opened, ack_wait_s="1"), Collected()
    await asyncio.to_thread(fabric.listen, ["shop/**"], came)
    await asyncio.to_thread(came.wait, 6)
    for done in came.dones[:2] + came.dones[4:5]:
        assert done is not None
        done()
    await fill(stream, 2, start=6)

    sequences = [each.sequence for each in events(await asyncio.to_thread(came.wait, 14))]

    assert sequences[:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sequences[8:14] == [3, 4, 5, 6, 7, 8]


async def test_a_receiver_that_fails_gets_the_message_again(stream: JetStreamContext, opened: Open) -> None:
    await fill(stream, 5)
    fabric, came = await asyncio.to_thread(opened), Collected()

    def store(frame: bytes, done: Callable[[], None] | None) -> None:
        came(frame)
        if len(came.items) == 3:
            raise RuntimeError("a bug")
        assert done is not None
        done()

    await asyncio.to_thread(fabric.listen, ["shop/**"], store)

    found = [each.sequence for each in events(await asyncio.to_thread(came.wait, 6))]
    assert found[:3] == [1, 2, 3]
    assert found[-3:] == [3, 4, 5]


async def test_a_deleted_consumer_is_made_again_and_goes_on_where_it_was(
    stream: JetStreamContext, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(stream, 20)
    fabric, came = await asyncio.to_thread(opened), Collected()

    def store(frame: bytes, done: Callable[[], None] | None) -> None:
        came(frame)
        assert done is not None
        done()

    await asyncio.to_thread(fabric.listen, ["shop/**"], store)
    await asyncio.to_thread(came.wait, 20)
    await until(lambda: fabric.diagnostics()["consumer"]["unacknowledged"] == 0)
    with caplog.at_level(logging.INFO, "zbus"):
        await stream.delete_consumer("SHOP", "bridge")
        await fill(stream, 5, start=20)
        found = events(await asyncio.to_thread(came.wait, 25))

    assert [each.payload for each in found] == [b"%d" % number for number in range(25)]
    assert fabric.diagnostics()["consumer"]["recreated"] == 1
    names = [each.getMessage().split()[0] for each in caplog.records if each.name == "zbus"]
    assert "JETSTREAM_CONSUMER_LOST" in names
    assert "JETSTREAM_CONSUMER_READY" in names


async def test_a_consumer_whose_server_does_not_reply_is_set_up_again(
    server: NatsServer, stream: JetStreamContext, opened: Open
) -> None:
    fabric, came = await asyncio.to_thread(opened, idle_timeout_s="1", ping_interval_s="60"), Collected()
    await asyncio.to_thread(fabric.listen, ["shop/**"], came)
    await until(lambda: fabric.diagnostics()["consumer"]["healthy"])

    server.freeze()
    await until(lambda: fabric.diagnostics()["counts"].get("consumer_lost", 0) >= 1)
    server.thaw()
    await fill(stream, 3)

    assert len(await asyncio.to_thread(came.wait, 3)) == 3


async def test_a_server_killed_and_restarted_loses_and_reorders_nothing(
    server: NatsServer, stream: JetStreamContext, opened: Open
) -> None:
    await fill(stream, 3_000)
    fabric, came = await asyncio.to_thread(opened, batch="50"), Collected()

    def store(frame: bytes, done: Callable[[], None] | None) -> None:
        came(frame)
        time.sleep(0.0002)
        assert done is not None
        done()

    await asyncio.to_thread(fabric.listen, ["shop/**"], store)
    await asyncio.to_thread(came.wait, 500)
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)

    await until(lambda: len({each.identity for each in events(list(came.items))}) == 3_000)
    first_seen = list(dict.fromkeys(each.sequence for each in events(list(came.items))))
    assert first_seen == list(range(1, 3_001))
    assert fabric.diagnostics()["reconnects"] >= 1


async def test_a_stream_made_anew_is_another_publisher(stream: JetStreamContext, opened: Open) -> None:
    await fill(stream, 1)
    fabric, came = await asyncio.to_thread(opened), Collected()
    await asyncio.to_thread(fabric.listen, ["shop/**"], came)
    await asyncio.to_thread(came.wait, 1)

    await stream.delete_stream("SHOP")
    await stream.add_stream(name="SHOP", subjects=["shop.>"])
    await fill(stream, 1, start=1)
    one, other = events(await asyncio.to_thread(came.wait, 2))
    for done in came.dones[:1] * 3:  # of the stream that is gone: it acknowledges nothing of the new one
        assert done is not None
        done()
    await asyncio.to_thread(fabric.connection.run, asyncio.sleep(0), 5)

    assert fabric.diagnostics()["consumer"]["unacknowledged"] == 1
    assert (one.sequence, other.sequence, other.payload) == (1, 1, b"1")
    assert one.publisher_id != other.publisher_id


async def test_events_are_stored_once_under_their_identity_and_come_out_as_themselves(
    stream: JetStreamContext, opened: Open
) -> None:
    here, there, came = await asyncio.to_thread(opened), await asyncio.to_thread(opened, durable="other"), Collected()
    await asyncio.to_thread(there.listen, ["shop/**"], came)
    frame = join([encode(Event(7, n, 5, "shop/a.b", b"%d" % n, {"h": "v"})) for n in range(700)])

    await asyncio.to_thread(here.send, [("shop/a.b", frame)])
    await asyncio.to_thread(here.send, [("shop/a.b", frame)])

    found = events(await asyncio.to_thread(came.wait, 700))
    assert [each.identity for each in found] == [(7, n) for n in range(700)]
    assert (found[0].key, found[0].published_at, dict(found[0].headers)) == ("shop/a.b", 5, {"h": "v"})
    assert (await stream.stream_info("SHOP")).state.messages == 700
    # What came out of the stream is not put into it again, even where the server has forgotten the identity.
    await asyncio.to_thread(there.send, [("shop/a.b", frame)])
    assert there.diagnostics()["counts"]["echo_suppressed"] == 700


async def test_an_event_of_the_stream_is_not_put_into_it_again(stream: JetStreamContext, opened: Open) -> None:
    await fill(stream, 3)
    fabric, came = await asyncio.to_thread(opened), Collected()
    await asyncio.to_thread(fabric.listen, ["shop/**"], came)
    frames = await asyncio.to_thread(came.wait, 3)

    await asyncio.to_thread(fabric.send, [("shop/orders", frame or b"") for frame in frames])

    assert (await stream.stream_info("SHOP")).state.messages == 3


async def test_what_no_stream_takes_is_an_error(client: Client, opened: Open) -> None:
    fabric = await asyncio.to_thread(opened)

    with pytest.raises(TransportError, match="no stream stores the subject"):
        await asyncio.to_thread(fabric.send, [("bank/x", encode(Event(1, 0, 0, "bank/x", b"")))])


async def test_what_is_not_wanted_or_has_no_key_is_let_go_and_counted(stream: JetStreamContext, opened: Open) -> None:
    for subject in ("shop.orders", "shop.other", "shop.a#b", "shop.orders"):
        await stream.publish(subject, subject.encode())
    fabric, came = await asyncio.to_thread(opened), Collected()
    await asyncio.to_thread(fabric.listen, ["shop/orders"], came)

    found = events(await asyncio.to_thread(came.wait, 2))

    assert [each.sequence for each in found] == [1, 4]
    assert fabric.diagnostics()["counts"] == {"subject_malformed": 1, "filtered": 1}
    await until(lambda: fabric.diagnostics()["consumer"]["unacknowledged"] == 2)


async def test_no_more_is_requested_than_may_wait_to_be_stored(stream: JetStreamContext, opened: Open) -> None:
    await fill(stream, 300)
    fabric, came = await asyncio.to_thread(opened, unacknowledged_max="100", batch="30"), Collected()
    await asyncio.to_thread(fabric.listen, ["shop/**"], came)
    await asyncio.to_thread(came.wait, 100)
    await stream._nc.flush()
    assert (await pending(stream))[0] <= 100

    acknowledged = 0
    while acknowledged < 300:
        await asyncio.to_thread(came.wait, acknowledged + 1)
        for done in came.dones[acknowledged : len(came.items)]:
            assert done is not None
            done()
            acknowledged += 1

    assert [each.sequence for each in events(came.items)] == list(range(1, 301))


async def test_after_listening_to_nothing_the_stream_waits(stream: JetStreamContext, opened: Open) -> None:
    fabric, came = await asyncio.to_thread(opened), Collected()
    await asyncio.to_thread(fabric.listen, ["shop/**"], came)
    await fill(stream, 1)
    await asyncio.to_thread(came.wait, 1)
    await asyncio.to_thread(fabric.listen, [], came)
    await fill(stream, 2, start=1)
    await asyncio.to_thread(fabric.listen, ["shop/**"], came)

    found = events(await asyncio.to_thread(came.wait, 4))
    assert [each.sequence for each in found] == [1, 1, 2, 3], "the first was not acknowledged"


def test_a_stream_that_does_not_exist_is_reported_at_opening(server: NatsServer, opened: Open, tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="stream 'NONE': stream not found"):
        opened("NONE")
    with nats_server(tmp_path / "plain") as without:
        with pytest.raises(TransportError, match="does not offer JetStream"):
            open_fabric(BusConfig(), f"nats+js://127.0.0.1:{without.port}/SHOP?durable=d")
    for url in ("nats+js://127.0.0.1:1/SHOP", "nats+js://127.0.0.1:1?durable=d"):
        with pytest.raises(ConfigInvalid, match="must name the stream and the consumer"):
            open_fabric(BusConfig(), url)


async def test_a_consumer_that_pushes_is_refused_and_said_so(
    stream: JetStreamContext, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    await stream.add_consumer("SHOP", durable_name="bridge", deliver_subject="x.y")
    fabric = await asyncio.to_thread(opened)
    await asyncio.to_thread(fabric.listen, ["shop/**"], Collected())

    await until(lambda: fabric.diagnostics()["counts"].get("consumer_setup_failed", 0) >= 1)

    assert "not a pull consumer" in caplog.text
    with pytest.raises(TransportUnsupported):
        fabric.request("a", b"", lambda reply: None, 1.0)


async def test_close_is_bounded_while_the_server_is_frozen(server: NatsServer, client: Client, opened: Open) -> None:
    fabric = await asyncio.to_thread(opened)
    await asyncio.to_thread(fabric.listen, ["shop/**"], Collected())
    server.freeze()

    start = time.monotonic()
    await asyncio.to_thread(fabric.close)

    assert time.monotonic() - start < 15
    server.thaw()


@given(
    reply=st.one_of(
        st.binary(max_size=80), st.text("0123456789.-a", max_size=80).map(lambda t: f"$JS.ACK.{t}".encode())
    )
)
def test_any_acknowledgement_subject_is_survived(reply: bytes) -> None:
    place = read_place(reply)

    assert place is None or (place[0] > 0 and place[2] >= 0)


def test_both_forms_of_the_acknowledgement_subject_are_read() -> None:
    assert read_place(b"$JS.ACK.SHOP.bridge.1.42.7.1700000000000000000.3") == (42, 7, 1_700_000_000_000_000_000, 1)
    assert read_place(b"$JS.ACK._.hash.SHOP.bridge.1.42.7.1700000000000000000.3.tok") == (
        (42, 7, 1_700_000_000_000_000_000, 1)
    )
