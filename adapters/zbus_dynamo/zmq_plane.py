"""Dynamo's event plane over ZMQ as a `Fabric`: direct from process to process, or through brokers.

The core hands over frames of zbus and gets such frames; on the sockets there is nothing but Dynamo's wire.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from zbus.errors import EventInvalid, FabricError, FabricLacks, KeyInvalid
from zbus.keys import KeySet
from zbus.observe.counters import Counts
from zbus.observe.records import EVENT_DROPPED

from .broker import Brokered
from .direct import Direct
from .records import file_name
from .scopes import Place, check_expressions, place_of_key
from .settings import ZmqSettings, zmq_settings
from .sockets import zmq_errors
from .translate import Outgoing, outgoing
from .zmq_loop import ZmqLoop

if TYPE_CHECKING:
    from zbus.config import BusConfig
    from zbus.ports.fabric import Asking, Fabric, Heard, Question, Receive

NAME = "zmq with the dynamo wire"
LINK_S = 1.0  # how long listen() waits for the connections it made
BROKER_S = 2.0  # how long send() waits for a broker
FILE_NAME_MAX = 255
_LONGEST_ID = "f" * 16


def open_fabric(config: BusConfig, url: str, session: Any = None) -> DynamoZmq:
    """Open what the URL asks for. Nothing listens before the first event is sent."""
    return DynamoZmq(zmq_settings(url, config.options_for("zmq")), config.payload_bytes_max)


class DynamoZmq:
    """ZMQ with Dynamo's wire, as a `Fabric`."""

    name = "zmq+dynamo"
    networked = True
    events_only = True
    dense = True
    trust = "none"  # those that it speaks to know nothing of nodes
    endpoints: Sequence[str] = ()

    def __init__(self, settings: ZmqSettings, payload_bytes_max: int) -> None:
        self._settings = settings
        self._counts = Counts(self.name)
        self._loop = ZmqLoop()
        self._side: Direct | Brokered
        kind = Brokered if settings.xsub else Direct
        try:
            with zmq_errors("open its sockets"):
                self._side = kind(self._loop, self._counts, settings, payload_bytes_max)
        except FabricError:
            self._loop.context.destroy(0)
            self._loop.close()
            raise
        self._loop.start(self._side)

    def send(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Hand over events. What this wire cannot carry is left out, counted and reported."""
        if not self._side.connected:
            self._await_broker()
        self._loop.hand_over([event for event in outgoing(frames, self._counts) if self._fits(event)])

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        """Receive what these match. Those that match nothing on this wire are named, the others are in force."""
        wanted = KeySet(expressions) if expressions else None
        self._loop.wait_for(lambda: self._side.listen(wanted, receive))
        deadline = time.monotonic() + LINK_S
        while wanted is not None and not self._side.linked and time.monotonic() < deadline:
            time.sleep(0.005)
        check_expressions(NAME, expressions)

    def ready(self, key: str) -> bool:
        """Whether somebody subscribed to `key`, as far as this end can tell."""
        try:
            return self._side.wanted(place_of_key(key))
        except EventInvalid:
            return True  # waiting would not help: it is refused when it is sent

    def answer(self, keys: Sequence[str], asked: Callable[[Question], None]) -> None:
        """Not on this wire."""
        if keys:
            raise FabricLacks(NAME, "answering questions on the dynamo wire")

    def ask(self, key: str, payload: bytes, heard: Heard, timeout_s: float) -> Asking:
        """Not on this wire."""
        raise FabricLacks(NAME, "asking questions on the dynamo wire")

    def check(self, key: str) -> None:
        """Scope and topic: two to four segments."""
        place_of_key(key)

    def diagnostics(self) -> dict[str, Any]:
        """What there is, and what went wrong."""
        found = {"fabric": self.name, "networked": True, "queued_events": self._loop.queued}
        return found | self._side.diagnostics() | {"counts": self._counts.snapshot()}

    def close(self) -> None:
        """Send what is left, close, and take our records back, in bounded time. Safe to call twice."""
        self._loop.close()

    def _await_broker(self) -> None:
        deadline = time.monotonic() + BROKER_S
        while not self._side.connected:
            if time.monotonic() > deadline:
                raise FabricError(f"no broker answers at {', '.join(self._settings.xsub)}; nothing was sent")
            time.sleep(0.01)

    def _fits(self, event: Outgoing) -> bool:
        if self._settings.xsub or _record_fits(event.place):
            return True
        reason = str(KeyInvalid(event.place.key, "its discovery record would have a file name over 255 bytes"))
        self._counts.tell(EVENT_DROPPED, "refused_key", event.place.key, detail=reason[:500])
        return False


@lru_cache(maxsize=16_384)
def _record_fits(place: Place) -> bool:
    return len(file_name(f"{place.path}/{_LONGEST_ID}")) <= FILE_NAME_MAX


if TYPE_CHECKING:
    _port: type[Fabric] = DynamoZmq
