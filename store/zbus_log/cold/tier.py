"""The cold tier: closed segments of a log, moved from its file to Parquet, and still readable as part of the log.

The tier is a folder of files and a manifest that names the valid ones. It is read with pyarrow,
which is imported only then; Spark is not needed. Any number of threads and processes can read it
while another one adds segments.
"""

from __future__ import annotations

import logging
import struct
import threading
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbus.errors import ConfigInvalid, EventCorrupt, LogError, LogTrimmed
from zbus.event import Event
from zbus.headers import decode_headers
from zbus.keys import KeySet
from zbus.observe.records import record_reason
from zbus.ports.log import Span
from zbus.util.memo import Memo
from zbus.wire.provenance import split_headers
from zbus_log.file.checksum import checksum, key_number, pack_numbers
from zbus_log.file.manifest import NAME, ColdDamaged, Manifest, Segment, load, save

from .merge import Merge

if TYPE_CHECKING:
    from zbus.ports.log import Page

MERGES_KEPT_MAX = 8  # for replays that resume where they stopped; each holds some megabytes

_EVERYTHING = KeySet.all()


class Cold:
    """The cold tier in `folder`, which need not exist yet. Thread-safe."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / NAME
        self._manifest = Manifest()
        self._seen: tuple[int, int, int] | None = None  # the state of the manifest's file when it was read
        self._merges = Memo[tuple[Any, ...], Merge](MERGES_KEPT_MAX, on_evict=lambda _, merge: merge.close())
        self._lock = threading.Lock()
        self._closed = False

    def manifest(self) -> Manifest:
        """Return the current manifest. Reads the file only if it has changed."""
        with self._lock:
            try:
                stat = self.path.stat()
                seen = stat.st_mtime_ns, stat.st_size, stat.st_ino
                if seen != self._seen:
                    self._manifest, self._seen = load(self.path, self.path.read_bytes()), seen
            except (FileNotFoundError, NotADirectoryError) as error:
                if self._seen is not None:
                    gone = self._manifest.first, self._manifest.last
                    raise ColdDamaged(str(self.path), "the manifest was removed", gone) from error
            except OSError as error:
                raise ColdDamaged(str(self.path), f"the manifest cannot be read: {error}") from error
            return self._manifest

    def check_holds(self, offloaded_until: int) -> None:
        """Raise `ColdDamaged` if the tier does not reach the offset up to which the log's events were moved to it."""
        check_holds(self.manifest(), str(self.folder), offloaded_until)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the tier, in order and without gaps."""
        return self.manifest().segments

    @property
    def first(self) -> int:
        """The first offset that the tier covers; 0 for an empty one."""
        return self.manifest().first

    @property
    def last(self) -> int:
        """The last offset that the tier covers; 0 for an empty one."""
        return self.manifest().last

    def add(self, segments: Iterable[Segment], epoch: bytes | None = None) -> None:
        """Add segments at the end. Segments that the tier already contains are ignored.

        `epoch` is that of their log: an empty tier requires it, and otherwise it must match. Either all segments are
        added or none. Only one process may add segments at a time.
        """
        manifest = self.manifest()
        if epoch is not None and manifest.epoch:
            manifest.check_epoch(epoch.hex(), self.path)
        elif epoch is None and not manifest.epoch:
            raise ConfigInvalid("epoch", "an empty tier requires the epoch of its log")
        known = epoch.hex() if epoch is not None else manifest.epoch
        extended = Manifest(epoch=known, segments=manifest.segments).extended(segments, self.path)
        if extended != manifest:
            self._save(extended)

    def adopt(self, epoch: bytes) -> None:
        """Assign this tier to the log with this epoch. The caller must know that its events belong to that log."""
        manifest = self.manifest()
        if not manifest.epoch:
            raise ConfigInvalid("cold", f"there is no tier {str(self.folder)!r} to adopt")
        self._save(Manifest(epoch=epoch.hex(), segments=manifest.segments))

    def follow(self, before: bytes, epoch: bytes, head: int) -> None:
        """Move the tier to the new epoch of a log that lost its newest events, unless it contains lost offsets."""
        try:
            manifest = self.manifest()
            if manifest.epoch == before.hex() and manifest.last <= head:
                self.adopt(epoch)
        except (LogError, OSError) as error:  # the log still opens; reading the tier raises the error
            folder, reason = str(self.folder), str(error)
            record_reason(
                "LOG_COLD_LEFT_BEHIND", logging.WARNING, code="cold_tier_not_adopted", reason=reason, folder=folder
            )

    def read(self, keys: KeySet, span: Span, limit: int) -> ColdPage:
        """Return the next events of a span, in order, up to the end of the tier."""
        manifest = self.manifest()
        low_water = max(0, manifest.first - 1)
        if span.after < low_water:
            if span.after:
                raise LogTrimmed(span.after, low_water)
            span = span._replace(after=low_water)
        until = manifest.last if span.until is None else min(span.until, manifest.last)
        after, at = span.after, bisect_left(manifest.segments, span.after + 1, key=lambda each: each.last)
        while after < until:
            segment = manifest.segments[at]
            if _may_hold(segment, span):
                batches, covered = self._next(segment, keys, span._replace(after=after), limit, until)
                if batches or covered < segment.last or covered >= until:
                    return ColdPage(batches, covered, low_water)
            after, at = min(segment.last, until), at + 1
        return ColdPage([], after, low_water)

    def first_at(self, time_ns: int, after: int) -> int | None:
        """Return the lowest offset after `after` that was published at or after a time, or None."""
        manifest = self.manifest()
        after = max(after, manifest.first - 1)
        while after < manifest.last:
            page = self.read(_EVERYTHING, Span(after, None, time_ns), 1)
            if page.batches:
                return int(page.batches[0].column("offset")[0].as_py())
            after = page.covered
        return None

    def last_at(self, time_ns: int) -> int:
        """Return an offset after which no event of the tier was published at or before a time."""
        return max((each.last for each in self.segments if each.files and each.published_min <= time_ns), default=-1)

    def close(self) -> None:
        """Close the files. Calling it again has no effect."""
        with self._lock:
            self._closed = True
            merges = list(self._merges.values())
            self._merges.clear()
        for merge in merges:
            merge.close()

    def _save(self, manifest: Manifest) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        save(self.path, manifest)

    def _next(self, segment: Segment, keys: KeySet, span: Span, limit: int, until: int) -> tuple[list[Any], int]:
        """Return the next batches of a segment, from a merge that stopped there or from a new one."""
        request = segment.first, segment.digest, keys.expressions, keys.unfiltered, span.from_ns, span.to_ns
        with self._lock:
            merge = self._merges.pop((*request, span.after), None)
        if merge is None:
            merge = Merge(self.folder, segment, keys, span)
        try:
            batches, covered = merge.take(limit, until)
        except BaseException:
            merge.close()
            raise
        with self._lock:
            done: Merge | None = merge
            if covered < segment.last and not self._closed:
                done = self._merges.pop((*request, covered), None)  # another replay stopped at the same offset
                self._merges[*request, covered] = merge
        if done is not None:
            done.close()
        return batches, covered


def check_holds(manifest: Manifest, folder: str, offloaded_until: int) -> None:
    """Raise `ColdDamaged` if a tier does not reach the offset up to which the log's events were moved to it."""
    if manifest.last >= offloaded_until:
        return
    found = f"the cold tier ends at offset {manifest.last}" if manifest.segments else "the cold tier is missing"
    raise ColdDamaged(
        folder,
        f"{found}, but the log's events up to offset {offloaded_until} were moved to it",
        (manifest.last + 1, offloaded_until),
        "Restore the folder, or name the one to which it was moved (cold_dir, or --cold). To continue without its "
        "events, open the log once with accept_loss=True",
    )


