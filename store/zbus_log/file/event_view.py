"""The view `event_log`: the events of a log as any SQLite tool can read them.

The table `events` has the id of a key and encoded headers. The view has the name of the key, the time as text and the
headers as a JSON object. It uses only functions that SQLite itself has, so that it needs neither zbus nor an extension.
zbus does not read it.

Headers are a msgpack map, or the last element of an array; see `zbus.wire.provenance`. The view goes through them from
one token to the next, and takes the texts after the map begins: a name, its value, the next name, and so on.
"""

from __future__ import annotations

VIEW = "event_log"

_DIGIT = "instr('123456789ABCDEF', substr({}, {}, 1))"  # the value of a hexadecimal digit; 0 for the digit 0


def _number(place: str, size: int) -> str:
    """Return SQL for the big-endian number of `size` bytes at a place in the headers."""
    digits = f"hex(substr(events.headers, {place}, {size}))"
    return " + ".join(f"{_DIGIT.format(digits, at)} * {16 ** (2 * size - at)}" for at in range(1, 2 * size + 1))


# A token begins at `at` with the byte `kind`, in hexadecimal. The elements of arrays and maps are tokens of their own.
_SIZE = f"""CASE
            WHEN kind BETWEEN 'A0' AND 'BF' THEN 1 + 16 * (kind >= 'B0') + {_DIGIT.format("kind", 2)}
            WHEN kind = 'D9' THEN 2 + {_number("at + 1", 1)}
            WHEN kind = 'DA' THEN 3 + {_number("at + 1", 2)}
            WHEN kind IN ('CC', 'D0') THEN 2
            WHEN kind IN ('CD', 'D1', 'DC', 'DE') THEN 3
            WHEN kind IN ('CE', 'D2') THEN 5
            WHEN kind IN ('CF', 'D3') THEN 9
            ELSE 1 END"""
_TEXT_AT = "CASE kind WHEN 'D9' THEN 2 WHEN 'DA' THEN 3 ELSE 1 END"
# Each token takes two rows, so that its size is computed in one place. `place` counts the tokens after the map began.
_HEADERS = f"""(
    WITH RECURSIVE token (at, kind, size, place) AS (
        SELECT 1, hex(substr(events.headers, 1, 1)), NULL, NULL
        UNION ALL
        SELECT at + ifnull(size, 0),
            CASE WHEN size IS NULL THEN kind ELSE hex(substr(events.headers, at + size, 1)) END,
            CASE WHEN size IS NULL THEN {_SIZE} END,
            CASE WHEN size IS NULL THEN place
                WHEN place IS NULL AND (kind BETWEEN '80' AND '8F' OR kind = 'DE') THEN 0
                ELSE place + 1 END
        FROM token WHERE at + ifnull(size, 0) <= length(events.headers)
    )
    SELECT json_group_object(name, value) FROM (
        SELECT place, text AS name, lead(text) OVER (ORDER BY at) AS value FROM (
            SELECT at, place, CAST(substr(events.headers, at + {_TEXT_AT}, size - {_TEXT_AT}) AS TEXT) AS text
            FROM token WHERE place IS NOT NULL AND size IS NOT NULL
        )
    ) WHERE place % 2 = 0
)"""

CREATE_VIEW = f"""CREATE VIEW {VIEW} AS
SELECT events.offset,
    strftime('%Y-%m-%dT%H:%M:%S', events.published_at / 1000000000, 'unixepoch')
        || printf('.%09dZ', events.published_at % 1000000000) AS time,
    keys.key,
    events.publisher,
    events.sequence,
    events.payload,
    CASE WHEN events.headers IS NULL THEN '{{}}' ELSE {_HEADERS} END AS headers,
    events.published_at
FROM events LEFT JOIN keys ON keys.id = events.key"""
