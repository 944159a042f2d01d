"""`zbus_spark.read`: events of the log and offloaded events as one DataFrame."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from spark_support import spark
from tier_support import NIGHT_NS, SEGMENT_EVENTS, hot, make_log, rows

from zbus.errors import ConfigInvalid, LogDamaged, LogTrimmed
from zbus.keys import KeySet
from zbus_log import Rules, prune
from zbus_log.cold.tier import Cold
from zbus_log.file import sqlite_driver
from zbus_log.file.manifest import ColdDamaged
from zbus_spark.columns import SCHEMA
from zbus_spark.failures import SparkFailed, spark_errors
from zbus_spark.jobs.offload import offload
from zbus_spark.jobs.trim import trim
from zbus_spark.reading import read

EVENTS = 18_000


@pytest.fixture(scope="module")
def trimmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Return a log whose sealed part is only in the tier, and all its rows."""
    log = make_log(tmp_path_factory.mktemp("trimmed") / "app.db", EVENTS)
    before = hot(log)
    offload(spark(), log, segment_events=SEGMENT_EVENTS)
    trim(log)
    return log, before


def test_hot_and_cold_are_one_at_every_stage_of_an_offload(tmp_path: Path) -> None:
    log = make_log(tmp_path / "app.db", EVENTS)
    before = hot(log)

    def same(stage: str) -> None:
        found = read(spark(), log)
        assert [(field.name, field.dataType.typeName()) for field in found.schema] == [
            (field.name, field.dataType.typeName()) for field in SCHEMA
        ], stage
        assert rows(found) == before, stage

    same("nothing offloaded")
    offload(spark(), log, segment_events=SEGMENT_EVENTS, limit_segments=1)
    same("one segment offloaded, nothing trimmed")
    prune(log, Rules(until=3000))
    same("half of that segment trimmed")
    trim(log)
    same("that segment trimmed")
    offload(spark(), log, segment_events=SEGMENT_EVENTS)
    same("another segment offloaded")
    trim(log)
    same("all of them trimmed")
    make_log(log, 10, first=EVENTS)
    assert rows(read(spark(), log))[:EVENTS] == before
    assert read(spark(), log).count() == EVENTS + 10


def night(seconds: float) -> datetime:
    return datetime.fromtimestamp(NIGHT_NS // 1_000_000_000, UTC) + timedelta(seconds=seconds)


WANTED: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "offsets-over-the-seam": ({"start": 16_000, "end": 17_000}, lambda row: 16_000 <= row[0] <= 17_000),
    "offsets-in-the-tier": ({"start": 5, "end": 5}, lambda row: row[0] == 5),
    "offsets-in-the-log": ({"start": 17_001}, lambda row: row[0] >= 17_001),
    "a-literal-key": ({"key": "shop/news"}, lambda row: row[1] == "shop/news"),
    "an-expression": ({"key": "shop/**/created"}, lambda row: row[1] == "shop/orders/created"),
    "several": (
        {"key": ["*/log", "odd=name%/**"], "end": 17_500},
        lambda row: row[1][0] == "o" or row[1] == "audit/log",
    ),
    "none": ({"key": "nowhere/**"}, lambda row: False),
    "times": ({"start": night(2), "end": night(17.5)}, lambda row: NIGHT_NS + 2e9 <= row[8] <= NIGHT_NS + 17.5e9),
    "iso-times": ({"start": "2026-01-01T00:00:00Z"}, lambda row: row[8] >= NIGHT_NS + 10_000_000_000),
}


@pytest.mark.parametrize("name", WANTED)
def test_a_range_and_keys_are_exact_over_the_seam(trimmed: tuple[Path, list[Any]], name: str) -> None:
    log, before = trimmed
    options, wanted = WANTED[name]
    end = options.get("end") if isinstance(options.get("end"), int) else EVENTS

    found = rows(read(spark(), log, **options))

    assert found == [row for row in before if wanted(row) and row[0] <= end]
    assert found or name == "none"


