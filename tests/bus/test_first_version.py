"""What version 0.1 wrote to disk and sent over the wire is still read.

`data/v1/` holds a log with all that lies beside it, and frames of each transport, captured from nodes of version 0.1
by plain clients (see `data/v1/make.py`). The log is read through the public API and the command line. Each frame is
decoded; and plain clients play the node of version 0.1 towards a node of now: they send what it sent, ask what it
asked, and answer as it answered.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import inside
import msgspec
import nats
import pytest
import zenoh
import zmq
import zmq.asyncio
from free_ports import free_port
from nats_support import nats_server
from typer.testing import CliRunner

import zbus
from zbus.mesh.log_service import _decode_covered, _decode_info, _decode_request
from zbus.mesh.request_client import ACCEPTED, DATA, END, FAILED, _read_failure, _read_reply, decode_request
from zbus.observe.counters import Counters

# The internals that these tests need, all of them here.
from zbus.wire.announcement import decode_announcement
from zbus.wire.beacon import decode_beacon
from zbus.wire.envelope import BEACON, CANCEL, NODE, open_frame
from zbus_dynamo.envelope import decode as decode_dynamo
from zbus_dynamo.frames import unpack as unpack_dynamo
from zbus_dynamo.records import read as read_dynamo_record
from zbus_dynamo.scopes import place_of_subject
from zbus_nats.parts import Assembler
from zbus_nats.plain import read_headers
from zbus_nats.subjects import PLAIN, decode_subject
from zbus_zmq.address.topics import key_of, node_of
from zbus_zmq.find.lease import decode_lease

DATA_FOLDER = Path(__file__).parents[1] / "data" / "v1"
WAIT_S = 20.0
TRANSPORTS = ("zenoh", "nats", "zmq", "dynamo")
KINDS = {ACCEPTED: "accepted", DATA: "data", END: "end", FAILED: "failed"}
Run = Callable[..., tuple[int, str, str]]
SENT_BY_FIRST = ("event", "event-text", "event-json", "event-headers", "event-odd-key", "batch")


def positions(bus: zbus.Bus) -> dict[str, int]:
    """How far the node of a log is with other nodes."""
    log = inside.node_of(bus).log
    assert log is not None
    return log.positions.load()


def extent(bus: zbus.Bus) -> tuple[int, int]:
    """The last offset, and the one up to which everything is gone."""
    log = inside.node_of(bus).log
    assert log is not None
    return log.head(), log.low_water()


def source_of(event: zbus.Event) -> dict[str, Any] | None:
    """From which node an event was received, where it was."""
    came = event.provenance
    if came is None:
        return None
    return {"origin": came.origin, "offset": came.offset, "via": list(came.via), "link": came.link}


# The log.


@cache
def expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress((DATA_FOLDER / "expected.json.gz").read_bytes()))
    return found


def copied(name: str, folder: Path) -> Path:
    for each in DATA_FOLDER.glob(f"{name}*"):
        (shutil.copytree if each.is_dir() else shutil.copyfile)(each, folder / each.name)
    return folder / name


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A copy of the log, with its head record, its cursors and its cold tier."""
    return copied("log.db", tmp_path)


