"""Plain ZMQ programs beside zbus: their messages become events, and events become their messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zmq_support import Collector, raw_socket, until

from zbus.config import BusConfig
from zbus.errors import ConfigInvalid, KeyInvalid, TransportError, TransportUnsupported
from zbus.event import Event
from zbus.wire.envelope import encode, join, unpack
from zbus_zmq.raw import open_fabric


class Legacy:
    """A program that publishes and subscribes with bare sockets."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.pub = raw_socket(self.context, zmq.XPUB)
        self.pub.bind("tcp://127.0.0.1:*")
        self.endpoint = self.pub.get_string(zmq.LAST_ENDPOINT)
        self.sub = raw_socket(self.context, zmq.SUB)

    def close(self) -> None:
        self.pub.close()
        self.sub.close()
        self.context.term()

    def await_subscriber(self) -> None:
        assert self.pub.poll(10_000)
        self.pub.recv()


@pytest.fixture
def legacy() -> Iterator[Legacy]:
    made = Legacy()
    yield made
    made.close()


@contextmanager
def opened(url: str) -> Iterator[Any]:
    fabric = open_fabric(BusConfig(), url)
    try:
        yield fabric
    finally:
        fabric.close()


def events(frames: list[bytes]) -> list[Event]:
    return [event for frame in frames for event in unpack(frame)]


def test_plain_messages_become_events_with_an_identity_per_topic(legacy: Legacy) -> None:
    collector = Collector()
    before = time.time_ns()
    with opened(f"zmq+raw://?connect={legacy.endpoint}") as fabric:
        fabric.listen(["shop/**"], collector)
        legacy.await_subscriber()
        for topic, payload in ((b"shop/a", b"1"), (b"shop/b", b"2"), (b"shop/a", b"3"), (b"shopping", b"-")):
            legacy.pub.send_multipart([topic, payload])
        legacy.pub.send_multipart([b"shop", b"4"])
        made = events(collector.wait(4))

    assert [(event.key, event.sequence, event.payload) for event in made] == [
        ("shop/a", 0, b"1"),
        ("shop/b", 0, b"2"),
        ("shop/a", 1, b"3"),
        ("shop", 0, b"4"),
    ]
    assert made[0].publisher_id == made[2].publisher_id != made[1].publisher_id
    assert all(0 <= event.publisher_id < 1 << 53 and event.published_at >= before for event in made)


def test_two_starts_make_different_identities(legacy: Legacy) -> None:
    ids = set()
    for _ in range(2):
        collector = Collector()
        with opened(f"zmq+raw://?connect={legacy.endpoint}") as fabric:
            fabric.listen(["a"], collector)
            legacy.await_subscriber()
            legacy.pub.send_multipart([b"a", b"x"])
            ids.add(events(collector.wait(1))[0].publisher_id)
        legacy.await_subscriber()  # it unsubscribes

    assert len(ids) == 2


def test_events_become_plain_messages_for_those_who_subscribe(legacy: Legacy) -> None:
    with opened("zmq+raw://?bind=tcp://127.0.0.1:*&separator=.") as fabric:
        legacy.sub.set(zmq.SUBSCRIBE, b"shop.")
        legacy.sub.connect(fabric.endpoint)
        assert until(lambda: fabric.ready("shop/orders"))
        assert not fabric.ready("audit/x")
        first, second = (Event(7, number, 1, "shop/orders", b"%d" % number) for number in (0, 1))
        fabric.send(
            [("shop/orders", join([encode(first), encode(second)])), ("audit", encode(Event(7, 2, 1, "audit", b"")))]
        )
        fabric.send([("shop/a%20b", encode(Event(8, 0, 1, "shop/a%20b", b"spaced")))])

        received = [legacy.sub.recv_multipart() for _ in range(3)]

    assert received == [[b"shop.orders", b"0"], [b"shop.orders", b"1"], [b"shop.a b", b"spaced"]]


