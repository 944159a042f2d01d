"""Positions of this node in the logs of other nodes, by name, in the cursor file beside the log."""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import INTEGER, TEXT, Column, Connection, Engine, MetaData, Row, Table, bindparam, delete
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.schema import CreateTable

from zbus.errors import LogDamaged
from zbus_log.file.database import SharedWrites, columns_of, log_errors, read_table, transaction, use_wal

if TYPE_CHECKING:
    from zbus.ports.log import Positions

_positions = Table(
    "positions",
    MetaData(),
    Column("name", TEXT, primary_key=True),
    Column("position", INTEGER, nullable=False),
    Column("checksum", INTEGER),  # of both; NULL if version 0.1 stored it
    sqlite_strict=True,
)
NAMED_MAX = 5  # in an error


class PositionsDamaged(LogDamaged):
    """Raised when stored positions do not match their checksums. The log is not affected."""

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.reason}. Nothing was changed, and the log is not affected. A bus that opens the log "
            "removes them, and requests the events of other nodes again"
        )


class SqlitePositions:
    """The `Positions` of one log. All methods may block."""

    def __init__(self, path: str, engine: Engine, writes: SharedWrites) -> None:
        self._path, self._engine, self._writes = path, engine, writes

    def load(self) -> dict[str, int]:
        """Return all positions by name. Raises `LogDamaged` if one does not match its checksum."""
        rows = self._rows()
        if damaged := [str(row.name) for row in rows if not _is_whole(row)]:
            more = f" and {len(damaged) - NAMED_MAX} more" if len(damaged) > NAMED_MAX else ""
            raise PositionsDamaged(self._path, f"these positions are damaged: {', '.join(damaged[:NAMED_MAX])}{more}")
        return {row.name: row.position for row in rows}

    def repair(self) -> Sequence[str]:
        """Remove the damaged positions. Returns their names."""
        damaged = [row.name for row in self._rows() if not _is_whole(row)]
        if damaged:
            self.remove(damaged)
        return damaged

    def _rows(self) -> Sequence[Row[Any]]:
        if not os.path.exists(self._path):  # noqa: PTH110 - connecting would make an empty file
            return []
        with log_errors(self._path), self._engine.connect() as connection:
            return read_table(connection, _positions)

    def store(self, changed: Mapping[str, int]) -> None:
        """Store the given positions; others stay as they are."""
        values = [
            {"name": name, "position": position, "checksum": _checksum(name, position)}
            for name, position in changed.items()
        ]
        insert = upsert(_positions)
        stored = {"position": insert.excluded.position, "checksum": insert.excluded.checksum}
        statement = insert.on_conflict_do_update(index_elements=["name"], set_=stored)
        with log_errors(self._path), self._engine.connect() as connection:
            _prepare(connection)
            with self._writes.transaction(connection):
                connection.execute(statement, values)

    def remove(self, names: Collection[str]) -> None:
        """Remove positions. Names that do not exist have no effect."""
        statement = delete(_positions).where(_positions.c.name == bindparam("gone"))
        with log_errors(self._path), self._engine.connect() as connection:
            _prepare(connection)
            with self._writes.transaction(connection):
                connection.execute(statement, [{"gone": name} for name in names])


def _prepare(connection: Connection) -> None:
    use_wal(connection)
    connection.execute(CreateTable(_positions, if_not_exists=True))
    if "checksum" not in columns_of(connection, _positions):
        with transaction(connection):
            # Another process may have added the column in the meantime.
            if "checksum" not in columns_of(connection, _positions):
                connection.exec_driver_sql("ALTER TABLE positions ADD COLUMN checksum INTEGER")


def _checksum(name: str, position: int) -> int:
    return zlib.crc32(f"{name} {position}".encode())


def _is_whole(row: Row[Any]) -> bool:
    return row.checksum is None or row.checksum == _checksum(row.name, row.position)


if TYPE_CHECKING:
    _port: type[Positions] = SqlitePositions
