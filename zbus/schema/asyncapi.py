"""AsyncAPI 3.0 document of a bus: its keys as channels, and its schemas as the payloads of their messages.

Each key with events is a channel, and so is each key expression with a schema: its wildcards become parameters of the
address. Every channel has an operation to send and one to receive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from zbus.keys import matches
from zbus.ports.log import Schema

VERSION = "3.0.0"

_WILD = re.compile(r"\*\*|\$\*|\*")
_MEANS = {"*": "any one segment", "**": "any number of segments, including none", "$*": "any text inside a segment"}
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_-]+")


def asyncapi(title: str, keys: Iterable[str], schemas: Sequence[Schema]) -> dict[str, Any]:
    """Return the document as a JSON-compatible dict. `schemas` are the active ones.

    >>> found = asyncapi("shop", ["shop/orders/created"], [])
    >>> found["channels"]["shop_orders_created"]["address"]
    'shop/orders/created'
    """
    names = _ChannelNames()
    named = {each.expression: names.of(each.expression) for each in schemas}
    addresses = dict.fromkeys([*named, *sorted(keys)])
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    for address in addresses:
        name = names.of(address)
        # An expression uses only its own schema, because others may match only a part of its keys.
        own = [each for each in schemas if each.expression == address or matches(each.expression, address)]
        own = own if "*" not in address else [each for each in own if each.expression == address]
        channels[name] = _channel(address, name)
        messages[name] = _message(address, own, named)
        for action in ("send", "receive"):
            operations[f"{action}_{name}"] = {
                "action": action,
                "channel": {"$ref": f"#/channels/{name}"},
                "messages": [{"$ref": f"#/channels/{name}/messages/event"}],
            }
    return {
        "asyncapi": VERSION,
        "info": {
            "title": title,
            "version": "1.0.0",
            "description": "The keys of a zbus event bus and the schemas registered for them.",
        },
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {
            "messages": messages,
            "schemas": {named[each.expression]: _embedded(each, named[each.expression]) for each in schemas},
        },
    }


class _ChannelNames:
    """A short, unique name for each address, in characters that AsyncAPI allows."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._taken: set[str] = set()

    def of(self, address: str) -> str:
        if address not in self._names:
            plain = address.replace("**", "any").replace("$*", "any").replace("*", "one")
            base = _NOT_A_NAME.sub("_", plain).strip("_") or "key"
            name, number = base, 1
            while name in self._taken:
                number += 1
                name = f"{base}_{number}"
            self._names[address] = name
            self._taken.add(name)
        return self._names[address]


def _channel(address: str, name: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {}

    def parameter(found: re.Match[str]) -> str:
        number = f"part{len(parameters) + 1}"
        parameters[number] = {"description": f"{_MEANS[found.group()]} ({found.group()} in the key expression)"}
        return "{" + number + "}"

    # Braces in a key would be read as parameters.
    literal = address.replace("{", "%7B").replace("}", "%7D")
    channel: dict[str, Any] = {
        "address": _WILD.sub(parameter, literal),
        "title": address,
        "messages": {"event": {"$ref": f"#/components/messages/{name}"}},
    }
    if parameters:
        channel["parameters"] = parameters
    return channel


def _message(address: str, schemas: Sequence[Schema], named: dict[str, str]) -> dict[str, Any]:
    message: dict[str, Any] = {"name": address.rpartition("/")[2], "title": address}
    if not schemas:
        return message | {"summary": "No schema is registered for these payloads."}
    references = [{"$ref": f"#/components/schemas/{named[each.expression]}"} for each in schemas]
    schemas_shown = ", ".join(f"{each.expression} version {each.version}, {each.mode}" for each in schemas)
    return message | {
        "summary": f"Validated against: {schemas_shown}.",
        "contentType": "application/json",
        "payload": references[0] if len(references) == 1 else {"allOf": references},
    }


def _embedded(schema: Schema, name: str) -> dict[str, Any]:
    """Return the schema as a part of another document, with its internal references adjusted."""
    prefix = f"#/components/schemas/{name}"

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(each) for each in value]
        if not isinstance(value, dict):
            return value
        found = {key: moved(each) for key, each in value.items()}
        reference = found.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            found["$ref"] = prefix + reference[1:]
        return found

    inside = {key: value for key, value in schema.schema.items() if key not in ("$schema", "$id")}
    facts = {"x-zbus-expression": schema.expression, "x-zbus-version": schema.version, "x-zbus-mode": schema.mode}
    return {**moved(inside), **facts, "x-zbus-hash": schema.hash}
