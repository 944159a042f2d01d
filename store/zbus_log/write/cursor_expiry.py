"""Expiry of cursors: when each durable name was last in use, and which ones expired because nothing used them.

An expired cursor stays in its file, so that a subscriber that comes back receives an error rather than a
silent gap. Retention no longer waits for it.
"""

from __future__ import annotations

from sqlalchemy import INTEGER, TEXT, Column, Connection, MetaData, Table, delete, select
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.schema import CreateTable

from zbus_log.file.database import read_table

_uses = Table(  # beside the cursors; a name without a row was last used when its position was stored
    "cursor_uses",
    MetaData(),
    Column("name", TEXT, primary_key=True),
    Column("used_at", INTEGER, nullable=False),
    Column("expired_at", INTEGER),
    sqlite_strict=True,
)


def prepare_uses(connection: Connection) -> None:
    """Create the table if the file does not have it."""
    connection.execute(CreateTable(_uses, if_not_exists=True))


def note_use(connection: Connection, name: str, now_ns: int) -> None:
    """Store that a name is in use, and that it is not expired."""
    values = {"used_at": now_ns, "expired_at": None}
    insert = upsert(_uses).values(name=name, **values)
    connection.execute(insert.on_conflict_do_update(index_elements=["name"], set_=values))


def expire(connection: Connection, name: str, now_ns: int) -> None:
    """Store that a name expired."""
    insert = upsert(_uses).values(name=name, used_at=0, expired_at=now_ns)
    connection.execute(insert.on_conflict_do_update(index_elements=["name"], set_={"expired_at": now_ns}))


def forget_use(connection: Connection, name: str) -> None:
    """Forget a name."""
    connection.execute(delete(_uses).where(_uses.c.name == name))


def uses(connection: Connection) -> dict[str, tuple[int, int | None]]:
    """Return when each name was last used, and when it expired."""
    return {row.name: (row.used_at, row.expired_at) for row in read_table(connection, _uses)}


def get_expired_at(connection: Connection, name: str) -> int | None:
    """Return when a name expired; None if it did not."""
    return connection.execute(select(_uses.c.expired_at).where(_uses.c.name == name)).scalar()
