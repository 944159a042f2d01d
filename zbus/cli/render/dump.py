"""Full payloads for people: indented JSON, text, or a hex dump.

JSON is indented without decoding it: numbers keep their digits, and duplicate names are shown.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from .eventline import printable

BYTES_A_LINE = 16


def dump(payload: bytes) -> Iterator[str]:
    """Return the lines of a payload, without characters that control a terminal.

    >>> list(dump(b'{"id":1.50,"tags":["x"]}'))
    ['{', '  "id": 1.50,', '  "tags": [', '    "x"', '  ]', '}']
    >>> list(dump(bytes([0, 255]) + b"abc"))
    ['00000000  00 ff 61 62 63                                    |..abc|']
    """
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return hex_lines(payload)
    if not text:
        return iter(["(empty)"])
    if "\0" in text:  # binary data that happens to be valid UTF-8
        return hex_lines(payload)
    # Only "\n" ends a line; other line separators are shown as escapes.
    return (printable(line) for line in _json(payload) or text.removesuffix("\n").split("\n"))


def hex_lines(data: bytes) -> Iterator[str]:
    """Yield lines in the format of `hexdump -C`: offset, sixteen bytes in two groups, and their ASCII text."""
    for at in range(0, len(data), BYTES_A_LINE):
        part = data[at : at + BYTES_A_LINE]
        left, right = part[:8].hex(" "), part[8:].hex(" ")
        shown = "".join(chr(each) if 32 <= each < 127 else "." for each in part)
        yield f"{at:08x}  {left:<23}  {right:<23}  |{shown}|"


def _json(payload: bytes) -> list[str]:
    if payload[:1] not in (b"{", b"["):
        return []
    try:
        return msgspec.json.format(payload, indent=2).decode().split("\n")
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return []
