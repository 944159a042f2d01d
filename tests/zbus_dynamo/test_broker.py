"""The Dynamo wire through ZMQ brokers, against a peer and a broker that know nothing of zbus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from dynamo_peer import Broker, ZmqPublisher, ZmqSubscriber, closing_all, message, subject, zmq_context
from dynamo_support import Receiver, frame
from log_support import wait_until

from zbus.config import BusConfig
from zbus.errors import ConfigInvalid, TransportError
from zbus_dynamo.settings import ZmqSettings, zmq_settings
from zbus_dynamo.zmq_plane import DynamoZmq, open_fabric

PLACES = [("ns", "t"), ("ns", "worker", "kv-events"), ("ns", "worker", "gen", "a.b>")]


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq_context() as made:
        yield made


@pytest.fixture
def keep(context: zmq.Context[Any]) -> Iterator[Callable[[Any], Any]]:
    with closing_all() as kept:
        yield kept


@pytest.fixture
def brokers(context: zmq.Context[Any], keep: Any) -> list[Broker]:
    return [keep(Broker(context)) for _ in range(2)]


def through(keep: Any, *brokers: Broker) -> DynamoZmq:
    xsub, xpub = ";".join(each.xsub for each in brokers), ";".join(each.xpub for each in brokers)
    made: DynamoZmq = keep(open_fabric(BusConfig(), f"zmq://broker?xsub={xsub}&xpub={xpub}"))
    return made


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("names", PLACES)
def test_what_zbus_sends_reaches_a_dynamo_subscriber(
    context: Any, keep: Any, brokers: list[Broker], names: tuple[str, ...], count: int
) -> None:
    used = brokers[:count]
    subscriber = keep(ZmqSubscriber(context, names, tuple(each.xpub for each in used)))
    fabric = through(keep, *used)
    wait_until(lambda: fabric.ready("/".join(names)))

    fabric.send([frame("/".join(names), n, b"%d" % n, 5) for n in range(100)])
    received = subscriber.drained()

    assert {(each["publisher_id"], each["sequence"], each["payload"]) for each in received} == {
        (5, n, b"%d" % n) for n in range(100)
    }
    assert len(received) <= 100 * count  # a subscriber of several brokers removes the copies itself


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("names", PLACES)
def test_what_a_dynamo_publisher_sends_arrives_once_however_many_brokers_there_are(
    context: Any, keep: Any, brokers: list[Broker], names: tuple[str, ...], count: int
) -> None:
    used = brokers[:count]
    receiver, fabric = Receiver(), through(keep, *used)
    fabric.listen(["ns/**"], receiver)
    publisher = keep(ZmqPublisher(context, names, tuple(each.xsub for each in used)))
    _publish_until_received(publisher, receiver)
    start = publisher.sequence

    for _ in range(200):
        publisher.publish(b"x")
    received = receiver.drained()

    assert [event.sequence for event in received] == list(range(start, start + 200))
    assert {event.key for event in received} == {"/".join(names)}


def test_a_node_does_not_hear_itself_and_two_nodes_hear_each_other(keep: Any, brokers: list[Broker]) -> None:
    one, two, first, second = through(keep, *brokers), through(keep, *brokers), Receiver(), Receiver()
    one.listen(["ns/**"], first)
    two.listen(["ns/**"], second)
    wait_until(lambda: one.ready("ns/t") and two.ready("ns/t"))

    one.send([frame("ns/t", n, publisher_id=1) for n in range(500)])
    two.send([frame("ns/t", n, publisher_id=2) for n in range(500)])

    assert [event.identity for event in second.drained()] == [(1, n) for n in range(500)]
    assert [event.identity for event in first.drained()] == [(2, n) for n in range(500)]


def test_no_broker_is_an_error_and_a_late_one_is_found(context: Any, keep: Any) -> None:
    gone = Broker(context)
    xsub, xpub = gone.xsub, gone.xpub
    gone.close()
    fabric = keep(open_fabric(BusConfig(), f"zmq://broker?xsub={xsub}&xpub={xpub}"))
    assert not fabric.ready("ns/t")
    with pytest.raises(TransportError, match="no broker"):
        fabric.send([frame("ns/t")])
    receiver = Receiver()
    fabric.listen(["ns/t"], receiver)

    late = keep(Broker(context, xsub, xpub))
    subscriber = keep(ZmqSubscriber(context, ("ns", "t"), (late.xpub,)))
    publisher = keep(ZmqPublisher(context, ("ns", "t"), (late.xsub,)))
    _publish_until_received(publisher, receiver)
    wait_until(lambda: fabric.ready("ns/t"))
    fabric.send([frame("ns/t", publisher_id=4711)])

    assert 4711 in {each["publisher_id"] for each in subscriber.drained()}


def test_bad_messages_are_counted_by_reason_reported_with_their_sender_and_what_follows_arrives(
    context: Any, keep: Any, brokers: list[Broker], caplog: pytest.LogCaptureFixture
) -> None:
    receiver, fabric = Receiver(), through(keep, brokers[0])
    fabric.listen(["ns/**"], receiver)
    publisher = keep(ZmqPublisher(context, ("ns", "t"), (brokers[0].xsub,)))
    _publish_until_received(publisher, receiver)

    caplog.clear()
    publisher.socket.send_multipart([b"namespace.ns.t", b"rubbish"])
    publisher.socket.send_multipart(message("namespace.ns.%zz", 9, 0, "%zz", b""))
    publisher.socket.send_multipart(message(subject("ns", "t"), 9, 1, "other", b""))
    publisher.socket.send_multipart([b"namespace.ns.\xff", *message("x", 9, 2, "t", b"")[1:]])
    publisher.socket.send_multipart(message(subject("ns", "t"), 10, 1, "other", b""))  # another one who does it
    publisher.socket.send_multipart(message(subject("ns", "t"), 9, 3, "t", b"good"))

    while receiver.next().payload != b"good":
        pass
    assert fabric.diagnostics()["counts"] == {"invalid_frame_count": 1, "invalid_subject": 2, "topic_mismatch": 2}
    reported = [each.getMessage() for each in caplog.records if "topic_mismatch" in each.getMessage()]
    assert len(reported) == 2
    assert "namespace.ns.t of 0000000000000009" in reported[0]
    assert "namespace.ns.t of 000000000000000a" in reported[1]


def test_brokers_are_named_by_url_options_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = (("tcp://a:1", "tcp://b:1"), ("tcp://a:2",))
    assert zmq_settings("zmq://broker?xsub=tcp://a:1;tcp://b:1&xpub=tcp://a:2", {})[3:] == brokers
    assert zmq_settings("zmq", {"xsub": "tcp://a:1; tcp://b:1", "xpub": "tcp://a:2"})[3:] == brokers

    monkeypatch.setenv("DYN_ZMQ_BROKER_URL", "xsub=tcp://a:1;tcp://b:1 , xpub=tcp://a:2")

    assert zmq_settings("zmq", {})[3:] == brokers
    assert zmq_settings("zmq://127.0.0.1", {})[3:] == ((), ())


def test_where_to_listen_and_what_to_tell_comes_from_the_url(tmp_path: Path) -> None:
    found = zmq_settings(f"zmq://0.0.0.0?advertise=10.1.2.3&store={tmp_path}", {})

    assert found == ZmqSettings("*", "10.1.2.3", tmp_path)
    assert zmq_settings("zmq", {"store": str(tmp_path)}) == ZmqSettings("127.0.0.1", "127.0.0.1", tmp_path)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("zmq://0.0.0.0", "advertise"),
        ("zmq://127.0.0.1:5555", "without a port"),
        ("zmq://broker", "two sides"),
        ("zmq://broker?xsub=tcp://a:1", "two sides"),
        ("zmq://broker?xsub=a&xpub=b", "written like"),
        ("zmq://?colour=blue", "colour"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(ConfigInvalid, match=reason):
        zmq_settings(url, {})


@pytest.mark.parametrize("given", ["xsub=tcp://a:1", "tcp://a:1,tcp://b:2", "xsub=,xpub=", "xsub=a , xpub=b"])
def test_an_environment_that_makes_no_sense_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_ZMQ_BROKER_URL", given)

    with pytest.raises(ConfigInvalid):
        zmq_settings("zmq", {})


def test_brokers_from_discovery_are_not_followed_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_ZMQ_BROKER_ENABLED", "true")

    with pytest.raises(ConfigInvalid, match="DYN_ZMQ_BROKER_URL"):
        zmq_settings("zmq", {})


def _publish_until_received(publisher: ZmqPublisher, receiver: Receiver) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        publisher.publish(b"hello")
        if receiver.drained(0.1):
            receiver.drained(0.2)
            return
    raise AssertionError("nothing was heard")
