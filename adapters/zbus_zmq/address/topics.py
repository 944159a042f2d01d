"""Keys as ZMQ topics: a topic is what libzmq compares byte by byte with the prefixes of subscribers.

Each segment is percent-encoded and followed by `/`, and a whole key ends with a zero byte. So no two keys share a
topic, `a/b` is not a prefix of `a/bc`, and an expression without wildcards selects exactly its key. An expression with
wildcards selects by the text before the first wildcard; the receiver applies the exact filter. Topics are ASCII, which
leaves those that begin with the byte 255 to the nodes themselves: the marks below.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote, unquote_to_bytes

MARK = 0xFF
TOPIC_BYTES_MAX = 4096  # a key has at most 1024 bytes, and each takes at most three characters here
_END = b"\x00"
_MARK = bytes([MARK])


def topic_of(key: str) -> bytes:
    """Return the topic of a concrete key.

    >>> topic_of("shop/é")
    b'shop/%C3%A9/\\x00'
    """
    return "".join(f"{quote(segment, safe='@')}/" for segment in key.split("/")).encode() + _END


def key_of(topic: bytes) -> str | None:
    """Return the key of a topic, or None if the bytes are not the topic of a key.

    >>> key_of(b"shop/%C3%A9/\\x00"), key_of(b"shop/%c3%a9/\\x00")
    ('shop/é', None)
    """
    if len(topic) > TOPIC_BYTES_MAX or not topic.endswith(b"/\x00"):
        return None
    try:
        key = unquote_to_bytes(topic[:-2]).decode()
    except UnicodeDecodeError:
        return None
    return key if key and topic_of(key) == topic else None


def prefix_of(expression: str) -> bytes:
    """Return the longest prefix that all topics matching a canonical expression share.

    >>> prefix_of("a/b"), prefix_of("a/**"), prefix_of("a/b$*c"), prefix_of("**")
    (b'a/b/\\x00', b'a/', b'a/b', b'')
    """
    wild = expression.find("*")
    if wild < 0:
        return topic_of(expression)
    literal = expression[:wild].removesuffix("$")
    return "/".join(quote(segment, safe="@") for segment in literal.split("/")).encode()


def widest(prefixes: Iterable[bytes]) -> set[bytes]:
    """Return the prefixes that do not begin with another one; the others are redundant.

    >>> sorted(widest([b"a/", b"a/b/", b"c/"]))
    [b'a/', b'c/']
    """
    kept: list[bytes] = []
    for prefix in sorted(set(prefixes)):
        if not kept or not prefix.startswith(kept[-1]):
            kept.append(prefix)
    return set(kept)


def mark_of(node: str, turn: int) -> bytes:
    """Return the topic that shows a publisher that this node's subscriptions up to this turn have arrived."""
    return _MARK + f"{node}.{turn}".encode()


def node_of(mark: bytes) -> tuple[str, int] | None:
    """Return the node and turn of a mark, or None for other bytes."""
    node, _, turn = mark[1:].partition(b".")
    if mark[:1] != _MARK or len(mark) > 64 or not node.isalnum() or not turn.isdigit():
        return None
    return node.decode("ascii"), int(turn)
