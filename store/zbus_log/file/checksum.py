"""The checksum of an event, which is stored with it and covers everything that a reader is given.

It is the CRC-32 of five numbers (offset, publisher, sequence, time and key), of the headers and of the payload. For the
key, the number is the CRC-32 of its name: an id says nothing if the table of keys is damaged. Version 0.1 used the id.
A checksum does not say of which kind it is, so a reader accepts either; that both fit by chance is as unlikely as that
one does.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

crc32 = zlib.crc32
pack_numbers = struct.Struct("<qqqqq").pack  # offset, publisher, sequence, time, and the number of the key


class NamedKey(NamedTuple):
    """A key as the events of a log refer to it: its id, and the number that stands for its name in checksums."""

    id: int
    number: int


def key_number(name: str) -> int:
    """Return the number that stands for a key in the checksums of its events."""
    return crc32(name.encode())


def checksum(numbers: bytes, headers: bytes | None, payload: bytes) -> int:
    """Return the checksum of an event, from its packed numbers."""
    crc = crc32(numbers)
    if headers:
        crc = crc32(headers, crc)
    return crc32(payload, crc)
