"""A program of Dynamo's event plane, written from the description of its wire alone: it imports nothing of zbus.

It packs and unpacks with plain dicts, uses nats-py and pyzmq as they come, and writes discovery files by hand, in
both generations. What it and zbus exchange is therefore the wire, and not an opinion that both share.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import nats
import zmq

WAIT_S = 20.0
LOOPBACK = "tcp://127.0.0.1:0"


def envelope(publisher_id: int, sequence: int, topic: str, payload: bytes, at_ms: int | None = None) -> bytes:
    return msgspec.msgpack.encode(
        {
            "publisher_id": publisher_id,
            "sequence": sequence,
            "published_at": at_ms if at_ms is not None else time.time_ns() // 1_000_000,
            "topic": topic,
            "payload": payload,
        }
    )


def message(frame_0: str, publisher_id: int, sequence: int, topic: str, payload: bytes) -> list[bytes]:
    body = envelope(publisher_id, sequence, topic, payload)
    return [
        frame_0.encode(),
        struct.pack(">Q", publisher_id),
        struct.pack(">Q", sequence),
        b"\x01" + struct.pack(">I", len(body)) + body,
    ]


def opened(frames: list[bytes]) -> dict[str, Any]:
    """The envelope of a message, after every check that a subscriber of Dynamo makes."""
    assert len(frames) == 4
    publisher_id, sequence = struct.unpack(">Q", frames[1])[0], struct.unpack(">Q", frames[2])[0]
    version, length = frames[3][0], struct.unpack(">I", frames[3][1:5])[0]
    assert version == 1
    assert length == len(frames[3]) - 5
    found: dict[str, Any] = msgspec.msgpack.decode(frames[3][5:])
    assert list(found) == ["publisher_id", "sequence", "published_at", "topic", "payload"]
    assert (found["publisher_id"], found["sequence"]) == (publisher_id, sequence)
    assert isinstance(found["payload"], bytes)
    return found


def percent(text: str, keep: str) -> str:
    return "".join(
        chr(byte) if chr(byte).isascii() and (chr(byte).isalnum() or chr(byte) in keep) else f"%{byte:02X}"
        for byte in text.encode()
    )


def subject(*names: str) -> str:
    *scope, topic = [percent(name, "-_") for name in names]
    pairs = zip(("namespace", "component", "endpoint"), scope, strict=False)
    return ".".join([part for pair in pairs for part in pair] + [topic])


class NatsPeer:
    """Publishes and subscribes with nats-py on a thread of its own."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="peer-nats", daemon=True)
        self._thread.start()
        self._client = self._run(nats.connect(url))
        self.received: SimpleQueue[tuple[str, dict[str, Any]]] = SimpleQueue()

    def subscribe(self, pattern: str) -> None:
        async def take(found: Any) -> None:
            assert not found.headers
            assert not found.reply
            self.received.put((found.subject, msgspec.msgpack.decode(found.data)))

        self._run(self._client.subscribe(pattern, cb=take))
        self._run(self._client.flush())

    def publish(self, to: str, body: bytes) -> None:
        self._run(self._client.publish(to, body))

    def publish_all(self, to: str, bodies: list[bytes]) -> None:
        async def publish() -> None:
            for body in bodies:
                await self._client.publish(to, body)
                await asyncio.sleep(0)
            await self._client.flush()

        self._run(publish())

    def next(self) -> tuple[str, dict[str, Any]]:
        return self.received.get(timeout=WAIT_S)

    def close(self) -> None:
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)


