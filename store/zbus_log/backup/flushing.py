"""Writes a growing file to disk in small parts, while it is being written.

One fsync of a large file at the end would take long, and the commits of a log on the same disk would wait for it.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from zbus.util.run_id import inherit


class Flushing:
    """A thread that syncs a file whenever a part of it was written. The last part is left to the caller."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
        self._wake, self._synced, self._ended = threading.Event(), threading.Event(), False
        self._synced.set()
        self._thread = threading.Thread(target=inherit(self._run), name="zbus-backup-flush", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._wake.set()
        self._thread.join()
        os.close(self._descriptor)

    def written(self) -> None:
        """Sync what was written. Returns when the part before is on disk, so that at most two parts are not."""
        self._synced.wait()
        self._synced.clear()
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._ended:
                return
            with suppress(OSError):  # the last sync reports it
                getattr(os, "fdatasync", os.fsync)(self._descriptor)  # macOS has only fsync
            self._synced.set()
