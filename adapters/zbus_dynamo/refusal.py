"""Error for messages that are not valid Dynamo messages: a sentence for log records, and a code for counters."""

from __future__ import annotations

from zbus.errors import EventInvalid, KeyInvalid


class NotDynamo(EventInvalid):
    """Raised when a message is not a valid Dynamo message. The whole message is rejected; later ones are not affected.

    >>> NotDynamo("invalid_version", "version 9, not 1").code
    'invalid_version'
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text

    def __str__(self) -> str:
        return self.text


def code_of(error: Exception) -> str:
    """Return the code of a rejected message, which is also the name of its counter."""
    if isinstance(error, NotDynamo):
        return error.code
    return "invalid_key" if isinstance(error, KeyInvalid) else "invalid_message"
