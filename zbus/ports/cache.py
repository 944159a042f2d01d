"""What the core knows of a cache: its shape. `store/zbus_cache` has the one there is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from zbus.event import Event

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Limits = tuple[int, float | None, float | None]  # capacity, ttl, tti
# A function, what makes a key of its arguments, and which events make its entries fall.
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
    """What a cache needs from the bus that it belongs to."""

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
        """The cache of this name was closed: the name is free."""


class Cache(Protocol):
    """Entries that fall when events say so. Belongs to the event loop of its bus."""

    name: str

    @property
    def get(self) -> Callable[..., Any]:
        """`get(key, default=None)`: the value, or `default`. Never waits."""

    async def load(self, key: Hashable, loader: Callable[..., Any], *args: Any) -> Any:
        """The value; on a miss what `loader(*args)` returns, loaded once for all who ask meanwhile."""

    def set(self, key: Hashable, value: Any) -> None:
        """Keep a value. What was read before an event and is set after it is stale: `load` is not."""

    def remove(self, key: Hashable) -> None:
        """Let one entry fall."""

    def clear(self) -> None:
        """Let all entries fall."""

    def invalidate_on(self, expression: str, entry: str | Callable[[Event], Hashable] | None = None) -> Cache:
        """Let entries fall when a matching event is delivered: all, or the one that `entry` names."""

    async def ready(self) -> Cache:
        """Wait until the transports have subscribed to the events of all rules."""

    def stats(self) -> dict[str, int]:
        """What was counted so far."""

    async def aclose(self) -> None:
        """Let everything go."""

    def begin(self) -> None:
        """The bus is open."""


class Cached(Protocol[P, T_co]):
    """A function whose results are kept."""

    cache: Cache

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T_co]:
        """The kept result, or that of a call."""


class Caching(Protocol):
    """What `@bus.cached(…)` is: it takes async functions and plain ones."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, T]], /) -> Cached[P, T]: ...

    @overload
    def __call__(self, function: Callable[P, T], /) -> Cached[P, T]: ...
