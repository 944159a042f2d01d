"""Settings of the NATS transports: servers, login and TLS, from the URL, then `options`, then the environment.

    nats://user:password@host:4222,other:4222?tls_ca=/etc/ca.pem

A secret stays a `SecretStr` until the login, and `scrub` removes it from texts of nats-py and the server, so that it
appears in no log record, error, repr or diagnostics.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, unquote

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, model_validator

from zbus.config import BusConfig, config_errors
from zbus.errors import ConfigInvalid

PORT = 4222
SHORT = 4  # a shorter secret may be part of an ordinary word

# The environment is used if neither the URL nor `options` names a login (the first of these that is set), or the
# certificate authorities to trust.
_LOGINS = (
    {"user": "NATS_AUTH_USERNAME", "password": "NATS_AUTH_PASSWORD"},
    {"token": "NATS_AUTH_TOKEN"},
    {"nkey": "NATS_AUTH_NKEY"},
    {"creds_file": "NATS_AUTH_CREDENTIALS_FILE"},
)
_CREDS = re.compile(r"BEGIN NATS USER JWT-+\r?\n\S+\r?\n.*BEGIN USER NKEY SEED-+\r?\n\S+\r?\n", re.DOTALL)
_PLAIN = re.compile(r"-*|[A-Z]{1,12}|-+(BEGIN|END)|(JWT|SEED)-+")  # words of the lines around the secrets
_TRUST = {"tls_ca": "NATS_TLS_CA_CERT_PATH", "tls_insecure": "NATS_TLS_INSECURE"}
_LOGIN_FIELDS = {"user", "password", "token", "nkey", "nkey_file", "creds_file"}


class NatsOptions(BaseModel):
    """The settings of the NATS transports, in addition to those of the bus."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    servers: tuple[str, ...] = Field(
        (f"127.0.0.1:{PORT}",), description="servers as host:port, tried one after another"
    )
    user: SecretStr | None = Field(None, description="user name; needs password")
    password: SecretStr | None = None
    token: SecretStr | None = None
    nkey: SecretStr | None = Field(None, description="seed of the nkey")
    nkey_file: str | None = Field(None, description="path of a file with the seed of the nkey")
    creds_file: str | None = Field(None, description="path of a credentials file with a user's JWT and seed")
    tls: bool = Field(False, description="whether to require TLS; any other tls option implies it")
    tls_ca: str | None = Field(None, description="path of a file with the authorities to trust; default: the system's")
    tls_cert: str | None = Field(None, description="path of the client certificate, for servers that verify clients")
    tls_key: str | None = Field(None, description="path of the private key of tls_cert")
    tls_insecure: bool = Field(False, description="whether to trust any certificate; the connection is still encrypted")
    tls_first: bool = Field(False, description="whether to start TLS before the server's greeting")
    connect_timeout_s: float = Field(
        5.0, gt=0, le=300, description="seconds for one attempt to connect, and for the first connection altogether"
    )
    send_timeout_s: float = Field(
        10.0, gt=0, le=300, description="seconds that send() waits for a slow network before it raises TransportError"
    )
    ping_interval_s: float = Field(
        5.0, gt=0, le=300, description="seconds between pings; after two without a reply the connection is closed"
    )
    pending_bytes_max: int = Field(
        8 * 1024 * 1024, ge=64 * 1024, description="number of unsent bytes above which send() waits"
    )
    assembly_bytes_max: int = Field(
        256 * 1024 * 1024, ge=1024 * 1024, description="size limit in bytes for large frames that are being reassembled"
    )

    # Only for nats+js.
    stream: str | None = Field(
        None, pattern=r"^[A-Za-z0-9_-]{1,255}$", description="name of the stream; the path of the URL"
    )
    durable: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,255}$", description="name of the durable consumer")
    batch: int = Field(256, ge=1, le=10_000, description="number of messages per request")
    unacknowledged_max: int = Field(10_000, ge=1, description="limit for messages that are not stored here yet")
    ack_wait_s: float = Field(
        30.0, ge=1, le=3600, description="seconds after which the server redelivers an unacknowledged message"
    )
    idle_timeout_s: float = Field(
        15.0,
        ge=1,
        le=600,
        description="seconds without a message or heartbeat after which the consumer is set up again",
    )

    _read: tuple[SecretStr, ...] = PrivateAttr(())  # the secrets that were last read from login files

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.user is None) != (self.password is None):
            raise ValueError("user and password go together")
        ways = [self.user, self.token, self.nkey, self.nkey_file, self.creds_file]
        if sum(way is not None for way in ways) > 1:
            raise ValueError("only one login is allowed: user and password, token, nkey, nkey_file or creds_file")
        if self.tls_key and not self.tls_cert:
            raise ValueError("tls_key needs tls_cert")
        return self

    @property
    def trust(self) -> str:
        """How this connection is authenticated, as in `Fabric.trust`."""
        tls = ["mtls" if self.tls_cert is not None else "tls"] if self.wants_tls else []
        login = any([self.user, self.token, self.nkey, self.nkey_file, self.creds_file])
        return "+".join(tls + ["login"] * login) or "none"

    @property
    def wants_tls(self) -> bool:
        """Whether the server must offer TLS."""
        return self.tls or self.tls_first or self.tls_insecure or bool(self.tls_ca or self.tls_cert)

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS settings, or None if TLS is not required. Raises `ConfigInvalid` if a file cannot be used."""
        if not self.wants_tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca)
            if self.tls_cert:
                context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigInvalid("options", f"the TLS files cannot be used: {type(error).__name__}: {error}") from None
        if self.tls_insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def check_files(self) -> None:
        """Raise `ConfigInvalid` if a login file cannot be used, before anything is opened."""
        try:
            self.login_files()
        except OSError as error:
            raise ConfigInvalid("options", f"the login file {error.filename}: {error.strerror}") from None
        except ValueError as error:
            raise ConfigInvalid("options", str(error)) from None

    def login_files(self) -> tuple[str | None, str | None]:
        """Read the seed and the credentials. The files are read for each login, because they may be replaced."""
        seed = None if self.nkey is None else self.nkey.get_secret_value()
        if self.nkey_file is not None:
            seed = Path(self.nkey_file).read_text().strip()
            self._read = (SecretStr(seed),)
        if self.creds_file is None:
            return seed, None
        creds = Path(self.creds_file).read_text()
        self._read = tuple(SecretStr(line) for line in creds.split() if not _PLAIN.fullmatch(line))
        if not _CREDS.search(creds):  # nats-py would search for the end of it forever
            raise ValueError(f"creds_file: {self.creds_file} does not contain a user's JWT and seed")
        return seed, creds

    def scrub(self, text: str) -> str:
        """Return the text without secrets. A short secret is only removed if it is a separate word."""
        found = {each.get_secret_value() for each in (self.user, self.password, self.token, self.nkey) if each}
        found |= {each.get_secret_value() for each in self._read}
        for secret in sorted(found - {""}, key=len, reverse=True):  # one secret may be part of another
            pattern = re.escape(secret)
            text = re.sub(pattern if len(secret) >= SHORT else rf"(?<![^\W_]){pattern}(?![^\W_])", "***", text)
        return text


def load_options(config: BusConfig, url: str, session: Any = None) -> NatsOptions:
    """Return the options of one fabric. Raises `ConfigInvalid` with the field, and never with its value."""
    if session is not None:
        raise ConfigInvalid("session", "NATS opens its own connection; only Zenoh takes a session")
    given: dict[str, Any] = dict(config.options_for(url.partition("://")[0]))
    given.update(_from_url(url))
    if "servers" in given and isinstance(given["servers"], str):
        given["servers"] = tuple(_server(each) for each in given["servers"].split(","))
    if not _LOGIN_FIELDS & given.keys():
        given.update(_login_from_environment())
    for field, value in _from_environment(_TRUST).items():
        given.setdefault(field, value)
    with config_errors(known=NatsOptions.model_fields, within="options", noun="option"):
        return NatsOptions(**given)


def _from_url(url: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    authority_and_path, _, query = url.partition("://")[2].partition("?")
    authority, _, path = authority_and_path.partition("/")
    authority = authority or os.environ.get("NATS_SERVER", "")
    if authority:
        given.update(_authority(authority))
    if path.strip("/"):
        given["stream"] = unquote(path.strip("/"))
    for field, value in parse_qsl(query, keep_blank_values=True):
        given[field] = value
    return given


def _authority(text: str) -> dict[str, Any]:
    """Parse `[user[:password]@]host[:port],…`. Each server may have a scheme."""
    given: dict[str, Any] = {}
    servers = []
    for part in text.split(","):
        scheme, separator, rest = part.strip().rpartition("://")
        if separator and scheme not in ("nats", "tls"):
            raise ConfigInvalid("transport", f"must look like nats://host:{PORT}, not {scheme}://…")
        if scheme == "tls":
            given["tls"] = True
        login, at, address = rest.strip("/").rpartition("@")
        if at:
            given.update(_login(login))
        servers.append(_server(address))
    return given | {"servers": tuple(servers)}


def _login(text: str) -> dict[str, str]:
    user, colon, password = text.partition(":")
    if colon:
        return {"user": unquote(user), "password": unquote(password)}
    return {"token": unquote(user)}


def _server(text: str) -> str:
    """Return host:port; the port defaults to 4222. Raises `ConfigInvalid` for an invalid host or port."""
    text = text.strip()
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(PORT)
    bare = host.removeprefix("[").removesuffix("]")
    legal = bool(bare) and all(letter.isalnum() or letter in ".-_:%" for letter in bare)
    if not legal or (":" in bare) != host.startswith("[") or not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigInvalid("transport", f"must look like nats://host:{PORT}")
    return f"{host}:{port}"


def _login_from_environment() -> dict[str, str]:
    for way in _LOGINS:
        found = _from_environment(way)
        if found.keys() == way.keys():
            return found
    return {}


def _from_environment(names: Mapping[str, str]) -> dict[str, str]:
    return {field: os.environ[name] for field, name in names.items() if os.environ.get(name)}
