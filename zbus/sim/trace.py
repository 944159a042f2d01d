"""The trace of a world: every step that matters, in order. Two runs of a seed are equal if their hashes are.

The hash is made while the world runs. The lines are kept only on request: a second run of the same seed produces them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import NamedTuple
from zlib import crc32

# The first word of the kinds of steps that a frame makes. There are many of them.
FRAMES = ("arrived", "cut", "dropped", "duplicated", "end", "injected", "reply", "request", "sent")


class Step(NamedTuple):
    """One step: what happened, where and when. `str(step)` is its line."""

    at_s: float
    kind: str  # such as "sent", "committed", "delivered", "fault"
    node: str
    values: tuple[object, ...]

    @property
    def is_frame(self) -> bool:
        """Whether this is the step of a frame on the network."""
        return self.kind.partition(" ")[0] in FRAMES

    def __str__(self) -> str:
        return f"{self.at_s:10.6f}  {self.node:<8} {self.kind:<12} {' '.join(map(_text, self.values))}".rstrip()


class Trace:
    """The steps of one run. `note` is called for each of them. `keep` is True to keep all of them, or a number."""

    def __init__(self, time: Callable[[], float], keep: bool | int = False) -> None:
        self._time, self._keep = time, keep
        self._hash = blake2b(digest_size=16)
        self._update = self._hash.update
        self.steps: deque[Step] = deque(maxlen=None if keep is True else int(keep))
        self.counts: dict[str, int] = {}
        self.ended = False

    def note(self, kind: str, node: str, *values: object) -> None:
        """Add a step."""
        if self.ended:
            return
        now = self._time()
        self.counts[kind] = self.counts.get(kind, 0) + 1
        update = self._update
        update(f"\n{now:.9f} {kind} {node}".encode())
        for value in values:
            update(b" ")
            update(value if type(value) is bytes else str(value).encode())
        if self._keep:
            self.steps.append(Step(now, kind, node, values))

    @property
    def hash(self) -> str:
        """The hash of all steps so far."""
        return self._hash.hexdigest()

    def lines(self, node: str | None = None) -> Iterator[str]:
        """Return the lines, of one node or of all."""
        return (str(step) for step in self.steps if node is None or step.node in ("", node))


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return f"[{len(value)} bytes, {crc32(value):08x}]"
    if isinstance(value, int) and value >= 1 << 40:
        return f"{value:x}"  # the id of a publisher or a log, as violations write it
    return str(value)