def test_what_was_made_here_is_never_sent_back(legacy: Legacy) -> None:
    collector = Collector()
    with opened(f"zmq+raw://?connect={legacy.endpoint}&bind=tcp://127.0.0.1:*") as fabric:
        legacy.sub.set(zmq.SUBSCRIBE, b"")
        legacy.sub.connect(fabric.endpoint)
        fabric.listen(["**"], collector)
        legacy.await_subscriber()
        assert until(lambda: fabric.ready("a"))
        legacy.pub.send_multipart([b"a", b"from legacy"])
        (frame,) = collector.wait(1)
        fabric.send([("a", frame)])
        fabric.send([("a", encode(Event(7, 0, 1, "a", b"from elsewhere")))])

        assert legacy.sub.recv_multipart() == [b"a", b"from elsewhere"]
        assert fabric.diagnostics()["counts"]["echo_suppressed"] == 1


def test_a_message_in_one_frame_is_a_topic_a_space_and_a_payload(legacy: Legacy) -> None:
    collector = Collector()
    with opened(f"zmq+raw://?connect={legacy.endpoint}&bind=tcp://127.0.0.1:*&layout=single") as fabric:
        fabric.listen(["**"], collector)
        legacy.sub.set(zmq.SUBSCRIBE, b"")
        legacy.sub.connect(fabric.endpoint)
        legacy.await_subscriber()
        assert until(lambda: fabric.ready("a"))
        legacy.pub.send(b"weather/berlin 21 degrees")
        legacy.pub.send(b"nothing-follows")
        (event,) = events(collector.wait(1))
        for key in ("weather/a%20b", "weather/paris"):
            fabric.send([(key, encode(Event(7, 0, 1, key, b"22 degrees")))])

        assert (event.key, event.payload) == ("weather/berlin", b"21 degrees")
        assert legacy.sub.recv_multipart() == [b"weather/paris 22 degrees"]
        assert fabric.diagnostics()["counts"] == {"invalid_frame_count": 1, "key_without_topic": 1}


def test_other_frame_counts_illegal_topics_and_keys_are_counted(legacy: Legacy) -> None:
    collector = Collector()
    with opened(f"zmq+raw://?connect={legacy.endpoint}&bind=tcp://127.0.0.1:*&separator=.") as fabric:
        fabric.listen(["**"], collector)
        legacy.await_subscriber()
        for message in ([b"a"], [b"a", b"b", b"c"], [b"a..b", b"x"], [b"\xff", b"x"], [b"", b"x"], [b"good", b"x"]):
            legacy.pub.send_multipart(message)
        assert [event.key for event in events(collector.wait(1))] == ["good"]
        fabric.send([("v1.2", encode(Event(7, 0, 1, "v1.2", b""))), ("x", b"\x09not a frame")])
        fabric.check("good/key")
        with pytest.raises(KeyInvalid, match="separator"):
            fabric.check("v1.2")

        assert fabric.diagnostics()["counts"] == {
            "invalid_frame_count": 2,
            "invalid_topic": 3,
            "key_without_topic": 1,
            "frame_not_events": 1,
        }


def test_no_plain_message_makes_a_gap_in_what_follows(legacy: Legacy) -> None:
    collector = Collector()
    with opened(f"zmq+raw://?connect={legacy.endpoint}") as fabric:
        fabric.listen(["good"], collector)
        legacy.await_subscriber()
        expected = [0]
        part = st.sampled_from([b"good", b"", b"\xff", b"good/x"]) | st.binary(max_size=8)

        @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(part, min_size=1, max_size=4))
        def send(parts: list[bytes]) -> None:
            legacy.pub.send_multipart(parts)
            expected[0] += len(parts) == 2 and parts[0] == b"good"
            legacy.pub.send_multipart([b"good", b"after"])
            expected[0] += 1

        send()
        made = events(collector.wait(expected[0]))

    assert [event.sequence for event in made] == list(range(expected[0]))


