"""Keys and key expressions: their validation and matching.

An event has a key (`shop/orders/created`); a subscriber has key expressions (`shop/*/created`). The
rules are Zenoh's: `*` matches one segment, `**` any number of segments, and `$*` any text inside a
segment; no wildcard matches a segment that starts with `@`. A key that one of the transports cannot
carry is rejected here, so that all transports accept the same keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache, partial

from .errors import KeyInvalid

EXPRESSION = "key expression"
KEY_BYTES_MAX = 1024
SEGMENTS_MAX = 64
KEYS_KNOWN_MAX = 10_000  # for each set of expressions

# Whitespace and control characters break NATS subjects; '#' and '?' are illegal in Zenoh.
_ILLEGAL = re.compile(r"[\s\x00-\x1f\x7f-\x9f#?]")


def check_key(key: str, use: str = "an event is published") -> str:
    """Return `key` if it is a valid concrete key. Raises `KeyInvalid` with the reason; `use` is part of it.

    >>> check_key("shop/orders/created")
    'shop/orders/created'
    """
    _check_common(key)
    if key[0] == "@":
        raise KeyInvalid(key, "a leading '@' is reserved for the system")
    if "*" in key:
        raise KeyInvalid(key, f"{use} to one concrete key, without wildcards")
    if "$" in key:
        raise KeyInvalid(key, "'$' is reserved for the wildcard '$*'")
    return key if type(key) is str else str.__str__(key)  # encoders accept no subclasses, such as a StrEnum


def check_expression(expression: str) -> str:
    """Return `expression` in canonical form. Raises `KeyInvalid` with the reason if it is invalid.

    >>> check_expression("shop/**/**/$*")
    'shop/*/**'
    """
    if not isinstance(expression, str):
        raise KeyInvalid(expression, f"a key expression is text, not {type(expression).__name__}", EXPRESSION)
    return _canonical_expression(expression)


@lru_cache(maxsize=16_384)
def _canonical_expression(expression: str) -> str:
    _check_common(expression, EXPRESSION)
    segments = [_check_segment(expression, segment) for segment in expression.split("/")]
    return "/".join(_canonical(segments))


def matches(expression: str, key: str) -> bool:
    """Return whether the canonical `expression` matches the concrete `key`.

    >>> matches("a/**/c", "a/c"), matches("ab$*cd", "abxcd"), matches("**", "@zbus/bus")
    (True, True, False)
    """
    return _matches(expression.split("/"), key.split("/"))


def includes(expression: str, other: str) -> bool:
    """Return whether `expression` matches every key that `other` matches, by Zenoh's rules. Both must be canonical.

    >>> includes("shop/**", "shop/*/created"), includes("shop/*", "shop/**"), includes("**", "shop/@x")
    (True, False, False)
    """
    return _includes(expression.split("/"), other.split("/"))


class KeySet:
    """A set of key expressions: it contains a key if any of them matches.

    >>> "shop/orders/created" in KeySet(["shop/*/created", "audit/**"])
    True
    """

    __slots__ = ("_matches", "expressions", "unfiltered")

    def __init__(self, expressions: Iterable[str]) -> None:
        self.expressions = tuple(dict.fromkeys(check_expression(each) for each in expressions))
        if not self.expressions:
            raise KeyInvalid("", "name at least one, such as '**'", EXPRESSION)
        self.unfiltered = False
        # Not a `Memo`: packages of `util` import this module.
        self._matches = lru_cache(KEYS_KNOWN_MAX)(partial(_matches_any, self.expressions))

    @classmethod
    def all(cls) -> KeySet:
        """Return the set of all keys, including those with '@' segments, which no wildcard matches."""
        keys = cls(["**"])
        keys.unfiltered = True
        return keys

    def __contains__(self, key: str) -> bool:
        if self.unfiltered:
            return True
        return self._matches(key)


def _matches_any(expressions: Iterable[str], key: str) -> bool:
    return any(matches(each, key) for each in expressions)


def segment_pattern(segment: str) -> re.Pattern[str]:
    """Return the regular expression of a segment with `$*`.

    Each part in the middle matches at its first position, without backtracking. This finds a match if one exists;
    with backtracking, a segment with many wildcards would take exponential time.
    """
    first, *middle, last = [re.escape(part) for part in segment.split("$*")]
    return re.compile(first + "".join(f"(?>.*?{part})" for part in middle) + ".*" + last, re.DOTALL)


_pattern = lru_cache(maxsize=4096)(segment_pattern)


def _check_common(key: str, noun: str = "key") -> None:
    if not isinstance(key, str):
        raise KeyInvalid(key, f"a key is text, not {type(key).__name__}", noun)
    if not key:
        raise KeyInvalid(key, "it is empty", noun)
    if len(key) > KEY_BYTES_MAX or len(key.encode("utf-8", "surrogatepass")) > KEY_BYTES_MAX:
        raise KeyInvalid(key, f"it is over {KEY_BYTES_MAX} bytes", noun)
    if key[0] == "/" or key[-1] == "/" or "//" in key:
        raise KeyInvalid(key, "it has an empty segment", noun)
    found = _ILLEGAL.search(key)
    if found:
        raise KeyInvalid(key, f"it contains {found.group()!r}, which not every transport can carry", noun)
    if any("\ud800" <= character <= "\udfff" for character in key):
        raise KeyInvalid(key, "it contains half a surrogate pair, which is not valid UTF-8", noun)
    if key.count("/") >= SEGMENTS_MAX:
        raise KeyInvalid(key, f"it has over {SEGMENTS_MAX} segments", noun)


def _check_segment(expression: str, segment: str) -> str:
    if segment in ("*", "**"):
        return segment
    rest = segment.replace("$*", "")
    if "*" in rest:
        if "." in expression and "/" not in expression:
            meant = expression.replace(".", "/")
            raise KeyInvalid(expression, f"segments are separated by '/': write {meant!r}", EXPRESSION)
        raise KeyInvalid(expression, "'*' and '**' stand for whole segments; inside one, write '$*'", EXPRESSION)
    if "$" in rest:
        raise KeyInvalid(expression, "'$' is legal only in '$*'", EXPRESSION)
    if segment[0] == "@" and rest != segment:
        reason = "a segment that starts with '@' is literal and must not contain a wildcard"
        raise KeyInvalid(expression, reason, EXPRESSION)
    while "$*$*" in segment:
        segment = segment.replace("$*$*", "$*")
    return "*" if segment == "$*" else segment


def _canonical(segments: list[str]) -> list[str]:
    """Merge adjacent `**` and put `*` before an adjacent `**`, so that each meaning has one spelling."""
    out: list[str] = []
    for segment in segments:
        if out and out[-1] == "**":
            if segment == "**":
                continue
            if segment == "*":
                out.insert(-1, "*")
                continue
        out.append(segment)
    return out


def _matches(expression: list[str], key: list[str]) -> bool:
    """Match without recursion: on a mismatch, the last `**` takes one more segment."""
    at_expression = at_key = 0
    retry_expression = retry_key = -1
    while at_key < len(key):
        if at_expression < len(expression) and expression[at_expression] == "**":
            retry_expression, retry_key = at_expression, at_key
            at_expression += 1
        elif at_expression < len(expression) and _segment_matches(expression[at_expression], key[at_key]):
            at_expression, at_key = at_expression + 1, at_key + 1
        elif retry_expression >= 0 and key[retry_key][0] != "@":
            retry_key += 1
            at_expression, at_key = retry_expression + 1, retry_key
        else:
            return False
    return all(segment == "**" for segment in expression[at_expression:])


def _segment_matches(expression: str, segment: str) -> bool:
    if expression == segment:
        return True
    if segment[0] == "@":
        return False
    return expression == "*" or ("$*" in expression and _pattern(expression).fullmatch(segment) is not None)


def _includes(expression: list[str], other: list[str]) -> bool:
    """Compare from the end: for each pair of suffixes once, whether the first includes the second."""
    # For the current suffix of `expression`: whether it includes the suffix of `other` that begins at each index.
    rests = [at == len(other) for at in range(len(other) + 1)]
    for segment in reversed(expression):
        following, rests = rests, [False] * (len(other) + 1)
        for at in range(len(other), -1, -1):
            if segment != "**":
                rests[at] = at < len(other) and _segment_includes(segment, other[at]) and following[at + 1]
            else:  # it matches nothing, or one more segment that does not start with '@'
                rests[at] = following[at] or (at < len(other) and other[at][0] != "@" and rests[at + 1])
    return rests[0]


def _segment_includes(segment: str, other: str) -> bool:
    """Return whether a segment includes another. A `$*` of `other` is treated as text: no part of `segment` has one."""
    return other != "**" and not (other == "*" and segment != "*") and _segment_matches(segment, other)
