"""Bad input on the event sockets: counted by reason, reported rarely, and later messages arrive."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mesh_fakes import recorded
from zmq_support import Collector, fabrics, raw_socket, until

from zbus.observe.counters import Counters
from zbus_zmq.address.options import ZmqOptions
from zbus_zmq.address.topics import topic_of
from zbus_zmq.broker import Broker
from zbus_zmq.carry import subscribers
from zbus_zmq.carry.subscribers import Subscribers
from zbus_zmq.find.discovery import NodeRecord
from zbus_zmq.find.lease import encode_lease, take_lease
from zbus_zmq.io import io_thread
from zbus_zmq.io.io_thread import IoThread
from zbus_zmq.io.sockets import SUBSCRIPTION_BYTES_MAX

GOOD = topic_of("a/b")


class Rogues:
    """Bare sockets of a test."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.sockets: list[Any] = []

    def socket(self, kind: int) -> Any:
        self.sockets.append(raw_socket(self.context, kind))
        return self.sockets[-1]


@pytest.fixture
def rogues() -> Iterator[Rogues]:
    made = Rogues()
    yield made
    for each in made.sockets:
        each.close()
    made.context.term()


def rogue_publisher(rogues: Rogues, folder: Path, name: str = "cd" * 8) -> Any:
    """A bare XPUB socket that is announced like a node, once somebody listens to it."""
    socket = rogues.socket(zmq.XPUB)
    socket.bind("tcp://127.0.0.1:*")
    endpoint = socket.get_string(zmq.LAST_ENDPOINT)
    node = NodeRecord(node=name, publish=endpoint, requests="tcp://127.0.0.1:1")
    (folder / f"{node.node}.json").write_bytes(encode_lease(take_lease("default", node, 3600)))
    while True:
        assert socket.poll(10_000)
        if socket.recv()[:2] != b"\x01\xff":  # not the mark of a node, but what it listens to
            return socket


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ([GOOD], "invalid_frame_count"),
        ([b"x"], "invalid_topic"),
        ([b""], "invalid_topic"),
        ([b"a/b"], "invalid_topic"),
        ([GOOD, b"x", b"y"], "invalid_frame_count"),
        ([GOOD, *[b"y"] * 500], "invalid_frame_count"),
        ([b"a/%zz/\0", b"x"], "invalid_topic"),
        ([b"a/" * 3000 + b"\0", b"x"], "invalid_topic"),
        ([b"\xff\xfe", b"x"], "invalid_mark"),
    ],
)
def test_a_malformed_message_is_counted_and_the_next_one_arrives(
    tmp_path: Path, rogues: Rogues, message: list[bytes], reason: str
) -> None:
    collector = Collector()
    with fabrics(f"zmq://?registry={tmp_path}", 1) as (here,):
        here.listen(["**"], collector)
        rogue = rogue_publisher(rogues, tmp_path)
        if reason == "invalid_mark":
            message = [b"\xff" + here.node.encode() + b".0", b"not a node!"]
        for _ in range(2):  # before the topic is known, and after
            rogue.send_multipart(message)
            rogue.send_multipart([GOOD, b"good"])

        assert collector.wait(2) == [b"good", b"good"]
        assert here.diagnostics()["counts"][reason] >= (1 if reason == "invalid_mark" else 2)


def test_no_sequence_of_messages_makes_a_gap_in_what_follows(tmp_path: Path, rogues: Rogues) -> None:
    collector = Collector()
    part = st.sampled_from([GOOD, b"", b"\xff", topic_of("x"), b"a/"]) | st.binary(max_size=20)
    with fabrics(f"zmq://?registry={tmp_path}", 1) as (here,):
        here.listen(["a/**"], collector)
        rogue = rogue_publisher(rogues, tmp_path)
        expected = []

        @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(part, min_size=1, max_size=4))
        def send(parts: list[bytes]) -> None:
            rogue.send_multipart(parts)
            if len(parts) == 2 and parts[0] == GOOD:
                expected.append(parts[1])
            rogue.send_multipart([GOOD, b"%d" % len(expected)])
            expected.append(b"%d" % len(expected))

        send()

        assert collector.wait(len(expected)) == expected


def test_a_message_over_the_limit_is_never_taken_and_others_still_arrive(tmp_path: Path, rogues: Rogues) -> None:
    collector = Collector()
    with fabrics(f"zmq://?registry={tmp_path}&max_message_bytes=1000") as (here, other):
        here.listen(["**"], collector)
        rogue = rogue_publisher(rogues, tmp_path)
        rogue.send_multipart([GOOD, b"x" * 100_000])
        other.send([("a/b", b"good")])

        assert collector.wait(1) == [b"good"]
        assert until(lambda: here.diagnostics()["counts"].get("disconnected", 0) > 0)
        assert collector.stays_at(1)


def test_rubbish_is_reported_once_a_minute_however_much_there_is(
    tmp_path: Path, rogues: Rogues, caplog: pytest.LogCaptureFixture
) -> None:
    with fabrics(f"zmq://?registry={tmp_path}", 1) as (here,), caplog.at_level(logging.WARNING, "zbus"):
        here.listen(["**"], Collector())
        rogue = rogue_publisher(rogues, tmp_path)
        for _ in range(100):
            rogue.send_multipart([b"rubbish"])
        assert until(lambda: here.diagnostics()["counts"].get("invalid_topic") == 100)

    assert sum("TRANSPORT_INPUT_REJECTED" in record.getMessage() for record in caplog.records) == 1


