"""How to reach the NATS servers, and as whom: from the URL, then `options`, then the environment.

    nats://user:password@host:4222,other:4222?tls_ca=/etc/ca.pem

A secret is a `SecretStr` from here to the login, and `scrub` takes it out of any text that came from
elsewhere: it appears in no record, error, repr or diagnostics.
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
SHORT = 4  # a secret under so many characters is part of many a word

# The environment is asked where neither the URL nor `options` says who logs in (the first of these that is
# there), or which authority to trust.
_LOGINS = (
    {"user": "NATS_AUTH_USERNAME", "password": "NATS_AUTH_PASSWORD"},
    {"token": "NATS_AUTH_TOKEN"},
    {"nkey": "NATS_AUTH_NKEY"},
    {"creds_file": "NATS_AUTH_CREDENTIALS_FILE"},
)
_CREDS = re.compile(r"BEGIN NATS USER JWT-+\r?\n\S+\r?\n.*BEGIN USER NKEY SEED-+\r?\n\S+\r?\n", re.DOTALL)
_PLAIN = re.compile(r"-*|[A-Z]{1,12}|-+(BEGIN|END)|(JWT|SEED)-+")  # words of the frame around them
_TRUST = {"tls_ca": "NATS_TLS_CA_CERT_PATH", "tls_insecure": "NATS_TLS_INSECURE"}
_LOGIN_FIELDS = {"user", "password", "token", "nkey", "nkey_file", "creds_file"}


class NatsOptions(BaseModel):
    """What the NATS transports need to know besides the bus's own configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    servers: tuple[str, ...] = Field((f"127.0.0.1:{PORT}",), description="host:port, tried one after another")
    user: SecretStr | None = Field(None, description="with password")
    password: SecretStr | None = None
    token: SecretStr | None = None
    nkey: SecretStr | None = Field(None, description="the seed itself")
    nkey_file: str | None = Field(None, description="a file with the seed")
    creds_file: str | None = Field(None, description="a file with a user's JWT and seed")
    tls: bool = Field(False, description="refuse a server that offers no TLS; any other tls option implies it")
    tls_ca: str | None = Field(None, description="a file with the authorities to trust; default: the system's")
    tls_cert: str | None = Field(None, description="a file with our certificate, for servers that verify clients")
    tls_key: str | None = Field(None, description="a file with its key")
    tls_insecure: bool = Field(False, description="encrypt, but trust any certificate")
    tls_first: bool = Field(False, description="start TLS before the server's greeting")
    connect_timeout_s: float = Field(5.0, gt=0, le=300, description="the first connection must succeed within it")
    send_timeout_s: float = Field(10.0, gt=0, le=300, description="how long send() waits for a slow network")
    ping_interval_s: float = Field(5.0, gt=0, le=300, description="a server that misses two is given up")
    pending_bytes_max: int = Field(8 * 1024 * 1024, ge=64 * 1024, description="unsent bytes before send() waits")
    assembly_bytes_max: int = Field(256 * 1024 * 1024, ge=1024 * 1024, description="for large frames under way")

    # For nats+js alone.
    stream: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,255}$", description="the path of the URL")
    durable: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,255}$", description="the name of the consumer")
    batch: int = Field(256, ge=1, le=10_000, description="messages asked for at a time")
    unacknowledged_max: int = Field(10_000, ge=1, description="how many may wait to be stored here")
    ack_wait_s: float = Field(30.0, ge=1, le=3600, description="after this the server hands a message out again")
    idle_timeout_s: float = Field(15.0, ge=1, le=600, description="a consumer silent for so long is looked after")

    _read: tuple[SecretStr, ...] = PrivateAttr(())  # what login files held when they were read last

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.user is None) != (self.password is None):
            raise ValueError("user and password go together")
        ways = [self.user, self.token, self.nkey, self.nkey_file, self.creds_file]
        if sum(way is not None for way in ways) > 1:
            raise ValueError("one way to log in: user and password, token, nkey, nkey_file or creds_file")
        if self.tls_key and not self.tls_cert:
            raise ValueError("tls_key needs tls_cert")
        return self

    @property
    def trust(self) -> str:
        """How the server makes sure who connects."""
        tls = ["mtls" if self.tls_cert is not None else "tls"] if self.wants_tls else []
        login = any([self.user, self.token, self.nkey, self.nkey_file, self.creds_file])
        return "+".join(tls + ["login"] * login) or "none"

    @property
    def wants_tls(self) -> bool:
        """Whether a server without TLS is refused."""
        return self.tls or self.tls_first or self.tls_insecure or bool(self.tls_ca or self.tls_cert)

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS settings, or None where the server decides."""
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
        """Raise `ConfigInvalid` for a login file that cannot be used: nothing was opened."""
        try:
            self.login_files()
        except OSError as error:
            raise ConfigInvalid("options", f"the login file {error.filename}: {error.strerror}") from None
        except ValueError as error:
            raise ConfigInvalid("options", str(error)) from None

    def login_files(self) -> tuple[str | None, str | None]:
        """The seed and the credentials as they are in their files now: they may be replaced while this runs."""
        seed = None if self.nkey is None else self.nkey.get_secret_value()
        if self.nkey_file is not None:
            seed = Path(self.nkey_file).read_text().strip()
            self._read = (SecretStr(seed),)
        if self.creds_file is None:
            return seed, None
        creds = Path(self.creds_file).read_text()
        self._read = tuple(SecretStr(line) for line in creds.split() if not _PLAIN.fullmatch(line))
        if not _CREDS.search(creds):  # nats-py would look for the end of it for ever
            raise ValueError(f"creds_file: {self.creds_file} holds no user's JWT and seed")
        return seed, creds

    def scrub(self, text: str) -> str:
        """The text without any secret of ours; a short one is taken out where it stands by itself."""
        found = {each.get_secret_value() for each in (self.user, self.password, self.token, self.nkey) if each}
        found |= {each.get_secret_value() for each in self._read}
        for secret in sorted(found - {""}, key=len, reverse=True):  # one may be part of another
            pattern = re.escape(secret)
            text = re.sub(pattern if len(secret) >= SHORT else rf"(?<![^\W_]){pattern}(?![^\W_])", "***", text)
        return text


def load_options(config: BusConfig, url: str) -> NatsOptions:
    """The options of one fabric; raise `ConfigInvalid` with the field and never its value."""
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
    """`[user[:password]@]host[:port],…`, each also with a scheme of its own."""
    given: dict[str, Any] = {}
    servers = []
    for part in text.split(","):
        scheme, separator, rest = part.strip().rpartition("://")
        if separator and scheme not in ("nats", "tls"):
            raise ConfigInvalid("transport", f"a NATS server is named like nats://host:{PORT}, not {scheme}://…")
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
    """host:port with the default port; only what a host name or an address is written with."""
    text = text.strip()
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(PORT)
    bare = host.removeprefix("[").removesuffix("]")
    legal = bool(bare) and all(letter.isalnum() or letter in ".-_:%" for letter in bare)
    if not legal or (":" in bare) != host.startswith("[") or not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigInvalid("transport", f"a NATS server is named like nats://host:{PORT}")
    return f"{host}:{port}"


def _login_from_environment() -> dict[str, str]:
    for way in _LOGINS:
        found = _from_environment(way)
        if found.keys() == way.keys():
            return found
    return {}


def _from_environment(names: Mapping[str, str]) -> dict[str, str]:
    return {field: os.environ[name] for field, name in names.items() if os.environ.get(name)}
