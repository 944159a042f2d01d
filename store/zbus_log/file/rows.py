"""Events as rows, many at a time: one SQL statement writes a batch, one reads a page.

A Python driver releases and takes the interpreter lock for every row that it writes or reads, and
beside a busy event loop each of these can take milliseconds. So a batch is passed as one JSON array
of numbers and one blob of all bodies, and a page is returned the same way: SQLite processes the
whole batch in a single step, on another core, while Python continues.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from zbus.errors import EventCorrupt, LogError
from zbus.event import Event
from zbus.headers import NO_HEADERS, decode_headers
from zbus.ports.log import Row
from zbus.wire.provenance import join_headers, split_headers

from .chain import pack_leaves

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[tuple[int, int, int, int, int, int, int, int]]).decode
_pack = struct.Struct("<qqqqq").pack
_crc32 = zlib.crc32

_INSERT = """
INSERT INTO events (offset, publisher, sequence, published_at, key, checksum, headers, payload)
SELECT ?3 + key, value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4,
       {headers}, substr(?2, value ->> 5, value ->> 6)
FROM jsonb_each(?1)
"""
INSERT_PLAIN = _INSERT.format(headers="NULL")
INSERT_WITH_HEADERS = _INSERT.format(headers="nullif(substr(?2, value ->> 7, value ->> 8), x'')")

# Compares given rows with stored ones by key and payload. Returns the place and the stored key of those that differ.
COMPARE = """
SELECT json_group_array(json_array(given.key, keys.key))
FROM jsonb_each(?1) AS given
CROSS JOIN events ON events.offset = given.value ->> 0
CROSS JOIN keys ON keys.id = events.key
WHERE keys.key != given.value ->> 1 OR events.payload != substr(?2, given.value ->> 2, given.value ->> 3)
"""

# `{chosen}` is a query for complete rows of `events` in order of their offsets. The page is empty if their
# size exceeds :bytes, so that memory is bounded whatever the log contains.
SIZE = "SELECT ifnull(sum(length(payload) + ifnull(length(headers), 0)), 0) FROM ({chosen})"
PAGE = f"""
SELECT json_group_array(json_array(offset, publisher, sequence, published_at, key, checksum,
                                   ifnull(length(headers), 0), length(payload))),
       group_concat(CAST(iif(headers IS NULL, payload, headers || payload) AS TEXT), ''),
       json_group_array(DISTINCT key), count(*), max(offset),
       (SELECT max(ifnull((SELECT max(offset) FROM events), 0), low_water) FROM state),
       (SELECT low_water FROM state)
