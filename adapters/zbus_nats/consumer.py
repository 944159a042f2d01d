"""A durable pull consumer of a JetStream stream that recovers from failures and keeps the order of the stream.

Messages go directly to a sink and are acknowledged when the log has stored them. Pull consumers are known to stop:
after a reconnection, when they are deleted, or when another server takes over. A consumer that reports an error, or
sends nothing although messages were requested, is therefore set up again. JetStream would redeliver unacknowledged
messages between newer ones. To keep sequences rising, the consumer is recreated right after the last stored message
instead. A durable consumer has one reader. Everything runs on the connection's thread, except `Delivery.done`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections.abc import Callable
from typing import Any

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DeliverPolicy
from nats.js.errors import NotFoundError

from zbus.errors import TransportError
from zbus.observe.records import TRANSPORT_INPUT_REJECTED, record, record_reason
from zbus.util.backoff import Backoff
from zbus.util.mailbox import Mailbox

from .client import DirectClient
from .connection import NatsConnection, Subscribed, unless_gone
from .delivery import Delivery, read_place
from .subjects import INBOX_PREFIX
from .vendor import VENDOR_ERRORS, describe

JETSTREAM_CONSUMER_LOST = "JETSTREAM_CONSUMER_LOST"
JETSTREAM_CONSUMER_READY = "JETSTREAM_CONSUMER_READY"

API_S = 5.0
RETRY_S = (0.1, 5.0)

_STATUS = re.compile(rb"NATS/1\.0 (\d{3})(?: ([^\r\n]*))?")
_PENDING = re.compile(rb"\r\nNats-Pending-Messages: (\d{1,9})\r\n")


class Consumer:
    """Delivers the messages of one stream at least once, in order."""

    def __init__(self, connection: NatsConnection, stream: str, durable: str, take: Callable[[Delivery], None]) -> None:
        self._connection, self._options, self._counts = connection, connection.options, connection.counts
        self.stream, self.durable, self._take = stream, durable, take
        self.created = ""  # when the stream was created: a new stream of the same name has another time
        self.recreated = 0
        self.healthy = False
        self.listening = False
        self._inbox = f"{INBOX_PREFIX}{secrets.token_hex(11)}"
        self._epoch = 0  # replies to requests of an earlier epoch are ignored
        self._left = 0  # messages that were requested and have not arrived
        self._last_received_at = 0.0
        self._unacknowledged: dict[int, bytes] = {}  # stream sequence -> the subject for the acknowledgement
        self._handed = 0  # the stream sequence of the last delivered message
        self._next = 0  # the consumer sequence of the next delivery
        self._stored = Mailbox[tuple[str, int]](connection.loop, self._send_acks)
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # -- any thread ------------------------------------------------------------------------------------------

    def acknowledge(self, created: str, sequence: int) -> None:
        """Acknowledge a message soon, in a batch with others. May be called on any thread."""
        self._stored.post((created, sequence))

    def diagnostics(self) -> dict[str, Any]:
        """Return the state and the position of the consumer."""
        return {
            "stream": self.stream,
            "durable": self.durable,
            "healthy": self.healthy,
            "recreated": self.recreated,
            "unacknowledged": len(self._unacknowledged),
            "sequence": self._handed,
        }

    # -- the connection's thread -----------------------------------------------------------------------------

    async def find_stream(self, client: DirectClient) -> None:
        """Look up the stream. Raises `TransportError` if it does not exist."""
        try:
            reply = await unless_gone(client, client.request(f"$JS.API.STREAM.INFO.{self.stream}", b"", timeout=API_S))
            found = json.loads(reply.data)
            if "error" in found:
                raise TransportError(f"stream {self.stream!r}: {str(found['error'].get('description'))[:200]}")
            created = str(found["created"])
        except nats.errors.NoRespondersError:
            raise TransportError("the server does not offer JetStream to this login") from None
        except (KeyError, TypeError, AttributeError, RecursionError, *VENDOR_ERRORS) as error:
            raise TransportError(f"stream {self.stream!r}: {describe(error, self._options)}") from None
        if created != self.created:
            self.created, self._handed = created, 0
            self._unacknowledged.clear()

    def start(self) -> None:
        """Start or resume pulling messages."""
        self.listening = True
        self._changed.set()
        if self._task is None:
            self._connection.on_lost.append(lambda: self._lose("the connection was lost"))
            self._connection.on_connected.append(self._changed.set)
            self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Stop pulling messages."""
        if self.listening:
            self.listening = False
            self._lose("the listener has stopped")

    def again(self) -> None:
        """Deliver the last message again, because the receiver failed: start after the last stored message."""
        self._lose("the receiver failed")

    @property
    def subscription(self) -> Subscribed:
        """The subscription for messages and for replies of the server."""
        return Subscribed(f"{self._inbox}.*", "", self._message)

    async def _run(self) -> None:
        pauses = Backoff(*RETRY_S)
        while True:
            try:
                await self._set_up()
                pauses.reset()
                await self._watch()
            except (TransportError, *VENDOR_ERRORS) as error:
                self._counts.report(
                    TRANSPORT_INPUT_REJECTED, "consumer_setup_failed", self.stream, error=describe(error, self._options)
                )
            await asyncio.sleep(pauses.next())

    async def _set_up(self) -> None:
        while self._connection.client is None or not self.listening:
            self._changed.clear()
            await self._changed.wait()
        client = self._connection.client
        await self.find_stream(client)
        context = client.jetstream(timeout=API_S)
        stored = min(self._unacknowledged, default=self._handed + 1) - 1
        try:
            found = await unless_gone(client, context.consumer_info(self.stream, self.durable))
            if found.config.deliver_subject or found.config.ack_policy != AckPolicy.EXPLICIT:
                raise TransportError(f"consumer {self.durable!r} is not a pull consumer with explicit acknowledgements")
            if found.num_ack_pending:
                stored = max(stored, (found.ack_floor.stream_seq or 0) if found.ack_floor else 0)
                await unless_gone(client, context.delete_consumer(self.stream, self.durable))
                found = await self._make(client, context, stored)
        except NotFoundError:
            found = await self._make(client, context, stored)
        self._begin(stored, (found.delivered.consumer_seq or 0) if found.delivered else 0)

    async def _make(self, client: DirectClient, context: JetStreamContext, stored: int) -> ConsumerInfo:
        config = ConsumerConfig(
            durable_name=self.durable,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self._options.ack_wait_s,
            max_ack_pending=self._options.unacknowledged_max,
            max_deliver=-1,
        )
        if stored > 0:
            config = config.evolve(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=stored + 1)
        self.recreated += self._epoch > 0
        return await unless_gone(client, context.add_consumer(self.stream, config))

    def _begin(self, stored: int, delivered: int) -> None:
        self._unacknowledged.clear()  # messages that are not stored are delivered again
        self._handed = stored
        self._next = delivered + 1
        self._epoch += 1
        self._left = 0
        self._changed.clear()
        self._last_received_at = asyncio.get_running_loop().time()
        self.healthy = True
        record(JETSTREAM_CONSUMER_READY, stream=self.stream, durable=self.durable, recreated=self.recreated)
        self._pull()

    async def _watch(self) -> None:
        """Wait until the consumer must be set up again."""
        loop, patience_s = asyncio.get_running_loop(), self._options.idle_timeout_s
        while self.healthy:
            try:
                async with asyncio.timeout(patience_s / 2):  # `wait_for` may lose a cancellation before Python 3.12
                    await self._changed.wait()
            except TimeoutError:
                self._pull()
                if self._left and loop.time() - self._last_received_at > patience_s:
                    self._lose("no message or heartbeat arrived")
            else:
                self._changed.clear()

    def _lose(self, reason: str) -> None:
        healthy, self.healthy = self.healthy, False
        if healthy and not self._connection.closed:
            fields: dict[str, Any] = {"stream": self.stream, "durable": self.durable}
            record_reason(JETSTREAM_CONSUMER_LOST, logging.WARNING, code="consumer_lost", reason=reason, **fields)
            self._counts.add("consumer_lost")
        self._changed.set()

    def _pull(self) -> None:
        """Request more messages if few are in flight and there is capacity for them."""
        options = self._options
        capacity = options.unacknowledged_max - len(self._unacknowledged) - self._left
        batch = min(options.batch, capacity)
        if not (self.healthy and self.listening) or batch <= 0 or self._left > options.batch // 2:
            return
        expires_ns = int(options.idle_timeout_s / 2 * 1e9)
        request = {"batch": batch, "expires": expires_ns, "idle_heartbeat": expires_ns // 3}
        self._left += batch
        self._publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{self.durable}".encode(),
            json.dumps(request).encode(),
            f"{self._inbox}.{self._epoch}".encode(),
        )

    def _message(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        # Messages have the subject that they were stored with. Only status messages of the server have the inbox.
        if not reply.startswith(b"$JS.ACK."):
            if subject.endswith(b".%d" % self._epoch):
                self._last_received_at = asyncio.get_running_loop().time()
                self._status(headers or b"")
            return
        place = read_place(reply)
        if place is None:
            self._counts.report(TRANSPORT_INPUT_REJECTED, "acknowledgement_malformed", self.stream)
            return
        if not self.healthy:
            return  # it will be delivered again, in order
        sequence, number, published_at, times = place
        self._last_received_at = asyncio.get_running_loop().time()
        self._left = max(0, self._left - 1)
        if number != self._next or times > 1 or sequence <= self._handed:
            self._counts.add("delivered_out_of_order")
            self._lose("a message was delivered out of order")
            return
        self._next += 1
        self._handed = sequence
        self._unacknowledged[sequence] = reply
        self._take(Delivery(self.acknowledge, self.created, subject, data, headers, sequence, published_at))
        self._pull()

    def _status(self, headers: bytes) -> None:
        found = _STATUS.match(headers)
        code = found[1] if found else b""
        if code == b"100":  # a heartbeat
            return
        if code in (b"404", b"408"):
            pending = _PENDING.search(headers)
            self._left = max(0, self._left - int(pending[1])) if pending else 0
            self._pull()
            return
        text = (found[2] or b"").decode(errors="replace") if found else ""
        self._lose(f"{code.decode()} {text}".strip() or "a malformed status")

    def _send_acks(self, stored: list[tuple[str, int]]) -> None:
        commands = []
        for created, sequence in stored:
            reply = self._unacknowledged.pop(sequence, None) if created == self.created else None
            if reply is not None:
                commands.append(b"PUB %b 4\r\n+ACK\r\n" % reply)
        try:
            if commands:
                self._connection.send(commands)
        except TransportError:
            self._counts.add("acknowledgement_unsent")  # it is delivered and acknowledged again
        self._pull()

    def _publish(self, subject: bytes, data: bytes, reply: bytes) -> None:
        try:
            self._connection.send([b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(data), data)])
        except TransportError:
            self._lose("the connection was lost")