@pytest.fixture
def lossy(tmp_path: Path) -> Path:
    return copied("lossy.db", tmp_path)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command of the command line, as the core finds it: its exit code, stdout and stderr."""

    def invoke(name: str, *arguments: object) -> tuple[int, str, str]:
        (found,) = entry_points(group="zbus.commands", name=name)
        capfd.readouterr()
        done = CliRunner().invoke(found.load(), [str(each) for each in arguments])
        written = capfd.readouterr()
        return done.exit_code, done.stdout + written.out, done.stderr + written.err

    return invoke


def described(event: zbus.Event) -> dict[str, Any]:
    """An event as `expected.json` has it."""
    payload: dict[str, Any] = {"hex": event.payload.hex()}
    if len(event.payload) > 64:
        payload = {"bytes": len(event.payload), "sha256": hashlib.sha256(event.payload).hexdigest()}
    found: dict[str, Any] = {
        "offset": event.offset,
        "key": event.key,
        "publisher_id": event.publisher_id,
        "sequence": event.sequence,
        "published_at": event.published_at,
        "payload": payload,
        "headers": dict(event.headers),
    }
    source = source_of(event)
    return found if source is None else found | {"source": source}


async def replayed(bus: zbus.Bus, *keys: str, **options: Any) -> list[dict[str, Any]]:
    return [described(event) async for event in bus.replay(*keys, **options)]


def wanted(true: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
    return [each for each in expected()["events"] if true(each)]


@pytest.mark.parametrize("read_only", [False, True])
async def test_every_event_is_read(log: Path, read_only: bool) -> None:
    async with zbus.open(log, read_only=read_only) as bus:
        assert extent(bus) == (expected()["head"], expected()["low_water"])
        found = await replayed(bus, "**", "audit/@own/**")  # no wildcard matches a segment with "@"

    assert found == expected()["events"]
    assert [each["offset"] for each in found] == list(range(expected()["low_water"] + 1, expected()["head"] + 1))


async def test_parts_of_the_history_are_read_across_the_cold_tier_and_the_file(log: Path) -> None:
    joint = expected()["file_low_water"]
    at = datetime.fromtimestamp(1_769_904_000, UTC)  # a midnight amidst the events; 2,000 s later they are in the file
    async with zbus.open(log) as bus:
        by_offset = await replayed(bus, after=joint - 10, until=joint + 10)
        by_key = await replayed(bus, "shop/stock/3", "fleet/*/position")
        by_time = await replayed(bus, "plant/**", after=at, until=at + timedelta(seconds=2500))
        with pytest.raises(zbus.LogTrimmed):
            await replayed(bus, after=expected()["low_water"] - 1)

    assert by_offset == wanted(lambda each: joint - 10 < each["offset"] <= joint + 10)
    assert len(by_offset) == 20
    assert by_key == wanted(lambda each: each["key"] == "shop/stock/3" or each["key"].startswith("fleet/"))
    assert {each["offset"] for each in by_key} & set(range(joint))
    first, last = (int(each.timestamp()) * 10**9 for each in (at, at + timedelta(seconds=2500)))
    in_time = wanted(lambda each: each["key"].startswith("plant/") and first <= each["published_at"] <= last)
    assert by_time[:1] + by_time[-1:] == in_time[:1] + in_time[-1:]
    assert [each for each in by_time if first <= each["published_at"] <= last] == in_time


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", ["archive", "audit ü", "billing", "fleet-board"])
async def test_durable_names_go_on_where_they_were(log: Path, name: str, read_only: bool) -> None:
    cursor = next(each for each in expected()["cursors"] if each["name"] == name)
    start = {"archive": "shop/", "audit ü": "", "billing": ("shop/orders/", "legacy/"), "fleet-board": "fleet/"}[name]
    rest = wanted(lambda each: each["offset"] > cursor["offset"] and each["key"].startswith(start))
    rest = [each for each in rest if "@" not in each["key"]]
    async with zbus.open(log, read_only=read_only) as bus:
        async with bus.subscribe(*cursor["keys"], durable=name) as reading:
            found = [await asyncio.wait_for(reading.next(), WAIT_S) for _ in rest]
            if found:
                await found[-1].ack()
    async with zbus.open(log) as bus:
        publisher = await bus.publisher("shop/orders/created" if name != "fleet-board" else "fleet/new")
        async with bus.subscribe(*cursor["keys"], durable=name) as reading:
            offset = await publisher.publish({"id": 1})
            assert (await asyncio.wait_for(reading.next(), WAIT_S)).offset == offset == expected()["head"] + 1

    assert [described(event) for event in found] == rest
    assert bool(rest) == (name != "fleet-board")


def test_cursors_are_listed(log: Path, run: Run) -> None:
    code, output, _ = run("log", "cursors", log, "--json")

    listed = [json.loads(line) for line in output.splitlines()]
    kept = [{name: each[name] for name in ("name", "offset", "keys")} for each in listed]
    assert kept == [{name: each[name] for name in ("name", "offset", "keys")} for each in expected()["cursors"]]
    times = [datetime.fromisoformat(each["updated_at"]).timestamp() for each in listed]
    assert times == pytest.approx([each["updated_at"] / 1e9 for each in expected()["cursors"]], abs=1e-3)
    assert (code, {each["owner"] for each in listed}) == (0, {None})


async def test_positions_of_a_networked_node_are_loaded(log: Path, tmp_path: Path) -> None:
    async with zbus.open(log, read_only=True) as bus:
        assert positions(bus) == expected()["positions"]
    async with zbus.open(log, mode="peer", listen=[f"unixsock-stream/{tmp_path / 'node.sock'}"]) as bus:
        assert bus.nodes()[0].id == f"{expected()['origin']:x}"
        kept = positions(bus)
    assert {name: at for name, at in kept.items() if not name.startswith("clock/")} == expected()["positions"]


async def test_schemas_are_in_force_with_all_their_versions(log: Path) -> None:
    async with zbus.open(log) as bus:
        for expression, known in expected()["schemas"].items():
            in_force = bus.schemas.get(expression)
            assert (in_force and in_force.version) == known["in_force"]
            assert [each._asdict() for each in bus.schemas.versions(expression)] == known["versions"]
        assert [each.expression for each in bus.schemas.list()] == ["legacy/**", "shop/orders/*"]
        strict, permissive = await bus.publisher("shop/orders/created"), await bus.publisher("legacy/station")
        with pytest.raises(zbus.SchemaInvalid):
            await strict.publish({"total": 1.5})
        assert await strict.publish({"id": 1, "note": "of version 2"}) == expected()["head"] + 1
        assert await permissive.publish({"no code": True}) == expected()["head"] + 2
        removed = await bus.publisher("old/x")
        assert await removed.publish({"not": "an array"}) == expected()["head"] + 3


async def test_what_is_stored_is_not_stored_again(log: Path) -> None:
    async with zbus.open(log) as bus:
        head = expected()["head"]
        stored = [event async for event in bus.replay(after=expected()["sealed_until"] - 20)]
        again = [zbus.Event(each.publisher_id, each.sequence, 1, each.key, each.payload) for each in stored]
        again = [each for each in again if not each.key.startswith(("shop/orders", "legacy"))]
        offsets = {event.identity: event.offset for event in stored}
        assert list(await bus.put(*again)) == [offsets[event.identity] for event in again]
        assert extent(bus)[0] == head


async def test_the_log_is_verified_before_and_after_this_version_writes_to_it(log: Path, run: Run) -> None:
    def verified() -> str:
        code, problems, note = run("log", "verify", log)
        assert (code, problems) == (0, ""), note
        return note

    head, events = expected()["head"], expected()["head"] - expected()["file_low_water"]
    assert f"{events:,} events up to offset {head:,}" in verified()
    async with zbus.open(log) as bus:
        publisher = await bus.publisher("shop/notes")
        await publisher.publish_many([b"%d" % number for number in range(5000)])
    assert f"{events + 5000:,} events up to offset {head + 5000:,}" in verified()


async def test_an_accepted_loss_is_known(lossy: Path, run: Run) -> None:
    async with zbus.open(lossy) as bus:
        assert extent(bus) == (expected()["lossy"]["head"], expected()["lossy"]["low_water"])
        assert await replayed(bus) == expected()["lossy"]["events"]
        publisher = await bus.publisher("shop/lossy")
        assert await publisher.publish(b"one more") == expected()["lossy"]["head"] + 1
    code, problems, note = run("log", "verify", lossy)
    assert (code, problems) == (0, "")
    assert "were lost, and the loss was accepted" in note


# Frames, decoded.


@cache
def captured(transport: str) -> dict[str, dict[str, Any]]:
    found = json.loads((DATA_FOLDER / f"frames-{transport}.json").read_text())
    return {each["name"]: each for each in found["frames"]}


def every(*kinds: str) -> list[Any]:
    return [
        pytest.param(transport, frame, id=f"{transport}-{name}")
        for transport in TRANSPORTS
        for name, frame in captured(transport).items()
        if frame["what"] in kinds
    ]


def parts_of(wire: Mapping[str, Any]) -> list[bytes]:
    return [base64.b64decode(part) for part in wire["parts"]]


def payload_of(frame: Mapping[str, Any]) -> bytes:
    """What zbus put into a message."""
    wire = frame["wire"]
    if "payload" in wire:
        return base64.b64decode(wire["payload"])
    return parts_of(wire)[1 if frame["what"] == "frame" else -1]


def key_in(transport: str, wire: Mapping[str, Any]) -> str | None:
    """The key that the address of a message stands for."""
    if transport == "zenoh":
        return str(wire["key"])
    if transport == "nats":
        return decode_subject(wire["subject"].removeprefix("@ask."))
    parts = parts_of(wire)
    return parts[2].decode() if parts[0] == b"Q" else key_of(parts[0])


def plain(value: Any) -> Any:
    """A decoded structure as the files have it."""
    if isinstance(value, msgspec.Raw):
        return msgspec.msgpack.decode(value)
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, msgspec.Struct):
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)  # on the wire, and here
        return plain({name: getattr(value, field) for name, field in names})
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def decoded_frame(frame: bytes) -> dict[str, Any]:
    if frame[0] == BEACON:
        return {"beacon": plain(decode_beacon(frame))}
    if frame[0] == NODE:
        return {"node": plain(decode_announcement(frame))}
    if frame[0] == CANCEL:
        return {"cancel": int.from_bytes(frame[1:9])}
    return {"events": plain(open_frame(frame))}


def decoded_request(about: str, payload: bytes) -> dict[str, Any]:
    asked = decode_request(payload)
    found: dict[str, Any] = {"about": about, "id": asked.id, "body": plain(asked.body)}
    if about == "page":
        found["wanted"] = plain(_decode_request(asked.body))
    elif about == "request":
        found["events"] = plain(open_frame(asked.body))
    return found


def decoded_reply(about: str, payload: bytes) -> dict[str, Any]:
    kind, number, body = _read_reply(payload)
    found: dict[str, Any] = {"about": about, "kind": KINDS[kind], "number": number, "body": plain(body)}
    if kind == FAILED:
        found["failure"] = list(_read_failure(body))
    elif kind == DATA and about == "page" and body[:1] == b"\0":
        found["covered"] = plain(_decode_covered(body[1:]))
    elif kind == DATA and about == "logs":
        found["log"] = plain(_decode_info(body))
        found["log"]["heard"] = found["log"].pop("other_logs")  # the field has no name on the wire
    elif kind == DATA:
        found["events"] = plain(open_frame(body))
    return found


def check(found: Mapping[str, Any], frame: Mapping[str, Any]) -> None:
    """All that version 0.1 decoded is decoded; a later version may know more fields."""
    _check(found, frame["decoded"], frame["name"])


def _check(found: Any, known: Any, where: str) -> None:
    if isinstance(known, dict) and isinstance(found, Mapping):
        assert known.keys() <= found.keys(), where
        for name, each in known.items():
            _check(found[name], each, f"{where}.{name}")
    elif isinstance(known, list):
        assert len(found) == len(known), where
        for number, (one, other) in enumerate(zip(found, known, strict=True)):
            _check(one, other, f"{where}[{number}]")
    else:
        assert found == known, where


@pytest.mark.parametrize(("transport", "frame"), every("frame"))
def test_frames_to_everybody_are_decoded(transport: str, frame: dict[str, Any]) -> None:
    check({"key": key_in(transport, frame["wire"]), **decoded_frame(payload_of(frame))}, frame)


@pytest.mark.parametrize(("transport", "frame"), every("question"))
def test_requests_are_decoded(transport: str, frame: dict[str, Any]) -> None:
    found = decoded_request(frame["decoded"]["about"], payload_of(frame))
    check({"key": key_in(transport, frame["wire"]), **found}, frame)


@pytest.mark.parametrize(("transport", "frame"), every("reply"))
def test_replies_are_decoded(transport: str, frame: dict[str, Any]) -> None:
    if "transport" in frame["decoded"]:  # the end of the replies, as the transport says it
        ended = frame["wire"].get("headers") or parts_of(frame["wire"])
        assert "Zbus-End" in ended or ended[0] == b"E"
    else:
        check(decoded_reply(frame["decoded"]["about"], payload_of(frame)), frame)


def header_block(frame: Mapping[str, Any]) -> bytes:
    lines = [f"{name}: {value}\r\n" for name, value in frame["wire"]["headers"].items()]
    return "".join(("NATS/1.0\r\n", *lines, "\r\n")).encode()


@pytest.mark.parametrize("kind", ["event", "question", "reply"])
def test_messages_in_parts_are_put_together(kind: str) -> None:
    assembler = Assembler(1 << 20, Counters("nats"))
    frames = [each for name, each in captured("nats").items() if name.startswith(f"part-{kind}-")]
    whole = None
    for frame in frames:
        assert whole is None
        whole = assembler.take(frame["wire"]["subject"].encode(), header_block(frame), payload_of(frame))
    assert whole is not None
    last = frames[-1]
    found: dict[str, Any] = {"key": key_in("nats", last["wire"]), **decoded_frame(whole)} if kind == "event" else {}
    if kind != "event":
        found = (decoded_request if kind == "question" else decoded_reply)("request", whole)
    check(found, last)


@pytest.mark.parametrize("name", ["plain-raw", "plain-js"])
def test_plain_messages_of_nats_are_known_by_their_header(name: str) -> None:
    frame = captured("nats")[name]
    headers, identity = read_headers(header_block(frame), Counters("nats"), b"")
    assert identity is not None
    key = PLAIN.decode(frame["wire"]["subject"])
    check({"key": key, "headers": dict(headers), "identity": list(identity)}, frame)


def test_messages_through_brokers_and_marks_and_leases_of_zmq_are_decoded() -> None:
    frames = captured("zmq")
    topic, stamp, body = parts_of(frames["event-brokered"]["wire"])
    check({"key": key_of(topic), "stamp": stamp.hex(), **decoded_frame(body)}, frames["event-brokered"])
    mark, sender = parts_of(frames["mark"]["wire"])
    node, turn = node_of(mark) or ("", -1)
    check({"node": node, "turn": turn, "from": sender.decode()}, frames["mark"])
    check({"lease": plain(decode_lease(base64.b64decode(frames["lease"]["wire"]["file"])))}, frames["lease"])


@pytest.mark.parametrize(("transport", "frame"), every("dynamo-nats", "dynamo-zmq", "dynamo-record"))
def test_the_wire_of_dynamo_is_decoded(transport: str, frame: dict[str, Any]) -> None:
    wire = frame["wire"]
    if frame["what"] == "dynamo-nats":
        found = decode_dynamo(payload_of(frame))
        check({"key": place_of_subject(wire["subject"]).key, "envelope": plain(found)}, frame)
    elif frame["what"] == "dynamo-zmq":
        topic, found = unpack_dynamo(parts_of(wire))
        by_subject = {"key": place_of_subject(topic.decode()).key} if b"." in topic else {}
        check({"topic": topic.decode(), "envelope": plain(found), **by_subject}, frame)
    else:
        channel = read_dynamo_record(base64.b64decode(wire["file"]))
        reported = {"publisher_id": channel.publisher_id, "endpoint": channel.endpoint}
        check({"key": channel.place.key, **reported}, frame)


# Plain clients as a node of version 0.1, beside a node of now.


def events_of(frame: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a frame, a request or a reply, as a subscriber receives them."""
    names = ("key", "publisher_id", "sequence", "published_at", "headers")
    return [
        {**{name: each[name] for name in names}, "payload": each["payload"]["hex"]}
        for each in frame["decoded"]["events"]
    ]


