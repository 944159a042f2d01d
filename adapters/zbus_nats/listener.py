"""Frames from subjects to `receive`: filtered exactly, put together from parts, each of them once.

While `listen` changes, the old and the new subscription may both deliver a frame. Between the two
commands (sent in one write) and the server's word that it has done them, copies are counted, and the
second one of each is left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from zbus.keys import KeySet
from zbus.ports import Receive

from .client import Sink
from .connection import Connection, Subscribed
from .parts import PART_HEADER, Assembler
from .subjects import ENCODED, FOREIGN, Spelling, SubjectInvalid

SUBJECTS_KNOWN_MAX = 20_000
WINDOW_MAX = 200_000


# Makes a frame of what another program sent: subject, payload, raw header block.
Convert = Callable[[bytes, bytes, bytes | None], bytes | None]


class _Filter:
    """What one `listen` asked for. The next one replaces it, with its memory of subjects."""

    def __init__(self, keys: KeySet | None, receive: Receive) -> None:
        self.keys, self.receive = keys, receive
        self.known: dict[bytes, bool] = {}


class Listener:
    """The subscriptions of one fabric."""

    def __init__(
        self,
        connection: Connection,
        assembly_bytes_max: int,
        spelling: Spelling = ENCODED,
        convert: Convert | None = None,
    ) -> None:
        self._connection, self._counts = connection, connection.counts
        self._spelling, self._convert = spelling, convert
        self._assembler = Assembler(assembly_bytes_max, connection.counts)
        self._filter = _Filter(None, lambda frame, done: None)
        self._sids: dict[str, int] = {}
        self._generation = 0
        self._window: dict[int, int] | None = None  # copies that came the old way, less those that came the new
        self._lock = threading.Lock()
        connection.on_lost.append(self._assembler.clear)

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        """Receive exactly what the expressions match, from now on."""
        subjects = self._spelling.cover(expressions)
        chosen = _Filter(KeySet(expressions) if expressions else None, receive)
        with self._lock:
            new = sorted(subjects - self._sids.keys())
            old = [self._sids.pop(subject) for subject in self._sids.keys() - subjects]
            self._generation += 1

            def begin() -> None:
                self._filter = chosen
                self._window = {} if new and old else None

            added = [Subscribed(subject, "", self._sink(self._generation)) for subject in new]
            sids = self._connection.change(added, old, begin, self._end_window)
            self._sids.update(zip(new, sids, strict=True))

    def _end_window(self) -> None:
        self._window = None

    def _sink(self, generation: int) -> Sink:
        convert = self._convert

        def sink(subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
            chosen = self._filter
            wanted = chosen.known.get(subject)
            if wanted is None:
                wanted = self._judge(chosen, subject)
            if not wanted:
                return
            if convert is not None:
                # Equal messages of other programs are still several: when in doubt, one too many.
                made = convert(subject, data, headers)
                if made is None:
                    return
                data = made
            elif headers is not None and PART_HEADER in headers:
                whole = self._assembler.take(subject, headers, data)
                if whole is None:
                    return
                data = whole
            elif self._window is not None and self._twice(subject, data, generation == self._generation):
                return
            try:
                chosen.receive(data, None)
            except Exception as error:  # a bug of the receiver must not end the reading of the socket
                self._counts.add("receiver_failed", subject.decode(errors="replace"), error=repr(error)[:200])

        return sink

    def _judge(self, chosen: _Filter, subject: bytes) -> bool:
        if subject.startswith(FOREIGN):
            self._counts.note("subject_foreign")  # inboxes and the like: each is another one, none is remembered
            return False
        try:
            key = self._spelling.decode(subject.decode())
        except (SubjectInvalid, UnicodeDecodeError):
            self._counts.add("subject_malformed", subject.decode(errors="replace"))
            return False
        wanted = chosen.keys is not None and key in chosen.keys
        if len(chosen.known) >= SUBJECTS_KNOWN_MAX:
            chosen.known.clear()
        chosen.known[subject] = wanted
        return wanted

    def _twice(self, subject: bytes, data: bytes, new: bool) -> bool:
        window = self._window
        if window is None or len(window) >= WINDOW_MAX:
            return False
        copy = hash((subject, data))
        balance = window.get(copy, 0)
        window[copy] = balance - 1 if new else balance + 1
        return balance > 0 if new else balance < 0
