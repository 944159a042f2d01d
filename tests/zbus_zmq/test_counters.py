"""Rare failures of a ZMQ transport: each is counted, and those that a person should know of are recorded."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from mesh_fakes import recorded
from zmq_support import until

from zbus.config import BusConfig
from zbus.observe.counters import Counters
from zbus_zmq.address.options import ZmqOptions
from zbus_zmq.address.topics import mark_of
from zbus_zmq.carry import request_client
from zbus_zmq.carry.request_client import ZmqPendingRequest, ZmqRequestClient
from zbus_zmq.carry.request_server import ZmqRequestServer
from zbus_zmq.carry.subscribers import Subscribers
from zbus_zmq.fabric import open_fabric
from zbus_zmq.find.discovery import NodeRecord
from zbus_zmq.find.file_registry import FileRegistry
from zbus_zmq.find.lease import encode_lease, take_lease
from zbus_zmq.io.curve import Keys, make_keys
from zbus_zmq.io.io_thread import IoThread
from zbus_zmq.io.links import REFUSED, Links

NODE = NodeRecord(node="f" * 16, requests="tcp://127.0.0.1:9", serves=("a/b",))
IDENT = bytes(8)


class FakeSocket:
    """Keeps what is sent; it fails with `error` while that is set."""

    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []
        self.error: zmq.ZMQError | None = None

    def set(self, option: int, value: object) -> None:
        pass

    def send_multipart(self, parts: list[bytes], flags: int) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(parts)

    def disconnect(self, endpoint: str) -> None:
        raise zmq.ZMQError(errno.ENOENT)

    def get_monitor_socket(self, events: int) -> FakeSocket:
        return self


class FakeIo:
    """Runs what is posted when the test says so; timers never run."""

    def __init__(self) -> None:
        self.posted: list[Callable[[], None]] = []
        self.post = self.posted.append

    def later(self, delay_s: float, step: Callable[[], None]) -> None:
        pass

    def read(self, socket: object) -> None:
        pass

    def on_readable(self, socket: object, handler: Callable[[], None]) -> None:
        pass

    def run(self) -> None:
        while self.posted:
            self.posted.pop(0)()


class FakeLinks:
    def connect(self, endpoint: str, key: str | None, route: bytes) -> bool:
        return True


class Bench:
    def __init__(self) -> None:
        self.io, self.socket, self.counts = FakeIo(), FakeSocket(), Counters("zmq")

    def client(self) -> ZmqRequestClient:
        client = ZmqRequestClient(self.io, self.socket, FakeLinks(), "own", self.counts)  # type: ignore[arg-type]
        client.set_nodes({NODE.node: NODE})
        return client

    def server(self) -> ZmqRequestServer:
        return ZmqRequestServer(self.io, self.socket, self.counts)  # type: ignore[arg-type]

    @property
    def counted(self) -> dict[str, int]:
        return self.counts.snapshot()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def request(ended: list[bytes | None], ident: bytes = IDENT) -> ZmqPendingRequest:
    return ZmqPendingRequest("a/b", b"?", ended.append, 1e12, ident)


def reported(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each["record"], each.get("code", "")) for each in records]


def test_a_request_that_the_socket_refuses_ends_and_is_reported(bench: Bench) -> None:
    ended: list[bytes | None] = []
    bench.socket.error = zmq.ZMQError(errno.EHOSTUNREACH)
    with recorded() as records:
        bench.client().send(request(ended))

    assert (ended, bench.counted) == ([None], {"request_failed": 1})
    assert reported(records) == [("REQUEST_FAILED", "request_failed")]


def test_a_request_beyond_the_limit_ends_and_is_reported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_client, "PENDING_MAX", 1)
    client, ended = bench.client(), list[bytes | None]()
    client.send(request(ended))
    with recorded() as records:
        client.send(request(ended, b"2" * 8))

    assert (ended, bench.counted) == ([None], {"too_many_requests": 1})
    assert reported(records) == [("EVENT_DROPPED", "too_many_requests")]


def test_a_cancellation_that_cannot_be_sent_is_counted(bench: Bench) -> None:
    pending = request([])
    bench.client().send(pending)
    bench.socket.error = zmq.Again()
    pending.close()
    bench.io.run()

    assert bench.counted == {"cancel_dropped": 1}


def test_a_request_for_a_key_that_is_not_served_is_rejected_and_counted(bench: Bench) -> None:
    server = bench.server()
    server._take(zmq.Frame(b""), b"client", IDENT, b"a/b", b"")

    assert (bench.socket.sent, bench.counted) == ([[b"client", b"N", IDENT]], {"request_rejected": 1})


def test_a_rejection_that_cannot_be_sent_is_counted(bench: Bench) -> None:
    bench.socket.error = zmq.Again()
    bench.server()._take(zmq.Frame(b""), b"client", IDENT, b"a/b", b"")

    assert bench.counted == {"rejection_dropped": 1, "request_rejected": 1}


def test_a_reply_to_a_client_that_is_gone_is_reported(bench: Bench) -> None:
    server, taken = bench.server(), list[Any]()
    server.serve(["a/b"], taken.append)
    server._take(zmq.Frame(b""), b"client", IDENT, b"a/b", b"")
    bench.socket.error = zmq.ZMQError(errno.EHOSTUNREACH)
    with recorded() as records:
        taken[0].reply(b"late")
        bench.io.run()

    assert bench.counted == {"client_gone": 1}
    assert reported(records) == [("REPLY_FAILED", "client_gone")]


def test_an_acknowledgement_that_cannot_be_sent_is_counted(bench: Bench) -> None:
    bench.socket.error = zmq.Again()
    Subscribers(bench.socket, "own", bench.counts)._acknowledge(mark_of("f" * 16, 1))  # type: ignore[arg-type]

    assert bench.counted == {"acknowledgement_dropped": 1}


def test_a_folder_of_keys_that_cannot_be_read_is_reported_and_permits_no_peer(tmp_path: Path, bench: Bench) -> None:
    public, secret = make_keys(tmp_path / "own", "node")
    with recorded() as records:
        keys = Keys(secret, tmp_path / "missing", bench.counts)
        allowed = keys.permits(public.read_bytes())

    assert (allowed, bench.counted) == (False, {"curve_folder_unreadable": 2})
    assert reported(records) == [("CURVE_FAILED", "curve_folder_unreadable")]


def test_connecting_and_disconnecting_are_recorded_for_debugging(bench: Bench) -> None:
    bench.socket.connect = lambda endpoint: None  # type: ignore[attr-defined]
    links = Links(bench.io, bench.socket, None, bench.counts)  # type: ignore[arg-type]
    with recorded() as records:
        assert links.connect("tcp://127.0.0.1:9", None)
        links.drop("tcp://127.0.0.1:9")

    assert [(each["record"], each["level"]) for each in records] == [
        ("TRANSPORT_CONNECTING", logging.DEBUG),
        ("TRANSPORT_DISCONNECTING", logging.DEBUG),
    ]


@pytest.mark.parametrize("event", REFUSED)
def test_a_handshake_that_the_peer_rejects_is_reported(
    bench: Bench, event: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = [{"event": event, "endpoint": b"tcp://127.0.0.1:9"}]

    def receive(socket: object, flags: int) -> dict[str, Any]:
        if not arrived:
            raise zmq.Again
        return arrived.pop()

    monkeypatch.setattr("zbus_zmq.io.links.recv_monitor_message", receive)
    with recorded() as records:
        Links(bench.io, bench.socket, None, bench.counts)._read_events()  # type: ignore[arg-type]

    assert bench.counted == {"handshake_rejected": 1}
    assert reported(records) == [("TRANSPORT_CONNECT_FAILED", "handshake_rejected")]


def test_an_expired_lease_that_is_removed_is_counted(tmp_path: Path, bench: Bench) -> None:
    lease = json.loads(encode_lease(take_lease("default", NODE, 0.1)))
    path = tmp_path / f"{NODE.node}.json"
    path.write_text(json.dumps(lease | {"beat_s": 0.0}))
    os.chmod(tmp_path, 0o700)
    registry = FileRegistry(ZmqOptions(registry=tmp_path), bench.counts)
    try:
        assert until(lambda: not registry.look() and not path.exists())
    finally:
        registry.close()
    assert bench.counted == {"leases_expired": 1}


def test_a_registry_that_cannot_be_read_is_reported(tmp_path: Path, bench: Bench) -> None:
    folder = tmp_path / "registry"
    registry = FileRegistry(ZmqOptions(registry=folder), bench.counts)
    with recorded() as records:
        registry.watch(lambda nodes: None)
        folder.rmdir()
        assert until(lambda: bench.counted.get("registry_failed", 0) > 0)
        registry.close()

    assert ("TRANSPORT_DISCOVERY_FAILED", "registry_failed") in reported(records)


def test_opening_a_transport_is_recorded_for_debugging_and_a_thread_that_does_not_end_as_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded() as records:
        fabric = open_fabric(BusConfig(), f"zmq://?registry={tmp_path}/registry")
        close = IoThread.close

        def late(io: IoThread, timeout_s: float) -> bool:
            close(io, timeout_s)
            return False

        monkeypatch.setattr(IoThread, "close", late)
        fabric.close()

    assert [each["level"] for each in records if each["record"] == "TRANSPORT_OPEN"] == [logging.DEBUG]
    (error,) = [each for each in records if each["record"] == "TRANSPORT_ERROR"]
    assert (error["code"], error["doing"], error["level"]) == ("close_timeout", "close", logging.ERROR)
