"""The SQLite append log of zbus: the source of truth of a node."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zbus.ports.log import Row
from zbus.util.renamed import renamed_to

if TYPE_CHECKING:
    from .client.proxied_writes import prune, put
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
    "prune",
    "put",
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
    "prune": ".client.proxied_writes",
    "put": ".client.proxied_writes",
    "verify": ".read.verify",
}
_RENAMED = {"retain": "prune"}


# The command line imports this package to list its commands, so slow imports wait until a name is used.
def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        hint = f": {renamed_to(_RENAMED[name])}" if name in _RENAMED else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    return getattr(import_module(_WHERE[name], __name__), name)
