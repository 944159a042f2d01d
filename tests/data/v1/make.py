"""Write the files of this folder: what version 0.1 of zbus puts on disk and on the wire.

This ran once, on version 0.1 at the commit 7c847ee, and is kept for the record: it says how each file came to be. It
uses that version's internals and need not run on any later version; `tests/test_first_version.py` reads what it wrote.

    python tests/data/v1/make.py log      log.db and lossy.db with what lies beside them, expected.json.gz
    python tests/data/v1/make.py frames   frames-zenoh.json, frames-nats.json, frames-zmq.json, frames-dynamo.json

The first needs Java 17 for Spark, which writes the cold tier; the second starts NATS servers on loopback ports.

Nothing here names the machine: the host name, the boot id and the namespace of process ids, which version 0.1 writes
into the head record, into announcements and into the leases of ZMQ nodes, are replaced before anything is opened.

The log, by offset:

    1 to 40         removed by retention, and gone for good
    41 to 4095      in the cold tier alone: offloaded by Spark, then trimmed from the file
    4096 to 8191    in the file, a sealed block
    8192 to the end in the file, not sealed yet

Each of the last three parts has one event of every variety. The first and the last of them also have events that were
received from another node, and events that crossed a bridge before.

`lossy.db` is a second, short log: its end was lost (an older copy of the file was put back) and the loss was accepted.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import platform
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, chdir, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import nats
import zenoh
import zmq

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "support"))

from dynamo_peer import Broker, Records, subject  # noqa: E402
from mesh_support import reserved_port  # noqa: E402
from nats_support import nats_server  # noqa: E402

import zbus  # noqa: E402
from zbus import announcement, asking, beacon, codec, logservice  # noqa: E402
from zbus.event import Event  # noqa: E402
from zbus.headers import Foreign  # noqa: E402
from zbus_dynamo import envelope as dynamo_envelope  # noqa: E402
from zbus_dynamo import frames as dynamo_frames  # noqa: E402
from zbus_dynamo import records as dynamo_records  # noqa: E402
from zbus_dynamo import scopes as dynamo_scopes  # noqa: E402
from zbus_log import Rules, headrecord, retain  # noqa: E402
from zbus_nats import plain as nats_plain  # noqa: E402
from zbus_nats import subjects as nats_subjects  # noqa: E402
from zbus_zmq import discovery as zmq_discovery  # noqa: E402
from zbus_zmq import lease as zmq_lease  # noqa: E402
from zbus_zmq import topics as zmq_topics  # noqa: E402

COMMIT = "7c847ee"
HOST = "first.example"
BOOT = "00000000-0000-4000-8000-000000000001"
WAIT_S = 20.0

LOG = HERE / "log.db"
BLOCK = 4096
GONE = 40  # removed by retention
TAIL = 160  # over the last sealed block
MIDNIGHT_NS = 1_769_904_000_000_000_000  # 2026-02-01T00:00:00Z
SMALL = 64  # payloads up to so many bytes are in expected.json as they are, others by their SHA-256

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ORDER = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "total": {"type": "number"}},
    "required": ["id"],
}
ORDER_2 = ORDER | {"properties": {**ORDER["properties"], "note": {"type": "string"}}}  # type: ignore[dict-item]
LEGACY = {"type": "object", "required": ["code"], "properties": {"code": {"type": "string"}}}
OLD = {"type": "array", "items": {"type": "integer"}}


def hide_the_machine() -> None:
    """Replace what would tell on which machine this ran."""
    platform.node = lambda: HOST
    socket.gethostname = lambda: HOST
    headrecord._boot_id = BOOT.encode
    zmq_lease._boot = lambda: BOOT  # type: ignore[assignment]
    zmq_lease._pid_space = lambda pid: "pid:[1]"  # type: ignore[assignment]


async def until(true: Callable[[], Any], what: str) -> Any:
    """Wait until something is true, and return it."""
    deadline = time.monotonic() + WAIT_S
    while not (found := true()):
        assert time.monotonic() < deadline, f"{what} did not come true within {WAIT_S:g} s"
        await asyncio.sleep(0.01)
    return found


@asynccontextmanager
async def endpoint() -> AsyncIterator[str]:
    """A loopback port for Zenoh."""
    with reserved_port() as kept:
        yield f"tcp/127.0.0.1:{kept.getsockname()[1]}"


# The log.


def filler(first: int, count: int) -> list[Event]:
    """Small events around a midnight, of three publishers on eight keys, some with headers."""
    made = []
    for number in range(first, first + count):
        key = f"shop/stock/{number % 5}" if number % 8 < 5 else f"plant/line-{number % 3}/state"
        headers = {"batch": f"b{number // 100}"} if number % 50 == 0 else {}
        at = MIDNIGHT_NS + (number - 2000) * 1_000_000_000 - number % 7
        made.append(Event(1000 + number % 3, number, at, key, b"n=%d" % number, headers))
    return made


def variety(turn: int) -> list[Event]:
    """One event of each kind that only its identity and its bytes tell from others; put, not published."""
    large = b"".join(hashlib.sha256(b"%d/%d" % (turn, part)).digest() for part in range(2100))  # 67,200 bytes
    at = MIDNIGHT_NS + turn
    return [
        Event((1 << 63) - 1, turn, at, "edge/largest-publisher", b"\x00\xff"),
        Event(5 + turn, (1 << 63) - 1, at, "edge/largest-sequence", b""),
        Event(8 + turn, 0, 0, "edge/oldest-time", b"1970"),
        Event(11, turn, at, "größe/ü/straße", "Grüße".encode(), {"content-type": "text/plain"}),
        Event(12, turn, at, "50%/a=b/c:d", b"odd characters"),
        Event(13, turn, at, "audit/@own/x", b"a verbatim segment"),
        Event(14, turn, at, "edge/large", large, {"content-type": "application/octet-stream"}),
        Event(15, turn, at, "edge/headers", b"h", {"x-empty": "", "x-text": "Wert ü 漢字", "schema": "Order"}),
    ]


async def publish_varied(bus: zbus.Bus, turn: int) -> None:
    """One event of each kind that `publish` makes."""
    created = await bus.publisher("shop/orders/created")
    await created.publish({"id": turn, "total": 9.5})
    await created.publish({"id": turn + 1}, correlation_id=f"order-{turn}")
    await created.publish({"id": turn + 2}, headers={"traceparent": TRACEPARENT, "tracestate": "a=b"})
    await created.publish_many([{"id": turn * 10 + n} for n in range(5)], headers={"x-batch": "yes"})
    other = await bus.publisher("shop/notes")
    await other.publish(b"\x00\x01\xfe\xff")
    await other.publish("text, Grüße")
    await other.publish([1, 2.5, None, {"nested": True}])
    await other.publish(b"<a/>", headers={"content-type": "application/xml"}, correlation_id="x-1")
    legacy = await bus.publisher("legacy/station")
    await legacy.publish({"code": "A1"})
    await legacy.publish({"no code": True})  # does not fit its schema, which is permissive: stored all the same
    await bus.session("alice-7").publish("shop/cart", {"items": turn})
    await bus.put(*variety(turn))


async def networked_turn(folder: Path, turn: int) -> None:
    """The log's node beside another one, and beside a bridge to a third: it records what both of them send."""
    with nats_server(folder / f"nats-{turn}") as server:
        async with endpoint() as where:
            first = zbus.open(LOG, mode="peer", listen=[where], record=["fleet/**"], node="first", metadata={"a": "b"})
            second = zbus.open(folder / "second.db", mode="peer", connect=[where], node="second")
            third = zbus.open(folder / "third.db", transport=server.url, node="third")
            ends = (server.url, "zenoh://")
            across = zbus.Bridge(ends, ["fleet/**"], log=folder / "bridge.db", mode="peer", connect=[where])
            async with first, second, third, across:
                if turn == 1:
                    await begin(first)
                await asyncio.sleep(2.5)  # what beacons tell is remembered where it was wanted for two seconds
                await publish_varied(first, turn)
                seen: list[zbus.Event] = []
                async with first.subscribe("fleet/**", durable="fleet-board") as board:
                    truck = await second.publisher("fleet/truck-7/position")
                    await truck.publish({"x": turn, "y": 2}, correlation_id="trip-1")
                    await truck.publish(b"raw", headers={"traceparent": TRACEPARENT})
                    await truck.publish_many(["a", "b", "c"])
                    ship = await third.publisher("fleet/ship-1/position")
                    await ship.publish({"x": 0, "via": "a bridge"}, headers={"x-from": "third"})
                    await ship.publish("across")
                    while len(seen) < 7:
                        seen.append(await asyncio.wait_for(anext(board), WAIT_S))
                    await seen[-1].ack()
                # Beacons and stored positions come once a second.
                await until(lambda: heard(first) >= 2, "heard positions")
                await asyncio.sleep(1.5)


