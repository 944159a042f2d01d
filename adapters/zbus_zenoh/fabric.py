"""The Zenoh fabric: frames between nodes; in embedded mode, a session without a network.

The dispatcher delivers inside a node, so Zenoh needs few declarations: one publisher per key that was sent, and a
subscriber only for expressions that no other subscriber covers. Requests are Zenoh queries without consolidation,
because every other mode drops all replies but one.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import zenoh

from zbus.errors import TransportError
from zbus.keys import matches
from zbus.util.memo import Memo
from zbus.util.run_id import inherit

from .config import trust, zenoh_config

if TYPE_CHECKING:
    from zbus.config import BusConfig
    from zbus.ports.fabric import Fabric, OnReply, OnRequest, Receive, RequestHandle

PUBLISHERS_MAX = 10_000
OWNERS_MAX = 10_000
CLOSE_S = 1.0
REDUNDANT_MAX = 64
FINE_MAX = 200
_SOURCE_LINE = re.compile(r"\.?\s+at \S+\.rs:\d+\.?")  # where in Zenoh's source code an error arose


def open_fabric(config: BusConfig, url: str, session: zenoh.Session | None = None) -> ZenohFabric:
    """Open a session by the configuration and the URL, or use the session of the application.

    Raises `TransportError` if Zenoh cannot open it.
    """
    if session is not None:
        return ZenohFabric(session, networked=True, owned=False)
    settings, networked = zenoh_config(config, url)
    with _zenoh_errors("open a session", "; nothing was opened. Check the addresses in transport, listen and connect"):
        opened = zenoh.open(settings)
    fabric = ZenohFabric(opened, networked=networked, owned=True)
    fabric.endpoints, fabric.trust = config.listen, trust(settings)
    return fabric


class ZenohFabric:
    """A Zenoh session as a `Fabric`."""

    name = "zenoh"
    events_only = False
    dense = True
    trust = "none"
    endpoints: Sequence[str] = ()

    def __init__(self, session: zenoh.Session, *, networked: bool, owned: bool) -> None:
        self.session, self.networked, self._owned = session, networked, owned
        self._publishers = Memo[str, zenoh.Publisher](PUBLISHERS_MAX, self._declare, _undeclare)
        self._subscribers: dict[str, Any] = {}
        self._queryables: dict[str, Any] = {}
        self._wanted: list[str] = []
        self._exclusive: set[str] = (
            set()
        )  # subscribers that overlap with no older one, so that their events need no check
        self._older: dict[str, list[str]] = {}
        self._owners = Memo[tuple[str, str], bool](OWNERS_MAX, self._is_mine)
        self._receive: Receive = lambda frame, done: None
        self._on_request: OnRequest = lambda request: request.close()
        self._lock = threading.Lock()

    def send(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Put each frame through a declared publisher, because an undeclared put costs more with every subscriber."""
        with _zenoh_errors("send"):
            for key, frame in frames:
                publisher = self._publishers.get(key) or self._publisher(key)
                publisher.put(frame)

    def ready(self, key: str) -> bool:
        """Return whether Zenoh knows a subscriber to `key`."""
        with _zenoh_errors(f"look up subscribers of {key!r}"):
            status: Any = self._publisher(key).matching_status  # the stub says bool, but it is a MatchingStatus
            return bool(status.matching)

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        """Declare subscribers for expressions that none covers yet, and undeclare those without interest.

        A subscriber is not replaced by a wider one: undeclaring it would drop the samples that wait in it, and the two
        would deliver the events of a key on different threads. A key therefore belongs to the oldest subscriber that
        matches it.
        """
        exact = list(expressions)
        wanted = {each: zenoh.KeyExpr(each) for each in _coarse(exact)}
        with _zenoh_errors("subscribe"), self._lock:
            known = {each: zenoh.KeyExpr(each) for each in self._subscribers}
            gone = [
                each for each, parsed in known.items() if not any(parsed.intersects(want) for want in wanted.values())
            ]
            redundant = [each for each in known if each not in gone and _is_included(each, known)]
            if len(redundant) > REDUNDANT_MAX:  # each one costs time with every event
                gone += redundant
            for each in gone:
                self._subscribers.pop(each).undeclare()
                del known[each]
            new = [each for each in _widest(wanted) if not any(have.includes(wanted[each]) for have in known.values())]
            ordered = [*known, *new]
            self._receive, self._wanted = receive, exact
            self._exclusive = {
                each
                for at, each in enumerate(ordered)
                if each in wanted and not any(zenoh.KeyExpr(older).intersects(wanted[each]) for older in ordered[:at])
            }
            self._older = {each: ordered[:at] for at, each in enumerate(ordered)}
            self._owners = Memo(OWNERS_MAX, self._is_mine)
            for each in new:
                self._subscribers[each] = self.session.declare_subscriber(
                    each, self._receiver(each), allowed_origin=zenoh.Locality.REMOTE
                )

    def serve(self, keys: Sequence[str], on_request: OnRequest) -> None:
        """Declare one queryable per key, and undeclare those of other keys."""
        self._on_request = on_request
        with _zenoh_errors("serve requests"), self._lock:
            for key in set(keys) - self._queryables.keys():
                self._queryables[key] = self.session.declare_queryable(
                    key, self._query_handler(key), complete=True, allowed_origin=zenoh.Locality.REMOTE
                )
            for key in self._queryables.keys() - set(keys):
                self._queryables.pop(key).undeclare()

    def request(self, key: str, payload: bytes, on_reply: OnReply, timeout_s: float) -> RequestHandle:
        """Query the key. Zenoh chooses one of the nodes that serve it."""
        cancel = zenoh.CancellationToken()

        def reply(found: zenoh.Reply) -> None:
            if found.ok is not None:
                on_reply(found.ok.payload.to_bytes())

        with _zenoh_errors(f"request {key!r}"):
            self.session.get(
                key,
                zenoh.handlers.Callback(reply, drop=lambda: on_reply(None), indirect=False),
                payload=payload,
                target=zenoh.QueryTarget.BEST_MATCHING,
                consolidation=zenoh.ConsolidationMode.NONE,
                congestion_control=zenoh.CongestionControl.BLOCK,
                timeout=timeout_s,
                allowed_destination=zenoh.Locality.REMOTE,
                cancellation_token=cancel,
            )
        return _Get(cancel)

    def check(self, key: str) -> None:
        """Accept every valid key."""

    def diagnostics(self) -> dict[str, Any]:
        """Return the session's id, the number of linked nodes, and the number of declarations."""
        return {
            "fabric": self.name,
            "networked": self.networked,
            "zid": str(self.session.zid()),
            "linked": 0 if self.session.is_closed() else len([*_info(self.session)]),
            "zenoh_publishers": len(self._publishers),
            "zenoh_subscribers": len(self._subscribers),
        }

    def close(self) -> None:
        """Undeclare everything, and close the session unless it belongs to the application. Safe to call twice."""
        with _zenoh_errors("close"), self._lock:
            if self.session.is_closed():
                return
            if self._owned:
                # For a frozen peer, Zenoh waits until the lease ends. We wait at most `CLOSE_S`.
                ending = threading.Thread(target=inherit(self.session.close), name="zbus-zenoh-close", daemon=True)
                ending.start()
                ending.join(CLOSE_S)
                return
            for kind in (self._subscribers, self._queryables, self._publishers):
                for declared in kind.values():
                    declared.undeclare()
                kind.clear()

    def _query_handler(self, key: str) -> Callable[[zenoh.Query], None]:
        return lambda query: self._on_request(_Query(query, key))

    def _receiver(self, expression: str) -> Callable[[zenoh.Sample], None]:
        def received(sample: zenoh.Sample) -> None:
            if expression not in self._exclusive and not self._owners[expression, str(sample.key_expr)]:
                return
            self._receive(sample.payload.to_bytes(), None)

        return received

    def _is_mine(self, pair: tuple[str, str]) -> bool:
        """Return whether a subscription matches the key and no older subscriber delivers it."""
        expression, key = pair
        older = self._older.get(expression, ())
        return any(matches(each, key) for each in self._wanted) and not any(matches(each, key) for each in older)

    def _publisher(self, key: str) -> zenoh.Publisher:
        with self._lock:
            return self._publishers[key]

    def _declare(self, key: str) -> zenoh.Publisher:
        # The application may subscribe in a session of its own; in our session, only other nodes do.
        where = zenoh.Locality.REMOTE if self._owned else zenoh.Locality.ANY
        return self.session.declare_publisher(
            key, congestion_control=zenoh.CongestionControl.BLOCK, allowed_destination=where
        )


