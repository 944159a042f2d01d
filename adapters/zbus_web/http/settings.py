"""Settings of the web server: arguments, then `ZBUS_WEB_…` variables, then the table `[web]` of a TOML file."""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from zbus.config import Strings, check_variables, config_errors
from zbus.errors import ConfigInvalid, KeyInvalid
from zbus.keys import KeySet

MIB = 1024 * 1024


class TokenSettings(BaseModel):
    """One bearer token: a name, its text or the file that holds it, and its permissions."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: str = Field(min_length=1, max_length=100, description="name of the token for people")
    token: SecretStr | None = Field(None, description="the token itself")
    token_file: Path | None = Field(None, description="a file whose first line is the token")
    read: tuple[str, ...] = Field(("**",), description="key expressions that the token may read")
    publish: tuple[str, ...] = Field(("**",), description="key expressions that the token may publish to")
    operate: bool = Field(False, description="whether the token may move and delete cursors")

    @field_validator("read", "publish")
    @classmethod
    def _expressions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return KeySet(value).expressions if value else ()
        except KeyInvalid as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.token is None) == (self.token_file is None):
            raise ValueError("give either `token` or `token_file`")
        return self

    def secret(self) -> str:
        """Return the token's text. Raises `ConfigInvalid` if its file cannot be read or the token is too short."""
        text = self.token.get_secret_value() if self.token is not None else ""
        if self.token_file is not None:
            try:
                text = self.token_file.read_text().partition("\n")[0].strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigInvalid("tokens", f"{self.name}: {self.token_file}: {error}") from error
        if len(text) < 16 or not text.isascii() or not text.isprintable() or " " in text:
            raise ConfigInvalid(
                "tokens", f"{self.name}: a token must have at least 16 printable ASCII characters and no spaces"
            )
        return text


class WebSettings(BaseSettings):
    """Settings of `zbus serve`. Each field can also be set as `ZBUS_WEB_<FIELD>` in the environment.

    >>> WebSettings(port=0).is_loopback
    True
    """

    model_config = SettingsConfigDict(env_prefix="ZBUS_WEB_", extra="forbid", frozen=True, hide_input_in_errors=True)

    renamed: ClassVar[Mapping[str, str]] = {
        "hosts": "allowed_hosts",
        "origins": "allowed_origins",
        "feed_queue_events": "stream_queue_events",
        "feed_keys_max": "stream_keys_max",
    }

    host: str = Field("127.0.0.1", min_length=1, description="the address to listen on")
    port: int = Field(7480, ge=0, le=65535, description="the port to listen on; 0 chooses a free one")
    allowed_hosts: Strings = Field((), description="Host names to accept in addition to the address and localhost")
    allowed_origins: Strings = Field(
        (), description="other origins whose pages may send requests, such as https://ops.example.org"
    )
    tokens: tuple[TokenSettings, ...] = Field(
        (), description="bearer tokens and their permissions; if empty, every client on this machine may do everything"
    )
    connections_max: int = Field(
        2000, ge=1, description="concurrent connections; above it the server responds with 503"
    )
    connections_per_client_max: int = Field(
        1500, ge=1, description="concurrent connections of one client (a token or an address)"
    )
    requests_per_s: float = Field(
        20_000, gt=0, description="requests per second of one client; above it the server responds with 429"
    )
    requests_burst: int = Field(20_000, ge=1, description="requests that one client may send at once after a pause")
    body_bytes_max: int = Field(8 * MIB, ge=1, le=256 * MIB, description="maximum size of a request body")
    head_timeout_s: float = Field(30.0, gt=0, le=3600, description="maximum seconds to receive a request head")
    keepalive_s: float = Field(
        15.0, gt=0, le=3600, description="maximum seconds between two messages on an idle stream"
    )
    retry_ms: int = Field(1000, ge=1, description="milliseconds that a browser waits before it reconnects")
    stream_queue_events: int = Field(
        256, ge=1, le=100_000, description="events in memory for one stream; further events are read from the log"
    )
    stream_keys_max: int = Field(100, ge=1, description="maximum number of key expressions in one request")
    stop_timeout_s: float = Field(
        3.0, gt=0, le=300, description="seconds until open connections are closed at shutdown"
    )

    def __init__(self, **given: Any) -> None:
        check_variables("ZBUS_WEB_", self.renamed)
        with config_errors("web", known=type(self).model_fields, renamed=self.renamed, prefix="ZBUS_WEB_"):
            super().__init__(**given)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check_reachable(self) -> None:
        """Raise `ConfigInvalid` if other machines could reach the server without a token."""
        if not self.is_loopback and not self.tokens:
            raise ConfigInvalid(
                "host",
                f"other machines can reach {self.host}, and no token is configured: they could read and publish. "
                "Configure a token with --token-file or `tokens`, or listen on 127.0.0.1. Nothing was opened",
            )


def check_settings(settings: object) -> WebSettings:
    """Return the settings. Raises `TypeError` if they are not a `WebSettings`, such as a dict."""
    if not isinstance(settings, WebSettings):
        raise TypeError(f"settings must be a WebSettings, not {type(settings).__name__}: write WebSettings(port=7480)")
    return settings


def load_settings(path: str | os.PathLike[str] | None = None, **given: Any) -> WebSettings:
    """Return the settings from the arguments, the environment, and the table `[web]` of a TOML file."""
    values: dict[str, Any] = {}
    if path:
        try:
            values = tomllib.loads(Path(path).read_text()).get("web", {})
        except (OSError, ValueError) as error:
            raise ConfigInvalid("config", f"{os.fspath(path)}: {error}") from error
        if not isinstance(values, dict):
            raise ConfigInvalid("web", "must be a table: [web]")
    named = {name: value for name, value in values.items() if f"ZBUS_WEB_{name.upper()}" not in os.environ}
    return WebSettings(**named | given)
