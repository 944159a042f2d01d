"""The settings of the web server: arguments, then `ZBUS_WEB_…` variables, then the table `[web]` of a TOML file."""

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
    """One bearer token: its name for people, its text or the file that holds it, and what it may do."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: str = Field(min_length=1, max_length=100)
    token: SecretStr | None = Field(None, description="the token itself")
    token_file: Path | None = Field(None, description="a file whose first line is the token")
    read: tuple[str, ...] = Field(("**",), description="key expressions that it may read")
    publish: tuple[str, ...] = Field(("**",), description="key expressions that it may publish to")
    operate: bool = Field(False, description="whether it may move and delete cursors")

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
            raise ValueError("a token has either `token` or `token_file`")
        return self

    def secret(self) -> str:
        """The token's text. Raises `ConfigInvalid` where its file cannot be read, or where it is too short to keep."""
        text = self.token.get_secret_value() if self.token is not None else ""
        if self.token_file is not None:
            try:
                text = self.token_file.read_text().partition("\n")[0].strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigInvalid("tokens", f"{self.name}: {self.token_file}: {error}") from error
        if len(text) < 16 or not text.isascii() or not text.isprintable() or " " in text:
            raise ConfigInvalid("tokens", f"{self.name}: a token is at least 16 printable ASCII characters")
        return text


class WebSettings(BaseSettings):
    """What `zbus serve` listens on and allows. Each field is also `ZBUS_WEB_<FIELD>` in the environment.

    >>> WebSettings(port=0).is_loopback
    True
    """

    model_config = SettingsConfigDict(env_prefix="ZBUS_WEB_", extra="forbid", frozen=True, hide_input_in_errors=True)

    renamed: ClassVar[Mapping[str, str]] = {"hosts": "allowed_hosts", "origins": "allowed_origins"}

    host: str = Field("127.0.0.1", min_length=1, description="the address to listen on")
    port: int = Field(7480, ge=0, le=65535, description="the port to listen on; 0: any that is free")
    allowed_hosts: Strings = Field((), description="names under which it is reached, beside its address and localhost")
    allowed_origins: Strings = Field(
        (), description="other origins whose pages may call it, such as https://ops.example.org"
    )
    tokens: tuple[TokenSettings, ...] = Field((), description="who may do what; none: everybody, on loopback only")
    connections_max: int = Field(2000, ge=1, description="connections at once; more are answered 503")
    connections_per_client_max: int = Field(1500, ge=1, description="the same for one address")
    requests_per_s: float = Field(20_000, gt=0, description="requests of one address; more are answered 429")
    requests_burst: int = Field(20_000, ge=1, description="how many it may have saved up")
    body_bytes_max: int = Field(8 * MIB, ge=1, le=256 * MIB, description="the largest body of a request")
    head_timeout_s: float = Field(30.0, gt=0, le=3600, description="how long the head of a request may take")
    keepalive_s: float = Field(15.0, gt=0, le=3600, description="how often an idle feed shows that it is alive")
    retry_ms: int = Field(1000, ge=1, description="how long a browser waits before it connects again")
    feed_queue_events: int = Field(256, ge=1, le=100_000, description="events in memory for one feed; then it spills")
    feed_keys_max: int = Field(100, ge=1, description="key expressions of one request")
    stop_timeout_s: float = Field(3.0, gt=0, le=300, description="how long open connections have to end")

    def __init__(self, **given: Any) -> None:
        check_variables("ZBUS_WEB_", self.renamed)
        with config_errors("web", known=type(self).model_fields, renamed=self.renamed):
            super().__init__(**given)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check_reachable(self) -> None:
        """Refuse to be reached by others while nobody has to show a token."""
        if not self.is_loopback and not self.tokens:
            raise ConfigInvalid(
                "host",
                f"{self.host} can be reached by other machines, and no token is configured: everybody there could read "
                "and publish. Give a token with --token-file or `tokens`, or listen on 127.0.0.1. Nothing was opened",
            )


def load_settings(path: str | os.PathLike[str] | None = None, **given: Any) -> WebSettings:
    """Settings from what is given, the environment, and the table `[web]` of a TOML file."""
    values: dict[str, Any] = {}
    if path:
        try:
            values = tomllib.loads(Path(path).read_text()).get("web", {})
        except (OSError, ValueError) as error:
            raise ConfigInvalid("config", f"{os.fspath(path)}: {error}") from error
        if not isinstance(values, dict):
            raise ConfigInvalid("web", "it is a table: [web]")
    named = {name: value for name, value in values.items() if f"ZBUS_WEB_{name.upper()}" not in os.environ}
    return WebSettings(**named | given)