def as_received(event: zbus.Event | None) -> dict[str, Any]:
    assert event is not None
    names = ("key", "publisher_id", "sequence", "published_at")
    found = {name: getattr(event, name) for name in names}
    return found | {"headers": dict(event.headers), "payload": event.payload.hex()}


async def received(subscription: zbus.EventSubscriber, count: int) -> list[dict[str, Any]]:
    """The next events, by key: the order is kept for each of them, not among them."""
    return by_key([as_received(await asyncio.wait_for(subscription.next(), WAIT_S)) for _ in range(count)])


def by_key(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(events, key=lambda each: str(each["key"]))


def replies_to(transport: str, name: str) -> list[dict[str, Any]]:
    start = f"reply-{name}-"
    return [each for key, each in captured(transport).items() if key.startswith(start) and key[len(start) :].isdigit()]


async def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.01)


async def check_asking(bus: zbus.Bus, transport: str) -> None:
    """The replies of version 0.1 are understood, also its errors."""
    reply = await bus.request("shop/quote", {"sku": 7}, timeout=WAIT_S)
    (known,) = [
        event for each in replies_to(transport, "request") if "events" in each["decoded"] for event in events_of(each)
    ]
    assert as_received(reply) == known
    with pytest.raises(zbus.HandlerFailed, match="no price for text"):
        await bus.request("shop/fail", "text", timeout=WAIT_S)


