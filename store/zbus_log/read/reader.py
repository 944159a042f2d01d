"""Reader of a log: pages by offset, time and key expression, on any thread, beside the writer.

A page is one statement, and so one consistent view and one short read transaction: a slow consumer
never delays a checkpoint. A page for some keys takes their offsets from `by_key`, so it reads only
the payloads of those keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Engine

from zbus.errors import ConfigInvalid, LogDamaged, LogTrimmed
from zbus.keys import KeySet
from zbus.ports.log import Span
from zbus.util.memo import Memo
from zbus_log.file.database import log_errors, make_engine, snapshot
from zbus_log.file.key_table import KeyTable
from zbus_log.file.rows import PAGE, SIZE, RowPage
from zbus_log.file.tables import (
    BLOCK,
    READABLE_SINCE,
    SEALED_UNTIL,
    VERSION,
    file_version,
    get_epoch,
    get_head,
    get_low_water,
)

PAGE_BYTES_MAX = 8 * 1024 * 1024
LIMIT_MIN = 128
WINDOW_MIN = 4 * BLOCK
WINDOW_MAX = 1 << 30
WINDOW_FILLED = 0.9  # of a page, by the events of a window
WINDOWS_KEPT_MAX = 1000
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


def readable(path: str) -> Engine:
    """Return a read-only engine. Raises `ConfigInvalid` if there is no log, `LogDamaged` for another version."""
    if not Path(path).is_file():
        raise ConfigInvalid("log", f"there is no log {path!r} to read")
    engine = make_engine(path, read_only=True)
    with log_errors(path), engine.connect() as connection:
        version = file_version(connection)
    if not READABLE_SINCE <= version <= VERSION:
        engine.dispose()
        newer = ": upgrade zbus" if version > VERSION else ""
        raise LogDamaged(path, f"the log has version {version}, but reading needs {READABLE_SINCE} to {VERSION}{newer}")
    return engine


class Choice(NamedTuple):
    """The query for the events of some keys: a statement for `{columns}` of `events`, and its values for these keys."""

    statement: str
    values: Mapping[str, str]
    first: str = ""  # a part of the query that is evaluated first, and only once
    match: KeySet | None = None  # if set, the keys of the events must be matched again

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
        self._windows = Memo[tuple[str, ...], int](WINDOWS_KEPT_MAX)
        self._limit = LIMIT_MIN  # how many events of the current size fit into a page

    def head(self) -> int:
        """Return the last committed offset; 0 for an empty log."""
        with log_errors(self.path), self._engine.connect() as connection:
            return get_head(connection)

    def low_water(self) -> int:
        """Return the offset up to which retention removed every event."""
        with log_errors(self.path), self._engine.connect() as connection:
            return get_low_water(connection)

    def epoch(self) -> bytes:
        """Return the epoch: the identity of the log's offsets."""
        with log_errors(self.path), self._engine.connect() as connection:
            return get_epoch(connection)

    def read(self, keys: KeySet, span: Span, limit: int) -> RowPage:
        """Return the next events of `span`. The page is bounded by `limit`, by bytes, and by a window of offsets."""
        with log_errors(self.path), self._engine.connect() as connection, snapshot(connection):
            choice = self._choose(connection, keys)
            if choice.statement is _ALL:
                return self._page(connection, choice, span, limit, WINDOW_MAX)
            window = self._windows.get(keys.expressions, WINDOW_MIN)
            page = self._page(connection, choice, span, limit, window)
            self._windows[keys.expressions] = page.next_window(window)
            return page

    def choose(self, keys: KeySet) -> Choice:
        """Return the query for the events of `keys` that are in the log now. Its events need not be matched again."""
        with log_errors(self.path), self._engine.connect() as connection, snapshot(connection):
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
        if found.share > SCAN_SHARE:
            return Choice(_SCAN.format(columns="{columns}", **parts), values, match=match)
        return Choice(_LOOKUP, values, _OFFSETS.format(**parts), match)

    def narrow(self, span: Span) -> Span:
        """Turn times into offsets. Blocks store the times that they span, so little is scanned."""
        with log_errors(self.path), self._engine.connect() as connection:
            connection.exec_driver_sql("BEGIN")
            try:
                head, low_water = get_head(connection), get_low_water(connection)
                if 0 < span.after < low_water:
                    raise LogTrimmed(span.after, low_water)
                after, until = span.after, head if span.until is None else min(span.until, head)
                if span.from_ns is not None:
                    after = max(after, first_at(connection, span.from_ns, head) - 1)
                if span.to_ns is not None:
                    until = min(until, _last_at(connection, span.to_ns))
                return Span(after, until, span.from_ns, span.to_ns)
            finally:
                connection.exec_driver_sql("COMMIT")

    def _page(self, connection: Connection, choice: Choice, span: Span, limit: int, window: int) -> _CountedPage:
        if span.after == 0:  # start at the oldest event that is left
            span = span._replace(after=get_low_water(connection))
        until = span.after + window if span.until is None else min(span.until, span.after + window)
        values = {**_values(span, until), **choice.values, "bytes": PAGE_BYTES_MAX}
        page, size = choice.page(PAGE, span), choice.page(SIZE, span)
        requested, limit = limit, min(limit, self._limit)
        while True:
            values["limit"] = limit
            if limit == 1:
                values["bytes"] = 1 << 40  # one event is always returned, however large it is
            row = connection.exec_driver_sql(page, values).one()
            numbers, bodies, used, count, last, head, low_water = row
            found = 0 if count or limit == 1 else connection.exec_driver_sql(size, values).scalar_one()
            if found <= PAGE_BYTES_MAX:
                break
            limit = self._limit = max(1, limit * PAGE_BYTES_MAX // (2 * found))
        if count * 2 >= limit and len(bodies or b"") * 4 < PAGE_BYTES_MAX:
            self._limit = max(self._limit, min(requested, limit * 4))
        low_water = int(low_water)
        if span.after < low_water:
            raise LogTrimmed(span.after, low_water)
        ids = _ids(used)
        names, unwanted = self._keys.learn(connection, ids), set[int]()
        if choice.match is not None:
            names = {id_: names[id_] for id_ in ids if id_ in names}
            unwanted = {id_ for id_, name in names.items() if name not in choice.match}
            names = {id_: name for id_, name in names.items() if id_ not in unwanted}
        covered = last if count >= limit else max(span.after, min(until, head))
        return _CountedPage(numbers, bodies or b"", covered, low_water, names, unwanted, span.after, count / limit)


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
        names: dict[int, str],
        unwanted: set[int],
        after: int,
        filled: float,
    ) -> None:
        super().__init__(numbers, bodies, covered, low_water, names.get, unwanted)
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


def _last_at(connection: Connection, time_ns: int) -> int:
    """Return an offset after which no event was published at or before a time."""
    tail = connection.exec_driver_sql(
        f"SELECT max(offset) FROM events WHERE offset > {SEALED_UNTIL} AND published_at <= ?", (time_ns,)
    ).scalar()
    if tail is not None:
        return int(tail)
    block = connection.exec_driver_sql("SELECT max(block) FROM blocks WHERE published_min <= ?", (time_ns,)).scalar()
    return -1 if block is None else int(block) * BLOCK + BLOCK - 1
