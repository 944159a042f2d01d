"""Proxied writes: the owner of a log stores the events of another process exactly once."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
from inside import node_of
from log_support import append, ask, wait_until
from mesh_fakes import recorded
from msgspec.structs import replace

import zbus
import zbus_log
from zbus.ports.log import AppendResult, IsWanted, Refused, Row, WriteDone
from zbus_log import OwnerRejectsProxiedWrites, Put, Rules, SqliteLog
from zbus_log.client.proxied_writes import PIECE_BYTES, _pieces
from zbus_log.proxy.owner import ProxiedWriteServer
from zbus_log.proxy.write_files import (
    decode_result,
    decode_rows,
    encode_rows,
    encode_rules,
    new_call,
    new_stem,
    wake,
    write_file,
)

PUTTER = """
    import sys, time, zbus_log
    from zbus.ports.log import AppendResult, IsWanted, Refused, Row, WriteDone
    path, publisher, count, *more = sys.argv[1:]
    rows = [Row(int(publisher), n, 1 + n, f"shop/{n % 7}", b"x" * 100, None) for n in range(int(count))]
    print(*zbus_log.put(path, [rows]))
"""
OWNER = """
    import sys, zbus.blocking
    with zbus.blocking.open(sys.argv[1]) as bus:
        print("ready", flush=True)
        sys.stdin.read()
