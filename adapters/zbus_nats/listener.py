"""The subscriptions of a NATS fabric: frames are filtered exactly, reassembled from parts, and delivered once.

When `listen` changes, new subscriptions take over from old ones, and for a short time both deliver.
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

# Makes a frame of a plain message: subject, payload, raw header block. Returns None to skip the message.
Convert = Callable[[bytes, bytes, bytes | None], bytes | None]


class _Subscription:
    """One subscription."""

    def __init__(self) -> None:
        self.sid = 0
        self.old: bool | None = None  # set only during a handover: whether this one ends


class _Filter:
    """The arguments of one `listen`, and which subjects match them."""

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
        self._subscriptions: dict[str, _Subscription] = {}
        self._handover = SubscriptionHandover()
        self._lock = threading.Lock()
        connection.on_lost.append(self._assembler.clear)

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        """Receive exactly the keys that match, in place of the earlier expressions."""
        subjects = self._spelling.cover(expressions)
        chosen = _Filter(KeySet(expressions) if expressions else None, receive)
        with self._lock:
            coming = {subject: _Subscription() for subject in subjects - self._subscriptions.keys()}
            leaving = {subject: each for subject, each in self._subscriptions.items() if subject not in subjects}

            def enter(phase: HandoverPhase) -> None:
                self._handover.enter(phase)
                if phase is HandoverPhase.BOTH_BEGIN:
                    self._filter = chosen
                    _assign(coming, leaving)
                elif phase is HandoverPhase.DONE:
                    _assign(coming, {})

            added = [Subscribed(subject, "", self._sink(subscription)) for subject, subscription in coming.items()]
            sids = self._connection.change(added, [each.sid for each in leaving.values()], enter)
            for subscription, sid in zip(coming.values(), sids, strict=True):
                subscription.sid = sid
            both = self._subscriptions | coming
            self._subscriptions = {subject: both[subject] for subject in both if subject in subjects}

    def _sink(self, subscription: _Subscription) -> Sink:
        convert = self._convert

        def sink(subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
            chosen = self._filter
            known = chosen.known
            matched = known[subject] if subject in known else self._matches(chosen, subject)
            if not matched:
                return
            if subscription.old is not None and not self._handover.takes(subscription.old, subject, data, headers):
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
            except Exception as error:  # a bug in the receiver must not stop the reading of the socket
                self._counts.report(
                    TRANSPORT_INPUT_REJECTED,
                    "receiver_failed",
                    subject.decode(errors="replace"),
                    error=repr(error)[:200],
                )

        return sink

    def _matches(self, chosen: _Filter, subject: bytes) -> bool:
        if subject.startswith(FOREIGN):
            self._counts.add("subject_unmapped")  # such as inboxes, which do not repeat, so they are not remembered
            return False
        try:
            key = self._spelling.decode(subject.decode())
        except (SubjectInvalid, UnicodeDecodeError):
            self._counts.report(TRANSPORT_INPUT_REJECTED, "subject_malformed", subject.decode(errors="replace"))
            return False
        matched = chosen.keys is not None and key in chosen.keys
        chosen.known[subject] = matched
        return matched


def _assign(coming: dict[str, _Subscription], leaving: dict[str, _Subscription]) -> None:
    """Mark the subscriptions for a handover, which needs subscriptions on both sides."""
    for subscription in coming.values():
        subscription.old = False if leaving else None
    for subscription in leaving.values():
        subscription.old = True if coming else None
