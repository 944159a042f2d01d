"""Copies a log into a new file, beside its owner: everything up to one offset, the cut.

A small log is copied page by page of its file, in one read transaction, which is as fast as the disk. The owner's
write-ahead log cannot shrink while that lasts, so a large log is copied row by row in many short transactions. The
first of them fixes the cut and copies the small tables together with the first events, so that they belong together.
Events and sealed blocks up to the cut do not change after that; only retention and purges can remove them. If retention
removes events that are not copied yet, the copy begins anew. Events that are removed from the middle during the copy
are removed from the copy at its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from sqlalchemy import Connection

from zbus.errors import ConfigInvalid, LogDamaged, LogError
from zbus_log.file.chain import digest_at
from zbus_log.file.database import PAGE_BYTES, changed_rows, make_engine, reading_errors, snapshot, transaction
from zbus_log.file.incarnations import read_lineage
from zbus_log.file.removed import cut_removed
from zbus_log.file.tables import BLOCK, LINEAGE_SINCE, get_head, get_low_water, get_state, set_state
from zbus_log.read.reader import readable

from .flushing import Flushing

INFO = "backup"  # the table that describes a backup: it is not a part of the log
WHOLE_BYTES_MAX = 1 << 30  # of a log that is copied in one read transaction
STEP_PAGES = 512
STEP_EVENTS = 4096  # in the first transaction
STEP_S = 0.1  # at most, about
BLOCKS_AT_ONCE = 64
ATTEMPTS_MAX = 10
SIDE_FILES = ("", "-journal", "-wal", "-shm")

# The number of offsets after one offset up to another that a table lists.
_LISTED = "SELECT ifnull(sum(min(last, ?2) - max(first, ?1 + 1) + 1), 0) FROM {table} WHERE first <= ?2 AND last > ?1"
_IN_STEPS = ("events", "by_key", "runs")
_SCHEMA = "SELECT type, name, sql FROM source.sqlite_schema WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"

Progress = Callable[[int, int], None]


class Contents(NamedTuple):
    """The content of a copy."""

    cut: int
    low_water: int
    epoch: bytes
    incarnation: int
    digest: bytes
    offloaded_until: int = 0  # the last offset that was removed because the cold tier has it


class _Overtaken(Exception):
    """Raised when retention removed events before they were copied."""


class LogCopy:
    """Copies the log at `source` into the new file `target`, which is complete, but not synced, when a method returns.

    `check` is called between the steps, and ends the copy by raising. `of_backup`: the source is a backup, not a log.
    """

    def __init__(
        self,
        source: str,
        target: str,
        progress: Progress | None = None,
        check: Callable[[], None] = lambda: None,
        of_backup: bool = False,
    ) -> None:
        self._source, self._target, self._check = source, target, check
        self._has_record = not of_backup
        self._progress = progress or (lambda done, total: None)

    def whole(self, bytes_max: int | None = WHOLE_BYTES_MAX) -> Contents:
        """Copy everything up to the current head, in one read transaction if the log has at most `bytes_max` bytes."""
        sizes = [path.stat().st_size for side in ("", "-wal") if (path := Path(f"{self._source}{side}")).is_file()]
        if bytes_max is not None and sum(sizes) > bytes_max:
            return self.rows()
        readable(self._source, has_record=self._has_record).dispose()  # raises if this is not a log
        with reading_errors(self._target), self._new_target() as target:
            self._copy_pages(target)
        return self._copied()

    def rows(self, until: int | None = None, after: int = 0, sealed: int = -1) -> Contents:
        """Copy everything up to `until`, or the current head.

        For an increment, leave out the events up to `after` and the indexes of the blocks up to `sealed`.
        """
        readable(self._source, has_record=self._has_record).dispose()
        for _ in range(ATTEMPTS_MAX):
            try:
                with reading_errors(self._target), self._new_target() as target:
                    cut = self._copy_rows(target, until, after, sealed)
                # An increment has no digest without the events before it, and may have no event.
                return contents(self._target)._replace(cut=cut, digest=b"") if after else self._copied()
            except _Overtaken:
                continue
        raise LogError(
            f"{self._source}: retention removed events faster than they could be copied. No copy was made, and the log "
            "was not changed"
        )

    @contextmanager
    def _new_target(self) -> Iterator[Connection]:
        remove_database(self._target)
        engine = make_engine(self._target, synchronous="OFF")
        try:
            # The connection is closed first: closing the file ends the locks of SQLite on it.
            with Flushing(self._target) as self._flushing, engine.connect() as connection:
                for setting in (f"page_size={PAGE_BYTES}", "auto_vacuum=INCREMENTAL", "journal_mode=OFF"):
                    connection.exec_driver_sql(f"PRAGMA {setting}").close()
                yield connection
        finally:
            engine.dispose()

    def _copied(self) -> Contents:
        """Return what was copied, compared with the source, whose history must be the same."""
        found = contents(self._target)
        digest = digest_in(self._source, found.cut)
        if digest and found.digest and digest != found.digest:
            raise LogDamaged(self._source, f"the digest of its events up to offset {found.cut} does not match the copy")
        return found

    def _copy_pages(self, target: Connection) -> None:
        engine = readable(self._source, has_record=self._has_record)
        try:
            with reading_errors(self._source), engine.connect() as connection, snapshot(connection):
                total = get_head(connection) - get_low_water(connection)

                def copied(remaining: int, pages: int) -> None:
                    self._flushing.written()
                    self._check()
                    self._progress(total - total * remaining // max(1, pages), total)

                _driver(connection).copy_to(_driver(target), STEP_PAGES, copied)
        finally:
            engine.dispose()
        # The copy says that it has a write-ahead log, as the source does.
        target.exec_driver_sql("PRAGMA journal_mode=DELETE").close()
        target.exec_driver_sql(f"DROP TABLE IF EXISTS {INFO}")

    def _copy_rows(self, target: Connection, until: int | None, after: int, sealed: int) -> int:
        """Copy everything in short transactions. Returns the cut."""
        target.exec_driver_sql("ATTACH ? AS source", (f"file:{quote(self._source)}?mode=ro",))
        with transaction(target):
            made = target.exec_driver_sql(_SCHEMA).all()
            for kind, name, sql in made:
                if kind == "table" and name != INFO:
                    target.exec_driver_sql(sql)
            version = int(target.exec_driver_sql("PRAGMA source.user_version").scalar_one())
            self._has_removed = version >= LINEAGE_SINCE
            last = "max(low_water, removed_until)" if self._has_removed else "low_water"
            low, head = target.exec_driver_sql(
                f"SELECT low_water, max({last}, (SELECT ifnull(max(offset), 0) FROM source.events)) FROM source.state"
            ).one()
            cut = head if until is None else until
            if not low <= cut <= head:
                raise ConfigInvalid("at", f"offset {cut} is not in the file of the log, which has {low + 1} to {head}")
            for kind, name, _ in made:
                if kind == "table" and name not in (INFO, *_IN_STEPS):
                    target.exec_driver_sql(f'INSERT INTO main."{name}" SELECT * FROM source."{name}"')
            _cut_small_tables(target, cut, head, version)
            start = at = max(low, after)
            at = self._copy_events(target, at, min(cut, at + STEP_EVENTS))
        step = STEP_EVENTS
        while at < cut:
            self._flushing.written()
            self._check()
            self._progress(at - start, cut - start)
            begun = time.monotonic()
            with transaction(target):
                at = self._copy_events(target, at, min(cut, at + step))
            took_s = time.monotonic() - begun
            step = max(1, min(step * 2, int(step * STEP_S / max(took_s, 1e-6))))
        self._copy_blocks(target, low, sealed)
        with transaction(target):
            if self._has_removed:
                self._remove_removed(target, cut, is_whole=not after)
            if cut < head:
                _cut_publishers(target)
            for kind, _, sql in made:
                if kind != "table":
                    target.exec_driver_sql(sql)
            target.exec_driver_sql(f"PRAGMA user_version={version}")
        self._progress(cut - start, cut - start)
        return int(cut)

    def _copy_events(self, target: Connection, after: int, until: int) -> int:
        """Copy some events. Call it in a transaction. Raises `LogDamaged` if one is missing. Returns `until`."""
        target.exec_driver_sql(
            "INSERT INTO main.events SELECT * FROM source.events WHERE offset > ? AND offset <= ?", (after, until)
        )
        found = changed_rows(target)
        if target.exec_driver_sql("SELECT low_water FROM source.state").scalar_one() > after:
            raise _Overtaken
        tables = ("main.losses", "source.removed") if self._has_removed else ("main.losses",)
        sums = [target.exec_driver_sql(_LISTED.format(table=table), (after, until)) for table in tables]
        if until > after and found < until - after - sum(each.scalar_one() for each in sums):
            reason = f"events are missing between the offsets {after + 1} and {until}; zbus log verify lists them"
            raise LogDamaged(self._source, reason)
        return until

    def _remove_removed(self, target: Connection, cut: int, is_whole: bool) -> None:
        """Remove from the copy what was removed from the middle of the log after the copy began. In a transaction.

        Raises `_Overtaken` for an increment, or if retention has removed some of it from the start as well.
        """
        before = get_state(target)
        now = target.exec_driver_sql("SELECT low_water, removals FROM source.state").one()
        if now == (before.low_water, before.removals) or now[1] == before.removals:
            return
        if not is_whole or now[0] != before.low_water:
            raise _Overtaken
        target.exec_driver_sql("DELETE FROM main.removed")
        target.exec_driver_sql("INSERT INTO main.removed SELECT * FROM source.removed")
        cut_removed(target, cut)
        target.exec_driver_sql(
            "DELETE FROM main.events WHERE offset IN (SELECT offset FROM main.removed CROSS JOIN main.events"
            " ON events.offset BETWEEN removed.first AND removed.last)"
        )
        changed = target.exec_driver_sql(
            "SELECT there.block FROM main.blocks AS here CROSS JOIN source.blocks AS there ON there.block = here.block"
            " WHERE there.events != here.events"
        ).scalars()
        for block in changed.all():
            for table in ("by_key", "blocks"):
                target.exec_driver_sql(f"DELETE FROM main.{table} WHERE block = ?", (block,))
                target.exec_driver_sql(
                    f"INSERT INTO main.{table} SELECT * FROM source.{table} WHERE block = ?", (block,)
                )
        until = target.exec_driver_sql("SELECT removed_until FROM source.state").scalar_one()
        set_state(target, removals=now[1], removed_until=min(cut, until))

    def _copy_blocks(self, target: Connection, low_water: int, sealed: int) -> None:
        """Copy the indexes of the sealed blocks after `sealed`."""
        wanted = "SELECT block FROM main.blocks WHERE block > ? ORDER BY block"
        blocks = [int(each) for each in target.exec_driver_sql(wanted, (sealed,)).scalars()]
        for start in range(0, len(blocks), BLOCKS_AT_ONCE):
            self._check()
            some = blocks[start : start + BLOCKS_AT_ONCE]
            with transaction(target):
                for table in ("by_key", "runs"):
                    target.exec_driver_sql(
                        f"INSERT INTO main.{table} SELECT * FROM source.{table} WHERE block BETWEEN ? AND ?",
                        (some[0], some[-1]),
                    )
                low = target.exec_driver_sql("SELECT low_water FROM source.state").scalar_one()
            if low > low_water and low >= some[0] * BLOCK + BLOCK - 1:
                raise _Overtaken


def _cut_small_tables(target: Connection, cut: int, head: int, version: int) -> None:
    """Remove from the small tables what is about offsets after the cut. They are complete if the cut is the head."""
    target.exec_driver_sql(f"DELETE FROM main.blocks WHERE block * {BLOCK} + {BLOCK - 1} > ?", (cut,))
    if cut >= head:
        return
    target.exec_driver_sql("DELETE FROM main.losses WHERE first > ?", (cut,))
    target.exec_driver_sql("UPDATE main.losses SET last = ?1 WHERE last > ?1", (cut,))
    if version >= LINEAGE_SINCE:
        target.exec_driver_sql("DELETE FROM main.incarnations WHERE first > ?", (cut,))
        target.exec_driver_sql("DELETE FROM main.examined")
        cut_removed(target, cut)
        set_state(target, removed_until=min(cut, get_state(target).removed_until))


def _cut_publishers(target: Connection) -> None:
    """Reduce the publishers to what the copied blocks say about them."""
    target.exec_driver_sql("DELETE FROM main.publishers WHERE publisher NOT IN (SELECT publisher FROM main.runs)")
    target.exec_driver_sql(
        "UPDATE main.publishers SET last_block = found.block, last_sequence = found.sequence FROM"
        " (SELECT publisher, max(block) AS block, max(last_sequence) AS sequence FROM main.runs GROUP BY publisher)"
        " AS found WHERE found.publisher = publishers.publisher"
    )


def contents(path: str) -> Contents:
    """Return what a log contains, from its file only."""
    engine = readable(path, has_record=False)
    try:
        with reading_errors(path), engine.connect() as connection, snapshot(connection):
            head, state = get_head(connection), get_state(connection)
            incarnation, digest = read_lineage(connection).current.id, digest_at(connection, head)
            return Contents(head, state.low_water, state.epoch, incarnation, digest, state.offloaded_until)
    finally:
        engine.dispose()


def digest_in(path: str, offset: int) -> bytes:
    """Return the digest of a log up to an offset; empty if it is unknown."""
    engine = readable(path, has_record=False)
    try:
        with reading_errors(path), engine.connect() as connection, snapshot(connection):
            return digest_at(connection, offset)
    finally:
        engine.dispose()


def remove_database(path: str) -> None:
    """Remove a database and the files that SQLite keeps beside it."""
    for side in SIDE_FILES:
        Path(f"{path}{side}").unlink(missing_ok=True)


def _driver(connection: Connection) -> Any:
    return connection.connection.dbapi_connection
