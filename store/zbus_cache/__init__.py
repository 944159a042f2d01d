"""The zbus cache: moka stores the entries, and events invalidate them.

After an event was delivered on this node, the cache serves neither an entry that the event invalidated nor a value
whose load began before the event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cache import MokaCache
from .functions import FunctionCache

if TYPE_CHECKING:
    from zbus.ports.cache import CacheHost, Limits, Wrapped

__all__ = ["FunctionCache", "MokaCache", "open_cache"]


def open_cache(host: CacheHost, name: str, limits: Limits, wrapped: Wrapped | None) -> MokaCache:
    """Return a cache, or the cache of one function if `wrapped` is given. It is usable once `begin` was called."""
    return MokaCache(host, name, limits) if wrapped is None else FunctionCache(host, name, limits, *wrapped)
