"""Lookup of implementations by name through entry points, so that the core imports none of them."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, cast

from .errors import ConfigInvalid

if TYPE_CHECKING:
    from .config import BusConfig
    from .observe.tracing import Tracing
    from .ports.cache import Cache, CacheHost, Limits, Wrapped
    from .ports.fabric import Fabric
    from .ports.log import Log


def open_log(config: BusConfig) -> Log | None:
    """Open the configured log, or return None without one. Blocks: call it off the event loop."""
    if config.log is None:
        return None
    scheme = log_scheme(config.log)
    if scheme not in _found("zbus.logs") and scheme.partition("+")[0] in _found("zbus.fabrics"):
        raise ConfigInvalid(
            "log", f'this is a transport, and the first argument is the log: write transport="{scheme}://…"'
        )
    return cast("Log", _load("zbus.logs", scheme, "log")(config))


def log_scheme(log: str) -> str:
    """Return the kind of a log: the scheme of a URL, "memory", or "sqlite" for a path.

    >>> log_scheme("app.db"), log_scheme("memory"), log_scheme("nats://127.0.0.1:4222/EVENTS")
    ('sqlite', 'memory', 'nats')
    """
    scheme, separator, _ = log.partition("://")
    return scheme if separator else "memory" if log == "memory" else "sqlite"


def open_fabric(config: BusConfig, url: str, session: Any = None) -> Fabric:
    """Open the transport of a URL or a bare name. Blocks: call it off the event loop.

    A wire format other than that of zbus has its own implementation, such as `zmq+dynamo`.
    """
    scheme = url.partition("://")[0]
    name = scheme if config.wire == "zbus" else f"{scheme}+{config.wire}"
    return cast("Fabric", _load("zbus.fabrics", name, "transport")(config, url, session))


def open_tracing(config: BusConfig) -> Tracing | None:
    """Return the source of spans, or None if tracing is off. With `auto`, it is on if OpenTelemetry is imported."""
    if config.tracing == "off" or (config.tracing == "auto" and sys.modules.get("opentelemetry.trace") is None):
        return None
    try:
        from .observe.tracing import Tracing
    except ImportError as error:
        if config.tracing == "auto":
            return None
        reason = "'on' needs opentelemetry-api, which is missing: pip install 'zbus-mesh[tracing]'"
        raise ConfigInvalid("tracing", reason) from error
    return Tracing()


def open_cache(host: CacheHost, name: str, limits: Limits, wrapped: Wrapped | None = None) -> Cache:
    """Return a cache, or the cache of one function if `wrapped` is given. Call `begin` when the bus is open."""
    return cast("Cache", _load("zbus.caches", "moka", "cache")(host, name, limits, wrapped))


@cache  # the search reads a file of every installed package: a third of the work of opening a bus
def _found(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def _load(group: str, name: str, field: str) -> Any:
    if name not in _found(group):
        _found.cache_clear()  # it may have been installed since, from a notebook
    found = _found(group)
    if name not in found:
        raise ConfigInvalid(field, f"there is no {field} {name!r}; this installation has: {', '.join(sorted(found))}")
    try:
        return found[name].load()
    except ImportError as error:
        raise ConfigInvalid(field, f"{name!r} {missing(error, name.partition('+')[0])}") from error


def missing(error: ImportError, extra: str | None) -> str:
    """Return the end of a sentence that says which module something needs, and how to get it from `extra`."""
    name = error.name.partition(".")[0] if error.name else str(error)
    if name in sys.stdlib_module_names:
        return f"needs {name}, which Python does not have on this platform"
    how = f"pip install 'zbus-mesh[{extra}]'" if extra else "zbus doctor prints the line that installs it"
    return f"needs {name}, which is missing: {how}"
