"""Structured records of what the bus does, through logging: a name, and fields.

A record is one line of the logger `zbus`, `NAME key=value …`, and carries the same as
`record.zbus` for handlers that want the fields.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("zbus")

BUS_STARTED = "BUS_STARTED"
BUS_STOPPED = "BUS_STOPPED"
EVENT_DROPPED = "EVENT_DROPPED"
EVENT_RETRY = "EVENT_RETRY"
EVENT_GAP = "EVENT_GAP"
EVENT_INVALID = "EVENT_INVALID"
EVENT_INVALID_SCHEMA = "EVENT_INVALID_SCHEMA"
EVENT_SUBSCRIBER_SLOW = "EVENT_SUBSCRIBER_SLOW"
FABRIC_CONNECTED = "FABRIC_CONNECTED"
FABRIC_CONNECT_FAILED = "FABRIC_CONNECT_FAILED"
FABRIC_DISCONNECTED = "FABRIC_DISCONNECTED"
FABRIC_RECONNECTED = "FABRIC_RECONNECTED"
FABRIC_DENIED = "FABRIC_DENIED"
FABRIC_DISCOVERY_FAILED = "FABRIC_DISCOVERY_FAILED"
FABRIC_INPUT_REFUSED = "FABRIC_INPUT_REFUSED"
FABRIC_ERROR = "FABRIC_ERROR"


def record(name: str, level: int = logging.INFO, exc_info: BaseException | None = None, **fields: Any) -> None:
    """Write one record, if anybody listens."""
    if logger.isEnabledFor(level):
        text = " ".join(f"{field}={value!r}" for field, value in fields.items())
        logger.log(level, "%s %s", name, text, exc_info=exc_info, extra={"zbus": {"record": name, **fields}})
