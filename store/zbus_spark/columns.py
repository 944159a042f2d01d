"""The columns of a log in Spark, and how a page of rows becomes them: column by column, never row by row.

Keys and headers repeat, so each distinct one is looked at once and the rest is a look-up by number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, LongType, MapType, StringType, StructField, StructType, TimestampType

from zbus.errors import ConfigInvalid
from zbus.event import Event
from zbus.headers import decode_headers

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
# Of each column, what it is made from in the tables of the log.
_STORED = {"publisher_id": "publisher", "published_ns": "published_at", "published_at": "published_at", "key_id": "key"}
_FROM_KEY = ("key", "namespace", "component", "topic")


def parts(key: str) -> tuple[str, str, str | None, str]:
    """The key, its namespace, its component where it has one, and its topic.

    >>> parts("shop/orders/created"), parts("shop/news")
    (('shop/orders/created', 'shop', 'orders', 'created'), ('shop/news', 'shop', None, 'news'))
    """
    segments = key.split("/")
    return key, segments[0], segments[1] if len(segments) > 2 else None, segments[-1]


class Columns:
    """Makes batches with the columns of one schema: a user who names fewer gets those, and no others are made."""

    def __init__(self, schema: StructType, raw: bool = False) -> None:
        known = {field.name: field for field in (RAW if raw else SCHEMA).fields}
        for field in schema.fields:
            if field.name not in known or known[field.name].dataType != field.dataType:
                given = f"{field.name} {field.dataType.simpleString()}"
                there = ", ".join(f"{name} {each.dataType.simpleString()}" for name, each in known.items())
                raise ConfigInvalid("schema", f"there is no column {given!r}; a log has: {there}")
        self.names = [field.name for field in schema.fields]
        fields = [(field.name, _ARROW.get(field.name, pa.int64()), field.nullable) for field in schema.fields]
        self.schema = pa.schema([pa.field(name, kind, nullable) for name, kind, nullable in fields])

    @property
    def stored(self) -> list[str]:
        """The columns to be read from the table `events`, besides the offset."""
        wanted = ["headers" if name == "headers_raw" else _STORED.get(name, name) for name in self.names]
        wanted = ["key" if name in _FROM_KEY else name for name in wanted]
        return list(dict.fromkeys(name for name in wanted if name != "offset"))

    def batch(self, rows: pa.RecordBatch, names: Names) -> pa.RecordBatch:
        """Rows of the table `events`, as columns of the schema."""
        made: dict[str, Any] = {}
        if any(name in _FROM_KEY for name in self.names):
            encoded = rows.column("key").dictionary_encode()
            ids = encoded.dictionary.to_pylist()
            found = names(ids)
            split = zip(*[parts(found[id_]) for id_ in ids], strict=True) if ids else [()] * len(_FROM_KEY)
            for name, values in zip(_FROM_KEY, split, strict=True):
                if name in self.names:
                    made[name] = pa.array(values, pa.string()).take(encoded.indices)
        if "headers" in self.names:
            made["headers"] = _headers(rows.column("headers"))
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
        """Events, as columns of the schema."""
        keys = [parts(event.key) for event in events]
        make: dict[str, Callable[[], list[Any]]] = {
            "offset": lambda: [event.offset for event in events],
            "publisher_id": lambda: [event.publisher_id for event in events],
            "sequence": lambda: [event.sequence for event in events],
            "published_ns": lambda: [event.published_at for event in events],
            "published_at": lambda: [event.published_at // 1000 for event in events],
            "headers": lambda: [list(event.headers.items()) for event in events],
            "payload": lambda: [event.payload for event in events],
        }
        for place, name in enumerate(_FROM_KEY):
            make[name] = lambda place=place: [key[place] for key in keys]  # type: ignore[misc]
        arrays = [pa.array(make[name](), self.schema.field(name).type) for name in self.names]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _headers(blobs: pa.Array) -> pa.Array:
    encoded = blobs.dictionary_encode()
    maps = [list(decode_headers(blob).items()) for blob in encoded.dictionary.to_pylist()]
    return pa.array(maps, _ARROW["headers"]).take(encoded.indices)
