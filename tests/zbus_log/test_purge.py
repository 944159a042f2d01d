"""A purge removes all events of some keys from the middle of a log, and everything else stays true."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from log_support import append, ask, opened, raw, sealed_blocks, wait_until
from removed_support import KEYS, check, fill, kept, key_of, offsets, row

import zbus
from zbus.errors import EventCorrupt, LogDamaged, LogReadOnly
from zbus.keys import KeySet
from zbus.ports.log import Row, Span
from zbus_log import Rules, SqliteLog, purge, verify
from zbus_log.file.database import WAL_BYTES
from zbus_log.file.tables import BLOCK
from zbus_log.purging import preview

TELEMETRY = KeySet(["telemetry/**"])
SIZE = 2 * BLOCK + 500  # two sealed blocks, and a part of the third


def is_left(key: str) -> bool:
    return key not in TELEMETRY


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
def log(path: Path) -> Iterator[SqliteLog]:
    with opened(path) as log:
        fill(log, SIZE)
        yield log


def count_of(until: int, first: int = 1) -> int:
    return until - first + 1 - len(kept(until, is_left, first))


# Reading


def test_replays_leave_purged_events_out_and_report_nothing_missing(path: Path, log: SqliteLog) -> None:
    before, head = log.digest(SIZE), log.head()

    purged = log.purge(TELEMETRY)

    assert purged == (count_of(SIZE), SIZE, (), 0)
    assert offsets(log) == kept(SIZE, is_left)
    assert offsets(log, ["shop/**"]) == kept(SIZE, lambda key: key == "shop/orders")
    assert offsets(log, ["telemetry/**"]) == []
    assert (log.head(), log.low_water(), log.digest(SIZE)) == (head, 0, before)
    check(path, count_of(SIZE))


def test_purged_payloads_are_overwritten_in_the_file(path: Path) -> None:
    with opened(path) as log:
        rows = [Row(1, n, n, f"customer/{n % 2}", b"%d secret of customer %d" % (n, n % 2), None) for n in range(3000)]
        append(log, rows)
        log.purge(KeySet(["customer/1"]))

    stored = path.read_bytes()

    assert b"secret of customer 0" in stored
    assert b"secret of customer 1" not in stored


def secrets_in(path: Path) -> set[str]:
    """The files of a log, by name, that have a secret of customer 1."""
    files = [each for each in path.parent.iterdir() if each.is_file()]
    return {each.name for each in files if b"secret of customer 1" in each.read_bytes()}


def test_purged_payloads_are_overwritten_in_the_files_of_a_running_owner(path: Path) -> None:
    with opened(path) as log:
        append(log, [Row(1, n, n, f"customer/{n % 2}", b"secret of customer %d" % (n % 2), None) for n in range(3000)])
        before = secrets_in(path)
        log.purge(KeySet(["customer/1"]))

        assert before
        assert secrets_in(path) == set()
        assert Path(f"{path}-wal").stat().st_size >= WAL_BYTES  # so that commits do not extend it
        append(log, [Row(1, 3000, 1, "customer/0", b"x", None)])
    check(path, 1500)


def test_purged_payloads_are_removed_from_the_write_ahead_log_when_a_long_read_ends(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zbus_log.write.checkpoints.EMPTY_AGAIN_S", 0.05)
    monkeypatch.setattr("zbus_log.write.checkpoints.EMPTY_WAIT_S", 0.05)
    with opened(path) as log:
        append(log, [Row(1, n, n, f"customer/{n % 2}", b"secret of customer %d" % (n % 2), None) for n in range(3000)])
        reader = raw(path)
        reader.execute("BEGIN").close()
        reader.execute("SELECT count(*) FROM events").fetchall()
        log.purge(KeySet(["customer/1"]))
        during = secrets_in(path)
        (report,) = [each.zbus for each in caplog.records if "LOG_PURGE_INCOMPLETE" in each.message]  # type: ignore[attr-defined]
        append(log, [Row(1, 3000, 1, "customer/0", b"x", None)])
        reader.execute("COMMIT").close()
        reader.close()

        assert f"{path.name}-wal" in during
        assert report["code"] == "wal_in_use"
        wait_until(lambda: secrets_in(path) == set())
        append(log, [Row(1, 3001, 1, "customer/0", b"x", None)])
    check(path, 1500)


def test_a_reader_beside_the_purge_sees_the_same(path: Path, log: SqliteLog) -> None:
    with opened(path, read_only=True) as reader:
        assert len(offsets(reader, ["telemetry/**"])) == count_of(SIZE)  # it has proved the index of each block

        log.purge(TELEMETRY)

        assert offsets(reader) == kept(SIZE, is_left)
        assert offsets(reader, ["telemetry/**"]) == []
        assert offsets(reader, ["audit/*", "shop/*"]) == kept(SIZE, is_left)


def test_reads_during_a_purge_never_report_a_missing_event(path: Path, log: SqliteLog) -> None:
    done, problems = threading.Event(), list[Any]()

    def read() -> None:
        with opened(path, read_only=True) as reader:
            while not done.is_set():
                try:
                    assert set(kept(SIZE, is_left)) <= set(offsets(reader))
                    assert offsets(reader, ["shop/**"]) == kept(SIZE, lambda key: key == "shop/orders")
                except BaseException as error:
                    problems.append(error)
                    return

    thread = threading.Thread(target=read)
    thread.start()
    for expression in ("telemetry/cpu", "telemetry/disk/*"):
        log.purge(KeySet([expression]))
    done.set()
    thread.join(30.0)

    assert problems == []


@pytest.mark.parametrize("at", [10, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3, SIZE])
def test_times_find_the_first_event_that_is_left(log: SqliteLog, at: int) -> None:
    log.purge(TELEMETRY)
    from_ns = row(at).published_at

    assert offsets(log, span=Span(from_ns=from_ns)) == kept(SIZE, is_left, at)
    assert offsets(log, span=Span(to_ns=from_ns)) == kept(at, is_left)


def test_the_head_does_not_go_back_when_the_newest_events_are_purged(path: Path) -> None:
    with opened(path) as log:
        append(log, [row(4 * n) for n in range(1, 11)])  # ten orders, at the offsets 1 to 10
        digest = log.digest(10)

        assert log.purge(KeySet(["shop/**"])).removed == 10

        assert (log.head(), log.digest(10)) == (10, digest)
        page = log.read(KeySet.all(), Span(0), 10)
        assert (page.events(), page.covered) == (([], None, 0), 10)
    with opened(path) as log:  # the log continues there when it is opened again
        assert (log.head(), log.digest(10)) == (10, digest)
        assert append(log, [Row(5, 1, 1, "x", b"new", None)]) == [11]
        (event,) = log.read(KeySet.all(), Span(0), 10).events()[0]
        assert event.offset == 11
    check(path, 10)


def test_a_block_that_is_sealed_after_a_purge_has_the_same_digest(tmp_path: Path) -> None:
    digests = []
    for purges in (True, False):
        with opened(tmp_path / f"{purges}.db") as log:
            fill(log, BLOCK - 100)
            if purges:
                log.purge(TELEMETRY)
            fill(log, 300)
            digests.append([log.digest(at) for at in (50, BLOCK - 1, BLOCK + 10, log.head())])
    check(tmp_path / "True.db", count_of(BLOCK - 100))
    assert digests[0] == digests[1]
    with opened(tmp_path / "True.db") as log:
        assert [log.digest(at) for at in (50, BLOCK - 1, BLOCK + 10, log.head())] == digests[1]


def test_later_events_of_a_purged_key_are_kept(path: Path, log: SqliteLog) -> None:
    log.purge(TELEMETRY)
    fill(log, BLOCK)

    assert offsets(log, ["telemetry/**"]) == [n for n in range(SIZE + 1, SIZE + BLOCK + 1) if not is_left(key_of(n))]
    check(path, count_of(SIZE))
    assert log.purge(TELEMETRY).removed == count_of(SIZE + BLOCK, SIZE + 1)
    check(path, count_of(SIZE + BLOCK))


def test_a_purge_of_everything_leaves_the_offsets(path: Path, log: SqliteLog) -> None:
    digest = log.digest(SIZE)

    assert log.purge(KeySet(["**"])).removed == SIZE
    fill(log, 10)

    assert offsets(log) == list(range(SIZE + 1, SIZE + 11))
    assert log.digest(SIZE) == digest
    assert ask(path, "SELECT count(*) FROM removed") == 3  # one row for each block
    check(path, SIZE)


# Tables and records


def test_it_is_recorded_in_the_log_and_as_a_record(
    path: Path, log: SqliteLog, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        log.purge(TELEMETRY)

    (report,) = [each.zbus for each in caplog.records if "LOG_PURGED" in each.message]  # type: ignore[attr-defined]
    assert (report["keys"], report["until"], report["events"]) == (["telemetry/**"], SIZE, count_of(SIZE))
    assert report["durables"] == []
    stored = raw(path).execute("SELECT expressions, until, events, finished_at >= started_at FROM purges").fetchall()
    assert stored == [(json.dumps(["telemetry/**"]), SIZE, count_of(SIZE), 1)]


def test_keys_without_events_go_too(path: Path, log: SqliteLog) -> None:
    append(log, [Row(1, 1, 1, "newest/key", b"", None)])  # SQLite derives the next id from it

    log.purge(TELEMETRY)

    assert {each[0] for each in raw(path).execute("SELECT key FROM keys")} == {*filter(is_left, KEYS), "newest/key"}
    fill(log, 8)
    assert offsets(log, ["telemetry/**"]) != []


def test_the_statistics_of_blocks_stay_true(path: Path, log: SqliteLog) -> None:
    log.purge(TELEMETRY)

    rows = raw(path).execute("SELECT events, bytes FROM blocks").fetchall()
    parts = [kept(BLOCK - 1, is_left), kept(2 * BLOCK - 1, is_left, BLOCK)]
    assert rows == [(len(part), sum(len(b"payload %d" % offset) for offset in part)) for part in parts]


def test_retried_events_are_not_stored_again(path: Path, log: SqliteLog) -> None:
    log.purge(TELEMETRY)
    with opened(path, read_only=True):
        pass

    again = append(log, [row(offset) for offset in (1, 2, SIZE)])  # telemetry, telemetry, an order or so

    assert log.head() == SIZE
    assert max(again) <= SIZE
    log.close(5.0)
    with opened(path) as reopened:
        append(reopened, [row(offset) for offset in range(SIZE - 20, SIZE + 1)])
        assert reopened.head() == SIZE
    with opened(path, dedup_s=0) as other:
        assert other.head() == SIZE


def test_without_dedup_s_a_purged_event_can_be_stored_again(path: Path) -> None:
    with opened(path, dedup_s=0) as log:
        fill(log, 20)
        log.purge(TELEMETRY)
        assert append(log, [row(1), row(4)]) == [21, 4]


def test_only_purged_offsets_can_be_deleted(path: Path, log: SqliteLog) -> None:
    log.purge(KeySet(["telemetry/cpu"]))
    connection = raw(path)

    for offset in range(1, 9):
        if key_of(offset) != "telemetry/cpu":
            with pytest.raises(Exception, match="append-only"):
                connection.execute("DELETE FROM events WHERE offset = ?", (offset,))
    connection.close()


def test_retention_passes_purged_events_and_drops_what_was_kept_of_them(path: Path, log: SqliteLog) -> None:
    log.purge(TELEMETRY)
    log.prune(Rules(until=BLOCK + 10))

    assert log.low_water() == BLOCK + 10
    assert ask(path, "SELECT min(first) FROM removed") > BLOCK + 10
    assert offsets(log, span=Span(BLOCK + 10)) == kept(SIZE, is_left, BLOCK + 11)
    check(path, count_of(SIZE, BLOCK + 11))


@pytest.mark.parametrize("events", [10, 1000, 3000])
def test_a_number_of_events_means_events_that_are_left(path: Path, log: SqliteLog, events: int) -> None:
    log.purge(TELEMETRY)

    log.prune(Rules(max_events=events))

    assert offsets(log) == kept(SIZE, is_left)[-events:]
    check(path, count_of(SIZE, log.low_water() + 1))


def test_a_read_only_log_is_not_purged(path: Path, log: SqliteLog) -> None:
    with opened(path, read_only=True) as reader, pytest.raises(LogReadOnly):
        reader.purge(TELEMETRY)


def test_commits_continue_during_a_purge(log: SqliteLog) -> None:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: log.purge(TELEMETRY, progress=seen.append))
    thread.start()
    stored = [append(log, [Row(99, n, 1, "live/key", b"x", None)])[0] for n in range(50)]
    thread.join(30.0)

    assert stored == list(range(SIZE + 1, SIZE + 51))
    assert seen == sorted(seen)
    assert seen[-1] == count_of(SIZE)


# Durable subscriptions


async def test_a_durable_subscription_resumes_after_purged_events(path: Path) -> None:
    async with zbus.open(str(path)) as bus:
        orders, noise = await bus.publisher("shop/orders"), await bus.publisher("telemetry/cpu")
        async with bus.subscribe("**", durable="audit", start="beginning") as sub:
            await orders.publish(b"1")
            await (await anext(sub)).ack()
        for _ in range(5):
            await noise.publish(b"noise")
        await orders.publish(b"2")
    purged = purge(path, ["telemetry/**"])
    async with zbus.open(str(path)) as bus, bus.subscribe("**", durable="audit") as sub:
        event = await anext(sub)

    assert (event.offset, event.payload) == (7, b"2")
    assert (purged.removed, purged.unacknowledged) == (5, ("audit",))


def test_only_subscriptions_that_miss_something_are_named(path: Path, log: SqliteLog) -> None:
    for name, keys, at in (
        ("behind", ["**"], 5),
        ("done", ["**"], SIZE),
        ("other", ["shop/**"], 5),
        ("part", ["telemetry/disk/**"], SIZE - 10),
    ):
        log.cursors.claim(name, keys, at)

    found = preview(str(path), TELEMETRY)

    assert (found.events, found.first, found.last) == (count_of(SIZE), 1, SIZE - SIZE % 4 + (2 if SIZE % 4 > 1 else -2))
    assert found.unacknowledged == ("behind", "part")
    assert log.purge(TELEMETRY).unacknowledged == ("behind", "part")


# Beside and instead of an owner


def test_the_owner_purges_for_another_process(path: Path) -> None:
    program = (
        "import sys, time, zbus.blocking\n"
        "with zbus.blocking.open(sys.argv[1]) as bus:\n"
        "    bus.publisher('telemetry/cpu').publish_many([b'x'] * 100)\n"
        "    bus.publisher('shop/orders').publish(b'y')\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    arguments = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        found = purge(path, ["telemetry/**"])
        assert found == (100, 101, (), 0)
        assert ask(path, "SELECT count(*) FROM events") == 1
        owner.communicate("end\n", timeout=30)
    check(path, 100)


KILLED = """
import sys
from zbus.keys import KeySet
from zbus_log import SqliteLog
log = SqliteLog(sys.argv[1])
print("ready", flush=True)
log.purge(KeySet(["telemetry/**"]), progress=lambda removed: print(removed, flush=True))
"""


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03])
def test_a_killed_purge_leaves_a_log_without_problems_and_can_be_done_again(path: Path, after_s: float) -> None:
    with opened(path) as log:
        fill(log, SIZE)
        digests = [log.digest(at) for at in (BLOCK - 1, 2 * BLOCK - 1, SIZE)]
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "ready\n"
        if after_s:
            killed.stdout.readline()
        time.sleep(after_s)
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait(30)

    report = verify(str(path))
    assert report.problems == []
    counted = ask(path, "SELECT ifnull(sum(events), 0) FROM purges")
    assert report.removed == counted
    with opened(path) as log:
        assert [log.digest(at) for at in (BLOCK - 1, 2 * BLOCK - 1, SIZE)] == digests
        assert set(kept(SIZE, is_left)) <= set(offsets(log))
        assert log.purge(TELEMETRY).removed == count_of(SIZE) - counted
        assert offsets(log) == kept(SIZE, is_left)
    check(path, count_of(SIZE))


# Damage


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ("UPDATE removed SET leaves = substr(leaves, 2) WHERE first = 5", "malformed"),
        ("UPDATE removed SET last = last + 1 WHERE first = 5", "malformed"),
        ("UPDATE removed SET first = 6 WHERE first = 5", "malformed"),
        ("UPDATE removed SET leaves = zeroblob(length(leaves)) WHERE first = 5", "malformed"),
        ("UPDATE removed SET checksum = checksum + 1 WHERE first = 5", "malformed"),
        ("DELETE FROM removed WHERE first = 5", "offsets 5 to 6 are missing"),
    ],
)
def test_damaged_rows_of_removed_events_are_found(path: Path, change: str, reported: str) -> None:
    with opened(path) as log:
        fill(log, BLOCK + 10)
        log.purge(TELEMETRY)
        assert ask(path, "SELECT last FROM removed WHERE first = 5") == 6
        log.close(5.0)
    connection = raw(path)
    connection.execute(change)
    connection.close()

    assert any(reported in problem for problem in verify(str(path)).problems)
    with opened(path, read_only=True) as log:
        found, error, _ = log.read(KeySet.all(), Span(0), 100).events()
        if isinstance(error, EventCorrupt):
            assert error.offset == 5
            found, error, skipped = log.read(KeySet.all(), Span(0), 100).events(skip_corrupt=True)
            assert (error, skipped) == (None, 2)
        assert [event.offset for event in found] == kept(BLOCK, is_left)[:100]


def test_an_event_that_exists_although_it_was_removed_is_found(path: Path) -> None:
    with opened(path) as log:
        fill(log, 20)
        log.purge(TELEMETRY)
    connection = raw(path)
    connection.execute("INSERT INTO events SELECT 5, publisher, 5, 1, key, 1, headers, payload FROM events LIMIT 1")
    connection.close()

    assert "the event at offset 5 exists, although it was removed" in verify(str(path)).problems


def test_a_lost_event_is_still_missing_beside_removed_ones(path: Path, log: SqliteLog) -> None:
    log.purge(TELEMETRY)
    log.close(5.0)
    connection = raw(path)
    connection.execute("DROP TRIGGER events_are_not_deleted")
    connection.execute("DELETE FROM events WHERE offset = 8")
    connection.close()

    assert "offsets 8 to 8 are missing" in verify(str(path)).problems
    with opened(path, read_only=True) as reader:
        found, error, _ = reader.read(KeySet.all(), Span(0), 100).events()
    assert [event.offset for event in found] == [3, 4, 7]
    assert isinstance(error, EventCorrupt)
    assert error.offset == 8


def test_a_damaged_block_is_not_touched(path: Path, log: SqliteLog) -> None:
    log.close(5.0)
    connection = raw(path)
    connection.execute("UPDATE by_key SET offsets = '[4097]' WHERE block = 1 AND key = (SELECT max(key) FROM by_key)")
    connection.close()

    with opened(path) as other:
        with pytest.raises(LogDamaged, match="damaged, so none of them was removed"):
            other.purge(TELEMETRY)
        assert ask(path, f"SELECT count(*) FROM events WHERE offset BETWEEN {BLOCK} AND {2 * BLOCK - 1}") == BLOCK
    assert ask(path, "SELECT finished_at IS NULL FROM purges") == 1


def test_a_log_of_the_first_version_can_be_purged(path: Path) -> None:
    data = Path(__file__).parents[1] / "data"
    shutil.copy(data / "log-v1.db", path)
    shutil.copy(data / "log-v1.db-head", f"{path}-head")
    with opened(path) as log:
        name = ask(path, "SELECT key FROM keys")
        before = [(event.offset, event.key) for event in _events(log)]
        gone = log.purge(KeySet([name])).removed
        assert [(event.offset, event.key) for event in _events(log)] == [each for each in before if each[1] != name]
    check(path, gone)
    assert gone > 0


def test_blocks_that_the_first_version_sealed_can_be_purged(path: Path, log: SqliteLog) -> None:
    log.close(5.0)
    connection = raw(path)
    connection.execute("UPDATE blocks SET digest = NULL, index_checksum = NULL, checksum = NULL")
    connection.close()

    with opened(path) as log:
        assert log.purge(TELEMETRY).removed == count_of(SIZE)
        assert offsets(log, ["shop/**"]) == kept(SIZE, lambda key: key == "shop/orders")
    check(path, count_of(SIZE))


def _events(log: SqliteLog) -> list[Any]:
    found, span = list[Any](), log.narrow(Span())
    while span.after < (span.until or 0):
        page = log.read(KeySet.all(), span, 1000)
        events, error, _ = page.events()
        assert error is None
        found += events
        span = span._replace(after=page.covered)
    return found


def test_the_purge_of_a_log_that_is_closed_ends_with_an_error(path: Path, log: SqliteLog) -> None:
    wait_until(lambda: sealed_blocks(path) == 2)
    log.close(5.0)
    with pytest.raises(zbus.ZbusError):
        log.purge(TELEMETRY)


# Retention after a purge


@pytest.mark.parametrize("events", [0, 1, 10])
def test_retention_by_number_counts_the_events_that_are_left(log: SqliteLog, events: int) -> None:
    log.purge(TELEMETRY)

    log.prune(Rules(max_events=events))

    assert offsets(log) == kept(SIZE, is_left)[SIZE:] + (kept(SIZE, is_left)[-events:] if events else [])


def test_retention_by_size_takes_the_mean_of_the_events_that_are_left(path: Path) -> None:
    with opened(path) as log:
        append(log, [Row(1, n, n, "orders", bytes(1000), None) for n in range(2000)])
        append(log, [Row(1, n, n, "telemetry/a", b"", None) for n in range(2000, 22000)])
        log.purge(TELEMETRY)

        log.prune(Rules(max_bytes=int(2000 * 1100 * 0.9)))

        assert 1000 < ask(path, "SELECT count(*) FROM events") < 2000
