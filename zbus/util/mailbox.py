"""Mailboxes: queues from any thread to an event loop, which wakes up once for many items.

`call_soon_threadsafe` writes to a socket. A call for each item would cost more than most items do, so a mailbox calls
it only for the first item after a batch was taken.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .run_id import run_id

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue that any thread may fill and that one event loop empties: `take(batch)` is called on the loop.

    `take` has the run id of the code that made the mailbox, whichever thread posts. `post` never waits. Once the loop
    is closed, nothing is left to take the items, and `post` only keeps them.

    With `max`, items that do not fit are dropped and counted; `take_overflowed` returns how many, or the sum of
    their `worth` if that is given. If `size` is given, `max` limits the sum of the items' sizes instead of their
    number. (An item larger than `max` fits into an empty mailbox.) `ready` is asked before items are taken; if it
    returns False, they stay until `resume`. `turn` limits how many items one call of `take` gets, and `turn_size`
    the sum of their sizes, so that the loop can do other work in between.
    """

    __slots__ = (
        "_armed",
        "_held",
        "_items",
        "_limited",
        "_lock",
        "_loop",
        "_max",
        "_overflowed",
        "_paused",
        "_ready",
        "_run_id",
        "_size",
        "_take",
        "_turn",
        "_turn_size",
        "_worth",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[list[T]], object],
        max: int | None = None,  # noqa: A002
        size: Callable[[T], int] | None = None,
        turn: int = sys.maxsize,
        turn_size: int = sys.maxsize,
        worth: Callable[[T], int] | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        self._loop, self._take, self._turn, self._turn_size = loop, take, turn, turn_size
        self._max, self._size, self._held, self._worth = max, size, 0, worth
        self._limited = size is not None or turn < sys.maxsize
        self._items: deque[T] = deque()
        self._armed = False  # the loop will empty it, or it is paused: no need to wake the loop
        self._paused, self._ready = False, ready
        self._overflowed = 0
        self._lock = threading.Lock()
        self._run_id = run_id.get()

    def __len__(self) -> int:
        return len(self._items)

    # Any thread.

    def post(self, item: T) -> None:
        """Queue an item if it fits, and wake the loop if necessary. Does not block."""
        if self._max is not None and not self._fits(item, self._max):
            return
        # Append first, read the flag second. `_empty` does it in the opposite order, so no item stays behind.
        self._items.append(item)
        if not self._armed:
            self._armed = True
            try:
                self._loop.call_soon_threadsafe(self._empty)
            except RuntimeError:
                pass  # the loop is closed

    def _fits(self, item: T, limit: int) -> bool:
        if self._size is None:
            if len(self._items) < limit:  # several threads at once may exceed it by one each
                return True
            with self._lock:
                self._overflowed += 1 if self._worth is None else self._worth(item)
            return False
        size = self._size(item)
        with self._lock:
            fits = self._held + size <= limit or not self._held
            if fits:
                self._held += size
            else:
                self._overflowed += 1 if self._worth is None else self._worth(item)
        return fits

    # On the loop.

    def take_overflowed(self) -> int:
        """Return how many items did not fit since the last call."""
        if not self._overflowed:
            return 0
        with self._lock:
            overflowed, self._overflowed = self._overflowed, 0
        return overflowed

    def pause(self) -> None:
        """Keep all items in the mailbox until `resume`. A batch that was taken already is not affected."""
        self._paused = self._armed = True

    def resume(self) -> None:
        """Take items again after `pause`."""
        if self._paused:
            self._paused = False
            self._loop.call_soon(self._empty)

    def clear(self) -> list[T]:
        """Remove and return all items, without calling `take`."""
        return self._out(sys.maxsize, sys.maxsize)

    def _empty(self) -> None:
        if self._paused or (self._ready is not None and not self._ready()):
            self._paused = True
            return
        self._armed = False  # before it is emptied
        run_id.set(self._run_id)  # in the context of this callback only
        items = self._items
        if self._limited:
            batch = self._out(self._turn, self._turn_size)
            if items and not self._armed:
                self._armed = True
                self._loop.call_soon(self._empty)
        elif len(items) == 1:  # the usual case if the loop is not busy
            batch = [items.popleft()]
        else:
            batch = [items.popleft() for _ in range(len(items))]
        if batch:
            self._take(batch)

    def _out(self, turn: int, turn_size: int) -> list[T]:
        items, size = self._items, self._size
        popleft = items.popleft
        if size is None:
            return [popleft() for _ in range(min(turn, len(items)))]
        batch: list[T] = []
        taken = 0
        while items and len(batch) < turn and taken < turn_size:
            item = popleft()
            taken += size(item)
            batch.append(item)
        if self._max is not None:
            with self._lock:
                self._held -= taken
        return batch


class Calls:
    """Calls functions on an event loop, in the order in which any threads posted them.

    An exception of one function goes to the loop's exception handler, and the next one is called.
    """

    __slots__ = ("_loop", "_mailbox")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._mailbox = Mailbox[tuple[Callable[..., object], tuple[Any, ...]]](loop, self._run)

    def soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call `function(*args)` on the loop. Once the loop is closed, nothing happens."""
        self._mailbox.post((function, args))

    def _run(self, calls: list[tuple[Callable[..., object], tuple[Any, ...]]]) -> None:
        for function, args in calls:
            try:
                function(*args)
            except Exception as error:
                message = f"exception in {function!r}, which another thread posted"
                self._loop.call_exception_handler({"message": message, "exception": error})
