"""Invalidation rules: which delivered events invalidate which entries.

A rule receives events like a subscription and runs during delivery: when `await publisher.publish()` returns, or a
subscriber receives the event, the entry is already invalidated. A read-only bus follows the log instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Sequence
from time import time_ns
from typing import TYPE_CHECKING, Any, Protocol

from zbus.keys import KeySet

if TYPE_CHECKING:
    from zbus import Event, EventSubscriber
    from zbus.ports.cache import CacheHost, Target

GAP = "@zbus/gap"  # reports events that are permanently lost; they could have invalidated any entry

KeysOf = Callable[["Event"], Iterable[Hashable]]


class Invalidated(Protocol):
    """A cache, as a rule sees it."""

    name: str
    invalidations: int

    @property
    def remove(self) -> Callable[[Any], None]:
        """Invalidate one entry."""

    def clear(self) -> None:
        """Invalidate all entries."""

    def fail(self, error: Exception) -> None:
        """Stop serving entries, because events are no longer received."""


class Rule:
    """Invalidates entries of a cache: all of them, or those whose keys `keys_of` returns for an event."""

    records = False

    def __init__(self, cache: Invalidated, expressions: Iterable[str], keys_of: KeysOf | None) -> None:
        self._cache, self._keys_of = cache, keys_of
        self.key_exprs = KeySet(expressions).expressions
        self.since_ns = 0
        self.ready: asyncio.Future[Any] | None = None
        self._host: CacheHost | None = None
        self._following: asyncio.Task[None] | None = None

    def attach(self, host: CacheHost) -> None:
        """Start to receive events."""
        self._host, self.since_ns = host, time_ns()
        if host.read_only:
            self._following = asyncio.get_running_loop().create_task(self._follow(host.subscribe(*self.key_exprs)))
            return
        self.ready = host.route(self, GAP)

    def detach(self) -> asyncio.Task[None] | None:
        """Stop receiving events. Returns the task to wait for, or None."""
        host, self._host = self._host, None
        if self._following is not None:
            self._following.cancel()
        elif host is not None:
            host.unroute(self, GAP)
        return self._following

    def offer(self, events: Sequence[Event], received: bool = False) -> int:
        """Apply the rule to a batch of events. Returns 0, because no subscriber reads them here.

        Raises nothing: a failing rule must not prevent delivery to other targets.
        """
        cache, keys_of = self._cache, self._keys_of
        cache.invalidations += len(events)
        if keys_of is None:
            cache.clear()
            return 0
        try:
            for event in events:
                if event.key == GAP:
                    cache.clear()
                    return 0
                for key in keys_of(event):
                    cache.remove(key)
        except Exception as error:
            cache.clear()  # it is unknown which entries are stale, so all are invalidated
            asyncio.get_running_loop().call_exception_handler(
                {
                    "message": f"an entry rule of the cache {cache.name!r} raised: all its entries were invalidated",
                    "exception": error,
                }
            )
        return 0

    async def _follow(self, subscription: EventSubscriber) -> None:
        """Read the events from the log, which another process owns."""
        try:
            async with subscription:
                async for event in subscription:
                    self.offer((event,))
        except Exception as error:
            self._cache.fail(error)


if TYPE_CHECKING:
    _target: type[Target] = Rule
