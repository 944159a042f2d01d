"""The tables of the log, and the migrations of older files.

`events` is append-only: triggers reject updates, and deletes above the low-water mark, which retention
sets first, of offsets that are not in `removed`, which a removal from the middle writes first. It has
no secondary index, because an index by key or by publisher dirties a page per key at each commit; with
256 keys that made a commit three times as slow. Instead the writer seals every block of 4,096 offsets
once: it adds the block's events to `by_key`, the publishers' sequences to `runs` (both grow only at
their end, block by block), and the times and the digest of the block to `blocks`. The unsealed tail is
short enough to scan.

A row for each commit instead of each event was tried, with sealing, a checksum per event, reads by key
and retention. With 100-byte payloads it published twice and replayed three times as fast. But with
retention it published 1.1 times as fast, with 1 kB payloads it replayed 1.1 times as fast, and with
20,000 keys it published at 0.8 of the speed. It also needs rows that change, where these never do, and
damage to a row is damage to many events. So a row is an event.
"""

from __future__ import annotations

import secrets
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from sqlalchemy import BLOB, INTEGER, TEXT, Column, Connection, MetaData, Table, insert
from sqlalchemy.schema import CreateTable

from zbus.errors import LogDamaged

from .database import OTHER_FILE, PAGE_BYTES, transaction
from .event_view import CREATE_VIEW

BLOCK = 4096
# The last offset of the newest sealed block, or -1. Events after it are found only by a scan.
SEALED_UNTIL = f"(SELECT ifnull(max(block), -1) * {BLOCK} + {BLOCK - 1} FROM blocks)"

metadata = MetaData()

events = Table(
    "events",
    metadata,
    Column("offset", INTEGER, primary_key=True),
    Column("publisher", INTEGER, nullable=False),
    Column("sequence", INTEGER, nullable=False),
    Column("published_at", INTEGER, nullable=False),
    Column("key", INTEGER, nullable=False),
    Column("checksum", INTEGER, nullable=False),
    Column("headers", BLOB),
    Column("payload", BLOB, nullable=False),
    sqlite_strict=True,
)
keys = Table(
    "keys",
    metadata,
    Column("id", INTEGER, primary_key=True),
    Column("key", TEXT, nullable=False, unique=True),
    sqlite_strict=True,
)
by_key = Table(
    "by_key",
    metadata,
    Column("block", INTEGER, primary_key=True),
    Column("key", INTEGER, primary_key=True),
    Column("offsets", TEXT, nullable=False),  # a JSON array
    sqlite_strict=True,
    sqlite_with_rowid=False,
)
runs = Table(
    "runs",
    metadata,
    Column("block", INTEGER, primary_key=True),
    Column("publisher", INTEGER, primary_key=True),
    Column("first_sequence", INTEGER, nullable=False),
    Column("last_sequence", INTEGER, nullable=False),
    sqlite_strict=True,
    sqlite_with_rowid=False,
)
publishers = Table(
    "publishers",
    metadata,
    Column("id", INTEGER, primary_key=True),
    Column("publisher", INTEGER, nullable=False, unique=True),
    Column("first_block", INTEGER, nullable=False),
    Column("last_block", INTEGER, nullable=False),
    Column("last_sequence", INTEGER, nullable=False),
    sqlite_strict=True,
)
blocks = Table(
    "blocks",
    metadata,
    Column("block", INTEGER, primary_key=True),
    Column("events", INTEGER, nullable=False),
    Column("bytes", INTEGER, nullable=False),
    Column("published_min", INTEGER),
    Column("published_max", INTEGER),
    sqlite_strict=True,
)
losses = Table(
    "losses",
    metadata,
    Column("first", INTEGER, primary_key=True),
    Column("last", INTEGER, nullable=False),
    Column("found_at", INTEGER, nullable=False),
    sqlite_strict=True,
)
state = Table(  # one row
    "state",
    metadata,
    Column("epoch", BLOB, nullable=False),
    Column("low_water", INTEGER, nullable=False),
    sqlite_strict=True,
)

# Added in version 2, and so not in the metadata of version 1. Rows are never changed: each version is a new row.
schemas = Table(
    "schemas",
    MetaData(),
    Column("expression", TEXT, primary_key=True),
    Column("version", INTEGER, primary_key=True),
    Column("mode", TEXT, nullable=False),
    Column("hash", TEXT, nullable=False),
    Column("schema", TEXT, nullable=False),
    Column("registered_at", INTEGER, nullable=False),
    sqlite_strict=True,
    sqlite_with_rowid=False,
)

