"""A cache: moka's entries, loads under way, and the rules by which both fall.

An entry is kept only by the load that is still the one of its key when it ends. A rule that lets a key fall takes
its load out of the books too: those who wait for it get what it read, nobody joins it any more, and it keeps nothing.
So nothing that was read before an event is served to whoever asks after it.
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
    """`bus.cache()`: entries that fall when events say so. Belongs to the event loop of its bus.

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
        """The value; on a miss what `loader(*args)` returns, loaded once for all who ask meanwhile.

        An async loader is awaited, a plain one runs on a thread. What it raises, everybody who waits gets, and the
        next call loads again. Cancelled, the load goes on while others wait for it, and else is cancelled.
        """
        value = self.get(key, MISSING)
        return value if value is not MISSING else await self._load(key, loader, args)

    def set(self, key: Hashable, value: Any) -> None:
        """Keep a value. One that was read before an event and is set after it is stale; `load` sees to that."""
        self._check_open("set an entry")
        try:
            self._keep(key, value)
        except TypeError as error:
            raise unhashable(error) from error
        self._loads.pop(key, None)  # what it read is older than this

    def remove(self, key: Hashable) -> None:
        """Let one entry fall, and what is being loaded for it."""
        try:
            self._entries.remove(key)
        except TypeError as error:
            raise unhashable(error) from error
        self._loads.pop(key, None)

    def clear(self) -> None:
        """Let all entries fall, and what is being loaded."""
        self._loads.clear()
        self._entries.clear()

    def invalidate_on(self, expression: str, entry: str | Callable[[Event], Hashable] | None = None) -> MokaCache:
        """Let entries fall when a matching event is delivered here; returns the cache.

        `entry` names the one that falls: a template over the `{fields}` of the expression, or a callable that gets
        the event. Without it, or if it returns None, all fall.
        """
        if self._closed:
            raise BusClosed("add a rule")
        template = KeyTemplate(expression)
        if entry is not None and not isinstance(entry, str) and not callable(entry):
            raise ConfigInvalid("entry", f"{entry!r} is neither a template nor a callable")
        if template.names and entry is None:
            raise ConfigInvalid("entry", f"{expression!r} has fields, so say which entry falls: entry='…{{field}}…'")
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
        """Wait until the transports have been told which events are wanted; `load` does this before it loads."""
        for rule in self._rules:
            if rule.ready is not None:
                await asyncio.shield(rule.ready)
                rule.ready = None
        return self

    def stats(self) -> dict[str, int]:
        """What was counted: `hits`, `misses`, `loads`, `load_errors`, `invalidations` (events that matched a rule),
        `evictions` (for lack of room, or of time), and the `entries` there are.
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
        """Let everything go: entries, rules, and loads, whose callers get `BusClosed`. Safe to call twice."""
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
        if ending:  # a loader that does not heed that must not hold up the bus
            await asyncio.wait(ending, timeout=self._host.close_timeout_s / 4)

    def begin(self) -> None:
        """The bus is open: watch for events, and keep entries from now on."""
        if not self._closed:
            self._open = True
            for rule in self._rules:
                rule.attach(self._host)

    def fail(self, error: Exception) -> None:
        """Events are no longer seen: nothing may be served any more."""
        self._failed, self._open = error, False
        self.clear()

    # For rules and functions.

    def _add(self, rule: Rule) -> MokaCache:
        self._rules.append(rule)
        if self._open:
            rule.attach(self._host)
        return self

    def _keep(self, key: Hashable, value: Any) -> None:
        self._entries.set(key, value)

    def _find(self, key: Hashable) -> Any:
        """Without counting."""
        return self._entries.get(key, MISSING)

    async def _load(self, key: Hashable, loader: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        value = self._find(key)  # it may have come since this coroutine was made
        if value is not MISSING:
            return value
        return await (self._loads.get(key) or self._begin_load(key, loader, args)).join()

    def _begin_load(self, key: Hashable, loader: Callable[..., Any], args: tuple[Any, ...]) -> Load:
        self._check_open("load")
        load = self._loads[key] = Load(lambda load: self._forget(key, load), self._check_open)
        load.task = task = asyncio.get_running_loop().create_task(self._run(key, load, loader, args))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # all who waited may have gone
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
