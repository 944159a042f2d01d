"""The Spark sink: rows are published once or not at all."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pytest
from inside import node_of
from log_support import raw
from pyspark.sql.types import BinaryType, DataType, IntegerType, MapType, StringType, StructField, StructType
from sink_child import HELD_CHUNKS, LINES, ForgetfulSource, go_on, kill_at, left, query, stored, surplus
from spark_support import spark, write_log

import zbus
from zbus.errors import ConfigInvalid, EventInvalid, EventTooLarge, KeyInvalid, LogDamaged, LogError, ZbusError
from zbus_log import verify
from zbus_log.write.writer import Writer
from zbus_spark.failures import SparkFailed, spark_errors
from zbus_spark.sink import make_stream_writer, make_writer
from zbus_spark.staging import ABANDONED_S, run_folder, stage

KEY_AND_PAYLOAD = "key string, payload binary"


TYPES: dict[str, DataType] = {
    "string": StringType(),
    "binary": BinaryType(),
    "int": IntegerType(),
    "map<string,int>": MapType(StringType(), IntegerType()),
}


def columns(text: str) -> StructType:
    """Return a schema without a session."""
    pairs = [each.split() for each in text.split(", ")]
    return StructType([StructField(name, TYPES[kind]) for name, kind in pairs])


def batch(*rows: tuple[str, bytes]) -> pa.RecordBatch:
    keys, payloads = zip(*rows, strict=True)
    return pa.record_batch([pa.array(keys, pa.string()), pa.array(payloads, pa.binary())], ["key", "payload"])


def write(log: Path, *rows: tuple[str, bytes], **options: str) -> tuple[Any, Any]:
    """A writer as the driver has it at its commit, and the message of its one task."""
    writer = make_writer({"path": str(log), **options}, columns(KEY_AND_PAYLOAD), False)
    message = writer.write(iter([batch(*rows)]))
    sent: tuple[Any, Any] = pickle.loads(pickle.dumps((writer, message)))
    return sent


def payloads(log: Path) -> list[bytes]:
    return [event.payload for event in stored(log)]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    kill_at(folder, ("staging", "put", "mark"))
    return folder


def test_rows_become_events_with_their_keys_headers_and_order(log: Path) -> None:
    frame = (
        spark()
        .range(0, 3000, 1, 3)
        .selectExpr(
            "concat('shop/', id % 7, '/sold') AS key",
            "encode(concat('n', id), 'utf-8') AS payload",
            "IF(id % 2 = 0, map('region', concat('r', id % 3)), NULL) AS headers",
        )
    )

    frame.write.format("zbus").mode("append").save(str(log))

    events = stored(log)
    assert [event.payload for event in events] == [b"n%d" % number for number in range(3000)]
    assert [event.key for event in events] == [f"shop/{number % 7}/sold" for number in range(3000)]
    assert [dict(event.headers) for event in events[:4]] == [{"region": "r0"}, {}, {"region": "r2"}, {}]
    assert [event.sequence for event in events] == list(range(3000))
    assert len({event.publisher_id for event in events}) == 1
    assert left(log) == []
    assert verify(str(log)).problems == []


def test_text_is_marked_as_text_and_one_key_serves_all_rows(log: Path) -> None:
    frame = spark().range(2).selectExpr("concat('größe ', id) AS payload")

    frame.write.format("zbus").option("key", "shop/sizes").mode("append").save(str(log))

    events = stored(log)
    assert [event.decode() for event in events] == ["größe 0", "größe 1"]
    assert {event.key for event in events} == {"shop/sizes"}


def test_a_write_under_a_name_is_done_once_and_one_without_each_time(log: Path) -> None:
    def publish(**options: str) -> None:
        frame = spark().range(10).selectExpr("'a/b' AS key", "cast(id AS string) AS payload")
        frame.write.format("zbus").options(**options).mode("append").save(str(log))

    for _ in range(2):
        publish(sinkId="daily")
    assert len(stored(log)) == 10
    publish(sinkId="weekly")
    assert len(stored(log)) == 20
    for _ in range(2):
        publish()
    assert len(stored(log)) == 40
    assert left(log) == []


def test_subscribers_of_the_node_that_owns_the_log_see_what_spark_writes(log: Path) -> None:
    owned = threading.Event()

    async def node() -> tuple[list[zbus.Event], int]:
        async with zbus.open(log) as bus, bus.subscribe("a/**", overflow="spill") as subscription:
            owned.set()
            seen = [await anext(subscription) for _ in range(5000)]
            return seen, await (await bus.publisher("a/c")).publish(b"mine")

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(asyncio.run, node())
        assert owned.wait(30)
        frame = spark().range(5000).selectExpr("'a/b' AS key", "cast(id AS string) AS payload")
        frame.write.format("zbus").mode("append").save(str(log))
        seen, own = running.result(30)

    assert sorted(int(event.payload) for event in seen) == list(range(5000))
    assert own == 5001
    assert left(log) == []


def test_no_publisher_of_the_owner_waits_long_behind_what_spark_writes(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is 100 ms of the writer's own work, because a busy machine takes longer."""
    owned, ended = threading.Event(), threading.Event()
    commits: list[tuple[int, float]] = []
    commit = Writer._commit

    def measured(self: Writer, appends: list[Any]) -> None:
        began = time.thread_time()
        commit(self, appends)
        commits.append((sum(len(rows) for rows, *_ in appends), time.thread_time() - began))

    async def node() -> list[int]:
        overtaken = []
        async with zbus.open(log) as bus:
            publisher = await bus.publisher("own/one")
            owned.set()
            while not ended.is_set():
                stored = node_of(bus).dispatcher.delivered
                overtaken.append(await publisher.publish(b"x") - stored - 1)
                await asyncio.sleep(0.001)
        return overtaken

    monkeypatch.setattr(Writer, "_commit", measured)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(asyncio.run, node())
        try:
            assert owned.wait(30)
            frame = spark().range(60_000).selectExpr("'a/b' AS key", "repeat('x', 100) AS payload")
            frame.write.format("zbus").mode("append").save(str(log))
        finally:
            ended.set()
        overtaken = running.result(30)

    assert sum(rows for rows, _ in commits) == 60_000 + len(overtaken)
    assert 1000 <= max(rows for rows, _ in commits) <= 3001  # at most three proxied writes, and its own event
    assert max(overtaken) <= 3000
    assert median(took_s for _, took_s in commits) < 0.1  # a single one may meet a disk that is busy