def serving(bus: zbus.Bus) -> list[dict[str, Any]]:
    """Serve requests; return the list to which each one is added."""
    asked: list[dict[str, Any]] = []

    @bus.serve("shop/quote")
    async def quote(request: zbus.Event) -> dict[str, int]:
        asked.append(as_received(request))
        return {"price": 12}

    @bus.serve("shop/fail")
    async def fail(request: zbus.Event) -> None:
        raise ValueError("no price")

    return asked


def check_answers(transport: str, answers: Sequence[bytes], failed: Sequence[bytes]) -> None:
    """A node of version 0.1 would understand these: a first byte for the kind, a number, and then the body."""
    kinds = [each[0] for each in answers], [each[0] for each in failed]
    assert kinds == ([0, 1, 2], [0, 3])
    assert [int.from_bytes(each[1:5]) for each in answers] == [0, 0, 1]
    (reply,) = open_frame(answers[1][5:])
    assert (reply.key, reply.payload) == ("shop/quote", b'{"price":12}')
    assert msgspec.msgpack.decode(failed[1][5:]) == ["ValueError", "no price"]


@contextmanager
def plain_session(where: str) -> Iterator[zenoh.Session]:
    config = zenoh.Config()
    for path, value in {"mode": "router", "listen/endpoints": [where], "scouting/multicast/enabled": False}.items():
        config.insert_json5(path, json.dumps(value))
    with zenoh.open(config) as session:
        yield session


