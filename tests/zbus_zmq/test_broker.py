"""`zbus broker`: events through it, several side by side, killed and restarted, and what it says."""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zmq_support import Collector, Replies, broker_process, children, fabrics, raw_socket, until

from zbus.config import BusConfig
from zbus.errors import TransportError
from zbus_zmq.address.options import ZmqOptions
from zbus_zmq.broker import Broker
from zbus_zmq.fabric import open_fabric


def url_of(folder: Path, *readies: dict[str, Any]) -> str:
    xsub, xpub = (";".join(ready[name] for ready in readies) for name in ("xsub", "xpub"))
    return f"zmq://broker?registry={folder}&xsub={xsub}&xpub={xpub}"


@contextmanager
def broker_here(**options: Any) -> Iterator[Broker]:
    """A broker in this process."""
    made = Broker("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", ZmqOptions(**{"max_message_bytes": 1 << 24} | options))
    try:
        yield made
    finally:
        made.close()


def seen_twice(listener: Any) -> int:
    return int(listener.diagnostics()["counts"].get("duplicate", 0))


def warm_up(publisher: Any, listener: Any, key: str) -> None:
    """Until frames of a publisher reach the listener through two brokers."""
    before = seen_twice(listener)

    def both() -> bool:
        publisher.send([(key, b"warm")])
        return seen_twice(listener) > before

    assert until(both)


def without_warm(frames: list[bytes]) -> list[bytes]:
    return [frame for frame in frames if frame != b"warm"]


def test_what_matches_crosses_the_broker_once_and_in_order(tmp_path: Path) -> None:
    collector, own = Collector(), Collector()
    with broker_process() as (_, ready), fabrics(url_of(tmp_path, ready)) as (one, other):
        one.listen(["**"], own)
        other.listen(["a/**", "a/b"], collector)
        assert until(lambda: one.ready("a/b"))
        for start in range(0, 5000, 50):
            one.send([("a/b", b"%d" % number) for number in range(start, start + 50)])
        one.send([("b", b"not wanted"), ("a", b"last")])

        assert collector.wait(5001) == [*[b"%d" % number for number in range(5000)], b"last"]
        assert own.stays_at(0)  # the broker brings back what we sent, and it is left out


def test_events_cross_between_processes_and_late_ones_join(tmp_path: Path) -> None:
    with broker_process() as (_, ready), children() as start:
        url = url_of(tmp_path, ready)
        collector = Collector()
        with fabrics(url, 1) as (here,):
            here.listen(["a/**"], collector)
            for number in range(3):
                child = start("publish", url, "a/b")
                child.say(f"child {number}")  # its first frame, at once
                assert len(collector.wait(number + 1)) == number + 1
            late = start("listen", url, "a/**")
            late.wait_for("ready")
            assert until(lambda: here.ready("a/b"))
            here.send([("a/b", b"welcome")])
            late.wait_for("frame welcome")

    assert collector.frames == [b"child 0", b"child 1", b"child 2"]


def test_through_two_brokers_nothing_arrives_twice_and_the_order_is_kept(tmp_path: Path) -> None:
    collector = Collector()
    with broker_process() as (_, one_ready), broker_process() as (_, two_ready):
        with fabrics(url_of(tmp_path, one_ready, two_ready), 3) as (one, two, listener):
            listener.listen(["a/**"], collector)
            warm_up(one, listener, "a/1")
            warm_up(two, listener, "a/2")
            before = seen_twice(listener)
            for start in range(0, 3000, 30):
                for name, each in (("a/1", one), ("a/2", two)):
                    each.send([(name, f"{name} {number}".encode()) for number in range(start, start + 30)])
            assert until(lambda: len(without_warm(collector.frames)) >= 6000)
            assert until(lambda: seen_twice(listener) - before >= 6000)
            frames = without_warm(collector.frames)

    for name in ("a/1", "a/2"):
        mine = [frame.decode() for frame in frames if frame.startswith(name.encode())]
        assert mine == [f"{name} {number}" for number in range(3000)]


def test_what_one_broker_dropped_is_taken_from_the_other_though_it_comes_late(tmp_path: Path) -> None:
    collector = Collector()
    context: zmq.Context[Any] = zmq.Context()
    brokers = [raw_socket(context, zmq.XPUB) for _ in range(2)]
    try:
        for each in brokers:
            each.bind("tcp://127.0.0.1:*")
        readies = [{"xsub": "tcp://127.0.0.1:1", "xpub": each.get_string(zmq.LAST_ENDPOINT)} for each in brokers]
        with fabrics(url_of(tmp_path, *readies), 1) as (listener,):
            listener.listen(["a/**"], collector)
            for each in brokers:
                while each.poll(10_000) and each.recv() != b"\x01a/":
                    pass  # the mark of a node

            def carry(broker: Any, *numbers: int) -> None:
                before = len(collector.frames) + seen_twice(listener)
                for number in numbers:
                    broker.send_multipart([b"a/b/\0", b"sender-1" + number.to_bytes(8), b"%d" % number])
                assert until(lambda: len(collector.frames) + seen_twice(listener) == before + len(numbers))

            one, other = brokers
            carry(one, 6)  # 5 was on its way before the subscription was here, or was dropped
            carry(other, 5, 6)
            carry(one, 7, 9)
            carry(other, 7, 8, 9)
            carry(one, 5, 8)

        assert collector.frames == [b"6", b"5", b"7", b"9", b"8"]
    finally:
        context.destroy(linger=0)


