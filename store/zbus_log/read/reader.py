"""Reader of a log: pages by offset, time and key expression, on any thread, beside the writer.

A page is one statement, and so one consistent view and one short read transaction: a slow consumer
never delays a checkpoint. A page for some keys takes their offsets from `by_key`, so it reads only
the payloads of those keys.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Engine

from zbus.errors import ConfigInvalid, LogDamaged, LogError, LogTrimmed
from zbus.keys import KeySet
from zbus.ports.log import Span
from zbus.util.memo import Memo
from zbus_log.file.block_index import ProvedBlocks, block_rows
from zbus_log.file.database import OTHER_FILE, make_engine, reading_errors, snapshot
from zbus_log.file.key_table import KeyTable
from zbus_log.file.removed import count_between, gaps_between, has_removed, ranges_between
from zbus_log.file.rows import PAGE, PAGE_LISTED, SIZE, RowPage, for_old_file, offsets_of
from zbus_log.file.tables import (
    BLOCK,
    LINEAGE_SINCE,
    READABLE_SINCE,
    SEALED_UNTIL,
    VERSION,
    file_version,
    get_epoch,
    get_head,
    get_low_water,
    get_state,
)

from .comparison import compare_with_record
from .copied import check_if_copied

PAGE_BYTES_MAX = 8 * 1024 * 1024
LIMIT_MIN = 128
WINDOW_MIN = 4 * BLOCK
WINDOW_MAX = 1 << 30
WINDOW_FILLED = 0.9  # of a page, by the events of a window
WINDOWS_KEPT_MAX = 1000
CHECKED = 2048  # events per page, for verification
SCAN_SHARE = 0.2  # of all keys; above this, a scan is cheaper than looking up offsets

_VALUE = re.compile(r":(\w+)")
_TIMES = "published_at BETWEEN :from_ns AND :to_ns"
_ALL = f"""
SELECT {{columns}} FROM events WHERE offset > :after AND offset <= :until AND {_TIMES} ORDER BY offset LIMIT :limit
"""
# Few keys are given by their ids, many by a condition on their names. If they are a small share of all keys, their
# offsets are looked up in `by_key`; otherwise a scan of `events` is cheaper.
_SCAN = f"""
SELECT {{columns}} FROM events {{joined}} WHERE offset > :after AND offset <= :until AND {_TIMES}
AND {{wanted}} ORDER BY offset LIMIT :limit
"""
# A page uses its rows twice, but looks up their offsets once. `CROSS JOIN` keeps the order of the offsets.
_OFFSETS = f"""
WITH wanted AS MATERIALIZED (
    SELECT offset FROM (
        SELECT entry.value AS offset FROM blocks {{by_key}} CROSS JOIN json_each(by_key.offsets) AS entry
        WHERE blocks.block BETWEEN (:after + 1) / {BLOCK} AND :until / {BLOCK}
        AND entry.value > :after AND entry.value <= :until AND {{indexed}}
        UNION ALL
        SELECT offset FROM events {{joined}}
        WHERE offset > max(:after, {SEALED_UNTIL}) AND offset <= :until AND {{wanted}}
    ) AS found {{{{timed}}}} ORDER BY offset LIMIT :limit
)
"""
_TIMED = f"WHERE EXISTS (SELECT 1 FROM events WHERE events.offset = found.offset AND {_TIMES})"
_LOOKUP = "SELECT {columns} FROM wanted CROSS JOIN events ON events.offset = wanted.offset"
_BY_IDS = {
    "joined": "",
    "wanted": "key IN (SELECT value FROM json_each(:keys))",
    "by_key": "CROSS JOIN json_each(:keys) AS wanted CROSS JOIN by_key ON by_key.block = blocks.block"
    " AND by_key.key = wanted.value",
    "indexed": "true",
}
_BY_CONDITION = {
    "joined": "CROSS JOIN keys ON keys.id = events.key",
    "by_key": "CROSS JOIN by_key ON by_key.block = blocks.block CROSS JOIN keys ON keys.id = by_key.key",
}
_ids = msgspec.json.Decoder(list[int]).decode
_ALL_KEYS = KeySet.all()


def readable(path: str, *, has_record: bool = True) -> Engine:
    """Return a read-only engine. Raises `ConfigInvalid` if there is no log.

    Raises `LogDamaged` for another version, if events that the head record names are missing, or for an incomplete copy
    of a log in use. A backup, and a copy that is being made, have no record.
    """
    if not Path(path).is_file():
        raise ConfigInvalid("log", f"there is no log {path!r} to read")
    engine = make_engine(path, read_only=True)
    try:
        with reading_errors(path), engine.connect() as connection:
            version = file_version(connection)
            if version == 0:
                raise LogDamaged(path, "it is not a zbus log or backup", advice=OTHER_FILE)
            if not READABLE_SINCE <= version <= VERSION:
                reason = f"the log has version {version}, but reading needs {READABLE_SINCE} to {VERSION}"
                raise LogDamaged(path, reason, advice="To read it, upgrade zbus" if version > VERSION else "")
            if has_record:
                check_is_no_backup(connection, path)
                compare_with_record(connection, path)
        if has_record:
            check_if_copied(path)
    except BaseException:
        engine.dispose()
        raise
    return engine


def check_is_no_backup(connection: Connection, path: str) -> None:
    """Raise `ConfigInvalid` if the file is a backup."""
    if connection.exec_driver_sql("SELECT count(*) FROM sqlite_schema WHERE name = 'backup'").scalar_one():
        raise ConfigInvalid(
            "log",
            f"{path!r} is a backup, not a log. Nothing was changed. Restore it: "
            f"zbus log restore {shlex.quote(path)} LOG",
        )


class Choice(NamedTuple):
    """The query for the events of some keys: a statement for `{columns}` of `events`, and its values for these keys."""

    statement: str
    values: Mapping[str, str]
    first: str = ""  # a part of the query that is evaluated first, and only once
    match: KeySet | None = None  # if set, the keys of the events must be matched again
    listed: str = ""  # the offsets of these events by the index, as `wanted`, to compare the page with

    @property
    def is_everything(self) -> bool:
        """Whether these are the events of all keys."""
        return self.statement == _ALL

    @property
    def page_sql(self) -> str:
        """The statement for a page."""
        return PAGE_LISTED if self.first else PAGE

    def page(self, statement: str, span: Span) -> str:
        """Return a statement over `{chosen}`, the complete rows of these events."""
        return self._first(span) + statement.format(chosen=self.statement.format(columns="events.*"))

    def sql(self, columns: str, span: Span, limit: int) -> str:
        """Return the query with its values inlined, for drivers other than the log's own."""
        quoted = {name: "'" + value.replace("'", "''") + "'" for name, value in self.values.items()}
        values = _values(span, span.until or 0) | {"limit": limit} | quoted
        statement = self._first(span) + self.statement.format(columns=columns)
        return _VALUE.sub(lambda found: str(values[found[1]]), statement)

    def _first(self, span: Span) -> str:
        return self.first.format(timed="" if span.from_ns is None and span.to_ns is None else _TIMED)


