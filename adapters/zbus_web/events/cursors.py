"""Operations on cursors: move or delete the stored position of a durable subscription."""

from __future__ import annotations

from typing import Any

import zbus
from zbus.introspection import of
from zbus_web.http.http_errors import HttpError

UNCHANGED = "No position was changed"


async def reset_cursor(bus: zbus.Bus, name: str, offset: int) -> dict[str, Any]:
    """Move a cursor to `offset` and return its new state.

    Raises `HttpError` if the cursor or the offset does not exist, and `CursorError` if the cursor is in use.
    """
    reader = of(bus).reader
    log = reader.required("a cursor")
    await _check_known(bus, name)
    head = await bus.head()
    if not 0 <= offset <= head:
        message = f"offset {offset} is not between 0 and {head}, the head of the log"
        raise HttpError(422, "invalid_offset", message, UNCHANGED)
    await reader.run(log.cursors.reset, name, offset)
    return {"name": name, "offset": offset, "lag": log.count(offset, head)}


async def delete_cursor(bus: zbus.Bus, name: str) -> None:
    """Delete a cursor. Raises `HttpError` if it does not exist, and `CursorError` if it is in use."""
    reader = of(bus).reader
    log = reader.required("a cursor")
    await _check_known(bus, name)
    await reader.run(log.cursors.delete, name)


async def _check_known(bus: zbus.Bus, name: str) -> None:
    if all(each.name != name for each in await of(bus).positions()):
        raise HttpError(404, "unknown_cursor", f"cursor {name[:200]!r} does not exist", UNCHANGED)
