"""The cold tier of a backup, a restored log or a fork: the files up to the cut, and the manifest that names them.

The files of a tier never change once a manifest names them, so a copy that has a file keeps it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from zbus.errors import ConfigInvalid, LogError
from zbus.util.atomic_file import sync
from zbus_log.cold.tier import Cold
from zbus_log.file.manifest import NAME, Manifest, load, save

from .log_copy import Contents


def tier_until(folder: Path, copied: Contents) -> Manifest | None:
    """Return the part of a cold tier that belongs to a copy of its log; None if there is no tier.

    Raises `ColdDamaged` if the tier lacks events that were moved to it: the copy would not have them either.
    Read it after the log was copied: events are in the manifest before they are removed from the log.
    """
    cold = Cold(folder)
    try:
        manifest = cold.manifest()
        cold.check_holds(copied.offloaded_until)
    finally:
        cold.close()
    if manifest.segments:
        manifest.check_epoch(copied.epoch.hex(), cold.path)
    return until_cut(manifest, copied)


def until_cut(manifest: Manifest, copied: Contents) -> Manifest | None:
    """Return the segments up to the cut of a copy; None if there are no segments."""
    across = [each for each in manifest.segments if each.first <= copied.low_water and each.last > copied.cut]
    if across:
        first, last = across[0].first, across[0].last
        raise ConfigInvalid(
            "at",
            f"offset {copied.cut} is inside the segment {first} to {last} of the cold tier, which cannot be divided: "
            f"choose an offset from {last} on",
        )
    kept = tuple(segment for segment in manifest.segments if segment.last <= copied.cut)
    return Manifest(epoch=manifest.epoch, segments=kept) if kept else None


def encode(manifest: Manifest | None) -> bytes:
    """Return a manifest as bytes; empty if there is no tier."""
    return b"" if manifest is None else msgspec.json.encode(manifest)


def decode(path: Path, data: bytes) -> Manifest:
    """Return the manifest from bytes; without segments if there is no tier. Raises `ColdDamaged` with `path` if they
    are invalid.
    """
    return load(path, data) if data else Manifest()


def copy_files(
    manifest: Manifest, source: Path, target: Path, check: Callable[[], None] = lambda: None, *, share: bool = False
) -> None:
    """Copy the files of a manifest that `target` does not have. `share`: link them, if the file system can."""
    folders: dict[Path, None] = {target: None}
    for segment in manifest.segments:
        for file in segment.files:
            check()
            to = target / file.path
            if to.exists():
                continue
            to.parent.mkdir(parents=True, exist_ok=True)
            folders[to.parent] = None
            _copy(source / file.path, to, share)
    for folder in folders:
        if folder.is_dir():
            sync(folder)


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Store the manifest of a tier whose files exist."""
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / NAME, manifest)


def _copy(source: Path, target: Path, share: bool) -> None:
    partial = target.with_name(f".{target.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        if share:
            try:
                target.hardlink_to(source)
                return
            except OSError:
                pass  # another file system, or one without links
        shutil.copyfile(source, partial)
        sync(partial)
        partial.replace(target)
    except FileNotFoundError as error:
        raise LogError(f"{source} is missing, but belongs to the cold tier. Nothing was changed") from error
    finally:
        partial.unlink(missing_ok=True)