# Added in version 3, with columns of `blocks` and `state`.
incarnations = Table(
    "incarnations",
    MetaData(),
    Column("ordinal", INTEGER, primary_key=True),  # ascending, oldest first
    Column("id", INTEGER, nullable=False),
    Column("first", INTEGER, nullable=False),
    Column("started_at", INTEGER, nullable=False),
    Column("host", TEXT, nullable=False),
    sqlite_strict=True,
)
removed = Table(  # events that were removed from the middle of the log, or from an unsealed block: see `removed.py`
    "removed",
    MetaData(),
    Column("first", INTEGER, primary_key=True),
    Column("last", INTEGER, nullable=False),  # in the same block
    Column("leaves", BLOB, nullable=False),  # one checksum for each offset
    Column("checksum", INTEGER, nullable=False),
    sqlite_strict=True,
)
purges = Table(  # a row for each purge, added when it begins
    "purges",
    MetaData(),
    Column("id", INTEGER, primary_key=True),
    Column("started_at", INTEGER, nullable=False),
    Column("finished_at", INTEGER),
    Column("expressions", TEXT, nullable=False),  # a JSON array
    Column("until", INTEGER, nullable=False),  # the head when it began
    Column("events", INTEGER, nullable=False),  # removed so far
    sqlite_strict=True,
)
examined = Table(  # how far retention has come: see `key_retention.py` and `age_clock.py`
    "examined",
    MetaData(),
    Column("rule", TEXT, primary_key=True),
    Column("until", INTEGER, nullable=False),
    sqlite_strict=True,
    sqlite_with_rowid=False,
)
removed_identities = Table(  # see `write/removed_identities.py`
    "removed_identities",
    MetaData(),
    Column("publisher", INTEGER, primary_key=True),
    Column("first_sequence", INTEGER, primary_key=True),
    Column("last_sequence", INTEGER, nullable=False),
    Column("forget_at", INTEGER, nullable=False),
    sqlite_strict=True,
    sqlite_with_rowid=False,
)

_TRIGGERS = (
    "CREATE TRIGGER events_are_not_updated BEFORE UPDATE ON events "
    "BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END",
    "CREATE TRIGGER events_are_not_deleted BEFORE DELETE ON events "
    "WHEN OLD.offset > (SELECT low_water FROM state) "
    "BEGIN SELECT RAISE(ABORT, 'the log is append-only above its low-water mark'); END",
)
# For version 3. Rows of `removed` do not overlap, so the last one that begins at an offset or before it decides.
_DELETE_TRIGGER = (
    "CREATE TRIGGER events_are_not_deleted BEFORE DELETE ON events "
    "WHEN OLD.offset > (SELECT low_water FROM state) AND OLD.offset > "
    "ifnull((SELECT last FROM removed WHERE first <= OLD.offset ORDER BY first DESC LIMIT 1), 0) "
    "BEGIN SELECT RAISE(ABORT, 'the log is append-only above its low-water mark'); END"
)


def _create(connection: Connection) -> None:
    """Create all tables of version 1."""
    for table in metadata.sorted_tables:
        connection.execute(CreateTable(table))
    for trigger in _TRIGGERS:
        connection.exec_driver_sql(trigger)
    connection.execute(insert(state).values(epoch=secrets.token_bytes(16), low_water=0))


def _add_schemas(connection: Connection) -> None:
    """Add the table of schemas, for version 2."""
    connection.execute(CreateTable(schemas))


def _add_lineage(connection: Connection) -> None:
    """Add the incarnations, the digests, the removed identities and more checksums, for version 3.

    Earlier openings together are incarnation 0. Blocks that were sealed earlier have no digest and no checksums.
    """
    for table in (incarnations, removed, removed_identities, purges, examined):
        connection.execute(CreateTable(table))
    connection.exec_driver_sql("DROP TRIGGER events_are_not_deleted")
    connection.exec_driver_sql(_DELETE_TRIGGER)
    for column in ("digest BLOB", "index_checksum INTEGER", "checksum INTEGER"):
        connection.exec_driver_sql(f"ALTER TABLE blocks ADD COLUMN {column}")
    before = get_state(connection)
    for column in ("offloaded_until", "removals", "removed_until"):
        connection.exec_driver_sql(f"ALTER TABLE state ADD COLUMN {column} INTEGER NOT NULL DEFAULT 0")
    connection.exec_driver_sql("ALTER TABLE state ADD COLUMN checksum INTEGER")
    connection.exec_driver_sql("UPDATE state SET checksum = ?", (before.checksum,))
    connection.exec_driver_sql("INSERT INTO incarnations VALUES (0, 0, 1, 0, '')")


def _add_view(connection: Connection) -> None:
    """Add the view for other programs, for version 4."""
    connection.exec_driver_sql(CREATE_VIEW)


