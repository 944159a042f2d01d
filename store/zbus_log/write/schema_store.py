"""The schemas registered for a log: a small table in its file that keeps every version.

They are in the log's own file, so that a copy of the log includes the schemas of its payloads. The writer stores them
between commits; every process that can read the log can read them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import Engine, select

from zbus.errors import LogDamaged, LogError, LogReadOnly
from zbus.ports.log import Schema
from zbus_log.file.database import log_errors
from zbus_log.file.tables import SCHEMAS_SINCE, file_version, schemas

if TYPE_CHECKING:
    from zbus.ports.log import SchemaStore

    from .writer import Writer

WAIT_S = 0.1


class SqliteSchemas:
    """The `SchemaStore` of one log. Both methods block. `writer` is None if the log is read-only."""

    def __init__(self, path: str, engine: Engine, writer: Writer | None, closed: threading.Event) -> None:
        self._path, self._engine, self._writer, self._closed = path, engine, writer, closed

    def load(self) -> Sequence[Schema]:
        """Return every version, by expression; none if the file is from before schemas were introduced."""
        with log_errors(self._path), self._engine.connect() as connection:
            if file_version(connection) < SCHEMAS_SINCE:
                return []
            rows = connection.execute(select(schemas).order_by(schemas.c.expression, schemas.c.version)).all()
        return [self._decode(row) for row in rows]

    def store(self, schema: Schema) -> None:
        """Store one version; it is durable when this returns. Raises a `LogError` if it is not stored."""
        writer = self._writer
        if writer is None:
            raise LogReadOnly(self._path)
        values = schema._asdict() | {"schema": json.dumps(schema.schema, ensure_ascii=False)}
        values["registered_at"] = values.pop("registered_at_ns")
        done = threading.Event()
        failed: list[BaseException] = []

        def insert() -> None:
            try:
                with log_errors(self._path, writing=True):
                    writer.check_running()
                    writer.connection.execute(schemas.insert().values(values))
            except BaseException as error:
                failed.append(error)
                raise
            finally:
                done.set()

        writer.run(insert)
        while not done.wait(WAIT_S):
            if self._closed.is_set():
                raise LogError(f"{self._path} was closed; the schema of {schema.expression!r} may not be registered")
        if failed:
            raise failed[0]

    def _decode(self, row: Any) -> Schema:
        try:
            schema = cast("dict[str, Any]", json.loads(row.schema))
        except ValueError as error:
            reason = f"version {row.version} of the schema of {row.expression!r} is not JSON ({error})"
            raise LogDamaged(self._path, reason) from error
        return Schema(row.expression, row.version, row.mode, row.hash, schema, row.registered_at)


if TYPE_CHECKING:
    _port: type[SchemaStore] = SqliteSchemas