@pytest.mark.nightly  # Sparks of its own
@pytest.mark.timeout(400)
def test_a_killed_query_resumes_and_every_row_is_in_the_log_once(killed: Path) -> None:
    """One JVM is killed with a query at each of three points; see also the test of faults, with all of them."""
    in_the_middle = len(stored(killed / "put" / "app.db"))
    assert LINES + (HELD_CHUNKS - 1) * 1000 <= in_the_middle < 2 * LINES
    assert len(stored(killed / "mark" / "app.db")) == 2 * LINES
    control = killed / "control"
    shutil.copytree(killed / "mark", control, ignore=shutil.ignore_patterns("wake"))

    for point in ("staging", "put", "mark"):
        go_on(spark(), killed / point)
        assert surplus(killed / point) == {}, point
        assert left(killed / point / "app.db") == [], point
        events = stored(killed / point / "app.db")
        assert [event.sequence for event in events] == list(range(len(events)))
        assert len({event.publisher_id for event in events}) == 1
        assert verify(str(killed / point / "app.db")).problems == []

    spark().dataSource.register(ForgetfulSource)
    go_on(spark(), control, "zbus-forgetful")
    assert sum(surplus(control).values()) == LINES, "a sink that forgets has the batch twice: the test can fail"


def test_an_unfinished_commit_is_finished_by_the_next_run_even_if_its_rows_differ(log: Path) -> None:
    write_log(log, [("a/b", b"first")])
    writer, message = write(log, ("a/b", b"1"), ("a/b", b"2"), sinkId="daily")
    connection = raw(log)
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    connection.execute("PRAGMA user_version=99")
    with pytest.raises(LogDamaged):
        writer.commit([message])
    writer.abort([message])  # as Spark does
    connection.execute(f"PRAGMA user_version={version}")
    connection.close()
    assert payloads(log) == [b"first"]

    for _ in range(2):
        writer, message = write(log, ("a/b", b"3"), ("a/b", b"2"), ("a/b", b"1"), sinkId="daily")
        writer.commit([message])

    assert payloads(log) == [b"first", b"1", b"2"]
    assert left(log) == []


