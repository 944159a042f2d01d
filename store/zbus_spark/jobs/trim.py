"""Trim: remove verified offloaded events from the log file, but none that a durable subscription still needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from zbus.errors import ConfigInvalid
from zbus_log import Pruned, Rules, prune
from zbus_log.cold.merge import file_errors
from zbus_log.cold.tier import Cold
from zbus_log.file.manifest import ColdDamaged, ColdFile
from zbus_spark.offsets import before, following

from .offload import check_local
from .sealed_segments import epoch_and_low_water


def trim(log: str | Path, cold: str | Path | None = None, **options: Any) -> Pruned:
    """Remove the events from a log that its cold tier has, through the log's owner if a process owns it.

    Before that, the tier is checked: it must belong to this log and continue at the low-water mark, and each of its
    files must have as many events as the manifest says. Events that a durable subscription has not acknowledged are
    kept; `held_by` is its name. `options` are those of `zbus_log.prune`.
    """
    path, folder = check_local(log, cold)
    epoch, low_water = epoch_and_low_water(path)
    manifest = Cold(folder).manifest()
    if not manifest.epoch:
        raise ConfigInvalid("cold", f"there is no cold tier {str(folder)!r}: offload first")
    manifest.check_epoch(epoch.hex(), folder)
    if not manifest.segments or manifest.last <= low_water:
        return Pruned(low_water, 0, None)
    if before(manifest.first) > low_water:
        reason = f"the tier begins at offset {manifest.first}, but the log begins at {following(low_water)}"
        raise ConfigInvalid("cold", f"{reason}; trimming would lose the events before the tier. Nothing was trimmed")
    for segment in manifest.segments:
        if segment.last > low_water:
            for file in segment.files:
                _check(folder, file)
    return prune(path, Rules(until=manifest.last, offloaded=True), **options)


def _check(folder: Path, file: ColdFile) -> None:
    """Raise `ColdDamaged` if a file is damaged. Its footer is at its end, so a truncated file cannot be read."""
    path = folder / file.path
    with file_errors(path, file):
        rows = pq.read_metadata(path).num_rows
    if rows != file.events:
        reason = f"it has {rows} events, not {file.events}"
        raise ColdDamaged(str(path), reason, (file.first, file.last), "Restore it; nothing was trimmed from the log")