def heard(bus: zbus.Bus) -> int:
    return sum(name.startswith("heard/") for name in bus.log.positions.load())  # type: ignore[union-attr]


async def begin(bus: zbus.Bus) -> None:
    """The schemas, and the events that retention removes."""
    gone = await bus.publisher("gone/by/retention")
    await gone.publish_many([b"%d" % n for n in range(GONE)])
    await bus.schemas.register("shop/orders/*", ORDER)
    await bus.schemas.register("shop/orders/*", ORDER_2)
    await bus.schemas.register("legacy/**", LEGACY, mode="permissive")
    await bus.schemas.register("old/**", OLD)
    await bus.schemas.remove("old/**")


async def fill() -> None:
    """Events up to the tail, with a turn of the varied ones in the second block; durable names on the way."""
    async with zbus.open(LOG) as bus:
        number = 0
        for upto in (BLOCK + 2000, 2 * BLOCK + 20):
            count = upto - await bus.run(bus.log.head)  # type: ignore[union-attr]
            await bus.put(*filler(number, count))
            number += count
            if upto < 2 * BLOCK:
                await publish_varied(bus, 2)
        for name, keys, start in (
            ("billing", ("shop/orders/**", "legacy/*"), BLOCK + 2000),
            ("audit ü", ("**",), 2 * BLOCK),
            ("archive", ("shop/**",), 2 * BLOCK + 1),
        ):
            async with bus.subscribe(*keys, durable=name, start=start) as reading:
                await (await reading.next()).ack()
        await bus.put(*filler(number, TAIL))


def offload_and_trim() -> None:
    """The first block to Parquet files by Spark, then out of the log's file."""
    from spark_support import spark

    from zbus_spark.jobs.offload import offload
    from zbus_spark.jobs.trim import trim

    retain(LOG, Rules(upto=GONE))
    done = offload(spark(), LOG, segment_events=BLOCK, limit_segments=1)
    assert (done.first, done.last) == (GONE + 1, BLOCK - 1), done
    trimmed = trim(LOG)
    assert (trimmed.low_water, trimmed.held_by) == (BLOCK - 1, None), trimmed


def stored_payload(payload: bytes) -> dict[str, Any]:
    if len(payload) <= SMALL:
        return {"hex": payload.hex()}
    return {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}


def stored_event(event: Event) -> dict[str, Any]:
    found: dict[str, Any] = {
        "offset": event.offset,
        "key": event.key,
        "publisher_id": event.publisher_id,
        "sequence": event.sequence,
        "published_at": event.published_at,
        "payload": stored_payload(event.payload),
        "headers": dict(event.headers),
    }
    if isinstance(event.headers, Foreign):
        source = event.headers
        found["source"] = {
            "origin": source.origin,
            "offset": source.offset,
            "via": list(source.via),
            "link": source.link,
        }
    return found