def test_of_two_writes_under_one_name_at_the_same_time_one_is_published(log: Path) -> None:
    writes = [write(log, *[("a/b", b"%d" % number)] * 3000, sinkId="daily") for number in range(4)]
    with ThreadPoolExecutor(len(writes)) as pool:
        list(pool.map(lambda each: each[0].commit([each[1]]), writes))

    assert len(stored(log)) == 3000
    assert len(set(payloads(log))) == 1
    assert left(log) == []


def test_a_write_that_fails_midway_reports_that_some_rows_may_be_in_the_log(log: Path) -> None:
    writer, message = write(log, *[("a/b", b"x")] * 5000)
    message.part = message.part._replace(rows=4999)
    with pytest.raises(LogError, match=r"has 5000 rows, but 4999 were staged; earlier rows may be in the log"):
        writer.commit([message])
    writer.abort([message])
    assert left(log) == []


def test_a_write_without_rows_creates_no_log(log: Path) -> None:
    writer = make_writer({"path": str(log)}, columns(KEY_AND_PAYLOAD), False)
    writer.commit([writer.write(iter([]))])
    assert list(log.parent.iterdir()) == []


def test_a_write_that_is_aborted_leaves_nothing(log: Path) -> None:
    writer, message = write(log, ("a/b", b"1"))
    writer.abort([message, None])

    assert not log.exists()
    assert left(log) == []


def test_the_next_write_removes_only_the_files_of_killed_drivers(log: Path, tmp_path: Path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    base = tmp_path / "app.db-staging"
    place, pid, started, _ = run_folder(base).name.split("-")
    dead = base / f"{place}-{int(gone.stdout)}-{started}-0"
    alive, foreign = base / f"{place}-{pid}-{started}-0", base / f"0-{pid}-{started}-0"
    old = base / f"0-{pid}-{started}-1"
    for folder in (dead, alive, foreign, old):
        folder.mkdir(parents=True)
        (folder / "x.arrow").touch()
    for path in (old / "x.arrow", old):
        os.utime(path, (path.stat().st_mtime - ABANDONED_S - 60,) * 2)
    writer, message = write(log, ("a/b", b"1"), sinkId="daily")
    log.write_bytes(b"no log")
    with pytest.raises(LogDamaged):
        writer.commit([message])
    log.unlink()
    begun = Path(message.part.path).parent
    begun = begun.rename(begun.with_name(f"{place}-{int(gone.stdout)}-{started}-1"))
    intent = next(base.glob("*.intent"))
    intent.write_text(intent.read_text().replace(str(Path(message.part.path).parent), str(begun)))

    make_writer({"path": str(log)}, columns(KEY_AND_PAYLOAD), False)

    assert {each.name for each in base.iterdir() if each.is_dir()} == {alive.name, foreign.name, begun.name}


def test_rows_are_staged_in_the_folder_that_is_named(log: Path, tmp_path: Path) -> None:
    writer, message = write(log, ("a/b", b"1"), staging=str(tmp_path / "shared"))
    assert Path(message.part.path).is_relative_to(tmp_path / "shared")
    writer.commit([message])
    assert payloads(log) == [b"1"]
    assert list((tmp_path / "shared").iterdir()) == []

    writer, message = write(log, ("a/b", b"2"), staging=str(tmp_path / "shared"), sinkId="daily")
    shutil.rmtree(tmp_path / "shared")
    with pytest.raises(LogError, match="name a folder that the driver and the executors share"):
        writer.commit([message])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigInvalid, match=r"staging: .*file/.* cannot be written on"):
        write(log, ("a/b", b"3"), staging=str(tmp_path / "file"))
    assert payloads(log) == [b"1"]


