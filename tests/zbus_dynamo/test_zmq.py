"""The Dynamo wire over ZMQ, direct from process to process, against a peer that knows nothing of zbus."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from dynamo_peer import Records, ZmqPublisher, ZmqSubscriber, closing_all, message, zmq_context
from dynamo_support import AT_NS, Receiver, frame
from free_ports import free_port
from log_support import wait_until
from mesh_fakes import recorded

from zbus.config import BusConfig
from zbus.errors import TransportError, TransportUnsupported
from zbus_dynamo import direct
from zbus_dynamo.zmq_plane import DynamoZmq, open_fabric

PLACES = [("ns", "t"), ("ns", "worker", "kv-events"), ("ns", "worker", "gen", "a.b>")]


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq_context() as made:
        yield made


@pytest.fixture
def keep(context: zmq.Context[Any]) -> Iterator[Callable[[Any], Any]]:
    """Close what a test opened before the context ends."""
    with closing_all() as kept:
        yield kept


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "kv")


@pytest.fixture
def opened(tmp_path: Path, keep: Callable[[Any], Any]) -> Callable[[], DynamoZmq]:
    """Open a fabric on the store of this test."""
    return lambda: keep(open_fabric(BusConfig(payload_bytes_max=100_000), f"zmq://?store={tmp_path / 'kv'}"))


def publisher(context: Any, records: Records, keep: Any, *names: str, old: bool = False) -> tuple[ZmqPublisher, Path]:
    made = keep(ZmqPublisher(context, names))
    return made, records.add(names, made.publisher_id, made.endpoint, old=old)


@pytest.mark.parametrize("names", PLACES)
def test_what_zbus_sends_reaches_a_dynamo_subscriber_from_its_first_event_on(
    opened: Any, context: Any, records: Records, keep: Any, names: tuple[str, ...]
) -> None:
    subscriber = keep(ZmqSubscriber(context, names, records))
    fabric = opened()

    fabric.send([frame("/".join(names), n, b"\x00\xff%d" % n, 12345) for n in range(100)])

    assert [subscriber.next() for _ in range(100)] == [
        {
            "publisher_id": 12345,
            "sequence": n,
            "published_at": AT_NS // 1_000_000,
            "topic": names[-1],
            "payload": b"\x00\xff%d" % n,
        }
        for n in range(100)
    ]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("names", PLACES)
def test_what_a_dynamo_publisher_of_either_generation_sends_arrives(
    opened: Any, context: Any, records: Records, keep: Any, names: tuple[str, ...], old: bool
) -> None:
    if old and len(names) == 4:
        names = ("other", "t2")  # there were no endpoint scopes then
    receiver, fabric = Receiver(), opened()
    fabric.listen(["/".join(names)], receiver)
    made, _ = publisher(context, records, keep, *names, old=old)
    wait_until(lambda: fabric.diagnostics()["connections"].get(made.endpoint))

    received = _publish_until_received(made, receiver)

    assert (received.key, received.payload, received.publisher_id) == ("/".join(names), b"hello", made.publisher_id)


def test_a_publisher_that_was_there_before_is_connected_when_listen_returns(
    opened: Any, context: Any, records: Records, keep: Any
) -> None:
    made, _ = publisher(context, records, keep, "ns", "t")
    receiver, fabric = Receiver(), opened()
    wait_until(lambda: fabric.diagnostics()["records_seen"] == 1)

    fabric.listen(["**"], receiver)

    assert fabric.diagnostics()["connections"] == {made.endpoint: True}


def test_publishers_come_and_go_and_are_merged(opened: Any, context: Any, records: Records, keep: Any) -> None:
    receiver, fabric = Receiver(), opened()
    fabric.listen(["ns/**"], receiver)
    made = [publisher(context, records, keep, "ns", f"w{n % 3}", "t", old=n % 2 == 1) for n in range(6)]
    wait_until(lambda: sum(fabric.diagnostics()["connections"].values()) == 6)

    for each, _ in made:
        assert _publish_until_received(each, receiver).publisher_id == each.publisher_id
    for each, path in made[:5]:
        path.unlink()
        each.close()
    wait_until(lambda: list(fabric.diagnostics()["connections"]) == [made[5][0].endpoint])
    receiver.drained(0.1)

    assert _publish_until_received(made[5][0], receiver).publisher_id == made[5][0].publisher_id


def test_what_is_on_its_way_when_a_record_disappears_still_arrives(
    opened: Any, context: Any, records: Records, keep: Any
) -> None:
    receiver, fabric = Receiver(), opened()
    fabric.listen(["ns/t"], receiver)
    made, path = publisher(context, records, keep, "ns", "t")
    wait_until(lambda: fabric.diagnostics()["connections"].get(made.endpoint))
    _publish_until_received(made, receiver)

    path.unlink()
    wait_until(lambda: fabric.diagnostics()["records_seen"] == 0)
    made.publish(b"the last one")

    while receiver.next().payload != b"the last one":
        pass
    wait_until(lambda: not fabric.diagnostics()["connections"])


def test_the_record_of_a_process_that_died_is_removed_and_its_connection_given_up(
    opened: Any, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_dynamo.registry.TOUCH_S", 0.2)
    receiver, fabric = Receiver(), opened()
    fabric.listen(["ns/t"], receiver)
    path = records.add(("ns", "t"), 1, "tcp://127.0.0.1:9")
    wait_until(lambda: fabric.diagnostics()["connections"] == {"tcp://127.0.0.1:9": False})

    os.utime(path, (time.time() - 11, time.time() - 11))

    wait_until(lambda: not path.exists())
    wait_until(lambda: fabric.diagnostics()["connections"] == {})


def test_events_of_a_process_killed_and_replaced_arrive_again_and_the_dead_one_is_given_up(
    opened: Any, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_dynamo.registry.TOUCH_S", 0.2)
    receiver, fabric = Receiver(), opened()
    fabric.listen(["ns/t"], receiver)
    with _child(records, 1) as first:
        assert receiver.next().publisher_id == 1
        first.kill()
        first.wait(20)
        receiver.drained(0.2)
    (left,) = records.directory.iterdir()

    with _child(records, 2):
        assert receiver.next().identity == (2, 0)
        os.utime(left, (time.time() - 11, time.time() - 11))
        wait_until(lambda: [each["instance_id"] for each in records.read()] == [2])
        wait_until(lambda: list(fabric.diagnostics()["connections"].values()) == [True])
    assert [event.publisher_id for event in receiver.drained() if event.publisher_id != 2] == []


def test_events_of_a_publisher_that_starts_late_arrive(opened: Any, context: Any, records: Records, keep: Any) -> None:
    receiver, fabric = Receiver(), opened()
    fabric.listen(["ns/t"], receiver)
    made = keep(ZmqPublisher(context, ("ns", "t")))
    made.socket.unbind(made.endpoint)
    endpoint = f"tcp://127.0.0.1:{free_port()}"  # a socket that connects is never given this port
    records.add(("ns", "t"), made.publisher_id, endpoint)
    wait_until(lambda: fabric.diagnostics()["connections"] == {endpoint: False})

    made.socket.bind(endpoint)

    assert _publish_until_received(made, receiver).publisher_id == made.publisher_id


def test_a_topic_that_only_begins_alike_and_a_scope_that_was_not_requested_stay_out(
    opened: Any, context: Any, records: Records, keep: Any
) -> None:
    receiver, fabric = Receiver(), opened()
    fabric.listen(["ns/w/kv"], receiver)
    wanted, _ = publisher(context, records, keep, "ns", "w", "kv")
    other, _ = publisher(context, records, keep, "ns", "kv")
    wait_until(lambda: fabric.diagnostics()["connections"].get(wanted.endpoint))

    _publish_until_received(wanted, receiver)
    wanted.socket.send_multipart(message("kv-events", wanted.publisher_id, 99, "kv-events", b""))
    other.publish(b"")

    assert [event.key for event in receiver.drained() if event.sequence == 99 or event.key != "ns/w/kv"] == []
    assert list(fabric.diagnostics()["connections"]) == [wanted.endpoint]


def test_two_scopes_with_one_topic_are_kept_apart_for_dynamo_subscribers(
    opened: Any, context: Any, records: Records, keep: Any
) -> None:
    first = keep(ZmqSubscriber(context, ("ns", "a", "t"), records))
    second = keep(ZmqSubscriber(context, ("ns", "b", "t"), records))
    fabric = opened()

    fabric.send([frame("ns/a/t", n, b"a", 1) for n in range(50)] + [frame("ns/b/t", n, b"b", 2) for n in range(50)])

    assert [(each["publisher_id"], each["sequence"]) for each in first.drained()] == [(1, n) for n in range(50)]
    assert [(each["publisher_id"], each["sequence"]) for each in second.drained()] == [(2, n) for n in range(50)]


def test_two_publishers_of_one_topic_reach_a_dynamo_subscriber_once_each(
    opened: Any, context: Any, records: Records, keep: Any
) -> None:
    subscriber = keep(ZmqSubscriber(context, ("ns", "a", "t"), records))
    fabric = opened()

    fabric.send([frame("ns/a/t", n, b"", 1 + n % 2) for n in range(100)])
    received = [(each["publisher_id"], each["sequence"]) for each in subscriber.drained()]

    assert sorted(received) == sorted((1 + n % 2, n) for n in range(100))
    assert [n for who, n in received if who == 1] == list(range(0, 100, 2))


def test_two_hundred_publishers_of_a_process_share_one_socket_and_its_threads(opened: Any, records: Records) -> None:
    fabric = opened()
    fabric.send([frame("ns/w/t0", publisher_id=1)])
    wait_until(lambda: len(records.read()) == 1)
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))

    fabric.send([frame(f"ns/w/t{n}", publisher_id=1 + n) for n in range(200)])
    wait_until(lambda: len(records.read()) == 200)

    assert (threading.active_count(), len(os.listdir("/proc/self/fd")) - files <= 4) == (threads, True)
    assert len({each["transport"]["config"]["endpoint"] for each in records.read()}) == 1
    assert {each["instance_id"] for each in records.read()} == set(range(1, 201))


def test_records_are_kept_alive_and_taken_back_at_the_end(
    opened: Any, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_dynamo.registry.TOUCH_S", 0.2)
    fabric = opened()
    fabric.send([frame("ns/w/t"), frame("ns/t", publisher_id=78)])
    wait_until(lambda: len(records.read()) == 2)
    for path in records.directory.iterdir():
        os.utime(path, (time.time() - 9, time.time() - 9))
    wait_until(lambda: all(path.stat().st_mtime > time.time() - 5 for path in records.directory.iterdir()))

    fabric.close()

    assert records.read() == []


def test_a_record_that_another_process_reaped_comes_back(
    opened: Any, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_dynamo.registry.TOUCH_S", 0.2)
    fabric = opened()
    fabric.send([frame("ns/w/t")])
    wait_until(lambda: len(records.read()) == 1)

    for path in records.directory.iterdir():
        path.unlink()

    wait_until(lambda: len(records.read()) == 1)
    wait_until(lambda: fabric.diagnostics()["counts"].get("record_written_again") == 1)  # counted after it is there


def test_two_nodes_of_zbus_hear_each_other_and_not_themselves(opened: Any) -> None:
    one, two, first, second = opened(), opened(), Receiver(), Receiver()
    one.listen(["ns/**"], first)
    two.listen(["ns/**"], second)

    one.send([frame("ns/a/t", n, publisher_id=1) for n in range(1000)])
    two.send([frame("ns/a/t", n, publisher_id=2) for n in range(1000)])

    assert [second.next().identity for _ in range(1000)] == [(1, n) for n in range(1000)]
    assert [first.next().identity for _ in range(1000)] == [(2, n) for n in range(1000)]
    assert first.events.empty()
    assert second.events.empty()


def test_what_was_sent_before_the_close_arrives(opened: Any) -> None:
    one, two, receiver = opened(), opened(), Receiver()
    two.listen(["ns/t"], receiver)

    one.send([frame("ns/t", n, b"x" * 1000) for n in range(5000)])
    one.close()

    assert [receiver.next().sequence for _ in range(5000)] == list(range(5000))


def test_bad_messages_are_counted_by_reason_and_what_follows_arrives(
    opened: Any, context: Any, records: Records, keep: Any
) -> None:
    receiver, fabric = Receiver(), opened()
    fabric.listen(["ns/t"], receiver)
    made, _ = publisher(context, records, keep, "ns", "t")
    wait_until(lambda: fabric.diagnostics()["connections"].get(made.endpoint))
    _publish_until_received(made, receiver)
    good = message("t", made.publisher_id, 500, "t", b"")

    bad = [good[:3], [*good, b""], [b"t"], [good[0], good[1], good[1], good[3]], [*good[:3], b"\x02" + good[3][1:]]]
    bad += [[*good[:3], good[3][:-1]], message("t", made.publisher_id, 501, "other", b"")]
    bad += [message("t", made.publisher_id, 502, "t", b"x" * 100_001), message("t", 1 << 63, 0, "t", b"")]
    bad += [[good[0], b"short", *good[2:]], [*good[:3], b"\x01"], [*good[:3], b"\x01" + bytes(4)]]
    for each in bad:
        made.socket.send_multipart(each)
    made.socket.send_multipart(message("t", made.publisher_id, 1000, "t", b"good"))

    while receiver.next().payload != b"good":
        pass
    assert fabric.diagnostics()["counts"] == {
        "invalid_frame_count": 3,
        "identity_mismatch": 1,
        "invalid_version": 1,
        "invalid_length": 1,
        "topic_mismatch": 1,
        "payload_too_large": 1,
        "invalid_id_length": 1,
        "invalid_header": 1,
        "invalid_envelope": 1,
        "invalid_number": 1,
    }


def test_a_subscriber_that_does_not_read_is_waited_for_a_moment_and_then_counted(
    opened: Any, context: Any, records: Records, keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_dynamo.settings.HIGH_WATER", 100)
    fabric = opened()
    fabric.send([frame("ns/t")])
    wait_until(lambda: records.read())
    deaf = keep(context.socket(zmq.SUB))
    deaf.rcvhwm = 1
    deaf.subscribe(b"t")
    deaf.connect(records.read()[0]["transport"]["config"]["endpoint"])
    wait_until(lambda: fabric.diagnostics()["queued_events"] == 0 and fabric.ready("ns/t"))

    payload = b"x" * 90_000
    for n in range(1, 400):
        fabric.send([frame("ns/t", n, payload)])
    wait_until(lambda: fabric.diagnostics()["queued_events"] == 0)

    assert fabric.diagnostics()["counts"]["subscriber_stuck"] > 0


def test_ready_tells_whether_somebody_subscribed(opened: Any, context: Any, records: Records, keep: Any) -> None:
    fabric = opened()
    fabric.send([frame("ns/t")])
    wait_until(lambda: records.read())
    assert not fabric.ready("ns/t")

    keep(ZmqSubscriber(context, ("ns", "t"), records))

    wait_until(lambda: fabric.ready("ns/t"))


def test_more_publishers_of_a_topic_than_sockets_replace_those_silent_longest(
    opened: Any, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "LANES_MAX", 3)
    fabric = opened()

    with recorded() as written:
        fabric.send([frame(f"ns/w{n}/t", publisher_id=n) for n in range(1, 6)])
        wait_until(lambda: {each["instance_id"] for each in records.read()} == {3, 4, 5})

    assert {each["code"] for each in written if each["record"] == "TRANSPORT_PUBLISHER_RETIRED"} == {
        "publishers_retired"
    }
    assert fabric.diagnostics()["counts"]["publishers_retired"] == 2
    assert len(fabric.diagnostics()["listening"]) == 3


def test_more_publishers_than_a_process_keeps_replace_those_silent_longest(
    opened: Any, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "PUBLISHERS_MAX", 3)
    fabric = opened()

    fabric.send([frame(f"ns/t{n}", publisher_id=n) for n in (1, 2, 3)])
    fabric.send([frame("ns/t1", publisher_id=1), frame("ns/t4", publisher_id=4)])

    wait_until(lambda: {each["instance_id"] for each in records.read()} == {1, 3, 4})
    assert fabric.diagnostics()["publishers"] == 3
    assert fabric.diagnostics()["counts"]["publishers_retired"] == 1


def test_a_key_whose_record_could_have_no_file_is_refused_and_the_rest_goes(opened: Any, records: Records) -> None:
    fabric = opened()

    fabric.send([frame("ns/" + "é" * 100), frame("ns/t", publisher_id=5), frame("a/b/c/d/e")])

    wait_until(lambda: [each["instance_id"] for each in records.read()] == [5])
    assert fabric.diagnostics()["counts"]["key_rejected"] == 2


def test_requests_are_refused_by_name_and_hopeless_expressions_too(opened: Any) -> None:
    fabric = opened()

    with pytest.raises(TransportUnsupported, match="serving requests: it carries only events"):
        fabric.serve(["a/b"], print)
    with pytest.raises(TransportUnsupported, match="sending requests: it carries only events"):
        fabric.request("a/b", b"", print, 1.0)
    with pytest.raises(TransportUnsupported, match="a/b/c/d/e"):
        fabric.listen(["a/b/c/d/e"], Receiver())


def test_an_address_that_cannot_be_listened_on_is_counted_and_does_not_block_what_follows(
    tmp_path: Path, keep: Any
) -> None:
    fabric = keep(open_fabric(BusConfig(), f"zmq://192.0.2.1?store={tmp_path}"))  # an address that no host has

    for n in range(300):
        fabric.send([frame("ns/t", m) for m in range(n * 100, n * 100 + 100)])

    wait_until(lambda: fabric.diagnostics()["counts"].get("dropped_no_socket") == 30_000)
    assert fabric.diagnostics()["queued_events"] == 0


def test_a_publisher_that_cannot_register_waits_and_loses_nothing(
    opened: Any, tmp_path: Path, context: Any, keep: Any
) -> None:
    fabric = opened()
    (tmp_path / "kv").rename(tmp_path / "away")
    fabric.send([frame("ns/t", n) for n in range(10)])
    wait_until(lambda: fabric.diagnostics()["counts"].get("registry_failed"))
    assert fabric.diagnostics()["queued_events"] == 10
    (tmp_path / "away").rename(tmp_path / "kv")

    subscriber = keep(ZmqSubscriber(context, ("ns", "t"), Records(tmp_path / "kv")))

    assert [subscriber.next()["sequence"] for _ in range(10)] == list(range(10))


def test_closing_is_bounded_and_tells_what_was_not_sent_and_sending_after_it_fails(
    opened: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fabric = opened()
    (tmp_path / "kv").rename(tmp_path / "away")  # so that its publisher never gets registered
    fabric.send([frame("ns/t")])

    started = time.monotonic()
    fabric.close()
    fabric.close()

    assert time.monotonic() - started < 10
    assert [each.getMessage() for each in caplog.records if "closed_before_sent" in each.getMessage()]
    with pytest.raises(TransportError, match="closed"):
        fabric.send([frame("ns/t")])


def test_closing_does_not_wait_for_subscribers_of_a_new_publisher(
    opened: Any, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_dynamo.lanes.HOLD_MAX_S", 60.0)
    fabric = opened()
    fabric.send([frame("ns/t")])
    wait_until(lambda: records.read())

    fabric.close()

    assert "closed_before_sent" not in fabric.diagnostics()["counts"]
    assert fabric.diagnostics()["queued_events"] == 0


def test_a_store_that_cannot_be_opened_is_an_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(TransportError):
        open_fabric(BusConfig(), f"zmq://?store={tmp_path / 'file'}")
    assert not [each for each in threading.enumerate() if each.name.startswith("zbus-dynamo")]


CHILD = """
import sys, time
sys.path.insert(0, sys.argv[3])
from dynamo_support import frame
from zbus.config import BusConfig
from zbus_dynamo.zmq_plane import open_fabric
fabric = open_fabric(BusConfig(), "zmq://?store=" + sys.argv[1])
for sequence in range(1_000_000):
    fabric.send([frame("ns/t", sequence, publisher_id=int(sys.argv[2]))])
    time.sleep(0.005)
"""


@contextmanager
def _child(records: Records, publisher_id: int) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that publishes until it is killed."""
    here = str(Path(__file__).parents[1] / "support")
    store = str(records.directory.parent.parent)
    with subprocess.Popen([sys.executable, "-c", CHILD, store, str(publisher_id), here]) as process:
        try:
            yield process
        finally:
            process.kill()


def _publish_until_received(made: ZmqPublisher, receiver: Receiver) -> Any:
    """A PUB socket of Dynamo drops what it sends before a subscription reached it."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        made.publish(b"hello")
        for event in receiver.drained(0.05):
            if event.publisher_id == made.publisher_id:
                return event
    raise AssertionError("nothing was heard")
