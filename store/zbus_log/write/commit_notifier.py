"""Telling those who wait for a commit, in order, without holding up the writer.

Waking the event loop costs the writer the interpreter: the loop takes it, and keeps it for as long as it
has work. When more waits to be written, the disk would stand idle meanwhile. So the writer gets its next
statement going first, and a second thread does the telling.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue

from zbus.errors import LogError
from zbus.observe.records import record
from zbus.ports.log import Appended

Outcome = tuple[Appended, Sequence[int] | LogError]


class Announcer:
    """Outcomes are told in the order in which they were given, whichever thread does it."""

    def __init__(self) -> None:
        self._outcomes: deque[list[Outcome]] = deque()
        self._telling = threading.Lock()
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def now(self, outcomes: list[Outcome]) -> None:
        """Tell at once, on this thread."""
        self._outcomes.append(outcomes)
        self._tell()

    def soon(self, outcomes: list[Outcome]) -> None:
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
                for done, result in self._outcomes.popleft():
                    try:
                        done(result)
                    except Exception as error:  # somebody else's fault, and the others want to know, too
                        record("LOG_TASK_FAILED", logging.WARNING, error)