def test_a_named_stream_rejects_another_query(log: Path) -> None:
    def commit(query: str, number: int) -> None:
        writer = make_stream_writer({"path": str(log), "sinkId": "s"}, columns(KEY_AND_PAYLOAD), False)
        message: Any = writer.write(iter([batch(("a/b", b"%d" % number))]))
        message.query = query
        try:
            writer.commit([message], number)
        except ZbusError:
            writer.abort([message], number)
            raise

    for number in (0, 1, 1, 2):
        commit("one", number)
    with pytest.raises(ConfigInvalid, match="used for another query"):
        commit("other", 0)
    with pytest.raises(ConfigInvalid, match="has published batch 2, but this is batch 1"):
        commit("one", 1)
    assert payloads(log) == [b"0", b"1", b"2"]
    assert left(log) == []


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        pytest.param({"key": [None, "a/b"]}, "1 rows have no key", id="null-key"),
        pytest.param({"payload": [b"1", None]}, "1 rows have no payload", id="null-payload"),
        pytest.param({"key": ["a/b", "a//b"]}, "a//b", id="bad-key"),
        pytest.param({"key": ["a/b", "a/*"]}, "without wildcards", id="wildcard"),
        pytest.param({"key": ["a/b", "@zbus/log"]}, "reserved", id="system-key"),
        pytest.param({"headers": [[("Bad Name", "x")], None]}, "header name 'Bad Name' rejected", id="header-name"),
        pytest.param({"headers": [[("name", "\n")], None]}, "control characters", id="header-value"),
        pytest.param({"headers": [[("name", None)], None]}, "must be text", id="header-null"),
        pytest.param({"payload": [b"1", b"x" * (8 * 1024 * 1024 + 1)]}, "8,388,609", id="large-payload"),
        pytest.param({"headers": [[("name", "x" * 70_000)], None]}, "65,536", id="large-headers"),
    ],
)
def test_an_invalid_row_is_rejected_and_nothing_stays_staged(rows: dict[str, Any], error: str, tmp_path: Path) -> None:
    types = {"key": pa.string(), "payload": pa.binary(), "headers": pa.map_(pa.string(), pa.string())}
    good = {"key": ["a/b", "a/b"], "payload": [b"1", b"2"], "headers": [None, None]}
    first, second = (
        pa.record_batch([pa.array((good | more)[name], kind) for name, kind in types.items()], list(types))
        for more in ({}, rows)
    )
    folder = tmp_path / "staging" / "run"

    with pytest.raises((EventInvalid, KeyInvalid, EventTooLarge)) as caught:
        stage(folder, [first, second], None, 8 * 1024 * 1024)

    assert error in str(caught.value)
    assert not folder.exists()


def test_text_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    broken = pa.array([b"\xff"], pa.binary()).view(pa.string())
    for names, arrays in ((["key", "payload"], [pa.array(["a/b"]), broken]), (["key", "payload"], [broken, broken])):
        with pytest.raises(EventInvalid, match="not UTF-8"):
            stage(tmp_path / "run", [pa.record_batch(arrays, names)], None, 100)


