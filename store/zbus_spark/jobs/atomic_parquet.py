"""Atomic writes of Parquet folders: a folder exists completely or not at all.

Spark creates the folder before it writes files, so a failed job leaves an empty folder that the next run takes for a
result. Here the files are written to a hidden folder beside it, which Spark's readers ignore, and then renamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession

from zbus.errors import ConfigInvalid


@contextmanager
def parquet(frame: DataFrame, place: str, *, replace: bool = False) -> Iterator[None]:
    """Write a DataFrame, run the body, then rename the folder to `place`. If either fails, no folder is created.

    `place` is a path, or a URI of a file system that Spark knows. Raises `ConfigInvalid` if it exists, unless `replace`
    is True.
    """
    spark = frame.sparkSession
    wanted = _path(spark, place)
    files = wanted.getFileSystem(spark._jsc.hadoopConfiguration())
    _check(files, wanted, place, replace)
    hidden = f".{wanted.getName()}.{uuid4().hex}"
    made, old = (_path(spark, wanted.getParent(), f"{hidden}.{each}") for each in ("new", "old"))
    try:
        frame.write.option("compression", "zstd").parquet(str(made.toString()))
        yield
        _check(files, wanted, place, replace)  # it may have been created since the first check
        there = bool(files.exists(wanted)) and _moved(files, wanted, old)
        try:
            _moved(files, made, wanted)
        except BaseException:
            if there:
                _moved(files, old, wanted)
            raise
    finally:
        for left in (made, old):
            files.delete(left, True)


def _path(spark: SparkSession, *parts: Any) -> Any:
    return spark._jvm.org.apache.hadoop.fs.Path(*parts)  # type: ignore[union-attr]


def _check(files: Any, wanted: Any, place: str, replace: bool) -> None:
    if not replace and files.exists(wanted):
        raise ConfigInvalid("parquet", f"{place!r} already exists: name another folder, or remove it")


def _moved(files: Any, source: Any, target: Any) -> bool:
    if not files.rename(source, target):  # Hadoop returns False without a reason
        raise OSError(f"{source.toString()} cannot be renamed to {target.toString()}")
    return True
