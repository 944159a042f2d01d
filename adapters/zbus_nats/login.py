"""One attempt to connect and log in to one server."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable

import nats.errors
from nats.aio.client import RawCredentials
from pydantic import SecretStr

from .client import DirectClient
from .options import NatsOptions


async def login(
    client: DirectClient,
    server: str,
    options: NatsOptions,
    tls: ssl.SSLContext | None,
    error_cb: Callable[[Exception], Awaitable[None]],
) -> None:
    """Connect, or raise an error of nats-py. `error_cb` gets the actual cause of a `NoServersError`."""
    seed, creds = options.login_files()
    await client.connect(
        f"nats://{server}",
        name="zbus",
        no_echo=True,
        allow_reconnect=False,
        max_reconnect_attempts=1,
        reconnect_time_wait=0,
        connect_timeout=options.connect_timeout_s,  # type: ignore[arg-type]  # nats-py accepts any number
        ping_interval=options.ping_interval_s,  # type: ignore[arg-type]
        max_outstanding_pings=2,
        error_cb=error_cb,
        tls=tls,
        tls_handshake_first=options.tls_first,
        user=_plain(options.user),
        password=_plain(options.password),
        token=_plain(options.token),
        nkeys_seed_str=seed,
        user_credentials=None if creds is None else RawCredentials(creds),
    )
    if not client.is_connected:  # nats-py accepts any line that is not an error as a greeting
        raise nats.errors.Error("nats: the server did not reply to the login")


def _plain(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