def test_when_one_of_two_brokers_is_killed_nothing_is_missing(tmp_path: Path) -> None:
    collector = Collector()
    with broker_process() as (first, one_ready), broker_process() as (_, two_ready):
        with fabrics(url_of(tmp_path, one_ready, two_ready)) as (one, listener):
            listener.listen(["a/**"], collector)
            warm_up(one, listener, "a/b")
            for number in range(2000):
                one.send([("a/b", b"%d" % number)])
                if number == 700:
                    first.kill()
            assert until(lambda: len(without_warm(collector.frames)) >= 2000)
            assert until(lambda: one.diagnostics()["brokers_connected"] == 1)

    assert without_warm(collector.frames) == [b"%d" % number for number in range(2000)]


def test_while_no_broker_is_there_sending_says_so_and_goes_on_after_its_restart(tmp_path: Path) -> None:
    collector = Collector()
    with broker_process() as (process, ready), fabrics(url_of(tmp_path, ready)) as (one, listener):
        listener.listen(["a/**"], collector)
        assert until(lambda: one.ready("a/b"))
        one.send([("a/b", b"0")])
        assert collector.wait(1) == [b"0"]
        for number in (1, 2, 3):
            process.kill()
            process.wait(10)
            assert until(lambda: one.diagnostics()["brokers_connected"] == 0)
            assert not one.ready("a/b")
            with pytest.raises(TransportError, match="no broker"):
                one.send([("a/b", b"nobody carries it")])
            sender = threading.Thread(target=send_again_and_again, args=(one, b"%d" % number))
            sender.start()  # it sends at the very moment that the broker is back, and waits for the subscriber, too
            with broker_process("--xsub", ready["xsub"], "--xpub", ready["xpub"]) as (process, _):
                sender.join(20)
                assert len(collector.wait(number + 1)) == number + 1

    assert collector.frames == [b"0", b"1", b"2", b"3"]


def send_again_and_again(fabric: Any, frame: bytes) -> None:
    """As a send queue does."""
    for _ in range(20):
        try:
            fabric.send([("a/b", frame)])
            return
        except TransportError:
            continue


def test_without_any_broker_a_fabric_opens_waits_and_closes_in_time(tmp_path: Path) -> None:
    url = f"zmq://broker?registry={tmp_path}&xsub=tcp://127.0.0.1:1&xpub=tcp://127.0.0.1:1"
    before = time.monotonic()
    fabric = open_fabric(BusConfig(), url)
    try:
        with pytest.raises(TransportError, match="no broker"):
            fabric.send([("a", b"x")])
        fabric.listen(["**"], Collector())
    finally:
        fabric.close()

    assert time.monotonic() - before < 5.0


def test_requests_go_directly_though_events_go_through_the_broker(tmp_path: Path) -> None:
    with broker_process() as (process, ready), fabrics(url_of(tmp_path, ready)) as (one, other):
        other.serve(["svc/x"], lambda request: (request.reply(b"yes"), request.close()))  # type: ignore[func-returns-value]
        process.kill()
        replies = Replies()
        one.request("svc/x", b"", replies, 5.0)

        assert replies.wait() == [b"yes"]


def test_the_broker_reports_subscriptions_and_rates(tmp_path: Path) -> None:
    with (
        broker_process("--report-interval", "0.2", "--json") as (process, ready),
        fabrics(url_of(tmp_path, ready)) as (one, two),
    ):
        two.listen(["a/**", "b/**"], Collector())
        assert until(lambda: one.ready("a/b"))
        one.send([("a/b", b"x" * 100)] * 100)
        assert process.stdout is not None
        reports = []
        while not reports or reports[-1]["messages"] < 100:
            reports.append(json.loads(process.stdout.readline()))

    last = reports[-1]
    assert last["subscriptions"] == 2
    assert last["nodes"] == 2
    assert last["messages_per_s"] > 0
    assert last["bytes"] > 10_000


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_broker_with_code_0(number: signal.Signals) -> None:
    with broker_process() as (process, ready):
        assert ready["ready"] is True
        process.send_signal(number)

        assert process.wait(10) == 0


