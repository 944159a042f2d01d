"""Schema validation in `zbus monitor`. The result is shown with the event; invalid events are shown too."""

from __future__ import annotations

from typing import Any

import zbus
from zbus.cli.render.output import note
from zbus.errors import ConfigInvalid
from zbus.event import Event
from zbus.observe.throttle import Throttle
from zbus.schema.validators import Validators, make_validators
from zbus.util.runtime import REAL

LOOK_EVERY_S = 2.0  # schemas are seldom registered during a `zbus monitor`


class SchemaChecker:
    """Validates events against the schemas of a log, whose bus does not validate. It reloads them periodically."""

    def __init__(self, bus: zbus.Bus) -> None:
        self._bus = bus
        self._looks = Throttle(LOOK_EVERY_S)
        self._known: Any = None
        self._checks: Validators | None = None

    async def look(self) -> None:
        """Reload the schemas if `LOOK_EVERY_S` seconds have passed."""
        if self._bus.config.log is None or not self._looks.due():
            return
        await self._bus.schemas.load()
        found = self._bus.schemas.list()
        if found == self._known:
            return
        self._known = found
        try:
            self._checks = make_validators(found, lambda name, events: None, REAL)
        except ConfigInvalid as error:
            self._checks = None
            note(f"zbus: payloads are not validated: {error}")

    def of(self, event: Event) -> dict[str, Any] | None:
        """Return the schema of an event and whether its payload is valid, or None if its key has no schema."""
        if self._checks is None or not (schemas := self._checks[event.key]):
            return None
        found = self._checks.first_reason(event.key, event.payload)
        schema, reason = (schemas[0].schema, None) if found is None else found
        verdict = {"expression": schema.expression, "version": schema.version, "valid": found is None}
        return verdict if reason is None else verdict | {"reason": reason}
