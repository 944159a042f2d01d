"""Offload: sealed segments of a log move to Parquet files, by date and namespace, and stay readable like the log.

Each step leaves the tier whole: segments are written beside it, compared with the log, moved in, and count once the
manifest names them. Killed at any point, the next run removes what the manifest does not name and goes on from
there. Nothing is removed from the log here; that is `trim`, a step of its own.
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

# Told what is done now (writing, verifying, moving, listing, done), and how many events of how many are offloaded.
Progress = Callable[[str, int, int], None]


class Offloaded(NamedTuple):
    """What an offload added to the tier: its range, both ends included, is 0 to 0 where nothing was sealed."""

    segments: int
    events: int
    first: int
    last: int
    bytes: int


def offload(
    spark: SparkSession,
    log: str | Path,
    *,
    cold: str | Path | None = None,
    segment_events: int = 262_144,
    keep_events: int = 0,
    keep_age_s: float | None = None,
    limit_segments: int | None = None,
    progress: Progress | None = None,
) -> Offloaded:
    """Write what is sealed in a log, and not in its cold tier yet, to the tier: a folder, by default `<log>-cold`.

    Closed are blocks of 4,096 offsets that the log has sealed; the newest `keep_events`, and those younger than
    `keep_age_s`, stay in the log alone. `limit_segments` ends it early. The log may be written meanwhile.
    """
    path, cold = check_local(log, cold)
    for field, value, least, most in (
        ("segment_events", segment_events, BLOCK, SEGMENT_EVENTS_MAX),
        ("keep_events", keep_events, 0, 1 << 62),
        ("keep_age_s", keep_age_s, 0, 1 << 33),
        ("limit_segments", limit_segments, 1, 1 << 31),
    ):
        if value is not None and not least <= value <= most:
            raise ConfigInvalid(field, f"{value} is not between {least:,} and {most:,}")
    keep = Keep(keep_events, keep_age_s)
    read_state(path, 0, segment_events, keep)  # a log that cannot be read makes no folder
    with _locked(cold):
        tier = Cold(cold)
        state = read_state(path, tier.last, segment_events, keep)
        _check(tier, state.epoch, state.low_water)
        tier.add([], state.epoch)  # a tier without a manifest would be one that lost it
        _remove_leftovers(tier)
        return _offload(spark, path, tier, state.epoch, state.sealed[:limit_segments], progress or _report_nothing)


def check_local(log: str | Path, cold: str | Path | None) -> tuple[str, Path]:
    """The log's file and the folder of its tier, both on this machine."""
    for field, value in (("log", log), ("cold", cold)):
        if "://" in str(value):
            raise ConfigInvalid(field, f"{value} is not a path: a log is offloaded where its file is")
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
    """Offload some segments, all or none of them; return how large their files are."""
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
    """The tier is this log's, and the log still has what comes next."""
    manifest = tier.manifest()
    if manifest.epoch:
        manifest.check_epoch(epoch.hex(), tier.path)
    elif any(_SEGMENT.fullmatch(each.name) for each in tier.folder.iterdir()):
        raise ColdDamaged(str(tier.path), "the manifest is missing, and there are segments in this folder")
    if manifest.segments and low_water > manifest.last:
        error = LogTrimmed(manifest.last, low_water)
        error.add_note("they were never offloaded, so the tier cannot be continued: offload to another folder")
        raise error


def _remove_leftovers(tier: Cold) -> None:
    """What an offload that was killed left behind: the log still has all of it."""
    listed = {f"seg={each.first:020}-{each.last:020}" for each in tier.segments}
    for each in tier.folder.iterdir():
        if each.name.startswith(_STAGING) or (_SEGMENT.fullmatch(each.name) and each.name not in listed):
            shutil.rmtree(each)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Only one process at a time offloads to a tier; the lock goes with the process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigInvalid("cold", f"{folder} cannot be written: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LogError(f"{folder}: another process offloads to this tier now. Nothing was changed") from error
        yield
    finally:
        os.close(descriptor)
