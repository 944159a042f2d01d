"""What there is to see of a bus, as plain JSON values, each for what its reader may see.

Keys and expressions that a grant does not read are left out wherever they would be shown, and the keys of sessions
are shown to the session alone. The token of a session sees its own events, topics and publishers, and nothing else.
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
    """Of one bus. Every method belongs to the loop of the bus."""

    def __init__(self, bus: zbus.Bus, activity: Activity) -> None:
        self.bus, self.activity = bus, activity

    def nodes(self, grant: Permissions) -> list[dict[str, Any]]:
        """Who is there, this node first."""
        grant.check_overview()
        found = []
        for node in self.bus.nodes():
            told = node._asdict()
            for name in ("publishes", "serves"):
                told[name] = [key for key in told[name] if grant.shows(key)]
            told["subscribes"] = _covered(grant, node.subscribes)
            told |= {"started_at": iso_time(node.started_at), "last_seen": iso_time(node.last_seen)}
            found.append(told)
        return found

    def buses(self, grant: Permissions) -> list[dict[str, Any]]:
        """The buses that nodes belong to, and which nodes those are."""
        members: dict[str, list[dict[str, Any]]] = {}
        for node in self.nodes(grant):
            for bus in node["buses"]:
                members.setdefault(bus, []).append(node)
        return [
            {"bus": bus, "nodes": [node["id"] for node in nodes], "alive": sum(node["alive"] for node in nodes)}
            for bus, nodes in sorted(members.items())
        ]

    def topics(self, grant: Permissions, limit: int = TOPICS_MAX) -> list[dict[str, Any]]:
        """Keys with events since this server began, busiest first."""
        return [
            {
                "key": each.key,
                "events": each.events,
                "events_per_s": each.events_per_s,
                "bytes": each.bytes,
                "last_at": iso_time(each.last_at_ns),
            }
            for each in self.activity.topics(grant.shows, limit)
        ]

    def other(self, grant: Permissions) -> dict[str, int]:
        """Of keys that are not listed any more, as there were too many: how many, their events and bytes."""
        keys, events, size = self.activity.other if grant.sees_all else (0, 0, 0)
        return {"keys": keys, "events": events, "bytes": size}

    def publishers(self, grant: Permissions, limit: int = TOPICS_MAX) -> list[dict[str, Any]]:
        """Who published since this server began, the last first. Ids are text: they have up to 64 bits."""
        return [
            {
                "key": each.key,
                "id": str(each.publisher_id),
                "sequence": each.sequence,
                "events": each.events,
                "last_at": iso_time(each.last_at_ns),
            }
            for each in self.activity.publishers(grant.shows, limit)
        ]

    def subscribers(self, grant: Permissions) -> list[dict[str, Any]]:
        """Subscriptions that are open in this process, furthest behind first."""
        grant.check_overview()
        return [
            {**each._asdict(), "key_exprs": list(each.key_exprs)}
            for each in of(self.bus).readers()
            if _covers_all(grant, each.key_exprs)
        ]

    async def cursors(self, grant: Permissions) -> list[dict[str, Any]]:
        """Durable names, those of other processes too."""
        grant.check_overview()
        return shown_cursors(grant, await of(self.bus).positions())

    async def leases(self, grant: Permissions) -> list[dict[str, Any]]:
        """By which transports know who is there."""
        grant.check_overview()
        return await of(self.bus).leases()

    def schemas(self, grant: Permissions) -> list[dict[str, Any]]:
        """The schemas in force."""
        grant.check_overview()
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
            if grant.covers(each.expression)
        ]

    def asyncapi(self, grant: Permissions) -> dict[str, Any]:
        """Keys and schemas as an AsyncAPI document."""
        grant.check_overview()
        keys = {each["key"] for each in self.topics(grant)}
        keys |= {key for key in of(self.bus).published_keys if grant.shows(key)}
        schemas = [each for each in self.bus.schemas.list() if grant.covers(each.expression)]
        return asyncapi(self.bus.config.bus, sorted(keys), schemas)

    def stats(self, grant: Permissions) -> dict[str, Any]:
        """What `bus.stats()` tells."""
        grant.check_overview()
        return self.bus.stats()

    def records(self, grant: Permissions, after: int = 0) -> list[dict[str, Any]]:
        """What went wrong, for those who read all keys: it may be about any."""
        grant.check_overview()
        return self.activity.records.after(after) if grant.sees_all else []


def shown_cursors(grant: Permissions, found: Sequence[CursorPosition]) -> list[dict[str, Any]]:
    """Cursors whose keys may be seen."""
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
        if _covers_all(grant, each.keys)
    ]


def _covered(grant: Permissions, expressions: Iterable[str]) -> list[str]:
    return [each for each in expressions if _covers_all(grant, (each,))]


def _covers_all(grant: Permissions, expressions: Iterable[str]) -> bool:
    try:
        return all(grant.covers(check_expression(each)) for each in expressions)
    except KeyInvalid:
        return False  # what another node tells of itself may be anything
