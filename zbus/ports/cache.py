"""What the core knows of a cache: its shape. `store/zbus_cache` has the one there is."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

if TYPE_CHECKING:
    from zbus.event import Event

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Limits = tuple[int, float | None, float | None]  # capacity, ttl, tti
# A function, what makes a key of its arguments, and which events make its entries fall.
Wrapped = tuple[Callable[..., Any], "str | Callable[..., Hashable] | None", "str | Iterable[str]"]


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

    async def declared(self) -> Cache:
        """Wait until the transports have been told which events are wanted."""

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
