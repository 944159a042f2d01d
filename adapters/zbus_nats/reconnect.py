"""Reconnection: connects to one server after another, with exponential backoff and jitter, until it is closed.

Everything here runs on the connection's thread. A client of nats-py is used for one connection only. The subscriptions
are kept in a table here, and the next client begins with them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

import nats.errors

from zbus.errors import TransportError
from zbus.observe.counters import Counters
from zbus.observe.records import (
    TRANSPORT_CONNECT_FAILED,
    TRANSPORT_CONNECTED,
    TRANSPORT_DISCONNECTED,
    TRANSPORT_INPUT_REJECTED,
    TRANSPORT_PERMISSION_DENIED,
    TRANSPORT_RECONNECTED,
    record,
)
from zbus.util.backoff import Backoff

from .client import SIDS_FROM, DirectClient, Sink
from .login import login
from .options import NatsOptions
from .outgoing import OutgoingMessages
from .vendor import describe, hopeless

RETRY_S = (0.05, 2.0)
STEADY_S = 5.0  # after a connection of at least this duration, the pauses start small again
SERVERS_MAX = 32


class Subscribed(NamedTuple):
    """A subscription: its subject, its queue group, and the sink for its messages."""

    subject: str
    queue: str
    sink: Sink


class Reconnect:
    """Opens one connection after another, and notifies its listeners."""

    def __init__(
        self, options: NatsOptions, fabric: str, counts: Counters, outgoing: OutgoingMessages, closing: asyncio.Event
    ) -> None:
        self.options, self.fabric = options, fabric
        self.client: DirectClient | None = None
        self.opened: Future[None] = Future()  # completes with the first connection
        self.closing = closing
        self.table: dict[int, Subscribed] = {}
        self.sids = itertools.count(SIDS_FROM)
        self.on_lost: list[Callable[[], None]] = []
        self.on_connected: list[Callable[[], None]] = []
        self.servers = list(options.servers)
        self.server = ""
        self.reconnects = 0
        self.last_error = ""
        self.lost_at: float | None = None
        self._counts, self._outgoing = counts, outgoing
        self._tls = options.tls_context()
        self._cause: BaseException | None = None

    async def run(self) -> None:
        """Keep connecting until `closing` is set, or until the first connection failed."""
        deadline = time.monotonic() + self.options.connect_timeout_s
        attempts, pauses = 0, Backoff(*RETRY_S)
        while not self.closing.is_set():
            attempts += 1
            started = time.monotonic()
            client = DirectClient(needs_tls=self.options.wants_tls)
            try:
                error = await self._one(client, max(0.1, deadline - started))
            finally:
                await client.dispose()
            if error is None:
                if time.monotonic() - started > STEADY_S:
                    pauses.reset()
            elif not self.opened.done() and (
                time.monotonic() >= deadline or (hopeless(error) and attempts >= len(self.options.servers))
            ):
                named = ", ".join(self.options.servers)
                self.opened.set_exception(TransportError(f"nats could not connect to {named}: {self.last_error}"))
                return
            await self._closing_within(pauses.next())

    async def on_error(self, error: Exception) -> None:
        """Handle an error that nats-py reports: the cause of a failed attempt, or a permission violation."""
        self._cause = error
        if "permissions violation" in str(error).lower():
            self._counts.report(TRANSPORT_PERMISSION_DENIED, "permission_denied", describe(error, self.options))

    async def _one(self, client: DirectClient, patience_s: float) -> BaseException | None:
        """Run one connection to its end. Return None, or the error if it could not be opened."""
        server = self.servers[0]
        self.servers.append(self.servers.pop(0))  # the next attempt always uses the next server
        timeout_s = self.options.connect_timeout_s if self.opened.done() else patience_s
        self._cause = None
        try:
            await asyncio.wait_for(login(client, server, self.options, self._tls, self.on_error), timeout_s)
            client.check_limits()
            self._connected(client, server)
        except Exception as error:  # a bug in the library must not stop the attempts
            cause = self._cause if isinstance(error, nats.errors.NoServersError) else error
            self.last_error = describe(cause, self.options)
            if self.opened.done():
                self._counts.report(TRANSPORT_CONNECT_FAILED, "connect_failed", server, error=self.last_error)
            return cause or error
        closing, gone = asyncio.ensure_future(self.closing.wait()), asyncio.ensure_future(client.gone())
        try:
            await asyncio.wait([closing, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
            gone.cancel()
            self._lost(client)
        return None

    def _connected(self, client: DirectClient, server: str) -> None:
        client.write([client.take(sid, *each) for sid, each in self.table.items()])
        self.client, self.server = client, server
        for found in client.discovered_servers:
            address = f"{found.hostname}:{found.port}"
            if address not in self.servers and len(self.servers) < SERVERS_MAX:
                self.servers.append(address)
        self._outgoing.start(client)
        if not self.opened.done():
            record(TRANSPORT_CONNECTED, transport=self.fabric, server=server)
            self.opened.set_result(None)
        else:
            self.reconnects += 1
            away_s = round(time.monotonic() - (self.lost_at or time.monotonic()), 3)
            record(TRANSPORT_RECONNECTED, logging.WARNING, transport=self.fabric, server=server, outage_s=away_s)
        self.lost_at = None
        self._notify(self.on_connected)

    def _lost(self, client: DirectClient) -> None:
        self.client = None
        unsent = self._outgoing.stop()
        if not self.closing.is_set():
            self.lost_at = time.monotonic()
            self.last_error = describe(client.why, self.options)
            fields: dict[str, Any] = {"server": self.server, "error": self.last_error, "unsent_bytes": unsent}
            record(TRANSPORT_DISCONNECTED, logging.WARNING, transport=self.fabric, **fields)
        if unsent:
            self._counts.add("unsent_at_disconnect")
        self._notify(self.on_lost)

    def _notify(self, listeners: list[Callable[[], None]]) -> None:
        for notify in listeners:
            try:
                notify()
            except Exception as error:  # a bug in a listener must not stop the attempts
                self._counts.report(TRANSPORT_INPUT_REJECTED, "receiver_failed", "connection", error=repr(error)[:200])

    async def _closing_within(self, pause_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self.closing.wait()