class SqliteReader:
    """Reads through its own connections. Thread-safe."""

    def __init__(self, path: str, engine: Engine) -> None:
        self.path, self._engine = path, engine
        self._keys = KeyTable()
        self._proved = ProvedBlocks()
        self._checked = (0, 0)  # offsets whose events were verified before they were searched by time
        self._windows = Memo[tuple[str, ...], int](WINDOWS_KEPT_MAX)
        self._limit = LIMIT_MIN  # how many events of the current size fit into a page
        self._is_old = True  # whether the file may have an older version: an owner can migrate it at any time

    def head(self) -> int:
        """Return the last committed offset; 0 for an empty log."""
        with reading_errors(self.path), self._engine.connect() as connection:
            return get_head(connection)

    def low_water(self) -> int:
        """Return the offset up to which retention removed every event."""
        with reading_errors(self.path), self._engine.connect() as connection:
            return get_low_water(connection)

    def removed_until(self) -> int:
        """Return the highest offset that was removed from the middle; 0 if none was."""
        with reading_errors(self.path), self._engine.connect() as connection:
            return get_state(connection).removed_until

    def offloaded_until(self) -> int:
        """Return the last offset that was removed because the cold tier has it."""
        with reading_errors(self.path), self._engine.connect() as connection:
            return get_state(connection).offloaded_until

    def epoch(self) -> bytes:
        """Return the epoch: the identity of the log's offsets."""
        with reading_errors(self.path), self._engine.connect() as connection:
            return get_epoch(connection)

    def read(self, keys: KeySet, span: Span, limit: int) -> RowPage:
        """Return the next events of `span`. The page is bounded by `limit`, by bytes, and by a window of offsets.

        A page of some keys ends where the index is no longer proved. There, and after the last sealed block, a page
        has all events, and those of other keys are left out after they were verified.
        """
        with reading_errors(self.path), self._engine.connect() as connection, snapshot(connection):
            if span.after == 0:  # start at the oldest event that is left
                span = span._replace(after=oldest_after(connection, self.path))
            choice = self._choose(connection, keys)
            if choice.statement is _ALL:
                return self._page(connection, choice, keys, span, limit, WINDOW_MAX)
            window = self._windows.get(keys.expressions, WINDOW_MIN)
            until = span.after + window if span.until is None else min(span.until, span.after + window)
            proved = self._proved.until(connection, span.after + 1, until)
            if proved <= span.after:
                rest = BLOCK - 1 - span.after % BLOCK or BLOCK  # to the end of the block of the next event
                return self._page(connection, Choice(_ALL, {}), keys, span, limit, rest)
            page = self._page(connection, choice, keys, span, limit, proved - span.after)
            self._windows[keys.expressions] = page.next_window(window)
            return page

    def check(self, first: int, last: int) -> LogError | None:
        """Verify the events from one offset to another, both included. Returns the first problem."""
        after = first - 1
        while after < last:
            with reading_errors(self.path), self._engine.connect() as connection, snapshot(connection):
                page = self._page(connection, Choice(_ALL, {}), _ALL_KEYS, Span(after, last), CHECKED, WINDOW_MAX)
            _, error, _ = page.events()
            if error is not None or page.covered <= after:
                return error
            after = page.covered
        return None

    def choose(self, keys: KeySet) -> Choice:
        """Return the query for the events of `keys` that are in the log now. Its events need not be matched again."""
        with reading_errors(self.path), self._engine.connect() as connection, snapshot(connection):
            return self._choose(connection, keys, exact=True)

    def _choose(self, connection: Connection, keys: KeySet, exact: bool = False) -> Choice:
        if keys.unfiltered:
            return Choice(_ALL, {})
        found = self._keys.matching(connection, keys)
        if found.matching == found.keys:
            return Choice(_ALL, {})
        ids = found.ids if exact else found.few
        sql, values, is_exact = found.condition
        if ids is not None:
            parts, values, is_exact = _BY_IDS, {"keys": msgspec.json.encode(ids).decode()}, True
        else:
            parts = _BY_CONDITION | {"wanted": sql, "indexed": sql}
        match = None if is_exact else keys
        listed = _OFFSETS.format(**parts)
        if found.share > SCAN_SHARE:
            return Choice(_SCAN.format(columns="{columns}", **parts), values, match=match, listed=listed)
        return Choice(_LOOKUP, values, listed, match, listed)

    def narrow(self, span: Span) -> Span:
        """Turn times into offsets. Blocks store the times that they span, so little is scanned."""
        with reading_errors(self.path), self._engine.connect() as connection, snapshot(connection):
            head, low_water = get_head(connection), get_low_water(connection)
            if 0 < span.after < low_water:
                raise LogTrimmed(span.after, low_water)
            after, until = span.after, head if span.until is None else min(span.until, head)
            if span.from_ns is not None or span.to_ns is not None:
                self._check_times(connection, low_water)
            if span.from_ns is not None:
                first = first_at(connection, span.from_ns, head)
                self._check_before(max(first - 1 - (first - 1) % BLOCK, low_water + 1), first - 1)
                after = max(after, first - 1)
            if span.to_ns is not None:
                self._check_before(max(sealed_until(connection), low_water) + 1, head)
                until = min(until, _last_at(connection, span.to_ns))
            return Span(after, until, span.from_ns, span.to_ns)

    def _check_times(self, connection: Connection, low_water: int) -> None:
        """Raise `LogDamaged` if the times of sealed blocks, by which events are found, are damaged."""
        if file_version(connection) < LINEAGE_SINCE:
            return
        rows = block_rows(connection, 0, 1 << 62)
        damaged = [row.block for row in rows if not row.is_whole]
        damaged += [row.block for row in rows[:1] if row.block > (low_water + 1) // BLOCK]
        damaged += [before.block for before, after in pairwise(rows) if after.block != before.block + 1]
        if damaged:
            first = int(damaged[0]) * BLOCK
            raise LogDamaged(self.path, f"the times of the events from offset {first} on are damaged")

    def _check_before(self, first: int, last: int) -> None:
        """Raise an error if an event is damaged: its time may be wrong, and a search by time would not find it."""
        checked = self._checked
        if not (checked[0] <= first and last <= checked[1]) and (error := self.check(first, last)) is not None:
            raise error
        self._checked = first, last

    def _page(
        self, connection: Connection, choice: Choice, keys: KeySet, span: Span, limit: int, window: int
    ) -> _CountedPage:
        until = span.after + window if span.until is None else min(span.until, span.after + window)
        timed = span.from_ns is not None or span.to_ns is not None
        asked, span = span, Span(span.after, span.until)  # events are verified before their times are compared
        values = {**_values(span, until), **choice.values, "bytes": PAGE_BYTES_MAX}
        page, size = choice.page(choice.page_sql, span), choice.page(SIZE, span)
        if self._is_old:
            self._is_old = file_version(connection) < LINEAGE_SINCE
            page = for_old_file(page) if self._is_old else page
        requested, limit = limit, min(limit, self._limit)
        while True:
            values["limit"] = limit
            if limit == 1:
                values["bytes"] = 1 << 40  # one event is always returned, however large it is
            row = connection.exec_driver_sql(page, values).one()
            numbers, bodies, used, count, last, head, low_water, named, named_last = row
            found = 0 if count or limit == 1 else connection.exec_driver_sql(size, values).scalar_one()
            if found <= PAGE_BYTES_MAX:
                break
            limit = self._limit = max(1, limit * PAGE_BYTES_MAX // (2 * found))
        if count * 2 >= limit and len(bodies or b"") * 4 < PAGE_BYTES_MAX:
            self._limit = max(self._limit, min(requested, limit * 4))
        low_water = int(low_water)
        if span.after < low_water:
            raise LogTrimmed(span.after, low_water)
        if named is not None:  # by the index: events may be missing
            count, last, rows = named, named_last, count
        else:
            rows = count
        covered = last if count >= limit else max(span.after, min(until, head))
        return _CountedPage(
            numbers,
            bodies or b"",
            covered,
            low_water,
            self._keys.learn(connection, _ids(used)).get,
            span.after,
            count / limit,
            missing=() if rows == named else self._missing(connection, choice, values, numbers, rows, covered),
            wanted=None if keys.unfiltered or (choice.statement is not _ALL and choice.match is None) else keys,
            times=_times(asked) if timed else None,
        )

    def _missing(
        self,
        connection: Connection,
        choice: Choice,
        values: dict[str, Any],
        numbers: bytes,
        rows: int,
        covered: int,
    ) -> list[tuple[int, int]]:
        """Return the ranges of offsets that are missing from a page."""
        after = int(values["after"])
        if choice.statement is _ALL:
            if rows == covered - after:
                return []
            if has_removed(connection) and rows + count_between(connection, after + 1, covered) == covered - after:
                return []
            return gaps_between(after, offsets_of(numbers), covered, ranges_between(connection, after + 1, covered))
        values = values | {"until": covered, "limit": -1}  # the page may have ended at its limit
        listed = choice.listed.format(timed="")
        if rows == connection.exec_driver_sql(f"{listed} SELECT count(*) FROM wanted", values).scalar_one():
            return []
        expected = connection.exec_driver_sql(f"{listed} SELECT json_group_array(offset) FROM wanted", values)
        return [(each, each) for each in sorted(set(_ids(expected.scalar_one())) - set(offsets_of(numbers)))]


def _times(span: Span) -> tuple[int, int]:
    values = _values(span, 0)
    return values["from_ns"], values["to_ns"]


def _values(span: Span, until: int) -> dict[str, Any]:
    return {
        "after": span.after,
        "until": until,
        "from_ns": -1 if span.from_ns is None else span.from_ns,
        "to_ns": (1 << 63) - 1 if span.to_ns is None else span.to_ns,
    }


class _CountedPage(RowPage):
    def __init__(
        self,
        numbers: bytes,
        bodies: bytes,
        covered: int,
        low_water: int,
        key_name: Callable[[int], tuple[str, int] | None],
        after: int,
        filled: float,
        **rest: Any,
    ) -> None:
        super().__init__(numbers, bodies, covered, low_water, key_name, **rest)
        self._offsets, self._filled = covered - after, filled

    def next_window(self, window: int) -> int:
        """Return how many offsets the next page should look at, after one that looked at `window` offsets.

        Offsets that are looked up and then not returned are looked up again for the next page.
        """
        if self._filled < WINDOW_FILLED:
            return min(WINDOW_MAX, window * 2, int(window * WINDOW_FILLED / max(self._filled, 1e-6)))
        return max(BLOCK, int(self._offsets * WINDOW_FILLED / self._filled))


def first_at(connection: Connection, time_ns: int, head: int) -> int:
    """Return the lowest offset published at or after a time; `head` + 1 if there is none."""
    block = connection.exec_driver_sql("SELECT min(block) FROM blocks WHERE published_max >= ?", (time_ns,)).scalar()
    start = f"{int(block) * BLOCK}" if block is not None else f"{SEALED_UNTIL} + 1"
    found = connection.exec_driver_sql(
        f"SELECT offset FROM events WHERE offset >= {start} AND published_at >= ? ORDER BY offset LIMIT 1",
        (time_ns,),
    ).scalar()
    return head + 1 if found is None else int(found)


def sealed_until(connection: Connection) -> int:
    """Return the last offset of the newest sealed block, or -1."""
    return int(connection.exec_driver_sql(f"SELECT {SEALED_UNTIL}").scalar_one())


def oldest_after(connection: Connection, path: str) -> int:
    """Return the low-water mark. Raises `LogDamaged` if it is wrong, because the log has events before it."""
    low_water = get_low_water(connection)
    oldest = connection.exec_driver_sql("SELECT min(offset) FROM events").scalar()
    if oldest is not None and oldest <= low_water:
        raise LogDamaged(path, f"it has an event at offset {oldest}, but its low-water mark is {low_water}")
    return low_water


def _last_at(connection: Connection, time_ns: int) -> int:
    """Return an offset after which no event was published at or before a time."""
    tail = connection.exec_driver_sql(
        f"SELECT max(offset) FROM events WHERE offset > {SEALED_UNTIL} AND published_at <= ?", (time_ns,)
    ).scalar()
    if tail is not None:
        return int(tail)
    block = connection.exec_driver_sql("SELECT max(block) FROM blocks WHERE published_min <= ?", (time_ns,)).scalar()
    return -1 if block is None else int(block) * BLOCK + BLOCK - 1
