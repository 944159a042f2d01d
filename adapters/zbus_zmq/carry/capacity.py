"""Backpressure for senders: a bound on what waits for the I/O thread, and whether a receiver is connected."""

from __future__ import annotations

import threading
import time

from zbus.errors import TransportError

MESSAGES_MAX = 8192
BYTES_MAX = 64 << 20
FULL_S = 10.0  # after which a queue that stayed full is an error
LINK_S = 1.0  # how long a sender waits for a broker, or for the first subscriber


class Capacity:
    """The messages and bytes that wait to be sent, bounded. Every method may be called on any thread."""

    def __init__(self, unlinked: str = "no broker is connected") -> None:
        """`unlinked`: what the error says while there is nothing to send to (see `set_linked`)."""
        self.messages = self.bytes = 0
        self.linked = self.settled = True
        self._unlinked, self._closed = unlinked, False
        self._changed = threading.Condition()

    def reserve(self, messages: int, size: int) -> None:
        """Wait for capacity and take it. Raises `TransportError` if there is none in time; nothing is taken then."""
        deadline, link_deadline = time.monotonic() + FULL_S, time.monotonic() + LINK_S
        with self._changed:
            while True:
                now = time.monotonic()
                if self._closed:
                    raise TransportError("the fabric is closed; nothing was sent")
                if not self.linked:
                    if now >= link_deadline:
                        raise TransportError(f"{self._unlinked}; nothing was sent")
                    self._changed.wait(link_deadline - now)
                    continue
                fits = self.messages + messages <= MESSAGES_MAX and self.bytes + size <= BYTES_MAX
                if (fits or not self.messages) and self.settled:
                    break
                if now >= deadline:
                    raise TransportError(f"the queue has been full for {FULL_S:g} s; nothing was sent")
                self._changed.wait(deadline - now)
            self.messages += messages
            self.bytes += size

    def release(self, messages: int, size: int) -> None:
        """Give back what has been sent, or will never be sent."""
        with self._changed:
            self.messages -= messages
            self.bytes -= size
            self._changed.notify_all()

    def set_linked(self, linked: bool) -> None:
        """Say whether there is something to send to, such as a broker. If not, senders wait a moment, then fail."""
        with self._changed:
            self.linked = linked
            self._changed.notify_all()

    def set_settled(self, settled: bool) -> None:
        """Say whether the subscribers that are known have connected. Until then, senders wait."""
        with self._changed:
            self.settled = settled
            self._changed.notify_all()

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until everything has been sent; return whether it was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.messages, timeout_s)

    def close(self) -> None:
        """Let every sender fail, including those that wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
