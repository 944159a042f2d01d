"""Pages of a log file as Arrow batches, read with ADBC in short transactions while the owner may write.

Each page is read completely before it is passed on, so even if Spark is slow, no transaction stays open and the
write-ahead log is never pinned. Each page checks the low-water mark in its own transaction: if retention has removed a
part of the page, that is an error rather than fewer rows.

ADBC includes its own copy of SQLite. Two copies in one process undo each other's locks on a file, so the one that
plans (apsw) and the one that reads never open the log in the same process: Spark uses a process for each.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import adbc_driver_manager
import adbc_driver_sqlite
import pyarrow as pa
from adbc_driver_manager import AdbcConnection, AdbcDatabase, AdbcStatement

from zbus.errors import EventCorrupt, LogError, LogTrimmed
from zbus.keys import KeySet
from zbus.ports.log import Span
from zbus_log.file.removed import gaps_between
from zbus_log.file.tables import LINEAGE_SINCE
from zbus_log.read.reader import Choice, SqliteReader, readable

from .columns import PAYLOAD_BYTES, Columns

PAGE_ROWS = 20_000
PAGE_BYTES = 16 * 1024 * 1024
BUSY_MS = 10_000
BATCH_ROWS = (64, PAGE_ROWS)  # initial and largest: the number of rows is chosen before their size is known
_SQL = {
    # ADBC infers a column's type from its first rows, so they must not be NULL.
    "headers": "ifnull(events.headers, x'') AS headers",
    # SQLite returns a blob's length without reading it.
    PAYLOAD_BYTES: f"length(events.payload) AS {PAYLOAD_BYTES}",
}


def plan(path: str, keys: KeySet, span: Span) -> tuple[Span, Choice]:
    """Return the offsets of a span's times in the file, and the query for the events of `keys`."""
    with opened(path) as log:
        return log.narrow(span), log.choose(keys)


def bounds(path: str) -> tuple[int, int]:
    """Return the low-water mark and the head of the file."""
    with opened(path) as log:
        return log.low_water(), log.head()


def holds(path: str, span: Span) -> bool:
    """Return whether the file has any event of a span."""
    with opened(path) as log:
        span = log.narrow(span)
        while span.until is not None and span.after < span.until:
            page = log.read(KeySet.all(), span, 1)
            events, failed, _ = page.events()
            if events or failed:
                return True
            span = span._replace(after=page.covered)
    return False


@contextmanager
def opened(path: str) -> Iterator[SqliteReader]:
    """Open a log file for reading."""
    engine = readable(path)
    try:
        yield SqliteReader(path, engine)
    finally:
        engine.dispose()


def batches(
    path: str, choice: Choice, span: Span, columns: Columns, fail_on_data_loss: bool
) -> Iterator[pa.RecordBatch]:
    """Yield all events of a planned span in order, in batches with the requested columns.

    Raises `LogTrimmed` if retention removed a part of the span, and `EventCorrupt` if an event is missing from a read
    of all keys, unless `fail_on_data_loss` is False.
    """
    assert span.until is not None
    until = span.until
    _check_not_open(path)
    with _adbc_errors(path), _connected(path) as connection:
        names, rows = _KeyNames(connection), BATCH_ROWS[0]
        while span.after < until:
            page, low_water, rows = _page(connection, choice, span, columns.stored, rows)
            if low_water > span.after:
                if fail_on_data_loss:
                    raise LogTrimmed(span.after, low_water)
                span = span._replace(after=low_water)
                continue
            covered = int(page[-1].column("offset")[-1].as_py()) if page else until
            if fail_on_data_loss and choice.is_everything and span.from_ns is None and span.to_ns is None:
                _check_complete(connection, page, span.after, covered)
            for batch in page:
                yield columns.batch(batch, names)
            if not page:
                return
            span = span._replace(after=covered)


