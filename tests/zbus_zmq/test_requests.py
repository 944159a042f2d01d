"""Requests and their replies over ROUTER sockets."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zmq_support import Replies, children, fabrics, raw_socket, until

from zbus.config import BusConfig
from zbus.errors import TransportError
from zbus.observe.counters import Counters
from zbus_zmq.carry.request_client import ZmqPendingRequest, ZmqRequestClient
from zbus_zmq.carry.request_server import BURST, ZmqRequestServer
from zbus_zmq.fabric import open_fabric
from zbus_zmq.find.discovery import NodeRecord
from zbus_zmq.find.lease import encode_lease, take_lease


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"zmq://?registry={tmp_path}"


def answering(*replies: bytes) -> Callable[[Any], None]:
    """Answers on a thread of its own, as a node does."""

    def asked(request: Any) -> None:
        def run() -> None:
            for reply in replies:
                request.reply(reply + request.payload)
            request.close()

        threading.Thread(target=run).start()

    return asked


def test_replies_come_in_order_and_end(url: str) -> None:
    with fabrics(url) as (one, other):
        other.serve(["svc/a", "svc/b"], answering(*[b"%d " % number for number in range(1000)]))
        replies = Replies()
        one.request("svc/b", b"q", replies, 10.0)

        assert replies.wait() == [b"%d q" % number for number in range(1000)]
        assert replies.ends == 1


def test_a_request_for_a_key_that_no_node_serves_ends_at_once(url: str) -> None:
    with fabrics(url) as (one, other):
        other.serve(["svc/a"], answering(b"x"))
        replies = Replies()
        before = time.monotonic()
        one.request("svc/b", b"q", replies, 10.0)

        assert replies.wait() == []
        assert time.monotonic() - before < 5.0  # not after the time that the request had


def test_a_node_is_found_as_soon_as_answer_has_returned(url: str) -> None:
    with fabrics(url) as (one, other):
        for number in range(10):
            other.serve([f"svc/{number}"], answering(b"x"))
            replies = Replies()
            one.request(f"svc/{number}", b"", replies, 5.0)
            assert replies.wait() == [b"x"]
        replies = Replies()
        one.request("svc/0", b"", replies, 5.0)

        assert replies.wait() == []


def test_a_node_that_has_just_opened_finds_the_nodes_that_serve_a_key(url: str) -> None:
    with fabrics(url, 1) as (one,):
        one.serve(["svc/a"], answering(b"x"))
        fresh = open_fabric(BusConfig(), url)
        try:
            replies = Replies()
            fresh.request("svc/a", b"", replies, 5.0)
            assert replies.wait() == [b"x"]
        finally:
            fresh.close()


def test_a_node_sends_a_request_to_itself_if_no_other_node_serves_the_key(url: str) -> None:
    with fabrics(url) as (one, other):
        one.serve(["svc/a"], answering(b"own "))
        replies = Replies()
        one.request("svc/a", b"q", replies, 5.0)
        assert replies.wait() == [b"own q"]
        other.serve(["svc/a"], answering(b"other "))
        replies = Replies()
        one.request("svc/a", b"q", replies, 5.0)

        assert replies.wait() == [b"other q"]


def test_requests_are_spread_over_the_nodes_that_serve_the_key(url: str) -> None:
    with fabrics(url, 3) as (client, *servers):
        for number, each in enumerate(servers):
            each.serve(["svc/a"], answering(b"%d" % number))
        counted: Counter[bytes] = Counter()
        for _ in range(40):
            replies = Replies()
            client.request("svc/a", b"", replies, 5.0)
            counted.update(replies.wait())

    assert counted.keys() == {b"0", b"1"}
    assert counted.total() == 40


def test_a_request_that_takes_too_long_ends_and_its_server_is_notified(url: str) -> None:
    requests: list[Any] = []
    with fabrics(url) as (one, other):
        other.serve(["svc/a"], requests.append)
        replies = Replies()
        one.request("svc/a", b"", replies, 0.3)
        assert replies.wait(5) == []
        assert len(requests) == 1

        def refused() -> bool:
            try:
                requests[0].reply(b"late")
            except TransportError:
                return True
            return False

        assert until(refused, 5)


def test_a_client_that_no_longer_listens_is_noticed_by_the_server(url: str) -> None:
    requests: list[Any] = []
    with fabrics(url) as (one, other):
        other.serve(["svc/a"], requests.append)
        replies = Replies()
        asking = one.request("svc/a", b"", replies, 30.0)
        assert until(lambda: requests)
        asking.close()
        asking.close()

        def pour() -> None:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                requests[0].reply(b"x" * 1000)

        with pytest.raises(TransportError, match="not sent"):
            pour()
        assert replies.ends == 0


class ClientSocket:
    """Stands in for the client's ROUTER: a test puts into `arrived` what the other node sends."""

    def __init__(self) -> None:
        self.arrived: deque[list[bytes]] = deque()
        self.sent: list[list[bytes]] = []

    def set(self, *option: object) -> None: ...

    def send_multipart(self, parts: list[bytes], flags: int) -> None:
        self.sent.append(parts)

    def recv(self, flags: int, copy: bool) -> SimpleNamespace:
        if not self.arrived:
            raise zmq.Again
        part = self.arrived[0].pop(0)
        more = bool(self.arrived[0]) or self.arrived.popleft() != []
        return SimpleNamespace(bytes=part, more=more)


