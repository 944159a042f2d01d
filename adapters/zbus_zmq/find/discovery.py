"""Discovery port: how nodes find each other, and the announcement of a node.

Only the fabric uses it: a node announces itself when it opens, and again when the keys that it serves change. Watching
never ends. A failed operation is tried again forever, after a pause that grows to a limit, and is visible in the
diagnostics and in log records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

NODE_ID_BYTES = 8


# The names on the wire are those of the first version.
class NodeRecord(msgspec.Struct, frozen=True, kw_only=True, rename={"requests": "questions", "serves": "answers"}):
    """The announcement of a node: all that other nodes need to connect to it."""

    node: str  # 16 hexadecimal digits, new for each incarnation
    publish: str | None = None  # the endpoint of its events; None if they go through brokers
    requests: str = ""  # the endpoint for requests
    serves: tuple[str, ...] = ()  # the keys that it serves
    curve_key: str | None = None  # its public key, in Z85; None for a node that does not encrypt


Nodes = Mapping[str, NodeRecord]  # by node id
Changed = Callable[[Nodes], None]


class Discovery(Protocol):
    """A way to find nodes."""

    def announce(self, node: NodeRecord) -> None:
        """Replace the announcement of this node. Other nodes can see it when this returns."""

    def watch(self, changed: Changed) -> None:
        """Call `changed`, on a thread of the implementation, with all live nodes now and whenever they change."""

    def look(self) -> Nodes:
        """Return all live nodes, read again. May block briefly."""

    def diagnostics(self) -> dict[str, Any]:
        """Return the kind of discovery and its last problem."""

    def close(self) -> None:
        """Withdraw the announcement and end, in bounded time. Safe to call twice."""
