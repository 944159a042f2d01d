"""Offload: copy sealed segments of a log to Parquet files by date and namespace, where they stay readable.

Each step leaves the tier consistent: segments are written beside it, compared with the log and moved in, and they
count once the manifest names them. If an offload is killed at any point, the next run removes the files that the
manifest does not name and resumes from there. Nothing is removed from the log here; that is a separate step, `trim`.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import SparkSession

from zbus.errors import ConfigInvalid, LogError, LogTrimmed
from zbus.util.renamed import renamed_arguments
from zbus_log.cold.tier import Cold
from zbus_log.file.manifest import ColdDamaged
from zbus_log.file.tables import BLOCK
from zbus_spark.failures import spark_errors

from .sealed_segments import Keep, SealedRange, read_state
from .staged import move_into_tier, verify, write

SEGMENTS_AT_ONCE = 8  # in one job of Spark
SEGMENT_EVENTS_MAX = 1 << 24
_SEGMENT = re.compile(r"seg=\d{20}-\d{20}")
_STAGING = "_staging-"

# Called with the current stage (writing, verifying, moving, listing, done), the offloaded events and all events.
Progress = Callable[[str, int, int], None]


class Offloaded(NamedTuple):
    """The events that an offload added to the tier. `first` and `last` are included; both are 0 if it added nothing."""

    segments: int
    events: int
    first: int
    last: int
    bytes: int


@renamed_arguments(keep_events="max_events", keep_age_s="max_age_s")
def offload(
    spark: SparkSession,
    log: str | Path,
    *,
    cold: str | Path | None = None,
    segment_events: int = 262_144,
    max_events: int = 0,
    max_age_s: float | None = None,
    limit_segments: int | None = None,
    progress: Progress | None = None,
) -> Offloaded:
    """Copy the sealed events of a log that are not in its cold tier yet to the tier, by default `<log>-cold`.

    A log seals blocks of 4,096 offsets. The newest `max_events` events, and those younger than `max_age_s`, are not
    offloaded. `limit_segments` limits the number of segments of this call. The log may be written at the same time.
    """
    path, cold = check_local(log, cold)
    for field, value, least, most in (
        ("segment_events", segment_events, BLOCK, SEGMENT_EVENTS_MAX),
        ("max_events", max_events, 0, 1 << 62),
        ("max_age_s", max_age_s, 0, 1 << 33),
        ("limit_segments", limit_segments, 1, 1 << 31),
    ):
        if value is not None and not least <= value <= most:
            raise ConfigInvalid(field, f"{value} is not between {least:,} and {most:,}")
    keep = Keep(max_events, max_age_s)
    read_state(path, 0, segment_events, keep)  # fail before the folder is created if the log cannot be read
    with _locked(cold):
        tier = Cold(cold)
        state = read_state(path, tier.last, segment_events, keep)
        _check(tier, state.epoch, state.low_water)
        tier.add([], state.epoch)  # a tier with segments but without a manifest counts as damaged
        _remove_leftovers(tier)
        return _offload(spark, path, tier, state.epoch, state.sealed[:limit_segments], progress or _report_nothing)


def check_local(log: str | Path, cold: str | Path | None) -> tuple[str, Path]:
    """Return the log file and the folder of its tier. Raises `ConfigInvalid` if one is not on this machine."""
    for field, value in (("log", log), ("cold", cold)):
        if "://" in str(value):
            raise ConfigInvalid(field, f"{value} is not a path: offload a log on the machine that has its file")
    return str(log), Path(f"{log}-cold" if cold is None else cold).absolute()


def _offload(
    spark: SparkSession, log: str, tier: Cold, epoch: bytes, sealed: list[SealedRange], progress: Progress
) -> Offloaded:
    done, total = Offloaded(0, 0, 0, 0, 0), sum(each.events for each in sealed)
    while len(sealed) > done.segments:
        some = sealed[done.segments : done.segments + SEGMENTS_AT_ONCE]
        size = _move(spark, log, tier, some, epoch, partial(_report, progress, done.events, total))
        events = done.events + sum(each.events for each in some)
        done = Offloaded(done.segments + len(some), events, sealed[0].first, some[-1].last, done.bytes + size)
        progress("done", done.events, total)
    return done


def _report(progress: Progress, done: int, total: int, stage: str) -> None:
    progress(stage, done, total)


def _report_nothing(_stage: str, _done: int, _total: int) -> None:
    pass


def _move(
    spark: SparkSession, log: str, tier: Cold, sealed: list[SealedRange], epoch: bytes, report: Callable[[str], None]
) -> int:
    """Offload some segments, either all or none of them. Returns the size of their files in bytes."""
    staging = tier.folder / f"{_STAGING}{secrets.token_hex(8)}"
    try:
        with spark_errors():
            report("writing")
            written = write(spark, log, sealed, staging)
            report("verifying")
            segments = verify(spark, sealed, staging, written)
        for each in sealed:
            report("moving")
            move_into_tier(tier.folder, staging, each)
        report("listing")
        tier.add(segments, epoch)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return sum(segment.bytes for segment in segments)


def _check(tier: Cold, epoch: bytes, low_water: int) -> None:
    """Raise an error if the tier belongs to another log, or if the log no longer has the events that follow it."""
    manifest = tier.manifest()
    if manifest.epoch:
        manifest.check_epoch(epoch.hex(), tier.path)
    elif any(_SEGMENT.fullmatch(each.name) for each in tier.folder.iterdir()):
        raise ColdDamaged(str(tier.path), "the manifest is missing, but the folder has segments")
    if manifest.segments and low_water > manifest.last:
        error = LogTrimmed(manifest.last, low_water)
        error.add_note("these events were never offloaded, so the tier cannot be continued: offload to another folder")
        raise error


def _remove_leftovers(tier: Cold) -> None:
    """Remove the files of a killed offload. The log still has all their events."""
    listed = {f"seg={each.first:020}-{each.last:020}" for each in tier.segments}
    for each in tier.folder.iterdir():
        if each.name.startswith(_STAGING) or (_SEGMENT.fullmatch(each.name) and each.name not in listed):
            shutil.rmtree(each)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a tier, so that only one process at a time offloads to it. The lock ends with the process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigInvalid("cold", f"{folder} cannot be written: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LogError(f"{folder}: another process offloads to this tier. Nothing was changed") from error
        yield
    finally:
        os.close(descriptor)
