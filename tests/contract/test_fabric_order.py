"""Senders and listeners in time: order per sender and key, several of them merged, and late ones."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

from contract_node import WAIT_S
from contract_support import Mesh

FRAMES = 3_000
FOUND_S_MAX = 3.0  # a new sender should be found within 1 s, but the machine may be busy


def test_frames_of_one_sender_and_key_keep_their_order(transport: Mesh) -> None:
    near, far = transport.open(), transport.spawn()
    far.listen(["order/**"])
    near.wanted(["order/a", "order/b"])

    for start in range(0, FRAMES, 100):
        numbers = range(start, start + 100)
        near.send([(f"order/{'ab'[number % 2]}", b"%d" % number) for number in numbers])

    received = [int(frame) for frame in far.received(FRAMES)]
    assert [number for number in received if number % 2 == 0] == list(range(0, FRAMES, 2))
    assert [number for number in received if number % 2 == 1] == list(range(1, FRAMES, 2))


def test_several_senders_are_merged_and_each_keeps_its_order(transport: Mesh) -> None:
    listener, senders = transport.open(), [transport.spawn(), transport.spawn(), transport.open()]
    listener.listen(["merged/*"])
    for sender in senders:
        sender.wanted(["merged/key"])

    def send(name: int) -> None:
        for start in range(0, FRAMES // 3, 50):
            numbers = range(start, start + 50)
            senders[name].send([("merged/key", b"%d %d" % (name, number)) for number in numbers])

    threads = [threading.Thread(target=send, args=(name,)) for name in range(len(senders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)

    found: dict[int, list[int]] = defaultdict(list)
    for frame in listener.received(FRAMES):
        name, number = map(int, frame.split())
        found[name].append(number)
    assert found == {name: list(range(FRAMES // 3)) for name in range(len(senders))}


def test_every_listener_hears_every_sender(transport: Mesh) -> None:
    nodes = [transport.open(), transport.spawn(), transport.spawn()]
    for node in nodes:
        node.listen(["all/**"])
    for node in nodes:
        node.wanted(["all/x"])

    # `ready` says that some node listens, not that all do: each sends until the others have received it.
    for number, node in enumerate(nodes):
        frame, deadline = b"from %d" % number, time.monotonic() + WAIT_S
        others = [each for each in nodes if each is not node]
        while not all(other.received_frame(frame, 0.1) for other in others):
            assert time.monotonic() < deadline
            node.send([("all/x", frame)])

    for number, node in enumerate(nodes):
        assert set(node.received(2)) == {b"from %d" % other for other in range(3) if other != number}


def test_a_late_sender_is_found_by_a_listener_that_runs(transport: Mesh) -> None:
    listener = transport.spawn()
    listener.listen(["late/**"])
    took_s: list[float] = []

    for number in range(25):
        began = time.monotonic()
        sender = transport.open()
        sender.wanted([f"late/{number}"])
        sender.send([(f"late/{number}", b"%d" % number)])
        assert listener.received_frame(b"%d" % number), f"sender {number} was not received"
        took_s.append(time.monotonic() - began)
        sender.close()

    assert listener.received(25) == [b"%d" % number for number in range(25)]
    assert sorted(took_s)[len(took_s) // 2] < 1.0, took_s
    assert max(took_s) < FOUND_S_MAX, took_s


def test_a_sender_that_listens_to_its_own_key_does_not_take_itself_for_a_listener(transport: Mesh) -> None:
    listener = transport.spawn()
    listener.listen(["own/**"])

    for number in range(15):
        sender = transport.open()
        sender.listen(["own/**"])
        sender.wanted(["own/x"])
        sender.send([("own/x", b"%d" % number)])
        assert listener.received_frame(b"%d" % number, 5.0), f"sender {number} was ready before it was"
        sender.close()


def test_many_senders_that_come_at_once_are_all_found(transport: Mesh) -> None:
    listener = transport.spawn()
    listener.listen(["crowd/**"])

    senders = [transport.open() for _ in range(10)]
    for number, sender in enumerate(senders):
        sender.wanted([f"crowd/{number}"])
        sender.send([(f"crowd/{number}", b"%d" % number)])

    assert sorted(listener.received(10)) == sorted(b"%d" % number for number in range(10))


def test_a_late_listener_hears_all_from_its_first_frame_on(transport: Mesh) -> None:
    sender = transport.spawn()
    sender.flood("stream/key", pause_s=0.001)

    for _ in range(3):
        listener = transport.open()
        listener.listen(["stream/*"])
        received = [int(frame) for frame in listener.received(200)]
        assert len(received) >= 200
        # Zenoh peers set up a route in steps: on a busy machine, frames right after the first one were missing once.
        settled = received[20:] if transport.name == "zenoh-peer" else received
        assert received == sorted(set(received))
        assert settled == list(range(settled[0], settled[0] + len(settled)))
        listener.close()

    reported = sender.calm()
    assert reported["ended"]
    assert not reported["unexpected"]


def test_a_listener_that_left_is_no_longer_sent_to_and_does_not_disturb_others(transport: Mesh) -> None:
    sender, stays, leaves = transport.open(), transport.spawn(), transport.open()
    for listener in (stays, leaves):
        listener.listen(["leaving/**"])
    sender.wanted(["leaving/x"])
    sender.flood("leaving/x", pause_s=0.001)
    assert stays.received(1)
    assert leaves.received(1)

    leaves.close()
    count = len(leaves.received(0))
    goal = len(stays.received(0)) + 100
    received = [int(frame) for frame in stays.received(goal)]

    assert sender.calm()["errors"] == 0
    assert received == list(range(received[0], received[0] + len(received)))
    assert len(leaves.received(0)) <= count + 1
