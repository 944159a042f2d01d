"""The cache port: the protocol between the core and a cache. `store/zbus_cache` implements it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from zbus.event import Event

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Limits = tuple[int, float | None, float | None]  # capacity, ttl, tti
# A function, the key of its arguments, and the key expressions of the events that invalidate its entries.
Wrapped = tuple[Callable[..., Any], "str | Callable[..., Hashable] | None", "str | Iterable[str]"]


class Target(Protocol):
    """Receives delivered events: a subscription, or a rule that invalidates a cache's entries."""

    records: bool  # it reads events of other nodes through the log
    since_ns: int  # events published before are not requested

    @property
    def key_exprs(self) -> tuple[str, ...]:
        """The key expressions of the events that it receives."""

    def offer(self, events: Sequence[Event], received: bool = False) -> int:
        """Take a batch of events without waiting. Returns the number of events that a subscriber will read.

        `received`: no publisher of this node waits for these events, so backpressure does not slow them down.
        """


class CacheHost(Protocol):
    """The parts of its bus that a cache uses."""

    @property
    def read_only(self) -> bool:
        """Whether this bus only reads a log that another process owns."""

    @property
    def close_timeout_s(self) -> float:
        """Seconds that closing the bus may take."""

    @property
    def subscribe(self) -> Callable[..., Any]:
        """`subscribe(*key_exprs)`: used on a read-only bus."""

    @property
    def route(self) -> Callable[..., asyncio.Future[Any] | None]:
        """`route(target, *more_exprs)`: deliver to a target; the future completes when the transports know."""

    @property
    def unroute(self) -> Callable[..., None]:
        """`unroute(target, *more_exprs)`: undo `route`."""

    def forget_cache(self, name: str) -> None:
        """Release the name of a cache that was closed."""


class Cache(Protocol):
    """Entries that events invalidate. Belongs to the event loop of its bus."""

    name: str

    @property
    def get(self) -> Callable[..., Any]:
        """`get(key, default=None)`: return the value, or `default`. Does not block."""

    async def load(self, key: Hashable, loader: Callable[..., Any], *args: Any) -> Any:
        """Return the value. On a miss, `loader(*args)` loads it once for all concurrent callers."""

    def set(self, key: Hashable, value: Any) -> None:
        """Store a value. It may be stale if an event arrived since the value was read; `load` prevents this."""

    def remove(self, key: Hashable) -> None:
        """Invalidate one entry."""

    def clear(self) -> None:
        """Invalidate all entries."""

    def invalidate_on(self, expression: str, entry: str | Callable[[Event], Hashable] | None = None) -> Cache:
        """Invalidate all entries, or the one that `entry` names, when a matching event is delivered."""

    async def ready(self) -> Cache:
        """Wait until the transports have subscribed to the events of all rules."""

    def stats(self) -> dict[str, int]:
        """Return the counters of this cache."""

    async def aclose(self) -> None:
        """Close the cache. Pending loads raise `BusClosed`."""

    def begin(self) -> None:
        """Start to receive events, because the bus is open."""


class Cached(Protocol[P, T_co]):
    """A function whose results are cached."""

    cache: Cache

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T_co]:
        """Return the cached result, or call the function."""


class Caching(Protocol):
    """The decorator that `bus.cached(…)` returns, for async and plain functions."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, T]], /) -> Cached[P, T]: ...

    @overload
    def __call__(self, function: Callable[P, T], /) -> Cached[P, T]: ...
