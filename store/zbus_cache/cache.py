"""A cache: moka's entries, the loads in flight, and the rules that invalidate both.

A load stores its value only if it is still the registered load of its key when it ends. A rule that invalidates a key
also unregisters its load: the callers that already wait get the value, no further caller joins, and the value is not
stored. So a caller that asks after an event never gets a value that was read before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any

from zbus import BusClosed, ConfigInvalid

from .entries import MISSING, open_entries, reader, unhashable
from .loading import Load, call
from .rules import Rule
from .templates import KeyTemplate, entry_of

if TYPE_CHECKING:
    from zbus import Event
    from zbus.ports.cache import Cache as Port
    from zbus.ports.cache import CacheHost, Limits


class MokaCache:
    """`bus.cache()`: entries that events invalidate. Use it only on the event loop of its bus.

    todos = bus.cache(ttl=60).invalidate_on("events/Todo/{id}", entry="todo/{id}")
    todo = await todos.load("todo/7", read_todo, 7)
    """

    def __init__(self, host: CacheHost, name: str, limits: Limits) -> None:
        self.name, self._host = name, host
        self._entries, self._evicted = open_entries(limits)
        self.get, self._counted = reader(self._entries)
        self._loads: dict[Hashable, Load] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._rules: list[Rule] = []
        self._open = self._closed = False
        self._failed: Exception | None = None
        self.loads = self.load_errors = self.invalidations = 0

    async def load(self, key: Hashable, loader: Callable[..., Any], *args: Any) -> Any:
        """Return the cached value, or on a miss call `loader(*args)` once for all concurrent callers and cache it.

        An async loader is awaited; a plain one runs on a thread. All waiting callers get the exception that the loader
        raises, and the next call loads again. If cancelled, the load continues as long as another caller waits for it.
        """
        value = self.get(key, MISSING)
        return value if value is not MISSING else await self._load(key, loader, args)

    def set(self, key: Hashable, value: Any) -> None:
        """Store a value. A value read before an event and set after it is stale; `load` avoids that."""
        self._check_open("set an entry")
        try:
            self._keep(key, value)
        except TypeError as error:
            raise unhashable(error) from error
        self._loads.pop(key, None)  # a value that is being loaded is older than this one

    def remove(self, key: Hashable) -> None:
        """Invalidate one entry and the load of its key that is in flight."""
        try:
            self._entries.remove(key)
        except TypeError as error:
            raise unhashable(error) from error
        self._loads.pop(key, None)

    def clear(self) -> None:
        """Invalidate all entries and all loads in flight."""
        self._loads.clear()
        self._entries.clear()

    def invalidate_on(self, expression: str, entry: str | Callable[[Event], Hashable] | None = None) -> MokaCache:
        """Invalidate entries when a matching event is delivered on this node. Returns the cache.

        `entry` names the entry to invalidate: a template with `{fields}` of the expression, or a callable that takes
        the event and returns the entry's key. If `entry` is None or returns None, all entries are invalidated.
        """
        if self._closed:
            raise BusClosed("add a rule")
        template = KeyTemplate(expression)
        if entry is not None and not isinstance(entry, str) and not callable(entry):
            raise ConfigInvalid("entry", f"{entry!r} is neither a template nor a callable")
        if template.names and entry is None:
            raise ConfigInvalid(
                "entry", f"{expression!r} has fields: name the entry to invalidate, entry='…{{field}}…'"
            )
        if entry is None:
            return self._add(Rule(self, [template.expression], None))
        key_of = entry if callable(entry) else entry_of(template, entry)

        def keys_of(event: Event) -> Iterable[Hashable]:
            key = key_of(event)
            if key is None:
                self.clear()
            return () if key is None else (key,)

        return self._add(Rule(self, [template.expression], keys_of))

    async def ready(self) -> MokaCache:
        """Wait until the transports have subscribed to the events of all rules. `load` does this before it loads."""
        for rule in self._rules:
            if rule.ready is not None:
                await asyncio.shield(rule.ready)
                rule.ready = None
        return self

    def stats(self) -> dict[str, int]:
        """Return the counters `hits`, `misses`, `loads`, `load_errors`, `invalidations` (events that matched a rule)
        and `evictions` (because of capacity or age), and the current number of `entries`.
        """
        self._entries.run_pending_tasks()
        hits, misses = self._counted()
        return {
            "hits": hits,
            "misses": misses,
            "loads": self.loads,
            "load_errors": self.load_errors,
            "invalidations": self.invalidations,
            "evictions": self._evicted["size"] + self._evicted["expired"],
            "entries": self._entries.count(),
        }

    async def aclose(self) -> None:
        """Close the cache: drop its entries and rules. Pending loads raise `BusClosed`. Safe to call twice."""
        if self._closed:
            return
        self._closed, self._open = True, False
        self._host.forget_cache(self.name)
        ending: set[asyncio.Task[Any]] = set(self._tasks)
        ending |= {task for rule in self._rules if (task := rule.detach()) is not None}
        self.clear()
        self._entries.run_pending_tasks()
        for task in ending:
            task.cancel()
        if ending:  # with a timeout: a loader that ignores its cancellation must not block closing the bus
            await asyncio.wait(ending, timeout=self._host.close_timeout_s / 4)

    def begin(self) -> None:
        """Start to receive events and to store entries. The bus calls this when it is open."""
        if not self._closed:
            self._open = True
            for rule in self._rules:
                rule.attach(self._host)

    def fail(self, error: Exception) -> None:
        """Stop serving entries, because events are no longer received."""
        self._failed, self._open = error, False
        self.clear()

    # Internal, also used by `FunctionCache`.

    def _add(self, rule: Rule) -> MokaCache:
        self._rules.append(rule)
        if self._open:
            rule.attach(self._host)
        return self

    def _keep(self, key: Hashable, value: Any) -> None:
        self._entries.set(key, value)

    def _find(self, key: Hashable) -> Any:
        """Look up an entry without counting a hit or a miss."""
        return self._entries.get(key, MISSING)

    async def _load(self, key: Hashable, loader: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        value = self._find(key)  # it may have been stored since this coroutine was created
        if value is not MISSING:
            return value
        return await (self._loads.get(key) or self._begin_load(key, loader, args)).join()

    def _begin_load(self, key: Hashable, loader: Callable[..., Any], args: tuple[Any, ...]) -> Load:
        self._check_open("load")
        load = self._loads[key] = Load(lambda load: self._forget(key, load), self._check_open)
        load.task = task = asyncio.get_running_loop().create_task(self._run(key, load, loader, args))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # no caller may be left to fetch it
        return load

    async def _run(self, key: Hashable, load: Load, loader: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            await self.ready()
            self.loads += 1
            value = await call(loader, args)
            if self._loads.get(key) is load:
                self._keep(key, value)
            return value
        except Exception:
            self.load_errors += 1
            raise
        finally:
            self._forget(key, load)

    def _forget(self, key: Hashable, load: Load) -> None:
        if self._loads.get(key) is load:
            del self._loads[key]

    def _check_open(self, doing: str) -> None:
        if self._failed is not None:
            raise self._failed
        if not self._open:
            raise BusClosed(doing)


if TYPE_CHECKING:
    _port: type[Port] = MokaCache
