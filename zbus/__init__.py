"""zbus: one event bus for an application, a fleet, and the brokers it already has.

    async with zbus.open("app.db") as bus:
        publisher = await bus.publisher("shop/orders/created")
        offset = await publisher.publish({"id": 1})

`__all__` of this module lists the public names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .bus import Bus, open  # noqa: A004 - zbus.open reads best
from .deliver.replay import Replay
from .deliver.subscriber import EventSubscriber
from .errors import (
    BusClosed,
    ConfigInvalid,
    CursorError,
    EventCorrupt,
    EventInvalid,
    EventTooLarge,
    HandlerFailed,
    IdentityConflict,
    KeyInvalid,
    LogDamaged,
    LogError,
    LogFull,
    LogLocked,
    LogReadOnly,
    LogRequired,
    LogTrimmed,
    LogWriterFailed,
    NoResponders,
    PayloadInvalid,
    RequestError,
    RequestTimeout,
    SchemaConflict,
    SchemaError,
    SchemaInvalid,
    SessionTokenInvalid,
    SubscriberLagged,
    TransportError,
    TransportUnsupported,
    WrongLoop,
    ZbusError,
)
from .event import Event, Offset
from .ports.log import Schema
from .publish.publisher import EventPublisher
from .scope import Scope
from .session import Session
from .util.lazy_names import lazy_names as _lazy_names
from .util.session_token import sign_session_token, verify_session_token
from .version import __version__ as __version__

if TYPE_CHECKING:
    from . import blocking as blocking
    from . import metrics as metrics
    from . import sim as sim
    from .bridge.bridge import Bridge
    from .config import BusConfig
    from .mesh.node_registry import NodeInfo
    from .observe.formatters import JsonFormatter, configure_logging
    from .ports.cache import Cache

__all__ = [
    "Bridge",
    "Bus",
    "BusClosed",
    "BusConfig",
    "Cache",
    "ConfigInvalid",
    "CursorError",
    "Event",
    "EventCorrupt",
    "EventInvalid",
    "EventPublisher",
    "EventSubscriber",
    "EventTooLarge",
    "HandlerFailed",
    "IdentityConflict",
    "JsonFormatter",
    "KeyInvalid",
    "LogDamaged",
    "LogError",
    "LogFull",
    "LogLocked",
    "LogReadOnly",
    "LogRequired",
    "LogTrimmed",
    "LogWriterFailed",
    "NoResponders",
    "NodeInfo",
    "Offset",
    "PayloadInvalid",
    "Replay",
    "RequestError",
    "RequestTimeout",
    "Schema",
    "SchemaConflict",
    "SchemaError",
    "SchemaInvalid",
    "Scope",
    "Session",
    "SessionTokenInvalid",
    "SubscriberLagged",
    "TransportError",
    "TransportUnsupported",
    "WrongLoop",
    "ZbusError",
    "blocking",
    "configure_logging",
    "metrics",
    "open",
    "sign_session_token",
    "sim",
    "verify_session_token",
]


_RENAMED = {
    "FabricError": "TransportError",
    "FabricLacks": "TransportUnsupported",
    "JsonLines": "JsonFormatter",
    "LogMissing": "LogRequired",
    "LogOwned": "LogLocked",
    "LogStopped": "LogWriterFailed",
    "NobodyAnswers": "NoResponders",
    "read_session": "verify_session_token",
    "sign_session": "sign_session_token",
    "write_records": "configure_logging",
}
# These are seldom needed, or slow to import.
_MODULES = {
    "Bridge": ".bridge.bridge",
    "BusConfig": ".config",
    "Cache": ".ports.cache",
    "JsonFormatter": ".observe.formatters",
    "NodeInfo": ".mesh.node_registry",
    "blocking": ".blocking",
    "configure_logging": ".observe.formatters",
    "metrics": ".metrics",
    "sim": ".sim",
}
__getattr__ = _lazy_names(__name__, _MODULES, _RENAMED)
