"""Bad input, put on the wire below the fabric by programs that know nothing of it.

Each function speaks a transport's own protocol through its library, or a plain socket, and aims at the listeners of
one key and at responders. `INJECTED` comes last: when it arrives as a frame, all before it did.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zenoh
import zmq

INJECTED = b"\x07injected below the fabric"  # no envelope either
LINGER_MS = 10_000  # sockets that are closed at once: ending their context waits until what they sent is gone
_chance = random.Random(42)

BLOBS = [
    b"",
    b"\0",
    b"\x01",
    b"\x02\xdd\xff\xff\xff\xff",
    b"\x01\x9a\x01\x02",
    b"\x03",
    b"\x04",
    b"\x01" + b"\x91" * 5000,  # nested deeper than a decoder should follow
    b"\xff" * 200,
    b"{}",
    b"\r\nPUB x 0\r\n\r\n",
    *[_chance.randbytes(_chance.randrange(1, 300)) for _ in range(60)],
    *[bytes([kind]) + _chance.randbytes(40) for kind in range(8)],
    _chance.randbytes(1 << 20),
]

# Parts of large NATS messages: unfinished, out of order, without end, beyond every bound.
PARTS = [
    b"0123456789abcdef %d %d %d" % each
    for each in ((0, 2, 10), (5, 2, 10), (0, 0, 0), (1, 3, 8), (0, 3, 8), (0, 999999, 999999999999), (0, 1, 1))
]


def plain_socket_garbage(host: str, port: int) -> None:
    """Bytes of no protocol at all, on connections that then end or stay silent."""
    for blob in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, _chance.randbytes(4096), b"\xff\0\0\0\0\0\0\0\x01\x7f"):
        with socket.create_connection((host, port), timeout=5.0) as link:
            link.settimeout(0.05)
            try:
                link.sendall(blob)
                link.recv(100)
            except OSError:  # refused, as it should be, or silent
                pass


def through_zenoh(config: dict[str, Any], key: str, answered: str, reached: Callable[[], bool]) -> None:
    """Puts, deletes and queries of a bare Zenoh session."""
    settings = zenoh.Config()
    for path, value in {
        "mode": config["mode"],
        "connect/endpoints": config["connect"],
        "listen/endpoints": [],
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": False,
    }.items():
        settings.insert_json5(path, json.dumps(value))
    session = zenoh.open(settings)
    try:
        publisher = session.declare_publisher(key)
        matched: Callable[[], Any] = lambda: publisher.matching_status  # noqa: E731  # the stub says bool
        _until(lambda: bool(matched().matching), "subscriber")
        for blob in BLOBS:
            publisher.put(blob)
        publisher.put(b"x", encoding=zenoh.Encoding("text/plain"), attachment=_chance.randbytes(50))
        publisher.delete()
        session.put(f"{key.rpartition('/')[0]}/*", b"to a wildcard")
        for selector in (answered, f"{answered}?a=b;c", f"{answered.rpartition('/')[0]}/*", "**"):
            for reply in session.get(selector, payload=_chance.randbytes(100), timeout=1.0):
                assert reply.ok is None or reply.err is None
            list(session.get(selector, timeout=1.0))
        sent_until(lambda: publisher.put(INJECTED), reached)
    finally:
        session.close()  # type: ignore[no-untyped-call]


def through_nats(port: int, key: str, answered: str, send: Callable[[], object], reached: Callable[[], bool]) -> None:
    """The protocol's own lines, on the subjects that are seen to be in use."""
    with _nats(port) as link:
        link.sendall(b"SUB > 1\r\nPING\r\n")
        seen = _read_until(link, b"PONG\r\n")
        target = key.replace("/", ".").encode()
        send()
        seen = _read_until(link, b"MSG %b " % target, seen)
        link.sendall(b"UNSUB 1\r\n")
        seen_subjects = {line.split()[1] for line in seen.split(b"\r\n") if line.startswith((b"MSG ", b"HMSG "))}
        invalid = {b"a..b", b"%zz.x", b"\xff.x", target.partition(b".")[0] + b".%2f"}
        subjects = seen_subjects | invalid | {b"@ask." + answered.replace("/", ".").encode()}
        for subject in sorted(subjects):
            for blob in BLOBS:
                if len(blob) < 1 << 20:
                    link.sendall(b"PUB %b %d\r\n%b\r\n" % (subject, len(blob), blob))
                    link.sendall(b"PUB %b _INBOX.nobody %d\r\n%b\r\n" % (subject, len(blob), blob))
            for name in (b"X", b"Zbus-Part", b"Status", b"Nats-Msg-Id"):
                for value in (b"", b"1", b"\xff\xfe", b"9" * 500, *PARTS):
                    head = b"NATS/1.0\r\n%b: %b\r\n\r\n" % (name, value)
                    link.sendall(b"HPUB %b %d %d\r\n%bbody\r\n" % (subject, len(head), len(head) + 4, head))
        sent_until(lambda: link.sendall(b"PUB %b %d\r\n%b\r\n" % (target, len(INJECTED), INJECTED)), reached)


