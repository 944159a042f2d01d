"""A load under way: it runs once, for everybody who asks for the same key meanwhile.

It is a task of its own, so whoever is cancelled takes only himself away; the last one to go cancels it.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from zbus import ZbusError

# Python 3.12 moved the mark of a function that returns a coroutine without being an `async def`.
_is_coroutine_function = inspect.iscoroutinefunction if sys.version_info >= (3, 12) else asyncio.iscoroutinefunction


def mark_async(function: Any) -> None:
    """Let others see that a function is to be awaited, though it is no `async def`."""
    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(function)
    else:
        function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]


class Load:
    """The task, and how many wait for it. `forget` takes it out of the books; `check` raises if the cache is closed."""

    __slots__ = ("_check", "_forget", "_waiters", "task")

    def __init__(self, forget: Callable[[Load], None], check: Callable[[str], None]) -> None:
        self._forget, self._check, self._waiters = forget, check, 0
        self.task: asyncio.Task[Any]

    async def join(self) -> Any:
        """The value, or what the loader raised. Cancelled, the load goes on for those who are left, if any are."""
        if self.task is asyncio.current_task():
            raise ZbusError("a loader asked for the key that it loads, and would wait for itself; nothing was cached")
        self._waiters += 1
        try:
            await asyncio.wait((self.task,))
        finally:
            self._waiters -= 1
            if not self._waiters and not self.task.done():
                self._forget(self)  # first, so that nobody joins a load that is about to be cancelled
                self.task.cancel()
        if self.task.cancelled():
            self._check("load")
            raise ZbusError("a loader was cancelled from inside; nothing was cached")
        return self.task.result()


async def call(loader: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a loader returns: an async one is awaited, a plain one runs on a thread, since it may block.

    Cancelled, an async loader is cancelled; a plain one runs to its end, and nobody hears of it.
    """
    if is_async(loader):
        return await loader(*args)
    value = await asyncio.to_thread(_call_plain, loader, args)
    return await value if inspect.isawaitable(value) else value


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of it is to be awaited, as far as that can be told without calling it.

    >>> is_async(asyncio.sleep), is_async(partial(asyncio.sleep, 1)), is_async(len)
    (True, True, False)
    """
    while isinstance(function, partial):
        function = function.func
    return _is_coroutine_function(function) or _is_coroutine_function(type(function).__call__)


def _call_plain(loader: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return loader(*args)
    except StopIteration as error:  # no future can carry it, so whoever waits would wait for ever
        raise RuntimeError("a loader raised StopIteration") from error