class Records:
    """Discovery files, made and read by hand."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "v1" / "event_channels"
        self.directory.mkdir(parents=True, exist_ok=True)

    def add(self, names: tuple[str, ...], publisher_id: int, endpoint: str, *, old: bool = False) -> Path:
        *scope, topic = names
        shape = self._old_shape(scope) if old else {"scope": self._new_shape(scope)}
        value = {
            "type": "EventChannel",
            **shape,
            "topic": topic,
            "instance_id": publisher_id,
            "transport": {"kind": "Zmq", "config": {"endpoint": endpoint}},
        }
        path = self.directory / percent(self._key(scope, topic, publisher_id, old), "")
        temporary = self.directory / f".tmp_{secrets.token_hex(8)}"
        temporary.write_text(json.dumps(value, separators=(",", ":")))
        os.link(temporary, path)
        temporary.unlink()
        return path

    def read(self) -> list[dict[str, Any]]:
        found = []
        for path in self.directory.iterdir():
            if not path.name.startswith(".tmp_"):
                with suppress(FileNotFoundError):  # it went this very moment
                    found.append(json.loads(path.read_text()))
        return found

    @staticmethod
    def _key(scope: list[str], topic: str, publisher_id: int, old: bool) -> str:
        if old:
            return f"{'/'.join([*scope, ''][:2])}/{topic}/{publisher_id:x}"
        pairs = zip(("namespace", "component", "endpoint"), scope, strict=False)
        path = "/".join(part for kind, name in pairs for part in (kind, percent(name, "-_")))
        return f"{path}/topic/{percent(topic, '-_')}/{publisher_id:x}"

    @staticmethod
    def _old_shape(scope: list[str]) -> dict[str, Any]:
        return {"namespace": scope[0], "component": scope[1] if len(scope) > 1 else ""}

    @staticmethod
    def _new_shape(scope: list[str]) -> dict[str, Any]:
        if len(scope) == 1:
            return {"kind": "namespace", "name": scope[0]}
        if len(scope) == 2:
            return {"kind": "component", "namespace": scope[0], "component": scope[1]}
        return {"kind": "endpoint", "endpoint": {"namespace": scope[0], "component": scope[1], "name": scope[2]}}


class ZmqPublisher:
    """One PUB socket for one publisher, as Dynamo has it: bound and registered, or connected to brokers."""

    def __init__(self, context: zmq.Context[Any], names: tuple[str, ...], connect: tuple[str, ...] = ()) -> None:
        self.names, self.publisher_id, self.sequence = names, secrets.randbits(53), 0
        self._frame_0 = subject(*names) if connect else names[-1]
        self.socket = context.socket(zmq.PUB)
        self.socket.linger = 0
        self.socket.sndhwm = 100_000
        for endpoint in connect:
            self.socket.connect(endpoint)
        if not connect:
            self.socket.bind(LOOPBACK)
        self.endpoint = self.socket.last_endpoint.decode()

    def publish(self, payload: bytes) -> None:
        self.socket.send_multipart(message(self._frame_0, self.publisher_id, self.sequence, self.names[-1], payload))
        self.sequence += 1

    def close(self) -> None:
        self.socket.close()


class ZmqSubscriber:
    """A subscriber of Dynamo to one scope and topic: it polls the records, and has a socket for each that matches."""

    def __init__(self, context: zmq.Context[Any], names: tuple[str, ...], source: Records | tuple[str, ...]) -> None:
        self.names, self.received = names, SimpleQueue[dict[str, Any]]()
        self._context, self._source = context, source
        self._sockets: dict[int, Any] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peer-zmq", daemon=True)
        self._thread.start()

    def next(self) -> dict[str, Any]:
        return self.received.get(timeout=WAIT_S)

    def drained(self, quiet_s: float = 0.5) -> list[dict[str, Any]]:
        """Everything up to a moment of silence."""
        found = []
        while True:
            try:
                found.append(self.received.get(timeout=quiet_s))
            except Empty:
                return found

    def close(self) -> None:
        self._ended.set()
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        poller = zmq.Poller()
        while not self._ended.is_set():
            self._connect(poller)
            for socket, _ in poller.poll(20):
                found = opened(socket.recv_multipart())
                if found["topic"] == self.names[-1]:
                    self.received.put(found)
        for socket in self._sockets.values():
            socket.close(0)

    def _connect(self, poller: zmq.Poller) -> None:
        if not isinstance(self._source, Records):
            if not self._sockets:
                self._sockets[0] = self._open(poller, self._source, subject(*self.names))
            return
        here = {each["instance_id"]: each for each in self._source.read() if self._matches(each)}
        for publisher_id, each in here.items():
            if publisher_id not in self._sockets:
                endpoint = each["transport"]["config"]["endpoint"]
                self._sockets[publisher_id] = self._open(poller, (endpoint,), self.names[-1])
        for publisher_id in self._sockets.keys() - here.keys():
            socket = self._sockets.pop(publisher_id)
            poller.unregister(socket)
            socket.close(0)

    def _matches(self, found: dict[str, Any]) -> bool:
        return bool(found["scope"] == Records._new_shape(list(self.names[:-1])) and found["topic"] == self.names[-1])

    def _open(self, poller: zmq.Poller, endpoints: tuple[str, ...], topic: str) -> Any:
        socket = self._context.socket(zmq.SUB)
        socket.rcvhwm = 100_000
        socket.subscribe(topic)
        for endpoint in endpoints:
            socket.connect(endpoint)
        poller.register(socket, zmq.POLLIN)
        return socket


class Broker:
    """An XSUB/XPUB proxy, and no more."""

    def __init__(self, context: zmq.Context[Any], xsub: str = LOOPBACK, xpub: str = LOOPBACK) -> None:
        self._front, self._back, self._control = (context.socket(kind) for kind in (zmq.XSUB, zmq.XPUB, zmq.PAIR))
        for socket, endpoint in ((self._front, xsub), (self._back, xpub)):
            socket.linger = 0
            socket.sndhwm = socket.rcvhwm = 100_000
            socket.bind(endpoint)
        self.xsub, self.xpub = self._front.last_endpoint.decode(), self._back.last_endpoint.decode()
        address = f"inproc://control-{id(self)}"
        self._control.bind(address)
        self._stop = context.socket(zmq.PAIR)
        self._stop.connect(address)
        self._thread = threading.Thread(target=self._run, name="peer-broker", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.send(b"TERMINATE")
        self._thread.join(WAIT_S)
        for socket in (self._front, self._back, self._control, self._stop):
            socket.close(0)

    def _run(self) -> None:
        zmq.proxy_steerable(self._front, self._back, None, self._control)


@contextmanager
def zmq_context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(0)


@contextmanager
def closing_all() -> Iterator[Callable[[Any], Any]]:
    """`keep(x)` closes x at the end, in reverse."""
    kept: list[Any] = []

    def keep(item: Any) -> Any:
        kept.append(item)
        return item

    try:
        yield keep
    finally:
        for item in reversed(kept):
            item.close()
