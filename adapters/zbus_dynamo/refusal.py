"""Why a message of somebody else is none of Dynamo's: in words for a report, and in one word to count by."""

from __future__ import annotations

from zbus.errors import EventInvalid, KeyInvalid


class NotDynamo(EventInvalid):
    """A message that is not one of Dynamo's. It was refused whole; what follows it is not touched.

    >>> NotDynamo("version", "version 9, not 1").code
    'version'
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text

    def __str__(self) -> str:
        return self.text


def code_of(error: Exception) -> str:
    """What to count a refused message by."""
    if isinstance(error, NotDynamo):
        return error.code
    return "key" if isinstance(error, KeyInvalid) else "invalid"
