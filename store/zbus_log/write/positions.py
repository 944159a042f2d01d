"""Positions of this node in the logs of other nodes, by name, in the cursor file beside the log."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from sqlalchemy import INTEGER, TEXT, Column, Connection, Engine, MetaData, Table, bindparam, delete, select
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.schema import CreateTable

from zbus_log.file.database import SharedWrites, log_errors

if TYPE_CHECKING:
    from zbus.ports.log import Positions

_positions = Table(
    "positions",
    MetaData(),
    Column("name", TEXT, primary_key=True),
    Column("position", INTEGER, nullable=False),
    sqlite_strict=True,
)


class SqlitePositions:
    """The `Positions` of one log. All methods may block."""

    def __init__(self, path: str, engine: Engine, writes: SharedWrites) -> None:
        self._path, self._engine, self._writes = path, engine, writes

    def load(self) -> dict[str, int]:
        """Return all positions by name."""
        with log_errors(self._path), self._engine.connect() as connection:
            _prepare(connection)
            return {row.name: row.position for row in connection.execute(select(_positions))}

    def store(self, changed: Mapping[str, int]) -> None:
        """Store the given positions; others stay as they are."""
        values = [{"name": name, "position": position} for name, position in changed.items()]
        insert = upsert(_positions)
        statement = insert.on_conflict_do_update(index_elements=["name"], set_={"position": insert.excluded.position})
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
    connection.exec_driver_sql("PRAGMA journal_mode=WAL")
    connection.execute(CreateTable(_positions, if_not_exists=True))


if TYPE_CHECKING:
    _port: type[Positions] = SqlitePositions
