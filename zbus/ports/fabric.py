"""The transport port: what the core needs from a fabric, which carries frames between nodes.

`zbus.plugins` finds the implementation by the scheme of a URL. A fabric knows nothing of logs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

# What a fabric calls with each frame it received, on a thread of its own: it appends and wakes, nothing else. Where a
# source can be acknowledged, the second argument is called once our log has all events of the frame.
Receive = Callable[[bytes, Callable[[], None] | None], None]

# What a fabric calls with each reply to a request, on a thread of its own; None ends them: no more will come.
OnReply = Callable[[bytes | None], None]


class IncomingRequest(Protocol):
    """A question that another node asked. Replies go to that node alone, in order."""

    key: str
    payload: bytes

    def reply(self, data: bytes) -> None:
        """Send one reply; may block while the network does. Any thread but the loop's."""

    def close(self) -> None:
        """No more replies. Safe to call twice."""


# What a fabric calls with each request, on a thread of its own: it appends and wakes, nothing else.
OnRequest = Callable[[IncomingRequest], None]


class RequestHandle(Protocol):
    """A question under way."""

    def close(self) -> None:
        """Listen no longer; `on_reply` may still be called once or twice. Safe to call twice."""


class Fabric(Protocol):
    """What carries frames between nodes. Frames are opaque bytes: it neither changes nor splits what arrives.

    All methods may block but none for ever, and none is called on the event loop. Errors are `TransportError`.
    """

    name: str
    networked: bool  # whether there can be another node at the far end
    events_only: bool  # it speaks to programs that know events alone: no beacons, no questions
    trust: str  # how it makes sure who is at the far end: "none", or of "login", "tls", "mtls" and "curve" those in use
    endpoints: Sequence[str]  # where other nodes can reach this one, as far as it is reached at all
    dense: bool  # the sequences of a publisher come without holes, so that a hole is a loss

    def send(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Hand over frames, each with its concrete key, in order; blocks while the network is slow.

        Raises while there is no connection: none, some or all of them may then have gone. The send queue sends
        them again, and receivers know events by their identity.
        """

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        """Receive what other nodes send for these canonical expressions, exactly; replaces the earlier ones.

        A frame arrives once, however many of the expressions match its key; while they change, a late one may come
        twice. Returns when it is in force as far as this end can tell, and stays in force across reconnections. A node
        does not hear itself.
        """

    def ready(self, key: str) -> bool:
        """Whether this fabric is connected and, where it can tell, whether some other node wants `key` now."""

    def check(self, key: str) -> None:
        """Raise `KeyInvalid` for a legal key that this fabric cannot carry all the same. Never blocks."""

    def serve(self, keys: Sequence[str], on_request: OnRequest) -> None:
        """Answer questions for these concrete keys; replaces the earlier ones. `on_request` only appends and wakes."""

    def request(self, key: str, payload: bytes, on_reply: OnReply, timeout_s: float) -> RequestHandle:
        """Ask one of those who answer for `key`. Nobody there: `on_reply(None)` at once, with no reply before it."""

    def diagnostics(self) -> dict[str, Any]:
        """What this fabric is; never a secret."""

    def close(self) -> None:
        """Let go of the network, in bounded time. Safe to call twice."""
