"""Moving and forgetting cursors: what an operator does with a reader that is to start again, or is gone."""

from __future__ import annotations

from typing import Any

import zbus
from zbus.introspection import of
from zbus_web.http.http_errors import HttpError

UNCHANGED = "No position was changed"


async def reset_cursor(bus: zbus.Bus, name: str, offset: int) -> dict[str, Any]:
    """Let a durable name go on after `offset`; returns how far it is. Raises `HttpError`, or `CursorError` in use."""
    reader = of(bus).reader
    log = reader.required("a cursor")
    await _check_known(bus, name)
    head = await bus.head()
    if not 0 <= offset <= head:
        reason = f"offset {offset} is not from 0 to {head}, the head of the log"
        raise HttpError(422, "offset_invalid", reason, UNCHANGED)
    await reader.run(log.cursors.reset, name, offset)
    return {"name": name, "offset": offset, "lag": log.count(offset, head)}


async def delete_cursor(bus: zbus.Bus, name: str) -> None:
    """Forget a durable name. Raises `HttpError`, or `CursorError` while it is in use."""
    reader = of(bus).reader
    log = reader.required("a cursor")
    await _check_known(bus, name)
    await reader.run(log.cursors.delete, name)


async def _check_known(bus: zbus.Bus, name: str) -> None:
    if all(each.name != name for each in await of(bus).positions()):
        raise HttpError(404, "cursor_unknown", f"there is no cursor {name[:200]!r}", UNCHANGED)
