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

from zbus.errors import FabricError

from .client import DirectClient
from .options import NatsOptions
from .vendor import VENDOR_ERRORS

WRITE_BYTES = 2 * 1024 * 1024
SOCKET_BYTES_HIGH = 1024 * 1024  # unsent in the socket's own buffer before more is held back


class Outgoing:
    """A bounded queue of commands that the loop's thread empties."""

    def __init__(self, loop: asyncio.AbstractEventLoop, options: NatsOptions) -> None:
        self.connected = False
        self.max_payload = 0
        self.pending_bytes = 0
        self._loop, self._options = loop, options
        self._client: DirectClient | None = None
        self._queue: list[bytes] = []
        self._queued_bytes = 0
        self._armed = False
        self._draining: asyncio.Task[None] | None = None
        self._changed = threading.Condition()
        self._empty = asyncio.Event()

    def send(self, commands: Sequence[bytes]) -> None:
        """Queue commands, after waiting for room. Any thread but the loop's."""
        with self._changed:
            if self.pending_bytes >= self._options.pending_bytes_max:
                self._wait_for_room()
            wake = self._put(commands)
        if wake:
            self._wake()

    def post(self, commands: Sequence[bytes]) -> None:
        """Queue commands without waiting, for the loop's own thread."""
        with self._changed:
            wake = self._put(commands)
        if wake:
            self._wake()

    def _put(self, commands: Sequence[bytes]) -> bool:
        if not self.connected:
            raise FabricError("there is no connection to a NATS server now")
        size = sum(map(len, commands))
        self._queue.extend(commands)
        self._queued_bytes += size
        self.pending_bytes += size
        wake, self._armed = not self._armed, True
        return wake

    def _wait_for_room(self) -> None:
        deadline = time.monotonic() + self._options.send_timeout_s
        while self.connected and self.pending_bytes >= self._options.pending_bytes_max:
            left = deadline - time.monotonic()
            if left <= 0:
                raise FabricError(f"the NATS server took nothing for {self._options.send_timeout_s:g} s")
            self._changed.wait(left)

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._pump)
        except RuntimeError:
            raise FabricError("the connection to NATS is closed") from None

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
            self._queue, self._queued_bytes, self._armed = [], 0, False
            if self._draining is not None:
                self._draining.cancel()
                self._draining = None
            self._changed.notify_all()
        self._empty.set()
        return unsent

    async def emptied(self) -> None:
        """Return when the socket has everything that was queued before."""
        while self.pending_bytes:
            self._empty.clear()
            await self._empty.wait()

    def _pump(self) -> None:
        client = self._client
        if client is None or self._draining is not None:
            return
        with self._changed:
            commands, size = self._take()
            more = bool(self._queue)
        try:
            client.write(commands)
        except VENDOR_ERRORS:
            return  # the connection ended: whoever watches it calls stop()
        if client.unsent_bytes > SOCKET_BYTES_HIGH:
            with self._changed:
                self._armed = True  # senders queue without waking, up to their bound, until the socket is free
            self._draining = self._loop.create_task(self._drain(client, size))
            return
        self._written(size)
        if more:
            self._loop.call_soon(self._pump)

    def _take(self) -> tuple[list[bytes], int]:
        """Everything, or as much as is written at a time: the loop has other work than one huge burst."""
        commands, size = self._queue, self._queued_bytes
        if size <= WRITE_BYTES:
            self._queue, self._queued_bytes, self._armed = [], 0, False
            return commands, size
        taken = at = 0
        while at < len(commands) and taken < WRITE_BYTES:
            taken += len(commands[at])
            at += 1
        self._queue, self._queued_bytes = commands[at:], size - taken
        self._armed = bool(self._queue)
        return commands[:at], taken

    async def _drain(self, client: DirectClient, size: int) -> None:
        try:
            await client.drained()
        except VENDOR_ERRORS:
            return
        self._draining = None
        self._written(size)
        self._pump()

    def _written(self, size: int) -> None:
        with self._changed:
            self.pending_bytes -= size
            self._changed.notify_all()
        if not self.pending_bytes:
            self._empty.set()
