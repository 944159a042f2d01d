"""A load in flight: it runs once for all concurrent callers of the same key.

The load runs in its own task. Cancelling one caller does not affect the others; the load is cancelled when no callers
remain.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from zbus import ZbusError

# Python 3.12 moved the marker of functions that return a coroutine without being defined with `async def`.
_is_coroutine_function = inspect.iscoroutinefunction if sys.version_info >= (3, 12) else asyncio.iscoroutinefunction


def mark_async(function: Any) -> None:
    """Mark a function as one that returns a coroutine, although it is not defined with `async def`."""
    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(function)
    else:
        function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]


class Load:
    """The task of a load and the number of its waiters.

    `forget` unregisters the load; `check` raises if the cache is closed.
    """

    __slots__ = ("_check", "_forget", "_waiters", "task")

    def __init__(self, forget: Callable[[Load], None], check: Callable[[str], None]) -> None:
        self._forget, self._check, self._waiters = forget, check, 0
        self.task: asyncio.Task[Any]

    async def join(self) -> Any:
        """Return the value, or raise what the loader raised. If cancelled, the load continues for other callers."""
        if self.task is asyncio.current_task():
            raise ZbusError("a loader loads its own key and would wait for itself; nothing was cached")
        self._waiters += 1
        try:
            await asyncio.wait((self.task,))
        finally:
            self._waiters -= 1
            if not self._waiters and not self.task.done():
                self._forget(self)  # first, so that no caller joins a load that is about to be cancelled
                self.task.cancel()
        if self.task.cancelled():
            self._check("load")
            raise ZbusError("a loader cancelled itself; nothing was cached")
        return self.task.result()


async def call(loader: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a loader and return its result. A plain loader runs on a thread, since it may block.

    If cancelled, an async loader is cancelled too; a plain loader runs to its end, and its result is discarded.
    """
    if is_async(loader):
        return await loader(*args)
    value = await asyncio.to_thread(_call_plain, loader, args)
    return await value if inspect.isawaitable(value) else value


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calls of a function must be awaited, as far as this is known without calling it.

    >>> is_async(asyncio.sleep), is_async(partial(asyncio.sleep, 1)), is_async(len)
    (True, True, False)
    """
    while isinstance(function, partial):
        function = function.func
    return _is_coroutine_function(function) or _is_coroutine_function(type(function).__call__)


def _call_plain(loader: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return loader(*args)
    except StopIteration as error:  # a future cannot carry it, so callers would wait forever
        raise RuntimeError("a loader raised StopIteration") from error
