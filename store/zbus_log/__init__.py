"""The SQLite append log of zbus: the source of truth of a node."""

from .client.proxied_writes import put, retain
from .client.write_routes import OwnerTakesNoErrands, Put
from .cold.tier import Cold
from .file.manifest import ColdDamaged, ColdFile, Manifest, Segment
from .log import SqliteLog, open_log
from .read.verify import Report, verify
from .retention import Rules, Trimmed

__all__ = [
    "Cold",
    "ColdDamaged",
    "ColdFile",
    "Manifest",
    "OwnerTakesNoErrands",
    "Put",
    "Report",
    "Rules",
    "Segment",
    "SqliteLog",
    "Trimmed",
    "open_log",
    "put",
    "retain",
    "verify",
]
