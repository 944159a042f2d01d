"""Who may do what: everybody, everything."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import HTTPConnection

from .settings import WebSettings


class Grant:
    """What the caller of a request may do."""

    name = "anonymous"
    operate = True

    def check_read(self, expressions: Sequence[str]) -> None:
        """Refuse what may not be read."""

    def check_publish(self, key: str) -> None:
        """Refuse what may not be published to."""

    def check_operate(self) -> None:
        """Refuse who may not operate."""

    def shows(self, key: str) -> bool:
        """Whether an event of this key is shown."""
        return True


class Access:
    """Turns a request into a grant."""

    def __init__(self, settings: WebSettings, session_secret: bytes | None) -> None:
        self._grant = Grant()

    def grant(self, connection: HTTPConnection) -> Grant:
        """What the caller may do."""
        return self._grant
