"""Running a command's coroutine. Ctrl-C ends it once and for all: what is open is then closed, undisturbed, in time.

`asyncio.run` lets a second Ctrl-C break in at any place, also while a thread is being started to close the log;
such a process may never end. Closing is bounded in time here, so there is no need for a second one.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

from zbus.util.mailbox import Calls

from .render import output

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run `coroutine` to its end; raise `KeyboardInterrupt` when Ctrl-C has cancelled it."""
    before = signal.getsignal(signal.SIGINT)
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(coroutine)
        calls, pressed = Calls(loop), False

        def interrupt(number: int, frame: FrameType | None) -> None:
            nonlocal pressed
            if output.is_writing():
                raise KeyboardInterrupt  # whoever reads our output does not, so the loop would never know
            if not pressed:
                pressed = True
                calls.soon(task.cancel)

        if before is signal.default_int_handler:  # not where the shell told us to ignore it
            signal.signal(signal.SIGINT, interrupt)
        try:
            return loop.run_until_complete(task)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            # Pressed again while the command ends, it has nothing left to interrupt.
            signal.signal(signal.SIGINT, signal.SIG_IGN if pressed else before)
