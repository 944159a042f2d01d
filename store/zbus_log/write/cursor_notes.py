"""Notes of stored positions, in the lock files of durable names: the head record of the cursors.

SQLite cannot detect that its write-ahead log ends early because of a flipped bit: the newest positions, or whole rows,
are then gone, and a durable name would begin like a new one. So each position is noted after it was stored, as
`HeadRecord` does for the log. A note that cannot be read says nothing.
"""

from __future__ import annotations

import json
import zlib
from typing import NamedTuple

from zbus.ports.lineage import Lineage


class CursorNote(NamedTuple):
    """A position that was stored."""

    name: str
    offset: int
    incarnation: int

    def encode(self) -> bytes:
        """Return the note as one line with a checksum."""
        text = json.dumps(list(self)).encode()
        return b"%08x %s\n" % (zlib.crc32(text), text)

    def problem(self, offset: int | None, lineage: Lineage) -> str | None:
        """Return what is wrong with the position in the file, which is None if the file has no row, or None.

        A note from events that the log no longer has says nothing: the log was restored, and its cursors with it.
        """
        until = lineage.until(self.incarnation)
        if self.offset and (until is None or self.offset > until):
            return None
        if offset is None:
            return f"its row is missing, but position {self.offset} was stored"
        return None if offset >= self.offset else f"its position is {offset}, but {self.offset} was stored"


def decode_note(data: bytes) -> CursorNote | None:
    """Return a note, or None if there is none or it is malformed."""
    try:
        checksum, _, text = data.partition(b"\n")[0].partition(b" ")
        if int(checksum, 16) != zlib.crc32(text):
            return None
        name, offset, incarnation = json.loads(text)
    except ValueError:
        return None
    return CursorNote(name, offset, incarnation)
