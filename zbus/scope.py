"""Scopes: a namespace, a component in it, and an endpoint of that, as names for the first segments of a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .errors import KeyInvalid
from .keys import check_key

_KINDS = ("namespace", "component", "endpoint")


class Opens(Protocol):
    """The bus, as a scope uses it: it opens publishers and subscriptions."""

    @property
    def publisher(self) -> Callable[[str], Any]:
        """`await publisher(key)`."""

    @property
    def subscribe(self) -> Callable[..., Any]:
        """`subscribe(*key_exprs, **options)`."""


class Scope:
    """The beginning of a key: `bus.namespace("shop").component("orders").endpoint("api")`."""

    __slots__ = ("bus", "segments")

    def __init__(self, bus: Opens, *segments: str) -> None:
        for segment in segments:
            _check_segment(segment)
        self.bus, self.segments = bus, segments

    @property
    def kind(self) -> str:
        """`namespace`, `component` or `endpoint`."""
        return _KINDS[len(self.segments) - 1]

    def component(self, name: str) -> Scope:
        """Return a component of this namespace. Raises `KeyInvalid` if this is not a namespace."""
        return self._inner("namespace", name)

    def endpoint(self, name: str) -> Scope:
        """Return an endpoint of this component. Raises `KeyInvalid` if this is not a component."""
        return self._inner("component", name)

    def key(self, topic: str, kind: str) -> str:
        """Return the key of a topic in this scope. Raises `KeyInvalid` if the scope is not of this kind."""
        if self.kind != kind:
            raise KeyInvalid("/".join(self.segments), f"this scope is a {self.kind}, but must be a {kind}")
        _check_segment(topic)
        return "/".join((*self.segments, topic))

    def _inner(self, kind: str, name: str) -> Scope:
        if self.kind != kind:
            raise KeyInvalid("/".join(self.segments), f"only a {kind} has such a part, but this is a {self.kind}")
        return Scope(self.bus, *self.segments, name)


def _check_segment(segment: str) -> None:
    check_key(segment)
    if "/" in segment:
        raise KeyInvalid(segment, "a namespace, component, endpoint or topic must be one segment, without '/'")