# MIGRATIONS[n] upgrades a file from version n to n + 1. Never change a released migration: add another one.
MIGRATIONS: tuple[Callable[[Connection], None], ...] = (_create, _add_schemas, _add_lineage, _add_view)
VERSION = len(MIGRATIONS)
SCHEMAS_SINCE = 2
LINEAGE_SINCE = 3
VIEW_SINCE = 4
# The oldest version that can be read without a migration: its events have the same format.
READABLE_SINCE = 1


def check_is_log(connection: Connection, path: str) -> int:
    """Return the version of the file. Raises `LogDamaged` if it is not a zbus log, or is from a newer zbus."""
    version = file_version(connection)
    if version == 0 and connection.exec_driver_sql("SELECT count(*) FROM sqlite_schema").scalar_one():
        raise LogDamaged(path, "this is a SQLite database, but not a zbus log or backup", advice=OTHER_FILE)
    if version > VERSION:
        reason = f"the log has version {version}, but this zbus supports up to {VERSION}"
        raise LogDamaged(path, reason, advice="To open it, upgrade zbus")
    return version


def prepare(connection: Connection, path: str) -> None:
    """Create the tables, or migrate the file to the current version. Raises `LogDamaged` if it is newer."""
    version = check_is_log(connection, path)
    if version == 0:
        connection.exec_driver_sql(f"PRAGMA page_size={PAGE_BYTES}")
        connection.exec_driver_sql("PRAGMA auto_vacuum=INCREMENTAL")
    if connection.exec_driver_sql("PRAGMA journal_mode=WAL").scalar_one() != "wal":
        raise LogDamaged(path, "this file system does not support a write-ahead log")
    if version == 0:
        with transaction(connection):
            for migration in MIGRATIONS:
                migration(connection)
            connection.exec_driver_sql("DELETE FROM incarnations")  # no earlier version has opened it
            connection.exec_driver_sql(f"PRAGMA user_version={VERSION}")
        return
    for migration in MIGRATIONS[version:]:
        with transaction(connection):
            migration(connection)
            version += 1
            connection.exec_driver_sql(f"PRAGMA user_version={version}")


def file_version(connection: Connection) -> int:
    """Return the version of the file."""
    return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())


class State(NamedTuple):
    """The row of `state`. Its checksum keeps a wrong low-water mark from hiding events."""

    epoch: bytes
    low_water: int
    offloaded_until: int = 0  # the last offset that was removed because the cold tier has it
    removals: int = 0  # how often events were removed from the middle
    removed_until: int = 0  # the highest offset that was removed from the middle

    @property
    def checksum(self) -> int:
        """The checksum that is stored with it."""
        return zlib.crc32(self.epoch + struct.pack("<qqqq", *self[1:]))


def get_state(connection: Connection) -> State:
    """Return the state. Raises `LogDamaged` if it does not match its checksum."""
    row: Any = connection.exec_driver_sql("SELECT * FROM state").first()
    try:
        is_old = len(row) == 2
        found = State(bytes(row[0]), *[int(each) for each in (row[1:] if is_old else row[1:5])])
        if is_old or row[5] == found.checksum:
            return found
    except (TypeError, ValueError, struct.error):
        pass
    raise LogDamaged(_path_of(connection), "the row of its table `state` is damaged")


def set_state(connection: Connection, **changed: Any) -> None:
    """Change the state. Call it in a transaction."""
    found = get_state(connection)._replace(**changed)
    connection.exec_driver_sql(
        "UPDATE state SET epoch = ?, low_water = ?, offloaded_until = ?, removals = ?, removed_until = ?, checksum = ?",
        (*found, found.checksum),
    )


def _path_of(connection: Connection) -> str:
    driver: Any = connection.connection.dbapi_connection
    return str(driver.path)


def get_epoch(connection: Connection) -> bytes:
    """Return the epoch: the identity of this log's offsets."""
    return get_state(connection).epoch


def origin_of(epoch: bytes) -> int:
    """Return the id of a log among nodes: an odd number of at most 62 bits."""
    return int.from_bytes(epoch[:8]) >> 2 | 1


def set_epoch(connection: Connection, epoch: bytes) -> None:
    """Start a new epoch, after a loss."""
    set_state(connection, epoch=epoch)


def get_low_water(connection: Connection) -> int:
    """Return the offset up to which retention removed every event."""
    return get_state(connection).low_water


def get_head(connection: Connection) -> int:
    """Return the last committed offset, even if its event was removed; 0 for a new log."""
    newest = connection.exec_driver_sql("SELECT max(offset) FROM events").scalar_one()
    found = get_state(connection)
    return max(newest or 0, found.low_water, found.removed_until)
