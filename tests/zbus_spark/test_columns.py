"""Columns that exist only if they are named: equal to the payload and headers, on every path of a read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pyarrow as pa
import pytest
from mesh_support import reserved_port
from pipeline_support import BEGIN_NS, Stored, frame, plain, store
from pyspark.sql import DataFrame
from spark_support import spark, write_log

from zbus import blocking
from zbus.errors import ConfigInvalid
from zbus.headers import encode_headers
from zbus.keys import KeySet
from zbus.ports.log import Span
from zbus_spark import read, rollup
from zbus_spark.columns import Columns, schema_of
from zbus_spark.jobs.offload import offload
from zbus_spark.jobs.rollup import columns
from zbus_spark.jobs.trim import trim
from zbus_spark.local import batches, plan

NAMED = ("offset", "payload_bytes", "header:trace", "header:odd`.name", "header:nobody-has-it")
OFFSETS = Columns(schema_of(["offset"]))
EVENTS = 9_000  # two blocks that can be offloaded, and some that stay


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Events of all sizes: none of the first has a header, of the others some have one, some two."""
    path = tmp_path_factory.mktemp("columns") / "app.db"
    headers: list[dict[str, str]] = [{}, {"trace": "t1"}, {"trace": "ü", "odd`.name": ""}, {"x": "y"}]
    return store(
        path,
        [
            Stored(1, number, f"a/b/{number % 3}", BEGIN_NS + number, bytes(number % 300), headers[number % 4])
            if number >= 2000
            else Stored(1, number, "a/b/0", BEGIN_NS + number, bytes(number % 300))
            for number in range(EVENTS)
        ],
    )


def looked_at(df: DataFrame) -> list[tuple[Any, ...]]:
    """Return the expected values, from the whole columns."""
    names = [name.removeprefix("header:") for name in NAMED[2:]]
    return [
        (row.offset, len(row.payload), *[row.headers.get(name) for name in names])
        for row in df.select("offset", "payload", "headers").orderBy("offset").collect()
    ]


@contextmanager
def as_file(log: Path) -> Iterator[str]:
    yield str(log)


@contextmanager
def at_a_node(log: Path) -> Iterator[str]:
    with closing(reserved_port()) as kept:
        place = f"127.0.0.1:{kept.getsockname()[1]}"
        with blocking.open(log, mode="peer", listen=[f"tcp/{place}"]):
            yield f"zenoh://{place}"


@contextmanager
def offloaded(log: Path) -> Iterator[str]:
    offload(spark(), log, segment_events=4096)
    trim(log)
    yield str(log)


@pytest.mark.parametrize("way", [as_file, at_a_node, offloaded])
def test_a_size_and_one_header_equal_those_of_payload_and_headers(log: Path, way: Any) -> None:
    with way(log) as path:
        found = read(spark(), path, columns=NAMED)
        found_rows = sorted(map(tuple, found.collect()))
        expected = looked_at(read(spark(), path))

    assert found_rows == expected
    assert [row[0] for row in found_rows] == list(range(1, EVENTS + 1))
    assert {row[2] for row in found_rows} == {None, "t1", "ü"}
    assert {row[3] for row in found_rows} == {None, ""}
    assert found.schema.names == list(NAMED)


def test_they_are_read_without_payloads_and_together_with_whole_columns() -> None:
    assert Columns(schema_of(NAMED)).stored == ["payload_bytes", "headers"]
    assert Columns(schema_of(["payload_bytes"])).stored == ["payload_bytes"]
    rows = pa.record_batch(
        {
            "offset": [1, 2],
            "payload_bytes": [3, 0],
            "payload": [b"abc", b""],
            "headers": [b"", encode_headers({"trace": "7"}, None, None)],
        }
    )

    made = Columns(schema_of(["headers", "header:trace", "payload_bytes", "payload"])).batch(rows, lambda ids: {})

    assert made.to_pydict() == {
        "headers": [[], [("trace", "7")]],
        "header:trace": [None, "7"],
        "payload_bytes": [3, 0],
        "payload": [b"abc", b""],
    }


def test_a_rollup_of_them_is_that_of_the_whole_columns(log_path: Path) -> None:
    events = [
        Stored(1, number, f"a/{number % 5}", BEGIN_NS + number * 10**8, bytes(number % 70), {"began": str(BEGIN_NS)})
        if number % 3
        else Stored(1, number, f"a/{number % 5}", BEGIN_NS + number * 10**8, b"x")
        for number in range(2000)
    ]
    store(log_path, events)

    small = rollup(read(spark(), log_path, columns=columns("began")), latency_header="began")
    other = rollup(read(spark(), log_path, columns=(*columns("nothing"), "headers")), latency_header="began")

    whole = plain(rollup(frame(events), latency_header="began").orderBy("start", "key").collect())
    assert plain(small.orderBy("start", "key").collect()) == whole
    assert plain(other.orderBy("start", "key").collect()) == whole, "the column of another header is not this one's"
    assert sum(row[-1] for row in whole) == 1333


def test_a_stream_has_them_too(log_path: Path, tmp_path: Path) -> None:
    write_log(log_path, [("a/b", b"12345")] * 3, {"trace": "t"})
    stream = spark().readStream.format("zbus").schema(schema_of(NAMED[:3])).load(str(log_path))
    found: list[Any] = []

    query = stream.writeStream.foreachBatch(lambda batch, number: found.extend(map(tuple, batch.collect())))
    query.option("checkpointLocation", str(tmp_path / "at")).trigger(availableNow=True).start().awaitTermination()

    assert sorted(found) == [(1, 5, "t"), (2, 5, "t"), (3, 5, "t")]


@pytest.mark.parametrize("name", ["header:", "header", "payload_size"])
def test_an_unknown_column_is_rejected_with_a_list_of_columns(name: str) -> None:
    with pytest.raises(ConfigInvalid, match=f"no column '{name}'; a log has: offset, .*, payload_bytes, header:NAME"):
        schema_of(["offset", name])


HOLD = """
import sys
from zbus_log.file import sqlite_driver
held = sqlite_driver.connect(sys.argv[1])
held.execute("PRAGMA locking_mode=EXCLUSIVE")
held.execute("BEGIN IMMEDIATE")
held.execute("COMMIT")
print("held", flush=True)
sys.stdin.readline()
"""


def test_reading_waits_while_another_process_locks_the_log(log_path: Path) -> None:
    write_log(log_path, [("a/b", b"x")] * 10)
    span, choice = plan(str(log_path), KeySet.all(), Span())
    command = [sys.executable, "-c", HOLD, str(log_path)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as holder, ThreadPoolExecutor() as pool:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        found = pool.submit(lambda: list(batches(str(log_path), choice, span, OFFSETS, True)))
        with pytest.raises(TimeoutError):
            found.result(0.3)  # it would have failed by now, had it not waited
        holder.stdin.write("end\n")
        holder.stdin.flush()

        assert sum(batch.num_rows for batch in found.result(60)) == 10
