"""The SQLite append log of zbus: the source of truth of a node."""

from .log import SqliteLog, open_log
from .retention import Rules, Trimmed
from .verify import Report, verify

__all__ = ["Report", "Rules", "SqliteLog", "Trimmed", "open_log", "verify"]
