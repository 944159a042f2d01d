"""Having something written to a log, whoever owns it: `put` events, `prune` old ones.

If a node owns the log, this leaves errands for it and waits for the answers; if nobody does, this process takes the
ownership for the time of the call. An owner that goes away in between changes nothing but the way: what was not
answered is put again, and the identity of each event sees to it that none is stored twice.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from zbus.errors import ConfigInvalid, EventInvalid, ZbusError
from zbus.ports.log import Row
from zbus_log.proxy.write_files import encode_rows
from zbus_log.retention import Pruned, Rules

from .write_routes import OwnerGone, Put, WriteRoute, way_to

PIECE_ROWS = 1000  # an errand is small, so that no publisher of the owner waits long behind it
PIECE_BYTES = 4 * 1024 * 1024
IN_FLIGHT = 2


def put(path: str | os.PathLike[str], chunks: Iterable[Sequence[Row]], *, timeout_s: float = 60.0) -> Put:
    """Store rows in order, through the process that owns the log or as its owner; returns once they are durable.

    A chunk of up to 1000 rows and 4 MiB is stored whole or not at all; a larger one is cut into such. A row that
    could not be published is refused with its chunk, as `EventInvalid`. Rows whose identity is in the log keep their
    first offset, so that the same call may be made again after any error; a note on it says how many events were
    stored. `timeout_s` is how long to wait without any progress. Not for an event loop: it blocks, and an owner in
    this process could not answer.
    """
    work = _Work(_pieces(chunks))
    try:
        while True:
            with way_to(path, timeout_s) as way:
                try:
                    work.do(way)
                    return Put(work.events, work.last_offset)
                except OwnerGone:
                    work.again()
    except ZbusError as error:
        unsure = ", and some of those that follow may be" if work.is_unsure else ""
        error.add_note(f"{work.events} events of this call are stored{unsure}; it is safe to put all of them again")
        raise


def prune(
    path: str | os.PathLike[str],
    rules: Rules,
    *,
    timeout_s: float = 600.0,
    progress: Callable[[int], None] | None = None,
) -> Pruned:
    """Remove what the rules do not let stay, through the process that owns the log or as its owner.

    `progress` is told how many events went so far, where this process removes them itself. An owner that goes away
    in between may have removed some already; they are not counted in what is returned.
    """
    if not Path(path).expanduser().is_file() and not Path(f"{path}-head").expanduser().is_file():
        raise ConfigInvalid("log", f"there is no log {os.fspath(path)!r}")
    while True:
        with way_to(path, timeout_s) as way, suppress(OwnerGone):
            return way.retain(rules, progress)


class _Work:
    """The pieces of one `put`: a few under way at a time, in order."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._again = pieces, deque[bytes]()
        self._under_way: deque[tuple[bytes, Any]] = deque()
        self._refused: EventInvalid | None = None
        self.events = self.last_offset = 0

    @property
    def is_unsure(self) -> bool:
        """Whether something was begun of which it is not known what became of it."""
        return bool(self._under_way or self._again)

    def do(self, way: WriteRoute) -> None:
        """Store all that is left. Once something was refused no more is begun; what is under way is waited for."""
        while True:
            while len(self._under_way) < IN_FLIGHT and (piece := self._next()) is not None:
                self._again.appendleft(piece)  # until it is sent
                self._under_way.append((piece, way.send(piece)))
                self._again.popleft()
            if not self._under_way:
                break
            try:
                stored = way.answer(self._under_way[0][1])
                self.events += stored.events
                self.last_offset = max(self.last_offset, stored.last_offset)
            except EventInvalid as error:
                self._refused = self._refused or error
            self._under_way.popleft()
        if self._refused is not None:
            raise self._refused

    def again(self) -> None:
        """What was not answered is to be stored another way."""
        self._again.extendleft(piece for piece, _ in reversed(self._under_way))
        self._under_way.clear()

    def _next(self) -> bytes | None:
        if self._refused is not None:
            return None
        if self._again:
            return self._again.popleft()
        try:
            return next(self._pieces, None)
        except EventInvalid as error:
            self._refused = error
            return None


def _pieces(chunks: Iterable[Sequence[Row]]) -> Iterator[bytes]:
    """The rows of all chunks, encoded, in pieces that one commit of the owner takes without making others wait."""
    rows: list[Row] = []
    size = 0
    for chunk in chunks:
        for row in chunk:
            try:
                more = len(row.payload) + len(row.headers or b"")
            except (TypeError, AttributeError) as error:
                raise EventInvalid(f"a malformed row ({error}); not stored") from error
            if rows and (len(rows) >= PIECE_ROWS or size + more > PIECE_BYTES):
                yield encode_rows(rows)
                rows, size = [], 0
            rows.append(row)
            size += more
        if rows:
            yield encode_rows(rows)
            rows, size = [], 0