def test_it_can_connect_to_a_bound_subscriber(legacy: Legacy) -> None:
    legacy.sub.set(zmq.SUBSCRIBE, b"")
    legacy.sub.bind("tcp://127.0.0.1:*")
    with opened(f"zmq+raw://?publish={legacy.sub.get_string(zmq.LAST_ENDPOINT)}") as fabric:
        assert until(lambda: legacy.sub.poll(1) or fabric.ready("a"))  # libzmq subscribes in calls alone
        fabric.send([("a", encode(Event(7, 0, 1, "a", b"x")))])

        assert legacy.sub.recv_multipart() == [b"a", b"x"]


def test_events_without_a_subscriber_are_counted_if_no_log_keeps_them(legacy: Legacy) -> None:
    with opened("zmq+raw://?bind=tcp://127.0.0.1:*") as fabric:
        fabric.send([("a", encode(Event(7, number, 1, "a", b""))) for number in range(3)])
        legacy.sub.set(zmq.SUBSCRIBE, b"a")
        legacy.sub.connect(fabric.endpoint)
        assert until(lambda: fabric.ready("a"))
        fabric.send([(key, encode(Event(7, 9, 1, key, b""))) for key in ("b", "a")])

        assert legacy.sub.recv_multipart() == [b"a", b""]
        assert fabric.diagnostics()["counts"] == {"no_subscribers": 3, "no_interest": 1}


def test_with_a_log_nothing_is_sent_without_subscribers_nor_counted_twice(legacy: Legacy) -> None:
    fabric = open_fabric(BusConfig(log="any.db"), "zmq+raw://?bind=tcp://127.0.0.1:*&separator=.")
    page = [(key, encode(Event(7, 0, 1, key, key.encode()))) for key in ("v1.2", "a")]
    try:
        with pytest.raises(TransportError, match="no subscriber; nothing was sent"):
            fabric.send(page)
        fabric.send(page[:1])  # it cannot be received: there is no topic for it
        legacy.sub.set(zmq.SUBSCRIBE, b"a")
        legacy.sub.connect(fabric.endpoint)
        assert until(lambda: fabric.ready("a"))
        fabric.send(page)
        assert legacy.sub.recv_multipart() == [b"a", b"a"]
        assert fabric.diagnostics()["counts"] == {"key_without_topic": 2}

        legacy.sub.close()
        assert until(lambda: not fabric.ready("a"))
        with pytest.raises(TransportError, match="no subscriber"):
            fabric.send(page)
    finally:
        fabric.close()


def test_a_socket_that_only_receives_keeps_nothing_waiting(legacy: Legacy) -> None:
    fabric = open_fabric(BusConfig(log="any.db"), f"zmq+raw://?connect={legacy.endpoint}")
    try:
        fabric.send([("a", encode(Event(7, 0, 1, "a", b"")))])
        assert fabric.diagnostics()["counts"] == {"no_subscribers": 1}
    finally:
        fabric.close()


def test_requests_are_refused_by_name_and_a_closed_fabric_refuses_to_send(legacy: Legacy) -> None:
    with opened(f"zmq+raw://?connect={legacy.endpoint}&bind=tcp://127.0.0.1:*") as fabric:
        assert fabric.events_only
        with pytest.raises(TransportUnsupported, match=r"zmq\+raw"):
            fabric.request("a", b"", lambda reply: None, 1.0)
        with pytest.raises(TransportUnsupported, match=r"zmq\+raw"):
            fabric.serve(["a"], lambda request: None)
        fabric.serve([], lambda request: None)
    with pytest.raises(TransportError):
        fabric.send([("a", encode(Event(7, 0, 1, "a", b"x")))])
    fabric.close()


@pytest.mark.parametrize(
    "query", ["", "?connect=nowhere", "?bind=tcp://h:1&publish=tcp://h:2", "?connect=tcp://h:1&x=1"]
)
def test_options_that_are_wrong_are_refused(query: str) -> None:
    with pytest.raises(ConfigInvalid):
        open_fabric(BusConfig(), f"zmq+raw://{query}")
