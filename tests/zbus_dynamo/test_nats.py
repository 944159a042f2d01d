"""The Dynamo wire over NATS, against a peer that knows nothing of zbus."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dynamo_peer import NatsPeer, envelope, subject
from dynamo_support import AT_NS, Receiver, frame
from log_support import wait_until
from nats_support import NatsServer, nats_server

from zbus.config import BusConfig
from zbus.errors import TransportError, TransportUnsupported
from zbus.event import Event
from zbus_dynamo.nats_plane import DynamoNats, open_fabric


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats") as running:
        yield running


@pytest.fixture
def peer(server: NatsServer) -> Iterator[NatsPeer]:
    made = NatsPeer(server.url)
    yield made
    made.close()


@pytest.fixture
def fabric(server: NatsServer) -> Iterator[DynamoNats]:
    made = open_fabric(BusConfig(payload_bytes_max=100_000), server.url)
    yield made
    made.close()


@pytest.mark.parametrize("names", [("ns", "t"), ("ns", "worker", "kv-events"), ("ns", "worker", "gen", "a.b>")])
def test_what_zbus_sends_is_the_bare_envelope_on_the_subject_of_its_scope(
    fabric: DynamoNats, peer: NatsPeer, names: tuple[str, ...]
) -> None:
    peer.subscribe(subject(*names))

    fabric.send([frame("/".join(names), 5, b"\x00\xff", 12345)])

    assert peer.next() == (
        subject(*names),
        {
            "publisher_id": 12345,
            "sequence": 5,
            "published_at": AT_NS // 1_000_000,
            "topic": names[-1],
            "payload": b"\x00\xff",
        },
    )


@pytest.mark.parametrize("names", [("ns", "t"), ("ns", "worker", "kv-events"), ("ns", "worker", "gen", "a.b>")])
def test_what_a_dynamo_program_sends_arrives_as_an_event(
    fabric: DynamoNats, peer: NatsPeer, names: tuple[str, ...]
) -> None:
    receiver = Receiver()
    fabric.listen(["/".join(names)], receiver)

    peer.publish(subject(*names), envelope(9, 3, names[-1], b"hello", 1_700_000_000_000))

    assert receiver.next() == Event(9, 3, 1_700_000_000_000_000_000, "/".join(names), b"hello")


def test_wildcards_bring_every_depth_once_and_in_order(fabric: DynamoNats, peer: NatsPeer) -> None:
    receiver = Receiver()
    fabric.listen(["**", "ns/**", "ns/*/t", "*/worker/t"], receiver)

    sent = [("ns", "t"), ("ns", "worker", "t"), ("ns", "worker", "gen", "t"), ("other", "worker", "t")] * 50
    for sequence, names in enumerate(sent):
        peer.publish(subject(*names), envelope(9, sequence, names[-1], b""))
    received = [receiver.next() for _ in sent]

    assert [(each.sequence, each.key) for each in received] == [(n, "/".join(names)) for n, names in enumerate(sent)]
    assert receiver.events.empty()


def test_the_exact_filter_follows_the_coarse_one(fabric: DynamoNats, peer: NatsPeer) -> None:
    receiver = Receiver()
    fabric.listen(["ns/kv$*"], receiver)

    peer.publish(subject("ns", "other"), envelope(9, 0, "other", b""))
    peer.publish(subject("ns", "kv-events"), envelope(9, 1, "kv-events", b""))

    assert receiver.next().sequence == 1
    assert receiver.events.empty()


def test_a_subscription_is_replaced_without_losing_or_repeating_what_both_want(
    fabric: DynamoNats, peer: NatsPeer
) -> None:
    receiver, total = Receiver(), 40_000
    fabric.listen(["ns/*/t"], receiver)
    publishing = threading.Thread(
        target=peer.publish_all,
        args=(subject("ns", "w", "t"), [envelope(9, sequence, "t", b"") for sequence in range(total)]),
    )
    publishing.start()

    changes = 0
    while publishing.is_alive():
        changes += 1
        fabric.listen(["ns/w/t"] if changes % 2 else ["ns/*/t"], receiver)
    publishing.join()

    assert [receiver.next().sequence for _ in range(total)] == list(range(total))
    assert receiver.events.empty()
    assert changes > 3  # often enough to have met the publisher in the midst


def test_a_node_does_not_hear_itself_but_two_nodes_hear_each_other(server: NatsServer, fabric: DynamoNats) -> None:
    mine, theirs = Receiver(), Receiver()
    other = open_fabric(BusConfig(), server.url)
    try:
        fabric.listen(["ns/t"], mine)
        other.listen(["ns/t"], theirs)
        fabric.send([frame("ns/t", publisher_id=1)])
        other.send([frame("ns/t", publisher_id=2)])
        assert (theirs.next().publisher_id, mine.next().publisher_id) == (1, 2)
        assert mine.events.empty()
    finally:
        other.close()


def test_bad_input_is_counted_by_reason_and_what_follows_arrives(fabric: DynamoNats, peer: NatsPeer) -> None:
    receiver = Receiver()
    fabric.listen(["ns/**"], receiver)

    here = subject("ns", "t")
    for body in (
        b"",
        b"\xc1",
        envelope(9, 0, "t", b"")[:-1],
        envelope(9, 0, "other", b""),
        envelope(1 << 63, 0, "t", b""),
    ):
        peer.publish(here, body)
    peer.publish(here, envelope(9, 1, "t", b"x" * 100_001))
    peer.publish("namespace.ns.%zz", envelope(9, 2, "%zz", b""))
    peer.publish(here, envelope(9, 3, "t", b"good"))

    assert receiver.next().payload == b"good"
    counts = fabric.diagnostics()["counts"]
    reasons = {
        "invalid_envelope": 3,
        "topic_mismatch": 1,
        "invalid_number": 1,
        "payload_too_large": 1,
        "invalid_subject": 1,
    }
    assert {reason: counts.get(reason) for reason in reasons} == reasons


def test_what_the_server_or_the_wire_cannot_take_is_counted_and_the_rest_goes(
    fabric: DynamoNats, peer: NatsPeer
) -> None:
    peer.subscribe(subject("ns", "t"))

    fabric.send([frame("a/b/c/d/e"), frame("ns/t", 0, b"x" * 2_000_000), frame("ns/t", 1)])

    assert peer.next()[1]["sequence"] == 1
    counts = fabric.diagnostics()["counts"]
    assert (counts["key_rejected"], counts["too_large"]) == (1, 1)


def test_an_expression_that_can_match_nothing_here_is_named_and_the_others_are_in_force(
    fabric: DynamoNats, peer: NatsPeer
) -> None:
    receiver = Receiver()

    with pytest.raises(TransportUnsupported, match="a/b/c/d/e"):
        fabric.listen(["a/b/c/d/e", "ns/t"], receiver)
    peer.publish(subject("ns", "t"), envelope(9, 0, "t", b""))

    assert receiver.next().key == "ns/t"


def test_requests_are_refused_by_name(fabric: DynamoNats) -> None:
    with pytest.raises(TransportUnsupported, match="serving requests: it carries only events"):
        fabric.serve(["a/b"], print)
    with pytest.raises(TransportUnsupported, match="sending requests: it carries only events"):
        fabric.request("a/b", b"", print, 1.0)
    assert (fabric.events_only, fabric.networked) == (True, True)


def test_it_is_subscribed_again_after_the_server_came_back(server: NatsServer, fabric: DynamoNats) -> None:
    receiver = Receiver()
    fabric.listen(["ns/**"], receiver)
    server.kill()
    with pytest.raises(TransportError):
        _send_until_refused(fabric)
    server.start()
    wait_until(lambda: fabric.ready("ns/t"))
    peer = NatsPeer(server.url)
    try:
        peer.publish(subject("ns", "t"), envelope(9, 1, "t", b"again"))
        assert receiver.next().payload == b"again"
        peer.subscribe(subject("ns", "t"))
        fabric.send([frame("ns/t", 7)])
        assert peer.next()[1]["sequence"] == 7
    finally:
        peer.close()


def test_the_server_is_found_as_dynamo_finds_it(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_SERVER", server.url)

    fabric = open_fabric(BusConfig(), "nats")

    assert fabric.ready("ns/t")
    fabric.close()
    fabric.close()


def _send_until_refused(fabric: DynamoNats) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        fabric.send([frame("ns/t")])
        time.sleep(0.01)
