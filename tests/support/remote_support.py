"""A node whose log is read over a transport, and what its file has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from mesh_support import reserved_port

from zbus import blocking
from zbus.event import Event
from zbus.keys import KeySet
from zbus.ports.log import Span
from zbus_log import Rules, SqliteLog


@contextmanager
def free_url() -> Iterator[str]:
    """A URL at which a node can listen."""
    with closing(reserved_port()) as kept:
        yield f"zenoh://127.0.0.1:{kept.getsockname()[1]}"


@contextmanager
def node_at(url: str, log: Path) -> Iterator[blocking.Bus]:
    with blocking.open(log, mode="peer", listen=[url.replace("zenoh://", "tcp/")]) as bus:
        yield bus


def stored(path: str | Path, *keys: str) -> list[Event]:
    """Return the events of the file."""
    with closing_log(str(path)) as log:
        found: list[Event] = []
        span, head = Span(), log.head()
        while span.after < head:
            page = log.read(KeySet(keys) if keys else KeySet.all(), span, 1000)
            found += page.events()[0]
            span = span._replace(after=page.covered)
        return found


@contextmanager
def closing_log(path: str) -> Iterator[SqliteLog]:
    log = SqliteLog(path, read_only=True)
    try:
        yield log
    finally:
        log.close(5.0)


def trim(bus: blocking.Bus, events: int) -> None:
    log = bus._inner._node.log
    assert isinstance(log, SqliteLog)
    log.prune(Rules(max_events=events))