def test_each_program_that_sends_rubbish_is_named_so_that_none_hides_another(
    tmp_path: Path, rogues: Rogues, caplog: pytest.LogCaptureFixture
) -> None:
    with fabrics(f"zmq://?registry={tmp_path}", 1) as (here,), caplog.at_level(logging.WARNING, "zbus"):
        here.listen(["**"], Collector())
        publishers = [rogue_publisher(rogues, tmp_path, name) for name in ("cd" * 8, "ef" * 8)]
        for publisher in publishers:
            publisher.send_multipart([b"rubbish"])
            publisher.send_multipart([b"rubbish"])
        assert until(lambda: here.diagnostics()["counts"].get("invalid_topic") == 4)
        subscribers, clients = ([rogues.socket(kind) for _ in range(2)] for kind in (zmq.XSUB, zmq.DEALER))
        for kind, each in [*(("publish", each) for each in subscribers), *(("requests", each) for each in clients)]:
            each.connect(here.diagnostics()[kind])
            for _ in range(2):
                each.send(b"\x07rubbish")
        assert until(lambda: here.diagnostics()["counts"].get("subscription_invalid") == 4)
        assert until(lambda: here.diagnostics()["counts"].get("request_invalid") == 4)

    reported = [each.getMessage() for each in caplog.records if "TRANSPORT_INPUT_REJECTED" in each.getMessage()]
    assert sorted("invalid_topic" in each for each in reported) == [False] * 4 + [True] * 2
    for publisher in publishers:
        endpoint = publisher.get_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        assert sum(f"source='{endpoint}'" in each for each in reported) == 1
    assert len({each.partition("source=")[2].split()[0] for each in reported}) == 6


def test_what_a_subscriber_should_not_send_is_counted(tmp_path: Path, rogues: Rogues) -> None:
    collector = Collector()
    with fabrics(f"zmq://?registry={tmp_path}") as (here, other):
        other.listen(["a/**"], collector)
        rogue = rogues.socket(zmq.XSUB)
        rogue.connect(here.diagnostics()["publish"])
        rogue.send(b"\x01")
        assert until(lambda: here.ready("anything"))
        for message in ([b"\x02hello"], [b"\x01\xff\xff"], [b"hello", b"world"]):
            rogue.send_multipart(message)
        assert until(lambda: here.diagnostics()["counts"].get("subscription_invalid", 0) >= 2)
        here.send([("a/b", b"good")])

        assert collector.wait(1) == [b"good"]


def test_an_announcement_with_an_endpoint_that_is_none_is_counted_and_tried_again(tmp_path: Path) -> None:
    collector = Collector()
    for number, endpoint in enumerate(["nonsense", "ipc:///tmp/x", "tcp://", "tcp://127.0.0.1:99999", ""]):
        node = NodeRecord(node=f"{number:016x}", publish=endpoint, requests=endpoint, serves=("svc/a",))
        (tmp_path / f"{node.node}.json").write_bytes(encode_lease(take_lease("default", node, 3600)))
    from zbus.config import BusConfig
    from zbus_zmq.fabric import open_fabric

    here, other = (open_fabric(BusConfig(), f"zmq://?registry={tmp_path}") for _ in range(2))
    try:
        here.listen(["a/**"], collector)
        assert until(lambda: here.diagnostics()["counts"].get("connect_failed", 0) >= 8)
        other.send([("a/b", b"good")])
        assert collector.wait(1) == [b"good"]
    finally:
        here.close()
        other.close()


@pytest.mark.parametrize("side", ["node", "broker"])
def test_a_subscription_longer_than_any_topic_is_never_taken_and_others_are(
    tmp_path: Path, rogues: Rogues, side: str
) -> None:
    """libzmq keeps a subscription in about 50 times its size, and any stranger may send one."""
    with ExitStack() as opened:
        if side == "node":
            fabric = opened.enter_context(fabrics(f"zmq://?registry={tmp_path}", 1))[0]
            endpoint = fabric.diagnostics()["publish"]
        else:
            options = ZmqOptions(max_message_bytes=64 << 20)
            broker = Broker("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", options)
            opened.callback(broker.close)
            endpoint = broker.xpub

        def subscriptions() -> int:
            found = fabric.diagnostics() if side == "node" else broker.report()
            return int(found["subscriptions"])

        rogue = rogues.socket(zmq.SUB)
        rogue.subscribe(b"t" * (SUBSCRIPTION_BYTES_MAX + 1))
        rogue.connect(endpoint)
        honest = rogues.socket(zmq.SUB)
        honest.subscribe(topic_of("/".join(["é" * 7] * 64)))  # one of the longest
        honest.connect(endpoint)

        assert until(lambda: subscriptions() == 1)
        time.sleep(0.2)
        assert subscriptions() == 1


def test_prefixes_are_bounded_by_their_bytes_and_what_is_unsubscribed_makes_room(
    monkeypatch: pytest.MonkeyPatch, rogues: Rogues
) -> None:
    monkeypatch.setattr(subscribers, "KEPT_BYTES_MAX", 10)
    found = Subscribers(rogues.socket(zmq.XPUB), "", Counters("zmq"))

    assert [found._take_prefix(prefix, True) for prefix in (b"a" * 6, b"a" * 6, b"b" * 6, b"c" * 4)] == [
        True,
        True,
        False,
        True,
    ]
    assert found._take_prefix(b"a" * 6, False)
    assert found._take_prefix(b"b" * 6, True)


def test_an_i_o_thread_that_is_busy_for_long_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_thread, "BUSY_S", 0.01)
    counts = Counters("zmq")
    thread = IoThread("zbus-zmq-test", counts)

    def work() -> None:
        begun = time.thread_time()
        while time.thread_time() - begun < 0.02:
            pass

    try:
        with recorded() as records:
            thread.post(work)
            assert until(lambda: counts.snapshot().get("io_busy") == 1)
    finally:
        thread.close(5.0)
    assert [(each["record"], each["code"]) for each in records] == [("TRANSPORT_ERROR", "io_busy")]
