"""The mapping of nats-py's errors to `TransportError`, without secrets in the text."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import nats.errors

from zbus.errors import TransportError

from .client import NO_TLS
from .options import NatsOptions

# The errors of nats-py and its sockets for problems with the network or the login.
VENDOR_ERRORS = (nats.errors.Error, OSError, asyncio.TimeoutError, AssertionError, ValueError)


@contextmanager
def nats_errors(doing: str, options: NatsOptions) -> Iterator[None]:
    """Raise `TransportError` for every error of nats-py in the block."""
    try:
        yield
    except VENDOR_ERRORS as error:
        raise TransportError(f"nats could not {doing}: {describe(error, options)}") from None


def describe(error: BaseException | None, options: NatsOptions) -> str:
    """Describe an error in a few words, without secrets."""
    if error is None:
        return "the connection ended"
    text = " ".join(str(error).removeprefix("nats: ").split())
    if refused_login(error):
        return "the server rejected the login"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, asyncio.TimeoutError):
        return "the server did not reply in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"its certificate is not trusted: {error.verify_message}"
    elif isinstance(error, ssl.SSLError):
        text = f"TLS: {error.reason or 'the handshake failed'}"
    return options.scrub(text or type(error).__name__)[:300]


def hopeless(error: BaseException | None) -> bool:
    """Return whether an immediate retry with the same server would fail as well."""
    return refused_login(error) or isinstance(error, ssl.SSLCertVerificationError) or NO_TLS in str(error)


def refused_login(error: BaseException | None) -> bool:
    """Return whether the server rejected the login."""
    text = str(error).lower()
    return isinstance(error, nats.errors.Error) and ("authorization violation" in text or "authentication" in text)
