"""Zenoh as the fabric: events between nodes, and in embedded mode a session with no network at all.

Inside a node our own router delivers, so Zenoh needs few declarations: one publisher per key that
was sent, and one subscriber per expression that no other one includes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import zenoh

from .errors import ConfigInvalid, FabricError

if TYPE_CHECKING:
    from .config import BusConfig
    from .ports import Fabric

PUBLISHERS_MAX = 10_000


def open_fabric(config: BusConfig, session: zenoh.Session | None = None) -> ZenohFabric:
    """Open a session as the configuration says, or use the one that the application has."""
    if session is not None:
        return ZenohFabric(session, networked=True, owned=False)
    with _zenoh_errors("open a session"):
        opened = zenoh.open(_zenoh_config(config))
    return ZenohFabric(opened, networked=config.mode != "embedded", owned=True)


class ZenohFabric:
    """A Zenoh session as a `Fabric`."""

    name = "zenoh"

    def __init__(self, session: zenoh.Session, *, networked: bool, owned: bool) -> None:
        self.session, self.networked, self._owned = session, networked, owned
        self._publishers: dict[str, zenoh.Publisher] = {}
        self._subscribers: dict[str, Any] = {}
        self._lock = threading.Lock()

    def send(self, key: str, envelope: bytes) -> None:
        """Put one envelope through a declared publisher: an undeclared put pays for every subscriber."""
        with _zenoh_errors(f"send to {key!r}"):
            self._publisher(key).put(envelope)

    def ready(self, key: str) -> bool:
        """Whether Zenoh knows of a subscriber to `key`."""
        with _zenoh_errors(f"ask who wants {key!r}"):
            status: Any = self._publisher(key).matching_status  # the stub says bool; it is a MatchingStatus
            return bool(status.matching)

    def listen(self, expressions: Sequence[str], receive: Callable[[bytes], None]) -> None:
        """Declare a subscriber per expression that no other one includes; undeclare the rest."""
        wanted = set(_widest(expressions))
        with _zenoh_errors("subscribe"), self._lock:
            for expression in wanted - self._subscribers.keys():
                self._subscribers[expression] = self.session.declare_subscriber(
                    expression,
                    lambda sample: receive(sample.payload.to_bytes()),
                    allowed_origin=zenoh.Locality.REMOTE,
                )
            for expression in self._subscribers.keys() - wanted:
                self._subscribers.pop(expression).undeclare()

    def diagnostics(self) -> dict[str, Any]:
        """The session's identity and how much is declared in it."""
        return {
            "fabric": self.name,
            "networked": self.networked,
            "zid": str(self.session.zid()),
            "zenoh_publishers": len(self._publishers),
            "zenoh_subscribers": len(self._subscribers),
        }

    def close(self) -> None:
        """Undeclare everything, and close the session unless the application lent it. Safe to call twice."""
        with _zenoh_errors("close"), self._lock:
            if self.session.is_closed():
                return
            for declared in [*self._subscribers.values(), *self._publishers.values()]:
                declared.undeclare()
            self._subscribers.clear()
            self._publishers.clear()
            if self._owned:
                self.session.close()  # type: ignore[no-untyped-call]

    def _publisher(self, key: str) -> zenoh.Publisher:
        publisher = self._publishers.get(key)
        if publisher is None:
            if len(self._publishers) >= PUBLISHERS_MAX:
                self._publishers.pop(next(iter(self._publishers))).undeclare()  # type: ignore[no-untyped-call]
            publisher = self._publishers[key] = self.session.declare_publisher(
                key, congestion_control=zenoh.CongestionControl.BLOCK
            )
        return publisher


def _zenoh_config(config: BusConfig) -> zenoh.Config:
    """Nothing of Zenoh's defaults that opens a socket: no multicast, no gossip, no endpoint but those named."""
    built = zenoh.Config()
    settings = {
        "mode": "peer" if config.mode == "embedded" else config.mode,
        "listen/endpoints": list(config.listen),
        "connect/endpoints": list(config.connect),
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": False,
        "scouting/delay": 0,
        "transport/shared_memory/enabled": False,
    }
    for path, value in settings.items():
        try:
            built.insert_json5(path, json.dumps(value))
        except zenoh.ZError as error:
            raise ConfigInvalid(path.partition("/")[0], str(error)) from error
    return built


def _widest(expressions: Sequence[str]) -> Iterator[str]:
    """Those that no other one includes: an event then arrives once, not once per subscription."""
    known = {each: zenoh.KeyExpr(each) for each in expressions}
    for expression, parsed in known.items():
        if not any(other.includes(parsed) for each, other in known.items() if each != expression):
            yield expression


@contextmanager
def _zenoh_errors(doing: str) -> Iterator[None]:
    """Zenoh's errors become ours, here and nowhere else."""
    try:
        yield
    except zenoh.ZError as error:
        raise FabricError(f"zenoh could not {doing}: {error}") from error


if TYPE_CHECKING:
    _port: type[Fabric] = ZenohFabric
