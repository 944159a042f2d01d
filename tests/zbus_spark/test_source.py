"""`spark.read.format("zbus")`: the events of a replay as columns, and one clear error for bad input."""

from __future__ import annotations

import asyncio
import datetime as dt
import gc
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from contract_keys import EXPRESSIONS, KEYS
from reading_child import Reading
from spark_support import spark, write_log

import pyspark_zbus
import zbus
from zbus.errors import LogError, ZbusError
from zbus.keys import KeySet
from zbus.ports.log import Row, Span
from zbus_log import Rules, SqliteLog, put
from zbus_log.file import sqlite_driver
from zbus_spark import SparkFailed, local, spark_errors
from zbus_spark.columns import RAW, SCHEMA, Columns


def load(log: Path, **options: object) -> Any:
    return spark().read.format("zbus").options(**options).load(str(log))


def offsets(log: Path, **options: object) -> list[int]:
    return sorted(row.offset for row in load(log, **options).select("offset").collect())


async def replayed(log: Path, *keys: str) -> list[zbus.Event]:
    async with zbus.open(log, read_only=True) as bus:
        return [event async for event in bus.replay(*keys or ["**"])]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 events, over half a block without headers, then some with."""
    log = tmp_path_factory.mktemp("shop") / "app.db"
    chance = random.Random(7)
    keys = ["shop/orders/created", "shop/orders/paid", "shop/news", "audit/a/b/c/d", "single", "shop/%2F/ünï"]
    write_log(log, [(chance.choice(keys), chance.randbytes(chance.randrange(200))) for _ in range(2000)])
    write_log(log, [(chance.choice(keys), {"id": number}) for number in range(1000)], {"session-id": "s1", "x": "ü"})
    return log


def test_every_column_is_what_a_replay_gives(shop: Path) -> None:
    events = asyncio.run(replayed(shop))

    found = load(shop).orderBy("offset").collect()

    assert len(found) == len(events) == 3000
    for row, event in zip(found, events, strict=True):
        segments = event.key.split("/")
        assert (row.offset, row.key, row.publisher_id, row.sequence) == (
            event.offset,
            event.key,
            event.publisher_id,
            event.sequence,
        )
        assert (row.namespace, row.topic) == (segments[0], segments[-1])
        assert row.component == (segments[1] if len(segments) > 2 else None)
        assert (row.headers, bytes(row.payload)) == (dict(event.headers), event.payload)
        assert row.published_ns == event.published_at
        since = row.published_at.astimezone(dt.UTC) - dt.datetime.fromtimestamp(0, dt.UTC)
        assert since // dt.timedelta(microseconds=1) == event.published_at // 1000


def test_internal_columns_are_returned_on_request(shop: Path) -> None:
    stored = sqlite_driver.connect(f"file:{shop}?mode=ro")
    rows = stored.execute("SELECT offset, key, checksum, headers FROM events ORDER BY offset").fetchall()
    stored.close()

    found = load(shop, raw=True).orderBy("offset").collect()

    assert load(shop, raw=True).schema == RAW
    assert [(row.offset, row.key_id, row.checksum, row.headers_raw and bytes(row.headers_raw)) for row in found] == rows


def test_an_expression_matches_the_same_keys_as_everywhere_else(tmp_path: Path) -> None:
    keys = sorted({key for key in KEYS if not key.startswith("@")})
    log = tmp_path / "app.db"
    write_log(log, [(key, b"") for key in keys] + [(f"many/{number}", b"") for number in range(50)])

    for expression in [*EXPRESSIONS[::5], "many/*", "nothing/here", "a/* many/7"]:
        wanted = KeySet(expression.split())
        expected = sorted(key for key in [*keys, *(f"many/{number}" for number in range(50))] if key in wanted)
        assert sorted(row.key for row in load(log, key=expression).select("key").collect()) == expected


def test_ranges_by_offset_are_inclusive_and_cut_into_partitions(shop: Path) -> None:
    assert offsets(shop, startOffset=100, endOffset=200) == list(range(100, 201))
    assert offsets(shop, startOffset=2990) == list(range(2990, 3001))
    assert offsets(shop, endOffset=5_000_000) == list(range(1, 3001))
    assert offsets(shop, startOffset=3001) == []
    assert offsets(shop, endOffset=0) == []
    many = load(shop, rowsPerPartition=700)
    assert many.rdd.getNumPartitions() == 5
    assert sorted(row.offset for row in many.collect()) == list(range(1, 3001))


def test_ranges_by_time_are_exact(shop: Path) -> None:
    events = asyncio.run(replayed(shop))
    low, high = events[500].published_at, events[2500].published_at
    expected = [event.offset for event in events if low <= event.published_at <= high]

    assert offsets(shop, fromNs=low, toNs=high) == expected
    second = dt.datetime.fromtimestamp(low // 10**9, dt.UTC)
    later = [event.offset for event in events if event.published_at >= low // 10**9 * 10**9]
    assert offsets(shop, **{"from": second.isoformat()}) == later
    assert offsets(shop, to=second.isoformat().replace("+00:00", "")) == [
        event.offset for event in events if event.published_at <= low // 10**9 * 10**9
    ]


def test_a_load_is_a_snapshot_and_the_next_one_sees_more(log_path: Path) -> None:
    write_log(log_path, [("a/b", b"1")] * 10)
    frame = load(log_path)
    assert frame.count() == 10

    write_log(log_path, [("a/b", b"2")] * 5)

    assert frame.count() == 10
    assert load(log_path).count() == 15


def test_a_filtered_query_does_not_change_a_later_one(shop: Path) -> None:
    frame = load(shop)

    assert frame.where("offset = 5").count() == 1
    assert frame.count() == 3000
    assert frame.where("key = 'single'").count() < 3000
    assert frame.where("offset > 10").count() == 2990


def test_a_schema_of_fewer_columns_is_a_projection(shop: Path) -> None:
    frame = spark().read.format("zbus").schema("payload binary, offset long").load(str(shop))

    assert frame.columns == ["payload", "offset"]
    assert frame.count() == 3000
    assert Columns(frame.schema).stored == ["payload"]


def test_an_empty_log_is_an_empty_frame(log_path: Path) -> None:
    SqliteLog(str(log_path)).close(5.0)

    assert load(log_path).collect() == []
    assert load(log_path, key="a/**").collect() == []


def trim(log: Path, upto: int) -> None:
    owned = SqliteLog(str(log))
    assert owned.prune(Rules(max_events=owned.head() - upto)).low_water == upto
    owned.close(5.0)


def test_a_trimmed_range_is_an_error_unless_a_loss_is_allowed(log_path: Path) -> None:
    write_log(log_path, [("a/b", b"x")] * 9000)
    trim(log_path, 6000)

    with pytest.raises(SparkFailed, match="6000"), spark_errors():
        load(log_path, startOffset=10).count()
    assert load(log_path, startOffset=10, failOnDataLoss=False).count() == 3000
    assert load(log_path).count() == 3000  # nothing named: from where the log begins
    assert load(log_path, startOffset=6001).count() == 3000


def test_an_end_in_the_trimmed_range_is_an_error_and_not_an_empty_frame(log_path: Path) -> None:
    put(log_path, [[Row(1, number, 1_000 + number, "a/b", b"", None) for number in range(9000)]])
    trim(log_path, 6000)  # what is left has the times from 7000 on

    for gone in ({"endOffset": 1}, {"endOffset": 6000}, {"toNs": 6999}, {"toNs": 5}, {"fromNs": 2000, "toNs": 6999}):
        with pytest.raises(SparkFailed, match="after offset 0 up to 6000 were removed"), spark_errors():
            load(log_path, **gone).count()
        assert load(log_path, **gone, failOnDataLoss=False).count() == 0
    assert offsets(log_path, endOffset=6001) == [6001]
    assert offsets(log_path, toNs=7000) == [6001]
    assert load(log_path, fromNs=2000).count() == 3000  # a time begins with what is left, as in a replay
    assert load(log_path, endOffset=0).count() == 0  # an empty range
    assert load(log_path, startOffset=6001, toNs=6999).count() == 0  # nor is anything of this gone


def test_a_trim_under_a_planned_read_is_an_error_and_not_fewer_rows(log_path: Path) -> None:
    write_log(log_path, [("a/b", b"x")] * 40_000)
    reading = Reading(log_path, 40_000)

    trim(log_path, 30_000)
    found = reading.go_on()

    assert found["error"] == "LogTrimmed"
    assert found["rows"] < 40_000


def test_if_data_loss_is_allowed_a_read_continues_after_a_trim(log_path: Path) -> None:
    write_log(log_path, [("a/b", b"x")] * 40_000)
    reading = Reading(log_path, 40_000, fail_on_data_loss=False)

    trim(log_path, 30_000)
    found = reading.go_on()

    assert found["error"] == ""
    assert reading.first + 10_000 <= found["rows"] < 40_000
    assert found["last"] == 40_000


def test_a_slow_reader_pins_no_write_ahead_log_and_blocks_no_writer(log_path: Path) -> None:
    async def scenario() -> tuple[int, dict[str, Any]]:
        async with zbus.open(log_path) as bus:
            publisher = await bus.publisher("a/b")
            await publisher.publish_many([b"x" * 1000] * 30_000)
            reading = await asyncio.to_thread(Reading, log_path, 30_000)  # it takes its time from here on
            async with asyncio.timeout(60):
                for _ in range(60):
                    await publisher.publish_many([b"y" * 1000] * 1000)
            wal = Path(f"{log_path}-wal").stat().st_size
            return wal, await asyncio.to_thread(reading.go_on)

    wal, found = asyncio.run(scenario())

    assert (found["rows"], found["error"]) == (30_000, "")
    assert wal < 30_000_000  # although 60 MB were written during the read


def test_a_writer_continues_while_spark_scans_and_its_write_ahead_log_stays_small(log_path: Path) -> None:
    chunk, chunks = [b"y" * 1000] * 1000, 40
    written, scans, over = 0, [], threading.Event()

    def scan() -> None:
        while not over.is_set():
            begun = written
            frame = load(log_path, endOffset=30_000, rowsPerPartition=10_000)
            seen = frame.selectExpr("count(*)", "sum(length(payload))").collect()[0]
            scans.append((tuple(seen), written - begun))

    async def scenario() -> list[int]:
        nonlocal written
        sizes = []
        async with zbus.open(log_path) as bus:
            publisher = await bus.publisher("a/b")
            await publisher.publish_many([b"x" * 1000] * 30_000)
            scanning = asyncio.ensure_future(asyncio.to_thread(scan))
            async with asyncio.timeout(100):
                while written < chunks or len(scans) < 2:
                    await publisher.publish_many(chunk)
                    written += 1
                    sizes.append(Path(f"{log_path}-wal").stat().st_size)
                    await asyncio.sleep(0.02)
            over.set()
            await scanning
        return sizes

    sizes = asyncio.run(scenario())

    assert {seen for seen, _ in scans} == {(30_000, 30_000_000)}
    assert all(meanwhile > 0 for _, meanwhile in scans[:-1])  # the last one may begin when all is written
    assert max(sizes) < 30_000_000  # 40 MB or more were written


def test_large_payloads_come_in_pages_of_bounded_size(log_path: Path) -> None:
    write_log(log_path, [("a/b", b"small")] * 5000 + [("a/b", bytes([number]) * 4_000_000) for number in range(20)])

    found = Reading(log_path, 5020).go_on()

    assert (found["rows"], found["error"]) == (5020, "")
    assert found["sums"] == [number * 4_000_000 for number in range(20)]
    assert found["largest"] < 90_000_000  # all of them in one, once; those that follow come a few at a time


def test_two_kinds_of_sqlite_never_open_a_log_in_one_process(log_path: Path) -> None:
    write_log(log_path, [("a/b", b"x")])
    span, choice = local.plan(str(log_path), KeySet.all(), Span(0, 1))
    owned = SqliteLog(str(log_path))
    try:
        with pytest.raises(LogError, match="is open in this process"):
            next(local.batches(str(log_path), choice, span, Columns(SCHEMA), True))
    finally:
        owned.close(5.0)


def make_newer(log: Path) -> None:
    write_log(log, [("a/b", b"")])
    connection = sqlite_driver.connect(str(log))
    connection.execute("PRAGMA user_version=99")
    connection.close()


def make_text(log: Path) -> None:
    log.write_text("this is no log, and it is long enough not to be taken for an empty one" * 10)


def make(log: Path) -> None:
    write_log(log, [("a/b", b"")])


@pytest.mark.parametrize(
    ("prepare", "options", "reason"),
    [
        (lambda log: None, {}, "there is no log"),
        (make_newer, {}, "the log has version 99.*upgrade zbus"),
        (make_text, {}, "file is not a database"),
        (make, {"key": "a//b"}, "it has an empty segment"),
        (make, {"kye": "a/b"}, "there is no such option"),
        (make, {"startOffset": "x"}, "startOffset"),
        (make, {"startOffset": 9, "endOffset": 3}, "endOffset 3 comes before startOffset 9"),
        (make, {"from": "yesterday"}, "not an ISO time"),
        (make, {"from": "2026-01-01", "fromNs": 3}, "not both"),
        (make, {"rowsPerPartition": 0}, "rowsPerPartition"),
        (make, {"failOnDataLoss": "perhaps"}, "failOnDataLoss"),
    ],
    ids=lambda value: "" if callable(value) else "_".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_one_clear_error(
    log_path: Path, prepare: Callable[[Path], None], options: dict[str, object], reason: str
) -> None:
    prepare(log_path)

    with pytest.raises(ZbusError, match=reason) as caught, spark_errors():
        load(log_path, **options).count()
    assert "\n" not in str(caught.value)
    assert "java" not in str(caught.value).lower()


def test_an_unknown_column_is_named_in_the_error(shop: Path) -> None:
    reason = "no column 'offset string'; a log has: offset bigint"
    with pytest.raises(SparkFailed, match=reason), spark_errors():
        spark().read.format("zbus").schema("offset string").load(str(shop)).count()


def test_the_format_is_found_without_being_registered() -> None:
    assert pyspark_zbus.DefaultSource.name() == "zbus"


def frozen(batches: Iterable[Any]) -> Iterator[Any]:
    import zbus_spark.source  # noqa: F401 - as a worker that reads does

    for batch in batches:
        batch["id"] = gc.get_freeze_count()
        yield batch


def test_workers_do_not_scan_all_modules_for_garbage_after_each_task() -> None:
    counts = [row.id for row in spark().range(0, 4, 1, 2).mapInPandas(frozen, "id long").collect()]

    assert min(counts) > 10_000
    assert gc.get_freeze_count() == 0, "the garbage collector of the user's process is unchanged"


def test_an_event_that_is_missing_is_an_error_that_names_it(shop: Path, tmp_path: Path) -> None:
    log = tmp_path / "app.db"
    for suffix in ("", "-head"):
        shutil.copyfile(f"{shop}{suffix}", f"{log}{suffix}")
    connection = sqlite_driver.connect(str(log))
    connection.execute("DROP TRIGGER events_are_not_deleted")
    connection.execute("DELETE FROM events WHERE offset = 1234")
    connection.close()

    with pytest.raises(ZbusError, match="offset 1234 is corrupt"), spark_errors():
        load(log).collect()
    assert load(log, failOnDataLoss="false").count() == 2999
