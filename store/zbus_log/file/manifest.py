"""The manifest of a cold tier: the segments of a log that are in Parquet files, and the names of these files.

Only files that the manifest names belong to the tier. The manifest is replaced by a rename, so that
readers see either the old or the new one, even after a crash.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path, PurePosixPath

import msgspec

from zbus.errors import LogDamaged, LogError
from zbus.util.atomic_file import write_atomically
from zbus.util.malformed import MALFORMED

NAME = "manifest.json"
VERSION = 1
_EPOCH_DIGITS = 32


class ColdDamaged(LogDamaged):
    """Raised when a part of the cold tier does not match its manifest. The log's own file is not affected."""

    def __init__(self, path: str, reason: str, missing: tuple[int, int] | None = None, advice: str = "") -> None:
        super().__init__(path, reason, missing, advice or "Restore it from a copy")

    def __str__(self) -> str:
        range_ = f"; affected offsets: {self.missing[0]} to {self.missing[1]}" if self.missing else ""
        return f"{self.path}: {self.reason}{range_}. Nothing was changed. {self.advice}"


class ColdFile(msgspec.Struct, frozen=True):
    """One Parquet file of a segment."""

    path: str  # relative to the tier's folder, with slashes
    events: int
    first: int
    last: int


class Segment(msgspec.Struct, frozen=True):
    """A closed range of offsets, both ends included, and the files that contain its events."""

    first: int
    last: int
    events: int
    digest: str  # computed by the writer; the same digest means the same events
    published_min: int
    published_max: int
    bytes: int
    files: tuple[ColdFile, ...]

    def same(self, other: Segment) -> bool:
        """Return whether both contain the same events, even if in other files."""
        return (self.first, self.last, self.digest) == (other.first, other.last, other.digest)


class Manifest(msgspec.Struct, frozen=True):
    """The consecutive segments of a tier, without gaps, and the epoch of their log."""

    version: int = VERSION
    epoch: str = ""  # hexadecimal; empty if nothing was ever added
    segments: tuple[Segment, ...] = ()

    @property
    def first(self) -> int:
        """The first offset of the tier; 0 for an empty one."""
        return self.segments[0].first if self.segments else 0

    @property
    def last(self) -> int:
        """The last offset of the tier; 0 for an empty one."""
        return self.segments[-1].last if self.segments else 0

    def extended(self, added: Iterable[Segment], path: Path) -> Manifest:
        """Return this manifest with more segments at its end. Segments that it already contains are ignored."""
        segments = list(self.segments)
        known = {segment.first: segment for segment in segments}
        for segment in added:
            if segment.first in known and known[segment.first].same(segment):
                continue
            if segments and segment.first != segments[-1].last + 1:
                raise LogError(
                    f"{path}: the segment {segment.first} to {segment.last} was not added, because the tier covers "
                    f"{segments[0].first} to {segments[-1].last} and only grows at its end"
                )
            segments.append(segment)
            known[segment.first] = segment
        return Manifest(VERSION, self.epoch, tuple(segments))

    def check_epoch(self, epoch: str, path: Path) -> None:
        """Raise `ColdDamaged` if the tier is from another log, whose offsets are other events."""
        if self.epoch != epoch:
            raise ColdDamaged(
                str(path),
                f"the tier belongs to another log, or the log started a new epoch after a loss (the log has {epoch}, "
                f"the tier {self.epoch})",
                (self.first, self.last) if self.segments else None,
                "If its events do belong to this log, adopt it: zbus_log.Cold(folder).adopt(epoch)",
            )


class _Versioned(msgspec.Struct):
    version: int
    checksum: int | None = None  # CRC-32 of the manifest as compact JSON without it; None in files of version 0.1


def load(path: Path, data: bytes) -> Manifest:
    """Decode and check a manifest. Raises `ColdDamaged` with `path` if it is invalid."""
    try:
        read = msgspec.json.decode(data, type=_Versioned)
        version = read.version
        if version > VERSION:
            raise ColdDamaged(
                str(path), f"the tier has version {version}, but this zbus reads up to {VERSION}", advice="Upgrade zbus"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except MALFORMED as error:
        raise ColdDamaged(str(path), f"the manifest is malformed: {error}") from error
    if read.checksum is not None and read.checksum != zlib.crc32(msgspec.json.encode(manifest)):
        raise ColdDamaged(str(path), "the manifest does not match its checksum")
    check(manifest, path)
    return manifest


def check(manifest: Manifest, path: Path) -> None:
    """Raise `ColdDamaged` unless the segments are consecutive and contain their files."""
    problem = _problem(manifest)
    if problem:
        raise ColdDamaged(str(path), problem)


def save(path: Path, manifest: Manifest) -> None:
    """Replace the manifest atomically. Returns once it is on disk."""
    check(manifest, path)
    compact = msgspec.json.encode(manifest)
    data = msgspec.json.format(compact[:-1] + b',"checksum":%d}' % zlib.crc32(compact), indent=1)
    write_atomically(path, data, path.with_name(f".{NAME}.{os.getpid()}"), durable=True)


def _problem(manifest: Manifest) -> str:
    if len(manifest.epoch) != _EPOCH_DIGITS or set(manifest.epoch) - set("0123456789abcdef"):
        return f"the epoch {manifest.epoch!r} is malformed"
    for before, after in pairwise(manifest.segments):
        if after.first != before.last + 1:
            return f"the segment from {after.first} does not follow the one that ends at {before.last}"
    for segment in manifest.segments:
        name = f"the segment {segment.first} to {segment.last}"
        if not 0 < segment.first <= segment.last:
            return f"{name} is not a range of offsets"
        if sum(file.events for file in segment.files) != segment.events:
            return f"{name} has {segment.events} events, but its files contain a different number"
        for file in segment.files:
            pure = PurePosixPath(file.path)
            if pure.is_absolute() or not pure.parts or ".." in pure.parts or "\\" in file.path or "\0" in file.path:
                return f"the file {file.path!r} is outside the tier's folder"
            if not segment.first <= file.first <= file.last <= segment.last or file.events < 1:
                return f"the offsets of the file {file.path!r} are not within {name}"
    return ""
