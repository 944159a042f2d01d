"""Single key presses from the terminal while a screen is shown. The terminal mode is always restored."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STDIN = 0


@contextmanager
def keys(pressed: Callable[[str], None]) -> Iterator[bool]:
    """Call `pressed` on the loop with each key. Yields whether it does. Ctrl-C still sends SIGINT.

    It does not if stdin is not a terminal, or on Windows, whose event loop cannot wait for keys.
    """
    if sys.platform == "win32" or not os.isatty(STDIN):
        yield False
        return
    import termios
    import tty

    loop, before = asyncio.get_running_loop(), termios.tcgetattr(STDIN)

    def read() -> None:
        try:
            data = os.read(STDIN, 64)
        except OSError:
            data = b""
        if not data:  # the terminal is gone
            loop.remove_reader(STDIN)
        for each in data.decode(errors="replace"):
            pressed(each)

    tty.setcbreak(STDIN, termios.TCSANOW)
    loop.add_reader(STDIN, read)
    try:
        yield True
    finally:
        loop.remove_reader(STDIN)
        termios.tcsetattr(STDIN, termios.TCSANOW, before)
