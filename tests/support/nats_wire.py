"""A NATS connection without a server, for tests of what runs on one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from zbus.errors import TransportError
from zbus.observe.counters import Counters
from zbus_nats.connection import Subscribed
from zbus_nats.options import NatsOptions


class Wire:
    """A connection that goes nowhere: what is subscribed to can be called, what is sent is kept, or refused."""

    def __init__(self) -> None:
        self.counts, self.max_payload = Counters("test"), 1000
        self.options = NatsOptions(send_timeout_s=5)
        self.on_lost: list[Callable[[], None]] = []
        self.sinks: dict[str, Any] = {}
        self.sent: list[bytes] = []
        self.away = False
        self.on_send: Callable[[], None] = lambda: None

    def change(self, add: Sequence[Subscribed], remove: Sequence[int], phase: object = None) -> list[int]:
        self.sinks.update({each.subject: each.sink for each in add})
        return [len(self.sinks)] * len(add)

    def send(self, commands: Sequence[bytes]) -> None:
        if self.away:
            raise TransportError("there is no connection")
        self.sent.extend(commands)
        self.on_send()

    def soon(self, call: Callable[[], object]) -> None:
        call()

    def later(self, delay_s: float, call: Callable[[], object]) -> Any:
        return SimpleNamespace(cancel=lambda: None)
