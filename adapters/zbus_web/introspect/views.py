"""Views of a bus as plain JSON values, filtered by the permissions of the client.

Keys and expressions that the client may not read are left out, and the keys of a session are shown only to that
session. A session token sees its own events, topics and publishers, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from zbus.errors import KeyInvalid
from zbus.introspection import CursorPosition, of
from zbus.keys import check_expression
from zbus.schema.asyncapi import asyncapi
from zbus_web.http.event_json import iso_time

if TYPE_CHECKING:
    import zbus
    from zbus_web.access.permissions import Permissions

    from .activity import Activity

TOPICS_MAX = 10_000


class Views:
    """The views of one bus. Every method must be called on the event loop of the bus."""

    def __init__(self, bus: zbus.Bus, activity: Activity) -> None:
        self.bus, self.activity = bus, activity

    def nodes(self, permissions: Permissions) -> list[dict[str, Any]]:
        """Return the nodes, this node first."""
        permissions.check_overview()
        found = []
        for node in self.bus.nodes():
            fields = node._asdict()
            for name in ("publishes", "serves"):
                fields[name] = [key for key in fields[name] if permissions.shows(key)]
            fields["subscribes"] = _covered(permissions, node.subscribes)
            fields |= {"started_at": iso_time(node.started_at), "last_seen": iso_time(node.last_seen)}
            found.append(fields)
        return found

    def buses(self, permissions: Permissions) -> list[dict[str, Any]]:
        """Return the buses, and the nodes of each."""
        members: dict[str, list[dict[str, Any]]] = {}
        for node in self.nodes(permissions):
            for bus in node["buses"]:
                members.setdefault(bus, []).append(node)
        return [
            {"bus": bus, "nodes": [node["id"] for node in nodes], "alive": sum(node["alive"] for node in nodes)}
            for bus, nodes in sorted(members.items())
        ]

    def topics(self, permissions: Permissions, limit: int = TOPICS_MAX) -> list[dict[str, Any]]:
        """Return the keys with events since this server started, busiest first."""
        return [
            {
                "key": each.key,
                "events": each.events,
                "events_per_s": each.events_per_s,
                "bytes": each.bytes,
                "last_at": iso_time(each.last_at_ns),
            }
            for each in self.activity.topics(permissions.shows, limit)
        ]

    def other(self, permissions: Permissions) -> dict[str, int]:
        """Return the number, events and bytes of the keys that are no longer listed because there were too many."""
        keys, events, size = self.activity.other if permissions.sees_all else (0, 0, 0)
        return {"keys": keys, "events": events, "bytes": size}

    def publishers(self, permissions: Permissions, limit: int = TOPICS_MAX) -> list[dict[str, Any]]:
        """Return the publishers since this server started, the most recent first. Ids are text: they have 64 bits."""
        return [
            {
                "key": each.key,
                "id": str(each.publisher_id),
                "sequence": each.sequence,
                "events": each.events,
                "last_at": iso_time(each.last_at_ns),
            }
            for each in self.activity.publishers(permissions.shows, limit)
        ]

    def subscriptions(self, permissions: Permissions) -> list[dict[str, Any]]:
        """Return the open subscriptions of this process, the largest lag first."""
        permissions.check_overview()
        return [
            {**each._asdict(), "key_exprs": list(each.key_exprs)}
            for each in of(self.bus).subscriptions()
            if _covers_all(permissions, each.key_exprs)
        ]

    async def cursors(self, permissions: Permissions) -> list[dict[str, Any]]:
        """Return the cursors of durable subscriptions, including those of other processes."""
        permissions.check_overview()
        return shown_cursors(permissions, await of(self.bus).positions())

    async def leases(self, permissions: Permissions) -> list[dict[str, Any]]:
        """Return the leases in the discovery registries of the transports."""
        permissions.check_overview()
        return await of(self.bus).leases()

    def schemas(self, permissions: Permissions) -> list[dict[str, Any]]:
        """Return the active schemas."""
        permissions.check_overview()
        return [
            {
                "expression": each.expression,
                "version": each.version,
                "mode": each.mode,
                "hash": each.hash,
                "schema": each.schema,
                "registered_at": iso_time(each.registered_at_ns),
            }
            for each in self.bus.schemas.list()
            if permissions.covers(each.expression)
        ]

    def asyncapi(self, permissions: Permissions) -> dict[str, Any]:
        """Return the keys and schemas as an AsyncAPI document."""
        permissions.check_overview()
        keys = {each["key"] for each in self.topics(permissions)}
        keys |= {key for key in of(self.bus).published_keys if permissions.shows(key)}
        schemas = [each for each in self.bus.schemas.list() if permissions.covers(each.expression)]
        return asyncapi(self.bus.config.bus, sorted(keys), schemas)

    def stats(self, permissions: Permissions) -> dict[str, Any]:
        """Return `bus.stats()`."""
        permissions.check_overview()
        return self.bus.stats()

    def log_records(self, permissions: Permissions, after: int = 0) -> list[dict[str, Any]]:
        """Return the log records of problems. Only clients that read all keys see them: they may be about any key."""
        permissions.check_overview()
        return self.activity.log_records.after(after) if permissions.sees_all else []


def shown_cursors(permissions: Permissions, found: Sequence[CursorPosition]) -> list[dict[str, Any]]:
    """Return the cursors whose keys the client may read."""
    return [
        {
            "name": each.name,
            "offset": each.offset,
            "lag": each.lag,
            "keys": list(each.keys),
            "updated_at": iso_time(each.updated_at_ns),
            "owner": each.owner,
        }
        for each in found
        if _covers_all(permissions, each.keys)
    ]


def _covered(permissions: Permissions, expressions: Iterable[str]) -> list[str]:
    return [each for each in expressions if _covers_all(permissions, (each,))]


def _covers_all(permissions: Permissions, expressions: Iterable[str]) -> bool:
    try:
        return all(permissions.covers(check_expression(each)) for each in expressions)
    except KeyInvalid:
        return False  # Another node may announce anything.
