"""Discovery across hosts: Zenoh liveliness tokens. Zenoh notices when a node dies and withdraws its tokens.

The announcement of a node is in the keys of its tokens: one token for the node and one for each key that it serves,
both encoded, so nothing has to be fetched afterwards. The session is the application's, or one of our own from the
options: without multicast, and with no endpoint but those named. Opening is tried again forever if it fails.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

import zenoh

from zbus.errors import TransportError
from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_DISCOVERY_FAILED
from zbus.util.backoff import Backoff
from zbus_zmq.address.options import ZmqOptions

from .discovery import Changed, Discovery, NodeRecord, Nodes
from .tokens import assemble, session_config, tails_of

ROOT = "zbus-zmq"
LOOK_S = 1.0
PAUSE_S = (0.1, 5.0)
SETTLE_S = 0.02  # tokens arrive one by one: report several together
NODES_MAX = 100_000


class LivelinessDiscovery:
    """Tokens in a Zenoh session. One thread opens the session and reports changes."""

    def __init__(self, options: ZmqOptions, counts: Counters, session: zenoh.Session | None) -> None:
        self._options, self._counts = options, counts
        self._root = f"{ROOT}/{options.realm}"
        self._session, self._owned = session, session is None
        self._config = None if session is not None else session_config(options)
        self._lock = threading.RLock()
        self._wake, self._pause = threading.Event(), threading.Event()
        self._subscriber: Any = None
        self._node: NodeRecord | None = None
        self._tokens: dict[str, Any] = {}
        self._seen: defaultdict[str, set[str]] = defaultdict(set)  # node id -> the tails of its tokens
        self._samples: deque[tuple[str, bool]] = deque()
        self._reported: Nodes | None = None
        self._changed: Changed | None = None
        self._problem = ""
        self._ended = False
        self._open()
        self._thread = threading.Thread(target=self._run, name="zbus-zmq-liveliness", daemon=True)
        self._thread.start()

    def announce(self, node: NodeRecord) -> None:
        """Declare the tokens that are new, then undeclare those that no longer hold."""
        with self._lock:
            self._node = node
            try:
                self._declare()
            except zenoh.ZError as error:
                self._fail(error)  # the thread tries again

    def watch(self, changed: Changed) -> None:
        """Call `changed` with the nodes now, and after every change."""
        with self._lock:
            self._changed, self._reported = changed, None
        self._wake.set()

    def look(self) -> Nodes:
        """Request the current tokens from Zenoh."""
        with self._lock:
            session = self._session
        if session is None:
            return {}
        done = threading.Event()

        def replied(reply: zenoh.Reply) -> None:
            if reply.ok is not None:
                self._samples.append((str(reply.ok.key_expr), True))

        try:
            # Not a channel: it buffers only 256 replies, and our own tokens arrive on this thread.
            handler = zenoh.handlers.Callback(replied, done.set, indirect=False)
            session.liveliness().get(f"{self._root}/**", handler, timeout=LOOK_S)
        except zenoh.ZError as error:
            raise TransportError(f"zenoh could not look for ZMQ nodes: {error}") from error
        done.wait(2 * LOOK_S)
        return self._nodes()

    def diagnostics(self) -> dict[str, Any]:
        """Return the number of known nodes and the last problem."""
        with self._lock:
            return {
                "discovery": "zenoh",
                "zid": str(self._session.zid()) if self._session is not None else "",
                "nodes": len(self._reported or ()),
                "problem": self._problem,
            }

    def close(self) -> None:
        """Withdraw the tokens, and close the session if it is ours."""
        self._ended = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)
        with self._lock:
            self._changed = None
            session, self._session = self._session, None
            try:
                for declared in [*self._tokens.values(), self._subscriber]:
                    if declared is not None:
                        declared.undeclare()
                if session is not None and self._owned:
                    session.close()  # type: ignore[no-untyped-call]
            except zenoh.ZError as error:
                self._fail(error)
            self._tokens.clear()
            self._subscriber = None

    def _run(self) -> None:
        backoff = Backoff(*PAUSE_S)
        due = time.monotonic() + backoff.next()
        while not self._ended:
            self._wake.wait(None if self._whole() else max(0.0, due - time.monotonic()))
            self._wake.clear()  # even if incomplete: a failure sets it too, and would be retried immediately
            self._pause.wait(SETTLE_S)
            if self._whole():
                backoff.reset()
            elif time.monotonic() >= due and not self._ended:
                self._open()
                due = time.monotonic() + backoff.next()
            self._notify()

    def _whole(self) -> bool:
        """Return whether all tokens are declared."""
        with self._lock:
            wanted = self._wanted()
            return self._subscriber is not None and wanted <= self._tokens.keys()

    def _open(self) -> None:
        """Open the session and declare what is missing. A failed step is tried again."""
        with self._lock:
            try:
                if self._session is None and not self._ended and self._config is not None:
                    self._session = zenoh.open(self._config)
                if self._session is not None and self._subscriber is None:
                    handler = zenoh.handlers.Callback(self._sampled, indirect=False)
                    self._subscriber = self._session.liveliness().declare_subscriber(
                        f"{self._root}/**", handler, history=True
                    )
                self._declare()
                self._problem = ""
            except zenoh.ZError as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._problem = str(error)
        self._counts.report(TRANSPORT_DISCOVERY_FAILED, "liveliness_failed", self._root, detail=str(error))
        self._wake.set()

    def _wanted(self) -> set[str]:
        return {f"{self._root}/{tail}" for tail in tails_of(self._node)} if self._node is not None else set()

    def _declare(self) -> None:
        if self._session is None:
            return
        wanted = self._wanted()
        for key in wanted - self._tokens.keys():
            self._tokens[key] = self._session.liveliness().declare_token(key)
        for key in self._tokens.keys() - wanted:
            self._tokens.pop(key).undeclare()

    def _sampled(self, sample: zenoh.Sample) -> None:
        # Runs on a thread of Zenoh, perhaps while we hold our lock, so it only appends and wakes.
        self._samples.append((str(sample.key_expr), sample.kind == zenoh.SampleKind.PUT))
        self._wake.set()

    def _note(self, key: str, alive: bool) -> None:
        node, _, tail = key.removeprefix(f"{self._root}/").partition("/")
        if alive and (node in self._seen or len(self._seen) < NODES_MAX):
            self._seen[node].add(tail)
        elif not alive and node in self._seen:
            self._seen[node].discard(tail)
            if not self._seen[node]:
                del self._seen[node]

    def _nodes(self) -> Nodes:
        with self._lock:
            while self._samples:
                self._note(*self._samples.popleft())
            found = {}
            for name, tails in self._seen.items():
                node, invalid = assemble(name, tails)
                if invalid:
                    self._counts.report(TRANSPORT_DISCOVERY_FAILED, "liveliness_token_invalid", name)
                if node is not None:
                    found[name] = node
            return found

    def _notify(self) -> None:
        nodes = self._nodes()
        with self._lock:
            if self._changed is not None and nodes != self._reported:
                self._reported = nodes
                self._changed(nodes)


if TYPE_CHECKING:
    _port: type[Discovery] = LivelinessDiscovery
