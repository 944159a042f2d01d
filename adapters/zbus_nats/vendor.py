"""nats-py's errors become ours, here and nowhere else, without a secret in their text."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import nats.errors

from zbus.errors import TransportError

from .client import NO_TLS
from .options import NatsOptions

# What nats-py and the sockets below it raise when something is wrong with the network or the login.
VENDOR_ERRORS = (nats.errors.Error, OSError, asyncio.TimeoutError, AssertionError, ValueError)


@contextmanager
def nats_errors(doing: str, options: NatsOptions) -> Iterator[None]:
    """Whatever nats-py raises in the block comes out as a `TransportError`."""
    try:
        yield
    except VENDOR_ERRORS as error:
        raise TransportError(f"nats could not {doing}: {describe(error, options)}") from None


def describe(error: BaseException | None, options: NatsOptions) -> str:
    """An error in a few words, without secrets."""
    if error is None:
        return "the connection ended"
    text = " ".join(str(error).removeprefix("nats: ").split())
    if refused_login(error):
        return "the server refused the login"
    if isinstance(error, ConnectionRefusedError):
        return "no server answers there"
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"its certificate is not trusted: {error.verify_message}"
    elif isinstance(error, ssl.SSLError):
        text = f"TLS: {error.reason or 'the handshake failed'}"
    return options.scrub(text or type(error).__name__)[:300]


def hopeless(error: BaseException | None) -> bool:
    """Whether trying the same server again at once is of no use."""
    return refused_login(error) or isinstance(error, ssl.SSLCertVerificationError) or NO_TLS in str(error)


def refused_login(error: BaseException | None) -> bool:
    """Whether the server said that it does not know us."""
    text = str(error).lower()
    return isinstance(error, nats.errors.Error) and ("authorization violation" in text or "authentication" in text)
