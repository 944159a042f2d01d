"""The way out: commands from any thread to the socket, one hop to the loop for a whole burst.

What waits is bounded. `send` blocks while it is full and raises when the connection is gone, so a slow
network slows the sender and a missing one is known at once; nothing is kept for later, since what
was not sent is in the sender's log.
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
SOCKET_BYTES_HIGH = 1024 * 1024  # unsent in the socket's own buffer before more is held back


class OutgoingMessages:
    """A bounded queue of commands that the loop's thread empties."""

    def __init__(self, loop: asyncio.AbstractEventLoop, options: NatsOptions) -> None:
        self.connected = False
        self.max_payload = 0
        self.pending_bytes = 0
        self._loop, self._options = loop, options
        self._client: DirectClient | None = None
        # With their bytes. Not everything is written at once: the loop has other work than one huge burst.
        self._queue = Mailbox[tuple[Sequence[bytes], int]](loop, self._write, size=itemgetter(1), turn_size=WRITE_BYTES)
        self._draining: asyncio.Task[None] | None = None
        self._changed = threading.Condition()
        self._empty = asyncio.Event()

    def send(self, commands: Sequence[bytes]) -> None:
        """Queue commands, after waiting for room. Any thread but the loop's."""
        with self._changed:
            if self.pending_bytes >= self._options.pending_bytes_max:
                self._wait_for_capacity()
            self._put(commands)

    def post(self, commands: Sequence[bytes]) -> None:
        """Queue commands without waiting, for the loop's own thread."""
        with self._changed:
            self._put(commands)

    def _put(self, commands: Sequence[bytes]) -> None:
        if not self.connected:
            raise TransportError("there is no connection to a NATS server now")
        size = sum(map(len, commands))
        self.pending_bytes += size
        self._queue.post((commands, size))

    def _wait_for_capacity(self) -> None:
        deadline = time.monotonic() + self._options.send_timeout_s
        while self.connected and self.pending_bytes >= self._options.pending_bytes_max:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransportError(f"the NATS server took nothing for {self._options.send_timeout_s:g} s")
            self._changed.wait(left)

    # -- the loop's thread -----------------------------------------------------------------------------------

    def start(self, client: DirectClient) -> None:
        """A connection is there."""
        with self._changed:
            self._client, self.connected = client, True
            self.max_payload = client.max_payload

    def stop(self) -> int:
        """The connection is gone; return how many bytes were never given to it, or not taken."""
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
        """Return when the socket has everything that was queued before."""
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
            return  # the connection ended: whoever watches it calls stop()
        if client.unsent_bytes > SOCKET_BYTES_HIGH:
            self._queue.pause()  # senders queue, up to their bound, until the socket is free
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
