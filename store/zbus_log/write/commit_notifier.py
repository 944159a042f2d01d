"""Notifies the callers of a commit and the log's tail, in order, without delaying the writer.

Waking the event loop costs the writer the interpreter: the loop takes it, and keeps it for as long as it has work. If
more waits to be written, the disk would be idle meanwhile. So the writer starts its next statement first, and a second
thread notifies.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from zbus.observe.records import record
from zbus.ports.log import Appended, AppendResult, Committed, Outcome

# Whom to notify of an append: the callback and what its caller passed, the outcome, and what is new to the tail.
Notice = tuple[Appended, Any, Outcome, Committed | None]


class CommitNotifier:
    """Notices are given in the order of the calls, whichever thread does it. Called by the writer's thread only."""

    def __init__(self) -> None:
        self.tail: Callable[[Committed], None] | None = None
        self._queue: SimpleQueue[list[Notice] | None] = SimpleQueue()
        self._given = self._done = 0  # batches for the other thread, written by one thread each
        self._thread: threading.Thread | None = None

    def now(self, notices: list[Notice]) -> None:
        """Notify on this thread, unless the other one still has earlier notices: then it follows those."""
        if self._given != self._done:
            self.soon(notices)
            return
        for notice in notices:
            self._give(*notice)

    def soon(self, notices: list[Notice]) -> None:
        """Let the other thread notify; this one keeps the interpreter."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="zbus-log-announcer", daemon=True)
            self._thread.start()
        self._given += 1
        self._queue.put(notices)

    def close(self) -> None:
        """Give what is left and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (notices := self._queue.get()) is not None:
            for notice in notices:
                self._give(*notice)
            self._done += 1

    def _give(self, done: Appended, about: Any, outcome: Outcome, committed: Committed | None) -> None:
        try:
            if committed is not None and self.tail is not None:
                self.tail(committed)
            done(AppendResult(about, outcome))
        except Exception as error:  # a defect of the caller; the others must be notified too
            record("LOG_TASK_FAILED", logging.WARNING, error)
