"""The columns of a log in Spark, and the conversion of stored rows to them: column by column, never row by row.

Keys and headers repeat, so each distinct value is decoded once, and the rest is a lookup by number. Some columns exist
only if they are named: they give a job the size of a payload or a single header, without the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, LongType, MapType, StringType, StructField, StructType, TimestampType

from zbus.errors import ConfigInvalid
from zbus.event import Event
from zbus.headers import decode_headers
from zbus.wire.provenance import split_headers

Names = Callable[[Iterable[int]], Mapping[int, str]]

_TEXT = MapType(StringType(), StringType(), valueContainsNull=False)
SCHEMA = StructType(
    [
        StructField("offset", LongType(), nullable=False),
        StructField("key", StringType(), nullable=False),
        StructField("namespace", StringType(), nullable=False),
        StructField("component", StringType()),
        StructField("topic", StringType(), nullable=False),
        StructField("publisher_id", LongType(), nullable=False),
        StructField("sequence", LongType(), nullable=False),
        StructField("published_at", TimestampType(), nullable=False),
        StructField("published_ns", LongType(), nullable=False),
        StructField("headers", _TEXT, nullable=False),
        StructField("payload", BinaryType(), nullable=False),
    ]
)
RAW = StructType(
    [
        *SCHEMA.fields,
        StructField("key_id", LongType(), nullable=False),
        StructField("checksum", LongType(), nullable=False),
        StructField("headers_raw", BinaryType()),
    ]
)
HEADER = "header:"  # prefix of a column with one header, which is null if an event does not have it
PAYLOAD_BYTES = "payload_bytes"
_KNOWN = {
    raw: {each.name: each for each in (*schema.fields, StructField(PAYLOAD_BYTES, LongType(), nullable=False))}
    for raw, schema in ((False, SCHEMA), (True, RAW))
}
_ARROW: dict[str, pa.DataType] = {
    "key": pa.string(),
    "namespace": pa.string(),
    "component": pa.string(),
    "topic": pa.string(),
    "published_at": pa.timestamp("us", tz="UTC"),
    "headers": pa.map_(pa.string(), pa.field("value", pa.string(), nullable=False)),
    "headers_raw": pa.binary(),
    "payload": pa.binary(),
}
# The stored column that a column is built from, if their names differ.
_STORED = {
    "publisher_id": "publisher",
    "published_ns": "published_at",
    "published_at": "published_at",
    "key_id": "key",
    "headers_raw": "headers",
}
_FROM_KEY = ("key", "namespace", "component", "topic")


def parts(key: str) -> tuple[str, str, str | None, str]:
    """Return a key, its namespace, its component or None, and its topic.

    >>> parts("shop/orders/created"), parts("shop/news")
    (('shop/orders/created', 'shop', 'orders', 'created'), ('shop/news', 'shop', None, 'news'))
    """
    segments = key.split("/")
    return key, segments[0], segments[1] if len(segments) > 2 else None, segments[-1]


def schema_of(names: Sequence[str], raw: bool = False) -> StructType:
    """Return the schema with these columns of a log, in this order. Raises `ConfigInvalid` for an unknown name.

    >>> schema_of(["payload_bytes", "header:session-id"]).simpleString()
    'struct<payload_bytes:bigint,header:session-id:string>'
    """
    fields = [(name, _field(name, raw)) for name in names]
    if not fields or (unknown := [name for name, field in fields if field is None]):
        listed = ", ".join([*_KNOWN[raw], f"{HEADER}NAME"])
        reason = f"no column {unknown[0]!r}; a log has: {listed}" if fields else "name at least one column"
        raise ConfigInvalid("columns", reason)
    return StructType([field for _, field in fields if field is not None])


def _field(name: str, raw: bool) -> StructField | None:
    if name.startswith(HEADER) and name != HEADER:
        return StructField(name, StringType())
    return _KNOWN[raw].get(name)


class Columns:
    """Builds batches with the columns of one schema. Only the columns of the schema are built."""

    def __init__(self, schema: StructType, raw: bool = False) -> None:
        for field in schema.fields:
            known = _field(field.name, raw)
            if known is None or known.dataType != field.dataType:
                given = f"{field.name} {field.dataType.simpleString()}"
                all_ = [*_KNOWN[raw].values(), StructField(f"{HEADER}NAME", StringType())]
                listed = ", ".join(f"{each.name} {each.dataType.simpleString()}" for each in all_)
                raise ConfigInvalid("schema", f"no column {given!r}; a log has: {listed}")
        self.names = [field.name for field in schema.fields]
        self.schema = pa.schema([pa.field(each.name, _arrow(each.name), each.nullable) for each in schema.fields])
        self._of_headers = [name for name in self.names if name == "headers" or name.startswith(HEADER)]

    @property
    def stored(self) -> list[str]:
        """The columns to read from the table `events` besides the offset, and `payload_bytes` if it is requested."""
        wanted = ["headers" if name in self._of_headers else _STORED.get(name, name) for name in self.names]
        wanted = ["key" if name in _FROM_KEY else name for name in wanted]
        return list(dict.fromkeys(name for name in wanted if name != "offset"))

    def batch(self, rows: pa.RecordBatch, names: Names) -> pa.RecordBatch:
        """Convert rows of the table `events` to columns of the schema."""
        made: dict[str, Any] = {}
        if any(name in _FROM_KEY for name in self.names):
            encoded = rows.column("key").dictionary_encode()
            ids = encoded.dictionary.to_pylist()
            found = names(ids)
            split = zip(*[parts(found[id_]) for id_ in ids], strict=True) if ids else [()] * len(_FROM_KEY)
            for name, values in zip(_FROM_KEY, split, strict=True):
                if name in self.names:
                    made[name] = pa.array(values, pa.string()).take(encoded.indices)
        if self._of_headers:
            made |= _from_headers(rows.column("headers"), self._of_headers)
        if "headers_raw" in self.names:
            blobs = rows.column("headers")
            made["headers_raw"] = pc.if_else(pc.equal(pc.binary_length(blobs), 0), pa.scalar(None, pa.binary()), blobs)
        if "published_at" in self.names:
            made["published_at"] = pc.divide(rows.column("published_at"), 1000).cast(_ARROW["published_at"])
        arrays = [
            made[name] if name in made else rows.column(_STORED.get(name, name)).cast(self.schema.field(name).type)
            for name in self.names
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def from_events(self, events: list[Event]) -> pa.RecordBatch:
        """Convert events to columns of the schema."""
        keys = [parts(event.key) for event in events]
        make: dict[str, Callable[[], list[Any]]] = {
            "offset": lambda: [event.offset for event in events],
            "publisher_id": lambda: [event.publisher_id for event in events],
            "sequence": lambda: [event.sequence for event in events],
            "published_ns": lambda: [event.published_at for event in events],
            "published_at": lambda: [event.published_at // 1000 for event in events],
            "headers": lambda: [list(event.headers.items()) for event in events],
            "payload": lambda: [event.payload for event in events],
            PAYLOAD_BYTES: lambda: [len(event.payload) for event in events],
        }
        for name in self._of_headers:
            if name != "headers":
                make[name] = lambda name=name: [event.headers.get(name.removeprefix(HEADER)) for event in events]  # type: ignore[misc]
        for place, name in enumerate(_FROM_KEY):
            make[name] = lambda place=place: [key[place] for key in keys]  # type: ignore[misc]
        arrays = [pa.array(make[name](), self.schema.field(name).type) for name in self.names]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _arrow(name: str) -> pa.DataType:
    return pa.string() if name.startswith(HEADER) else _ARROW.get(name, pa.int64())


def _from_headers(blobs: pa.Array, names: list[str]) -> dict[str, pa.Array]:
    """Return the requested columns: the map of all headers, and single headers."""
    encoded = blobs.dictionary_encode()
    decoded = [decode_headers(split_headers(blob)[0] if blob else None) for blob in encoded.dictionary.to_pylist()]
    made = {}
    for name in names:
        alone = name.removeprefix(HEADER)
        values = [list(each.items()) if name == "headers" else each.get(alone) for each in decoded]
        made[name] = pa.array(values, _arrow(name)).take(encoded.indices)
    return made