class ColdPage:
    """A page of the tier, as Arrow batches. `events` decodes it, on the caller's thread."""

    def __init__(self, batches: list[Any], covered: int, low_water: int) -> None:
        self.batches, self.covered, self.low_water = batches, covered, low_water

    def events(self, skip_corrupt: bool = False) -> tuple[list[Event], LogError | None, int]:
        """Return the events of this page in order, each verified by the checksum from the log."""
        found: list[Event] = []
        skipped = 0
        for batch in self.batches:
            columns = {name: batch.column(name) for name in batch.schema.names}
            keys = columns["key"].dictionary_encode()
            names = keys.dictionary.to_pylist()
            numbers = (columns[name].to_pylist() for name in _NUMBERS)
            rows = zip(
                *numbers,
                keys.indices.to_pylist(),
                columns["payload"].to_pylist(),
                columns["headers_raw"].to_pylist(),
                strict=True,
            )
            key_numbers = [None if name is None else key_number(name) for name in names]
            for offset, publisher, sequence, published_at, key_id, stored, name, payload, encoded in rows:
                try:
                    numbers_ = offset, publisher, sequence, published_at
                    good = checksum(pack_numbers(*numbers_, key_numbers[name]), encoded, payload) == stored
                    if not good:  # version 0.1 stored it
                        good = checksum(pack_numbers(*numbers_, key_id), encoded, payload) == stored
                except (struct.error, TypeError):  # a value is null
                    good = False
                if not good:
                    if not skip_corrupt:
                        return found, EventCorrupt(offset, "its checksum does not match"), skipped
                    skipped += 1
                    continue
                headers, provenance = split_headers(encoded) if encoded else (None, None)
                identity = (publisher, sequence, published_at, names[name], payload)
                found.append(Event(*identity, decode_headers(headers), offset, provenance))
        return found, None, skipped


_NUMBERS = ("offset", "publisher_id", "sequence", "published_ns", "key_id", "checksum")


def _may_hold(segment: Segment, span: Span) -> bool:
    """Return whether a segment can contain an event of these times."""
    if span.from_ns is not None and segment.published_max < span.from_ns:
        return False
    return bool(segment.files) and (span.to_ns is None or segment.published_min <= span.to_ns)


if TYPE_CHECKING:
    _page: type[Page] = ColdPage
