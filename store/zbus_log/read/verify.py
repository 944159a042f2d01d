"""Full verification of a log: its tables, every checksum and offset, its lineage, and the files beside it.

Each block is read in one snapshot, with what the index says about it, so that an owner may write at the same time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection

from zbus.errors import ConfigInvalid, LogDamaged, LogError, ZbusError
from zbus.keys import KeySet
from zbus.ports.log import Span
from zbus_log.cold.tier import Cold
from zbus_log.file.block_index import UNPROVABLE, BlockRow, block_rows, index_checksum
from zbus_log.file.chain import check_block
from zbus_log.file.database import make_engine, reading_errors, snapshot
from zbus_log.file.event_view import CREATE_VIEW, VIEW
from zbus_log.file.head_record import Head, read_record
from zbus_log.file.incarnations import read_lineage
from zbus_log.file.key_table import KeyTable
from zbus_log.file.old_folder import OldFolder
from zbus_log.file.removed import Removed, gaps_between, rows_between
from zbus_log.file.rows import PAGE, check_rows, for_old_file
from zbus_log.file.tables import (
    BLOCK,
    LINEAGE_SINCE,
    VIEW_SINCE,
    State,
    check_is_log,
    file_version,
    get_head,
    get_state,
)

from .comparison import find_loss

PAGE_BYTES = 16 * 1024 * 1024

_CHOSEN = "SELECT * FROM events WHERE offset BETWEEN :first AND :last ORDER BY offset LIMIT :limit"
_PAGE = PAGE.format(chosen=_CHOSEN)
_BY_KEY = "SELECT json_group_object(key, json(offsets)) FROM by_key WHERE block = ?"
_RUNS = "SELECT publisher, first_sequence, last_sequence FROM runs WHERE block = ?1"
# The rows that sealing stores for a block, by publisher.
_MADE = (
    "SELECT publisher, min(sequence), max(sequence), count(*), sum(length(payload)), min(published_at),"
    " max(published_at) FROM events"
    f" WHERE offset BETWEEN ?1 * {BLOCK} AND ?1 * {BLOCK} + {BLOCK - 1} GROUP BY publisher"
)
_PUBLISHERS = """
SELECT count(*) FROM (SELECT publisher, min(block) AS first, max(block) AS last, max(last_sequence) AS sequence
FROM runs GROUP BY publisher) AS made LEFT JOIN publishers ON publishers.publisher = made.publisher
WHERE publishers.id IS NULL OR first_block > first OR last_block != last OR last_sequence < sequence
"""
_ids = msgspec.json.Decoder(list[int]).decode
_index = msgspec.json.Decoder(dict[int, list[int]]).decode


class Report(NamedTuple):
    """Findings of `verify`. If `problems` is empty, the log holds every event that was acknowledged."""

    events: int
    first: int
    head: int
    problems: list[str]
    losses: list[tuple[int, int]]
    warnings: tuple[str, ...] = ()  # findings beside the log that do not damage it
    removed: int = 0  # events that were removed from the middle: their offsets and checksums are left


def verify(path: str, progress: Callable[[int, int], None] | None = None, cold: str | Path | None = None) -> Report:
    """Read the whole log at `path`, beside its owner if it has one, and report every problem.

    `cold` is the folder of its cold tier, by default `<log>-cold`.
    """
    found, state = _verify(path, progress)
    if state is not None:
        tier = Cold(f"{path}-cold" if cold is None else cold)
        found.problems.extend(_check_tier(tier, state.epoch.hex(), state.offloaded_until))
    return found


def verify_files(path: str) -> Report:
    """Do the same without the cold tier."""
    return _verify(path, None)[0]


def _verify(path: str, progress: Callable[[int, int], None] | None) -> tuple[Report, State | None]:
    problems: list[str] = []
    record = _read_record(path, problems)  # first, because an active owner writes the log before its head record
    engine = make_engine(path, read_only=True)
    try:
        with reading_errors(path), engine.connect() as connection:
            check_is_log(connection, path)
            for (finding,) in connection.exec_driver_sql("PRAGMA integrity_check"):
                if finding != "ok":
                    problems.append(f"SQLite: {finding}")
            with snapshot(connection):
                state, head = get_state(connection), get_head(connection)
                loss = None if record is None else find_loss(connection, record)
            found = connection.exec_driver_sql("SELECT first, last FROM losses ORDER BY first")
            losses = [(int(first), int(last)) for first, last in found]
            if file_version(connection) >= LINEAGE_SINCE:
                problems += _check_lineage(connection, head)
            if file_version(connection) >= VIEW_SINCE:
                problems += _check_view(connection)
            events = _Events(connection, losses, problems)
            low_water = state.low_water
            for block in range((low_water + 1) // BLOCK, head // BLOCK + 1):
                events.check(block, low_water, head)
                if progress is not None:
                    progress(min(head, block * BLOCK + BLOCK - 1) - low_water, head - low_water)
            events.finish()
    except LogError as error:
        problems.append(str(error))
        return Report(0, 0, 0, problems, []), None
    finally:
        engine.dispose()
    if loss is not None and loss.is_end and record is not None:
        problems.append(f"offsets {head + 1} to {record.head} were acknowledged and are missing")
    elif loss is not None:
        problems.append(loss.reason)
    problems += _check_cursors(path)
    left = OldFolder(path).describe()
    seen, warnings = events.seen, () if left is None else (left,)
    return Report(seen, low_water + 1 if seen else 0, head, problems, losses, warnings, events.removed), state


class _Events:
    """The events of a log, block by block, and what the index says about them."""

    def __init__(self, connection: Connection, losses: list[tuple[int, int]], problems: list[str]) -> None:
        self._connection, self._losses, self._problems = connection, losses, problems
        self._keys, self._with_checksums = KeyTable(), file_version(connection) >= LINEAGE_SINCE
        self._gaps: list[tuple[int, int]] = []
        self._unindexed = 0
        self._page_sql = _PAGE if self._with_checksums else for_old_file(_PAGE)
        self.seen = self.removed = 0

    def check(self, block: int, low_water: int, head: int) -> None:
        """Verify one block, in one view of the file."""
        with snapshot(self._connection):
            now = get_state(self._connection).low_water  # retention may run at the same time
            first, last = max(block * BLOCK, max(low_water, now) + 1), min(block * BLOCK + BLOCK - 1, head)
            found: dict[int, list[int]] = {}
            after, count, known = first - 1, 0, len(self._problems)
            while after < last:
                problems, offsets, rows, covered = self._page(after + 1, last)
                self._problems += [str(each).partition(";")[0] for each in problems]
                for key, some in offsets.items():
                    found.setdefault(key, []).extend(some)
                after, count = covered, count + rows
            self.seen += count
            gone = rows_between(self._connection, block * BLOCK, last) if self._with_checksums else []
            if (gone or count != last - first + 1) and first <= last:
                flat = sorted([offset for some in found.values() for offset in some])
                removed = self._check_removed(gone, flat, first, last)
                self._gaps += gaps_between(first - 1, flat, last, [*self._losses, *removed])
            if self._with_checksums:
                is_good = len(self._problems) == known
                self._check_index(block, found, first == max(1, block * BLOCK), is_good, bool(gone))

    def _check_removed(self, rows: list[Removed], offsets: list[int], first: int, last: int) -> list[tuple[int, int]]:
        """Return the ranges of a block that were removed. Reports the events in them, which should not exist."""
        ranges = [(max(row.first, first), min(row.last, last)) for row in rows if row.is_whole]
        ranges = [each for each in ranges if each[0] <= each[1]]
        for start, end in ranges:
            self.removed += end - start + 1
            for offset in offsets[bisect_left(offsets, start) : bisect_right(offsets, end)]:
                self._problems.append(f"the event at offset {offset} exists, although it was removed")
        return ranges

    def finish(self) -> None:
        """Report what was found about several blocks together."""
        merged: list[tuple[int, int]] = []
        for first, last in self._gaps:
            if merged and merged[-1][1] + 1 == first:
                first = merged.pop()[0]
            merged.append((first, last))
        self._problems += [f"offsets {first} to {last} are missing" for first, last in merged]
        if self._unindexed:
            self._problems.append(f"{self._unindexed} sealed events are missing from the key index")
        wrong = self._connection.exec_driver_sql(_PUBLISHERS).scalar_one()
        if wrong:
            self._problems.append(f"{wrong} publishers are missing from their table, or their rows are wrong")

    def _page(self, first: int, last: int) -> tuple[list[Any], dict[int, list[int]], int, int]:
        limit = BLOCK
        while True:
            values = {"first": first, "last": last, "limit": limit, "bytes": PAGE_BYTES if limit > 1 else 1 << 40}
            row = self._connection.exec_driver_sql(self._page_sql, values).one()
            numbers, bodies, used, count, newest = row[:5]
            if count or limit == 1 or not self._has_any(first, last):
                break
            limit //= 4
        names = self._keys.learn(self._connection, _ids(used))
        problems, offsets = check_rows(numbers, bodies or b"", names.get)
        return problems, offsets, count, newest if count >= limit else last

    def _has_any(self, first: int, last: int) -> bool:
        found = self._connection.exec_driver_sql(
            "SELECT 1 FROM events WHERE offset BETWEEN ? AND ? LIMIT 1", (first, last)
        )
        return found.first() is not None

    def _check_index(
        self, block: int, found: dict[int, list[int]], is_complete: bool, is_good: bool, has_removed: bool
    ) -> None:
        """Compare a sealed block with its rows in the other tables. Retention may have removed a part of its events."""
        rows, where = (
            block_rows(self._connection, block, block),
            f"offsets {block * BLOCK} to {block * BLOCK + BLOCK - 1}",
        )
        if not rows:
            newest = self._connection.exec_driver_sql("SELECT max(block) FROM blocks").scalar()
            if newest is not None and block < newest:
                self._problems.append(f"the row of {where} is missing from the table of blocks")
            return
        row = rows[0]
        if not row.is_whole:
            self._problems.append(f"the row of {where} in the table of blocks is damaged")
        known = len(self._problems) + self._unindexed
        if is_complete:
            self._check_offsets(row, found, where)
        is_checked = row.index_checksum not in (None, UNPROVABLE) and len(self._problems) + self._unindexed == known
        if is_checked and row.index_checksum != index_checksum(self._connection, block):
            self._problems.append(f"the key index of {where} does not match its checksum")
        if is_complete and is_good:
            self._check_sums(row, where, has_removed)
        problem = check_block(self._connection, block)
        if problem is not None:
            self._problems.append(problem)

    def _check_offsets(self, row: BlockRow, found: dict[int, list[int]], where: str) -> None:
        listed = _index(self._connection.exec_driver_sql(_BY_KEY, (row.block,)).scalar_one())
        if listed != found:
            indexed = {(key, offset) for key, offsets in listed.items() for offset in offsets}
            events = {(key, offset) for key, offsets in found.items() for offset in offsets}
            self._unindexed += len(events - indexed)
            if indexed - events:
                self._problems.append(
                    f"the key index of {where} names {len(indexed - events)} events that do not exist"
                )

    def _check_sums(self, row: BlockRow, where: str, has_removed: bool) -> None:
        """Compare sums. The times and sequences of a block are not changed when some of its events are removed."""
        made = self._connection.exec_driver_sql(_MADE, (row.block,)).all()
        events, size = sum(each[3] for each in made), sum(each[4] for each in made)
        times = (min(each[5] for each in made), max(each[6] for each in made)) if made else (None, None)
        if has_removed and made and row.published_min is not None and row.published_max is not None:
            times = min(*times, row.published_min), max(*times, row.published_max)
        if (events, size, *times) != row[1:5]:
            self._problems.append(f"the row of {where} in the table of blocks does not match their events")
        runs = {each[0]: (each[1], each[2]) for each in self._connection.exec_driver_sql(_RUNS, (row.block,))}
        found = {each[0]: (each[1], each[2]) for each in made}
        if has_removed:  # each run of the events that are left must be a part of a stored one
            for publisher, (first, last) in runs.items():
                before = found.get(publisher, (first, last))
                found[publisher] = min(first, before[0]), max(last, before[1])
        if found != runs:
            self._problems.append(f"the sequences of {where} in the table of runs do not match their events")


def _check_view(connection: Connection) -> list[str]:
    """Compare the view with the one that this version creates: with another one, other programs see other events."""
    found = connection.exec_driver_sql(
        "SELECT sql FROM sqlite_schema WHERE type = 'view' AND name = ?", (VIEW,)
    ).scalar()
    if found is None:
        return [f"the view {VIEW} is missing"]
    return [] if found == CREATE_VIEW else [f"the view {VIEW} was changed"]


def _check_lineage(connection: Connection, head: int) -> Iterator[str]:
    """Yield the problems of the incarnations, and of the offsets and checksums of removed events."""
    for before, after in pairwise(read_lineage(connection).incarnations):
        if after.first < before.first:
            yield f"incarnation {after.id:x} begins at offset {after.first}, before its predecessor, at {before.first}"
    reached = 0
    for block in connection.exec_driver_sql(f"SELECT DISTINCT first / {BLOCK} FROM removed ORDER BY 1").scalars().all():
        for row in rows_between(connection, block * BLOCK, block * BLOCK + BLOCK - 1):
            if not row.is_whole or row.last > head:
                yield f"the checksums of the removed events {row.first} to {row.last} are malformed"
            elif row.first <= reached:
                yield f"the removed events {row.first} to {row.last} are listed twice"
            reached = row.last if row.is_whole else reached


def _check_cursors(path: str) -> Iterator[str]:
    from zbus_log.write.cursors import SqliteCursors  # imported here: it imports the reader's package

    cursors = SqliteCursors(path)
    try:
        cursors.list()
        if Path(cursors.path).exists():
            cursors.positions.load()
    except ZbusError as error:
        yield str(error)
    finally:
        cursors.close(1.0)


def _check_tier(cold: Cold, epoch: str, offloaded_until: int) -> Iterator[str]:
    """Yield the first problem of the cold tier: its manifest, and every event of its files."""
    try:
        manifest = cold.manifest()
        cold.check_holds(offloaded_until)
        if manifest.segments:
            manifest.check_epoch(epoch, cold.path)
        after = max(0, manifest.first - 1)
        while after < manifest.last:
            page = cold.read(KeySet.all(), Span(after), BLOCK)
            _, error, _ = page.events()
            if error is not None:
                raise error
            after = page.covered
    except (LogError, ConfigInvalid) as error:
        yield str(error)
    finally:
        cold.close()


def _read_record(path: str, problems: list[str]) -> Head | None:
    try:
        record = read_record(path)
    except LogDamaged as error:
        problems.append(error.reason)
        return None
    if record is None:
        problems.append("the log has no head record, so the loss of its newest events could not be detected")
    return record
