"""Dynamo's discovery: records of both generations, and the store of files with its lease, heartbeat and reaper."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from log_support import wait_until
from mesh_fakes import recorded

from zbus.errors import EventInvalid, TransportError
from zbus.keys import check_key
from zbus.observe.counters import Counters
from zbus_dynamo import filestore, records
from zbus_dynamo import registry as registries
from zbus_dynamo.filestore import FileStore, default_root
from zbus_dynamo.records import Channel, file_name, read, record_key, write
from zbus_dynamo.refusal import NotDynamo
from zbus_dynamo.registry import DynamoRegistry
from zbus_dynamo.scopes import Scoped
from zbus_dynamo.sources import PublisherSource

COMPONENT = Channel(Scoped(("ns", "c"), "kv-events"), 0x1F, "tcp://10.0.0.1:5555")
NAMESPACE = Channel(Scoped(("ns",), "kv.events"), 7, "tcp://host-1:1")
ENDPOINT = Channel(Scoped(("ns", "c", "gen"), "t"), 8, "tcp://[::1]:65535")


@pytest.mark.parametrize(
    ("channel", "key", "scope"),
    [
        (
            COMPONENT,
            "namespace/ns/component/c/topic/kv-events/1f",
            '{"kind":"component","namespace":"ns","component":"c"}',
        ),
        (NAMESPACE, "namespace/ns/topic/kv%2Eevents/7", '{"kind":"namespace","name":"ns"}'),
        (
            ENDPOINT,
            "namespace/ns/component/c/endpoint/gen/topic/t/8",
            '{"kind":"endpoint","endpoint":{"namespace":"ns","component":"c","name":"gen"}}',
        ),
    ],
)
def test_a_record_is_written_as_dynamo_writes_it(channel: Channel, key: str, scope: str) -> None:
    assert record_key(channel) == key
    assert write(channel).decode() == (
        f'{{"type":"EventChannel","scope":{scope},"topic":"{channel.place.topic}",'
        f'"instance_id":{channel.publisher_id},'
        f'"transport":{{"kind":"Zmq","config":{{"endpoint":"{channel.endpoint}"}}}}}}'
    )
    assert read(write(channel)) == channel


@pytest.mark.parametrize(("component", "scope"), [("c", ("ns", "c")), ("", ("ns",))])
def test_a_record_of_the_earlier_generation_is_read(component: str, scope: tuple[str, ...]) -> None:
    flat = {
        "type": "EventChannel",
        "namespace": "ns",
        "component": component,
        "topic": "kv-events",
        "instance_id": 31,
        "transport": {"kind": "Zmq", "config": {"endpoint": "tcp://10.0.0.1:5555"}},
    }

    assert read(json.dumps(flat, indent=2).encode()) == Channel(Scoped(scope, "kv-events"), 31, "tcp://10.0.0.1:5555")


@pytest.mark.parametrize(
    "transport",
    [
        {"kind": "Nats", "config": {"subject_prefix": "namespace.ns"}},
        {"kind": "ZmqBroker", "config": {"xsub_endpoints": ["tcp://a:1"], "xpub_endpoints": ["tcp://a:2"]}},
    ],
)
def test_a_record_of_another_transport_has_no_endpoint_to_connect_to(transport: dict[str, object]) -> None:
    assert read(_changed(transport=transport)).endpoint is None


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"null",
        b"[]",
        b"\xff",
        b'"EventChannel"',
        b"[" * 5000,
        b'{"type":"Endpoint"}',
    ],
)
def test_what_is_no_record_is_refused(value: bytes) -> None:
    with pytest.raises(EventInvalid):
        read(value)


@pytest.mark.parametrize(
    "changed",
    [
        {"scope": None},
        {"scope": {"kind": "planet", "name": "x"}},
        {"scope": {"kind": "namespace"}},
        {"scope": {"kind": "namespace", "name": "a/b"}},
        {"scope": {"kind": "namespace", "name": ""}},
        {"topic": 5},
        {"topic": "a b"},
        {"instance_id": "1f"},
        {"instance_id": True},
        {"instance_id": -1},
        {"transport": {"kind": "Zmq", "config": {"endpoint": "ipc:///etc/passwd"}}},
        {"transport": {"kind": "Zmq", "config": {"endpoint": "tcp://host:0"}}},
        {"transport": {"kind": "Zmq", "config": {"endpoint": "tcp://host:1;tcp://other:2"}}},
        {"transport": {"kind": "Zmq", "config": {}}},
        {"transport": {"kind": "Carrier pigeon", "config": {}}},
    ],
)
def test_a_record_with_a_wrong_field_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(EventInvalid):
        read(_changed(**changed))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 1 << 70) | st.floats() | st.text(max_size=8) | st.just("Zmq"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=8), inner, max_size=2),
    max_leaves=6,
)


@st.composite
def _misshapen(draw: st.DrawFn) -> bytes:
    """A record of either generation with something else in some of its places."""
    endpoint = {"kind": "endpoint", "endpoint": {"namespace": "n", "component": "c", "name": "e"}}
    scopes: list[dict[str, Any]] = [{"scope": {"kind": "namespace", "name": "n"}}, {"scope": endpoint}]
    scope = draw(st.sampled_from([*scopes, {"namespace": "n", "component": "c"}]))
    transport = {"kind": draw(st.sampled_from(["Zmq", "Nats"])), "config": {"endpoint": "tcp://127.0.0.1:5555"}}
    record: Any = {"type": "EventChannel", "topic": "t", "instance_id": 7, "transport": transport}
    record = json.loads(json.dumps(record | scope))
    for _ in range(draw(st.integers(1, 3))):
        place = record
        while isinstance(place, dict) and place:
            name = draw(st.sampled_from(sorted(place)))
            if not isinstance(place[name], dict) or draw(st.booleans()):
                if draw(st.booleans()):
                    place[name] = draw(_JSON)
                else:
                    del place[name]
                break
            place = place[name]
    return json.dumps(record).encode()


@given(_misshapen() | st.integers(1, 3000).map(lambda deep: b'{"type":' * deep))
@example(
    b'{"type":"EventChannel","scope":{"kind":"namespace","name":"\\ud800"},"topic":"t","instance_id":1,'
    b'"transport":{"kind":"Nats","config":{}}}'
)
def test_a_record_of_the_right_shape_with_the_wrong_things_in_it_is_refused_or_read(value: bytes) -> None:
    try:
        found = read(value)
    except EventInvalid:
        return
    check_key(found.place.key)
    assert type(found.publisher_id) is int
    if found.endpoint is not None:
        assert read(write(found)) == found


@given(st.binary(max_size=200))
def test_no_bytes_at_all_crash_the_reader_of_records(value: bytes) -> None:
    with pytest.raises(EventInvalid):
        read(value)


def test_a_file_is_named_by_its_key_with_all_but_letters_and_digits_encoded(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put(record_key(NAMESPACE), write(NAMESPACE))

    (found,) = (tmp_path / "v1" / "event_channels").iterdir()

    assert found.name == "namespace%2Fns%2Ftopic%2Fkv%252Eevents%2F7"
    assert unquote(found.name) == record_key(NAMESPACE)
    assert found.read_bytes() == write(NAMESPACE)


def test_the_store_is_where_dynamo_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "kv"))
    assert default_root() == tmp_path / "kv"

    monkeypatch.delenv("DYN_FILE_KV")
    assert default_root().name == "dynamo_store_kv"


def test_a_record_appears_whole_and_no_temporary_file_stays(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    long = b"x" * 60_000
    seen: set[int] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            for name in store.files():
                seen.add(len(store.read(name) or long))

    watcher = threading.Thread(target=look)
    watcher.start()
    for number in range(200):
        store.put(f"k/{number % 3}", long)
        store.delete(f"k/{number % 3}")
    ended.set()
    watcher.join()

    assert seen <= {len(long)}
    assert os.listdir(store.directory) == []


def test_changes_wait_for_the_lock_of_the_directory_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filestore, "LOCK_WAIT_S", 0.1)
    store = FileStore(tmp_path)
    held = os.open(store.directory, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)

    with pytest.raises(TransportError, match="locked"):
        store.put("a/b", b"{}")
    os.close(held)
    store.put("a/b", b"{}")

    assert list(store.files()) == [file_name("a/b")]


def test_a_file_that_is_not_touched_for_ten_seconds_is_removed_and_a_touched_one_stays(tmp_path: Path) -> None:
    mine, other = FileStore(tmp_path), FileStore(tmp_path)
    mine.put("mine", b"{}")
    other.put("dead", b"{}")
    (other.directory / ".tmp_orphan").write_bytes(b"")
    old = time.time() - 11
    for name in os.listdir(mine.directory):
        os.utime(mine.directory / name, (old, old))

    assert mine.touch() == []
    assert mine.reap() == 2
    assert os.listdir(mine.directory) == ["mine"]


def test_a_record_removed_behind_our_back_is_written_again(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("mine", b"{1}")
    (store.directory / "mine").unlink()

    assert store.touch() == ["mine"]
    assert store.read("mine") == b"{1}"


def test_closing_deletes_our_records_alone(tmp_path: Path) -> None:
    mine, other = FileStore(tmp_path), FileStore(tmp_path)
    mine.put("mine", b"{}")
    other.put("other", b"{}")

    mine.close()
    mine.close()

    assert list(other.files()) == ["other"]


def test_a_store_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(TransportError, match="file"):
        FileStore(tmp_path / "file")


def test_the_registry_tells_of_publishers_as_they_come_and_go_and_survives_rubbish(tmp_path: Path) -> None:
    counts, reported = Counters("test"), list[dict[str, Channel]]()
    registry, far = DynamoRegistry(FileStore(tmp_path), counts, reported.append), FileStore(tmp_path)
    try:
        (far.directory / "rubbish").write_bytes(b"\xff\x00")
        (far.directory / "huge").write_bytes(b"x" * (records.RECORD_BYTES_MAX + 1))
        (far.directory / "link").symlink_to("/dev/zero")
        (far.directory / "folder").mkdir()
        os.mkfifo(far.directory / "fifo")
        far.put(record_key(COMPONENT), write(COMPONENT))
        wait_until(lambda: reported and list(reported[-1].values()) == [COMPONENT])
        far.delete(record_key(COMPONENT))
        wait_until(lambda: reported[-1] == {})
        wait_until(lambda: counts.snapshot().get("record_invalid") == 5)
        assert registry.diagnostics()["records_unreadable"] >= 3
    finally:
        registry.close()


def test_the_registry_does_not_tell_of_our_own_publishers_and_takes_them_back_at_the_end(tmp_path: Path) -> None:
    reported, registered = list[dict[str, Channel]](), threading.Event()
    registry, far = DynamoRegistry(FileStore(tmp_path), Counters("test"), reported.append), FileStore(tmp_path)
    try:
        registry.register(COMPONENT, registered.set)
        assert registered.wait(10)
        assert [read(far.read(name) or b"") for name in far.files()] == [COMPONENT]
        far.put(record_key(ENDPOINT), write(ENDPOINT))
        wait_until(lambda: reported)
        assert list(reported[-1].values()) == [ENDPOINT]
    finally:
        registry.close()
    assert [read(far.read(name) or b"") for name in far.files()] == [ENDPOINT]


def test_the_registry_goes_on_when_the_store_is_away_for_a_while(tmp_path: Path) -> None:
    counts, reported = Counters("test"), list[dict[str, Channel]]()
    registry = DynamoRegistry(FileStore(tmp_path / "kv"), counts, reported.append)
    try:
        (tmp_path / "kv").rename(tmp_path / "away")
        registered = threading.Event()
        registry.register(COMPONENT, registered.set)
        wait_until(lambda: counts.snapshot().get("registry_failed"))
        assert not registered.is_set()
        (tmp_path / "away").rename(tmp_path / "kv")
        assert registered.wait(10)
        far = FileStore(tmp_path / "kv")
        far.put(record_key(ENDPOINT), write(ENDPOINT))
        wait_until(lambda: reported and list(reported[-1].values()) == [ENDPOINT])
    finally:
        registry.close()


def test_a_store_with_too_many_records_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registries, "ENTRIES_MAX", 2)
    counts, far = Counters("test"), FileStore(tmp_path)
    far.put(record_key(COMPONENT), write(COMPONENT))
    far.put(record_key(ENDPOINT), write(ENDPOINT))
    with recorded() as written:
        registry = DynamoRegistry(FileStore(tmp_path), counts, lambda channels: None)
        wait_until(lambda: counts.snapshot().get("records_over_limit"))
        registry.close()

    assert {(each["record"], each["code"]) for each in written} == {
        ("TRANSPORT_DISCOVERY_FAILED", "records_over_limit")
    }


def test_a_message_of_an_unknown_publisher_is_rejected_if_several_scopes_have_its_topic() -> None:
    source = PublisherSource.__new__(PublisherSource)
    source.topics = {b"t": {1: Scoped(("a",), "t"), 2: Scoped(("b",), "t")}}

    assert source.place(b"t", 2) == Scoped(("b",), "t")
    with pytest.raises(NotDynamo) as caught:
        source.place(b"t", 3)
    assert caught.value.code == "publisher_unknown"


def _changed(**fields: object) -> bytes:
    return json.dumps(json.loads(write(COMPONENT)) | fields).encode()
