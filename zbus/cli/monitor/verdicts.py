"""Whether payloads fit the schemas that are registered in a log: told beside an event, and nothing is held back."""

from __future__ import annotations

import time
from typing import Any

import zbus
from zbus.cli.render.output import note
from zbus.errors import ConfigInvalid
from zbus.event import Event
from zbus.schema.validators import Validators, make_validators

LOOK_EVERY_S = 2.0  # schemas are seldom registered while somebody looks


class SchemaChecker:
    """The schemas of a bus that itself checks nothing; looked up again now and then."""

    def __init__(self, bus: zbus.Bus) -> None:
        self._bus = bus
        self._looked_at = -LOOK_EVERY_S
        self._known: Any = None
        self._checks: Validators | None = None

    async def look(self) -> None:
        """Read the schemas again, if it is time."""
        now = time.monotonic()
        if self._bus.config.log is None or now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        await self._bus.schemas.load()
        found = self._bus.schemas.list()
        if found == self._known:
            return
        self._known = found
        try:
            self._checks = make_validators(found, lambda name, events: None)
        except ConfigInvalid as error:
            self._checks = None
            note(f"zbus: payloads are not checked: {error}")

    def of(self, event: Event) -> dict[str, Any] | None:
        """Which schema speaks for an event and whether it fits; None where there is none for its key."""
        if self._checks is None or not (held_to := self._checks[event.key]):
            return None
        found = self._checks.first_reason(event.key, event.payload)
        schema, reason = (held_to[0].schema, None) if found is None else found
        told = {"expression": schema.expression, "version": schema.version, "valid": found is None}
        return told if reason is None else told | {"reason": reason}
