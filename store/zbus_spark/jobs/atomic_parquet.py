"""A folder of Parquet that is there whole, or not at all.

Spark makes the folder first and fills it then, so a job that fails leaves an empty one, which the next run takes for
a result. Here it is written under a hidden name beside its place, which no reader of Spark looks at, and renamed.
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
    """Write a DataFrame, do what is within this, then put the folder in its place: if either fails, nothing is there.

    `place` is a path or a URI of a file system that Spark knows. Raises `ConfigInvalid` where something is there
    already, unless that is to be replaced.
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
        _check(files, wanted, place, replace)  # whoever came meanwhile keeps what is theirs
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
    if not files.rename(source, target):  # Hadoop says no rather than why
        raise OSError(f"{source.toString()} cannot be renamed to {target.toString()}")
    return True
