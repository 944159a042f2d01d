"""zbus without an event loop: the same promises, from ordinary threads."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import zbus
from zbus import blocking

WAIT_S = 20.0


@pytest.fixture
def bus(log_path: Path) -> Iterator[blocking.Bus]:
    with blocking.open(log_path) as opened:
        yield opened


def take(subscription: blocking.Subscription, count: int) -> list[zbus.Event]:
    found = [subscription.next(timeout=WAIT_S) for _ in range(count)]
    return [event for event in found if event is not None]


def test_all_is_exactly_what_the_module_defines() -> None:
    defined = [
        name
        for name, thing in vars(blocking).items()
        if (inspect.isclass(thing) or inspect.isfunction(thing))
        and thing.__module__ == "zbus.blocking"
        and not name.startswith("_")
    ]

    assert sorted(blocking.__all__) == sorted(defined)
    assert zbus.blocking is blocking


def test_a_publish_returns_the_offset_of_an_event_that_is_stored(bus: blocking.Bus, log_path: Path) -> None:
    publisher = bus.publisher("shop/orders/created")

    offsets = [publisher.publish({"id": 1}), publisher.publish(b"two", headers={"x": "y"}, correlation_id="c")]

    with blocking.open(log_path, read_only=True) as reader:
        stored = list(reader.replay("shop/**"))
    assert [event.offset for event in stored] == offsets == [1, 2]
    assert [event.identity for event in stored] == [(publisher.publisher_id, 0), (publisher.publisher_id, 1)]
    assert {event.key for event in stored} == {publisher.key}
    assert stored[1].headers == {"x": "y", "correlation-id": "c"}


def test_many_events_are_published_in_order_and_replayed_from_any_offset(bus: blocking.Bus) -> None:
    offsets = bus.publisher("shop/orders/created").publish_many(b"%d" % number for number in range(5000))

    assert list(offsets) == list(range(1, 5001))
    assert bus.head() == 5000
    assert [event.payload for event in bus.replay("**")] == [b"%d" % number for number in range(5000)]
    assert [event.offset for event in bus.replay("**", after=10, until=12)] == [11, 12]


def test_payloads_may_come_from_the_same_bus(bus: blocking.Bus) -> None:
    bus.publisher("a/b").publish_many([b"1", b"2", b"3"])

    bus.publisher("copy/b").publish_many(event.payload for event in bus.replay("a/b"))

    assert [event.payload for event in bus.replay("copy/**")] == [b"1", b"2", b"3"]


def test_putting_an_event_again_stores_nothing_new(bus: blocking.Bus) -> None:
    event = zbus.Event(7, 0, time.time_ns(), "a/b", b"x")

    assert list(bus.put(event)) == list(bus.put(event)) == [1]
    assert bus.head() == 1
    assert isinstance(bus.stats(), dict)


def test_a_subscription_yields_what_is_published_while_it_is_open(bus: blocking.Bus) -> None:
    with bus.subscribe("shop/*/created", "audit/**") as subscription:
        for key in ("shop/orders/created", "shop/orders/paid", "audit/login"):
            bus.publisher(key).publish(b"")

        assert [event.key for event in take(subscription, 2)] == ["shop/orders/created", "audit/login"]
        assert subscription.dropped == 0


def test_a_subscription_goes_from_stored_to_live_events_without_a_gap(bus: blocking.Bus) -> None:
    publisher = bus.publisher("a/b")
    publisher.publish_many([b""] * 3000)
    writing = threading.Thread(target=lambda: [publisher.publish_many([b""] * 100) for _ in range(20)])

    with bus.subscribe("**", start="beginning", overflow="spill") as subscription:
        writing.start()
        seen = [event.offset for event in take(subscription, 5000)]
        writing.join()

    assert seen == list(range(1, 5001))


def test_waiting_ends_after_the_timeout_and_loses_nothing(bus: blocking.Bus) -> None:
    publisher = bus.publisher("a/b")
    with bus.subscribe("a/b") as subscription:
        for timeout in (0, 0.01, 0.05):
            with pytest.raises(TimeoutError):
                subscription.next(timeout=timeout)
        publisher.publish_many([b"1", b"2"])

        assert [event.payload for event in take(subscription, 2)] == [b"1", b"2"]


def test_a_timeout_of_zero_still_takes_what_is_there(bus: blocking.Bus) -> None:
    with bus.subscribe("a/b") as subscription:
        bus.publisher("a/b").publish(b"1")

        event = subscription.next(timeout=0)

    assert event is not None
    assert event.payload == b"1"


def test_a_slow_reader_receives_its_gap_between_the_events_around_it(bus: blocking.Bus) -> None:
    publisher = bus.publisher("a/b")
    with bus.subscribe("a/b", queue_events=2, overflow="drop_newest") as subscription:
        publisher.publish_many([b"1", b"2", b"3", b"4"])

        assert [event.payload for event in take(subscription, 2)] == [b"1", b"2"]
        with pytest.raises(zbus.SubscriberLagged) as caught:
            subscription.next(timeout=WAIT_S)
        assert (caught.value.after, caught.value.until) == (2, 4)
        assert subscription.dropped == 2
        missed = bus.replay("a/b", after=caught.value.after, until=caught.value.until)
        assert [event.payload for event in missed] == [b"3", b"4"]

        publisher.publish(b"5")
        assert [event.payload for event in take(subscription, 1)] == [b"5"]


def test_an_event_of_the_wrong_type_is_refused_in_its_place(bus: blocking.Bus) -> None:
    publisher = bus.publisher("a/b")
    with bus.subscribe("a/b", schema=dict[str, int]) as subscription:
        publisher.publish_many([{"n": 1}, {"n": "x"}, {"n": 3}])

        assert [event.decode() for event in take(subscription, 1)] == [{"n": 1}]
        with pytest.raises(zbus.PayloadInvalid):
            subscription.next(timeout=WAIT_S)
        assert [event.decode() for event in take(subscription, 1)] == [{"n": 3}]


def test_a_durable_name_acknowledges_an_event_only_when_the_next_one_is_requested(bus: blocking.Bus) -> None:
    bus.publisher("a/b").publish_many([b"1", b"2", b"3", b"4"])

    with bus.subscribe("a/b", durable="billing", start="beginning") as subscription:
        assert [event.offset for event in take(subscription, 3)] == [1, 2, 3]
    with bus.subscribe("a/b", durable="billing") as subscription:
        assert [event.offset for event in take(subscription, 1)] == [3]


def test_an_acknowledged_event_is_not_seen_again(bus: blocking.Bus) -> None:
    bus.publisher("a/b").publish_many([b"1", b"2", b"3", b"4"])

    with bus.subscribe("a/b", durable="billing", start="beginning") as subscription:
        for event in subscription:
            if event.offset == 2:
                subscription.ack(event)
                break
    with bus.subscribe("a/b", durable="billing") as subscription:
        assert [event.offset for event in take(subscription, 2)] == [3, 4]


def test_acknowledging_without_a_durable_name_is_refused(bus: blocking.Bus) -> None:
    with bus.subscribe("a/b") as subscription:
        bus.publisher("a/b").publish(b"1")
        (event,) = take(subscription, 1)

        with pytest.raises(zbus.CursorError):
            subscription.ack(event)


def test_events_cross_from_the_loop_in_batches_rather_than_one_by_one(
    bus: blocking.Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossings: list[str] = []
    original = bus._call
    monkeypatch.setattr(bus, "_call", lambda doing, call: (crossings.append(doing), original(doing, call))[1])
    bus.publisher("a/b").publish_many([b""] * 10_000)
    crossings.clear()

    assert sum(1 for _ in bus.replay("**")) == 10_000
    assert len(crossings) < 50
    crossings.clear()
    with bus.subscribe("**", start="beginning") as subscription:
        assert len(take(subscription, 10_000)) == 10_000
    assert len(crossings) < 200


def test_closing_the_bus_ends_a_reader_in_another_thread_after_what_is_queued(log_path: Path) -> None:
    seen: list[bytes] = []
    reading, go_on = threading.Event(), threading.Event()

    def read(subscription: blocking.Subscription) -> None:
        for event in subscription:
            seen.append(event.payload)
            reading.set()
            assert go_on.wait(WAIT_S)

    with blocking.open(log_path) as bus:
        subscription = bus.subscribe("a/b")
        thread = threading.Thread(target=read, args=(subscription,))
        thread.start()
        publisher = bus.publisher("a/b")
        publisher.publish(b"0")
        assert reading.wait(WAIT_S)
        publisher.publish_many(b"%d" % number for number in range(1, 700))
    go_on.set()
    thread.join(WAIT_S)

    assert not thread.is_alive()
    assert seen == [b"%d" % number for number in range(700)]


def test_closing_the_bus_ends_a_reader_that_waits(log_path: Path) -> None:
    ended = threading.Event()
    with blocking.open(log_path) as bus:
        subscription = bus.subscribe("a/b")
        thread = threading.Thread(target=lambda: (list(subscription), ended.set()))
        thread.start()
    assert ended.wait(WAIT_S)
    thread.join(WAIT_S)
    assert subscription.next() is None


def test_closing_ends_in_bounded_time_and_leaves_no_thread(log_path: Path) -> None:
    before = set(threading.enumerate())
    bus = blocking.open(log_path, close_timeout_s=1.0)
    with bus:
        subscription = bus.subscribe("a/b", durable="billing")
        bus.publisher("a/b").publish_many([b""] * 1000)
        begun = time.monotonic()
    bus.close()
    subscription.close()

    assert time.monotonic() - begun < 1.0 + blocking.CLOSE_GRACE_S
    assert set(threading.enumerate()) <= before


def test_a_closed_bus_says_so(log_path: Path) -> None:
    with blocking.open(log_path) as bus:
        publisher = bus.publisher("a/b")
    never_opened = blocking.open(log_path)

    for call in (
        lambda: publisher.publish(b""),
        lambda: publisher.publish_many([b""]),
        lambda: bus.publisher("a/b"),
        lambda: bus.head(),
        lambda: bus.subscribe("a/b"),
        lambda: list(bus.replay("a/b")),
        lambda: never_opened.head(),
    ):
        with pytest.raises(zbus.BusClosed):
            call()
    never_opened.close()


def test_a_wrong_setting_fails_at_open_and_a_wrong_place_when_it_is_entered(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(zbus.ConfigInvalid):
        blocking.open(tmp_path / "app.db", durability="perhaps")
    with pytest.raises(zbus.ConfigInvalid, match="does not exist"):
        with blocking.open(tmp_path / "nowhere" / "app.db"):
            pass
    assert set(threading.enumerate()) <= before


def test_many_threads_publish_at_once(bus: blocking.Bus) -> None:
    def publish(number: int) -> None:
        publisher = bus.publisher(f"a/{number}")
        for _ in range(50):
            publisher.publish(b"")

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)

    stored = list(bus.replay("**"))
    assert len({event.identity for event in stored}) == len(stored) == 400
    for number in range(8):
        assert [event.sequence for event in stored if event.key == f"a/{number}"] == list(range(50))


def test_without_a_log_events_are_delivered_and_have_no_offset() -> None:
    with blocking.open() as bus, bus.subscribe("a/b") as subscription:
        assert bus.publisher("a/b").publish(b"1") == 0
        assert [event.offset for event in take(subscription, 1)] == [0]
        with pytest.raises(zbus.LogRequired):
            bus.head()


INTERRUPTED = """
import sys, zbus
with zbus.blocking.open(sys.argv[1]) as bus, bus.subscribe("a/b") as subscription:
    try:
        print("waiting", flush=True)
        subscription.next()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    bus.publisher("a/b").publish_many([b"1", b"2"])
    print([subscription.next().payload for _ in range(2)], flush=True)
