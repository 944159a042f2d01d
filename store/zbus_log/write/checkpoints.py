"""Checkpoints that fail are reported and counted.

SQLite copies the write-ahead log into the file after some commits, and keeps the errors of that to itself: the
write-ahead log only grows. So the writer looks at its length, and starts a checkpoint of its own if it is too long,
which raises the error.
"""

from __future__ import annotations

import logging
import os

from sqlalchemy import Connection

from zbus.observe.records import record_reason
from zbus_log.file.database import SQLITE_ERRORS, WAL_BYTES


class WriteAheadLog:
    """The write-ahead log of a log, as its writer sees it. Used by the writer's thread only."""

    def __init__(self, path: str, connection: Connection) -> None:
        self._path, self._wal, self._connection = path, f"{path}-wal", connection
        self._limit = 2 * WAL_BYTES  # the length at which to find out why it grows
        self.failures = 0

    def check(self) -> None:
        """Start a checkpoint if the write-ahead log is longer than usual. Call it after a commit."""
        size = self._size()
        if size > self._limit:
            self.checkpoint()
            self._limit = size + WAL_BYTES

    def checkpoint(self) -> None:
        """Copy what no reader needs any more into the file. Reports a failure; no event is lost by it."""
        try:
            self._connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)").all()
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

    def _size(self) -> int:
        try:
            return os.stat(self._wal).st_size  # noqa: PTH116
        except OSError:
            return 0
