"""How nodes find each other: a small port, and what a node says of itself.

Nobody calls it but the fabric: a node announces itself when it opens, and says more when it answers for more keys.
Watching never ends. What fails is tried again for ever, after a pause that grows to a limit, and can be seen in the
diagnostics and in records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

NODE_ID_BYTES = 8


# The names on the wire are those of the first version.
class Node(msgspec.Struct, frozen=True, kw_only=True, rename={"requests": "questions", "serves": "answers"}):
    """What others must know of a node to talk to it."""

    node: str  # 16 hexadecimal digits, new for each incarnation
    publish: str | None = None  # where its events are; None where they go through brokers
    requests: str = ""  # where it receives requests
    serves: tuple[str, ...] = ()  # the keys that it serves
    curve_key: str | None = None  # its public key, in Z85; None for a node that does not encrypt


Nodes = Mapping[str, Node]  # by node id
Changed = Callable[[Nodes], None]


class Discovery(Protocol):
    """A way to find nodes."""

    def announce(self, node: Node) -> None:
        """Say this of our node, in place of what was said before. Others can see it when this returns."""

    def watch(self, changed: Changed) -> None:
        """Call `changed`, on a thread of the implementation, with all live nodes now and whenever they change."""

    def look(self) -> Nodes:
        """All live nodes, as fresh as can be had; may block for a moment."""

    def diagnostics(self) -> dict[str, Any]:
        """What this is, and what went wrong last."""

    def close(self) -> None:
        """Withdraw the announcement and end, in bounded time. Safe to call twice."""
