"""A connection to NATS on its own thread, usable from any thread.

The thread `zbus-nats` runs an event loop with one client at a time. While disconnected, sending raises instead of
filling a buffer, because the caller can send again from its log. Subscriptions survive reconnections.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import nats.errors

from zbus.errors import TransportError
from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_DISCONNECTED, TRANSPORT_INPUT_REJECTED
from zbus.util.loop_thread import LoopEnded, LoopThread

from .client import DirectClient
from .options import NatsOptions
from .outgoing import OutgoingMessages
from .reconnect import Reconnect, Subscribed
from .subscription_handover import HandoverPhase
from .vendor import VENDOR_ERRORS, describe, nats_errors

__all__ = ["HandoverPhase", "NatsConnection", "Subscribed"]

FLUSH_S, CLOSE_FLUSH_S = 5, 1
CLOSE_S = 5.0
GRACE_S = 0.05

T = TypeVar("T")


class NatsConnection:
    """Any thread may use it after `open`. `on_lost` and `on_connected` are called on its own thread."""

    def __init__(self, options: NatsOptions, fabric: str) -> None:
        self.options, self.fabric = options, fabric
        self.counts = Counters(fabric)
        self._thread = LoopThread("zbus-nats", self._live)
        self.loop = self._thread.loop
        self._outgoing = OutgoingMessages(self.loop, options)
        self._reconnect = Reconnect(options, fabric, self.counts, self._outgoing, self._thread.stopping)
        self.on_lost, self.on_connected = self._reconnect.on_lost, self._reconnect.on_connected
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether a server is connected."""
        return self._outgoing.connected

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def max_payload(self) -> int:
        """The largest message that the server accepts, or 0 before the first connection."""
        return self._outgoing.max_payload

    @property
    def client(self) -> DirectClient | None:
        """The current client, or None. Only for the connection's own thread."""
        return self._reconnect.client

    def open(self) -> NatsConnection:
        """Connect. Raises `TransportError` if that fails within `connect_timeout_s`."""
        try:
            self.options.check_files()
            self._thread.start()
            self._reconnect.opened.result(self.options.connect_timeout_s + CLOSE_S)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise TransportError("nats could not connect: the server did not reply in time") from None
            raise
        return self

    def send(self, commands: Sequence[bytes]) -> None:
        """Send complete commands. Blocks while the network is slow. Raises `TransportError` if not connected."""
        if self._thread.is_current:
            self._outgoing.post(commands)
        else:
            self._outgoing.send(commands)

    def change(
        self, add: Sequence[Subscribed], remove: Sequence[int], phase: Callable[[HandoverPhase], None] | None = None
    ) -> list[int]:
        """Subscribe and unsubscribe, and wait until the server has done it. Return the new ids.

        New subscriptions begin before old ones end, so that no message is lost in between. `phase` is called on the
        connection's thread, so that the caller knows which of two copies to use.
        """
        return self.run(self._change(add, remove, phase or (lambda now: None)), 4 * FLUSH_S + CLOSE_S)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Return the result of a coroutine on the connection's thread. Raises `TransportError` after `timeout_s`."""
        if self._closed:
            work.close()
            raise TransportError(f"{self.fabric} is closed")
        try:
            return self._thread.run(work, timeout_s)
        except LoopEnded:
            raise TransportError(f"{self.fabric} is closed") from None
        except TimeoutError:
            raise TransportError(f"{self.fabric}: the server did not reply within {timeout_s:g} s") from None

    def soon(self, call: Callable[[], object]) -> None:
        """Call a function on the connection's thread soon. After `close`, nothing happens."""
        self._thread.post(call)

    def later(self, delay_s: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        """Call a function later. Only for the connection's own thread."""
        return self.loop.call_later(delay_s, call)

    def diagnostics(self) -> dict[str, Any]:
        """Return the state of the connection, without secrets."""
        reconnect, lost_at = self._reconnect, self._reconnect.lost_at
        return {
            "connected": self.connected,
            "server": reconnect.server,
            "servers": list(reconnect.servers),
            "tls": self.options.wants_tls,
            "reconnects": reconnect.reconnects,
            "disconnected_s": 0.0 if lost_at is None else round(time.monotonic() - lost_at, 3),
            "last_error": reconnect.last_error,
            "max_payload": self.max_payload,
            "pending_bytes": self._outgoing.pending_bytes,
            "subscriptions": len(reconnect.table),
            "counts": self.counts.snapshot(),
        }

    def close(self) -> None:
        """Send the queued commands for at most a second, and stop the thread."""
        if self.connected and not self._closed:
            try:
                self.run(self._finish(), CLOSE_FLUSH_S + 0.5)
            except TransportError:
                pass  # the server does not respond; unsent events stay in the sender's log
        self._closed = True
        self._thread.stop(CLOSE_S)

    # -- the connection's thread -----------------------------------------------------------------------------

    async def _live(self) -> None:
        try:
            await self._reconnect.run()
        except Exception as error:  # a bug: callers that wait must not wait forever
            self._outgoing.stop()
            if not self._reconnect.opened.done():
                self._reconnect.opened.set_exception(error)
            else:
                self.counts.report(TRANSPORT_DISCONNECTED, "connection_failed", self.fabric, error=repr(error)[:200])

    async def _change(
        self, add: Sequence[Subscribed], remove: Sequence[int], phase: Callable[[HandoverPhase], None]
    ) -> list[int]:
        client, table = self.client, self._reconnect.table
        added = {next(self._reconnect.sids): each for each in add}
        phase(HandoverPhase.BOTH_BEGIN)
        table.update(added)
        try:
            if client is not None and added:
                client.write([client.take(sid, *each) for sid, each in added.items()])
                await unless_gone(client, client.flush(FLUSH_S))
            if client is not None and added and remove:
                # The server may still be delivering messages that it received before, and does not report when it is
                # done. They would be lost if the old subscription ended too soon.
                await asyncio.sleep(GRACE_S)
                phase(HandoverPhase.BOTH)
                await unless_gone(client, client.flush(FLUSH_S))
                phase(HandoverPhase.BOTH_STILL)
                await unless_gone(client, client.flush(FLUSH_S))
            phase(HandoverPhase.BOTH_END)
            if client is not None and remove:
                client.write([client.drop(sid) for sid in remove])
                await unless_gone(client, client.flush(FLUSH_S))
        except VENDOR_ERRORS as error:
            # The next connection begins with all subscriptions in the table.
            self.counts.report(
                TRANSPORT_INPUT_REJECTED,
                "subscribe_unconfirmed",
                self._reconnect.server,
                error=describe(error, self.options),
            )
        finally:
            self._remove(remove)
            phase(HandoverPhase.DONE)
        return list(added)

    def _remove(self, sids: Sequence[int]) -> None:
        client = self.client
        for sid in sids:
            self._reconnect.table.pop(sid, None)
            if client is not None:
                client.forget(sid)
        if client is not None and client.is_connected:  # may be another client than before
            client.write([client.drop(sid) for sid in sids])

    async def _finish(self) -> None:
        with nats_errors("flush", self.options):
            async with asyncio.timeout(CLOSE_FLUSH_S):
                await self._outgoing.emptied()
                if self.client is not None:
                    await unless_gone(self.client, self.client.flush(CLOSE_FLUSH_S))


async def unless_gone(client: DirectClient, work: Coroutine[Any, Any, T]) -> T:
    """Wait for a reply of the server. Raises `ConnectionClosedError` if the connection ends before."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(client.gone())
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise nats.errors.ConnectionClosedError
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
