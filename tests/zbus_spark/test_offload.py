"""Offload and trim: sealed events move to Parquet, verified first; none is lost or duplicated."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from log_support import wait_until
from spark_support import spark
from tier_support import KEYS, SEGMENT_EVENTS, damage, in_tier, make_log, replayed

import zbus
from zbus.errors import ConfigInvalid, EventCorrupt, LogDamaged, LogError, LogTrimmed, ZbusError
from zbus_log import Rules, prune
from zbus_log.cold.tier import Cold
from zbus_log.file import sqlite_driver
from zbus_log.file.manifest import ColdDamaged
from zbus_spark.cli import app
from zbus_spark.jobs.offload import Offloaded, offload
from zbus_spark.jobs.trim import trim
from zbus_spark.reading import read

EVENTS = 18_000
CLOSED = 16_383  # the last offset of the last sealed block
CHILD = Path(__file__).parents[1] / "support" / "offload_child.py"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return make_log(tmp_path / "app.db", EVENTS)


@pytest.fixture
def cold(log: Path) -> Path:
    return Path(f"{log}-cold")


async def test_an_offloaded_and_trimmed_log_replays_as_before(log: Path, cold: Path) -> None:
    before = await replayed(log)

    done = offload(spark(), log, segment_events=SEGMENT_EVENTS)

    assert (done.segments, done.events, done.first, done.last) == (2, CLOSED, 1, CLOSED)
    assert await replayed(log) == before
    assert offload(spark(), log, segment_events=SEGMENT_EVENTS) == Offloaded(0, 0, 0, 0, 0)
    trimmed = trim(log)
    assert (trimmed.low_water, trimmed.removed, trimmed.held_by) == (CLOSED, CLOSED, None)
    assert await replayed(log) == before
    assert await replayed(log, "shop/*/paid") == [each for each in before if each[3] == "shop/orders/paid"]
    assert trim(log) == (CLOSED, 0, None)
    make_log(log, 5000, first=EVENTS)
    assert offload(spark(), log, segment_events=SEGMENT_EVENTS)[1:4] == (4096, CLOSED + 1, CLOSED + 4096)
    assert (await replayed(log))[:EVENTS] == before
    assert len(await replayed(log)) == EVENTS + 5000


def test_segments_lie_by_date_and_namespace_in_order_and_compressed(tmp_path: Path) -> None:
    long = "n" * 300
    log = make_log(tmp_path / "app.db", 15_000, keys=(*KEYS, f"{long}/x"))

    offload(spark(), log, segment_events=SEGMENT_EVENTS, max_events=5000)

    (segment,) = Cold(f"{log}-cold").segments
    assert (segment.first, segment.last, segment.events) == (1, 8191, 8191)
    folder = Path(f"{log}-cold") / f"seg={1:020}-{8191:020}"
    spaces = {"shop", "audit", "odd%3Dname%25", "__HIVE_DEFAULT_PARTITION__"}
    assert {each.name for each in folder.glob("date=*/*")} == {f"ns={each}" for each in spaces}
    assert {each.name for each in folder.iterdir()} == {"date=2025-12-31"}
    assert in_tier(Path(f"{log}-cold")) == {folder.name}
    assert sorted(file.path for file in segment.files) == sorted(
        each.relative_to(folder.parent).as_posix() for each in folder.rglob("*") if each.is_file()
    )
    for file in segment.files:
        found = pq.ParquetFile(folder.parent / file.path)
        offsets = found.read(["offset"]).column("offset").to_pylist()
        assert offsets == sorted(offsets)
        assert (len(offsets), offsets[0], offsets[-1]) == (file.events, file.first, file.last)
        assert found.metadata.row_group(0).column(0).compression == "ZSTD"
    assert read(spark(), log, key=f"{long}/*").count() == 2500


def at_verifying(change: Callable[[pa.Table], pa.Table], cold: Path) -> Callable[[str, int, int], None]:
    """Change one staged file after it was written and before it is read back."""

    def reached(stage: str, _done: int, _total: int) -> None:
        if stage == "verifying":
            path = next(cold.glob("_staging-*/seg=*/date=*/ns=shop/*.parquet"))
            path.with_name(f".{path.name}.crc").unlink()
            pq.write_table(change(pq.ParquetFile(path).read()), path)

    return reached


def replace(column: str, value: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(column)
        values = table.column(column).to_pylist()
        values[5] = value
        return table.set_column(at, table.schema.field(column), pa.array(values, table.schema.field(column).type))

    return change


FLIPS: dict[str, Callable[[pa.Table], pa.Table]] = {
    "payload": replace("payload", b"another"),
    "key": replace("key", "shop/orders/others"),
    "header": replace("headers", [("a", "b")]),
    "row-missing": lambda table: table.slice(1),
}


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of which one segment is offloaded, and another is closed."""
    log = make_log(tmp_path_factory.mktemp("half") / "app.db", EVENTS)
    offload(spark(), log, segment_events=SEGMENT_EVENTS, limit_segments=1)
    return log