def pending_request(
    counts: Counters,
) -> tuple[ZmqRequestClient, ZmqPendingRequest, ClientSocket, list[Callable[[], None]], Replies]:
    """A request that was sent to another node, without a network; what is posted to the I/O thread is collected."""
    socket, posted, replies = ClientSocket(), list[Callable[[], None]](), Replies()
    io = SimpleNamespace(post=posted.append, later=lambda *timer: None)
    links = SimpleNamespace(connect=lambda *endpoint: True)
    client = ZmqRequestClient(io, socket, links, "own", counts)  # type: ignore[arg-type]
    client.set_nodes({"ab": NodeRecord(node="ab", requests="tcp://127.0.0.1:1", serves=("svc/a",))})
    request = ZmqPendingRequest("svc/a", b"q", replies, time.monotonic() + 60, b"12345678")
    client.send(request)
    return client, request, socket, posted, replies


def reply(number: int) -> list[bytes]:
    return [b"ab/0", b"R", b"12345678", number.to_bytes(8), b"x"]


def test_replies_between_close_and_the_cancellation_do_not_prevent_it() -> None:
    counts = Counters("test")
    client, request, socket, posted, replies = pending_request(counts)

    request.close()
    socket.arrived.extend([reply(0), reply(1), reply(2)])  # read before the I/O thread gets to the cancellation
    client.on_readable()
    (cancel,) = posted
    cancel()

    assert socket.sent[1:] == [[b"ab/0", b"C", b"12345678"]]
    assert (replies.received, replies.ends) == ([], 0)
    assert counts.snapshot() == {}


def test_a_request_is_cancelled_if_a_reply_is_out_of_order() -> None:
    client, _, socket, _, replies = pending_request(Counters("test"))

    socket.arrived.append(reply(1))
    client.on_readable()

    assert socket.sent[1:] == [[b"ab/0", b"C", b"12345678"]]
    assert (replies.received, replies.ends) == ([], 1)


def test_a_handler_that_replies_faster_than_the_socket_sends_leaves_the_thread_to_others() -> None:
    requests: list[Any] = []
    posted: list[Callable[[], None]] = []
    sent: list[list[bytes]] = []

    def send(parts: list[bytes], flags: int) -> None:
        sent.append(parts)
        if len(sent) < 10_000:
            requests[0].reply(b"more")  # there is always one more

    socket = SimpleNamespace(set=lambda *option: None, send_multipart=send)
    server = ZmqRequestServer(SimpleNamespace(post=posted.append), socket, Counters("test"))  # type: ignore[arg-type]
    server.serve(["svc/a"], requests.append)
    server._take(zmq.Frame(), b"client", b"12345678", b"svc/a", b"")
    requests[0].reply(b"first")

    (flush,) = posted
    flush()

    assert len(sent) <= BURST
    assert len(posted) == 2, "it continues later, and was not woken for each reply"
    server.end((b"client", b"12345678"))
    with pytest.raises(TransportError, match="no longer listens"):
        requests[0].reply(b"x")