@pytest.mark.parametrize(
    ("given", "options", "error"),
    [
        pytest.param("key string, payload binary, n int, m int", {}, "not n, m", id="other-columns"),
        pytest.param("key string", {}, "the column `payload` is missing", id="no-payload"),
        pytest.param("payload binary", {}, "the column `key` is missing", id="no-key"),
        pytest.param("key string, payload int", {}, "`payload` is int", id="payload-type"),
        pytest.param("key binary, payload binary", {}, "`key` is binary", id="key-type"),
        pytest.param("key string, payload binary, headers map<string,int>", {}, "`headers` is map<", id="headers-type"),
        pytest.param(KEY_AND_PAYLOAD, {"key": "a/b"}, "also a column `key`", id="two-keys"),
        pytest.param("payload binary", {"key": "a/*"}, "key: ", id="wildcard-option"),
        pytest.param(KEY_AND_PAYLOAD, {"sinkID": ""}, "sinkId: ", id="empty-sink"),
        pytest.param(KEY_AND_PAYLOAD, {"batchsize": "1"}, "batchsize: there is no such option", id="unknown-option"),
        pytest.param(KEY_AND_PAYLOAD, {"path": ""}, "name a log", id="no-path"),
        pytest.param(KEY_AND_PAYLOAD, {"path": "zenoh://h:1"}, "a log file on the driver's host", id="url"),
        pytest.param(KEY_AND_PAYLOAD, {"path": "/nowhere/at/all/app.db"}, "there is no folder", id="no-folder"),
        pytest.param(KEY_AND_PAYLOAD, {"path": "/"}, "is not a file", id="folder"),
    ],
)
@pytest.mark.parametrize("make", [make_writer, make_stream_writer], ids=["batch", "stream"])
def test_columns_and_options_are_checked_before_any_row(
    make: Any, given: str, options: dict[str, str], error: str, log: Path
) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        make({"path": str(log), "checkpointLocation": "x", "queryName": "y"} | options, columns(given), False)
    assert error in str(caught.value)
    assert list(log.parent.iterdir()) == []


def test_a_log_is_not_overwritten(log: Path) -> None:
    for make in (make_writer, make_stream_writer):
        with pytest.raises(ConfigInvalid, match="append-only"):
            make({"path": str(log)}, columns(KEY_AND_PAYLOAD), True)


def test_an_invalid_or_newer_log_is_rejected_before_any_row(log: Path) -> None:
    log.write_text("not a database at all, but long enough to be taken for one" * 20)
    with pytest.raises(LogError):
        make_writer({"path": str(log)}, columns(KEY_AND_PAYLOAD), False)
    log.unlink()
    write_log(log, [("a/b", b"1")])
    connection = raw(log)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(LogDamaged, match="upgrade zbus"):
        make_writer({"path": str(log)}, columns(KEY_AND_PAYLOAD), False)
    assert left(log) == []


@pytest.mark.parametrize("kind", ["batch", "stream"])
def test_an_error_in_spark_is_one_line_and_nothing_is_published(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.txt").write_text("good\n" * 100)
    with pytest.raises(SparkFailed) as caught, spark_errors():
        if kind == "batch":
            frame = spark().range(0, 100, 1, 1).selectExpr("IF(id = 99, 'a/*', 'a/b') AS key", "'x' AS payload")
            folder.mkdir()
            frame.write.format("zbus").mode("append").save(str(folder / "app.db"))
        else:
            frame = spark().readStream.format("text").load(str(tmp_path / "in"))
            writing = frame.selectExpr("'a/*' AS key", "value AS payload").writeStream.format("zbus")
            writing = writing.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
            writing.start(str(folder / "app.db")).awaitTermination()

    assert caught.value.kind == "KeyInvalid"
    assert "without wildcards" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (folder / "app.db").exists()
    assert left(folder / "app.db") == []


def test_an_unwritable_checkpoint_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    folder = tmp_path / "file"
    folder.touch()
    with pytest.raises(SparkFailed) as caught, spark_errors():
        query(spark(), folder).awaitTermination()
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