async def describe_log(path: Path) -> dict[str, Any]:
    """What a reader gets out of the log, as version 0.1 reads it."""
    async with zbus.open(path, read_only=True) as bus:
        log = bus.log
        assert log is not None
        events = [stored_event(event) async for event in bus.replay()]
        # No wildcard matches a segment that begins with "@".
        events += [stored_event(event) async for event in bus.replay("audit/@own/**")]
        events.sort(key=lambda event: event["offset"])
        names = ["shop/orders/*", "legacy/**", "old/**"]
        return {
            "version": zbus.__version__,
            "commit": COMMIT,
            "head": log.head(),
            "low_water": log.low_water(),
            "file_low_water": BLOCK - 1,
            "sealed_until": 2 * BLOCK - 1,
            "cursors": [
                {"name": each.name, "offset": each.offset, "keys": list(each.keys), "updated_at": each.updated_at_ns}
                for each in log.cursors.list()
            ],
            "positions": dict(sorted(log.positions.load().items())),
            "schemas": {
                name: {
                    "in_force": None if (now := bus.schemas.get(name)) is None else now.version,
                    "versions": [each._asdict() for each in bus.schemas.versions(name)],
                }
                for name in names
            },
            "events": events,
        }


def check_log(expected: Mapping[str, Any]) -> None:
    """What was read is what was put: the reader that described it is not the only witness."""
    events = {(each["publisher_id"], each["sequence"]): each for each in expected["events"]}
    assert len(events) == expected["head"] - GONE
    assert [each["offset"] for each in expected["events"]] == list(range(GONE + 1, expected["head"] + 1))
    put = [*(event for turn in (1, 2, 3) for event in variety(turn)), *filler(0, 7000)]
    for event in put:
        found = events[event.identity]
        assert found == stored_event(event) | {"offset": found["offset"]}, found
    sources = [each["source"] for each in expected["events"] if "source" in each]
    assert sum(bool(each["via"]) for each in sources) == 4, sources
    kinds = {name.partition("/")[0] for name in expected["positions"]}
    assert kinds == {"from", "heard", "sent", "since"}, kinds


def make_log() -> None:
    for each in (*HERE.glob("log.db*"), *HERE.glob("lossy.db*")):
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(networked_turn(Path(folder), 1))
        asyncio.run(fill())
        asyncio.run(networked_turn(Path(folder), 3))
    offload_and_trim()
    origin = asyncio.run(move_into_the_tier())
    for each in HERE.glob("log.db-cold/**/.*"):  # locks, and the checksums that Hadoop writes beside its files
        each.unlink()
    with tempfile.TemporaryDirectory() as folder:  # a reader leaves files beside what it reads
        for each in HERE.glob("log.db*"):
            (shutil.copytree if each.is_dir() else shutil.copy)(each, Path(folder, each.name))
        expected = asyncio.run(describe_log(Path(folder, LOG.name)))
    check_log(expected)
    expected |= {"origin": origin, "lossy": asyncio.run(make_lossy())}
    for each in (*HERE.glob("*-wal"), *HERE.glob("*-shm")):
        raise AssertionError(f"{each.name} is left: the log was not closed cleanly")
    data = json.dumps(expected, ensure_ascii=False, separators=(",", ":")).encode()
    (HERE / "expected.json.gz").write_bytes(gzip.compress(data, mtime=0))


async def make_lossy() -> dict[str, Any]:
    """A log whose end was lost and given up: no offset that may have been used is given out again."""
    path = HERE / "lossy.db"
    async with zbus.open(path) as bus:
        publisher = await bus.publisher("shop/lossy")
        await publisher.publish_many([b"kept %d" % n for n in range(10)])
    older = path.read_bytes()
    async with zbus.open(path) as bus:
        await (await bus.publisher("shop/lossy")).publish_many([b"lost %d" % n for n in range(5)])
    path.write_bytes(older)
    async with zbus.open(path, accept_loss=True) as bus:
        await (await bus.publisher("shop/lossy")).publish_many([b"after %d" % n for n in range(3)])
        assert bus.log is not None
        events = [stored_event(event) async for event in bus.replay()]
        found = {"head": bus.log.head(), "low_water": bus.log.low_water(), "events": events}
    assert [bytes.fromhex(each["payload"]["hex"])[:4] for each in events] == [b"kept"] * 10 + [b"afte"] * 3
    assert found["head"] > 1 << 20, found["head"]
    return found


async def move_into_the_tier() -> int:
    """One durable name goes back to where only the cold tier has events. Returns what the log is called among nodes."""
    async with zbus.open(LOG) as bus:
        assert bus.log is not None
        await bus.run(bus.log.cursors.reset, "archive", 2000)
        return bus.log.origin


# The wire.


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def plain(value: Any) -> Any:
    """A decoded structure as JSON: bytes in hexadecimal."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, msgspec.Struct):
        return plain(msgspec.structs.asdict(value))
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def describe_frame(frame: bytes) -> dict[str, Any]:
    """What the decoders of version 0.1 make of a frame that is sent to everybody."""
    kind = frame[0]
    if kind == codec.BEACON:
        return {"beacon": plain(beacon.decode_beacon(frame))}
    if kind == codec.NODE:
        return {"node": plain(announcement.decode_announcement(frame))}
    if kind == codec.CANCEL:
        return {"cancel": int.from_bytes(frame[1:9])}
    return {"events": plain(codec.open_frame(frame))}


def describe_question(about: str, payload: bytes) -> dict[str, Any]:
    """A question: to a handler (`request`), for a page of a log (`page`), or for who has a log (`logs`)."""
    asked = asking.decode_asked(payload)
    inner: dict[str, Any] = {}
    if about == "page":
        inner = {"wanted": plain(logservice._decode_wanted(asked.body))}
    elif about == "request":
        inner = {"events": plain(codec.open_frame(asked.body))}
    return {"id": asked.id, "body": plain(asked.body), **inner}


def describe_reply(about: str, payload: bytes) -> dict[str, Any]:
    """One reply: its kind, its number, and what its body holds."""
    kind, number, body = asking._read_reply(payload)
    inner: dict[str, Any] = {}
    if kind == asking.FAILED:
        inner = {"failure": list(asking._read_failure(body))}
    elif kind == asking.DATA and about == "page" and body[:1] == b"\0":
        inner = {"covered": plain(logservice._decode_covered(body[1:]))}
    elif kind == asking.DATA and about == "logs":
        inner = {"log": plain(logservice._decode_told(body))}
    elif kind == asking.DATA:
        inner = {"events": plain(codec.open_frame(body))}
    name = {asking.ACCEPTED: "accepted", asking.DATA: "data", asking.END: "end", asking.FAILED: "failed"}[kind]
    return {"kind": name, "number": number, "body": plain(body), **inner}


class Book:
    """The frames of one transport, each with what it decodes to."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.frames: list[dict[str, Any]] = []

    def add(self, name: str, what: str, wire: Mapping[str, Any], decoded: Mapping[str, Any]) -> None:
        assert name not in [each["name"] for each in self.frames], name
        self.frames.append({"name": name, "what": what, "wire": dict(wire), "decoded": dict(decoded)})

    def save(self) -> None:
        found = {"version": zbus.__version__, "commit": COMMIT, "transport": self.transport, "frames": self.frames}
        text = json.dumps(found, ensure_ascii=False, indent=1) + "\n"
        (HERE / f"frames-{self.transport}.json").write_text(text)


