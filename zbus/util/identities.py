"""Publisher identities by key: a random publisher id for each, with sequence numbers from 0."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class Identities:
    """The identities of publishers that have no object of their own.

    At most `max` keys are kept. A key that was not used for long gets another identity, which subscribers do not
    notice. `next` uses a sequence number up: call it only after every check that can reject the event.
    """

    def __init__(self, max: int, randbits: Callable[[int], int]) -> None:  # noqa: A002 - the field's own word
        self._max, self._randbits = max, randbits
        self._known: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def next(self, key: str) -> tuple[int, int]:
        """Return the publisher id and the sequence number of the next event on a key."""
        publisher_id, sequence = self._known.get(key) or (self._randbits(53), 0)
        self._known[key] = (publisher_id, sequence + 1)
        self._known.move_to_end(key)
        if len(self._known) > self._max:
            self._known.popitem(last=False)
        return publisher_id, sequence
