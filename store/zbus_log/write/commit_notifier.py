"""Telling those who wait for a commit, in order, without holding up the writer.

Waking the event loop costs the writer the interpreter: the loop takes it, and keeps it for as long as it
has work. When more waits to be written, the disk would stand idle meanwhile. So the writer gets its next
statement going first, and a second thread does the telling.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from zbus.observe.records import record
from zbus.ports.log import Appended, Committed, Outcome

# Whom to tell the outcome of an append, and what of it is new to the log's tail.
Notice = tuple[Appended, Outcome, Committed | None]


class Announcer:
    """Outcomes are told in the order in which they were given, whichever thread does it."""

    def __init__(self) -> None:
        self.tail: Callable[[Committed], None] | None = None
        self._outcomes: deque[list[Notice]] = deque()
        self._telling = threading.Lock()
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def now(self, outcomes: list[Notice]) -> None:
        """Tell at once, on this thread."""
        self._outcomes.append(outcomes)
        self._tell()

    def soon(self, outcomes: list[Notice]) -> None:
        """Let the other thread tell; does not let go of the interpreter."""
        self._outcomes.append(outcomes)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="zbus-log-announcer", daemon=True)
            self._thread.start()
        self._wake.put(True)

    def close(self) -> None:
        """Tell what is left and end the thread."""
        self._tell()
        if self._thread is not None:
            self._wake.put(False)
            self._thread.join()

    def _run(self) -> None:
        while self._wake.get():
            self._tell()

    def _tell(self) -> None:
        with self._telling:
            while self._outcomes:
                for done, outcome, committed in self._outcomes.popleft():
                    try:
                        if committed is not None and self.tail is not None:
                            self.tail(committed)
                        done(outcome)
                    except Exception as error:  # somebody else's fault, and the others want to know, too
                        record("LOG_TASK_FAILED", logging.WARNING, error)
