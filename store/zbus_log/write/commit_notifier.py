"""Notification of a commit's callers and of the log's tail, in order and without delaying the writer.

When the writer wakes the event loop, the loop takes the interpreter lock and keeps it while it has work. If more events
wait to be written, the disk would be idle in that time. So the writer first starts its next statement, and a second
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
from zbus.util.run_id import inherit

# One append: its callback, the argument of its caller, its outcome, and the events that are new to the tail.
Notice = tuple[Appended, Any, Outcome, Committed | None]


class CommitNotifier:
    """Delivers notices in the order of the calls, on either thread. Only the writer's thread calls it."""

    def __init__(self) -> None:
        self.tail: Callable[[Any], None] | None = None  # gets `Committed`; or `AppendResult`, as the port says
        self._queue: SimpleQueue[list[Notice] | None] = SimpleQueue()
        self._queued = self._delivered = 0  # batches for the other thread; one thread writes each counter
        self._thread: threading.Thread | None = None

    def now(self, notices: list[Notice]) -> None:
        """Notify on this thread, unless the other thread still has earlier notices; then queue these after them."""
        if self._queued != self._delivered:
            self.soon(notices)
            return
        for notice in notices:
            self._deliver(*notice)

    def soon(self, notices: list[Notice]) -> None:
        """Let the other thread notify, so that this one keeps the interpreter lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=inherit(self._run), name="zbus-log-notifier", daemon=True)
            self._thread.start()
        self._queued += 1
        self._queue.put(notices)

    def close(self) -> None:
        """Deliver the remaining notices and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (notices := self._queue.get()) is not None:
            for notice in notices:
                self._deliver(*notice)
            self._delivered += 1

    def _deliver(self, done: Appended, about: Any, outcome: Outcome, committed: Committed | None) -> None:
        try:
            if committed is not None and self.tail is not None:
                if done == self.tail:  # both at once: the event loop wakes up once
                    done(AppendResult(about, outcome, committed))
                    return
                self.tail(committed)
            done(AppendResult(about, outcome))
        except Exception as error:  # a defect in the callback; the others must still be notified
            record("LOG_TASK_FAILED", logging.WARNING, error)