def test_a_port_that_is_taken_or_an_endpoint_that_is_none_is_an_error() -> None:
    import subprocess
    import sys

    zbus = str(Path(sys.executable).with_name("zbus"))
    with broker_here() as running:
        taken = subprocess.run([zbus, "broker", "--xsub", running.xsub], capture_output=True, text=True, timeout=60)
    wrong = subprocess.run([zbus, "broker", "--xpub", "nowhere"], capture_output=True, text=True, timeout=60)

    assert (taken.returncode, wrong.returncode) == (1, 2)
    assert "in use" in taken.stderr
    assert "tcp://127.0.0.1:5555" in wrong.stderr


def test_a_stuck_subscriber_of_the_broker_does_not_stop_the_others(tmp_path: Path) -> None:
    collector = Collector()
    context: zmq.Context[Any] = zmq.Context()
    with broker_here(hwm=50, stall_s=0.2) as running:
        stuck = raw_socket(context, zmq.SUB, SUBSCRIBE=b"", RCVHWM=1, RCVBUF=4096)
        stuck.connect(running.xpub)
        with fabrics(url_of(tmp_path, {"xsub": running.xsub, "xpub": running.xpub})) as (one, listener):
            listener.listen(["a/**"], collector)
            assert until(lambda: one.ready("a/b") and running.report()["subscriptions"] >= 1)
            payload = b"x" * 20_000
            for number in range(1000):
                one.send([("a/b", b"%d " % number + payload)])
            frames = collector.wait(1000)
            counts = running.report()["counts"]
        stuck.close()
        context.term()

    assert [int(frame.split()[0]) for frame in frames] == list(range(1000))
    assert counts["subscriber_stuck"] >= 1


def test_a_message_of_any_shape_passes_the_broker_and_rubbish_upstream_is_counted(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    collector = Collector()
    with (
        broker_here() as running,
        fabrics(url_of(tmp_path, {"xsub": running.xsub, "xpub": running.xpub})) as (one, two),
    ):
        two.listen(["**"], collector)
        legacy = raw_socket(context, zmq.SUB, SUBSCRIBE=b"legacy")
        rogue_sub, rogue_pub = raw_socket(context, zmq.XSUB), raw_socket(context, zmq.XPUB)
        try:
            legacy.connect(running.xpub)
            rogue_sub.connect(running.xpub)
            rogue_pub.connect(running.xsub)
            rogue_sub.send(b"\x05hello")
            assert until(lambda: running.report()["counts"].get("subscription_invalid", 0) == 1)
            assert rogue_pub.poll(5000)
            assert until(lambda: running.report()["subscriptions"] >= 2)
            for message in ([b"legacy"], [b"legacy", b"1", b"2", b"3", b"4"], [b"a/b/\0", b"short stamp", b"x"]):
                rogue_pub.send_multipart(message)
            one.send([("a/b", b"good")])

            assert [legacy.recv_multipart() for _ in range(2)] == [[b"legacy"], [b"legacy", b"1", b"2", b"3", b"4"]]
            assert collector.wait(1) == [b"good"]
            assert until(lambda: two.diagnostics()["counts"].get("invalid_stamp") == 1)
        finally:
            for each in (legacy, rogue_sub, rogue_pub):
                each.close()
            context.term()


def test_no_message_of_a_broker_makes_a_gap_in_what_follows(tmp_path: Path) -> None:
    collector = Collector()
    context: zmq.Context[Any] = zmq.Context()
    broker = raw_socket(context, zmq.XPUB)
    broker.bind("tcp://127.0.0.1:*")
    ready = {"xsub": "tcp://127.0.0.1:1", "xpub": broker.get_string(zmq.LAST_ENDPOINT)}
    topic, numbers = b"a/b/\0", itertools.count()
    part = st.sampled_from([topic, b"", b"\xff", b"sender-0" + bytes(8)]) | st.binary(max_size=20)
    try:
        with fabrics(url_of(tmp_path, ready, ready | {"xpub": "tcp://127.0.0.1:1"}), 1) as (listener,):
            listener.listen(["a/**"], collector)
            while broker.poll(10_000) and broker.recv() != b"\x01a/":
                pass  # the mark of a node
            expected: list[bytes] = []
            seen: set[bytes] = set()

            @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
            @given(st.lists(part, max_size=4))
            def send(parts: list[bytes]) -> None:
                broker.send_multipart([topic, *parts])
                if len(parts) == 2 and len(parts[0]) == 16 and parts[0] not in seen:
                    seen.add(parts[0])
                    expected.append(parts[1])
                number = next(numbers).to_bytes(8)
                broker.send_multipart([topic, b"sender-1" + number, number])
                expected.append(number)

            send()

            assert collector.wait(len(expected)) == expected
            assert listener.diagnostics()["counts"]["invalid_frame_count"] > 0
            assert "io_failed" not in listener.diagnostics()["counts"]
    finally:
        context.destroy(linger=0)
