"""The event loop of commands that run until they are stopped. Ctrl-C and SIGTERM close them without an error."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any

from .loop import run


def serve(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run `coroutine` to its end, or cancel it on Ctrl-C or SIGTERM."""
    try:
        run(_until_terminated(coroutine))
    except KeyboardInterrupt:
        return


async def _until_terminated(coroutine: Coroutine[Any, Any, None]) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    stopping = False

    def end() -> None:
        nonlocal stopping
        if not stopping:  # a second signal must not interrupt the closing
            stopping = True
            task.cancel()

    if sys.platform != "win32":  # it has no SIGTERM; Ctrl-C works there too
        loop.add_signal_handler(signal.SIGTERM, end)
    await coroutine
