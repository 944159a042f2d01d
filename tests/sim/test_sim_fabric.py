"""The simulated network: what it loses, delays and repeats, and what it never does."""

from __future__ import annotations

from collections import Counter

import pytest
from sim_machine import Wire

from zbus.errors import TransportError
from zbus.ports.fabric import IncomingRequest
from zbus.sim.machine import fabric as fabric_module
from zbus.sim.machine.fabric import Conditions

FRAMES = [b"%d" % number for number in range(300)]
SEEDS = range(20)


def send(wire: Wire) -> list[bytes]:
    """Send all frames from a to b, one by one, and return those that arrived."""
    a = wire.open("a")
    wire.open("b", "k/**")
    for frame in FRAMES:
        a.send([("k/x", frame)])
        wire.run(0.001)
    wire.run(60.0)
    return wire.received["b"]


# Frames.


def test_a_healthy_network_loses_and_repeats_nothing_and_keeps_the_order_of_a_key() -> None:
    for seed in SEEDS:
        assert send(Wire(seed, delay_s=(0.0, 0.05))) == FRAMES


def test_frames_of_different_keys_overtake_each_other() -> None:
    wire = Wire(delay_s=(0.0, 0.05))
    a = wire.open("a")
    wire.open("b", "k/**")
    a.send([(f"k/{number % 7}", b"%d" % number) for number in range(200)])
    wire.run()
    found = [int(frame) for frame in wire.received["b"]]

    assert found != sorted(found)
    for key in range(7):
        of_key = [number for number in found if number % 7 == key]
        assert of_key == sorted(of_key)


def test_as_many_frames_are_dropped_as_the_conditions_say_and_the_rest_keeps_its_order() -> None:
    wire = Wire(drop=0.3)
    found = send(wire)

    assert 0.5 < len(found) / len(FRAMES) < 0.9
    assert found == sorted(found, key=int)
    assert wire.net.counts["dropped"] == len(FRAMES) - len(found)


def test_a_duplicate_is_one_more_copy_of_a_frame_that_arrived() -> None:
    wire = Wire(duplicate=0.3, delay_s=(0.0, 0.01))
    found = send(wire)

    assert list(dict.fromkeys(found)) == FRAMES
    assert set(Counter(found).values()) == {1, 2}
    assert wire.net.counts["duplicated"] == len(found) - len(FRAMES)


def test_a_cut_loses_what_is_sent_and_what_is_under_way_in_one_direction() -> None:
    wire = Wire(delay_s=(0.1, 0.1))
    a, b = wire.open("a", "k/**"), wire.open("b", "k/**")
    a.send([("k/x", b"under way")])
    wire.net.way("a", "b").cut = True
    a.send([("k/x", b"lost")])
    b.send([("k/x", b"back")])
    ready = (a.ready("k/x"), b.ready("k/x"))
    wire.run()
    wire.net.way("a", "b").cut = False
    a.send([("k/x", b"after")])
    wire.run()

    assert wire.received == {"a": [b"back"], "b": [b"after"]}
    assert ready == (False, True)


def test_a_slow_link_carries_so_many_bytes_per_second_and_blocks_the_sender() -> None:
    wire = Wire(bytes_per_s=1000.0, delay_s=(0.0, 0.0))
    blocked: list[float] = []
    a = wire.open("a", block=blocked.append)
    wire.open("b", "k/**")
    for number in range(20):
        a.send([("k/x", b"%99d" % number + b"\n")])
    wire.run(1.05)
    first = len(wire.received["b"])
    wire.run(1.0)

    assert (first, len(wire.received["b"])) == (10, 20)
    assert max(blocked) == pytest.approx(2.0 - fabric_module.SEND_BUFFER_S)


def test_a_sender_is_blocked_for_15_seconds_at_most() -> None:
    wire = Wire(bytes_per_s=10.0)
    blocked: list[float] = []
    a = wire.open("a", block=blocked.append)
    wire.open("b", "k/**")
    a.send([("k/x", bytes(1000))])

    assert blocked == [15.0]


# Disconnections.


def test_a_send_that_breaks_raises_and_passes_on_a_part_and_the_next_ones_pass_on_nothing() -> None:
    numbers: set[tuple[int, int]] = set()  # how many frames arrived in two disconnections
    for seed in SEEDS:
        wire = Wire(seed)
        a = wire.open("a")
        wire.open("b", "k/**")
        batch = [("k/x", frame) for frame in FRAMES[:5]]
        arrived: list[int] = []
        for _ in range(2):
            a.disconnected = True
            for _ in range(3):
                with pytest.raises(TransportError):
                    a.send(batch)
            wire.run()
            found = list(wire.received["b"])
            a.disconnected = False
            a.send(batch)
            wire.run()

            assert found == FRAMES[: len(found)]
            assert wire.received["b"] == [*found, *FRAMES[:5]]
            wire.received["b"].clear()
            arrived.append(len(found))
        numbers.add((arrived[0], arrived[1]))
    for each in (0, 1):
        assert {0, 5} < {number[each] for number in numbers}


def test_a_disconnected_node_receives_nothing_and_keeps_what_it_listens_to() -> None:
    wire = Wire()
    a, b = wire.open("a"), wire.open("b", "k/**")
    b.disconnected = True
    b.listen(["new/**"], lambda frame, acknowledge: wire.received["b"].append(frame))
    wire.run(fabric_module.DECLARE_S)
    a.send([("k/x", b"1"), ("new/x", b"2")])
    ready = [a.ready("new/x"), b.ready("new/x")]
    wire.run()
    b.disconnected = False
    a.send([("k/x", b"3"), ("new/x", b"4")])
    wire.run()

    assert ready == [False, False]
    assert a.ready("new/x")
    assert wire.received["b"] == [b"4"]