print("closed", flush=True)
"""


def test_ctrl_c_ends_a_wait_in_the_main_thread_and_no_event_is_lost(log_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(log_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=WAIT_S)

    assert (output, errors) == ("interrupted\n[b'1', b'2']\nclosed\n", "")
    assert process.returncode == 0


@pytest.mark.parametrize("one", [{"a": 1}, "hello", b"hello"], ids=lambda one: type(one).__name__)
def test_one_payload_in_place_of_a_list_is_rejected(bus: blocking.Bus, one: object) -> None:
    with pytest.raises(zbus.PayloadInvalid, match="takes a list of payloads"):
        bus.publisher("a/b").publish_many(one)  # type: ignore[arg-type]
    with pytest.raises(zbus.PayloadInvalid, match="takes a list of payloads"):
        bus.session("alice").publish_many("a/b", one)  # type: ignore[arg-type]

    assert bus.head() == 0


def test_an_event_acknowledges_itself(bus: blocking.Bus) -> None:
    bus.publisher("a/b").publish_many([1, 2])
    with bus.subscribe("a/**", durable="d", start="beginning") as sub:
        event = sub.next(timeout=WAIT_S)
        assert event is not None
        event.ack()
    with bus.subscribe("a/**", durable="d") as sub:
        following = sub.next(timeout=WAIT_S)

    assert following is not None
    assert following.decode() == 2


def test_the_settings_and_the_state_of_the_bus_can_be_looked_at(bus: blocking.Bus, log_path: Path) -> None:
    assert bus.config.log == str(log_path)
    assert bus.diagnostics()["log"] == str(log_path)
