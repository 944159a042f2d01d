"""Writing to a log that any process may own: `put` stores events, `prune` and `purge` remove some.

If a node owns the log, the calls leave write requests for it and wait for the results. Otherwise this process owns the
log during the call. If the owner stops in between, the requests without a result are sent again by another route; the
identity of each event ensures that none is stored twice.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from zbus.errors import ConfigInvalid, EventInvalid, LogFull, ZbusError
from zbus.keys import KeySet
from zbus.ports.log import Purged, Row
from zbus_log.proxy.write_files import encode_rows
from zbus_log.retention import Pruned, Rules

from .write_routes import OwnerGone, Put, WriteRoute, route_to

PIECE_ROWS = 1000  # a request is small, so that no publisher of the owner waits long behind it
PIECE_BYTES = 4 * 1024 * 1024
IN_FLIGHT = 2


def put(path: str | os.PathLike[str], chunks: Iterable[Sequence[Row]], *, timeout_s: float = 60.0) -> Put:
    """Store rows in order, through the process that owns the log or as its owner; returns once they are durable.

    A chunk of up to 1000 rows and 4 MiB is stored completely or not at all; a larger one is split into such chunks.
    Raises `EventInvalid` for a row that could not be published, and stores none of its chunk. Rows whose identity is in
    the log keep their first offset, so the same call can be repeated after any error; a note on the error gives the
    number of events stored. `timeout_s` is the maximum time without progress. Do not call it on an event loop: it
    blocks, and an owner in this process could not reply.
    """
    work = _Work(_pieces(chunks))
    try:
        while True:
            with route_to(path, timeout_s) as route:
                try:
                    work.run(route)
                    return Put(work.events, work.last_offset)
                except OwnerGone:
                    work.requeue()
                except LogFull:
                    work.give_up()
                    raise
    except ZbusError as error:
        unknown = ", and some of those that follow may be" if work.has_unknown else ""
        error.add_note(f"{work.events} events of this call are stored{unknown}; it is safe to put all of them again")
        raise


def prune(
    path: str | os.PathLike[str],
    rules: Rules,
    *,
    timeout_s: float = 600.0,
    progress: Callable[[int], None] | None = None,
) -> Pruned:
    """Remove the events that the rules do not keep, through the process that owns the log or as its owner.

    `progress` is called with the number of events removed so far if this process removes them itself. If the owner
    stops in between, the result does not count the events that it already removed.
    """
    _check_is_there(path)
    while True:
        with route_to(path, timeout_s) as route, suppress(OwnerGone):
            return route.prune(rules, progress)


def purge(
    path: str | os.PathLike[str],
    keys: Iterable[str],
    *,
    timeout_s: float = 600.0,
    progress: Callable[[int], None] | None = None,
) -> Purged:
    """Remove all events of some keys, whatever their age, through the process that owns the log or as its owner.

    Durable subscriptions do not prevent it, and nothing is removed from the cold tier. It cannot be undone. Otherwise
    like `prune`.
    """
    _check_is_there(path)
    wanted = KeySet(keys)
    while True:
        with route_to(path, timeout_s) as route, suppress(OwnerGone):
            return route.purge(wanted, progress)


def _check_is_there(path: str | os.PathLike[str]) -> None:
    if not Path(path).expanduser().is_file() and not Path(f"{path}-head").expanduser().is_file():
        raise ConfigInvalid("log", f"there is no log {os.fspath(path)!r}")


class _Work:
    """The pieces of one `put`: a few in flight at a time, in order."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._in_flight: deque[tuple[bytes, Any]] = deque()
        self._unknown: deque[bytes] = deque()  # sent to an owner that stopped
        self._rejected: EventInvalid | None = None
        self.events = self.last_offset = 0

    @property
    def has_unknown(self) -> bool:
        """Whether the outcome of a piece is unknown."""
        return bool(self._in_flight or self._unknown)

    def run(self, route: WriteRoute) -> None:
        """Store all remaining pieces. After a rejection no more are sent, but those in flight are waited for."""
        while True:
            while len(self._in_flight) < IN_FLIGHT and self._send_next(route):
                pass
            if not self._in_flight:
                break
            try:
                stored = route.result(self._in_flight[0][1])
                self.events += stored.events
                self.last_offset = max(self.last_offset, stored.last_offset)
            except EventInvalid as error:
                self._rejected = self._rejected or error
            self._in_flight.popleft()
        if self._rejected is not None:
            raise self._rejected

    def requeue(self) -> None:
        """Send the pieces without a result again, by another route."""
        self._unknown.extendleft(piece for piece, _ in reversed(self._in_flight))
        self._in_flight.clear()

    def give_up(self) -> None:
        """Forget the pieces in flight: the first was not stored, so the others are not stored either."""
        self._in_flight.clear()

    def _send_next(self, route: WriteRoute) -> bool:
        """Send the next piece. Returns False if there is none, or if one was rejected."""
        if self._rejected is not None:
            return False
        again = bool(self._unknown)
        try:
            piece = self._unknown[0] if again else next(self._pieces, None)
            if piece is None:
                return False
            try:
                self._in_flight.append((piece, route.send(piece)))
            except OwnerGone:
                if not again:
                    self._unknown.append(piece)
                raise
        except EventInvalid as error:
            self._rejected = error
            return False
        if again:
            self._unknown.popleft()
        return True


def _pieces(chunks: Iterable[Sequence[Row]]) -> Iterator[bytes]:
    """Yield the rows of all chunks, encoded, in pieces small enough not to delay the owner's publishers."""
    rows: list[Row] = []
    size = 0
    for chunk in chunks:
        if not isinstance(chunk, Iterable):
            raise _malformed(chunk)
        for row in chunk:
            if not isinstance(row, Row):
                raise _malformed(row)
            try:
                more = len(row.payload) + len(row.headers or b"")
            except (TypeError, AttributeError) as error:
                raise EventInvalid(f"malformed row ({error}); it was not stored") from error
            if rows and (len(rows) >= PIECE_ROWS or size + more > PIECE_BYTES):
                yield encode_rows(rows)
                rows, size = [], 0
            rows.append(row)
            size += more
        if rows:
            yield encode_rows(rows)
            rows, size = [], 0


def _malformed(found: object) -> EventInvalid:
    kind = "Row in place of a list of rows" if isinstance(found, Row) else type(found).__name__
    return EventInvalid(f"put takes lists of zbus_log.Row, as put(path, [[row, row]]), not {kind}; it was not stored")
