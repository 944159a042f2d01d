"""nats-py's client with direct dispatch: a message goes from the socket to its sink, without a queue or a task.

nats-py puts every message into an asyncio queue that a task of the subscription empties. That costs more than all other
work together, and drops messages when the queue is full. Here a subscription has a *sink*: a function that is called
while the bytes are parsed. Nothing is queued, so nothing can be dropped. Only this file uses nats-py's internals, and a
test fails when they change.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from zbus.errors import TransportError

# Called with the subject, the reply subject, the payload, and the raw header block or None. Must not raise.
Sink = Callable[[bytes, bytes, bytes, bytes | None], None]

DISPOSE_S = 0.5
NO_TLS = "the server does not offer TLS, which is required"
HEADERS_BYTES_MAX = 64 * 1024  # beside a payload of the largest size
MAX_PAYLOAD_BYTES = 1 << 30  # more than any server permits
SIDS_FROM = 1 << 32  # clear of the ids that nats-py assigns

_MSG = re.compile(rb"MSG (\S+) (\d+) (?:(\S+) )?(\d+)\r\n")
_HMSG = re.compile(rb"HMSG (\S+) (\d+) (?:(\S+) )?(\d+) (\d+)\r\n")
_NEEDED = ("_subs", "_ps", "_transport", "_reading_task", "_server_info", "_pending", "_max_payload")


class DirectParser(Parser):
    """Passes messages with a sink directly to it, and everything else to nats-py, in the same order."""

    def __init__(self, nc: Any, sinks: dict[bytes, Sink]) -> None:
        super().__init__(nc)
        self._sinks = sinks
        self._needed_bytes = 0  # bytes that the buffer needs before its first message is complete

    def reset(self) -> None:
        """Forget a half-read message."""
        super().reset()
        self._needed_bytes = 0

    async def parse(self, data: bytes = b"") -> None:
        """Parse bytes from the socket."""
        if self.state == AWAITING_CONTROL_LINE:
            if self.buf:
                self.buf.extend(data)
                if len(self.buf) < self._needed_bytes:
                    return
                data = bytes(self.buf)
                self.buf.clear()
            self._needed_bytes = 0
            taken = self._direct(data)
            if self._needed_bytes:  # a message with a sink is incomplete
                self.buf.extend(memoryview(data)[taken:])
                return
            data = data[taken:]
            if not data:
                return
        await super().parse(data)
        self._check_length(self.needed)

    def _check_length(self, length: int) -> None:
        """Disconnect a server that announces a message larger than it may be: it would be collected in memory."""
        if length > self.nc.max_payload + HEADERS_BYTES_MAX:
            raise nats.errors.ProtocolError

    def _direct(self, data: bytes) -> int:
        """Pass every complete message at the start to its sink. Return how many bytes these messages have."""
        sinks, size, at = self._sinks, len(data), 0
        while at < size:
            found = _MSG.match(data, at)
            if found:
                subject, sid, reply, length = found.groups()
                headers_length: Any = None
            else:
                found = _HMSG.match(data, at)
                if not found:
                    break
                subject, sid, reply, headers_length, length = found.groups()
            sink = sinks.get(sid)
            if sink is None:
                break
            start = found.end()
            end = start + int(length)
            self._check_length(end - start)
            if end + 2 > size:
                self._needed_bytes = end + 2 - at
                break
            if headers_length is None:
                sink(subject, reply or b"", data[start:end], None)
            else:
                middle = start + int(headers_length)
                sink(subject, reply or b"", data[middle:end], data[start:middle])
            at = end + 2
        return at


class DirectClient(Client):
    """One connection to one server. It never reconnects: its owner creates a new client."""

    def __init__(self, *, needs_tls: bool) -> None:
        super().__init__()
        check_nats_py(self)
        self._needs_tls = needs_tls
        self._sinks: dict[bytes, Sink] = {}
        self._ps = DirectParser(self, self._sinks)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: Any) -> None:
        sink = self._sinks.get(b"%d" % sid)
        if sink is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            sink(bytes(subject), bytes(reply), data, headers or None)

    def check_limits(self) -> None:
        """Raise `nats.errors.Error` if the server announced a size of messages that cannot be used."""
        size: Any = self._max_payload
        if type(size) is not int or not 0 < size <= MAX_PAYLOAD_BYTES:
            raise nats.errors.Error(f"nats: the server announced max_payload {size!r:.40}")

    async def _process_pong(self) -> None:
        # nats-py completes the oldest ping even if it was cancelled, which raises and ends its reading task.
        if self._pongs and self._pongs[0].done():
            self._pongs.pop(0)
            self._pings_outstanding = 0
        else:
            await super()._process_pong()

    def _connect_command(self) -> bytes:
        # The login follows. Without this check it would be sent unencrypted to a server without TLS.
        if self._needs_tls and self._socket_info("ssl_object") is None:
            raise nats.errors.Error(f"nats: {NO_TLS}")
        command: bytes = super()._connect_command()
        return command

    def take(self, sid: int, subject: str, queue: str, sink: Sink) -> bytes:
        """Pass messages for `sid` to the sink. Return the command that subscribes."""
        self._subs[sid] = Subscription(self, sid, subject, queue)
        self._sinks[b"%d" % sid] = sink
        return f"SUB {subject} {queue} {sid}\r\n".encode()

    def drop(self, sid: int) -> bytes:
        """Return the command that unsubscribes. The sink stays until `forget`."""
        return b"UNSUB %d\r\n" % sid

    def forget(self, sid: int) -> None:
        """Remove a sink."""
        self._subs.pop(sid, None)
        self._sinks.pop(b"%d" % sid, None)

    def write(self, commands: list[bytes]) -> None:
        """Write complete commands to the socket, in order with those of nats-py."""
        if not self.is_connected or self._transport is None:
            raise nats.errors.ConnectionClosedError
        self._transport.writelines(commands)

    @property
    def unsent_bytes(self) -> int:
        """The number of bytes that the socket has not accepted yet."""
        writer = getattr(self._transport, "_io_writer", None)
        return 0 if writer is None else int(writer.transport.get_write_buffer_size())

    async def drained(self) -> None:
        """Wait until the socket accepts more. Raises `OSError` if it is closed."""
        if self._transport is not None:
            await self._transport.drain()  # type: ignore[no-untyped-call]

    async def gone(self) -> None:
        """Wait until the connection has ended, for any reason."""
        task = self._reading_task
        if task is not None:
            await asyncio.wait([task])

    @property
    def why(self) -> BaseException | None:
        """The last error that nats-py reported."""
        return self._err

    async def dispose(self) -> None:
        """Close immediately, and drop unsent bytes: a frozen server would never accept them."""
        for name in ("_io_writer", "_bare_io_writer"):  # with TLS there is a second one below
            writer = getattr(self._transport, name, None)
            if writer is not None:
                writer.transport.abort()
        try:
            # After a failed TLS handshake the stream never reports that it is closed.
            await asyncio.wait_for(self.close(), DISPOSE_S)
        except (OSError, nats.errors.Error, AssertionError):
            pass  # the connection is closed

    def _socket_info(self, name: str) -> Any:
        writer = getattr(self._transport, "_io_writer", None)
        return None if writer is None else writer.get_extra_info(name)


def check_nats_py(client: Client) -> None:
    """Raise `TransportError` if this version of nats-py has other internals than this file needs."""
    arguments = list(inspect.signature(Client._process_msg).parameters)
    if arguments[1:] != ["sid", "subject", "reply", "data", "headers"] or not all(
        hasattr(client, name) for name in _NEEDED
    ):
        raise TransportError("this version of nats-py is not supported: pip install 'nats-py>=2.16,<2.17'")
