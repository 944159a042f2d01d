"""zbus: one event bus for an application, a fleet, and the brokers it already has.

    async with zbus.open("app.db") as bus:
        publisher = await bus.publisher("shop/orders/created")
        offset = await publisher.publish({"id": 1})

This module is the list of what users may import; nothing else is public.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .bus import Bus, open  # noqa: A004 - zbus.open reads best
from .errors import (
    BusClosed,
    ConfigInvalid,
    CursorError,
    EventCorrupt,
    EventInvalid,
    EventTooLarge,
    FabricError,
    FabricLacks,
    HandlerFailed,
    KeyInvalid,
    LogDamaged,
    LogError,
    LogFull,
    LogMissing,
    LogOwned,
    LogReadOnly,
    LogStopped,
    LogTrimmed,
    NobodyAnswers,
    PayloadInvalid,
    RequestError,
    RequestTimeout,
    SchemaConflict,
    SchemaError,
    SchemaInvalid,
    SubscriberLagged,
    ZbusError,
)
from .event import Event
from .ports import Schema
from .publisher import EventPublisher
from .replay import Replay
from .scope import Scope
from .subscriber import EventSubscriber

if TYPE_CHECKING:
    from . import blocking as blocking
    from .bridge import Bridge
    from .config import BusConfig

__version__ = "0.1.0"
__all__ = [
    "Bridge",
    "Bus",
    "BusClosed",
    "BusConfig",
    "ConfigInvalid",
    "CursorError",
    "Event",
    "EventCorrupt",
    "EventInvalid",
    "EventPublisher",
    "EventSubscriber",
    "EventTooLarge",
    "FabricError",
    "FabricLacks",
    "HandlerFailed",
    "KeyInvalid",
    "LogDamaged",
    "LogError",
    "LogFull",
    "LogMissing",
    "LogOwned",
    "LogReadOnly",
    "LogStopped",
    "LogTrimmed",
    "NobodyAnswers",
    "PayloadInvalid",
    "Replay",
    "RequestError",
    "RequestTimeout",
    "Schema",
    "SchemaConflict",
    "SchemaError",
    "SchemaInvalid",
    "Scope",
    "SubscriberLagged",
    "ZbusError",
    "blocking",
    "open",
]


def __getattr__(name: str) -> Any:
    """Load what is seldom needed, or slow to import, when it is asked for."""
    import importlib

    if name == "BusConfig":
        return importlib.import_module(".config", __name__).BusConfig
    if name == "Bridge":
        return importlib.import_module(".bridge", __name__).Bridge
    if name == "blocking":
        return importlib.import_module(".blocking", __name__)
    raise AttributeError(f"module 'zbus' has no attribute {name!r}")