def test_a_frame_that_is_under_way_when_its_expression_is_replaced_is_not_received() -> None:
    wire = Wire(delay_s=(0.1, 0.1))
    a, b = wire.open("a"), wire.open("b", "old/**", "both/**")
    a.send([("old/x", b"old"), ("both/x", b"both")])
    b.listen(["both/**"], lambda frame, acknowledge: wire.received["b"].append(frame))
    wire.run()

    assert wire.received["b"] == [b"both"]


def test_a_key_that_old_and_new_expressions_want_is_never_lost() -> None:
    for seed in SEEDS:
        wire = Wire(seed)
        a, b = wire.open("a"), wire.open("b", "kept/x")
        for number in range(100):
            if number % 10 == 0:
                expressions = ["kept/*", f"other/{number}"] if number % 20 else ["kept/**"]
                b.listen(expressions, lambda frame, acknowledge: wire.received["b"].append(frame))  # noqa: B023
            a.send([("kept/x", b"%d" % number)])
            wire.run(0.003)
        wire.run()

        assert wire.received["b"] == [b"%d" % number for number in range(100)]


# Requests.


class Server:
    """Replies to each request with numbers, and then ends the replies."""

    def __init__(self, wire: Wire, count: int, pause_s: float = 0.0) -> None:
        self.wire, self.count, self.pause_s = wire, count, pause_s
        self.fabric = wire.open("b")
        self.fabric.serve(["ask"], self.on_request)

    def on_request(self, request: IncomingRequest) -> None:
        for number in range(self.count):
            self.wire.later(number * self.pause_s, lambda number=number: request.reply(b"%d" % number))  # type: ignore[misc]
        self.wire.later(self.count * self.pause_s, request.close)


def ask(wire: Wire, timeout_s: float = 5.0) -> tuple[list[bytes | None], list[float]]:
    found: list[bytes | None] = []
    times: list[float] = []

    def on_reply(data: bytes | None) -> None:
        found.append(data)
        times.append(wire.now)

    wire.open("a").request("ask", b"?", on_reply, timeout_s)
    return found, times


def test_the_replies_to_a_request_have_no_hole_and_their_end_always_comes() -> None:
    complete: list[bytes | None] = [*FRAMES[:10], None]
    lengths: set[int] = set()
    for seed in range(100):
        wire = Wire(seed, drop=0.1, duplicate=0.5, delay_s=(0.0, 0.05))
        Server(wire, 10)
        found, times = ask(wire)
        wire.run(10.0)

        assert found[-1] is None
        assert found[:-1] == complete[: len(found) - 1]
        if found != complete:
            assert times[-1] == pytest.approx(5.0)
        lengths.add(len(found))
    assert {1, 11} < lengths


def test_replies_that_a_partition_swallowed_break_the_stream_although_the_rest_would_arrive() -> None:
    wire = Wire(delay_s=(0.0, 0.0))
    Server(wire, 10, pause_s=0.1)
    found, times = ask(wire)
    wire.run(0.35)
    wire.net.way("b", "a").cut = True
    wire.run(0.2)
    wire.net.way("b", "a").cut = False
    wire.run(10.0)

    assert found == [b"0", b"1", b"2", b"3", None]
    assert times[-1] == pytest.approx(5.0)


def test_a_request_that_arrives_when_its_key_is_no_longer_served_ends_without_a_reply() -> None:
    wire = Wire(delay_s=(0.1, 0.1))
    server = Server(wire, 1)
    found, times = ask(wire)
    server.fabric.serve(["another"], server.on_request)
    wire.run()

    assert found == [None]
    assert times == [pytest.approx(0.2)]


def test_a_request_ends_soon_after_its_server_has_gone() -> None:
    for seed in SEEDS:
        wire = Wire(seed)
        server = Server(wire, 10, pause_s=10.0)
        found, times = ask(wire, timeout_s=60.0)
        wire.run(1.0)
        server.fabric.gone()
        wire.run(5.0)

        assert found == [b"0", None]
        low, high = fabric_module.GONE_S
        assert 1.0 + low <= times[-1] <= 1.0 + high


def test_a_request_without_a_server_ends_at_once_and_behind_a_partition_at_once_or_with_its_timeout() -> None:
    wire = Wire()
    nobody, _ = ask(wire)
    wire.run(0.0)
    ends: set[float] = set()
    for seed in SEEDS:
        cut = Wire(seed)
        Server(cut, 1)
        cut.net.way("a", "b").cut = True
        found, times = ask(cut)
        cut.run(10.0)
        assert found == [None]
        ends.add(times[0])

    assert nobody == [None]
    assert ends == {0.0, 5.0}


def test_a_node_that_restarts_gets_what_is_sent_to_the_new_process_and_nothing_of_the_old_one() -> None:
    wire = Wire(delay_s=(0.1, 0.1))
    a, old = wire.open("a"), wire.open("b")
    lost: list[bytes] = []
    old.listen(["k/**"], lambda frame, acknowledge: lost.append(frame))
    a.send([("k/x", b"old")])
    old.close()
    wire.open("b", "k/**")
    a.send([("k/x", b"new")])
    wire.run()

    assert lost == []
    assert wire.received["b"] == [b"new"]


def test_the_conditions_of_a_network_hold_for_links_that_are_used_later() -> None:
    wire = Wire()
    wire.net.set_conditions(Conditions(drop=1.0))

    assert send(wire) == []
