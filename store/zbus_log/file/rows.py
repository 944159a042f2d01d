"""Events as rows, many at a time: one SQL statement writes a batch, one reads a page.

A Python driver releases and takes the interpreter lock for every row that it writes or reads, and
beside a busy event loop each of these can take milliseconds. So a batch is passed as one JSON array
of numbers and one blob of all bodies, and a page is returned the same way: SQLite processes the
whole batch in a single step, on another core, while Python continues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from zbus.errors import EventCorrupt, LogError
from zbus.event import Event
from zbus.headers import NO_HEADERS, decode_headers
from zbus.keys import KeySet
from zbus.ports.log import Row
from zbus.wire.provenance import join_headers, split_headers

from .chain import pack_leaves
from .checksum import NamedKey, checksum, crc32, key_number, pack_numbers

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[tuple[int, int, int, int, int, int, int, int]]).decode
_pack, _crc32 = pack_numbers, crc32
_UNKNOWN = ("", -1)  # a key without a name: no checksum matches it

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
REMOVED_UNTIL = "removed_until"  # a column that files of older versions do not have
PAGE = f"""
SELECT CAST(json_group_array(json_array(offset, publisher, sequence, published_at, key, checksum,
                                        ifnull(length(headers), 0), length(payload))) AS BLOB),
       CAST(group_concat(CAST(iif(headers IS NULL, payload, headers || payload) AS TEXT), '') AS BLOB),
       json_group_array(DISTINCT key), count(*), max(offset),
       (SELECT max(ifnull((SELECT max(offset) FROM events), 0), low_water, {REMOVED_UNTIL}) FROM state),
       (SELECT low_water FROM state), NULL, NULL
