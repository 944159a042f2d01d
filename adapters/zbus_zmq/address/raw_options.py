"""Options of `zmq+raw://`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from .options import Strings, ZmqOptions, check_endpoint


class RawOptions(BaseModel):
    """Every option of `zmq+raw://`."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    connect: Strings = Field((), description="PUB sockets to receive from")
    bind: str | None = Field(None, description="where SUB sockets connect to us")
    publish: Strings = Field((), description="bound SUB sockets (or a broker's XSUB) to send to")
    separator: Literal["/", "."] = Field("/", description="between the segments of a topic")
    layout: Literal["multipart", "single"] = "multipart"
    hwm: int = Field(10_000, ge=1, le=1_000_000)
    max_message_bytes: int = Field(64 << 20, ge=1, le=2**31 - 1)
    linger_s: float = Field(1.0, ge=0, le=30)
    stall_s: float = Field(1.0, ge=0, le=60)

    @field_validator("connect", "publish", "bind")
    @classmethod
    def _endpoints_named(cls, value: Any) -> Any:
        for endpoint in (value,) if isinstance(value, str) else value or ():
            check_endpoint(endpoint)
        return value

    @model_validator(mode="after")
    def _some(self) -> RawOptions:
        if not self.connect and self.bind is None and not self.publish:
            raise ValueError("name an endpoint: connect, bind or publish")
        if self.bind is not None and self.publish:
            raise ValueError("bind and publish: choose one")
        return self

    def limits(self) -> ZmqOptions:
        """Return the options of the sockets."""
        return ZmqOptions(
            hwm=self.hwm, max_message_bytes=self.max_message_bytes, linger_s=self.linger_s, stall_s=self.stall_s
        )
