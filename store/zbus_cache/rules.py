"""Rules: which entries fall when which events are delivered.

A rule is a target of delivery like a subscription, so it acts inside delivery: when `await publisher.publish()`
returns, or a subscriber sees the event, the entry is gone. A reader of another process's log follows the log.
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

GAP = "@zbus/gap"  # events that are missing for good: nobody knows what they would have said

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
        """Events can no longer be followed: keep nothing from now on."""


class Rule:
    """Lets entries of a cache fall: all of them, or those that `keys_of` names for an event."""

    records = False

    def __init__(self, cache: Invalidated, expressions: Iterable[str], keys_of: KeysOf | None) -> None:
        self._cache, self._keys_of = cache, keys_of
        self.key_exprs = KeySet(expressions).expressions
        self.since_ns = 0
        self.ready: asyncio.Future[Any] | None = None
        self._host: CacheHost | None = None
        self._following: asyncio.Task[None] | None = None

    def attach(self, host: CacheHost) -> None:
        """From now on."""
        self._host, self.since_ns = host, time_ns()
        if host.read_only:
            self._following = asyncio.get_running_loop().create_task(self._follow(host.subscribe(*self.key_exprs)))
            return
        self.ready = host.route(self, GAP)

    def detach(self) -> asyncio.Task[None] | None:
        """No longer; returns what is to be waited for."""
        host, self._host = self._host, None
        if self._following is not None:
            self._following.cancel()
        elif host is not None:
            host.unroute(self, GAP)
        return self._following

    def offer(self, events: Sequence[Event], received: bool = False) -> int:
        """Take the events of one burst; no reader has to look at them.

        Raises nothing: what others are to receive must not depend on a rule.
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
            cache.clear()  # which entries are out of date is not known, so all are
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"an entry rule of the cache {cache.name!r} raised: all entries fell", "exception": error}
            )
        return 0

    async def _follow(self, subscription: EventSubscriber) -> None:
        """Of a log that another process owns, events are read rather than delivered."""
        try:
            async with subscription:
                async for event in subscription:
                    self.offer((event,))
        except Exception as error:
            self._cache.fail(error)


if TYPE_CHECKING:
    _target: type[Target] = Rule
