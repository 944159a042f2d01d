"""The SQLite append log of zbus: the source of truth of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zbus.ports.log import Purged, Row
from zbus.util.lazy_names import lazy_names

if TYPE_CHECKING:
    from .client.proxied_writes import prune, purge, put
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
    "Purged",
    "Put",
    "Report",
    "Row",
    "Rules",
    "Segment",
    "SqliteLog",
    "open_log",
    "prune",
    "purge",
    "put",
    "verify",
]

_MODULES = {
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
    "purge": ".client.proxied_writes",
    "put": ".client.proxied_writes",
    "verify": ".read.verify",
}
# The command line imports this package to list its commands, so slow imports wait until a name is used.
__getattr__ = lazy_names(__name__, _MODULES, {"retain": "prune"})