@pytest.mark.parametrize("flip", FLIPS)
async def test_a_file_that_is_not_what_was_written_never_counts(half: Path, flip: str) -> None:
    log, cold, before = half, Path(f"{half}-cold"), await replayed(half)
    manifest = (cold / "manifest.json").read_bytes()

    with pytest.raises(LogError, match=r"log is unchanged|checksum"):
        offload(spark(), log, segment_events=SEGMENT_EVENTS, progress=at_verifying(FLIPS[flip], cold))

    assert (cold / "manifest.json").read_bytes() == manifest
    assert in_tier(cold) == {f"seg={1:020}-{8191:020}"}
    assert await replayed(log) == before


def misplace(segments: list[Path]) -> None:
    """A file in the folder of the segment before."""
    path = next(segments[2].rglob("*.parquet"))
    target = segments[1] / path.relative_to(segments[2]).with_name("moved.parquet")
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)


def exchange(segments: list[Path]) -> None:
    """Two segments of as many events, each where the other belongs."""
    aside = segments[1].with_name("_aside")
    segments[1].rename(aside)
    segments[2].rename(segments[1])
    aside.rename(segments[2])


def lose_one_and_copy_another(segments: list[Path]) -> None:
    """As many files as there were, and as many events."""
    shutil.rmtree(segments[2])
    shutil.copytree(segments[1], segments[2])


MISPLACED: dict[str, tuple[Callable[[list[Path]], None], str]] = {
    "a-file-in-another-folder": (misplace, "the log has 4096 events from 4096 to 8191, but those in the files differ"),
    "two-exchanged": (exchange, "the log has 4096 events from 4096 to 8191, but those in the files differ"),
    "one-twice": (lose_one_and_copy_another, "the files have 16383 events instead of 16383, or their values differ"),
}


@pytest.mark.parametrize("case", MISPLACED)
def test_events_in_a_segment_that_is_not_theirs_never_count(log: Path, cold: Path, case: str) -> None:
    harm, says = MISPLACED[case]

    def reached(stage: str, _done: int, _total: int) -> None:
        if stage == "verifying":
            harm(sorted(cold.glob("_staging-*/seg=*")))

    with pytest.raises(LogError, match=says):
        offload(spark(), log, segment_events=4096, progress=reached)

    assert (Cold(cold).last, in_tier(cold)) == (0, set())
    assert offload(spark(), log, segment_events=4096).events == CLOSED


def test_an_event_that_is_corrupt_in_the_log_stops_the_offload_and_is_named(log: Path, cold: Path) -> None:
    damage(log, "UPDATE events SET payload = X'00' WHERE offset IN (4711, 9000)")

    with pytest.raises(EventCorrupt) as caught:
        offload(spark(), log, segment_events=SEGMENT_EVENTS)

    assert caught.value.offset == 4711
    assert (Cold(cold).last, in_tier(cold)) == (0, set())
    assert trim(log) == (0, 0, None)


def test_a_second_offload_at_the_same_time_is_rejected(log: Path, cold: Path) -> None:
    refused: list[str] = []

    def reached(stage: str, _done: int, _total: int) -> None:
        if stage == "moving" and not refused:
            with pytest.raises(LogError, match="another process offloads") as caught:
                offload(spark(), log)
            refused.append(str(caught.value))

    offload(spark(), log, segment_events=SEGMENT_EVENTS, progress=reached)

    assert len(refused) == 1
    assert Cold(cold).last == CLOSED


async def test_a_trim_never_passes_a_durable_cursor(log: Path) -> None:
    before = await replayed(log)
    async with zbus.open(log) as bus, bus.subscribe("**", start="beginning", durable="slow") as subscriber:
        for _ in range(5000):
            event = await anext(subscriber)
        await event.ack()
    offload(spark(), log, segment_events=SEGMENT_EVENTS)

    assert trim(log) == (5000, 5000, "slow")

    assert await replayed(log) == before
    async with zbus.open(log) as bus, bus.subscribe("**", durable="slow") as subscriber:
        assert (await anext(subscriber)).offset == 5001


def test_a_trim_checks_the_tier_first(log: Path, cold: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="offload first"):
        trim(log)
    offload(spark(), log, segment_events=SEGMENT_EVENTS, limit_segments=1)
    with pytest.raises(ColdDamaged, match="another log"):
        trim(make_log(tmp_path / "other.db", 10), cold)
    path = next(cold.glob("seg=*/date=*/ns=shop/*.parquet"))
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(ColdDamaged, match="missing"):
        trim(log)
    pq.write_table(pq.read_table(pa.BufferReader(whole)).slice(1), path)
    with pytest.raises(ColdDamaged, match="events, not"):
        trim(log)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ColdDamaged, match="cannot be read"):
        trim(log)
    path.write_bytes(whole)

    assert trim(log).low_water == 8191


