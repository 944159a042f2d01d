"""Commands that run until they are told to end: Ctrl-C and SIGTERM close what is open, once, and are no error."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from .loop import run


def serve(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run `coroutine` to its end, or until Ctrl-C or SIGTERM."""
    try:
        run(_until_terminated(coroutine))
    except KeyboardInterrupt:
        return


async def _until_terminated(coroutine: Coroutine[Any, Any, None]) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    told = False

    def end() -> None:
        nonlocal told
        if not told:  # told again while it closes, it has nothing more to do
            told = True
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    await coroutine