"""


def rows(count: int, publisher: int = 7, start: int = 0, key: str = "shop/orders", payload: bytes = b"x") -> list[Row]:
    return [Row(publisher, n, 1 + n, key, payload, None) for n in range(start, start + count)]


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def start_owner(path: Path) -> subprocess.Popen[str]:
    owner = start(OWNER, path)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    return owner


def folder(path: Path) -> Path:
    return Path(f"{path}-writes")


def files(path: Path, suffix: str = "") -> list[str]:
    """The files of write requests and results, without the FIFO."""
    return sorted(each.name for each in folder(path).iterdir() if each.name != "wake" and each.name.endswith(suffix))


def identities(path: Path) -> list[tuple[int, int]]:
    """Return the identities of all events in the log, by offset."""
    with zbus.blocking.open(path, read_only=True) as bus:
        return [event.identity for event in bus.replay()]


@contextmanager
def held(path: Path) -> Iterator[SqliteLog]:
    """Open a log in this process without accepting proxied writes."""
    log = SqliteLog(str(path))
    try:
        yield log
    finally:
        log.close(5.0)


async def in_thread(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    async with asyncio.timeout(60):
        return await asyncio.to_thread(call, *arguments, **named)


# Through the owner


async def test_events_that_another_process_puts_reach_the_live_and_durable_subscribers_of_the_owner(
    log_path: Path,
) -> None:
    async with zbus.open(log_path) as bus:
        await (await bus.publisher("own/one")).publish(b"before")
        live = bus.subscribe("shop/**", queue_events=10_000)
        durable = bus.subscribe("shop/*", durable="billing")
        putting = start(PUTTER, log_path, 7, 5000)
        async with asyncio.timeout(60):
            seen = [await anext(live) for _ in range(5000)]
            acknowledged = [(await anext(durable)).offset for _ in range(5000)]
        output, _ = await in_thread(putting.communicate)
        await live.aclose()
        await durable.aclose()

    assert [event.identity for event in seen] == [(7, n) for n in range(5000)]
    assert [event.offset for event in seen] == acknowledged == list(range(2, 5002))
    assert (seen[8].key, seen[8].published_at, seen[8].payload) == ("shop/1", 9, b"x" * 100)
    assert output == "5000 5001\n"


async def test_events_that_another_process_puts_reach_other_nodes(log_path: Path, tmp_path: Path) -> None:
    endpoint = f"unixsock-stream/{tmp_path}/zenoh.sock"
    async with zbus.open(mode="peer", listen=[endpoint]) as there, there.subscribe("shop/**") as far:
        async with zbus.open(log_path, mode="peer", connect=[endpoint]) as here:
            async with asyncio.timeout(20):
                while not node_of(here).network.links[0].fabric.ready("shop/orders"):  # type: ignore[union-attr]
                    await asyncio.sleep(0.01)
            # A node tells new events from old ones of an unknown node by their time of publishing.
            now = [replace(row, published_at=time.time_ns()) for row in rows(500)]
            await in_thread(zbus_log.put, log_path, [now])
            async with asyncio.timeout(30):
                seen = [(await anext(far)).identity for _ in range(500)]

    assert seen == [(7, n) for n in range(500)]


async def test_headers_and_payloads_arrive_as_they_were_put(log_path: Path) -> None:
    encoded = msgspec.msgpack.encode({"trace": "é", "kind": "order"})
    large = os.urandom(PIECE_BYTES + 10)  # larger than a piece, but still one event
    async with zbus.open(log_path) as bus:
        await in_thread(
            zbus_log.put, log_path, [[Row(1, 0, 5, "a/b", b"\0\xff", encoded), Row(1, 1, 6, "a/b", large, None)]]
        )
        first, second = [event async for event in bus.replay()]

    assert (first.payload, dict(first.headers)) == (b"\0\xff", {"trace": "é", "kind": "order"})
    assert (second.payload, dict(second.headers)) == (large, {})


@pytest.mark.parametrize("owned", [True, False])
async def test_putting_twice_stores_once_and_returns_the_first_offsets(log_path: Path, owned: bool) -> None:
    bus = zbus.open(log_path)
    if owned:
        await bus.start()
    first = await in_thread(zbus_log.put, log_path, [rows(1500), rows(10, start=1500)])
    again = await in_thread(zbus_log.put, log_path, [rows(1510)])
    further = await in_thread(zbus_log.put, log_path, [rows(20, start=1500)])
    await bus.aclose()

    assert first == again == Put(1510, 1510)
    assert further == Put(20, 1520)
    assert identities(log_path) == [(7, n) for n in range(1520)]


@pytest.mark.parametrize("owned", [True, False])
async def test_another_event_under_a_used_identity_is_rejected(log_path: Path, owned: bool) -> None:
    bus = zbus.open(log_path)
    if owned:
        await bus.start()
    await in_thread(zbus_log.put, log_path, [rows(10)])
    with pytest.raises(zbus.IdentityConflict) as caught:
        await in_thread(zbus_log.put, log_path, [[replace(rows(1, start=4)[0], payload=b"other")]])
    await bus.aclose()

    assert (caught.value.publisher_id, caught.value.sequence, caught.value.offset) == (7, 4, 5)
    assert identities(log_path) == [(7, n) for n in range(10)]


async def test_several_processes_put_at_once_and_the_order_of_each_is_kept(log_path: Path) -> None:
    async with zbus.open(log_path):
        putting = [start(PUTTER, log_path, publisher, 8000) for publisher in (1, 2, 3)]
        outputs = [(await in_thread(each.communicate))[0] for each in putting]

    assert [output.split()[0] for output in outputs] == ["8000"] * 3
    stored = identities(log_path)
    assert len(stored) == 24_000
    for publisher in (1, 2, 3):
        assert [n for by, n in stored if by == publisher] == list(range(8000))


async def test_a_put_waits_while_a_blocking_subscriber_is_full(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        slow = bus.subscribe("shop/**", queue_events=100, overflow="block")
        putting = asyncio.ensure_future(in_thread(zbus_log.put, log_path, [rows(20_000)]))
        while not node_of(bus).backpressure.blocked:
            await asyncio.sleep(0.002)
        async with asyncio.timeout(60):
            seen = [(await anext(slow)).offset for _ in range(20_000)]
        await slow.aclose()

        assert seen == list(range(1, 20_001))
        assert await putting == Put(20_000, 20_000)


def test_a_piece_is_small_so_that_publishers_of_the_owner_do_not_wait_long() -> None:
    many = [decode_rows(data) for data in _pieces([rows(3001)])]
    heavy = [decode_rows(data) for data in _pieces([rows(9, payload=bytes(1 << 20)), rows(1)])]

    assert [len(piece) for piece in many] == [1000, 1000, 1000, 1]
    assert [len(piece) for piece in heavy] == [4, 4, 1, 1]


async def test_a_publisher_of_the_owner_never_waits_long_while_another_process_puts_much(log_path: Path) -> None:
    """A publish waits for no more proxied events than may be in progress, and for at most 100 ms on an idle machine.

    The time that the machine itself needs is measured first, without the other process.
    """

    async def publish_while(goes_on: Callable[[], bool]) -> tuple[list[float], list[int]]:
        took_s, before_it = [], []
        while goes_on():
            began, stored = time.perf_counter(), node_of(bus).dispatcher.delivered
            before_it.append(await publisher.publish(b"x") - stored - 1)
            took_s.append(time.perf_counter() - began)
            await asyncio.sleep(0.001)
        return sorted(took_s), before_it

    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher("own/one")
        times = iter(range(300))
        alone_s, _ = await publish_while(lambda: next(times, None) is not None)
        putting = start(PUTTER, log_path, 7, 200_000)
        ended = asyncio.ensure_future(in_thread(putting.communicate))
        beside_s, before_it = await publish_while(lambda: not ended.done())
        assert (await ended)[0].startswith("200000 ")

    assert 0 < max(before_it) <= 3000
    assert beside_s[int(len(beside_s) * 0.99)] < 0.1 + 5 * alone_s[int(len(alone_s) * 0.99)]


# Rejected events

REFUSED = {
    "a wildcard": Row(1, 1, 1, "a/*", b"", None),
    "a key of the system": Row(1, 1, 1, "@zbus/x", b"", None),
    "half a character in a key": Row(1, 1, 1, "a/\ud800", b"", None),
    "malformed headers": Row(1, 1, 1, "a/b", b"", b"\xc1"),
    "headers with a line break": Row(1, 1, 1, "a/b", b"", msgspec.msgpack.encode({"a": "b\r\nc"})),
    "a negative number": Row(1, -1, 1, "a/b", b"", None),
    "a number over 63 bits": Row(1 << 63, 1, 1, "a/b", b"", None),
    "a number over 64 bits": Row(1 << 64, 1, 1, "a/b", b"", None),
    "text for a payload": (1, 1, 1, "a/b", "text", None),
    "a number for a payload": (1, 1, 1, "a/b", 5, None),
    "a row that is too short": (1, 1, 1),
}


@pytest.mark.parametrize("owned", [True, False], ids=["owned", "not owned"])
@pytest.mark.parametrize("bad", REFUSED.values(), ids=REFUSED)
async def test_an_event_that_could_not_be_published_is_refused_with_its_chunk(
    log_path: Path, bad: Any, owned: bool
) -> None:
    bus = zbus.open(log_path)
    if owned:
        await bus.start()

    with pytest.raises(zbus.EventInvalid) as caught:
        await in_thread(zbus_log.put, log_path, [rows(1000), [*rows(1, start=1000), bad], rows(1, start=1001)])
    after = await in_thread(zbus_log.put, log_path, [rows(1, publisher=8)])
    await bus.aclose()

    assert identities(log_path) == [*((7, n) for n in range(1000)), (8, 0)]
    assert after.events == 1
    assert "1000 events of this call are stored;" in caught.value.__notes__[0]


@pytest.mark.parametrize("owned", [True, False], ids=["owned", "not owned"])
async def test_no_chunk_is_stored_after_one_that_was_rejected(log_path: Path, owned: bool) -> None:
    """The next chunk is in flight when the first one is rejected."""
    bus = zbus.open(log_path)
    if owned:
        await bus.start()
    good = [rows(1, start=n) for n in range(3)]

    with pytest.raises(zbus.KeyInvalid) as caught:
        await in_thread(zbus_log.put, log_path, [rows(1, key="a/*"), *good[1:]])
    stored = await in_thread(zbus_log.put, log_path, good)
    await bus.aclose()

    assert caught.value.__notes__ == ["0 events of this call are stored; it is safe to put all of them again"]
    assert stored == Put(3, 3)
    assert identities(log_path) == [(7, 0), (7, 1), (7, 2)]


async def test_a_chunk_that_fails_to_commit_is_not_overtaken_by_the_next_one(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a disk that is almost full, the next, smaller chunk might still fit."""
    async with zbus.open(log_path) as bus:
        append_rows = node_of(bus).log.append  # type: ignore[union-attr]

        def fail_once(batch: Sequence[Row], done: Any, about: Any) -> None:
            monkeypatch.setattr(node_of(bus).entry.commits, "_append", append_rows)
            done(AppendResult(about, Refused(zbus.LogFull("app.db"))))

        monkeypatch.setattr(node_of(bus).entry.commits, "_append", fail_once)
        with pytest.raises(zbus.LogFull) as caught:
            await in_thread(zbus_log.put, log_path, [rows(1), rows(1, start=1)])

    assert caught.value.__notes__ == ["0 events of this call are stored; it is safe to put all of them again"]
    assert identities(log_path) == []


