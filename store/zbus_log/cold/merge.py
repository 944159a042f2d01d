"""Merge of the files of one cold segment: its events in the order of their offsets, in bounded memory.

A segment has several files, one or more for each date and namespace. Each file is in order, but
their offsets interleave. The merge holds a slice of each file. Events up to the first end of any
slice are complete: they are sorted and returned, and that slice is replaced by the next one of its
file. Memory depends only on the slices, however large segments and row groups are.
"""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from zbus.errors import ConfigInvalid
from zbus.keys import KeySet, matches
from zbus.ports.log import Span
from zbus_log.file.manifest import ColdDamaged, ColdFile, Segment

# The columns of an event. The files also contain the headers as a map, which only Spark uses.
COLUMNS = (
    "offset",
    "publisher_id",
    "sequence",
    "published_ns",
    "key_id",
    "checksum",
    "key",
    "payload",
    "headers_raw",
)
_TYPES = dict.fromkeys(COLUMNS[:6], "int64") | {"key": "string", "payload": "binary", "headers_raw": "binary"}

NO_NAMESPACE = "__HIVE_DEFAULT_PARTITION__"  # Spark's name; namespaces that are too long for a folder are here

HELD_ROWS = 32 * 1024  # in all slices of a segment together
SLICE_ROWS_MIN = 512  # at least, in each slice
HELD_BYTES = 8 * 1024 * 1024  # in all slices of a segment together, for large events
SCAN_ROWS = 64 * 1024  # per call, if few of them match
BUFFER_BYTES = 64 * 1024


