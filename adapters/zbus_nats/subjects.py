"""The mapping of keys to NATS subjects, and of key expressions to subscriptions.

Each segment is percent-encoded separately, so that two keys never share a subject, and no key can contain characters
with a meaning in NATS (`.`, `*`, `>`, a space, a line break). Decoding is strict: a subject maps to a key only if
encoding that key returns the same subject.

The server filters as precisely as NATS wildcards allow. A wider subscription covers the rest, and zbus filters exactly.
The subjects of a cover never overlap, so a frame arrives once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from zbus.errors import KeyInvalid
from zbus.keys import check_expression

REQUEST_PREFIX = "@ask."  # no encoded key has a bare '@'
INBOX_PREFIX = "_INBOX."  # inboxes for replies; the first segment of a key is never encoded like this
FOREIGN = (b"_INBOX.", b"@", b"$")  # inboxes, requests, and the server's own subjects

_BYTE = re.compile(rb"%([0-9A-F]{2})")

Tokens = tuple[str, ...]


class SubjectInvalid(ValueError):
    """Raised for a subject that does not map to a key."""


class Spelling:
    """A way to encode keys as subjects. `escaped` matches every character that is percent-encoded."""

    def __init__(self, escaped: str) -> None:
        self._escaped = re.compile(escaped)

    def encode(self, key: str) -> str:
        """Return the subject of a concrete key. Raises `KeyInvalid` if the key is not concrete."""
        _check_concrete(key)
        return ".".join(self._token(at, segment) for at, segment in enumerate(key.split("/")))

    def decode(self, subject: str) -> str:
        """Return the key of a subject. Raises `SubjectInvalid` if it does not map to a key."""
        try:
            key = "/".join(_unescaped(token) for token in subject.split("."))
            if self.encode(key) != subject:
                raise SubjectInvalid("not the canonical encoding of its key")
        except KeyInvalid as error:
            raise SubjectInvalid(error.reason) from error
        return key

    def cover(self, expressions: Iterable[str]) -> set[str]:
        """Return subjects that cover the canonical expressions and do not overlap."""
        chosen: dict[str, set[Tokens]] = {}  # by first token: subjects with different first tokens cannot overlap
        for expression in expressions:
            for tokens in self._subjects(expression):
                _add(chosen, tokens)
        return {".".join(tokens) for bucket in chosen.values() for tokens in bucket}

    def _token(self, at: int, segment: str) -> str:
        if at == 0 and segment == "_INBOX":
            return "%5FINBOX"
        return self._escaped.sub(_escape, segment)

    def _subjects(self, expression: str) -> Iterator[Tokens]:
        tokens: list[str] = []
        segments = expression.split("/")
        for at, segment in enumerate(segments):
            if segment == "**":
                # `>` matches one token or more, and `**` zero or more: at the end that takes two subjects.
                if at == len(segments) - 1 and tokens:
                    yield tuple(tokens)
                yield (*tokens, ">")
                return
            tokens.append("*" if segment == "*" or "$*" in segment else self._token(at, segment))
        yield tuple(tokens)


ENCODED = Spelling("[^A-Za-z0-9_-]")
"""The encoding for zbus frames: ASCII for every key."""

PLAIN = Spelling(r"[.%>*\s\x00-\x1f\x7f-\x9f]")
"""The encoding for plain messages: escapes only '%' and what NATS cannot carry inside a token."""


@lru_cache(maxsize=16_384)
def encode_key(key: str) -> str:
    """Return the subject of a concrete key.

    >>> encode_key("shop/orders.eu/über")
    'shop.orders%2Eeu.%C3%BCber'
    """
    return ENCODED.encode(key)


def decode_subject(subject: str) -> str:
    """Return the key of a subject. Raises `SubjectInvalid` if it does not map to a key.

    >>> decode_subject("shop.orders%2Eeu.%C3%BCber")
    'shop/orders.eu/über'
    """
    return ENCODED.decode(subject)


def cover(expressions: Iterable[str]) -> set[str]:
    """Return subjects that cover the canonical expressions and do not overlap.

    >>> sorted(cover(["shop/orders/**", "shop/orders/*", "a/**/c"]))
    ['a.>', 'shop.orders', 'shop.orders.>']
    """
    return ENCODED.cover(expressions)


def _escape(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode())


def _unescaped(token: str) -> str:
    if "%" not in token:
        return token
    try:
        return _BYTE.sub(lambda found: bytes([int(found[1], 16)]), token.encode()).decode()
    except UnicodeError as error:
        raise SubjectInvalid("a token is not UTF-8") from error


def _add(chosen: dict[str, set[Tokens]], tokens: Tokens) -> None:
    """Add a subject. Subjects that overlap are merged into one that includes both."""
    while True:
        other = _overlapping(chosen, tokens)
        if other is None:
            chosen.setdefault(tokens[0], set()).add(tokens)
            return
        chosen[other[0]].discard(other)
        tokens = _union(tokens, other)


def _overlapping(chosen: dict[str, set[Tokens]], tokens: Tokens) -> Tokens | None:
    firsts = chosen if tokens[0] in ("*", ">") else {tokens[0], "*", ">"}
    for first in firsts:
        bucket = chosen.get(first, ())
        if tokens in bucket:
            return tokens
        for other in bucket:
            if _overlap(tokens, other):
                return other
    return None


def _overlap(one: Tokens, other: Tokens) -> bool:
    for left, right in zip(one, other, strict=False):
        if left == ">" or right == ">":
            return True
        if left != right and left != "*" and right != "*":
            return False
    return len(one) == len(other)


def _union(one: Tokens, other: Tokens) -> Tokens:
    tokens: list[str] = []
    for left, right in zip(one, other, strict=False):
        if left == ">" or right == ">":
            return (*tokens, ">")
        tokens.append(left if left == right else "*")
    return tuple(tokens)


def _check_concrete(key: str) -> None:
    """Raise `KeyInvalid` for a wildcard. A fabric also carries system keys, so a leading '@' is allowed."""
    if check_expression(key) != key or "*" in key or "$" in key:
        raise KeyInvalid(key, "must be one concrete key, without wildcards")
