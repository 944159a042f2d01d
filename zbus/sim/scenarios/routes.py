"""Routes: which sample event of a declared scenario reaches which subscription, and why or why not.

The events are published once each in a simulated world without faults, so the production code decides what is
delivered. The rules (`route_rules.py`) explain it. If the rules and the delivery disagree, one of them is wrong, and
the route says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from zbus.errors import PayloadInvalid, SchemaInvalid, ZbusError
from zbus.event import Event
from zbus.keys import check_expression, matches
from zbus.payload import encode_payload
from zbus.sim import run
from zbus.sim.errors import InvariantBroken, WorldStuck
from zbus.sim.ledger import DELIVERED, GAP_REPORTED
from zbus.sim.route_rules import Sample, Topology, Verdict
from zbus.sim.world import World

from .declared import Declared, DeclaredEvent, Named, Received

SEED = 0
SPACED_S = 0.1  # between two events, so that no queue overflows
QUIET_S = 2.0  # in which events arrive that should not

Identity = tuple[int, int]


class Route(NamedTuple):
    """One event and one subscription."""

    event: int  # its number in the file, from 1
    source: str  # the node that published it
    key: str
    subscription: str
    node: str
    delivered: bool
    why: str
    expected: bool | None  # None if the file does not say what is expected of the event
    disagrees: bool = False  # the rules say something else than what was delivered

    @property
    def wrong(self) -> bool:
        """Whether it is not as expected, or cannot be explained."""
        return self.disagrees or (self.expected is not None and self.expected != self.delivered)

    @property
    def difference(self) -> str:
        """The problem, as a sentence; empty if everything is right."""
        if not self.wrong:
            return ""
        what = f"event {self.event} ({self.key} from {self.source}): subscription {self.subscription}"
        if self.disagrees:
            return f"{what}: {self.why}"
        if self.delivered:
            return f"{what} received it, but is not in `expect`: {self.why}"
        return f"{what} did not receive it, but is in `expect`: {self.why}"


class Report(NamedTuple):
    """All routes of a scenario, and the invariants that were broken on the way."""

    routes: list[Route]
    broken: list[str]

    @property
    def differences(self) -> list[str]:
        """The problems, as sentences; empty if everything is as expected."""
        return [each.difference for each in self.routes if each.wrong] + self.broken


def find_routes(declared: Declared) -> Report:
    """Publish the sample events in a simulated world, and return what happened to each."""
    observed = _Observed(declared)
    broken: list[str] = []
    try:
        run(observed.main())
    except InvariantBroken as error:
        broken = [str(each) for each in error.violations]
    return Report(observed.routes, broken)


class _Observed:
    """One run: what was published, refused and received."""

    def __init__(self, declared: Declared) -> None:
        self._declared = declared
        self._published: dict[int, Identity] = {}  # by number of the event
        self._refused: dict[int, str] = {}
        self._received: dict[tuple[str, Identity], Received] = {}  # by subscription
        self.routes: list[Route] = []

    async def main(self) -> None:
        declared = self._declared
        async with World(SEED, converge_s=declared.converge_s, limit_s=declared.limit_s) as world:
            world.without(DELIVERED, GAP_REPORTED)  # the routes report these themselves, with the reason
            await declared.start(world, self._receive)
            topology = Topology({name: node.config for name, node in world.nodes.items()})
            for number, event in enumerate(declared.event, 1):
                await self._publish(world, number, event)
                await world.run(SPACED_S)
            verdicts = {
                (number, each.name): topology.judge(_sample(event), each.subscription.keys, each.node)
                for number, event in enumerate(declared.event, 1)
                for each in declared.subscriptions
            }
            with suppress(WorldStuck):
                await world.until(lambda: self._is_complete(verdicts), declared.converge_s)
            await world.run(QUIET_S)
            self.routes = [
                self._route(number, event, each, verdicts[number, each.name])
                for number, event in enumerate(declared.event, 1)
                for each in declared.subscriptions
            ]

    async def _publish(self, world: World, number: int, event: DeclaredEvent) -> None:
        try:
            publisher = await world.nodes[event.source].bus.publisher(event.key)
            offset = await publisher.publish(event.payload, headers=event.headers or None)
        except ZbusError as error:
            self._refused[number] = str(error)
        else:
            self._published[number] = offset.identity

    def _receive(self, subscription: str, received: Received) -> None:
        event = received.event if isinstance(received, PayloadInvalid) else received
        identity: Identity | None = getattr(event, "identity", None)
        if identity is not None:
            self._received[subscription, identity] = received

    def _is_complete(self, verdicts: Mapping[tuple[int, str], Verdict]) -> bool:
        """Return whether everything arrived that should, by the rules."""
        return all(
            (name, self._published[number]) in self._received
            for (number, name), verdict in verdicts.items()
            if verdict.reaches and number in self._published
        )

    def _route(self, number: int, event: DeclaredEvent, named: Named, verdict: Verdict) -> Route:
        expected = None if event.expect is None else named.name in event.expect
        place = (number, event.source, event.key, named.name, named.node)
        if number in self._refused:
            return Route(*place, False, _line(f"not published: {self._refused[number]}"), expected)
        received = self._received.get((named.name, self._published[number]))
        why, defect = verdict.why, ""
        if received is None:
            defect = "matched but not delivered" if verdict.reaches else ""
        elif not verdict.reaches:
            defect = "delivered against the rules"
        if isinstance(received, PayloadInvalid):
            why = f"{verdict.matching!r} matches, but {self._rejection(received, named)}"
            if not self._has_schema(event, named):
                defect = "rejected without a schema"
        if defect:
            why = f"{defect}, which is a defect of zbus or of its simulator: {why}"
        return Route(*place, isinstance(received, Event), _line(why), expected, bool(defect))

    def _rejection(self, error: PayloadInvalid, named: Named) -> str:
        if isinstance(error, SchemaInvalid):
            return f"the schema of {error.expression!r} on node {named.node} rejects it: {error.reason}"
        return f"the schema {named.subscription.schema_} of the subscription rejects it: {error.reason}"

    def _has_schema(self, event: DeclaredEvent, named: Named) -> bool:
        (node,) = [each for each in self._declared.node if each.name == named.node]
        registered = [each.expression for each in node.schemas]
        return named.subscription.schema_ is not None or any(
            matches(check_expression(each), event.key) for each in registered
        )


def _line(text: str) -> str:
    return " ".join(text.split())


def _sample(event: DeclaredEvent) -> Sample:
    """Return an event as the rules see it. If its payload cannot be encoded, it was refused, and its size is unused."""
    size_bytes = 0
    with suppress(PayloadInvalid):
        size_bytes = len(encode_payload(event.payload, 1 << 30)[0])
    return Sample(event.source, event.key, size_bytes)
