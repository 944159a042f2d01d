"""A payload in full, for people who look for what is wrong with it: JSON on many lines, text, or bytes in hex.

Nothing is decoded and written again: numbers keep their digits, and a name that occurs twice is shown twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from .eventline import printable

BYTES_A_LINE = 16


def dump(payload: bytes) -> Iterator[str]:
    """The lines of a payload; none of them can control a terminal.

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
    if "\0" in text:  # that is no text, although it could be read as such
        return hex_lines(payload)
    # By "\n" alone: whatever else may end a line is to be seen.
    return (printable(line) for line in _json(payload) or text.removesuffix("\n").split("\n"))


def hex_lines(data: bytes) -> Iterator[str]:
    """Offset, sixteen bytes in two groups, and what of them is ASCII: as `hexdump -C` writes it."""
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