class _Query:
    """A request of another node. Dropping the query ends its replies."""

    def __init__(self, query: zenoh.Query, key: str) -> None:
        self._query: zenoh.Query | None = query
        self.key = key  # the key that is served; the query itself may have wildcards
        self.payload = query.payload.to_bytes() if query.payload is not None else b""

    def reply(self, data: bytes) -> None:
        if self._query is not None:
            with _zenoh_errors("reply"):
                self._query.reply(self.key, data)

    def close(self) -> None:
        query, self._query = self._query, None
        if query is not None:
            query.drop()  # type: ignore[no-untyped-call]


class _Get:
    def __init__(self, cancel: zenoh.CancellationToken) -> None:
        self._cancel = cancel

    def close(self) -> None:
        self._cancel.cancel()  # type: ignore[no-untyped-call]


def _undeclare(key: str, publisher: zenoh.Publisher) -> None:
    publisher.undeclare()  # type: ignore[no-untyped-call]


def _info(session: zenoh.Session) -> Iterator[Any]:
    """Yield the ids of the nodes that a session is linked to. With a rejected password it yields nothing."""
    yield from session.info.routers_zid()
    yield from session.info.peers_zid()


def _coarse(expressions: Sequence[str]) -> list[str]:
    """Return a few expressions that include all given ones: each subscriber costs time with every event, and
    `_is_mine` checks the key anyway.
    """
    if len(expressions) <= FINE_MAX:
        return list(expressions)
    starts = {each.partition("/")[0] for each in expressions if "@" not in each}
    wide = ["**"] if len(starts) > FINE_MAX or any("*" in start for start in starts) else [f"{s}/**" for s in starts]
    return [*wide, *(each for each in expressions if "@" in each)]  # no wildcard matches these


def _widest(known: Mapping[str, zenoh.KeyExpr]) -> Iterator[str]:
    """Return the expressions that no other one includes."""
    return (each for each in known if not _is_included(each, known))


def _is_included(expression: str, known: Mapping[str, zenoh.KeyExpr]) -> bool:
    return any(other.includes(known[expression]) for each, other in known.items() if each != expression)


@contextmanager
def _zenoh_errors(doing: str, advice: str = "") -> Iterator[None]:
    """Raise Zenoh's errors as `TransportError`."""
    try:
        yield
    except zenoh.ZError as error:
        reason = _SOURCE_LINE.sub("", str(error)).rstrip(".")
        raise TransportError(f"zenoh could not {doing}: {reason}{advice}") from error


if TYPE_CHECKING:
    _port: type[Fabric] = ZenohFabric