def is_subscribed(session: zenoh.Session, key: str) -> bool:
    publisher = session.declare_publisher(key)
    try:
        return publisher.matching_status.matching
    finally:
        publisher.undeclare()


async def test_events_requests_and_replies_of_a_zenoh_node_of_the_first_version_are_understood(tmp_path: Path) -> None:
    frames = captured("zenoh")
    answered = {each: replies_to("zenoh", each) for each in ("request", "request-fail", "page")}
    log_key = frames["question-page"]["wire"]["key"]
    names_of = {"shop/quote": "request", "shop/fail": "request-fail", log_key: "page"}
    where = f"tcp/127.0.0.1:{free_port()}"
    pages: list[bytes] = []

    def reply(query: zenoh.Query) -> None:
        key = str(query.key_expr)
        pages.extend([query.payload.to_bytes()] if key == log_key and query.payload else [])
        for each in answered[names_of[key]]:
            query.reply(key, base64.b64decode(each["wire"]["payload"]))
        query.drop()

    def get(session: zenoh.Session, name: str, key: str = "") -> list[bytes]:
        wire = frames[name]["wire"]
        payload, every_one = base64.b64decode(wire["payload"]), zenoh.ConsolidationMode.NONE
        replies = session.get(key or wire["key"], payload=payload, consolidation=every_one, timeout=5.0)
        return [each.ok.payload.to_bytes() for each in replies if each.ok is not None]

    def put(*names: str) -> None:
        for name in names:
            session.put(frames[name]["wire"]["key"], base64.b64decode(frames[name]["wire"]["payload"]))

    with plain_session(where) as session:
        kept = [session.declare_queryable(key, reply, complete=True) for key in names_of]
        async with zbus.open(mode="peer", connect=[where]) as bus:
            async with bus.subscribe("shop/**", "größe/**", "fleet/**", "@zbus/record/*") as subscription:
                names = (*SENT_BY_FIRST, "event-bridged", "event-unlogged", "record")
                await until(
                    lambda: all(is_subscribed(session, frames[name]["wire"]["key"]) for name in ("node", *names))
                )
                put("node", *names)
                known = [event for name in names for event in events_of(frames[name])]
                assert await received(subscription, len(known)) == by_key(known)
                await until(lambda: len(bus.nodes()) == 2)
                (first,) = [each for each in bus.nodes() if not each.is_self]
                reported = frames["node"]["decoded"]["node"]
                for name in ("name", "host", "pid", "version", "started_at", "has_log", "metadata"):
                    assert getattr(first, name) == reported[name], name
                for name in ("publishes", "subscribes", "serves"):
                    assert list(getattr(first, name)) == reported[name], name
                assert (first.alive, first.buses) == (True, ("control",))
                put("node-leaving")
                await until(lambda: not [each for each in bus.nodes() if not each.is_self and each.alive])
                await check_asking(bus, "zenoh")
                for each in kept[:2]:
                    each.undeclare()
            asked = serving(bus)
            await asyncio.sleep(0.3)
            answers = await asyncio.to_thread(get, session, "question-request")
            failed = await asyncio.to_thread(get, session, "question-request-fail")
            check_answers("zenoh", answers, failed)
            assert asked == events_of(frames["question-request"])
        # What was lost on its way is asked for, once a beacon tells of it, and taken from the page of its log.
        reading = {"start": "beginning", "durable": "billing"}
        async with (
            zbus.open(tmp_path / "second.db", mode="peer", connect=[where]) as bus,
            bus.subscribe("shop/**", **reading) as subscription,
        ):
            await until(lambda: session.info.peers_zid())
            await asyncio.sleep(0.2)
            put("event", "beacon")
            known = [event for name in SENT_BY_FIRST for event in events_of(frames[name])]
            known = [each for each in known if each["key"].startswith("shop/")]
            assert await received(subscription, len(known)) == by_key(known)
            wanted = [decoded_request("page", each)["wanted"]["keys"] for each in pages]
            assert wanted[0] == ["@zbus/none"]  # what this node asks every log first; version 0.1 returns no events
            assert ["shop/**"] in wanted
            own = bus.nodes()[0].id
            reported = [decoded_reply("logs", each) for each in await asyncio.to_thread(get, session, "question-logs")]
            assert [each["kind"] for each in reported] == ["accepted", "data", "end"]
            assert (f"{reported[1]['log']['origin']:x}", reported[1]["log"]["head"]) == (own, len(known))
            page = await asyncio.to_thread(get, session, "question-page-span", f"@zbus/log/{own}")
            data = [each for each in (decoded_reply("page", reply) for reply in page) if each["kind"] == "data"]
            assert [each["offset"] for each in data[0]["events"]] == [2, 3, 4]  # it asks for three after the first
            assert data[1]["covered"]["covered"] == 4


