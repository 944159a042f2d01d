"""Bare apsw as the peer: a file with the log's schema and settings, and rows built in advance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
from _harness import PAYLOAD

from zbus_log import SqliteLog

INSERT = (
    "INSERT INTO events (offset, publisher, sequence, published_at, key, checksum, headers, payload)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
BareRow = tuple[int, int, int, int, int, int, None, bytes]


@contextmanager
def bare_file(path: Path) -> Iterator[Any]:
    """Open the only connection to an empty log: WAL, synchronous=FULL, the same page size."""
    SqliteLog(str(path)).close(5.0)
    connection = apsw.Connection(str(path))
    try:
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA journal_size_limit=67108864")
        if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            raise RuntimeError("the log file is not in WAL mode")
        connection.execute("INSERT INTO keys (id, key) VALUES (1, 'bench/orders/created')")
        yield connection
    finally:
        connection.close()


def bare_rows(first: int, count: int) -> list[BareRow]:
    """Return rows as the log would store them, starting at offset `first`."""
    published_at, publisher = 1_700_000_000_000_000_000, 1 << 52
    return [
        (at, publisher, at, published_at + at, 1, 4_000_000_000, None, PAYLOAD) for at in range(first, first + count)
    ]