class Caught:
    """What a plain client of a transport hears, and how it asks and is asked. `payload` is zbus's part of a message."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, bytes, dict[str, Any]]] = []  # key, payload, all of the message
        self.asked: list[tuple[str, bytes, dict[str, Any]]] = []

    def frame(self, key: str, true: Callable[[bytes], Any] = bool) -> tuple[str, bytes, dict[str, Any]] | None:
        return next((each for each in list(self.heard) if each[0].startswith(key) and true(each[1])), None)

    async def ask(self, key: str, payload: bytes) -> list[tuple[bytes | None, dict[str, Any]]]:
        """Ask a node; its replies, each with all of the message. None for a message of the transport alone."""
        raise NotImplementedError

    async def answer(self, *keys: str) -> None:
        """Be asked for these keys, and answer nothing."""
        raise NotImplementedError


async def converse(
    folder: Path, book: Book, caught: Caught, node: Callable[..., zbus.Bus], neighbour: Callable[[Path], Any]
) -> None:
    """Everything that two nodes of version 0.1 say, heard and answered by a plain client of the transport."""
    async with zbus.open(folder / "first.db") as bus:
        assert bus.log is not None
        origin = bus.log.origin  # type: ignore[attr-defined]
    log_key = logservice.log_key(origin)
    await caught.answer(log_key, logservice.LOGS, "shop/quote", "shop/fail", "shop/slow")

    # A node asks, and the plain client takes down its questions.
    questions: dict[str, tuple[str, bytes]] = {}

    async def ask(name: str, about: str, key: str, asking_: Any) -> None:
        before = len(caught.asked)
        task = asyncio.ensure_future(asking_)
        _, payload, wire = await until(
            lambda: next((each for each in caught.asked[before:] if each[0] == key), None), name
        )
        book.add(
            f"question-{name}", "question", wire, {"key": key, "about": about, **describe_question(about, payload)}
        )
        questions[name] = key, payload
        if name == "slow":
            task.cancel()
        with suppress(zbus.ZbusError, asyncio.CancelledError):
            await task

    async with node(node="asker") as asker:
        assert asker.network is not None
        await caught.linked(asker)  # type: ignore[attr-defined]
        stream = partial(asker.network.asker.ask, stream=True)
        await ask("logs", "logs", logservice.LOGS, logservice.ask_log(stream, 2.0))
        await ask("page", "page", log_key, logservice.ask_page(stream, origin, ("shop/**",), 0, 0, 2.0))
        more = {"own": False, "until": 9, "to_ns": logservice.ENDLESS - 1, "events": 3}
        await ask("page-span", "page", log_key, logservice.ask_page(stream, origin, (), 1, 1, 2.0, **more))
        sent = {"headers": {"traceparent": TRACEPARENT}, "correlation_id": "q-1", "timeout": 2.0}
        await ask("request", "request", "shop/quote", asker.request("shop/quote", {"sku": 7}, **sent))
        await ask("request-fail", "request", "shop/fail", asker.request("shop/fail", "text", timeout=2.0))
        await ask("slow", "request", "shop/slow", asker.request("shop/slow", b"\x00", timeout=10.0))
        _, payload, wire = await until(lambda: caught.frame("@zbus/cancel"), "a cancel")
        cancelled = describe_question("request", questions["slow"][1])["id"]
        assert describe_frame(payload) == {"cancel": cancelled}
        book.add("cancel", "frame", wire, {"key": "@zbus/cancel", **describe_frame(payload)})
        assert asker.network.origin % 2 == 0
        await (await asker.publisher("shop/unlogged")).publish(b"from a node without a log")
        key, payload, wire = await until(lambda: caught.frame("shop/unlogged"), "an event of a node without a log")
        book.add("event-unlogged", "frame", wire, {"key": key, **describe_frame(payload)})
    await caught.answer()

    # A node with a log publishes and answers.
    settings = {"node": "first", "bus": "control", "metadata": {"site": "a"}, "records": "info"}
    async with node(folder / "first.db", **settings) as first:
        assert first.network is not None
        await caught.linked(first)  # type: ignore[attr-defined]
        await publish_to_wire(first)

        @first.serve("shop/quote")
        async def quote(question: zbus.Event) -> dict[str, Any]:
            return {"price": 12, "for": question.decode(dict)}

        @first.serve("shop/fail")
        async def fail(question: zbus.Event) -> None:
            raise ValueError(f"no price for {question.decode()}")

        await first.network.answering()
        await asyncio.sleep(0.5)
        for name in ("logs", "page", "page-span", "request", "request-fail"):
            about = {"page-span": "page", "request-fail": "request"}.get(name, name)
            key, payload = questions[name]
            for number, (reply, wire) in enumerate(await caught.ask(key, payload)):
                decoded = {"transport": True} if reply is None else describe_reply(about, reply)
                book.add(f"reply-{name}-{number}", "reply", wire, {"about": about, **decoded})
        await until(lambda: caught.frame(f"@zbus/beacon/{origin:x}", lambda frame: has_newest(frame)), "a beacon")
        await until(lambda: caught.frame(f"@zbus/node/{origin:x}", serves), "an announcement")
    leaving = f"@zbus/node/{origin:x}"
    await until(lambda: caught.frame(leaving, lambda frame: describe_frame(frame)["node"]["leaving"]), "a leave")

    for name, key, true in (
        ("event", "shop/notes", bool),
        ("event-text", "shop/text", bool),
        ("event-json", "shop/orders/created", bool),
        ("event-headers", "shop/headers", bool),
        ("event-odd-key", "größe/50%.x", bool),
        ("batch", "shop/batch", bool),
        ("record", "@zbus/record/", bool),
        ("beacon", f"@zbus/beacon/{origin:x}", has_newest),
        ("node", leaving, serves),
        ("node-leaving", leaving, lambda frame: describe_frame(frame)["node"]["leaving"]),
    ):
        found = caught.frame(key, true)
        assert found is not None, name
        book.add(name, "frame", found[2], {"key": found[0], **describe_frame(found[1])})
    batch = next(each for each in book.frames if each["name"] == "batch")
    assert len(batch["decoded"]["events"]) == 5, batch

    # A bridge sends on what came over another transport.
    async with neighbour(folder) as elsewhere:
        await (await elsewhere.publisher("fleet/ship-1/position")).publish({"x": 1}, headers={"x-from": "elsewhere"})
        key, payload, wire = await until(lambda: caught.frame("fleet/ship-1/position"), "what a bridge sends")
    decoded = describe_frame(payload)
    assert decoded["events"][0]["via"], decoded
    book.add("event-bridged", "frame", wire, {"key": key, **decoded})


def has_newest(frame: bytes) -> bool:
    return bool(describe_frame(frame)["beacon"]["newest"])


def serves(frame: bytes) -> bool:
    told = describe_frame(frame)["node"]
    return bool(told["serves"] and told["publishes"]) and not told["leaving"]


async def publish_to_wire(bus: zbus.Bus) -> None:
    """Events of each kind, each on a key of its own."""
    await (await bus.publisher("shop/notes")).publish(b"\x00\x01\xfe\xff")
    await (await bus.publisher("shop/text")).publish("text, Grüße")
    await (await bus.publisher("shop/orders/created")).publish({"id": 1, "total": 9.5})
    headers = {"traceparent": TRACEPARENT, "tracestate": "a=b", "x-text": "Wert ü 漢字"}
    await (await bus.publisher("shop/headers")).publish({"id": 2}, headers=headers, correlation_id="order-2")
    await (await bus.publisher("größe/50%.x")).publish(b"an odd key")
    await (await bus.publisher("shop/batch")).publish_many([b"one", "two", {"three": 3}, b"", b"five"])


@asynccontextmanager
async def over_nats(folder: Path, other: str, **more: Any) -> AsyncIterator[zbus.Bus]:
    """A node on NATS, and a bridge from there to another transport."""
    with nats_server(folder / "nats-elsewhere") as server:
        across = zbus.Bridge((server.url, other), ["fleet/**"], log=folder / "bridge.db", **more)
        async with zbus.open(folder / "elsewhere.db", transport=server.url) as elsewhere, across:
            await asyncio.sleep(0.5)
            yield elsewhere


# Zenoh.


class ZenohCaught(Caught):
    """A plain session: subscribers, queryables and gets."""

    def __init__(self, session: zenoh.Session) -> None:
        super().__init__()
        self._session = session
        self._held: list[zenoh.Query] = []
        self._queryables: list[Any] = []
        for expression in ("**", "@zbus/**"):
            session.declare_subscriber(expression, self._sampled)

    async def linked(self, bus: zbus.Bus) -> None:
        """Once it has told of itself, it is connected and knows what we subscribe to."""
        assert bus.network is not None
        origin = bus.network.origin
        await until(lambda: self.frame(f"@zbus/node/{origin:x}"), "an announcement")
        await asyncio.sleep(0.2)

    async def ask(self, key: str, payload: bytes) -> list[tuple[bytes | None, dict[str, Any]]]:
        found: list[tuple[bytes | None, dict[str, Any]]] = []
        done = threading.Event()

        def replied(reply: zenoh.Reply) -> None:
            assert reply.ok is not None
            found.append((reply.ok.payload.to_bytes(), zenoh_wire(reply.ok)))

        handler = zenoh.handlers.Callback(replied, drop=done.set, indirect=False)
        self._session.get(key, handler, payload=payload, consolidation=zenoh.ConsolidationMode.NONE, timeout=5.0)
        await until(done.is_set, f"the end of the replies for {key}")
        return found

    async def answer(self, *keys: str) -> None:
        for each in self._queryables:
            each.undeclare()
        for query in self._held:
            query.drop()  # type: ignore[no-untyped-call]
        self._held.clear()
        self._queryables = [self._session.declare_queryable(key, self._queried, complete=True) for key in keys]

    def _sampled(self, sample: zenoh.Sample) -> None:
        self.heard.append((str(sample.key_expr), sample.payload.to_bytes(), zenoh_wire(sample)))

    def _queried(self, query: zenoh.Query) -> None:
        assert query.payload is not None
        wire = {
            "key": str(query.key_expr),
            "parameters": str(query.parameters),
            "payload": b64(query.payload.to_bytes()),
            "encoding": str(query.encoding),
            "attachment": None if query.attachment is None else b64(query.attachment.to_bytes()),
        }
        self.asked.append((str(query.key_expr), query.payload.to_bytes(), wire))
        if str(query.key_expr) == "shop/slow":
            self._held.append(query)
        else:
            query.drop()  # type: ignore[no-untyped-call]


def zenoh_wire(sample: zenoh.Sample) -> dict[str, Any]:
    return {
        "key": str(sample.key_expr),
        "kind": str(sample.kind).rpartition(".")[2],
        "payload": b64(sample.payload.to_bytes()),
        "encoding": str(sample.encoding),
        "attachment": None if sample.attachment is None else b64(sample.attachment.to_bytes()),
        "congestion_control": str(sample.congestion_control).rpartition(".")[2],
        "priority": str(sample.priority).rpartition(".")[2],
    }


def plain_session(where: str) -> zenoh.Session:
    config = zenoh.Config()
    for path, value in {
        "mode": "router",
        "listen/endpoints": [where],
        "scouting/multicast/enabled": False,
    }.items():
        config.insert_json5(path, json.dumps(value))
    return zenoh.open(config)


async def zenoh_frames(folder: Path) -> None:
    book = Book("zenoh")
    async with endpoint() as where:
        with plain_session(where) as session:
            there = {"mode": "peer", "connect": [where]}
            neighbour = partial(over_nats, other="zenoh://", **there)
            await converse(folder, book, ZenohCaught(session), partial(zbus.open, **there), neighbour)
    book.save()


# NATS.


def nats_wire(message: Any) -> dict[str, Any]:
    return {
        "subject": message.subject,
        "reply": message.reply,
        "headers": dict(message.headers) if message.headers else None,
        "payload": b64(message.data),
    }


class NatsCaught(Caught):
    """A plain client that subscribes to everything, also to questions and to inboxes."""

    def __init__(self, client: Any) -> None:
        super().__init__()
        self._client, self._inboxes, self._answers = client, 0, False
        self.messages: list[Any] = []

    @classmethod
    async def open(cls, url: str) -> NatsCaught:
        caught = cls(await nats.connect(url))
        await caught._client.subscribe(">", cb=caught._heard)
        await caught._client.flush()
        return caught

    async def linked(self, bus: zbus.Bus) -> None:
        """A server is between: nothing to wait for."""

    async def ask(self, key: str, payload: bytes) -> list[tuple[bytes | None, dict[str, Any]]]:
        self._inboxes += 1
        inbox = f"_INBOX.plain.{self._inboxes}"
        await self._client.publish(f"@ask.{nats_subjects.encode_key(key)}", payload, reply=inbox)

        def replies() -> list[Any]:
            return [each for each in self.messages if each.subject == inbox]

        await until(
            lambda: any(each.headers and "Zbus-End" in each.headers for each in replies()), f"the end for {key}"
        )
        return [(None if each.headers else each.data, nats_wire(each)) for each in replies()]

    async def answer(self, *keys: str) -> None:
        self._answers = bool(keys)

    async def close(self) -> None:
        await self._client.close()

    async def _heard(self, message: Any) -> None:
        self.messages.append(message)
        if message.subject.startswith("@ask."):
            key = nats_subjects.decode_subject(message.subject.removeprefix("@ask."))
            self.asked.append((key, message.data, nats_wire(message)))
            if self._answers and key != "shop/slow":
                await self._client.publish(message.reply, b"", headers={"Zbus-End": "0"})
        elif not message.subject.startswith(("_INBOX.", "$")):
            self.heard.append((nats_subjects.decode_subject(message.subject), message.data, nats_wire(message)))


@asynccontextmanager
async def zenoh_to_nats(folder: Path, url: str) -> AsyncIterator[zbus.Bus]:
    """A node on Zenoh, and a bridge from there to NATS."""
    async with endpoint() as where:
        ends = ("zenoh://", url)
        across = zbus.Bridge(ends, ["fleet/**"], log=folder / "bridge.db", mode="peer", connect=[where])
        async with zbus.open(folder / "elsewhere.db", mode="peer", listen=[where]) as elsewhere, across:
            await asyncio.sleep(0.5)
            yield elsewhere


async def nats_frames(folder: Path) -> None:
    book = Book("nats")
    with nats_server(folder / "nats") as server:
        caught = await NatsCaught.open(server.url)
        node = partial(zbus.open, transport=server.url)
        await converse(folder, book, caught, node, partial(zenoh_to_nats, url=server.url))
        await caught.close()
    await nats_parts(folder, book)
    await nats_plain_messages(folder, book)
    book.save()


async def nats_parts(folder: Path, book: Book) -> None:
    """Where the server takes little in one message: an event in parts, and a question that is announced first."""
    with nats_server(folder / "nats-small", config="max_payload: 2048") as server:
        caught = await NatsCaught.open(server.url)
        body = bytes(range(256)) * 20  # 5,120 bytes
        async with zbus.open(folder / "parts.db", transport=server.url) as one:
            async with zbus.open(transport=server.url) as other:

                @one.serve("shop/echo")
                async def echo(question: zbus.Event) -> bytes:
                    return question.payload

                assert one.network is not None
                await one.network.answering()
                await (await one.publisher("shop/large")).publish(body)
                assert (await other.request("shop/echo", body)).payload == body
                await asyncio.sleep(0.5)
        await caught.close()
    parts = [each for each in caught.messages if each.subject == "shop.large"]
    large = next(each for each in caught.messages if each.subject == "@ask.shop.echo")
    upload = next(each for each in caught.messages if each.headers and "Zbus-Upload" in each.headers)
    uploaded = [each for each in caught.messages if each.subject == upload.headers["Zbus-Upload"]]
    replies = [each for each in caught.messages if each.subject == large.reply and each is not upload]
    whole = b"".join(each.data for each in parts)
    for number, each in enumerate(parts):
        decoded = {"key": "shop/large", **describe_frame(whole)} if number == len(parts) - 1 else {}
        book.add(f"part-event-{number}", "part", nats_wire(each), decoded)
    book.add("large-question", "transport", nats_wire(large), {"key": "shop/echo"})
    book.add("large-upload", "transport", nats_wire(upload), {})
    whole = b"".join(each.data for each in uploaded)
    for number, each in enumerate(uploaded):
        decoded = {"about": "request", **describe_question("request", whole)} if number == len(uploaded) - 1 else {}
        book.add(f"part-question-{number}", "part", nats_wire(each), decoded)
    cut = [each for each in replies if each.headers and "Zbus-Part" in each.headers]
    whole = b"".join(each.data for each in cut)
    for number, each in enumerate(cut):
        decoded = {"about": "request", **describe_reply("request", whole)} if number == len(cut) - 1 else {}
        book.add(f"part-reply-{number}", "part", nats_wire(each), decoded)
    assert len(parts) == len(uploaded) == len(cut) == 3, (len(parts), len(uploaded), len(cut))


async def nats_plain_messages(folder: Path, book: Book) -> None:
    """Events as plain messages (`nats+raw`), and as messages of a stream (`nats+js`)."""
    with nats_server(folder / "nats-js", jetstream=True) as server:
        caught = await NatsCaught.open(server.url)
        stream = await nats.connect(server.url)
        await stream.jetstream().add_stream(name="FIRST", subjects=["js.>"])
        where = server.url.partition("://")[2]
        for name, url, key in (
            ("raw", f"nats+raw://{where}", "raw/50%.x"),
            ("js", f"nats+js://{where}/FIRST?durable=reader", "js/orders"),
        ):
            async with zbus.open(folder / f"{name}.db", transport=url) as bus:
                headers = {"x-text": "Wert ü", "traceparent": TRACEPARENT}
                await (await bus.publisher(key)).publish({"id": 3}, headers=headers, correlation_id="order-3")
                told = nats_subjects.PLAIN.encode(key)
                message = await until(
                    lambda told=told: next((each for each in caught.messages if each.subject == told), None), name
                )
            block = "".join(f"{header}: {value}\r\n" for header, value in message.headers.items())
            found, identity = nats_plain.read_headers(f"NATS/1.0\r\n{block}\r\n".encode(), None, b"")  # type: ignore[arg-type]
            assert identity is not None
            decoded = {"key": key, "headers": dict(found), "identity": list(identity)}
            book.add(f"plain-{name}", "plain", nats_wire(message), decoded)
        await stream.close()
        await caught.close()


# ZMQ.


class ZmqCaught(Caught):
    """Plain sockets: a SUB at each node that the registry names, a ROUTER that is asked, a DEALER that asks."""

    def __init__(self, registry: Path) -> None:
        super().__init__()
        from zmq.asyncio import Context

        self._registry, self._id = registry, "00000000000000aa"
        self._context = Context()
        self._sub, self._router = self._context.socket(zmq.SUB), self._context.socket(zmq.ROUTER)
        self._sub.subscribe(b"")
        self._port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._known: set[str] = set()
        self.marks: list[list[bytes]] = []
        self.cancels: list[list[bytes]] = []
        self.leases: list[bytes] = []
        self._tasks = [asyncio.ensure_future(each()) for each in (self._hear, self._be_asked, self._follow)]

    async def linked(self, bus: zbus.Bus) -> None:
        """Once it has told of itself, our socket is connected to it."""
        assert bus.network is not None
        origin = bus.network.origin
        await until(lambda: self.frame(f"@zbus/node/{origin:x}"), "an announcement")

    async def ask(self, key: str, payload: bytes) -> list[tuple[bytes | None, dict[str, Any]]]:
        leases = [zmq_lease.decode_lease(data) for data in self._read()]
        where = next(each.node.requests for each in leases if each is not None and key in each.node.serves)
        found: list[tuple[bytes | None, dict[str, Any]]] = []
        socket_ = self._context.socket(zmq.DEALER)
        socket_.linger = 0
        socket_.connect(where)
        await socket_.send_multipart([b"Q", b"question", key.encode(), payload])
        while True:
            parts = await asyncio.wait_for(socket_.recv_multipart(), WAIT_S)
            found.append((parts[3] if parts[0] == b"R" else None, zmq_wire(parts)))
            if parts[0] != b"R":
                break
        socket_.close()
        return found

    async def answer(self, *keys: str) -> None:
        where = f"tcp://127.0.0.1:{self._port}"
        told = zmq_discovery.Node(node=self._id, publish=None, requests=where, serves=keys)
        path = self._registry / f"{self._id}.json"
        self._registry.mkdir(mode=0o700, exist_ok=True)
        draft = path.with_suffix(".new")
        draft.write_bytes(zmq_lease.encode_lease(zmq_lease.take_lease("default", told, 600.0)))
        draft.replace(path)
        await asyncio.sleep(1.0)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._context.destroy(0)

    def _read(self) -> list[bytes]:
        found = []
        for path in self._registry.glob("*.json"):
            with suppress(FileNotFoundError):
                if path.stem != self._id:
                    found.append(path.read_bytes())
        return found

    async def _follow(self) -> None:
        while True:
            for data in self._read():
                told = zmq_lease.decode_lease(data)
                if told is not None and told.node.publish is not None and told.node.publish not in self._known:
                    self._known.add(told.node.publish)
                    self._sub.subscribe(zmq_topics.mark_of(self._id, 1))
                    self._sub.connect(told.node.publish)
                if told is not None and "shop/quote" in told.node.answers and data not in self.leases:
                    self.leases.append(data)
            await asyncio.sleep(0.01)

    async def _hear(self) -> None:
        while True:
            parts = await self._sub.recv_multipart()
            key = zmq_topics.key_of(parts[0])
            if key is None:
                self.marks.append(parts)
            else:
                self.heard.append((key, parts[1], zmq_wire(parts)))

    async def _be_asked(self) -> None:
        while True:
            route, *parts = await self._router.recv_multipart()
            if parts[0] == b"C":
                self.cancels.append(parts)
                continue
            key = parts[2].decode()
            self.asked.append((key, parts[3], zmq_wire(parts)))
            if key != "shop/slow":
                await self._router.send_multipart([route, b"N", parts[1]])


def zmq_wire(parts: Iterable[bytes]) -> dict[str, Any]:
    """The parts of a message, without the route that a ROUTER socket puts before them."""
    return {"parts": [b64(part) for part in parts]}


async def zmq_frames(folder: Path) -> None:
    book = Book("zmq")
    url = f"zmq://?registry={folder / 'registry'}"
    caught = ZmqCaught(folder / "registry")
    await converse(folder, book, caught, partial(zbus.open, transport=url), partial(over_nats, other=url))
    (cancel,) = caught.cancels
    book.add("question-cancelled", "transport", zmq_wire(cancel), {"kind": "C"})
    mark = next(each for each in caught.marks if zmq_topics.node_of(each[0]) == (caught._id, 1))
    book.add("mark", "mark", zmq_wire(mark), {"node": caught._id, "turn": 1, "from": mark[1].decode()})
    lease = zmq_lease.decode_lease(caught.leases[0])
    book.add("lease", "lease", {"file": b64(caught.leases[0])}, {"lease": plain(lease)})
    caught.close()
    await zmq_through_brokers(folder, book)
    book.save()


async def zmq_through_brokers(folder: Path, book: Book) -> None:
    """Where brokers are between, a message has a stamp too."""
    with zmq.Context() as context, context.socket(zmq.SUB) as taking, context.socket(zmq.PUB) as giving:
        taking.subscribe(b"")
        ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (taking, giving)]
        ends = "&".join(f"{name}=tcp://127.0.0.1:{port}" for name, port in zip(("xsub", "xpub"), ports, strict=True))
        url = f"zmq://broker?{ends}&registry={folder / 'brokered'}"
        async with zbus.open(folder / "brokered.db", transport=url) as bus:
            publisher, parts = await bus.publisher("shop/brokered"), [b""]
            while zmq_topics.key_of(parts[0]) != "shop/brokered":  # what is sent before our subscription came is lost
                if not await asyncio.to_thread(taking.poll, 300):
                    await publisher.publish(b"with a stamp", correlation_id="b-1")
                else:
                    parts = taking.recv_multipart()
    topic, stamp, frame = parts
    decoded = {"key": "shop/brokered", "stamp": stamp.hex(), **describe_frame(frame)}
    book.add("event-brokered", "brokered", zmq_wire((topic, stamp, frame)), decoded)


# The wire of Dynamo.


def describe_dynamo(found: Any) -> dict[str, Any]:
    return {"envelope": plain(found)}


async def publish_to_dynamo(bus: zbus.Bus) -> None:
    """A topic of a namespace, of a component, and of an endpoint; and several events in a row."""
    for key in ("ns/kv-events", "ns/worker/kv.events", "ns/worker/generate/kv-events"):
        await (await bus.publisher(key)).publish({"id": 1})
    await (await bus.publisher("ns/worker/batch")).publish_many([b"one", b"two"], correlation_id="left out")


async def dynamo_frames_(folder: Path) -> None:
    book = Book("dynamo")
    with nats_server(folder / "nats") as server:
        client = await nats.connect(server.url)
        messages: list[Any] = []

        async def heard(message: Any) -> None:
            messages.append(message)

        await client.subscribe("namespace.>", cb=heard)
        await client.flush()
        async with zbus.open(folder / "nats.db", transport=server.url, wire="dynamo") as bus:
            await publish_to_dynamo(bus)
            await until(lambda: len(messages) == 5, "five messages")
        await client.close()
    for number, message in enumerate(messages):
        place = dynamo_scopes.place_of_subject(message.subject)
        found = dynamo_envelope.decode(message.data)
        decoded = {"key": place.key, **describe_dynamo(found)}
        book.add(f"nats-{number}", "dynamo-nats", nats_wire(message), decoded)
    await dynamo_direct(folder, book)
    await dynamo_brokered(folder, book)
    book.save()


async def dynamo_direct(folder: Path, book: Book) -> None:
    """Publishers listen, and are found by discovery records."""
    records = Records(folder / "kv")
    names = ("ns", "worker", "kv-events")
    with zmq.Context() as context, context.socket(zmq.SUB) as listening:
        listening.subscribe(b"")
        listening.rcvtimeo = 10_000
        async with zbus.open(folder / "direct.db", transport=f"zmq://?store={folder / 'kv'}", wire="dynamo") as bus:
            publisher = await bus.publisher("/".join(names))
            await publisher.publish(b"before anybody listens")
            path = await until(lambda: next(iter(records.directory.glob("[!.]*")), None), "a record")
            data = path.read_bytes()
            listening.connect(json.loads(data)["transport"]["config"]["endpoint"])
            await asyncio.sleep(0.5)
            await publisher.publish({"id": 2})
            while True:
                parts = await asyncio.to_thread(listening.recv_multipart)
                if b"before" not in parts[-1]:
                    break
    topic, found = dynamo_frames.unpack(parts)
    book.add("zmq-direct", "dynamo-zmq", zmq_wire(parts), {"topic": topic.decode(), **describe_dynamo(found)})
    channel = dynamo_records.read(data)
    decoded = {"key": channel.place.key, "publisher_id": channel.publisher_id, "endpoint": channel.endpoint}
    book.add("record", "dynamo-record", {"name": path.name, "file": b64(data)}, decoded)


async def dynamo_brokered(folder: Path, book: Book) -> None:
    """Through a broker the topic is the whole subject."""
    with zmq.Context() as context:
        broker = Broker(context)
        listening = context.socket(zmq.SUB)
        listening.subscribe(b"")
        listening.rcvtimeo = 10_000
        listening.connect(broker.xpub)
        url = f"zmq://broker?xsub={broker.xsub}&xpub={broker.xpub}"
        async with zbus.open(folder / "dynamo-broker.db", transport=url, wire="dynamo") as bus:
            await asyncio.sleep(0.5)
            await (await bus.publisher("ns/worker/kv-events")).publish({"id": 3})
            parts = await asyncio.to_thread(listening.recv_multipart)
        listening.close(0)
        broker.close()
    topic, found = dynamo_frames.unpack(parts)
    assert topic.decode() == subject("ns", "worker", "kv-events")
    decoded = {"topic": topic.decode(), "key": dynamo_scopes.place_of_subject(topic.decode()).key}
    book.add("zmq-broker", "dynamo-zmq", zmq_wire(parts), {**decoded, **describe_dynamo(found)})


TRANSPORTS: dict[str, Callable[[Path], Any]] = {
    "zenoh": zenoh_frames,
    "nats": nats_frames,
    "zmq": zmq_frames,
    "dynamo": dynamo_frames_,
}


def make_frames(names: Sequence[str] = ()) -> None:
    """In a folder of its own, by relative paths: records tell others where a node's log is."""
    for name in names or TRANSPORTS:
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            asyncio.run(TRANSPORTS[name](Path()))
            check_frames(name, folder)


def check_frames(name: str, folder: str) -> None:
    """No absolute path is in what was written, encoded or not."""
    text = (HERE / f"frames-{name}.json").read_text()
    encoded = [each for each in re.findall(r'"([A-Za-z0-9+/]+={0,2})"', text) if len(each) % 4 == 0]
    found = [text.encode(), *map(base64.b64decode, encoded)]
    for data in found:
        for path in (folder, str(Path.home()), str(HERE.parents[2])):
            assert path.encode() not in data, data


if __name__ == "__main__":
    hide_the_machine()
    if sys.argv[1] == "log":
        make_log()
    else:
        make_frames(sys.argv[2:])