async def test_a_log_is_offloaded_and_trimmed_while_it_is_written(log: Path) -> None:
    ended, offsets = threading.Event(), list(range(1, EVENTS + 1))

    async def publish() -> None:
        async with zbus.open(log) as bus:
            publisher = await bus.publisher("live/x")
            while not ended.is_set():
                offsets.extend(await publisher.publish_many([b"live"] * 100))
                await asyncio.sleep(0.02)  # all of it is replayed below

    writing = threading.Thread(target=lambda: asyncio.run(publish()))
    writing.start()
    try:
        wait_until(lambda: len(offsets) > EVENTS)
        done = await asyncio.to_thread(offload, spark(), log, segment_events=SEGMENT_EVENTS)
        trimmed = await asyncio.to_thread(trim, log)  # by the bus that owns the log
    finally:
        ended.set()
        writing.join()

    assert done.last >= CLOSED
    assert trimmed.low_water == done.last
    assert [each[0] for each in await replayed(log)] == offsets


def test_a_tier_that_lost_its_manifest_is_not_overwritten(log: Path, cold: Path) -> None:
    offload(spark(), log, segment_events=SEGMENT_EVENTS)
    there = in_tier(cold)
    (cold / "manifest.json").unlink()

    with pytest.raises(ColdDamaged, match="manifest is missing"):
        offload(spark(), log, segment_events=SEGMENT_EVENTS)
    assert in_tier(cold) == there


def test_a_log_that_cannot_be_offloaded_is_one_clear_error_and_nothing_is_written(
    log: Path, cold: Path, tmp_path: Path
) -> None:
    other = make_log(tmp_path / "other.db", 10)
    newer = make_log(tmp_path / "newer.db", 10)
    connection = sqlite_driver.connect(str(newer))
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    (tmp_path / "file").touch()

    def refused(kind: type[ZbusError], says: str, path: Path, **options: Any) -> None:
        with pytest.raises(kind, match=says):
            offload(spark(), path, **options)
        assert not Path(f"{path}-cold").exists() or path == log

    refused(ConfigInvalid, "there is no log", tmp_path / "none.db")
    refused(LogDamaged, "upgrade zbus", newer)
    refused(ConfigInvalid, "not between", other, segment_events=5)
    refused(ConfigInvalid, "cannot be written", other, cold=tmp_path / "file" / "tier")
    refused(ConfigInvalid, "is not a path", other, cold="s3a://bucket/tier")
    offload(spark(), log, segment_events=SEGMENT_EVENTS, limit_segments=1)
    refused(ColdDamaged, "another log", other, cold=cold)
    prune(log, Rules(until=10_000))
    refused(LogTrimmed, "removed by retention", log)


async def again(log: Path, before: list[Any]) -> None:
    """Offload again after an interrupted offload, and check the tier."""
    cold = Path(f"{log}-cold")
    assert (Cold(cold).last, await replayed(log)) == (0, before)
    assert in_tier(cold)

    offload(spark(), log, segment_events=SEGMENT_EVENTS)
    trim(log)

    assert in_tier(cold) == {f"seg={1:020}-{8191:020}", f"seg={8192:020}-{CLOSED:020}"}
    assert await replayed(log) == before


async def test_an_interrupted_offload_is_repeated_without_losses_or_duplicates(log: Path) -> None:
    """A folder copied during an offload equals what a killed offload leaves: no state is only in memory."""
    before, copies = await replayed(log), []

    def reached(stage: str, _done: int, _total: int) -> None:
        if stage in ("verifying", "moving", "listing"):
            copies.append(log.parent.with_name(f"{log.parent.name}-{len(copies)}"))
            shutil.copytree(log.parent, copies[-1])

    offload(spark(), log, segment_events=SEGMENT_EVENTS, progress=reached)

    assert [len(in_tier(copy / "app.db-cold")) for copy in copies] == [1, 1, 2, 3]
    for copy in copies:
        if copy != copies[1]:  # that is the one before it, verified
            await again(copy / "app.db", before)


@pytest.mark.nightly  # a Spark of its own
@pytest.mark.timeout(400)  # another Spark has to start
async def test_a_killed_offload_is_repeated_without_losses_or_duplicates(log: Path) -> None:
    before = await replayed(log)
    call = [sys.executable, CHILD, log, "listing", "1"]
    done = subprocess.run(call, capture_output=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()

    await again(log, before)


def test_the_commands_report_their_results(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def call(*arguments: str) -> str:
        app(
            ["offload", str(log), *arguments] if arguments[:1] != ("trim",) else ["trim", str(log)],
            standalone_mode=False,
        )
        return capfd.readouterr().err

    assert "offloaded 8,191 events from offset 1 to 8,191: 1 segment" in call(
        "--max-events", "9000", "--master", "local[2]"
    )
    output = call("--trim", "--master", "local[2]")
    assert "offloaded 8,192 events from offset 8,192 to 16,383" in output
    assert "trimmed 16,383 events; the log's file begins after offset 16,383" in output
    assert "trimmed 0 events" in call("trim")
    assert os.fspath(log) not in output
