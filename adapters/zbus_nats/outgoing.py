"""The queue of outgoing commands: from any thread to the socket, with one hop to the loop for a whole burst.

The queue is bounded. `send` blocks while it is full, and raises if the connection is lost, so a slow network slows the
sender down, and a lost one is reported immediately. Unsent commands are dropped, because the sender has a log.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from operator import itemgetter

from zbus.errors import TransportError
from zbus.util.mailbox import Mailbox

from .client import DirectClient
from .options import NatsOptions
from .vendor import VENDOR_ERRORS

WRITE_BYTES = 2 * 1024 * 1024
SOCKET_BYTES_HIGH = 1024 * 1024  # unsent bytes in the socket's buffer above which writing pauses


class OutgoingMessages:
    """A bounded queue of commands that the loop's thread empties."""

    def __init__(self, loop: asyncio.AbstractEventLoop, options: NatsOptions) -> None:
        self.connected = False
        self.max_payload = 0
        self.pending_bytes = 0
        self._loop, self._options = loop, options
        self._client: DirectClient | None = None
        # Commands and their size. A large burst is written in several turns, so that the loop can do other work.
        self._queue = Mailbox[tuple[Sequence[bytes], int]](loop, self._write, size=itemgetter(1), turn_size=WRITE_BYTES)
        self._draining: asyncio.Task[None] | None = None
        self._changed = threading.Condition()
        self._empty = asyncio.Event()

    def send(self, commands: Sequence[bytes]) -> None:
        """Queue commands. Blocks while the queue is full. Not for the loop's thread."""
        with self._changed:
            if self.pending_bytes >= self._options.pending_bytes_max:
                self._wait_for_capacity()
            self._put(commands)

    def post(self, commands: Sequence[bytes]) -> None:
        """Queue commands without blocking, for the loop's thread."""
        with self._changed:
            self._put(commands)

    def _put(self, commands: Sequence[bytes]) -> None:
        if not self.connected:
            raise TransportError("not connected to a NATS server")
        size = sum(map(len, commands))
        self.pending_bytes += size
        self._queue.post((commands, size))

    def _wait_for_capacity(self) -> None:
        deadline = time.monotonic() + self._options.send_timeout_s
        while self.connected and self.pending_bytes >= self._options.pending_bytes_max:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransportError(f"the NATS server accepted no data for {self._options.send_timeout_s:g} s")
            self._changed.wait(left)

    # -- the loop's thread -----------------------------------------------------------------------------------

    def start(self, client: DirectClient) -> None:
        """Use a new connection."""
        with self._changed:
            self._client, self.connected = client, True
            self.max_payload = client.max_payload

    def stop(self) -> int:
        """Drop the connection and the queue. Return the number of bytes that were not sent."""
        with self._changed:
            self.connected, self._client = False, None
            unsent, self.pending_bytes = self.pending_bytes, 0
            self._queue.clear()
            if self._draining is not None:
                self._draining.cancel()
                self._draining = None
                self._queue.resume()
            self._changed.notify_all()
        self._empty.set()
        return unsent

    async def emptied(self) -> None:
        """Wait until the socket has accepted everything that was queued."""
        while self.pending_bytes:
            self._empty.clear()
            await self._empty.wait()

    def _write(self, batch: list[tuple[Sequence[bytes], int]]) -> None:
        client = self._client
        if client is None:
            return
        size = sum(each for _, each in batch)
        try:
            client.write([command for commands, _ in batch for command in commands])
        except VENDOR_ERRORS:
            return  # the connection ended, and `Reconnect` will call stop()
        if client.unsent_bytes > SOCKET_BYTES_HIGH:
            self._queue.pause()  # commands stay queued until the socket accepts more
            self._draining = self._loop.create_task(self._drain(client, size))
        else:
            self._written(size)

    async def _drain(self, client: DirectClient, size: int) -> None:
        try:
            await client.drained()
        except VENDOR_ERRORS:
            return
        self._draining = None
        self._written(size)
        self._queue.resume()

    def _written(self, size: int) -> None:
        with self._changed:
            self.pending_bytes -= size
            self._changed.notify_all()
        if not self.pending_bytes:
            self._empty.set()
