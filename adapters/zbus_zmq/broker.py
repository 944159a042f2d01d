"""A broker: events arrive on an XSUB socket and leave on an XPUB socket, to the subscribers of their topics.

Publishers and subscribers then need only the broker's addresses. Many messages are forwarded per turn. A stalled
subscriber blocks the others for a moment and then misses messages, which are counted; meanwhile the broker reads
nothing, so the publishers notice. Several brokers can run side by side; they do not know each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zmq

from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_INPUT_REJECTED

from .address.options import ZmqOptions
from .address.topics import MARK, node_of
from .io.curve import attach_authenticator, open_keys
from .io.io_thread import IoThread
from .io.pacing import LAST, MORE, PacedSender, quick_send
from .io.receive import BURST_MESSAGES, NOBLOCK, Recv, received
from .io.sockets import bind, make_socket
from .io.source import source_of

RETRY_S = 0.002
SUBSCRIPTIONS_MAX = 1_000_000


@dataclass
class BrokerStats:
    """Messages and bytes that were forwarded."""

    messages: int = 0
    size: int = 0


class Broker:
    """One broker with a thread of its own. Open when it is made; `close` ends it, in bounded time."""

    def __init__(self, xsub: str, xpub: str, options: ZmqOptions) -> None:
        self._counts = Counters("zmq broker")
        self._keys = open_keys(options, self._counts)
        self._options = options
        self._recent, self._total = BrokerStats(), BrokerStats()  # recent: since the last report
        self._since = time.monotonic()
        self._subscriptions: set[bytes] = set()
        self._held: list[bytes] | None = None
        self._io = IoThread("zbus-zmq-broker", self._counts)
        try:
            self._io.call("open the broker's sockets", lambda: self._open(xsub, xpub))
        except BaseException:
            self.close()
            raise

    def report(self) -> dict[str, Any]:
        """Subscriptions now, rates since the last report, and totals."""
        return self._io.call("report", self._report)

    def close(self) -> None:
        """Close the sockets. Safe to call twice."""
        self._io.close(self._options.linger_s + 2.0)

    def _open(self, xsub: str, xpub: str) -> None:
        context = self._io.context
        if self._keys is not None:
            attach_authenticator(context, self._keys, self._counts, self._io.on_readable)
        self._in = make_socket(context, zmq.XSUB, self._options, self._keys, server=True)
        self._out = make_socket(context, zmq.XPUB, self._options, self._keys, server=True)
        self._pacer = PacedSender(self._io, self._out, self._options.stall_s, self._counts, b"", self._marks)
        self.xsub = bind(self._in, xsub, self._options)
        self.xpub = bind(self._out, xpub, self._options)
        self._recv: Recv = self._in.recv  # type: ignore[assignment]  # copy=False
        self._send = quick_send(self._out)
        self._io.on_readable(self._in, self._forward)
        self._io.on_readable(self._out, self._subscribe)

    def _report(self) -> dict[str, Any]:
        now = time.monotonic()
        recent, self._recent = self._recent, BrokerStats()
        elapsed, self._since = max(now - self._since, 1e-9), now
        self._total.messages += recent.messages
        self._total.size += recent.size
        marks = sum(each[:1] == bytes([MARK]) for each in self._subscriptions)
        return {
            "subscriptions": len(self._subscriptions) - marks,
            "nodes": marks,  # each node subscribes to its own mark
            "messages_per_s": round(recent.messages / elapsed, 1),
            "bytes_per_s": round(recent.size / elapsed, 1),
            "messages": self._total.messages,
            "bytes": self._total.size,
            "counts": self._counts.snapshot(),
        }

    def _forward(self) -> None:
        recv, send, stats = self._recv, self._send, self._recent
        try:
            for _ in range(BURST_MESSAGES):
                last = recv(NOBLOCK, False)
                parts = [last.bytes]
                while last.more:
                    last = recv(NOBLOCK, False)
                    parts.append(last.bytes)
                try:
                    for part in parts[:-1]:
                        send(part, MORE)
                    send(parts[-1], LAST)
                except zmq.Again:
                    if not self._pacer.refused(parts):
                        self._hold(parts)
                        return
                stats.messages += 1
                stats.size += sum(map(len, parts))
                if self._pacer.stuck:
                    self._pacer.moved(1)
        except zmq.Again:
            return

    def _hold(self, parts: list[bytes]) -> None:
        """Read nothing more until this message has gone."""
        self._held = parts
        self._io.forget(self._in)
        self._io.later(RETRY_S, self._retry)

    def _retry(self) -> None:
        parts = self._held
        if parts is None:
            return
        try:
            for part in parts[:-1]:
                self._out.send(part, MORE)
            self._out.send(parts[-1], LAST)
        except zmq.Again:
            if not self._pacer.refused(parts):
                self._io.later(RETRY_S, self._retry)
                return
        self._held = None
        self._pacer.moved(1)
        self._recent.messages += 1
        self._recent.size += sum(map(len, parts))
        self._io.on_readable(self._in, self._forward)

    def _subscribe(self) -> None:
        for parts in received(self._out):
            message = parts[0].bytes
            known = message[1:] in self._subscriptions
            full = len(self._subscriptions) >= SUBSCRIPTIONS_MAX
            if len(parts) != 1 or message[:1] not in (b"\0", b"\1") or (full and not known):
                self._counts.report(
                    TRANSPORT_INPUT_REJECTED, "subscription_invalid", source_of(parts[0], "a subscriber")
                )
                continue
            (self._subscriptions.add if message[0] == 1 else self._subscriptions.discard)(message[1:])
            if self._pacer.stuck and (found := node_of(message[1:])) is not None:
                self._pacer.released(found[0])
            self._in.send(message, NOBLOCK)

    def _marks(self) -> Iterator[tuple[str, bytes]]:
        for subscription in self._subscriptions:
            found = node_of(subscription)
            if found is not None:
                yield found[0], subscription
