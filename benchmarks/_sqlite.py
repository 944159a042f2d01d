"""Bare pysqlite3 as the peer: a file of the log's own schema and settings, and rows for it made in advance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pysqlite3
from _harness import PAYLOAD

from zbus_log import SqliteLog

INSERT = (
    "INSERT INTO events (offset, publisher, sequence, published_at, key, checksum, headers, payload)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
BareRow = tuple[int, int, int, int, int, int, None, bytes]


@contextmanager
def bare_file(path: Path) -> Iterator[Any]:
    """A connection to an empty log that nobody else has open: WAL, synchronous=FULL, the same pages."""
    SqliteLog(str(path)).close(5.0)
    connection = pysqlite3.connect(str(path), isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA journal_size_limit=67108864")
        if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            raise RuntimeError("the log's file is not in WAL mode")
        connection.execute("INSERT INTO keys (id, key) VALUES (1, 'bench/orders/created')")
        yield connection
    finally:
        connection.close()


def bare_rows(first: int, count: int) -> list[BareRow]:
    """Rows as the log would store them, at the offsets from `first` on."""
    published_at, publisher = 1_700_000_000_000_000_000, 1 << 52
    return [
        (at, publisher, at, published_at + at, 1, 4_000_000_000, None, PAYLOAD) for at in range(first, first + count)
    ]
