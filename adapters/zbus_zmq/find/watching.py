"""The thread of a discovery, which reports the nodes whenever they change."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

from zbus.util.run_id import inherit

from .discovery import Changed, Nodes

END_S = 2.0


class WatchingDiscovery(ABC):
    """Base of the two discoveries: `watch`, `diagnostics` and `close`. `_lock` protects its state."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._reported: Nodes | None = None
        self._changed: Changed | None = None
        self._problem = ""
        self._ended = False

    def watch(self, changed: Changed) -> None:
        """Call `changed` with the nodes now, and after every change."""
        with self._lock:
            self._changed, self._reported = changed, None
        self._wake.set()

    def diagnostics(self) -> dict[str, Any]:
        """Return the kind of discovery, the number of known nodes and the last problem."""
        with self._lock:
            return {**self._describe(), "nodes": len(self._reported or ()), "problem": self._problem}

    def close(self) -> None:
        """End the thread and withdraw the announcement of this node."""
        self._ended = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(END_S)
        with self._lock:
            self._changed = None
            self._withdraw()

    def _start(self, name: str) -> None:
        self._thread = threading.Thread(target=inherit(self._run), name=name, daemon=True)
        self._thread.start()

    def _notify(self, nodes: Nodes) -> None:
        """Report the nodes if they have changed."""
        with self._lock:
            if self._changed is not None and nodes != self._reported:
                self._reported = nodes
                self._changed(nodes)

    @abstractmethod
    def _run(self) -> None:
        """Keep our announcement alive and report the nodes, until `_ended`. Runs on the thread."""

    @abstractmethod
    def _describe(self) -> dict[str, Any]:
        """Return the kind of discovery, and where it looks."""

    @abstractmethod
    def _withdraw(self) -> None:
        """Remove the announcement of this node. Safe to call twice."""
