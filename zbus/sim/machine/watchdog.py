"""A watchdog: virtual time stands still inside a step, so only real time can end one that never returns."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from zbus.sim.errors import WorldStuck

STEP_S = 30.0


@contextmanager
def watchdog(beat: Callable[[Callable[[], object]], None]) -> Iterator[None]:
    """Raise `WorldStuck` in a step that takes longer than `STEP_S` seconds of real time.

    `beat` gets a function that the loop calls every few thousand steps. There is no watchdog on Windows,
    outside of the main thread, or if the program uses the alarm signal itself, as pytest-timeout does.
    """
    if (
        sys.platform == "win32"
        or threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGALRM) != signal.SIG_DFL
    ):
        yield
        return

    def bark(number: int, frame: FrameType | None) -> None:
        where = "" if frame is None else f", at {frame.f_code.co_filename}:{frame.f_lineno}"
        raise WorldStuck(f"a step did not end within {STEP_S:g} s of real time{where}: it awaits nothing")

    signal.signal(signal.SIGALRM, bark)
    beat(lambda: signal.setitimer(signal.ITIMER_REAL, STEP_S))
    signal.setitimer(signal.ITIMER_REAL, STEP_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
