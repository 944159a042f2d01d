"""Trim: what the cold tier has for certain is removed from the log's file. Nothing else is, and no reader's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from zbus.errors import ConfigInvalid
from zbus_log import Pruned, Rules, prune
from zbus_log.cold.merge import file_errors
from zbus_log.cold.tier import Cold
from zbus_log.file.manifest import ColdDamaged, ColdFile

from .offload import check_local
from .sealed_segments import epoch_and_low_water


def trim(log: str | Path, cold: str | Path | None = None, **options: Any) -> Pruned:
    """Remove from a log what its cold tier holds; through its owner, if a process owns it.

    First the tier is looked at: that it is this log's, goes on where the log was trimmed before, and that each file
    of it is there with as many events as the manifest says. A durable name that has not acknowledged an event yet
    holds it back; `held_by` says which. `options` are those of `zbus_log.prune`.
    """
    path, folder = check_local(log, cold)
    epoch, low_water = epoch_and_low_water(path)
    manifest = Cold(folder).manifest()
    if not manifest.epoch:
        raise ConfigInvalid("cold", f"there is no tier {str(folder)!r}: offload first")
    manifest.check_epoch(epoch.hex(), folder)
    if not manifest.segments or manifest.last <= low_water:
        return Pruned(low_water, 0, None)
    if manifest.first > low_water + 1:
        reason = f"the tier begins at offset {manifest.first}, and the log has events from {low_water + 1} on"
        raise ConfigInvalid("cold", f"{reason}; trimming would lose those before it. Nothing was trimmed")
    for segment in manifest.segments:
        if segment.last > low_water:
            for file in segment.files:
                _check(folder, file)
    return prune(path, Rules(upto=manifest.last), **options)


def _check(folder: Path, file: ColdFile) -> None:
    """The footer is at the end of a file: where it is right, the file is not cut short."""
    path = folder / file.path
    with file_errors(path, file):
        rows = pq.read_metadata(path).num_rows
    if rows != file.events:
        reason = f"it holds {rows} events, not {file.events}"
        raise ColdDamaged(str(path), reason, (file.first, file.last), "Restore it; nothing was trimmed from the log")
