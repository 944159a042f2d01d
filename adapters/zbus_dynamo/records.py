"""Discovery records: the announcements of publishers, by which subscribers find them.

Records of both generations are read: today's name their scope (`"scope": {"kind": …}`), earlier ones have a flat
namespace and component, where an empty component stands for the namespace. Today's are written.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from zbus.errors import EventInvalid
from zbus.util.malformed import MALFORMED

from .scopes import Scoped, check_place

BUCKET = "v1/event_channels"
RECORD_BYTES_MAX = 64 * 1024
_ENDPOINT = re.compile(r"tcp://(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_OTHER = re.compile(rb"[^A-Za-z0-9]")


class Channel(NamedTuple):
    """A publisher of one topic, and its ZMQ endpoint, or None if it uses another transport."""

    place: Scoped
    publisher_id: int
    endpoint: str | None


def record_key(channel: Channel) -> str:
    """Return the key of a record in its bucket."""
    return f"{channel.place.path}/{channel.publisher_id:x}"


def file_name(key: str) -> str:
    """Return a key as the name of a file: every byte but letters and digits is percent-encoded.

    >>> file_name("namespace/ns/topic/kv-events/1f")
    'namespace%2Fns%2Ftopic%2Fkv%2Devents%2F1f'
    """
    return _OTHER.sub(lambda found: b"%%%02X" % found.group()[0], key.encode()).decode()


def write(channel: Channel) -> bytes:
    """Return the JSON of a record for a ZMQ publisher."""
    return msgspec.json.encode(
        {
            "type": "EventChannel",
            "scope": _scope(channel.place),
            "topic": channel.place.topic,
            "instance_id": channel.publisher_id,
            "transport": {"kind": "Zmq", "config": {"endpoint": channel.endpoint}},
        }
    )


def read(value: bytes) -> Channel:
    """Return the channel in a record of either generation. Raises `EventInvalid` if it is malformed."""
    try:
        found: Any = msgspec.json.decode(value)
        if found["type"] != "EventChannel":
            raise EventInvalid("a discovery record of another type")
        place = Scoped(_scope_names(found), _text(found["topic"]))
        publisher_id = found["instance_id"]
        kind, config = found["transport"]["kind"], found["transport"]["config"]
        endpoint = _text(config["endpoint"]) if kind == "Zmq" else None
    except (*MALFORMED, KeyError, TypeError) as error:
        raise EventInvalid(f"not a discovery record: {type(error).__name__}: {error}") from error
    if type(publisher_id) is not int or not 0 <= publisher_id < 1 << 64:
        raise EventInvalid("not a discovery record: instance_id is not an id")
    if kind not in ("Zmq", "Nats", "ZmqBroker"):
        raise EventInvalid("not a discovery record: an unknown transport")
    if endpoint is not None:
        _check_endpoint(endpoint)
    check_place(place)
    return Channel(place, publisher_id, endpoint)


def _scope(place: Scoped) -> dict[str, Any]:
    match place.scope:
        case (namespace,):
            return {"kind": "namespace", "name": namespace}
        case (namespace, component):
            return {"kind": "component", "namespace": namespace, "component": component}
        case _:
            namespace, component, name = place.scope
            endpoint = {"namespace": namespace, "component": component, "name": name}
            return {"kind": "endpoint", "endpoint": endpoint}


def _scope_names(found: Any) -> tuple[str, ...]:
    if "scope" not in found:  # the earlier generation
        component = _text(found["component"])
        return (_text(found["namespace"]), component) if component else (_text(found["namespace"]),)
    scope = found["scope"]
    match scope["kind"]:
        case "namespace":
            return (_text(scope["name"]),)
        case "component":
            return _text(scope["namespace"]), _text(scope["component"])
        case "endpoint":
            inner = scope["endpoint"]
            return _text(inner["namespace"]), _text(inner["component"]), _text(inner["name"])
    raise EventInvalid("not a discovery record: an unknown kind of scope")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, not {type(value).__name__}")
    return value


def _check_endpoint(endpoint: str) -> None:
    """Raise `EventInvalid` unless the endpoint can be the address of a publisher, because it is passed to ZMQ."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or not 0 < int(found.group(2)) < 1 << 16:
        raise EventInvalid("not a discovery record: an endpoint is written like tcp://127.0.0.1:5555")