@asynccontextmanager
async def plain_client(url: str) -> AsyncIterator[Any]:
    client = await nats.connect(url)
    try:
        yield client
    finally:
        await client.close()


async def test_events_requests_and_replies_of_a_nats_node_of_the_first_version_are_understood(tmp_path: Path) -> None:
    frames = captured("nats")

    async def publish(client: Any, *names: str) -> None:
        for name in names:
            wire = frames[name]["wire"]
            await client.publish(wire["subject"], base64.b64decode(wire["payload"]), headers=wire["headers"])
        await client.flush()

    with nats_server(tmp_path, config="max_payload: 2048") as server:
        async with plain_client(server.url) as client:

            async def answer(message: Any) -> None:
                name = {"@ask.shop.quote": "request", "@ask.shop.fail": "request-fail"}[message.subject]
                for each in replies_to("nats", name):
                    wire = each["wire"]
                    await client.publish(message.reply, base64.b64decode(wire["payload"]), headers=wire["headers"])

            async def ask(name: str) -> list[bytes]:
                inbox, wire = f"_INBOX.plain.{name}", frames[name]["wire"]
                replies = await client.subscribe(inbox)
                await client.publish(wire["subject"], base64.b64decode(wire["payload"]), inbox, wire["headers"])
                found: list[bytes] = []
                while True:
                    message = await replies.next_msg(WAIT_S)
                    headers = message.headers or {}
                    if "Zbus-End" in headers:
                        return found
                    if "Zbus-Upload" in headers:
                        for part in ("part-question-0", "part-question-1", "part-question-2"):
                            wire = frames[part]["wire"]
                            where, data = headers["Zbus-Upload"], base64.b64decode(wire["payload"])
                            await client.publish(where, data, headers=wire["headers"])
                    else:
                        found.append(message.data)

            taps = [await client.subscribe(f"@ask.shop.{each}", "zbus", answer) for each in ("quote", "fail")]
            async with zbus.open(transport=server.url) as bus:
                async with bus.subscribe("shop/**", "größe/**", "fleet/**") as subscription:
                    names = (*SENT_BY_FIRST, "event-bridged", "event-unlogged")
                    known = [event for name in (*names, "part-event-2") for event in events_of(frames[name])]
                    await publish(client, "node", *names, "part-event-0", "part-event-1", "part-event-2")
                    assert await received(subscription, len(known)) == by_key(known)
                    assert [each.name for each in bus.nodes() if not each.is_self] == ["first"]
                    await check_asking(bus, "nats")
                for each in taps:
                    await each.unsubscribe()
                await client.flush()
                asked = serving(bus)

                @bus.serve("shop/echo")
                async def echo(request: zbus.Event) -> bytes:
                    asked.append(as_received(request))
                    return b"heard"

                await asyncio.sleep(0.3)
                check_answers("nats", await ask("question-request"), await ask("question-request-fail"))
                assert len(await ask("large-question")) == 3
                assert asked == [*events_of(frames["question-request"]), *events_of(frames["part-question-2"])]

        async with plain_client(server.url) as client:
            async with zbus.open(transport=server.url, wire="dynamo") as bus, bus.subscribe("ns/**") as subscription:
                dynamo = [each for each in captured("dynamo").values() if each["what"] == "dynamo-nats"]
                for each in dynamo:
                    await client.publish(each["wire"]["subject"], payload_of(each))
                found = await received(subscription, len(dynamo))
                known = [{"key": each["decoded"]["key"], **each["decoded"]["envelope"]} for each in dynamo]
                for each, envelope in zip(found, by_key(known), strict=True):
                    assert each["payload"] == envelope["payload"]["hex"]
                    assert each["published_at"] == envelope["published_at"] * 1_000_000
                    for name in ("key", "publisher_id", "sequence"):
                        assert each[name] == envelope[name]