def _check_complete(connection: AdbcConnection, page: list[pa.RecordBatch], after: int, covered: int) -> None:
    """Raise `EventCorrupt` if a page of all events lacks one that was neither removed nor accepted as lost."""
    if sum(batch.num_rows for batch in page) == covered - after:
        return
    explained: list[tuple[int, int]] = []
    with _query(connection, "PRAGMA user_version") as found:
        version = int(next(found).column(0)[0].as_py())
    for table in ("losses", "removed") if version >= LINEAGE_SINCE else ("losses",):
        # A damaged row of `removed`, without a checksum for each offset, explains nothing.
        sound = " AND length(leaves) = 4 * (last - first + 1)" if table == "removed" else ""
        sql = f"SELECT first, last FROM {table} WHERE first <= {covered} AND last > {after}{sound}"
        with _query(connection, sql, BATCH_ROWS[1]) as found:
            explained += [(row["first"], row["last"]) for batch in found for row in batch.to_pylist()]
    offsets = [offset for batch in page for offset in batch.column("offset").to_pylist()]
    missing = gaps_between(after, offsets, covered, explained)
    with _query(connection, "SELECT low_water FROM state") as found:  # what it has passed is not listed any more
        low_water = int(next(found).column(0)[0].as_py())
    missing = [each for each in missing if each[1] > low_water]
    if missing:
        raise EventCorrupt(missing[0][0], "it is missing")


def _check_not_open(path: str) -> None:
    """Raise `LogError` if another copy of SQLite in this process has the file open."""
    file = os.stat(path)  # noqa: PTH116 - as the descriptors
    for descriptor in Path("/dev/fd").iterdir():
        with suppress(OSError, ValueError):
            if os.path.samestat(file, os.fstat(int(descriptor.name))):
                raise LogError(f"{path} is open in this process: read it with Spark or in another process")


class _KeyNames:
    """The names of keys by id, looked up when they are first needed."""

    def __init__(self, connection: AdbcConnection) -> None:
        self._connection, self._known = connection, dict[int, str]()

    def __call__(self, ids: Iterable[int]) -> Mapping[int, str]:
        if unknown := [id_ for id_ in ids if id_ not in self._known]:
            id_list = ", ".join(map(str, unknown))
            with _query(self._connection, f"SELECT id, key FROM keys WHERE id IN ({id_list})", BATCH_ROWS[1]) as found:
                for batch in found:
                    self._known.update(zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True))
        return self._known


@contextmanager
def _connected(path: str) -> Iterator[AdbcConnection]:
    """Open an ADBC connection without its DB-API module, which would import pandas in every Spark worker."""
    # Read-only by its URI: a connection that can write would checkpoint the write-ahead log when it closes.
    uri = f"file:{quote(str(Path(path).absolute()))}?mode=ro"
    with AdbcDatabase(driver=adbc_driver_sqlite._driver_path(), uri=uri) as database:
        with AdbcConnection(database) as connection:
            # A process that opens or closes the log locks it exclusively for a moment.
            with _query(connection, f"PRAGMA busy_timeout={BUSY_MS}"):
                pass
            yield connection


def _page(
    connection: AdbcConnection, choice: Choice, span: Span, stored: list[str], rows: int
) -> tuple[list[pa.RecordBatch], int, int]:
    """Read a page after `span.after` in one transaction.

    Returns its batches, the low-water mark, and the number of rows to fetch at a time for the next page.
    """
    columns_sql = ", ".join(["events.offset", *[_SQL.get(each, f"events.{each}") for each in stored]])
    found: list[pa.RecordBatch] = []
    size = count = 0
    with _query(connection, "BEGIN"):
        pass
    try:
        with _query(connection, "SELECT low_water FROM state") as state:
            low_water = int(next(state).column(0)[0].as_py())
        with _query(connection, choice.sql(columns_sql, span, min(PAGE_ROWS, rows * 16)), rows) as batches_:
            for batch in batches_:
                if batch.num_rows:
                    found.append(batch)
                    size += batch.nbytes
                    count += batch.num_rows
                    if size >= PAGE_BYTES:
                        break
    finally:
        with _query(connection, "ROLLBACK"):
            pass
    if count:
        rows = max(1, min(BATCH_ROWS[1], rows * 16, PAGE_BYTES * count // (2 * size)))
    return found, low_water, rows


@contextmanager
def _query(connection: AdbcConnection, sql: str, rows: int = 1) -> Iterator[pa.RecordBatchReader]:
    """Run a statement and yield its result in batches of `rows` rows."""
    with AdbcStatement(connection) as statement:
        statement.set_options(**{adbc_driver_sqlite.StatementOptions.BATCH_ROWS.value: str(rows)})
        statement.set_sql_query(sql)
        stream, _ = statement.execute_query()
        with pa.RecordBatchReader.from_stream(stream) as reader:
            yield reader


@contextmanager
def _adbc_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (adbc_driver_manager.Error, pa.ArrowException, OSError) as error:  # within a page, Arrow raises them
        raise LogError(f"{path}: {error}. This read changed nothing") from error