def test_a_request_to_a_process_that_is_killed_ends(tmp_path: Path, url: str) -> None:
    code = (
        "import sys, zbus_zmq.fabric as f; from zbus.config import BusConfig;"
        f"x = f.open_fabric(BusConfig(), {url!r});"
        "x.serve(['svc/a'], lambda q: (q.reply(b'first'), print('asked', flush=True)));"
        "print('ready', flush=True); sys.stdin.read()"
    )
    with fabrics(url, 1) as (one,), children() as start:
        child = start("run", code)
        child.wait_for("ready")
        replies = Replies()
        one.request("svc/a", b"", replies, 60.0)
        child.wait_for("asked")
        assert until(lambda: replies.received == [b"first"])
        before = time.monotonic()
        child.kill()

        assert replies.wait() == [b"first"]
        assert time.monotonic() - before < 5.0


def test_a_request_ends_when_its_connection_breaks_and_is_not_sent_to_another(tmp_path: Path, url: str) -> None:
    asked: list[Any] = []
    context: zmq.Context[Any] = zmq.Context()
    server = raw_socket(context, zmq.ROUTER)
    server.bind("tcp://127.0.0.1:*")
    endpoint = server.get_string(zmq.LAST_ENDPOINT)
    node = NodeRecord(node="ab" * 8, requests=endpoint, serves=("svc/a",))
    try:
        with fabrics(url) as (one, other):
            (tmp_path / f"{node.node}.json").write_bytes(encode_lease(take_lease("default", node, 3600)))
            replies = Replies()
            one.request("svc/a", b"q", replies, 60.0)
            route, kind, ident, key, payload = server.recv_multipart()
            assert (kind, key, payload) == (b"Q", b"svc/a", b"q")
            server.send_multipart([route, b"R", ident, (0).to_bytes(8), b"first"])
            assert until(lambda: replies.received == [b"first"])
            other.serve(["svc/a"], asked.append)
            assert until(lambda: any(each.serves for node, each in one._nodes.items() if node == other.node))
            server.close()

            assert replies.wait(10) == [b"first"]
            assert asked == []  # it may have been handled already
    finally:
        server.close()
        context.term()


def test_a_reply_that_is_missing_ends_the_request_and_is_counted(tmp_path: Path, url: str) -> None:
    context: zmq.Context[Any] = zmq.Context()
    server = raw_socket(context, zmq.ROUTER)
    server.bind("tcp://127.0.0.1:*")
    node = NodeRecord(node="ab" * 8, requests=server.get_string(zmq.LAST_ENDPOINT), serves=("svc/a",))
    try:
        with fabrics(url, 1) as (one,):
            (tmp_path / f"{node.node}.json").write_bytes(encode_lease(take_lease("default", node, 3600)))
            replies = Replies()
            one.request("svc/a", b"q", replies, 60.0)
            route, _, ident, _, _ = server.recv_multipart()
            for number in (0, 2):
                server.send_multipart([route, b"R", ident, number.to_bytes(8), b"%d" % number])
            server.send_multipart([route, b"nonsense"])

            assert replies.wait(10) == [b"0"]
            assert until(lambda: "reply_invalid" in one.diagnostics()["counts"])
            assert one.diagnostics()["counts"]["reply_out_of_order"] == 1
    finally:
        server.close()
        context.term()


def test_a_dead_server_is_skipped_for_a_live_one(tmp_path: Path, url: str) -> None:
    ghost = NodeRecord(node="ab" * 8, requests="tcp://127.0.0.1:1", serves=("svc/a",))
    with fabrics(url) as (one, other):
        other.serve(["svc/a"], answering(b"alive"))
        (tmp_path / f"{ghost.node}.json").write_bytes(encode_lease(take_lease("default", ghost, 3600)))
        for _ in range(8):
            replies = Replies()
            one.request("svc/a", b"", replies, 10.0)
            assert replies.wait() == [b"alive"]


def test_a_slow_client_delays_only_its_own_replies(tmp_path: Path) -> None:
    url = f"zmq://?registry={tmp_path}&hwm=10"
    release = threading.Event()
    slow_received: list[bytes | None] = []

    def slow(reply: bytes | None) -> None:
        release.wait(20)
        slow_received.append(reply)

    with fabrics(url, 3) as (server, slow_client, quick_client):
        server.serve(["svc/a"], answering(*[b"%d" % number + b"x" * 20_000 for number in range(600)]))
        slow_client.request("svc/a", b"", slow, 30.0)
        replies = Replies()
        quick_client.request("svc/a", b"", replies, 30.0)
        quick = replies.wait()
        release.set()
        assert until(lambda: slow_received and slow_received[-1] is None)

    assert len(quick) == 600
    assert len(slow_received) == 601


