"""The NATS fabric over a real server: delivery, large frames, requests, hostile input."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import nats
import pytest
from nats_support import Collected, NatsServer, nats_server, wait_for

from zbus.config import BusConfig
from zbus.errors import ConfigInvalid, KeyInvalid, TransportError
from zbus.ports.fabric import Fabric, IncomingRequest
from zbus_nats.fabric import NatsFabric, open_fabric

Open = Callable[..., NatsFabric]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats")) as running:
        yield running


@pytest.fixture
def opened(server: NatsServer) -> Iterator[Open]:
    fabrics: list[Fabric] = []

    def open_one(**options: str) -> NatsFabric:
        fabric = open_fabric(BusConfig(options=options), server.url)
        assert isinstance(fabric, NatsFabric)
        fabrics.append(fabric)
        return fabric

    yield open_one
    for fabric in fabrics:
        fabric.close()


def plain(server: NatsServer, commands: bytes) -> bytes:
    """Speak NATS by hand, as a hostile or broken program would; return what the server said until its PONG."""
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=10)) as raw:
        raw.sendall(b'CONNECT {"verbose":false,"headers":true}\r\n' + commands + b"PING\r\n")
        said = b""
        while b"PONG" not in said:
            more = raw.recv(65536)
            if not more:
                break
            said += more
        return said


def test_a_frame_arrives_once_however_many_expressions_match(opened: Open) -> None:
    here, there = opened(), opened()
    came = Collected()
    there.listen(["a/**", "a/*", "*/b", "a/b", "a$*/b", "**/b"], came)

    here.send([("a/b", b"1"), ("x/b", b"2"), ("a", b"3"), ("x/y", b"no"), ("a/@b", b"no"), ("end/b", b"4")])

    assert came.wait(4) == [b"1", b"2", b"3", b"4"]


def test_keys_of_the_system_and_strange_ones_are_carried(opened: Open) -> None:
    here, there = opened(), opened()
    came = Collected()
    keys = ["@zbus/beacon/7", "a.b/c", "a/>", "a%2Eb", "über/🚀", "_INBOX/x", "a/@b/c", "x" * 1000, "ü" * 500]
    there.listen(keys, came)

    here.send([(key, key.encode()) for key in keys])

    assert came.wait(len(keys)) == [key.encode() for key in keys]


def test_a_node_does_not_hear_itself(opened: Open) -> None:
    here, there = opened(), opened()
    mine, theirs = Collected(), Collected()
    here.listen(["**"], mine)
    there.listen(["**"], theirs)

    here.send([("a", b"from here")])
    there.send([("b", b"from there")])

    assert theirs.wait(1) == [b"from here"]
    assert mine.wait(1) == [b"from there"]


def test_a_frame_of_twenty_megabytes_is_split_and_put_together_and_keeps_its_place(opened: Open) -> None:
    here, there = opened(), opened()
    came = Collected()
    there.listen(["big/**"], came)
    large = bytes(range(256)) * 80_000

    here.send([("big/a", b"before"), ("big/a", large), ("big/a", b"after")])

    assert came.wait(3, 60) == [b"before", large, b"after"]
    assert there.diagnostics()["counts"] == {}


def test_while_what_is_listened_to_changes_nothing_is_lost_or_out_of_order(opened: Open) -> None:
    here, there = opened(), opened()
    came = Collected()
    there.listen(["flow/*"], came)
    stop = threading.Event()
    sent = 0

    def flow() -> None:
        nonlocal sent
        while not stop.is_set():
            came.wait(sent - 2_000)  # not faster than it is received: NATS would cut the receiver off
            here.send([("flow/a", b"%d" % (sent + each)) for each in range(10)])
            sent += 10

    flowing = threading.Thread(target=flow)
    flowing.start()
    try:
        for number in range(60):
            there.listen(["flow/**", "other"] if number % 2 else ["flow/*", f"other/{number}"], came)
        there.listen(["**"], came)
    finally:
        stop.set()
        flowing.join()

    wait_for(lambda: came.items[-1:] == [b"%d" % (sent - 1)], 60)
    firsts = list(dict.fromkeys(came.items))
    assert firsts == [b"%d" % number for number in range(sent)]
    # A server that is kept from its processor may deal out a message to the old subscription long after the new one
    # is there: such a copy comes twice, and the node knows it by its identity.
    assert len(came.items) - sent <= 10


def test_nothing_is_received_after_listening_to_nothing(opened: Open) -> None:
    here, there = opened(), opened()
    came, fence = Collected(), Collected()
    there.listen(["a"], came)
    there.listen([], came)
    here.send([("a", b"no")])
    there.listen(["b"], fence)
    here.send([("b", b"yes")])

    assert fence.wait(1) == [b"yes"]
    assert came.items == []


def test_a_burst_is_not_dropped_by_a_slow_receiver(opened: Open) -> None:
    here, there = opened(), opened()
    came = Collected()

    def slow(frame: bytes, done: Callable[[], None] | None) -> None:
        if not came.items:
            time.sleep(1.0)  # nats-py would queue behind this, and drop beyond its limits
        came(frame)

    there.listen(["burst"], slow)
    for start in range(0, 100_000, 1_000):
        here.send([("burst", b"%d" % (start + each)) for each in range(1_000)])

    assert came.wait(100_000, 60) == [b"%d" % number for number in range(100_000)]


def test_a_receiver_that_raises_is_counted_and_the_next_frame_arrives(opened: Open) -> None:
    here, there = opened(), opened()
    came = Collected()

    def raises_first(frame: bytes, done: Callable[[], None] | None) -> None:
        came(frame)
        if len(came.items) == 1:
            raise RuntimeError("a bug")

    there.listen(["a"], raises_first)
    here.send([("a", b"1"), ("a", b"2")])

    assert came.wait(2) == [b"1", b"2"]
    assert there.diagnostics()["counts"] == {"receiver_failed": 1}


def test_hostile_subjects_and_headers_are_counted_and_what_follows_arrives(
    server: NatsServer, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    there = opened()
    came = Collected()
    there.listen(["**"], came)
    with caplog.at_level(logging.WARNING, "zbus"):
        for _ in range(50):
            plain(server, b"PUB a%2Fb 1\r\nx\r\nPUB \xff\xfe 1\r\nx\r\nPUB a* 1\r\nx\r\nPUB a$b 1\r\nx\r\n")
        part = b"NATS/1.0\r\nZbus-Part: nonsense\r\n\r\n"
        plain(server, b"HPUB ok %d %d\r\n%b\r\n" % (len(part), len(part), part))
        plain(server, b"HPUB ok 12 12\r\nNATS/1.0\r\n\r\n\r\n")
        plain(server, b"PUB ok 2\r\nok\r\n")

    assert came.wait(2) == [b"", b"ok"]
    counts = there.diagnostics()["counts"]
    assert counts == {"subject_malformed": 200, "part_malformed": 1}
    reports = [each for each in caplog.records if "subject_malformed" in each.getMessage()]
    assert len(reports) == 4, "once for each source, not for each message"


@pytest.mark.parametrize("key", ["a\r\nPUB b 1\r\nx\r\n", "a b", "a\nb", "", "a/*", "a/**", "a//b"])
def test_a_key_cannot_inject_a_command(opened: Open, key: str) -> None:
    here = opened()

    with pytest.raises(KeyInvalid):
        here.send([(key, b"x")])
    with pytest.raises(KeyInvalid):
        here.request(key, b"x", lambda reply: None, 1.0)


def test_a_payload_cannot_inject_a_command(opened: Open) -> None:
    here, there = opened(), opened()
    came = Collected()
    there.listen(["a", "b"], came)
    payload = b"x\r\nPUB b 1\r\ny\r\n"

    here.send([("a", payload), ("a", b"end")])

    assert came.wait(2) == [payload, b"end"]


def test_no_responders_is_known_at_once(opened: Open) -> None:
    here = opened()
    received = Collected()
    start = time.monotonic()

    here.request("nobody/there", b"?", received, 30.0)

    assert received.wait(1) == [None]
    assert time.monotonic() - start < 15


def test_replies_come_in_order_then_the_end_and_large_ones_in_one_piece(opened: Open) -> None:
    here, there = opened(), opened()
    large = bytes(3_000_000)

    def answer(request: IncomingRequest) -> None:
        def work() -> None:
            request.reply(request.key.encode() + b" " + request.payload)
            request.reply(large)
            for number in range(500):
                request.reply(b"%d" % number)
            request.close()
            request.close()

        threading.Thread(target=work).start()

    there.serve(["ask/me", "@zbus/log/7"], answer)
    received = Collected()
    here.request("@zbus/log/7", b"from 5", received, 30.0)

    assert received.wait(503) == [b"@zbus/log/7 from 5", large, *(b"%d" % number for number in range(500)), None]
    assert here.diagnostics()["requests_pending"] == 0


def _say_ok(request: IncomingRequest) -> None:
    request.reply(b"ok")
    request.close()


def test_a_request_larger_than_the_server_takes_reaches_one_of_several(opened: Open) -> None:
    here = opened()
    others = [opened() for _ in range(3)]
    asked = Collected()

    def answer(request: IncomingRequest) -> None:
        asked(request.payload)
        threading.Thread(target=_say_ok, args=(request,)).start()

    for other in others:
        other.serve(["ask"], answer)
    large = bytes(range(256)) * 12_000
    received = Collected()

    here.request("ask", large, received, 30.0)

    assert received.wait(2) == [b"ok", None]
    assert asked.items == [large]


def test_no_end_within_the_time_ends_it(opened: Open) -> None:
    here, there = opened(), opened()
    requests: list[IncomingRequest] = []
    there.serve(["silent"], requests.append)
    received = Collected()

    here.request("silent", b"?", received, 0.3)

    assert received.wait(1) == [None]
    requests[0].reply(b"too late")
    wait_for(lambda: here.diagnostics()["counts"].get("reply_late") == 1)
    assert received.items == [None]


def test_one_who_asks_no_longer_hears_no_more(opened: Open) -> None:
    here, there = opened(), opened()
    requests: list[IncomingRequest] = []
    there.serve(["held"], requests.append)
    received = Collected()
    asking = here.request("held", b"?", received, 30.0)
    wait_for(lambda: requests)

    asking.close()
    asking.close()
    requests[0].reply(b"no")
    wait_for(lambda: here.diagnostics()["counts"].get("reply_late") == 1)

    assert received.items == []


def test_a_node_that_no_longer_serves_gets_no_request(opened: Open) -> None:
    here, there = opened(), opened()
    there.serve(["a", "b"], lambda request: request.close())
    there.serve(["b"], lambda request: request.close())
    received = Collected()

    start = time.monotonic()
    here.request("a", b"?", received, 30.0)
    here.request("b", b"?", received, 30.0)

    assert received.wait(2) == [None, None]
    assert time.monotonic() - start < 10


def test_a_request_cannot_send_the_reply_to_a_subject_of_choice(server: NatsServer, opened: Open) -> None:
    there = opened()
    asked = Collected()
    there.serve(["a"], lambda request: asked(request.payload))

    plain(server, b"PUB @ask.a shop.orders 1\r\nx\r\nPUB @ask.a 1\r\nx\r\n")
    wait_for(lambda: there.diagnostics()["counts"].get("request_without_inbox") == 2)

    assert asked.items == []


def test_replies_of_others_are_not_events_even_to_one_who_listens_to_all(server: NatsServer, opened: Open) -> None:
    there, fence = opened(), opened()
    came = Collected()
    there.listen(["**"], came)

    plain(server, b"PUB _INBOX.abc.1 1\r\nx\r\nPUB @ask.a 1\r\nx\r\nPUB $X.y 1\r\nx\r\n")
    fence.send([("a", b"fence")])

    assert came.wait(1) == [b"fence"]
    assert there.diagnostics()["counts"]["subject_unmapped"] >= 3


def test_no_server_at_first_is_reported_within_the_time(server: NatsServer) -> None:
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(TransportError, match="connection refused"):
            open_fabric(BusConfig(options={"connect_timeout_s": "0.5"}), f"nats://127.0.0.1:{port}")
        assert time.monotonic() - start < 15


def test_one_that_takes_the_connection_and_says_nothing_is_given_up() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as mute:
        start = time.monotonic()
        with pytest.raises(TransportError, match="did not reply in time"):
            open_fabric(BusConfig(options={"connect_timeout_s": "0.5"}), f"nats://127.0.0.1:{mute.getsockname()[1]}")
        assert time.monotonic() - start < 15


def test_of_several_servers_one_that_answers_is_found(server: NatsServer) -> None:
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"nats://127.0.0.1:{unused.getsockname()[1]},127.0.0.1:{server.port}"
        fabric = open_fabric(BusConfig(), url)

        assert fabric.diagnostics()["server"] == f"127.0.0.1:{server.port}"
        fabric.close()


def test_a_session_or_a_stream_is_not_for_this_transport(server: NatsServer) -> None:
    with pytest.raises(ConfigInvalid, match="session"):
        open_fabric(BusConfig(), server.url, object())
    with pytest.raises(ConfigInvalid, match=r"nats\+js"):
        open_fabric(BusConfig(), f"{server.url}/STREAM")


def test_after_close_every_call_says_so_and_close_again_is_fine(opened: Open) -> None:
    fabric = opened()
    fabric.close()
    fabric.close()

    for call in (
        lambda: fabric.send([("a", b"x")]),
        lambda: fabric.listen(["a"], lambda frame, done: None),
        lambda: fabric.serve(["a"], lambda request: None),
        lambda: fabric.request("a", b"x", lambda reply: None, 1.0),
    ):
        with pytest.raises(TransportError):
            call()
    assert not fabric.ready("a")
    assert fabric.diagnostics()["connected"] is False


def test_what_was_sent_before_close_arrives(opened: Open) -> None:
    here, there = opened(), opened()
    came = Collected()
    there.listen(["a"], came)
    for start in range(0, 20_000, 1_000):
        here.send([("a", b"%d" % (start + each)) for each in range(1_000)])

    here.close()

    assert came.wait(20_000) == [b"%d" % number for number in range(20_000)]


async def test_another_programs_client_reads_the_frame_as_it_is(server: NatsServer, opened: Open) -> None:
    client = await nats.connect(server.url)
    subscription = await client.subscribe("shop.orders%2Eeu")
    await client.flush()
    here = await asyncio.to_thread(opened)

    await asyncio.to_thread(here.send, [("shop/orders.eu", b"\x01frame")])

    assert (await subscription.next_msg(5)).data == b"\x01frame"
    await client.close()


def test_what_the_server_does_not_permit_is_counted_and_reported(tmp_path: Path) -> None:
    config = 'authorization { users: [{user: u, password: p, permissions: {publish: "ok.>", subscribe: "ok.>"}}] }'
    with nats_server(tmp_path, config=config) as strict:
        fabric = open_fabric(BusConfig(), f"nats://u:p@127.0.0.1:{strict.port}")
        fabric.send([("no/a", b"x"), ("ok/a", b"x")])
        fabric.listen(["no/**"], lambda frame, done: None)

        wait_for(lambda: fabric.diagnostics()["counts"].get("permission_denied", 0) >= 2)
        assert fabric.ready("ok/a")
        fabric.close()