FROM ({{chosen}}) WHERE ({SIZE}) <= :bytes
"""


# The statement that stores some rows, its parameters, and the leaves of the rows: see `chain`.
EncodedRows = tuple[str, tuple[str, bytes, int], bytes]


def size_of(rows: Sequence[Row]) -> int:
    """Return the size of all payloads and headers in bytes."""
    return sum([len(row.payload) + len(row.headers) if row.headers else len(row.payload) for row in rows])


def split_rows(rows: Sequence[Row], bytes_max: int) -> Sequence[Sequence[Row]]:
    """Return the rows in parts of at most `bytes_max` bytes each, or of one row that is larger."""
    if size_of(rows) <= bytes_max:
        return (rows,)
    parts: list[list[Row]] = []
    size = bytes_max
    for row in rows:
        more = size_of((row,))
        if size + more > bytes_max:
            parts.append([])
            size = 0
        parts[-1].append(row)
        size += more
    return parts


def encode_rows(rows: Sequence[Row], first: int, key_ids: Mapping[str, int]) -> EncodedRows:
    """Return the statement that stores `rows` at the offsets from `first` on, its parameters, and their leaves."""
    bodies = [b"\x00", *[row.payload for row in rows]]  # never empty, because substr of an empty blob is NULL
    at = 2  # after the first byte; substr counts from one
    numbers: list[tuple[int, ...]] = []
    stored: dict[int, bytes] = {}  # headers with the provenance, by index
    for offset, row in enumerate(rows, first):
        key, payload = key_ids[row.key], row.payload
        publisher, sequence, published_at, headers = row.publisher_id, row.sequence, row.published_at, row.headers
        if row.provenance is not None:
            headers = join_headers(headers, row.provenance)
        crc = _crc32(_pack(offset, publisher, sequence, published_at, key))
        if headers:
            stored[offset - first] = headers
            crc = _crc32(headers, crc)
        size = len(payload)
        numbers.append((publisher, sequence, published_at, key, _crc32(payload, crc), at, size))
        at += size
    leaves = pack_leaves([each[4] for each in numbers])
    if not stored:
        return INSERT_PLAIN, (_encode(numbers).decode(), b"".join(bodies), first), leaves
    for place in range(len(rows)):
        headers = stored.get(place, b"")
        numbers[place] += (at, len(headers))
        bodies.append(headers)
        at += len(headers)
    return INSERT_WITH_HEADERS, (_encode(numbers).decode(), b"".join(bodies), first), leaves


def is_encodable(rows: Sequence[Row]) -> bool:
    """Return whether rows can be stored: whether their numbers are in range and their other fields have the types."""
    try:
        encode_rows(rows, 1, {row.key: len(row.key.encode()) for row in rows})
        return all(isinstance(row.publisher_id, int) and isinstance(row.sequence, int) for row in rows)
    except Exception:
        return False


def encode_comparison(rows: Sequence[Row], offsets: Iterable[int]) -> tuple[str, bytes]:
    """Return the parameters of `COMPARE` for rows and the offsets of the stored events."""
    at = 2  # as in `encode_rows`
    given: list[tuple[int, str, int, int]] = []
    for row, offset in zip(rows, offsets, strict=True):
        given.append((offset, row.key, at, len(row.payload)))
        at += len(row.payload)
    return _encode(given).decode(), b"".join([b"\x00", *[row.payload for row in rows]])


class RowPage:
    """A page as SQLite returned it. `events` decodes it, on the caller's thread."""

    def __init__(
        self,
        numbers: bytes,
        bodies: bytes,
        covered: int,
        low_water: int,
        key_name: Callable[[int], str | None],
        unwanted: Collection[int] = (),
    ) -> None:
        self._numbers, self._bodies, self._key_name = numbers, bodies, key_name
        self._unwanted = unwanted  # ids of keys without a name here, whose events are left out
        self.covered, self.low_water = covered, low_water

    def events(self, skip_corrupt: bool = False) -> tuple[list[Event], LogError | None, int]:
        """Return the events of this page in order, each verified by its checksum."""
        found: list[Event] = []
        skipped = at = 0
        bodies, key_name = self._bodies, self._key_name
        for offset, publisher, sequence, published_at, key, stored, headers_bytes, size in _decode(self._numbers):
            crc = _crc32(_pack(offset, publisher, sequence, published_at, key))
            if headers_bytes:
                encoded = bodies[at : at + headers_bytes]
                crc = _crc32(encoded, crc)
                at += headers_bytes
            payload = bodies[at : at + size]
            at += size
            name = key_name(key)
            if name is None or _crc32(payload, crc) != stored:
                if key in self._unwanted:
                    continue
                if not skip_corrupt:
                    reason = "its key is unknown" if name is None else "its checksum does not match"
                    return found, EventCorrupt(offset, reason), skipped
                skipped += 1
                continue
            if headers_bytes:
                raw, provenance = split_headers(encoded)
                headers = decode_headers(raw)
                found.append(Event(publisher, sequence, published_at, name, payload, headers, offset, provenance))
            else:
                found.append(Event(publisher, sequence, published_at, name, payload, NO_HEADERS, offset))
        return found, None, skipped