def test_many_keys_are_matched_as_few_are(trimmed: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    log, before = trimmed
    monkeypatch.setattr("zbus_spark.reading.KEYS_LISTED_MAX", 1)

    assert rows(read(spark(), log, key="shop/**")) == [row for row in before if row[1] in KeySet(["shop/**"])]


def test_a_segment_that_the_manifest_does_not_name_is_ignored(trimmed: tuple[Path, list[Any]], tmp_path: Path) -> None:
    log, before = trimmed
    folder = shutil.copytree(f"{log}-cold", tmp_path / "tier [x] {1}")
    left = folder / f"seg={16_384:020}-{20_479:020}"
    shutil.copytree(next(folder.glob("seg=*")), left)
    (left / "date=2026-01-01").mkdir(exist_ok=True)
    (left / "date=2026-01-01" / "half.parquet").write_bytes(b"PAR1")

    assert rows(read(spark(), log, cold=folder)) == before
    assert rows(read(spark(), log, cold=f"file://{folder}", end=10)) == before[:10]


def test_a_gap_between_the_tier_and_the_log_is_an_error_rather_than_fewer_rows(tmp_path: Path) -> None:
    log = make_log(tmp_path / "app.db", EVENTS)
    offload(spark(), log, segment_events=SEGMENT_EVENTS, limit_segments=1)
    prune(log, Rules(until=10_000))

    with pytest.raises(LogTrimmed) as caught:
        read(spark(), log)

    assert (caught.value.after, caught.value.low_water) == (8191, 10_000)
    assert read(spark(), log, end=8191).count() == 8191
    assert read(spark(), log, start=10_001).count() == EVENTS - 10_000
    assert read(spark(), log, failOnDataLoss=False).count() == EVENTS - (10_000 - 8191)


def test_a_trim_after_the_manifest_was_read_is_an_error_rather_than_fewer_rows(tmp_path: Path) -> None:
    log = make_log(tmp_path / "app.db", EVENTS)
    offload(spark(), log, segment_events=SEGMENT_EVENTS, limit_segments=1)
    found = read(spark(), log)
    offload(spark(), log, segment_events=SEGMENT_EVENTS)
    trim(log)

    with pytest.raises(SparkFailed, match="removed by retention"), spark_errors():
        found.count()
    assert read(spark(), log).count() == EVENTS


def test_offsets_from_before_the_tier_are_gone(tmp_path: Path) -> None:
    log = make_log(tmp_path / "app.db", EVENTS)
    prune(log, Rules(until=1000))
    offload(spark(), log, segment_events=SEGMENT_EVENTS, limit_segments=1)

    assert read(spark(), log).count() == EVENTS - 1000
    for options in ({"start": 500}, {"start": 500, "end": 600}):
        with pytest.raises(LogTrimmed):
            read(spark(), log, **options)


def test_an_end_before_all_that_is_left_is_an_error_and_not_an_empty_frame(tmp_path: Path) -> None:
    log = make_log(tmp_path / "app.db", EVENTS)
    prune(log, Rules(until=1000))

    def gone() -> None:
        for end in (1, 1000, night(0.9)):
            with pytest.raises(LogTrimmed) as caught:
                read(spark(), log, end=end)
            assert (caught.value.after, caught.value.low_water) == (0, 1000)
            assert read(spark(), log, end=end, failOnDataLoss=False).count() == 0
        assert [row[0] for row in rows(read(spark(), log, end=1001))] == [1001]
        assert rows(read(spark(), log, end=night(1.1)))[0][0] == 1001

    gone()  # from the log
    offload(spark(), log, segment_events=SEGMENT_EVENTS, limit_segments=1)
    trim(log)
    gone()  # from the log and the tier


def test_a_log_that_cannot_be_read_is_one_clear_error(trimmed: tuple[Path, list[Any]], tmp_path: Path) -> None:
    log, _ = trimmed
    other = make_log(tmp_path / "other.db", 10)
    newer = make_log(tmp_path / "newer.db", 10)
    connection = sqlite_driver.connect(str(newer))
    connection.execute("PRAGMA user_version = 99")
    connection.close()

    with pytest.raises(ConfigInvalid, match="there is no log"):
        read(spark(), tmp_path / "none.db")
    with pytest.raises(LogDamaged, match="upgrade zbus"):
        read(spark(), newer)
    with pytest.raises(ColdDamaged, match="another log"):
        read(spark(), other, cold=f"{log}-cold")
    with pytest.raises(ConfigInvalid, match="no such option"):
        read(spark(), log, rowsPerPartitoin=5)
    with pytest.raises(ConfigInvalid, match="not an ISO time"):
        read(spark(), log, start="yesterday")
    with pytest.raises(Exception, match="rejected"):
        read(spark(), log, key="shop//x")
    assert Cold(f"{log}-cold").last == 16_383
