"""The event loop of a command. The first Ctrl-C cancels the command, and the resources are then closed undisturbed.

`asyncio.run` lets a second Ctrl-C interrupt any place, even the start of the thread that closes the log, and such a
process may never exit. Closing takes a limited time here, so that a second Ctrl-C is not needed and has no effect.
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
    """Run `coroutine` to its end. Raises `KeyboardInterrupt` if Ctrl-C cancelled it."""
    before = signal.getsignal(signal.SIGINT)
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(coroutine)
        calls, pressed = Calls(loop), False

        def interrupt(number: int, frame: FrameType | None) -> None:
            nonlocal pressed
            if output.is_writing():
                raise KeyboardInterrupt  # the reader of stdout is blocked, so the loop cannot run a callback
            if not pressed:
                pressed = True
                calls.soon(task.cancel)

        if before is signal.default_int_handler:  # otherwise the shell made this process ignore SIGINT
            signal.signal(signal.SIGINT, interrupt)
        try:
            return loop.run_until_complete(task)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            # A second Ctrl-C while the command ends has nothing left to interrupt.
            signal.signal(signal.SIGINT, signal.SIG_IGN if pressed else before)
