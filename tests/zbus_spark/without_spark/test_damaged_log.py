"""Every part of zbus_spark that opens the file of a log refuses one that lacks events."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from backup_support import fill, make_log
from pyspark.sql.types import BinaryType, StructType

from zbus.errors import LogDamaged
from zbus_log import SqliteLog
from zbus_spark import local
from zbus_spark.jobs.backfill import _epoch
from zbus_spark.jobs.sealed_segments import epoch_and_low_water
from zbus_spark.options import ReadOptions
from zbus_spark.reading import _identify
from zbus_spark.sink import make_writer

READERS: dict[str, Callable[[str], object]] = {
    "source": local.bounds,
    "read": lambda path: _identify(ReadOptions.parse({"path": path})),
    "backfill": _epoch,
    "offload": epoch_and_low_water,
    "sink": lambda path: make_writer({"path": path, "key": "a/b"}, StructType().add("payload", BinaryType()), False),
}


@pytest.fixture(params=READERS)
def use(request: pytest.FixtureRequest) -> Callable[[str], object]:
    return READERS[request.param]


def test_a_torn_copy_of_a_log_in_use_is_refused(use: Callable[[str], object], tmp_path: Path) -> None:
    path, torn = tmp_path / "app.db", tmp_path / "copy.db"
    make_log(path, 5_000)
    log = SqliteLog(str(path))
    try:
        for side in ("", "-head"):
            shutil.copyfile(f"{path}{side}", f"{torn}{side}")
    finally:
        log.close(10.0)
    with torn.open("r+b") as file:
        file.seek(8192 * 20)
        file.write(bytes(8192))

    with pytest.raises(LogDamaged, match="made while that was in use, and is not complete"):
        use(str(torn))


def test_a_log_without_its_newest_events_is_refused(use: Callable[[str], object], tmp_path: Path) -> None:
    path, older = tmp_path / "app.db", tmp_path / "older.db"
    make_log(path, 10)
    shutil.copyfile(path, older)
    log = SqliteLog(str(path))
    fill(log, 40)
    log.close(10.0)
    shutil.copyfile(older, path)

    with pytest.raises(LogDamaged, match="the log ends at offset 10, but 50 was acknowledged"):
        use(str(path))
