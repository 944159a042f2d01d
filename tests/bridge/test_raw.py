"""Bridges to programs that know nothing of zbus: plain messages become events, events become plain messages."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import nats
import pytest
import zmq
from bridge_support import receiving, router, until
from free_ports import free_port
from nats_support import NatsServer, nats_server
from zmq_support import raw_socket

import zbus

PAST = {"durable": "test", "start": "beginning"}  # a stream holds what was published before anybody subscribed


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats", jetstream=True) as running:
        yield running


@pytest.fixture
async def zenoh_url() -> AsyncIterator[str]:
    port = free_port()
    async with router(port):
        yield f"zenoh://127.0.0.1:{port}"


@pytest.mark.parametrize("kept", [True, False], ids=["log", "no-log"])
async def test_plain_nats_messages_become_events_and_events_plain_messages(
    server: NatsServer, zenoh_url: str, tmp_path: Path, kept: bool
) -> None:
    log = tmp_path / "bridge.db" if kept else None
    plain = await nats.connect(server.url)
    received = await plain.subscribe("shop.>")
    try:
        async with zbus.open(transport=zenoh_url) as node, receiving(node, "**") as at_node:
            async with zbus.Bridge((server.url, zenoh_url), ["shop/**"], raw=True, log=log) as bridge:
                await plain.publish("shop.orders.created", b"\x00plain", headers={"Trace-Id": "7"})
                await plain.publish("bank.secret", b"stays")
                (event,) = await at_node.only(1)
                assert (event.key, event.payload) == ("shop/orders/created", b"\x00plain")
                assert dict(event.headers) == {"trace-id": "7"}
                assert abs(event.published_at - time.time_ns()) < 20e9

                publisher = await node.publisher("shop/prices")
                await publisher.publish(b"\xffevent", headers={"tenant": "x"})
                own = await received.next_msg(timeout=20)
                message = await received.next_msg(timeout=20)
                with pytest.raises(nats.errors.TimeoutError):  # what came from here is not sent back
                    await received.next_msg(timeout=0.5)
                stats = bridge.stats()
    finally:
        await plain.close()

    assert own.data == b"\x00plain"
    assert (message.subject, message.data) == ("shop.prices", b"\xffevent")
    assert message.headers is not None
    assert message.headers["tenant"] == "x"
    assert (stats["forward"]["forwarded"], stats["reverse"]["forwarded"]) == (1, 1)


async def test_requests_and_their_inboxes_are_left_to_those_who_use_them(server: NatsServer, zenoh_url: str) -> None:
    plain = await nats.connect(server.url)
    inbox_of: list[str] = []

    async def answer(message: nats.aio.msg.Msg) -> None:
        inbox_of.append(message.reply)
        await message.respond(b"forty-two")

    try:
        await plain.subscribe("shop.quote", cb=answer)
        async with zbus.open(transport=zenoh_url) as node, receiving(node, "**") as at_node:
            async with zbus.Bridge((server.url, zenoh_url), ["**"], raw=True):
                reply = await plain.request("shop.quote", b"how much?", timeout=10)
                (event,) = await at_node.only(1)  # the request was published for all to hear; its answer was not

                later = await plain.subscribe(inbox_of[0])
                publisher = await node.publisher("/".join(inbox_of[0].split(".")))
                await publisher.publish(b"forged")
                with pytest.raises(nats.errors.TimeoutError):
                    await later.next_msg(timeout=0.7)
    finally:
        await plain.close()

    assert reply.data == b"forty-two"
    assert (event.key, event.payload) == ("shop/quote", b"how much?")


async def test_plain_zmq_messages_become_events_and_events_plain_messages(zenoh_url: str) -> None:
    theirs, ours = free_port(), free_port()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender, receiver = raw_socket(context, zmq.PUB), raw_socket(context, zmq.SUB, SUBSCRIBE=b"shop", RCVTIMEO=20_000)
    try:
        sender.bind(f"tcp://127.0.0.1:{theirs}")
        url = f"zmq://?connect=tcp://127.0.0.1:{theirs}&bind=tcp://127.0.0.1:{ours}&separator=."
        async with zbus.open(transport=zenoh_url) as node, receiving(node, "**") as at_node:
            async with zbus.Bridge((url, zenoh_url), ["shop/**"], raw=True) as bridge:
                receiver.connect(f"tcp://127.0.0.1:{ours}")
                async with asyncio.timeout(20):
                    while not at_node.events:  # a PUB socket drops what it sends before it is connected
                        sender.send_multipart([b"shop.orders", b"plain"])
                        await asyncio.sleep(0.05)
                await (await node.publisher("shop/prices")).publish(b"event", headers={"lost": "here"})
                message = await asyncio.to_thread(receiver.recv_multipart)
                await until(lambda: bridge.stats()["reverse"]["forwarded"] == 1)
        orders = [event for event in at_node.events if event.key == "shop/orders"]
        assert {event.payload for event in orders} == {b"plain"}
        assert [event.sequence for event in orders] == list(range(len(orders)))
        assert len(at_node.events) == len(orders) + 1  # the node hears itself; nothing else came
    finally:
        context.destroy(linger=0)
    assert message == [b"shop.prices", b"event"]


async def test_a_durable_bridge_keeps_what_plain_zmq_subscribers_miss_while_none_is_there(
    zenoh_url: str, tmp_path: Path
) -> None:
    ours, log = f"tcp://127.0.0.1:{free_port()}", tmp_path / "bridge.db"
    raw = f"zmq+raw://?bind={ours}&separator=."

    async def received(context: zmq.Context[zmq.Socket[bytes]], count: int) -> list[bytes]:
        receiver = raw_socket(context, zmq.SUB, SUBSCRIBE=b"shop", RCVTIMEO=20_000)
        receiver.connect(ours)
        try:
            return [(await asyncio.to_thread(receiver.recv_multipart))[1] for _ in range(count)]
        finally:
            receiver.close(0)

    with zmq.Context() as context:
        async with zbus.open(tmp_path / "node.db", transport=zenoh_url) as node:
            publisher = await node.publisher("shop/orders")
            async with zbus.Bridge((zenoh_url, raw), ["shop/**"], direction="forward", log=log) as bridge:
                assert "kept in the log" in bridge.promise
                assert "has no subscriber" in bridge.promise
                await publisher.publish_many([b"%d" % number for number in range(50)])
                await until(lambda: bridge.stats()["forward"]["pending_events"] == 50)
                assert bridge.stats()["forward"]["forwarded"] == 0
                before = await received(context, 50)
                await until(lambda: bridge.stats()["forward"]["forwarded"] == 50)
                await until(lambda: bridge.diagnostics()["links"][1]["subscriptions"] == 0)
                await publisher.publish_many([b"%d" % number for number in range(50, 100)])
                await until(lambda: bridge.stats()["forward"]["pending_events"] == 50)
            async with zbus.Bridge((zenoh_url, raw), ["shop/**"], direction="forward", log=log):  # and from its cursor
                after = await received(context, 50)

    assert before + after == [b"%d" % number for number in range(100)]


BRIDGE = """
    import asyncio, os, signal, sys, threading
    import zbus
    from zbus_log.log import SqliteLog
    from zbus_nats.consumer import Consumer

    url, zenoh_url, log, moment = sys.argv[1:]

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "received":
        # They are here, and never in the log; there is time enough for an acknowledgement that comes too early.
        SqliteLog.append = lambda *_: threading.Timer(0.5, die).start()
    elif moment == "stored":
        Consumer.acknowledge = die  # it is in the log, and not acknowledged

    async def main():
        async with zbus.Bridge((url, zenoh_url), ["shop/**"], direction="forward", log=log):
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.read)
    asyncio.run(main())
