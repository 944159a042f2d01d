"""The content of liveliness tokens, and the settings of the Zenoh session that holds them."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable

import msgspec
import zenoh

from zbus.errors import ConfigInvalid
from zbus_zmq.address.options import ZmqOptions

from .discovery import NodeRecord

_decode_node = msgspec.json.Decoder(NodeRecord).decode


def tails_of(node: NodeRecord) -> set[str]:
    """Return the keys of a node's tokens without their root: one for the node, and one for each key it serves."""
    bare = msgspec.structs.replace(node, serves=())
    answers = {f"{node.node}/answers/{_pack(key.encode())}" for key in node.serves}
    return {f"{node.node}/node/{_pack(msgspec.json.encode(bare))}", *answers}


def assemble(name: str, tails: Iterable[str]) -> tuple[NodeRecord | None, int]:
    """Return the node that tokens (without its name) describe, or None, and the number of malformed tokens."""
    node, answers, invalid = None, [], 0
    for tail in sorted(tails):
        kind, _, packed = tail.partition("/")
        try:
            data = _unpack(packed)
            if kind == "answers":
                answers.append(data.decode())
            elif kind == "node":
                node = _decode_node(data)
        except (binascii.Error, msgspec.DecodeError, UnicodeError, ValueError, RecursionError):
            invalid += 1
    if node is None or node.node != name:
        return None, invalid
    return msgspec.structs.replace(node, serves=tuple(answers)), invalid


def _pack(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unpack(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def session_config(options: ZmqOptions) -> zenoh.Config:
    """Return the settings of our own session: no multicast, and only the configured endpoints."""
    if not options.zenoh_listen and not options.zenoh_connect:
        raise ConfigInvalid("discovery", "zenoh needs zenoh_listen or zenoh_connect, such as tcp/127.0.0.1:7447")
    built = zenoh.Config()
    for path, value in {
        "mode": options.zenoh_mode,
        "listen/endpoints": list(options.zenoh_listen),
        "connect/endpoints": list(options.zenoh_connect),
        "connect/retry": {"period_init_ms": 100, "period_max_ms": 2000, "period_increase_factor": 2},
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": True,  # nodes that are connected to the same node find each other
        "scouting/delay": 0,
        "transport/shared_memory/enabled": False,
    }.items():
        try:
            built.insert_json5(path, json.dumps(value))
        except zenoh.ZError as error:
            raise ConfigInvalid(f"zenoh_{path.partition('/')[0]}", str(error)) from error
    return built
