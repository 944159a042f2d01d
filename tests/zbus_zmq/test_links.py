"""Connections of one socket: what becomes of a message that is half taken when its connection is dropped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from zmq_support import until

from zbus.observe.counters import Counters
from zbus_zmq.io.io_thread import IoThread
from zbus_zmq.io.links import Links

# libzmq aborts the process where this goes wrong, so it has one of its own.
DROP = """
import sys, zmq
from zbus.observe.counters import Counters
from zbus_zmq.io.io_thread import IoThread
from zbus_zmq.io.links import Links

kind = sys.argv[1]
counts = Counters("test")
io, heard = IoThread("test", counts), []
with zmq.Context() as context, context.socket(zmq.ROUTER if kind == "ROUTER" else zmq.XPUB) as peer:
    peer.set(zmq.RCVTIMEO, 10_000)
    endpoint = f"tcp://127.0.0.1:{peer.bind_to_random_port('tcp://127.0.0.1')}"

    def start():
        socket = io.context.socket(getattr(zmq, kind))
        socket.set(zmq.LINGER, 0)
        links = Links(io, socket, None, counts)
        assert links.connect(endpoint, None, b"peer" if kind == "ROUTER" else None)
        if kind == "ROUTER":
            socket.send_multipart([b"peer", b"hello"])
        else:
            socket.subscribe(b"")
        return socket, links

    socket, links = io.call("start", start)
    first = peer.recv_multipart()
    parts = [b"topic", b"one", b"two"]
    peer.send_multipart(first[:1] + parts if kind == "ROUTER" else parts)

    def drop():
        io.on_readable(socket, lambda: heard.append(socket.recv_multipart(zmq.NOBLOCK)))
        assert socket.poll(10_000)  # libzmq has the first part now
        links.drop(endpoint)

    io.call("drop", drop)
    print(heard[0][-3:] == parts, io.call("go on", lambda: "alive"))
    io.close(5.0)
"""


@pytest.mark.parametrize("kind", ["ROUTER", "SUB"])
def test_a_connection_dropped_while_a_message_waits_costs_neither_the_message_nor_the_process(kind: str) -> None:
    ended = subprocess.run([sys.executable, "-c", DROP, kind], capture_output=True, text=True, timeout=60)

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True alive\n", "")


# A node that cannot be reached is dropped, and the next request is for the same one: it is connected to again at once.
AGAIN = """
import sys
from pathlib import Path
from zbus.config import BusConfig
from zbus_zmq.carry.request_client import ZmqPendingRequest
from zbus_zmq.find.discovery import NodeRecord
from zbus_zmq.fabric import open_fabric

fabric = open_fabric(BusConfig(), "zmq://?registry=" + sys.argv[1])
client = fabric._client

def again():
    ended = []
    mine = NodeRecord(node="f" * 16, requests="tcp://127.0.0.1:9", serves=("a/b",))
    for number in range(300):
        client.set_nodes({mine.node: mine})
        client.send(ZmqPendingRequest("a/b", b"", ended.append, 1e12, number.to_bytes(8)))
        client.set_nodes({})
    return len(ended)

print(fabric._io.call("ask again", again, 60.0))
fabric.close()
"""


def test_a_node_that_was_dropped_is_connected_to_again_at_once(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", AGAIN, str(tmp_path)], capture_output=True, text=True, timeout=60)

    assert (ended.returncode, ended.stdout) == (0, "300\n"), ended.stderr


class Clock:
    """Time that passes from one timer to the next: what `Links` needs of an I/O thread, and of `time`."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.delays: list[float] = []
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now

    def later(self, delay_s: float, step: Callable[[], None]) -> None:
        self.delays.append(delay_s)
        self._timers.append((self.now + delay_s, step))

    def read(self, socket: object) -> None:
        """Nothing waits."""

    def on_readable(self, socket: object, handler: Callable[[], None]) -> None:
        """Nothing arrives."""

    def forget(self, socket: object) -> None:
        """Nothing is watched."""

    def run(self, timers: int) -> None:
        for _ in range(timers):
            self._timers.sort(key=lambda timer: timer[0])
            self.now, step = self._timers.pop(0)
            step()


def test_an_endpoint_that_is_refused_is_tried_again_for_ever_after_pauses_that_grow_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, counts = Clock(), Counters("test")
    monkeypatch.setattr("zbus_zmq.io.links.time", clock)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        links = Links(clock, socket, None, counts)  # type: ignore[arg-type]
        links.want({"nonsense": None, "tcp://127.0.0.1:1": None})
        clock.run(11)

        full = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 6]
        assert all(pause / 2 <= delay <= pause for delay, pause in zip(clock.delays, full, strict=True))
        assert counts.snapshot() == {"connect_failed": 12}
        assert links.made == 1  # no socket listens there: libzmq tries again by itself

        links.want({"tcp://127.0.0.1:1": None})
        clock.run(1)
        assert len(clock.delays) == 12, "what is no longer wanted is not tried again"
        links.want({"nonsense": None})
        assert [delay <= 0.5 for delay in clock.delays[12:]] == [True]
        links.close()


def test_links_know_which_endpoints_are_connected_and_report_the_first_and_the_last(tmp_path: Path) -> None:
    counts = Counters("test")
    io, linked = IoThread("test", counts), list[bool]()
    with zmq.Context() as context, context.socket(zmq.PUB) as one, context.socket(zmq.PUB) as two:
        one_at = f"tcp://127.0.0.1:{one.bind_to_random_port('tcp://127.0.0.1')}"
        two_at = f"ipc://{tmp_path / 'socket'}"
        two.bind(two_at)

        def start() -> Links:
            made = Links(io, io.context.socket(zmq.SUB), None, counts, schemes=("tcp://", "ipc://"))
            made.on_linked = linked.append
            made.want({one_at: None, two_at: None})
            return made

        links = io.call("start", start)
        try:
            assert until(lambda: links.connected == {one_at, two_at})
            one.close(0)
            assert until(lambda: links.connected == {two_at})
            assert (linked, counts.snapshot()) == ([True], {"disconnected": 1})

            io.call("drop", lambda: links.want({}))  # libzmq reports no event for it

            assert (links.connected, links.made, linked) == (frozenset(), 0, [True, False])
        finally:
            io.close(5.0)


def test_an_endpoint_of_another_scheme_is_refused() -> None:
    counts = Counters("test")
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        links = Links(Clock(), socket, None, counts)  # type: ignore[arg-type]

        assert not links.connect("ipc:///tmp/somewhere", None)

        assert counts.snapshot() == {"connect_failed": 1}
        links.close()
