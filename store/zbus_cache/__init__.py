"""The cache of zbus: moka keeps the entries, events let them fall.

A stale entry is never served after the event that outdates it was delivered on this node, and neither is what was
being loaded when it came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cache import MokaCache
from .functions import FunctionCache

if TYPE_CHECKING:
    from zbus.ports.cache import CacheHost, Limits, Wrapped

__all__ = ["FunctionCache", "MokaCache", "open_cache"]


def open_cache(host: CacheHost, name: str, limits: Limits, wrapped: Wrapped | None) -> MokaCache:
    """A cache, or with `wrapped` the cache of one function. It works from `begin` on."""
    return MokaCache(host, name, limits) if wrapped is None else FunctionCache(host, name, limits, *wrapped)
