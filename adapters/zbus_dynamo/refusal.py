"""Why a message is not a message of Dynamo: a sentence for the report, and a code for the counter."""

from __future__ import annotations

from zbus.errors import EventInvalid, KeyInvalid


class NotDynamo(EventInvalid):
    """A message that is not one of Dynamo's. It was refused whole; what follows it is not touched.

    >>> NotDynamo("invalid_version", "version 9, not 1").code
    'invalid_version'
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text

    def __str__(self) -> str:
        return self.text


def code_of(error: Exception) -> str:
    """Return the counter of a refused message."""
    if isinstance(error, NotDynamo):
        return error.code
    return "invalid_key" if isinstance(error, KeyInvalid) else "invalid_message"
