"""Cold tiers for tests, written with pyarrow alone in the layout that an offload leaves; and a log to make them of."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from log_support import append, raw

from zbus import BusConfig, Event
from zbus.event import Provenance
from zbus.headers import decode_headers, encode_headers
from zbus.keys import KeySet
from zbus.ports.log import Row, Span
from zbus.wire.provenance import split_headers
from zbus_log import Rules, SqliteLog, open_log
from zbus_log.cold.tier import Cold
from zbus_log.file.manifest import ColdFile, Segment

EVENTS = 900
DAY = 86_400_000_000_000
START = 1_700_000_000_000_000_000
KEYS = ("shop/orders/new", "shop/orders/paid", "größe/ü", "50%/a=b", "c:d/x", "@sys/a/b", "audit/@own/x", "shop")
WHOLE = Span()

SCHEMA = pa.schema(
    [
        ("offset", pa.int64()),
        ("key", pa.string()),
        ("publisher_id", pa.int64()),
        ("sequence", pa.int64()),
        ("published_ns", pa.int64()),
        ("headers", pa.map_(pa.string(), pa.string())),
        ("headers_raw", pa.binary()),
        ("payload", pa.binary()),
        ("key_id", pa.int64()),
        ("checksum", pa.int64()),
    ]
)
_READ = """
SELECT events.offset, keys.key, publisher, sequence, published_at, NULL, headers, payload, events.key, checksum
FROM events JOIN keys ON keys.id = events.key WHERE offset BETWEEN ? AND ? ORDER BY offset
"""
_ESCAPED = re.compile(r"""[\x01-\x1f"#%'*/:=?\\\x7f{\[\]^]""")


def escaped(name: str) -> str:
    """A value as Spark writes it into the name of a folder."""
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", name)


def epoch_of(log: str | Path) -> bytes:
    connection = raw(log)
    try:
        return bytes(connection.execute("SELECT epoch FROM state").fetchone()[0])
    finally:
        connection.close()


def write_segment(
    log: str | Path, folder: str | Path, first: int, last: int, *, row_group: int = 1 << 16, file_rows: int = 1 << 20
) -> Segment:
    """Copy a range of offsets from the log's file into files of the tier; the manifest does not know of it yet."""
    connection = raw(log)
    try:
        rows = connection.execute(_READ, (first, last)).fetchall()
    finally:
        connection.close()
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in rows:
        date = datetime.fromtimestamp(row[4] // 1_000_000_000, UTC).date().isoformat()
        groups[date, row[1].partition("/")[0]].append(row)
    files = []
    for (date, namespace), found in sorted(groups.items()):
        for number, start in enumerate(range(0, len(found), file_rows)):
            part = found[start : start + file_rows]
            path = f"seg={first:020}-{last:020}/date={date}/ns={escaped(namespace)}/part-{number}.parquet"
            write_file(Path(folder) / path, part, row_group)
            files.append(ColdFile(path, len(part), part[0][0], part[-1][0]))
    return Segment(
        first,
        last,
        len(rows),
        hashlib.sha256(repr([(row[0], row[9]) for row in rows]).encode()).hexdigest(),
        min((row[4] for row in rows), default=0),
        max((row[4] for row in rows), default=0),
        sum((Path(folder) / file.path).stat().st_size for file in files),
        tuple(files),
    )


def write_file(path: Path, rows: Sequence[Sequence[Any]], row_group: int = 1 << 16) -> None:
    """Rows of the log as one Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = [list(column) for column in zip(*rows, strict=True)]
    columns[5] = [list(dict(decode_headers(split_headers(each)[0] if each else None)).items()) for each in columns[6]]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    table = pa.Table.from_arrays(arrays, schema=SCHEMA)
    # A page is looked at for its size after each batch: where events are large, each is to be a page of its own.
    batch = max(1, min(1024, (1 << 20) * len(rows) // max(1, table.nbytes)))
    options: dict[str, Any] = {"compression": "zstd", "use_dictionary": ["key"], "write_page_checksum": True}
    pq.write_table(table, path, row_group_size=row_group, write_batch_size=batch, **options)


def offload(log: str | Path, *bounds: int, folder: str | Path | None = None, **options: Any) -> Cold:
    """Make segments that end at these offsets, the first one after what the tier has; nothing is trimmed."""
    cold = Cold(folder if folder is not None else f"{log}-cold")
    start = cold.last
    for bound in bounds:
        cold.add([write_segment(log, cold.folder, start + 1, bound, **options)], epoch_of(log))
        start = bound
    return cold


def make_row(number: int) -> Row:
    """Times that mostly rise, over several days, with some steps back; headers of both kinds."""
    at = START + number * DAY // 300 - (number % 7) * 1_000_000
    headers = None
    came = None
    if number % 5 == 0:
        headers = encode_headers({"h": f"wert ü {number}"}, None, None)
    elif number % 11 == 0:
        headers, came = encode_headers({"n": str(number)}, None, None), Provenance(7, number, (3, 5), "nats")
    key = KEYS[(number * 7 + number // 11) % len(KEYS)]
    return Row(1 + number % 3, number, at, key, b"%d" % number * (number % 9), headers, came)


def fill(path: Path, events: int = EVENTS) -> None:
    log = SqliteLog(str(path))
    append(log, [make_row(number) for number in range(1, events + 1)])
    log.close(5.0)


def trim(log: SqliteLog, upto: int) -> None:
    assert log.prune(Rules(max_events=log.head() - upto, ignore_cursors=True)).low_water >= upto


@contextmanager
def opened(path: Path, **more: Any) -> Iterator[SqliteLog]:
    log = open_log(BusConfig(log=str(path), **more))
    try:
        yield log
    finally:
        log.close(5.0)


def follow(log: SqliteLog, keys: KeySet, span: Span = WHOLE, limit: int = 100) -> list[Event]:
    """Read a span to its end, page by page, as a replay does."""
    found: list[Event] = []
    span = log.narrow(span)
    assert span.until is not None
    while span.after < span.until:
        page = log.read(keys, span, limit)
        events, error, skipped = page.events()
        assert (error, skipped) == (None, 0)
        assert len(events) <= limit
        assert page.covered > span.after, "a page that covers nothing new would be asked for again for ever"
        found += events
        span = span._replace(after=page.covered)
    return found


def offsets(events: list[Event]) -> list[int]:
    return [event.offset for event in events]