FROM ({{chosen}}) WHERE ({SIZE}) <= :bytes
"""
# The same for events that are looked up, with the number and the last one of those that the index names in `wanted`.
PAGE_LISTED = PAGE.replace("NULL, NULL", "(SELECT count(*) FROM wanted), (SELECT max(offset) FROM wanted)")


def for_old_file(statement: str) -> str:
    """Return a statement for a page of a file of an older version."""
    return statement.replace(REMOVED_UNTIL, "0")


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


def encode_rows(rows: Sequence[Row], first: int, key_ids: Mapping[str, NamedKey]) -> EncodedRows:
    """Return the statement that stores `rows` at the offsets from `first` on, its parameters, and their leaves."""
    bodies = [b"\x00", *[row.payload for row in rows]]  # never empty, because substr of an empty blob is NULL
    at = 2  # after the first byte; substr counts from one
    numbers: list[tuple[int, ...]] = []
    stored: dict[int, bytes] = {}  # headers with the provenance, by index
    for offset, row in enumerate(rows, first):
        (key, number), payload = key_ids[row.key], row.payload
        publisher, sequence, published_at, headers = row.publisher_id, row.sequence, row.published_at, row.headers
        if row.provenance is not None:
            headers = join_headers(headers, row.provenance)
        crc = _crc32(_pack(offset, publisher, sequence, published_at, number))
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
        encode_rows(rows, 1, {row.key: NamedKey(1, key_number(row.key)) for row in rows})
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
    """A page as SQLite returned it. `events` decodes it, on the caller's thread.

    Every event is verified before it is left out, so that a damaged one is never taken for one of another key or time.
    """

    def __init__(
        self,
        numbers: bytes,
        bodies: bytes,
        covered: int,
        low_water: int,
        key_name: Callable[[int], tuple[str, int] | None],
        *,
        missing: Sequence[tuple[int, int]] = (),
        wanted: KeySet | None = None,
        times: tuple[int, int] | None = None,
    ) -> None:
        self._numbers, self._bodies, self._key_name = numbers, bodies, key_name
        self._missing = missing  # ranges of offsets that should be in this page, in order
        self._wanted, self._times = wanted, times  # if set, events of other keys and times are left out
        self.covered, self.low_water = covered, low_water

    def events(self, skip_corrupt: bool = False) -> tuple[list[Event], LogError | None, int]:
        """Return the events of this page in order, each verified by its checksum."""
        if not self._missing and self._wanted is None and self._times is None:
            events = self._all()
            if events is not None:
                return events, None, 0
        return self._one_by_one(skip_corrupt)

    def _all(self) -> list[Event] | None:
        """Return all events, or None if one of them needs a closer look: the fastest way for the usual page."""
        found: list[Event] = []
        at = before = 0
        bodies, key_name, crc32, pack = self._bodies, self._key_name, _crc32, _pack
        for offset, publisher, sequence, published_at, key, stored, headers_bytes, size in _decode_rows(self._numbers):
            name, number = key_name(key) or _UNKNOWN
            crc = crc32(pack(offset, publisher, sequence, published_at, number))
            if headers_bytes:
                encoded = bodies[at : at + headers_bytes]
                crc = crc32(encoded, crc)
                at += headers_bytes
            payload = bodies[at : at + size]
            at += size
            if crc32(payload, crc) != stored or offset <= before:
                return None
            before = offset
            if headers_bytes:
                raw, provenance = split_headers(encoded)
                headers = decode_headers(raw)
                found.append(Event(publisher, sequence, published_at, name, payload, headers, offset, provenance))
            else:
                found.append(Event(publisher, sequence, published_at, name, payload, NO_HEADERS, offset))
        return found

    def _one_by_one(self, skip_corrupt: bool) -> tuple[list[Event], LogError | None, int]:
        """Return the events of this page, without those of other keys and times, and its problem."""
        found: list[Event] = []
        skipped = at = before = 0
        bodies, key_name, wanted, times = self._bodies, self._key_name, self._wanted, self._times
        gaps = deque(self._missing)
        by_id = False  # whether the last event has a checksum of version 0.1
        unwanted: dict[int, bool] = {}
        for offset, publisher, sequence, published_at, key, stored, headers_bytes, size in _decode_rows(self._numbers):
            if gaps and offset > gaps[0][0]:
                first, last = gaps.popleft()
                if not skip_corrupt:
                    return found, _missing(first, last), skipped
                skipped += last - first + 1
            start = at
            at += headers_bytes + size
            named = key_name(key)
            number = key if by_id or named is None else named[1]
            crc = _crc32(_pack(offset, publisher, sequence, published_at, number))
            if headers_bytes:
                encoded = bodies[start : start + headers_bytes]
                payload = bodies[start + headers_bytes : at]
                crc = _crc32(encoded, crc)
            else:
                payload = bodies[start:at]
            if _crc32(payload, crc) != stored or named is None or offset <= before:
                reason = "its key is unknown"
                if named is not None:
                    reason = "its checksum does not match"
                    other = _pack(offset, publisher, sequence, published_at, named[1] if by_id else key)
                    if checksum(other, bodies[start : start + headers_bytes], payload) == stored:
                        by_id, reason = not by_id, ""
                    if offset <= before:
                        reason = "it is out of order"
                if reason:
                    if not skip_corrupt:
                        return found, EventCorrupt(offset, reason), skipped
                    skipped += 1
                    continue
            assert named is not None
            before, name = offset, named[0]
            if times is not None and not times[0] <= published_at <= times[1]:
                continue
            if wanted is not None:
                leave_out = unwanted.get(key)
                if leave_out is None:
                    leave_out = unwanted[key] = name not in wanted
                if leave_out:
                    continue
            if headers_bytes:
                raw, provenance = split_headers(encoded)
                headers = decode_headers(raw)
                found.append(Event(publisher, sequence, published_at, name, payload, headers, offset, provenance))
            else:
                found.append(Event(publisher, sequence, published_at, name, payload, NO_HEADERS, offset))
        for first, last in gaps:
            if not skip_corrupt:
                return found, _missing(first, last), skipped
            skipped += last - first + 1
        return found, None, skipped


def check_rows(
    numbers: bytes, bodies: bytes, key_name: Callable[[int], tuple[str, int] | None]
) -> tuple[list[EventCorrupt], dict[int, list[int]]]:
    """Verify the events of a page. Returns an error for each that is corrupt, and the offsets of all by key."""
    problems: list[EventCorrupt] = []
    found: dict[int, list[int]] = {}
    at = 0
    crc32, pack = _crc32, _pack
    for offset, publisher, sequence, published_at, key, stored, headers_bytes, size in _decode_rows(numbers):
        start = at
        at += headers_bytes + size
        named = key_name(key)
        body = bodies[start:at]  # the headers, then the payload: the order in which the checksum has them
        if named is None:
            problems.append(EventCorrupt(offset, "its key is unknown"))
        else:
            good = crc32(body, crc32(pack(offset, publisher, sequence, published_at, named[1]))) == stored
            if not good:  # version 0.1 used the id
                good = crc32(body, crc32(pack(offset, publisher, sequence, published_at, key))) == stored
            if not good:
                problems.append(EventCorrupt(offset, "its checksum does not match"))
        if key in found:
            found[key].append(offset)
        else:
            found[key] = [offset]
    return problems, found


def _decode_rows(numbers: bytes) -> list[tuple[int, int, int, int, int, int, int, int]]:
    """Decode the numbers of a page. Those of an event with a malformed value fail its checksum."""
    try:
        return _decode(numbers)
    except msgspec.ValidationError:
        rows = msgspec.json.decode(numbers, type=list[list[Any]])
        return [
            tuple([each if type(each) is int else -1 for each in row[:6]] + [each or 0 for each in row[6:]])
            for row in rows
        ]


def offsets_of(numbers: bytes) -> list[int]:
    """Return the offsets of the events of a page."""
    return [row[0] for row in _decode_rows(numbers)]


def _missing(first: int, last: int) -> EventCorrupt:
    return EventCorrupt(first, "it is missing" if first == last else f"it and the events up to {last} are missing")