"""


@pytest.mark.parametrize("moment", ["received", "stored"])
async def test_a_stream_is_acknowledged_when_the_log_has_it_so_a_killed_bridge_neither_loses_nor_repeats(
    server: NatsServer, zenoh_url: str, tmp_path: Path, moment: str
) -> None:
    log = tmp_path / "bridge.db"
    url = server.url.replace("nats://", "nats+js://") + "/ORDERS?durable=bridge&ack_wait_s=1"
    program = [sys.executable, "-c", textwrap.dedent(BRIDGE), url, zenoh_url, str(log)]
    plain = await nats.connect(server.url)
    try:
        stream = plain.jetstream()
        await stream.add_stream(name="ORDERS", subjects=["shop.>"])
        for number in range(5):
            await stream.publish("shop.orders", b"%d" % number)

        killed = await asyncio.create_subprocess_exec(*program, moment, stdin=subprocess.PIPE)
        assert await asyncio.wait_for(killed.wait(), 30) == -signal.SIGKILL
        info = await stream.consumer_info("ORDERS", "bridge")
        assert info.ack_floor is not None
        assert info.ack_floor.stream_seq == 0  # nothing was acknowledged

        for number in range(5, 10):
            await stream.publish("shop.orders", b"%d" % number)
        async with (
            zbus.open(tmp_path / "node.db", transport=zenoh_url) as node,
            receiving(node, "shop/**", **PAST) as at_node,
        ):
            again = await asyncio.create_subprocess_exec(*program, "never", stdin=subprocess.PIPE)
            try:
                events = await at_node.wait(10)
                async with asyncio.timeout(20):
                    while (info := await stream.consumer_info("ORDERS", "bridge")).num_ack_pending or info.num_pending:
                        await asyncio.sleep(0.05)
            finally:
                again.stdin.close()  # type: ignore[union-attr]
                assert await asyncio.wait_for(again.wait(), 20) == 0
    finally:
        await plain.close()

    async with zbus.open(log, read_only=True) as reading:
        stored = [event async for event in reading.replay("**")]
    assert sorted(event.payload for event in stored) == [b"%d" % number for number in range(10)]
    assert sorted(event.sequence for event in stored) == list(range(1, 11))  # the stream's own
    assert len({event.publisher_id for event in stored}) == 1
    assert sorted(event.sequence for event in events) == list(range(1, 11))


async def test_events_go_into_a_stream_once_and_in_order_though_its_server_is_killed_meanwhile(
    server: NatsServer, zenoh_url: str, tmp_path: Path
) -> None:
    url = server.url.replace("nats://", "nats+js://") + "/ORDERS?durable=bridge"
    plain = await nats.connect(server.url, max_reconnect_attempts=-1, reconnect_time_wait=0.05)
    try:
        await plain.jetstream().add_stream(name="ORDERS", subjects=["shop.>"])
        async with zbus.open(tmp_path / "node.db", transport=zenoh_url) as node:
            publisher = await node.publisher("shop/orders")
            log = tmp_path / "bridge.db"
            async with zbus.Bridge((url, zenoh_url), ["shop/**"], direction="reverse", log=log) as bridge:
                for number in range(1000):
                    await publisher.publish(b"%d" % number)
                    if number == 300:
                        server.kill()
                    elif number == 700:
                        server.start()
                await until(lambda: bridge.stats()["reverse"]["forwarded"] == 1000)
        await plain.flush()
        stream = plain.jetstream()
        assert (await stream.stream_info("ORDERS")).state.messages == 1000
        stored = [await stream.get_msg("ORDERS", seq=number) for number in range(1, 1001)]
    finally:
        await plain.close()
    assert [message.data for message in stored] == [b"%d" % number for number in range(1000)]


async def test_a_stream_that_fills_while_the_bridge_is_away_crosses_whole_and_in_order(
    server: NatsServer, zenoh_url: str, tmp_path: Path
) -> None:
    url = server.url.replace("nats://", "nats+js://") + "/ORDERS?durable=bridge"
    plain = await nats.connect(server.url)
    try:
        stream = plain.jetstream()
        await stream.add_stream(name="ORDERS", subjects=["shop.>"])
        for number in range(300):
            await stream.publish("shop.orders", json.dumps({"n": number}).encode(), headers={"N": str(number)})
        async with (
            zbus.open(tmp_path / "node.db", transport=zenoh_url) as node,
            receiving(node, "shop/**", **PAST) as at_node,
        ):
            log = tmp_path / "bridge.db"
            async with zbus.Bridge((url, zenoh_url), ["shop/**"], direction="forward", log=log) as bridge:
                events = await at_node.only(300)
                await until(lambda: bridge.stats()["forward"]["forwarded"] == 300)
            for number in range(300, 400):
                await stream.publish("shop.orders", json.dumps({"n": number}).encode())
            async with zbus.Bridge((url, zenoh_url), ["shop/**"], direction="forward", log=log):
                events = await at_node.only(400)
    finally:
        await plain.close()
    assert [event.decode(dict)["n"] for event in events] == list(range(400))
    assert events[7].headers["n"] == "7"
