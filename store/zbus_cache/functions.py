"""`@bus.cached`: a function whose results are cached.

A hit should cost little more than moka's own `get`, which takes less time than Python needs to create a coroutine. So
the wrapper is compiled for the parameters of its function, and each result is stored as a finished future.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from zbus import ZbusError

from .cache import MokaCache
from .entries import MISSING, unhashable
from .key_index import KeyIndex
from .loading import mark_async
from .rules import Rule
from .signature_keys import SignatureKeys
from .templates import KeyTemplate

if TYPE_CHECKING:
    from zbus import Event
    from zbus.ports.cache import CacheHost, Limits


class CachedResult(asyncio.Future[Any]):
    """A result as a finished future, which can be awaited any number of times.

    It also has the methods of a coroutine, so that `create_task` accepts a hit as well as a miss.
    """

    def send(self, _: None) -> NoReturn:
        """Return the result, like a coroutine that ends immediately."""
        raise StopIteration(self.result())

    def throw(self, error: Any, *more: Any) -> NoReturn:
        """Raise the error, since no code runs here that could catch it."""
        raise more[0] if more and more[0] is not None else error

    def close(self) -> None:
        """Do nothing, since no code is running."""


class FunctionCache(MokaCache):
    """The cache of one function, available as its attribute `cache`. Only calls of the function add entries."""

    def __init__(
        self,
        host: CacheHost,
        name: str,
        limits: Limits,
        function: Callable[..., Any],
        key: str | Callable[..., Hashable] | None,
        invalidate_on: str | Iterable[str],
    ) -> None:
        super().__init__(host, name, limits)
        self._function, self._indexes = function, list[tuple[KeyTemplate, KeyIndex]]()
        self._signature = signature = SignatureKeys(function, key)
        for template in [invalidate_on] if isinstance(invalidate_on, str) else invalidate_on:
            self._add_rule(KeyTemplate(template), limits[0])
        read, counted = self.get, self._counted
        call, called = signature.compile(self._entries.get, self._miss, unhashable)

        def get(key: Hashable, default: Any = None) -> Any:
            cached = read(key)
            return default if cached is None else cached.result()

        self.get = get
        self._counted = lambda: (counted()[0] + called()[0], counted()[1] + called()[1])
        wrapper: Any = functools.wraps(function)(call)
        wrapper.cache, self.function = self, wrapper
        mark_async(wrapper)

    async def load(self, key: Hashable, loader: Callable[..., Any], *args: Any) -> Any:
        """Raise `ZbusError`: call the function instead."""
        raise ZbusError("only calls of the function add entries to its cache; nothing was loaded")

    def set(self, key: Hashable, value: Any) -> None:
        """Raise `ZbusError`: call the function instead."""
        raise ZbusError("only calls of the function add entries to its cache; nothing was set")

    def clear(self) -> None:
        """Invalidate all entries and all loads in flight."""
        super().clear()
        for _, index in self._indexes:
            index.clear()

    def _add_rule(self, template: KeyTemplate, capacity: int) -> None:
        self._signature.check(template)
        if not template.names:
            self._add(Rule(self, [template.expression], None))
            return
        index = KeyIndex(capacity, self._evict)
        self._indexes.append((template, index))

        def keys_of(event: Event) -> Iterable[Hashable]:
            return index.take(template.read(event.key))

        self._add(Rule(self, [template.expression], keys_of))

    def _evict(self, key: Hashable) -> None:
        self._evicted["size"] += self._entries.get(key) is not None
        self.remove(key)

    def _keep(self, key: Hashable, value: Any) -> None:
        cached = CachedResult()
        cached.set_result(value)
        self._entries.set(key, cached)

    def _find(self, key: Hashable) -> Any:
        cached = self._entries.get(key)
        return MISSING if cached is None else cached.result()

    async def _miss(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._indexes and key not in self._loads:
            values = self._signature.values(args, kwargs)
            for fields, index in [
                (self._signature.texts(template, values), index) for template, index in self._indexes
            ]:
                index.add(key, fields)  # before the load: an event that arrives during it must find the key
        return await self._load(key, functools.partial(self._function, **kwargs) if kwargs else self._function, args)
