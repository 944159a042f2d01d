"""Mapping between keys and Dynamo's places: a topic in a namespace, a component or an endpoint.

`ns/topic`, `ns/component/topic` and `ns/component/endpoint/topic` are the keys that
`EventPublisher.for_namespace`, `for_component` and `for_endpoint` make, and the only ones that this wire
can carry. The mapping to subjects and back loses nothing; subjects that do not map to a valid key are rejected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from zbus.errors import KeyInvalid, TransportUnsupported
from zbus.keys import check_key

from .refusal import NotDynamo

KINDS = ("namespace", "component", "endpoint")
DEPTHS = (2, 3, 4)  # segments of a key, the topic included
_KEPT = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_ENCODED = [chr(byte) if byte in _KEPT else f"%{byte:02X}" for byte in range(256)]


class Scoped(NamedTuple):
    """The place of an event: the names of its scope (one to three), and the topic."""

    scope: tuple[str, ...]
    topic: str

    @property
    def kind(self) -> str:
        """The kind of the scope: `namespace`, `component` or `endpoint`."""
        return KINDS[len(self.scope) - 1]

    @property
    def key(self) -> str:
        """The key of zbus for this place."""
        return "/".join((*self.scope, self.topic))

    @property
    def subject_prefix(self) -> str:
        """The subject of the scope, without a topic."""
        return ".".join(_paired(encode_segment(name) for name in self.scope))

    @property
    def subject(self) -> str:
        """The NATS subject, which is also the topic frame in broker mode.

        >>> Scoped(("ns", "comp"), "kv.events").subject
        'namespace.ns.component.comp.kv%2Eevents'
        """
        return f"{self.subject_prefix}.{encode_segment(self.topic)}"

    @property
    def path(self) -> str:
        """The path of a discovery record, without the publisher."""
        return "/".join((*_paired(encode_segment(name) for name in self.scope), "topic", encode_segment(self.topic)))


def encode_segment(name: str) -> str:
    """Return a name as subjects and paths contain it: letters, digits, `_` and `-` stay, other bytes become `%XX`."""
    return "".join([_ENCODED[byte] for byte in name.encode()])


@lru_cache(maxsize=16_384)
def place_of_key(key: str) -> Scoped:
    """Return the place of a concrete key. Raises `KeyInvalid` if this wire cannot carry it."""
    segments = key.split("/")
    if len(segments) not in DEPTHS:
        raise KeyInvalid(key, "the dynamo wire carries keys of 2 to 4 segments: namespace[/component[/endpoint]]/topic")
    return Scoped(tuple(segments[:-1]), segments[-1])


@lru_cache(maxsize=16_384)
def place_of_subject(subject: str) -> Scoped:
    """Return the place of a subject. Raises `EventInvalid` if it is not Dynamo's, or its key is not valid."""
    *scope, topic = subject.split(".")
    if len(scope) not in (2, 4, 6) or tuple(scope[0::2]) != KINDS[: len(scope) // 2]:
        raise NotDynamo("invalid_subject", f"the subject {subject[:200]!r} does not name a topic in a dynamo scope")
    place = Scoped(tuple(_decode_segment(name) for name in scope[1::2]), _decode_segment(topic))
    check_place(place)
    if place.subject != subject:
        raise NotDynamo("invalid_subject", f"the subject {subject[:200]!r} is not in canonical form")
    return place


def check_place(place: Scoped) -> None:
    """Raise `EventInvalid` if the place does not map to a valid key."""
    if any("/" in name for name in (*place.scope, place.topic)):
        raise KeyInvalid(place.key, "a name in it contains '/', which separates the segments of a key")
    check_key(place.key)


def patterns(expression: str) -> Iterator[tuple[str, ...]]:
    """Return the shapes, of 2 to 4 segments each, of the keys that a canonical expression can match.

    >>> sorted(patterns("ns/**/t"))
    [('ns', '*', '*', 't'), ('ns', '*', 't'), ('ns', 't')]
    """
    segments = tuple("*" if "$*" in segment else segment for segment in expression.split("/"))
    for depth in DEPTHS:
        yield from set(_expand(segments, depth))


def subjects(expressions: Iterable[str]) -> list[str]:
    """Return NATS subjects with wildcards that cover everything that the expressions match, without overlap.

    Subjects that would overlap are merged into a wider one. The receiver must apply the exact filter.

    >>> subjects(["ns/*/t"]), subjects(["a/*/c", "*/b/c"]), subjects(["a/b/c/d/e"])
    (['namespace.ns.component.*.t'], ['namespace.*.component.*.c'], [])
    """
    apart: set[tuple[str, ...]] = set()
    for expression in expressions:
        for pattern in patterns(expression):
            while met := [other for other in apart if _overlap(other, pattern)]:
                apart.difference_update(met)
                for other in met:
                    pattern = tuple(a if a == b else "*" for a, b in zip(pattern, other, strict=True))
            apart.add(pattern)
    return sorted(".".join((*_paired(_coded(each[:-1])), *_coded(each[-1:]))) for each in apart)


def check_expressions(transport: str, expressions: Iterable[str]) -> None:
    """Raise `TransportUnsupported` if no key of this wire can match one of the expressions."""
    hopeless = [each for each in expressions if not subjects([each])]
    if hopeless:
        what = f"keys of other than 2 to 4 segments on the dynamo wire, as {', '.join(hopeless)} asks for"
        raise TransportUnsupported(transport, what)


def prefixes(expressions: Iterable[str]) -> list[bytes]:
    """Return prefixes of the topic frame that cover the expressions, for subscriptions at a ZMQ broker."""
    found = {subject.partition("*")[0].encode() for subject in subjects(expressions)}
    return sorted(each for each in found if not any(each != other and each.startswith(other) for other in found))


def _coded(names: Iterable[str]) -> list[str]:
    return [name if name == "*" else encode_segment(name) for name in names]


def _paired(names: Iterable[str]) -> Iterator[str]:
    """Yield `namespace`, its name, `component`, its name, …"""
    for kind, name in zip(KINDS, names, strict=False):
        yield kind
        yield name


def _decode_segment(text: str) -> str:
    try:
        return unquote_to_bytes(text).decode()
    except UnicodeDecodeError as error:
        raise NotDynamo("invalid_subject", f"the name {text[:200]!r} is not UTF-8") from error


def _expand(segments: tuple[str, ...], depth: int) -> Iterator[tuple[str, ...]]:
    """Return every expansion of an expression to exactly `depth` segments."""
    if not segments or depth == 0:
        if depth == 0 and all(segment == "**" for segment in segments):
            yield ()
        return
    first, rest = segments[0], segments[1:]
    if first != "**":
        yield from ((first, *tail) for tail in _expand(rest, depth - 1))
        return
    yield from _expand(rest, depth)
    yield from (("*", *tail) for tail in _expand(segments, depth - 1))


def _overlap(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return len(one) == len(other) and all(a == b or "*" in (a, b) for a, b in zip(one, other, strict=True))