async def test_a_request_that_cannot_be_written_is_not_stored_and_its_note_does_not_say_otherwise(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, data: bytes) -> None:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "no space left on device")
        write_file(path, data)
        written.append(path)
        wait_until(lambda: len(written) < 2 or path.with_suffix(".result").exists())

    written: list[Path] = []
    monkeypatch.setattr("zbus_log.client.write_routes.write_file", write)
    async with zbus.open(log_path):
        with pytest.raises(zbus.LogError, match="none of its rows were stored") as caught:
            await in_thread(zbus_log.put, log_path, [rows(2), rows(2, start=2), rows(1, start=4)])
        in_flight = caught.value.__notes__
        with pytest.raises(zbus.LogError, match="none of its rows were stored") as caught:
            await in_thread(zbus_log.put, log_path, [rows(1, 8)])

    assert in_flight == [
        "2 events of this call are stored, and some of those that follow may be; it is safe to put all of them again"
    ]
    assert caught.value.__notes__ == ["0 events of this call are stored; it is safe to put all of them again"]


# Clients that wait


async def test_requests_that_wait_for_a_blocked_key_do_not_delay_those_of_other_calls(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        slow = bus.subscribe("slow/*", queue_events=1, overflow="block")
        await (await bus.publisher("slow/0")).publish(b"fills the queue")
        blocked = [
            asyncio.ensure_future(in_thread(zbus_log.put, log_path, [rows(1, n, key=f"slow/{n}"), rows(1, n, 1)]))
            for n in range(4)  # threads of `asyncio.to_thread`
        ]
        while len(files(log_path, ".rows")) < 8:
            await asyncio.sleep(0.002)

        assert await in_thread(zbus_log.put, log_path, [rows(1, 99, key="fast/one")]) == Put(1, 2)

        assert not any(each.done() for each in blocked)
        await slow.aclose()
        await asyncio.gather(*blocked)


async def test_a_request_that_was_withdrawn_while_it_waited_is_not_stored(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        slow = bus.subscribe("slow/*", queue_events=1, overflow="block")
        await (await bus.publisher("slow/0")).publish(b"fills the queue")
        for publisher in (7, 8, 9):
            with pytest.raises(zbus.LogError, match="did not reply"):
                await in_thread(zbus_log.put, log_path, [rows(1, publisher, key="slow/0")], timeout_s=0.05)
        await slow.aclose()
        await in_thread(zbus_log.put, log_path, [rows(1, 10, key="slow/0")])

    assert [publisher for publisher, _ in identities(log_path)[1:]] == [10]


@pytest.mark.parametrize("owned", [True, False], ids=["owned", "not owned"])
async def test_an_error_of_the_owner_keeps_its_type_and_fields(
    log_path: Path, owned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBUS_PAYLOAD_BYTES_MAX", "100")  # applies to a node and to a process without one
    bus = zbus.open(log_path)
    if owned:
        await bus.start()
    with pytest.raises(zbus.KeyInvalid, match="wildcards") as key:
        await in_thread(zbus_log.put, log_path, [rows(1, key="a/**")])
    with pytest.raises(zbus.EventTooLarge) as size:
        await in_thread(zbus_log.put, log_path, [rows(1, payload=bytes(101))])
    await bus.aclose()

    assert key.value.key == "a/**"
    assert (size.value.size_bytes, size.value.limit_bytes) == (101, 100)
    assert identities(log_path) == []


async def test_a_malformed_request_gets_an_error_and_the_owner_keeps_running(log_path: Path) -> None:
    async with zbus.open(log_path):
        await in_thread(wait_until, (folder(log_path) / "wake").exists)
        for kind in (".rows", ".prune"):
            request = folder(log_path) / (new_stem(new_call()) + kind)
            write_file(request, b"\xc1 garbage")
            (folder(log_path) / "not-ours").touch()
            assert (await in_thread(zbus_log.put, log_path, [rows(1)])) == Put(1, 1)
            await in_thread(wait_until, request.with_suffix(".result").exists)
            with pytest.raises(zbus.EventInvalid):
                decode_result(request.with_suffix(".result").read_bytes())


# A log without an owner


def test_a_log_without_an_owner_is_owned_during_the_call(log_path: Path) -> None:
    owned: list[object] = []

    def chunks() -> Iterator[Sequence[Row]]:
        yield rows(3)
        owned.append(zbus_log.file.head_record.owner_pid(str(log_path)))

    assert zbus_log.put(log_path, chunks()) == Put(3, 3)

    assert owned == [os.getpid()]
    assert zbus_log.file.head_record.owner_pid(str(log_path)) is None
    assert not folder(log_path).exists()
    with zbus.blocking.open(log_path) as bus:
        assert [event.sequence for event in bus.replay()] == [0, 1, 2]


def test_putting_no_rows_stores_nothing(log_path: Path) -> None:
    assert zbus_log.put(log_path, []) == zbus_log.put(log_path, [[]]) == Put(0, 0)


def test_an_impossible_log_path_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "none" / "app.db", tmp_path / "file" / "app.db", tmp_path, "memory"):
        with pytest.raises(zbus.ConfigInvalid, match="log"):
            zbus_log.put(path, [rows(1)])
    with pytest.raises(zbus.ConfigInvalid, match="there is no log"):
        zbus_log.prune(tmp_path / "none.db", Rules(max_events=1))
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_process_that_puts_also_executes_the_requests_of_another(log_path: Path) -> None:
    began, resume = threading.Event(), threading.Event()

    def chunks() -> Iterator[Sequence[Row]]:
        yield rows(10)
        began.set()
        assert resume.wait(30)
        yield rows(10, start=10)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(zbus_log.put, log_path, chunks())
        assert began.wait(30)
        second = zbus_log.put(log_path, [rows(10, publisher=8)])
        with pytest.raises(zbus.KeyInvalid):
            zbus_log.put(log_path, [rows(1, key="a/*")])
        assert not first.done()
        resume.set()
        assert (second, first.result(30)) == (Put(10, 20), Put(20, 30))


@contextmanager
def putting(path: Path) -> Iterator[threading.Event]:
    """Own a log as a call of `put` that ends when the event is set, or at the end of the block."""
    began, end = threading.Event(), threading.Event()

    def chunks() -> Iterator[Sequence[Row]]:
        began.set()
        assert end.wait(30)
        yield rows(1)

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(zbus_log.put, path, chunks())
        assert began.wait(30)
        try:
            yield end
        finally:
            end.set()
            assert call.result(30).events == 1


async def test_a_node_that_starts_waits_for_a_call_that_owns_the_log(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []

    def is_running(pid: int) -> bool:
        attempts.append(pid)
        return True

    with putting(log_path) as end:
        monkeypatch.setattr("zbus_log.file.head_record.is_running", is_running)
        bus = zbus.open(log_path)
        starting = asyncio.ensure_future(bus.start())
        await in_thread(wait_until, lambda: len(attempts) > 2)
        assert not starting.done()
        end.set()
        async with asyncio.timeout(20):
            await starting

    assert await bus.head() == 1
    await bus.aclose()


async def test_a_node_does_not_wait_longer_than_it_should_for_a_call_that_owns_the_log(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_log.file.head_record.BRIEF_WAIT_S", 0.02)
    with putting(log_path), pytest.raises(zbus.LogLocked):
        await zbus.open(log_path).start()


def test_processes_that_put_at_once_wait_for_each_other(log_path: Path) -> None:
    putting = [start(PUTTER, log_path, publisher, 10_000) for publisher in (1, 2, 3)]
    outputs = [each.communicate(timeout=60)[0] for each in putting]

    assert [output.split()[0] for output in outputs] == ["10000"] * 3
    assert sorted(identities(log_path)) == [(publisher, n) for publisher in (1, 2, 3) for n in range(10_000)]


# An owner that starts and stops


@pytest.mark.parametrize("frozen", [False, True], ids=["at work", "before it answers"])
@pytest.mark.parametrize("restarted", [False, True], ids=["for good", "and restarted"])
def test_an_owner_that_is_killed_loses_nothing_and_doubles_nothing(
    log_path: Path, frozen: bool, restarted: bool
) -> None:
    owners = [start_owner(log_path)]

    def kill() -> None:
        if frozen:
            wait_until(lambda: len(files(log_path, ".rows")) == 2)
        owners[0].kill()
        owners[0].wait()
        if restarted:
            owners.append(start_owner(log_path))

    def chunks() -> Iterator[Sequence[Row]]:
        for number in range(60):
            yield rows(500, start=number * 500)
            if number == 30 and frozen:
                wait_until(lambda: not files(log_path, ".rows"))  # so that it stops before the next, not in between
                os.kill(owners[0].pid, signal.SIGSTOP)
                killing.start()
            elif number == 30:
                kill()

    killing = threading.Thread(target=kill)
    try:
        assert zbus_log.put(log_path, chunks(), timeout_s=20) == Put(30_000, 30_000)
    finally:
        if frozen:
            killing.join(30)
        for owner in owners:
            owner.kill()
            owner.communicate()

    assert identities(log_path) == [(7, n) for n in range(30_000)]


def test_an_owner_that_rejects_proxied_writes_is_named_in_time(log_path: Path) -> None:
    with held(log_path) as log:
        append(log, rows(1))
        calls: list[Callable[[], object]] = [
            lambda: zbus_log.put(log_path, [rows(2)], timeout_s=0.3),
            lambda: zbus_log.prune(log_path, Rules(max_events=0), timeout_s=0.3),
        ]
        for call in calls:
            began = time.monotonic()
            with pytest.raises(
                zbus.LogLocked, match=f"process {os.getpid()}, which does not accept proxied writes"
            ) as caught:
                call()
            assert 0.3 <= time.monotonic() - began < 5
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again), again.pid) == (OwnerRejectsProxiedWrites, str(caught.value), os.getpid())
        assert log.head() == 1
    assert not folder(log_path).exists()


def test_a_put_waits_until_an_owner_that_rejects_proxied_writes_releases_the_log(log_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with held(log_path) as log:
            putting = pool.submit(zbus_log.put, log_path, [rows(5)])
            append(log, rows(3))
        assert putting.result(30) == Put(5, 5)


async def test_an_owner_that_does_not_reply_is_an_error_in_time_and_leaves_no_files(log_path: Path) -> None:
    async with zbus.open(log_path) as bus, bus.subscribe("shop/**", queue_events=1, overflow="block"):
        await node_of(bus).run(zbus_log.put, log_path, [rows(2)])  # full
        with pytest.raises(zbus.LogError, match="did not reply within") as caught:
            await in_thread(zbus_log.put, log_path, [rows(5, publisher=8)], timeout_s=0.3)

        assert "0 events of this call are stored, and some" in caught.value.__notes__[0]
        assert files(log_path) == []


async def test_a_result_that_cannot_be_read_leaves_the_outcome_unknown(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        path.mkdir()  # stands for a file that only the owner's user may read

    monkeypatch.setattr("zbus_log.proxy.owner.write_file", refuse)
    async with zbus.open(log_path):
        with pytest.raises(zbus.LogError, match=r"cannot be read .* the outcome is unknown") as caught:
            await in_thread(zbus_log.put, log_path, [rows(1)])
        assert "and some of those that follow may be" in caught.value.__notes__[0]


async def test_a_bus_with_waiting_requests_closes_in_time_and_the_clients_execute_them(log_path: Path) -> None:
    bus = zbus.open(log_path, close_timeout_s=2.0)
    await bus.start()
    bus.subscribe("shop/**", queue_events=10, overflow="block")
    putting = asyncio.ensure_future(in_thread(zbus_log.put, log_path, [rows(20_000)]))
    while not (node_of(bus).backpressure.blocked and len(files(log_path, ".rows")) == 2):
        await asyncio.sleep(0.002)

    began = time.monotonic()
    await bus.aclose()
    took_s = time.monotonic() - began

    assert took_s < 2.5
    assert await putting == Put(20_000, 20_000)
    assert identities(log_path) == [(7, n) for n in range(20_000)]
    assert not folder(log_path).exists()


# The folder


async def test_requests_of_ended_processes_are_removed_and_those_of_running_ones_are_executed(log_path: Path) -> None:
    gone = start("import os; print(os.getpid())")
    pid = int(gone.communicate()[0])
    here = folder(log_path)
    here.mkdir()
    moment, serial, *_ = new_stem(new_call()).split("-")
    for kind in ("rows", "prune", "result", "rows.tmp"):
        (here / f"{moment}-{serial}-{pid}-1.{kind}").write_bytes(encode_rows(rows(5)))
    (here / f"{moment}-{serial}-{os.getpid()}-1.rows").write_bytes(encode_rows(rows(5)))  # an earlier process
    left = here / (new_stem(new_call()) + ".rows")
    write_file(left, encode_rows(rows(2, publisher=9)))

    async with zbus.open(log_path) as bus:
        await in_thread(wait_until, left.with_suffix(".result").exists)
        stored = [event.identity async for event in bus.replay()]
        fields = decode_result(left.with_suffix(".result").read_bytes())
        assert files(log_path) == [left.with_suffix(".result").name]

        (here / f"{moment}-{serial}-{pid}-1.result").touch()  # of a process that has ended since
        await in_thread(zbus_log.put, log_path, [rows(1, publisher=10)])
        await in_thread(wait_until, lambda: len(files(log_path)) == 1)

    assert stored == [(9, 0), (9, 1)]
    assert fields == [2, 2]


async def test_a_fifo_that_a_killed_owner_left_is_used_again_and_gone_after_a_clean_close(log_path: Path) -> None:
    owner = start_owner(log_path)
    await in_thread(wait_until, (folder(log_path) / "wake").exists)
    owner.kill()
    owner.communicate()
    assert (folder(log_path) / "wake").is_fifo()

    async with zbus.open(log_path):
        assert (await in_thread(zbus_log.put, log_path, [rows(1)])) == Put(1, 1)
        assert (folder(log_path) / "wake").is_fifo()
    assert not folder(log_path).exists()


async def test_a_bus_opens_even_if_the_folder_for_writes_cannot_be_created(
    log_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder(log_path).touch()
    async with zbus.open(log_path) as bus:
        assert await (await bus.publisher("a/b")).publish(b"x") == 1
        with pytest.raises(OwnerRejectsProxiedWrites):
            await in_thread(zbus_log.put, log_path, [rows(1)], timeout_s=0.2)

    (found,) = [each.zbus for each in caplog.records if "LOG_PROXIED_WRITES_OFF" in each.message]  # type: ignore[attr-defined]
    assert (found["log"], found["code"]) == (str(log_path), "proxied_writes_off")


def old_folder(path: Path) -> Path:
    return Path(f"{path}-errands")


def records_of_old_requests(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [each.zbus for each in caplog.records if "LOG_OLD_WRITES_LEFT" in each.message]  # type: ignore[attr-defined]


async def test_requests_in_the_folder_of_an_older_version_are_reported_and_kept(
    log_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old_folder(log_path).mkdir()
    os.mkfifo(old_folder(log_path) / "wake")
    for _ in range(2):
        (old_folder(log_path) / (new_stem(new_call()) + ".rows")).write_bytes(encode_rows(rows(5)))
    async with zbus.open(log_path) as bus:
        assert await in_thread(zbus_log.put, log_path, [rows(1, publisher=9)]) == Put(1, 1)
        stored = [event.identity async for event in bus.replay()]

    (found,) = records_of_old_requests(caplog)
    assert (found["log"], found["code"]) == (str(log_path), "old_requests_left")
    assert f"{old_folder(log_path)} holds 2 files" in found["reason"]
    assert stored == [(9, 0)]
    assert len(list(old_folder(log_path).iterdir())) == 3
    report = zbus_log.verify(str(log_path))
    assert (report.problems, report.warnings) == ([], (found["reason"],))


@pytest.mark.parametrize("with_fifo", [False, True])
async def test_an_empty_folder_of_an_older_version_is_removed(
    log_path: Path, with_fifo: bool, caplog: pytest.LogCaptureFixture
) -> None:
    old_folder(log_path).mkdir()
    if with_fifo:
        os.mkfifo(old_folder(log_path) / "wake")  # an owner that was killed left it
    async with zbus.open(log_path):
        await in_thread(zbus_log.put, log_path, [rows(1)])

    assert not old_folder(log_path).exists()
    assert records_of_old_requests(caplog) == []
    assert zbus_log.verify(str(log_path)).warnings == ()


async def test_an_old_folder_that_cannot_be_removed_is_reported_and_the_owner_keeps_running(
    log_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (old_folder(log_path) / "wake").mkdir(parents=True)  # a folder in place of the FIFO cannot be unlinked
    async with zbus.open(log_path):
        assert await in_thread(zbus_log.put, log_path, [rows(1)]) == Put(1, 1)

    (found,) = records_of_old_requests(caplog)
    assert found["code"] == "old_folder_unusable"


async def test_an_idle_owner_waits_in_the_kernel(log_path: Path) -> None:
    async with zbus.open(log_path):
        await in_thread(zbus_log.put, log_path, [rows(1)])
        (waiting,) = [each for each in threading.enumerate() if each.name == "zbus-log-writes"]
        status = Path(f"/proc/self/task/{waiting.native_id}/status")

        def turns() -> list[str]:
            return [line for line in status.read_text().splitlines() if "ctxt_switches" in line]

        await in_thread(wait_until, lambda: "S (sleeping)" in status.read_text())
        before = turns()
        await asyncio.sleep(1.0)  # the test checks that nothing happens
        assert turns() == before


async def test_no_socket_is_opened_for_proxied_writes(log_path: Path) -> None:
    def sockets() -> list[str]:
        found = []
        for number in os.listdir("/proc/self/fd"):
            try:
                found.append(os.readlink(f"/proc/self/fd/{number}"))
            except FileNotFoundError:
                pass
        return sorted(each for each in found if each.startswith("socket:"))

    before = sockets()
    async with zbus.open(log_path):
        await in_thread(zbus_log.put, log_path, [rows(2000)])
        assert sockets() == before


@pytest.mark.parametrize("settings", [{"log": "memory"}, {"read_only": True}], ids=["in memory", "read only"])
async def test_a_bus_with_a_private_or_read_only_log_accepts_no_proxied_writes(
    log_path: Path, settings: dict[str, Any]
) -> None:
    zbus_log.put(log_path, [rows(1)])
    async with zbus.open(**{"log": str(log_path)} | settings):
        assert not [each for each in threading.enumerate() if each.name == "zbus-log-writes"]
        assert not folder(log_path).exists()


# Retention


@pytest.mark.parametrize("owned", [True, False], ids=["owned", "not owned"])
async def test_retention_through_the_owner_respects_durable_names(log_path: Path, owned: bool) -> None:
    async with zbus.open(log_path) as bus:
        await in_thread(zbus_log.put, log_path, [rows(100)])
        async with bus.subscribe("**", durable="billing", start="beginning") as subscription:
            for _ in range(30):
                event = await anext(subscription)
            await event.ack()
    bus = zbus.open(log_path)
    if owned:
        await bus.start()

    held_back = await in_thread(zbus_log.prune, log_path, Rules(until=90))
    within = await in_thread(zbus_log.prune, log_path, Rules(until=20))
    passed = await in_thread(zbus_log.prune, log_path, Rules(until=90, ignore_cursors=True))
    nothing_left = await in_thread(zbus_log.prune, log_path, Rules(max_events=0, ignore_cursors=True))
    await bus.aclose()

    assert held_back == (30, 30, "billing")
    assert within == (30, 0, None)
    assert passed == (90, 60, None)
    assert nothing_left == (100, 10, None)
    assert ask(log_path, "SELECT count(*) FROM events") == 0


async def test_rows_are_stored_while_retention_runs(log_path: Path) -> None:
    async with zbus.open(log_path):
        await in_thread(zbus_log.put, log_path, [rows(60_000)])
        trimming = asyncio.ensure_future(in_thread(zbus_log.prune, log_path, Rules(max_events=0)))
        put = await in_thread(zbus_log.put, log_path, [rows(10, publisher=8)])
        trimmed = await trimming

    assert put == Put(10, 60_010)
    assert trimmed.removed >= 60_000


def test_retention_reports_its_progress_if_this_process_runs_it(log_path: Path) -> None:
    zbus_log.put(log_path, [rows(10_000)])
    reported: list[int] = []

    assert zbus_log.prune(log_path, Rules(until=9000), progress=reported.append).removed == 9000

    assert reported[0] == 4096
    assert reported[-1] == 9000


async def test_an_error_of_retention_is_returned_to_the_client(log_path: Path) -> None:
    async with zbus.open(log_path):
        await in_thread(wait_until, (folder(log_path) / "wake").exists)
        request = folder(log_path) / (new_stem(new_call()) + ".prune")
        write_file(request, encode_rules(Rules(max_age_s=1e300)))  # a time that no integer holds
        await in_thread(zbus_log.put, log_path, [rows(1)])
        await in_thread(wait_until, request.with_suffix(".result").exists)
        with pytest.raises(zbus.LogError):
            decode_result(request.with_suffix(".result").read_bytes())


# A server whose folder makes trouble


@contextmanager
def served(path: Path) -> Iterator[list[int]]:
    """Execute requests without a log. Yields the publishers of the requests that were executed."""
    executed: list[int] = []

    def write(batch: Sequence[Row], done: WriteDone, is_wanted: IsWanted) -> None:
        executed.append(batch[0].publisher_id)
        done([len(executed)])

    def unasked(_: object) -> NoReturn:
        pytest.fail("nothing asked for this")

    server = ProxiedWriteServer(str(path), write, unasked, unasked)
    wait_until(lambda: wake(folder(path), b""))
    try:
        yield executed
    finally:
        server.close(5.0)


def send(request: Path, publisher: int) -> None:
    write_file(request, encode_rows(rows(1, publisher)))
    assert wake(request.parent)


def test_a_result_that_cannot_be_written_is_kept_and_its_request_is_executed_once(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_log.proxy.owner.RETRY_S", (0.001, 0.002))
    attempts = 0
    full = True

    def write(path: Path, data: bytes) -> None:
        nonlocal attempts
        if full and path == first.with_suffix(".result"):
            attempts += 1
            raise OSError(errno.ENOSPC, "no space left on device")
        write_file(path, data)

    monkeypatch.setattr("zbus_log.proxy.owner.write_file", write)
    with recorded() as records, served(log_path) as executed:
        first, second = (folder(log_path) / (new_stem(new_call()) + ".rows") for _ in range(2))
        send(first, 1)
        send(second, 2)
        wait_until(lambda: attempts >= 5)
        assert second.with_suffix(".result").exists()  # others are not affected
        assert not first.with_suffix(".result").exists()

        full = False
        wait_until(first.with_suffix(".result").exists)

    assert executed == [1, 2]
    assert decode_result(first.with_suffix(".result").read_bytes()) == [1, 1]
    assert [(each["record"], each["log"], each["error"]) for each in records] == [
        ("LOG_PROXIED_WRITE_FAILED", str(log_path), "OSError: [Errno 28] no space left on device")
    ]


def test_a_server_with_a_result_that_cannot_be_written_pauses_between_attempts(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(log_path) as executed:
        stuck = folder(log_path) / (new_stem(new_call()) + ".rows")
        stuck.with_suffix(".result.tmp").mkdir()  # the result cannot be written
        began, attempts = time.monotonic(), 0

        def write(path: Path, data: bytes) -> None:
            nonlocal attempts
            attempts += 1
            write_file(path, data)

        monkeypatch.setattr("zbus_log.proxy.owner.write_file", write)
        send(stuck, 1)
        wait_until(lambda: attempts >= 4)
        assert time.monotonic() - began >= (0.05 + 0.1 + 0.2) / 2  # half of it is jitter

        stuck.with_suffix(".result.tmp").rmdir()
        wait_until(stuck.with_suffix(".result").exists)

    assert executed == [1]


def test_a_request_that_cannot_be_read_gets_an_error_and_the_others_are_executed(log_path: Path) -> None:
    with recorded() as records, served(log_path) as executed:
        unreadable, good, more = (folder(log_path) / (new_stem(new_call()) + ".rows") for _ in range(3))
        unreadable.mkdir()  # stands for a file of another user
        send(good, 2)
        wait_until(good.with_suffix(".result").exists)
        wait_until(unreadable.with_suffix(".result").exists)
        send(more, 3)  # the unreadable request is still there, and is not looked at again
        wait_until(more.with_suffix(".result").exists)

        with pytest.raises(zbus.LogError, match="; not stored"):
            decode_result(unreadable.with_suffix(".result").read_bytes())
        unreadable.rmdir()

    assert executed == [2, 3]
    assert {each["record"] for each in records} == {"LOG_PROXIED_WRITE_FAILED"}
    assert len(records) <= 2  # it can neither be read nor removed


def test_a_file_of_an_ended_process_that_cannot_be_removed_does_not_stop_the_others(log_path: Path) -> None:
    with recorded() as records, served(log_path) as executed:
        left = folder(log_path) / f"{0:020d}-0-{os.getpid()}-1.rows"  # of an earlier process with this id
        left.mkdir()
        send(folder(log_path) / (new_stem(new_call()) + ".rows"), 2)
        wait_until(lambda: executed)
        left.rmdir()

    assert [each["record"] for each in records] == ["LOG_PROXIED_WRITE_FAILED"]


def test_a_folder_that_was_removed_is_reported_and_created_again(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_log.proxy.owner.CHECK_S", 0.01)
    with recorded() as records, served(log_path) as executed:
        shutil.rmtree(folder(log_path))
        folder(log_path).touch()  # it cannot be created yet
        wait_until(lambda: len(records) == 2)
        folder(log_path).unlink()
        wait_until(lambda: wake(folder(log_path), b""))
        send(folder(log_path) / (new_stem(new_call()) + ".rows"), 2)
        wait_until(lambda: executed)

    assert executed == [2]
    assert [(each["record"], each["log"]) for each in records] == [
        ("LOG_PROXIED_WRITES_OFF", str(log_path)),
        ("LOG_PROXIED_WRITE_FAILED", str(log_path)),
    ]
    assert records[0]["code"] == "writes_folder_removed"


async def test_the_event_loop_of_the_owner_is_told_to_use_the_bus(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        began = time.monotonic()
        with pytest.raises(zbus.LogError, match=r"this process owns the log.*Use bus\.put"):
            zbus_log.put(log_path, [[zbus_log.Row(1, 0, 1, "a/b", b"x")]])

        assert time.monotonic() - began < 5.0
        assert (await asyncio.to_thread(zbus_log.put, log_path, [[zbus_log.Row(1, 0, 1, "a/b", b"x")]])).events == 1
        assert await bus.head() == 1


@pytest.mark.parametrize(
    ("chunks", "found"),
    [
        ([zbus_log.Row(1, 0, 1, "a/b", b"x")], "Row in place of a list of rows"),
        ([[(1, 0, 1, "a/b", b"x")]], "tuple"),
        ([[zbus.Event(1, 0, 1, "a/b", b"x")]], "Event"),
        ([{"key": "a/b"}], "str"),
    ],
    ids=["flat", "tuple", "event", "dict"],
)
def test_rows_of_another_shape_are_named(log_path: Path, chunks: Any, found: str) -> None:
    with pytest.raises(zbus.EventInvalid, match=f"put takes lists of zbus_log.Row.*, not {found}; it was not stored"):
        zbus_log.put(log_path, chunks)
