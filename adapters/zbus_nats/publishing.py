"""Publishing to JetStream: a batch is complete when the server has acknowledged each of its messages."""

from __future__ import annotations

import itertools
import json
import secrets
import threading
from collections.abc import Sequence

from zbus.errors import TransportError
from zbus.observe.records import TRANSPORT_INPUT_REJECTED

from .connection import NatsConnection, Subscribed
from .parts import publish_headers
from .subjects import INBOX_PREFIX

BATCH_MESSAGES_MAX = 500


class _Batch:
    def __init__(self, count: int) -> None:
        self.left = count
        self.error: str | None = None
        self.settled = threading.Event()

    def fail(self, error: str) -> None:
        self.error = error if self.error is None else self.error
        self.settled.set()


class NatsPublishing:
    """Publishes messages and waits until they are stored."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        self._prefix = f"{INBOX_PREFIX}{secrets.token_hex(11)}."
        self._numbers = itertools.count(1)
        self._batches: dict[bytes, _Batch] = {}
        connection.on_lost.append(self._lost)

    @property
    def subscription(self) -> Subscribed:
        """The subscription for acknowledgements of the server."""
        return Subscribed(f"{self._prefix}*", "", self._acknowledged)

    def send(self, messages: Sequence[tuple[bytes, bytes, bytes]]) -> None:
        """Publish (subject, header block, payload) in order. Raises `TransportError` unless all are stored."""
        for at in range(0, len(messages), BATCH_MESSAGES_MAX):
            self._send_some(messages[at : at + BATCH_MESSAGES_MAX])

    def _send_some(self, messages: Sequence[tuple[bytes, bytes, bytes]]) -> None:
        inbox = f"{self._prefix}{next(self._numbers)}".encode()
        batch = self._batches[inbox] = _Batch(len(messages))
        timeout_s = self._connection.options.send_timeout_s
        try:
            self._connection.send([publish_headers(*message, inbox) for message in messages])
            if not batch.settled.wait(timeout_s):
                raise TransportError(f"JetStream acknowledged nothing within {timeout_s:g} s")
        finally:
            del self._batches[inbox]
        if batch.error is not None:
            raise TransportError(f"JetStream did not store the messages: {batch.error}")

    def _acknowledged(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        batch = self._batches.get(subject)
        if batch is None:
            return
        if headers is not None and headers.startswith(b"NATS/1.0 503"):
            batch.fail("no stream stores the subject")
            return
        try:
            reply_json = json.loads(data)
        except (ValueError, RecursionError):
            reply_json = None
        if isinstance(reply_json, dict) and "error" in reply_json:
            error = reply_json["error"]
            batch.fail(str(error.get("description") if isinstance(error, dict) else error)[:200])
        elif isinstance(reply_json, dict) and "seq" in reply_json:
            batch.left -= 1
            if batch.left == 0:
                batch.settled.set()
        else:
            self._connection.counts.report(
                TRANSPORT_INPUT_REJECTED, "acknowledgement_malformed", subject.decode(errors="replace")
            )
            batch.fail("malformed acknowledgement")

    def _lost(self) -> None:
        for batch in list(self._batches.values()):
            batch.fail("the connection was lost")