def lease_of_now(publish: str, requests: str) -> bytes:
    """The lease of a node of version 0.1, as it would be if this process had taken it."""
    lease = json.loads(base64.b64decode(captured("zmq")["lease"]["wire"]["file"]))
    lease["node"] |= {"publish": publish, "questions": requests}
    lease |= {"beat_s": time.monotonic(), "lease_s": 600.0, "pid": os.getpid()}
    lease["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return json.dumps(lease).encode()


async def test_events_requests_and_replies_of_a_zmq_node_of_the_first_version_are_understood(tmp_path: Path) -> None:
    frames, registry = captured("zmq"), tmp_path / "registry"
    node = frames["lease"]["decoded"]["lease"]["node"]["node"]
    context = zmq.asyncio.Context()
    events, requests, asking = (context.socket(kind) for kind in (zmq.XPUB, zmq.ROUTER, zmq.DEALER))
    ends = [f"tcp://127.0.0.1:{each.bind_to_random_port('tcp://127.0.0.1')}" for each in (events, requests)]

    async def subscribed(topic: bytes) -> None:
        """Wait for a subscription, and let the node know that its own arrived, as version 0.1 does."""
        found: set[bytes] = set()
        while topic not in found:
            message = await asyncio.wait_for(events.recv(), WAIT_S)
            if message[:2] == b"\x01\xff":
                await events.send_multipart([message[1:], node.encode()])
            elif message[:1] == b"\x01":
                found.add(message[1:])

    async def answer() -> None:
        while True:
            route, kind, ident, *rest = await requests.recv_multipart()
            if kind == b"C":  # the client has its reply before it has seen the end
                continue
            name = {b"shop/quote": "request", b"shop/fail": "request-fail"}[rest[0]]
            for each in replies_to("zmq", name):
                kind, _, *rest = parts_of(each["wire"])
                await requests.send_multipart([route, kind, ident, *rest])

    async def ask(name: str) -> list[bytes]:
        found: list[bytes] = []
        await asking.send_multipart(parts_of(frames[name]["wire"]))
        while True:
            kind, _, _, *body = await asyncio.wait_for(asking.recv_multipart(), WAIT_S)
            if kind == b"E":
                return found
            found += body

    registry.mkdir(mode=0o700)
    (registry / f"{node}.json").write_bytes(lease_of_now(*ends))
    answering = asyncio.ensure_future(answer())
    try:
        async with zbus.open(transport=f"zmq://?registry={registry}") as bus:
            async with bus.subscribe("shop/**", "größe/**", "fleet/**") as subscription:
                await subscribed(b"fleet/")
                names = (*SENT_BY_FIRST, "event-bridged", "event-unlogged")
                for name in ("node", *names):
                    await events.send_multipart(parts_of(frames[name]["wire"]))
                known = [event for name in names for event in events_of(frames[name])]
                assert await received(subscription, len(known)) == by_key(known)
                assert [each.name for each in bus.nodes() if not each.is_self] == ["first"]
                await check_asking(bus, "zmq")
            asked = serving(bus)
            own = next(each for each in registry.glob("*.json") if each.stem != node)
            await until(lambda: "shop/fail" in json.loads(own.read_bytes())["node"]["answers"])
            asking.connect(json.loads(own.read_bytes())["node"]["questions"])
            check_answers("zmq", await ask("question-request"), await ask("question-request-fail"))
            assert asked == events_of(frames["question-request"])
    finally:
        answering.cancel()
        await asyncio.wait([answering])
        context.destroy(0)


async def test_what_the_first_version_sent_through_a_zmq_broker_is_received(tmp_path: Path) -> None:
    frame = captured("zmq")["event-brokered"]
    context = zmq.asyncio.Context()
    taking, giving = context.socket(zmq.SUB), context.socket(zmq.XPUB)
    ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (taking, giving)]
    url = f"zmq://broker?xsub=tcp://127.0.0.1:{ports[0]}&xpub=tcp://127.0.0.1:{ports[1]}&registry={tmp_path / 'r'}"
    try:
        async with zbus.open(transport=url) as bus, bus.subscribe("shop/**") as subscription:
            while await asyncio.wait_for(giving.recv(), WAIT_S) != b"\x01shop/":
                pass
            await giving.send_multipart(parts_of(frame["wire"]))
            assert await received(subscription, 1) == events_of(frame)
    finally:
        context.destroy(0)
