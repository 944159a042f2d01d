"""What joins this node to others: the outbox, the inbox, and what the fabric is asked to bring here."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from .errors import FabricError
from .inbox import Inbox
from .outbox import Outbox
from .ports import Fabric, Row
from .records import record


class Network:
    """Exists only where there can be another node. Declaring to the fabric may block: a thread does it, in order."""

    def __init__(self, fabric: Fabric, outbox: Outbox, inbox: Inbox) -> None:
        self._fabric, self._outbox, self._inbox = fabric, outbox, inbox
        self._users: Counter[str] = Counter()
        self._declaring = ThreadPoolExecutor(1, "zbus-declare")

    def send(self, rows: Sequence[Row], offsets: Sequence[int]) -> None:
        """Let other nodes have these. Never waits."""
        self._outbox.offer(rows, offsets)

    def want(self, expressions: Iterable[str]) -> None:
        """Receive these from other nodes, from soon on."""
        self._users.update(expressions)
        self._declare()

    def unwant(self, expressions: Iterable[str]) -> None:
        """Undo one `want`."""
        self._users.subtract(expressions)
        self._users += Counter()  # drop what nobody uses
        self._declare()

    def close(self, timeout_s: float) -> None:
        """Send what is left, for as long as there is time."""
        self._declaring.shutdown(cancel_futures=True)
        self._outbox.close(timeout_s)

    def _declare(self) -> None:
        self._declaring.submit(self._listen, list(self._users))

    def _listen(self, expressions: list[str]) -> None:
        try:
            self._fabric.listen(expressions, self._inbox.receive)
        except FabricError as error:
            record("FABRIC_ERROR", logging.ERROR, error, doing="listen", expressions=expressions)
