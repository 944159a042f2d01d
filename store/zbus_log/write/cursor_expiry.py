"""Expiry of cursors: when each durable name was last in use, and which ones expired because nothing used them.

An expired cursor stays in its file, so that a subscriber that comes back receives an error rather than a
silent gap. Retention no longer waits for it.
"""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import INTEGER, TEXT, Column, Connection, MetaData, Table, delete, select
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.schema import CreateTable

from zbus.errors import CursorError

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
    return {row.name: (row.used_at, row.expired_at) for row in connection.execute(select(_uses))}


def check_not_expired(connection: Connection, name: str, offset: int) -> None:
    """Raise `CursorError` if a name expired."""
    expired_at = connection.execute(select(_uses.c.expired_at).where(_uses.c.name == name)).scalar()
    if expired_at is not None:
        when = datetime.fromtimestamp(expired_at // 1_000_000_000, UTC).isoformat(timespec="seconds")
        raise CursorError(
            name,
            f"it expired at {when}, because it was not used for cursor_ttl_s; retention may have removed events after "
            f"its position, offset {offset}. To use it again, give it a position (zbus log cursors LOG --reset NAME "
            "--to OFFSET), or delete it to start like a new name (zbus log cursors LOG --delete NAME)",
        )
