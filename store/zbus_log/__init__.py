"""The SQLite append log of zbus: the source of truth of a node."""

from .cold import Cold
from .errand_client import put, retain
from .errand_ways import OwnerTakesNoErrands, Put
from .log import SqliteLog, open_log
from .manifest import ColdDamaged, ColdFile, Manifest, Segment
from .retention import Rules, Trimmed
from .verify import Report, verify

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