def test_requests_in_flight_end_when_a_fabric_closes(url: str) -> None:
    requests: list[Any] = []
    with fabrics(url) as (one, other):
        other.serve(["svc/a"], requests.append)
        replies = Replies()
        one.request("svc/a", b"", replies, 60.0)
        assert until(lambda: requests)
        one.close()
        assert replies.wait(5) == []
        other.close()
        with pytest.raises(TransportError):
            requests[0].reply(b"late")


PARTS = st.sampled_from([b"Q", b"C", b"R", b"E", b"N", b"", b"12345678", b"svc/a", b"\xff\xfe"]) | st.binary(
    max_size=12
)


def test_whatever_is_sent_to_the_socket_for_requests_the_next_one_is_answered(url: str) -> None:
    context: zmq.Context[Any] = zmq.Context()
    with fabrics(url) as (one, other):
        other.serve(["svc/a"], answering(b"x"))
        rogue = raw_socket(context, zmq.DEALER)
        rogue.connect(other.diagnostics()["requests"])

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(PARTS, min_size=1, max_size=6))
        def send(parts: list[bytes]) -> None:
            rogue.send_multipart(parts)

        try:
            send()
            rogue.send_multipart([b"nonsense"])
            assert until(lambda: other.diagnostics()["counts"].get("request_invalid", 0) > 0)
            replies = Replies()
            one.request("svc/a", b"", replies, 10.0)
            assert replies.wait() == [b"x"]
        finally:
            rogue.close()
            context.term()


def test_whatever_a_server_replies_the_request_ends_and_the_next_one_gets_its_own(tmp_path: Path) -> None:
    """The server is a bare socket with a lease of its own, which sends rubbish about the request that it got."""
    context: zmq.Context[Any] = zmq.Context()
    rogue = raw_socket(context, zmq.ROUTER, RCVTIMEO=20_000)
    rogue.bind("tcp://127.0.0.1:*")
    mine = NodeRecord(node="cd" * 8, requests=rogue.get_string(zmq.LAST_ENDPOINT), serves=("svc/rogue",))
    (tmp_path / f"{mine.node}.json").write_bytes(encode_lease(take_lease("default", mine, 3600)))
    part = st.sampled_from([b"", b"R", b"E", b"N", b"C", b"id", bytes(8), (1).to_bytes(8), b"12345678"]) | st.binary(
        max_size=10
    )
    with fabrics(f"zmq://?registry={tmp_path}", 1) as (here,):
        assert until(lambda: mine.node in here._nodes)

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(st.lists(part, min_size=1, max_size=5), max_size=3))
        def answered(messages: list[list[bytes]]) -> None:
            rubbish, proper = Replies(), Replies()
            here.request("svc/rogue", b"", rubbish, 10.0)
            route, _, ident, *_ = next_request(rogue)
            for message in messages:
                rogue.send_multipart([route, *[ident if each == b"id" else each for each in message]])
            rogue.send_multipart([route, b"E", ident, bytes(7) + b"\x63"])  # which cannot be right
            rubbish.wait()
            here.request("svc/rogue", b"", proper, 10.0)
            route, _, ident, *_ = next_request(rogue)
            rogue.send_multipart([route, b"R", ident, bytes(8), b"yes"])
            rogue.send_multipart([route, b"E", ident, (1).to_bytes(8)])

            assert proper.wait() == [b"yes"]
            assert (rubbish.ends, proper.ends) == (1, 1)

        try:
            answered()
            counts = here.diagnostics()["counts"]
            assert counts["reply_invalid"] > 0
            assert counts["reply_out_of_order"] > 0
            assert "io_failed" not in counts
        finally:
            rogue.close()
            context.term()


def next_request(rogue: Any) -> list[bytes]:
    """The next request; a client may also cancel one."""
    while (parts := rogue.recv_multipart())[1] != b"Q":
        pass
    return list(parts)
