"""Framing: encodes events for a link. Each event names its predecessor on its key, and a run of one key is one frame.

Encoding a run in one call costs a tenth of encoding its events one by one. A frame costs the network and the receiver's
threads about as much as an event.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from zbus.ports.lineage import NO_BRANCH
from zbus.ports.log import Row

from .beacon import Newest
from .envelope import EMPTY, Fields, encode_run
from .provenance import Forward

FRAME_EVENTS_MAX = 512
FRAME_BYTES_MAX = 128 * 1024
ENVELOPE_BYTES = 64  # about the size of an envelope without payload and headers
KEYS_MAX = 100_000

Sendable = tuple[Row, int]  # a row and its offset


@dataclass(slots=True)
class Frames:
    """Frames to send, and the state after they are sent."""

    frames: list[tuple[str, bytes]] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    newest: dict[str, Newest] = field(default_factory=dict)
    events: int = 0
    forwarded: int = 0  # the number of other nodes' events that a bridge forwards
    forwarded_at: int = 0  # when the last of them was published


class Framing:
    """The predecessors of the next events on each key, for one link. Not thread-safe."""

    def __init__(self, origin: int, floor: int, forward: Forward | None) -> None:
        self._origin, self._floor, self._forward = origin, floor, forward
        self.branch = NO_BRANCH  # of the log that the events come from
        self._last: dict[str, int] = {}

    def restart(self, floor: int) -> None:
        """Forget all predecessors: receivers need no event after `floor` on any key."""
        self._last.clear()
        self._floor = floor

    def make(self, rows: Iterable[Sendable]) -> Frames:
        """Encode rows with their offsets, in order. Rows of other nodes are included if the bridge forwards them."""
        made = Frames()
        run: list[Fields] = []
        run_key, topic, size, before, origin = "", "", 0, 0, self._origin
        via: tuple[int, ...] = ()
        for row, offset in rows:
            key, payload, encoded = row.key, row.payload, row.headers
            if row.provenance is not None:
                passed = self._forward(key, row.provenance) if self._forward is not None else None
                if passed is None:
                    continue
                via = passed
                made.forwarded, made.forwarded_at = made.forwarded + 1, row.published_at
            elif via:
                via = ()
            headers, event_bytes = EMPTY, len(payload) + ENVELOPE_BYTES
            if encoded is not None:
                headers, event_bytes = msgspec.Raw(encoded), event_bytes + len(encoded)
            size += event_bytes
            if key != run_key or len(run) >= FRAME_EVENTS_MAX or size > FRAME_BYTES_MAX:
                self._finish(made, run_key, run, before)
                run, size = [], event_bytes
                if key != run_key:
                    run_key, topic = key, key.rpartition("/")[2]
                    before = made.last.get(key) or self._last.get(key, self._floor)
            identity = (row.publisher_id, row.sequence, row.published_at)
            run.append((*identity, topic, payload, key, headers, offset, origin, before, via))
            before = offset
        self._finish(made, run_key, run, before)
        return made

    def sent(self, made: Frames, position: int) -> None:
        """Note that the frames were sent, and so was everything up to `position`."""
        self._last.update(made.last)
        if len(self._last) > KEYS_MAX:
            self.restart(position)

    def _finish(self, made: Frames, key: str, run: list[Fields], before: int) -> None:
        if run:
            made.frames.append((key, encode_run(run, self.branch)))
            made.events += len(run)
            made.last[key] = before
            made.newest[key] = (before, run[-1][0], run[-1][1])
