"""Stamps identify messages that go through brokers: the sender, and a number that rises.

Through several brokers a message arrives once from each. They drop independently, so a message that one of them lost
may arrive from another after later ones: a receiver remembers every stamp, not only the highest number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

STAMP_BYTES = 16
SENDER_BYTES = 8
SEEN_MAX = 65_536  # stamps that a receiver remembers


def stamps_of(node: str) -> Callable[[], bytes]:
    """Return a function that returns the next stamp of a node's messages."""
    sender, ordinal = bytes.fromhex(node), itertools.count(1)
    return lambda: sender + next(ordinal).to_bytes(STAMP_BYTES - SENDER_BYTES)
