"""The SQLite append log of zbus: the source of truth of a node."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zbus.ports.log import Row

if TYPE_CHECKING:
    from .client.proxied_writes import put, retain
    from .client.write_routes import OwnerRejectsProxiedWrites, Put
    from .cold.tier import Cold
    from .file.manifest import ColdDamaged, ColdFile, Manifest, Segment
    from .log import SqliteLog, open_log
    from .read.verify import Report, verify
    from .retention import Pruned, Rules

__all__ = [
    "Cold",
    "ColdDamaged",
    "ColdFile",
    "Manifest",
    "OwnerRejectsProxiedWrites",
    "Pruned",
    "Put",
    "Report",
    "Row",
    "Rules",
    "Segment",
    "SqliteLog",
    "open_log",
    "put",
    "retain",
    "verify",
]

_WHERE = {
    "Cold": ".cold.tier",
    "ColdDamaged": ".file.manifest",
    "ColdFile": ".file.manifest",
    "Manifest": ".file.manifest",
    "OwnerRejectsProxiedWrites": ".client.write_routes",
    "Put": ".client.write_routes",
    "Report": ".read.verify",
    "Rules": ".retention",
    "Segment": ".file.manifest",
    "SqliteLog": ".log",
    "Pruned": ".retention",
    "open_log": ".log",
    "put": ".client.proxied_writes",
    "retain": ".client.proxied_writes",
    "verify": ".read.verify",
}


# The command line imports this package to list its commands, so slow imports wait until a name is used.
def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name], __name__), name)
