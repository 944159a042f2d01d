"""Checkpoints that fail are reported and counted, and after a purge the write-ahead log is emptied.

SQLite copies the write-ahead log into the file after some commits, and keeps the errors of that to itself: the
write-ahead log only grows. So the writer looks at its length, and starts a checkpoint of its own if it is too long,
which raises the error.

The write-ahead log has the events as they were before a purge until later commits overwrite them. It can be emptied
only while nothing is read, so this is tried again until it succeeds.
"""

from __future__ import annotations

import logging
import os
import time

from sqlalchemy import Connection

from zbus.observe.records import record_reason
from zbus_log.file.database import LOCK_WAIT_S, SQLITE_ERRORS, WAL_BYTES, lengthen_wal

EMPTY_WAIT_S = 1.0  # for readers, once, before a purge returns
EMPTY_AGAIN_S = 1.0


class WriteAheadLog:
    """The write-ahead log of a log, as its writer sees it. Used by the writer's thread only."""

    def __init__(self, path: str, connection: Connection) -> None:
        self._path, self._wal, self._connection = path, f"{path}-wal", connection
        self._limit = 2 * WAL_BYTES  # the length at which to find out why it grows
        self.failures = 0
        self._empty_at: float | None = None  # when to try again; None: it has no purged events

    def check(self) -> None:
        """Start a checkpoint if the write-ahead log is longer than usual. Call it after a commit."""
        size = self._size()
        if size > self._limit:
            self.checkpoint()
            self._limit = size + WAL_BYTES

    def checkpoint(self) -> None:
        """Copy what no reader needs any more into the file. Reports a failure; no event is lost by it."""
        self._checkpoint("PASSIVE")

    @property
    def empty_in_s(self) -> float | None:
        """Seconds until `empty_if_due` should be called; None if the write-ahead log has no purged events."""
        return None if self._empty_at is None else max(0.0, self._empty_at - time.monotonic())

    def empty(self) -> None:
        """Remove purged events from the write-ahead log. If it is being read for long, report that, and do it later."""
        if self._empty(EMPTY_WAIT_S):
            return
        record_reason(
            "LOG_PURGE_INCOMPLETE",
            logging.WARNING,
            code="wal_in_use",
            reason=f"the purged events were removed from the log, but {self._wal} still contains them, because a "
            "process is reading the log or the disk failed. The owner tries again every second until they are gone",
            path=self._path,
        )

    def empty_if_due(self) -> None:
        """Try again to remove purged events from the write-ahead log."""
        if self._empty_at is not None and time.monotonic() >= self._empty_at:
            self._empty(0.0)

    def _empty(self, wait_s: float) -> bool:
        self._connection.exec_driver_sql(f"PRAGMA busy_timeout={int(wait_s * 1000)}").close()
        try:
            is_empty = self._checkpoint("TRUNCATE")
        finally:
            self._connection.exec_driver_sql(f"PRAGMA busy_timeout={int(LOCK_WAIT_S * 1000)}").close()
        self._empty_at = None if is_empty else time.monotonic() + EMPTY_AGAIN_S
        if is_empty:
            lengthen_wal(self._path)
        return is_empty

    def _checkpoint(self, mode: str) -> bool:
        """Start a checkpoint. Returns whether no reader was in its way and it did not fail."""
        try:
            busy, _, _ = self._connection.exec_driver_sql(f"PRAGMA wal_checkpoint({mode})").one()
            return not busy
        except SQLITE_ERRORS as error:
            self.failures += 1
            record_reason(
                "LOG_CHECKPOINT_FAILED",
                logging.ERROR,
                code="checkpoint_failed",
                reason=f"{error}. No event is lost: they stay in {self._wal}, which grows. Is the disk full?",
                path=self._path,
                wal_bytes=self._size(),
                count_total=self.failures,
            )
            return False

    def _size(self) -> int:
        try:
            return os.stat(self._wal).st_size  # noqa: PTH116
        except OSError:
            return 0
