"""The NATS transport: frames on subjects, and requests with reply inboxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zbus.config import BusConfig
from zbus.errors import ConfigInvalid, TransportError
from zbus.ports.fabric import OnReply, OnRequest, Receive

from .connection import NatsConnection
from .listener import NatsListener
from .options import NatsOptions, load_options
from .parts import publish
from .requests import NatsRequests
from .subjects import encode_key

if TYPE_CHECKING:
    from zbus.ports.fabric import Fabric, RequestHandle


def open_fabric(config: BusConfig, url: str, session: Any = None) -> Fabric:
    """Connect to NATS with the settings of the URL, `options` and the environment. Blocks: call it off the loop."""
    options = load_options(config, url, session)
    if options.stream or options.durable:
        raise ConfigInvalid("transport", "to read a stream, use nats+js://host/STREAM?durable=name")
    return NatsFabric(options)


class NatsFabric:
    """A connection to NATS as a `Fabric`."""

    name = "nats"
    networked = True
    events_only = False
    dense = True
    endpoints: Sequence[str] = ()  # nodes connect through the server

    def __init__(self, options: NatsOptions) -> None:
        self.trust = options.trust
        self.connection = NatsConnection(options, self.name)
        self._requests = NatsRequests(self.connection, options.assembly_bytes_max)
        self._listener = NatsListener(self.connection, options.assembly_bytes_max)
        self.connection.open()

    def send(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Send frames, with one hop to the connection's thread for all of them."""
        max_payload = self.connection.max_payload
        if not max_payload:
            raise TransportError("not connected to a NATS server")
        commands: list[bytes] = []
        for key, frame in frames:
            size = len(frame)
            if size <= max_payload:
                commands.append(b"PUB %b %d\r\n%b\r\n" % (encode_key(key).encode(), size, frame))
            else:
                # Large frames are queued one by one, so that the queue stays near its limit.
                self.connection.send(commands)
                self.connection.send(publish(encode_key(key).encode(), frame, max_payload))
                commands = []
        if commands:
            self.connection.send(commands)

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        """Subscribe to subjects that cover the expressions, and filter exactly here."""
        self._listener.listen(expressions, receive)

    def ready(self, key: str) -> bool:
        """Return whether a server is connected. NATS does not reveal subscribers."""
        return self.connection.connected

    def serve(self, keys: Sequence[str], on_request: OnRequest) -> None:
        """Serve requests for these keys, in one queue group with the other nodes."""
        self._requests.serve(keys, on_request)

    def request(self, key: str, payload: bytes, on_reply: OnReply, timeout_s: float) -> RequestHandle:
        """Send a request to one of the nodes that serve `key`. `timeout_s` applies to all replies together."""
        return self._requests.request(key, payload, on_reply, timeout_s)

    def check(self, key: str) -> None:
        """Accept every valid key."""

    def diagnostics(self) -> dict[str, Any]:
        """Return the state of the connection and of the requests."""
        return {"fabric": self.name, "networked": True, **self.connection.diagnostics(), **self._requests.diagnostics()}

    def close(self) -> None:
        """Close the connection within bounded time."""
        self.connection.close()


if TYPE_CHECKING:
    _port: type[Fabric] = NatsFabric
