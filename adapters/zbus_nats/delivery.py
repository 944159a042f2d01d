"""A message of a JetStream stream, its position, and its acknowledgement."""

from __future__ import annotations

from collections.abc import Callable


class Delivery:
    """A message that a consumer delivered."""

    __slots__ = ("_acknowledge", "_created", "data", "headers", "published_at", "sequence", "subject")

    def __init__(
        self,
        acknowledge: Callable[[str, int], None],
        created: str,
        subject: bytes,
        data: bytes,
        headers: bytes | None,
        sequence: int,
        published_at: int,
    ) -> None:
        self._acknowledge, self._created = acknowledge, created
        self.subject, self.data, self.headers = subject, data, headers
        self.sequence, self.published_at = sequence, published_at

    def done(self) -> None:
        """Acknowledge the message, because it is stored. Any thread may call it; a second call has no effect."""
        self._acknowledge(self._created, self.sequence)


def read_place(reply: bytes) -> tuple[int, int, int, int] | None:
    """Parse the subject for the acknowledgement of a message, in both of its forms. Return None if it is malformed.

    The result is the stream sequence, the consumer sequence, the time (ns), and how often the message was delivered.
    """
    tokens = reply.split(b".")
    if len(tokens) >= 11:
        tokens = tokens[2:]
    try:
        times, sequence, number, published_at = (int(token) for token in tokens[4:8])
    except ValueError:
        return None
    legal = 0 < sequence < 1 << 63 and 0 <= published_at < 1 << 63
    return (sequence, number, published_at, times) if legal else None
