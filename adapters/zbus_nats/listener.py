"""Frames from subjects to `receive`: filtered exactly, put together from parts, each of them once.

While `listen` changes, new subscriptions take over from old ones, and for a moment both deliver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from zbus.keys import KeySet
from zbus.observe.records import TRANSPORT_INPUT_REJECTED
from zbus.ports.fabric import Receive
from zbus.util.memo import Memo

from .client import Sink
from .connection import NatsConnection, Subscribed
from .parts import PART_HEADER, Assembler
from .subjects import ENCODED, FOREIGN, Spelling, SubjectInvalid
from .subscription_handover import HandoverPhase, SubscriptionHandover

SUBJECTS_KNOWN_MAX = 20_000

# Makes a frame of what another program sent: subject, payload, raw header block.
Convert = Callable[[bytes, bytes, bytes | None], bytes | None]


class _Tap:
    """One subscription."""

    def __init__(self) -> None:
        self.sid = 0
        self.old: bool | None = None  # only while it takes over from others, or others take over from it


class _Filter:
    """What one `listen` asked for. The next one replaces it, with its memory of subjects."""

    def __init__(self, keys: KeySet | None, receive: Receive) -> None:
        self.keys, self.receive = keys, receive
        self.known = Memo[bytes, bool](SUBJECTS_KNOWN_MAX)


class NatsListener:
    """The subscriptions of one fabric."""

    def __init__(
        self,
        connection: NatsConnection,
        assembly_bytes_max: int,
        spelling: Spelling = ENCODED,
        convert: Convert | None = None,
    ) -> None:
        self._connection, self._counts = connection, connection.counts
        self._spelling, self._convert = spelling, convert
        self._assembler = Assembler(assembly_bytes_max, connection.counts)
        self._filter = _Filter(None, lambda frame, done: None)
        self._taps: dict[str, _Tap] = {}
        self._turn = SubscriptionHandover()
        self._lock = threading.Lock()
        connection.on_lost.append(self._assembler.clear)

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        """Receive exactly what the expressions match, from now on."""
        subjects = self._spelling.cover(expressions)
        chosen = _Filter(KeySet(expressions) if expressions else None, receive)
        with self._lock:
            coming = {subject: _Tap() for subject in subjects - self._taps.keys()}
            leaving = {subject: tap for subject, tap in self._taps.items() if subject not in subjects}

            def enter(phase: HandoverPhase) -> None:
                self._turn.enter(phase)
                if phase is HandoverPhase.BOTH_BEGIN:
                    self._filter = chosen
                    _assign(coming, leaving)
                elif phase is HandoverPhase.DONE:
                    _assign(coming, {})

            added = [Subscribed(subject, "", self._sink(tap)) for subject, tap in coming.items()]
            sids = self._connection.change(added, [tap.sid for tap in leaving.values()], enter)
            for tap, sid in zip(coming.values(), sids, strict=True):
                tap.sid = sid
            self._taps = {subject: tap for subject, tap in (self._taps | coming).items() if subject in subjects}

    def _sink(self, tap: _Tap) -> Sink:
        convert = self._convert

        def sink(subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
            chosen = self._filter
            known = chosen.known
            wanted = known[subject] if subject in known else self._judge(chosen, subject)
            if not wanted or (tap.old is not None and not self._turn.takes(tap.old, subject, data, headers)):
                return
            frame: bytes | None = data
            if convert is not None:
                frame = convert(subject, data, headers)
            elif headers is not None and PART_HEADER in headers:
                frame = self._assembler.take(subject, headers, data)
            if frame is None:
                return
            try:
                chosen.receive(frame, None)
            except Exception as error:  # a bug of the receiver must not end the reading of the socket
                self._counts.tell(
                    TRANSPORT_INPUT_REJECTED,
                    "receiver_failed",
                    subject.decode(errors="replace"),
                    error=repr(error)[:200],
                )

        return sink

    def _judge(self, chosen: _Filter, subject: bytes) -> bool:
        if subject.startswith(FOREIGN):
            self._counts.note("subject_unmapped")  # inboxes and the like: each is another one, none is remembered
            return False
        try:
            key = self._spelling.decode(subject.decode())
        except (SubjectInvalid, UnicodeDecodeError):
            self._counts.tell(TRANSPORT_INPUT_REJECTED, "subject_malformed", subject.decode(errors="replace"))
            return False
        wanted = chosen.keys is not None and key in chosen.keys
        chosen.known[subject] = wanted
        return wanted


def _assign(coming: dict[str, _Tap], leaving: dict[str, _Tap]) -> None:
    """With none on one side there is nothing to take over: what comes is taken."""
    for tap in coming.values():
        tap.old = False if leaving else None
    for tap in leaving.values():
        tap.old = True if coming else None
