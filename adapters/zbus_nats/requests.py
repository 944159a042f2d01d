"""Request/reply over NATS: requests go to a queue group, and replies to an inbox.

A request goes to `@ask.<subject>`, where one of the nodes that serve the key receives it. Replies arrive in order, and
a last message has their number. If no node serves the key, the NATS server replies immediately. A request that is too
large for one message is announced first, and its parts go directly to the node that accepted it, because a queue group
would distribute them among its members.
"""

from __future__ import annotations

import itertools
import re
import secrets
import threading
from asyncio import TimerHandle
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zbus.errors import TransportError
from zbus.observe.records import TRANSPORT_INPUT_REJECTED
from zbus.ports.fabric import IncomingRequest, OnReply, OnRequest

from .connection import NatsConnection, Subscribed
from .parts import PART_HEADER, Assembler, publish, publish_headers
from .subjects import INBOX_PREFIX, REQUEST_PREFIX, SubjectInvalid, decode_subject, encode_key

if TYPE_CHECKING:
    from zbus.ports.fabric import RequestHandle

QUEUE = "zbus"
UPLOADS_MAX = 1_000
UPLOAD_S = 30.0

_NO_RESPONDERS = b"NATS/1.0 503"
_INBOX = re.compile(rb"_INBOX\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_END = re.compile(rb"\r\nZbus-End: (\d{1,18})\r\n")
_LARGE = re.compile(rb"\r\nZbus-Large: (\d{1,12})\r\n")
_UPLOAD = re.compile(rb"\r\nZbus-Upload: (\S{1,256})\r\n")


class NatsPendingRequest:
    """A request that this node has sent."""

    def __init__(self, requests: NatsRequests, inbox: bytes, payload: bytes, on_reply: OnReply) -> None:
        self._requests, self.inbox, self.payload, self.on_reply = requests, inbox, payload, on_reply
        self.replies = 0
        self.timer: TimerHandle | None = None

    def close(self) -> None:
        """Ignore further replies."""
        self._requests.forget(self)

    def stop_timer(self) -> None:
        """Cancel the timeout. Only for the connection's thread."""
        if self.timer is not None:
            self.timer.cancel()


class NatsIncomingRequest:
    """A request from another node."""

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
                raise TransportError("the request is closed: it takes no more replies")
            self._connection.send(publish(self._inbox, data, self._connection.max_payload))
            self._replies += 1

    def close(self) -> None:
        """Send the end of the replies, with their number."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            command = publish_headers(self._inbox, b"NATS/1.0\r\nZbus-End: %d\r\n\r\n" % self._replies)
            try:
                self._connection.send([command])
            except TransportError:
                # The requester notices it by its own connection, or by its timeout.
                self._connection.counts.report(TRANSPORT_INPUT_REJECTED, "end_unsent", self.key)


class NatsRequests:
    """Sends and serves requests on one connection."""

    def __init__(self, connection: NatsConnection, assembly_bytes_max: int) -> None:
        self._connection, self._counts = connection, connection.counts
        self._prefix = f"{INBOX_PREFIX}{secrets.token_hex(11)}."
        self._tokens = itertools.count(1)
        self._pending: dict[bytes, NatsPendingRequest] = {}
        self._uploads: dict[bytes, tuple[str, bytes]] = {}  # inbox -> key, and the inbox for replies
        self._assembler = Assembler(assembly_bytes_max, self._counts)
        self._bytes_max = assembly_bytes_max
        self._served: dict[str, int] = {}
        self._on_request: OnRequest | None = None
        self._lock = threading.Lock()
        self._inbox_ready = False
        connection.on_lost.append(self._lost)

    # -- any thread ------------------------------------------------------------------------------------------

    def request(self, key: str, payload: bytes, on_reply: OnReply, timeout_s: float) -> RequestHandle:
        """Send a request. `on_reply` is called on the connection's thread."""
        subject = (REQUEST_PREFIX + encode_key(key)).encode()
        self._listen_for_replies()
        inbox = f"{self._prefix}{next(self._tokens)}".encode()
        pending = self._pending[inbox] = NatsPendingRequest(self, inbox, payload, on_reply)
        self._connection.soon(lambda: self._start_timer(pending, timeout_s))
        try:
            if len(payload) <= self._connection.max_payload:
                self._connection.send(publish(subject, payload, self._connection.max_payload, inbox))
            else:
                headers = b"NATS/1.0\r\nZbus-Large: %d\r\n\r\n" % len(payload)
                command = publish_headers(subject, headers, reply=inbox)
                self._connection.send([command])
        except TransportError:
            pending.close()
            raise
        return pending

    def serve(self, keys: Sequence[str], on_request: OnRequest) -> None:
        """Serve exactly these keys, in place of the earlier ones."""
        subjects = {REQUEST_PREFIX + encode_key(key) for key in keys}
        self._listen_for_replies()
        with self._lock:
            self._on_request = on_request
            new = sorted(subjects - self._served.keys())
            old = [self._served.pop(subject) for subject in self._served.keys() - subjects]
            sids = self._connection.change([Subscribed(subject, QUEUE, self._request_received) for subject in new], old)
            self._served.update(zip(new, sids, strict=True))

    def forget(self, pending: NatsPendingRequest) -> bool:
        """Ignore further replies. Return False if that was done already."""
        known = self._pending.pop(pending.inbox, None) is not None
        if known:
            self._connection.soon(pending.stop_timer)
        return known

    def diagnostics(self) -> dict[str, int]:
        """Return the number of requests in flight and of served keys."""
        return {"asking": len(self._pending), "answering": len(self._served)}

    def _listen_for_replies(self) -> None:
        with self._lock:
            if not self._inbox_ready:
                self._connection.change([Subscribed(f"{self._prefix}*", "", self._reply)], [])
                self._inbox_ready = True

    # -- the connection's thread -----------------------------------------------------------------------------

    def _reply(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        pending = self._pending.get(subject)
        if pending is None:
            if subject in self._uploads:
                self._uploaded(subject, data, headers)
            else:
                self._counts.add("reply_late")
            return
        if headers is not None:
            end = _END.search(headers)
            if end or headers.startswith(_NO_RESPONDERS):
                if end and int(end[1]) != pending.replies:
                    self._counts.report(TRANSPORT_INPUT_REJECTED, "replies_missing", subject.decode(errors="replace"))
                self._finish(pending)
                return
            upload = _UPLOAD.search(headers)
            if upload:
                self._upload(pending, upload[1])
                return
            whole = self._assembler.take(subject, headers, data)
            if whole is None:
                return
            data = whole
        pending.replies += 1
        self._notify(pending, data)

    def _upload(self, pending: NatsPendingRequest, inbox: bytes) -> None:
        if not _INBOX.fullmatch(inbox):
            self._counts.report(TRANSPORT_INPUT_REJECTED, "upload_rejected", inbox.decode(errors="replace"))
            return
        try:
            self._connection.send(publish(inbox, pending.payload, self._connection.max_payload))
        except TransportError:
            self._finish(pending)

    def _request_received(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        source = subject.decode(errors="replace")
        try:
            key = decode_subject(source.removeprefix(REQUEST_PREFIX))
        except SubjectInvalid:
            self._counts.report(TRANSPORT_INPUT_REJECTED, "request_malformed", source)
            return
        if not _INBOX.fullmatch(reply):  # a requester must not make this node publish to other subjects
            self._counts.report(TRANSPORT_INPUT_REJECTED, "request_without_inbox", source)
            return
        large = None if headers is None else _LARGE.search(headers)
        if large:
            self._large_request_received(key, reply, int(large[1]))
        elif headers is not None and PART_HEADER in headers:
            self._counts.report(TRANSPORT_INPUT_REJECTED, "request_in_parts", source)
        else:
            self._hand_over(NatsIncomingRequest(self._connection, key, data, reply))

    def _large_request_received(self, key: str, reply: bytes, size: int) -> None:
        if size > self._bytes_max or len(self._uploads) >= UPLOADS_MAX:
            self._counts.report(TRANSPORT_INPUT_REJECTED, "request_too_large", key, size_bytes=size)
            self._reject(reply)
            return
        inbox = f"{self._prefix}{next(self._tokens)}".encode()
        self._uploads[inbox] = (key, reply)
        self._connection.later(UPLOAD_S, lambda: self._expire(inbox))
        command = publish_headers(reply, b"NATS/1.0\r\nZbus-Upload: %b\r\n\r\n" % inbox)
        try:
            self._connection.send([command])
        except TransportError:  # the requester notices it by its own connection
            del self._uploads[inbox]
            self._counts.report(TRANSPORT_INPUT_REJECTED, "upload_unsent", key)

    def _uploaded(self, inbox: bytes, data: bytes, headers: bytes | None) -> None:
        whole = data if headers is None else self._assembler.take(inbox, headers, data)
        if whole is not None:
            key, reply = self._uploads.pop(inbox)
            self._hand_over(NatsIncomingRequest(self._connection, key, whole, reply))

    def _expire(self, inbox: bytes) -> None:
        if self._uploads.pop(inbox, None) is not None:
            self._counts.report(TRANSPORT_INPUT_REJECTED, "request_incomplete", inbox.decode())

    def _hand_over(self, request: NatsIncomingRequest) -> None:
        on_request = self._on_request
        try:
            if on_request is not None:
                on_request(request)
        except Exception as error:  # a bug in the receiver must not stop the reading of the socket
            self._counts.report(TRANSPORT_INPUT_REJECTED, "receiver_failed", request.key, error=repr(error)[:200])

    def _reject(self, reply: bytes) -> None:
        NatsIncomingRequest(self._connection, "", b"", reply).close()

    def _start_timer(self, pending: NatsPendingRequest, timeout_s: float) -> None:
        if pending.inbox in self._pending:
            pending.timer = self._connection.later(timeout_s, lambda: self._finish(pending))

    def _finish(self, pending: NatsPendingRequest) -> None:
        if self.forget(pending):
            self._notify(pending, None)

    def _notify(self, pending: NatsPendingRequest, data: bytes | None) -> None:
        try:
            pending.on_reply(data)
        except Exception as error:
            self._counts.report(TRANSPORT_INPUT_REJECTED, "receiver_failed", "reply", error=repr(error)[:200])

    def _lost(self) -> None:
        self._assembler.clear()
        self._uploads.clear()
        for pending in list(self._pending.values()):
            self._finish(pending)


if TYPE_CHECKING:
    _port: type[IncomingRequest] = NatsIncomingRequest
    _handle: type[RequestHandle] = NatsPendingRequest