def pyarrow(module: str = "pyarrow") -> Any:
    """Import a module of pyarrow, when the tier is read for the first time. Raises `ConfigInvalid` if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        reason = "reading the cold tier needs pyarrow: pip install 'pyarrow>=20'"
        raise ConfigInvalid("cold", reason) from error


class Merge:
    """The events of a segment that match some keys and times, after an offset. Not thread-safe."""

    def __init__(self, folder: Path, segment: Segment, keys: KeySet, span: Span) -> None:
        self._folder, self._segment, self._keys, self._span = folder, segment, keys, span
        self.at = span.after  # all matching events up to this offset have been returned
        files = [file for file in segment.files if file.last > span.after and may_match(file.path, keys)]
        self._waiting = sorted(files, key=lambda file: -file.first)  # files not opened yet, the next one last
        self._held: list[_Slices] = []
        self._share = max(1, len(files))
        self._run: Any = None  # the merged rows that have not been returned yet
        self._reach = span.after  # the last offset that the run covers

    def take(self, limit: int, until: int) -> tuple[list[Any], int]:
        """Return the next batches, at most `limit` events, and the offset up to which they are complete."""
        found: list[Any] = []
        until = min(until, self._segment.last)
        scanned = size = 0
        while True:
            if self._run is not None:
                ready = _up_to(self._run, until)
                pages = -(-ready.num_rows // limit) or 1  # pages of equal size, rather than a small last one
                batch = ready.slice(0, -(-ready.num_rows // pages))
                if batch.num_rows:
                    self._run = self._run.slice(batch.num_rows)
                    found.append(batch)
                    limit, size = limit - batch.num_rows, size + batch.nbytes
                if batch.num_rows < ready.num_rows:
                    self.at = _offset(batch, -1)
                    return found, self.at
            self.at = min(self._reach, until)
            if self.at >= until or limit < 1 or scanned >= SCAN_ROWS or size >= HELD_BYTES:
                return found, self.at
            scanned += self._advance()

    def close(self) -> None:
        """Close the files."""
        for slices in self._held:
            slices.close()
        self._held, self._waiting, self._run = [], [], None

    def _advance(self) -> int:
        """Merge the next run. Returns the number of rows read for it."""
        read = 0
        while True:
            reach = min((each.end for each in self._held if each.more), default=self._segment.last)
            if not self._waiting or self._waiting[-1].first > reach:
                break
            start = self._waiting[-1].first
            if start > self._reach + 1 and sum(each.rows for each in self._held) >= HELD_ROWS:
                reach = start - 1
                break
            self._held.append(_Slices(self._folder, self._waiting.pop(), self._keys, self._span, self._share))
            read += self._held[-1].load()
        parts = [part for each in self._held if (part := each.take(reach)).num_rows]
        for each in self._held:
            if each.more and each.end <= reach:
                read += each.load()
        self._held = [each for each in self._held if each.more or each.rows]
        self._run, self._reach = _merged(parts), reach
        return read


class _Slices:
    """One file, slice by slice. Only the rows that match are kept."""

    def __init__(self, folder: Path, file: ColdFile, keys: KeySet, span: Span, share: int) -> None:
        self._path, self._file, self._keys, self._span = folder / file.path, file, keys, span
        self._batch: Any = None
        self.end = 0  # the last offset of the slice
        parquet = pyarrow("pyarrow.parquet")
        with file_errors(self._path, file):
            self._parquet = parquet.ParquetFile(
                self._path, buffer_size=BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
            )
            self._check()
            metadata = self._parquet.metadata
            groups = [metadata.row_group(each) for each in range(metadata.num_row_groups)]
            self._left: int = sum(group.num_rows for group in groups)
            wanted = []
            for number, group in enumerate(groups):
                if _last_of(group) > span.after:
                    wanted.append(number)
                else:
                    self._left -= group.num_rows
            size = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=1)
            rows = min(max(SLICE_ROWS_MIN, HELD_ROWS // share), max(1, HELD_BYTES // share // max(1, size)))
            self._batches = self._parquet.iter_batches(
                batch_size=rows, row_groups=wanted, columns=list(COLUMNS), use_threads=False
            )

    @property
    def more(self) -> bool:
        """Whether the file continues after this slice."""
        return self._left > 0

    @property
    def rows(self) -> int:
        """The number of rows of this slice that are held."""
        return int(self._batch.num_rows)

    def load(self) -> int:
        """Load the next slice. Returns its number of rows before filtering."""
        with file_errors(self._path, self._file):
            batch = next((batch for batch in self._batches if batch.num_rows), None)
        if batch is None:
            raise _damaged(self._path, self._file, "it ends early")
        self._left -= batch.num_rows
        compute = pyarrow("pyarrow.compute")
        offsets = batch.column("offset")
        rising = compute.all(compute.less(offsets[:-1], offsets[1:])).as_py() is not False and not offsets.null_count
        if not rising or _offset(batch, 0) <= self.end or not self._file.first <= _offset(batch, 0):
            raise _damaged(self._path, self._file, "its offsets are not in order")
        self.end = _offset(batch, -1)
        if self.end > self._file.last:
            raise _damaged(self._path, self._file, f"it contains offset {self.end}, which is not in its manifest")
        read = int(batch.num_rows)
        self._batch = self._filtered(batch)
        if not self.more:
            self.close()
        return read

    def take(self, reach: int) -> Any:
        """Remove and return the rows up to an offset."""
        taken = _up_to(self._batch, reach)
        self._batch = self._batch.slice(taken.num_rows)
        return taken

    def close(self) -> None:
        """Close the file."""
        self._parquet.close()

    def _check(self) -> None:
        schema = self._parquet.schema_arrow
        for name, type_ in _TYPES.items():
            found = schema.field(name).type if name in schema.names else "missing"
            if str(found) != type_:
                raise _damaged(self._path, self._file, f"its column {name!r} is {found}, not {type_}")
        if self._parquet.metadata.num_rows != self._file.events:
            reason = f"it contains {self._parquet.metadata.num_rows} events, not {self._file.events}"
            raise _damaged(self._path, self._file, reason)

    def _filtered(self, batch: Any) -> Any:
        """Return the rows that match. Each key is matched once, not for each row."""
        arrow, compute, span = pyarrow(), pyarrow("pyarrow.compute"), self._span
        batch = batch.slice(bisect_right(_Offsets(batch), span.after))
        if span.from_ns is not None:
            batch = batch.filter(compute.greater_equal(batch.column("published_ns"), span.from_ns))
        if span.to_ns is not None:
            batch = batch.filter(compute.less_equal(batch.column("published_ns"), span.to_ns))
        if self._keys.unfiltered:
            return batch
        encoded = batch.column("key").dictionary_encode()
        wanted = [name in self._keys for name in encoded.dictionary.to_pylist()]
        if all(wanted):
            return batch
        return batch.filter(arrow.array(wanted, arrow.bool_()).take(encoded.indices))


def may_match(path: str, keys: KeySet) -> bool:
    """Return whether a file of the tier can contain some of `keys`, by the namespace in its path."""
    names = [part[3:] for part in path.split("/") if part.startswith("ns=")]
    if keys.unfiltered or not names:
        return True
    if names[-1] == NO_NAMESPACE:
        return True
    namespace = unquote(names[-1])
    firsts = {expression.partition("/")[0] for expression in keys.expressions}
    return any(first == "**" or matches(first, namespace) for first in firsts)


@contextmanager
def file_errors(path: Path, file: ColdFile) -> Iterator[None]:
    """Map the errors of Arrow to `ColdDamaged`."""
    arrow = pyarrow()
    try:
        yield
    except FileNotFoundError as error:
        raise _damaged(path, file, "the file is missing") from error
    except (OSError, arrow.ArrowException) as error:
        raise _damaged(path, file, f"it cannot be read: {str(error).splitlines()[0]}") from error


def _damaged(path: Path, file: ColdFile, reason: str) -> ColdDamaged:
    advice = f"Restore the file from a copy; read the events that follow it with after={file.last}"
    return ColdDamaged(str(path), reason, (file.first, file.last), advice)


def _last_of(group: Any) -> int:
    """Return the highest offset of a row group, or 1 << 63 if it has no statistics."""
    for number in range(group.num_columns):
        column = group.column(number)
        if column.path_in_schema == "offset" and column.is_stats_set and column.statistics.has_min_max:
            return int(column.statistics.max)
    return 1 << 63


def _merged(parts: list[Any]) -> Any:
    if len(parts) < 2:
        return parts[0] if parts else None
    arrow = pyarrow()
    batch = arrow.concat_batches(parts)
    return batch.take(pyarrow("pyarrow.compute").sort_indices(batch.column("offset")))


class _Offsets:
    """The offsets of a batch as a sequence for `bisect`."""

    def __init__(self, batch: Any) -> None:
        self._column = batch.column("offset")

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: int) -> int:
        return int(self._column[index].as_py())


def _offset(batch: Any, index: int) -> int:
    return int(batch.column("offset")[index].as_py())


def _up_to(batch: Any, until: int) -> Any:
    """Return the rows up to an offset."""
    if not batch.num_rows or _offset(batch, -1) <= until:
        return batch
    return batch.slice(0, bisect_right(_Offsets(batch), until))
