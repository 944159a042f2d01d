"""Mapping between topics of programs without zbus and keys.

A topic is text whose segments a separator divides. Characters that are illegal in a key are percent-encoded in the key,
and so is `%` itself, so no two topics share a key. A key that is not the key of any topic is rejected, because its
topic would belong to another key.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from zbus.errors import KeyInvalid
from zbus.keys import check_key

# Characters that are illegal in a key (see zbus.keys), the escape itself, and '/', if the separator is another one.
_ILLEGAL = re.compile(r"[\s\x00-\x1f\x7f-\x9f#?*$%/]|^@")


def key_from(topic: bytes, separator: str) -> str | None:
    """Return the key of a topic, or None if the topic does not make a legal key.

    >>> key_from(b"shop.orders/eu 1", "."), key_from(b"shop..x", "."), key_from(b"50%", "/")
    ('shop/orders%2Feu%201', None, '50%25')
    """
    try:
        key = "/".join(_ILLEGAL.sub(_escape, segment) for segment in topic.decode().split(separator))
        return check_key(key)
    except (UnicodeDecodeError, KeyInvalid):
        return None


def topic_from(key: str, separator: str) -> bytes | None:
    """Return the topic of a key, or None if the key is not the key of any topic.

    >>> topic_from("shop/orders%2Feu%201", "."), topic_from("v1.2/x", "."), topic_from("v1.2/x", "/")
    (b'shop.orders/eu 1', None, b'v1.2/x')
    """
    topic = separator.encode().join(unquote_to_bytes(segment) for segment in key.split("/"))
    return topic if key_from(topic, separator) == key else None


def topic_prefix(expression: str, separator: str) -> bytes:
    """Return the common prefix of the topics of all keys that match an expression. Other topics may share it.

    >>> topic_prefix("shop/orders/**", "."), topic_prefix("sh$*p/x", "/"), topic_prefix("a/b%2$*", "/")
    (b'shop.orders', b'sh', b'a')
    """
    wild = expression.find("*")
    if wild < 0:
        return topic_from(expression, separator) or b""
    *whole, part = expression[:wild].removesuffix("$").split("/")
    segments = [unquote_to_bytes(segment) for segment in whole]
    if part and "%" not in part:
        segments.append(part.encode())
    return separator.encode().join(segments)


def _escape(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found.group().encode())