def through_zmq(
    send_to: zmq.Socket[bytes], topic: bytes, stamp: Callable[[], list[bytes]], reached: Callable[[], bool]
) -> None:
    """Messages with wrong counts of parts, wrong topics and wrong contents, from a bare socket."""
    for blob in BLOBS:
        for parts in ([topic], [topic, blob], [blob, blob], [topic, blob, blob], [topic, *stamp(), blob], [blob]):
            send_to.send_multipart(parts)
        send_to.send_multipart([topic, *[blob[:10]] * 100])
    sent_until(lambda: send_to.send_multipart([topic, *stamp(), INJECTED]), reached)


def subscriptions_through_zmq(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    """A subscriber that subscribes to nonsense."""
    with context.socket(zmq.XSUB) as subscriber:
        subscriber.linger = LINGER_MS
        subscriber.connect(endpoint)
        for blob in BLOBS[:40]:
            for kind in (b"\1", b"\0", b"", b"\2"):
                subscriber.send(kind + blob[:200])
            subscriber.send(b"\1\xff" + blob[:40])
            subscriber.send_multipart([b"\1", blob[:200]])


def requests_through_zmq(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, answered: str) -> None:
    """Send malformed requests to responders."""
    with context.socket(zmq.DEALER) as asker:
        asker.linger = LINGER_MS
        asker.connect(endpoint)
        for blob in BLOBS[:40]:
            for parts in (
                [blob],
                [b"Q", blob],
                [b"Q", b"12345678", blob, blob],
                [b"C", blob],
                [b"R", blob, blob, blob],
            ):
                asker.send_multipart(parts)
            asker.send_multipart([b"Q", b"%08d" % _chance.randrange(10**8), answered.encode(), blob])


def leases(registry: Path) -> list[tuple[str, str]]:
    """Return the addresses at which each registered node publishes and takes requests."""
    found = [json.loads(path.read_bytes())["node"] for path in registry.glob("?" * 16 + ".json")]
    return [(node["publish"] or "", node["questions"]) for node in found]


def forged_lease(registry: Path, publish: str) -> Path:
    """The file of a node that exists nowhere but in the registry, made from that of one that does."""
    lease = json.loads(next(registry.glob("?" * 16 + ".json")).read_bytes())
    lease["node"] |= {"node": "00112233445566ff", "publish": publish, "questions": publish, "answers": []}
    found = registry / "00112233445566ff.json"
    found.write_text(json.dumps(lease))
    return found


def zmq_topic(key: str) -> bytes:
    """A key of letters and slashes as it is on the wire."""
    return key.encode() + b"/\0"


@contextmanager
def _nats(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=20.0) as link:
        _read_until(link, b"\r\n")
        link.sendall(b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true}\r\n')
        yield link


def _read_until(link: socket.socket, mark: bytes, found: bytes = b"") -> bytes:
    found = found[-1_000_000:] if not found.endswith(mark) else b""
    deadline = time.monotonic() + 20.0
    while mark not in found:
        assert time.monotonic() < deadline, f"{mark!r} was not seen among {found[-500:]!r}"
        found += link.recv(65536)
    return found


def sent_until(send: Callable[[], object], reached: Callable[[], bool]) -> None:
    """Send until it has arrived."""
    deadline = time.monotonic() + 20.0
    send()
    while not reached():
        assert time.monotonic() < deadline, "the bad input did not reach the listener: this test shows nothing"
        send()


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.01)
