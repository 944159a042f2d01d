"""Questions and their replies over NATS: a request to a queue group, and an inbox for what comes back.

A question goes to `@ask.<subject>`, where one of those who answer for the key gets it. Replies come to an
inbox in order; a last message says how many there were. Where nobody answers, the server says so at once. A
question that is too large for one message is announced first, and its parts go to the one who took it:
a queue group would deal them out.
"""

from __future__ import annotations

import itertools
import re
import secrets
import threading
from asyncio import TimerHandle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zbus.errors import TransportError
from zbus.observe.records import TRANSPORT_INPUT_REJECTED
from zbus.ports.fabric import Heard, IncomingRequest

from .connection import NatsConnection, Subscribed
from .parts import PART_HEADER, Assembler, publish, publish_headers
from .subjects import ASK_PREFIX, INBOX_PREFIX, SubjectInvalid, decode_subject, encode_key

if TYPE_CHECKING:
    from zbus.ports.fabric import Asking

QUEUE = "zbus"
UPLOADS_MAX = 1_000
UPLOAD_S = 30.0

_NOBODY = b"NATS/1.0 503"
_INBOX = re.compile(rb"_INBOX\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_END = re.compile(rb"\r\nZbus-End: (\d{1,18})\r\n")
_LARGE = re.compile(rb"\r\nZbus-Large: (\d{1,12})\r\n")
_UPLOAD = re.compile(rb"\r\nZbus-Upload: (\S{1,256})\r\n")


class NatsPendingRequest:
    """A question of ours that is under way."""

    def __init__(self, asks: NatsRequests, inbox: bytes, payload: bytes, heard: Heard) -> None:
        self._asks, self.inbox, self.payload, self.heard = asks, inbox, payload, heard
        self.replies = 0
        self.timer: TimerHandle | None = None

    def close(self) -> None:
        """Listen no longer."""
        self._asks.forget(self)

    def stop_timer(self) -> None:
        """It came to its end before its time was over. On the connection's thread."""
        if self.timer is not None:
            self.timer.cancel()


class NatsIncomingRequest:
    """A question that another node asked."""

    def __init__(self, connection: NatsConnection, key: str, payload: bytes, inbox: bytes) -> None:
        self.key, self.payload = key, payload
        self._connection, self._inbox = connection, inbox
        self._lock = threading.Lock()
        self._replies = 0
        self._closed = False

    def reply(self, data: bytes) -> None:
        """Send one reply."""
        with self._lock:
            if self._closed:
                raise TransportError("the question was closed: no more replies")
            self._connection.send(publish(self._inbox, data, self._connection.max_payload))
            self._replies += 1

    def close(self) -> None:
        """Say that this was all, and how many."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            command = publish_headers(self._inbox, b"NATS/1.0\r\nZbus-End: %d\r\n\r\n" % self._replies)
            try:
                self._connection.send([command])
            except TransportError:
                # Whoever asked over this server is told by its own connection, or by its timeout.
                self._connection.counts.tell(TRANSPORT_INPUT_REJECTED, "end_unsent", self.key)


class NatsRequests:
    """Both ends of asking on one connection."""

    def __init__(self, connection: NatsConnection, assembly_bytes_max: int) -> None:
        self._connection, self._counts = connection, connection.counts
        self._prefix = f"{INBOX_PREFIX}{secrets.token_hex(11)}."
        self._tokens = itertools.count(1)
        self._under_way: dict[bytes, NatsPendingRequest] = {}
        self._uploads: dict[bytes, tuple[str, bytes]] = {}  # inbox -> key, and where replies go
        self._assembler = Assembler(assembly_bytes_max, self._counts)
        self._bytes_max = assembly_bytes_max
        self._answering: dict[str, int] = {}
        self._asked: Callable[[IncomingRequest], None] | None = None
        self._lock = threading.Lock()
        self._inbox_ready = False
        connection.on_lost.append(self._lost)

    # -- any thread ------------------------------------------------------------------------------------------

    def ask(self, key: str, payload: bytes, heard: Heard, timeout_s: float) -> Asking:
        """Ask; `heard` is called on the connection's thread."""
        subject = (ASK_PREFIX + encode_key(key)).encode()
        self._listen_for_replies()
        inbox = f"{self._prefix}{next(self._tokens)}".encode()
        asked = self._under_way[inbox] = NatsPendingRequest(self, inbox, payload, heard)
        self._connection.soon(lambda: self._start_timer(asked, timeout_s))
        try:
            if len(payload) <= self._connection.max_payload:
                self._connection.send(publish(subject, payload, self._connection.max_payload, inbox))
            else:
                headers = b"NATS/1.0\r\nZbus-Large: %d\r\n\r\n" % len(payload)
                command = publish_headers(subject, headers, reply=inbox)
                self._connection.send([command])
        except TransportError:
            asked.close()
            raise
        return asked

    def answer(self, keys: Sequence[str], asked: Callable[[IncomingRequest], None]) -> None:
        """Answer for exactly these keys from now on."""
        subjects = {ASK_PREFIX + encode_key(key) for key in keys}
        self._listen_for_replies()
        with self._lock:
            self._asked = asked
            new = sorted(subjects - self._answering.keys())
            old = [self._answering.pop(subject) for subject in self._answering.keys() - subjects]
            sids = self._connection.change([Subscribed(subject, QUEUE, self._question) for subject in new], old)
            self._answering.update(zip(new, sids, strict=True))

    def forget(self, asked: NatsPendingRequest) -> bool:
        """Listen no longer for replies; False where that was so already."""
        known = self._under_way.pop(asked.inbox, None) is not None
        if known:
            self._connection.soon(asked.stop_timer)
        return known

    def diagnostics(self) -> dict[str, int]:
        """How much is under way."""
        return {"asking": len(self._under_way), "answering": len(self._answering)}

    def _listen_for_replies(self) -> None:
        with self._lock:
            if not self._inbox_ready:
                self._connection.change([Subscribed(f"{self._prefix}*", "", self._reply)], [])
                self._inbox_ready = True

    # -- the connection's thread -----------------------------------------------------------------------------

    def _reply(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        asked = self._under_way.get(subject)
        if asked is None:
            if subject in self._uploads:
                self._uploaded(subject, data, headers)
            else:
                self._counts.note("reply_late")
            return
        if headers is not None:
            end = _END.search(headers)
            if end or headers.startswith(_NOBODY):
                if end and int(end[1]) != asked.replies:
                    self._counts.tell(TRANSPORT_INPUT_REJECTED, "replies_missing", subject.decode(errors="replace"))
                self._finish(asked)
                return
            upload = _UPLOAD.search(headers)
            if upload:
                self._upload(asked, upload[1])
                return
            whole = self._assembler.take(subject, headers, data)
            if whole is None:
                return
            data = whole
        asked.replies += 1
        self._tell(asked, data)

    def _upload(self, asked: NatsPendingRequest, inbox: bytes) -> None:
        if not _INBOX.fullmatch(inbox):
            self._counts.tell(TRANSPORT_INPUT_REJECTED, "upload_refused", inbox.decode(errors="replace"))
            return
        try:
            self._connection.send(publish(inbox, asked.payload, self._connection.max_payload))
        except TransportError:
            self._finish(asked)

    def _question(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        source = subject.decode(errors="replace")
        try:
            key = decode_subject(source.removeprefix(ASK_PREFIX))
        except SubjectInvalid:
            self._counts.tell(TRANSPORT_INPUT_REJECTED, "request_malformed", source)
            return
        if not _INBOX.fullmatch(reply):  # replies must not be a way to publish with our rights
            self._counts.tell(TRANSPORT_INPUT_REJECTED, "request_without_inbox", source)
            return
        large = None if headers is None else _LARGE.search(headers)
        if large:
            self._announced(key, reply, int(large[1]))
        elif headers is not None and PART_HEADER in headers:
            self._counts.tell(TRANSPORT_INPUT_REJECTED, "request_in_parts", source)
        else:
            self._hand_over(NatsIncomingRequest(self._connection, key, data, reply))

    def _announced(self, key: str, reply: bytes, size: int) -> None:
        if size > self._bytes_max or len(self._uploads) >= UPLOADS_MAX:
            self._counts.tell(TRANSPORT_INPUT_REJECTED, "request_too_large", key, size_bytes=size)
            self._hand_over_nothing(reply)
            return
        inbox = f"{self._prefix}{next(self._tokens)}".encode()
        self._uploads[inbox] = (key, reply)
        self._connection.later(UPLOAD_S, lambda: self._expire(inbox))
        command = publish_headers(reply, b"NATS/1.0\r\nZbus-Upload: %b\r\n\r\n" % inbox)
        try:
            self._connection.send([command])
        except TransportError:  # whoever asked hears of it from its own connection
            del self._uploads[inbox]
            self._counts.tell(TRANSPORT_INPUT_REJECTED, "upload_unsent", key)

    def _uploaded(self, inbox: bytes, data: bytes, headers: bytes | None) -> None:
        whole = data if headers is None else self._assembler.take(inbox, headers, data)
        if whole is not None:
            key, reply = self._uploads.pop(inbox)
            self._hand_over(NatsIncomingRequest(self._connection, key, whole, reply))

    def _expire(self, inbox: bytes) -> None:
        if self._uploads.pop(inbox, None) is not None:
            self._counts.tell(TRANSPORT_INPUT_REJECTED, "request_incomplete", inbox.decode())

    def _hand_over(self, question: NatsIncomingRequest) -> None:
        asked = self._asked
        try:
            if asked is not None:
                asked(question)
        except Exception as error:  # a bug of the receiver must not end the reading of the socket
            self._counts.tell(TRANSPORT_INPUT_REJECTED, "receiver_failed", question.key, error=repr(error)[:200])

    def _hand_over_nothing(self, reply: bytes) -> None:
        NatsIncomingRequest(self._connection, "", b"", reply).close()

    def _start_timer(self, asked: NatsPendingRequest, timeout_s: float) -> None:
        if asked.inbox in self._under_way:
            asked.timer = self._connection.later(timeout_s, lambda: self._finish(asked))

    def _finish(self, asked: NatsPendingRequest) -> None:
        if self.forget(asked):
            self._tell(asked, None)

    def _tell(self, asked: NatsPendingRequest, data: bytes | None) -> None:
        try:
            asked.heard(data)
        except Exception as error:
            self._counts.tell(TRANSPORT_INPUT_REJECTED, "receiver_failed", "heard", error=repr(error)[:200])

    def _lost(self) -> None:
        self._assembler.clear()
        self._uploads.clear()
        for asked in list(self._under_way.values()):
            self._finish(asked)


if TYPE_CHECKING:
    _port: type[IncomingRequest] = NatsIncomingRequest
    _asking: type[Asking] = NatsPendingRequest
