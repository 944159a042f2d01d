"""The ZMQ fabric, node to node: exact delivery, order, who hears whom, and a constant number of threads and sockets."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest
import zmq
from zmq_support import Collector, fabrics, raw_socket, until

import zbus
from zbus.config import BusConfig
from zbus.errors import TransportError
from zbus_zmq.address.topics import topic_of
from zbus_zmq.fabric import open_fabric
from zbus_zmq.find.discovery import NodeRecord
from zbus_zmq.find.lease import encode_lease, take_lease


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"zmq://?registry={tmp_path}"


def test_what_matches_arrives_once_and_in_order_and_nothing_else(url: str) -> None:
    collector = Collector()
    with fabrics(url) as (one, other):
        other.listen(["a/**", "a/*", "a/b", "x$*z/@y"], collector)
        frames = [("a/b", b"1"), ("ab/c", b"-"), ("a", b"2"), ("a/b/c", b"3"), ("a/@b", b"-"), ("xyz/@y", b"4")]
        one.send([*frames, ("xz/@y", b"5"), ("a/bc", b"6")])

        assert collector.wait(6) == [b"1", b"2", b"3", b"4", b"5", b"6"]
        assert collector.stays_at(6)


def test_a_node_does_not_hear_itself(url: str) -> None:
    received_here, received_there = Collector(), Collector()
    with fabrics(url) as (one, other):
        one.listen(["**"], received_here)
        other.listen(["**"], received_there)
        one.send([("a/b", b"from one")])
        other.send([("a/b", b"from other")])

        assert received_here.wait(1) == [b"from other"]
        assert received_there.wait(1) == [b"from one"]
        assert received_here.stays_at(1)


def test_system_keys_and_keys_of_every_kind_are_carried(url: str) -> None:
    collector = Collector()
    keys = ["@zbus/beacon/7", "a.b/c>d", "50%/é", "🙂/x", "@a/@b", "a b".replace(" ", "_"), "k" * 1024]
    with fabrics(url) as (one, other):
        other.listen(["@zbus/beacon/*", "**", "@a/@b"], collector)
        one.send([(key, key.encode()) for key in keys])

        assert collector.wait(len(keys)) == [key.encode() for key in keys]


def test_listening_to_something_else_replaces_what_was_listened_to(url: str) -> None:
    first, second = Collector(), Collector()
    with fabrics(url) as (one, other):
        other.listen(["a/**"], first)
        one.send([("a/x", b"1")])
        assert first.wait(1) == [b"1"]
        other.listen(["b/**"], second)
        one.send([("a/x", b"2"), ("b/x", b"3")])
        assert second.wait(1) == [b"3"]
        other.listen([], second)
        assert until(lambda: not one.ready("b/x"))
        one.send([("b/x", b"4")])

        assert first.stays_at(1)
        assert second.stays_at(1)


def test_listening_is_in_force_at_every_known_publisher_when_it_returns(url: str) -> None:
    with fabrics(url, 4) as (one, *others):
        for turn in range(20):
            collector = Collector()
            one.listen([f"t{turn}/*"], collector)
            for number, other in enumerate(others):
                other.send([(f"t{turn}/{number}", b"x")])

            assert len(collector.wait(3, 5)) == 3


def test_a_large_frame_arrives_whole_and_one_over_the_limit_is_counted(tmp_path: Path) -> None:
    collector = Collector()
    large = os.urandom(9_000_000)
    with fabrics(f"zmq://?registry={tmp_path}&max_message_bytes=9000000") as (one, other):
        other.listen(["**"], collector)
        one.send([("a", large), ("a", large + b"x"), ("a", b"after")])

        assert collector.wait(2) == [large, b"after"]
        assert one.diagnostics()["counts"]["frame_too_large"] == 1


def test_a_fabric_is_ready_for_a_key_when_somebody_wants_it(url: str) -> None:
    with fabrics(url) as (one, other):
        assert not one.ready("a/b")
        other.listen(["a/*"], Collector())
        assert one.ready("a/b")
        assert not one.ready("b/b")
        other.close()
        assert until(lambda: not one.ready("a/b"))


def test_the_first_frames_of_a_new_node_reach_those_that_were_there_before(url: str) -> None:
    collector = Collector()
    for number in range(5):
        with fabrics(url, 1) as (listener,):
            listener.listen(["a/**"], collector)
            started = open_fabric(BusConfig(), url)
            try:
                started.send([("a/b", b"%d" % number)])  # at once
                assert len(collector.wait(number + 1, 5)) == number + 1
            finally:
                started.close()

    assert collector.frames == [b"%d" % number for number in range(5)]


def test_a_node_that_does_not_respond_delays_the_first_frames_only_briefly(url: str, tmp_path: Path) -> None:
    from zbus_zmq.find.discovery import NodeRecord
    from zbus_zmq.find.lease import encode_lease, take_lease

    ghost = NodeRecord(node="ab" * 8, publish="tcp://127.0.0.1:1", requests="tcp://127.0.0.1:1")
    (tmp_path / f"{ghost.node}.json").write_bytes(encode_lease(take_lease("default", ghost, 3600)))
    fabric = open_fabric(BusConfig(), url)
    try:
        before = time.monotonic()
        fabric.send([("a/b", b"x")])
        first = time.monotonic() - before
        fabric.send([("a/b", b"y")])
        fabric.listen(["a"], Collector())
        before = time.monotonic()
        fabric.listen(["a"], Collector())
        again = time.monotonic() - before
    finally:
        fabric.close()

    assert first < 2.0
    assert again < 0.2  # it is known to be silent by now


def test_two_hundred_publishers_cost_no_thread_and_no_socket_more_than_one(url: str) -> None:
    collector = Collector()

    def usage() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with fabrics(url) as (one, other):
        other.listen(["p/**"], collector)
        one.send([("p/0", b"x")])
        collector.wait(1)
        before = usage()
        for number in range(200):
            one.send([(f"p/{number}", b"x")])
        assert len(collector.wait(201)) == 201
        after = usage()

    assert after == before


def test_events_of_several_publishers_are_merged_each_in_its_order(url: str) -> None:
    collector = Collector()
    with fabrics(url, 4) as (listener, *publishers):
        listener.listen(["m/*"], collector)

        def publish(number: int) -> None:
            for start in range(0, 500, 20):
                publishers[number].send([(f"m/{number}", b"%d %d" % (number, at)) for at in range(start, start + 20)])

        threads = [threading.Thread(target=publish, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        frames = collector.wait(1500)

    for number in range(3):
        assert [each for each in frames if each.startswith(b"%d " % number)] == [
            b"%d %d" % (number, at) for at in range(500)
        ]


def test_a_closed_fabric_refuses_and_closing_twice_is_safe_and_quick(url: str) -> None:
    with fabrics(url) as (one, other):
        before = time.monotonic()
        other.close()
        other.close()
        assert time.monotonic() - before < 10.0
        with pytest.raises(TransportError):
            other.send([("a", b"x")])
        with pytest.raises(TransportError):
            other.listen(["a"], Collector())
        with pytest.raises(TransportError):
            other.serve(["a"], lambda request: None)
        with pytest.raises(TransportError):
            other.request("a", b"", lambda reply: None, 1.0)
        assert not other.ready("a")
        one.send([("a", b"nobody is left")])


def test_what_was_sent_just_before_closing_still_arrives(url: str) -> None:
    collector = Collector()
    with fabrics(url) as (one, other):
        other.listen(["**"], collector)
        for start in range(0, 2000, 100):
            one.send([("a", b"%d" % number) for number in range(start, start + 100)])
        one.close()

        assert collector.wait(2000) == [b"%d" % number for number in range(2000)]


def test_what_a_node_sends_after_its_lease_is_gone_still_arrives(url: str, tmp_path: Path) -> None:
    collector = Collector()
    with (
        zmq.Context() as context,
        raw_socket(context, zmq.XPUB, RCVTIMEO=20_000) as publisher,
        fabrics(url, 1) as (here,),
    ):
        publisher.bind("tcp://127.0.0.1:*")
        leaving = NodeRecord(node="ab" * 8, publish=publisher.get_string(zmq.LAST_ENDPOINT))
        lease = tmp_path / f"{leaving.node}.json"
        lease.write_bytes(encode_lease(take_lease("default", leaving, 3600)))
        here.listen(["a/b"], collector)
        while publisher.recv()[1:] != topic_of("a/b"):
            pass  # its marks
        assert until(lambda: leaving.node in here._nodes)

        lease.unlink()
        assert until(lambda: leaving.node not in here._nodes)
        publisher.send_multipart([topic_of("a/b"), b"the last one"])

        assert collector.wait(1) == [b"the last one"]
        assert until(lambda: here.diagnostics()["connections"] == 0)


def test_a_fabric_that_cannot_be_opened_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(Exception, match="registry"):
        open_fabric(BusConfig(), f"zmq://?registry={tmp_path}/file")

    assert not [each for each in threading.enumerate() if each.name.startswith("zbus-zmq")]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_receiver_that_fails_is_counted_and_the_next_frame_arrives(url: str) -> None:
    collector = Collector()

    def receive(frame: bytes, done: object) -> None:
        if frame == b"bad":
            raise ValueError("a bug above")
        collector(frame)

    with fabrics(url) as (one, other):
        other.listen(["**"], receive)
        one.send([("a", b"1"), ("a", b"bad"), ("a", b"2")])

        assert collector.wait(2) == [b"1", b"2"]
        assert other.diagnostics()["counts"]["io_failed"] == 1


async def test_two_hundred_publishers_of_a_bus_cost_hardly_a_thread_or_a_socket_more_than_one(url: str) -> None:
    def usage() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    async with zbus.open(transport=url) as here, zbus.open(transport=url) as there:
        async with there.subscribe("p/**") as subscription:
            first = await here.publisher("p/0")
            await first.publish(b"x")
            async with asyncio.timeout(20):
                assert (await anext(subscription)).key == "p/0"
                before = usage()
                for number in range(1, 200):
                    await (await here.publisher(f"p/{number}")).publish(b"x")
                keys = [(await anext(subscription)).key for _ in range(199)]
            after = usage()

    assert keys == [f"p/{number}" for number in range(1, 200)]
    assert after[0] <= before[0] + 4
    assert after[1] <= before[1] + 4
